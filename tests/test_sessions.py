"""A host's own models, sessions and transactions, with the ledger's rows in them: together, or not at all."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    joinedload,
    mapped_column,
    relationship,
    scoped_session,
    sessionmaker,
)
from sqlalchemy.orm.exc import DetachedInstanceError, StaleDataError

import tsg
from tests import postgresql
from tests.conftest import FakeClock, database
from tsg import InvalidInput, Ledger, ReconcilePolicy, StateConflict, Task, TaskEvent, TaskStatus

WAITING = ReconcilePolicy(30, 0)


class HostBase(DeclarativeBase):
    """A host's own base, with its own metadata."""


class Order(HostBase):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(unique=True)
    task_id: Mapped[str] = mapped_column(sa.ForeignKey(Task.id))
    task: Mapped[Task] = relationship(Task)


@pytest.fixture
def engine(host_engine: sa.Engine) -> sa.Engine:
    HostBase.metadata.create_all(host_engine)
    return host_engine


@pytest.fixture
def factory(engine: sa.Engine, clock: FakeClock) -> sessionmaker[Session]:
    return sessionmaker(engine, info={"tsg_clock": clock})


@pytest.fixture
def session(factory: sessionmaker[Session]) -> Iterator[Session]:
    with factory() as opened:
        yield opened


def ordered(session: Session, title: str = "tea", **fields: Any) -> Order:
    order = Order(title=title, task=Task(timeout_seconds=60, **fields))
    session.add(order)
    session.commit()
    return order


def counts(engine: sa.Engine) -> tuple[int, int, int]:
    """Orders, tasks and events that are committed."""
    with engine.connect() as connection:
        return tuple(  # type: ignore[return-value]
            connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in (Order.__table__, Task.__table__, TaskEvent.__table__)
        )


def chain(engine: sa.Engine, task: str) -> list[tuple[Any, ...]]:
    events, tasks = TaskEvent.__table__.c, Task.__table__.c
    query = sa.select(events.number, events.from_status, events.to_status, events.occurred_at, events.code)
    query = query.join_from(TaskEvent.__table__, Task.__table__).where(tasks.id == task).order_by(events.number)
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(query)]


def stored(engine: sa.Engine, task: str) -> dict[str, Any]:
    with engine.connect() as connection:
        row = connection.execute(sa.select(Task.__table__).where(Task.__table__.c.id == task)).one()
        return dict(row._mapping)


def healthy(engine: sa.Engine) -> bool:
    with engine.connect() as connection:
        return tsg.doctor.examine(connection)["healthy"]


# -- together, or not at all -----------------------------------------------------------------------------


def test_an_order_and_its_task_are_saved_in_one_transaction(engine: sa.Engine, session: Session) -> None:
    order = ordered(session)
    assert counts(engine) == (1, 1, 1)
    assert order.task_id == order.task.id == str(uuid.UUID(order.task_id))
    session.expunge_all()
    found = session.scalars(sa.select(Order).options(joinedload(Order.task))).one()
    assert (found.title, found.task.status, found.task.version) == ("tea", TaskStatus.QUEUED, 0)
    named = session.scalars(sa.select(Order).join(Order.task).where(Task.status == TaskStatus.QUEUED)).one()
    assert named is found
    assert healthy(engine)


def test_an_order_may_name_its_task_by_id(engine: sa.Engine, session: Session) -> None:
    task = Task()
    session.add_all([task, Order(title="tea", task_id=task.id)])
    session.flush()
    assert session.scalars(sa.select(Order)).one().task is task
    session.commit()
    assert counts(engine) == (1, 1, 1)


def test_what_is_rolled_back_leaves_neither_order_nor_task_nor_event(engine: sa.Engine, session: Session) -> None:
    order = Order(title="tea", task=Task())
    session.add(order)
    session.flush()
    order.task.start()
    session.flush()
    session.rollback()
    assert counts(engine) == (0, 0, 0)


def test_a_verb_that_is_rolled_back_takes_the_business_change_along(
    engine: sa.Engine, session: Session, clock: FakeClock
) -> None:
    order = ordered(session)
    order.task.start()
    order.title = "coffee"
    session.flush()
    session.rollback()
    assert (order.title, order.task.status, order.task.version, len(order.task.events)) == ("tea", "queued", 0, 1)
    clock.advance(5)
    order.task.start()
    session.commit()
    assert chain(engine, order.task_id)[1] == (1, "queued", "running", 1_005.0, "started")


def test_a_business_row_that_the_database_refuses_takes_the_verb_along(engine: sa.Engine, session: Session) -> None:
    order = ordered(session)
    order.task.start()
    session.add(Order(title="tea", task=Task()))
    with pytest.raises(IntegrityError):
        session.flush()
    session.rollback()
    assert counts(engine) == (1, 1, 1)
    assert stored(engine, order.task_id)["version"] == 0
    assert (order.task.status, len(order.task.events)) == ("queued", 1)


def test_a_task_that_the_ledger_refuses_takes_the_business_row_along(engine: sa.Engine, session: Session) -> None:
    session.add(Order(title="tea", task=Task(parent_id=uuid.uuid4())))
    with pytest.raises(tsg.TaskNotFound):
        session.commit()
    session.rollback()
    assert counts(engine) == (0, 0, 0)


