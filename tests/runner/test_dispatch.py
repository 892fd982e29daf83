"""Taking what is ready and handing it over, a transaction at a time: order, how many at once, leases and deadlines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import DATA, FakeClock
from tests.runner.conftest import (
    chain,
    dispatched,
    hand_over,
    on_sqlite,
    put_back,
    release,
    take_round,
    undelivered,
    ways,
)
from tsg import InvalidInput, Ledger, Plans, StateConflict
from tsg.plan.longtask import import_file
from tsg.runner import inbox
from tsg.runner.dispatch import LEASE_SECONDS
from tsg.runner.message import Errand, message


@pytest.fixture
def plan(plans: Plans) -> Plans:
    """The plan ``plan``, all of it the agent ``a``'s."""
    plans.create("plan", agent="a")
    return plans


def keys(errands: list[Errand]) -> list[str]:
    return [errand.step["id"] for errand in errands]


# -- what is taken, and how much of it ---------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 5])
def test_a_chain_is_dispatched_a_step_at_a_time_in_order_however_many_may_run(plan: Plans, most: int) -> None:
    for key in chain(plan, 4):
        (errand,) = take_round(plan, most=most).errands
        assert errand.step["id"] == key
        assert take_round(plan, most=most, mine=[errand.attempt]).errands == []
        hand_over(plan, errand)
        assert take_round(plan, most=most).errands == []
        plan.complete("plan", key, attempt=errand.attempt)
    assert take_round(plan, most=most).status == "completed"


@on_sqlite
@pytest.mark.parametrize("most", [1, 5])
def test_a_long_task_is_dispatched_in_the_order_of_its_file(plans: Plans, most: int) -> None:
    import_file(plans, DATA / "longtasks" / "task_template.json", name="plan")
    for key in ("1", "2"):
        (errand,) = take_round(plans, most=most).errands
        assert (errand.step["id"], errand.agent, errand.session) == (key, "AGENT", "agent:AGENT:main")
        assert errand.task_id == "TASK_ID"
        assert take_round(plans, most=most, mine=[errand.attempt]).errands == []
        plans.complete("plan", key, attempt=errand.attempt)
    assert take_round(plans, most=most).status == "completed"


def test_of_a_graph_as_many_as_may_run_are_dispatched_the_first_steps_first(plan: Plans) -> None:
    for _ in range(5):
        plan.add_step("plan", subject="Do it")
    found = take_round(plan, most=3)
    assert keys(found.errands) == ["T-001", "T-002", "T-003"]
    assert found.live == 3
    plan.complete("plan", "T-002", attempt=found.errands[1].attempt)
    assert keys(take_round(plan, most=3).errands) == ["T-004"]


def test_what_was_begun_by_hand_or_by_another_runner_counts_too(plan: Plans) -> None:
    for _ in range(6):
        plan.add_step("plan", subject="Do it")
    plan.start("plan", "T-005", agent="somebody else")
    plan.open("plan", "T-006")
    assert keys(take_round(plan, most=3).errands) == ["T-001"]
    assert take_round(plan, most=3).errands == []
    assert keys(take_round(plan, most=4).errands) == ["T-002"]


def test_each_step_is_finished_before_what_depends_on_it_starts(plan: Plans) -> None:
    for key in ("T-001", "T-002"):
        assert plan.add_step("plan", subject="Do it")["id"] == key
    plan.add_step("plan", subject="Join", blocked_by=["T-001", "T-002"])
    first, second = take_round(plan, most=9).errands
    plan.complete("plan", "T-001", attempt=first.attempt)
    assert take_round(plan, most=9).errands == []
    plan.complete("plan", "T-002", attempt=second.attempt)
    assert keys(take_round(plan, most=9).errands) == ["T-003"]


