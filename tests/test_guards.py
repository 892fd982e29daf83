"""The whole table of from x to for both machines, through every way there is into either database."""

from __future__ import annotations

import math
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from tests.conftest import FakeClock, database, raw
from tsg import InvalidInput, Ledger, StateConflict, Task, TaskEvent, TaskRecord, doctor
from tsg.tables import TaskId, task_events, tasks

TASK_WORDS = ("queued", "running", "succeeded", "failed", "timed_out", "cancelled")
TASK_ENDS = TASK_WORDS[2:]
LEGAL_TASK = {("queued", "running"), *((source, end) for source in ("queued", "running") for end in TASK_ENDS)}

DELIVERY_WORDS = ("pending", "delivered", "failed", "not_applicable")
DELIVERY_ENDS = DELIVERY_WORDS[1:]
LEGAL_DELIVERY = {("pending", "delivered"), ("pending", "failed"), ("pending", "not_applicable")}

CREATED, STARTED, ENDED, DELIVERED, LATER = 1_000.0, 1_010.0, 1_020.0, 1_030.0, 1_040.0
TIMEOUT = 60.0
DIGEST = "0123456789abcdef" * 4
OTHER = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
DATABASES = ("sqlite", "postgresql")
DRIVERS_ERRORS = (sqlite3.IntegrityError, psycopg.errors.IntegrityError)


# -- one ledger on each database ---------------------------------------------------------------------------


@dataclass
class World:
    """One ledger for all tests, each of which rolls back; tasks by the state that they are in."""

    engine: sa.Engine
    ledger: Ledger
    clock: FakeClock
    tasks: dict[str, str] = field(default_factory=dict)
    deliveries: dict[str, str] = field(default_factory=dict)
    #: The same, of tasks whose version a heartbeat has brought ahead of their transitions.
    beaten: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tasks |= {status: self.make(status) for status in TASK_WORDS}
        self.deliveries |= {word: self.make("succeeded", word) for word in DELIVERY_WORDS}
        self.deliveries["pending internal"] = self.make("succeeded", internal=True)
        self.beaten["running"] = self.make("running", beaten=True)
        self.beaten["pending"] = self.make("succeeded", beaten=True)
        self.beaten["pending internal"] = self.make("succeeded", beaten=True, internal=True)
        self.told = self.make("succeeded", "delivered", ("completed", "transport_acknowledged"))
        self.parent = self.make("queued")
        self.child = self.ledger.create_task(parent_id=self.parent, payload_hash=DIGEST).id
        self.count = len(self.tasks) + len(self.deliveries) + len(self.beaten) + 3

    @property
    def name(self) -> str:
        return self.engine.dialect.name

    def make(
        self,
        status: str,
        delivery: str = "pending",
        codes: tuple[str | None, str | None] = (None, None),
        *,
        internal: bool = False,
        beaten: bool = False,
    ) -> str:
        self.clock.now = CREATED
        required = delivery != "not_applicable" and not internal
        task = self.ledger.create_task(timeout_seconds=TIMEOUT, delivery_required=required).id
        if status != "queued":
            self.clock.now = STARTED
            self.ledger.start_task(task)
        if beaten:
            self.ledger.heartbeat(task)
        if status in TASK_ENDS:
            self.clock.now = ENDED
            self.ledger.close_task(task, status, code=codes[0])
        if delivery != "pending":
            self.clock.now = DELIVERED
            self.ledger.set_delivery(task, delivery, code=codes[1])
        return task

    def waiting_for(self, source: str, to: str, *, beaten: bool = False) -> str:
        """A task whose delivery is in the state `source`, and may go where `to` is a way from there."""
        word = "pending internal" if (source, to) == ("pending", "not_applicable") else source
        return self.beaten[word] if beaten and word in self.beaten else self.deliveries[word]


def sqlite_engine(path: Path) -> sa.Engine:
    """Another program's: foreign keys are on, and a transaction begins where SQLAlchemy says so."""
    engine = sa.create_engine(sa.URL.create("sqlite", database=str(path)))

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


@contextmanager
def world_on_sqlite(folder: Path) -> Iterator[World]:
    """A ledger of tasks in every state, in a file of `folder`."""
    folder.chmod(0o700)
    path = folder / "ledger.sqlite"
    clock = FakeClock()
    engine = sqlite_engine(path)
    with Ledger(path, clock=clock) as ledger:
        yield World(engine, ledger, clock)
    engine.dispose()


@contextmanager
def world_on_postgresql(server: sa.URL, template: str) -> Iterator[World]:
    """The same in a database of its own."""
    clock = FakeClock()
    with database(server, f"tsg_{uuid.uuid4().hex}", template=template) as url:
        engine = sa.create_engine(url)
        yield World(engine, Ledger(engine, clock=clock), clock)
        engine.dispose()


@pytest.fixture(scope="module")
def sqlite_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world_on_sqlite(tmp_path_factory.mktemp("guards")) as made:
        yield made


