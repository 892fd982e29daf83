"""Many heartbeats in one transaction: the same as one by one, all of them or none; and the same for asyncio.

The other methods that an :class:`tsg.AsyncLedger` shares with it, runs in batches, are here too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests.conftest import FakeClock, emptied
from tests.test_batches import Place, contents, damage, engine_of, fill, without
from tests.test_both_databases import looking
from tests.test_concurrency import processes
from tsg import AsyncLedger, InvalidInput, Ledger, StateConflict, TaskRecord

UNKNOWN = "ffffffff-ffff-4fff-bfff-ffffffffffff"
DIGEST = "0123456789abcdef" * 4


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest) -> Place:
    """An empty ledger on either database; other than conftest's, with none made for each test."""
    return emptied(request, request.param)


@pytest.fixture
def both(target: Place, clock: FakeClock) -> Iterator[Ledger]:
    with Ledger(target, clock=clock) as ledger:
        yield ledger


@pytest.fixture
def on_postgresql(request: pytest.FixtureRequest) -> sa.URL:
    url = emptied(request, "postgresql")
    assert isinstance(url, sa.URL)
    return url


def running(ledger: Ledger, clock: FakeClock, at: float = 1000.0, **fields: Any) -> str:
    clock.now = at
    task = ledger.create_task(**fields).id
    ledger.start_task(task)
    return task


# -- the same as one by one --------------------------------------------------------------------------------


def a_pair(ledger: Ledger, clock: FakeClock, chance: random.Random, parent: str) -> tuple[str, str]:
    """Two tasks of the same kind, with the same history at the same times."""
    timeout = chance.choice([None, 0, 5, 3600])
    fields: dict[str, Any] = {
        "timeout_seconds": timeout,
        "delivery_required": chance.random() < 0.5,
        "expects_heartbeat": timeout is None or chance.random() < 0.5,
        "payload_hash": chance.choice([None, DIGEST]),
        "parent_id": chance.choice([None, parent]),
    }
    verbs = chance.choice(["", "s", "s", "s", "sb", "sbb", "sc", "c", "scd", "sbc"])
    began = clock.now
    pair = []
    for _ in range(2):
        clock.now = began
        pair.append(ledger.create_task(**fields).id)
        for verb in verbs:
            clock.advance(0.5)
            if verb == "s":
                ledger.start_task(pair[-1])
            elif verb == "b":
                ledger.heartbeat(pair[-1])
            elif verb == "c":
                ledger.close_task(pair[-1], "failed")
            else:
                ledger.set_delivery(pair[-1], "failed" if fields["delivery_required"] else "not_applicable")
    return pair[0], pair[1]


@pytest.mark.parametrize("seed", range(3))
def test_many_at_once_are_the_same_as_one_by_one(both: Ledger, target: Place, clock: FakeClock, seed: int) -> None:
    chance = random.Random(seed)
    parent = both.create_task().id
    pairs = [a_pair(both, clock, chance, parent) for _ in range(25)]
    chance.shuffle(pairs)
    for _ in range(2):
        clock.advance(7.25)
        found = both.heartbeat_many([mine for mine, _ in pairs])
        refused = []
        for mine, theirs in pairs:
            try:
                both.heartbeat(theirs)
            except StateConflict:
                refused.append(mine)
        assert found == refused
        assert 0 < len(refused) < len(pairs)
        for pair in pairs:
            one, other = map(both.get_task, pair)
            assert dataclasses.replace(one, id="") == dataclasses.replace(other, id="")
            assert (one.updated_at == clock.now and one.expects_heartbeat) or one.id in refused
    rows, events = contents(target)
    assert len(rows) == 51
    assert both.doctor()["healthy"]
    assert len(events) == both.doctor()["event_count"]


