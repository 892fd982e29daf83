"""The shape at head: an integer key beside the id, events clustered on it and numbered within their task.

A task's history lies together, a doubled or lost event shows in its number, every row rule is a CHECK, and
what reconcile looks for has partial indexes. The order of a task's events is kept; the global sequence, which
told nothing more, is not.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tsg.errors import StateConflict

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

UUID = "-".join("[0-9a-f]" * count for count in (8, 4, 4, 4, 12))

TASK_CHECKS = (
    (
        "ck_tsg_tasks_id",
        f"(typeof(id) = 'text' AND length(CAST(id AS BLOB)) = 36 AND id GLOB '{UUID}') IS 1",
    ),
    (
        "ck_tsg_tasks_parent_id",
        (
            "(parent_id IS NULL OR (typeof(parent_id) = 'text' AND length(CAST(parent_id AS BLOB)) = 36 AND "
            f"parent_id GLOB '{UUID}') AND parent_id != id) IS 1"
        ),
    ),
    (
        "ck_tsg_tasks_status",
        "(status IN ('queued', 'running', 'succeeded', 'failed', 'timed_out', 'cancelled')) IS 1",
    ),
    (
        "ck_tsg_tasks_delivery_status",
        "(delivery_status IN ('pending', 'delivered', 'failed', 'not_applicable')) IS 1",
    ),
    (
        "ck_tsg_tasks_flags",
        (
            "((typeof(delivery_required) = 'integer' AND delivery_required IN (0, 1)) AND "
            "(typeof(expects_heartbeat) = 'integer' AND expects_heartbeat IN (0, 1))) IS 1"
        ),
    ),
    (
        "ck_tsg_tasks_payload_hash",
        (
            "(payload_hash IS NULL OR (typeof(payload_hash) = 'text' AND length(CAST(payload_hash AS BLOB)) = 64 "
            "AND payload_hash NOT GLOB '*[^0-9a-f]*')) IS 1"
        ),
    ),
    (
        "ck_tsg_tasks_expects_heartbeat",
        "(expects_heartbeat IS 1 OR timeout_seconds IS NOT NULL) IS 1",
    ),
    (
        "ck_tsg_tasks_lifecycle",
        (
            "(status = 'queued' AND started_at IS NULL AND ended_at IS NULL OR status = 'running' AND started_at "
            "IS NOT NULL AND ended_at IS NULL OR status IN ('succeeded', 'failed', 'timed_out', 'cancelled') AND "
            "ended_at IS NOT NULL) IS 1"
        ),
    ),
    (
        "ck_tsg_tasks_terminal_code",
        (
            "(terminal_code IS NULL OR status = 'succeeded' AND terminal_code IN ('completed', "
            "'worker_completed') OR status = 'failed' AND terminal_code IN ('worker_failed') OR status = "
            "'timed_out' AND terminal_code IN ('deadline_exceeded', 'restart_stale') OR status = 'cancelled' AND "
            "terminal_code IN ('caller_cancelled')) IS 1"
        ),
    ),
    (
        "ck_tsg_tasks_delivery",
        (
            "(delivery_status = 'pending' OR status IN ('succeeded', 'failed', 'timed_out', 'cancelled') AND "
            "delivery_required IS 1 AND delivery_status IN ('delivered', 'failed') OR status IN ('succeeded', "
            "'failed', 'timed_out', 'cancelled') AND delivery_required IS NOT 1 AND delivery_status = "
            "'not_applicable') IS 1"
        ),
    ),
    (
        "ck_tsg_tasks_delivery_code",
        (
            "(delivery_code IS NULL OR delivery_status = 'delivered' AND delivery_code IN "
            "('transport_acknowledged') OR delivery_status = 'failed' AND delivery_code IN "
            "('delivery_grace_expired', 'transport_failed') OR delivery_status = 'not_applicable' AND "
            "delivery_code IN ('internal_task')) IS 1"
        ),
    ),
    (
        "ck_tsg_tasks_version",
        (
            "((typeof(version) = 'integer') AND (started_at IS NULL AND version = CASE WHEN (status IN "
            "('succeeded', 'failed', 'timed_out', 'cancelled')) THEN 1 ELSE 0 END + CASE WHEN (delivery_status !="
            " 'pending') THEN 1 ELSE 0 END OR started_at IS NOT NULL AND version = CASE WHEN (status IN "
            "('succeeded', 'failed', 'timed_out', 'cancelled')) THEN 1 ELSE 0 END + CASE WHEN (delivery_status !="
            " 'pending') THEN 1 ELSE 0 END + 1 OR started_at IS NOT NULL AND expects_heartbeat IS 1 AND version >"
            " CASE WHEN (status IN ('succeeded', 'failed', 'timed_out', 'cancelled')) THEN 1 ELSE 0 END + CASE "
            "WHEN (delivery_status != 'pending') THEN 1 ELSE 0 END + 1)) IS 1"
        ),
    ),
    (
        "ck_tsg_tasks_timeout_seconds",
        (
            "(timeout_seconds IS NULL OR (typeof(timeout_seconds) = 'real' AND timeout_seconds BETWEEN "
            "-1.7976931348623157e308 AND 1.7976931348623157e308) AND timeout_seconds >= 0) IS 1"
        ),
    ),
    (
        "ck_tsg_tasks_finite",
        (
            "((typeof(created_at) = 'real' AND created_at BETWEEN -1.7976931348623157e308 AND "
            "1.7976931348623157e308) AND (typeof(updated_at) = 'real' AND updated_at BETWEEN "
            "-1.7976931348623157e308 AND 1.7976931348623157e308) AND (typeof(delivery_updated_at) = 'real' AND "
            "delivery_updated_at BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308) AND (started_at IS "
            "NULL OR (typeof(started_at) = 'real' AND started_at BETWEEN -1.7976931348623157e308 AND "
            "1.7976931348623157e308)) AND (ended_at IS NULL OR (typeof(ended_at) = 'real' AND ended_at BETWEEN "
            "-1.7976931348623157e308 AND 1.7976931348623157e308)) AND (deadline_at IS NULL OR "
            "(typeof(deadline_at) = 'real' AND deadline_at BETWEEN -1.7976931348623157e308 AND "
            "1.7976931348623157e308))) IS 1"
        ),
    ),
    (
        "ck_tsg_tasks_started_at",
        "(started_at IS NULL OR created_at <= started_at) IS 1",
    ),
    (
        "ck_tsg_tasks_updated_at",
        (
            "CASE WHEN (ended_at IS NOT NULL) THEN updated_at = ended_at WHEN (started_at IS NULL) THEN "
            "updated_at = created_at WHEN (version = 1) THEN updated_at = started_at ELSE updated_at >= "
            "started_at END IS 1"
        ),
    ),
    (
        "ck_tsg_tasks_ended_at",
        "(ended_at IS NULL OR coalesce(started_at, created_at) <= ended_at) IS 1",
    ),
    (
        "ck_tsg_tasks_deadline_at",
        (
            "CASE WHEN (started_at IS NULL OR timeout_seconds IS NULL) THEN deadline_at IS NULL ELSE deadline_at "
            "IS NOT NULL AND deadline_at = started_at + timeout_seconds END IS 1"
        ),
    ),
    (
        "ck_tsg_tasks_delivery_updated_at",
        (
            "CASE WHEN (delivery_status = 'pending') THEN delivery_updated_at = created_at ELSE "
            "delivery_updated_at >= ended_at END IS 1"
        ),
    ),
)

EVENT_CHECKS = (
    (
        "ck_tsg_task_events_number",
        "(typeof(number) = 'integer') IS 1",
    ),
    (
        "ck_tsg_task_events_kind",
        "(kind IN ('created', 'task_transition', 'delivery_transition')) IS 1",
    ),
    (
        "ck_tsg_task_events_occurred_at",
        (
            "(typeof(occurred_at) = 'real' AND occurred_at BETWEEN -1.7976931348623157e308 AND "
            "1.7976931348623157e308) IS 1"
        ),
    ),
    (
        "ck_tsg_task_events_transition",
        (
            "CASE WHEN (kind = 'created') THEN number = 0 AND from_status IS NULL AND to_status = 'queued' AND "
            "code = 'created' WHEN (kind = 'task_transition') THEN number = 1 AND from_status = 'queued' AND "
            "to_status = 'running' AND code = 'started' OR (number = 1 AND from_status = 'queued' OR number = 2 "
            "AND from_status = 'running') AND to_status IN ('succeeded', 'failed', 'timed_out', 'cancelled') AND "
            "(code IS NULL OR to_status = 'succeeded' AND code IN ('completed', 'worker_completed') OR to_status "
            "= 'failed' AND code IN ('worker_failed') OR to_status = 'timed_out' AND code IN "
            "('deadline_exceeded', 'restart_stale') OR to_status = 'cancelled' AND code IN ('caller_cancelled')) "
            "WHEN (kind = 'delivery_transition') THEN number IN (2, 3) AND from_status = 'pending' AND to_status "
            "IN ('delivered', 'failed', 'not_applicable') AND (code IS NULL OR to_status = 'delivered' AND code "
            "IN ('transport_acknowledged') OR to_status = 'failed' AND code IN ('delivery_grace_expired', "
            "'transport_failed') OR to_status = 'not_applicable' AND code IN ('internal_task')) ELSE 0 END IS 1"
        ),
    ),
)

COPIED = (
    "id, parent_id, status, delivery_status, delivery_required, payload_hash, timeout_seconds, created_at, "
    "started_at, updated_at, ended_at, deadline_at, delivery_updated_at, terminal_code, delivery_code, version"
)


def upgrade() -> None:
    move_aside()
    create_tables()
    # Keys in the order of creation: a parent's is below its children's.
    copy(
        "tsg_tasks",
        f"INSERT INTO tsg_tasks (pk, expects_heartbeat, {COPIED}) "
        f"SELECT row_number() OVER (ORDER BY rowid), 1, {COPIED} FROM tsg_tasks_aside ORDER BY rowid",
    )
    copy(
        "tsg_task_events",
        "INSERT INTO tsg_task_events (task_pk, number, kind, from_status, to_status, occurred_at, code) "
        "SELECT tsg_tasks.pk, row_number() OVER (PARTITION BY tsg_tasks.pk ORDER BY sequence) - 1, event_kind, "
        "from_value, to_value, occurred_at, code "
        "FROM tsg_task_events_aside JOIN tsg_tasks ON tsg_tasks.id = task_id ORDER BY tsg_tasks.pk, sequence",
    )
    drop_aside()
    create_indexes()


def downgrade() -> None:
    silent = "SELECT count(*) FROM tsg_tasks WHERE NOT expects_heartbeat AND status IN ('queued', 'running')"
    if op.get_bind().scalar(sa.text(silent)):
        raise StateConflict("active tasks that send no heartbeat would be timed out by the older schema's rules")
    move_aside()
    scripts = op.get_context().script
    assert scripts is not None
    older = scripts.get_revision("0001").module
    older.create_tables()
    copy("tsg_tasks", f"INSERT INTO tsg_tasks ({COPIED}) SELECT {COPIED} FROM tsg_tasks_aside ORDER BY pk")
    # A running maximum keeps each chain in its order, even where a time in it was damaged.
    copy(
        "tsg_task_events",
        "INSERT INTO tsg_task_events (task_id, event_kind, from_value, to_value, occurred_at, code) "
        "SELECT id, kind, from_status, to_status, occurred_at, code FROM ("
        "SELECT tsg_task_events_aside.*, max(occurred_at) OVER (PARTITION BY task_pk ORDER BY number) AS reached "
        "FROM tsg_task_events_aside) AS event JOIN tsg_tasks_aside ON tsg_tasks_aside.pk = task_pk "
        "ORDER BY reached, task_pk, number",
    )
    drop_aside()
    older.create_indexes()


def move_aside() -> None:
    """Take the tables' names from them; their indexes go, since their names are needed too."""
    bind = op.get_bind()
    indexes = (
        "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL "
        "AND tbl_name IN ('tsg_tasks', 'tsg_task_events')"
    )
    for name in bind.scalars(sa.text(indexes)).all():
        op.drop_index(name)
    op.rename_table("tsg_task_events", "tsg_task_events_aside")
    op.rename_table("tsg_tasks", "tsg_tasks_aside")


