"""One ledger on both databases: the same answers, errors, reports and rows, whichever driver carries them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import create_async_engine

from tests.conftest import FakeClock, database, tsg
from tests.test_ledger import DIGEST, NO_OPS, REFUSALS
from tests.test_ledger import template as kinds_of_tasks  # noqa: F401  # used by name below
from tests.test_reconcile import Model, as_preview, carry_out, graces, plans
from tsg import (
    AsyncLedger,
    DeliveryStatus,
    InvalidInput,
    Ledger,
    LedgerError,
    StateConflict,
    TaskStatus,
    upgrade,
)
from tsg.cli import main
from tsg.tables import task_events, tasks

EVENT_FIELDS = ("number", "kind", "from_status", "to_status", "occurred_at", "code")


@contextmanager
def looking(url: sa.URL) -> Iterator[sa.Engine]:
    engine = sa.create_engine(url)
    try:
        yield engine
    finally:
        engine.dispose()


def stored(engine: sa.Engine) -> tuple[list[Any], list[Any]]:
    """Every row of both tables but for the keys, the types showing."""
    fields = [column for column in tasks.c if column.name != "pk"]
    history = sa.select(tasks.c.id, *(task_events.c[name] for name in EVENT_FIELDS)).select_from(
        task_events.join(tasks, tasks.c.pk == task_events.c.task_pk, isouter=True)
    )
    with engine.connect() as connection:
        rows = connection.execute(sa.select(*fields).order_by(tasks.c.id)).all()
        events = connection.execute(history.order_by(tasks.c.id, task_events.c.number)).all()
    return [repr(tuple(row)) for row in rows], [repr(tuple(row)) for row in events]


# -- the same lifecycles on each ---------------------------------------------------------------------------


class Awaited:
    """An AsyncLedger whose methods are called like a Ledger's, in a loop of its own."""

    def __init__(self, url: sa.URL, clock: FakeClock) -> None:
        self._runner = asyncio.Runner()
        self._engine = create_async_engine(url)
        self._ledger = AsyncLedger(self._engine, clock=clock)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._ledger, name)

        async def call(*arguments: Any, **named: Any) -> Any:
            return await method(*arguments, **named)

        return lambda *arguments, **named: self._runner.run(call(*arguments, **named))

    def close(self) -> None:
        self._runner.run(self._engine.dispose())
        self._runner.close()


@contextmanager
def every_ledger(server: sa.URL, template: str, folder: Path) -> Iterator[dict[str, tuple[Any, FakeClock, sa.Engine]]]:
    """A new ledger on each database and driver, each with a clock and an engine to look at it."""
    with ExitStack() as stack:
        ledgers: dict[str, tuple[Any, FakeClock, sa.Engine]] = {}
        for name in ("sqlite", "postgresql", "aiosqlite", "async psycopg", "asyncpg"):
            clock = FakeClock()
            if "sqlite" in name:
                path = folder / f"{name}.sqlite"
                Ledger(path).close()
                url = sa.URL.create("sqlite", database=str(path))
                driver = "sqlite+aiosqlite"
            else:
                url = stack.enter_context(database(server, f"tsg_{uuid.uuid4().hex}", template=template))
                driver = "postgresql+asyncpg" if name == "asyncpg" else "postgresql+psycopg"
            plain = sa.create_engine(url)
            stack.callback(plain.dispose)
            ledger: Any
            if name in ("sqlite", "postgresql"):
                ledger = Ledger(url, clock=clock)
            else:
                ledger = Awaited(url.set(drivername=driver), clock)
            stack.callback(ledger.close)
            ledgers[name] = (ledger, clock, plain)
        yield ledgers


