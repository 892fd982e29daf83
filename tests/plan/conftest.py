"""Plans on either database, with a clock that does as it is told."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.conftest import FakeClock, database
from tsg import Ledger, Plans, plan
from tsg.plan.tables import metadata


@pytest.fixture(scope="session")
def plans_template(postgresql_server: sa.URL) -> Iterator[str]:
    """The name of a database that is at head, plans included, to be copied."""
    name = f"tsg_template_{uuid.uuid4().hex}"
    with database(postgresql_server, name) as url:
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        plan.upgrade(engine)
        yield name


@pytest.fixture
def plans_url(postgresql_server: sa.URL, plans_template: str) -> Iterator[sa.URL]:
    """A database of the test's own, at head, plans included."""
    with database(postgresql_server, f"tsg_{uuid.uuid4().hex}", template=plans_template) as url:
        yield url


@pytest.fixture(scope="session")
def plans_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger's file with plans and nothing in them, to be copied."""
    folder = tmp_path_factory.mktemp("plans")
    folder.chmod(0o700)
    with Ledger(folder / "ledger.sqlite") as ledger:
        Plans(ledger)
    return folder / "ledger.sqlite"


@pytest.fixture(scope="module")
def plans_server(postgresql_server: sa.URL, plans_template: str) -> Iterator[sa.URL]:
    """One database for all tests of a module; :func:`place` empties it for each."""
    with database(postgresql_server, f"tsg_{uuid.uuid4().hex}", template=plans_template) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest) -> Path | sa.URL:
    """Where plans may be, on either database, at head and empty. The schema is for others too: leave it as it is."""
    if request.param == "sqlite":
        path: Path = request.getfixturevalue("path")
        shutil.copyfile(request.getfixturevalue("plans_file"), path)
        path.chmod(0o600)
        return path
    url: sa.URL = request.getfixturevalue("plans_server")
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        tables = ", ".join(("tsg_tasks", "tsg_task_events", *metadata.tables))
        connection.exec_driver_sql(f"TRUNCATE {tables} RESTART IDENTITY")
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def own_place(request: pytest.FixtureRequest) -> Path | sa.URL:
    """The same, where a test may do to the schema what it likes."""
    return request.getfixturevalue("path" if request.param == "sqlite" else "plans_url")


@pytest.fixture
def ledger(place: Path | sa.URL, clock: FakeClock) -> Iterator[Ledger]:
    with Ledger(place, clock=clock) as opened:
        yield opened


@pytest.fixture
def plans(ledger: Ledger) -> Plans:
    return Plans(ledger)


@pytest.fixture
def engine(place: Path | sa.URL) -> Iterator[sa.Engine]:
    """An application's own engine, on either database, at head, plans included."""
    url = place if isinstance(place, sa.URL) else sa.URL.create("sqlite", database=str(place))
    made = sa.create_engine(url)
    plan.upgrade(made)
    yield made
    made.dispose()
