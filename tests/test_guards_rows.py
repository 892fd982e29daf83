"""Each CHECK of a row, each NOT NULL and each key: what breaks it is refused on either database, by itself too."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from tests.test_guards import (
    CREATED,
    DATABASES,
    DELIVERED,
    DIGEST,
    ENDED,
    OTHER,
    STARTED,
    TIMEOUT,
    placed,
    sqlite_engine,
)
from tsg import Task, TaskEvent
from tsg.tables import tasks

Row = dict[str, Any]


@pytest.fixture(scope="module")
def sqlite_rows(file_at_head: Path) -> Iterator[sa.Engine]:
    engine = sqlite_engine(file_at_head)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def postgresql_rows(server_at_head: sa.URL) -> Iterator[sa.Engine]:
    engine = sa.create_engine(server_at_head)
    yield engine
    engine.dispose()


@pytest.fixture(params=DATABASES)
def connection(request: pytest.FixtureRequest) -> Iterator[Connection]:
    """A ledger with nothing in it, in a transaction that is rolled back."""
    engine: sa.Engine = request.getfixturevalue(f"{request.param}_rows")
    with engine.connect() as opened:
        opened.begin()
        yield opened
        opened.rollback()


QUEUED: Row = {
    "id": OTHER,
    "parent_id": None,
    "status": "queued",
    "delivery_status": "pending",
    "delivery_required": True,
    "expects_heartbeat": True,
    "payload_hash": DIGEST,
    "timeout_seconds": TIMEOUT,
    "created_at": CREATED,
    "started_at": None,
    "updated_at": CREATED,
    "ended_at": None,
    "deadline_at": None,
    "delivery_updated_at": CREATED,
    "terminal_code": None,
    "delivery_code": None,
    "version": 0,
}
RUNNING = {
    **QUEUED,
    "status": "running",
    "started_at": STARTED,
    "updated_at": STARTED,
    "deadline_at": STARTED + TIMEOUT,
    "version": 1,
}
DONE = {
    **RUNNING,
    "status": "succeeded",
    "terminal_code": "completed",
    "ended_at": ENDED,
    "updated_at": ENDED,
    "version": 2,
}
SENT = {
    **DONE,
    "delivery_status": "delivered",
    "delivery_code": "transport_acknowledged",
    "delivery_updated_at": DELIVERED,
    "version": 3,
}
KEPT = {**SENT, "delivery_required": False, "delivery_status": "not_applicable", "delivery_code": "internal_task"}
NAN, INFINITY = float("nan"), float("inf")
ALWAYS_SET = ("created_at", "updated_at", "delivery_updated_at")
SET_LATER = ("started_at", "ended_at", "deadline_at")

Broken = tuple[str, Row, Row]
BROKEN: list[Broken] = [
    ("parent_id", QUEUED, {"parent_id": OTHER}),
    ("status", QUEUED, {"status": "bogus"}),
    ("status", QUEUED, {"status": ""}),
    ("status", QUEUED, {"status": "QUEUED"}),
    ("delivery_status", QUEUED, {"delivery_status": "bogus"}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST.upper()}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST[:-1]}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST[:-1] + "\n"}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST[:-1] + "ä"}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST + "0"}),
    ("payload_hash", QUEUED, {"payload_hash": ""}),
    ("expects_heartbeat", QUEUED, {"expects_heartbeat": False, "timeout_seconds": None}),
    ("lifecycle", QUEUED, {"started_at": CREATED, "deadline_at": CREATED + TIMEOUT, "version": 1}),
    ("lifecycle", QUEUED, {"ended_at": CREATED}),
    ("lifecycle", RUNNING, {"ended_at": STARTED}),
    ("lifecycle", RUNNING, {"started_at": None, "deadline_at": None, "updated_at": CREATED, "version": 0}),
    ("lifecycle", DONE, {"ended_at": None}),
    ("terminal_code", QUEUED, {"terminal_code": "completed"}),
    ("terminal_code", RUNNING, {"terminal_code": "started"}),
    ("terminal_code", DONE, {"terminal_code": "worker_failed"}),
    ("terminal_code", DONE, {"terminal_code": "bogus"}),
    ("terminal_code", DONE, {"terminal_code": ""}),
    ("delivery", SENT, {"delivery_required": False}),
    ("delivery", KEPT, {"delivery_required": True}),
    ("delivery", RUNNING, {"delivery_status": "delivered", "delivery_updated_at": DELIVERED, "version": 2}),
    ("delivery_code", DONE, {"delivery_code": "transport_acknowledged"}),
    ("delivery_code", SENT, {"delivery_code": "transport_failed"}),
    ("delivery_code", SENT, {"delivery_code": "bogus"}),
    ("delivery_code", KEPT, {"delivery_code": "delivery_grace_expired"}),
    ("version", QUEUED, {"version": 1}),
    ("version", QUEUED, {"version": -1}),
    ("version", RUNNING, {"version": 0}),
    ("version", DONE, {"version": 1}),
    ("version", SENT, {"version": 2}),
    ("version", RUNNING, {"version": 2, "expects_heartbeat": False}),
    ("timeout_seconds", QUEUED, {"timeout_seconds": -1.0}),
    ("timeout_seconds", QUEUED, {"timeout_seconds": INFINITY}),
    *(("finite", QUEUED, {name: value}) for name in ALWAYS_SET for value in (INFINITY, -INFINITY)),
    *(("finite", DONE, {name: value}) for name in SET_LATER for value in (INFINITY, -INFINITY)),
    ("started_at", RUNNING, {"created_at": STARTED + 1, "delivery_updated_at": STARTED + 1}),
    ("updated_at", QUEUED, {"updated_at": CREATED + 1}),
    ("updated_at", RUNNING, {"updated_at": STARTED + 1}),
    ("updated_at", RUNNING, {"updated_at": STARTED - 1, "version": 2}),
    ("updated_at", DONE, {"updated_at": ENDED + 1}),
    ("ended_at", DONE, {"ended_at": STARTED - 1, "updated_at": STARTED - 1}),
    ("deadline_at", QUEUED, {"deadline_at": CREATED + TIMEOUT}),
    ("deadline_at", RUNNING, {"deadline_at": None}),
    ("deadline_at", RUNNING, {"deadline_at": STARTED + TIMEOUT + 1}),
    ("deadline_at", RUNNING, {"timeout_seconds": None}),
    ("delivery_updated_at", QUEUED, {"delivery_updated_at": CREATED + 1}),
    ("delivery_updated_at", SENT, {"delivery_updated_at": ENDED - 1}),
]
# A column of SQLite's takes a value of any type.
BROKEN_ON_SQLITE: list[Broken] = [
    ("id", QUEUED, {"id": OTHER.upper()}),
    ("id", QUEUED, {"id": OTHER.replace("-", "")}),
    ("id", QUEUED, {"id": OTHER + "\0"}),
    ("id", QUEUED, {"id": OTHER.encode()}),
    ("id", QUEUED, {"id": ""}),
    ("parent_id", QUEUED, {"parent_id": "x"}),
    ("parent_id", QUEUED, {"parent_id": ""}),
    ("flags", QUEUED, {"delivery_required": 2}),
    ("flags", QUEUED, {"delivery_required": "yes"}),
    ("flags", QUEUED, {"expects_heartbeat": -1}),
    ("flags", QUEUED, {"expects_heartbeat": 0.5}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST + "\0"}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST.encode()}),
    ("version", QUEUED, {"version": "none"}),
    ("version", QUEUED, {"version": 0.5}),
    ("timeout_seconds", QUEUED, {"timeout_seconds": "soon"}),
    *(("finite", QUEUED, {name: "then"}) for name in ALWAYS_SET),
    *(("finite", DONE, {name: b"then"}) for name in SET_LATER),
]
# To SQLite what is not a number is NULL.
BROKEN_ON_POSTGRESQL: list[Broken] = [
    ("timeout_seconds", QUEUED, {"timeout_seconds": NAN}),
    *(("finite", QUEUED, {name: NAN}) for name in ALWAYS_SET),
    *(("finite", DONE, {name: NAN}) for name in SET_LATER),
]

CREATION: Row = {
    "number": 0,
    "kind": "created",
    "from_status": None,
    "to_status": "queued",
    "occurred_at": CREATED,
    "code": "created",
}
START = {
    **CREATION,
    "number": 1,
    "kind": "task_transition",
    "from_status": "queued",
    "to_status": "running",
    "code": "started",
}
END = {**START, "number": 2, "from_status": "running", "to_status": "failed", "code": "worker_failed"}
DELIVERY = {
    **START,
    "number": 3,
    "kind": "delivery_transition",
    "from_status": "pending",
    "to_status": "delivered",
    "code": "transport_acknowledged",
}
BROKEN_EVENTS: list[Broken] = [
    ("kind", START, {"kind": "bogus"}),
    ("kind", START, {"kind": ""}),
    ("occurred_at", START, {"occurred_at": INFINITY}),
    ("occurred_at", START, {"occurred_at": -INFINITY}),
    ("transition", CREATION, {"number": 1}),
    ("transition", CREATION, {"from_status": "queued"}),
    ("transition", CREATION, {"to_status": "running"}),
    ("transition", CREATION, {"code": None}),
    ("transition", CREATION, {"code": "started"}),
    ("transition", START, {"number": 2}),
    ("transition", START, {"from_status": None}),
    ("transition", START, {"from_status": "running"}),
    ("transition", START, {"code": None}),
    ("transition", START, {"code": "created"}),
    ("transition", START, {"to_status": "queued"}),
    ("transition", END, {"number": 1}),
    ("transition", END, {"number": 3}),
    ("transition", END, {"from_status": "succeeded"}),
    ("transition", END, {"to_status": "delivered"}),
    ("transition", END, {"code": "completed"}),
    ("transition", END, {"code": "bogus"}),
    ("transition", DELIVERY, {"number": 1}),
    ("transition", DELIVERY, {"number": 4}),
    ("transition", DELIVERY, {"from_status": "delivered"}),
    ("transition", DELIVERY, {"to_status": "pending"}),
    ("transition", DELIVERY, {"to_status": "succeeded"}),
    ("transition", DELIVERY, {"code": "transport_failed"}),
    ("transition", DELIVERY, {"code": "worker_failed"}),
]
BROKEN_EVENTS_ON_SQLITE: list[Broken] = [
    ("number", START, {"number": 1.5}),
    ("number", START, {"number": "one"}),
    ("occurred_at", START, {"occurred_at": "then"}),
]
BROKEN_EVENTS_ON_POSTGRESQL: list[Broken] = [("occurred_at", START, {"occurred_at": NAN})]
#: PostgreSQL's own types leave nothing to break there.
KEPT_BY_TYPES = {"ck_tsg_tasks_id", "ck_tsg_tasks_flags", "ck_tsg_task_events_number"}


def on_each(common: list[Broken], sqlite: list[Broken], postgresql: list[Broken]) -> Any:
    """The rows that break a rule of theirs, by the database that can be given them."""
    cases = [
        pytest.param(name, *case, id=f"{name}-{case[0]}{at}")
        for name, rows in (("sqlite", common + sqlite), ("postgresql", common + postgresql))
        for at, case in enumerate(rows)
    ]
    return pytest.mark.parametrize(("connection", "check", "row", "changes"), cases, indirect=["connection"])


def checks_of(name: str) -> set[str]:
    """The CHECKs that are broken here on one database."""
    own = [*BROKEN, *(BROKEN_ON_SQLITE if name == "sqlite" else BROKEN_ON_POSTGRESQL)]
    events = [*BROKEN_EVENTS, *(BROKEN_EVENTS_ON_SQLITE if name == "sqlite" else BROKEN_EVENTS_ON_POSTGRESQL)]
    return {f"ck_tsg_tasks_{case[0]}" for case in own} | {f"ck_tsg_task_events_{case[0]}" for case in events}


# -- the ways in -------------------------------------------------------------------------------------------


def put(connection: Connection, table: str, row: Row) -> None:
    marks = ", ".join(placed(connection, name) for name in row)
    connection.execute(sa.text(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})"), row)


def put_in_a_session(connection: Connection, table: str, row: Row) -> None:
    marks = ", ".join(placed(connection, name) for name in row)
    with Session(connection) as session:
        session.execute(sa.text(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})"), row)


def put_in_bulk(connection: Connection, table: str, row: Row) -> None:
    with Session(connection) as session:
        session.execute(sa.insert(Task if table == "tsg_tasks" else TaskEvent), [row])


def put_by_core(connection: Connection, table: str, row: Row) -> None:
    mapped: sa.Table = (Task if table == "tsg_tasks" else TaskEvent).__table__  # type: ignore[assignment]
    connection.execute(sa.insert(mapped), row)


def put_by_the_driver(connection: Connection, table: str, row: Row) -> None:
    mark = "?" if connection.dialect.name == "sqlite" else "%s"
    marks = ", ".join([mark] * len(row))
    connection.exec_driver_sql(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))


Way = Callable[[Connection, str, Row], None]
WAYS: list[Way] = [put, put_in_a_session, put_in_bulk, put_by_core, put_by_the_driver]


def refused(connection: Connection, table: str, row: Row, match: str, way: Way = put) -> str:
    """What the database says of a row that it does not take."""
    savepoint = connection.begin_nested()
    with pytest.raises(IntegrityError) as caught:
        way(connection, table, row)
    savepoint.rollback()
    told = str(caught.value.orig)
    assert re.search(match, told), told
    return told


def bare_task(connection: Connection) -> int:
    """The key of a task without any event."""
    put(connection, "tsg_tasks", QUEUED)
    return int(connection.execute(sa.select(tasks.c.pk).where(tasks.c.id == OTHER)).scalar_one())


# -- each CHECK --------------------------------------------------------------------------------------------


def checks_broken_by(connection: Connection, table: str, row: Row) -> dict[str, bool]:
    """Each named CHECK of a table of SQLite's as it is stored, asked of a row that is only made up."""
    sql = connection.execute(sa.text("SELECT sql FROM sqlite_master WHERE name = :name"), {"name": table}).scalar_one()
    found = {}
    source = ", ".join(f"? AS {name}" for name in row)
    for match in re.finditer(rf"CONSTRAINT (ck_{table}_\w+) CHECK \(", sql):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(sql[end], 0)
            end += 1
        question = f"SELECT ({sql[match.end() : end - 1]}) IS NOT TRUE FROM (SELECT {source})"
        found[match[1]] = bool(connection.exec_driver_sql(question, tuple(row.values())).scalar_one())
    return found


