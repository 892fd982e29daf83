"""Doctor: prove that the whole history is consistent, or count what is not. Reads only; counts only.

:data:`CHECKS` is the whole of it: each check is one question to the database and the headings that its answer
fills. No row is carried into Python, and no finding names a task.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple, TypedDict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tsg import rules, schema, values
from tsg.conditions import finite
from tsg.engine import DATABASE_ERRORS, contained, refusing, snapshot, unchecked
from tsg.errors import StateConflict
from tsg.listing import Progress
from tsg.sessions import Session, connection_of
from tsg.states import DeliveryStatus, TaskStatus
from tsg.tables import task_events, tasks, version_table

__all__ = ["CHECKS", "Check", "Report", "examine"]


class Report(TypedDict):
    """What doctor found.

    Keys:
        healthy: nothing at all was found.
        quick_check: ``ok``, or ``failed`` where the file itself is damaged, be it only an index that is not its
            table's; ``unavailable`` on a server.
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

#: What is told as a failed ``quick_check``, since it is the file that is damaged.
_STALE_INDEXES: Final = "stale_indexes"

_REVISION: Final = re.compile(r"[0-9]{1,9}\Z")


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


def examine(target: Connection | Session, *, progress: Progress | None = None) -> Report:
    """Every check on the ledger that `target` is connected to, inside its transaction.

    Args:
        progress: called with how many steps are done and how many there are.

    Raises:
        InvalidInput: `progress` can't be called. Nothing is raised for what is wrong with the ledger: that is what the
            report is for.
    """
    with refusing():
        connection = connection_of(target)
    values.optional_callable(progress, "progress")
    counts: Counts = {"doctor_error_count": 0}
    steps = len(CHECKS) + 2

    def done(step: int) -> None:
        if progress is not None:
            progress(step, steps)

    with refusing(), snapshot(connection), unchecked(connection):
        file = _quick_check(connection)
        done(1)
        version, exact = _schema(connection)
        done(2)
        if not exact:
            counts["doctor_error_count"] = 1
        else:
            for step, check in enumerate(CHECKS, 3):
                try:
                    with contained(connection):
                        counts |= check.counts(connection)
                except DATABASE_ERRORS:
                    # What could not be read is no proof of health; the report says so.
                    counts["doctor_error_count"] += 1
                done(step)
    if counts.get(_STALE_INDEXES):
        file = "failed"
    found = {heading: counts.get(heading, 0) for heading in FINDINGS}
    return Report(
        healthy=file != "failed" and exact and not any(found.values()),
        quick_check=file,
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
        with contained(connection):
            revision = schema.state(connection).revision
            version = int(revision) if revision is not None and _REVISION.match(revision) else 0
            return version, schema.fault(connection) is None
    except (StateConflict, *DATABASE_ERRORS):
        return 0, False


def _quick_check(connection: Connection) -> str:
    if connection.dialect.name != "sqlite":
        # A server's files are not ours to see.
        return "unavailable"
    try:
        # Unbounded, so that findings about rows can't crowd out one about the file.
        return "failed" if _damage(connection, "quick_check(2147483647)") else "ok"
    except DATABASE_ERRORS:
        return "failed"


def _damage(connection: Connection, check: str) -> bool:
    """Whether one of SQLite's own checks finds more than values that are missing in rows, which are counted apart."""
    with connection.exec_driver_sql(f"PRAGMA {check}", execution_options={"yield_per": 1000}) as found:
        return any(row[0] != "ok" and not str(row[0]).startswith("NULL value in ") for row in found)


# -- the checks ------------------------------------------------------------------------------------------


@cache
def _rows() -> sa.Select[*tuple[Any, ...]]:
    """One pass over the tasks for everything that a row says by itself."""
    c = tasks.c
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
        count().filter(rules.breaks(_rules_of("state"))).label("state_inconsistency_count"),
        count().filter(rules.breaks(_rules_of("timestamp"))).label("timestamp_inconsistency_count"),
    ).select_from(tasks)


@cache
def _rules() -> tuple[rules.Rule, ...]:
    # To make them takes as long as to ask them of a small ledger.
    return rules.task_rules(tasks.c)


def _rules_of(heading: str) -> list[rules.Rule]:
    return [rule for rule in _rules() if rule.heading == heading]


@cache
def _older_than_parents() -> sa.Select[*tuple[Any, ...]]:
    """How many tasks are older than their parent, and have no other fault in their times."""
    parent = tasks.alias("parent")
    return (
        sa.select(sa.func.count())
        .select_from(tasks.join(parent, parent.c.id == tasks.c.parent_id))
        .where(
            tasks.c.parent_id.is_not(None),
            parent.c.created_at > tasks.c.created_at,
            # A time that is none at all is held against its own row only.
            finite(parent.c.created_at),
            rules.keeps(_rules_of("timestamp")),
        )
    )


