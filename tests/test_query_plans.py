"""Query plans: what every statement of ours is found by, on either database, so that none grows with history unnoticed.

The statements are not listed here: they are asked of the modules that make them. One that is added later has no
expectation yet, and that fails.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.schema import CreateTable

from tests.conftest import FakeClock, database
from tsg import Ledger, doctor, listing, prune, reconcile, states, sweep, verbs
from tsg.records import creation
from tsg.states import DeliveryStatus, TaskStatus, Verb

PARENT = "11111111-1111-4111-8111-111111111111"
#: What a statement is given here; it only has to be of the right type.
SAMPLES: Final[dict[str, Any]] = {
    "now": 2e9,
    "stale_before": 2e9 - 600,
    "due_before": 2e9 - 600,
    "before": 2e9,
    "first": 1,
    "last": 5000,
    "parent": PARENT,
    "id": PARENT,
    "ids": [PARENT],
    "task_pk": 1,
    "seen_version": 1,
    "seen_status": "running",
    "seen_delivery_status": "pending",
    "new_status": "running",
    "new_delivery_status": "failed",
    "status": "queued",
    "delivery_status": "pending",
    "delivery_required": True,
    "expects_heartbeat": True,
    "new_expects_heartbeat": True,
    "number": 0,
    "kind": "created",
    "to_status": "queued",
    "version": 0,
    **dict.fromkeys(("created_at", "updated_at", "delivery_updated_at", "occurred_at"), 1000.0),
    **dict.fromkeys(("new_started_at", "new_updated_at", "new_ended_at", "new_delivery_updated_at"), 1000.0),
}


# -- every statement there is ------------------------------------------------------------------------------


def columns_written() -> list[tuple[str, ...]]:
    """The columns that each verb writes, told by the transition itself."""
    queued = creation(timeout_seconds=5)
    running = vars(queued) | {"status": TaskStatus.RUNNING, "started_at": 0.0}
    ended = running | {"status": TaskStatus.FAILED, "ended_at": 0.0}
    changes = (
        states.transition(queued, Verb.START, lambda: 1.0),
        states.transition(type(queued)(**running), Verb.HEARTBEAT, lambda: 1.0),
        states.transition(type(queued)(**running), Verb.CLOSE, lambda: 1.0, to=TaskStatus.FAILED),
        states.transition(type(queued)(**ended), Verb.DELIVER, lambda: 1.0, to=DeliveryStatus.FAILED),
    )
    return [tuple(change.values) for change in changes if change is not None]


#: What a function that makes statements may be called with, by the name of its parameter, on a database of this kind.
ARGUMENTS: Final[dict[str, Callable[[str], dict[str, Any]]]] = {
    "one_parent": lambda _: {"all": False, "one parent": True},
    "dialect": lambda dialect: {"": dialect},
    "columns": lambda _: {", ".join(columns): columns for columns in columns_written()},
}
MODULES: Final = (sweep, prune, doctor, verbs, reconcile)


def made_by(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every function of the module that makes something once and keeps it, as statements are."""
    for name, value in vars(module).items():
        if hasattr(value, "cache_info") and value.__module__ == module.__name__:
            yield name, value


