"""The schema's way through its revisions on a PostgreSQL server, with rows in it, interrupted, and all at once."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_alembic
import pytest_alembic.tests
import sqlalchemy as sa
from alembic.config import Config
from sqlalchemy.engine import Connection, Engine

import tsg
from tests.conftest import tsg as command
from tests.data.revisions import make
from tests.test_migrations import UNSAFE
from tsg import InvalidInput, Ledger, SchemaOutdated, StateConflict, catalog, schema, tables
from tsg.schema import HEAD, REVISIONS

ROOT = Path(__file__).resolve().parents[1]
INI = ROOT / "alembic.ini"
OLDER = REVISIONS[:-1]
BOOLEANS = ("delivery_required", "expects_heartbeat")


# -- what a database holds -------------------------------------------------------------------------------


@pytest.fixture
def url(empty_postgresql_url: sa.URL) -> sa.URL:
    return empty_postgresql_url


@pytest.fixture
def engine(url: sa.URL) -> Iterator[Engine]:
    with engine_on(url) as made:
        yield made


@contextmanager
def engine_on(url: sa.URL, **options: Any) -> Iterator[Engine]:
    made = sa.create_engine(url, **options)
    try:
        yield made
    finally:
        made.dispose()


def named(url: sa.URL) -> str:
    return url.render_as_string(hide_password=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """The tasks and the events of a history, by whether tasks that send no heartbeat are among them."""
    histories = {}
    for silent in (False, True):
        folder = tmp_path_factory.mktemp("recorded")
        folder.chmod(0o700)
        make.record(folder / "ledger.sqlite", silent=silent)
        with closing(sqlite3.connect(folder / "ledger.sqlite")) as source:
            source.row_factory = sqlite3.Row
            tasks = [dict(row) for row in source.execute("SELECT * FROM tsg_tasks ORDER BY pk")]
            events = [dict(row) for row in source.execute("SELECT * FROM tsg_task_events ORDER BY occurred_at")]
        histories[silent] = tasks, events
    return histories


@pytest.fixture
def at(engine: Engine, recorded: Any) -> Callable[..., None]:
    """Brings the database to a revision and stores the history by plain SQL, in the shape of that revision."""

    def build(revision: str, *, silent: bool | None = None) -> None:
        tsg.upgrade(engine, revision)
        keyed = revision >= make.KEYED
        tasks, events = recorded[keyed if silent is None else silent]
        ids = {task["pk"]: task["id"] for task in tasks}
        names = make.TASK_COLUMNS.split(", ")
        if keyed:
            tasks = [{**task, **{name: bool(task[name]) for name in BOOLEANS}} for task in tasks]
            task_columns = ["pk", "expects_heartbeat", *names]
            event_columns = ["task_pk", "number", *make.EVENT_COLUMNS.split(", ")]
        else:
            task_columns, event_columns = names, ["task_id", *make.PUBLISHED_EVENT_COLUMNS.split(", ")]
            renamed = {"kind": "event_kind", "from_status": "from_value", "to_status": "to_value"}
            events = [
                {renamed.get(name, name): value for name, value in event.items()} | {"task_id": ids[event["task_pk"]]}
                for event in events
            ]
        with engine.begin() as connection:
            insert(connection, "tsg_tasks", task_columns, tasks)
            insert(connection, "tsg_task_events", event_columns, events)
            if keyed:
                connection.exec_driver_sql(
                    "SELECT setval(pg_get_serial_sequence('tsg_tasks', 'pk'), max(pk)) FROM tsg_tasks"
                )

    return build


def insert(connection: Connection, table: str, columns: list[str], rows: list[dict[str, Any]]) -> None:
    places = ", ".join("%s" for _ in columns)
    connection.exec_driver_sql(
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})",
        [tuple(row[name] for name in columns) for row in rows],
    )


def content(engine: Engine) -> tuple[list[Any], list[Any]]:
    """The tasks in their order and the events of each in theirs, in one shape, whatever the revision's is."""
    with engine.connect() as connection:
        columns = {column["name"] for column in sa.inspect(connection).get_columns("tsg_tasks")}
        keyed = "pk" in columns
        told = make.TASK_COLUMNS.replace("id, parent_id", "id::text, parent_id::text", 1)
        told = told.replace("delivery_required", "delivery_required::int")
        tasks = connection.exec_driver_sql(
            f"SELECT {told} FROM tsg_tasks ORDER BY {'pk' if keyed else 'created_at'}"
        ).all()
        if keyed:
            kind, reference, order = make.EVENT_COLUMNS, "event.task_pk = task.pk", "number"
        else:
            kind, reference, order = make.PUBLISHED_EVENT_COLUMNS, "event.task_id = task.id", "sequence"
        events = connection.exec_driver_sql(
            f"SELECT task.id::text, row_number() OVER (PARTITION BY task.id ORDER BY {order}) - 1, "
            f"{', '.join(f'event.{name}' for name in kind.split(', '))} FROM tsg_tasks AS task "
            f"JOIN tsg_task_events AS event ON {reference} ORDER BY task.created_at, event.{order}"
        ).all()
        assert len(events) == connection.exec_driver_sql("SELECT count(*) FROM tsg_task_events").scalar_one()
        return [tuple(task) for task in tasks], [tuple(event) for event in events]


