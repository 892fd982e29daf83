"""The commands on all tasks at once."""

from __future__ import annotations

from typing import Any

import click

from tsg import values
from tsg.cli import Answer, answer
from tsg.cli.ledger import existing
from tsg.cli.progress import bar, progress_option
from tsg.reconcile import ReconcilePolicy

__all__ = ["prune", "reconcile"]

_GRACE = 600.0


_snapshot_limit_option = click.option(
    "--snapshot-limit-mib",
    default=64,
    type=click.IntRange(0, 2**20),
    metavar="MIB",
    show_default=True,
    help="With --dry-run: the largest closed file that is read, from a private copy.",
)


@click.command()
@click.option(
    "--active-grace-seconds",
    default=_GRACE,
    type=click.UNPROCESSED,
    metavar="SECONDS",
    show_default=True,
    help="How long a running task may be silent.",
)
@click.option(
    "--delivery-grace-seconds",
    default=_GRACE,
    type=click.UNPROCESSED,
    metavar="SECONDS",
    show_default=True,
    help="How long a delivery may stay open once its task has ended.",
)
@click.option("--dry-run", is_flag=True, help="Report what would be closed; touch nothing.")
@click.option("--skip-conflicts", is_flag=True, help="Pass over rows that can't be acted on, and count them.")
@click.option(
    "--batch-size",
    type=click.IntRange(1, 2**31 - 1),
    metavar="TASKS",
    help="The most that one transaction changes; passes over rows as --skip-conflicts. By default all is one.",
)
@progress_option
@_snapshot_limit_option
@click.pass_obj
def reconcile(
    place: dict[str, Any],
    active_grace_seconds: Any,
    delivery_grace_seconds: Any,
    dry_run: bool,
    skip_conflicts: bool,
    batch_size: int | None,
    progress: bool,
    snapshot_limit_mib: int,
) -> Answer:
    """Close what a restart left behind and nobody vouches for."""
    policy = ReconcilePolicy(active_grace_seconds, delivery_grace_seconds)
    with (
        existing(place, read_only=dry_run, snapshot_limit_mib=snapshot_limit_mib) as ledger,
        bar(progress, "reconcile") as shown,
    ):
        report = ledger.reconcile(
            active_grace_seconds=policy.active_grace_seconds,
            delivery_grace_seconds=policy.delivery_grace_seconds,
            dry_run=dry_run,
            skip_conflicts=skip_conflicts,
            batch_size=batch_size,
            progress=shown,
        )
    return answer({"ok": True, "reconcile": report})


@click.command()
@click.option(
    "--older-than",
    required=True,
    type=click.UNPROCESSED,
    metavar="SECONDS",
    help="How long ago its delivery closed, at least.",
)
@click.option(
    "--batch-size",
    default=5000,
    type=click.IntRange(1, 2**31 - 1),
    metavar="TASKS",
    show_default=True,
    help="The most that go in one transaction.",
)
@click.option("--dry-run", is_flag=True, help="Report what would go; touch nothing.")
@progress_option
@_snapshot_limit_option
@click.pass_obj
def prune(
    place: dict[str, Any], older_than: Any, batch_size: int, dry_run: bool, progress: bool, snapshot_limit_mib: int
) -> Answer:
    """Let history go that nobody waits for: ended, delivery closed, nothing left below it."""
    age = values.non_negative(older_than, "an age")
    with (
        existing(place, read_only=dry_run, snapshot_limit_mib=snapshot_limit_mib) as ledger,
        bar(progress, "prune") as shown,
    ):
        report = ledger.prune(age, batch_size, dry_run=dry_run, progress=shown)
    return answer({"ok": True, "prune": report})
