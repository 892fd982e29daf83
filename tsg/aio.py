"""The ledger for ``asyncio``: the same methods, awaited, over an application's ``AsyncEngine``.

Every operation is written once, in :mod:`tsg.ledger`; here it is carried over by ``run_sync``, one hop an
operation. What comes back are plain values.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from tsg import doctor, prune, reconcile, values
from tsg.engine import refusing
from tsg.errors import InvalidInput, StateConflict
from tsg.ledger import Ledger, StorageInfo
from tsg.listing import Progress
from tsg.records import TaskRecord

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["AsyncLedger"]

_Answer = TypeVar("_Answer")


class AsyncLedger:
    """A ledger in an application's database, for ``asyncio``.

    Args:
        engine: the application's own; nothing of it is changed.
        clock: as for :class:`tsg.Ledger`; it is called, not awaited.

    Methods have the arguments and errors of those of :class:`tsg.Ledger`. That the schema is at head is looked at
    by the first of them: :exc:`SchemaOutdated` names the command.
    """

    def __init__(self, engine: AsyncEngine, *, clock: Callable[[], float] = time.time) -> None:
        try:
            from sqlalchemy.ext.asyncio import AsyncEngine
        except ImportError:
            raise InvalidInput("asyncio needs more to be installed: tsg-ledger[async] or tsg-ledger[asyncpg]") from None
        if not values.is_a(engine, AsyncEngine):
            raise InvalidInput("an AsyncLedger needs an AsyncEngine")
        if not callable(clock):
            raise InvalidInput("a clock must be callable")
        self._engine = engine
        self._clock = clock
        self._known_to_be_at_head = False

    async def create_task(
        self,
        *,
        task_id: object = None,
        parent_id: object = None,
        payload_hash: object = None,
        timeout_seconds: object = None,
        delivery_required: bool = True,
        expects_heartbeat: bool = True,
    ) -> TaskRecord:
        """As :meth:`tsg.Ledger.create_task`."""
        return await self._run(
            lambda ledger: ledger.create_task(
                task_id=task_id,
                parent_id=parent_id,
                payload_hash=payload_hash,
                timeout_seconds=timeout_seconds,
                delivery_required=delivery_required,
                expects_heartbeat=expects_heartbeat,
            )
        )

    async def get_task(self, task_id: object) -> TaskRecord:
        """As :meth:`tsg.Ledger.get_task`."""
        return await self._run(lambda ledger: ledger.get_task(task_id))

    async def children_of(self, task_id: object) -> list[TaskRecord]:
        """As :meth:`tsg.Ledger.children_of`."""
        return await self._run(lambda ledger: ledger.children_of(task_id))

    async def start_task(self, task_id: object) -> TaskRecord:
        """As :meth:`tsg.Ledger.start_task`."""
        return await self._run(lambda ledger: ledger.start_task(task_id))

    async def heartbeat(self, task_id: object) -> TaskRecord:
        """As :meth:`tsg.Ledger.heartbeat`."""
        return await self._run(lambda ledger: ledger.heartbeat(task_id))

    async def heartbeat_many(self, task_ids: Iterable[object]) -> list[str]:
        """As :meth:`tsg.Ledger.heartbeat_many`."""
        return await self._run(lambda ledger: ledger.heartbeat_many(task_ids))

    async def close_task(self, task_id: object, status: object, *, code: object = None) -> TaskRecord:
        """As :meth:`tsg.Ledger.close_task`."""
        return await self._run(lambda ledger: ledger.close_task(task_id, status, code=code))

    async def set_delivery(self, task_id: object, status: object, *, code: object = None) -> TaskRecord:
        """As :meth:`tsg.Ledger.set_delivery`."""
        return await self._run(lambda ledger: ledger.set_delivery(task_id, status, code=code))

    async def reconcile(
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
        """As :meth:`tsg.Ledger.reconcile`; `progress` is called, not awaited."""
        return await self._run(
            lambda ledger: ledger.reconcile(
                active_grace_seconds=active_grace_seconds,
                delivery_grace_seconds=delivery_grace_seconds,
                dry_run=dry_run,
                skip_conflicts=skip_conflicts,
                parent_id=parent_id,
                batch_size=batch_size,
                progress=progress,
            )
        )

    async def prune(
        self,
        older_than_seconds: float,
        batch_size: int = 5000,
        *,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> prune.Report:
        """As :meth:`tsg.Ledger.prune`; `progress` is called, not awaited."""
        return await self._run(
            lambda ledger: ledger.prune(older_than_seconds, batch_size, dry_run=dry_run, progress=progress)
        )

    async def doctor(self, *, progress: Progress | None = None) -> doctor.Report:
        """As :meth:`tsg.Ledger.doctor`; `progress` is called, not awaited."""
        return await self._run(lambda ledger: ledger.doctor(progress=progress))

    async def storage_info(self) -> StorageInfo:
        """As :meth:`tsg.Ledger.storage_info`."""
        return await self._run(Ledger.storage_info)

    async def run(self, work: Callable[[Ledger], _Answer]) -> _Answer:
        """Do `work` with a :class:`tsg.Ledger` on a connection of the engine's, which is good for that long only.

        Raises:
            InvalidInput: `work` can't be called.
            StateConflict: as the ledger's methods; and whatever `work` raises.
        """
        if not callable(work):
            raise InvalidInput("work must be callable")
        return await self._run(work)

    async def _run(self, work: Callable[[Ledger], _Answer]) -> _Answer:
        if self._engine.dialect.name != "sqlite":
            return await self._do(work)
        # Cancelled in the middle, aiosqlite would leave its transaction open, and the file's lock with it: what has
        # begun is let come to its end, which the busy timeout bounds, and only then is the cancellation passed on.
        running = asyncio.ensure_future(self._do(work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                # However often it is cancelled.
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            if not running.cancelled():
                running.exception()
            raise

    async def _do(self, work: Callable[[Ledger], _Answer]) -> _Answer:
        def on(connection: Connection) -> _Answer:
            ledger = Ledger.over(connection, self._clock, check=not self._known_to_be_at_head)
            self._known_to_be_at_head = True
            return work(ledger)

        with refusing():
            connection = self._engine.connect()
            try:
                await connection.start()
            except SQLAlchemyError:
                raise
            except Exception:
                # Not every driver, in every version, has what it says of a server wrapped.
                raise StateConflict("the database can't be reached") from None
            try:
                return await connection.run_sync(on)
            finally:
                await connection.close()
