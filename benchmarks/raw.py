"""The same work as plain SQL written by hand on our tables: what a database can't do without.

Apply is a count, the events and the update; doctor is one scan with every rule of a row and, by a correlated
subquery, its exact chain of events, and the counts. On PostgreSQL the chains are joined, a statement for themselves:
its workers share neither a subquery nor what stands beside one. Nothing of the package is asked here.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import psycopg

from benchmarks.sample import NOW

GRACE = 600.0

_TIMES = {"now": NOW, "before": NOW - GRACE}
_CODE = "CASE WHEN deadline_at <= {now} THEN 'deadline_exceeded' ELSE 'restart_stale' END"
_STALE = (
    "status IN ('queued', 'running') AND status = 'running' "
    "AND (deadline_at <= {now} OR (expects_heartbeat IS TRUE AND updated_at <= {before}))"
)
_COUNT = f"SELECT count(*), count(*) FILTER (WHERE delivery_required) FROM tsg_tasks WHERE {_STALE}"
_EVENT = f"pk, 2, 'task_transition', 'running', 'timed_out', {{now}}, {_CODE}"
_INTO = "INSERT INTO tsg_task_events (task_pk, number, kind, from_status, to_status, occurred_at, code)"
_UPDATE = (
    "UPDATE tsg_tasks SET status = 'timed_out', updated_at = {now}, ended_at = {now}, "
    f"terminal_code = {_CODE}, version = version + 1 WHERE {_STALE}"
)


def open_sqlite(path: Any, *, bare: bool = False) -> sqlite3.Connection:
    """A connection as the package has it; with `bare`, CHECKs are ignored and the triggers are gone."""
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("foreign_keys = ON", "synchronous = NORMAL"):
        connection.execute(f"PRAGMA {pragma}")
    if bare:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {name}")
    return connection


def apply_on_sqlite(connection: sqlite3.Connection) -> int:
    """Time out what is stale, in one transaction; how many."""

    def run(statement: str) -> sqlite3.Cursor:
        return connection.execute(statement.format(now=":now", before=":before"), _TIMES)

    connection.execute("BEGIN IMMEDIATE")
    found: int = run(_COUNT).fetchone()[0]
    written = run(f"{_INTO} SELECT {_EVENT} FROM tsg_tasks WHERE {_STALE} ORDER BY pk + 0").rowcount
    changed = run(_UPDATE).rowcount
    assert found == written == changed
    connection.execute("COMMIT")
    return found


def apply_on_postgresql(connection: psycopg.Connection) -> int:
    """The same; the count, and one statement for both writes."""
    named = {"now": "%(now)s::float8", "before": "%(before)s::float8"}
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        row = connection.execute(_COUNT.format(**named).encode(), _TIMES).fetchone()
        both = f"WITH changed AS ({_UPDATE} RETURNING {_EVENT}) {_INTO} SELECT * FROM changed"
        written = connection.execute(both.format(**named).encode(), _TIMES).rowcount
        assert row is not None
        assert row[0] == written
    return written


def doctor_on_sqlite(connection: sqlite3.Connection) -> bool:
    """Whether nothing is wrong."""

    def one(statement: str) -> tuple[Any, ...]:
        row: tuple[Any, ...] = connection.execute(statement).fetchone()
        return row

    # The scan holds every row against every rule; its CHECKs need not be looked at once more.
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute("BEGIN")
    sound = one("PRAGMA quick_check") == one("PRAGMA integrity_check('tsg_tasks')") == ("ok",)
    sound = sound and not connection.execute("PRAGMA foreign_key_check").fetchall()
    *_, state, time, chain = one(_SCAN_SQLITE)
    events, orphans = one(_EVENTS)[0], one(_ORPHANS)[0]
    connection.execute("ROLLBACK")
    connection.execute("PRAGMA ignore_check_constraints = OFF")
    return bool(sound and events and not (orphans or state or time or chain))


def doctor_on_postgresql(connection: psycopg.Connection) -> bool:
    """The same, but for the file."""

    def one(statement: str) -> tuple[Any, ...]:
        row = connection.execute(statement.encode()).fetchone()
        assert row is not None
        return row

    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        *_, state, time = one(_ROWS_POSTGRESQL)
        younger, chain = one(_YOUNGER_POSTGRESQL)[0], one(_CHAINS_POSTGRESQL)[0]
        events, orphans, strays = one(_EVENTS)[0], one(_ORPHANS)[0], one(_STRAYS)[0]
    return bool(events and not (orphans or strays or state or time or younger or chain))


_EVENTS = "SELECT count(*) FROM tsg_task_events"
_ORPHANS = (
    "SELECT count(*) FROM tsg_tasks AS t WHERE parent_id IS NOT NULL "
    "AND NOT EXISTS (SELECT 1 FROM tsg_tasks AS p WHERE p.id = t.parent_id)"
)
_STRAYS = (
    "SELECT count(*) FROM tsg_task_events AS e WHERE NOT EXISTS (SELECT 1 FROM tsg_tasks AS t WHERE t.pk = e.task_pk)"
)

_STATES = """
    CASE status
        WHEN 'queued' THEN started_at IS NULL AND ended_at IS NULL AND terminal_code IS NULL
        WHEN 'running' THEN started_at IS NOT NULL AND ended_at IS NULL AND terminal_code IS NULL
        WHEN 'succeeded' THEN ended_at IS NOT NULL
            AND (terminal_code IS NULL OR terminal_code = 'completed' OR terminal_code = 'worker_completed')
        WHEN 'failed' THEN ended_at IS NOT NULL AND (terminal_code IS NULL OR terminal_code = 'worker_failed')
        WHEN 'timed_out' THEN ended_at IS NOT NULL
            AND (terminal_code IS NULL OR terminal_code = 'restart_stale' OR terminal_code = 'deadline_exceeded')
        WHEN 'cancelled' THEN ended_at IS NOT NULL AND (terminal_code IS NULL OR terminal_code = 'caller_cancelled')
    END
    AND CASE delivery_status
        WHEN 'pending' THEN delivery_code IS NULL
        WHEN 'delivered' THEN ended_at IS NOT NULL AND delivery_required
            AND (delivery_code IS NULL OR delivery_code = 'transport_acknowledged')
        WHEN 'failed' THEN ended_at IS NOT NULL AND delivery_required AND (delivery_code IS NULL
            OR delivery_code = 'transport_failed' OR delivery_code = 'delivery_grace_expired')
        WHEN 'not_applicable' THEN ended_at IS NOT NULL AND NOT delivery_required
            AND (delivery_code IS NULL OR delivery_code = 'internal_task')
    END
    AND (expects_heartbeat OR timeout_seconds IS NOT NULL)
    AND (parent_id IS NULL OR parent_id <> id)
    AND version >= {steps} AND (version = {steps} OR (expects_heartbeat AND started_at IS NOT NULL))
