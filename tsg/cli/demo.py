"""The demonstration: what a restart leaves behind, previewed, closed, and proved, on a ledger of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from sqlalchemy.engine import URL
from sqlalchemy.schema import CreateSchema, DropSchema

from tsg.engine import make_postgresql_engine, refusing
from tsg.ledger import Ledger
from tsg.opening import place_of
from tsg.plan.disk import THEMES

__all__ = ["demo"]

#: When the sample's service was killed, in seconds since the epoch; long ago, whenever this is run.
_KILLED_AT = 1_750_000_000.0


@click.command()
@click.option("--cockpit", is_flag=True, help="Instead, a plan that moves by itself, in the browser.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Of the cockpit; by default a free one."
)
@click.option("--theme", type=click.Choice(THEMES), default="pet", show_default=True, help="Of the cockpit.")
@click.pass_obj
def demo(place: dict[str, Any], cockpit: bool, port: int, theme: str) -> None:
    """Show the main job on a temporary ledger; nothing of yours is read.

    With --db and a PostgreSQL URL the ledger is in a schema of its own there, made for it and dropped.
    """
    if cockpit:
        from tsg.cli.sample import watch

        watch(port=port, theme=theme)
        return
    with _somewhere(place) as target:
        _leave_behind(target)
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
                [sys.executable, "-P", "-m", "tsg", "--db", target, *command],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            _say(ran.stdout.rstrip("\n"))
            if ran.returncode != 0:
                click.get_current_context().exit(ran.returncode)
        _say("\nOn it stand plans, and a runner that carries them through crashes. To watch one move by itself:")
        _say("$ tsg demo --cockpit    # with the extra: pip install 'tsg-ledger[cockpit]'")


@contextmanager
def _somewhere(place: dict[str, Any]) -> Iterator[str]:
    """A place for a ledger that is gone afterwards."""
    named = place["target"]
    url = place_of(**place) if named is not None and named.startswith("postgresql") else None
    if not isinstance(url, URL):
        with tempfile.TemporaryDirectory(prefix="tsg-demo-") as folder:
            yield str(Path(folder, "ledger.sqlite"))
        return
    schema = f"tsg_demo_{uuid.uuid4().hex}"
    engine = make_postgresql_engine(url, busy_timeout_ms=5000)
    try:
        with refusing(), engine.begin() as connection:
            connection.execute(CreateSchema(schema))
        try:
            inside = url.update_query_dict({"options": f"-csearch_path={schema}"})
            yield inside.render_as_string(hide_password=False)
        finally:
            with refusing(), engine.begin() as connection:
                connection.execute(DropSchema(schema, cascade=True))
    finally:
        engine.dispose()


def _leave_behind(target: str) -> None:
    now = _KILLED_AT
    with Ledger(target, clock=lambda: now) as ledger:
        ledger.create_task()
        late = ledger.create_task(timeout_seconds=30)
        ledger.start_task(late.id)
        for delivery_required in (True, False):
            ended = ledger.create_task(delivery_required=delivery_required)
            ledger.start_task(ended.id)
            ledger.close_task(ended.id, "succeeded", code="worker_completed")


def _say(text: str) -> None:
    click.echo(text)
