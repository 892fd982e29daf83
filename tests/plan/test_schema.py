"""The plan layer's own history: beside the ledger's, with free text in its tables alone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.engine import Engine

import tsg
from tests.conftest import tsg as run
from tsg import Ledger, Plans, SchemaOutdated, SchemaTooNew, StateConflict, catalog, plan
from tsg import schema as ledger_schema
from tsg.plan import schema, tables

ROOT = Path(__file__).resolve().parents[2]
OURS = {*tables.metadata.tables, "tsg_plan_alembic_version"}


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An application's own database with nothing in it."""
    if request.param == "sqlite":
        engine = sa.create_engine(sa.URL.create("sqlite", database=str(request.getfixturevalue("path"))))
    else:
        engine = sa.create_engine(request.getfixturevalue("empty_postgresql_url"))
    yield engine
    engine.dispose()


def names(engine: Engine) -> set[str]:
    return set(sa.inspect(engine).get_table_names())


def lines(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return sorted(" ".join(line.split()) for line in catalog.statements(connection, schema._PART))


def test_the_migrations_make_what_the_tables_say(empty_engine: Engine) -> None:
    plan.upgrade(empty_engine)
    migrated = lines(empty_engine)
    plan.downgrade(empty_engine, "base")
    with empty_engine.begin() as connection:
        tables.version_table.drop(connection)
        tables.metadata.create_all(connection)
        tables.version_table.create(connection)
    assert lines(empty_engine) == migrated
    with empty_engine.connect() as connection:
        assert schema.is_exact(connection)


def test_alembic_sees_no_difference_and_goes_both_ways(empty_engine: Engine) -> None:
    config = Config(str(ROOT / "alembic.ini"), ini_section="plan")
    config.attributes["connection"] = empty_engine
    command.upgrade(config, "head")
    assert names(empty_engine) >= {"tsg_tasks", *OURS}
    command.check(config)
    with empty_engine.connect() as connection:
        assert schema.fault(connection) is None
        assert ledger_schema.fault(connection) is None
    command.downgrade(config, "base")
    assert names(empty_engine) & set(tables.metadata.tables) == set()
    with empty_engine.connect() as connection:
        assert ledger_schema.fault(connection) is None


def test_the_alembic_command_has_a_section_for_plans(folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "alembic", "-n", "plan", "-x", f"db={folder / 'l.sqlite'}", "upgrade", "head"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    with Ledger(folder / "l.sqlite", migrate=False) as ledger:
        Plans(ledger).create("feature")


def test_a_ledger_alone_has_no_table_of_plans(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.create_task()
    engine = sa.create_engine(f"sqlite:///{path}")
    assert not any(name.startswith("tsg_plan") for name in names(engine))
    engine.dispose()


def test_no_table_of_the_ledger_changes_when_plans_come(empty_engine: Engine) -> None:
    tsg.upgrade(empty_engine)
    with empty_engine.connect() as connection:
        before = catalog.digest(catalog.statements(connection))
    assert plan.upgrade(empty_engine).current == schema.HEAD
    with empty_engine.connect() as connection:
        assert catalog.digest(catalog.statements(connection)) == before
        assert ledger_schema.check(connection)[1]


def test_an_application_s_engine_without_plans_is_told_the_command(empty_engine: Engine) -> None:
    tsg.upgrade(empty_engine)
    with pytest.raises(SchemaOutdated, match="tsg upgrade --plan"):
        Plans(Ledger(empty_engine))
    assert names(empty_engine) & OURS == set()
    plan.upgrade(empty_engine)
    assert Plans(Ledger(empty_engine)).create("feature")["status"] == "pending"


def test_a_ledger_that_may_not_migrate_brings_no_plans_in(path: Path) -> None:
    Ledger(path).close()
    for options in ({"migrate": False}, {"read_only": True}):
        with Ledger(path, **options) as ledger, pytest.raises(SchemaOutdated, match="tsg upgrade --plan"):
            Plans(ledger)


def test_plans_can_be_read_on_a_ledger_that_is_read_only(path: Path) -> None:
    with Ledger(path) as ledger:
        Plans(ledger).create("feature")
        Plans(ledger).add_step("feature", subject="look")
    with Ledger(path, read_only=True) as ledger:
        plans = Plans(ledger)
        assert [step["id"] for step in plans.steps("feature")] == ["T-001"]
        assert plans.show("feature")["ready"] == 1
        with pytest.raises(StateConflict, match="read-only"):
            plans.claim("feature", "somebody")


def test_plans_stay_while_there_are_any(empty_engine: Engine) -> None:
    plan.upgrade(empty_engine)
    plans = Plans(Ledger(empty_engine))
    plans.create("feature")
    with pytest.raises(StateConflict, match="remove them first"):
        plan.downgrade(empty_engine, "base")
    assert plans.show("feature")["name"] == "feature"
    plans.remove("feature")
    assert plan.downgrade(empty_engine, "base").current is None
    assert Ledger(empty_engine).doctor()["healthy"]


def test_a_later_release_s_plans_are_refused(empty_engine: Engine) -> None:
    plan.upgrade(empty_engine)
    with empty_engine.begin() as connection:
        connection.exec_driver_sql("UPDATE tsg_plan_alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaTooNew):
        Plans(Ledger(empty_engine))
    with pytest.raises(SchemaTooNew):
        plan.upgrade(empty_engine)


def test_a_table_of_somebody_else_s_with_our_name_is_refused(empty_engine: Engine) -> None:
    tsg.upgrade(empty_engine)
    with empty_engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE tsg_plan_of_somebody (a INTEGER)")
    with pytest.raises(StateConflict):
        plan.upgrade(empty_engine)
    assert "tsg_plans" not in names(empty_engine)


def test_of_several_that_bring_plans_in_at_once_each_finds_them(own_place: Path | sa.URL) -> None:
    Ledger(own_place).close()
    failures: list[BaseException] = []

    def begin(number: int) -> None:
        try:
            with Ledger(own_place) as ledger:
                Plans(ledger).create(f"feature {number}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with Ledger(own_place) as ledger:
        assert len(Plans(ledger).plans()) == 6


def test_a_host_s_autogenerate_leaves_plans_alone(empty_engine: Engine) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    plan.upgrade(empty_engine)
    with empty_engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_name": tsg.include_name})
        assert compare_metadata(context, sa.MetaData()) == []


def test_the_commands_on_the_schema_take_plan(path: Path) -> None:
    def said(*arguments: str, status: int = 0) -> dict[str, object]:
        ran = run("--db", path, *arguments)
        assert (ran.returncode, ran.stderr) == (status, b"")
        answer: dict[str, object] = json.loads(ran.stdout)
        return answer

    none = {"adopted": False, "current": None, "head": schema.HEAD}
    there = {**none, "current": schema.HEAD}
    assert said("upgrade")["schema"] == {"adopted": False, "current": "0004", "head": "0004"}
    assert said("current", "--plan")["schema"] == none
    assert said("check", "--plan", status=1) == {"ok": False, "schema": none}
    assert said("upgrade", "--plan")["schema"] == there
    assert said("check", "--plan") == {"ok": True, "schema": there}
    assert said("check")["ok"] is True
    assert said("upgrade", "--plan", "9999", status=2) == {"error": "InvalidInput", "ok": False}
    assert said("downgrade", "--plan", "base")["schema"] == none
    assert said("doctor")["healthy"] is True


def test_upgrade_plan_makes_a_ledger_too(path: Path) -> None:
    assert run("--db", path, "upgrade", "--plan").returncode == 0
    with Ledger(path, migrate=False) as ledger:
        assert Plans(ledger).plans() == []