"""
_ORDER = """
    (timeout_seconds IS NULL OR timeout_seconds >= 0)
    AND (started_at IS NULL OR created_at <= started_at)
    AND (ended_at IS NULL OR coalesce(started_at, created_at) <= ended_at)
    AND CASE WHEN ended_at IS NOT NULL THEN updated_at = ended_at WHEN started_at IS NULL THEN updated_at = created_at
        WHEN version = 1 THEN updated_at = started_at ELSE updated_at >= started_at END
    AND CASE WHEN started_at IS NULL OR timeout_seconds IS NULL THEN deadline_at IS NULL
        ELSE deadline_at = started_at + timeout_seconds END
    AND CASE WHEN delivery_status = 'pending' THEN delivery_updated_at = created_at
        ELSE delivery_updated_at >= ended_at END
"""
_YOUNGER = "SELECT 1 FROM tsg_tasks AS p WHERE p.id = t.parent_id AND p.created_at > t.created_at"
_STEPS = (
    "(CASE WHEN started_at IS NULL THEN 0 ELSE 1 END + CASE WHEN status IN ('queued', 'running') THEN 0 ELSE 1 END "
    "+ CASE WHEN delivery_status = 'pending' THEN 0 ELSE 1 END)"
)
# A right event counts 1, a wrong one so much that the sum can't be the number of steps and the creation.
_CHAIN = """
    sum(CASE WHEN CASE
        WHEN e.number = 0 THEN e.kind = 'created' AND e.from_status IS NULL AND e.to_status = 'queued'
            AND e.code = 'created' AND e.occurred_at = t.created_at
        WHEN e.number = 1 AND t.started_at IS NOT NULL THEN e.kind = 'task_transition' AND e.from_status = 'queued'
            AND e.to_status = 'running' AND e.code = 'started' AND e.occurred_at = t.started_at
        WHEN e.number = CASE WHEN t.started_at IS NULL THEN 1 ELSE 2 END THEN e.kind = 'task_transition'
            AND e.from_status = CASE WHEN t.started_at IS NULL THEN 'queued' ELSE 'running' END
            AND e.to_status = t.status AND e.occurred_at = t.ended_at AND {same_end}
        WHEN e.number = CASE WHEN t.started_at IS NULL THEN 2 ELSE 3 END THEN e.kind = 'delivery_transition'
            AND e.from_status = 'pending' AND e.to_status = t.delivery_status
            AND e.occurred_at = t.delivery_updated_at AND {same_delivery}
    END THEN 1 ELSE 1000 END)
