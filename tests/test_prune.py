"""Prune: what nobody waits for goes, whole trees with all their events, and nothing else, whatever comes meanwhile."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tsg.ledger
from tests.conftest import FakeClock, database, emptied, raw, snapshot
from tests.conftest import tsg as command
from tests.test_batches import Broken, Place, after, breaking, contents, damage, engine_of
from tests.test_both_databases import lifted, looking
from tests.test_cli import call
from tests.test_concurrency import named, processes
from tests.test_reconcile import damage as damage_file
from tsg import InvalidInput, Ledger, StateConflict, TaskNotFound
from tsg.tables import task_events, tasks

KEYS = (
    "dry_run",
    "applied",
    "closed_examined",
    "tasks_pruned",
    "events_pruned",
    "recent_retained",
    "parents_retained",
    "conflicts_skipped",
    "batches",
)


@pytest.fixture(scope="module", autouse=True)
def without_pauses() -> Iterator[None]:
    """Nobody waits for the lock here."""
    with pytest.MonkeyPatch.context() as patch:
        still = SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=lambda: 0.0)
        patch.setattr(tsg.ledger, "_LEAST_PAUSE_SECONDS", 0.0)
        patch.setattr(tsg.ledger, "time", still)
        yield


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest) -> Place:
    """An empty ledger on either database; other than conftest's, with none made for each test."""
    if request.param == "postgresql":
        with looking(request.getfixturevalue("server_at_head")) as engine, engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE IF EXISTS orders")
    return emptied(request, request.param)


@pytest.fixture
def both(target: Place, clock: FakeClock) -> Iterator[Ledger]:
    with Ledger(target, clock=clock) as ledger:
        yield ledger


def counts(**changed: int) -> dict[str, Any]:
    return {**dict.fromkeys(KEYS, 0), "dry_run": False, "applied": True, **changed}


def as_run(preview: Any) -> dict[str, Any]:
    assert (preview["dry_run"], preview["applied"]) == (True, False)
    return {**preview, "dry_run": False, "applied": True}


def closed(
    ledger: Ledger, clock: FakeClock, at: float, parent: str | None = None, *, start: bool = True, **fields: Any
) -> str:
    """A task that ended at this time, with its delivery closed."""
    clock.now = at
    task = ledger.create_task(parent_id=parent, **fields).id
    if start:
        ledger.start_task(task)
    ledger.close_task(task, "succeeded")
    ledger.set_delivery(task, "delivered" if fields.get("delivery_required", True) else "not_applicable")
    return task


def there(target: Place) -> set[str]:
    with engine_of(target) as engine, engine.connect() as connection:
        return set(connection.execute(sa.select(tasks.c.id)).scalars())


def orphaned_events(target: Place) -> int:
    with engine_of(target) as engine, engine.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT count(*) FROM tsg_task_events WHERE task_pk NOT IN (SELECT pk FROM tsg_tasks)"
        )
        return int(found.scalar_one())


def adds_up(report: Any) -> bool:
    parts = ("tasks_pruned", "recent_retained", "parents_retained", "conflicts_skipped")
    return bool(report["closed_examined"] == sum(report[part] for part in parts))


# -- what goes ---------------------------------------------------------------------------------------------


def test_only_what_has_ended_and_is_delivered_goes(both: Ledger, target: Place, clock: FakeClock) -> None:
    clock.now = 1000
    queued = both.create_task().id
    running = both.create_task(timeout_seconds=1).id
    both.start_task(running)
    pending = both.create_task().id
    both.close_task(pending, "failed")
    internal_pending = both.create_task(delivery_required=False).id
    both.close_task(internal_pending, "cancelled")
    gone = [
        closed(both, clock, 1000),
        closed(both, clock, 1000, start=False),
        closed(both, clock, 1000, delivery_required=False),
        closed(both, clock, 1000, timeout_seconds=5, expects_heartbeat=False),
    ]
    clock.now = 1e9
    expected = counts(closed_examined=4, tasks_pruned=4, events_pruned=4 + 3 + 4 + 4, batches=1)
    preview = both.prune(0, dry_run=True)
    assert tuple(preview) == KEYS
    assert as_run(preview) == expected
    report = both.prune(0)
    assert tuple(report) == KEYS
    assert report == expected
    assert there(target) == {queued, running, pending, internal_pending}
    for task in gone:
        with pytest.raises(TaskNotFound):
            both.get_task(task)
    assert orphaned_events(target) == 0
    found = both.doctor()
    assert (found["healthy"], found["task_count"], found["event_count"]) == (True, 4, 1 + 2 + 2 + 2)
    assert both.prune(0) == counts()


