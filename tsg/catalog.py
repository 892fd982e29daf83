"""What a database itself says of our part of its schema.

Each database tells it in its own words; what is compared is always a digest of those words, so that nothing
that differs goes unseen: a column, a constraint, an index, a trigger, a function of ours, or one too many.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tsg.tables import PLAN_PREFIX, PLAN_VERSION_TABLE, PREFIX, VERSION_TABLE, task_events, tasks

__all__ = ["LEDGER", "Part", "digest", "has_plans", "like", "namespace", "quoted", "statements", "table_names"]


class Part(NamedTuple):
    """What of the schema is asked about: names like one pattern and unlike another, and the tables among them."""

    like: str
    unlike: str
    tables: tuple[str, ...]


def like(prefix: str) -> str:
    """The pattern of all names that begin so."""
    return prefix.replace("_", "\\_") + "%"


#: What is built on the ledger has a part of its own, which is not the ledger's to know.
LEDGER: Final = Part(like(PREFIX), like(PLAN_PREFIX), (VERSION_TABLE, tasks.name, task_events.name))

#: Where our tables are, or would be made, on PostgreSQL.
_NAMESPACE: Final = sa.text(
    "SELECT coalesce("
    "(SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.oid = coalesce(to_regclass(:version), to_regclass(:tasks))), current_schema())"
)
_POSTGRESQL_TABLES: Final = sa.text(
    "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE n.nspname = :schema AND c.relkind IN ('r', 'p', 'v', 'm', 'f')"
)
# As the server puts the definitions back into words: with the schema of every name, since no path leads anywhere.
_POSTGRESQL: Final = sa.text(
    r"""
    WITH place AS MATERIALIZED (SELECT set_config('search_path', 'pg_catalog', true)), ours AS MATERIALIZED (
        SELECT c.oid, c.relname, c.relkind, c.relpersistence, c.relrowsecurity, c.relforcerowsecurity FROM place
        CROSS JOIN pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = :schema AND c.relname LIKE :like AND c.relname NOT LIKE :unlike
            AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
    )
    SELECT concat_ws(' ', 'table', relname, relkind, relpersistence, relrowsecurity, relforcerowsecurity) FROM ours
    UNION ALL
    SELECT concat_ws(' ', 'column', relname, attname, format_type(atttypid, atttypmod), attnotnull, attidentity,
        attgenerated, pg_get_expr(adbin, adrelid),
        CASE WHEN attcollation <> typcollation THEN attcollation::regcollation END)
    FROM ours JOIN pg_attribute a ON a.attrelid = ours.oid JOIN pg_type t ON t.oid = a.atttypid
    LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE attnum > 0 AND NOT attisdropped
    UNION ALL
    SELECT concat_ws(' ', 'constraint', relname, conname, convalidated, pg_get_constraintdef(k.oid))
    FROM ours JOIN pg_constraint k ON k.conrelid = ours.oid WHERE contype IN ('c', 'f', 'p', 'u', 'x')
    UNION ALL
    SELECT concat_ws(' ', 'index', ours.relname, i.relname, indisvalid, pg_get_indexdef(indexrelid))
    FROM ours JOIN pg_index x ON x.indrelid = ours.oid JOIN pg_class i ON i.oid = x.indexrelid
    UNION ALL
    SELECT concat_ws(' ', 'trigger', relname, tgname, tgenabled, pg_get_triggerdef(t.oid))
    FROM ours JOIN pg_trigger t ON t.tgrelid = ours.oid WHERE NOT tgisinternal
    UNION ALL
    SELECT concat_ws(' ', 'enforced', relname, conname, tgenabled, tgfoid::regproc)
    FROM ours JOIN pg_constraint k ON k.conrelid = ours.oid JOIN pg_trigger t ON t.tgconstraint = k.oid
    WHERE contype = 'f' AND tgisinternal
    UNION ALL
    SELECT concat_ws(' ', 'inherits', inhparent::regclass, inhrelid::regclass)
    FROM ours JOIN pg_inherits i ON ours.oid IN (i.inhparent, i.inhrelid)
    UNION ALL
    SELECT concat_ws(' ', 'rule', relname, rulename) FROM ours JOIN pg_rewrite r ON r.ev_class = ours.oid
    UNION ALL
    SELECT concat_ws(' ', 'sequence', c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = :schema AND c.relkind = 'S' AND c.relname LIKE :like AND c.relname NOT LIKE :unlike
        AND NOT EXISTS (SELECT 1 FROM pg_depend d WHERE d.objid = c.oid AND d.deptype IN ('a', 'i'))
    UNION ALL
    SELECT concat_ws(' ', 'function', proname, prosecdef, proconfig::text, provolatile, prosrc)
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
    WHERE n.nspname = :schema AND proname LIKE :like AND proname NOT LIKE :unlike
    """
)


_SQLITE: Final = sa.text(
    "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL "
    "AND ((tbl_name LIKE :like ESCAPE '\\' AND tbl_name NOT LIKE :unlike ESCAPE '\\') "
    "OR (name LIKE :like ESCAPE '\\' AND name NOT LIKE :unlike ESCAPE '\\'))"
)
# The path; whether a name of ours without a schema leads elsewhere than to ours; whether triggers are let be.
_CIRCUMSTANCES: Final = sa.text(
    "SELECT current_setting('search_path'), bool_or(to_regclass(name) IS DISTINCT FROM "
    "to_regclass(CAST(:schema AS text) || '.' || name)), current_setting('session_replication_role') = 'replica' "
    "FROM unnest(CAST(:names AS text[])) AS name"
)


def namespace(connection: Connection) -> str:
    """The schema on PostgreSQL that our tables are in, or would be made in."""
    translated = _translated(connection)
    if translated is not None:
        return translated
    names = {"version": VERSION_TABLE, "tasks": tasks.name}
    return str(connection.execute(_NAMESPACE, names).scalar_one())


def quoted(name: str) -> str:
    """A name as PostgreSQL reads it back, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def table_names(connection: Connection) -> set[str]:
    """The tables of the schema that ours are in."""
    if connection.dialect.name == "sqlite":
        return set(
            connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").scalars()
        )
    return set(connection.execute(_POSTGRESQL_TABLES, {"schema": namespace(connection)}).scalars())


def has_plans(connection: Connection) -> bool:
    """Whether there is any table of the plan layer; that of its version alone stays behind when all are gone."""
    names = table_names(connection) - {PLAN_VERSION_TABLE}
    return any(name.startswith(PLAN_PREFIX) for name in names)


def statements(connection: Connection, part: Part = LEDGER) -> Iterator[str]:
    """What makes up a part of the schema, a line a piece, in no order."""
    asked = {"like": part.like, "unlike": part.unlike}
    if connection.dialect.name == "sqlite":
        rows = connection.execute(_SQLITE, asked)
        yield from (" ".join(row) for row in rows)
    else:
        schema = namespace(connection)
        path, hidden, unguarded = connection.execute(
            _CIRCUMSTANCES, {"schema": quoted(schema), "names": list(part.tables)}
        ).one()
        if hidden and _translated(connection) is None:
            yield "something else of our names is found before what is ours"
        if unguarded:
            yield "no trigger is asked on this connection"
        names = "|".join(re.escape(name) for name in (schema, quoted(schema)))
        own = re.compile(rf"(?<![\w\"])(?:{names})\.(?=\"?tsg_)")
        lines = connection.execute(_POSTGRESQL, {"schema": schema, **asked}).scalars().all()
        connection.execute(sa.select(sa.func.set_config("search_path", path, sa.true())))
        yield from (own.sub("", line) for line in lines)


def digest(lines: Iterable[str]) -> str:
    """Of a set of statements, whatever their order and white space."""
    folded = sorted(" ".join(line.split()) for line in lines)
    return hashlib.sha256("\n".join(folded).encode("utf-8", "surrogatepass")).hexdigest()


def _translated(connection: Connection) -> str | None:
    translation = connection.get_execution_options().get("schema_translate_map") or {}
    schema = translation.get(None)
    return None if schema is None else str(schema)