def leave_one_check(connection: Connection, table: str, kept: str) -> None:
    query = "SELECT conname FROM pg_constraint WHERE conrelid = CAST(:table AS regclass) AND contype = 'c'"
    found = set(connection.scalars(sa.text(query), {"table": table}))
    assert kept in found
    dropped = ", ".join(f"DROP CONSTRAINT {name}" for name in sorted(found - {kept}))
    connection.exec_driver_sql(f"ALTER TABLE {table} {dropped}")


def refused_by_its_check_alone(connection: Connection, table: str, check: str, row: Row) -> None:
    name = f"ck_{table}_{check}"
    told = refused(connection, table, row, f"ck_{table}_")
    if connection.dialect.name == "sqlite":
        broken = {other for other, is_broken in checks_broken_by(connection, table, row).items() if is_broken}
        assert name in broken
        assert told.startswith("CHECK constraint failed: ")
        assert told.rpartition(" ")[2] in broken
    else:
        leave_one_check(connection, table, name)
        refused(connection, table, row, f'"{name}"')


@pytest.mark.parametrize("row", [QUEUED, RUNNING, DONE, SENT, KEPT])
@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_keeps_every_rule_is_taken(connection: Connection, way: Way, row: Row) -> None:
    way(connection, "tsg_tasks", row)


