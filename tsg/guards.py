"""The database's own guards: triggers for whatever goes round the models and the ledger.

A CHECK sees one row as it will be; these see what it was. They refuse to leave a terminal state or to skip
a transition, to rewrite what never changes, and to change or delete an event while its task exists
(deleting the task takes its events along). They are generated from the state machines, created by the
migrations, and compared by doctor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tsg.states import DELIVERY_TRANSITIONS, TASK_TRANSITIONS

__all__ = ["FUNCTIONS", "GUARDS", "Guard"]


class Guard(NamedTuple):
    """One trigger: its name, the table it stands on, and the statement that creates it, by database.

    ``None`` where that database needs none.
    """

    name: str
    table: str
    sqlite: str | None
    postgresql: str | None


#: Written by the creation of a task and never again; its pk holds its events.
IMMUTABLE: Final = (
    "pk",
    "id",
    "parent_id",
    "delivery_required",
    "payload_hash",
    "timeout_seconds",
    "created_at",
)
#: Written by one transition and never again, each with what tells that this has been.
WRITTEN_ONCE: Final = (
    ("started_at", "OLD.started_at IS NOT NULL"),
    ("deadline_at", "OLD.started_at IS NOT NULL"),
    ("ended_at", "OLD.ended_at IS NOT NULL"),
    ("terminal_code", "OLD.ended_at IS NOT NULL"),
    ("delivery_updated_at", "OLD.delivery_status IS NOT 'pending'"),
    ("delivery_code", "OLD.delivery_status IS NOT 'pending'"),
)

#: PostgreSQL's triggers call functions. Class 23 makes it an integrity error, as SQLite's ABORT is.
FUNCTIONS: Final = (
    (
        "tsg_refuse",
        (
            "CREATE FUNCTION tsg_refuse() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "BEGIN RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation', MESSAGE = TG_NAME; END $$"
        ),
    ),
    (
        "tsg_refuse_with_task",
        # The table's own schema decides. Where the caller's search_path leads there, a plan is kept; else not. The path
        # may have operators of his own first.
        (
            "CREATE FUNCTION tsg_refuse_with_task() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "DECLARE found boolean; "
            "BEGIN IF pg_catalog.to_regclass('tsg_tasks') OPERATOR(pg_catalog.=) "
            "pg_catalog.to_regclass(pg_catalog.format('%I.tsg_tasks', TG_TABLE_SCHEMA)) "
            "THEN found := EXISTS (SELECT 1 FROM tsg_tasks WHERE pk OPERATOR(pg_catalog.=) OLD.task_pk); "
            "ELSE EXECUTE pg_catalog.format('SELECT EXISTS "
            "(SELECT 1 FROM %I.tsg_tasks WHERE pk OPERATOR(pg_catalog.=) $1)', TG_TABLE_SCHEMA) "
            "INTO found USING OLD.task_pk; END IF; "
            "IF found THEN RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation', MESSAGE = TG_NAME; "
            "END IF; RETURN OLD; END $$"
        ),
    ),
    (
        "tsg_refuse_with_any_task",
        (
            "CREATE FUNCTION tsg_refuse_with_any_task() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "DECLARE found boolean; BEGIN "
            "EXECUTE pg_catalog.format('SELECT EXISTS (SELECT 1 FROM %I.tsg_tasks)', TG_TABLE_SCHEMA) INTO found; "
            "IF found THEN RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation', MESSAGE = TG_NAME; "
            "END IF; RETURN NULL; END $$"
        ),
    ),
)


def _legal(column: str, transitions: Mapping[Any, tuple[Any, ...]]) -> str:
    # Not an IN: for one of three words or more SQLite builds an index, at every row.
    return " OR ".join(
        f"(OLD.{column} = '{source.value}' AND ({' OR '.join(f'NEW.{column} = {end.value!r}' for end in ends)}))"
        for source, ends in transitions.items()
        if ends
    )


def _guard(name: str, table: str, occasion: str, forbidden: str) -> Guard:
    """A trigger that refuses `occasion` where `forbidden`, written with SQLite's ``IS NOT``, holds."""
    elsewhere = forbidden.replace(" IS NOT NULL", " NOTNULL").replace(" IS NOT ", " IS DISTINCT FROM ")
    return Guard(
        name,
        table,
        f"CREATE TRIGGER {name} BEFORE {occasion} ON {table} FOR EACH ROW WHEN {forbidden} "
        f"BEGIN SELECT RAISE(ABORT, '{name}'); END",
        f"CREATE TRIGGER {name} BEFORE {occasion} ON {table} FOR EACH ROW "
        f"WHEN ({elsewhere}) EXECUTE FUNCTION tsg_refuse()",
    )