@pytest.fixture(scope="module")
def postgresql_world(postgresql_server: sa.URL, postgresql_template: str) -> Iterator[World]:
    with world_on_postgresql(postgresql_server, postgresql_template) as made:
        yield made


@pytest.fixture(params=DATABASES)
def world(request: pytest.FixtureRequest) -> World:
    found: World = request.getfixturevalue(f"{request.param}_world")
    return found


on_sqlite = pytest.mark.parametrize("world", ["sqlite"], indirect=True)
on_postgresql = pytest.mark.parametrize("world", ["postgresql"], indirect=True)


@pytest.fixture
def connection(world: World) -> Iterator[Connection]:
    """Another program's connection, in a transaction that is rolled back."""
    with world.engine.connect() as opened:
        opened.begin()
        yield opened
        opened.rollback()


@pytest.fixture
def session(world: World) -> Iterator[Session]:
    with Session(world.engine, info={"tsg_clock": FakeClock(LATER)}) as opened:
        yield opened
        opened.rollback()


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


def refusal_of(to: str, *, is_verb: bool) -> type[InvalidInput | StateConflict]:
    """A verb that ends something knows no other states than ends; the rest is a matter of what is stored."""
    return InvalidInput if is_verb and to in ("queued", "pending") else StateConflict


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
        session.expire_all()
        moved = 0 if source == to else 1
        assert (task.status, task.version, len(task.events)) == (to, version + moved, events + moved)
        assert doctor.examine(session)["healthy"]
    else:
        with pytest.raises(refusal_of(to, is_verb=route is by_verb)):
            route(task, to)
        assert not session.dirty
        assert task.status == source


@every_pair(DELIVERY_WORDS)
@pytest.mark.parametrize("route", [deliver_by_verb, deliver_by_assignment])
def test_a_delivery_goes_through_its_verbs_where_the_machine_goes(
    world: World, session: Session, route: Callable[[Task, str], None], source: str, to: str
) -> None:
    task = session.get_one(Task, world.waiting_for(source, to))
    version, events = task.version, len(task.events)
    nothing_to_do = source == to and (to != "pending" or route is deliver_by_assignment)
    if (source, to) in LEGAL_DELIVERY or nothing_to_do:
        route(task, to)
        session.flush()
        session.expire_all()
        moved = 0 if source == to else 1
        assert (task.delivery_status, task.version, len(task.events)) == (to, version + moved, events + moved)
        assert doctor.examine(session)["healthy"]
    else:
        with pytest.raises(refusal_of(to, is_verb=route is deliver_by_verb)):
            route(task, to)
        assert not session.dirty
        assert task.delivery_status == source


@pytest.mark.parametrize("route", [deliver_by_verb, deliver_by_assignment])
@pytest.mark.parametrize("to", DELIVERY_ENDS)
def test_a_delivery_waits_for_its_task_and_fits_it_in_a_session_too(
    world: World, session: Session, route: Callable[[Task, str], None], to: str
) -> None:
    unfit = world.deliveries["pending" if to == "not_applicable" else "pending internal"]
    for identifier in (world.tasks["queued"], world.tasks["running"], unfit):
        task = session.get_one(Task, identifier)
        with pytest.raises(StateConflict):
            route(task, to)
        assert not session.dirty
        assert task.delivery_status == "pending"


@pytest.fixture
def own(world: World) -> Iterator[Callable[..., str]]:
    """Makes tasks of the test's own, since what a ledger does is committed; deleted afterwards."""
    made: list[str] = []

    def make(*arguments: Any, **fields: Any) -> str:
        made.append(world.make(*arguments, **fields))
        return made[-1]

    yield make
    with world.engine.begin() as connection:
        connection.execute(sa.delete(tasks).where(tasks.c.id.in_(made)))


def stored(world: World, identifier: str) -> tuple[TaskRecord, int]:
    """The row of a task, and how many events it has."""
    joined = task_events.join(tasks, tasks.c.pk == task_events.c.task_pk)
    count = sa.select(sa.func.count()).select_from(joined).where(tasks.c.id == identifier)
    with world.engine.connect() as connection:
        return world.ledger.get_task(identifier), connection.scalar(count) or 0


@every_pair(TASK_WORDS)
def test_a_task_goes_through_the_ledgers_methods_where_the_machine_goes(
    world: World, own: Callable[..., str], source: str, to: str
) -> None:
    identifier = own(source)
    before = stored(world, identifier)
    world.clock.now = LATER

    def go() -> TaskRecord:
        return world.ledger.start_task(identifier) if to == "running" else world.ledger.close_task(identifier, to)

    if (source, to) in LEGAL_TASK:
        moved = go()
        assert (moved.status, moved.version) == (to, before[0].version + 1)
        assert stored(world, identifier) == (moved, before[1] + 1)
    elif source == to != "queued":
        assert go() == before[0]
        assert stored(world, identifier) == before
    else:
        with pytest.raises(refusal_of(to, is_verb=True)):
            go()
        assert stored(world, identifier) == before


