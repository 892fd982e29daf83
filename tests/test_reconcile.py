"""Reconcile: the sets against the verbs, what it leaves alone, what it refuses, and who may write meanwhile.

With ``TSG_NIGHTLY=1`` in the environment the comparison with the verbs takes many more ledgers, other ones every time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy.orm import Session

from tests.conftest import FakeClock, raw, snapshot, tsg
from tsg import InvalidInput, Ledger, ReconcilePolicy, StateConflict, Task, TaskNotFound, reconcile, reconcile_restart
from tsg.ledger import TaskRecord

NIGHTLY = os.environ.get("TSG_NIGHTLY") == "1"
# Hundreds of files are made here, and nothing is about the disk.
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

KEYS = (
    "dry_run",
    "applied",
    "active_examined",
    "tasks_timed_out",
    "fresh_active_retained",
    "pending_delivery_examined",
    "deliveries_failed",
    "deliveries_not_applicable",
    "pending_delivery_retained",
)
MISSING = "00000000-0000-4000-8000-000000000000"


def run(ledger: Ledger, active: Any = 600, delivery: Any = 600, **options: Any) -> dict[str, Any]:
    return dict(ledger.reconcile(active_grace_seconds=active, delivery_grace_seconds=delivery, **options))


def counts(**changed: Any) -> dict[str, Any]:
    return {**dict.fromkeys(KEYS, 0), "dry_run": False, "applied": True, **changed}


def as_preview(report: dict[str, Any]) -> dict[str, Any]:
    return {**report, "dry_run": True, "applied": False}


def contents(path: Path) -> tuple[list[str], list[str]]:
    """Every row of both tables, but for the keys; the types show."""
    columns = "delivery_required, expects_heartbeat, payload_hash, timeout_seconds, created_at, started_at, updated_at"
    more = "ended_at, deadline_at, delivery_updated_at, terminal_code, delivery_code, version"
    connection = raw(path)
    try:
        tasks = connection.execute(
            f"SELECT id, parent_id, status, delivery_status, {columns}, {more} FROM tsg_tasks ORDER BY id"
        )
        events = connection.execute(
            "SELECT id, number, kind, from_status, to_status, occurred_at, code "
            "FROM tsg_task_events LEFT JOIN tsg_tasks ON pk = task_pk ORDER BY id, task_pk, number"
        )
        return [repr(row) for row in tasks.fetchall()], [repr(row) for row in events.fetchall()]
    finally:
        connection.close()


def history(path: Path, task: str) -> list[tuple[Any, ...]]:
    connection = raw(path)
    try:
        return connection.execute(
            "SELECT number, to_status, occurred_at, code FROM tsg_task_events "
            "JOIN tsg_tasks ON pk = task_pk WHERE id = ? ORDER BY number",
            (task,),
        ).fetchall()
    finally:
        connection.close()


def damage(path: Path, statement: str, *parameters: object) -> None:
    """Write round every guard, and put the guards back."""
    connection = raw(path)
    try:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute(statement, parameters)
        for _, sql in triggers:
            connection.execute(sql)
    finally:
        connection.close()


@contextmanager
def plain_engine(path: Path) -> Iterator[sa.Engine]:
    """An application's own engine, with nothing of ours on it."""
    engine = sa.create_engine(f"sqlite:///{path}")
    try:
        yield engine
    finally:
        engine.dispose()


def running(ledger: Ledger, clock: FakeClock, at: float, *, beat: float | None = None, **fields: Any) -> str:
    clock.now = at
    task = ledger.create_task(**fields).id
    ledger.start_task(task)
    if beat is not None:
        clock.now = beat
        ledger.heartbeat(task)
    return task


def ended(ledger: Ledger, clock: FakeClock, at: float, *, status: str = "succeeded", **fields: Any) -> str:
    task = running(ledger, clock, at, **fields)
    ledger.close_task(task, status)
    return task


# -- the sets against the verbs --------------------------------------------------------------------------

# Few moments, so that they often meet.
moments = st.integers(0, 7).map(lambda seconds: 1000.0 + seconds)
plans = st.fixed_dictionaries(
    {
        "at": st.lists(moments, min_size=5, max_size=5).map(sorted),
        "verbs": st.sampled_from(["s", "s", "s", "sb", "sb", "sbb", "sc", "sbc", "c", "scd", "", "sbcd"]),
        "timeout_seconds": st.sampled_from([None, 0, 1, 2, 3, 5, 600]),
        "delivery_required": st.booleans(),
        "silent": st.booleans(),
        "parent": st.sampled_from([None, None, 0, 1, 2]),
        "status": st.sampled_from(["succeeded", "failed", "timed_out", "cancelled"]),
        "delivered": st.booleans(),
    }
)
graces = st.sampled_from([0, 0.5, 1, 2, 3, 5, 1e9])


def carry_out(ledger: Ledger, clock: FakeClock, made: list[str], plan: dict[str, Any]) -> None:
    parent = None if plan["parent"] is None or plan["parent"] >= len(made) else made[plan["parent"]]
    timeout = plan["timeout_seconds"]
    at = iter(plan["at"])
    floor = 0.0
    if parent is not None:
        before = ledger.get_task(parent)
        floor = max(before.updated_at, before.ended_at or 0.0, before.delivery_updated_at)
    clock.now = max(next(at), floor)
    task = ledger.create_task(
        task_id=f"{len(made):08x}-0000-4000-8000-000000000000",
        parent_id=parent,
        timeout_seconds=timeout,
        delivery_required=plan["delivery_required"],
        expects_heartbeat=timeout is None or not plan["silent"],
    ).id
    made.append(task)
    for verb in plan["verbs"]:
        clock.now = max(next(at), clock.now)
        if verb == "s":
            ledger.start_task(task)
        elif verb == "b":
            ledger.heartbeat(task)
        elif verb == "c":
            ledger.close_task(task, plan["status"])
        else:
            closed = "delivered" if plan["delivered"] else "failed"
            ledger.set_delivery(task, closed if plan["delivery_required"] else "not_applicable")


