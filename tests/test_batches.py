"""Reconcile in batches: the same end as in one transaction, oldest first, and what is done stays done."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tsg.ledger
from tests.conftest import FakeClock, database, emptied, raw, snapshot
from tests.conftest import tsg as command
from tests.test_both_databases import lifted, looking, stored
from tests.test_cli import call
from tests.test_concurrency import named, processes
from tests.test_reconcile import KEYS, MISSING, carry_out, graces, plans
from tests.test_reconcile import damage as damage_file
from tsg import InvalidInput, Ledger, StateConflict, TaskNotFound, upgrade
from tsg.tables import task_events, tasks

Place = Path | sa.URL


@pytest.fixture(scope="module", autouse=True)
def without_pauses() -> Iterator[None]:
    """Nobody waits for the lock here but where a test says so."""
    with pytest.MonkeyPatch.context() as patch:
        still = SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=lambda: 0.0)
        patch.setattr(tsg.ledger, "_LEAST_PAUSE_SECONDS", 0.0)
        patch.setattr(tsg.ledger, "time", still)
        yield


@pytest.fixture
def with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is outside of these tests."""
    monkeypatch.setattr(tsg.ledger, "_LEAST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(tsg.ledger, "time", time)


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest) -> Place:
    """An empty ledger on either database; other than conftest's, with none made for each test."""
    return emptied(request, request.param)


@pytest.fixture
def both(target: Place, clock: FakeClock) -> Iterator[Ledger]:
    """A ledger on either database."""
    with Ledger(target, clock=clock) as ledger:
        yield ledger


@contextmanager
def engine_of(target: Place) -> Iterator[sa.Engine]:
    with looking(target if isinstance(target, sa.URL) else sa.URL.create("sqlite", database=str(target))) as engine:
        yield engine


def contents(target: Place) -> tuple[list[Any], list[Any]]:
    with engine_of(target) as engine:
        return stored(engine)


def run(ledger: Ledger, size: Any = None, active: Any = 600, delivery: Any = 1e9, **options: Any) -> dict[str, Any]:
    return dict(
        ledger.reconcile(active_grace_seconds=active, delivery_grace_seconds=delivery, batch_size=size, **options)
    )


def without(report: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key not in keys}


def damage(target: Place, task: str, assignment: str) -> None:
    """Write round every guard."""
    if isinstance(target, sa.URL):
        with engine_of(target) as engine, lifted(engine) as connection:
            found = connection.execute(
                sa.text(f"UPDATE tsg_tasks SET {assignment} WHERE id = :id"), {"id": uuid.UUID(task)}
            )
            assert found.rowcount == 1
    else:
        damage_file(target, f"UPDATE tsg_tasks SET {assignment} WHERE id = ?", task)


def stale(ledger: Ledger, clock: FakeClock, ages: list[float], **fields: Any) -> list[str]:
    """A running task last heard of at each of these times, made in this order."""
    made = []
    for at in ages:
        clock.now = at
        made.append(ledger.create_task(**fields).id)
        ledger.start_task(made[-1])
    return made


def ended(ledger: Ledger, clock: FakeClock, ages: list[float], **fields: Any) -> list[str]:
    made = stale(ledger, clock, [], **fields)
    for at in ages:
        clock.now = at
        made.append(ledger.create_task(**fields).id)
        ledger.start_task(made[-1])
        ledger.close_task(made[-1], "succeeded")
    return made


def fill(engine: sa.Engine, count: int) -> None:
    """So many tasks that have run since long ago, each of another age, every second one internal."""
    if engine.dialect.name == "sqlite":
        numbers = f"WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count})"
        identifier, internal, source = "printf('%08x-0000-4000-8000-000000000000', n)", "n % 2", "s"
    else:
        numbers, source = "", f"generate_series(1, {count}) n"
        identifier, internal = "(lpad(to_hex(n), 8, '0') || '-0000-4000-8000-000000000000')::uuid", "mod(n, 2) = 1"
    with engine.begin() as connection:
        text = (
            f"INSERT INTO tsg_tasks (id, status, delivery_status, delivery_required, expects_heartbeat, created_at, "
            f"started_at, updated_at, delivery_updated_at, version) {numbers} SELECT {identifier}, 'running', "
            f"'pending', {internal}, true, 1000.0, 1001.0, 1001.0, 1000.0, 1 FROM {source}"
        )
        connection.exec_driver_sql(text)
        for values in (
            "0, 'created', NULL, 'queued', 1000.0, 'created'",
            "1, 'task_transition', 'queued', 'running', 1001.0, 'started'",
        ):
            connection.exec_driver_sql(f"INSERT INTO tsg_task_events SELECT pk, {values} FROM tsg_tasks")


