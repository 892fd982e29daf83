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

from tsg import schema
from tsg.errors import StateConflict

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

UUID = "-".join("[0-9a-f]" * count for count in (8, 4, 4, 4, 12))

# Each with its text on SQLite and on PostgreSQL.
TASK_CHECKS = (
    (
        "ck_tsg_tasks_id",
        f"((typeof(id) = 'text' AND length(CAST(id AS BLOB)) = 36 AND id GLOB '{UUID}') IS TRUE)",
        "((id IS NOT NULL) IS TRUE)",
    ),
    (
        "ck_tsg_tasks_parent_id",
        (
            "((parent_id IS NULL OR (typeof(parent_id) = 'text' AND length(CAST(parent_id AS BLOB)) = 36 AND "
            f"parent_id GLOB '{UUID}') AND parent_id != id) IS TRUE)"
        ),
        "((parent_id IS NULL OR (parent_id IS NOT NULL) AND parent_id != id) IS TRUE)",
    ),
    (
        "ck_tsg_tasks_status",
        (
            "((status = 'queued' OR status = 'running' OR status = 'succeeded' OR status = 'failed' OR "
            "status = 'timed_out' OR status = 'cancelled') IS TRUE)"
        ),
        (
            "((status = 'queued' OR status = 'running' OR status = 'succeeded' OR status = 'failed' OR "
            "status = 'timed_out' OR status = 'cancelled') IS TRUE)"
        ),
    ),
    (
        "ck_tsg_tasks_delivery_status",
        (
            "((delivery_status = 'pending' OR delivery_status = 'delivered' OR delivery_status = 'failed' OR "
            "delivery_status = 'not_applicable') IS TRUE)"
        ),
        (
            "((delivery_status = 'pending' OR delivery_status = 'delivered' OR delivery_status = 'failed' OR "
            "delivery_status = 'not_applicable') IS TRUE)"
        ),
    ),
    (
        "ck_tsg_tasks_flags",
        "(((delivery_required IN (0, 1)) AND (expects_heartbeat IN (0, 1))) IS TRUE)",
        "(((delivery_required IS NOT NULL) AND (expects_heartbeat IS NOT NULL)) IS TRUE)",
    ),
    (
        "ck_tsg_tasks_payload_hash",
        (
            "((payload_hash IS NULL OR (typeof(payload_hash) = 'text' AND length(payload_hash) = 64 AND "
            "length(CAST(payload_hash AS BLOB)) = 64 AND payload_hash NOT GLOB '*[^0-9a-f]*')) IS TRUE)"
        ),
        "((payload_hash IS NULL OR (length(payload_hash) = 64 AND payload_hash !~ '[^0-9a-f]')) IS TRUE)",
    ),
    (
        "ck_tsg_tasks_expects_heartbeat",
        "(((expects_heartbeat IS TRUE) OR timeout_seconds IS NOT NULL) IS TRUE)",
        "(((expects_heartbeat IS TRUE) OR timeout_seconds IS NOT NULL) IS TRUE)",
    ),
    (
        "ck_tsg_tasks_lifecycle",
        (
            "((status = 'queued' AND started_at IS NULL AND ended_at IS NULL OR status = 'running' AND "
            "started_at IS NOT NULL AND ended_at IS NULL OR (status = 'succeeded' OR status = 'failed' OR "
            "status = 'timed_out' OR status = 'cancelled') AND ended_at IS NOT NULL) IS TRUE)"
        ),
        (
            "((status = 'queued' AND started_at IS NULL AND ended_at IS NULL OR status = 'running' AND "
            "started_at IS NOT NULL AND ended_at IS NULL OR (status = 'succeeded' OR status = 'failed' OR "
            "status = 'timed_out' OR status = 'cancelled') AND ended_at IS NOT NULL) IS TRUE)"
        ),
    ),
    (
        "ck_tsg_tasks_terminal_code",
        (
            "((terminal_code IS NULL OR status = 'succeeded' AND (terminal_code = 'completed' OR "
            "terminal_code = 'worker_completed') OR status = 'failed' AND terminal_code = 'worker_failed' OR "
            "status = 'timed_out' AND (terminal_code = 'deadline_exceeded' OR terminal_code = "
            "'restart_stale') OR status = 'cancelled' AND terminal_code = 'caller_cancelled') IS TRUE)"
        ),
        (
            "((terminal_code IS NULL OR status = 'succeeded' AND (terminal_code = 'completed' OR "
            "terminal_code = 'worker_completed') OR status = 'failed' AND terminal_code = 'worker_failed' OR "
            "status = 'timed_out' AND (terminal_code = 'deadline_exceeded' OR terminal_code = "
            "'restart_stale') OR status = 'cancelled' AND terminal_code = 'caller_cancelled') IS TRUE)"
        ),
    ),
    (
        "ck_tsg_tasks_delivery",
        (
            "((delivery_status = 'pending' OR (status = 'succeeded' OR status = 'failed' OR status = "
            "'timed_out' OR status = 'cancelled') AND (delivery_required IS TRUE) AND (delivery_status = "
            "'delivered' OR delivery_status = 'failed') OR (status = 'succeeded' OR status = 'failed' OR "
            "status = 'timed_out' OR status = 'cancelled') AND (delivery_required IS NOT TRUE) AND "
            "delivery_status = 'not_applicable') IS TRUE)"
        ),
        (
            "((delivery_status = 'pending' OR (status = 'succeeded' OR status = 'failed' OR status = "
            "'timed_out' OR status = 'cancelled') AND (delivery_required IS TRUE) AND (delivery_status = "
            "'delivered' OR delivery_status = 'failed') OR (status = 'succeeded' OR status = 'failed' OR "
            "status = 'timed_out' OR status = 'cancelled') AND (delivery_required IS NOT TRUE) AND "
            "delivery_status = 'not_applicable') IS TRUE)"
        ),
    ),
    (
        "ck_tsg_tasks_delivery_code",
        (
            "((delivery_code IS NULL OR delivery_status = 'delivered' AND delivery_code = "
            "'transport_acknowledged' OR delivery_status = 'failed' AND (delivery_code = "
            "'delivery_grace_expired' OR delivery_code = 'transport_failed') OR delivery_status = "
            "'not_applicable' AND delivery_code = 'internal_task') IS TRUE)"
        ),
        (
            "((delivery_code IS NULL OR delivery_status = 'delivered' AND delivery_code = "
            "'transport_acknowledged' OR delivery_status = 'failed' AND (delivery_code = "
            "'delivery_grace_expired' OR delivery_code = 'transport_failed') OR delivery_status = "
            "'not_applicable' AND delivery_code = 'internal_task') IS TRUE)"
        ),
    ),
    (
        "ck_tsg_tasks_version",
        (
            "(((typeof(version) = 'integer') AND (started_at IS NULL AND version = 0 + CASE WHEN (ended_at "
            "IS NOT NULL) THEN 1 ELSE 0 END + CASE WHEN (delivery_status != 'pending') THEN 1 ELSE 0 END OR "
            "started_at IS NOT NULL AND version = 1 + CASE WHEN (ended_at IS NOT NULL) THEN 1 ELSE 0 END + "
            "CASE WHEN (delivery_status != 'pending') THEN 1 ELSE 0 END OR started_at IS NOT NULL AND "
            "(expects_heartbeat IS TRUE) AND version > 1 + CASE WHEN (ended_at IS NOT NULL) THEN 1 ELSE 0 "
            "END + CASE WHEN (delivery_status != 'pending') THEN 1 ELSE 0 END)) IS TRUE)"
        ),
        (
            "(((version IS NOT NULL) AND (started_at IS NULL AND version = 0 + CASE WHEN (ended_at IS NOT "
            "NULL) THEN 1 ELSE 0 END + CASE WHEN (delivery_status != 'pending') THEN 1 ELSE 0 END OR "
            "started_at IS NOT NULL AND version = 1 + CASE WHEN (ended_at IS NOT NULL) THEN 1 ELSE 0 END + "
            "CASE WHEN (delivery_status != 'pending') THEN 1 ELSE 0 END OR started_at IS NOT NULL AND "
            "(expects_heartbeat IS TRUE) AND version > 1 + CASE WHEN (ended_at IS NOT NULL) THEN 1 ELSE 0 "
            "END + CASE WHEN (delivery_status != 'pending') THEN 1 ELSE 0 END)) IS TRUE)"
        ),
    ),
    (
        "ck_tsg_tasks_timeout_seconds",
        (
            "((timeout_seconds IS NULL OR (timeout_seconds BETWEEN -1.7976931348623157e308 AND "
            "1.7976931348623157e308) AND timeout_seconds >= 0) IS TRUE)"
        ),
        (
            "((timeout_seconds IS NULL OR (timeout_seconds > '-Infinity'::float8 AND timeout_seconds < "
            "'Infinity'::float8) AND timeout_seconds >= 0) IS TRUE)"
        ),
    ),
    (
        "ck_tsg_tasks_finite",
        (
            "(((created_at BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308) AND (updated_at "
            "BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308) AND (delivery_updated_at BETWEEN "
            "-1.7976931348623157e308 AND 1.7976931348623157e308) AND (started_at IS NULL OR (started_at "
            "BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308)) AND (ended_at IS NULL OR (ended_at "
            "BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308)) AND (deadline_at IS NULL OR "
            "(deadline_at BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308))) IS TRUE)"
        ),
        (
            "(((created_at > '-Infinity'::float8 AND created_at < 'Infinity'::float8) AND (updated_at > "
            "'-Infinity'::float8 AND updated_at < 'Infinity'::float8) AND (delivery_updated_at > "
            "'-Infinity'::float8 AND delivery_updated_at < 'Infinity'::float8) AND (started_at IS NULL OR "
            "(started_at > '-Infinity'::float8 AND started_at < 'Infinity'::float8)) AND (ended_at IS NULL "
            "OR (ended_at > '-Infinity'::float8 AND ended_at < 'Infinity'::float8)) AND (deadline_at IS NULL "
            "OR (deadline_at > '-Infinity'::float8 AND deadline_at < 'Infinity'::float8))) IS TRUE)"
        ),
    ),
    (
        "ck_tsg_tasks_started_at",
        "((started_at IS NULL OR created_at <= started_at) IS TRUE)",
        "((started_at IS NULL OR created_at <= started_at) IS TRUE)",
    ),
    (
        "ck_tsg_tasks_updated_at",
        (
            "(CASE WHEN (ended_at IS NOT NULL) THEN updated_at = ended_at WHEN (started_at IS NULL) THEN "
            "updated_at = created_at WHEN (version = 1) THEN updated_at = started_at ELSE updated_at >= "
            "started_at END IS TRUE)"
        ),
        (
            "(CASE WHEN (ended_at IS NOT NULL) THEN updated_at = ended_at WHEN (started_at IS NULL) THEN "
            "updated_at = created_at WHEN (version = 1) THEN updated_at = started_at ELSE updated_at >= "
            "started_at END IS TRUE)"
        ),
    ),
    (
        "ck_tsg_tasks_ended_at",
        "((ended_at IS NULL OR coalesce(started_at, created_at) <= ended_at) IS TRUE)",
        "((ended_at IS NULL OR coalesce(started_at, created_at) <= ended_at) IS TRUE)",
    ),
    (
        "ck_tsg_tasks_deadline_at",
        (
            "(CASE WHEN (started_at IS NULL OR timeout_seconds IS NULL) THEN deadline_at IS NULL ELSE "
            "deadline_at IS NOT NULL AND deadline_at = started_at + timeout_seconds END IS TRUE)"
        ),
        (
            "(CASE WHEN (started_at IS NULL OR timeout_seconds IS NULL) THEN deadline_at IS NULL ELSE "
            "deadline_at IS NOT NULL AND deadline_at = started_at + timeout_seconds END IS TRUE)"
        ),
    ),
    (
        "ck_tsg_tasks_delivery_updated_at",
        (
            "((delivery_status = 'pending' AND delivery_updated_at = created_at OR delivery_status != "
            "'pending' AND delivery_updated_at >= ended_at) IS TRUE)"
        ),
        (
            "((delivery_status = 'pending' AND delivery_updated_at = created_at OR delivery_status != "
            "'pending' AND delivery_updated_at >= ended_at) IS TRUE)"
        ),
    ),
)