def test_b42_a_runner_that_joins_another_resets_nothing(plan: Plans, clock: FakeClock) -> None:
    chain(plan, 2)
    errand = dispatched(plan)
    before = (ways(plan), plan.show("plan"), plan.steps("plan"))
    clock.advance(LEASE_SECONDS / 2)
    assert take_round(plan).errands == []
    assert (ways(plan), plan.show("plan"), plan.steps("plan")) == before
    hand_over(plan, errand)
    before = (ways(plan), plan.show("plan"), plan.steps("plan"))
    assert take_round(plan).errands == []
    assert (ways(plan), plan.show("plan"), plan.steps("plan")) == before


def test_what_rests_in_an_inbox_takes_its_place_taken_or_not(plan: Plans) -> None:
    for _ in range(3):
        plan.add_step("plan", subject="Do it")
    undelivered(plan)
    assert take_round(plan).errands == []
    (second,) = take_round(plan, most=2).errands
    assert second.step["id"] == "T-002"
    assert inbox.take(plan, "a") is not None
    assert take_round(plan, mine=[second.attempt], most=2).errands == []


@pytest.mark.parametrize("way", ["in an inbox", "on its way"])
def test_what_the_ledger_alone_was_told_has_started_takes_its_place(plan: Plans, ledger: Ledger, way: str) -> None:
    for _ in range(2):
        plan.add_step("plan", subject="Do it")
    errand = undelivered(plan) if way == "in an inbox" else dispatched(plan)
    ledger.start_task(errand.attempt)
    assert take_round(plan).errands == []


@on_sqlite
def test_nothing_is_begun_by_a_round_that_may_begin_nothing(plan: Plans) -> None:
    chain(plan, 1)
    found = take_round(plan, most=0)
    assert (found.errands, found.live, found.ready) == ([], 0, 1)
    assert plan.get("plan", "T-001")["status"] == "pending"


def test_what_is_nobody_s_is_not_dispatched_and_is_counted(plans: Plans) -> None:
    plans.create("plan")
    plans.add_step("plan", subject="Be claimed")
    plans.add_step("plan", subject="Be dispatched", owner="b")
    found = take_round(plans, most=9)
    assert keys(found.errands) == ["T-002"]
    assert (found.ready, found.unassigned) == (1, 1)


@on_sqlite
@pytest.mark.parametrize(
    ("of_plan", "of_step", "expected"),
    [
        ({"agent": "a"}, {}, ("a", "agent:a:main")),
        ({"agent": "a", "session_name": "night"}, {}, ("a", "agent:a:night")),
        ({"agent": "a", "session_name": "night"}, {"session_name": "day"}, ("a", "agent:a:day")),
        ({"agent": "a", "session_name": "night"}, {"owner": "b"}, ("b", "agent:b:night")),
        ({"agent": "a"}, {"owner": "b", "session_name": "day"}, ("b", "agent:b:day")),
        ({}, {"owner": "笔笔"}, ("笔笔", "agent:笔笔:main")),
    ],
)
def test_a_step_may_override_the_plan_s_agent_and_session(
    plans: Plans, of_plan: dict[str, str], of_step: dict[str, str], expected: tuple[str, str]
) -> None:
    plans.create("plan", **of_plan)  # type: ignore[arg-type]
    plans.add_step("plan", subject="Do it", **of_step)  # type: ignore[arg-type]
    errand = dispatched(plans)
    assert (errand.agent, errand.session) == expected
    assert plans.get("plan", "T-001")["owner"] == expected[0]


@on_sqlite
def test_place_and_total_leave_out_what_was_deleted(plan: Plans) -> None:
    chain(plan, 4)
    plan.delete("plan", "T-001")
    errand = dispatched(plan)
    assert (errand.step["id"], errand.place, errand.total) == ("T-002", 1, 3)


# -- the lease ---------------------------------------------------------------------------------------------


