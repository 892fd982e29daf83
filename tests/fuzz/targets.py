"""Every public callable, and how each is called with any arguments on a ledger with a task of every kind.

:func:`public` finds what there is; :data:`TARGETS` and :data:`EXEMPT` say what is done about each. A test holds the
two together, so that a new public function can't go untried.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sqlite3
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import tsg
import tsg.plan
from tests.fuzz.hostile import Value
from tsg import states
from tsg.cli import COMMANDS, app
from tsg.plan.tables import metadata

QUEUED: Final = "00000000-0000-4000-8000-000000000001"
RUNNING: Final = "00000000-0000-4000-8000-000000000002"
ENDED: Final = "00000000-0000-4000-8000-000000000003"
INTERNAL: Final = "00000000-0000-4000-8000-000000000004"
DELIVERED: Final = "00000000-0000-4000-8000-000000000005"
CHILD: Final = "00000000-0000-4000-8000-000000000006"
UNKNOWN: Final = "ffffffff-ffff-4fff-bfff-ffffffffffff"
TASKS: Final = (QUEUED, RUNNING, ENDED, INTERNAL, DELIVERED, CHILD)

#: The plan that has a step of every kind; one with a step that has failed, and it with that; and one that is completed.
PLAN: Final = "the release"
FAILED_PLAN: Final = "a failed one"
COMPLETED_PLAN: Final = "a completed one"
#: The steps of :data:`PLAN` by what they are.
STEPS: Final = {
    "completed": "T-001",
    "in progress": "T-002",
    "queued": "T-003",
    "pending": "T-004",
    "blocked": "T-005",
    "partial": "T-006",
    "escalated": "T-007",
    "cancelled": "T-008",
    "deleted": "T-009",
    "to be tried again": "T-010",
}

#: Stands for what only an open ledger can give: its connection, one of its tasks.
REAL: Final = Value("the real one", lambda: REAL)

Arguments = dict[str, Any]


def fill(ledger: tsg.Ledger, clock: Any) -> None:
    """A task of every kind, created at 1000, started at 1100, ended at 1300."""
    clock.now = 1_000.0
    for identifier in (QUEUED, RUNNING, ENDED, DELIVERED):
        ledger.create_task(task_id=identifier, timeout_seconds=60)
    ledger.create_task(task_id=INTERNAL, delivery_required=False, payload_hash="ab" * 32)
    ledger.create_task(task_id=CHILD, parent_id=QUEUED)
    clock.now = 1_100.0
    for identifier in (RUNNING, ENDED, DELIVERED, INTERNAL):
        ledger.start_task(identifier)
    clock.now = 1_300.0
    for identifier in (ENDED, DELIVERED, INTERNAL):
        ledger.close_task(identifier, "succeeded", code="completed")
    ledger.set_delivery(DELIVERED, "delivered", code="transport_acknowledged")
    clock.now = 2_000.0


def fill_plans(plans: tsg.Plans, clock: Any, now: float = 2_000.0) -> None:
    """A plan with a step of every kind, and two plans more; nothing of them is due at `now`, nor soon after."""
    long = 1e9
    clock.now = now - 1_000.0
    plans.create(PLAN, timeout_seconds=long, retries=0)
    plans.add_step(PLAN, subject="Design it", owner="ada")
    plans.add_step(PLAN, subject="Build it", blocked_by=["T-001"])
    for subject in ("Name it", "Draw it"):
        plans.add_step(PLAN, subject=subject)
    plans.add_step(PLAN, subject="Frame it", blocked_by=["T-004"], blocks=["T-099"])
    plans.add_step(PLAN, subject="Measure it", timeout_seconds=10, partial_ok=True)
    plans.add_step(PLAN, subject="Sell it", fallback_agent="bob", owner="bob")
    for subject in ("Gild it", "Sing it"):
        plans.add_step(PLAN, subject=subject)
    plans.add_step(PLAN, subject="Ship it", retries=2, base_seconds=long, cap_seconds=long)
    plans.start(PLAN, "T-001", agent="ada")
    plans.complete(PLAN, "T-001", learnings=["keep it small"], output="a sketch")
    plans.start(PLAN, "T-002", agent="ada")
    plans.open(PLAN, "T-003", agent="cay")
    plans.start(PLAN, "T-006", agent="bob")
    plans.heartbeat_step(PLAN, "T-006", output="half of it")
    plans.cancel(PLAN, "T-008")
    plans.delete(PLAN, "T-009")
    for key in ("T-007", "T-010"):
        plans.start(PLAN, key)
        plans.fail(PLAN, key, error="it broke")
    plans.create(FAILED_PLAN, on_exhausted="fail", retries=0)
    plans.create(COMPLETED_PLAN)
    for name in (FAILED_PLAN, COMPLETED_PLAN):
        plans.add_step(name, subject="Try it")
        plans.start(name, "T-001")
    plans.fail(FAILED_PLAN, "T-001")
    plans.complete(COMPLETED_PLAN, "T-001")
    clock.now = now
    plans.advance(PLAN)
    stands = {
        "in progress": "in_progress",
        "queued": "in_progress",
        "blocked": "pending",
        "to be tried again": "pending",
    }
    for kind, key in STEPS.items():
        assert plans.get(PLAN, key)["status"] == stands.get(kind, kind)


def planned(connection: sa.Connection) -> list[list[tuple[Any, ...]]]:
    """Every stored row of the plans' tables and the ledger's."""
    return [
        [tuple(row) for row in connection.exec_driver_sql(f"SELECT * FROM {table} ORDER BY 1, 2")]
        for table in ("tsg_tasks", "tsg_task_events", *metadata.tables)
    ]


@dataclass
class World:
    """One ledger, and what an application has of it; each part is made when it is first asked for."""

    place: Path | sa.URL
    clock: Any
    runner: asyncio.Runner | None = None
    _parts: dict[str, Any] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)

    @property
    def url(self) -> sa.URL:
        return self.place if isinstance(self.place, sa.URL) else sa.URL.create("sqlite", database=str(self.place))

    @property
    def ledger(self) -> tsg.Ledger:
        if "ledger" not in self._parts:
            self._parts["ledger"] = self._open.enter_context(tsg.Ledger(self.place, clock=self.clock))
        ledger: tsg.Ledger = self._parts["ledger"]
        return ledger

    @property
    def engine(self) -> sa.Engine:
        """An application's own, which shows parameters in its errors as they are by default."""
        if "engine" not in self._parts:
            self._parts["engine"] = engine = sa.create_engine(self.url)
            self._open.callback(engine.dispose)
        made: sa.Engine = self._parts["engine"]
        return made

    def wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        assert self.runner is not None
        return self.runner.run(work)

    @property
    def asynchronous(self) -> tsg.AsyncLedger:
        if "asynchronous" not in self._parts:
            engine = create_async_engine(self.url.set(drivername="sqlite+aiosqlite"))
            self._open.callback(lambda: self.wait_for(engine.dispose()))
            self._parts["async_engine"] = engine
            self._parts["asynchronous"] = tsg.AsyncLedger(engine, clock=self.clock)
        ledger: tsg.AsyncLedger = self._parts["asynchronous"]
        return ledger

    @contextmanager
    def session(self) -> Iterator[Session]:
        with Session(self.engine, info={"tsg_clock": self.clock}) as session, session.begin():
            yield session

    def contents(self) -> list[list[tuple[Any, ...]]]:
        """Every stored row, by a connection of its own; none where there are no such tables any more."""
        tables = ("tsg_tasks", "tsg_task_events", "tsg_alembic_version")
        if isinstance(self.place, sa.URL):
            with self.engine.connect() as connection:
                return [
                    [tuple(row) for row in connection.exec_driver_sql(f"SELECT * FROM {table} ORDER BY 1, 2")]
                    for table in tables[:2]
                ]
        with closing(sqlite3.connect(self.place)) as connection:
            connection.text_factory = bytes
            there = {name for (name,) in connection.execute("SELECT CAST(name AS BLOB) FROM sqlite_master")}
            return [
                connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()
                for table in tables
                if table.encode() in there
            ]

    def close(self) -> None:
        self._open.close()


