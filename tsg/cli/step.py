"""The commands on the steps of a plan."""

from __future__ import annotations

from typing import Any, Final

import click

from tsg.cli import Answer, answer
from tsg.cli.plan import given_only, json_option, opened, policy_options
from tsg.cli.table import format_option, steps_table
from tsg.errors import InvalidInput
from tsg.plan.scheduling import Decision, StepStatus

__all__ = ["step"]

_attempt_option = click.option(
    "--attempt", metavar="ID", help="The attempt's token; by default the current one is meant."
)
#: A report is of the attempt that whoever started the agent has put into its environment.
_reported_attempt_option = click.option(
    "--attempt",
    metavar="ID",
    envvar="TSG_ATTEMPT",
    help="The attempt's token; else TSG_ATTEMPT, else the current one is meant.",
)

#: What can be taken away from a step, and what it has then.
_CLEARED: Final[dict[str, object]] = {
    "owner": None,
    "description": None,
    "active-form": None,
    "fallback-agent": None,
    "session-resume": None,
    "session-name": None,
    "thread-id": None,
    "timeout-seconds": None,
    "metadata": {},
    "params": {},
    "partial-ok": False,
    "blocked-by": (),
    "blocks": (),
}


def _field_options(command: Any) -> Any:
    for option in reversed(
        (
            click.option("--description", metavar="TEXT", help="More about what is to be done."),
            click.option("--active-form", metavar="TEXT", help="The subject while it is being done."),
            click.option("--blocked-by", multiple=True, metavar="KEY", help="What must be completed first."),
            click.option("--blocks", multiple=True, metavar="KEY", help="What has to wait for it."),
            click.option("--owner", metavar="AGENT", help="Who is to do it; by default whoever claims it."),
            click.option("--metadata", metavar="JSON", help="An object."),
            click.option("--params", metavar="JSON", help="An object."),
            click.option("--thread-id", metavar="ID", help="The conversation that it belongs to."),
            click.option("--session-name", metavar="NAME", help="The session that its agent is to use."),
            click.option("--session-resume", metavar="SESSION", help="An earlier session to go on from."),
        )
    ):
        command = option(command)
    return policy_options(command)


def _fields(metadata: str | None, params: str | None, **options: Any) -> dict[str, Any]:
    given = given_only(**options)
    for name, text in (("metadata", metadata), ("params", params)):
        if text is not None:
            given[name] = json_option(text)
    return given


@click.group(no_args_is_help=False)
def step() -> None:
    """The steps of a plan."""


@step.command()
@click.argument("plan")
@click.option("--subject", required=True, metavar="TEXT", help="What is to be done, as an imperative.")
@_field_options
@click.pass_obj
def add(place: dict[str, Any], /, plan: str, subject: str, **options: Any) -> Answer:
    """Add a step with the next key. What is left out comes from the plan."""
    fields = _fields(**options)
    with opened(place) as plans:
        return answer({"ok": True, "step": plans.add_step(plan, subject=subject, **fields)})


@step.command(name="list")
@click.argument("plan")
@click.option("--ready", is_flag=True, default=None, help="Those that may be claimed now.")
@click.option("--status", type=click.Choice([status.value for status in StepStatus]), help="Those of this status.")
@click.option("--owner", metavar="AGENT", help="Those of this agent.")
@click.option("--all", "everything", is_flag=True, help="Also those that are completed, cancelled or deleted.")
@format_option
@click.pass_obj
def list_steps(
    place: dict[str, Any],
    /,
    plan: str,
    ready: bool | None,
    status: str | None,
    owner: str | None,
    everything: bool,
    form: str,
) -> Answer:
    """The active steps of a plan, in order of creation."""
    with opened(place) as plans:
        found = plans.steps(plan, status=status, owner=owner, ready=ready, all=everything)
    return (steps_table(found), 0) if form == "table" else answer({"ok": True, "steps": found})


@step.command()
@click.argument("plan")
@click.argument("key")
@format_option
@click.pass_obj
def get(place: dict[str, Any], /, plan: str, key: str, form: str) -> Answer:
    """One step."""
    with opened(place) as plans:
        found = plans.get(plan, key)
    return (steps_table([found]), 0) if form == "table" else answer({"ok": True, "step": found})


@step.command()
@click.argument("plan")
@click.argument("key")
@click.option("--subject", metavar="TEXT", help="What is to be done, as an imperative.")
@_field_options
@click.option("--add-blocked-by", multiple=True, metavar="KEY", help="More that must be completed first.")
@click.option("--add-blocks", multiple=True, metavar="KEY", help="More that has to wait for it.")
@click.option(
    "--clear", multiple=True, type=click.Choice(sorted(_CLEARED)), help="Take a field's value away; may be repeated."
)
@click.pass_obj
def update(place: dict[str, Any], /, plan: str, key: str, clear: tuple[str, ...], **options: Any) -> Answer:
    """Give a step other fields. --blocked-by and --blocks replace what was there; --add-… only add."""
    fields = _fields(**options)
    cleared = {name.replace("-", "_"): _CLEARED[name] for name in clear}
    if set(cleared) & set(fields):
        raise InvalidInput("a field is set or cleared, not both")
    with opened(place) as plans:
        return answer({"ok": True, "step": plans.update(plan, key, **fields, **cleared)})


