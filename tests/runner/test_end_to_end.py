"""A plan of fifteen steps, agents that are processes, and runners that are killed at random moments, over and over."""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.faults.conftest import ROUNDS
from tests.faults.test_kills import wait_until
from tests.runner.end_to_end import (
    AGENTS,
    LEASE_SECONDS,
    TSG,
    Chain,
    Forks,
    agents_file,
    end_what_lives,
    events,
    log,
    require_each_done_once,
    require_ledger_agrees,
    require_sent_again_only_if_not_taken,
    story,
    wait_for_the_end_of,
)
from tests.tallies import Tally
from tests.test_concurrency import Place, named
from tsg import Ledger, Plans
from tsg.runner import entries

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what lives is found in /proc")

STEPS = 15
KINDS = ("steady", "flaky", "slow", "mortal", "hermit")
#: From the start of a mortal's attempt, who dies at once.
MORTAL_SECONDS = 3


#: What has to do with processes and not with the database.
on_a_file = pytest.mark.parametrize("place", ["sqlite"], indirect=True)


@pytest.fixture(scope="module")
def warm_forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def forks(warm_forks: Forks, place: Place) -> Iterator[Forks]:
    yield warm_forks
    warm_forks.end_all()
    end_what_lives(place)


class Crew:
    """Who does the steps of the plan, and the test's hand on them.

    A step is done only once its gate is open; gates are opened as the kills go on, so that these meet all of the plan.
    """

    def __init__(self, plans: Plans, place: Place, forks: Forks, folder: Path) -> None:
        self.place, self.forks, self.folder, self.plans = place, forks, folder, plans
        self.logs = folder / "logs"
        self.output = folder / "output"
        self._taken: list[subprocess.Popen[bytes]] = []
        self._opened = 0
        worker, steady, flaky = AGENTS / "worker.py", AGENTS / "steady.sh", AGENTS / "flaky.sh"
        exec_ = [*TSG, "agent", "exec", "{plan}", "{step}", "--attempt", "{attempt}", "--"]
        commands = {
            "steady": [*exec_, "sh", steady, folder],
            "flaky": ["sh", flaky, folder, sys.executable],
            "slow": [sys.executable, worker, folder, "slow"],
            "mortal": [sys.executable, worker, folder, "mortal"],
        }
        self._by_hand = {
            "flaky": ["sh", flaky, folder, sys.executable, "taken"],
            "hermit": [sys.executable, worker, folder, "taken"],
        }
        self.agents = agents_file(folder, commands)
        plans.create("plan", base_seconds=0, retries=20, timeout_seconds=120)
        for number in range(1, STEPS + 1):
            kind = KINDS[number % len(KINDS)]
            # Two chains, and the last step waits for both.
            before = [number - 2] if 2 < number < STEPS else [number - 1, number - 2] if number == STEPS else []
            timeout = {"timeout_seconds": MORTAL_SECONDS} if kind == "mortal" else {}
            blockers = [f"T-{other:03}" for other in before]
            plans.add_step("plan", subject=f"Do {number}", owner=kind, blocked_by=blockers, **timeout)

    def begin(self) -> int:
        """A new runner; its process."""
        options = ["--agents", self.agents, "--interval", "0.2", "--max-parallel", "3", "--on-undelivered", "wait"]
        options += ["--log-dir", self.logs, "--log-format", "json"]
        words = ["--db", named(self.place), "run", "plan", *map(str, options)]
        return self.forks.start("runner", arguments=words, output=str(self.output))

    def open_gates(self, part: float) -> None:
        """Those of that part of the steps."""
        for number in range(self._opened + 1, int(part * STEPS) + 1):
            (self.folder / f"gate-T-{number:03}").touch()
            self._opened = number

    def look_into_inboxes(self) -> None:
        """Take what lies there, as agents do that come by, and let it be done."""
        for agent, command in self._by_hand.items():
            if not entries(self.plans, agent):
                continue
            status, entry = self.forks.answer("--db", named(self.place), "inbox", "take", agent)
            assert (status, entry["agent_id"], entry["task_name"]) == (0, agent, "plan"), entry
            said = {"TSG_PLAN": "plan", "TSG_STEP": entry["step_id"], "TSG_ATTEMPT": entry["attempt"]}
            said["TSG_DB"] = named(self.place)
            output = open(self.folder / "by_hand", "ab")
            with output:
                self._taken.append(
                    subprocess.Popen(list(map(str, command)), env={**os.environ, **said}, stdout=output, stderr=output)
                )

    def dismiss(self) -> list[int]:
        """How those have ended who took something out of an inbox."""
        return [process.wait(30) for process in self._taken]

    def require_health(self) -> None:
        report = self.plans.doctor()
        assert report["healthy"], report


