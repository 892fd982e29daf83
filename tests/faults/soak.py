"""Many processes at a ledger for as long as is asked, with everything counted: what went wrong, and what grew.

``python -m tests.faults.soak --seconds 3600 --processes 16 TARGET`` (a path or a URL; ``--sqlite`` and ``--postgresql``
make a ledger of their own) prints a table for people and, as the last line, the whole report as JSON. It ends with 0
where nothing was found.

Each worker has tasks of its own, of which it knows every transition, and all of them fall upon the same shared ones;
half of the verbs go through a host's own session. Beside them reconcile, doctor and prune go by their own clocks.
At the end the ledger must hold just what was acknowledged, to the last event.

What may happen, and is counted: a conflict on a shared task; on a task of a worker's own, where a look at it says that
reconcile was there first; in a session SQLAlchemy's StaleDataError, or a guard's IntegrityError, for the same
reasons. Nothing else may: no conflict of times, no foreign error. That somebody waits for a lock in vain is counted
apart, and has a bound: SQLite lets its waiting writers sleep and look, in no order, so that on a machine that has more
to do than it can one of very many is out of luck for all of its busy timeout; and on PostgreSQL a whole sweep whose
rows others change again and again gives up after its attempts, until its next turn.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from tests import postgresql
from tests.conftest import database
from tsg import Ledger, LedgerError, StateConflict, Task, TaskNotFound, server_clock, upgrade
from tsg.engine import is_contention

Place = Path | sa.URL

#: What a log of SQLite's may come to: it is checkpointed every 4 MiB, and a doctor's snapshot holds that up a while.
CHECKPOINTED_BY: Final = 8 * 1024 * 1024
WAL_BOUND: Final = 64 * 1024 * 1024
#: What a process may gain in memory and descriptors between the second and the last fifth of the time.
MEMORY_BOUND: Final = 8 * 1024 * 1024
DESCRIPTORS_BOUND: Final = 8

#: Of all verbs, and of each kind of upkeep, the part that may wait in vain.
BUSY_VERBS: Final = 0.001
BUSY_UPKEEP: Final = 0.1

#: How many tasks of its own a worker has in hand, and how many that it has done with it remembers.
IN_HAND: Final = 40
REMEMBERED: Final = 100
#: How long one task is the one that all fall upon.
SHARED_SECONDS: Final = 0.5
SHARED_ROOT: Final = uuid.UUID("7d444840-9dc0-11d1-b245-5ffdce74fad2")
SHARED_STEPS: Final = ("created", "child", "started", "closed", "delivered")

#: How often each must have been there, and how many seconds a run may be longer for that.
LEAST: Final = {"reconcile": 10, "doctor": 3, "prune": 1}
PATIENCE: Final = 30.0

GRACE: Final = 3.0
CLOSES: Final = {"succeeded": "worker_completed", "failed": "worker_failed", "cancelled": "caller_cancelled"}


@dataclass(frozen=True)
class Plan:
    """How long, how many, and how often."""

    seconds: float
    processes: int
    pause: float
    reconcile_every: float
    doctor_every: float
    prune_every: float
    prune_age: float

    @classmethod
    def of(cls, seconds: float, processes: int, pause: float) -> Plan:
        return cls(
            seconds,
            processes,
            pause,
            reconcile_every=min(1.0, seconds / 25),
            doctor_every=min(10.0, seconds / 6),
            prune_every=min(30.0, seconds / 5),
            prune_age=min(60.0, seconds / 3),
        )


class Latencies:
    """How long each verb took: counted in steps of five per cent, so that an hour takes no more room than a minute."""

    STEP: Final = math.log(1.05)

    def __init__(self) -> None:
        self.counts: dict[str, Counter[int]] = {}
        self.longest: dict[str, float] = {}

    def add(self, verb: str, seconds: float) -> None:
        step = math.ceil(math.log(max(seconds, 1e-6) / 1e-6) / self.STEP)
        self.counts.setdefault(verb, Counter())[step] += 1
        self.longest[verb] = max(self.longest.get(verb, 0.0), seconds)

    def merge(self, other: Latencies) -> None:
        for verb, counts in other.counts.items():
            self.counts.setdefault(verb, Counter()).update(counts)
            self.longest[verb] = max(self.longest.get(verb, 0.0), other.longest[verb])

    def report(self) -> dict[str, dict[str, float]]:
        return {
            verb: {
                "count": counts.total(),
                "p50_ms": self._quantile(counts, 0.5),
                "p99_ms": self._quantile(counts, 0.99),
                "max_ms": round(self.longest[verb] * 1000, 2),
            }
            for verb, counts in sorted(self.counts.items())
        }

    def _quantile(self, counts: Counter[int], part: float) -> float:
        wanted = math.ceil(counts.total() * part)
        for step, count in sorted(counts.items()):
            wanted -= count
            if wanted <= 0:
                return round(math.exp(step * self.STEP) * 1e-6 * 1000, 2)
        raise AssertionError("no such part")


@dataclass
class Told:
    """What one process says at its end."""

    name: str
    latencies: Latencies = field(default_factory=Latencies)
    acknowledged: Counter[str] = field(default_factory=Counter)
    allowed: Counter[str] = field(default_factory=Counter)
    busy: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    example: str = ""

    def fail(self, what: str) -> None:
        self.failures[what] += 1
        if not self.example and sys.exception() is not None:
            self.example = traceback.format_exc(limit=-8)

    @contextmanager
    def timed(self, verb: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.latencies.add(verb, time.perf_counter() - started)


@dataclass
class Own:
    """A task of a worker's own, as that worker knows it."""

    id: str
    internal: bool
    parent: str | None
    status: str = "queued"
    delivery: str = "pending"
    version: int = 0


