"""Tasks in the application's own session: the same transitions, row and event in the caller's transaction."""

from __future__ import annotations

import math
import shutil
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.pool import NullPool

from tests.conftest import FakeClock, raw
from tsg import (
    Base,
    DeliveryStatus,
    InvalidInput,
    Ledger,
    LedgerError,
    StateConflict,
    Task,
    TaskEvent,
    TaskNotFound,
    TaskStatus,
)

ID = "0f8fad5b-d9cb-469f-a165-70867728950e"
OTHER = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
DIGEST = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    folder.chmod(0o700)
    Ledger(folder / "ledger.sqlite").close()
    return folder / "ledger.sqlite"


@pytest.fixture
def path(folder: Path, template: Path) -> Path:
    copy = folder / "ledger.sqlite"
    shutil.copyfile(template, copy)
    copy.chmod(0o600)
    return copy


def prepare(connection: sqlite3.Connection, _: object) -> None:
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = OFF")


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    """An application's own engine, with nothing of ours on it."""
    own = sa.create_engine(f"sqlite:///{path}", poolclass=NullPool)
    sa.event.listen(own, "connect", prepare)
    yield own
    own.dispose()


@pytest.fixture
def open_session(engine: Engine, clock: FakeClock) -> Iterator[Callable[[], Session]]:
    opened: list[Session] = []

    def one_more() -> Session:
        session = Session(engine, info={"tsg_clock": clock})
        opened.append(session)
        return session

    yield one_more
    for session in opened:
        session.close()


@pytest.fixture
def session(open_session: Callable[[], Session]) -> Session:
    return open_session()


def saved(session: Session, **fields: Any) -> Task:
    task = Task(**fields)
    session.add(task)
    session.commit()
    return task


def chain(task: Task) -> list[tuple[Any, ...]]:
    return [
        (event.number, event.kind, event.from_status, event.to_status, event.occurred_at, event.code)
        for event in task.events
    ]


def healthy(path: Path) -> bool:
    with Ledger(path) as ledger:
        return ledger.doctor()["healthy"]


def test_a_task_added_to_a_session_is_queued_and_its_creation_is_recorded(session: Session, clock: FakeClock) -> None:
    task = saved(session)
    assert task.id == str(uuid.UUID(task.id))
    assert (task.status, task.delivery_status) == (TaskStatus.QUEUED, DeliveryStatus.PENDING)
    assert (task.delivery_required, task.expects_heartbeat, task.version) == (True, True, 0)
    assert task.created_at == task.updated_at == task.delivery_updated_at == 1_000.0
    assert {task.parent_id, task.payload_hash, task.timeout_seconds, task.started_at, task.ended_at} == {None}
    assert {task.deadline_at, task.terminal_code, task.delivery_code} == {None}
    assert chain(task) == [(0, "created", None, "queued", 1_000.0, "created")]
    assert clock.readings == 1


