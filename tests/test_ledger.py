"""A ledger's own methods: what they refuse and in which order, what they return, what they leave alone."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sqlite3
import traceback
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FakeClock, raw
from tsg import (
    DeliveryStatus,
    InvalidInput,
    Ledger,
    LedgerError,
    ReconcilePolicy,
    StateConflict,
    TaskNotFound,
    TaskRecord,
    TaskStatus,
    reconcile_restart,
)

QUEUED = "00000000-0000-4000-8000-000000000001"
RUNNING = "00000000-0000-4000-8000-000000000002"
ENDED = "00000000-0000-4000-8000-000000000003"
INTERNAL = "00000000-0000-4000-8000-000000000004"
DELIVERED = "00000000-0000-4000-8000-000000000005"
CHILD = "00000000-0000-4000-8000-000000000006"
UNSTARTED = "00000000-0000-4000-8000-000000000007"
UNKNOWN = "ffffffff-ffff-4fff-bfff-ffffffffffff"
MALFORMED = "no-uuid-at-all"
DIGEST = "0123456789abcdef" * 4
OTHER_DIGEST = "f" * 64


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed ledger with one task of every kind; created at 1000, started at 1100, beaten 1200, ended 1300."""
    folder = tmp_path_factory.mktemp("template")
    folder.chmod(0o700)
    clock = FakeClock()
    with Ledger(folder / "ledger.sqlite", clock=clock) as ledger:
        create(ledger, QUEUED, payload_hash=DIGEST, timeout_seconds=60)
        for identifier in (RUNNING, ENDED, DELIVERED):
            create(ledger, identifier, timeout_seconds=60)
        create(ledger, INTERNAL, delivery_required=False)
        create(ledger, UNSTARTED)
        create(ledger, CHILD, parent_id=QUEUED)
        clock.now = 1_100.0
        for identifier in (RUNNING, ENDED, DELIVERED, INTERNAL):
            ledger.start_task(identifier)
        clock.now = 1_200.0
        ledger.heartbeat(RUNNING)
        clock.now = 1_300.0
        ledger.close_task(ENDED, "succeeded", code="completed")
        ledger.close_task(INTERNAL, "failed", code="worker_failed")
        ledger.close_task(DELIVERED, "succeeded", code=None)
        ledger.close_task(UNSTARTED, "cancelled", code="caller_cancelled")
        clock.now = 1_400.0
        ledger.set_delivery(DELIVERED, "delivered", code="transport_acknowledged")
    return folder / "ledger.sqlite"


@pytest.fixture
def path(folder: Path, template: Path) -> Path:
    copy = folder / "ledger.sqlite"
    shutil.copyfile(template, copy)
    copy.chmod(0o600)
    return copy


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(2_000.0)


def create(ledger: Ledger, task_id: object = None, **fields: Any) -> TaskRecord:
    fields = {"parent_id": None, "payload_hash": None, "timeout_seconds": None, **fields}
    return ledger.create_task(task_id=task_id, **fields)


def close(task_id: object, status: object, code: object = None) -> Callable[[Ledger], object]:
    return lambda ledger: ledger.close_task(task_id, status, code=code)


def deliver(task_id: object, status: object, code: object = None) -> Callable[[Ledger], object]:
    return lambda ledger: ledger.set_delivery(task_id, status, code=code)


def creating(task_id: object = None, **fields: Any) -> Callable[[Ledger], object]:
    return lambda ledger: create(ledger, task_id, **fields)


def contents(path: Path) -> tuple[list[Any], ...]:
    with closing(raw(path)) as connection:
        connection.text_factory = bytes
        return tuple(
            connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()
            for table in ("tsg_tasks", "tsg_task_events")
        )


def events(path: Path, task_id: str) -> list[tuple[Any, ...]]:
    with closing(raw(path)) as connection:
        return connection.execute(
            "SELECT number, kind, from_status, to_status, occurred_at, code FROM tsg_task_events "
            "JOIN tsg_tasks ON pk = task_pk WHERE id = ? ORDER BY number",
            (task_id,),
        ).fetchall()


def says_nothing_of(error: LedgerError, *secrets: str) -> None:
    assert str(error)
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__
    told = "".join(traceback.format_exception(error)[-1:]) + repr(error)
    for secret in secrets:
        assert secret not in told


