"""Engines: how a transaction begins, what many writers and readers see of each other, and what a fork leaves."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.pool import NullPool, StaticPool

import tsg
from tests.conftest import FakeClock, raw
from tests.conftest import tsg as command
from tsg import InvalidInput, Ledger, SchemaOutdated, SchemaTooNew, StateConflict, TaskNotFound
from tsg.engine import for_writing, make_engine, transaction
from tsg.opening import open_to_write, place_of

UNKNOWN = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """Every statement that SQLite is given on any engine's connection, in order, whoever gives it."""
    sent: list[str] = []

    def trace(connection: Any, record: object) -> None:
        connection.set_trace_callback(sent.append)

    sa.event.listen(Engine, "connect", trace)
    yield sent
    sa.event.remove(Engine, "connect", trace)


def begins(statements: list[str]) -> list[str]:
    return [statement.strip() for statement in statements if statement.startswith("BEGIN")]


def script(source: str, *arguments: object, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, where every warning is an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", source, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def healthy(path: Path) -> dict[str, Any]:
    with Ledger(path) as ledger:
        report = ledger.doctor()
    assert report["healthy"] is True
    return dict(report)


# -- connections -----------------------------------------------------------------------------------------


def test_every_connection_of_the_pool_keeps_the_same_promises(path: Path) -> None:
    opened = open_to_write(place_of(path), busy_timeout_ms=1_234)
    with ExitStack() as stack:
        for _ in range(12):
            connection = stack.enter_context(opened.engine.connect())
            found = {
                name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "foreign_keys", "busy_timeout", "synchronous")
            }
            assert found == {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 1_234, "synchronous": 1}
    opened.close()


def test_foreign_keys_are_on_again_after_a_migration(path: Path) -> None:
    Ledger(path).close()
    engine = sa.create_engine(f"sqlite:///{path}")
    tsg.downgrade(engine, "0001")
    engine.dispose()
    opened = open_to_write(place_of(path))
    with ExitStack() as stack:
        for _ in range(6):
            connection = stack.enter_context(opened.engine.connect())
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    opened.close()


def test_every_write_begins_immediate_and_every_read_deferred(path: Path, statements: list[str]) -> None:
    with Ledger(path) as ledger:
        writes: dict[str, Callable[[], object]] = {
            "create": lambda: ledger.create_task(task_id=UNKNOWN, delivery_required=False),
            "start": lambda: ledger.start_task(UNKNOWN),
            "heartbeat": lambda: ledger.heartbeat(UNKNOWN),
            "close": lambda: ledger.close_task(UNKNOWN, "succeeded"),
            "deliver": lambda: ledger.set_delivery(UNKNOWN, "not_applicable"),
            "reconcile": lambda: ledger.reconcile(active_grace_seconds=1, delivery_grace_seconds=1),
        }
        reads: dict[str, Callable[[], object]] = {
            "get": lambda: ledger.get_task(UNKNOWN),
            "children": lambda: ledger.children_of(UNKNOWN),
            "doctor": lambda: ledger.doctor(),
            "info": lambda: ledger.storage_info(),
            "preview": lambda: ledger.reconcile(active_grace_seconds=1, delivery_grace_seconds=1, dry_run=True),
        }
        for operations, expected in ((writes, "BEGIN IMMEDIATE"), (reads, "BEGIN")):
            for name, operation in operations.items():
                statements.clear()
                operation()
                assert (name, begins(statements)) == (name, [expected])
                assert statements[0].strip() == expected


def test_a_no_op_writes_nothing(path: Path, statements: list[str]) -> None:
    with Ledger(path) as ledger:
        ledger.create_task(task_id=UNKNOWN)
        ledger.start_task(UNKNOWN)
        ledger.close_task(UNKNOWN, "failed")
        statements.clear()
        ledger.create_task(task_id=UNKNOWN)
        ledger.close_task(UNKNOWN, "failed")
    assert not [sent for sent in statements if sent.split()[0] in ("INSERT", "UPDATE", "DELETE")]


def test_opening_at_head_writes_nothing(path: Path, statements: list[str]) -> None:
    Ledger(path).close()
    statements.clear()
    Ledger(path).close()
    assert begins(statements) == ["BEGIN"]
    assert not [sent for sent in statements if sent.split()[0] in ("INSERT", "UPDATE", "CREATE", "DELETE")]


