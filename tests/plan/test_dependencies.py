"""What waits for what, in both directions, on either database; and what is refused, after which nothing is stored."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conftest import FakeClock
from tests.test_concurrency import looking
from tsg import InvalidInput, Ledger, LedgerError, PlanNotFound, Plans, StateConflict, StepNotFound, TaskNotFound
from tsg.errors import DependencyCycle

Place = Path | sa.URL

UNKNOWN = "0f8fad5b-d9cb-469f-a165-70867728950e"
LINK_FIELDS = ("blocked_by", "blocks", "add_blocked_by", "add_blocks")


@pytest.fixture
def plans(ledger: Ledger) -> Iterator[Plans]:
    """Plans that are consistent in the end."""
    made = Plans(ledger)
    yield made
    report = made.doctor()
    assert report["healthy"], report
    assert report["plan_inconsistency_count"] == 0


def rows(place: Place) -> dict[str, list[str]]:
    """Every row of every table."""
    with looking(place) as connection:
        names = sa.inspect(connection).get_table_names()
        assert {"tsg_plans", "tsg_plan_steps", "tsg_plan_dependencies", "tsg_plan_expected"} <= set(names)
        return {name: sorted(map(repr, connection.execute(sa.text(f"SELECT * FROM {name}")))) for name in names}


@contextmanager
def refused(
    place: Place, error: type[Exception], match: str | None = None
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """That it raises, exactly this, and nothing is stored."""
    before = rows(place)
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert caught.type is error
    assert rows(place) == before


def planned(plans: Plans, waits: dict[str, list[str]], **settings: Any) -> None:
    """A plan of steps by their keys, in order, each with what it waits for."""
    plans.create("p", **settings)
    for key, blockers in waits.items():
        assert plans.add_step("p", subject="Go on", blocked_by=blockers)["id"] == key


def blocked_by(plans: Plans) -> dict[str, list[str]]:
    return {step["id"]: step["blockedBy"] for step in plans.steps("p", all=True)}


def blocks(plans: Plans) -> dict[str, list[str]]:
    return {step["id"]: step["blocks"] for step in plans.steps("p", all=True)}


def ready(plans: Plans) -> list[str]:
    return [step["id"] for step in plans.steps("p", ready=True)]


def complete(plans: Plans, key: str) -> Any:
    return plans.complete("p", key, attempt=plans.start("p", key)["attempt"])


# -- both directions -------------------------------------------------------------------------------------


def test_a_dependency_is_seen_from_both_ends_whichever_end_it_was_given_at(plans: Plans) -> None:
    planned(plans, {"T-001": [], "T-002": ["T-001"]})
    assert plans.add_step("p", subject="First", blocks=["T-001", "T-002"])["blocks"] == ["T-001", "T-002"]
    assert blocked_by(plans) == {"T-001": ["T-003"], "T-002": ["T-001", "T-003"], "T-003": []}
    assert blocks(plans) == {"T-001": ["T-002"], "T-002": [], "T-003": ["T-001", "T-002"]}
    assert ready(plans) == ["T-003"]
    graph = plans.graph("p")
    assert [tuple(edge) for edge in graph.edges] == [("T-003", "T-001"), ("T-001", "T-002"), ("T-003", "T-002")]
    # The same said from the other end is the same once.
    plans.update("p", "T-002", add_blocked_by=["T-003", "T-001"])
    plans.update("p", "T-003", add_blocks=["T-002"])
    assert blocked_by(plans)["T-002"] == ["T-001", "T-003"]


def test_an_edit_says_all_that_there_is_from_then_on(plans: Plans) -> None:
    planned(plans, {"T-001": [], "T-002": [], "T-003": [], "T-004": ["T-001", "T-002"]})
    assert plans.update("p", "T-004", blocked_by=["T-003", "T-001"])["blockedBy"] == ["T-003", "T-001"]
    assert blocks(plans) == {"T-001": ["T-004"], "T-002": [], "T-003": ["T-004"], "T-004": []}
    assert plans.update("p", "T-004", blocked_by=["T-001", "T-003"])["blockedBy"] == ["T-001", "T-003"]
    assert plans.update("p", "T-001", blocks=["T-002"])["blocks"] == ["T-002"]
    assert blocked_by(plans) == {"T-001": [], "T-002": ["T-001"], "T-003": [], "T-004": ["T-003"]}
    assert plans.update("p", "T-003", blocks=[])["blocks"] == []
    assert plans.update("p", "T-002", blocked_by=[])["ready"]
    assert ready(plans) == ["T-001", "T-002", "T-003", "T-004"]


def test_what_is_only_added_takes_nothing_away(plans: Plans) -> None:
    planned(plans, {"T-001": [], "T-002": [], "T-003": ["T-001"]})
    assert plans.update("p", "T-003", add_blocked_by=["T-002", "T-001"])["blockedBy"] == ["T-001", "T-002"]
    assert plans.update("p", "T-001", add_blocks=["T-002"])["blocks"] == ["T-002", "T-003"]
    plans.update("p", "T-003", add_blocked_by=[], add_blocks=[])
    assert blocked_by(plans) == {"T-001": [], "T-002": ["T-001"], "T-003": ["T-001", "T-002"]}
    # Both in one edit: the list, and what is added to it.
    view = plans.update("p", "T-003", blocked_by=["T-002"], add_blocked_by=["T-001"])
    assert view["blockedBy"] == ["T-002", "T-001"]


def test_a_key_that_is_given_twice_counts_once(plans: Plans) -> None:
    planned(plans, {"T-001": [], "T-002": ["T-001", "T-001"]})
    plans.update("p", "T-001", blocks=["T-002", "T-002"])
    assert complete(plans, "T-001")["unblocked"] == ["T-002"]


#: What can be gone through, once or again and again.
KINDS: dict[str, Callable[[list[str]], Any]] = {
    "list": list,
    "tuple": tuple,
    "iterator": iter,
    "generator": lambda keys: (key for key in keys),
    "keys of a mapping": lambda keys: dict.fromkeys(keys).keys(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["add", "update"])
def test_keys_may_come_in_anything_that_can_be_gone_through(plans: Plans, way: str, kind: str) -> None:
    given = KINDS[kind]
    planned(plans, {"T-001": [], "T-002": []})
    if way == "add":
        view = plans.add_step("p", subject="Last", blocked_by=given(["T-001"]), blocks=given(["T-002"]))
    else:
        plans.add_step("p", subject="Last")
        view = plans.update("p", "T-003", blocked_by=given(["T-001"]), blocks=given(["T-002"]))
    assert (view["blockedBy"], view["blocks"]) == (["T-001"], ["T-002"])


def test_a_step_that_waits_for_what_is_completed_is_ready_at_once(plans: Plans) -> None:
    planned(plans, {"T-001": [], "T-002": []})
    complete(plans, "T-001")
    view = plans.add_step("p", subject="Next", blocked_by=["T-001"])
    assert (view["ready"], view["blockedBy"], view["waitingFor"]) == (True, ["T-001"], [])
    view = plans.update("p", "T-002", blocked_by=["T-001", "T-003"])
    assert view["waitingFor"] == ["T-003"]


def test_dependencies_lead_to_no_other_plan(plans: Plans, place: Place) -> None:
    planned(plans, {"T-001": [], "T-002": []})
    plans.create("q")
    with refused(place, StepNotFound):
        plans.add_step("q", subject="One", blocked_by=["T-002"])
    plans.add_step("q", subject="One")
    plans.add_step("q", subject="Two", blocked_by=["T-001"])
    assert blocks(plans) == {"T-001": [], "T-002": []}


# -- cycles ----------------------------------------------------------------------------------------------


def test_a_step_does_not_wait_for_itself(plans: Plans, place: Place) -> None:
    planned(plans, {"T-001": [], "T-002": []})
    for field in LINK_FIELDS:
        with refused(place, DependencyCycle, "T-001 -> T-001") as caught:
            plans.update("p", "T-001", **{field: ["T-002", "T-001"]})
        assert caught.value.keys == ("T-001", "T-001")  # type: ignore[attr-defined]
    for field in ("blocked_by", "blocks"):
        with refused(place, DependencyCycle, "T-003 -> T-003"):
            plans.add_step("p", subject="Myself", **{field: ["T-003"]})


#: Each would close the same cycle, whatever else it says.
CLOSING: list[tuple[str, dict[str, Any]]] = [
    ("T-001", {"blocked_by": ["T-003"]}),
    ("T-001", {"add_blocked_by": ["T-003"]}),
    ("T-003", {"blocks": ["T-001"]}),
    ("T-003", {"add_blocks": ["T-001"]}),
    ("T-001", {"blocked_by": ["T-004", "T-003"], "subject": "Other"}),
    ("T-003", {"blocks": ["T-001", "T-004"], "metadata": {"a": 1}}),
]


def test_an_edit_that_closes_a_cycle_names_all_of_it(plans: Plans, place: Place) -> None:
    planned(plans, {"T-001": [], "T-002": ["T-001"], "T-003": ["T-002"], "T-004": []})
    for key, edit in CLOSING:
        with refused(place, DependencyCycle) as caught:
            plans.update("p", key, **edit)
        keys: tuple[str, ...] = caught.value.keys  # type: ignore[attr-defined]
        assert keys[0] == keys[-1]
        turn = keys.index("T-001")
        assert (*keys[turn:-1], *keys[:turn]) == ("T-001", "T-002", "T-003")
        assert str(caught.value).endswith(" -> ".join(keys))


def test_a_new_step_between_two_that_wait_closes_a_cycle(plans: Plans, place: Place) -> None:
    planned(plans, {"T-001": [], "T-002": ["T-001"]})
    with refused(place, DependencyCycle, "T-00. -> T-00. -> T-00. -> T-00."):
        plans.add_step("p", subject="Between", blocked_by=["T-002"], blocks=["T-001"])
    # What was refused has used no key up.
    assert plans.add_step("p", subject="Between", blocked_by=["T-001"], blocks=["T-002"])["id"] == "T-003"
    assert blocked_by(plans) == {"T-001": [], "T-002": ["T-001", "T-003"], "T-003": ["T-001"]}


def test_an_edit_may_turn_a_dependency_round(plans: Plans) -> None:
    planned(plans, {"T-001": [], "T-002": ["T-001"]})
    view = plans.update("p", "T-001", blocks=[], blocked_by=["T-002"])
    assert (view["blocks"], view["blockedBy"]) == ([], ["T-002"])
    assert ready(plans) == ["T-002"]


# -- keys that are yet to come, and those that never will ------------------------------------------------


def test_a_key_that_is_yet_to_come_is_kept_and_holds_when_that_step_is_made(plans: Plans) -> None:
    """As in the document's own example, where the first step blocks the third."""
    plans.create("p")
    view = plans.add_step("p", subject="Build frontend", blocks=["T-003", "T-005"])
    assert view["blocks"] == ["T-003", "T-005"]
    assert plans.add_step("p", subject="Build backend")["blockedBy"] == []
    view = plans.add_step("p", subject="Integration tests", blocked_by=["T-002"])
    assert (view["blockedBy"], view["ready"]) == (["T-002", "T-001"], False)
    assert plans.get("p", "T-001")["blocks"] == ["T-003", "T-005"]
    complete(plans, "T-001")
    assert plans.add_step("p", subject="Four")["ready"]
    # It was completed before, and holds nothing up.
    view = plans.add_step("p", subject="Five")
    assert (view["blockedBy"], view["ready"]) == (["T-001"], True)