@every_pair(DELIVERY_WORDS)
def test_a_delivery_goes_through_the_ledgers_methods_where_the_machine_goes(
    world: World, own: Callable[..., str], source: str, to: str
) -> None:
    identifier = own("succeeded", source, internal=(source, to) == ("pending", "not_applicable"))
    before = stored(world, identifier)
    world.clock.now = LATER
    if (source, to) in LEGAL_DELIVERY:
        moved = world.ledger.set_delivery(identifier, to)
        assert (moved.delivery_status, moved.version) == (to, before[0].version + 1)
        assert stored(world, identifier) == (moved, before[1] + 1)
    elif source == to != "pending":
        assert world.ledger.set_delivery(identifier, to) == before[0]
        assert stored(world, identifier) == before
    else:
        with pytest.raises(refusal_of(to, is_verb=True)):
            world.ledger.set_delivery(identifier, to)
        assert stored(world, identifier) == before


@pytest.mark.parametrize("to", DELIVERY_ENDS)
def test_a_delivery_waits_for_its_task_and_fits_it_in_a_ledger_too(
    world: World, own: Callable[..., str], to: str
) -> None:
    unfit = own("succeeded", internal=to != "not_applicable")
    world.clock.now = LATER
    for identifier in (world.tasks["queued"], world.tasks["running"], unfit):
        before = stored(world, identifier)
        with pytest.raises(StateConflict):
            world.ledger.set_delivery(identifier, to)
        assert stored(world, identifier) == before


# -- round the verbs ---------------------------------------------------------------------------------------


def placed(connection: Connection, name: str, column: str | None = None) -> str:
    """Where a value goes in a textual statement; PostgreSQL takes no text for an id."""
    is_id = (column or name) in ("id", "parent_id")
    return f"CAST(:{name} AS uuid)" if is_id and connection.dialect.name == "postgresql" else f":{name}"


def written_as_text(connection: Connection, values: dict[str, Any]) -> sa.TextClause:
    assignments = ", ".join(f"{name} = {placed(connection, name)}" for name in values)
    return sa.text(f"UPDATE tsg_tasks SET {assignments} WHERE id = {placed(connection, 'which', 'id')}")


def read_as_text(connection: Connection, values: dict[str, Any]) -> sa.TextClause:
    return sa.text(f"SELECT {', '.join(values)} FROM tsg_tasks WHERE id = {placed(connection, 'which', 'id')}")


def by_bulk_update(connection: Connection, identifier: str, values: dict[str, Any]) -> Any:
    with Session(connection) as session:
        session.execute(sa.update(Task).where(Task.id == identifier).values(values))
        found = sa.select(*(tasks.c[name] for name in values)).where(tasks.c.id == identifier)
        return session.execute(found).one()


def by_primary_key(connection: Connection, identifier: str, values: dict[str, Any]) -> Any:
    """The ORM's bulk update of rows by their keys.

    It looks for a row by its version too, and can't change that.
    """
    with Session(connection) as session:
        keys = session.execute(sa.select(tasks.c.pk, tasks.c.version).where(tasks.c.id == identifier)).one()
        session.execute(sa.update(Task), [{**values, **keys._mapping, "id": identifier}])
        found = sa.select(*(tasks.c[name] for name in values)).where(tasks.c.id == identifier)
        return session.execute(found).one()


def by_core_update(connection: Connection, identifier: str, values: dict[str, Any]) -> Any:
    types = {"id": TaskId(), "parent_id": TaskId()}
    table = sa.table("tsg_tasks", *(sa.column(name, types.get(name)) for name in {"id": None, **values}))
    connection.execute(sa.update(table).where(table.c.id == identifier).values(values))
    return connection.execute(sa.select(*(table.c[name] for name in values)).where(table.c.id == identifier)).one()


def by_text(connection: Connection, identifier: str, values: dict[str, Any]) -> Any:
    connection.execute(written_as_text(connection, values), {**values, "which": identifier})
    return connection.execute(read_as_text(connection, values), {"which": identifier}).one()


def by_text_in_a_session(connection: Connection, identifier: str, values: dict[str, Any]) -> Any:
    with Session(connection) as session:
        session.execute(written_as_text(connection, values), {**values, "which": identifier})
        return session.execute(read_as_text(connection, values), {"which": identifier}).one()


def by_raw_sql(connection: Connection, identifier: str, values: dict[str, Any]) -> Any:
    mark = "?" if connection.dialect.name == "sqlite" else "%s"
    driver: Any = connection.connection.driver_connection
    with closing(driver.cursor()) as cursor:
        assignments = ", ".join(f"{name} = {mark}" for name in values)
        cursor.execute(f"UPDATE tsg_tasks SET {assignments} WHERE id = {mark}", (*values.values(), identifier))
        cursor.execute(f"SELECT {', '.join(values)} FROM tsg_tasks WHERE id = {mark}", (identifier,))
        return cursor.fetchone()


