"""What an agent is told: what to do, what is known so far, and how to report."""

from __future__ import annotations

import json
import shlex
from typing import Final, NamedTuple

from tsg.plan.reading import StepView

__all__ = ["Errand", "message"]

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
        lines += ["", "Parameters:", json.dumps(step["params"], ensure_ascii=False, indent=2)]
    if step["learnings"]:
        lines += ["", "Learned so far:", *(f"- {learning}" for learning in step["learnings"])]
    if step["attempts"] > 1 and step["error"]:
        lines += ["", f"The attempt before this one ended with: {step['error']}"]
    tsg = ["tsg"] if "://" in database else ["tsg", "--db", database]
    report = shlex.join([*tsg, "step", "complete", errand.plan, step["id"]])
    lines += [
        "",
        "When it is done, run:",
        f"  {report} success --attempt {errand.attempt}",
        "If it can't be done, run:",
        f"  {report} failed --attempt {errand.attempt} --error 'WHY'",
        "A command that is refused with StateConflict means that this attempt is over, or somebody else's: stop then.",
    ]
    if errand.deliveries > 1:
        lines += ["This was sent before. If you are at work on this attempt already, there is nothing more to do."]
    return "".join(f"{line}\n" for line in lines)
