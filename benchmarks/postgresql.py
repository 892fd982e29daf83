"""On PostgreSQL: a server for the run, samples as databases of their own, and this package beside plain SQL.

``TSG_BENCH_POSTGRESQL`` names a server that is running already (a URL of a superuser); otherwise one is started in
a temporary folder, as the tests do it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import psycopg
import pytest
import sqlalchemy as sa

import tsg
from benchmarks import raw
from benchmarks.measure import GRACES, healthy, say, seconds
from benchmarks.results import OURS, RAW, Row
from benchmarks.sample import NOW, Layout, build_on_postgresql
from tests.postgresql import Server

URL_VARIABLE = "TSG_BENCH_POSTGRESQL"


class Place:
    """A server, and the databases that this process has made there."""

    def __init__(self, url: sa.URL) -> None:
        self._url = url
        self._numbers = itertools.count()
        self._made: set[str] = set()

    def build(self, layout: Layout, count: int) -> str:
        """A database with a sample; its name."""
        name = self._create("template1")
        engine = sa.create_engine(self._url.set(database=name), poolclass=sa.NullPool)
        tsg.upgrade(engine)
        with connect(self._url.set(database=name)) as connection:
            build_on_postgresql(connection, layout, count)
        return name

    @contextmanager
    def copy_of(self, name: str) -> Iterator[sa.URL]:
        """A fresh copy of a database that nobody is in, gone afterwards."""
        copy = self._create(f"{name} STRATEGY FILE_COPY" if self.version >= 15 else name)
        try:
            yield self._url.set(database=copy)
        finally:
            self.drop(copy)

    def drop(self, name: str) -> None:
        """Drop one of them."""
        self.command(f"DROP DATABASE {name} WITH (FORCE)")
        self._made.remove(name)

    def clear(self) -> None:
        """Drop what an error has left."""
        for name in list(self._made):
            self.drop(name)

    def command(self, statement: str) -> None:
        """Have the server do something outside of any transaction."""
        with connect(self._url) as connection:
            connection.execute(statement.encode())

    @property
    def version(self) -> int:
        """The server's main version."""
        with connect(self._url) as connection:
            return connection.info.server_version // 10_000

    def _create(self, template: str) -> str:
        name = f"tsg_bench_{os.getpid()}_{next(self._numbers)}"
        self.command(f"CREATE DATABASE {name} TEMPLATE {template}")
        self._made.add(name)
        return name


@contextmanager
def place() -> Iterator[Place | None]:
    """The server that is named, or one of the run's own; none where there can't be one."""
    named = os.environ.get(URL_VARIABLE)
    if named is not None:
        found = Place(sa.make_url(named))
        try:
            yield found
        finally:
            found.clear()
        return
    try:
        server = Server()
        server.start()
    except (pytest.UsageError, RuntimeError) as error:
        say(f"without PostgreSQL: {error}")
        yield None
        return
    try:
        yield Place(sa.make_url(server.url))
    finally:
        server.remove()


def connect(url: sa.URL) -> psycopg.Connection:
    """A connection of the driver's own, in AUTOCOMMIT."""
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    return psycopg.connect(plain, autocommit=True)


def sweeps(server: Place, count: int, rounds: int) -> list[Row]:
    """Doctor and apply, each round on a fresh copy a side."""
    doctor, apply = Row("postgresql", "doctor, PostgreSQL"), Row("postgresql", "reconcile, apply, PostgreSQL")
    say(f"a sample of {count:,} tasks on PostgreSQL")
    name = server.build(Layout.MIXED, count)
    for number in range(rounds):
        for side in (OURS, RAW):
            say(f"PostgreSQL: round {number + 1}, {side}")
            with server.copy_of(name) as url, closing(_opened(side, url)) as opened:
                examine, close = _work(opened)
                for row, work in ((doctor, examine), (apply, close)):
                    server.command("CHECKPOINT")
                    row.add(side, seconds(work))
    server.drop(name)
    return [doctor, apply]


def _opened(side: str, url: sa.URL) -> tsg.Ledger | psycopg.Connection:
    if side == OURS:
        return tsg.Ledger(url, clock=lambda: NOW)
    connection = connect(url)
    # Its scan is one of many expressions: to compile them takes longer than to work them out.
    connection.execute("SET jit = off")
    return connection


def _work(opened: tsg.Ledger | psycopg.Connection) -> tuple[Callable[[], object], Callable[[], object]]:
    if isinstance(opened, tsg.Ledger):
        return lambda: healthy(opened.doctor()), partial(opened.reconcile, **GRACES)
    return lambda: healthy(raw.doctor_on_postgresql(opened)), partial(raw.apply_on_postgresql, opened)