def test_what_is_yet_to_come_is_edited_like_the_rest(plans: Plans) -> None:
    plans.create("p")
    plans.add_step("p", subject="One", blocks=["T-002", "T-003", "T-004"])
    assert plans.update("p", "T-001", blocks=["T-003"])["blocks"] == ["T-003"]
    assert plans.update("p", "T-001", add_blocks=["T-005"])["blocks"] == ["T-003", "T-005"]
    assert plans.update("p", "T-001", subject="Other")["blocks"] == ["T-003", "T-005"]
    made = [plans.add_step("p", subject="Next")["blockedBy"] for _ in range(4)]
    assert made == [[], ["T-001"], [], ["T-001"]]


def test_a_cycle_through_a_key_that_was_yet_to_come_is_refused(plans: Plans, place: Place) -> None:
    plans.create("p")
    plans.add_step("p", subject="One", blocks=["T-003"])
    plans.add_step("p", subject="Two", blocks=["T-001"])
    with refused(place, DependencyCycle, "T-001"):
        plans.add_step("p", subject="Three", blocks=["T-002"])
    with refused(place, DependencyCycle, "T-001"):
        plans.add_step("p", subject="Three", blocks=["T-001"])
    assert plans.add_step("p", subject="Three")["blockedBy"] == ["T-001"]