def test_an_exception_in_the_middle_of_a_block_undoes_both(engine: sa.Engine, factory: sessionmaker[Session]) -> None:
    with factory() as session:
        task = ordered(session).task_id

    def interrupted() -> None:
        with factory.begin() as session:
            order = session.scalars(sa.select(Order)).one()
            order.title = "coffee"
            order.task.start()
            session.flush()
            order.task.close("succeeded", "completed")
            session.flush()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert stored(engine, task)["version"] == 0
    assert len(chain(engine, task)) == 1


def test_a_listener_that_raises_in_the_flush_undoes_both(engine: sa.Engine, session: Session) -> None:
    order = ordered(session)

    def refuse(*_: object) -> None:
        raise ZeroDivisionError

    order.task.start()
    order.title = "coffee"
    sa.event.listen(session, "after_flush", refuse)
    with pytest.raises(ZeroDivisionError):
        session.commit()
    sa.event.remove(session, "after_flush", refuse)
    session.rollback()
    assert (order.title, order.task.status) == ("tea", "queued")
    order.task.start()
    session.commit()
    assert len(chain(engine, order.task_id)) == 2
    assert healthy(engine)


def test_a_savepoint_that_is_rolled_back_takes_its_verbs_and_its_rows_along(
    engine: sa.Engine, session: Session, clock: FakeClock
) -> None:
    order = ordered(session)
    order.task.start()
    session.flush()
    nested = session.begin_nested()
    order.task.close("failed", "worker_failed")
    session.add(Order(title="coffee", task=Task()))
    session.flush()
    nested.rollback()
    assert (order.task.status, order.task.version, len(order.task.events)) == ("running", 1, 2)
    clock.advance(1)
    order.task.close("succeeded", "completed")
    session.commit()
    assert [event[2] for event in chain(engine, order.task_id)] == ["queued", "running", "succeeded"]
    assert counts(engine) == (1, 1, 3)
    assert healthy(engine)


def test_a_savepoint_that_is_kept_is_part_of_the_transaction(engine: sa.Engine, session: Session) -> None:
    order = ordered(session)
    for end in (session.rollback, session.commit):
        order.title = f"coffee {end.__name__}"
        session.flush()
        with session.begin_nested():
            order.task.start()
        with session.begin_nested():
            order.task.heartbeat()
            order.task.close("cancelled")
        end()
    row = stored(engine, order.task_id)
    assert (row["status"], row["version"]) == ("cancelled", 3)
    assert [event[2] for event in chain(engine, order.task_id)] == ["queued", "running", "cancelled"]
    assert healthy(engine)


def test_a_savepoint_around_a_refused_insert_saves_the_rest(engine: sa.Engine, session: Session) -> None:
    order = ordered(session)
    order.task.start()
    session.flush()
    with pytest.raises(IntegrityError), session.begin_nested():
        session.add(Order(title="tea", task=Task()))
    session.commit()
    assert counts(engine) == (1, 1, 2)
    assert order.task.status == "running"


# -- two phases ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def preparing_server(request: pytest.FixtureRequest) -> Iterator[sa.URL]:
    """A server on which transactions can be prepared: that of the run, or one more."""
    url = request.getfixturevalue("postgresql_server")
    probe = sa.create_engine(url, poolclass=sa.NullPool)
    with probe.connect() as connection:
        can = int(connection.exec_driver_sql("SHOW max_prepared_transactions").scalar_one()) > 0
    if can:
        yield url
        return
    if postgresql._installed() is None:
        pytest.skip("this server prepares no transactions, and there is no other")
    server = postgresql.Server()
    server._run("initdb", "-D", str(server.data), "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8")
    with (server.data / "postgresql.auto.conf").open("a") as settings:
        settings.write("max_prepared_transactions = 4\n")
    server.start()
    try:
        yield sa.make_url(server.url)
    finally:
        server.remove()


def test_a_prepared_transaction_keeps_order_and_task_together(preparing_server: sa.URL) -> None:
    with database(preparing_server, f"tsg_{uuid.uuid4().hex}") as url:
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        tsg.upgrade(engine)
        HostBase.metadata.create_all(engine)

        with Session(engine, twophase=True) as session:
            session.add(Order(title="tea", task=Task()))
            session.prepare()
            assert counts(engine) == (0, 0, 0)
            session.rollback()
        assert counts(engine) == (0, 0, 0)

        with Session(engine, twophase=True) as session:
            order = Order(title="tea", task=Task())
            session.add(order)
            session.flush()
            order.task.start()
            session.prepare()
            session.commit()
        assert counts(engine) == (1, 1, 2)

        with Session(engine, twophase=True) as session:
            order = session.scalars(sa.select(Order)).one()
            order.task.close("succeeded")
            assert tsg.reconcile.apply(session, WAITING)["deliveries_failed"] == 1
            assert tsg.doctor.examine(session)["healthy"]
            task = order.task_id
            session.prepare()
            session.commit()
        assert [event[2] for event in chain(engine, task)] == ["queued", "running", "succeeded", "failed"]
        assert healthy(engine)


# -- detached, expired, merged, pickled ------------------------------------------------------------------


