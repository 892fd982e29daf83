"""The transition itself, over every combination there is, against the contract's words."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from tsg import InvalidInput, StateConflict
from tsg.states import (
    DELIVERY_REASONS,
    EVENT_KINDS,
    TASK_REASONS,
    DeliveryStatus,
    Event,
    TaskStatus,
    Verb,
    created,
    is_same_creation,
    require_not_before,
    transition,
)

TASK_WORDS = ("queued", "running", "succeeded", "failed", "timed_out", "cancelled")
TASK_ENDS = ("succeeded", "failed", "timed_out", "cancelled")
DELIVERY_WORDS = ("pending", "delivered", "failed", "not_applicable")
DELIVERY_ENDS = ("delivered", "failed", "not_applicable")

TASK_CODES = {
    "succeeded": ("completed", "worker_completed"),
    "failed": ("worker_failed",),
    "timed_out": ("deadline_exceeded", "restart_stale"),
    "cancelled": ("caller_cancelled",),
}
DELIVERY_CODES = {
    "delivered": ("transport_acknowledged",),
    "failed": ("delivery_grace_expired", "transport_failed"),
    "not_applicable": ("internal_task",),
}
EVERY_CODE = (
    *(code for codes in (*TASK_CODES.values(), *DELIVERY_CODES.values()) for code in codes),
    "created",
    "started",
    "COMPLETED",
    "completed ",
    "",
    "\ud800",
    b"completed",
    0,
    True,
    ["completed"],
)
EVERY_TARGET = (*TASK_WORDS, *DELIVERY_WORDS, "bogus", "", "Succeeded", b"failed", None, 3)

NOW = 100.0


class AgreeableText(str):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


class Clock:
    def __init__(self, now: Any = NOW) -> None:
        self.now = now
        self.readings = 0

    def __call__(self) -> Any:
        self.readings += 1
        return self.now


def stored(status: str, delivery: str = "pending", *, required: bool = True, started: bool = True, **more: Any) -> Any:
    was_started = status == "running" or (status in TASK_ENDS and started)
    fields = {
        "timeout_seconds": 5.0,
        "created_at": 10.0,
        "started_at": 20.0 if was_started else None,
        "updated_at": 30.0,
        "ended_at": 30.0 if status in TASK_ENDS else None,
        "deadline_at": 25.0 if was_started else None,
        "delivery_updated_at": 10.0 if delivery == "pending" else 40.0,
    }
    return SimpleNamespace(
        status=TaskStatus(status),
        delivery_status=DeliveryStatus(delivery),
        delivery_required=required,
        **{**fields, **more},
    )


def contract(status: str, delivery: str, required: bool, verb: Verb, target: object, code: object) -> Any:
    """What section 2 says in words: a class of refusal, None for a no-op, or True where it happens."""
    if verb is Verb.START:
        return {"queued": True, "running": None}.get(status, StateConflict)
    if verb is Verb.HEARTBEAT:
        return True if status == "running" else StateConflict
    if verb is Verb.CLOSE:
        if not isinstance(target, str) or target not in TASK_ENDS:
            return InvalidInput
        if status == target:
            return None
        if status in TASK_ENDS:
            return StateConflict
        return True if code is None or code in TASK_CODES[target] else InvalidInput
    if not isinstance(target, str) or target not in DELIVERY_ENDS:
        return InvalidInput
    if status not in TASK_ENDS:
        return StateConflict
    if delivery == target:
        return None
    if delivery != "pending":
        return StateConflict
    if (target in ("delivered", "failed")) is not required:
        return StateConflict
    return True if code is None or code in DELIVERY_CODES[target] else InvalidInput


def happens(task: Any, verb: Verb, target: Any, code: Any) -> tuple[Any, Any, int]:
    clock = Clock()
    try:
        change = transition(task, verb, clock, to=target, code=code)
    except (InvalidInput, StateConflict) as refusal:
        return type(refusal), None, clock.readings
    return (None if change is None else True), change, clock.readings


@pytest.mark.parametrize("verb", Verb, ids=lambda verb: verb.value)
@pytest.mark.parametrize("status", TASK_WORDS)
def test_every_combination_goes_as_the_contract_says_and_only_changes_read_the_clock(status: str, verb: Verb) -> None:
    targets = EVERY_TARGET if verb in (Verb.CLOSE, Verb.DELIVER) else (None,)
    counted = 0
    for delivery, required, target, code in itertools.product(
        DELIVERY_WORDS, (True, False), targets, (None, *EVERY_CODE)
    ):
        expected = contract(status, delivery, required, verb, target, code)
        result, _, readings = happens(stored(status, delivery, required=required), verb, target, code)
        assert (result, readings) == (expected, 1 if expected is True else 0), (delivery, required, target, code)
        counted += 1
    assert counted == 4 * 2 * len(targets) * (len(EVERY_CODE) + 1)


def test_a_start_sets_the_start_and_the_deadline_and_records_it() -> None:
    change = transition(stored("queued"), Verb.START, Clock())
    assert change is not None
    assert change.values == {
        "status": TaskStatus.RUNNING,
        "started_at": NOW,
        "updated_at": NOW,
        "deadline_at": NOW + 5.0,
    }
    assert change.event == Event(1, "task_transition", "queued", "running", NOW, "started")


def test_a_start_without_a_timeout_sets_no_deadline() -> None:
    change = transition(stored("queued", timeout_seconds=None), Verb.START, Clock())
    assert change is not None
    assert change.values["deadline_at"] is None


def test_a_heartbeat_moves_the_time_turns_the_expectation_on_and_makes_no_event() -> None:
    change = transition(stored("running"), Verb.HEARTBEAT, Clock())
    assert change is not None
    assert change.values == {"updated_at": NOW, "expects_heartbeat": True}
    assert change.event is None


@pytest.mark.parametrize("code", [None, 0], ids=["no code", "its first code"])
@pytest.mark.parametrize("end", TASK_ENDS)
@pytest.mark.parametrize(("status", "number"), [("queued", 1), ("running", 2)])
def test_a_close_sets_the_end_and_records_it(status: str, number: int, end: str, code: int | None) -> None:
    reason = None if code is None else TASK_CODES[end][code]
    change = transition(stored(status), Verb.CLOSE, Clock(), to=TaskStatus(end), code=reason)
    assert change is not None
    assert change.values == {"status": end, "updated_at": NOW, "ended_at": NOW, "terminal_code": reason}
    assert change.event == Event(number, "task_transition", status, end, NOW, reason)


@pytest.mark.parametrize("code", [None, 0], ids=["no code", "its first code"])
@pytest.mark.parametrize("end", DELIVERY_ENDS)
@pytest.mark.parametrize(("started", "number"), [(False, 2), (True, 3)])
@pytest.mark.parametrize("status", TASK_ENDS)
def test_a_delivery_sets_its_time_and_records_it(
    status: str, started: bool, number: int, end: str, code: int | None
) -> None:
    reason = None if code is None else DELIVERY_CODES[end][code]
    task = stored(status, started=started, required=end != "not_applicable")
    change = transition(task, Verb.DELIVER, Clock(), to=DeliveryStatus(end), code=reason)
    assert change is not None
    assert change.values == {"delivery_status": end, "delivery_updated_at": NOW, "delivery_code": reason}
    assert change.event == Event(number, "delivery_transition", "pending", end, NOW, reason)


def test_the_first_event_of_every_chain_is_its_creation() -> None:
    assert created(5.0) == Event(0, "created", None, "queued", 5.0, "created")
    assert EVENT_KINDS == ("created", "task_transition", "delivery_transition")


STORED_TIMES = ("created_at", "started_at", "updated_at", "ended_at", "deadline_at", "delivery_updated_at")
COMPARED = {
    (Verb.START, "queued"): {"created_at", "updated_at"},
    (Verb.HEARTBEAT, "running"): {"created_at", "started_at", "updated_at"},
    (Verb.CLOSE, "running"): {"created_at", "started_at", "updated_at"},
    (Verb.CLOSE, "queued"): {"created_at", "started_at", "updated_at"},
    (Verb.DELIVER, "failed"): {"created_at", "updated_at", "ended_at", "delivery_updated_at"},
}
TARGETS = {Verb.CLOSE: "succeeded", Verb.DELIVER: "delivered"}


@pytest.mark.parametrize("time", STORED_TIMES)
@pytest.mark.parametrize(("verb", "status"), COMPARED, ids=lambda value: getattr(value, "value", value))
def test_a_verb_compares_the_clock_with_just_the_stored_times_of_the_contract(
    verb: Verb, status: str, time: str
) -> None:
    target: Any = TARGETS.get(verb)
    for later, refused in (
        (NOW, False),
        (NOW + 1e-9, time in COMPARED[verb, status]),
        (1e300, time in COMPARED[verb, status]),
    ):
        result, _, readings = happens(stored(status, **{time: later}), verb, target, None)
        assert result is (StateConflict if refused else True), later
        assert readings == 1


@pytest.mark.parametrize(("verb", "status"), COMPARED, ids=lambda value: getattr(value, "value", value))
@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf, None, True, "soon", 10**400, object()])
def test_a_clock_without_a_finite_number_is_invalid_input(verb: Verb, status: str, now: object) -> None:
    with pytest.raises(InvalidInput):
        transition(stored(status), verb, Clock(now), to=TARGETS.get(verb))  # type: ignore[arg-type]


@pytest.mark.parametrize(("verb", "status"), COMPARED, ids=lambda value: getattr(value, "value", value))
def test_a_clock_may_give_its_number_as_text_or_a_subclass_and_an_exact_float_is_stored(
    verb: Verb, status: str
) -> None:
    class Subclass(float):
        pass

    for reading in ("100", b"100", 100, Subclass(100.0)):
        change = transition(stored(status), verb, Clock(reading), to=TARGETS.get(verb))  # type: ignore[arg-type]
        assert change is not None
        times = [value for name, value in change.values.items() if name.endswith("_at") and name != "deadline_at"]
        assert times
        assert all(type(value) is float and value == NOW for value in times)


@pytest.mark.parametrize("now", [math.nan, -1.0], ids=["not finite", "behind"])
@pytest.mark.parametrize(
    ("verb", "task", "target", "code", "refusal"),
    [
        (Verb.START, stored("failed"), None, None, StateConflict),
        (Verb.HEARTBEAT, stored("queued"), None, None, StateConflict),
        (Verb.CLOSE, stored("running"), "pending", None, InvalidInput),
        (Verb.CLOSE, stored("failed"), "queued", "bogus", InvalidInput),
        (Verb.CLOSE, stored("failed"), "succeeded", "bogus", StateConflict),
        (Verb.CLOSE, stored("running"), "succeeded", "bogus", InvalidInput),
        (Verb.DELIVER, stored("running"), "pending", "bogus", InvalidInput),
        (Verb.DELIVER, stored("running"), "delivered", "bogus", StateConflict),
        (Verb.DELIVER, stored("failed", "failed"), "delivered", "bogus", StateConflict),
        (Verb.DELIVER, stored("failed"), "not_applicable", "bogus", StateConflict),
        (Verb.DELIVER, stored("failed", required=False), "delivered", "bogus", StateConflict),
        (Verb.DELIVER, stored("failed"), "delivered", "bogus", InvalidInput),
    ],
)
def test_the_state_refuses_before_the_code_and_the_code_before_the_time(
    verb: Verb, task: Any, target: Any, code: str | None, refusal: type[Exception], now: float
) -> None:
    clock = Clock(now)
    with pytest.raises(refusal):
        transition(task, verb, clock, to=target, code=code)
    assert clock.readings == 0


@pytest.mark.parametrize(
    ("verb", "task", "target"),
    [
        (Verb.START, stored("running"), None),
        *((Verb.CLOSE, stored(end), end) for end in TASK_ENDS),
        *((Verb.DELIVER, stored("failed", end), end) for end in DELIVERY_ENDS),
    ],
)
@pytest.mark.parametrize("code", [None, "bogus", "completed", 5])
def test_a_no_op_looks_neither_at_the_code_nor_at_the_clock(verb: Verb, task: Any, target: Any, code: object) -> None:
    clock = Clock(math.nan)
    assert transition(task, verb, clock, to=target, code=code) is None
    assert clock.readings == 0


@pytest.mark.parametrize(
    ("verb", "status"), [(Verb.HEARTBEAT, "running"), (Verb.CLOSE, "running"), (Verb.DELIVER, "failed")]
)
def test_a_deadline_long_past_forbids_nothing(verb: Verb, status: str) -> None:
    result, _, _ = happens(stored(status, deadline_at=21.0), verb, TARGETS.get(verb), None)
    assert result is True


@pytest.mark.parametrize("timeout", [1.7976931348623157e308, 1e308])
def test_a_deadline_that_is_not_finite_is_invalid_input(timeout: float) -> None:
    task = stored("queued", timeout_seconds=timeout)
    with pytest.raises(InvalidInput):
        transition(task, Verb.START, Clock(1e308))


def test_a_clock_behind_is_told_before_a_deadline_that_is_not_finite() -> None:
    task = stored("queued", created_at=1.2e308, updated_at=1.2e308, timeout_seconds=1.7e308)
    with pytest.raises(StateConflict):
        transition(task, Verb.START, Clock(1.1e308))


def test_the_registry_of_reasons_is_the_contracts_word_for_word() -> None:
    assert {status.value: codes for status, codes in TASK_REASONS.items()} == TASK_CODES
    assert {status.value: codes for status, codes in DELIVERY_REASONS.items()} == DELIVERY_CODES


def test_the_states_are_the_contracts_and_are_text() -> None:
    assert tuple(status.value for status in TaskStatus) == TASK_WORDS
    assert tuple(status.value for status in DeliveryStatus) == DELIVERY_WORDS
    for status in (*TaskStatus, *DeliveryStatus):
        assert isinstance(status, str)
        assert str(status) == f"{status}" == status.value


def test_a_code_that_says_it_equals_everything_is_judged_by_what_it_is() -> None:
    with pytest.raises(InvalidInput):
        transition(stored("running"), Verb.CLOSE, Clock(), to=TaskStatus.SUCCEEDED, code=AgreeableText("bogus"))
    change = transition(
        stored("running"), Verb.CLOSE, Clock(), to=TaskStatus.SUCCEEDED, code=AgreeableText("completed")
    )
    assert change is not None
    assert type(change.values["terminal_code"]) is str
    with pytest.raises(InvalidInput):
        transition(stored("running"), Verb.CLOSE, Clock(), to=AgreeableText("bogus"))  # type: ignore[arg-type]


def test_times_that_are_not_stored_are_not_compared() -> None:
    require_not_before(5.0, None, 5.0, 4.0)
    with pytest.raises(StateConflict):
        require_not_before(5.0, None, 5.5)


def creation(**fields: Any) -> Any:
    return SimpleNamespace(
        **{
            "parent_id": None,
            "payload_hash": None,
            "timeout_seconds": 5.0,
            "delivery_required": True,
            "expects_heartbeat": True,
            "version": 0,
            "started_at": None,
            "status": TaskStatus.QUEUED,
            "delivery_status": DeliveryStatus.PENDING,
            **fields,
        }
    )


@pytest.mark.parametrize(
    "other",
    [
        {"parent_id": "x"},
        {"payload_hash": "0" * 64},
        {"timeout_seconds": None},
        {"timeout_seconds": 6.0},
        {"delivery_required": False},
        {"expects_heartbeat": False},
    ],
)
def test_a_creation_is_the_same_when_every_immutable_field_is(other: dict[str, object]) -> None:
    assert is_same_creation(creation(), creation())
    assert not is_same_creation(creation(), creation(**other))
    assert not is_same_creation(creation(**other), creation())


def test_a_first_heartbeat_does_not_make_a_creation_another_one() -> None:
    beaten = creation(status=TaskStatus.RUNNING, started_at=1.0, version=2)
    assert is_same_creation(beaten, creation(expects_heartbeat=False))
    unbeaten = creation(status=TaskStatus.RUNNING, started_at=1.0, version=1)
    assert not is_same_creation(unbeaten, creation(expects_heartbeat=False))