def test_a_deleted_step_is_to_block_nothing_that_comes(plans: Plans) -> None:
    plans.create("p")
    plans.add_step("p", subject="One", blocks=["T-002"])
    assert plans.delete("p", "T-001")["blocks"] == []
    assert plans.add_step("p", subject="Two")["ready"]


NO_STEPS = ("T-002", "T-003", "T-000", "T-1", "T-0003", "t-004", "X-004", "T-004x", "T-9999999999")


@pytest.mark.parametrize("field", ["blocked_by", "blocks", "add_blocked_by", "add_blocks"])
def test_keys_of_no_step_are_refused(plans: Plans, place: Place, field: str) -> None:
    """Two of them are deleted; the others are none that a step could ever get."""
    planned(plans, {"T-001": [], "T-002": [], "T-003": []})
    plans.delete("p", "T-002")
    plans.delete("p", "T-003")
    for key in NO_STEPS if field.endswith("blocks") else (*NO_STEPS, "T-009"):
        with refused(place, StepNotFound):
            plans.update("p", "T-001", **{field: [key]})
        if not field.startswith("add"):
            with refused(place, StepNotFound):
                plans.add_step("p", subject="More", **{field: ["T-001", key]})
    if field.endswith("blocks"):
        # That one may still come.
        assert plans.update("p", "T-001", **{field: ["T-009"]})["blocks"] == ["T-009"]


# -- what may be given more to wait for ------------------------------------------------------------------


@pytest.mark.parametrize("state", ["in_progress", "completed", "cancelled", "deleted"])
def test_a_step_that_runs_or_has_ended_is_given_nothing_more_to_wait_for(
    plans: Plans, place: Place, state: str
) -> None:
    planned(plans, {"T-001": [], "T-002": [], "T-003": []})
    if state in ("in_progress", "completed"):
        plans.start("p", "T-002")
    if state == "completed":
        plans.complete("p", "T-002")
    elif state != "in_progress":
        {"cancelled": plans.cancel, "deleted": plans.delete}[state]("p", "T-002")
    from_other_end = StepNotFound if state == "deleted" else StateConflict
    for field in ("blocked_by", "add_blocked_by"):
        with refused(place, StateConflict):
            plans.update("p", "T-002", **{field: ["T-001"]})
    for field in ("blocks", "add_blocks"):
        with refused(place, from_other_end):
            plans.update("p", "T-001", **{field: ["T-002"]})
    with refused(place, from_other_end):
        plans.add_step("p", subject="Before", blocks=["T-002"])
    # It may block others all the same.
    if state != "deleted":
        assert plans.update("p", "T-002", blocks=["T-003"])["blocks"] == ["T-003"]