def detached(factory: sessionmaker[Session]) -> Order:
    """An order and its task as another session left them, with all that they have but their history."""
    with factory() as session:
        ordered(session)
    with factory(expire_on_commit=False) as session:
        return session.scalars(sa.select(Order).options(joinedload(Order.task))).one()


def test_merging_an_unchanged_order_and_task_changes_nothing(
    engine: sa.Engine, factory: sessionmaker[Session], clock: FakeClock
) -> None:
    order = detached(factory)
    before = stored(engine, order.task_id)
    clock.advance(5)
    with factory.begin() as session:
        merged = session.merge(order)
        task = session.merge(order.task)
        assert merged.task is task
        assert not any(session.is_modified(row) for row in session)
    assert stored(engine, order.task_id) == before
    with factory.begin() as session:
        session.merge(order, load=False).task.start()
    assert stored(engine, order.task_id)["version"] == 1


def test_merging_an_unchanged_task_with_its_history_loaded_changes_nothing(
    engine: sa.Engine, factory: sessionmaker[Session], clock: FakeClock
) -> None:
    with factory(expire_on_commit=False) as session:
        order = ordered(session)
        order.task.start()
        session.commit()
        assert len(order.task.events) == 2
    before = stored(engine, order.task_id)
    with factory.begin() as session:
        merged = session.merge(order)
        assert not any(session.is_modified(row) for row in session)
    assert stored(engine, order.task_id) == before
    clock.advance(1)
    with factory.begin() as session:
        session.merge(order).task.close("succeeded")
    assert [event[2] for event in chain(engine, order.task_id)] == ["queued", "running", "succeeded"]
    assert merged is not order


def test_a_verb_on_a_detached_task_is_refused_and_leaves_it_fit_to_merge(
    engine: sa.Engine, factory: sessionmaker[Session]
) -> None:
    order = detached(factory)
    for call in (
        order.task.start,
        order.task.heartbeat,
        lambda: order.task.close("failed"),
        lambda: setattr(order.task, "status", "running"),
    ):
        with pytest.raises(StateConflict):
            call()
    with factory.begin() as session:
        session.merge(order.task).start()
    assert stored(engine, order.task_id)["status"] == "running"


def test_merging_what_was_changed_while_detached_is_refused(engine: sa.Engine, factory: sessionmaker[Session]) -> None:
    changes: list[tuple[str, object, type[Exception]]] = [
        ("status", TaskStatus.SUCCEEDED, StateConflict),
        ("status", "running", StateConflict),
        ("created_at", 1.0, StateConflict),
        ("pk", 77, StateConflict),
        ("timeout_seconds", None, StateConflict),
        # Where only SQLAlchemy speaks.
        ("version", 7, StaleDataError),
    ]
    order = detached(factory)
    before = stored(engine, order.task_id)
    for name, value, refusal in changes:
        copy = pickle.loads(pickle.dumps(order))
        copy.task.__dict__[name] = value
        with factory() as session, pytest.raises(refusal):
            session.merge(copy.task)
    assert stored(engine, order.task_id) == before
    assert healthy(engine)


def test_merging_what_missed_a_transition_is_refused(engine: sa.Engine, factory: sessionmaker[Session]) -> None:
    order = detached(factory)
    with Ledger(engine, clock=lambda: 1_001.0) as ledger:
        ledger.start_task(order.task_id)
    before = stored(engine, order.task_id)
    with factory() as session, pytest.raises((StateConflict, StaleDataError)):
        session.merge(order.task)
    assert stored(engine, order.task_id) == before


def test_an_object_goes_through_a_pickle_and_back_into_a_session(
    engine: sa.Engine, factory: sessionmaker[Session], clock: FakeClock
) -> None:
    order = detached(factory)
    copy = pickle.loads(pickle.dumps(order))
    assert (copy.title, copy.task.id, copy.task.status, copy.task.version) == ("tea", order.task_id, "queued", 0)
    with pytest.raises(StateConflict):
        copy.task.start()
    with factory.begin() as session:
        session.add(copy)
        copy.task.start()
        with pytest.raises(StateConflict):
            copy.task.version = 9
    assert [event[2] for event in chain(engine, order.task_id)] == ["queued", "running"]
    with factory.begin() as session:
        again = pickle.loads(pickle.dumps(session.get(Task, order.task_id)))
    clock.advance(1)
    with factory.begin() as session:
        session.merge(again).close("succeeded", "completed")
    assert stored(engine, order.task_id)["version"] == 2
    assert healthy(engine)


def test_a_new_task_goes_through_a_pickle_before_it_is_saved(engine: sa.Engine, factory: sessionmaker[Session]) -> None:
    task = Task(timeout_seconds=5)
    copy = pickle.loads(pickle.dumps(task))
    with factory.begin() as session:
        session.add(copy)
        copy.start()
    assert [event[2] for event in chain(engine, task.id)] == ["queued", "running"]
    assert healthy(engine)


def test_an_expunged_task_is_refused_its_verbs_and_taken_back_with_them(
    engine: sa.Engine, session: Session, clock: FakeClock
) -> None:
    order = ordered(session)
    task = order.task
    assert task.version == 0
    session.expunge(task)
    with pytest.raises(StateConflict):
        task.start()
    session.add(task)
    task.start()
    session.commit()
    assert stored(engine, task.id)["status"] == "running"


