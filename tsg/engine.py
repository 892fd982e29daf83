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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeGuard, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import QueuePool

from tsg.errors import InvalidInput, StateConflict

__all__ = [
    "begun",
    "contained",
    "driver_transaction",
    "enable_wal",
    "for_writing",
    "is_own_sqlite",
    "make_engine",
    "pause",
    "reading",
    "refusing",
    "require_transaction",
    "snapshot",
    "sqlite_driver",
    "transaction",
    "unchecked",
]

#: The execution option that says how a transaction begins.
BEGIN: Final = "tsg_begin"
#: The one that tells an engine of ours.
OWN: Final = "tsg_own"

#: PostgreSQL's: serialization failure, deadlock, lock not available.
_CONTENTION: Final = ("40001", "40P01", "55P03")

#: Insufficient privilege, invalid schema name.
_NOT_ALLOWED: Final = ("42501", "3F000")

#: What a database's refusal can come as. The last is sqlite3's, where SQLite's own message quotes a damaged schema.
DATABASE_ERRORS: Final = (sa.exc.SQLAlchemyError, sqlite3.Error, UnicodeDecodeError)

#: The isolation levels that are asked of PostgreSQL: for one transition, and for a report or a sweep.
READ_COMMITTED: Final = "READ COMMITTED"
REPEATABLE_READ: Final = "REPEATABLE READ"

_Source = TypeVar("_Source", bound=Engine | Connection)

#: Our engines, each with the connections to files that lie idle in its pool.
_engines: weakref.WeakKeyDictionary[Engine, set[Any]] = weakref.WeakKeyDictionary()


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
        shared: the database lives in the one connection (a private snapshot), which is its owner's to close: the
            pool never opens a second, and threads wait for each other.
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
            if not shared:
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
        execution_options={OWN: True},
    )
    event.listen(engine, "begin", _begin)
    _engines[engine] = idle = set()
    if not shared:
        event.listen(engine, "checkin", lambda connection, _: idle.add(connection))
        event.listen(engine, "checkout", lambda connection, *_: idle.discard(connection))
        event.listen(engine, "close", lambda connection, _: idle.discard(connection))
    return engine


def for_writing(engine: _Source) -> _Source:
    """The same engine and pool, or connection, whose transactions take the write lock at their start.

    On an engine that is not ours this says nothing to anybody; :func:`transaction` begins there itself.
    """
    return engine.execution_options(**{BEGIN: "IMMEDIATE"})  # type: ignore[return-value]  # the same kind, always


@contextmanager
def reading(source: Engine | Connection) -> Iterator[Connection]:
    """One snapshot to read, given up at its end: even of a damaged file, where nothing could be committed."""
    with transaction(source, REPEATABLE_READ) as connection:
        yield connection
        connection.rollback()


@contextmanager
def transaction(source: Engine | Connection, isolation: str = READ_COMMITTED) -> Iterator[Connection]:
    """A real transaction, whatever the engine's own way of beginning one is.

    Args:
        source: an engine, of which a connection is taken, or a connection that has no transaction yet.
        isolation: on PostgreSQL. SQLite has but one.
    """
    with nullcontext(source) if isinstance(source, Connection) else source.connect() as connection:
        if connection.dialect.name == "postgresql":
            # AUTOCOMMIT, if that is the engine's default, would keep a row and its event apart. The pool puts
            # the default back.
            connection.execution_options(isolation_level=isolation)
        with begun(connection):
            yield connection


@contextmanager
def driver_transaction(engine: Engine, mode: str = "") -> Iterator[sqlite3.Connection]:
    """A transaction on an engine of ours over SQLite, of which only the driver knows; see :mod:`tsg.execution`."""
    borrowed = engine.raw_connection()
    try:
        driver = borrowed.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.execute(f"BEGIN {mode}")
        try:
            yield driver
            driver.execute("COMMIT")
        except BaseException:
            driver.rollback()
            raise
    finally:
        borrowed.close()


def is_own_sqlite(source: Engine | Connection) -> TypeGuard[Engine]:
    """Whether it is an engine that :func:`make_engine` made."""
    return isinstance(source, Engine) and bool(source.get_execution_options().get(OWN))


@contextmanager
def begun(connection: Connection) -> Iterator[Connection]:
    """A transaction on `connection`. On SQLite it begins at once, IMMEDIATE on an engine :func:`for_writing`."""
    with connection.begin():
        if connection.dialect.name == "sqlite":
            options = connection.get_execution_options()
            mode = options.get(BEGIN, "")
            if _is_begun(connection) and mode and not options.get(OWN):
                # A host's own BEGIN, which takes no lock: to read and then write in it could fail at any moment.
                connection.exec_driver_sql("ROLLBACK")
            if not _is_begun(connection):
                connection.exec_driver_sql(f"BEGIN {mode}")
        yield connection


def is_autocommit(connection: Connection) -> bool:
    """Whether every statement would commit by itself, and a row could be kept without its event."""
    inner: Any = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":
        # Without a mode of its own, the driver leaves the BEGIN to others, and none has been sent.
        driver: Any = connection.connection.driver_connection
        in_mode = getattr(driver, "autocommit", None) is True or inner.isolation_level is None
        return in_mode and not driver.in_transaction
    return bool(getattr(inner, "autocommit", False))


