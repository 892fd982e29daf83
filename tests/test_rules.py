"""The rules of a stored row are constraints of the migrated schema, refuse what breaks them, and nothing else."""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.dialects import sqlite

from tests.conftest import raw
from tests.damage import (
    DELIVERY_REASONS,
    EVENT_COLUMNS,
    REASONS,
    TASK_COLUMNS,
    Row,
    has_sound_state,
    has_sound_times,
    is_sound,
    is_sound_event,
    lifted,
)
from tsg import Ledger
from tsg.rules import DELIVERY_STATUSES, TERMINAL_WORDS, breaks, event_rules, sound, task_rules
from tsg.tables import task_events, tasks

TASK_RULES = {rule.name: rule for rule in task_rules(tasks.c)}
EVENT_RULES = {rule.name: rule for rule in event_rules(task_events.c)}


def sql(condition: sa.ColumnElement[Any]) -> str:
    """A condition on the columns of a table, as SQLite is asked it."""
    return str(condition.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True}))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    """An empty database in memory with the schema as the migrations make it."""
    folder = tmp_path_factory.mktemp("rules")
    folder.chmod(0o700)
    Ledger(folder / "ledger.sqlite").close()
    connection = _copy(folder / "ledger.sqlite")
    yield connection
    connection.close()


@pytest.fixture(scope="module")
def unguarded(guarded: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """The same without triggers, CHECKs and NOT NULL, so that it takes any row."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    guarded.backup(connection)
    with lifted(connection):
        yield connection
    connection.close()


def _copy(path: Path) -> sqlite3.Connection:
    file = raw(path)
    connection = sqlite3.connect(":memory:", isolation_level=None)
    file.backup(connection)
    file.close()
    return connection


ID = "01234567-89ab-cdef-0123-456789abcdef"
OTHER_ID = "ffffffff-ffff-ffff-ffff-ffffffffffff"

QUEUED: Row = {
    "pk": 7,
    "id": ID,
    "parent_id": None,
    "status": "queued",
    "delivery_status": "pending",
    "delivery_required": 1,
    "expects_heartbeat": 1,
    "payload_hash": None,
    "timeout_seconds": None,
    "created_at": 10.0,
    "started_at": None,
    "updated_at": 10.0,
    "ended_at": None,
    "deadline_at": None,
    "delivery_updated_at": 10.0,
    "terminal_code": None,
    "delivery_code": None,
    "version": 0,
}
RUNNING = QUEUED | {"status": "running", "started_at": 20.0, "updated_at": 20.0, "version": 1}
DUE = RUNNING | {"timeout_seconds": 5.0, "deadline_at": 25.0}
ENDED = RUNNING | {"status": "succeeded", "updated_at": 30.0, "ended_at": 30.0, "version": 2}
DELIVERED = ENDED | {"delivery_status": "delivered", "delivery_updated_at": 40.0, "version": 3}

CREATED: Row = {
    "task_pk": 7,
    "number": 0,
    "kind": "created",
    "from_status": None,
    "to_status": "queued",
    "occurred_at": 10.0,
    "code": "created",
}
STARTED = CREATED | {
    "number": 1,
    "kind": "task_transition",
    "from_status": "queued",
    "to_status": "running",
    "code": "started",
}
CLOSED = STARTED | {"number": 2, "from_status": "running", "to_status": "failed", "code": "worker_failed"}
TOLD = {**CLOSED, "number": 3, "kind": "delivery_transition", "from_status": "pending", "code": "transport_failed"}

#: By rule a sound row, what breaks the rule in it, and the rules that then can't help but break too.
TASK_BREACHES: list[tuple[str, Row, Row, set[str]]] = [
    ("id", QUEUED, {"id": ID.upper()}, set()),
    ("id", QUEUED, {"id": ID + "\0"}, set()),
    ("id", QUEUED, {"id": ID.encode()}, set()),
    ("parent_id", QUEUED, {"parent_id": OTHER_ID.upper()}, set()),
    ("parent_id", QUEUED, {"parent_id": ID}, set()),
    ("status", ENDED, {"status": "lost", "version": 2}, {"lifecycle"}),
    ("delivery_status", DELIVERED, {"delivery_status": "lost"}, {"delivery"}),
    ("flags", QUEUED, {"delivery_required": 2}, set()),
    ("flags", QUEUED, {"delivery_required": "yes"}, set()),
    ("flags", DUE, {"expects_heartbeat": 2}, set()),
    ("payload_hash", QUEUED, {"payload_hash": "A" * 64}, set()),
    ("payload_hash", QUEUED, {"payload_hash": "a" * 63}, set()),
    ("payload_hash", QUEUED, {"payload_hash": b"a" * 64}, set()),
    ("payload_hash", QUEUED, {"payload_hash": "a" * 63 + "\0"}, set()),
    ("payload_hash", QUEUED, {"payload_hash": "\0my secret prompt".ljust(64)}, set()),
    ("expects_heartbeat", QUEUED, {"expects_heartbeat": 0}, set()),
    ("lifecycle", QUEUED, {"started_at": 10.0, "version": 1}, set()),
    ("lifecycle", QUEUED, {"ended_at": 10.0}, {"version"}),
    ("lifecycle", RUNNING, {"started_at": None, "version": 0, "updated_at": 10.0}, set()),
    ("lifecycle", RUNNING, {"ended_at": 20.0}, {"version"}),
    ("lifecycle", ENDED, {"ended_at": None}, set()),
    ("terminal_code", QUEUED, {"terminal_code": "completed"}, set()),
    ("terminal_code", ENDED, {"terminal_code": "worker_failed"}, set()),
    ("terminal_code", ENDED, {"terminal_code": "because"}, set()),
    ("terminal_code", ENDED, {"terminal_code": ""}, set()),
    ("delivery", RUNNING, {"delivery_status": "delivered", "version": 2}, {"delivery_updated_at"}),
    ("delivery", QUEUED, {"delivery_status": "failed", "version": 1}, {"delivery_updated_at"}),
    ("delivery", DELIVERED, {"delivery_status": "not_applicable"}, set()),
    ("delivery", DELIVERED, {"delivery_required": 0}, set()),
    ("delivery_code", ENDED, {"delivery_code": "transport_acknowledged"}, set()),
    ("delivery_code", DELIVERED, {"delivery_code": "transport_failed"}, set()),
    ("version", QUEUED, {"version": 1}, set()),
    ("version", QUEUED, {"version": -1}, set()),
    ("version", QUEUED, {"version": "none"}, set()),
    ("version", RUNNING, {"version": 0}, set()),
    ("version", DUE, {"version": 2, "expects_heartbeat": 0}, set()),
    ("version", ENDED, {"version": 1}, set()),
    ("version", DELIVERED, {"version": 2}, set()),
    ("timeout_seconds", QUEUED, {"timeout_seconds": -1.0}, set()),
    ("timeout_seconds", QUEUED, {"timeout_seconds": math.inf}, set()),
    ("timeout_seconds", QUEUED, {"timeout_seconds": "soon"}, set()),
    ("finite", ENDED, {"ended_at": math.inf, "updated_at": math.inf}, set()),
    ("finite", QUEUED, {"created_at": "x", "updated_at": "x", "delivery_updated_at": "x"}, set()),
    ("finite", QUEUED, dict.fromkeys(("created_at", "updated_at", "delivery_updated_at"), -math.inf), set()),
    ("started_at", RUNNING, {"started_at": 9.0, "updated_at": 9.0}, set()),
    ("updated_at", QUEUED, {"updated_at": 11.0}, set()),
    ("updated_at", RUNNING, {"updated_at": 21.0}, set()),
    ("updated_at", RUNNING, {"updated_at": 19.0, "version": 5}, set()),
    ("updated_at", ENDED, {"updated_at": 29.0}, set()),
    ("ended_at", ENDED, {"ended_at": 19.0, "updated_at": 19.0}, set()),
    (
        "ended_at",
        QUEUED,
        {"status": "failed", "ended_at": 9.0, "updated_at": 9.0, "version": 1},
        set(),
    ),
    ("deadline_at", DUE, {"deadline_at": 25.5}, set()),
    ("deadline_at", DUE, {"deadline_at": None}, set()),
    ("deadline_at", DUE, {"timeout_seconds": None}, set()),
    ("deadline_at", QUEUED, {"deadline_at": 25.0}, set()),
    ("delivery_updated_at", QUEUED, {"delivery_updated_at": 11.0}, set()),
    ("delivery_updated_at", ENDED, {"delivery_updated_at": 30.0}, set()),
    ("delivery_updated_at", DELIVERED, {"delivery_updated_at": 29.0}, set()),
]
EVENT_BREACHES: list[tuple[str, Row, Row, set[str]]] = [
    ("number", CREATED, {"number": b"0"}, {"transition"}),
    ("number", CREATED, {"number": "first"}, {"transition"}),
    ("kind", CREATED, {"kind": "prompt"}, {"transition"}),
    ("occurred_at", CREATED, {"occurred_at": math.inf}, set()),
    ("occurred_at", CREATED, {"occurred_at": "yesterday"}, set()),
    ("occurred_at", CREATED, {"occurred_at": b"10"}, set()),
    ("transition", CREATED, {"number": 1}, set()),
    ("transition", CREATED, {"from_status": "queued"}, set()),
    ("transition", CREATED, {"to_status": "running"}, set()),
    ("transition", CREATED, {"code": "started"}, set()),
    ("transition", CREATED, {"code": None}, set()),
    ("transition", STARTED, {"number": 2}, set()),
    ("transition", STARTED, {"from_status": "pending"}, set()),
    ("transition", STARTED, {"from_status": None}, set()),
    ("transition", STARTED, {"code": "created"}, set()),
    ("transition", STARTED, {"code": None}, set()),
    ("transition", CLOSED, {"number": 1}, set()),
    ("transition", CLOSED, {"number": 3}, set()),
    ("transition", CLOSED, {"from_status": "queued"}, set()),
    ("transition", CLOSED, {"from_status": None}, set()),
    ("transition", CLOSED, {"to_status": "queued"}, set()),
    ("transition", CLOSED, {"code": "completed"}, set()),
    ("transition", CLOSED, {"code": "because"}, set()),
    ("transition", TOLD, {"number": 1}, set()),
    ("transition", TOLD, {"number": 4}, set()),
    ("transition", TOLD, {"from_status": "running"}, set()),
    ("transition", TOLD, {"from_status": None}, set()),
    ("transition", TOLD, {"to_status": "succeeded"}, set()),
    ("transition", TOLD, {"code": "internal_task"}, set()),
]


def _breaches(breaches: list[tuple[str, Row, Row, set[str]]]) -> list[Any]:
    return [pytest.param(*breach, id=f"{breach[0]}: {breach[2]}") for breach in breaches]


def _insert(connection: sqlite3.Connection, table: str, row: Row) -> None:
    names = ", ".join(row)
    connection.execute(f"INSERT INTO {table} ({names}) VALUES (?{', ?' * (len(row) - 1)})", list(row.values()))


def _answers(connection: sqlite3.Connection, table: str, row: Row, *questions: str) -> tuple[Any, ...]:
    """What SQL says of a row once it is stored; nothing stays."""
    connection.execute("SAVEPOINT asked")
    try:
        _insert(connection, table, row)
        return connection.execute(f"SELECT {', '.join(questions)} FROM {table}").fetchone()  # type: ignore[no-any-return]
    finally:
        connection.execute("ROLLBACK TO asked")
        connection.execute("RELEASE asked")


def _refusal(connection: sqlite3.Connection, table: str, row: Row) -> str | None:
    """The constraint that refuses a row, or nothing where it is taken; nothing stays."""
    connection.execute("SAVEPOINT tried")
    try:
        _insert(connection, table, row)
    except sqlite3.IntegrityError as error:
        return str(error)
    finally:
        connection.execute("ROLLBACK TO tried")
        connection.execute("RELEASE tried")
    return None


def _definitions(connection: sqlite3.Connection) -> dict[str, list[str]]:
    """By table of ours the parts of its definition, each a column or a constraint."""
    parts: dict[str, list[str]] = {}
    for name, text in connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name LIKE 'tsg%'"
    ):
        body = text[text.index("(") + 1 : text.rindex(")")]
        depth, part, found = 0, "", []
        for character in body:
            depth += {"(": 1, ")": -1}.get(character, 0)
            if character == "," and not depth:
                found.append(part.strip())
                part = ""
            else:
                part += character
        parts[name] = [*found, part.strip()]
    return parts


# -- the rules and the schema -------------------------------------------------------------------------------


def test_every_rule_is_a_check_of_its_name_in_the_migrated_schema_and_there_is_no_other(
    guarded: sqlite3.Connection,
) -> None:
    definitions = _definitions(guarded)
    for table, rules in (("tsg_tasks", TASK_RULES), ("tsg_task_events", EVENT_RULES)):
        checks = [part for part in definitions[table] if "CHECK" in part]
        named = {re.match(r"CONSTRAINT (\w+) CHECK ", check)[1] for check in checks}  # type: ignore[index]
        assert named == {f"ck_{table}_{name}" for name in rules}
        assert len(checks) == len(rules)


def test_every_constraint_is_named(guarded: sqlite3.Connection) -> None:
    definitions = _definitions(guarded)
    assert set(definitions) == {"tsg_tasks", "tsg_task_events", "tsg_alembic_version"}
    for parts in definitions.values():
        for part in parts:
            if not part.startswith("CONSTRAINT "):
                assert re.fullmatch(r"\w+ [A-Z]+(\(\d+\))?( NOT NULL)?", part), part


def test_no_two_rules_of_a_table_share_a_name() -> None:
    assert len(TASK_RULES) == len(task_rules(tasks.c))
    assert len(EVENT_RULES) == len(event_rules(task_events.c))


def test_the_check_of_a_rule_has_its_words_and_refuses_what_is_null(guarded: sqlite3.Connection) -> None:
    definitions = _definitions(guarded)
    for table, rules in (("tsg_tasks", TASK_RULES), ("tsg_task_events", EVENT_RULES)):
        for name, rule in rules.items():
            condition = re.sub(rf"\b{table}\.", "", sql(rule.holds))
            (check,) = (part for part in definitions[table] if f"CONSTRAINT ck_{table}_{name} " in part)
            head = f"CONSTRAINT ck_{table}_{name} CHECK "
            assert check in (f"{head}(({condition} IS TRUE))", f"{head}((({condition}) IS TRUE))")


@pytest.mark.parametrize("row", [QUEUED, RUNNING, DUE, ENDED, DELIVERED])
def test_a_sound_task_is_taken(guarded: sqlite3.Connection, row: Row) -> None:
    assert is_sound(row)
    assert _refusal(guarded, "tsg_tasks", row) is None


@pytest.mark.parametrize("row", [CREATED, STARTED, CLOSED, TOLD])
def test_a_sound_event_is_taken(guarded: sqlite3.Connection, row: Row) -> None:
    assert is_sound_event(row)
    assert _refusal(guarded, "tsg_task_events", row) is None


def test_the_breaches_cover_every_rule() -> None:
    assert {breach[0] for breach in TASK_BREACHES} == set(TASK_RULES)
    assert {breach[0] for breach in EVENT_BREACHES} == set(EVENT_RULES)


@pytest.mark.parametrize(("name", "row", "change", "others"), _breaches(TASK_BREACHES))
def test_a_task_that_breaks_one_rule_is_refused_by_it(
    guarded: sqlite3.Connection, unguarded: sqlite3.Connection, name: str, row: Row, change: Row, others: set[str]
) -> None:
    broken = _broken(unguarded, "tsg_tasks", row | change, TASK_RULES)
    assert broken >= {name}
    assert broken <= {name} | others
    _assert_refuses_alone(guarded, "tsg_tasks", row | change, name, broken - {name})


@pytest.mark.parametrize(("name", "row", "change", "others"), _breaches(EVENT_BREACHES))
def test_an_event_that_breaks_one_rule_is_refused_by_it(
    guarded: sqlite3.Connection, unguarded: sqlite3.Connection, name: str, row: Row, change: Row, others: set[str]
) -> None:
    broken = _broken(unguarded, "tsg_task_events", row | change, EVENT_RULES)
    assert broken >= {name}
    assert broken <= {name} | others
    _assert_refuses_alone(guarded, "tsg_task_events", row | change, name, broken - {name})


def _broken(connection: sqlite3.Connection, table: str, row: Row, rules: dict[str, Any]) -> set[str]:
    answers = _answers(connection, table, row, *(sql(rule.holds) for rule in rules.values()))
    return {name for name, answer in zip(rules, answers, strict=True) if answer != 1}


def _assert_refuses_alone(connection: sqlite3.Connection, table: str, row: Row, name: str, others: set[str]) -> None:
    """That the CHECK of this name refuses the row, those of the others taken away."""
    definitions = _definitions(connection)[table]
    kept = [part for part in definitions if not any(f"CONSTRAINT ck_{table}_{other} " in part for other in others)]
    alone = sqlite3.connect(":memory:", isolation_level=None)
    alone.execute(f"CREATE TABLE {table} ({', '.join(kept)}){' WITHOUT ROWID' * ('events' in table)}")
    refusal = _refusal(alone, table, row)
    alone.close()
    assert refusal == f"CHECK constraint failed: ck_{table}_{name}"


# -- rows at random -----------------------------------------------------------------------------------------

IDS = (ID, OTHER_ID, "00000000-0000-4000-8000-000000000000")
TIMES = (10.0, 10.5, 20.0, 20.25, 30.0, 40.0)


@st.composite
def sound_tasks(draw: st.DrawFn) -> Row:
    """A row that a life within the rules leaves behind."""
    times = sorted(draw(st.lists(st.sampled_from(TIMES) | st.floats(-1e9, 1e9), min_size=5, max_size=5)))
    timeout = draw(st.none() | st.sampled_from((0.0, 5.0, 10.0)) | st.floats(0, 1e6))
    beats = True if timeout is None else draw(st.booleans())
    row = QUEUED | {
        "id": ID,
        "parent_id": draw(st.sampled_from((None, *IDS[1:]))),
        "delivery_required": draw(st.integers(0, 1)),
        "expects_heartbeat": int(beats),
        "payload_hash": draw(st.none() | st.just("0123456789abcdef" * 4)),
        "timeout_seconds": timeout,
        "created_at": times[0],
        "updated_at": times[0],
        "delivery_updated_at": times[0],
    }
    if draw(st.booleans()):
        row |= {"status": "running", "started_at": times[1], "updated_at": times[1], "version": 1}
        row |= {"deadline_at": None if timeout is None else times[1] + timeout}
        if beats and draw(st.booleans()):
            row |= {"updated_at": times[2], "version": row["version"] + draw(st.integers(1, 3))}
    if draw(st.booleans()):
        status = draw(st.sampled_from(list(REASONS)))
        row |= {"status": status, "updated_at": times[3], "ended_at": times[3], "version": row["version"] + 1}
        row |= {"terminal_code": draw(st.sampled_from((None, *REASONS[status])))}
        if draw(st.booleans()):
            delivery = draw(st.sampled_from(("delivered", "failed"))) if row["delivery_required"] else "not_applicable"
            row |= {"delivery_status": delivery, "delivery_updated_at": times[4], "version": row["version"] + 1}
            row |= {"delivery_code": draw(st.sampled_from((None, *DELIVERY_REASONS[delivery])))}
    return row


@st.composite
def sound_events(draw: st.DrawFn) -> Row:
    row = draw(st.sampled_from((CREATED, STARTED, CLOSED, TOLD)))
    if row is CLOSED:
        status = draw(st.sampled_from(list(REASONS)))
        number, source = draw(st.sampled_from(((1, "queued"), (2, "running"))))
        row = row | {"number": number, "from_status": source, "to_status": status}
        row |= {"code": draw(st.sampled_from((None, *REASONS[status])))}
    if row is TOLD:
        status = draw(st.sampled_from(list(DELIVERY_REASONS)))
        row = row | {"number": draw(st.sampled_from((2, 3))), "to_status": status}
        row |= {"code": draw(st.sampled_from((None, *DELIVERY_REASONS[status])))}
    return row | {"occurred_at": draw(st.floats(allow_nan=False, allow_infinity=False))}


WORDS = (
    *("queued", "running", *REASONS, "pending", *DELIVERY_REASONS),
    *(code for codes in (*REASONS.values(), *DELIVERY_REASONS.values()) for code in codes),
    *("created", "started", "task_transition", "delivery_transition", "Queued", "queued ", "failed\0", ""),
)
# SQLite keeps text with a NUL in it whole, and compares it so, but some of its functions stop there.
ANYTHING = st.one_of(
    st.none(),
    st.sampled_from(WORDS),
    st.sampled_from((*IDS, ID.upper(), ID + "\0", ID[:-1], ID[:-1] + "\0", "{" + ID + "}", ID.encode())),
    st.sampled_from(("a" * 64, "a" * 63, "a" * 63 + "\0", "A" * 64, "a" * 65, "\0" * 64, "a\0" + "Z" * 62, b"a" * 64)),
    st.sampled_from(TIMES),
    st.sampled_from((math.inf, -math.inf, -0.0, 0.5, 1e308, -1e308, "10.0", "text", b"", b"\x00")),
    st.integers(-2, 6),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8"), max_size=6),
)


def damaged(rows: st.SearchStrategy[Row], columns: tuple[str, ...]) -> st.SearchStrategy[Row]:
    """Sound rows with up to three fields, not the key, replaced by anything."""
    changes = st.dictionaries(st.sampled_from(columns), ANYTHING, max_size=3)
    return st.builds(lambda row, change: {**row, **change}, rows, changes)


TASKS_AT_RANDOM = damaged(sound_tasks(), TASK_COLUMNS[1:])
EVENTS_AT_RANDOM = damaged(sound_events(), EVENT_COLUMNS[2:])

often = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


def _stored(connection: sqlite3.Connection, table: str, columns: tuple[str, ...], row: Row) -> Row:
    """The row as its columns' affinities leave it."""
    return dict(zip(columns, _answers(connection, table, row, *columns), strict=True))


SOUND = sql(sound(tasks.c))
SOUND_STATE, SOUND_TIMES = (
    sql(sa.not_(breaks(rule for rule in task_rules(tasks.c) if rule.heading == heading)))
    for heading in ("state", "timestamp")
)


@often
@given(row=TASKS_AT_RANDOM)
def test_sound_says_of_any_row_what_the_specification_says_never_null_and_split_by_heading(
    unguarded: sqlite3.Connection, row: Row
) -> None:
    *values, whole, state, times = _answers(unguarded, "tsg_tasks", row, *TASK_COLUMNS, SOUND, SOUND_STATE, SOUND_TIMES)
    stored = dict(zip(TASK_COLUMNS, values, strict=True))
    assert {whole, state, times} <= {0, 1}
    assert whole == (state and times)
    assert state == has_sound_state(stored)
    assert whole == is_sound(stored)
    if state:
        assert times == has_sound_times(stored)


KNOWN = (
    (("queued",), ("pending",)),
    (("running",), ("pending",)),
    (TERMINAL_WORDS, ("pending",)),
    (TERMINAL_WORDS, tuple(word for word in DELIVERY_STATUSES if word != "pending")),
)


@often
@given(row=st.one_of(TASKS_AT_RANDOM, sound_tasks()), known=st.sampled_from(KNOWN))
def test_what_is_known_of_the_states_changes_the_words_of_a_condition_and_not_its_answer(
    unguarded: sqlite3.Connection, row: Row, known: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    statuses, deliveries = known
    row = row | {
        "status": row["status"] if row["status"] in statuses else statuses[0],
        "delivery_status": row["delivery_status"] if row["delivery_status"] in deliveries else deliveries[0],
    }
    conditions = (
        SOUND,
        sql(sound(tasks.c, statuses, deliveries)),
        sql(breaks(task_rules(tasks.c, statuses, deliveries))),
    )
    whole, simplified, negated = _answers(unguarded, "tsg_tasks", row, *conditions)
    assert simplified == whole == 1 - negated


@often
@given(row=sound_tasks())
def test_whatever_a_life_within_the_rules_leaves_is_sound_and_taken(
    guarded: sqlite3.Connection, unguarded: sqlite3.Connection, row: Row
) -> None:
    assert is_sound(row)
    assert _answers(unguarded, "tsg_tasks", row, SOUND) == (1,)
    assert _refusal(guarded, "tsg_tasks", row) is None


@often
@given(row=TASKS_AT_RANDOM)
def test_the_constraints_take_exactly_the_tasks_that_are_sound(
    guarded: sqlite3.Connection, unguarded: sqlite3.Connection, row: Row
) -> None:
    stored = _stored(unguarded, "tsg_tasks", TASK_COLUMNS, row)
    assert (_refusal(guarded, "tsg_tasks", row) is None) is is_sound(stored)


@often
@given(row=EVENTS_AT_RANDOM)
def test_the_constraints_take_exactly_the_events_that_are_sound(
    guarded: sqlite3.Connection, unguarded: sqlite3.Connection, row: Row
) -> None:
    stored = _stored(unguarded, "tsg_task_events", EVENT_COLUMNS, row)
    assert (_refusal(guarded, "tsg_task_events", row) is None) is is_sound_event(stored)


def test_a_rule_serves_an_alias_as_it_serves_the_table(unguarded: sqlite3.Connection) -> None:
    alias: Callable[[str], Any] = tasks.alias
    other = sql(sound(alias("other").c))
    assert "tsg_tasks." not in other
    unguarded.execute("SAVEPOINT asked")
    _insert(unguarded, "tsg_tasks", DELIVERED)
    assert unguarded.execute(f"SELECT {other} FROM tsg_tasks AS other").fetchone() == (1,)
    unguarded.execute("ROLLBACK TO asked")
    unguarded.execute("RELEASE asked")