def by_upsert(connection: Connection, identifier: str, values: dict[str, Any]) -> Any:
    names = [column.name for column in tasks.c if column.name != "pk"]
    rows = sa.select(*(tasks.c[name] for name in names)).where(tasks.c.id == identifier)
    statement = upsert(tasks).from_select(names, rows).on_conflict_do_update(index_elements=["id"], set_=values)
    connection.execute(statement)
    found = sa.select(*(tasks.c[name] for name in values)).where(tasks.c.id == identifier)
    return connection.execute(found).one()


Route = Callable[[Connection, str, dict[str, Any]], Any]
CHECKS_OF_A_DELIVERY = ["ck_tsg_tasks_delivery", "ck_tsg_tasks_version"]
ROUND_THE_VERBS: list[Route] = [
    by_bulk_update,
    by_primary_key,
    by_core_update,
    by_text,
    by_text_in_a_session,
    by_raw_sql,
]
# On SQLite every upsert meets the guard against being replaced; see below.
ROUTES: list[tuple[str, Route]] = [(name, route) for name in DATABASES for route in ROUND_THE_VERBS]
ROUTES.append(("postgresql", by_upsert))
every_route = pytest.mark.parametrize(
    ("world", "route"), ROUTES, indirect=["world"], ids=[f"{name}-{route.__name__}" for name, route in ROUTES]
)


def passes(route: Route, connection: Connection, identifier: str, values: dict[str, Any]) -> None:
    savepoint = connection.begin_nested()
    assert tuple(route(connection, identifier, values)) == tuple(values.values())
    savepoint.rollback()


def refused(route: Route, connection: Connection, identifier: str, values: dict[str, Any], *guards: str) -> None:
    savepoint = connection.begin_nested()
    with pytest.raises(DRIVERS_ERRORS if route is by_raw_sql else IntegrityError) as caught:
        route(connection, identifier, values)
    savepoint.rollback()
    told = str(getattr(caught.value, "orig", caught.value))
    assert any(guard in told for guard in guards), told


def either(world: World, guard: str) -> tuple[str, ...]:
    """The guard that refuses a row in which what is written once is changed as well.

    PostgreSQL asks its triggers by name; in what order SQLite does it doesn't say.
    """
    return (guard, "tsg_tasks_written_once_guard") if world.name == "sqlite" else (guard,)


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


@every_route
@pytest.mark.parametrize("source", TASK_WORDS)
def test_a_status_written_round_the_verbs_goes_where_the_machine_goes(
    world: World, connection: Connection, route: Route, source: str
) -> None:
    known = {**world.tasks, **world.beaten} if route is by_primary_key else world.tasks
    identifier = known[source]
    for to in TASK_WORDS:
        values = task_values(source, to)
        if source != to and (source, to) not in LEGAL_TASK:
            refused(route, connection, identifier, {"status": to}, "tsg_tasks_status_guard")
            refused(route, connection, identifier, values, *either(world, "tsg_tasks_status_guard"))
        elif route is by_primary_key and source == "queued" != to:
            # Its version is 0, and no row that has left its first state is of that.
            refused(route, connection, identifier, values, "ck_tsg_tasks_version")
        else:
            passes(route, connection, identifier, values)


@every_route
@pytest.mark.parametrize("source", DELIVERY_WORDS)
def test_a_delivery_status_written_round_the_verbs_goes_where_the_machine_goes(
    world: World, connection: Connection, route: Route, source: str
) -> None:
    for to in DELIVERY_WORDS:
        identifier = world.waiting_for(source, to, beaten=route is by_primary_key)
        values = delivery_values(source, to)
        if source == to or (source, to) in LEGAL_DELIVERY:
            passes(route, connection, identifier, values)
        else:
            refused(route, connection, identifier, {"delivery_status": to}, "tsg_tasks_delivery_guard")
            refused(route, connection, identifier, values, *either(world, "tsg_tasks_delivery_guard"))


@every_route
def test_a_delivery_written_round_the_verbs_waits_for_its_task_and_fits_it(
    world: World, connection: Connection, route: Route
) -> None:
    # In what order SQLite asks its CHECKs it doesn't say either.
    broken = ["ck_tsg_tasks_delivery"] if world.name == "postgresql" else CHECKS_OF_A_DELIVERY
    for to in DELIVERY_ENDS:
        for status in ("queued", "running"):
            values = {"delivery_status": to, "delivery_updated_at": LATER, "version": 1 if status == "queued" else 2}
            refused(route, connection, world.tasks[status], values, *broken)
        unfit = "pending" if to == "not_applicable" else "pending internal"
        known = world.beaten if route is by_primary_key else world.deliveries
        refused(route, connection, known[unfit], delivery_values("pending", to), "ck_tsg_tasks_delivery")


@every_route
@pytest.mark.parametrize("column", ["status", "delivery_status"])
def test_a_word_that_is_no_state_is_refused(world: World, connection: Connection, route: Route, column: str) -> None:
    for word in ("bogus", "", "Queued", "queued ", None):
        for identifier in (world.tasks["queued"], world.deliveries["delivered"]):
            refused(route, connection, identifier, {column: word}, "guard", "ck_tsg_tasks", "NOT NULL", "null value")


