"""The plan layer's schema: a history of its own beside the ledger's, on which it stands.

As in :mod:`tsg.schema`, looking needs no Alembic: names and digests are constants, held to the migrations and to the
tables by tests.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from tsg import catalog, schema
from tsg.engine import refusing
from tsg.errors import LedgerError, SchemaOutdated, SchemaTooNew, StateConflict
from tsg.migrating import Versions, locked, move, over
from tsg.plan.tables import metadata, version_table
from tsg.schema import Report
from tsg.tables import PLAN_PREFIX, PLAN_VERSION_TABLE

__all__ = [
    "HEAD",
    "REVISIONS",
    "VERSIONS",
    "check",
    "current",
    "downgrade",
    "fault",
    "include_own_name",
    "is_exact",
    "revision_named",
    "upgrade",
    "verify",
]

REVISIONS: Final = ("0001", "0002")
HEAD: Final = REVISIONS[-1]

#: Where the revisions are, and which table says how far they have come.
VERSIONS: Final = Versions("plan", PLAN_VERSION_TABLE, REVISIONS)
revision_named: Final = VERSIONS.named

_PART: Final = catalog.Part(catalog.like(PLAN_PREFIX), "", (PLAN_VERSION_TABLE, *metadata.tables))
#: Of what makes up the schema at head, as each database words it: see :mod:`tsg.catalog`.
_HEAD_SHA256: Final = {
    "sqlite": "b5c271a9eff6932e428337af4421a62eae761596a41bd795bc31640f82c4ba18",
    "postgresql": "b8014898868db24829ecf9867272908fd7b3aec2236d5c8decc1ec74be224f74",
}


def current(connection: Connection) -> Report:
    """Where the plan layer's schema stands; none is ``None``.

    Raises:
        StateConflict: its version can't be told.
    """
    return Report(adopted=False, current=_revision(connection), head=HEAD)


def check(connection: Connection) -> tuple[Report, bool]:
    """Where the plan layer's schema stands, and whether it is exactly that of head, on a ledger that is."""
    try:
        report = current(connection)
    except StateConflict:
        report = Report(adopted=False, current=None, head=HEAD)
    return report, fault(connection) is None and schema.fault(connection) is None


def fault(connection: Connection) -> LedgerError | None:
    """What keeps plans from being used as they stand; ``None`` where the plan layer's schema is exactly at head."""
    try:
        revision = _revision(connection)
    except StateConflict as error:
        return error
    if revision is None:
        return SchemaOutdated("there are no plans in this database yet: run tsg upgrade --plan")
    if revision not in REVISIONS:
        return SchemaTooNew("the plans were written by a later release: upgrade this package")
    if revision != HEAD:
        return SchemaOutdated("the plans have an older schema: run tsg upgrade --plan")
    return None if is_exact(connection) else StateConflict("the plans' schema was altered; run tsg check --plan")


def is_exact(connection: Connection) -> bool:
    """Whether the plan layer's part of the schema is that of head, and no more."""
    return catalog.digest(catalog.statements(connection, _PART)) == _HEAD_SHA256.get(connection.dialect.name)


def upgrade(target: Engine | Connection, revision: str = HEAD) -> Report:
    """Bring the plan layer's tables in a database to `revision`, and the ledger's to head, on which they stand.

    On a connection it runs inside the caller's transaction and never commits; on an engine in one of its own.

    Raises:
        InvalidInput: no such revision.
        SchemaTooNew: the database is newer than this package.
        StateConflict: something in the database has a name of ours, but not its shape.
    """
    with refusing():
        return _migrate(target, "upgrade", revision)


def downgrade(target: Engine | Connection, revision: str) -> Report:
    """Take the plan layer's tables back to `revision` (``base``: none); the ledger's stay as they are.

    Raises:
        InvalidInput: no such revision.
        StateConflict: there are plans, which the older schema can't hold; nothing is changed.
    """
    with refusing():
        return _migrate(target, "downgrade", revision)


def include_own_name(name: str | None, type_: str, parent_names: Any) -> bool:
    """For our own ``env.py``: whatever else lives in the database is not the plan layer's to compare."""
    if type_ != "table":
        return True
    return name is not None and name.startswith(PLAN_PREFIX) and name != PLAN_VERSION_TABLE


def verify(connection: Connection) -> None:
    """What must hold at the end of a migration: head is exactly head.

    Raises:
        StateConflict: something of our name was there before and is not ours.
    """
    if _revision(connection) == HEAD and not is_exact(connection):
        raise StateConflict("something in the database has a name of the plan layer's, but not its shape")


def _revision(connection: Connection) -> str | None:
    names = catalog.table_names(connection)
    if PLAN_VERSION_TABLE in names:
        rows = connection.scalars(sa.select(version_table.c.version_num)).all()
        if len(rows) > 1:
            raise StateConflict("the plans' version table has more than one row")
        if rows:
            return str(rows[0])
    if names & set(metadata.tables):
        raise StateConflict("the plans' tables have no version row; restore it from a backup")
    return None


def _migrate(target: Engine | Connection, direction: str, revision: str) -> Report:
    def work(connection: Connection) -> Report:
        destination = revision_named(revision, downgrade=direction == "downgrade")
        with locked(connection):
            if direction == "upgrade":
                schema.upgrade(connection)
            before = _revision(connection)
            if before is not None and before not in REVISIONS:
                raise SchemaTooNew("the plans were written by a later release: upgrade this package")
            move(connection, VERSIONS, direction, before, destination)
            verify(connection)
            return Report(False, _revision(connection), HEAD)

    return over(target, work)
