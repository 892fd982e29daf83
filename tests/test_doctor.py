"""Doctor finds whatever another stored fact contradicts, and nothing where all is consistent."""

from __future__ import annotations

import json
import math
import random
import re
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.conftest import FakeClock, raw, snapshot
from tests.damage import (
    CYCLE,
    DELIVERY_REASONS,
    ERROR,
    EVENT,
    FINDINGS,
    ORPHAN,
    REASONS,
    REFERENCE,
    STATE,
    TIMESTAMP,
    Patient,
    Row,
    cycles,
    diagnosis,
    every_kind,
    is_canonical,
    is_digest,
    is_time,
    lifted,
    rewritten,
    same,
    some_kinds,
)
from tsg import Ledger, LedgerError, StateConflict, doctor
from tsg.checkup import examine_file
from tsg.guards import GUARDS
from tsg.ledger import TaskRecord, creation
from tsg.models import Task
from tsg.rules import event_rules, task_rules
from tsg.states import TERMINAL, DeliveryStatus, Event, Verb, created, transition
from tsg.tables import task_events, tasks

KEYS = {
    "healthy",
    "quick_check",
    "schema_version",
    "schema_ok",
    "task_count",
    "event_count",
    "task_status_counts",
    "delivery_status_counts",
    *FINDINGS,
}


def _patient(folder: Path, fill: Callable[[Ledger, FakeClock], dict[str, str]]) -> tuple[Patient, dict[str, str]]:
    folder.chmod(0o700)
    clock = FakeClock()
    with Ledger(folder / "ledger.sqlite", clock=clock) as ledger:
        kinds = fill(ledger, clock)
    with_file = raw(folder / "ledger.sqlite")
    patient = Patient(with_file)
    with_file.close()
    return patient, kinds


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Patient, dict[str, str]]]:
    """A ledger with a task of every kind there is, and their ids by kind."""
    patient, kinds = _patient(tmp_path_factory.mktemp("crowd"), every_kind)
    yield patient, kinds
    patient.close()


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Patient, dict[str, str]]]:
    """A ledger with a task of each kind whose rules differ, and their ids by kind."""
    patient, kinds = _patient(tmp_path_factory.mktemp("ward"), some_kinds)
    yield patient, kinds
    patient.close()


def found(report: doctor.Report) -> dict[str, int]:
    """The findings of a report that are not zero."""
    values: dict[str, Any] = dict(report)
    return {heading: values[heading] for heading in FINDINGS if values[heading]}


def assert_refused(report: doctor.Report, *, quick_check: str = "ok") -> None:
    """That the schema is what is wrong, and nothing else was counted."""
    values: dict[str, Any] = dict(report)
    assert (values.pop("healthy"), values.pop("schema_ok"), values.pop(ERROR)) == (False, False, 1)
    assert values.pop("quick_check") == quick_check
    values.pop("schema_version")
    for counts in (values.pop("task_status_counts"), values.pop("delivery_status_counts")):
        assert set(counts.values()) == {0}
    assert set(values.values()) == {0}


# -- a field changed ---------------------------------------------------------------------------------------


class Wrong(NamedTuple):
    """A wrong value for a field: what it is, how it comes from the row and the others, and which headings see it.

    Of several headings any may; a value that is just what is stored is no damage and left out.
    """

    label: str
    value: Callable[[Row, list[Row]], Any]
    seen_under: tuple[str, ...]


def always(value: object) -> Callable[[Row, list[Row]], Any]:
    return lambda row, rows: value


def from_text(column: str, change: Callable[[str], object]) -> Callable[[Row, list[Row]], Any]:
    return lambda row, rows: row[column] if row[column] is None else change(row[column])


def moved_by(column: str, change: Callable[[float], float]) -> Callable[[Row, list[Row]], Any]:
    return lambda row, rows: None if row[column] is None else change(row[column])


def of_another(column: str) -> Callable[[Row, list[Row]], Any]:
    """The value of the next row that has another one."""

    def value(row: Row, rows: list[Row]) -> Any:
        start = rows.index(row)
        for other in rows[start + 1 :] + rows[:start]:
            if other[column] is not None and not same(other[column], row[column]):
                return other[column]
        return row[column]

    return value


def of_field(name: str) -> Callable[[Row, list[Row]], Any]:
    return lambda row, rows: row[name]


def not_a_time(seen_under: tuple[str, ...]) -> list[Wrong]:
    return [
        Wrong("NULL", always(None), (TIMESTAMP, EVENT, STATE)),
        Wrong("text", always("yesterday"), seen_under),
        Wrong("empty text", always(""), seen_under),
        Wrong("a blob", always(b"\x00\x01"), seen_under),
        Wrong("infinity", always(math.inf), seen_under),
        Wrong("minus infinity", always(-math.inf), seen_under),
        Wrong("a huge integer", always(2**62), (TIMESTAMP, EVENT)),
    ]


def another_time(column: str) -> list[Wrong]:
    either = (TIMESTAMP, EVENT)
    return [
        Wrong("the next float", moved_by(column, lambda time: math.nextafter(time, math.inf)), either),
        Wrong("the float before", moved_by(column, lambda time: math.nextafter(time, 0.0)), either),
        Wrong("a millisecond later", moved_by(column, lambda time: time + 0.001), either),
        Wrong("a millisecond earlier", moved_by(column, lambda time: time - 0.001), either),
        Wrong("zero", always(0.0), (TIMESTAMP, EVENT, STATE)),
        Wrong("negative", always(-5.0), (TIMESTAMP, EVENT, STATE)),
        Wrong("another task's", of_another(column), (TIMESTAMP, EVENT, STATE)),
    ]


def not_an_id(column: str) -> list[Wrong]:
    return [
        Wrong("text", always("not an id"), (STATE,)),
        Wrong("empty text", always(""), (STATE,)),
        Wrong("an integer", always(7), (STATE,)),
        Wrong("upper case", from_text(column, str.upper), (STATE,)),
        Wrong("trailing NUL", from_text(column, lambda id: id + "\0"), (STATE,)),
        Wrong("NUL for its end", from_text(column, lambda id: id[:-4] + "\0" * 4), (STATE,)),
        Wrong("trailing space", from_text(column, lambda id: id + " "), (STATE,)),
        Wrong("a line break", from_text(column, lambda id: id + "\n"), (STATE,)),
        Wrong("no hyphens", from_text(column, lambda id: id.replace("-", "")), (STATE,)),
        Wrong("braces", from_text(column, lambda id: "{" + id + "}"), (STATE,)),
        Wrong("hyphens elsewhere", from_text(column, lambda id: id[:7] + "-" + id[7] + id[9:]), (STATE,)),
        Wrong("no hexadecimal digit", from_text(column, lambda id: "g" + id[1:]), (STATE,)),
        Wrong("another script's digit", from_text(column, lambda id: "\N{ARABIC-INDIC DIGIT ONE}" + id[1:]), (STATE,)),
        Wrong("the same bytes as a blob", from_text(column, str.encode), (STATE,)),
    ]


def other_words(column: str, *words: str | None) -> list[Wrong]:
    malformed = [
        Wrong("text", always("lost"), (STATE,)),
        Wrong("empty text", always(""), (STATE,)),
        Wrong("a blob", from_text(column, str.encode), (STATE,)),
        Wrong("a number", always(1), (STATE,)),
        Wrong("upper case", from_text(column, str.upper), (STATE,)),
        Wrong("trailing NUL", from_text(column, lambda word: word + "\0"), (STATE,)),
    ]
    return malformed + [Wrong(f"{word}", always(word), (STATE, EVENT)) for word in words]


def not_a_flag(column: str) -> list[Wrong]:
    return [
        Wrong("NULL", always(None), (STATE,)),
        Wrong("text", always("true"), (STATE,)),
        Wrong("empty text", always(""), (STATE,)),
        Wrong("a blob", always(b"\x01"), (STATE,)),
        Wrong("two", always(2), (STATE,)),
        Wrong("minus one", always(-1), (STATE,)),
        Wrong("one half", always(0.5), (STATE,)),
        Wrong("infinity", always(math.inf), (STATE,)),
        Wrong("the other", lambda row, rows: 1 - row[column], (STATE,)),
    ]


CODES = [code for codes in REASONS.values() for code in codes]
DELIVERY_CODES = [code for codes in DELIVERY_REASONS.values() for code in codes]

