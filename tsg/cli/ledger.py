"""The commands on a ledger's tasks."""

from __future__ import annotations

from typing import Any

import click

from tsg import records, states, values
from tsg.cli import Answer, answer
from tsg.errors import InvalidInput, TaskNotFound
from tsg.ledger import Ledger
from tsg.opening import is_there, place_of

__all__ = ["close", "create", "delivery", "existing", "heartbeat", "init", "start"]


def existing(place: dict[str, Any], **options: Any) -> Ledger:
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
    with existing(place) as ledger:
        task = ledger.start_task(identifier)
    return answer({"ok": True, "task": task.to_dict()})


@click.command()
@click.argument("task_id", metavar="UUID")
@click.pass_obj
def heartbeat(place: dict[str, Any], task_id: str) -> Answer:
    """Vouch for a running task."""
    identifier = values.canonical_id(task_id)
    with existing(place) as ledger:
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
    with existing(place) as ledger:
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
    with existing(place) as ledger:
        task = ledger.set_delivery(identifier, end, code=code)
    return answer({"ok": True, "task": task.to_dict()})
