"""What a sweep looks for and what it writes, as statements: conditions, counts, sets.

The conditions stand here once, for preview and apply, for one transaction and for batches. Whatever a statement
writes repeats the condition that was decided on, or names the rows by a list that was made by it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from tsg import rules
from tsg.listing import in_range, listed_in
from tsg.tables import task_events, tasks

__all__ = ["Counts", "Kind", "Sweep", "statements"]

Condition = sa.ColumnElement[bool]


class Counts(NamedTuple):
    """How many rows are in conflict, are due, and of those required; and the last two without conflicts."""

    found: sa.Select[*tuple[Any, ...]]
    actionable: sa.Select[*tuple[Any, ...]]


class Kind(NamedTuple):
    """One kind of change: what is due for it, and its writes.

    Attributes:
        total: how many are due.
        counts: over all rows.
        listing: puts the rows that are due on the list, oldest first, numbered from 1.
        listed_counts: over the listed rows of a range that are still due.
        struck: takes those off the list, in a range, that can't be acted on or are no longer due.
        writes: what changes all that is due, in order; each statement changes as many rows.
        listed_writes: what changes the listed rows of a range.
    """

    total: sa.Select[*tuple[Any, ...]]
    counts: Counts
    listing: sa.Insert
    listed_counts: Counts
    struck: sa.Delete
    writes: tuple[sa.Insert | sa.Update, ...]
    listed_writes: tuple[sa.Insert | sa.Update, ...]


class Sweep(NamedTuple):
    """All of a sweep's statements."""

    active: sa.Select[*tuple[Any, ...]]
    open_deliveries: sa.Select[*tuple[Any, ...]]
    stale: Kind
    due: Kind


_EVENT_COLUMNS: Final = ("task_pk", "number", "kind", "from_status", "to_status", "occurred_at", "code")
#: The most that a version may be to be counted on; PostgreSQL's integer has no number beyond.
_LAST_VERSION: Final = sa.literal_column("2147483640", sa.Integer())


class _Change(NamedTuple):
    """What is written to the rows of one kind: the values of the row, and the event that tells of them."""

    values: dict[str, Any]
    number: sa.ColumnElement[int]
    event_kind: str
    from_status: str
    to_status: sa.ColumnElement[Any]
    code: sa.ColumnElement[Any]


@lru_cache(maxsize=4)
def statements(one_parent: bool, dialect: str) -> Sweep:
    """The statements of a sweep over all tasks or over the children of one; they take their times as parameters.

    Their parameters are ``now``, ``stale_before`` and ``due_before``, seconds since the epoch, ``parent``, and
    ``first`` and ``last``, which bound a range of the list.
    """
    c = tasks.c
    now: sa.BindParameter[float] = sa.bindparam("now", type_=sa.Double())
    stale_before: sa.BindParameter[float] = sa.bindparam("stale_before", type_=sa.Double())
    due_before: sa.BindParameter[float] = sa.bindparam("due_before", type_=sa.Double())
    among = [c.parent_id == sa.bindparam("parent")] if one_parent else []
    expired = c.deadline_at <= now
    is_stale = rules.stale(c, now, stale_before)
    is_due = sa.and_(rules.awaiting_delivery(c), c.ended_at <= due_before)
    in_time = (c.created_at <= now, c.updated_at <= now)

    ended_number = sa.literal_column("2", sa.Integer())
    delivery_number = rules.expected_events(c, rules.TERMINAL_WORDS, ("pending",))
    can_end = sa.and_(
        rules.undelivered(c),
        rules.sound(c, ("running",), ("pending",)),
        *in_time,
        c.started_at <= now,
        c.version <= _LAST_VERSION,
        _no_event_from(ended_number),
    )
    can_close = sa.and_(
        rules.sound(c, rules.TERMINAL_WORDS, ("pending",)),
        *in_time,
        c.ended_at <= now,
        c.delivery_updated_at <= now,
        c.version <= _LAST_VERSION,
        _no_event_from(delivery_number),
    )

    required = rules.is_true(c.delivery_required)
    code = sa.case((expired, rules.constant("deadline_exceeded")), else_=rules.constant("restart_stale"))
    end = sa.case((required, rules.constant("failed")), else_=rules.constant("not_applicable"))
    delivery_code = sa.case((required, rules.constant("delivery_grace_expired")), else_=rules.constant("internal_task"))
    timeout = _Change(
        {"status": rules.constant("timed_out"), "updated_at": now, "ended_at": now, "terminal_code": code},
        ended_number,
        "task_transition",
        "running",
        rules.constant("timed_out"),
        code,
    )
    delivery = _Change(
        {"delivery_status": end, "delivery_updated_at": now, "delivery_code": delivery_code},
        delivery_number,
        "delivery_transition",
        "pending",
        end,
        delivery_code,
    )
    by_parent = sa.and_(sa.true(), *among)
    return Sweep(
        active=sa.select(sa.func.count()).select_from(tasks).where(rules.active(c), *among),
        open_deliveries=sa.select(sa.func.count()).select_from(tasks).where(rules.awaiting_delivery(c), *among),
        stale=_kind(is_stale, by_parent if one_parent else rules.active(c), can_end, c.updated_at, timeout, dialect),
        due=_kind(is_due, by_parent, can_close, c.ended_at, delivery, dialect),
    )