class Broken(Exception):
    """What a test's own callback raises."""


def after(batches: int, then: Callable[[], object]) -> Callable[[int, int], None]:
    """A progress that does something once, after so many batches."""
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == batches:
            then()

    return progress


def breaking() -> None:
    raise Broken


# -- the same as in one transaction ------------------------------------------------------------------------


class Twin:
    """A ledger that is emptied and filled again."""

    def __init__(self, target: Place, stack: ExitStack) -> None:
        self.clock = FakeClock()
        self.ledger = stack.enter_context(Ledger(target, clock=self.clock))
        self.engine = stack.enter_context(engine_of(target))

    def empty(self) -> None:
        with self.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM tsg_tasks")

    def copy(self, other: Twin) -> None:
        self.empty()
        with other.engine.connect() as source, self.engine.begin() as connection:
            for table in (tasks, task_events):
                found = source.execute(sa.select(table).order_by(*table.primary_key)).mappings()
                rows = [dict(row) for row in found]
                if rows:
                    connection.execute(sa.insert(table), rows)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Twin, Twin]]:
    with ExitStack() as stack:
        targets: list[Place]
        if request.param == "sqlite":
            folder = tmp_path_factory.mktemp("twins", numbered=True)
            folder.chmod(0o700)
            targets = [folder / "one.sqlite", folder / "other.sqlite"]
        else:
            server, template = map(request.getfixturevalue, ("postgresql_server", "postgresql_template"))
            url = stack.enter_context(database(server, f"tsg_{uuid.uuid4().hex}", template=template))
            targets = [url, url.update_query_dict({"options": "-csearch_path=other"})]
            with looking(url) as engine, engine.begin() as connection:
                connection.exec_driver_sql("CREATE SCHEMA other")
            with looking(targets[1]) as engine:  # type: ignore[arg-type]
                upgrade(engine)
        yield Twin(targets[0], stack), Twin(targets[1], stack)


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    plans=st.lists(plans, min_size=5, max_size=7),
    now=st.sampled_from([1004.0, 1006.0, 1008.0, 1008.0, 1010.0]),
    active=graces,
    delivery=graces,
    size=st.integers(1, 4),
    scope=st.sampled_from([None, None, None, 0, 1]),
)
def test_a_run_in_batches_ends_as_one_transaction_does(
    twins: tuple[Twin, Twin],
    plans: list[dict[str, Any]],
    now: float,
    active: float,
    delivery: float,
    size: int,
    scope: int | None,
) -> None:
    one, other = twins
    one.empty()
    one.clock.now = 1000.0
    made: list[str] = []
    for plan in plans:
        carry_out(one.ledger, one.clock, made, plan)
    other.copy(one)
    one.clock.now = other.clock.now = now
    parent = None if scope is None else made[scope % len(made)]
    before, readings = stored(one.engine), one.clock.readings
    preview = run(one.ledger, size, active, delivery, dry_run=True, parent_id=parent)
    assert stored(one.engine) == before
    batched = run(one.ledger, size, active, delivery, parent_id=parent)
    assert one.clock.readings == readings + 2
    atomic = run(other.ledger, None, active, delivery, skip_conflicts=True, parent_id=parent)
    assert without(batched, "batches") == atomic
    assert tuple(batched) == (*KEYS, "conflicts_skipped", "batches")
    assert stored(one.engine) == stored(other.engine)
    if not batched["conflicts_skipped"]:
        assert {**preview, "dry_run": False, "applied": True} == batched
        closed = batched["deliveries_failed"] + batched["deliveries_not_applicable"]
        assert batched["batches"] == -(-batched["tasks_timed_out"] // size) - (-closed // size)
    assert one.ledger.doctor()["healthy"]
    again = run(one.ledger, size, active, delivery, parent_id=parent)
    assert (again["batches"], again["tasks_timed_out"], again["deliveries_failed"]) == (0, 0, 0)
    assert stored(one.engine) == stored(other.engine)


def test_every_kind_of_change_is_made_in_batches_of_every_size(twins: tuple[Twin, Twin]) -> None:
    one, other = twins
    for size in (1, 3, 2**31 - 1):
        one.empty()
        for internal in (False, True):
            fields = {"delivery_required": not internal}
            stale(one.ledger, one.clock, [1003, 1001, 1002], **fields)
            stale(one.ledger, one.clock, [1004, 1000], timeout_seconds=30, **fields)
            stale(one.ledger, one.clock, [1000], timeout_seconds=5000, expects_heartbeat=False, **fields)
            ended(one.ledger, one.clock, [1005, 1001, 1999], **fields)
            stale(one.ledger, one.clock, [1999, 2000], **fields)
            one.ledger.create_task(**fields)
        for now, delivery in ((2000.0, 600), (2001.0, 0)):
            other.copy(one)
            one.clock.now = other.clock.now = now
            preview = run(one.ledger, size, 600, delivery, dry_run=True)
            batched = run(one.ledger, size, 600, delivery)
            assert {**preview, "dry_run": False, "applied": True} == batched
            assert without(batched, "batches") == run(other.ledger, None, 600, delivery, skip_conflicts=True)
            assert stored(one.engine) == stored(other.engine)
            assert batched["deliveries_failed"] > 1
            assert batched["deliveries_not_applicable"] > 1
        assert one.ledger.doctor()["healthy"]


def test_a_grace_of_nothing_times_out_and_closes_in_batches_at_one_time(both: Ledger, clock: FakeClock) -> None:
    required = stale(both, clock, [1003, 1001, 1002])
    internal = stale(both, clock, [1004, 1000], delivery_required=False)
    clock.now = 1_760_000_000.25
    readings = clock.readings
    report = run(both, 2, 0, 0)
    assert clock.readings == readings + 1
    assert report == {
        **dict.fromkeys(KEYS, 0),
        "dry_run": False,
        "applied": True,
        "active_examined": 5,
        "tasks_timed_out": 5,
        "pending_delivery_examined": 5,
        "deliveries_failed": 3,
        "deliveries_not_applicable": 2,
        "conflicts_skipped": 0,
        "batches": 6,
    }
    for task in map(both.get_task, required + internal):
        assert (task.ended_at, task.delivery_updated_at, task.version) == (clock.now, clock.now, 3)
    assert both.doctor()["healthy"]


def test_only_the_children_of_the_one_task_are_looked_at(both: Ledger, clock: FakeClock) -> None:
    clock.now = 900
    parent = both.create_task().id
    children = stale(both, clock, [1002, 1000, 1001], parent_id=parent)
    done = ended(both, clock, [1000, 1001], parent_id=parent)
    clock.now = 2500
    strangers = [*stale(both, clock, [2500, 2500]), *ended(both, clock, [2500])]
    before = [both.get_task(task) for task in strangers]
    clock.now = 9000
    preview = run(both, 2, 600, 600, dry_run=True, parent_id=parent.upper())
    applied = run(both, 2, 600, 600, parent_id=uuid.UUID(parent))
    assert {**preview, "dry_run": False, "applied": True} == applied
    assert (applied["active_examined"], applied["tasks_timed_out"], applied["deliveries_failed"]) == (3, 3, 2)
    assert applied["batches"] == 3
    assert {both.get_task(task).status for task in children} == {"timed_out"}
    assert {both.get_task(task).delivery_status for task in done} == {"failed"}
    assert [both.get_task(task) for task in strangers] == before
    for options in ({"dry_run": True}, {}):
        with pytest.raises(TaskNotFound):
            run(both, 2, parent_id=MISSING, **options)


def test_a_run_with_nothing_to_do_writes_nothing(path: Path, ledger: Ledger, clock: FakeClock) -> None:
    stale(ledger, clock, [1000])
    watcher = raw(path)
    before = watcher.execute("PRAGMA data_version").fetchone()
    report = run(ledger, 5)
    assert (report["batches"], report["fresh_active_retained"], report["conflicts_skipped"]) == (0, 1, 0)
    assert watcher.execute("PRAGMA data_version").fetchone() == before
    watcher.close()


# -- rows that can't be acted on ---------------------------------------------------------------------------

HARM = ("terminal_code = 'completed'", "created_at = 9e9")


@pytest.mark.parametrize("harm", HARM)
def test_damaged_rows_are_passed_over_and_counted_and_hold_up_none_behind_them(
    both: Ledger, target: Place, clock: FakeClock, harm: str
) -> None:
    made = stale(both, clock, [1000 + at for at in range(7)])
    due = ended(both, clock, [1000 + at for at in range(5)], delivery_required=False)
    bad = [made[0], made[1], made[4], due[0], due[3]]
    for task in bad:
        damage(target, task, harm if task in made or "completed" not in harm else "terminal_code = 'worker_failed'")
    clock.now = 5000
    before = contents(target)
    for _ in range(2):
        preview = run(both, 2, 600, 600, dry_run=True)
        assert contents(target) == before
        applied = run(both, 2, 600, 600)
        assert without(preview, "dry_run", "applied", "batches") == without(applied, "dry_run", "applied", "batches")
        assert applied["conflicts_skipped"] == 5
        assert applied["fresh_active_retained"] == 0
        for task in made + due:
            if task not in bad:
                assert both.get_task(task).status != "running"
        assert [row for row in contents(target)[0] if any(task in row for task in bad)] == [
            row for row in before[0] if any(task in row for task in bad)
        ]
        before = contents(target)
    assert (applied["tasks_timed_out"], applied["deliveries_not_applicable"]) == (0, 0)


def test_a_preview_tells_the_batches_that_a_run_with_conflicts_takes(
    both: Ledger, target: Place, clock: FakeClock
) -> None:
    made = stale(both, clock, [1000, 1001, 1002, 1003])
    for task in made[1:3]:
        damage(target, task, "terminal_code = 'completed'")
    clock.now = 5000
    preview = run(both, 2, dry_run=True)
    assert {**preview, "dry_run": False, "applied": True} == run(both, 2)


def test_batches_of_damaged_rows_alone_change_nothing_and_are_counted_too(
    both: Ledger, target: Place, clock: FakeClock
) -> None:
    made = stale(both, clock, [1000, 1001, 1002])
    for task in made:
        damage(target, task, "terminal_code = 'completed'")
    clock.now = 5000
    before = contents(target)
    report = run(both, 1)
    assert (report["batches"], report["tasks_timed_out"], report["conflicts_skipped"]) == (3, 0, 3)
    assert contents(target) == before


# -- in the middle -----------------------------------------------------------------------------------------


def test_what_is_oldest_is_done_first_and_stays_done_when_a_run_breaks_off(
    both: Ledger, target: Place, clock: FakeClock
) -> None:
    ages = [1000.0 + at for at in range(9)]
    random.Random(5).shuffle(ages)
    made = dict(zip(stale(both, clock, ages), ages, strict=True))
    by_age = sorted(made, key=lambda task: made[task])
    clock.now = 2000
    for done in (2, 4, 6):
        with pytest.raises(Broken):
            run(both, 2, progress=after(1, breaking))
        assert [both.get_task(task).status == "timed_out" for task in by_age] == [at < done for at in range(9)]
        assert both.doctor()["healthy"]
    with Ledger(target, clock=clock) as other:
        assert run(other, None, dry_run=True)["tasks_timed_out"] == 3
    report = run(both, 2)
    assert (report["tasks_timed_out"], report["batches"], report["active_examined"]) == (3, 2, 3)
    assert {both.get_task(task).status for task in by_age} == {"timed_out"}
    assert run(both)["tasks_timed_out"] == 0
    assert both.doctor()["healthy"]


def test_deliveries_that_are_due_are_closed_oldest_first(both: Ledger, clock: FakeClock) -> None:
    ages = [1004.0, 1001.0, 1003.0, 1000.0, 1002.0]
    made = dict(zip(ended(both, clock, ages), ages, strict=True))
    clock.now = 2000
    with pytest.raises(Broken):
        run(both, 3, 600, 600, progress=after(1, breaking))
    assert [both.get_task(task).delivery_status for task in sorted(made, key=lambda task: made[task])] == [
        *["failed"] * 3,
        *["pending"] * 2,
    ]
    assert both.doctor()["healthy"]
    assert run(both, 3, 600, 600)["deliveries_failed"] == 2


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"skip_conflicts": True}])
def test_a_list_that_was_left_behind_does_no_harm(
    both: Ledger, target: Place, clock: FakeClock, options: dict[str, Any]
) -> None:
    made = stale(both, clock, [1000, 1001, 1002, 1003])
    clock.now = 2000
    with pytest.raises(Broken):
        run(both, 1, progress=after(1, breaking))
    later = stale(both, clock, [2000.0])
    damage(target, made[3], "terminal_code = 'completed'")
    clock.now = 2001
    size = options.get("batch_size")
    if not options:
        with pytest.raises(StateConflict):
            run(both)
    else:
        report = run(both, size, skip_conflicts=True)
        assert (report["tasks_timed_out"], report["conflicts_skipped"]) == (2, 1)
        assert {both.get_task(task).status for task in made[:3]} == {"timed_out"}
    assert both.get_task(later[0]).status == "running"
    assert both.prune(0)["tasks_pruned"] == 0