def test_fifteen_steps_are_done_once_each_though_their_runners_are_killed_at_any_moment(
    live: Plans, place: Place, forks: Forks, tmp_path: Path, tally: Tally, record_property: Any
) -> None:
    """On PostgreSQL three of them work at once."""
    at_once, kills = (3, ROUNDS * 3 // 20) if isinstance(place, sa.URL) else (1, ROUNDS // 6)
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    record_property("seed", seed)
    crew = Crew(live, place, forks, tmp_path)
    with ExitStack() as stack, Ledger(place) as ledger:
        # Nobody waits for a gate any longer than the test does.
        stack.callback(crew.open_gates, 1.0)
        runners = [crew.begin() for _ in range(at_once)]
        # The first agent that is slow to come has not started its attempt when all die that could tell of it.
        wait_until((tmp_path / "sleepy").exists, "the slow agent was not sent for", 30)
        for process in runners:
            assert forks.kill(process) == -9
        runners = [crew.begin() for _ in range(at_once)]
        for number in range(kills):
            chosen = chance.randrange(at_once)
            time.sleep(chance.uniform(*chance.choice([(0, 0.1), (0, 0.5)])))
            status = forks.kill(runners[chosen])
            assert status == -9, f"seed {seed}: a runner left by itself: {crew.output.read_text()}"
            runners[chosen] = crew.begin()
            crew.open_gates(number / kills)
            crew.look_into_inboxes()
            if number % 10 == 0:
                crew.require_health()
        crew.open_gates(1.0)
        until = time.monotonic() + 180
        while live.show("plan")["status"] != "completed":
            assert time.monotonic() < until, f"seed {seed}: {live.steps('plan')}"
            crew.look_into_inboxes()
            time.sleep(0.1)
        assert [forks.wait(process) for process in runners] == [0] * at_once, crew.output.read_text()
        assert set(crew.dismiss()) == {0}
        wait_for_the_end_of(place)
        told = story(tmp_path)
        require_each_done_once(told)
        require_ledger_agrees(live, ledger, "plan", told)
    happened = Counter(line.event for line in told)
    # Each kind has done what it is there for.
    assert (happened["dies"], happened["failed"], happened["succeeded"]) == (3, 3, STEPS - 3), f"seed {seed}"
    again = require_sent_again_only_if_not_taken(crew.logs, told)
    assert again > 0, f"seed {seed}: nothing was to be sent again"
    status, report = forks.answer("--db", named(place), "doctor")
    assert (status, report["healthy"], report["plan_inconsistency_count"]) == (0, True, 0)
    tally(f"a runner of {at_once} killed", kills + at_once, 0)
    tells_the_story(crew.logs, at_once, kills)


def tells_the_story(logs: Path, at_once: int, kills: int) -> None:
    """Whoever reads the logs learns who ran, what was sent to whom, and how each step ended."""
    lines = log(logs)
    told, of_plan = (Counter(map(json.dumps, log(logs, name))) for name in ("daemon.log", "task_plan.log"))
    assert of_plan <= told
    # Who is killed between the two has told of it in the first.
    assert (told - of_plan).total() <= kills + at_once
    ended = [line for line in lines if line["event"] == "run ends"]
    assert [line["outcome"] for line in ended] == ["completed"] * at_once
    assert len({line["pid"] for line in lines if line["event"] == "run begins"}) > len(ended)
    completed = {line["step"] for line in lines if line["event"] == "step completed"}
    assert completed == {f"T-{number:03}" for number in range(1, STEPS + 1)}
    declined = events(logs, "not delivered; in its agent's inbox", "trigger.log")
    assert {line["agent"] for line in declined} >= {"hermit"}
    assert {line["why"] for line in declined} <= {"the agent has no command", "the command failed"}


# -- what a runner leaves behind ---------------------------------------------------------------------------


@pytest.fixture
def run_of_two(live: Plans, place: Place, forks: Forks, tmp_path: Path) -> Chain:
    return Chain(live, place, forks, tmp_path)


def test_b40_an_agent_that_lives_on_is_waited_for_by_the_next_runner_and_what_is_behind_is_not_revived(
    run_of_two: Chain,
) -> None:
    run_of_two.make_for_worker("patient")
    run_of_two.open_gate("T-001")
    first = run_of_two.begin()
    run_of_two.until("begins", "T-002")
    assert run_of_two.forks.kill(first) == -9
    second = run_of_two.begin()
    # Longer than a lease, in which the agent beats and nobody else is asked.
    time.sleep(LEASE_SECONDS + 0.5)
    assert run_of_two.plans.get("plan", "T-001")["status"] == "completed"
    assert len(events(run_of_two.logs, "dispatch")) == 2
    assert run_of_two.plans.get("plan", "T-002")["attempts"] == 1
    run_of_two.open_gate("T-002")
    run_of_two.require_done_once(second)


def test_b42_the_second_of_two_runners_joins_and_does_no_harm(run_of_two: Chain) -> None:
    run_of_two.make_for_worker("patient")
    first = run_of_two.begin()
    run_of_two.until("begins")
    second = run_of_two.begin()
    run_of_two.until_begun(2)
    time.sleep(LEASE_SECONDS + 0.5)
    run_of_two.open_gate("T-001")
    run_of_two.open_gate("T-002")
    run_of_two.require_done_once(first, second)
    assert [line["outcome"] for line in events(run_of_two.logs, "run ends")] == ["completed"] * 2


LAST_NUMBER = Path("/proc/sys/kernel/ns_last_pid")


def bystander_with_number(number: int) -> subprocess.Popen[bytes]:
    """A process of somebody else's that has this number."""
    for _ in range(200):
        try:
            LAST_NUMBER.write_text(str(number - 1))
        except OSError:
            pytest.skip("only root may choose the number of a process")
        process = subprocess.Popen(["sleep", "60"])
        if process.pid == number:
            return process
        process.kill()
        process.wait()
    pytest.skip("others on this machine take every number")


@on_a_file
def test_b42_a_killed_runner_s_leftovers_do_not_stop_the_next_whatever_process_has_its_number_now(
    run_of_two: Chain,
) -> None:
    run_of_two.make_for_worker("patient")
    first = run_of_two.begin()
    run_of_two.until("begins")
    assert run_of_two.forks.kill(first) == -9
    with bystander_with_number(first) as bystander:
        assert {line["pid"] for line in events(run_of_two.logs, "run begins")} == {bystander.pid}
        second = run_of_two.begin()
        run_of_two.until_begun(2)
        run_of_two.open_gate("T-001")
        run_of_two.open_gate("T-002")
        run_of_two.require_done_once(second)
        assert bystander.poll() is None
        bystander.kill()


@on_a_file
def test_the_log_tells_why_a_step_is_tried_again(run_of_two: Chain) -> None:
    """Also where that is found out and tried again in the same moment."""
    run_of_two.make_for_worker("mortal", timeout_seconds=1.5)
    assert run_of_two.forks.wait(run_of_two.begin()) == 0
    lines = events(run_of_two.logs, "dispatch") + log(run_of_two.logs)
    assert {line.get("error") for line in lines if line.get("step") == "T-001"} >= {"timeout"}


# -- inboxes -----------------------------------------------------------------------------------------------


def waiting_for_locks(processes: list[int]) -> set[int]:
    """Those of some processes that wait for a file's lock."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return {int(words[5]) for words in lines if words[1:3] == ["->", "FLOCK"]} & set(processes)


@pytest.mark.parametrize(("place", "waiting"), [("sqlite", 1), ("postgresql", 3)], indirect=["place"])
def test_a_hundred_takers_at_once_get_each_entry_once(
    live: Plans, place: Place, forks: Forks, tmp_path: Path, waiting: int
) -> None:
    """Each plan's runner stops, since there is no command; what it leaves is there once, however often it is run."""
    names = [f"plan-{number}" for number in range(waiting)]
    for name in names:
        live.create(name, agent="a")
        live.add_step(name, subject="Do it")
    for _ in range(2):
        for name in names:
            status, said = forks.answer("--db", named(place), "run", name, "--log-dir", tmp_path / "logs")
            assert (status, said["outcome"]) == (1, "failed")
        assert [errand.plan for errand in entries(live, "a")] == names
    gate, output = tmp_path / "gate", tmp_path / "output"
    words = ["--db", named(place), "inbox", "take", "a"]
    with open(gate, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        takers = [forks.start("gated", arguments=words, output=str(output), gate=str(gate)) for _ in range(100)]
        # All of them wait for it before any may take.
        wait_until(lambda: len(waiting_for_locks(takers)) == 100, "a taker did not come", 30)
    ended = Counter(forks.wait(process) for process in takers)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert ended == {0: waiting, 1: 100 - waiting}, Counter(map(str, answers))
    taken = [answer for answer in answers if answer["ok"]]
    assert sorted(answer["task_name"] for answer in taken) == names
    assert [answer for answer in answers if not answer["ok"]] == [{"error": "InboxEmpty", "ok": False}] * (
        100 - waiting
    )
    assert entries(live, "a") == []
    for answer in taken:
        live.complete(answer["task_name"], answer["step_id"], attempt=answer["attempt"])
    # A success where nothing is failed any more sets the plan free.
    assert {plan["status"] for plan in live.plans()} == {"completed"}


# -- reports -----------------------------------------------------------------------------------------------


def report(forks: Forks, place: Place, attempt: str, *words: str) -> tuple[int, dict[str, Any]]:
    return forks.answer("--db", named(place), "step", "complete", "plan", "T-001", *words, "--attempt", attempt)


def begun(plans: Plans, place: Place, **settings: Any) -> str:
    """The token of a step that its agent is at work at."""
    plans.create("plan", agent="a", base_seconds=0, **settings)
    plans.add_step("plan", subject="Do it")
    found = plans.start("plan", "T-001")["attempt"]
    assert found is not None
    return found


CONFLICT = (2, {"error": "StateConflict", "ok": False})


@pytest.mark.parametrize("outcome", ["success", "failed"])
def test_the_same_report_from_many_at_once_and_again_is_taken_once(
    live: Plans, place: Place, forks: Forks, tmp_path: Path, outcome: str
) -> None:
    attempt = begun(live, place, retries=1)
    words = ["--db", named(place), "step", "complete", "plan", "T-001", outcome, "--attempt", attempt]
    processes = [forks.start("command", arguments=words, output=str(tmp_path / "output")) for _ in range(10)]
    assert {forks.wait(process) for process in processes} == {0}, (tmp_path / "output").read_text()
    step = live.get("plan", "T-001")
    assert (step["attempts"], step["status"]) == (1, "completed" if outcome == "success" else "pending")
    if outcome == "failed":
        # Also once a retry has begun.
        live.start("plan", "T-001")
    assert report(forks, place, attempt, outcome)[0] == 0
    assert live.get("plan", "T-001")["status"] == ("completed" if outcome == "success" else "in_progress")


def test_contradicting_reports_at_once_one_is_taken_and_the_others_are_refused(
    live: Plans, place: Place, forks: Forks, tmp_path: Path
) -> None:
    attempt = begun(live, place, retries=0)
    started = []
    for outcome in ["success", "failed"] * 6:
        words = ["--db", named(place), "step", "complete", "plan", "T-001", outcome, "--attempt", attempt]
        started.append((outcome, forks.start("command", arguments=words, output=str(tmp_path / "output"))))
    ended = {(outcome, forks.wait(process)) for outcome, process in started}
    won = {outcome for outcome, status in ended if status == 0}
    assert len(won) == 1
    (winner,) = won
    loser = "failed" if winner == "success" else "success"
    assert ended == {(winner, 0), (loser, 2)}
    assert report(forks, place, attempt, loser) == CONFLICT
    assert live.get("plan", "T-001")["status"] == ("completed" if winner == "success" else "escalated")


def test_a_late_report_resurrects_nothing(live: Plans, place: Place, forks: Forks) -> None:
    late = begun(live, place, retries=1, timeout_seconds=0.3)
    time.sleep(0.4)
    live.advance("plan")
    for outcome in ("success", "failed"):
        assert report(forks, place, late, outcome) == CONFLICT
    again = live.start("plan", "T-001")["attempt"]
    assert again not in (None, late)
    assert report(forks, place, late, "success") == CONFLICT
    assert live.get("plan", "T-001")["attempt"] == again
    assert report(forks, place, str(again), "success")[0] == 0
    assert report(forks, place, late, "success") == CONFLICT
    assert report(forks, place, late, "failed") == CONFLICT
    assert live.show("plan")["status"] == "completed"