def test_a_new_task_that_is_expunged_leaves_no_trace(engine: sa.Engine, session: Session) -> None:
    task = Task()
    session.add(task)
    task.start()
    session.expunge(task)
    for event in list(session.new):
        session.expunge(event)
    session.commit()
    assert counts(engine) == (0, 0, 0)


ILLEGAL: list[Callable[[Task], object]] = [
    lambda task: task.close("failed"),
    lambda task: task.start(),
    lambda task: task.heartbeat(),
    lambda task: setattr(task, "status", "queued"),
    lambda task: setattr(task, "status", "running"),
    lambda task: setattr(task, "version", 0),
    lambda task: setattr(task, "created_at", 0.0),
    lambda task: setattr(task, "payload_hash", "0" * 64),
    lambda task: setattr(task, "terminal_code", None),
    lambda task: setattr(task.events[0], "code", "started"),
]


def test_an_expired_object_knows_what_is_stored(engine: sa.Engine, session: Session) -> None:
    task = ordered(session).task
    task.start()
    task.close("succeeded", "completed")
    for forget in (session.commit, session.rollback, session.expire_all, lambda: session.expire(task)):
        for illegal in ILLEGAL:
            forget()
            with pytest.raises(StateConflict):
                illegal(task)
    session.commit()
    assert stored(engine, task.id)["version"] == 2
    assert healthy(engine)


def test_an_object_that_is_detached_and_expired_says_that_it_is_detached(
    engine: sa.Engine, factory: sessionmaker[Session]
) -> None:
    with factory() as session:
        task = ordered(session).task
        session.commit()
    with pytest.raises(StateConflict):
        task.start()
    with pytest.raises((StateConflict, DetachedInstanceError)):
        task.version = 3


def test_without_expiry_objects_stay_in_step_with_what_their_verbs_wrote(
    engine: sa.Engine, factory: sessionmaker[Session], clock: FakeClock
) -> None:
    with factory(expire_on_commit=False) as session:
        task = ordered(session).task
        for verb in (task.start, task.heartbeat, task.heartbeat, lambda: task.close("failed", "worker_failed")):
            clock.advance(1)
            verb()
            session.commit()
            row = stored(engine, task.id)
            assert {name: getattr(task, name) for name in row} == row
        assert task.version == 4
        assert len(task.events) == 3
    assert healthy(engine)


def test_a_query_sees_a_verb_once_it_is_flushed(engine: sa.Engine, factory: sessionmaker[Session]) -> None:
    running = sa.select(sa.func.count()).where(Task.status == TaskStatus.RUNNING)
    for autoflush in (True, False):
        with factory(autoflush=autoflush) as session:
            task = ordered(session, str(autoflush)).task
            task.start()
            assert session.scalar(running) == int(autoflush)
            task.heartbeat()
            session.flush()
            assert session.scalar(running) == 1
            task.close("cancelled")
            session.commit()
            assert stored(engine, task.id)["version"] == 3
    assert healthy(engine)


def test_refreshing_forgets_an_unflushed_verb_and_nothing_of_it_is_written(engine: sa.Engine, session: Session) -> None:
    task = ordered(session).task
    with session.no_autoflush:
        task.start()
        session.expunge(task.events[-1])
        session.refresh(task)
    assert (task.status, task.version) == ("queued", 0)
    session.commit()
    assert len(chain(engine, task.id)) == 1


# -- verbs, times and versions ---------------------------------------------------------------------------


MOMENT = datetime(2026, 10, 25, 0, 30, 0, 250_000, tzinfo=UTC)


INSTANTS: list[Any] = [
    MOMENT,
    MOMENT.astimezone(timezone(timedelta(hours=5, minutes=45))),
    MOMENT.astimezone(timezone(timedelta(hours=-12))),
    MOMENT.astimezone(ZoneInfo("America/New_York")),
    # The first of the two half past two o'clock of that night.
    datetime(2026, 10, 25, 2, 30, 0, 250_000, tzinfo=ZoneInfo("Europe/Berlin"), fold=0),
    MOMENT.timestamp(),
    str(MOMENT.timestamp()),
]


def test_b16_an_aware_time_is_stored_as_its_instant(engine: sa.Engine, session: Session) -> None:
    for at in INSTANTS:
        task = ordered(session, repr(at)).task
        task.start(at=at)
        task.heartbeat(at=at)
        task.close("succeeded", at=at)
        task.deliver("delivered", at=at)
        session.commit()
        row, instant = stored(engine, task.id), MOMENT.timestamp()
        names = ("started_at", "updated_at", "ended_at", "delivery_updated_at")
        assert [row[name] for name in names] == [instant] * 4
        assert row["deadline_at"] == instant + 60
        assert [event[3] for event in chain(engine, task.id)] == [1_000.0, instant, instant, instant]
    assert healthy(engine)


def test_b16_the_hour_that_comes_twice_is_told_apart_by_its_fold(engine: sa.Engine, session: Session) -> None:
    task = ordered(session).task
    early = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=0)
    task.start(at=early)
    task.heartbeat(at=early.replace(fold=1))
    session.commit()
    row = stored(engine, task.id)
    assert row["updated_at"] - row["started_at"] == 3_600.0


