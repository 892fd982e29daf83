"""Plans inside the application's own transaction, and for asyncio."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tests.conftest import FakeClock
from tsg import AsyncLedger, AsyncPlans, DependencyCycle, InvalidInput, Ledger, PlanNotFound, Plans, StateConflict
from tsg.plan.models import Attempt, Learning, Plan, Step


class Base(DeclarativeBase):
    pass


class Feature(Base):
    """A row of the application's own."""

    __tablename__ = "features"
    name: Mapped[str] = mapped_column(primary_key=True)


@pytest.fixture
def host(engine: sa.Engine) -> Iterator[sa.Engine]:
    Base.metadata.create_all(engine)
    yield engine
    Base.metadata.drop_all(engine)


def features(host: sa.Engine) -> list[str]:
    with host.connect() as connection:
        return list(connection.execute(sa.select(Feature.name)).scalars())


def session(host: sa.Engine, clock: FakeClock) -> Session:
    return Session(host, info={"tsg_clock": clock})


def test_a_business_row_and_a_plan_are_kept_together_or_not_at_all(host: sa.Engine, clock: FakeClock) -> None:
    plans = Plans(Ledger(host, clock=clock))
    for keep in (False, True):
        with session(host, clock) as own:
            own.add(Feature(name="reviews"))
            within = Plans.within(own)
            within.create("reviews")
            within.add_step("reviews", subject="Create reviews schema")
            assert within.claim("reviews", "Demeter") is not None
            if keep:
                own.commit()
        if not keep:
            assert features(host) == []
            assert plans.plans() == []
            assert plans.doctor()["task_count"] == 0
    assert features(host) == ["reviews"]
    assert plans.get("reviews", "T-001")["session_id"] == "Demeter-1"
    assert plans.doctor()["healthy"]


def test_what_is_refused_is_undone_by_itself_and_the_rest_can_be_kept(host: sa.Engine, clock: FakeClock) -> None:
    with session(host, clock) as own:
        plans = Plans.within(own)
        plans.create("reviews")
        plans.add_step("reviews", subject="a")
        plans.add_step("reviews", subject="b", blocked_by=["T-001"])
        with pytest.raises(DependencyCycle):
            plans.update("reviews", "T-001", subject="changed", blocked_by=["T-002"])
        own.add(Feature(name="reviews"))
        own.commit()
    assert features(host) == ["reviews"]
    plans = Plans(Ledger(host, clock=clock))
    first = plans.get("reviews", "T-001")
    assert (first["subject"], first["blockedBy"]) == ("a", [])
    assert plans.doctor()["healthy"]


def test_a_connection_serves_too_and_its_transaction_is_the_caller_s(host: sa.Engine, clock: FakeClock) -> None:
    with host.connect() as connection:
        with connection.begin():
            Plans.within(connection, clock=clock).create("kept")
        with connection.begin() as transaction:
            Plans.within(connection, clock=clock).create("given up")
            transaction.rollback()
    assert [plan["name"] for plan in Plans(Ledger(host)).plans()] == ["kept"]


def test_the_clock_is_the_session_s(host: sa.Engine, clock: FakeClock) -> None:
    clock.now = 5_000.0
    with session(host, clock) as own:
        assert Plans.within(own).create("reviews")["created_at"] == 5_000.0
        own.rollback()


def test_in_autocommit_nothing_is_done(host: sa.Engine) -> None:
    with host.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with pytest.raises(StateConflict, match="AUTOCOMMIT"):
            Plans.within(connection).create("reviews")
    assert Plans(Ledger(host)).plans() == []


def test_a_block_of_work_needs_transactions_of_its_own(host: sa.Engine, clock: FakeClock) -> None:
    with session(host, clock) as own:
        plans = Plans.within(own)
        plans.create("reviews")
        plans.add_step("reviews", subject="a")
        with pytest.raises(StateConflict, match="transactions of their own"):
            plans.work("reviews", "T-001")


