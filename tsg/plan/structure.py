"""What a plan is made of: plans, steps, what waits for what, and where that leaves the plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Row

from tsg.errors import DependencyCycle, StateConflict, StepNotFound
from tsg.plan import reading, scheduling
from tsg.plan.scheduling import (
    AT_REST,
    AWAITING_DECISION,
    CLOSED_PLANS,
    MOST_REVIVALS,
    PlanStatus,
    StepStatus,
    Tally,
)
from tsg.plan.tables import agents, attempts, dependencies, dispatches, expected, learnings, plans, runs, steps
from tsg.plan.taskfile import counted
from tsg.plan.transaction import Transaction
from tsg.states import ACTIVE, TaskStatus

__all__ = [
    "INHERITED",
    "add_step",
    "cancel_plan",
    "change_links",
    "change_step",
    "count_blockers",
    "create_plan",
    "detach",
    "fresh_row",
    "halt",
    "is_long_task",
    "key_of",
    "learn",
    "next_key",
    "number_of",
    "remove_plan",
    "require_open",
    "settle",
    "unblock",
    "waiting_for",
]

#: The columns of a step that a plan has for all that say nothing else.
INHERITED: Final = (
    "timeout_seconds",
    "retries",
    "backoff",
    "base_seconds",
    "factor",
    "cap_seconds",
    "fallback_agent",
    "partial_ok",
)
_NUMBERED: Final = re.compile(r"T-([0-9]{3,9})\Z")
#: Steps that may be given more to wait for.
_WAITING: Final = (StepStatus.PENDING, *AWAITING_DECISION)


def key_of(number: int) -> str:
    """The key that a step gets by its number."""
    return f"T-{number:03d}"


def is_long_task(plan: Row[Any]) -> bool:
    """Whether a plan was read from a long task's file: its steps form a chain, and keep the ids that they had there."""
    return plan.source is not None


def next_key(plan: Row[Any]) -> str:
    """The key that a plan's next step gets."""
    return str(plan.next_number) if is_long_task(plan) else key_of(plan.next_number)


def create_plan(transaction: Transaction, name: str, columns: Mapping[str, Any], *, delivery_required: bool) -> None:
    """Make a plan and its root, a ledger task that stays queued as long as the plan is open.

    Args:
        columns: of the plan, and of how it is run.

    Raises:
        StateConflict: there is a plan with this name.
    """
    root = transaction.create_task(delivery_required=delivery_required)
    made = {
        "name": name,
        "root_id": root.id,
        "status": PlanStatus.PENDING.value,
        "next_number": 1,
        "created_at": transaction.now,
        **columns,
    }
    of_run: dict[str, Any] = {"halted": False, "global_retry": 0}
    of_run |= {column: made.pop(column) for column in _OF_RUN if column in made}
    try:
        inserted = transaction.connection.execute(sa.insert(plans).values(made)).inserted_primary_key
    except sa.exc.IntegrityError:
        raise StateConflict("there is a plan with this name already") from None
    assert inserted is not None
    transaction.write(sa.insert(runs).values(plan_pk=inserted[0], **of_run), expected=1)


def require_open(plan: Row[Any]) -> None:
    """That things can still be done to a plan.

    Raises:
        StateConflict: it is completed or cancelled.
    """
    if plan.status in CLOSED_PLANS:
        raise StateConflict("the plan is closed; make a new one for what is left to do")


def number_of(key: str) -> int | None:
    """The number by which a step has, or gets, just this key; ``None`` where none does."""
    match = _NUMBERED.match(key)
    number = None if match is None else int(match[1])
    return number if number is not None and key_of(number) == key else None


def fresh_row(transaction: Transaction, plan: Row[Any], number: int, key: str) -> dict[str, Any]:
    """What the row of a step begins with that nobody has worked on."""
    return {
        "plan_pk": plan.pk,
        "number": number,
        "key": key,
        "failures": 0,
        "fell_back": False,
        "open_blockers": 0,
        "attempts": 0,
        "created_at": transaction.now,
        "changed_at": transaction.now,
    }


