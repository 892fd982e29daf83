"""A runner that is asked to stop, at each point where that can meet it: exit 0, all left true, the next run goes on.

And one whose machine was asleep.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests import debian
from tests.faults.test_kills import wait_until
from tests.runner.conftest import done, ways
from tests.runner.end_to_end import (
    AGENTS,
    agents_file,
    answered,
    end_what_lives,
    events,
    living,
    log,
    running,
    story,
    wait_for_the_end_of,
)
from tests.test_concurrency import Place
from tsg import Ledger, Plans

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a process handles, and what lives, is in /proc")

GENTLE_SECONDS = 10

#: Hands nothing over as long as it is not told to: it waits for a file, and leaves by what is in there.
LINGERS = """
import os, pathlib, signal, sys, time
folder, manner = pathlib.Path(sys.argv[1]), sys.argv[2]
if manner == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if manner == "polite":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
(folder / f"lingers-{os.getpid()}").touch()
until = time.monotonic() + 60
while not (folder / "leave").exists() and time.monotonic() < until:
    time.sleep(0.02)
sys.exit(int((folder / "leave").read_text()))
"""


class Scene:
    """A plan of two steps, one after the other, of an agent whose command does as the test says."""

    def __init__(self, plans: Plans, ledger: Ledger, place: Place, folder: Path) -> None:
        self.plans, self.ledger, self.place, self.folder = plans, ledger, place, folder
        self.logs = folder / "logs"
        plans.create("plan", agent="a", base_seconds=0, timeout_seconds=60)
        for blockers in ([], ["T-001"]):
            plans.add_step("plan", subject="Do it", blocked_by=blockers)

    def lingering(self, manner: str = "usual") -> None:
        self.by([sys.executable, "-S", "-c", LINGERS, str(self.folder), manner])

    def working(self, kind: str) -> None:
        self.by([sys.executable, str(AGENTS / "worker.py"), str(self.folder), kind])

    def by(self, command: list[str]) -> None:
        agents_file(self.folder, {"a": command})

    @contextmanager
    def run(self, *more: str) -> Iterator[subprocess.Popen[str]]:
        options = [*more, "--agents", self.folder / "agents.json", "--log-dir", self.logs, "--log-format", "json"]
        with running(self.place, "run", "plan", *options) as process:
            yield process

    def until_told(self, event: str, times: int = 1) -> None:
        wait_until(lambda: len(events(self.logs, event)) >= times, f"{event} was not told of", 20)

    def until_lingers(self) -> int:
        """The process of the command that was sent."""
        wait_until(lambda: any(self.folder.glob("lingers-*")), "no command came", 20)
        (found,) = self.folder.glob("lingers-*")
        return int(found.name.partition("-")[2])

    def until_at_work(self) -> None:
        wait_until(lambda: any(line.event == "begins" for line in story(self.folder)), "no agent began", 20)

    def leave_by(self, status: int) -> None:
        """End the commands that linger."""
        (self.folder / "half").write_text(str(status))
        (self.folder / "half").rename(self.folder / "leave")

    def require_stopped(self, process: subprocess.Popen[str], within: float = 10) -> dict[str, Any]:
        status, said = answered(process, within)
        assert (status, said["ok"], said["outcome"]) == (0, True, "stopped"), said
        assert events(self.logs, "run ends")[-1]["outcome"] == "stopped"
        return said

    def require_sent_next_time(self) -> None:
        """The lease is over already, no retry was counted, and the next run sends the same token."""
        assert self.plans.show("plan")["status"] == "running"
        (way,) = ways(self.plans)
        assert way["inbox_at"] is None
        assert way["lease_until"] <= time.time()
        step = self.plans.get("plan", "T-001")
        assert (step["status"], step["attempts"], step["attempt"]) == ("in_progress", 1, way["id"])
        assert self.ledger.get_task(way["id"]).status == "queued"
        self.require_the_next_run_goes_on()
        assert [line["deliveries"] for line in events(self.logs, "dispatch") if line["attempt"] == way["id"]] == [1, 2]

    def require_the_next_run_goes_on(self) -> None:
        """At once: a lease is 60 s. Here its agent is the test."""
        self.by(["true"])
        with self.run("--interval", "0.5") as process:
            for step in self.plans.steps("plan"):
                done(self.plans, self.ledger, step["id"])
            status, said = answered(process, 20)
        assert (status, said["outcome"]) == (0, "completed"), said
        assert [step["attempts"] for step in self.plans.steps("plan", all=True)] == [1, 1]
        begun = events(self.logs, "run begins")[-1]["time"]
        assert next(line["time"] for line in events(self.logs, "dispatch") if line["time"] > begun) < begun + 5


@pytest.fixture
def scene(live: Plans, place: Place, tmp_path: Path) -> Iterator[Scene]:
    with Ledger(place) as ledger:
        yield Scene(live, ledger, place, tmp_path)
        end_what_lives(place)


def handles(process: int, number: signal.Signals) -> bool:
    """Whether a process has said what it does on a signal."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