class Shared:
    """Which steps of which shared task somebody was told to be done: one byte each, written by all processes."""

    def __init__(self, context: Any, seconds: float) -> None:
        self.length = math.ceil(seconds / SHARED_SECONDS) + 1
        self.steps = {step: context.RawArray("B", self.length) for step in SHARED_STEPS}

    def counts(self) -> dict[str, int]:
        return {step: sum(done) for step, done in self.steps.items()}


class Tools:
    """A ledger, and an engine of a host's on the same database, which all processes have from before they were forked.

    All that they can do has been done once, so that no process spends its time on getting ready.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.ledger = Ledger(place)
        self.engine = engine_of(place)
        done = self.ledger.create_task().id
        self.ledger.create_task(task_id=uuid.uuid5(uuid.UUID(done), "child"), parent_id=done)
        self.ledger.start_task(done)
        self.ledger.heartbeat(done)
        self.ledger.heartbeat_many([done])
        self.ledger.close_task(done, "succeeded")
        self.ledger.set_delivery(done, "delivered")
        self.ledger.children_of(done)
        with session_on(self.engine) as session:
            task = Task(parent_id=done)
            session.add(task)
        for verb, arguments in (("start", ()), ("heartbeat", ()), ("close", ("failed",)), ("deliver", ("failed",))):
            with session_on(self.engine) as session:
                getattr(session.get_one(Task, task.id), verb)(*arguments)
        for options in ({"dry_run": True}, {}, {"batch_size": 1}):
            self.ledger.reconcile(active_grace_seconds=GRACE, delivery_grace_seconds=GRACE, **options)
        self.ledger.prune(1e9)
        report = self.ledger.doctor()
        self.before = {"tasks": report["task_count"], "events": report["event_count"]}
        # A host's own business: no connection of its own may go over a fork.
        self.engine.dispose()

    def close(self) -> None:
        self.ledger.close()
        self.engine.dispose()


@contextmanager
def session_on(engine: sa.Engine) -> Iterator[Session]:
    """A session as a host has it; on a server it asks for the server's time."""
    with Session(engine, expire_on_commit=False) as session, session.begin():
        if engine.dialect.name == "postgresql":
            session.info["tsg_clock"] = server_clock(session)
        yield session