class Model:
    """Section 5 of the contract, a row at a time, by the verbs."""

    def __init__(self, ledger: Ledger, now: float, active: float, delivery: float, *, skip: bool) -> None:
        self.ledger, self.now, self.active, self.delivery, self.skip = ledger, now, active, delivery, skip
        self.report = counts()
        self.conflicts = 0

    def reason_to_end(self, task: TaskRecord) -> str | None:
        if task.status != "running":
            return None
        if task.deadline_at is not None and task.deadline_at <= self.now:
            return "deadline_exceeded"
        if task.expects_heartbeat and task.updated_at <= self.now - self.active:
            return "restart_stale"
        return None

    def go(self, tasks: list[TaskRecord]) -> dict[str, Any]:
        for task in tasks:
            if task.status in ("queued", "running"):
                self.report["active_examined"] += 1
                task = self.time_out(task)
            if task.status not in ("queued", "running") and task.delivery_status == "pending":
                self.report["pending_delivery_examined"] += 1
                self.close_delivery(task)
        if self.skip:
            self.report["conflicts_skipped"] = self.conflicts
        return self.report

    def time_out(self, task: TaskRecord) -> TaskRecord:
        reason = self.reason_to_end(task)
        if reason is None:
            self.report["fresh_active_retained"] += 1
            return task
        try:
            task = self.ledger.close_task(task.id, "timed_out", code=reason)
        except StateConflict:
            if not self.skip:
                raise
            self.conflicts += 1
            return task
        self.report["tasks_timed_out"] += 1
        return task

    def close_delivery(self, task: TaskRecord) -> None:
        assert task.ended_at is not None
        if task.ended_at > self.now - self.delivery:
            self.report["pending_delivery_retained"] += 1
        elif task.delivery_required:
            self.ledger.set_delivery(task.id, "failed", code="delivery_grace_expired")
            self.report["deliveries_failed"] += 1
        else:
            self.ledger.set_delivery(task.id, "not_applicable", code="internal_task")
            self.report["deliveries_not_applicable"] += 1


@settings(
    max_examples=3000 if NIGHTLY else 60,
    deadline=None,
    derandomize=not NIGHTLY,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    plans=st.lists(plans, min_size=5, max_size=8),
    now=st.sampled_from([1003.0, 1004.0, 1005.0, 1006.0, 1007.0, 1008.0, 1010.0]),
    active=graces,
    delivery=graces,
    skip=st.booleans(),
    scope=st.sampled_from([None, None, None, 0, 1]),
)
def test_a_set_based_run_does_row_by_row_what_the_verbs_do(
    tmp_path_factory: pytest.TempPathFactory,
    plans: list[dict[str, Any]],
    now: float,
    active: float,
    delivery: float,
    skip: bool,
    scope: int | None,
) -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        sets, verbs = Path(folder, "sets.sqlite"), Path(folder, "verbs.sqlite")
        template = tmp_path_factory.getbasetemp() / "template.sqlite"
        if not template.exists():
            Ledger(template).close()
        shutil.copyfile(template, sets)
        clock = FakeClock()
        made: list[str] = []
        with Ledger(sets, clock=clock) as ledger:
            for plan in plans:
                carry_out(ledger, clock, made, plan)
        shutil.copyfile(sets, verbs)
        clock.now = now
        parent = None if scope is None else made[scope % len(made)]
        options = {"skip_conflicts": skip, "parent_id": parent}
        before = contents(sets)
        with Ledger(verbs, clock=clock) as ledger:
            tasks = [ledger.get_task(task) for task in made]
            try:
                modelled: dict[str, Any] | None = Model(ledger, now, active, delivery, skip=skip).go(
                    [task for task in tasks if parent is None or task.parent_id == parent]
                )
            except StateConflict:
                modelled = None
        with Ledger(sets, clock=clock) as ledger:
            if modelled is None:
                for dry_run in (True, False):
                    with pytest.raises(StateConflict):
                        run(ledger, active, delivery, dry_run=dry_run, **options)
                    assert contents(sets) == before
                return
            readings = clock.readings
            preview = run(ledger, active, delivery, dry_run=True, **options)
            assert contents(sets) == before
            applied = run(ledger, active, delivery, **options)
            assert clock.readings == readings + 2
            assert applied == modelled
            assert preview == as_preview(applied)
            after = contents(sets)
            assert after == contents(verbs)
            assert ledger.doctor()["healthy"]
            again = run(ledger, active, delivery, **options)
            assert (again["tasks_timed_out"], again["deliveries_failed"], again["deliveries_not_applicable"]) == (
                0,
                0,
                0,
            )
            assert again["fresh_active_retained"] + again.get("conflicts_skipped", 0) == again["active_examined"]
            assert again["pending_delivery_retained"] == again["pending_delivery_examined"]
            assert contents(sets) == after


def test_the_keys_of_a_report_are_these_and_no_others(ledger: Ledger) -> None:
    assert tuple(run(ledger)) == KEYS
    assert tuple(run(ledger, dry_run=True)) == KEYS
    assert tuple(run(ledger, skip_conflicts=True)) == (*KEYS, "conflicts_skipped")
    assert tuple(run(ledger, skip_conflicts=True, dry_run=True)) == (*KEYS, "conflicts_skipped")
    assert run(ledger) == counts()
    assert all(type(run(ledger)[key]) is int for key in KEYS[2:])


# -- who is timed out ------------------------------------------------------------------------------------