@pytest.mark.parametrize(
    ("place", "number"),
    [("sqlite", signal.SIGTERM), ("sqlite", signal.SIGINT), ("postgresql", signal.SIGTERM)],
    indirect=["place"],
)
def test_asked_to_stop_while_it_starts_a_runner_begins_nothing(scene: Scene, number: signal.Signals) -> None:
    scene.lingering()
    with scene.run() as process:
        wait_until(lambda: handles(process.pid, signal.SIGTERM) and handles(process.pid, signal.SIGINT), "too early")
        process.send_signal(number)
        scene.require_stopped(process)
    assert not events(scene.logs, "dispatch")
    assert [step["attempts"] for step in scene.plans.steps("plan")] == [0, 0]
    scene.require_the_next_run_goes_on()


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_asked_to_stop_while_another_keeps_the_file_a_runner_does_when_it_gets_it(scene: Scene, place: Place) -> None:
    scene.lingering()
    engine = sa.create_engine(f"sqlite:///{place}", poolclass=sa.NullPool)
    with engine.connect() as other, scene.run() as process:
        other.exec_driver_sql("BEGIN IMMEDIATE")
        scene.until_told("run begins")
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        other.rollback()
        scene.require_stopped(process)
    assert not events(scene.logs, "dispatch")
    scene.require_the_next_run_goes_on()


@pytest.mark.parametrize(
    ("place", "manner", "asked"),
    [
        ("sqlite", "usual", [signal.SIGINT]),
        ("postgresql", "polite", [signal.SIGTERM]),
        ("sqlite", "stubborn", [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]),
    ],
    indirect=["place"],
)
def test_a_command_on_its_way_has_ten_seconds_and_is_then_ended_and_sent_by_the_next_run(
    scene: Scene, manner: str, asked: list[signal.Signals]
) -> None:
    """One that does not mind being asked is ended by force; one that leaves well by that has handed nothing over.

    A runner that is asked again meanwhile leaves as if it was asked once.
    """
    scene.lingering(manner)
    with scene.run() as process:
        command = scene.until_lingers()
        begun = time.monotonic()
        for number in asked:
            process.send_signal(number)
            time.sleep(0.3)
        assert process.poll() is None
        scene.require_stopped(process, GENTLE_SECONDS + 8)
        assert time.monotonic() - begun >= GENTLE_SECONDS
    assert command not in living(scene.place)
    scene.require_sent_next_time()


@pytest.mark.parametrize(("place", "status"), [("sqlite", 0), ("postgresql", 0), ("sqlite", 7)], indirect=["place"])
def test_a_command_that_ends_within_the_ten_seconds_is_told_of(scene: Scene, status: int) -> None:
    """Well: its agent has it, and time runs. Badly: nobody knows who ended it, and the next run sends it."""
    scene.lingering()
    with scene.run() as process:
        scene.until_lingers()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        scene.leave_by(status)
        scene.require_stopped(process)
    if status:
        scene.require_sent_next_time()
        return
    step = scene.plans.get("plan", "T-001")
    assert scene.ledger.get_task(step["attempt"]).status == "running"
    assert ways(scene.plans) == []
    scene.plans.complete("plan", "T-001", attempt=step["attempt"])
    scene.require_the_next_run_goes_on()