TASK_DAMAGE: dict[str, list[Wrong]] = {
    # The database holds neither NULL nor text as a row's key, nor one key twice.
    "pk": [
        Wrong("a free key", always(987_654), (REFERENCE,)),
        Wrong("a negative key", always(-1), (REFERENCE,)),
        Wrong("the largest key", always(2**63 - 1), (REFERENCE,)),
    ],
    "id": [
        Wrong("NULL", always(None), (STATE,)),
        *not_an_id("id"),
        Wrong("another id", always("00000000-0000-4000-8000-000000000000"), (ORPHAN,)),
    ],
    "parent_id": [
        *not_an_id("parent_id"),
        Wrong("NULL", always(None), (STATE,)),
        Wrong("an id of no task", always("00000000-0000-4000-8000-000000000000"), (ORPHAN,)),
        Wrong("the task itself", of_field("id"), (STATE,)),
        Wrong("the first task", lambda row, rows: rows[0]["id"], (STATE,)),
        Wrong("the last task, which is younger", lambda row, rows: rows[-1]["id"], (TIMESTAMP, STATE)),
    ],
    "status": [Wrong("NULL", always(None), (STATE,)), *other_words("status", "queued", "running", *REASONS, "pending")],
    "delivery_status": [
        Wrong("NULL", always(None), (STATE,)),
        *other_words("delivery_status", "pending", *DELIVERY_REASONS, "queued"),
    ],
    "delivery_required": not_a_flag("delivery_required"),
    "expects_heartbeat": not_a_flag("expects_heartbeat"),
    "payload_hash": [
        Wrong("NULL", always(None), (STATE,)),
        Wrong("text", always("secret"), (STATE,)),
        Wrong("empty text", always(""), (STATE,)),
        Wrong("an integer", always(7), (STATE,)),
        Wrong("too short", always("a" * 63), (STATE,)),
        Wrong("too long", always("a" * 65), (STATE,)),
        Wrong("upper case", always("A" * 64), (STATE,)),
        Wrong("no hexadecimal digit", always("a" * 63 + "g"), (STATE,)),
        Wrong("a line break", always("a" * 63 + "\n"), (STATE,)),
        Wrong("a blob", always(b"a" * 64), (STATE,)),
        Wrong("trailing NUL", always("a" * 64 + "\0"), (STATE,)),
        Wrong("NUL for its end", always("a" * 60 + "\0" * 4), (STATE,)),
        Wrong("NUL and then text", always("a" * 10 + "\0" + "my secret prompt".ljust(53)), (STATE,)),
        Wrong("another digest", always("b" * 64), (STATE,)),
    ],
    "timeout_seconds": [
        Wrong("NULL", always(None), (TIMESTAMP, STATE)),
        Wrong("text", always("soon"), (TIMESTAMP,)),
        Wrong("empty text", always(""), (TIMESTAMP,)),
        Wrong("a blob", always(b"30"), (TIMESTAMP,)),
        Wrong("infinity", always(math.inf), (TIMESTAMP,)),
        Wrong("minus infinity", always(-math.inf), (TIMESTAMP,)),
        Wrong("negative", always(-0.001), (TIMESTAMP,)),
        Wrong("a little longer", moved_by("timeout_seconds", lambda timeout: timeout + 0.001), (TIMESTAMP,)),
        Wrong("a little shorter", moved_by("timeout_seconds", lambda timeout: abs(timeout - 0.001)), (TIMESTAMP,)),
        Wrong("zero", always(0.0), (TIMESTAMP,)),
        Wrong("another task's", of_another("timeout_seconds"), (TIMESTAMP,)),
    ],
    "created_at": [*not_a_time((TIMESTAMP,)), *another_time("created_at")],
    "started_at": [*not_a_time((TIMESTAMP, STATE)), *another_time("started_at")],
    "updated_at": [*not_a_time((TIMESTAMP,)), *another_time("updated_at")],
    "ended_at": [*not_a_time((TIMESTAMP, STATE)), *another_time("ended_at")],
    "deadline_at": [*not_a_time((TIMESTAMP,)), *another_time("deadline_at")],
    "delivery_updated_at": [*not_a_time((TIMESTAMP,)), *another_time("delivery_updated_at")],
    "terminal_code": other_words("terminal_code", None, *CODES, "created", "started", "internal_task"),
    "delivery_code": other_words("delivery_code", None, *DELIVERY_CODES, "completed"),
    "version": [
        Wrong("NULL", always(None), (STATE,)),
        Wrong("text", always("first"), (STATE,)),
        Wrong("empty text", always(""), (STATE,)),
        Wrong("a blob", always(b"1"), (STATE,)),
        Wrong("a fraction", lambda row, rows: row["version"] + 0.5, (STATE,)),
        Wrong("infinity", always(math.inf), (STATE,)),
        Wrong("one more", lambda row, rows: row["version"] + 1, (STATE,)),
        Wrong("one less", lambda row, rows: row["version"] - 1, (STATE, TIMESTAMP)),
        Wrong("zero", always(0), (STATE,)),
        Wrong("negative", always(-1), (STATE,)),
        Wrong("far more", always(1_000_000), (STATE,)),
    ],
}  # fmt: skip

EVENT_DAMAGE: dict[str, list[Wrong]] = {
    "task_pk": [
        Wrong("no task's key", always(987_654), (REFERENCE,)),
        Wrong("text", always("first"), (REFERENCE,)),
        Wrong("a blob", always(b"1"), (REFERENCE,)),
        Wrong("another task's", of_another("task_pk"), (EVENT,)),
    ],
    "number": [
        Wrong("the next free", always(4), (EVENT,)),
        Wrong("negative", always(-1), (EVENT,)),
        Wrong("text", always("first"), (EVENT,)),
        Wrong("a blob", always(b"0"), (EVENT,)),
        Wrong("a fraction", lambda row, rows: row["number"] + 0.5, (EVENT,)),
        Wrong("infinity", always(math.inf), (EVENT,)),
        *(Wrong(f"{number}", always(number), (EVENT,)) for number in range(4)),
    ],
    "kind": [
        Wrong("NULL", always(None), (EVENT,)),
        Wrong("empty text", always(""), (EVENT,)),
        Wrong("a blob", from_text("kind", str.encode), (EVENT,)),
        Wrong("upper case", from_text("kind", str.upper), (EVENT,)),
        Wrong("trailing NUL", from_text("kind", lambda word: word + "\0"), (EVENT,)),
        *(Wrong(kind, always(kind), (EVENT,)) for kind in ("created", "task_transition", "delivery_transition")),
    ],
    **{
        column: [
            Wrong("NULL", always(None), (EVENT,)),
            Wrong("empty text", always(""), (EVENT,)),
            Wrong("a number", always(0), (EVENT,)),
            Wrong("a blob", from_text(column, str.encode), (EVENT,)),
            Wrong("upper case", from_text(column, str.upper), (EVENT,)),
            Wrong("trailing NUL", from_text(column, lambda word: word + "\0"), (EVENT,)),
            *(Wrong(word, always(word), (EVENT,)) for word in words),
        ]
        for column, words in {
            "from_status": ("queued", "running", "succeeded", "pending", "delivered"),
            "to_status": ("queued", "running", *REASONS, "pending", "delivered", "not_applicable"),
            "code": ("created", "started", *CODES, *DELIVERY_CODES),
        }.items()
    },
    "occurred_at": [
        Wrong("NULL", always(None), (EVENT,)),
        Wrong("text", always("yesterday"), (EVENT,)),
        Wrong("empty text", always(""), (EVENT,)),
        Wrong("a blob", always(b"\x00"), (EVENT,)),
        Wrong("infinity", always(math.inf), (EVENT,)),
        Wrong("minus infinity", always(-math.inf), (EVENT,)),
        Wrong("the next float", moved_by("occurred_at", lambda time: math.nextafter(time, math.inf)), (EVENT,)),
        Wrong("a millisecond earlier", moved_by("occurred_at", lambda time: time - 0.001), (EVENT,)),
        Wrong("another event's", of_another("occurred_at"), (EVENT,)),
        Wrong("zero", always(0.0), (EVENT,)),
    ],
}  # fmt: skip


#: What can be right in no task is tried on every seventh; the test with the crowd tries it on all.
NONSENSE = {
    "text",
    "empty text",
    "a blob",
    "an integer",
    "a number",
    "infinity",
    "minus infinity",
    "a huge integer",
    "upper case",
    "trailing NUL",
    "trailing space",
    "a line break",
    "no hyphens",
    "braces",
    "hyphens elsewhere",
    "no hexadecimal digit",
    "another script's digit",
    "the same bytes as a blob",
    "too short",
    "too long",
    "minus one",
    "one half",
    "two",
    "negative",
}


class Accepted(NamedTuple):
    """A changed value that no other stored fact contradicts, and why; doctor must call it healthy."""

    column: str
    reason: str
    applies: Callable[[Row, Any, list[Row]], bool]


def transitions(task: Row) -> int:
    return (task["started_at"] is not None) + (task["status"] in REASONS) + (task["delivery_status"] != "pending")


def has_beaten(task: Row) -> bool:
    return bool(task["version"] > transitions(task))


def may_be_parent(task: Row, value: Any, rows: list[Row]) -> bool:
    if value is None:
        return True
    parent = next((row for row in rows if row["id"] == value), None)
    changed = [{**row, "parent_id": value} if row is task else row for row in rows]
    return parent is not None and parent["created_at"] <= task["created_at"] and cycles(changed) == 0


