"""The invariants of a stored row, as SQL expressions, written once.

They are the CHECK constraints of the tables, what doctor counts, and what reconcile and every reading
method refuse. Each rule is a condition over the columns of one row, so that the same words serve a table
and any alias of it. A rule that comes out NULL is broken: ask for ``IS NOT TRUE``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ColumnElement, FunctionElement

from tsg.states import (
    ACTIVE,
    DELIVERY_REASONS,
    EVENT_KINDS,
    TASK_REASONS,
    TERMINAL,
    DeliveryStatus,
    TaskStatus,
)

__all__ = [
    "Rule",
    "active",
    "awaiting_delivery",
    "constant",
    "event_rules",
    "expected_events",
    "sound",
    "task_rules",
]

Condition = ColumnElement[bool]


class Columns(Protocol):
    """The columns of a table or of an alias, by name."""

    def __getattr__(self, name: str) -> ColumnElement[Any]: ...


class Rule(NamedTuple):
    """A named condition on one row, and the doctor's heading that a broken one counts under."""

    name: str
    heading: Literal["state", "timestamp", "event"]
    holds: Condition


def constant(word: str) -> ColumnElement[str]:
    """A fixed word of ours, rendered into the statement: partial indexes match text, not parameters."""
    return sa.literal_column(f"'{word}'", sa.String())


def _int(value: int) -> ColumnElement[int]:
    return sa.literal_column(str(value), sa.Integer())


def _among(column: ColumnElement[Any], words: Iterable[str]) -> Condition:
    # Plain text on both sides: a column's own type would turn the words into parameters.
    return sa.type_coerce(column, sa.String()).in_([constant(word) for word in words])


def _is(column: ColumnElement[Any], word: str) -> Condition:
    return sa.type_coerce(column, sa.String()) == constant(word)


def active(c: Columns) -> Condition:
    """Not ended. The condition of the index of active tasks, word for word."""
    return _among(c.status, ACTIVE_WORDS)


def awaiting_delivery(c: Columns) -> Condition:
    """Ended, with its delivery open. The condition of the index of pending deliveries, word for word."""
    return sa.and_(_is(c.delivery_status, "pending"), _among(c.status, TERMINAL_WORDS))


def running(c: Columns) -> Condition:
    """Running; with the condition of the index of active tasks repeated, so that it serves."""
    return sa.and_(active(c), _is(c.status, "running"))


ACTIVE_WORDS: Final = tuple(state.value for state in ACTIVE)
TERMINAL_WORDS: Final = tuple(state.value for state in TERMINAL)


