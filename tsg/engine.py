"""Engines of our own: how a connection begins, what it promises, and what survives a fork.

None of these listeners is ever put on an engine that an application made. Ours own their BEGIN: the
``sqlite3`` module would otherwise send none before a SELECT, and a late one before a write, which fails at
once (SQLITE_BUSY_SNAPSHOT) when somebody wrote in between.
"""

from __future__ import annotations

import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import QueuePool

from tsg.errors import StateConflict

__all__ = ["begun", "enable_wal", "for_writing", "make_engine", "refusing", "sqlite_driver", "transaction"]

#: The execution option that says how a transaction begins.
BEGIN: Final = "tsg_begin"

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def make_engine(
    connect: Callable[[], sqlite3.Connection],
    *,
    busy_timeout_ms: int,
    read_only: bool = False,
    shared: bool = False,
) -> Engine:
    """An engine over `connect`, which opens one SQLite connection.

    Args:
        connect: called by the pool whenever it needs a connection.
        busy_timeout_ms: how long a connection waits for another's lock, in milliseconds.
        read_only: every statement that would write is refused by SQLite.
        shared: the database lives in the one connection (a private snapshot): the pool never opens
            a second, and threads wait for each other.
    """

    def prepare() -> sqlite3.Connection:
        connection = connect()
        try:
            connection.isolation_level = None
            connection.execute(f"PRAGMA busy_timeout = {busy_timeout_ms:d}")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = NORMAL")
            if read_only:
                connection.execute("PRAGMA query_only = ON")
        except BaseException:
            connection.close()
            raise
        return connection

    engine = sa.create_engine(
        "sqlite+pysqlite://",
        creator=prepare,
        poolclass=QueuePool,
        pool_size=1 if shared else 5,
        max_overflow=0 if shared else 10,
        hide_parameters=True,
    )
    event.listen(engine, "begin", _begin)
    _engines.add(engine)
    return engine


def for_writing(engine: Engine) -> Engine:
    """The same engine and pool, whose transactions take the write lock at their start.

    On an engine that is not ours this says nothing to anybody; :func:`transaction` begins there itself.
    """
    return engine.execution_options(**{BEGIN: "IMMEDIATE"})


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """A real transaction on a connection of its own, whatever the engine's own way of beginning one is."""
    with engine.connect() as connection, begun(connection):
        yield connection


@contextmanager
def begun(connection: Connection) -> Iterator[Connection]:
    """A transaction on `connection`. On SQLite it begins at once, IMMEDIATE on an engine :func:`for_writing`."""
    with connection.begin():
        driver = sqlite_driver(connection)
        if driver is not None and not driver.in_transaction:
            connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get(BEGIN, '')}")
        yield connection


def sqlite_driver(connection: Connection) -> sqlite3.Connection | None:
    """The ``sqlite3`` connection underneath, where that is what there is."""
    driver: object = connection.connection.dbapi_connection
    return driver if isinstance(driver, sqlite3.Connection) else None


@contextmanager
def refusing() -> Iterator[None]:
    """Turn every error of SQLAlchemy and of the driver into one of ours, without its text.

    Raises:
        StateConflict: the database could not do what was asked of it.
    """
    try:
        yield
    except sa.exc.IntegrityError:
        raise StateConflict("the database's own guards refused the change; run doctor") from None
    except (sa.exc.SQLAlchemyError, sqlite3.Error) as error:
        code = getattr(getattr(error, "orig", error), "sqlite_errorcode", None)
        if isinstance(error, sa.exc.TimeoutError) or (code is not None and code & 0xFF == sqlite3.SQLITE_BUSY):
            raise StateConflict("others kept the ledger busy for too long; try again") from None
        raise StateConflict("the database can't be read or written; check the file and the disk") from None


def enable_wal(connection: sqlite3.Connection, busy_timeout_ms: int) -> None:
    """Put the database into WAL mode, where it stays.

    Raises:
        StateConflict: it can't be, or another connection kept it from it for all of the busy timeout.
    """
    # Changing the mode ignores the busy timeout, so two first openers would see "database is locked".
    give_up = time.monotonic() + busy_timeout_ms / 1000
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
            if mode == "wal":
                return
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode == "wal":
                return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= give_up:
                raise
        else:
            raise StateConflict("the database can't be put into WAL mode here; use a local file system")
        time.sleep(0.005)


def _begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    # Under AUTOCOMMIT nobody would commit what a BEGIN of ours had opened, and the rows would be lost.
    if options.get("isolation_level") != "AUTOCOMMIT":
        connection.exec_driver_sql(f"BEGIN {options.get(BEGIN, '')}")


def _forget_inherited_connections() -> None:
    for engine in list(_engines):
        engine.dispose(close=False)


if hasattr(os, "register_at_fork"):
    # SQLite forbids carrying a connection over a fork. The parent keeps its own; the child opens new ones.
    os.register_at_fork(after_in_child=_forget_inherited_connections)
