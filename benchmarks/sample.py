"""A ledger in the published package's own file: 40 % stale, 10 % fresh, 10 % queued, 40 % closed and delivered."""

from __future__ import annotations

import random
import sqlite3
import uuid
from pathlib import Path

import task_state_guard

#: Seconds since the epoch: when the sample is looked at, and when its first task was made.
NOW = 2_000_000_000.0
_START = 1_900_000_000.0

_EVENTS = (
    "SELECT id, 'created', NULL, 'queued', created_at, 'created', 0 FROM tasks",
    (
        "SELECT id, 'task_transition', 'queued', 'running', started_at, 'started', 1 FROM tasks "
        "WHERE started_at IS NOT NULL"
    ),
    "SELECT id, 'task_transition', 'running', status, ended_at, terminal_code, 2 FROM tasks WHERE ended_at IS NOT NULL",
    (
        "SELECT id, 'delivery_transition', 'pending', delivery_status, delivery_updated_at, delivery_code, 3 "
        "FROM tasks WHERE delivery_status <> 'pending'"
    ),
)


def build(path: Path, count: int) -> None:
    """A consistent file of `count` tasks, the same bytes of data for the same count."""
    task_state_guard.Ledger(path, clock=lambda: NOW)
    ids = random.Random(count)
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.execute("BEGIN")
        connection.executemany(
            "INSERT INTO tasks (id, status, delivery_status, delivery_required, created_at, started_at, updated_at, "
            "ended_at, delivery_updated_at, terminal_code, delivery_code, version) "
            "VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?, ?, ?, ?)",
            (_row(number, str(uuid.UUID(int=ids.getrandbits(128)))) for number in range(count)),
        )
        connection.execute(
            "INSERT INTO task_events (task_id, event_kind, from_value, to_value, occurred_at, code) "
            f"SELECT id, kind, source, target, at, code FROM (SELECT NULL AS id, NULL AS kind, NULL AS source, "
            f"NULL AS target, NULL AS at, NULL AS code, NULL AS step WHERE 0 UNION ALL {' UNION ALL '.join(_EVENTS)}) "
            "ORDER BY at, step"
        )
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def _row(number: int, identifier: str) -> tuple[object, ...]:
    made = _START + number
    kind = number % 10
    if kind < 4:
        return identifier, "running", "pending", made, made + 1, made + 1, None, made, None, None, 1
    if kind == 4:
        return identifier, "running", "pending", made, made + 1, NOW - 1, None, made, None, None, 2
    if kind == 5:
        return identifier, "queued", "pending", made, None, made, None, made, None, None, 0
    ended, code = made + 2, "transport_acknowledged"
    return identifier, "succeeded", "delivered", made, made + 1, ended, ended, made + 3, "completed", code, 3
