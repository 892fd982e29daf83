"""What a runner hands over: the commands that it has started, seen to until each has arrived, failed or run on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Final, NamedTuple

from tsg.plan import reading
from tsg.plan.fields import compact
from tsg.plan.store import Plans
from tsg.plan.transaction import Transaction
from tsg.runner import dispatch
from tsg.runner.agents import Agents, filled
from tsg.runner.commands import GENTLE_SECONDS, Command, environment
from tsg.runner.dispatch import LEASE_SECONDS
from tsg.runner.logs import Logs, tail
from tsg.runner.message import Errand, message

__all__ = ["Deliveries"]

#: How long a program that was not gentle enough is waited for.
_LAST_SECONDS: Final = 1.0
#: The statuses of a command that somebody has ended by a signal.
_FROM_OUTSIDE: Final = (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT)
_MOMENT_SECONDS: Final = 0.2


class _Delivery(NamedTuple):
    """A command that hands an attempt over, and what it writes."""

    errand: Errand
    command: Command
    output: IO[bytes]
    limit: float


class Deliveries:
    """The attempts of a plan on their way to agents.

    Args:
        plans: where the plan is.
        agents: who is asked by which command.
        database: what commands and messages name the ledger by.
        halts: whether the plan fails where something can't be handed over.
        reset: whether agents are to begin each step in a fresh context.
        logs: where all is told of.
        wake: called, from another thread, when a command has ended.
    """

    def __init__(
        self,
        plans: Plans,
        *,
        agents: Agents,
        database: str,
        halts: bool,
        reset: bool,
        logs: Logs,
        wake: Callable[[], None],
    ) -> None:
        self._plans, self._agents, self._database = plans, agents, database
        self._halts, self._reset, self._logs, self._wake = halts, reset, logs, wake
        self._on_their_way: dict[str, _Delivery] = {}
        self._is_leaving = False

    def __iter__(self) -> Iterator[str]:
        return iter(self._on_their_way)

    def __contains__(self, attempt: object) -> bool:
        return attempt in self._on_their_way

    def send(self, errand: Errand) -> None:
        """Start the command that hands an attempt over; without one it goes into its agent's inbox."""
        agent = self._agents.of(errand.agent)
        self._logs.tell("dispatch", triggered=True, **_told(errand), deliveries=errand.deliveries)
        if agent.command is None:
            self._put_back(errand, "the agent has no command")
            return
        said = {
            "agent": errand.agent,
            "session": errand.session,
            "plan": errand.plan,
            "step": errand.step["id"],
            "attempt": errand.attempt,
            "params": compact(errand.step["params"]),
        }
        text = message(errand, database=self._database, reset=self._reset)
        output = self._logs.output(errand.attempt, errand.deliveries)
        try:
            command = Command(
                filled(agent.command, {**said, "agent_name": agent.name, "message": text}),
                said=environment(**said, database=self._database),
                output=output,
                ended=self._wake,
            )
        except (OSError, ValueError) as error:
            output.close()
            self._put_back(errand, f"the command could not be started: {type(error).__name__}")
            return
        self._on_their_way[errand.attempt] = _Delivery(errand, command, output, agent.timeout_seconds)

    def look(self) -> None:
        """Tell of the commands that have ended, and end those that take too long and whose attempts nobody has started.

        Raises:
            StateConflict: the database refuses; nothing is forgotten by that.
        """
        for attempt, delivery in list(self._on_their_way.items()):
            status = delivery.command.status
            if status is not None:
                self._arrive(delivery, status)
                delivery.output.close()
                del self._on_their_way[attempt]
            elif delivery.command.ran_seconds >= delivery.limit and (
                # Once its agent is at work, that takes as long as it takes.
                delivery.command.is_being_ended or self._is_waiting(delivery.errand)
            ):
                delivery.command.end()

    def next_look(self) -> float | None:
        """Seconds until there is something to look at, though no command ends; ``None`` where nothing is on its way."""
        if not self._on_their_way:
            return None
        # In time to renew the leases.
        soonest = LEASE_SECONDS / 3
        for delivery in self._on_their_way.values():
            left = delivery.limit - delivery.command.ran_seconds
            if delivery.command.is_being_ended:
                left = 1.0
            if left > 0:
                soonest = min(soonest, left)
        return soonest

    def expect_an_end(self) -> None:
        """The runner was asked to stop: what ends its commands from now on says nothing of their agents."""
        self._is_leaving = True

    def leave(self, pause: Callable[[float], None]) -> None:
        """Hand nothing over any more: what is on its way has 10 s to arrive, and is sent anew by the next runner.

        Agents at work go on.
        """
        self.expect_an_end()
        until = time.monotonic() + GENTLE_SECONDS
        while waiting := self._waiting():
            left = until - time.monotonic()
            if left <= 0:
                break
            pause(min(left, 0.5))
        for delivery in waiting:
            delivery.command.end(_LAST_SECONDS)
        for delivery in waiting:
            if delivery.command.wait(_LAST_SECONDS) is None:
                delivery.command.end(0)
                delivery.command.wait(GENTLE_SECONDS)
            if self._is_waiting(delivery.errand):
                self._send_next_time(delivery.errand)

    def let_go(self) -> None:
        """Forget what runs on."""
        for delivery in self._on_their_way.values():
            delivery.command.let_go()
            delivery.output.close()
        self._on_their_way.clear()

    # -- inside ----------------------------------------------------------------------------------------

    def _waiting(self) -> list[_Delivery]:
        """Those that are still on their way, once all that have ended are told of."""
        self.look()
        return [delivery for delivery in self._on_their_way.values() if self._is_waiting(delivery.errand)]

    def _arrive(self, delivery: _Delivery, status: int) -> None:
        errand = delivery.errand
        self._logs.tell("command ended", triggered=True, **_told(errand), status=status, output=tail(delivery.output))
        if status in _FROM_OUTSIDE and not self._is_leaving:
            # Who stops all that a runner has started stops the runner too, at about the same moment.
            time.sleep(_MOMENT_SECONDS)
        if status and self._is_leaving:
            self._send_next_time(errand)
        elif delivery.command.is_being_ended:
            self._put_back(errand, "the command took too long")
        elif status:
            self._put_back(errand, "the command failed")
        elif self._on_step(errand, dispatch.hand_over):
            self._logs.tell("delivered", triggered=True, **_told(errand))

    def _put_back(self, errand: Errand, why: str) -> None:
        if self._on_step(errand, partial(dispatch.put_back, halt=self._halts)):
            self._logs.tell("not delivered; in its agent's inbox", triggered=True, **_told(errand), why=why)

    def _is_waiting(self, errand: Errand) -> bool:
        def look(transaction: Transaction) -> bool:
            plan = reading.plan_row(transaction.connection, errand.plan)
            step = reading.step_row(transaction.connection, plan, errand.step["id"])
            return dispatch.is_waiting(transaction, step, errand.attempt)

        return self._plans._read(look)

    def _on_step(self, errand: Errand, do: Callable[..., bool]) -> bool:
        def on(transaction: Transaction) -> bool:
            plan = reading.plan_row(transaction.connection, errand.plan, "own")
            step = reading.step_row(transaction.connection, plan, errand.step["id"], lock=True)
            return do(transaction, plan, step, errand.attempt)

        return self._plans._change(errand.plan, on)

    def _send_next_time(self, errand: Errand) -> None:
        if self._on_step(errand, dispatch.release):
            self._logs.tell("not delivered; the next run sends it", triggered=True, **_told(errand))


def _told(errand: Errand) -> dict[str, str]:
    return {"step": errand.step["id"], "agent": errand.agent, "attempt": errand.attempt}
