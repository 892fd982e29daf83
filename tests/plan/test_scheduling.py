"""The rules of steps, without any database: each combination against the sentences that it has to follow."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from typing import Any

import pytest

from tsg import InvalidInput
from tsg.errors import DependencyCycle
from tsg.plan import scheduling
from tsg.plan.scheduling import (
    Backoff,
    Decision,
    OnExhausted,
    PlanStatus,
    RetryPolicy,
    Situation,
    StepStatus,
    Tally,
    Verdict,
)
from tsg.states import TaskStatus

ENDED_AT = 5_000.0
OWNER, FALLBACK = "hermes", "talos"

# -- what becomes of a step whose attempt has ended ------------------------------------------------------

ENDINGS = ("succeeded", "failed", "timed_out", "cancelled")
#: How many tries have failed before this one, of a step that may be retried twice: this one leaves a retry, or none.
FAILED_BEFORE = {"retries left": 0, "one retry left": 1, "none left": 2, "more than the policy has": 7}
#: The agent that is named for the end, whether it has had its turn, and who has the step.
FALLBACKS = {
    "no fallback": (None, False, OWNER),
    "no fallback and nobody's": (None, False, None),
    "no fallback any more": (None, True, FALLBACK),
    "a fallback": (FALLBACK, False, OWNER),
    "a fallback of nobody's step": (FALLBACK, False, None),
    "a fallback that has had its turn": (FALLBACK, True, FALLBACK),
    "a fallback that has had its turn with another's step": (FALLBACK, True, OWNER),
    "a fallback that is the owner": (FALLBACK, False, FALLBACK),
}

#: The rules, in the order in which they are asked: the first whose words all hold decides. `*` holds always.
SENTENCES = """
    succeeded   *         *            *         *         *          *         -> completed
    cancelled   *         *            *         *         *          *         -> cancelled
    timed_out   *         *            *         partial   output     *         -> partial
    *           retries   *            *         *         *          *         -> tried again by the same
    *           *         fallback     its_turn  *         *          *         -> tried again by the fallback
    *           *         *            *         *         *          escalate  -> escalated
    *           *         *            *         *         *          fail      -> failed
