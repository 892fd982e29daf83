"""The two state machines, the reason registry, and the transition itself.

A task's *status* says whether the work ended, and how:

- ``queued``: recorded, not started. No deadline runs, no heartbeat is expected.
- ``running``: started. From here the deadline runs, and silence can be held against it.
- ``succeeded``: somebody saw it end well. Reconcile never writes this.
- ``failed``: somebody saw it end badly.
- ``timed_out``: its deadline passed, or nobody vouched for it within the grace.
- ``cancelled``: its caller gave it up.

Its *delivery status* says whether the result arrived, which is another question:

- ``pending``: not known to have arrived. It can only change once the task has ended.
- ``delivered``: the transport acknowledged it.
- ``failed``: it will not arrive.
- ``not_applicable``: nobody was to receive it; the only end for an internal task.

Nothing leaves a terminal state. :func:`transition` is the one place that knows what each verb does;
the models apply it to attributes, :class:`tsg.Ledger` by compare-and-set, and reconcile as sets (a test
holds that equal to the verbs). All times are seconds since the epoch, as floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from tsg import values
from tsg.errors import InvalidInput, StateConflict

__all__ = [
    "ACTIVE",
    "DELIVERY_REASONS",
    "DELIVERY_TRANSITIONS",
    "EVENT_KINDS",
    "TASK_REASONS",
    "TASK_TRANSITIONS",
    "TERMINAL",
    "Change",
    "Clock",
    "DeliveryStatus",
    "Event",
    "TaskStatus",
    "TaskValues",
    "Verb",
    "created",
    "delivery_target",
    "is_same_creation",
    "require_not_before",
    "task_target",
    "transition",
]


class TaskStatus(StrEnum):
    """Whether the work ended, and how."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


