"""Reconcile: close, after explicit deadlines and graces, what nobody vouches for. Never guess success.

One decision time for a whole run, the same conditions for preview and apply, and sets instead of rows: no task
is carried into Python, so that a million cost no memory. Every write repeats the condition that it was
decided on, and what is reported is what was written.

The functions here run inside the caller's transaction and never commit. For an exact report that must be one
snapshot: any on SQLite, one at REPEATABLE READ on PostgreSQL, where a concurrent writer may then make it fail
(SQLSTATE 40001) and be tried again. :meth:`tsg.Ledger.reconcile` does all that by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, NotRequired, TypedDict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tsg import listing, sweep, values
from tsg.engine import refusing, require_transaction, snapshot, unchecked
from tsg.errors import InvalidInput, StateConflict, TaskNotFound
from tsg.listing import Progress, Transactions
from tsg.sessions import Session, clock_of, connection_of
from tsg.states import Clock
from tsg.tables import tasks

__all__ = ["ReconcilePolicy", "Report", "apply", "apply_in_batches", "preview"]


class Report(TypedDict):
    """What a run changed, or would change. Counts only, never an id.

    Keys:
        dry_run, applied: which of the two it was.
        active_examined: tasks queued or running.
        tasks_timed_out: running ones past their deadline, or silent for longer than the grace.
        fresh_active_retained: the other active ones.
        pending_delivery_examined: ended tasks with their delivery open, those of this run included.
        deliveries_failed, deliveries_not_applicable: open for longer than the grace, by whether one was due.
        pending_delivery_retained: the other open ones.
        conflicts_skipped: rows passed over; only where that was asked for, and in batches.
        batches: transactions that the changes took; only in batches.
    """

    dry_run: bool
    applied: bool
    active_examined: int
    tasks_timed_out: int
    fresh_active_retained: int
    pending_delivery_examined: int
    deliveries_failed: int
    deliveries_not_applicable: int
    pending_delivery_retained: int
    conflicts_skipped: NotRequired[int]
    batches: NotRequired[int]


@dataclass(frozen=True)
class ReconcilePolicy:
    """How long silence, and an open delivery, are let be.

    Args:
        active_grace_seconds: since a running task was last heard of.
        delivery_grace_seconds: since an ended task whose delivery is open has ended.

    Raises:
        InvalidInput: not finite, or negative.
    """

    active_grace_seconds: float = 600.0
    delivery_grace_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("active_grace_seconds", "delivery_grace_seconds"):
            object.__setattr__(self, name, values.non_negative(getattr(self, name), "a grace"))


def preview(
    target: Connection | Session,
    policy: ReconcilePolicy,
    *,
    now: float | None = None,
    skip_conflicts: bool = False,
    parent_id: object = None,
    batch_size: int | None = None,
    clock: Clock | None = None,
) -> Report:
    """What :func:`apply` would do at this time; nothing is written.

    Args:
        target: a connection or session, in whatever transaction it has.
        now: the decision time, seconds since the epoch; by default `clock`, read once the snapshot is fixed,
            so that a heartbeat that lands meanwhile can't look like the future.
        clock: by default the session's (see :class:`tsg.Task`); on a connection the server's, or this machine's.
        skip_conflicts: pass over rows that can't be acted on, and count them, instead of refusing.
        parent_id: only the direct children of this task.
        batch_size: report what :func:`apply_in_batches` would.

    Raises:
        InvalidInput: a malformed argument.
        StateConflict: a row to be changed breaks a rule, or has a time later than `now`.
        TaskNotFound: there is no such parent.
    """
    size = None if batch_size is None else values.at_least_one(batch_size, "batch_size")
    with refusing():
        connection = connection_of(target)
        with snapshot(connection):
            skip = values.flag(skip_conflicts, "skip_conflicts") or size is not None
            read = clock_of(target) if clock is None else clock
            run = _Run.begin(connection, policy, now, read, skip_conflicts=skip, parent_id=parent_id)
            stale = run.find(run.statements.stale.counts)
            due = run.find(run.statements.due.counts)
            if run.closes_at_once:
                due = due.and_also(stale._replace(conflicts=0))
            batches = None
            if size is not None:
                batches = sum(listing.number_of_parts(sum(found), size) for found in (stale, due))
            examined = run.count(run.statements.open_deliveries) + stale.actionable
            return run.report(stale, due, examined, applied=False, batches=batches)


def apply(
    target: Connection | Session,
    policy: ReconcilePolicy,
    *,
    now: float | None = None,
    skip_conflicts: bool = False,
    parent_id: object = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> Report:
    """Time out what is stale and close the deliveries that are overdue, each with its event.

    Arguments and errors as for :func:`preview`. Where it raises, the caller's transaction must be rolled back.

    Args:
        progress: called whenever a step of the work is done.

    Raises:
        StateConflict: also where somebody else changed a row in the middle, which no isolation that this
            asks for allows.
    """
    values.optional_callable(progress, "progress")
    with refusing():
        connection = connection_of(target)
        require_transaction(connection)
        read = clock_of(target) if clock is None else clock
        run = _Run.begin(connection, policy, now, read, skip_conflicts=skip_conflicts, parent_id=parent_id)
        stale = run.find(run.statements.stale.counts)
        examined = run.count(run.statements.open_deliveries) + stale.actionable
        run.write(run.statements.stale, stale)
        due = run.find(run.statements.due.counts)
        if progress is not None:
            progress(stale.actionable, stale.actionable + due.actionable)
        run.write(run.statements.due, due)
        if progress is not None:
            progress(stale.actionable + due.actionable, stale.actionable + due.actionable)
    if not isinstance(target, Connection):
        target.expire_all()
    return run.report(stale, due, examined, applied=True)


def apply_in_batches(
    connection: Connection,
    policy: ReconcilePolicy,
    in_transaction: Transactions,
    *,
    batch_size: int,
    parent_id: object = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> Report:
    """The same as :func:`apply` in transactions of a bounded size, oldest first, all at the time of the first.

    What is due is listed once. A batch looks again at each row: one that somebody vouched for meanwhile is left
    alone, and one that can't be acted on is passed over and counted. What a batch has done stays done, whatever
    becomes of the next.

    Args:
        connection: without a transaction; it keeps the list.
        in_transaction: does a piece of work in a transaction of its own on `connection`, more than once if need be.
        batch_size: the most tasks that one transaction changes.

    Raises:
        InvalidInput: a malformed argument.
        StateConflict, TaskNotFound: as :func:`apply`, but for rows that can't be acted on.
    """
    if not values.is_a(connection, Connection):
        raise InvalidInput("batches are written over a Connection")
    if not callable(in_transaction):
        raise InvalidInput("in_transaction must be callable")
    values.at_least_one(batch_size, "batch_size")
    values.optional_callable(progress, "progress")

    def begin() -> tuple[_Run, int, int]:
        read = clock_of(connection) if clock is None else clock
        run = _Run.begin(connection, policy, None, read, skip_conflicts=True, parent_id=parent_id)
        listed = run.list_what_is(run.statements.stale)
        return run, listed, run.count(run.statements.due.total) + (listed if run.closes_at_once else 0)

    def go_on() -> tuple[int, int]:
        return run.count(run.statements.open_deliveries), run.list_what_is(run.statements.due)

    def write(kind: sweep.Kind, first: int, last: int, listed: int) -> _Found:
        found = run.write_listed(kind, first, last)
        if last == listed:
            listing.drop(connection)
        return found

    def write_all(kind: sweep.Kind, listed: int, done: int, total: int) -> _Found:
        found = _Found(0, 0, 0)
        for first, last in listing.parts(listed, batch_size):
            found = found.and_also(in_transaction(partial(write, kind, first, last, listed)))
            if progress is not None:
                progress(done + last, total)
        return found

    run, stale_listed, due_expected = in_transaction(begin)
    stale = write_all(run.statements.stale, stale_listed, 0, stale_listed + due_expected)
    examined, due_listed = in_transaction(go_on)
    due = write_all(run.statements.due, due_listed, stale_listed, stale_listed + due_listed)
    batches = sum(listing.number_of_parts(listed, batch_size) for listed in (stale_listed, due_listed))
    return run.report(stale, due, examined, applied=True, batches=batches)


class _Found(NamedTuple):
    """Rows that are due for a change: those that can't be acted on, and the others by what they are due."""

    conflicts: int
    required: int
    internal: int

    @property
    def actionable(self) -> int:
        return self.required + self.internal

    def and_also(self, other: _Found) -> _Found:
        return _Found(*(mine + its for mine, its in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class _Run:
    connection: Connection
    skip: bool
    statements: sweep.Sweep
    parameters: dict[str, Any]
    active: int

    @classmethod
    def begin(
        cls,
        connection: Connection,
        policy: ReconcilePolicy,
        now: float | None,
        clock: Clock,
        *,
        skip_conflicts: bool,
        parent_id: object,
    ) -> _Run:
        if not values.is_a(policy, ReconcilePolicy):
            raise InvalidInput("a policy must be a ReconcilePolicy")
        skip = values.flag(skip_conflicts, "skip_conflicts")
        parent = values.optional_id(parent_id)
        statements = sweep.statements(parent is not None, connection.dialect.name)
        parameters: dict[str, Any] = {} if parent is None else {"parent": parent}
        if parent is not None and connection.scalar(_PARENT, parameters) is None:
            raise TaskNotFound("there is no task with the parent's id")
        # The first read fixes the snapshot; only then is the clock looked at.
        active: int = connection.execute(statements.active, parameters).scalar_one()
        moment = values.number(now, "now") if now is not None else values.clock_reading(clock)
        parameters |= {
            "now": moment,
            "stale_before": moment - policy.active_grace_seconds,
            "due_before": moment - policy.delivery_grace_seconds,
        }
        return cls(connection, skip, statements, parameters, active)

    @property
    def closes_at_once(self) -> bool:
        """Whether the delivery of a task that is timed out now is overdue already."""
        closes: bool = self.parameters["now"] <= self.parameters["due_before"]
        return closes

    def count(self, query: sa.Select[Any]) -> int:
        """The answer to one of the sweep's counts."""
        found: int = self.connection.execute(query, self.parameters).scalar_one()
        return found

    def find(self, counts: sweep.Counts, part: dict[str, int] | None = None) -> _Found:
        parameters = self.parameters | (part or {})
        conflicts, total, required = self.connection.execute(counts.found, parameters).one()
        if conflicts:
            if not self.skip:
                raise StateConflict("a row to be changed is damaged or has times in the future; run doctor")
            total, required = self.connection.execute(counts.actionable, parameters).one()
        return _Found(conflicts, required, total - required)

    def write(self, kind: sweep.Kind, found: _Found) -> None:
        """Change all that is due, which `found` has counted in this transaction."""
        if not found.conflicts:
            self._change(kind.writes, self.parameters, found.actionable)
            return
        # No stored value tells those that were changed from those that were passed over: they are listed.
        self.write_listed(kind, 1, self.list_what_is(kind))
        listing.drop(self.connection)

    def list_what_is(self, kind: sweep.Kind) -> int:
        """Put what is due on the list; how many those are."""
        return listing.make(self.connection, kind.listing, self.parameters)

    def write_listed(self, kind: sweep.Kind, first: int, last: int) -> _Found:
        """Change what is still due of a range of the list."""
        part = {"first": first, "last": last}
        found = self.find(kind.listed_counts, part)
        parameters = self.parameters | part
        if found.actionable != last - first + 1:
            self.connection.execute(kind.struck, parameters)
        self._change(kind.listed_writes, parameters, found.actionable)
        return found

    def report(self, stale: _Found, due: _Found, examined: int, *, applied: bool, batches: int | None = None) -> Report:
        report = Report(
            dry_run=not applied,
            applied=applied,
            active_examined=self.active,
            tasks_timed_out=stale.actionable,
            fresh_active_retained=self.active - stale.actionable - stale.conflicts,
            pending_delivery_examined=examined,
            deliveries_failed=due.required,
            deliveries_not_applicable=due.internal,
            pending_delivery_retained=examined - due.actionable - due.conflicts,
        )
        if self.skip:
            report["conflicts_skipped"] = stale.conflicts + due.conflicts
        if batches is not None:
            report["batches"] = batches
        return report

    def _change(self, writes: tuple[sa.Insert | sa.Update, ...], parameters: dict[str, Any], expected: int) -> None:
        if not expected:
            return
        # Each row was held against every rule in this very transaction, and what is written to it is fixed; on
        # SQLite the same rules as CHECKs would cost as much again.
        with unchecked(self.connection):
            for statement in writes:
                if listing.number_written(self.connection, statement, parameters) != expected:
                    raise StateConflict("the ledger changed in the middle of the run; try again", retriable=True)


_PARENT: Final = sa.select(tasks.c.pk).where(tasks.c.id == sa.bindparam("parent"))
