"""A ledger on a host's own engine, whatever its mode, schema or pool is; and the engine afterwards as it was before."""

from __future__ import annotations

import logging
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import tsg
from tests.conftest import FakeClock
from tsg import Ledger, SchemaOutdated, StateConflict, Task, TaskEvent

ID = "0f8fad5b-d9cb-469f-a165-70867728950e"
TASKS = Task.__table__
EVENTS = TaskEvent.__table__


def recipe(url: sa.URL) -> sa.Engine:
    """SQLAlchemy's documented way to have the driver leave BEGIN alone."""
    engine = sa.create_engine(url)

    @sa.event.listens_for(engine, "connect")
    def connected(driver: sqlite3.Connection, record: object) -> None:
        driver.isolation_level = None

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def not_autocommit(url: sa.URL) -> sa.Engine:
    if sys.version_info < (3, 12):
        pytest.skip("sqlite3 has no autocommit attribute before Python 3.12")
    return sa.create_engine(url, connect_args={"autocommit": False})


def search_path(url: sa.URL) -> sa.Engine:
    """Unqualified names are looked up in an empty schema first."""
    admin = sa.create_engine(url, poolclass=sa.NullPool)
    with admin.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA IF NOT EXISTS nothing")
    return sa.create_engine(url, connect_args={"options": "-c search_path=nothing,public"})


COMMON: dict[str, Callable[[sa.URL], sa.Engine]] = {
    "default": sa.create_engine,
    "autocommit": lambda url: sa.create_engine(url, isolation_level="AUTOCOMMIT"),
    "autocommit option": lambda url: sa.create_engine(url).execution_options(isolation_level="AUTOCOMMIT"),
    "serializable": lambda url: sa.create_engine(url, isolation_level="SERIALIZABLE"),
    "no pool": lambda url: sa.create_engine(url, poolclass=sa.NullPool),
    "one connection": lambda url: sa.create_engine(url, poolclass=sa.StaticPool),
    "echo": lambda url: sa.create_engine(url, echo=True),
}
ENGINES: dict[str, dict[str, Callable[[sa.URL], sa.Engine]]] = {
    "sqlite": COMMON | {"not autocommit": not_autocommit, "recipe": recipe},
    "postgresql": COMMON
    | {
        "repeatable read": lambda url: sa.create_engine(url, isolation_level="REPEATABLE READ"),
        "driver autocommit": lambda url: sa.create_engine(url, connect_args={"autocommit": True}),
        "server's default": lambda url: sa.create_engine(
            url, connect_args={"options": "-c default_transaction_isolation=serializable -c lock_timeout=1234"}
        ),
        "search path": search_path,
    },
}
NAMES = [(dialect, name) for dialect, engines in ENGINES.items() for name in engines]


@pytest.fixture(params=NAMES, ids="-".join)
def engine(request: pytest.FixtureRequest) -> Iterator[sa.Engine]:
    """A host's engine of every kind, on a database at head."""
    dialect, name = request.param
    if dialect == "sqlite":
        url = sa.URL.create("sqlite", database=str(request.getfixturevalue("path")))
    else:
        url = request.getfixturevalue("postgresql_url")
    made = ENGINES[dialect][name](url)
    tsg.upgrade(made)
    yield made
    made.dispose()


