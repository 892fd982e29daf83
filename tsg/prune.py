"""Prune: let history go that nobody waits for any more, whole tasks with all their events, and nothing else.

What may go has ended, its delivery is closed, both for long enough, it breaks no rule, and no child of it stays. A
file of SQLite's keeps its size: the room is used again, and only ``VACUUM`` gives it back.
"""

from __future__ import annotations

import time
from functools import cache, partial
from typing import Any, NamedTuple, TypedDict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tsg import listing, rules, values
from tsg.engine import refusing, snapshot
from tsg.errors import StateConflict
from tsg.listing import Progress, Transactions
from tsg.states import Clock
from tsg.tables import task_events, tasks

__all__ = ["Report", "apply_in_batches", "preview"]


class Report(TypedDict):
    """What a run let go, or would let go. Counts only, never an id.

    Keys:
        dry_run, applied: which of the two it was.
        closed_examined: tasks that have ended, with their delivery closed.
        tasks_pruned, events_pruned: those that go, and their events.
        recent_retained: closed not long enough ago.
        parents_retained: old enough, but something below them stays.
        conflicts_skipped: old enough, but the row breaks a rule or its events are not as many as it implies.
        batches: transactions that it took.
    """

    dry_run: bool
    applied: bool
    closed_examined: int
    tasks_pruned: int
    events_pruned: int
    recent_retained: int
    parents_retained: int
    conflicts_skipped: int
    batches: int


def preview(connection: Connection, older_than_seconds: float, *, batch_size: int, clock: Clock = time.time) -> Report:
    """What :func:`apply_in_batches` would let go; nothing is written."""
    with refusing(), snapshot(connection):
        found = _Found.by(connection, older_than_seconds, clock)
        gone, events = connection.execute(_statements(connection.dialect.name).dry_run, found.parameters).one()
        return found.report(gone, int(events or 0), listing.number_of_parts(gone, batch_size), applied=False)


def apply_in_batches(
    connection: Connection,
    older_than_seconds: float,
    in_transaction: Transactions,
    *,
    batch_size: int,
    clock: Clock = time.time,
    progress: Progress | None = None,
) -> Report:
    """Let go of what closed longer ago than `older_than_seconds`, children before their parents.

    Args:
        connection: without a transaction; it keeps the list.
        in_transaction: does a piece of work in a transaction of its own on `connection`, more than once if need be.
        batch_size: the most tasks that go in one transaction.
        progress: called with how many tasks have been looked at and how many there are.

    Raises:
        StateConflict: a table of the application's refers to a task and does not let it go; what went before is gone.
    """
    statements = _statements(connection.dialect.name)

    def begin() -> tuple[_Found, int]:
        found = _Found.by(connection, older_than_seconds, clock)
        return found, listing.make(connection, statements.listing, found.parameters)

    found, listed = in_transaction(begin)
    gone, events = 0, 0
    for first, last in listing.parts(listed, batch_size):
        part = in_transaction(partial(_let_go, connection, statements, found.parameters, first, last, listed))
        gone, events = gone + part.tasks, events + part.events
        if progress is not None:
            progress(last, listed)
    return found.report(gone, events, listing.number_of_parts(listed, batch_size), applied=True)


class _Gone(NamedTuple):
    tasks: int
    events: int


def _let_go(
    connection: Connection, statements: _Statements, parameters: dict[str, Any], first: int, last: int, listed: int
) -> _Gone:
    part = parameters | {"first": first, "last": last}
    # Since they were listed a child may have come, or another run have let them go and a new task got the key.
    connection.execute(statements.struck, part)
    events = connection.execute(statements.events, part).scalar_one()
    try:
        gone = listing.number_written(connection, statements.delete, part)
    except sa.exc.IntegrityError:
        # On a server a child may come even now; and then it is looked at again.
        raise StateConflict("something refers to a task that was to go, and keeps it", retriable=True) from None
    if last == listed:
        listing.drop(connection)
    return _Gone(gone, events)


