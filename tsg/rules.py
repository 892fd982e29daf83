"""The invariants of a stored row, as SQL expressions, written once.

They are the CHECK constraints of the tables, what doctor counts, and what reconcile and every reading
method refuse. Each rule is a condition over the columns of one row, so that the same words serve a table
and any alias of it. A rule that comes out NULL is broken: ask for ``IS NOT TRUE``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, Protocol

import sqlalchemy as sa
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import False_, True_
from sqlalchemy.sql.expression import ColumnElement

from tsg.conditions import boolean, canonical_uuid, finite, integer, sha256_hex, truth, untruth
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
    "breaks",
    "closed",
    "constant",
    "event_rules",
    "expected_events",
    "is_not_true",
    "is_true",
    "keeps",
    "running",
    "sound",
    "stale",
    "task_rules",
    "undelivered",
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


def _one_of(column: ColumnElement[Any], words: Iterable[str]) -> Condition:
    """The same as comparisons one by one: for an IN of three words or more SQLite builds an index, a row or a run."""
    return sa.or_(*(_is(column, word) for word in words))


def _is(column: ColumnElement[Any], word: str) -> Condition:
    # As plain text: the column's own type would turn the word into a parameter.
    return sa.type_coerce(column, sa.String()) == constant(word)


def is_true(condition: ColumnElement[Any]) -> Condition:
    """That `condition` is true, and neither false nor NULL."""
    return truth(condition.self_group(against=operators.is_))


def is_not_true(condition: ColumnElement[Any]) -> Condition:
    """That `condition` is false or NULL."""
    return untruth(condition.self_group(against=operators.is_))


def _all(*conditions: Condition) -> Condition:
    """``and_``, without what is known."""
    if any(isinstance(condition, False_) for condition in conditions):
        return sa.false()
    open_ones = [condition for condition in conditions if not isinstance(condition, True_)]
    return sa.and_(*open_ones) if open_ones else sa.true()


def _any(*conditions: Condition) -> Condition:
    """``or_``, without what is known."""
    if any(isinstance(condition, True_) for condition in conditions):
        return sa.true()
    open_ones = [condition for condition in conditions if not isinstance(condition, False_)]
    return sa.or_(*open_ones) if open_ones else sa.false()


def active(c: Columns) -> Condition:
    """Not ended. The condition of the index of active tasks, word for word."""
    return sa.type_coerce(c.status, sa.String()).in_([constant(word) for word in ACTIVE_WORDS])


def awaiting_delivery(c: Columns) -> Condition:
    """Ended, with its delivery open. The condition of the index of pending deliveries, word for word."""
    return sa.and_(undelivered(c), _one_of(c.status, TERMINAL_WORDS))


def undelivered(c: Columns) -> Condition:
    """With its delivery open."""
    return _is(c.delivery_status, "pending")


def closed(c: Columns) -> Condition:
    """Ended, with its delivery closed: nothing can happen to it any more."""
    return sa.and_(_one_of(c.status, TERMINAL_WORDS), _one_of(c.delivery_status, CLOSED_WORDS))


def stale(c: Columns, now: Any, silent_since: Any) -> Condition:
    """Running, and past its deadline at `now`, or heard of last at `silent_since` though it is to send heartbeats."""
    silent = sa.and_(is_true(c.expects_heartbeat), c.updated_at <= silent_since)
    return sa.and_(running(c), sa.or_(c.deadline_at <= now, silent))


def running(c: Columns) -> Condition:
    """Running. Only with :func:`active` beside it does the index of active tasks serve."""
    return _is(c.status, "running")


ACTIVE_WORDS: Final = tuple(state.value for state in ACTIVE)
TERMINAL_WORDS: Final = tuple(state.value for state in TERMINAL)
STATUSES: Final = tuple(state.value for state in TaskStatus)
DELIVERY_STATUSES: Final = tuple(state.value for state in DeliveryStatus)
CLOSED_WORDS: Final = tuple(state.value for state in DELIVERY_REASONS)


class _State:
    """One of a row's two states, and what it is known to be."""

    def __init__(self, column: ColumnElement[Any], known: Collection[str], all_words: Collection[str]) -> None:
        self._column = column
        self._known = frozenset(known)
        #: Whether a stored value could still be none of the words at all.
        self._open = self._known == frozenset(all_words)

    def among(self, *words: str) -> Condition:
        possible = [word for word in words if word in self._known]
        if not possible:
            return sa.false()
        if not self._open and self._known <= set(words):
            return sa.true()
        return _one_of(self._column, possible)


