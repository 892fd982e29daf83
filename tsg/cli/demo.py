"""The demonstration: what a restart leaves behind, previewed, closed, and proved, on a ledger of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import click

from tsg.ledger import Ledger

__all__ = ["demo"]

#: When the sample's service was killed, in seconds since the epoch; long ago, whenever this is run.
_KILLED_AT = 1_750_000_000.0


@click.command()
def demo() -> None:
    """Show the main job on a temporary ledger; nothing of yours is read."""
    with tempfile.TemporaryDirectory(prefix="tsg-demo-") as folder:
        path = Path(folder, "ledger.sqlite")
        _leave_behind(path)
        _say("A service was killed. It left one task queued, one running past its deadline, and two that")
        _say("ended without anybody knowing whether their result arrived (one of them internal).")
        for title, command in (
            ("What would a reconcile close?", ("reconcile", "--dry-run")),
            ("Close it, in one transaction.", ("reconcile",)),
            ("Once more: nothing is closed twice.", ("reconcile",)),
            ("Is the whole history consistent?", ("doctor",)),
        ):
            _say(f"\n# {title}\n$ tsg --db LEDGER {' '.join(command)}")
            ran = subprocess.run(
                [sys.executable, "-m", "tsg", "--db", str(path), *command],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            _say(ran.stdout.rstrip("\n"))
            if ran.returncode != 0:
                raise click.exceptions.Exit(ran.returncode)


def _leave_behind(path: Path) -> None:
    now = _KILLED_AT
    with Ledger(path, clock=lambda: now) as ledger:
        ledger.create_task()
        late = ledger.create_task(timeout_seconds=30)
        ledger.start_task(late.id)
        for delivery_required in (True, False):
            ended = ledger.create_task(delivery_required=delivery_required)
            ledger.start_task(ended.id)
            ledger.close_task(ended.id, "succeeded", code="worker_completed")


def _say(text: str) -> None:
    click.echo(text)
