"""The models: a task changes itself and writes its own history, in whatever session it lives.

A verb does everything that its transition means (times, deadline, reason, version, event) and nothing else;
assigning a state does the same as its verb or raises there and then. Nothing here commits or flushes. What
goes round the ORM (bulk statements, other programs) meets the CHECK constraints and triggers of the tables.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cache

import sqlalchemy as sa
from sqlalchemy import event as sa_event
from sqlalchemy.engine import Connection
from sqlalchemy.orm import DeclarativeBase, Mapped, Mapper, object_session, relationship, validates
from sqlalchemy.orm.util import identity_key

from tsg import states, values
from tsg.ddl import metadata
from tsg.engine import is_autocommit
from tsg.errors import InvalidInput, StateConflict, TaskNotFound
from tsg.states import Change, Clock, DeliveryStatus, Event, TaskStatus, Verb
from tsg.tables import task_events, tasks

__all__ = ["Base", "Task", "TaskEvent"]


class Base(DeclarativeBase):
    """The declarative base of the ledger's models, with a ``MetaData`` of its own."""

    metadata = metadata


_PLAIN = (str, int, float, bool, type(None), TaskStatus, DeliveryStatus)


class _Recorded:
    """A row whose attributes only its own verbs write."""

    _open_to_writing = False

    @contextmanager
    def _writing(self) -> Iterator[None]:
        before, self._open_to_writing = self._open_to_writing, True
        try:
            yield
        finally:
            self._open_to_writing = before

    def _refuse_removal(self, is_remove: bool) -> None:
        if is_remove and not self._open_to_writing:
            raise StateConflict("this is recorded by the ledger and not to be deleted")

    def _keep(self, key: str, value: object) -> object:
        """Let a write of the row's own through, and one that changes nothing.

        Raises:
            StateConflict: it would change what is recorded.
        """
        current = getattr(self, key)
        # Only plain values are asked whether they are equal; another's word is not taken for it.
        same = value is current or (type(value) in _PLAIN and value == current)
        if not self._open_to_writing and not same:
            raise StateConflict("this is recorded by the ledger and not to be assigned")
        return value