def test_three_tasks_that_a_dead_process_left_are_found_by_a_new_one(
    ledger: Ledger, path: Path, clock: FakeClock
) -> None:
    tasks = [running(ledger, clock, 1000 + number, beat=1010) for number in range(3)]
    ledger.close()
    preview = json.loads(tsg("--db", path, "reconcile", "--dry-run").stdout)["reconcile"]
    applied = json.loads(tsg("--db", path, "reconcile").stdout)["reconcile"]
    assert applied["tasks_timed_out"] == preview["tasks_timed_out"] == 3
    assert preview == as_preview(applied)
    assert tsg("--db", path, "doctor").returncode == 0
    with Ledger(path) as reopened:
        assert {reopened.get_task(task).status for task in tasks} == {"timed_out"}


def test_a_worker_that_died_before_its_first_beat_is_timed_out(ledger: Ledger, path: Path, clock: FakeClock) -> None:
    long_ago = running(ledger, clock, 1000)
    just_now = running(ledger, clock, 1500)
    untouched = ledger.get_task(just_now)
    clock.now = 1601
    assert run(ledger)["tasks_timed_out"] == 1
    assert ledger.get_task(long_ago).terminal_code == "restart_stale"
    assert history(path, long_ago)[-1] == (2, "timed_out", 1601.0, "restart_stale")
    assert ledger.get_task(just_now) == untouched


def test_a_task_that_beats_is_left_until_its_deadline_and_then_ended_by_it(
    ledger: Ledger, path: Path, clock: FakeClock
) -> None:
    free = running(ledger, clock, 1000, beat=11_795)
    bound = running(ledger, clock, 1000, beat=11_795, timeout_seconds=10_800.5)
    before = contents(path)
    clock.now = 11_800
    assert run(ledger)["tasks_timed_out"] == 0
    assert contents(path) == before
    clock.now = 11_800.5
    assert run(ledger)["tasks_timed_out"] == 1
    assert ledger.get_task(free).status == "running"
    assert ledger.get_task(bound).terminal_code == "deadline_exceeded"


def test_the_deadline_is_the_reason_where_silence_is_one_too(ledger: Ledger, clock: FakeClock) -> None:
    task = running(ledger, clock, 1000, timeout_seconds=10)
    clock.now = 9000
    run(ledger)
    assert ledger.get_task(task).terminal_code == "deadline_exceeded"


@pytest.mark.parametrize(("now", "ends"), [(1009.5, False), (1010, True), (1010.5, True)])
def test_silence_and_deadline_and_open_delivery_all_count_from_their_very_moment(
    ledger: Ledger, clock: FakeClock, now: float, ends: bool
) -> None:
    silent = running(ledger, clock, 1000)
    bound = running(ledger, clock, 1000, timeout_seconds=10)
    required = ended(ledger, clock, 1000)
    internal = ended(ledger, clock, 1000, delivery_required=False)
    clock.now = now
    report = run(ledger, 10, 10)
    assert [ledger.get_task(task).status == "timed_out" for task in (silent, bound)] == [ends, ends]
    assert ledger.get_task(required).delivery_status == ("failed" if ends else "pending")
    assert ledger.get_task(internal).delivery_status == ("not_applicable" if ends else "pending")
    assert report["pending_delivery_examined"] == (4 if ends else 2)


def test_a_task_that_is_to_be_silent_is_ended_by_its_deadline_alone(ledger: Ledger, clock: FakeClock) -> None:
    task = running(ledger, clock, 1000, timeout_seconds=5000, expects_heartbeat=False)
    clock.now = 5999
    assert run(ledger, 0, 0) == counts(active_examined=1, fresh_active_retained=1)
    clock.now = 6000
    assert run(ledger)["tasks_timed_out"] == 1
    assert ledger.get_task(task).terminal_code == "deadline_exceeded"


def test_a_task_that_beat_once_may_not_be_silent_any_more(ledger: Ledger, clock: FakeClock) -> None:
    task = running(ledger, clock, 1000, beat=1001, timeout_seconds=5000, expects_heartbeat=False)
    clock.now = 1601
    assert run(ledger)["tasks_timed_out"] == 1
    assert ledger.get_task(task).terminal_code == "restart_stale"


def test_a_queued_task_is_never_too_old(ledger: Ledger, clock: FakeClock) -> None:
    task = ledger.create_task(timeout_seconds=0)
    clock.now = 1e12
    assert run(ledger, 0, 0) == counts(active_examined=1, fresh_active_retained=1)
    assert ledger.get_task(task.id) == task


def test_a_delivery_of_nine_days_fails_once(ledger: Ledger, path: Path, clock: FakeClock) -> None:
    task = ended(ledger, clock, 1000)
    clock.now += 9 * 86_400
    assert run(ledger) == counts(pending_delivery_examined=1, deliveries_failed=1)
    after = contents(path)
    assert run(ledger) == counts()
    assert contents(path) == after
    assert ledger.get_task(task).delivery_code == "delivery_grace_expired"
    assert ledger.get_task(task).status == "succeeded"


def test_a_task_timed_out_in_the_run_has_its_grace_for_the_delivery_from_then(
    ledger: Ledger, path: Path, clock: FakeClock
) -> None:
    task = running(ledger, clock, 1000)
    clock.now = 2000
    assert run(ledger, 10, 10) == counts(
        active_examined=1, tasks_timed_out=1, pending_delivery_examined=1, pending_delivery_retained=1
    )
    assert ledger.get_task(task).version == 2
    clock.now = 2010
    assert run(ledger, 10, 10)["deliveries_failed"] == 1
    assert [event[:2] for event in history(path, task)[2:]] == [(2, "timed_out"), (3, "failed")]