def parts(name: str, made: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(made, tuple):
        names = getattr(made, "_fields", range(len(made)))
        for part, value in zip(names, made, strict=True):
            yield from parts(f"{name}.{part}".lstrip("."), value)
    elif isinstance(made, (sa.Select, sa.Insert, sa.Update, sa.Delete)):
        yield name, made


def statements(dialect: str) -> dict[str, Any]:
    """Every statement by a name: the module, how it was asked for, and where in the answer it was."""
    found: dict[str, Any] = {}
    for module in MODULES:
        short = module.__name__.removeprefix("tsg.")
        for name, function in made_by(module):
            choices = [ARGUMENTS[parameter](dialect).items() for parameter in inspect.signature(function).parameters]
            for chosen in itertools.product(*choices):
                for part, statement in parts("", function(*(value for _, value in chosen))):
                    words = (f"{short}.{name}", *(word for word, _ in chosen), part)
                    found[" ".join(filter(None, words))] = statement
        for name, value in vars(module).items():
            if isinstance(value, (sa.Select, sa.Insert, sa.Update, sa.Delete)):
                found[f"{short}.{name}"] = value
    return found


# -- what is meant -----------------------------------------------------------------------------------------

ACTIVE, PENDING, CHILDREN = "ix_tsg_tasks_active", "ix_tsg_tasks_delivery_pending", "ix_tsg_tasks_parent_id"
#: On both databases: a primary key, and the unique index of the ids.
KEY, ID = "key", "id"
TASKS, EVENTS, LISTED = "tsg_tasks", "tsg_task_events", "tsg_listed"
NOTHING: Final[set[str]] = set()
EVENTS_BY_KEY = f"search {EVENTS} {KEY}"
LISTED_BY_KEY = f"search {LISTED} {KEY}"
TASKS_BY_KEY = f"search {TASKS} {KEY}"
BY_ID = f"search {TASKS} {ID}"


def of_a_sweep(scope: str, dialect: str) -> dict[str, set[str]]:
    """What a sweep's statements are found by: the few rows not at rest, or the children of one; a list by its keys."""
    found: dict[str, set[str]] = {}
    for kind, index in (("stale", ACTIVE), ("due", PENDING)):
        rows = f"search {TASKS} {index if scope == 'all' else CHILDREN}"
        found |= {
            f"{kind}.total": {rows},
            f"{kind}.counts.found": {rows, EVENTS_BY_KEY},
            f"{kind}.counts.actionable": {rows, EVENTS_BY_KEY},
            f"{kind}.listing": {rows},
            f"{kind}.listed_counts.found": {TASKS_BY_KEY, LISTED_BY_KEY, EVENTS_BY_KEY},
            f"{kind}.listed_counts.actionable": {TASKS_BY_KEY, LISTED_BY_KEY, EVENTS_BY_KEY},
            f"{kind}.struck": {TASKS_BY_KEY, LISTED_BY_KEY, EVENTS_BY_KEY},
        }
        for part in range(2 if dialect == "sqlite" else 1):
            found[f"{kind}.writes.{part}"] = {rows}
            found[f"{kind}.listed_writes.{part}"] = {TASKS_BY_KEY, LISTED_BY_KEY}
    if scope == "all":
        # The index holds just those that are counted.
        found |= {"active": {f"search {TASKS} {ACTIVE}"}, "open_deliveries": {f"scan {TASKS} {PENDING}"}}
    else:
        found |= dict.fromkeys(("active", "open_deliveries"), {f"search {TASKS} {CHILDREN}"})
    return {f"sweep.statements {scope} {name}": plan for name, plan in found.items()}


def expected(dialect: str) -> dict[str, set[str]]:
    """How each statement gets at our tables, as SQLite tells it: ``search`` or ``scan``, the table, the index."""
    going = {f"scan {TASKS}", f"search {TASKS} {CHILDREN}", EVENTS_BY_KEY, BY_ID}
    pruned = {
        "closed": {f"scan {TASKS}"},
        "found": {f"scan {TASKS}", EVENTS_BY_KEY},
        "dry_run": going,
        "listing": going,
        "struck": {TASKS_BY_KEY, LISTED_BY_KEY, EVENTS_BY_KEY, BY_ID, f"search {TASKS} {CHILDREN}"},
        "events": {EVENTS_BY_KEY, LISTED_BY_KEY},
        # And what refers to a task: its events, and its children.
        "delete": {TASKS_BY_KEY, LISTED_BY_KEY, EVENTS_BY_KEY, f"search {TASKS} {CHILDREN}"},
    }
    return {
        **of_a_sweep("all", dialect),
        **of_a_sweep("one parent", dialect),
        **{f"prune._statements {name}": plan for name, plan in pruned.items()},
        "doctor._rows": {f"scan {TASKS}"},
        "doctor._older_than_parents": {f"search {TASKS} {CHILDREN}", BY_ID},
        "doctor._chains": {f"scan {TASKS}", EVENTS_BY_KEY},
        "doctor._orphans": {f"search {TASKS} {CHILDREN}", BY_ID},
        "doctor._strays": {f"scan {EVENTS}", TASKS_BY_KEY},
        "doctor._cycles": {f"search {TASKS} {CHILDREN}", BY_ID, TASKS_BY_KEY},
        "verbs._statements by_id": {BY_ID},
        "verbs._statements by_id_locked": {BY_ID},
        "verbs._statements children": {f"search {TASKS} {CHILDREN}"},
        "verbs._statements insert": NOTHING,
        "verbs._statements insert_event": NOTHING,
        "verbs._beats running": {BY_ID},
        "verbs._beats beat": {TASKS_BY_KEY},
        **{f"verbs._update {', '.join(columns)}": {TASKS_BY_KEY} for columns in columns_written()},
        "reconcile._PARENT": {BY_ID},
    }


def test_every_statement_has_an_expectation() -> None:
    for dialect in ("sqlite", "postgresql"):
        assert set(statements(dialect)) == set(expected(dialect))


# -- SQLite ------------------------------------------------------------------------------------------------

STEP = re.compile(
    r"(?P<how>SCAN|SEARCH) (?:TABLE )?(?:temp\.)?(?P<table>\S+)(?: AS (?P<alias>\S+))?"
    r"(?: USING (?P<automatic>AUTOMATIC )?(?:PARTIAL )?(?:COVERING )?"
    r"(?:INDEX (?P<index>\S+)|(?P<key>(?:INTEGER )?PRIMARY KEY)))?"
)
TABLES = {TASKS, EVENTS, LISTED}
NAMED = re.compile(r"\b(tsg_tasks|tsg_task_events) AS (\w+)")


def sqlite_plan(connection: Connection, statement: Any) -> tuple[set[str], list[str]]:
    """How it gets at our tables, and the lines that say so."""
    compiled = statement.compile(dialect=connection.dialect)
    values = tuple(None for _ in compiled.positiontup or ())
    lines = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {compiled.string}", values)]
    aliases = {alias: table for table, alias in NAMED.findall(compiled.string)}
    steps = set()
    for line in lines:
        step = STEP.match(line)
        if step is None:
            continue
        named = step["alias"] or step["table"]
        table = aliases.get(named, named)
        if table in TABLES:
            index = KEY if step["key"] else step["index"] or ""
            index = ID if index.startswith("sqlite_autoindex_tsg_tasks") else index
            steps.add(
                " ".join(filter(None, (step["how"].lower(), table, "automatic" * bool(step["automatic"]), index)))
            )
    return steps, lines


def engine_of(ledger: Ledger) -> sa.Engine:
    engine = ledger._opened.engine
    assert isinstance(engine, sa.Engine)
    return engine


@pytest.fixture(scope="module")
def sqlite_connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    """A connection of a ledger's own to its file, with the list that a run in batches has."""
    folder = tmp_path_factory.mktemp("plans")
    folder.chmod(0o700)
    with Ledger(folder / "ledger.sqlite") as ledger, engine_of(ledger).connect() as connection:
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        connection.execute(CreateTable(listing.listed_in("sqlite")))
        yield connection


@pytest.mark.parametrize("name", sorted(expected("sqlite")))
def test_on_sqlite_a_statement_finds_its_rows_as_it_is_meant_to(sqlite_connection: Connection, name: str) -> None:
    steps, lines = sqlite_plan(sqlite_connection, statements("sqlite")[name])
    if " insert" in name:
        # Only what could refer to the new row, which not every SQLite tells.
        assert steps <= {EVENTS_BY_KEY, f"search {TASKS} {CHILDREN}", TASKS_BY_KEY, BY_ID}, lines
    else:
        assert steps == expected("sqlite")[name], lines


def test_on_sqlite_no_sweep_and_no_verb_reads_all_tasks_or_all_events(sqlite_connection: Connection) -> None:
    for name, statement in statements("sqlite").items():
        if name.startswith(("sweep", "verbs", "reconcile")):
            steps, lines = sqlite_plan(sqlite_connection, statement)
            scans = {step for step in steps if step.startswith("scan")}
            assert scans <= {f"scan {TASKS} {PENDING}"}, (name, lines)


def test_on_sqlite_no_index_is_made_for_the_time_of_a_statement(sqlite_connection: Connection) -> None:
    for name, statement in statements("sqlite").items():
        _, lines = sqlite_plan(sqlite_connection, statement)
        # Of what is kept it has to be: that is no table, and has no index.
        assert all("SEARCH kept " in line for line in lines if "AUTOMATIC" in line), (name, lines)


def test_on_sqlite_doctor_reads_each_table_in_full_at_most_once_a_query(sqlite_connection: Connection) -> None:
    asked = asked_by_doctor(sqlite_connection)
    assert {name for name, _, _ in asked} == {check.name for check in doctor.CHECKS}
    for name, query, values in asked:
        lines = [row[3] for row in sqlite_connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values)]
        full = Counter(step["table"] for step in map(STEP.match, lines) if step is not None and step["how"] == "SCAN")
        # What a recursion has gathered is no table.
        assert max((count for table, count in full.items() if table != "walk"), default=0) <= 1, (name, lines)