class Task(_Recorded, Base):
    """A task, queued when it is made; adding it to a session records that.

    Args:
        id: a UUID; a random one by default.
        parent, parent_id: a task that exists, or will by the time this one is flushed.
        payload_hash: 64 lower-case hexadecimal digits, see :func:`tsg.payload_fingerprint`.
        timeout_seconds: from its start to its deadline.
        delivery_required: whether somebody is to receive the result.
        expects_heartbeat: whether silence may be held against it; where not, it needs a timeout.

    Raises:
        InvalidInput: a malformed argument.

    Attributes hold seconds since the epoch. The clock is ``session.info["tsg_clock"]``, else ``time.time``; a
    verb's `at` (seconds since the epoch, or an aware datetime) stands for one reading of it. Of two writers of
    one task, the second to flush gets SQLAlchemy's ``StaleDataError``.
    """

    __table__ = tasks
    __mapper_args__ = {
        "primary_key": [tasks.c.id],
        "version_id_col": tasks.c.version,
        "version_id_generator": False,
    }

    pk: Mapped[int]
    id: Mapped[str]
    parent_id: Mapped[str | None]
    status: Mapped[TaskStatus]
    delivery_status: Mapped[DeliveryStatus]
    delivery_required: Mapped[bool]
    expects_heartbeat: Mapped[bool]
    payload_hash: Mapped[str | None]
    timeout_seconds: Mapped[float | None]
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    updated_at: Mapped[float]
    ended_at: Mapped[float | None]
    deadline_at: Mapped[float | None]
    delivery_updated_at: Mapped[float]
    terminal_code: Mapped[str | None]
    delivery_code: Mapped[str | None]
    version: Mapped[int]

    parent: Mapped[Task | None] = relationship(remote_side=[tasks.c.id])
    events: Mapped[list[TaskEvent]] = relationship(
        # Not merged: what a detached task has of its history is no news to the one that is stored.
        back_populates="task",
        order_by=task_events.c.number,
        passive_deletes="all",
        cascade="save-update",
    )

    def __init__(
        self,
        *,
        id: object = None,
        parent: Task | None = None,
        parent_id: object = None,
        payload_hash: object = None,
        timeout_seconds: object = None,
        delivery_required: bool = True,
        expects_heartbeat: bool = True,
    ) -> None:
        timeout = None if timeout_seconds is None else values.non_negative(timeout_seconds, "a timeout")
        if not values.flag(expects_heartbeat, "expects_heartbeat") and timeout is None:
            raise InvalidInput("a task that sends no heartbeat needs a timeout")
        if parent is not None and (parent_id is not None or not isinstance(parent, Task)):
            raise InvalidInput("give a task as the parent, or its id, not both")
        with self._writing():
            self.id = str(uuid.uuid4()) if id is None else values.canonical_id(id)
            if parent is not None:
                self.parent = parent
                self.parent_id = parent.id
            else:
                self.parent_id = values.optional_id(parent_id)
            self.status = TaskStatus.QUEUED
            self.delivery_status = DeliveryStatus.PENDING
            self.delivery_required = values.flag(delivery_required, "delivery_required")
            self.expects_heartbeat = expects_heartbeat
            self.payload_hash = values.payload_digest(payload_hash)
            self.timeout_seconds = timeout
            self.version = 0
            # Its time is the task's, which is known when a session with its clock has it.
            TaskEvent(self, states.created())

    def start(self, *, at: float | datetime | None = None) -> None:
        """Start a queued task; its deadline runs from then. A no-op on a running one.

        Raises:
            StateConflict: it has ended, or the time is before one that is stored.
            InvalidInput: the time, or the deadline, would not be a finite one.
        """
        self._do(Verb.START, at=at)

    def heartbeat(self, *, at: float | datetime | None = None) -> None:
        """Vouch for a running task.

        Raises:
            StateConflict: it is not running, or the time is before one that is stored.
            InvalidInput: the time is not a finite one.
        """
        self._do(Verb.HEARTBEAT, at=at)

    def close(self, status: object, code: object = None, *, at: float | datetime | None = None) -> None:
        """End the task as `status`, for the optional reason `code`. A no-op where it has ended so already.

        Raises:
            InvalidInput: no terminal status, a reason that does not fit it, or a time that is not finite.
            StateConflict: it has ended otherwise, or the time is before one that is stored.
        """
        self._do(Verb.CLOSE, states.task_target(status), code, at=at)

    def deliver(self, status: object, code: object = None, *, at: float | datetime | None = None) -> None:
        """Close the delivery. A no-op where it has closed so already.

        Raises:
            InvalidInput: no terminal delivery status, a reason that does not fit it, or a time that is not finite.
            StateConflict: the task is active, the delivery has closed otherwise, `status` does not fit whether
                one is required, or the time is before one that is stored.
        """
        self._do(Verb.DELIVER, states.delivery_target(status), code, at=at)

    @validates("status", include_removes=True)
    def _assign_status(self, key: str, value: object, is_remove: bool) -> object:
        if self._open_to_writing:
            return value
        self._refuse_removal(is_remove)
        name = values.text(value)
        if name == TaskStatus.RUNNING.value:
            self.start()
        elif name != TaskStatus.QUEUED.value:
            self.close(value)
        elif self.status != TaskStatus.QUEUED:
            raise StateConflict("no task goes back to queued; create a new one for a retry")
        return self.status

    @validates("delivery_status", include_removes=True)
    def _assign_delivery_status(self, key: str, value: object, is_remove: bool) -> object:
        if self._open_to_writing:
            return value
        self._refuse_removal(is_remove)
        if values.text(value) != DeliveryStatus.PENDING.value:
            self.deliver(value)
        elif self.delivery_status != DeliveryStatus.PENDING:
            raise StateConflict("no delivery goes back to pending")
        return self.delivery_status

    @validates(
        *(column.name for column in tasks.c if column.name not in ("status", "delivery_status")),
        "parent",
        include_removes=True,
    )
    def _assign(self, key: str, value: object, is_remove: bool) -> object:
        self._refuse_removal(is_remove)
        return self._keep(key, value)

    @validates("events", include_removes=True)
    def _assign_event(self, key: str, value: object, is_remove: bool) -> object:
        if not self._open_to_writing:
            raise StateConflict("events are recorded by the task's verbs")
        return value

    def _do(
        self,
        verb: Verb,
        to: TaskStatus | DeliveryStatus | None = None,
        code: object = None,
        *,
        at: float | datetime | None,
    ) -> None:
        if sa.inspect(self).detached:
            raise StateConflict("the task belongs to no session; merge or add it first")
        clock = self._clock(at)
        if self.created_at is None:
            # Not flushed yet: it is created at the time of its first verb.
            self._create(clock())
        change = states.transition(self, verb, clock, to=to, code=code)
        if change is not None:
            self._take(change)

    def _create(self, now: float) -> None:
        with self._writing():
            self.created_at = self.updated_at = self.delivery_updated_at = now

    def _take(self, change: Change) -> None:
        with self._writing():
            for name, value in change.values.items():
                setattr(self, name, value)
            self.version += 1
            if change.event is not None:
                recorded = TaskEvent(self, change.event)
                session = object_session(self)
                if session is not None:
                    session.add(recorded)

    def _clock(self, at: float | datetime | None) -> Clock:
        if at is not None:
            moment = values.moment(at)
            return lambda: moment
        session = object_session(self)
        clock: Clock = time.time if session is None else session.info.get("tsg_clock", time.time)
        # Read late, and once: what one verb does has one time.
        return cache(lambda: values.clock_reading(clock))