@pytest.mark.parametrize(("now", "goes"), [(1109.999, False), (1110.0, True), (1110.001, True)])
def test_it_is_old_enough_from_the_very_moment_on(both: Ledger, clock: FakeClock, now: float, goes: bool) -> None:
    clock.now = 1000
    task = both.create_task().id
    both.close_task(task, "succeeded")
    clock.now = 1010
    both.set_delivery(task, "delivered")
    clock.now = now
    report = both.prune(100)
    assert (report["tasks_pruned"], report["recent_retained"]) == ((1, 0) if goes else (0, 1))


def test_what_counts_is_when_the_delivery_closed(both: Ledger, target: Place, clock: FakeClock) -> None:
    clock.now = 1000
    late = both.create_task().id
    both.close_task(late, "succeeded")
    early = closed(both, clock, 1000)
    clock.now = 5000
    both.set_delivery(late, "failed")
    clock.now = 5100
    assert both.prune(1000) == counts(closed_examined=2, tasks_pruned=1, events_pruned=4, recent_retained=1, batches=1)
    assert there(target) == {late}
    assert early not in there(target)


def test_an_age_may_be_text_or_bytes_or_larger_than_any_history(both: Ledger, clock: FakeClock) -> None:
    closed(both, clock, 1000)
    clock.now = 1100
    for age in ("101", b"101", 1e300, 1.7e308, 101):
        assert both.prune(age)["recent_retained"] == 1  # type: ignore[arg-type]
    assert both.prune("100")["tasks_pruned"] == 1  # type: ignore[arg-type]


def test_a_time_of_the_future_is_recent(both: Ledger, clock: FakeClock) -> None:
    closed(both, clock, 9000)
    clock.now = 1000
    assert both.prune(0) == counts(closed_examined=1, recent_retained=1)


# -- trees -------------------------------------------------------------------------------------------------


class Node(NamedTuple):
    parent: int | None
    state: str


nodes = st.lists(
    st.builds(
        Node,
        parent=st.one_of(st.none(), st.integers(0, 30)),
        state=st.sampled_from(["old"] * 6 + ["old internal", "recent", "queued", "running", "pending"]),
    ),
    min_size=1,
    max_size=14,
)


def left_by(tree: list[Node]) -> set[int]:
    """What stays, by the words of the contract: what may not go, and all that is above it."""
    parents = {at: node.parent % at for at, node in enumerate(tree) if at and node.parent is not None}
    stays: set[int] = set()
    for at, node in enumerate(tree):
        above: int | None = at if not node.state.startswith("old") else None
        while above is not None:
            stays.add(above)
            above = parents.get(above)
    return stays


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def wood(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ledger, FakeClock, sa.Engine]]:
    """A ledger for many trees, one after the other."""
    clock = FakeClock()
    with ExitStack() as stack:
        where: Place
        if request.param == "sqlite":
            folder = tmp_path_factory.mktemp("wood", numbered=True)
            folder.chmod(0o700)
            where = folder / "ledger.sqlite"
        else:
            server, template = map(request.getfixturevalue, ("postgresql_server", "postgresql_template"))
            where = stack.enter_context(database(server, f"tsg_{uuid.uuid4().hex}", template=template))
        ledger = stack.enter_context(Ledger(where, clock=clock))
        yield ledger, clock, stack.enter_context(engine_of(where))


