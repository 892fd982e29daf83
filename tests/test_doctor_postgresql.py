"""Doctor on PostgreSQL: damage is counted under its heading, an altered schema is seen, nothing is written."""

from __future__ import annotations

import random
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session

from tests.conftest import FakeClock, database
from tests.damage import (
    CYCLE,
    ERROR,
    EVENT,
    EVENT_COLUMNS,
    FINDINGS,
    ORPHAN,
    REFERENCE,
    STATE,
    TASK_COLUMNS,
    TIMESTAMP,
    Row,
    diagnosis,
    every_kind,
    some_kinds,
)
from tsg import Ledger, StateConflict, Task, doctor, upgrade
from tsg.tables import task_events, tasks

MISSING = "00000000-0000-4000-8000-000000000000"


def driven(connection: Connection, statement: str) -> sa.CursorResult[Any]:
    """A statement as it stands: the driver would take a lone % for a place to fill."""
    return connection.exec_driver_sql(statement.replace("%", "%%"))


class Patient:
    """A ledger on a server, which is damaged, looked at, and rolled back to as it was."""

    def __init__(self, connection: Connection, kinds: dict[str, str]) -> None:
        self.connection = connection
        self.kinds = kinds
        counts = "SELECT relname, relchecks FROM pg_class WHERE relname IN ('tsg_tasks', 'tsg_task_events')"
        self.checks = {row.relname: row.relchecks for row in driven(connection, counts)}
        self.healthy = self.tasks(), self.events()

    def run(self, statement: str, parameters: Any = None) -> sa.CursorResult[Any]:
        return self.connection.execute(sa.text(statement), parameters or {})

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Whatever happens inside has not happened afterwards."""
        savepoint = self.connection.begin_nested()
        try:
            yield
        finally:
            savepoint.rollback()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Without triggers, foreign keys and CHECKs; afterwards they stand as they stood, whatever the rows are."""
        self.run("SET LOCAL allow_system_table_mods = on")
        self.run("SET LOCAL session_replication_role = replica")
        for table in self.checks:
            self.run("UPDATE pg_class SET relchecks = 0 WHERE relname = :table", {"table": table})
        yield
        for table, count in self.checks.items():
            self.run("UPDATE pg_class SET relchecks = :n WHERE relname = :table", {"table": table, "n": count})
        self.run("SET LOCAL session_replication_role = origin")

    @contextmanager
    def damaged(self, *statements: tuple[str, Any]) -> Iterator[doctor.Report]:
        with self.undone():
            with self.lifted():
                for statement, parameters in statements:
                    self.run(statement, parameters)
            yield doctor.examine(self.connection)

    @contextmanager
    def altered(self, *statements: str) -> Iterator[doctor.Report]:
        with self.undone():
            for statement in statements:
                driven(self.connection, statement)
            yield doctor.examine(self.connection)

    def counted(self, *, only_rows: bool = False) -> dict[str, int]:
        """What the checks find, or the first two of them, without a look at the schema."""
        counts = dict.fromkeys(FINDINGS, 0)
        for check in doctor.CHECKS[:2] if only_rows else doctor.CHECKS:
            counts |= check.counts(self.connection)
        return counts

    def tasks(self) -> list[Row]:
        shown = [f"{name}::text AS {name}" if name in ("id", "parent_id") else name for name in TASK_COLUMNS]
        rows = self.connection.exec_driver_sql(f"SELECT {', '.join(shown)} FROM tsg_tasks ORDER BY pk").mappings()
        return [{name: int(value) if isinstance(value, bool) else value for name, value in row.items()} for row in rows]

    def events(self) -> list[Row]:
        statement = f"SELECT {', '.join(EVENT_COLUMNS)} FROM tsg_task_events ORDER BY 1, 2"
        return [dict(row) for row in driven(self.connection, statement).mappings()]

    def agrees(self, report: Any) -> None:
        """Doctor's counts are those of the second opinion on the rows as they stand now."""
        assert diagnosis(self.tasks(), self.events()).disagreement(report) == {}


@pytest.fixture(scope="module")
def ward(postgresql_server: sa.URL, postgresql_template: str) -> Iterator[Patient]:
    with database(postgresql_server, f"tsg_{uuid.uuid4().hex}", template=postgresql_template) as url:
        engine = sa.create_engine(url)
        clock = FakeClock()
        kinds = some_kinds(Ledger(engine, clock=clock), clock)
        with engine.connect() as connection:
            yield Patient(connection, kinds)
            connection.rollback()
        engine.dispose()