ACCEPTED = (
    Accepted(
        "id",
        "only its children name a task by its id",
        lambda task, value, rows: is_canonical(value) and all(row["parent_id"] != task["id"] for row in rows),
    ),
    Accepted("parent_id", "which older task is the parent, if any, is said once", may_be_parent),
    Accepted(
        "delivery_required",
        "until the delivery closes, nothing depends on it",
        lambda task, value, rows: value in (0, 1) and task["delivery_status"] == "pending",
    ),
    Accepted(
        "expects_heartbeat",
        "nothing says that a task must be silent",
        lambda task, value, rows: value == 1,
    ),
    Accepted(
        "expects_heartbeat",
        "a task with a timeout that has not beaten may have been silent",
        lambda task, value, rows: value == 0 and task["timeout_seconds"] is not None and not has_beaten(task),
    ),
    Accepted(
        "payload_hash",
        "the payload is not here to be compared with",
        lambda task, value, rows: value is None or is_digest(value),
    ),
    Accepted(
        "timeout_seconds",
        "a task that never started has no deadline that would show it",
        lambda task, value, rows: (
            task["started_at"] is None
            and ((is_time(value) and value >= 0) or (value is None and task["expects_heartbeat"] == 1))
        ),
    ),
    Accepted(
        "updated_at",
        "a heartbeat makes no event, so only the row says when the last one was",
        lambda task, value, rows: (
            task["status"] == "running" and has_beaten(task) and is_time(value) and value >= task["started_at"]
        ),
    ),
    Accepted(
        "version",
        "a heartbeat makes no event, so only the version says how many there were",
        lambda task, value, rows: (
            type(value) is int
            and task["started_at"] is not None
            and task["expects_heartbeat"] == 1
            and value >= transitions(task)
            and (value > 1 or task["updated_at"] == task["started_at"])
        ),
    ),
)


def is_accepted(column: str, task: Row, value: Any, rows: list[Row]) -> bool:
    return any(accepted.column == column and accepted.applies(task, value, rows) for accepted in ACCEPTED)


TASK_CASES = [pytest.param(column, id=column) for column in TASK_DAMAGE]
EVENT_CASES = [pytest.param(column, id=column) for column in EVENT_DAMAGE]


def test_the_tables_of_damage_cover_every_column() -> None:
    assert set(TASK_DAMAGE) == {column.name for column in tasks.c}
    assert set(EVENT_DAMAGE) == {column.name for column in task_events.c}


def test_a_ledger_with_every_kind_of_task_is_healthy(crowd: tuple[Patient, dict[str, str]]) -> None:
    patient, kinds = crowd
    report = patient.report()
    assert report["healthy"]
    assert found(report) == {}
    assert report["task_count"] == len(kinds) == sum(report["task_status_counts"].values())
    assert report["event_count"] == len(patient.events())
    assert all(report["task_status_counts"].values())
    assert all(report["delivery_status_counts"].values())
    assert diagnosis(patient.tasks(), patient.events()).disagreement(report) == {}


@pytest.mark.parametrize("column", TASK_CASES)
def test_a_wrong_value_in_a_task_is_seen_wherever_another_fact_contradicts_it(
    ward: tuple[Patient, dict[str, str]], column: str
) -> None:
    patient, kinds = ward
    names = {id: kind for kind, id in kinds.items()}
    rows, events = patient.tasks(), patient.events()
    wrong: list[str] = []
    for turn, case in enumerate(TASK_DAMAGE[column]):
        for row in rows[turn % 7 :: 7] if case.label in NONSENSE else rows:
            value = case.value(row, rows)
            with patient.damaged((f"UPDATE tsg_tasks SET {column} = ? WHERE pk = ?", (value, row["pk"]))) as report:
                after = patient.tasks()
            changed = [new for new in after if new not in rows]
            if not changed:
                continue
            wrong += _judged(
                f"{case.label} in {names[row['id']]}",
                report,
                healthy=is_accepted(column, row, changed[0][column], rows),
                seen_under=case.seen_under,
                disagreement=diagnosis(after, events).disagreement(report),
            )
    assert wrong == []


@pytest.mark.parametrize("column", EVENT_CASES)
def test_a_wrong_value_in_an_event_is_always_seen(ward: tuple[Patient, dict[str, str]], column: str) -> None:
    patient, _ = ward
    tasks, events = patient.tasks(), patient.events()
    shapes: dict[tuple[Any, ...], Row] = {}
    for event in events:
        shapes.setdefault(tuple(event[name] for name in ("number", "kind", "to_status", "code")), event)
    keys = {(event["task_pk"], event["number"]) for event in events}
    wrong: list[str] = []
    for turn, case in enumerate(EVENT_DAMAGE[column]):
        for event in list(shapes.values())[turn % 3 :: 3]:
            value = case.value(event, events)
            damaged = {**event, column: value}
            if column in ("task_pk", "number") and (damaged["task_pk"], damaged["number"]) in keys:
                continue
            damage = f"UPDATE tsg_task_events SET {column} = ? WHERE task_pk = ? AND number = ?"
            with patient.damaged((damage, (value, event["task_pk"], event["number"]))) as report:
                after = patient.events()
            if all(map(same, _flat(events), _flat(after))):
                continue
            wrong += _judged(
                f"{case.label} in {event['number']} {event['to_status']}",
                report,
                healthy=False,
                seen_under=case.seen_under,
                disagreement=diagnosis(tasks, after).disagreement(report),
            )
    assert wrong == []


def _flat(rows: list[Row]) -> list[Any]:
    return [value for row in rows for value in row.values()]


def _judged(
    name: str, report: doctor.Report, *, healthy: bool, seen_under: tuple[str, ...], disagreement: dict[str, Any]
) -> list[str]:
    """What is wrong with a report, in words; nothing where it is right."""
    rose = found(report)
    faults = [
        f"healthy is {report['healthy']}" * (report["healthy"] is not healthy),
        f"not seen under any of {seen_under}" * (not healthy and not any(heading in rose for heading in seen_under)),
        "the schema was put back differently" * (not report["schema_ok"]),
        f"quick_check is {report['quick_check']}" * (report["quick_check"] != "ok"),
        f"found and due differ: {disagreement}" * bool(disagreement),
    ]
    return [f"{name}: {fault}; found {rose}" for fault in faults if fault]


@pytest.mark.parametrize("column", TASK_CASES)
def test_a_wrong_value_is_counted_once_in_each_task_of_a_crowd(
    crowd: tuple[Patient, dict[str, str]], column: str
) -> None:
    patient, _ = crowd
    rows, events = patient.tasks(), patient.events()
    wrong: list[str] = []
    for case in TASK_DAMAGE[column]:
        if column in ("pk", "id") and case.value(rows[0], rows) == case.value(rows[1], rows):
            continue
        damage = [
            (f"UPDATE tsg_tasks SET {column} = ? WHERE pk = ?", (case.value(row, rows), row["pk"])) for row in rows
        ]
        with patient.damaged(*damage) as report:
            after = patient.tasks()
        disagreement = diagnosis(after, events).disagreement(report)
        if disagreement or report["healthy"] is not (not found(report)):
            wrong.append(f"{case.label}: found and due {disagreement}")
    assert wrong == []


@pytest.mark.parametrize("column", EVENT_CASES)
def test_a_wrong_value_in_one_event_of_each_task_of_a_crowd_counts_every_task(
    crowd: tuple[Patient, dict[str, str]], column: str
) -> None:
    patient, _ = crowd
    rows, events = patient.tasks(), patient.events()
    chains: dict[int, list[Row]] = {}
    for event in events:
        chains.setdefault(event["task_pk"], []).append(event)
    wrong: list[str] = []
    for case in EVENT_DAMAGE[column]:
        damage = []
        for key, chain in chains.items():
            event = chain[key % len(chain)]
            value = case.value(event, events)
            if column != "number" or value not in [other["number"] for other in chain]:
                damage.append((value, key, event["number"]))
        if column == "task_pk":
            damage = damage[:1]
        statement = f"UPDATE OR IGNORE tsg_task_events SET {column} = ? WHERE task_pk = ? AND number = ?"
        with patient.damaged(*((statement, parameters) for parameters in damage)) as report:
            after = patient.events()
        due = diagnosis(rows, after)
        if due.disagreement(report) or report["healthy"] is any(due.counts.values()):
            wrong.append(f"{case.label}: found and due {due.disagreement(report)}")
    assert wrong == []


@pytest.mark.parametrize("accepted", [pytest.param(entry, id=entry.reason) for entry in ACCEPTED])
def test_every_accepted_exception_is_met_by_some_damage(
    ward: tuple[Patient, dict[str, str]], accepted: Accepted
) -> None:
    patient, _ = ward
    rows = patient.tasks()
    values = [(row, case.value(row, rows)) for case in TASK_DAMAGE[accepted.column] for row in rows]
    assert any(not same(value, row[accepted.column]) and accepted.applies(row, value, rows) for row, value in values)