@cache
def _chains(dialect: str) -> sa.Select[*tuple[Any, ...]]:
    """How many tasks have other events than their row implies.

    Every event that is the implied one of its number counts 1 and any other far too much, so that only the exact
    chain, no event missing or added, comes out at the number that is expected.
    """
    task = tasks.alias("task")
    event = task_events.alias("event")
    implied = sa.case((rules.is_implied(event.c, task.c), _number(1)), else_=_number(1000))
    found = sa.func.sum(implied)
    expected = rules.expected_events(task.c)
    if dialect == "sqlite":
        # Both lie in the order of their keys: to look for a task's events is to go on where one is.
        chain = sa.select(found).where(event.c.task_pk == task.c.pk).scalar_subquery()
        return sa.select(sa.func.count()).select_from(task).where(chain.is_distinct_from(expected))
    # To look for each task's events by itself takes PostgreSQL three times as long as to join them all.
    joined = task.outerjoin(event, event.c.task_pk == task.c.pk)
    grouped = sa.select(task.c.pk).select_from(joined).group_by(task.c.pk).having(found.is_distinct_from(expected))
    return sa.select(sa.func.count()).select_from(grouped.subquery("wrong"))


def _number(value: int) -> sa.ColumnElement[int]:
    return sa.literal_column(str(value), sa.Integer())


def _text(column: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
    return sa.type_coerce(column, sa.String())


def _scan_rows(connection: Connection) -> Counts:
    counts: Counts = dict(connection.execute(_rows()).one()._mapping)
    # One task counts once under a heading, whatever is wrong with it.
    counts["timestamp_inconsistency_count"] += connection.execute(_older_than_parents()).scalar_one()
    return counts


def _count_wrong_chains(connection: Connection) -> Counts:
    return {"event_inconsistency_count": connection.execute(_chains(connection.dialect.name)).scalar_one()}


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


@cache
def _strays() -> sa.Select[*tuple[Any, ...]]:
    return (
        sa.select(sa.func.count())
        .select_from(task_events)
        .where(~sa.exists().where(tasks.c.pk == task_events.c.task_pk))
    )


def _count_orphans(connection: Connection) -> Counts:
    return {"orphan_count": connection.scalar(_orphans()) or 0}


def _count_broken_references(connection: Connection) -> Counts:
    if connection.dialect.name != "sqlite":
        return {"foreign_key_error_count": sum(connection.scalar(query) or 0 for query in (_orphans(), _strays()))}
    checks = (f"SELECT count(*) FROM pragma_foreign_key_check('{table.name}')" for table in (tasks, task_events))
    return {"foreign_key_error_count": sum(connection.exec_driver_sql(check).scalar() or 0 for check in checks)}


def _compare_indexes(connection: Connection) -> Counts:
    if connection.dialect.name != "sqlite":
        return {}
    # A quick check leaves them out, and a page of an index that was lost or is an older one hides tasks from their ids.
    checks = (f"integrity_check('{table.name}')" for table in (version_table, tasks))
    return {_STALE_INDEXES: sum(_damage(connection, check) for check in checks)}


@cache
def _cycles() -> sa.Select[*tuple[Any, ...]]:
    """How many cycles the parents form.

    The highest key of a cycle is the parent of a lower one, which is not so in a ledger whose parents are created
    before their children. From each parent that is, it goes up as long as it stays below where it began: what
    comes back there is a cycle, counted at its highest key and nowhere else.
    """
    child, top, task, parent = (tasks.alias(name) for name in ("child", "top", "task", "parent"))
    walk = (
        sa.select(top.c.pk.label("start"), parent.c.pk.label("reached"))
        .select_from(child.join(top, top.c.id == child.c.parent_id).join(parent, parent.c.id == top.c.parent_id))
        .where(child.c.parent_id.is_not(None), top.c.pk >= child.c.pk, parent.c.pk <= top.c.pk)
        .cte("walk", recursive=True)
    )
    walk = walk.union(
        sa.select(walk.c.start, parent.c.pk)
        .select_from(walk.join(task, task.c.pk == walk.c.reached).join(parent, parent.c.id == task.c.parent_id))
        .where(walk.c.reached < walk.c.start, parent.c.pk <= walk.c.start)
    )
    return sa.select(sa.func.count()).select_from(walk).where(walk.c.reached == walk.c.start)


def _count_cycles(connection: Connection) -> Counts:
    return {"parent_cycle_count": connection.execute(_cycles()).scalar_one()}


CHECKS: Final = (
    Check("rows", _scan_rows),
    Check("chains of events", _count_wrong_chains),
    Check("events", _count_events),
    Check("orphans", _count_orphans),
    Check("references", _count_broken_references),
    Check("parent cycles", _count_cycles),
    Check("indexes", _compare_indexes),
)
