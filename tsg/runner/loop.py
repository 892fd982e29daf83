"""The runner: it carries a plan through to its end, however often it is killed and started again.

All that it knows is in the database. What it has in its own memory are the commands that it has started and not seen
the end of; if it dies, another sends their attempts once more, by the same tokens.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import StrEnum
from typing import Final, NamedTuple

from tsg import values
from tsg.errors import InvalidInput, SchemaOutdated, SchemaTooNew, StateConflict
from tsg.plan import fields, reading
from tsg.plan.reading import PlanView
from tsg.plan.scheduling import PlanStatus, StepStatus
from tsg.plan.store import Plans
from tsg.plan.transaction import Transaction
from tsg.runner import dispatch
from tsg.runner.agents import Agents
from tsg.runner.deliveries import Deliveries
from tsg.runner.dispatch import Change, Round
from tsg.runner.logs import Logs

__all__ = ["DEFAULT_INTERVAL_SECONDS", "DEFAULT_STALL_SECONDS", "Ended", "Outcome", "Runner"]

DEFAULT_INTERVAL_SECONDS: Final = 15.0
DEFAULT_STALL_SECONDS: Final = 1200.0
#: The shortest sleep: what is due by one clock and not yet by another is not waited for in a tight loop.
_SHORTEST_SLEEP: Final = 0.02
#: By how much more than was intended the clock must have gone on for the runner to think that it was asleep.
_GAP_SECONDS: Final = 10.0


class Outcome(StrEnum):
    """How a run has ended."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    CANCELLED = "cancelled"
    WAITING = "waiting"
    STALLED = "stalled"
    EXHAUSTED = "exhausted"

    @property
    def is_success(self) -> bool:
        """Whether all is done, or somebody asked the runner to stop."""
        return self in (Outcome.COMPLETED, Outcome.STOPPED)


class Ended(NamedTuple):
    """How a run has ended, and the plan as it was then."""

    outcome: Outcome
    plan: PlanView


