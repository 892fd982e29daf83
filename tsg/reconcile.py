"""Reconcile: close, after explicit deadlines and graces, what nobody vouches for. Never guess success.

One decision time for a whole run, the same conditions for preview and apply, and sets instead of rows: no task
is carried into Python, so that a million cost no memory. Every write repeats the condition that it was
decided on, and what is reported is what was written.

The functions here run inside the caller's transaction and never commit. For an exact report that must be one
snapshot: any on SQLite, one at REPEATABLE READ on PostgreSQL, where a concurrent writer may then make it fail
(SQLSTATE 40001) and be tried again. :meth:`tsg.Ledger.reconcile` does all that by itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, NotRequired, Protocol, TypedDict

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.schema import CreateTable, DropTable

from tsg import rules, values
from tsg.engine import refusing, require_transaction, snapshot
from tsg.errors import InvalidInput, StateConflict, TaskNotFound
from tsg.states import Clock
from tsg.tables import task_events, tasks

__all__ = ["ReconcilePolicy", "Report", "apply", "preview"]


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
        conflicts_skipped: rows passed over; only where that was asked for.
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


class Session(Protocol):
    """What is asked of an ORM session; the ORM itself is not needed here."""

    def connection(self, bind_arguments: Any = None) -> Connection:
        """The connection of its transaction, by what is asked of it."""

    def flush(self) -> None:
        """Send what is pending."""

    def expire_all(self) -> None:
        """Forget what was loaded."""


def preview(
    target: Connection | Session,
    policy: ReconcilePolicy,
    *,
    now: float | None = None,
    skip_conflicts: bool = False,
    parent_id: object = None,
    clock: Clock = time.time,
) -> Report:
    """What :func:`apply` would do at this time; nothing is written.

    Args:
        target: a connection or session, in whatever transaction it has.
        now: the decision time, seconds since the epoch; by default `clock`, read once the snapshot is fixed,
            so that a heartbeat that lands meanwhile can't look like the future.
        skip_conflicts: pass over rows that can't be acted on, and count them, instead of refusing.
        parent_id: only the direct children of this task.

    Raises:
        StateConflict: a row to be changed breaks a rule, or has a time later than `now`.
        TaskNotFound: there is no such parent.
    """
    with refusing():
        connection = connection_of(target)
        with snapshot(connection):
            run = _Run.begin(connection, policy, now, clock, skip_conflicts=skip_conflicts, parent_id=parent_id)
            stale = run.stale()
            due = run.due()
            if run.parameters["now"] <= run.parameters["due_before"]:
                due = _Found(due.conflicts, due.required + stale.required, due.internal + stale.internal)
            return run.report(stale, run.open_deliveries() + stale.actionable, due, applied=False)


def apply(
    target: Connection | Session,
    policy: ReconcilePolicy,
    *,
    now: float | None = None,
    skip_conflicts: bool = False,
    parent_id: object = None,
    clock: Clock = time.time,
) -> Report:
    """Time out what is stale and close the deliveries that are overdue, each with its event.

    Arguments and errors as for :func:`preview`. Where it raises, the caller's transaction must be rolled back.

    Raises:
        StateConflict: also where somebody else changed a row in the middle, which no isolation that this
            asks for allows.
    """
    with refusing():
        connection = connection_of(target)
        require_transaction(connection)
        run = _Run.begin(connection, policy, now, clock, skip_conflicts=skip_conflicts, parent_id=parent_id)
        run.lock()
        stale = run.stale()
        run.write("timeout", stale.actionable)
        examined = run.open_deliveries()
        due = run.due()
        run.write("delivery", due.actionable)
    if not isinstance(target, Connection):
        target.expire_all()
    return run.report(stale, examined, due, applied=True)


class _Found(NamedTuple):
    """Rows that are due for a change: those that can't be acted on, and the others by what they are due."""

    conflicts: int
    required: int
    internal: int

    @property
    def actionable(self) -> int:
        return self.required + self.internal


