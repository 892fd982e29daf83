"""An open transaction, in which the two layers change together, at one time."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from tsg import values, verbs
from tsg.errors import StateConflict
from tsg.execution import CoreExecution
from tsg.plan.tables import steps
from tsg.records import TaskRecord, creation
from tsg.states import ACTIVE, Clock, DeliveryStatus, TaskStatus, Verb

__all__ = ["Transaction"]


class Transaction:
    """What an operation on a plan has to work with.

    Args:
        connection: with the transaction.
        clock: read once, when the time is first asked for, which is after the locks.
    """

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self.connection = connection
        self._clock = clock
        self._ledger = CoreExecution(connection)

    @cached_property
    def now(self) -> float:
        """The one time of all that is done, seconds since the epoch."""
        return values.clock_reading(self._clock)

    def glance(self) -> float:
        """A time for what is looked at before the locks are taken."""
        return values.clock_reading(self._clock)

    def write(self, statement: sa.Insert | sa.Update | sa.Delete, expected: int | None = None) -> int:
        """Carry a change out.

        Raises:
            StateConflict: it changed another number of rows than was expected.
        """
        # Unasked, not every driver tells how many rows an INSERT made.
        written = self.connection.execute(statement, execution_options={"preserve_rowcount": True}).rowcount
        if expected is not None and written != expected:
            raise StateConflict("another writer changed the plan at the same moment; try again", retriable=True)
        return written

    def write_step(self, step: Row[Any], **columns: Any) -> None:
        """Change a step that still is what was seen of it.

        Raises:
            StateConflict: it is not.
        """
        self.write(
            sa.update(steps)
            .where(
                steps.c.pk == step.pk,
                steps.c.status == step.status,
                steps.c.attempt_id.is_not_distinct_from(step.attempt_id),
            )
            # A clock that was set back makes no change older than the last one.
            .values(changed_at=max(self.now, step.changed_at), **columns),
            expected=1,
        )

    # -- the ledger's part -----------------------------------------------------------------------------

    def task(self, identifier: str) -> TaskRecord:
        """A task of the ledger.

        Raises:
            TaskNotFound: there is none.
            StateConflict: the stored row breaks a rule.
        """
        return verbs.get(self._ledger, identifier)

    def create_task(self, **fields: Any) -> TaskRecord:
        """A new task of the ledger; see :meth:`tsg.Ledger.create_task`."""
        return verbs.create(self._ledger, creation(**fields), self._time)

    def start_task(self, identifier: str) -> TaskRecord:
        """As :meth:`tsg.Ledger.start_task`."""
        return verbs.do(self._ledger, identifier, Verb.START, self._time)

    def heartbeat(self, identifier: str) -> TaskRecord:
        """As :meth:`tsg.Ledger.heartbeat`."""
        return verbs.do(self._ledger, identifier, Verb.HEARTBEAT, self._time)

    def end_task(self, task: TaskRecord, status: TaskStatus, code: str) -> TaskRecord:
        """End a task that has not ended, and close the delivery where nobody was to receive anything."""
        if task.status in ACTIVE:
            task = verbs.do(self._ledger, task.id, Verb.CLOSE, self._time, status, code)
        return self.settle_delivery(task)

    def settle_delivery(self, task: TaskRecord) -> TaskRecord:
        """Close the delivery of an internal task that has ended."""
        if task.delivery_required or task.delivery_status != DeliveryStatus.PENDING:
            return task
        end = DeliveryStatus.NOT_APPLICABLE
        return verbs.do(self._ledger, task.id, Verb.DELIVER, self._time, end, "internal_task")

    def _time(self) -> float:
        return self.now
