"""Whole runs with real commands: what reaches its agent, what does not, how long a runner waits, and when it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conftest import FakeClock, raw
from tests.faults.test_kills import wait_until
from tests.postgresql import SKIP_VARIABLE, Server
from tests.runner.conftest import (
    BADLY,
    WELL,
    Begin,
    Run,
    chain,
    dispatched,
    done,
    hand_over,
    is_alive,
    is_healthy,
    is_running,
    on_sqlite,
    ways,
)
from tests.test_storage import posix
from tsg import InvalidInput, Ledger, PlanNotFound, Plans, StateConflict
from tsg.runner import inbox
from tsg.runner.agents import Agents
from tsg.runner.attending import Attendance
from tsg.runner.logs import Logs
from tsg.runner.loop import Outcome, Runner

pytestmark = posix


@pytest.fixture
def plan(plans: Plans) -> Plans:
    """The plan ``plan``, all of it the agent ``a``'s."""
    plans.create("plan", agent="a", retries=0)
    return plans


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-S", "-c", code, *(str(argument) for argument in arguments)]


def told(folder: Path, name: str = "daemon.log") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs" / name).read_text().splitlines()]


def rounds(clock: FakeClock, run: Run, count: int = 2) -> None:
    """Let a runner look at the time that it is now, and act on it; not where it has left."""
    before = clock.readings
    wait_until(lambda: run.is_over or clock.readings >= before + count, "the runner does not look", 15)


# -- order -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 5])
def test_a_chain_is_carried_through_a_step_at_a_time(plan: Plans, ledger: Ledger, begin: Begin, most: int) -> None:
    keys = chain(plan, 4)
    run = begin(plan, max_parallel=most)
    for key in keys:
        wait_until(lambda key=key: is_running(plan, ledger, key), f"{key} was not handed over", 15)
        assert [step["id"] for step in plan.steps("plan", status="in_progress")] == [key]
        done(plan, ledger, key)
    ended = run.ended()
    assert (ended.outcome, ended.plan["status"]) == (Outcome.COMPLETED, "completed")
    assert [step["attempts"] for step in plan.steps("plan", all=True)] == [1] * 4


def test_b42_several_runners_share_a_graph_and_keep_to_how_many_may_run(
    plan: Plans, ledger: Ledger, begin: Begin
) -> None:
    for _ in range(7):
        plan.add_step("plan", subject="Do it")
    plan.add_step("plan", subject="Come last", blocked_by=[f"T-{number:03d}" for number in range(1, 8)])
    plan.start("plan", "T-007")
    runs = [begin(plan, max_parallel=3) for _ in range(3)]
    most = 0
    wait_until(lambda: len(plan.steps("plan", status="in_progress")) == 3, "nothing was dispatched", 15)
    time.sleep(0.3)
    while not all(run.is_over for run in runs):
        live = plan.steps("plan", status="in_progress")
        most = max(most, len(live))
        for step in live:
            assert step["id"] != "T-008" or len(live) == 1
            if is_running(plan, ledger, step["id"]):
                plan.complete("plan", step["id"], attempt=step["attempt"])
        time.sleep(0.02)
    assert [run.ended().outcome for run in runs] == [Outcome.COMPLETED] * 3
    assert most == 3
    assert [step["attempts"] for step in plan.steps("plan", all=True)] == [1] * 8


# -- what a command is given -------------------------------------------------------------------------------

META = "$(touch hurt) `touch hurt`; touch hurt | & > hurt * ? ~ ' \" \\ {message} %s\n二"