# -- what there is ---------------------------------------------------------------------------------------


def _members(kind: type) -> Iterator[str]:
    """The public methods that the package itself wrote; and those attributes of a model that can be assigned."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "tsg":
            for name, member in vars(base).items():
                member = getattr(member, "__func__", member)
                if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                    yield name
    mapper = sa.inspect(kind, raiseerr=False)
    if mapper is not None:
        yield from (f"{attribute.key} =" for attribute in mapper.attrs)


def _of_class(name: str, kind: type) -> Iterator[str]:
    yield name
    if not issubclass(kind, BaseException):
        yield from (f"{name}.{member}" for member in _members(kind))


def _documented() -> Iterator[str]:
    """What the README's programs name, by its full name: also what is in modules that it calls public by that."""
    readme = Path(__file__).parents[2].joinpath("README.md").read_text()
    yield from re.findall(r"\btsg(?:\.[a-z_]\w*){2,}(?=\()", "".join(readme.split("```python")[1:]))


def public() -> set[str]:
    """The names of all public callables and assignable attributes."""
    found = set(_documented())
    for name in tsg.__all__:
        member: Any = getattr(tsg, name)
        if isinstance(member, ModuleType):
            for inner in member.__all__:
                thing = getattr(member, inner)
                if isinstance(thing, type) and thing not in (getattr(tsg, known) for known in tsg.__all__):
                    found |= set(_of_class(f"tsg.{name}.{inner}", thing))
                elif not isinstance(thing, type) and callable(thing):
                    found.add(f"tsg.{name}.{inner}")
        elif isinstance(member, type):
            found |= set(_of_class(f"tsg.{name}", member))
        else:
            found.add(f"tsg.{name}")
    return found