def test_dispatch_opens_a_queued_attempt_with_a_lease_of_60_seconds_and_without_a_deadline(
    plan: Plans, ledger: Ledger, clock: FakeClock
) -> None:
    chain(plan, 1)
    errand = dispatched(plan)
    assert ways(plan) == [
        {
            "id": errand.attempt,
            "agent": "a",
            "session": "agent:a:main",
            "deliveries": 1,
            "lease_until": clock.now + 60,
            "inbox_at": None,
        }
    ]
    task = ledger.get_task(errand.attempt)
    assert (task.status, task.deadline_at, task.started_at) == ("queued", None, None)
    assert plan.get("plan", "T-001")["status"] == "in_progress"
    assert plan.show("plan")["status"] == "running"


def test_b42_a_killed_runner_s_leftovers_are_sent_again_with_the_same_token_once_the_lease_is_over(
    plan: Plans, clock: FakeClock
) -> None:
    chain(plan, 1)
    errand = dispatched(plan)
    clock.advance(LEASE_SECONDS - 0.001)
    assert take_round(plan).errands == []
    clock.advance(0.001)
    again = dispatched(plan)
    assert (again.attempt, again.deliveries) == (errand.attempt, 2)
    assert again.step["attempts"] == 1
    assert "sent before" in message(again, database="/db")
    assert "sent before" not in message(errand, database="/db")
    # And that has a lease of its own.
    assert take_round(plan).errands == []
    clock.advance(LEASE_SECONDS)
    assert dispatched(plan).deliveries == 3


def test_who_got_it_twice_is_refused_the_second_start(plan: Plans, ledger: Ledger, clock: FakeClock) -> None:
    chain(plan, 1)
    errand = dispatched(plan)
    clock.advance(LEASE_SECONDS)
    again = dispatched(plan)
    plan.start("plan", "T-001", agent="a", attempt=errand.attempt)
    with pytest.raises(StateConflict):
        plan.start("plan", "T-001", agent="a", attempt=again.attempt)
    assert not hand_over(plan, again)
    assert not put_back(plan, again, halt=True)
    assert ledger.get_task(errand.attempt).status == "running"
    assert plan.show("plan")["status"] == "running"


@on_sqlite
def test_a_started_attempt_is_not_sent_again(plan: Plans, clock: FakeClock) -> None:
    chain(plan, 1, timeout_seconds=1000)
    hand_over(plan, dispatched(plan))
    clock.advance(LEASE_SECONDS * 3)
    assert take_round(plan).errands == []
    assert ways(plan) == []


def test_a_lease_is_renewed_as_long_as_its_runner_s_command_runs(plan: Plans, clock: FakeClock) -> None:
    chain(plan, 1)
    errand = dispatched(plan)
    for _ in range(5):
        clock.advance(LEASE_SECONDS - 1)
        assert take_round(plan, mine=[errand.attempt]).errands == []
        assert take_round(plan).errands == []
        assert ways(plan)[0]["lease_until"] == clock.now + LEASE_SECONDS


@on_sqlite
def test_its_own_command_is_not_sent_again_however_late_the_round(plan: Plans, clock: FakeClock) -> None:
    chain(plan, 1)
    errand = dispatched(plan)
    clock.advance(LEASE_SECONDS * 10)
    assert take_round(plan, mine=[errand.attempt]).errands == []
    assert ways(plan)[0]["lease_until"] == clock.now + LEASE_SECONDS


@on_sqlite
@pytest.mark.parametrize("back", [5, 100, 900])
def test_a_clock_that_is_set_back_makes_no_lease_endless(plan: Plans, clock: FakeClock, back: float) -> None:
    chain(plan, 1)
    errand = dispatched(plan)
    clock.advance(-back)
    assert take_round(plan, mine=[errand.attempt]).errands == []
    clock.advance(LEASE_SECONDS)
    assert dispatched(plan).attempt == errand.attempt
    clock.advance(back)


def test_what_is_not_sent_after_all_is_sent_by_the_next_runner_at_once(plan: Plans) -> None:
    chain(plan, 1)
    errand = dispatched(plan)
    assert release(plan, errand)
    again = dispatched(plan)
    assert (again.attempt, again.deliveries) == (errand.attempt, 2)
    hand_over(plan, again)
    assert not release(plan, again)