KILLED = """
import os, sys, tsg
calls = 0
def progress(done, total):
    global calls
    calls += 1
    if calls == 3:
        os._exit(9)
ledger = tsg.Ledger(sys.argv[1], clock=lambda: 2000.0)
ledger.reconcile(active_grace_seconds=600, delivery_grace_seconds=0, batch_size=2, progress=progress)
"""


def test_what_a_process_had_done_when_it_was_killed_stays_done(both: Ledger, target: Place, clock: FakeClock) -> None:
    made = stale(both, clock, [1000.0 + at for at in range(9)])
    killed = subprocess.run([sys.executable, "-c", KILLED, named(target)], capture_output=True, check=False, timeout=60)
    assert (killed.returncode, killed.stderr) == (9, b"")
    assert [both.get_task(task).status == "timed_out" for task in made] == [at < 6 for at in range(9)]
    assert both.doctor()["healthy"]
    clock.now = 2000.0
    report = run(both, 2, 600, 0)
    assert (report["tasks_timed_out"], report["deliveries_failed"], report["batches"]) == (3, 9, 2 + 5)
    assert both.doctor()["healthy"]


def test_the_clock_is_read_once_however_many_batches_there_are(both: Ledger, target: Place, clock: FakeClock) -> None:
    made = stale(both, clock, [1000.0 + at for at in range(6)])
    clock.now = 2000
    readings = clock.readings
    run(both, 1, 600, 0, progress=lambda done, total: clock.advance(1))
    assert clock.readings == readings + 1
    assert {(task.ended_at, task.delivery_updated_at) for task in map(both.get_task, made)} == {(2000.0, 2000.0)}