def test_those_that_are_not_running_come_back_once_each_canonical_and_in_order(both: Ledger, clock: FakeClock) -> None:
    clock.now = 1000.0
    queued = both.create_task(task_id="aaaaaaaa-0000-4000-8000-000000000001").id
    beating = running(both, clock, task_id="bbbbbbbb-0000-4000-8000-000000000002")
    ended = running(both, clock)
    both.close_task(ended, "succeeded")
    clock.now = 1010.0
    given = [
        UNKNOWN.upper(),
        uuid.UUID(ended),
        beating,
        f"{{{queued.upper()}}}",
        queued,
        f"urn:uuid:{beating}",
        UNKNOWN,
    ]
    assert both.heartbeat_many(given) == [UNKNOWN, ended, queued]
    task = both.get_task(beating)
    assert (task.updated_at, task.version) == (1010.0, 2)
    assert both.heartbeat_many([beating.replace("-", ""), uuid.UUID(beating)]) == []
    assert both.get_task(beating).version == 3


def test_whatever_can_be_gone_through_is_welcome(both: Ledger, clock: FakeClock) -> None:
    made = [running(both, clock) for _ in range(3)]
    for number, given in enumerate(
        [
            list(made),
            tuple(made),
            iter(made),
            (task for task in made),
            dict.fromkeys(made),
            map(uuid.UUID, made),
            frozenset(made),
        ],
        1,
    ):
        clock.now = 1000.0 + number
        assert both.heartbeat_many(given) == []
        assert {both.get_task(task).updated_at for task in made} == {clock.now}
        assert {both.get_task(task).version for task in made} == {1 + number}


def test_of_nothing_nothing_comes_and_no_clock_is_read(both: Ledger, target: Place, clock: FakeClock) -> None:
    queued = both.create_task().id
    before, readings = contents(target), clock.readings
    clock.now = math.nan
    assert both.heartbeat_many([]) == []
    assert both.heartbeat_many(iter(())) == []
    assert both.heartbeat_many([queued, UNKNOWN]) == [queued, UNKNOWN]
    assert clock.readings == readings
    assert contents(target) == before


def test_the_clock_is_read_once(both: Ledger, clock: FakeClock) -> None:
    made = [running(both, clock) for _ in range(4)]
    readings = clock.readings
    assert both.heartbeat_many(made) == []
    assert clock.readings == readings + 1


def test_a_first_beat_turns_the_expectation_on(both: Ledger, clock: FakeClock) -> None:
    silent = running(both, clock, timeout_seconds=600, expects_heartbeat=False)
    clock.now = 1001.0
    assert both.heartbeat_many([silent]) == []
    assert both.get_task(silent).expects_heartbeat
    clock.now = 1100.0
    assert both.reconcile(active_grace_seconds=50, delivery_grace_seconds=50)["tasks_timed_out"] == 1


# -- all of them or none -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", ["x", "", None, 5, b"0" * 32, True, "0" * 33, "\udcff" * 36, [UNKNOWN], float("nan")], ids=repr
)
def test_one_malformed_id_is_refused_and_none_has_its_beat(
    both: Ledger, target: Place, clock: FakeClock, wrong: object
) -> None:
    task = running(both, clock)
    clock.now = 1010.0
    before, readings = contents(target), clock.readings
    for given in ([task, wrong], [wrong, task], iter([task, wrong])):
        with pytest.raises(InvalidInput):
            both.heartbeat_many(given)
    assert contents(target) == before
    assert clock.readings == readings


@pytest.mark.parametrize("given", [UNKNOWN, b"x", bytearray(b"x"), "", None, 5, True, 1.5], ids=repr)
def test_what_is_no_list_is_refused(both: Ledger, given: Any) -> None:
    with pytest.raises(InvalidInput):
        both.heartbeat_many(given)


def test_a_clock_behind_one_of_them_refuses_all(both: Ledger, target: Place, clock: FakeClock) -> None:
    made = [running(both, clock, 1000.0), running(both, clock, 1500.0), running(both, clock, 1000.0)]
    before = contents(target)
    for now in (1499.999, 1000.0, 0.0):
        clock.now = now
        with pytest.raises(StateConflict):
            both.heartbeat_many(made)
        assert contents(target) == before
    clock.now = 1500.0
    assert both.heartbeat_many(made) == []
    assert {both.get_task(task).updated_at for task in made} == {1500.0}


