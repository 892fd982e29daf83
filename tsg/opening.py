"""How what an application names becomes an engine with a ledger behind it.

A path or a SQLite URL is a ledger's own file: judged, made, migrated as asked. An engine is the application's:
it is looked at, and nothing else. Opened read-only, a file is not so much as touched; what can't be read in
place is read from a private copy in memory.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine

from tsg import schema, storage
from tsg.engine import enable_wal, make_engine, refusing, sqlite_driver, transaction
from tsg.errors import InvalidInput, LedgerError, SchemaOutdated, StateConflict
from tsg.storage import SNAPSHOT_LIMIT, LedgerFile

__all__ = [
    "Opened",
    "file_at",
    "migration",
    "open_as_it_is",
    "open_engine",
    "open_read_only",
    "open_to_write",
]

BUSY_TIMEOUT_MS: Final = 5000


@dataclass
class Opened:
    """A ledger behind an engine.

    Attributes:
        engine: where the ledger is read, and written unless it is read-only.
        original: where doctor looks; another than `engine` where an older schema is read through a copy.
        permission_model: ``posix_mode`` or ``external_acl``.
        fault: why nothing but doctor can be had of it, or ``None``.
        verify: raises :exc:`StateConflict` where the file is not the one that was opened.
    """

    engine: Engine
    original: Engine
    permission_model: str
    fault: LedgerError | None = None
    verify: Callable[[], object] = lambda: None
    owned: bool = True
    copies: list[sqlite3.Connection] = field(default_factory=list)

    def close(self) -> None:
        """Give back what was opened here; an application's own engine stays as it is."""
        for copy in self.copies:
            storage.wipe(copy)
        if self.owned:
            for engine in {self.engine, self.original}:
                engine.dispose()


def file_at(target: object, *, allow_external_acl: bool = False) -> LedgerFile:
    """The ledger file that a path or a SQLite URL names.

    Raises:
        InvalidInput: no path of a local file, another database's URL, or one with options.
    """
    if isinstance(target, str) and "://" in target:
        try:
            target = sa.make_url(str.__str__(target))
        except (sa.exc.ArgumentError, ValueError):
            raise InvalidInput("a database URL must read dialect://…") from None
    if isinstance(target, URL):
        if target.get_backend_name() != "sqlite":
            raise InvalidInput("this release keeps its ledgers in SQLite")
        if target.query or target.host or target.username or target.password or target.port:
            # mode=memory, immutable=1, vfs=… would each take away something that a ledger stands on.
            raise InvalidInput("a ledger's URL must be sqlite:///path, without options")
        target = target.database or ""
    return storage.locate(target, allow_external_acl=allow_external_acl)


def open_engine(engine: Engine) -> Opened:
    """The ledger in an application's own database; no file is checked and nothing is migrated.

    Raises:
        SchemaOutdated: it is not at head; the message names the command.
        StateConflict: the schema is another, or can't be read.
    """
    with refusing(), transaction(engine) as connection:
        fault = schema.fault(connection)
    if fault is not None:
        raise fault
    return Opened(engine, engine, "external_acl", owned=False)


def open_to_write(
    file: LedgerFile, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS, migrate: bool = True, adopt: bool = False
) -> Opened:
    """A ledger's own file, made and brought to head as allowed.

    Raises:
        InvalidInput: the path is refused, see :mod:`tsg.storage`.
        SchemaOutdated: it is older and `migrate` is false, or a published file and `adopt` is.
        StateConflict: the storage or the schema is not a ledger's.
    """
    if not file.exists and not migrate:
        raise SchemaOutdated("there is no ledger at this path yet: run tsg init")
    file.make()
    identity = file.identity()
    engine = make_engine(lambda: file.connect("rw", identity), busy_timeout_ms=busy_timeout_ms)
    try:
        with refusing():
            # Looked at before anything is changed: it may be another application's database.
            with transaction(engine) as connection:
                fault = schema.fault(connection)
                pending = schema.may_migrate(connection, adopt=adopt)
            if fault is not None and not (migrate and pending):
                raise fault
            file.tighten()
            _enable_wal(engine, busy_timeout_ms)
            if fault is not None:
                schema.bring_to_head(engine, adopt=adopt)
    except BaseException:
        engine.dispose()
        raise

    def verify() -> None:
        if file.identity() != identity:
            raise StateConflict("the ledger's file was replaced")

    return Opened(engine, engine, file.permission_model, verify=verify)