# -- how each is called ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A public callable: where its parameters are written, and how it is called on a world."""

    signature: Callable[..., Any]
    call: Callable[[World, Arguments], Any]
    #: What is plausible for its parameters, where :data:`PLAUSIBLE` has something else.
    plausible: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        given = inspect.signature(self.signature).parameters
        return {name: parameter for name, parameter in given.items() if name not in ("self", "cls")}


def plausible(*values: Any) -> tuple[Value, ...]:
    return tuple(
        value if isinstance(value, Value) else Value(repr(value), lambda value=value: value) for value in values
    )


_IDS = plausible(*TASKS, UNKNOWN, QUEUED.upper())
_STATUSES = plausible("succeeded", "failed", "timed_out", "cancelled", tsg.TaskStatus.FAILED)
_DELIVERIES = plausible("delivered", "failed", "not_applicable", tsg.DeliveryStatus.FAILED)
_FLAGS = plausible(True, False)
_SECONDS = plausible(0, 5, 60.5, "600", 1e9)

#: What a parameter of that name may well be given.
PLAUSIBLE: Final[dict[str, tuple[Value, ...]]] = {
    "active_grace_seconds": _SECONDS,
    "adopt": _FLAGS,
    "allow_external_acl": _FLAGS,
    "at": plausible(None, 2_000, "3000"),
    "batch_size": plausible(1, 2, 5000),
    "busy_timeout_ms": plausible(0, 50, 5000),
    "check": _FLAGS,
    "clock": plausible(Value("a clock", lambda: lambda: 3_000.0)),
    "code": plausible(None, "completed", "worker_failed", "transport_acknowledged"),
    "connection": (REAL,),
    "delivery_grace_seconds": _SECONDS,
    "delivery_required": _FLAGS,
    "dry_run": _FLAGS,
    "engine": (REAL,),
    "event": plausible(states.created(1_000.0)),
    "expects_heartbeat": _FLAGS,
    "fault": plausible(Value("no fault", lambda: lambda *_: None)),
    "id": plausible(None, UNKNOWN),
    "in_transaction": (REAL,),
    "include_payload_hash": _FLAGS,
    "ledger": (REAL,),
    "migrate": _FLAGS,
    "name": plausible(None, "tsg_tasks", "orders"),
    "now": plausible(None, 2_000.0, 1e9),
    "older_than_seconds": _SECONDS,
    "parent": plausible(None, REAL),
    "parent_id": plausible(None, QUEUED, RUNNING, UNKNOWN),
    "parent_names": plausible({}, {"schema_name": None}),
    "payload": plausible("", "text", b"bytes"),
    "payload_hash": plausible(None, "ab" * 32),
    "policy": plausible(Value("a policy", lambda: tsg.ReconcilePolicy(0, 0))),
    "progress": plausible(None, Value("a progress", lambda: lambda done, total: None)),
    "read_only": _FLAGS,
    "revision": plausible("head", "0004", "0003"),
    "skip_conflicts": _FLAGS,
    "snapshot_limit_mib": plausible(0, 64),
    "status": _STATUSES,
    "target": (REAL,),
    "task": (REAL,),
    "task_id": _IDS,
    "task_ids": plausible([], [RUNNING], [RUNNING, UNKNOWN, RUNNING.upper()]),
    "timeout_seconds": plausible(None, *_SECONDS),
    "type_": plausible("table", "column"),
    "upgrade": plausible(Value("no upgrade", lambda: lambda *_: None)),
    "value": plausible(None, 5.0, "failed"),
    "work": plausible(Value("work", lambda: lambda *_: 5)),
}

#: Parameters that are called back: what they raise is their caller's own.
CALLBACKS: Final = ("clock", "fault", "in_transaction", "progress", "upgrade", "work")


def _given(arguments: Arguments, real: Any) -> Arguments:
    return {name: real if value is REAL else value for name, value in arguments.items()}