def test_a_running_step_may_be_given_less_or_the_same_to_wait_for(plans: Plans) -> None:
    planned(plans, {"T-001": [], "T-002": [], "T-003": ["T-001", "T-002"]})
    complete(plans, "T-001")
    complete(plans, "T-002")
    plans.start("p", "T-003")
    assert plans.update("p", "T-003", blocked_by=["T-002", "T-001"])["blockedBy"] == ["T-002", "T-001"]
    assert plans.update("p", "T-003", add_blocked_by=["T-001"])["blockedBy"] == ["T-002", "T-001"]
    assert plans.update("p", "T-003", blocked_by=["T-001"])["blockedBy"] == ["T-001"]
    assert plans.complete("p", "T-003")["status"] == "completed"


def test_what_waits_for_a_decision_may_be_given_more_to_wait_for(plans: Plans) -> None:
    planned(plans, {"T-001": [], "T-002": []}, retries=0)
    plans.fail("p", "T-002", attempt=plans.start("p", "T-002")["attempt"])
    assert plans.update("p", "T-002", blocked_by=["T-001"])["status"] == "escalated"
    view = plans.decide("p", "T-002", "retry")
    assert (view["status"], view["ready"], view["waitingFor"]) == ("pending", False, ["T-001"])
    assert complete(plans, "T-001")["unblocked"] == ["T-002"]


# -- what holds a step up, and what frees it -------------------------------------------------------------


def hold_up(plans: Plans, clock: FakeClock, how: str) -> None:
    """Bring the first step to where others wait for it in vain."""
    if how == "cancelled":
        plans.cancel("p", "T-001")
    elif how == "partial":
        token = plans.start("p", "T-001")["attempt"]
        assert token is not None
        plans.heartbeat(token, output="the half")
        clock.advance(120)
        plans.advance("p")
    else:
        plans.fail("p", "T-001", attempt=plans.start("p", "T-001")["attempt"])
    assert plans.get("p", "T-001")["status"] == how


@pytest.mark.parametrize("how", ["failed", "cancelled", "escalated", "partial"])
def test_dependents_of_what_did_not_work_out_stay_blocked_and_say_by_what(
    plans: Plans, clock: FakeClock, how: str
) -> None:
    waits = {"T-001": [], "T-002": [], "T-003": ["T-001", "T-002"], "T-004": ["T-003"]}
    planned(plans, waits, retries=0, partial_ok=True, on_exhausted="fail" if how == "failed" else "escalate")
    hold_up(plans, clock, how)
    assert "unblocked" not in complete(plans, "T-002")
    listed = {step["id"]: step["waitingFor"] for step in plans.steps("p", status="pending")}
    assert listed == {"T-003": ["T-001"], "T-004": ["T-003"]}
    assert ready(plans) == []
    with pytest.raises(StateConflict, match="waitingFor names them"):
        plans.start("p", "T-003")
    # It helps to delete what holds it up, or to wait for it no more.
    assert plans.update("p", "T-003", blocked_by=["T-002"])["ready"]
    assert plans.update("p", "T-003", blocked_by=["T-001"])["waitingFor"] == ["T-001"]
    view = plans.delete("p", "T-001")
    assert view["unblocked"] == ["T-003"]
    assert ready(plans) == ["T-003"]


def test_a_deleted_step_frees_what_waited_for_it_and_says_so(plans: Plans) -> None:
    waits = {"T-001": [], "T-002": [], "T-003": ["T-001"], "T-004": ["T-001", "T-002"], "T-005": ["T-004"]}
    planned(plans, waits)
    view = plans.delete("p", "T-001")
    assert (view["status"], view["unblocked"]) == ("deleted", ["T-003"])
    assert view.get("notes") == ["no longer waiting for T-001: T-003, T-004"]
    assert [step["id"] for step in plans.steps("p")] == ["T-002", "T-003", "T-004", "T-005"]
    assert blocked_by(plans) == {"T-001": [], "T-002": [], "T-003": [], "T-004": ["T-002"], "T-005": ["T-004"]}
    # In the middle of a chain nobody waits on for what came before.
    view = plans.delete("p", "T-004")
    assert (view["unblocked"], view["blockedBy"]) == (["T-005"], [])
    assert blocks(plans)["T-002"] == []
    assert ready(plans) == ["T-002", "T-003", "T-005"]
    assert "notes" not in plans.delete("p", "T-002")
    assert plans.get("p", "T-002")["status"] == "deleted"


def test_a_step_that_is_deleted_while_it_runs_frees_what_waited_for_it(plans: Plans) -> None:
    planned(plans, {"T-001": [], "T-002": ["T-001"]})
    plans.start("p", "T-001")
    assert plans.delete("p", "T-001")["unblocked"] == ["T-002"]


