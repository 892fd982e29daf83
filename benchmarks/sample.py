"""Ledgers of any size, made by set SQL: a file of the published package, one of ours, ours on PostgreSQL.

All three hold the same tasks and events, in the order in which they would have come to be: a task a second, each
of whose transitions takes a second. A file is built without CHECKs, triggers and secondary indexes, which are put
back at the end; that every doctor finds it healthy is part of each run that asks one.
"""

from __future__ import annotations

import sqlite3
from enum import Enum
from pathlib import Path

import psycopg
import task_state_guard  # type: ignore[import-untyped]

import tsg

#: Seconds since the epoch: when the sample is looked at, and when its first task was made.
NOW = 2_000_000_000.0
_START = 1_900_000_000.0

#: How many are active in a SPARSE sample.
ACTIVE = 1000


class Layout(Enum):
    """Which tasks there are.

    MIXED: 40 % stale running, 10 % fresh running, 10 % queued, 40 % closed and delivered.
    SPARSE: 1,000 running, half of them stale, spread over a history of that many closed and delivered ones.
    FINISHED: all closed and delivered.
    """

    MIXED = "mixed"
    SPARSE = "sparse"
    FINISHED = "finished"


_STALE, _FRESH, _QUEUED, _CLOSED = range(4)

# All that is known of the task number n, by what it is now.
_STATUS = f"CASE kind WHEN {_CLOSED} THEN 'succeeded' WHEN {_QUEUED} THEN 'queued' ELSE 'running' END"
_CREATED = f"{_START} + n"
_TASK = {
    "status": _STATUS,
    "delivery_status": f"CASE kind WHEN {_CLOSED} THEN 'delivered' ELSE 'pending' END",
    "created_at": _CREATED,
    "started_at": f"CASE WHEN kind <> {_QUEUED} THEN {_CREATED} + 1 END",
    "updated_at": (
        f"CASE kind WHEN {_STALE} THEN {_CREATED} + 1 WHEN {_FRESH} THEN {NOW - 1} "
        f"WHEN {_QUEUED} THEN {_CREATED} ELSE {_CREATED} + 2 END"
    ),
    "ended_at": f"CASE kind WHEN {_CLOSED} THEN {_CREATED} + 2 END",
    "delivery_updated_at": f"CASE kind WHEN {_CLOSED} THEN {_CREATED} + 3 ELSE {_CREATED} END",
    "terminal_code": f"CASE kind WHEN {_CLOSED} THEN 'completed' END",
    "delivery_code": f"CASE kind WHEN {_CLOSED} THEN 'transport_acknowledged' END",
    "version": f"CASE kind WHEN {_STALE} THEN 1 WHEN {_FRESH} THEN 2 WHEN {_QUEUED} THEN 0 ELSE 3 END",
}
# And of its event number s: kind, from, to, time, reason.
_EVENT = (
    "CASE s WHEN 0 THEN 'created' WHEN 3 THEN 'delivery_transition' ELSE 'task_transition' END, "
    "CASE s WHEN 0 THEN NULL WHEN 1 THEN 'queued' WHEN 2 THEN 'running' ELSE 'pending' END, "
    "CASE s WHEN 0 THEN 'queued' WHEN 1 THEN 'running' WHEN 2 THEN 'succeeded' ELSE 'delivered' END, "
    f"{_CREATED} + s, "
    "CASE s WHEN 0 THEN 'created' WHEN 1 THEN 'started' WHEN 2 THEN 'completed' ELSE 'transport_acknowledged' END"
)
_HAPPENED = f"(s = 0 OR (s = 1 AND kind <> {_QUEUED}) OR kind = {_CLOSED})"

# A hash of n as a UUID: one to one, and in no order. PostgreSQL has a better one.
_HASH, _OTHER = "((n * 2654435761) & 4294967295)", "(((n + 1) * 2246822519) & 4294967295)"
_SQLITE_ID = (
    f"printf('%08x-%04x-4%03x-8%03x-%04x%08x', {_HASH}, {_OTHER} >> 16, {_OTHER} & 4095, ({_OTHER} >> 4) & 4095, "
    f"{_HASH} & 65535, {_OTHER})"
)
_POSTGRESQL_ID = "md5(n::text)::uuid"