def test_without_a_grace_a_run_times_out_and_closes_the_delivery_at_one_time(
    ledger: Ledger, path: Path, clock: FakeClock
) -> None:
    required = running(ledger, clock, 1000)
    internal = running(ledger, clock, 1000, delivery_required=False)
    clock.now = 1_760_000_000.25
    preview = run(ledger, 0, 0, dry_run=True)
    applied = run(ledger, 0, 0)
    assert applied == counts(
        active_examined=2,
        tasks_timed_out=2,
        pending_delivery_examined=2,
        deliveries_failed=1,
        deliveries_not_applicable=1,
    )
    assert preview == as_preview(applied)
    for task in (required, internal):
        assert ledger.get_task(task).version == 3
        assert [event[2] for event in history(path, task)[2:]] == [clock.now, clock.now]
    assert ledger.doctor()["healthy"]


def test_success_is_never_guessed_and_late_words_change_nothing(ledger: Ledger, path: Path, clock: FakeClock) -> None:
    task = running(ledger, clock, 1000)
    clock.now = 2000
    run(ledger)
    after = contents(path)
    for late in (
        lambda: ledger.heartbeat(task),
        lambda: ledger.start_task(task),
        lambda: ledger.close_task(task, "succeeded", code="completed"),
    ):
        with pytest.raises(StateConflict):
            late()
    assert contents(path) == after
    run(ledger, 0, 0)
    assert ledger.get_task(task).delivery_status == "failed"
    with pytest.raises(StateConflict):
        ledger.set_delivery(task, "delivered")
    assert ledger.get_task(task).status == "timed_out"


def test_a_run_with_nothing_to_do_writes_nothing(ledger: Ledger, path: Path, clock: FakeClock) -> None:
    running(ledger, clock, 1000)
    ended(ledger, clock, 1000)
    watcher = raw(path)
    try:
        before = watcher.execute("PRAGMA data_version").fetchone()
        first = run(ledger)
        assert run(ledger) == first
        assert watcher.execute("PRAGMA data_version").fetchone() == before
        running(ledger, clock, 1000)
        assert watcher.execute("PRAGMA data_version").fetchone() != before
    finally:
        watcher.close()


def test_a_preview_leaves_the_bytes_of_a_ledger_in_use(ledger: Ledger, folder: Path, clock: FakeClock) -> None:
    running(ledger, clock, 1000)
    clock.now = 9000

    def bytes_kept() -> dict[str, bytes]:
        return {name: entry[0] for name, entry in snapshot(folder).items() if not name.endswith("-shm")}

    before = bytes_kept()
    preview = run(ledger, dry_run=True)
    assert bytes_kept() == before
    assert as_preview(run(ledger)) == preview
    assert bytes_kept() != before


# -- what is refused, or passed over ---------------------------------------------------------------------

STALE, DUE, OTHER = "10000000-0000-4000-8000-000000000000", "20000000-0000-4000-8000-000000000000", "3" * 32

ON_A_RUNNING_ROW = [
    "terminal_code = 'completed'",
    "delivery_code = 'internal_task'",
    "delivery_status = 'failed'",
    "payload_hash = 'x'",
    "version = -1",
    "version = 0",
    "version = 'many'",
    "version = 1.5",
    "timeout_seconds = 7",
    "timeout_seconds = -1",
    "deadline_at = 1500",
    "created_at = 1001",
    "created_at = 5000",
    "started_at = 5000",
    "created_at = 'soon'",
    "delivery_updated_at = 1001",
    "delivery_updated_at = 5000",
    "delivery_required = 7",
    "ended_at = 1000",
]
ON_AN_ENDED_ROW = [
    "terminal_code = 'worker_failed'",
    "terminal_code = 'whatever'",
    "delivery_code = 'internal_task'",
    "payload_hash = 'X'",
    "version = 0",
    "updated_at = 1001",
    "updated_at = 5000",
    "created_at = 5000",
    "started_at = 5000",
    "started_at = NULL",
    "created_at = 'soon'",
    "delivery_updated_at = 1001",
    "delivery_updated_at = 5000",
    "delivery_required = 7",
    "deadline_at = 1500",
]


def set_on(task: str, assignment: str) -> tuple[str, str]:
    return f"UPDATE tsg_tasks SET {assignment} WHERE id = ?", task


def event_on(task: str, number: int, kind: str, values: str) -> tuple[str, str]:
    columns = "task_pk, number, kind, from_status, to_status, occurred_at, code"
    return (
        f"INSERT INTO tsg_task_events ({columns}) SELECT pk, {number}, '{kind}', {values} FROM tsg_tasks WHERE id = ?",
        task,
    )


def name_of(harm: tuple[str, str]) -> str:
    statement, task = harm
    what = statement.partition(" SET ")[2].partition(" WHERE ")[0] or statement.partition("SELECT pk, ")[2]
    return f"{'running' if task == STALE else 'ended'}: {what.partition(' FROM ')[0]}"


DAMAGES = [
    *(set_on(STALE, assignment) for assignment in ON_A_RUNNING_ROW),
    *(set_on(DUE, assignment) for assignment in ON_AN_ENDED_ROW),
    # The last of each three is the very event that the run would write.
    event_on(STALE, 2, "task_transition", "'running', 'failed', 1200.0, NULL"),
    event_on(STALE, 2, "task_transition", "'running', 'timed_out', 1200.0, 'restart_stale'"),
    event_on(STALE, 2, "task_transition", "'running', 'timed_out', 2000.0, 'restart_stale'"),
    event_on(DUE, 3, "delivery_transition", "'pending', 'delivered', 1200.0, NULL"),
    event_on(DUE, 3, "delivery_transition", "'pending', 'failed', 1200.0, 'delivery_grace_expired'"),
    event_on(DUE, 3, "delivery_transition", "'pending', 'failed', 2000.0, 'delivery_grace_expired'"),
]