def use(engine: sa.Engine, clock: FakeClock) -> None:
    """Every method of a ledger, what is refused included."""
    with Ledger(engine, clock=clock) as ledger:
        ledger.create_task(task_id=ID, timeout_seconds=10, delivery_required=False)
        child = ledger.create_task(parent_id=ID).id
        assert ledger.create_task(task_id=ID, timeout_seconds=10, delivery_required=False).version == 0
        for task in (ID, child):
            ledger.start_task(task)
        clock.advance(1)
        ledger.heartbeat(ID)
        assert [task.id for task in ledger.children_of(ID)] == [child]
        with pytest.raises(StateConflict):
            ledger.set_delivery(ID, "delivered")
        with pytest.raises(tsg.TaskNotFound):
            ledger.get_task("11111111-1111-4111-8111-111111111111")
        ledger.close_task(child, "succeeded", code="completed")
        ledger.set_delivery(child, "delivered")
        clock.advance(10)
        graces = {"active_grace_seconds": 60, "delivery_grace_seconds": 0}
        preview = ledger.reconcile(**graces, dry_run=True)
        assert ledger.get_task(ID).version == 2
        applied = ledger.reconcile(**graces, skip_conflicts=True)
        assert applied == {**preview, "dry_run": False, "applied": True, "conflicts_skipped": 0}
        assert (applied["tasks_timed_out"], applied["deliveries_not_applicable"]) == (1, 1)
        with pytest.raises(StateConflict):
            ledger.start_task(ID)
        report = ledger.doctor()
        assert (report["healthy"], report["task_count"], report["event_count"]) == (True, 2, 8)
        ledger.storage_info()


def rows(engine: sa.Engine) -> tuple[int, int]:
    """Tasks and events, as another connection finds them."""
    other = sa.create_engine(engine.url, poolclass=sa.NullPool)
    with other.connect() as connection:
        return tuple(connection.scalar(sa.select(sa.func.count()).select_from(table)) for table in (TASKS, EVENTS))  # type: ignore[return-value]


def listeners(engine: sa.Engine) -> dict[tuple[str, str], list[object]]:
    """Everything that listens to an engine (with options: to the one that it was made from), its pool or dialect."""
    root = getattr(engine, "_proxied", engine)
    return {
        (name, event): list(getattr(owner.dispatch, event))
        for name, owner in (("engine", root), ("pool", engine.pool), ("dialect", engine.dialect))
        for event in owner.dispatch._event_names
    }


def loggers() -> dict[str, tuple[object, ...]]:
    """What each logger is set to, those that nobody has touched left out."""
    known = {"": logging.root} | {
        name: logger for name, logger in logging.root.manager.loggerDict.items() if isinstance(logger, logging.Logger)
    }
    settings = {
        name: (logger.level, tuple(logger.handlers), tuple(logger.filters), logger.disabled, logger.propagate)
        for name, logger in known.items()
    }
    return {name: value for name, value in settings.items() if value != (logging.NOTSET, (), (), False, True)}


PRAGMAS = (
    "busy_timeout",
    "cell_size_check",
    "defer_foreign_keys",
    "foreign_keys",
    "ignore_check_constraints",
    "journal_mode",
    "legacy_alter_table",
    "locking_mode",
    "query_only",
    "read_uncommitted",
    "recursive_triggers",
    "synchronous",
    "temp_store",
    "trusted_schema",
    "writable_schema",
)


def traits(engine: sa.Engine) -> dict[str, object]:
    """What a connection of the pool is like: its mode, its settings, and what it left open or behind."""
    with engine.connect() as connection:
        driver: Any = connection.connection.dbapi_connection
        found: dict[str, object] = {
            "level": connection.get_isolation_level(),
            "options": dict(connection.get_execution_options()),
        }
        if engine.dialect.name == "sqlite":
            found |= {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in PRAGMAS}
            found |= {
                "mode": driver.isolation_level,
                "row factory": driver.row_factory,
                "temporary": connection.exec_driver_sql("SELECT name FROM sqlite_temp_master").all(),
            }
        else:
            found |= {
                "mode": (driver.autocommit, driver.isolation_level, driver.read_only, driver.deferrable),
                "settings": {
                    name: value
                    for name, value in connection.exec_driver_sql("SELECT name, setting FROM pg_settings")
                    # A server's language brings settings along once it is loaded.
                    if not name.startswith("plpgsql.")
                },
                "temporary": connection.exec_driver_sql(
                    "SELECT relname FROM pg_class WHERE relpersistence = 't'"
                ).all(),
            }
    return found