@pytest.mark.parametrize("where", ["engine", "connection"])
def test_no_row_is_lost_under_autocommit(path: Path, statements: list[str], where: str) -> None:
    engine = make_engine(lambda: sqlite3.connect(path, check_same_thread=False), busy_timeout_ms=100)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE t (n INTEGER)")
    statements.clear()
    autocommit = {"isolation_level": "AUTOCOMMIT"}
    if where == "engine":
        with engine.execution_options(**autocommit).connect() as connection:
            connection.exec_driver_sql("INSERT INTO t VALUES (1)")
    else:
        with engine.connect().execution_options(**autocommit) as connection:
            connection.exec_driver_sql("INSERT INTO t VALUES (1)")
            connection.exec_driver_sql("VACUUM")
    assert begins(statements) == []
    other = raw(path)
    assert other.execute("SELECT n FROM t").fetchall() == [(1,)]
    other.close()
    with transaction(for_writing(engine)) as connection:
        connection.exec_driver_sql("INSERT INTO t VALUES (2)")
    assert begins(statements) == ["BEGIN IMMEDIATE"]
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT n FROM t").all() == [(1,), (2,)]
    engine.dispose()


def test_an_error_inside_a_transaction_undoes_all_of_it_ddl_included(path: Path) -> None:
    engine = make_engine(lambda: sqlite3.connect(path, check_same_thread=False), busy_timeout_ms=100)

    def half() -> None:
        with transaction(for_writing(engine)) as connection:
            connection.exec_driver_sql("CREATE TABLE t (n INTEGER)")
            connection.exec_driver_sql("INSERT INTO t VALUES (1)")
            connection.exec_driver_sql("SELECT nonsense FROM t")

    with pytest.raises(sa.exc.OperationalError):
        half()
    with transaction(engine) as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar() == 0
    engine.dispose()


def test_a_savepoint_can_be_undone_alone(path: Path) -> None:
    engine = make_engine(lambda: sqlite3.connect(path, check_same_thread=False), busy_timeout_ms=100)
    with transaction(for_writing(engine)) as connection:
        connection.exec_driver_sql("CREATE TABLE t (n INTEGER)")
        inner = connection.begin_nested()
        connection.exec_driver_sql("INSERT INTO t VALUES (1)")
        inner.rollback()
        connection.exec_driver_sql("INSERT INTO t VALUES (2)")
    with transaction(engine) as connection:
        assert connection.exec_driver_sql("SELECT n FROM t").all() == [(2,)]
    engine.dispose()


def test_no_message_of_an_engine_of_ours_carries_a_parameter(path: Path) -> None:
    engine = make_engine(lambda: sqlite3.connect(path, check_same_thread=False), busy_timeout_ms=100)
    with pytest.raises(sa.exc.OperationalError) as refused, transaction(engine) as connection:
        connection.execute(sa.text("SELECT :value FROM nowhere"), {"value": "confidential"})
    assert "confidential" not in str(refused.value)
    engine.dispose()


# -- many at once ----------------------------------------------------------------------------------------


RACE = """
import multiprocessing, sys
from pathlib import Path
import alembic.runtime.migration, alembic.script, alembic.operations
import sqlalchemy as sa
import tsg

def go(path, barrier):
    barrier.wait()
    with tsg.Ledger(path, busy_timeout_ms=60_000) as ledger:
        ledger.create_task()

context = multiprocessing.get_context("fork")
folder, rounds, count, older = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
for number in range(rounds):
    path = folder / f"{number}.sqlite"
    if older != "none":
        tsg.Ledger(path).close()
        engine = sa.create_engine(f"sqlite:///{path}")
        tsg.downgrade(engine, older)
        engine.dispose()
    barrier = context.Barrier(count)
    processes = [context.Process(target=go, args=(path, barrier)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    failed = [process.exitcode for process in processes if process.exitcode != 0]
    if failed:
        sys.exit(f"round {number}: {failed}")
    with tsg.Ledger(path, migrate=False) as ledger:
        report = ledger.doctor()
    if not report["healthy"] or report["task_count"] != count:
        sys.exit(f"round {number}: {report}")
    if [entry.name for entry in folder.iterdir()] != [path.name]:
        sys.exit(f"round {number}: something was left behind")
    path.unlink()
"""