def task_rules(
    c: Columns, statuses: Collection[str] = STATUSES, delivery_statuses: Collection[str] = DELIVERY_STATUSES
) -> tuple[Rule, ...]:
    """The rules of one task row. Their source is the ledger's contract: states, stored times, codes.

    Args:
        statuses, delivery_statuses: what the two states are known to be; from that the conditions are simplified,
            which is most of the cost of a sweep over rows that are known to be running.
    """
    status = _State(c.status, statuses, STATUSES)
    delivery = _State(c.delivery_status, delivery_statuses, DELIVERY_STATUSES)
    pending = delivery.among("pending")
    terminal = status.among(*TERMINAL_WORDS)
    required = is_true(c.delivery_required)
    beats = is_true(c.expects_heartbeat)
    # By its time, which says the same in a row whose lifecycle is right, and is one comparison.
    ended = terminal if isinstance(terminal, (True_, False_)) else c.ended_at.is_not(None)
    ends = (ended, sa.not_(pending))

    def optional(column: ColumnElement[Any], condition: Condition) -> Condition:
        return _any(column.is_(None), condition)

    return (
        Rule("id", "state", canonical_uuid(c.id)),
        Rule("parent_id", "state", optional(c.parent_id, _all(canonical_uuid(c.parent_id), c.parent_id != c.id))),
        Rule("status", "state", status.among(*STATUSES)),
        Rule("delivery_status", "state", delivery.among(*DELIVERY_STATUSES)),
        Rule("flags", "state", _all(boolean(c.delivery_required), boolean(c.expects_heartbeat))),
        Rule("payload_hash", "state", optional(c.payload_hash, sha256_hex(c.payload_hash))),
        # Silence is only forgiven where a deadline ends it; a first beat turns the flag on for good.
        Rule("expects_heartbeat", "state", _any(beats, c.timeout_seconds.is_not(None))),
        Rule(
            "lifecycle",
            "state",
            _any(
                _all(status.among("queued"), c.started_at.is_(None), c.ended_at.is_(None)),
                _all(status.among("running"), c.started_at.is_not(None), c.ended_at.is_(None)),
                _all(terminal, c.ended_at.is_not(None)),
            ),
        ),
        Rule("terminal_code", "state", optional(c.terminal_code, _fits(status, c.terminal_code, TASK_REASONS))),
        Rule(
            "delivery",
            "state",
            _any(
                pending,
                _all(terminal, required, delivery.among("delivered", "failed")),
                _all(terminal, is_not_true(c.delivery_required), delivery.among("not_applicable")),
            ),
        ),
        Rule("delivery_code", "state", optional(c.delivery_code, _fits(delivery, c.delivery_code, DELIVERY_REASONS))),
        # One a verb. Only a running task that beats can have done more than its state tells.
        Rule(
            "version",
            "state",
            _all(
                integer(c.version),
                _any(
                    _all(c.started_at.is_(None), c.version == _count(*ends)),
                    _all(c.started_at.is_not(None), c.version == _count(sa.true(), *ends)),
                    _all(c.started_at.is_not(None), beats, c.version > _count(sa.true(), *ends)),
                ),
            ),
        ),
        Rule(
            "timeout_seconds",
            "timestamp",
            optional(c.timeout_seconds, _all(finite(c.timeout_seconds), c.timeout_seconds >= _int(0))),
        ),
        Rule(
            "finite",
            "timestamp",
            _all(
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
                (_any(c.started_at.is_(None), c.timeout_seconds.is_(None)), c.deadline_at.is_(None)),
                else_=_all(c.deadline_at.is_not(None), c.deadline_at == c.started_at + c.timeout_seconds),
            ),
        ),
        Rule(
            "delivery_updated_at",
            "timestamp",
            _any(
                _all(pending, c.delivery_updated_at == c.created_at),
                _all(sa.not_(pending), c.delivery_updated_at >= c.ended_at),
            ),
        ),
    )


