"""Processes that write to a ledger until something ends them, and what each has told of it.

All are forked by one process that has imported everything and opened nothing (:class:`Zygote`). A writer tells what
it is about to do, and that it is done, by appending a line to a file of its own, with one ``write``: what it has told
is known however it ends. :class:`Books` holds what all of them told against what is stored.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

import tsg
from tests.damage import EVENT_COLUMNS, REASONS, TASK_COLUMNS, Row, implied_chain
from tsg import Ledger, StateConflict, Task, TaskNotFound
from tsg.cli import main as command_line

ROOT = Path(__file__).parents[2]
Place = Path | sa.URL

#: What an id begins with: a task that many write to, one that is long past, one that is its writer's alone.
SHARED, OLD, OWN = "aaaaaaaa", "bbbbbbbb", "cccccccc"
#: The parent of all shared tasks.
SHARED_PARENT = "dddddddd-0000-4000-8000-000000000000"
#: A parent of tasks of writers' own, that stays as it is.
OWN_PARENT = "eeeeeeee-0000-4000-8000-000000000000"
#: How far back the clock of old tasks is, in seconds, and from what age on they are stale, overdue or let go.
LONG_AGO, GRACE = 7200.0, 3600.0

ORDERS = "CREATE TABLE orders (task_id TEXT PRIMARY KEY, state TEXT)"


def named(target: Place, application: str | None = None) -> str:
    """A target as text; on a server, connections of it bear a name."""
    if isinstance(target, sa.URL):
        shown = target.update_query_dict({"application_name": application}) if application else target
        return shown.render_as_string(hide_password=False)
    return str(target)


def plain_engine(target: Place | str) -> sa.Engine:
    """An engine of somebody else's, without our listeners."""
    if isinstance(target, Path) or "://" not in str(target):
        return sa.create_engine(f"sqlite:///{target}", connect_args={"timeout": 30})
    return sa.create_engine(target)


# -- the process that forks the others ---------------------------------------------------------------------


class Zygote:
    """Forks writers from a process that is warm, and ends and reaps them, so that no id is ever another's."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.faults.writers"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._alive: set[int] = set()

    def start(self, role: str, **arguments: object) -> int:
        """Fork a process that plays `role`, a function below; its id."""
        process = self._ask("start", role, arguments)
        self._alive.add(process)
        return process

    def kill(self, process: int) -> int:
        """SIGKILL it; how it ended, as :attr:`subprocess.Popen.returncode`."""
        self._alive.discard(process)
        return self._ask("kill", process)

    def wait(self, process: int) -> int:
        """Let it end by itself; how it ended."""
        self._alive.discard(process)
        return self._ask("wait", process)

    def end_all(self) -> None:
        """SIGKILL whatever a test has left behind, which might hold locks."""
        for process in list(self._alive):
            self.kill(process)

    def run(self, *arguments: object) -> tuple[int, bytes]:
        """The real command line, in a process of its own: its exit status, and all that it printed."""
        with tempfile.NamedTemporaryFile() as output:
            status = self.wait(self.start("command", arguments=[str(part) for part in arguments], output=output.name))
            return status, output.read()

    def close(self) -> None:
        """End it and every process that it has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(timeout=60) == 0
        self._process.stdout.close()

    def _ask(self, *request: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks the others is gone"
        return int(answer)


def serve() -> None:
    """What :class:`Zygote` speaks to."""
    warm_up(writers=True)
    mine: set[int] = set()
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        if what == "start":
            answer = fork(*arguments)
            mine.add(answer)
        else:
            answer = end(arguments[0], by_force=what == "kill")
            mine.discard(arguments[0])
        print(answer, flush=True)
    for process in mine:
        end(process, by_force=True)


def warm_up(*, writers: bool) -> None:
    """Have every statement compiled and every module imported; what was opened for that is closed again."""
    commands: list[list[str]] = [["init"], ["create"], ["reconcile"], ["reconcile", "--batch-size", "2"]]
    commands += [["prune", "--older-than", "0"], ["downgrade", "0003"], ["upgrade"], ["doctor"]]
    chance = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="tsg-warm-") as folder:
        path = Path(folder, "warm", "ledger.sqlite")
        for words in commands:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                command_line(["--db", str(path), *words])
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(ORDERS)
        for hand in (Hand(str(path)), HostHand(str(path))) if writers else ():
            for step in [step for _ in range(5) for step in a_life(chance, OWN, [None])]:
                hand.do(step, [])
            hand.close()
    if writers:
        sa.create_engine("postgresql+psycopg://").dispose()
    gc.collect()
    gc.freeze()