@pytest.mark.parametrize("harm", DAMAGES, ids=name_of)
def test_a_damaged_row_that_is_to_be_changed_holds_up_the_run_or_is_passed_over(
    ledger: Ledger, path: Path, clock: FakeClock, harm: tuple[str, str]
) -> None:
    for task in (STALE, OTHER):
        running(ledger, clock, 1000, task_id=task)
    ended(ledger, clock, 1000, task_id=DUE)
    internal = ended(ledger, clock, 1000, delivery_required=False)
    damage(path, *harm)
    before = contents(path)
    clock.now = 2000
    for dry_run in (True, False):
        with pytest.raises(StateConflict):
            run(ledger, 600, 600, dry_run=dry_run)
        assert contents(path) == before
    preview = run(ledger, 600, 600, skip_conflicts=True, dry_run=True)
    assert contents(path) == before
    applied = run(ledger, 600, 600, skip_conflicts=True)
    assert preview == as_preview(applied)
    is_stale = harm[1] == STALE
    assert applied["conflicts_skipped"] == 1
    assert applied["tasks_timed_out"] == (1 if is_stale else 2)
    assert (applied["deliveries_failed"], applied["deliveries_not_applicable"]) == (1 if is_stale else 0, 1)
    kept, was = ({line for part in each for line in part if harm[1] in line} for each in (contents(path), before))
    assert kept == was
    assert ledger.get_task(OTHER).status == "timed_out"
    assert ledger.get_task(internal).delivery_status == "not_applicable"
    again = run(ledger, 600, 600, skip_conflicts=True)
    assert (again["conflicts_skipped"], again["tasks_timed_out"], again["deliveries_failed"]) == (1, 0, 0)


@pytest.mark.parametrize("harm", [set_on(STALE, "payload_hash = 'x'"), set_on(DUE, "payload_hash = 'x'")], ids=name_of)
def test_a_damaged_row_that_stays_as_it_is_holds_up_nothing(
    ledger: Ledger, path: Path, clock: FakeClock, harm: tuple[str, str]
) -> None:
    other = running(ledger, clock, 1000)
    running(ledger, clock, 1900, task_id=STALE)
    ended(ledger, clock, 1900, task_id=DUE)
    damage(path, *harm)
    clock.now = 2000
    preview = run(ledger, dry_run=True)
    applied = run(ledger)
    assert preview == as_preview(applied)
    assert applied["tasks_timed_out"] == 1
    assert ledger.get_task(other).status == "timed_out"


def test_a_count_of_beats_that_has_no_next_number_is_a_conflict_in_preview_as_in_apply(
    ledger: Ledger, path: Path, clock: FakeClock
) -> None:
    running(ledger, clock, 1000, task_id=STALE)
    running(ledger, clock, 1000, task_id=OTHER)
    damage(path, *set_on(STALE, f"version = {2**63 - 1}"))
    clock.now = 2000
    preview = run(ledger, skip_conflicts=True, dry_run=True)
    assert preview == as_preview(run(ledger, skip_conflicts=True))
    assert ledger.get_task(OTHER).status == "timed_out"


def test_a_beat_from_the_future_refuses_the_whole_run_where_its_task_is_to_be_changed(
    ledger: Ledger, path: Path, clock: FakeClock
) -> None:
    other = running(ledger, clock, 1000)
    ahead = running(ledger, clock, 1000, beat=5600, timeout_seconds=100)
    before = contents(path)
    clock.now = 2000
    for dry_run in (True, False):
        with pytest.raises(StateConflict):
            run(ledger, dry_run=dry_run)
        assert contents(path) == before
    preview = run(ledger, dry_run=True, skip_conflicts=True)
    applied = run(ledger, skip_conflicts=True)
    assert preview == as_preview(applied)
    assert (applied["tasks_timed_out"], applied["conflicts_skipped"]) == (1, 1)
    assert ledger.get_task(other).status == "timed_out"
    assert ledger.get_task(ahead).updated_at == 5600
    with pytest.raises(StateConflict):
        ledger.heartbeat(ahead)
    assert ledger.get_task(ahead).updated_at == 5600


def test_a_beat_from_the_future_of_a_task_that_stays_holds_up_nothing(ledger: Ledger, clock: FakeClock) -> None:
    other = running(ledger, clock, 1000)
    ahead = [running(ledger, clock, 1000, beat=5600), running(ledger, clock, 1000, beat=5600, timeout_seconds=9000)]
    later = [ended(ledger, clock, 5600), ledger.create_task().id]
    clock.now = 2000
    before = [ledger.get_task(task) for task in ahead + later]
    assert run(ledger, 0, 600) == counts(
        active_examined=4,
        tasks_timed_out=1,
        fresh_active_retained=3,
        pending_delivery_examined=2,
        pending_delivery_retained=2,
    )
    assert [ledger.get_task(task) for task in ahead + later] == before
    assert ledger.get_task(other).status == "timed_out"


def test_the_command_passes_over_conflicts_and_counts_them(ledger: Ledger, path: Path, clock: FakeClock) -> None:
    running(ledger, clock, 1000, task_id=STALE)
    running(ledger, clock, 1000)
    ledger.close()
    damage(path, *set_on(STALE, "payload_hash = 'x'"))
    refused = tsg("--db", path, "reconcile", "--dry-run")
    assert (refused.returncode, refused.stdout) == (2, b'{"error":"StateConflict","ok":false}\n')
    preview, applied = (
        json.loads(tsg("--db", path, "reconcile", "--skip-conflicts", *more).stdout)["reconcile"]
        for more in (("--dry-run",), ())
    )
    assert preview == as_preview(applied)
    assert (applied["tasks_timed_out"], applied["conflicts_skipped"]) == (1, 1)


# -- arguments -------------------------------------------------------------------------------------------