# -- many ------------------------------------------------------------------------------------------------


def grown(plans: Plans, place: Place, waits: dict[int, list[int]], completed: int = 0) -> None:
    """Many steps at once, as copies of one that the plan made itself; the first ones completed already."""
    planned(plans, {"T-001": []})
    url = place if isinstance(place, sa.URL) else sa.URL.create("sqlite", database=str(place))
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    tables = sa.MetaData()
    with engine.begin() as connection:
        tables.reflect(connection, only=["tsg_plans", "tsg_plan_steps", "tsg_plan_dependencies", "tsg_plan_learnings"])
        steps = tables.tables["tsg_plan_steps"]
        pattern = dict(connection.execute(sa.select(steps)).one()._mapping)
        first = pattern.pop("pk")
        copies = []
        for number, blockers in waits.items():
            is_open = sum(blocker > completed for blocker in blockers)
            done = number <= completed
            ended = {"status": "completed", "completed_at": pattern["created_at"]} if done else {}
            named = {"number": number, "key": f"T-{number:03d}", "open_blockers": is_open}
            copies.append({**pattern, **named, "completed_at": None, **ended, "pk": first - 1 + number})
        connection.execute(sa.delete(steps))
        connection.execute(sa.insert(steps), copies)
        edges = [
            {"step_pk": first - 1 + number, "blocker_pk": first - 1 + blocker, "place": at}
            for number, blockers in waits.items()
            for at, blocker in enumerate(blockers)
        ]
        connection.execute(sa.insert(tables.tables["tsg_plan_dependencies"]), edges)
        learned = [
            {"step_pk": first - 1 + number, "text": f"from {number}", "learned_at": 1_000.0}
            for number in range(1, completed + 1)
        ]
        if learned:
            connection.execute(sa.insert(tables.tables["tsg_plan_learnings"]), learned)
        status = {"status": "running"} if completed else {}
        connection.execute(sa.update(tables.tables["tsg_plans"]).values(next_number=len(waits) + 1, **status))
        if engine.dialect.name == "postgresql":
            connection.execute(sa.text("ANALYZE"))


def median(times: int, act: Callable[[], Any]) -> float:
    """Seconds of this process's own work, which on SQLite is all there is: the machine has other things to do."""
    taken = []
    for _ in range(times):
        begun = time.process_time()
        act()
        taken.append(time.process_time() - begun)
    return statistics.median(taken)


