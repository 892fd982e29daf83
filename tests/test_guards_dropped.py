"""What a privileged person does by taking a guard away: found by doctor, or named here as what can't be found."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tests import damage, test_doctor_postgresql
from tests.conftest import raw, tsg
from tests.damage import ERROR, EVENT, EVENT_COLUMNS, STATE, TASK_COLUMNS, TIMESTAMP, Row, diagnosis
from tests.test_cli import call
from tests.test_doctor import CHECKS, INDEXES, _without
from tests.test_guards import (
    DATABASES,
    DELIVERY_ENDS,
    DELIVERY_WORDS,
    LATER,
    LEGAL_DELIVERY,
    LEGAL_TASK,
    TASK_WORDS,
    World,
    delivery_values,
    sqlite_engine,
    task_values,
    world_on_postgresql,
    world_on_sqlite,
)
from tsg import Ledger, StateConflict, doctor
from tsg.guards import FUNCTIONS, GUARDS

Patient = damage.Patient | test_doctor_postgresql.Patient


class Ward(NamedTuple):
    """A ledger with a task in every state, to be damaged, looked at, and as it was again."""

    name: str
    patient: Patient
    world: World

    def key(self, identifier: str) -> int:
        return int(next(row["pk"] for row in self.patient.tasks() if row["id"] == identifier))


@pytest.fixture(scope="module")
def sqlite_ward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    folder = tmp_path_factory.mktemp("dropped")
    with world_on_sqlite(folder) as world:
        with closing(raw(folder / "ledger.sqlite")) as origin:
            patient = damage.Patient(origin)
        yield Ward("sqlite", patient, world)
        patient.close()


@pytest.fixture(scope="module")
def postgresql_ward(postgresql_server: sa.URL, postgresql_template: str) -> Iterator[Ward]:
    with world_on_postgresql(postgresql_server, postgresql_template) as world, world.engine.connect() as connection:
        yield Ward("postgresql", test_doctor_postgresql.Patient(connection, world.tasks), world)
        connection.rollback()


@pytest.fixture(params=DATABASES)
def ward(request: pytest.FixtureRequest) -> Iterator[Ward]:
    found: Ward = request.getfixturevalue(f"{request.param}_ward")
    before = found.patient.tasks(), found.patient.events()
    yield found
    assert (found.patient.tasks(), found.patient.events()) == before


def literal(value: object) -> str:
    if value is None:
        return "NULL"
    return f"'{value}'" if isinstance(value, str) else repr(value)


def written(key: int, values: dict[str, Any]) -> str:
    assignments = ", ".join(f"{name} = {literal(value)}" for name, value in values.items())
    return f"UPDATE tsg_tasks SET {assignments} WHERE pk = {key}"


def unguarded(ward: Ward, *statements: str) -> list[str]:
    """Statements between those that drop every trigger and those that put each back exactly as it was."""
    texts = {(guard.name, guard.table): getattr(guard, ward.name) for guard in GUARDS}
    present = {key: text for key, text in texts.items() if text is not None}
    on = "" if ward.name == "sqlite" else " ON {}"
    drops = [f"DROP TRIGGER {name}{on.format(table)}" for name, table in present]
    return [*drops, *statements, *present.values()]


def is_found(ward: Ward, report: doctor.Report) -> None:
    """The schema is whole again, and the rows are counted just where a second opinion counts them."""
    assert report["schema_ok"]
    assert not report["healthy"]
    assert report[STATE] or report[TIMESTAMP] or report[EVENT]
    assert report[ERROR] == 0
    assert diagnosis(ward.patient.tasks(), ward.patient.events()).disagreement(report) == {}


# -- a guard that is gone is seen, by doctor and by whoever opens the ledger ----------------------------------


def is_refused_everywhere(place: Path | sa.URL, engine: sa.Engine, *, commands: bool) -> None:
    with engine.begin() as connection:
        report = doctor.examine(connection)
    assert (report["healthy"], report["schema_ok"], report[ERROR]) == (False, False, 1)
    where = place if isinstance(place, Path) else place.render_as_string(hide_password=False)
    checked = call("--db", where, "check")
    assert (checked.status, checked.json["ok"]) == (1, False)
    for target in (place, engine):
        with pytest.raises(StateConflict, match="tsg check"):
            Ledger(target)
    if commands:
        assert (call("--db", where, "doctor").status, call("--db", where, "doctor").json) == (1, report)
        assert call("--db", where, "create").json == {"error": "StateConflict", "ok": False}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("trigger", [guard.name for guard in GUARDS if guard.sqlite]),
        ("index", INDEXES),
        ("constraint", [*CHECKS, "fk_tsg_tasks_parent_id", "fk_tsg_task_events_task_pk"]),
    ],
)
def test_a_file_without_one_of_its_guards_is_refused_everywhere(
    sqlite_ward: Ward, file_at_head: Path, folder: Path, kind: str, names: list[str]
) -> None:
    assert isinstance(sqlite_ward.patient, damage.Patient)
    for name in names:
        path = folder / f"{name}.sqlite"
        shutil.copyfile(file_at_head, path)
        path.chmod(0o600)
        statements = _without(sqlite_ward.patient, name) if kind == "constraint" else (f"DROP {kind} {name}",)
        with closing(raw(path)) as connection:
            for statement in statements:
                connection.execute(statement)
            (left,) = connection.execute(
                "SELECT count(*) FROM sqlite_master WHERE name = ? OR instr(sql, ?)", (name, f"CONSTRAINT {name} ")
            ).fetchone()
        assert left == 0
        engine = sqlite_engine(path)
        is_refused_everywhere(path, engine, commands=name == names[0])
        engine.dispose()


def altered_guards(connection: Connection) -> dict[str, list[tuple[str, list[str]]]]:
    """By kind: each way to take one guard away on PostgreSQL, with what puts it back."""

    def rows(query: str) -> list[Any]:
        return list(connection.execute(sa.text(query)))

    triggers = rows(
        "SELECT tgrelid::regclass::text AS on_table, tgname AS name, pg_get_triggerdef(oid) AS definition "
        "FROM pg_trigger WHERE NOT tgisinternal AND starts_with(tgrelid::regclass::text, 'tsg_')"
    )
    constraints = rows(
        "SELECT conrelid::regclass::text AS on_table, conname AS name, contype AS kind, "
        "pg_get_constraintdef(oid) AS definition, confrelid::regclass::text AS refers_to FROM pg_constraint "
        "WHERE starts_with(conrelid::regclass::text, 'tsg_') AND contype IN ('c', 'f', 'p', 'u')"
    )
    indexes = rows(
        "SELECT indexname AS name, indexdef AS definition FROM pg_indexes WHERE starts_with(tablename, 'tsg_') "
        "AND indexname NOT IN (SELECT conname FROM pg_constraint)"
    )

    def added(row: Any, more: str = "") -> str:
        return f"ALTER TABLE {row.on_table} ADD CONSTRAINT {row.name} {row.definition}{more}"

    def dropped(row: Any, more: str = "") -> str:
        return f"ALTER TABLE {row.on_table} DROP CONSTRAINT {row.name}{more}"

    def references_to(row: Any) -> list[str]:
        column = row.definition.partition("(")[2]
        return [added(other) for other in constraints if other.kind == "f" and f"{row.on_table}({column}" in other[3]]

    replaced = " RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN coalesce(NEW, OLD); END $$"
    definitions = [row.definition for row in triggers]
    callers = {name: [text for text in definitions if f" {name}()" in text] for name, _ in FUNCTIONS}
    return {
        "trigger": [(f"DROP TRIGGER {row.name} ON {row.on_table}", [row.definition]) for row in triggers],
        "disabled trigger": [
            (f"ALTER TABLE {row[0]} DISABLE TRIGGER {row[1]}", [f"ALTER TABLE {row[0]} ENABLE TRIGGER {row[1]}"])
            for row in triggers
        ],
        "disabled foreign key": [
            (f"ALTER TABLE {table} DISABLE TRIGGER ALL", [f"ALTER TABLE {table} ENABLE TRIGGER ALL"])
            for table in ("tsg_tasks", "tsg_task_events")
        ],
        "function": [
            (way, [f"DROP FUNCTION IF EXISTS {name} CASCADE", text, *callers[name]])
            for name, text in FUNCTIONS
            for way in (f"CREATE OR REPLACE FUNCTION {name}(){replaced}", f"DROP FUNCTION {name} CASCADE")
        ],
        "check": [(dropped(row), [added(row)]) for row in constraints if row.kind == "c"],
        "unvalidated": [
            (f"{dropped(row)}; {added(row, ' NOT VALID')}", [f"ALTER TABLE {row[0]} VALIDATE CONSTRAINT {row.name}"])
            for row in constraints
            if row.kind == "f" or row.name.endswith("_status")
        ],
        "foreign key": [(dropped(row), [added(row)]) for row in constraints if row.kind == "f"],
        "key": [
            (dropped(row, " CASCADE"), [added(row), *references_to(row)])
            for row in constraints
            if row.kind in ("p", "u")
        ],
        "index": [(f"DROP INDEX {row.name}", [row.definition]) for row in indexes],
    }


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("trigger", 7),
        ("disabled trigger", 7),
        ("disabled foreign key", 2),
        ("function", 6),
        ("check", len(CHECKS)),
        ("unvalidated", 4),
        ("foreign key", 2),
        ("key", 4),
        ("index", 3),
    ],
)
def test_a_database_without_one_of_its_guards_is_refused_everywhere(
    server_at_head: sa.URL, kind: str, count: int
) -> None:
    engine = sa.create_engine(server_at_head)
    with engine.connect() as connection:
        ways = altered_guards(connection)[kind]
    assert len(ways) == count
    for way, undone in ways:
        with engine.begin() as connection:
            test_doctor_postgresql.driven(connection, way)
        is_refused_everywhere(server_at_head, engine, commands=way == ways[0][0])
        with engine.begin() as connection:
            for statement in undone:
                test_doctor_postgresql.driven(connection, statement)
    assert Ledger(engine).doctor()["healthy"]
    engine.dispose()


def test_the_command_itself_leaves_with_1_where_a_guard_is_gone(path: Path) -> None:
    Ledger(path).close()
    assert tsg("--db", path, "check").returncode == 0
    with closing(raw(path)) as connection:
        connection.execute("DROP TRIGGER tsg_tasks_status_guard")
    assert tsg("--db", path, "check").returncode == 1
    assert tsg("--db", path, "doctor").returncode == 1


@pytest.mark.parametrize("whose", ["DATABASE {database}", "ROLE {role} IN DATABASE {database}"])
def test_a_database_in_which_no_connection_asks_the_triggers_is_refused_everywhere(
    postgresql_url: sa.URL, whose: str
) -> None:
    """A setting, no definition; but whoever opens the ledger has no guards, as if each were disabled."""
    engine = sa.create_engine(postgresql_url, poolclass=sa.NullPool)
    place = whose.format(database=postgresql_url.database, role=postgresql_url.username)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER {place} SET session_replication_role = replica")
    try:
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SHOW session_replication_role").scalar() == "replica"
        is_refused_everywhere(postgresql_url, engine, commands=True)
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER {place} RESET session_replication_role")


# -- a guard that was gone for a while: the row and its history disagree ----------------------------------------

ILLEGAL_TASK = [(s, t) for s in TASK_WORDS for t in TASK_WORDS if s != t and (s, t) not in LEGAL_TASK]
ILLEGAL_DELIVERY = [(s, t) for s in DELIVERY_WORDS for t in DELIVERY_WORDS if s != t and (s, t) not in LEGAL_DELIVERY]


def every_change(ward: Ward, *, legal: bool) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """A task of each state, what it is to become, all that makes the rest of its row fit, and which machine it is."""
    world = ward.world
    for source, to in LEGAL_TASK if legal else ILLEGAL_TASK:
        yield world.tasks[source], to, task_values(source, to), "task"
    for source, to in LEGAL_DELIVERY if legal else ILLEGAL_DELIVERY:
        yield world.waiting_for(source, to), to, delivery_values(source, to), "delivery"


def event_of(ward: Ward, key: int, machine: str, to: str) -> str:
    """What adds an event that tells of the change, behind those that are there."""
    number = sum(event["task_pk"] == key for event in ward.patient.events())
    column = "status" if machine == "task" else "delivery_status"
    source = next(row[column] for row in ward.patient.tasks() if row["pk"] == key)
    values = (key, number, f"{machine}_transition", source, to, LATER, "started" if to == "running" else None)
    return f"INSERT INTO tsg_task_events VALUES ({', '.join(map(literal, values))})"


def fits(source_row: Row, values: dict[str, Any]) -> bool:
    """Whether a row can keep every rule of a row once these are set."""
    return damage.is_sound({**source_row, **values})


def test_an_illegal_transition_made_while_the_guards_were_gone_is_found(ward: Ward) -> None:
    rows = {row["id"]: row for row in ward.patient.tasks()}
    tried = 0
    for identifier, _, values, _ in every_change(ward, legal=False):
        if fits(rows[identifier], values):
            change = written(rows[identifier]["pk"], values)
            with ward.patient.altered(*unguarded(ward, change)) as report:
                is_found(ward, report)
                assert report[EVENT] == 1
            tried += 1
    assert tried == len(ILLEGAL_TASK) + 5


@pytest.mark.parametrize("with_event", [False, True])
@pytest.mark.parametrize("fitted", [False, True])
def test_an_illegal_transition_made_while_even_the_checks_were_gone_is_found(
    ward: Ward, fitted: bool, with_event: bool
) -> None:
    tried = 0
    for identifier, to, values, machine in every_change(ward, legal=False):
        key = ward.key(identifier)
        column = "status" if machine == "task" else "delivery_status"
        statements = [written(key, values if fitted else {column: to})]
        if with_event:
            statements.insert(0, event_of(ward, key, machine, to))
        with ward.patient.damaged(*((statement, ()) for statement in statements)) as report:
            is_found(ward, report)
        tried += 1
    assert tried == len(ILLEGAL_TASK) + len(ILLEGAL_DELIVERY) == 21 + 9


def test_a_delivery_closed_before_its_task_while_the_checks_were_gone_is_found(ward: Ward) -> None:
    for status in ("queued", "running"):
        for to in DELIVERY_ENDS:
            key = ward.key(ward.world.tasks[status])
            change = written(key, {"delivery_status": to, "delivery_updated_at": LATER, "version": 3})
            for statements in ([change], [event_of(ward, key, "delivery", to), change]):
                with ward.patient.damaged(*((statement, ()) for statement in statements)) as report:
                    is_found(ward, report)


def test_a_legal_transition_written_without_its_event_is_found_though_no_guard_was_gone(ward: Ward) -> None:
    for identifier, _, values, _ in every_change(ward, legal=True):
        with ward.patient.altered(written(ward.key(identifier), values)) as report:
            is_found(ward, report)
            assert report[EVENT] == 1


def test_a_forged_event_by_itself_is_found_though_no_guard_was_gone(ward: Ward) -> None:
    """The CHECKs let an event in that could be; that it tells of nothing in its task's row, doctor sees."""
    for identifier, to, _, machine in every_change(ward, legal=True):
        with ward.patient.altered(event_of(ward, ward.key(identifier), machine, to)) as report:
            is_found(ward, report)
            assert report[EVENT] == 1