@pytest.mark.parametrize(("older", "rounds", "count"), [("none", 10, 6), ("0001", 2, 4)])
def test_processes_that_open_one_file_first_at_the_same_moment_all_succeed(
    folder: Path, older: str, rounds: int, count: int
) -> None:
    ran = script(RACE, folder, rounds, count, older)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_threads_that_open_one_new_place_of_the_same_moment_all_succeed(path: Path) -> None:
    barrier, failures = threading.Barrier(4), []

    def go() -> None:
        barrier.wait()
        try:
            with Ledger(path) as ledger:
                ledger.create_task()
        except Exception as error:
            failures.append(error)

    run_in_threads([go] * 4)
    assert failures == []
    assert healthy(path)["task_count"] == 4


def run_in_threads(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_share_one_ledger(path: Path) -> None:
    failures: list[BaseException] = []
    with Ledger(path, busy_timeout_ms=60_000) as ledger:

        def go() -> None:
            try:
                for _ in range(10):
                    task = ledger.create_task(timeout_seconds=60)
                    ledger.start_task(task.id)
                    ledger.heartbeat(task.id)
                    ledger.close_task(task.id, "succeeded", code="completed")
                    assert ledger.set_delivery(task.id, "delivered").version == 4
            except BaseException as error:
                failures.append(error)

        run_in_threads([go] * 8)
    assert failures == []
    report = healthy(path)
    assert (report["task_count"], report["event_count"]) == (80, 320)
    assert report["delivery_status_counts"]["delivered"] == 80


def test_threads_share_one_ledger_that_is_read_only(path: Path) -> None:
    with Ledger(path) as ledger:
        identifiers = [ledger.create_task().id for _ in range(20)]
    failures: list[BaseException] = []
    with Ledger(path, read_only=True) as ledger:

        def go() -> None:
            try:
                for identifier in identifiers:
                    assert ledger.get_task(identifier).id == identifier
                assert ledger.doctor()["healthy"] is True
            except BaseException as error:
                failures.append(error)

        run_in_threads([go] * 8)
    assert failures == []


def test_of_many_writers_that_close_one_task_exactly_one_succeeds(path: Path) -> None:
    outcomes: list[str] = []
    with Ledger(path) as ledger:
        ledger.create_task(task_id=UNKNOWN)
        barrier = threading.Barrier(8)

        def close(status: str) -> None:
            barrier.wait()
            try:
                outcomes.append(ledger.close_task(UNKNOWN, status).status.value)
            except StateConflict:
                outcomes.append("refused")

        ends = ["succeeded", "failed", "timed_out", "cancelled"]
        run_in_threads([lambda end=end: close(end) for end in ends * 2])  # type: ignore[misc]
        stored = ledger.get_task(UNKNOWN)
    assert sorted(outcomes) == sorted([stored.status.value] * 2 + ["refused"] * 6)
    assert stored.version == 1
    assert healthy(path)["event_count"] == 2


MANY = """
import multiprocessing, sys
import tsg

def go(path, barrier, count):
    barrier.wait()
    # Who waits for its turn may wait long on a slow machine; who read before it wrote would fail at once.
    with tsg.Ledger(path, busy_timeout_ms=60_000) as ledger:
        for _ in range(count):
            task = ledger.create_task()
            assert ledger.get_task(task.id).status == "queued"
            ledger.start_task(task.id)
            assert ledger.get_task(task.id).status == "running"
            ledger.close_task(task.id, "succeeded")

context = multiprocessing.get_context("fork")
path, processes, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
barrier = context.Barrier(processes)
workers = [context.Process(target=go, args=(path, barrier, count)) for _ in range(processes)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
sys.exit(sum(worker.exitcode != 0 for worker in workers))
"""


def test_processes_that_read_then_write_never_find_the_database_locked(path: Path) -> None:
    ran = script(MANY, path, 8, 50)
    assert (ran.returncode, ran.stderr) == (0, "")
    report = healthy(path)
    assert (report["task_count"], report["event_count"]) == (400, 1_200)
    assert report["task_status_counts"]["succeeded"] == 400


@contextmanager
def a_writer(path: Path) -> Iterator[sqlite3.Connection]:
    """Somebody who holds the write lock all the while, with something written."""
    writer = raw(path)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("CREATE TABLE theirs (n INTEGER)")
    try:
        yield writer
    finally:
        writer.execute("ROLLBACK")
        writer.close()


@pytest.mark.parametrize("read_only", [False, True])
def test_reading_never_waits_for_a_writer(path: Path, read_only: bool) -> None:
    with Ledger(path, busy_timeout_ms=60_000) as ledger:
        ledger.create_task(task_id=UNKNOWN)
        ledger.create_task(parent_id=UNKNOWN)
        with a_writer(path):
            begun = time.monotonic()
            with Ledger(path, busy_timeout_ms=60_000, read_only=read_only) as other:
                for reader in (ledger, other):
                    assert reader.get_task(UNKNOWN).id == UNKNOWN
                    assert len(reader.children_of(UNKNOWN)) == 1
                    assert reader.doctor()["healthy"] is True
                    assert reader.storage_info()["journal_mode"] == "wal"
                    report = reader.reconcile(active_grace_seconds=0, delivery_grace_seconds=0, dry_run=True)
                    assert report["active_examined"] == 2
            assert time.monotonic() - begun < 20


@pytest.mark.parametrize("arguments", [["doctor"], ["reconcile", "--dry-run"], ["current"], ["check"]])
def test_commands_that_read_never_wait_for_a_writer(path: Path, arguments: list[str]) -> None:
    with Ledger(path), a_writer(path):
        ran = command("--db", path, *arguments)
    # The writer never let go: whoever had waited would have been refused in the end.
    assert (ran.returncode, ran.stderr) == (0, b"")


WRITES: dict[str, Callable[[Ledger], object]] = {
    "create": lambda ledger: ledger.create_task(),
    "start": lambda ledger: ledger.start_task(UNKNOWN),
    "close": lambda ledger: ledger.close_task(UNKNOWN, "failed"),
    "deliver": lambda ledger: ledger.set_delivery(UNKNOWN, "failed"),
    "heartbeat": lambda ledger: ledger.heartbeat(UNKNOWN),
    "reconcile": lambda ledger: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0),
}