@on_each(BROKEN, BROKEN_ON_SQLITE, BROKEN_ON_POSTGRESQL)
def test_a_row_that_breaks_a_rule_is_refused_also_by_that_rules_check_alone(
    connection: Connection, check: str, row: Row, changes: Row
) -> None:
    refused_by_its_check_alone(connection, "tsg_tasks", check, {**row, **changes})


@pytest.mark.parametrize("row", [CREATION, START, END, {**END, "code": None}, DELIVERY, {**DELIVERY, "number": 2}])
@pytest.mark.parametrize("way", WAYS)
def test_an_event_that_keeps_every_rule_is_taken_once(connection: Connection, way: Way, row: Row) -> None:
    event = {"task_pk": bare_task(connection), **row}
    way(connection, "tsg_task_events", event)
    if way not in (put_in_a_session, put_in_bulk):
        # A session that joins takes what it did back with it.
        refused(connection, "tsg_task_events", event, "pk_tsg_task_events|tsg_task_events_replace_guard", way)


@on_each(BROKEN_EVENTS, BROKEN_EVENTS_ON_SQLITE, BROKEN_EVENTS_ON_POSTGRESQL)
def test_an_event_that_breaks_a_rule_is_refused_also_by_that_rules_check_alone(
    connection: Connection, check: str, row: Row, changes: Row
) -> None:
    broken = {"task_pk": bare_task(connection), **row, **changes}
    refused_by_its_check_alone(connection, "tsg_task_events", check, broken)