def event_rules(c: Columns) -> tuple[Rule, ...]:
    """The rules of one event row by itself; that it tells what its task's row tells is doctor's to see."""
    to_status = _State(c.to_status, STATUSES, STATUSES)
    to_delivery = _State(c.to_status, DELIVERY_STATUSES, DELIVERY_STATUSES)
    to_end = _all(
        _any(
            *(
                _all(c.number == _int(number), _is(c.from_status, source.value))
                for number, source in ((1, TaskStatus.QUEUED), (2, TaskStatus.RUNNING))
            )
        ),
        _one_of(c.to_status, TERMINAL_WORDS),
        _any(c.code.is_(None), _fits(to_status, c.code, TASK_REASONS)),
    )
    started = _all(
        c.number == _int(1), _is(c.from_status, "queued"), _is(c.to_status, "running"), _is(c.code, "started")
    )
    return (
        Rule("number", "event", integer(c.number)),
        Rule("kind", "event", _one_of(c.kind, EVENT_KINDS)),
        Rule("occurred_at", "event", finite(c.occurred_at)),
        Rule(
            "transition",
            "event",
            sa.case(
                (
                    _is(c.kind, "created"),
                    _all(
                        c.number == _int(0), c.from_status.is_(None), _is(c.to_status, "queued"), _is(c.code, "created")
                    ),
                ),
                (_is(c.kind, "task_transition"), _any(started, to_end)),
                (
                    _is(c.kind, "delivery_transition"),
                    _all(
                        c.number.in_([_int(2), _int(3)]),
                        _is(c.from_status, "pending"),
                        _one_of(c.to_status, (state.value for state in DELIVERY_REASONS)),
                        _any(c.code.is_(None), _fits(to_delivery, c.code, DELIVERY_REASONS)),
                    ),
                ),
                else_=sa.false(),
            ),
        ),
    )


def sound(
    c: Columns,
    statuses: Collection[str] = STATUSES,
    delivery_statuses: Collection[str] = DELIVERY_STATUSES,
) -> Condition:
    """That a task's row keeps every rule; never NULL. Arguments as :func:`task_rules`."""
    return keeps(task_rules(c, statuses, delivery_statuses))


def keeps(rules: Iterable[Rule]) -> Condition:
    """That a row keeps all of these; never NULL."""
    return is_true(_all(*(rule.holds for rule in rules)))


def breaks(rules: Iterable[Rule]) -> Condition:
    """That a row breaks one of these; never NULL."""
    return is_not_true(_all(*(rule.holds for rule in rules)))


def expected_events(
    c: Columns, statuses: Collection[str] = STATUSES, delivery_statuses: Collection[str] = DELIVERY_STATUSES
) -> ColumnElement[int]:
    """How many events the row of a task implies. Arguments as :func:`task_rules`."""
    status = _State(c.status, statuses, STATUSES)
    delivery = _State(c.delivery_status, delivery_statuses, DELIVERY_STATUSES)
    return _count(
        sa.true(),
        c.started_at.is_not(None),
        status.among(*TERMINAL_WORDS),
        sa.not_(delivery.among("pending")),
    )


def is_implied(event: Columns, task: Columns) -> Condition:
    """That an event is, in every field, the one of its number that its task's row implies."""
    start = _all(
        _is(event.kind, "task_transition"),
        _is(event.from_status, "queued"),
        _is(event.to_status, "running"),
        event.occurred_at == task.started_at,
        _is(event.code, "started"),
    )
    end = _all(
        _is(event.kind, "task_transition"),
        event.from_status == sa.case((task.started_at.is_(None), constant("queued")), else_=constant("running")),
        event.to_status == sa.type_coerce(task.status, sa.String()),
        _one_of(task.status, TERMINAL_WORDS),
        event.occurred_at == task.ended_at,
        event.code.is_not_distinct_from(task.terminal_code),
    )
    delivery = _all(
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
            _all(
                _is(event.kind, "created"),
                event.from_status.is_(None),
                _is(event.to_status, "queued"),
                event.occurred_at == task.created_at,
                _is(event.code, "created"),
            ),
        ),
        (event.number == _int(1), sa.case((unstarted, end), else_=start)),
        (event.number == _int(2), sa.case((unstarted, delivery), else_=end)),
        (event.number == _int(3), _all(sa.not_(unstarted), delivery)),
        else_=sa.false(),
    )


def _count(*conditions: Condition) -> ColumnElement[int]:
    """How many of them hold."""
    certain = sum(isinstance(condition, True_) for condition in conditions)
    total = _int(certain)
    for condition in conditions:
        if not isinstance(condition, (True_, False_)):
            total += sa.case((condition, _int(1)), else_=_int(0))
    return total


def _fits(status: _State, code: ColumnElement[Any], registry: Mapping[Any, tuple[str, ...]]) -> Condition:
    return _any(*(_all(status.among(state.value), _one_of(code, codes)) for state, codes in registry.items()))