STATES = ("succeeded", "failed", "timed_out", "cancelled", "running", "queued", "delivered", "bogus", None, b"failed")
DELIVERIES = ("delivered", "failed", "not_applicable", "pending", "succeeded", "bogus", None)
CODES = (
    *(None,) * 6,
    "completed",
    "worker_completed",
    "worker_failed",
    "deadline_exceeded",
    "restart_stale",
    "caller_cancelled",
    "transport_acknowledged",
    "delivery_grace_expired",
    "transport_failed",
    "internal_task",
    "started",
    "bogus",
    "completed\0",
    7,
)
TIMEOUTS = (*(None, 0, 1, 5, 600) * 4, 0, 0.1, 1, 5, "2.5", b"3", 600, 1e308, -1, True, "soon", math.nan, 10**400)
GRACES = (0, 0.5, 2, 30, "1", 1e9, 1.7e308, -1, True, None)
LEAPS = (0, 0, 0, 0.1, 1, 2.5, 30, 1e-7, 1 / 3, -1, -0.1)
MOMENTS = (math.nan, math.inf, None, True, "1500", b"1500.25", 10**400)


def a_call(chance: random.Random, made: list[str]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Any call that an application may make, right or wrong."""

    def one() -> Any:
        known = chance.choice(made) if made else str(uuid.UUID(int=0))
        return chance.choice(
            [known] * 8 + [known.upper(), uuid.UUID(known), f"{{{known}}}", str(uuid.UUID(int=1)), "x", 5]
        )

    verb = chance.choice(
        ["create_task"] * 7
        + ["start_task"] * 5
        + ["heartbeat"] * 4
        + ["close_task"] * 5
        + ["set_delivery"] * 5
        + ["get_task", "children_of", "reconcile", "reconcile", "doctor"]
    )
    if verb == "create_task":
        again = bool(made) and chance.random() < 0.2
        fields: dict[str, Any] = {"task_id": one() if again else str(uuid.UUID(int=chance.getrandbits(128), version=4))}
        if chance.random() < 0.8:
            fields["timeout_seconds"] = chance.choice(TIMEOUTS)
        if chance.random() < 0.3:
            fields["parent_id"] = one()
        if chance.random() < 0.3:
            fields["payload_hash"] = chance.choice([DIGEST, DIGEST, DIGEST, "f" * 64, "F" * 64, "", DIGEST + "\n", 5])
        if chance.random() < 0.4:
            fields["delivery_required"] = chance.choice([True, False, False, False, 0, "yes"])
        if chance.random() < 0.3:
            fields["expects_heartbeat"] = chance.choice([True, False, False, 1])
        return verb, (), fields
    if verb == "close_task":
        return verb, (one(), chance.choice(STATES[:4] * 4 + STATES)), {"code": chance.choice(CODES)}
    if verb == "set_delivery":
        return verb, (one(), chance.choice(DELIVERIES[:3] * 4 + DELIVERIES)), {"code": chance.choice(CODES)}
    if verb == "reconcile":
        options: dict[str, Any] = {
            "active_grace_seconds": chance.choice(GRACES),
            "delivery_grace_seconds": chance.choice(GRACES),
            "dry_run": chance.random() < 0.4,
        }
        if chance.random() < 0.5:
            options["skip_conflicts"] = True
        if chance.random() < 0.3:
            options["parent_id"] = one()
        return verb, (), options
    return verb, () if verb == "doctor" else (one(),), {}


def outcome(ledger: Any, verb: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[str, Any]:
    """What came back, its types showing, or the class and words of what was raised."""
    try:
        answer = getattr(ledger, verb)(*arguments, **named)
    except LedgerError as error:
        return type(error).__name__, str(error)
    if verb == "doctor":
        answer = {key: value for key, value in answer.items() if key != "quick_check"}
    return "done", repr(answer)


@pytest.mark.parametrize("seed", range(4))
def test_the_same_calls_give_the_same_on_every_database_and_driver(
    postgresql_server: sa.URL, postgresql_template: str, folder: Path, seed: int
) -> None:
    chance = random.Random(seed)
    made: list[str] = []
    kinds: set[str] = set()
    with every_ledger(postgresql_server, postgresql_template, folder) as ledgers:
        for _ in range(110):
            leap = chance.choice(LEAPS)
            odd = chance.choice(MOMENTS) if chance.random() < 0.04 else None
            call = a_call(chance, made)
            found: dict[str, tuple[tuple[str, Any], int]] = {}
            for name, (ledger, clock, _) in ledgers.items():
                clock.now += leap
                before, now = clock.readings, clock.now
                clock.now = now if odd is None else odd
                found[name] = (outcome(ledger, *call), clock.readings - before)
                clock.now = now
            assert set(map(repr, found.values())) == {repr(found["sqlite"])}, (call, found)
            (kind, _), _ = found["sqlite"]
            kinds.add(kind)
            if kind == "done" and call[0] == "create_task":
                made.append(str(uuid.UUID(str(call[2]["task_id"]))))
        contents = {name: stored(engine) for name, (_, _, engine) in ledgers.items()}
        assert all(found == contents["sqlite"] for found in contents.values())
        assert len(contents["sqlite"][0]) == len(set(made)) > 5
        for ledger, _, _ in ledgers.values():
            assert ledger.doctor()["healthy"]
    assert kinds >= {"done", "InvalidInput", "StateConflict", "TaskNotFound"}


# -- reconcile by sets and by verbs, on PostgreSQL ---------------------------------------------------------


@pytest.fixture(scope="module")
def twins(postgresql_server: sa.URL, postgresql_template: str) -> Iterator[tuple[sa.Engine, sa.Engine]]:
    """Two ledgers on one server, in two schemas of one database."""
    with database(postgresql_server, f"tsg_{uuid.uuid4().hex}", template=postgresql_template) as url:
        sets = sa.create_engine(url)
        verbs = sa.create_engine(url.update_query_dict({"options": "-csearch_path=verbs"}))
        with sets.begin() as connection:
            connection.exec_driver_sql("CREATE SCHEMA verbs")
        upgrade(verbs)
        yield sets, verbs
        sets.dispose()
        verbs.dispose()


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    plans=st.lists(plans, min_size=5, max_size=8),
    now=st.sampled_from([1003.0, 1004.0, 1005.0, 1006.0, 1007.0, 1008.0, 1010.0]),
    active=graces,
    delivery=graces,
    skip=st.booleans(),
    scope=st.sampled_from([None, None, None, 0, 1]),
)
def test_a_set_based_run_on_postgresql_does_row_by_row_what_the_verbs_do(
    twins: tuple[sa.Engine, sa.Engine],
    plans: list[dict[str, Any]],
    now: float,
    active: float,
    delivery: float,
    skip: bool,
    scope: int | None,
) -> None:
    sets, verbs = twins
    with sets.begin() as connection:
        connection.exec_driver_sql(
            "TRUNCATE tsg_tasks, tsg_task_events, verbs.tsg_tasks, verbs.tsg_task_events RESTART IDENTITY"
        )
    clock = FakeClock()
    made: list[str] = []
    ledger, by_verbs = Ledger(sets, clock=clock), Ledger(verbs, clock=clock)
    for plan in plans:
        carry_out(ledger, clock, made, plan)
    with sets.begin() as connection:
        for table in ("tsg_tasks", "tsg_task_events"):
            connection.exec_driver_sql(f"INSERT INTO verbs.{table} SELECT * FROM public.{table}")
    clock.now = now
    parent = None if scope is None else made[scope % len(made)]
    options: dict[str, Any] = {
        "active_grace_seconds": active,
        "delivery_grace_seconds": delivery,
        "skip_conflicts": skip,
        "parent_id": parent,
    }
    before = stored(sets)
    chosen = [task for task in map(by_verbs.get_task, made) if parent is None or task.parent_id == parent]
    try:
        modelled = Model(by_verbs, now, active, delivery, skip=skip).go(chosen)
    except StateConflict:
        for dry_run in (True, False):
            with pytest.raises(StateConflict):
                ledger.reconcile(**options, dry_run=dry_run)
        assert stored(sets) == before
        return
    preview = ledger.reconcile(**options, dry_run=True)
    assert stored(sets) == before
    applied = dict(ledger.reconcile(**options))
    assert applied == modelled
    assert preview == as_preview(applied)
    after = stored(sets)
    assert after == stored(verbs)
    assert ledger.doctor()["healthy"]
    again = ledger.reconcile(**options)
    assert again["tasks_timed_out"] == again["deliveries_failed"] == again["deliveries_not_applicable"] == 0
    assert stored(sets) == after


@contextmanager
def lifted(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A connection that no trigger, foreign key or CHECK looks at."""
    with engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL allow_system_table_mods = on")
        connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
        names = ("tsg_tasks", "tsg_task_events")
        found = sa.text("SELECT relname, relchecks FROM pg_class WHERE relname LIKE 'tsg\\_task%'")
        counts = {row.relname: row.relchecks for row in connection.execute(found)}
        checks = sa.text("UPDATE pg_class SET relchecks = :n WHERE relname = :table")
        for name in names:
            connection.execute(checks, {"n": 0, "table": name})
        yield connection
        for name in names:
            connection.execute(checks, {"n": counts[name], "table": name})


DAMAGE = {
    "a code of another state": "UPDATE tsg_tasks SET terminal_code = 'completed' WHERE id = :id",
    "a version too low": "UPDATE tsg_tasks SET version = 0 WHERE id = :id",
    "a version that cannot count on": "UPDATE tsg_tasks SET version = 2147483647 WHERE id = :id",
    "a start in the future": "UPDATE tsg_tasks SET started_at = 9e9, deadline_at = 1000 WHERE id = :id",
    "a creation in the future": "UPDATE tsg_tasks SET created_at = 9e9 WHERE id = :id",
    "a creation that is no number": "UPDATE tsg_tasks SET created_at = 'NaN' WHERE id = :id",
    "no start": "UPDATE tsg_tasks SET started_at = NULL WHERE id = :id",
    "an event too many": (
        "INSERT INTO tsg_task_events SELECT pk, 2, 'task_transition', 'running', 'failed', 1000, NULL "
        "FROM tsg_tasks WHERE id = :id"
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_rows_that_cannot_be_acted_on_are_refused_whole_or_passed_over_and_counted(
    postgresql_url: sa.URL, clock: FakeClock, damage: str
) -> None:
    with looking(postgresql_url) as engine:
        sweep_with_one_damaged(engine, clock, damage)


def sweep_with_one_damaged(engine: sa.Engine, clock: FakeClock, damage: str) -> None:
    ledger = Ledger(engine, clock=clock)
    made = []
    for number in range(4):
        made.append(ledger.create_task(timeout_seconds=5, delivery_required=number % 2 == 0).id)
        ledger.start_task(made[-1])
    with lifted(engine) as connection:
        assert connection.execute(sa.text(damage), {"id": uuid.UUID(made[1])}).rowcount == 1
    clock.now = 5_000.0
    before = stored(engine)
    sweep = {"active_grace_seconds": 600, "delivery_grace_seconds": 0}
    for dry_run in (True, False):
        with pytest.raises(StateConflict):
            ledger.reconcile(**sweep, dry_run=dry_run)
    assert stored(engine) == before
    preview = ledger.reconcile(**sweep, dry_run=True, skip_conflicts=True)
    assert stored(engine) == before
    applied = ledger.reconcile(**sweep, skip_conflicts=True)
    assert preview == as_preview(dict(applied))
    assert (applied["tasks_timed_out"], applied["conflicts_skipped"]) == (3, 1)
    assert (applied["deliveries_failed"], applied["deliveries_not_applicable"]) == (2, 1)
    rows, _ = stored(engine)
    old, _ = before
    assert [row for row in rows if made[1] in row] == [row for row in old if made[1] in row]


# -- the order of refusals ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def crowd(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    kinds_of_tasks: Path,  # noqa: F811
) -> Iterator[tuple[Ledger, FakeClock, sa.Engine]]:
    """A ledger with one task of every kind, on each database; every test leaves it as it was."""
    source = sa.create_engine(f"sqlite:///{kinds_of_tasks}")
    clock = FakeClock(2_000.0)
    with ExitStack() as stack:
        stack.callback(source.dispose)
        target: Any = tmp_path_factory.mktemp("crowd", numbered=True) / "ledger.sqlite"
        target.parent.chmod(0o700)
        if request.param == "postgresql":
            server, template = map(request.getfixturevalue, ("postgresql_server", "postgresql_template"))
            target = stack.enter_context(database(server, f"tsg_{uuid.uuid4().hex}", template=template))
        ledger = stack.enter_context(Ledger(target, clock=clock))
        engine = sa.create_engine(target if isinstance(target, sa.URL) else f"sqlite:///{target}")
        stack.callback(engine.dispose)
        with source.connect() as origin, engine.begin() as connection:
            for table in (tasks, task_events):
                rows = [dict(row) for row in origin.execute(sa.select(table).order_by(*table.primary_key)).mappings()]
                connection.execute(sa.insert(table), rows)
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("SELECT setval(pg_get_serial_sequence('tsg_tasks', 'pk'), 1000)")
        yield ledger, clock, engine


@pytest.mark.parametrize(
    ("now", "call", "refusal", "readings"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_refusals_come_in_the_contracts_order_on_both_databases(
    crowd: tuple[Ledger, FakeClock, sa.Engine],
    now: Any,
    call: Callable[[Any], object],
    refusal: type[LedgerError],
    readings: Any,
) -> None:
    ledger, clock, engine = crowd
    before, read = stored(engine), clock.readings
    clock.now = now
    with pytest.raises(LedgerError) as caught:
        call(ledger)
    assert type(caught.value) is refusal
    assert caught.value.__cause__ is None
    if isinstance(readings, int):
        assert clock.readings - read == readings
    assert stored(engine) == before


@pytest.mark.parametrize("call", [case[1] for case in NO_OPS], ids=[case[0] for case in NO_OPS])
def test_no_ops_read_no_clock_and_write_nothing_on_both_databases(
    crowd: tuple[Ledger, FakeClock, sa.Engine], call: Callable[[Any], Any]
) -> None:
    ledger, clock, engine = crowd
    before, read = stored(engine), clock.readings
    clock.now = math.nan
    record = call(ledger)
    assert record == ledger.get_task(record.id)
    assert (stored(engine), clock.readings) == (before, read)


def test_records_are_equal_in_type_on_both_databases(target: Any, clock: FakeClock) -> None:
    clock.now = 1_000
    with Ledger(target, clock=clock) as ledger:
        parent = ledger.create_task(task_id=uuid.UUID(int=7), timeout_seconds=1, payload_hash=DIGEST)
        child = ledger.create_task(parent_id=parent.id, delivery_required=False)
        ledger.start_task(parent.id)
        ledger.close_task(parent.id, "failed", code="worker_failed")
        ledger.set_delivery(parent.id, "failed", code="transport_failed")
        for record in (ledger.get_task(parent.id), *ledger.children_of(parent.id), ledger.get_task(child.id)):
            kinds = {name: type(value) for name, value in dataclasses.asdict(record).items() if value is not None}
            assert kinds.pop("status") is TaskStatus
            assert kinds.pop("delivery_status") is DeliveryStatus
            assert kinds.pop("version") is int
            assert {kinds.pop("delivery_required"), kinds.pop("expects_heartbeat")} == {bool}
            assert {kind for name, kind in kinds.items() if name.endswith(("_at", "_seconds"))} == {float}
            assert {kind for name, kind in kinds.items() if not name.endswith(("_at", "_seconds"))} == {str}
        assert ledger.get_task(parent.id).id == str(uuid.UUID(int=7))
        json.dumps([ledger.get_task(parent.id).to_dict(), ledger.doctor(), ledger.storage_info()])


def test_times_of_every_size_come_back_as_they_went_in(target: Any, clock: FakeClock) -> None:
    with Ledger(target, clock=clock) as ledger:
        for now in (-1e308, -0.1, -0.0, 5e-324, 0.1, 1 / 3, 2**53 + 2.0, 1_750_000_000.123456, 1e22, 1.7e308):
            clock.now = now
            made = ledger.create_task(timeout_seconds=0.1)
            found = ledger.start_task(made.id)
            assert (made.created_at, found.started_at, found.deadline_at) == (now, now, now + 0.1)
            assert ledger.get_task(made.id) == found
        assert ledger.doctor()["healthy"]


# -- Ledger and command line by URL ------------------------------------------------------------------------

STORAGE = {"journal_mode", "busy_timeout_ms", "foreign_keys", "permission_model"}


def told(url: sa.URL) -> str:
    return url.render_as_string(hide_password=False)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, int]]:
    """The command line in this process: the line that it prints as JSON, and its exit status."""

    def run(*arguments: str) -> tuple[Any, int]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        out, err = capfd.readouterr()
        assert err == ""
        assert out.count("\n") == 1
        line = json.loads(out)
        assert out == json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n"
        return line, int(left.value.code or 0)

    return run


def test_a_ledger_by_url_makes_its_tables_and_says_how_it_is_kept(
    empty_postgresql_url: sa.URL, clock: FakeClock
) -> None:
    with Ledger(told(empty_postgresql_url), clock=clock, busy_timeout_ms=1234) as ledger:
        assert ledger.storage_info() == {
            "journal_mode": "unavailable",
            "busy_timeout_ms": 1234,
            "foreign_keys": True,
            "permission_model": "external_acl",
        }
        task = ledger.create_task()
        assert task.created_at == 1_000.0
    with Ledger(empty_postgresql_url, read_only=True) as ledger:
        assert ledger.get_task(task.id) == task
        assert ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0, dry_run=True)["active_examined"] == 1
        for write in (ledger.create_task, lambda: ledger.start_task(task.id)):
            with pytest.raises(StateConflict):
                write()


def test_the_clock_of_a_ledger_on_a_server_is_the_servers(postgresql_url: sa.URL) -> None:
    now = sa.text("SELECT extract(epoch FROM clock_timestamp())::float8")
    with looking(postgresql_url) as engine, Ledger(postgresql_url) as ledger, engine.connect() as connection:
        before = connection.execute(now).scalar_one()
        created = ledger.create_task().created_at
        assert before <= created <= connection.execute(now).scalar_one()


def test_the_whole_job_is_done_by_commands_on_a_server(
    empty_postgresql_url: sa.URL, command: Callable[..., tuple[Any, int]]
) -> None:
    db = ("--db", told(empty_postgresql_url))
    line, status = command(*db, "init")
    assert (line["ok"], set(line["storage"]), status) == (True, STORAGE, 0)
    line, status = command(*db, "create", "--timeout-seconds", "60", "--payload-sha256", DIGEST)
    task = line["task"]
    assert (line["ok"], task["status"], task["has_payload_hash"], status) == (True, "queued", True, 0)
    assert "payload_hash" not in task
    for name, arguments, field, value in (
        ("start", (), "status", "running"),
        ("heartbeat", (), "version", 2),
        ("close", ("--status", "succeeded", "--code", "completed"), "terminal_code", "completed"),
        ("delivery", ("--status", "delivered"), "delivery_status", "delivered"),
    ):
        line, status = command(*db, name, task["id"], *arguments)
        assert (line["ok"], set(line["task"]), line["task"][field], status) == (True, set(task), value, 0)
    assert command(*db, "heartbeat", task["id"]) == ({"error": "StateConflict", "ok": False}, 2)
    assert command(*db, "start", str(uuid.UUID(int=9))) == ({"error": "TaskNotFound", "ok": False}, 2)
    assert command(*db, "start", "marked") == ({"error": "InvalidInput", "ok": False}, 2)
    late = command(*db, "create", "--timeout-seconds", "0", "--internal", "--parent-id", task["id"])[0]["task"]["id"]
    command(*db, "start", late)
    grace = ("--active-grace-seconds", "600", "--delivery-grace-seconds", "0")
    preview, status = command(*db, "reconcile", *grace, "--dry-run")
    assert (preview["ok"], preview["reconcile"]["dry_run"], status) == (True, True, 0)
    applied, status = command(*db, "reconcile", *grace, "--skip-conflicts")
    counts = applied["reconcile"]
    assert counts.pop("conflicts_skipped") == 0
    assert counts["tasks_timed_out"] == counts["deliveries_not_applicable"] == 1
    assert preview["reconcile"] == as_preview(counts)
    report, status = command(*db, "doctor")
    assert (report["healthy"], report["quick_check"], report["task_count"], status) == (True, "unavailable", 2, 0)
    schema = {"adopted": False, "current": "0004", "head": "0004"}
    for name in ("current", "check", "upgrade"):
        assert command(*db, name) == ({"ok": True, "schema": schema}, 0)
    assert command(*db, "downgrade", "0003") == ({"ok": True, "schema": {**schema, "current": "0003"}}, 0)
    assert command(*db, "check") == ({"ok": False, "schema": {**schema, "current": "0003"}}, 1)
    report, status = command(*db, "doctor")
    assert (report["healthy"], report["schema_ok"], report["schema_version"], status) == (False, False, 3, 1)
    assert command(*db, "reconcile", "--dry-run") == ({"error": "SchemaOutdated", "ok": False}, 2)
    assert command(*db, "upgrade") == ({"ok": True, "schema": schema}, 0)
    assert command(*db, "doctor")[0]["task_count"] == 2
    assert command(*db, "downgrade", "base") == ({"error": "StateConflict", "ok": False}, 2)
    assert command(*db, "doctor")[0]["healthy"]


def test_an_empty_ledger_on_a_server_is_taken_away_by_a_downgrade(
    postgresql_url: sa.URL, command: Callable[..., tuple[Any, int]]
) -> None:
    db = ("--db", told(postgresql_url))
    schema = {"adopted": False, "current": None, "head": "0004"}
    assert command(*db, "downgrade", "base") == ({"ok": True, "schema": schema}, 0)
    with looking(postgresql_url) as engine:
        assert set(sa.inspect(engine).get_table_names()) <= {"tsg_alembic_version"}
    assert command(*db, "upgrade") == ({"ok": True, "schema": {**schema, "current": "0004"}}, 0)
    assert command(*db, "doctor")[0]["healthy"]


WITHOUT_TABLES = [
    ("start", str(uuid.UUID(int=9))),
    ("heartbeat", str(uuid.UUID(int=9))),
    ("close", str(uuid.UUID(int=9)), "--status", "failed"),
    ("delivery", str(uuid.UUID(int=9)), "--status", "failed"),
    ("reconcile",),
    ("reconcile", "--dry-run"),
    ("doctor",),
    ("downgrade", "0001"),
    ("current",),
    ("check",),
]


@pytest.mark.parametrize("arguments", WITHOUT_TABLES, ids=" ".join)
def test_without_tables_a_command_is_refused_and_makes_none(
    empty_postgresql_url: sa.URL, command: Callable[..., tuple[Any, int]], arguments: tuple[str, ...]
) -> None:
    answered = command("--db", told(empty_postgresql_url), *arguments)
    with looking(empty_postgresql_url) as engine:
        assert sa.inspect(engine).get_table_names() == []
    assert answered == ({"error": "InvalidInput", "ok": False}, 2)


@pytest.mark.parametrize("arguments", [("init",), ("create",), ("upgrade",)], ids=" ".join)
def test_without_tables_these_commands_make_them(
    empty_postgresql_url: sa.URL, command: Callable[..., tuple[Any, int]], arguments: tuple[str, ...]
) -> None:
    line, status = command("--db", told(empty_postgresql_url), *arguments)
    assert (line["ok"], status) == (True, 0)
    assert command("--db", told(empty_postgresql_url), "doctor")[0]["healthy"]


UNREACHABLE: dict[str, Callable[[sa.URL], str]] = {
    "no server": lambda url: told(url.set(username="marked", password="marked", port=1, database="marked")),
    "no such host": lambda url: told(url.set(host="marked.invalid", password="marked")),
    "no such database": lambda url: told(url.set(database="marked")),
    "no such user": lambda url: told(url.set(username="marked", password="marked")),
    "a driver that is not installed": lambda url: told(url.set(drivername="postgresql+psycopg2", password="marked")),
    "a driver that nobody has": lambda url: told(url.set(drivername="postgresql+marked", password="marked")),
    "another database": lambda url: told(url.set(drivername="mysql", password="marked")),
    "no dialect": lambda url: told(url.set(drivername="marked", password="marked")),
    "a port that is none": lambda url: "postgresql+psycopg://marked:marked@127.0.0.1:marked/marked",
    "a port too high": lambda url: told(url.set(port=99_999, password="marked")),
    "a bad option": lambda url: told(url.update_query_dict({"marked": "marked"})),
    "a bad value of an option": lambda url: told(url.update_query_dict({"connect_timeout": "marked"})),
    "a NUL in the database": lambda url: told(url.set(database="marked")).replace("/marked", "/marked%00"),
    "a surrogate in the user": lambda url: told(url.set(username="marked")).replace("marked@", "marked\udcff@"),
    "a NUL in the password": lambda url: told(url.set(username="marked")).replace("marked@", "marked:%00marked@"),
}


@pytest.mark.parametrize("fault", UNREACHABLE)
def test_what_cannot_be_reached_is_refused_in_one_line_that_echoes_nothing(
    postgresql_server: sa.URL, capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    url = UNREACHABLE[fault](postgresql_server)
    for arguments in (
        ("init",),
        ("start", str(uuid.UUID(int=9))),
        ("doctor",),
        ("upgrade",),
        ("reconcile", "--dry-run"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["--db", url, *arguments])
        out, err = capfd.readouterr()
        line = json.loads(out)
        assert (set(line), line["ok"], left.value.code, err, out.count("\n")) == ({"error", "ok"}, False, 2, "", 1), (
            arguments,
            line,
        )
        assert "marked" not in out
    with pytest.raises(LedgerError) as caught:
        Ledger(url)
    assert "marked" not in repr(caught.value)
    assert caught.value.__cause__ is None


def test_a_driver_for_asyncio_is_refused_as_input_and_nothing_is_on_stderr(postgresql_server: sa.URL) -> None:
    ran = tsg("--db", told(postgresql_server.set(drivername="postgresql+asyncpg", password="marked")), "init")
    assert (ran.stdout, ran.stderr, ran.returncode) == (b'{"error":"InvalidInput","ok":false}\n', b"", 2)


@pytest.mark.parametrize("options", [{"busy_timeout_ms": -1}, {"read_only": 1}, {"migrate": None}])
def test_an_option_of_the_wrong_kind_is_refused_before_the_server_is_asked(
    empty_postgresql_url: sa.URL, options: Any
) -> None:
    with pytest.raises(InvalidInput):
        Ledger(empty_postgresql_url, **options)


def test_the_demonstration_on_a_server_prints_the_same_twice_and_leaves_nothing(empty_postgresql_url: sa.URL) -> None:
    with looking(empty_postgresql_url) as engine:
        before = set(sa.inspect(engine).get_schema_names())
    first, second = (tsg("--db", told(empty_postgresql_url), "demo") for _ in range(2))
    assert (first.returncode, first.stderr) == (0, b"")
    assert first.stdout == second.stdout
    lines = [json.loads(line) for line in first.stdout.decode().splitlines() if line.startswith("{")]
    names = (
        "active_examined",
        "tasks_timed_out",
        "fresh_active_retained",
        "pending_delivery_examined",
        "deliveries_failed",
        "deliveries_not_applicable",
        "pending_delivery_retained",
    )
    preview, applied, recheck = ([line["reconcile"][name] for name in names] for line in lines[:3])
    assert preview == applied == [2, 1, 1, 3, 1, 1, 1]
    assert recheck == [1, 0, 1, 1, 0, 0, 1]
    assert (lines[3]["healthy"], lines[3]["quick_check"]) == (True, "unavailable")
    with looking(empty_postgresql_url) as engine:
        assert set(sa.inspect(engine).get_schema_names()) == before
        assert sa.inspect(engine).get_table_names() == []
