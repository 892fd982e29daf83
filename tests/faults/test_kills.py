"""Processes that die by SIGKILL at any moment: what was acknowledged is there, and nobody has to clean up."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa

from tests.conftest import FakeClock, emptied
from tests.damage import implied_chain
from tests.faults.writers import (
    GRACE,
    LONG_AGO,
    ORDERS,
    OWN_PARENT,
    SHARED_PARENT,
    Books,
    Place,
    Stored,
    Told,
    Zygote,
    named,
    plain_engine,
    standing,
)
from tests.tallies import Tally
from tests.test_storage import posix
from tsg import Ledger, TaskNotFound

pytestmark = posix

KILLED = -9


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest) -> Place:
    return emptied(request, request.param)


@pytest.fixture
def looking(target: Place) -> Iterator[sa.Engine]:
    engine = plain_engine(target)
    yield engine
    engine.dispose()


# -- writers of every kind, killed at random ---------------------------------------------------------------


class Member(NamedTuple):
    """A process of the crew, and what is known of it."""

    role: str
    process: int
    log: Path
    application: str


class Crew:
    """Eight processes that write to one ledger; each that is killed is followed by another of its kind."""

    ROLES = ("ledger", "ledger", "ledger", "ledger", "host", "host", "reconcile", "prune")

    def __init__(self, zygote: Zygote, target: Place, folder: Path) -> None:
        self._zygote, self._target, self._folder = zygote, target, folder
        self._started = 0
        self.members = [self.hire(role) for role in self.ROLES]

    def hire(self, role: str) -> Member:
        self._started += 1
        log, application = self._folder / f"{self._started}.log", f"tsg-writer-{self._started}"
        arguments = {"target": named(self._target, application), "log": str(log), "seed": self._started}
        if role in ("reconcile", "prune"):
            process = self._zygote.start("sweeper", **arguments, prune=role == "prune")
        else:
            process = self._zygote.start("writer", **arguments, host=role == "host")
        return Member(role, process, log, application)

    def kill(self, place: int) -> tuple[Member, Told]:
        """Kill one; another takes its place at once."""
        killed = self.members[place]
        assert self._zygote.kill(killed.process) == KILLED
        self.members[place] = self.hire(killed.role)
        return killed, Told(killed.log)

    def await_sweep(self, place: int) -> None:
        """Wait a moment until a process is in the midst of a reconcile or prune, if that is what it does."""
        log = self.members[place].log
        give_up = time.monotonic() + 0.1
        while self.members[place].role in ("reconcile", "prune") and time.monotonic() < give_up:
            last = log.read_bytes().splitlines()[-1:] if log.exists() else []
            if last and last[0].startswith(b'["try"'):
                return
            time.sleep(0.001)

    def dismiss(self) -> list[tuple[Member, Told]]:
        for member in self.members:
            assert self._zygote.kill(member.process) == KILLED
        return [(member, Told(member.log)) for member in self.members]


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 10) -> None:
    give_up = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up, what
        time.sleep(0.002)


def look_up(ledger: Ledger, task: str) -> dict[str, Any] | None:
    try:
        return vars(ledger.get_task(task))
    except TaskNotFound:
        return None


def test_a_killed_writer_takes_back_nothing_that_it_had_acknowledged_and_leaves_nothing_to_unlock(
    zygote: Zygote, target: Place, looking: sa.Engine, tmp_path: Path, rounds: int, tally: Tally
) -> None:
    books, killed_in = Books(), Counter[str]()
    chance = random.Random(1)
    with looking.begin() as connection:
        connection.exec_driver_sql("DROP TABLE IF EXISTS orders")
        connection.exec_driver_sql(ORDERS)

    def is_settled(member: Member) -> bool:
        # A server goes on with what a killed client had sent.
        if looking.dialect.name == "sqlite":
            return True
        with looking.connect() as connection:
            sessions = sa.text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name")
            return connection.scalar(sessions, {"name": member.application}) == 0

    def look(ledger: Ledger) -> None:
        stored = Stored.of(target)
        assert books.lost(stored) == []
        assert ledger.doctor()["healthy"]
        ledger.reconcile(active_grace_seconds=GRACE, delivery_grace_seconds=GRACE)
        assert ledger.doctor()["healthy"]

    def orders_apart() -> int:
        """How many rows of the application's tell of another state than the ledger's row beside them."""
        identifier = "CAST(t.id AS TEXT)"
        with looking.connect() as connection:
            return connection.exec_driver_sql(
                f"SELECT count(*) FROM orders o LEFT JOIN tsg_tasks t ON {identifier} = o.task_id "
                "WHERE t.id IS NULL OR o.state <> t.status || '/' || t.delivery_status"
            ).scalar_one()

    with Ledger(target, busy_timeout_ms=10_000) as ledger:
        ledger.create_task(task_id=SHARED_PARENT)
        ledger.create_task(task_id=OWN_PARENT)
        ledger.start_task(OWN_PARENT)
        crew = Crew(zygote, target, tmp_path)
        for number in range(1, rounds + 1):
            time.sleep(chance.random() * 0.02)
            place = chance.randrange(len(crew.ROLES))
            crew.await_sweep(place)
            member, told = crew.kill(place)
            # A lock that was left behind would outlast the ten seconds that this waits for one.
            ledger.heartbeat(OWN_PARENT)
            wait_until(lambda: is_settled(member), "a session was left behind")
            books.enter(told)
            assert told.broken == 0
            killed_in[told.in_flight[0] if told.in_flight else "rest"] += 1
            if member.role == "ledger" and told.own:
                # What it was at is free: nobody has to unlock it.
                last = list(told.own)[-1]
                found = look_up(ledger, last)
                assert standing(found) in books.own[last]
                if found is not None and found["status"] in ("queued", "running"):
                    books.take_over(vars(ledger.close_task(last, "cancelled")))
            if number % 50 == 0:
                look(ledger)
        for member, told in crew.dismiss():
            wait_until(lambda member=member: is_settled(member), "a session was left behind")
            books.enter(told)
        look(ledger)
        stored = Stored.of(target)
        assert books.lost(stored) == []
        assert books.unexplained(stored) == []
        assert orders_apart() == 0
    assert books.transitions > rounds
    if rounds >= 100:
        assert {"create", "start", "beat", "close", "deliver", "reconcile", "prune"} <= set(killed_in), killed_in
    tally(f"SIGKILL of a writer, {looking.dialect.name}", rounds, 0)


# -- a sweep killed in its midst -----------------------------------------------------------------------------

SIZE = 3


def made(ledger: Ledger, clock: FakeClock, kind: str, count: int) -> list[str]:
    """Tasks that a sweep is to change, in the order in which it does."""
    tasks = []
    for _ in range(count):
        clock.advance(0.01)
        tasks.append(ledger.create_task(delivery_required=False).id)
        if kind == "reconcile":
            ledger.start_task(tasks[-1])
        else:
            ledger.close_task(tasks[-1], "cancelled")
            ledger.set_delivery(tasks[-1], "not_applicable")
    return tasks if kind == "reconcile" else tasks[::-1]


def done_of(tasks: list[str], stored: Stored) -> list[bool]:
    """Of each task whether a sweep has timed it out or let it go; every chain is held against its row."""
    assert all(stored.chains[task] == implied_chain(row) for task, row in stored.tasks.items())
    return [task not in stored.tasks or stored.tasks[task]["status"] == "timed_out" for task in tasks]


def swept(ledger: Ledger, kind: str) -> int:
    if kind == "prune":
        return ledger.prune(GRACE)["tasks_pruned"]
    return ledger.reconcile(active_grace_seconds=GRACE, delivery_grace_seconds=GRACE)["tasks_timed_out"]


def test_b05_a_reconcile_killed_in_the_midst_of_its_transaction_has_not_been_and_runs_again_at_once(
    zygote: Zygote, target: Place, tmp_path: Path, tally: Tally
) -> None:
    clock = FakeClock(time.time() - LONG_AGO)
    with Ledger(target) as ledger, Ledger(target, clock=clock) as past:
        for number in range(4):
            stale = made(past, clock, "reconcile", 8)
            log = tmp_path / f"{number}.log"
            # The rows are timed out then, with their events, and nothing is committed.
            process = zygote.start("halting_reconcile", target=named(target), log=str(log), batch_size=None, at=1)
            wait_until(lambda log=log: log.exists() and b"step" in log.read_bytes(), "no reconcile began")
            assert done_of(stale, Stored.of(target)) == [False] * 8
            assert zygote.kill(process) == KILLED
            assert swept(ledger, "reconcile") == 8
            assert done_of(stale, Stored.of(target)) == [True] * 8
            assert ledger.doctor()["healthy"]
    tally("SIGKILL in the midst of a reconcile's transaction", 4, 0)


@pytest.mark.parametrize("batch", range(1, 4))
def test_b04_a_sweep_killed_between_batches_leaves_what_it_had_done(
    zygote: Zygote, target: Place, tmp_path: Path, batch: int
) -> None:
    clock = FakeClock(time.time() - LONG_AGO)
    with Ledger(target) as ledger, Ledger(target, clock=clock) as past:
        stale = made(past, clock, "reconcile", 4 * SIZE)
        log = tmp_path / "log"
        process = zygote.start("halting_reconcile", target=named(target), log=str(log), batch_size=SIZE, at=batch)
        wait_until(lambda: log.exists() and log.read_bytes().count(b"step") == batch, "no batch was done")
        assert zygote.kill(process) == KILLED
        done = [place < batch * SIZE for place in range(len(stale))]
        assert done_of(stale, Stored.of(target)) == done
        assert swept(ledger, "reconcile") == done.count(False)
        assert all(done_of(stale, Stored.of(target)))
        assert ledger.doctor()["healthy"]


@pytest.mark.parametrize(
    ("kind", "size"), [("reconcile", None), ("reconcile", SIZE), ("prune", SIZE)], ids=["reconcile", "batches", "prune"]
)
def test_b04_a_sweep_killed_at_any_moment_leaves_whole_batches_and_the_next_ends_the_rest(
    zygote: Zygote, target: Place, tmp_path: Path, rounds: int, tally: Tally, kind: str, size: int | None
) -> None:
    count, chance = 5 * SIZE, random.Random(2)
    tries = max(4, rounds // 50)
    clock = FakeClock(time.time() - LONG_AGO)
    midst = 0
    with Ledger(target) as ledger, Ledger(target, clock=clock) as past:
        for number in range(tries):
            tasks = made(past, clock, kind, count)
            log = tmp_path / f"{number}.log"
            process = zygote.start("one_run", target=named(target), log=str(log), verb=kind, batch_size=size)
            wait_until(lambda log=log: log.exists() and b"try" in log.read_bytes(), "no run began")
            steps = chance.randrange(4) if size else 0
            with contextlib.suppress(AssertionError):
                wait_until(lambda log=log: log.read_bytes().count(b"step") >= steps, "it is over", 1)
            time.sleep(chance.random() * 0.02)
            zygote.kill(process)
            told = log.read_bytes()
            midst += b"did" not in told
            done = done_of(tasks, Stored.of(target))
            whole = sum(done)
            assert done == [place < whole for place in range(count)]
            assert whole in ((0, count) if size is None else range(0, count + 1, size))
            assert whole >= (size or 0) * told.count(b"step")
            assert swept(ledger, kind) == count - whole
            assert all(done_of(tasks, Stored.of(target)))
            assert ledger.doctor()["healthy"]
    assert midst > tries / 4
    tally(f"SIGKILL in the midst of {'a' if size is None else 'a batched'} {kind}", midst, 0)
