"""B32 on PostgreSQL: the whole table of from x to for both machines, through every way there is into the database."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from tests.conftest import FakeClock, database
from tsg import Ledger, LedgerError, Task, TaskEvent, doctor
from tsg.tables import task_events, tasks

TASK_WORDS = ("queued", "running", "succeeded", "failed", "timed_out", "cancelled")
TASK_ENDS = TASK_WORDS[2:]
LEGAL_TASK = {("queued", "running"), *((source, end) for source in ("queued", "running") for end in TASK_ENDS)}
DELIVERY_WORDS = ("pending", "delivered", "failed", "not_applicable")
LEGAL_DELIVERY = {("pending", word) for word in DELIVERY_WORDS[1:]}

CREATED, STARTED, ENDED, DELIVERED, LATER = 1_000.0, 1_010.0, 1_020.0, 1_030.0, 1_040.0
TIMEOUT = 60.0
DIGEST = "0123456789abcdef" * 4
OTHER = "7c9e6679-7425-40de-944b-e07fc1f90ae7"


class World(NamedTuple):
    """One ledger for all tests, each of which rolls back; tasks by the state that they are in."""

    engine: sa.Engine
    tasks: dict[str, str]
    deliveries: dict[str, str]
    told: str
    parent: str
    child: str


@pytest.fixture(scope="module")
def world(postgresql_server: sa.URL, postgresql_template: str) -> Iterator[World]:
    clock = FakeClock(CREATED)
    with database(postgresql_server, f"tsg_{uuid.uuid4().hex}", template=postgresql_template) as url:
        engine = sa.create_engine(url)
        ledger = Ledger(engine, clock=clock)

        def make(status: str, delivery: str = "pending", codes: Any = (None, None), internal: bool = False) -> str:
            clock.now = CREATED
            required = delivery != "not_applicable" and not internal
            task = ledger.create_task(timeout_seconds=TIMEOUT, delivery_required=required).id
            if status != "queued":
                clock.now = STARTED
                ledger.start_task(task)
            if status in TASK_ENDS:
                clock.now = ENDED
                ledger.close_task(task, status, code=codes[0])
            if delivery != "pending":
                clock.now = DELIVERED
                ledger.set_delivery(task, delivery, code=codes[1])
            return task

        parent = make("queued")
        child = ledger.create_task(parent_id=parent, payload_hash=DIGEST).id
        yield World(
            engine,
            {status: make(status) for status in TASK_WORDS},
            {
                **{word: make("succeeded", word) for word in DELIVERY_WORDS},
                "pending internal": make("succeeded", internal=True),
            },
            make("succeeded", "delivered", ("completed", "transport_acknowledged")),
            parent,
            child,
        )
        engine.dispose()


@pytest.fixture
def connection(world: World) -> Iterator[Connection]:
    """Another program's connection, in a transaction that is rolled back."""
    with world.engine.connect() as opened:
        yield opened
        opened.rollback()


@pytest.fixture
def session(world: World) -> Iterator[Session]:
    with Session(world.engine, info={"tsg_clock": FakeClock(LATER)}) as opened:
        yield opened
        opened.rollback()


def by_bulk_update(connection: Connection, identifier: str, values: dict[str, Any]) -> Any:
    with Session(connection) as session:
        session.execute(sa.update(Task).where(Task.id == identifier).values(values))
        found = sa.select(*(tasks.c[name] for name in values)).where(tasks.c.id == identifier)
        return session.execute(found).one()


def by_core_update(connection: Connection, identifier: str, values: dict[str, Any]) -> Any:
    table = sa.table("tsg_tasks", sa.column("id", sa.Uuid(as_uuid=False)), *(sa.column(n) for n in values if n != "id"))
    connection.execute(sa.update(table).where(table.c.id == identifier).values(values))
    found = connection.execute(sa.select(*(table.c[name] for name in values)).where(table.c.id == identifier))
    return found.one()