EVENT_CHECKS = (
    (
        "ck_tsg_task_events_number",
        "((typeof(number) = 'integer') IS TRUE)",
        "((number IS NOT NULL) IS TRUE)",
    ),
    (
        "ck_tsg_task_events_kind",
        "((kind = 'created' OR kind = 'task_transition' OR kind = 'delivery_transition') IS TRUE)",
        "((kind = 'created' OR kind = 'task_transition' OR kind = 'delivery_transition') IS TRUE)",
    ),
    (
        "ck_tsg_task_events_occurred_at",
        "((occurred_at BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308) IS TRUE)",
        "((occurred_at > '-Infinity'::float8 AND occurred_at < 'Infinity'::float8) IS TRUE)",
    ),
    (
        "ck_tsg_task_events_transition",
        (
            "(CASE WHEN (kind = 'created') THEN number = 0 AND from_status IS NULL AND to_status = 'queued' "
            "AND code = 'created' WHEN (kind = 'task_transition') THEN number = 1 AND from_status = 'queued' "
            "AND to_status = 'running' AND code = 'started' OR (number = 1 AND from_status = 'queued' OR "
            "number = 2 AND from_status = 'running') AND (to_status = 'succeeded' OR to_status = 'failed' OR "
            "to_status = 'timed_out' OR to_status = 'cancelled') AND (code IS NULL OR to_status = "
            "'succeeded' AND (code = 'completed' OR code = 'worker_completed') OR to_status = 'failed' AND "
            "code = 'worker_failed' OR to_status = 'timed_out' AND (code = 'deadline_exceeded' OR code = "
            "'restart_stale') OR to_status = 'cancelled' AND code = 'caller_cancelled') WHEN (kind = "
            "'delivery_transition') THEN number IN (2, 3) AND from_status = 'pending' AND (to_status = "
            "'delivered' OR to_status = 'failed' OR to_status = 'not_applicable') AND (code IS NULL OR "
            "to_status = 'delivered' AND code = 'transport_acknowledged' OR to_status = 'failed' AND (code = "
            "'delivery_grace_expired' OR code = 'transport_failed') OR to_status = 'not_applicable' AND code "
            "= 'internal_task') ELSE 0 END IS TRUE)"
        ),
        (
            "(CASE WHEN (kind = 'created') THEN number = 0 AND from_status IS NULL AND to_status = 'queued' "
            "AND code = 'created' WHEN (kind = 'task_transition') THEN number = 1 AND from_status = 'queued' "
            "AND to_status = 'running' AND code = 'started' OR (number = 1 AND from_status = 'queued' OR "
            "number = 2 AND from_status = 'running') AND (to_status = 'succeeded' OR to_status = 'failed' OR "
            "to_status = 'timed_out' OR to_status = 'cancelled') AND (code IS NULL OR to_status = "
            "'succeeded' AND (code = 'completed' OR code = 'worker_completed') OR to_status = 'failed' AND "
            "code = 'worker_failed' OR to_status = 'timed_out' AND (code = 'deadline_exceeded' OR code = "
            "'restart_stale') OR to_status = 'cancelled' AND code = 'caller_cancelled') WHEN (kind = "
            "'delivery_transition') THEN number IN (2, 3) AND from_status = 'pending' AND (to_status = "
            "'delivered' OR to_status = 'failed' OR to_status = 'not_applicable') AND (code IS NULL OR "
            "to_status = 'delivered' AND code = 'transport_acknowledged' OR to_status = 'failed' AND (code = "
            "'delivery_grace_expired' OR code = 'transport_failed') OR to_status = 'not_applicable' AND code "
            "= 'internal_task') ELSE false END IS TRUE)"
        ),
    ),
)

