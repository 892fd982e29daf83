"""What a runner does to a plan, each in one transaction: take what is ready, hand it over, and start over.

An attempt that is handed over is *queued*. It has a lease, within which whoever sends it tells what came of that; a
lease that runs out on a queued attempt was a runner's that is gone, and another sends the same token again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Row

from tsg.plan import attempts, reading, structure
from tsg.plan.fields import parsed
from tsg.plan.scheduling import AWAITING_DECISION, CLOSED_PLANS, MOST_REVIVALS, Decision, PlanStatus, StepStatus
from tsg.plan.tables import dispatches, runs, steps
from tsg.plan.transaction import Transaction
from tsg.runner.commands import session_of
from tsg.runner.message import Errand
from tsg.states import TaskStatus
from tsg.tables import tasks

__all__ = [
    "LEASE_SECONDS",
    "Change",
    "Round",
    "errand_of",
    "hand_over",
    "is_waiting",
    "put_back",
    "release",
    "start_over",
    "take_round",
]

#: Within which it must be told what came of sending an attempt; it is renewed while a command runs.
LEASE_SECONDS: Final = 60.0


class Change(NamedTuple):
    """Where a step stands that has changed since it was last looked at."""

    key: str
    status: str
    agent: str | None
    attempts: int
    error: str | None
    changed_at: float


class Round(NamedTuple):
    """Where a plan stands after one round.

    Attributes:
        now: the time of the round; this and all times in seconds since the epoch.
        status: the plan's.
        errands: what is to be handed over now.
        live: how many attempts live.
        unassigned: how many steps are ready that are nobody's.
        next_at: when something is due next: a retry, a deadline, the end of a lease or of a silence.
        moved_at: when a step last changed.
        awaiting: how many steps wait for a decision.
        passed_over: the keys of steps whose attempts can't be acted on.
        changes: what has changed since then, or at that time, in order.
    """

    now: float
    status: str
    errands: list[Errand]
    live: int
    unassigned: int
    ready: int
    next_at: float | None
    moved_at: float
    awaiting: int
    passed_over: list[str]
    changes: list[Change]


def start_over(transaction: Transaction, plan: Row[Any], *, resume: bool) -> bool:
    """Let a failed plan begin once more with what is not done, and count that; a plan that goes on is let be.

    What lies in an inbox is sent once more, and stays there meanwhile.

    Args:
        resume: a person says so; the count begins anew.

    Returns:
        Whether it may go on; not where it has started over as often as it may by itself.
    """
    if plan.status in CLOSED_PLANS:
        return True
    if resume:
        _of_run(transaction, plan, global_retry=0)
    if plan.status != PlanStatus.FAILED.value:
        structure.settle(transaction, reading.plan_row(transaction.connection, plan.name))
        return True
    if not resume and plan.global_retry >= MOST_REVIVALS:
        return False
    _of_run(transaction, plan, halted=False, **({} if resume else {"global_retry": plan.global_retry + 1}))
    failed = sa.select(steps).where(steps.c.plan_pk == plan.pk, steps.c.status == StepStatus.FAILED.value)
    for step in transaction.connection.execute(failed.order_by(steps.c.number)).all():
        plan = reading.plan_row(transaction.connection, plan.name)
        attempts.decide(transaction, plan, step, Decision.RETRY, None)
    structure.settle(transaction, reading.plan_row(transaction.connection, plan.name))
    live = sa.select(steps.c.attempt_id).where(steps.c.plan_pk == plan.pk, steps.c.attempt_id.is_not(None))
    transaction.write(sa.update(dispatches).where(dispatches.c.id.in_(live)).values(lease_until=transaction.now))
    return True


def take_round(
    transaction: Transaction,
    plan: Row[Any],
    *,
    mine: Collection[str],
    most: int,
    since: float,
    by_heartbeat: bool = True,
) -> Round:
    """Advance a plan, renew the leases of what this runner hands over, and take what is to be handed over now.

    Args:
        mine: the attempts whose commands are still running.
        most: how many attempts of the plan may live at once, whoever has begun them; 0 to begin none.
        since: changes before this time are known.
        by_heartbeat: whether what has been silent for too long is timed out.
    """
    now = transaction.now
    passed_over = attempts.advance(transaction, plan, by_heartbeat=by_heartbeat)
    plan = reading.plan_row(transaction.connection, plan.name)
    still = _queued(plan).with_only_columns(dispatches.c.id).where(dispatches.c.id.in_(mine))
    leased = sa.update(dispatches).where(dispatches.c.id.in_(still))
    transaction.write(leased.values(lease_until=now + LEASE_SECONDS))
    errands: list[Errand] = []
    if most and plan.status not in (*CLOSED_PLANS, PlanStatus.FAILED.value):
        errands = [*_again(transaction, plan, mine), *_anew(transaction, plan, most)]
        plan = reading.plan_row(transaction.connection, plan.name)
    return _round(transaction, plan, errands, passed_over, since)


def is_waiting(transaction: Transaction, step: Row[Any], attempt: str) -> bool:
    """Whether a step's live attempt is this one, and queued."""
    if step.attempt_id != attempt:
        return False
    found = sa.select(tasks.c.pk).where(tasks.c.id == attempt, tasks.c.status == TaskStatus.QUEUED)
    return transaction.connection.execute(found).first() is not None