@pytest.fixture(autouse=True)
def healthy_again(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "ward" in request.fixturenames:
        patient: Patient = request.getfixturevalue("ward")
        assert (patient.tasks(), patient.events()) == patient.healthy


@pytest.fixture
def engine(postgresql_url: sa.URL) -> Iterator[sa.Engine]:
    made = sa.create_engine(postgresql_url)
    yield made
    made.dispose()


def is_unrecognised(report: doctor.Report, version: int | None = 4) -> None:
    """What the contract says of a schema that does not match."""
    found = dict(report)
    assert (found.pop("healthy"), found.pop("schema_ok"), found.pop(ERROR)) == (False, False, 1)
    assert found.pop("quick_check") == "unavailable"
    seen = found.pop("schema_version")
    assert version is None or seen == version
    assert all(not (any(count.values()) if isinstance(count, dict) else count) for count in found.values())


# -- healthy -----------------------------------------------------------------------------------------------


def test_a_ledger_with_a_task_of_every_kind_is_healthy_and_counted(
    engine: sa.Engine, ledger: Ledger, path: Path, clock: FakeClock
) -> None:
    kinds = every_kind(ledger, clock)
    file = sa.create_engine(f"sqlite:///{path}")
    with file.connect() as source, engine.begin() as connection:
        for table in (tasks, task_events):
            rows = [dict(row) for row in source.execute(sa.select(table).order_by(*table.primary_key)).mappings()]
            connection.execute(sa.insert(table), rows)
    file.dispose()
    report = Ledger(engine).doctor()
    assert report["healthy"]
    assert report["quick_check"] == "unavailable"
    assert (report["schema_version"], report["schema_ok"]) == (4, True)
    assert report["task_count"] == len(kinds) == sum(report["task_status_counts"].values())
    assert sum(report["delivery_status_counts"].values()) == len(kinds)
    assert min(*report["task_status_counts"].values(), *report["delivery_status_counts"].values()) > 0
    with engine.connect() as connection:
        stored = connection.exec_driver_sql("SELECT count(*) FROM tsg_task_events").scalar_one()
    assert report["event_count"] == stored
    assert all(report[finding] == 0 for finding in FINDINGS)  # type: ignore[literal-required]


def test_lifting_the_guards_leaves_the_schema_as_it_was(ward: Patient) -> None:
    with ward.damaged() as report:
        assert report["healthy"]
        assert report["task_count"] == len(ward.kinds)


# -- damage to rows ----------------------------------------------------------------------------------------

NUMBERS = (float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1_000.0, 1e300)
WORDS = ("queued", "running", "succeeded", "failed", "timed_out", "cancelled", "bogus", "")
DELIVERY_WORDS = ("pending", "delivered", "failed", "not_applicable", "bogus", "")
CODES = (
    None,
    "completed",
    "worker_failed",
    "restart_stale",
    "caller_cancelled",
    "transport_acknowledged",
    "transport_failed",
    "internal_task",
    "started",
    "bogus",
    "",
)
TASK_DAMAGE: dict[str, tuple[Any, ...]] = {
    "parent_id": (MISSING, "its own", None),
    "status": WORDS,
    "delivery_status": DELIVERY_WORDS,
    "delivery_required": (True, False),
    "expects_heartbeat": (True, False),
    "payload_hash": (None, "", "A" * 64, "a" * 63, "g" * 64, "ä" * 64, "a" * 63 + "\n", "0" * 64),
    "timeout_seconds": (None, *NUMBERS, 31.0),
    "created_at": NUMBERS,
    "started_at": (None, *NUMBERS),
    "updated_at": NUMBERS,
    "ended_at": (None, *NUMBERS),
    "deadline_at": (None, *NUMBERS),
    "delivery_updated_at": NUMBERS,
    "terminal_code": CODES,
    "delivery_code": CODES,
    "version": (-1, 0, 1, 2, 3, 4, 5, 2**31 - 1),
}
EVENT_DAMAGE: dict[str, tuple[Any, ...]] = {
    "number": (-1, 4, 7),
    "kind": ("created", "task_transition", "delivery_transition", "bogus", ""),
    "from_status": (None, "queued", "running", "pending", "bogus"),
    "to_status": ("queued", "running", "succeeded", "delivered", "not_applicable", "bogus"),
    "occurred_at": NUMBERS,
    "code": (None, "created", "started", "completed", "transport_acknowledged", "bogus"),
}


def written(column: str, value: Any, row: Row) -> Any:
    return row["id"] if value == "its own" else value


def differs(column: str, value: Any, row: Row) -> bool:
    return bool(written(column, value, row) != row[column])


def test_the_tables_of_damage_cover_every_column() -> None:
    assert {"pk", "id", *TASK_DAMAGE} == set(TASK_COLUMNS)
    assert {"task_pk", *EVENT_DAMAGE} == set(EVENT_COLUMNS)


@pytest.mark.parametrize("column", TASK_DAMAGE)
def test_a_wrong_value_in_one_task_is_counted_as_the_contract_says(ward: Patient, column: str) -> None:
    rows, events = ward.healthy
    seen = 0
    with ward.undone(), ward.lifted():
        for value in TASK_DAMAGE[column]:
            for index, row in enumerate(rows):
                if not differs(column, value, row):
                    continue
                given = written(column, value, row)
                with ward.undone():
                    ward.run(
                        f"UPDATE tsg_tasks SET {column} = :value WHERE pk = :pk", {"value": given, "pk": row["pk"]}
                    )
                    plain = int(given) if isinstance(given, bool) else given
                    now = [*rows[:index], {**row, column: plain}, *rows[index + 1 :]]
                    found = ward.counted(only_rows=column != "parent_id")
                    assert diagnosis(now, events).disagreement(found) == {}, (row, column, value)  # type: ignore[arg-type]
                    seen += any(found[heading] for heading in FINDINGS)
    assert seen


@pytest.mark.parametrize("column", TASK_DAMAGE)
def test_a_wrong_value_in_all_tasks_is_counted_once_a_task(ward: Patient, column: str) -> None:
    for value in TASK_DAMAGE[column]:
        given = "id" if value == "its own" else ":value"
        parameters = {} if value == "its own" else {"value": value}
        kind = "::uuid" if column == "parent_id" else ""
        with ward.damaged((f"UPDATE tsg_tasks SET {column} = ({given}){kind}", parameters)) as report:
            assert report["schema_ok"]
            assert report["quick_check"] == "unavailable"
            assert report["task_count"] == len(ward.kinds)
            ward.agrees(report)
            assert report["healthy"] is not any(report[finding] for finding in FINDINGS)  # type: ignore[literal-required]


def test_another_id_makes_orphans_of_the_children_and_another_key_strays_of_the_events(ward: Patient) -> None:
    parent = ward.kinds["parent queued"]
    with ward.damaged(("UPDATE tsg_tasks SET id = :new WHERE id = :old", {"new": MISSING, "old": parent})) as report:
        assert (report["orphan_count"], report["foreign_key_error_count"]) == (2, 2)
        assert report["state_inconsistency_count"] == report["event_inconsistency_count"] == 0
        ward.agrees(report)
    with ward.damaged(("UPDATE tsg_tasks SET pk = pk + 1000 WHERE id = :old", {"old": parent})) as report:
        assert (report["event_inconsistency_count"], report["foreign_key_error_count"]) == (1, 1)
        ward.agrees(report)


@pytest.mark.parametrize("column", EVENT_DAMAGE)
def test_a_wrong_value_in_an_event_is_counted_in_its_task(ward: Patient, column: str) -> None:
    _, events = ward.healthy
    with ward.undone(), ward.lifted():
        for event in events:
            for value in EVENT_DAMAGE[column]:
                if event[column] == value:
                    continue
                with ward.undone():
                    ward.run(
                        f"UPDATE tsg_task_events SET {column} = :value WHERE task_pk = :pk AND number = :number",
                        {"value": value, "pk": event["task_pk"], "number": event["number"]},
                    )
                    found = ward.counted(only_rows=True)
                    assert {heading: found[heading] for heading in FINDINGS if found[heading]} == {EVENT: 1}, event


@pytest.mark.parametrize(("column", "value"), [(column, values[-1]) for column, values in EVENT_DAMAGE.items()])
def test_a_wrong_value_in_the_first_events_is_in_the_report(ward: Patient, column: str, value: Any) -> None:
    damage = (f"UPDATE tsg_task_events SET {column} = :value WHERE number = 0", {"value": value})
    with ward.damaged(damage) as report:
        assert report["event_inconsistency_count"] == len(ward.kinds)
        assert (report["healthy"], report["schema_ok"]) == (False, True)
        ward.agrees(report)


def test_a_lost_event_an_added_one_and_a_moved_one_are_counted(ward: Patient) -> None:
    _, events = ward.healthy
    with ward.undone(), ward.lifted():
        for event in events:
            with ward.undone():
                ward.run("DELETE FROM tsg_task_events WHERE task_pk = :task_pk AND number = :number", event)
                assert ward.counted()[EVENT] == 1
                assert ward.counted()[REFERENCE] == 0
            with ward.undone():
                columns = ", ".join(name for name in EVENT_COLUMNS if name != "number")
                ward.run(
                    f"INSERT INTO tsg_task_events (number, {columns}) SELECT number + 4, {columns} "
                    "FROM tsg_task_events WHERE task_pk = :task_pk AND number = :number",
                    event,
                )
                assert ward.counted()[EVENT] == 1
    with ward.damaged(("UPDATE tsg_task_events SET task_pk = task_pk + 1000 WHERE number = 0", {})) as report:
        assert report["event_inconsistency_count"] == report["foreign_key_error_count"] == len(ward.kinds)
        ward.agrees(report)
    with ward.damaged(("DELETE FROM tsg_task_events", {})) as report:
        assert (report["event_inconsistency_count"], report["event_count"]) == (len(ward.kinds), 0)


def test_two_tasks_that_swapped_their_events_are_both_counted(ward: Patient) -> None:
    first, second = (next(row for row in ward.healthy[0] if row["status"] == word) for word in ("queued", "running"))
    swap = (
        (
            "UPDATE tsg_task_events SET number = number + 10, "
            "task_pk = CASE task_pk WHEN :one THEN :other ELSE :one END "
            "WHERE task_pk IN (:one, :other)"
        ),
        {"one": first["pk"], "other": second["pk"]},
    )
    back = ("UPDATE tsg_task_events SET number = number - 10 WHERE number >= 10", {})
    with ward.damaged(swap, back) as report:
        assert report["event_inconsistency_count"] == 2
        ward.agrees(report)


def test_random_damage_to_several_columns_and_tables_is_counted_as_by_the_contract(ward: Patient) -> None:
    chance = random.Random(7)
    rows, events = ward.healthy
    for _ in range(40):
        statements: list[tuple[str, Any]] = []
        for _ in range(chance.randint(2, 6)):
            if chance.random() < 0.7:
                column = chance.choice(list(TASK_DAMAGE))
                row = chance.choice(rows)
                value = written(column, chance.choice(TASK_DAMAGE[column]), row)
                statements.append((f"UPDATE tsg_tasks SET {column} = :v WHERE pk = :pk", {"v": value, "pk": row["pk"]}))
            else:
                column = chance.choice([name for name in EVENT_DAMAGE if name != "number"])
                event = chance.choice(events)
                where = {"pk": event["task_pk"], "number": event["number"], "v": chance.choice(EVENT_DAMAGE[column])}
                statements.append(
                    (f"UPDATE tsg_task_events SET {column} = :v WHERE task_pk = :pk AND number = :number", where)
                )
        with ward.damaged(*statements) as report:
            ward.agrees(report)


# -- parents -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("order", ["ascending", "descending", "mixed"])
def test_a_cycle_of_parents_is_counted_once_whatever_its_length(ward: Patient, length: int, order: str) -> None:
    ids = [row["id"] for row in ward.healthy[0][-length:]]
    if order == "descending":
        ids.reverse()
    elif order == "mixed":
        random.Random(length).shuffle(ids)
    link = "UPDATE tsg_tasks SET parent_id = :parent WHERE id = :id"
    ring = [(link, {"id": one, "parent": other}) for one, other in zip(ids, [*ids[1:], ids[0]], strict=True)]
    child = (link, {"id": ward.kinds["child queued, internal, with timeout"], "parent": ids[0]})
    with ward.damaged(*ring, child) as report:
        assert report["parent_cycle_count"] == 1
        assert report["orphan_count"] == 0
        ward.agrees(report)


def test_several_cycles_are_counted_each(ward: Patient) -> None:
    ids = [row["id"] for row in ward.healthy[0]]
    link = "UPDATE tsg_tasks SET parent_id = :parent WHERE id = :id"
    rings = [ids[:1], ids[1:3], ids[3:7], ids[7:12]]
    statements = [
        (link, {"id": one, "parent": other})
        for ring in rings
        for one, other in zip(ring, [*ring[1:], ring[0]], strict=True)
    ]
    with ward.damaged(*statements) as report:
        assert report["parent_cycle_count"] == 4
        ward.agrees(report)


def test_a_child_older_than_its_parent_is_counted(ward: Patient) -> None:
    child = ward.kinds["child queued, internal, with timeout"]
    times = (
        "UPDATE tsg_tasks SET created_at = 1, updated_at = 1, delivery_updated_at = 1 WHERE id = :id",
        {"id": child},
    )
    event = (
        "UPDATE tsg_task_events SET occurred_at = 1 FROM tsg_tasks WHERE pk = task_pk AND id = :id",
        {"id": child},
    )
    with ward.damaged(times, event) as report:
        found = {heading: report[heading] for heading in FINDINGS if report[heading]}  # type: ignore[literal-required]
        assert found == {TIMESTAMP: 1}


def test_a_task_whose_parent_is_gone_is_an_orphan_and_a_broken_reference(ward: Patient) -> None:
    gone = ("DELETE FROM tsg_tasks WHERE id = :id", {"id": ward.kinds["parent queued"]})
    with ward.damaged(gone) as report:
        # Two children, and an event that has no task any more.
        assert (report[ORPHAN], report[REFERENCE], report[CYCLE], report[STATE]) == (2, 3, 0, 0)
        ward.agrees(report)


def newest_binaries() -> Path:
    folders = Path("/usr/lib/postgresql").glob("*/bin")
    return max(folders, key=lambda folder: float(folder.parent.name))


# -- the schema --------------------------------------------------------------------------------------------


def names(ward: Patient, query: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in driven(ward.connection, query)]


def test_each_missing_index_is_seen(ward: Patient) -> None:
    indexes = names(
        ward,
        "SELECT indexname, indexdef FROM pg_indexes WHERE tablename LIKE 'tsg\\_%' "
        "AND indexname NOT IN (SELECT conname FROM pg_constraint)",
    )
    assert len(indexes) == 3
    for name, definition in indexes:
        with ward.altered(f"DROP INDEX {name}") as report:
            is_unrecognised(report)
        plain = definition.partition(" WHERE ")[0]
        with ward.altered(f"DROP INDEX {name}", plain) as report:
            is_unrecognised(report)
        with ward.altered(f"ALTER INDEX {name} RENAME TO {name}_2") as report:
            is_unrecognised(report)


def test_each_missing_constraint_is_seen(ward: Patient) -> None:
    constraints = names(
        ward,
        "SELECT conrelid::regclass::text, conname, contype, pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE conrelid::regclass::text LIKE 'tsg\\_%' AND contype <> 'n'",
    )
    assert {kind for _, _, kind, _ in constraints} == {"c", "f", "p", "u"}
    for table, name, kind, definition in constraints:
        with ward.altered(f"ALTER TABLE {table} DROP CONSTRAINT {name} CASCADE") as report:
            is_unrecognised(report)
        if kind in "cf":
            changed = "CHECK (true)" if kind == "c" else f"{definition} DEFERRABLE"
            with ward.altered(f"ALTER TABLE {table} DROP CONSTRAINT {name}, ADD CONSTRAINT {name} {changed}") as report:
                is_unrecognised(report)
            with ward.altered(
                f"ALTER TABLE {table} DROP CONSTRAINT {name}",
                f"ALTER TABLE {table} ADD CONSTRAINT {name} {definition} NOT VALID",
            ) as report:
                is_unrecognised(report)


def test_each_missing_disabled_or_other_guard_is_seen(ward: Patient) -> None:
    guards = names(
        ward,
        "SELECT tgrelid::regclass::text, tgname, pg_get_triggerdef(oid) FROM pg_trigger "
        "WHERE NOT tgisinternal AND tgrelid::regclass::text LIKE 'tsg\\_%'",
    )
    assert len(guards) == 7
    for table, name, definition in guards:
        with ward.altered(f"DROP TRIGGER {name} ON {table}") as report:
            is_unrecognised(report)
        for state in ("DISABLE TRIGGER", "ENABLE REPLICA TRIGGER", "ENABLE ALWAYS TRIGGER"):
            with ward.altered(f"ALTER TABLE {table} {state} {name}") as report:
                is_unrecognised(report)
        with ward.altered(f"ALTER TRIGGER {name} ON {table} RENAME TO {name}_2") as report:
            is_unrecognised(report)
        moved = definition.replace("BEFORE", "later").replace("AFTER", "BEFORE").replace("later", "AFTER")
        with ward.altered(f"DROP TRIGGER {name} ON {table}", moved) as report:
            is_unrecognised(report)


@pytest.mark.parametrize("function", ["tsg_refuse", "tsg_refuse_with_task", "tsg_refuse_with_any_task"])
def test_another_body_of_a_guards_function_is_seen(ward: Patient, function: str) -> None:
    body = "BEGIN RETURN coalesce(NEW, OLD); END"
    with ward.altered(
        f"CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$"
    ) as report:
        is_unrecognised(report)


@pytest.mark.parametrize(
    "alteration",
    [
        "ALTER FUNCTION tsg_refuse_with_task() SET search_path = pg_catalog",
        "ALTER FUNCTION tsg_refuse_with_task() SECURITY DEFINER",
        "ALTER TABLE tsg_tasks FORCE ROW LEVEL SECURITY",
        "CREATE SEQUENCE tsg_more",
    ],
)
def test_a_lesser_alteration_of_what_is_ours_is_seen_too(ward: Patient, alteration: str) -> None:
    with ward.altered(alteration) as report:
        is_unrecognised(report)


def test_foreign_keys_that_are_not_enforced_are_a_missing_guard(ward: Patient) -> None:
    for table in ("tsg_tasks", "tsg_task_events"):
        with ward.altered(f"ALTER TABLE {table} DISABLE TRIGGER ALL") as report:
            is_unrecognised(report)
        with ward.altered(
            f"ALTER TABLE {table} DISABLE TRIGGER ALL", f"ALTER TABLE {table} ENABLE TRIGGER USER"
        ) as report:
            is_unrecognised(report)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE INDEX more ON tsg_tasks (status)",
        "CREATE UNIQUE INDEX more ON tsg_task_events (task_pk, number, kind)",
        "ALTER TABLE tsg_tasks ADD CONSTRAINT more CHECK (version >= 0)",
        "ALTER TABLE tsg_tasks ADD CHECK (version >= 0)",
        "ALTER TABLE tsg_tasks ADD CONSTRAINT more UNIQUE (pk, id)",
        "ALTER TABLE tsg_tasks ADD COLUMN note text",
        "ALTER TABLE tsg_task_events ADD COLUMN note text DEFAULT 'none'",
        "ALTER TABLE tsg_alembic_version ADD COLUMN note text",
        "ALTER TABLE tsg_tasks ALTER COLUMN status SET DEFAULT 'queued'",
        "ALTER TABLE tsg_tasks ALTER COLUMN status DROP NOT NULL",
        "ALTER TABLE tsg_tasks ALTER COLUMN version SET DEFAULT 0",
        "ALTER TABLE tsg_tasks ALTER COLUMN version TYPE bigint",
        "ALTER TABLE tsg_task_events ALTER COLUMN code TYPE varchar(64)",
        "ALTER TABLE tsg_task_events ALTER COLUMN number TYPE integer",
        "ALTER TABLE tsg_tasks ALTER COLUMN pk DROP IDENTITY",
        "ALTER TABLE tsg_tasks ALTER COLUMN pk SET GENERATED ALWAYS",
        "ALTER TABLE tsg_tasks RENAME COLUMN payload_hash TO digest",
        "ALTER TABLE tsg_tasks DROP COLUMN payload_hash CASCADE",
        "ALTER TABLE tsg_tasks ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE tsg_tasks SET UNLOGGED",
        "CREATE TABLE tsg_more (id integer)",
        "CREATE VIEW tsg_view AS SELECT 1 AS one",
        "CREATE MATERIALIZED VIEW tsg_view AS SELECT 1 AS one",
        "CREATE FUNCTION tsg_more() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
        "CREATE TRIGGER more BEFORE INSERT ON tsg_tasks FOR EACH ROW EXECUTE FUNCTION tsg_refuse()",
        "CREATE TRIGGER more BEFORE TRUNCATE ON tsg_task_events EXECUTE FUNCTION tsg_refuse()",
        "CREATE RULE more AS ON DELETE TO tsg_tasks DO INSTEAD NOTHING",
        "DROP TABLE tsg_task_events",
        "DROP TABLE tsg_tasks CASCADE",
        "ALTER TABLE tsg_task_events RENAME TO tsg_events",
    ],
)
def test_anything_altered_in_the_schema_is_seen(ward: Patient, statement: str) -> None:
    statements = [statement]
    if statement.endswith("UNLOGGED"):
        statements.insert(0, "ALTER TABLE tsg_task_events SET UNLOGGED")
    with ward.altered(*statements) as report:
        is_unrecognised(report)


