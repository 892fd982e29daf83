"""Doctor for plans: that they are consistent in themselves, and agree with the ledger. Reads only; counts only.

As in :mod:`tsg.doctor`, :data:`CHECKS` is the whole of it; the ledger's own checks come first.
"""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final, NamedTuple, NotRequired, cast

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tsg import catalog, doctor, rules
from tsg.engine import DATABASE_ERRORS, contained, refusing, snapshot
from tsg.listing import Progress
from tsg.plan import reading, schema
from tsg.plan.scheduling import PlanStatus, StepStatus
from tsg.plan.tables import agents, attempts, dependencies, dispatches, learnings, plans, runs, steps
from tsg.sessions import Session, connection_of
from tsg.tables import tasks

__all__ = ["CHECKS", "Check", "Report", "examine"]


class Report(doctor.Report):
    """What doctor found.

    Keys:
        plan_inconsistency_count: plans, steps, attempts and dependencies that contradict themselves, each other or the
            ledger, once for every check that finds them; only where there are tables for plans.
    """

    plan_inconsistency_count: NotRequired[int]


class Check(NamedTuple):
    """One question: a name, and a function from a connection to how many rows are wrong."""

    name: str
    count: Callable[[Connection], int]


def examine(target: Connection | Session, *, progress: Progress | None = None) -> Report:
    """Every check on the ledger, and where there are tables for plans every check on those.

    Arguments and errors as for :func:`tsg.doctor.examine`.
    """
    with refusing():
        connection = connection_of(target)
    with refusing(), snapshot(connection):
        found = cast("Report", doctor.examine(connection, progress=progress))
        try:
            with contained(connection):
                present = catalog.has_plans(connection)
        except DATABASE_ERRORS:
            return found
        if not present:
            return found
        found["plan_inconsistency_count"], errors = _count(connection, found["schema_ok"])
    found["doctor_error_count"] += errors
    found["healthy"] = found["healthy"] and not errors and not found["plan_inconsistency_count"]
    return found


def _count(connection: Connection, ledger_is_exact: bool) -> tuple[int, int]:
    """How many rows are wrong, and how many checks could not be carried out."""
    try:
        with contained(connection):
            if not ledger_is_exact or schema.fault(connection) is not None:
                return 0, 1
    except DATABASE_ERRORS:
        return 0, 1
    wrong = errors = 0
    for check in CHECKS:
        try:
            with contained(connection):
                wrong += check.count(connection)
        except DATABASE_ERRORS:
            errors += 1
    return wrong, errors


# -- the checks ------------------------------------------------------------------------------------------


def _number_of(query: Callable[[], sa.Select[Any] | sa.CompoundSelect[Any]]) -> Callable[[Connection], int]:
    """A check that counts what a query finds."""
    counted = cache(lambda: sa.select(sa.func.count()).select_from(query().subquery("wrong")))
    return lambda connection: connection.execute(counted()).scalar_one()


def _wrong_blocker_counts() -> sa.Select[Any]:
    """Steps whose number of open blockers is not what their dependencies say."""
    return sa.select(steps.c.pk).where(steps.c.open_blockers != reading.number_of_open_blockers())


def _wrong_dependencies() -> sa.Select[Any]:
    """Dependencies of what is not there, is deleted, or is of another plan."""
    step, blocker = steps.alias("step"), steps.alias("blocker")
    joined = dependencies.outerjoin(step, step.c.pk == dependencies.c.step_pk)
    deleted = StepStatus.DELETED.value
    return (
        sa.select(dependencies.c.step_pk)
        .select_from(joined.outerjoin(blocker, blocker.c.pk == dependencies.c.blocker_pk))
        .where(
            sa.or_(
                step.c.pk.is_(None),
                blocker.c.pk.is_(None),
                step.c.plan_pk != blocker.c.plan_pk,
                step.c.status == deleted,
                blocker.c.status == deleted,
            )
        )
    )