def silent(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        query = "SELECT id::text FROM tsg_tasks WHERE NOT expects_heartbeat ORDER BY pk"
        return list(connection.exec_driver_sql(query).scalars())


def shape(engine: Engine) -> list[str]:
    """Our part of the schema, in the words of the server."""
    with engine.connect() as connection:
        return sorted(catalog.statements(connection))


def everything(engine: Engine) -> Any:
    """The schema and every row, each with the transaction that wrote it."""
    rows = {}
    with engine.connect() as connection:
        for name in sorted(catalog.table_names(connection)):
            rows[name] = sorted(map(repr, connection.exec_driver_sql(f"SELECT xmin::text, * FROM {name}").all()))
        sequences = connection.exec_driver_sql(
            "SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'public'"
        ).all()
    return shape(engine), rows, sorted(map(tuple, sequences))


def revision_of(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.exec_driver_sql("SELECT version_num FROM tsg_alembic_version").scalars())


def is_exact(engine: Engine) -> bool:
    with engine.connect() as connection:
        return schema.is_exact(connection)


def assert_tidy(engine: Engine, revision: str) -> None:
    """Exactly the tables of that revision and what belongs to them, nothing left over from a rebuild."""
    assert revision_of(engine) == [revision]
    with engine.connect() as connection:
        relations = "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = %s"
        tables_there = set(connection.exec_driver_sql(relations, ("r",)).scalars())
        sequences = set(connection.exec_driver_sql(relations, ("S",)).scalars())
        functions = set(
            connection.exec_driver_sql(
                "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
            ).scalars()
        )
    assert tables_there == {"tsg_alembic_version", "tsg_task_events", "tsg_tasks"}
    assert len(sequences) == 1
    assert functions == (
        {"tsg_refuse", "tsg_refuse_with_task", "tsg_refuse_with_any_task"} if revision == HEAD else set()
    )
    assert not [line for line in shape(engine) if "aside" in line]


def assert_works(engine: Engine) -> None:
    with Ledger(engine) as ledger:
        assert ledger.doctor()["healthy"], ledger.doctor()
        task = ledger.create_task(timeout_seconds=60)
        ledger.start_task(task.id)
        ledger.close_task(task.id, "succeeded")
        assert ledger.doctor()["healthy"]


# -- up, down and up again, with rows --------------------------------------------------------------------


def test_every_revision_with_rows_goes_up_down_and_up_again_one_at_a_time(engine: Engine, at: Any) -> None:
    at("0001")
    before = content(engine)
    assert (len(before[0]), len(before[1])) == (9, 27)
    shapes = {"0001": shape(engine)}
    for revision in REVISIONS[1:]:
        assert tsg.upgrade(engine, revision).current == revision
        assert content(engine) == before
        assert_tidy(engine, revision)
        shapes[revision] = shape(engine)
    for revision in reversed(OLDER):
        assert tsg.downgrade(engine, revision).current == revision
        assert content(engine) == before
        assert shape(engine) == shapes[revision]
        assert_tidy(engine, revision)
    tsg.upgrade(engine)
    assert content(engine) == before
    assert shape(engine) == shapes[HEAD]
    assert_works(engine)


@pytest.mark.parametrize("revision", OLDER)
def test_an_upgrade_keeps_every_row_and_event_and_the_numbers_go_on_from_there(
    engine: Engine, at: Any, revision: str
) -> None:
    at(revision)
    before, quiet = content(engine), silent(engine) if revision >= make.KEYED else []
    tsg.upgrade(engine)
    assert content(engine) == before
    assert silent(engine) == quiet
    assert is_exact(engine)
    with engine.connect() as connection:
        keys = connection.exec_driver_sql("SELECT pk FROM tsg_tasks ORDER BY created_at").scalars().all()
    assert keys == list(range(1, len(before[0]) + 1))
    with Ledger(engine) as ledger:
        child = ledger.create_task(parent_id=make.identifier(2))
        assert [task.id for task in ledger.children_of(make.identifier(2))][-1] == child.id
        assert ledger.heartbeat(make.identifier(2)).version == 4
        assert ledger.doctor()["healthy"]
    with engine.connect() as connection:
        newest = connection.exec_driver_sql("SELECT pk FROM tsg_tasks WHERE id = %s", (child.id,)).scalar_one()
    assert newest == len(before[0]) + 1


@pytest.mark.parametrize("revision", OLDER)
def test_a_downgrade_and_the_way_back_keep_every_row_and_event(engine: Engine, at: Any, revision: str) -> None:
    at(HEAD, silent=revision >= make.KEYED)
    before, quiet, there = content(engine), silent(engine), shape(engine)
    tsg.downgrade(engine, revision)
    assert content(engine) == before
    assert_tidy(engine, revision)
    tsg.upgrade(engine)
    assert (content(engine), silent(engine), shape(engine)) == (before, quiet, there)
    assert_works(engine)


@pytest.mark.parametrize("revision", ["0001", "0002"])
def test_events_keep_their_global_order_in_time_on_the_way_down(
    engine: Engine, at: Any, recorded: Any, revision: str
) -> None:
    at(HEAD, silent=False)
    tsg.downgrade(engine, revision)
    with engine.begin() as connection:
        rows = connection.exec_driver_sql(
            "SELECT sequence, occurred_at, event_kind, to_value FROM tsg_task_events ORDER BY sequence"
        ).all()
        connection.exec_driver_sql(
            "INSERT INTO tsg_task_events (task_id, event_kind, from_value, to_value, occurred_at) "
            "SELECT id, 'task_transition', 'queued', 'cancelled', 2e9 FROM tsg_tasks WHERE status = 'queued'"
        )
        assert connection.exec_driver_sql("SELECT max(sequence) FROM tsg_task_events").scalar_one() > len(rows)
    assert [row[0] for row in rows] == list(range(1, len(rows) + 1))
    assert [tuple(row[1:]) for row in rows] == [
        (event["occurred_at"], event["kind"], event["to_status"]) for event in recorded[False][1]
    ]


def test_an_empty_ledger_goes_down_to_nothing_and_up_again(engine: Engine, url: sa.URL) -> None:
    tsg.upgrade(engine)
    assert tsg.downgrade(engine, "base").current is None
    with engine.connect() as connection:
        assert catalog.table_names(connection) == {"tsg_alembic_version"}
        assert not [line for line in catalog.statements(connection) if line.startswith("function")]
    with pytest.raises(SchemaOutdated):
        Ledger(engine)
    tsg.upgrade(engine)
    assert is_exact(engine)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT nextval('tsg_tasks_pk_seq')").scalar_one() == 1
    assert_works(engine)


# -- refusals --------------------------------------------------------------------------------------------

OF_POSTGRESQL = {name: statement for name, statement in UNSAFE.items() if "BLOB" not in statement}


@pytest.mark.parametrize("statement", OF_POSTGRESQL.values(), ids=OF_POSTGRESQL.keys())
def test_unsafe_reasons_are_refused_and_nothing_is_changed(engine: Engine, at: Any, statement: str) -> None:
    at("0001")
    with engine.begin() as connection:
        assert connection.exec_driver_sql(statement).rowcount >= 1
    before = everything(engine)
    for revision in ("0002", HEAD):
        with pytest.raises(StateConflict, match="reason"):
            tsg.upgrade(engine, revision)
        with pytest.raises(StateConflict, match="reason"), engine.begin() as connection:
            tsg.upgrade(connection, revision)
    assert everything(engine) == before
    assert revision_of(engine) == ["0001"]


def test_the_command_refuses_unsafe_reasons_too(engine: Engine, at: Any, url: sa.URL) -> None:
    at("0001")
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE tsg_tasks SET terminal_code = 'it broke' WHERE status = 'failed'")
    before = everything(engine)
    ran = command("--db", named(url), "upgrade")
    assert (ran.returncode, json.loads(ran.stdout or ran.stderr)) == (2, {"error": "StateConflict", "ok": False})
    assert b"it broke" not in ran.stdout + ran.stderr
    assert everything(engine) == before


@pytest.mark.parametrize("revision", ["0002", "0001"])
@pytest.mark.parametrize("started", [False, True])
def test_active_tasks_that_send_no_heartbeat_keep_the_schema_that_knows_them(
    engine: Engine, revision: str, started: bool
) -> None:
    tsg.upgrade(engine)
    with Ledger(engine) as ledger:
        task = ledger.create_task(timeout_seconds=60, expects_heartbeat=False)
        if started:
            ledger.start_task(task.id)
        before = everything(engine)
        with pytest.raises(StateConflict, match="heartbeat"):
            tsg.downgrade(engine, revision)
        assert everything(engine) == before
        ledger.close_task(task.id, "cancelled")
    assert tsg.downgrade(engine, revision).current == revision
    tsg.upgrade(engine)
    assert_works(engine)


@pytest.mark.parametrize("revision", REVISIONS)
def test_the_first_revision_is_not_taken_back_while_there_are_rows(engine: Engine, at: Any, revision: str) -> None:
    at(revision, silent=False)
    before = everything(engine)
    with pytest.raises(StateConflict, match="history"):
        tsg.downgrade(engine, "base")
    assert everything(engine) == before


UNHOLDABLE = {
    "a version too small": "UPDATE tsg_tasks SET version = 0 WHERE status = 'succeeded'",
    "an end before its start": "UPDATE tsg_tasks SET ended_at = 1 WHERE started_at IS NOT NULL AND ended_at > 1",
    "a deadline that is not start and timeout": "UPDATE tsg_tasks SET deadline_at = 1 WHERE deadline_at IS NOT NULL",
    "a time that is infinite": "UPDATE tsg_tasks SET delivery_updated_at = 'Infinity'",
    "a time that is not a number": "UPDATE tsg_tasks SET created_at = 'NaN' WHERE status = 'queued'",
    "chains without their beginnings": "DELETE FROM tsg_task_events WHERE event_kind = 'created'",
    "a state too long": "UPDATE tsg_task_events SET from_value = repeat('x', 40) WHERE event_kind = 'created'",
    "an id that is none": (
        "INSERT INTO tsg_tasks (id, status, delivery_status, delivery_required, created_at, updated_at, "
        "delivery_updated_at) VALUES ('nobody', 'queued', 'pending', 1, 1, 1, 1)"
    ),
    "two ids that are one": (
        "INSERT INTO tsg_tasks (id, status, delivery_status, delivery_required, created_at, updated_at, "
        "delivery_updated_at) SELECT replace(id, '-', ''), 'queued', 'pending', 1, 1, 1, 1 FROM tsg_tasks LIMIT 1"
    ),
}


@pytest.mark.parametrize("statement", UNHOLDABLE.values(), ids=UNHOLDABLE.keys())
def test_a_row_that_a_later_revision_refuses_undoes_the_earlier_steps_too(
    engine: Engine, at: Any, statement: str
) -> None:
    at("0001")
    with engine.begin() as connection:
        assert connection.exec_driver_sql(statement).rowcount >= 1
    before = everything(engine)
    with pytest.raises(StateConflict, match="row"):
        tsg.upgrade(engine)
    assert everything(engine) == before


# -- models and migrations -------------------------------------------------------------------------------


def test_the_models_and_the_migrations_are_the_same_in_the_words_of_the_server(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA modelled")
        connection.exec_driver_sql("SET LOCAL search_path TO modelled")
        tables.metadata.create_all(connection)
        tables.version_table.create(connection)
        modelled = sorted(catalog.statements(connection))
    tsg.upgrade(engine)
    assert shape(engine) == modelled
    kinds = Counter(line.split()[0] for line in modelled)
    assert kinds["table"] == 3
    assert kinds["column"] == 26
    assert kinds["trigger"] == 7
    assert kinds["function"] == 3
    assert kinds["constraint"] >= 28


def test_a_fresh_migration_has_the_digest_that_the_code_knows(engine: Engine) -> None:
    tsg.upgrade(engine)
    assert catalog.digest(shape(engine)) == schema._HEAD_SHA256["postgresql"]
    assert_works(engine)


SCHEMAS = ["ledger", "Ledger of the Host", 'a "quoted" one', "order", "tsg_own", "tsg"]


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("by", ["search_path", "schema_translate_map"])
def test_a_migration_in_another_schema_has_the_same_digest_and_works(url: sa.URL, name: str, by: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    with engine_on(url) as engine:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE SCHEMA {quoted}")
        placed = engine.execution_options(schema_translate_map={None: name})
        if by == "search_path":
            sa.event.listen(engine, "connect", lambda driver, _: search(driver, quoted))
            engine.dispose()
            placed = engine
        for verb, revision in ((tsg.upgrade, HEAD), (tsg.downgrade, "0001"), (tsg.upgrade, HEAD)):
            verb(placed, revision)
        with placed.connect() as connection:
            lines = list(catalog.statements(connection))
            assert catalog.namespace(connection) == name
        assert catalog.digest(lines) == schema._HEAD_SHA256["postgresql"], sorted(lines)
        assert is_exact(placed)
        assert_works(placed)
        with engine.begin() as connection:
            where = "SELECT DISTINCT schemaname FROM pg_tables WHERE tablename LIKE 'tsg\\_%%'"
            assert connection.exec_driver_sql(where).scalars().all() == [name]
            with pytest.raises(sa.exc.IntegrityError):
                connection.exec_driver_sql(f"DELETE FROM {quoted}.tsg_task_events")


def search(driver: Any, path: str) -> None:
    driver.execute(f"SET search_path TO {path}")
    driver.commit()


def test_an_upgrade_beside_a_ledger_in_another_schema_leaves_that_alone(engine: Engine) -> None:
    tsg.upgrade(engine)
    with Ledger(engine) as ledger:
        first = ledger.create_task(timeout_seconds=60)
    before = everything(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA other")
    other = engine.execution_options(schema_translate_map={None: "other"})
    for revision in REVISIONS:
        assert tsg.upgrade(other, revision).current == revision
        assert everything(engine) == before
    with Ledger(other) as ledger:
        second = ledger.create_task(timeout_seconds=60)
        ledger.start_task(second.id)
        with pytest.raises(tsg.TaskNotFound):
            ledger.get_task(first.id)
    assert is_exact(engine)
    assert is_exact(other)
    assert everything(engine)[:2] == before[:2]
    tsg.downgrade(other, "0001")
    assert everything(engine)[:2] == before[:2]
    assert_works(engine)


def test_with_a_search_path_of_two_schemas_the_ledger_is_where_its_tables_are(engine: Engine, url: sa.URL) -> None:
    tsg.upgrade(engine, "0002")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA front")
    with engine_on(url, connect_args={"options": "-c search_path=front,public"}) as two:
        assert tsg.upgrade(two) == schema.Report(adopted=False, current=HEAD, head=HEAD)
        assert is_exact(two)
        assert_works(two)
    assert revision_of(engine) == [HEAD]
    assert is_exact(engine)


def test_a_search_path_without_a_schema_gets_one_error_of_ours(engine: Engine, url: sa.URL) -> None:
    with engine_on(url, connect_args={"options": "-c search_path=nowhere"}) as lost:
        with pytest.raises(StateConflict):
            tsg.upgrade(lost)
        with lost.connect() as connection:
            assert not connection.exec_driver_sql("SELECT 1 FROM pg_tables WHERE tablename LIKE 'tsg%%'").all()


def names_on_sqlite(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    tables_there = " ".join(sql for kind, _, sql in rows if kind == "table")
    return set(re.findall(r"CONSTRAINT (\w+)", tables_there)) | {name for kind, name, _ in rows if kind == "index"}


@pytest.mark.parametrize("revision", REVISIONS)
def test_every_constraint_and_index_has_the_same_name_on_both_databases(
    engine: Engine, path: Path, revision: str
) -> None:
    tsg.upgrade(engine, revision)
    with engine_on(sa.URL.create("sqlite", database=str(path))) as file:
        tsg.upgrade(file, revision)
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT conname FROM pg_constraint WHERE connamespace = 'public'::regnamespace AND contype IN "
            "('c', 'f', 'p', 'u', 'x') UNION SELECT indexname FROM pg_indexes WHERE schemaname = 'public'"
        )
        found = set(rows.scalars())
    # The one key that SQLAlchemy can only write without the name that it has.
    unnamed = {"pk_tsg_task_events"} if revision < make.KEYED else set()
    assert found - unnamed == names_on_sqlite(path)
    assert all(re.fullmatch(r"(pk|uq|fk|ck|ix)_tsg_\w+|tsg_alembic_version_pkc", name) for name in found)
    assert all(len(name) <= 63 for name in found)


def test_every_trigger_of_the_server_has_the_name_of_one_on_sqlite(engine: Engine, path: Path) -> None:
    tsg.upgrade(engine)
    with engine_on(sa.URL.create("sqlite", database=str(path))) as file:
        tsg.upgrade(file)
    with engine.connect() as connection:
        found = set(connection.exec_driver_sql("SELECT tgname FROM pg_trigger WHERE NOT tgisinternal").scalars())
    with closing(sqlite3.connect(path)) as connection:
        there = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")}
    assert len(found) == 7
    assert there - found == {"tsg_tasks_replace_guard", "tsg_task_events_replace_guard", "tsg_tasks_events_follow"}
    # SQLite can't truncate.
    assert found - there == {"tsg_task_events_truncate_guard"}


# -- Alembic's own command -------------------------------------------------------------------------------


def alembic(url: sa.URL, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sysconfig.get_path("scripts"), "alembic"), "-c", INI, "-x", f"db={named(url)}", *arguments],
        capture_output=True,
        check=False,
        text=True,
        cwd=cwd,
        timeout=120,
    )


def test_alembic_goes_up_and_down_and_finds_no_difference(engine: Engine, at: Any, url: sa.URL, tmp_path: Path) -> None:
    at("0001")
    before = content(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE tasks (id INTEGER PRIMARY KEY, title TEXT)")
    behind = alembic(url, "check", cwd=tmp_path)
    assert behind.returncode != 0
    assert "Traceback" not in behind.stderr
    for arguments in (("upgrade", "head"), ("downgrade", "0002"), ("upgrade", "head")):
        ran = alembic(url, *arguments, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert content(engine) == before
    assert is_exact(engine)
    checked = alembic(url, "check", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "No new upgrade operations detected" in checked.stdout
    assert f"{HEAD} (head)" in alembic(url, "current", cwd=tmp_path).stdout


# -- Alembic's rules for a history, as pytest-alembic has them --------------------------------------------


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.parametrize(
    "rule",
    ["test_single_head_revision", "test_upgrade", "test_model_definitions_match_ddl", "test_up_down_consistency"],
)
def test_the_history_follows_the_rules_of_pytest_alembic(
    request: pytest.FixtureRequest, database: str, rule: str
) -> None:
    place = "empty_postgresql_url" if database == "postgresql" else "path"
    where = request.getfixturevalue(place)
    with engine_on(where if isinstance(where, sa.URL) else sa.URL.create("sqlite", database=str(where))) as engine:
        config = pytest_alembic.Config(alembic_config=Config(str(INI)))
        with pytest_alembic.runner(config, engine) as runner:
            getattr(pytest_alembic.tests, rule)(runner)
        if rule != "test_single_head_revision":
            assert is_exact(engine)


# -- interrupted -----------------------------------------------------------------------------------------


def waiting(connection: Connection) -> int | None:
    return connection.exec_driver_sql(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    ).scalar()


def until(true: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("table", ["tsg_task_events", "tsg_tasks"])
@pytest.mark.parametrize(("start", "verb", "target"), [("0001", "upgrade", HEAD), (HEAD, "downgrade", "0002")])
def test_a_process_killed_in_the_middle_leaves_nothing_of_it_and_the_next_ends_it(
    engine: Engine, at: Any, url: sa.URL, start: str, verb: str, target: str, table: str
) -> None:
    at(start, silent=False)
    before, rows = everything(engine), content(engine)
    with engine.connect() as holder, engine_on(url, isolation_level="AUTOCOMMIT") as watching:
        # A reader keeps the table from being moved, so the process stands still between two of its statements.
        holder.exec_driver_sql(f"LOCK TABLE {table} IN ACCESS SHARE MODE")
        process = subprocess.Popen(
            [sys.executable, "-m", "tsg", "--db", named(url), verb, target],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with watching.connect() as connection:
                backend = until(lambda: waiting(connection))
                process.send_signal(signal.SIGKILL)
                process.wait(30)
                holder.rollback()
                alive = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
                until(lambda: connection.exec_driver_sql(alive, (backend,)).scalar() == 0)
        finally:
            process.kill()
            process.wait(30)
    assert process.returncode == -signal.SIGKILL
    after = everything(engine)
    assert after[:2] == before[:2]
    ran = command("--db", named(url), verb, target)
    assert ran.returncode == 0, ran.stderr
    assert content(engine) == rows
    assert_tidy(engine, target)
    tsg.upgrade(engine)
    assert_works(engine)


@pytest.mark.parametrize(
    "obstacle",
    [
        "CREATE FUNCTION tsg_refuse() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
        "CREATE TABLE tsg_tasks_aside (id INTEGER)",
        "CREATE INDEX ix_tsg_tasks_active ON obstacles (id)",
    ],
    ids=["of the last step", "of a step between", "of its end"],
)
def test_a_statement_that_fails_in_the_middle_undoes_every_step_and_the_next_run_ends_well(
    engine: Engine, at: Any, obstacle: str
) -> None:
    at("0001")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE obstacles (id INTEGER)")
        connection.exec_driver_sql(obstacle)
    before, rows = everything(engine), content(engine)
    with pytest.raises(StateConflict):
        tsg.upgrade(engine)
    assert everything(engine) == before
    kind, name = obstacle.split()[1], obstacle.split()[2].removesuffix("()")
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP {kind} {name}")
    tsg.upgrade(engine)
    assert content(engine) == rows
    assert is_exact(engine)
    assert_works(engine)


def test_somebody_elses_lock_comes_out_as_an_error_to_try_again_and_nothing_is_changed(
    engine: Engine, at: Any, url: sa.URL
) -> None:
    at("0002")
    before = everything(engine)
    with engine_on(url, connect_args={"options": "-c lock_timeout=100ms"}) as impatient, engine.connect() as holder:
        holder.exec_driver_sql("LOCK TABLE tsg_tasks IN ACCESS SHARE MODE")
        with pytest.raises(StateConflict) as refused:
            tsg.upgrade(impatient)
        assert refused.value.retriable
        assert everything(engine)[:2] == before[:2]
        holder.rollback()
        tsg.upgrade(impatient)
    assert_works(engine)


# -- many at once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", [None, "0001"])
def test_four_commands_on_one_database_all_end_at_head(
    engine: Engine, at: Any, url: sa.URL, revision: str | None
) -> None:
    if revision:
        at(revision)
    before = content(engine) if revision else ([], [])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tsg", "--db", named(url), "upgrade" if number % 2 else "init"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in range(4)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert all(error == b"" and json.loads(out)["ok"] for out, error in outputs)
    assert_tidy(engine, HEAD)
    assert content(engine) == before
    assert_works(engine)


# -- who may -----------------------------------------------------------------------------------------------


@pytest.fixture
def stranger(url: sa.URL, engine: Engine) -> Iterator[sa.URL]:
    """The database as a role sees it that may connect and read, and create nothing."""
    role = f"stranger_{uuid.uuid4().hex}"
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN")
        connection.exec_driver_sql("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    yield url.set(username=role)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP OWNED BY {role}")
        connection.exec_driver_sql(f"DROP ROLE {role}")


def test_a_role_that_may_not_create_gets_one_clear_error(engine: Engine, stranger: sa.URL) -> None:
    with engine_on(stranger) as theirs:
        for step in (tsg.upgrade, lambda target: tsg.upgrade(target, "0001")):
            with pytest.raises(StateConflict) as refused:
                step(theirs)
            assert refused.value.__suppress_context__
            assert "file" not in str(refused.value)
            assert re.search("permission|privilege|allowed|may not", str(refused.value))
    with engine.connect() as connection:
        assert catalog.table_names(connection) == set()


def test_the_command_says_so_in_one_line_and_ends_with_an_error(engine: Engine, stranger: sa.URL) -> None:
    ran = command("--db", named(stranger), "upgrade")
    assert (ran.returncode, json.loads(ran.stdout or ran.stderr)) == (2, {"error": "StateConflict", "ok": False})
    assert len((ran.stdout + ran.stderr).splitlines()) == 1
    with engine.connect() as connection:
        assert catalog.table_names(connection) == set()


def test_a_role_that_only_reads_finds_a_ledger_at_head_to_be_at_head(engine: Engine, stranger: sa.URL) -> None:
    tsg.upgrade(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {stranger.username}")
    with engine_on(stranger) as theirs:
        assert is_exact(theirs)
        assert tsg.upgrade(theirs).current == HEAD
        with pytest.raises(StateConflict):
            tsg.downgrade(theirs, "0002")
        with pytest.raises(InvalidInput):
            tsg.upgrade(theirs, "0005")
    assert revision_of(engine) == [HEAD]
