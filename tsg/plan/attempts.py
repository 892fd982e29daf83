"""What is done to one step: its attempts from opening to folding, and what is decided about it.

An attempt is a ledger task below the plan's root. The ledger says whether it lives and how it ended; here that is
folded into the step, by the rules of :mod:`tsg.plan.scheduling`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Row

from tsg import reconcile, rules
from tsg.errors import StateConflict, TaskNotFound
from tsg.plan import fields, reading, scheduling, structure
from tsg.plan.scheduling import (
    AT_REST,
    AWAITING_DECISION,
    Decision,
    OnExhausted,
    PlanStatus,
    Situation,
    StepStatus,
    Verdict,
)
from tsg.plan.tables import agents, attempts, dispatches, plans, steps
from tsg.plan.transaction import Transaction
from tsg.reconcile import ReconcilePolicy
from tsg.records import TaskRecord
from tsg.states import ACTIVE, TaskStatus
from tsg.tables import tasks

__all__ = [
    "Report",
    "accept",
    "advance",
    "beat",
    "cancel",
    "claim",
    "decide",
    "end_live",
    "give_up",
    "has_due",
    "open_attempt",
    "report",
    "start",
    "step_of",
]

#: The reason that the ledger is told for an end that was reported.
_CODES: Final = {
    TaskStatus.SUCCEEDED: "worker_completed",
    TaskStatus.FAILED: "worker_failed",
    TaskStatus.CANCELLED: "caller_cancelled",
}


#: How an attempt has ended that the ledger was pruned of before it was folded.
_LET_GO: Final[dict[str, Any]] = {
    "ended_as": TaskStatus.TIMED_OUT.value,
    "error": "the ledger was pruned of this attempt before it was looked at",
}


class Report(NamedTuple):
    """What came of something done to a step, beside the step itself: what is free now, and words about it."""

    unblocked: list[str]
    notes: list[str]


# -- beginning -------------------------------------------------------------------------------------------


def claim(transaction: Transaction, plan: Row[Any], agent: str) -> tuple[str, list[str]] | None:
    """Open and start the first ready step that is the agent's or nobody's; its key and words, or ``None``."""
    query = (
        sa.select(steps)
        .where(
            steps.c.plan_pk == plan.pk,
            reading.ready(transaction.now),
            sa.or_(steps.c.owner == agent, steps.c.owner.is_(None)),
        )
        .order_by(steps.c.number)
        .limit(1)
        # Others who claim at the same moment take the next one.
        .with_for_update(skip_locked=True)
    )
    step = transaction.connection.execute(query).first()
    if step is None:
        return None
    return step.key, start(transaction, plan, step, agent=agent)


def open_attempt(transaction: Transaction, plan: Row[Any], step: Row[Any], agent: str | None) -> str:
    """Make a queued attempt of a ready step, which is in progress from then on; its token.

    Raises:
        StateConflict: the step is not ready, or another agent's.
    """
    _require_ready(step, transaction.now)
    owner = _owner(step, agent)
    timeout = step.timeout_seconds
    if timeout is None and structure.is_long_task(plan):
        timeout = fields.step_timeout()
    task = transaction.create_task(
        parent_id=plan.root_id,
        timeout_seconds=timeout,
        delivery_required=False,
        # Without a deadline only its silence can tell that it is gone.
        expects_heartbeat=timeout is None,
    )
    transaction.write_step(
        step,
        status=StepStatus.IN_PROGRESS.value,
        attempt_id=task.id,
        attempts=step.attempts + 1,
        owner=owner,
        due_at=None,
        output=None,
    )
    transaction.write(
        sa.insert(attempts).values(
            id=task.id, step_pk=step.pk, number=step.attempts + 1, agent=owner, opened_at=transaction.now
        )
    )
    if plan.status == PlanStatus.PENDING.value:
        structure.settle(transaction, plan)
    return task.id


def start(
    transaction: Transaction,
    plan: Row[Any],
    step: Row[Any],
    *,
    agent: str | None = None,
    attempt: str | None = None,
) -> list[str]:
    """Start the queued attempt of a step, or open one and start it; what was done besides, in words.

    Raises:
        StateConflict: `attempt` is not the step's, or runs already; or as :func:`open_attempt`.
    """
    if step.attempt_id is None:
        if attempt is not None:
            raise StateConflict(f"this attempt is over; {step.key} has no live one")
        open_attempt(transaction, plan, step, agent)
        step = reading.step_row(transaction.connection, plan, step.key)
    elif attempt is not None and attempt != step.attempt_id:
        raise StateConflict(f"this attempt is over; {step.key} has another one")
    task = transaction.task(step.attempt_id)
    if task.status != TaskStatus.QUEUED:
        raise StateConflict(f"{step.key} has been started already; whoever did that has it")
    transaction.start_task(task.id)
    owner = _owner(step, agent)
    notes: list[str] = []
    columns: dict[str, Any] = {"owner": owner}
    if step.session_resume is not None and not _is_session(transaction, plan, step.session_resume):
        columns["session_resume"] = None
        notes.append("session_resume named a session that is not there, and was cleared")
    if owner is not None:
        columns["session_id"] = f"{owner}-{_next_session(transaction, plan, owner)}"
    transaction.write_step(step, **columns)
    _arrived(transaction, task.id)
    of_attempt = {"agent": owner, "session_id": columns.get("session_id")}
    transaction.write(sa.update(attempts).where(attempts.c.id == task.id).values(of_attempt), expected=1)
    return notes


def _require_ready(step: Row[Any], now: float) -> None:
    if scheduling.is_ready(step.status, step.open_blockers, step.due_at, now):
        return
    if step.status == StepStatus.IN_PROGRESS.value:
        raise StateConflict(f"{step.key} has a live attempt; whoever started that has it")
    if step.status in AWAITING_DECISION:
        raise StateConflict(f"{step.key} waits for a decision: retry, reassign, complete or cancel it")
    if step.status != StepStatus.PENDING.value:
        raise StateConflict(f"{step.key} is {step.status} already")
    if step.open_blockers:
        raise StateConflict(f"{step.key} waits for other steps; its waitingFor names them")
    raise StateConflict(f"{step.key} waits for its retry; its due_at says when that is due")


def _owner(step: Row[Any], agent: str | None) -> str | None:
    if agent is not None and step.owner is not None and step.owner != agent:
        raise StateConflict(f"{step.key} is another agent's; update its owner first")
    owner: str | None = step.owner or agent
    return owner


def _next_session(transaction: Transaction, plan: Row[Any], agent: str) -> int:
    insert = postgresql.insert if transaction.connection.dialect.name == "postgresql" else sqlite.insert
    counted: Any = (
        insert(agents)
        .values(plan_pk=plan.pk, agent=agent, sessions=1)
        .on_conflict_do_update(index_elements=["plan_pk", "agent"], set_={"sessions": agents.c.sessions + 1})
        .returning(agents.c.sessions)
    )
    number: int = transaction.connection.execute(counted).scalar_one()
    return number


def _is_session(transaction: Transaction, plan: Row[Any], session: str) -> bool:
    of_plan = steps.c.plan_pk == plan.pk
    had = sa.select(steps.c.pk).where(of_plan, steps.c.session_id == session)
    tried = sa.select(attempts.c.step_pk).join(steps, steps.c.pk == attempts.c.step_pk)
    tried = tried.where(of_plan, attempts.c.session_id == session)
    return transaction.connection.execute(sa.union_all(had, tried).limit(1)).first() is not None


# -- going on, and ending --------------------------------------------------------------------------------


def step_of(transaction: Transaction, attempt: str) -> tuple[str, str]:
    """The name of the plan and the key of the step that an attempt is of.

    Raises:
        TaskNotFound: it is no plan's attempt.
        StateConflict: the plan was removed, and its attempt is over.
    """
    query = (
        sa.select(plans.c.name, steps.c.key)
        .select_from(attempts.join(steps, steps.c.pk == attempts.c.step_pk).join(plans, plans.c.pk == steps.c.plan_pk))
        .where(attempts.c.id == attempt)
    )
    found = transaction.connection.execute(query).first()
    if found is None:
        if transaction.task(attempt).status in ACTIVE:
            raise TaskNotFound("no step of a plan has such an attempt")
        raise StateConflict("this attempt is over, and so is its plan; stop")
    return found[0], found[1]


def beat(
    transaction: Transaction, plan: Row[Any], step: Row[Any], attempt: str | None, output: str | None
) -> list[str]:
    """Vouch for a live attempt, and keep what it has so far; one that nobody has started yet starts by this.

    Returns:
        What was done besides, in words.

    Raises:
        StateConflict: it is over, or was never.
    """
    live = _live(transaction, step, attempt)
    notes: list[str] = []
    if transaction.task(live).status == TaskStatus.QUEUED:
        notes = start(transaction, plan, step, attempt=live)
    transaction.heartbeat(live)
    if output is not None:
        transaction.write(sa.update(attempts).where(attempts.c.id == live).values(output=output), expected=1)
        transaction.write_step(step, output=output)
    return notes


def report(
    transaction: Transaction,
    plan: Row[Any],
    step: Row[Any],
    ended_as: TaskStatus,
    *,
    attempt: str | None = None,
    output: str | None = None,
    error: str | None = None,
    learnings: Sequence[str] = (),
) -> Report:
    """End an attempt as its agent says; the same once more is a no-op.

    Raises:
        StateConflict: it has ended otherwise, or is not one of this step's, or there is none.
    """
    if attempt is None and step.attempt_id is None:
        same = (
            (StepStatus.COMPLETED,) if ended_as == TaskStatus.SUCCEEDED else (StepStatus.FAILED, StepStatus.ESCALATED)
        )
        if step.status in same:
            return Report([], [])
        raise StateConflict(f"{step.key} is not in progress; start it first")
    if attempt is not None and attempt != step.attempt_id:
        if _attempt(transaction, step, attempt).ended_as == ended_as.value:
            return Report([], [])
        raise StateConflict(f"this attempt is over and has ended otherwise; {step.key} has gone on without it")
    try:
        task = transaction.task(step.attempt_id)
    except TaskNotFound:
        raise StateConflict("this attempt is over, and the ledger has let go of it already") from None
    if task.status not in ACTIVE and task.status != ended_as:
        raise StateConflict(f"this attempt has ended as {task.status.value} already; {step.key} goes on without it")
    notes: list[str] = []
    if task.status == TaskStatus.QUEUED:
        notes = start(transaction, plan, step, attempt=task.id)
        step = reading.step_row(transaction.connection, plan, step.key)
        task = transaction.task(task.id)
    ended = transaction.end_task(task, ended_as, _CODES[ended_as])
    found = fold(transaction, plan, step, ended, output=output, error=error, learnings=learnings)
    return found._replace(notes=[*notes, *found.notes])


def fold(
    transaction: Transaction,
    plan: Row[Any],
    step: Row[Any],
    task: TaskRecord,
    *,
    output: str | None = None,
    error: str | None = None,
    learnings: Sequence[str] = (),
) -> Report:
    """Let a step follow from how its attempt has ended, whoever ended it."""
    assert task.ended_at is not None
    transaction.settle_delivery(task)
    left = _attempt(transaction, step, task.id).output if output is None else output
    if task.status == TaskStatus.TIMED_OUT:
        error = "timeout"
    ended = {"ended_as": task.status.value, "ended_at": task.ended_at, "output": left, "error": error}
    _end_attempt(transaction, task.id, ended)
    situation = _situation(plan, step)._replace(has_output=left is not None)
    verdict = scheduling.after_ending(situation, task.status, task.ended_at)
    kept = {"output": left, "error": None if task.status == TaskStatus.SUCCEEDED else error}
    return _take(transaction, plan, step, verdict, kept, learnings)


def _fold_without_task(transaction: Transaction, plan: Row[Any], step: Row[Any]) -> None:
    """Let a step follow from an attempt that the ledger has let go of before it was folded.

    How it ended nobody knows any more. That it did is known, since nothing else is let go of; and a success is never
    guessed.
    """
    attempt = _attempt(transaction, step, step.attempt_id)
    _end_attempt(transaction, step.attempt_id, _LET_GO | {"ended_at": transaction.now})
    situation = _situation(plan, step)._replace(has_output=attempt.output is not None)
    verdict = scheduling.after_ending(situation, TaskStatus.TIMED_OUT, transaction.now)
    _take(transaction, plan, step, verdict, {"output": attempt.output, "error": _LET_GO["error"]})


def _end_attempt(transaction: Transaction, attempt: str, ended: dict[str, Any]) -> None:
    """Keep how an attempt has ended, once."""
    still_open = sa.update(attempts).where(attempts.c.id == attempt, attempts.c.ended_as.is_(None))
    transaction.write(still_open.values(ended), expected=1)
    _arrived(transaction, attempt)


def _arrived(transaction: Transaction, attempt: str) -> None:
    """An attempt that is started or over is on its way to nobody any more, and in nobody's inbox."""
    transaction.write(sa.delete(dispatches).where(dispatches.c.id == attempt))