def test_an_event_deleted_or_rewritten_while_the_guards_were_gone_is_found(ward: Ward) -> None:
    key = ward.key(ward.world.told)
    of = f"WHERE task_pk = {key} AND number ="
    for statement in (
        *(f"DELETE FROM tsg_task_events {of} {number}" for number in range(4)),
        f"DELETE FROM tsg_task_events WHERE task_pk = {key}",
        f"UPDATE tsg_task_events SET code = NULL {of} 2",
        f"UPDATE tsg_task_events SET code = 'worker_completed' {of} 2",
        f"UPDATE tsg_task_events SET code = NULL {of} 3",
        f"UPDATE tsg_task_events SET to_status = 'failed', code = NULL {of} 2",
        f"UPDATE tsg_task_events SET to_status = 'failed', code = 'transport_failed' {of} 3",
        *(f"UPDATE tsg_task_events SET occurred_at = occurred_at + 1 {of} {number}" for number in range(4)),
        f"UPDATE tsg_task_events SET task_pk = {ward.key(ward.world.tasks['queued'])} {of} 3",
    ):
        with ward.patient.altered(*unguarded(ward, statement)) as report:
            is_found(ward, report)
            assert report[EVENT] >= 1


def test_a_code_that_only_the_row_was_given_is_found(ward: Ward) -> None:
    key = ward.key(ward.world.told)
    for change in ({"terminal_code": "worker_completed"}, {"terminal_code": None}, {"delivery_code": None}):
        with ward.patient.altered(*unguarded(ward, written(key, change))) as report:
            is_found(ward, report)
            assert report[EVENT] == 1


