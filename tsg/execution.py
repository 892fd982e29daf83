"""How a statement of one transition is carried out, in a transaction that is open already.

Over an application's connection it is SQLAlchemy that does it. On an engine of ours over SQLite the same statement,
compiled by SQLAlchemy once, goes to the driver by itself: what SQLAlchemy does around each execution takes five
times as long as SQLite.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Connection

__all__ = ["CoreExecution", "DriverExecution", "Execution"]

Parameters = Mapping[str, Any]


class Execution(Protocol):
    """What a transition asks of a transaction."""

    @property
    def dialect(self) -> str:
        """The kind of database."""

    def rows(self, statement: sa.Select[Any], parameters: Parameters) -> Sequence[Sequence[Any]]:
        """All rows of a query."""

    def change(self, statement: sa.Update | sa.Insert, parameters: Parameters) -> int:
        """How many rows a statement wrote."""

    def insert(self, statement: sa.Insert, parameters: Parameters) -> int:
        """The key that the row got."""


class CoreExecution:
    """By SQLAlchemy, on a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.dialect = connection.dialect.name

    def rows(self, statement: sa.Select[Any], parameters: Parameters) -> Sequence[Sequence[Any]]:
        """As :meth:`Execution.rows`."""
        return self._connection.execute(statement, dict(parameters)).all()

    def change(self, statement: sa.Update | sa.Insert, parameters: Parameters) -> int:
        """As :meth:`Execution.change`."""
        return self._connection.execute(statement, dict(parameters)).rowcount

    def insert(self, statement: sa.Insert, parameters: Parameters) -> int:
        """As :meth:`Execution.insert`."""
        keys = self._connection.execute(statement, dict(parameters)).inserted_primary_key
        assert keys is not None
        key: int = keys[0]
        return key


class DriverExecution:
    """By ``sqlite3``."""

    dialect: Final = "sqlite"

    def __init__(self, driver: sqlite3.Connection) -> None:
        self._driver = driver

    def rows(self, statement: sa.Select[Any], parameters: Parameters) -> Sequence[Sequence[Any]]:
        """As :meth:`Execution.rows`."""
        ready = _prepared(statement)
        found = self._driver.execute(ready.text, ready.bound(parameters)).fetchall()
        return [ready.read(row) for row in found] if ready.readers else found

    def change(self, statement: sa.Update | sa.Insert, parameters: Parameters) -> int:
        """As :meth:`Execution.change`."""
        ready = _prepared(statement)
        return self._driver.execute(ready.text, ready.bound(parameters)).rowcount

    def insert(self, statement: sa.Insert, parameters: Parameters) -> int:
        """As :meth:`Execution.insert`."""
        ready = _prepared(statement)
        key = self._driver.execute(ready.text, ready.bound(parameters)).lastrowid
        assert key is not None
        return key


_Processor = Callable[[Any], Any]


class _Prepared(NamedTuple):
    """A statement's text; its parameters in order, each with what it is by default and what makes it the driver's;
    and what makes a column's value Python's."""

    text: str
    binders: tuple[tuple[str, bool, Any, _Processor | None], ...]
    readers: tuple[tuple[int, _Processor], ...]

    def bound(self, parameters: Parameters) -> list[Any]:
        """The driver's parameters, in order."""
        values = [parameters[name] if required else default for name, required, default, _ in self.binders]
        return [
            value if binder is None else binder(value) for value, (*_, binder) in zip(values, self.binders, strict=True)
        ]

    def read(self, row: Sequence[Any]) -> list[Any]:
        """A row as Python has it."""
        values = list(row)
        for place, reader in self.readers:
            values[place] = reader(values[place])
        return values


_DIALECT: Final = sqlite.dialect()


@lru_cache(maxsize=64)
def _prepared(statement: sa.Select[Any] | sa.Update | sa.Insert) -> _Prepared:
    compiled = statement.compile(dialect=_DIALECT)
    binders = []
    for name in compiled.positiontup or ():
        bind = compiled.binds[name]
        binders.append((bind.key, bind.required, bind.value, bind.type.dialect_impl(_DIALECT).bind_processor(_DIALECT)))
    columns = statement.selected_columns if isinstance(statement, sa.Select) else ()
    readers = (
        (place, column.type.dialect_impl(_DIALECT).result_processor(_DIALECT, None))
        for place, column in enumerate(columns)
    )
    found = ((place, reader) for place, reader in readers if reader is not None)
    return _Prepared(compiled.string, tuple(binders), tuple(found))