@pytest.mark.parametrize("fields", [{}, {"timeout_seconds": 500}], ids=["silent", "past its deadline"])
def test_what_somebody_vouches_for_between_batches_is_left_alone(
    both: Ledger, target: Place, clock: FakeClock, fields: dict[str, Any]
) -> None:
    made = stale(both, clock, [1000, 1001, 1002, 1003, 1004], **fields)
    due = ended(both, clock, [1000, 1001])
    with Ledger(target, clock=lambda: 2000.5) as other:

        def beat_and_end() -> None:
            other.heartbeat(made[2])
            other.close_task(made[3], "succeeded", code="completed")
            other.set_delivery(due[1], "delivered")

        clock.now = 2000
        report = run(both, 2, 600, 600, progress=after(1, beat_and_end))
    status = [both.get_task(task).status for task in made]
    assert status == ["timed_out", "timed_out", "running", "succeeded", "timed_out"]
    assert report["tasks_timed_out"] == 3
    assert report["fresh_active_retained"] + report["conflicts_skipped"] == 2
    assert [both.get_task(task).delivery_status for task in due] == ["failed", "delivered"]
    assert both.get_task(made[3]).delivery_status == "pending"
    assert both.doctor()["healthy"]


def test_what_becomes_stale_or_is_made_meanwhile_waits_for_the_next_run(
    both: Ledger, target: Place, clock: FakeClock
) -> None:
    stale(both, clock, [1000, 1001, 1002, 1003])
    fresh: list[str] = []
    with Ledger(target, clock=lambda: 1500.0) as other:

        def make() -> None:
            fresh.append(other.create_task(timeout_seconds=1).id)
            other.start_task(fresh[0])

        clock.now = 2000
        report = run(both, 2, progress=after(1, make))
    assert (report["tasks_timed_out"], report["active_examined"]) == (4, 4)
    assert both.get_task(fresh[0]).status == "running"
    assert run(both, 2)["tasks_timed_out"] == 1