# -- the deadline ------------------------------------------------------------------------------------------

#: Whatever takes an attempt first.
TAKES: dict[str, Callable[[Plans, Errand], object]] = {
    "exit 0": hand_over,
    "inbox take": lambda plans, errand: (put_back(plans, errand), inbox.take(plans, "a")),
    "start": lambda plans, errand: plans.start("plan", "T-001", attempt=errand.attempt),
    "start, as the agent": lambda plans, errand: plans.start("plan", "T-001", agent="a", attempt=errand.attempt),
    "start, without the token": lambda plans, errand: plans.start("plan", "T-001"),
    "heartbeat": lambda plans, errand: plans.heartbeat(errand.attempt),
    "heartbeat with output": lambda plans, errand: plans.heartbeat(errand.attempt, output="so far"),
}


@on_sqlite
@pytest.mark.parametrize("take", TAKES)
def test_the_deadline_runs_from_when_it_is_taken(plan: Plans, ledger: Ledger, clock: FakeClock, take: str) -> None:
    chain(plan, 1, timeout_seconds=10)
    errand = dispatched(plan)
    clock.advance(59)
    take_round(plan, mine=[errand.attempt])
    assert ledger.get_task(errand.attempt).status == "queued"
    TAKES[take](plan, errand)
    task = ledger.get_task(errand.attempt)
    assert (task.status, task.started_at, task.deadline_at) == ("running", clock.now, clock.now + 10)
    assert plan.get("plan", "T-001")["session_id"] == "a-1"
    assert ways(plan) == []
    clock.advance(9.9)
    assert take_round(plan).changes[-1].status == "in_progress"
    clock.advance(0.1)
    take_round(plan, most=0)
    step = plan.get("plan", "T-001")
    assert (step["status"], step["error"], step["attempts"]) == ("pending", "timeout", 1)


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_report_by_the_token_takes_it_too(plan: Plans, ledger: Ledger, clock: FakeClock, succeeds: bool) -> None:
    chain(plan, 1)
    errand = dispatched(plan)
    clock.advance(5)
    if succeeds:
        plan.complete("plan", "T-001", attempt=errand.attempt)
    else:
        plan.fail("plan", "T-001", attempt=errand.attempt, error="no")
    task = ledger.get_task(errand.attempt)
    assert (task.status, task.started_at) == ("succeeded" if succeeds else "failed", clock.now)
    assert ways(plan) == []
    assert not hand_over(plan, errand)
    assert not put_back(plan, errand, halt=True)
    assert plan.show("plan")["status"] == ("completed" if succeeds else "running")


def test_a_queued_attempt_waits_as_long_as_it_takes(plan: Plans, ledger: Ledger, clock: FakeClock) -> None:
    chain(plan, 1, timeout_seconds=10)
    errand = undelivered(plan)
    clock.advance(10_000_000)
    assert take_round(plan).errands == []
    ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0)
    assert ledger.get_task(errand.attempt).status == "queued"
    taken = inbox.take(plan, "a")
    assert taken is not None
    assert taken.attempt == errand.attempt


def test_one_without_a_deadline_is_silent_from_its_start_on(plans: Plans, ledger: Ledger, clock: FakeClock) -> None:
    plans.create("plan", agent="a", timeout_seconds=0, grace_seconds=100, retries=0)
    chain(plans, 1)
    errand = dispatched(plans)
    clock.advance(1000)
    assert take_round(plans, mine=[errand.attempt]).live == 1
    hand_over(plans, errand)
    clock.advance(99)
    assert take_round(plans).live == 1
    clock.advance(2)
    assert take_round(plans).live == 0
    assert ledger.get_task(errand.attempt).status == "timed_out"


# -- timeouts ----------------------------------------------------------------------------------------------


