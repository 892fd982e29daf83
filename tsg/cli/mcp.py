"""The command that serves a plan to an agent; what speaks the protocol is imported when it runs."""

from __future__ import annotations

import signal
import sys
from typing import Any

import click

from tsg.cli import Answer
from tsg.cli.ledger import existing
from tsg.errors import InvalidInput, LedgerError
from tsg.plan import fields
from tsg.plan.store import Plans

__all__ = ["mcp"]


@click.command()
@click.option("--plan", required=True, metavar="NAME", help="The plan that the tools work on.")
@click.option("--agent", metavar="AGENT", help="Who works through it, where a call names nobody.")
@click.pass_obj
def mcp(place: dict[str, Any], plan: str, agent: str | None) -> Answer:
    """Serve a plan's steps to an agent, as tools of the Model Context Protocol over stdin and stdout."""
    # Before all that the protocol needs is imported, which takes a second.
    fields.name(plan, "a plan's name")
    if agent is not None:
        fields.agent(agent)
    try:
        from tsg.mcp import serve, server_of
    except ImportError:
        raise InvalidInput("this needs the official SDK: pip install 'tsg-ledger[mcp]'") from None
    if sys.stdin is None or sys.stdout is None:
        raise InvalidInput("an agent's client starts this, with pipes as stdin and stdout")
    with existing(place) as ledger:
        server = server_of(ledger, plan, agent=agent, on_change=_keep_page)
        # A read that waits for the client would hold an interrupt up; nothing is lost by leaving at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        serve(server)
    # All of stdout was the protocol's.
    return "", 0


def _keep_page(plans: Plans, name: str) -> None:
    """As the other commands do, but that an answer has no place to say that the page could not be written."""
    from tsg.cockpit.file import refresh

    try:
        refresh(plans, name)
    except LedgerError as error:
        click.echo(f"the plan's page is not written: {type(error).__name__}", err=True)