def at_rest(engine: sa.Engine) -> None:
    """Nothing that the engine's connections began is open still, and all of them are in the pool."""
    if isinstance(engine.pool, sa.QueuePool):
        assert getattr(engine.pool, "checkedout", int)() == 0
    if engine.dialect.name == "sqlite":
        other = sqlite3.connect(str(engine.url.database), isolation_level=None, timeout=0)
        other.execute("BEGIN EXCLUSIVE")
        other.execute("ROLLBACK")
        other.close()
        return
    other_engine = sa.create_engine(engine.url, poolclass=sa.NullPool)
    with other_engine.connect() as connection:
        mine = "datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        states = connection.exec_driver_sql(f"SELECT state FROM pg_stat_activity WHERE {mine}").scalars().all()
        assert set(states) <= {"idle"}
        assert connection.exec_driver_sql("SELECT count(*) FROM pg_prepared_xacts").scalar() == 0
        locks = (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        assert connection.exec_driver_sql(locks).scalar() == 0


def test_every_method_works_and_the_hosts_engine_is_afterwards_as_it_was(engine: sa.Engine, clock: FakeClock) -> None:
    pool = engine.pool
    size = pool.size() if isinstance(pool, sa.QueuePool) else None
    before = (
        listeners(engine),
        dict(engine.get_execution_options()),
        engine.echo,
        engine.hide_parameters,
        loggers(),
        traits(engine),
    )
    use(engine, clock)
    assert engine.pool is pool
    assert (pool.size() if isinstance(pool, sa.QueuePool) else None) == size
    assert (
        listeners(engine),
        dict(engine.get_execution_options()),
        engine.echo,
        engine.hide_parameters,
        loggers(),
        traits(engine),
    ) == before
    at_rest(engine)
    assert rows(engine) == (2, 8)


def test_a_connection_may_be_given_before_anything_was_done_on_it(
    engine: sa.Engine, clock: FakeClock, request: pytest.FixtureRequest
) -> None:
    _, kind = request.node.callspec.params["engine"]
    policy = tsg.ReconcilePolicy()
    with engine.connect() as connection:
        assert tsg.doctor.examine(connection)["healthy"]
    with engine.connect() as connection:
        assert tsg.reconcile.preview(connection, policy, clock=clock)["tasks_timed_out"] == 0
    at_rest(engine)
    with engine.connect() as connection:
        if kind in ("autocommit", "autocommit option"):
            with pytest.raises(StateConflict):
                tsg.reconcile.apply(connection, policy, clock=clock)
        elif kind != "driver autocommit":
            # Of that one SQLAlchemy itself forgets when it puts an isolation level back.
            assert tsg.reconcile.apply(connection, policy, clock=clock)["applied"]
            connection.commit()
    at_rest(engine)


def test_migrating_and_looking_leave_the_hosts_engine_as_it_was(engine: sa.Engine) -> None:
    def state() -> tuple[object, ...]:
        return listeners(engine), dict(engine.get_execution_options()), engine.pool, loggers(), traits(engine)

    before = state()
    tsg.downgrade(engine, "0002")
    with pytest.raises(SchemaOutdated, match="tsg upgrade"):
        Ledger(engine)
    assert state() == before
    tsg.upgrade(engine)
    with Ledger(engine) as ledger:
        assert ledger.doctor()["healthy"]
    assert state() == before
    at_rest(engine)


def test_what_is_refused_in_the_middle_leaves_nothing_behind(engine: sa.Engine, clock: FakeClock) -> None:
    before = traits(engine)
    with Ledger(engine, clock=clock) as ledger:
        ledger.create_task(task_id=ID)
        ledger.start_task(ID)
        with engine.connect() as connection, connection.begin():
            # An event that no verb wrote: the next one of that number is refused by its key.
            connection.execute(
                sa.insert(EVENTS).values(
                    task_pk=sa.select(TASKS.c.pk).scalar_subquery(),
                    number=2,
                    kind="task_transition",
                    from_status="running",
                    to_status="failed",
                    occurred_at=1_000.0,
                )
            )
        with pytest.raises(StateConflict):
            ledger.close_task(ID, "succeeded")
        with pytest.raises(StateConflict):
            ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0)
        assert (ledger.get_task(ID).status, ledger.get_task(ID).version) == ("running", 1)
        report = ledger.doctor()
        assert (report["healthy"], report["event_inconsistency_count"]) == (False, 1)
    assert traits(engine) == before
    at_rest(engine)