@pytest.mark.usefixtures("with_pauses")
def test_others_write_between_batches_and_never_inside_one(both: Ledger, target: Place, clock: FakeClock) -> None:
    stale(both, clock, [1000.0 + at for at in range(6)])
    clock.now = 2000
    made: list[str] = []
    with Ledger(target, clock=lambda: 2000.0, busy_timeout_ms=0) as other:
        run(both, 2, progress=lambda done, total: made.append(other.create_task().id))
    assert len(made) == 3
    assert {both.get_task(task).status for task in made} == {"queued"}


def test_progress_tells_how_many_are_done_of_how_many(both: Ledger, clock: FakeClock) -> None:
    stale(both, clock, [1000.0 + at for at in range(5)])
    ended(both, clock, [1000, 1001, 1999.5])
    clock.now = 2000
    told: list[tuple[int, int]] = []
    run(both, 2, 600, 600, progress=lambda done, total: told.append((done, total)))
    assert told == [(2, 7), (4, 7), (5, 7), (7, 7)]


# -- how it is done ----------------------------------------------------------------------------------------


class Watch:
    """What an engine does: the most values of a statement, and the transactions that wrote."""

    def __init__(self, engine: sa.Engine) -> None:
        self.values = self.writing = self.transactions = 0
        self.texts: set[str] = set()
        self._wrote = False
        sa.event.listen(engine, "before_cursor_execute", self._statement)
        sa.event.listen(engine, "begin", self._begin)
        sa.event.listen(engine, "commit", self._commit)

    def _statement(self, connection: Any, cursor: Any, text: str, values: Any, context: Any, many: bool) -> None:
        assert not many
        self.values = max(self.values, len(values))
        self.texts.add(text)
        self._wrote = self._wrote or "UPDATE tsg_tasks" in text

    def _begin(self, connection: Any) -> None:
        self._wrote = False

    def _commit(self, connection: Any) -> None:
        self.transactions += 1
        self.writing += self._wrote