def asked_by_doctor(connection: Connection) -> list[tuple[str, str, Any]]:
    """Every query that each check really asks, with its values."""
    asked: list[tuple[str, str, Any]] = []
    for check in doctor.CHECKS:
        with recording(connection) as queries:
            check.counts(connection)
        asked += [(check.name, *query) for query in queries]
    return asked


@contextmanager
def recording(source: sa.Engine | Connection) -> Iterator[list[tuple[str, Any]]]:
    """What is carried out on it meanwhile: the text, and the values."""
    queries: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: object) -> None:
        queries.append((statement, parameters))

    sa.event.listen(source, "before_cursor_execute", note)
    try:
        yield queries
    finally:
        sa.event.remove(source, "before_cursor_execute", note)


# -- PostgreSQL --------------------------------------------------------------------------------------------

# What is at rest, a third of it under another; then the few that are not, a quarter of them under one.
FILLING = f"""
INSERT INTO tsg_tasks (id, parent_id, status, delivery_status, delivery_required, expects_heartbeat, created_at,
    started_at, updated_at, ended_at, delivery_updated_at, terminal_code, version)
SELECT md5(n::text)::uuid, CASE WHEN mod(n, 3) = 0 AND n > 3 THEN md5((n / 3)::text)::uuid END, 'succeeded',
    'delivered', true, true, 1000, 1001, 1002 + n, 1002 + n, 1003 + n, 'completed', 3 FROM generate_series(1, 4000) n
UNION ALL
SELECT '{PARENT}', NULL, 'queued', 'pending', true, true, 1000, NULL, 1000, NULL, 1000, NULL, 0
UNION ALL
SELECT md5('r' || n)::uuid, CASE WHEN mod(n, 4) = 0 THEN '{PARENT}'::uuid END, 'running',
    'pending', true, true, 1000, 1001, 1001 + n, NULL, 1000, NULL, 2 FROM generate_series(1, 40) n
UNION ALL
SELECT md5('d' || n)::uuid, CASE WHEN mod(n, 4) = 0 THEN '{PARENT}'::uuid END, 'failed',
    'pending', true, true, 1000, 1001, 1002 + n, 1002 + n, 1000, NULL, 2 FROM generate_series(1, 40) n;
INSERT INTO tsg_task_events
SELECT pk, 0, 'created', NULL, 'queued', created_at, 'created' FROM tsg_tasks
UNION ALL
SELECT pk, 1, 'task_transition', 'queued', 'running', started_at, 'started' FROM tsg_tasks WHERE started_at IS NOT NULL
UNION ALL
SELECT pk, 2, 'task_transition', 'running', status, ended_at, terminal_code FROM tsg_tasks WHERE ended_at IS NOT NULL
UNION ALL
SELECT pk, 3, 'delivery_transition', 'pending', delivery_status, delivery_updated_at, NULL FROM tsg_tasks
    WHERE delivery_status <> 'pending';
ANALYZE tsg_tasks;
ANALYZE tsg_task_events
"""


