"""When a step may run, who does it next, and what becomes of it: pure functions over plain values.

A step's *status*:

- ``pending``: not done. Whether it is *ready* or *blocked* is worked out, never stored.
- ``in_progress``: it has a live attempt, waiting to be taken or running; or one that has ended, and was not folded yet.
- ``completed``: done. Nothing leaves this.
- ``partial``: its time ran out, and what it had by then is there. Waits for a decision.
- ``escalated``: all tries are used up, and somebody has to decide.
- ``failed``: the same, where the plan fails with it. Waits for a decision too.
- ``cancelled``: given up. What depends on it stays blocked.
- ``deleted``: as if it had never been; what waited for it waits no more.

Nothing here knows a database or a clock. All times are seconds since the epoch.
"""

from __future__ import annotations

import graphlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from tsg import values
from tsg.errors import DependencyCycle, InvalidInput
from tsg.states import TaskStatus

__all__ = [
    "AT_REST",
    "AWAITING_DECISION",
    "CLOSED_PLANS",
    "DEFAULT_CAP_SECONDS",
    "DEFAULT_GRACE_SECONDS",
    "DEFAULT_RETRIES",
    "DEFAULT_STEP_TIMEOUT_SECONDS",
    "DEFAULT_TIMEOUT_SECONDS",
    "MOST_REVIVALS",
    "STEP_TRANSITIONS",
    "Backoff",
    "Decision",
    "OnExhausted",
    "PlanStatus",
    "RetryPolicy",
    "Situation",
    "StepStatus",
    "Tally",
    "Verdict",
    "after_decision",
    "after_ending",
    "in_order",
    "is_ready",
    "plan_status",
    "require_agent",
]

#: Of a plan that is made by hand.
DEFAULT_TIMEOUT_SECONDS: Final = 120.0
DEFAULT_RETRIES: Final = 3
#: Of a step of a long task.
DEFAULT_STEP_TIMEOUT_SECONDS: Final = 300.0
DEFAULT_GRACE_SECONDS: Final = 600.0
#: How often a plan that was failed goes on by itself; then a person must look (runner.md, section 3).
MOST_REVIVALS: Final = 3
#: The longest delay before a retry where a policy names none.
DEFAULT_CAP_SECONDS: Final = 3600.0


class StepStatus(StrEnum):
    """Where a step stands."""

    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    PARTIAL = "partial"
    ESCALATED = "escalated"
    CANCELLED = "cancelled"
    DELETED = "deleted"


class PlanStatus(StrEnum):
    """Where a plan stands. ``failed`` is not final: a decision on the failed step goes on with it."""

    PENDING = "pending"
    RUNNING = "running"
    FAILED = "failed"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


class Backoff(StrEnum):
    """How the delay before a retry grows."""

    EXPONENTIAL = "exponential"
    FIXED = "fixed"


class OnExhausted(StrEnum):
    """What becomes of a step whose tries are used up."""

    ESCALATE = "escalate"
    FAIL = "fail"


class Decision(StrEnum):
    """What somebody may decide on a step that waits for it."""

    RETRY = "retry"
    REASSIGN = "reassign"
    CANCEL = "cancel"
    COMPLETE = "complete"


AWAITING_DECISION: Final = (StepStatus.PARTIAL, StepStatus.ESCALATED, StepStatus.FAILED)
#: Nothing more is to come of these.
AT_REST: Final = (StepStatus.COMPLETED, StepStatus.CANCELLED, StepStatus.DELETED)
CLOSED_PLANS: Final = (PlanStatus.COMPLETED, PlanStatus.CANCELLED)

_GIVEN_UP: Final = (StepStatus.CANCELLED, StepStatus.DELETED)