def add_step(
    transaction: Transaction, plan: Row[Any], columns: Mapping[str, Any], links: Mapping[str, list[str]]
) -> str:
    """Make a step with the next key; which that is. One more of a long task waits for the one before it.

    Raises:
        StepNotFound: it is to wait for a step that is not there, or block one that will never be.
        DependencyCycle: steps would wait for each other.
        StateConflict: it is to block one that runs or has ended.
    """
    number = plan.next_number
    key = next_key(plan)
    if is_long_task(plan) and not links.get("blocked_by"):
        links = {**links, "add_blocked_by": [*_last(transaction, plan), *links.get("add_blocked_by", ())]}
    made = {
        **fresh_row(transaction, plan, number, key),
        "status": StepStatus.PENDING.value,
        "metadata": "{}",
        "params": "{}",
        **{column: getattr(plan, column) for column in INHERITED},
        **columns,
    }
    inserted = transaction.connection.execute(sa.insert(steps).values(made)).inserted_primary_key
    assert inserted is not None
    transaction.write(sa.update(plans).where(plans.c.pk == plan.pk).values(next_number=number + 1), expected=1)
    awaiting = (
        transaction.connection.execute(
            sa.select(steps.c.key)
            .select_from(steps.join(expected, expected.c.blocker_pk == steps.c.pk))
            .where(steps.c.plan_pk == plan.pk, expected.c.key == key)
            .order_by(steps.c.number)
        )
        .scalars()
        .all()
    )
    step = reading.step_row(transaction.connection, plan, key)
    change_links(transaction, plan, step, {**links, "add_blocked_by": [*links.get("add_blocked_by", ()), *awaiting]})
    if awaiting:
        of_plan = sa.select(steps.c.pk).where(steps.c.plan_pk == plan.pk)
        transaction.write(sa.delete(expected).where(expected.c.key == key, expected.c.blocker_pk.in_(of_plan)))
    return key


def change_step(
    transaction: Transaction,
    plan: Row[Any],
    step: Row[Any],
    columns: Mapping[str, Any],
    links: Mapping[str, list[str]],
) -> None:
    """Give a step other fields, and other steps to wait for or to block.

    Raises:
        StepNotFound, DependencyCycle: as :func:`add_step`.
        StateConflict: the step is deleted, or its owner is at work on it, or one that runs or has ended would have
            more to wait for.
    """
    if step.status == StepStatus.DELETED.value:
        raise StateConflict("the step is deleted")
    if "owner" in columns and columns["owner"] != step.owner and step.status == StepStatus.IN_PROGRESS.value:
        raise StateConflict("its owner is at work on the step; cancel it, or wait for the end of this attempt")
    if columns or links:
        transaction.write_step(step, **columns)
    change_links(transaction, plan, step, links)


def change_links(transaction: Transaction, plan: Row[Any], step: Row[Any], links: Mapping[str, list[str]]) -> None:
    """Let a step wait for others, or others for it.

    Args:
        links: keys by ``blocked_by`` and ``blocks``, which say all that there is from now on, and by
            ``add_blocked_by`` and ``add_blocks``, which only add, so that two who add at once lose nothing.

    Raises:
        StepNotFound, DependencyCycle, StateConflict: as :func:`change_step`.
    """
    edge = dependencies.c
    touched: set[int] = set()
    if "blocked_by" in links or links.get("add_blocked_by"):
        before = _column(transaction, sa.select(edge.blocker_pk).where(edge.step_pk == step.pk).order_by(edge.place))
        named = [row.pk for row in _named(transaction, plan, step, links, "blocked_by", "add_blocked_by")]
        wanted = list(dict.fromkeys([*([] if "blocked_by" in links else before), *named]))
        if set(wanted) - set(before) and step.status not in _WAITING:
            raise StateConflict(f"{step.key} runs or has ended, and can't be given more to wait for")
        if wanted != before:
            transaction.write(sa.delete(dependencies).where(edge.step_pk == step.pk))
            _link(transaction, [(step.pk, blocker, place) for place, blocker in enumerate(wanted)])
            touched.add(step.pk)
    if "blocks" in links or links.get("add_blocks"):
        before = _column(transaction, sa.select(edge.step_pk).where(edge.blocker_pk == step.pk))
        named_rows = _named(transaction, plan, step, links, "blocks", "add_blocks")
        wanted = list(dict.fromkeys([*([] if "blocks" in links else before), *(row.pk for row in named_rows)]))
        gone = set(before) - set(wanted)
        added = [row for row in named_rows if row.pk not in before]
        for row in added:
            if row.status not in _WAITING:
                raise StateConflict(f"{row.key} runs or has ended, and can't be given more to wait for")
        transaction.write(sa.delete(dependencies).where(edge.blocker_pk == step.pk, edge.step_pk.in_(gone)))
        for row in added:
            places = _column(transaction, sa.select(sa.func.max(edge.place)).where(edge.step_pk == row.pk))
            _link(transaction, [(row.pk, step.pk, (places[0] if places[0] is not None else -1) + 1)])
        _expect(transaction, step, links, {row.key for row in named_rows})
        touched |= {*gone, *(row.pk for row in added)}
    if touched:
        count_blockers(transaction, touched)
    if touched and transaction.connection.execute(_BETWEEN, {"step": step.pk}).scalar():
        # Only a step that waits and is waited for can be part of a cycle.
        scheduling.in_order(reading.edges(transaction.connection, plan), lambda pk: _key_of_row(transaction, pk))


