"""Doctor: prove that the whole history is consistent, or count what is not. Reads only; counts only.

:data:`CHECKS` is the whole of it: each check is one question to the database and the headings that its answer
fills. No row is carried into Python, and no finding names a task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple, TypedDict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tsg import rules, schema
from tsg.errors import StateConflict
from tsg.reconcile import Session
from tsg.states import DeliveryStatus, TaskStatus
from tsg.tables import task_events, tasks

__all__ = ["CHECKS", "Check", "Report", "examine"]


class Report(TypedDict):
    """What doctor found.

    Keys:
        healthy: nothing at all was found.
        quick_check: ``ok``, or ``failed`` where the file itself is damaged.
        schema_version: the number of the revision, 0 where there is none.
        schema_ok: the schema is exactly that of head. Where it is not, nothing else is counted.
        task_count, event_count, task_status_counts, delivery_status_counts: what is there.
        orphan_count: tasks whose parent is not there.
        parent_cycle_count: cycles of parents, each counted once, whatever its length.
        foreign_key_error_count: references to what is not there; events without a task too.
        state_inconsistency_count, timestamp_inconsistency_count, event_inconsistency_count: tasks whose row
            breaks a rule of that kind, or whose events are not exactly those that the row implies.
        doctor_error_count: checks that could not be carried out.
    """

    healthy: bool
    quick_check: str
    schema_version: int
    schema_ok: bool
    task_count: int
    event_count: int
    task_status_counts: dict[str, int]
    delivery_status_counts: dict[str, int]
    orphan_count: int
    parent_cycle_count: int
    foreign_key_error_count: int
    state_inconsistency_count: int
    timestamp_inconsistency_count: int
    event_inconsistency_count: int
    doctor_error_count: int


Counts = dict[str, int]


class Check(NamedTuple):
    """One question: a name, and a function from a connection to counts by heading of the report."""

    name: str
    counts: Callable[[Connection], Counts]


#: The headings that say that something is wrong when they are not zero.
FINDINGS: Final = (
    "orphan_count",
    "parent_cycle_count",
    "foreign_key_error_count",
    "state_inconsistency_count",
    "timestamp_inconsistency_count",
    "event_inconsistency_count",
    "doctor_error_count",
)


def examine(target: Connection | Session) -> Report:
    """Every check on the ledger that `target` is connected to, inside its transaction.

    Raises:
        Nothing for what is wrong with the ledger: that is what the report is for.
    """
    if isinstance(target, Connection):
        connection = target
    else:
        target.flush()
        connection = target.connection()
    counts: Counts = {"doctor_error_count": 0}
    with _unchecked(connection):
        file_ok = _file_is_sound(connection)
        version, exact = _schema(connection)
        if not exact:
            counts["doctor_error_count"] = 1
        else:
            for check in CHECKS:
                try:
                    counts |= check.counts(connection)
                except sa.exc.DBAPIError:
                    # What could not be read is no proof of health; the report says so.
                    counts["doctor_error_count"] += 1
    found = {heading: counts.get(heading, 0) for heading in FINDINGS}
    return Report(
        healthy=file_ok and exact and not any(found.values()),
        quick_check="ok" if file_ok else "failed",
        schema_version=version,
        schema_ok=exact,
        task_count=counts.get("task_count", 0),
        event_count=counts.get("event_count", 0),
        task_status_counts={state.value: counts.get(f"task_{state.value}", 0) for state in TaskStatus},
        delivery_status_counts={state.value: counts.get(f"delivery_{state.value}", 0) for state in DeliveryStatus},
        orphan_count=found["orphan_count"],
        parent_cycle_count=found["parent_cycle_count"],
        foreign_key_error_count=found["foreign_key_error_count"],
        state_inconsistency_count=found["state_inconsistency_count"],
        timestamp_inconsistency_count=found["timestamp_inconsistency_count"],
        event_inconsistency_count=found["event_inconsistency_count"],
        doctor_error_count=found["doctor_error_count"],
    )


def _schema(connection: Connection) -> tuple[int, bool]:
    try:
        revision = schema.state(connection).revision
        version = int(revision) if revision is not None and revision.isdecimal() else 0
        return version, schema.fault(connection) is None
    except (StateConflict, sa.exc.DBAPIError):
        return 0, False


@contextmanager
def _unchecked(connection: Connection) -> Iterator[None]:
    """Let SQLite's own check of the file pass over CHECK constraints: a broken rule is counted by its heading."""
    if connection.dialect.name != "sqlite":
        yield
        return
    before = connection.exec_driver_sql("PRAGMA ignore_check_constraints").scalar()
    connection.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
    try:
        yield
    finally:
        connection.exec_driver_sql(f"PRAGMA ignore_check_constraints = {int(bool(before))}")


def _file_is_sound(connection: Connection) -> bool:
    try:
        # Unbounded, so that findings about rows can't crowd out one about the file.
        found = connection.execution_options(yield_per=1000).exec_driver_sql("PRAGMA quick_check(2147483647)")
        with found:
            return all(row[0] == "ok" or str(row[0]).startswith("NULL value in ") for row in found)
    except sa.exc.DBAPIError:
        return False


# -- the checks ------------------------------------------------------------------------------------------