def _wrong_live_attempts() -> sa.Select[Any]:
    """Steps in progress whose attempt is not there, not theirs, not their last one, over, or not the ledger's."""
    task, attempt = tasks.c, attempts.c
    joined = steps.join(plans, plans.c.pk == steps.c.plan_pk).outerjoin(attempts, attempt.id == steps.c.attempt_id)
    return (
        sa.select(steps.c.pk)
        .select_from(joined.outerjoin(tasks, task.id == steps.c.attempt_id))
        .where(
            steps.c.attempt_id.is_not(None),
            rules.is_not_true(
                sa.and_(
                    attempt.step_pk == steps.c.pk,
                    attempt.number == steps.c.attempts,
                    attempt.ended_as.is_(None),
                    # What the ledger was pruned of before it was folded is folded by the next advance.
                    sa.or_(
                        task.id.is_(None),
                        sa.and_(
                            task.parent_id == plans.c.root_id,
                            rules.is_not_true(task.delivery_required),
                            task.created_at == attempt.opened_at,
                        ),
                    ),
                )
            ),
        )
    )


def _stray_tasks() -> sa.Select[Any]:
    """Tasks below a plan's root that live, and are no step's live attempt."""
    return (
        sa.select(tasks.c.pk)
        .select_from(tasks.join(plans, plans.c.root_id == tasks.c.parent_id))
        .where(rules.active(tasks.c), ~sa.exists().where(steps.c.attempt_id == tasks.c.id))
    )


def _loose_attempts() -> sa.Select[Any]:
    """Attempts that are not over and not their step's live one; two live ones of a step are never both right."""
    joined = attempts.outerjoin(steps, steps.c.pk == attempts.c.step_pk)
    return (
        sa.select(attempts.c.id)
        .select_from(joined)
        .where(
            sa.or_(
                steps.c.pk.is_(None),
                attempts.c.number > steps.c.attempts,
                sa.and_(attempts.c.ended_as.is_(None), steps.c.attempt_id.is_distinct_from(attempts.c.id)),
            )
        )
    )


def _wrong_ended_attempts() -> sa.Select[Any]:
    """Attempts that have ended otherwise than the ledger has it; of a task that was pruned it has nothing."""
    task = tasks.c
    return (
        sa.select(attempts.c.id)
        .select_from(attempts.join(tasks, task.id == attempts.c.id))
        .where(
            attempts.c.ended_as.is_not(None),
            rules.is_not_true(
                sa.and_(
                    sa.type_coerce(task.status, sa.String()) == attempts.c.ended_as,
                    task.ended_at == attempts.c.ended_at,
                    sa.not_(rules.undelivered(task)),
                )
            ),
        )
    )


def _wrong_attempt_counts() -> sa.Select[Any]:
    """Steps with more or fewer attempts than they count."""
    had = sa.select(sa.func.count()).where(attempts.c.step_pk == steps.c.pk).scalar_subquery()
    return sa.select(steps.c.pk).where(steps.c.attempts != had)


def _wrong_plan_states() -> sa.Select[Any]:
    """Plans whose status is not that of their steps."""

    has = partial(reading.has_step, plans.c.pk)
    completed, cancelled, deleted = StepStatus.COMPLETED, StepStatus.CANCELLED, StepStatus.DELETED
    any_step = has(deleted, among=False)
    unsettled = has(completed, cancelled, deleted, among=False)
    failed = has(StepStatus.FAILED, among=True)
    tried = sa.exists().where(steps.c.plan_pk == plans.c.pk, steps.c.attempts > 0, steps.c.status != deleted.value)
    begun = sa.or_(has(StepStatus.PENDING, deleted, among=False), tried)
    is_open = sa.or_(unsettled, sa.not_(any_step))
    right = {
        PlanStatus.COMPLETED: sa.and_(any_step, sa.not_(unsettled)),
        PlanStatus.CANCELLED: sa.not_(unsettled),
        PlanStatus.FAILED: sa.and_(is_open, sa.or_(failed, runs.c.halted)),
        # That a plan has begun once is not forgotten, whatever was deleted since.
        PlanStatus.RUNNING: sa.and_(is_open, sa.not_(failed)),
        # One that goes on after it was failed is pending until somebody takes its next step.
        PlanStatus.PENDING: sa.and_(is_open, sa.or_(sa.not_(begun), runs.c.global_retry > 0), sa.not_(failed)),
    }
    fits = sa.case(*((plans.c.status == status.value, condition) for status, condition in right.items()))
    # Only a failed plan is halted.
    halts = sa.or_(plans.c.status == PlanStatus.FAILED.value, sa.not_(runs.c.halted))
    joined = plans.outerjoin(runs, runs.c.plan_pk == plans.c.pk)
    return sa.select(plans.c.pk).select_from(joined).where(rules.is_not_true(sa.and_(fits, halts)))


