"""B32: the whole table of from x to for both machines, through every way there is into the database."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from tests.conftest import FakeClock, raw
from tsg import Ledger, LedgerError, Task, TaskEvent

TASK_WORDS = ("queued", "running", "succeeded", "failed", "timed_out", "cancelled")
TASK_ENDS = TASK_WORDS[2:]
LEGAL_TASK = {("queued", "running"), *((source, end) for source in ("queued", "running") for end in TASK_ENDS)}

DELIVERY_WORDS = ("pending", "delivered", "failed", "not_applicable")
LEGAL_DELIVERY = {("pending", "delivered"), ("pending", "failed"), ("pending", "not_applicable")}

CREATED, STARTED, ENDED, DELIVERED, LATER = 1_000.0, 1_010.0, 1_020.0, 1_030.0, 1_040.0
TIMEOUT = 60.0
DIGEST = "0123456789abcdef" * 4
OTHER = "7c9e6679-7425-40de-944b-e07fc1f90ae7"


def enforce_foreign_keys(connection: sqlite3.Connection, _: object = None) -> None:
    connection.execute("PRAGMA foreign_keys = ON")


class World(NamedTuple):
    """One ledger for all tests, each of which rolls back; tasks by the state that they are in."""

    path: Path
    engine: Engine
    tasks: dict[str, str]
    deliveries: dict[str, str]
    told: str
    parent: str
    child: str


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("guards")
    folder.chmod(0o700)
    path = folder / "ledger.sqlite"
    clock = FakeClock(CREATED)
    with Ledger(path, clock=clock) as ledger:

        def make(status: str, delivery: str = "pending", *, codes: tuple[str | None, str | None] = (None, None)) -> str:
            clock.now = CREATED
            task = ledger.create_task(
                task_id=None,
                parent_id=None,
                payload_hash=None,
                timeout_seconds=TIMEOUT,
                delivery_required=delivery != "not_applicable",
            )
            if status != "queued":
                clock.now = STARTED
                ledger.start_task(task.id)
            if status in TASK_ENDS:
                clock.now = ENDED
                ledger.close_task(task.id, status, code=codes[0])
            if delivery != "pending":
                clock.now = DELIVERED
                ledger.set_delivery(task.id, delivery, code=codes[1])
            return task.id

        tasks = {status: make(status) for status in TASK_WORDS}
        deliveries = {word: make("succeeded", word) for word in DELIVERY_WORDS}
        told = make("succeeded", "delivered", codes=("completed", "transport_acknowledged"))
        parent = make("queued")
        child = ledger.create_task(task_id=None, parent_id=parent, payload_hash=DIGEST, timeout_seconds=None).id
        clock.now = CREATED
        internal = ledger.create_task(
            task_id=None, parent_id=None, payload_hash=None, timeout_seconds=TIMEOUT, delivery_required=False
        ).id
        clock.now = STARTED
        ledger.start_task(internal)
        clock.now = ENDED
        ledger.close_task(internal, "succeeded", code=None)
        deliveries["pending internal"] = internal
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=NullPool)
    sa.event.listen(engine, "connect", enforce_foreign_keys)
    yield World(path, engine, tasks, deliveries, told, parent, child)
    engine.dispose()


@pytest.fixture
def connection(world: World) -> Iterator[sqlite3.Connection]:
    """Another program's connection, in a transaction that is rolled back."""
    with closing(raw(world.path)) as opened:
        enforce_foreign_keys(opened)
        opened.execute("BEGIN IMMEDIATE")
        yield opened
        opened.execute("ROLLBACK")


@pytest.fixture
def session(world: World) -> Iterator[Session]:
    with Session(world.engine, info={"tsg_clock": FakeClock(LATER)}) as opened:
        yield opened
        opened.rollback()


def by_bulk_update(world: World, identifier: str, values: dict[str, Any]) -> Any:
    with Session(world.engine) as session:
        session.execute(sa.update(Task).where(Task.id == identifier).values(values))
        return session.execute(
            sa.select(*(Task.__table__.c[name] for name in values)).where(Task.id == identifier)
        ).one()


def by_core_update(world: World, identifier: str, values: dict[str, Any]) -> Any:
    table = sa.table("tsg_tasks", sa.column("id"), *(sa.column(name) for name in values))
    with world.engine.connect() as connection:
        connection.execute(sa.update(table).where(table.c.id == identifier).values(values))
        return connection.execute(sa.select(*(table.c[name] for name in values)).where(table.c.id == identifier)).one()