def by_text(connection: Connection, identifier: str, values: dict[str, Any]) -> Any:
    assignments = ", ".join(f"{name} = :{name}" for name in values)
    where = "WHERE id = CAST(:which AS uuid)"
    connection.execute(sa.text(f"UPDATE tsg_tasks SET {assignments} {where}"), {**values, "which": identifier})
    return connection.execute(
        sa.text(f"SELECT {', '.join(values)} FROM tsg_tasks {where}"), {"which": identifier}
    ).one()


def by_raw_sql(connection: Connection, identifier: str, values: dict[str, Any]) -> Any:
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor:
        assignments = ", ".join(f"{name} = %s" for name in values)
        cursor.execute(f"UPDATE tsg_tasks SET {assignments} WHERE id = %s", (*values.values(), identifier))
        cursor.execute(f"SELECT {', '.join(values)} FROM tsg_tasks WHERE id = %s", (identifier,))
        return cursor.fetchone()


def by_upsert(connection: Connection, identifier: str, values: dict[str, Any]) -> Any:
    names = [column.name for column in tasks.c if column.name != "pk"]
    rows = sa.select(*(tasks.c[name] for name in names)).where(tasks.c.id == identifier)
    statement = upsert(tasks).from_select(names, rows).on_conflict_do_update(index_elements=["id"], set_=values)
    connection.execute(statement)
    found = sa.select(*(tasks.c[name] for name in values)).where(tasks.c.id == identifier)
    return connection.execute(found).one()


Route = Callable[[Connection, str, dict[str, Any]], Any]
ROUND_THE_VERBS = [by_bulk_update, by_core_update, by_text, by_raw_sql, by_upsert]


def refused(route: Route, connection: Connection, identifier: str, values: dict[str, Any], *guards: str) -> None:
    savepoint = connection.begin_nested()
    with pytest.raises((IntegrityError, psycopg.errors.IntegrityError)) as caught:
        route(connection, identifier, values)
    assert any(guard in str(caught.value) for guard in guards), str(caught.value)
    savepoint.rollback()


def task_values(source: str, to: str) -> dict[str, Any]:
    """All that must be set for the row to keep every rule of a row in its new state."""
    if source == to or {source, to} <= set(TASK_ENDS):
        return {"status": to}
    if to == "queued":
        times = {"started_at": None, "deadline_at": None, "ended_at": None, "updated_at": CREATED}
        return {"status": to, **times, "version": 0}
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


# -- through the verbs -------------------------------------------------------------------------------------


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
    if (source, to) in LEGAL_TASK or (source == to and (to != "queued" or route is by_assignment)):
        route(task, to)
        session.flush()
        session.expire_all()
        moved = 0 if source == to else 1
        assert (task.status, task.version, len(task.events)) == (to, version + moved, events + moved)
        assert doctor.examine(session)["healthy"]
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
    if (source, to) in LEGAL_DELIVERY or (source == to and (to != "pending" or route is deliver_by_assignment)):
        route(task, to)
        session.flush()
        session.expire_all()
        moved = 0 if source == to else 1
        assert (task.delivery_status, task.version, len(task.events)) == (to, version + moved, events + moved)
        assert doctor.examine(session)["healthy"]
    else:
        with pytest.raises(LedgerError):
            route(task, to)
        assert not session.dirty
        assert task.delivery_status == source


# -- round the verbs ---------------------------------------------------------------------------------------


@every_pair(TASK_WORDS)
@pytest.mark.parametrize("route", ROUND_THE_VERBS)
def test_a_status_written_round_the_verbs_goes_where_the_machine_goes(
    world: World, connection: Connection, route: Route, source: str, to: str
) -> None:
    identifier, values = world.tasks[source], task_values(source, to)
    if source == to or (source, to) in LEGAL_TASK:
        assert tuple(route(connection, identifier, values)) == tuple(values.values())
    else:
        refused(route, connection, identifier, {"status": to}, "tsg_tasks_status_guard")
        refused(route, connection, identifier, values, "tsg_tasks_status_guard")


