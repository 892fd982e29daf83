"""Many at once, threads and processes, on either database: one chain a task, nothing missed or doubled."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

import tsg
from tests.conftest import FakeClock, raw
from tsg import Ledger, StateConflict, Task, TaskEvent

ID = "0f8fad5b-d9cb-469f-a165-70867728950e"
TASKS = Task.__table__
EVENTS = TaskEvent.__table__
ENDS = {"succeeded", "failed", "timed_out", "cancelled"}

Place = Path | sa.URL


def named(target: Place) -> str:
    return target.render_as_string(hide_password=False) if isinstance(target, sa.URL) else str(target)


@contextmanager
def looking(target: Place) -> Iterator[sa.Connection]:
    """A connection of somebody else's, in one snapshot."""
    url = target if isinstance(target, sa.URL) else sa.URL.create("sqlite", database=str(target))
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.execution_options(isolation_level="REPEATABLE READ")
        yield connection


def chain(target: Place, task: str) -> list[tuple[Any, ...]]:
    columns = (EVENTS.c.number, EVENTS.c.kind, EVENTS.c.from_status, EVENTS.c.to_status, EVENTS.c.occurred_at)
    query = sa.select(*columns).join_from(EVENTS, TASKS).where(TASKS.c.id == task).order_by(EVENTS.c.number)
    with looking(target) as connection:
        return [tuple(row) for row in connection.execute(query)]


def at_once(jobs: list[Callable[[], Any]]) -> list[Any]:
    """What each job gives, or the error that it raises, all of them begun together."""
    barrier = threading.Barrier(len(jobs))

    def one(job: Callable[[], Any]) -> Any:
        barrier.wait()
        try:
            return job()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(one, jobs))


PROCESSES = """
import json, multiprocessing, random, sys, time
import sqlalchemy as sa
import tsg
from tsg import Ledger, StateConflict, TaskNotFound

{body}

def run(target, index, barrier, argument, pipe):
    pipe.send(go(target, index, barrier, argument))
    pipe.close()

target, count, argument = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
context = multiprocessing.get_context("fork")
barrier = context.Barrier(count)
pipes, children = [], []
for index in range(count):
    mine, theirs = context.Pipe(duplex=False)
    children.append(context.Process(target=run, args=(target, index, barrier, argument, theirs)))
    children[-1].start()
    theirs.close()
    pipes.append(mine)
found = [pipe.recv() for pipe in pipes]
for child in children:
    child.join()
assert [child.exitcode for child in children] == [0] * count
print(json.dumps(found))
"""