def by_raw_sql(world: World, identifier: str, values: dict[str, Any]) -> Any:
    with closing(raw(world.path)) as connection:
        connection.execute("BEGIN")
        assignments = ", ".join(f"{name} = ?" for name in values)
        connection.execute(f"UPDATE tsg_tasks SET {assignments} WHERE id = ?", (*values.values(), identifier))
        names = ", ".join(values)
        row = connection.execute(f"SELECT {names} FROM tsg_tasks WHERE id = ?", (identifier,)).fetchone()
        connection.execute("ROLLBACK")
        return row


ROUND_THE_VERBS = [by_bulk_update, by_core_update, by_raw_sql]
Route = Callable[[World, str, dict[str, Any]], Any]


def refused(route: Route, world: World, identifier: str, values: dict[str, Any], *guards: str) -> None:
    with pytest.raises((IntegrityError, sqlite3.IntegrityError)) as caught:
        route(world, identifier, values)
    assert any(guard in str(caught.value) for guard in guards), str(caught.value)


def task_values(source: str, to: str) -> dict[str, Any]:
    """All that must be set for the row to keep every rule of a row in its new state."""
    if source == to or {source, to} <= set(TASK_ENDS):
        return {"status": to}
    if to == "queued":
        return {
            "status": to,
            "started_at": None,
            "deadline_at": None,
            "ended_at": None,
            "updated_at": CREATED,
            "version": 0,
        }
    if to == "running":
        started = {"started_at": STARTED, "deadline_at": STARTED + TIMEOUT}
        return {"status": to, **started, "ended_at": None, "updated_at": STARTED, "version": 1}
    return {"status": to, "ended_at": LATER, "updated_at": LATER, "version": 1 if source == "queued" else 2}


def delivery_values(source: str, to: str) -> dict[str, Any]:
    if source == to or "pending" not in (source, to):
        return {"delivery_status": to}
    if to == "pending":
        return {"delivery_status": to, "delivery_updated_at": CREATED, "version": 2}
    return {"delivery_status": to, "delivery_updated_at": LATER, "version": 3}


def every_pair(words: tuple[str, ...]) -> Any:
    pairs = [(source, to) for source in words for to in words]
    return pytest.mark.parametrize(("source", "to"), pairs, ids=[f"{source}-{to}" for source, to in pairs])


def by_verb(task: Task, to: str) -> None:
    if to == "running":
        task.start()
    else:
        task.close(to)


def by_assignment(task: Task, to: str) -> None:
    task.status = to  # type: ignore[assignment]


def deliver_by_verb(task: Task, to: str) -> None:
    task.deliver(to)


def deliver_by_assignment(task: Task, to: str) -> None:
    task.delivery_status = to  # type: ignore[assignment]


@every_pair(TASK_WORDS)
@pytest.mark.parametrize("route", [by_verb, by_assignment])
def test_a_task_goes_through_its_verbs_where_the_machine_goes(
    world: World, session: Session, route: Callable[[Task, str], None], source: str, to: str
) -> None:
    task = session.get_one(Task, world.tasks[source])
    version, events = task.version, len(task.events)
    nothing_to_do = source == to and (to != "queued" or route is by_assignment)
    if (source, to) in LEGAL_TASK or nothing_to_do:
        route(task, to)
        session.flush()
        session.refresh(task)
        moved = 0 if source == to else 1
        assert (task.status, task.version, len(task.events)) == (to, version + moved, events + moved)
    else:
        with pytest.raises(LedgerError):
            route(task, to)
        assert not session.dirty
        assert task.status == source


@every_pair(DELIVERY_WORDS)
@pytest.mark.parametrize("route", [deliver_by_verb, deliver_by_assignment])
def test_a_delivery_goes_through_its_verbs_where_the_machine_goes(
    world: World, session: Session, route: Callable[[Task, str], None], source: str, to: str
) -> None:
    internal = source == "pending" and to == "not_applicable"
    task = session.get_one(Task, world.deliveries["pending internal" if internal else source])
    version, events = task.version, len(task.events)
    nothing_to_do = source == to and (to != "pending" or route is deliver_by_assignment)
    if (source, to) in LEGAL_DELIVERY or nothing_to_do:
        route(task, to)
        session.flush()
        session.refresh(task)
        moved = 0 if source == to else 1
        assert (task.delivery_status, task.version, len(task.events)) == (to, version + moved, events + moved)
    else:
        with pytest.raises(LedgerError):
            route(task, to)
        assert not session.dirty
        assert task.delivery_status == source