def test_closing_a_ledger_leaves_the_hosts_engine_and_its_connections_alone(engine: sa.Engine) -> None:
    with engine.connect() as connection:
        held: Any = connection.connection.dbapi_connection
    ledger = Ledger(engine)
    pool = engine.pool
    with engine.connect() as connection:
        ledger.close()
        ledger.close()
        assert connection.scalar(sa.select(1)) == 1
    with pytest.raises(StateConflict):
        ledger.get_task(ID)
    assert engine.pool is pool
    if not isinstance(pool, sa.NullPool):
        with engine.connect() as connection:
            assert connection.connection.dbapi_connection is held
    with Ledger(engine) as again:
        again.create_task()


def test_the_hosts_own_transaction_and_a_ledgers_are_two(engine: sa.Engine, clock: FakeClock) -> None:
    if isinstance(engine.pool, sa.StaticPool):
        pytest.skip("with one connection there is one transaction")
    with engine.connect() as connection, connection.begin() as transaction:
        connection.scalar(sa.select(1))
        with Ledger(engine, clock=clock) as ledger:
            ledger.create_task(task_id=ID)
        transaction.rollback()
    assert rows(engine) == (1, 1)


# -- another schema --------------------------------------------------------------------------------------


@pytest.fixture
def translated(empty_postgresql_url: sa.URL) -> Iterator[sa.Engine]:
    """An engine whose statements go to the schema ``app``, at head there."""
    plain = sa.create_engine(empty_postgresql_url)
    with plain.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA app")
    engine = plain.execution_options(schema_translate_map={None: "app"})
    with pytest.raises(SchemaOutdated, match="tsg upgrade"):
        Ledger(engine)
    tsg.upgrade(engine)
    yield engine
    plain.dispose()


OWNED = (
    "SELECT nspname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE relname LIKE 'tsg%%' "
    "UNION ALL SELECT nspname FROM pg_proc JOIN pg_namespace n ON n.oid = pronamespace WHERE proname LIKE 'tsg%%'"
)


def test_with_schema_translation_everything_lands_in_that_schema_and_works_from_there(
    translated: sa.Engine, clock: FakeClock
) -> None:
    options = dict(translated.get_execution_options())
    with translated.connect() as connection:
        assert set(connection.exec_driver_sql(OWNED).scalars()) == {"app"}
    before = traits(translated)
    use(translated, clock)
    with translated.connect() as connection:
        assert set(connection.exec_driver_sql(OWNED).scalars()) == {"app"}
        assert connection.exec_driver_sql("SELECT count(*) FROM app.tsg_task_events").scalar() == 8
    assert (dict(translated.get_execution_options()), traits(translated)) == (options, before)
    with Session(translated, info={"tsg_clock": clock}) as session:
        task = Task()
        session.add(task)
        task.start()
        session.commit()
        assert tsg.doctor.examine(session)["healthy"]
        clock.advance(1_000)
        assert tsg.reconcile.apply(session, tsg.ReconcilePolicy(), now=clock.now)["tasks_timed_out"] == 1
        assert task.status == "timed_out"
        session.commit()
    at_rest(translated)