def processes(target: Place, count: int, body: str, argument: object = None) -> list[Any]:
    """What ``go(target, index, barrier, argument)`` gives in each of `count` processes; none may fail."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            PROCESSES.format(body=body),
            named(target),
            str(count),
            json.dumps(argument),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found: list[Any] = json.loads(done.stdout)
    return found


# -- many writers of one task ----------------------------------------------------------------------------


def verbs(ledger: Ledger, chance: random.Random) -> list[Callable[[], Any]]:
    """A sequence of verbs on one task, all but the first few in any order."""
    pool: list[Callable[[], Any]] = [
        lambda: ledger.start_task(ID),
        lambda: ledger.heartbeat(ID),
        lambda: ledger.heartbeat(ID),
        lambda: ledger.close_task(ID, chance.choice(sorted(ENDS))),
        lambda: ledger.set_delivery(ID, chance.choice(["delivered", "failed"])),
    ]
    rest = [chance.choice(pool) for _ in range(8)]
    return [pool[0], pool[1], *rest, pool[3], pool[4]]


def is_one_clean_chain(target: Place) -> None:
    with Ledger(target, migrate=False) as ledger:
        report, task = ledger.doctor(), ledger.get_task(ID)
    events = chain(target, ID)
    assert report["healthy"]
    assert [event[0] for event in events] == list(range(len(events)))
    assert len([event for event in events if event[3] in ENDS and event[1] == "task_transition"]) == 1
    assert len([event for event in events if event[1] == "delivery_transition"]) == 1
    assert (task.status in ENDS, task.delivery_status != "pending") == (True, True)
    assert [event[4] for event in events] == sorted(event[4] for event in events)


def test_b30_of_twenty_threads_with_mixed_verbs_one_clean_chain_is_left(target: Place) -> None:
    with Ledger(target) as ledger:
        ledger.create_task(task_id=ID)

    def work(seed: int) -> Counter[str]:
        chance, outcome = random.Random(seed), Counter[str]()
        with Ledger(target, busy_timeout_ms=60_000) as ledger:
            for verb in verbs(ledger, chance):
                try:
                    verb()
                    outcome["done"] += 1
                except StateConflict as error:
                    outcome["retriable" if error.retriable else "refused"] += 1
        return outcome

    outcomes = at_once([lambda seed=seed: work(seed) for seed in range(20)])
    assert [outcome for outcome in outcomes if not isinstance(outcome, Counter)] == []
    total = sum(outcomes, Counter[str]())
    assert total["refused"] > 0
    assert total["retriable"] == 0
    is_one_clean_chain(target)


MIXED = """
def go(target, index, barrier, task):
    chance = random.Random(index)
    done = {"beats": 0, "refused": 0, "retriable": 0}
    with Ledger(target, busy_timeout_ms=60_000) as ledger:
        barrier.wait()
        ledger_verbs = [("start", None), ("beat", None)]
        ledger_verbs += [chance.choice([("start", None), ("beat", None), ("beat", None)]) for _ in range(6)]
        ledger_verbs += [("close", chance.choice(["succeeded", "failed", "cancelled"])), ("beat", None)]
        ledger_verbs += [("deliver", chance.choice(["delivered", "failed"]))]
        for verb, end in ledger_verbs:
            try:
                if verb == "start":
                    ledger.start_task(task)
                elif verb == "beat":
                    ledger.heartbeat(task)
                    done["beats"] += 1
                elif verb == "close":
                    ledger.close_task(task, end)
                else:
                    ledger.set_delivery(task, end)
            except StateConflict as error:
                done["retriable" if error.retriable else "refused"] += 1
    return done
"""


def test_b30_of_twenty_processes_with_mixed_verbs_every_one_is_counted_once(target: Place) -> None:
    with Ledger(target) as ledger:
        ledger.create_task(task_id=ID)
        ledger.start_task(ID)
        outcomes = processes(target, 20, MIXED, ID)
        beats = sum(outcome["beats"] for outcome in outcomes)
        assert sum(outcome["retriable"] for outcome in outcomes) == 0
        # Started, every beat that was taken, closed, delivered.
        assert ledger.get_task(ID).version == 1 + beats + 1 + 1
    is_one_clean_chain(target)


def test_b30_of_sessions_that_end_one_task_at_once_one_writes_its_event(host_engine: sa.Engine) -> None:
    with Session(host_engine) as session:
        session.add(Task(id=ID))
        session.commit()

    def work(end: str) -> str:
        with Session(host_engine) as session:
            task = session.get_one(Task, ID)
            session.commit()
            task.close(end)
            session.commit()
            return end

    ends = sorted(ENDS) * 2
    outcomes = at_once([lambda end=end: work(end) for end in ends])
    won = [outcome for outcome in outcomes if isinstance(outcome, str)]
    for outcome in outcomes:
        assert isinstance(outcome, (str, StaleDataError, IntegrityError, StateConflict))
    assert len(set(won)) == 1
    with Session(host_engine) as session:
        task = session.get_one(Task, ID)
        assert (task.status, task.version, len(task.events)) == (won[0], 1, 2)
        assert tsg.doctor.examine(session)["healthy"]


STARTERS = """
def go(target, index, barrier, tasks):
    versions = []
    with Ledger(target, busy_timeout_ms=60_000) as ledger:
        for task in tasks:
            barrier.wait()
            versions.append(ledger.start_task(task).version)
    return versions
"""


def test_b34_of_eight_processes_that_start_one_task_exactly_one_does(target: Place) -> None:
    with Ledger(target) as ledger:
        tasks = [ledger.create_task(timeout_seconds=60).id for _ in range(25)]
        assert processes(target, 8, STARTERS, tasks) == [[1] * 25] * 8
        for task in tasks:
            assert ledger.get_task(task).version == 1
            assert [event[3] for event in chain(target, task)] == ["queued", "running"]
        assert ledger.doctor()["healthy"]


CLAIMERS = """
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

