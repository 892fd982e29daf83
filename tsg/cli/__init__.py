"""The command line: parse, call one function, print one line.

:func:`main` is the one door. Whatever goes wrong leaves it as the name of an error class and an exit status:
0 done, 1 unhealthy or behind, 2 refused, 3 unexpected. No rejected value, path or exception text is printed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Final, NoReturn

import click

import tsg
from tsg.errors import InvalidInput, LedgerError

__all__ = ["PAGE_IS_OLD", "Answer", "answer", "app", "main"]

#: In a command's context: the page of a plan could not be written anew.
PAGE_IS_OLD: Final = "tsg.page_is_old"

#: A line for stdout, and the exit status.
Answer = tuple[str, int]

#: Where each command lives; its module is imported when it is called.
COMMANDS: Mapping[str, str] = {
    "agent": "tsg.cli.runner",
    "check": "tsg.cli.schema",
    "close": "tsg.cli.ledger",
    "cockpit": "tsg.cli.cockpit",
    "create": "tsg.cli.ledger",
    "current": "tsg.cli.schema",
    "delivery": "tsg.cli.ledger",
    "demo": "tsg.cli.demo",
    "doctor": "tsg.cli.doctor",
    "downgrade": "tsg.cli.schema",
    "heartbeat": "tsg.cli.ledger",
    "inbox": "tsg.cli.runner",
    "init": "tsg.cli.ledger",
    "mcp": "tsg.cli.mcp",
    "plan": "tsg.cli.plan",
    "prune": "tsg.cli.upkeep",
    "reconcile": "tsg.cli.upkeep",
    "run": "tsg.cli.runner",
    "start": "tsg.cli.ledger",
    "step": "tsg.cli.step",
    "upgrade": "tsg.cli.schema",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), cmd_name)
        return command


@click.group(cls=_Lazy, no_args_is_help=False)
@click.version_option(tsg.__version__, prog_name="tsg")
@click.option(
    "--db",
    metavar="PATH_OR_URL",
    envvar="TSG_DB",
    help="The ledger: a file, or the URL of one or of a PostgreSQL database. By default what TSG_DB says.",
)
@click.option(
    "--allow-external-acl", is_flag=True, help="Without POSIX modes: the directory is private by other means."
)
@click.pass_context
def app(ctx: click.Context, db: str | None, allow_external_acl: bool) -> None:
    """A ledger of tasks and deliveries that doesn't guess what a restart left behind."""
    ctx.obj = {"target": db, "allow_external_acl": allow_external_acl}


def answer(fields: Mapping[str, object], status: int = 0) -> Answer:
    """What a command returns: one compact line of JSON, its keys sorted, and the exit status.

    Where the page of a plan could not be written anew, the line says that too.
    """
    context = click.get_current_context(silent=True)
    if context is not None and PAGE_IS_OLD in context.meta:
        fields = {**fields, "cockpit": "not written"}
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False), status


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and leave the process with its exit status."""
    # A library that logs without being asked would write to stderr; nobody has asked here.
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        line, status = _run(arguments)
        if line:
            click.echo(line)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # Nobody reads the answer, or it finds no room. The interpreter must not try once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 2
    except (KeyboardInterrupt, click.Abort):
        # As a shell tells an interrupt.
        status = 130
    sys.exit(status)


def _run(arguments: Sequence[str] | None) -> Answer:
    try:
        returned = app.main(arguments, prog_name="tsg", standalone_mode=False, windows_expand_args=False)
    except click.exceptions.Exit as left_early:
        return "", left_early.exit_code
    except click.ClickException:
        return _refusal(InvalidInput.__name__), 2
    except LedgerError as error:
        return _refusal(type(error).__name__, error.named), 2
    except (KeyboardInterrupt, click.Abort):
        raise
    except SystemExit as left:
        # Click's own way out where a pipe is closed while it prints help.
        return "", 2 if left.code == 1 else int(left.code or 0)
    except Exception:
        return _refusal("InternalError"), 3
    return returned if isinstance(returned, tuple) else ("", int(returned or 0))


def _refusal(name: str, named: Mapping[str, object] = MappingProxyType({})) -> str:
    return answer({"error": name, "ok": False, **named})[0]