def test_with_schema_translation_the_guards_fire(translated: sa.Engine, clock: FakeClock) -> None:
    use(translated, clock)
    for statement in (
        sa.update(TASKS).values(status="running"),
        sa.update(TASKS).values(version=-1),
        sa.update(EVENTS).values(code="started"),
        sa.delete(EVENTS),
        sa.text("UPDATE app.tsg_tasks SET delivery_status = 'failed'"),
        sa.text("DELETE FROM app.tsg_task_events"),
    ):
        with translated.begin() as connection, pytest.raises(IntegrityError):
            connection.execute(statement)
    with translated.begin() as connection:
        connection.execute(sa.delete(TASKS).where(TASKS.c.parent_id.is_not(None)))
    with Ledger(translated) as ledger:
        report = ledger.doctor()
        assert (report["healthy"], report["task_count"], report["event_count"]) == (True, 1, 4)


def test_with_schema_translation_two_ledgers_live_in_one_database(translated: sa.Engine, clock: FakeClock) -> None:
    plain = sa.create_engine(translated.url)
    tsg.upgrade(plain)
    with Ledger(plain, clock=clock) as one, Ledger(translated, clock=clock) as other:
        one.create_task(task_id=ID)
        with pytest.raises(tsg.TaskNotFound):
            other.get_task(ID)
        other.create_task(task_id=ID, timeout_seconds=5)
        other.start_task(ID)
        assert one.get_task(ID).status == "queued"
        assert one.doctor()["healthy"]
        assert other.doctor()["healthy"]
        assert one.doctor()["event_count"] == 1
    tsg.downgrade(plain, "0003")
    with Ledger(translated) as other:
        assert other.doctor()["healthy"]
    with pytest.raises(SchemaOutdated):
        Ledger(plain)
    plain.dispose()


def test_a_migration_stays_in_the_schema_that_the_ledger_is_in(postgresql_url: sa.URL, clock: FakeClock) -> None:
    engine = search_path(postgresql_url)
    tsg.downgrade(engine, "0002")
    with pytest.raises(SchemaOutdated):
        Ledger(engine)
    tsg.upgrade(engine)
    with engine.connect() as connection:
        assert set(connection.exec_driver_sql(OWNED).scalars()) == {"public"}
        assert connection.exec_driver_sql("SHOW search_path").scalar() == "nothing,public"
    use(engine, clock)
    engine.dispose()


def test_a_new_ledger_is_made_in_the_first_schema_of_the_search_path(empty_postgresql_url: sa.URL) -> None:
    engine = search_path(empty_postgresql_url)
    tsg.upgrade(engine)
    with engine.connect() as connection:
        assert set(connection.exec_driver_sql(OWNED).scalars()) == {"nothing"}
    with Ledger(engine) as ledger:
        ledger.create_task()
        assert ledger.doctor()["healthy"]
    engine.dispose()


# -- the host's own names --------------------------------------------------------------------------------


CONVENTION = {
    "pk": "PRIMARY_%(table_name)s",
    "uq": "UNIQUE_%(table_name)s_%(column_0_name)s",
    "fk": "hosts_fk_%(table_name)s_%(column_0_name)s",
    "ck": "CHECK_%(table_name)s_%(constraint_name)s",
    "ix": "INDEX_%(table_name)s_%(column_0_name)s",
}


class NamingBase(DeclarativeBase):
    metadata = sa.MetaData(naming_convention=CONVENTION)


class Invoice(NamingBase):
    __tablename__ = "invoices"

    id: Mapped[int] = mapped_column(primary_key=True)
    task_id: Mapped[str] = mapped_column(sa.ForeignKey(Task.id), index=True, unique=False)


