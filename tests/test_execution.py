"""Two ways to carry out a statement, by SQLAlchemy and by the driver: the same rows, records and refusals."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import sqlalchemy.dialects.sqlite

from tests.conftest import FakeClock, raw
from tests.damage import lifted as all_guards_lifted
from tests.damage import some_kinds
from tests.test_both_databases import a_call, outcome, stored
from tests.test_query_plans import statements
from tsg import InvalidInput, Ledger, LedgerError, StateConflict, TaskNotFound, TaskRecord, execution, verbs
from tsg.engine import driver_transaction, is_own_sqlite
from tsg.execution import CoreExecution, DriverExecution, Execution

ID = "0f8fad5b-d9cb-469f-a165-70867728950e"
UNKNOWN = "ffffffff-ffff-4fff-bfff-ffffffffffff"
DIGEST = "0123456789abcdef" * 4


@pytest.fixture
def files(folder: Path, file_at_head: Path) -> tuple[Path, Path]:
    """Two files of empty ledgers."""
    made = (folder / "driver.sqlite", folder / "core.sqlite")
    for path in made:
        shutil.copyfile(file_at_head, path)
        path.chmod(0o600)
    return made


class Way:
    """A ledger whose statements go one of the two ways, and a plain engine to look at its file."""

    def __init__(self, path: Path, *, by_driver: bool) -> None:
        self.path, self.by_driver = path, by_driver
        self.clock = FakeClock()
        self.engine = sa.create_engine(f"sqlite:///{path}")
        self.ledger = Ledger(path if by_driver else self.engine, clock=self.clock, busy_timeout_ms=50)

    def stored(self) -> tuple[list[Any], list[Any]]:
        return stored(self.engine)

    def close(self) -> None:
        self.ledger.close()
        self.engine.dispose()

    @contextmanager
    def executing(self) -> Iterator[Execution]:
        """Its own way, in a transaction that is undone."""
        if self.by_driver:
            own = self.ledger._opened.engine
            assert is_own_sqlite(own)
            with suppress(Undone), driver_transaction(own, "IMMEDIATE") as driver:
                yield DriverExecution(driver)
                raise Undone
        else:
            with self.engine.connect() as connection:
                yield CoreExecution(connection)
                connection.rollback()


class Undone(Exception):
    pass


@pytest.fixture
def ways(files: tuple[Path, Path]) -> Iterator[tuple[Way, Way]]:
    made = Way(files[0], by_driver=True), Way(files[1], by_driver=False)
    yield made
    for way in made:
        way.close()


def test_a_file_of_its_own_goes_by_the_driver_and_an_applications_engine_does_not(ways: tuple[Way, Way]) -> None:
    by_driver, by_core = ways
    seen: list[str] = []
    for way in ways:
        own = way.ledger._opened.engine
        assert is_own_sqlite(own) is way.by_driver
        sa.event.listen(own, "before_cursor_execute", lambda *passed: seen.append(passed[2]))
    task = by_driver.ledger.create_task().id
    by_driver.ledger.start_task(task)
    by_driver.ledger.get_task(task)
    assert seen == []
    by_core.ledger.create_task()
    assert any("INSERT INTO tsg_tasks" in text for text in seen)


# -- the same rows and records -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_same_calls_give_the_same_records_and_rows_both_ways(ways: tuple[Way, Way], seed: int) -> None:
    chance = random.Random(100 + seed)
    made: list[str] = []
    kinds: set[str] = set()
    for _ in range(120):
        leap = chance.choice((0, 0, 0.1, 1, 30, 1e-7, 1 / 3, -1))
        call = a_call(chance, made)
        if call[0] == "doctor":
            call = ("heartbeat_many", (chance.sample(made, min(len(made), 5)),), {})
        found = []
        for way in ways:
            way.clock.now += leap
            readings = way.clock.readings
            found.append((outcome(way.ledger, *call), way.clock.readings - readings))
        assert found[0] == found[1], call
        (kind, _), _ = found[0]
        kinds.add(kind)
        if kind == "done" and call[0] == "create_task":
            made.append(str(uuid.UUID(str(call[2]["task_id"]))))
    assert ways[0].stored() == ways[1].stored()
    assert kinds == {"done", "InvalidInput", "StateConflict", "TaskNotFound"}
    assert all(way.ledger.doctor()["healthy"] for way in ways)


def the_same_left_in_each(ways: tuple[Way, Way]) -> list[str]:
    """Tasks of every kind whose rules differ, in both files, byte for byte."""
    kinds = some_kinds(ways[0].ledger, ways[0].clock)
    with closing(raw(ways[0].path)) as source, closing(raw(ways[1].path)) as copy:
        for table in ("tsg_tasks", "tsg_task_events"):
            rows = source.execute(f"SELECT * FROM {table}").fetchall()
            copy.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
    ways[1].clock.now = ways[0].clock.now
    assert ways[0].stored() == ways[1].stored()
    return list(kinds.values())


def typed(rows: Any) -> Any:
    return [[(type(value), value) for value in row] for row in rows]


def test_every_statement_of_a_verb_gives_the_same_both_ways(ways: tuple[Way, Way]) -> None:
    made = the_same_left_in_each(ways)
    by_name = {name: value for name, value in statements("sqlite").items() if name.startswith("verbs.")}
    times = dict.fromkeys(("created_at", "updated_at", "delivery_updated_at"), 5000.5)
    fresh = ways[0].ledger.get_task(made[0])
    values: dict[str, Any] = {
        "task_pk": 4,
        "seen_version": 1,
        "seen_status": "running",
        "seen_delivery_status": "pending",
        "now": 5000.5,
        "ids": str(made).replace("'", '"'),
        "number": 2,
        "kind": "task_transition",
        "from_status": "running",
        "to_status": "failed",
        "occurred_at": 5000.5,
        "code": None,
        "new_status": "timed_out",
        "new_delivery_status": "pending",
        "new_expects_heartbeat": True,
        "new_terminal_code": "restart_stale",
        **dict.fromkeys(("new_updated_at", "new_ended_at"), 5000.5),
        **{name: value for name, value in vars(fresh).items() if name not in times},
        **times,
    }
    assert len(by_name) > 8
    for name, statement in by_name.items():
        for task in made if isinstance(statement, sa.Select) else (made[0],):
            given = values | {"id": UNKNOWN if name.endswith(" insert") else task, "parent": task}
            asked = {key: given.get(key) for key in needed(statement)}
            found = []
            for way in ways:
                with way.executing() as how:
                    assert how.dialect == "sqlite"
                    if isinstance(statement, sa.Select):
                        found.append((name, typed(how.rows(statement, asked)), None))
                        continue
                    done: Any
                    try:
                        done = (how.insert if name.endswith(" insert") else how.change)(statement, asked)
                    except (sa.exc.IntegrityError, sqlite3.IntegrityError):
                        done = "refused"
                    found.append((name, done, everything(how)))
            assert found[0] == found[1]


def needed(statement: Any) -> list[str]:
    """The values that a statement takes; with others beside them SQLAlchemy would write those too."""
    binds = statement.compile(dialect=sa.dialects.sqlite.dialect()).binds
    return [bind.key for bind in binds.values() if bind.value is None]


def everything(how: Execution) -> Any:
    tables = ("tsg_tasks", "tsg_task_events")
    return [typed(how.rows(sa.select(sa.text("*")).select_from(sa.table(table)), {})) for table in tables]


def test_records_are_of_the_same_types_both_ways(ways: tuple[Way, Way]) -> None:
    for task in the_same_left_in_each(ways):
        one, other = (way.ledger.get_task(task) for way in ways)
        assert one == other
        assert [type(value) for value in dataclasses.astuple(one)] == [type(value) for value in vars(other).values()]
        assert one.to_dict() == other.to_dict()
        children = [way.ledger.children_of(task) for way in ways]
        assert children[0] == children[1]


def test_values_at_their_bounds_come_back_the_same_both_ways(ways: tuple[Way, Way]) -> None:
    for now in (-1e308, -0.0, 5e-324, 1 / 3, 2**53 + 2.0, 1_750_000_000.123456, 1.7e308):
        found: list[TaskRecord] = []
        identifier = str(uuid.uuid4())
        for way in ways:
            way.clock.now = now
            way.ledger.create_task(
                task_id=identifier, timeout_seconds=0.1, delivery_required=False, payload_hash=DIGEST
            )
            found.append(way.ledger.start_task(identifier))
            assert way.ledger.get_task(identifier) == found[-1]
        assert repr(found[0]) == repr(found[1])
    assert ways[0].stored() == ways[1].stored()


def test_an_applications_own_columns_named_in_another_order_matter_to_neither(ways: tuple[Way, Way]) -> None:
    for way in ways:
        task = way.ledger.create_task(task_id=ID)
        with closing(raw(way.path)) as connection:
            connection.execute("CREATE TABLE orders (task_id TEXT, item TEXT)")
        assert way.ledger.get_task(ID) == task


# -- damaged values ----------------------------------------------------------------------------------------

#: What no verb writes, in a row or in place of one of its values.
DAMAGE: dict[str, Any] = {
    "an unknown status": ("status", "asleep"),
    "a status that is a number": ("status", 7),
    "no status": ("status", None),
    "a status of bytes": ("status", b"running"),
    "a status with more behind a NUL": ("status", "running\0"),
    "an unknown delivery": ("delivery_status", "lost"),
    "no delivery": ("delivery_status", None),
    "text in a flag": ("delivery_required", "yes"),
    "two in a flag": ("expects_heartbeat", 2),
    "no flag": ("expects_heartbeat", None),
    "bytes in a flag": ("delivery_required", b"\x01"),
    "text in a time": ("updated_at", "soon"),
    "bytes in a time": ("created_at", b"\xff\xfe"),
    "no time": ("created_at", None),
    "an infinite time": ("updated_at", float("inf")),
    "text in a version": ("version", "many"),
    "a fraction in a version": ("version", 1.5),
    "no version": ("version", None),
    "a number as a code": ("terminal_code", 7),
    "bytes as a hash": ("payload_hash", b"\xff" * 64),
    "text that is no UTF-8": ("payload_hash", "CAST(x'FF' AS TEXT)"),
    "a parent that is itself": ("parent_id", ID),
    "a parent that is no id": ("parent_id", "somebody"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_value_is_refused_by_every_verb_both_ways(ways: tuple[Way, Way], damage: tuple[str, Any]) -> None:
    column, value = damage
    expression, bound = (value, ()) if isinstance(value, str) and value.startswith("CAST") else ("?", (value,))
    answers = []
    for way in ways:
        other = way.ledger.create_task().id
        way.ledger.create_task(task_id=ID)
        way.ledger.start_task(ID)
        way.ledger.start_task(other)
        way.close()
        with closing(raw(way.path)) as connection, all_guards_lifted(connection):
            connection.execute(f"UPDATE tsg_tasks SET {column} = {expression} WHERE id = ?", (*bound, ID))
        again = Way(way.path, by_driver=way.by_driver)
        again.clock.now = 1010.0
        found = []
        calls: tuple[Callable[[Ledger], object], ...] = (
            lambda ledger: ledger.get_task(ID),
            lambda ledger: ledger.start_task(ID),
            lambda ledger: ledger.heartbeat(ID),
            lambda ledger: ledger.close_task(ID, "failed"),
            lambda ledger: ledger.set_delivery(ID, "failed"),
            lambda ledger: ledger.create_task(task_id=ID),
            lambda ledger: ledger.create_task(parent_id=ID),
        )
        for call in calls:
            with pytest.raises(LedgerError) as caught:
                call(again.ledger)
            assert caught.value.__cause__ is None
            assert "asleep" not in str(caught.value)
            found.append((type(caught.value), str(caught.value), getattr(caught.value, "retriable", None)))
        assert {kind for kind, _, _ in found} == {StateConflict}
        # And what is well goes on as before.
        assert again.ledger.heartbeat(other).version == 2
        assert again.ledger.heartbeat_many([other]) == []
        answers.append(found)
        again.close()
    assert [[kind for kind, _, _ in found] for found in answers][0] == [kind for kind, _, _ in answers[1]]


@pytest.mark.parametrize("damage", ["an unknown status", "text in a flag", "no version", "text that is no UTF-8"])
def test_a_damaged_child_is_refused_among_children_both_ways(ways: tuple[Way, Way], damage: str) -> None:
    column, value = DAMAGE[damage]
    expression, bound = (value, ()) if "CAST" in str(value) else ("?", (value,))
    for way in ways:
        parent = way.ledger.create_task().id
        way.ledger.create_task(parent_id=parent)
        way.ledger.create_task(task_id=ID, parent_id=parent)
        with closing(raw(way.path)) as connection, all_guards_lifted(connection):
            connection.execute(f"UPDATE tsg_tasks SET {column} = {expression} WHERE id = ?", (*bound, ID))
        with pytest.raises(StateConflict):
            way.ledger.children_of(parent)
        assert way.ledger.get_task(parent).id == parent


# -- what the database refuses -----------------------------------------------------------------------------


def open_transactions(way: Way) -> bool:
    """Whether somebody still holds the file's write lock, or a connection lent out."""
    with closing(sqlite3.connect(way.path, isolation_level=None, timeout=0)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return True
    own = way.ledger._opened.engine
    assert isinstance(own, sa.Engine)
    count: Callable[[], int] = getattr(own.pool, "checkedout", lambda: 0)
    return count() > 0


GUARDS = {
    "a trigger": (
        "CREATE TRIGGER marked BEFORE UPDATE ON tsg_tasks BEGIN SELECT RAISE(ABORT, 'marked'); END",
        "DROP TRIGGER marked",
    ),
    "a trigger that fails": (
        "CREATE TRIGGER marked BEFORE UPDATE ON tsg_tasks BEGIN SELECT RAISE(FAIL, 'marked'); END",
        "DROP TRIGGER marked",
    ),
    "a trigger that rolls back": (
        "CREATE TRIGGER marked BEFORE UPDATE ON tsg_tasks BEGIN SELECT RAISE(ROLLBACK, 'marked'); END",
        "DROP TRIGGER marked",
    ),
    "a trigger of the events": (
        "CREATE TRIGGER marked BEFORE INSERT ON tsg_task_events BEGIN SELECT RAISE(ABORT, 'marked'); END",
        "DROP TRIGGER marked",
    ),
    "a unique index": (
        "CREATE UNIQUE INDEX marked ON tsg_task_events (number)",
        "DROP INDEX marked",
    ),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_what_a_guard_refuses_is_a_conflict_without_a_value_and_nothing_stays_open(
    ways: tuple[Way, Way], guard: str
) -> None:
    put, take = GUARDS[guard]
    for way in ways:
        way.ledger.create_task(task_id=ID)
        with closing(raw(way.path)) as connection:
            connection.execute(put)
        before = way.stored()
        calls: tuple[Callable[[], object], ...] = (
            partial(way.ledger.start_task, ID),
            partial(way.ledger.close_task, ID, "failed"),
        )
        for call in (way.ledger.create_task,) if guard == "a unique index" else calls:
            with pytest.raises(StateConflict) as caught:
                call()
            assert not caught.value.retriable
            assert ID not in str(caught.value)
            assert "marked" not in str(caught.value)
            assert caught.value.__cause__ is None
            assert way.stored() == before
            assert not open_transactions(way)
        with closing(raw(way.path)) as connection:
            connection.execute(take)
        assert way.ledger.start_task(ID).status == "running"
        assert way.ledger.doctor()["healthy"]


def test_a_check_that_is_broken_is_a_conflict_both_ways(ways: tuple[Way, Way]) -> None:
    for way in ways:
        way.ledger.create_task(task_id=ID)
        way.ledger.start_task(ID)
        with closing(raw(way.path)) as connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            connection.execute("UPDATE tsg_tasks SET version = 9223372036854775807")
        before = way.stored()
        with pytest.raises(StateConflict) as caught:
            way.ledger.heartbeat(ID)
        assert "9223" not in str(caught.value)
        assert way.stored() == before
        assert not open_transactions(way)
        assert way.ledger.create_task().status == "queued"


def test_while_another_writes_it_is_busy_and_may_be_tried_again(ways: tuple[Way, Way]) -> None:
    way, _ = ways
    way.ledger.create_task(task_id=ID)
    with closing(raw(way.path)) as other:
        other.execute("BEGIN IMMEDIATE")
        for call in (
            lambda: way.ledger.create_task(),
            lambda: way.ledger.start_task(ID),
            lambda: way.ledger.heartbeat_many([ID]),
            lambda: way.ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0),
            lambda: way.ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0, batch_size=1),
            lambda: way.ledger.prune(0),
        ):
            readings = way.clock.readings
            with pytest.raises(StateConflict) as caught:
                call()
            assert caught.value.retriable
            assert caught.value.__cause__ is None
            assert way.clock.readings == readings
        assert way.ledger.get_task(ID).status == "queued"
        other.execute("ROLLBACK")
    assert not open_transactions(way)
    assert way.ledger.start_task(ID).status == "running"