@pytest.fixture(scope="module")
def filled(postgresql_server: sa.URL, postgresql_template: str) -> Iterator[sa.Engine]:
    """A database with much history and little that is not at rest, of which the server knows."""
    with database(postgresql_server, f"tsg_{uuid.uuid4().hex}", template=postgresql_template) as url:
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            for statement in FILLING.split(";"):
                connection.exec_driver_sql(statement)
        assert Ledger(engine).doctor()["healthy"]
        yield engine
        engine.dispose()


@pytest.fixture(scope="module")
def postgresql_connection(filled: sa.Engine) -> Iterator[Connection]:
    with filled.connect() as connection:
        connection.execute(CreateTable(listing.listed_in("postgresql")))
        yield connection


def nodes(node: dict[str, Any], above: tuple[dict[str, Any], ...] = ()) -> Iterator[tuple[dict[str, Any], Any]]:
    yield node, above
    for below in node.get("Plans", ()):
        yield from nodes(below, (*above, node))


def postgresql_plan(connection: Connection, statement: Any) -> list[tuple[dict[str, Any], Any]]:
    """Every node of its plan, with those above it."""
    if isinstance(statement, str):
        text, values = statement, {}
    else:
        compiled = statement.compile(dialect=connection.dialect)
        text, values = compiled.string, {name: SAMPLES.get(name) for name in compiled.params}
    plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {text}", values).scalar_one()
    return list(nodes((json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]))


