"""The commands on plans."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from tsg.cli import PAGE_IS_OLD, Answer, answer
from tsg.cli.ledger import existing
from tsg.cli.table import format_option, plan_table, steps_table
from tsg.errors import LedgerError
from tsg.plan import fields
from tsg.plan.disk import THEMES
from tsg.plan.scheduling import Backoff, OnExhausted
from tsg.plan.store import Plans

__all__ = ["given_only", "opened", "plan", "policy_options"]


@contextmanager
def opened(place: dict[str, Any]) -> Iterator[Plans]:
    """The plans of the ledger that must be there already."""
    with existing(place) as ledger:
        yield Plans(ledger, on_change=_keep_page)


def _keep_page(plans: Plans, name: str) -> None:
    """Let the page of a plan tell how it stands now, if it has one; where that can't be, the answer says so."""
    from tsg.cockpit.file import refresh

    told = click.get_current_context().meta
    try:
        refresh(plans, name)
        told.pop(PAGE_IS_OLD, None)
    except LedgerError:
        # What the command was for is done.
        told[PAGE_IS_OLD] = True


def given_only(**options: Any) -> dict[str, Any]:
    """The options that were given: neither missing, nor a flag that is not set, nor a list without members."""
    return {name: value for name, value in options.items() if not any(value is none for none in (None, False, ()))}


def policy_options(command: Any) -> Any:
    """What a plan sets for its steps, and a step for itself."""
    for option in reversed(
        (
            click.option(
                "--timeout-seconds",
                type=click.UNPROCESSED,
                metavar="SECONDS",
                help="From an attempt's start to its deadline; 0 for none.",
            ),
            click.option("--retries", type=click.IntRange(0, 2**31 - 1), metavar="N", help="Beyond the first try."),
            click.option("--backoff", type=click.Choice([kind.value for kind in Backoff]), help="How delays grow."),
            click.option("--base-seconds", type=click.UNPROCESSED, metavar="SECONDS", help="The first delay."),
            click.option(
                "--factor", type=click.UNPROCESSED, metavar="N", help="What each delay is the last one times."
            ),
            click.option("--cap-seconds", type=click.UNPROCESSED, metavar="SECONDS", help="The longest delay."),
            click.option("--fallback-agent", metavar="AGENT", help="Who tries when the retries are used up."),
            click.option(
                "--partial-ok", is_flag=True, help="What a timed-out attempt has left may be all that is wanted."
            ),
        )
    ):
        command = option(command)
    return command


@click.group(no_args_is_help=False)
def plan() -> None:
    """Plans: steps that wait for each other, are tried again, change hands and learn."""


@plan.command()
@click.argument("name")
@click.option("--description", metavar="TEXT", help="What it is for.")
@click.option("--delivery-required", is_flag=True, help="Somebody awaits the result, and closes the root's delivery.")
@click.option(
    "--on-exhausted",
    type=click.Choice([kind.value for kind in OnExhausted]),
    help="What becomes of a step whose tries are used up.",
)
@click.option(
    "--grace-seconds", type=click.UNPROCESSED, metavar="SECONDS", help="How long an agent that beats may be silent."
)
@click.option("--agent", metavar="AGENT", help="Whom a runner asks to do a step that has no owner.")
@click.option("--session-name", metavar="NAME", help="In which session of theirs; main by default.")
@click.option("--cockpit", type=click.Path(), metavar="FILE", help="Keep a page there that tells how the plan stands.")
@click.option("--theme", type=click.Choice(THEMES), help="Of that page.")
@policy_options
@click.pass_obj
def create(place: dict[str, Any], /, name: str, **options: Any) -> Answer:
    """Make a plan, without steps."""
    with opened(place) as plans:
        return answer({"ok": True, "plan": plans.create(name, **given_only(**options))})