def _no_event_from(number: sa.ColumnElement[int]) -> Condition:
    """That the task has no event yet of the number that is to be written, or of a later one."""
    return ~sa.exists().where(task_events.c.task_pk == tasks.c.pk, task_events.c.number >= number)


def _kind(
    condition: Condition,
    indexed: Condition,
    possible: Condition,
    age: sa.ColumnElement[float],
    change: _Change,
    dialect: str,
) -> Kind:
    """The statements of a kind of change.

    Args:
        possible: that the change can be made to a row; where it is false or NULL, the row is in conflict.
        indexed: what an index is found by, and is so for good; a listed row is found by its key.
    """
    c = tasks.c
    everywhere = sa.and_(indexed, condition)
    listed = listed_in(dialect)
    on_range = c.pk.in_(sa.select(listed.c.pk).where(in_range(listed)))
    number: sa.ColumnElement[int] = sa.func.row_number().over(order_by=(age, c.pk))
    keep = sa.select(c.pk).where(on_range, condition, possible)
    return Kind(
        total=sa.select(sa.func.count()).select_from(tasks).where(everywhere),
        counts=_counts(everywhere, possible),
        listing=sa.insert(listed).from_select(["n", "pk"], sa.select(number, c.pk).where(everywhere)),
        listed_counts=_counts(sa.and_(on_range, condition), possible),
        struck=sa.delete(listed).where(in_range(listed), listed.c.pk.not_in(keep)),
        writes=_writes(everywhere, change, dialect),
        listed_writes=_writes(on_range, change, dialect),
    )


def _counts(condition: Condition, possible: Condition) -> Counts:
    required = rules.is_true(tasks.c.delivery_required)
    counted = (sa.func.count(), sa.func.count().filter(required))
    # To look for a conflict is what costs: once a row.
    found = sa.select(sa.func.count().filter(rules.is_not_true(possible)), *counted).select_from(tasks).where(condition)
    actionable = sa.select(*counted).select_from(tasks).where(condition, possible)
    return Counts(found, actionable)


def _writes(condition: Condition, change: _Change, dialect: str) -> tuple[sa.Insert | sa.Update, ...]:
    c = tasks.c
    update = sa.update(tasks).where(condition).values(**change.values, version=c.version + 1)
    # None of these is of a value that the update changes, so that they can be asked before it and after it.
    told: tuple[sa.ColumnElement[Any], ...] = (
        c.pk,
        change.number,
        rules.constant(change.event_kind),
        rules.constant(change.from_status),
        change.to_status,
        sa.bindparam("now", type_=sa.Double()),
        change.code,
    )
    if dialect == "postgresql":
        # In one statement, which looks at the condition and at the rows once.
        named = (column.label(name) for name, column in zip(_EVENT_COLUMNS, told, strict=True))
        changed = update.returning(*named).cte("changed")
        return (sa.insert(task_events).from_select(_EVENT_COLUMNS, sa.select(changed)),)
    # In the order of the events' own key; as an expression, or SQLite would scan all tasks in that order.
    source = sa.select(*told).where(condition).order_by(c.pk + sa.literal_column("0"))
    return sa.insert(task_events).from_select(_EVENT_COLUMNS, source), update
