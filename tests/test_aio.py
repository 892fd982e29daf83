"""The ledger for asyncio: every method over each driver, and what a cancelled or a crowded one leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import math
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

import tsg
from tests.conftest import FakeClock
from tsg import (
    AsyncLedger,
    DeliveryStatus,
    InvalidInput,
    Ledger,
    LedgerError,
    SchemaOutdated,
    StateConflict,
    Task,
    TaskNotFound,
    TaskRecord,
    TaskStatus,
)

DRIVERS = ("sqlite+aiosqlite", "postgresql+psycopg", "postgresql+asyncpg")
UNKNOWN = "ffffffff-ffff-4fff-bfff-ffffffffffff"
DIGEST = "0123456789abcdef" * 4
EVENTS = sa.text(
    "SELECT number, kind, from_status, to_status, occurred_at, code FROM tsg_task_events "
    "JOIN tsg_tasks ON pk = task_pk WHERE id = :id ORDER BY number"
)


@pytest.fixture(params=DRIVERS)
def empty_url(request: pytest.FixtureRequest) -> sa.URL:
    """A database with nothing in it, for each driver."""
    if request.param.startswith("sqlite"):
        return sa.URL.create(request.param, database=str(request.getfixturevalue("path")))
    url: sa.URL = request.getfixturevalue("empty_postgresql_url")
    return url.set(drivername=request.param)


@pytest.fixture(params=DRIVERS)
def url(request: pytest.FixtureRequest) -> sa.URL:
    """A database at head, for each driver."""
    if request.param.startswith("sqlite"):
        path: Path = request.getfixturevalue("path")
        Ledger(path).close()
        return sa.URL.create(request.param, database=str(path))
    at_head: sa.URL = request.getfixturevalue("postgresql_url")
    return at_head.set(drivername=request.param)


@contextlib.asynccontextmanager
async def using(url: sa.URL, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url, **options)
    try:
        yield engine
    finally:
        await engine.dispose()


def checked_out(engine: AsyncEngine) -> int:
    """How many connections are in use; an older SQLAlchemy keeps none for a file, and does not count."""
    count: Callable[[], int] = getattr(engine.sync_engine.pool, "checkedout", lambda: 0)
    return count()


def running(work: Callable[[AsyncEngine], Coroutine[Any, Any, None]], url: sa.URL, **options: Any) -> None:
    """Run `work` on an engine in a loop of its own."""

    async def run() -> None:
        async with using(url, **options) as engine:
            await work(engine)

    asyncio.run(run())


async def events(engine: AsyncEngine, task_id: str) -> list[tuple[Any, ...]]:
    identifier = uuid.UUID(task_id) if engine.dialect.name == "postgresql" else task_id
    async with engine.connect() as connection:
        return [tuple(row) for row in await connection.execute(EVENTS, {"id": identifier})]


async def contents(engine: AsyncEngine) -> list[list[tuple[Any, ...]]]:
    async with engine.connect() as connection:
        return [
            [tuple(row) for row in await connection.execute(sa.text(f"SELECT * FROM {table} ORDER BY 1, 2"))]
            for table in ("tsg_tasks", "tsg_task_events")
        ]


# -- the methods -------------------------------------------------------------------------------------------


def test_every_method_does_what_the_ledgers_does_and_gives_plain_values(url: sa.URL) -> None:
    clock = FakeClock(1_000)
    kept: dict[str, Any] = {}

    async def work(engine: AsyncEngine) -> None:
        ledger = AsyncLedger(engine, clock=clock)
        kept["queued"] = queued = await ledger.create_task(payload_hash=DIGEST, timeout_seconds="30")
        child = await ledger.create_task(parent_id=uuid.UUID(queued.id), delivery_required=False)
        kept["children"] = await ledger.children_of(queued.id)
        clock.now = 1_010
        kept["started"] = await ledger.start_task(queued.id)
        assert await ledger.start_task(queued.id) == kept["started"]
        clock.now = 1_015.5
        kept["beaten"] = await ledger.heartbeat(queued.id.upper())
        clock.now = 1_020
        kept["ended"] = await ledger.close_task(queued.id, "succeeded", code="completed")
        clock.now = 1_030
        kept["delivered"] = await ledger.set_delivery(
            queued.id, DeliveryStatus.DELIVERED, code="transport_acknowledged"
        )
        kept["read"] = await ledger.get_task(queued.id)
        assert await events(engine, queued.id) == [
            (0, "created", None, "queued", 1_000.0, "created"),
            (1, "task_transition", "queued", "running", 1_010.0, "started"),
            (2, "task_transition", "running", "succeeded", 1_020.0, "completed"),
            (3, "delivery_transition", "pending", "delivered", 1_030.0, "transport_acknowledged"),
        ]
        await ledger.start_task(child.id)
        clock.now = 2_000
        kept["preview"] = await ledger.reconcile(active_grace_seconds=600, delivery_grace_seconds=0, dry_run=True)
        kept["applied"] = await ledger.reconcile(active_grace_seconds=600, delivery_grace_seconds=0)
        kept["scoped"] = await ledger.reconcile(
            active_grace_seconds=0, delivery_grace_seconds=0, skip_conflicts=True, parent_id=queued.id
        )
        kept["doctor"] = await ledger.doctor()
        kept["storage"] = await ledger.storage_info()

    running(work, url)
    queued, started, ended = kept["queued"], kept["started"], kept["ended"]
    assert queued == TaskRecord(
        id=queued.id,
        parent_id=None,
        status=TaskStatus.QUEUED,
        delivery_status=DeliveryStatus.PENDING,
        delivery_required=True,
        payload_hash=DIGEST,
        timeout_seconds=30.0,
        created_at=1_000.0,
        started_at=None,
        updated_at=1_000.0,
        ended_at=None,
        deadline_at=None,
        delivery_updated_at=1_000.0,
        terminal_code=None,
        delivery_code=None,
        version=0,
        expects_heartbeat=True,
    )
    assert started == dataclasses.replace(
        queued, status=TaskStatus.RUNNING, started_at=1_010.0, updated_at=1_010.0, deadline_at=1_040.0, version=1
    )
    assert kept["beaten"] == dataclasses.replace(started, updated_at=1_015.5, version=2)
    assert (ended.status, ended.ended_at, ended.terminal_code, ended.version) == (
        "succeeded",
        1_020.0,
        "completed",
        3,
    )
    assert kept["read"] == kept["delivered"]
    assert {type(value) for value in dataclasses.astuple(kept["read"])} <= {
        str,
        float,
        int,
        bool,
        type(None),
        TaskStatus,
        DeliveryStatus,
    }
    assert [child.parent_id for child in kept["children"]] == [queued.id]
    assert kept["applied"]["tasks_timed_out"] == kept["applied"]["deliveries_not_applicable"] == 1
    assert kept["preview"] == {**kept["applied"], "dry_run": True, "applied": False}
    assert kept["scoped"]["conflicts_skipped"] == kept["scoped"]["active_examined"] == 0
    assert kept["doctor"]["healthy"]
    assert kept["doctor"]["event_count"] == 4 + 4
    assert set(kept["storage"]) == {"journal_mode", "busy_timeout_ms", "foreign_keys", "permission_model"}
    assert kept["storage"]["permission_model"] == "external_acl"
    assert kept["storage"]["journal_mode"] == ("wal" if url.get_backend_name() == "sqlite" else "unavailable")


REFUSALS: list[tuple[str, Callable[[AsyncLedger, str], Awaitable[object]], type[LedgerError]]] = [
    ("a malformed id", lambda ledger, _: ledger.get_task("no-uuid"), InvalidInput),
    ("an id of another type", lambda ledger, _: ledger.get_task(5), InvalidInput),
    ("an unknown task", lambda ledger, _: ledger.get_task(UNKNOWN), TaskNotFound),
    ("an unknown parent's children", lambda ledger, _: ledger.children_of(UNKNOWN), TaskNotFound),
    ("an unknown task to start", lambda ledger, _: ledger.start_task(UNKNOWN), TaskNotFound),
    ("a heartbeat of a queued task", lambda ledger, task: ledger.heartbeat(task), StateConflict),
    ("no terminal status", lambda ledger, task: ledger.close_task(task, "running"), InvalidInput),
    ("a bad status of an unknown task", lambda ledger, _: ledger.close_task(UNKNOWN, "bogus"), InvalidInput),
    ("a bad code", lambda ledger, task: ledger.close_task(task, "failed", code="completed"), InvalidInput),
    ("a delivery of an active task", lambda ledger, task: ledger.set_delivery(task, "delivered"), StateConflict),
    ("a missing parent", lambda ledger, _: ledger.create_task(parent_id=UNKNOWN), TaskNotFound),
    ("a malformed hash", lambda ledger, _: ledger.create_task(payload_hash="F" * 64), InvalidInput),
    ("a boolean timeout", lambda ledger, _: ledger.create_task(timeout_seconds=True), InvalidInput),
    ("a huge timeout", lambda ledger, _: ledger.create_task(timeout_seconds=10**400), InvalidInput),
    ("a flag that is none", lambda ledger, _: ledger.create_task(delivery_required="no"), InvalidInput),
    ("other fields", lambda ledger, task: ledger.create_task(task_id=task, timeout_seconds=1), StateConflict),
    (
        "a negative grace",
        lambda ledger, _: ledger.reconcile(active_grace_seconds=-1, delivery_grace_seconds=0),
        InvalidInput,
    ),
    (
        "a dry_run that is no flag",
        lambda ledger, _: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0, dry_run=1),
        InvalidInput,
    ),
    (
        "an unknown parent to reconcile",
        lambda ledger, _: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0, parent_id=UNKNOWN),
        TaskNotFound,
    ),
]


def test_what_is_refused_has_the_ledgers_errors_and_changes_nothing(url: sa.URL) -> None:
    clock = FakeClock()

    async def work(engine: AsyncEngine) -> None:
        ledger = AsyncLedger(engine, clock=clock)
        task = (await ledger.create_task()).id
        before = await contents(engine)
        for name, call, refusal in REFUSALS:
            with pytest.raises(LedgerError) as caught:
                await call(ledger, task)
            assert type(caught.value) is refusal, name
            assert caught.value.__cause__ is None
            assert not any(secret in str(caught.value) for secret in (task, UNKNOWN, "tsg_tasks", "bogus"))
        for now, refusal in ((math.nan, InvalidInput), (999.0, StateConflict), (None, InvalidInput)):
            clock.now = now
            with pytest.raises(refusal):
                await ledger.start_task(task)
        assert await contents(engine) == before
        clock.now = 1_000.0
        assert (await ledger.start_task(task)).status is TaskStatus.RUNNING

    running(work, url)


@pytest.mark.parametrize("engine", [None, "sqlite+aiosqlite://", 5, object()])
def test_anything_but_an_async_engine_is_refused(engine: Any) -> None:
    with pytest.raises(InvalidInput):
        AsyncLedger(engine)


def test_an_engine_that_is_not_async_is_refused_and_so_is_a_clock_that_is_none(url: sa.URL) -> None:
    plain = sa.create_engine("sqlite://")
    with pytest.raises(InvalidInput):
        AsyncLedger(plain)  # type: ignore[arg-type]
    plain.dispose()

    async def work(engine: AsyncEngine) -> None:
        for clock in (None, 5, "now"):
            with pytest.raises(InvalidInput):
                AsyncLedger(engine, clock=clock)  # type: ignore[arg-type]

    running(work, url)


PUBLIC = sorted(name for name, value in vars(Ledger).items() if inspect.isfunction(value) and not name.startswith("_"))


#: What takes a function that is given the connection; AsyncLedger.run gives the whole ledger to one.
OF_THE_CONNECTION = ("read", "write", "require")


@pytest.mark.parametrize("method", [name for name in PUBLIC if name not in ("close", *OF_THE_CONNECTION)])
def test_every_public_method_of_the_ledger_is_there_with_the_same_parameters(method: str) -> None:
    asynchronous = getattr(AsyncLedger, method)
    assert inspect.iscoroutinefunction(asynchronous)
    assert inspect.signature(asynchronous).parameters == inspect.signature(getattr(Ledger, method)).parameters


def test_the_clock_is_the_one_that_was_given_and_without_one_the_databases(url: sa.URL) -> None:
    async def work(engine: AsyncEngine) -> None:
        assert (await AsyncLedger(engine, clock=lambda: 12.5).create_task()).created_at == 12.5
        before = time.time()
        created = (await AsyncLedger(engine).create_task()).created_at
        assert before - 1 <= created <= time.time() + 1

    running(work, url)


# -- the schema --------------------------------------------------------------------------------------------


def test_a_database_that_is_not_at_head_is_named_with_the_command_until_it_is(empty_url: sa.URL) -> None:
    async def work(engine: AsyncEngine) -> None:
        ledger = AsyncLedger(engine)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: ledger.create_task(),
            lambda: ledger.get_task(UNKNOWN),
            lambda: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0),
        ]
        for call in calls:
            with pytest.raises(SchemaOutdated, match="tsg upgrade"):
                await call()
        async with engine.begin() as connection:
            await connection.run_sync(tsg.upgrade, "0002")
        with pytest.raises(SchemaOutdated, match="tsg upgrade"):
            await ledger.create_task()
        async with engine.begin() as connection:
            report = await connection.run_sync(tsg.upgrade)
        assert (report.current, report.adopted) == (report.head, False)
        assert (await ledger.create_task()).status is TaskStatus.QUEUED
        assert (await ledger.doctor())["healthy"]

    running(work, empty_url)


def test_an_upgrade_in_the_hosts_transaction_is_undone_with_it(empty_url: sa.URL) -> None:
    async def work(engine: AsyncEngine) -> None:
        async with engine.connect() as connection:
            await connection.run_sync(tsg.upgrade)
            await connection.rollback()
            names = await connection.run_sync(lambda sync: sa.inspect(sync).get_table_names())
        assert names == []
        async with engine.begin() as connection:
            await connection.run_sync(tsg.upgrade)
            await connection.run_sync(tsg.upgrade)
            await connection.run_sync(tsg.downgrade, "base")
            await connection.run_sync(tsg.upgrade)
        assert (await AsyncLedger(engine).doctor())["healthy"]

    running(work, empty_url)


def test_four_upgrades_at_once_end_with_one_done_and_none_broken(empty_url: sa.URL) -> None:
    if empty_url.get_backend_name() == "sqlite":
        pytest.skip("a host's own transactions on SQLite begin as the host has it")

    async def work(engine: AsyncEngine) -> None:
        async def upgrade() -> None:
            async with engine.begin() as connection:
                await connection.run_sync(tsg.upgrade)

        await asyncio.gather(*(upgrade() for _ in range(4)))
        assert (await AsyncLedger(engine).doctor())["healthy"]

    running(work, empty_url)


# -- the application's engine ------------------------------------------------------------------------------

ENGINE_EVENTS = (
    "begin",
    "commit",
    "rollback",
    "before_execute",
    "after_execute",
    "before_cursor_execute",
    "after_cursor_execute",
    "engine_connect",
    "set_connection_execution_options",
)
POOL_EVENTS = ("connect", "first_connect", "checkout", "checkin", "reset", "invalidate", "close")


def condition(engine: AsyncEngine) -> dict[str, Any]:
    sync = engine.sync_engine
    return {
        "listeners": {name: list(getattr(sync.dispatch, name)) for name in ENGINE_EVENTS},
        "pool listeners": {name: list(getattr(sync.pool.dispatch, name)) for name in POOL_EVENTS},
        "pool": sync.pool,
        "options": dict(sync.get_execution_options()),
        "isolation": sync.dialect._on_connect_isolation_level,
        "echo": sync.echo,
        "hide": sync.hide_parameters,
        "out": checked_out(engine),
    }


@pytest.mark.parametrize("isolation", [None, "AUTOCOMMIT", "SERIALIZABLE"])
def test_the_engine_is_left_as_it_was_whatever_its_isolation(url: sa.URL, isolation: str | None) -> None:
    async def level(engine: AsyncEngine) -> str:
        async with engine.connect() as connection:
            return await connection.get_isolation_level()

    async def work(engine: AsyncEngine) -> None:
        clock = FakeClock()
        isolated = await level(engine)
        before = condition(engine)
        ledger = AsyncLedger(engine, clock=clock)
        task = (await ledger.create_task()).id
        await ledger.start_task(task)
        clock.advance(1_000)
        await ledger.reconcile(active_grace_seconds=600, delivery_grace_seconds=600, dry_run=True)
        await ledger.reconcile(active_grace_seconds=600, delivery_grace_seconds=600)
        assert (await ledger.doctor())["healthy"]
        with pytest.raises(StateConflict):
            await ledger.heartbeat(task)
        assert condition(engine) == before
        assert await level(engine) == isolated

    running(work, url, **({} if isolation is None else {"isolation_level": isolation}))


def test_on_an_autocommit_engine_row_and_event_still_come_and_go_together(url: sa.URL) -> None:
    async def work(engine: AsyncEngine) -> None:
        ledger = AsyncLedger(engine, clock=FakeClock())
        task = (await ledger.create_task()).id
        # An event that stands in the way makes the second half of the next transition fail.
        async with engine.connect() as connection:
            await connection.execute(
                sa.text(
                    "INSERT INTO tsg_task_events (task_pk, number, kind, from_status, to_status, occurred_at, code) "
                    "SELECT pk, 1, 'task_transition', 'queued', 'running', 1000.0, 'started' FROM tsg_tasks"
                )
            )
            await connection.commit()
        before = await contents(engine)
        with pytest.raises(StateConflict):
            await ledger.start_task(task)
        assert await contents(engine) == before
        assert (await ledger.get_task(task)).status is TaskStatus.QUEUED
        other = (await ledger.create_task()).id
        await ledger.start_task(other)
        assert len(await events(engine, other)) == 2

    running(work, url, isolation_level="AUTOCOMMIT")


# -- many at once, and one cut off -------------------------------------------------------------------------


def test_twenty_coroutines_on_one_task_leave_one_clean_chain(url: sa.URL) -> None:
    async def work(engine: AsyncEngine) -> None:
        ledger = AsyncLedger(engine)
        task = (await ledger.create_task()).id
        outcomes: Counter[str] = Counter()

        async def live(number: int) -> None:
            calls: list[Callable[[], Awaitable[TaskRecord]]] = [
                lambda: ledger.start_task(task),
                lambda: ledger.heartbeat(task),
                lambda: ledger.close_task(task, ("succeeded", "failed", "cancelled")[number % 3]),
                lambda: ledger.set_delivery(task, ("delivered", "failed")[number % 2]),
            ]
            for call in calls:
                try:
                    await call()
                    outcomes["done"] += 1
                except StateConflict:
                    outcomes["refused"] += 1

        await asyncio.gather(*(live(number) for number in range(20)))
        report = await ledger.doctor()
        assert report["healthy"]
        assert (report["task_count"], report["event_count"]) == (1, 4)
        assert outcomes["refused"] > 0
        record = await ledger.get_task(task)
        chain = await events(engine, task)
        assert [event[0] for event in chain] == [0, 1, 2, 3]
        assert (chain[2][3], chain[3][3]) == (record.status.value, record.delivery_status.value)
        assert record.version >= 3

    running(work, url)


def test_twenty_coroutines_that_create_one_task_find_the_same(url: sa.URL) -> None:
    async def work(engine: AsyncEngine) -> None:
        ledger = AsyncLedger(engine, clock=lambda: 1_000.0)
        made = await asyncio.gather(
            *(ledger.create_task(task_id=UNKNOWN, timeout_seconds=5) for _ in range(20)), return_exceptions=True
        )
        assert {repr(entry) for entry in made} == {repr(await ledger.get_task(UNKNOWN))}
        report = await ledger.doctor()
        assert (report["healthy"], report["task_count"], report["event_count"]) == (True, 1, 1)

    running(work, url)


def test_a_cancelled_call_leaves_nothing_half_done_and_no_lock(url: sa.URL) -> None:
    async def work(engine: AsyncEngine) -> None:
        ledger = AsyncLedger(engine)
        await ledger.doctor()
        moments = 9
        made = [(await ledger.create_task()).id for _ in range(moments)]
        calls: list[asyncio.Future[TaskRecord]] = []
        left = [0]

        def cancel(*_: object) -> None:
            # At each of its statements in turn, and as it commits.
            if calls:
                if left[0] == 0:
                    calls[0].cancel()
                left[0] -= 1

        for moment in ("before_cursor_execute", "commit"):
            sa.event.listen(engine.sync_engine, moment, cancel)
        cancelled = 0
        for step, task in enumerate(made):
            left[0] = step
            calls.append(asyncio.ensure_future(ledger.start_task(task)))
            try:
                await calls[0]
            except asyncio.CancelledError:
                cancelled += 1
            calls.clear()
            await asyncio.sleep(0.01)
            await unlocked(engine)
        assert cancelled >= 3
        report = await ledger.doctor()
        assert report["healthy"], report
        assert report["task_count"] == len(made)
        for task in made:
            record = await ledger.start_task(task)
            assert (record.status, record.version) == (TaskStatus.RUNNING, 1)
        assert (await ledger.doctor())["event_count"] == 2 * len(made)
        assert checked_out(engine) == 0

    running(work, url)


async def unlocked(engine: AsyncEngine) -> None:
    """Nobody keeps the write lock of a file, or a row's lock on a server."""
    if engine.dialect.name == "sqlite":
        with contextlib.closing(sqlite3.connect(str(engine.url.database), timeout=0.5, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
    else:
        async with engine.connect() as connection:
            await connection.exec_driver_sql("SET LOCAL lock_timeout = 2000")
            await connection.exec_driver_sql("SELECT 1 FROM tsg_tasks FOR UPDATE")


def test_a_timeout_while_another_holds_the_row_changes_nothing(url: sa.URL) -> None:
    async def work(engine: AsyncEngine) -> None:
        ledger = AsyncLedger(engine, clock=FakeClock())
        task = (await ledger.create_task()).id
        async with engine.connect() as holder:
            if engine.dialect.name == "sqlite":
                await holder.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                await holder.exec_driver_sql("SELECT 1 FROM tsg_tasks FOR UPDATE")
            with pytest.raises(asyncio.TimeoutError):
                async with asyncio.timeout(0.2):
                    await ledger.start_task(task)
            await holder.rollback()
        assert (await ledger.get_task(task)).status is TaskStatus.QUEUED
        assert (await ledger.start_task(task)).version == 1
        assert (await ledger.doctor())["healthy"]

    # How long a thread of the driver's goes on waiting for the lock; the call itself is long over.
    options = {"connect_args": {"timeout": 1}} if url.get_backend_name() == "sqlite" else {}
    running(work, url, **options)


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "postgresql+asyncpg"])
@pytest.mark.parametrize("fault", ["no server", "no database", "no user"])
def test_a_database_that_cannot_be_reached_is_a_state_conflict_and_says_nothing(
    postgresql_server: sa.URL, driver: str, fault: str
) -> None:
    changes: dict[str, Any] = {
        "no server": {"port": 1},
        "no database": {"database": "marked_database"},
        "no user": {"username": "marked_user"},
    }[fault]

    async def work(engine: AsyncEngine) -> None:
        for call in (AsyncLedger(engine).create_task, AsyncLedger(engine).doctor):
            with pytest.raises(StateConflict) as caught:
                await call()
            assert "marked" not in str(caught.value)
            assert caught.value.__cause__ is None

    running(work, postgresql_server.set(drivername=driver, **changes))