@pytest.mark.parametrize(
    ("statement", "version"),
    [
        ("DELETE FROM tsg_alembic_version", 0),
        ("INSERT INTO tsg_alembic_version VALUES ('0003')", 0),
        ("UPDATE tsg_alembic_version SET version_num = '0003'", 3),
        ("UPDATE tsg_alembic_version SET version_num = '0005'", 5),
        ("UPDATE tsg_alembic_version SET version_num = 'abc'", 0),
        ("UPDATE tsg_alembic_version SET version_num = ''", 0),
        ("UPDATE tsg_alembic_version SET version_num = repeat('9', 32)", 0),
        ("UPDATE tsg_alembic_version SET version_num = '٤'", 0),
        ("DROP TABLE tsg_alembic_version", 0),
    ],
)
def test_another_version_row_is_seen(ward: Patient, statement: str, version: int) -> None:
    with ward.altered(statement) as report:
        is_unrecognised(report, version)


def test_a_ledger_restored_from_a_dump_is_the_same_ledger(
    postgresql_url: sa.URL, empty_postgresql_url: sa.URL, clock: FakeClock
) -> None:
    with Ledger(postgresql_url, clock=clock) as ledger:
        kinds = some_kinds(ledger, clock)
        report = ledger.doctor()
    server = ["-h", str(postgresql_url.host), "-p", str(postgresql_url.port), "-U", str(postgresql_url.username)]
    folder = newest_binaries()
    dump = subprocess.run(
        [folder / "pg_dump", *server, str(postgresql_url.database)], check=True, capture_output=True, timeout=60
    )
    subprocess.run(
        [folder / "psql", *server, "-q", "-v", "ON_ERROR_STOP=1", str(empty_postgresql_url.database)],
        input=dump.stdout,
        check=True,
        capture_output=True,
        timeout=60,
    )
    with Ledger(empty_postgresql_url, clock=clock) as restored:
        assert restored.doctor() == report
        assert restored.get_task(kinds["running"]).status == "running"