def long_task(plans: Plans, folder: Path, **fields: object) -> None:
    """The long task ``plan`` of the agent ``a`` with one step."""
    document = {"agent_id": "a", "steps": [{"id": 1, "name": "Do it", "status": "pending"}], "status": "pending"}
    (folder / "plan.json").write_text(json.dumps({**document, **fields}))
    import_file(plans, folder / "plan.json")


@on_sqlite
@pytest.mark.parametrize(
    ("minutes", "environment", "expected"),
    [(None, None, 300), (None, "7.5", 7.5), (2, None, 120), (2, "7.5", 120), (None, "", 300)],
)
def test_the_timeout_of_a_long_task_s_step_is_the_task_s_else_the_environment_s_else_five_minutes(
    plans: Plans,
    ledger: Ledger,
    clock: FakeClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    minutes: float | None,
    environment: str | None,
    expected: float,
) -> None:
    monkeypatch.delenv("TSG_STEP_TIMEOUT", raising=False)
    if environment is not None:
        monkeypatch.setenv("TSG_STEP_TIMEOUT", environment)
    long_task(plans, tmp_path, **({} if minutes is None else {"timeout_minutes": minutes}))
    errand = dispatched(plans)
    clock.advance(30)
    hand_over(plans, errand)
    assert ledger.get_task(errand.attempt).deadline_at == clock.now + expected
    clock.advance(expected)
    found = take_round(plans)
    assert [(change.status, change.error) for change in found.changes] == [("failed", "timeout")]
    # max_retry is 0 unless set, and what is used up fails the task.
    assert (found.status, found.errands) == ("failed", [])