def require_transaction(connection: Connection, mode: str = "") -> None:
    """That what follows is one snapshot, and all or nothing: a transaction is open, or is opened.

    Raises:
        StateConflict: in AUTOCOMMIT it can't be; and to begin here what nobody would end is no way out.
    """
    _wake(connection)
    if is_autocommit(connection):
        raise StateConflict("in AUTOCOMMIT every statement stands alone; give a connection with a transaction")
    if connection.dialect.name == "sqlite" and not _is_begun(connection):
        # The driver would send it before the first write only.
        connection.exec_driver_sql(f"BEGIN {mode}")


def contained(connection: Connection) -> AbstractContextManager[object]:
    """On PostgreSQL a failed statement would take the caller's transaction with it, if there is one."""
    stands_alone = connection.dialect.name == "sqlite" or is_autocommit(connection)
    return nullcontext() if stands_alone else connection.begin_nested()


@contextmanager
def snapshot(connection: Connection) -> Iterator[None]:
    """What is read in it is of one moment on SQLite, whatever the connection's mode; on PostgreSQL, where its
    isolation level says so."""
    _wake(connection)
    if connection.dialect.name != "sqlite" or _is_begun(connection):
        yield
        return
    alone = is_autocommit(connection)
    # The driver would let each read stand alone.
    connection.exec_driver_sql("BEGIN")
    try:
        yield
    finally:
        if alone:
            connection.exec_driver_sql("ROLLBACK")


def _wake(connection: Connection) -> None:
    """Let SQLAlchemy begin as it does before the first statement, when an application's listener may send a BEGIN."""
    if connection.dialect.name == "sqlite" and not connection.in_transaction():
        connection.exec_driver_sql("SELECT 1").close()


def _is_begun(connection: Connection) -> bool:
    # What the driver underneath knows, be it synchronous or not.
    driver: Any = connection.connection.driver_connection
    return bool(driver.in_transaction)


@contextmanager
def unchecked(connection: Connection) -> Iterator[None]:
    """On SQLite: CHECK constraints are let be, in its own check of the file as in writes. Whoever asks for that
    looks at every rule by itself."""
    if connection.dialect.name != "sqlite":
        yield
        return
    before = connection.exec_driver_sql("PRAGMA ignore_check_constraints").scalar()
    connection.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
    try:
        yield
    finally:
        connection.exec_driver_sql(f"PRAGMA ignore_check_constraints = {int(bool(before))}")


def make_postgresql_engine(url: URL, *, busy_timeout_ms: int) -> Engine:
    """An engine of ours on a PostgreSQL database, whose connections wait for a lock only so long.

    Raises:
        InvalidInput: the driver that the URL names is not installed.
    """
    try:
        # A connection that a restarted server has forgotten is found out before anything is asked of it.
        engine = sa.create_engine(url, hide_parameters=True, pool_pre_ping=True)
    except (ImportError, sa.exc.ArgumentError, sa.exc.NoSuchModuleError):
        raise InvalidInput("the driver that the URL names is not installed here") from None
    if engine.dialect.is_async:
        raise InvalidInput("name a synchronous driver here; an AsyncLedger takes the AsyncEngine")

    @event.listens_for(engine, "connect")
    def prepare(connection: DBAPIConnection, record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"SET lock_timeout = {busy_timeout_ms:d}")
        cursor.close()
        connection.commit()

    _engines[engine] = set()
    return engine


def pause(source: Engine | Connection, seconds: float) -> None:
    """Wait, with the event loop free where `source` is driven by one."""
    if source.dialect.is_async:
        import asyncio

        from sqlalchemy.util import await_only

        await_only(asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


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
    except (sa.exc.IntegrityError, sqlite3.IntegrityError):
        raise StateConflict("the database's own guards refused the change; run doctor") from None
    except DATABASE_ERRORS as error:
        if isinstance(error, sa.exc.TimeoutError) or is_contention(error):
            raise StateConflict("others kept the ledger busy for too long; try again", retriable=True) from None
        if getattr(getattr(error, "orig", None), "sqlstate", None) in _NOT_ALLOWED:
            raise StateConflict("the database's role may not do this, or has no schema to do it in") from None
        if getattr(error, "connection_invalidated", False):
            raise StateConflict("the connection was lost, perhaps after the change was kept; call again") from None
        raise StateConflict("the database can't be read or written; check its file and disk, or its server") from None


def is_contention(error: BaseException) -> bool:
    """Whether the database refused only because of what others do at the same time."""
    driver = getattr(error, "orig", error)
    code = getattr(driver, "sqlite_errorcode", None)
    state = getattr(driver, "sqlstate", None)
    return (code is not None and code & 0xFF == sqlite3.SQLITE_BUSY) or state in _CONTENTION


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
    """SQLite forbids carrying a connection over a fork: the parent keeps its own, the child opens new ones.

    To forget the old ones is not enough: as long as one is open in the child, SQLite takes its locks, which are
    the parent's, for the child's too, and what the child writes is lost when the parent closes. One in use at the
    fork can't be helped: another thread, which the child does not have, may hold its mutex for ever.
    """
    for engine, idle in list(_engines.items()):
        for connection in list(idle):
            connection.close()
        idle.clear()
        engine.dispose(close=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_inherited_connections)