ANY, NONE = object(), 0
REFUSALS: list[tuple[str, Any, Callable[[Ledger], object], type[LedgerError], object]] = [
    ("get: a malformed id", 2e3, lambda ledger: ledger.get_task(MALFORMED), InvalidInput, NONE),
    ("get: an unknown task", 2e3, lambda ledger: ledger.get_task(UNKNOWN), TaskNotFound, NONE),
    ("children: a malformed id", 2e3, lambda ledger: ledger.children_of(MALFORMED), InvalidInput, NONE),
    ("children: an unknown parent", 2e3, lambda ledger: ledger.children_of(UNKNOWN), TaskNotFound, NONE),
    ("start: a malformed id", 2e3, lambda ledger: ledger.start_task(MALFORMED), InvalidInput, NONE),
    ("start: no id", 2e3, lambda ledger: ledger.start_task(None), InvalidInput, NONE),
    (
        "start: an unknown task before the clock",
        math.nan,
        lambda ledger: ledger.start_task(UNKNOWN),
        TaskNotFound,
        NONE,
    ),
    ("start: an ended task before the clock", math.nan, lambda ledger: ledger.start_task(ENDED), StateConflict, NONE),
    ("start: a clock behind creation", 999.0, lambda ledger: ledger.start_task(QUEUED), StateConflict, 1),
    ("start: a clock that is not finite", math.nan, lambda ledger: ledger.start_task(QUEUED), InvalidInput, 1),
    ("start: a clock that is a boolean", True, lambda ledger: ledger.start_task(QUEUED), InvalidInput, 1),
    ("heartbeat: a malformed id", 2e3, lambda ledger: ledger.heartbeat(MALFORMED), InvalidInput, NONE),
    ("heartbeat: an unknown task", math.nan, lambda ledger: ledger.heartbeat(UNKNOWN), TaskNotFound, NONE),
    ("heartbeat: a queued task", math.nan, lambda ledger: ledger.heartbeat(QUEUED), StateConflict, NONE),
    ("heartbeat: an ended task", math.nan, lambda ledger: ledger.heartbeat(ENDED), StateConflict, NONE),
    ("heartbeat: a clock behind the last one", 1_199.0, lambda ledger: ledger.heartbeat(RUNNING), StateConflict, 1),
    ("heartbeat: a clock that is not finite", math.inf, lambda ledger: ledger.heartbeat(RUNNING), InvalidInput, 1),
    ("close: a malformed id before a bad status", 2e3, close(MALFORMED, "bogus"), InvalidInput, NONE),
    ("close: a bad status before an unknown task", 2e3, close(UNKNOWN, "bogus"), InvalidInput, NONE),
    ("close: an active status before an unknown task", 2e3, close(UNKNOWN, "running"), InvalidInput, NONE),
    ("close: queued", 2e3, close(RUNNING, "queued"), InvalidInput, NONE),
    ("close: a delivery status", 2e3, close(RUNNING, "delivered"), InvalidInput, NONE),
    ("close: bytes for a status", 2e3, close(RUNNING, b"failed"), InvalidInput, NONE),
    ("close: no status", 2e3, close(RUNNING, None), InvalidInput, NONE),
    ("close: a lone surrogate for a status", 2e3, close(RUNNING, "\ud800"), InvalidInput, NONE),
    ("close: an unknown task before its code", 2e3, close(UNKNOWN, "failed", "bogus"), TaskNotFound, NONE),
    ("close: ended otherwise before its code", math.nan, close(ENDED, "failed", "bogus"), StateConflict, NONE),
    ("close: ended otherwise", 2e3, close(ENDED, "timed_out", "restart_stale"), StateConflict, NONE),
    ("close: an unknown code before the clock", math.nan, close(RUNNING, "failed", "bogus"), InvalidInput, NONE),
    ("close: another state's code", 1.0, close(RUNNING, "failed", "completed"), InvalidInput, NONE),
    ("close: a delivery's code", 1.0, close(RUNNING, "failed", "transport_failed"), InvalidInput, NONE),
    ("close: the ledger's own code", 1.0, close(RUNNING, "failed", "started"), InvalidInput, NONE),
    ("close: bytes for a code", 1.0, close(RUNNING, "failed", b"worker_failed"), InvalidInput, NONE),
    ("close: a clock behind", 1_199.0, close(RUNNING, "failed", "worker_failed"), StateConflict, 1),
    ("close: a clock that is not finite", math.nan, close(RUNNING, "failed"), InvalidInput, 1),
    ("close: queued, a clock behind", 999.0, close(QUEUED, "cancelled"), StateConflict, 1),
    ("delivery: a malformed id before a bad status", 2e3, deliver(MALFORMED, "bogus"), InvalidInput, NONE),
    ("delivery: a bad status before an unknown task", 2e3, deliver(UNKNOWN, "succeeded"), InvalidInput, NONE),
    ("delivery: pending", 2e3, deliver(ENDED, "pending"), InvalidInput, NONE),
    ("delivery: an unknown task before its code", 2e3, deliver(UNKNOWN, "failed", "bogus"), TaskNotFound, NONE),
    ("delivery: a queued task before its code", math.nan, deliver(QUEUED, "failed", "bogus"), StateConflict, NONE),
    ("delivery: a running task", 2e3, deliver(RUNNING, "delivered"), StateConflict, NONE),
    (
        "delivery: closed otherwise before its code",
        math.nan,
        deliver(DELIVERED, "failed", "bogus"),
        StateConflict,
        NONE,
    ),
    ("delivery: closed, and the status never fitted", 2e3, deliver(DELIVERED, "not_applicable"), StateConflict, NONE),
    ("delivery: required, not_applicable", math.nan, deliver(ENDED, "not_applicable", "bogus"), StateConflict, NONE),
    ("delivery: internal, delivered", math.nan, deliver(INTERNAL, "delivered", "bogus"), StateConflict, NONE),
    ("delivery: internal, failed", math.nan, deliver(INTERNAL, "failed", "bogus"), StateConflict, NONE),
    ("delivery: an unknown code before the clock", math.nan, deliver(ENDED, "failed", "bogus"), InvalidInput, NONE),
    ("delivery: another state's code", 1.0, deliver(ENDED, "delivered", "transport_failed"), InvalidInput, NONE),
    ("delivery: a task's code", 1.0, deliver(ENDED, "failed", "worker_failed"), InvalidInput, NONE),
    ("delivery: a clock behind the end", 1_299.0, deliver(ENDED, "delivered"), StateConflict, 1),
    ("delivery: a clock that is not finite", -math.inf, deliver(ENDED, "delivered"), InvalidInput, 1),
    ("create: a malformed id", 2e3, creating(MALFORMED), InvalidInput, ANY),
    ("create: a malformed parent", 2e3, creating(parent_id=MALFORMED), InvalidInput, ANY),
    ("create: a malformed hash", 2e3, creating(payload_hash="F" * 64), InvalidInput, ANY),
    ("create: a negative timeout", 2e3, creating(timeout_seconds=-1), InvalidInput, ANY),
    ("create: a boolean timeout", 2e3, creating(timeout_seconds=True), InvalidInput, ANY),
    ("create: a timeout too large for a float", 2e3, creating(timeout_seconds=10**400), InvalidInput, ANY),
    ("create: a lone surrogate for a timeout", 2e3, creating(timeout_seconds="\ud800"), InvalidInput, ANY),
    ("create: a flag that is a number", 2e3, creating(delivery_required=1), InvalidInput, ANY),
    ("create: another flag that is text", 2e3, creating(expects_heartbeat="no"), InvalidInput, ANY),
    ("create: silent without a timeout", 2e3, creating(expects_heartbeat=False), InvalidInput, ANY),
    ("create: malformed before a clock that is not finite", math.nan, creating(MALFORMED), InvalidInput, ANY),
    ("create: a clock that is not finite", math.nan, creating(), InvalidInput, 1),
    ("create: a clock that gives nothing", None, creating(), InvalidInput, 1),
    ("create: a clock too large for a float", 10**400, creating(), InvalidInput, 1),
    ("create: a missing parent", 2e3, creating(parent_id=UNKNOWN), TaskNotFound, 1),
    ("create: its own parent", 2e3, creating(UNKNOWN, parent_id=UNKNOWN), TaskNotFound, 1),
    ("create: a clock behind the parent's creation", 999.0, creating(parent_id=QUEUED), StateConflict, 1),
    ("create: a clock behind the parent's heartbeat", 1_199.0, creating(parent_id=RUNNING), StateConflict, 1),
    ("create: a clock behind the parent's end", 1_299.0, creating(parent_id=ENDED), StateConflict, 1),
    ("create: a clock behind the parent's delivery", 1_399.0, creating(parent_id=DELIVERED), StateConflict, 1),
    (
        "create again: another hash",
        2e3,
        creating(QUEUED, payload_hash=OTHER_DIGEST, timeout_seconds=60),
        StateConflict,
        1,
    ),
    ("create again: no hash", 2e3, creating(QUEUED, timeout_seconds=60), StateConflict, 1),
    ("create again: another timeout", 2e3, creating(QUEUED, payload_hash=DIGEST, timeout_seconds=61), StateConflict, 1),
    ("create again: no timeout", 2e3, creating(QUEUED, payload_hash=DIGEST), StateConflict, 1),
    ("create again: internal", 2e3, creating(UNSTARTED, delivery_required=False), StateConflict, 1),
    (
        "create again: silent",
        2e3,
        creating(QUEUED, payload_hash=DIGEST, timeout_seconds=60, expects_heartbeat=False),
        StateConflict,
        1,
    ),
    ("create again: no parent", 2e3, creating(CHILD), StateConflict, 1),
    ("create again: another parent", 2e3, creating(CHILD, parent_id=RUNNING), StateConflict, 1),
    ("create again: other fields before a missing parent", 2e3, creating(CHILD, parent_id=UNKNOWN), StateConflict, 1),
    ("create again: other fields before itself as parent", 2e3, creating(CHILD, parent_id=CHILD), StateConflict, 1),
    ("create again: a clock that is not finite", math.nan, creating(CHILD, parent_id=QUEUED), InvalidInput, 1),
]


