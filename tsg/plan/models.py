"""Plans as mapped classes, for an application to query and to relate its own rows to.

They are read, and never written: what a plan's rows are follows from rules over several of them and from the ledger,
which :class:`tsg.Plans` keeps (also inside the application's own session, by :meth:`tsg.Plans.within`).
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.orm import DeclarativeBase, Mapped, Mapper, relationship

from tsg.errors import StateConflict
from tsg.models import Task
from tsg.plan.tables import attempts, dependencies, dispatches, learnings, metadata, plans, runs, steps
from tsg.tables import tasks

__all__ = ["Attempt", "Dispatch", "Learning", "Plan", "PlanBase", "PlanRun", "Step"]


class PlanBase(DeclarativeBase):
    """The declarative base of the plan layer's models, with a ``MetaData`` of its own."""

    metadata = metadata


class Plan(PlanBase):
    """A plan; its ``root`` is the ledger task that stays queued as long as the plan is open."""

    __table__ = plans

    pk: Mapped[int]
    name: Mapped[str]
    root_id: Mapped[str]
    description: Mapped[str | None]
    status: Mapped[str]
    created_at: Mapped[float]
    closed_at: Mapped[float | None]

    root: Mapped[Task | None] = relationship(
        Task, primaryjoin=sa.orm.foreign(plans.c.root_id) == tasks.c.id, viewonly=True
    )
    steps: Mapped[list[Step]] = relationship(back_populates="plan", order_by=steps.c.number, viewonly=True)
    run: Mapped[PlanRun] = relationship(back_populates="plan", viewonly=True)


class PlanRun(PlanBase):
    """How a plan is run: who is asked by default, and how often it has gone on after it was failed."""

    __table__ = runs

    plan_pk: Mapped[int]
    agent: Mapped[str | None]
    session_name: Mapped[str | None]
    halted: Mapped[bool]
    global_retry: Mapped[int]
    cockpit: Mapped[str | None]

    plan: Mapped[Plan] = relationship(back_populates="run", viewonly=True)


class Step(PlanBase):
    """A step of a plan. Its column ``metadata``, a name that SQLAlchemy keeps for itself, is ``details`` here."""

    __table__ = steps
    __mapper_args__ = {"exclude_properties": ["metadata"]}

    pk: Mapped[int]
    plan_pk: Mapped[int]
    key: Mapped[str]
    subject: Mapped[str]
    status: Mapped[str]
    owner: Mapped[str | None]
    due_at: Mapped[float | None]
    attempt_id: Mapped[str | None]
    details: Mapped[dict[str, Any]] = sa.orm.column_property(steps.c.metadata)

    plan: Mapped[Plan] = relationship(back_populates="steps", viewonly=True)
    blocked_by: Mapped[list[Step]] = relationship(
        secondary=dependencies,
        primaryjoin=steps.c.pk == dependencies.c.step_pk,
        secondaryjoin=steps.c.pk == dependencies.c.blocker_pk,
        order_by=dependencies.c.place,
        viewonly=True,
    )
    blocks: Mapped[list[Step]] = relationship(
        secondary=dependencies,
        primaryjoin=steps.c.pk == dependencies.c.blocker_pk,
        secondaryjoin=steps.c.pk == dependencies.c.step_pk,
        order_by=steps.c.number,
        viewonly=True,
    )
    tries: Mapped[list[Attempt]] = relationship(back_populates="step", order_by=attempts.c.number, viewonly=True)
    learnings: Mapped[list[Learning]] = relationship(back_populates="step", order_by=learnings.c.pk, viewonly=True)


class Attempt(PlanBase):
    """A try at a step; ``task`` is the ledger's row of it, gone once the ledger has let it go."""

    __table__ = attempts

    id: Mapped[str]
    step_pk: Mapped[int]
    number: Mapped[int]
    agent: Mapped[str | None]
    session_id: Mapped[str | None]
    output: Mapped[str | None]
    error: Mapped[str | None]
    ended_as: Mapped[str | None]
    ended_at: Mapped[float | None]

    step: Mapped[Step] = relationship(back_populates="tries", viewonly=True)
    task: Mapped[Task | None] = relationship(
        Task, primaryjoin=sa.orm.foreign(attempts.c.id) == tasks.c.id, viewonly=True
    )


class Dispatch(PlanBase):
    """An attempt on its way to an agent, or in its inbox since ``inbox_at``; gone once it is started or over."""

    __table__ = dispatches

    id: Mapped[str]
    agent: Mapped[str]
    session: Mapped[str]
    deliveries: Mapped[int]
    lease_until: Mapped[float | None]
    inbox_at: Mapped[float | None]

    attempt: Mapped[Attempt] = relationship(viewonly=True)


class Learning(PlanBase):
    """What completing a step has taught."""

    __table__ = learnings

    pk: Mapped[int]
    step_pk: Mapped[int]
    text: Mapped[str]
    learned_at: Mapped[float]

    step: Mapped[Step] = relationship(back_populates="learnings", viewonly=True)


def _refuse(mapper: Mapper[Any], connection: Connection, row: object) -> None:
    raise StateConflict("a plan is changed by Plans alone; Plans.within(session) does it in this transaction")


for _occasion in ("before_insert", "before_update", "before_delete"):
    event.listen(PlanBase, _occasion, _refuse, propagate=True)