@pytest.mark.parametrize(
    ("machine", "source", "to"),
    [
        *(("tasks", s, t) for s in TASK_WORDS for t in TASK_WORDS if s != t and (s, t) not in LEGAL_TASK),
        *(("deliveries", s, t) for s in DELIVERY_ENDS[:2] for t in ("delivered", "failed", "pending") if s != t),
        ("deliveries", "not_applicable", "pending"),
    ],
)
def test_but_for_the_guards_those_rows_would_pass(
    world: World, connection: Connection, machine: str, source: str, to: str
) -> None:
    lift_guards(connection)
    values = task_values(source, to) if machine == "tasks" else delivery_values(source, to)
    assert tuple(by_text(connection, getattr(world, machine)[source], values)) == tuple(values.values())


def lift_guards(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("ALTER TABLE tsg_tasks DISABLE TRIGGER USER")
        return
    found = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'trigger'").scalars().all()
    for name in found:
        connection.exec_driver_sql(f'DROP TRIGGER "{name}"')


CREATION_WRITES = [
    ("pk", 77_777),
    ("id", OTHER),
    ("parent_id", None),
    ("delivery_required", False),
    ("payload_hash", "f" * 64),
    ("payload_hash", None),
    ("timeout_seconds", 5.0),
    ("created_at", CREATED - 1),
]


@every_route
def test_what_creation_wrote_is_never_written_again(world: World, connection: Connection, route: Route) -> None:
    guard = "tsg_tasks_immutable_guard"
    refused(route, connection, world.tasks["queued"], {"parent_id": world.parent}, guard)
    refused(route, connection, world.child, {"parent_id": world.tasks["queued"]}, guard)
    for column, value in CREATION_WRITES:
        if route is not by_primary_key or column not in ("pk", "id"):
            refused(route, connection, world.child, {column: value}, guard)


@pytest.mark.parametrize(("column", "value"), [("pk", 77_777), ("id", OTHER)])
def test_a_row_that_is_looked_for_by_another_key_is_not_found(
    world: World, connection: Connection, column: str, value: Any
) -> None:
    with Session(connection) as session:
        found = session.execute(sa.select(tasks.c.pk, tasks.c.id, tasks.c.version).where(tasks.c.id == world.child))
        row = {**found.one()._mapping, column: value, "payload_hash": None}
        with pytest.raises(StaleDataError):
            session.execute(sa.update(Task), [row])


TRANSITIONS_WRITE = [
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
]


@every_route
def test_what_a_transition_wrote_is_never_written_again(world: World, connection: Connection, route: Route) -> None:
    for column, value in TRANSITIONS_WRITE:
        refused(route, connection, world.told, {column: value}, "tsg_tasks_written_once_guard")


def test_a_time_that_is_no_number_is_written_by_none(world: World, connection: Connection) -> None:
    # To SQLite what is not a number is NULL.
    odd = [math.inf, -math.inf, *([math.nan] if world.name == "postgresql" else [])]
    for column in ("started_at", "ended_at", "updated_at", "delivery_updated_at", "deadline_at"):
        for value in odd:
            refused(by_text, connection, world.tasks["running"], {column: value}, "ck_tsg_tasks", "guard")


@every_route
def test_writing_what_is_there_already_is_no_change(world: World, connection: Connection, route: Route) -> None:
    columns = ["payload_hash", "created_at", "started_at", "ended_at", "terminal_code", "delivery_code"]
    if route is not by_primary_key:
        columns += ["pk", "id"]
    for column in columns:
        value = connection.scalar(sa.select(tasks.c[column]).where(tasks.c.id == world.told))
        (written,) = route(connection, world.told, {column: value})
        assert (str(written) if column == "id" else written) == value


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


def none_passes(connection: Connection, guard: str, ways: dict[str, Callable[[], object]]) -> None:
    """Each of the ways is refused by the guard that is named so."""
    for name, way in ways.items():
        savepoint = connection.begin_nested()
        with pytest.raises((IntegrityError, *DRIVERS_ERRORS)) as caught:
            way()
        savepoint.rollback()
        assert guard in str(getattr(caught.value, "orig", caught.value)), name


def in_a_session(connection: Connection, statement: sa.Executable, parameters: Any = None) -> Callable[[], object]:
    def run() -> None:
        with Session(connection) as session:
            session.execute(statement, parameters)

    return run


@pytest.mark.parametrize(("column", "value"), EVENT_COLUMNS.items())
def test_an_event_is_not_changed_by_any_way_round(
    world: World, connection: Connection, column: str, value: Any
) -> None:
    table = sa.table("tsg_task_events", sa.column(column))
    text = sa.text(f"UPDATE tsg_task_events SET {column} = :value")
    driver: Any = connection.connection.driver_connection
    mark = "?" if world.name == "sqlite" else "%s"
    ways: dict[str, Callable[[], object]] = {
        "a bulk update": in_a_session(connection, sa.update(TaskEvent).values({column: value})),
        "text in a session": in_a_session(connection, text, {"value": value}),
        "Core": lambda: connection.execute(sa.update(table).values({column: value})),
        "text": lambda: connection.execute(text, {"value": value}),
        "the driver": lambda: driver.execute(f"UPDATE tsg_task_events SET {column} = {mark}", (value,)),
    }
    if column not in ("task_pk", "number"):
        key = connection.scalar(sa.select(tasks.c.pk).where(tasks.c.id == world.told))
        row = {"task_pk": key, "number": 2, column: value}
        ways["by primary key"] = in_a_session(connection, sa.update(TaskEvent), [row])
    if world.name == "postgresql":
        insertion = upsert(task_events).from_select([c.name for c in task_events.c], sa.select(*task_events.c))
        primary = ["task_pk", "number"]
        ways["an upsert"] = lambda: connection.execute(
            insertion.on_conflict_do_update(index_elements=primary, set_={column: value})
        )
    none_passes(connection, "tsg_task_events_update_guard", ways)


def test_an_event_is_not_deleted_while_its_task_exists(world: World, connection: Connection) -> None:
    driver: Any = connection.connection.driver_connection
    some = "DELETE FROM tsg_task_events WHERE number = 2"
    ways: dict[str, Callable[[], object]] = {
        "a bulk delete": in_a_session(connection, sa.delete(TaskEvent)),
        "text in a session": in_a_session(connection, sa.text(some)),
        "Core": lambda: connection.execute(sa.delete(sa.table("tsg_task_events"))),
        "text": lambda: connection.execute(sa.text(some)),
        "the driver": lambda: driver.execute(some),
    }
    none_passes(connection, "tsg_task_events_delete_guard", ways)


def events_of(connection: Connection, identifier: str | None = None) -> int:
    joined = task_events.join(tasks, tasks.c.pk == task_events.c.task_pk)
    count = sa.select(sa.func.count()).select_from(task_events if identifier is None else joined)
    return connection.scalar(count if identifier is None else count.where(tasks.c.id == identifier)) or 0


def test_deleting_a_task_takes_its_events_along_and_no_others(world: World, connection: Connection) -> None:
    before = events_of(connection)
    assert events_of(connection, world.told) == 4
    connection.execute(sa.delete(tasks).where(tasks.c.id == world.told))
    assert events_of(connection) == before - 4
    assert doctor.examine(connection)["healthy"]


def test_a_parent_is_not_deleted_while_its_child_stays(world: World, connection: Connection) -> None:
    with pytest.raises(IntegrityError, match="FOREIGN KEY|fk_tsg_tasks_parent_id"):
        connection.execute(sa.delete(tasks).where(tasks.c.id == world.parent))


# -- what there is on SQLite alone -------------------------------------------------------------------------


@pytest.fixture(params=["ON", "OFF"])
def program(sqlite_world: World, request: pytest.FixtureRequest) -> Iterator[sqlite3.Connection]:
    """Another program's connection, with foreign keys on or, as is the default, off; it is rolled back."""
    with closing(raw(Path(str(sqlite_world.engine.url.database)))) as opened:
        opened.execute(f"PRAGMA foreign_keys = {request.param}")
        opened.execute("BEGIN IMMEDIATE")
        yield opened
        if opened.in_transaction:
            opened.execute("ROLLBACK")


def copied(table: sa.Table, changes: dict[str, str]) -> str:
    return ", ".join(changes.get(column.name, column.name) for column in table.c)


def test_an_event_is_not_deleted_where_foreign_keys_are_off_either(program: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="tsg_task_events_delete_guard"):
        program.execute("DELETE FROM tsg_task_events WHERE number = 2")


def test_events_follow_their_task_where_foreign_keys_are_off_too(
    sqlite_world: World, program: sqlite3.Connection
) -> None:
    count = "SELECT count(*) FROM tsg_task_events"
    (before,) = program.execute(count).fetchone()
    program.execute("DELETE FROM tsg_tasks WHERE id = ?", (sqlite_world.told,))
    assert program.execute(count).fetchone() == (before - 4,)
    assert program.execute("PRAGMA foreign_key_check").fetchall() == []


@pytest.mark.parametrize("statement", ["INSERT OR REPLACE INTO", "REPLACE INTO"])
@pytest.mark.parametrize("key", ["both keys", "its id alone", "its pk alone"])
def test_a_task_does_not_leave_its_terminal_state_by_being_replaced(
    sqlite_world: World, program: sqlite3.Connection, statement: str, key: str
) -> None:
    failed = (sqlite_world.tasks["failed"],)
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
    with pytest.raises(sqlite3.IntegrityError, match="tsg_tasks_replace_guard"):
        program.execute(f"{statement} tsg_tasks SELECT {copied(tasks, queued)} FROM tsg_tasks WHERE id = ?", failed)
    assert program.execute("SELECT status FROM tsg_tasks WHERE id = ?", failed).fetchone() == ("failed",)


@pytest.mark.parametrize("statement", ["INSERT OR REPLACE INTO", "REPLACE INTO"])
def test_an_event_is_not_changed_by_being_replaced(program: sqlite3.Connection, statement: str) -> None:
    changed = {"to_status": "'cancelled'", "code": "'caller_cancelled'", "occurred_at": "occurred_at + 5.0"}
    with pytest.raises(sqlite3.IntegrityError, match="tsg_task_events_replace_guard"):
        program.execute(
            f"{statement} tsg_task_events SELECT {copied(task_events, changed)} "
            "FROM tsg_task_events WHERE number = 2 AND kind = 'task_transition'"
        )


@pytest.mark.parametrize("conflict", ["OR REPLACE", "OR IGNORE", "OR FAIL", "OR ROLLBACK", "OR ABORT"])
@pytest.mark.parametrize(
    "change",
    [
        "tsg_tasks SET status = 'failed' WHERE status = 'succeeded'",
        "tsg_tasks SET delivery_status = 'pending' WHERE delivery_status = 'delivered'",
        "tsg_tasks SET created_at = created_at - 1",
        "tsg_task_events SET code = NULL",
    ],
)
def test_no_conflict_clause_of_an_update_goes_round_the_guards(
    program: sqlite3.Connection, conflict: str, change: str
) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="guard"):
        program.execute(f"UPDATE {conflict} {change}")