def go(target, index, barrier, tasks):
    won = 0
    engine = sa.create_engine(target)
    with Session(engine) as session:
        for task in tasks:
            barrier.wait()
            found = session.get(tsg.Task, task)
            session.commit()
            barrier.wait()
            try:
                if found.status == "queued":
                    found.start()
                    session.commit()
                    won += 1
            except (StaleDataError, sa.exc.IntegrityError):
                pass
            session.rollback()
    engine.dispose()
    return won
"""


def test_b34_of_eight_sessions_that_claim_one_task_exactly_one_does(host_engine: sa.Engine) -> None:
    url = host_engine.url
    with Session(host_engine) as session:
        made = [Task() for _ in range(15)]
        session.add_all(made)
        session.commit()
        tasks = [task.id for task in made]
        session.commit()
    assert sum(processes(url, 8, CLAIMERS, tasks)) == 15
    with Session(host_engine) as session:
        for task in session.scalars(sa.select(Task)):
            assert (task.status, task.version, len(task.events)) == ("running", 1, 2)
        assert tsg.doctor.examine(session)["healthy"]


CREATORS = """
def go(target, index, barrier, rounds):
    found = []
    with Ledger(target, busy_timeout_ms=60_000) as ledger:
        for task, distinct in rounds:
            barrier.wait()
            try:
                record = ledger.create_task(task_id=task, timeout_seconds=60 + index % 2 if distinct else 60)
                found.append([record.created_at, record.timeout_seconds])
            except StateConflict as error:
                found.append([None, error.retriable])
    return found
"""


def test_of_eight_processes_that_create_one_task_all_get_the_same_one(target: Place) -> None:
    rounds = [[f"{number:08d}-0000-4000-8000-000000000000", False] for number in range(15)]
    with Ledger(target) as ledger:
        found = processes(target, 8, CREATORS, rounds)
        for number, (task, _) in enumerate(rounds):
            stored = ledger.get_task(task)
            assert [answers[number] for answers in found] == [[stored.created_at, 60.0]] * 8
        report = ledger.doctor()
        assert (report["healthy"], report["task_count"], report["event_count"]) == (True, 15, 15)


def test_of_eight_processes_that_create_a_task_in_two_ways_those_of_one_way_get_it(target: Place) -> None:
    rounds = [[f"{number:08d}-0000-4000-8000-000000000000", True] for number in range(15)]
    with Ledger(target) as ledger:
        found = processes(target, 8, CREATORS, rounds)
        for number, (task, _) in enumerate(rounds):
            stored = ledger.get_task(task)
            for index, answers in enumerate(found):
                same = 60.0 + index % 2 == stored.timeout_seconds
                assert answers[number] == ([stored.created_at, stored.timeout_seconds] if same else [None, False])
        assert ledger.doctor()["task_count"] == 15


LOOKED_FIRST = """
def go(target, index, barrier, count):
    with Ledger(target, busy_timeout_ms=60_000) as ledger:
        barrier.wait()
        for number in range(count):
            task = ledger.create_task(timeout_seconds=60).id
            assert ledger.get_task(task).status == "queued"
            ledger.start_task(task)
            assert ledger.get_task(task).status == "running"
            ledger.heartbeat(task)
            ledger.close_task(task, "succeeded", code="completed")
    return count
"""


def test_b19_eight_processes_that_read_then_write_lose_nothing(target: Place) -> None:
    with Ledger(target) as ledger:
        assert processes(target, 8, LOOKED_FIRST, 30) == [30] * 8
        report = ledger.doctor()
        assert (report["healthy"], report["task_count"], report["event_count"]) == (True, 240, 720)
        assert report["task_status_counts"]["succeeded"] == 240


HOSTED = """
def go(target, index, barrier, how):
    engine = sa.create_engine(target, connect_args={"timeout": 60} if target.startswith("sqlite") else {})
    if how == "recipe":
        @sa.event.listens_for(engine, "connect")
        def connected(driver, record):
            driver.isolation_level = None
        @sa.event.listens_for(engine, "begin")
        def begin(connection):
            connection.exec_driver_sql("BEGIN")
    elif how:
        engine = engine.execution_options(isolation_level=how)
    with Ledger(engine) as ledger:
        barrier.wait()
        for _ in range(10):
            task = ledger.create_task(timeout_seconds=60).id
            ledger.start_task(task)
            ledger.heartbeat(task)
            ledger.close_task(task, "succeeded")
    engine.dispose()