"""


def _rows(types: str, times: str) -> str:
    """What is counted in one pass over the tasks, in the words of one database; the faults last."""
    words = {
        "status": ("queued", "running", "succeeded", "failed", "timed_out", "cancelled"),
        "delivery_status": ("pending", "delivered", "failed", "not_applicable"),
    }
    counts = ", ".join(
        f"count(*) FILTER (WHERE {column} = '{word}')" for column, known in words.items() for word in known
    )
    return (
        f"SELECT count(*), {counts}, "
        f"count(*) FILTER (WHERE ({types} AND {_STATES.format(steps=_STEPS)}) IS NOT TRUE), "
        f"count(*) FILTER (WHERE ({times} AND {_ORDER}) IS NOT TRUE"
    )


def _chain(same: str) -> str:
    return _CHAIN.format(
        same_end=same.format("e.code", "t.terminal_code"), same_delivery=same.format("e.code", "t.delivery_code")
    )


def _all_finite(finite: str) -> str:
    always, maybe = ("created_at", "updated_at", "delivery_updated_at"), ("started_at", "ended_at", "deadline_at")
    optional = (f"({column} IS NULL OR {finite.format(column)})" for column in (*maybe, "timeout_seconds"))
    return " AND ".join((*map(finite.format, always), *optional))


_UUID_GLOB = "-".join("[0-9a-f]" * length for length in (8, 4, 4, 4, 12))
_UUID = f"typeof({{0}}) = 'text' AND length(CAST({{0}} AS BLOB)) = 36 AND {{0}} GLOB '{_UUID_GLOB}'"
_SQLITE_FINITE = "(typeof({0}) = 'real' AND abs({0}) <= 1.7976931348623157e308)"
_POSTGRESQL_FINITE = "({0} > '-Infinity' AND {0} < 'Infinity')"
_SQLITE_TYPES = (
    f"{_UUID.format('id')} AND (parent_id IS NULL OR ({_UUID.format('parent_id')})) AND typeof(version) = 'integer' "
    "AND typeof(delivery_required) = 'integer' AND delivery_required IN (0, 1) "
    "AND typeof(expects_heartbeat) = 'integer' AND expects_heartbeat IN (0, 1) "
    "AND (payload_hash IS NULL OR (typeof(payload_hash) = 'text' AND length(payload_hash) = 64 "
    "AND length(CAST(payload_hash AS BLOB)) = 64 AND payload_hash NOT GLOB '*[^0-9a-f]*'))"
)
_POSTGRESQL_TYPES = "(payload_hash IS NULL OR (length(payload_hash) = 64 AND payload_hash !~ '[^0-9a-f]'))"

_SCAN_SQLITE = (
    f"{_rows(_SQLITE_TYPES, _all_finite(_SQLITE_FINITE))} OR (parent_id IS NOT NULL AND EXISTS ({_YOUNGER}))), "
    f"count(*) FILTER (WHERE (SELECT {_chain('{0} IS {1}')} FROM tsg_task_events AS e WHERE e.task_pk = t.pk) "
    f"IS NOT 1 + {_STEPS}) FROM tsg_tasks AS t"
)
_ROWS_POSTGRESQL = f"{_rows(_POSTGRESQL_TYPES, _all_finite(_POSTGRESQL_FINITE))}) FROM tsg_tasks AS t"
_YOUNGER_POSTGRESQL = (
    "SELECT count(*) FROM tsg_tasks AS t JOIN tsg_tasks AS p ON p.id = t.parent_id "
    "WHERE t.parent_id IS NOT NULL AND p.created_at > t.created_at"
)
_CHAINS_POSTGRESQL = (
    "SELECT count(*) FROM (SELECT t.pk FROM tsg_tasks AS t LEFT JOIN tsg_task_events AS e ON e.task_pk = t.pk "
    f"GROUP BY t.pk HAVING {_chain('{0} IS NOT DISTINCT FROM {1}')} IS DISTINCT FROM 1 + {_STEPS}) AS wrong"
)