@dataclass(frozen=True, slots=True)
class _Run:
    connection: Connection
    skip: bool
    statements: _Statements
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
        if not isinstance(policy, ReconcilePolicy):
            raise InvalidInput("a policy must be a ReconcilePolicy")
        skip = values.flag(skip_conflicts, "skip_conflicts")
        parent = values.optional_id(parent_id)
        statements = _statements(skip, parent is not None, connection.dialect.name)
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

    def stale(self) -> _Found:
        return self._find(self.statements.stale)

    def due(self) -> _Found:
        return self._find(self.statements.due)

    def open_deliveries(self) -> int:
        found: int = self.connection.execute(self.statements.open_deliveries, self.parameters).scalar_one()
        return found

    def write(self, kind: str, expected: int) -> None:
        if not expected:
            return
        writes = self.statements.writes[kind]
        if writes.set_aside is not None:
            self.connection.execute(_ACTING_MADE[self.connection.dialect.name])
            self.connection.execute(writes.set_aside, self.parameters)
        for statement in (writes.events, writes.tasks):
            # Unasked, not every driver tells how many rows an INSERT … SELECT made.
            done = self.connection.execute(statement, self.parameters, execution_options={"preserve_rowcount": True})
            if done.rowcount != expected:
                raise StateConflict("the ledger changed in the middle of the run; try again", retriable=True)
        if writes.set_aside is not None:
            self.connection.execute(_ACTING_DROPPED[self.connection.dialect.name])

    def report(self, stale: _Found, examined: int, due: _Found, *, applied: bool) -> Report:
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
        return report

    def lock(self) -> None:
        """On PostgreSQL: nobody else changes what is due meanwhile; who did so before makes this run start anew."""
        if self.connection.dialect.name == "postgresql":
            for statement in (self.statements.stale.locked, self.statements.due.locked):
                self.connection.execute(statement, self.parameters)

    def _find(self, counts: _Counts) -> _Found:
        conflicts, total, required = self.connection.execute(counts.found, self.parameters).one()
        if conflicts:
            if not self.skip:
                raise StateConflict("a row to be changed is damaged or has times in the future; run doctor")
            total, required = self.connection.execute(counts.actionable, self.parameters).one()
        return _Found(conflicts, required, total - required)


class _Counts(NamedTuple):
    """How many rows are in conflict, are due, and of those required; the last two without conflicts; and the same
    rows locked."""

    found: sa.Select[*tuple[Any, ...]]
    actionable: sa.Select[*tuple[Any, ...]]
    locked: sa.Select[*tuple[Any, ...]]


class _Writes(NamedTuple):
    """What makes one kind of change: where rows are passed over, those acted on set aside first; then both tables."""

    set_aside: sa.Insert | None
    events: sa.Insert
    tasks: sa.Update


class _Statements(NamedTuple):
    active: sa.Select[*tuple[Any, ...]]
    open_deliveries: sa.Select[*tuple[Any, ...]]
    stale: _Counts
    due: _Counts
    writes: dict[str, _Writes]


_PARENT: Final = sa.select(tasks.c.pk).where(tasks.c.id == sa.bindparam("parent"))
_EVENT_COLUMNS: Final = ("task_pk", "number", "kind", "from_status", "to_status", "occurred_at", "code")


#: The most that a version may be to be counted on; PostgreSQL's integer has no number beyond.
_LAST_VERSION: Final = sa.literal_column("2147483640", sa.Integer())
#: A table of the transaction's own, by database, in the schema that such tables have there.
_ACTING: Final = {
    dialect: sa.Table(
        "tsg_acting", sa.MetaData(), sa.Column("pk", sa.BigInteger()), schema=schema, prefixes=["TEMPORARY"]
    )
    for dialect, schema in (("sqlite", "temp"), ("postgresql", "pg_temp"))
}
_ACTING_MADE: Final = {dialect: CreateTable(table) for dialect, table in _ACTING.items()}
_ACTING_DROPPED: Final = {dialect: DropTable(table) for dialect, table in _ACTING.items()}