def test_among_ten_thousand_steps_each_step_of_work_takes_milliseconds(plans: Plans, place: Place) -> None:
    """A chain of 5,000, beside 5,000 others that wait for two each, but for a few."""
    waits = {number: [number - 1] if number > 1 else [] for number in range(1, 5_001)}
    for number in range(5_001, 10_001):
        waits[number] = [] if number % 250 == 0 else [number // 2, (number * 7) % (number - 1) + 1]
        waits[number] = list(dict.fromkeys(waits[number]))
    grown(plans, place, waits)
    assert len(plans.steps("p", ready=True)) == 21
    taken = {
        "ready": median(9, lambda: plans.steps("p", ready=True)),
        "advance": median(9, lambda: plans.advance("p")),
        "show": median(9, lambda: plans.show("p")),
        "get": median(9, lambda: plans.get("p", "T-4000")),
    }
    claimed: list[Any] = []
    taken["claim"] = median(9, lambda: claimed.append(plans.claim("p", "hermes")))
    assert claimed[0]["id"] == "T-001"
    assert len({view["id"] for view in claimed}) == 9
    left = iter(claimed)

    def finish() -> None:
        view = next(left)
        plans.complete("p", view["id"], attempt=view["attempt"], learnings=["one"])

    taken["complete"] = median(9, finish)
    taken["start"] = median(1, lambda: plans.start("p", "T-002"))
    slow = {what: seconds for what, seconds in taken.items() if seconds > 0.05}
    assert slow == {}
    with refused(place, DependencyCycle) as caught:
        plans.update("p", "T-003", add_blocked_by=["T-5000"])
    assert len(caught.value.keys) == 4_999  # type: ignore[attr-defined]


def test_the_last_of_five_thousand_is_handed_what_all_before_it_have_learned(plans: Plans, place: Place) -> None:
    grown(plans, place, {number: [number - 1] if number > 1 else [] for number in range(1, 5_002)}, completed=4_999)
    begun = time.process_time()
    view = plans.claim("p", "hermes")
    assert view is not None
    assert view["id"] == "T-5000"
    assert view["learnings"] == [f"from {number}" for number in range(1, 5_000)]
    assert plans.complete("p", "T-5000", attempt=view["attempt"])["unblocked"] == ["T-5001"]
    assert len(plans.steps("p", all=True)) == 5_001
    assert time.process_time() - begun < 3


def test_a_step_that_five_thousand_wait_for_frees_them_all(plans: Plans, place: Place) -> None:
    grown(plans, place, {number: [1] if number > 1 else [] for number in range(1, 5_002)})
    begun = time.process_time()
    keys = [f"T-{number:03d}" for number in range(2, 5_002)]
    assert plans.get("p", "T-001")["blocks"] == keys
    assert complete(plans, "T-001")["unblocked"] == keys
    assert time.process_time() - begun < 3


def test_a_step_that_five_thousand_wait_for_is_deleted_and_frees_them_all(plans: Plans, place: Place) -> None:
    grown(plans, place, {number: [1] if number > 1 else [] for number in range(1, 5_002)})
    begun = time.process_time()
    assert plans.delete("p", "T-001")["unblocked"] == [f"T-{number:03d}" for number in range(2, 5_002)]
    assert time.process_time() - begun < 3


# -- what is refused -------------------------------------------------------------------------------------


def raising() -> Iterator[str]:
    yield "T-001"
    raise RuntimeError


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


def circular() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["a"] = found
    return found


NAN, INF = float("nan"), float("inf")
ANY = [5, 1.5, True, b"x", [], {}, (), object()]
WORDS = ["", " p", "p ", "a\nb", "a\x00", "a\x1b", "a\u2028b", "\ud800", "x" * 201]
NAME = [None, *ANY, *WORDS]
AGENT = [*ANY, *WORDS]
KEY = [None, *ANY, "", " T-001", "T 001", "T-001\n", "T-\u00e9", "../T-001", "T/001", "\ud800", "T\x00", "x" * 65]
TEXT = [*ANY, "a\x00", "a\ud800b", "x" * 1_000_001]
SUBJECT = [None, *TEXT, "", " \n\t"]
TIMEOUTS = [1e306, 1.7e308, 1e-300, 5e-324]
SECONDS = [-1, -0.001, NAN, INF, -INF, True, "soon", "", [], {}, object(), 10**400, "9" * 2_000, 1j]
RETRIES = [None, -1, 1.5, 3.0, "3", True, 2**31, 10**400, [], {}, object()]
FLAG = [None, 0, 1, "true", "", [], {}, object()]
BACKOFF = [None, *ANY, "", "linear", "Fixed", "\ud800"]
LINKS = [
    None,
    5,
    True,
    "T-001",
    b"T-001",
    {"T-001": 1},
    [5],
    [None],
    [""],
    ["T 001"],
    ["\ud800"],
    [["T-001"]],
    object(),
]
OBJECT = [5, "x", "{}", b"{}", [], [("a", 1)], True, object(), {1: 2}, {None: 1}, {True: 1}]
OBJECT += [{"a": each} for each in (NAN, INF, -INF, object(), b"x", {1, 2}, 1j, 10**5_000, "x" * 1_000_001)]
OBJECT += [{"a": [{"b": NAN}]}, {"a": {1: 2}}, nested(100_000), circular()]
POLICY = [None, 5, "fixed", [], ["count"], object(), {"cnt": 1}, {"count": -1}, {"count": "3"}, {"count": None}]
POLICY += [{"count": 3, "backoff": each} for each in BACKOFF]
POLICY += [{"factor": 0.5}, {"base_seconds": NAN}, {"cap_seconds": -1}, {"count": 1, "retries": 1}, {1: 2}]
TOKEN = [5, 1.5, True, b"x", [], {}, object(), "", "x", "0" * 31, "\ud800", f" {UNKNOWN}", UNKNOWN + "0", "0" * 5_000]
LEARNINGS = [None, 5, True, "text", b"text", {"a": 1}, [5], [None], ["a\x00"], ["\ud800"], ["x" * 1_000_001], object()]
ONE_OF = [*ANY, "", "panic", "Pending", "ready", "\ud800"]

OF_A_STEP = {
    "subject": SUBJECT,
    "description": TEXT,
    "active_form": TEXT,
    "owner": AGENT,
    "metadata": OBJECT,
    "params": OBJECT,
    "thread_id": TEXT,
    "session_name": TEXT,
    "session_resume": TEXT,
    "timeout_seconds": [*SECONDS, *TIMEOUTS],
    "retries": RETRIES,
    "backoff": BACKOFF,
    "base_seconds": SECONDS,
    "factor": [*SECONDS, 0, 0.5],
    "cap_seconds": SECONDS,
    "retry_policy": POLICY,
    "fallback_agent": AGENT,
    "partial_ok": FLAG,
    "blocked_by": LINKS,
    "blocks": LINKS,
}
OF_A_PLAN = {
    "description": TEXT,
    "delivery_required": FLAG,
    "on_exhausted": [None, *ONE_OF],
    "grace_seconds": [None, *SECONDS],
    **{
        field: OF_A_STEP[field]
        for field in ("timeout_seconds", "retries", "backoff", "base_seconds", "factor", "cap_seconds")
        + ("fallback_agent", "partial_ok")
    },
}

#: Each verb: what it takes so that it would work, and what it must not be given.
VERBS: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "create": ({"name": "q"}, {"name": NAME, **OF_A_PLAN}),
    "add_step": ({"plan": "p", "subject": "More"}, {"plan": NAME, **OF_A_STEP}),
    "update": (
        {"plan": "p", "key": "T-001"},
        {"plan": NAME, "key": KEY, **OF_A_STEP, "add_blocked_by": LINKS, "add_blocks": LINKS},
    ),
    "get": ({"plan": "p", "key": "T-001"}, {"plan": NAME, "key": KEY}),
    "steps": (
        {"plan": "p"},
        {"plan": NAME, "status": ONE_OF, "owner": AGENT, "ready": FLAG[1:], "all": FLAG},
    ),
    "claim": ({"plan": "p", "agent": "hermes"}, {"plan": NAME, "agent": NAME}),
    "open": ({"plan": "p", "key": "T-001"}, {"plan": NAME, "key": KEY, "agent": AGENT}),
    "start": ({"plan": "p", "key": "T-001"}, {"plan": NAME, "key": KEY, "agent": AGENT, "attempt": TOKEN}),
    # Its token is put in as soon as there is one.
    "heartbeat": ({"attempt": UNKNOWN}, {"attempt": [None, *TOKEN], "output": TEXT}),
    "heartbeat_step": ({"plan": "p", "key": "T-002"}, {"plan": NAME, "key": KEY, "attempt": TOKEN, "output": TEXT}),
    "complete": (
        {"plan": "p", "key": "T-002"},
        {"plan": NAME, "key": KEY, "attempt": TOKEN, "output": TEXT, "learnings": LEARNINGS},
    ),
    "fail": ({"plan": "p", "key": "T-002"}, {"plan": NAME, "key": KEY, "attempt": TOKEN, "error": TEXT}),
    "accept": ({"plan": "p", "key": "T-003"}, {"plan": NAME, "key": KEY, "remaining": SUBJECT[1:]}),
    "decide": (
        {"plan": "p", "key": "T-003", "decision": "reassign", "to": "apollo"},
        {"plan": NAME, "key": KEY, "decision": [None, *ONE_OF, "retry", "cancel", "complete"], "to": NAME},
    ),
    **{verb: ({"plan": "p", "key": "T-001"}, {"plan": NAME, "key": KEY}) for verb in ("cancel", "delete")},
    **{
        verb: ({"plan": "p"}, {"plan": NAME})
        for verb in ("show", "advance", "cancel_plan", "remove", "graph", "learnings")
    },
}