@pytest.mark.parametrize(
    ("now", "call", "refusal", "readings"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_what_is_refused_has_its_class_and_changes_nothing(
    ledger: Ledger,
    path: Path,
    clock: FakeClock,
    now: Any,
    call: Callable[[Ledger], object],
    refusal: type[LedgerError],
    readings: object,
) -> None:
    before = contents(path)
    clock.now = now
    with pytest.raises(LedgerError) as caught:
        call(ledger)
    assert type(caught.value) is refusal
    assert readings is ANY or clock.readings == readings
    assert contents(path) == before
    says_nothing_of(
        caught.value, MALFORMED, UNKNOWN, QUEUED, RUNNING, ENDED, DIGEST, OTHER_DIGEST, "bogus", str(path), "tsg_tasks"
    )
    assert ledger.doctor()["healthy"]


def test_a_malformed_id_is_told_before_a_bad_status(ledger: Ledger) -> None:
    with pytest.raises(InvalidInput, match="UUID"):
        ledger.close_task(MALFORMED, "bogus", code="bogus")
    with pytest.raises(InvalidInput, match="UUID"):
        ledger.set_delivery(MALFORMED, "bogus", code="bogus")


NO_OPS: list[tuple[str, Callable[[Ledger], object]]] = [
    ("a start of a running task", lambda ledger: ledger.start_task(RUNNING)),
    ("a second close of the same kind", close(ENDED, "succeeded")),
    ("a second close with another code that fits", close(ENDED, "succeeded", "worker_completed")),
    ("a second close with a code that does not fit", close(ENDED, "succeeded", "bogus")),
    ("a second delivery of the same kind", deliver(DELIVERED, "delivered")),
    ("a second delivery with a code that does not fit", deliver(DELIVERED, "delivered", "bogus")),
]


@pytest.mark.parametrize("call", [case[1] for case in NO_OPS], ids=[case[0] for case in NO_OPS])
def test_a_no_op_returns_what_is_stored_changes_nothing_and_reads_no_clock(
    ledger: Ledger, path: Path, clock: FakeClock, call: Callable[[Ledger], TaskRecord]
) -> None:
    before = contents(path)
    clock.now = math.nan
    record = call(ledger)
    assert record == ledger.get_task(record.id)
    assert contents(path) == before
    assert clock.readings == 0


@pytest.mark.parametrize(
    ("task_id", "fields"),
    [
        (QUEUED, {"payload_hash": DIGEST, "timeout_seconds": 60}),
        (QUEUED.replace("-", ""), {"payload_hash": DIGEST, "timeout_seconds": b"60.0"}),
        (f"urn:uuid:{RUNNING}", {"timeout_seconds": "6e1"}),
        (uuid.UUID(ENDED), {"timeout_seconds": 60.0}),
        (CHILD, {"parent_id": uuid.UUID(QUEUED)}),
        (INTERNAL, {"delivery_required": False}),
        (RUNNING, {"timeout_seconds": 60}),
    ],
)
def test_creating_again_with_the_same_fields_returns_the_stored_task(
    ledger: Ledger, path: Path, clock: FakeClock, task_id: object, fields: dict[str, Any]
) -> None:
    before = contents(path)
    clock.now = 1.0
    record = create(ledger, task_id, **fields)
    assert record == ledger.get_task(task_id)
    assert contents(path) == before
    assert clock.readings == 1


def test_creating_a_silent_task_again_after_its_first_heartbeat_returns_it(ledger: Ledger) -> None:
    silent = create(ledger, timeout_seconds=60, expects_heartbeat=False)
    ledger.start_task(silent.id)
    beaten = ledger.heartbeat(silent.id)
    assert beaten.expects_heartbeat is True
    assert create(ledger, silent.id, timeout_seconds=60, expects_heartbeat=False) == beaten


def test_a_task_goes_all_its_way_with_an_event_for_every_transition(
    ledger: Ledger, path: Path, clock: FakeClock
) -> None:
    made = create(ledger, payload_hash=DIGEST, timeout_seconds="30")
    assert made == TaskRecord(
        id=made.id,
        parent_id=None,
        status=TaskStatus.QUEUED,
        delivery_status=DeliveryStatus.PENDING,
        delivery_required=True,
        payload_hash=DIGEST,
        timeout_seconds=30.0,
        created_at=2_000.0,
        started_at=None,
        updated_at=2_000.0,
        ended_at=None,
        deadline_at=None,
        delivery_updated_at=2_000.0,
        terminal_code=None,
        delivery_code=None,
        version=0,
        expects_heartbeat=True,
    )
    assert made.id == str(uuid.UUID(made.id))
    clock.now = 2_010
    started = ledger.start_task(made.id)
    assert started == dataclasses.replace(
        made, status=TaskStatus.RUNNING, started_at=2_010.0, updated_at=2_010.0, deadline_at=2_040.0, version=1
    )
    clock.now = 2_050.5
    beaten = ledger.heartbeat(made.id)
    assert beaten == dataclasses.replace(started, updated_at=2_050.5, version=2)
    clock.now = "2060"
    ended = ledger.close_task(made.id, TaskStatus.SUCCEEDED, code="worker_completed")
    assert ended == dataclasses.replace(
        beaten,
        status=TaskStatus.SUCCEEDED,
        updated_at=2_060.0,
        ended_at=2_060.0,
        terminal_code="worker_completed",
        version=3,
    )
    clock.now = b"2070"
    delivered = ledger.set_delivery(made.id, "delivered", code="transport_acknowledged")
    assert delivered == dataclasses.replace(
        ended,
        delivery_status=DeliveryStatus.DELIVERED,
        delivery_updated_at=2_070.0,
        delivery_code="transport_acknowledged",
        version=4,
    )
    assert ledger.get_task(made.id) == delivered
    assert events(path, made.id) == [
        (0, "created", None, "queued", 2_000.0, "created"),
        (1, "task_transition", "queued", "running", 2_010.0, "started"),
        (2, "task_transition", "running", "succeeded", 2_060.0, "worker_completed"),
        (3, "delivery_transition", "pending", "delivered", 2_070.0, "transport_acknowledged"),
    ]
    assert ledger.doctor()["healthy"]


def test_a_task_may_close_without_having_started(ledger: Ledger, path: Path) -> None:
    made = create(ledger, delivery_required=False)
    ledger.close_task(made.id, "cancelled", code=None)
    ledger.set_delivery(made.id, "not_applicable", code="internal_task")
    assert [event[:4] for event in events(path, made.id)] == [
        (0, "created", None, "queued"),
        (1, "task_transition", "queued", "cancelled"),
        (2, "delivery_transition", "pending", "not_applicable"),
    ]
    assert ledger.get_task(made.id).version == 2
    assert ledger.doctor()["healthy"]


@pytest.mark.parametrize(
    ("task_id", "call", "now"),
    [
        (QUEUED, lambda ledger: ledger.start_task(QUEUED), 1_000.0),
        (RUNNING, lambda ledger: ledger.heartbeat(RUNNING), 1_200.0),
        (RUNNING, close(RUNNING, "failed"), 1_200.0),
        (ENDED, deliver(ENDED, "failed"), 1_300.0),
        (None, creating(parent_id=DELIVERED), 1_400.0),
    ],
)
def test_a_clock_that_stands_still_is_not_behind(
    ledger: Ledger, clock: FakeClock, task_id: str | None, call: Callable[[Ledger], TaskRecord], now: float
) -> None:
    clock.now = now
    assert ledger.get_task(call(ledger).id).id == (task_id or ledger.children_of(DELIVERED)[0].id)
    assert ledger.doctor()["healthy"]


def test_a_deadline_long_past_forbids_no_verb(ledger: Ledger, clock: FakeClock) -> None:
    clock.now = 1e9
    assert ledger.heartbeat(RUNNING).updated_at == 1e9
    assert ledger.close_task(RUNNING, "succeeded", code="completed").status is TaskStatus.SUCCEEDED
    assert ledger.doctor()["healthy"]


def test_a_deadline_that_would_not_be_finite_is_refused_at_the_start(
    ledger: Ledger, path: Path, clock: FakeClock
) -> None:
    made = create(ledger, timeout_seconds=1.7e308)
    before = contents(path)
    clock.now = 1.7e308
    with pytest.raises(InvalidInput):
        ledger.start_task(made.id)
    assert contents(path) == before


def test_b07_a_heartbeat_after_the_end_is_refused_and_a_late_success_changes_nothing(
    ledger: Ledger, path: Path
) -> None:
    ledger.close_task(RUNNING, "timed_out", code="restart_stale")
    before = contents(path)
    with pytest.raises(StateConflict):
        ledger.heartbeat(RUNNING)
    with pytest.raises(StateConflict):
        ledger.close_task(RUNNING, "succeeded", code="completed")
    with pytest.raises(StateConflict):
        ledger.start_task(RUNNING)
    assert contents(path) == before
    record = ledger.get_task(RUNNING)
    assert (record.status, record.delivery_status) == (TaskStatus.TIMED_OUT, DeliveryStatus.PENDING)


@pytest.mark.parametrize(("timeout", "code"), [(None, None), (3_600.0, "deadline_exceeded")])
def test_b09_a_long_running_task_that_beats_is_only_ended_by_its_deadline(
    ledger: Ledger, clock: FakeClock, timeout: float | None, code: str | None
) -> None:
    for identifier in (RUNNING, QUEUED):
        ledger.close_task(identifier, "cancelled", code=None)
    made = create(ledger, timeout_seconds=timeout)
    ledger.start_task(made.id)
    clock.advance(3 * 3_600 - 5)
    ledger.heartbeat(made.id)
    clock.advance(5)
    report = ledger.reconcile(active_grace_seconds=600, delivery_grace_seconds=1e9)
    record = ledger.get_task(made.id)
    assert report["tasks_timed_out"] == (0 if code is None else 1)
    assert record.status is (TaskStatus.RUNNING if code is None else TaskStatus.TIMED_OUT)
    assert record.terminal_code == code


def test_b29_a_delivery_that_stayed_pending_closes_once_and_again_changes_nothing(path: Path, clock: FakeClock) -> None:
    with Ledger(path, clock=clock) as before_the_crash:
        assert before_the_crash.get_task(ENDED).delivery_status is DeliveryStatus.PENDING
    with Ledger(path, clock=clock) as after_it:
        first = after_it.set_delivery(ENDED, "delivered", code="transport_acknowledged")
        stored = contents(path)
        clock.advance(60)
        assert after_it.set_delivery(ENDED, "delivered", code=None) == first
        with pytest.raises(StateConflict):
            after_it.set_delivery(ENDED, "failed", code="delivery_grace_expired")
        assert contents(path) == stored
        assert after_it.doctor()["healthy"]


def test_a_record_is_frozen_and_holds_exact_built_in_values(ledger: Ledger) -> None:
    record = ledger.get_task(DELIVERED)
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.status = TaskStatus.FAILED  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del record.version  # type: ignore[misc]
    assert isinstance(record.status, str)
    assert record.status == "succeeded"
    assert {type(value) for value in dataclasses.astuple(record)} <= {
        str,
        float,
        int,
        bool,
        type(None),
        TaskStatus,
        DeliveryStatus,
    }


def test_to_dict_hides_the_fingerprint_unless_it_is_asked_for(ledger: Ledger) -> None:
    keys = {
        "id",
        "parent_id",
        "status",
        "delivery_status",
        "delivery_required",
        "timeout_seconds",
        "created_at",
        "started_at",
        "updated_at",
        "ended_at",
        "deadline_at",
        "delivery_updated_at",
        "terminal_code",
        "delivery_code",
        "version",
        "expects_heartbeat",
        "has_payload_hash",
    }
    hidden = ledger.get_task(QUEUED).to_dict()
    assert set(hidden) == keys
    assert hidden["has_payload_hash"] is True
    assert DIGEST not in json.dumps(hidden)
    shown = ledger.get_task(QUEUED).to_dict(include_payload_hash=True)
    assert shown == {**hidden, "payload_hash": DIGEST}
    without = ledger.get_task(RUNNING).to_dict(include_payload_hash=True)
    assert without["has_payload_hash"] is False
    assert without["payload_hash"] is None
    assert type(hidden["status"]) is str
    assert type(hidden["delivery_status"]) is str


def test_children_come_by_creation_time_and_then_by_id(ledger: Ledger, clock: FakeClock) -> None:
    low, middle, high = (f"{digit}0000000-0000-4000-8000-000000000000" for digit in "123")
    for now, identifier in ((3_000.0, high), (3_000.0, low), (2_500.0, middle)):
        clock.now = now
        create(ledger, identifier, parent_id=RUNNING)
    clock.now = 4_000.0
    create(ledger, parent_id=high)
    assert [child.id for child in ledger.children_of(RUNNING)] == [middle, low, high]
    assert ledger.children_of(UNSTARTED) == []
    assert [child.id for child in ledger.children_of(uuid.UUID(QUEUED))] == [CHILD]


DAMAGE = {
    "parent_id": "parent_id = id",
    "status": "status = 'bogus'",
    "a status of another type": "status = X'00'",
    "delivery_status": "delivery_status = 'bogus'",
    "flags": "delivery_required = 2",
    "flags of another type": "expects_heartbeat = 'yes'",
    "payload_hash": "payload_hash = upper('abcdef')",
    "payload_hash that is not UTF-8": "payload_hash = CAST(X'FF' AS TEXT)",
    "expects_heartbeat": "expects_heartbeat = 0, timeout_seconds = NULL, deadline_at = NULL",
    "lifecycle": "ended_at = NULL",
    "lifecycle of a terminal task gone queued": "status = 'queued', terminal_code = NULL",
    "terminal_code": "terminal_code = 'worker_failed'",
    "an unknown terminal_code": "terminal_code = 'bogus'",
    "delivery": "delivery_status = 'not_applicable', version = 3, delivery_updated_at = 1300.0",
    "delivery_code": "delivery_code = 'transport_failed'",
    "version": "version = 1",
    "a negative version": "version = -1",
    "version of another type": "version = 'two'",
    "timeout_seconds": "timeout_seconds = -5.0, deadline_at = 1095.0",
    "finite": "deadline_at = 9e999, timeout_seconds = 9e999",
    "a time that is text": "ended_at = 'yesterday', updated_at = 'yesterday'",
    "a time that is a blob": "created_at = X'00'",
    "started_at": "created_at = 1150.0, delivery_updated_at = 1150.0",
    "updated_at": "updated_at = 1250.0",
    "ended_at": "ended_at = 1050.0, updated_at = 1050.0",
    "deadline_at": "deadline_at = 1161.0",
    "no deadline": "deadline_at = NULL",
    "delivery_updated_at": "delivery_updated_at = 1001.0",
}


def damage(path: Path, statement: str) -> None:
    with closing(raw(path)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for (name,) in names:
            connection.execute(f'DROP TRIGGER "{name}"')
        connection.execute("PRAGMA ignore_check_constraints = ON")
        assert connection.execute(statement).rowcount == 1


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_row_is_a_state_conflict_for_everyone_who_reads_it(ledger: Ledger, path: Path, change: str) -> None:
    damage(path, f"UPDATE tsg_tasks SET {change} WHERE id = '{ENDED}'")
    before = contents(path)
    for call in (
        lambda: ledger.get_task(ENDED),
        lambda: ledger.children_of(ENDED),
        lambda: ledger.start_task(ENDED),
        lambda: ledger.heartbeat(ENDED),
        lambda: ledger.close_task(ENDED, "succeeded", code=None),
        lambda: ledger.set_delivery(ENDED, "delivered", code=None),
        lambda: create(ledger, parent_id=ENDED),
        lambda: create(ledger, ENDED, timeout_seconds=60),
    ):
        with pytest.raises(StateConflict) as caught:
            call()
        says_nothing_of(caught.value, ENDED, "bogus", "yesterday", "payload_hash", "tsg_tasks", str(path))
    assert contents(path) == before
    assert ledger.get_task(RUNNING).id == RUNNING


@pytest.mark.parametrize("written", ["upper('{a}')", "replace('{a}', '-', '')", "'{a}' || char(0)", "X'00'", "'x'"])
def test_a_child_without_a_canonical_id_is_a_state_conflict_for_who_lists_the_children(
    ledger: Ledger, path: Path, written: str
) -> None:
    damage(path, f"UPDATE tsg_tasks SET id = {written.format(a='abcdef00' + CHILD[8:])} WHERE id = '{CHILD}'")
    with pytest.raises(StateConflict):
        ledger.children_of(QUEUED)
    with pytest.raises(TaskNotFound):
        ledger.get_task(CHILD)
    assert ledger.get_task(QUEUED).id == QUEUED


def test_a_version_that_cannot_count_on_is_a_state_conflict(ledger: Ledger, path: Path) -> None:
    damage(path, f"UPDATE tsg_tasks SET version = {2**63 - 1} WHERE id = '{RUNNING}'")
    before = contents(path)
    with pytest.raises(StateConflict) as caught:
        ledger.heartbeat(RUNNING)
    says_nothing_of(caught.value, RUNNING, str(2**63 - 1))
    assert contents(path) == before


def test_others_who_hold_the_write_lock_too_long_are_a_state_conflict_and_reading_goes_on(
    path: Path, clock: FakeClock
) -> None:
    with Ledger(path, clock=clock, busy_timeout_ms=50) as ledger, closing(raw(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute(f"UPDATE tsg_tasks SET updated_at = 1250.0, version = version + 1 WHERE id = '{RUNNING}'")
        for call in (
            lambda: ledger.start_task(QUEUED),
            lambda: ledger.close_task(RUNNING, "failed", code="worker_failed"),
            lambda: create(ledger),
            lambda: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0),
        ):
            with pytest.raises(StateConflict) as caught:
                call()
            says_nothing_of(caught.value, QUEUED, RUNNING, "locked", "sqlite", str(path))
        assert ledger.get_task(RUNNING).updated_at == 1_200.0
        assert ledger.doctor()["healthy"]
        other.execute("ROLLBACK")
        assert ledger.start_task(QUEUED).status is TaskStatus.RUNNING


def test_a_table_that_is_gone_is_a_state_conflict(ledger: Ledger, path: Path) -> None:
    with closing(raw(path)) as connection:
        connection.execute("DROP TABLE tsg_task_events")
    for call in (lambda: create(ledger), lambda: ledger.close_task(RUNNING, "failed", code=None)):
        with pytest.raises(StateConflict) as caught:
            call()
        says_nothing_of(caught.value, RUNNING, "no such table", "tsg_task_events")
    assert ledger.get_task(RUNNING).status is TaskStatus.RUNNING


def test_an_event_that_stands_in_the_way_undoes_the_whole_transition(ledger: Ledger, path: Path) -> None:
    with closing(raw(path)) as connection:
        connection.execute(
            "INSERT INTO tsg_task_events SELECT pk, 1, 'task_transition', 'queued', 'running', 1100.0, 'started' "
            f"FROM tsg_tasks WHERE id = '{QUEUED}'"
        )
    before = contents(path)
    with pytest.raises(StateConflict) as caught:
        ledger.start_task(QUEUED)
    says_nothing_of(caught.value, QUEUED, "UNIQUE", "tsg_task_events")
    assert contents(path) == before


WRITING: dict[str, Callable[[Ledger], object]] = {
    "create": creating(),
    "create again": creating(CHILD, parent_id=QUEUED),
    "start": lambda ledger: ledger.start_task(QUEUED),
    "start of a running task": lambda ledger: ledger.start_task(RUNNING),
    "heartbeat": lambda ledger: ledger.heartbeat(RUNNING),
    "close": close(RUNNING, "failed"),
    "second close": close(ENDED, "succeeded"),
    "delivery": deliver(ENDED, "delivered"),
    "reconcile": lambda ledger: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0),
}
READING: dict[str, Callable[[Ledger], object]] = {
    "get": lambda ledger: ledger.get_task(QUEUED),
    "children": lambda ledger: ledger.children_of(QUEUED),
    "preview": lambda ledger: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0, dry_run=True),
    "doctor": lambda ledger: ledger.doctor(),
    "storage_info": lambda ledger: ledger.storage_info(),
}


@pytest.mark.parametrize("live", [False, True], ids=["a closed file", "a file in use"])
def test_a_read_only_ledger_reads_everything_and_writes_nothing(path: Path, clock: FakeClock, live: bool) -> None:
    with closing(raw(path)) as other:
        if live:
            other.execute("SELECT count(*) FROM tsg_tasks").fetchone()
        content = path.read_bytes()
        with Ledger(path, clock=clock, read_only=True) as ledger:
            for call in WRITING.values():
                with pytest.raises(StateConflict) as caught:
                    call(ledger)
                assert type(caught.value) is StateConflict
            for call in READING.values():
                call(ledger)
            assert ledger.get_task(DELIVERED).delivery_status is DeliveryStatus.DELIVERED
        assert path.read_bytes() == content


@pytest.mark.parametrize("call", [*WRITING.values(), *READING.values()], ids=[*WRITING, *READING])
def test_a_closed_ledger_refuses_every_method(path: Path, clock: FakeClock, call: Callable[[Ledger], object]) -> None:
    ledger = Ledger(path, clock=clock)
    ledger.close()
    ledger.close()
    with pytest.raises(StateConflict):
        call(ledger)
    assert clock.readings == 0


def test_a_ledger_is_a_context_manager_that_closes_also_when_something_is_raised(path: Path) -> None:
    def use() -> None:
        with Ledger(path) as ledger:
            used.append(ledger)
            assert ledger.get_task(QUEUED).id == QUEUED
            raise ZeroDivisionError

    used: list[Ledger] = []
    with pytest.raises(ZeroDivisionError):
        use()
    with pytest.raises(StateConflict):
        used[0].get_task(QUEUED)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(("given_value", "busy"), [(0, 0), (50, 50), (2**31 - 1, 2**31 - 1)])
def test_storage_info_says_how_the_ledger_is_kept(path: Path, given_value: int, busy: int) -> None:
    with Ledger(path, busy_timeout_ms=given_value) as ledger:
        assert ledger.storage_info() == {
            "journal_mode": "wal",
            "busy_timeout_ms": busy,
            "foreign_keys": True,
            "permission_model": "posix_mode",
        }


@pytest.mark.parametrize(
    "options",
    [
        {"clock": None},
        {"clock": 5},
        {"busy_timeout_ms": -1},
        {"busy_timeout_ms": True},
        {"busy_timeout_ms": "50"},
        {"busy_timeout_ms": 1.5},
        {"busy_timeout_ms": 10**400},
        {"busy_timeout_ms": None},
        {"snapshot_limit_mib": -1},
        {"read_only": 1},
        {"migrate": "yes"},
        {"adopt": None},
        {"allow_external_acl": 0},
    ],
    ids=str,
)
def test_an_option_of_the_wrong_kind_is_refused_before_the_file_is_looked_at(folder: Path, options: Any) -> None:
    with pytest.raises(InvalidInput):
        Ledger(folder / "new.sqlite", **options)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"active_grace_seconds": -1},
        {"active_grace_seconds": True},
        {"active_grace_seconds": math.nan},
        {"active_grace_seconds": None},
        {"delivery_grace_seconds": 10**400},
        {"delivery_grace_seconds": "\ud800"},
        {"dry_run": 1},
        {"dry_run": None},
        {"skip_conflicts": 1},
        {"parent_id": MALFORMED},
    ],
    ids=str,
)
def test_an_argument_of_reconcile_of_the_wrong_kind_is_refused(ledger: Ledger, path: Path, options: Any) -> None:
    before = contents(path)
    with pytest.raises(InvalidInput):
        ledger.reconcile(**{"active_grace_seconds": 0, "delivery_grace_seconds": 0, **options})
    assert contents(path) == before