@every_pair(DELIVERY_WORDS)
@pytest.mark.parametrize("route", ROUND_THE_VERBS)
def test_a_delivery_status_written_round_the_verbs_goes_where_the_machine_goes(
    world: World, connection: Connection, route: Route, source: str, to: str
) -> None:
    internal = source == "pending" and to == "not_applicable"
    identifier = world.deliveries["pending internal" if internal else source]
    values = delivery_values(source, to)
    if source == to or (source, to) in LEGAL_DELIVERY:
        assert tuple(route(connection, identifier, values)) == tuple(values.values())
    else:
        refused(route, connection, identifier, {"delivery_status": to}, "tsg_tasks_delivery_guard")
        refused(route, connection, identifier, values, "tsg_tasks_delivery_guard")


@pytest.mark.parametrize("route", ROUND_THE_VERBS)
@pytest.mark.parametrize("to", DELIVERY_WORDS[1:])
def test_a_delivery_written_round_the_verbs_waits_for_its_task_and_fits_it(
    world: World, connection: Connection, route: Route, to: str
) -> None:
    for status in ("queued", "running"):
        values = {"delivery_status": to, "delivery_updated_at": LATER, "version": 1 if status == "queued" else 2}
        refused(route, connection, world.tasks[status], values, "ck_tsg_tasks_delivery")
    unfit = world.deliveries["pending" if to == "not_applicable" else "pending internal"]
    refused(route, connection, unfit, delivery_values("pending", to), "ck_tsg_tasks_delivery")


@pytest.mark.parametrize("route", ROUND_THE_VERBS)
@pytest.mark.parametrize("column", ["status", "delivery_status"])
@pytest.mark.parametrize("word", ["bogus", "", "Queued", "queued ", None])
def test_a_word_that_is_no_state_is_refused(
    world: World, connection: Connection, route: Route, column: str, word: str | None
) -> None:
    for identifier in (world.tasks["queued"], world.deliveries["delivered"]):
        refused(route, connection, identifier, {column: word}, "guard", "ck_tsg_tasks", "null value")


@pytest.mark.parametrize(
    ("machine", "source", "to"),
    [
        *(("tasks", s, t) for s in TASK_WORDS for t in TASK_WORDS if s != t and (s, t) not in LEGAL_TASK),
        *(("deliveries", s, t) for s in DELIVERY_WORDS[1:3] for t in ("delivered", "failed", "pending") if s != t),
        ("deliveries", "not_applicable", "pending"),
    ],
)
def test_but_for_the_guards_those_rows_would_pass(
    world: World, connection: Connection, machine: str, source: str, to: str
) -> None:
    connection.exec_driver_sql("ALTER TABLE tsg_tasks DISABLE TRIGGER USER")
    values = task_values(source, to) if machine == "tasks" else delivery_values(source, to)
    assert tuple(by_text(connection, getattr(world, machine)[source], values)) == tuple(values.values())


IMMUTABLE = [
    ("pk", 77_777),
    ("id", OTHER),
    ("parent_id", None),
    ("delivery_required", False),
    ("payload_hash", "f" * 64),
    ("payload_hash", None),
    ("timeout_seconds", 5.0),
    ("created_at", CREATED - 1),
]


@pytest.mark.parametrize("route", [by_bulk_update, by_text, by_raw_sql, by_upsert])
@pytest.mark.parametrize(("column", "value"), IMMUTABLE)
def test_what_creation_wrote_is_never_written_again(
    world: World, connection: Connection, route: Route, column: str, value: Any
) -> None:
    refused(route, connection, world.child, {column: value}, "tsg_tasks_immutable_guard")


