"""What a page shows of a plan, read in one transaction and without advancing it.

Nothing in it depends on when it was read: the same stored state gives an equal :class:`Scene`, and so the same page.
Heartbeats are left out for that reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from tsg.plan import fields, reading
from tsg.plan.scheduling import CLOSED_PLANS, StepStatus
from tsg.plan.store import Plans
from tsg.plan.tables import attempts, dependencies, dispatches, plans, steps
from tsg.plan.transaction import Transaction
from tsg.states import ACTIVE, TaskStatus
from tsg.tables import tasks

__all__ = ["MOST", "Scene", "Stand", "Step", "Summary", "look", "overview"]

#: The characters of a text that are shown; the rest is the command line's to tell.
MOST: Final = 400


class Stand(StrEnum):
    """How a step stands, to the eye: its status, told apart where that leaves out what somebody watching asks."""

    DONE = "done"
    #: Its attempt runs.
    WORKING = "working"
    #: Its attempt was sent to an agent, who has not taken it yet.
    SENT = "sent"
    #: Its attempt lies in an agent's inbox.
    INBOX = "inbox"
    #: Its attempt was opened, and nobody was told.
    OPENED = "opened"
    #: Its attempt is over, and what becomes of the step is worked out when the plan is next advanced.
    ENDED = "ended"
    #: It may be taken.
    READY = "ready"
    #: It has failed, and is due again at a time.
    RETRY = "retry"
    #: It waits for other steps.
    BLOCKED = "blocked"
    PARTIAL = "partial"
    ESCALATED = "escalated"
    FAILED = "failed"
    CANCELLED = "cancelled"


_OF_STATUS: Final = {
    StepStatus.COMPLETED.value: Stand.DONE,
    StepStatus.PARTIAL.value: Stand.PARTIAL,
    StepStatus.ESCALATED.value: Stand.ESCALATED,
    StepStatus.FAILED.value: Stand.FAILED,
    StepStatus.CANCELLED.value: Stand.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Step:
    """A step as it is shown. Times are seconds since the epoch, texts at most :data:`MOST` characters.

    Attributes:
        agent: who has it, or would get it; ``None`` for whoever claims it.
        started_at: of the last attempt; ``None`` where it has not started, or the ledger has let go of it.
        ended_at: of the last attempt, or when the step was completed by hand.
        deadline_at: of the attempt that runs.
        due_at: before which it is not tried again.
        waiting_for: the keys of its blockers that are not completed.
    """

    key: str
    subject: str
    description: str | None
    status: str
    stand: Stand
    agent: str | None
    attempts: int
    started_at: float | None
    ended_at: float | None
    deadline_at: float | None
    due_at: float | None
    waiting_for: tuple[str, ...]
    output: str | None
    error: str | None


@dataclass(frozen=True)
class Scene:
    """All that a page shows of a plan. Steps are in order of creation, deleted ones left out.

    Attributes:
        halted: something could not be delivered to its agent, and the plan is failed for that.
        agents_at_work: how many agents have an attempt that runs; those without a name are one each.
        changed_at: when anything of it was last changed, heartbeats aside.
        edges: each blocker with what waits for it, by their places in `steps`.
    """

    name: str
    description: str | None
    status: str
    halted: bool
    agents_at_work: int
    created_at: float
    changed_at: float
    steps: tuple[Step, ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def done(self) -> int:
        """How many steps are completed."""
        return self.counts.get(Stand.DONE, 0)

    @property
    def total(self) -> int:
        """How many steps there are."""
        return len(self.steps)

    @property
    def percent(self) -> int:
        """How much is done, from 0 to 100, which it is only when every step is."""
        return _percent(self.done, self.total)

    @property
    def is_open(self) -> bool:
        """Whether anything can still change."""
        return self.status not in CLOSED_PLANS

    @cached_property
    def counts(self) -> dict[Stand, int]:
        """How many steps stand so, for each that occurs, in the order of :class:`Stand`."""
        found = dict.fromkeys(Stand, 0)
        for step in self.steps:
            found[step.stand] += 1
        return {stand: number for stand, number in found.items() if number}

    @cached_property
    def is_chain(self) -> bool:
        """Whether there is no more to its dependencies than its order: none at all, or each step waits for the last."""
        in_row = tuple((place, place + 1) for place in range(len(self.steps) - 1))
        return not self.edges or tuple(sorted(self.edges)) == in_row


@dataclass(frozen=True, slots=True)
class Summary:
    """A plan in a list of plans."""

    name: str
    status: str
    done: int
    total: int

    @property
    def percent(self) -> int:
        """As :attr:`Scene.percent`."""
        return _percent(self.done, self.total)

    @property
    def is_open(self) -> bool:
        """As :attr:`Scene.is_open`."""
        return self.status not in CLOSED_PLANS


def look(plans: Plans, name: str) -> Scene:
    """A plan as it stands.

    Raises:
        InvalidInput: no plan can have this name.
        PlanNotFound: there is none.
    """
    named = fields.name(name, "a plan's name")
    return plans._read(lambda transaction: _scene(transaction, named))


def overview(plans: Plans) -> tuple[Summary, ...]:
    """All plans, the open ones first, the newest of each first."""
    return plans._read(lambda transaction: _summaries(transaction.connection))


def _percent(done: int, total: int) -> int:
    return done * 100 // total if total else 0


def _scene(transaction: Transaction, named: str) -> Scene:
    connection = transaction.connection
    plan = reading.plan_row(connection, named)
    rows: Sequence[Row[Any]] = connection.execute(_STEPS, {"plan": plan.pk}).all()
    places = {row.pk: place for place, row in enumerate(rows)}
    blockers: defaultdict[int, list[int]] = defaultdict(list)
    for step, blocker in connection.execute(_EDGES, {"plan": plan.pk}):
        if step in places and blocker in places:
            blockers[places[step]].append(places[blocker])
    shown = tuple(
        _step(plan, row, [rows[blocker] for blocker in blockers.get(place, ())]) for place, row in enumerate(rows)
    )
    changed_at = connection.execute(_CHANGED, {"plan": plan.pk}).scalar_one()
    times = [plan.created_at, plan.closed_at, changed_at, *(time for row in rows for time in _times(row))]
    return Scene(
        name=plan.name,
        description=_clipped(plan.description),
        status=plan.status,
        halted=bool(plan.halted),
        agents_at_work=_agents_at_work(shown),
        created_at=plan.created_at,
        changed_at=max(time for time in times if time is not None),
        steps=shown,
        edges=tuple((blocker, place) for place in range(len(rows)) for blocker in blockers.get(place, ())),
    )


def _step(plan: Row[Any], row: Row[Any], blockers: Sequence[Row[Any]]) -> Step:
    stand = _stand(row)
    waiting = [blocker.key for blocker in blockers if blocker.status != StepStatus.COMPLETED.value]
    return Step(
        key=row.key,
        subject=_clipped(row.subject) or "",
        description=_clipped(row.description),
        status=row.status,
        stand=stand,
        agent=_agent(row) or plan.agent,
        attempts=row.attempts,
        started_at=row.started_at,
        ended_at=row.attempt_ended_at or row.task_ended_at or row.completed_at,
        deadline_at=row.deadline_at if stand is Stand.WORKING else None,
        due_at=row.due_at,
        waiting_for=tuple(waiting) if row.status == StepStatus.PENDING.value else (),
        output=_clipped(row.output),
        error=_clipped(row.error),
    )


def _stand(row: Row[Any]) -> Stand:
    if row.status == StepStatus.PENDING.value:
        if row.open_blockers:
            return Stand.BLOCKED
        return Stand.READY if row.due_at is None else Stand.RETRY
    if row.status == StepStatus.IN_PROGRESS.value:
        if row.task_status not in ACTIVE:
            return Stand.ENDED
        if row.task_status == TaskStatus.RUNNING:
            return Stand.WORKING
        if row.recipient is None:
            return Stand.OPENED
        return Stand.SENT if row.inbox_at is None else Stand.INBOX
    return _OF_STATUS[row.status]


def _agent(row: Row[Any]) -> str | None:
    # Who did it may be another than whose it is: a claim takes what is nobody's.
    tried = row.status in (StepStatus.IN_PROGRESS.value, StepStatus.COMPLETED.value)
    agent: str | None = (row.recipient or row.attempt_agent or row.owner) if tried else row.owner
    return agent


def _times(row: Row[Any]) -> tuple[float | None, ...]:
    return (row.started_at, row.attempt_ended_at, row.task_ended_at, row.inbox_at)


def _agents_at_work(shown: Sequence[Step]) -> int:
    names = [step.agent for step in shown if step.stand is Stand.WORKING]
    return len({name for name in names if name is not None}) + names.count(None)


def _clipped(text: str | None) -> str | None:
    return text if text is None or len(text) <= MOST else f"{text[:MOST]}…"


def _summaries(connection: Connection) -> tuple[Summary, ...]:
    counts = {row.plan_pk: row for row in connection.execute(_COUNTS)}
    found = []
    for plan in connection.execute(_PLANS):
        counted = counts.get(plan.pk)
        done, total = (counted.done, counted.total) if counted is not None else (0, 0)
        found.append(Summary(plan.name, plan.status, done, total))
    # Sorting keeps the order of those that are alike.
    return tuple(sorted(found, key=lambda summary: not summary.is_open))


# -- statements ------------------------------------------------------------------------------------------


def _beginning(column: sa.ColumnElement[Any]) -> sa.Label[Any]:
    """No more of a text than it takes to see that it is too long."""
    return sa.func.substr(column, 1, MOST + 1).label(column.key)


_PLAN: Final[sa.BindParameter[Any]] = sa.bindparam("plan")
_LIVING: Final = steps.c.status != StepStatus.DELETED.value

#: The steps of a plan, each with its last attempt, that attempt's task, and its way to an agent.
_STEPS: Final[sa.Select[Any]] = (
    sa.select(
        steps.c.pk,
        steps.c.key,
        _beginning(steps.c.subject),
        _beginning(steps.c.description),
        steps.c.status,
        steps.c.owner,
        steps.c.attempts,
        _beginning(steps.c.output),
        _beginning(steps.c.error),
        steps.c.due_at,
        steps.c.open_blockers,
        steps.c.completed_at,
        attempts.c.agent.label("attempt_agent"),
        attempts.c.ended_at.label("attempt_ended_at"),
        tasks.c.status.label("task_status"),
        tasks.c.started_at,
        tasks.c.ended_at.label("task_ended_at"),
        tasks.c.deadline_at,
        dispatches.c.agent.label("recipient"),
        dispatches.c.inbox_at,
    )
    .select_from(
        steps.outerjoin(attempts, sa.and_(attempts.c.step_pk == steps.c.pk, attempts.c.number == steps.c.attempts))
        .outerjoin(tasks, tasks.c.id == attempts.c.id)
        .outerjoin(dispatches, dispatches.c.id == attempts.c.id)
    )
    .where(steps.c.plan_pk == _PLAN, _LIVING)
    .order_by(steps.c.number)
)
_EDGES: Final = (
    sa.select(dependencies.c.step_pk, dependencies.c.blocker_pk)
    .select_from(dependencies.join(steps, steps.c.pk == dependencies.c.step_pk))
    .where(steps.c.plan_pk == _PLAN)
    .order_by(dependencies.c.step_pk, dependencies.c.place, dependencies.c.blocker_pk)
)
#: A deleted step's change is one of the plan too.
_CHANGED: Final = sa.select(sa.func.max(steps.c.changed_at)).where(steps.c.plan_pk == _PLAN)

_PLANS: Final = sa.select(plans.c.pk, plans.c.name, plans.c.status).order_by(plans.c.pk.desc())
_COUNTS: Final = (
    sa.select(
        steps.c.plan_pk,
        sa.func.count().label("total"),
        sa.func.count().filter(steps.c.status == StepStatus.COMPLETED.value).label("done"),
    )
    .where(_LIVING)
    .group_by(steps.c.plan_pk)
)