def count_blockers(transaction: Transaction, of: Iterable[int]) -> None:
    """Count anew how many open blockers these steps have."""
    is_open = reading.number_of_open_blockers()
    for some in _in_parts(sorted(of)):
        transaction.write(sa.update(steps).where(steps.c.pk.in_(some)).values(open_blockers=is_open))


def unblock(transaction: Transaction, step: Row[Any]) -> list[str]:
    """Let what waits for a step wait no more, now that it is completed; which then wait for nothing, by their keys."""
    waiting = sa.select(dependencies.c.step_pk).where(dependencies.c.blocker_pk == step.pk)
    transaction.write(sa.update(steps).where(steps.c.pk.in_(waiting)).values(open_blockers=steps.c.open_blockers - 1))
    return _free(transaction, steps.c.pk.in_(waiting))


def waiting_for(transaction: Transaction, step: Row[Any]) -> list[str]:
    """The keys of what waits for a step, or will once it is there; what has ended all the same waits no more."""
    waiting = [status.value for status in _WAITING]
    dependents = (
        sa.select(steps.c.key)
        .join(dependencies, dependencies.c.step_pk == steps.c.pk)
        .where(dependencies.c.blocker_pk == step.pk, steps.c.status.in_(waiting))
        .order_by(steps.c.number)
    )
    to_come = sa.select(expected.c.key).where(expected.c.blocker_pk == step.pk).order_by(expected.c.key)
    return [*_column(transaction, dependents), *_column(transaction, to_come)]


def detach(transaction: Transaction, step: Row[Any]) -> tuple[list[str], list[str]]:
    """Take a step that is deleted out of all dependencies; what waited for it, and what then waits for nothing."""
    waited = _column(transaction, sa.select(dependencies.c.step_pk).where(dependencies.c.blocker_pk == step.pk))
    transaction.write(
        sa.delete(dependencies).where(sa.or_(dependencies.c.blocker_pk == step.pk, dependencies.c.step_pk == step.pk))
    )
    transaction.write(sa.delete(expected).where(expected.c.blocker_pk == step.pk))
    count_blockers(transaction, {*waited, step.pk})
    keys: list[str] = []
    free: list[str] = []
    for some in _in_parts(waited):
        keys += _column(transaction, sa.select(steps.c.key).where(steps.c.pk.in_(some)).order_by(steps.c.number))
        free += _free(transaction, steps.c.pk.in_(some))
    return keys, free


