"""The schema's way through its revisions, with rows in it; the published files; the database of a host."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.engine import Connection, Engine

import tsg as package
from tests.conftest import LEGACY, expected, raw, snapshot, tsg
from tests.data.revisions import make
from tests.test_cli import call
from tsg import (
    InvalidInput,
    Ledger,
    LedgerError,
    SchemaOutdated,
    SchemaTooNew,
    StateConflict,
    catalog,
    schema,
    tables,
)
from tsg.schema import HEAD, REVISIONS

ROOT = Path(__file__).resolve().parents[1]
INI = ROOT / "alembic.ini"
COMMITTED = Path(make.__file__).parent
OLDER = REVISIONS[:-1]
A_TASK = make.identifier(1)


# -- what a database holds -------------------------------------------------------------------------------


def dump(path: Path) -> list[str]:
    """Every statement and row."""
    with closing(raw(path)) as connection:
        return list(connection.iterdump())


def objects(path: Path) -> dict[str, str]:
    """Name and statement of everything in the schema that has one, SQLite's own tables aside."""
    with closing(raw(path)) as connection:
        return dict(
            connection.execute(
                "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
            )
        )


def content(path: Path) -> tuple[list[Any], list[Any]]:
    """The tasks in their order and the events of each in theirs, in one shape, whatever the revision's is."""
    with closing(raw(path)) as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        prefix = "tsg_" if "tsg_tasks" in names else ""
        keyed = "pk" in {row[1] for row in connection.execute(f"PRAGMA table_info({prefix}tasks)")}
        key = "pk" if keyed else "rowid"
        tasks = connection.execute(f"SELECT {make.TASK_COLUMNS} FROM {prefix}tasks ORDER BY {key}").fetchall()
        if keyed:
            told, reference, order = make.EVENT_COLUMNS, "event.task_pk = task.pk", "number"
        else:
            told, reference, order = make.PUBLISHED_EVENT_COLUMNS, "event.task_id = task.id", "sequence"
        events = connection.execute(
            f"SELECT task.id, row_number() OVER (PARTITION BY task.id ORDER BY {order}) - 1, "
            f"{', '.join(f'event.{name}' for name in told.split(', '))} "
            f"FROM {prefix}tasks AS task JOIN {prefix}task_events AS event ON {reference} "
            f"ORDER BY task.{key}, event.{order}"
        ).fetchall()
        assert len(events) == connection.execute(f"SELECT count(*) FROM {prefix}task_events").fetchone()[0]
        return tasks, events


def silent(path: Path) -> list[str]:
    with closing(raw(path)) as connection:
        return [
            row[0] for row in connection.execute("SELECT id FROM tsg_tasks WHERE NOT expects_heartbeat ORDER BY pk")
        ]


def revision_of(path: Path) -> list[str]:
    with closing(raw(path)) as connection:
        return [row[0] for row in connection.execute("SELECT version_num FROM tsg_alembic_version")]


def assert_tidy(path: Path, revision: str) -> None:
    """Exactly the tables of that revision, nothing left over from a rebuild, no reference broken."""
    assert revision_of(path) == [revision]
    with closing(raw(path)) as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert {name for name in names if not name.startswith("sqlite_")} == {
            "tsg_alembic_version",
            "tsg_task_events",
            "tsg_tasks",
        }
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def assert_healthy(path: Path) -> None:
    with Ledger(path, read_only=True) as ledger:
        report = ledger.doctor()
    assert report["healthy"], report


@contextmanager
def host(path: Path, **options: Any) -> Iterator[Engine]:
    """An application's own engine, as SQLAlchemy makes it."""
    engine = sa.create_engine(f"sqlite:///{path}", **options)
    try:
        yield engine
    finally:
        engine.dispose()