def test_an_agent_at_work_goes_on_without_the_runner_which_leaves_at_once(scene: Scene) -> None:
    scene.working("patient")
    with scene.run() as process:
        scene.until_at_work()
        process.send_signal(signal.SIGTERM)
        said = scene.require_stopped(process)
    assert said["plan"]["status"] == "running"
    assert living(scene.place)
    assert scene.plans.get("plan", "T-001")["status"] == "in_progress"
    (scene.folder / "gate-T-001").touch()
    wait_until(lambda: scene.plans.get("plan", "T-001")["status"] == "completed", "it did not go on", 15)
    wait_until(lambda: not living(scene.place), "it did not end", 15)
    scene.require_the_next_run_goes_on()


def test_a_supervisor_that_stops_the_runner_with_all_that_is_below_it_does_not_fail_the_plan(scene: Scene) -> None:
    """The command dies of the same signal; that says nothing of its agent."""
    scene.lingering()
    with scene.run() as process:
        command = scene.until_lingers()
        # Both at one moment, as a control group gets it: whatever the runner looks at first, it was asked already.
        process.send_signal(signal.SIGSTOP)
        os.kill(command, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_over(command), "the command lives on")
        process.send_signal(signal.SIGCONT)
        scene.require_stopped(process)
    scene.require_sent_next_time()


