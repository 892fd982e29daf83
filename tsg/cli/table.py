"""Tables for people, who ask for them by ``--format table``; needs rich, the extra ``table``."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import click

from tsg.errors import InvalidInput

if TYPE_CHECKING:
    from tsg.plan.reading import PlanView, StepView

__all__ = ["format_option", "plan_table", "steps_table"]

format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["json", "table"]),
    default="json",
    show_default=True,
    help="A line of JSON, or a table for people.",
)

_COLOURS: Final = {
    "completed": "green",
    "in_progress": "cyan",
    "running": "cyan",
    "failed": "red",
    "escalated": "red",
    "partial": "yellow",
    "cancelled": "dim",
    "deleted": "dim",
}


def plan_table(plans: Sequence[PlanView]) -> str:
    """Plans, a row each."""
    rows = (
        (
            plan["name"],
            plan["status"],
            f"{plan['steps']['completed']}/{sum(plan['steps'].values()) - plan['steps']['deleted']}",
            str(plan["ready"]),
            str(plan["steps"]["in_progress"]),
            str(sum(plan["steps"][status] for status in ("escalated", "failed", "partial"))),
        )
        for plan in plans
    )
    return _table(("plan", "status", "done", "ready", "at work", "to decide"), rows)


def steps_table(steps: Sequence[StepView]) -> str:
    """Steps, a row each."""
    rows = (
        (
            step["id"],
            "ready" if step["ready"] else step["status"],
            step["subject"],
            step["owner"] or "",
            str(step["attempts"]),
            ", ".join(step["waitingFor"]),
            step["error"] or "",
        )
        for step in steps
    )
    return _table(("id", "status", "subject", "owner", "tries", "waiting for", "error"), rows)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        raise InvalidInput("a table needs more to be installed: tsg-ledger[table]") from None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_shown(cell), style=_COLOURS.get(cell, "")) for cell in row))
    console = Console(width=max(shutil.get_terminal_size((120, 24)).columns, 60))
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").splitlines())


def _shown(text: str) -> str:
    """A text without what would move a terminal's cursor or change its colours."""
    return "".join(character if character.isprintable() else " " for character in text)