@pytest.mark.parametrize("key", ["id", "pk"])
def test_an_upsert_meets_the_guards_too(sqlite_world: World, program: sqlite3.Connection, key: str) -> None:
    names = copied(tasks, {})
    with pytest.raises(sqlite3.IntegrityError, match="tsg_tasks_replace_guard"):
        program.execute(
            f"INSERT INTO tsg_tasks SELECT {names} FROM tsg_tasks WHERE id = ? "
            f"ON CONFLICT ({key}) DO UPDATE SET status = 'timed_out'",
            (sqlite_world.tasks["failed"],),
        )


# -- what there is on PostgreSQL alone ---------------------------------------------------------------------


@on_postgresql
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


@on_postgresql
def test_an_event_is_not_deleted_by_who_brings_an_equality_of_his_own(world: World, connection: Connection) -> None:
    for statement in (
        "CREATE ROLE anybody",
        "GRANT SELECT, DELETE ON tsg_task_events TO anybody",
        "GRANT SELECT ON tsg_tasks TO anybody",
        "CREATE SCHEMA own AUTHORIZATION anybody",
        "SET LOCAL ROLE anybody",
        "CREATE FUNCTION own.never(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT false'",
        "CREATE OPERATOR own.= (FUNCTION = own.never, LEFTARG = bigint, RIGHTARG = bigint)",
        "SET LOCAL search_path = own, public, pg_catalog",
    ):
        connection.exec_driver_sql(statement)
    with pytest.raises(IntegrityError, match="tsg_task_events_delete_guard"):
        connection.exec_driver_sql("DELETE FROM tsg_task_events")