def _take(
    transaction: Transaction,
    plan: Row[Any],
    step: Row[Any],
    verdict: Verdict,
    kept: dict[str, Any],
    learnings: Sequence[str] = (),
) -> Report:
    completes = verdict.status == StepStatus.COMPLETED
    transaction.write_step(
        step,
        status=verdict.status.value,
        failures=verdict.failures,
        owner=verdict.owner,
        fell_back=verdict.fell_back,
        due_at=verdict.due_at,
        attempt_id=None,
        completed_at=max(transaction.now, step.changed_at) if completes else None,
        **kept,
    )
    unblocked: list[str] = []
    if completes:
        structure.learn(transaction, step, learnings)
        unblocked = structure.unblock(transaction, step)
    notes = structure.settle(transaction, plan, succeeded=completes and step.status == StepStatus.IN_PROGRESS.value)
    return Report(unblocked, notes)


def _situation(plan: Row[Any], step: Row[Any]) -> Situation:
    return Situation(
        policy=reading.policy_of(step),
        failures=step.failures,
        owner=step.owner,
        fallback_agent=step.fallback_agent,
        fell_back=step.fell_back,
        partial_ok=step.partial_ok,
        on_exhausted=OnExhausted(plan.on_exhausted),
    )


def _attempt(transaction: Transaction, step: Row[Any], attempt: str) -> Row[Any]:
    found = transaction.connection.execute(sa.select(attempts).where(attempts.c.id == attempt)).first()
    if found is None:
        raise TaskNotFound("no step of a plan has such an attempt")
    if found.step_pk != step.pk:
        raise StateConflict(f"this attempt is none of {step.key}")
    return found