@pytest.fixture
def busy(plans: Plans, clock: FakeClock) -> Plans:
    """A plan with a step that is ready, one that runs, and one that is partial."""
    planned(plans, {"T-001": [], "T-002": [], "T-003": []}, partial_ok=True)
    token = plans.start("p", "T-003")["attempt"]
    assert token is not None
    plans.heartbeat(token, output="the half")
    clock.advance(120)
    plans.advance("p")
    plans.start("p", "T-002")
    return plans


def test_malformed_arguments_are_invalid_input_and_nothing_is_stored(busy: Plans, place: Place) -> None:
    token = busy.get("p", "T-002")["attempt"]
    before = rows(place)
    wrong = []
    tried = 0
    for verb, (template, bad) in VERBS.items():
        fitting = {**template, "attempt": token} if verb == "heartbeat" else template
        for argument, values in bad.items():
            for value in values:
                tried += 1
                try:
                    getattr(busy, verb)(**{**fitting, argument: value})
                except InvalidInput as error:
                    # Nothing is said of the value.
                    if type(error) is not InvalidInput or error.__cause__ is not None:
                        wrong.append((verb, argument, repr(value)[:60], repr(error)[:100]))
                except Exception as error:
                    wrong.append((verb, argument, repr(value)[:60], repr(error)[:100]))
                else:
                    wrong.append((verb, argument, repr(value)[:60], "was taken"))
        with pytest.raises(InvalidInput):
            getattr(busy, verb)(**{**fitting, next(iter(fitting)): raising()})
    assert wrong == []
    assert tried > 800
    assert rows(place) == before


def test_what_fits_is_taken_where_the_malformed_was_refused(busy: Plans) -> None:
    """Else the test above could not fail for the reason that it is about."""
    for verb in (
        "add_step",
        "update",
        "get",
        "steps",
        "heartbeat_step",
        "decide",
        "open",
        "show",
        "graph",
        "learnings",
    ):
        getattr(busy, verb)(**VERBS[verb][0])
    for verb in ("complete", "create", "claim", "cancel", "advance", "remove"):
        getattr(busy, verb)(**VERBS[verb][0])


@pytest.mark.parametrize("field", ["blocked_by", "blocks"])
def test_keys_whose_source_breaks_off_are_refused(busy: Plans, place: Place, field: str) -> None:
    with refused(place, InvalidInput):
        busy.add_step("p", subject="More", **{field: raising()})
    with refused(place, InvalidInput):
        busy.update("p", "T-001", **{field: raising()})
    with refused(place, InvalidInput):
        busy.complete("p", "T-002", learnings=raising())