def is_over(process: int) -> bool:
    """Whether nothing but its status is left of it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# -- a machine that was asleep -----------------------------------------------------------------------------


class Laptop:
    """A runner and its agents under one clock, which goes on by an hour while none of them does."""

    def __init__(self, plans: Plans, place: Place, folder: Path) -> None:
        self.plans, self.place, self.folder = plans, place, folder
        self.logs, self.clock = folder / "logs", folder / "clock"
        self.set("+0")

    def make(self, **settings: Any) -> None:
        command = [sys.executable, AGENTS / "worker.py", self.folder, "patient"]
        agents_file(self.folder, {"a": command})
        self.plans.create("plan", agent="a", retries=0, **settings)
        self.plans.add_step("plan", subject="Do it")

    def set(self, offset: str) -> None:
        half = self.clock.with_suffix(".half")
        half.write_text(f"{offset}\n")
        half.rename(self.clock)

    def begin(self) -> AbstractContextManager[subprocess.Popen[str]]:
        words = ["--agents", self.folder / "agents.json", "--log-dir", self.logs, "--log-format", "json"]
        # As a sleeping machine has it: what is slept by is a clock that stood still.
        clock = {"FAKETIME_TIMESTAMP_FILE": str(self.clock), "FAKETIME_NO_CACHE": "1", "LD_PRELOAD": preloaded()}
        clock |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}
        return running(self.place, "run", "plan", "--interval", "0.2", *words, env=clock)

    def sleep(self, runner: int, agent: int) -> None:
        """What runs is stopped, and goes on when it is told to."""
        os.kill(agent, signal.SIGSTOP)
        # A machine wakes up as a whole, and whoever has the file goes on with it; here the runner is the first.
        while self.is_kept():
            os.kill(agent, signal.SIGCONT)
            time.sleep(0.05)
            os.kill(agent, signal.SIGSTOP)
        os.kill(runner, signal.SIGSTOP)
        time.sleep(0.3)
        self.set("+1h")

    def is_kept(self) -> bool:
        """Whether somebody does not let go of the file."""
        with closing(sqlite3.connect(str(self.place), timeout=2, isolation_level=None)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return True
            other.execute("ROLLBACK")
            return False

    def until_at_work(self) -> None:
        wait_until(lambda: any(line.event == "begins" for line in story(self.folder)), "no agent began", 20)

    def agent(self) -> int:
        """The process of the one agent."""
        (found,) = living(self.place)
        return found

    def lines_after(self, line: str) -> list[dict[str, Any]]:
        told = log(self.logs)
        return told[[other["event"] for other in told].index(line) :]


def preloaded() -> str:
    """The library that changes clocks."""
    found = subprocess.run(
        [debian.program("faketime"), "-f", "+0", "printenv", "LD_PRELOAD"], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


@pytest.fixture
def laptop(live: Plans, place: Place, tmp_path: Path) -> Iterator[Laptop]:
    yield Laptop(live, place, tmp_path)
    end_what_lives(place)


JUMPED = "the clock has jumped; agents get one grace to be heard of"
on_a_file = pytest.mark.parametrize("place", ["sqlite"], indirect=True)


@on_a_file
def test_an_agent_that_beats_is_not_timed_out_since_the_machine_was_asleep(laptop: Laptop, place: Place) -> None:
    """Before it was asleep, an hour is six times as long as it may be silent."""
    laptop.make(timeout_seconds=None)
    with laptop.begin() as process:
        laptop.until_at_work()
        agent = laptop.agent()
        wait_until(lambda: beats(laptop.plans) > 1, "it does not beat")
        laptop.sleep(process.pid, agent)
        # The runner is the first to be awake, and looks at the plan more than once before its agent is.
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: len(events(laptop.logs, JUMPED)) == 1, "the jump was not noticed")
        time.sleep(1)
        os.kill(agent, signal.SIGCONT)
        (laptop.folder / "gate-T-001").touch()
        status, said = answered(process)
    assert (status, said["outcome"]) == (0, "completed")
    assert laptop.plans.get("plan", "T-001")["attempts"] == 1
    assert len(events(laptop.logs, JUMPED)) == 1


def beats(plans: Plans) -> int:
    attempt = plans.get("plan", "T-001")["attempt"]
    query = sa.text("SELECT version FROM tsg_tasks WHERE id = :id")
    return plans._read(lambda transaction: transaction.connection.execute(query, {"id": attempt}).scalar_one())


@on_a_file
def test_an_agent_that_does_not_wake_up_is_timed_out_after_one_grace(laptop: Laptop, place: Place) -> None:
    grace = 2.0
    laptop.make(timeout_seconds=None, grace_seconds=grace)
    with laptop.begin() as process:
        laptop.until_at_work()
        agent = laptop.agent()
        laptop.sleep(process.pid, agent)
        os.kill(agent, signal.SIGKILL)
        process.send_signal(signal.SIGCONT)
        assert answered(process)[1]["outcome"] == "waiting"
    jumped, *later = laptop.lines_after(JUMPED)
    (over,) = [line for line in later if line["event"] == "step escalated"]
    assert over["error"] == "timeout"
    assert grace <= over["time"] - jumped["time"] < grace + 2


@on_a_file
def test_a_deadline_that_passed_while_the_machine_was_asleep_holds(laptop: Laptop, place: Place) -> None:
    laptop.make(timeout_seconds=1800)
    with laptop.begin() as process:
        laptop.until_at_work()
        agent = laptop.agent()
        laptop.sleep(process.pid, agent)
        process.send_signal(signal.SIGCONT)
        assert answered(process)[1]["outcome"] == "waiting"
        os.kill(agent, signal.SIGCONT)
        wait_for_the_end_of(place)
    jumped, *later = laptop.lines_after(JUMPED)
    (over,) = [line for line in later if line["event"] == "step escalated"]
    assert over["error"] == "timeout"
    assert over["time"] - jumped["time"] < 2
    # The agent wakes up, is refused, and reports nothing.
    assert {line.event for line in story(laptop.folder)} == {"launched", "begins"}
    (output,) = laptop.logs.glob("attempt_*")
    assert "StateConflict" in output.read_text()