"""
RULES = [(words[:7], " ".join(words[8:])) for words in (line.split() for line in SENTENCES.strip().splitlines())]


def sentence_for(ending: str, before: str, fallback: str, partial: bool, output: bool, exhausted: str) -> str:
    """What the table says, which is written in words and knows nothing of how the rules are computed."""
    holds = {
        ending,
        "retries" if before in ("retries left", "one retry left") else "no retries",
        "fallback" if fallback.startswith("a fallback") else "no fallback",
        "its_turn" if fallback in ("a fallback", "a fallback of nobody's step") else "no turn",
        "partial" if partial else "whole",
        "output" if output else "nothing",
        exhausted,
    }
    return next(said for words, said in RULES if all(word == "*" or word in holds for word in words))


COMBINATIONS = list(
    itertools.product(ENDINGS, FAILED_BEFORE, FALLBACKS, (False, True), (False, True), ("escalate", "fail"))
)


def test_the_combinations_reach_every_sentence_of_the_table() -> None:
    assert len(COMBINATIONS) == 4 * 4 * 8 * 2 * 2 * 2
    assert {sentence_for(*each) for each in COMBINATIONS} == {said for _, said in RULES}
    assert len(RULES) == 7


@pytest.mark.parametrize("fallback", FALLBACKS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_becomes_of_a_step_is_what_the_sentences_say(ending: str, fallback: str) -> None:
    tried = 0
    for each in COMBINATIONS:
        if each[0] != ending or each[2] != fallback:
            continue
        tried += 1
        _, before, _, partial_ok, has_output, exhausted = each
        failures = FAILED_BEFORE[before]
        named, fell_back, owner = FALLBACKS[fallback]
        situation = Situation(
            policy=RetryPolicy(count=2),
            failures=failures,
            owner=owner,
            fallback_agent=named,
            fell_back=fell_back,
            partial_ok=partial_ok,
            has_output=has_output,
            on_exhausted=OnExhausted(exhausted),
        )
        said = sentence_for(*each)
        expected = {
            "completed": Verdict(StepStatus.COMPLETED, failures, owner, fell_back, None),
            "cancelled": Verdict(StepStatus.CANCELLED, failures, owner, fell_back, None),
            "partial": Verdict(StepStatus.PARTIAL, failures + 1, owner, fell_back, None),
            # 5 seconds before the first retry, 15 before the second.
            "tried again by the same": Verdict(
                StepStatus.PENDING, failures + 1, owner, fell_back, ENDED_AT + (5 if failures == 0 else 15)
            ),
            "tried again by the fallback": Verdict(StepStatus.PENDING, 0, FALLBACK, True, None),
            "escalated": Verdict(StepStatus.ESCALATED, failures + 1, owner, fell_back, None),
            "failed": Verdict(StepStatus.FAILED, failures + 1, owner, fell_back, None),
        }[said]
        assert scheduling.after_ending(situation, TaskStatus(ending), ENDED_AT) == expected, each
    assert tried == 4 * 2 * 2 * 2


@pytest.mark.parametrize("ending", ["failed", "timed_out"])
@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_a_count_is_of_retries_beyond_the_first_try(count: int, ending: str) -> None:
    situation = Situation(policy=RetryPolicy(count=count))
    tries = 0
    while True:
        tries += 1
        verdict = scheduling.after_ending(situation, TaskStatus(ending), ENDED_AT)
        situation = situation._replace(failures=verdict.failures)
        if verdict.status != StepStatus.PENDING:
            break
    assert tries == count + 1
    assert verdict.status == StepStatus.ESCALATED


def test_the_fallback_agent_has_as_many_tries_as_the_first() -> None:
    situation = Situation(policy=RetryPolicy(count=3), owner=OWNER, fallback_agent=FALLBACK)
    tried: list[tuple[str | None, float | None]] = []
    while True:
        tried.append((situation.owner, None))
        verdict = scheduling.after_ending(situation, TaskStatus.FAILED, ENDED_AT)
        tried[-1] = (situation.owner, verdict.due_at and verdict.due_at - ENDED_AT)
        situation = situation._replace(failures=verdict.failures, owner=verdict.owner, fell_back=verdict.fell_back)
        if verdict.status != StepStatus.PENDING:
            break
    each = [5.0, 15.0, 45.0, None]
    assert tried == [(OWNER, delay) for delay in each] + [(FALLBACK, delay) for delay in each]
    assert verdict.status == StepStatus.ESCALATED


# -- delays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "delays"),
    [
        (RetryPolicy(), [5, 15, 45, 135, 405, 1215, 3600, 3600]),
        (RetryPolicy(backoff="exponential"), [5, 15, 45]),
        (RetryPolicy(backoff="fixed"), [10, 10, 10, 10, 10]),
        (RetryPolicy(backoff="fixed", base_seconds=7), [7, 7, 7]),
        (RetryPolicy(backoff="fixed", base_seconds=7, factor=9), [7, 7, 7]),
        (RetryPolicy(backoff="fixed", base_seconds=7, cap_seconds=3), [3, 3, 3]),
        (RetryPolicy(backoff="fixed", base_seconds=0), [0, 0, 0]),
        (RetryPolicy(backoff="fixed", base_seconds=86_400), [3600, 3600]),
        (RetryPolicy(backoff="fixed", base_seconds=86_400, cap_seconds=86_400), [86_400, 86_400]),
        (RetryPolicy(base_seconds=0), [0, 0, 0]),
        (RetryPolicy(base_seconds=0, factor=1e308), [0, 0, 0]),
        (RetryPolicy(base_seconds=1, factor=2), [1, 2, 4, 8, 16]),
        (RetryPolicy(base_seconds=0.5, factor=1.5), [0.5, 0.75, 1.125]),
        (RetryPolicy(factor=1), [5, 5, 5]),
        (RetryPolicy(cap_seconds=20), [5, 15, 20, 20]),
        (RetryPolicy(cap_seconds=0), [0, 0, 0]),
        (RetryPolicy(cap_seconds=1e300), [5, 15, 45, 135, 405, 1215, 3645, 10935]),
    ],
)
def test_the_delays_are_these_to_the_second(policy: RetryPolicy, delays: list[float]) -> None:
    assert [policy.delay(retry) for retry in range(1, len(delays) + 1)] == delays


@pytest.mark.parametrize("retry", [1_000, 10**6, 10**9, 2**31 - 1])
@pytest.mark.parametrize(
    ("policy", "longest"),
    [
        (RetryPolicy(), 3600.0),
        (RetryPolicy(cap_seconds=20), 20.0),
        (RetryPolicy(cap_seconds=0), 0.0),
        (RetryPolicy(cap_seconds=1.7e308), 1.7e308),
        (RetryPolicy(base_seconds=1e308, factor=1e308), 3600.0),
        (RetryPolicy(base_seconds=5e-324), 3600.0),
        (RetryPolicy(base_seconds=0), 0.0),
        (RetryPolicy(factor=1), 5.0),
        (RetryPolicy(backoff="fixed"), 10.0),
    ],
)
def test_no_number_of_attempts_makes_a_delay_longer_than_its_cap(
    policy: RetryPolicy, longest: float, retry: int
) -> None:
    begun = time.process_time()
    assert policy.delay(retry) == longest
    assert time.process_time() - begun < 0.1


def test_a_delay_never_shrinks_from_one_retry_to_the_next_and_is_always_a_number() -> None:
    chance = random.Random(35)
    for _ in range(500):
        policy = RetryPolicy(
            backoff=chance.choice(["exponential", "fixed"]),
            base_seconds=chance.choice([None, 0, 1e-300, 0.1, 5, 1e308]),
            factor=chance.choice([None, 1, 1.0001, 3, 1e308]),
            cap_seconds=chance.choice([None, 0, 1, 1e6, 1.7e308]),
        )
        delays = [policy.delay(retry) for retry in (1, 2, 3, 10, 700, 10_000, 10**7)]
        assert delays == sorted(delays), policy
        assert all(0 <= delay < math.inf for delay in delays), policy


def test_a_due_time_is_always_a_number() -> None:
    situation = Situation(policy=RetryPolicy(base_seconds=1.7e308, cap_seconds=1.7e308))
    verdict = scheduling.after_ending(situation, TaskStatus.FAILED, 1.7e308)
    assert verdict.status == StepStatus.PENDING
    assert verdict.due_at is not None
    assert math.isfinite(verdict.due_at)
    assert verdict.due_at >= 1.7e308


# -- policies --------------------------------------------------------------------------------------------


def test_a_policy_is_three_retries_with_growing_delays_unless_it_says_otherwise() -> None:
    assert RetryPolicy() == RetryPolicy(3, "exponential", None, None, None)
    assert RetryPolicy().to_json() == {"count": 3, "backoff": "exponential"}


@pytest.mark.parametrize(
    "given",
    [
        {"count": 0, "backoff": "fixed"},
        {"count": 2**31 - 1, "backoff": "exponential"},
        {"count": 3, "backoff": "exponential", "base_seconds": 1.5, "factor": 2.0, "cap_seconds": 60.0},
        {"count": 3, "backoff": "exponential", "base_seconds": 0.0},
        {"count": 3, "backoff": "fixed", "cap_seconds": 0.0},
    ],
)
def test_the_json_form_of_a_policy_gives_the_policy_again(given: dict[str, Any]) -> None:
    written = json.loads(json.dumps(RetryPolicy(**given).to_json(), allow_nan=False))
    assert written == given
    assert RetryPolicy(**written) == RetryPolicy(**given)


def test_a_policy_takes_numbers_that_are_written_as_text_and_makes_exact_types_of_all() -> None:
    class Words(str):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    policy = RetryPolicy(count=4, backoff=Words("fixed"), base_seconds="2.5", factor=3, cap_seconds=b"60")
    assert policy.to_json() == {
        "count": 4,
        "backoff": "fixed",
        "base_seconds": 2.5,
        "factor": 3.0,
        "cap_seconds": 60.0,
    }
    assert type(policy.to_json()["backoff"]) is str
    assert policy.backoff is Backoff.FIXED
    with pytest.raises(InvalidInput):
        RetryPolicy(backoff=Words("cubic"))


def shown(value: object) -> str:
    """As `repr`, but for what has another address in each process."""
    return "an object" if type(value) is object else repr(value)


BAD_NUMBERS = [
    -1,
    -0.1,
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    "soon",
    "",
    10**400,
    [],
    {},
    object(),
    1j,
    "\ud800",
]


@pytest.mark.parametrize("bad", BAD_NUMBERS, ids=shown)
@pytest.mark.parametrize("name", ["base_seconds", "factor", "cap_seconds"])
def test_a_policy_refuses_seconds_and_factors_that_are_none(name: str, bad: Any) -> None:
    with pytest.raises(InvalidInput):
        RetryPolicy(**{name: bad})


@pytest.mark.parametrize("bad", [*BAD_NUMBERS, None, 1.5, 3.0, "3", b"3", 2**31], ids=shown)
def test_a_policy_refuses_a_count_that_is_no_whole_number(bad: Any) -> None:
    with pytest.raises(InvalidInput):
        RetryPolicy(count=bad)


@pytest.mark.parametrize(
    "bad", ["linear", "Fixed", "", " fixed", None, 1, b"fixed", ["fixed"], {}, True, "\ud800"], ids=repr
)
def test_a_policy_refuses_other_kinds_of_backoff(bad: Any) -> None:
    with pytest.raises(InvalidInput):
        RetryPolicy(backoff=bad)


@pytest.mark.parametrize("factor", [0, 0.5, 0.999999])
def test_a_policy_refuses_delays_that_shrink(factor: float) -> None:
    with pytest.raises(InvalidInput, match="at least 1"):
        RetryPolicy(factor=factor)


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        RetryPolicy().count = 9  # type: ignore[misc]


# -- decisions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fell_back", [False, True])
@pytest.mark.parametrize("owner", [None, OWNER])
@pytest.mark.parametrize("failures", [0, 1, 4])
def test_a_decision_completes_cancels_or_begins_with_a_fresh_count(
    failures: int, owner: str | None, fell_back: bool
) -> None:
    situation = Situation(RetryPolicy(), failures, owner, FALLBACK, fell_back)
    decided = {
        decision: scheduling.after_decision(situation, decision) for decision in Decision if decision != "reassign"
    }
    assert decided == {
        Decision.RETRY: Verdict(StepStatus.PENDING, 0, owner, fell_back, None),
        Decision.CANCEL: Verdict(StepStatus.CANCELLED, failures, owner, fell_back, None),
        Decision.COMPLETE: Verdict(StepStatus.COMPLETED, failures, owner, fell_back, None),
    }
    reassigned = scheduling.after_decision(situation, Decision.REASSIGN, "apollo")
    assert reassigned == Verdict(StepStatus.PENDING, 0, "apollo", fell_back, None)


@pytest.mark.parametrize("decision", Decision)
def test_an_agent_is_named_for_a_reassignment_and_for_nothing_else(decision: Decision) -> None:
    wrong = None if decision is Decision.REASSIGN else "apollo"
    with pytest.raises(InvalidInput):
        scheduling.after_decision(Situation(RetryPolicy()), decision, wrong)


# -- where a plan stands, and what is ready --------------------------------------------------------------


@pytest.mark.parametrize("tally", [Tally(*each) for each in itertools.product((False, True), repeat=4)], ids=str)
def test_a_plan_stands_where_its_steps_leave_it(tally: Tally) -> None:
    """Completed with the last of its steps; else failed with any; else running once anything has begun."""
    if tally.any and tally.all_settled:
        said = "completed"
    elif tally.any_failed:
        said = "failed"
    elif tally.begun:
        said = "running"
    else:
        said = "pending"
    assert scheduling.plan_status(tally) is PlanStatus(said)


def test_a_plan_without_steps_is_never_completed() -> None:
    for settled, failed, begun in itertools.product((False, True), repeat=3):
        assert scheduling.plan_status(Tally(False, settled, failed, begun)) != "completed"


@pytest.mark.parametrize("status", StepStatus)
@pytest.mark.parametrize("blockers", [0, 1, 5])
@pytest.mark.parametrize("due_at", [None, 999.0, 1_000.0, math.nextafter(1_000.0, 2_000.0), 2_000.0])
def test_a_step_is_ready_when_it_is_pending_with_nothing_in_its_way_and_its_delay_has_passed(
    status: StepStatus, blockers: int, due_at: float | None
) -> None:
    is_due = due_at in (None, 999.0, 1_000.0)
    expected = status == "pending" and blockers == 0 and is_due
    assert scheduling.is_ready(status, blockers, due_at, 1_000.0) is expected
    # As it is stored it is a word.
    assert scheduling.is_ready(status.value, blockers, due_at, 1_000.0) is expected  # type: ignore[arg-type]


# -- transitions -----------------------------------------------------------------------------------------

SENTENCE = """
    pending -> in_progress
    in_progress -> completed | failed | partial | escalated | cancelled | pending
    partial | escalated | failed -> pending | completed