def test_a_file_that_is_gone_or_replaced_is_a_conflict(ways: tuple[Way, Way], file_at_head: Path) -> None:
    way, _ = ways
    way.ledger.create_task(task_id=ID)
    way.path.unlink()
    for call in (partial(way.ledger.get_task, ID), partial(way.ledger.start_task, ID)):
        with pytest.raises(StateConflict):
            call()
    shutil.copyfile(file_at_head, way.path)
    way.path.chmod(0o600)
    with pytest.raises(StateConflict):
        way.ledger.create_task()


def test_a_table_that_is_gone_is_a_conflict_and_nothing_stays_open(ways: tuple[Way, Way]) -> None:
    for way in ways:
        way.ledger.create_task(task_id=ID)
        with closing(raw(way.path)) as connection:
            connection.execute("ALTER TABLE tsg_tasks RENAME TO marked")
        for call in (
            partial(way.ledger.get_task, ID),
            partial(way.ledger.start_task, ID),
            way.ledger.create_task,
        ):
            with pytest.raises(StateConflict) as caught:
                call()
            assert "tsg_tasks" not in str(caught.value)
            assert not open_transactions(way)
        with closing(raw(way.path)) as connection:
            connection.execute("ALTER TABLE marked RENAME TO tsg_tasks")
        assert way.ledger.start_task(ID).status == "running"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, InvalidInput])
