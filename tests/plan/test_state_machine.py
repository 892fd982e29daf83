"""Plans led at random, with agents that die, operators that interfere and a clock that jumps.

What a step's state has to be is worked out anew after every move, from how the ledger says that its attempts ended and
from what was decided since: :meth:`Known.standing`. With ``TSG_PLAN_EXAMPLES`` in the environment that many histories
are tried on each database.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import tsg.plan.tables
import tsg.tables
from tests.conftest import FakeClock
from tsg import DependencyCycle, Ledger, Plans, StateConflict, StepNotFound, TaskNotFound

EXAMPLES = int(os.environ.get("TSG_PLAN_EXAMPLES", "0"))
Place = Path | sa.URL

LEDGER_TABLES = (tsg.tables.tasks, tsg.tables.task_events)
TABLES = (*LEDGER_TABLES, *tsg.plan.tables.metadata.sorted_tables)
ACTIVE = ("queued", "running")
AWAITING = ("partial", "escalated", "failed")
AT_REST = ("completed", "cancelled", "deleted")
AGENTS = ("a", "b")
#: What advances the plan first, which stays where the rest is refused.
ADVANCING = ("open", "start", "cancel", "delete")
GRACE = 50.0

Stored = dict[str, list[dict[str, Any]]]
_Method = TypeVar("_Method", bound=Callable[..., None])


@dataclass
class Try:
    """An attempt, as the ledger had it when it was last seen there."""

    token: str
    agent: str | None
    opened_at: float
    ended_as: str | None = None
    ended_at: float = 0.0
    has_output: bool = False
    is_lost: bool = False


@dataclass
class Known:
    """What is known of a step: what was asked for, its attempts, and what was decided after how many of them."""

    on_exhausted: str
    owner: str | None
    retries: int
    backoff: str
    fallback_agent: str | None
    partial_ok: bool
    tries: list[Try] = field(default_factory=list)
    decided: list[tuple[int, str, str | None]] = field(default_factory=list)

    def decide(self, decision: str, to: str | None = None) -> None:
        self.decided.append((len(self.tries), decision, to))

    def standing(self) -> tuple[str, str | None, float | None]:
        """Its status, its owner, and when it is due, once all that has ended is folded; fails at a try too many."""
        status, owner, due = "pending", self.owner, None
        failures, fell_back = 0, False
        for number in range(len(self.tries) + 1):
            for after, decision, to in self.decided:
                if after == number:
                    status, due = {"retry": "pending", "reassign": "pending"}.get(decision, decision), None
                    failures = 0 if status == "pending" else failures
                    owner = to or owner
            if number == len(self.tries):
                break
            attempt = self.tries[number]
            assert status == "pending", f"attempt {number + 1} of a step that is {status}"
            assert due is None or attempt.opened_at >= due, "tried again before it was due"
            owner, due = owner or attempt.agent, None
            if attempt.ended_as in ("failed", "timed_out"):
                failures += 1
                if attempt.ended_as == "timed_out" and self.partial_ok and attempt.has_output:
                    status = "partial"
                elif failures <= self.retries:
                    delay = 10 if self.backoff == "fixed" else 5 * 3 ** (failures - 1)
                    due = attempt.ended_at + delay
                elif self.fallback_agent not in (None, owner) and not fell_back:
                    owner, fell_back, failures = self.fallback_agent, True, 0
                else:
                    status = {"escalate": "escalated", "fail": "failed"}[self.on_exhausted]
            else:
                status = {None: "in_progress", "succeeded": "completed", "cancelled": "cancelled"}[attempt.ended_as]
        return status, owner, due


@dataclass
class Workshop:
    """Where the histories take place, each on tables that are empty; and how often what was done or refused in all."""

    place: Place
    template: Path | None
    engine: sa.Engine
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        if isinstance(self.place, Path):
            assert self.template is not None
            for end in ("", "-wal", "-shm"):
                Path(f"{self.place}{end}").unlink(missing_ok=True)
            shutil.copyfile(self.template, self.place)
            self.place.chmod(0o600)
        else:
            with self.engine.begin() as connection:
                connection.exec_driver_sql(f"TRUNCATE {', '.join(table.name for table in TABLES)} RESTART IDENTITY")


@pytest.fixture(params=["sqlite", "postgresql"])
def workshop(request: pytest.FixtureRequest, path: Path) -> Iterator[Workshop]:
    if request.param == "postgresql":
        url: sa.URL = request.getfixturevalue("plans_url")
        engine = sa.create_engine(url)
        yield Workshop(url, None, engine)
    else:
        engine = sa.create_engine(sa.URL.create("sqlite", database=str(path)), poolclass=sa.NullPool)
        with Ledger(path) as ledger:
            Plans(ledger)
        yield Workshop(path, path.rename(path.with_name("template.sqlite")), engine)
    engine.dispose()


numbers = st.integers(0, 11)
agents = st.sampled_from((None, *AGENTS))
some_keys = st.lists(numbers, max_size=3)
outputs = st.sampled_from((None, "half of it"))
tokens = st.sampled_from(("current", "current", "none", "old", "of another step"))
graces = st.sampled_from((0.0, 5.0, 60.0, 1e6))
fields = st.fixed_dictionaries(
    {
        "owner": agents,
        "retries": st.integers(0, 2),
        "backoff": st.sampled_from(("exponential", "fixed")),
        "fallback_agent": st.sampled_from((None, "a", "talos")),
        "partial_ok": st.booleans(),
        "timeout_seconds": st.sampled_from((0, 20.0, 100.0)),
    }
)


class Move(NamedTuple):
    """Something that may be done where that is possible, as often as its weight says; and with what."""

    name: str
    weight: int
    when: Callable[[Leading], object]
    arguments: dict[str, st.SearchStrategy[Any]]


MOVES: list[Move] = []


def move(
    weight: int = 1, *, when: Callable[[Leading], object] = lambda _: True, **arguments: st.SearchStrategy[Any]
) -> Callable[[_Method], _Method]:
    """Have a method among the moves. Of rules of its own Hypothesis would leave out half in each history."""

    def take(method: _Method) -> _Method:
        MOVES.append(Move(method.__name__, weight, when, arguments))
        return method

    return take


class Leading(RuleBasedStateMachine):
    """One history: plans, one after the other, in one ledger."""

    def __init__(self, workshop: Workshop) -> None:
        super().__init__()
        workshop.clear()
        self.workshop = workshop
        self.looking = workshop.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self.clock = FakeClock()
        self.latest = self.clock.now
        self.sound = False
        self.name = ""
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(self.workshop.place, clock=self.clock)
        self.plans = Plans(self.ledger)

    # -- what is there -----------------------------------------------------------------------------------

    def read(self) -> Stored:
        found: Stored = {}
        for table in TABLES:
            rows = self.looking.exec_driver_sql(f"SELECT * FROM {table.name}").mappings()
            found[table.name] = sorted(
                ({column: str(value) if column == "id" else value for column, value in row.items()} for row in rows),
                key=repr,
            )
        return found

    @property
    def plan(self) -> dict[str, Any]:
        (row,) = (row for row in self.stored["tsg_plans"] if row["name"] == self.name)
        return row

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        """The steps of the plan by their keys, in order."""
        of_plan = [row for row in self.stored["tsg_plan_steps"] if row["plan_pk"] == self.plan["pk"]]
        return {row["key"]: row for row in sorted(of_plan, key=lambda row: row["number"])}

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in self.stored["tsg_tasks"]}

    def blockers(self, step: dict[str, Any]) -> list[str]:
        """What a step waits for."""
        keys = {row["pk"]: row["key"] for row in self.stored["tsg_plan_steps"]}
        edges = [row for row in self.stored["tsg_plan_dependencies"] if row["step_pk"] == step["pk"]]
        return [keys[row["blocker_pk"]] for row in edges]

    def waiting_for(self, step: dict[str, Any]) -> set[str]:
        return {key for key in self.blockers(step) if self.steps[key]["status"] != "completed"}

    def is_ready(self, step: dict[str, Any]) -> bool:
        is_due = step["due_at"] is None or step["due_at"] <= self.clock.now
        return step["status"] == "pending" and is_due and not self.waiting_for(step)

    def is_behind(self) -> bool:
        """Whether the clock is earlier than something stored, so that the ledger may refuse whatever it likes."""
        return bool(self.clock.now < self.latest)

    def is_open(self) -> bool:
        return self.plan["status"] not in ("completed", "cancelled")

    def live(self, key: str) -> tuple[str | None, str | None]:
        """The token of the step's live attempt, and the state of its task."""
        token = self.steps[key]["attempt_id"]
        if token is None:
            return None, None
        return str(token), self.tasks.get(str(token), {"status": "pruned"})["status"]

    def look(self) -> None:
        """See what is there now, and what the ledger says of the attempts."""
        self.stored = self.read()
        keys = {row["pk"]: key for key, row in self.steps.items()}
        tasks = self.tasks
        for row in sorted(self.stored["tsg_plan_attempts"], key=lambda row: row["number"]):
            if row["step_pk"] not in keys:
                continue
            tries = self.known[keys[row["step_pk"]]].tries
            if row["number"] > len(tries):
                assert row["number"] == len(tries) + 1
                tries.append(Try(row["id"], row["agent"], tasks[row["id"]]["created_at"]))
            attempt = tries[row["number"] - 1]
            assert attempt.token == row["id"]
            attempt.agent = row["agent"]
            if row["id"] in tasks:
                task = tasks[row["id"]]
                ended_as = None if task["status"] in ACTIVE else task["status"]
                assert attempt.ended_as in (None, ended_as)
                attempt.ended_as, attempt.ended_at = ended_as, task["ended_at"]
            else:
                assert attempt.ended_as is not None, "the task of a live attempt is gone"
                # Pruned before it was folded: how it had ended the plan can't know, and it is no success.
                attempt.is_lost |= row["ended_as"] is None
                if attempt.is_lost and row["ended_as"] is not None:
                    attempt.ended_as, attempt.ended_at = "timed_out", row["ended_at"]
                    self.workshop.reached["pruned before it was folded"] += 1

    # -- doing things ------------------------------------------------------------------------------------

    def do(self, what: str, operation: Callable[[], Any], *, must: bool | None = None) -> Any:
        """Do something, if it is not refused; what is refused changes nothing, but that the plan may be advanced.

        Args:
            must: whether it has to be done, or has to be refused, unless the clock is behind; ``None``: either.
        """
        self.sound = False
        try:
            answer = operation()
        except (StateConflict, StepNotFound, TaskNotFound, DependencyCycle) as error:
            if (after := self.read()) != self.stored:
                assert what in ADVANCING, f"{what} was refused, and changed something"
                self.plans.advance(self.name)
                assert self.read() == after, f"{what} was refused, and did more than to advance the plan"
            if must and not self.is_behind():
                raise AssertionError(f"{what} was refused") from error
            self.workshop.refused[what] += 1
            return None
        assert must is not False, f"{what} was not refused"
        self.workshop.done[what] += 1
        return answer

    def key(self, number: int) -> str:
        return f"T-{number % len(self.known) + 1:03d}"

    def token(self, kind: str, key: str) -> str | None:
        """A token that somebody might report with; the current one is gone where its agent forgot it."""
        if kind == "current":
            live = self.live(key)[0]
            return None if live in self.forgotten else live
        tries = [attempt.token for attempt in self.known[key].tries]
        if kind == "of another step":
            tries = [attempt.token for other, known in self.known.items() if other != key for attempt in known.tries]
        return None if kind == "none" or not tries else tries[0]

    def new_plan(self, on_exhausted: str) -> None:
        self.name = f"plan {len(self.read()['tsg_plans']) + 1}"
        self.known: dict[str, Known] = {}
        self.forgotten: set[str] = set()
        self.clock.now = max(self.clock.now, self.latest)
        self.plans.create(self.name, on_exhausted=on_exhausted, grace_seconds=GRACE)
        self.on_exhausted = on_exhausted
        self.look()

    @initialize(on_exhausted=st.sampled_from(("escalate", "fail")), first=st.lists(fields, min_size=2, max_size=4))
    def begin(self, on_exhausted: str, first: list[dict[str, Any]]) -> None:
        self.new_plan(on_exhausted)
        for number, given in enumerate(first):
            self.add(given, blocked_by=[number // 2] if number else [], blocks=[])
            self.look()

    @rule(data=st.data())
    def make_a_move(self, data: st.DataObject) -> None:
        possible = [each for each in MOVES if each.when(self)]
        named = data.draw(st.sampled_from([each.name for each in possible for _ in range(each.weight)]), "move")
        (chosen,) = (each for each in possible if each.name == named)
        getattr(self, named)(**data.draw(st.fixed_dictionaries(chosen.arguments), "with"))

    @move(6, when=lambda self: not self.is_open(), on_exhausted=st.sampled_from(("escalate", "fail")), given=fields)
    def go_on_with_another_plan(self, on_exhausted: str, given: dict[str, Any]) -> None:
        self.do("adding to a closed plan", lambda: self.plans.add_step(self.name, subject="Too late"), must=False)
        assert self.plans.claim(self.name, "a") is None
        assert self.read() == self.stored
        self.new_plan(on_exhausted)
        self.add(given, [], [])

    @move(
        2,
        when=lambda self: self.is_open() and len(self.known) < 9,
        given=fields,
        blocked_by=some_keys,
        blocks=some_keys,
    )
    def add(self, given: dict[str, Any], blocked_by: list[int], blocks: list[int]) -> None:
        links: dict[str, Any] = {"blocked_by": [self.key(number) for number in blocked_by] if self.known else []}
        # Of what is to be blocked, some is yet to come.
        links["blocks"] = [f"T-{number + 1:03d}" for number in blocks]
        added = self.do("add", lambda: self.plans.add_step(self.name, subject="Do it", **given, **links))
        if added is not None:
            assert added["id"] == f"T-{len(self.known) + 1:03d}"
            asked = {name: value for name, value in given.items() if name != "timeout_seconds"}
            self.known[added["id"]] = Known(self.on_exhausted, **asked)

    @move(
        2,
        when=lambda self: self.known,
        number=numbers,
        field=st.sampled_from(("blocked_by", "blocks", "add_blocked_by", "add_blocks")),
        to=some_keys,
    )
    def link(self, number: int, field: str, to: list[int]) -> None:
        keys = [self.key(other) for other in to]
        self.do("link", lambda: self.plans.update(self.name, self.key(number), **{field: keys}))

    @move(2, agent=st.sampled_from(AGENTS))
    def claim(self, agent: str) -> None:
        # Whatever the plan has come to: somebody who asks for work gets some, or is told that there is none.
        created = self.tasks[str(self.plan["root_id"])]["created_at"]
        step = self.do("claim", lambda: self.plans.claim(self.name, agent), must=self.clock.now >= created or None)
        if step is None and self.clock.now < created:
            return
        if step is not None:
            assert (step["status"], step["owner"], step["waitingFor"]) == ("in_progress", agent, [])
        self.look()
        mine = [key for key, row in self.steps.items() if self.is_ready(row) and row["owner"] in (None, agent)]
        assert mine == [] if step is None else all(key > step["id"] for key in mine)

    @move(
        4,
        when=lambda self: self.known,
        agent=st.sampled_from(AGENTS),
        output=outputs,
        seconds=st.sampled_from((10.0, 55.0, 130.0)),
        then=st.sampled_from(("advance", "reconcile", "prune", "fail", "complete", "nothing")),
    )
    def work_for_long(self, agent: str, output: str | None, seconds: float, then: str) -> None:
        """An agent takes a step, lets hear of it or not, and is gone for a while; more often than by chance."""
        self.claim(agent)
        self.all_is_well()
        claimed = [key for key in self.known if self.live(key)[1] == "running"]
        if not claimed:
            return
        number = int(claimed[-1].removeprefix("T-")) - 1
        if output is not None:
            self.beat(number, "current", output)
            self.all_is_well()
        self.let_time_pass(seconds)
        if then in ("fail", "complete"):
            self.report(number, "current", then == "complete")
        elif then == "advance":
            self.advance()
        elif then != "nothing":
            self.reconcile(GRACE, 0.0, True)
            if then == "prune":
                self.all_is_well()
                self.let_time_pass(10.0)
                self.prune(5.0)

    @move(2, when=lambda self: self.known, number=numbers, agent=agents)
    def open_attempt(self, number: int, agent: str | None) -> None:
        key = self.key(number)
        row = self.steps[key]
        must = self.is_ready(row) and (agent is None or row["owner"] in (None, agent))
        self.do("open", lambda: self.plans.open(self.name, key, agent=agent), must=must or None)

    @move(2, when=lambda self: self.known, number=numbers, agent=agents, kind=tokens)
    def start(self, number: int, agent: str | None, kind: str) -> None:
        key, must = self.key(number), None
        token, (live, state) = self.token(kind, key), self.live(key)
        row = self.steps[key]
        if agent is None or row["owner"] in (None, agent):
            if state == "queued":
                must = token in (None, live)
            elif token is None and self.is_ready(row):
                must = True
            elif state == "running" and token not in (None, live):
                must = False
        step = self.do("start", lambda: self.plans.start(self.name, key, agent=agent, attempt=token), must=must)
        assert step is None or step["session_id"] is None or step["session_id"].startswith(f"{step['owner']}-")

    @move(
        2,
        when=lambda self: any(known.tries for known in self.known.values()),
        number=numbers,
        kind=tokens,
        output=outputs,
    )
    def beat(self, number: int, kind: str, output: str | None) -> None:
        key = self.key(number)
        token, (live, state) = self.token(kind, key), self.live(key)
        if token is None:
            must = state in ACTIVE
            operation = lambda: self.plans.heartbeat_step(self.name, key, output=output)  # noqa: E731
        else:
            owner = next(key for key, known in self.known.items() if token in [each.token for each in known.tries])
            live, state = self.live(owner)
            must = token == live and state in ACTIVE
            operation = lambda: self.plans.heartbeat(token, output=output)  # noqa: E731
        if self.do("heartbeat", operation, must=must) is not None and output is not None:
            (beaten,) = (each for known in self.known.values() for each in known.tries if each.token == (token or live))
            beaten.has_output = True

    @move(
        3,
        when=lambda self: any(known.tries for known in self.known.values()),
        number=numbers,
        kind=tokens,
        succeeds=st.booleans(),
    )
    def report(self, number: int, kind: str, succeeds: bool) -> None:
        key, outcome = self.key(number), "succeeded" if succeeds else "failed"
        token, (live, state) = self.token(kind, key), self.live(key)
        status = self.steps[key]["status"]
        if live is not None and token in (None, live):
            must, is_repeated = state in (*ACTIVE, outcome), False
        elif token is None:
            must = is_repeated = status in (("completed",) if succeeds else ("escalated", "failed"))
        else:
            must = is_repeated = (token, outcome) in [(each.token, each.ended_as) for each in self.known[key].tries]
        if succeeds:
            operation = lambda: self.plans.complete(self.name, key, attempt=token, learnings=[f"of {key}"])  # noqa: E731
        else:
            operation = lambda: self.plans.fail(self.name, key, attempt=token, error="broken")  # noqa: E731
        what = "complete" if succeeds else "fail"
        self.do(f"repeat {what}" if is_repeated else what, operation, must=must)
        if is_repeated:
            assert self.read() == self.stored, "the same report once more changed something"

    @move(
        3,
        when=lambda self: any(row["status"] in AWAITING for row in self.steps.values()),
        number=numbers,
        decision=st.sampled_from(("retry", "reassign", "cancel", "complete")),
        to=st.sampled_from("abc"),
    )
    def decide(self, number: int, decision: str, to: str) -> None:
        key = self.awaiting(number)
        agent = to if decision == "reassign" else None
        self.do(decision, lambda: self.plans.decide(self.name, key, decision, to=agent), must=True)
        self.known[key].decide({"cancel": "cancelled", "complete": "completed"}.get(decision, decision), agent)

    @move(
        4,
        when=lambda self: any(row["status"] == "partial" for row in self.steps.values()),
        number=numbers,
        remaining=st.sampled_from((None, "Do the rest")),
    )
    def accept(self, number: int, remaining: str | None) -> None:
        key = self.awaiting(number, "partial")
        waiting = ("pending", *AWAITING)
        dependents = [
            other for other, row in self.steps.items() if row["status"] in waiting and key in self.blockers(row)
        ]
        step = self.do("accept", lambda: self.plans.accept(self.name, key, remaining=remaining), must=True)
        if step is None:
            return
        known = self.known[key]
        follow_up = step.get("followUp")
        assert (follow_up is None) == (remaining is None)
        if follow_up is not None:
            owner = known.standing()[1]
            policy = (known.retries, known.backoff, known.fallback_agent, known.partial_ok)
            self.known[follow_up] = Known(known.on_exhausted, owner, *policy)
            assert set(dependents) <= set(self.plans.get(self.name, follow_up)["blocks"])
        known.decide("completed")

    @move(when=lambda self: self.known, number=numbers, deletes=st.booleans())
    def give_up(self, number: int, deletes: bool) -> None:
        key, end = self.key(number), "deleted" if deletes else "cancelled"
        status = self.steps[key]["status"]
        may: bool | None = status == end or (self.is_open() and status not in ("completed", "deleted"))
        if may and any(self.live(key)[1] not in (None, *ACTIVE) for key in self.known):
            # What is folded first may complete the step, or the plan.
            may = None
        given_up = self.plans.delete if deletes else self.plans.cancel
        answer = self.do("delete" if deletes else "cancel", lambda: given_up(self.name, key), must=may)
        if answer is not None:
            self.known[key].decide(end)

    @move()
    def advance(self) -> None:
        ready = self.do("advance", lambda: self.plans.advance(self.name), must=True)
        self.look()
        assert [step["id"] for step in ready] == [key for key, row in self.steps.items() if self.is_ready(row)]
        for key in self.steps:
            # Nothing that has ended is left lying, unless its times are in the future.
            assert self.live(key)[1] in (None, *ACTIVE) or key in ready.passed_over
        assert not ready.passed_over or self.is_behind()
        again = self.plans.advance(self.name)
        assert (list(again), again.passed_over) == (list(ready), ready.passed_over)
        assert self.read() == self.stored, "advanced twice at the same time"

    @move()
    def look_at_the_list(self) -> None:
        views = self.do("list", lambda: self.plans.steps(self.name, all=True), must=True)
        self.look()
        for view, (key, row) in zip(views, self.steps.items(), strict=True):
            assert (view["id"], view["status"], view["owner"]) == (key, row["status"], row["owner"])
            assert view["ready"] == self.is_ready(row)
            assert set(view["waitingFor"]) == self.waiting_for(row)
            assert set(view["blockedBy"]) == set(self.blockers(row))

    @move(forgets=st.booleans(), reopens=st.booleans())
    def crash(self, forgets: bool, reopens: bool) -> None:
        if forgets:
            self.forgotten |= {token for key in self.known if (token := self.live(key)[0]) is not None}
        if reopens:
            self.ledger.close()
            self.open()
            assert self.read() == self.stored

    @move(2, seconds=st.sampled_from((1.0, 5.0, 10.0, 15.0, 25.0, 60.0, 130.0, 3_600.0, 259_200.0)))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.latest = max(self.latest, self.clock.now)

    @move(seconds=st.sampled_from((0.5, 3.0, 40.0)))
    def set_the_clock_back(self, seconds: float) -> None:
        self.clock.advance(-seconds)

    @move(
        when=lambda self: any(self.live(key)[1] in ACTIVE for key in self.known),
        number=numbers,
        status=st.sampled_from(("succeeded", "failed", "timed_out", "cancelled")),
    )
    def close_from_outside(self, number: int, status: str) -> None:
        live = [token for key in self.known for token, state in [self.live(key)] if token and state in ACTIVE]
        token = live[number % len(live)]
        self.do("close", lambda: self.ledger.close_task(token, status), must=True)

    @move(active=graces, delivery=graces, skips=st.booleans())
    def reconcile(self, active: float, delivery: float, skips: bool) -> None:
        report = self.do(
            "reconcile",
            lambda: self.ledger.reconcile(
                active_grace_seconds=active, delivery_grace_seconds=delivery, skip_conflicts=skips
            ),
            must=True,
        )
        self.workshop.reached["timed out by an operator"] += 0 if report is None else report["tasks_timed_out"]

    @move(older_than=graces)
    def prune(self, older_than: float) -> None:
        report = self.do("prune", lambda: self.ledger.prune(older_than), must=True)
        self.workshop.reached["pruned"] += report["tasks_pruned"]

    def awaiting(self, number: int, *statuses: str) -> str:
        keys = [key for key, row in self.steps.items() if row["status"] in (statuses or AWAITING)]
        return keys[number % len(keys)]

    # -- what holds after each -----------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        before = self.stored
        self.look()
        if self.stored != before:
            assert self.plans.doctor()["healthy"]
        root, tasks = str(self.plan["root_id"]), self.tasks
        assert tasks.keys() - {row["id"] for row in self.stored["tsg_plan_attempts"]} <= {
            str(row["root_id"]) for row in self.stored["tsg_plans"]
        }
        for key, row in self.steps.items():
            known = self.known[key]
            live = [each for each in known.tries if each.token in tasks and tasks[each.token]["status"] in ACTIVE]
            assert len(live) <= 1
            assert all(tasks[each.token]["parent_id"] is not None for each in known.tries if each.token in tasks)
            status, owner, due = known.standing()
            self.workshop.reached[status] += 1
            if row["status"] == "in_progress":
                # What has ended since is folded by whoever comes next.
                assert str(row["attempt_id"]) == known.tries[-1].token
                assert not self.waiting_for(row)
            else:
                assert (row["status"], row["due_at"]) == (status, due), key
                # What is given up with an end that could not be folded, for a time in the future, keeps its owner.
                assert row["owner"] == owner or status in ("cancelled", "deleted"), key
                assert live == []
        at_rest = [row["status"] in AT_REST for row in self.steps.values() if row["status"] != "deleted"]
        if at_rest and all(at_rest):
            assert self.plan["status"] == "completed"
        if self.plan["status"] == "completed":
            assert root not in tasks or tasks[root]["status"] == "succeeded"
        else:
            assert tasks[root]["status"] == "queued"
        self.sound = True

    # -- the end -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Whatever has happened, those who go on come to an end."""
        self.clock.now = self.latest
        rounds = 0
        while self.is_open():
            rounds += 1
            assert rounds < 30, "the plan does not come to an end"
            self.clock.advance(4_000)
            self.plans.advance(self.name)
            self.look()
            steps = self.steps
            for key in [key for key, row in steps.items() if row["status"] in AWAITING]:
                self.plans.decide(self.name, key, "complete")
                self.known[key].decide("completed")
            for key in [key for key, row in steps.items() if row["status"] == "in_progress"]:
                self.plans.complete(self.name, key, attempt=self.live(key)[0])
            for agent in (*AGENTS, "c", "talos"):
                while (step := self.plans.claim(self.name, agent)) is not None:
                    self.plans.complete(self.name, step["id"], attempt=step["attempt"])
            if self.read() == self.stored:
                # Only this lets those go on that wait for what was given up.
                for key in [key for key, row in steps.items() if row["status"] == "cancelled"]:
                    self.plans.delete(self.name, key)
                    self.known[key].decide("deleted")
            if all(row["status"] == "deleted" for row in steps.values()):
                self.add(LAST, [], [])
            self.all_is_well()
        self.plans.remove(self.name)
        left = self.read()
        assert [row for row in left["tsg_plans"] if row["name"] == self.name] == []
        assert all(left[table.name] == self.stored[table.name] for table in LEDGER_TABLES)
        assert self.plans.doctor()["healthy"]

    def teardown(self) -> None:
        try:
            if self.sound:
                self.finish()
                self.workshop.reached["the end"] += 1
        finally:
            self.looking.close()
            self.ledger.close()


LAST = {"owner": None, "retries": 0, "backoff": "fixed", "fallback_agent": None, "partial_ok": False}


def test_whatever_happens_to_a_plan_its_rules_hold_and_it_can_be_finished(workshop: Workshop) -> None:
    on_file = isinstance(workshop.place, Path)
    run_state_machine_as_test(
        lambda: Leading(workshop),
        settings=settings(
            max_examples=EXAMPLES or (12 if on_file else 5),
            stateful_step_count=30,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
    # What was to be tried was tried; more than a few histories come to everything.
    assert workshop.reached["the end"] > 0
    assert workshop.refused.total() > 0
    expected = {"add", "claim", "advance", "link"}
    if EXAMPLES >= 100:
        expected |= {"open", "start", "heartbeat", "complete", "fail", "repeat complete", "close", "prune", "reconcile"}
        expected |= {"retry", "reassign", "cancel", "accept", "delete", "list"}
        assert workshop.reached.keys() > {"partial", "escalated", "failed", "cancelled", "deleted", "completed"}
    assert workshop.done.keys() >= expected