@on_sqlite
def test_a_step_s_own_timeout_goes_before_all(
    plans: Plans, ledger: Ledger, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSG_STEP_TIMEOUT", "7")
    long_task(plans, tmp_path, timeout_minutes=2)
    plans.update("plan", "1", timeout_seconds=33)
    errand = dispatched(plans)
    hand_over(plans, errand)
    assert ledger.get_task(errand.attempt).deadline_at == clock.now + 33


@on_sqlite
@pytest.mark.parametrize("environment", ["0", "-1", "soon", "nan", "inf"])
def test_an_environment_that_names_no_time_is_refused(
    plans: Plans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str
) -> None:
    monkeypatch.setenv("TSG_STEP_TIMEOUT", environment)
    long_task(plans, tmp_path)
    with pytest.raises(InvalidInput):
        take_round(plans)
    assert plans.get("plan", "1")["status"] == "pending"


@on_sqlite
def test_max_retry_tries_a_long_task_s_step_again_at_once(plans: Plans, tmp_path: Path) -> None:
    long_task(plans, tmp_path, max_retry=2)
    for _ in range(3):
        errand = dispatched(plans)
        plans.fail("plan", "1", attempt=errand.attempt, error="no")
    found = take_round(plans)
    assert (found.status, found.errands, found.awaiting) == ("failed", [], 1)


@on_sqlite
def test_the_environment_s_timeout_is_for_long_tasks_alone(
    plan: Plans, ledger: Ledger, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSG_STEP_TIMEOUT", "7")
    chain(plan, 1)
    errand = dispatched(plan)
    hand_over(plan, errand)
    assert ledger.get_task(errand.attempt).deadline_at == clock.now + 120


# -- undelivered -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("halt", [True, False])
def test_what_could_not_be_handed_over_is_in_the_inbox_once_and_costs_no_retry(
    plan: Plans, ledger: Ledger, clock: FakeClock, halt: bool
) -> None:
    chain(plan, 1, retries=0)
    errand = dispatched(plan)
    clock.advance(3)
    assert put_back(plan, errand, halt=halt)
    since = clock.now
    clock.advance(3)
    put_back(plan, errand, halt=halt)
    (way,) = ways(plan)
    assert (way["id"], way["inbox_at"], way["lease_until"]) == (errand.attempt, since, None)
    assert [entry.attempt for entry in inbox.entries(plan, "a")] == [errand.attempt]
    step = plan.get("plan", "T-001")
    assert (step["status"], step["attempts"], step["error"]) == ("in_progress", 1, None)
    view = plan.show("plan")
    assert (view["status"], view["halted"]) == (("failed", True) if halt else ("running", False))
    # In an inbox there is no lease that could run out.
    clock.advance(LEASE_SECONDS * 2)
    assert take_round(plan).errands == []


def test_a_halted_plan_dispatches_nothing_more_and_lets_what_lives_end(plan: Plans) -> None:
    for _ in range(3):
        plan.add_step("plan", subject="Do it")
    first, second = take_round(plan, most=2).errands
    hand_over(plan, first)
    put_back(plan, second, halt=True)
    found = take_round(plan, most=9)
    assert (found.status, found.errands, found.live) == ("failed", [], 2)


def test_a_failed_delivery_of_what_was_sent_twice_leaves_one_entry(plan: Plans, clock: FakeClock) -> None:
    chain(plan, 1)
    errand = dispatched(plan)
    clock.advance(LEASE_SECONDS)
    again = dispatched(plan)
    assert put_back(plan, again)
    put_back(plan, errand)
    assert len(inbox.entries(plan, "a")) == 1


# -- what a round tells ------------------------------------------------------------------------------------


def test_a_round_tells_when_something_is_due_next(plan: Plans, clock: FakeClock) -> None:
    plan.add_step("plan", subject="Retry", retries=3, base_seconds=200, owner="a")
    plan.start("plan", "T-001")
    plan.fail("plan", "T-001")
    assert take_round(plan).next_at == clock.now + 200
    plan.add_step("plan", subject="Time out", timeout_seconds=150)
    errand = dispatched(plan)
    assert take_round(plan, mine=[errand.attempt]).next_at == clock.now + LEASE_SECONDS
    hand_over(plan, errand)
    assert take_round(plan).next_at == clock.now + 150
    plan.heartbeat(errand.attempt)
    assert take_round(plan).next_at == clock.now + 150
    plan.complete("plan", "T-002")
    clock.advance(200)
    assert keys(take_round(plan).errands) == ["T-001"]


@on_sqlite
def test_a_round_tells_when_silence_is_over(plans: Plans, clock: FakeClock) -> None:
    plans.create("plan", agent="a", timeout_seconds=0, grace_seconds=77)
    chain(plans, 1)
    hand_over(plans, dispatched(plans))
    assert take_round(plans).next_at == clock.now + 77


def test_what_can_t_be_acted_on_is_passed_over_and_stops_nothing_else(plan: Plans, clock: FakeClock) -> None:
    for _ in range(2):
        plan.add_step("plan", subject="Do it", timeout_seconds=10)
    first, second = take_round(plan, most=2).errands
    for errand in (first, second):
        hand_over(plan, errand)
    clock.advance(1000)
    plan.heartbeat(first.attempt)
    # The clock is set back to where both are due, and one was heard of in the future.
    clock.advance(-990)
    found = take_round(plan, most=2)
    assert found.passed_over == ["T-001"]
    assert [(change.key, change.status) for change in found.changes] == [("T-001", "in_progress"), ("T-002", "pending")]
    # It does not count as living, so that a run that is left with it stalls.
    assert found.live == 0
    clock.advance(2000)
    assert take_round(plan, most=0).passed_over == []


@on_sqlite
def test_only_what_has_changed_since_is_told_of(plan: Plans, clock: FakeClock) -> None:
    chain(plan, 2)
    first = take_round(plan, since=clock.now + 0.5)
    assert [change.key for change in first.changes] == []
    # What has changed at that very time is told of too: it may have been after the last look.
    assert [change.key for change in take_round(plan, since=clock.now).changes] == ["T-001", "T-002"]
    clock.advance(1)
    plan.complete("plan", "T-001", attempt=first.errands[0].attempt)
    found = take_round(plan, since=clock.now - 1)
    assert [(change.key, change.status) for change in found.changes if change.status == "completed"] == [
        ("T-001", "completed")
    ]