# -- the limits: what no look at the ledger alone can find ------------------------------------------------------


def forged_into(ward: Ward, victim: str, twin: str) -> list[str]:
    """Everything of one task, its row and its whole history, made what it is of another."""
    key, model = ward.key(victim), ward.key(twin)
    columns = ", ".join(name for name in TASK_COLUMNS if name not in ("pk", "id"))
    copied = ", ".join(EVENT_COLUMNS[1:])
    return [
        f"UPDATE tsg_tasks SET ({columns}) = (SELECT {columns} FROM tsg_tasks WHERE pk = {model}) WHERE pk = {key}",
        f"DELETE FROM tsg_task_events WHERE task_pk = {key}",
        f"INSERT INTO tsg_task_events SELECT {key}, {copied} FROM tsg_task_events WHERE task_pk = {model}",
    ]


def test_a_row_and_all_its_events_forged_into_another_consistent_history_are_not_found(ward: Ward) -> None:
    world = ward.world
    pairs = [(world.tasks[source], world.tasks[to]) for source, to in ILLEGAL_TASK]
    pairs += [(world.deliveries[source], world.deliveries[to]) for source, to in ILLEGAL_DELIVERY]
    for victim, twin in pairs:
        with ward.patient.altered(*unguarded(ward, *forged_into(ward, victim, twin))) as report:
            rows = {row["id"]: row for row in ward.patient.tasks()}
            assert all(rows[victim][name] == rows[twin][name] for name in ("status", "delivery_status", "version"))
            assert report["healthy"]
            assert report["schema_ok"]