def task_rules(c: Columns) -> tuple[Rule, ...]:
    """The rules of one task row. Their source is the ledger's contract: states, stored times, codes."""
    queued = _is(c.status, "queued")
    is_running = _is(c.status, "running")
    terminal = _among(c.status, TERMINAL_WORDS)
    pending = _is(c.delivery_status, "pending")
    closed = _among(c.delivery_status, ("delivered", "failed"))
    not_applicable = _is(c.delivery_status, "not_applicable")
    required = c.delivery_required.is_(sa.true())
    beats = c.expects_heartbeat.is_(sa.true())
    ends = _one_if(terminal) + _one_if(sa.not_(pending))

    def optional(column: ColumnElement[Any], condition: Condition) -> Condition:
        return sa.or_(column.is_(None), condition)

    return (
        Rule("id", "state", canonical_uuid(c.id)),
        Rule("parent_id", "state", optional(c.parent_id, sa.and_(canonical_uuid(c.parent_id), c.parent_id != c.id))),
        Rule("status", "state", _among(c.status, (state.value for state in TaskStatus))),
        Rule("delivery_status", "state", _among(c.delivery_status, (state.value for state in DeliveryStatus))),
        Rule("flags", "state", sa.and_(boolean(c.delivery_required), boolean(c.expects_heartbeat))),
        Rule("payload_hash", "state", optional(c.payload_hash, sha256_hex(c.payload_hash))),
        # Silence is only forgiven where a deadline ends it; a first beat turns the flag on for good.
        Rule("expects_heartbeat", "state", sa.or_(beats, c.timeout_seconds.is_not(None))),
        Rule(
            "lifecycle",
            "state",
            sa.or_(
                sa.and_(queued, c.started_at.is_(None), c.ended_at.is_(None)),
                sa.and_(is_running, c.started_at.is_not(None), c.ended_at.is_(None)),
                sa.and_(terminal, c.ended_at.is_not(None)),
            ),
        ),
        Rule("terminal_code", "state", optional(c.terminal_code, _fits(c.status, c.terminal_code, TASK_REASONS))),
        Rule(
            "delivery",
            "state",
            sa.or_(
                pending,
                sa.and_(terminal, required, closed),
                sa.and_(terminal, sa.not_(required), not_applicable),
            ),
        ),
        Rule(
            "delivery_code",
            "state",
            optional(c.delivery_code, _fits(c.delivery_status, c.delivery_code, DELIVERY_REASONS)),
        ),
        # One a verb. Only a running task that beats can have done more than its state tells.
        Rule(
            "version",
            "state",
            sa.and_(
                integer(c.version),
                sa.or_(
                    sa.and_(c.started_at.is_(None), c.version == ends),
                    sa.and_(c.started_at.is_not(None), c.version == ends + _int(1)),
                    sa.and_(c.started_at.is_not(None), beats, c.version > ends + _int(1)),
                ),
            ),
        ),
        Rule(
            "timeout_seconds",
            "timestamp",
            optional(c.timeout_seconds, sa.and_(finite(c.timeout_seconds), c.timeout_seconds >= _int(0))),
        ),
        Rule(
            "finite",
            "timestamp",
            sa.and_(
                *(finite(column) for column in (c.created_at, c.updated_at, c.delivery_updated_at)),
                *(optional(column, finite(column)) for column in (c.started_at, c.ended_at, c.deadline_at)),
            ),
        ),
        Rule("started_at", "timestamp", optional(c.started_at, c.created_at <= c.started_at)),
        Rule(
            "updated_at",
            "timestamp",
            sa.case(
                (c.ended_at.is_not(None), c.updated_at == c.ended_at),
                (c.started_at.is_(None), c.updated_at == c.created_at),
                (c.version == _int(1), c.updated_at == c.started_at),
                else_=c.updated_at >= c.started_at,
            ),
        ),
        Rule(
            "ended_at",
            "timestamp",
            optional(c.ended_at, sa.func.coalesce(c.started_at, c.created_at) <= c.ended_at),
        ),
        Rule(
            "deadline_at",
            "timestamp",
            sa.case(
                (sa.or_(c.started_at.is_(None), c.timeout_seconds.is_(None)), c.deadline_at.is_(None)),
                else_=sa.and_(c.deadline_at.is_not(None), c.deadline_at == c.started_at + c.timeout_seconds),
            ),
        ),
        Rule(
            "delivery_updated_at",
            "timestamp",
            sa.case(
                (pending, c.delivery_updated_at == c.created_at),
                else_=c.delivery_updated_at >= c.ended_at,
            ),
        ),
    )


def event_rules(c: Columns) -> tuple[Rule, ...]:
    """The rules of one event row by itself; that it tells what its task's row tells is doctor's to see."""
    to_end = sa.and_(
        sa.or_(
            *(
                sa.and_(c.number == _int(number), _is(c.from_status, source.value))
                for number, source in ((1, TaskStatus.QUEUED), (2, TaskStatus.RUNNING))
            )
        ),
        _among(c.to_status, TERMINAL_WORDS),
        sa.or_(c.code.is_(None), _fits(c.to_status, c.code, TASK_REASONS)),
    )
    started = sa.and_(
        c.number == _int(1), _is(c.from_status, "queued"), _is(c.to_status, "running"), _is(c.code, "started")
    )
    return (
        Rule("number", "event", integer(c.number)),
        Rule("kind", "event", _among(c.kind, EVENT_KINDS)),
        Rule("occurred_at", "event", finite(c.occurred_at)),
        Rule(
            "transition",
            "event",
            sa.case(
                (
                    _is(c.kind, "created"),
                    sa.and_(
                        c.number == _int(0), c.from_status.is_(None), _is(c.to_status, "queued"), _is(c.code, "created")
                    ),
                ),
                (_is(c.kind, "task_transition"), sa.or_(started, to_end)),
                (
                    _is(c.kind, "delivery_transition"),
                    sa.and_(
                        c.number.in_([_int(2), _int(3)]),
                        _is(c.from_status, "pending"),
                        _among(c.to_status, (state.value for state in DELIVERY_REASONS)),
                        sa.or_(c.code.is_(None), _fits(c.to_status, c.code, DELIVERY_REASONS)),
                    ),
                ),
                else_=sa.false(),
            ),
        ),
    )


def sound(c: Columns, heading: str | None = None) -> Condition:
    """That a task's row keeps every rule, or every rule of one heading; never NULL."""
    rules = [rule.holds for rule in task_rules(c) if heading in (None, rule.heading)]
    return sa.and_(*rules).is_(sa.true())


