"""What is read of a plan to be shown: all of it in one transaction, with nothing changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from tests.cockpit import pictures
from tests.cockpit.conftest import on_sqlite, scene, step
from tests.conftest import FakeClock
from tsg import InvalidInput, Ledger, PlanNotFound, Plans
from tsg.cockpit import render
from tsg.cockpit.scene import MOST, Stand, look, overview
from tsg.plan.tables import steps

Act = Callable[[Plans, Ledger, FakeClock], object]


def _start(plans: Plans, agent: str | None = None) -> str:
    attempt = plans.start("feature", "T-001", agent=agent)["attempt"]
    assert attempt is not None
    return attempt


def _inbox(plans: Plans, ledger: Ledger, clock: FakeClock) -> None:
    pictures.dispatch(ledger, plans.open("feature", "T-001")["attempt"], "Demeter", inbox_at=clock.now)


def _partial(plans: Plans, ledger: Ledger, clock: FakeClock) -> None:
    plans.update("feature", "T-001", partial_ok=True)
    plans.heartbeat(_start(plans), output="half of it")
    clock.advance(500)
    plans.advance("feature")


def _ended(plans: Plans, ledger: Ledger, clock: FakeClock) -> None:
    ledger.close_task(_start(plans), "succeeded")


def _retry(plans: Plans, ledger: Ledger, clock: FakeClock) -> None:
    plans.update("feature", "T-001", retries=1)
    _start(plans)
    plans.fail("feature", "T-001", error="no luck")


def _fail(plans: Plans, ledger: Ledger, clock: FakeClock) -> None:
    _start(plans)
    plans.fail("feature", "T-001", error="no luck")


STANDS: dict[Stand, Act] = {
    Stand.READY: lambda plans, ledger, clock: None,
    Stand.OPENED: lambda plans, ledger, clock: plans.open("feature", "T-001"),
    Stand.SENT: lambda plans, ledger, clock: pictures.dispatch(
        ledger, plans.open("feature", "T-001")["attempt"], "Demeter"
    ),
    Stand.INBOX: _inbox,
    Stand.WORKING: lambda plans, ledger, clock: _start(plans),
    Stand.ENDED: _ended,
    Stand.RETRY: _retry,
    Stand.PARTIAL: _partial,
    Stand.ESCALATED: _fail,
    Stand.FAILED: _fail,
    Stand.DONE: lambda plans, ledger, clock: (_start(plans), plans.complete("feature", "T-001", output="here")),
    Stand.CANCELLED: lambda plans, ledger, clock: plans.cancel("feature", "T-001"),
}


@pytest.mark.parametrize("stand", STANDS)
def test_each_way_a_step_can_stand_is_told_apart(plans: Plans, ledger: Ledger, clock: FakeClock, stand: Stand) -> None:
    plans.create("feature", retries=0, on_exhausted="fail" if stand is Stand.FAILED else "escalate")
    plans.add_step("feature", subject="first", owner="Demeter")
    plans.add_step("feature", subject="second", blocked_by=["T-001"])
    STANDS[stand](plans, ledger, clock)
    first, second = look(plans, "feature").steps
    assert first.stand is stand
    assert first.agent == "Demeter"
    done = stand is Stand.DONE
    assert (second.stand, second.waiting_for) == ((Stand.READY, ()) if done else (Stand.BLOCKED, ("T-001",)))


def test_all_ways_are_tried() -> None:
    assert {*STANDS, Stand.BLOCKED} == set(Stand)


@on_sqlite
def test_a_running_step_tells_since_when_and_until_when(feature: Plans, clock: FakeClock) -> None:
    clock.now = 2_000.0
    _start(feature)
    first = look(feature, "feature").steps[0]
    assert (first.started_at, first.deadline_at, first.ended_at, first.attempts) == (2_000.0, 2_120.0, None, 1)


@on_sqlite
def test_a_completed_step_tells_how_long_it_took_and_what_came_of_it(feature: Plans, clock: FakeClock) -> None:
    _start(feature)
    clock.advance(30)
    feature.complete("feature", "T-001", output="notes.md")
    first = look(feature, "feature").steps[0]
    assert (first.started_at, first.ended_at, first.output) == (1_000.0, 1_030.0, "notes.md")


@on_sqlite
def test_a_failed_step_tells_why_and_when_it_is_due_again(plans: Plans, clock: FakeClock) -> None:
    plans.create("feature")
    plans.add_step("feature", subject="first")
    _start(plans)
    clock.advance(1)
    plans.fail("feature", "T-001", error="no luck")
    first = look(plans, "feature").steps[0]
    assert (first.stand, first.error, first.due_at) == (Stand.RETRY, "no luck", 1_006.0)


def test_an_attempt_that_the_ledger_has_let_go_of_is_still_told_of(
    feature: Plans, ledger: Ledger, clock: FakeClock
) -> None:
    _start(feature)
    feature.complete("feature", "T-001")
    feature.cancel_plan("feature")
    clock.advance(100)
    ledger.prune(50)
    first = look(feature, "feature").steps[0]
    assert (first.stand, first.started_at, first.ended_at) == (Stand.DONE, None, 1_000.0)


@on_sqlite
def test_who_does_a_step_without_owner_is_the_plans_agent_until_somebody_took_it(plans: Plans) -> None:
    plans.create("feature", agent="Hestia")
    plans.add_step("feature", subject="first")
    assert look(plans, "feature").steps[0].agent == "Hestia"
    plans.claim("feature", "Hermes")
    assert look(plans, "feature").steps[0].agent == "Hermes"


@on_sqlite
def test_only_agents_with_a_running_attempt_are_at_work_each_once(plans: Plans, ledger: Ledger) -> None:
    plans.create("feature")
    for owner in ("Demeter", "Demeter", "Hermes", None, None, "Iris"):
        plans.add_step("feature", subject="one more", owner=owner)
    for number in range(1, 6):
        plans.start("feature", f"T-00{number}")
    plans.open("feature", "T-006")
    assert look(plans, "feature").agents_at_work == 4


def test_looking_changes_nothing_even_where_something_is_due(feature: Plans, ledger: Ledger, clock: FakeClock) -> None:
    def stored() -> list[Any]:
        return ledger.read(lambda connection, _: list(connection.execute(sa.select(steps).order_by(steps.c.pk))))

    _start(feature)
    clock.advance(10_000)
    before = stored()
    assert look(feature, "feature").steps[0].stand is Stand.WORKING
    assert stored() == before


def test_the_same_state_gives_an_equal_scene_whatever_the_time_and_whoever_vouches(
    feature: Plans, clock: FakeClock
) -> None:
    attempt = _start(feature)
    feature.heartbeat(attempt)
    before = look(feature, "feature")
    clock.advance(50)
    feature.heartbeat(attempt)
    assert look(feature, "feature") == before
    assert before.changed_at == 1_000.0
    feature.complete("feature", "T-001")
    after = look(feature, "feature")
    assert after != before
    assert after.changed_at == 1_050.0


@on_sqlite
def test_deleting_a_step_is_a_change_too(feature: Plans, clock: FakeClock) -> None:
    clock.advance(7)
    feature.delete("feature", "T-003")
    found = look(feature, "feature")
    assert (found.changed_at, found.total) == (1_007.0, 2)


@pytest.mark.parametrize(
    ("stands", "done", "percent"),
    [
        ([], 0, 0),
        ([Stand.DONE, Stand.DONE, Stand.READY], 2, 66),
        ([Stand.DONE] * 199 + [Stand.WORKING], 199, 99),
        ([Stand.DONE, Stand.CANCELLED], 1, 50),
        ([Stand.DONE] * 3, 3, 100),
    ],
)
def test_a_hundred_percent_is_only_what_is_done_wholly(stands: list[Stand], done: int, percent: int) -> None:
    found = scene(*(step(f"T-{place}", stand) for place, stand in enumerate(stands)))
    assert (found.done, found.percent) == (done, percent)


@pytest.mark.parametrize(
    ("edges", "is_chain"),
    [((), True), (((0, 1), (1, 2)), True), (((1, 2), (0, 1)), True), (((0, 1),), False), (((0, 1), (0, 2)), False)],
)
def test_what_only_follows_each_other_is_a_chain(edges: tuple[tuple[int, int], ...], is_chain: bool) -> None:
    assert scene(step("a"), step("b"), step("c"), edges=edges).is_chain is is_chain


def test_what_waits_for_what_is_told_by_places_without_what_is_deleted(feature: Plans) -> None:
    feature.add_step("feature", subject="fourth", blocked_by=["T-003", "T-001"])
    assert look(feature, "feature").edges == ((0, 1), (1, 2), (2, 3), (0, 3))
    feature.delete("feature", "T-002")
    found = look(feature, "feature")
    assert [found.steps[place].key for edge in found.edges for place in edge] == ["T-003", "T-004", "T-001", "T-004"]


def test_of_a_long_text_only_the_beginning_is_read(plans: Plans) -> None:
    plans.create("feature", description="d" * 100_000)
    plans.add_step("feature", subject="s" * MOST, description="é" * (MOST + 1))
    found = look(plans, "feature")
    assert found.description == "d" * MOST + "…"
    assert (found.steps[0].subject, found.steps[0].description) == ("s" * MOST, "é" * MOST + "…")


@on_sqlite
@pytest.mark.parametrize(("name", "error"), [("nothing", PlanNotFound), ("", InvalidInput), ("a\nb", InvalidInput)])
def test_what_is_no_plan_is_refused(plans: Plans, name: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        look(plans, name)


def test_plans_are_listed_the_open_ones_first_and_the_newest_of_each(plans: Plans) -> None:
    for name in ("one", "two", "three", "four"):
        plans.create(name)
    plans.cancel_plan("two")
    plans.add_step("three", subject="a")
    plans.add_step("three", subject="b")
    plans.delete("three", "T-002")
    plans.start("three", "T-001")
    plans.complete("three", "T-001")
    found = overview(plans)
    assert [summary.name for summary in found] == ["four", "one", "three", "two"]
    assert (found[2].done, found[2].total, found[2].percent, found[2].is_open) == (1, 1, 100, False)


def _grow(ledger: Ledger, many: int) -> None:
    """Let a plan of one step have that many more, the second half of them waiting for nothing that is there."""

    def insert(connection: sa.Connection, _: object) -> None:
        row = connection.execute(sa.select(steps)).mappings().one()
        made = {key: value for key, value in row.items() if key not in ("pk", "metadata", "params")}
        made |= {"metadata": "{}", "params": "{}"}
        rows = [
            {**made, "number": number, "key": f"T-{number}", "subject": f"step {number}"}
            for number in range(2, many + 2)
        ]
        connection.execute(sa.insert(steps), rows)

    ledger.write(insert)


def test_ten_thousand_steps_take_as_many_questions_as_one_and_a_page_stays_small(plans: Plans, ledger: Ledger) -> None:
    plans.create("feature")
    plans.add_step("feature", subject="first")
    asked: list[str] = []

    def count(connection: object, cursor: object, statement: str, *_: object) -> None:
        asked.append(statement)

    engine = ledger._opened.engine
    sa.event.listen(engine, "before_cursor_execute", count)
    look(plans, "feature")
    of_one = len([statement for statement in asked if statement.startswith("SELECT")])
    sa.event.remove(engine, "before_cursor_execute", count)
    _grow(ledger, 10_000)
    sa.event.listen(engine, "before_cursor_execute", count)
    asked.clear()
    began = time.monotonic()
    found = look(plans, "feature")
    html = render.page(found)
    took = time.monotonic() - began
    sa.event.remove(engine, "before_cursor_execute", count)
    assert len([statement for statement in asked if statement.startswith("SELECT")]) == of_one
    assert found.total == 10_001
    assert len(html) < 1_000_000
    # A second of it is more than it takes on a slow machine that does something else besides.
    assert took < 5