def test_b16_a_naive_time_or_none_at_all_is_refused_and_nothing_is_written(engine: sa.Engine, session: Session) -> None:
    task = ordered(session).task
    for at in (datetime(2026, 10, 25), "soon", True, float("nan"), float("inf"), 10**400, object()):
        with pytest.raises(InvalidInput):
            task.start(at=at)  # type: ignore[arg-type]
    session.commit()
    assert stored(engine, task.id)["version"] == 0


def test_assigning_states_writes_what_the_verbs_write(engine: sa.Engine, session: Session, clock: FakeClock) -> None:
    def verbs(task: Task) -> Iterator[None]:
        yield task.start()
        yield task.close("failed")
        yield task.deliver("failed")

    def assignments(task: Task) -> Iterator[None]:
        yield setattr(task, "status", "running")
        yield setattr(task, "status", TaskStatus.FAILED)
        yield setattr(task, "delivery_status", "failed")

    rows = []
    for way in (verbs, assignments):
        clock.now = 2_000.0
        task = ordered(session, way.__name__).task
        for _ in way(task):
            clock.advance(1)
            session.commit()
        row = stored(engine, task.id)
        rows.append(({name: row[name] for name in row if name not in ("pk", "id")}, chain(engine, task.id)))
    assert rows[0] == rows[1]
    assert rows[0][0]["version"] == 3
    assert healthy(engine)


def test_every_verb_adds_one_to_the_version_however_many_one_flush_holds(engine: sa.Engine, session: Session) -> None:
    task = ordered(session).task
    task.start()
    for _ in range(5):
        task.heartbeat()
    task.start()
    task.close("succeeded", "completed")
    task.close("succeeded", "worker_completed")
    task.deliver("delivered", "transport_acknowledged")
    task.deliver("delivered")
    session.commit()
    row = stored(engine, task.id)
    assert (row["version"], row["terminal_code"], row["delivery_code"]) == (8, "completed", "transport_acknowledged")
    assert [event[0] for event in chain(engine, task.id)] == [0, 1, 2, 3]
    assert healthy(engine)


def test_many_tasks_of_one_flush_each_keep_their_own_history(engine: sa.Engine, session: Session) -> None:
    orders = [Order(title=str(number), task=Task(timeout_seconds=number)) for number in range(40)]
    session.add_all(orders)
    for number, order in enumerate(orders):
        if number % 2:
            order.task.start()
        if number % 3 == 0:
            order.task.close("cancelled")
    session.commit()
    for number, order in enumerate(orders):
        assert len(chain(engine, order.task_id)) == 1 + number % 2 + (number % 3 == 0)
    assert healthy(engine)


def test_a_ledger_and_a_session_on_one_database_go_on_from_each_others_work(
    engine: sa.Engine, session: Session, clock: FakeClock
) -> None:
    order = ordered(session)
    with Ledger(engine, clock=clock) as ledger:
        ledger.start_task(order.task_id)
        session.expire_all()
        order.task.heartbeat()
        session.commit()
        record = ledger.close_task(order.task_id, "succeeded", code="completed")
        assert record.version == 3
        session.commit()
        order.task.deliver("delivered")
        session.commit()
        assert ledger.get_task(order.task_id).delivery_status == "delivered"
        assert ledger.doctor()["healthy"]


# -- binds, registries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("binding", ["bases", "classes", "tables"])
def test_a_session_bound_by_class_keeps_rows_together_and_serves_reconcile_and_doctor(
    engine: sa.Engine, clock: FakeClock, binding: str
) -> None:
    binds: dict[Any, sa.Engine] = {
        "bases": {HostBase: engine, tsg.Base: engine},
        "classes": {Order: engine, Task: engine, TaskEvent: engine},
        "tables": {Order.__table__: engine, Task.__table__: engine, TaskEvent.__table__: engine},
    }[binding]
    with Session(binds=binds, info={"tsg_clock": clock}) as session:
        task = ordered(session).task
        task.start()
        session.flush()
        session.rollback()
        assert counts(engine) == (1, 1, 1)
        task.start()
        session.commit()
        assert tsg.doctor.examine(session)["healthy"]
        assert tsg.reconcile.preview(session, WAITING, now=2_000.0)["tasks_timed_out"] == 1
        assert tsg.reconcile.apply(session, WAITING, now=2_000.0)["tasks_timed_out"] == 1
        session.commit()
        assert (task.status, task.version) == ("timed_out", 3)


def test_a_scoped_session_keeps_rows_together_and_serves_reconcile_and_doctor(
    engine: sa.Engine, factory: sessionmaker[Session]
) -> None:
    registry = scoped_session(factory)
    try:
        order = Order(title="tea", task=Task())
        registry.add(order)
        order.task.start()
        registry.commit()
        assert tsg.doctor.examine(registry)["healthy"]
        applied = tsg.reconcile.apply(registry, WAITING, now=2_000.0)
        assert applied["tasks_timed_out"] == 1
        assert order.task.status == "timed_out"
        registry.rollback()
        assert order.task.status == "running"
    finally:
        registry.remove()
    assert counts(engine) == (1, 1, 2)


# -- two writers -----------------------------------------------------------------------------------------