def test_a_task_key_cannot_be_null_text_or_doubled(ward: tuple[Patient, dict[str, str]]) -> None:
    patient, _ = ward
    first, second = (row["pk"] for row in patient.tasks()[:2])
    for value in (None, "first", b"1", 1.5, second):
        with pytest.raises(sqlite3.IntegrityError), patient.undone(), lifted(patient.raw):
            patient.raw.execute("UPDATE tsg_tasks SET pk = ? WHERE pk = ?", (value, first))
    assert patient.report()["healthy"]


def test_an_integer_in_a_column_of_times_is_stored_as_the_real_it_is(ward: tuple[Patient, dict[str, str]]) -> None:
    patient, _ = ward
    row = next(row for row in patient.tasks() if row["created_at"] == int(row["created_at"]))
    for value in (int(row["created_at"]), str(int(row["created_at"]))):
        damage = ("UPDATE tsg_tasks SET created_at = ? WHERE pk = ?", (value, row["pk"]))
        with patient.damaged(damage) as report:
            assert report["healthy"]


# -- events lost, doubled, swapped, altered, moved ----------------------------------------------------------

DONE = "(SELECT pk FROM tsg_tasks WHERE delivery_code = 'transport_acknowledged')"
LATE = "(SELECT pk FROM tsg_tasks WHERE delivery_code = 'delivery_grace_expired')"
WAITING = "(SELECT min(pk) FROM tsg_tasks WHERE status = 'queued')"
COPY = "INSERT INTO tsg_task_events SELECT {task}, {number}, kind, from_status, to_status, {time}, code"


def _copy(of: str, *, task: str = "task_pk", number: str = "number", time: str = "occurred_at") -> str:
    return f"{COPY.format(task=task, number=number, time=time)} FROM tsg_task_events WHERE {of}"


SWAP_TIMES = (
    "UPDATE tsg_task_events AS e SET occurred_at = "
    "(SELECT occurred_at FROM tsg_task_events AS o WHERE o.task_pk = e.task_pk AND o.number = 3 - e.number) "
    f"WHERE task_pk = {DONE} AND number IN (1, 2)"
)
TOO_MANY = (
    "WITH RECURSIVE n(i) AS (SELECT 4 UNION ALL SELECT i + 1 FROM n WHERE i < 1003) "
    f"INSERT INTO tsg_task_events SELECT {DONE}, i, 'created', NULL, 'queued', 1000.0, 'created' FROM n"
)