def test_a_database_without_a_ledger_is_none(empty_postgresql_url: sa.URL) -> None:
    engine = sa.create_engine(empty_postgresql_url)
    with engine.connect() as connection:
        is_unrecognised(doctor.examine(connection), 0)
        connection.exec_driver_sql("CREATE TABLE tasks (id text)")
        is_unrecognised(doctor.examine(connection), 0)
    engine.dispose()


def test_what_the_application_does_beside_us_is_healthy(ward: Patient) -> None:
    with ward.altered(
        "CREATE TABLE tasks (id integer PRIMARY KEY)",
        "CREATE TABLE alembic_version (version_num varchar(32) PRIMARY KEY)",
        "CREATE TABLE orders (id integer PRIMARY KEY, task uuid REFERENCES tsg_tasks (id))",
        "CREATE TABLE events (id integer PRIMARY KEY, task bigint REFERENCES tsg_tasks (pk))",
        "CREATE INDEX tsg_orders ON orders (task)",
        "CREATE VIEW open_tasks AS SELECT id FROM tsg_tasks WHERE status = 'queued'",
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
        "CREATE TRIGGER tsg_orders_guard BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION refuse()",
        "CREATE TABLE tsgtasks (id integer)",
        "ANALYZE tsg_tasks",
        "COMMENT ON TABLE tsg_tasks IS 'the ledger'",
        "GRANT SELECT ON tsg_tasks TO PUBLIC",
    ) as report:
        assert report["healthy"]