def test_a_writer_kept_waiting_for_too_long_is_told_so_and_nothing_is_changed(path: Path, clock: FakeClock) -> None:
    with Ledger(path, clock=clock, busy_timeout_ms=150) as ledger:
        before = ledger.create_task(task_id=UNKNOWN)
        readings = clock.readings
        with a_writer(path):
            for write in WRITES.values():
                begun = time.monotonic()
                with pytest.raises(StateConflict, match="busy") as refused:
                    write(ledger)
                assert 0.1 < time.monotonic() - begun < 4
                assert refused.value.__suppress_context__
        assert clock.readings == readings
        assert ledger.get_task(UNKNOWN) == before
        assert ledger.doctor()["task_count"] == 1
        ledger.start_task(UNKNOWN)
    assert healthy(path)["event_count"] == 2


def test_a_writer_that_waits_in_time_gets_its_turn(path: Path) -> None:
    with Ledger(path, busy_timeout_ms=5_000) as ledger:
        writer = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        writer.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.3, lambda: writer.execute("COMMIT"))
        release.start()
        begun = time.monotonic()
        ledger.create_task()
        assert time.monotonic() - begun > 0.2
        release.join()
        writer.close()


def test_a_first_opening_kept_waiting_for_too_long_is_told_so(path: Path) -> None:
    writer = raw(path)
    writer.execute("BEGIN EXCLUSIVE")
    path.chmod(0o600)
    with pytest.raises(StateConflict):
        Ledger(path, busy_timeout_ms=100)
    writer.execute("ROLLBACK")
    writer.close()
    Ledger(path).close()


# -- after a fork ----------------------------------------------------------------------------------------


FORK = """
import os, sys
import tsg

path, children, count, read_first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "read"
ledger = tsg.Ledger(path, busy_timeout_ms=60_000)
parent = ledger.create_task()
ledger.start_task(parent.id)
pids = []
for _ in range(children):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if read_first:
                assert ledger.get_task(parent.id).status == "running"
            for _ in range(count):
                task = ledger.create_task(parent_id=parent.id)
                ledger.start_task(task.id)
                ledger.close_task(task.id, "succeeded")
            assert ledger.doctor()["healthy"]
            if os.getpid() % 2:
                ledger.close()
            status = 0
        finally:
            os._exit(status)
    pids.append(pid)
for _ in range(count):
    task = ledger.create_task(parent_id=parent.id)
    ledger.start_task(task.id)
    ledger.heartbeat(parent.id)
    ledger.close_task(task.id, "failed")
failed = [status for _, status in (os.waitpid(pid, 0) for pid in pids) if status != 0]
ledger.heartbeat(parent.id)
assert len(ledger.children_of(parent.id)) == (children + 1) * count
ledger.close()
sys.exit(len(failed))
"""