KEYED = "id, parent_id, status, delivery_status, delivery_required"
COPIED = (
    "payload_hash, timeout_seconds, created_at, started_at, updated_at, ended_at, deadline_at, "
    "delivery_updated_at, terminal_code, delivery_code, version"
)
ACTIVE = "status IN ('queued', 'running')"
PENDING = (
    "delivery_status = 'pending' AND (status = 'succeeded' OR status = 'failed' OR status = 'timed_out' OR "
    "status = 'cancelled')"
)


REFERRED_TO_ON_POSTGRESQL = (
    "SELECT count(*) FROM pg_constraint "
    "WHERE confrelid IN ('tsg_tasks'\\:\\:regclass, 'tsg_task_events'\\:\\:regclass) "
    "AND conrelid NOT IN ('tsg_tasks'\\:\\:regclass, 'tsg_task_events'\\:\\:regclass)"
)
REFERRED_TO = (
    "SELECT 1 FROM sqlite_master AS other, pragma_foreign_key_list(other.name) AS reference "
    "WHERE other.type = 'table' AND other.name NOT IN ('tsg_tasks', 'tsg_task_events') "
    "AND reference.\"table\" IN ('tsg_tasks', 'tsg_task_events') LIMIT 1"
)


def upgrade() -> None:
    move_aside()
    create_tables()
    # Keys in the order of creation: a parent's is below its children's.
    if on_postgresql():
        order, keyed = "created_at, id", "id::uuid, parent_id::uuid, status, delivery_status, delivery_required = 1"
    else:
        order, keyed = "rowid", "id, parent_id, status, delivery_status, delivery_required"
    copy(
        "tsg_tasks",
        f"INSERT INTO tsg_tasks (pk, {KEYED}, {COPIED}, expects_heartbeat) "
        f"SELECT row_number() OVER (ORDER BY {order}), {keyed}, {COPIED}, {'true' if on_postgresql() else '1'} "
        f"FROM tsg_tasks_aside ORDER BY {order}",
    )
    identity = "CAST(tsg_tasks.id AS text)" if on_postgresql() else "tsg_tasks.id"
    copy(
        "tsg_task_events",
        "INSERT INTO tsg_task_events (task_pk, number, kind, from_status, to_status, occurred_at, code) "
        "SELECT tsg_tasks.pk, row_number() OVER (PARTITION BY tsg_tasks.pk ORDER BY sequence) - 1, event_kind, "
        "from_value, to_value, occurred_at, code "
        f"FROM tsg_task_events_aside JOIN tsg_tasks ON {identity} = task_id ORDER BY tsg_tasks.pk, sequence",
    )
    if on_postgresql():
        op.execute(
            "SELECT setval(pg_get_serial_sequence('tsg_tasks', 'pk'), greatest(max(pk), 1), max(pk) IS NOT NULL) "
            "FROM tsg_tasks"
        )
    drop_aside()
    create_indexes()
    schema.record(op.get_context(), revision)