@cache
def _task_scan() -> sa.Select[*tuple[Any, ...]]:
    """One pass over the tasks for everything that a row, its parent and its events say of each other."""
    task = tasks.alias("task")
    parent = tasks.alias("parent")
    event = task_events.alias("event")
    c = task.c
    older_than_parent = sa.and_(
        c.parent_id.is_not(None),
        sa.exists().where(parent.c.id == c.parent_id, parent.c.created_at > c.created_at),
    )
    # Every event that is the implied one of its number counts 1 and any other far too much, so that only the
    # exact chain, no event missing or added, comes out at the number that is expected.
    chain = (
        sa.select(sa.func.sum(sa.case((rules.is_implied(event.c, c), 1), else_=1000)))
        .where(event.c.task_pk == c.pk)
        .scalar_subquery()
    )
    count = sa.func.count
    by_status = [
        count().filter(_text(c.status) == rules.constant(state.value)).label(f"task_{state.value}")
        for state in TaskStatus
    ]
    by_delivery = [
        count().filter(_text(c.delivery_status) == rules.constant(state.value)).label(f"delivery_{state.value}")
        for state in DeliveryStatus
    ]
    return sa.select(
        count().label("task_count"),
        *by_status,
        *by_delivery,
        count().filter(sa.not_(rules.sound(c, "state"))).label("state_inconsistency_count"),
        count()
        .filter(sa.or_(sa.not_(rules.sound(c, "timestamp")), older_than_parent))
        .label("timestamp_inconsistency_count"),
        count().filter(chain.is_distinct_from(rules.expected_events(c))).label("event_inconsistency_count"),
    ).select_from(task)


def _text(column: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
    return sa.type_coerce(column, sa.String())


def _scan_tasks(connection: Connection) -> Counts:
    return dict(connection.execute(_task_scan()).one()._mapping)


def _count_events(connection: Connection) -> Counts:
    return {"event_count": connection.scalar(sa.select(sa.func.count()).select_from(task_events)) or 0}


@cache
def _orphans() -> sa.Select[*tuple[Any, ...]]:
    parent = tasks.alias("parent")
    return (
        sa.select(sa.func.count())
        .select_from(tasks)
        .where(tasks.c.parent_id.is_not(None), ~sa.exists().where(parent.c.id == tasks.c.parent_id))
    )


def _count_orphans(connection: Connection) -> Counts:
    return {"orphan_count": connection.scalar(_orphans()) or 0}


def _count_broken_references(connection: Connection) -> Counts:
    checks = (f"SELECT count(*) FROM pragma_foreign_key_check('{table.name}')" for table in (tasks, task_events))
    return {"foreign_key_error_count": sum(connection.exec_driver_sql(check).scalar() or 0 for check in checks)}


def _count_cycles(connection: Connection) -> Counts:
    """How many cycles the parents form.

    A parent is created before its child, so its key is lower; a set of edges that all go down in a total order
    has no cycle. Where an edge goes up, all that can be reached from it is taken, and every task in it jumps
    1, 2, 4, … parents at once while it keeps the lowest key that it met: once that is more jumps than there
    are tasks, each stands in a cycle (or fell off a root), and the lowest key names the cycle.
    """
    task = tasks.alias("task")
    parent = tasks.alias("parent")
    edges = task.join(parent, parent.c.id == task.c.parent_id)
    suspects = sa.select(task.c.pk).select_from(edges).where(task.c.parent_id.is_not(None), parent.c.pk >= task.c.pk)
    reached = suspects.cte("reached", recursive=True)
    reached = reached.union(
        sa.select(parent.c.pk).select_from(
            reached.join(task, task.c.pk == reached.c.pk).join(parent, parent.c.id == task.c.parent_id)
        )
    )
    size = connection.scalar(sa.select(sa.func.count()).select_from(reached)) or 0
    if not size:
        return {"parent_cycle_count": 0}
    jump = (
        sa.select(task.c.pk, parent.c.pk.label("ahead"), sa.func.min(task.c.pk, parent.c.pk).label("lowest"))
        .select_from(reached.join(task, task.c.pk == reached.c.pk).join(parent, parent.c.id == task.c.parent_id))
        .cte("jump_0")
        .prefix_with("MATERIALIZED")
    )
    for step in range(size.bit_length()):
        near, far = jump.alias("near"), jump.alias("far")
        jump = (
            sa.select(near.c.pk, far.c.ahead, sa.func.min(near.c.lowest, far.c.lowest).label("lowest"))
            .select_from(near.join(far, far.c.pk == near.c.ahead))
            .cte(f"jump_{step + 1}")
            .prefix_with("MATERIALIZED")
        )
    ends, standing = jump.alias("ends"), jump.alias("standing")
    cycles = sa.select(sa.func.count(standing.c.lowest.distinct())).select_from(
        ends.join(standing, standing.c.pk == ends.c.ahead)
    )
    return {"parent_cycle_count": connection.scalar(cycles) or 0}


CHECKS: Final = (
    Check("rows and their events", _scan_tasks),
    Check("events", _count_events),
    Check("orphans", _count_orphans),
    Check("references", _count_broken_references),
    Check("parent cycles", _count_cycles),
)