def test_no_parent_is_given_or_exchanged_later(world: World, connection: Connection) -> None:
    for route in (by_bulk_update, by_raw_sql):
        refused(route, connection, world.tasks["queued"], {"parent_id": world.parent}, "tsg_tasks_immutable_guard")
        refused(route, connection, world.child, {"parent_id": world.tasks["queued"]}, "tsg_tasks_immutable_guard")


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
        ("delivery_updated_at", DELIVERED + 1),
        ("delivery_code", None),
    ],
)
def test_what_a_transition_wrote_is_never_written_again(
    world: World, connection: Connection, route: Route, column: str, value: Any
) -> None:
    refused(route, connection, world.told, {column: value}, "tsg_tasks_written_once_guard")


def test_a_time_that_is_no_number_is_written_by_none(world: World, connection: Connection) -> None:
    for column in ("started_at", "ended_at", "updated_at", "delivery_updated_at", "deadline_at"):
        for value in (float("nan"), float("inf"), float("-inf")):
            refused(by_text, connection, world.tasks["running"], {column: value}, "ck_tsg_tasks", "guard")


@pytest.mark.parametrize(
    "column", ["pk", "payload_hash", "created_at", "started_at", "ended_at", "terminal_code", "delivery_code"]
)
def test_writing_what_is_there_already_is_no_change(world: World, connection: Connection, column: str) -> None:
    value = connection.scalar(sa.select(tasks.c[column]).where(tasks.c.id == world.told))
    for route in ROUND_THE_VERBS:
        assert tuple(route(connection, world.told, {column: value})) == (value,)


def test_a_deleted_task_cannot_come_back_under_its_events_nor_an_id_twice(world: World, connection: Connection) -> None:
    names = ", ".join(column.name for column in tasks.c if column.name != "pk")
    with pytest.raises(IntegrityError, match="uq_tsg_tasks_id"):
        connection.execute(sa.text(f"INSERT INTO tsg_tasks ({names}) SELECT {names} FROM tsg_tasks LIMIT 1"))


def test_truncating_the_tasks_alone_is_refused(world: World, connection: Connection) -> None:
    with pytest.raises(sa.exc.DBAPIError, match="cannot truncate"):
        connection.exec_driver_sql("TRUNCATE tsg_tasks")


# -- events ------------------------------------------------------------------------------------------------

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
    world: World, connection: Connection, column: str, value: Any
) -> None:

    def through_a_session() -> None:
        with Session(connection) as session:
            session.execute(sa.update(TaskEvent).values({column: value}))

    table = sa.table("tsg_task_events", sa.column(column))
    insertion = upsert(task_events).from_select([c.name for c in task_events.c], sa.select(*task_events.c))
    primary = ["task_pk", "number"]
    ways: list[Callable[[], object]] = [
        through_a_session,
        lambda: connection.execute(sa.update(table).values({column: value})),
        lambda: connection.execute(sa.text(f"UPDATE tsg_task_events SET {column} = :value"), {"value": value}),
        lambda: connection.execute(insertion.on_conflict_do_update(index_elements=primary, set_={column: value})),
    ]
    for way in ways:
        savepoint = connection.begin_nested()
        with pytest.raises(IntegrityError, match="tsg_task_events_update_guard"):
            way()
        savepoint.rollback()


@pytest.mark.parametrize("temporary", [False, True])
@pytest.mark.parametrize("path", ["public", "elsewhere", "pg_catalog", ""])
def test_an_event_is_not_deleted_while_its_task_exists_wherever_the_search_path_leads(
    world: World, connection: Connection, path: str, temporary: bool
) -> None:
    if temporary:
        connection.exec_driver_sql("CREATE TEMPORARY TABLE tsg_tasks (pk bigint)")
    connection.exec_driver_sql("CREATE SCHEMA elsewhere")
    connection.exec_driver_sql("CREATE TABLE elsewhere.tsg_tasks (pk bigint)")
    connection.execute(sa.text("SELECT set_config('search_path', :path, true)"), {"path": path})
    for statement in (
        "DELETE FROM public.tsg_task_events",
        "DELETE FROM public.tsg_task_events WHERE number = 2",
        "DELETE FROM public.tsg_task_events USING public.tsg_tasks WHERE pk = task_pk",
        "UPDATE public.tsg_task_events SET code = NULL",
    ):
        savepoint = connection.begin_nested()
        with pytest.raises(IntegrityError, match="tsg_task_events_(delete|update)_guard"):
            connection.exec_driver_sql(statement)
        savepoint.rollback()
    refused_in_public = "UPDATE public.tsg_tasks SET status = 'queued' WHERE status = 'failed'"
    with pytest.raises(IntegrityError, match="tsg_tasks_status_guard"):
        connection.exec_driver_sql(refused_in_public)