@on_postgresql
@pytest.mark.parametrize("path", ["public", "elsewhere"])
def test_events_follow_their_task_wherever_the_search_path_leads(
    world: World, connection: Connection, path: str
) -> None:
    before = events_of(connection)
    connection.exec_driver_sql("CREATE SCHEMA elsewhere")
    connection.exec_driver_sql(f"SET LOCAL search_path = {path}")
    connection.execute(sa.text("DELETE FROM public.tsg_tasks WHERE id = CAST(:id AS uuid)"), {"id": world.told})
    connection.exec_driver_sql("SET LOCAL search_path = public")
    assert events_of(connection) == before - 4
    assert doctor.examine(connection)["healthy"]


@on_postgresql
def test_a_deleted_task_cannot_come_back_under_its_events_nor_an_id_twice(world: World, connection: Connection) -> None:
    names = ", ".join(column.name for column in tasks.c if column.name != "pk")
    with pytest.raises(IntegrityError, match="uq_tsg_tasks_id"):
        connection.execute(sa.text(f"INSERT INTO tsg_tasks ({names}) SELECT {names} FROM tsg_tasks LIMIT 1"))


@on_postgresql
def test_truncating_the_tasks_alone_is_refused(world: World, connection: Connection) -> None:
    with pytest.raises(sa.exc.DBAPIError, match="cannot truncate"):
        connection.exec_driver_sql("TRUNCATE tsg_tasks")


@on_postgresql
def test_truncating_the_events_alone_is_refused(world: World, connection: Connection) -> None:
    with pytest.raises(IntegrityError, match="tsg_task_events_\\w+_guard"):
        connection.exec_driver_sql("TRUNCATE tsg_task_events")


@on_postgresql
def test_a_whole_ledger_can_be_truncated(world: World, connection: Connection) -> None:
    connection.exec_driver_sql("TRUNCATE tsg_tasks, tsg_task_events")
    report = doctor.examine(connection)
    assert (report["healthy"], report["task_count"], report["event_count"]) == (True, 0, 0)


