"""The commands that carry plans through: the runner, the agents' inboxes, and a program as an agent."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

import click

from tsg.cli import Answer, answer
from tsg.cli.plan import opened
from tsg.errors import StateConflict
from tsg.opening import place_of
from tsg.plan.disk import THEMES
from tsg.runner.message import Errand, message
from tsg.storage import LedgerFile

__all__ = ["Stoppable", "agent", "inbox", "run"]

#: The error that a run's outcome is told as.
_ERRORS: Final = {
    "failed": "PlanFailed",
    "cancelled": "PlanCancelled",
    "waiting": "PersonNeeded",
    "stalled": "Stalled",
    "exhausted": "PersonNeeded",
}

_no_reset_option = click.option("--no-reset", is_flag=True, help="Agents keep their context from step to step.")


class Stoppable:
    """While this is entered, SIGTERM and SIGINT ask for an end instead of making one, however early they come."""

    def __init__(self) -> None:
        self._was_asked = False
        self._stop: Callable[[], None] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stoppable:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def by(self, stop: Callable[[], None]) -> None:
        """What to call when an end is asked for; at once where it was already."""
        self._stop = stop
        if self._was_asked:
            stop()

    def _ask(self, number: int, frame: object) -> None:
        self._was_asked = True
        if self._stop is not None:
            self._stop()


@click.command()
@click.argument("plan")
@click.option("--agents", type=click.Path(), metavar="FILE", help="Who is asked by which command.")
@click.option("--interval", type=click.UNPROCESSED, metavar="SECONDS", help="The longest time between two looks; 15.")
@click.option(
    "--max-parallel",
    type=click.IntRange(1, 2**31 - 1),
    default=1,
    show_default=True,
    metavar="N",
    help="How many steps of the plan may be in progress at once.",
)
@click.option(
    "--on-undelivered",
    type=click.Choice(["stop", "wait"]),
    default="stop",
    show_default=True,
    help="What to do when a step can't be handed to its agent.",
)
@click.option("--resume", is_flag=True, help="A person says: go on, however often it has failed.")
@click.option(
    "--stall-seconds", type=click.UNPROCESSED, metavar="N", help="Give up when nothing has moved for so long; 1200."
)
@_no_reset_option
@click.option("--log-dir", type=click.Path(), metavar="DIR", help="For the logs; else all is told on stderr.")
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of the logs' lines."
)
@click.option("--cockpit", type=click.Path(), metavar="FILE", help="Keep a page there that tells how the plan stands.")
@click.option("--theme", type=click.Choice(THEMES), help="Of that page.")
@click.pass_obj
def run(
    place: dict[str, Any],
    plan: str,
    agents: str | None,
    interval: str | None,
    max_parallel: int,
    on_undelivered: str,
    resume: bool,
    stall_seconds: str | None,
    no_reset: bool,
    log_dir: str | None,
    log_format: str,
    cockpit: str | None,
    theme: str | None,
) -> Answer:
    """Carry a plan through: hand over what is ready, see to what fails, and go on until all is done.

    Exit 0 when all steps are completed, or when asked to stop; 1 when the plan failed, stalled, waits for a person or
    could not be handed over.
    """
    with Stoppable() as stoppable:
        from tsg.runner.agents import Agents
        from tsg.runner.logs import Logs
        from tsg.runner.loop import Runner

        times = {"interval_seconds": interval, "stall_seconds": stall_seconds}
        asked = Agents() if agents is None else Agents.read(agents)
        with opened(place) as plans:
            # Before a folder is made for its logs, whether there is such a plan.
            plans.peek(plan)
            if cockpit is not None or theme is not None:
                plans.show_in(plan, cockpit, theme=theme)
            with (
                Logs(log_dir, plan, form=log_format) as logs,
                Runner(
                    plans,
                    plan,
                    database=_database(place),
                    agents=asked,
                    max_parallel=max_parallel,
                    on_undelivered=on_undelivered,
                    resume=resume,
                    reset=not no_reset,
                    logs=logs,
                    **{name: value for name, value in times.items() if value is not None},  # type: ignore[arg-type]  # text that reads as a number will do
                ) as runner,
            ):
                stoppable.by(runner.stop)
                ended = runner.run()
    told = {"outcome": ended.outcome.value, "plan": ended.plan}
    if ended.outcome.is_success:
        return answer({"ok": True, **told})
    return answer({"ok": False, "error": _ERRORS[ended.outcome], **told}, status=1)


@click.group(no_args_is_help=False)
def inbox() -> None:
    """The agents' inboxes: steps that could not be handed over, and wait to be taken."""


