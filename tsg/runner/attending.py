"""Any program as an agent: its attempt is started, vouched for while it runs, and ended as its exit status says."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from tsg import values
from tsg.errors import InvalidInput, StateConflict
from tsg.plan import fields
from tsg.plan.reading import StepView
from tsg.plan.store import Plans
from tsg.plan.work import interval_of, vouched_for
from tsg.runner.commands import GENTLE_SECONDS, Command, environment, session_of

__all__ = ["Attendance", "Attended"]

#: How long, at least, a report is tried again that only a lock, or a server that restarts, keeps back.
_REPORT_SECONDS: Final = 60.0


class Attended(NamedTuple):
    """How a program has ended.

    Attributes:
        status: its exit status, negative for the signal that ended it.
        step: the step after the report; ``None`` where the attempt was over before, and nothing was reported.
    """

    status: int
    step: StepView | None

    @property
    def is_success(self) -> bool:
        """Whether a success was reported."""
        return self.step is not None and self.status == 0


class Attendance:
    """A program that does a step.

    Args:
        plans: where the plan is.
        plan, key: the step.
        command: the program and its arguments; no shell reads them.
        database: what the program is to name the ledger by, in ``TSG_DB``.
        agent: who does it; by default the step's owner, or the plan's.
        attempt: the token, for who was asked by one.
        interval_seconds: between heartbeats; a quarter of the plan's grace by default, and at most half of it.

    Raises:
        InvalidInput: a malformed argument, no such program, or an interval that can't keep an attempt alive.
        PlanNotFound: there is no such plan.
    """

    def __init__(
        self,
        plans: Plans,
        plan: str,
        key: str,
        command: Sequence[str],
        *,
        database: str,
        agent: str | None = None,
        attempt: str | None = None,
        interval_seconds: float | None = None,
    ) -> None:
        if not values.is_a(plans, Plans):
            raise InvalidInput("a program attends to a step of Plans")
        self._command = fields.prose_list(command, "an argument")
        if not self._command or shutil.which(self._command[0]) is None:
            raise InvalidInput("there is no such program to be run")
        self._plans, self._plan, self._key = plans, plan, fields.key(key)
        self._database = fields.prose(database, "a database")
        self._attempt = values.optional_id(attempt)
        found = plans.peek(plan)
        self._grace = found["grace_seconds"]
        self._agent = found["agent"] if agent is None else fields.agent(agent)
        self._session_name = found["session_name"]
        self._is_given = agent is not None
        self._interval = interval_of(interval_seconds, self._grace)
        self._is_stopping = False
        self._wake = threading.Event()

    def stop(self) -> None:
        """Ask the program to end; what it leaves with is reported all the same. May be called from a handler."""
        self._is_stopping = True

    def run(self) -> Attended:
        """Do it.

        Raises:
            StateConflict: the step is not ready, or somebody else has its attempt; nothing was run.
        """
        step = self._start()
        attempt, owner = step["attempt"], step["owner"]
        assert attempt is not None
        said = environment(
            agent=owner or "",
            session="" if owner is None else session_of(owner, step["session_name"] or self._session_name),
            plan=self._plan,
            step=self._key,
            attempt=attempt,
            params=fields.compact(step["params"]),
            database=self._database,
        )
        try:
            command = Command(self._command, said=said, ended=self._wake.set)
        except (OSError, ValueError) as error:
            why = f"could not be started: {type(error).__name__}"
            self._plans.fail(self._plan, self._key, attempt=attempt, error=why)
            raise InvalidInput("the program can't be run; the attempt has failed with that") from None
        if not self._vouch(command, attempt):
            status = command.wait(0)
            return Attended(-1 if status is None else status, None)
        status = command.status
        assert status is not None
        return Attended(status, self._report(attempt, status))

    def _start(self) -> StepView:
        owner = self._plans.get(self._plan, self._key)["owner"]
        # A step's owner goes before the plan's agent; who names another one is told so.
        agent = self._agent if self._is_given or owner is None else owner
        return self._plans.start(self._plan, self._key, agent=agent, attempt=self._attempt)

    def _vouch(self, command: Command, attempt: str) -> bool:
        """Send heartbeats until the program has ended; whether the attempt lived so long."""
        due = time.monotonic()
        while command.status is None:
            now = time.monotonic()
            if now >= due:
                due = now + self._interval
                if not vouched_for(self._plans, attempt):
                    self._end(command)
                    return False
            left = due - now
            if self._is_stopping:
                ends_in = command.end()
                left = min(left, 1.0 if ends_in is None else ends_in)
            # Short, since a signal's handler can't end a sleep.
            self._wake.wait(max(min(left, 0.2), 0.01))
        return True

    def _end(self, command: Command) -> None:
        """End the program, and what it has started in turn."""
        left = command.end()
        while left is not None and command.leaves_somebody:
            time.sleep(min(left, 0.1))
            left = command.end()
        command.wait(GENTLE_SECONDS)

    def _report(self, attempt: str, status: int) -> StepView:
        until = time.monotonic() + max(_REPORT_SECONDS, self._grace)
        while True:
            try:
                if status == 0:
                    return self._plans.complete(self._plan, self._key, attempt=attempt)
                how = f"exit status {status}" if status > 0 else f"ended by signal {-status}"
                return self._plans.fail(self._plan, self._key, attempt=attempt, error=how)
            except StateConflict as refused:
                told = not refused.retriable and self._plans._is_over(attempt)
                if told or time.monotonic() >= until:
                    raise
            time.sleep(0.5)