def test_a_run_may_be_kept_to_the_direct_children_of_one_task(ledger: Ledger, clock: FakeClock) -> None:
    parent = running(ledger, clock, 1000)
    child = running(ledger, clock, 1000, parent_id=parent)
    due = ended(ledger, clock, 1000, parent_id=parent)
    grandchild = running(ledger, clock, 1000, parent_id=child)
    stranger = ended(ledger, clock, 1000)
    clock.now = 2000
    preview = run(ledger, parent_id=parent.upper(), dry_run=True)
    applied = run(ledger, parent_id=uuid.UUID(parent))
    assert applied == counts(
        active_examined=1,
        tasks_timed_out=1,
        pending_delivery_examined=2,
        deliveries_failed=1,
        pending_delivery_retained=1,
    )
    assert preview == as_preview(applied)
    assert ledger.get_task(child).status == "timed_out"
    assert ledger.get_task(due).delivery_status == "failed"
    assert {ledger.get_task(task).status for task in (parent, grandchild)} == {"running"}
    assert ledger.get_task(stranger).delivery_status == "pending"
    assert run(ledger, parent_id=stranger) == counts()


def test_a_conflict_among_others_children_does_not_matter(ledger: Ledger, path: Path, clock: FakeClock) -> None:
    parent = running(ledger, clock, 1000)
    running(ledger, clock, 1000, parent_id=parent)
    running(ledger, clock, 1000, task_id=STALE)
    damage(path, *set_on(STALE, "payload_hash = 'x'"))
    clock.now = 2000
    assert run(ledger, parent_id=parent)["tasks_timed_out"] == 1
    assert run(ledger, parent_id=parent, skip_conflicts=True)["conflicts_skipped"] == 0


@pytest.mark.parametrize("dry_run", [True, False])
def test_the_children_of_a_task_that_is_not_there_are_not_found(ledger: Ledger, dry_run: bool) -> None:
    with pytest.raises(TaskNotFound):
        run(ledger, parent_id=MISSING, dry_run=dry_run)
    for malformed in ("x", "", 7, b"0" * 32):
        with pytest.raises(InvalidInput):
            run(ledger, parent_id=malformed, dry_run=dry_run)


@pytest.mark.parametrize("grace", [-1, -1e-9, float("nan"), float("inf"), "x", "", None, [], True, False, 10**400])
def test_a_grace_is_a_finite_number_that_is_not_negative(ledger: Ledger, clock: FakeClock, grace: object) -> None:
    for refused in (
        lambda: ReconcilePolicy(active_grace_seconds=grace),
        lambda: ReconcilePolicy(600, grace),
        lambda: run(ledger, grace, 0),
        lambda: run(ledger, 0, grace, dry_run=True),
    ):
        with pytest.raises(InvalidInput):
            refused()
    assert clock.readings == 0


def test_a_policy_takes_its_graces_in_their_order_and_keeps_them() -> None:
    policy = ReconcilePolicy("30", b"60")
    assert policy == ReconcilePolicy(active_grace_seconds=30.0, delivery_grace_seconds=60.0)
    assert (type(policy.active_grace_seconds), type(policy.delivery_grace_seconds)) == (float, float)
    assert ReconcilePolicy() == ReconcilePolicy(600, 600)
    assert len({policy, ReconcilePolicy(30, 60)}) == 1
    with pytest.raises(AttributeError):
        policy.active_grace_seconds = 1


@pytest.mark.parametrize("flag", [0, 1, None, "yes", [], 1.0])
def test_a_switch_is_true_or_false(ledger: Ledger, clock: FakeClock, flag: object) -> None:
    for refused in (lambda: run(ledger, dry_run=flag), lambda: run(ledger, skip_conflicts=flag)):
        with pytest.raises(InvalidInput):
            refused()
    assert clock.readings == 0


@pytest.mark.parametrize("now", [float("nan"), float("inf"), None, "x", True])
def test_a_run_needs_a_finite_time(ledger: Ledger, path: Path, clock: FakeClock, now: object) -> None:
    running(ledger, clock, 1000)
    before = contents(path)
    clock.now = now
    for dry_run in (True, False):
        with pytest.raises(InvalidInput):
            run(ledger, 0, 0, dry_run=dry_run)
    assert contents(path) == before


def test_what_a_restart_calls_does_the_same(ledger: Ledger, clock: FakeClock) -> None:
    running(ledger, clock, 1000)
    clock.now = 1030
    preview = reconcile_restart(ledger, ReconcilePolicy(30, 60), dry_run=True)
    applied = reconcile_restart(ledger, ReconcilePolicy(30, 60))
    assert applied == counts(
        active_examined=1, tasks_timed_out=1, pending_delivery_examined=1, pending_delivery_retained=1
    )
    assert preview == as_preview(applied)
    for policy in (None, {}, (30, 60), 30):
        with pytest.raises(InvalidInput):
            reconcile_restart(ledger, policy)


def test_a_ledger_opened_for_reading_previews_and_applies_nothing(path: Path, ledger: Ledger, clock: FakeClock) -> None:
    running(ledger, clock, 1000)
    ledger.close()
    clock.now = 2000
    with Ledger(path, clock=clock, read_only=True) as reader:
        assert run(reader, dry_run=True)["tasks_timed_out"] == 1
        with pytest.raises(StateConflict):
            run(reader)


# -- in the caller's own transaction ---------------------------------------------------------------------