def test_a_file_that_cannot_be_opened_is_a_state_conflict(folder: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        with pytest.raises(StateConflict) as caught:
            await AsyncLedger(engine).create_task()
        assert "marked" not in str(caught.value)
        # The driver's thread of a connection that failed still has its farewell to say to this loop.
        await asyncio.sleep(0.2)

    running(work, sa.URL.create("sqlite+aiosqlite", database=str(folder / "marked" / "ledger.sqlite")))


# -- the models in an AsyncSession -------------------------------------------------------------------------


@pytest.mark.parametrize("expire", [True, False])
def test_a_task_lives_in_an_async_session_with_its_verbs(url: sa.URL, expire: bool) -> None:
    clock = FakeClock(1_000)

    async def work(engine: AsyncEngine) -> None:
        ledger = AsyncLedger(engine, clock=clock)
        async with AsyncSession(engine, expire_on_commit=expire, info={"tsg_clock": clock}) as session:
            task = Task(timeout_seconds=60)
            identifier = task.id
            session.add(task)
            await session.commit()
            if expire:
                await session.refresh(task)
            assert (task.status, task.created_at, task.version) == ("queued", 1_000.0, 0)
            clock.now = 1_010
            task.start()
            clock.now = 1_020
            task.heartbeat()
            await session.flush()
            assert task.deadline_at == 1_070.0
            await session.rollback()
            await session.refresh(task)
            assert (task.status, task.version) == ("queued", 0)
            assert len(await events(engine, identifier)) == 1
            task.start()
            task.close("failed", "worker_failed")
            task.delivery_status = "failed"  # type: ignore[assignment]
            await session.commit()
        record = await ledger.get_task(identifier)
        assert (record.status, record.delivery_status, record.version) == ("failed", "failed", 3)
        assert [event[3] for event in await events(engine, identifier)] == ["queued", "running", "failed", "failed"]
        assert (await ledger.doctor())["healthy"]

    running(work, url)


def test_a_refused_verb_in_an_async_session_raises_there_and_then(url: sa.URL) -> None:
    async def work(engine: AsyncEngine) -> None:
        async with AsyncSession(engine, expire_on_commit=False, info={"tsg_clock": FakeClock()}) as session:
            task = Task()
            session.add(task)
            await session.commit()
            with pytest.raises(StateConflict):
                task.heartbeat()
            with pytest.raises(StateConflict):
                task.delivery_status = "delivered"  # type: ignore[assignment]
            with pytest.raises(InvalidInput):
                task.close("bogus")
            with pytest.raises(StateConflict):
                task.created_at = 5.0
            assert not session.dirty
        assert (await AsyncLedger(engine).doctor())["healthy"]

    running(work, url)


def test_an_async_session_of_an_autocommit_engine_refuses_to_record(url: sa.URL) -> None:
    async def work(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            session.add(Task())
            with pytest.raises(StateConflict, match="AUTOCOMMIT"):
                await session.commit()
            await session.rollback()
        assert (await AsyncLedger(engine).doctor())["task_count"] == 0

    running(work, url, isolation_level="AUTOCOMMIT")


def test_of_two_async_sessions_on_one_task_only_one_ends_it(url: sa.URL) -> None:
    async def work(engine: AsyncEngine) -> None:
        ledger = AsyncLedger(engine, clock=FakeClock())
        identifier = (await ledger.create_task()).id
        info = {"tsg_clock": FakeClock()}
        async with AsyncSession(engine, info=info) as one, AsyncSession(engine, info=info) as other:
            for session, status in ((one, "succeeded"), (other, "failed")):
                task = await session.get_one(Task, identifier)
                task.close(status)
                # Both have read before either writes.
                await session.connection()
            await one.commit()
            with pytest.raises((sa.orm.exc.StaleDataError, sa.exc.DBAPIError)):
                await other.commit()
            await other.rollback()
        assert (await ledger.get_task(identifier)).status is TaskStatus.SUCCEEDED
        assert len(await events(engine, identifier)) == 2
        assert (await ledger.doctor())["healthy"]

    running(work, url)


def test_reports_can_be_had_inside_an_async_session(url: sa.URL) -> None:
    async def work(engine: AsyncEngine) -> None:
        clock = FakeClock()
        async with AsyncSession(engine, expire_on_commit=False, info={"tsg_clock": clock}) as session:
            task = Task()
            session.add(task)
            await session.flush()
            task.start()
            policy = tsg.ReconcilePolicy(0, 0)
            preview = await session.run_sync(lambda sync: tsg.reconcile.preview(sync, policy, now=2_000.0))
            applied = await session.run_sync(lambda sync: tsg.reconcile.apply(sync, policy, now=2_000.0))
            assert {**preview, "dry_run": False, "applied": True} == applied
            assert applied["tasks_timed_out"] == applied["deliveries_failed"] == 1
            assert (await session.run_sync(tsg.doctor.examine))["healthy"]
            await session.refresh(task)
            assert (task.status, task.delivery_status) == ("timed_out", "failed")
            await session.rollback()
        assert (await AsyncLedger(engine).doctor())["task_count"] == 0

    running(work, url)
