"""Any program as an agent: its attempt is started, vouched for, and ended as its exit status says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FakeClock, raw, tsg
from tests.faults.test_kills import wait_until
from tests.runner.conftest import (
    WELL,
    ask,
    chain,
    dispatched,
    is_alive,
    is_healthy,
    on_sqlite,
    put_back,
    refused,
    undelivered,
    ways,
)
from tests.test_concurrency import Place, named
from tests.test_storage import posix
from tsg import InvalidInput, Ledger, PlanNotFound, Plans, StateConflict
from tsg.runner import inbox
from tsg.runner.attending import Attendance

pytestmark = posix


def attend(plans: Plans, command: Any, key: str = "T-001", **options: Any) -> Attendance:
    return Attendance(plans, "plan", key, command, **{"database": "/db", **options})


def sh(script: str, *arguments: object) -> list[str]:
    return ["sh", "-c", script, *(str(argument) for argument in arguments)]


@pytest.fixture
def plan(plans: Plans) -> Plans:
    """The plan ``plan`` of the agent ``a``, with a step."""
    plans.create("plan", agent="a", retries=0)
    chain(plans, 1, params={"topic": "茶"})
    return plans


@pytest.fixture
def brisk(live: Plans) -> Plans:
    """The same in real time, where agents that are silent for 2 s are gone."""
    live.create("plan", agent="a", retries=0, grace_seconds=2)
    chain(live, 1)
    return live


# -- starting, and reporting -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "status", "outcome", "error"),
    [
        (WELL, 0, "completed", None),
        (["false"], 1, "escalated", "exit status 1"),
        (sh("exit 137"), 137, "escalated", "exit status 137"),
        (sh("kill -9 $$"), -9, "escalated", "ended by signal 9"),
    ],
)
def test_a_step_is_started_and_reported_by_the_exit_status(
    plan: Plans, command: list[str], status: int, outcome: str, error: str | None
) -> None:
    attended = attend(plan, command).run()
    step = plan.get("plan", "T-001")
    assert (attended.status, attended.step) == (status, step)
    assert (step["status"], step["error"], step["owner"], step["session_id"]) == (outcome, error, "a", "a-1")
    assert attended.is_success == (status == 0)


@pytest.mark.parametrize("way", ["dispatched", "in the inbox"])
@pytest.mark.parametrize("by_token", [True, False])
def test_a_queued_attempt_is_joined(plan: Plans, ledger: Ledger, clock: FakeClock, way: str, by_token: bool) -> None:
    errand = dispatched(plan) if way == "dispatched" else undelivered(plan, halt=True)
    clock.advance(7)
    attended = attend(plan, WELL, attempt=errand.attempt if by_token else None).run()
    assert attended.is_success
    task = ledger.get_task(errand.attempt)
    assert (task.status, task.started_at) == ("succeeded", clock.now)
    assert plan.get("plan", "T-001")["attempts"] == 1
    assert (ways(plan), inbox.entries(plan, "a")) == ([], [])


@on_sqlite
def test_an_attempt_that_somebody_has_started_is_left_to_them_and_nothing_is_run(plan: Plans, tmp_path: Path) -> None:
    errand = dispatched(plan)
    plan.start("plan", "T-001", attempt=errand.attempt)
    for attempt in (errand.attempt, None, "99999999-9999-4999-8999-999999999999"):
        with pytest.raises(StateConflict):
            attend(plan, sh('touch "$0"', tmp_path / "hurt"), attempt=attempt).run()
    assert not (tmp_path / "hurt").exists()
    assert plan.get("plan", "T-001")["attempt"] == errand.attempt


@on_sqlite
@pytest.mark.parametrize(
    ("fields", "agent", "expected"),
    [({}, None, "a"), ({"owner": "b"}, None, "b"), ({}, "c", "c"), ({"owner": "b"}, "b", "b")],
)
def test_a_step_s_owner_goes_before_the_plan_s_agent(
    plans: Plans, fields: dict[str, Any], agent: str | None, expected: str
) -> None:
    plans.create("plan", agent="a", session_name="night")
    chain(plans, 1, **fields)
    assert attend(plans, sh(f'test "$TSG_SESSION" = agent:{expected}:night'), agent=agent).run().is_success
    assert plans.get("plan", "T-001")["owner"] == expected


@on_sqlite
def test_another_agent_s_step_is_refused(plans: Plans) -> None:
    plans.create("plan")
    chain(plans, 1, owner="b")
    with pytest.raises(StateConflict):
        attend(plans, WELL, agent="c").run()
    assert plans.get("plan", "T-001")["status"] == "pending"


@on_sqlite
def test_the_program_finds_in_its_environment_what_it_is_to_do(plan: Plans, tmp_path: Path) -> None:
    errand = dispatched(plan)
    code = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    found = tmp_path / "found"
    assert attend(plan, [sys.executable, "-c", code, str(found)], attempt=errand.attempt).run().is_success
    said = json.loads(found.read_text())
    own = ("TSG_TEST", "TSG_TESTS")
    assert said["PATH"] == os.environ["PATH"]
    assert {name: value for name, value in said.items() if name[:4] == "TSG_" and not name.startswith(own)} == {
        "TSG_AGENT": "a",
        "TSG_SESSION": "agent:a:main",
        "TSG_PLAN": "plan",
        "TSG_STEP": "T-001",
        "TSG_ATTEMPT": errand.attempt,
        "TSG_PARAMS": '{"topic":"\\u8336"}',
        "TSG_DB": "/db",
    }


@on_sqlite
def test_where_there_is_no_such_program_nothing_is_changed(plan: Plans) -> None:
    before = (plan.show("plan"), plan.steps("plan"))
    nowhere: list[Any] = [["/no/such/program"], ["no-such-program", "x"], ["/etc/passwd"], ["/"], [], "true", [""]]
    for command in nowhere:
        with pytest.raises(InvalidInput):
            attend(plan, command).run()
    assert (plan.show("plan"), plan.steps("plan")) == before


@on_sqlite
def test_a_program_that_can_t_be_started_after_all_fails_the_attempt(plan: Plans) -> None:
    with pytest.raises(InvalidInput):
        attend(plan, ["true", "x" * 500_000]).run()
    step = plan.get("plan", "T-001")
    assert (step["status"], step["error"]) == ("escalated", "could not be started: OSError")


@on_sqlite
def test_what_is_malformed_is_refused(plan: Plans) -> None:
    for options in ({"attempt": "token"}, {"agent": " a"}, {"database": None}, {"interval_seconds": "soon"}):
        with pytest.raises(InvalidInput):
            attend(plan, WELL, **options)
    with pytest.raises(PlanNotFound):
        Attendance(plan, "nowhere", "T-001", WELL, database="/db")


# -- vouching ----------------------------------------------------------------------------------------------


@on_sqlite
@pytest.mark.parametrize(
    ("interval", "is_refused"), [(300, False), (300.001, True), (600, True), (0, True), (-1, True)]
)
def test_b11_an_interval_above_half_of_the_grace_is_refused(plan: Plans, interval: float, is_refused: bool) -> None:
    if not is_refused:
        assert attend(plan, WELL, interval_seconds=interval).run().is_success
        return
    with pytest.raises(InvalidInput):
        attend(plan, WELL, interval_seconds=interval)
    assert plan.get("plan", "T-001")["status"] == "pending"


@on_sqlite
def test_a_program_that_runs_longer_than_the_grace_is_vouched_for(brisk: Plans, ledger: Ledger) -> None:
    over = threading.Event()
    beats: set[float] = set()

    def watch() -> None:
        while not over.wait(0.05):
            brisk.advance("plan")
            attempt = brisk.get("plan", "T-001")["attempt"]
            if attempt is not None:
                beats.add(ledger.get_task(attempt).updated_at)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        attended = attend(brisk, ["sleep", "3.4"]).run()
    finally:
        over.set()
        watcher.join()
    assert attended.is_success
    assert brisk.get("plan", "T-001")["attempts"] == 1
    # Every quarter of the grace, beginning at once: 7 in 3.4 s, and never in bursts.
    assert 5 <= len(beats) <= 9
    ordered = sorted(beats)
    assert all(later - earlier > 0.3 for earlier, later in zip(ordered[1:], ordered[2:], strict=False))


def pids(folder: Path, count: int) -> list[int]:
    def are_there() -> bool:
        return len([entry for entry in folder.iterdir() if entry.read_text().strip()]) == count

    wait_until(are_there, "the program did not begin", 15)
    return [int(entry.read_text()) for entry in folder.iterdir()]


#: Programs with a child, by who of the two does not end when asked to.
FAMILIES = {
    "both end": 'sh -c \'echo $$ > "$0/child"; exec sleep 60\' "$0" & echo $$ > "$0/parent"; wait',
    "nobody ends": 'trap "" TERM; sh -c \'echo $$ > "$0/child"; sleep 60; sleep 60\' "$0" & '
    'echo $$ > "$0/parent"; while :; do sleep 60; done',
    "the child does not": 'sh -c \'trap "" TERM; echo $$ > "$0/child"; sleep 60; sleep 60\' "$0" & '
    'echo $$ > "$0/parent"; wait',
}


@on_sqlite
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux's /proc")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_refused_beat_ends_the_program_and_its_children_and_reports_nothing(
    brisk: Plans, tmp_path: Path, family: str
) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    attendance = attend(brisk, sh(FAMILIES[family], folder), interval_seconds=0.2)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(attendance.run()))
    thread.start()
    processes: list[int] = []
    try:
        processes = pids(folder, 2)
        assert all(is_alive(pid) for pid in processes)
        brisk.cancel("plan", "T-001")
        began = time.monotonic()
        thread.join(20)
        took = time.monotonic() - began
        assert not thread.is_alive()
        assert found[0].step is None
        assert not found[0].is_success
        assert took < 5 if family == "both end" else took > 9 or family == "the child does not"
        assert brisk.get("plan", "T-001")["status"] == "cancelled"
        wait_until(lambda: not any(is_alive(pid) for pid in processes), "some of them run on", 3)
    finally:
        for pid in processes:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        thread.join(30)


@on_sqlite
def test_a_locked_file_for_a_while_ends_nobody(place: Path) -> None:
    with Ledger(place, busy_timeout_ms=100) as ledger:
        plans = Plans(ledger)
        plans.create("plan", agent="a", retries=0)
        chain(plans, 1)
        attendance = attend(plans, ["sleep", "1.5"], interval_seconds=0.1)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(attendance.run()))
        thread.start()
        wait_until(lambda: plans.get("plan", "T-001")["status"] == "in_progress", "it did not begin", 15)
        other = raw(place)
        other.execute("BEGIN IMMEDIATE")
        time.sleep(2)
        other.execute("COMMIT")
        other.close()
        thread.join(30)
        assert found[0].is_success
        is_healthy(plans)


# -- by the command line -----------------------------------------------------------------------------------


@pytest.fixture
def placed(place: Place) -> Iterator[Plans]:
    with Ledger(place) as ledger:
        plans = Plans(ledger)
        plans.create("plan", agent="a", retries=0)
        chain(plans, 2)
        yield plans
        is_healthy(plans)


def test_the_command_line_reports_by_the_exit_status(
    place: Place, placed: Plans, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = tsg("--db", named(place), "agent", "exec", "plan", "T-001", "--", *WELL)
    assert ran.stderr == b""
    status, said = ran.returncode, json.loads(ran.stdout)
    assert (status, said["ok"], said["status"], said["step"]["status"]) == (0, True, 0, "completed")
    status, said = ask(capfd, place, "agent", "exec", "plan", "T-002", "--", "sh", "-c", "exit 3")
    assert (status, said["error"], said["status"]) == (1, "CommandFailed", 3)
    assert said["step"]["error"] == "exit status 3"


@on_sqlite
def test_the_token_comes_from_the_option_or_the_environment(
    place: Path, placed: Plans, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    errand = dispatched(placed)
    run = ("agent", "exec", "plan")
    monkeypatch.setenv("TSG_ATTEMPT", "99999999-9999-4999-8999-999999999999")
    assert refused(capfd, place, *run, "T-001", "--", "true") == (2, "StateConflict")
    assert ask(capfd, place, *run, "T-001", "--attempt", errand.attempt, "--", "true")[0] == 0
    monkeypatch.setenv("TSG_ATTEMPT", dispatched(placed).attempt)
    assert ask(capfd, place, *run, "T-002", "--", "true")[0] == 0


@on_sqlite
@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "T-001"],
        ["plan", "T-001", "--"],
        ["plan", "T-001", "--", "no-such-program"],
        ["plan", "T-001", "--interval-seconds", "301", "--", "true"],
        ["plan", "T-001", "--attempt", "token", "--", "true"],
    ],
)
def test_what_the_command_line_refuses_changes_nothing(
    place: Path, placed: Plans, capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert refused(capfd, place, "agent", "exec", *arguments) == (2, "InvalidInput")
    assert placed.get("plan", "T-001")["status"] == "pending"


@on_sqlite
@pytest.mark.parametrize(("outcome", "status"), [("success", 0), ("failed", 1)])
def test_a_program_that_reports_itself_first_is_not_contradicted(
    place: Path, placed: Plans, capfd: pytest.CaptureFixture[str], outcome: str, status: int
) -> None:
    own = f'"$0" -m tsg step complete "$TSG_PLAN" "$TSG_STEP" {outcome} >/dev/null; exit {status}'
    found, said = ask(capfd, place, "agent", "exec", "plan", "T-001", "--", "sh", "-c", own, sys.executable)
    assert (found, said["step"]["status"]) == (status, "completed" if status == 0 else "escalated")
    # Its own word stands.
    assert said["step"]["error"] is None


@on_sqlite
def test_an_attempt_that_is_over_before_is_a_state_conflict(place: Path, placed: Plans) -> None:
    command = [sys.executable, "-m", "tsg", "--db", str(place), "agent", "exec", "plan", "T-001"]
    command += ["--interval-seconds", "0.2", "--", "sleep", "60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    wait_until(lambda: placed.get("plan", "T-001")["status"] == "in_progress", "it did not begin", 15)
    placed.cancel("plan", "T-001")
    out, _ = process.communicate(timeout=15)
    assert (process.returncode, json.loads(out)["error"]) == (2, "StateConflict")


@on_sqlite
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_it_ends_the_program_and_reports_the_failure(
    place: Path, placed: Plans, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "tsg", "--db", str(place), "agent", "exec", "plan", "T-001", "--"]
    folder = tmp_path / "pids"
    folder.mkdir()
    process = subprocess.Popen([*command, *sh('echo $$ > "$0/pid"; exec sleep 60', folder)], stdout=subprocess.PIPE)
    (pid,) = pids(folder, 1)
    process.send_signal(number)
    out, _ = process.communicate(timeout=15)
    assert (process.returncode, json.loads(out)["error"]) == (1, "CommandFailed")
    step = placed.get("plan", "T-001")
    assert (step["status"], step["error"]) == ("escalated", "ended by signal 15")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@on_sqlite
def test_what_a_runner_has_sent_twice_is_done_once(place: Path, placed: Plans, tmp_path: Path) -> None:
    errand = dispatched(placed)
    put_back(placed, errand)
    command = [sys.executable, "-m", "tsg", "--db", str(place), "agent", "exec", "plan", "T-001", "--attempt"]
    command += [errand.attempt, "--", *sh('echo x >> "$0"; sleep 1', tmp_path / "done")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for process in both:
        process.communicate(timeout=30)
    assert sorted(process.returncode for process in both) == [0, 2]
    assert (tmp_path / "done").read_text() == "x\n"
