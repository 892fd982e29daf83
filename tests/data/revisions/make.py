"""Makes one tiny ledger a released revision: ``python -m tests.data.revisions.make``, at the checkout's root.

A file that is committed stays as it is for good: it stands for what a release has left behind. Run this only
to add the file of a new revision. Files of older revisions are not written again.

The history that they tell is the same. It is recorded by the ledger itself, then stored by plain SQL in the
shape of each revision, so that no file depends on the way back.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from tsg import Ledger, payload_fingerprint, schema

HERE = Path(__file__).parent
#: Of a task, in every revision.
TASK_COLUMNS = (
    "id, parent_id, status, delivery_status, delivery_required, payload_hash, timeout_seconds, created_at, "
    "started_at, updated_at, ended_at, deadline_at, delivery_updated_at, terminal_code, delivery_code, version"
)
#: Of an event, in every revision; the names of the published schema, then those of ours.
PUBLISHED_EVENT_COLUMNS = "event_kind, from_value, to_value, occurred_at, code"
EVENT_COLUMNS = "kind, from_status, to_status, occurred_at, code"
#: The first revisions whose tasks have ``pk`` and ``expects_heartbeat``.
KEYED = "0003"


def identifier(number: int) -> str:
    """The id of the task of that number; not in the order of creation."""
    return f"{(number * 7) % 16:x}0000000-0000-4000-8000-{number:012d}"


def record(path: Path, *, silent: bool) -> None:
    """A history with every state, every delivery state, a chain of parents, and verbs that interleave."""
    now = 1_760_000_000.1

    def clock() -> float:
        nonlocal now
        now += 0.7
        return now

    task = identifier
    with Ledger(path, clock=clock) as ledger:
        ledger.create_task(task_id=task(1), timeout_seconds=60)
        ledger.create_task(task_id=task(2), timeout_seconds=900.1, payload_hash=payload_fingerprint("two"))
        ledger.start_task(task(2))
        for number in (3, 4):
            ledger.create_task(task_id=task(number), parent_id=task(2))
        for number in (4, 3):
            ledger.start_task(task(number))
        ledger.create_task(task_id=task(5), parent_id=task(3), delivery_required=False, timeout_seconds=0)
        ledger.heartbeat(task(2))
        ledger.start_task(task(5))
        ledger.close_task(task(3), "succeeded", code="completed")
        ledger.heartbeat(task(2))
        ledger.close_task(task(4), "failed")
        ledger.close_task(task(5), "timed_out", code="restart_stale")
        ledger.set_delivery(task(4), "failed", code="transport_failed")
        ledger.set_delivery(task(3), "delivered", code="transport_acknowledged")
        ledger.set_delivery(task(5), "not_applicable", code="internal_task")
        for number in (6, 7, 8, 9):
            ledger.create_task(task_id=task(number), delivery_required=number in (6, 8), timeout_seconds=number / 3)
        ledger.close_task(task(6), "cancelled", code="caller_cancelled")
        ledger.close_task(task(7), "cancelled")
        ledger.set_delivery(task(7), "not_applicable")
        for number in (9, 8):
            ledger.start_task(task(number))
        ledger.close_task(task(8), "timed_out", code="deadline_exceeded")
        ledger.set_delivery(task(8), "failed", code="delivery_grace_expired")
        ledger.close_task(task(9), "succeeded", code="worker_completed")
        if silent:
            for number in (10, 11, 12):
                ledger.create_task(task_id=task(number), timeout_seconds=3600, expects_heartbeat=False)
            ledger.start_task(task(11))
            ledger.start_task(task(12))
            ledger.close_task(task(12), "succeeded")


def build(path: Path, revision: str, *, silent: bool | None = None) -> Path:
    """A ledger at `revision`, with rows; tasks that send no heartbeat among them where it can hold them."""
    keyed = revision >= KEYED
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder, "recorded.sqlite")
        record(recorded, silent=keyed if silent is None else silent)
        with closing(sqlite3.connect(recorded)) as source:
            tasks = source.execute(
                f"SELECT pk, expects_heartbeat, {TASK_COLUMNS} FROM tsg_tasks ORDER BY pk"
            ).fetchall()
            events = source.execute(
                f"SELECT task_pk, number, {EVENT_COLUMNS} FROM tsg_task_events ORDER BY occurred_at"
            ).fetchall()
    engine = sa.create_engine(f"sqlite:///{path}")
    schema.upgrade(engine, revision)
    engine.dispose()
    with closing(sqlite3.connect(path)) as target, target:
        if keyed:
            insert(target, "tsg_tasks", f"pk, expects_heartbeat, {TASK_COLUMNS}", tasks)
            insert(target, "tsg_task_events", f"task_pk, number, {EVENT_COLUMNS}", events)
        else:
            ids = {pk: id for pk, _, id, *_ in tasks}
            insert(target, "tsg_tasks", TASK_COLUMNS, [task[2:] for task in tasks])
            insert(
                target,
                "tsg_task_events",
                f"task_id, {PUBLISHED_EVENT_COLUMNS}",
                [(ids[pk], *event) for pk, _, *event in events],
            )
    with closing(sqlite3.connect(path, isolation_level=None)) as target:
        for statement in ("page_size = 1024", "journal_mode = DELETE"):
            target.execute(f"PRAGMA {statement}")
        target.execute("VACUUM")
        target.execute("PRAGMA journal_mode = WAL")
    path.chmod(0o600)
    return path


def insert(target: sqlite3.Connection, table: str, columns: str, rows: list[tuple[object, ...]]) -> None:
    """Store `rows`, whose values stand in the order of `columns`."""
    places = ", ".join("?" for _ in columns.split(","))
    target.executemany(f"INSERT INTO {table} ({columns}) VALUES ({places})", rows)


def main() -> None:
    """Make the files that are not there yet."""
    for revision in schema.REVISIONS:
        path = HERE / f"{revision}.sqlite"
        if not path.exists():
            build(path, revision)


if __name__ == "__main__":
    main()
