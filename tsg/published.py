"""A file written by the published package ``task-state-guard``: how it is known, and how its rows move over.

Its tables (``tasks``, ``task_events``, ``schema_meta``) are none of ours until somebody asks to adopt them,
for that package can't use the file afterwards.
"""

from __future__ import annotations

import hashlib
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tsg.errors import StateConflict

__all__ = ["is_present", "move", "version"]

_TABLES: Final = ("tasks", "task_events", "schema_meta")
#: Of the statements in its ``sqlite_master``, white space folded; both versions have the same.
_STATEMENTS_SHA256: Final = "1bc9541ee2f4929d52a910d9377b01ffe688e68898af8988b5753ae70de2923e"
#: What its ``schema_meta`` holds, by version.
_META: Final = {
    1: {("schema_version", "1")},
    2: {
        ("schema_version", "2"),
        ("schema_fingerprint", "50ae209ec97afb360e142cfae85767f575acc2a065103f5b642bfd0c141e08f6"),
    },
}
_TASK_COLUMNS: Final = (
    "id, parent_id, status, delivery_status, delivery_required, payload_hash, timeout_seconds, created_at, "
    "started_at, updated_at, ended_at, deadline_at, delivery_updated_at, terminal_code, delivery_code, version"
)
_EVENT_COLUMNS: Final = "sequence, task_id, event_kind, from_value, to_value, occurred_at, code"


def is_present(connection: Connection) -> bool:
    """Whether the published package's tables are there, in whatever state."""
    if connection.dialect.name != "sqlite":
        return False
    tables = connection.execute(sa.text("SELECT name FROM sqlite_master WHERE type = 'table'")).scalars()
    # Three common names could be an application's own; with this shape of the third they are not.
    return set(_TABLES) <= set(tables) and {"key", "value"} == {
        row[1] for row in connection.execute(sa.text("PRAGMA table_info(schema_meta)"))
    }


def version(connection: Connection) -> int | None:
    """The version that its ``schema_meta`` names; ``None`` where that is none of the published ones."""
    named = connection.scalar(sa.text("SELECT value FROM schema_meta WHERE key = 'schema_version'"))
    return {"1": 1, "2": 2}.get(named) if isinstance(named, str) else None


def move(connection: Connection) -> None:
    """Move every row into the tables of revision 0001, which are empty, and drop the published ones.

    Raises:
        StateConflict: it is not exactly the published schema, or a row does not fit.
    """
    if not _is_exact(connection):
        raise StateConflict("the file is like one of the published package, but not exactly")
    if connection.scalar(sa.text("SELECT count(*) FROM task_events WHERE task_id NOT IN (SELECT id FROM tasks)")):
        raise StateConflict("the file has events of tasks that are not there")
    connection.execute(
        sa.text(f"INSERT INTO tsg_tasks ({_TASK_COLUMNS}) SELECT {_TASK_COLUMNS} FROM tasks ORDER BY rowid")
    )
    connection.execute(
        sa.text(f"INSERT INTO tsg_task_events ({_EVENT_COLUMNS}) SELECT {_EVENT_COLUMNS} FROM task_events")
    )
    for table in ("task_events", "tasks", "schema_meta"):
        connection.execute(sa.text(f"DROP TABLE {table}"))


def _is_exact(connection: Connection) -> bool:
    statements = connection.execute(
        sa.text(
            "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL "
            "AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' "
            "AND tbl_name NOT IN ('tsg_tasks', 'tsg_task_events', 'tsg_alembic_version')"
        )
    )
    found = sorted(" ".join(" ".join(row).split()) for row in statements)
    digest = hashlib.sha256("\n".join(found).encode("utf-8", "surrogatepass")).hexdigest()
    meta = {tuple(row) for row in connection.execute(sa.text("SELECT key, value FROM schema_meta"))}
    return digest == _STATEMENTS_SHA256 and meta == _META.get(version(connection) or 0)
