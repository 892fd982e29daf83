"""The shape of the published schema, version 1; a file that has that schema is taken over into it.

Text keys, one global sequence of events. What later revisions drop of it is said there.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tsg import published, schema
from tsg.errors import StateConflict

revision = "0001"
down_revision = None
branch_labels = ("tsg",)
depends_on = None


def upgrade() -> None:
    create_tables()
    create_indexes()
    if published.is_present(op.get_bind()):
        published.move(op.get_bind())
    schema.record(op.get_context(), revision)


def downgrade() -> None:
    if op.get_bind().scalar(sa.text("SELECT count(*) FROM tsg_tasks")):
        raise StateConflict("this would delete the ledger's history; drop the tables by hand if that is meant")
    op.drop_table("tsg_task_events")
    op.drop_table("tsg_tasks")
    schema.record(op.get_context(), down_revision)


def create_tables() -> None:
    on_postgresql = op.get_bind().dialect.name == "postgresql"
    hexadecimal = "payload_hash !~ '[^0-9a-f]'" if on_postgresql else "payload_hash NOT GLOB '*[^0-9a-f]*'"
    op.create_table(
        "tsg_tasks",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("parent_id", sa.Text()),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("delivery_status", sa.Text(), nullable=False),
        sa.Column("delivery_required", sa.Integer(), nullable=False),
        sa.Column("payload_hash", sa.Text()),
        sa.Column("timeout_seconds", sa.Double()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double()),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double()),
        sa.Column("deadline_at", sa.Double()),
        sa.Column("delivery_updated_at", sa.Double(), nullable=False),
        sa.Column("terminal_code", sa.Text()),
        sa.Column("delivery_code", sa.Text()),
        sa.Column("version", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tsg_tasks")),
        sa.ForeignKeyConstraint(["parent_id"], ["tsg_tasks.id"], name=op.f("fk_tsg_tasks_parent_id")),
        _check("tsg_tasks_status", "status IN ('queued','running','succeeded','failed','timed_out','cancelled')"),
        _check("tsg_tasks_delivery_status", "delivery_status IN ('pending','delivered','failed','not_applicable')"),
        _check("tsg_tasks_delivery_required", "delivery_required IN (0,1)"),
        _check(
            "tsg_tasks_payload_hash",
            "payload_hash IS NULL OR (length(payload_hash) = 64 AND " + hexadecimal + ")",
        ),
        _check("tsg_tasks_timeout_seconds", "timeout_seconds IS NULL OR timeout_seconds >= 0"),
        _check("tsg_tasks_version", "version >= 0"),
        _check("tsg_tasks_parent_id", "parent_id IS NULL OR parent_id <> id"),
        _check("tsg_tasks_deadline_at", "deadline_at IS NULL OR started_at IS NOT NULL"),
        _check(
            "tsg_tasks_ended_at",
            "(status IN ('queued','running') AND ended_at IS NULL) OR "
            "(status IN ('succeeded','failed','timed_out','cancelled') AND ended_at IS NOT NULL)",
        ),
    )
    op.create_table(
        "tsg_task_events",
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("event_kind", sa.Text(), nullable=False),
        sa.Column("from_value", sa.Text()),
        sa.Column("to_value", sa.Text(), nullable=False),
        sa.Column("occurred_at", sa.Double(), nullable=False),
        sa.Column("code", sa.Text()),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_tsg_task_events")),
        sa.ForeignKeyConstraint(["task_id"], ["tsg_tasks.id"], name=op.f("fk_tsg_task_events_task_id")),
        _check("tsg_task_events_event_kind", "event_kind IN ('created','task_transition','delivery_transition')"),
        sqlite_autoincrement=True,
    )


def create_indexes() -> None:
    op.create_index(op.f("ix_tsg_tasks_parent_id"), "tsg_tasks", ["parent_id"])
    op.create_index(op.f("ix_tsg_tasks_status"), "tsg_tasks", ["status", "updated_at"])
    op.create_index(op.f("ix_tsg_tasks_delivery_status"), "tsg_tasks", ["delivery_status", "ended_at"])


def _check(name: str, condition: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(condition, name=op.f(f"ck_{name}"))