def test_tables_of_the_same_names_in_another_schema_do_not_matter(ward: Patient) -> None:
    with ward.altered(
        "CREATE SCHEMA other",
        "CREATE TABLE other.tsg_tasks (id integer)",
        "CREATE TABLE other.tsg_alembic_version (version_num text)",
        "CREATE TABLE other.tsg_more (id integer)",
        "CREATE FUNCTION other.tsg_more() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
    ) as report:
        assert report["healthy"]
        assert report["task_count"] == len(ward.kinds)


@pytest.mark.parametrize("schema", ["elsewhere", "Odd Name", 'quo"ted', "tsg_own", "per%cent"])
def test_a_ledger_in_another_schema_of_the_search_path_is_healthy(
    empty_postgresql_url: sa.URL, clock: FakeClock, schema: str
) -> None:
    engine = sa.create_engine(empty_postgresql_url, poolclass=sa.NullPool)
    quoted = engine.dialect.identifier_preparer.quote_identifier(schema)

    @sa.event.listens_for(engine, "connect")
    def search(connection: Any, record: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SET search_path = {quoted.replace('%%', '%')}, public")
        connection.commit()

    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {quoted}")
        connection.exec_driver_sql("CREATE TABLE public.tsg_stray (id integer)")
    upgrade(engine)
    ledger = Ledger(engine, clock=clock)
    kinds = some_kinds(ledger, clock)
    report = ledger.doctor()
    assert report["healthy"]
    assert report["task_count"] == len(kinds)
    with engine.begin() as connection:
        here = connection.scalar(
            sa.text("SELECT count(*) FROM pg_tables WHERE schemaname = :schema AND tablename LIKE 'tsg\\_%'"),
            {"schema": schema},
        )
        assert here == 3
        connection.exec_driver_sql("DROP TRIGGER tsg_tasks_status_guard ON tsg_tasks")
    is_unrecognised(ledger.doctor())
    engine.dispose()


# -- in the caller's transaction ---------------------------------------------------------------------------


def test_doctor_is_content_with_a_transaction_that_may_only_read(engine: sa.Engine, clock: FakeClock) -> None:
    some_kinds(Ledger(engine, clock=clock), clock)
    with engine.connect() as connection:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        assert doctor.examine(connection)["healthy"]
        assert connection.exec_driver_sql("SELECT pg_current_xact_id_if_assigned()").scalar() is None
        assert connection.exec_driver_sql("SHOW transaction_read_only").scalar() == "on"


def test_doctor_sees_what_the_callers_transaction_has_done_and_ends_nothing(
    engine: sa.Engine, clock: FakeClock
) -> None:
    with Session(engine, info={"tsg_clock": clock}) as session:
        session.add(Task())
        report = doctor.examine(session)
        assert (report["healthy"], report["task_count"], report["event_count"]) == (True, 1, 1)
        assert session.in_transaction()
        session.rollback()
        assert doctor.examine(session)["task_count"] == 0


def denied(connection: Connection, *tables: str) -> None:
    role = f"tsg_{uuid.uuid4().hex}"
    connection.exec_driver_sql(f"CREATE ROLE {role}")
    connection.exec_driver_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
    for table in tables:
        connection.exec_driver_sql(f"REVOKE SELECT ON {table} FROM {role}")
    connection.exec_driver_sql(f"SET LOCAL ROLE {role}")


@pytest.mark.parametrize(("table", "errors"), [("tsg_task_events", 3), ("tsg_tasks", 5)])
def test_a_check_that_cannot_be_carried_out_is_counted_and_leaves_the_callers_transaction_whole(
    ward: Patient, table: str, errors: int
) -> None:
    with ward.undone():
        ward.run("CREATE TABLE hosts_own (id integer)")
        ward.run("INSERT INTO hosts_own VALUES (1)")
        ward.run("GRANT SELECT ON hosts_own TO PUBLIC")
        denied(ward.connection, table)
        report = doctor.examine(ward.connection)
        assert (report["healthy"], report["schema_ok"]) == (False, True)
        assert report["doctor_error_count"] == errors
        assert ward.run("SELECT count(*) FROM hosts_own").scalar() == 1


@pytest.mark.parametrize(
    "alteration",
    [
        "ALTER TABLE tsg_alembic_version RENAME COLUMN version_num TO number",
        "REVOKE SELECT ON tsg_alembic_version FROM",
    ],
)
def test_a_version_that_cannot_be_read_leaves_the_callers_transaction_whole_too(ward: Patient, alteration: str) -> None:
    with ward.undone():
        if alteration.startswith("REVOKE"):
            denied(ward.connection, "tsg_alembic_version")
        else:
            ward.run(alteration)
        is_unrecognised(doctor.examine(ward.connection), 0)
        assert ward.run("SELECT 1").scalar() == 1


def test_an_altered_ledger_is_told_by_doctor_and_refused_by_everything_else(
    engine: sa.Engine, clock: FakeClock
) -> None:
    ledger = Ledger(engine, clock=clock)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER tsg_tasks_written_once_guard ON tsg_tasks")
    is_unrecognised(ledger.doctor())
    with pytest.raises(StateConflict, match="tsg check"):
        Ledger(engine)


def test_doctor_works_in_whatever_isolation_the_caller_has(engine: sa.Engine, clock: FakeClock) -> None:
    kinds = some_kinds(Ledger(engine, clock=clock), clock)
    for level in ("AUTOCOMMIT", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"):
        with engine.connect() as connection:
            report = doctor.examine(connection.execution_options(isolation_level=level))
            assert report["healthy"]
            assert report["task_count"] == len(kinds)


def test_the_report_has_the_keys_of_the_contract_in_plain_types_and_no_id(ward: Patient) -> None:
    report = doctor.examine(ward.connection)
    assert tuple(report) == tuple(doctor.Report.__annotations__)
    plain: list[Any] = [
        value
        for entry in report.values()
        for value in (entry.values() if isinstance(entry, dict) else [entry])  # type: ignore[attr-defined]
    ]
    assert {type(value) for value in plain} == {bool, str, int}
    assert not any(task in repr(report) for task in ward.kinds.values())