def rows_of(tree: list[Node]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of a tree and their events, as the verbs would have left them."""
    rows, events = [], []
    for at, node in enumerate(tree):
        recent = 5000.0 if node.state == "recent" else 1000.0
        ended = node.state in ("old", "old internal", "recent", "pending")
        over = ended and node.state != "pending"
        internal = node.state == "old internal"
        started = None if node.state in ("queued", "old internal") else 1000.0
        delivery = "not_applicable" if internal else "delivered"
        rows.append(
            {
                "pk": at + 1,
                "id": str(uuid.UUID(int=at)),
                "parent_id": None if node.parent is None or not at else str(uuid.UUID(int=node.parent % at)),
                "status": "succeeded" if ended else ("running" if started else "queued"),
                "delivery_status": delivery if over else "pending",
                "delivery_required": not internal,
                "expects_heartbeat": True,
                "created_at": 1000.0,
                "started_at": started,
                "updated_at": 1000.0,
                "ended_at": 1000.0 if ended else None,
                "delivery_updated_at": recent if over else 1000.0,
                "version": (started is not None) + ended + over,
            }
        )
        chain: list[tuple[Any, ...]] = [("created", None, "queued", 1000.0, "created")]
        if started is not None:
            chain.append(("task_transition", "queued", "running", 1000.0, "started"))
        if ended:
            chain.append(("task_transition", "running" if started else "queued", "succeeded", 1000.0, None))
        if over:
            chain.append(("delivery_transition", "pending", delivery, recent, None))
        names = ("kind", "from_status", "to_status", "occurred_at", "code")
        events += [
            {"task_pk": at + 1, "number": number, **dict(zip(names, event, strict=True))}
            for number, event in enumerate(chain)
        ]
    return rows, events


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(tree=nodes, size=st.sampled_from([1, 2, 3, 5, 5000]))
def test_from_any_trees_just_that_goes_below_which_nothing_stays(
    wood: tuple[Ledger, FakeClock, sa.Engine], tree: list[Node], size: int
) -> None:
    ledger, clock, engine = wood
    rows, events = rows_of(tree)
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM tsg_tasks")
        connection.execute(sa.insert(tasks), rows)
        connection.execute(sa.insert(task_events), events)
    clock.now = 5500
    stays = left_by(tree)
    old = [at for at, node in enumerate(tree) if node.state.startswith("old")]
    gone = set(range(len(tree))) - stays
    preview = ledger.prune(1000, size, dry_run=True)
    report = ledger.prune(1000, size)
    assert report == counts(
        closed_examined=len(old) + sum(node.state == "recent" for node in tree),
        tasks_pruned=len(gone),
        events_pruned=sum(event["task_pk"] - 1 in gone for event in events),
        recent_retained=sum(node.state == "recent" for node in tree),
        parents_retained=len(set(old) & stays),
        batches=-(-len(gone) // size),
    )
    assert as_run(preview) == report
    assert adds_up(report)
    with engine.connect() as connection:
        assert set(connection.execute(sa.select(tasks.c.id)).scalars()) == {str(uuid.UUID(int=at)) for at in stays}
        kept = connection.execute(sa.select(task_events.c.task_pk).order_by(*task_events.primary_key)).scalars()
        assert list(kept) == sorted(event["task_pk"] for event in events if event["task_pk"] - 1 in stays)
    assert ledger.doctor()["healthy"]


def chain_of(engine: sa.Engine, depth: int, bottom: str = "old") -> None:
    tree = [Node(None if not at else at - 1, "old") for at in range(depth - 1)]
    rows, events = rows_of([*tree, Node(depth - 2, bottom)])
    with engine.begin() as connection:
        connection.execute(sa.insert(tasks), rows)
        connection.execute(sa.insert(task_events), events)


@pytest.mark.parametrize("size", [1, 7, 5000])
def test_a_chain_of_three_hundred_goes_whole_or_stays_whole(
    both: Ledger, target: Place, clock: FakeClock, size: int
) -> None:
    clock.now = 1e6
    with engine_of(target) as engine:
        chain_of(engine, 300, "pending")
        expected = counts(closed_examined=299, parents_retained=299)
        assert as_run(both.prune(0, size, dry_run=True)) == both.prune(0, size) == expected
        assert len(there(target)) == 300
        with engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM tsg_tasks")
        chain_of(engine, 300)
    expected = counts(closed_examined=300, tasks_pruned=300, events_pruned=1200, batches=-(-300 // size))
    assert as_run(both.prune(0, size, dry_run=True)) == both.prune(0, size) == expected
    assert there(target) == set()
    assert orphaned_events(target) == 0
    assert both.doctor()["healthy"]


def test_a_tree_goes_in_batches_with_its_children_first(both: Ledger, target: Place, clock: FakeClock) -> None:
    top = closed(both, clock, 1000)
    children = [closed(both, clock, 1001 + at, top) for at in range(3)]
    grandchildren = [closed(both, clock, 1010, child) for child in children]
    clock.now = 5000
    left: list[set[str]] = []
    report = both.prune(0, 3, progress=lambda done, total: left.append(there(target)))
    assert left == [{top, *children}, {top}, set()]
    assert not {top, *children, *grandchildren} & there(target)
    assert (report["tasks_pruned"], report["batches"]) == (7, 3)


# -- what can't be trusted stays ---------------------------------------------------------------------------

DAMAGE = (
    "terminal_code = 'worker_failed'",
    "delivery_code = 'internal_task'",
    "version = 7, expects_heartbeat = false, timeout_seconds = NULL",
    "started_at = NULL",
    "payload_hash = 'x'",
    "updated_at = 1001",
)


@pytest.mark.parametrize("harm", DAMAGE)
def test_a_row_that_breaks_a_rule_stays_and_its_parents_too(
    both: Ledger, target: Place, clock: FakeClock, harm: str
) -> None:
    top = closed(both, clock, 1000)
    bad = closed(both, clock, 1000, top)
    below = closed(both, clock, 1000, bad)
    other = closed(both, clock, 1000)
    damage(target, bad, harm)
    clock.now = 5000
    preview = both.prune(0, dry_run=True)
    report = both.prune(0)
    assert as_run(preview) == report
    assert report == counts(
        closed_examined=4, tasks_pruned=2, events_pruned=8, parents_retained=1, conflicts_skipped=1, batches=1
    )
    assert there(target) == {top, bad}
    assert not {below, other} & there(target)
    assert both.prune(0) == counts(closed_examined=2, parents_retained=1, conflicts_skipped=1)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4])
def test_a_chain_with_an_event_missing_or_too_many_stays(
    both: Ledger, target: Place, clock: FakeClock, number: int
) -> None:
    bad, other = closed(both, clock, 1000), closed(both, clock, 1000)
    statement = (
        f"DELETE FROM tsg_task_events WHERE number = {number} AND task_pk = (SELECT pk FROM tsg_tasks WHERE id = "
    )
    if number == 4:
        statement = (
            "INSERT INTO tsg_task_events SELECT pk, 4, 'delivery_transition', 'pending', 'delivered', 1000.0, NULL "
            "FROM tsg_tasks WHERE id = "
        )
    if isinstance(target, sa.URL):
        with engine_of(target) as engine, lifted(engine) as connection:
            connection.execute(sa.text(statement + ":id" + ")" * (number < 4)), {"id": uuid.UUID(bad)})
    else:
        damage_file(target, statement + "?" + ")" * (number < 4), bad)
    clock.now = 5000
    preview = both.prune(0, dry_run=True)
    report = both.prune(0)
    assert as_run(preview) == report
    assert report == counts(closed_examined=2, tasks_pruned=1, events_pruned=4, conflicts_skipped=1, batches=1)
    assert there(target) == {bad}
    assert other not in there(target)


# -- what happens meanwhile --------------------------------------------------------------------------------


def test_a_child_that_comes_between_batches_keeps_all_that_is_above_it(
    both: Ledger, target: Place, clock: FakeClock
) -> None:
    top = closed(both, clock, 1000)
    middle = closed(both, clock, 1000, top)
    bottom = closed(both, clock, 1000, middle)
    others = [closed(both, clock, 1000) for _ in range(3)]
    clock.now = 5000
    made: list[str] = []
    with Ledger(target, clock=clock) as other:
        report = both.prune(0, 2, progress=after(1, lambda: made.append(other.create_task(parent_id=bottom).id)))
    assert there(target) == {top, middle, bottom, *made}
    assert not set(others) & there(target)
    assert report == counts(closed_examined=6, tasks_pruned=3, events_pruned=12, parents_retained=3, batches=3)
    assert both.doctor()["healthy"]


def test_a_child_of_one_that_has_gone_finds_no_parent(both: Ledger, target: Place, clock: FakeClock) -> None:
    tasks_made = [closed(both, clock, 1000) for _ in range(4)]
    clock.now = 5000
    refused: list[type[Exception]] = []

    def create() -> None:
        with Ledger(target, clock=clock) as other:
            try:
                other.create_task(parent_id=tasks_made[3])
            except TaskNotFound as error:
                refused.append(type(error))

    assert both.prune(0, 2, progress=after(1, create))["tasks_pruned"] == 4
    assert refused == [TaskNotFound]


def test_two_prunes_at_once_never_take_what_was_made_since(both: Ledger, target: Place, clock: FakeClock) -> None:
    for _ in range(10):
        closed(both, clock, 1000)
    clock.now = 5000
    made: list[str] = []

    def prune_and_make() -> None:
        with Ledger(target, clock=clock) as other:
            assert other.prune(0)["tasks_pruned"] == 5
            for _ in range(4):
                made.append(other.create_task().id)
                other.start_task(made[-1])

    report = both.prune(0, 5, progress=after(1, prune_and_make))
    assert there(target) == set(made)
    assert {both.get_task(task).status for task in made} == {"running"}
    assert report["tasks_pruned"] == 5
    assert both.doctor()["healthy"]


def test_the_same_key_of_a_task_closed_since_is_not_old_enough(both: Ledger, target: Place, clock: FakeClock) -> None:
    for _ in range(6):
        closed(both, clock, 1000)
    made: list[str] = []

    def prune_and_close() -> None:
        with Ledger(target, clock=clock) as other:
            other.prune(1000)
            made.extend(closed(other, clock, 5000.0) for _ in range(3))

    clock.now = 5000
    both.prune(1000, 3, progress=after(1, prune_and_close))
    assert there(target) == set(made)


def test_what_has_gone_stays_gone_when_a_run_breaks_off(both: Ledger, target: Place, clock: FakeClock) -> None:
    made = [closed(both, clock, 1000) for _ in range(6)]
    clock.now = 5000
    with pytest.raises(Broken):
        both.prune(0, 2, progress=after(1, breaking))
    assert there(target) == set(made[:4])
    assert both.doctor()["healthy"]
    assert both.prune(0, 3)["tasks_pruned"] == 4
    assert there(target) == set()


def test_the_clock_is_read_once_however_many_batches_there_are(both: Ledger, clock: FakeClock) -> None:
    for _ in range(5):
        closed(both, clock, 1000)
    clock.now = 1100
    readings = clock.readings
    both.prune(100, 1, progress=lambda done, total: clock.advance(-500))
    assert clock.readings == readings + 1


def test_progress_tells_how_many_have_been_looked_at(both: Ledger, clock: FakeClock) -> None:
    for _ in range(5):
        closed(both, clock, 1000)
    clock.now = 5000
    told: list[tuple[int, int]] = []
    both.prune(0, 2, progress=lambda done, total: told.append((done, total)))
    assert told == [(2, 5), (4, 5), (5, 5)]


CREATING = """
def go(target, index, barrier, argument):
    ledger = Ledger(target, busy_timeout_ms=30_000)
    made = 0
    barrier.wait()
    if index < 2:
        for _ in range(6):
            ledger.prune(0, 7)
        return 0
    for turn in range(25):
        task = ledger.create_task().id
        ledger.start_task(task)
        ledger.close_task(task, "succeeded")
        if turn % 5 == 0:
            made += 1
            continue
        ledger.set_delivery(task, "delivered")
        try:
            ledger.create_task(parent_id=task)
            made += 2
        except TaskNotFound:
            pass
    return made
"""


def test_while_two_processes_prune_two_others_lose_nothing_that_is_not_closed(both: Ledger, target: Place) -> None:
    found = processes(target, 4, CREATING)
    assert len(there(target)) == sum(found)
    assert both.doctor()["healthy"]


# -- what refers to a task ---------------------------------------------------------------------------------


def referring(engine: sa.Engine, task: str, more: str = "") -> None:
    kind = "uuid" if engine.dialect.name == "postgresql" else "varchar(36)"
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"CREATE TABLE orders (id integer PRIMARY KEY, task_id {kind} REFERENCES tsg_tasks (id) {more})"
        )
        connection.exec_driver_sql(f"INSERT INTO orders VALUES (1, '{task}')")


def test_a_table_of_the_applications_keeps_the_task_that_it_refers_to(
    both: Ledger, target: Place, clock: FakeClock
) -> None:
    made = [closed(both, clock, 1000) for _ in range(6)]
    clock.now = 5000
    with engine_of(target) as engine:
        referring(engine, made[2])
    before = contents(target)
    with pytest.raises(StateConflict) as caught:
        both.prune(0, 2)
    assert made[2] not in str(caught.value)
    assert caught.value.__cause__ is None
    assert there(target) == set(made[:4])
    kept = [[row for row in part if any(task in row for task in made[:4])] for part in before]
    assert list(contents(target)) == kept
    assert both.doctor()["healthy"]
    with engine_of(target) as engine, engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM orders")
    assert both.prune(0, 2)["tasks_pruned"] == 4


def test_a_reference_that_lets_go_is_let_go(both: Ledger, target: Place, clock: FakeClock) -> None:
    task = closed(both, clock, 1000)
    clock.now = 5000
    with engine_of(target) as engine:
        referring(engine, task, "ON DELETE SET NULL")
        assert both.prune(0)["tasks_pruned"] == 1
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SELECT task_id FROM orders").scalars().all() == [None]


def test_on_an_applications_engine_it_is_the_same(host_engine: sa.Engine, target: Place, clock: FakeClock) -> None:
    ledger = Ledger(host_engine, clock=clock)
    top = closed(ledger, clock, 1000)
    child = closed(ledger, clock, 1000, top)
    other = closed(ledger, clock, 1000)
    waiting = ledger.create_task(parent_id=other).id
    clock.now = 5000
    assert ledger.prune(0, 1) == counts(
        closed_examined=3, tasks_pruned=2, events_pruned=8, parents_retained=1, batches=2
    )
    assert there(target) == {other, waiting}
    assert child not in there(target)
    assert orphaned_events(target) == 0
    assert ledger.doctor()["healthy"]


# -- looking only ------------------------------------------------------------------------------------------


def test_a_dry_run_writes_nothing(both: Ledger, target: Place, clock: FakeClock) -> None:
    for _ in range(3):
        closed(both, clock, 1000)
    clock.now = 5000
    before = contents(target)
    called: list[object] = []
    preview = both.prune(0, 2, dry_run=True, progress=lambda done, total: called.append(done))
    assert contents(target) == before
    assert (preview["tasks_pruned"], preview["batches"]) == (3, 2)
    assert both.prune(0, 2) == as_run(preview)


def test_a_ledger_that_is_only_read_is_looked_at_and_nothing_goes(
    both: Ledger, target: Place, clock: FakeClock
) -> None:
    for _ in range(3):
        closed(both, clock, 1000)
    both.close()
    clock.now = 5000
    before = contents(target)
    with Ledger(target, clock=clock, read_only=True) as reader:
        assert reader.prune(0, 2, dry_run=True)["tasks_pruned"] == 3
        with pytest.raises(StateConflict):
            reader.prune(0)
    assert contents(target) == before


def test_a_closed_file_that_is_only_read_stays_as_it_was_to_the_byte(
    path: Path, folder: Path, clock: FakeClock
) -> None:
    with Ledger(path, clock=clock) as ledger:
        for _ in range(3):
            closed(ledger, clock, 1000)
    before = snapshot(folder)
    clock.now = 5000
    with Ledger(path, clock=clock, read_only=True) as reader:
        assert reader.prune(0, dry_run=True)["events_pruned"] == 12
    answer = call("--db", path, "prune", "--older-than", "0", "--dry-run")
    assert (answer.status, answer.json["prune"]["tasks_pruned"]) == (0, 3)
    assert snapshot(folder) == before


def test_an_older_schema_can_be_looked_at_too(legacy: Callable[[str], Path], folder: Path) -> None:
    old = legacy("v2")
    before = snapshot(folder)
    with Ledger(old, read_only=True) as reader:
        report = reader.prune(0, dry_run=True)
    assert adds_up(report)
    assert report["tasks_pruned"] > 0
    assert snapshot(folder) == before


def test_a_file_keeps_its_size_and_its_room_is_used_again(path: Path, ledger: Ledger, clock: FakeClock) -> None:
    for _ in range(150):
        closed(ledger, clock, 1000, payload_hash="0123456789abcdef" * 4)
    clock.now = 5000
    watcher = raw(path)
    pages = watcher.execute("PRAGMA page_count").fetchone()[0]
    assert ledger.prune(0)["tasks_pruned"] == 150
    assert watcher.execute("PRAGMA page_count").fetchone()[0] == pages
    assert watcher.execute("PRAGMA freelist_count").fetchone()[0] > pages // 2
    watcher.close()


# -- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "age", [-1, -1e-9, math.nan, math.inf, -math.inf, "abc", "", None, True, False, [], 10**400, "1e400"], ids=repr
)
def test_an_age_is_a_finite_number_that_is_not_negative(
    both: Ledger, target: Place, clock: FakeClock, age: Any
) -> None:
    closed(both, clock, 1000)
    clock.now = 5000
    before, readings = contents(target), clock.readings
    for dry_run in (True, False):
        with pytest.raises(InvalidInput):
            both.prune(age, dry_run=dry_run)
    assert contents(target) == before
    assert clock.readings == readings


@pytest.mark.parametrize(
    "options",
    [
        *({"batch_size": size} for size in (0, -1, True, "5", 1.5, 2**31, None)),
        *({"dry_run": flag} for flag in (0, 1, None, "yes")),
        *({"progress": wrong} for wrong in (5, "x", 1.5)),
    ],
    ids=str,
)
def test_a_malformed_option_is_refused_and_nothing_goes(
    both: Ledger, target: Place, clock: FakeClock, options: dict[str, Any]
) -> None:
    closed(both, clock, 1000)
    clock.now = 5000
    before, readings = contents(target), clock.readings
    with pytest.raises(InvalidInput):
        both.prune(0, **options)
    assert contents(target) == before
    assert clock.readings == readings


def test_a_clock_that_gives_no_time_lets_nothing_go(both: Ledger, target: Place, clock: FakeClock) -> None:
    closed(both, clock, 1000)
    before = contents(target)
    for now in (math.nan, None, True, "soon"):
        clock.now = now
        for dry_run in (True, False):
            with pytest.raises(InvalidInput):
                both.prune(0, dry_run=dry_run)
    assert contents(target) == before


# -- at the command line -----------------------------------------------------------------------------------


def test_the_command_lets_go_and_tells_how_much(both: Ledger, target: Place, clock: FakeClock) -> None:
    for _ in range(3):
        closed(both, clock, 1000)
    both.create_task()
    both.close()
    place = ("--db", named(target), "prune", "--older-than", "60", "--batch-size", "2")
    preview = call(*place, "--dry-run")
    assert preview.status == 0
    assert len(there(target)) == 4
    ran = call(*place)
    assert (ran.status, ran.json) == (
        0,
        {"ok": True, "prune": counts(closed_examined=3, tasks_pruned=3, events_pruned=12, batches=2)},
    )
    assert as_run(preview.json["prune"]) == ran.json["prune"]
    assert len(there(target)) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--older-than", "-1"),
        ("--older-than", "nan"),
        ("--older-than", "inf"),
        ("--older-than", "soon"),
        ("--older-than", ""),
        ("--older-than", "0", "--batch-size", "0"),
        ("--older-than", "0", "--batch-size", "many"),
        ("--older-than", "0", "--snapshot-limit-mib", "-1"),
        ("--older-than", "0", "more"),
    ],
    ids=" ".join,
)
def test_a_malformed_command_is_invalid_input_and_lets_nothing_go(
    ledger: Ledger, path: Path, clock: FakeClock, arguments: tuple[str, ...]
) -> None:
    closed(ledger, clock, 1000)
    ledger.close()
    before = contents(path)
    answer = call("--db", path, "prune", *arguments)
    assert (answer.status, answer.json) == (2, {"error": "InvalidInput", "ok": False})
    assert contents(path) == before


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--progress",)], ids=" ".join)
def test_the_command_makes_no_ledger(folder: Path, path: Path, more: tuple[str, ...]) -> None:
    answer = call("--db", path, "prune", "--older-than", "0", *more)
    assert (answer.status, answer.json) == (2, {"error": "InvalidInput", "ok": False})
    assert list(folder.iterdir()) == []


def test_the_command_in_a_process_of_its_own_is_the_same(ledger: Ledger, path: Path, clock: FakeClock) -> None:
    closed(ledger, clock, 1000)
    ledger.close()
    ran = command("--db", path, "prune", "--older-than", "0")
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b'"tasks_pruned":1' in ran.stdout
    refused = command("--db", path, "prune", "--older-than", "soon")
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, b'{"error":"InvalidInput","ok":false}\n', b"")