class Runner:
    """Runs one plan.

    Args:
        plans: where it is.
        plan: its name.
        database: what commands and messages name the ledger by.
        agents: who can be asked by a command; by default nobody, and all goes into the agents' inboxes.
        interval_seconds: the longest time between two rounds.
        max_parallel: how many steps of the plan may be in progress at once, whoever has begun them.
        on_undelivered: what to do when a step can't be handed over by a command: ``stop``, with the plan failed, or
            ``wait`` until its agent takes it out of its inbox.
        resume: a person says that the plan is to go on, however often it has failed.
        stall_seconds: how long nothing may move before the run is given up.
        reset: whether agents are to begin each step in a fresh context.
        logs: where the run is told of; by default on stderr.

    Raises:
        InvalidInput: a malformed argument.
    """

    def __init__(
        self,
        plans: Plans,
        plan: str,
        *,
        database: str,
        agents: Agents | None = None,
        interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
        max_parallel: int = 1,
        on_undelivered: str = "stop",
        resume: bool = False,
        stall_seconds: float = DEFAULT_STALL_SECONDS,
        reset: bool = True,
        logs: Logs | None = None,
    ) -> None:
        if not values.is_a(plans, Plans):
            raise InvalidInput("a runner needs Plans")
        if agents is not None and not values.is_a(agents, Agents):
            raise InvalidInput("agents are given as Agents")
        if logs is not None and not values.is_a(logs, Logs):
            raise InvalidInput("logs are given as Logs")
        self._plans = plans
        self._name = fields.name(plan, "a plan's name")
        self._interval = values.non_negative(interval_seconds, "an interval")
        if not self._interval:
            raise InvalidInput("an interval must be more than 0 seconds")
        self._most = values.at_least_one(max_parallel, "max_parallel")
        if values.text(on_undelivered) not in ("stop", "wait"):
            raise InvalidInput("on_undelivered is stop or wait")
        self._halts = on_undelivered == "stop"
        self._resume = values.flag(resume, "resume")
        self._stall = values.non_negative(stall_seconds, "stall_seconds")
        self._logs = Logs(None, self._name) if logs is None else logs
        self._deliveries = Deliveries(
            plans,
            agents=Agents() if agents is None else agents,
            database=fields.prose(database, "a database"),
            halts=self._halts,
            reset=values.flag(reset, "reset"),
            logs=self._logs,
            wake=self._wake,
        )
        self._is_stopping = False
        # The time of the last change that was told of.
        self._told_until = 0.0
        self._told: dict[str, Change] = {}
        # When this round was to be, and until when the silence of agents is not judged.
        self._intended: float | None = None
        self._patient_until = 0.0
        self._listener, self._waker = socket.socketpair()
        self._waker.setblocking(False)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def stop(self) -> None:
        """Ask the run to end; may be called from a signal's handler, or another thread."""
        self._is_stopping = True
        self._deliveries.expect_an_end()
        self._wake()

    def close(self) -> None:
        """Give back what the runner holds; it can't run any more."""
        self._listener.close()
        self._waker.close()

    def run(self) -> Ended:
        """Carry the plan through.

        Raises:
            PlanNotFound: there is no such plan.
            StateConflict: the database has refused for as long as a run may stall.
        """
        self._logs.tell("run begins")
        try:
            outcome = self._carry()
        except BaseException as error:
            self._logs.tell("run ends", error=type(error).__name__)
            raise
        finally:
            self._deliveries.let_go()
        self._logs.tell("run ends", outcome=outcome)
        return Ended(outcome, self._plans.peek(self._name))

    # -- the loop --------------------------------------------------------------------------------------

    def _carry(self) -> Outcome:
        started: float | None = None
        has_begun = False
        with self._patiently() as worked:
            while True:
                with worked():
                    if not has_begun and not self._begin():
                        return Outcome.EXHAUSTED
                    has_begun = True
                    self._deliveries.look()
                    found = self._round()
                    started = found.now if started is None else started
                    for errand in found.errands:
                        self._deliveries.send(errand)
                    outcome = self._outcome(found, started)
                    if outcome is not None:
                        if outcome is Outcome.WAITING:
                            self._logs.tell("a person must look", steps_to_decide=found.awaiting)
                        self._deliveries.leave(self._pause)
                        return outcome
                    # What could not be sent has changed the plan already.
                    if all(errand.attempt in self._deliveries for errand in found.errands):
                        self._sleep(self._until_next(found))

    @contextmanager
    def _patiently(self) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """A server that restarts, or a file that others keep busy, is waited for as long as a run may stall."""
        last = time.monotonic()

        @contextmanager
        def worked() -> Iterator[None]:
            nonlocal last
            try:
                yield
            except (SchemaOutdated, SchemaTooNew):
                raise
            except StateConflict as refused:
                if self._is_stopping or time.monotonic() - last >= self._stall:
                    raise
                self._logs.tell("the database refuses", error=type(refused).__name__)
                self._sleep(self._interval)
            else:
                last = time.monotonic()

        yield worked

    def _begin(self) -> bool:
        """Start a failed plan over; whether the plan may be run."""

        def begin(transaction: Transaction) -> tuple[bool, bool, int]:
            plan = reading.plan_row(transaction.connection, self._name, "own")
            may = dispatch.start_over(transaction, plan, resume=self._resume)
            count = reading.plan_row(transaction.connection, self._name).global_retry
            return may, plan.status == PlanStatus.FAILED.value, count

        may, was_failed, count = self._plans._change(self._name, begin)
        if not may:
            self._logs.tell("a person must look, and go on with --resume", global_retry=count)
        elif was_failed:
            self._logs.tell("the plan starts over", global_retry=count)
        return may

    def _round(self) -> Round:
        def on(transaction: Transaction) -> Round:
            plan = reading.plan_row(transaction.connection, self._name, "own")
            return dispatch.take_round(
                transaction,
                plan,
                mine=list(self._deliveries),
                most=0 if self._is_stopping else self._most,
                # Whatever its clock says now.
                since=min(self._told_until, transaction.now),
                by_heartbeat=self._may_judge(transaction.now, plan.grace_seconds),
            )

        found = self._plans._change(self._name, on)
        for change in found.changes:
            # A time is no proof: a clock may have been set back.
            if self._told.get(change.key) == change:
                continue
            self._told[change.key] = change
            begun = change.status != StepStatus.PENDING.value
            if begun or change.attempts:
                self._logs.tell(
                    f"step {change.status}",
                    step=change.key,
                    agent=change.agent,
                    attempts=change.attempts,
                    # Of one that is tried again, why the last try was not enough.
                    error=change.error,
                )
        self._told_until = min(found.now, max([self._told_until, *(change.changed_at for change in found.changes)]))
        for key in found.passed_over:
            self._logs.tell("this step's attempt can't be acted on; run tsg doctor", step=key)
        return found

    def _may_judge(self, now: float, grace: float) -> bool:
        """Whether silence counts: not within one grace after the clock has gone on while the runner did not."""
        if self._intended is not None and now > self._intended + max(_GAP_SECONDS, self._interval):
            self._patient_until = now + grace
            self._logs.tell("the clock has jumped; agents get one grace to be heard of")
        self._intended = now
        # A clock that was set back makes no wait longer.
        self._patient_until = min(self._patient_until, now + grace)
        return now >= self._patient_until

    def _outcome(self, found: Round, started: float) -> Outcome | None:
        if found.status == PlanStatus.COMPLETED.value:
            return Outcome.COMPLETED
        if found.status == PlanStatus.CANCELLED.value:
            return Outcome.CANCELLED
        if self._is_stopping:
            return Outcome.STOPPED
        if found.status == PlanStatus.FAILED.value:
            return Outcome.FAILED
        if found.live or found.errands:
            return None
        # A step that is nobody's may still be claimed by somebody, where that is waited for.
        is_somebodys = found.ready > (found.unassigned if self._halts else 0)
        if not is_somebodys and found.next_at is None and not found.passed_over:
            return Outcome.WAITING
        return Outcome.STALLED if found.now - max(found.moved_at, started) >= self._stall else None

    def _until_next(self, found: Round) -> float:
        """Seconds to sleep."""
        soonest = self._interval
        if found.next_at is not None:
            soonest = min(soonest, found.next_at - found.now)
        look = self._deliveries.next_look()
        return max(soonest if look is None else min(soonest, look), _SHORTEST_SLEEP)

    # -- inside ----------------------------------------------------------------------------------------

    def _wake(self) -> None:
        # Full: it wakes anyway. Closed: nobody sleeps any more.
        with suppress(OSError):
            self._waker.send(b"!")

    def _sleep(self, seconds: float) -> None:
        if self._intended is not None:
            self._intended += seconds
        self._pause(seconds)

    def _pause(self, seconds: float) -> None:
        """Wait until something happens here, or the time is over."""
        self._listener.settimeout(seconds)
        with suppress(TimeoutError):
            self._listener.recv(1)
            self._listener.setblocking(False)
            with suppress(BlockingIOError):
                while self._listener.recv(4096):
                    pass
