"""Whatever the plan layer is given, only an error of ours comes out, with nothing of what was given, and no change.

Each parameter is replaced by every hostile value there is, one after the other; Hypothesis replaces two at once. What
is taken instead is stored as plain values, with which doctor agrees. `targets.py` counts on this file for the methods
of :class:`tsg.Plans` and :class:`tsg.AsyncPlans`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import create_async_engine

import tsg
from tests.conftest import FakeClock, database
from tests.fuzz import hostile
from tests.fuzz.hostile import MARKER, Value
from tests.fuzz.targets import (
    PLAN,
    STEPS,
    _of_class,
    fill_plans,
    planned,
)
from tests.fuzz.test_hostile_values import LONGEST_SECONDS, SECONDS, examples
from tsg import plan
from tsg.plan.files import export_folder, import_folder, learnings_markdown, write_learnings
from tsg.plan.graph import render

OURS: Final = (
    tsg.DamagedFile,
    tsg.DependencyCycle,
    tsg.InvalidInput,
    tsg.PlanNotFound,
    tsg.SchemaOutdated,
    tsg.StateConflict,
    tsg.StepNotFound,
    tsg.TaskNotFound,
)
says_nothing = partial(hostile.says_nothing, OURS)

Arguments = dict[str, Any]

#: Stands for the token of the attempt that is under way.
TOKEN: Final = object()


def _step(kind: str, **other: Any) -> Arguments:
    return {"plan": PLAN, "key": STEPS[kind], **other}


#: How each method is called so that it does something.
METHODS: Final[Mapping[str, Arguments]] = MappingProxyType(
    {
        "accept": _step("partial", remaining="the other half"),
        "add_step": {"plan": PLAN, "subject": "Sweep up", "blocked_by": ["T-004"], "blocks": ["T-005"]},
        "advance": {"plan": PLAN},
        "cancel": _step("in progress"),
        "cancel_plan": {"plan": PLAN},
        "claim": {"plan": PLAN, "agent": "ada"},
        "complete": _step("in progress", attempt=TOKEN, learnings=["it can be done"]),
        "create": {"name": "another"},
        "decide": _step("escalated", decision="reassign", to="cay"),
        "delete": _step("in progress"),
        "doctor": {},
        "fail": _step("in progress", attempt=TOKEN),
        "get": _step("blocked"),
        "graph": {"plan": PLAN},
        "heartbeat": {"attempt": TOKEN},
        "heartbeat_step": _step("in progress"),
        "learnings": {"plan": PLAN},
        "open": _step("pending", agent="ada"),
        "peek": {"plan": PLAN},
        "plans": {},
        "remove": {"plan": PLAN},
        "show": {"plan": PLAN},
        "show_in": {"plan": PLAN, "cockpit": "page.html"},
        "start": _step("pending"),
        "steps": {"plan": PLAN},
        "update": _step("blocked"),
    }
)
#: Of how many hostile values one is tried for each parameter, two unless said here; all of them where time is given.
ONE_IN: Final = {"accept": 3, "add_step": 8, "create": 4, "update": 6}
#: Those that are no transaction, and have a test of their own here.
OTHERS: Final = ("within", "work")
#: What :meth:`tsg.Plans.update` takes beside the fields of a new step.
ONLY_ADDED: Final = ("add_blocked_by", "add_blocks")


def members(kind: type) -> set[str]:
    return {name.rpartition(".")[2] for name in _of_class("a.class", kind)} - {"class"}


@cache
def parameters(name: str) -> list[str]:
    given = inspect.signature(getattr(tsg.Plans, name)).parameters.values()
    named = [each.name for each in given if each.kind is not each.VAR_KEYWORD and each.name != "self"]
    if name == "update":
        named += [field for field in parameters("add_step") if field not in named] + list(ONLY_ADDED)
    return named


CASES: Final = [(name, parameter) for name in METHODS for parameter in parameters(name)]
TRIED: Final = [name for name in METHODS if parameters(name)]


class Bench:
    """Plans inside a transaction that takes back whatever a call has changed."""

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection
        self.clock = FakeClock(2_000.0)
        self.plans = tsg.Plans.within(connection, clock=self.clock)
        self.untouched = planned(connection)
        self.token = self.plans.get(PLAN, STEPS["in progress"])["attempt"]
        self.seen: Counter[str] = Counter()

    def attempt(self, call: Callable[..., Any], arguments: Arguments) -> tsg.LedgerError | None:
        """Call, and hold what comes of it to what is promised; the refusal, if it is one."""
        real = {name: self.token if value is TOKEN else value for name, value in arguments.items()}
        with self.connection.begin_nested() as savepoint:
            written = self._written()
            try:
                answer = checked(call, real)
            except tsg.LedgerError as refused:
                says_nothing(refused)
                if written is None or self._written() != written:
                    assert planned(self.connection) == self.untouched
                self.seen["refused"] += 1
                return refused
            finally:
                self.clock.now = 2_000.0
            is_plain(answer)
            self.seen["taken"] += 1
            # One after the other would take minutes; that which is odd in one is odd in its neighbours.
            if (written is None or self._written() != written) and self.seen["taken"] % 10 == 1:
                assert tsg.doctor.examine(self.connection)["healthy"]
                self.seen["examined"] += 1
            savepoint.rollback()
        return None

    def _written(self) -> int | None:
        """How often SQLite has changed a row; another database doesn't tell."""
        if self.connection.dialect.name != "sqlite":
            return None
        changes: int = self.connection.connection.driver_connection.total_changes  # type: ignore[union-attr]
        return changes