def _transition(name: str, column: str, transitions: Mapping[Any, tuple[Any, ...]]) -> Guard:
    return _guard(
        name,
        "tsg_tasks",
        f"UPDATE OF {column}",
        f"OLD.{column} IS NOT NEW.{column} AND NOT ({_legal(column, transitions)})",
    )


def _on_sqlite(name: str, table: str, occasion: str, body: str) -> Guard:
    return Guard(name, table, f"CREATE TRIGGER {name} {occasion} ON {table} FOR EACH ROW {body}", None)


GUARDS: Final = (
    _transition("tsg_tasks_status_guard", "status", TASK_TRANSITIONS),
    _transition("tsg_tasks_delivery_guard", "delivery_status", DELIVERY_TRANSITIONS),
    _guard(
        "tsg_tasks_immutable_guard",
        "tsg_tasks",
        f"UPDATE OF {', '.join(IMMUTABLE)}",
        " OR ".join(f"OLD.{column} IS NOT NEW.{column}" for column in IMMUTABLE),
    ),
    _guard(
        "tsg_tasks_written_once_guard",
        "tsg_tasks",
        f"UPDATE OF {', '.join(column for column, _ in WRITTEN_ONCE)}",
        " OR ".join(f"({once} AND OLD.{column} IS NOT NEW.{column})" for column, once in WRITTEN_ONCE),
    ),
    Guard(
        "tsg_task_events_update_guard",
        "tsg_task_events",
        "CREATE TRIGGER tsg_task_events_update_guard BEFORE UPDATE ON tsg_task_events FOR EACH ROW WHEN 1 "
        "BEGIN SELECT RAISE(ABORT, 'tsg_task_events_update_guard'); END",
        "CREATE TRIGGER tsg_task_events_update_guard BEFORE UPDATE ON tsg_task_events FOR EACH ROW "
        "EXECUTE FUNCTION tsg_refuse()",
    ),
    Guard(
        "tsg_task_events_delete_guard",
        "tsg_task_events",
        "CREATE TRIGGER tsg_task_events_delete_guard BEFORE DELETE ON tsg_task_events FOR EACH ROW "
        "WHEN EXISTS (SELECT 1 FROM tsg_tasks WHERE pk = OLD.task_pk) "
        "BEGIN SELECT RAISE(ABORT, 'tsg_task_events_delete_guard'); END",
        "CREATE TRIGGER tsg_task_events_delete_guard BEFORE DELETE ON tsg_task_events FOR EACH ROW "
        "EXECUTE FUNCTION tsg_refuse_with_task()",
    ),
    # After it, when both tables may have been emptied at once.
    Guard(
        "tsg_task_events_truncate_guard",
        "tsg_task_events",
        None,
        "CREATE TRIGGER tsg_task_events_truncate_guard AFTER TRUNCATE ON tsg_task_events FOR EACH STATEMENT "
        "EXECUTE FUNCTION tsg_refuse_with_any_task()",
    ),
    # SQLite's REPLACE deletes without a word to any trigger; and where foreign keys are off, as they are by
    # default there, nothing would follow a task that is deleted, and its key would be another's.
    _on_sqlite(
        "tsg_tasks_replace_guard",
        "tsg_tasks",
        "BEFORE INSERT",
        "WHEN EXISTS (SELECT 1 FROM tsg_tasks WHERE pk = NEW.pk OR id = NEW.id) "
        "BEGIN SELECT RAISE(ABORT, 'tsg_tasks_replace_guard'); END",
    ),
    _on_sqlite(
        "tsg_task_events_replace_guard",
        "tsg_task_events",
        "BEFORE INSERT",
        "WHEN EXISTS (SELECT 1 FROM tsg_task_events WHERE task_pk = NEW.task_pk AND number = NEW.number) "
        "BEGIN SELECT RAISE(ABORT, 'tsg_task_events_replace_guard'); END",
    ),
    _on_sqlite(
        "tsg_tasks_events_follow",
        "tsg_tasks",
        "AFTER DELETE",
        "BEGIN DELETE FROM tsg_task_events WHERE task_pk = OLD.pk; END",
    ),
)
