"""An agent's inbox: one entry a queued attempt, for one taker, and nothing stale in it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conftest import FakeClock, tsg
from tests.runner.conftest import (
    ask,
    chain,
    dispatched,
    is_healthy,
    on_sqlite,
    put_back,
    refused,
    start_over,
    take_round,
    undelivered,
    ways,
)
from tests.test_concurrency import Place, named, processes
from tests.test_storage import posix
from tsg import InvalidInput, Ledger, Plans, StateConflict
from tsg.runner import inbox
from tsg.runner.message import Errand

FIELDS = {
    "agent_id",
    "session",
    "task_name",
    "task_id",
    "step_id",
    "step_name",
    "attempt",
    "params",
    "message",
    "timestamp",
}


@pytest.fixture
def plan(plans: Plans) -> Plans:
    """The plan ``plan``, all of it the agent ``a``'s."""
    plans.create("plan", agent="a", retries=0)
    return plans


# -- nothing stale -----------------------------------------------------------------------------------------


def close_and_advance(plans: Plans, ledger: Ledger, attempt: str) -> None:
    ledger.close_task(attempt, "succeeded", code="worker_completed")
    plans.advance("plan")


#: Whatever starts or closes an attempt.
ENDS: dict[str, Callable[[Plans, Ledger, str], object]] = {
    "start": lambda plans, _, attempt: plans.start("plan", "T-001", attempt=attempt),
    "heartbeat": lambda plans, _, attempt: plans.heartbeat(attempt),
    "complete": lambda plans, _, attempt: plans.complete("plan", "T-001", attempt=attempt),
    "complete, by a person": lambda plans, *_: plans.complete("plan", "T-001"),
    "fail": lambda plans, _, attempt: plans.fail("plan", "T-001", attempt=attempt),
    "cancel": lambda plans, *_: plans.cancel("plan", "T-001"),
    "delete": lambda plans, *_: plans.delete("plan", "T-001"),
    "cancel_plan": lambda plans, *_: plans.cancel_plan("plan"),
    "remove": lambda plans, *_: plans.remove("plan"),
    "tsg start": lambda _, ledger, attempt: ledger.start_task(attempt),
    "tsg close": lambda _, ledger, attempt: ledger.close_task(attempt, "cancelled", code="caller_cancelled"),
    "tsg close, and advance": close_and_advance,
}
BEHIND_ITS_BACK = {"tsg start", "tsg close"}


@pytest.mark.parametrize("end", ENDS)
def test_whatever_starts_or_closes_the_attempt_leaves_nothing_to_be_taken(
    plan: Plans, ledger: Ledger, clock: FakeClock, end: str
) -> None:
    chain(plan, 1)
    errand = undelivered(plan, halt=True)
    clock.advance(1)
    ENDS[end](plan, ledger, errand.attempt)
    assert inbox.entries(plan, "a") == []
    assert inbox.take(plan, "a") is None
    # In that transaction; what is done behind the plan's back is seen through, and gone with the attempt.
    assert len(ways(plan)) == (end in BEHIND_ITS_BACK)
    assert not put_back(plan, errand, halt=True) if end != "remove" else True
    assert inbox.entries(plan, "a") == []
    if end in BEHIND_ITS_BACK:
        if end == "tsg start":
            plan.complete("plan", "T-001", attempt=errand.attempt)
        plan.advance("plan")
        assert ways(plan) == []


def test_a_step_that_changes_hands_leaves_nothing_with_who_had_it(plan: Plans) -> None:
    chain(plan, 1, fallback_agent="b")
    errand = undelivered(plan)
    plan.fail("plan", "T-001", attempt=errand.attempt)
    assert inbox.entries(plan, "a") == []
    again = undelivered(plan)
    assert [entry.attempt for entry in inbox.entries(plan, "b")] == [again.attempt]
    assert inbox.entries(plan, "a") == []
    plan.fail("plan", "T-001", attempt=again.attempt)
    plan.decide("plan", "T-001", "reassign", to="c")
    assert (inbox.take(plan, "a"), inbox.take(plan, "b")) == (None, None)
    third = undelivered(plan)
    taken = inbox.take(plan, "c")
    assert taken is not None
    assert (taken.attempt, taken.session) == (third.attempt, "agent:c:main")


def test_who_has_an_entry_can_t_lose_it_to_another_owner(plan: Plans) -> None:
    chain(plan, 1)
    undelivered(plan)
    with pytest.raises(StateConflict):
        plan.update("plan", "T-001", owner="b")
    with pytest.raises(StateConflict):
        plan.start("plan", "T-001", agent="b")
    assert len(inbox.entries(plan, "a")) == 1