@pytest.mark.parametrize("first", ["read", "write"])
def test_a_ledger_goes_on_in_the_parent_and_in_every_child_of_a_fork(path: Path, first: str) -> None:
    ran = script(FORK, path, 4, 10, first)
    assert (ran.returncode, ran.stderr) == (0, "")
    report = healthy(path)
    assert (report["task_count"], report["event_count"]) == (51, 152)


FORK_OPEN_CONNECTION = """
import os, sqlite3, sys
import sqlalchemy as sa
from tsg.engine import make_engine

engine = make_engine(lambda: sqlite3.connect(sys.argv[1], check_same_thread=False), busy_timeout_ms=1000)

def driver():
    with engine.connect() as connection:
        return id(connection.connection.dbapi_connection)

inherited = driver()
assert driver() == inherited
pid = os.fork()
if pid == 0:
    os._exit(0 if driver() != inherited else 1)
_, status = os.waitpid(pid, 0)
assert driver() == inherited
engine.dispose()
sys.exit(status)
"""


def test_a_child_never_uses_a_connection_of_its_parent(path: Path) -> None:
    ran = script(FORK_OPEN_CONNECTION, path)
    assert (ran.returncode, ran.stderr) == (0, "")


FORK_READ_ONLY = """
import os, sys
import tsg

ledger = tsg.Ledger(sys.argv[1], read_only=True)
before = ledger.doctor()
pid = os.fork()
if pid == 0:
    status = 1
    try:
        assert ledger.doctor() == before
        assert ledger.get_task(sys.argv[2]).status == "queued"
        ledger.close()
        status = 0
    finally:
        os._exit(status)
_, status = os.waitpid(pid, 0)
assert ledger.doctor() == before
ledger.close()
sys.exit(status)
"""


@pytest.mark.parametrize("live", [False, True])
def test_a_read_only_ledger_goes_on_after_a_fork(path: Path, live: bool) -> None:
    with Ledger(path) as ledger:
        ledger.create_task(task_id=UNKNOWN)
        if live:
            ran = script(FORK_READ_ONLY, path, UNKNOWN)
    if not live:
        ran = script(FORK_READ_ONLY, path, UNKNOWN)
    assert (ran.returncode, ran.stderr) == (0, "")


FORK_OUTLIVES_PARENT = """
import os, sys
import tsg

ledger = tsg.Ledger(sys.argv[1])
ledger.create_task(task_id=sys.argv[2])
reader, writer = os.pipe()
used, using = os.pipe()
pid = os.fork()
if pid == 0:
    status = 1
    try:
        if sys.argv[3] == "at once":
            ledger.create_task(parent_id=sys.argv[2])
        os.write(using, b"x")
        os.read(reader, 1)
        for _ in range(5):
            ledger.create_task(parent_id=sys.argv[2])
        ledger.close()
        status = 0
    finally:
        os._exit(status)
os.read(used, 1)
ledger.close()
os.write(writer, b"x")
_, status = os.waitpid(pid, 0)
sys.exit(status)
"""


@pytest.mark.parametrize(("first", "count"), [("at once", 7), ("later", 6)])
def test_what_a_child_writes_after_its_parent_has_closed_is_kept(path: Path, first: str, count: int) -> None:
    ran = script(FORK_OUTLIVES_PARENT, path, UNKNOWN, first)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert healthy(path)["task_count"] == count