@on_sqlite
def test_a_command_gets_each_value_as_it_is_in_its_arguments_and_its_environment(
    plans: Plans, ledger: Ledger, begin: Begin, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = META.replace("\n", " ")
    plans.create(name, agent="a", session_name=META)
    plans.add_step(name, subject=META, params={"{message}": META})
    code = "import json, os, sys; json.dump([sys.argv[2:], dict(os.environ)], open(sys.argv[1], 'w'))"
    places = ["{agent}", "{agent_name}", "{session}", "{plan}", "{step}", "{attempt}", "{message}", "{params}"]
    run = begin(plans, name, command=[*python(code, tmp_path / "found"), *places, "-x{step}y", "a b", ""])
    done(plans, ledger, "T-001", plan=name)
    run.ended()
    arguments, environment = json.loads((tmp_path / "found").read_text())
    agent, agent_name, session, plan, step, attempt, message, params = arguments[:8]
    assert (agent, agent_name, session, plan, step) == ("a", "A", f"agent:a:{META}", name, "T-001")
    assert arguments[8:] == ["-xT-001y", "a b", ""]
    assert json.loads(params) == {"{message}": META}
    assert message.startswith(f"/new\nStep 1 of 1 of {name}: {META}\n")
    assert attempt in message
    said = {key: environment[f"TSG_{key}"] for key in ("AGENT", "SESSION", "PLAN", "STEP", "ATTEMPT", "PARAMS")}
    assert list(said.values()) == [agent, session, plan, step, attempt, params]
    assert environment["TSG_DB"] == str(place)
    assert environment["PATH"] == os.environ["PATH"]
    assert not (tmp_path / "hurt").exists()


@on_sqlite
def test_the_reset_line_is_left_out_on_request(plan: Plans, ledger: Ledger, begin: Begin, tmp_path: Path) -> None:
    chain(plan, 1)
    code = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    run = begin(plan, command=[*python(code, tmp_path / "found"), "{message}"], reset=False)
    done(plan, ledger, "T-001")
    run.ended()
    assert (tmp_path / "found").read_text().startswith("Step 1 of 1")


# -- undelivered -------------------------------------------------------------------------------------------

#: Commands that hand nothing over, what the log says of them, and the time limit.
UNDELIVERED: dict[str, tuple[list[str] | None, str, float]] = {
    "fails": (list(BADLY), "the command failed", 60),
    "is killed": (["sh", "-c", "kill -9 $$"], "the command failed", 60),
    "is too slow": (["sleep", "60"], "the command took too long", 0.2),
    "ends well, too late": (["sh", "-c", "trap 'exit 0' TERM; sleep 60 & wait"], "the command took too long", 0.3),
    "is not there": (["/no/such/program"], "the command could not be started: FileNotFoundError", 60),
    "may not be run": (["/etc/passwd"], "the command could not be started: PermissionError", 60),
    "is given too much": (["true", "{params}"], "the command could not be started: OSError", 60),
    "is given too much by the environment": (["true"], "the command could not be started: OSError", 60),
    "there is none": (None, "the agent has no command", 60),
}


@on_sqlite
@pytest.mark.parametrize("how", UNDELIVERED)
def test_what_does_not_reach_its_agent_is_in_the_inbox_once_costs_no_retry_and_fails_the_plan(
    plan: Plans, begin: Begin, tmp_path: Path, how: str
) -> None:
    params = {"text": "x" * 400_000} if "too much" in how else {}
    plan.add_step("plan", subject="Do it", params=params)
    command, why, limit = UNDELIVERED[how]
    ended = begin(plan, command=command, timeout_seconds=limit).ended()
    assert (ended.outcome, ended.outcome.is_success) == (Outcome.FAILED, False)
    assert (ended.plan["status"], ended.plan["halted"]) == ("failed", True)
    (entry,) = inbox.entries(plan, "a")
    step = plan.get("plan", "T-001")
    assert (step["status"], step["attempts"], step["attempt"]) == ("in_progress", 1, entry.attempt)
    assert [event["why"] for event in told(tmp_path, "trigger.log") if "why" in event] == [why]


def test_a_runner_that_is_to_wait_goes_on(plan: Plans, ledger: Ledger, begin: Begin, clock: FakeClock) -> None:
    chain(plan, 2)
    run = begin(plan, command=BADLY, on_undelivered="wait", stall_seconds=100)
    for _ in range(2):
        wait_until(lambda: inbox.entries(plan, "a") != [], "it did not get into the inbox", 15)
        # As long as it takes: neither does the attempt time out, nor is that a stall.
        clock.advance(100_000)
        rounds(clock, run)
        assert not run.is_over
        taken = inbox.take(plan, "a")
        assert taken is not None
        assert (taken.step["attempts"], taken.deliveries) == (1, 1)
        plan.complete("plan", taken.step["id"], attempt=taken.attempt)
    assert run.ended().outcome is Outcome.COMPLETED
    assert plan.show("plan")["global_retry"] == 0


@on_sqlite
def test_exit_status_and_time_limit_are_of_no_matter_once_the_attempt_is_started(
    plan: Plans, ledger: Ledger, begin: Begin, tmp_path: Path
) -> None:
    chain(plan, 1)
    code = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(.02)\nsys.exit(3)"
    run = begin(plan, command=python(code, tmp_path / "go on"), timeout_seconds=1.0)
    wait_until(lambda: ways(plan) != [], "it was not dispatched", 15)
    attempt = plan.get("plan", "T-001")["attempt"]
    plan.start("plan", "T-001", attempt=attempt)
    time.sleep(1.5)
    (tmp_path / "go on").touch()
    wait_until(
        lambda: any(event["event"] == "command ended" for event in told(tmp_path, "trigger.log")),
        "the command runs on",
        15,
    )
    assert [event["status"] for event in told(tmp_path, "trigger.log") if "status" in event] == [3]
    assert (plan.get("plan", "T-001")["attempt"], plan.show("plan")["status"]) == (attempt, "running")
    plan.complete("plan", "T-001", attempt=attempt)
    assert run.ended().outcome is Outcome.COMPLETED


@on_sqlite
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux's /proc")
def test_a_command_that_is_not_gentle_is_ended_after_10_seconds_and_nothing_of_it_is_left(
    plan: Plans, begin: Begin, tmp_path: Path
) -> None:
    chain(plan, 1)
    command = ["sh", "-c", 'trap "" TERM; echo $$ > "$0"; while :; do sleep 60; done', str(tmp_path / "pid")]
    began = time.monotonic()
    ended = begin(plan, command=command, timeout_seconds=0.5).ended(30)
    assert ended.outcome is Outcome.FAILED
    assert 10 <= time.monotonic() - began < 20
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert len(inbox.entries(plan, "a")) == 1


@on_sqlite
def test_a_step_that_fails_leaves_other_branches_at_work(plan: Plans, ledger: Ledger, begin: Begin) -> None:
    plans = plan
    plans.create("other", agent="a", retries=0, on_exhausted="fail")
    for _ in range(2):
        plans.add_step("other", subject="Do it")
    run = begin(plans, "other", max_parallel=2)
    for key in ("T-001", "T-002"):
        wait_until(lambda key=key: is_running(plans, ledger, key, "other"), "it was not handed over", 15)
    plans.fail("other", "T-001", error="no")
    assert run.ended().outcome is Outcome.FAILED
    assert is_running(plans, ledger, "T-002", "other")
    assert plans.complete("other", "T-002")["status"] == "completed"


# -- being asked to stop -----------------------------------------------------------------------------------


@on_sqlite
def test_asked_to_stop_it_dispatches_nothing_more_and_lets_what_is_on_its_way_arrive(
    plan: Plans, ledger: Ledger, begin: Begin, tmp_path: Path
) -> None:
    for _ in range(3):
        plan.add_step("plan", subject="Do it")
    run = begin(plan, command=["sh", "-c", 'touch "$0/$TSG_STEP"; sleep 1', str(tmp_path)], max_parallel=2)
    wait_until(lambda: (tmp_path / "T-002").exists(), "nothing was dispatched", 15)
    run.runner.stop()
    ended = run.ended()
    assert (ended.outcome, ended.outcome.is_success) == (Outcome.STOPPED, True)
    assert [is_running(plan, ledger, key) for key in ("T-001", "T-002")] == [True, True]
    assert plan.get("plan", "T-003")["status"] == "pending"
    assert plan.show("plan")["status"] == "running"


@on_sqlite
def test_agents_at_work_outlive_the_runner(plan: Plans, ledger: Ledger, begin: Begin, tmp_path: Path) -> None:
    chain(plan, 1)
    run = begin(plan, command=["sh", "-c", 'echo $$ > "$0"; exec sleep 60', str(tmp_path / "pid")])
    wait_until((tmp_path / "pid").exists, "nothing was dispatched", 15)
    plan.start("plan", "T-001")
    began = time.monotonic()
    run.runner.stop()
    assert run.ended().outcome is Outcome.STOPPED
    assert time.monotonic() - began < 5
    os.kill(int((tmp_path / "pid").read_text()), 0)
    assert is_running(plan, ledger, "T-001")


@on_sqlite
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_with_exit_0(place: Path, tmp_path: Path, number: signal.Signals) -> None:
    with Ledger(place) as ledger:
        plans = Plans(ledger)
        plans.create("plan", agent="a")
        chain(plans, 1)
        command = [sys.executable, "-m", "tsg", "--db", str(place), "run", "plan", "--on-undelivered", "wait"]
        process = subprocess.Popen(
            [*command, "--log-dir", str(tmp_path / "logs")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        wait_until(lambda: inbox.entries(plans, "a") != [], "nothing was dispatched", 30)
        process.send_signal(number)
        out, err = process.communicate(timeout=15)
        said = json.loads(out)
        assert (process.returncode, err, said["ok"], said["outcome"]) == (0, b"", True, "stopped")
        assert len(inbox.entries(plans, "a")) == 1
        is_healthy(plans)


# -- how long it sleeps ------------------------------------------------------------------------------------


@on_sqlite
@pytest.mark.parametrize("due", ["a retry", "a deadline", "a command that ends"])
def test_it_sleeps_until_the_next_retry_deadline_or_end_of_a_command_however_long_the_interval(
    live: Plans, begin: Begin, place: Path, due: str
) -> None:
    seconds = 1.0
    live.create("plan", agent="a", timeout_seconds=seconds if due == "a deadline" else 600, on_exhausted="fail")
    retries = 1 if due == "a retry" else 0
    live.add_step("plan", subject="Do it", retries=retries, base_seconds=seconds)
    fails = [sys.executable, "-m", "tsg", "step", "complete", "{plan}", "{step}", "failed", "--error", "no"]
    began = time.monotonic()
    ended = begin(live, command=WELL if due == "a deadline" else fails, interval_seconds=600).ended(50)
    assert ended.outcome is Outcome.FAILED
    assert time.monotonic() - began >= (0 if due == "a command that ends" else seconds)
    step = live.get("plan", "T-001")
    assert (step["attempts"], step["error"]) == (retries + 1, "timeout" if due == "a deadline" else "no")


@on_sqlite
def test_otherwise_it_looks_once_an_interval(plan: Plans, begin: Begin, clock: FakeClock) -> None:
    chain(plan, 1, timeout_seconds=None)
    plan.start("plan", "T-001")
    begin(plan, interval_seconds=0.5)
    time.sleep(0.3)
    before = clock.readings
    time.sleep(1.6)
    # Each round reads the clock once or twice; a runner that does not sleep does so hundreds of times.
    assert 2 <= clock.readings - before <= 12


# -- stalling ----------------------------------------------------------------------------------------------


@pytest.fixture
def idle(plans: Plans, clock: FakeClock) -> Plans:
    """An old plan with a step that waits for somebody to claim it."""
    plans.create("plan")
    plans.add_step("plan", subject="Be claimed")
    clock.advance(1_000_000)
    return plans


def test_a_run_is_given_up_when_nothing_has_moved_for_so_long_since_it_began(
    idle: Plans, begin: Begin, clock: FakeClock
) -> None:
    run = begin(idle, on_undelivered="wait", stall_seconds=60)
    rounds(clock, run)
    clock.advance(59)
    rounds(clock, run)
    assert not run.is_over
    clock.advance(1)
    ended = run.ended()
    assert (ended.outcome, ended.outcome.is_success) == (Outcome.STALLED, False)


@on_sqlite
def test_the_last_change_counts_where_it_is_later(idle: Plans, begin: Begin, clock: FakeClock) -> None:
    run = begin(idle, on_undelivered="wait", stall_seconds=60)
    rounds(clock, run)
    clock.advance(40)
    idle.update("plan", "T-001", description="more")
    clock.advance(40)
    rounds(clock, run)
    assert not run.is_over
    clock.advance(20)
    assert run.ended().outcome is Outcome.STALLED


@on_sqlite
def test_a_live_attempt_counts_as_movement(idle: Plans, ledger: Ledger, begin: Begin, clock: FakeClock) -> None:
    idle.update("plan", "T-001", timeout_seconds=None)
    started = idle.start("plan", "T-001", agent="b")
    run = begin(idle, on_undelivered="wait", stall_seconds=60)
    for _ in range(4):
        clock.advance(300)
        idle.heartbeat(str(started["attempt"]))
        rounds(clock, run)
    assert not run.is_over
    idle.complete("plan", "T-001")
    assert run.ended().outcome is Outcome.COMPLETED


@on_sqlite
def test_20_minutes_are_the_default(idle: Plans, begin: Begin, clock: FakeClock) -> None:
    run = begin(idle, on_undelivered="wait")
    rounds(clock, run)
    clock.advance(1199)
    rounds(clock, run)
    assert not run.is_over
    clock.advance(1)
    assert run.ended().outcome is Outcome.STALLED


# -- a clock that jumps ------------------------------------------------------------------------------------


def at_work(plans: Plans, ledger: Ledger, **fields: Any) -> str:
    """A step of the agent ``a`` that sends heartbeats, where who is silent for 40 s is gone; its attempt."""
    plans.create("plan", agent="a", retries=0, grace_seconds=40, on_exhausted="fail")
    chain(plans, 1, **fields)
    errand = dispatched(plans)
    hand_over(plans, errand)
    plans.heartbeat(errand.attempt)
    return errand.attempt


def creep(clock: FakeClock, run: Run, seconds: float) -> None:
    """Time passes, and the runner sees it pass."""
    while seconds > 0 and not run.is_over:
        clock.advance(min(9, seconds))
        seconds -= 9
        rounds(clock, run)


def test_after_a_gap_agents_get_one_grace_to_be_heard_of(
    plans: Plans, ledger: Ledger, begin: Begin, clock: FakeClock
) -> None:
    attempt = at_work(plans, ledger, timeout_seconds=None)
    run = begin(plans)
    rounds(clock, run)
    clock.advance(8 * 3600)
    rounds(clock, run)
    creep(clock, run, 36)
    assert ledger.get_task(attempt).status == "running"
    plans.heartbeat(attempt)
    creep(clock, run, 35)
    assert ledger.get_task(attempt).status == "running"
    creep(clock, run, 18)
    # Its silence counts again.
    assert run.ended().outcome is Outcome.FAILED
    assert ledger.get_task(attempt).status == "timed_out"


@on_sqlite
def test_without_a_gap_silence_counts(plans: Plans, ledger: Ledger, begin: Begin, clock: FakeClock) -> None:
    attempt = at_work(plans, ledger, timeout_seconds=None)
    run = begin(plans)
    rounds(clock, run)
    creep(clock, run, 45)
    assert run.ended().outcome is Outcome.FAILED
    assert ledger.get_task(attempt).status == "timed_out"


@on_sqlite
def test_a_gap_makes_no_deadline_later(plans: Plans, ledger: Ledger, begin: Begin, clock: FakeClock) -> None:
    attempt = at_work(plans, ledger, timeout_seconds=3600)
    run = begin(plans)
    rounds(clock, run)
    clock.advance(3600)
    assert run.ended().outcome is Outcome.FAILED
    assert ledger.get_task(attempt).status == "timed_out"
    assert plans.get("plan", "T-001")["error"] == "timeout"


@on_sqlite
def test_a_runner_that_is_stopped_within_that_grace_times_nobody_out(
    plans: Plans, ledger: Ledger, begin: Begin, clock: FakeClock
) -> None:
    attempt = at_work(plans, ledger, timeout_seconds=None)
    run = begin(plans)
    rounds(clock, run)
    clock.advance(8 * 3600)
    rounds(clock, run)
    run.runner.stop()
    assert run.ended().outcome is Outcome.STOPPED
    assert ledger.get_task(attempt).status == "running"


def test_a_clock_that_is_set_back_stops_nothing(plan: Plans, ledger: Ledger, begin: Begin, clock: FakeClock) -> None:
    chain(plan, 3)
    clock.advance(10_000)
    run = begin(plan)
    done(plan, ledger, "T-001")
    wait_until(lambda: is_running(plan, ledger, "T-002"), "T-002 was not handed over", 15)
    clock.advance(-5_000)
    rounds(clock, run)
    assert not run.is_over
    # What was started in the future can't be ended before that.
    clock.advance(5_001)
    done(plan, ledger, "T-002", "T-003")
    assert run.ended().outcome is Outcome.COMPLETED


@on_sqlite
def test_what_happens_after_a_clock_was_set_back_is_told_of_all_the_same(
    plan: Plans, ledger: Ledger, begin: Begin, clock: FakeClock, tmp_path: Path
) -> None:
    plan.add_step("plan", subject="Do it", owner="a")
    plan.add_step("plan", subject="Be cancelled", owner="a")
    clock.advance(10_000)
    run = begin(plan)
    wait_until(lambda: is_running(plan, ledger, "T-001"), "T-001 was not handed over", 15)
    rounds(clock, run)
    clock.advance(-5_000)
    plan.cancel("plan", "T-002")
    rounds(clock, run)
    clock.advance(5_001)
    done(plan, ledger, "T-001")
    run.ended()
    found = {(event["event"], event.get("step")) for event in told(tmp_path)}
    assert ("step cancelled", "T-002") in found


# -- a database that refuses for a while -------------------------------------------------------------------


@on_sqlite
def test_a_runner_goes_on_when_a_locked_file_is_free_again(place: Path, begin: Begin, tmp_path: Path) -> None:
    with Ledger(place, busy_timeout_ms=100) as ledger:
        plans = Plans(ledger)
        plans.create("plan", agent="a", retries=0)
        chain(plans, 2)
        run = begin(plans)
        done(plans, ledger, "T-001")
        wait_until(lambda: is_running(plans, ledger, "T-002"), "it was not handed over", 15)
        other = raw(place)
        other.execute("BEGIN IMMEDIATE")
        wait_until(
            lambda: any(event["event"] == "the database refuses" for event in told(tmp_path)), "nobody is refused", 15
        )
        assert not run.is_over
        other.execute("COMMIT")
        other.close()
        done(plans, ledger, "T-002")
        assert run.ended().outcome is Outcome.COMPLETED
        is_healthy(plans)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One of the tests' own, to be stopped."""
    if os.environ.get(SKIP_VARIABLE):
        pytest.skip(f"{SKIP_VARIABLE} is set")
    started = Server()
    started.start()
    yield started
    started.remove()


@pytest.fixture
def served(server: Server) -> Iterator[Plans]:
    """The plan ``plan`` on a server that will stop."""
    with Ledger(sa.make_url(server.url)) as ledger:
        plans = Plans(ledger)
        plans.create("plan", agent="a", retries=0, timeout_seconds=600)
        chain(plans, 2)
        yield plans
        is_healthy(plans)
        plans.remove("plan")


def again(do: Callable[[], Any]) -> Any:
    """As who asks once more after a connection was lost."""
    for _ in range(50):
        try:
            return do()
        except StateConflict:
            time.sleep(0.1)
    return do()


def test_a_runner_outlives_a_server_that_restarts(served: Plans, server: Server, tmp_path: Path) -> None:
    ended: list[Any] = []
    with (
        Logs(tmp_path / "logs", "plan", form="json") as logs,
        Runner(served, "plan", database=server.url, interval_seconds=0.1, on_undelivered="wait", logs=logs) as runner,
    ):
        thread = threading.Thread(target=lambda: ended.append(runner.run()))
        thread.start()
        try:
            wait_until(lambda: inbox.entries(served, "a") != [], "nothing was dispatched", 15)
            server.stop()
            wait_until(
                lambda: any(event["event"] == "the database refuses" for event in told(tmp_path)),
                "nobody is refused",
                15,
            )
            server.start()
            for key in ("T-001", "T-002"):
                taken = None
                until = time.monotonic() + 20
                while taken is None and time.monotonic() < until:
                    taken = again(lambda: inbox.take(served, "a"))
                    time.sleep(0.05)
                assert taken is not None
                assert taken.step["id"] == key
                served.complete("plan", key, attempt=taken.attempt)
            thread.join(20)
        finally:
            runner.stop()
            thread.join(30)
    assert [each.outcome for each in ended] == [Outcome.COMPLETED]


@pytest.mark.parametrize("when", ["while the program runs", "as it ends"])
def test_a_program_that_is_attended_to_outlives_a_server_that_restarts(
    served: Plans, server: Server, tmp_path: Path, when: str
) -> None:
    interval = 0.2 if when == "while the program runs" else 60
    script = 'touch "$0/begun"; while ! test -e "$0/end"; do sleep 0.05; done'
    attendance = Attendance(
        served, "plan", "T-001", ["sh", "-c", script, str(tmp_path)], database="/db", interval_seconds=interval
    )
    found: list[Any] = []

    def attend() -> None:
        try:
            found.append(attendance.run())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=attend)
    thread.start()
    wait_until((tmp_path / "begun").exists, "it did not begin", 15)
    server.stop()
    if when == "as it ends":
        (tmp_path / "end").touch()
    time.sleep(1)
    server.start()
    time.sleep(0.5)
    (tmp_path / "end").touch()
    thread.join(30)
    step = again(lambda: served.get("plan", "T-001"))
    assert (step["status"], found[0].is_success) == ("completed", True)


# -- what is refused ---------------------------------------------------------------------------------------


MALFORMED: list[dict[str, Any]] = [
    {"interval_seconds": 0},
    {"interval_seconds": -1},
    {"interval_seconds": float("nan")},
    {"interval_seconds": "soon"},
    {"max_parallel": 0},
    {"max_parallel": 1.5},
    {"on_undelivered": "shrug"},
    {"on_undelivered": None},
    {"resume": "yes"},
    {"stall_seconds": -1},
    {"reset": 1.5},
    {"agents": {}},
    {"logs": "here"},
    {"database": None},
    {"plan": ""},
]


@on_sqlite
def test_a_runner_refuses_what_is_malformed(plan: Plans) -> None:
    for options in MALFORMED:
        given: dict[str, Any] = {"plan": "plan", "database": "/db", **options}
        with pytest.raises(InvalidInput):
            Runner(plan, **given)


@on_sqlite
def test_a_plan_that_is_not_there_or_is_removed_meanwhile_is_said_so(plan: Plans, ledger: Ledger, begin: Begin) -> None:
    with pytest.raises(PlanNotFound):
        begin(plan, "nowhere").ended()
    chain(plan, 1)
    run = begin(plan, agents=Agents(), on_undelivered="wait")
    wait_until(lambda: inbox.entries(plan, "a") != [], "nothing was dispatched", 15)
    plan.remove("plan")
    with pytest.raises(PlanNotFound):
        run.ended()
    assert ways(plan) == []