def test_fifty_thousand_are_closed_with_no_list_of_ids_and_a_transaction_a_batch(
    both: Ledger, target: Place, clock: FakeClock
) -> None:
    count, size = (50_000, 500) if isinstance(target, Path) else (5_000, 500)
    with engine_of(target) as engine:
        fill(engine, count)
    clock.now = 2000
    own = both._opened.engine
    assert isinstance(own, sa.Engine)
    watch = Watch(own)
    report = run(both, size)
    assert (report["tasks_timed_out"], report["batches"]) == (count, count // size)
    assert watch.writing == count // size
    assert watch.transactions <= count // size + 4
    assert watch.values < 20
    assert len(watch.texts) < 40
    assert max(map(len, watch.texts)) < 20_000
    found = both.doctor()
    assert (found["healthy"], found["task_status_counts"]["timed_out"]) == (True, count)


@pytest.mark.parametrize("options", [{}, {"isolation_level": "AUTOCOMMIT"}, {"poolclass": sa.NullPool}], ids=str)
def test_on_an_applications_engine_nothing_is_left_on_its_connection(
    host_engine: sa.Engine, clock: FakeClock, options: dict[str, Any]
) -> None:
    engine = sa.create_engine(host_engine.url, **options)
    ledger = Ledger(engine, clock=clock)
    listed = {"sqlite": "SELECT name FROM temp.sqlite_master", "postgresql": "SELECT relname FROM pg_class"}
    for age in (1000, 2000):
        stale(ledger, clock, [age, age + 1, age + 2])
        clock.now = age + 1000
        assert run(ledger, 2)["tasks_timed_out"] == 3
        with engine.connect() as connection:
            names = set(connection.exec_driver_sql(listed[engine.dialect.name]).scalars())
        assert not [name for name in names if "listed" in name]
    assert ledger.doctor()["healthy"]
    engine.dispose()


def test_the_same_connection_serves_many_runs(both: Ledger, clock: FakeClock) -> None:
    for turn in range(8):
        stale(both, clock, [1000.0 * (turn + 1) + at for at in range(3)])
        clock.now = 1000.0 * (turn + 1) + 900
        report = run(both, 2, 600, 0)
        assert (report["tasks_timed_out"], report["deliveries_failed"], report["batches"]) == (3, 3, 4)
    assert both.doctor()["healthy"]


def test_a_file_that_is_only_read_is_previewed_and_not_touched(path: Path, folder: Path, clock: FakeClock) -> None:
    with Ledger(path, clock=clock) as ledger:
        stale(ledger, clock, [1000, 1001, 1002])
    clock.now = 2000
    before = snapshot(folder)
    with Ledger(path, clock=clock, read_only=True) as ledger:
        preview = run(ledger, 2, dry_run=True)
        with pytest.raises(StateConflict):
            run(ledger, 2)
    assert snapshot(folder) == before
    assert (preview["tasks_timed_out"], preview["batches"], preview["conflicts_skipped"]) == (3, 2, 0)
    with Ledger(path, clock=clock) as ledger:
        assert {**preview, "dry_run": False, "applied": True} == run(ledger, 2)


def test_a_ledger_on_a_server_that_is_only_read_previews_and_applies_nothing(
    postgresql_url: sa.URL, clock: FakeClock
) -> None:
    with Ledger(postgresql_url, clock=clock) as ledger:
        stale(ledger, clock, [1000, 1001, 1002])
    clock.now = 2000
    before = contents(postgresql_url)
    with Ledger(postgresql_url, clock=clock, read_only=True) as ledger:
        assert run(ledger, 2, dry_run=True)["batches"] == 2
        with pytest.raises(StateConflict):
            run(ledger, 2)
    assert contents(postgresql_url) == before


# -- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size", [0, -1, True, False, "5", b"5", 1.5, 2.0, 2**31, 10**30, [], (), float("nan")], ids=repr
)
def test_a_size_is_a_whole_number_from_one_and_nothing_changes_for_another(
    both: Ledger, target: Place, clock: FakeClock, size: object
) -> None:
    stale(both, clock, [1000])
    clock.now = 2000
    before, readings = contents(target), clock.readings
    for dry_run in (True, False):
        with pytest.raises(InvalidInput):
            run(both, size, dry_run=dry_run)
    assert contents(target) == before
    assert clock.readings == readings