"""


@pytest.mark.parametrize("how", ["", "AUTOCOMMIT", "SERIALIZABLE", "recipe"])
def test_b19_processes_on_engines_of_a_hosts_read_then_write_and_lose_nothing(host_engine: sa.Engine, how: str) -> None:
    if how == "recipe" and host_engine.dialect.name != "sqlite":
        pytest.skip("a way to begin on SQLite")
    if host_engine.dialect.name == "sqlite":
        with host_engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    processes(host_engine.url, 4, HOSTED, how)
    with Ledger(host_engine) as ledger:
        report = ledger.doctor()
        assert (report["healthy"], report["task_count"], report["event_count"]) == (True, 40, 120)


# -- reconcile beside others -----------------------------------------------------------------------------


@contextmanager
def worker(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has said one line, killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    with process, process.stdout, process.stdin:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
            process.wait()


BEATING = """
import sys, time
import tsg
with tsg.Ledger(sys.argv[1], busy_timeout_ms=60_000) as ledger:
    ledger.heartbeat(sys.argv[2])
    print("ready", flush=True)
    while True:
        ledger.heartbeat(sys.argv[2])
        time.sleep(0.02)
"""


def test_b10_a_process_that_beats_is_left_alone_by_another_and_b03_vouches_for_its_own_task_only(
    target: Place,
) -> None:
    graces: dict[str, float] = {"active_grace_seconds": 5, "delivery_grace_seconds": 600}
    with Ledger(target) as ledger:
        live, dead = (ledger.create_task().id for _ in range(2))
        ledger.start_task(live)
        with worker(BEATING, named(target), live):
            for _ in range(5):
                for dry_run in (True, False):
                    report = ledger.reconcile(**graces, dry_run=dry_run)
                    assert (report["tasks_timed_out"], report["fresh_active_retained"]) == (0, 2)
                time.sleep(0.05)
            ledger.start_task(dead)
            # The other's silence, not the worker's, is what counts.
            assert ledger.reconcile(active_grace_seconds=5, delivery_grace_seconds=0)["tasks_timed_out"] == 0
            time.sleep(1.5)
            report = ledger.reconcile(active_grace_seconds=1.2, delivery_grace_seconds=600)
            assert (report["tasks_timed_out"], report["fresh_active_retained"]) == (1, 1)
        assert (ledger.get_task(dead).status, ledger.get_task(live).status) == ("timed_out", "running")
        assert ledger.get_task(dead).terminal_code == "restart_stale"
        assert ledger.doctor()["healthy"]


SENDING = """
import sys, time
import tsg
with tsg.Ledger(sys.argv[1]) as ledger:
    ledger.start_task(sys.argv[2])
    ledger.close_task(sys.argv[2], "succeeded", code="completed")
    print("ready", flush=True)
    time.sleep(600)
