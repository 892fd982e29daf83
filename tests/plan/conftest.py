"""Plans on either database, with a clock that does as it is told."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.conftest import FakeClock, database
from tsg import Ledger, Plans, plan


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


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest) -> Path | sa.URL:
    """Where plans may be, on either database."""
    if request.param == "sqlite":
        return request.getfixturevalue("path")
    return request.getfixturevalue("plans_url")


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
