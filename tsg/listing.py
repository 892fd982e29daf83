"""The list of what a run in batches has still to do: a table of its connection's own, gone with the connection.

Rows are named by it in the database; no key is carried into Python and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.schema import CreateTable, DropTable

__all__ = [
    "Progress",
    "Transactions",
    "drop",
    "in_range",
    "listed_in",
    "make",
    "number_of_parts",
    "number_written",
    "parts",
]


#: Told how many of how many tasks are done.
Progress = Callable[[int, int], None]

_Answer = TypeVar("_Answer")


class Transactions(Protocol):
    """A transaction of its own for each piece of work, which may be done more than once."""

    def __call__(self, work: Callable[[], _Answer], /) -> _Answer:
        """Do it, and commit."""


@cache
def listed_in(dialect: str) -> sa.Table:
    """The list, with the keys of tasks numbered from 1, in the schema that such tables have in a kind of database."""
    return sa.Table(
        "tsg_listed",
        sa.MetaData(),
        sa.Column("n", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=False),
        sa.Column("pk", sa.BigInteger(), nullable=False),
        schema="temp" if dialect == "sqlite" else "pg_temp",
        prefixes=["TEMPORARY"],
    )


def in_range(listed: sa.Table) -> sa.ColumnElement[bool]:
    """The part of it that a batch is about: the numbers from the parameter ``first`` to ``last``."""
    return listed.c.n.between(sa.bindparam("first", type_=sa.BigInteger()), sa.bindparam("last", type_=sa.BigInteger()))


def make(connection: Connection, listing: sa.Insert, parameters: dict[str, Any]) -> int:
    """Make the list by `listing`; how long it is. An empty one is dropped at once."""
    # A run that failed may have left its own.
    drop(connection)
    listed = listed_in(connection.dialect.name)
    connection.execute(CreateTable(listed))
    connection.execute(listing, parameters)
    # Not by its count of rows: Python 3.11 has none for an INSERT that begins with a WITH.
    length: int = connection.execute(sa.select(sa.func.count()).select_from(listed)).scalar_one()
    if not length:
        drop(connection)
    return length


def parts(length: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of a list of that length, each of at most `size` numbers: the first and the last of them."""
    for first in range(1, length + 1, size):
        yield first, min(first + size - 1, length)


def number_of_parts(length: int, size: int) -> int:
    """How many ranges :func:`parts` gives."""
    return -(-length // size)


def drop(connection: Connection) -> None:
    """Drop the list, if there is one."""
    connection.execute(DropTable(listed_in(connection.dialect.name), if_exists=True))


def number_written(
    connection: Connection, statement: sa.Insert | sa.Update | sa.Delete, parameters: dict[str, Any]
) -> int:
    """Carry out `statement`; how many rows it wrote."""
    # Unasked, not every driver tells how many rows an INSERT … SELECT made.
    done = connection.execute(statement, parameters, execution_options={"preserve_rowcount": True})
    return done.rowcount