@pytest.mark.parametrize(
    ("fields", "stored"),
    [
        ({"id": ID.upper()}, {"id": ID}),
        ({"id": uuid.UUID(ID)}, {"id": ID}),
        ({"id": f"urn:uuid:{ID}"}, {"id": ID}),
        ({"timeout_seconds": "60"}, {"timeout_seconds": 60.0}),
        ({"timeout_seconds": b"1.5"}, {"timeout_seconds": 1.5}),
        ({"payload_hash": DIGEST}, {"payload_hash": DIGEST}),
        ({"delivery_required": False}, {"delivery_required": False}),
        ({"timeout_seconds": 5, "expects_heartbeat": False}, {"expects_heartbeat": False}),
    ],
)
def test_the_constructor_makes_its_arguments_canonical(
    session: Session, fields: dict[str, Any], stored: dict[str, object]
) -> None:
    task = saved(session, **fields)
    session.refresh(task)
    assert {name: getattr(task, name) for name in stored} == stored


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "x"},
        {"id": 5},
        {"parent_id": "x"},
        {"parent": "x"},
        {"parent": ID},
        {"timeout_seconds": True},
        {"timeout_seconds": -1},
        {"timeout_seconds": "soon"},
        {"timeout_seconds": 10**400},
        {"timeout_seconds": math.nan},
        {"payload_hash": DIGEST.upper()},
        {"payload_hash": b"0" * 64},
        {"delivery_required": 1},
        {"expects_heartbeat": None, "timeout_seconds": 5},
        {"expects_heartbeat": False},
    ],
    ids=str,
)
def test_the_constructor_refuses_what_is_malformed(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Task(**fields)


def test_the_constructor_takes_a_parent_or_its_id_but_not_both() -> None:
    with pytest.raises(InvalidInput):
        Task(parent=Task(), parent_id=ID)


@pytest.mark.parametrize(
    "field", ["status", "delivery_status", "created_at", "version", "pk", "events", "terminal_code"]
)
def test_the_constructor_takes_no_field_that_the_verbs_write(field: str) -> None:
    with pytest.raises(TypeError):
        Task(**{field: None})


History = list[tuple[float, str, tuple[Any, ...]]]
HISTORIES: dict[str, tuple[dict[str, Any], History]] = {
    "created": ({}, []),
    "started": ({"timeout_seconds": 60}, [(1_010.0, "start", ())]),
    "started twice": ({}, [(1_010.0, "start", ()), (1_020.0, "start", ())]),
    "beaten": ({}, [(1_010.0, "start", ()), (1_020.0, "heartbeat", ()), (1_030.0, "heartbeat", ())]),
    "silent, then beaten": (
        {"timeout_seconds": 60, "expects_heartbeat": False},
        [(1_010.0, "start", ()), (1_020.0, "heartbeat", ())],
    ),
    "silent": ({"timeout_seconds": 60, "expects_heartbeat": False}, [(1_010.0, "start", ())]),
    **{
        f"closed as {status} from {'running' if started else 'queued'}": (
            {"timeout_seconds": 5},
            [*([(1_010.0, "start", ())] if started else []), (1_100.0, "close", (status, code))],
        )
        for status, code in (
            ("succeeded", "completed"),
            ("failed", None),
            ("timed_out", "deadline_exceeded"),
            ("cancelled", "caller_cancelled"),
        )
        for started in (True, False)
    },
    **{
        f"delivery {status} with {code}": (
            {"delivery_required": status != "not_applicable", "payload_hash": DIGEST},
            [
                (1_010.0, "start", ()),
                (1_011.0, "heartbeat", ()),
                (1_020.0, "close", ("succeeded", None)),
                (1_021.0, "close", ("succeeded", "completed")),
                (1_030.0, "deliver", (status, code)),
                (1_031.0, "deliver", (status, "bogus")),
            ],
        )
        for status, code in (
            ("delivered", "transport_acknowledged"),
            ("failed", "transport_failed"),
            ("failed", None),
            ("not_applicable", "internal_task"),
        )
    },
}


def rows(path: Path) -> tuple[list[Any], list[Any]]:
    with closing(raw(path)) as connection:
        return (
            connection.execute("SELECT * FROM tsg_tasks").fetchall(),
            connection.execute("SELECT * FROM tsg_task_events ORDER BY task_pk, number").fetchall(),
        )


@pytest.mark.parametrize("flushes", ["once", "after every verb"])
@pytest.mark.parametrize(("fields", "history"), HISTORIES.values(), ids=HISTORIES)
def test_the_verbs_write_the_rows_and_events_that_the_ledger_writes(
    folder: Path,
    template: Path,
    path: Path,
    session: Session,
    clock: FakeClock,
    fields: dict[str, Any],
    history: History,
    flushes: str,
) -> None:
    other = folder / "other.sqlite"
    shutil.copyfile(template, other)
    other.chmod(0o600)
    with Ledger(other, clock=clock) as ledger:
        names = {"start": "start_task", "heartbeat": "heartbeat", "close": "close_task", "deliver": "set_delivery"}
        ledger.create_task(
            **{"task_id": ID, "parent_id": None, "payload_hash": None, "timeout_seconds": None, **fields}
        )
        for clock.now, verb, (*status, code) in ((now, verb, arguments or (None,)) for now, verb, arguments in history):
            getattr(ledger, names[verb])(ID, *status, **({"code": code} if status else {}))
    clock.now = 1_000.0
    task = Task(id=ID, **fields)
    session.add(task)
    session.flush()
    for clock.now, verb, arguments in history:
        getattr(task, verb)(*arguments)
        if flushes != "once":
            session.flush()
    session.commit()
    assert rows(path) == rows(other)
    assert healthy(path)


def test_every_verb_in_one_flush_counts_in_the_version(session: Session, path: Path) -> None:
    task = saved(session)
    task.start()
    for _ in range(5):
        task.heartbeat()
    task.close("succeeded")
    task.deliver("delivered")
    assert task.version == 8
    session.commit()
    assert task.version == 8
    assert [event.number for event in task.events] == [0, 1, 2, 3]
    assert healthy(path)


def test_a_new_task_can_go_all_its_way_before_its_first_flush(session: Session, path: Path, clock: FakeClock) -> None:
    task = Task(timeout_seconds=5)
    session.add(task)
    task.start()
    clock.advance(1)
    task.heartbeat()
    task.close("failed", "worker_failed")
    task.deliver("failed", "transport_failed")
    session.commit()
    assert task.version == 4
    assert [row[4] for row in chain(task)] == [1_000.0, 1_000.0, 1_001.0, 1_001.0]
    assert healthy(path)


def test_a_no_op_reads_no_clock_and_writes_nothing(session: Session, path: Path, clock: FakeClock) -> None:
    task = saved(session)
    task.start()
    task.close("failed", "worker_failed")
    task.deliver("delivered")
    session.commit()
    before, readings = rows(path), clock.readings
    clock.now = math.nan
    task.close("failed", "bogus")
    task.deliver("delivered", "bogus")
    assert not session.dirty
    session.commit()
    assert rows(path) == before
    assert clock.readings == readings


REFUSALS: list[tuple[str, str, Callable[[Task], object], type[LedgerError]]] = [
    ("a heartbeat before the start", "queued", lambda task: task.heartbeat(), StateConflict),
    ("a delivery before the end", "running", lambda task: task.deliver("delivered", "bogus"), StateConflict),
    ("a start after the end", "ended", lambda task: task.start(), StateConflict),
    ("a heartbeat after the end", "ended", lambda task: task.heartbeat(), StateConflict),
    ("another end", "ended", lambda task: task.close("failed", "bogus"), StateConflict),
    ("an end that is none", "running", lambda task: task.close("running"), InvalidInput),
    ("a delivery that is none", "ended", lambda task: task.deliver("pending"), InvalidInput),
    ("a delivery that does not fit", "ended", lambda task: task.deliver("not_applicable"), StateConflict),
    ("another delivery", "delivered", lambda task: task.deliver("failed"), StateConflict),
    ("a code that does not fit", "running", lambda task: task.close("failed", "completed", at=1.0), InvalidInput),
    ("a delivery code that does not fit", "ended", lambda task: task.deliver("failed", "bogus", at=1.0), InvalidInput),
    ("a time that is behind", "running", lambda task: task.heartbeat(at=999.0), StateConflict),
    ("a time that is not finite", "running", lambda task: task.heartbeat(at=math.nan), InvalidInput),
    ("a time that is no time", "running", lambda task: task.close("failed", at="soon"), InvalidInput),  # type: ignore[arg-type]
    ("a naive datetime", "running", lambda task: task.heartbeat(at=datetime(2030, 1, 1)), InvalidInput),
    ("a boolean time", "queued", lambda task: task.start(at=True), InvalidInput),
    ("status: back to queued", "running", lambda task: setattr(task, "status", "queued"), StateConflict),
    ("status: out of the end", "ended", lambda task: setattr(task, "status", "running"), StateConflict),
    ("status: ended to queued", "ended", lambda task: setattr(task, "status", TaskStatus.QUEUED), StateConflict),
    ("status: another end", "ended", lambda task: setattr(task, "status", TaskStatus.FAILED), StateConflict),
    ("status: a word that is none", "running", lambda task: setattr(task, "status", "bogus"), InvalidInput),
    ("status: nothing", "running", lambda task: setattr(task, "status", None), InvalidInput),
    ("delivery: too early", "queued", lambda task: setattr(task, "delivery_status", "delivered"), StateConflict),
    ("delivery: does not fit", "ended", lambda task: setattr(task, "delivery_status", "not_applicable"), StateConflict),
    ("delivery: back to pending", "delivered", lambda task: setattr(task, "delivery_status", "pending"), StateConflict),
    ("delivery: another end", "delivered", lambda task: setattr(task, "delivery_status", "failed"), StateConflict),
    ("delivery: a word that is none", "ended", lambda task: setattr(task, "delivery_status", "bogus"), InvalidInput),
    *(
        (
            f"{field} is not to be assigned",
            "delivered",
            lambda task, f=field, v=value: setattr(task, f, v),
            StateConflict,
        )
        for field, value in {
            "pk": 77,
            "id": OTHER,
            "parent_id": OTHER,
            "payload_hash": DIGEST,
            "timeout_seconds": 7.0,
            "delivery_required": False,
            "expects_heartbeat": False,
            "created_at": 1.0,
            "started_at": None,
            "updated_at": 5_000.0,
            "ended_at": 5_000.0,
            "deadline_at": 5_000.0,
            "delivery_updated_at": 5_000.0,
            "terminal_code": "completed",
            "delivery_code": None,
            "version": 9,
            "parent": Task(),
            "events": [],
        }.items()
    ),
    ("created_at is not to be deleted", "queued", lambda task: delattr(task, "created_at"), StateConflict),
    ("an event is not to be appended", "queued", lambda task: task.events.append(task.events[0]), StateConflict),
    ("an event is not to be removed", "queued", lambda task: task.events.remove(task.events[0]), StateConflict),
    ("the events are not to be cleared", "queued", lambda task: task.events.clear(), StateConflict),
    *(
        (
            f"an event's {field} is not to be assigned",
            "ended",
            lambda task, f=field, v=value: setattr(task.events[1], f, v),
            StateConflict,
        )
        for field, value in {
            "task_pk": 77,
            "number": 7,
            "kind": "created",
            "from_status": "running",
            "to_status": "failed",
            "occurred_at": 1.0,
            "code": None,
            "task": Task(),
        }.items()
    ),
]


def brought_to(state: str, session: Session) -> Task:
    task = saved(session, timeout_seconds=60)
    if state != "queued":
        task.start()
    if state in ("ended", "delivered"):
        task.close("succeeded")
    if state == "delivered":
        task.deliver("delivered", "transport_acknowledged")
    session.commit()
    return task


@pytest.mark.parametrize(
    ("state", "call", "refusal"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_what_is_illegal_is_refused_there_and_then_on_an_expired_object_too(
    session: Session, path: Path, state: str, call: Callable[[Task], object], refusal: type[LedgerError]
) -> None:
    task = brought_to(state, session)
    before = rows(path)
    assert sa.inspect(task).expired_attributes
    with pytest.raises(LedgerError) as caught:
        call(task)
    assert type(caught.value) is refusal
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    session.commit()
    assert rows(path) == before


def test_deleting_the_status_of_an_object_is_refused_there_and_then(session: Session) -> None:
    task = saved(session)
    with pytest.raises(LedgerError):
        del task.status


@pytest.mark.parametrize("field", ["payload_hash", "id", "terminal_code"])
def test_a_value_that_says_it_equals_everything_is_not_assigned(session: Session, field: str) -> None:
    class AgreeableText(str):
        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = str.__hash__

    task = saved(session)
    stored = getattr(task, field)
    try:
        setattr(task, field, AgreeableText("bogus"))
    except LedgerError:
        pass
    assert type(getattr(task, field)) is type(stored)


@pytest.mark.parametrize("status", ["running", TaskStatus.RUNNING])
def test_assigning_a_status_does_what_its_verb_does(
    session: Session, path: Path, clock: FakeClock, status: str
) -> None:
    task = saved(session, timeout_seconds=60)
    clock.advance(5)
    task.status = status  # type: ignore[assignment]
    assert (task.status, task.started_at, task.deadline_at, task.version) == (TaskStatus.RUNNING, 1_005.0, 1_065.0, 1)
    assert task.status is TaskStatus.RUNNING
    task.status = "succeeded"  # type: ignore[assignment]
    task.status = TaskStatus.SUCCEEDED
    task.delivery_status = "failed"  # type: ignore[assignment]
    session.commit()
    assert [row[1:4] for row in chain(task)] == [
        ("created", None, "queued"),
        ("task_transition", "queued", "running"),
        ("task_transition", "running", "succeeded"),
        ("delivery_transition", "pending", "failed"),
    ]
    assert task.version == 3
    assert healthy(path)


def test_assigning_what_is_so_already_changes_nothing(session: Session, path: Path) -> None:
    task = saved(session, timeout_seconds=60)
    before = rows(path)
    task.status = TaskStatus.QUEUED
    task.delivery_status = DeliveryStatus.PENDING
    task.timeout_seconds = 60.0
    task.parent_id = None
    task.version = 0
    session.commit()
    assert rows(path) == before


def test_the_first_heartbeat_turns_the_expectation_on_for_good(session: Session, clock: FakeClock) -> None:
    task = saved(session, timeout_seconds=60, expects_heartbeat=False)
    task.start()
    session.commit()
    assert task.expects_heartbeat is False
    clock.advance(1)
    task.heartbeat()
    session.commit()
    assert task.expects_heartbeat is True
    assert (task.updated_at, task.version, len(task.events)) == (1_001.0, 2, 2)


@pytest.mark.parametrize(
    ("at", "seconds"),
    [
        (5_000, 5_000.0),
        ("5000.5", 5_000.5),
        (datetime(1970, 1, 1, 2, tzinfo=UTC), 7_200.0),
        (datetime(1970, 1, 1, 2, tzinfo=timezone(timedelta(hours=-5, minutes=-30))), 27_000.0),
    ],
)
def test_a_verb_takes_its_time_as_seconds_or_as_an_aware_datetime(
    session: Session, clock: FakeClock, at: Any, seconds: float
) -> None:
    task = saved(session)
    readings = clock.readings
    task.start(at=at)
    task.heartbeat(at=at)
    task.close("succeeded", at=at)
    task.deliver("delivered", at=at)
    session.commit()
    assert task.started_at == task.updated_at == task.ended_at == task.delivery_updated_at == seconds
    assert clock.readings == readings


@pytest.mark.parametrize("now", [math.nan, math.inf, None, True, 10**400])
def test_a_sessions_clock_that_is_not_finite_is_invalid_input(session: Session, clock: FakeClock, now: Any) -> None:
    task = saved(session)
    clock.now = now
    with pytest.raises(InvalidInput):
        task.start()
    session.add(Task())
    with pytest.raises(InvalidInput):
        session.flush()


def test_without_a_clock_of_the_sessions_the_systems_is_read(engine: Engine) -> None:
    with Session(engine) as session:
        before = datetime.now(UTC).timestamp()
        task = saved(session)
        assert before <= task.created_at <= datetime.now(UTC).timestamp()


def test_what_is_rolled_back_leaves_neither_row_nor_event(session: Session, path: Path) -> None:
    task = saved(session)
    before = rows(path)
    task.start()
    session.flush()
    task.close("succeeded")
    session.add(Task())
    session.flush()
    session.rollback()
    assert rows(path) == before
    assert (task.status, task.version, len(task.events)) == (TaskStatus.QUEUED, 0, 1)
    task.start()
    session.commit()
    assert (task.version, len(task.events)) == (1, 2)
    assert healthy(path)


def test_a_nested_transaction_rolled_back_takes_its_verbs_along(session: Session, path: Path) -> None:
    task = saved(session)
    task.start()
    with session.begin_nested() as nested:
        task.close("failed", "worker_failed")
        session.flush()
        nested.rollback()
    assert (task.status, task.version, task.terminal_code) == (TaskStatus.RUNNING, 1, None)
    with session.begin_nested():
        task.close("succeeded", "completed")
    session.commit()
    assert [row[3] for row in chain(task)] == ["queued", "running", "succeeded"]
    assert task.version == 2
    assert healthy(path)


def test_the_business_row_and_the_ledger_row_commit_or_roll_back_together(engine: Engine, clock: FakeClock) -> None:
    orders = sa.Table("orders", sa.MetaData(), sa.Column("task_id", sa.ForeignKey(Task.id), primary_key=True))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (task_id TEXT PRIMARY KEY REFERENCES tsg_tasks (id))")
    counts = sa.select(
        sa.select(sa.func.count()).select_from(orders).scalar_subquery(),
        sa.select(sa.func.count()).select_from(Task).scalar_subquery(),
        sa.select(sa.func.count()).select_from(TaskEvent).scalar_subquery(),
    )
    with Session(engine, info={"tsg_clock": clock}) as session:
        for end, expected in ((session.rollback, (0, 0, 0)), (session.commit, (1, 1, 1))):
            task = Task()
            session.add(task)
            session.flush()
            session.execute(orders.insert().values(task_id=task.id))
            end()
            assert session.execute(counts).one() == expected


@pytest.mark.parametrize(
    "verb", [lambda task: task.heartbeat(), lambda task: task.close("failed")], ids=["beat", "end"]
)
def test_of_two_sessions_the_second_to_flush_finds_its_data_stale(
    open_session: Callable[[], Session], session: Session, path: Path, verb: Callable[[Task], object]
) -> None:
    task = saved(session)
    task.start()
    session.commit()
    first, second = open_session(), open_session()
    mine, theirs = first.get_one(Task, task.id), second.get_one(Task, task.id)
    session.close()
    mine.heartbeat()
    first.commit()
    before = rows(path)
    verb(theirs)
    with pytest.raises(StaleDataError):
        second.flush()
    second.rollback()
    assert rows(path) == before
    assert healthy(path)


def test_of_two_sessions_that_end_a_task_one_writes_its_event(
    open_session: Callable[[], Session], session: Session, path: Path
) -> None:
    task = saved(session)
    first, second = open_session(), open_session()
    mine, theirs = first.get_one(Task, task.id), second.get_one(Task, task.id)
    session.close()
    mine.close("succeeded")
    first.commit()
    theirs.close("failed")
    with pytest.raises((StaleDataError, IntegrityError)):
        second.commit()
    second.rollback()
    assert [row[3] for row in chain(theirs)] == ["queued", "succeeded"]
    with pytest.raises(StateConflict):
        theirs.close("failed")
    assert healthy(path)


def test_a_verb_on_a_detached_object_is_refused_and_leaves_it_fit_to_merge(
    session: Session, open_session: Callable[[], Session]
) -> None:
    task = saved(session)
    session.refresh(task)
    session.expunge(task)
    for call in (task.start, lambda: task.close("failed"), lambda: setattr(task, "status", "running")):
        with pytest.raises(StateConflict):
            call()
    merged = open_session().merge(task)
    assert (merged.status, merged.version) == (TaskStatus.QUEUED, 0)
    merged.start()


def test_merging_an_unchanged_object_changes_nothing(
    session: Session, open_session: Callable[[], Session], path: Path
) -> None:
    task = saved(session)
    session.refresh(task)
    session.expunge(task)
    before = rows(path)
    other = open_session()
    assert other.merge(task).id == task.id
    other.commit()
    assert rows(path) == before


CHANGES: dict[str, Callable[[Task], object]] = {
    "status": lambda task: set_committed_value(task, "status", TaskStatus.SUCCEEDED),
    "a running status": lambda task: set_committed_value(task, "status", TaskStatus.RUNNING),
    "delivery_status": lambda task: set_committed_value(task, "delivery_status", DeliveryStatus.DELIVERED),
    "timeout_seconds": lambda task: set_committed_value(task, "timeout_seconds", 5.0),
    "created_at": lambda task: vars(task).update(created_at=5.0),
    "terminal_code": lambda task: vars(task).update(terminal_code="completed"),
    "version": lambda task: set_committed_value(task, "version", 7),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_merging_an_object_that_was_changed_while_detached_is_refused(
    session: Session, open_session: Callable[[], Session], path: Path, change: Callable[[Task], object]
) -> None:
    task = saved(session)
    session.refresh(task)
    session.expunge(task)
    change(task)
    before = rows(path)
    other = open_session()
    with pytest.raises((StateConflict, StaleDataError)):
        other.merge(task)
    other.rollback()
    assert rows(path) == before


def test_merging_an_object_made_anew_with_an_id_that_exists_is_refused(
    session: Session, open_session: Callable[[], Session], path: Path
) -> None:
    identifier = saved(session).id
    before = rows(path)
    other = open_session()
    again = Task(id=identifier, timeout_seconds=5)
    with pytest.raises(StateConflict):
        other.merge(again)
    other.rollback()
    assert rows(path) == before


def test_an_object_that_missed_a_transition_does_not_merge(
    session: Session, open_session: Callable[[], Session], path: Path
) -> None:
    task = saved(session)
    session.refresh(task)
    session.expunge(task)
    session.get_one(Task, task.id).start()
    session.commit()
    before = rows(path)
    other = open_session()
    with pytest.raises((StateConflict, StaleDataError)):
        other.merge(task)
    other.rollback()
    assert rows(path) == before


def test_a_parent_may_be_an_object_that_is_saved_along(session: Session, path: Path) -> None:
    grandchild = Task(parent=Task(parent=Task()))
    session.add(grandchild)
    session.commit()
    assert grandchild.parent is not None
    assert grandchild.parent.parent is not None
    assert grandchild.parent_id == grandchild.parent.id
    assert grandchild.parent.parent.parent_id is None
    assert healthy(path)


@pytest.mark.parametrize("written", [str, str.upper, uuid.UUID])
def test_a_parent_may_be_named_by_its_id(session: Session, written: Callable[[str], object]) -> None:
    parent = saved(session)
    child = saved(session, parent_id=written(parent.id))
    assert child.parent is parent
    assert child.parent_id == parent.id


def test_a_parent_named_by_its_id_may_be_saved_along(session: Session, path: Path) -> None:
    parent = Task()
    child = Task(parent_id=parent.id)
    session.add_all([parent, child])
    session.commit()
    assert child.parent is parent
    assert healthy(path)


@pytest.mark.parametrize("fields", [{"parent_id": OTHER}, {"id": ID, "parent_id": ID}], ids=["missing", "itself"])
def test_a_missing_parent_is_not_found_when_the_child_is_flushed(
    session: Session, path: Path, fields: dict[str, Any]
) -> None:
    session.add(Task(**fields))
    with pytest.raises(TaskNotFound):
        session.flush()
    session.rollback()
    assert rows(path) == ([], [])


@pytest.mark.parametrize("flushed", [True, False], ids=["flushed", "in the same flush"])
@pytest.mark.parametrize(
    "live",
    [
        lambda parent: parent.start(at=2_000.0),
        lambda parent: (parent.start(), parent.heartbeat(at=2_000.0)),
        lambda parent: parent.close("failed", at=2_000.0),
        lambda parent: (parent.close("failed"), parent.deliver("failed", at=2_000.0)),
    ],
    ids=["started", "beaten", "ended", "delivered"],
)
@pytest.mark.parametrize("by", ["object", "id"])
def test_a_child_is_not_older_than_any_time_of_its_parent(
    session: Session, clock: FakeClock, path: Path, live: Callable[[Task], object], flushed: bool, by: str
) -> None:
    parent = saved(session)
    live(parent)
    if flushed:
        session.commit()
    clock.now = 1_999.0
    session.add(Task(parent=parent) if by == "object" else Task(parent_id=parent.id))
    with pytest.raises(StateConflict):
        session.flush()
    session.rollback()
    clock.now = 2_000.0
    if not flushed:
        live(parent)
    session.add(Task(parent=parent) if by == "object" else Task(parent_id=parent.id))
    session.commit()
    assert healthy(path)


def test_deleting_a_task_takes_its_events_along(session: Session, path: Path) -> None:
    kept, gone = saved(session), saved(session)
    gone.start()
    session.commit()
    session.delete(gone)
    session.commit()
    tasks, events = rows(path)
    assert [row[1] for row in tasks] == [kept.id]
    assert len(events) == 1
    assert healthy(path)


def test_an_event_is_not_deleted_through_the_session_while_its_task_exists(session: Session, path: Path) -> None:
    task = saved(session)
    before = rows(path)
    session.delete(task.events[0])
    with pytest.raises(IntegrityError):
        session.flush()
    session.rollback()
    assert rows(path) == before


def autocommitting_engine(path: Path) -> Engine:
    return sa.create_engine(f"sqlite:///{path}", poolclass=NullPool, isolation_level="AUTOCOMMIT")


def autocommitting_option(path: Path) -> Engine:
    return sa.create_engine(f"sqlite:///{path}", poolclass=NullPool).execution_options(isolation_level="AUTOCOMMIT")


def started_and_flushed(task: Task, session: Session) -> None:
    task.start()
    session.flush()


@pytest.mark.parametrize("make", [autocommitting_engine, autocommitting_option], ids=["engine", "execution option"])
def test_a_verb_in_autocommit_is_refused(
    session: Session, path: Path, make: Callable[[Path], Engine], clock: FakeClock
) -> None:
    identifier = saved(session).id
    session.close()
    before = rows(path)
    engine = make(path)
    try:
        with Session(engine, info={"tsg_clock": clock}) as unsafe:
            task = unsafe.get_one(Task, identifier)
            with pytest.raises(StateConflict):
                started_and_flushed(task, unsafe)
    finally:
        engine.dispose()
    assert rows(path) == before


def test_a_session_whose_connection_is_in_autocommit_refuses_verbs_too(
    session: Session, path: Path, engine: Engine, clock: FakeClock
) -> None:
    identifier = saved(session).id
    session.close()
    before = rows(path)
    with Session(engine, info={"tsg_clock": clock}) as unsafe:
        unsafe.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        task = unsafe.get_one(Task, identifier)
        with pytest.raises(StateConflict):
            started_and_flushed(task, unsafe)
    assert rows(path) == before


def test_the_models_stand_on_a_metadata_of_their_own_where_everything_is_named() -> None:
    assert set(Base.metadata.tables) == {"tsg_tasks", "tsg_task_events"}
    for table in Base.metadata.tables.values():
        for element in (*table.constraints, *table.indexes):
            assert element.name