STEP_TRANSITIONS: Final[Mapping[StepStatus, tuple[StepStatus, ...]]] = MappingProxyType(
    {
        StepStatus.PENDING: (StepStatus.IN_PROGRESS, *_GIVEN_UP),
        StepStatus.IN_PROGRESS: (
            StepStatus.PENDING,
            StepStatus.COMPLETED,
            StepStatus.FAILED,
            StepStatus.PARTIAL,
            StepStatus.ESCALATED,
            *_GIVEN_UP,
        ),
        **dict.fromkeys(AWAITING_DECISION, (StepStatus.PENDING, StepStatus.COMPLETED, *_GIVEN_UP)),
        StepStatus.COMPLETED: (),
        StepStatus.CANCELLED: (StepStatus.DELETED,),
        StepStatus.DELETED: (),
    }
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and after which delay, a step is tried again.

    Args:
        count: retries beyond the first try.
        backoff: ``exponential`` or ``fixed``.
        base_seconds: the first delay; 5 where it grows, else 10.
        factor: what each delay is the last one times; 3 unless given, and at least 1. Of no matter where fixed.
        cap_seconds: the longest delay, 3,600 unless given.

    Raises:
        InvalidInput: a number that is none, negative or not finite, or another kind of backoff.
    """

    count: int = DEFAULT_RETRIES
    backoff: Backoff = Backoff.EXPONENTIAL
    base_seconds: float | None = None
    factor: float | None = None
    cap_seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", values.whole(self.count, "a number of retries"))
        backoff = values.text(self.backoff)
        if backoff not in tuple(Backoff):
            raise InvalidInput("a backoff is exponential or fixed")
        object.__setattr__(self, "backoff", Backoff(backoff))
        for name in ("base_seconds", "factor", "cap_seconds"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, values.non_negative(given, name))
        if self.factor is not None and self.factor < 1:
            raise InvalidInput("factor must be at least 1: a delay that shrinks is no backoff")

    def delay(self, retry: int) -> float:
        """Seconds to wait before a retry, which are numbered from 1; never above the cap, whatever the number.

        Raises:
            InvalidInput: no such number.
        """
        values.at_least_one(retry, "the number of a retry")
        cap = DEFAULT_CAP_SECONDS if self.cap_seconds is None else self.cap_seconds
        if self.backoff is Backoff.FIXED:
            return min(cap, 10.0 if self.base_seconds is None else self.base_seconds)
        base = 5.0 if self.base_seconds is None else self.base_seconds
        factor = 3.0 if self.factor is None else self.factor
        if base == 0:
            return 0.0
        try:
            return min(cap, base * factor ** (retry - 1))
        except OverflowError:
            return cap

    def to_json(self) -> dict[str, object]:
        """The JSON form, with no more fields than were given."""
        optional = {name: getattr(self, name) for name in ("base_seconds", "factor", "cap_seconds")}
        given = {name: value for name, value in optional.items() if value is not None}
        return {"count": self.count, "backoff": self.backoff.value, **given}


class Situation(NamedTuple):
    """What decides about a step whose attempt has ended.

    Attributes:
        failures: tries that have failed since the count was last fresh, without this one.
        fell_back: whether the fallback agent has had its turn.
        has_output: whether this attempt left any.
    """

    policy: RetryPolicy
    failures: int = 0
    owner: str | None = None
    fallback_agent: str | None = None
    fell_back: bool = False
    partial_ok: bool = False
    has_output: bool = False
    on_exhausted: OnExhausted = OnExhausted.ESCALATE


class Verdict(NamedTuple):
    """What becomes of the step: its status, and what decides about its next attempt.

    Attributes:
        due_at: before which it is not tried again; ``None`` for at once.
    """

    status: StepStatus
    failures: int
    owner: str | None
    fell_back: bool
    due_at: float | None = None


def is_ready(status: StepStatus, open_blockers: int, due_at: float | None, now: float) -> bool:
    """Whether a step may run: pending, nothing in its way, and its delay has passed."""
    return status == StepStatus.PENDING and open_blockers == 0 and (due_at is None or due_at <= now)


def after_ending(situation: Situation, ended_as: TaskStatus, ended_at: float) -> Verdict:
    """What becomes of a step whose attempt has ended so, whoever ended it.

    A failure and a time-out are tried again as long as retries are left, then once more from the start by the
    fallback agent; then the plan's word holds. A time-out that left something may be all that was wanted.
    """
    stays = Verdict(StepStatus.COMPLETED, situation.failures, situation.owner, situation.fell_back)
    if ended_as == TaskStatus.SUCCEEDED:
        return stays
    if ended_as == TaskStatus.CANCELLED:
        return stays._replace(status=StepStatus.CANCELLED)
    failures = situation.failures + 1
    if ended_as == TaskStatus.TIMED_OUT and situation.partial_ok and situation.has_output:
        return stays._replace(status=StepStatus.PARTIAL, failures=failures)
    if failures <= situation.policy.count:
        due_at = ended_at + situation.policy.delay(failures)
        # A delay can be longer than there is time.
        return stays._replace(status=StepStatus.PENDING, failures=failures, due_at=min(due_at, sys.float_info.max))
    if situation.fallback_agent is not None and not situation.fell_back and situation.fallback_agent != situation.owner:
        return Verdict(StepStatus.PENDING, 0, situation.fallback_agent, True)
    end = StepStatus.FAILED if situation.on_exhausted == OnExhausted.FAIL else StepStatus.ESCALATED
    return stays._replace(status=end, failures=failures)


def require_agent(decision: Decision, to: str | None) -> None:
    """That a decision names an agent where it needs one, and only there.

    Raises:
        InvalidInput: it doesn't.
    """
    if (to is not None) != (decision is Decision.REASSIGN):
        raise InvalidInput("a step is reassigned to an agent, which is named then and only then")


def after_decision(situation: Situation, decision: Decision, to: str | None = None) -> Verdict:
    """What becomes of a step that waited for a decision.

    Args:
        to: the agent that it is given to, for ``reassign`` and for nothing else.

    Raises:
        InvalidInput: `to` is missing, or there without need.
    """
    require_agent(decision, to)
    stays = Verdict(StepStatus.COMPLETED, situation.failures, situation.owner, situation.fell_back)
    if decision is Decision.COMPLETE:
        return stays
    if decision is Decision.CANCEL:
        return stays._replace(status=StepStatus.CANCELLED)
    owner = situation.owner if to is None else to
    return Verdict(StepStatus.PENDING, 0, owner, situation.fell_back)


class Tally(NamedTuple):
    """What is true of a plan's steps; a deleted one is none of them.

    Attributes:
        any: there is one.
        all_settled: each is completed or cancelled.
        any_failed: one has failed, and the plan with it.
        begun: one is not pending, or has had an attempt.
        halted: something could not be delivered to its agent, which fails the plan whatever its steps are.
    """

    any: bool
    all_settled: bool
    any_failed: bool
    begun: bool
    halted: bool = False


def plan_status(tally: Tally) -> PlanStatus:
    """Where a plan that is open stands: completed once every step is completed or cancelled, and there is one."""
    if tally.any and tally.all_settled:
        return PlanStatus.COMPLETED
    if tally.any_failed or tally.halted:
        return PlanStatus.FAILED
    return PlanStatus.RUNNING if tally.begun else PlanStatus.PENDING


def in_order(blockers: Mapping[int, Iterable[int]], name: Callable[[int], str]) -> list[int]:
    """The steps so that each comes after all that it waits for.

    Args:
        blockers: each step's key with those that it waits for.
        name: what a step is called in an error.

    Raises:
        DependencyCycle: there is no such order; it names a cycle, each step before the one that waits for it.
    """
    try:
        return list(graphlib.TopologicalSorter(blockers).static_order())
    except graphlib.CycleError as error:
        raise DependencyCycle(tuple(name(step) for step in error.args[1])) from None
