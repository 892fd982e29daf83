"""Damage to a stored ledger, done behind its guards' back, and what the specification says of such rows.

:class:`Patient` holds a private copy of a ledger in memory and has doctor look at it after every damage.
:func:`diagnosis` is a second opinion: the rules of a stored row, its events and its parents, written in Python
from the specification and from nothing in the package.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from tests.conftest import FakeClock
from tsg import Ledger, doctor

Row = dict[str, Any]

STATE = "state_inconsistency_count"
TIMESTAMP = "timestamp_inconsistency_count"
EVENT = "event_inconsistency_count"
ORPHAN = "orphan_count"
REFERENCE = "foreign_key_error_count"
CYCLE = "parent_cycle_count"
ERROR = "doctor_error_count"
FINDINGS = (STATE, TIMESTAMP, EVENT, ORPHAN, REFERENCE, CYCLE, ERROR)

TASK_COLUMNS = (
    "pk",
    "id",
    "parent_id",
    "status",
    "delivery_status",
    "delivery_required",
    "expects_heartbeat",
    "payload_hash",
    "timeout_seconds",
    "created_at",
    "started_at",
    "updated_at",
    "ended_at",
    "deadline_at",
    "delivery_updated_at",
    "terminal_code",
    "delivery_code",
    "version",
)
EVENT_COLUMNS = ("task_pk", "number", "kind", "from_status", "to_status", "occurred_at", "code")

REASONS = {
    "succeeded": ("completed", "worker_completed"),
    "failed": ("worker_failed",),
    "timed_out": ("deadline_exceeded", "restart_stale"),
    "cancelled": ("caller_cancelled",),
}
DELIVERY_REASONS = {
    "delivered": ("transport_acknowledged",),
    "failed": ("delivery_grace_expired", "transport_failed"),
    "not_applicable": ("internal_task",),
}


# -- a ledger of every kind of task ------------------------------------------------------------------------


def every_kind(ledger: Ledger, clock: FakeClock) -> dict[str, str]:
    """Record a task of every kind there is; its id by a name that tells the kind."""
    kinds: dict[str, str] = {}

    def make(name: str, stage: str = "queued", end: Any = None, delivery: Any = None, **fields: Any) -> str:
        task = ledger.create_task(**fields).id
        clock.advance(10.0)
        if stage != "queued":
            ledger.start_task(task)
            clock.advance(1.5)
        if stage == "beaten":
            ledger.heartbeat(task)
            clock.advance(2.25)
            ledger.heartbeat(task)
            clock.advance(0.1)
        if end is not None:
            ledger.close_task(task, end[0], code=end[1])
            clock.advance(3.0)
        if delivery is not None:
            ledger.set_delivery(task, delivery[0], code=delivery[1])
            clock.advance(0.7)
        kinds[name] = task
        return task

    parent = make("parent")
    digests = (f"{number:064x}" for number in range(10_000, 20_000))
    for stage in ("queued", "running", "beaten"):
        for timeout, beats in ((None, True), (30.0, True), (0.0, True), (45.5, False)):
            for required in (True, False):
                for child in (False, True):
                    make(
                        f"{stage}, timeout {timeout}, {'silent' * (not beats)}, {'internal' * (not required)}, "
                        f"{'child' * child}",
                        stage,
                        timeout_seconds=timeout,
                        expects_heartbeat=beats,
                        delivery_required=required,
                        parent_id=parent if child else None,
                        payload_hash=next(digests) if child else None,
                    )
    ends = [(status, code) for status, codes in REASONS.items() for code in (None, *codes)]
    deliveries: list[tuple[bool, tuple[str, str | None] | None]] = [(True, None), (False, None)]
    deliveries += [
        (status != "not_applicable", (status, code))
        for status, codes in DELIVERY_REASONS.items()
        for code in (None, *codes)
    ]
    for stage in ("queued", "running", "beaten"):
        for end in ends:
            for at, (required, delivery) in enumerate(deliveries):
                make(
                    f"{stage} to {end}, {'internal' * (not required)}, delivery {delivery}",
                    stage,
                    end,
                    delivery,
                    delivery_required=required,
                    timeout_seconds=(None, 60.0, 0.25)[at % 3],
                    expects_heartbeat=at % 3 == 0 or at % 2 == 0,
                    parent_id=parent if at % 4 == 1 else None,
                    payload_hash=next(digests) if at % 4 == 2 else None,
                )
    still = ledger.create_task(timeout_seconds=5).id
    ledger.start_task(still)
    ledger.heartbeat(still)
    ledger.close_task(still, "succeeded")
    ledger.set_delivery(still, "delivered")
    kinds["everything at one moment"] = still
    return kinds


def some_kinds(ledger: Ledger, clock: FakeClock) -> dict[str, str]:
    """Record a task of each kind whose rules differ; few enough to damage every field of each by itself."""
    kinds: dict[str, str] = {}

    def make(name: str, *verbs: tuple[Any, ...], **fields: Any) -> str:
        kinds[name] = task = ledger.create_task(**fields).id
        clock.advance(10.0)
        for verb, *arguments in verbs:
            code = {"code": arguments.pop()} if len(arguments) > 1 else {}
            getattr(ledger, verb)(task, *arguments, **code)
            clock.advance(1.5)
        return task

    start, beat = ("start_task",), ("heartbeat",)
    close, deliver = "close_task", "set_delivery"
    digest = "0123456789abcdef" * 4
    parent = make("parent queued")
    child = make("child queued, internal, with timeout", parent_id=parent, timeout_seconds=30, delivery_required=False)
    make("queued, silent, hashed", timeout_seconds=30, expects_heartbeat=False, payload_hash=digest)
    make("running", start)
    make("grandchild running, with timeout", start, parent_id=child, timeout_seconds=40.5)
    make("running, beaten", start, beat, beat, payload_hash="f" * 64)
    make("running, silent", start, timeout_seconds=50, expects_heartbeat=False)
    make("running, silent until it beat", start, beat, timeout_seconds=60, expects_heartbeat=False)
    make("cancelled unstarted, no code, pending", (close, "cancelled"))
    make("timed out unstarted, not applicable", (close, "timed_out", "restart_stale"), (deliver, "not_applicable"),
         delivery_required=False)  # fmt: skip
    make("succeeded, delivered", start, (close, "succeeded", "completed"),
         (deliver, "delivered", "transport_acknowledged"))  # fmt: skip
    make("failed, beaten, no code, delivery failed", start, beat, (close, "failed"), (deliver, "failed"),
         timeout_seconds=70, payload_hash=digest)  # fmt: skip
    make("timed out, internal, pending", start, (close, "timed_out", "deadline_exceeded"), timeout_seconds=1,
         delivery_required=False, parent_id=parent)  # fmt: skip
    make("succeeded, silent, delivery failed", start, (close, "succeeded", "worker_completed"),
         (deliver, "failed", "delivery_grace_expired"), timeout_seconds=80, expects_heartbeat=False)  # fmt: skip
    return kinds


# -- behind the guards' back -------------------------------------------------------------------------------


@contextmanager
def lifted(connection: sqlite3.Connection) -> Iterator[None]:
    """Take away every trigger, CHECK and NOT NULL of a ledger for a while; afterwards they stand as they stood."""
    connection.execute("PRAGMA ignore_check_constraints = ON")
    stored = connection.execute(
        "SELECT rowid, type, name, tbl_name, rootpage, sql FROM sqlite_master "
        "WHERE type = 'trigger' OR name IN ('tsg_tasks', 'tsg_task_events')"
    ).fetchall()
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("DELETE FROM sqlite_master WHERE type = 'trigger'")
    connection.executemany(
        "UPDATE sqlite_master SET sql = ? WHERE rowid = ?",
        [(re.sub(r"(?<!IS) NOT NULL", "", row[5]), row[0]) for row in stored if row[1] == "table"],
    )
    connection.execute("PRAGMA writable_schema = RESET")
    try:
        yield
    finally:
        connection.execute("PRAGMA writable_schema = ON")
        connection.executemany(
            "REPLACE INTO sqlite_master (rowid, type, name, tbl_name, rootpage, sql) VALUES (?, ?, ?, ?, ?, ?)", stored
        )
        connection.execute("PRAGMA writable_schema = RESET")
        connection.execute("PRAGMA ignore_check_constraints = OFF")


Statement = str | tuple[str, Sequence[Any]]


class Patient:
    """A ledger in memory, copied from `origin`, that is damaged, looked at, and as it was again."""

    def __init__(self, origin: sqlite3.Connection) -> None:
        self.raw = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        origin.backup(self.raw)
        self._engine = sa.create_engine("sqlite://", creator=lambda: self.raw, poolclass=StaticPool)
        self._connection = self._engine.connect()
        self.raw.execute("PRAGMA foreign_keys = OFF")

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()
        self.raw.close()

    def report(self) -> doctor.Report:
        return doctor.examine(self._connection)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Whatever happens inside has not happened afterwards."""
        self.raw.execute("SAVEPOINT healthy")
        try:
            yield
        finally:
            self.raw.execute("ROLLBACK TO healthy")
            self.raw.execute("RELEASE healthy")

    @contextmanager
    def damaged(self, *statements: Statement) -> Iterator[doctor.Report]:
        """Doctor's report after these statements, with the guards lifted while they ran."""
        with self.undone():
            with lifted(self.raw):
                for statement in statements:
                    sql, parameters = (statement, ()) if isinstance(statement, str) else statement
                    self.raw.execute(sql, parameters)
            yield self.report()

    @contextmanager
    def altered(self, *statements: str) -> Iterator[doctor.Report]:
        """Doctor's report after these statements about the schema, which stays as they leave it."""
        with self.undone():
            for statement in statements:
                self.raw.execute(statement)
            yield self.report()

    def tasks(self) -> list[Row]:
        return self._rows("tsg_tasks", TASK_COLUMNS)

    def events(self) -> list[Row]:
        return self._rows("tsg_task_events", EVENT_COLUMNS)

    def schema(self, kind: str) -> dict[str, str]:
        """The statements that made the tables, indexes or triggers of ours, by name."""
        return dict(
            self.raw.execute(
                "SELECT name, sql FROM sqlite_master WHERE type = ? AND sql IS NOT NULL AND tbl_name LIKE 'tsg%'",
                (kind,),
            )
        )

    def _rows(self, table: str, columns: Iterable[str]) -> list[Row]:
        selected = self.raw.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY 1, 2")
        return [dict(zip(columns, row, strict=True)) for row in selected]