class _Found(NamedTuple):
    parameters: dict[str, Any]
    closed: int
    old: int
    eligible: int

    @classmethod
    def by(cls, connection: Connection, older_than_seconds: float, clock: Clock) -> _Found:
        statements = _statements(connection.dialect.name)
        closed = connection.execute(statements.closed).scalar_one()
        parameters = {"before": values.clock_reading(clock) - older_than_seconds}
        old, eligible = connection.execute(statements.found, parameters).one()
        return cls(parameters, closed, old, eligible)

    def report(self, gone: int, events: int, batches: int, *, applied: bool) -> Report:
        return Report(
            dry_run=not applied,
            applied=applied,
            closed_examined=self.closed,
            tasks_pruned=gone,
            events_pruned=events,
            recent_retained=self.closed - self.old,
            parents_retained=self.eligible - gone,
            conflicts_skipped=self.old - self.eligible,
            batches=batches,
        )


class _Statements(NamedTuple):
    """All statements of a run.

    Attributes:
        closed: how many could ever go.
        found: how many closed before ``before``; and of those, how many break nothing.
        dry_run: how many of those go, and with how many events.
        listing: lists them, the last one made first, so that children go before their parents.
        struck: takes off the list, in a range, what may not go any more, or has something below it that stays.
        events, delete: of a range.
    """

    closed: sa.Select[*tuple[Any, ...]]
    found: sa.Select[*tuple[Any, ...]]
    dry_run: sa.Select[*tuple[Any, ...]]
    listing: sa.Insert
    struck: sa.Delete
    events: sa.Select[*tuple[Any, ...]]
    delete: sa.Delete


@cache
def _statements(dialect: str) -> _Statements:
    c = tasks.c
    child = tasks.alias("child")
    listed = listing.listed_in(dialect)
    count = sa.func.count
    before: sa.BindParameter[float] = sa.bindparam("before", type_=sa.Double())

    is_closed = rules.closed(c)
    is_old = sa.and_(is_closed, c.delivery_updated_at <= before)
    numbered = sa.select(count()).where(task_events.c.task_pk == c.pk).scalar_subquery()
    is_whole = sa.and_(
        rules.sound(c, rules.TERMINAL_WORDS, rules.CLOSED_WORDS),
        numbered == rules.expected_events(c, rules.TERMINAL_WORDS, rules.CLOSED_WORDS),
    )

    # From every task that stays and has a parent, all that is above it stays.
    goes_by_itself = sa.and_(is_old, is_whole)
    kept = (
        sa.select(c.parent_id.label("id"))
        .where(c.parent_id.is_not(None), rules.is_not_true(goes_by_itself))
        .cte("kept", recursive=True)
    )
    above = tasks.alias("above")
    kept = kept.union(
        sa.select(above.c.parent_id)
        .select_from(above.join(kept, above.c.id == kept.c.id))
        .where(above.c.parent_id.is_not(None))
    )
    goes = sa.select(c.pk, rules.expected_events(c, rules.TERMINAL_WORDS, rules.CLOSED_WORDS).label("events"))
    goes = goes.select_from(tasks.outerjoin(kept, kept.c.id == c.id)).where(goes_by_itself, kept.c.id.is_(None))
    going = goes.subquery("going")
    number: sa.ColumnElement[int] = sa.func.row_number().over(order_by=going.c.pk.desc())

    keys = sa.select(listed.c.pk).where(listing.in_range(listed))
    below = sa.exists().where(child.c.parent_id == c.id, child.c.pk.not_in(keys))
    stays = (
        sa.select(c.pk, c.parent_id)
        .where(c.pk.in_(keys), sa.or_(rules.is_not_true(goes_by_itself), below))
        .cte("stays", recursive=True)
    )
    stays = stays.union(
        sa.select(above.c.pk, above.c.parent_id)
        .select_from(above.join(stays, above.c.id == stays.c.parent_id))
        # Only there does it say something new; and without it PostgreSQL would read all tasks to look for a few.
        .where(*([above.c.pk.in_(keys)] if dialect == "postgresql" else []))
    )
    return _Statements(
        closed=sa.select(count()).select_from(tasks).where(is_closed),
        found=sa.select(count(), count().filter(is_whole)).select_from(tasks).where(is_old),
        dry_run=sa.select(count(), sa.func.sum(going.c.events)).select_from(going),
        listing=sa.insert(listed).from_select(["n", "pk"], sa.select(number, going.c.pk)),
        struck=sa.delete(listed).where(listing.in_range(listed), listed.c.pk.in_(sa.select(stays.c.pk))),
        events=sa.select(count()).select_from(task_events).where(task_events.c.task_pk.in_(keys)),
        delete=sa.delete(tasks).where(c.pk.in_(keys)),
    )
