"""The ledger: one method is one transaction and one transition, written by compare-and-set."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Final, TypedDict, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from tsg import doctor, prune, reconcile, states, values, verbs
from tsg.engine import (
    READ_COMMITTED,
    REPEATABLE_READ,
    driver_transaction,
    for_writing,
    is_own_sqlite,
    pause,
    reading,
    refusing,
    transaction,
)
from tsg.errors import InvalidInput, LedgerError, SchemaOutdated, StateConflict
from tsg.execution import CoreExecution, DriverExecution, Execution
from tsg.listing import Progress, Transactions
from tsg.migrating import migration
from tsg.opening import Opened, open_engine, open_read_only, open_to_write, place_of
from tsg.reconcile import ReconcilePolicy
from tsg.records import TaskRecord, creation
from tsg.sessions import server_clock
from tsg.states import Clock, DeliveryStatus, TaskStatus, Verb

__all__ = ["Ledger", "StorageInfo", "reconcile_restart"]


_Answer = TypeVar("_Answer")

#: How often a transaction is tried on PostgreSQL, whose writers can meet in ways that only one of them survives.
_ATTEMPTS: Final = 8
_PAUSE_SECONDS: Final = 0.02
#: Between batches on SQLite, whose waiting writers sleep for up to 0.1 s.
_LEAST_PAUSE_SECONDS: Final = 0.02


class StorageInfo(TypedDict):
    """How a ledger is kept."""

    journal_mode: str
    busy_timeout_ms: int
    foreign_keys: bool
    permission_model: str


class Ledger:
    """A ledger in a file of its own, or in an application's database.

    Args:
        target: a path, a SQLAlchemy URL (text with ``://``, or a ``URL``), or the application's own engine.
        clock: gives seconds since the epoch; read once a transition, under the write lock. Where it is ``time.time``,
            PostgreSQL's own is taken instead, which is one for all hosts.
        busy_timeout_ms: how long to wait for another writer, in milliseconds.
        allow_external_acl: where there are no POSIX modes, that the directory is private by other means.
        read_only: nothing is written, made or changed; older schemas can be read.
        migrate: whether to make a missing ledger and to bring an older one to head.
        adopt: whether to take over a file of the published package, which can't use it afterwards.
        snapshot_limit_mib: read-only, the largest closed file of which a private copy is made, in MiB.

    Raises:
        InvalidInput: an argument, a path or a file mode that is refused.
        SchemaOutdated: the schema is older, and not to be migrated.
        SchemaTooNew: it is newer than this package.
        StateConflict: the storage or the schema is not a ledger's.

    Every method raises only errors of this package, a :exc:`StateConflict` for what the database refuses; and what
    a clock or a ``progress`` of the caller's raises.
    It may be used from several threads, and in a child process after a fork.
    """

    def __init__(
        self,
        target: object,
        *,
        clock: Callable[[], float] = time.time,
        busy_timeout_ms: int = 5000,
        allow_external_acl: bool = False,
        read_only: bool = False,
        migrate: bool = True,
        adopt: bool = False,
        snapshot_limit_mib: int = 64,
    ) -> None:
        if not callable(clock):
            raise InvalidInput("a clock must be callable")
        for flag in (allow_external_acl, read_only, migrate, adopt):
            values.flag(flag, "each of allow_external_acl, read_only, migrate and adopt")
        busy = values.whole(busy_timeout_ms, "busy_timeout_ms")
        limit = values.whole(snapshot_limit_mib, "snapshot_limit_mib") * 1024 * 1024
        if values.is_a(target, Engine):
            opened = open_engine(target)
        else:
            place = place_of(target, allow_external_acl=allow_external_acl)
            if read_only:
                opened = open_read_only(place, busy_timeout_ms=busy, snapshot_limit=limit)
            else:
                opened = open_to_write(place, busy_timeout_ms=busy, migrate=migrate, adopt=adopt)
        self._serve(opened, clock, read_only=read_only, may_migrate=migrate and opened.owned)

    @classmethod
    def over(cls, connection: Connection, clock: Clock = time.time, *, check: bool = True) -> Ledger:
        """A ledger on one connection of the application's, which has no transaction yet.

        Args:
            check: whether to look at the schema first, as on an engine.

        Raises:
            InvalidInput: a malformed argument.
            SchemaOutdated, StateConflict: as :func:`tsg.opening.open_engine`.
        """
        if not values.is_a(connection, Connection):
            raise InvalidInput("a ledger is over a Connection")
        if not callable(clock):
            raise InvalidInput("a clock must be callable")
        values.flag(check, "check")
        ledger = cls.__new__(cls)
        ledger._serve(open_engine(connection, check=check), clock, read_only=False)
        return ledger

    def _serve(self, opened: Opened, clock: Clock, *, read_only: bool, may_migrate: bool = False) -> None:
        self._opened = opened
        self._clock = clock
        self._may_migrate = may_migrate
        self._writer = None if read_only else for_writing(opened.engine)
        self._close = weakref.finalize(self, opened.close)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections, and wipe a private copy. An application's own engine is left alone."""
        with refusing():
            self._close()

    @property
    def read_only(self) -> bool:
        """Whether it was opened to be read only."""
        return self._writer is None

    # -- reading ---------------------------------------------------------------------------------------

    def get_task(self, task_id: object) -> TaskRecord:
        """The task with this id.

        Raises:
            InvalidInput: no UUID.
            TaskNotFound: no such task.
            StateConflict: the stored row breaks a rule.
        """
        identifier = values.canonical_id(task_id)
        return self._look(lambda execution: verbs.get(execution, identifier))

    def children_of(self, task_id: object) -> list[TaskRecord]:
        """The direct children of a task, by creation time and id.

        Raises:
            InvalidInput, TaskNotFound, StateConflict: as :meth:`get_task`, of the task and of each child.
        """
        identifier = values.canonical_id(task_id)
        return self._look(lambda execution: verbs.children_of(execution, identifier))

    def doctor(self, *, progress: Progress | None = None) -> doctor.Report:
        """The report of :func:`tsg.doctor.examine`.

        Args:
            progress: called with how many steps are done and how many there are.

        Raises:
            StateConflict: the file can't be opened at all, or was replaced.
        """
        self._require_open()
        with refusing(), reading(self._opened.original) as connection:
            return doctor.examine(connection, progress=progress)

    def storage_info(self) -> StorageInfo:
        """How the ledger is kept, as its connections find it."""
        self._require_open()
        with refusing(), reading(self._opened.engine) as connection:
            if connection.dialect.name == "sqlite":
                mode, timeout, enforced = (
                    connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                    for name in ("journal_mode", "busy_timeout", "foreign_keys")
                )
            else:
                # What a server keeps is its own business; only the wait for a lock is ours to set.
                waits = sa.text("SELECT setting FROM pg_settings WHERE name = 'lock_timeout'")
                mode, timeout, enforced = "unavailable", connection.scalar(waits), True
        return StorageInfo(
            journal_mode=str(mode),
            busy_timeout_ms=int(timeout or 0),
            foreign_keys=bool(enforced),
            permission_model=self._opened.permission_model,
        )

    # -- writing ---------------------------------------------------------------------------------------

    def create_task(
        self,
        *,
        task_id: object = None,
        parent_id: object = None,
        payload_hash: object = None,
        timeout_seconds: object = None,
        delivery_required: bool = True,
        expects_heartbeat: bool = True,
    ) -> TaskRecord:
        """Record a queued task. With an id that exists and the same fields, it is the stored one.

        Args:
            task_id: a UUID; a random one by default.
            parent_id: the id of an existing task.
            payload_hash: 64 lower-case hexadecimal digits, see :func:`tsg.payload_fingerprint`.
            timeout_seconds: from its start to its deadline.
            delivery_required: whether somebody is to receive the result.
            expects_heartbeat: whether silence may be held against it; where not, it needs a timeout.

        Raises:
            InvalidInput: a malformed argument.
            StateConflict: the id exists with other fields, or the clock is behind a time of the parent's.
            TaskNotFound: there is no such parent.
        """
        asked = creation(
            task_id=task_id,
            parent_id=parent_id,
            payload_hash=payload_hash,
            timeout_seconds=timeout_seconds,
            delivery_required=delivery_required,
            expects_heartbeat=expects_heartbeat,
        )
        return self._transact(lambda execution, clock: verbs.create(execution, asked, clock))

    def start_task(self, task_id: object) -> TaskRecord:
        """Start a queued task; its deadline runs from now. A no-op on a running one.

        Raises:
            InvalidInput: no UUID, or a deadline that would not be finite.
            TaskNotFound: no such task.
            StateConflict: it has ended, or the clock is behind its stored times.
        """
        return self._do(task_id, Verb.START)

    def heartbeat(self, task_id: object) -> TaskRecord:
        """Vouch for a running task.

        Raises:
            InvalidInput, TaskNotFound: as :meth:`start_task`.
            StateConflict: it is not running, or the clock is behind its stored times.
        """
        return self._do(task_id, Verb.HEARTBEAT)

    def heartbeat_many(self, task_ids: Iterable[object]) -> list[str]:
        """Vouch for many running tasks at once, in one transaction and at one time.

        Returns:
            The ids of those that are not running, unknown ones included, canonical, each once, in the order given.
            The others have their beat.

        Raises:
            InvalidInput: no iterable, or the first that is no UUID.
            StateConflict: the clock is behind a time of a running one, or it breaks a rule; none has its beat.
        """
        identifiers = values.canonical_ids(task_ids)
        return self._transact(lambda execution, clock: verbs.heartbeat_many(execution, identifiers, clock))

    def close_task(self, task_id: object, status: object, *, code: object = None) -> TaskRecord:
        """End a task as `status`, for the optional reason `code`. A no-op where it has ended so already.

        Raises:
            InvalidInput: no UUID, no terminal status, or a reason that does not fit it.
            TaskNotFound: no such task.
            StateConflict: it has ended otherwise, or the clock is behind its stored times.
        """
        identifier = values.canonical_id(task_id)
        return self._do(identifier, Verb.CLOSE, states.task_target(status), code)

    def set_delivery(self, task_id: object, status: object, *, code: object = None) -> TaskRecord:
        """Close the delivery of a task that has ended. A no-op where it has closed so already.

        Raises:
            InvalidInput: no UUID, no terminal delivery status, or a reason that does not fit it.
            TaskNotFound: no such task.
            StateConflict: the task is active, the delivery has closed otherwise, `status` does not fit whether
                a delivery is required, or the clock is behind its stored times.
        """
        identifier = values.canonical_id(task_id)
        return self._do(identifier, Verb.DELIVER, states.delivery_target(status), code)

    def reconcile(
        self,
        *,
        active_grace_seconds: float,
        delivery_grace_seconds: float,
        dry_run: bool = False,
        skip_conflicts: bool = False,
        parent_id: object = None,
        batch_size: int | None = None,
        progress: Progress | None = None,
    ) -> reconcile.Report:
        """Close what nobody vouches for, or with `dry_run` report what would be closed.

        Args:
            active_grace_seconds, delivery_grace_seconds: see :class:`ReconcilePolicy`.
            dry_run: write nothing.
            skip_conflicts: pass over rows that can't be acted on, and count them, instead of refusing.
            parent_id: only the direct children of this task.
            batch_size: the most tasks that one transaction changes, oldest first, all at one decision time and
                with `skip_conflicts`; others can write in between. By default the whole is one transaction.
            progress: called with how many tasks are done and how many there are.

        Raises:
            InvalidInput: a malformed argument.
            StateConflict: as :func:`tsg.reconcile.apply`.
            TaskNotFound: there is no such parent.
        """
        preview = values.flag(dry_run, "dry_run")
        skip = values.flag(skip_conflicts, "skip_conflicts")
        parent = values.optional_id(parent_id)
        size = None if batch_size is None else values.at_least_one(batch_size, "batch_size")
        values.optional_callable(progress, "progress")
        policy = ReconcilePolicy(active_grace_seconds, delivery_grace_seconds)
        if preview:
            return self._read(
                lambda connection: reconcile.preview(
                    connection,
                    policy,
                    clock=self._clock_on(connection),
                    skip_conflicts=skip,
                    parent_id=parent,
                    batch_size=size,
                )
            )
        if size is None:
            return _attempt(
                self._writable(),
                lambda connection: reconcile.apply(
                    connection,
                    policy,
                    clock=self._clock_on(connection),
                    skip_conflicts=skip,
                    parent_id=parent,
                    progress=progress,
                ),
                REPEATABLE_READ,
            )
        with self._batches() as (connection, in_transaction):
            return reconcile.apply_in_batches(
                connection,
                policy,
                in_transaction,
                batch_size=size,
                parent_id=parent,
                clock=self._clock_on(connection),
                progress=progress,
            )

    def prune(
        self,
        older_than_seconds: float,
        batch_size: int = 5000,
        *,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> prune.Report:
        """Let history go: tasks that have ended, with their delivery closed, below which nothing stays.

        Args:
            older_than_seconds: how long ago the delivery closed, at least.
            batch_size: the most tasks that go in one transaction; others can write in between.
            dry_run: only report what would go.
            progress: called with how many tasks have been looked at and how many there are.

        Raises:
            InvalidInput: a malformed argument.
            StateConflict: a table of the application's refers to a task and does not let it go.
        """
        age = values.non_negative(older_than_seconds, "an age")
        size = values.at_least_one(batch_size, "batch_size")
        values.optional_callable(progress, "progress")
        if values.flag(dry_run, "dry_run"):
            return self._read(
                lambda connection: prune.preview(connection, age, batch_size=size, clock=self._clock_on(connection))
            )
        with self._batches() as (connection, in_transaction):
            return prune.apply_in_batches(
                connection,
                age,
                in_transaction,
                batch_size=size,
                clock=self._clock_on(connection),
                progress=progress,
            )

    # -- for what is built on it ------------------------------------------------------------------------

    def read(self, work: Callable[[Connection, Clock], _Answer]) -> _Answer:
        """Do `work` in one snapshot; it is given the connection and the ledger's clock.

        Raises:
            InvalidInput: `work` can't be called.
            StateConflict: the database refuses; and whatever `work` raises.
        """
        _require_work(work)
        return self._read(lambda connection: work(connection, self._clock_on(connection)))

    def write(self, work: Callable[[Connection, Clock], _Answer]) -> _Answer:
        """Do `work` in one transaction, which is undone where it raises; it is given the connection and the clock.

        On PostgreSQL it is READ COMMITTED, and `work` is called again where others were in the way at the same moment.

        Raises:
            InvalidInput: `work` can't be called.
            StateConflict: the ledger is read-only, or the database refuses; and whatever `work` raises.
        """
        _require_work(work)
        return _attempt(self._writable(), lambda connection: work(connection, self._clock_on(connection)))

    def require(
        self, fault: Callable[[Connection], LedgerError | None], upgrade: Callable[[Connection], object]
    ) -> None:
        """That tables which stand on the ledger's are there; brought in where the storage is the ledger's to change.

        Args:
            fault: what is wrong with them, or ``None``.
            upgrade: brings them in or to their current shape, in the transaction of its connection.

        Raises:
            InvalidInput: either can't be called.
            LedgerError: what is wrong, where it is not for this ledger to change.
        """
        _require_work(fault)
        _require_work(upgrade)
        found = self._read(fault)
        if found is None:
            return
        if not (self._may_migrate and isinstance(found, SchemaOutdated) and isinstance(self._writer, Engine)):
            raise found
        with refusing(), migration(self._writer) as connection:
            # Others may have been here first.
            if fault(connection) is not None:
                upgrade(connection)

    # -- inside ----------------------------------------------------------------------------------------

    def _do(
        self, task_id: object, verb: Verb, to: TaskStatus | DeliveryStatus | None = None, code: object = None
    ) -> TaskRecord:
        identifier = values.canonical_id(task_id)
        return self._transact(lambda execution, clock: verbs.do(execution, identifier, verb, clock, to, code))

    def _look(self, work: Callable[[Execution], _Answer]) -> _Answer:
        """Look at tasks, in one snapshot."""
        engine = self._readable()
        if not is_own_sqlite(engine):
            return self._read(lambda connection: work(CoreExecution(connection)))
        with refusing(), driver_transaction(engine) as driver:
            return work(DriverExecution(driver))

    def _transact(self, work: Callable[[Execution, Clock], _Answer]) -> _Answer:
        """Write one transition, or several of one time."""
        engine = self._writable()
        if not is_own_sqlite(engine):
            return _attempt(engine, lambda connection: work(CoreExecution(connection), self._clock_on(connection)))
        with refusing(), driver_transaction(engine, "IMMEDIATE") as driver:
            return work(DriverExecution(driver), self._clock)

    def _require_open(self) -> None:
        if not self._close.alive:
            raise StateConflict("the ledger is closed")
        self._opened.verify()

    def _read(self, work: Callable[[Connection], _Answer]) -> _Answer:
        """Do `work` in one snapshot."""
        with refusing(), reading(self._readable()) as connection:
            return work(connection)

    @contextmanager
    def _batches(self) -> Iterator[tuple[Connection, Transactions]]:
        """One connection, and what does work in a transaction of its own on it, and lets others write in between."""
        writer = self._writable()
        free_at = 0.0

        def in_transaction(work: Callable[[], _Answer], /) -> _Answer:
            nonlocal free_at
            pause(connection, max(0.0, free_at - time.monotonic()))
            started = time.monotonic()
            try:
                return _attempt(connection, lambda _: work(), REPEATABLE_READ)
            finally:
                if connection.dialect.name == "sqlite":
                    # Who waits for SQLite's one write lock looks for it now and then only.
                    ended = time.monotonic()
                    free_at = ended + max(_LEAST_PAUSE_SECONDS, ended - started)

        with refusing(), nullcontext(writer) if isinstance(writer, Connection) else writer.connect() as connection:
            yield connection, in_transaction

    def _readable(self) -> Engine | Connection:
        self._require_open()
        fault = self._opened.fault
        if fault is not None:
            raise type(fault)(*fault.args)
        return self._opened.engine

    def _writable(self) -> Engine | Connection:
        if self._writer is None:
            raise StateConflict("the ledger was opened read-only")
        self._require_open()
        return self._writer

    def _clock_on(self, connection: Connection) -> Clock:
        """The ledger's clock: on a server, where hosts disagree, the server's, unless one was given."""
        return server_clock(connection) if self._clock is time.time else self._clock


def _require_work(work: object) -> None:
    if not callable(work):
        raise InvalidInput("work must be callable")


def _attempt(
    source: Engine | Connection, work: Callable[[Connection], _Answer], isolation: str = READ_COMMITTED
) -> _Answer:
    """Do `work` in one transaction; again from the start where a server asks for that, but not for ever."""
    attempts = _ATTEMPTS if source.dialect.name == "postgresql" else 1
    for attempt in range(1, attempts + 1):
        try:
            with refusing(), transaction(source, isolation) as connection:
                return work(connection)
        except StateConflict as error:
            if not error.retriable or attempt == attempts:
                raise
        pause(source, _PAUSE_SECONDS * attempt)
    raise AssertionError


def reconcile_restart(ledger: Ledger, policy: ReconcilePolicy, *, dry_run: bool = False) -> reconcile.Report:
    """What a restart calls: :meth:`Ledger.reconcile` with a policy.

    Raises:
        InvalidInput: `ledger` is no :class:`Ledger`, or `policy` no :class:`ReconcilePolicy`.
    """
    if not values.is_a(ledger, Ledger) or not values.is_a(policy, ReconcilePolicy):
        raise InvalidInput("a restart is reconciled on a Ledger, with a ReconcilePolicy")
    return ledger.reconcile(
        active_grace_seconds=policy.active_grace_seconds,
        delivery_grace_seconds=policy.delivery_grace_seconds,
        dry_run=dry_run,
    )
