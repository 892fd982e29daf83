"""What a success, a failure and a restart make of a plan that was failed: revived, counted, and refused after three."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import DATA, FakeClock, tsg
from tests.runner.conftest import (
    WELL,
    Begin,
    ask,
    chain,
    dispatched,
    done,
    hand_over,
    is_healthy,
    on_sqlite,
    put_back,
    refused,
    start_over,
    take_round,
    undelivered,
    ways,
)
from tsg import Ledger, Plans, StateConflict
from tsg.plan.longtask import import_file
from tsg.runner import inbox
from tsg.runner.loop import Outcome


@pytest.fixture
def plan(plans: Plans) -> Plans:
    """The plan ``plan``, all of it the agent ``a``'s, which fails with a step of it."""
    plans.create("plan", agent="a", retries=0, on_exhausted="fail")
    return plans


def stand(plans: Plans, plan: str = "plan") -> tuple[str, bool, int]:
    view = plans.show(plan)
    return view["status"], view["halted"], view["global_retry"]


def lose(plans: Plans) -> None:
    """Let the next step fail."""
    errand = dispatched(plans)
    plans.fail("plan", errand.step["id"], attempt=errand.attempt, error="no")


# -- a success on a failed plan ----------------------------------------------------------------------------


def test_a_success_sets_a_halted_plan_back_to_pending_three_times_and_is_recorded_the_fourth_time_too(
    plan: Plans,
) -> None:
    chain(plan, 6)
    for number in range(1, 4):
        errand = undelivered(plan, halt=True)
        assert stand(plan) == ("failed", True, number - 1)
        taken = inbox.take(plan, "a")
        assert taken is not None
        assert stand(plan)[0] == "failed"
        step = plan.complete("plan", errand.step["id"], attempt=taken.attempt)
        assert step["notes"] == ["the plan was failed, and goes on"]
        assert stand(plan) == ("pending", False, number)
        is_healthy(plan)
    errand = undelivered(plan, halt=True)
    step = plan.complete("plan", "T-004", attempt=errand.attempt)
    (note,) = step["notes"]
    assert "person" in note
    assert (step["status"], step["unblocked"]) == ("completed", ["T-005"])
    assert stand(plan) == ("failed", True, 3)
    assert take_round(plan, most=9).errands == []
    # Once more the same is a no-op, and counts nothing.
    plan.complete("plan", "T-004", attempt=errand.attempt)
    assert stand(plan) == ("failed", True, 3)


def test_the_last_success_completes_a_halted_plan_whatever_the_count(plan: Plans, ledger: Ledger) -> None:
    chain(plan, 4)
    for _ in range(3):
        errand = undelivered(plan, halt=True)
        plan.complete("plan", errand.step["id"], attempt=errand.attempt)
    errand = undelivered(plan, halt=True)
    assert "notes" not in plan.complete("plan", "T-004", attempt=errand.attempt)
    assert stand(plan) == ("completed", False, 3)
    assert ledger.get_task(plan.show("plan")["root"]).status == "succeeded"


@pytest.mark.parametrize("on_exhausted", ["fail", "escalate"])
def test_with_a_failed_or_escalated_step_left_the_plan_stays_failed(plans: Plans, on_exhausted: str) -> None:
    plans.create("plan", agent="a", retries=0, on_exhausted=on_exhausted)
    for _ in range(3):
        plans.add_step("plan", subject="Do it")
    lost, errand = take_round(plans, most=2).errands
    put_back(plans, errand, halt=True)
    plans.fail("plan", lost.step["id"], attempt=lost.attempt)
    step = plans.complete("plan", errand.step["id"], attempt=errand.attempt)
    assert step["status"] == "completed"
    assert stand(plans) == ("failed", True, 0)


def test_a_partial_step_does_not_keep_a_plan_failed(plan: Plans, clock: FakeClock) -> None:
    plan.add_step("plan", subject="Be partial", partial_ok=True, timeout_seconds=10)
    plan.add_step("plan", subject="Do it")
    partial, errand = take_round(plan, most=2).errands
    plan.heartbeat(partial.attempt, output="half")
    put_back(plan, errand, halt=True)
    clock.advance(10)
    assert take_round(plan).awaiting == 1
    plan.complete("plan", "T-002", attempt=errand.attempt)
    assert stand(plan) == ("pending", False, 1)


def test_a_failure_on_a_halted_plan_revives_nothing(plan: Plans) -> None:
    chain(plan, 2, retries=1, base_seconds=0)
    errand = undelivered(plan, halt=True)
    plan.fail("plan", "T-001", attempt=errand.attempt)
    assert stand(plan) == ("failed", True, 0)
    assert plan.get("plan", "T-001")["status"] == "pending"