def one_of_each(rows: list[Broken]) -> list[Broken]:
    return list({case[0]: case for case in rows}.values())


@pytest.mark.parametrize("way", WAYS[1:])
def test_every_way_in_meets_the_checks(connection: Connection, way: Way) -> None:
    for _, row, changes in one_of_each(BROKEN):
        refused(connection, "tsg_tasks", {**row, **changes}, "ck_tsg_tasks_", way)
    key = bare_task(connection)
    for _, row, changes in one_of_each(BROKEN_EVENTS):
        refused(connection, "tsg_task_events", {"task_pk": key, **row, **changes}, "ck_tsg_task_events_", way)


def test_every_check_is_broken_once_here(connection: Connection) -> None:
    if connection.dialect.name == "sqlite":
        event = {"task_pk": bare_task(connection), **START}
        asked = checks_broken_by(connection, "tsg_tasks", QUEUED)
        asked |= checks_broken_by(connection, "tsg_task_events", event)
        assert not any(asked.values())
        assert set(asked) == checks_of("sqlite")
    else:
        query = "SELECT conname FROM pg_constraint WHERE contype = 'c' AND starts_with(conname, 'ck_tsg_')"
        assert set(connection.scalars(sa.text(query))) == checks_of("postgresql") | KEPT_BY_TYPES