@step.command()
@click.argument("plan")
@click.option("--agent", required=True, metavar="AGENT", help="Who takes it.")
@click.pass_obj
def claim(place: dict[str, Any], /, plan: str, agent: str) -> Answer:
    """Start the next ready step that is this agent's or nobody's. Exit 1 where there is none."""
    with opened(place) as plans:
        found = plans.claim(plan, agent)
    if found is None:
        return answer({"ok": False, "error": "NothingReady"}, status=1)
    return answer({"ok": True, "step": found})


@step.command(name="open")
@click.argument("plan")
@click.argument("key")
@click.option("--agent", metavar="AGENT", help="Who is asked.")
@click.pass_obj
def open_step(place: dict[str, Any], /, plan: str, key: str, agent: str | None) -> Answer:
    """Make a queued attempt of a ready step, for somebody to start; no deadline runs yet."""
    with opened(place) as plans:
        return answer({"ok": True, "step": plans.open(plan, key, agent=agent)})


@step.command()
@click.argument("plan")
@click.argument("key")
@click.option("--agent", metavar="AGENT", help="Who does it.")
@_attempt_option
@click.pass_obj
def start(place: dict[str, Any], /, plan: str, key: str, agent: str | None, attempt: str | None) -> Answer:
    """Start a ready step, or an attempt that was opened; its deadline runs from now."""
    with opened(place) as plans:
        return answer({"ok": True, "step": plans.start(plan, key, agent=agent, attempt=attempt)})


@step.command()
@click.argument("plan")
@click.argument("key")
@_reported_attempt_option
@click.option("--output", metavar="REF", help="What there is so far.")
@click.pass_obj
def heartbeat(place: dict[str, Any], /, plan: str, key: str, attempt: str | None, output: str | None) -> Answer:
    """Vouch for a live attempt."""
    with opened(place) as plans:
        return answer({"ok": True, "step": plans.heartbeat_step(plan, key, attempt=attempt, output=output)})


@step.command()
@click.argument("plan")
@click.argument("key")
@click.argument("outcome", type=click.Choice(["success", "failed"]))
@_reported_attempt_option
@click.option("--learning", multiple=True, metavar="TEXT", help="What those should know that depend on the step.")
@click.option("--output", metavar="REF", help="What came of it, or where that is.")
@click.option("--error", metavar="TEXT", help="Why it failed.")
@click.pass_obj
def complete(
    place: dict[str, Any],
    /,
    plan: str,
    key: str,
    outcome: str,
    attempt: str | None,
    learning: tuple[str, ...],
    output: str | None,
    error: str | None,
) -> Answer:
    """Report how an attempt ended."""
    if (outcome == "success" and error is not None) or (outcome == "failed" and learning):
        raise InvalidInput("an error is told of a failure, a learning of a success")
    with opened(place) as plans:
        if outcome == "success":
            found = plans.complete(plan, key, attempt=attempt, learnings=learning, output=output)
        else:
            found = plans.fail(plan, key, attempt=attempt, error=error, output=output)
    return answer({"ok": True, "step": found})


@step.command()
@click.argument("plan")
@click.argument("key")
@click.option("--remaining", metavar="TEXT", help="What is left to do, as the subject of a new step.")
@click.pass_obj
def accept(place: dict[str, Any], /, plan: str, key: str, remaining: str | None) -> Answer:
    """Take a partial result."""
    with opened(place) as plans:
        return answer({"ok": True, "step": plans.accept(plan, key, remaining=remaining)})


@step.command()
@click.argument("plan")
@click.argument("key")
@click.argument("decision", type=click.Choice([kind.value for kind in Decision]))
@click.option("--to", metavar="AGENT", help="Whom it is reassigned to.")
@click.pass_obj
def decide(place: dict[str, Any], /, plan: str, key: str, decision: str, to: str | None) -> Answer:
    """Decide on a step that is escalated, failed or partial."""
    with opened(place) as plans:
        return answer({"ok": True, "step": plans.decide(plan, key, decision, to=to)})


@step.command()
@click.argument("plan")
@click.argument("key")
@click.pass_obj
def cancel(place: dict[str, Any], /, plan: str, key: str) -> Answer:
    """Give a step up. What depends on it stays blocked, and says so."""
    with opened(place) as plans:
        return answer({"ok": True, "step": plans.cancel(plan, key)})


@step.command()
@click.argument("plan")
@click.argument("key")
@click.pass_obj
def delete(place: dict[str, Any], /, plan: str, key: str) -> Answer:
    """Take a step out of its plan; what waited for it waits no more."""
    with opened(place) as plans:
        return answer({"ok": True, "step": plans.delete(plan, key)})