@every_pair(TASK_WORDS)
@pytest.mark.parametrize("route", ROUND_THE_VERBS)
def test_a_status_written_round_the_verbs_goes_where_the_machine_goes(
    world: World, route: Route, source: str, to: str
) -> None:
    identifier, values = world.tasks[source], task_values(source, to)
    if source == to or (source, to) in LEGAL_TASK:
        assert tuple(route(world, identifier, values)) == tuple(values.values())
    else:
        refused(route, world, identifier, {"status": to}, "tsg_tasks_status_guard")
        refused(route, world, identifier, values, "tsg_tasks_status_guard", "tsg_tasks_written_once_guard")


@every_pair(DELIVERY_WORDS)
@pytest.mark.parametrize("route", ROUND_THE_VERBS)
def test_a_delivery_status_written_round_the_verbs_goes_where_the_machine_goes(
    world: World, route: Route, source: str, to: str
) -> None:
    internal = source == "pending" and to == "not_applicable"
    identifier = world.deliveries["pending internal" if internal else source]
    values = delivery_values(source, to)
    if source == to or (source, to) in LEGAL_DELIVERY:
        assert tuple(route(world, identifier, values)) == tuple(values.values())
    else:
        refused(route, world, identifier, {"delivery_status": to}, "tsg_tasks_delivery_guard")
        refused(route, world, identifier, values, "tsg_tasks_delivery_guard", "tsg_tasks_written_once_guard")


@pytest.mark.parametrize("route", ROUND_THE_VERBS)
@pytest.mark.parametrize("to", DELIVERY_WORDS[1:])
def test_a_delivery_written_round_the_verbs_waits_for_its_task_and_fits_it(world: World, route: Route, to: str) -> None:
    for status in ("queued", "running"):
        values = {"delivery_status": to, "delivery_updated_at": LATER, "version": 1 if status == "queued" else 2}
        refused(route, world, world.tasks[status], values, "ck_tsg_tasks_delivery", "ck_tsg_tasks_version")
    unfit = world.deliveries["pending" if to == "not_applicable" else "pending internal"]
    refused(route, world, unfit, delivery_values("pending", to), "ck_tsg_tasks_delivery")


@pytest.mark.parametrize("route", ROUND_THE_VERBS)
@pytest.mark.parametrize("column", ["status", "delivery_status"])
@pytest.mark.parametrize("word", ["bogus", "", "Queued", "queued ", None])
def test_a_word_that_is_no_state_is_refused(world: World, route: Route, column: str, word: str | None) -> None:
    for identifier in (world.tasks["queued"], world.deliveries["delivered"]):
        if route is by_bulk_update and word is None:
            continue
        refused(route, world, identifier, {column: word}, "guard", "ck_tsg_tasks", "NOT NULL")


@pytest.mark.parametrize(
    ("machine", "source", "to"),
    [
        *(("tasks", s, t) for s in TASK_WORDS for t in TASK_WORDS if s != t and (s, t) not in LEGAL_TASK),
        *(
            ("deliveries", s, t)
            for s, t in (
                ("delivered", "failed"),
                ("failed", "delivered"),
                ("delivered", "pending"),
                ("failed", "pending"),
            )
        ),
        ("deliveries", "not_applicable", "pending"),
    ],
)
def test_but_for_the_guards_those_rows_would_pass(
    world: World, connection: sqlite3.Connection, machine: str, source: str, to: str
) -> None:
    drop_guards(connection)
    values = task_values(source, to) if machine == "tasks" else delivery_values(source, to)
    assignments = ", ".join(f"{name} = ?" for name in values)
    identifier = getattr(world, machine)[source]
    changed = connection.execute(f"UPDATE tsg_tasks SET {assignments} WHERE id = ?", (*values.values(), identifier))
    assert changed.rowcount == 1


def drop_guards(connection: sqlite3.Connection) -> None:
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        connection.execute(f'DROP TRIGGER "{name}"')


