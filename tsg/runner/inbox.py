"""An agent's inbox: attempts that did not reach it by a command, for it to take when it comes."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Row

from tsg.plan import attempts, fields, reading
from tsg.plan.store import Plans
from tsg.plan.tables import dispatches, plans, steps
from tsg.plan.transaction import Transaction
from tsg.runner import dispatch
from tsg.runner.message import Errand
from tsg.states import TaskStatus
from tsg.tables import tasks

__all__ = ["entries", "take"]


def entries(plans: Plans, agent: str) -> list[Errand]:
    """What lies in an agent's inbox, the oldest first. Nothing is started by this.

    Raises:
        InvalidInput: no agent's name.
    """
    named = fields.agent(agent)

    def look(transaction: Transaction) -> list[Errand]:
        return [_errand(transaction, entry) for entry in transaction.connection.execute(_of(named)).all()]

    return plans._read(look)


def take(plans: Plans, agent: str) -> Errand | None:
    """Start the oldest attempt in an agent's inbox, which it leaves by that; ``None`` where there is none.

    Of any number that take at once, each entry goes to one.

    Raises:
        InvalidInput: no agent's name.
    """
    named = fields.agent(agent)

    def attempt_to(transaction: Transaction) -> Errand | None:
        refused: set[str] = set()
        while True:
            query = _of(named).where(dispatches.c.id.not_in(refused)).limit(1)
            entry = transaction.connection.execute(query).first()
            if entry is None:
                return None
            # In the order in which everybody locks: the plan, then the step.
            plan = reading.plan_row(transaction.connection, entry.plan, "shared")
            step = reading.step_row(transaction.connection, plan, entry.key, lock=True)
            if dispatch.is_waiting(transaction, step, entry.id):
                errand = dispatch.errand_of(transaction, plan, step.key)
                attempts.start(transaction, plan, step, attempt=entry.id)
                # As it is now: started, and in the session that it was given.
                row = reading.step_row(transaction.connection, plan, step.key)
                view = reading.step_views(transaction.connection, [row], transaction.now)[0]
                return errand._replace(step=view)
            # Somebody else was faster.
            refused.add(entry.id)

    found = plans._write(attempt_to)
    return None if found is None else plans._changed(found.plan, found)


def _of(agent: str) -> sa.Select[Any]:
    """The entries of an inbox; those only whose attempts nobody has started or closed behind the plan's back."""
    joined = (
        dispatches.join(steps, steps.c.attempt_id == dispatches.c.id)
        .join(plans, plans.c.pk == steps.c.plan_pk)
        .join(tasks, tasks.c.id == dispatches.c.id)
    )
    return (
        sa.select(dispatches.c.id, steps.c.key, plans.c.name.label("plan"))
        .select_from(joined)
        .where(
            dispatches.c.agent == agent,
            dispatches.c.inbox_at.is_not(None),
            tasks.c.status == TaskStatus.QUEUED,
        )
        .order_by(dispatches.c.inbox_at, dispatches.c.id)
    )


def _errand(transaction: Transaction, entry: Row[Any]) -> Errand:
    plan = reading.plan_row(transaction.connection, entry.plan)
    return dispatch.errand_of(transaction, plan, entry.key)