def read_in_full(plan: list[tuple[dict[str, Any], Any]], *tables: str) -> list[tuple[dict[str, Any], Any]]:
    return [
        (node, above) for node, above in plan if node["Node Type"] == "Seq Scan" and node["Relation Name"] in tables
    ]


def indexes(plan: list[tuple[dict[str, Any], Any]]) -> set[str]:
    return {node["Index Name"] for node, _ in plan if "Index Name" in node}


KEYS = {"pk_tsg_tasks", "pk_tsg_task_events", "tsg_listed_pkey"}
#: By what one may be found there; which of them it is depends on what the server knows of the rows.
ON_POSTGRESQL: Final[tuple[tuple[str, set[str], set[str]], ...]] = (
    # A pattern of names; what must be used, one of them; and what else may.
    (r"sweep\.statements all (active|stale\.(total|counts\..*|listing|writes.*))", {ACTIVE}, KEYS),
    (r"sweep\.statements all (open_deliveries|due\.(total|counts\..*|listing|writes.*))", {PENDING}, KEYS),
    (r"sweep\.statements one parent (active|stale\.(total|counts\..*|listing|writes.*))", {CHILDREN, ACTIVE}, KEYS),
    (
        r"sweep\.statements one parent (open_deliveries|due\.(total|counts\..*|listing|writes.*))",
        {CHILDREN, PENDING},
        KEYS,
    ),
    (r"sweep\.statements .* stale\.(listed.*|struck)", {"pk_tsg_tasks", ACTIVE, CHILDREN}, KEYS),
    (r"sweep\.statements .* due\.(listed.*|struck)", {"pk_tsg_tasks", PENDING, CHILDREN}, KEYS),
    (r"verbs\._statements by_id.*|verbs\._beats running|reconcile\._PARENT", {"uq_tsg_tasks_id"}, set()),
    (r"verbs\._statements children", {CHILDREN}, set()),
    (r"verbs\._statements insert.*", set(), set()),
    (r"verbs\._update .*|verbs\._beats beat", {"pk_tsg_tasks"}, set()),
    (r"prune\._statements (delete|events)", {"tsg_listed_pkey"}, KEYS),
    (r"prune\._statements struck", {"tsg_listed_pkey"}, KEYS | {CHILDREN, "uq_tsg_tasks_id"}),
)


