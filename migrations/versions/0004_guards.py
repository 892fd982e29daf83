"""Triggers for whatever goes round the models: no way out of a terminal state, no history rewritten.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

GUARDS = (
    (
        "tsg_tasks_status_guard",
        (
            "CREATE TRIGGER tsg_tasks_status_guard BEFORE UPDATE OF status ON tsg_tasks FOR EACH ROW WHEN OLD.status "
            "IS NOT NEW.status AND NOT ((OLD.status = 'queued' AND NEW.status IN ('running', 'succeeded', 'failed', "
            "'timed_out', 'cancelled')) OR (OLD.status = 'running' AND NEW.status IN ('succeeded', 'failed', "
            "'timed_out', 'cancelled'))) BEGIN SELECT RAISE(ABORT, 'tsg_tasks_status_guard'); END"
        ),
    ),
    (
        "tsg_tasks_delivery_guard",
        (
            "CREATE TRIGGER tsg_tasks_delivery_guard BEFORE UPDATE OF delivery_status ON tsg_tasks FOR EACH ROW WHEN "
            "OLD.delivery_status IS NOT NEW.delivery_status AND NOT ((OLD.delivery_status = 'pending' AND "
            "NEW.delivery_status IN ('delivered', 'failed', 'not_applicable'))) BEGIN SELECT RAISE(ABORT, "
            "'tsg_tasks_delivery_guard'); END"
        ),
    ),
    (
        "tsg_tasks_immutable_guard",
        (
            "CREATE TRIGGER tsg_tasks_immutable_guard BEFORE UPDATE OF pk, id, parent_id, delivery_required, "
            "payload_hash, timeout_seconds, created_at ON tsg_tasks FOR EACH ROW WHEN OLD.pk IS NOT NEW.pk OR OLD.id "
            "IS NOT NEW.id OR OLD.parent_id IS NOT NEW.parent_id OR OLD.delivery_required IS NOT "
            "NEW.delivery_required OR OLD.payload_hash IS NOT NEW.payload_hash OR OLD.timeout_seconds IS NOT "
            "NEW.timeout_seconds OR OLD.created_at IS NOT NEW.created_at BEGIN SELECT RAISE(ABORT, "
            "'tsg_tasks_immutable_guard'); END"
        ),
    ),
    (
        "tsg_tasks_written_once_guard",
        (
            "CREATE TRIGGER tsg_tasks_written_once_guard BEFORE UPDATE OF started_at, ended_at, deadline_at, "
            "terminal_code, delivery_code ON tsg_tasks FOR EACH ROW WHEN (OLD.started_at IS NOT NULL AND "
            "OLD.started_at IS NOT NEW.started_at) OR (OLD.ended_at IS NOT NULL AND OLD.ended_at IS NOT NEW.ended_at)"
            " OR (OLD.deadline_at IS NOT NULL AND OLD.deadline_at IS NOT NEW.deadline_at) OR (OLD.terminal_code IS "
            "NOT NULL AND OLD.terminal_code IS NOT NEW.terminal_code) OR (OLD.delivery_code IS NOT NULL AND "
            "OLD.delivery_code IS NOT NEW.delivery_code) BEGIN SELECT RAISE(ABORT, 'tsg_tasks_written_once_guard'); "
            "END"
        ),
    ),
    (
        "tsg_task_events_update_guard",
        (
            "CREATE TRIGGER tsg_task_events_update_guard BEFORE UPDATE ON tsg_task_events FOR EACH ROW WHEN 1 BEGIN "
            "SELECT RAISE(ABORT, 'tsg_task_events_update_guard'); END"
        ),
    ),
    (
        "tsg_task_events_delete_guard",
        (
            "CREATE TRIGGER tsg_task_events_delete_guard BEFORE DELETE ON tsg_task_events FOR EACH ROW WHEN EXISTS "
            "(SELECT 1 FROM tsg_tasks WHERE pk = OLD.task_pk) BEGIN SELECT RAISE(ABORT, "
            "'tsg_task_events_delete_guard'); END"
        ),
    ),
)


def upgrade() -> None:
    for _, statement in GUARDS:
        op.execute(statement)


def downgrade() -> None:
    for name, _ in reversed(GUARDS):
        op.execute(f"DROP TRIGGER {name}")
