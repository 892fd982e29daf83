"""The ledger's tables, as they stand at head. The models map them; everything set-based queries them.

A task has an integer key ``pk`` beside its public ``id``, and its events are clustered on ``(task_pk,
number)``: history lies together, a doubled or lost event shows in its number, and a set of a million
transitions writes in order. Every constraint and index is named.

The tables stand apart from the models so that the command line and the set-based work need no ORM, and apart from
their constraints, indexes and triggers (:mod:`tsg.ddl`), which only those need who make or compare tables.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.types import UUID, TypeDecorator, TypeEngine

from tsg import values
from tsg.errors import InvalidInput, StateConflict
from tsg.states import DeliveryStatus, TaskStatus

__all__ = [
    "PLAN_PREFIX",
    "PLAN_VERSION_TABLE",
    "PREFIX",
    "VERSION_TABLE",
    "metadata",
    "task_events",
    "tasks",
    "version_table",
]

#: All tables of ours start so, whatever database they live in.
PREFIX: Final = "tsg_"
#: The tables of the plan layer, which the ledger does not look at, start so; and where Alembic keeps its revision.
PLAN_PREFIX: Final = "tsg_plan"
PLAN_VERSION_TABLE: Final = "tsg_plan_alembic_version"
#: Where Alembic keeps the ledger's revision; never a host's own ``alembic_version``.
VERSION_TABLE: Final = "tsg_alembic_version"

_State = TypeVar("_State", TaskStatus, DeliveryStatus)


def _short_text(length: int) -> sa.types.TypeEngine[str]:
    """Text; on PostgreSQL without a length, since it would put casts into every rule, and other ones once dumped."""
    return sa.String(length).with_variant(sa.Text(), "postgresql")


class StateText(TypeDecorator[Any]):
    """A state as its text in the database and as its enum in Python."""

    impl = sa.String
    cache_ok = True

    def __init__(self, states: type[TaskStatus] | type[DeliveryStatus]) -> None:
        super().__init__(16)
        self.states = states
        self._by_text: dict[str, Enum] = {state.value: state for state in states}

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        # As it is: adapted to a driver, a text would be a varchar again.
        return sa.Text() if dialect.name == "postgresql" else sa.String(16)

    def process_bind_param(self, value: object, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: object, dialect: Dialect) -> Enum | None:
        if value is None:
            return None
        try:
            return self._by_text[value]  # type: ignore[index]  # damage may have stored any type
        except (KeyError, TypeError):
            raise StateConflict("a stored state is none of the known ones; run doctor") from None


class _InvalidId(InvalidInput, sa.exc.DontWrapMixin):
    """An :exc:`InvalidInput` that SQLAlchemy lets through as it is."""


class TaskId(TypeDecorator[str]):
    """A UUID as canonical text, whatever written form it is compared with.

    Raises:
        InvalidInput: compared with, or set to, what is no UUID.
    """

    impl = sa.String
    cache_ok = True

    def __init__(self) -> None:
        super().__init__(36)

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(UUID(as_uuid=False))
        return dialect.type_descriptor(sa.String(36))

    def process_bind_param(self, value: object, dialect: Dialect) -> str | None:
        try:
            return values.optional_id(value)
        except InvalidInput as error:
            raise _InvalidId(*error.args) from None


#: How constraints and indexes are called where nothing else is said.
NAMING: Final = {
    "pk": "pk_%(table_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "ix": "ix_%(table_name)s_%(column_0_name)s",
}

metadata: Final = sa.MetaData(naming_convention=NAMING)


_Key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

tasks: Final = sa.Table(
    "tsg_tasks",
    metadata,
    sa.Column("pk", _Key, sa.Identity(), primary_key=True),
    sa.Column("id", TaskId(), nullable=False, unique=True),
    sa.Column("parent_id", TaskId(), sa.ForeignKey("tsg_tasks.id")),
    sa.Column("status", StateText(TaskStatus), nullable=False),
    sa.Column("delivery_status", StateText(DeliveryStatus), nullable=False),
    sa.Column("delivery_required", sa.Boolean(), nullable=False),
    sa.Column("expects_heartbeat", sa.Boolean(), nullable=False),
    sa.Column("payload_hash", _short_text(64)),
    sa.Column("timeout_seconds", sa.Double()),
    sa.Column("created_at", sa.Double(), nullable=False),
    sa.Column("started_at", sa.Double()),
    sa.Column("updated_at", sa.Double(), nullable=False),
    sa.Column("ended_at", sa.Double()),
    sa.Column("deadline_at", sa.Double()),
    sa.Column("delivery_updated_at", sa.Double(), nullable=False),
    sa.Column("terminal_code", _short_text(32)),
    sa.Column("delivery_code", _short_text(32)),
    sa.Column("version", sa.Integer(), nullable=False),
)

task_events: Final = sa.Table(
    "tsg_task_events",
    metadata,
    sa.Column("task_pk", _Key, sa.ForeignKey("tsg_tasks.pk", ondelete="CASCADE"), primary_key=True),
    sa.Column("number", sa.SmallInteger(), primary_key=True, autoincrement=False),
    sa.Column("kind", _short_text(20), nullable=False),
    sa.Column("from_status", _short_text(16)),
    sa.Column("to_status", _short_text(16), nullable=False),
    sa.Column("occurred_at", sa.Double(), nullable=False),
    sa.Column("code", _short_text(32)),
    sqlite_with_rowid=False,
)

#: As Alembic makes it; apart from the metadata, since it is Alembic's to create.
version_table: Final = sa.Table(
    VERSION_TABLE,
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
)