def _wrong_runs() -> sa.CompoundSelect[Any]:
    """Plans of which nobody knows how they are run, and how plans are run that are not there."""
    unknown = sa.select(plans.c.pk).where(~sa.exists().where(runs.c.plan_pk == plans.c.pk))
    return unknown.union_all(sa.select(runs.c.plan_pk).where(~sa.exists().where(plans.c.pk == runs.c.plan_pk)))


def _wrong_dispatches() -> sa.Select[Any]:
    """What is on its way, or in an inbox, and is no live attempt, or that of another agent."""
    attempt = attempts.c
    joined = dispatches.outerjoin(attempts, attempt.id == dispatches.c.id)
    is_live = sa.exists().where(steps.c.attempt_id == dispatches.c.id)
    right = sa.and_(attempt.ended_as.is_(None), attempt.agent == dispatches.c.agent, is_live)
    return sa.select(dispatches.c.id).select_from(joined).where(rules.is_not_true(right))


def _wrong_roots() -> sa.Select[Any]:
    """Plans whose root is not what the plan is: queued as long as it is open; pruned at most once it is closed."""
    task = tasks.c
    status = sa.type_coerce(task.status, sa.String())
    right = sa.case(
        (plans.c.status == PlanStatus.COMPLETED.value, sa.or_(task.id.is_(None), status == "succeeded")),
        (plans.c.status == PlanStatus.CANCELLED.value, sa.or_(task.id.is_(None), status == "cancelled")),
        else_=status == "queued",
    )
    return (
        sa.select(plans.c.pk)
        .select_from(plans.outerjoin(tasks, task.id == plans.c.root_id))
        .where(rules.is_not_true(right))
    )


def _wrong_numbers() -> sa.Select[Any]:
    """Steps whose number is still to be given, and tries that no policy allows."""
    return (
        sa.select(steps.c.pk)
        .select_from(steps.outerjoin(plans, plans.c.pk == steps.c.plan_pk))
        .where(
            sa.or_(
                plans.c.pk.is_(None),
                steps.c.number >= plans.c.next_number,
                steps.c.created_at > steps.c.changed_at,
                steps.c.completed_at < steps.c.created_at,
                plans.c.closed_at < plans.c.created_at,
            )
        )
    )


def _wrong_learnings() -> sa.Select[Any]:
    """What was learned from a step that is not completed."""
    joined = learnings.outerjoin(steps, steps.c.pk == learnings.c.step_pk)
    return (
        sa.select(learnings.c.pk).select_from(joined).where(steps.c.status.is_distinct_from(StepStatus.COMPLETED.value))
    )


def _stray_agents() -> sa.Select[Any]:
    """Sessions counted for a plan that is not there."""
    return sa.select(agents.c.agent).where(~sa.exists().where(plans.c.pk == agents.c.plan_pk))


def _count_cycles(connection: Connection) -> int:
    """Plans whose steps wait for each other.

    The edges are all that is read: to find a cycle among any number of them is what no query does in bounded time.
    """
    query = sa.select(steps.c.plan_pk, dependencies.c.step_pk, dependencies.c.blocker_pk)
    joined = query.select_from(dependencies.join(steps, steps.c.pk == dependencies.c.step_pk))
    of_plan: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for plan, step, blocker in connection.execute(joined):
        of_plan[plan][step].append(blocker)
    found = 0
    for edges in of_plan.values():
        try:
            graphlib.TopologicalSorter(edges).prepare()
        except graphlib.CycleError:
            found += 1
    return found


CHECKS: Final = (
    Check("open blockers", _number_of(_wrong_blocker_counts)),
    Check("dependencies", _number_of(_wrong_dependencies)),
    Check("cycles", _count_cycles),
    Check("live attempts", _number_of(_wrong_live_attempts)),
    Check("stray tasks", _number_of(_stray_tasks)),
    Check("loose attempts", _number_of(_loose_attempts)),
    Check("ended attempts", _number_of(_wrong_ended_attempts)),
    Check("numbers of attempts", _number_of(_wrong_attempt_counts)),
    Check("states of plans", _number_of(_wrong_plan_states)),
    Check("runs", _number_of(_wrong_runs)),
    Check("dispatches", _number_of(_wrong_dispatches)),
    Check("roots", _number_of(_wrong_roots)),
    Check("numbers of steps", _number_of(_wrong_numbers)),
    Check("learnings", _number_of(_wrong_learnings)),
    Check("agents", _number_of(_stray_agents)),
)