def test_fields_that_there_are_not_or_that_are_not_the_caller_s_are_refused(busy: Plans, place: Place) -> None:
    before = rows(place)
    for field in ("status", "id", "colour", "ready", "attempts", "due_at", "activeForm", "pk", "output", "", "\ud800"):
        with pytest.raises(InvalidInput, match="no such field"):
            busy.update("p", "T-001", subject="Other", **{field: "pending"})
    assert rows(place) == before


def test_a_policy_is_given_whole_or_in_parts(busy: Plans, place: Place) -> None:
    policy = {"count": 1, "backoff": "fixed"}
    with refused(place, InvalidInput, "not both"):
        busy.add_step("p", subject="More", retry_policy=policy, retries=2)
    with refused(place, InvalidInput, "not both"):
        busy.update("p", "T-001", retry_policy=policy, factor=2)


def test_an_agent_is_named_for_a_reassignment_and_for_nothing_else(busy: Plans, place: Place) -> None:
    for decision, to in (("retry", "apollo"), ("cancel", "apollo"), ("complete", "apollo"), ("reassign", None)):
        with refused(place, InvalidInput):
            busy.decide("p", "T-003", decision, to=to)


def test_what_is_not_there_is_not_found_and_nothing_is_stored(busy: Plans, place: Place) -> None:
    expected: list[tuple[type[LedgerError], Callable[[], Any]]] = []
    for verb, (fitting, _) in VERBS.items():
        act = getattr(busy, verb)
        if "plan" in fitting:
            expected.append((PlanNotFound, lambda act=act, fitting=fitting: act(**{**fitting, "plan": "q"})))
        if "key" in fitting:
            expected.append((StepNotFound, lambda act=act, fitting=fitting: act(**{**fitting, "key": "T-009"})))
    for verb in ("complete", "fail", "heartbeat_step"):
        act = getattr(busy, verb)
        expected.append((TaskNotFound, lambda act=act: act("p", "T-002", attempt=UNKNOWN)))
    expected.append((TaskNotFound, lambda: busy.heartbeat(UNKNOWN)))
    before = rows(place)
    for error, call in expected:
        with pytest.raises(error) as caught:
            call()
        assert caught.type is error
    assert len(expected) > 30
    assert rows(place) == before


#: JSON values that are taken, whatever the database can hold as text.
TAKEN: dict[str, Any] = {
    "nothing": None,
    "numbers": [0, -1, 1.5, 1e-300, 1.7e308, 2**63, 10**30, True, False],
    "text": ["", "a\x00b", "\ud800", "\U0001f600", "\u2028", '"\\', "\u00e9"],
    "": {"\x00": {"\ud800": []}, " ": {}},
    "long": "x" * 500_000,
}


@pytest.mark.parametrize("field", ["metadata", "params"])
def test_json_comes_back_as_it_was_given(plans: Plans, field: str) -> None:
    planned(plans, {"T-001": []})
    assert plans.update("p", "T-001", **{field: TAKEN})[field] == TAKEN  # type: ignore[literal-required]
    found = plans.get("p", "T-001")[field]  # type: ignore[literal-required]
    assert json.dumps(found) == json.dumps(TAKEN)
    assert plans.update("p", "T-001", **{field: None})[field] == {}  # type: ignore[literal-required]


def test_whatever_timeout_is_taken_is_shown_as_a_number_and_can_be_started(plans: Plans) -> None:
    for seconds in (0.001, 0.0015, 0.1, 1e15, 1e300, 1.7e305):
        name = f"{seconds}"
        plans.create(name, timeout_seconds=seconds, cap_seconds=seconds, grace_seconds=seconds)
        view = plans.add_step(name, subject="Wait")
        for shown in (view, plans.show(name), plans.start(name, "T-001")):
            json.dumps(shown, allow_nan=False)
        assert view["timeout_ms"] == pytest.approx(seconds * 1000, abs=1e-5)


def test_a_timeout_that_has_no_number_of_milliseconds_is_refused(plans: Plans, place: Place) -> None:
    planned(plans, {"T-001": []})
    for seconds in (1e306, 1.7e308):
        with refused(place, InvalidInput):
            plans.create("q", timeout_seconds=seconds)
        with refused(place, InvalidInput):
            plans.add_step("p", subject="Wait", timeout_seconds=seconds)
        with refused(place, InvalidInput):
            plans.update("p", "T-001", timeout_seconds=seconds)


@pytest.mark.parametrize(
    "text", ["Ω \U0001f600 \u202e", "a\tb\r\nc", "\x01\x7f", "'; DROP TABLE tsg_plans; --", "x" * 1_000_000]
)
def test_text_comes_back_as_it_was_given(plans: Plans, text: str) -> None:
    planned(plans, {"T-001": []})
    plans.update("p", "T-001", subject=text, description=text, thread_id=text)
    token = plans.start("p", "T-001")["attempt"]
    assert token is not None
    assert plans.heartbeat(token, output=text)["output"] == text
    view = plans.complete("p", "T-001", learnings=[text, text])
    assert [view["subject"], view["description"], view["threadID"], view["output"]] == [text] * 4
    assert [learning["text"] for learning in plans.learnings("p")] == [text] * 2