def test_an_event_is_not_deleted_through_the_orm_either(world: World, connection: Connection) -> None:
    with Session(connection) as session:
        with pytest.raises(IntegrityError, match="tsg_task_events_delete_guard"):
            session.execute(sa.delete(TaskEvent))
        session.rollback()


@pytest.mark.parametrize("path", ["public", "elsewhere"])
def test_deleting_a_task_takes_its_events_along_and_no_others(world: World, connection: Connection, path: str) -> None:
    count = sa.select(sa.func.count()).select_from(task_events)
    before = connection.scalar(count)
    own = connection.scalar(count.join(tasks, tasks.c.pk == task_events.c.task_pk).where(tasks.c.id == world.told))
    assert own == 4
    connection.exec_driver_sql("CREATE SCHEMA elsewhere")
    connection.exec_driver_sql(f"SET LOCAL search_path = {path}")
    connection.execute(sa.text("DELETE FROM public.tsg_tasks WHERE id = CAST(:id AS uuid)"), {"id": world.told})
    connection.exec_driver_sql("SET LOCAL search_path = public")
    assert connection.scalar(count) == before - own
    assert doctor.examine(connection)["healthy"]


def test_a_parent_is_not_deleted_while_its_child_stays(world: World, connection: Connection) -> None:
    with pytest.raises(IntegrityError, match="fk_tsg_tasks_parent_id"):
        connection.execute(sa.delete(tasks).where(tasks.c.id == world.parent))


# -- each CHECK --------------------------------------------------------------------------------------------

QUEUED: dict[str, Any] = {
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
    "updated_at": ENDED,
    "ended_at": ENDED,
    "terminal_code": "completed",
    "version": 2,
}
SENT = {
    **DONE,
    "delivery_status": "delivered",
    "delivery_updated_at": DELIVERED,
    "delivery_code": "transport_acknowledged",
    "version": 3,
}
KEPT = {**SENT, "delivery_required": False, "delivery_status": "not_applicable", "delivery_code": "internal_task"}
NAN, INFINITY = float("nan"), float("inf")
BROKEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("parent_id", QUEUED, {"parent_id": OTHER}),
    ("status", QUEUED, {"status": "bogus"}),
    ("status", QUEUED, {"status": ""}),
    ("delivery_status", QUEUED, {"delivery_status": "bogus"}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST.upper()}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST[:-1]}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST[:-1] + "\n"}),
    ("payload_hash", QUEUED, {"payload_hash": DIGEST[:-1] + "ä"}),
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
    ("terminal_code", DONE, {"terminal_code": ""}),
    ("delivery", SENT, {"delivery_required": False}),
    ("delivery", KEPT, {"delivery_required": True}),
    ("delivery", RUNNING, {"delivery_status": "delivered", "delivery_updated_at": DELIVERED, "version": 2}),
    ("delivery_code", DONE, {"delivery_code": "transport_acknowledged"}),
    ("delivery_code", SENT, {"delivery_code": "transport_failed"}),
    ("delivery_code", KEPT, {"delivery_code": "delivery_grace_expired"}),
    ("version", QUEUED, {"version": 1}),
    ("version", QUEUED, {"version": -1}),
    ("version", RUNNING, {"version": 0}),
    ("version", DONE, {"version": 1}),
    ("version", SENT, {"version": 2}),
    ("version", RUNNING, {"version": 2, "expects_heartbeat": False}),
    *(("timeout_seconds", QUEUED, {"timeout_seconds": value}) for value in (-1.0, INFINITY, NAN)),
    *(
        ("finite", QUEUED, {name: value})
        for name in ("created_at", "updated_at", "delivery_updated_at")
        for value in (INFINITY, -INFINITY, NAN)
    ),
    *(
        ("finite", DONE, {name: value})
        for name in ("started_at", "ended_at", "deadline_at")
        for value in (INFINITY, -INFINITY, NAN)
    ),
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
#: PostgreSQL's own types leave nothing to break there.
KEPT_BY_TYPES = {"id", "flags"}