def settle(transaction: Transaction, plan: Row[Any], *, succeeded: bool = False) -> list[str]:
    """Let the plan's own status, and its root, follow from where its steps stand.

    Args:
        succeeded: a step has just been done, by which a plan that was halted goes on (runner.md, section 3).

    Returns:
        What was done besides, in words.
    """
    if plan.status in CLOSED_PLANS:
        return []
    found = transaction.connection.execute(_TALLY, {"plan": plan.pk}).one()
    if succeeded and plan.halted and found.unsettled and not found.failed and not found.escalated:
        if plan.global_retry >= MOST_REVIVALS:
            return ["the plan stays failed: it has gone on three times, and a person must look (tsg run --resume)"]
        revived = {"halted": False, "global_retry": plan.global_retry + 1}
        transaction.write(sa.update(runs).where(runs.c.plan_pk == plan.pk).values(revived), expected=1)
        _move(transaction, plan, PlanStatus.PENDING)
        return ["the plan was failed, and goes on"]
    begun = plan.status != PlanStatus.PENDING.value or bool(found.begun)
    tally = Tally(bool(found.any), not found.unsettled, bool(found.failed), begun, plan.halted)
    status = scheduling.plan_status(tally)
    if status.value != plan.status:
        _move(transaction, plan, status)
    return []


def halt(transaction: Transaction, plan: Row[Any]) -> None:
    """Fail an open plan, since something could not be delivered; its steps stay as they are."""
    transaction.write(sa.update(runs).where(runs.c.plan_pk == plan.pk).values(halted=True), expected=1)
    if plan.status != PlanStatus.FAILED.value:
        _move(transaction, plan, PlanStatus.FAILED)


def cancel_plan(transaction: Transaction, plan: Row[Any]) -> None:
    """Close a plan that is given up; its steps are cancelled already."""
    _move(transaction, plan, PlanStatus.CANCELLED)


def remove_plan(transaction: Transaction, plan: Row[Any]) -> None:
    """Take a plan away, with all that is known of it but what the ledger knows."""
    # By hand, since an application's SQLite may have its foreign keys off.
    of_plan = sa.select(steps.c.pk).where(steps.c.plan_pk == plan.pk)
    of_step = sa.select(attempts.c.id).where(attempts.c.step_pk.in_(of_plan))
    transaction.write(sa.delete(dispatches).where(dispatches.c.id.in_(of_step)))
    for table, column in (
        (learnings, learnings.c.step_pk),
        (attempts, attempts.c.step_pk),
        (expected, expected.c.blocker_pk),
        (dependencies, dependencies.c.step_pk),
    ):
        transaction.write(sa.delete(table).where(column.in_(of_plan)))
    for table, column in (
        (agents, agents.c.plan_pk),
        (runs, runs.c.plan_pk),
        (steps, steps.c.plan_pk),
        (plans, plans.c.pk),
    ):
        transaction.write(sa.delete(table).where(column == plan.pk))


def learn(transaction: Transaction, step: Row[Any], texts: Sequence[str]) -> None:
    """Keep what completing a step has taught."""
    for text in texts:
        transaction.write(
            sa.insert(learnings).values(step_pk=step.pk, text=text, learned_at=transaction.now), expected=1
        )


# -- inside ----------------------------------------------------------------------------------------------

#: What a plan's root ends as, and why, with the plan.
_ROOT_ENDS: Final = {
    PlanStatus.COMPLETED: (TaskStatus.SUCCEEDED, "completed"),
    PlanStatus.CANCELLED: (TaskStatus.CANCELLED, "caller_cancelled"),
}


def _move(transaction: Transaction, plan: Row[Any], status: PlanStatus) -> None:
    """Give a plan another status; where that closes it, its root is closed too, with the delivery nobody awaits."""
    closes = status in CLOSED_PLANS
    transaction.write(
        sa.update(plans)
        .where(plans.c.pk == plan.pk, plans.c.status == plan.status)
        .values(status=status.value, closed_at=max(transaction.now, plan.created_at) if closes else None),
        expected=1,
    )
    if closes:
        # What could not be delivered is of no matter any more.
        transaction.write(sa.update(runs).where(runs.c.plan_pk == plan.pk).values(halted=False), expected=1)
        root = transaction.task(plan.root_id)
        if root.status in ACTIVE:
            transaction.end_task(root, *_ROOT_ENDS[status])


#: The columns of a plan that are in the row of how it is run.
_OF_RUN: Final = frozenset(column.name for column in runs.c) - {"plan_pk"}
_SQL_VARIABLES: Final = 500