VERBS: dict[str, Callable[[Task], object]] = {
    "start": lambda task: task.start(),
    "close": lambda task: task.close("succeeded", "completed"),
    "other close": lambda task: task.close("failed", "worker_failed"),
    "heartbeat": lambda task: (task.start(), task.heartbeat()),
}


@pytest.mark.parametrize("first", VERBS)
def test_the_second_of_two_sessions_finds_its_data_stale_and_loses_its_business_row_too(
    engine: sa.Engine, factory: sessionmaker[Session], first: str
) -> None:
    for second in VERBS:
        with factory() as session:
            task = ordered(session, second).task_id
        with factory() as winner, factory() as loser:
            ones = [session.get_one(Task, task) for session in (winner, loser)]
            VERBS[first](ones[0])
            winner.commit()
            VERBS[second](ones[1])
            loser.add(Order(title="coffee", task=Task()))
            with pytest.raises(StaleDataError):
                loser.commit()
            loser.rollback()
        states = [event[2] for event in chain(engine, task)]
        assert (
            states
            == {
                "start": ["queued", "running"],
                "heartbeat": ["queued", "running"],
                "close": ["queued", "succeeded"],
                "other close": ["queued", "failed"],
            }[first]
        )
    assert counts(engine)[0] == len(VERBS)
    assert healthy(engine)


def test_a_session_that_reads_the_end_that_another_wrote_is_refused_by_the_verb(
    engine: sa.Engine, factory: sessionmaker[Session]
) -> None:
    with factory() as session:
        task = ordered(session).task
        with Ledger(engine, clock=lambda: 1_001.0) as ledger:
            ledger.close_task(task.id, "cancelled")
        session.expire_all()
        with pytest.raises(StateConflict):
            task.close("succeeded")
        task.close("cancelled", "caller_cancelled")
        session.commit()
        assert task.terminal_code is None
    assert len(chain(engine, task.id)) == 2


BULK: list[tuple[str, str, Any]] = [
    ("ended", "status", "running"),
    ("ended", "status", "failed"),
    ("ended", "terminal_code", None),
    ("ended", "ended_at", 5_000.0),
    ("running", "status", "queued"),
    ("running", "status", "unknown"),
    ("running", "delivery_status", "delivered"),
    ("running", "created_at", 0.0),
    ("running", "deadline_at", 5_000.0),
    ("running", "version", -1),
]


@pytest.mark.parametrize("way", ["orm", "core", "text"])
def test_a_bulk_update_meets_the_guards_and_takes_the_transaction_along(
    engine: sa.Engine, session: Session, way: str
) -> None:
    orders = {state: ordered(session, state) for state in ("running", "ended")}
    for order in orders.values():
        order.task.start()
    orders["ended"].task.close("succeeded", "completed")
    session.commit()
    before = {state: stored(engine, order.task_id) for state, order in orders.items()}
    statements: dict[str, Callable[[str, str, Any], Any]] = {
        "orm": lambda task, name, value: sa.update(Task).where(Task.id == task).values({name: value}),
        "core": lambda task, name, value: (
            sa.update(Task.__table__).where(Task.__table__.c.id == task).values({name: value})
        ),
        "text": lambda task, name, value: sa.text(
            f"UPDATE tsg_tasks SET {name} = :value WHERE CAST(id AS text) = :id"
        ).bindparams(value=value, id=task),
    }
    for state, name, value in BULK:
        order = orders[state]
        statement = statements[way](order.task_id, name, value)
        order.title = "coffee"
        session.flush()
        with pytest.raises(IntegrityError):
            session.execute(statement)
        session.rollback()
        assert (order.title, stored(engine, order.task_id)) == (state, before[state])
    assert healthy(engine)


def test_events_are_neither_changed_nor_deleted_by_bulk_statements(engine: sa.Engine, session: Session) -> None:
    order = ordered(session)
    for statement in (sa.update(TaskEvent).values(code="started"), sa.delete(TaskEvent)):
        with pytest.raises(IntegrityError):
            session.execute(statement)
        session.rollback()
    assert len(chain(engine, order.task_id)) == 1


# -- AUTOCOMMIT ------------------------------------------------------------------------------------------


@contextmanager
def autocommitting(engine: sa.Engine, how: str) -> Iterator[Session]:
    """A session every statement of which would commit by itself."""
    if how == "engine":
        made = sa.create_engine(engine.url, isolation_level="AUTOCOMMIT")
    elif how == "engine option":
        made = engine.execution_options(isolation_level="AUTOCOMMIT")
    elif how == "driver" and engine.dialect.name == "sqlite":
        made = sa.create_engine(engine.url, connect_args={"isolation_level": None})
    elif how == "driver":
        made = sa.create_engine(engine.url, connect_args={"autocommit": True})
    else:
        made = sa.create_engine(engine.url)
    try:
        with Session(made, info={"tsg_clock": lambda: 1_500.0}) as session:
            if how == "session":
                session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
            yield session
            session.rollback()
    finally:
        made.dispose()


AUTOCOMMIT = ["engine", "engine option", "driver", "session"]