def _on_ledger(name: str, **other: tuple[Value, ...]) -> Target:
    method = getattr(tsg.Ledger, name)
    return Target(method, lambda world, arguments: getattr(world.ledger, name)(**arguments), other)


def _awaited(name: str, **other: tuple[Value, ...]) -> Target:
    method = getattr(tsg.AsyncLedger, name)
    return Target(
        method, lambda world, arguments: world.wait_for(getattr(world.asynchronous, name)(**arguments)), other
    )


def _on_task(name: str, identifier: str, **other: tuple[Value, ...]) -> Target:
    def call(world: World, arguments: Arguments) -> Any:
        with world.session() as session:
            return getattr(session.get_one(tsg.Task, identifier), name)(**arguments)

    return Target(getattr(tsg.Task, name), call, other)


def _assigned(kind: type[tsg.Task] | type[tsg.TaskEvent], name: str) -> Target:
    def call(world: World, arguments: Arguments) -> None:
        with world.session() as session:
            task = session.get_one(tsg.Task, RUNNING)
            setattr(task if kind is tsg.Task else task.events[0], name, arguments["value"])

    def assign(value: object) -> None:
        """The signature of an assignment."""

    return Target(assign, call)


def _in_transaction(function: Callable[..., Any], **other: tuple[Value, ...]) -> Target:
    def call(world: World, arguments: Arguments) -> Any:
        with world.engine.begin() as connection:
            return function(**_given(arguments, connection))

    return Target(function, call, other)


def _make_ledger(world: World, arguments: Arguments) -> Any:
    with tsg.Ledger(**_given(arguments, world.place)) as ledger:
        return ledger.storage_info()


def _make_ledger_over(world: World, arguments: Arguments) -> Any:
    with world.engine.connect() as connection:
        return tsg.Ledger.over(**_given(arguments, connection)).get_task(QUEUED)


def _make_async_ledger(world: World, arguments: Arguments) -> Any:
    world.asynchronous  # noqa: B018  # makes its engine
    ledger = tsg.AsyncLedger(**_given(arguments, world._parts["async_engine"]))
    return world.wait_for(ledger.start_task(RUNNING))


def _make_task(world: World, arguments: Arguments) -> None:
    with world.session() as session:
        parent = session.get_one(tsg.Task, QUEUED)
        with session.no_autoflush:
            session.add(tsg.Task(**_given(arguments, parent)))


def _make_event(world: World, arguments: Arguments) -> None:
    with world.session() as session:
        made = tsg.TaskEvent(**_given(arguments, session.get_one(tsg.Task, RUNNING)))
        session.add(made)
        try:
            session.flush()
        except sa.exc.IntegrityError:
            # As documented: in a session of the application's it is SQLAlchemy that tells of the database's guards.
            raise tsg.StateConflict("an event that the guards refused") from None


def _to_dict(world: World, arguments: Arguments) -> Any:
    return world.ledger.get_task(INTERNAL).to_dict(**arguments)


def _in_batches(world: World, arguments: Arguments) -> Any:
    with world.engine.connect() as connection:

        def in_transaction(work: Callable[[], Any]) -> Any:
            with connection.begin():
                return work()

        if arguments["in_transaction"] is REAL:
            arguments = {**arguments, "in_transaction": in_transaction}
        return tsg.reconcile.apply_in_batches(**_given(arguments, connection))


def _read_server_clock(world: World, arguments: Arguments) -> Any:
    with world.engine.begin() as connection:
        return tsg.server_clock(**_given(arguments, connection))()


def _migrate(name: str) -> Target:
    function = getattr(tsg, name)
    return Target(function, lambda world, arguments: function(**_given(arguments, world.engine)))


def _pure(function: Callable[..., Any], real: Callable[[World], Any] = lambda _: None) -> Target:
    return Target(function, lambda world, arguments: function(**_given(arguments, real(world))))


_METHODS: Final = (
    "children_of",
    "close_task",
    "create_task",
    "doctor",
    "get_task",
    "heartbeat",
    "heartbeat_many",
    "prune",
    "reconcile",
    "set_delivery",
    "start_task",
    "storage_info",
)
_OTHER: Final[dict[str, dict[str, tuple[Value, ...]]]] = {"set_delivery": {"status": _DELIVERIES}}