def test_a_connection_of_the_callers_own_previews_and_applies_and_leaves_the_commit_to_it(
    ledger: Ledger, path: Path, clock: FakeClock
) -> None:
    task = running(ledger, clock, 1000)
    before = contents(path)
    policy = ReconcilePolicy(30, 0)
    with plain_engine(path) as engine:
        with engine.connect() as connection:
            preview = reconcile.preview(connection, policy, now=2000)
            applied = reconcile.apply(connection, policy, now=2000)
            assert applied == counts(
                active_examined=1, tasks_timed_out=1, pending_delivery_examined=1, deliveries_failed=1
            )
            assert preview == as_preview(dict(applied))
            connection.rollback()
        assert contents(path) == before
        with engine.begin() as connection:
            assert reconcile.apply(connection, policy, now="2000") == applied
    assert ledger.get_task(task).ended_at == 2000.0
    assert ledger.doctor()["healthy"]


def test_on_a_connection_the_clock_stands_in_where_no_time_is_given(
    ledger: Ledger, path: Path, clock: FakeClock
) -> None:
    task = running(ledger, clock, 1000)
    with plain_engine(path) as engine, engine.begin() as connection:
        assert reconcile.preview(connection, ReconcilePolicy(), clock=lambda: 1599.0)["tasks_timed_out"] == 0
        assert reconcile.apply(connection, ReconcilePolicy(), clock=lambda: 1600.0)["tasks_timed_out"] == 1
    assert ledger.get_task(task).ended_at == 1600.0
    with plain_engine(path) as engine, engine.connect() as connection:
        for now in (float("nan"), "x", True, 10**400):
            with pytest.raises(InvalidInput):
                reconcile.preview(connection, ReconcilePolicy(), now=now)
        with pytest.raises(InvalidInput):
            reconcile.apply(connection, None, now=1)
        with pytest.raises(TaskNotFound):
            reconcile.apply(connection, ReconcilePolicy(), now=1, parent_id=MISSING)


def test_a_session_is_flushed_before_the_run_and_sees_its_rows_afterwards(
    ledger: Ledger, path: Path, clock: FakeClock
) -> None:
    known = running(ledger, clock, 1000)
    with plain_engine(path) as engine, Session(engine) as session:
        session.info["tsg_clock"] = lambda: 1000.0
        loaded = session.scalars(sa.select(Task).where(Task.id == known)).one()
        assert (loaded.status, len(loaded.events)) == ("running", 2)
        pending = Task(delivery_required=False)
        session.add(pending)
        pending.start()
        policy = ReconcilePolicy(30, 0)
        preview = reconcile.preview(session, policy, now=2000.0)
        assert loaded.status == "running"
        applied = reconcile.apply(session, policy, now=2000.0)
        assert preview == as_preview(dict(applied))
        assert (applied["tasks_timed_out"], applied["deliveries_not_applicable"]) == (2, 1)
        assert (loaded.status, loaded.version, loaded.terminal_code) == ("timed_out", 3, "restart_stale")
        assert [event.to_status for event in loaded.events] == ["queued", "running", "timed_out", "failed"]
        assert (pending.status, pending.delivery_status) == ("timed_out", "not_applicable")
        session.commit()
    assert ledger.get_task(known).delivery_status == "failed"
    assert ledger.doctor()["healthy"]


def test_a_session_that_is_rolled_back_has_changed_nothing(ledger: Ledger, path: Path, clock: FakeClock) -> None:
    task = running(ledger, clock, 1000)
    before = contents(path)
    with plain_engine(path) as engine, Session(engine) as session:
        loaded = session.scalars(sa.select(Task).where(Task.id == task)).one()
        reconcile.apply(session, ReconcilePolicy(0, 0), now=2000.0)
        assert loaded.status == "timed_out"
        session.rollback()
        assert loaded.status == "running"
    assert contents(path) == before


# -- who writes meanwhile --------------------------------------------------------------------------------


def beat_it(other: Ledger, task: str) -> list[str]:
    other.heartbeat(task)
    return []


def complete_it(other: Ledger, task: str) -> list[str]:
    other.close_task(task, "succeeded", code="completed")
    other.set_delivery(task, "delivered")
    return []


def replace_it(other: Ledger, task: str) -> list[str]:
    other.close_task(task, "failed")
    other.set_delivery(task, "failed")
    attempt = other.create_task().id
    other.start_task(attempt)
    return [attempt]


MEANWHILE = pytest.mark.parametrize("meanwhile", [beat_it, complete_it, replace_it])


@MEANWHILE
def test_what_lands_between_preview_and_apply_is_left_alone(
    ledger: Ledger, path: Path, clock: FakeClock, meanwhile: Callable[[Ledger, str], list[str]]
) -> None:
    task = running(ledger, clock, 1000)
    lost = running(ledger, clock, 1000)
    clock.now = 2000
    assert run(ledger, dry_run=True)["tasks_timed_out"] == 2
    with Ledger(path, clock=clock) as other:
        new = meanwhile(other, task)
    chain = [history(path, each) for each in (task, *new)]
    records = [ledger.get_task(each) for each in (task, *new)]
    clock.now = 2000.5
    assert run(ledger)["tasks_timed_out"] == 1
    assert [history(path, each) for each in (task, *new)] == chain
    assert [ledger.get_task(each) for each in (task, *new)] == records
    assert ledger.get_task(lost).status == "timed_out"
    assert ledger.doctor()["healthy"]


def test_a_process_that_still_beats_is_left_alone(ledger: Ledger, path: Path, clock: FakeClock) -> None:
    task = running(ledger, clock, 1000)
    clock.now = 2000
    assert run(ledger, dry_run=True)["tasks_timed_out"] == 1
    beat = "import sys, tsg; tsg.Ledger(sys.argv[1], clock=lambda: 1999.0).heartbeat(sys.argv[2])"
    subprocess.run([sys.executable, "-c", beat, str(path), task], check=True, timeout=60)
    before = contents(path)
    assert run(ledger) == counts(active_examined=1, fresh_active_retained=1)
    assert contents(path) == before