def copy(table: str, statement: str) -> None:
    """Move all rows, or none: a join that finds no partner would lose them without a word."""
    bind = op.get_bind()
    bind.execute(sa.text(statement))
    if bind.scalar(sa.text(f"SELECT (SELECT count(*) FROM {table}) <> (SELECT count(*) FROM {table}_aside)")):
        raise StateConflict("a stored row has no place in the new schema; run doctor with the older release")


def drop_aside() -> None:
    op.drop_table("tsg_task_events_aside")
    op.drop_table("tsg_tasks_aside")


def create_tables() -> None:
    key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "tsg_tasks",
        sa.Column("pk", key, nullable=False),
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("parent_id", sa.String(36)),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("delivery_status", sa.String(16), nullable=False),
        sa.Column("delivery_required", sa.Boolean(), nullable=False),
        sa.Column("expects_heartbeat", sa.Boolean(), nullable=False),
        sa.Column("payload_hash", sa.String(64)),
        sa.Column("timeout_seconds", sa.Double()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double()),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double()),
        sa.Column("deadline_at", sa.Double()),
        sa.Column("delivery_updated_at", sa.Double(), nullable=False),
        sa.Column("terminal_code", sa.String(32)),
        sa.Column("delivery_code", sa.String(32)),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_tsg_tasks")),
        sa.UniqueConstraint("id", name=op.f("uq_tsg_tasks_id")),
        sa.ForeignKeyConstraint(["parent_id"], ["tsg_tasks.id"], name=op.f("fk_tsg_tasks_parent_id")),
        *(sa.CheckConstraint(condition, name=op.f(name)) for name, condition in TASK_CHECKS),
    )
    op.create_table(
        "tsg_task_events",
        sa.Column("task_pk", key, nullable=False),
        sa.Column("number", sa.SmallInteger(), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("from_status", sa.String(16)),
        sa.Column("to_status", sa.String(16), nullable=False),
        sa.Column("occurred_at", sa.Double(), nullable=False),
        sa.Column("code", sa.String(32)),
        sa.PrimaryKeyConstraint("task_pk", "number", name=op.f("pk_tsg_task_events")),
        sa.ForeignKeyConstraint(
            ["task_pk"], ["tsg_tasks.pk"], name=op.f("fk_tsg_task_events_task_pk"), ondelete="CASCADE"
        ),
        *(sa.CheckConstraint(condition, name=op.f(name)) for name, condition in EVENT_CHECKS),
        sqlite_with_rowid=False,
    )


def create_indexes() -> None:
    op.create_index(
        op.f("ix_tsg_tasks_active"),
        "tsg_tasks",
        ["status", "updated_at", "deadline_at", "expects_heartbeat"],
        sqlite_where=sa.text("status IN ('queued', 'running')"),
    )
    op.create_index(
        op.f("ix_tsg_tasks_delivery_pending"),
        "tsg_tasks",
        ["ended_at"],
        sqlite_where=sa.text(
            "delivery_status = 'pending' AND status IN ('succeeded', 'failed', 'timed_out', 'cancelled')"
        ),
    )
    op.create_index(
        op.f("ix_tsg_tasks_parent_id"),
        "tsg_tasks",
        ["parent_id", "created_at"],
        sqlite_where=sa.text("parent_id IS NOT NULL"),
    )