def test_in_autocommit_verbs_and_creation_are_refused_and_nothing_is_written(
    engine: sa.Engine, session: Session
) -> None:
    task = ordered(session).task_id
    before = counts(engine), stored(engine, task)
    session.close()
    for how in AUTOCOMMIT:
        with autocommitting(engine, how) as other:
            other.get_one(Task, task).start()
            with pytest.raises(StateConflict):
                other.commit()
        with autocommitting(engine, how) as other:
            other.add(Task())
            with pytest.raises(StateConflict):
                other.commit()
        assert (counts(engine), stored(engine, task)) == before
    assert healthy(engine)


def test_in_autocommit_apply_is_refused_and_nothing_is_written(engine: sa.Engine, session: Session) -> None:
    task = ordered(session).task
    task.start()
    session.commit()
    before = stored(engine, task.id)
    session.close()
    for how in AUTOCOMMIT:
        with autocommitting(engine, how) as other:
            with pytest.raises(StateConflict):
                tsg.reconcile.apply(other, WAITING, now=2_000.0)
            with pytest.raises(StateConflict):
                tsg.reconcile.apply(other.connection(), WAITING, now=2_000.0)
        assert stored(engine, before["id"]) == before


def test_in_autocommit_a_preview_and_doctor_see_no_fault_where_there_is_none(
    engine: sa.Engine, session: Session
) -> None:
    ordered(session).task.start()
    session.commit()
    session.close()
    for how in AUTOCOMMIT:
        with autocommitting(engine, how) as other:
            assert tsg.reconcile.preview(other, WAITING, now=2_000.0)["tasks_timed_out"] == 1
            assert tsg.doctor.examine(other)["healthy"], how