def test_a_restart_takes_a_policy_and_nothing_that_resembles_one(ledger: Ledger) -> None:
    with pytest.raises(InvalidInput):
        reconcile_restart(ledger, {"active_grace_seconds": 1})  # type: ignore[arg-type]
    preview = reconcile_restart(ledger, ReconcilePolicy(1, 1), dry_run=True)
    applied = reconcile_restart(ledger, ReconcilePolicy(1, 1))
    assert {**preview, "dry_run": False, "applied": True} == applied
    assert applied["tasks_timed_out"] == 1


def test_a_clock_of_the_callers_that_raises_leaves_nothing_half_done(
    ledger: Ledger, path: Path, clock: FakeClock
) -> None:
    before = contents(path)

    class Broken(Exception):
        pass

    class BrokenNumber:
        def __float__(self) -> float:
            raise Broken

    clock.now = BrokenNumber()
    with pytest.raises(InvalidInput):
        ledger.start_task(QUEUED)
    assert contents(path) == before
    clock.now = 2_000.0
    assert ledger.start_task(QUEUED).status is TaskStatus.RUNNING


def test_the_lowest_errors_are_the_ones_python_knows_too() -> None:
    assert issubclass(InvalidInput, ValueError)
    assert issubclass(TaskNotFound, LookupError)
    assert issubclass(StateConflict, LedgerError)
    assert not issubclass(StateConflict, (ValueError, LookupError, sqlite3.Error))