CREATION: dict[str, Any] = {
    "number": 0,
    "kind": "created",
    "from_status": None,
    "to_status": "queued",
    "occurred_at": CREATED,
    "code": "created",
}
START = {**CREATION, "number": 1, "kind": "task_transition", "from_status": "queued", "to_status": "running"}
START["code"] = "started"
END = {**START, "number": 2, "from_status": "running", "to_status": "failed", "code": "worker_failed"}
DELIVERY = {**START, "number": 3, "kind": "delivery_transition", "from_status": "pending", "to_status": "delivered"}
DELIVERY["code"] = "transport_acknowledged"
BROKEN_EVENTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("kind", START, {"kind": "bogus"}),
    ("kind", START, {"kind": ""}),
    *(("occurred_at", START, {"occurred_at": value}) for value in (INFINITY, -INFINITY, NAN)),
    ("transition", CREATION, {"number": 1}),
    ("transition", CREATION, {"from_status": "queued"}),
    ("transition", CREATION, {"to_status": "running"}),
    ("transition", CREATION, {"code": None}),
    ("transition", START, {"number": 2}),
    ("transition", START, {"from_status": None}),
    ("transition", START, {"from_status": "running"}),
    ("transition", START, {"code": None}),
    ("transition", START, {"to_status": "queued"}),
    ("transition", END, {"number": 1}),
    ("transition", END, {"number": 3}),
    ("transition", END, {"from_status": "succeeded"}),
    ("transition", END, {"to_status": "delivered"}),
    ("transition", END, {"code": "completed"}),
    ("transition", DELIVERY, {"number": 1}),
    ("transition", DELIVERY, {"number": 4}),
    ("transition", DELIVERY, {"from_status": "delivered"}),
    ("transition", DELIVERY, {"to_status": "pending"}),
    ("transition", DELIVERY, {"to_status": "succeeded"}),
    ("transition", DELIVERY, {"code": "transport_failed"}),
]


def put(connection: Connection, table: str, row: dict[str, Any]) -> None:
    marks = ", ".join(f"CAST(:{name} AS uuid)" if name in ("id", "parent_id") else f":{name}" for name in row)
    connection.execute(sa.text(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})"), row)


def leave_one_check(connection: Connection, table: str, kept: str) -> None:
    query = "SELECT conname FROM pg_constraint WHERE conrelid = CAST(:table AS regclass) AND contype = 'c'"
    found = set(connection.scalars(sa.text(query), {"table": table}))
    assert kept in found
    dropped = ", ".join(f"DROP CONSTRAINT {name}" for name in sorted(found - {kept}))
    connection.exec_driver_sql(f"ALTER TABLE {table} {dropped}")


@pytest.mark.parametrize("row", [QUEUED, RUNNING, DONE, SENT, KEPT])
def test_a_row_that_keeps_every_rule_is_taken(connection: Connection, row: dict[str, Any]) -> None:
    put(connection, "tsg_tasks", row)


