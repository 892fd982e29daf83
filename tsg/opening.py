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

from tsg import catalog, migrating, schema, storage, values
from tsg.copies import SNAPSHOT_LIMIT, copy_closed, copy_open, wipe
from tsg.engine import enable_wal, make_engine, make_postgresql_engine, reading, refusing, sqlite_driver
from tsg.errors import InvalidInput, LedgerError, SchemaOutdated, StateConflict
from tsg.storage import LedgerFile
from tsg.tables import VERSION_TABLE, metadata

__all__ = [
    "Opened",
    "Place",
    "is_there",
    "migration",
    "open_as_it_is",
    "open_engine",
    "open_read_only",
    "open_to_write",
    "place_of",
]

BUSY_TIMEOUT_MS: Final = 5000

#: Where a ledger of ours is: in a file of its own, or in a PostgreSQL database.
Place = LedgerFile | URL


@dataclass
class Opened:
    """A ledger behind an engine.

    Attributes:
        engine: where the ledger is read, and written unless it is read-only; or one connection of the
            application's, for what is done on it alone.
        original: where doctor looks; another than `engine` where an older schema is read through a copy.
        permission_model: ``posix_mode`` or ``external_acl``.
        fault: why nothing but doctor can be had of it, or ``None``.
        watch: a connection of its own to a live file, that tells when others have written.
        verify: raises :exc:`StateConflict` where the file is not the one that was opened.
    """

    engine: Engine | Connection
    original: Engine | Connection
    permission_model: str
    fault: LedgerError | None = None
    verify: Callable[[], object] = lambda: None
    owned: bool = True
    copies: list[sqlite3.Connection] = field(default_factory=list)
    watch: sqlite3.Connection | None = None

    def close(self) -> None:
        """Give back what was opened here; an application's own engine stays as it is."""
        if self.watch is not None:
            self.watch.close()
        for copy in self.copies:
            wipe(copy)
        if self.owned:
            for engine in {self.engine, self.original}:
                if isinstance(engine, Engine):
                    engine.dispose()


def place_of(target: object, *, allow_external_acl: bool = False) -> Place:
    """The ledger file that a path or a SQLite URL names, or the URL of a PostgreSQL database.

    Raises:
        InvalidInput: no path of a local file, another database's URL, or a SQLite one with options.
    """
    written = values.text(target)
    if written is not None and "://" in written:
        if len(written) > storage.LONGEST_PATH:
            raise InvalidInput("the database URL is too long")
        try:
            written.encode()
            target = sa.make_url(written)
        except (sa.exc.ArgumentError, ValueError):
            raise InvalidInput("a database URL must read dialect://…") from None
    if values.is_a(target, URL):
        try:
            backend = target.get_backend_name()
        except Exception:
            # Its parts may be anything.
            raise InvalidInput("a database URL must read dialect://…") from None
        if backend == "postgresql":
            return target
        if backend != "sqlite":
            raise InvalidInput("a ledger lives in SQLite or PostgreSQL")
        if target.query or target.host or target.username or target.password or target.port:
            # mode=memory, immutable=1, vfs=… would each take away something that a ledger stands on.
            raise InvalidInput("a ledger's URL must be sqlite:///path, without options")
        target = target.database or ""
    return storage.locate(target, allow_external_acl=allow_external_acl)


def is_there(place: Place) -> bool:
    """Whether there is something to open: a file that is not empty, or tables of ours in a database.

    Raises:
        StateConflict: the database can't be reached.
    """
    if isinstance(place, LedgerFile):
        return place.exists
    opened = open_as_it_is(place)
    try:
        with refusing(), reading(opened.engine) as connection:
            return bool(catalog.table_names(connection) & {VERSION_TABLE, *metadata.tables})
    finally:
        opened.close()