def test_a_success_by_somebody_s_decision_does_not_count_as_the_agent_s(plan: Plans) -> None:
    for _ in range(3):
        plan.add_step("plan", subject="Do it")
    lost, errand = take_round(plan, most=2).errands
    put_back(plan, errand, halt=True)
    plan.fail("plan", lost.step["id"], attempt=lost.attempt)
    plan.decide("plan", lost.step["id"], "complete")
    assert stand(plan) == ("failed", True, 0)


def test_what_revived_a_plan_is_pending_until_its_next_step_is_taken(plan: Plans) -> None:
    chain(plan, 2)
    plan.complete("plan", "T-001", attempt=undelivered(plan, halt=True).attempt)
    assert stand(plan)[0] == "pending"
    dispatched(plan)
    assert stand(plan) == ("running", False, 1)


def test_a_plan_revived_with_another_step_at_work_is_consistent_to_the_end(plan: Plans) -> None:
    for _ in range(3):
        plan.add_step("plan", subject="Do it")
    errands = take_round(plan, most=3).errands
    put_back(plan, errands[0], halt=True)
    hand_over(plan, errands[1])
    for errand in errands:
        plan.complete("plan", errand.step["id"], attempt=errand.attempt)
        is_healthy(plan)
    assert stand(plan) == ("completed", False, 1)


# -- reports -----------------------------------------------------------------------------------------------


def test_the_same_report_again_is_a_no_op_and_a_contradicting_one_is_refused(plan: Plans) -> None:
    chain(plan, 2)
    attempt = dispatched(plan).attempt
    plan.complete("plan", "T-001", attempt=attempt)
    again = dispatched(plan)
    assert plan.complete("plan", "T-001", attempt=attempt)["status"] == "completed"
    with pytest.raises(StateConflict):
        plan.fail("plan", "T-001", attempt=attempt, error="no")
    with pytest.raises(StateConflict):
        plan.complete("plan", "T-002", attempt=attempt)
    assert plan.get("plan", "T-002")["attempt"] == again.attempt


def test_a_late_success_resurrects_nothing(plan: Plans, clock: FakeClock) -> None:
    chain(plan, 2, timeout_seconds=10)
    errand = dispatched(plan)
    hand_over(plan, errand)
    clock.advance(10)
    take_round(plan)
    assert plan.get("plan", "T-001")["error"] == "timeout"
    assert stand(plan) == ("failed", False, 0)
    with pytest.raises(StateConflict):
        plan.complete("plan", "T-001", attempt=errand.attempt)
    assert plan.get("plan", "T-001")["status"] == "failed"
    assert stand(plan) == ("failed", False, 0)


# -- starting over -----------------------------------------------------------------------------------------


def test_a_failed_plan_is_started_over_three_times_and_then_only_by_a_person_s_word(plan: Plans) -> None:
    chain(plan, 3, retries=1, base_seconds=0)
    plan.complete("plan", "T-001", attempt=dispatched(plan).attempt)
    for number in range(1, 4):
        lose(plan)
        assert stand(plan)[0] == "running"
        lose(plan)
        assert stand(plan) == ("failed", False, number - 1)
        assert start_over(plan)
        assert stand(plan) == ("running", False, number)
        steps = plan.steps("plan", all=True)
        assert [step["status"] for step in steps] == ["completed", "pending", "pending"]
        is_healthy(plan)
    for _ in range(2):
        lose(plan)
    before = (plan.show("plan"), plan.steps("plan", all=True))
    for _ in range(2):
        assert not start_over(plan)
        assert (plan.show("plan"), plan.steps("plan", all=True)) == before
    assert start_over(plan, resume=True)
    assert stand(plan) == ("running", False, 0)
    # With a fresh count: one more failure does not fail it.
    lose(plan)
    assert stand(plan)[0] == "running"


def test_a_plan_that_is_not_failed_is_let_be_and_counts_nothing(plan: Plans) -> None:
    chain(plan, 2)
    assert start_over(plan)
    assert stand(plan) == ("pending", False, 0)
    errand = dispatched(plan)
    before = (plan.show("plan"), plan.steps("plan"), ways(plan))
    assert start_over(plan)
    assert (plan.show("plan"), plan.steps("plan"), ways(plan)) == before
    hand_over(plan, errand)
    assert start_over(plan)
    assert stand(plan) == ("running", False, 0)