def test_an_entry_is_there_once_however_often_it_is_sent_and_put_back(plan: Plans) -> None:
    chain(plan, 1)
    errand = undelivered(plan, halt=True)
    for number in range(2, 5):
        assert start_over(plan, resume=True)
        again = dispatched(plan)
        assert (again.attempt, again.deliveries) == (errand.attempt, number)
        # It stays where it can be taken meanwhile.
        assert len(inbox.entries(plan, "a")) == 1
        assert put_back(plan, again, halt=True)
        assert len(inbox.entries(plan, "a")) == 1
    assert plan.get("plan", "T-001")["attempts"] == 1


# -- taking ------------------------------------------------------------------------------------------------


def test_the_oldest_is_taken_first_and_only_by_its_agent(plans: Plans, clock: FakeClock) -> None:
    for name, agent in (("late", "a"), ("early", "a"), ("other", "b")):
        plans.create(name, agent=agent)
        plans.add_step(name, subject="Do it")
    errands: dict[str, Errand] = {name: dispatched(plans, name) for name in ("late", "early", "other")}
    for name in ("other", "early", "late"):
        clock.advance(1)
        put_back(plans, errands[name])
    assert [entry.plan for entry in inbox.entries(plans, "a")] == ["early", "late"]
    assert inbox.take(plans, "nobody") is None
    taken = [inbox.take(plans, "a") for _ in range(3)]
    assert [entry and entry.plan for entry in taken] == ["early", "late", None]
    assert [entry.plan for entry in inbox.entries(plans, "b")] == ["other"]


def test_taking_starts_the_attempt_and_hands_over_what_was_learned(
    plan: Plans, ledger: Ledger, clock: FakeClock
) -> None:
    chain(plan, 2, params={"topic": "茶"})
    plan.complete("plan", "T-001", attempt=dispatched(plan).attempt, learnings=["Look twice"])
    errand = undelivered(plan)
    since = clock.now
    clock.advance(1000)
    (entry,) = inbox.entries(plan, "a")
    assert ledger.get_task(errand.attempt).status == "queued"
    taken = inbox.take(plan, "a")
    assert taken is not None
    assert taken.step["session_id"] == "a-2"
    assert taken.step["learnings"] == entry.step["learnings"] == ["Look twice"]
    assert (taken.attempt, taken.place, taken.total, taken.inbox_at) == (errand.attempt, 2, 2, since)
    task = ledger.get_task(errand.attempt)
    assert (task.status, task.deadline_at) == ("running", clock.now + 120)
    assert inbox.take(plan, "a") is None
    plan.complete("plan", "T-002", attempt=taken.attempt)
    assert plan.show("plan")["status"] == "completed"


@on_sqlite
@pytest.mark.parametrize("agent", ["", " a", "a\n", "x" * 201, None, 7])
def test_what_is_no_agent_s_name_is_refused(plans: Plans, agent: Any) -> None:
    for look in (inbox.take, inbox.entries):
        with pytest.raises(InvalidInput):
            look(plans, agent)


def test_whoever_keeps_a_page_is_told_of_what_was_taken(ledger: Ledger) -> None:
    told: list[str] = []
    plans = Plans(ledger, on_change=lambda _, name: told.append(name))
    plans.create("plan", agent="a")
    chain(plans, 1)
    undelivered(plans)
    told.clear()
    assert inbox.take(plans, "a") is not None
    assert inbox.take(plans, "a") is None
    assert told == ["plan"]


# -- many at once ------------------------------------------------------------------------------------------

TAKERS = """
from tsg import Plans
from tsg.runner import inbox

def go(target, index, barrier, rounds):
    won = []
    with Ledger(target, busy_timeout_ms=60_000) as ledger:
        plans = Plans(ledger)
        inbox.entries(plans, "a")
        for number in range(rounds):
            barrier.wait()
            taken = inbox.take(plans, f"a{number}")
            won.append(None if taken is None else taken.attempt)
            barrier.wait()
    return won
"""


def filled(place: Place, *owners: str) -> list[str]:
    """An entry for each of these agents; their attempts, the oldest first."""
    with Ledger(place) as ledger:
        plans = Plans(ledger)
        plans.create("plan", timeout_seconds=3600)
        for owner in owners:
            plans.add_step("plan", subject="Be taken once", owner=owner)
        errands = take_round(plans, most=len(owners)).errands
        for errand in errands:
            put_back(plans, errand)
    return [errand.attempt for errand in errands]


def all_run(place: Place, attempts: list[str]) -> None:
    with Ledger(place) as ledger:
        assert {ledger.get_task(attempt).status for attempt in attempts} == {"running"}
        plans = Plans(ledger)
        assert inbox.entries(plans, "a") == []
        is_healthy(plans)