def test_a_clock_behind_one_that_is_not_running_matters_to_nobody(both: Ledger, clock: FakeClock) -> None:
    ended = running(both, clock, 2000.0)
    both.close_task(ended, "failed")
    task = running(both, clock, 1000.0)
    clock.now = 1500.0
    assert both.heartbeat_many([ended, task]) == [ended]
    assert both.get_task(task).updated_at == 1500.0


@pytest.mark.parametrize("now", [math.nan, math.inf, None, True, "soon"], ids=repr)
def test_a_clock_that_gives_no_time_is_refused(both: Ledger, target: Place, clock: FakeClock, now: object) -> None:
    task = running(both, clock)
    before = contents(target)
    clock.now = now
    with pytest.raises(InvalidInput):
        both.heartbeat_many([task])
    assert contents(target) == before


@pytest.mark.parametrize(
    "harm",
    ["version = 0", "terminal_code = 'completed'", "payload_hash = 'x'", "ended_at = 1000", "created_at = 9e9"],
)
def test_a_damaged_one_that_is_running_refuses_all(both: Ledger, target: Place, clock: FakeClock, harm: str) -> None:
    made = [running(both, clock) for _ in range(3)]
    damage(target, made[1], harm)
    clock.now = 1010.0
    before = contents(target)
    with pytest.raises(StateConflict) as caught:
        both.heartbeat_many(made)
    assert not caught.value.retriable
    assert contents(target) == before
    assert both.heartbeat_many([made[0], made[2]]) == []


def test_a_damaged_one_that_has_ended_is_only_not_running(both: Ledger, target: Place, clock: FakeClock) -> None:
    ended, task = running(both, clock), running(both, clock)
    both.close_task(ended, "failed")
    damage(target, ended, "terminal_code = 'completed'")
    clock.now = 1010.0
    assert both.heartbeat_many([ended, task]) == [ended]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("version", 2**63 - 1),
        ("version", "many"),
        ("updated_at", "soon"),
        ("updated_at", None),
        ("updated_at", b"\xff"),
    ],
)
def test_a_stored_value_of_another_type_is_refused(
    ledger: Ledger, path: Path, clock: FakeClock, column: str, value: object
) -> None:
    made = [running(ledger, clock) for _ in range(2)]
    with engine_of(path) as engine, engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
        try:
            connection.exec_driver_sql(f"UPDATE tsg_tasks SET {column} = ? WHERE id = ?", (value, made[1]))
        except sa.exc.IntegrityError:
            assert value is None
            return
    clock.now = 1010.0
    before = ledger.get_task(made[0])
    with pytest.raises(StateConflict):
        ledger.heartbeat_many(made)
    assert ledger.get_task(made[0]) == before
    assert ledger.heartbeat_many(made[:1]) == []


def test_a_ledger_that_is_only_read_has_no_beats(both: Ledger, target: Place, clock: FakeClock) -> None:
    task = running(both, clock)
    both.close()
    before = contents(target)
    with Ledger(target, clock=clock, read_only=True) as reader:
        for given in ([task], [], [UNKNOWN]):
            with pytest.raises(StateConflict):
                reader.heartbeat_many(given)
    assert contents(target) == before
    with pytest.raises(StateConflict):
        both.heartbeat_many([task])


# -- many --------------------------------------------------------------------------------------------------


def test_five_thousand_beat_in_one_call(both: Ledger, target: Place, clock: FakeClock) -> None:
    with engine_of(target) as engine:
        fill(engine, 5000)
    clock.now = 3000.0
    given = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(1, 5101)]
    random.Random(3).shuffle(given)
    assert both.heartbeat_many(given) == [task for task in given if int(task[:8], 16) > 5000]
    with engine_of(target) as engine, engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT DISTINCT updated_at, version FROM tsg_tasks").all()
    assert [tuple(row) for row in found] == [(3000.0, 2)]
    assert both.doctor()["healthy"]


OVERLAPPING = """
def go(target, index, barrier, argument):
    ledger = Ledger(target, busy_timeout_ms=30_000)
    chance = random.Random(index)
    barrier.wait()
    for _ in range(25):
        chance.shuffle(argument)
        assert ledger.heartbeat_many(argument[:150]) == []
        if index == 0:
            ledger.reconcile(active_grace_seconds=3600, delivery_grace_seconds=0)
    return len(argument)
"""