FORK_UNDER_LOCKS = """
import os, signal, sys, threading, time, warnings
import tsg

path = sys.argv[1]
ledger = tsg.Ledger(path)
task = ledger.create_task()
locks = [
    value
    for name, module in list(sys.modules.items())
    if name.partition(".")[0] == "tsg"
    for value in vars(module).values()
    if isinstance(value, type(threading.Lock()))
]
held = threading.Event()

def hold():
    for lock in locks:
        lock.acquire()
    held.set()
    time.sleep(0.5)
    for lock in locks:
        lock.release()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    pid = os.fork()
if pid == 0:
    signal.alarm(10)
    status = 1
    try:
        assert ledger.get_task(task.id).status == "queued"
        with tsg.Ledger(path + ".child") as own:
            own.create_task()
        status = 0
    finally:
        os._exit(status)
_, status = os.waitpid(pid, 0)
thread.join()
ledger.close()
sys.exit(status)
"""


def test_a_child_forked_while_another_thread_holds_a_lock_of_ours_is_not_stuck(path: Path) -> None:
    ran = script(FORK_UNDER_LOCKS, path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert healthy(Path(f"{path}.child"))["task_count"] == 1


# -- an application's own engine -------------------------------------------------------------------------


def listeners(engine: Engine) -> dict[str, dict[str, list[object]]]:
    """Everything that listens to an engine, its pool or its dialect."""
    return {
        name: {event: list(getattr(owner.dispatch, event)) for event in owner.dispatch._event_names}
        for name, owner in (("engine", engine), ("pool", engine.pool), ("dialect", engine.dialect))
    }


def sqlalchemys_own_recipe(url: str) -> Engine:
    engine = sa.create_engine(url)

    @sa.event.listens_for(engine, "connect")
    def connected(driver: sqlite3.Connection, record: object) -> None:
        driver.isolation_level = None

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


ENGINES: dict[str, Callable[[str], Engine]] = {
    "default": lambda url: sa.create_engine(url),
    "autocommit": lambda url: sa.create_engine(url, isolation_level="AUTOCOMMIT"),
    "serializable": lambda url: sa.create_engine(url, isolation_level="SERIALIZABLE"),
    "immediate": lambda url: sa.create_engine(url, connect_args={"isolation_level": "IMMEDIATE"}),
    "null pool": lambda url: sa.create_engine(url, poolclass=NullPool),
    "one connection": lambda url: sa.create_engine(url, poolclass=StaticPool),
    "recipe": sqlalchemys_own_recipe,
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, path: Path) -> Iterator[Engine]:
    made = ENGINES[request.param](f"sqlite:///{path}")
    yield made
    made.dispose()


def test_an_applications_own_engine_carries_a_ledger_and_stays_as_it_was(engine: Engine, path: Path) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE tasks (id INTEGER PRIMARY KEY, title TEXT)")
    tsg.upgrade(engine)
    before = listeners(engine), engine.pool, engine.get_execution_options()
    path.chmod(0o644)

    def traits() -> dict[str, object]:
        with engine.connect() as connection:
            driver = connection.connection.dbapi_connection
            assert isinstance(driver, sqlite3.Connection)
            return {
                "isolation_level": driver.isolation_level,
                "level": connection.get_isolation_level(),
                **{
                    name: driver.execute(f"PRAGMA {name}").fetchone()[0]
                    for name in ("foreign_keys", "journal_mode", "synchronous", "busy_timeout", "query_only")
                },
            }

    found = traits()
    with Ledger(engine) as ledger:
        ledger.create_task(task_id=UNKNOWN, timeout_seconds=0, delivery_required=False)
        ledger.create_task(parent_id=UNKNOWN)
        ledger.start_task(UNKNOWN)
        ledger.heartbeat(UNKNOWN)
        assert len(ledger.children_of(UNKNOWN)) == 1
        assert ledger.doctor()["healthy"] is True
        assert ledger.storage_info()["foreign_keys"] is bool(found["foreign_keys"])
        preview = ledger.reconcile(active_grace_seconds=60, delivery_grace_seconds=0, dry_run=True)
        applied = ledger.reconcile(active_grace_seconds=60, delivery_grace_seconds=0)
        assert applied == {**preview, "dry_run": False, "applied": True}
        assert applied["tasks_timed_out"] == 1
        with pytest.raises(StateConflict):
            ledger.start_task(UNKNOWN)
        with pytest.raises(TaskNotFound):
            ledger.get_task("11111111-1111-4111-8111-111111111111")
        other = raw(path)
        assert other.execute("SELECT count(*) FROM tsg_tasks").fetchone() == (2,)
        assert other.execute("SELECT count(*) FROM tsg_task_events").fetchone() == (5,)
        other.close()
    assert (listeners(engine), engine.pool, engine.get_execution_options()) == before
    assert traits() == found
    assert path.stat().st_mode & 0o777 == 0o644
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO tasks (title) VALUES ('still theirs')")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM tasks").scalar() == 1