def _live(transaction: Transaction, step: Row[Any], attempt: str | None) -> str:
    """The token of the step's live attempt, which the given one has to be."""
    if attempt is not None:
        _attempt(transaction, step, attempt)
    if step.attempt_id is None or attempt not in (None, step.attempt_id):
        raise StateConflict(f"this attempt of {step.key} is over, or there was none; stop, and start it anew")
    live: str = step.attempt_id
    return live


# -- decisions -------------------------------------------------------------------------------------------


def cancel(transaction: Transaction, plan: Row[Any], step: Row[Any], end: StepStatus) -> Report:
    """Give a step up, as cancelled or as deleted, and its live attempt with it. A no-op where it is so already.

    Raises:
        StateConflict: it is completed, or deleted.
    """
    if step.status == end.value:
        return Report([], [])
    if end not in scheduling.STEP_TRANSITIONS[StepStatus(step.status)]:
        raise StateConflict(f"{step.key} is {step.status} already, and that stays")
    end_live(transaction, step)
    transaction.write_step(step, status=end.value, attempt_id=None, due_at=None)
    unblocked: list[str] = []
    notes: list[str] = []
    if end == StepStatus.DELETED:
        waited, unblocked = structure.detach(transaction, step)
        if waited:
            notes.append(f"no longer waiting for {step.key}: {', '.join(waited)}")
    structure.settle(transaction, plan)
    return Report(unblocked, notes)