def downgrade() -> None:
    silent = "SELECT count(*) FROM tsg_tasks WHERE NOT expects_heartbeat AND status IN ('queued', 'running')"
    if op.get_bind().scalar(sa.text(silent)):
        raise StateConflict("active tasks that send no heartbeat would be timed out by the older schema's rules")
    move_aside()
    scripts = op.get_context().script
    assert scripts is not None
    older = scripts.get_revision("0001").module
    older.create_tables()
    keyed = (
        "id::text, parent_id::text, status, delivery_status, delivery_required::integer"
        if on_postgresql()
        else "id, parent_id, status, delivery_status, delivery_required"
    )
    copy(
        "tsg_tasks",
        f"INSERT INTO tsg_tasks ({KEYED}, {COPIED}) SELECT {keyed}, {COPIED} FROM tsg_tasks_aside ORDER BY pk",
    )
    # A running maximum keeps each chain in its order, even where a time in it was damaged.
    copy(
        "tsg_task_events",
        "INSERT INTO tsg_task_events (task_id, event_kind, from_value, to_value, occurred_at, code) "
        "SELECT CAST(id AS text), kind, from_status, to_status, occurred_at, code FROM ("
        "SELECT tsg_task_events_aside.*, max(occurred_at) OVER (PARTITION BY task_pk ORDER BY number) AS reached "
        "FROM tsg_task_events_aside) AS event JOIN tsg_tasks_aside ON tsg_tasks_aside.pk = task_pk "
        "ORDER BY reached, task_pk, number",
    )
    drop_aside()
    older.create_indexes()
    schema.record(op.get_context(), down_revision)