class TaskEvent(_Recorded, Base):
    """One row of a task's history, made by the task's verbs alone."""

    __table__ = task_events

    task_pk: Mapped[int]
    number: Mapped[int]
    kind: Mapped[str]
    from_status: Mapped[str | None]
    to_status: Mapped[str]
    occurred_at: Mapped[float]
    code: Mapped[str | None]

    task: Mapped[Task] = relationship(back_populates="events")

    def __init__(self, task: Task, event: Event) -> None:
        if not values.is_a(task, Task) or not values.is_a(event, Event):
            raise StateConflict("events are recorded by the task's verbs")
        with self._writing(), task._writing():
            for name, value in event._asdict().items():
                setattr(self, name, value)
            self.task = task

    @validates(*(column.name for column in task_events.c), "task", include_removes=True)
    def _assign(self, key: str, value: object, is_remove: bool) -> object:
        self._refuse_removal(is_remove)
        if key == "task_pk" and self.task_pk is None:
            # The flush fills it in, once the task has its key.
            return value
        return self._keep(key, value)


@sa_event.listens_for(Task, "before_insert")
def _settle_task(mapper: Mapper[Task], connection: Connection, task: Task) -> None:
    _refuse_autocommit(mapper, connection, task)
    # Before the clock is read: another may vouch for the parent at any moment.
    before = _times_of_parent(mapper, connection, task)
    if task.created_at is None:
        task._create(task._clock(None)())
    states.require_not_before(task.created_at, *before)


def _times_of_parent(mapper: Mapper[Task], connection: Connection, task: Task) -> list[float | None]:
    """All that a child may not be created before."""
    if task.parent_id is None:
        return []
    times: list[float | None] = []
    parent = _parent_in_session(task)
    if parent is not None:
        # What the session knows of it may not have reached the database yet.
        if parent.created_at is None:
            _settle_task(mapper, connection, parent)
        times += [getattr(parent, column.name) for column in _PARENT_TIMES.selected_columns]
    if parent is None or sa.inspect(parent).persistent:
        stored = connection.execute(_PARENT_TIMES, {"id": task.parent_id}).first()
        if stored is None:
            raise TaskNotFound("there is no task with the parent's id")
        times += stored
    return times


@sa_event.listens_for(Task, "before_update")
def _refuse_autocommit(mapper: Mapper[Task], connection: Connection, task: Task) -> None:
    if is_autocommit(connection):
        raise StateConflict("in AUTOCOMMIT a task and its event can't be kept together; use a transaction")


def _parent_in_session(task: Task) -> Task | None:
    session = object_session(task)
    assert session is not None
    if task.parent_id == task.id:
        return None
    known = session.identity_map.get(identity_key(Task, task.parent_id))
    if isinstance(known, Task):
        return known
    return next((made for made in session.new if isinstance(made, Task) and made.id == task.parent_id), None)


@sa_event.listens_for(TaskEvent, "before_insert")
def _settle_event(mapper: Mapper[TaskEvent], connection: Connection, event: TaskEvent) -> None:
    if event.occurred_at is None:
        with event._writing():
            event.occurred_at = event.task.created_at


_PARENT_TIMES = sa.select(
    tasks.c.created_at, tasks.c.started_at, tasks.c.updated_at, tasks.c.ended_at, tasks.c.delivery_updated_at
).where(tasks.c.id == sa.bindparam("id"))