@pytest.mark.parametrize("name", sorted(expected("postgresql")))
def test_on_postgresql_a_statement_finds_its_rows_by_an_index(postgresql_connection: Connection, name: str) -> None:
    plan = postgresql_plan(postgresql_connection, statements("postgresql")[name])
    matching = [(meant, also) for pattern, meant, also in ON_POSTGRESQL if re.fullmatch(pattern, name)]
    if not matching:
        # These are about every task: once each, and but for two of them events by their key.
        assert name.startswith(("doctor.", "prune._statements "))
        in_full = read_in_full(plan, TASKS, EVENTS)
        assert max(Counter(node["Alias"] for node, _ in in_full).values(), default=0) <= 1, plan
        assert not [above for node, above in in_full if is_repeated(node, above)], plan
        if name not in ("doctor._strays", "doctor._chains"):
            assert not read_in_full(plan, EVENTS), plan
        return
    ((meant, also),) = matching
    assert not read_in_full(plan, TASKS, EVENTS), plan
    used = indexes(plan)
    assert used <= meant | also, plan
    # An index of all tasks, or of all children, is looked into by a value and not read from end to end.
    assert not [node for node, _ in plan if is_whole_index(node)], plan
    assert used & meant or not meant, plan


def is_whole_index(node: dict[str, Any]) -> bool:
    return node.get("Index Name") in KEYS | {CHILDREN, "uq_tsg_tasks_id"} and "Index Cond" not in node


def is_repeated(node: dict[str, Any], above: tuple[dict[str, Any], ...]) -> bool:
    """Whether it is done once for each row of something else."""
    for outer, inner in zip(above, (*above[1:], node), strict=True):
        if outer["Node Type"] == "Nested Loop" and inner.get("Parent Relationship") == "Inner":
            return True
        if inner.get("Parent Relationship") == "SubPlan":
            return True
    return False


# -- whatever is asked at all ------------------------------------------------------------------------------

OURS = re.compile(r"\b(?:FROM|INTO|UPDATE|JOIN) (?:tsg_tasks|tsg_task_events)\b")


def test_nothing_is_asked_of_our_tables_but_by_these_statements(postgresql_url: sa.URL, clock: FakeClock) -> None:
    engine = sa.create_engine(postgresql_url)
    known = {
        one_line(statement.compile(dialect=engine.dialect).string) for statement in statements("postgresql").values()
    }
    ledger = Ledger(engine, clock=clock)
    with recording(engine) as queries:
        parent = ledger.create_task().id
        for number in range(8):
            clock.advance(1)
            task = ledger.create_task(parent_id=parent, delivery_required=number % 2 == 0).id
            if number < 6:
                ledger.start_task(task)
                ledger.heartbeat(task)
            if number < 3:
                ledger.close_task(task, "succeeded")
            if number == 0:
                ledger.set_delivery(task, "delivered")
        assert len(ledger.heartbeat_many([child.id for child in ledger.children_of(parent)])) == 5
        clock.advance(1_000)
        for options in ({}, {"parent_id": parent}, {"batch_size": 2}, {"skip_conflicts": True}):
            for dry_run in (True, False):
                ledger.reconcile(active_grace_seconds=500, delivery_grace_seconds=500, dry_run=dry_run, **options)
        ledger.prune(0, dry_run=True)
        ledger.prune(0, 2)
        assert ledger.doctor()["healthy"]
        assert ledger.get_task(parent).id == parent
    asked = {one_line(text) for text, _ in queries if OURS.search(text)}
    assert len(asked) > 20
    assert asked - known == {f"SELECT count(*) AS count_1 FROM {EVENTS}"}
    engine.dispose()


def one_line(text: str) -> str:
    return " ".join(text.split())