@pytest.mark.parametrize(("check", "row", "changes"), BROKEN)
def test_a_row_that_breaks_a_rule_is_refused_also_by_that_rules_check_alone(
    connection: Connection, check: str, row: dict[str, Any], changes: dict[str, Any]
) -> None:
    broken = {**row, **changes}
    savepoint = connection.begin_nested()
    with pytest.raises(IntegrityError, match="ck_tsg_tasks_"):
        put(connection, "tsg_tasks", broken)
    savepoint.rollback()
    leave_one_check(connection, "tsg_tasks", f"ck_tsg_tasks_{check}")
    with pytest.raises(IntegrityError, match=f'"ck_tsg_tasks_{check}"'):
        put(connection, "tsg_tasks", broken)


@pytest.mark.parametrize(("check", "row", "changes"), BROKEN_EVENTS)
def test_an_event_that_breaks_a_rule_is_refused_also_by_that_rules_check_alone(
    connection: Connection, check: str, row: dict[str, Any], changes: dict[str, Any]
) -> None:
    put(connection, "tsg_tasks", QUEUED)
    key = connection.scalar(sa.select(tasks.c.pk).where(tasks.c.id == OTHER))
    broken = {"task_pk": key, **row, **changes}
    savepoint = connection.begin_nested()
    with pytest.raises(IntegrityError, match="ck_tsg_task_events_"):
        put(connection, "tsg_task_events", broken)
    savepoint.rollback()
    leave_one_check(connection, "tsg_task_events", f"ck_tsg_task_events_{check}")
    with pytest.raises(IntegrityError, match=f'"ck_tsg_task_events_{check}"'):
        put(connection, "tsg_task_events", broken)


@pytest.mark.parametrize("row", [CREATION, START, END, {**END, "code": None}, DELIVERY, {**DELIVERY, "number": 2}])
def test_an_event_that_keeps_every_rule_is_taken_once(connection: Connection, row: dict[str, Any]) -> None:
    put(connection, "tsg_tasks", QUEUED)
    key = connection.scalar(sa.select(tasks.c.pk).where(tasks.c.id == OTHER))
    put(connection, "tsg_task_events", {"task_pk": key, **row})
    with pytest.raises(IntegrityError, match="pk_tsg_task_events"):
        put(connection, "tsg_task_events", {"task_pk": key, **row})


def test_an_event_needs_its_task_and_a_task_its_parent(connection: Connection) -> None:
    savepoint = connection.begin_nested()
    with pytest.raises(IntegrityError, match="fk_tsg_task_events_task_pk"):
        put(connection, "tsg_task_events", {"task_pk": 10**9, **CREATION})
    savepoint.rollback()
    with pytest.raises(IntegrityError, match="fk_tsg_tasks_parent_id"):
        put(connection, "tsg_tasks", {**QUEUED, "parent_id": str(uuid.uuid4())})


def test_every_check_is_broken_once_here(connection: Connection) -> None:
    query = "SELECT conname FROM pg_constraint WHERE contype = 'c' AND starts_with(conname, 'ck_tsg_')"
    broken = {f"ck_tsg_tasks_{check}" for check, _, _ in BROKEN}
    broken |= {f"ck_tsg_task_events_{check}" for check, _, _ in BROKEN_EVENTS}
    by_types = {f"ck_tsg_tasks_{check}" for check in KEPT_BY_TYPES} | {"ck_tsg_task_events_number"}
    assert set(connection.scalars(sa.text(query))) == broken | by_types


@pytest.mark.parametrize(
    "column",
    [
        "id",
        "status",
        "delivery_status",
        "delivery_required",
        "expects_heartbeat",
        "created_at",
        "updated_at",
        "delivery_updated_at",
        "version",
    ],
)
def test_a_row_without_a_value_that_must_be_there_is_refused(connection: Connection, column: str) -> None:
    with pytest.raises(IntegrityError, match="null value"):
        put(connection, "tsg_tasks", {**QUEUED, column: None})


def test_after_all_that_the_ledger_is_as_it_was(world: World) -> None:
    report = Ledger(world.engine).doctor()
    assert report["healthy"]
    assert report["task_count"] == len(TASK_WORDS) + len(DELIVERY_WORDS) + 1 + 1 + 2