@plan.command(name="list")
@format_option
@click.pass_obj
def list_plans(place: dict[str, Any], /, form: str) -> Answer:
    """All plans, in order of creation."""
    with opened(place) as plans:
        found = plans.plans()
    return (plan_table(found), 0) if form == "table" else answer({"ok": True, "plans": found})


@plan.command()
@click.argument("name")
@format_option
@click.pass_obj
def show(place: dict[str, Any], /, name: str, form: str) -> Answer:
    """Where a plan stands."""
    with opened(place) as plans:
        found = plans.show(name)
        if form == "table":
            return f"{plan_table([found])}\n{steps_table(plans.steps(name, all=True))}", 0
    return answer({"ok": True, "plan": found})


@plan.command()
@click.argument("name")
@click.pass_obj
def advance(place: dict[str, Any], /, name: str) -> Answer:
    """Time out what is due, fold what has ended, and say what is ready."""
    with opened(place) as plans:
        ready = plans.advance(name)
    passed_over = {"passedOver": list(ready.passed_over)} if ready.passed_over else {}
    return answer({"ok": True, "ready": ready, **passed_over})


@plan.command()
@click.argument("name")
@click.pass_obj
def cancel(place: dict[str, Any], /, name: str) -> Answer:
    """Give a plan up: all that is not completed is cancelled."""
    with opened(place) as plans:
        return answer({"ok": True, "plan": plans.cancel_plan(name)})


@plan.command()
@click.argument("name")
@click.pass_obj
def remove(place: dict[str, Any], /, name: str) -> Answer:
    """Take a plan away, with its steps and learnings; the ledger's history stays."""
    with opened(place) as plans:
        return answer({"ok": True, "plan": plans.remove(name)})


@plan.command()
@click.argument("name")
@click.option(
    "--format",
    "form",
    type=click.Choice(["mermaid", "dot", "text"]),
    default="mermaid",
    show_default=True,
    help="The language of the drawing.",
)
@click.pass_obj
def graph(place: dict[str, Any], /, name: str, form: str) -> Answer:
    """Draw what waits for what."""
    from tsg.plan.graph import render

    with opened(place) as plans:
        return render(plans.graph(name), form).rstrip("\n"), 0


@plan.command(name="import")
@click.argument("path", type=click.Path())
@click.option("--name", help="By default the folder's or the file's.")
@click.pass_obj
def import_plan(place: dict[str, Any], /, path: str, name: str | None) -> Answer:
    """Read a folder of T-NNN.json files, or a long task's file, into a new plan."""
    from tsg.plan.files import import_folder
    from tsg.plan.longtask import import_file

    read = import_folder if os.path.isdir(path) else import_file
    with opened(place) as plans:
        return answer({"ok": True, **read(plans, path, name=name)})


@plan.command()
@click.argument("name")
@click.argument("path", type=click.Path())
@click.pass_obj
def export(place: dict[str, Any], /, name: str, path: str) -> Answer:
    """Write a plan into a folder, a T-NNN.json file a step; or as a long task, into a file whose name ends in .json."""
    from tsg.plan.files import export_folder
    from tsg.plan.longtask import export_file

    write = export_file if path.endswith(".json") and not os.path.isdir(path) else export_folder
    with opened(place) as plans:
        return answer({"ok": True, **write(plans, name, path)})


@plan.command()
@click.argument("name")
@click.option("--output", type=click.Path(), metavar="FILE", help="Write them as Markdown.")
@click.pass_obj
def learnings(place: dict[str, Any], /, name: str, output: str | None) -> Answer:
    """What completed steps have left for others to know."""
    with opened(place) as plans:
        found = plans.learnings(name)
    if output is not None:
        from tsg.plan.files import learnings_markdown, write_learnings

        write_learnings(output, learnings_markdown(found))
    return answer({"ok": True, "learnings": found})


def json_option(text: str | None) -> object:
    """What a JSON object given as an option says; ``None`` where it was not given."""
    return None if text is None else fields.parsed(text)
