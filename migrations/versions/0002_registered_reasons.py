"""Only registered reasons that fit their state: the published schema, version 2.

Nothing changes but the promise. A ledger that can't keep it is refused, and a person has to decide.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tsg import schema
from tsg.errors import StateConflict

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TASK_REASONS = (
    ("succeeded", ("completed", "worker_completed")),
    ("failed", ("worker_failed",)),
    ("timed_out", ("deadline_exceeded", "restart_stale")),
    ("cancelled", ("caller_cancelled",)),
)
DELIVERY_REASONS = (
    ("delivered", ("transport_acknowledged",)),
    ("failed", ("delivery_grace_expired", "transport_failed")),
    ("not_applicable", ("internal_task",)),
)
LEDGER_REASONS = (("queued", ("created",)), ("running", ("started",)))


def upgrade() -> None:
    bind = op.get_bind()
    for table, state, code, registry, also in (
        ("tsg_tasks", "status", "terminal_code", TASK_REASONS, "1 = 1"),
        ("tsg_tasks", "delivery_status", "delivery_code", DELIVERY_REASONS, "1 = 1"),
        ("tsg_task_events", "to_value", "code", LEDGER_REASONS, "event_kind = 'created'"),
        ("tsg_task_events", "to_value", "code", LEDGER_REASONS + TASK_REASONS, "event_kind = 'task_transition'"),
        ("tsg_task_events", "to_value", "code", DELIVERY_REASONS, "event_kind = 'delivery_transition'"),
    ):
        fits = " OR ".join(
            f"({state} = '{value}' AND {code} IN ({', '.join(repr(reason) for reason in reasons)}))"
            for value, reasons in registry
        )
        unfit = sa.text(f"SELECT count(*) FROM {table} WHERE {also} AND {code} IS NOT NULL AND NOT ({fits})")
        if bind.scalar(unfit):
            raise StateConflict("a stored reason is not in the registry or does not fit its state")
    schema.record(op.get_context(), revision)


def downgrade() -> None:
    """Nothing to undo: the older schema allowed all that this one does."""
    schema.record(op.get_context(), down_revision)