"""


def test_b29_a_delivery_that_nobody_marked_stays_open_and_closes_once(target: Place) -> None:
    with Ledger(target) as ledger:
        task = ledger.create_task().id
        with worker(SENDING, named(target), task):
            pass
        assert (ledger.get_task(task).status, ledger.get_task(task).delivery_status) == ("succeeded", "pending")
        answers = at_once([lambda: ledger.set_delivery(task, "delivered")] * 8)
        assert {answer.version for answer in answers} == {3}
        assert len(chain(target, task)) == 4
        with pytest.raises(StateConflict):
            ledger.set_delivery(task, "failed")
        assert ledger.doctor()["healthy"]


def test_two_reconciles_at_once_change_each_row_once(target: Place, clock: FakeClock) -> None:
    with Ledger(target, clock=clock) as ledger:
        for number in range(150):
            task = ledger.create_task(delivery_required=bool(number % 2)).id
            ledger.start_task(task)
            if number % 3 == 0:
                ledger.close_task(task, "succeeded")
    clock.advance(10_000)

    def run() -> Any:
        with Ledger(target, clock=clock, busy_timeout_ms=60_000) as ledger:
            return ledger.reconcile(active_grace_seconds=60, delivery_grace_seconds=0)

    reports = at_once([run] * 4)
    assert [report for report in reports if isinstance(report, Exception)] == []
    assert sum(report["tasks_timed_out"] for report in reports) == 100
    assert sum(report["deliveries_failed"] + report["deliveries_not_applicable"] for report in reports) == 150
    with Ledger(target, clock=clock) as ledger:
        report = ledger.doctor()
        assert (report["healthy"], report["event_count"]) == (True, 150 + 150 + 150 + 150)


STORM = """
def go(target, index, barrier, seconds):
    chance = random.Random(index)
    made, retriable = [], 0
    with Ledger(target, busy_timeout_ms=60_000) as ledger:
        barrier.wait()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            # Some are left to themselves, so that there is something to reconcile.
            task = chance.choice(made[-6:]) if made and chance.random() < 0.8 else None
            try:
                if task is None:
                    made.append(ledger.create_task(
                        timeout_seconds=chance.choice([None, 0.02, 60]), delivery_required=chance.random() < 0.5,
                        parent_id=made[-1] if made and chance.random() < 0.2 else None,
                    ).id)
                    ledger.start_task(made[-1])
                elif chance.random() < 0.7:
                    ledger.heartbeat(task)
                elif chance.random() < 0.6:
                    ledger.close_task(task, chance.choice(["succeeded", "failed", "cancelled"]))
                else:
                    ledger.set_delivery(task, chance.choice(["delivered", "failed", "not_applicable"]))
            except StateConflict as error:
                retriable += error.retriable
    return [len(made), retriable]
"""


def test_reconcile_among_eight_writers_neither_misses_nor_doubles_and_nobody_sees_a_false_fault(target: Place) -> None:
    graces: dict[str, float] = {"active_grace_seconds": 0.1, "delivery_grace_seconds": 0.1}
    totals: Counter[str] = Counter()
    changed = ("tasks_timed_out", "deliveries_failed", "deliveries_not_applicable")
    busy = 0

    def applied(ledger: Ledger) -> dict[str, Any] | None:
        try:
            return dict(ledger.reconcile(**graces))
        except StateConflict as error:
            if error.retriable:
                return None
            raise

    with (
        Ledger(target, busy_timeout_ms=60_000) as ledger,
        ThreadPoolExecutor(1) as pool,
    ):
        storm = pool.submit(processes, target, 8, STORM, 3.0)
        rounds = 0
        while not storm.done():
            rounds += 1
            ledger.reconcile(**graces, dry_run=True)
            report = applied(ledger)
            if report is None:
                busy += 1
            else:
                totals.update({name: report[name] for name in changed})
            assert ledger.doctor()["healthy"]
            time.sleep(0.01)
        made = storm.result()
        assert [retriable for _, retriable in made] == [0] * 8
        # With the writers gone, one run leaves nothing undone.
        time.sleep(0.15)
        report = ledger.reconcile(**graces)
        totals.update({name: report[name] for name in changed})  # type: ignore[literal-required]
        assert ledger.reconcile(**graces)["tasks_timed_out"] == 0
        report = ledger.doctor()
        assert (report["healthy"], report["task_count"]) == (True, sum(count for count, _ in made))
        assert report["task_status_counts"]["timed_out"] == totals["tasks_timed_out"]
    with looking(target) as connection:
        written = {
            name: connection.scalar(sa.select(sa.func.count()).select_from(EVENTS).where(condition))
            for name, condition in (
                ("tasks_timed_out", EVENTS.c.code.in_(["deadline_exceeded", "restart_stale"])),
                ("deliveries_failed", EVENTS.c.code == "delivery_grace_expired"),
                ("deliveries_not_applicable", EVENTS.c.code == "internal_task"),
            )
        }
    assert written == {name: totals[name] for name in changed}
    assert totals["tasks_timed_out"] > 0
    assert busy < rounds


# -- waiting for locks -----------------------------------------------------------------------------------


@contextmanager
def held(target: Place, task: str) -> Iterator[None]:
    """Somebody else's transaction that has written the task, and ends in nothing."""
    if isinstance(target, Path):
        other = raw(target)
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")
        other.close()
        return
    with looking(target) as connection:
        connection.execute(sa.update(TASKS).where(TASKS.c.id == task).values(version=TASKS.c.version))
        yield
        connection.rollback()