def build_published(path: Path, layout: Layout, count: int) -> None:
    """The published package's own file."""
    task_state_guard.Ledger(path, clock=lambda: NOW)
    _fill(
        path,
        _insert_tasks("tasks", {"id": _SQLITE_ID, "delivery_required": "1"}, layout, count, sqlite=True),
        _insert_events(
            "task_events (task_id, event_kind, from_value, to_value, occurred_at, code)",
            _SQLITE_ID,
            layout,
            count,
            sqlite=True,
        ),
    )


def build_ours(path: Path, layout: Layout, count: int) -> None:
    """A file of ours, at head."""
    tsg.Ledger(path).close()
    ours = {"id": _SQLITE_ID, "delivery_required": "1", "expects_heartbeat": "1"}
    _fill(
        path,
        _insert_tasks("tsg_tasks", ours, layout, count, sqlite=True),
        _insert_events(_OUR_EVENTS, "n + 1, s", layout, count, sqlite=True),
    )


def build_on_postgresql(connection: psycopg.Connection, layout: Layout, count: int) -> None:
    """Our tables, which are there and empty, filled. As a superuser; in AUTOCOMMIT."""
    ours = {"id": _POSTGRESQL_ID, "delivery_required": "true", "expects_heartbeat": "true"}
    # No look at the task from each event; doctor looks.
    connection.execute("SET session_replication_role = replica")
    connection.execute(_insert_tasks("tsg_tasks", ours, layout, count, sqlite=False).encode())
    connection.execute(_insert_events(_OUR_EVENTS, "n + 1, s", layout, count, sqlite=False).encode())
    connection.execute("VACUUM (ANALYZE, FREEZE)")


_OUR_EVENTS = "tsg_task_events (task_pk, number, kind, from_status, to_status, occurred_at, code)"


def _kind(layout: Layout, count: int) -> str:
    if layout is Layout.FINISHED:
        return str(_CLOSED)
    if layout is Layout.SPARSE:
        every = count // ACTIVE
        return f"CASE WHEN n % {every} <> 0 THEN {_CLOSED} WHEN (n / {every}) % 2 = 0 THEN {_STALE} ELSE {_FRESH} END"
    return (
        f"CASE WHEN n % 10 < 4 THEN {_STALE} WHEN n % 10 = 4 THEN {_FRESH} WHEN n % 10 = 5 THEN {_QUEUED} "
        f"ELSE {_CLOSED} END"
    )


def _numbers(count: int, *, sqlite: bool) -> str:
    if sqlite:
        return f"WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count - 1}) "
    return f"WITH numbers AS (SELECT n FROM generate_series(0::bigint, {count - 1}) AS of_them(n)) "


def _insert_tasks(table: str, own: dict[str, str], layout: Layout, count: int, *, sqlite: bool) -> str:
    values = own | _TASK
    return (
        f"INSERT INTO {table} ({', '.join(values)}) {_numbers(count, sqlite=sqlite)}"
        f"SELECT {', '.join(values.values())} FROM (SELECT n, {_kind(layout, count)} AS kind FROM numbers) AS known"
    )


def _insert_events(into: str, key: str, layout: Layout, count: int, *, sqlite: bool) -> str:
    # At each second: one is created, the one before starts, and so on.
    return (
        f"INSERT INTO {into} {_numbers(count + 3, sqlite=sqlite)}"
        f"SELECT {key}, {_EVENT} FROM (SELECT n, s, {_kind(layout, count)} AS kind FROM (SELECT n - s AS n, s "
        "FROM numbers CROSS JOIN (SELECT 0 AS s UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3) AS steps) "
        f"AS each_of_them WHERE n BETWEEN 0 AND {count - 1}) AS known WHERE {_HAPPENED}"
    )


def _fill(path: Path, *inserts: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode = DELETE", "journal_mode = OFF", "synchronous = OFF", "cache_size = -1000000"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("PRAGMA ignore_check_constraints = ON")
    aside = connection.execute(
        "SELECT type, name, sql FROM sqlite_master WHERE type IN ('index', 'trigger') AND sql IS NOT NULL"
    ).fetchall()
    connection.execute("BEGIN")
    for kind, name, _ in aside:
        connection.execute(f"DROP {kind} {name}")
    for insert in inserts:
        connection.execute(insert)
    for _, _, statement in aside:
        connection.execute(statement)
    connection.execute("COMMIT")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    path.chmod(0o600)