_BETWEEN: Final = sa.select(
    sa.and_(
        sa.exists().where(dependencies.c.step_pk == sa.bindparam("step")),
        sa.exists().where(dependencies.c.blocker_pk == sa.bindparam("step")),
    )
)
_of_plan = partial(reading.has_step, sa.bindparam("plan"))
#: What :class:`tsg.plan.scheduling.Tally` asks, by the index of statuses; that a plan has begun once is not forgotten.
_TALLY: Final = sa.select(
    _of_plan(StepStatus.DELETED, among=False).label("any"),
    _of_plan(*AT_REST, among=False).label("unsettled"),
    _of_plan(StepStatus.FAILED, among=True).label("failed"),
    _of_plan(StepStatus.ESCALATED, among=True).label("escalated"),
    _of_plan(StepStatus.PENDING, StepStatus.DELETED, among=False).label("begun"),
)


def _named(
    transaction: Transaction, plan: Row[Any], step: Row[Any], links: Mapping[str, list[str]], *names: str
) -> list[Row[Any]]:
    """The steps that links of these names lead to, in order; those that are yet to come are left out."""
    wanted = list(dict.fromkeys(key for name in names for key in links.get(name, ())))
    if step.key in wanted:
        raise DependencyCycle((step.key, step.key))
    found: dict[str, Row[Any]] = {}
    for some in _in_parts(wanted):
        query = sa.select(steps).where(
            steps.c.plan_pk == plan.pk, steps.c.key.in_(some), steps.c.status != StepStatus.DELETED.value
        )
        found |= {row.key: row for row in transaction.connection.execute(query)}
    for key in wanted:
        if key not in found and not ("blocks" in names and _is_to_come(plan, step, key)):
            raise StepNotFound("the plan has no such step to wait for, or to block")
    return [found[key] for key in wanted if key in found]


def _last(transaction: Transaction, plan: Row[Any]) -> list[str]:
    """The key of the last step that can still be waited for, if there is one."""
    given_up = [StepStatus.CANCELLED.value, StepStatus.DELETED.value]
    query = sa.select(steps.c.key).where(steps.c.plan_pk == plan.pk, steps.c.status.not_in(given_up))
    return _column(transaction, query.order_by(steps.c.number.desc()).limit(1))


def _is_to_come(plan: Row[Any], step: Row[Any], key: str) -> bool:
    """Whether a step may still get this key."""
    number = counted(key) if is_long_task(plan) else number_of(key)
    return number is not None and number >= max(plan.next_number, step.number + 1)


def _expect(transaction: Transaction, step: Row[Any], links: Mapping[str, list[str]], there: set[str]) -> None:
    """Keep which of the keys to be blocked are yet to come."""
    before = set(_column(transaction, sa.select(expected.c.key).where(expected.c.blocker_pk == step.pk)))
    named = {key for name in ("blocks", "add_blocks") for key in links.get(name, ())} - there
    wanted = named if "blocks" in links else before | named
    for key in sorted(before - wanted):
        transaction.write(sa.delete(expected).where(expected.c.blocker_pk == step.pk, expected.c.key == key))
    for key in sorted(wanted - before):
        transaction.write(sa.insert(expected).values(blocker_pk=step.pk, key=key))


def _link(transaction: Transaction, edges: Sequence[tuple[int, int, int]]) -> None:
    if edges:
        rows = [{"step_pk": step, "blocker_pk": blocker, "place": place} for step, blocker, place in edges]
        transaction.connection.execute(sa.insert(dependencies), rows)


def _free(transaction: Transaction, condition: sa.ColumnElement[bool]) -> list[str]:
    query = sa.select(steps.c.key).where(
        condition, steps.c.status == StepStatus.PENDING.value, steps.c.open_blockers == 0
    )
    return _column(transaction, query.order_by(steps.c.number))


def _key_of_row(transaction: Transaction, pk: int) -> str:
    return str(transaction.connection.execute(sa.select(steps.c.key).where(steps.c.pk == pk)).scalar_one())


def _column(transaction: Transaction, query: sa.Select[Any]) -> list[Any]:
    return list(transaction.connection.execute(query).scalars())


def _in_parts(members: Sequence[Any]) -> Iterable[list[Any]]:
    """As many at once as a statement may have variables."""
    for first in range(0, len(members), _SQL_VARIABLES):
        yield list(members[first : first + _SQL_VARIABLES])