IMMUTABLE = [
    ("pk", 77_777),
    ("id", OTHER),
    ("parent_id", "the parent's"),
    ("parent_id", None),
    ("delivery_required", False),
    ("payload_hash", "f" * 64),
    ("payload_hash", None),
    ("timeout_seconds", 5.0),
    ("created_at", CREATED - 1),
]


@pytest.mark.parametrize("route", ROUND_THE_VERBS)
@pytest.mark.parametrize(("column", "value"), IMMUTABLE)
def test_what_creation_wrote_is_never_written_again(world: World, route: Route, column: str, value: Any) -> None:
    if value == "the parent's":
        refused(route, world, world.tasks["queued"], {column: world.parent}, "tsg_tasks_immutable_guard")
        refused(route, world, world.child, {column: world.tasks["queued"]}, "tsg_tasks_immutable_guard")
    else:
        refused(route, world, world.child, {column: value}, "tsg_tasks_immutable_guard")


@pytest.mark.parametrize("route", ROUND_THE_VERBS)
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("started_at", STARTED + 1),
        ("started_at", None),
        ("ended_at", ENDED + 1),
        ("ended_at", None),
        ("deadline_at", STARTED + TIMEOUT + 1),
        ("deadline_at", None),
        ("terminal_code", "worker_completed"),
        ("terminal_code", None),
        ("delivery_code", None),
    ],
)
def test_what_a_transition_wrote_is_never_written_again(world: World, route: Route, column: str, value: Any) -> None:
    refused(route, world, world.told, {column: value}, "tsg_tasks_written_once_guard")


@pytest.mark.parametrize("route", ROUND_THE_VERBS)
@pytest.mark.parametrize(
    "column", ["pk", "id", "payload_hash", "created_at", "started_at", "ended_at", "terminal_code", "delivery_code"]
)
def test_writing_what_is_there_already_is_no_change(
    world: World, connection: sqlite3.Connection, route: Route, column: str
) -> None:
    (value,) = connection.execute(f"SELECT {column} FROM tsg_tasks WHERE id = ?", (world.told,)).fetchone()
    connection.execute("ROLLBACK")
    connection.execute("BEGIN")
    assert tuple(route(world, world.told, {column: value})) == (value,)


EVENT_COLUMNS = {
    "task_pk": 1,
    "number": 9,
    "kind": "created",
    "from_status": "running",
    "to_status": "failed",
    "occurred_at": 5.0,
    "code": "caller_cancelled",
}


@pytest.mark.parametrize(("column", "value"), EVENT_COLUMNS.items())
def test_an_event_is_not_changed_by_any_way_round(
    world: World, connection: sqlite3.Connection, column: str, value: Any
) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="tsg_task_events_update_guard"):
        connection.execute(f"UPDATE tsg_task_events SET {column} = ?", (value,))
    connection.execute("ROLLBACK")
    connection.execute("BEGIN")
    with Session(world.engine) as session, pytest.raises(IntegrityError, match="tsg_task_events_update_guard"):
        session.execute(sa.update(TaskEvent).values({column: value}))
    table = sa.table("tsg_task_events", sa.column(column))
    with world.engine.connect() as other, pytest.raises(IntegrityError, match="tsg_task_events_update_guard"):
        other.execute(sa.update(table).values({column: value}))


@pytest.mark.parametrize("foreign_keys", ["ON", "OFF"])
def test_an_event_is_not_deleted_while_its_task_exists(world: World, foreign_keys: str) -> None:
    with closing(raw(world.path)) as connection:
        connection.execute(f"PRAGMA foreign_keys = {foreign_keys}")
        with pytest.raises(sqlite3.IntegrityError, match="tsg_task_events_delete_guard"):
            connection.execute("DELETE FROM tsg_task_events WHERE number = 2")
    with Session(world.engine) as session, pytest.raises(IntegrityError, match="tsg_task_events_delete_guard"):
        session.execute(sa.delete(TaskEvent))
    with world.engine.connect() as other, pytest.raises(IntegrityError, match="tsg_task_events_delete_guard"):
        other.execute(sa.delete(sa.table("tsg_task_events")))