def end_live(transaction: Transaction, step: Row[Any]) -> None:
    """Close the live attempt of a step that is given up, if it has one."""
    if step.attempt_id is None:
        return
    try:
        task = transaction.task(step.attempt_id)
    except TaskNotFound:
        # The ledger has let go of it.
        ended: dict[str, Any] = _LET_GO | {"ended_at": transaction.now}
    else:
        task = transaction.end_task(task, TaskStatus.CANCELLED, "caller_cancelled")
        ended = {"ended_as": task.status.value, "ended_at": task.ended_at}
    _end_attempt(transaction, step.attempt_id, ended)


def give_up(transaction: Transaction, plan: Row[Any]) -> None:
    """Cancel all of a plan that is not completed, and the plan."""
    query = sa.select(steps).where(steps.c.plan_pk == plan.pk, steps.c.attempt_id.is_not(None))
    for step in transaction.connection.execute(query.order_by(steps.c.number)).all():
        end_live(transaction, step)
    later = sa.case((steps.c.changed_at > transaction.now, steps.c.changed_at), else_=transaction.now)
    transaction.write(
        sa.update(steps)
        .where(steps.c.plan_pk == plan.pk, steps.c.status.not_in(AT_REST))
        .values(status=StepStatus.CANCELLED.value, attempt_id=None, due_at=None, changed_at=later)
    )
    structure.cancel_plan(transaction, plan)