def hand_over(transaction: Transaction, plan: Row[Any], step: Row[Any], attempt: str) -> bool:
    """Start an attempt that has reached its agent; whether that was to be done."""
    if not is_waiting(transaction, step, attempt):
        return False
    attempts.start(transaction, plan, step, attempt=attempt)
    return True


def put_back(transaction: Transaction, plan: Row[Any], step: Row[Any], attempt: str, *, halt: bool) -> bool:
    """Leave an attempt that has not reached its agent in the agent's inbox; whether that was to be done.

    Args:
        halt: the plan fails with that.
    """
    if not is_waiting(transaction, step, attempt):
        return False
    since = sa.func.coalesce(dispatches.c.inbox_at, transaction.now)
    here = sa.update(dispatches).where(dispatches.c.id == attempt)
    if not transaction.write(here.values(lease_until=None, inbox_at=since)):
        return False
    if halt and plan.status not in CLOSED_PLANS:
        structure.halt(transaction, plan)
    return True


def release(transaction: Transaction, plan: Row[Any], step: Row[Any], attempt: str) -> bool:
    """End the lease of an attempt that is not handed over after all, so that another runner need not wait for that.

    Returns:
        Whether that was to be done.
    """
    if not is_waiting(transaction, step, attempt):
        return False
    leased = sa.update(dispatches).where(dispatches.c.id == attempt, dispatches.c.lease_until.is_not(None))
    return bool(transaction.write(leased.values(lease_until=transaction.now)))


def errand_of(transaction: Transaction, plan: Row[Any], key: str) -> Errand:
    """What there is to tell about a step's attempt that is on its way."""
    step = reading.step_row(transaction.connection, plan, key)
    way = transaction.connection.execute(sa.select(dispatches).where(dispatches.c.id == step.attempt_id)).one()
    living = sa.and_(steps.c.plan_pk == plan.pk, steps.c.status != StepStatus.DELETED.value)
    counted = sa.select(sa.func.count(), sa.func.count().filter(steps.c.number <= step.number)).where(living)
    total, place = transaction.connection.execute(counted).one()
    document = {} if plan.source is None else parsed(plan.source)
    return Errand(
        plan=plan.name,
        about=plan.description,
        task_id=str(document.get("task_id") or plan.root_id),
        step=reading.step_views(transaction.connection, [step], transaction.now)[0],
        place=place,
        total=total,
        agent=way.agent,
        session=way.session,
        attempt=way.id,
        deliveries=way.deliveries,
        inbox_at=way.inbox_at,
    )


# -- inside ----------------------------------------------------------------------------------------------


def _of_run(transaction: Transaction, plan: Row[Any], **columns: Any) -> None:
    transaction.write(sa.update(runs).where(runs.c.plan_pk == plan.pk).values(columns), expected=1)


def _queued(plan: Row[Any]) -> sa.Select[Any]:
    """What is on its way, and was not started behind the plan's back."""
    joined = dispatches.join(steps, steps.c.attempt_id == dispatches.c.id).join(tasks, tasks.c.id == dispatches.c.id)
    query = sa.select(dispatches, steps.c.key).select_from(joined)
    return query.where(steps.c.plan_pk == plan.pk, tasks.c.status == TaskStatus.QUEUED)