@inbox.command(name="list")
@click.argument("agent")
@_no_reset_option
@click.pass_obj
def list_entries(place: dict[str, Any], /, agent: str, no_reset: bool) -> Answer:
    """What lies in an agent's inbox, the oldest first."""
    from tsg.runner.inbox import entries

    with opened(place) as plans:
        found = entries(plans, agent)
    return answer({"ok": True, "entries": [_entry(place, errand, no_reset) for errand in found]})


@inbox.command()
@click.argument("agent")
@_no_reset_option
@click.pass_obj
def take(place: dict[str, Any], /, agent: str, no_reset: bool) -> Answer:
    """Take the oldest step out of an agent's inbox, and start it. Exit 1 where there is none."""
    from tsg.runner.inbox import take

    with opened(place) as plans:
        found = take(plans, agent)
    if found is None:
        return answer({"ok": False, "error": "InboxEmpty"}, status=1)
    return answer({"ok": True, **_entry(place, found, no_reset)})


@click.group(no_args_is_help=False)
def agent() -> None:
    """Any program as an agent."""


@agent.command(name="exec")
@click.argument("plan")
@click.argument("key")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--agent", metavar="AGENT", help="Who does it; by default the step's owner, or the plan's agent.")
@click.option(
    "--attempt",
    metavar="ID",
    envvar="TSG_ATTEMPT",
    help="The attempt's token, for who was asked by one; else TSG_ATTEMPT.",
)
@click.option(
    "--interval-seconds",
    type=click.UNPROCESSED,
    metavar="SECONDS",
    help="Between heartbeats; by default a quarter of the plan's grace, and at most half of it.",
)
@click.pass_obj
def execute(
    place: dict[str, Any],
    /,
    plan: str,
    key: str,
    command: tuple[str, ...],
    agent: str | None,
    attempt: str | None,
    interval_seconds: str | None,
) -> Answer:
    """Do a step by a command, given after --: start it, send heartbeats, and report how the command ends.

    Exit 0 when it ended well, 1 when it failed. Where the attempt is over before, by a time-out or by somebody's word,
    the command is ended, nothing is reported, and this is a StateConflict.
    """
    from tsg.runner.attending import Attendance

    with Stoppable() as stoppable, opened(place) as plans:
        attendance = Attendance(
            plans,
            plan,
            key,
            command,
            database=_database(place),
            agent=agent,
            attempt=attempt,
            interval_seconds=interval_seconds,  # type: ignore[arg-type]  # text that reads as a number will do
        )
        stoppable.by(attendance.stop)
        attended = attendance.run()
    if attended.step is None:
        raise StateConflict("this attempt is over; nothing was reported")
    told = {"status": attended.status, "step": attended.step}
    if attended.is_success:
        return answer({"ok": True, **told})
    return answer({"ok": False, "error": "CommandFailed", **told}, status=1)


def _database(place: dict[str, Any]) -> str:
    """What agents are to name the ledger by, in whatever folder they are."""
    found = place_of(**place)
    return found.path if isinstance(found, LedgerFile) else str(place["target"])


def _entry(place: dict[str, Any], errand: Errand, no_reset: bool) -> dict[str, object]:
    return {
        "agent_id": errand.agent,
        "session": errand.session,
        "task_name": errand.plan,
        "task_id": errand.task_id,
        "step_id": errand.step["id"],
        "step_name": errand.step["subject"],
        "attempt": errand.attempt,
        "params": errand.step["params"],
        "message": message(errand, database=_database(place), reset=not no_reset),
        "timestamp": errand.inbox_at,
    }