def test_whatever_a_clock_raises_leaves_no_transaction_open(ways: tuple[Way, Way], error: type[BaseException]) -> None:
    for way in ways:
        way.ledger.create_task(task_id=ID)

        def broken(error: type[BaseException] = error) -> float:
            raise error

        before = way.stored()
        kept, way.ledger._clock = way.ledger._clock, broken
        for call in (
            partial(way.ledger.start_task, ID),
            way.ledger.create_task,
            partial(way.ledger.reconcile, active_grace_seconds=0, delivery_grace_seconds=0),
            partial(way.ledger.prune, 0),
        ):
            with pytest.raises(error):
                call()
            assert not open_transactions(way)
        way.ledger._clock = kept
        assert way.stored() == before
        assert way.ledger.start_task(ID).status == "running"


def test_after_every_kind_of_refusal_the_ledger_goes_on(ways: tuple[Way, Way]) -> None:
    for way in ways:
        way.ledger.create_task(task_id=ID)
        for _ in range(40):
            for refused, call in (
                (TaskNotFound, partial(way.ledger.start_task, UNKNOWN)),
                (StateConflict, partial(way.ledger.heartbeat, ID)),
                (InvalidInput, partial(way.ledger.close_task, ID, "failed", code="completed")),
                (TaskNotFound, partial(way.ledger.children_of, UNKNOWN)),
                (StateConflict, partial(way.ledger.create_task, task_id=ID, timeout_seconds=5)),
            ):
                with pytest.raises(refused):
                    call()
            assert not open_transactions(way)
        assert way.ledger.get_task(ID).version == 0


