"""The rules of plans, on either database, to the second; doctor looks at everything after each change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conftest import FakeClock
from tests.test_concurrency import looking
from tsg import InvalidInput, Ledger, LedgerError, PlanNotFound, Plans, StateConflict, StepNotFound, TaskNotFound
from tsg.plan import tables
from tsg.plan.doctor import CHECKS
from tsg.plan.reading import StepView

Place = Path | sa.URL

DAY = 86_400.0
UNKNOWN = "0f8fad5b-d9cb-469f-a165-70867728950e"


class Watched(Plans):
    """Plans that are looked at after each change, and after each refusal; at the end by all of doctor."""

    def look(self) -> None:
        """Each of doctor's questions about plans, without the time that it takes to look at the schema."""
        assert self._ledger is not None
        with_what = self._ledger.read(
            lambda connection, _: {check.name: count for check in CHECKS if (count := check.count(connection))}
        )
        assert with_what == {}

    def assert_healthy(self) -> None:
        report = self.doctor()
        assert report["healthy"], report
        assert report["plan_inconsistency_count"] == 0
        assert report["doctor_error_count"] == 0


def watched(name: str) -> Callable[..., Any]:
    method = getattr(Plans, name)

    def call(self: Watched, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = method(self, *args, **kwargs)
        except LedgerError:
            self.look()
            raise
        self.look()
        return answer

    return call


_PLAN_VERBS = ("create", "advance", "cancel_plan", "remove", "add_step", "update", "claim", "open", "start")
_STEP_VERBS = ("heartbeat", "complete", "fail", "decide", "accept", "cancel", "delete")
for _verb in _PLAN_VERBS + _STEP_VERBS:
    setattr(Watched, _verb, watched(_verb))


@pytest.fixture
def plans(ledger: Ledger) -> Iterator[Watched]:
    watched = Watched(ledger)
    yield watched
    watched.assert_healthy()


def planned(plans: Plans, *subjects: str, **settings: Any) -> None:
    """A plan with one step for each subject, which do not wait for each other."""
    plans.create("p", **settings)
    for subject in subjects or ("Run tests",):
        plans.add_step("p", subject=subject)


def chain(plans: Plans, length: int, **settings: Any) -> None:
    """A plan of steps each of which waits for the one before it."""
    plans.create("p", **settings)
    for number in range(1, length + 1):
        plans.add_step("p", subject="Go on", blocked_by=[f"T-{number - 1:03d}"] if number > 1 else [])


def started(plans: Plans, key: str = "T-001", **options: Any) -> str:
    token = plans.start("p", key, **options)["attempt"]
    assert token is not None
    return token


def status(plans: Plans, key: str = "T-001") -> str:
    return plans.get("p", key)["status"]


def ready(plans: Plans) -> list[str]:
    return [step["id"] for step in plans.advance("p")]


def reconcile(ledger: Ledger, grace: float = 600) -> int:
    """What an operator does, who knows of no plans; how many tasks were timed out by it."""
    return ledger.reconcile(active_grace_seconds=grace, delivery_grace_seconds=600)["tasks_timed_out"]


def ended(ledger: Ledger, token: str) -> tuple[str, str | None, float | None, str, str | None]:
    """How an attempt ended, why, and when; and what became of its delivery, and why."""
    task = ledger.get_task(token)
    return task.status.value, task.terminal_code, task.ended_at, task.delivery_status.value, task.delivery_code


def exhausted(plans: Plans, key: str = "T-001", tries: int = 1) -> None:
    for _ in range(tries):
        plans.fail("p", key, attempt=started(plans, key))


def partial(plans: Plans, clock: FakeClock, key: str = "T-001") -> str:
    """Let a step end with the half of it done; the token of the attempt that did it."""
    token = started(plans, key)
    plans.heartbeat(token, output="the half")
    clock.advance(120)
    plans.advance("p")
    assert status(plans, key) == "partial"
    return token


# -- how a plan stands on the ledger ---------------------------------------------------------------------


def test_the_root_is_queued_as_long_as_the_plan_is_open_and_succeeds_with_the_last_step(
    plans: Plans, ledger: Ledger, clock: FakeClock
) -> None:
    planned(plans, "One", "Two")
    root = plans.show("p")["root"]
    task = ledger.get_task(root)
    assert (task.status, task.parent_id, task.timeout_seconds, task.delivery_required) == ("queued", None, None, False)
    for key in ("T-001", "T-002"):
        clock.advance(3 * DAY)
        assert reconcile(ledger, grace=0) == 0
        assert ledger.get_task(root).status == "queued"
        plans.complete("p", key, attempt=started(plans, key))
    assert ended(ledger, root) == ("succeeded", "completed", clock.now, "not_applicable", "internal_task")
    closed = ledger.get_task(root)
    clock.advance(1)
    plans.complete("p", "T-002")
    plans.advance("p")
    assert ledger.get_task(root) == closed


def test_the_delivery_of_a_result_that_somebody_awaits_is_theirs_to_close(plans: Watched, ledger: Ledger) -> None:
    planned(plans, delivery_required=True)
    root = plans.show("p")["root"]
    assert ledger.get_task(root).delivery_required
    plans.complete("p", "T-001", attempt=started(plans))
    assert ledger.get_task(root).status == "succeeded"
    assert ledger.get_task(root).delivery_status == "pending"
    ledger.set_delivery(root, "delivered")
    plans.assert_healthy()


@pytest.mark.parametrize("way", ["cancel_plan", "remove"])
@pytest.mark.parametrize("open_state", ["pending", "running", "failed"])
def test_the_root_is_cancelled_when_the_plan_is_given_up_or_removed(
    plans: Plans, ledger: Ledger, clock: FakeClock, way: str, open_state: str
) -> None:
    planned(plans, "One", "Two", on_exhausted="fail", retries=0)
    token = None if open_state == "pending" else started(plans)
    if open_state == "failed":
        plans.fail("p", "T-001")
    assert plans.show("p")["status"] == open_state
    root = plans.show("p")["root"]
    clock.advance(7)
    getattr(plans, way)("p")
    assert ended(ledger, root) == ("cancelled", "caller_cancelled", clock.now, "not_applicable", "internal_task")
    if token is not None:
        how = "failed" if open_state == "failed" else "cancelled"
        assert ended(ledger, token)[0] == how
        assert ended(ledger, token)[3:] == ("not_applicable", "internal_task")
    if way == "cancel_plan":
        view = plans.show("p")
        assert (view["status"], view["closed_at"], view["steps"]["cancelled"]) == ("cancelled", clock.now, 2)
        assert plans.cancel_plan("p") == view


def test_an_attempt_is_an_internal_child_of_the_root_whose_deadline_runs_from_the_start(
    plans: Plans, ledger: Ledger, clock: FakeClock
) -> None:
    planned(plans)
    token = plans.open("p", "T-001")["attempt"]
    assert token is not None
    task = ledger.get_task(token)
    assert (task.status, task.parent_id) == ("queued", plans.show("p")["root"])
    assert (task.delivery_required, task.timeout_seconds, task.deadline_at) == (False, 120.0, None)
    assert not task.expects_heartbeat
    # Nobody has taken it yet, and nothing runs out.
    clock.advance(3 * DAY)
    assert ready(plans) == []
    view = plans.start("p", "T-001", attempt=token)
    assert (view["attempt"], view["status"], view["attempts"]) == (token, "in_progress", 1)
    task = ledger.get_task(token)
    assert (task.status, task.started_at, task.deadline_at) == ("running", clock.now, clock.now + 120)
    assert not task.expects_heartbeat
    clock.advance(119.5)
    plans.advance("p")
    assert status(plans) == "in_progress"
    clock.advance(0.5)
    plans.advance("p")
    assert status(plans) == "pending"
    assert ended(ledger, token) == ("timed_out", "deadline_exceeded", clock.now, "not_applicable", "internal_task")


def test_an_attempt_is_silent_until_its_first_heartbeat(plans: Plans, ledger: Ledger, clock: FakeClock) -> None:
    planned(plans, timeout_seconds=10 * DAY)
    token = started(plans)
    clock.advance(3 * DAY)
    assert reconcile(ledger, grace=0) == 0
    assert not ledger.get_task(token).expects_heartbeat
    plans.heartbeat(token)
    assert ledger.get_task(token).expects_heartbeat
    clock.advance(599)
    assert reconcile(ledger) == 0
    clock.advance(1)
    assert reconcile(ledger) == 1
    assert ledger.get_task(token).terminal_code == "restart_stale"


@pytest.mark.parametrize("timeout", [0, None])
def test_without_a_timeout_heartbeats_are_expected_from_the_start(
    plans: Plans, ledger: Ledger, clock: FakeClock, timeout: Any
) -> None:
    plans.create("p", grace_seconds=50)
    assert plans.add_step("p", subject="Watch", timeout_seconds=timeout)["timeout_ms"] is None
    token = started(plans)
    task = ledger.get_task(token)
    assert (task.timeout_seconds, task.deadline_at, task.expects_heartbeat) == (None, None, True)
    clock.advance(49)
    plans.heartbeat(token)
    clock.advance(49)
    plans.advance("p")
    assert status(plans) == "in_progress"
    clock.advance(1)
    plans.advance("p")
    assert status(plans) == "pending"
    assert ended(ledger, token)[:2] == ("timed_out", "restart_stale")


def test_a_silent_task_without_a_timeout_is_refused_by_the_ledger(ledger: Ledger) -> None:
    with pytest.raises(InvalidInput):
        ledger.create_task(expects_heartbeat=False)


def test_an_operator_s_reconcile_leaves_silent_attempts_alone_until_their_deadline(
    plans: Watched, ledger: Ledger, clock: FakeClock
) -> None:
    planned(plans, "One", "Two", timeout_seconds=900)
    first = started(plans)
    clock.advance(1)
    second = started(plans, "T-002")
    clock.advance(898)
    assert reconcile(ledger, grace=0) == 0
    clock.advance(1)
    assert reconcile(ledger, grace=0) == 1
    assert ended(ledger, first)[:3] == ("timed_out", "deadline_exceeded", 1_900.0)
    assert ledger.get_task(second).status == "running"
    # What the plan does not know yet is no contradiction.
    assert status(plans) == "in_progress"
    plans.assert_healthy()
    clock.advance(300)
    plans.advance("p")
    # The time is that of the end, not that at which the plan came to know of it.
    assert plans.get("p", "T-001")["due_at"] == 1_905.0
    assert plans.get("p", "T-001")["ready"]


def test_success_after_the_deadline_but_before_anybody_looked_is_success(
    plans: Plans, ledger: Ledger, clock: FakeClock
) -> None:
    planned(plans)
    token = started(plans)
    clock.advance(3 * DAY)
    assert plans.complete("p", "T-001", attempt=token)["status"] == "completed"
    assert ended(ledger, token) == (
        "succeeded",
        "worker_completed",
        clock.now,
        "not_applicable",
        "internal_task",
    )
    assert reconcile(ledger, grace=0) == 0
    assert ready(plans) == []
    assert status(plans) == "completed"


def test_free_text_is_in_no_row_of_the_ledger(plans: Plans, place: Place) -> None:
    plans.create("secret-name", description="secret-description")
    text = {field: f"secret-{field}" for field in ("subject", "description", "active_form", "thread_id", "owner")}
    plans.add_step("secret-name", **text, params={"a": "secret-parameter"}, metadata={"b": "secret-metadata"})
    plans.add_step("secret-name", subject="secret-two")
    token = plans.start("secret-name", "T-001")["attempt"]
    assert token is not None
    plans.heartbeat(token, output="secret-half")
    plans.complete("secret-name", "T-001", output="secret-output", learnings=["secret-learning"])
    plans.start("secret-name", "T-002", agent="secret-agent")
    plans.fail("secret-name", "T-002", error="secret-error")
    found = {}
    with looking(place) as connection:
        for table in sa.inspect(connection).get_table_names():
            found[table] = repr(connection.execute(sa.text(f"SELECT * FROM {table}")).all())
    assert "secret" not in found["tsg_tasks"]
    assert "secret" not in found["tsg_task_events"]
    everything = "".join(found.values())
    for word in ("name", "subject", "parameter", "metadata", "output", "learning", "agent", "error"):
        assert f"secret-{word}" in everything


def test_a_restart_in_the_middle_loses_nothing(place: Place, clock: FakeClock) -> None:
    def anew(act: Callable[[Plans], Any]) -> Any:
        with Ledger(place, clock=clock) as ledger:
            return act(Watched(ledger))

    anew(lambda plans: chain(plans, 2))
    token = anew(started)
    clock.advance(120)
    assert anew(ready) == []
    assert anew(lambda plans: plans.get("p", "T-001")["due_at"]) == 1_125.0
    clock.advance(5)
    assert anew(lambda plans: plans.claim("p", "hermes")["id"]) == "T-001"
    with pytest.raises(StateConflict):
        anew(lambda plans: plans.complete("p", "T-001", attempt=token))
    assert anew(lambda plans: plans.complete("p", "T-001", learnings=["kept"])["unblocked"]) == ["T-002"]
    assert anew(lambda plans: plans.claim("p", "apollo")["learnings"]) == ["kept"]
    anew(lambda plans: plans.complete("p", "T-002"))
    assert anew(lambda plans: plans.show("p")["status"]) == "completed"


def test_what_is_done_within_a_transaction_of_the_application_s_goes_back_with_it(
    engine: sa.Engine, clock: FakeClock
) -> None:
    with engine.begin() as connection:
        planned(Plans.within(connection, clock=clock))
    with engine.connect() as connection, connection.begin() as transaction:
        inside = Plans.within(connection, clock=clock)
        token = inside.start("p", "T-001")["attempt"]
        with pytest.raises(StateConflict):
            inside.start("p", "T-001")
        assert inside.complete("p", "T-001", attempt=token)["status"] == "completed"
        with pytest.raises(StateConflict, match="transactions of their own"):
            inside.work("p", "T-001")
        transaction.rollback()
    with engine.begin() as connection:
        again = Plans.within(connection, clock=clock)
        assert again.get("p", "T-001")["attempts"] == 0
        assert again.doctor()["healthy"]


# -- fields ----------------------------------------------------------------------------------------------


def test_a_step_that_says_nothing_has_these_fields(plans: Plans) -> None:
    plans.create("p")
    view = plans.add_step("p", subject="Run tests")
    assert view == StepView(
        id="T-001",
        subject="Run tests",
        description=None,
        status="pending",
        activeForm=None,
        blockedBy=[],
        blocks=[],
        owner=None,
        metadata={},
        threadID=None,
        timeout_ms=120_000,
        retry_policy={"count": 3, "backoff": "exponential"},
        fallback_agent=None,
        partial_ok=False,
        session_id=None,
        session_resume=None,
        session_name=None,
        params={},
        output=None,
        error=None,
        ready=True,
        waitingFor=[],
        attempts=0,
        attempt=None,
        learnings=[],
        due_at=None,
    )
    assert plans.get("p", "T-001") == view


def test_a_plan_sets_what_its_steps_leave_out_and_a_step_says_otherwise(plans: Plans) -> None:
    settings: dict[str, Any] = {"timeout_seconds": 30, "retries": 1, "backoff": "fixed", "base_seconds": 2}
    plans.create("p", **settings, cap_seconds=9, fallback_agent="talos", partial_ok=True)
    view = plans.add_step("p", subject="One")
    assert (view["timeout_ms"], view["fallback_agent"], view["partial_ok"]) == (30_000, "talos", True)
    assert view["retry_policy"] == {"count": 1, "backoff": "fixed", "base_seconds": 2.0, "cap_seconds": 9.0}
    view = plans.add_step("p", subject="Two", timeout_seconds=None, retries=5, fallback_agent=None, partial_ok=False)
    assert (view["timeout_ms"], view["fallback_agent"], view["partial_ok"]) == (None, None, False)
    assert view["retry_policy"] == {"count": 5, "backoff": "fixed", "base_seconds": 2.0, "cap_seconds": 9.0}
    view = plans.add_step("p", subject="Three", retry_policy={"count": 0, "backoff": "exponential", "factor": 2})
    assert view["retry_policy"] == {"count": 0, "backoff": "exponential", "factor": 2.0}


def test_each_field_is_updated_by_itself(plans: Plans) -> None:
    planned(plans, "One", "Two")
    given: dict[str, tuple[str, Any, Any]] = {
        "subject": ("subject", "Run all tests", "Run all tests"),
        "description": ("description", "With care\nand time", "With care\nand time"),
        "active_form": ("activeForm", "Running all tests", "Running all tests"),
        "owner": ("owner", "hermes", "hermes"),
        "metadata": ("metadata", {"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
        "params": ("params", {"x": 1.5}, {"x": 1.5}),
        "thread_id": ("threadID", "session-abc", "session-abc"),
        "session_name": ("session_name", "evening", "evening"),
        "session_resume": ("session_resume", "hermes-1", "hermes-1"),
        "timeout_seconds": ("timeout_ms", 1.5, 1_500),
        "retry_policy": ("retry_policy", {"count": 9, "backoff": "fixed"}, {"count": 9, "backoff": "fixed"}),
        "fallback_agent": ("fallback_agent", "talos", "talos"),
        "partial_ok": ("partial_ok", True, True),
        "blocks": ("blocks", ["T-002"], ["T-002"]),
    }
    expected: dict[str, Any] = dict(plans.get("p", "T-001"))
    for field, (shown, value, answer) in given.items():
        expected[shown] = answer
        assert plans.update("p", "T-001", **{field: value}) == expected, field
    assert plans.update("p", "T-001", retries=2)["retry_policy"] == {"count": 2, "backoff": "fixed"}
    assert plans.get("p", "T-002")["blockedBy"] == ["T-001"]


def test_keys_count_up_and_are_never_used_again(plans: Plans) -> None:
    planned(plans, "One", "Two", "Three")
    plans.delete("p", "T-003")
    plans.delete("p", "T-002")
    assert plans.add_step("p", subject="Four")["id"] == "T-004"
    plans.create("q")
    assert plans.add_step("q", subject="One")["id"] == "T-001"
    with pytest.raises(StepNotFound):
        plans.get("p", "T-005")
    with pytest.raises(PlanNotFound):
        plans.get("r", "T-001")


def test_a_plan_s_name_is_taken_once(plans: Plans) -> None:
    planned(plans)
    with pytest.raises(StateConflict):
        plans.create("p")
    plans.remove("p")
    plans.create("p")
    assert plans.steps("p", all=True) == []


# -- lists, and what is ready ----------------------------------------------------------------------------


def test_lists_show_what_is_active_or_all_or_what_fits(plans: Plans) -> None:
    planned(plans, "One", "Two", "Three", "Four", "Five", "Six")
    plans.complete("p", "T-001", attempt=started(plans, "T-001", agent="hermes"))
    plans.cancel("p", "T-002")
    plans.delete("p", "T-003")
    started(plans, "T-004", agent="hermes")
    plans.update("p", "T-005", owner="apollo")
    plans.update("p", "T-006", blocked_by=["T-004"])

    def keys(**filters: Any) -> list[str]:
        return [step["id"] for step in plans.steps("p", **filters)]

    assert keys() == ["T-004", "T-005", "T-006"]
    assert keys(all=True) == ["T-001", "T-002", "T-003", "T-004", "T-005", "T-006"]
    assert keys(status="completed") == ["T-001"]
    assert keys(status="deleted") == ["T-003"]
    assert keys(owner="hermes") == ["T-004"]
    assert keys(owner="hermes", all=True) == ["T-001", "T-004"]
    assert keys(ready=True) == ["T-005"]
    assert keys(ready=False) == ["T-004", "T-006"]
    assert keys(ready=True, owner="hermes") == []
    assert [step["waitingFor"] for step in plans.steps("p", status="pending")] == [[], ["T-004"]]
    view = plans.show("p")
    assert view["ready"] == 1
    assert view["steps"] == {
        "pending": 2,
        "in_progress": 1,
        "completed": 1,
        "failed": 0,
        "partial": 0,
        "escalated": 0,
        "cancelled": 1,
        "deleted": 1,
    }


def test_all_that_is_ready_may_run_at_once_and_the_last_blocker_frees_the_next_in_its_own_transaction(
    plans: Plans,
) -> None:
    """The example of the document: two run at once, a third waits for both, a fourth for that one."""
    plans.create("p")
    plans.add_step("p", subject="Build frontend")
    plans.add_step("p", subject="Build backend")
    plans.add_step("p", subject="Run integration tests", blocked_by=["T-001", "T-002"])
    plans.add_step("p", subject="Deploy", blocked_by=["T-003"])
    assert ready(plans) == ["T-001", "T-002"]
    tokens = {key: started(plans, key) for key in ("T-001", "T-002")}
    with pytest.raises(StateConflict, match="waits for other steps"):
        plans.start("p", "T-003")
    assert "unblocked" not in plans.complete("p", "T-001", attempt=tokens["T-001"])
    assert plans.get("p", "T-003")["waitingFor"] == ["T-002"]
    assert plans.complete("p", "T-002", attempt=tokens["T-002"])["unblocked"] == ["T-003"]
    # Nothing was advanced in between.
    assert plans.get("p", "T-003")["ready"]
    assert not plans.get("p", "T-004")["ready"]
    assert ready(plans) == ["T-003"]


def test_claim_takes_the_lowest_key_that_is_the_agent_s_or_nobody_s(plans: Plans) -> None:
    plans.create("p")
    plans.add_step("p", subject="One", owner="apollo")
    plans.add_step("p", subject="Two")
    plans.add_step("p", subject="Three", owner="hermes")
    plans.add_step("p", subject="Four", blocked_by=["T-001"])
    first = plans.claim("p", "hermes")
    assert first is not None
    assert (first["id"], first["owner"], first["status"]) == ("T-002", "hermes", "in_progress")
    second = plans.claim("p", "hermes")
    assert second is not None
    assert second["id"] == "T-003"
    assert plans.claim("p", "hermes") is None
    other = plans.claim("p", "apollo")
    assert other is not None
    assert other["id"] == "T-001"
    assert plans.claim("p", "apollo") is None


def test_another_agent_s_step_is_not_opened_or_started_by_its_key(plans: Plans) -> None:
    plans.create("p")
    plans.add_step("p", subject="One", owner="apollo")
    for verb in (plans.open, plans.start):
        with pytest.raises(StateConflict, match="another agent's"):
            verb("p", "T-001", agent="hermes")
    token = plans.open("p", "T-001", agent="apollo")["attempt"]
    with pytest.raises(StateConflict, match="another agent's"):
        plans.start("p", "T-001", agent="hermes", attempt=token)
    assert plans.start("p", "T-001", attempt=token)["owner"] == "apollo"


def test_a_step_with_a_live_attempt_never_gets_a_second_one(plans: Plans, ledger: Ledger) -> None:
    planned(plans)
    token = plans.open("p", "T-001")["attempt"]
    with pytest.raises(StateConflict, match="live attempt"):
        plans.open("p", "T-001")
    assert plans.claim("p", "hermes") is None
    with pytest.raises(StateConflict):
        plans.start("p", "T-001", attempt=UNKNOWN)
    assert plans.start("p", "T-001")["attempt"] == token
    for attempt in (None, token):
        with pytest.raises(StateConflict, match="started already"):
            plans.start("p", "T-001", attempt=attempt)
    assert [task.id for task in ledger.children_of(plans.show("p")["root"])] == [token]


# -- retries ---------------------------------------------------------------------------------------------


def end_by_report(plans: Plans, ledger: Ledger, clock: FakeClock, token: str) -> None:
    clock.advance(3)
    plans.fail("p", "T-001", attempt=token, error="it broke")


def end_by_deadline(plans: Plans, ledger: Ledger, clock: FakeClock, token: str) -> None:
    clock.advance(120)
    plans.advance("p")
    assert ledger.get_task(token).terminal_code == "deadline_exceeded"


def end_by_silence(plans: Plans, ledger: Ledger, clock: FakeClock, token: str) -> None:
    plans.heartbeat(token)
    clock.advance(40)
    plans.advance("p")
    assert ledger.get_task(token).terminal_code == "restart_stale"


@pytest.mark.parametrize("end", [end_by_report, end_by_deadline, end_by_silence])
@pytest.mark.parametrize(
    ("settings", "delays"),
    [
        ({}, [5, 15, 45]),
        ({"backoff": "fixed"}, [10, 10, 10]),
        ({"retries": 2, "base_seconds": 1, "factor": 100, "cap_seconds": 50}, [1, 50]),
        ({"retries": 0}, []),
    ],
    ids=["exponential", "fixed", "capped", "none"],
)
def test_a_step_is_tried_again_exactly_after_its_delays_and_then_somebody_has_to_decide(
    plans: Plans,
    ledger: Ledger,
    clock: FakeClock,
    end: Callable[[Plans, Ledger, FakeClock, str], None],
    settings: dict[str, Any],
    delays: list[float],
) -> None:
    planned(plans, grace_seconds=40, **settings)
    tokens = []
    for number, delay in enumerate([*delays, None], 1):
        view = plans.claim("p", "hermes")
        assert view is not None
        assert view["attempts"] == number
        assert view["due_at"] is None
        tokens.append(view["attempt"])
        end(plans, ledger, clock, tokens[-1])
        view = plans.get("p", "T-001")
        assert (view["attempt"], view["ready"]) == (None, False)
        assert view["error"] == ("it broke" if end is end_by_report else "timeout")
        if delay is None:
            break
        assert (view["status"], view["due_at"]) == ("pending", clock.now + delay)
        clock.advance(delay - 0.25)
        assert plans.claim("p", "hermes") is None
        with pytest.raises(StateConflict, match="waits for its retry"):
            plans.start("p", "T-001")
        clock.advance(0.25)
    assert view["status"] == "escalated"
    assert plans.show("p")["status"] == "running"
    assert len(set(tokens)) == len(delays) + 1
    with pytest.raises(StateConflict, match="waits for a decision"):
        plans.start("p", "T-001")


@pytest.mark.parametrize(
    ("on_exhausted", "step", "plan"), [("escalate", "escalated", "running"), ("fail", "failed", "failed")]
)
def test_when_retries_are_used_up_the_fallback_agent_has_as_many_and_then_the_plan_s_word_holds(
    plans: Plans, clock: FakeClock, on_exhausted: str, step: str, plan: str
) -> None:
    planned(plans, fallback_agent="talos", retries=1, on_exhausted=on_exhausted)
    tried = []
    for agent, other in [("hermes", "talos")] * 2 + [("talos", "hermes")] * 2:
        assert not tried or plans.claim("p", other) is None
        view = plans.claim("p", agent)
        assert view is not None
        tried.append((view["owner"], view["session_id"]))
        due_at = plans.fail("p", "T-001", attempt=view["attempt"])["due_at"]
        # The fallback agent need not wait.
        assert due_at == (clock.now + 5 if len(tried) in (1, 3) else None)
        clock.advance(5)
    assert tried == [("hermes", "hermes-1"), ("hermes", "hermes-2"), ("talos", "talos-1"), ("talos", "talos-2")]
    assert status(plans) == step
    assert (plans.show("p")["status"], plans.show("p")["closed_at"]) == (plan, None)


def test_a_retry_of_what_timed_out_days_ago_is_a_new_attempt_with_times_of_its_own(
    plans: Plans, ledger: Ledger, clock: FakeClock
) -> None:
    planned(plans)
    old = started(plans)
    clock.advance(120)
    assert reconcile(ledger) == 1
    clock.advance(3 * DAY)
    new = started(plans)
    assert new != old
    task = ledger.get_task(new)
    assert (task.created_at, task.started_at, task.updated_at) == (clock.now,) * 3
    assert task.deadline_at == clock.now + 120
    assert reconcile(ledger, grace=0) == 0
    assert plans.advance("p").passed_over == ()
    assert ledger.get_task(new) == task
    assert ended(ledger, old)[:3] == ("timed_out", "deadline_exceeded", 1_120.0)


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the time zone of a process can't be changed here")
def test_a_change_of_the_time_zone_in_the_middle_of_a_backoff_changes_nothing(
    plans: Plans, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake seconds are those of a night in which clocks in Berlin are set back by an hour."""
    clock.now = 1_792_889_990.0
    try:
        monkeypatch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        before = time.localtime(clock.now)
        planned(plans)
        plans.fail("p", "T-001", attempt=started(plans))
        due_at = plans.get("p", "T-001")["due_at"]
        assert due_at == clock.now + 5
        monkeypatch.setenv("TZ", "Pacific/Kiritimati")
        time.tzset()
        assert time.localtime(clock.now).tm_gmtoff != before.tm_gmtoff
        clock.advance(4.75)
        assert ready(plans) == []
        monkeypatch.setenv("TZ", "America/Los_Angeles")
        time.tzset()
        assert plans.get("p", "T-001")["due_at"] == due_at
        assert ready(plans) == []
        clock.advance(0.25)
        assert ready(plans) == ["T-001"]
    finally:
        monkeypatch.undo()
        time.tzset()


# -- partial results, and decisions ----------------------------------------------------------------------


@pytest.mark.parametrize("partial_ok", [True, False])
@pytest.mark.parametrize("output", [None, "the half"])
@pytest.mark.parametrize("ending", ["timed_out", "failed"])
def test_only_a_time_out_that_left_something_that_may_do_is_partial(
    plans: Plans, clock: FakeClock, partial_ok: bool, output: str | None, ending: str
) -> None:
    planned(plans, partial_ok=partial_ok)
    token = started(plans)
    plans.heartbeat(token, output=output)
    assert plans.get("p", "T-001")["output"] == output
    clock.advance(120)
    if ending == "failed":
        plans.fail("p", "T-001", attempt=token)
    else:
        plans.advance("p")
    view = plans.get("p", "T-001")
    assert view["status"] == ("partial" if partial_ok and output and ending == "timed_out" else "pending")
    assert view["output"] == output
    assert plans.show("p")["status"] == "running"


def make_escalated(plans: Plans, clock: FakeClock) -> None:
    chain(plans, 2, retries=1, fallback_agent="talos")
    for _ in range(4):
        exhausted(plans)
        clock.advance(5)
    assert status(plans) == "escalated"


def make_failed(plans: Plans, clock: FakeClock) -> None:
    chain(plans, 2, retries=0, on_exhausted="fail")
    exhausted(plans)
    assert status(plans) == "failed"
    assert plans.show("p")["status"] == "failed"


def make_partial(plans: Plans, clock: FakeClock) -> None:
    chain(plans, 2, partial_ok=True)
    partial(plans, clock)


WAITING = [make_escalated, make_failed, make_partial]


@pytest.mark.parametrize("make", WAITING)
@pytest.mark.parametrize("decision", ["retry", "reassign", "complete", "cancel"])
def test_what_is_escalated_failed_or_partial_is_decided_on(
    plans: Plans, ledger: Ledger, clock: FakeClock, make: Callable[[Plans, FakeClock], None], decision: str
) -> None:
    make(plans, clock)
    before = plans.get("p", "T-001")
    assert ready(plans) == []
    assert plans.get("p", "T-002")["waitingFor"] == ["T-001"]
    view = plans.decide("p", "T-001", decision, to="apollo" if decision == "reassign" else None)
    assert plans.show("p")["status"] == "running"
    if decision == "complete":
        assert (view["status"], view["unblocked"]) == ("completed", ["T-002"])
        assert ready(plans) == ["T-002"]
        return
    if decision == "cancel":
        assert view["status"] == "cancelled"
        assert plans.get("p", "T-002")["waitingFor"] == ["T-001"]
        assert ready(plans) == []
        return
    assert (view["status"], view["ready"], view["due_at"]) == ("pending", True, None)
    assert view["owner"] == ("apollo" if decision == "reassign" else before["owner"])
    # The count is fresh: the first failure is tried again after the first delay, where there are retries.
    view = plans.fail("p", "T-001", attempt=started(plans))
    assert view["due_at"] == (None if make is make_failed else clock.now + 5)
    assert view["attempts"] == before["attempts"] + 1
    assert len(ledger.children_of(plans.show("p")["root"])) == before["attempts"] + 1


def test_nothing_else_is_decided_on(plans: Plans) -> None:
    planned(plans, "One", "Two", "Three", "Four", "Five")
    started(plans, "T-002")
    plans.complete("p", "T-003", attempt=started(plans, "T-003"))
    plans.cancel("p", "T-004")
    plans.delete("p", "T-005")
    before = plans.steps("p", all=True)
    assert [step["status"] for step in before] == ["pending", "in_progress", "completed", "cancelled", "deleted"]
    for step in before:
        for decision in ("retry", "reassign", "complete", "cancel"):
            with pytest.raises(StateConflict, match="decided on"):
                plans.decide("p", step["id"], decision, to="apollo" if decision == "reassign" else None)
        with pytest.raises(StateConflict, match="only what is partial"):
            plans.accept("p", step["id"])
    assert plans.steps("p", all=True) == before


def test_a_part_that_is_accepted_completes_the_step(plans: Plans, clock: FakeClock) -> None:
    make_partial(plans, clock)
    view = plans.accept("p", "T-001")
    assert (view["status"], view["output"], view["unblocked"]) == ("completed", "the half", ["T-002"])
    assert "followUp" not in view
    assert ready(plans) == ["T-002"]


def test_what_remains_of_a_part_is_a_step_on_which_the_dependents_wait_too(plans: Plans, clock: FakeClock) -> None:
    plans.create("p", partial_ok=True)
    policy = {"count": 1, "backoff": "fixed", "base_seconds": 4.0}
    plans.add_step("p", subject="Write", owner="hermes", retry_policy=policy, fallback_agent="talos")
    plans.add_step("p", subject="Check", blocked_by=["T-001"])
    plans.add_step("p", subject="Print", blocked_by=["T-001"])
    partial(plans, clock)
    view = plans.accept("p", "T-001", remaining="Write the rest")
    assert (view["status"], view["followUp"], view["unblocked"]) == ("completed", "T-004", ["T-004"])
    rest = plans.get("p", "T-004")
    assert (rest["subject"], rest["owner"], rest["ready"]) == ("Write the rest", "hermes", True)
    assert (rest["retry_policy"], rest["fallback_agent"], rest["partial_ok"]) == (policy, "talos", True)
    assert rest["timeout_ms"] == 120_000
    assert rest["blockedBy"] == ["T-001"]
    assert rest["blocks"] == ["T-002", "T-003"]
    assert plans.get("p", "T-002")["blockedBy"] == ["T-001", "T-004"]
    assert plans.get("p", "T-002")["waitingFor"] == ["T-004"]
    assert plans.complete("p", "T-004", attempt=started(plans, "T-004"))["unblocked"] == ["T-002", "T-003"]


@pytest.mark.parametrize("how", ["cancelled", "completed"])
def test_a_part_is_accepted_also_where_one_of_the_dependents_has_ended_already(
    plans: Plans, clock: FakeClock, how: str
) -> None:
    plans.create("p", partial_ok=True, retries=0)
    for subject in ("Write", "Check", "Print"):
        plans.add_step("p", subject=subject)
    if how == "completed":
        exhausted(plans, "T-002")
    plans.update("p", "T-001", blocks=["T-002", "T-003"])
    partial(plans, clock)
    if how == "completed":
        plans.decide("p", "T-002", "complete")
    else:
        plans.cancel("p", "T-002")
    assert plans.accept("p", "T-001", remaining="Write the rest")["followUp"] == "T-004"
    assert plans.get("p", "T-003")["waitingFor"] == ["T-004"]
    assert status(plans, "T-002") == how


# -- reports ---------------------------------------------------------------------------------------------


def test_the_same_report_once_more_changes_nothing(plans: Plans, ledger: Ledger, clock: FakeClock) -> None:
    planned(plans, "One", "Two")
    token = started(plans)
    plans.complete("p", "T-001", attempt=token, learnings=["learned"], output="done")
    before = (plans.get("p", "T-001"), ledger.get_task(token))
    clock.advance(1)
    for attempt in (token, None, token.upper()):
        again = plans.complete("p", "T-001", attempt=attempt, learnings=["other"], output="other")
        assert again == before[0]
    assert (plans.get("p", "T-001"), ledger.get_task(token)) == before
    for attempt in (token, None):
        with pytest.raises(StateConflict):
            plans.fail("p", "T-001", attempt=attempt)
    assert [learning["text"] for learning in plans.learnings("p")] == ["learned"]


def test_the_same_failure_once_more_changes_nothing_also_when_a_retry_has_begun(
    plans: Plans, ledger: Ledger, clock: FakeClock
) -> None:
    planned(plans)
    first = started(plans)
    plans.fail("p", "T-001", attempt=first, error="it broke")
    waits = plans.get("p", "T-001")
    assert plans.fail("p", "T-001", attempt=first, error="other") == waits
    with pytest.raises(StateConflict, match="not in progress"):
        plans.fail("p", "T-001")
    clock.advance(5)
    second = started(plans)
    runs = plans.get("p", "T-001")
    tasks = [ledger.get_task(token) for token in (first, second)]
    assert plans.fail("p", "T-001", attempt=first) == runs
    with pytest.raises(StateConflict, match="has gone on without it"):
        plans.complete("p", "T-001", attempt=first)
    with pytest.raises(StateConflict):
        plans.heartbeat(first, output="late")
    with pytest.raises(StateConflict):
        plans.start("p", "T-001", attempt=first)
    assert plans.get("p", "T-001") == runs
    assert [ledger.get_task(token) for token in (first, second)] == tasks
    # A person without a token means the current one.
    assert plans.complete("p", "T-001")["status"] == "completed"
    assert ledger.get_task(second).status == "succeeded"
    assert plans.fail("p", "T-001", attempt=first)["status"] == "completed"


def test_a_late_report_of_a_time_out_is_refused_before_and_after_it_was_folded(
    plans: Plans, ledger: Ledger, clock: FakeClock
) -> None:
    planned(plans)
    token = started(plans)
    clock.advance(120)
    assert reconcile(ledger) == 1
    for folded in (False, True):
        if folded:
            plans.advance("p")
        assert status(plans) == ("pending" if folded else "in_progress")
        for late in (plans.complete, plans.fail):
            with pytest.raises(StateConflict):
                late("p", "T-001", attempt=token)
        with pytest.raises(StateConflict):
            plans.heartbeat(token)
    assert ended(ledger, token)[0] == "timed_out"


def test_tokens_of_other_steps_and_of_none_are_refused(plans: Plans, ledger: Ledger) -> None:
    planned(plans, "One", "Two")
    first, second = started(plans), started(plans, "T-002")
    other = ledger.create_task().id
    for report in (plans.complete, plans.fail):
        with pytest.raises(StateConflict, match="none of T-001"):
            report("p", "T-001", attempt=second)
        for unknown in (UNKNOWN, other, plans.show("p")["root"]):
            with pytest.raises(TaskNotFound):
                report("p", "T-001", attempt=unknown)
    for unknown in (UNKNOWN, other):
        with pytest.raises(TaskNotFound):
            plans.heartbeat(unknown)
    assert {ledger.get_task(token).status.value for token in (first, second)} == {"running"}


def test_nothing_is_reported_of_a_step_that_nobody_has_started(plans: Plans) -> None:
    planned(plans)
    for report in (plans.complete, plans.fail):
        with pytest.raises(StateConflict, match="not in progress"):
            report("p", "T-001")
    assert plans.get("p", "T-001")["attempts"] == 0


@pytest.mark.parametrize("ending", ["complete", "fail"])
def test_a_queued_attempt_that_is_reported_on_was_started_by_that(
    plans: Plans, ledger: Ledger, clock: FakeClock, ending: str
) -> None:
    planned(plans)
    token = plans.open("p", "T-001", agent="hermes")["attempt"]
    assert token is not None
    clock.advance(9)
    view = getattr(plans, ending)("p", "T-001", attempt=token)
    assert view["session_id"] == "hermes-1"
    task = ledger.get_task(token)
    assert (task.started_at, task.ended_at) == (clock.now, clock.now)


@pytest.mark.parametrize("way", ["cancel", "delete", "cancel_plan"])
@pytest.mark.parametrize("begun", ["open", "start"])
def test_what_is_given_up_closes_its_attempt_and_a_late_report_is_refused(
    plans: Plans, ledger: Ledger, clock: FakeClock, way: str, begun: str
) -> None:
    planned(plans, "One", "Two")
    token = getattr(plans, begun)("p", "T-001")["attempt"]
    clock.advance(2)
    getattr(plans, way)("p", *([] if way == "cancel_plan" else ["T-001"]))
    assert ended(ledger, token) == ("cancelled", "caller_cancelled", clock.now, "not_applicable", "internal_task")
    gone = plans.get("p", "T-001")
    assert (gone["status"], gone["attempt"]) == ("deleted" if way == "delete" else "cancelled", None)
    clock.advance(1)
    for late in (plans.complete, plans.fail):
        with pytest.raises(StateConflict):
            late("p", "T-001", attempt=token)
    with pytest.raises(StateConflict):
        plans.heartbeat(token)
    if way != "cancel_plan":
        # Once more is a no-op.
        assert getattr(plans, way)("p", "T-001") == gone
    assert plans.get("p", "T-001") == gone


def test_a_heartbeat_of_an_attempt_whose_plan_was_removed_is_a_conflict(plans: Plans, ledger: Ledger) -> None:
    planned(plans)
    token = started(plans)
    plans.remove("p")
    assert ended(ledger, token)[0] == "cancelled"
    # The plan is not there any more to be named; the token is the ledger's, which knows that it is over.
    with pytest.raises(PlanNotFound):
        plans.complete("p", "T-001", attempt=token)
    with pytest.raises(StateConflict):
        plans.heartbeat(token)


def test_completed_steps_are_neither_cancelled_nor_deleted(plans: Plans) -> None:
    planned(plans, "One", "Two")
    plans.complete("p", "T-001", attempt=started(plans))
    for way in (plans.cancel, plans.delete):
        with pytest.raises(StateConflict, match="completed already"):
            way("p", "T-001")
    plans.cancel("p", "T-002")
    with pytest.raises(StateConflict):
        plans.delete("p", "T-002")


@pytest.mark.parametrize(
    ("outcome", "becomes"),
    [("succeeded", "completed"), ("failed", "pending"), ("timed_out", "pending"), ("cancelled", "cancelled")],
)
@pytest.mark.parametrize("begun", ["open", "start"])
def test_an_attempt_that_was_closed_from_outside_is_folded_by_its_outcome(
    plans: Plans, ledger: Ledger, clock: FakeClock, outcome: str, becomes: str, begun: str
) -> None:
    chain(plans, 2)
    token = getattr(plans, begun)("p", "T-001")["attempt"]
    clock.advance(2)
    ledger.close_task(token, outcome)
    at = clock.now
    clock.advance(2)
    assert status(plans) == "in_progress"
    assert [step["id"] for step in plans.advance("p")] == (["T-002"] if outcome == "succeeded" else [])
    view = plans.get("p", "T-001")
    assert (view["status"], view["attempt"]) == (becomes, None)
    assert view["due_at"] == (at + 5 if becomes == "pending" else None)
    assert ended(ledger, token)[2:] == (at, "not_applicable", "internal_task")
    assert ready(plans) == (["T-002"] if outcome == "succeeded" else [])


def test_a_report_of_what_was_closed_from_outside_in_the_same_way_adds_what_the_agent_has_to_say(
    plans: Plans, ledger: Ledger, clock: FakeClock
) -> None:
    planned(plans, "One", "Two")
    token = started(plans)
    ledger.close_task(token, "succeeded")
    with pytest.raises(StateConflict):
        plans.fail("p", "T-001", attempt=token)
    view = plans.complete("p", "T-001", attempt=token, output="done", learnings=["learned"])
    assert (view["status"], view["output"], view["learnings"]) == ("completed", "done", ["learned"])


# -- sessions and learnings ------------------------------------------------------------------------------


def test_sessions_are_counted_for_each_agent_in_each_plan(plans: Plans, clock: FakeClock) -> None:
    planned(plans, "One", "Two", "Three", "Four")
    given = [plans.start("p", "T-001", agent="Hermes")["session_id"]]
    given.append(plans.start("p", "T-002", agent="Apollo")["session_id"])
    plans.fail("p", "T-001")
    clock.advance(5)
    given.append(plans.start("p", "T-001")["session_id"])
    opened = plans.open("p", "T-003", agent="Hermes")
    assert opened["session_id"] is None
    given.append(plans.start("p", "T-003", attempt=opened["attempt"])["session_id"])
    given.append(plans.start("p", "T-004")["session_id"])
    assert given == ["Hermes-1", "Apollo-1", "Hermes-2", "Hermes-3", None]
    plans.create("q")
    plans.add_step("q", subject="One")
    assert plans.start("q", "T-001", agent="Hermes")["session_id"] == "Hermes-1"


@pytest.mark.parametrize("way", ["start", "claim", "heartbeat", "complete", "fail"])
def test_a_session_that_is_not_there_is_cleared_and_said_so(plans: Plans, way: str) -> None:
    planned(plans, "One", "Two")
    plans.update("p", "T-001", owner="Hermes", session_resume="Hermes-7")
    if way == "claim":
        view = plans.claim("p", "Hermes")
    elif way == "start":
        view = plans.start("p", "T-001")
    else:
        # By the first word of who was asked, the attempt is started.
        token = plans.open("p", "T-001")["attempt"]
        assert token is not None
        view = plans.heartbeat(token) if way == "heartbeat" else getattr(plans, way)("p", "T-001")
    assert view is not None
    assert (view["session_id"], view["session_resume"]) == ("Hermes-1", None)
    assert any("session_resume" in note for note in view.get("notes", []))


def test_a_session_that_is_there_is_gone_on_with(plans: Plans, clock: FakeClock) -> None:
    planned(plans, "One", "Two")
    plans.fail("p", "T-001", attempt=started(plans, agent="Hermes"))
    clock.advance(5)
    started(plans)
    # The first of the two has ended, and is known of all the same.
    plans.update("p", "T-002", session_resume="Hermes-1")
    view = plans.start("p", "T-002", agent="Hermes")
    assert (view["session_id"], view["session_resume"]) == ("Hermes-3", "Hermes-1")
    assert "notes" not in view
    plans.create("q")
    plans.add_step("q", subject="One", session_resume="Hermes-1")
    assert plans.start("q", "T-001", agent="Apollo")["session_resume"] is None


def test_a_step_is_handed_what_was_learned_on_every_way_to_it_in_order_of_completion(
    plans: Plans, clock: FakeClock
) -> None:
    """T-005 waits for T-004 and T-003, T-004 for T-002 and T-001, T-003 for T-001; T-006 stands aside."""
    planned(plans, "One", "Two")
    plans.add_step("p", subject="Three", blocked_by=["T-001"])
    plans.add_step("p", subject="Four", blocked_by=["T-002", "T-001"])
    plans.add_step("p", subject="Five", blocked_by=["T-004", "T-003"])
    plans.add_step("p", subject="Six")
    for key in ("T-006", "T-002", "T-001", "T-004", "T-003"):
        clock.advance(1)
        token = started(plans, key)
        view = plans.complete("p", key, attempt=token, learnings=[f"{key} first", f"{key} second"])
        assert view["learnings"] == [f"{key} first", f"{key} second"]
    assert plans.get("p", "T-005")["learnings"] == []
    handed = [f"{key} {which}" for key in ("T-002", "T-001", "T-004", "T-003") for which in ("first", "second")]
    assert plans.start("p", "T-005")["learnings"] == handed
    assert [step["learnings"] for step in plans.steps("p")] == [handed]
    assert [(one["step"], one["text"], one["at"]) for one in plans.learnings("p")][:3] == [
        ("T-006", "T-006 first", 1_001.0),
        ("T-006", "T-006 second", 1_001.0),
        ("T-002", "T-002 first", 1_002.0),
    ]


def test_what_failed_teaches_nothing_and_a_retry_is_handed_the_same_again(plans: Plans, clock: FakeClock) -> None:
    chain(plans, 2)
    plans.complete("p", "T-001", attempt=started(plans), learnings=["mind the gap"])
    for _ in range(2):
        view = plans.start("p", "T-002")
        assert view["learnings"] == ["mind the gap"]
        plans.fail("p", "T-002")
        clock.advance(15)
    assert len(plans.learnings("p")) == 1


# -- the plan as a whole ---------------------------------------------------------------------------------


def test_a_plan_is_completed_when_it_has_steps_and_each_is_completed_cancelled_or_deleted(
    plans: Plans, clock: FakeClock
) -> None:
    plans.create("p")
    assert plans.show("p")["status"] == "pending"
    plans.advance("p")
    assert plans.show("p")["status"] == "pending"
    for subject in ("One", "Two", "Three", "Four"):
        plans.add_step("p", subject=subject)
    assert plans.show("p")["status"] == "pending"
    started(plans)
    assert plans.show("p")["status"] == "running"
    plans.complete("p", "T-001")
    plans.cancel("p", "T-002")
    plans.delete("p", "T-003")
    assert plans.show("p")["status"] == "running"
    clock.advance(3)
    plans.complete("p", "T-004", attempt=started(plans, "T-004"))
    assert (plans.show("p")["status"], plans.show("p")["closed_at"]) == ("completed", clock.now)


@pytest.mark.parametrize("last", ["cancel", "delete"])
def test_the_last_step_that_is_given_up_completes_a_plan_as_well(plans: Plans, ledger: Ledger, last: str) -> None:
    planned(plans, "One", "Two")
    plans.complete("p", "T-001", attempt=started(plans))
    getattr(plans, last)("p", "T-002")
    view = plans.show("p")
    assert view["status"] == "completed"
    assert ledger.get_task(view["root"]).status == "succeeded"


@pytest.mark.parametrize("closed", ["completed", "cancelled"])
def test_nothing_is_added_to_a_closed_plan_or_changed_in_it(plans: Plans, closed: str) -> None:
    planned(plans)
    if closed == "completed":
        plans.complete("p", "T-001", attempt=started(plans))
    else:
        plans.cancel_plan("p")
    before = (plans.show("p"), plans.steps("p", all=True))
    assert before[0]["status"] == closed
    refused: list[Callable[[], Any]] = [
        lambda: plans.add_step("p", subject="More"),
        lambda: plans.update("p", "T-001", subject="Other"),
        lambda: plans.start("p", "T-001"),
        lambda: plans.open("p", "T-001"),
        lambda: plans.delete("p", "T-001"),
        lambda: plans.accept("p", "T-001"),
        lambda: plans.decide("p", "T-001", "retry"),
        lambda: plans.fail("p", "T-001"),
    ]
    if closed == "completed":
        refused += [lambda: plans.cancel_plan("p"), lambda: plans.cancel("p", "T-001")]
    for act in refused:
        with pytest.raises(StateConflict):
            act()
    assert plans.claim("p", "hermes") is None
    assert ready(plans) == []
    assert (plans.show("p"), plans.steps("p", all=True)) == before


@pytest.mark.parametrize("closed", [False, True])
def test_a_removed_plan_is_gone_with_its_steps_and_the_ledger_s_history_stays(
    plans: Watched, ledger: Ledger, place: Place, closed: bool
) -> None:
    chain(plans, 2)
    plans.update("p", "T-002", blocks=["T-009"])
    tokens = [started(plans, agent="hermes")]
    plans.complete("p", "T-001", learnings=["learned"])
    tokens.append(started(plans, "T-002"))
    if closed:
        plans.complete("p", "T-002")
    root = plans.show("p")["root"]
    plans.create("other")
    plans.add_step("other", subject="Stay")
    view = plans.remove("p")
    assert (view["name"], view["status"]) == ("p", "completed" if closed else "running")
    for act in (plans.show, plans.steps, plans.advance, plans.remove, plans.graph, plans.learnings):
        with pytest.raises(PlanNotFound):
            act("p")
    assert [plan["name"] for plan in plans.plans()] == ["other"]
    with looking(place) as connection:
        left = {
            table.name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in tables.metadata.sorted_tables
        }
    assert left == {name: int(name in ("tsg_plans", "tsg_plan_runs", "tsg_plan_steps")) for name in left}
    assert {task.id for task in ledger.children_of(root)} == set(tokens)
    assert [ended(ledger, token)[0] for token in tokens] == ["succeeded", "succeeded" if closed else "cancelled"]
    assert ended(ledger, root)[0] == ("succeeded" if closed else "cancelled")


# -- advance ---------------------------------------------------------------------------------------------


def test_advance_done_again_at_the_same_time_changes_nothing(plans: Plans, place: Place, clock: FakeClock) -> None:
    def rows() -> list[Any]:
        with looking(place) as connection:
            names = sorted(sa.inspect(connection).get_table_names())
            return [sorted(map(repr, connection.execute(sa.text(f"SELECT * FROM {name}")))) for name in names]

    planned(plans, "One", "Two", "Three")
    started(plans)
    plans.heartbeat(started(plans, "T-002"), output="some")
    clock.advance(125)
    before = rows()
    plans.advance("p")
    after = rows()
    assert after != before
    for _ in range(3):
        assert [step["id"] for step in plans.advance("p")] == ["T-003"]
    assert rows() == after


def test_advance_looks_at_no_other_plan_and_at_no_other_task(plans: Plans, ledger: Ledger, clock: FakeClock) -> None:
    planned(plans)
    mine = started(plans)
    plans.create("q")
    plans.add_step("q", subject="One")
    theirs = plans.start("q", "T-001")["attempt"]
    assert theirs is not None
    other = ledger.create_task(timeout_seconds=10).id
    ledger.start_task(other)
    done = ledger.create_task().id
    ledger.close_task(done, "succeeded")
    clock.advance(3 * DAY)
    plans.advance("p")
    assert ledger.get_task(mine).status == "timed_out"
    assert [ledger.get_task(each).status.value for each in (theirs, other)] == ["running", "running"]
    assert ledger.get_task(done).delivery_status == "pending"


def test_a_time_in_the_future_is_passed_over_and_said_so_and_stops_nothing_else(
    plans: Plans, ledger: Ledger, clock: FakeClock
) -> None:
    """As after a clock that was wrong for a while: one attempt has ended then, another was heard of then."""
    planned(plans, "One", "Two", "Three", "Four")
    good = started(plans)
    beaten = started(plans, "T-003")
    closed = started(plans, "T-002")
    clock.now = 9_000.0
    ledger.close_task(closed, "failed")
    plans.heartbeat(beaten)
    clock.now = 1_200.0
    for _ in range(2):
        found = plans.advance("p")
        assert found.passed_over == ("T-002", "T-003")
        assert [step["id"] for step in found] == ["T-001", "T-004"][clock.now < 1_205 :]
        assert [status(plans, f"T-00{number}") for number in (1, 2, 3)] == ["pending", "in_progress", "in_progress"]
        clock.advance(5)
    assert ended(ledger, good)[:3] == ("timed_out", "deadline_exceeded", 1_200.0)
    # They don't keep anybody from working either.
    claimed = [plans.claim("p", "hermes") for _ in range(3)]
    assert [view and view["id"] for view in claimed] == ["T-001", "T-004", None]
    assert [step["id"] for step in plans.steps("p")] == ["T-001", "T-002", "T-003", "T-004"]
    clock.now = 9_000.0
    assert plans.advance("p").passed_over == ()
    assert [status(plans, f"T-00{number}") for number in (2, 3)] == ["pending", "pending"]


@pytest.mark.parametrize("way", ["claim", "start", "open", "steps", "plans", "show", "advance"])
def test_a_dead_agent_s_step_never_hangs(plans: Plans, clock: FakeClock, way: str) -> None:
    planned(plans, timeout_seconds=60, base_seconds=0)
    started(plans)
    clock.advance(60)
    arguments: dict[str, tuple[str, ...]] = {"claim": ("p", "talos"), "start": ("p", "T-001"), "open": ("p", "T-001")}
    answer = getattr(plans, way)(*arguments.get(way, () if way == "plans" else ("p",)))
    view = plans.get("p", "T-001")
    if way in arguments:
        assert (answer["id"], answer["attempts"], view["status"]) == ("T-001", 2, "in_progress")
    else:
        assert (view["status"], view["ready"]) == ("pending", True)


@pytest.mark.parametrize("way", ["start", "open", "claim"])
def test_who_asks_again_and_again_for_a_dead_agent_s_step_gets_it_when_its_retry_is_due(
    plans: Plans, clock: FakeClock, way: str
) -> None:
    """The refusal of the first asking must not undo what that found out: from then on the delay runs."""
    planned(plans, timeout_seconds=60)
    started(plans)
    clock.advance(60)
    for _ in range(5):
        if way == "claim":
            assert plans.claim("p", "talos") is None
        else:
            with pytest.raises(StateConflict):
                getattr(plans, way)("p", "T-001")
        clock.advance(1)
    view = plans.claim("p", "talos") if way == "claim" else getattr(plans, way)("p", "T-001")
    assert view is not None
    assert view["attempts"] == 2


@pytest.mark.parametrize("way", ["advance", "cancel", "delete", "remove", "claim"])
def test_a_step_whose_attempt_was_pruned_before_anybody_looked_does_not_hang(
    plans: Plans, ledger: Ledger, clock: FakeClock, way: str
) -> None:
    """How it ended nobody knows any more; as what failed it is tried again."""
    planned(plans, "One", "Two", base_seconds=0)
    token = started(plans)
    ledger.close_task(token, "failed")
    ledger.set_delivery(token, "not_applicable")
    clock.advance(100 * DAY)
    assert ledger.prune(90 * DAY)["tasks_pruned"] == 1
    if way == "advance":
        assert ready(plans) == ["T-001", "T-002"]
        assert "pruned" in (plans.get("p", "T-001")["error"] or "")
    elif way == "claim":
        view = plans.claim("p", "talos")
        assert view is not None
        assert (view["id"], view["attempts"]) == ("T-001", 2)
    elif way == "remove":
        plans.remove("p")
    else:
        getattr(plans, way)("p", "T-001")
        assert status(plans) == ("cancelled" if way == "cancel" else "deleted")


def test_doctor_is_content_with_attempts_that_were_pruned(plans: Watched, ledger: Ledger, clock: FakeClock) -> None:
    chain(plans, 2)
    old = [started(plans)]
    plans.fail("p", "T-001")
    clock.advance(5)
    old.append(started(plans))
    plans.complete("p", "T-001", learnings=["kept"])
    clock.advance(100 * DAY)
    assert ledger.prune(90 * DAY)["tasks_pruned"] == 2
    for token in old:
        with pytest.raises(TaskNotFound):
            ledger.get_task(token)
    plans.assert_healthy()
    assert plans.get("p", "T-001")["attempts"] == 2
    # The same reports are the same no-ops.
    assert plans.fail("p", "T-001", attempt=old[0])["status"] == "completed"
    assert plans.complete("p", "T-001", attempt=old[1])["status"] == "completed"
    assert plans.start("p", "T-002")["learnings"] == ["kept"]
    plans.complete("p", "T-002")
    clock.advance(100 * DAY)
    # The root, and what was below it.
    assert ledger.prune(90 * DAY)["tasks_pruned"] == 2
    plans.assert_healthy()
    assert plans.show("p")["status"] == "completed"
    plans.remove("p")


# -- a block of code -------------------------------------------------------------------------------------


@pytest.fixture
def real(place: Place) -> Iterator[Watched]:
    """Plans whose clock is the real one."""
    with Ledger(place) as ledger:
        yield Watched(ledger)


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


def test_a_block_that_ends_well_completes_its_step(plans: Plans, ledger: Ledger, clock: FakeClock) -> None:
    chain(plans, 3)
    plans.complete("p", "T-001", attempt=started(plans), learnings=["earlier"])
    with plans.work("p", "T-002", agent="hermes") as work:
        assert work.step["learnings"] == ["earlier"]
        assert (work.step["owner"], work.step["status"]) == ("hermes", "in_progress")
        assert ledger.get_task(work.attempt).status == "running"
        work.output("the half")
        assert plans.get("p", "T-002")["output"] == "the half"
        work.beat()
        assert ledger.get_task(work.attempt).expects_heartbeat
        work.learn("one")
        work.learn("two")
        assert not work.is_over
        assert plans.learnings("p")[1:] == []
        clock.advance(4)
    assert ended(ledger, work.attempt)[:3] == ("succeeded", "worker_completed", clock.now)
    view = plans.get("p", "T-002")
    assert (view["status"], view["output"], view["learnings"]) == ("completed", "the half", ["one", "two"])
    assert plans.get("p", "T-003")["ready"]


def test_a_block_starts_the_attempt_that_it_was_asked_to(plans: Plans) -> None:
    planned(plans)
    token = plans.open("p", "T-001")["attempt"]
    with pytest.raises(StateConflict), plans.work("p", "T-001", attempt=UNKNOWN):
        pytest.fail("the block was entered")
    with plans.work("p", "T-001", attempt=token) as work:
        assert work.attempt == token
    assert status(plans) == "completed"


class Trouble(Exception):
    pass


@pytest.mark.parametrize(
    "error", [Trouble("out of \x00 paper\n"), Trouble(), KeyboardInterrupt(), SystemExit(3)], ids=repr
)
def test_a_block_that_raises_fails_its_step_and_lets_the_error_through(
    plans: Plans, ledger: Ledger, clock: FakeClock, error: BaseException
) -> None:
    planned(plans)
    tokens: list[str] = []

    def block() -> None:
        with plans.work("p", "T-001") as work:
            tokens.append(work.attempt)
            work.learn("never mind")
            raise error

    with pytest.raises(type(error)) as caught:
        block()
    assert caught.value is error
    view = plans.get("p", "T-001")
    assert (view["status"], view["due_at"]) == ("pending", clock.now + 5)
    assert view["error"] is not None
    assert view["error"].startswith(type(error).__name__)
    if error.args == ("out of \x00 paper\n",):
        assert "out of" in view["error"]
        assert "paper" in view["error"]
    assert ended(ledger, tokens[0])[:2] == ("failed", "worker_failed")
    assert plans.learnings("p") == []
    assert not hasattr(error, "__notes__")


def test_a_block_is_vouched_for_as_long_as_it_runs(real: Watched) -> None:
    """Whoever is silent for 0.8 seconds is given up here; the block takes twice as long."""
    planned(real, "One", "Two", timeout_seconds=None, grace_seconds=0.8)
    silent = started(real, "T-002")
    with real.work("p", "T-001", interval_seconds=0.1) as work:
        begun = time.monotonic()
        while time.monotonic() < begun + 1.6:
            Plans.advance(real, "p")
            assert not work.is_over
            time.sleep(0.05)
        assert status(real) == "in_progress"
        # The other one, which nobody vouched for, was noticed meanwhile.
        assert real.get("p", "T-002")["error"] == "timeout"
    assert status(real) == "completed"
    with pytest.raises(StateConflict):
        real.heartbeat(silent)


@pytest.mark.parametrize("way", ["cancel", "delete", "cancel_plan", "remove", "close"])
@pytest.mark.parametrize("raises", [False, True])
def test_a_block_whose_attempt_somebody_else_has_ended_is_told_so(
    plans: Plans, ledger: Ledger, way: str, raises: bool
) -> None:
    planned(plans, "One", "Two", grace_seconds=0.1)
    expected: type[Exception] = Trouble if raises else PlanNotFound if way == "remove" else StateConflict
    tokens: list[str] = []

    def block() -> None:
        with plans.work("p", "T-001") as work:
            tokens.append(work.attempt)
            if way == "close":
                ledger.close_task(work.attempt, "cancelled")
            else:
                getattr(plans, way)("p", *(["T-001"] if way in ("cancel", "delete") else []))
            until(lambda: work.is_over)
            if raises:
                raise Trouble

    with pytest.raises(expected) as caught:
        block()
    # What the block raised is what counts, with a word about the rest.
    assert bool(getattr(caught.value, "__notes__", [])) is raises
    assert ended(ledger, tokens[0])[0] == "cancelled"
    if way != "remove":
        plans.advance("p")
        assert status(plans) == ("deleted" if way == "delete" else "cancelled")


def test_heartbeats_that_would_come_too_late_are_refused_before_anything_is_started(plans: Plans) -> None:
    planned(plans)
    intervals: list[Any] = [300.1, 600, 0, -1, float("nan"), float("inf"), "soon", True]
    for interval in intervals:
        with pytest.raises(InvalidInput), plans.work("p", "T-001", interval_seconds=interval):
            pytest.fail("the block was entered")
    assert (status(plans), plans.get("p", "T-001")["attempts"]) == ("pending", 0)


def test_heartbeats_may_come_at_half_of_the_grace(plans: Plans) -> None:
    planned(plans)
    with plans.work("p", "T-001", interval_seconds=300):
        pass
    assert status(plans) == "completed"


def test_a_block_is_not_entered_for_a_step_that_is_not_ready(plans: Plans) -> None:
    chain(plans, 2)
    with pytest.raises(StateConflict), plans.work("p", "T-002"):
        pytest.fail("the block was entered")
    with pytest.raises(StepNotFound), plans.work("p", "T-009"):
        pytest.fail("the block was entered")


def test_a_clock_that_was_set_back_makes_no_change_older_than_the_last(plans: Plans, clock: FakeClock) -> None:
    planned(plans, "One", "Two")
    clock.advance(-5)
    plans.update("p", "T-001", subject="Changed")
    plans.delete("p", "T-002")
    assert plans.doctor()["healthy"]
    with pytest.raises(StateConflict, match="clock"):
        plans.cancel_plan("p")
    clock.advance(5)
    plans.cancel_plan("p")
    assert plans.doctor()["healthy"]


def test_what_remains_may_get_the_key_that_the_accepted_step_was_to_block(plans: Plans, clock: FakeClock) -> None:
    plans.create("p", partial_ok=True)
    plans.add_step("p", subject="One", blocks=["T-002", "T-003"])
    plans.heartbeat(started(plans), output="half")
    clock.advance(120)
    plans.advance("p")
    assert plans.accept("p", "T-001", remaining="The rest")["followUp"] == "T-002"
    assert plans.get("p", "T-002")["blockedBy"] == ["T-001"]
    assert plans.add_step("p", subject="Three")["waitingFor"] == ["T-002"]
    assert plans.doctor()["healthy"]