# -- what must be there, and once --------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_row_without_a_value_that_must_be_there_is_refused(connection: Connection, way: Way) -> None:
    for column in tasks.c:
        if not column.nullable and column.name != "pk":
            refused(connection, "tsg_tasks", {**QUEUED, column.name: None}, "NOT NULL|null value", way)


@pytest.mark.parametrize("way", WAYS)
def test_an_id_and_a_key_are_there_once_and_a_parent_exists(connection: Connection, way: Way) -> None:
    key = bare_task(connection)
    refused(connection, "tsg_tasks", QUEUED, "tsg_tasks_replace_guard|uq_tsg_tasks_id", way)
    another = str(uuid.uuid4())
    refused(connection, "tsg_tasks", {**QUEUED, "id": another, "pk": key}, "tsg_tasks_replace_guard|pk_tsg_tasks", way)
    orphan = {**QUEUED, "id": another, "parent_id": str(uuid.uuid4())}
    refused(connection, "tsg_tasks", orphan, "FOREIGN KEY|fk_tsg_tasks_parent_id", way)


@pytest.mark.parametrize("way", WAYS)
def test_an_event_needs_its_task(connection: Connection, way: Way) -> None:
    stray = {"task_pk": bare_task(connection) + 10**9, **CREATION}
    refused(connection, "tsg_task_events", stray, "FOREIGN KEY|fk_tsg_task_events_task_pk", way)
