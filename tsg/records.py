"""A task as plain values: as it was stored at one moment, or as it is asked for."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass, field

from tsg import values
from tsg.errors import InvalidInput
from tsg.states import DeliveryStatus, TaskStatus

__all__ = ["TaskRecord", "creation"]


@dataclass(frozen=True)
class TaskRecord:
    """A task as it was stored at one moment. Times are seconds since the epoch."""

    id: str
    parent_id: str | None
    status: TaskStatus
    delivery_status: DeliveryStatus
    delivery_required: bool
    payload_hash: str | None = field(repr=False)
    timeout_seconds: float | None
    created_at: float
    started_at: float | None
    updated_at: float
    ended_at: float | None
    deadline_at: float | None
    delivery_updated_at: float
    terminal_code: str | None
    delivery_code: str | None
    version: int
    expects_heartbeat: bool

    def to_dict(self, *, include_payload_hash: bool = False) -> dict[str, object]:
        """Plain values, ready for JSON. The fingerprint shows only on request: it can be linked.

        Raises:
            InvalidInput: `include_payload_hash` is neither true nor false.
        """
        shown = values.flag(include_payload_hash, "include_payload_hash")
        plain: dict[str, object] = asdict(self)
        digest = plain.pop("payload_hash")
        plain |= {
            "status": self.status.value,
            "delivery_status": self.delivery_status.value,
            "has_payload_hash": digest is not None,
        }
        if shown:
            plain["payload_hash"] = digest
        return plain


def creation(
    *,
    task_id: object = None,
    parent_id: object = None,
    payload_hash: object = None,
    timeout_seconds: object = None,
    delivery_required: object = True,
    expects_heartbeat: object = True,
) -> TaskRecord:
    """The queued task that these arguments of :meth:`Ledger.create_task` ask for, its times still at zero.

    Raises:
        InvalidInput: a malformed argument.
    """
    parent = values.optional_id(parent_id)
    digest = values.payload_digest(payload_hash)
    timeout = None if timeout_seconds is None else values.non_negative(timeout_seconds, "a timeout")
    required = values.flag(delivery_required, "delivery_required")
    beats = values.flag(expects_heartbeat, "expects_heartbeat")
    if not beats and timeout is None:
        raise InvalidInput("a task that sends no heartbeat needs a timeout")
    return TaskRecord(
        id=str(uuid.uuid4()) if task_id is None else values.canonical_id(task_id),
        parent_id=parent,
        status=TaskStatus.QUEUED,
        delivery_status=DeliveryStatus.PENDING,
        delivery_required=required,
        payload_hash=digest,
        timeout_seconds=timeout,
        created_at=0.0,
        started_at=None,
        updated_at=0.0,
        ended_at=None,
        deadline_at=None,
        delivery_updated_at=0.0,
        terminal_code=None,
        delivery_code=None,
        version=0,
        expects_heartbeat=beats,
    )
