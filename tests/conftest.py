"""What the tests stand on: real files in a private folder, a clock that does as it is told, real commands."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests import debian, postgresql, tallies
from tsg import Ledger, upgrade

DATA = Path(__file__).parent / "data"
LEGACY = DATA / "legacy"


class FakeClock:
    """Seconds since the epoch, which pass only when a test says so. Counts how often it was read."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now: Any = now
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def pytest_configure(config: pytest.Config) -> None:
    debian.install_missing_for(config)
    postgresql.start_for(config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = list(tallies.table(report for reports in terminalreporter.stats.values() for report in reports))
    if lines:
        terminalreporter.section("faults tried")
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def postgresql_server() -> sa.URL:
    """A superuser's URL of a real server."""
    url = os.environ.get(postgresql.URL_VARIABLE)
    if url is None:
        pytest.skip(f"{postgresql.SKIP_VARIABLE} is set")
    return sa.make_url(url)


@pytest.fixture(scope="session")
def postgresql_template(postgresql_server: sa.URL) -> Iterator[str]:
    """The name of a database that is at head, to be copied."""
    name = f"tsg_template_{uuid.uuid4().hex}"
    with database(postgresql_server, name) as url:
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        upgrade(engine)
        yield name


@pytest.fixture
def postgresql_url(postgresql_server: sa.URL, postgresql_template: str) -> Iterator[sa.URL]:
    """A database of the test's own, at head."""
    with database(postgresql_server, f"tsg_{uuid.uuid4().hex}", template=postgresql_template) as url:
        yield url


@pytest.fixture
def empty_postgresql_url(postgresql_server: sa.URL) -> Iterator[sa.URL]:
    """A database of the test's own, with nothing in it."""
    with database(postgresql_server, f"tsg_{uuid.uuid4().hex}") as url:
        yield url


@contextmanager
def database(server: sa.URL, name: str, template: str = "template1") -> Iterator[sa.URL]:
    """A database on a PostgreSQL server, made and dropped."""
    admin = sa.create_engine(server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield server.set(database=name)
    finally:
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest) -> Path | sa.URL:
    """Where a ledger may be, on either database: a path that is free, or the URL of a database at head."""
    if request.param == "sqlite":
        return request.getfixturevalue("path")
    return request.getfixturevalue("postgresql_url")


@pytest.fixture(scope="module")
def file_at_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger's file with nothing in it, to be copied."""
    folder = tmp_path_factory.mktemp("at_head")
    folder.chmod(0o700)
    Ledger(folder / "ledger.sqlite").close()
    return folder / "ledger.sqlite"


@pytest.fixture(scope="module")
def server_at_head(postgresql_server: sa.URL, postgresql_template: str) -> Iterator[sa.URL]:
    """One database for all tests of a module; :func:`emptied` empties it for each."""
    with database(postgresql_server, f"tsg_{uuid.uuid4().hex}", template=postgresql_template) as url:
        yield url


def emptied(request: pytest.FixtureRequest, name: str) -> Path | sa.URL:
    """An empty ledger on the kind of database that `name` begins with; other than for `target`, none is made anew."""
    if name.startswith("sqlite"):
        path: Path = request.getfixturevalue("path")
        shutil.copyfile(request.getfixturevalue("file_at_head"), path)
        path.chmod(0o600)
        return path
    url: sa.URL = request.getfixturevalue("server_at_head")
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("TRUNCATE tsg_tasks, tsg_task_events RESTART IDENTITY")
    return url


@pytest.fixture
def host_engine(target: Path | sa.URL) -> Iterator[sa.Engine]:
    """An application's own engine, on either database, at head."""
    url = target if isinstance(target, sa.URL) else sa.URL.create("sqlite", database=str(target))
    engine = sa.create_engine(url)
    upgrade(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that a ledger may live in."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    return private


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "ledger.sqlite"


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> tallies.Tally:
    return tallies.teller(request)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ledger(path: Path, clock: FakeClock) -> Iterator[Ledger]:
    with Ledger(path, clock=clock) as opened:
        yield opened


@pytest.fixture
def legacy(folder: Path) -> Callable[[str], Path]:
    """A private copy of one of the published package's files: v1, v2, v1-unsafe-reason."""

    def copy(name: str) -> Path:
        target = folder / f"{name}.sqlite"
        shutil.copyfile(LEGACY / f"{name}.sqlite", target)
        target.chmod(0o600)
        return target

    return copy


def expected(name: str) -> Any:
    """What the published package reported on those files."""
    return json.loads((LEGACY / f"{name}.json").read_text())


def raw(path: Path) -> sqlite3.Connection:
    """A connection of somebody else's, without our listeners; every statement commits by itself."""
    return sqlite3.connect(path, isolation_level=None)


def tsg(*arguments: str | bytes | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """The real command line, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tsg", *arguments],
        capture_output=True,
        check=False,
        env={**os.environ, **(env or {})},
        timeout=120,
    )


def snapshot(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Every file of a folder by name: its bytes, mode and modification time."""
    return {
        entry.name: (entry.read_bytes(), entry.stat().st_mode, entry.stat().st_mtime_ns)
        for entry in sorted(folder.iterdir())
    }