@on_postgresql
@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, "uq_tsg_tasks_id"),
        ({"id": f"'{OTHER}'", "status": "'queued'"}, "ck_tsg_tasks_"),
        ({"id": f"'{OTHER}'", "status": "'bogus'"}, "ck_tsg_tasks_"),
        ({"id": f"'{OTHER}'", "delivery_status": "'not_applicable'"}, "ck_tsg_tasks_delivery"),
        ({"id": f"'{OTHER}'", "parent_id": "gen_random_uuid()"}, "fk_tsg_tasks_parent_id"),
    ],
)
def test_copy_meets_the_constraints_too(
    world: World, connection: Connection, changes: dict[str, str], refusal: str
) -> None:
    names = [column.name for column in tasks.c if column.name != "pk"]
    chosen = ", ".join(changes.get(name, name) for name in names)
    query = f"SELECT {chosen} FROM tsg_tasks WHERE id = '{world.told}'"
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor:
        with cursor.copy(f"COPY ({query}) TO STDOUT") as reading:
            rows = b"".join(reading)
        with pytest.raises(psycopg.errors.IntegrityError, match=refusal):
            with cursor.copy(f"COPY tsg_tasks ({', '.join(names)}) FROM STDIN") as writing:
                writing.write(rows)


@on_postgresql
@pytest.mark.parametrize(
    ("table", "action", "guard"),
    [
        ("tsg_tasks", "UPDATE SET status = 'queued'", "tsg_tasks_status_guard"),
        ("tsg_tasks", "UPDATE SET delivery_status = 'pending'", "tsg_tasks_delivery_guard"),
        ("tsg_tasks", "UPDATE SET created_at = 0", "tsg_tasks_immutable_guard"),
        ("tsg_tasks", "UPDATE SET ended_at = 0", "tsg_tasks_written_once_guard"),
        ("tsg_task_events", "UPDATE SET code = NULL", "tsg_task_events_update_guard"),
        ("tsg_task_events", "DELETE", "tsg_task_events_delete_guard"),
    ],
)
def test_merge_meets_the_guards_too(world: World, connection: Connection, table: str, action: str, guard: str) -> None:
    if connection.dialect.server_version_info < (15,):  # type: ignore[operator]
        pytest.skip("MERGE came with PostgreSQL 15")
    key = "pk" if table == "tsg_tasks" else "task_pk"
    one = f"(SELECT pk AS which FROM tsg_tasks WHERE id = '{world.told}') AS one"
    with pytest.raises(IntegrityError, match=guard):
        connection.exec_driver_sql(f"MERGE INTO {table} USING {one} ON {key} = which WHEN MATCHED THEN {action}")


@on_postgresql
@pytest.mark.parametrize(
    ("statement", "guard"),
    [
        ("UPDATE everything SET status = 'queued'", "tsg_tasks_status_guard"),
        ("UPDATE instead SET status = 'queued'", "tsg_tasks_status_guard"),
        ("DELETE FROM instead", "tsg_task_events_delete_guard"),
    ],
)
def test_views_and_rules_meet_the_guards_too(world: World, connection: Connection, statement: str, guard: str) -> None:
    connection.exec_driver_sql(f"CREATE VIEW everything AS SELECT * FROM tsg_tasks WHERE id = '{world.told}'")
    connection.exec_driver_sql("CREATE TABLE instead (status text)")
    connection.exec_driver_sql("INSERT INTO instead VALUES (NULL)")
    connection.exec_driver_sql(
        "CREATE RULE one AS ON UPDATE TO instead DO INSTEAD "
        f"UPDATE tsg_tasks SET status = NEW.status WHERE id = '{world.told}'"
    )
    connection.exec_driver_sql("CREATE RULE two AS ON DELETE TO instead DO INSTEAD DELETE FROM tsg_task_events")
    with pytest.raises(IntegrityError, match=guard):
        connection.exec_driver_sql(statement)


@on_postgresql
def test_a_replica_asks_no_trigger_and_every_check(world: World, connection: Connection) -> None:
    connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
    refused(by_text, connection, world.tasks["failed"], {"status": "queued"}, "ck_tsg_tasks_lifecycle")
    refused(by_text, connection, world.told, {"delivery_status": "not_applicable"}, "ck_tsg_tasks_delivery")
    values = {"status": "failed", "terminal_code": None}
    assert tuple(by_text(connection, world.told, values)) == tuple(values.values())
    connection.exec_driver_sql("SET LOCAL session_replication_role = origin")
    report = doctor.examine(connection)
    assert (report["healthy"], report["schema_ok"], report["event_inconsistency_count"]) == (False, True, 1)


# -- after all that ----------------------------------------------------------------------------------------


def test_after_all_that_the_ledger_is_as_it_was(world: World) -> None:
    report = world.ledger.doctor()
    assert report["healthy"]
    assert report["task_count"] == world.count
    assert world.count == 6 + 5 + 3 + 1 + 2