def test_a_hosts_naming_convention_names_its_tables_and_not_ours(host_engine: sa.Engine, clock: FakeClock) -> None:
    NamingBase.metadata.create_all(host_engine)
    inspector = sa.inspect(host_engine)
    (key,) = inspector.get_foreign_keys("invoices")
    assert (key["name"], key["referred_table"]) == ("hosts_fk_invoices_task_id", "tsg_tasks")
    assert [index["name"] for index in inspector.get_indexes("invoices")] == ["INDEX_invoices_task_id"]
    assert inspector.get_pk_constraint("tsg_tasks")["name"] == "pk_tsg_tasks"
    use(host_engine, clock)
    with Session(host_engine, info={"tsg_clock": clock}) as session:
        task = Task()
        session.add(task)
        session.flush()
        session.add(Invoice(task_id=task.id))
        session.commit()
        assert tsg.doctor.examine(session)["schema_ok"]
    assert NamingBase.metadata.naming_convention["ck"] == CONVENTION["ck"]
    assert "tsg_tasks" not in NamingBase.metadata.tables
    with host_engine.begin() as connection:
        connection.execute(sa.delete(Invoice.__table__))
    NamingBase.metadata.drop_all(host_engine)
    with Ledger(host_engine) as ledger:
        assert ledger.doctor()["healthy"]


# -- schemas that are not at head, and what the storage says of itself --------------------------------------


def test_a_database_without_a_ledger_is_outdated_and_left_alone(empty_postgresql_url: sa.URL, folder: Path) -> None:
    for url in (empty_postgresql_url, sa.URL.create("sqlite", database=str(folder / "host.sqlite"))):
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE tasks (id INTEGER PRIMARY KEY)")
        with pytest.raises(SchemaOutdated, match="tsg upgrade"):
            Ledger(engine)
        assert sa.inspect(engine).get_table_names() == ["tasks"]
        engine.dispose()


def test_a_schema_that_somebody_altered_is_refused(host_engine: sa.Engine) -> None:
    with host_engine.begin() as connection:
        connection.exec_driver_sql("DROP INDEX ix_tsg_tasks_active")
    with pytest.raises(StateConflict, match="tsg check"):
        Ledger(host_engine)
    with host_engine.connect() as connection:
        report = tsg.doctor.examine(connection)
        assert (report["healthy"], report["schema_ok"], report["doctor_error_count"]) == (False, False, 1)


def test_a_schema_of_a_later_release_is_refused_unwritten(host_engine: sa.Engine) -> None:
    with host_engine.begin() as connection:
        connection.exec_driver_sql("UPDATE tsg_alembic_version SET version_num = '9999'")
    for attempt in (lambda: Ledger(host_engine), lambda: tsg.upgrade(host_engine)):
        with pytest.raises(tsg.SchemaTooNew):
            attempt()
    with host_engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT version_num FROM tsg_alembic_version").scalar() == "9999"


def test_on_a_server_what_has_no_meaning_is_said_to_be_so(postgresql_url: sa.URL) -> None:
    engine = sa.create_engine(postgresql_url, connect_args={"options": "-c lock_timeout=1234"})
    with Ledger(engine) as hosts, Ledger(postgresql_url, busy_timeout_ms=777) as ours:
        told = hosts.storage_info()
        assert (told["journal_mode"], told["foreign_keys"], told["busy_timeout_ms"]) == ("unavailable", True, 1234)
        assert ours.storage_info()["busy_timeout_ms"] == 777
        assert hosts.doctor()["quick_check"] == ours.doctor()["quick_check"] == "unavailable"
        assert hosts.doctor()["healthy"]
    engine.dispose()


def test_a_hosts_echo_tells_the_ledgers_statements_and_no_more(
    host_engine: sa.Engine, caplog: pytest.LogCaptureFixture, clock: FakeClock
) -> None:
    engine = sa.create_engine(host_engine.url, hide_parameters=True)
    with caplog.at_level(logging.INFO, logger="sqlalchemy.engine"):
        use(engine, clock)
    assert any("tsg_tasks" in record.getMessage() for record in caplog.records)
    assert not any(ID in record.getMessage() for record in caplog.records)
    engine.dispose()