def decide(transaction: Transaction, plan: Row[Any], step: Row[Any], decision: Decision, to: str | None) -> Report:
    """Carry out what was decided about a step that waits for that.

    Raises:
        InvalidInput: as :func:`tsg.plan.scheduling.after_decision`.
        StateConflict: the step waits for no decision.
    """
    verdict = scheduling.after_decision(_situation(plan, step), decision, to)
    _require_waiting(step)
    return _take(transaction, plan, step, verdict, _settled(verdict))


def accept(
    transaction: Transaction, plan: Row[Any], step: Row[Any], remaining: str | None
) -> tuple[Report, str | None]:
    """Complete a partial step; where something remains, with a new step for that, on which its dependents wait too.

    Raises:
        StateConflict: the step is not partial.
    """
    if step.status != StepStatus.PARTIAL.value:
        raise StateConflict(f"{step.key} is {step.status}; only what is partial can be accepted")
    key = None
    if remaining is not None:
        inherited = {column: getattr(step, column) for column in structure.INHERITED}
        columns = {
            **inherited,
            "subject": remaining,
            "owner": step.owner,
            # It goes on with what the first one left.
            "session_resume": step.session_id,
        }
        # Where the step was to block just the key that this one gets, that is what it does.
        waiting = [key for key in structure.waiting_for(transaction, step) if key != structure.next_key(plan)]
        links = {"blocked_by": [step.key], "blocks": waiting}
        key = structure.add_step(transaction, plan, columns, links)
    stays = scheduling.after_decision(_situation(plan, step), Decision.COMPLETE)
    return _take(transaction, plan, step, stays, _settled(stays)), key


def _settled(verdict: Verdict) -> dict[str, Any]:
    """What is completed after all has no error any more."""
    return {"error": None} if verdict.status == StepStatus.COMPLETED else {}


def _require_waiting(step: Row[Any]) -> None:
    if step.status not in AWAITING_DECISION:
        raise StateConflict(f"{step.key} is {step.status}; only what is escalated, failed or partial is decided on")


# -- what the ledger knows already -----------------------------------------------------------------------


def has_due(connection: Connection, plan: Row[Any], now: float) -> bool:
    """Whether an attempt of the plan has ended without having been folded, or is to be timed out."""
    return connection.execute(_due(plan, now, plan.grace_seconds).limit(1)).first() is not None


def advance(transaction: Transaction, plan: Row[Any], *, by_heartbeat: bool = True) -> list[str]:
    """Time out the plan's attempts that are due, fold all that have ended; the keys of those that were passed over.

    What can't be acted on, a time in the future or a damaged row, stays as it is and stops nothing else.

    Args:
        by_heartbeat: also what has been silent for longer than the plan's grace; else by deadlines alone.
    """
    grace = plan.grace_seconds if by_heartbeat else sys.float_info.max
    # A delivery nobody waits for needs no grace.
    policy = ReconcilePolicy(active_grace_seconds=grace, delivery_grace_seconds=0)
    reconcile.apply(transaction.connection, policy, now=transaction.now, parent_id=plan.root_id, skip_conflicts=True)
    task = tasks.c
    times = (task.created_at, task.updated_at, task.delivery_updated_at)
    sound = sa.and_(rules.sound(task), *(time <= transaction.now for time in times))
    is_gone = task.id.is_(None).label("is_gone")
    query = _due(plan, transaction.now, grace).add_columns(
        rules.active(task).label("is_active"), sound.label("is_sound"), is_gone
    )
    passed_over: list[str] = []
    for step in transaction.connection.execute(query.order_by(steps.c.number)).all():
        if step.is_gone:
            _fold_without_task(transaction, plan, step)
        elif step.is_active or not step.is_sound:
            passed_over.append(step.key)
            continue
        else:
            fold(transaction, plan, step, transaction.task(step.attempt_id))
        plan = reading.plan_row(transaction.connection, plan.name)
    return passed_over


def _due(plan: Row[Any], now: float, grace: float) -> sa.Select[Any]:
    """The steps in progress whose attempts have ended, are gone from the ledger, or are to be timed out."""
    task = tasks.c
    over = sa.or_(task.id.is_(None), sa.not_(rules.active(task)), rules.stale(task, now, now - grace))
    query = sa.select(steps).outerjoin(tasks, task.id == steps.c.attempt_id)
    return query.where(_LIVE, steps.c.plan_pk == plan.pk, over)


#: As the index of live attempts has it, word for word.
_LIVE: Final = sa.text("attempt_id IS NOT NULL")