class Process:
    """What every one of the processes has: the tools, the plan, when it began, and when to stop."""

    def __init__(
        self, name: str, tools: Tools, plan: Plan, shared: Shared, turns: dict[str, Any], began: float, stop: Any
    ) -> None:
        self.told = Told(name)
        self.ledger = tools.ledger
        self.engine = tools.engine
        self.plan = plan
        self.shared = shared
        self.turns = turns
        self.parent = os.getpid()
        self.began = began
        self.stop = stop

    def run(self) -> None:
        raise NotImplementedError

    def main(self, pipe: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            self.run()
        except Exception as error:
            self.told.fail(f"{self.told.name} broke off: {type(error).__name__}: {error}")
        pipe.send(self.told)
        pipe.close()


class Worker(Process):
    """Mixed verbs, on tasks of its own and on the shared ones, by a ledger's methods and in sessions of a host's."""

    def run(self) -> None:
        self.random = random.Random(self.told.name)
        self.in_hand: dict[str, Own] = {}
        self.remembered: deque[Own] = deque(maxlen=REMEMBERED)
        while not self.stop.is_set() and os.getppid() == self.parent:
            self.guarded(self.on_a_shared_task if self.random.random() < 0.15 else self.on_its_own)
            if self.plan.pause:
                time.sleep(self.random.uniform(0, 2 * self.plan.pause))
        for own in [*self.in_hand.values(), *self.remembered]:
            self.guarded(partial(self.compare, own, "at the end"))

    def guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except StateConflict as error:
            if error.retriable:
                self.told.busy["verbs"] += 1
            else:
                self.told.fail(f"conflict: {error}")
        except sa.exc.DBAPIError as error:
            if is_contention(error):
                self.told.busy["verbs"] += 1
            else:
                self.told.fail(f"database: {type(error).__name__} in a session")
        except Exception as error:
            self.told.fail(f"foreign: {type(error).__name__}")

    # -- on its own tasks ----------------------------------------------------------------------------------

    def on_its_own(self) -> None:
        choices: list[tuple[int, Callable[[], None]]] = [(3, self.create)] if len(self.in_hand) < IN_HAND else []
        choices += [
            (weight, action)
            for weight, action in (
                (3, self.start),
                (4, self.heartbeat),
                (1, self.heartbeat_many),
                (2, self.close),
                (3, self.deliver),
                (2, self.get),
                (1, self.children),
                (1, self.leave),
            )
            if self.in_hand
        ]
        weights, actions = zip(*choices, strict=True)
        self.random.choices(actions, weights)[0]()

    def one(self, *statuses: str) -> Own | None:
        found = [own for own in self.in_hand.values() if own.status in statuses]
        return self.random.choice(found) if found else None

    def create(self) -> None:
        parent = self.one("queued", "running") if self.random.random() < 0.3 else None
        own = Own(str(uuid.uuid4()), internal=self.random.random() < 0.3, parent=None if parent is None else parent.id)
        fields: dict[str, Any] = {
            "parent_id": own.parent,
            "timeout_seconds": self.random.choice([None, 1.5, 60]),
            "delivery_required": not own.internal,
        }
        try:
            if self.random.random() < 0.5:
                with self.told.timed("create"):
                    self.ledger.create_task(task_id=own.id, **fields)
            else:
                with self.told.timed("session create"), session_on(self.engine) as session:
                    session.add(Task(id=own.id, **fields))
        except TaskNotFound:
            if parent is None or parent.status == "queued":
                raise
            self.explain(parent, "create")
            return
        self.told.acknowledged["created"] += 1
        self.in_hand[own.id] = own

    def start(self) -> None:
        if own := self.one("queued"):
            self.do(own, "start", "started", status="running")

    def heartbeat(self) -> None:
        if own := self.one("running"):
            self.do(own, "heartbeat", "beaten")

    def close(self) -> None:
        own = self.one("running") if self.random.random() < 0.9 else self.one("queued")
        if own is not None:
            to = self.random.choice(list(CLOSES))
            self.do(own, "close", "closed", to, CLOSES[to], status=to)

    def deliver(self) -> None:
        if own := self.one(*CLOSES):
            if own.internal:
                to, code = "not_applicable", None
            else:
                to, code = self.random.choice([("delivered", "transport_acknowledged"), ("failed", "transport_failed")])
            self.do(own, "deliver", "delivered", to, code, delivery=to)
            if own.delivery != "pending":
                self.put_aside(own)

    def do(self, own: Own, verb: str, step: str, *arguments: Any, **becomes: str) -> None:
        """One verb that means a transition, or a beat, unless reconcile was there first."""
        try:
            if self.random.random() < 0.5:
                version, code = self.by_ledger(verb, own.id, *arguments)
            else:
                version, code = self.by_session(verb, own.id, *arguments)
        except (TaskNotFound, StaleDataError, sa.exc.IntegrityError) as error:
            self.explain(own, f"{verb}: {type(error).__name__}")
            return
        except StateConflict as error:
            if error.retriable:
                raise
            self.explain(own, f"{verb}: {error}")
            return
        if version != own.version + 1 or (verb == "deliver" and code != arguments[1]):
            # A no-op: reconcile has closed it so already, and its reason stays.
            self.explain(own, verb)
            return
        self.told.acknowledged[step] += 1
        own.version = version
        for name, value in becomes.items():
            setattr(own, name, value)

    def by_ledger(self, verb: str, task: str, *arguments: Any) -> tuple[int, str | None]:
        """The version and the delivery's reason code that are stored afterwards."""
        with self.told.timed(verb):
            match verb:
                case "start":
                    found = self.ledger.start_task(task)
                case "heartbeat":
                    found = self.ledger.heartbeat(task)
                case "close":
                    found = self.ledger.close_task(task, arguments[0], code=arguments[1])
                case _:
                    found = self.ledger.set_delivery(task, arguments[0], code=arguments[1])
        return found.version, found.delivery_code

    def by_session(self, verb: str, task: str, *arguments: Any) -> tuple[int, str | None]:
        with self.told.timed(f"session {verb}"), session_on(self.engine) as session:
            found = session.get(Task, task)
            if found is None:
                raise TaskNotFound("it is not there")
            getattr(found, verb)(*arguments)
        return found.version, found.delivery_code

    def heartbeat_many(self) -> None:
        running = [own for own in self.in_hand.values() if own.status == "running"]
        if not running:
            return
        with self.told.timed("heartbeat_many"):
            silent = set(self.ledger.heartbeat_many(own.id for own in running))
        for own in running:
            if own.id in silent:
                self.explain(own, "heartbeat_many")
            else:
                own.version += 1
                self.told.acknowledged["beaten"] += 1

    def get(self) -> None:
        if own := self.one("queued", "running", *CLOSES):
            self.compare(own, "get")

    def children(self) -> None:
        if own := self.one("queued", "running"):
            try:
                with self.told.timed("children"):
                    found = {record.id for record in self.ledger.children_of(own.id)}
            except TaskNotFound:
                self.explain(own, "children")
                return
            # What is queued goes by no reconcile and no prune.
            if not {
                other.id for other in self.in_hand.values() if (other.parent, other.status) == (own.id, "queued")
            } <= (found):
                self.told.fail("a child is missing")

    def leave(self) -> None:
        """Let a task be, so that reconcile has something to find."""
        if own := self.one("running"):
            self.put_aside(own)

    def put_aside(self, own: Own) -> None:
        self.in_hand.pop(own.id, None)
        self.remembered.append(own)

    def compare(self, own: Own, when: str) -> None:
        """That it is stored as it was acknowledged, or that reconcile or prune went on from there."""
        try:
            with self.told.timed("get"):
                found = self.ledger.get_task(own.id)
        except TaskNotFound:
            self.explain(own, when)
            return
        if (found.status, found.delivery_status, found.version) != (own.status, own.delivery, own.version):
            self.explain(own, when)

    def explain(self, own: Own, when: str) -> None:
        """That what differs from what this worker knows is the work of reconcile or prune; no one else knows it."""
        self.put_aside(own) if own.id in self.in_hand else None
        try:
            found = self.ledger.get_task(own.id)
        except TaskNotFound:
            # A queued task stays for ever.
            if own.status == "queued":
                self.told.fail(f"a queued task is gone, {when}")
            self.told.allowed["pruned"] += 1
            return
        timed_out = (
            own.status == "running"
            and found.status == "timed_out"
            and found.terminal_code in ("deadline_exceeded", "restart_stale")
        )
        overdue = (
            own.delivery == "pending"
            and found.delivery_status == ("not_applicable" if own.internal else "failed")
            and found.delivery_code == ("internal_task" if own.internal else "delivery_grace_expired")
        )
        if found.version != own.version + timed_out + overdue or not (timed_out or overdue):
            self.told.fail(f"not explained by reconcile: {when}")
        self.told.allowed["reconcile was there first"] += 1
        own.status, own.delivery, own.version = found.status, found.delivery_status, found.version

    # -- on the shared ones --------------------------------------------------------------------------------

    def on_a_shared_task(self) -> None:
        number = int((time.monotonic() - self.began) / SHARED_SECONDS)
        if number >= self.shared.length:
            return
        task = str(uuid.uuid5(SHARED_ROOT, f"{self.began} {number}"))
        step = self.random.choice(["created", "created", "started", "beaten", "closed", "delivered"])
        try:
            self.share(task, number, step)
        except TaskNotFound:
            self.told.allowed["a shared task that is not there yet"] += 1
        except (StaleDataError, sa.exc.IntegrityError) as error:
            self.told.allowed[f"a shared task, in a session: {type(error).__name__}"] += 1
        except StateConflict as error:
            if error.retriable or "clock" in str(error):
                raise
            self.told.allowed["a shared task: StateConflict"] += 1

    def share(self, task: str, number: int, step: str) -> None:
        if step == "created":
            with self.told.timed("create"):
                self.ledger.create_task(task_id=task, timeout_seconds=2)
            self.shared.steps["created"][number] = 1
            # It stays queued, and so keeps its parent from going; who comes late would create that one again.
            with self.told.timed("create"):
                self.ledger.create_task(task_id=uuid.uuid5(uuid.UUID(task), "child"), parent_id=task)
            self.shared.steps["child"][number] = 1
            return
        to = self.random.choice(list(CLOSES)) if step == "closed" else "delivered"
        verb, arguments = {
            "started": ("start", ()),
            "beaten": ("heartbeat", ()),
            "closed": ("close", (to, CLOSES.get(to))),
            "delivered": ("deliver", (to, "transport_acknowledged")),
        }[step]
        # A no-op counts too: that it was done was acknowledged to another.
        if self.random.random() < 0.5:
            self.by_ledger(verb, task, *arguments)
        else:
            self.by_session(verb, task, *arguments)
        if step != "beaten":
            self.shared.steps[step][number] = 1


class Upkeep(Process):
    """One kind of upkeep, again and again at its own pace."""

    def every(self) -> float:
        raise NotImplementedError

    def run(self) -> None:
        turn = 0
        due = self.began + self.every()
        while not self.stop.wait(max(0.0, due - time.monotonic())) and os.getppid() == self.parent:
            due = max(due + self.every(), time.monotonic())
            try:
                self.once(turn)
                self.turns[self.told.name].value += 1
            except LedgerError as error:
                if isinstance(error, StateConflict) and error.retriable:
                    self.told.busy[self.told.name] += 1
                else:
                    self.told.fail(f"conflict in {self.told.name}: {error}")
            turn += 1

    def once(self, turn: int) -> None:
        raise NotImplementedError


class Reconcile(Upkeep):
    def every(self) -> float:
        return self.plan.reconcile_every

    def once(self, turn: int) -> None:
        graces: dict[str, Any] = {"active_grace_seconds": GRACE, "delivery_grace_seconds": GRACE}
        with self.told.timed("reconcile preview"):
            self.ledger.reconcile(**graces, dry_run=True)
        if turn % 3 == 2:
            with self.told.timed("reconcile in batches"):
                report = self.ledger.reconcile(**graces, batch_size=20)
        else:
            with self.told.timed("reconcile"):
                report = self.ledger.reconcile(**graces)
        # In batches, a beat after the decision time on a task that is past its deadline looks like one.
        self.told.allowed["passed over in batches"] += report.get("conflicts_skipped", 0)
        self.told.acknowledged["reconciles"] += 1
        for key in ("tasks_timed_out", "deliveries_failed", "deliveries_not_applicable"):
            self.told.acknowledged[key] += report[key]


class Doctor(Upkeep):
    def every(self) -> float:
        return self.plan.doctor_every

    def once(self, turn: int) -> None:
        with self.told.timed("doctor"):
            report = self.ledger.doctor()
        self.told.acknowledged["looks"] += 1
        if not report["healthy"]:
            found = {key: value for key, value in report.items() if key.endswith("_count") and value}
            self.told.fail(f"doctor: {json.dumps(found, sort_keys=True)}")


class Prune(Upkeep):
    def every(self) -> float:
        return self.plan.prune_every

    def once(self, turn: int) -> None:
        with self.told.timed("prune"):
            report = self.ledger.prune(self.plan.prune_age, batch_size=200)
        if report["conflicts_skipped"]:
            self.told.fail("prune passed over a row")
        self.told.acknowledged["prunes"] += 1
        for key in ("tasks_pruned", "events_pruned"):
            self.told.acknowledged[key] += report[key]


class Watch:
    """What grows: looked at from outside, without a connection to a ledger's file."""

    def __init__(self, place: Place, pids: dict[str, int]) -> None:
        self.place = place
        self.pids = pids
        self.memory: dict[str, list[int]] = {name: [] for name in pids}
        self.descriptors: dict[str, list[int]] = {name: [] for name in pids}
        self.wal: list[int] = []
        self.restarts: set[int] = set()
        self.connections: list[int] = []
        self.engine = engine_of(place) if isinstance(place, sa.URL) else None

    def look(self) -> None:
        for name, pid in self.pids.items():
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            except (FileNotFoundError, ProcessLookupError):
                # It has died; its exit status tells.
                continue
            self.memory[name].append(pages * os.sysconf("SC_PAGE_SIZE"))
            self.descriptors[name].append(descriptors)
        if self.engine is not None:
            with self.engine.connect() as connection:
                query = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
                query += " AND datname = current_database()"
                self.connections.append(connection.exec_driver_sql(query).scalar_one())
            return
        wal = Path(f"{self.place}-wal")
        if wal.exists():
            with wal.open("rb") as opened:
                header = opened.read(32)
                self.wal.append(os.fstat(opened.fileno()).st_size)
            # Counted up whenever all of the log is in the database, and it is written from its beginning again.
            self.restarts.add(int.from_bytes(header[12:16], "big"))

    def close(self) -> None:
        if self.engine is not None:
            self.engine.dispose()


def gained(samples: list[int]) -> int:
    """By how much the middle of the last fifth is above that of the second."""
    fifth = max(1, len(samples) // 5)
    return int(median(samples[-fifth:]) - median(samples[fifth : 2 * fifth] or samples[:1]))


def engine_of(place: Place) -> sa.Engine:
    """An engine as a host has it, on the ledger's database."""
    return sa.create_engine(place if isinstance(place, sa.URL) else sa.URL.create("sqlite", database=str(place)))


def soak(place: Place, plan: Plan) -> dict[str, Any]:
    """Run it all, and report."""
    tools = Tools(place)
    context: Any = multiprocessing.get_context("fork")
    stop = context.Event()
    # Not the event itself, which the signal may find half set, or waited for.
    asked_to_end = threading.Event()
    handlers = [
        (number, signal.signal(number, lambda *_: asked_to_end.set()))
        for number in (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is threading.main_thread()
    ]
    began = time.monotonic()
    shared = Shared(context, plan.seconds)
    turns = {name: context.RawValue("i") for name in ("reconcile", "doctor", "prune")}
    kinds: list[tuple[str, type[Process]]] = [(f"worker {index}", Worker) for index in range(plan.processes)]
    kinds += [("reconcile", Reconcile), ("doctor", Doctor), ("prune", Prune)]
    running: dict[str, tuple[Any, Any]] = {}
    for name, kind in kinds:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=kind(name, tools, plan, shared, turns, began, stop).main, args=(theirs,))
        process.start()
        theirs.close()
        running[name] = process, mine
    watch = Watch(place, {name: process.pid for name, (process, _) in running.items()})
    told: list[Told] = []
    died: list[str] = []
    try:
        while not asked_to_end.is_set():
            time.sleep(min(1.0, plan.seconds / 40))
            watch.look()
            over = time.monotonic() - began - plan.seconds
            # A short run on a busy machine goes on until there has been something to see.
            if over >= PATIENCE or (over >= 0 and all(turns[name].value >= LEAST[name] for name in LEAST)):
                break
        lasted = time.monotonic() - began
    finally:
        stop.set()
        for name, (process, pipe) in running.items():
            try:
                told.append(pipe.recv())
            except EOFError:
                died.append(name)
            pipe.close()
            process.join(30)
            if process.exitcode != 0:
                died.append(name)
                process.kill()
                process.join()
        watch.close()
        for number, handler in handlers:
            signal.signal(number, handler)
        tools.close()
    taken = {name: turn.value for name, turn in turns.items()}
    return report_of(tools, plan, lasted, told, sorted(set(died)), shared, taken, watch)


def report_of(
    tools: Tools,
    plan: Plan,
    lasted: float,
    told: list[Told],
    died: list[str],
    shared: Shared,
    turns: dict[str, int],
    watch: Watch,
) -> dict[str, Any]:
    place = tools.place
    latencies = Latencies()
    acknowledged: Counter[str] = Counter()
    allowed: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    failures: Counter[str] = Counter({f"{name} died": 1 for name in died})
    for each in told:
        latencies.merge(each.latencies)
        acknowledged += each.acknowledged
        allowed += each.allowed
        busy += each.busy
        failures += each.failures
    steps = shared.counts()
    created = acknowledged["created"] + steps["created"] + steps["child"]
    transitions = (
        created
        + sum(acknowledged[step] + steps[step] for step in ("started", "closed", "delivered"))
        + sum(acknowledged[key] for key in ("tasks_timed_out", "deliveries_failed", "deliveries_not_applicable"))
    )
    expected = {
        "tasks": tools.before["tasks"] + created - acknowledged["tasks_pruned"],
        "events": tools.before["events"] + transitions - acknowledged["events_pruned"],
    }
    with Ledger(place) as ledger:
        last = ledger.doctor()
    found = {"tasks": last["task_count"], "events": last["event_count"]}
    memory = max(gained(samples) for samples in watch.memory.values())
    descriptors = max(gained(samples) for samples in watch.descriptors.values())
    report: dict[str, Any] = {
        "database": "postgresql" if isinstance(place, sa.URL) else "sqlite",
        "seconds": round(lasted, 1),
        "processes": plan.processes,
        "verbs": latencies.report(),
        "acknowledged": dict(sorted(acknowledged.items())),
        "shared": steps,
        "allowed": dict(sorted(allowed.items())),
        "busy": dict(sorted(busy.items())),
        "counts": {"expected": expected, "found": found},
        "memory": {
            "highest_mib": round(max(map(max, watch.memory.values())) / 2**20, 1),
            "gained_mib": round(memory / 2**20, 2),
            "bound_mib": MEMORY_BOUND / 2**20,
        },
        "descriptors": {
            "highest": max(map(max, watch.descriptors.values())),
            "gained": descriptors,
            "bound": DESCRIPTORS_BOUND,
        },
    }
    if isinstance(place, sa.URL):
        # A worker's ledger and its host's engine, the three of the upkeep, the first process's, and this count's.
        bound = 2 * plan.processes + 3 + 2
        report["connections"] = {"highest": max(watch.connections), "bound": bound}
        if max(watch.connections) > bound:
            failures["there are too many connections"] += 1
    else:
        report["wal"] = {
            "highest_mib": round(max(watch.wal) / 2**20, 2),
            "bound_mib": WAL_BOUND / 2**20,
            "written_from_the_beginning": max(watch.restarts) - min(watch.restarts),
            "left_mib": round(checkpointed(place) / 2**20, 2),
        }
        if max(watch.wal) > WAL_BOUND:
            failures["the log has grown beyond its bound"] += 1
        if max(watch.wal) > CHECKPOINTED_BY and len(watch.restarts) == 1:
            failures["no checkpoint got through"] += 1
        if report["wal"]["left_mib"]:
            failures["the last checkpoint did not get through"] += 1
    verbs = sum(row["count"] for row in report["verbs"].values())
    for name, count in busy.items():
        if count > (max(1, BUSY_VERBS * verbs) if name == "verbs" else max(1, BUSY_UPKEEP * turns[name])):
            failures[f"too often busy: {name}"] += 1
    if found != expected:
        failures["what is stored is not what was acknowledged"] += 1
    if not last["healthy"]:
        failures["the last doctor"] += 1
    if memory > MEMORY_BOUND:
        failures["a process has grown"] += 1
    if descriptors > DESCRIPTORS_BOUND:
        failures["a process has more and more descriptors"] += 1
    report["failures"] = dict(sorted(failures.items()))
    report["examples"] = [each.example for each in told if each.example][:3]
    return report


def checkpointed(place: Path) -> int:
    """How long the log is once nobody is there any more, and it has been asked to be empty."""
    engine = engine_of(place)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        wal = Path(f"{place}-wal")
        length = wal.stat().st_size if wal.exists() else 0
    engine.dispose()
    return length


def shown(report: dict[str, Any]) -> str:
    lines = [f"{report['database']}: {report['processes']} processes, {report['seconds']} s", ""]
    lines += ["| verb | times | p50 ms | p99 ms | longest ms |", "|---|--:|--:|--:|--:|"]
    lines += [
        f"| {verb} | {row['count']:,} | {row['p50_ms']:,.2f} | {row['p99_ms']:,.2f} | {row['max_ms']:,.2f} |"
        for verb, row in report["verbs"].items()
    ]
    lines.append("")
    for key in (
        "busy",
        "memory",
        "descriptors",
        "connections",
        "wal",
        "counts",
        "acknowledged",
        "shared",
        "allowed",
        "failures",
    ):
        if key in report:
            lines.append(f"{key}: {json.dumps(report[key], sort_keys=True)}")
    return "\n".join([*lines, *report["examples"]])


@contextmanager
def place_for(arguments: argparse.Namespace) -> Iterator[Place]:
    with ExitStack() as stack:
        if arguments.sqlite:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tsg-soak-"))
            yield Path(folder) / "ledger.sqlite"
        elif arguments.postgresql:
            running = os.environ.get(postgresql.URL_VARIABLE)
            if running is None:
                server = postgresql.Server()
                stack.callback(server.remove)
                server.start()
                running = server.url
            made = stack.enter_context(database(sa.make_url(running), f"tsg_soak_{uuid.uuid4().hex}"))
            engine = sa.create_engine(made, poolclass=sa.NullPool)
            upgrade(engine)
            yield made
        elif "://" in arguments.target:
            url = sa.make_url(arguments.target)
            yield Path(str(url.database)) if url.get_backend_name() == "sqlite" else url
        else:
            yield Path(arguments.target)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=(__doc__ or "").partition("\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("target", nargs="?", metavar="TARGET", help="a path or a URL")
    where.add_argument("--sqlite", action="store_true", help="a file of its own, removed afterwards")
    where.add_argument("--postgresql", action="store_true", help="a database, and if need be a server, of its own")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--pause-ms", type=float, default=20.0, help="what a worker waits between verbs, on average")
    arguments = parser.parse_args()
    with place_for(arguments) as place:
        report = soak(place, Plan.of(arguments.seconds, arguments.processes, arguments.pause_ms / 1000))
    print(shown(report))
    print(json.dumps(report, sort_keys=True))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