def change(path: Path, *statements: str) -> None:
    """What somebody else does to a file; what a CHECK or a reference would refuse included."""
    with closing(raw(path)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for statement in statements:
            connection.execute(statement)


def root_config(path: Path) -> Config:
    config = Config(str(INI))
    config.cmd_opts = argparse.Namespace(x=[f"db={path}"])
    return config


def alembic(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Alembic's own command with the ini of the root."""
    return subprocess.run(
        [Path(sysconfig.get_path("scripts"), "alembic"), "-c", INI, *arguments],
        capture_output=True,
        check=False,
        text=True,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        timeout=120,
    )


@pytest.fixture
def at(folder: Path) -> Callable[..., Path]:
    """A ledger with rows at a revision."""

    def build(revision: str, name: str = "ledger.sqlite", **options: Any) -> Path:
        return make.build(folder / name, revision, **options)

    return build


# -- the history of revisions ----------------------------------------------------------------------------


def test_the_constants_name_the_revisions_that_alembic_finds_with_one_head() -> None:
    scripts = ScriptDirectory(str(ROOT / "migrations"))
    found = [script.revision for script in scripts.walk_revisions()]
    assert tuple(reversed(found)) == REVISIONS
    assert scripts.get_heads() == [HEAD]
    assert scripts.get_bases() == [REVISIONS[0]]


def test_alembic_goes_through_every_revision_up_down_and_up_again_on_an_applications_engine(path: Path) -> None:
    config = Config(str(INI))
    with host(path) as engine:
        config.attributes["connection"] = engine
        for verb, steps in (
            (command.upgrade, REVISIONS),
            (command.downgrade, (*reversed(OLDER), "base")),
            (command.upgrade, REVISIONS),
        ):
            for step in steps:
                verb(config, step)
                assert revision_of(path) == ([] if step == "base" else [step])
        command.check(config)
        with engine.connect() as connection:
            config.attributes["connection"] = connection
            command.check(config)


def test_every_revision_says_in_its_first_line_what_it_is() -> None:
    for script in ScriptDirectory(str(ROOT / "migrations")).walk_revisions():
        assert (script.doc or "").strip()


def test_revision_names_fit_into_the_version_column() -> None:
    assert all(len(revision) <= 32 for revision in REVISIONS)


def test_a_fresh_ledger_is_tidy_empty_and_healthy(path: Path) -> None:
    assert call("--db", path, "upgrade").json == {
        "ok": True,
        "schema": {"adopted": False, "current": HEAD, "head": HEAD},
    }
    assert_tidy(path, HEAD)
    assert content(path) == ([], [])
    assert_healthy(path)


@pytest.mark.parametrize("revision", OLDER)
def test_an_upgrade_keeps_every_row_and_event_in_its_order(at: Callable[..., Path], revision: str) -> None:
    path = at(revision)
    assert_tidy(path, revision)
    before = content(path)
    assert len(before[0]) >= 9
    assert len(before[1]) >= 24
    quiet = silent(path) if revision >= make.KEYED else []
    with host(path) as engine:
        assert package.upgrade(engine) == schema.Report(adopted=False, current=HEAD, head=HEAD)
    assert content(path) == before
    assert silent(path) == quiet
    assert_tidy(path, HEAD)
    path.chmod(0o600)
    assert_healthy(path)


@pytest.mark.parametrize("revision", OLDER)
def test_every_single_step_up_keeps_every_row_and_event(at: Callable[..., Path], revision: str) -> None:
    path = at(revision)
    before = content(path)
    following = REVISIONS[REVISIONS.index(revision) + 1]
    assert call("--db", path, "upgrade", following).json["schema"]["current"] == following
    assert content(path) == before
    assert_tidy(path, following)


@pytest.mark.parametrize("revision", OLDER)
def test_a_downgrade_and_the_way_back_keep_every_row_and_event(at: Callable[..., Path], revision: str) -> None:
    path = at(HEAD, silent=revision >= make.KEYED)
    before = content(path)
    quiet = silent(path)
    shape = objects(path)
    with host(path) as engine:
        assert package.downgrade(engine, revision).current == revision
        assert content(path) == before
        assert_tidy(path, revision)
        package.upgrade(engine)
    assert content(path) == before
    assert silent(path) == quiet
    assert objects(path) == shape
    assert_tidy(path, HEAD)
    assert_healthy(path)


@pytest.mark.parametrize("revision", OLDER)
def test_a_downgraded_schema_is_the_one_that_an_upgrade_makes(
    at: Callable[..., Path], folder: Path, revision: str
) -> None:
    path, fresh = at(HEAD, silent=False), folder / "fresh.sqlite"
    with host(path) as engine:
        package.downgrade(engine, revision)
    with host(fresh) as engine:
        package.upgrade(engine, revision)
    assert objects(path) == objects(fresh)


def test_events_keep_their_global_order_in_time_on_the_way_down(at: Callable[..., Path], folder: Path) -> None:
    path = at(HEAD, silent=False)
    published = at("0002", "published.sqlite")
    with host(path) as engine:
        package.downgrade(engine, "0002")
    sequence = "SELECT task_id, event_kind, to_value FROM tsg_task_events ORDER BY sequence"
    with closing(raw(path)) as one, closing(raw(published)) as other:
        assert one.execute(sequence).fetchall() == other.execute(sequence).fetchall()


def test_an_empty_ledger_goes_down_to_nothing_and_up_again(path: Path) -> None:
    call("--db", path, "init")
    assert call("--db", path, "downgrade", "base").json["schema"]["current"] is None
    assert set(objects(path)) <= {"tsg_alembic_version"}
    assert call("--db", path, "upgrade").status == 0
    assert_healthy(path)


def test_a_task_created_after_an_upgrade_goes_on_from_the_old_ones(at: Callable[..., Path]) -> None:
    path = at("0001")
    with Ledger(path) as ledger:
        child = ledger.create_task(parent_id=make.identifier(2))
        ledger.start_task(child.id)
        assert ledger.heartbeat(make.identifier(2)).version == 4
        assert ledger.children_of(make.identifier(2))[-1].id == child.id
        assert ledger.doctor()["healthy"]


# -- one file a released revision ------------------------------------------------------------------------


@pytest.fixture(params=REVISIONS)
def committed(request: pytest.FixtureRequest, folder: Path) -> tuple[str, Path]:
    """A copy of what a release has left behind."""
    path = folder / "released.sqlite"
    shutil.copyfile(COMMITTED / f"{request.param}.sqlite", path)
    path.chmod(0o600)
    return request.param, path


def test_there_is_one_small_file_for_every_released_revision() -> None:
    files = {path.stem: path.stat().st_size for path in COMMITTED.glob("*.sqlite")}
    assert tuple(sorted(files)) == REVISIONS
    assert max(files.values()) <= 32 * 1024


def test_a_released_file_has_the_schema_and_the_rows_of_its_revision(
    committed: tuple[str, Path], at: Callable[..., Path]
) -> None:
    revision, path = committed
    made = at(revision, "made.sqlite")
    assert objects(path) == objects(made)
    assert content(path) == content(made)


def test_a_released_file_is_brought_to_head_when_it_is_opened(committed: tuple[str, Path]) -> None:
    revision, path = committed
    before = content(path)
    with Ledger(path) as ledger:
        assert ledger.doctor()["healthy"]
        assert ledger.get_task(make.identifier(2)).version == 3
    assert content(path) == before
    assert_tidy(path, HEAD)


def test_a_released_file_is_brought_to_head_by_the_command(committed: tuple[str, Path]) -> None:
    revision, path = committed
    before = content(path)
    behind = call("--db", path, "check")
    assert behind.status == (0 if revision == HEAD else 1)
    assert behind.json["schema"]["current"] == revision
    assert call("--db", path, "upgrade").json == {
        "ok": True,
        "schema": {"adopted": False, "current": HEAD, "head": HEAD},
    }
    assert call("--db", path, "check").status == 0
    assert call("--db", path, "doctor").json["healthy"]
    assert content(path) == before


# -- refusals --------------------------------------------------------------------------------------------

UNSAFE = {
    "an unknown task code": "UPDATE tsg_tasks SET terminal_code = 'it broke' WHERE status = 'failed'",
    "a task code of another state": "UPDATE tsg_tasks SET terminal_code = 'completed' WHERE status = 'failed'",
    "an empty task code": "UPDATE tsg_tasks SET terminal_code = '' WHERE status = 'failed'",
    "a code on an active task": "UPDATE tsg_tasks SET terminal_code = 'completed' WHERE status = 'running'",
    "a task code in other letters": "UPDATE tsg_tasks SET terminal_code = 'Completed' WHERE status = 'succeeded'",
    "a task code that is no text": (
        "UPDATE tsg_tasks SET terminal_code = CAST('completed' AS BLOB) WHERE status = 'succeeded'"
    ),
    "an unknown delivery code": "UPDATE tsg_tasks SET delivery_code = 'lost' WHERE delivery_status = 'failed'",
    "a delivery code of another state": (
        "UPDATE tsg_tasks SET delivery_code = 'internal_task' WHERE delivery_status = 'failed'"
    ),
    "a delivery code on a pending one": (
        "UPDATE tsg_tasks SET delivery_code = 'transport_failed' WHERE delivery_status = 'pending'"
    ),
    "an unknown code of a creation": "UPDATE tsg_task_events SET code = 'made' WHERE event_kind = 'created'",
    "a started code of a creation": "UPDATE tsg_task_events SET code = 'started' WHERE event_kind = 'created'",
    "an unknown code of a start": "UPDATE tsg_task_events SET code = 'go' WHERE to_value = 'running'",
    "a task event's code of another state": (
        "UPDATE tsg_task_events SET code = 'caller_cancelled' WHERE to_value = 'timed_out'"
    ),
    "a task event's unknown code": "UPDATE tsg_task_events SET code = 'oops' WHERE to_value = 'cancelled'",
    "a delivery event's code of the task's": (
        "UPDATE tsg_task_events SET code = 'worker_failed' "
        "WHERE to_value = 'failed' AND event_kind = 'delivery_transition'"
    ),
    "a task event's code of the delivery's": (
        "UPDATE tsg_task_events SET code = 'transport_failed' "
        "WHERE to_value = 'failed' AND event_kind = 'task_transition'"
    ),
}


@pytest.mark.parametrize("statement", UNSAFE.values(), ids=UNSAFE.keys())
def test_unsafe_reasons_are_refused_and_nothing_is_changed(at: Callable[..., Path], statement: str) -> None:
    path = at("0001")
    change(path, statement)
    before, bytes_before = dump(path), path.read_bytes()
    for revision in ("0002", HEAD):
        refused = call("--db", path, "upgrade", revision)
        assert (refused.status, refused.json) == (2, {"error": "StateConflict", "ok": False})
        with host(path) as engine, pytest.raises(StateConflict):
            package.upgrade(engine, revision)
    with pytest.raises(StateConflict):
        Ledger(path)
    assert dump(path) == before
    assert path.read_bytes() == bytes_before
    assert revision_of(path) == ["0001"]


def test_a_refused_upgrade_says_what_is_wrong_and_not_with_which_value(at: Callable[..., Path]) -> None:
    path = at("0001")
    change(path, "UPDATE tsg_tasks SET terminal_code = 'it broke' WHERE status = 'failed'")
    with host(path) as engine, pytest.raises(StateConflict, match="reason") as refused:
        package.upgrade(engine)
    assert "it broke" not in str(refused.value)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_the_first_revision_is_not_taken_back_while_there_are_rows(at: Callable[..., Path]) -> None:
    for revision in REVISIONS:
        path = at(revision, f"{revision}.sqlite", silent=False)
        before = dump(path)
        with host(path) as engine, pytest.raises(StateConflict):
            package.downgrade(engine, "base")
        assert call("--db", path, "downgrade", "base").json == {"error": "StateConflict", "ok": False}
        assert dump(path) == before


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("revision", ["0002", "0001"])
def test_active_tasks_that_send_no_heartbeat_keep_the_schema_that_knows_them(
    path: Path, started: bool, revision: str
) -> None:
    with Ledger(path) as ledger:
        task = ledger.create_task(timeout_seconds=60, expects_heartbeat=False)
        if started:
            ledger.start_task(task.id)
    before = dump(path)
    with host(path) as engine, pytest.raises(StateConflict):
        package.downgrade(engine, revision)
    assert call("--db", path, "downgrade", revision).status == 2
    assert dump(path) == before
    with Ledger(path) as ledger:
        ledger.close_task(task.id, "cancelled")
    assert call("--db", path, "downgrade", revision).status == 0
    assert_tidy(path, revision)
    assert call("--db", path, "upgrade").status == 0
    assert_healthy(path)


@pytest.mark.parametrize("name", ["", "0005", "abc", "-1", "+1", "base", "0001:0002", "heads@x", None, 4, b"head"])
def test_unknown_revisions_are_invalid_input(ledger: Ledger, path: Path, name: Any) -> None:
    before = dump(path)
    with host(path) as engine:
        with pytest.raises(InvalidInput):
            package.upgrade(engine, name)
        if name != "base":
            with pytest.raises(InvalidInput):
                package.downgrade(engine, name)
    assert dump(path) == before


UNHOLDABLE = {
    "a version too small": "UPDATE tsg_tasks SET version = 0 WHERE status = 'succeeded'",
    "an end before its start": (
        "UPDATE tsg_tasks SET ended_at = started_at - 1, updated_at = started_at - 1 "
        "WHERE started_at IS NOT NULL AND ended_at IS NOT NULL"
    ),
    "an end that is not the last update": "UPDATE tsg_tasks SET updated_at = ended_at + 1 WHERE ended_at IS NOT NULL",
    "a deadline that is not start and timeout": "UPDATE tsg_tasks SET deadline_at = 1 WHERE deadline_at IS NOT NULL",
    "an id that is not canonical": "UPDATE tsg_tasks SET id = upper(id) || 'A' WHERE status = 'queued'",
    "a time that is text": "UPDATE tsg_tasks SET created_at = 'yesterday' WHERE status = 'queued'",
    "a time that is infinite": "UPDATE tsg_tasks SET delivery_updated_at = 9e999 WHERE delivery_status = 'delivered'",
    "a delivery that does not fit": "UPDATE tsg_tasks SET delivery_required = 0 WHERE delivery_status = 'delivered'",
    "an event of an unknown task": "UPDATE tsg_task_events SET task_id = 'nobody' WHERE sequence = 1",
    "a parent that is not there": (
        "UPDATE tsg_tasks SET parent_id = '00000000-0000-0000-0000-000000000000' WHERE status = 'queued'"
    ),
    "a chain with an event too many": (
        "INSERT INTO tsg_task_events (task_id, event_kind, from_value, to_value, occurred_at, code) "
        "SELECT task_id, event_kind, from_value, to_value, occurred_at, code FROM tsg_task_events WHERE sequence = 1"
    ),
    "chains without their beginnings": "DELETE FROM tsg_task_events WHERE event_kind = 'created'",
}


@pytest.mark.parametrize("statement", UNHOLDABLE.values(), ids=UNHOLDABLE.keys())
def test_a_row_that_a_later_revision_refuses_undoes_the_earlier_steps_too(
    at: Callable[..., Path], statement: str
) -> None:
    path = at("0001")
    change(path, "PRAGMA foreign_keys = OFF", statement)
    before = dump(path)
    assert call("--db", path, "upgrade").json == {"error": "StateConflict", "ok": False}
    with pytest.raises(StateConflict):
        Ledger(path)
    with host(path) as engine, pytest.raises(StateConflict):
        package.upgrade(engine)
    with pytest.raises(LedgerError):
        command.upgrade(root_config(path), "head")
    assert dump(path) == before


def test_once_the_row_is_mended_the_same_upgrade_ends_well(at: Callable[..., Path]) -> None:
    path = at("0001")
    before = content(path)
    change(path, f"UPDATE tsg_tasks SET version = 7 WHERE id = '{A_TASK}'")
    assert call("--db", path, "upgrade").status == 2
    change(path, f"UPDATE tsg_tasks SET version = 0 WHERE id = '{A_TASK}'")
    assert call("--db", path, "upgrade").status == 0
    assert content(path) == before
    assert_tidy(path, HEAD)
    assert_healthy(path)


@pytest.mark.parametrize("target", ["0002", HEAD])
def test_a_process_killed_in_the_middle_leaves_all_or_nothing_and_the_next_ends_it(
    folder: Path, path: Path, target: str
) -> None:
    """Up from 0002 or down to it, with some ten thousand rows, killed at two points."""
    start, verb = ("0002", "upgrade") if target == HEAD else (HEAD, "downgrade")
    with Ledger(path) as ledger:
        parent = ledger.create_task()
        ledger.start_task(parent.id)
        ledger.close_task(parent.id, "succeeded")
    with closing(raw(path)) as connection:
        names = make.TASK_COLUMNS.removeprefix("id, parent_id, ")
        connection.executescript(
            f"""
            BEGIN;
            WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < 8000)
            INSERT INTO tsg_tasks (pk, expects_heartbeat, id, parent_id, {names})
            SELECT i, 1, printf('00000000-0000-4000-8000-%012d', i), id, {names} FROM n, tsg_tasks WHERE pk = 1;
            INSERT INTO tsg_task_events
            SELECT t.pk, number, kind, from_status, to_status, occurred_at, code
            FROM tsg_tasks AS t, tsg_task_events WHERE task_pk = 1 AND t.pk > 1;
            COMMIT;
            """
        )
    with host(path) as engine:
        package.downgrade(engine, start)
    path.chmod(0o600)
    before = content(path)
    wal = path.with_name(path.name + "-wal")
    killed = 0
    for reached in (1, 1_000_000):
        process = subprocess.Popen(
            [sys.executable, "-m", "tsg", "--db", path, verb, target],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=folder,
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(FileNotFoundError):
                    if wal.stat().st_size >= reached:
                        process.send_signal(signal.SIGKILL)
                        break
                time.sleep(0.001)
            assert process.communicate(timeout=60)[1] == b""
        finally:
            process.kill()
        killed += process.returncode == -signal.SIGKILL
        assert revision_of(path) in ([start], [target])
        assert content(path) == before
    assert killed
    assert call("--db", path, verb, target).status == 0
    assert content(path) == before
    assert_tidy(path, target)
    assert call("--db", path, "upgrade").status == 0
    assert_healthy(path)


# -- models and migrations -------------------------------------------------------------------------------


def test_the_models_make_the_same_ddl_text_as_the_migrations(folder: Path) -> None:
    modelled, migrated = folder / "modelled.sqlite", folder / "migrated.sqlite"
    with host(modelled) as engine:
        tables.metadata.create_all(engine)
        tables.version_table.create(engine)
    with host(migrated) as engine:
        package.upgrade(engine)

    def folded(path: Path) -> dict[str, str]:
        return {name: " ".join(sql.split()) for name, sql in objects(path).items()}

    assert folded(modelled) == folded(migrated)


def test_the_digest_of_the_schema_at_head_is_that_of_a_fresh_migration(path: Path) -> None:
    with host(path) as engine:
        package.upgrade(engine)
        with engine.connect() as connection:
            assert schema.is_exact(connection)
    with closing(raw(path)) as connection:
        rows = connection.execute(
            "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name <> 'sqlite_sequence'"
        ).fetchall()
    assert catalog.digest(" ".join(row) for row in rows) == schema._HEAD_SHA256["sqlite"]


@pytest.mark.parametrize("revision", REVISIONS)
def test_every_constraint_and_index_has_a_name_that_cannot_collide(path: Path, revision: str) -> None:
    with host(path) as engine:
        package.upgrade(engine, revision)
    constraint = re.compile(r"\b(PRIMARY KEY|UNIQUE|CHECK|FOREIGN KEY|REFERENCES)\b")
    found = 0
    with closing(raw(path)) as connection:
        kinds = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall()
    for kind, name, table, sql in kinds:
        if name.startswith("sqlite_"):
            continue
        assert table.startswith("tsg_")
        assert name.startswith({"table": "tsg_", "trigger": "tsg_", "index": "ix_tsg_"}[kind])
        if kind != "table":
            continue
        for line in sql.splitlines():
            # The one key that SQLAlchemy can only write without the name that it has.
            if constraint.search(line) and "AUTOINCREMENT" not in line:
                found += 1
                assert re.match(r"\s*CONSTRAINT ((pk|uq|fk|ck)_tsg_\w+|tsg_alembic_version_pkc) ", line), line
    assert found > 10


def test_every_constraint_and_index_of_the_models_has_such_a_name_too() -> None:
    for table in tables.metadata.tables.values():
        named = [*table.constraints, *table.indexes]
        assert named
        for item in named:
            assert re.match(r"(pk|uq|fk|ck|ix)_tsg_", str(item.name)), item


def test_every_constraint_name_is_there_once(path: Path) -> None:
    with host(path) as engine:
        package.upgrade(engine)
    names = re.findall(r"CONSTRAINT (\w+)", " ".join(objects(path).values()))
    assert len(names) == len(set(names)) > 25


# -- Alembic's own command -------------------------------------------------------------------------------


def test_alembic_check_finds_no_difference_and_other_tables_are_not_its_business(path: Path, tmp_path: Path) -> None:
    with host(path) as engine, engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE tasks (id INTEGER PRIMARY KEY, title TEXT)")
        package.upgrade(connection)
    checked = alembic("-x", f"db={path}", "check", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "No new upgrade operations detected" in checked.stdout


def test_alembic_goes_up_and_down_from_any_folder(at: Callable[..., Path], tmp_path: Path) -> None:
    path = at("0002")
    before = content(path)
    for arguments, revision in (
        (("upgrade", "head"), HEAD),
        (("downgrade", "0003"), "0003"),
    ):
        ran = alembic("-x", f"db={path}", *arguments, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert content(path) == before
        assert_tidy(path, revision)
    ran = alembic("-x", f"db={path}", "current", cwd=tmp_path)
    assert (ran.returncode, ran.stdout.split()) == (0, ["0003"])


def test_alembic_takes_the_database_from_the_variable_and_makes_a_private_file(tmp_path: Path, folder: Path) -> None:
    path = folder / "new.sqlite"
    ran = alembic("upgrade", "head", cwd=tmp_path, env={"TSG_DB": f"sqlite:///{path}"})
    assert ran.returncode == 0, ran.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    assert_tidy(path, HEAD)
    assert_healthy(path)


def test_alembic_without_a_database_says_how_to_name_one(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TSG_DB"}
    ran = subprocess.run(
        [sys.executable, "-m", "alembic", "-c", INI, "upgrade", "head"],
        capture_output=True,
        check=False,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
    )
    assert ran.returncode != 0
    assert "TSG_DB" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_alembic_adopts_a_published_file(legacy: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    path = legacy(name)
    before = content(path)
    ran = alembic("-x", f"db={path}", "upgrade", "head", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert content(path) == before
    assert_tidy(path, HEAD)
    assert_healthy(path)


def test_alembic_refuses_a_published_file_with_unsafe_reasons(legacy: Callable[[str], Path], tmp_path: Path) -> None:
    path = legacy("v1-unsafe-reason")
    before = path.read_bytes()
    ran = alembic("-x", f"db={path}", "upgrade", "head", cwd=tmp_path)
    assert ran.returncode != 0
    assert "disk was full on host" not in ran.stdout + ran.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize("asked", [command.current, command.check])
@pytest.mark.parametrize("name", ["v1", "v2"])
def test_alembic_only_looks_at_a_published_file_when_asked_to_look(
    legacy: Callable[[str], Path], asked: Callable[[Config], None], name: str
) -> None:
    path = legacy(name)
    before = path.read_bytes()
    with contextlib.suppress(CommandError):
        asked(root_config(path))
    assert path.read_bytes() == before


def test_alembic_refuses_to_write_a_script(path: Path) -> None:
    with pytest.raises(CommandError):
        command.upgrade(root_config(path), "head", sql=True)
    assert not path.exists()


def test_alembic_run_by_an_application_leaves_its_loggers_alone(path: Path) -> None:
    with unchanged_loggers(), host(path) as engine:
        config = Config(str(INI))
        config.attributes["connection"] = engine
        command.upgrade(config, "head")
    assert_tidy(path, HEAD)


# -- newer than this package -----------------------------------------------------------------------------


@pytest.fixture
def newer(at: Callable[..., Path]) -> Path:
    path = at(HEAD)
    change(path, "UPDATE tsg_alembic_version SET version_num = '9999'")
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ("init",),
        ("create",),
        ("start", A_TASK),
        ("heartbeat", A_TASK),
        ("close", A_TASK, "--status", "cancelled"),
        ("delivery", A_TASK, "--status", "failed"),
        ("reconcile",),
        ("reconcile", "--dry-run"),
        ("upgrade",),
        ("upgrade", "0002"),
        ("downgrade", "0003"),
        ("downgrade", "base"),
    ],
    ids=" ".join,
)
def test_every_command_leaves_a_newer_ledger_unwritten(newer: Path, arguments: tuple[str, ...]) -> None:
    before = snapshot(newer.parent)
    refused = call("--db", newer, *arguments)
    assert (refused.status, refused.json) == (2, {"error": "SchemaTooNew", "ok": False})
    assert snapshot(newer.parent) == before


def test_current_check_and_doctor_say_that_a_ledger_is_newer(newer: Path) -> None:
    before = newer.read_bytes()
    assert call("--db", newer, "check").status == 1
    assert call("--db", newer, "current").json["schema"]["current"] == "9999"
    report = call("--db", newer, "doctor")
    assert report.status == 1
    assert (report.json["schema_ok"], report.json["schema_version"]) == (False, 9999)
    assert newer.read_bytes() == before


def test_every_way_in_from_python_leaves_a_newer_ledger_unwritten(newer: Path) -> None:
    before = newer.read_bytes()
    for options in ({}, {"migrate": False}, {"adopt": True}):
        with pytest.raises(SchemaTooNew):
            Ledger(newer, **options)
    with Ledger(newer, read_only=True) as ledger, pytest.raises(SchemaTooNew):
        ledger.get_task(A_TASK)
    with host(newer) as engine:
        for step in (
            lambda: Ledger(engine),
            lambda: package.upgrade(engine),
            lambda: package.upgrade(engine, "0001"),
            lambda: package.downgrade(engine, "0001"),
            lambda: package.downgrade(engine, "base"),
        ):
            with pytest.raises(SchemaTooNew):
                step()
    assert newer.read_bytes() == before


@pytest.mark.parametrize("verb", [command.upgrade, command.downgrade])
def test_alembic_leaves_a_newer_ledger_unwritten(newer: Path, verb: Callable[[Config, str], None]) -> None:
    before = newer.read_bytes()
    with pytest.raises((SchemaTooNew, CommandError)):
        verb(root_config(newer), "0003" if verb is command.downgrade else "head")
    assert newer.read_bytes() == before


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM tsg_alembic_version",
        "INSERT INTO tsg_alembic_version VALUES ('0003')",
        "DROP TABLE tsg_alembic_version",
    ],
)
def test_tables_without_exactly_one_version_row_are_a_state_conflict_and_stay(
    at: Callable[..., Path], statement: str
) -> None:
    path = at(HEAD)
    change(path, statement)
    before = path.read_bytes()
    for arguments in (("init",), ("upgrade",), ("downgrade", "0003"), ("current",), ("reconcile", "--dry-run")):
        assert call("--db", path, *arguments).json == {"error": "StateConflict", "ok": False}
    assert call("--db", path, "doctor").status == 1
    with host(path) as engine, pytest.raises(StateConflict):
        package.upgrade(engine)
    assert path.read_bytes() == before


# -- many at once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", [None, "0001"])
def test_four_processes_on_one_database_all_end_at_head(
    at: Callable[..., Path], path: Path, revision: str | None
) -> None:
    before = content(at(revision)) if revision else ([], [])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tsg", "--db", path, *("upgrade" if number % 2 else "init",)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in range(4)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert all(error == b"" and json.loads(out)["ok"] for out, error in outputs)
    assert_tidy(path, HEAD)
    assert content(path) == before
    assert_healthy(path)


def test_four_threads_on_two_databases_all_end_at_head(at: Callable[..., Path], folder: Path) -> None:
    paths = [at("0001", "one.sqlite"), at("0002", "two.sqlite")]
    before = [content(path) for path in paths]
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def bring(path: Path) -> None:
        try:
            barrier.wait()
            with host(path) as engine:
                package.upgrade(engine)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=bring, args=(path,)) for path in paths * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    for path, rows in zip(paths, before, strict=True):
        assert content(path) == rows
        assert_tidy(path, HEAD)


# -- files of the published package ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_an_adopted_file_keeps_every_task_and_event(legacy: Callable[[str], Path], name: str) -> None:
    path = legacy(name)
    before = content(path)
    assert (len(before[0]), len(before[1])) == (120, 351)
    assert call("--db", path, "upgrade").json == {
        "ok": True,
        "schema": {"adopted": True, "current": HEAD, "head": HEAD},
    }
    assert content(path) == before
    assert silent(path) == []
    assert_tidy(path, HEAD)
    report = call("--db", path, "doctor").json
    assert report == {**expected("doctor"), "schema_version": int(HEAD)}
    assert call("--db", path, "upgrade").json["schema"] == {"adopted": False, "current": HEAD, "head": HEAD}


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_a_published_file_is_only_adopted_on_request(legacy: Callable[[str], Path], name: str) -> None:
    path = legacy(name)
    before = path.read_bytes()
    for arguments in (
        ("init",),
        ("create",),
        ("start", A_TASK),
        ("close", A_TASK, "--status", "failed"),
        ("reconcile",),
    ):
        assert call("--db", path, *arguments).json == {"error": "SchemaOutdated", "ok": False}
    for options in ({}, {"migrate": False}):
        with pytest.raises(SchemaOutdated, match="tsg upgrade"):
            Ledger(path, **options)
    with host(path) as engine, pytest.raises(SchemaOutdated):
        Ledger(engine)
    for arguments in (("upgrade", "0002"), ("downgrade", "0001"), ("downgrade", "base")):
        assert call("--db", path, *arguments).status == 2
    assert path.read_bytes() == before
    assert call("--db", path, "check").status == 1
    assert call("--db", path, "current").json["schema"]["current"] == f"000{name[1]}"
    with Ledger(path, adopt=True) as ledger:
        assert ledger.doctor()["healthy"]


def test_a_published_file_with_unsafe_reasons_is_refused_untouched(legacy: Callable[[str], Path]) -> None:
    path = legacy("v1-unsafe-reason")
    before = snapshot(path.parent)
    assert call("--db", path, "upgrade").json == {"error": "StateConflict", "ok": False}
    with pytest.raises(StateConflict):
        Ledger(path, adopt=True)
    with host(path) as engine, pytest.raises(StateConflict):
        package.upgrade(engine)
    assert snapshot(path.parent) == before


NEAR_MISSES: dict[str, tuple[str, str]] = {
    "an index added": ("v1", "CREATE INDEX more ON tasks (created_at)"),
    "an index removed": ("v1", "DROP INDEX tasks_status_idx"),
    "a column added": ("v2", "ALTER TABLE tasks ADD COLUMN note TEXT"),
    "a column added to the events": ("v1", "ALTER TABLE task_events ADD COLUMN note TEXT"),
    "a trigger added": ("v2", "CREATE TRIGGER more AFTER INSERT ON tasks BEGIN SELECT 1; END"),
    "a view added": ("v1", "CREATE VIEW more AS SELECT id FROM tasks"),
    "a table added": ("v2", "CREATE TABLE more (id INTEGER PRIMARY KEY)"),
    "a table added with a name like ours": ("v1", "CREATE TABLE tsg_more (id INTEGER PRIMARY KEY)"),
    "a view added with a name like ours": ("v2", "CREATE VIEW tsg_more AS SELECT id FROM tasks"),
    "a table added in the way of the move": ("v2", "CREATE TABLE tsg_tasks_aside (id INTEGER PRIMARY KEY)"),
    "version 3": ("v2", "UPDATE schema_meta SET value = '3' WHERE key = 'schema_version'"),
    "no version": ("v1", "DELETE FROM schema_meta"),
    "no version beside the fingerprint": ("v2", "DELETE FROM schema_meta WHERE key = 'schema_version'"),
    "a version that is no text": ("v1", "UPDATE schema_meta SET value = x'31'"),
    "no fingerprint": ("v2", "DELETE FROM schema_meta WHERE key = 'schema_fingerprint'"),
    "another fingerprint": ("v2", "UPDATE schema_meta SET value = 'f' || value WHERE key = 'schema_fingerprint'"),
    "a row too many in its meta": ("v1", "INSERT INTO schema_meta VALUES ('more', '1')"),
    "version 1 with the fingerprint of 2": ("v2", "UPDATE schema_meta SET value = '1' WHERE key = 'schema_version'"),
    "events of a task that is not there": ("v1", "UPDATE task_events SET task_id = 'nobody' WHERE sequence = 1"),
    "a task without its events": ("v1", "DELETE FROM task_events WHERE sequence = 1"),
    "a parent that is not there": (
        "v2",
        "UPDATE tasks SET parent_id = '00000000-0000-0000-0000-000000000000' WHERE status = 'queued'",
    ),
    "a version too small": ("v1", "UPDATE tasks SET version = 0 WHERE status = 'succeeded'"),
    "an end that is not the last update": ("v2", "UPDATE tasks SET updated_at = 1 WHERE ended_at IS NOT NULL"),
    "an end before its start": (
        "v1",
        "UPDATE tasks SET ended_at = created_at - 1, updated_at = created_at - 1 WHERE ended_at IS NOT NULL",
    ),
    "an id in other letters": ("v2", "UPDATE tasks SET id = upper(id) WHERE status = 'queued'"),
    "a time that is text": ("v1", "UPDATE tasks SET created_at = 'yesterday' WHERE status = 'queued'"),
    "a flag that is none": ("v1", "UPDATE tasks SET delivery_required = 2"),
    "an unsafe reason": ("v2", "UPDATE tasks SET terminal_code = 'it broke' WHERE status = 'failed'"),
}


@pytest.mark.parametrize(("name", "statement"), NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_what_is_not_exactly_a_published_file_is_refused_untouched(
    legacy: Callable[[str], Path], name: str, statement: str
) -> None:
    path = legacy(name)
    change(path, "PRAGMA foreign_keys = OFF", statement)
    before = snapshot(path.parent)
    assert call("--db", path, "upgrade").status == 2
    assert snapshot(path.parent) == before
    with pytest.raises(StateConflict):
        Ledger(path, adopt=True)
    with host(path) as engine, pytest.raises(StateConflict):
        package.upgrade(engine)
    with pytest.raises((LedgerError, CommandError)):
        command.upgrade(root_config(path), "head")
    assert snapshot(path.parent) == before


@pytest.mark.parametrize("adopt", [lambda path: call("--db", path, "upgrade"), lambda path: Ledger(path, adopt=True)])
def test_a_refused_file_keeps_its_mode_and_its_way_of_journalling(
    legacy: Callable[[str], Path], adopt: Callable[[Path], Any]
) -> None:
    path = legacy("v2")
    change(path, "CREATE TABLE more (id INTEGER PRIMARY KEY)", "PRAGMA journal_mode = DELETE")
    path.chmod(0o644)
    before = snapshot(path.parent)
    with contextlib.suppress(StateConflict):
        assert adopt(path).status == 2
    assert snapshot(path.parent) == before


def test_the_unsafe_file_keeps_its_mode_and_its_way_of_journalling(legacy: Callable[[str], Path]) -> None:
    path = legacy("v1-unsafe-reason")
    change(path, "PRAGMA journal_mode = DELETE")
    path.chmod(0o640)
    before = snapshot(path.parent)
    assert call("--db", path, "upgrade").status == 2
    assert snapshot(path.parent) == before


def test_three_tables_of_a_host_with_those_names_are_its_own(path: Path) -> None:
    change(
        path,
        "CREATE TABLE tasks (id INTEGER PRIMARY KEY, title TEXT)",
        "CREATE TABLE task_events (id INTEGER PRIMARY KEY)",
        "CREATE TABLE schema_meta (version INTEGER)",
        "INSERT INTO tasks VALUES (1, 'mine')",
    )
    before = objects(path)
    with host(path) as engine:
        assert not package.upgrade(engine).adopted
        package.downgrade(engine, "base")
    assert {name: sql for name, sql in objects(path).items() if not name.startswith("tsg_")} == before


# -- in the database of a host ---------------------------------------------------------------------------


def host_database(path: Path) -> list[str]:
    """A host with its own ``tasks`` and its own history, which is nobody else's business."""
    change(
        path,
        "CREATE TABLE tasks (id INTEGER PRIMARY KEY, title TEXT NOT NULL, done BOOLEAN DEFAULT 0)",
        "CREATE INDEX ix_tasks_title ON tasks (title)",
        "INSERT INTO tasks VALUES (1, 'one', 0), (2, 'two', 1)",
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)",
        "INSERT INTO alembic_version VALUES ('abc')",
    )
    return dump(path)


def of_the_host(path: Path) -> list[str]:
    return [line for line in dump(path) if "tsg_" not in line and "sqlite_sequence" not in line]


def test_the_tables_of_a_host_and_its_history_stay_as_they_are(path: Path) -> None:
    before = host_database(path)
    with host(path) as engine:
        package.upgrade(engine)
        assert of_the_host(path) == before
        package.downgrade(engine, "0002")
        assert of_the_host(path) == before
        package.downgrade(engine, "base")
    assert of_the_host(path) == before
    assert set(objects(path)) - {"tasks", "ix_tasks_title", "alembic_version"} <= {"tsg_alembic_version"}


def fill(connection: Connection) -> None:
    """One queued task in the shape of the published schema."""
    connection.exec_driver_sql(
        "INSERT INTO tsg_tasks (id, status, delivery_status, delivery_required, created_at, updated_at, "
        f"delivery_updated_at) VALUES ('{A_TASK}', 'queued', 'pending', 1, 1.0, 1.0, 1.0)"
    )
    connection.exec_driver_sql(
        "INSERT INTO tsg_task_events (task_id, event_kind, to_value, occurred_at, code) "
        f"VALUES ('{A_TASK}', 'created', 'queued', 1.0, 'created')"
    )


def beginning(engine: Engine) -> None:
    """What SQLAlchemy's documentation tells a host to do for real transactions on SQLite."""

    @sa.event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None

    @sa.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")


def enforcing(engine: Engine) -> None:
    @sa.event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, record: object) -> None:
        connection.execute("PRAGMA foreign_keys = ON")


HOSTS: dict[str, tuple[Callable[[Engine], None], ...]] = {
    "as SQLAlchemy makes it": (),
    "with its own begin": (beginning,),
    "with foreign keys enforced": (enforcing,),
    "with both": (beginning, enforcing),
}


@pytest.fixture(params=HOSTS.values(), ids=HOSTS.keys())
def engine(request: pytest.FixtureRequest, path: Path) -> Iterator[Engine]:
    """An application's own engine, in each of its usual ways."""
    with host(path) as made:
        for way in request.param:
            way(made)
        yield made


def test_an_upgrade_in_a_hosts_transaction_goes_when_that_is_rolled_back(path: Path, engine: Engine) -> None:
    before = host_database(path)
    with engine.connect() as connection:
        transaction = connection.begin()
        connection.exec_driver_sql("INSERT INTO tasks VALUES (3, 'three', 0)")
        package.upgrade(connection)
        assert transaction.is_active
        transaction.rollback()
    assert dump(path) == before


def test_an_upgrade_first_in_a_hosts_transaction_goes_when_that_is_rolled_back(path: Path, engine: Engine) -> None:
    before = host_database(path)
    with engine.connect() as connection:
        transaction = connection.begin()
        package.upgrade(connection)
        transaction.rollback()
    assert dump(path) == before


def test_an_upgrade_with_rows_goes_when_the_hosts_transaction_is_rolled_back(path: Path, engine: Engine) -> None:
    package.upgrade(engine, "0002")
    with engine.begin() as connection:
        fill(connection)
    before = dump(path)
    with engine.connect() as connection:
        transaction = connection.begin()
        package.upgrade(connection)
        transaction.rollback()
    assert dump(path) == before


def test_an_upgrade_in_a_hosts_transaction_is_there_with_the_rest_of_it(path: Path, engine: Engine) -> None:
    host_database(path)
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO tasks VALUES (3, 'three', 0)")
        package.upgrade(connection, "0002")
        fill(connection)
        package.upgrade(connection)
        package.downgrade(connection, "0003")
        package.upgrade(connection)
    assert revision_of(path) == [HEAD]
    assert [task[0] for task in content(path)[0]] == [A_TASK]
    with Ledger(engine) as ledger:
        assert ledger.doctor()["healthy"]


def test_a_refused_upgrade_leaves_a_hosts_transaction_without_a_half_moved_schema(path: Path, engine: Engine) -> None:
    host_database(path)
    package.upgrade(engine, "0002")
    with engine.begin() as connection:
        fill(connection)
        connection.exec_driver_sql("UPDATE tsg_tasks SET version = 7")
    before = [line for line in dump(path) if "'three'" not in line]
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO tasks VALUES (3, 'three', 0)")
        with pytest.raises(StateConflict):
            package.upgrade(connection)
    after = dump(path)
    assert [line for line in after if "'three'" not in line] == before
    assert len(after) == len(before) + 1


def test_a_refused_downgrade_leaves_a_hosts_transaction_without_a_half_moved_schema(path: Path, engine: Engine) -> None:
    package.upgrade(engine)
    with Ledger(engine) as ledger:
        ledger.create_task(timeout_seconds=1, expects_heartbeat=False)
    before = dump(path)
    with engine.begin() as connection, pytest.raises(StateConflict):
        package.downgrade(connection, "0001")
    assert dump(path) == before


@pytest.mark.parametrize("direction", ["upgrade", "downgrade"])
@pytest.mark.parametrize("own_transaction", [False, True])
def test_a_hosts_references_to_tasks_still_point_at_them_after_a_rebuild(
    path: Path, engine: Engine, direction: str, own_transaction: bool
) -> None:
    package.upgrade(engine, "0002")
    with engine.begin() as connection:
        fill(connection)
    if direction == "downgrade":
        package.upgrade(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE orders (id INTEGER PRIMARY KEY, task_id VARCHAR(36) REFERENCES tsg_tasks (id))"
        )
        connection.exec_driver_sql(f"INSERT INTO orders VALUES (1, '{A_TASK}')")
    before = of_the_host(path), objects(path)["orders"]
    step = (
        (lambda target: package.upgrade(target))
        if direction == "upgrade"
        else (lambda target: package.downgrade(target, "0002"))
    )
    try:
        if own_transaction:
            with engine.begin() as connection:
                step(connection)
        else:
            step(engine)
    except StateConflict:
        # Where the host's open transaction enforces references, no table can be rebuilt: refused, and unchanged.
        assert own_transaction
        assert revision_of(path) == [HEAD if direction == "downgrade" else "0002"]
    assert (of_the_host(path), objects(path)["orders"]) == before
    with closing(raw(path)) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


@pytest.mark.parametrize("adopted", [False, True])
def test_a_parent_that_is_not_there_is_refused_in_a_hosts_transaction_too(
    at: Callable[..., Path], legacy: Callable[[str], Path], adopted: bool
) -> None:
    path = legacy("v2") if adopted else at("0002")
    table = "tasks" if adopted else "tsg_tasks"
    change(
        path,
        "PRAGMA foreign_keys = OFF",
        f"UPDATE {table} SET parent_id = '00000000-0000-0000-0000-000000000000' WHERE status = 'queued'",
    )
    before = dump(path)
    with host(path) as engine:
        with engine.connect() as connection, connection.begin() as transaction:
            with pytest.raises(StateConflict):
                package.upgrade(connection)
            transaction.rollback()
    assert dump(path) == before


def test_an_engine_in_autocommit_is_upgraded_in_one_transaction_all_the_same(path: Path) -> None:
    with host(path, isolation_level="AUTOCOMMIT") as engine:
        package.upgrade(engine, "0002")
        with engine.connect() as connection:
            fill(connection)
            connection.exec_driver_sql("UPDATE tsg_tasks SET version = 7")
        before = dump(path)
        with pytest.raises(StateConflict):
            package.upgrade(engine)
        assert dump(path) == before
        with engine.connect() as connection:
            connection.exec_driver_sql("UPDATE tsg_tasks SET version = 0")
        package.upgrade(engine)
        with Ledger(engine) as ledger:
            assert ledger.doctor()["healthy"]


def test_a_hosts_connections_enforce_references_after_an_upgrade_as_before(path: Path) -> None:
    with host(path, poolclass=sa.pool.StaticPool) as engine:
        for enforced in (1, 0):
            with engine.connect() as connection:
                connection.exec_driver_sql(f"PRAGMA foreign_keys = {enforced}")
            package.upgrade(engine)
            package.downgrade(engine, "0002")
            with engine.connect() as connection:
                assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == enforced


def test_what_the_database_refuses_comes_out_as_an_error_of_ours(path: Path, folder: Path) -> None:
    noise = folder / "noise.sqlite"
    noise.write_bytes(b"no database at all " * 500)
    with host(noise) as engine:
        for step in (lambda: package.upgrade(engine), lambda: package.downgrade(engine, "0001")):
            with pytest.raises(LedgerError):
                step()
    assert noise.read_bytes() == b"no database at all " * 500


def test_a_busy_database_comes_out_as_an_error_of_ours(path: Path) -> None:
    with host(path, connect_args={"timeout": 0.1}) as engine:
        package.upgrade(engine, "0002")
        with closing(raw(path)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StateConflict):
                package.upgrade(engine)
            with engine.connect() as connection, pytest.raises(StateConflict):
                package.upgrade(connection)
        package.upgrade(engine)


def test_a_table_in_the_way_of_a_rebuild_is_refused_with_an_error_of_ours(at: Callable[..., Path]) -> None:
    path = at("0002")
    change(path, "CREATE TABLE tsg_tasks_aside (id INTEGER PRIMARY KEY)")
    before = dump(path)
    with host(path) as engine, pytest.raises(StateConflict):
        package.upgrade(engine)
    assert call("--db", path, "upgrade").json == {"error": "StateConflict", "ok": False}
    assert dump(path) == before


def test_a_database_of_another_kind_is_refused_without_a_connection() -> None:
    assert call("--db", "mysql://nobody@localhost/nothing", "upgrade").json == {
        "error": "InvalidInput",
        "ok": False,
    }


@contextmanager
def unchanged_loggers() -> Iterator[None]:
    """Loggers, root handlers and levels are afterwards as they were."""
    ours, alembics = logging.getLogger("host.app"), logging.getLogger("alembic")
    ours.setLevel(logging.INFO)
    root = logging.getLogger()

    def state() -> tuple[Any, ...]:
        return (
            root.level,
            list(root.handlers),
            [(logger.level, logger.disabled, logger.propagate, list(logger.handlers)) for logger in (ours, alembics)],
        )

    before = state()
    yield
    assert state() == before
    assert not ours.disabled


def test_a_hosts_loggers_stay_as_they_are(path: Path, folder: Path) -> None:
    with unchanged_loggers():
        with host(path) as engine:
            package.upgrade(engine)
            package.downgrade(engine, "0001")
        Ledger(folder / "another.sqlite").close()


def test_alembic_is_not_imported_for_a_ledger_at_head(ledger: Ledger, path: Path) -> None:
    program = f"""
        import sys
        import sqlalchemy as sa
        from tsg import Ledger
        Ledger({str(path)!r}).close()
        Ledger({str(path)!r}, read_only=True).close()
        engine = sa.create_engine("sqlite:///" + {str(path)!r})
        Ledger(engine).create_task()
        engine.dispose()
        sys.exit(any(name.split(".")[0] in ("alembic", "mako") for name in sys.modules))
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False, timeout=60)
    assert ran.returncode == 0


# -- beside a host's own Alembic -------------------------------------------------------------------------

HOST_ENV = """
import sqlalchemy as sa
import tsg
from alembic import context

metadata = sa.MetaData(naming_convention={"ck": "ck_%(table_name)s_%(constraint_name)s"})
sa.Table("tasks", metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("title", sa.Text))

engine = sa.create_engine(context.config.get_main_option("sqlalchemy.url"))
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=metadata, include_name=tsg.include_name)
    with context.begin_transaction():
        tsg.upgrade(connection)
        context.run_migrations()
engine.dispose()
"""
HOST_REVISION = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "abc", None


def upgrade():
    op.create_table("tasks", sa.Column("id", sa.Integer, primary_key=True), sa.Column("title", sa.Text))


def downgrade():
    op.drop_table("tasks")
"""


@pytest.fixture
def host_history(tmp_path: Path, path: Path) -> Config:
    scripts = tmp_path / "host"
    (scripts / "versions").mkdir(parents=True)
    (scripts / "env.py").write_text(HOST_ENV)
    (scripts / "versions" / "abc_tasks.py").write_text(HOST_REVISION)
    config = Config()
    config.set_main_option("script_location", str(scripts))
    config.set_main_option("path_separator", "os")
    config.set_main_option("sqlalchemy.url", f"sqlite:///{path}")
    return config


def test_the_upgrade_runs_inside_the_env_py_of_a_host(host_history: Config, path: Path) -> None:
    command.upgrade(host_history, "head")
    with closing(raw(path)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("abc",)]
    with host(path) as engine, Ledger(engine) as ledger:
        assert ledger.doctor()["healthy"]
    command.check(host_history)
    command.downgrade(host_history, "base")
    assert "tasks" not in objects(path)
    assert revision_of(path) == [HEAD]


def test_neither_history_proposes_anything_about_the_tables_of_the_other(path: Path) -> None:
    host_database(path)
    metadata = sa.MetaData()
    with host(path) as engine:
        package.upgrade(engine)
        metadata.reflect(engine, only=["tasks"])
        with engine.connect() as connection:
            for include, target in ((package.include_name, metadata), (schema.include_own_name, tables.metadata)):
                options = {"include_name": include, "version_table": tables.VERSION_TABLE}
                if include is package.include_name:
                    del options["version_table"]
                context = MigrationContext.configure(connection, opts=options)
                assert compare_metadata(context, target) == []


def test_the_published_fixtures_are_still_the_published_packages() -> None:
    for name in ("v1", "v2", "v1-unsafe-reason"):
        with closing(sqlite3.connect(f"file:{LEGACY / name}.sqlite?mode=ro&immutable=1", uri=True)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_the_command_in_a_process_of_its_own_upgrades_too(at: Callable[..., Path]) -> None:
    path = at("0001")
    before = content(path)
    ran = tsg("--db", path, "upgrade")
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout == f'{{"ok":true,"schema":{{"adopted":false,"current":"{HEAD}","head":"{HEAD}"}}}}\n'.encode()
    assert content(path) == before