# -- threads and processes ---------------------------------------------------------------------------------


def test_eight_threads_share_a_ledger_and_its_statements(files: tuple[Path, Path]) -> None:
    execution._prepared.cache_clear()
    begun = threading.Barrier(8)
    with Ledger(files[0], busy_timeout_ms=30_000) as ledger:
        shared = ledger.create_task(timeout_seconds=3600).id
        ledger.start_task(shared)

        def work(index: int) -> list[str]:
            begun.wait()
            made = []
            for _ in range(12):
                task = ledger.create_task(parent_id=shared, delivery_required=index % 2 == 0).id
                ledger.start_task(task)
                ledger.heartbeat(shared)
                assert ledger.heartbeat_many([task, shared]) == []
                ledger.close_task(task, "succeeded", code="completed")
                ledger.set_delivery(task, "delivered" if index % 2 == 0 else "not_applicable")
                assert ledger.get_task(task).parent_id == shared
                made.append(task)
            return made

        with ThreadPoolExecutor(8) as pool:
            made = [task for part in pool.map(work, range(8)) for task in part]
        assert {task.id for task in ledger.children_of(shared)} == set(made)
        assert ledger.get_task(shared).version == 1 + 2 * 96
        report = ledger.doctor()
        assert (report["healthy"], report["event_count"]) == (True, 2 + 4 * 96)