def test_a_writer_kept_waiting_for_too_long_is_told_that_it_may_try_again(target: Place, clock: FakeClock) -> None:
    with Ledger(target, clock=clock, busy_timeout_ms=60) as ledger:
        task = ledger.create_task(timeout_seconds=1).id
        ledger.start_task(task)
        clock.advance(1_000)
        with held(target, task):
            for call in (
                lambda: ledger.heartbeat(task),
                lambda: ledger.close_task(task, "failed"),
                lambda: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0),
            ):
                with pytest.raises(StateConflict) as refused:
                    call()
                assert refused.value.retriable
            # Reading waits for nobody.
            assert ledger.get_task(task).version == 1
            assert ledger.doctor()["healthy"]
            preview = ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0, dry_run=True)
            assert preview["tasks_timed_out"] == 1
        assert ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0)["tasks_timed_out"] == 1
        assert ledger.doctor()["healthy"]


def test_a_hosts_own_lock_timeout_is_told_in_the_same_words(postgresql_url: sa.URL) -> None:
    engine = sa.create_engine(postgresql_url, connect_args={"options": "-c lock_timeout=50"})
    with Ledger(engine) as ledger:
        task = ledger.create_task().id
        with held(postgresql_url, task):
            with pytest.raises(StateConflict) as refused:
                ledger.start_task(task)
            assert refused.value.retriable
        assert ledger.start_task(task).version == 1
    engine.dispose()


def test_a_writer_that_waits_in_time_reads_its_clock_only_then(target: Place) -> None:
    with Ledger(target, busy_timeout_ms=30_000) as ledger, ThreadPoolExecutor(1) as pool:
        task = ledger.create_task().id
        ledger.start_task(task)
        with held(target, task):
            waiting = pool.submit(ledger.heartbeat, task)
            time.sleep(0.4)
            released = ledger.create_task().created_at if isinstance(target, sa.URL) else time.time()
        assert waiting.result().updated_at >= released


# -- clocks ----------------------------------------------------------------------------------------------


def test_on_a_server_its_clock_is_the_default(postgresql_url: sa.URL) -> None:
    engine = sa.create_engine(postgresql_url)
    reading = sa.text("SELECT extract(epoch FROM clock_timestamp())::float8")
    with engine.connect() as connection, Ledger(postgresql_url) as ours, Ledger(engine) as hosts:
        for ledger in (ours, hosts):
            before = connection.scalar(reading)
            task = ledger.create_task()
            task = ledger.start_task(task.id)
            after = connection.scalar(reading)
            assert before <= task.created_at <= task.updated_at <= after
    engine.dispose()


def test_the_servers_clock_is_asked_and_not_the_hosts(postgresql_url: sa.URL, clock: FakeClock) -> None:
    engine = sa.create_engine(postgresql_url)
    with engine.begin() as connection:
        # A clock of 2001, found before the server's own.
        connection.exec_driver_sql(
            "CREATE SCHEMA past; CREATE FUNCTION past.clock_timestamp() RETURNS timestamptz LANGUAGE sql "
            "AS $$ SELECT to_timestamp(1000000000.25) $$"
        )
        name = connection.scalar(sa.select(sa.func.current_database()))
        connection.exec_driver_sql(f"ALTER DATABASE {name} SET search_path = past, pg_catalog, public")
    engine.dispose()
    with Ledger(postgresql_url) as ours, Ledger(engine) as hosts, Ledger(engine, clock=clock) as told:
        for ledger, now in ((ours, 1_000_000_000.25), (hosts, 1_000_000_000.25), (told, 1_000.0)):
            task = ledger.create_task(timeout_seconds=0)
            ledger.start_task(task.id)
            assert ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0)["tasks_timed_out"] == 1
            found = ledger.get_task(task.id)
            assert {found.created_at, found.started_at, found.ended_at, found.delivery_updated_at} == {now}
        assert told.doctor()["healthy"]
    engine.dispose()