def open_engine(engine: Engine | Connection, *, check: bool = True) -> Opened:
    """The ledger in an application's own database; no file is checked and nothing is migrated.

    Raises:
        SchemaOutdated: it is not at head; the message names the command.
        StateConflict: the schema is another, or can't be read.
    """
    if check:
        with refusing(), reading(engine) as connection:
            fault = schema.fault(connection)
        if fault is not None:
            raise fault
    return Opened(engine, engine, "external_acl", owned=False)


def open_to_write(
    place: Place, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS, migrate: bool = True, adopt: bool = False
) -> Opened:
    """A ledger of ours, made and brought to head as allowed.

    Raises:
        InvalidInput: the path is refused, see :mod:`tsg.storage`; or there is no such driver here.
        SchemaOutdated: it is older and `migrate` is false, or a published file and `adopt` is.
        StateConflict: the storage or the schema is not a ledger's.
    """
    if isinstance(place, URL):
        return _open_url(place, busy_timeout_ms, migrate=migrate, read_only=False)
    file = place
    if migrate:
        file.make()
    else:
        file.judge_place()
        if not file.exists:
            raise SchemaOutdated("there is no ledger at this path yet: run tsg init")
    identity = file.identity()
    engine = make_engine(lambda: file.connect("rw", identity), busy_timeout_ms=busy_timeout_ms)
    try:
        with refusing():
            # Looked at before anything is changed: it may be another application's database.
            with reading(engine) as connection:
                fault = schema.fault(connection)
                pending = schema.may_migrate(connection, adopt=adopt)
            if fault is not None and not (migrate and pending):
                raise fault
            # Only what is not refused is changed; an empty file is in nobody's way, and WAL is soonest best.
            if not file.exists:
                _enable_wal(engine, busy_timeout_ms)
            if fault is not None:
                schema.bring_to_head(engine, adopt=adopt)
            file.tighten()
            _enable_wal(engine, busy_timeout_ms)
    except BaseException:
        engine.dispose()
        raise

    return Opened(engine, engine, file.permission_model, verify=lambda: file.require_same(identity))


def open_read_only(
    place: Place, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS, snapshot_limit: int = SNAPSHOT_LIMIT
) -> Opened:
    """A ledger of ours without a byte of it changed; a file whatever schema it has.

    Raises:
        InvalidInput: no private file there, or no such driver here.
        StateConflict: a file that is not in WAL mode, not closed cleanly, too large to copy, or changing.
    """
    if isinstance(place, URL):
        return _open_url(place, busy_timeout_ms, migrate=False, read_only=True)
    place.require()
    with refusing():
        opened = _live(place, busy_timeout_ms) if place.is_live() else _closed(place, busy_timeout_ms, snapshot_limit)
        try:
            with reading(opened.original) as connection:
                driver = sqlite_driver(connection)
                assert driver is not None
                if not opened.copies and driver.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                    raise StateConflict("the file is not a ledger in WAL mode")
                opened.fault = schema.fault(connection)
                older = schema.may_migrate(connection, adopt=True) and not schema.state(connection).empty
                if opened.fault is not None and older:
                    if not opened.copies:
                        _watch(opened, place)
                    opened.copies.append(copy_open(driver, snapshot_limit))
            if opened.fault is not None and older:
                opened.engine = _private(opened.copies[-1], busy_timeout_ms, read_only=False)
                schema.upgrade(opened.engine)
                opened.copies[-1].execute("PRAGMA query_only = ON")
                opened.fault = None
        except BaseException:
            opened.close()
            raise
    return opened


def _live(file: LedgerFile, busy_timeout_ms: int) -> Opened:
    """A file that is in use, read where it is."""
    identity = file.identity()
    engine = make_engine(lambda: file.connect("ro", identity), busy_timeout_ms=busy_timeout_ms, read_only=True)
    return Opened(engine, engine, file.permission_model, verify=lambda: file.require_same(identity))