def fork(role: str, arguments: dict[str, Any]) -> int:
    process = os.fork()
    if process:
        return process
    status = 99
    try:
        os.close(0)
        status = ROLES[role](**arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        # Not by the interpreter's own way out, which takes longer than most roles.
        os._exit(status)


def end(process: int, *, by_force: bool) -> int:
    if by_force:
        os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def command(arguments: list[str], output: str) -> int:
    """Role: one command."""
    to = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(to, 1)
    os.dup2(to, 2)
    try:
        command_line(arguments)
    except SystemExit as left:
        return int(left.code or 0)


def halting_reconcile(target: str, log: str, batch_size: int | None, at: int) -> int:
    """Role: a reconcile that halts in its midst, at the step of that number, until it is killed."""
    voice, steps = Voice(log), 0

    def progress(done: int, total: int) -> None:
        nonlocal steps
        voice.tell("step", done, total)
        steps += 1
        while steps == at:
            signal.pause()

    with Ledger(target) as ledger:
        ledger.reconcile(
            active_grace_seconds=GRACE, delivery_grace_seconds=GRACE, batch_size=batch_size, progress=progress
        )
    return 0


def one_run(target: str, log: str, verb: str, batch_size: int | None) -> int:
    """Role: one reconcile or prune, which tells when it is in the midst of it and when it is over."""
    voice = Voice(log)

    def progress(done: int, total: int) -> None:
        voice.tell("step", done, total)

    with Ledger(target) as ledger:
        voice.tell("try")
        if verb == "prune":
            ledger.prune(GRACE, batch_size or 5000, progress=progress)
        else:
            ledger.reconcile(
                active_grace_seconds=GRACE, delivery_grace_seconds=GRACE, batch_size=batch_size, progress=progress
            )
        voice.tell("did")
    return 0


# -- writers -----------------------------------------------------------------------------------------------


class Voice:
    """A file of a process's own, that it appends to. Lines are lists; the first word says what is told.

    ``try VERB IDS TO``: what is about to be done; ``did RECORD``, ``beat IDS``, ``swept``: it is done, and this came
    back; ``refused``: it is not done; ``broken``: nobody knows, the connection was lost; ``seen ID RECORD``: so it
    was found afterwards; ``wrong TEXT``: what must not happen.
    """

    def __init__(self, path: str, epoch: str | None = None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._epoch_file = epoch

    def tell(self, *line: object) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")

    @property
    def epoch(self) -> int:
        """How often the server has stopped and started; odd while it is away, below zero at the end."""
        return int(Path(self._epoch_file).read_text()) if self._epoch_file else 0


class Step(NamedTuple):
    verb: str
    task: str
    to: str | None = None
    code: str | None = None
    fields: dict[str, Any] = {}


def identifier(kind: str, chance: random.Random) -> str:
    return kind + str(uuid.UUID(int=chance.getrandbits(128), version=4))[8:]


def a_life(chance: random.Random, kind: str, parents: list[str]) -> Iterator[Step]:
    """All steps of a task, from its creation to the end of its delivery."""
    task = identifier(kind, chance)
    required = chance.random() < 0.6
    timeout = chance.choice((None, 1e6))
    fields = {
        "parent_id": chance.choice(parents),
        "delivery_required": required,
        "timeout_seconds": timeout,
        "expects_heartbeat": timeout is None or chance.random() < 0.5,
    }
    yield Step("create", task, fields=fields)
    if chance.random() < 0.85:
        yield Step("start", task)
        for _ in range(chance.randrange(4)):
            yield Step(chance.choice(("beat", "beat many")), task)
    to = chance.choice(("succeeded", "failed", "cancelled", "timed_out"))
    # The reasons that reconcile gives are left to it.
    code = None if to == "timed_out" else chance.choice((None, *REASONS[to]))
    yield Step("close", task, to, code)
    if not required:
        yield Step("deliver", task, "not_applicable")
    elif chance.random() < 0.5:
        yield Step("deliver", task, "delivered", "transport_acknowledged")
    else:
        yield Step("deliver", task, "failed", "transport_failed")


def shared_tasks() -> list[str]:
    """The tasks that all fight for at this time; there are always new ones."""
    newest = int(time.time() * 10)
    return [f"{SHARED}-0000-4000-8000-{number:012d}" for number in range(newest - 3, newest + 1)]


def a_shared_step(chance: random.Random) -> Step:
    task = chance.choice(shared_tasks())
    required = task[-1] not in "048"
    verb = chance.choice(("create", "create", "start", "start", "beat", "beat many", "close", "deliver"))
    if verb == "create":
        return Step(verb, task, fields={"parent_id": SHARED_PARENT, "delivery_required": required})
    if verb == "close":
        return Step(verb, task, chance.choice(("succeeded", "failed", "cancelled")))
    if verb == "deliver":
        return Step(verb, task, chance.choice(("delivered", "failed")) if required else "not_applicable")
    return Step(verb, task)


class Hand:
    """How a writer does its steps: by a Ledger."""

    def __init__(self, target: str, clock: Callable[[], float] = time.time) -> None:
        self.ledger = Ledger(target, clock=clock, busy_timeout_ms=30_000)

    def do(self, step: Step, beside: list[str]) -> tuple[object, ...]:
        """Do it; what is to be told of it."""
        if step.verb == "beat many":
            ids = [step.task, *beside]
            resting = self.ledger.heartbeat_many(ids)
            return ("beat", [task for task in ids if task not in resting])
        if step.verb == "create":
            return ("did", vars(self.ledger.create_task(task_id=step.task, **step.fields)))
        if step.verb == "start":
            return ("did", vars(self.ledger.start_task(step.task)))
        if step.verb == "beat":
            return ("did", vars(self.ledger.heartbeat(step.task)))
        if step.verb == "close":
            return ("did", vars(self.ledger.close_task(step.task, step.to, code=step.code)))
        return ("did", vars(self.ledger.set_delivery(step.task, step.to, code=step.code)))

    def look(self, task: str) -> dict[str, Any] | None:
        try:
            return vars(self.ledger.get_task(task))
        except TaskNotFound:
            return None

    #: What the other side may answer where many write to one task.
    refusals: tuple[type[Exception], ...] = (StateConflict, TaskNotFound)
    #: What a call may end with while there is no server.
    outages: tuple[type[Exception], ...] = (StateConflict,)

    def close(self) -> None:
        self.ledger.close()


#: What hosts have compiled, before they were forked too.
COMPILED: dict[Any, Any] = {}


class HostHand(Hand):
    """By the verbs of tasks in sessions of an application's own, each with a row of the application's beside it."""

    refusals = (StateConflict, StaleDataError, IntegrityError)
    outages = (DBAPIError,)

    def __init__(self, target: str) -> None:
        self.engine = plain_engine(target).execution_options(compiled_cache=COMPILED)

    def do(self, step: Step, beside: list[str]) -> tuple[object, ...]:
        with Session(self.engine) as session, session.begin():
            task = session.scalars(sa.select(Task).where(Task.id == step.task)).one_or_none()
            if step.verb == "create":
                if task is None:
                    task = Task(id=step.task, **step.fields)
                    session.add(task)
            elif task is None:
                raise StateConflict("nobody has created it yet")
            elif step.verb == "start":
                task.start()
            elif step.verb.startswith("beat"):
                task.heartbeat()
            elif step.verb == "close":
                task.close(step.to, step.code)
            else:
                task.deliver(step.to, step.code)
            session.flush()
            record = {name: getattr(task, name) for name in tsg.TaskRecord.__dataclass_fields__}
            if step.task.startswith(OWN):
                order = {"task": step.task, "state": f"{record['status']}/{record['delivery_status']}"}
                if step.verb == "create":
                    session.execute(sa.text("INSERT INTO orders VALUES (:task, :state)"), order)
                else:
                    session.execute(sa.text("UPDATE orders SET state = :state WHERE task_id = :task"), order)
        return ("did", record)

    def look(self, task: str) -> dict[str, Any] | None:
        with Session(self.engine) as session:
            found = session.scalars(sa.select(Task).where(Task.id == task)).one_or_none()
            if found is None:
                return None
            return {name: getattr(found, name) for name in tsg.TaskRecord.__dataclass_fields__}

    def close(self) -> None:
        self.engine.dispose()


def writer(target: str, log: str, seed: int, host: bool = False, epoch: str | None = None) -> int:
    """Role: write until the end; to tasks of its own, to those that all write to, and to some long past."""
    chance, voice = random.Random(seed), Voice(log, epoch)
    hand = HostHand(target) if host else Hand(target)
    past: Hand | None = None
    parents: list[Any] = [None, OWN_PARENT]
    own, old = a_life(chance, OWN, parents), a_life(chance, OLD, [None])
    while voice.epoch >= 0:
        time.sleep(chance.random() * 0.04)
        choice = chance.random()
        if choice < 0.5:
            step = next(own, None)
            if step is None:
                own = a_life(chance, OWN, parents)
            else:
                # Its own last task is a parent that has ended.
                parents[2:] = [step.task] if step.verb == "deliver" else parents[2:]
                if not attempt(voice, hand, step, chance):
                    own = a_life(chance, OWN, parents)
        elif choice < 0.6 and not host:
            before = voice.epoch
            try:
                past = past or Hand(target, lambda: time.time() - LONG_AGO)
            except StateConflict:
                voice.tell("broken", before, voice.epoch)
                continue
            step = next(old, None)
            # Some are left as they are, queued, running, or with their delivery open.
            if step is None or chance.random() < 0.1:
                old = a_life(chance, OLD, [None])
            else:
                attempt(voice, past, step, chance)
        else:
            attempt(voice, hand, a_shared_step(chance), chance)
    hand.close()
    if past is not None:
        past.close()
    return 0


def attempt(voice: Voice, hand: Hand, step: Step, chance: random.Random) -> bool:
    """Do a step; where the connection is lost, look whether it is done, and do it again where it is not.

    Returns:
        Whether it was not refused.
    """
    is_own = step.task.startswith(OWN)
    while voice.epoch >= 0:
        beside = chance.sample(shared_tasks(), 2) if step.verb == "beat many" else []
        before = voice.epoch
        voice.tell("try", step.verb, [step.task, *beside], step.to)
        try:
            voice.tell(*hand.do(step, beside), before)
            return True
        except Exception as error:
            if isinstance(error, hand.refusals) and not is_own:
                voice.tell("refused", type(error).__name__)
                return False
            if not may_be_outage(voice, hand, error, before):
                return True
        if not is_own or looks_done(voice, hand, step):
            return True
    return True


def may_be_outage(voice: Voice, hand: Hand, error: Exception, before: int) -> bool:
    """Tell what a call ended with that began in that epoch; whether it may be that there is no server."""
    if isinstance(error, hand.outages) and (before, voice.epoch) != (0, 0):
        voice.tell("broken", before, voice.epoch)
        return True
    voice.tell("wrong", "".join(traceback.format_exception(error)))
    return False


def looks_done(voice: Voice, hand: Hand, step: Step) -> bool:
    """Whether a step of which nobody knows is done; asked until there is an answer."""
    while voice.epoch >= 0:
        before = voice.epoch
        try:
            found = hand.look(step.task)
        except Exception as error:
            if not may_be_outage(voice, hand, error, before):
                return True
            time.sleep(0.02)
            continue
        voice.tell("seen", step.task, found, before)
        if found is None:
            return False
        wanted = {"start": ("status", "running"), "close": ("status", step.to), "deliver": ("delivery_status", step.to)}
        name, value = wanted.get(step.verb, ("id", step.task))
        return bool(found[name] == value)
    return True


def sweeper(target: str, log: str, seed: int, prune: bool = False, epoch: str | None = None) -> int:
    """Role: reconcile or prune, in one transaction and in batches, all tasks or those that all write to."""
    chance, voice = random.Random(seed), Voice(log, epoch)
    ledger = Ledger(target, busy_timeout_ms=30_000)
    while voice.epoch >= 0:
        time.sleep(chance.random() * 0.04)
        before = voice.epoch
        size = chance.choice((1, 2, 5))
        voice.tell("try", "prune" if prune else "reconcile", [], None)
        try:
            if prune:
                ledger.prune(GRACE, size)
            elif chance.random() < 0.3:
                ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0, parent_id=SHARED_PARENT)
            else:
                ledger.reconcile(
                    active_grace_seconds=GRACE,
                    delivery_grace_seconds=GRACE,
                    batch_size=chance.choice((None, size)),
                )
            voice.tell("swept", before)
        except StateConflict as error:
            if error.retriable:
                voice.tell("refused", "StateConflict")
            elif before == 0 == voice.epoch:
                voice.tell("wrong", "".join(traceback.format_exception(error)))
            else:
                voice.tell("broken", before, voice.epoch)
        except Exception as error:
            voice.tell("wrong", "".join(traceback.format_exception(error)))
    ledger.close()
    return 0


# -- what they told, and what is stored ------------------------------------------------------------------------


class Stored(NamedTuple):
    """All tasks by id, and their chains, in one snapshot."""

    tasks: dict[str, Row]
    chains: dict[str, list[tuple[Any, ...]]]

    @classmethod
    def of(cls, target: Place) -> Stored:
        engine = plain_engine(target)
        with engine.connect() as connection:
            if engine.dialect.name == "postgresql":
                connection.execution_options(isolation_level="REPEATABLE READ")
            else:
                connection.exec_driver_sql("BEGIN")
            rows = connection.exec_driver_sql(f"SELECT {', '.join(TASK_COLUMNS)} FROM tsg_tasks").all()
            events = connection.exec_driver_sql(
                f"SELECT {', '.join(EVENT_COLUMNS)} FROM tsg_task_events ORDER BY task_pk, number"
            ).all()
        engine.dispose()
        tasks = [dict(zip(TASK_COLUMNS, row, strict=True)) for row in rows]
        for task in tasks:
            task["id"] = str(task["id"])
        names = {task["pk"]: task["id"] for task in tasks}
        chains: dict[str, list[tuple[Any, ...]]] = {}
        for event in events:
            chains.setdefault(names[event[0]], []).append(tuple(event[1:]))
        return cls({task["id"]: task for task in tasks}, chains)


def standing(record: Row | None) -> tuple[Any, ...] | None:
    """Where a task stands, but for the times."""
    if record is None:
        return None
    return record["version"], record["status"], record["delivery_status"]


class Told:
    """What one writer told until it ended.

    Attributes:
        own: where each task that is the writer's alone stood when it was last acknowledged, in order of creation.
        in_flight: the step of which nothing was told: verb, ids, and what to.
        failures: how often a call failed that began and ended with the server there, by epoch.
        served: epochs in which a call was acknowledged.
    """

    def __init__(self, log: Path) -> None:
        self.acknowledged: list[Row] = []
        self.own: dict[str, tuple[Any, ...] | None] = {}
        self.tried: set[tuple[str, str]] = set()
        self.wrong: list[str] = []
        self.in_flight: tuple[str, list[str], str | None] | None = None
        self.failures: dict[int, int] = {}
        self.served: set[int] = set()
        self.broken = 0
        self.doubtful: dict[str, tuple[str, list[str], str | None]] = {}
        *whole, _torn = log.read_bytes().split(b"\n") if log.exists() else [b""]
        for line in whole:
            self._hear(*json.loads(line))

    def may_stand(self, task: str) -> list[tuple[Any, ...] | None]:
        """Where a task of the writer's own may stand: as last acknowledged, or one step on."""
        last = self.own.get(task)
        flying = self.doubtful.get(task) or self.in_flight
        return [last] if flying is None or task not in flying[1] else [last, one_step_on(last, flying[0], flying[2])]

    def _hear(self, what: str, *told: Any) -> None:
        if what == "try":
            verb, tasks, to = told
            self.in_flight = (verb, tasks, to)
            if to is not None:
                self.tried.add((tasks[0], to))
            if tasks and tasks[0].startswith(OWN):
                self.own.setdefault(tasks[0], None)
            return
        assert self.in_flight is not None or what in ("broken", "seen"), (what, told)
        if what in ("did", "beat", "swept"):
            self.served.add(told[-1])
        if what == "did":
            self._acknowledge(told[0])
        elif what == "beat":
            for task in told[0]:
                if task.startswith(OWN):
                    self.own[task] = one_step_on(self.own[task], "beat", None)
        elif what == "wrong":
            self.wrong.append(told[0])
        elif what == "broken":
            self.broken += 1
            before, after = told
            if before == after and before % 2 == 0:
                self.failures[before] = self.failures.get(before, 0) + 1
            if self.in_flight is not None and self.in_flight[1]:
                self.doubtful[self.in_flight[1][0]] = self.in_flight
        elif what == "seen":
            task, record, epoch = told
            self.served.add(epoch)
            if standing(record) not in self.may_stand(task):
                self.wrong.append(f"{standing(record)} is none of {self.may_stand(task)}")
            self.doubtful.pop(task, None)
            if record is None:
                self.own.pop(task)
            else:
                self._acknowledge(record)
        self.in_flight = None

    def _acknowledge(self, record: Row) -> None:
        self.acknowledged.append(record)
        if record["id"].startswith(OWN):
            self.own[record["id"]] = standing(record)


def one_step_on(last: tuple[Any, ...] | None, verb: str, to: str | None) -> tuple[Any, ...]:
    if last is None:
        assert verb == "create"
        return 0, "queued", "pending"
    version, status, delivery = last
    if verb == "start":
        status = "running"
    elif verb == "close":
        status = to
    elif verb == "deliver":
        delivery = to
    return version + 1, status, delivery


class Books:
    """What all writers told, held against what is stored."""

    def __init__(self) -> None:
        self.acknowledged: dict[str, list[Row]] = {}
        self.own: dict[str, list[tuple[Any, ...] | None]] = {}
        self.tried: dict[str, set[str]] = {}

    def enter(self, told: Told) -> None:
        """Add what a writer that has ended told."""
        assert told.wrong == [], told.wrong[0]
        for record in told.acknowledged:
            self.acknowledged.setdefault(record["id"], []).append(record)
        self.own |= {task: told.may_stand(task) for task in told.own}
        for task, to in told.tried:
            self.tried.setdefault(task, set()).add(to)

    def take_over(self, record: Row) -> None:
        """Add that somebody else has ended a task of a writer's own."""
        self.own[record["id"]] = [standing(record)]
        self.tried.setdefault(record["id"], set()).add(record["status"])
        self.acknowledged.setdefault(record["id"], []).append(record)

    @property
    def transitions(self) -> int:
        """How many were acknowledged, heartbeats included."""
        return sum(map(len, self.acknowledged.values()))

    def lost(self, stored: Stored) -> list[str]:
        """In words, what was acknowledged and is not there, and what is there that nobody did."""
        found = []
        for task, records in self.acknowledged.items():
            row, chain = stored.tasks.get(task), stored.chains.get(task, [])
            if row is None:
                # What is long past and has ended may have been let go, with all its events.
                if not task.startswith(OLD) or not any(record["status"] in REASONS for record in records):
                    found.append(f"{task} is gone")
                continue
            for record in records:
                implied = implied_chain(record)
                if chain[: len(implied)] != implied:
                    found.append(f"{task}: {implied} was acknowledged, {chain} is stored")
                if row["version"] < record["version"] or row["updated_at"] < record["updated_at"]:
                    found.append(f"{task}: {standing(record)} was acknowledged, {standing(row)} is stored")
        for task, places in self.own.items():
            if standing(stored.tasks.get(task)) not in places:
                found.append(f"{task} stands at {standing(stored.tasks.get(task))}, not at one of {places}")
        return found

    def unexplained(self, stored: Stored) -> list[str]:
        """In words, ends that no writer asked for and no reconcile gives, and chains that are not those of their rows.

        To be asked when all writers have ended, and all that they told is entered.
        """
        found = []
        for task, row in stored.tasks.items():
            if stored.chains.get(task, []) != implied_chain(row):
                found.append(f"{task}: {stored.chains.get(task)} is stored for {row}")
            asked = self.tried.get(task, set())
            end, code = row["status"], row["terminal_code"]
            if end in REASONS and end not in asked and (end, code) != ("timed_out", "restart_stale"):
                found.append(f"{task} ended as {end}, {code}")
            delivery, code = row["delivery_status"], row["delivery_code"]
            by_reconcile = code in ("delivery_grace_expired", "internal_task")
            if delivery != "pending" and delivery not in asked and not by_reconcile:
                found.append(f"{task} was delivered as {delivery}, {code}")
        return found


# -- one call of a command at a time -----------------------------------------------------------------------------

#: At which call of its kind a process is injected with the fault; it makes the first ones on files that don't matter.
FAULTY_CALL = 256


class Job(NamedTuple):
    """A command to be met by a fault at each of its calls, from a folder as it was before."""

    name: str
    folder: str
    arguments: list[str]


class Met(NamedTuple):
    """How one process ended that was to be met by a fault: what it left is in `folder`.

    Attributes:
        call, number: at the call of that name and number.
        status: as :attr:`subprocess.Popen.returncode`.
    """

    job: str
    call: str
    number: int
    status: int
    folder: str


def meet(work: str, plan: str) -> None:
    """Run under strace, which does something to every call of number :data:`FAULTY_CALL` of a process.

    Each process is forked here, makes so many harmless calls that the one to be met is the one of that number, and
    then runs its command on ``WORK/private/ledger.sqlite``. For every kind of call the first is met, then later ones,
    then those between, widest gaps first, until the limit; for the first kind also one that the command does not make.
    """
    given = json.loads(Path(plan).read_text())
    place = Path(work)
    warm_up(writers=False)
    for name in ("harmless", "missing"):
        (place.parent / name).touch()
    harmless = os.open(place.parent / "harmless", os.O_RDWR)
    (place.parent / "missing").unlink()
    met: list[Met] = []
    for job in (Job(*fields) for fields in given["jobs"]):
        for call, limit in given["calls"].items():

            def is_met(number: int, job: Job = job, call: str = call) -> bool:
                shutil.copytree(job.folder, place.parent / "next")
                (place.parent / "next").rename(place)
                process = os.fork()
                if not process:
                    status = 99
                    try:
                        for _ in range(FAULTY_CALL - number):
                            HARMLESS[call](place.parent, harmless)
                        status = command(job.arguments, str(place.parent / f"{len(met):05d}.output"))
                    finally:
                        os._exit(status)
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                left = place.parent / f"{len(met):05d}"
                place.rename(left)
                met.append(Met(job.name, call, number, status, str(left)))
                return status != 0

            meet_each(limit, is_met, to_the_end=call == next(iter(given["calls"])))
    Path(given["met"]).write_text(json.dumps(met))


def meet_each(limit: int, is_met: Callable[[int], bool], *, to_the_end: bool) -> None:
    """Ask for `limit` of the numbers that there are; `to_the_end`, however many that takes, for one that is not."""
    known = {0: True}
    while True:
        if all(known.values()):
            if len(known) > limit and not to_the_end:
                return
            number = max(1, 4 * max(known))
            assert number <= FAULTY_CALL, "there are more calls than were counted on"
        else:
            first_beyond = min(number for number, met in known.items() if not met)
            inside = sorted(number for number in known if number <= first_beyond)
            gap, start = max((later - number, number) for number, later in zip(inside, inside[1:], strict=False))
            if gap == 1 or len(known) > limit:
                return
            number = start + gap // 2
        known[number] = is_met(number)


def _missing(folder: Path) -> str:
    return str(folder / "missing")


def _suppressing(call: Callable[[str], object]) -> Callable[[Path, int], None]:
    def harmless(folder: Path, _: int) -> None:
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            call(_missing(folder))

    return harmless


#: A call of each kind that changes nothing.
HARMLESS: dict[str, Callable[[Path, int], object]] = {
    "pwrite64": lambda folder, file: os.pwrite(file, b"\0", 0),
    "ftruncate": lambda folder, file: os.ftruncate(file, 1),
    "fdatasync": lambda folder, file: os.fdatasync(file),
    "fcntl": lambda folder, file: fcntl.fcntl(file, fcntl.F_GETFD),
    "fchmod": lambda folder, file: os.fchmod(file, 0o600),
    "unlink": _suppressing(os.unlink),
    "chmod": _suppressing(lambda path: os.chmod(path, 0o600)),
    "mkdir": _suppressing(lambda path: os.mkdir(path + "/below")),
    "openat": _suppressing(lambda path: os.open(path, os.O_RDONLY)),
}

ROLES: dict[str, Callable[..., int]] = {
    role.__name__: role for role in (command, halting_reconcile, one_run, writer, sweeper)
}

if __name__ == "__main__":
    meet(*sys.argv[1:]) if len(sys.argv) > 1 else serve()
