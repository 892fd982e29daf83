"""What an agent is told: what to do, what is known so far, and how to report."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any, Final, NamedTuple

from tsg.plan.reading import StepView

__all__ = ["Errand", "message"]

_HALF: Final = re.compile("[\\ud800-\\udfff]")
_WHY: Final = " --error 'WHY'"
#: On a line of its own these agents read it as: start in a fresh context.
_RESET: Final = "/new"


class Errand(NamedTuple):
    """A step on its way to an agent.

    Attributes:
        plan, about: the plan's name and description.
        task_id: what the file of a long task calls it; of another plan the id of its root.
        step: as its agent is to see it, with the learnings that it is handed.
        place, total: that it is the `place`-th of so many.
        agent, session: who is asked, and in which session of theirs.
        attempt: the token.
        deliveries: how often it was sent, this time included.
        inbox_at: since when it lies in the agent's inbox, seconds since the epoch.
    """

    plan: str
    about: str | None
    task_id: str
    step: StepView
    place: int
    total: int
    agent: str
    session: str
    attempt: str
    deliveries: int
    inbox_at: float | None = None


def message(errand: Errand, *, database: str, reset: bool = True) -> str:
    """The text that an agent gets.

    Args:
        database: what the reporting commands are to name by ``--db``; kept out of the text where it is a URL, which
            may hold a password. The command then finds it in the environment.
        reset: whether the agent is to begin in a fresh context.
    """
    step = errand.step
    lines = [_RESET] if reset else []
    lines += [f"Step {errand.place} of {errand.total} of {errand.plan}: {step['subject']}"]
    if step["description"]:
        lines += ["", step["description"]]
    if errand.about:
        lines += ["", f"What it is part of: {errand.about}"]
    if step["params"]:
        lines += ["", "Parameters:", _json(step["params"])]
    if step["learnings"]:
        lines += ["", "Learned so far:", *(f"- {learning}" for learning in step["learnings"])]
    if step["attempts"] > 1 and step["error"]:
        lines += ["", f"The attempt before this one ended with: {step['error']}"]
    lines += [
        "",
        "When it is done, run:",
        f"  {_report(errand, database, 'success')}",
        "If it can't be done, run:",
        f"  {_report(errand, database, 'failed', _WHY)}",
        "A command that is refused with StateConflict means that this attempt is over, or somebody else's: stop then.",
    ]
    if errand.deliveries > 1:
        lines += ["This was sent before. If you are at work on this attempt already, there is nothing more to do."]
    return "".join(f"{line}\n" for line in lines)


def _report(errand: Errand, database: str, outcome: str, more: str = "") -> str:
    """The command by which an agent tells how its attempt has ended."""
    tsg = ["tsg"] if "://" in database else ["tsg", "--db", database]
    command = shlex.join([*tsg, "step", "complete"])
    arguments = shlex.join([errand.plan, errand.step["id"], outcome])
    options = f"--attempt {errand.attempt}{more}"
    # A name that looks like an option is none after the two hyphens.
    return f"{command} {options} -- {arguments}" if errand.plan.startswith("-") else f"{command} {arguments} {options}"


def _json(value: dict[str, Any]) -> str:
    written = json.dumps(value, ensure_ascii=False, indent=2)
    # Half of a pair of surrogates has an escape in JSON, and no form in an argument.
    return json.dumps(value, indent=2) if _HALF.search(written) else written