def checked(call: Callable[..., Any], arguments: Arguments) -> Any:
    """What `call` answers, soon."""
    began = time.thread_time()
    try:
        return call(**arguments)
    finally:
        assert time.thread_time() - began < LONGEST_SECONDS


def is_plain(answer: object) -> None:
    """That an answer is made of exact values of Python's, whatever was passed, and has a JSON form."""
    if type(answer) is plan.Work:
        answer = answer.step
    json.dumps(answer, allow_nan=False)
    _is_exact(answer)


def _is_exact(answer: object) -> None:
    if isinstance(answer, dict):
        assert type(answer) is dict
        for key, value in answer.items():
            assert type(key) is str
            _is_exact(value)
    elif isinstance(answer, (list, tuple)):
        for value in answer:
            _is_exact(value)
    else:
        assert type(answer) in (str, int, float, bool, type(None)), type(answer)
        assert type(answer) is not float or math.isfinite(answer)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed file with plans in which there is a step of every kind."""
    folder = tmp_path_factory.mktemp("plans")
    folder.chmod(0o700)
    clock = FakeClock()
    with tsg.Ledger(folder / "ledger.sqlite", clock=clock) as ledger:
        fill_plans(tsg.Plans(ledger), clock)
    return folder / "ledger.sqlite"


@contextmanager
def benched(url: sa.URL) -> Iterator[Bench]:
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            if url.get_backend_name() == "sqlite":
                # As pysqlite is by default, a SAVEPOINT begins no transaction.
                connection.exec_driver_sql("BEGIN")
            yield Bench(connection)
            connection.rollback()
    finally:
        engine.dispose()


@pytest.fixture
def place(folder: Path, filled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that, in a folder of its own."""
    # So deep that a path of several ".." stays in this test's folder.
    working = folder / "a" / "b" / "c" / "d"
    working.mkdir(parents=True, mode=0o700)
    monkeypatch.chdir(working)
    copied = folder / "ledger.sqlite"
    shutil.copyfile(filled, copied)
    copied.chmod(0o600)
    return copied


def url_of(place: Path) -> sa.URL:
    return sa.URL.create("sqlite", database=str(place))


@pytest.fixture
def bench(place: Path) -> Iterator[Bench]:
    with benched(url_of(place)) as made:
        yield made


@pytest.fixture(scope="module")
def on_server(postgresql_server: sa.URL) -> Iterator[sa.URL]:
    with database(postgresql_server, "tsg_hostile_plans_" + str(time.time_ns())) as url:
        clock = FakeClock()
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        plan.upgrade(engine)
        with tsg.Ledger(url, clock=clock) as ledger:
            fill_plans(tsg.Plans(ledger), clock)
        yield url