def test_an_error_on_an_applications_engine_leaves_nothing_half_done(engine: Engine, path: Path) -> None:
    tsg.upgrade(engine)
    with Ledger(engine) as ledger:
        ledger.create_task(task_id=UNKNOWN)
        other = raw(path)
        other.execute(
            "CREATE TRIGGER theirs BEFORE INSERT ON tsg_task_events WHEN NEW.number = 1 "
            "BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        with pytest.raises(StateConflict):
            ledger.start_task(UNKNOWN)
        other.execute("DROP TRIGGER theirs")
        other.close()
        assert ledger.get_task(UNKNOWN).status == "queued"
        assert ledger.doctor()["healthy"] is True


def test_an_applications_engine_that_is_busy_is_a_conflict(path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 0.1})
    tsg.upgrade(engine)
    with Ledger(engine) as ledger:
        with a_writer(path), pytest.raises(StateConflict):
            ledger.create_task()
        assert ledger.doctor()["task_count"] == 0
    engine.dispose()


def test_an_applications_empty_database_is_not_migrated_behind_its_back(engine: Engine, path: Path) -> None:
    for arguments in ({}, {"migrate": True, "adopt": True}):
        with pytest.raises(SchemaOutdated, match="tsg upgrade"):
            Ledger(engine, **arguments)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar() == 0


@pytest.mark.parametrize("revision", ["0001", "0002", "0003"])
def test_an_applications_older_schema_is_not_migrated_behind_its_back(path: Path, revision: str) -> None:
    engine = sa.create_engine(f"sqlite:///{path}")
    tsg.upgrade(engine, revision)
    with pytest.raises(SchemaOutdated, match="tsg upgrade"):
        Ledger(engine)
    with engine.connect() as connection:
        stored = connection.exec_driver_sql("SELECT version_num FROM tsg_alembic_version").scalar()
    assert stored == revision
    tsg.upgrade(engine)
    with Ledger(engine) as ledger:
        ledger.create_task()
    engine.dispose()


def test_an_applications_newer_schema_is_refused(path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{path}")
    tsg.upgrade(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE tsg_alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaTooNew):
        Ledger(engine)
    engine.dispose()


def test_a_database_in_an_applications_memory_will_do() -> None:
    engine = sa.create_engine("sqlite://", poolclass=StaticPool)
    tsg.upgrade(engine)
    with Ledger(engine) as ledger:
        identifier = ledger.create_task().id
    with Ledger(engine, read_only=True) as ledger:
        assert ledger.get_task(identifier).status == "queued"
        with pytest.raises(StateConflict):
            ledger.create_task()
    engine.dispose()


def test_what_is_like_an_engine_but_none_is_refused(path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.connect() as connection, pytest.raises(InvalidInput):
        Ledger(connection)
    with pytest.raises(InvalidInput):
        Ledger(engine.pool)
    engine.dispose()


def test_a_ledger_on_an_engine_with_options_uses_them(path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{path}")
    tsg.upgrade(engine)
    with Ledger(engine.execution_options(isolation_level="AUTOCOMMIT")) as ledger:
        identifier = ledger.create_task().id
    with Ledger(engine) as ledger:
        assert ledger.get_task(identifier).status == "queued"
    engine.dispose()


# -- what is never closed --------------------------------------------------------------------------------


FORGOTTEN = """
import gc, json, os, sys
import tsg

path, how, read_only = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
ledger = tsg.Ledger(path, read_only=read_only)
ledger.doctor()
if how == "collected":
    del ledger
    gc.collect()
    print(json.dumps(os.listdir(os.path.dirname(path))))
"""


@pytest.mark.parametrize("how", ["collected", "left to the end"])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_ledger_that_nobody_closed_closes_itself_without_a_warning(path: Path, how: str, read_only: bool) -> None:
    Ledger(path).close()
    ran = script(FORGOTTEN, path, how, read_only)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    if how == "collected":
        assert json.loads(ran.stdout) == [path.name]