@pytest.mark.parametrize("resume", [True, False])
def test_a_person_s_word_on_a_plan_that_was_revived_leaves_it_consistent(plan: Plans, resume: bool) -> None:
    chain(plan, 3)
    plan.complete("plan", "T-001", attempt=undelivered(plan, halt=True).attempt)
    assert stand(plan) == ("pending", False, 1)
    assert start_over(plan, resume=resume)
    assert plan.show("plan")["global_retry"] == (0 if resume else 1)
    is_healthy(plan)


def test_what_a_halted_plan_could_not_deliver_is_sent_once_more_by_the_same_token(plan: Plans) -> None:
    chain(plan, 2)
    errand = undelivered(plan, halt=True)
    assert start_over(plan)
    assert stand(plan) == ("running", False, 1)
    again = dispatched(plan)
    assert (again.attempt, again.deliveries) == (errand.attempt, 2)
    assert again.step["attempts"] == 1


def test_live_attempts_of_other_branches_survive_a_start_over(plan: Plans) -> None:
    for _ in range(2):
        plan.add_step("plan", subject="Do it")
    lost, lives = take_round(plan, most=2).errands
    hand_over(plan, lives)
    plan.fail("plan", lost.step["id"], attempt=lost.attempt)
    assert stand(plan)[0] == "failed"
    assert start_over(plan)
    assert plan.get("plan", "T-002")["attempt"] == lives.attempt
    assert [errand.step["id"] for errand in take_round(plan, most=2).errands] == ["T-001"]


def test_escalated_and_partial_steps_wait_whatever_is_restarted(plans: Plans, clock: FakeClock) -> None:
    plans.create("plan", agent="a", retries=0)
    plans.add_step("plan", subject="Escalate")
    plans.add_step("plan", subject="Be partial", partial_ok=True, timeout_seconds=10)
    plans.add_step("plan", subject="Be undelivered")
    plans.add_step("plan", subject="Do it")
    escalated, partial, errand = take_round(plans, most=3).errands
    plans.fail("plan", "T-001", attempt=escalated.attempt)
    plans.heartbeat(partial.attempt, output="half")
    clock.advance(10)
    take_round(plans, mine=[errand.attempt])
    put_back(plans, errand, halt=True)
    for resume in (False, True):
        assert start_over(plans, resume=resume)
        statuses = [step["status"] for step in plans.steps("plan")]
        assert statuses[:3] == ["escalated", "partial", "in_progress"]
    # And the rest goes on.
    assert [found.step["id"] for found in take_round(plans, most=2).errands][-1] == "T-004"


def test_a_long_task_that_was_failed_for_a_delivery_goes_on(plans: Plans) -> None:
    import_file(plans, DATA / "longtasks" / "undelivered.json", name="plan")
    assert stand(plans) == ("failed", True, 0)
    assert start_over(plans)
    assert dispatched(plans).step["id"] == "2"
    assert stand(plans) == ("running", False, 1)


@pytest.mark.parametrize("end", ["completed", "cancelled"])
def test_a_closed_plan_stays_closed_whoever_says_otherwise(plan: Plans, end: str) -> None:
    chain(plan, 1)
    if end == "completed":
        plan.complete("plan", "T-001", attempt=dispatched(plan).attempt)
    else:
        plan.cancel_plan("plan")
    before = (plan.show("plan"), plan.steps("plan", all=True))
    assert start_over(plan, resume=True)
    assert take_round(plan, most=9).errands == []
    assert (plan.show("plan"), plan.steps("plan", all=True)) == before


# -- by the runner -----------------------------------------------------------------------------------------


def test_a_run_starts_a_failed_plan_over_and_carries_it_through(plan: Plans, ledger: Ledger, begin: Begin) -> None:
    chain(plan, 3)
    plan.complete("plan", "T-001", attempt=dispatched(plan).attempt)
    lose(plan)
    run = begin(plan)
    done(plan, ledger, "T-002", "T-003")
    assert run.ended().outcome is Outcome.COMPLETED
    assert stand(plan) == ("completed", False, 1)
    assert [step["attempts"] for step in plan.steps("plan", all=True)] == [1, 2, 1]


def test_a_supervisor_that_restarts_the_runner_can_t_retry_for_ever(plan: Plans, ledger: Ledger, begin: Begin) -> None:
    chain(plan, 1)
    outcomes = []
    for _ in range(6):
        run = begin(plan, command=["false"])
        outcomes.append(run.ended().outcome)
    assert outcomes == [Outcome.FAILED] * 4 + [Outcome.EXHAUSTED] * 2
    assert stand(plan) == ("failed", True, 3)
    # The entry lies there all the same, and a person's word is enough.
    assert len(inbox.entries(plan, "a")) == 1
    run = begin(plan, command=WELL, resume=True)
    done(plan, ledger, "T-001")
    assert run.ended().outcome is Outcome.COMPLETED


