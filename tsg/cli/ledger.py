"""The commands on a ledger's tasks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from tsg import ledger as ledgers
from tsg import records, states, values
from tsg.cli import Answer, answer
from tsg.errors import InvalidInput, TaskNotFound
from tsg.ledger import Ledger
from tsg.listing import Progress
from tsg.opening import is_there, place_of
from tsg.reconcile import ReconcilePolicy

__all__ = ["close", "create", "delivery", "doctor", "heartbeat", "init", "prune", "reconcile", "start"]

_GRACE = 600.0

_progress_option = click.option("--progress", is_flag=True, help="Show a bar on stderr, for people.")

_snapshot_limit_option = click.option(
    "--snapshot-limit-mib",
    default=64,
    type=click.IntRange(0, 2**20),
    metavar="MIB",
    show_default=True,
    help="With --dry-run: the largest closed file that is read, from a private copy.",
)


@contextmanager
def _bar(shown: bool, label: str) -> Iterator[Progress | None]:
    """What shows how far a piece of work is, if asked for."""
    if not shown:
        yield None
        return
    with click.progressbar(length=1, label=label, file=sys.stderr, show_pos=True) as bar:

        def show(done: int, total: int) -> None:
            bar.length = max(total, 1)
            bar.update(done - bar.pos)

        yield show


def _existing(place: dict[str, Any], **options: Any) -> Ledger:
    """The ledger that must be there already.

    Raises:
        InvalidInput: nothing is there, and nothing is made.
    """
    if not is_there(place_of(**place)):
        raise InvalidInput("there is no ledger at this path; tsg init makes one")
    return Ledger(**place, **options)


@click.command()
@click.pass_obj
def init(place: dict[str, Any]) -> Answer:
    """Make a ledger, or bring an older one to the current schema."""
    with Ledger(**place) as ledger:
        storage = ledger.storage_info()
    return answer({"ok": True, "storage": storage})


@click.command()
@click.option("--task-id", metavar="UUID", help="A random one by default.")
@click.option("--parent-id", metavar="UUID", help="The task that it is part of.")
@click.option("--payload-sha256", metavar="HEX", help="A fingerprint of its input, 64 hexadecimal digits.")
@click.option("--timeout-seconds", metavar="SECONDS", help="From its start to its deadline.")
@click.option("--internal", is_flag=True, help="Nobody is to receive its result.")
@click.option("--no-heartbeat", is_flag=True, help="Only the deadline ends it; needs a timeout.")
@click.pass_obj
def create(
    place: dict[str, Any],
    task_id: str | None,
    parent_id: str | None,
    payload_sha256: str | None,
    timeout_seconds: str | None,
    internal: bool,
    no_heartbeat: bool,
) -> Answer:
    """Record a queued task."""
    asked: dict[str, Any] = {
        "task_id": task_id,
        "parent_id": parent_id,
        "payload_hash": payload_sha256,
        "timeout_seconds": timeout_seconds,
        "delivery_required": not internal,
        "expects_heartbeat": not no_heartbeat,
    }
    # Before the ledger, which this may make, is touched.
    if records.creation(**asked).parent_id is not None and not is_there(place_of(**place)):
        raise TaskNotFound("there is no task with the parent's id, since there is no ledger")
    with Ledger(**place) as ledger:
        task = ledger.create_task(**asked)
    return answer({"ok": True, "task": task.to_dict()})


@click.command()
@click.argument("task_id", metavar="UUID")
@click.pass_obj
def start(place: dict[str, Any], task_id: str) -> Answer:
    """Start a queued task; its deadline runs from now."""
    identifier = values.canonical_id(task_id)
    with _existing(place) as ledger:
        task = ledger.start_task(identifier)
    return answer({"ok": True, "task": task.to_dict()})


@click.command()
@click.argument("task_id", metavar="UUID")
@click.pass_obj
def heartbeat(place: dict[str, Any], task_id: str) -> Answer:
    """Vouch for a running task."""
    identifier = values.canonical_id(task_id)
    with _existing(place) as ledger:
        task = ledger.heartbeat(identifier)
    return answer({"ok": True, "task": task.to_dict()})


@click.command()
@click.argument("task_id", metavar="UUID")
@click.option("--status", required=True, metavar="STATUS", help="succeeded, failed, timed_out or cancelled.")
@click.option("--code", metavar="REASON", help="A registered reason that fits the status.")
@click.pass_obj
def close(place: dict[str, Any], task_id: str, status: str, code: str | None) -> Answer:
    """End a task."""
    identifier, end = values.canonical_id(task_id), states.task_target(status)
    with _existing(place) as ledger:
        task = ledger.close_task(identifier, end, code=code)
    return answer({"ok": True, "task": task.to_dict()})


@click.command()
@click.argument("task_id", metavar="UUID")
@click.option("--status", required=True, metavar="STATUS", help="delivered, failed or not_applicable.")
@click.option("--code", metavar="REASON", help="A registered reason that fits the status.")
@click.pass_obj
def delivery(place: dict[str, Any], task_id: str, status: str, code: str | None) -> Answer:
    """Close the delivery of a task that has ended."""
    identifier, end = values.canonical_id(task_id), states.delivery_target(status)
    with _existing(place) as ledger:
        task = ledger.set_delivery(identifier, end, code=code)
    return answer({"ok": True, "task": task.to_dict()})


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
@_progress_option
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
        _existing(place, read_only=dry_run, snapshot_limit_mib=snapshot_limit_mib) as ledger,
        _bar(progress, "reconcile") as shown,
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
@_progress_option
@_snapshot_limit_option
@click.pass_obj
def prune(
    place: dict[str, Any], older_than: Any, batch_size: int, dry_run: bool, progress: bool, snapshot_limit_mib: int
) -> Answer:
    """Let history go that nobody waits for: ended, delivery closed, nothing left below it."""
    age = values.non_negative(older_than, "an age")
    with (
        _existing(place, read_only=dry_run, snapshot_limit_mib=snapshot_limit_mib) as ledger,
        _bar(progress, "prune") as shown,
    ):
        report = ledger.prune(age, batch_size, dry_run=dry_run, progress=shown)
    return answer({"ok": True, "prune": report})


@click.command()
@_progress_option
@click.pass_obj
def doctor(place: dict[str, Any], progress: bool) -> Answer:
    """Prove that the whole history is consistent, or count what is not."""
    with _bar(progress, "doctor") as shown:
        report = ledgers.examine_file(**place, progress=shown)
    return answer({**report}, status=0 if report["healthy"] else 1)