def on_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def move_aside() -> None:
    """Take the tables' names from them, and those of their indexes, which the new ones need."""
    bind = op.get_bind()
    if not on_postgresql():
        # SQLite would have the tables of others refer to what is about to go. It can be asked not to, but not
        # where foreign keys are on, and they can't be switched inside a transaction.
        if bind.exec_driver_sql("PRAGMA foreign_keys").scalar() and bind.exec_driver_sql(REFERRED_TO).first():
            raise StateConflict("other tables refer to the ledger's: upgrade on an engine, not in a transaction")
        bind.exec_driver_sql("PRAGMA legacy_alter_table = ON")
    elif bind.scalar(sa.text(REFERRED_TO_ON_POSTGRESQL)):
        raise StateConflict("other tables refer to the ledger's, which can't be rebuilt under them")
    for table in ("tsg_task_events", "tsg_tasks"):
        inspector = sa.inspect(bind)
        for index in inspector.get_indexes(table):
            if not index.get("duplicates_constraint"):
                op.drop_index(op.f(str(index["name"])), table)
        if on_postgresql():
            named = [inspector.get_pk_constraint(table), *inspector.get_unique_constraints(table)]
            for constraint in named:
                name = constraint["name"]
                op.execute(f"ALTER TABLE {table} RENAME CONSTRAINT {name} TO {name}_aside")
        op.rename_table(table, f"{table}_aside")
    if not on_postgresql():
        bind.exec_driver_sql("PRAGMA legacy_alter_table = OFF")