def expected_events(c: Columns) -> ColumnElement[int]:
    """How many events the row of a task implies."""
    return (
        _int(1)
        + _one_if(c.started_at.is_not(None))
        + _one_if(_among(c.status, TERMINAL_WORDS))
        + _one_if(sa.not_(_is(c.delivery_status, "pending")))
    )


def is_implied(event: Columns, task: Columns) -> Condition:
    """That an event is, in every field, the one of its number that its task's row implies."""
    start = sa.and_(
        _is(event.kind, "task_transition"),
        _is(event.from_status, "queued"),
        _is(event.to_status, "running"),
        event.occurred_at == task.started_at,
        _is(event.code, "started"),
    )
    end = sa.and_(
        _is(event.kind, "task_transition"),
        event.from_status == sa.case((task.started_at.is_(None), constant("queued")), else_=constant("running")),
        event.to_status == sa.type_coerce(task.status, sa.String()),
        _among(task.status, TERMINAL_WORDS),
        event.occurred_at == task.ended_at,
        event.code.is_not_distinct_from(task.terminal_code),
    )
    delivery = sa.and_(
        _is(event.kind, "delivery_transition"),
        _is(event.from_status, "pending"),
        event.to_status == sa.type_coerce(task.delivery_status, sa.String()),
        event.to_status != constant("pending"),
        event.occurred_at == task.delivery_updated_at,
        event.code.is_not_distinct_from(task.delivery_code),
    )
    unstarted = task.started_at.is_(None)
    return sa.case(
        (
            event.number == _int(0),
            sa.and_(
                _is(event.kind, "created"),
                event.from_status.is_(None),
                _is(event.to_status, "queued"),
                event.occurred_at == task.created_at,
                _is(event.code, "created"),
            ),
        ),
        (event.number == _int(1), sa.case((unstarted, end), else_=start)),
        (event.number == _int(2), sa.case((unstarted, delivery), else_=end)),
        (event.number == _int(3), sa.and_(sa.not_(unstarted), delivery)),
        else_=sa.false(),
    )


def _one_if(condition: Condition) -> ColumnElement[int]:
    return sa.case((condition, _int(1)), else_=_int(0))


def _fits(status: ColumnElement[Any], code: ColumnElement[Any], registry: Mapping[Any, tuple[str, ...]]) -> Condition:
    return sa.or_(*(sa.and_(_is(status, state.value), _among(code, codes)) for state, codes in registry.items()))


class _Typed(FunctionElement[bool]):
    """A condition on a value's type and form, which each database says in its own words."""

    type = sa.Boolean()
    inherit_cache = True
    sqlite: ClassVar[str]
    #: PostgreSQL's types leave less open; what they hold already comes down to its being there.
    postgresql: ClassVar[str] = "{0} IS NOT NULL"

    def self_group(self, against: Any = None) -> Any:
        # It renders its own brackets; without this it would be compared with 1 where it is combined.
        return self


class canonical_uuid(_Typed):  # noqa: N801  # reads as the SQL function it stands for
    """A UUID in canonical text."""

    inherit_cache = True
    # SQLite's other text functions stop at a NUL, and would not see what hides behind it.
    sqlite = "typeof({0}) = 'text' AND instr({0}, char(0)) = 0 AND {0} GLOB '" + (
        "-".join("[0-9a-f]" * count for count in (8, 4, 4, 4, 12)) + "'"
    )


class sha256_hex(_Typed):  # noqa: N801
    """64 lower-case hexadecimal digits."""

    inherit_cache = True
    sqlite = "typeof({0}) = 'text' AND instr({0}, char(0)) = 0 AND length({0}) = 64 AND {0} NOT GLOB '*[^0-9a-f]*'"
    postgresql = "length({0}) = 64 AND {0} !~ '[^0-9a-f]'"


class finite(_Typed):  # noqa: N801
    """A floating-point number, neither infinite nor NaN."""

    inherit_cache = True
    sqlite = "typeof({0}) = 'real' AND {0} BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308"
    # NaN is above everything there.
    postgresql = "{0} > '-Infinity'::float8 AND {0} < 'Infinity'::float8"


class integer(_Typed):  # noqa: N801
    """An integer."""

    inherit_cache = True
    sqlite = "typeof({0}) = 'integer'"


class boolean(_Typed):  # noqa: N801
    """True or false."""

    inherit_cache = True
    sqlite = "typeof({0}) = 'integer' AND {0} IN (0, 1)"


@compiles(_Typed, "sqlite")
@compiles(_Typed, "postgresql")
def _in_its_own_words(element: _Typed, compiler: SQLCompiler, **kw: Any) -> str:
    words: str = getattr(element, compiler.dialect.name)
    return "(" + words.format(compiler.process(element.clauses.clauses[0], **kw)) + ")"