def test_psycopg_in_autocommit_with_a_transaction_of_its_own_is_still_refused(postgresql_url: sa.URL) -> None:
    engine = sa.create_engine(postgresql_url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection, connection.begin(), pytest.raises(StateConflict):
        tsg.reconcile.apply(connection, WAITING)


# -- reconcile and doctor inside the caller's transaction -------------------------------------------------


def held(engine: sa.Engine, session: Session, clock: FakeClock) -> Order:
    """An order whose task has been silent for long, and one more that is saved but not committed."""
    order = ordered(session)
    order.task.start()
    session.commit()
    clock.advance(1_000)
    return order


def test_reconcile_and_doctor_on_a_session_commit_nothing_and_refresh_its_objects(
    engine: sa.Engine, session: Session, clock: FakeClock
) -> None:
    order = held(engine, session, clock)
    before = counts(engine), stored(engine, order.task_id)
    for end in (session.rollback, session.commit):
        assert (order.task.status, len(order.task.events)) == ("running", 2)
        pending = Order(title=end.__name__, task=Task())
        session.add(pending)
        preview = tsg.reconcile.preview(session, WAITING, now=clock.now)
        assert (order.task.status, preview["active_examined"]) == ("running", 2)
        applied = tsg.reconcile.apply(session, WAITING, now=clock.now)
        assert applied == {**preview, "dry_run": False, "applied": True}
        assert (applied["tasks_timed_out"], applied["deliveries_failed"]) == (1, 1)
        assert (order.task.status, order.task.delivery_status, order.task.version) == ("timed_out", "failed", 3)
        assert [event.code for event in order.task.events][2:] == ["deadline_exceeded", "delivery_grace_expired"]
        assert tsg.doctor.examine(session)["healthy"]
        assert session.in_transaction()
        if engine.dialect.name == "postgresql" or end == session.rollback:
            with engine.connect() as other:
                assert other.scalar(sa.select(Task.__table__.c.version)) == 1
        end()
        assert order.task.status == ("running" if end == session.rollback else "timed_out")
        if end == session.rollback:
            assert (counts(engine), stored(engine, order.task_id)) == before
    assert counts(engine) == (2, 2, 5)
    assert healthy(engine)


def test_reconcile_and_doctor_on_a_connection_commit_nothing(
    engine: sa.Engine, session: Session, clock: FakeClock
) -> None:
    held(engine, session, clock)
    session.close()
    before = counts(engine), stored(engine, ids(engine)[0])
    with engine.connect() as connection:
        transaction = connection.begin()
        connection.execute(sa.update(Order.__table__).values(title="coffee"))
        assert tsg.reconcile.apply(connection, WAITING, now=clock.now)["tasks_timed_out"] == 1
        assert tsg.reconcile.apply(connection, WAITING, now=clock.now)["tasks_timed_out"] == 0
        assert tsg.doctor.examine(connection)["healthy"]
        assert transaction.is_active
        transaction.rollback()
    assert (counts(engine), stored(engine, ids(engine)[0])) == before
    with engine.begin() as connection:
        assert connection.scalar(sa.select(Order.__table__.c.title)) == "tea"
        tsg.reconcile.apply(connection, WAITING, now=clock.now)
    assert stored(engine, ids(engine)[0])["version"] == 3
    assert healthy(engine)


def ids(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(sa.select(Task.__table__.c.id)))


def test_a_refused_run_in_a_savepoint_leaves_the_callers_transaction_usable(
    engine: sa.Engine, session: Session, clock: FakeClock
) -> None:
    order = held(engine, session, clock)
    order.title = "coffee"
    order.task.heartbeat(at=5_000.0)
    session.flush()
    with pytest.raises(StateConflict), session.begin_nested():
        # The deadline has passed, and the beat is later than the decision.
        tsg.reconcile.apply(session, WAITING, now=2_000.0)
    with pytest.raises(StateConflict), session.begin_nested():
        tsg.reconcile.preview(session, WAITING, now=2_000.0)
    skipped = tsg.reconcile.apply(session, WAITING, now=2_000.0, skip_conflicts=True)
    assert (skipped["tasks_timed_out"], skipped["conflicts_skipped"]) == (0, 1)
    assert tsg.reconcile.apply(session, WAITING, now=5_000.0, skip_conflicts=True)["tasks_timed_out"] == 1
    session.commit()
    assert (order.title, order.task.status) == ("coffee", "timed_out")
    assert healthy(engine)


def test_a_session_that_is_not_flushed_by_itself_is_flushed_by_the_run(
    engine: sa.Engine, factory: sessionmaker[Session]
) -> None:
    with factory(autoflush=False) as session:
        task = Task(delivery_required=False)
        session.add(task)
        task.start()
        assert tsg.doctor.examine(session)["task_count"] == 1
        assert tsg.reconcile.apply(session, WAITING, now=2_000.0)["deliveries_not_applicable"] == 1
        assert (task.status, task.delivery_status) == ("timed_out", "not_applicable")
        session.commit()
    assert healthy(engine)


def test_doctor_inside_a_transaction_tells_what_that_transaction_sees(
    engine: sa.Engine, session: Session, clock: FakeClock
) -> None:
    ordered(session)
    session.add_all([Task(), Task()])
    inside = tsg.doctor.examine(session)
    assert (inside["healthy"], inside["task_count"], inside["event_count"]) == (True, 3, 3)
    session.rollback()
    assert tsg.doctor.examine(session)["task_count"] == 1


# -- killed in the middle --------------------------------------------------------------------------------


KILLED = """
import json, multiprocessing, os, random, signal, sys, time
import sqlalchemy as sa
from sqlalchemy.orm import Session
import tsg
from tests.test_sessions import HostBase, Order

def work(url, ready):
    engine = sa.create_engine(url)
    ends = ("succeeded", "failed", "cancelled", "timed_out")
    number = 0
    while True:
        number += 1
        with Session(engine) as session:
            order = Order(title=f"{os.getpid()} {number}:0", task=tsg.Task(timeout_seconds=60))
            session.add(order)
            session.commit()
            for verb in (
                order.task.start,
                order.task.heartbeat,
                order.task.heartbeat,
                lambda: order.task.close(ends[number % 4]),
                lambda: order.task.deliver("delivered"),
            ):
                verb()
                # The title counts along: the version of the task, told by the business row.
                head, _, count = order.title.rpartition(":")
                order.title = f"{head}:{int(count) + 1}"
                session.flush()
                session.commit()
        if number == 1:
            ready.send(None)

def state(url):
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    if engine.dialect.name == "postgresql":
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    with Session(engine) as session:
        pairs = session.execute(sa.select(Order.title, tsg.Task.version).join(Order.task)).all()
        torn = sum(int(title.rpartition(":")[2]) != version for title, version in pairs)
        tasks = session.scalar(sa.select(sa.func.count()).select_from(tsg.Task))
        report = tsg.doctor.examine(session)
    return {"orders": len(pairs), "tasks": tasks, "torn": torn, "healthy": report["healthy"]}

url, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
context = multiprocessing.get_context("fork")
found = []
for _ in range(rounds):
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=work, args=(url, theirs))
    child.start()
    mine.recv()
    time.sleep(chance.uniform(0, 0.05))
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    child.close(); mine.close(); theirs.close()
    found.append(state(url))
print(json.dumps(found))
"""


def test_whenever_a_process_is_killed_orders_and_tasks_agree(engine: sa.Engine) -> None:
    url = engine.url.render_as_string(hide_password=False)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", KILLED, url, "15", "20261130"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=Path(__file__).parent.parent,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert len(found) == 15
    for number, state in enumerate(found, start=1):
        assert (state["torn"], state["healthy"]) == (0, True)
        assert state["orders"] == state["tasks"] >= number
    with engine.begin() as connection:
        later = datetime.now(UTC).timestamp() + 10_000
        applied = tsg.reconcile.apply(connection, ReconcilePolicy(0, 0), now=later)
        assert applied["tasks_timed_out"] <= 15
        assert tsg.reconcile.apply(connection, ReconcilePolicy(0, 0), now=later)["pending_delivery_examined"] == 0
    assert healthy(engine)


def test_a_child_is_created_though_another_vouches_for_its_parent_in_that_very_moment(
    factory: sessionmaker[Session], clock: FakeClock
) -> None:
    with factory() as session:
        other = Ledger(session.get_bind(), clock=clock)
    parent = other.create_task().id
    other.start_task(parent)

    def late() -> float:
        read = clock.now + 5
        clock.advance(10)
        other.heartbeat(parent)
        return read

    with factory() as session, session.begin():
        session.info["tsg_clock"] = late
        session.add(Task(parent_id=parent))
    assert [child.created_at for child in other.children_of(parent)] == [1_005.0]
    assert other.get_task(parent).updated_at == 1_010.0
    assert other.doctor()["healthy"]