#: What is left of a plan that cannot go on by itself.
LEFT: dict[str, Callable[[Plans], object]] = {
    "an escalated step": lambda plans: plans.fail("plan", "T-001", attempt=dispatched(plans).attempt),
    "a cancelled dependency": lambda plans: plans.cancel("plan", "T-001"),
    "an unassigned step": lambda plans: plans.update("plan", "T-001", owner=None),
}


@pytest.mark.parametrize("left", LEFT)
def test_a_run_that_is_left_with_what_a_person_must_decide_ends_at_once(plans: Plans, begin: Begin, left: str) -> None:
    plans.create("plan", retries=0)
    chain(plans, 2, owner="a")
    LEFT[left](plans)
    ended = begin(plans).ended()
    assert (ended.outcome, ended.outcome.is_success) == (Outcome.WAITING, False)


@pytest.mark.parametrize("end", ["completed", "cancelled"])
def test_a_run_of_a_closed_plan_ends_at_once(plan: Plans, begin: Begin, end: str) -> None:
    chain(plan, 1)
    if end == "completed":
        plan.complete("plan", "T-001", attempt=dispatched(plan).attempt)
    else:
        plan.cancel_plan("plan")
    assert begin(plan).ended().outcome == end


# -- by the command line -----------------------------------------------------------------------------------


@on_sqlite
def test_the_exit_statuses_of_a_failed_an_exhausted_and_a_resumed_run(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Ledger(place) as ledger:
        plans = Plans(ledger)
        plans.create("plan", agent="a")
        chain(plans, 1)
        found = []
        for arguments in ([], [], [], [], [], ["--resume"]):
            status, said = ask(capfd, place, "run", "plan", *arguments)
            found.append((status, said["error"], said["outcome"], said["plan"]["global_retry"]))
        assert found == [
            (1, "PlanFailed", "failed", 0),
            (1, "PlanFailed", "failed", 1),
            (1, "PlanFailed", "failed", 2),
            (1, "PlanFailed", "failed", 3),
            (1, "PersonNeeded", "exhausted", 3),
            (1, "PlanFailed", "failed", 0),
        ]
        taken = inbox.take(plans, "a")
        assert taken is not None
        plans.complete("plan", "T-001", attempt=taken.attempt)
        ran = tsg("--db", place, "run", "plan")
        assert (ran.returncode, json.loads(ran.stdout)["outcome"]) == (0, "completed")
        is_healthy(plans)


@on_sqlite
@pytest.mark.parametrize("end", ["cancelled", "waiting"])
def test_the_exit_statuses_of_runs_that_come_to_nothing(
    place: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path, end: str
) -> None:
    with Ledger(place) as ledger:
        plans = Plans(ledger)
        plans.create("plan")
        chain(plans, 1)
        if end == "cancelled":
            plans.cancel_plan("plan")
    errors = {"cancelled": "PlanCancelled", "waiting": "PersonNeeded"}
    assert refused(capfd, place, "run", "plan", "--log-dir", str(tmp_path / "logs")) == (1, errors[end])


#: What ``run`` is given, and the error that it refuses that with.
REFUSED = [
    (["nowhere"], "PlanNotFound"),
    (["plan", "--interval", "0"], "InvalidInput"),
    (["plan", "--interval", "soon"], "InvalidInput"),
    (["plan", "--stall-seconds", "-1"], "InvalidInput"),
    (["plan", "--max-parallel", "0"], "InvalidInput"),
    (["plan", "--on-undelivered", "shrug"], "InvalidInput"),
    (["plan", "--agents", "nowhere.json"], "DamagedFile"),
    (["plan", "--theme", "plain"], "InvalidInput"),
    (["plan", "--log-format", "xml"], "InvalidInput"),
    (["plan", "--log-dir", "/dev/null/logs"], "InvalidInput"),
]


@on_sqlite
def test_bad_input_is_refused_with_status_2_and_changes_nothing(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Ledger(place) as ledger:
        plans = Plans(ledger)
        plans.create("plan", agent="a")
        chain(plans, 1)
        for arguments, error in REFUSED:
            assert refused(capfd, place, "run", *arguments) == (2, error)
        assert plans.show("plan")["status"] == "pending"