def test_processes_with_sets_that_overlap_never_wait_for_each_other_for_ever(both: Ledger, target: Place) -> None:
    with Ledger(target) as ledger:
        made = []
        for _ in range(200):
            made.append(ledger.create_task().id)
            ledger.start_task(made[-1])
        assert processes(target, 4, OVERLAPPING, made) == [200] * 4
        assert sum(ledger.get_task(task).version - 1 for task in made) == 4 * 25 * 150
        assert ledger.doctor()["healthy"]


def test_on_a_server_the_time_is_the_servers(on_postgresql: sa.URL) -> None:
    now = sa.text("SELECT extract(epoch FROM clock_timestamp())::float8")
    with Ledger(on_postgresql) as ledger, looking(on_postgresql) as engine, engine.connect() as connection:
        made = [ledger.create_task().id for _ in range(2)]
        for task in made:
            ledger.start_task(task)
        before = connection.execute(now).scalar_one()
        assert ledger.heartbeat_many(made) == []
        after = connection.execute(now).scalar_one()
        times = {ledger.get_task(task).updated_at for task in made}
        assert len(times) == 1
        assert before <= times.pop() <= after


def test_on_an_applications_engine_it_is_the_same(host_engine: sa.Engine, clock: FakeClock) -> None:
    ledger = Ledger(host_engine, clock=clock)
    made = [running(ledger, clock) for _ in range(3)]
    clock.now = 1010.0
    assert ledger.heartbeat_many([*made, UNKNOWN, UNKNOWN.upper()]) == [UNKNOWN]
    assert {ledger.get_task(task).version for task in made} == {2}
    assert ledger.doctor()["healthy"]


# -- asyncio -----------------------------------------------------------------------------------------------

DRIVERS = ("sqlite+aiosqlite", "postgresql+psycopg", "postgresql+asyncpg")


@pytest.fixture(params=DRIVERS)
def url(request: pytest.FixtureRequest) -> sa.URL:
    """A database at head, for each driver."""
    place = emptied(request, request.param)
    if isinstance(place, Path):
        return sa.URL.create(request.param, database=str(place))
    return place.set(drivername=request.param)


@asynccontextmanager
async def using(url: sa.URL) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url)
    try:
        yield engine
    finally:
        await engine.dispose()


def in_a_loop(work: Callable[[AsyncEngine], Coroutine[Any, Any, None]], url: sa.URL) -> None:
    async def run() -> None:
        async with using(url) as engine:
            await work(engine)

    asyncio.run(run())


async def begun(ledger: AsyncLedger, count: int) -> list[str]:
    made = []
    for _ in range(count):
        made.append((await ledger.create_task()).id)
        await ledger.start_task(made[-1])
    return made


def test_many_beats_are_awaited_with_the_same_answer(url: sa.URL, clock: FakeClock) -> None:
    async def work(engine: AsyncEngine) -> None:
        ledger = AsyncLedger(engine, clock=clock)
        made = await begun(ledger, 3)
        queued = (await ledger.create_task()).id
        clock.now = 1010.0
        given = [made[0].upper(), UNKNOWN, uuid.UUID(made[1]), queued, made[2], made[0]]
        assert await ledger.heartbeat_many(given) == [UNKNOWN, queued]
        assert await ledger.heartbeat_many(task for task in made) == []
        records: list[TaskRecord] = [await ledger.get_task(task) for task in made]
        assert {(task.updated_at, task.version) for task in records} == {(1010.0, 3)}
        readings = clock.readings
        assert await ledger.heartbeat_many([]) == []
        assert clock.readings == readings
        for wrong in ("x", None, UNKNOWN):
            with pytest.raises(InvalidInput):
                await ledger.heartbeat_many([made[0], wrong] if wrong != UNKNOWN else UNKNOWN)
        clock.now = 1000.0
        with pytest.raises(StateConflict):
            await ledger.heartbeat_many(made)
        clock.now = 1020.0
        await asyncio.gather(*(ledger.heartbeat_many(made) for _ in range(4)))
        assert {(await ledger.get_task(task)).version for task in made} == {7}
        assert (await ledger.doctor())["healthy"]

    in_a_loop(work, url)