def copy(table: str, statement: str) -> None:
    """Move all rows, or none: a join that finds no partner would lose them without a word."""
    bind = op.get_bind()
    # As the driver takes it: a colon in it is a cast, not a parameter.
    bind.exec_driver_sql(statement)
    if bind.scalar(sa.text(f"SELECT (SELECT count(*) FROM {table}) <> (SELECT count(*) FROM {table}_aside)")):
        raise StateConflict("a stored row has no place in the new schema; run doctor with the older release")


def drop_aside() -> None:
    op.drop_table("tsg_task_events_aside")
    op.drop_table("tsg_tasks_aside")


def checks(all_of_them: tuple[tuple[str, str, str], ...]) -> list[sa.CheckConstraint]:
    return [
        # As text with a colon in it, for a cast, would be.
        sa.CheckConstraint(sa.literal_column(postgresql if on_postgresql() else sqlite), name=op.f(name))
        for name, sqlite, postgresql in all_of_them
    ]


def text(length: int) -> sa.types.TypeEngine[str]:
    return sa.String(length).with_variant(sa.Text(), "postgresql")


def create_tables() -> None:
    key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    identity = sa.String(36).with_variant(sa.Uuid(), "postgresql")
    op.create_table(
        "tsg_tasks",
        sa.Column("pk", key, sa.Identity(), nullable=False),
        sa.Column("id", identity, nullable=False),
        sa.Column("parent_id", identity),
        sa.Column("status", text(16), nullable=False),
        sa.Column("delivery_status", text(16), nullable=False),
        sa.Column("delivery_required", sa.Boolean(), nullable=False),
        sa.Column("expects_heartbeat", sa.Boolean(), nullable=False),
        sa.Column("payload_hash", text(64)),
        sa.Column("timeout_seconds", sa.Double()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double()),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double()),
        sa.Column("deadline_at", sa.Double()),
        sa.Column("delivery_updated_at", sa.Double(), nullable=False),
        sa.Column("terminal_code", text(32)),
        sa.Column("delivery_code", text(32)),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_tsg_tasks")),
        sa.UniqueConstraint("id", name=op.f("uq_tsg_tasks_id")),
        sa.ForeignKeyConstraint(["parent_id"], ["tsg_tasks.id"], name=op.f("fk_tsg_tasks_parent_id")),
        *checks(TASK_CHECKS),
    )
    op.create_table(
        "tsg_task_events",
        sa.Column("task_pk", key, nullable=False),
        sa.Column("number", sa.SmallInteger(), nullable=False),
        sa.Column("kind", text(20), nullable=False),
        sa.Column("from_status", text(16)),
        sa.Column("to_status", text(16), nullable=False),
        sa.Column("occurred_at", sa.Double(), nullable=False),
        sa.Column("code", text(32)),
        sa.PrimaryKeyConstraint("task_pk", "number", name=op.f("pk_tsg_task_events")),
        sa.ForeignKeyConstraint(
            ["task_pk"], ["tsg_tasks.pk"], name=op.f("fk_tsg_task_events_task_pk"), ondelete="CASCADE"
        ),
        *checks(EVENT_CHECKS),
        sqlite_with_rowid=False,
    )


def create_indexes() -> None:
    for name, columns, condition in (
        ("ix_tsg_tasks_active", ["status", "updated_at", "deadline_at", "expects_heartbeat"], ACTIVE),
        ("ix_tsg_tasks_delivery_pending", ["ended_at"], PENDING),
        ("ix_tsg_tasks_parent_id", ["parent_id", "created_at"], "parent_id IS NOT NULL"),
    ):
        where = sa.text(condition)
        op.create_index(op.f(name), "tsg_tasks", columns, sqlite_where=where, postgresql_where=where)