@lru_cache(maxsize=8)
def _statements(skip: bool, one_parent: bool, dialect: str) -> _Statements:
    c = tasks.c
    acting = _ACTING[dialect]
    now: sa.BindParameter[float] = sa.bindparam("now", type_=sa.Double())
    stale_before: sa.BindParameter[float] = sa.bindparam("stale_before", type_=sa.Double())
    due_before: sa.BindParameter[float] = sa.bindparam("due_before", type_=sa.Double())
    among = [c.parent_id == sa.bindparam("parent")] if one_parent else []
    expired = c.deadline_at <= now
    silent = sa.and_(c.expects_heartbeat.is_(sa.true()), c.updated_at <= stale_before)
    stale = sa.and_(rules.running(c), sa.or_(expired, silent), *among)
    due = sa.and_(rules.awaiting_delivery(c), c.ended_at <= due_before, *among)

    delivery_number = rules.expected_events(c)
    next_numbers = {"timeout": sa.literal_column("2", sa.Integer()), "delivery": delivery_number}
    conflicts = {
        kind: sa.or_(
            sa.not_(rules.sound(c)),
            c.version > _LAST_VERSION,
            *(time > now for time in times),
            sa.exists().where(task_events.c.task_pk == c.pk, task_events.c.number >= next_numbers[kind]),
        )
        for kind, times in (
            ("timeout", (c.created_at, c.started_at, c.updated_at)),
            ("delivery", (c.created_at, c.updated_at, c.ended_at, c.delivery_updated_at)),
        )
    }

    required = c.delivery_required.is_(sa.true())

    def count(condition: Any, conflict: Any) -> _Counts:
        counted = (sa.func.count(), sa.func.count().filter(required))
        # To look for a conflict is what costs: once a row.
        found = sa.select(sa.func.count().filter(conflict), *counted).select_from(tasks).where(condition)
        actionable = sa.select(*counted).select_from(tasks).where(condition, sa.not_(conflict))
        held = sa.select(c.pk).where(condition).with_for_update().subquery()
        return _Counts(found, actionable, sa.select(sa.func.count()).select_from(held))

    def write(kind: str, condition: Any, event: tuple[Any, ...], changes: dict[str, Any]) -> _Writes:
        # Where no conflict was found, none can have come up since: the transaction has one snapshot. Where they
        # are passed over, the rows that are acted on have to be remembered: no stored value tells them for sure.
        set_aside = None
        if skip:
            chosen = sa.select(c.pk).where(condition, sa.not_(conflicts[kind]))
            set_aside = sa.insert(acting).from_select(["pk"], chosen)
            condition = c.pk.in_(sa.select(acting.c.pk))
        source = sa.select(c.pk, *event).where(condition)
        return _Writes(
            set_aside,
            # In the order of the events' own key; as an expression, or SQLite would scan all tasks in that order.
            sa.insert(task_events).from_select(_EVENT_COLUMNS, source.order_by(c.pk + sa.literal_column("0"))),
            sa.update(tasks).where(condition).values(**changes, version=c.version + 1),
        )

    code = sa.case((expired, rules.constant("deadline_exceeded")), else_=rules.constant("restart_stale"))
    end = sa.case((required, rules.constant("failed")), else_=rules.constant("not_applicable"))
    delivery_code = sa.case((required, rules.constant("delivery_grace_expired")), else_=rules.constant("internal_task"))
    return _Statements(
        active=sa.select(sa.func.count()).select_from(tasks).where(rules.active(c), *among),
        open_deliveries=sa.select(sa.func.count()).select_from(tasks).where(rules.awaiting_delivery(c), *among),
        stale=count(stale, conflicts["timeout"]),
        due=count(due, conflicts["delivery"]),
        writes={
            "timeout": write(
                "timeout",
                stale,
                (
                    next_numbers["timeout"],
                    rules.constant("task_transition"),
                    rules.constant("running"),
                    rules.constant("timed_out"),
                    now,
                    code,
                ),
                {
                    "status": rules.constant("timed_out"),
                    "updated_at": now,
                    "ended_at": now,
                    "terminal_code": code,
                },
            ),
            "delivery": write(
                "delivery",
                due,
                (
                    delivery_number,
                    rules.constant("delivery_transition"),
                    rules.constant("pending"),
                    end,
                    now,
                    delivery_code,
                ),
                {"delivery_status": end, "delivery_updated_at": now, "delivery_code": delivery_code},
            ),
        },
    )


def connection_of(target: Connection | Session) -> Connection:
    """The connection of `target`, with all that a session holds sent to it."""
    if isinstance(target, Connection):
        return target
    # Who passes a session has the ORM loaded; and a session may be bound by class.
    from tsg.models import Task

    target.flush()
    return target.connection(bind_arguments={"mapper": Task})
