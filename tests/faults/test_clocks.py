"""Clocks that are wrong: that go back, jump, stand still, or are an hour apart on two hosts.

Time never runs backwards over what is stored: a verb whose clock is behind is refused and changes nothing, a sweep
passes over what it can't judge or refuses whole, and whatever a clock has written, the ledger stays consistent.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests import debian
from tests.conftest import FakeClock, emptied, raw
from tests.tallies import Tally
from tests.test_concurrency import named
from tests.test_reconcile import running
from tsg import InvalidInput, Ledger, ReconcilePolicy, StateConflict, Task, reconcile
from tsg.tables import task_events, tasks

Place = Path | sa.URL

TIMES = ("created_at", "started_at", "updated_at", "ended_at", "delivery_updated_at")
NOW = 1_750_000_000.25
#: The least that a clock can go on at such a time: a quarter of a microsecond.
LEAST = math.nextafter(NOW, math.inf) - NOW
EXTREMES = [-1e300, -62_135_596_800.0, -1.0, 0.0, 5e-324, 0.1, NOW, NOW + LEAST, 253_402_300_799.0, 1e18, 1e300]


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest) -> Place:
    """An empty ledger on either database; other than conftest's, with none made for each test."""
    return emptied(request, request.param)


@pytest.fixture
def both(target: Place, clock: FakeClock) -> Iterator[Ledger]:
    clock.now = NOW
    with Ledger(target, clock=clock) as ledger:
        yield ledger


@pytest.fixture
def engine(target: Place) -> Iterator[sa.Engine]:
    """A host's own."""
    url = target if isinstance(target, sa.URL) else sa.URL.create("sqlite", database=str(target))
    made = sa.create_engine(url)
    yield made
    made.dispose()


def stored(engine: sa.Engine) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    with engine.connect() as connection:
        return (
            [dict(row) for row in connection.execute(sa.select(tasks).order_by(tasks.c.pk)).mappings()],
            [
                dict(row)
                for row in connection.execute(
                    sa.select(task_events).order_by(task_events.c.task_pk, task_events.c.number)
                ).mappings()
            ],
        )


def sweep(ledger: Ledger, active: float = 600, delivery: float = 600, **options: Any) -> dict[str, Any]:
    return dict(ledger.reconcile(active_grace_seconds=active, delivery_grace_seconds=delivery, **options))


# -- a clock that is given --------------------------------------------------------------------------------


def in_state(ledger: Ledger, state: str) -> str:
    task = ledger.create_task(timeout_seconds=60).id
    if state != "queued":
        ledger.start_task(task)
    if state == "ended":
        ledger.close_task(task, "succeeded")
    return task


