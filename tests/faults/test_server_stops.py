"""A server that stops at once, a connection that is cut, a client that dies: what was acknowledged is there, what was
not is whole or not there at all, and a ledger that was open works again.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import tsg
from tests.conftest import FakeClock, emptied
from tests.damage import implied_chain
from tests.faults.test_kills import KILLED, made, wait_until
from tests.faults.writers import (
    GRACE,
    LONG_AGO,
    ORDERS,
    OWN_PARENT,
    SHARED_PARENT,
    Books,
    Stored,
    Told,
    Zygote,
    named,
    plain_engine,
)
from tests.postgresql import SKIP_VARIABLE, Server
from tests.tallies import Tally
from tests.test_storage import posix
from tsg import Ledger, StateConflict, schema

pytestmark = posix

SIZE = 3


# -- the server stops at once, and starts again ------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Server]:
    """One of the test's own, to be stopped."""
    if os.environ.get(SKIP_VARIABLE):
        pytest.skip(f"{SKIP_VARIABLE} is set")
    started = Server()
    started.start()
    yield started
    started.remove()


def test_what_a_server_had_acknowledged_before_it_stopped_at_once_is_there_and_every_ledger_works_again(
    zygote: Zygote, server: Server, tmp_path: Path, rounds: int, tally: Tally
) -> None:
    url = sa.make_url(server.url)
    stops, chance = max(5, rounds // 60), random.Random(3)
    epoch = tmp_path / "epoch"

    def enter_epoch(number: int) -> None:
        (tmp_path / "next").write_text(str(number))
        (tmp_path / "next").replace(epoch)

    with Ledger(url) as ledger:
        for parent in (SHARED_PARENT, OWN_PARENT):
            ledger.create_task(task_id=parent)
        engine = plain_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql(ORDERS)
        engine.dispose()
        enter_epoch(0)
        logs = [tmp_path / f"{number}.log" for number in range(8)]
        processes = []
        for number, log in enumerate(logs):
            told: dict[str, Any] = {"target": named(url), "log": str(log), "seed": number, "epoch": str(epoch)}
            if number < 6:
                processes.append(zygote.start("writer", **told, host=number == 5))
            else:
                processes.append(zygote.start("sweeper", **told, prune=number == 7))

        def all_serve(number: int) -> bool:
            return all(number in Told(log).served for log in logs)

        wait_until(lambda: all_serve(0), "not every writer began", 30)
        for number in range(stops):
            time.sleep(0.2 + chance.random() * 0.2)
            enter_epoch(2 * number + 1)
            server.stop("immediate")
            time.sleep(chance.random() * 0.2)
            server.start()
            enter_epoch(2 * number + 2)
            # Each by the ledger, or the engine, that it has had open all the time.
            wait_until(lambda number=number: all_serve(2 * number + 2), "a ledger does not work again", 30)
        enter_epoch(-1)
        assert [zygote.wait(process) for process in processes] == [0] * 8
        books = Books()
        for number, log in enumerate(logs):
            told_by_it = Told(log)
            books.enter(told_by_it)
            if number != 5:
                # An application's own engine is its own business.
                assert [times for times in told_by_it.failures.values() if times > 1] == [], log
                assert told_by_it.failures.get(0, 0) == 0
        assert sum(Told(log).broken for log in logs) >= stops
        # The one that this test had open, too.
        attempts = 0
        while True:
            try:
                report = ledger.doctor()
                break
            except StateConflict:
                attempts += 1
                assert attempts == 1
        assert report["healthy"]
        stored = Stored.of(url)
        assert books.lost(stored) == []
        assert books.unexplained(stored) == []
        assert books.transitions > 50 * stops / 5
    tally("a server stopped at once and started again", stops, 0)


# -- a connection is cut -----------------------------------------------------------------------------------


@pytest.fixture
def url(request: pytest.FixtureRequest) -> sa.URL:
    emptied_url = emptied(request, "postgresql")
    assert isinstance(emptied_url, sa.URL)
    return emptied_url


class Cutter:
    """Holds what a client will wait for, in the midst of its transaction, and cuts the client's connection there."""

    def __init__(self, url: sa.URL) -> None:
        self.engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        self.cuts = 0

    @contextmanager
    def holding(self, statement: str) -> Iterator[Callable[[], None]]:
        """Hold the locks of a statement until what it gives is called, or to the end."""
        with self.engine.execution_options(isolation_level="READ COMMITTED").connect() as connection:
            connection.exec_driver_sql(statement)
            yield connection.rollback

    def waiting(self) -> list[int]:
        """The sessions that wait for a lock in this database."""
        with self.engine.connect() as connection:
            found = connection.exec_driver_sql(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            return list(found.scalars())

    def wait(self) -> list[int]:
        wait_until(lambda: bool(self.waiting()), "nobody waits")
        return self.waiting()

    def cut(self) -> int:
        """Cut the connections that wait; how many those were."""
        with self.engine.connect() as connection:
            cut = [
                connection.exec_driver_sql("SELECT pg_terminate_backend(%s)", (session,)).scalar_one()
                for session in self.waiting()
            ]
        self.cuts += len(cut)
        return len(cut)

    def cut_always(self, work: Future[Any]) -> Any:
        """Cut whenever the client waits, until it has given up; what it gives then."""
        wait_until(lambda: bool(self.cut()), "nobody waits")
        while not work.done():
            self.cut()
            time.sleep(0.005)
        return work.result()

    def is_gone(self, session: int) -> bool:
        with self.engine.connect() as connection:
            sessions = sa.text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
            return connection.scalar(sessions, {"pid": session}) == 0


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    """A thread for what waits."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def row_of(task: str) -> str:
    return f"SELECT 1 FROM tsg_tasks WHERE id = '{task}' FOR UPDATE"


REFUSED = (2, {"error": "StateConflict", "ok": False})


def answered(outcome: tuple[int, bytes]) -> tuple[int, Any]:
    return outcome[0], json.loads(outcome[1])


def done_of(tasks: list[str], stored: Stored) -> list[bool]:
    assert all(stored.chains[task] == implied_chain(row) for task, row in stored.tasks.items())
    return [task not in stored.tasks or stored.tasks[task]["status"] == "timed_out" for task in tasks]


@pytest.mark.parametrize(
    ("kind", "size"), [("reconcile", None), ("reconcile", SIZE), ("prune", SIZE)], ids=["reconcile", "batches", "prune"]
)
def test_b04_a_sweep_whose_connection_is_cut_is_refused_with_its_whole_batches_done_and_the_next_ends_the_rest(
    zygote: Zygote,
    url: sa.URL,
    elsewhere: ThreadPoolExecutor,
    tally: Tally,
    kind: str,
    size: int | None,
) -> None:
    cutter, clock = Cutter(url), FakeClock(time.time() - LONG_AGO)
    with Ledger(url, clock=clock) as past:
        tasks = made(past, clock, kind, 9)
    command = ["--db", named(url), kind]
    command += ["--older-than", str(GRACE)] if kind == "prune" else []
    command += [] if size is None else ["--batch-size", str(size)]
    # The fifth: in the midst of the second batch.
    with cutter.holding(row_of(tasks[4])):
        work = elsewhere.submit(zygote.run, *command)
        assert answered(cutter.cut_always(work)) == REFUSED
        whole = size or 0
        assert done_of(tasks, Stored.of(url)) == [place < whole for place in range(9)]
    status, answer = answered(zygote.run(*command))
    report = answer[kind]
    assert (status, report.get("tasks_timed_out", report.get("tasks_pruned"))) == (0, 9 - whole)
    assert done_of(tasks, Stored.of(url)) == [True] * 9
    with Ledger(url) as ledger:
        assert ledger.doctor()["healthy"]
    tally(f"a connection cut in the midst of a {kind}", cutter.cuts, 0)


#: Each verb that a task may pass through; each waits for the row that is held.
VERBS: dict[str, Callable[[Ledger, str], object]] = {
    "create": lambda ledger, task: ledger.create_task(task_id=task, parent_id=OWN_PARENT),
    "start": lambda ledger, task: ledger.start_task(task),
    "beat": lambda ledger, task: ledger.heartbeat(task),
    "beat many": lambda ledger, task: ledger.heartbeat_many([task]),
    "close": lambda ledger, task: ledger.close_task(task, "succeeded", code="completed"),
    "deliver": lambda ledger, task: ledger.set_delivery(task, "delivered"),
}
TASK = "0f8fad5b-d9cb-469f-a165-70867728950e"


def everything(url: sa.URL) -> Any:
    """Every row of ours, in any revision."""
    engine = plain_engine(url)
    with engine.connect() as connection:
        found = {
            table: connection.exec_driver_sql(f"SELECT * FROM {table} ORDER BY 1, 2").all()
            for table in ("tsg_tasks", "tsg_task_events")
        }
        found["tsg_alembic_version"] = connection.exec_driver_sql("SELECT * FROM tsg_alembic_version").all()
    engine.dispose()
    return found


def test_a_verb_whose_connection_is_cut_is_refused_with_nothing_done_and_then_done_by_the_same_ledger(
    url: sa.URL, elsewhere: ThreadPoolExecutor, tally: Tally
) -> None:
    cutter = Cutter(url)
    with Ledger(url) as ledger:
        ledger.create_task(task_id=OWN_PARENT)
        for name, verb in VERBS.items():
            before = everything(url)
            with cutter.holding(row_of(OWN_PARENT if name == "create" else TASK)):
                work = elsewhere.submit(verb, ledger, TASK)
                with pytest.raises(StateConflict):
                    cutter.cut_always(work)
                assert everything(url) == before
            # Cut once: it may be refused, or done again by itself; it is never done twice.
            with cutter.holding(row_of(OWN_PARENT if name == "create" else TASK)) as release:
                work = elsewhere.submit(verb, ledger, TASK)
                wait_until(lambda: bool(cutter.cut()), "nobody waits")
                release()
                error = work.exception()
            if error is not None:
                assert isinstance(error, StateConflict)
                assert everything(url) == before
                verb(ledger, TASK)
            stored = Stored.of(url)
            assert done_of([], stored) == []
            assert stored.tasks[TASK]["version"] == list(VERBS).index(name)
        assert ledger.doctor()["healthy"]
    tally("a connection cut in the midst of a verb", cutter.cuts, 0)


# -- in the midst of a migration -----------------------------------------------------------------------------


@pytest.mark.parametrize("revision", [schema.REVISIONS[0], schema.REVISIONS[-2]])
def test_a_migration_that_is_cut_or_whose_client_is_killed_has_not_been_and_succeeds_the_next_time(
    zygote: Zygote, empty_postgresql_url: sa.URL, elsewhere: ThreadPoolExecutor, tally: Tally, revision: str
) -> None:
    url, cutter, clock = empty_postgresql_url, Cutter(empty_postgresql_url), FakeClock()
    with Ledger(url, clock=clock) as ledger:
        made(ledger, clock, "reconcile", 5)
        made(ledger, clock, "prune", 5)
    engine = plain_engine(url)
    tsg.downgrade(engine, revision)
    before = everything(url)
    upgrade = ["--db", named(url), "upgrade"]
    # Where a step has done its work, and is about to say so.
    midst = "SELECT 1 FROM tsg_alembic_version FOR UPDATE"
    with cutter.holding(midst):
        assert answered(cutter.cut_always(elsewhere.submit(zygote.run, *upgrade))) == REFUSED
        assert everything_is(url, before, revision)
    with cutter.holding(midst):
        process = zygote.start("command", arguments=upgrade, output=os.devnull)
        (session,) = cutter.wait()
        assert zygote.kill(process) == KILLED
    # The server notices when it has done what it was at.
    wait_until(lambda: cutter.is_gone(session), "a session was left behind")
    assert everything_is(url, before, revision)
    assert answered(zygote.run(*upgrade))[1]["schema"]["current"] == schema.HEAD
    engine.dispose()
    with Ledger(url, migrate=False) as ledger:
        report = ledger.doctor()
    assert (report["healthy"], report["task_count"], report["event_count"]) == (True, 10, 5 * 2 + 5 * 3)
    tally("a connection cut, or a client killed, in the midst of a migration", cutter.cuts + 1, 0)


def everything_is(url: sa.URL, before: Any, revision: str) -> bool:
    engine = plain_engine(url)
    with engine.connect() as connection:
        assert schema.current(connection).current == revision
        names = sa.inspect(connection).get_table_names()
    engine.dispose()
    return everything(url) == before and set(names) == {"tsg_tasks", "tsg_task_events", "tsg_alembic_version"}
