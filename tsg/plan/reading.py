"""What is read of plans, in whatever transaction there is: rows by their names, and the views that callers get."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple, NotRequired, TypedDict

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from tsg.errors import PlanNotFound, StepNotFound
from tsg.plan import fields, scheduling
from tsg.plan.scheduling import AT_REST, RetryPolicy, StepStatus
from tsg.plan.tables import dependencies, expected, learnings, plans, runs, steps

__all__ = [
    "Edge",
    "Graph",
    "Learning",
    "Node",
    "PlanView",
    "StepView",
    "edges",
    "graph",
    "has_step",
    "learned",
    "number_of_open_blockers",
    "plan_row",
    "plan_rows",
    "plan_view",
    "policy_of",
    "ready",
    "step_row",
    "step_rows",
    "step_views",
]


class StepView(TypedDict):
    """A step as callers see it: the fields of the JSON form, and what is worked out.

    Keys:
        id: its key.
        blockedBy, blocks: the keys of what it waits for, and of what waits for it or will.
        timeout_ms: from an attempt's start to its deadline; ``None`` for no timeout.
        session_id, session_resume: of the last start; and the earlier session that it goes on from.
        ready: it may be claimed now.
        waitingFor: those of its blockers that are not completed.
        attempts: how many it has had.
        attempt: the live one's token, which is the id of its ledger task.
        learnings: of a completed step what it left; of one in progress what it was handed, which is all that those
            left on which it depends, directly or not, in order of completion.
        due_at: before which a retry is not ready, seconds since the epoch.
        unblocked: in the answer that completes or deletes a step: what waits for nothing any more.
        followUp: in the answer that accepts a part: the key of the step that does the rest.
        notes: in an answer: what was done besides, in words.
    """

    id: str
    subject: str
    description: str | None
    status: str
    activeForm: str | None
    blockedBy: list[str]
    blocks: list[str]
    owner: str | None
    metadata: dict[str, Any]
    threadID: str | None
    timeout_ms: int | float | None
    retry_policy: dict[str, Any]
    fallback_agent: str | None
    partial_ok: bool
    session_id: str | None
    session_resume: str | None
    session_name: str | None
    params: dict[str, Any]
    output: str | None
    error: str | None
    ready: bool
    waitingFor: list[str]
    attempts: int
    attempt: str | None
    learnings: list[str]
    due_at: float | None
    unblocked: NotRequired[list[str]]
    followUp: NotRequired[str]
    notes: NotRequired[list[str]]


class PlanView(TypedDict):
    """A plan as callers see it.

    Keys:
        root: the id of its ledger task.
        steps: how many there are of each status.
        ready: how many may be claimed now.
        defaults: what a step has where it says nothing else.
        grace_seconds: how long an attempt that sends heartbeats may be silent.
        created_at, closed_at: seconds since the epoch.
        agent, session_name: who does a step that has no owner, and in which session of theirs.
        halted: something could not be delivered to its agent; the plan is failed for that.
        global_retry: how often it has gone on after it was failed.
        cockpit: the file of the page that tells how it stands.
    """

    name: str
    description: str | None
    status: str
    root: str
    agent: str | None
    session_name: str | None
    halted: bool
    global_retry: int
    cockpit: str | None
    on_exhausted: str
    grace_seconds: float
    defaults: dict[str, Any]
    steps: dict[str, int]
    ready: int
    created_at: float
    closed_at: float | None


class Learning(TypedDict):
    """What a step left for others to know; `at` in seconds since the epoch."""

    step: str
    text: str
    at: float


class Node(NamedTuple):
    """A step in a picture of its plan."""

    key: str
    subject: str
    status: str
    owner: str | None
    ready: bool


class Edge(NamedTuple):
    """That one step waits for another, by their keys."""

    blocker: str
    step: str


class Graph(NamedTuple):
    """The steps of a plan, deleted ones left out, in order of creation, and what waits for what."""

    plan: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


#: As many steps as are looked up one by one.
_FEW: Final = 100


def plan_row(connection: Connection, name: str, lock: str | None = None) -> Row[Any]:
    """The plan of that name.

    Args:
        lock: ``shared`` with others who do something to single steps, or ``own``.

    Raises:
        PlanNotFound: there is none.
    """
    found = connection.execute(_PLAN[lock], {"name": name}).first()
    if found is None:
        raise PlanNotFound("there is no plan with this name; tsg plan list shows those that are")
    return found


def plan_rows(connection: Connection) -> Sequence[Row[Any]]:
    """All plans, in order of creation."""
    return connection.execute(_PLANS.order_by(plans.c.pk)).all()


def step_row(connection: Connection, plan: Row[Any], key: str, *, lock: bool = False) -> Row[Any]:
    """The step of a plan with that key.

    Raises:
        StepNotFound: there is none.
    """
    found = connection.execute(_step(lock), {"plan": plan.pk, "key": key}).first()
    if found is None:
        raise StepNotFound("the plan has no step with this key; tsg step list PLAN --all shows those that it has")
    return found


def step_rows(
    connection: Connection,
    plan: Row[Any],
    now: float,
    *,
    status: StepStatus | None = None,
    owner: str | None = None,
    is_ready: bool | None = None,
    all_of_them: bool = False,
) -> Sequence[Row[Any]]:
    """The steps of a plan that fit, in order of creation; the active ones where nothing else is said."""
    query = sa.select(steps).where(steps.c.plan_pk == plan.pk).order_by(steps.c.number)
    if status is not None:
        query = query.where(steps.c.status == status.value)
    elif not all_of_them:
        query = query.where(steps.c.status.not_in(AT_REST))
    if owner is not None:
        query = query.where(steps.c.owner == owner)
    if is_ready is not None:
        condition = ready(now)
        query = query.where(condition if is_ready else sa.not_(condition))
    return connection.execute(query).all()


def ready(now: float) -> sa.ColumnElement[bool]:
    """That a step may be claimed: what :func:`tsg.plan.scheduling.is_ready` says, as a condition."""
    return sa.and_(CLAIMABLE, sa.or_(steps.c.due_at.is_(None), steps.c.due_at <= now))


def number_of_open_blockers() -> sa.ScalarSelect[int]:
    """How many of those that a step waits for are not completed, by its dependencies."""
    blocker = steps.alias("blocker")
    return (
        sa.select(sa.func.count())
        .select_from(dependencies.join(blocker, blocker.c.pk == dependencies.c.blocker_pk))
        .where(dependencies.c.step_pk == steps.c.pk, blocker.c.status != StepStatus.COMPLETED.value)
        .scalar_subquery()
    )


def has_step(plan: sa.ColumnElement[Any], *statuses: StepStatus, among: bool) -> sa.ColumnElement[bool]:
    """That the plan with this key has a step of one of these statuses; or of none of them, where not `among`."""
    words = [status.value for status in statuses]
    condition = steps.c.status.in_(words) if among else steps.c.status.not_in(words)
    return sa.exists().where(steps.c.plan_pk == plan, condition)


def edges(connection: Connection, plan: Row[Any]) -> dict[int, list[int]]:
    """All that each step of a plan waits for, by the keys of their rows."""
    query = (
        sa.select(dependencies.c.step_pk, dependencies.c.blocker_pk)
        .select_from(dependencies.join(steps, steps.c.pk == dependencies.c.step_pk))
        .where(steps.c.plan_pk == plan.pk)
    )
    found: defaultdict[int, list[int]] = defaultdict(list)
    for step, blocker in connection.execute(query):
        found[step].append(blocker)
    return found


def policy_of(row: Row[Any]) -> RetryPolicy:
    """The retry policy of a step, or that which a plan has for its steps."""
    return RetryPolicy(row.retries, row.backoff, row.base_seconds, row.factor, row.cap_seconds)


def step_views(connection: Connection, rows: Sequence[Row[Any]], now: float) -> list[StepView]:
    """Steps of one plan as callers see them."""
    if not rows:
        return []
    few = len(rows) <= _FEW
    among: dict[str, Any] = {"steps": [row.pk for row in rows]} if few else {"plan": rows[0].plan_pk}
    asked = _about(few)
    blockers: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for step, key, status in connection.execute(asked.blockers, among):
        blockers[step].append((key, status))
    dependents: defaultdict[int, list[str]] = defaultdict(list)
    for query in (asked.dependents, asked.expected):
        for blocker, key in connection.execute(query, among):
            dependents[blocker].append(key)
    texts: defaultdict[int, list[str]] = defaultdict(list)
    for query in (asked.left, asked.handed):
        for row in sorted(connection.execute(query, among).all(), key=lambda row: row.pk):
            texts[row[0]].append(row.text)
    return [_step_view(row, blockers[row.pk], dependents[row.pk], texts[row.pk], now) for row in rows]


def _step_view(
    row: Row[Any], blockers: list[tuple[str, str]], dependents: list[str], texts: list[str], now: float
) -> StepView:
    return StepView(
        id=row.key,
        subject=row.subject,
        description=row.description,
        status=row.status,
        activeForm=row.active_form,
        blockedBy=[key for key, _ in blockers],
        blocks=dependents,
        owner=row.owner,
        metadata=row.metadata,
        threadID=row.thread_id,
        timeout_ms=fields.timeout_ms(row.timeout_seconds),
        retry_policy=policy_of(row).to_json(),
        fallback_agent=row.fallback_agent,
        partial_ok=row.partial_ok,
        session_id=row.session_id,
        session_resume=row.session_resume,
        session_name=row.session_name,
        params=row.params,
        output=row.output,
        error=row.error,
        ready=scheduling.is_ready(row.status, row.open_blockers, row.due_at, now),
        waitingFor=[key for key, status in blockers if status != StepStatus.COMPLETED.value],
        attempts=row.attempts,
        attempt=row.attempt_id,
        learnings=texts,
        due_at=row.due_at,
    )


def plan_view(connection: Connection, plan: Row[Any], now: float) -> PlanView:
    """A plan as callers see it."""
    by_status = sa.select(steps.c.status, sa.func.count()).where(steps.c.plan_pk == plan.pk).group_by(steps.c.status)
    counts: dict[str, int] = {row[0]: row[1] for row in connection.execute(by_status)}
    count_ready = sa.select(sa.func.count()).select_from(steps).where(steps.c.plan_pk == plan.pk, ready(now))
    return PlanView(
        name=plan.name,
        description=plan.description,
        status=plan.status,
        root=plan.root_id,
        agent=plan.agent,
        session_name=plan.session_name,
        halted=plan.halted,
        global_retry=plan.global_retry,
        cockpit=plan.cockpit,
        on_exhausted=plan.on_exhausted,
        grace_seconds=plan.grace_seconds,
        defaults={
            "timeout_ms": fields.timeout_ms(plan.timeout_seconds),
            "retry_policy": policy_of(plan).to_json(),
            "fallback_agent": plan.fallback_agent,
            "partial_ok": plan.partial_ok,
        },
        steps={status.value: counts.get(status.value, 0) for status in StepStatus},
        ready=connection.execute(count_ready).scalar_one(),
        created_at=plan.created_at,
        closed_at=plan.closed_at,
    )


def learned(connection: Connection, plan: Row[Any]) -> list[Learning]:
    """All that was learned in a plan, in order of completion."""
    query = (
        sa.select(steps.c.key, learnings.c.text, learnings.c.learned_at)
        .select_from(learnings.join(steps, steps.c.pk == learnings.c.step_pk))
        .where(steps.c.plan_pk == plan.pk)
        .order_by(learnings.c.pk)
    )
    return [Learning(step=key, text=text, at=at) for key, text, at in connection.execute(query)]


def graph(connection: Connection, plan: Row[Any], now: float) -> Graph:
    """The picture of a plan."""
    shown = sa.select(steps).where(steps.c.plan_pk == plan.pk, steps.c.status != StepStatus.DELETED.value)
    rows = connection.execute(shown.order_by(steps.c.number)).all()
    keys = {row.pk: row.key for row in rows}
    nodes = tuple(
        Node(
            row.key,
            row.subject,
            row.status,
            row.owner,
            scheduling.is_ready(row.status, row.open_blockers, row.due_at, now),
        )
        for row in rows
    )
    waits = edges(connection, plan)
    drawn = tuple(Edge(keys[blocker], keys[row.pk]) for row in rows for blocker in waits.get(row.pk, ()))
    return Graph(plan.name, nodes, drawn)


# -- statements ------------------------------------------------------------------------------------------

#: As the index of claimable steps has it, word for word.
CLAIMABLE: Final = sa.text("status = 'pending' AND open_blockers = 0")

#: With how it is run. Both rows are locked, so that neither is older than the other.
_PLANS: Final = sa.select(plans, *(column for column in runs.c if column is not runs.c.plan_pk)).join_from(
    plans, runs, runs.c.plan_pk == plans.c.pk
)
_BY_NAME: Final = _PLANS.where(plans.c.name == sa.bindparam("name"))
_PLAN: Final = {
    None: _BY_NAME,
    "shared": _BY_NAME.with_for_update(read=True),
    "own": _BY_NAME.with_for_update(),
}


@cache
def _step(lock: bool) -> sa.Select[Any]:
    query = sa.select(steps).where(steps.c.plan_pk == sa.bindparam("plan"), steps.c.key == sa.bindparam("key"))
    return query.with_for_update() if lock else query


class _About(NamedTuple):
    """What is asked about steps beside their rows; each answer begins with the key of a step's row.

    Attributes:
        blockers: what it waits for, in the order in which that was given.
        dependents: what waits for it.
        expected: what will.
        left: what completing it has taught.
        handed: what all on which a step in progress depends, directly or not, have taught.
    """

    blockers: sa.Select[Any]
    dependents: sa.Select[Any]
    expected: sa.Select[Any]
    left: sa.Select[Any]
    handed: sa.Select[Any]


@cache
def _about(few: bool) -> _About:
    """The questions about few steps, the parameter ``steps``, or about all of a plan, the parameter ``plan``.

    Few are looked up by themselves; for many, the whole plan is read at once.
    """
    these: sa.BindParameter[Any] = sa.bindparam("steps", expanding=True)
    plan: sa.BindParameter[Any] = sa.bindparam("plan")
    among: sa.ColumnElement[bool] = steps.c.pk.in_(these) if few else steps.c.plan_pk == plan
    blocker, dependent = steps.alias("blocker"), steps.alias("dependent")
    waits = steps.join(dependencies, dependencies.c.step_pk == steps.c.pk)
    is_waited_for = steps.join(dependencies, dependencies.c.blocker_pk == steps.c.pk)
    # From each step in progress up to all that it depends on; a way that was gone is not gone again.
    walk = (
        sa.select(dependencies.c.step_pk.label("start"), dependencies.c.blocker_pk.label("reached"))
        .select_from(waits)
        .where(among, steps.c.status == StepStatus.IN_PROGRESS.value)
        .cte("walk", recursive=True)
    )
    walk = walk.union(
        sa.select(walk.c.start, dependencies.c.blocker_pk).select_from(
            walk.join(dependencies, dependencies.c.step_pk == walk.c.reached)
        )
    )
    return _About(
        blockers=sa.select(steps.c.pk, blocker.c.key, blocker.c.status)
        .select_from(waits.join(blocker, blocker.c.pk == dependencies.c.blocker_pk))
        .where(among)
        .order_by(steps.c.pk, dependencies.c.place, blocker.c.number),
        dependents=sa.select(steps.c.pk, dependent.c.key)
        .select_from(is_waited_for.join(dependent, dependent.c.pk == dependencies.c.step_pk))
        .where(among)
        .order_by(steps.c.pk, dependent.c.number),
        expected=sa.select(steps.c.pk, expected.c.key)
        .select_from(steps.join(expected, expected.c.blocker_pk == steps.c.pk))
        .where(among)
        .order_by(steps.c.pk, expected.c.key),
        left=sa.select(learnings.c.step_pk, learnings.c.pk, learnings.c.text)
        .select_from(learnings.join(steps, steps.c.pk == learnings.c.step_pk))
        .where(among),
        handed=sa.select(walk.c.start, learnings.c.pk, learnings.c.text).select_from(
            walk.join(learnings, learnings.c.step_pk == walk.c.reached)
        ),
    )
