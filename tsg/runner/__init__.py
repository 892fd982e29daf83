"""The runner: it carries a plan through to its end, hands each step to its agent, and survives being killed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tsg.runner.agents import Agent as Agent
    from tsg.runner.agents import Agents as Agents
    from tsg.runner.attending import Attendance as Attendance
    from tsg.runner.attending import Attended as Attended
    from tsg.runner.inbox import entries as entries
    from tsg.runner.inbox import take as take
    from tsg.runner.logs import Logs as Logs
    from tsg.runner.loop import Ended as Ended
    from tsg.runner.loop import Outcome as Outcome
    from tsg.runner.loop import Runner as Runner
    from tsg.runner.message import Errand as Errand
    from tsg.runner.message import message as message

__all__ = [
    "Agent",
    "Agents",
    "Attendance",
    "Attended",
    "Ended",
    "Errand",
    "Logs",
    "Outcome",
    "Runner",
    "entries",
    "message",
    "take",
]

_HOMES = {
    "tsg.runner.agents": ("Agent", "Agents"),
    "tsg.runner.attending": ("Attendance", "Attended"),
    "tsg.runner.inbox": ("entries", "take"),
    "tsg.runner.logs": ("Logs",),
    "tsg.runner.loop": ("Ended", "Outcome", "Runner"),
    "tsg.runner.message": ("Errand", "message"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