def test_the_end_of_a_task_rewritten_in_its_row_and_its_last_event_is_not_found(ward: Ward) -> None:
    key = ward.key(ward.world.tasks["failed"])
    last = f"UPDATE tsg_task_events SET to_status = 'succeeded' WHERE task_pk = {key} AND number = 2"
    with ward.patient.altered(*unguarded(ward, written(key, {"status": "succeeded"}), last)) as report:
        assert report["healthy"]
        assert report["task_status_counts"]["failed"] == 0


def test_a_whole_task_deleted_with_its_events_is_not_found(ward: Ward) -> None:
    """No guard has to go for this: it is what pruning does."""
    with ward.patient.altered(f"DELETE FROM tsg_tasks WHERE pk = {ward.key(ward.world.told)}") as report:
        assert report["healthy"]
        assert report["task_count"] == ward.world.count - 1


# -- names that lead elsewhere ----------------------------------------------------------------------------------


def is_unrecognised(report: doctor.Report) -> None:
    assert (report["healthy"], report["schema_ok"], report[ERROR]) == (False, False, 1)
    assert (report["task_count"], report["event_count"]) == (0, 0)


@pytest.mark.parametrize("table", ["tsg_tasks", "tsg_task_events", "tsg_alembic_version"])
@pytest.mark.parametrize("to", ["kept", "tsg_kept"])
def test_a_table_of_another_name_is_missed(ward: Ward, table: str, to: str) -> None:
    with ward.patient.altered(f"ALTER TABLE {table} RENAME TO {to}") as report:
        is_unrecognised(report)


