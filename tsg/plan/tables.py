"""The plan layer's tables, as they stand at head. Free text is here and nowhere in the ledger.

An attempt is a ledger task, and has its id. There is no foreign key between the two: the ledger lets go of what is
history (``tsg prune``) while a plan may still tell of it. That both agree is doctor's to see.

How many blockers of a step are still open is stored with the step, so that what is ready is found by an index; it
changes in the transaction that changes a blocker, and doctor counts again. JSON is kept as text of ASCII characters,
which both databases hold whatever is in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

from tsg.plan.scheduling import Backoff, OnExhausted, PlanStatus, StepStatus
from tsg.states import TERMINAL
from tsg.tables import NAMING, PLAN_VERSION_TABLE, TaskId

__all__ = [
    "JsonObject",
    "agents",
    "attempts",
    "dependencies",
    "dispatches",
    "expected",
    "learnings",
    "metadata",
    "plans",
    "runs",
    "steps",
    "version_table",
]

metadata: Final = sa.MetaData(naming_convention=NAMING)


class JsonObject(TypeDecorator[Any]):
    """A JSON object, written as the text that :func:`tsg.plan.fields.object_from` makes of it, read as a ``dict``."""

    impl = sa.Text
    cache_ok = True

    def process_result_value(self, value: str | None, dialect: Dialect) -> dict[str, Any] | None:
        return None if value is None else json.loads(value)


_Key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _one_of(column: str, words: Iterable[str], *, optional: bool = False) -> sa.CheckConstraint:
    among = " OR ".join(f"{column} = '{word}'" for word in words)
    return sa.CheckConstraint(f"{column} IS NULL OR {among}" if optional else among, name=column)


def _policy() -> Iterable[sa.Column[object]]:
    """The columns of a retry policy, and of what else a plan sets for its steps."""
    yield sa.Column("timeout_seconds", sa.Double())
    yield sa.Column("retries", sa.Integer(), nullable=False)
    yield sa.Column("backoff", sa.Text(), nullable=False)
    yield sa.Column("base_seconds", sa.Double())
    yield sa.Column("factor", sa.Double())
    yield sa.Column("cap_seconds", sa.Double())
    yield sa.Column("fallback_agent", sa.Text())
    yield sa.Column("partial_ok", sa.Boolean(), nullable=False)


def _words(kind: type[StrEnum]) -> tuple[str, ...]:
    return tuple(member.value for member in kind)


plans: Final = sa.Table(
    "tsg_plans",
    metadata,
    sa.Column("pk", _Key, sa.Identity(), primary_key=True),
    sa.Column("name", sa.Text(), nullable=False, unique=True),
    sa.Column("root_id", TaskId(), nullable=False, unique=True),
    sa.Column("description", sa.Text()),
    sa.Column("status", sa.Text(), nullable=False),
    sa.Column("on_exhausted", sa.Text(), nullable=False),
    *_policy(),
    # How long an attempt that sends heartbeats may be silent.
    sa.Column("grace_seconds", sa.Double(), nullable=False),
    # The number of the next step's key; a key is never used again.
    sa.Column("next_number", sa.Integer(), nullable=False),
    sa.Column("created_at", sa.Double(), nullable=False),
    sa.Column("closed_at", sa.Double()),
    _one_of("status", _words(PlanStatus)),
    _one_of("on_exhausted", _words(OnExhausted)),
    _one_of("backoff", _words(Backoff)),
    sa.CheckConstraint("retries >= 0", name="retries"),
    sa.CheckConstraint("grace_seconds >= 0", name="grace_seconds"),
    sa.CheckConstraint("(closed_at IS NOT NULL) = (status = 'completed' OR status = 'cancelled')", name="closed_at"),
)

#: How a plan is carried out; a row a plan. One that is worked through by hand has little in it.
runs: Final = sa.Table(
    "tsg_plan_runs",
    metadata,
    sa.Column(
        "plan_pk", _Key, sa.ForeignKey("tsg_plans.pk", ondelete="CASCADE"), primary_key=True, autoincrement=False
    ),
    # Who does a step that has no owner, and in which session of theirs.
    sa.Column("agent", sa.Text()),
    sa.Column("session_name", sa.Text()),
    # Something could not be delivered, and the plan is failed for that, whatever its steps are.
    sa.Column("halted", sa.Boolean(), nullable=False),
    # How often it has gone on after it was failed.
    sa.Column("global_retry", sa.Integer(), nullable=False),
    # The page that tells how it stands.
    sa.Column("cockpit", sa.Text()),
    sa.Column("theme", sa.Text()),
    # The document of a long task that it was read from, without its steps, to be written back as it was.
    sa.Column("source", sa.Text()),
    sa.CheckConstraint("global_retry >= 0", name="global_retry"),
)

steps: Final = sa.Table(
    "tsg_plan_steps",
    metadata,
    sa.Column("pk", _Key, sa.Identity(), primary_key=True),
    sa.Column("plan_pk", _Key, sa.ForeignKey("tsg_plans.pk", ondelete="CASCADE"), nullable=False),
    # Its place in the order of creation, which is also the order in which steps are claimed.
    sa.Column("number", sa.Integer(), nullable=False),
    sa.Column("key", sa.Text(), nullable=False),
    sa.Column("subject", sa.Text(), nullable=False),
    sa.Column("description", sa.Text()),
    sa.Column("active_form", sa.Text()),
    sa.Column("status", sa.Text(), nullable=False),
    sa.Column("owner", sa.Text()),
    sa.Column("metadata", JsonObject(), nullable=False),
    sa.Column("params", JsonObject(), nullable=False),
    sa.Column("thread_id", sa.Text()),
    sa.Column("session_name", sa.Text()),
    *_policy(),
    sa.Column("session_id", sa.Text()),
    sa.Column("session_resume", sa.Text()),
    sa.Column("output", sa.Text()),
    sa.Column("error", sa.Text()),
    # Tries that have failed since the count was last fresh.
    sa.Column("failures", sa.Integer(), nullable=False),
    sa.Column("fell_back", sa.Boolean(), nullable=False),
    # Before which a retry is not ready.
    sa.Column("due_at", sa.Double()),
    sa.Column("open_blockers", sa.Integer(), nullable=False),
    sa.Column("attempts", sa.Integer(), nullable=False),
    # The live attempt's id, which is its ledger task's.
    sa.Column("attempt_id", TaskId(), unique=True),
    sa.Column("created_at", sa.Double(), nullable=False),
    sa.Column("changed_at", sa.Double(), nullable=False),
    sa.Column("completed_at", sa.Double()),
    # The document that it was read from, to be written back as it was.
    sa.Column("source", sa.Text()),
    sa.UniqueConstraint("plan_pk", "number", name="uq_tsg_plan_steps_number"),
    sa.UniqueConstraint("plan_pk", "key", name="uq_tsg_plan_steps_key"),
    _one_of("status", _words(StepStatus)),
    _one_of("backoff", _words(Backoff)),
    sa.CheckConstraint("(attempt_id IS NOT NULL) = (status = 'in_progress')", name="attempt_id"),
    sa.CheckConstraint("(completed_at IS NOT NULL) = (status = 'completed')", name="completed_at"),
    sa.CheckConstraint("due_at IS NULL OR status = 'pending'", name="due_at"),
    sa.CheckConstraint("open_blockers >= 0 AND attempts >= 0 AND failures >= 0 AND retries >= 0", name="counts"),
    sa.CheckConstraint("status <> 'in_progress' OR (open_blockers = 0 AND attempts > 0)", name="in_progress"),
)

#: Each edge once: the step, and what it waits for.
dependencies: Final = sa.Table(
    "tsg_plan_dependencies",
    metadata,
    sa.Column("step_pk", _Key, sa.ForeignKey("tsg_plan_steps.pk", ondelete="CASCADE"), primary_key=True),
    sa.Column("blocker_pk", _Key, sa.ForeignKey("tsg_plan_steps.pk", ondelete="CASCADE"), primary_key=True),
    # The order in which a step's blockers were given.
    sa.Column("place", sa.Integer(), nullable=False),
    sa.CheckConstraint("step_pk <> blocker_pk", name="itself"),
)

#: What a step is to block as soon as there is a step with that key.
expected: Final = sa.Table(
    "tsg_plan_expected",
    metadata,
    sa.Column("blocker_pk", _Key, sa.ForeignKey("tsg_plan_steps.pk", ondelete="CASCADE"), primary_key=True),
    sa.Column("key", sa.Text(), primary_key=True),
)

attempts: Final = sa.Table(
    "tsg_plan_attempts",
    metadata,
    sa.Column("id", TaskId(), primary_key=True),
    sa.Column("step_pk", _Key, sa.ForeignKey("tsg_plan_steps.pk", ondelete="CASCADE"), nullable=False),
    sa.Column("number", sa.Integer(), nullable=False),
    sa.Column("agent", sa.Text()),
    sa.Column("session_id", sa.Text()),
    sa.Column("opened_at", sa.Double(), nullable=False),
    sa.Column("output", sa.Text()),
    sa.Column("error", sa.Text()),
    # How it ended, in the ledger's word; null until that was folded into the step.
    sa.Column("ended_as", sa.Text()),
    sa.Column("ended_at", sa.Double()),
    sa.UniqueConstraint("step_pk", "number", name="uq_tsg_plan_attempts_number"),
    _one_of("ended_as", (status.value for status in TERMINAL), optional=True),
    sa.CheckConstraint("(ended_at IS NULL) = (ended_as IS NULL)", name="ended_at"),
)

#: Attempts on their way to an agent. A row goes as soon as the attempt is started or over.
dispatches: Final = sa.Table(
    "tsg_plan_dispatches",
    metadata,
    sa.Column("id", TaskId(), sa.ForeignKey("tsg_plan_attempts.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("agent", sa.Text(), nullable=False),
    sa.Column("session", sa.Text(), nullable=False),
    # How often it was sent.
    sa.Column("deliveries", sa.Integer(), nullable=False),
    # Until when whoever sends it has the time for that; then another may send it once more.
    sa.Column("lease_until", sa.Double()),
    # Since when it lies in the agent's inbox, for the agent to take.
    sa.Column("inbox_at", sa.Double()),
    sa.CheckConstraint("lease_until IS NOT NULL OR inbox_at IS NOT NULL", name="lease_until"),
    sa.CheckConstraint("deliveries > 0", name="deliveries"),
)

#: How many sessions an agent has had in a plan.
agents: Final = sa.Table(
    "tsg_plan_agents",
    metadata,
    sa.Column("plan_pk", _Key, sa.ForeignKey("tsg_plans.pk", ondelete="CASCADE"), primary_key=True),
    sa.Column("agent", sa.Text(), primary_key=True),
    sa.Column("sessions", sa.Integer(), nullable=False),
)

learnings: Final = sa.Table(
    "tsg_plan_learnings",
    metadata,
    sa.Column("pk", _Key, sa.Identity(), primary_key=True),
    sa.Column("step_pk", _Key, sa.ForeignKey("tsg_plan_steps.pk", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("text", sa.Text(), nullable=False),
    sa.Column("learned_at", sa.Double(), nullable=False),
)

# What may be claimed, in the order in which it is; no other row is in it.
_CLAIMABLE: Final = sa.text("status = 'pending' AND open_blockers = 0")
sa.Index(
    "ix_tsg_plan_steps_claimable",
    steps.c.plan_pk,
    steps.c.number,
    sqlite_where=_CLAIMABLE,
    postgresql_where=_CLAIMABLE,
)
_LIVE: Final = sa.text("attempt_id IS NOT NULL")
sa.Index("ix_tsg_plan_steps_live", steps.c.plan_pk, sqlite_where=_LIVE, postgresql_where=_LIVE)
sa.Index("ix_tsg_plan_steps_status", steps.c.plan_pk, steps.c.status)
sa.Index("ix_tsg_plan_dependencies_blocker_pk", dependencies.c.blocker_pk)
sa.Index("ix_tsg_plan_expected_key", expected.c.key)
_IN_INBOX: Final = sa.text("inbox_at IS NOT NULL")
sa.Index(
    "ix_tsg_plan_dispatches_inbox",
    dispatches.c.agent,
    dispatches.c.inbox_at,
    sqlite_where=_IN_INBOX,
    postgresql_where=_IN_INBOX,
)

#: As Alembic makes it; apart from the metadata, since it is Alembic's to create.
version_table: Final = sa.Table(
    PLAN_VERSION_TABLE,
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name=f"{PLAN_VERSION_TABLE}_pkc"),
)