def rewritten(table: str, before: str, after: str) -> tuple[str, ...]:
    """Statements that change the text of a table's definition in place."""
    return (
        "PRAGMA writable_schema = ON",
        f"UPDATE sqlite_master SET sql = replace(sql, '{_quoted(before)}', '{_quoted(after)}') WHERE name = '{table}'",
        "PRAGMA writable_schema = RESET",
    )


def _quoted(text: str) -> str:
    return text.replace("'", "''")


# -- a second opinion --------------------------------------------------------------------------------------


def is_canonical(value: object) -> bool:
    return (
        isinstance(value, str)
        and re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", value) is not None
    )


def is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def is_time(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def has_sound_state(task: Row) -> bool:
    """Section 2 and 3 of the specification, apart from times."""
    status, delivery = task["status"], task["delivery_status"]
    ended, closed = status in REASONS, delivery in DELIVERY_REASONS
    if status not in ("queued", "running", *REASONS) or delivery not in ("pending", *DELIVERY_REASONS):
        return False
    if not is_canonical(task["id"]) or task["parent_id"] == task["id"]:
        return False
    if task["parent_id"] is not None and not is_canonical(task["parent_id"]):
        return False
    if any(
        type(task[flag]) is not int or task[flag] not in (0, 1) for flag in ("delivery_required", "expects_heartbeat")
    ):
        return False
    if task["payload_hash"] is not None and not is_digest(task["payload_hash"]):
        return False
    if not task["expects_heartbeat"] and task["timeout_seconds"] is None:
        return False
    started = task["started_at"] is not None
    if (status == "queued" and started) or (status == "running" and not started):
        return False
    if ended is not (task["ended_at"] is not None):
        return False
    if task["terminal_code"] is not None and task["terminal_code"] not in REASONS.get(status, ()):
        return False
    if task["delivery_code"] is not None and task["delivery_code"] not in DELIVERY_REASONS.get(delivery, ()):
        return False
    if closed and (not ended or (delivery == "not_applicable") is bool(task["delivery_required"])):
        return False
    transitions = started + ended + closed
    if type(task["version"]) is not int or task["version"] < transitions:
        return False
    return task["version"] == transitions or (started and task["expects_heartbeat"] == 1)


def has_sound_times(task: Row) -> bool:
    """Section 3 of the specification on times; of a row whose state is sound."""
    created, started, updated = task["created_at"], task["started_at"], task["updated_at"]
    ended, told = task["ended_at"], task["delivery_updated_at"]
    timeout, deadline = task["timeout_seconds"], task["deadline_at"]
    if timeout is not None and not (is_time(timeout) and timeout >= 0):
        return False
    if not all(map(is_time, (created, updated, told))):
        return False
    if not all(time is None or is_time(time) for time in (started, ended, deadline)):
        return False
    if started is not None and started < created:
        return False
    if ended is not None and ended < (created if started is None else started):
        return False
    if ended is not None:
        last_known = updated == ended
    elif started is None:
        last_known = updated == created
    else:
        last_known = updated == started if task["version"] == 1 else updated >= started
    if task["delivery_status"] == "pending":
        delivery_known = told == created
    else:
        delivery_known = ended is not None and told >= ended
    due = None if started is None or timeout is None else started + timeout
    return last_known and delivery_known and same(deadline, due)


def is_sound(task: Row) -> bool:
    return has_sound_state(task) and has_sound_times(task)


def is_sound_event(event: Row) -> bool:
    """Section 3 of the specification on one event by itself."""
    number, source, target, code = event["number"], event["from_status"], event["to_status"], event["code"]
    if type(number) is not int or not is_time(event["occurred_at"]):
        return False
    if event["kind"] == "created":
        return (number, source, target, code) == (0, None, "queued", "created")
    if event["kind"] == "task_transition":
        if target == "running":
            return (number, source, code) == (1, "queued", "started")
        legal = (number, source) in ((1, "queued"), (2, "running")) and target in REASONS
        return legal and (code is None or code in REASONS[target])
    if event["kind"] == "delivery_transition":
        legal = number in (2, 3) and source == "pending" and target in DELIVERY_REASONS
        return legal and (code is None or code in DELIVERY_REASONS[target])
    return False


def implied_chain(task: Row) -> list[tuple[Any, ...]]:
    chain: list[tuple[Any, ...]] = [("created", None, "queued", task["created_at"], "created")]
    before = "queued"
    if task["started_at"] is not None:
        chain.append(("task_transition", "queued", "running", task["started_at"], "started"))
        before = "running"
    if task["status"] in REASONS:
        chain.append(("task_transition", before, task["status"], task["ended_at"], task["terminal_code"]))
    to, at, code = (task[name] for name in ("delivery_status", "delivery_updated_at", "delivery_code"))
    if to in DELIVERY_REASONS:
        chain.append(("delivery_transition", "pending", to, at, code))
    return [(number, *event) for number, event in enumerate(chain)]


class Diagnosis(NamedTuple):
    """How many tasks each heading must count; `unsure` more may be counted under times and events, since of a
    row whose state is broken nobody can tell which times and events it implies."""

    counts: dict[str, int]
    unsure: int

    def disagreement(self, report: doctor.Report) -> dict[str, tuple[int, int]]:
        """By heading what doctor counted and what it should have; empty where they agree."""
        found: dict[str, Any] = dict(report)
        return {
            heading: (found[heading], due)
            for heading, due in self.counts.items()
            if not due <= found[heading] <= due + (self.unsure if heading in (TIMESTAMP, EVENT) else 0)
        }


def diagnosis(tasks: list[Row], events: list[Row]) -> Diagnosis:
    by_id = {task["id"]: task for task in tasks if task["id"] is not None}
    keys = {task["pk"] for task in tasks}
    chains: dict[Any, list[tuple[Any, ...]]] = {}
    for event in events:
        chains.setdefault(event["task_pk"], []).append(tuple(event[name] for name in EVENT_COLUMNS[1:]))
    counts = Counter(dict.fromkeys(FINDINGS, 0))
    for task in tasks:
        parent = by_id.get(task["parent_id"])
        if task["parent_id"] is not None and parent is None:
            counts[ORPHAN] += 1
            counts[REFERENCE] += 1
        if not has_sound_state(task):
            counts[STATE] += 1
            continue
        older = parent is not None and is_time(parent["created_at"]) and is_time(task["created_at"])
        older = older and task["created_at"] < parent["created_at"]  # type: ignore[index]
        counts[TIMESTAMP] += older or not has_sound_times(task)
        chain = [field for event in sorted(chains.get(task["pk"], []), key=repr) for field in event]
        implied = [field for event in implied_chain(task) for field in event]
        counts[EVENT] += len(chain) != len(implied) or not all(map(same, chain, implied))
    counts[REFERENCE] += sum(event["task_pk"] not in keys for event in events)
    counts[CYCLE] = cycles(tasks)
    return Diagnosis(dict(counts), counts[STATE])


def cycles(tasks: list[Row]) -> int:
    """How many cycles the parents form, by following each task's parents until one is met again."""
    parents = {task["id"]: task["parent_id"] for task in tasks if task["id"] is not None}
    walk: dict[Any, Any] = {}
    found = 0
    for first in parents:
        at = first
        while at in parents and at not in walk:
            walk[at] = first
            at = parents[at]
        found += at in parents and walk[at] == first
    return found