def open_read_only(
    file: LedgerFile, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS, snapshot_limit: int = SNAPSHOT_LIMIT
) -> Opened:
    """A ledger's own file without a byte of it changed, whatever schema it has.

    Raises:
        InvalidInput: no private file there.
        StateConflict: it is not in WAL mode, not closed cleanly, too large to copy, or changing.
    """
    file.require()
    identity = file.identity()
    copies: list[sqlite3.Connection] = []
    with refusing():
        if file.is_live():
            original = make_engine(
                lambda: file.connect("ro", identity), busy_timeout_ms=busy_timeout_ms, read_only=True
            )

            def verify() -> None:
                if file.identity() != identity:
                    raise StateConflict("the ledger's file was replaced")
        else:
            traits = file.traits()
            copies.append(file.read_snapshot(snapshot_limit))
            original = _private(copies[0], busy_timeout_ms)

            def verify() -> None:
                if file.traits() != traits or file.is_live():
                    raise StateConflict("the ledger has changed since it was copied; open it again")

        opened = Opened(original, original, file.permission_model, verify=verify, copies=copies)
        try:
            with transaction(original) as connection:
                driver = sqlite_driver(connection)
                assert driver is not None
                if not copies and driver.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                    raise StateConflict("the file is not a ledger in WAL mode")
                opened.fault = schema.fault(connection)
                older = schema.may_migrate(connection, adopt=True) and not schema.state(connection).empty
                if opened.fault is not None and older:
                    copies.append(storage.copy_to_memory(driver, snapshot_limit))
            if opened.fault is not None and older:
                opened.engine = _private(copies[-1], busy_timeout_ms, read_only=False)
                schema.upgrade(opened.engine)
                copies[-1].execute("PRAGMA query_only = ON")
                opened.fault = None
        except BaseException:
            opened.close()
            raise
    return opened


def open_as_it_is(file: LedgerFile, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> Opened:
    """A ledger's own file for reading only, but in place: whatever its size, mode or schema, even damaged.

    SQLite itself may make its sidecars and clear them away again.

    Raises:
        InvalidInput: no file there, or one that is not the caller's own.
        StateConflict: a sidecar that is not a plain file.
    """
    if not file.exists:
        raise InvalidInput("there is no ledger at this path; tsg init makes one")
    file.judge()
    identity = file.identity()
    engine = make_engine(lambda: file.connect("rw", identity), busy_timeout_ms=busy_timeout_ms, read_only=True)
    return Opened(engine, engine, file.permission_model)


@contextmanager
def migration(file: LedgerFile) -> Iterator[Connection]:
    """A transaction on a ledger's own file, made where it is missing, in which its schema may move.

    Raises:
        LedgerError: as :func:`open_to_write`.
    """
    file.make()
    identity = file.identity()
    engine = make_engine(lambda: file.connect("rw", identity), busy_timeout_ms=BUSY_TIMEOUT_MS)
    try:
        with refusing():
            with transaction(engine) as connection:
                schema.require_known(connection)
            file.tighten()
            _enable_wal(engine, BUSY_TIMEOUT_MS)
            with schema.migration(engine) as connection:
                yield connection
    finally:
        engine.dispose()


def _private(copy: sqlite3.Connection, busy_timeout_ms: int, *, read_only: bool = True) -> Engine:
    return make_engine(lambda: copy, busy_timeout_ms=busy_timeout_ms, read_only=read_only, shared=True)


def _enable_wal(engine: Engine, busy_timeout_ms: int) -> None:
    with engine.connect() as connection:
        driver = sqlite_driver(connection)
        assert driver is not None
        enable_wal(driver, busy_timeout_ms)
