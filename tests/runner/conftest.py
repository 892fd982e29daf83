"""Plans on either database as the plan layer's own tests have them, runners in threads, and what they are asked to run.

Whatever a test does by verbs and runners, doctor finds nothing wrong with it afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa

from tests.conftest import FakeClock
from tests.faults.test_kills import wait_until
from tests.plan.conftest import engine, plans_file, plans_server, plans_template, plans_url
from tests.test_concurrency import Place, named
from tsg import Ledger, Plans
from tsg.cli import main
from tsg.plan import reading
from tsg.plan.tables import dispatches, metadata
from tsg.runner import commands, dispatch
from tsg.runner.agents import Agent, Agents
from tsg.runner.dispatch import Round
from tsg.runner.logs import Logs
from tsg.runner.loop import Ended, Runner
from tsg.runner.message import Errand

__all__ = ["engine", "plans_file", "plans_server", "plans_template", "plans_url"]

_clock = FakeClock()

#: For what is not of the database: each kind has its say in the tests beside it.
on_sqlite = pytest.mark.parametrize("place", ["sqlite"], indirect=True)

#: Programs that end at once: well, and badly.
WELL = (sys.executable, "-S", "-c", "")
BADLY = ("false",)


class Kept(NamedTuple):
    """A ledger for all tests of a module, which has its statements ready."""

    place: Place
    ledger: Ledger


@pytest.fixture(scope="module")
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Kept]]:
    """By the kind of database; :func:`place` empties it for each test."""
    made: dict[str, Kept] = {}

    def of(kind: str) -> Kept:
        if kind not in made:
            if kind == "postgresql":
                place: Place = request.getfixturevalue("plans_server")
            else:
                place = tmp_path_factory.mktemp("kept") / "ledger.sqlite"
                place.parent.chmod(0o700)
                shutil.copyfile(request.getfixturevalue("plans_file"), place)
                place.chmod(0o600)
            made[kind] = Kept(place, Ledger(place, clock=_clock))
        return made[kind]

    yield of
    for each in made.values():
        each.ledger.close()


@pytest.fixture
def clock() -> FakeClock:
    """The one of all ledgers that are kept, set back to where it begins."""
    _clock.__init__()  # type: ignore[misc]
    return _clock


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, kept: Callable[[str], Kept], clock: FakeClock) -> Place:
    """Where plans may be, on either database, at head and empty. The schema is for others too: leave it as it is."""
    place, ledger = kept(request.param)
    if isinstance(place, Path):
        ledger._opened.engine.dispose()
        for leftover in ("-wal", "-shm"):
            place.with_name(place.name + leftover).unlink(missing_ok=True)
        place.write_bytes(request.getfixturevalue("plans_file").read_bytes())
    else:
        tables = ", ".join(("tsg_tasks", "tsg_task_events", *metadata.tables))
        engine = sa.create_engine(place, poolclass=sa.NullPool)
        with engine.begin() as connection:
            connection.exec_driver_sql(f"TRUNCATE {tables} RESTART IDENTITY")
    return place


@pytest.fixture
def ledger(request: pytest.FixtureRequest, place: Place, kept: Callable[[str], Kept]) -> Ledger:
    """With the clock that does as it is told."""
    return kept("sqlite" if isinstance(place, Path) else "postgresql").ledger


@pytest.fixture
def plans(ledger: Ledger) -> Iterator[Plans]:
    """With the clock that does as it is told; healthy in the end."""
    made = Plans(ledger)
    yield made
    is_healthy(made)


@pytest.fixture
def live(place: Place) -> Iterator[Plans]:
    """The same with the real time, as commands have it."""
    with Ledger(place) as opened:
        made = Plans(opened)
        yield made
        is_healthy(made)


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    """What a runner has let go of is ended with the test."""
    yield
    for process in commands._let_go:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    commands._let_go.clear()


def is_healthy(plans: Plans) -> None:
    report = plans.doctor()
    assert report["healthy"], report


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not any more."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def chain(plans: Plans, count: int, plan: str = "plan", **fields: Any) -> list[str]:
    """Steps each of which waits for the one before; their keys."""
    keys: list[str] = []
    for _ in range(count):
        keys.append(plans.add_step(plan, subject="Do it", blocked_by=keys[-1:], **fields)["id"])
    return keys


def ask(capfd: pytest.CaptureFixture[str], place: Place, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the answer of a command, in this process, which is faster."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["--db", named(place), *arguments])
    said: dict[str, Any] = json.loads(capfd.readouterr().out)
    return int(left.value.code or 0), said


def refused(capfd: pytest.CaptureFixture[str], place: Place, *arguments: str) -> tuple[int, str]:
    """The exit status of a command that refuses, and the error that it names."""
    status, said = ask(capfd, place, *arguments)
    assert said["ok"] is False
    return status, said["error"]


# -- one transaction of a runner ---------------------------------------------------------------------------


def take_round(
    plans: Plans,
    plan: str = "plan",
    *,
    mine: Collection[str] = (),
    most: int = 1,
    since: float = 0.0,
    by_heartbeat: bool = True,
) -> Round:
    """One round of a runner that is handing over `mine`."""
    return plans._write(
        lambda transaction: dispatch.take_round(
            transaction,
            reading.plan_row(transaction.connection, plan, "own"),
            mine=mine,
            most=most,
            since=since,
            by_heartbeat=by_heartbeat,
        )
    )


def dispatched(plans: Plans, plan: str = "plan") -> Errand:
    """The one errand of a round."""
    (errand,) = take_round(plans, plan).errands
    return errand


def undelivered(plans: Plans, plan: str = "plan", *, halt: bool = False) -> Errand:
    """What is dispatched next, and lies in its agent's inbox for that it could not be handed over."""
    errand = dispatched(plans, plan)
    assert put_back(plans, errand, halt=halt)
    return errand