CHAINS: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    **{
        f"event {number} lost": (
            (f"DELETE FROM tsg_task_events WHERE task_pk = {DONE} AND number = {number}",),
            {EVENT: 1},
        )
        for number in range(4)
    },
    "every event of a task lost": ((f"DELETE FROM tsg_task_events WHERE task_pk = {DONE}",), {EVENT: 1}),
    "every event of every task lost": (("DELETE FROM tsg_task_events",), {EVENT: 14}),
    "the first event lost and the last doubled": (
        (
            f"DELETE FROM tsg_task_events WHERE task_pk = {DONE} AND number = 0",
            _copy(f"task_pk = {DONE} AND number = 3", number="4"),
        ),
        {EVENT: 1},
    ),
    **{
        f"event {number} doubled as number {copy}": (
            (_copy(f"task_pk = {DONE} AND number = {number}", number=str(copy)),),
            {EVENT: 1},
        )
        for number, copy in ((0, -1), (0, 4), (1, 4), (2, 4), (3, 4), (3, 5), (3, 32_000), (3, 2**40))
    },
    "the whole chain doubled behind itself": ((_copy(f"task_pk = {DONE}", number="number + 4"),), {EVENT: 1}),
    "a thousand events too many": (
        (
            TOO_MANY,
        ),
        {EVENT: 1},
    ),
    "two events swapped": (
        (
            f"UPDATE tsg_task_events SET number = 9 WHERE task_pk = {DONE} AND number = 1",
            f"UPDATE tsg_task_events SET number = 1 WHERE task_pk = {DONE} AND number = 2",
            f"UPDATE tsg_task_events SET number = 2 WHERE task_pk = {DONE} AND number = 9",
        ),
        {EVENT: 1},
    ),
    "the times of two events swapped": (
        (
            SWAP_TIMES,
        ),
        {EVENT: 1},
    ),
    "the last events of two tasks exchanged": (
        (
            f"UPDATE tsg_task_events SET number = 9 WHERE task_pk = {DONE} AND number = 3",
            f"UPDATE tsg_task_events SET task_pk = {DONE} WHERE task_pk = {LATE} AND number = 3",
            f"UPDATE tsg_task_events SET task_pk = {LATE}, number = 3 WHERE task_pk = {DONE} AND number = 9",
        ),
        {EVENT: 2},
    ),
    "an event moved to another task": (
        (f"UPDATE tsg_task_events SET task_pk = {WAITING} WHERE task_pk = {DONE} AND number = 3",),
        {EVENT: 2},
    ),
    "a start invented for a queued task": (
        (_copy(f"task_pk = {DONE} AND number = 1", task=WAITING),),
        {EVENT: 1},
    ),
    "a wrong last event": (
        (f"UPDATE tsg_task_events SET to_status = 'failed', code = NULL WHERE task_pk = {DONE} AND number = 3",),
        {EVENT: 1},
    ),
    "a gap": ((f"UPDATE tsg_task_events SET number = 4 WHERE task_pk = {DONE} AND number = 3",), {EVENT: 1}),
    "the numbers counted from one": (
        (
            f"UPDATE tsg_task_events SET number = -1 - number WHERE task_pk = {DONE}",
            f"UPDATE tsg_task_events SET number = -number WHERE task_pk = {DONE}",
        ),
        {EVENT: 1},
    ),
    "one event of no task": ((_copy(f"task_pk = {DONE} AND number = 0", task="-7"),), {REFERENCE: 1}),
    "a chain of no task": ((_copy(f"task_pk = {DONE}", task="987654"),), {REFERENCE: 4}),
    "a task lost, its events left": ((f"DELETE FROM tsg_tasks WHERE pk = {DONE}",), {REFERENCE: 4}),
    "every task lost, their events left": (("DELETE FROM tsg_tasks",), {REFERENCE: 33}),
    "a parent lost with its events": (
        (
            "DELETE FROM tsg_task_events WHERE task_pk = 1",
            "DELETE FROM tsg_tasks WHERE pk = 1",
        ),
        {REFERENCE: 2, ORPHAN: 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_a_history_that_is_not_the_tasks_own_is_counted(ward: tuple[Patient, dict[str, str]], name: str) -> None:
    patient, _ = ward
    statements, expected = CHAINS[name]
    with patient.damaged(*statements) as report:
        assert found(report) == expected
        assert not report["healthy"]
        assert diagnosis(patient.tasks(), patient.events()).disagreement(report) == {}
        assert (report["task_count"], report["event_count"]) == (len(patient.tasks()), len(patient.events()))


def test_a_task_is_counted_under_every_heading_that_it_offends(ward: tuple[Patient, dict[str, str]]) -> None:
    patient, _ = ward
    with patient.damaged(
        f"UPDATE tsg_tasks SET payload_hash = 'x', deadline_at = 5.0, terminal_code = NULL WHERE pk = {DONE}"
    ) as report:
        assert found(report) == {STATE: 1, TIMESTAMP: 1, EVENT: 1}


@pytest.mark.parametrize("value", ["yesterday", b"\x00", math.inf, -math.inf])
def test_a_parent_whose_time_is_none_is_not_held_against_its_children(
    ward: tuple[Patient, dict[str, str]], value: object
) -> None:
    patient, kinds = ward
    damage = ("UPDATE tsg_tasks SET created_at = ? WHERE id = ?", (value, kinds["parent queued"]))
    with patient.damaged(damage) as report:
        assert found(report) == {TIMESTAMP: 1, EVENT: 1}


def test_a_child_older_than_its_parent_is_counted_however_consistent_its_own_history_is(
    ward: tuple[Patient, dict[str, str]],
) -> None:
    patient, _ = ward
    child, parent = next(
        (row, other)
        for row in patient.tasks()
        for other in patient.tasks()
        if row["parent_id"] == other["id"] and row["status"] == "queued"
    )
    for shift, expected in ((0.0, {}), (-1e-9, {TIMESTAMP: 1})):
        moment = parent["created_at"] + shift
        with patient.damaged(
            (
                "UPDATE tsg_tasks SET created_at = ?, updated_at = ?, delivery_updated_at = ? WHERE pk = ?",
                (moment, moment, moment, child["pk"]),
            ),
            ("UPDATE tsg_task_events SET occurred_at = ? WHERE task_pk = ?", (moment, child["pk"])),
        ) as report:
            assert found(report) == expected


def test_hand_written_text_in_a_time_column_is_counted_and_its_neighbours_are_judged_rightly(
    path: Path, ledger: Ledger, clock: FakeClock
) -> None:
    ids = [ledger.create_task(timeout_seconds=5).id for _ in range(5)]
    for id in ids:
        ledger.start_task(id)
    connection = raw(path)
    with lifted(connection):
        connection.execute("UPDATE tsg_tasks SET updated_at = '2024-01-01 10:00:00' WHERE id = ?", (ids[1],))
        connection.execute("UPDATE tsg_tasks SET deadline_at = 'tomorrow' WHERE id = ?", (ids[3],))
    connection.close()
    report = ledger.doctor()
    assert found(report) == {TIMESTAMP: 2}
    assert report["quick_check"] == "ok"
    assert report["task_count"] == report["task_status_counts"]["running"] == 5
    for id in (ids[0], ids[2], ids[4]):
        assert ledger.heartbeat(id).version == 2
    for id in (ids[1], ids[3]):
        with pytest.raises(StateConflict):
            ledger.heartbeat(id)
    assert found(ledger.doctor()) == {TIMESTAMP: 2}


# -- parents ------------------------------------------------------------------------------------------------

NEW_TASKS = (
    "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {count}) "
    "INSERT INTO tsg_tasks (id, status, delivery_status, delivery_required, expects_heartbeat, created_at, "
    "updated_at, delivery_updated_at, version) "
    "SELECT printf('00000000-0000-4000-8000-%012x', i), 'queued', 'pending', 1, 1, 5.0, 5.0, 5.0, 0 FROM n"
)
THEIR_EVENTS = (
    "INSERT INTO tsg_task_events SELECT pk, 0, 'created', NULL, 'queued', created_at, 'created' FROM tsg_tasks "
    "WHERE id LIKE '00000000-0000-4000-8000-%'"
)


def _family(count: int, parents: dict[int, int]) -> list[str | tuple[str, tuple[str, str]]]:
    """Statements that add so many tasks, and make the one the child of the other."""
    name = "00000000-0000-4000-8000-{:012x}".format
    return [
        NEW_TASKS.format(count=count),
        THEIR_EVENTS,
        *(
            ("UPDATE tsg_tasks SET parent_id = ? WHERE id = ?", (name(parent), name(child)))
            for child, parent in parents.items()
        ),
    ]


def _ring(members: list[int]) -> dict[int, int]:
    return dict(zip(members, members[1:] + members[:1], strict=True))


FAMILIES: dict[str, tuple[int, dict[int, int], int]] = {
    "a chain downwards": (50, {child: child - 1 for child in range(1, 50)}, 0),
    "a chain upwards": (50, {child: child + 1 for child in range(49)}, 0),
    "a tree": (200, {child: child // 2 for child in range(1, 200)}, 0),
    "a tree whose children are recorded first": (200, {199 - child: 199 - child // 2 for child in range(1, 200)}, 0),
    **{f"a cycle of {length}": (length, _ring(list(range(length))), 1) for length in range(1, 6)},
    **{f"a cycle of {length} backwards": (length, _ring(list(range(length))[::-1]), 1) for length in range(2, 6)},
    "two cycles": (7, _ring([0, 1, 2]) | _ring([6, 3, 5, 4]), 2),
    "five cycles of each length": (15, _ring([0]) | _ring([1, 2]) | _ring([3, 4, 5]) | _ring([6, 7, 8, 9])
                                   | _ring([14, 10, 13, 11, 12]), 5),
    "a hundred tasks that are their own parents": (100, {child: child for child in range(100)}, 100),
    "a cycle with descendants": (20, _ring([4, 9, 2]) | {5: 4, 14: 9, 10: 4, 11: 4, 12: 9, 13: 10, 15: 13, 16: 2}, 1),
    "a cycle with a long tail upwards": (300, _ring([298, 299]) | {child: child + 1 for child in range(298)}, 1),
    "a cycle with a long tail downwards": (300, _ring([0, 1]) | {child: child - 1 for child in range(2, 300)}, 1),
    "two cycles with tails beside a chain": (120, _ring([0, 1, 2]) | _ring([50, 40]) | {3: 2, 4: 3, 41: 40, 30: 41}
                                             | {child: child - 1 for child in range(61, 120)}, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_cycles_of_parents_are_counted_not_their_members_or_descendants(
    ward: tuple[Patient, dict[str, str]], name: str
) -> None:
    patient, _ = ward
    count, parents, expected = FAMILIES[name]
    with patient.damaged(*_family(count, parents)) as report:
        assert report["parent_cycle_count"] == expected
        assert report["healthy"] is (expected == 0)
        assert found(report) == {
            heading: number
            for heading, number in {CYCLE: expected, STATE: sum(map(int.__eq__, parents, parents.values()))}.items()
            if number
        }


def test_cycles_among_random_parents_are_counted_as_by_walking_them(ward: tuple[Patient, dict[str, str]]) -> None:
    patient, _ = ward
    for seed in range(25):
        chance = random.Random(seed)
        count = chance.randrange(1, 40)
        parents = {child: chance.randrange(count) for child in range(count) if chance.random() < 0.9}
        with patient.damaged(*_family(count, parents)) as report:
            assert report["parent_cycle_count"] == cycles(patient.tasks()), seed


def _ring_at_random(count: int) -> dict[int, int]:
    members = list(range(count))
    random.Random(count).shuffle(members)
    return _ring(members)


LARGE: dict[str, tuple[int, dict[int, int], dict[str, int]]] = {
    "a cycle of 3,000": (3_000, _ring_at_random(3_000), {CYCLE: 1}),
    "a cycle of 5,000": (5_000, _ring_at_random(5_000), {CYCLE: 1}),
    "a chain of 5,000 with the children recorded first": (5_000, {child: child + 1 for child in range(4_999)}, {}),
    "a thousand cycles of 5": (5_000, {child: child // 5 * 5 + (child + 2) % 5 for child in range(5_000)},
                               {CYCLE: 1_000}),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_cycles_among_thousands_are_found_in_seconds(ward: tuple[Patient, dict[str, str]], name: str) -> None:
    patient, _ = ward
    count, parents, expected = LARGE[name]
    with patient.undone():
        with lifted(patient.raw):
            for statement in _family(count, parents):
                patient.raw.execute(*((statement,) if isinstance(statement, str) else statement))
        before = time.monotonic()
        report = patient.report()
        assert time.monotonic() - before < 10
    assert found(report) == expected


def test_a_task_whose_parent_is_missing_is_an_orphan_and_a_broken_reference(
    ward: tuple[Patient, dict[str, str]],
) -> None:
    patient, _ = ward
    name = "00000000-0000-4000-8000-{:012x}".format
    with patient.damaged(
        *_family(4, {2: 1, 3: 2}),
        ("UPDATE tsg_tasks SET parent_id = ? WHERE id IN (?, ?)", (name(99), name(0), name(1))),
    ) as report:
        assert found(report) == {ORPHAN: 2, REFERENCE: 2}


# -- the schema ---------------------------------------------------------------------------------------------

TABLES = ("tsg_tasks", "tsg_task_events")
INDEXES = ("ix_tsg_tasks_active", "ix_tsg_tasks_delivery_pending", "ix_tsg_tasks_parent_id")
CHECKS = [f"ck_tsg_tasks_{rule.name}" for rule in task_rules(tasks.c)] + [
    f"ck_tsg_task_events_{rule.name}" for rule in event_rules(task_events.c)
]
OTHER_CONSTRAINTS = {
    "uq_tsg_tasks_id": "UNIQUE (id)",
    "fk_tsg_tasks_parent_id": "FOREIGN KEY(parent_id) REFERENCES tsg_tasks (id)",
    "fk_tsg_task_events_task_pk": "FOREIGN KEY(task_pk) REFERENCES tsg_tasks (pk) ON DELETE CASCADE",
}

ADDED = {
    "an index of ours": "CREATE INDEX tsg_extra ON tsg_tasks (version)",
    "somebody's index on a table of ours": "CREATE INDEX extra ON tsg_tasks (version)",
    "somebody's unique index on a table of ours": "CREATE UNIQUE INDEX extra ON tsg_task_events (task_pk, number)",
    "a trigger of ours": "CREATE TRIGGER tsg_extra AFTER INSERT ON tsg_tasks BEGIN SELECT 1; END",
    "somebody's trigger on a table of ours": "CREATE TRIGGER extra AFTER DELETE ON tsg_tasks BEGIN SELECT 1; END",
    "a column of a task": "ALTER TABLE tsg_tasks ADD COLUMN prompt TEXT",
    "a column of an event": "ALTER TABLE tsg_task_events ADD COLUMN note TEXT",
    "a column of the version table": "ALTER TABLE tsg_alembic_version ADD COLUMN note TEXT",
    "a table of ours": "CREATE TABLE tsg_extra (x)",
    "a table of ours in capitals": "CREATE TABLE TSG_EXTRA (x)",
    "a view of ours": "CREATE VIEW tsg_extra AS SELECT 1",
}


@pytest.mark.parametrize("statement", ADDED.values(), ids=ADDED)
def test_anything_added_to_the_schema_is_seen(ward: tuple[Patient, dict[str, str]], statement: str) -> None:
    patient, _ = ward
    with patient.altered(statement) as report:
        assert_refused(report)
        assert report["schema_version"] == 4


def _without(patient: Patient, name: str) -> tuple[str, ...]:
    """Statements that take a named constraint out of a table's definition."""
    table = "tsg_task_events" if "task_events" in name else "tsg_tasks"
    lines = patient.schema("table")[table].splitlines(keepends=True)
    (at,) = (at for at, line in enumerate(lines) if f"CONSTRAINT {name} " in line)
    previous, line = lines[at - 1], lines[at]
    if line.rstrip().endswith(","):
        return rewritten(table, line, "")
    return rewritten(table, previous + line, previous.rstrip().removesuffix(",") + "\n")


@pytest.mark.parametrize("name", [*CHECKS, "fk_tsg_tasks_parent_id", "fk_tsg_task_events_task_pk"])
def test_a_missing_constraint_is_seen(ward: tuple[Patient, dict[str, str]], name: str) -> None:
    patient, _ = ward
    with patient.altered(*_without(patient, name)) as report:
        assert not any(f"CONSTRAINT {name} " in sql for sql in patient.schema("table").values())
        assert_refused(report)


@pytest.mark.parametrize("name", CHECKS)
def test_a_weakened_check_is_seen(ward: tuple[Patient, dict[str, str]], name: str) -> None:
    patient, _ = ward
    table = "tsg_task_events" if "task_events" in name else "tsg_tasks"
    weaker = rewritten(table, f"CONSTRAINT {name} CHECK (", f"CONSTRAINT {name} CHECK (1 OR ")
    with patient.altered(*weaker) as report:
        assert "(1 OR " in patient.schema("table")[table]
        assert_refused(report)


def test_an_unnamed_check_more_is_seen(ward: tuple[Patient, dict[str, str]]) -> None:
    patient, _ = ward
    added = rewritten("tsg_tasks", "version INTEGER NOT NULL", "version INTEGER NOT NULL CHECK (version < 5000)")
    with patient.altered(*added) as report:
        assert_refused(report)


def test_a_column_that_may_be_null_where_it_must_not_is_seen(ward: tuple[Patient, dict[str, str]]) -> None:
    patient, _ = ward
    for table in TABLES:
        for line in patient.schema("table")[table].splitlines():
            if line.rstrip(" ,").endswith("NOT NULL") and "CHECK" not in line:
                name = line.split()[0]
                with patient.altered(*rewritten(table, line, line.replace(" NOT NULL", ""))) as report:
                    assert not report["schema_ok"], (table, name)
                    assert not report["healthy"]


@pytest.mark.parametrize("name", INDEXES)
def test_a_missing_or_another_index_is_seen(ward: tuple[Patient, dict[str, str]], name: str) -> None:
    patient, _ = ward
    stored = patient.schema("index")
    assert set(stored) == set(INDEXES)
    for other in (
        None,
        stored[name].split(" WHERE ")[0],
        stored[name].replace(" WHERE ", " WHERE 1 AND "),
        stored[name].replace(") WHERE", " DESC) WHERE"),
        stored[name].replace("(", "(version, ", 1),
        stored[name].replace(name, f"{name}_2"),
        stored[name].replace("CREATE INDEX", "CREATE UNIQUE INDEX").replace("(", "(pk, ", 1),
    ):
        with patient.altered(f"DROP INDEX {name}", *([other] if other else [])) as report:
            assert_refused(report)
    with patient.altered(f"DROP INDEX {name}", stored[name]) as report:
        assert report["healthy"]


@pytest.mark.parametrize("name", [guard.name for guard in GUARDS if guard.sqlite])
def test_a_missing_or_another_trigger_is_seen(ward: tuple[Patient, dict[str, str]], name: str) -> None:
    patient, _ = ward
    stored = patient.schema("trigger")
    assert set(stored) == {guard.name for guard in GUARDS if guard.sqlite}
    for other in (
        None,
        re.sub(r" WHEN (.*) BEGIN ", r" WHEN 0 AND (\1) BEGIN ", stored[name], count=1),
        stored[name].replace("RAISE(ABORT, ", "RAISE(IGNORE), max(", 1).replace("')", "', 0)"),
        stored[name].replace(name, f"{name}_2", 1),
        stored[name].replace(" BEFORE ", " AFTER ", 1),
        stored[name].replace("DELETE FROM", "SELECT * FROM", 1),
    ):
        if other == stored[name]:
            continue
        with patient.altered(f"DROP TRIGGER {name}", *([other] if other else [])) as report:
            assert_refused(report)
    with patient.altered(f"DROP TRIGGER {name}", stored[name]) as report:
        assert report["healthy"]


@pytest.mark.parametrize("column", ["payload_hash", "delivery_code", "deadline_at", "version"])
def test_a_renamed_column_is_seen(ward: tuple[Patient, dict[str, str]], column: str) -> None:
    patient, _ = ward
    with patient.altered(f"ALTER TABLE tsg_tasks RENAME COLUMN {column} TO other") as report:
        assert_refused(report)


@pytest.mark.parametrize(("table", "column"), [("tsg_tasks", "payload_hash"), ("tsg_task_events", "code")])
def test_a_missing_column_is_seen(ward: tuple[Patient, dict[str, str]], table: str, column: str) -> None:
    patient, _ = ward
    kept = ", ".join(c.name for c in (tasks if table == "tsg_tasks" else task_events).c if c.name != column)
    triggers = [f"DROP TRIGGER {guard.name}" for guard in GUARDS if guard.sqlite]
    with patient.altered(
        *triggers,
        f"CREATE TABLE kept AS SELECT {kept} FROM {table}",
        f"DROP TABLE {table}",
        f"ALTER TABLE kept RENAME TO {table}",
    ) as report:
        assert_refused(report)


@pytest.mark.parametrize("dropped", [("tsg_tasks",), ("tsg_task_events",), TABLES, ("tsg_alembic_version",)])
def test_a_missing_table_is_seen(ward: tuple[Patient, dict[str, str]], dropped: tuple[str, ...]) -> None:
    patient, _ = ward
    with patient.altered(*(f"DROP TABLE {table}" for table in dropped)) as report:
        assert_refused(report)
        assert report["schema_version"] == (0 if dropped == ("tsg_alembic_version",) else 4)


def test_a_table_with_its_unique_ids_taken_away_is_seen(ward: tuple[Patient, dict[str, str]]) -> None:
    patient, _ = ward
    definition = re.sub(r"\s*CONSTRAINT uq_tsg_tasks_id UNIQUE \(id\),", "", patient.schema("table")["tsg_tasks"])
    rest = [*patient.schema("index").values(), *patient.schema("trigger").values()]
    with patient.altered(
        "CREATE TABLE kept AS SELECT * FROM tsg_tasks",
        *(f"DROP TRIGGER {guard.name}" for guard in GUARDS if guard.sqlite),
        "DROP TABLE tsg_tasks",
        definition,
        "INSERT INTO tsg_tasks SELECT * FROM kept",
        "DROP TABLE kept",
        *rest,
    ) as report:
        assert_refused(report)


VERSIONS: dict[str, tuple[str, int]] = {
    "none": ("DELETE FROM tsg_alembic_version", 0),
    "an older": ("UPDATE tsg_alembic_version SET version_num = '0003'", 3),
    "a newer": ("UPDATE tsg_alembic_version SET version_num = '0099'", 99),
    "a host's own": ("UPDATE tsg_alembic_version SET version_num = 'abc'", 0),
    "empty": ("UPDATE tsg_alembic_version SET version_num = ''", 0),
    "with a NUL": ("UPDATE tsg_alembic_version SET version_num = '0004' || char(0)", 0),
    "a blob": ("UPDATE tsg_alembic_version SET version_num = CAST('0004' AS BLOB)", 0),
    "two": ("INSERT INTO tsg_alembic_version VALUES ('0003')", 0),
    "no text": ("UPDATE tsg_alembic_version SET version_num = CAST(x'ff' AS TEXT)", 0),
    "another spelling": ("UPDATE tsg_alembic_version SET version_num = '4'", 4),
}


@pytest.mark.parametrize("name", VERSIONS)
def test_another_version_row_is_seen(ward: tuple[Patient, dict[str, str]], name: str) -> None:
    patient, _ = ward
    statement, number = VERSIONS[name]
    with patient.altered(statement) as report:
        assert_refused(report)
        assert report["schema_version"] == number


def test_a_version_of_more_digits_than_python_reads_is_seen(ward: tuple[Patient, dict[str, str]]) -> None:
    patient, _ = ward
    with patient.altered(f"UPDATE tsg_alembic_version SET version_num = '{'9' * 5000}'") as report:
        assert not report["healthy"]
        assert not report["schema_ok"]


def test_a_doubled_version_row_is_seen(ward: tuple[Patient, dict[str, str]]) -> None:
    patient, _ = ward
    with patient.altered(
        "DROP TABLE tsg_alembic_version",
        "CREATE TABLE tsg_alembic_version (version_num VARCHAR(32) NOT NULL)",
        "INSERT INTO tsg_alembic_version VALUES ('0004'), ('0004')",
    ) as report:
        assert_refused(report)


def test_an_empty_database_and_a_database_of_other_tables_are_no_ledgers() -> None:
    origin = sqlite3.connect(":memory:")
    for statement in ("SELECT 1", "CREATE TABLE tasks (id)"):
        origin.execute(statement)
        patient = Patient(origin)
        report = patient.report()
        patient.close()
        assert_refused(report)
        assert report["schema_version"] == 0
    origin.close()


@pytest.mark.parametrize("name", ["v1", "v2", "v1-unsafe-reason"])
def test_a_file_of_the_published_package_is_no_ledger_yet(legacy: Callable[[str], Path], name: str) -> None:
    report = examine_file(legacy(name))
    assert_refused(report)
    assert report["schema_version"] == int(name[1])


NEIGHBOURS = {
    "the application's own tasks": ("CREATE TABLE tasks (id INTEGER PRIMARY KEY, title TEXT NOT NULL)",),
    "tables named as the published ones": ("CREATE TABLE tasks (x)", "CREATE TABLE task_events (x)"),
    "a host's version table": (
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)",
        "INSERT INTO alembic_version VALUES ('abc')",
    ),
    "a reference to ours": (
        "CREATE TABLE mine (task INTEGER REFERENCES tsg_tasks (pk))",
        "INSERT INTO mine VALUES (1)",
    ),
    "a view on ours": ("CREATE VIEW open_tasks AS SELECT * FROM tsg_tasks WHERE ended_at IS NULL",),
    "names that only resemble ours": ("CREATE TABLE tsgtasks (x)", "CREATE TABLE my_tsg_tasks (tsg_x)"),
    "a trigger of a neighbour that writes to ours": (
        "CREATE TABLE mine (x)",
        "CREATE TRIGGER mine_too AFTER INSERT ON mine BEGIN UPDATE tsg_tasks SET version = version WHERE 0; END",
    ),
    "statistics": ("ANALYZE",),
    "a user_version": ("PRAGMA user_version = 77",),
    "an application_id": ("PRAGMA application_id = 77",),
    "a neighbour's row that breaks its CHECK": (
        "CREATE TABLE mine (x CHECK (x > 0))",
        "PRAGMA ignore_check_constraints = ON",
        "INSERT INTO mine VALUES (-1)",
        "PRAGMA ignore_check_constraints = OFF",
    ),
}  # fmt: skip


@pytest.mark.parametrize("statements", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_what_the_application_does_beside_us_is_healthy(
    ward: tuple[Patient, dict[str, str]], statements: tuple[str, ...]
) -> None:
    patient, _ = ward
    with patient.altered(*statements) as report:
        assert report["healthy"]
        assert report["schema_ok"]
        assert report["schema_version"] == 4
        assert report["task_count"] == 14


def test_a_file_that_was_vacuumed_and_analysed_is_healthy(path: Path, clock: FakeClock) -> None:
    with Ledger(path, clock=clock) as ledger:
        some_kinds(ledger, clock)
    connection = raw(path)
    connection.execute("ANALYZE")
    connection.execute("VACUUM")
    connection.execute("REINDEX")
    connection.close()
    with Ledger(path) as ledger:
        assert ledger.doctor()["healthy"]


# -- the file -----------------------------------------------------------------------------------------------


def test_rows_that_fail_checks_or_hold_null_leave_the_file_itself_ok(ward: tuple[Patient, dict[str, str]]) -> None:
    patient, _ = ward
    with patient.damaged(
        "UPDATE tsg_tasks SET status = NULL, updated_at = NULL, version = 'x', payload_hash = 'x', id = upper(id)",
        "UPDATE tsg_task_events SET kind = NULL, to_status = NULL, occurred_at = NULL",
    ) as report:
        assert report["quick_check"] == "ok"
        assert report["schema_ok"]
        assert (report[STATE], report[TIMESTAMP], report[EVENT]) == (14, 14, 14)  # type: ignore[literal-required]
    assert patient.report()["healthy"]


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A ledger's file of several dozen pages, closed cleanly, every one of them in use."""
    folder = tmp_path_factory.mktemp("pages")
    folder.chmod(0o700)
    path = folder / "ledger.sqlite"
    Ledger(path).close()
    connection = raw(path)
    connection.execute(NEW_TASKS.format(count=400))
    connection.execute(THEIR_EVENTS)
    connection.execute("VACUUM")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path.read_bytes()


def _verdict(path: Path) -> doctor.Report | None:
    """Doctor's report on a file, or nothing where it is one clear refusal."""
    try:
        return examine_file(path)
    except LedgerError:
        return None


OVERWRITTEN = {
    "zeros": lambda chance, page: bytes(len(page)),
    "ones": lambda chance, page: b"\xff" * len(page),
    "noise": lambda chance, page: chance.randbytes(len(page)),
}


@pytest.mark.parametrize("pattern", OVERWRITTEN)
def test_a_file_with_any_page_overwritten_is_never_healthy(path: Path, sound_file: bytes, pattern: str) -> None:
    size = 4096
    chance = random.Random(11)
    for start in range(0, len(sound_file), size):
        damaged = bytearray(sound_file)
        damaged[start : start + size] = OVERWRITTEN[pattern](chance, damaged[start : start + size])
        path.write_bytes(damaged)
        path.chmod(0o600)
        report = _verdict(path)
        if report is not None:
            assert not report["healthy"], start // size
            assert report["quick_check"] == "failed", start // size
        assert path.read_bytes() == damaged
        for sidecar in path.parent.glob("ledger.sqlite-*"):
            sidecar.unlink()


@pytest.mark.parametrize("kept", [0.9, 0.5, 0.1, 0.01])
def test_a_truncated_file_is_never_healthy_and_nothing_is_made_anew(path: Path, sound_file: bytes, kept: float) -> None:
    for cut in (int(len(sound_file) * kept), int(len(sound_file) * kept) // 4096 * 4096 or 4096):
        path.write_bytes(sound_file[:cut])
        path.chmod(0o600)
        report = _verdict(path)
        assert report is None or (not report["healthy"] and report["quick_check"] == "failed")
        assert path.read_bytes() == sound_file[:cut]
        for sidecar in path.parent.glob("ledger.sqlite-*"):
            sidecar.unlink()


@pytest.mark.parametrize(
    "content", [b"", b"SQLite format 3\0", b"no database at all" * 500], ids=["empty", "cut", "text"]
)
def test_what_is_no_ledger_file_is_told_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o600)
    report = _verdict(path)
    assert report is None or (not report["healthy"] and not report["schema_ok"] and report["task_count"] == 0)
    assert path.read_bytes() == content


def test_a_damaged_ledger_opened_for_writing_is_a_conflict_or_a_report_and_never_made_anew(
    path: Path, sound_file: bytes
) -> None:
    for start in range(0, len(sound_file), 4096):
        damaged = bytearray(sound_file)
        damaged[start : start + 4096] = b"\xff" * 4096
        path.write_bytes(damaged)
        path.chmod(0o600)
        try:
            with Ledger(path) as ledger:
                assert not ledger.doctor()["healthy"], start // 4096
        except StateConflict:
            pass
        assert path.read_bytes() == damaged, start // 4096
        for sidecar in path.parent.glob("ledger.sqlite-*"):
            sidecar.unlink()


# -- many writers, many tasks, old times --------------------------------------------------------------------


def test_twenty_writers_on_one_task_leave_a_clean_chain(path: Path) -> None:
    with Ledger(path, busy_timeout_ms=60_000) as ledger:
        task = ledger.create_task(timeout_seconds=3600).id
    ready = threading.Barrier(20)
    unexpected: list[BaseException] = []

    def write(number: int) -> None:
        try:
            with Ledger(path, busy_timeout_ms=60_000) as own:
                ready.wait(60)
                for verb in (
                    lambda: own.start_task(task),
                    lambda: own.heartbeat(task),
                    lambda: own.close_task(task, list(REASONS)[number % 4]),
                    lambda: own.set_delivery(task, ("delivered", "failed")[number % 2]),
                ):
                    try:
                        verb()
                    except StateConflict:
                        pass
        except BaseException as error:
            unexpected.append(error)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(20)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert unexpected == []
    with Ledger(path) as ledger:
        report = ledger.doctor()
        assert report["healthy"]
        assert (report["task_count"], report["event_count"]) == (1, 4)
        stored = ledger.get_task(task)
    connection = raw(path)
    history = connection.execute("SELECT number, kind, to_status FROM tsg_task_events ORDER BY number").fetchall()
    connection.close()
    assert history == [
        (0, "created", "queued"),
        (1, "task_transition", "running"),
        (2, "task_transition", stored.status.value),
        (3, "delivery_transition", stored.delivery_status.value),
    ]


Life = tuple[TaskRecord, list[Event]]


def _life(chance: random.Random, clock: FakeClock, parent: str | None) -> Life:
    """A task that has done what a task may do, by chance, and its history."""
    timeout = chance.choice((None, None, 0.0, chance.uniform(0, 1e4), 10.0 ** chance.randrange(-3, 9)))
    task = creation(
        task_id=uuid.UUID(int=chance.getrandbits(128)),
        parent_id=parent,
        payload_hash=f"{chance.getrandbits(256):064x}" if chance.random() < 0.3 else None,
        timeout_seconds=timeout,
        delivery_required=chance.random() < 0.6,
        expects_heartbeat=timeout is None or chance.random() < 0.7,
    )
    now = clock()
    task = replace(task, created_at=now, updated_at=now, delivery_updated_at=now)
    verbs: list[tuple[Any, ...]] = []
    life = chance.random()
    if chance.random() < 0.7:
        verbs += [(Verb.START, None, None)] + [(Verb.HEARTBEAT, None, None)] * chance.choice((0, 0, 1, 2, 5))
    if life > 0.3:
        status = chance.choice(list(TERMINAL))
        verbs.append((Verb.CLOSE, status, chance.choice((None, *REASONS[status.value]))))
    if life > 0.5:
        ends = (DeliveryStatus.DELIVERED, DeliveryStatus.FAILED)
        delivery = chance.choice(ends) if task.delivery_required else DeliveryStatus.NOT_APPLICABLE
        verbs.append((Verb.DELIVER, delivery, chance.choice((None, *DELIVERY_REASONS[delivery.value]))))
    history = [created(now)]
    for verb, to, code in verbs:
        clock.advance(chance.choice((0.0, chance.expovariate(1.0), chance.random() * 1e-6)))
        change = transition(task, verb, clock, to=to, code=code)
        assert change is not None
        task = replace(task, version=task.version + 1, **change.values)
        history += [change.event] if change.event else []
    return task, history


def test_ten_thousand_random_tasks_are_healthy(path: Path) -> None:
    Ledger(path).close()
    chance = random.Random(10_000)
    clock = FakeClock(1_700_000_000.0)
    lives: list[Life] = []
    for _ in range(10_000):
        parent = chance.choice(lives)[0].id if lives and chance.random() < 0.2 else None
        lives.append(_life(chance, clock, parent))
    connection = raw(path)
    connection.execute("BEGIN")
    fields = list(vars(lives[0][0]))
    connection.executemany(
        f"INSERT INTO tsg_tasks (pk, {', '.join(fields)}) VALUES (?{', ?' * len(fields)})",
        [(key, *vars(task).values()) for key, (task, _) in enumerate(lives)],
    )
    connection.executemany(
        "INSERT INTO tsg_task_events VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(key, *event) for key, (_, history) in enumerate(lives) for event in history],
    )
    connection.execute("COMMIT")
    connection.close()
    with Ledger(path) as ledger:
        report = ledger.doctor()
    assert found(report) == {}
    assert report["healthy"]
    assert report["task_count"] == 10_000
    assert min(report["task_status_counts"].values()) > 500
    assert min(report["delivery_status_counts"].values()) > 500


@pytest.mark.parametrize("now", [0.0, -2_000_000_000.0, 1e-300, 1_000_000_000.1, 32_503_680_000.0, 1e15])
def test_a_consistent_history_is_healthy_however_old_or_new(path: Path, now: float) -> None:
    clock = FakeClock(now)
    with Ledger(path, clock=clock) as ledger:
        kinds = some_kinds(ledger, clock)
        report = ledger.doctor()
    assert report["healthy"]
    assert report["task_count"] == len(kinds)


# -- the report, and how doctor is called -------------------------------------------------------------------


def test_the_report_has_the_keys_of_the_specification_in_plain_types_and_no_id(
    ward: tuple[Patient, dict[str, str]],
) -> None:
    patient, kinds = ward
    with patient.damaged("UPDATE tsg_tasks SET payload_hash = 'a secret' WHERE pk = 2") as damaged:
        pass
    for report in (patient.report(), damaged):
        assert set(report) == KEYS
        assert {type(report["healthy"]), type(report["schema_ok"])} == {bool}
        assert type(report["quick_check"]) is str
        counts = {key: value for key, value in report.items() if key not in ("healthy", "schema_ok", "quick_check")}
        assert set(counts.pop("task_status_counts")) == {"queued", "running", *REASONS}  # type: ignore[call-overload]
        assert set(counts.pop("delivery_status_counts")) == {"pending", *DELIVERY_REASONS}  # type: ignore[call-overload]
        assert {type(value) for value in counts.values()} == {int}
        for by_status in (report["task_status_counts"], report["delivery_status_counts"]):
            assert {type(name) for name in by_status} == {str}
            assert {type(value) for value in by_status.values()} == {int}
        text = json.dumps(report)
        assert json.loads(text) == report
        assert not any(id in text for id in kinds.values())
        assert "secret" not in text


def test_doctor_leaves_every_byte_of_a_ledger_opened_read_only(path: Path, folder: Path, clock: FakeClock) -> None:
    with Ledger(path, clock=clock) as ledger:
        some_kinds(ledger, clock)
    before = snapshot(folder)
    with Ledger(path, read_only=True) as ledger:
        assert ledger.doctor()["healthy"]
        assert ledger.doctor()["task_count"] == 14
    assert snapshot(folder) == before


def test_doctor_writes_nothing_to_a_ledger_in_use(path: Path, folder: Path, ledger: Ledger, clock: FakeClock) -> None:
    some_kinds(ledger, clock)
    with Ledger(path, read_only=True) as reading:
        before = {name: entry for name, entry in snapshot(folder).items() if not name.endswith("-shm")}
        assert reading.doctor()["healthy"]
        assert ledger.doctor()["healthy"]
        after = {name: entry for name, entry in snapshot(folder).items() if not name.endswith("-shm")}
    assert after == before


def test_doctor_of_an_altered_ledger_can_be_had_read_only(path: Path, clock: FakeClock) -> None:
    with Ledger(path, clock=clock) as ledger:
        some_kinds(ledger, clock)
    connection = raw(path)
    connection.execute("DROP TRIGGER tsg_tasks_status_guard")
    connection.close()
    with Ledger(path, read_only=True) as ledger:
        assert_refused(ledger.doctor())
    assert_refused(examine_file(path))


def test_doctor_takes_a_connection_or_a_session_in_their_own_transaction(path: Path, clock: FakeClock) -> None:
    with Ledger(path, clock=clock) as ledger:
        some_kinds(ledger, clock)
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        assert doctor.examine(connection)["task_count"] == 14
    with Session(engine, info={"tsg_clock": clock}) as session:
        session.add(Task())
        report = doctor.examine(session)
        assert report["healthy"]
        assert report["task_count"] == 15
        session.rollback()
        assert doctor.examine(session)["task_count"] == 14
    engine.dispose()


@pytest.mark.parametrize("ignored", [0, 1])
def test_doctor_gives_a_connection_back_as_it_was(ward: tuple[Patient, dict[str, str]], ignored: int) -> None:
    patient, _ = ward
    patient.raw.execute(f"PRAGMA ignore_check_constraints = {ignored}")
    patient.report()
    with patient.altered("DROP INDEX ix_tsg_tasks_active"):
        pass
    assert patient.raw.execute("PRAGMA ignore_check_constraints").fetchone() == (ignored,)
    patient.raw.execute("PRAGMA ignore_check_constraints = 0")


def test_doctor_leaves_the_execution_options_of_a_connection_alone(path: Path) -> None:
    Ledger(path).close()
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        before = dict(connection.get_execution_options())
        doctor.examine(connection)
        assert dict(connection.get_execution_options()) == before
    engine.dispose()


def test_a_session_can_load_collections_eagerly_after_doctor(path: Path, clock: FakeClock) -> None:
    with Ledger(path, clock=clock) as ledger:
        some_kinds(ledger, clock)
    engine = sa.create_engine(f"sqlite:///{path}")
    with Session(engine) as session:
        doctor.examine(session)
        loaded = session.scalars(sa.select(Task).options(sa.orm.joinedload(Task.events))).unique().all()
        assert len(loaded) == 14
    engine.dispose()


def test_a_check_that_cannot_be_carried_out_is_counted_and_no_proof_of_health(
    ward: tuple[Patient, dict[str, str]],
) -> None:
    patient, _ = ward

    def authorize(action: int, *names: object) -> int:
        reading_events = action == sqlite3.SQLITE_READ and names[0] == "tsg_task_events"
        return sqlite3.SQLITE_DENY if reading_events else sqlite3.SQLITE_OK

    patient.raw.set_authorizer(authorize)
    try:
        report = patient.report()
    finally:
        patient.raw.set_authorizer(None)
    assert not report["healthy"]
    assert report["schema_ok"]
    assert report["doctor_error_count"] > 0