def test_runs_in_batches_are_awaited_with_the_same_reports(url: sa.URL, clock: FakeClock) -> None:
    async def work(engine: AsyncEngine) -> None:
        ledger = AsyncLedger(engine, clock=clock)
        grace: dict[str, Any] = {"active_grace_seconds": 600, "delivery_grace_seconds": 0, "batch_size": 2}
        for _ in range(7):
            await begun(ledger, 3)
            clock.advance(1000)
            told: list[tuple[int, int]] = []

            def progress(done: int, total: int, told: list[tuple[int, int]] = told) -> None:
                told.append((done, total))

            preview = await ledger.reconcile(**grace, dry_run=True)
            report = await ledger.reconcile(**grace, progress=progress)
            assert {**preview, "dry_run": False, "applied": True} == report
            assert (report["tasks_timed_out"], report["deliveries_failed"], report["batches"]) == (3, 3, 4)
            assert told == [(2, 6), (3, 6), (5, 6), (6, 6)]
            told.clear()
            before = await ledger.prune(500, 2, dry_run=True)
            pruned = await ledger.prune(0, batch_size=2, progress=progress)
            assert (before["tasks_pruned"], before["recent_retained"]) == (0, 3)
            assert without(dict(pruned), "events_pruned") == {
                "dry_run": False,
                "applied": True,
                "closed_examined": 3,
                "tasks_pruned": 3,
                "recent_retained": 0,
                "parents_retained": 0,
                "conflicts_skipped": 0,
                "batches": 2,
            }
            assert told == [(2, 3), (3, 3)]
        with pytest.raises(InvalidInput):
            await ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0, batch_size=0)
        with pytest.raises(InvalidInput):
            await ledger.prune(-1)
        steps: list[tuple[int, int]] = []
        assert (await ledger.doctor(progress=lambda done, total: steps.append((done, total))))["healthy"]
        assert steps[-1][0] == steps[-1][1] == len(steps)

    in_a_loop(work, url)


def test_a_run_in_batches_does_not_hold_up_the_loop_while_it_waits(
    url: sa.URL, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def work(engine: AsyncEngine) -> None:
        ledger = AsyncLedger(engine, clock=clock)
        await begun(ledger, 4)
        clock.advance(1000)
        monkeypatch.setattr(time, "sleep", slept.append)
        try:
            await ledger.reconcile(active_grace_seconds=600, delivery_grace_seconds=1e9, batch_size=1)
        finally:
            monkeypatch.undo()

    in_a_loop(work, url)
    # In the loop's own thread, nothing else could go on meanwhile.
    assert [seconds for seconds in slept if seconds > 0] == []


def test_a_run_that_is_cancelled_leaves_no_lock_and_what_it_did_stays(url: sa.URL, clock: FakeClock) -> None:
    async def work(engine: AsyncEngine) -> None:
        ledger = AsyncLedger(engine, clock=clock)
        made = await begun(ledger, 6)
        clock.advance(1000)
        loop = asyncio.get_running_loop()

        def progress(done: int, total: int) -> None:
            loop.call_soon(task.cancel)

        task = asyncio.ensure_future(
            ledger.reconcile(active_grace_seconds=600, delivery_grace_seconds=1e9, batch_size=2, progress=progress)
        )
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(20):
            fresh = await begun(ledger, 1)
        records = [await ledger.get_task(task_id) for task_id in made]
        ended = [record.status == "timed_out" for record in records]
        assert ended in ([True] * 2 + [False] * 4, [True] * 4 + [False] * 2, [True] * 6)
        assert (await ledger.doctor())["healthy"]
        report = await ledger.reconcile(active_grace_seconds=600, delivery_grace_seconds=1e9, batch_size=2)
        assert report["tasks_timed_out"] == ended.count(False)
        assert (await ledger.get_task(fresh[0])).status == "running"

    in_a_loop(work, url)