@pytest.fixture
def silent(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing of what was passed is printed or logged."""
    yield
    assert capfd.readouterr() == ("", "")
    assert MARKER not in caplog.text


# -- what there is ---------------------------------------------------------------------------------------


def test_every_public_method_is_tried_here() -> None:
    assert members(tsg.Plans) == {*METHODS, *OTHERS}
    assert members(tsg.AsyncPlans) == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_without_anything_hostile_each_call_is_taken(name: str, bench: Bench) -> None:
    """Else what is hostile might be refused for another's sake."""
    assert bench.attempt(getattr(bench.plans, name), METHODS[name]) is None


# -- one by one ------------------------------------------------------------------------------------------


def odd_for(position: int, step: int) -> tuple[Value, ...]:
    """All hostile values, where there is time; else one in `step`, other ones for each position."""
    return hostile.ODD if SECONDS else hostile.ODD[position % step :: step]


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", TRIED)
def test_each_argument_may_be_any_hostile_value(name: str, bench: Bench) -> None:
    method = getattr(bench.plans, name)
    cases = [
        (parameter, value)
        for position, parameter in enumerate(parameters(name))
        for value in odd_for(position, ONE_IN.get(name, 2))
    ]
    try_all(cases, bench.seen, lambda given: bench.attempt(method, METHODS[name] | given))


def try_all(
    cases: list[tuple[str, Value]], seen: Counter[str], attempt: Callable[[Arguments], tsg.LedgerError | None]
) -> None:
    """Try each value for the parameter beside it; and only then say what was wrong, so that one run tells of all."""
    wrong: list[str] = []
    for parameter, value in cases:
        try:
            seen["refused, all in all"] += attempt({parameter: value.make()}) is not None
        except Exception as error:
            wrong.append(f"{type(error).__name__} for {parameter}: {value.words[:80]}")
    shown = "\n".join(wrong[:: max(1, len(wrong) // 25)])
    assert not wrong, f"{len(wrong)} of {len(cases)}, such as\n{shown}"
    assert seen["refused, all in all"] > len(cases) / 4


@pytest.fixture(scope="module")
def large() -> list[Value]:
    made = [(value.words, value.make()) for value in hostile.LARGE]
    return [Value(words, lambda content=content: content) for words, content in made]


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", TRIED)
def test_ten_megabytes_are_refused_soon(name: str, bench: Bench, large: list[Value]) -> None:
    for parameter in parameters(name):
        for value in large:
            arguments = {**METHODS[name], parameter: value.make()}
            assert bench.attempt(getattr(bench.plans, name), arguments) is not None, (parameter, value)


# -- two at once, each call in a transaction of its own --------------------------------------------------


@st.composite
def calls(draw: st.DrawFn, name: str) -> dict[str, Value]:
    chosen = draw(st.lists(st.sampled_from(parameters(name)), min_size=1, max_size=2, unique=True))
    return {parameter: draw(hostile.values) for parameter in chosen}


class Copies:
    """Ledgers, each like the first; one is used again for as long as nothing in it has changed."""

    def __init__(self, place: Path) -> None:
        self._original = place
        self._open = ExitStack()
        self._number = 0
        self._renew()

    def _renew(self) -> None:
        self._open.close()
        self._number += 1
        place = self._original.with_name(f"{self._number}.sqlite")
        shutil.copyfile(self._original, place)
        place.chmod(0o600)
        ledger = self._open.enter_context(tsg.Ledger(place, clock=FakeClock(2_000.0)))
        self.plans = tsg.Plans(ledger)
        self.engine = sa.create_engine(url_of(place))
        self._open.callback(self.engine.dispose)
        self.untouched = self.contents()

    def contents(self) -> list[list[tuple[Any, ...]]]:
        with self.engine.connect() as connection:
            return planned(connection)

    def attempt(self, call: Callable[..., Any], arguments: Arguments) -> tsg.LedgerError | None:
        refusal = None
        try:
            is_plain(checked(call, arguments))
        except tsg.LedgerError as error:
            refusal = error
            says_nothing(error)
            assert self.contents() == self.untouched
        if self.contents() != self.untouched:
            try:
                assert self.plans.doctor()["healthy"]
            finally:
                self._renew()
        return refusal

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def copies(place: Path) -> Iterator[Copies]:
    with closing(Copies(place)) as made:
        yield made


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", TRIED)
def test_any_two_arguments_may_be_hostile_at_once(name: str, copies: Copies) -> None:
    tried = 0

    @examples(20)
    @given(calls(name))
    def try_hostile(given: dict[str, Value]) -> None:
        nonlocal tried
        token = copies.plans.get(PLAN, STEPS["in progress"])["attempt"]
        arguments = {**METHODS[name], **{parameter: value.make() for parameter, value in given.items()}}
        arguments = {parameter: token if value is TOKEN else value for parameter, value in arguments.items()}
        copies.attempt(getattr(copies.plans, name), arguments)
        tried += 1

    try_hostile()
    assert tried >= 10


# -- the others ------------------------------------------------------------------------------------------

Call = Callable[[Copies, Arguments], Any]


def _on(function: Callable[..., Any]) -> Call:
    return lambda copies, arguments: function(**({"plans": copies.plans} | arguments))


def _work(copies: Copies, arguments: Arguments) -> Any:
    with copies.plans.work(**arguments) as work:
        return work.step


def _within(copies: Copies, arguments: Arguments) -> None:
    with copies.engine.begin() as connection:
        tsg.Plans.within(**({"target": connection} | arguments)).show(PLAN)


def _migrated(function: Callable[..., Any]) -> Call:
    return lambda copies, arguments: function(**({"target": copies.engine} | arguments))


#: What is no method of Plans: how it is called, and with what so that it does something.
FUNCTIONS: Final[Mapping[str, tuple[Call, Arguments, tuple[str, ...]]]] = MappingProxyType(
    {
        "export_folder": (_on(export_folder), {"name": PLAN, "path": "exported"}, ("plans", "name", "path")),
        "import_folder": (_on(import_folder), {"path": "../imported", "name": "it"}, ("plans", "path", "name")),
        "learnings_markdown": (
            lambda _, arguments: learnings_markdown(**arguments),
            {"learnings": [{"step": "T-001", "text": "small", "at": 5.0}]},
            ("learnings",),
        ),
        "write_learnings": (
            lambda _, arguments: write_learnings(**arguments),
            {"path": "learned.md", "text": "# Learnings"},
            ("path", "text"),
        ),
        "render": (
            lambda copies, arguments: render(**({"graph": copies.plans.graph(PLAN)} | arguments)),
            {"form": "dot"},
            ("graph", "form"),
        ),
        "RetryPolicy": (
            lambda _, arguments: plan.RetryPolicy(**arguments).to_json(),
            {},
            ("count", "backoff", "base_seconds", "factor", "cap_seconds"),
        ),
        "RetryPolicy.delay": (lambda _, arguments: plan.RetryPolicy().delay(**arguments), {"retry": 1}, ("retry",)),
        "Plans": (lambda copies, arguments: tsg.Plans(**arguments).plans(), {}, ("ledger",)),
        "Plans.within": (_within, {}, ("target", "clock")),
        "Plans.work": (
            _work,
            {"plan": PLAN, "key": STEPS["pending"]},
            ("plan", "key", "agent", "attempt", "interval_seconds"),
        ),
        "downgrade": (_migrated(plan.downgrade), {"revision": "0002"}, ("target", "revision")),
        "upgrade": (_migrated(plan.upgrade), {"revision": "head"}, ("target", "revision")),
    }
)


def function_cases(name: str) -> list[tuple[str, Value]]:
    # What a callback raises is its owner's; only what is none is refused.
    return [
        (parameter, value)
        for position, parameter in enumerate(FUNCTIONS[name][2])
        for value in odd_for(position, 12 if name == "Plans.work" else 4)
        if parameter != "clock" or not callable(value.make())
    ]


@pytest.fixture
def imported(place: Path) -> None:
    folder = Path("../imported")
    folder.mkdir()
    folder.joinpath("T-001.json").write_text(json.dumps({"id": "T-001", "subject": "Read it", "status": "pending"}))


@pytest.mark.usefixtures("silent", "imported")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_so_may_an_argument_of_what_is_no_transaction(name: str, copies: Copies) -> None:
    call, usual, _ = FUNCTIONS[name]
    if name != "Plans":
        assert copies.attempt(lambda **given: call(copies, given), usual) is None
    try_all(
        function_cases(name),
        Counter(),
        lambda given: copies.attempt(lambda **arguments: call(copies, arguments), usual | given),
    )


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("part", ["a/", "../x", "x"])
def test_a_path_of_more_parts_than_can_be_is_refused(part: str, copies: Copies) -> None:
    for length in (1_500, 200_000):
        with pytest.raises(tsg.LedgerError) as caught:
            export_folder(copies.plans, PLAN, part * length)
        says_nothing(caught.value)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", ["learn", "output"])
def test_so_may_what_is_left_while_the_block_runs(name: str, copies: Copies) -> None:
    seen: Counter[bool] = Counter()
    with copies.plans.work(PLAN, STEPS["pending"]) as work:
        assert {"learn", "output"} < members(plan.Work)
        for value in odd_for(0, 2):
            before = copies.contents()
            try:
                checked(getattr(work, name), {"text": value.make()})
            except tsg.LedgerError as error:
                says_nothing(error)
                assert copies.contents() == before
                seen[False] += 1
            else:
                seen[True] += 1
    assert min(seen[False], seen[True]) > 10
    assert copies.plans.get(PLAN, STEPS["pending"])["status"] == "completed"
    assert copies.plans.doctor()["healthy"]


#: Refused whatever it is given for.
REFUSED_BY_ALL: Final = (
    Value("an object that raises", hostile.ALL_LIE[0].make),
    Value("NUL", lambda: f"{MARKER}\0"),
    Value("not a number", lambda: math.nan),
)


def test_awaited_each_method_takes_and_refuses_the_same(place: Path) -> None:
    refused: Counter[str] = Counter()

    async def ask(name: str, copied: Path) -> None:
        engine = create_async_engine(url_of(copied).set(drivername="sqlite+aiosqlite"))
        try:
            plans = tsg.AsyncPlans(tsg.AsyncLedger(engine, clock=FakeClock(2_000.0)))
            token = (await plans.get(PLAN, STEPS["in progress"]))["attempt"]
            usual = {key: token if value is TOKEN else value for key, value in METHODS[name].items()}
            for parameter in parameters(name):
                for value in REFUSED_BY_ALL:
                    with pytest.raises(tsg.LedgerError) as caught:
                        await getattr(plans, name)(**{**usual, parameter: value.make()})
                    says_nothing(caught.value)
                    refused[name] += 1
            assert contents_of(copied) == contents_of(place)
            is_plain(await getattr(plans, name)(**usual))
            assert (await plans.doctor())["healthy"]
        finally:
            await engine.dispose()

    for name in METHODS:
        copied = place.with_name(f"{name}.sqlite")
        shutil.copyfile(place, copied)
        asyncio.run(ask(name, copied))
    assert refused == {name: len(REFUSED_BY_ALL) * len(parameters(name)) for name in TRIED}


def contents_of(place: Path) -> list[list[tuple[Any, ...]]]:
    engine = sa.create_engine(url_of(place))
    try:
        with engine.connect() as connection:
            return planned(connection)
    finally:
        engine.dispose()


@pytest.mark.parametrize("kind", [tsg.AsyncPlans, tsg.Plans])
def test_plans_stand_on_a_ledger_and_on_nothing_else(kind: type[tsg.Plans] | type[tsg.AsyncPlans]) -> None:
    for value in hostile.ODD:
        with pytest.raises(tsg.InvalidInput) as caught:
            kind(value.make())
        says_nothing(caught.value)


# -- on a server -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", TRIED)
def test_on_a_server_what_is_passed_is_refused_alike(name: str, on_server: sa.URL) -> None:
    with benched(on_server) as bench:
        method = getattr(bench.plans, name)
        assert bench.attempt(method, METHODS[name]) is None

        @examples(12)
        @given(calls(name))
        def try_hostile(given: dict[str, Value]) -> None:
            bench.attempt(method, METHODS[name] | {parameter: value.make() for parameter, value in given.items()})

        try_hostile()
        assert bench.seen.total() > 6
        assert planned(bench.connection) == bench.untouched