class DeliveryStatus(StrEnum):
    """Whether the result arrived."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"
    NOT_APPLICABLE = "not_applicable"


class Verb(Enum):
    """What can be done to a task that exists."""

    START = "start"
    HEARTBEAT = "heartbeat"
    CLOSE = "close"
    DELIVER = "deliver"


_TASK_ENDS: Final = (TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.TIMED_OUT, TaskStatus.CANCELLED)
_DELIVERY_ENDS: Final = (DeliveryStatus.DELIVERED, DeliveryStatus.FAILED, DeliveryStatus.NOT_APPLICABLE)

ACTIVE: Final = (TaskStatus.QUEUED, TaskStatus.RUNNING)
TERMINAL: Final = _TASK_ENDS

TASK_TRANSITIONS: Final[Mapping[TaskStatus, tuple[TaskStatus, ...]]] = MappingProxyType(
    {
        TaskStatus.QUEUED: (TaskStatus.RUNNING, *_TASK_ENDS),
        TaskStatus.RUNNING: _TASK_ENDS,
        **dict.fromkeys(_TASK_ENDS, ()),
    }
)
DELIVERY_TRANSITIONS: Final[Mapping[DeliveryStatus, tuple[DeliveryStatus, ...]]] = MappingProxyType(
    {DeliveryStatus.PENDING: _DELIVERY_ENDS, **dict.fromkeys(_DELIVERY_ENDS, ())}
)

#: The reasons that may be given with each terminal state. A reason is always optional.
TASK_REASONS: Final[Mapping[TaskStatus, tuple[str, ...]]] = MappingProxyType(
    {
        TaskStatus.SUCCEEDED: ("completed", "worker_completed"),
        TaskStatus.FAILED: ("worker_failed",),
        TaskStatus.TIMED_OUT: ("deadline_exceeded", "restart_stale"),
        TaskStatus.CANCELLED: ("caller_cancelled",),
    }
)
DELIVERY_REASONS: Final[Mapping[DeliveryStatus, tuple[str, ...]]] = MappingProxyType(
    {
        DeliveryStatus.DELIVERED: ("transport_acknowledged",),
        DeliveryStatus.FAILED: ("delivery_grace_expired", "transport_failed"),
        DeliveryStatus.NOT_APPLICABLE: ("internal_task",),
    }
)

EVENT_KINDS: Final = ("created", "task_transition", "delivery_transition")

#: Seconds since the epoch, read at most once a transition, and only when there is something to do.
Clock = Callable[[], float]


class TaskValues(Protocol):
    """The stored values that decide a transition; models, records and result rows all have them."""

    @property
    def status(self) -> TaskStatus: ...
    @property
    def delivery_status(self) -> DeliveryStatus: ...
    @property
    def delivery_required(self) -> bool: ...
    @property
    def timeout_seconds(self) -> float | None: ...
    @property
    def created_at(self) -> float: ...
    @property
    def started_at(self) -> float | None: ...
    @property
    def updated_at(self) -> float: ...
    @property
    def ended_at(self) -> float | None: ...
    @property
    def delivery_updated_at(self) -> float: ...


class CreationValues(TaskValues, Protocol):
    """What else a creation is compared by."""

    @property
    def parent_id(self) -> str | None: ...
    @property
    def payload_hash(self) -> str | None: ...
    @property
    def expects_heartbeat(self) -> bool: ...
    @property
    def version(self) -> int: ...


class Event(NamedTuple):
    """One row of a task's history; ``number`` counts from 0 in that task's chain."""

    number: int
    kind: str
    from_status: str | None
    to_status: str
    occurred_at: float | None
    code: str | None


class Change(NamedTuple):
    """What a verb does to a task: the columns that take new values, and the event, if it makes one.

    ``version`` is not among the values: whoever applies a change adds one to it.
    """

    values: dict[str, object]
    event: Event | None


def created(occurred_at: float | None = None) -> Event:
    """The first event of every chain; its time may be known later."""
    return Event(0, "created", None, TaskStatus.QUEUED.value, occurred_at, "created")


def is_same_creation(stored: CreationValues, asked: CreationValues) -> bool:
    """Whether creating `asked` again finds just that: all that never changes is the same."""
    # A first heartbeat turns the expectation on; only before it can the flag tell what was asked for.
    beaten = stored.started_at is not None and stored.version > sum(
        (1, stored.status in TERMINAL, stored.delivery_status != DeliveryStatus.PENDING)
    )
    return (
        stored.parent_id == asked.parent_id
        and stored.payload_hash == asked.payload_hash
        and stored.timeout_seconds == asked.timeout_seconds
        and stored.delivery_required == asked.delivery_required
        and (stored.expects_heartbeat == asked.expects_heartbeat or beaten)
    )


def require_not_before(now: float, *stored: float | None) -> None:
    """That no time that is stored lies after `now`.

    Raises:
        StateConflict: one does.
    """
    if any(earlier is not None and now < earlier for earlier in stored):
        raise StateConflict("the clock is behind a time that is stored already")


def task_target(status: object) -> TaskStatus:
    """The terminal task status that `status` names, or :exc:`InvalidInput`."""
    name = values.text(status)
    for end in _TASK_ENDS:
        if name == end.value:
            return end
    raise InvalidInput("a task closes as succeeded, failed, timed_out or cancelled")


def delivery_target(status: object) -> DeliveryStatus:
    """The terminal delivery status that `status` names, or :exc:`InvalidInput`."""
    name = values.text(status)
    for end in _DELIVERY_ENDS:
        if name == end.value:
            return end
    raise InvalidInput("a delivery closes as delivered, failed or not_applicable")


def transition(
    task: TaskValues,
    verb: Verb,
    clock: Clock,
    *,
    to: TaskStatus | DeliveryStatus | None = None,
    code: object = None,
) -> Change | None:
    """What `verb` does to `task`; ``None`` where it is already so.

    Args:
        task: the stored values. Nothing else is looked at.
        clock: gives the time of the transition; not called for a no-op or a refusal by state.
        to: the terminal state, for ``CLOSE`` and ``DELIVER``.
        code: the optional reason, looked at only once the state allows the transition.

    Raises:
        StateConflict: the state refuses, or the clock is behind a stored time.
        InvalidInput: the reason does not fit the state, or a time is not a finite number.

    The order of refusals is part of the contract: state, then reason, then time.
    """
    if verb is Verb.START:
        return _start(task, clock)
    if verb is Verb.HEARTBEAT:
        return _heartbeat(task, clock)
    if verb is Verb.CLOSE:
        return _close(task, task_target(to), code, clock)
    return _deliver(task, delivery_target(to), code, clock)


def _start(task: TaskValues, clock: Clock) -> Change | None:
    if task.status == TaskStatus.RUNNING:
        return None
    if task.status != TaskStatus.QUEUED:
        raise StateConflict("a task that has ended can't start; create a new one for a retry")
    now = _now(clock, task.created_at, task.updated_at)
    deadline = None if task.timeout_seconds is None else now + task.timeout_seconds
    if deadline is not None and not math.isfinite(deadline):
        raise InvalidInput("the deadline would not be a finite time; give a shorter timeout")
    return Change(
        {"status": TaskStatus.RUNNING, "started_at": now, "updated_at": now, "deadline_at": deadline},
        Event(1, "task_transition", TaskStatus.QUEUED.value, TaskStatus.RUNNING.value, now, "started"),
    )


def _heartbeat(task: TaskValues, clock: Clock) -> Change:
    if task.status != TaskStatus.RUNNING:
        raise StateConflict("only a running task has a heartbeat")
    now = _now(clock, task.created_at, task.started_at, task.updated_at)
    # A first beat is a promise of more: from then on silence counts.
    return Change({"updated_at": now, "expects_heartbeat": True}, None)


def _close(task: TaskValues, to: TaskStatus, code: object, clock: Clock) -> Change | None:
    if task.status == to:
        return None
    if to not in TASK_TRANSITIONS[task.status]:
        raise StateConflict("the task has ended otherwise already, and that stays")
    reason = _reason(code, TASK_REASONS[to])
    now = _now(clock, task.created_at, task.started_at, task.updated_at)
    number = 1 if task.started_at is None else 2
    return Change(
        {"status": to, "updated_at": now, "ended_at": now, "terminal_code": reason},
        Event(number, "task_transition", task.status.value, to.value, now, reason),
    )


def _deliver(task: TaskValues, to: DeliveryStatus, code: object, clock: Clock) -> Change | None:
    if task.status in ACTIVE:
        raise StateConflict("a delivery closes only after its task has ended")
    if task.delivery_status == to:
        return None
    if to not in DELIVERY_TRANSITIONS[task.delivery_status]:
        raise StateConflict("the delivery has closed otherwise already, and that stays")
    if task.delivery_required is (to == DeliveryStatus.NOT_APPLICABLE):
        raise StateConflict("a required delivery is delivered or failed, an internal one not_applicable")
    reason = _reason(code, DELIVERY_REASONS[to])
    now = _now(clock, task.created_at, task.updated_at, task.ended_at, task.delivery_updated_at)
    number = 2 if task.started_at is None else 3
    return Change(
        {"delivery_status": to, "delivery_updated_at": now, "delivery_code": reason},
        Event(number, "delivery_transition", DeliveryStatus.PENDING.value, to.value, now, reason),
    )


def _reason(code: object, allowed: tuple[str, ...]) -> str | None:
    if code is None:
        return None
    name = values.text(code)
    for reason in allowed:
        if name == reason:
            return reason
    raise InvalidInput("the reason code is not one that fits this state")


def _now(clock: Clock, *stored: float | None) -> float:
    now = values.clock_reading(clock)
    require_not_before(now, *stored)
    return now