def test_deleting_a_task_takes_its_events_along_and_no_others(world: World, connection: sqlite3.Connection) -> None:
    count = "SELECT count(*) FROM tsg_task_events"
    (before,) = connection.execute(count).fetchone()
    (own,) = connection.execute(f"{count} JOIN tsg_tasks ON pk = task_pk WHERE id = ?", (world.told,)).fetchone()
    assert own == 4
    connection.execute("DELETE FROM tsg_tasks WHERE id = ?", (world.told,))
    assert connection.execute(count).fetchone() == (before - own,)
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_a_parent_is_not_deleted_while_its_child_stays(world: World, connection: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        connection.execute("DELETE FROM tsg_tasks WHERE id = ?", (world.parent,))


def columns_of(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def copied(connection: sqlite3.Connection, table: str, changes: dict[str, str]) -> str:
    return ", ".join(changes.get(name, name) for name in columns_of(connection, table))


@pytest.mark.parametrize("foreign_keys", ["ON", "OFF"])
@pytest.mark.parametrize("statement", ["INSERT OR REPLACE INTO", "REPLACE INTO"])
@pytest.mark.parametrize("key", ["both keys", "its id alone", "its pk alone"])
def test_a_task_does_not_leave_its_terminal_state_by_being_replaced(
    world: World, foreign_keys: str, statement: str, key: str
) -> None:
    queued = {
        "status": "'queued'",
        "ended_at": "NULL",
        "started_at": "NULL",
        "deadline_at": "NULL",
        "updated_at": "created_at",
        "version": "0",
        **({"pk": "pk + 500"} if key == "its id alone" else {}),
        **({"id": f"'{OTHER}'"} if key == "its pk alone" else {}),
    }
    with closing(raw(world.path)) as connection:
        connection.execute(f"PRAGMA foreign_keys = {foreign_keys}")
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.IntegrityError):
            connection.execute(
                f"{statement} tsg_tasks SELECT {copied(connection, 'tsg_tasks', queued)} FROM tsg_tasks WHERE id = ?",
                (world.tasks["failed"],),
            )
        assert connection.execute("SELECT status FROM tsg_tasks WHERE id = ?", (world.tasks["failed"],)).fetchone() == (
            "failed",
        )
        connection.execute("ROLLBACK")


@pytest.mark.parametrize("statement", ["INSERT OR REPLACE INTO", "REPLACE INTO"])
def test_an_event_is_not_changed_by_being_replaced(
    world: World, connection: sqlite3.Connection, statement: str
) -> None:
    changed = {"to_status": "'cancelled'", "code": "'caller_cancelled'", "occurred_at": "occurred_at + 5.0"}
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute(
            f"{statement} tsg_task_events SELECT {copied(connection, 'tsg_task_events', changed)} "
            "FROM tsg_task_events WHERE number = 2 AND kind = 'task_transition'"
        )


@pytest.mark.parametrize("conflict", ["OR REPLACE", "OR IGNORE", "OR FAIL", "OR ROLLBACK", "OR ABORT"])
def test_no_conflict_clause_of_an_update_goes_round_the_guards(world: World, conflict: str) -> None:
    with closing(raw(world.path)) as connection:
        for statement in (
            f"UPDATE {conflict} tsg_tasks SET status = 'failed' WHERE status = 'succeeded'",
            f"UPDATE {conflict} tsg_tasks SET delivery_status = 'pending' WHERE delivery_status = 'delivered'",
            f"UPDATE {conflict} tsg_tasks SET created_at = created_at - 1",
            f"UPDATE {conflict} tsg_task_events SET code = NULL",
        ):
            connection.execute("BEGIN")
            with pytest.raises(sqlite3.IntegrityError, match="guard"):
                connection.execute(statement)
            connection.execute("ROLLBACK")


def test_an_upsert_meets_the_guards_too(world: World, connection: sqlite3.Connection) -> None:
    names = ", ".join(columns_of(connection, "tsg_tasks"))
    with pytest.raises(sqlite3.IntegrityError, match="tsg_tasks_replace_guard"):
        connection.execute(
            f"INSERT INTO tsg_tasks SELECT {names} FROM tsg_tasks WHERE id = ? "
            "ON CONFLICT (id) DO UPDATE SET status = 'timed_out'",
            (world.tasks["failed"],),
        )


QUEUED: dict[str, Any] = {
    "pk": None,
    "id": OTHER,
    "parent_id": None,
    "status": "queued",
    "delivery_status": "pending",
    "delivery_required": 1,
    "expects_heartbeat": 1,
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
KEPT = {
    **DONE,
    "delivery_required": 0,
    "delivery_status": "not_applicable",
    "delivery_code": "internal_task",
    "delivery_updated_at": DELIVERED,
    "version": 3,
}

BROKEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("id", QUEUED, {"id": OTHER.upper()}),
    ("id", QUEUED, {"id": OTHER.replace("-", "")}),
    ("id", QUEUED, {"id": OTHER + "\0"}),
    ("id", QUEUED, {"id": OTHER.encode()}),
    ("id", QUEUED, {"id": ""}),
    ("parent_id", QUEUED, {"parent_id": OTHER}),
    ("parent_id", QUEUED, {"parent_id": "x"}),
    ("parent_id", QUEUED, {"parent_id": ""}),
    ("status", QUEUED, {"status": "bogus"}),
    ("status", QUEUED, {"status": "QUEUED"}),
    ("delivery_status", QUEUED, {"delivery_status": "bogus"}),
    ("flags", QUEUED, {"delivery_required": 2}),
    ("flags", QUEUED, {"delivery_required": "yes"}),
    ("flags", QUEUED, {"expects_heartbeat": -1}),
    ("flags", QUEUED, {"expects_heartbeat": 0.5}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST.upper()}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST[:-1]}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST + "0"}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST + "\0"}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST.encode()}),
    ("payload_hash", QUEUED, {"payload_hash": ""}),
    ("expects_heartbeat", QUEUED, {"expects_heartbeat": 0, "timeout_seconds": None}),
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
    ("delivery", SENT, {"delivery_required": 0}),
    ("delivery", KEPT, {"delivery_required": 1}),
    ("delivery", RUNNING, {"delivery_status": "delivered", "delivery_updated_at": DELIVERED, "version": 2}),
    ("delivery_code", DONE, {"delivery_code": "transport_acknowledged"}),
    ("delivery_code", SENT, {"delivery_code": "transport_failed"}),
    ("delivery_code", SENT, {"delivery_code": "bogus"}),
    ("delivery_code", KEPT, {"delivery_code": "delivery_grace_expired"}),
    ("version", QUEUED, {"version": 1}),
    ("version", QUEUED, {"version": -1}),
    ("version", QUEUED, {"version": "none"}),
    ("version", QUEUED, {"version": 0.5}),
    ("version", RUNNING, {"version": 0}),
    ("version", DONE, {"version": 1}),
    ("version", SENT, {"version": 2}),
    ("version", RUNNING, {"version": 2, "expects_heartbeat": 0}),
    ("timeout_seconds", QUEUED, {"timeout_seconds": -1.0}),
    ("timeout_seconds", QUEUED, {"timeout_seconds": "soon"}),
    ("timeout_seconds", QUEUED, {"timeout_seconds": float("inf")}),
    *(("finite", QUEUED, {name: float("inf")}) for name in ("created_at", "updated_at", "delivery_updated_at")),
    *(("finite", QUEUED, {name: "then"}) for name in ("created_at", "updated_at", "delivery_updated_at")),
    *(("finite", DONE, {name: float("-inf")}) for name in ("started_at", "ended_at", "deadline_at")),
    *(("finite", DONE, {name: b"then"}) for name in ("started_at", "ended_at", "deadline_at")),
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
NOT_NULL = (
    "id",
    "status",
    "delivery_status",
    "delivery_required",
    "expects_heartbeat",
    "created_at",
    "updated_at",
    "delivery_updated_at",
    "version",
)


