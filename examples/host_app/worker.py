"""The background: threads that pack orders, and one that looks for those that were left behind."""

from __future__ import annotations

import logging
import threading

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm.exc import StaleDataError

from host_app import service
from host_app.config import Config
from host_app.db import Database
from host_app.service import Job
from tsg import LedgerError

log = logging.getLogger(__name__)

#: How long a worker with nothing to do waits before it looks again, in seconds.
IDLE = 0.2


class Worker:
    """The background work of one process, from :meth:`start` to :meth:`stop`."""

    def __init__(self, database: Database, config: Config) -> None:
        self._database = database
        self._config = config
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Recover what the last process left behind, then begin to work."""
        self._recover()
        self._threads = [threading.Thread(target=self._work) for _ in range(self._config.workers)]
        self._threads.append(threading.Thread(target=self._watch))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each worker finish the piece in its hands and give its order back."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _watch(self) -> None:
        # What was last heard of just before this process started is not stale yet when it starts.
        while not self._stopping.wait(self._config.active_grace_seconds):
            self._recover()

    def _recover(self) -> None:
        try:
            with self._database.exact.begin() as session:
                report = service.recover(session, self._config.policy)
        except (LedgerError, SQLAlchemyError) as error:
            # Another process was at it in the same moment, most likely. Nothing was changed; there is a next time.
            log.warning("recovery is put off: %s", type(error).__name__)
        else:
            log.info("recovered: %s", report)

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._database.sessions.begin() as session:
                    job = service.take(session)
                if job is None:
                    self._stopping.wait(IDLE)
                else:
                    self._pack(job)
            except StaleDataError:
                # Another worker was quicker with this task.
                continue
            except (LedgerError, SQLAlchemyError) as error:
                # Nobody vouches for the task any more. It will be timed out, and its order packed by another.
                log.warning("an order is given up: %s", type(error).__name__)
                self._stopping.wait(IDLE)

    def _pack(self, job: Job) -> None:
        more = True
        while more:
            stopped = self._stopping.wait(self._config.step_seconds)
            with self._database.sessions.begin() as session:
                if stopped:
                    service.give_back(session, job)
                    return
                more = service.pack_one(session, job)
