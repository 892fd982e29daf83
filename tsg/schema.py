"""The schema of a database: what it is, whether it is exactly ours, and how it moves (Alembic).

Looking needs no Alembic: the revisions' names and the digest of the schema at head are constants here, held
to the migrations and to the models by tests. Alembic is imported when there is something to migrate.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from tsg import catalog, published, values
from tsg.engine import refusing
from tsg.errors import LedgerError, SchemaOutdated, SchemaTooNew, StateConflict
from tsg.migrating import Versions, locked, migration, migrations_folder, move, over
from tsg.tables import PLAN_PREFIX, PREFIX, VERSION_TABLE, version_table

__all__ = [
    "HEAD",
    "REVISIONS",
    "VERSIONS",
    "Report",
    "State",
    "bring_to_head",
    "check",
    "current",
    "downgrade",
    "fault",
    "include_name",
    "include_own_name",
    "is_exact",
    "may_migrate",
    "migrations_folder",
    "record",
    "require_known",
    "revision_named",
    "state",
    "upgrade",
    "verify",
]

REVISIONS: Final = ("0001", "0002", "0003", "0004")
HEAD: Final = REVISIONS[-1]

#: Where the revisions are, and which table says how far they have come.
VERSIONS: Final = Versions("versions", VERSION_TABLE, REVISIONS)
revision_named: Final = VERSIONS.named

#: Of what makes up the schema at head, as each database words it: see :mod:`tsg.catalog`.
_HEAD_SHA256: Final = {
    "sqlite": "f612fec752ae610a0d8623f3440b27662f083ebd89c327d953914bb8d428e40b",
    "postgresql": "ddf46b947b1099e79aa02479f9c13dc66dcea0d8e80b4d8428097e1af1f12018",
}
_BROKEN_REFERENCES: Final = (
    "SELECT 1 FROM pragma_foreign_key_check WHERE \"table\" LIKE 'tsg\\_%' ESCAPE '\\' "
    "OR parent LIKE 'tsg\\_%' ESCAPE '\\' LIMIT 1"
)


class State(NamedTuple):
    """What a database holds.

    Attributes:
        revision: of our tables; ``None`` where there are none. A published file has that of its version.
        published: the tables are the published package's, to be adopted.
        empty: there is no table at all.
    """

    revision: str | None
    published: bool
    empty: bool


class Report(NamedTuple):
    """What a schema command did: whether it adopted a published file, and where the schema stands now."""

    adopted: bool
    current: str | None
    head: str

    def to_dict(self) -> dict[str, object]:
        """Plain values, ready for JSON."""
        return self._asdict()


def state(connection: Connection) -> State:
    """What the database holds, by its table names and version row.

    Raises:
        StateConflict: tables of ours without exactly one version row.
    """
    names = catalog.table_names(connection)
    if VERSION_TABLE in names:
        rows = connection.scalars(sa.select(version_table.c.version_num)).all()
        if len(rows) == 1:
            return State(str(rows[0]), published=False, empty=False)
        if rows:
            raise StateConflict("the ledger's version table has more than one row")
    if names & {"tsg_tasks", "tsg_task_events"}:
        raise StateConflict("the ledger's tables have no version row; run doctor, restore it from a backup")
    if published.is_present(connection):
        found = published.version(connection)
        return State(None if found is None else REVISIONS[found - 1], published=True, empty=False)
    others = {name for name in names if name != VERSION_TABLE and not name.startswith("sqlite_")}
    return State(None, published=False, empty=not others)


def current(connection: Connection) -> Report:
    """Where the schema stands.

    Raises:
        StateConflict: its version can't be told.
    """
    return Report(adopted=False, current=state(connection).revision, head=HEAD)


def check(connection: Connection) -> tuple[Report, bool]:
    """Where the schema stands, and whether it is exactly that of head."""
    try:
        report = current(connection)
    except StateConflict:
        report = Report(adopted=False, current=None, head=HEAD)
    return report, fault(connection) is None


def fault(connection: Connection) -> LedgerError | None:
    """What keeps a ledger from being used as it stands; ``None`` where it is exactly at head."""
    try:
        found = state(connection)
    except StateConflict as error:
        return error
    if found.published:
        return SchemaOutdated("this is a file of the published package: tsg upgrade adopts it, for good")
    if found.revision is None:
        return SchemaOutdated("there is no ledger in this database yet: run tsg upgrade")
    if found.revision != HEAD:
        if found.revision in REVISIONS:
            return SchemaOutdated("the ledger has an older schema: run tsg upgrade")
        return SchemaTooNew("the ledger was written by a later release: upgrade this package")
    return None if is_exact(connection) else StateConflict("the ledger's schema was altered; run tsg check")


def may_migrate(connection: Connection, *, adopt: bool) -> bool:
    """Whether there is a way to head: from nothing, from an older revision, or by adoption where allowed."""
    try:
        found = state(connection)
    except StateConflict:
        return False
    if found.published:
        return adopt
    return found.empty or (found.revision in REVISIONS and found.revision != HEAD)


def is_exact(connection: Connection) -> bool:
    """Whether the tables, columns, constraints, indexes and triggers of ours are those of head, and no more."""
    return catalog.digest(catalog.statements(connection)) == _HEAD_SHA256.get(connection.dialect.name)


def require_known(connection: Connection) -> State:
    """What the database holds, where this package knows it.

    Raises:
        SchemaTooNew: a revision of a later release.
        StateConflict: tables of ours without a version.
    """
    found = state(connection)
    if found.revision is not None and found.revision not in REVISIONS:
        raise SchemaTooNew("the ledger was written by a later release: upgrade this package")
    return found


def upgrade(target: Engine | Connection, revision: str = HEAD) -> Report:
    """Bring the ledger's tables in a database to `revision`, adopting a published file.

    On a connection it runs inside the caller's transaction and never commits; on an engine in one of its own.

    Raises:
        InvalidInput: no such revision.
        SchemaTooNew: the database is newer than this package.
        StateConflict: what is stored can't be held by the newer schema; nothing is changed.
    """
    with refusing():
        return _migrate(target, "upgrade", revision)


def downgrade(target: Engine | Connection, revision: str) -> Report:
    """Take the ledger's tables back to `revision` (``base``: none), as :func:`upgrade` brings them on.

    Raises:
        InvalidInput: no such revision.
        StateConflict: the older schema can't hold what is stored; nothing is changed.
    """
    with refusing():
        return _migrate(target, "downgrade", revision)


def bring_to_head(engine: Engine, *, adopt: bool) -> None:
    """Make or upgrade the schema of a ledger's own file, whoever else is doing so at the same time.

    Raises:
        SchemaOutdated: a published file and no leave to `adopt` it, or a database of somebody else's tables.
        LedgerError: as :func:`upgrade`.
    """
    with migration(engine) as connection:
        # Others may have been here first: what holds is what is seen under the lock.
        refused = fault(connection)
        if refused is None:
            return
        if not may_migrate(connection, adopt=adopt):
            raise refused
        _migrate(connection, "upgrade", HEAD)


def verify(connection: Connection) -> None:
    """What must hold at the end of a migration: every reference finds its row, and head is exactly head.

    Raises:
        StateConflict: something of our name was there before and is not ours, or a row refers to none.
    """
    if state(connection).revision == HEAD and not is_exact(connection):
        raise StateConflict("something in the database has a name of the ledger's, but not its shape")
    if connection.dialect.name == "sqlite" and connection.exec_driver_sql(_BROKEN_REFERENCES).first() is not None:
        raise StateConflict("a stored row refers to one that is not there; nothing was changed")


def record(context: Any, revision: str | None) -> None:
    """Keep the ledger's version where the ledger looks for it, when its revisions run in a host's one history.

    Called at the end of each revision, with the one that is reached; Alembic itself keeps the host's own table.
    """
    if context.version_table == VERSION_TABLE:
        return
    if revision is None:
        version_table.drop(context.bind)
        return
    version_table.create(context.bind, checkfirst=True)
    context.bind.execute(sa.delete(version_table))
    context.bind.execute(sa.insert(version_table).values(version_num=revision))


def include_name(name: str | None, type_: str, parent_names: Any) -> bool:
    """For a host's ``env.py``: keeps its autogenerate away from the ledger's tables.

    Pass it as ``context.configure(..., include_name=tsg.include_name)``.
    """
    return not (type_ == "table" and (values.text(name) or "").startswith(PREFIX))


def include_own_name(name: str | None, type_: str, parent_names: Any) -> bool:
    """The opposite, for our own ``env.py``: whatever else lives in the database is not ours to compare."""
    if type_ != "table":
        return True
    return name is not None and name.startswith(PREFIX) and not name.startswith((PLAN_PREFIX, VERSION_TABLE))


def _migrate(target: Engine | Connection, direction: str, revision: str) -> Report:
    def work(connection: Connection) -> Report:
        destination = revision_named(revision, downgrade=direction == "downgrade")
        with locked(connection):
            before = require_known(connection)
            if before.published and (direction, destination) != ("upgrade", HEAD):
                raise SchemaOutdated("a file of the published package is adopted as a whole: run tsg upgrade")
            move(connection, VERSIONS, direction, before.revision, destination)
            verify(connection)
            return Report(before.published, state(connection).revision, HEAD)

    return over(target, work)