@posix
def test_of_eight_processes_that_take_at_once_each_entry_goes_to_one(place: Place) -> None:
    attempts = filled(place, *(f"a{number}" for number in range(5)))
    won = processes(place, 8, TAKERS, 5)
    for number, attempt in enumerate(attempts):
        assert [answers[number] for answers in won if answers[number] is not None] == [attempt]
    all_run(place, attempts)


def test_of_a_hundred_that_take_at_once_one_gets_the_entry(place: Place) -> None:
    (attempt,) = filled(place, "a")
    with Ledger(place, busy_timeout_ms=60_000) as ledger, ThreadPoolExecutor(100) as pool:
        plans = Plans(ledger)
        found = list(pool.map(lambda _: inbox.take(plans, "a"), range(100)))
    assert [taken.attempt for taken in found if taken is not None] == [attempt]
    all_run(place, [attempt])


def test_of_a_hundred_that_take_from_a_full_inbox_each_gets_another_entry(place: Place) -> None:
    attempts = filled(place, *["a"] * 20)
    with Ledger(place, busy_timeout_ms=60_000) as ledger, ThreadPoolExecutor(25) as pool:
        plans = Plans(ledger)
        found = list(pool.map(lambda _: inbox.take(plans, "a"), range(100)))
    taken = [entry.attempt for entry in found if entry is not None]
    assert sorted(taken) == sorted(attempts)
    all_run(place, attempts)


# -- by the command line -----------------------------------------------------------------------------------


def test_the_command_line_takes_the_oldest_as_json_and_says_when_there_is_none(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    with Ledger(place) as ledger:
        plans = Plans(ledger)
        plans.create("plan", agent="a", description="A whole")
        plans.add_step("plan", subject="Do 茶", params={"topic": "茶"})
        before = time.time()
        errand = undelivered(plans, halt=True)
        root = plans.show("plan")["root"]
    status, listed = ask(capfd, place, "inbox", "list", "a")
    assert status == 0
    (entry,) = listed["entries"]
    ran = tsg("--db", named(place), "inbox", "take", "a")
    assert (ran.returncode, ran.stderr) == (0, b"")
    said = json.loads(ran.stdout)
    assert said.pop("ok") is True
    assert said == entry
    assert set(said) == FIELDS
    assert before <= said.pop("timestamp") <= time.time()
    text = said.pop("message")
    assert text.startswith("/new\n")
    assert errand.attempt in text
    assert said == {
        "agent_id": "a",
        "session": "agent:a:main",
        "task_name": "plan",
        "task_id": root,
        "step_id": "T-001",
        "step_name": "Do 茶",
        "attempt": errand.attempt,
        "params": {"topic": "茶"},
    }
    again = tsg("--db", named(place), "inbox", "take", "a")
    assert (again.returncode, again.stdout) == (1, b'{"error":"InboxEmpty","ok":false}\n')
    assert ask(capfd, place, "inbox", "list", "a") == (0, {"ok": True, "entries": []})


@on_sqlite
def test_the_message_of_what_is_taken_leaves_the_reset_out_on_request(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    filled(place, "a")
    _, said = ask(capfd, place, "inbox", "take", "a", "--no-reset")
    assert said["message"].startswith("Step 1 of 1 of plan")


@on_sqlite
@pytest.mark.parametrize("arguments", [["take", " a"], ["take"], ["take", "a", "b"], ["give", "a"], []])
def test_what_is_malformed_is_refused(place: Path, capfd: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert refused(capfd, place, "inbox", *arguments) == (2, "InvalidInput")


@on_sqlite
def test_of_five_commands_that_take_at_once_one_gets_the_entry(place: Path) -> None:
    (attempt,) = filled(place, "a")
    command = [sys.executable, "-m", "tsg", "--db", str(place), "inbox", "take", "a"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(5)]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in started]
    assert sorted(process.returncode for process in started) == [0] + [1] * 4
    assert [answer["attempt"] for answer in answers if answer["ok"]] == [attempt]
    all_run(place, [attempt])


def test_an_application_s_own_connection_sees_no_entry_without_its_attempt(
    plan: Plans, engine: sa.Engine, ledger: Ledger
) -> None:
    """What a rolled-back taking leaves is what there was."""
    chain(plan, 1)
    errand = undelivered(plan)
    with engine.connect() as connection:
        transaction = connection.begin()
        taken = inbox.take(Plans.within(connection, clock=lambda: 2000.0), "a")
        assert taken is not None
        transaction.rollback()
    assert ledger.get_task(errand.attempt).status == "queued"
    assert len(inbox.entries(plan, "a")) == 1
