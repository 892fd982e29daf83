"""How a history of Alembic's revisions is run: inside the caller's transaction, all or nothing, one at a time.

Alembic is imported when there is something to migrate.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from tsg import catalog, values
from tsg.engine import begun, for_writing, require_transaction, sqlite_driver, transaction
from tsg.errors import InvalidInput, StateConflict

__all__ = ["Versions", "locked", "migration", "migrations_folder", "move", "over"]

_Answer = TypeVar("_Answer")

#: What concurrent migrations of one PostgreSQL database wait for each other by: "tsg" in ASCII.
_ADVISORY_LOCK: Final = 0x747367

# Alembic's ``op`` is one for the process: two threads that migrate, even two databases, would mix.
_one_migration = threading.Lock()


def _renew_lock() -> None:
    global _one_migration
    _one_migration = threading.Lock()


if hasattr(os, "register_at_fork"):
    # Another thread, which a child does not have, may hold it at the fork.
    os.register_at_fork(after_in_child=_renew_lock)


class Versions(NamedTuple):
    """One history.

    Attributes:
        folder: where its revisions are, below that of all migrations.
        table: which says how far they have come.
        revisions: their names, in order.
    """

    folder: str
    table: str
    revisions: tuple[str, ...]

    def named(self, name: object, *, downgrade: bool = False) -> str:
        """The revision of that name; ``head`` is one too, and ``base`` for a downgrade.

        Raises:
            InvalidInput: there is none.
        """
        written = values.text(name)
        if written in ("head", "heads"):
            return self.revisions[-1]
        if written is not None and (written in self.revisions or (downgrade and written == "base")):
            return written
        raise InvalidInput("there is no such revision")


def over(target: Engine | Connection, work: Callable[[Connection], _Answer]) -> _Answer:
    """Do `work`, which moves a schema: on a connection in the caller's transaction, on an engine in one of its own.

    Raises:
        InvalidInput: neither, or of another kind of database.
    """
    if values.is_a(target, Engine):
        with migration(target) as connection:
            return over(connection, work)
    if not values.is_a(target, Connection):
        raise InvalidInput("a schema is moved over an Engine or a Connection")
    if target.dialect.name not in ("sqlite", "postgresql"):
        raise InvalidInput("a ledger lives in SQLite or PostgreSQL")
    return work(target)


def move(connection: Connection, versions: Versions, direction: str, stands: str | None, destination: str) -> None:
    """Take the schema from the revision where it stands to another, where that is not behind it.

    Args:
        direction: ``upgrade`` or ``downgrade``.

    Raises:
        InvalidInput: a downgrade to what is newer.
        StateConflict: what is stored can't be held by the other schema, or the version table contradicts itself.
    """
    here, there = (("base", *versions.revisions).index(name or "base") for name in (stands, destination))
    if direction == "downgrade" and there > here:
        raise InvalidInput("the schema is older than that already")
    if there > here if direction == "upgrade" else there < here:
        try:
            _run(connection, versions, direction, destination)
        except (sa.exc.IntegrityError, sa.exc.DataError):
            raise StateConflict("a stored row can't be held by the schema; nothing was changed") from None


@contextmanager
def migration(engine: Engine) -> Iterator[Connection]:
    """A transaction in which the schema may move: with the write lock, and on a ledger's own file with foreign
    keys off, so that rebuilding a table loses nothing; what must hold at its end is the caller's to see.
    """
    with for_writing(engine).connect() as connection:
        driver = sqlite_driver(connection)
        if driver is None or driver.in_transaction:
            with transaction(connection):
                yield connection
            return
        # Inside a transaction SQLite would not listen.
        enforced = _foreign_keys(driver, on=False)
        try:
            with begun(connection):
                yield connection
        finally:
            _foreign_keys(driver, on=enforced)


@contextmanager
def locked(connection: Connection) -> Iterator[None]:
    """All or nothing inside the caller's transaction, and on PostgreSQL nobody else migrates meanwhile."""
    require_transaction(connection, "IMMEDIATE")
    with connection.begin_nested():
        if connection.dialect.name != "postgresql":
            yield
            return
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
        path = connection.scalar(sa.select(sa.func.current_setting("search_path")))
        # Unqualified names are those of the ledger's schema.
        _search(connection, catalog.quoted(catalog.namespace(connection)))
        # Where it raises, what was set is undone with the rest.
        yield
        _search(connection, path)


def _search(connection: Connection, path: str | None) -> None:
    connection.execute(sa.select(sa.func.set_config("search_path", path, sa.true())))


def migrations_folder() -> Path:
    """Where the revisions are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "migrations"
    return installed if (installed / "env.py").is_file() else package.parent / "migrations"


def _run(connection: Connection, versions: Versions, direction: str, revision: str) -> None:
    from alembic import op
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    scripts = ScriptDirectory(str(migrations_folder()), version_locations=[str(migrations_folder() / versions.folder)])
    # The same steps that alembic.command takes from env.py, which can't run inside another env.py.
    steps: Any = scripts._upgrade_revs if direction == "upgrade" else scripts._downgrade_revs
    with _one_migration:
        context = MigrationContext.configure(
            connection,
            opts={
                "version_table": versions.table,
                "script": scripts,
                "transactional_ddl": True,
                "fn": lambda revisions, _: steps(revision, revisions),
            },
        )
        # Alembic forgets the operations of an outer run, a host's env.py, when those of an inner one end.
        outer = getattr(op, "_proxy", None)
        try:
            with Operations.context(context), context.begin_transaction():
                context.run_migrations()
        except CommandError:
            # Its text has what the table of versions holds.
            raise StateConflict("the record of the schema's version contradicts itself; run doctor") from None
        finally:
            if outer is not None:
                outer._install_proxy()


def _foreign_keys(driver: sqlite3.Connection, *, on: bool) -> bool:
    (before,) = driver.execute("PRAGMA foreign_keys").fetchone()
    driver.execute(f"PRAGMA foreign_keys = {'ON' if on else 'OFF'}")
    return bool(before)