def hand_over(plans: Plans, errand: Errand) -> bool:
    return _on_step(plans, errand, dispatch.hand_over)


def put_back(plans: Plans, errand: Errand, *, halt: bool = False) -> bool:
    return _on_step(plans, errand, partial(dispatch.put_back, halt=halt))


def release(plans: Plans, errand: Errand) -> bool:
    return _on_step(plans, errand, dispatch.release)


def start_over(plans: Plans, plan: str = "plan", *, resume: bool = False) -> bool:
    return plans._write(
        lambda transaction: dispatch.start_over(
            transaction, reading.plan_row(transaction.connection, plan, "own"), resume=resume
        )
    )


def ways(plans: Plans) -> list[dict[str, Any]]:
    """All that is on its way, or in an inbox."""
    query = sa.select(dispatches).order_by(dispatches.c.id)
    return plans._read(lambda transaction: [dict(row._mapping) for row in transaction.connection.execute(query)])


def _on_step(plans: Plans, errand: Errand, do: Callable[..., bool]) -> bool:
    def on(transaction: Any) -> bool:
        plan = reading.plan_row(transaction.connection, errand.plan, "own")
        step = reading.step_row(transaction.connection, plan, errand.step["id"], lock=True)
        return do(transaction, plan, step, errand.attempt)

    return plans._write(on)


# -- whole runs --------------------------------------------------------------------------------------------


class Run:
    """A runner in a thread of its own."""

    def __init__(self, runner: Runner, logs: Logs) -> None:
        self.runner = runner
        self._logs = logs
        self._found: Ended | BaseException | None = None
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        try:
            self._found = self.runner.run()
        except BaseException as error:
            self._found = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def ended(self, seconds: float = 20) -> Ended:
        """How it has ended, waited for that long."""
        self._thread.join(seconds)
        assert self.is_over, "the runner runs on"
        if isinstance(self._found, BaseException):
            raise self._found
        assert self._found is not None
        return self._found

    def close(self) -> None:
        self.runner.stop()
        self._thread.join(30)
        assert self.is_over, "the runner runs on, asked to stop"
        self.runner.close()
        self._logs.close()


Begin = Callable[..., Run]


@pytest.fixture
def begin(place: Place, tmp_path: Path) -> Iterator[Begin]:
    """Start a runner, which is stopped with the test."""
    runs: list[Run] = []

    def begin(plans: Plans, plan: str = "plan", *, command: Sequence[str] | None = WELL, **options: Any) -> Run:
        """With `command` for the agent ``a``, and short intervals."""
        seconds = options.pop("timeout_seconds", 60.0)
        known = [] if command is None else [Agent("a", "A", tuple(command), seconds)]
        logs = Logs(tmp_path / "logs", plan, form="json")
        given = {"agents": Agents(known), "interval_seconds": 0.05, "database": named(place), **options}
        runs.append(Run(Runner(plans, plan, logs=logs, **given), logs))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def is_running(plans: Plans, ledger: Ledger, key: str, plan: str = "plan") -> bool:
    attempt = plans.get(plan, key)["attempt"]
    return attempt is not None and ledger.get_task(attempt).status == "running"


def done(plans: Plans, ledger: Ledger, *keys: str, plan: str = "plan", **said: Any) -> None:
    """Be the agent of these steps: complete each once it was handed over."""
    for key in keys:
        wait_until(lambda key=key: is_running(plans, ledger, key, plan), f"{key} was not handed over", 15)
        plans.complete(plan, key, attempt=plans.get(plan, key)["attempt"], **said)