def _closed(file: LedgerFile, busy_timeout_ms: int, snapshot_limit: int) -> Opened:
    """A file that nobody uses, read from a private copy as long as it stays as it is."""
    traits = file.traits()
    copy = copy_closed(file, snapshot_limit)
    engine = _private(copy, busy_timeout_ms)

    def verify() -> None:
        if file.traits() != traits or file.is_live():
            raise StateConflict("the ledger has changed since it was copied; open it again")

    return Opened(engine, engine, file.permission_model, verify=verify, copies=[copy])


def _watch(opened: Opened, file: LedgerFile) -> None:
    """From now on, what is read of a file in use is refused as soon as others have written to it."""
    watch = file.connect("ro", file.identity())
    seen = _data_version(watch)
    in_place = opened.verify

    def verify() -> None:
        in_place()
        if _data_version(watch) != seen:
            raise StateConflict("the ledger has changed since it was copied; open it again")

    opened.watch, opened.verify = watch, verify


def open_as_it_is(place: Place, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> Opened:
    """A ledger of ours for reading only, but in place: whatever its size, mode or schema, even damaged.

    SQLite itself may make its sidecars and clear them away again.

    Raises:
        InvalidInput: no file there, or one that is not the caller's own; or no such driver here.
        StateConflict: a sidecar that is not a plain file.
    """
    if isinstance(place, URL):
        engine = make_postgresql_engine(place, busy_timeout_ms=busy_timeout_ms)
        return Opened(engine, engine, "external_acl")
    file = place
    if not file.exists:
        raise InvalidInput("there is no ledger at this path; tsg init makes one")
    file.judge()
    identity = file.identity()
    engine = make_engine(lambda: file.connect("rw", identity), busy_timeout_ms=busy_timeout_ms, read_only=True)
    return Opened(engine, engine, file.permission_model)


@contextmanager
def migration(place: Place) -> Iterator[Connection]:
    """A transaction on a ledger of ours, its file made where it is missing, in which its schema may move.

    Raises:
        LedgerError: as :func:`open_to_write`.
    """
    if isinstance(place, URL):
        engine = make_postgresql_engine(place, busy_timeout_ms=BUSY_TIMEOUT_MS)
        try:
            with refusing(), migrating.migration(engine) as connection:
                yield connection
        finally:
            engine.dispose()
        return
    file = place
    file.make()
    identity = file.identity()
    engine = make_engine(lambda: file.connect("rw", identity), busy_timeout_ms=BUSY_TIMEOUT_MS)
    try:
        with refusing():
            with reading(engine) as connection:
                schema.require_known(connection)
            if not file.exists:
                _enable_wal(engine, BUSY_TIMEOUT_MS)
            with migrating.migration(engine) as connection:
                yield connection
            file.tighten()
            _enable_wal(engine, BUSY_TIMEOUT_MS)
    finally:
        engine.dispose()


def _open_url(url: URL, busy_timeout_ms: int, *, migrate: bool, read_only: bool) -> Opened:
    engine = make_postgresql_engine(url, busy_timeout_ms=busy_timeout_ms)
    opened = Opened(engine, engine, "external_acl")
    try:
        with refusing():
            with reading(engine) as connection:
                fault = schema.fault(connection)
                pending = schema.may_migrate(connection, adopt=False)
            if fault is not None and pending and migrate and not read_only:
                schema.upgrade(engine)
            elif fault is not None and read_only:
                opened.fault = fault
            elif fault is not None:
                raise fault
    except BaseException:
        engine.dispose()
        raise
    return opened


def _data_version(connection: sqlite3.Connection) -> int:
    """Changes whenever another connection has committed."""
    version: int = connection.execute("PRAGMA data_version").fetchone()[0]
    return version


def _private(copy: sqlite3.Connection, busy_timeout_ms: int, *, read_only: bool = True) -> Engine:
    return make_engine(lambda: copy, busy_timeout_ms=busy_timeout_ms, read_only=read_only, shared=True)


def _enable_wal(engine: Engine, busy_timeout_ms: int) -> None:
    with engine.connect() as connection:
        driver = sqlite_driver(connection)
        assert driver is not None
        enable_wal(driver, busy_timeout_ms)