@pytest.mark.parametrize("wrong", [None, "a path", 3, object()])
def test_what_is_no_session_no_connection_and_no_ledger_is_refused(wrong: Any) -> None:
    for make in (Plans, Plans.within, AsyncPlans):
        with pytest.raises(InvalidInput):
            make(wrong)


def test_the_models_show_plans_and_refuse_to_be_written(host: sa.Engine, clock: FakeClock) -> None:
    plans = Plans(Ledger(host, clock=clock))
    plans.create("reviews")
    plans.add_step("reviews", subject="a", metadata={"size": 3})
    plans.add_step("reviews", subject="b", blocked_by=["T-001"])
    plans.start("reviews", "T-001", agent="Demeter")
    plans.complete("reviews", "T-001", learnings=["ids are UUIDs"])
    with session(host, clock) as own:
        plan = own.scalars(sa.select(Plan)).one()
        first, second = plan.steps
        assert plan.root is not None
        assert plan.root.status == "queued"
        assert first.details == {"size": 3}
        assert (second.blocked_by, first.blocks) == ([first], [second])
        (attempt,) = first.tries
        assert attempt.task is not None
        assert (attempt.task.status, attempt.step, attempt.ended_as) == ("succeeded", first, "succeeded")
        assert [learning.text for learning in first.learnings] == ["ids are UUIDs"]
        assert isinstance(first.learnings[0], Learning)
        for change in (
            lambda: setattr(second, "status", "completed"),
            lambda: own.add(Step(key="T-009", subject="c")),
            lambda: own.delete(attempt),
        ):
            change()
            with pytest.raises(StateConflict, match=r"Plans\.within"):
                own.flush()
            own.rollback()
        assert own.scalar(sa.select(sa.func.count()).select_from(Attempt)) == 1


def test_the_methods_for_asyncio_are_those_of_plans() -> None:
    def public(kind: type) -> dict[str, inspect.Signature]:
        return {
            name: inspect.signature(member)
            for name, member in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    def parameters(signature: inspect.Signature) -> list[tuple[str, object, object]]:
        return [(name, given.kind, given.default) for name, given in signature.parameters.items()]

    theirs, ours = public(Plans), public(AsyncPlans)
    # A block of work has a thread of its own, and `within` no engine.
    assert set(theirs) - set(ours) == {"work"}
    assert {name: parameters(found) for name, found in ours.items()} == {
        name: parameters(theirs[name]) for name in ours
    }
    assert all(inspect.getdoc(getattr(AsyncPlans, name)) for name in ours)


def test_plans_for_asyncio_do_the_same(place: Path | sa.URL, clock: FakeClock) -> None:
    url = place.set(drivername="postgresql+psycopg") if isinstance(place, sa.URL) else f"sqlite+aiosqlite:///{place}"

    async def use() -> list[str]:
        engine = create_async_engine(url)
        try:
            plans = AsyncPlans(AsyncLedger(engine, clock=clock))
            await plans.create("reviews")
            for number in range(8):
                await plans.add_step("reviews", subject=f"step {number}")
            claimed = await asyncio.gather(*(plans.claim("reviews", f"agent {number}") for number in range(8)))
            for step in claimed:
                assert step is not None
                await plans.heartbeat(step["attempt"], output="half of it")
                await plans.complete("reviews", step["id"], attempt=step["attempt"])
            assert await plans.claim("reviews", "late") is None
            with pytest.raises(PlanNotFound):
                await plans.show("another")
            await plans.create("second")
            await plans.add_step("second", subject="a")
            assert (await plans.update("second", "T-001", subject="b"))["subject"] == "b"
            assert (await plans.doctor())["healthy"]
            return sorted(step["id"] for step in claimed if step is not None)
        finally:
            await engine.dispose()

    assert asyncio.run(use()) == [f"T-00{number}" for number in range(1, 9)]
