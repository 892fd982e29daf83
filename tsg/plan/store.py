"""Plans: one method is one transaction, in which the plan and the ledger change together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from tsg import values
from tsg.engine import refusing, require_transaction
from tsg.errors import InvalidInput, LedgerError, StateConflict, TaskNotFound
from tsg.ledger import Ledger
from tsg.plan import attempts, disk, doctor, fields, reading, scheduling, schema, structure, work
from tsg.plan.reading import Graph, Learning, PlanView, StepView
from tsg.plan.scheduling import (
    CLOSED_PLANS,
    DEFAULT_GRACE_SECONDS,
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT_SECONDS,
    Decision,
    OnExhausted,
    PlanStatus,
    StepStatus,
)
from tsg.plan.tables import runs
from tsg.plan.transaction import Transaction
from tsg.sessions import Session, clock_of, connection_of
from tsg.states import ACTIVE, Clock, TaskStatus

__all__ = ["Plans", "Ready"]

_Answer = TypeVar("_Answer")


class _Left(str):
    """What an argument is that was left out: the plan's own setting holds."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<the plan's>"


#: As a default: the plan's own setting holds.
INHERIT: Final[Any] = _Left()


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that were given; keys as lists, since an iterator can be gone through once only."""
    said = {field: value for field, value in given.items() if value is not INHERIT}
    return said | {link: fields.keys(said[link]) for link in fields.LINKS if link in said}


class Ready(list[StepView]):
    """The steps that may be claimed now.

    Attributes:
        passed_over: the keys of steps whose attempts can't be acted on, for a time in the future or a damaged row.
    """

    def __init__(self, found: Iterable[StepView] = (), passed_over: Iterable[str] = ()) -> None:
        super().__init__(found)
        self.passed_over = tuple(passed_over)


class Plans:
    """The plans beside a ledger.

    Args:
        ledger: on a file or a URL, where the plans' tables are brought in as they are needed; on an application's
            engine they are there already (``tsg upgrade --plan``).
        on_change: called with these plans and a plan's name after each transaction that may have changed it.

    Raises:
        InvalidInput: no :class:`tsg.Ledger`.
        SchemaOutdated: there are no tables for plans, and they are not to be made; the message names the command.
        SchemaTooNew, StateConflict: the tables are a later release's, or not what they should be.

    Methods raise :exc:`PlanNotFound`, :exc:`StepNotFound`, :exc:`InvalidInput` and :exc:`StateConflict`, and then have
    changed nothing; that a plan was advanced before a step of it was refused stays. A plan is named by its name, a step
    by its key, an attempt by its token, which is the id of its ledger task. Times are seconds since the epoch.
    """

    def __init__(self, ledger: Ledger, *, on_change: Callable[[Plans, str], object] | None = None) -> None:
        if not values.is_a(ledger, Ledger):
            raise InvalidInput("plans stand on a Ledger")
        values.optional_callable(on_change, "on_change")
        ledger.require(schema.fault, schema.upgrade)
        self._ledger: Ledger | None = ledger
        self._on_change = on_change

    @classmethod
    def _at_head(cls, ledger: Ledger) -> Plans:
        """Plans on a ledger whose tables for them were looked at before."""
        plans = cls.__new__(cls)
        plans._ledger = ledger
        plans._on_change = None
        return plans

    @classmethod
    def within(cls, target: Session | Connection, *, clock: Clock | None = None) -> Plans:
        """Plans inside a transaction of the application's, which is never committed here.

        Args:
            target: an ORM session, or a connection; what a method does is undone by itself where it raises.
            clock: gives seconds since the epoch; by default as for :func:`tsg.reconcile.apply`.

        Raises:
            InvalidInput: neither a session nor a connection, or a clock that can't be called.
            SchemaOutdated: the tables are not there; the message names the command.
            StateConflict: in AUTOCOMMIT there is no transaction to be inside of.
        """
        values.optional_callable(clock, "a clock")
        with refusing():
            fault = schema.fault(connection_of(target))
        if fault is not None:
            raise fault
        plans = cls.__new__(cls)
        plans._ledger = None
        plans._on_change = None
        plans._target = target
        plans._clock = clock
        return plans

    # -- plans -----------------------------------------------------------------------------------------

    def create(
        self,
        name: str,
        *,
        description: str | None = None,
        delivery_required: bool = False,
        on_exhausted: str = OnExhausted.ESCALATE,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        retries: int = DEFAULT_RETRIES,
        backoff: str = "exponential",
        base_seconds: float | None = None,
        factor: float | None = None,
        cap_seconds: float | None = None,
        fallback_agent: str | None = None,
        partial_ok: bool = False,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
        agent: str | None = None,
        session_name: str | None = None,
        cockpit: str | os.PathLike[str] | None = None,
        theme: str | None = None,
    ) -> PlanView:
        """Make a plan, without steps.

        Args:
            name: one line of at most 200 characters.
            delivery_required: somebody awaits the result, and closes the delivery of the plan's root.
            on_exhausted: what becomes of a step whose tries are used up: ``escalate``, or ``fail`` with the plan.
            timeout_seconds: of an attempt, from its start; 0 or ``None`` for no timeout.
            retries, backoff, base_seconds, factor, cap_seconds: see :class:`tsg.plan.RetryPolicy`.
            fallback_agent: who tries once more from the start when the retries are used up.
            partial_ok: what a timed-out attempt has left may be all that is wanted.
            grace_seconds: how long an attempt that sends heartbeats may be silent.
            agent: whom a runner asks to do a step that has no owner.
            session_name: in which session of theirs, where the step names none; by default ``main``.
            cockpit: the file of a page that tells how the plan stands, which commands keep up to date.
            theme: what that page looks like, ``pet`` or ``plain``.

        Raises:
            InvalidInput: a malformed argument.
            StateConflict: there is a plan with this name.
        """
        named = fields.name(name, "a plan's name")
        policy = {"retries": retries, "backoff": backoff, "base_seconds": base_seconds}
        policy |= {"factor": factor, "cap_seconds": cap_seconds}
        given = {"timeout_seconds": timeout_seconds, "fallback_agent": fallback_agent, "partial_ok": partial_ok}
        columns = fields.settings({**policy, **given}, {})
        columns["description"] = fields.optional_prose(description, "a description")
        columns["on_exhausted"] = fields.one_of(on_exhausted, OnExhausted, "on_exhausted").value
        columns["grace_seconds"] = values.non_negative(grace_seconds, "a grace")
        columns["agent"] = None if agent is None else fields.agent(agent)
        columns["session_name"] = fields.optional_prose(session_name, "a session's name")
        columns |= disk.page(cockpit, theme)
        required = values.flag(delivery_required, "delivery_required")

        def make(transaction: Transaction) -> PlanView:
            structure.create_plan(transaction, named, columns, delivery_required=required)
            return self._plan_view(transaction, named)

        return self._change(named, make)

    def show_in(self, plan: str, cockpit: str | os.PathLike[str] | None, *, theme: str | None = None) -> PlanView:
        """Give a plan another file of the page that tells how it stands, or none; see :meth:`create`."""
        columns = disk.page(cockpit, theme)

        def change(transaction: Transaction, row: Row[Any]) -> PlanView:
            transaction.write(sa.update(runs).where(runs.c.plan_pk == row.pk).values(columns), expected=1)
            return self._plan_view(transaction, row.name)

        return self._on_plan(plan, change)

    def plans(self) -> list[PlanView]:
        """All plans, in order of creation, each advanced first."""
        for plan in self._read(lambda transaction: reading.plan_rows(transaction.connection)):
            self._advance_if_due(plan.name)

        def look(transaction: Transaction) -> list[PlanView]:
            rows = reading.plan_rows(transaction.connection)
            return [reading.plan_view(transaction.connection, row, transaction.now) for row in rows]

        return self._read(look)

    def show(self, plan: str) -> PlanView:
        """One plan, advanced first."""
        named = fields.name(plan, "a plan's name")
        self._advance_if_due(named)
        return self._read(lambda transaction: self._plan_view(transaction, named))

    def peek(self, plan: str) -> PlanView:
        """One plan, as it is stored: nothing is timed out or folded by looking."""
        named = fields.name(plan, "a plan's name")
        return self._read(lambda transaction: self._plan_view(transaction, named))

    def advance(self, plan: str) -> Ready:
        """Time out what is due, fold what has ended, unblock what waited for it; what is ready then.

        Only this plan's attempts are looked at. Done again at the same time it changes nothing.
        """

        def go_on(transaction: Transaction, row: Row[Any]) -> Ready:
            passed_over = attempts.advance(transaction, row)
            rows = reading.step_rows(transaction.connection, row, transaction.now, is_ready=True)
            return Ready(reading.step_views(transaction.connection, rows, transaction.now), passed_over)

        return self._on_plan(plan, go_on)

    def cancel_plan(self, plan: str) -> PlanView:
        """Give a plan up: all that is not completed is cancelled, and so is the plan. A no-op where it is so already.

        Raises:
            StateConflict: the plan is completed.
        """

        def give_up(transaction: Transaction, row: Row[Any]) -> PlanView:
            if row.status != PlanStatus.CANCELLED.value:
                structure.require_open(row)
                attempts.give_up(transaction, row)
            return self._plan_view(transaction, row.name)

        return self._on_plan(plan, give_up)

    def remove(self, plan: str) -> PlanView:
        """Take a plan away, with its steps and learnings; what it was. The ledger's history stays.

        Live attempts are closed, and so is the root where the plan is open.
        """

        def take_away(transaction: Transaction, row: Row[Any]) -> PlanView:
            view = reading.plan_view(transaction.connection, row, transaction.now)
            if row.status not in CLOSED_PLANS:
                attempts.give_up(transaction, row)
            structure.remove_plan(transaction, row)
            return view

        return self._on_plan(plan, take_away)

    def graph(self, plan: str) -> Graph:
        """The picture of a plan: its steps, and what waits for what. :func:`tsg.plan.graph.render` draws it."""
        named = fields.name(plan, "a plan's name")

        def look(transaction: Transaction) -> Graph:
            row = reading.plan_row(transaction.connection, named)
            return reading.graph(transaction.connection, row, transaction.now)

        return self._read(look)

    def learnings(self, plan: str) -> list[Learning]:
        """All that was learned in a plan, in order of completion."""
        named = fields.name(plan, "a plan's name")

        def look(transaction: Transaction) -> list[Learning]:
            return reading.learned(transaction.connection, reading.plan_row(transaction.connection, named))

        return self._read(look)

    def doctor(self) -> doctor.Report:
        """The report of :func:`tsg.doctor.examine`, and what is wrong with the plans."""
        if self._ledger is None:
            return doctor.examine(self._target)
        return self._ledger.read(lambda connection, _: doctor.examine(connection))

    # -- steps -----------------------------------------------------------------------------------------

    def add_step(
        self,
        plan: str,
        *,
        subject: str,
        blocked_by: Iterable[str] = (),
        blocks: Iterable[str] = (),
        owner: str | None = None,
        description: str | None = None,
        active_form: str | None = None,
        timeout_seconds: float | None = INHERIT,
        retries: int = INHERIT,
        backoff: str = INHERIT,
        base_seconds: float | None = INHERIT,
        factor: float | None = INHERIT,
        cap_seconds: float | None = INHERIT,
        retry_policy: Mapping[str, object] = INHERIT,
        fallback_agent: str | None = INHERIT,
        partial_ok: bool = INHERIT,
        metadata: Mapping[str, object] | None = None,
        params: Mapping[str, object] | None = None,
        thread_id: str | None = None,
        session_name: str | None = None,
        session_resume: str | None = None,
    ) -> StepView:
        """Add a step with the next key. What is left out comes from the plan.

        Args:
            subject: what is to be done, as an imperative.
            active_form: the same while it is being done.
            blocked_by: the keys of what must be completed first.
            blocks: the keys of what has to wait for it; one that is yet to come will.
            owner: the agent that is to do it; by default whoever claims it.
            retry_policy: ``{"count": …, "backoff": …}``, instead of the policy's parts.
            session_resume: an earlier session to go on from.

        Raises:
            InvalidInput: a malformed argument.
            StepNotFound: there is no such step to wait for.
            DependencyCycle: steps would wait for each other.
            StateConflict: the plan is closed, or a step that is to wait runs or has ended.
        """
        given = {
            "subject": subject,
            "blocked_by": blocked_by,
            "blocks": blocks,
            "owner": owner,
            "description": description,
            "active_form": active_form,
            "timeout_seconds": timeout_seconds,
            "retries": retries,
            "backoff": backoff,
            "base_seconds": base_seconds,
            "factor": factor,
            "cap_seconds": cap_seconds,
            "retry_policy": retry_policy,
            "fallback_agent": fallback_agent,
            "partial_ok": partial_ok,
            "metadata": metadata,
            "params": params,
            "thread_id": thread_id,
            "session_name": session_name,
            "session_resume": session_resume,
        }
        said = _said(given)
        # Before anything is looked at.
        fields.step_fields(said, dict.fromkeys(structure.INHERITED) | {"retries": 0, "backoff": "fixed"})

        def add(transaction: Transaction, row: Row[Any]) -> StepView:
            structure.require_open(row)
            columns, links = fields.step_fields(said, row._asdict())
            key = structure.add_step(transaction, row, columns, links)
            return self._step_view(transaction, row, key)

        return self._on_plan(plan, add)

    def update(self, plan: str, key: str, **given: Any) -> StepView:
        """Give a step other fields: those of :meth:`add_step`; ``add_blocked_by`` and ``add_blocks`` only add.

        Raises:
            InvalidInput: a malformed value, or no such field; the status changes by the verbs alone.
            StepNotFound, DependencyCycle: as :meth:`add_step`.
            StateConflict: the plan is closed or the step deleted, a new owner while the old one is at work, or more to
                wait for where a step runs or has ended.
        """
        said = _said(given)
        fields.step_fields(said, dict.fromkeys(structure.INHERITED) | {"retries": 0, "backoff": "fixed"})

        def change(transaction: Transaction, row: Row[Any], step: Row[Any]) -> StepView:
            structure.require_open(row)
            columns, links = fields.step_fields(said, step._asdict())
            structure.change_step(transaction, row, step, columns, links)
            return self._step_view(transaction, row, step.key)

        return self._on_step(plan, key, change)

    def get(self, plan: str, key: str) -> StepView:
        """One step, a deleted one too."""
        named, step_key = fields.name(plan, "a plan's name"), fields.key(key)

        def look(transaction: Transaction) -> StepView:
            return self._step_view(transaction, reading.plan_row(transaction.connection, named), step_key)

        return self._read(look)

    def steps(
        self,
        plan: str,
        *,
        status: str | None = None,
        owner: str | None = None,
        ready: bool | None = None,
        all: bool = False,
    ) -> list[StepView]:
        """The steps of a plan, in order of creation, advanced first.

        Args:
            status: those of this one; by default the active ones, which are not completed, cancelled or deleted.
            owner: those of this agent.
            ready: those that may be claimed now, or those that may not.
            all: of every status.
        """
        named = fields.name(plan, "a plan's name")
        wanted = None if status is None else fields.one_of(status, StepStatus, "a status")
        agent = None if owner is None else fields.agent(owner)
        is_ready = None if ready is None else values.flag(ready, "ready")
        everything = values.flag(all, "all")
        self._advance_if_due(named)

        def look(transaction: Transaction) -> list[StepView]:
            row = reading.plan_row(transaction.connection, named)
            found = reading.step_rows(
                transaction.connection,
                row,
                transaction.now,
                status=wanted,
                owner=agent,
                is_ready=is_ready,
                all_of_them=everything,
            )
            return reading.step_views(transaction.connection, found, transaction.now)

        return self._read(look)

    def cancel(self, plan: str, key: str) -> StepView:
        """Give a step up, and its live attempt. What depends on it stays blocked, and says so.

        Raises:
            StateConflict: it is completed or deleted.
        """
        return self._end(plan, key, StepStatus.CANCELLED)

    def delete(self, plan: str, key: str) -> StepView:
        """Take a step out of the plan, and end its live attempt; ``unblocked`` names what waits for nothing any more.

        Raises:
            StateConflict: it is completed.
        """
        return self._end(plan, key, StepStatus.DELETED)

    def decide(self, plan: str, key: str, decision: str, *, to: str | None = None) -> StepView:
        """Decide on a step that is escalated, failed or partial.

        Args:
            decision: ``retry`` or ``reassign`` with a fresh count, ``complete`` it by hand, or ``cancel`` it.
            to: the agent that it is reassigned to.

        Raises:
            InvalidInput: no such decision, or an agent missing, or one too many.
            StateConflict: the step waits for no decision.
        """
        chosen = fields.one_of(decision, Decision, "a decision")
        agent = None if to is None else fields.agent(to)
        scheduling.require_agent(chosen, agent)

        def carry_out(transaction: Transaction, row: Row[Any], step: Row[Any]) -> StepView:
            found = attempts.decide(transaction, row, step, chosen, agent)
            return self._step_view(transaction, row, step.key, found)

        return self._on_advanced_step(plan, key, carry_out, alone=True)

    def accept(self, plan: str, key: str, *, remaining: str | None = None) -> StepView:
        """Complete a partial step; ``followUp`` is the step that does what is `remaining`, and is waited for too.

        Raises:
            StateConflict: the step is not partial.
        """
        left = None if remaining is None else fields.step_fields({"subject": remaining}, {})[0]["subject"]

        def take(transaction: Transaction, row: Row[Any], step: Row[Any]) -> StepView:
            found, follow_up = attempts.accept(transaction, row, step, left)
            view = self._step_view(transaction, row, step.key, found)
            if follow_up is not None:
                view["followUp"] = follow_up
            return view

        return self._on_advanced_step(plan, key, take, alone=True)

    # -- attempts --------------------------------------------------------------------------------------

    def claim(self, plan: str, agent: str) -> StepView | None:
        """Open and start the next ready step that is this agent's or nobody's; ``None`` where there is none."""
        named, plan_name = fields.agent(agent), fields.name(plan, "a plan's name")

        def take(transaction: Transaction) -> StepView | None:
            row, _ = self._enter(transaction, plan_name)
            if row.status in CLOSED_PLANS:
                return None
            found = attempts.claim(transaction, row, named)
            if found is None:
                return None
            key, notes = found
            return self._step_view(transaction, row, key, attempts.Report([], notes))

        return self._change(plan_name, take)

    def open(self, plan: str, key: str, *, agent: str | None = None) -> StepView:
        """Make a queued attempt of a ready step: somebody is asked to do it, and its deadline does not run yet.

        Raises:
            StateConflict: the step is not ready, or another agent's.
        """
        named = None if agent is None else fields.agent(agent)

        def ask(transaction: Transaction, row: Row[Any], step: Row[Any]) -> StepView:
            structure.require_open(row)
            attempts.open_attempt(transaction, row, step, named)
            return self._step_view(transaction, row, step.key)

        return self._on_advanced_step(plan, key, ask)

    def start(self, plan: str, key: str, *, agent: str | None = None, attempt: str | None = None) -> StepView:
        """Start a step's queued attempt, or open one and start it; the deadline runs from now.

        Args:
            attempt: the token, for who was asked by one.

        Raises:
            StateConflict: the step is not ready, or somebody else has started it, or the token's time is over.
        """
        named = None if agent is None else fields.agent(agent)
        token = values.optional_id(attempt)

        def begin(transaction: Transaction, row: Row[Any], step: Row[Any]) -> StepView:
            structure.require_open(row)
            notes = attempts.start(transaction, row, step, agent=named, attempt=token)
            return self._step_view(transaction, row, step.key, attempts.Report([], notes))

        return self._on_advanced_step(plan, key, begin)

    def heartbeat(self, attempt: str, *, output: str | None = None) -> StepView:
        """Vouch for a live attempt; from the first time on its silence counts.

        Args:
            output: what there is so far, which is kept in case that it times out.

        Raises:
            TaskNotFound: there is no such attempt.
            StateConflict: it is over; whoever works on it should stop.
        """
        token = values.canonical_id(attempt)
        fields.optional_prose(output, "an output")
        plan, key = self._read(lambda transaction: attempts.step_of(transaction, token))
        return self.heartbeat_step(plan, key, attempt=token, output=output)

    def heartbeat_step(self, plan: str, key: str, *, attempt: str | None = None, output: str | None = None) -> StepView:
        """As :meth:`heartbeat`, by the step; without a token the live attempt is meant."""
        token = values.optional_id(attempt)
        so_far = fields.optional_prose(output, "an output")

        def vouch(transaction: Transaction, row: Row[Any], step: Row[Any]) -> StepView:
            notes = attempts.beat(transaction, row, step, token, so_far)
            return self._step_view(transaction, row, step.key, attempts.Report([], notes))

        return self._on_step(plan, key, vouch, lock="shared")

    def complete(
        self,
        plan: str,
        key: str,
        *,
        attempt: str | None = None,
        learnings: Iterable[str] = (),
        output: str | None = None,
    ) -> StepView:
        """Report success. The same report once more is a no-op.

        Args:
            attempt: the token; without one the live attempt is meant.
            learnings: what those should know that depend on the step.
            output: what came of it, or where that is.

        Raises:
            StateConflict: the attempt has ended otherwise, or is not this step's, or there is none.
        """
        texts = fields.prose_list(learnings, "a learning")
        return self._report(plan, key, TaskStatus.SUCCEEDED, attempt, output=output, learnings=texts)

    def fail(
        self,
        plan: str,
        key: str,
        *,
        attempt: str | None = None,
        error: str | None = None,
        output: str | None = None,
    ) -> StepView:
        """Report failure; what becomes of the step is in the answer. The same report once more is a no-op.

        Args:
            attempt: as for :meth:`complete`.
            error: why.
            output: what there is all the same, or where a log is.

        Raises:
            StateConflict: as :meth:`complete`.
        """
        return self._report(plan, key, TaskStatus.FAILED, attempt, output=output, error=error)

    def work(
        self,
        plan: str,
        key: str,
        *,
        agent: str | None = None,
        attempt: str | None = None,
        interval_seconds: float | None = None,
    ) -> AbstractContextManager[work.Work]:
        """Start a step, send heartbeats while the block runs, and report by how it ends.

        Args:
            interval_seconds: between heartbeats; a quarter of the plan's grace by default, and at most half of it.

        Raises:
            InvalidInput: the interval is too long to keep an attempt alive, or not positive.
            StateConflict: as :meth:`start`; at the end, where the attempt is over already.
        """
        if self._ledger is None:
            raise StateConflict("heartbeats need transactions of their own; take Plans(ledger) for this")
        return work.working(self, plan, key, agent=agent, attempt=attempt, interval_seconds=interval_seconds)

    # -- inside ----------------------------------------------------------------------------------------

    _target: Session | Connection
    _clock: Clock | None

    def _write(self, do: Callable[[Transaction], _Answer]) -> _Answer:
        if self._ledger is not None:
            return self._ledger.write(lambda connection, clock: do(Transaction(connection, clock)))
        with refusing():
            connection = connection_of(self._target)
            require_transaction(connection)
            with connection.begin_nested():
                answer = do(Transaction(connection, self._given_clock()))
            if not isinstance(self._target, Connection):
                self._target.expire_all()
            return answer

    def _change(self, named: str, do: Callable[[Transaction], _Answer]) -> _Answer:
        """Do something to the plan of that name, and tell whoever wants to know of it."""
        return self._changed(named, self._write(do))

    def _changed(self, named: str, answer: _Answer) -> _Answer:
        """Tell whoever wants to know that a plan may have changed; the answer, as it was."""
        if self._on_change is not None:
            self._on_change(self, named)
        return answer

    def _read(self, look: Callable[[Transaction], _Answer]) -> _Answer:
        if self._ledger is not None:
            return self._ledger.read(lambda connection, clock: look(Transaction(connection, clock)))
        with refusing():
            return look(Transaction(connection_of(self._target), self._given_clock()))

    def _is_over(self, attempt: str) -> bool:
        """Whether an attempt has ended. Not where nobody can tell at the moment: a server restarts, a lock is held."""
        try:
            return self._read(lambda transaction: transaction.task(attempt).status not in ACTIVE)
        except TaskNotFound:
            return True
        except StateConflict:
            return False

    def _given_clock(self) -> Clock:
        return clock_of(self._target) if self._clock is None else self._clock

    def _on_plan(self, plan: str, do: Callable[[Transaction, Row[Any]], _Answer]) -> _Answer:
        """Do something to a plan that others keep their hands off."""
        named = fields.name(plan, "a plan's name")
        return self._change(
            named, lambda transaction: do(transaction, reading.plan_row(transaction.connection, named, "own"))
        )

    def _on_step(
        self,
        plan: str,
        key: str,
        do: Callable[[Transaction, Row[Any], Row[Any]], _Answer],
        *,
        lock: str = "own",
    ) -> _Answer:
        """Do something to a step, with that lock on its plan; see :func:`tsg.plan.reading.plan_row`."""
        named, step_key = fields.name(plan, "a plan's name"), fields.key(key)

        def on(transaction: Transaction) -> _Answer:
            row = reading.plan_row(transaction.connection, named, lock)
            return do(transaction, row, reading.step_row(transaction.connection, row, step_key, lock=True))

        return self._change(named, on)

    def _on_advanced_step(
        self,
        plan: str,
        key: str,
        do: Callable[[Transaction, Row[Any], Row[Any]], StepView],
        *,
        alone: bool = False,
    ) -> StepView:
        """Advance a plan and do something to a step of it; that it was advanced stays where the step is refused.

        Args:
            alone: others keep their hands off the plan meanwhile.
        """
        named, step_key = fields.name(plan, "a plan's name"), fields.key(key)

        def on(transaction: Transaction) -> StepView | LedgerError:
            row, advanced = self._enter(transaction, named, alone=alone)
            if not advanced:
                return do(transaction, row, reading.step_row(transaction.connection, row, step_key, lock=True))
            try:
                with transaction.connection.begin_nested():
                    return do(transaction, row, reading.step_row(transaction.connection, row, step_key, lock=True))
            except LedgerError as refused:
                if isinstance(refused, StateConflict) and refused.retriable:
                    raise
                return refused

        found = self._change(named, on)
        if isinstance(found, LedgerError):
            raise found
        return found

    def _enter(self, transaction: Transaction, named: str, *, alone: bool = False) -> tuple[Row[Any], bool]:
        """The plan, advanced where there is need to, and locked no more than that takes; and whether it was."""
        row = reading.plan_row(transaction.connection, named)
        due = attempts.has_due(transaction.connection, row, transaction.glance())
        # The first to begin changes the plan too; others only change its steps, beside each other.
        alone = alone or due or row.status == PlanStatus.PENDING.value
        row = reading.plan_row(transaction.connection, named, "own" if alone else "shared")
        if due:
            attempts.advance(transaction, row)
            row = reading.plan_row(transaction.connection, named)
        return row, due

    def _advance_if_due(self, named: str) -> None:
        def is_due(transaction: Transaction) -> bool:
            row = reading.plan_row(transaction.connection, named)
            return attempts.has_due(transaction.connection, row, transaction.now)

        if self._is_read_only() or not self._read(is_due):
            return
        self._on_plan(named, attempts.advance)

    def _is_read_only(self) -> bool:
        return self._ledger is not None and self._ledger.read_only

    def _end(self, plan: str, key: str, end: StepStatus) -> StepView:
        def give_up(transaction: Transaction, row: Row[Any], step: Row[Any]) -> StepView:
            if step.status != end.value:
                structure.require_open(row)
            found = attempts.cancel(transaction, row, step, end)
            return self._step_view(transaction, row, step.key, found)

        return self._on_advanced_step(plan, key, give_up, alone=True)

    def _report(
        self,
        plan: str,
        key: str,
        ended_as: TaskStatus,
        attempt: str | None,
        *,
        output: str | None = None,
        error: str | None = None,
        learnings: Iterable[str] = (),
    ) -> StepView:
        token = values.optional_id(attempt)
        left = fields.optional_prose(output, "an output")
        reason = fields.optional_prose(error, "an error")
        texts = list(learnings)

        def end(transaction: Transaction, row: Row[Any], step: Row[Any]) -> StepView:
            found = attempts.report(
                transaction, row, step, ended_as, attempt=token, output=left, error=reason, learnings=texts
            )
            return self._step_view(transaction, row, step.key, found)

        return self._on_step(plan, key, end)

    def _step_view(
        self, transaction: Transaction, plan: Row[Any], key: str, found: attempts.Report | None = None
    ) -> StepView:
        row = reading.step_row(transaction.connection, plan, key)
        view = reading.step_views(transaction.connection, [row], transaction.now)[0]
        if found is not None:
            if found.unblocked:
                view["unblocked"] = found.unblocked
            if found.notes:
                view["notes"] = found.notes
        return view

    def _plan_view(self, transaction: Transaction, named: str) -> PlanView:
        row = reading.plan_row(transaction.connection, named)
        return reading.plan_view(transaction.connection, row, transaction.now)
