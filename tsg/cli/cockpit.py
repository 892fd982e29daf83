"""The commands that show how plans stand, as pages; what draws and serves them is imported when they run."""

from __future__ import annotations

from typing import Any

import click

from tsg.cli import Answer, answer
from tsg.cli.plan import opened
from tsg.plan.disk import THEMES

__all__ = ["cockpit"]

_theme_option = click.option(
    "--theme", type=click.Choice(THEMES), default="pet", show_default=True, help="What a page looks like."
)


@click.group(no_args_is_help=False)
def cockpit() -> None:
    """Pages that show how plans stand."""


@cockpit.command()
@click.argument("plan")
@click.option("--output", required=True, type=click.Path(), metavar="FILE", help="Where to write the page.")
@_theme_option
@click.pass_obj
def render(place: dict[str, Any], /, plan: str, output: str, theme: str) -> Answer:
    """Write a plan's page, which needs nothing but itself."""
    from tsg.cockpit.file import write

    with opened(place) as plans:
        found = plans.show(plan)
        write(plans, plan, output, theme=theme)
    return answer({"ok": True, "plan": found})


@cockpit.command()
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, metavar="N", help="0 for a free one."
)
@_theme_option
@click.pass_obj
def serve(place: dict[str, Any], /, port: int, theme: str) -> Answer:
    """Serve the pages of all plans, live, to this machine's browsers; the first line tells the address."""
    from tsg.cockpit.server import serve

    # Not as a reader of a closed file, who sees it as it was then.
    with opened(place) as plans:
        serve(plans, port=port, theme=theme, announce=lambda url: click.echo(answer({"ok": True, "url": url})[0]))
    # All that was to be said was the address.
    return "", 0