TARGETS: Final[dict[str, Target]] = {
    "tsg.AsyncLedger": Target(tsg.AsyncLedger.__init__, _make_async_ledger),
    "tsg.Ledger": Target(tsg.Ledger.__init__, _make_ledger),
    "tsg.Ledger.close": _on_ledger("close"),
    "tsg.Ledger.over": Target(tsg.Ledger.over, _make_ledger_over),
    "tsg.ReconcilePolicy": _pure(tsg.ReconcilePolicy),
    "tsg.Task": Target(tsg.Task.__init__, _make_task),
    "tsg.Task.close": _on_task("close", RUNNING),
    "tsg.Task.deliver": _on_task("deliver", ENDED, status=_DELIVERIES),
    "tsg.Task.heartbeat": _on_task("heartbeat", RUNNING),
    "tsg.Task.start": _on_task("start", QUEUED),
    "tsg.TaskEvent": Target(tsg.TaskEvent.__init__, _make_event),
    "tsg.TaskRecord.to_dict": Target(tsg.TaskRecord.to_dict, _to_dict),
    "tsg.doctor.examine": _in_transaction(tsg.doctor.examine),
    "tsg.downgrade": _migrate("downgrade"),
    "tsg.include_name": _pure(tsg.include_name),
    "tsg.payload_fingerprint": _pure(tsg.payload_fingerprint),
    "tsg.reconcile.apply": _in_transaction(tsg.reconcile.apply),
    "tsg.reconcile.apply_in_batches": Target(tsg.reconcile.apply_in_batches, _in_batches),
    "tsg.reconcile.preview": _in_transaction(tsg.reconcile.preview),
    "tsg.reconcile_restart": _pure(tsg.reconcile_restart, lambda world: world.ledger),
    "tsg.plan.upgrade": Target(
        tsg.plan.upgrade, lambda world, arguments: tsg.plan.upgrade(**_given(arguments, world.engine))
    ),
    "tsg.server_clock": Target(tsg.server_clock, _read_server_clock),
    "tsg.upgrade": _migrate("upgrade"),
    "tsg.AsyncLedger.run": _awaited("run"),
    **{f"tsg.Ledger.{name}": _on_ledger(name) for name in ("read", "require", "write")},
    **{f"tsg.Ledger.{name}": _on_ledger(name, **_OTHER.get(name, {})) for name in _METHODS},
    **{f"tsg.AsyncLedger.{name}": _awaited(name, **_OTHER.get(name, {})) for name in _METHODS},
    **{
        f"tsg.{kind.__name__}.{attribute.key} =": _assigned(kind, attribute.key)
        for kind in (tsg.Task, tsg.TaskEvent)
        for attribute in sa.inspect(kind).attrs
        if attribute.key != "events"
    },
}

#: What is public, and not called with hostile values, and why.
EXEMPT: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("tsg.DamagedFile", "tsg.DependencyCycle", "tsg.InvalidInput", "tsg.LedgerError", "tsg.PlanNotFound")
        + ("tsg.SchemaOutdated", "tsg.SchemaTooNew", "tsg.StateConflict", "tsg.StepNotFound", "tsg.TaskNotFound"),
        "an error carries what it is given; the package gives it fixed words",
    ),
    **dict.fromkeys(("tsg.DeliveryStatus", "tsg.TaskStatus"), "the constructor of an enum is Python's"),
    **dict.fromkeys(
        ("tsg.TaskRecord", "tsg.doctor.Check", "tsg.doctor.Report", "tsg.reconcile.Report"),
        "a plain record that the package makes; it takes what it is given, and nothing stored comes of it",
    ),
    "tsg.Base": "abstract: the declarative base",
    "tsg.Ledger.read_only": "takes no argument",
    **dict.fromkeys(
        (name for kind in (tsg.Plans, tsg.AsyncPlans) for name in _of_class(f"tsg.{kind.__name__}", kind)),
        "test_hostile_plans.py calls each, and holds itself to this by the same look at the classes",
    ),
    "tsg.Task.events =": "what is no list SQLAlchemy itself refuses, by its type alone, before the model is asked",
    "tsg.schema.migrations_folder": "takes no argument and looks at no ledger",
}


def commands() -> dict[str, list[str]]:
    """Every command of the command line, with its options and a word for each of its arguments.

    That of a group has the group's name before its own, with a space between.
    """
    import click

    def of(group: click.Group, context: click.Context, *before: str) -> Iterator[tuple[str, list[str]]]:
        for name in sorted(group.list_commands(context)):
            command = group.get_command(context, name)
            assert command is not None
            if isinstance(command, click.Group):
                yield from of(command, click.Context(command, context), *before, name)
            else:
                options = [each.opts[0] if isinstance(each, click.Option) else "" for each in command.params]
                yield " ".join((*before, name)), options

    assert isinstance(app, click.Group)
    found = dict(of(app, click.Context(app)))
    assert {name.partition(" ")[0] for name in found} == COMMANDS.keys()
    return found