def test_a_malformed_argument_beside_a_size_is_refused_before_anything_is_done(
    both: Ledger, target: Place, clock: FakeClock
) -> None:
    stale(both, clock, [1000])
    clock.now = 2000
    before, readings = contents(target), clock.readings
    for options in (
        {"active": -1},
        {"delivery": "soon"},
        {"dry_run": 1},
        {"skip_conflicts": None},
        {"parent_id": "x"},
        {"progress": 5},
        {"progress": "x"},
    ):
        with pytest.raises(InvalidInput):
            run(both, 2, **options)
        assert contents(target) == before
    assert clock.readings == readings


def test_a_clock_that_gives_no_time_leaves_everything_as_it_was(both: Ledger, target: Place, clock: FakeClock) -> None:
    stale(both, clock, [1000])
    before = contents(target)
    clock.now = float("nan")
    with pytest.raises(InvalidInput):
        run(both, 2)
    assert contents(target) == before
    clock.now = 2000
    assert run(both, 2)["tasks_timed_out"] == 1


# -- at the command line -----------------------------------------------------------------------------------


def test_the_command_takes_a_size(both: Ledger, target: Place, clock: FakeClock) -> None:
    stale(both, clock, [1000, 1001, 1002])
    both.close()
    sized = ("--db", named(target), "reconcile", "--batch-size", "2", "--delivery-grace-seconds", "1e12")
    preview, applied = (call(*sized, *more).json for more in (("--dry-run",), ()))
    assert applied["ok"]
    assert (applied["reconcile"]["tasks_timed_out"], applied["reconcile"]["batches"]) == (3, 2)
    assert preview["reconcile"] == {**applied["reconcile"], "dry_run": True, "applied": False}


@pytest.mark.parametrize("size", ["0", "-1", "five", "1.5", "2147483648", ""])
def test_the_command_refuses_a_size_that_is_none(ledger: Ledger, path: Path, clock: FakeClock, size: str) -> None:
    stale(ledger, clock, [1000])
    ledger.close()
    before = contents(path)
    answer = call("--db", path, "reconcile", "--batch-size", size)
    assert (answer.status, answer.json) == (2, {"error": "InvalidInput", "ok": False})
    assert contents(path) == before


def test_the_command_of_a_process_of_its_own_refuses_a_size_of_nothing(both: Ledger, target: Place) -> None:
    ran = command("--db", named(target), "reconcile", "--batch-size", "0")
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, b'{"error":"InvalidInput","ok":false}\n', b"")


# -- with others -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("with_pauses")
def test_eight_threads_beat_while_a_run_goes(both: Ledger, target: Place) -> None:
    with engine_of(target) as engine:
        fill(engine, 400)
    with Ledger(target) as ledger:
        mine = [ledger.create_task().id for _ in range(8)]
        for task in mine:
            ledger.start_task(task)
        beaten = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(393, 401)]
        over = threading.Event()
        errors: list[BaseException] = []
        kept: list[str] = []
        begun = threading.Barrier(9)

        def beat(index: int) -> None:
            try:
                begun.wait()
                try:
                    ledger.heartbeat(beaten[index])
                    kept.append(beaten[index])
                except StateConflict as error:
                    if error.retriable:
                        raise
                while not over.is_set():
                    ledger.heartbeat(mine[index])
                    assert ledger.heartbeat_many([mine[index]]) == []
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=beat, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        begun.wait()
        try:
            report = run(ledger, 20, 3600, 3600)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert errors == []
        assert report["tasks_timed_out"] == 400 - len(kept)
        assert {ledger.get_task(task).status for task in mine} == {"running"}
        assert {ledger.get_task(task).status for task in kept} <= {"running"}
        assert ledger.doctor()["healthy"]