VERBS: dict[str, tuple[str, Callable[[Ledger, str], Any], Callable[[Session, Task], Any]]] = {
    "create": (
        "running",
        lambda ledger, task: ledger.create_task(parent_id=task),
        lambda session, task: session.add(Task(parent_id=task.id)),
    ),
    "start": ("queued", lambda ledger, task: ledger.start_task(task), lambda session, task: task.start()),
    "heartbeat": ("running", lambda ledger, task: ledger.heartbeat(task), lambda session, task: task.heartbeat()),
    "heartbeat_many": (
        "running",
        lambda ledger, task: ledger.heartbeat_many([task]),
        lambda session, task: task.heartbeat(at=session.info["tsg_clock"]()),
    ),
    "close what is queued": (
        "queued",
        lambda ledger, task: ledger.close_task(task, "failed"),
        lambda session, task: task.close("failed"),
    ),
    "close": (
        "running",
        lambda ledger, task: ledger.close_task(task, "succeeded", code="completed"),
        lambda session, task: setattr(task, "status", "succeeded"),
    ),
    "deliver": (
        "ended",
        lambda ledger, task: ledger.set_delivery(task, "delivered"),
        lambda session, task: task.deliver("delivered"),
    ),
}
BEFORE = {
    "the least bit before": NOW - LEAST,
    "an hour before": NOW - 3600,
    "zero": 0.0,
    "negative": -1.0,
    "as early as can be": -1e300,
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("how", ["ledger", "session"])
def test_a_clock_that_went_back_is_refused_and_one_that_stands_still_is_not(
    both: Ledger, clock: FakeClock, engine: sa.Engine, tally: Tally, how: str, verb: str
) -> None:
    state, by_ledger, by_session = VERBS[verb]
    task = in_state(both, state)

    def act() -> None:
        if how == "ledger":
            by_ledger(both, task)
        else:
            with Session(engine, info={"tsg_clock": clock}) as session, session.begin():
                by_session(session, session.get_one(Task, task))

    before = stored(engine)
    for clock.now in BEFORE.values():
        with pytest.raises(StateConflict) as refused:
            act()
        assert not refused.value.retriable
        assert stored(engine) == before
    for clock.now in (math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidInput):
            act()
        assert stored(engine) == before
    clock.now = NOW
    act()
    rows, _ = stored(engine)
    assert rows != before[0]
    assert {row[name] for row in rows for name in TIMES} <= {NOW, None}
    assert both.doctor()["healthy"]
    tally("a verb by a clock that went back", len(BEFORE), 0)


def test_times_of_every_size_make_whole_lives_that_are_consistent(
    both: Ledger, clock: FakeClock, engine: sa.Engine
) -> None:
    """Each life begins at one of them and ends at the next."""
    for begun, ended in zip(EXTREMES, EXTREMES[1:], strict=False):
        clock.now = begun
        task, stale = (both.create_task(timeout_seconds=60).id for _ in range(2))
        with Session(engine, info={"tsg_clock": clock}) as session, session.begin():
            session.get_one(Task, task).start()
        both.start_task(stale)
        clock.now = ended
        with Session(engine, info={"tsg_clock": clock}) as session, session.begin():
            session.get_one(Task, task).heartbeat()
        both.close_task(task, "succeeded")
        both.set_delivery(task, "delivered")
        found = both.get_task(task)
        assert (found.created_at, found.started_at, found.deadline_at) == (begun, begun, begun + 60)
        assert {found.updated_at, found.ended_at, found.delivery_updated_at} == {ended}
        # It stays stale from here to the end of time.
        assert sweep(both, 0, 0)["tasks_timed_out"] == 1
        assert {both.get_task(stale).ended_at, both.get_task(stale).delivery_updated_at} == {ended}
    assert both.doctor()["healthy"]
    assert both.prune(0)["tasks_pruned"] == 2 * (len(EXTREMES) - 1)


class Jumping:
    """A clock that is somewhere else at each reading."""

    def __init__(self, *readings: float) -> None:
        self.readings = list(readings)

    def __call__(self) -> float:
        return self.readings.pop(0)


@pytest.mark.parametrize("size", [None, 1, 2], ids=["at once", "one by one", "in twos"])
@pytest.mark.parametrize("jump", [-7200.0, 7200.0], ids=["backwards", "forwards"])
def test_a_sweep_has_one_time_however_its_clock_jumps(
    both: Ledger, clock: FakeClock, engine: sa.Engine, size: int | None, jump: float
) -> None:
    made = [running(both, clock, NOW + at) for at in range(3)]
    clock.now = NOW + 9_000
    assert both.heartbeat_many(made) == []
    now = NOW + 10_000
    jumping = Jumping(now, now + jump, now)
    with Ledger(engine, clock=jumping) as ledger:
        report = sweep(ledger, 1000, 0, batch_size=size)
    assert jumping.readings == [now + jump, now]
    assert (report["tasks_timed_out"], report["deliveries_failed"]) == (3, 3)
    rows, events = stored(engine)
    assert {row["ended_at"] for row in rows} == {row["delivery_updated_at"] for row in rows} == {now}
    assert [event["occurred_at"] for event in events if event["number"] >= 2] == [now] * 6
    assert both.doctor()["healthy"]


def test_between_batches_a_writer_ahead_is_passed_over_and_one_behind_is_refused(
    both: Ledger, clock: FakeClock, target: Place
) -> None:
    silent = [running(both, clock, NOW + at) for at in range(3)]
    expired = [running(both, clock, NOW + 10 + at, timeout_seconds=60) for at in range(3)]
    clock.now = now = NOW + 10_000
    refused: list[str] = []
    with Ledger(target, clock=lambda: now + 3600) as ahead, Ledger(target, clock=lambda: NOW - 3600) as behind:

        def meddle(done: int, total: int) -> None:
            if done == 1:
                ahead.heartbeat(silent[2])
                ahead.heartbeat(expired[2])
                for task in (silent[1], expired[1]):
                    with pytest.raises(StateConflict):
                        behind.heartbeat(task)
                    refused.append(task)

        report = sweep(both, 600, 1e9, batch_size=1, progress=meddle)
    assert refused == [silent[1], expired[1]]
    # One is not silent any more, the other is past its deadline and has a time that is yet to come.
    assert (report["tasks_timed_out"], report["conflicts_skipped"]) == (4, 1)
    assert [both.get_task(task).status for task in (silent[2], expired[2])] == ["running", "running"]
    assert {both.get_task(task).ended_at for task in silent[:2] + expired[:2]} == {now}
    assert both.doctor()["healthy"]


@pytest.mark.parametrize("back", [0.0, 3600.0], ids=["still", "back"])
def test_a_preview_whose_clock_jumps_once_its_snapshot_is_fixed_knows_no_time_of_later(
    both: Ledger, clock: FakeClock, engine: sa.Engine, back: float
) -> None:
    task = running(both, clock, NOW, timeout_seconds=10)
    clock.now = NOW + 5000
    readings: list[float] = []

    def reading() -> float:
        both.heartbeat(task)
        readings.append(clock.now - back)
        return readings[-1]

    with Ledger(engine, clock=reading) as ledger:
        report = sweep(ledger, dry_run=True)
    assert len(readings) == 1
    assert (report["tasks_timed_out"], report["active_examined"]) == (1, 1)


@pytest.mark.parametrize("size", [None, 10], ids=["at once", "in batches"])
def test_on_a_server_a_sweep_that_a_beat_overtakes_looks_again_and_leaves_the_task(
    request: pytest.FixtureRequest, clock: FakeClock, size: int | None
) -> None:
    place = emptied(request, "postgresql")
    with Ledger(place, clock=clock) as other:
        silent, beating = running(other, clock, NOW), running(other, clock, NOW)
        clock.now = NOW + 5000
        readings: list[float] = []

        def reading() -> float:
            # It lands between the snapshot and the decision time, which is before it.
            readings.append(clock.now)
            if len(readings) == 1:
                clock.advance(0.5)
                other.heartbeat(beating)
            return readings[-1]

        with Ledger(place, clock=reading) as ledger:
            report = sweep(ledger, batch_size=size)
        assert report["tasks_timed_out"] == 1
        assert [other.get_task(task).status for task in (silent, beating)] == ["timed_out", "running"]
        assert other.get_task(beating).updated_at == NOW + 5000.5
        assert other.doctor()["healthy"]


def test_on_a_server_a_task_is_created_though_its_parent_beats_in_that_very_moment(
    request: pytest.FixtureRequest, clock: FakeClock
) -> None:
    """With one clock for all there is no time that is behind, only one that was read too early."""
    place = emptied(request, "postgresql")
    with Ledger(place, clock=clock) as other:
        parent = running(other, clock, NOW)
        beats: list[float] = []

        def reading() -> float:
            now = clock.now
            if not beats:
                clock.advance(0.001)
                beats.append(other.heartbeat(parent).updated_at)
            return float(now)

        with Ledger(place, clock=reading) as ledger:
            child = ledger.create_task(parent_id=parent)
        assert beats == [NOW + 0.001]
        assert child.created_at >= NOW
        assert other.doctor()["healthy"]


def test_prune_lets_nothing_go_by_a_clock_that_went_back_and_reads_it_once(
    both: Ledger, clock: FakeClock, engine: sa.Engine
) -> None:
    for _ in range(3):
        task = in_state(both, "ended")
        both.set_delivery(task, "delivered")
    for clock.now in (*BEFORE.values(), NOW):
        for dry_run in (True, False):
            assert both.prune(1, dry_run=dry_run)["tasks_pruned"] == 0
    jumping = Jumping(NOW + 10, -1e300, 1e300)
    with Ledger(engine, clock=jumping) as ledger:
        assert ledger.prune(10, 1)["tasks_pruned"] == 3
    assert jumping.readings == [-1e300, 1e300]


def test_whatever_a_clock_does_no_stored_time_ever_goes_back_and_what_is_refused_changes_nothing(
    both: Ledger, clock: FakeClock, engine: sa.Engine, rounds: int, tally: Tally
) -> None:
    chance = random.Random(18)
    known: list[str] = [both.create_task(timeout_seconds=30).id]
    refused = done = 0

    def jump() -> None:
        clock.now = chance.choice(
            [
                lambda: clock.now,
                lambda: math.nextafter(clock.now, chance.choice([-math.inf, math.inf])),
                lambda: clock.now + chance.choice([-3600, -1, 1, 20, 700, 3600]),
                lambda: NOW + chance.uniform(-5000, 5000),
                lambda: chance.choice([NOW, *EXTREMES]) if chance.random() < 0.2 else clock.now + 10,
            ]
        )()

    def by_session(verb: str, *arguments: str) -> None:
        with Session(engine, info={"tsg_clock": clock}) as session, session.begin():
            getattr(session.get_one(Task, chance.choice(known)), verb)(*arguments)

    def create() -> None:
        parent = chance.choice([None, *known])
        known.append(both.create_task(parent_id=parent, timeout_seconds=chance.choice([None, 0, 30])).id)

    ends = ["succeeded", "failed", "timed_out", "cancelled"]
    actions: list[Callable[[], Any]] = [
        create,
        create,
        lambda: both.start_task(chance.choice(known)),
        lambda: both.heartbeat(chance.choice(known)),
        lambda: both.heartbeat_many(chance.choices(known, k=3)),
        lambda: both.close_task(chance.choice(known), chance.choice(ends)),
        lambda: both.set_delivery(chance.choice(known), "delivered"),
        lambda: by_session("start"),
        lambda: by_session("heartbeat"),
        lambda: by_session("close", chance.choice(ends)),
        lambda: by_session("deliver", "delivered"),
        lambda: sweep(both, chance.choice([0, 600]), chance.choice([0, 600]), skip_conflicts=chance.random() < 0.5),
        lambda: sweep(both, 600, 600, batch_size=2),
        lambda: sweep(both, 0, 0, dry_run=True),
    ]
    before = stored(engine)
    for _ in range(max(50, rounds // 2)):
        jump()
        try:
            chance.choice(actions)()
        except StateConflict:
            refused += 1
            assert stored(engine) == before
            continue
        after = stored(engine)
        done += after != before
        for old, new in zip(before[0], after[0], strict=False):
            assert old["id"] == new["id"]
            for name in TIMES:
                assert old[name] is None or old[name] <= new[name]
        assert [event for event in after[1] if event in before[1]] == before[1]
        before = after
    assert refused > 10
    assert done > 10
    assert both.doctor()["healthy"]
    tally("a clock that jumps about", refused + done, 0)


# -- cases ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ledger", "session"])
def test_b13_a_retry_of_what_timed_out_three_days_ago_is_a_new_task_that_a_sweep_leaves(
    both: Ledger, clock: FakeClock, engine: sa.Engine, how: str
) -> None:
    old = running(both, clock, NOW, timeout_seconds=60)
    clock.now = NOW + 1000
    assert sweep(both)["tasks_timed_out"] == 1
    clock.advance(1000)
    assert sweep(both)["deliveries_failed"] == 1
    ended = both.get_task(old)
    clock.advance(3 * 86_400)
    if how == "ledger":
        for verb in (both.start_task, both.heartbeat):
            with pytest.raises(StateConflict):
                verb(old)
        retry = both.create_task(parent_id=old, timeout_seconds=60).id
        both.start_task(retry)
    else:
        with Session(engine, info={"tsg_clock": clock}) as session, session.begin():
            made = Task(parent_id=old, timeout_seconds=60)
            session.add(made)
            made.start()
            retry = made.id
    before = stored(engine)
    for options in ({"dry_run": True}, {}, {"batch_size": 1}):
        report = sweep(both, **options)
        changes = ("tasks_timed_out", "deliveries_failed", "deliveries_not_applicable")
        assert [report[key] for key in changes] == [0, 0, 0]
        assert (report["active_examined"], report["fresh_active_retained"]) == (1, 1)
    assert stored(engine) == before
    assert both.get_task(old) == ended
    assert (both.get_task(retry).started_at, both.get_task(retry).deadline_at) == (clock.now, clock.now + 60)
    assert both.doctor()["healthy"]


@pytest.mark.parametrize("how", ["ledger", "connection", "session"])
def test_b14_a_beat_from_an_hour_ahead_refuses_a_sweep_whole_or_is_passed_over_and_counted(
    both: Ledger, clock: FakeClock, engine: sa.Engine, how: str
) -> None:
    others = [running(both, clock, NOW) for _ in range(2)]
    ahead = running(both, clock, NOW, beat=NOW + 4600, timeout_seconds=100)
    clock.now = now = NOW + 1000

    def run(dry_run: bool, skip: bool) -> dict[str, Any]:
        if how == "ledger":
            return sweep(both, dry_run=dry_run, skip_conflicts=skip)
        function = reconcile.preview if dry_run else reconcile.apply
        isolated = engine.execution_options(isolation_level="REPEATABLE READ") if isinstance(where, sa.URL) else engine
        if how == "connection":
            with isolated.begin() as connection:
                return dict(function(connection, ReconcilePolicy(), clock=clock, skip_conflicts=skip))
        with Session(isolated, info={"tsg_clock": clock}) as session, session.begin():
            return dict(function(session, ReconcilePolicy(), skip_conflicts=skip))

    where = engine.url if engine.dialect.name == "postgresql" else None
    before = stored(engine)
    for dry_run in (True, False):
        with pytest.raises(StateConflict) as refused:
            run(dry_run, skip=False)
        assert not refused.value.retriable
        assert stored(engine) == before
    for dry_run in (True, False):
        report = run(dry_run, skip=True)
        assert (report["tasks_timed_out"], report["conflicts_skipped"]) == (2, 1)
    assert {both.get_task(task).ended_at for task in others} == {now}
    assert both.get_task(ahead).updated_at == NOW + 4600
    # Until the clock has caught up; then it is a task like others.
    with pytest.raises(StateConflict):
        both.heartbeat(ahead)
    clock.now = NOW + 4600
    assert sweep(both, 600, 1e9)["tasks_timed_out"] == 1
    assert both.get_task(ahead).terminal_code == "deadline_exceeded"
    assert both.doctor()["healthy"]


BERLIN = "Europe/Berlin"
#: When the clocks there go from two to three, and when they go from three back to two.
SPRING = datetime(2027, 3, 28, 1, 0, tzinfo=UTC)
AUTUMN = datetime(2027, 10, 31, 1, 0, tzinfo=UTC)


@pytest.fixture
def berlin() -> ZoneInfo:
    if BERLIN not in available_timezones():
        pytest.skip("needs the database of time zones: install Debian's package tzdata")
    return ZoneInfo(BERLIN)


@pytest.fixture
def in_berlin(berlin: ZoneInfo) -> Iterator[ZoneInfo]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", BERLIN)
        time.tzset()
        yield berlin
    time.tzset()


@pytest.mark.parametrize("change", [SPRING, AUTUMN], ids=["spring", "autumn"])
def test_b18_a_wait_over_a_change_of_summer_time_lasts_just_as_many_seconds(
    in_berlin: ZoneInfo, both: Ledger, clock: FakeClock, engine: sa.Engine, change: datetime
) -> None:
    local = (change - timedelta(minutes=30)).astimezone(in_berlin)
    assert time.localtime(change.timestamp() - 1).tm_isdst != time.localtime(change.timestamp()).tm_isdst
    begun = clock.now = local.timestamp()
    expiring = both.create_task(timeout_seconds=3600, delivery_required=False).id
    silent = both.create_task().id
    with Session(engine) as session, session.begin():
        for task in (expiring, silent):
            session.get_one(Task, task).start(at=local)
    assert both.get_task(expiring).started_at == both.get_task(silent).started_at == begun
    assert both.get_task(expiring).deadline_at == begun + 3600
    clock.now = math.nextafter(begun + 3600, 0)
    assert sweep(both, 3600, 3600)["tasks_timed_out"] == 0
    clock.now = begun + 3600
    assert sweep(both, 3600, 3600)["tasks_timed_out"] == 2
    clock.now = math.nextafter(begun + 7200, 0)
    assert sweep(both, 3600, 3600)["pending_delivery_retained"] == 2
    clock.now = begun + 7200
    report = sweep(both, 3600, 3600)
    assert (report["deliveries_failed"], report["deliveries_not_applicable"]) == (1, 1)
    assert both.doctor()["healthy"]


def test_b18_the_hour_that_comes_twice_is_two_hours_and_a_naive_time_is_refused(
    in_berlin: ZoneInfo, both: Ledger, clock: FakeClock, engine: sa.Engine
) -> None:
    first = datetime(2027, 10, 31, 2, 30, tzinfo=in_berlin)
    second = first.replace(fold=1)
    clock.now = first.timestamp()
    task = both.create_task().id
    with Session(engine) as session, session.begin():
        stored_task = session.get_one(Task, task)
        stored_task.start(at=first)
        stored_task.heartbeat(at=second)
        with pytest.raises(StateConflict):
            stored_task.heartbeat(at=first)
        with pytest.raises(InvalidInput):
            stored_task.heartbeat(at=second.replace(tzinfo=None))
    found = both.get_task(task)
    assert found.started_at is not None
    assert found.updated_at - found.started_at == 3600
    # The same instant by another zone's name.
    with Session(engine) as session, session.begin():
        session.get_one(Task, task).close("succeeded", at=second.astimezone(UTC))
    assert both.get_task(task).ended_at == found.updated_at


# -- a machine's own clock --------------------------------------------------------------------------------

HOST = """
import asyncio, json, os, sys, time, traceback
import sqlalchemy as sa
import tsg
from sqlalchemy.orm import Session
from tsg import AsyncLedger, Ledger, ReconcilePolicy, StateConflict, Task
from tsg.cli import main
# Before a fork, so that a command has nothing left to import.
import tsg.cli.doctor, tsg.cli.ledger, tsg.cli.upkeep, tsg.models, tsg.schema

place = sys.argv[1]
engine = sa.create_engine(place if "://" in place else f"sqlite:///{place}")
policy = ReconcilePolicy()
kept = {}

def ledger(target=place):
    if target not in kept:
        kept[target] = Ledger(target)
    return kept[target]

def command(*arguments):
    "The real command line, in a process of its own."
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writer, 1)
        os.close(writer)
        os.close(reader)
        try:
            main(["--db", place, *arguments])
        except SystemExit as left:
            # It has said all; there is no interpreter to be taken down.
            os._exit(left.code or 0)
        os._exit(70)
    os.close(writer)
    with os.fdopen(reader) as said:
        line = json.loads(said.read())
    _, status = os.waitpid(child, 0)
    return [os.waitstatus_to_exitcode(status), line]

def of_async(work):
    async def go():
        from sqlalchemy.ext.asyncio import create_async_engine
        made = create_async_engine(place)
        try:
            return await work(AsyncLedger(made))
        finally:
            await made.dispose()
    return asyncio.run(go())

async def started(ours, timeout):
    return (await ours.start_task((await ours.create_task(timeout_seconds=timeout)).id)).id

def in_session(work, server=False):
    with Session(engine) as session, session.begin():
        if server:
            session.info["tsg_clock"] = tsg.server_clock(session)
        return work(session)

def on_connection(work):
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection, connection.begin():
        return work(connection)

def made_in(session, **fields):
    task = Task(**fields)
    session.add(task)
    task.start()
    return task.id

def loop(shared, count):
    "Verbs on tasks that another host beats too, a life of its own each turn, and a reconcile."
    ours, timed_out = ledger(), 0
    for turn in range(count):
        for task in shared:
            ours.heartbeat(task)
        ours.heartbeat_many(shared)
        child = ours.create_task(timeout_seconds=1800).id
        ours.start_task(child)
        in_session(lambda session: session.get_one(Task, child).heartbeat(), server=True)
        ours.close_task(child, "succeeded", code="completed")
        in_session(lambda session: session.get_one(Task, child).deliver("delivered"), server=True)
        timed_out += ours.reconcile(active_grace_seconds=600, delivery_grace_seconds=600)["tasks_timed_out"]
        timed_out += on_connection(lambda connection: tsg.reconcile.preview(connection, policy))["tasks_timed_out"]
    return timed_out

print("ready", flush=True)
for line in sys.stdin:
    try:
        answer = {"is": eval(line)}
    except StateConflict as error:
        answer = {"refused": [str(error), error.retriable]}
    except Exception:
        answer = {"broken": traceback.format_exc()}
    print(json.dumps(answer), flush=True)
for opened in kept.values():
    opened.close()
engine.dispose()
"""


class Refused(Exception):
    """A StateConflict on a host."""


class Host:
    """A machine whose clock is wrong, as far as its processes can tell."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, expression: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(expression.replace("\n", " ") + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        assert "broken" not in said, said["broken"]
        if "refused" in said:
            raise Refused(*said["refused"])
        return said["is"]

    def __call__(self, expression: str) -> Any:
        self.ask(expression)
        return self.answer()


@contextmanager
def hosts_of(place: Place, *offsets: str, zone: str = "UTC") -> Iterator[list[Host]]:
    """A machine for each of the offsets, in faketime's words."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [debian.program("faketime"), "-f", offset, sys.executable, "-W", "error", "-c", HOST, named(place)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "TZ": zone},
                )
            )
            for offset in offsets
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            yield [Host(process) for process in processes]
            for process in processes:
                assert process.stdin is not None
                process.stdin.close()
                assert process.wait(30) == 0
        finally:
            for process in processes:
                process.kill()


def rows_of(place: Place) -> list[Any]:
    assert isinstance(place, Path)
    with closing(raw(place)) as connection:
        return list(connection.execute("SELECT * FROM tsg_tasks JOIN tsg_task_events ON task_pk = pk"))


def off_by(clock: float) -> float:
    """By how many hours."""
    return round((clock - time.time()) / 3600, 1)


def test_a_machine_whose_clock_was_set_back_is_refused_until_it_has_caught_up_and_harms_nothing(
    request: pytest.FixtureRequest, tally: Tally
) -> None:
    place = emptied(request, "sqlite")
    with hosts_of(place, "+1h", "+0") as (ahead, right):
        assert off_by(ahead("time.time()")) == 1
        queued, begun = (ahead("command('create', '--timeout-seconds', '60')")[1]["task"]["id"] for _ in range(2))
        status, answer = ahead(f"command('start', {begun!r})")
        assert (status, off_by(answer["task"]["started_at"])) == (0, 1)
        assert off_by(ahead(f"in_session(lambda session: session.get_one(Task, {queued!r}).created_at)")) == 1
        before = rows_of(place)
        refusals = [
            f"command('create', '--parent-id', {begun!r})",
            f"command('start', {queued!r})",
            f"command('heartbeat', {begun!r})",
            f"command('close', {begun!r}, '--status', 'succeeded')",
            f"command('close', {queued!r}, '--status', 'cancelled')",
        ]
        for refusal in refusals:
            assert right(refusal) == [2, {"error": "StateConflict", "ok": False}]
        with pytest.raises(Refused, match="the clock is behind"):
            right(f"in_session(lambda session: session.get_one(Task, {begun!r}).heartbeat())")
        for options in ("'--dry-run'", "'--batch-size', '1'", "'--active-grace-seconds', '0'"):
            status, answer = right(f"command('reconcile', {options})")
            assert (status, answer["reconcile"]["tasks_timed_out"]) == (0, 0)
        assert rows_of(place) == before
        status, answer = right("command('doctor')")
        assert (status, answer["healthy"]) == (0, True)
        # What the wrong clock has not touched goes on.
        task = right("command('create')")[1]["task"]["id"]
        assert right(f"command('start', {task!r})")[0] == 0
        assert ahead(f"command('heartbeat', {begun!r})")[0] == 0
        assert ahead(f"command('start', {queued!r})")[0] == 0
        assert ahead("command('doctor')")[0] == 0
    tally("a machine's clock set back an hour", len(refusals) + 1, 0)


def test_a_machine_that_lives_through_the_change_to_summer_time_waits_as_long_as_was_said(
    request: pytest.FixtureRequest, berlin: ZoneInfo
) -> None:
    place = emptied(request, "sqlite")
    # Ten minutes to two, and ten minutes past three, which is twenty minutes later.
    moments = ("@2027-03-28 01:50:00", "@2027-03-28 03:10:00", "@2027-03-28 03:21:00")
    with hosts_of(place, *moments, zone=BERLIN) as (before, after, later):
        task = before("command('create', '--timeout-seconds', '1800')")[1]["task"]["id"]
        begun = before(f"command('start', {task!r})")[1]["task"]["started_at"]
        assert before("time.localtime().tm_isdst") == 0
        assert after("time.localtime().tm_isdst") == 1
        assert 1100 < after("time.time()") - begun < 1300
        answer = after("command('reconcile', '--active-grace-seconds', '1800')")
        assert (answer[0], answer[1]["reconcile"]["fresh_active_retained"]) == (0, 1)
        answer = later("command('reconcile', '--active-grace-seconds', '1800')")
        assert (answer[0], answer[1]["reconcile"]["tasks_timed_out"]) == (0, 1)
        assert later("command('doctor')")[0] == 0


@pytest.fixture(scope="module")
def machines(server_at_head: sa.URL) -> Iterator[list[Host]]:
    """Two that use one server, an hour ahead of it and an hour behind."""
    with hosts_of(server_at_head, "+1h", "-1h") as both:
        yield both


@pytest.fixture
def hosts(request: pytest.FixtureRequest, machines: list[Host]) -> tuple[sa.URL, list[Host]]:
    """The server, with nothing on it, and the two machines."""
    place = emptied(request, "postgresql")
    assert isinstance(place, sa.URL)
    assert [off_by(machine("time.time()")) for machine in machines] == [1, -1]
    return place, machines


#: Ways to make a task and start it, and to look for what is stale, that ask the server for the time.
BY_THE_SERVER = {
    "a ledger by URL": (
        "(lambda made: ledger().start_task(made.id).id)(ledger().create_task(timeout_seconds={timeout}))",
        "ledger().reconcile(active_grace_seconds=600, delivery_grace_seconds=600, dry_run={dry})",
    ),
    "a ledger on an engine": (
        "(lambda ours: ours.start_task(ours.create_task(timeout_seconds={timeout}).id).id)(ledger(engine))",
        "ledger(engine).reconcile(active_grace_seconds=600, delivery_grace_seconds=600, dry_run={dry}, batch_size=2)",
    ),
    "an AsyncLedger": (
        "of_async(lambda ours: started(ours, {timeout}))",
        "of_async(lambda ours: ours.reconcile(active_grace_seconds=600, delivery_grace_seconds=600, dry_run={dry}))",
    ),
    "commands": (
        (
            "(lambda made: command('start', made)[1]['task']['id'])"
            "(command('create', '--timeout-seconds', '{timeout}')[1]['task']['id'])"
        ),
        "command('reconcile', *(['--dry-run'] if {dry} else []))[1]['reconcile']",
    ),
    "sessions that keep the server's clock": (
        "in_session(lambda session: made_in(session, timeout_seconds={timeout}), server=True)",
        "in_session(lambda s: (tsg.reconcile.preview if {dry} else tsg.reconcile.apply)(s, policy), server=True)",
    ),
    "a session, and the functions on a connection": (
        "in_session(lambda session: made_in(session, timeout_seconds={timeout}), server=True)",
        "on_connection(lambda c: (tsg.reconcile.preview if {dry} else tsg.reconcile.apply)(c, policy))",
    ),
}


def test_hosts_an_hour_apart_on_one_server_time_nothing_out_early_or_late_and_refuse_nothing(
    hosts: tuple[sa.URL, list[Host]], tally: Tally
) -> None:
    place, machines = hosts
    tried = 0
    with Ledger(place) as ledger:
        for make, look in BY_THE_SERVER.values():
            for first, second in (machines, machines[::-1]):
                live = first(make.format(timeout=1800))
                assert off_by(ledger.get_task(live).created_at) == off_by(ledger.get_task(live).updated_at) == 0
                due = first(make.format(timeout=0))
                for dry in (True, False):
                    assert second(look.format(dry=dry))["tasks_timed_out"] == 1
                assert ledger.get_task(due).terminal_code == "deadline_exceeded"
                assert off_by(ledger.get_task(due).ended_at or 0) == 0
                assert ledger.get_task(live).status == "running"
                # Each of the two takes over what the other did last.
                for machine in (second, first):
                    machine(f"ledger().heartbeat({live!r}).version")
                second(f"ledger().close_task({live!r}, 'succeeded').version")
                first(f"ledger().set_delivery({live!r}, 'delivered').version")
                tried += 1
        assert ledger.doctor()["healthy"]
    for machine in machines:
        assert machine("ledger().doctor()['healthy']")
        assert machine("command('doctor')")[0] == 0
    tally("two hosts an hour apart on one server", tried, 0)


def test_hosts_an_hour_apart_that_work_on_the_same_tasks_at_once_disturb_each_other_in_nothing(
    hosts: tuple[sa.URL, list[Host]], tally: Tally
) -> None:
    place, machines = hosts
    turns = 10
    with Ledger(place) as ledger:
        shared = [ledger.create_task(timeout_seconds=1800).id for _ in range(3)]
        for task in shared:
            ledger.start_task(task)
        for machine in machines:
            machine.ask(f"loop({shared!r}, {turns})")
        assert [machine.answer() for machine in machines] == [0, 0]
        assert {ledger.get_task(task).version for task in shared} == {1 + 2 * 2 * turns}
        report = ledger.doctor()
    assert (report["healthy"], report["task_count"], report["event_count"]) == (True, 3 + 2 * turns, 6 + 8 * turns)
    tally("two hosts an hour apart at the same tasks", 2 * turns, 0)


def test_with_its_own_clock_a_host_behind_is_refused_and_moves_nothing_back(hosts: tuple[sa.URL, list[Host]]) -> None:
    place, (ahead, behind) = hosts
    own = "Ledger(engine, clock=lambda: time.time())"
    task = ahead(f"{own}.create_task(timeout_seconds=1800).id")
    ahead(f"{own}.start_task({task!r}).version")
    with Ledger(place) as ledger:
        before = ledger.get_task(task)
        assert off_by(before.updated_at) == 1
        for verb in (
            f"{own}.heartbeat({task!r})",
            f"{own}.heartbeat_many([{task!r}])",
            f"{own}.close_task({task!r}, 'failed')",
            f"{own}.create_task(parent_id={task!r})",
            # A session's default is the host's clock too.
            f"in_session(lambda session: session.get_one(Task, {task!r}).heartbeat())",
            # And even one that asks the server is behind what the host ahead has stored.
            f"in_session(lambda session: session.get_one(Task, {task!r}).heartbeat(), server=True)",
            f"ledger().heartbeat({task!r})",
        ):
            with pytest.raises(Refused) as refused:
                behind(verb)
            assert refused.value.args == ("the clock is behind a time that is stored already", False)
        assert behind("in_session(lambda session: tsg.reconcile.apply(session, policy))")["fresh_active_retained"] == 1
        assert ledger.get_task(task) == before
        assert ahead(f"{own}.heartbeat({task!r}).version") == before.version + 1
        # By its own clock, the host ahead thinks a task silent that the server's clock knows to be fresh.
        fresh = ledger.create_task().id
        ledger.start_task(fresh)
        assert ahead("in_session(lambda session: tsg.reconcile.preview(session, policy))")["tasks_timed_out"] == 1
        assert ahead("in_session(lambda s: tsg.reconcile.preview(s, policy), server=True)")["tasks_timed_out"] == 0
        assert ledger.doctor()["healthy"]
