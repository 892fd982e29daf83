"""One attempt as a block of code: started before it, vouched for meanwhile, closed by how it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from tsg import values
from tsg.errors import InvalidInput, LedgerError, StateConflict
from tsg.plan import fields
from tsg.plan.reading import PlanView, StepView

__all__ = ["Reporting", "Work", "interval_of", "vouched_for", "working"]

#: Of a plan's grace, how much may pass between heartbeats: at most, and by default.
_MOST_OF_GRACE: Final = 0.5
_USUAL_PART: Final = 0.25


class Reporting(Protocol):
    """What an attempt needs of :class:`tsg.Plans`, each in a transaction of its own."""

    def show(self, plan: str) -> PlanView:
        """See :meth:`tsg.Plans.show`."""

    def start(self, plan: str, key: str, *, agent: str | None, attempt: str | None) -> StepView:
        """See :meth:`tsg.Plans.start`."""

    def heartbeat(self, attempt: str, *, output: str | None = None) -> StepView:
        """See :meth:`tsg.Plans.heartbeat`."""

    def complete(
        self, plan: str, key: str, *, attempt: str | None, learnings: Sequence[str], output: str | None
    ) -> StepView:
        """See :meth:`tsg.Plans.complete`."""

    def fail(self, plan: str, key: str, *, attempt: str | None, error: str | None) -> StepView:
        """See :meth:`tsg.Plans.fail`."""

    def _is_over(self, attempt: str) -> bool: ...


class Work:
    """An attempt that is under way.

    Attributes:
        step: the step as it was when it was started, with what it was handed.
        attempt: the token.
    """

    def __init__(self, plans: Reporting, step: StepView) -> None:
        assert step["attempt"] is not None
        self._plans = plans
        self._over = threading.Event()
        self._learnings: list[str] = []
        self._output: str | None = None
        self.step = step
        self.attempt = step["attempt"]

    @property
    def is_over(self) -> bool:
        """Whether a heartbeat was refused: the attempt was ended by somebody else, and there is no use in going on."""
        return self._over.is_set()

    def learn(self, text: str) -> None:
        """Leave something for those that depend on the step; it is kept when the block ends well.

        Raises:
            InvalidInput: no text.
        """
        self._learnings.append(fields.prose(text, "a learning"))

    def output(self, text: str) -> None:
        """Keep what there is so far, at once; a time-out may leave nothing else.

        Raises:
            InvalidInput: no text.
            StateConflict: the attempt is over.
        """
        self._plans.heartbeat(self.attempt, output=text)
        self._output = text

    def beat(self) -> None:
        """Vouch for the attempt now.

        Raises:
            StateConflict: it is over.
        """
        self._plans.heartbeat(self.attempt)


@contextmanager
def working(
    plans: Reporting,
    plan: str,
    key: str,
    *,
    agent: str | None = None,
    attempt: str | None = None,
    interval_seconds: float | None = None,
) -> Iterator[Work]:
    """See :meth:`tsg.plan.Plans.work`."""
    grace = plans.show(plan)["grace_seconds"]
    interval = interval_of(interval_seconds, grace)
    work = Work(plans, plans.start(plan, key, agent=agent, attempt=attempt))
    ended = threading.Event()

    def vouch() -> None:
        while not ended.wait(interval):
            if not vouched_for(plans, work.attempt):
                work._over.set()
                return

    beats = threading.Thread(target=vouch, name="tsg-heartbeat", daemon=True)
    beats.start()
    try:
        yield work
    except BaseException as error:
        ended.set()
        beats.join()
        # What the block raised is what its caller has to hear of, also where the attempt is over already.
        _tell(work, plan, key, error)
        raise
    ended.set()
    beats.join()
    plans.complete(plan, key, attempt=work.attempt, learnings=work._learnings, output=work._output)


def vouched_for(plans: Reporting, attempt: str) -> bool:
    """Send a heartbeat; whether there is any use in going on.

    Where only the database refuses, for a lock or since its server restarts, the next heartbeat will do.
    """
    try:
        plans.heartbeat(attempt)
    except StateConflict:
        return not plans._is_over(attempt)
    except LedgerError:
        return False
    return True


def interval_of(given: float | None, grace: float) -> float:
    """Seconds between heartbeats.

    Raises:
        InvalidInput: not positive, or so long that one late beat would be one too many.
    """
    interval = grace * _USUAL_PART if given is None else values.number(given, "an interval")
    if not 0 < interval <= grace * _MOST_OF_GRACE:
        raise InvalidInput("heartbeats must come at intervals of at most half of the plan's grace")
    return min(interval, threading.TIMEOUT_MAX)


def _tell(work: Work, plan: str, key: str, error: BaseException) -> None:
    said = "".join(character if character.isprintable() else " " for character in str(error))[:2000]
    reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
    try:
        work._plans.fail(plan, key, attempt=work.attempt, error=reason)
    except LedgerError as refused:
        error.add_note(f"and the failure was not recorded: {type(refused).__name__}")