def _again(transaction: Transaction, plan: Row[Any], mine: Collection[str]) -> list[Errand]:
    """What was sent by a runner that did not tell what came of it."""
    now, lease = transaction.now, dispatches.c.lease_until
    # A clock that was set back since makes no lease longer.
    over = _queued(plan).where(sa.or_(lease <= now, lease > now + LEASE_SECONDS))
    found = []
    for way in transaction.connection.execute(over.order_by(steps.c.number)).all():
        if way.id in mine:
            continue
        sent = {"lease_until": now + LEASE_SECONDS, "deliveries": way.deliveries + 1}
        transaction.write(sa.update(dispatches).where(dispatches.c.id == way.id).values(sent), expected=1)
        found.append(errand_of(transaction, plan, way.key))
    return found


def _anew(transaction: Transaction, plan: Row[Any], most: int) -> list[Errand]:
    """New attempts of what is ready and somebody's, the first steps first."""
    in_progress = sa.select(sa.func.count()).where(
        steps.c.plan_pk == plan.pk, steps.c.status == StepStatus.IN_PROGRESS.value
    )
    free = most - transaction.connection.execute(in_progress).scalar_one()
    if free <= 0:
        return []
    query = sa.select(steps).where(steps.c.plan_pk == plan.pk, reading.ready(transaction.now))
    if plan.agent is None:
        query = query.where(steps.c.owner.is_not(None))
    found = []
    for step in transaction.connection.execute(query.order_by(steps.c.number).limit(free)).all():
        plan = reading.plan_row(transaction.connection, plan.name)
        agent = step.owner or plan.agent
        attempt = attempts.open_attempt(transaction, plan, step, agent)
        way = {
            "id": attempt,
            "agent": agent,
            "session": session_of(agent, step.session_name or plan.session_name),
            "deliveries": 1,
            "lease_until": transaction.now + LEASE_SECONDS,
        }
        transaction.write(sa.insert(dispatches).values(way), expected=1)
        found.append(errand_of(transaction, plan, step.key))
    return found


def _round(
    transaction: Transaction,
    plan: Row[Any],
    errands: list[Errand],
    passed_over: list[str],
    since: float,
) -> Round:
    now, connection = transaction.now, transaction.connection
    of_plan = steps.c.plan_pk == plan.pk
    claimable = sa.and_(of_plan, reading.CLAIMABLE)
    is_due = sa.or_(steps.c.due_at.is_(None), steps.c.due_at <= now)
    counts = connection.execute(
        sa.select(
            sa.func.count().filter(steps.c.status == StepStatus.IN_PROGRESS.value).label("live"),
            sa.func.count().filter(steps.c.status.in_(AWAITING_DECISION)).label("awaiting"),
            sa.func.max(steps.c.changed_at).label("moved_at"),
        ).where(of_plan)
    ).one()
    nobodys = sa.and_(steps.c.owner.is_(None), sa.literal(plan.agent is None))
    ready = connection.execute(
        sa.select(
            sa.func.count().filter(is_due).label("all"),
            sa.func.count().filter(is_due, nobodys).label("unassigned"),
            sa.func.min(sa.case((steps.c.due_at > now, steps.c.due_at))).label("due_at"),
        ).where(claimable)
    ).one()
    silent_at = sa.case((tasks.c.expects_heartbeat, tasks.c.updated_at + plan.grace_seconds))
    living = steps.join(tasks, tasks.c.id == steps.c.attempt_id).outerjoin(
        dispatches, dispatches.c.id == steps.c.attempt_id
    )
    times = connection.execute(
        sa.select(
            sa.func.min(sa.case((tasks.c.deadline_at > now, tasks.c.deadline_at))),
            sa.func.min(sa.case((silent_at > now, silent_at))),
            sa.func.min(sa.case((dispatches.c.lease_until > now, dispatches.c.lease_until))),
        )
        .select_from(living)
        .where(of_plan)
    ).one()
    changed = sa.select(steps).where(of_plan, steps.c.changed_at >= since).order_by(steps.c.changed_at, steps.c.number)
    return Round(
        now=now,
        status=plan.status,
        errands=errands,
        live=counts.live - len(passed_over),
        unassigned=ready.unassigned,
        ready=ready.all,
        next_at=min((moment for moment in (ready.due_at, *times) if moment is not None), default=None),
        moved_at=plan.created_at if counts.moved_at is None else counts.moved_at,
        awaiting=counts.awaiting,
        passed_over=passed_over,
        changes=[
            Change(row.key, row.status, row.owner, row.attempts, row.error, row.changed_at)
            for row in connection.execute(changed)
        ],
    )
