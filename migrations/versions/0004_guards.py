"""Triggers for whatever goes round the models: no way out of a terminal state, no history rewritten.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tsg import schema

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# Of PostgreSQL; the triggers there call them.
FUNCTIONS = (
    (
        "tsg_refuse",
        (
            "CREATE FUNCTION tsg_refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION USING "
            "ERRCODE = 'integrity_constraint_violation', MESSAGE = TG_NAME; END $$"
        ),
    ),
    (
        "tsg_refuse_with_task",
        (
            "CREATE FUNCTION tsg_refuse_with_task() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE found "
            "boolean; BEGIN IF pg_catalog.to_regclass('tsg_tasks') OPERATOR(pg_catalog.=) "
            "pg_catalog.to_regclass(pg_catalog.format('%I.tsg_tasks', TG_TABLE_SCHEMA)) THEN found := EXISTS "
            "(SELECT 1 FROM tsg_tasks WHERE pk OPERATOR(pg_catalog.=) OLD.task_pk); ELSE EXECUTE "
            "pg_catalog.format('SELECT EXISTS (SELECT 1 FROM %I.tsg_tasks WHERE pk OPERATOR(pg_catalog.=) "
            "$1)', TG_TABLE_SCHEMA) INTO found USING OLD.task_pk; END IF; IF found THEN RAISE EXCEPTION "
            "USING ERRCODE = 'integrity_constraint_violation', MESSAGE = TG_NAME; END IF; RETURN OLD; END $$"
        ),
    ),
    (
        "tsg_refuse_with_any_task",
        (
            "CREATE FUNCTION tsg_refuse_with_any_task() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE found "
            "boolean; BEGIN EXECUTE pg_catalog.format('SELECT EXISTS (SELECT 1 FROM %I.tsg_tasks)', "
            "TG_TABLE_SCHEMA) INTO found; IF found THEN RAISE EXCEPTION USING ERRCODE = "
            "'integrity_constraint_violation', MESSAGE = TG_NAME; END IF; RETURN NULL; END $$"
        ),
    ),
)

# Each with its table, and its text on SQLite and on PostgreSQL.
GUARDS = (
    (
        "tsg_tasks_status_guard",
        "tsg_tasks",
        (
            "CREATE TRIGGER tsg_tasks_status_guard BEFORE UPDATE OF status ON tsg_tasks FOR EACH ROW WHEN "
            "OLD.status IS NOT NEW.status AND NOT ((OLD.status = 'queued' AND (NEW.status = 'running' OR "
            "NEW.status = 'succeeded' OR NEW.status = 'failed' OR NEW.status = 'timed_out' OR NEW.status = "
            "'cancelled')) OR (OLD.status = 'running' AND (NEW.status = 'succeeded' OR NEW.status = 'failed' "
            "OR NEW.status = 'timed_out' OR NEW.status = 'cancelled'))) BEGIN SELECT RAISE(ABORT, "
            "'tsg_tasks_status_guard'); END"
        ),
        (
            "CREATE TRIGGER tsg_tasks_status_guard BEFORE UPDATE OF status ON tsg_tasks FOR EACH ROW WHEN "
            "(OLD.status IS DISTINCT FROM NEW.status AND NOT ((OLD.status = 'queued' AND (NEW.status = "
            "'running' OR NEW.status = 'succeeded' OR NEW.status = 'failed' OR NEW.status = 'timed_out' OR "
            "NEW.status = 'cancelled')) OR (OLD.status = 'running' AND (NEW.status = 'succeeded' OR "
            "NEW.status = 'failed' OR NEW.status = 'timed_out' OR NEW.status = 'cancelled')))) EXECUTE "
            "FUNCTION tsg_refuse()"
        ),
    ),
    (
        "tsg_tasks_delivery_guard",
        "tsg_tasks",
        (
            "CREATE TRIGGER tsg_tasks_delivery_guard BEFORE UPDATE OF delivery_status ON tsg_tasks FOR EACH "
            "ROW WHEN OLD.delivery_status IS NOT NEW.delivery_status AND NOT ((OLD.delivery_status = "
            "'pending' AND (NEW.delivery_status = 'delivered' OR NEW.delivery_status = 'failed' OR "
            "NEW.delivery_status = 'not_applicable'))) BEGIN SELECT RAISE(ABORT, "
            "'tsg_tasks_delivery_guard'); END"
        ),
        (
            "CREATE TRIGGER tsg_tasks_delivery_guard BEFORE UPDATE OF delivery_status ON tsg_tasks FOR EACH "
            "ROW WHEN (OLD.delivery_status IS DISTINCT FROM NEW.delivery_status AND NOT "
            "((OLD.delivery_status = 'pending' AND (NEW.delivery_status = 'delivered' OR NEW.delivery_status "
            "= 'failed' OR NEW.delivery_status = 'not_applicable')))) EXECUTE FUNCTION tsg_refuse()"
        ),
    ),
    (
        "tsg_tasks_immutable_guard",
        "tsg_tasks",
        (
            "CREATE TRIGGER tsg_tasks_immutable_guard BEFORE UPDATE OF pk, id, parent_id, delivery_required, "
            "payload_hash, timeout_seconds, created_at ON tsg_tasks FOR EACH ROW WHEN OLD.pk IS NOT NEW.pk "
            "OR OLD.id IS NOT NEW.id OR OLD.parent_id IS NOT NEW.parent_id OR OLD.delivery_required IS NOT "
            "NEW.delivery_required OR OLD.payload_hash IS NOT NEW.payload_hash OR OLD.timeout_seconds IS NOT "
            "NEW.timeout_seconds OR OLD.created_at IS NOT NEW.created_at BEGIN SELECT RAISE(ABORT, "
            "'tsg_tasks_immutable_guard'); END"
        ),
        (
            "CREATE TRIGGER tsg_tasks_immutable_guard BEFORE UPDATE OF pk, id, parent_id, delivery_required, "
            "payload_hash, timeout_seconds, created_at ON tsg_tasks FOR EACH ROW WHEN (OLD.pk IS DISTINCT "
            "FROM NEW.pk OR OLD.id IS DISTINCT FROM NEW.id OR OLD.parent_id IS DISTINCT FROM NEW.parent_id "
            "OR OLD.delivery_required IS DISTINCT FROM NEW.delivery_required OR OLD.payload_hash IS DISTINCT "
            "FROM NEW.payload_hash OR OLD.timeout_seconds IS DISTINCT FROM NEW.timeout_seconds OR "
            "OLD.created_at IS DISTINCT FROM NEW.created_at) EXECUTE FUNCTION tsg_refuse()"
        ),
    ),
    (
        "tsg_tasks_written_once_guard",
        "tsg_tasks",
        (
            "CREATE TRIGGER tsg_tasks_written_once_guard BEFORE UPDATE OF started_at, deadline_at, ended_at, "
            "terminal_code, delivery_updated_at, delivery_code ON tsg_tasks FOR EACH ROW WHEN "
            "(OLD.started_at IS NOT NULL AND OLD.started_at IS NOT NEW.started_at) OR (OLD.started_at IS NOT "
            "NULL AND OLD.deadline_at IS NOT NEW.deadline_at) OR (OLD.ended_at IS NOT NULL AND OLD.ended_at "
            "IS NOT NEW.ended_at) OR (OLD.ended_at IS NOT NULL AND OLD.terminal_code IS NOT "
            "NEW.terminal_code) OR (OLD.delivery_status IS NOT 'pending' AND OLD.delivery_updated_at IS NOT "
            "NEW.delivery_updated_at) OR (OLD.delivery_status IS NOT 'pending' AND OLD.delivery_code IS NOT "
            "NEW.delivery_code) BEGIN SELECT RAISE(ABORT, 'tsg_tasks_written_once_guard'); END"
        ),
        (
            "CREATE TRIGGER tsg_tasks_written_once_guard BEFORE UPDATE OF started_at, deadline_at, ended_at, "
            "terminal_code, delivery_updated_at, delivery_code ON tsg_tasks FOR EACH ROW WHEN "
            "((OLD.started_at NOTNULL AND OLD.started_at IS DISTINCT FROM NEW.started_at) OR (OLD.started_at "
            "NOTNULL AND OLD.deadline_at IS DISTINCT FROM NEW.deadline_at) OR (OLD.ended_at NOTNULL AND "
            "OLD.ended_at IS DISTINCT FROM NEW.ended_at) OR (OLD.ended_at NOTNULL AND OLD.terminal_code IS "
            "DISTINCT FROM NEW.terminal_code) OR (OLD.delivery_status IS DISTINCT FROM 'pending' AND "
            "OLD.delivery_updated_at IS DISTINCT FROM NEW.delivery_updated_at) OR (OLD.delivery_status IS "
            "DISTINCT FROM 'pending' AND OLD.delivery_code IS DISTINCT FROM NEW.delivery_code)) EXECUTE "
            "FUNCTION tsg_refuse()"
        ),
    ),
    (
        "tsg_task_events_update_guard",
        "tsg_task_events",
        (
            "CREATE TRIGGER tsg_task_events_update_guard BEFORE UPDATE ON tsg_task_events FOR EACH ROW WHEN "
            "1 BEGIN SELECT RAISE(ABORT, 'tsg_task_events_update_guard'); END"
        ),
        (
            "CREATE TRIGGER tsg_task_events_update_guard BEFORE UPDATE ON tsg_task_events FOR EACH ROW "
            "EXECUTE FUNCTION tsg_refuse()"
        ),
    ),
    (
        "tsg_task_events_delete_guard",
        "tsg_task_events",
        (
            "CREATE TRIGGER tsg_task_events_delete_guard BEFORE DELETE ON tsg_task_events FOR EACH ROW WHEN "
            "EXISTS (SELECT 1 FROM tsg_tasks WHERE pk = OLD.task_pk) BEGIN SELECT RAISE(ABORT, "
            "'tsg_task_events_delete_guard'); END"
        ),
        (
            "CREATE TRIGGER tsg_task_events_delete_guard BEFORE DELETE ON tsg_task_events FOR EACH ROW "
            "EXECUTE FUNCTION tsg_refuse_with_task()"
        ),
    ),
    (
        "tsg_task_events_truncate_guard",
        "tsg_task_events",
        None,
        (
            "CREATE TRIGGER tsg_task_events_truncate_guard AFTER TRUNCATE ON tsg_task_events FOR EACH "
            "STATEMENT EXECUTE FUNCTION tsg_refuse_with_any_task()"
        ),
    ),
    (
        "tsg_tasks_replace_guard",
        "tsg_tasks",
        (
            "CREATE TRIGGER tsg_tasks_replace_guard BEFORE INSERT ON tsg_tasks FOR EACH ROW WHEN EXISTS "
            "(SELECT 1 FROM tsg_tasks WHERE pk = NEW.pk OR id = NEW.id) BEGIN SELECT RAISE(ABORT, "
            "'tsg_tasks_replace_guard'); END"
        ),
        None,
    ),
    (
        "tsg_task_events_replace_guard",
        "tsg_task_events",
        (
            "CREATE TRIGGER tsg_task_events_replace_guard BEFORE INSERT ON tsg_task_events FOR EACH ROW WHEN "
            "EXISTS (SELECT 1 FROM tsg_task_events WHERE task_pk = NEW.task_pk AND number = NEW.number) "
            "BEGIN SELECT RAISE(ABORT, 'tsg_task_events_replace_guard'); END"
        ),
        None,
    ),
    (
        "tsg_tasks_events_follow",
        "tsg_tasks",
        (
            "CREATE TRIGGER tsg_tasks_events_follow AFTER DELETE ON tsg_tasks FOR EACH ROW BEGIN DELETE FROM "
            "tsg_task_events WHERE task_pk = OLD.pk; END"
        ),
        None,
    ),
)


def upgrade() -> None:
    bind = op.get_bind()
    on_postgresql = bind.dialect.name == "postgresql"
    if on_postgresql:
        for _, function in FUNCTIONS:
            bind.execute(sa.text(function))
    for _, _, sqlite, postgresql in GUARDS:
        statement = postgresql if on_postgresql else sqlite
        if statement is not None:
            bind.exec_driver_sql(statement)
    schema.record(op.get_context(), revision)


def downgrade() -> None:
    bind = op.get_bind()
    on_postgresql = bind.dialect.name == "postgresql"
    for name, table, sqlite, postgresql in reversed(GUARDS):
        if not on_postgresql and sqlite is not None:
            op.execute(f"DROP TRIGGER {name}")
        elif on_postgresql and postgresql is not None:
            op.execute(f"DROP TRIGGER {name} ON {table}")
    if on_postgresql:
        for name, _ in reversed(FUNCTIONS):
            op.execute(f"DROP FUNCTION {name}()")
    schema.record(op.get_context(), down_revision)