"""


def test_the_transitions_of_a_step_are_those_of_the_sentence() -> None:
    """What is there in words: `anything not completed -> cancelled or deleted`, and what waits for a decision can be
    tried again, completed by hand, or cancelled."""
    said: dict[str, set[str]] = {status.value: set() for status in StepStatus}
    for line in SENTENCE.strip().splitlines():
        before, after = ({word.strip() for word in side.split("|")} for side in line.split("->"))
        for status in before:
            said[status] |= after
    for status in said:
        if status not in ("completed", "deleted"):
            said[status] |= {"cancelled", "deleted"}
    # A status does not lead to itself.
    said = {status: after - {status} for status, after in said.items()}
    found = {before.value: {one.value for one in after} for before, after in scheduling.STEP_TRANSITIONS.items()}
    assert found == said
    assert all(len(set(after)) == len(after) for after in scheduling.STEP_TRANSITIONS.values())


def test_the_transitions_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        scheduling.STEP_TRANSITIONS[StepStatus.COMPLETED] = ()  # type: ignore[index]


def test_every_verdict_is_a_transition_that_there_is() -> None:
    after = set(scheduling.STEP_TRANSITIONS[StepStatus.IN_PROGRESS])
    seen = set()
    for _, before, fallback, partial_ok, has_output, exhausted in COMBINATIONS:
        named, fell_back, owner = FALLBACKS[fallback]
        for ending in ENDINGS:
            situation = Situation(
                RetryPolicy(2),
                FAILED_BEFORE[before],
                owner,
                named,
                fell_back,
                partial_ok,
                has_output,
                OnExhausted(exhausted),
            )
            seen.add(scheduling.after_ending(situation, TaskStatus(ending), ENDED_AT).status)
    assert seen == after - {StepStatus.DELETED}
    decided = {
        scheduling.after_decision(Situation(RetryPolicy()), decision, "a" if decision == "reassign" else None).status
        for decision in Decision
    }
    for status in scheduling.AWAITING_DECISION:
        assert decided <= set(scheduling.STEP_TRANSITIONS[status])
    assert set(scheduling.AWAITING_DECISION) == {"partial", "escalated", "failed"}
    assert set(scheduling.CLOSED_PLANS) == {"completed", "cancelled"}


# -- order -----------------------------------------------------------------------------------------------


def named(number: int) -> str:
    return f"T-{number:03d}"


def assert_ordered(order: list[int], blockers: dict[int, list[int]]) -> None:
    place = {step: at for at, step in enumerate(order)}
    assert len(place) == len(order)
    assert set(place) == set(blockers).union(*blockers.values())
    assert all(place[blocker] < place[step] for step, waits in blockers.items() for blocker in waits)


def test_each_step_comes_after_all_that_it_waits_for() -> None:
    assert scheduling.in_order({}, named) == []
    diamond: dict[int, list[int]] = {4: [2, 3], 2: [1], 3: [1], 1: []}
    assert_ordered(scheduling.in_order(diamond, named), diamond)
    chance = random.Random(35)
    for _ in range(50):
        steps = list(range(30))
        chance.shuffle(steps)
        graph = {step: chance.sample(steps[:at], chance.randint(0, min(at, 4))) for at, step in enumerate(steps)}
        assert_ordered(scheduling.in_order(graph, named), graph)


@pytest.mark.parametrize(
    ("blockers", "members"),
    [
        ({1: [1]}, {"T-001"}),
        ({1: [2], 2: [1]}, {"T-001", "T-002"}),
        ({1: [3], 2: [1], 3: [2]}, {"T-001", "T-002", "T-003"}),
        ({1: [], 2: [1, 5], 3: [2], 4: [3], 5: [4], 6: [5], 7: [1]}, {"T-002", "T-003", "T-004", "T-005"}),
    ],
)
def test_a_cycle_is_named_each_step_before_the_one_that_waits_for_it(
    blockers: dict[int, list[int]], members: set[str]
) -> None:
    with pytest.raises(DependencyCycle) as caught:
        scheduling.in_order(blockers, named)
    keys = caught.value.keys
    assert keys[0] == keys[-1]
    assert set(keys) == members
    assert len(keys) == len(members) + 1
    numbers = [int(key.removeprefix("T-")) for key in keys]
    for blocker, step in itertools.pairwise(numbers):
        assert blocker in blockers[step]
    assert " -> ".join(keys) in str(caught.value)


def test_a_hundred_thousand_steps_and_a_chain_of_five_thousand_are_put_in_order() -> None:
    chance = random.Random(35)
    chain = {step: [step - 1] if step else [] for step in range(5_000)}
    assert scheduling.in_order(chain, named) == list(range(5_000))
    many = {step: [chance.randrange(step) for _ in range(2)] if step else [] for step in range(100_000)}
    begun = time.process_time()
    assert_ordered(scheduling.in_order(many, named), many)
    assert time.process_time() - begun < 10


def test_a_cycle_of_five_thousand_is_named_whole() -> None:
    ring = {step: [step - 1] for step in range(1, 5_000)} | {0: [4_999]}
    with pytest.raises(DependencyCycle) as caught:
        scheduling.in_order(ring, named)
    assert len(caught.value.keys) == 5_001
    assert set(caught.value.keys) == {named(step) for step in range(5_000)}