@pytest.mark.parametrize("kind", ["VIEW", "TABLE"])
def test_another_thing_under_the_name_of_a_table_is_not_taken_for_it(ward: Ward, kind: str) -> None:
    for table in ("tsg_tasks", "tsg_task_events"):
        with ward.patient.altered(
            *(unguarded(ward)[: len(unguarded(ward)) // 2]),
            f"ALTER TABLE {table} RENAME TO kept",
            f"CREATE {kind} {table} AS SELECT * FROM kept",
        ) as report:
            is_unrecognised(report)


NO_GUARD = "FUNCTION shadow.tsg_refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$"
CALLS_ANOTHER = (
    f"CREATE {NO_GUARD}",
    "DROP TRIGGER tsg_task_events_update_guard ON tsg_task_events",
    next(guard.postgresql for guard in GUARDS if guard.name == "tsg_task_events_update_guard").replace(
        "tsg_refuse", "shadow.tsg_refuse"
    ),
)
KEY_OF_TASK = "CONSTRAINT fk_tsg_task_events_task_pk"
TO_ANOTHER = "FOREIGN KEY (task_pk) REFERENCES shadow.tsg_tasks (pk) ON DELETE CASCADE"
FIRST = "SET LOCAL search_path = shadow, public"


def shadowed(table: str, where: str = "true") -> str:
    return f"CREATE VIEW shadow.{table} AS SELECT * FROM public.{table} WHERE {where}"


def empty(table: str) -> str:
    return f"CREATE TABLE shadow.{table} (LIKE public.{table} INCLUDING ALL)"


# What the search path finds before the ledger's own: the statements of ours would read that.
SHADOWS: dict[str, tuple[str, ...]] = {
    "a table of tasks": (empty("tsg_tasks"), FIRST),
    "tables of tasks and events": (empty("tsg_tasks"), empty("tsg_task_events"), FIRST),
    "a view that shows every task": (shadowed("tsg_tasks"), FIRST),
    "a view that shows no task": (shadowed("tsg_tasks", "false"), FIRST),
    "a view that shows every event": (shadowed("tsg_task_events"), FIRST),
    "views that show no task and no event": (
        shadowed("tsg_tasks", "false"),
        shadowed("tsg_task_events", "false"),
        FIRST,
    ),
    "a table of the version": ("CREATE TABLE shadow.tsg_alembic_version (version_num text)", FIRST),
    "a temporary view of the events": (shadowed("tsg_task_events").replace("VIEW shadow.", "TEMPORARY VIEW "),),
    "a guard that calls another schema's function": CALLS_ANOTHER,
    "the same, found first": (*CALLS_ANOTHER, FIRST),
    "a foreign key to another schema's table, found first": (
        "CREATE TABLE shadow.tsg_tasks (pk bigint PRIMARY KEY)",
        "INSERT INTO shadow.tsg_tasks SELECT pk FROM public.tsg_tasks",
        f"ALTER TABLE tsg_task_events DROP {KEY_OF_TASK}, ADD {KEY_OF_TASK} {TO_ANOTHER}",
        FIRST,
    ),
}


@pytest.mark.parametrize("name", SHADOWS)
def test_what_the_search_path_finds_before_the_ledgers_own_is_seen(postgresql_ward: Ward, name: str) -> None:
    with postgresql_ward.patient.altered("CREATE SCHEMA shadow", *SHADOWS[name]) as report:
        is_unrecognised(report)


def test_a_function_of_the_same_name_that_no_guard_calls_does_not_matter(postgresql_ward: Ward) -> None:
    with postgresql_ward.patient.altered("CREATE SCHEMA shadow", f"CREATE {NO_GUARD}", FIRST) as report:
        assert report["healthy"]


def test_a_table_that_was_renamed_and_has_its_name_again_is_the_same(postgresql_ward: Ward) -> None:
    with postgresql_ward.patient.altered(
        "ALTER TABLE tsg_tasks RENAME TO kept", "ALTER TABLE kept RENAME TO tsg_tasks"
    ) as report:
        assert report["healthy"]


LAX = "CREATE COLLATION lax (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param(("CREATE TABLE more () INHERITS (tsg_tasks)",), id="rows of another table's among the tasks"),
        pytest.param(("CREATE TABLE more () INHERITS (tsg_task_events)",), id="rows of another table's among events"),
        pytest.param(
            ('ALTER TABLE tsg_task_events ALTER COLUMN code TYPE text COLLATE "C"',), id="another order of codes"
        ),
        pytest.param(
            (LAX, "ALTER TABLE tsg_task_events ALTER COLUMN kind TYPE text COLLATE lax"),
            id="capitals that are taken for small letters",
        ),
        pytest.param(
            ("CREATE RULE more AS ON INSERT TO tsg_task_events DO ALSO NOTHING",), id="a rule that does nothing"
        ),
        pytest.param(("CREATE RULE more AS ON UPDATE TO tsg_tasks DO INSTEAD NOTHING",), id="a rule instead"),
        pytest.param(
            ("ALTER FUNCTION tsg_refuse() RENAME TO refuse", f"CREATE {NO_GUARD.replace('shadow.', '')}"),
            id="a function under another's name",
        ),
        pytest.param(
            (f"CREATE OR REPLACE {NO_GUARD.replace('shadow.', '').replace('NEW', 'NULL')}",),
            id="a function that refuses without a word",
        ),
    ],
)
def test_what_changes_the_meaning_of_a_table_or_a_guard_is_seen(
    postgresql_ward: Ward, statements: tuple[str, ...]
) -> None:
    with postgresql_ward.patient.altered(*statements) as report:
        is_unrecognised(report)


@pytest.mark.parametrize(
    "body",
    [
        "SELECT 1",
        "UPDATE tsg_tasks SET updated_at = updated_at WHERE 0",
        "SELECT RAISE(IGNORE)",
        "DELETE FROM tsg_task_events WHERE 0",
    ],
)
@pytest.mark.parametrize("occasion", ["BEFORE INSERT", "AFTER UPDATE", "BEFORE DELETE"])
@pytest.mark.parametrize("table", ["tsg_tasks", "tsg_task_events"])
def test_a_trigger_that_somebody_adds_to_a_file_is_seen(
    sqlite_ward: Ward, table: str, occasion: str, body: str
) -> None:
    with sqlite_ward.patient.altered(f"CREATE TRIGGER mine {occasion} ON {table} BEGIN {body}; END") as report:
        is_unrecognised(report)