BEATING = """
def go(target, index, barrier, argument):
    ledger = Ledger(target, busy_timeout_ms=30_000)
    task = ledger.create_task().id
    ledger.start_task(task)
    barrier.wait()
    if index == 0:
        report = ledger.reconcile(active_grace_seconds=3600, delivery_grace_seconds=3600, batch_size=20)
        return report["tasks_timed_out"]
    for _ in range(30):
        ledger.heartbeat(task)
        assert ledger.heartbeat_many([task]) == []
    return ledger.get_task(task).version
"""


def test_processes_beat_while_one_of_them_runs(both: Ledger, target: Place) -> None:
    with engine_of(target) as engine:
        fill(engine, 300)
    assert processes(target, 4, BEATING) == [300, 61, 61, 61]
    assert both.doctor()["healthy"]


@pytest.mark.usefixtures("with_pauses")
def test_two_runs_at_once_share_the_work_and_do_nothing_twice(both: Ledger, target: Place, clock: FakeClock) -> None:
    with engine_of(target) as engine:
        fill(engine, 60)
    clock.now = 5000
    with Ledger(target, clock=clock) as other:
        reports: list[dict[str, Any]] = []
        one = run(both, 10, 600, 0, progress=after(2, lambda: reports.append(run(other, 7, 600, 0))))
    assert one["tasks_timed_out"] == 20
    assert reports[0]["tasks_timed_out"] == 40
    assert one["deliveries_failed"] + one["deliveries_not_applicable"] == 0
    assert reports[0]["deliveries_failed"] + reports[0]["deliveries_not_applicable"] == 60
    found = both.doctor()
    assert (found["healthy"], found["event_count"]) == (True, 240)


def test_a_writer_that_waits_comes_in_between_batches_long_before_the_end(
    path: Path, clock: FakeClock, with_pauses: None
) -> None:
    with Ledger(path, clock=clock) as ledger, Ledger(path, clock=clock) as other, engine_of(path) as engine:
        fill(engine, 4000)
        clock.now = 5000
        at: list[int] = []
        begun, over = threading.Event(), threading.Event()

        def write() -> None:
            begun.wait()
            while not over.is_set():
                other.create_task()
                at.append(done)

        done = 0

        def progress(so_far: int, total: int) -> None:
            nonlocal done
            done = so_far
            begun.set()

        writer = threading.Thread(target=write)
        writer.start()
        run(ledger, 200, progress=progress)
        over.set()
        writer.join()
        assert len(set(at)) > 3


def test_a_lock_that_another_takes_after_the_last_batch_costs_no_report(path: Path, clock: FakeClock) -> None:
    with Ledger(path, clock=clock, busy_timeout_ms=50) as ledger:
        stale(ledger, clock, [1000.0, 1001.0])
        ended(ledger, clock, [1000.0, 1001.0])
        clock.now = 5000
        holder = raw(path)

        def progress(done: int, total: int) -> None:
            if done == total == 4:
                holder.execute("BEGIN IMMEDIATE")

        report = run(ledger, 2, 600, 600, progress=progress)
        holder.close()
        assert (report["tasks_timed_out"], report["deliveries_failed"]) == (2, 2)


def test_the_functions_refuse_by_themselves_what_a_ledger_refuses(target: Place, clock: FakeClock) -> None:
    policy = tsg.ReconcilePolicy()
    with engine_of(target) as engine, engine.connect() as connection:
        calls: list[Callable[..., object]] = [tsg.reconcile.preview, tsg.reconcile.apply]
        for call_it in calls:
            for wrong in (0, None, "yes", 1.0):
                with pytest.raises(InvalidInput):
                    call_it(connection, policy, now=1.0, skip_conflicts=wrong)
        for size in (0, -1, True, "5", 1.5, 2**31):
            with pytest.raises(InvalidInput):
                tsg.reconcile.preview(connection, policy, now=1.0, batch_size=size)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput):
            tsg.reconcile.apply(connection, policy, now=1.0, progress="bar")  # type: ignore[arg-type]
        with pytest.raises(InvalidInput):
            tsg.doctor.examine(connection, progress="bar")  # type: ignore[arg-type]