def insert(connection: sqlite3.Connection, table: str, row: dict[str, Any]) -> None:
    marks = ", ".join("?" * len(row))
    connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))


@pytest.mark.parametrize("row", [QUEUED, RUNNING, DONE, SENT, KEPT])
def test_a_row_that_keeps_every_rule_is_taken(connection: sqlite3.Connection, row: dict[str, Any]) -> None:
    insert(connection, "tsg_tasks", row)


@pytest.mark.parametrize(("check", "row", "changes"), BROKEN)
def test_a_row_that_breaks_a_rule_is_refused_by_its_check(
    connection: sqlite3.Connection, check: str, row: dict[str, Any], changes: dict[str, Any]
) -> None:
    broken = {**row, **changes}
    with pytest.raises(sqlite3.IntegrityError, match="CHECK constraint failed: ck_tsg_tasks_") as caught:
        insert(connection, "tsg_tasks", broken)
    others = {name: value for name, value in checks_broken_by(connection, "tsg_tasks", broken).items() if value}
    assert f"ck_tsg_tasks_{check}" in others
    assert str(caught.value).rpartition(" ")[2] in others


def checks_broken_by(connection: sqlite3.Connection, table: str, row: dict[str, Any]) -> dict[str, bool]:
    """Each named CHECK of a table as it is stored, asked of a row that is only made up."""
    (sql,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    found = {}
    source = ", ".join(f"? AS {name}" for name in row)
    for match in re.finditer(rf"CONSTRAINT (ck_{table}_\w+) CHECK \(", sql):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(sql[end], 0)
            end += 1
        question = f"SELECT ({sql[match.end() : end - 1]}) IS NOT TRUE FROM (SELECT {source})"
        found[match[1]] = bool(connection.execute(question, tuple(row.values())).fetchone()[0])
    return found


def test_every_check_of_a_task_is_broken_once_here(connection: sqlite3.Connection) -> None:
    names = checks_broken_by(connection, "tsg_tasks", QUEUED)
    assert not any(names.values())
    assert set(names) == {f"ck_tsg_tasks_{check}" for check, _, _ in BROKEN}


@pytest.mark.parametrize("column", NOT_NULL)
def test_a_row_without_a_value_that_must_be_there_is_refused(connection: sqlite3.Connection, column: str) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="NOT NULL"):
        insert(connection, "tsg_tasks", {**QUEUED, column: None})