@MEANWHILE
def test_a_preview_sees_nothing_that_lands_once_it_has_begun(
    path: Path, clock: FakeClock, meanwhile: Callable[[Ledger, str], list[str]]
) -> None:
    with Ledger(path, clock=clock) as other:
        task = running(other, clock, 1000, timeout_seconds=10)
        clock.now = 2000.5

        def reading() -> float:
            meanwhile(other, task)
            return 2000.0

        with Ledger(path, clock=reading) as ledger:
            assert run(ledger, 600, 600, dry_run=True) == as_preview(
                counts(active_examined=1, tasks_timed_out=1, pending_delivery_examined=1, pending_delivery_retained=1)
            )
        with plain_engine(path) as engine, Ledger(engine, clock=lambda: 3000.0) as ledger:
            assert ledger.get_task(task).version > 1


@pytest.mark.parametrize("kind", ["read-only", "engine", "connection", "session"])
def test_a_beat_that_lands_once_a_preview_has_begun_does_not_look_like_the_future(
    path: Path, clock: FakeClock, kind: str
) -> None:
    with Ledger(path, clock=clock) as other:
        task = running(other, clock, 1000, timeout_seconds=10)
        clock.now = 2000.5

        def reading() -> float:
            other.heartbeat(task)
            return 2000.0

        found = None
        if kind == "read-only":
            with Ledger(path, clock=reading, read_only=True) as ledger:
                found = run(ledger, dry_run=True)
        else:
            with plain_engine(path) as engine:
                if kind == "engine":
                    with Ledger(engine, clock=reading) as ledger:
                        found = run(ledger, dry_run=True)
                elif kind == "connection":
                    with engine.connect() as connection:
                        found = reconcile.preview(connection, ReconcilePolicy(), clock=reading)
                else:
                    with Session(engine) as session:
                        found = reconcile.preview(session, ReconcilePolicy(), clock=reading)
        assert found is not None
        assert found["tasks_timed_out"] == 1


@pytest.mark.parametrize("kind", ["path", "engine"])
def test_nobody_else_writes_between_the_decision_and_the_writing(path: Path, clock: FakeClock, kind: str) -> None:
    with Ledger(path, clock=clock) as first, plain_engine(path) as engine:
        task = running(first, clock, 1000)
        clock.now = 2000
        refused: list[type[Exception]] = []
        with Ledger(path, clock=clock, busy_timeout_ms=0) as other:

            def reading() -> float:
                try:
                    other.heartbeat(task)
                except StateConflict as error:
                    refused.append(type(error))
                return 2000.0

            with Ledger(path if kind == "path" else engine, clock=reading) as ledger:
                assert run(ledger)["tasks_timed_out"] == 1
        assert refused == [StateConflict]
        assert first.get_task(task).version == 2
        assert first.doctor()["healthy"]


def test_on_a_plain_connection_a_write_in_the_middle_fails_the_run_or_is_left_alone(
    path: Path, ledger: Ledger, clock: FakeClock
) -> None:
    task = running(ledger, clock, 1000)
    clock.now = 2000
    with plain_engine(path) as engine:

        @sa.event.listens_for(engine, "before_cursor_execute")
        def beat(connection: Any, cursor: Any, statement: str, *rest: object) -> None:
            if statement.startswith("INSERT") and not landed:
                landed.append(statement)
                try:
                    with Ledger(path, clock=clock, busy_timeout_ms=0) as other:
                        other.heartbeat(task)
                except StateConflict:
                    landed.append("refused")

        landed: list[str] = []
        with engine.connect() as connection:
            try:
                report = reconcile.apply(connection, ReconcilePolicy(), now=2000.0)
                connection.commit()
            except StateConflict:
                connection.rollback()
                report = None
    assert landed
    stored = ledger.get_task(task)
    if landed == landed[:1]:
        assert stored.status == "running"
        assert report is None or report["tasks_timed_out"] == 0
    else:
        assert stored.status == "timed_out"
        assert report is not None
    assert ledger.doctor()["healthy"]


# -- many ------------------------------------------------------------------------------------------------

MANY = 20_000


def test_many_stale_tasks_are_closed_in_one_run_and_cost_no_memory(
    ledger: Ledger, path: Path, clock: FakeClock
) -> None:
    columns = (
        "pk, id, status, delivery_status, delivery_required, expects_heartbeat, created_at, started_at, updated_at"
    )
    connection = raw(path)
    try:
        connection.execute("BEGIN")
        connection.executemany(
            f"INSERT INTO tsg_tasks ({columns}, delivery_updated_at, version) "
            "VALUES (?, ?, 'running', 'pending', ?, 1, 1000.0, 1001.0, 1001.0, 1000.0, 1)",
            ((number, f"{number:08x}-0000-4000-8000-000000000000", number % 2) for number in range(1, MANY + 1)),
        )
        for values in (
            "0, 'created', NULL, 'queued', 1000.0, 'created'",
            "1, 'task_transition', 'queued', 'running', 1001.0, 'started'",
        ):
            connection.execute(f"INSERT INTO tsg_task_events SELECT pk, {values} FROM tsg_tasks")
        connection.execute("COMMIT")
    finally:
        connection.close()
    clock.now = 2000
    run(ledger, 5000, 5000)
    tracemalloc.start()
    try:
        preview = run(ledger, 0, 0, dry_run=True)
        applied = run(ledger, 0, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert applied == counts(
        active_examined=MANY,
        tasks_timed_out=MANY,
        pending_delivery_examined=MANY,
        deliveries_failed=MANY // 2,
        deliveries_not_applicable=MANY // 2,
    )
    assert preview == as_preview(applied)
    assert peak < 2_000_000
    report = ledger.doctor()
    assert (report["healthy"], report["event_count"]) == (True, 4 * MANY)
    assert run(ledger, 0, 0) == counts()