FORKED = """
import os, sys, tsg
ledger = tsg.Ledger(sys.argv[1], busy_timeout_ms=30_000)
parent = ledger.create_task().id
ledger.start_task(parent)
ledger.heartbeat_many([parent])
children = []
for _ in range(3):
    child = os.fork()
    if not child:
        status = 1
        try:
            for _ in range(15):
                task = ledger.create_task(parent_id=parent).id
                ledger.start_task(task)
                ledger.heartbeat(parent)
                assert ledger.heartbeat_many([task, parent]) == []
                ledger.close_task(task, "failed", code="worker_failed")
            assert ledger.get_task(parent).status == "running"
            status = 0
        finally:
            os._exit(status)
    children.append(child)
for _ in range(15):
    ledger.heartbeat(parent)
statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert statuses == [0, 0, 0], statuses
assert ledger.get_task(parent).version == 2 + 15 + 2 * 45
assert len(ledger.children_of(parent)) == 45
assert ledger.doctor()["healthy"]
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system that forks")
def test_children_of_a_fork_go_on_after_their_parent_has_used_it(files: tuple[Path, Path]) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKED, str(files[0])],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


# -- what is kept of a statement ---------------------------------------------------------------------------


def test_a_statement_is_compiled_once(ways: tuple[Way, Way]) -> None:
    way, _ = ways

    def life() -> None:
        task = way.ledger.create_task(timeout_seconds=5).id
        way.ledger.start_task(task)
        way.ledger.heartbeat(task)
        way.ledger.heartbeat_many([task])
        way.ledger.close_task(task, "failed")
        way.ledger.set_delivery(task, "failed")
        way.ledger.children_of(task)

    life()
    compiled = execution._prepared.cache_info().misses
    for _ in range(5):
        life()
    kept = execution._prepared.cache_info()
    assert kept.misses == compiled
    assert kept.maxsize is not None
    assert kept.currsize < kept.maxsize


def test_a_parameter_that_a_statement_needs_and_is_not_given_is_no_null(ways: tuple[Way, Way]) -> None:
    _, way = ways
    with driver_transaction(way.ledger._opened.engine) as driver, pytest.raises(KeyError):
        DriverExecution(driver).rows(verbs._statements().by_id, {})