def test_an_id_is_there_once_and_a_parent_exists(world: World, connection: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="_replace_guard"):
        insert(connection, "tsg_tasks", {**QUEUED, "id": world.told})
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        insert(connection, "tsg_tasks", {**QUEUED, "parent_id": OTHER.replace("7", "0")})


CREATION = {
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
BROKEN_EVENTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("number", START, {"number": 1.5}),
    ("number", START, {"number": "one"}),
    ("kind", START, {"kind": "bogus"}),
    ("kind", START, {"kind": ""}),
    ("occurred_at", START, {"occurred_at": float("inf")}),
    ("occurred_at", START, {"occurred_at": "then"}),
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


@pytest.fixture
def bare_task(connection: sqlite3.Connection) -> int:
    """The key of a task without any event."""
    insert(connection, "tsg_tasks", QUEUED)
    (key,) = connection.execute("SELECT pk FROM tsg_tasks WHERE id = ?", (OTHER,)).fetchone()
    return int(key)


@pytest.mark.parametrize("row", [CREATION, START, END, {**END, "code": None}, DELIVERY, {**DELIVERY, "number": 2}])
def test_an_event_that_keeps_every_rule_is_taken(
    connection: sqlite3.Connection, bare_task: int, row: dict[str, Any]
) -> None:
    insert(connection, "tsg_task_events", {"task_pk": bare_task, **row})


@pytest.mark.parametrize(("check", "row", "changes"), BROKEN_EVENTS)
def test_an_event_that_breaks_a_rule_is_refused_by_its_check(
    connection: sqlite3.Connection, bare_task: int, check: str, row: dict[str, Any], changes: dict[str, Any]
) -> None:
    broken = {"task_pk": bare_task, **row, **changes}
    with pytest.raises(sqlite3.IntegrityError, match="CHECK constraint failed: ck_tsg_task_events_"):
        insert(connection, "tsg_task_events", broken)
    assert checks_broken_by(connection, "tsg_task_events", broken)[f"ck_tsg_task_events_{check}"]


def test_every_check_of_an_event_is_broken_once_here(connection: sqlite3.Connection) -> None:
    names = checks_broken_by(connection, "tsg_task_events", START)
    assert not any(names.values())
    assert set(names) == {f"ck_tsg_task_events_{check}" for check, _, _ in BROKEN_EVENTS}


def test_an_event_needs_its_task_and_its_number_is_there_once(
    world: World, connection: sqlite3.Connection, bare_task: int
) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        insert(connection, "tsg_task_events", {"task_pk": bare_task + 1, **CREATION})
    insert(connection, "tsg_task_events", {"task_pk": bare_task, **CREATION})
    with pytest.raises(sqlite3.IntegrityError, match="_replace_guard"):
        insert(connection, "tsg_task_events", {"task_pk": bare_task, **CREATION})


def test_after_all_that_the_ledger_is_as_it_was(world: World) -> None:
    with Ledger(world.path) as ledger:
        report = ledger.doctor()
    assert report["healthy"]
    assert report["task_count"] == 6 + 4 + 1 + 2 + 1
