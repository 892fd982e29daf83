"""Whatever a public function is given, only an error of ours comes out of it, with nothing of what was given in it.

What is refused has changed nothing; what is accepted is stored as one canonical value, and doctor agrees. What a
callback of the caller's raises (a clock, a progress) is the caller's own.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tsg
from tests.conftest import FakeClock, emptied
from tests.fuzz import hostile
from tests.fuzz.hostile import MARKER, Value
from tests.fuzz.targets import (
    CALLBACKS,
    ENDED,
    EXEMPT,
    PLAUSIBLE,
    QUEUED,
    REAL,
    RUNNING,
    TARGETS,
    TASKS,
    Target,
    World,
    fill,
    public,
)
from tsg import values
from tsg.opening import place_of
from tsg.schema import HEAD, revision_named
from tsg.states import delivery_target, task_target
from tsg.storage import LedgerFile

#: How long these tests may take, roughly; more than that many seconds are spent on examples nobody has tried yet.
SECONDS = float(os.environ.get("TSG_FUZZ_SECONDS", "0"))
OURS = (tsg.InvalidInput, tsg.SchemaOutdated, tsg.SchemaTooNew, tsg.StateConflict, tsg.TaskNotFound)
says_nothing = partial(hostile.says_nothing, OURS)
#: Of this thread's own, however busy the machine is.
LONGEST_SECONDS = 1.0
TRIED = [name for name, target in TARGETS.items() if target.parameters]


def examples(usual: int) -> settings:
    """The same examples in every run; random ones, and more of them, where time is given."""
    return settings(
        max_examples=max(usual, int(usual * SECONDS / 60)),
        derandomize=not SECONDS,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        print_blob=bool(SECONDS),
    )


class Bench:
    """Worlds, each like the first; one is used again for as long as nothing in it has changed."""

    def __init__(self, renew: Callable[[], Path | sa.URL], runner: asyncio.Runner | None = None) -> None:
        self._renew = renew
        self._runner = runner
        self._world: World | None = None
        self.untouched = self.world().contents()
        assert len(self.untouched[0]) == len(TASKS)

    def world(self) -> World:
        if self._world is None:
            self._world = World(self._renew(), FakeClock(2_000.0), self._runner)
        return self._world

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None

    def attempt(self, target: Target, given: dict[str, Value]) -> tsg.LedgerError | None:
        """Call `target`, and hold what comes of it to what is promised; the refusal, if it is one."""
        world = self.world()
        arguments = {name: REAL if value is REAL else value.make() for name, value in given.items()}
        refusal, answer = None, None
        began = time.thread_time()
        try:
            answer = target.call(world, arguments)
        except tsg.LedgerError as error:
            refusal = error
        except BaseException:
            self.close()
            raise
        took = time.thread_time() - began
        contents = world.contents()
        if refusal is not None:
            says_nothing(refusal)
            assert contents == self.untouched
        else:
            is_plain(answer)
            assert MARKER not in repr(answer)
        if contents != self.untouched:
            try:
                is_sound(world)
            finally:
                self.close()
        assert took < LONGEST_SECONDS
        return refusal


def is_plain(answer: object) -> None:
    """That an answer is made of exact values of Python's and ours, whatever was passed."""
    if type(answer) is tsg.TaskRecord:
        for value in vars(answer).values():
            is_plain(value)
        json.dumps(answer.to_dict(include_payload_hash=True), allow_nan=False)
    elif type(answer) in (list, tuple):
        for value in answer:  # type: ignore[attr-defined]
            is_plain(value)
    elif type(answer) is dict:
        for key, value in answer.items():
            assert type(key) is str
            is_plain(value)
    elif type(answer) is tsg.ReconcilePolicy:
        is_plain(vars(answer))
    elif isinstance(answer, tuple):
        is_plain(tuple(answer))
    else:
        assert type(answer) in (str, int, float, bool, type(None), tsg.TaskStatus, tsg.DeliveryStatus), type(answer)
        assert type(answer) is not float or math.isfinite(answer)  # type: ignore[arg-type]


def is_sound(world: World) -> None:
    """That what is stored now is a ledger's, and each task is read as it lies there."""
    if isinstance(world.place, Path) and len(world.contents()) < 3:
        # Downgraded to base: nothing of ours is left.
        return
    world.close()
    again = World(world.place, FakeClock(5_000.0))
    try:
        with again.engine.connect() as connection:
            version = connection.exec_driver_sql("SELECT version_num FROM tsg_alembic_version").scalar()
            if version != HEAD:
                return
            identifiers = connection.exec_driver_sql("SELECT id FROM tsg_tasks").scalars().all()
        assert again.ledger.doctor()["healthy"]
        for identifier in identifiers:
            is_plain(again.ledger.get_task(str(identifier)))
    finally:
        again.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed file with a task of every kind."""
    folder = tmp_path_factory.mktemp("filled")
    folder.chmod(0o700)
    clock = FakeClock()
    with tsg.Ledger(folder / "ledger.sqlite", clock=clock) as ledger:
        fill(ledger, clock)
    return folder / "ledger.sqlite"


@pytest.fixture
def bench(folder: Path, filled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    # So deep that a path of several ".." stays in this test's folder.
    working = folder / "a" / "b" / "c" / "d"
    working.mkdir(parents=True, mode=0o700)
    monkeypatch.chdir(working)

    def renew() -> Path:
        place = folder / f"{uuid.uuid4()}.sqlite"
        shutil.copyfile(filled, place)
        place.chmod(0o600)
        return place

    with asyncio.Runner() as runner, closing(Bench(renew, runner)) as made:
        yield made


@pytest.fixture
def silent(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing of what was passed is printed or logged."""
    yield
    assert capfd.readouterr() == ("", "")
    assert MARKER not in caplog.text


@st.composite
def calls(draw: st.DrawFn, target: Target) -> dict[str, Value]:
    """Arguments of which one is hostile, now and then a second; the others are plausible, or left out."""
    parameters = target.parameters
    chosen = draw(st.sampled_from(list(parameters)))
    also = draw(st.sampled_from([None, None, None, *parameters]))
    given: dict[str, Value] = {}
    for name, parameter in parameters.items():
        if name in (chosen, also):
            given[name] = draw(hostile_for(name))
        elif parameter.default is parameter.empty or draw(st.booleans()):
            given[name] = draw(st.sampled_from(target.plausible.get(name, PLAUSIBLE[name])))
    return given


def hostile_for(name: str) -> st.SearchStrategy[Value]:
    # What a callback raises is its owner's; only what is none is refused.
    return hostile.values.filter(lambda value: not callable(value.make())) if name in CALLBACKS else hostile.values


# -- what there is ---------------------------------------------------------------------------------------


def test_every_public_callable_is_tried_or_there_is_a_reason_why_not() -> None:
    assert not TARGETS.keys() & EXEMPT.keys()
    assert public() == TARGETS.keys() | EXEMPT.keys()
    assert all(EXEMPT.values())
    for target in TARGETS.values():
        assert target.parameters.keys() <= PLAUSIBLE.keys()


# What is recorded is not to be assigned, however plausible; and a second event of the same number is refused too.
@pytest.mark.parametrize("name", [name for name in TRIED if not name.endswith("=") and name != "tsg.TaskEvent"])
def test_what_is_plausible_is_not_all_refused(name: str, bench: Bench) -> None:
    """Else what is hostile might be refused for another's sake."""
    target = TARGETS[name]
    taken = 0

    @examples(6)
    @given(
        st.fixed_dictionaries(
            {each: st.sampled_from(target.plausible.get(each, PLAUSIBLE[each])) for each in target.parameters}
        )
    )
    def try_plausible(given: dict[str, Value]) -> None:
        nonlocal taken
        taken += bench.attempt(target, given) is None

    try_plausible()
    assert taken


# -- one by one ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", TRIED)
def test_whatever_is_passed_it_is_taken_as_one_plain_value_or_refused_and_changes_nothing(
    name: str, bench: Bench
) -> None:
    target = TARGETS[name]
    seen: Counter[bool] = Counter()

    @examples(30)
    @given(calls(target))
    def try_hostile(given: dict[str, Value]) -> None:
        seen[bench.attempt(target, given) is not None] += 1

    try_hostile()
    assert sum(seen.values()) >= 10


PARSERS: dict[str, Callable[[Any], object]] = {
    "canonical_id": values.canonical_id,
    "canonical_ids": values.canonical_ids,
    "number": lambda value: values.number(value, "it"),
    "moment": values.moment,
    "whole": lambda value: values.whole(value, "it"),
    "clock_reading": lambda value: values.clock_reading(lambda: value),
    "flag": lambda value: values.flag(value, "it"),
    "payload_digest": values.payload_digest,
    "payload_fingerprint": tsg.payload_fingerprint,
    "task_target": task_target,
    "delivery_target": delivery_target,
    "place_of": place_of,
    "revision_named": revision_named,
}


def exact(answer: object) -> bool:
    kind = type(answer)
    if kind is list:
        return True
    if kind is tsg.ReconcilePolicy:
        return all(type(value) is float for value in vars(answer).values())
    return kind in (str, int, float, bool, type(None), sa.URL, LedgerFile) or isinstance(answer, Enum)


@pytest.mark.usefixtures("silent", "bench")
@pytest.mark.parametrize("name", PARSERS)
def test_every_lie_that_can_be_told_is_refused_or_becomes_an_exact_value(name: str) -> None:
    parse = PARSERS[name]
    wrong: list[str] = []
    tried = 0
    for value in (*hostile.every_lie(), *hostile.ODD):
        made = value.make()
        tried += 1
        try:
            answer = parse(made)
        except tsg.LedgerError as error:
            hidden = error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
            if type(error) not in OURS or not hidden or MARKER in f"{error} {error.args}":
                wrong.append(f"told of: {value.words}")
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {value.words}")
        else:
            if not exact(answer):
                wrong.append(f"{type(answer).__name__} let through: {value.words}")
    assert tried > 5_000
    # Not all of them: there may be thousands.
    shown = "\n".join(wrong[:: max(1, len(wrong) // 25)])
    assert len(wrong) == 0, f"{len(wrong)} of {tried}, such as\n{shown}"


# -- ten megabytes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> list[tuple[str, object]]:
    return [(value.words, value.make()) for value in hostile.LARGE]


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", TRIED)
def test_ten_megabytes_are_refused_soon(name: str, bench: Bench, large: list[tuple[str, object]]) -> None:
    target = TARGETS[name]
    refused = 0
    for each in target.parameters:
        for words, content in large:
            given = {
                other: target.plausible.get(other, PLAUSIBLE[other])[0]
                for other, parameter in target.parameters.items()
                if parameter.default is parameter.empty
            }
            refused += bench.attempt(target, {**given, each: Value(words, lambda content=content: content)}) is not None
    assert refused or name in ("tsg.payload_fingerprint", "tsg.include_name", "tsg.TaskRecord.to_dict")


# -- misuse ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in TRIED if not name.endswith("=")])
def test_a_keyword_that_nobody_knows_and_one_too_few_are_pythons_own_errors_and_change_nothing(
    name: str, bench: Bench
) -> None:
    target = TARGETS[name]
    required = {
        each: target.plausible.get(each, PLAUSIBLE[each])[0]
        for each, parameter in target.parameters.items()
        if parameter.default is parameter.empty
    }
    calls: list[dict[str, Value]] = [{**required, f"also_{MARKER}": Value("5", lambda: 5)}]
    calls += [{each: value for each, value in required.items() if each != left_out} for left_out in required]
    for arguments in calls:
        with pytest.raises((TypeError, KeyError)):
            bench.attempt(target, arguments)
        assert bench.world().contents() == bench.untouched


#: Closing again is a no-op, and over() makes another.
OPEN_ONLY = [name for name in TARGETS if re.match(r"tsg\.Ledger\.(?!close$|over$)", name)]


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", OPEN_ONLY)
def test_a_closed_ledger_refuses_whatever_is_passed(name: str, bench: Bench) -> None:
    target = TARGETS[name]
    bench.world().ledger.close()

    @examples(5)
    @given(calls(target) if target.parameters else st.just({}))
    def try_closed(given: dict[str, Value]) -> None:
        bench.world().ledger.close()
        assert bench.attempt(target, given) is not None

    try_closed()


CLOCKED: dict[str, Callable[[World], object]] = {
    "create": lambda world: world.ledger.create_task(),
    "start": lambda world: world.ledger.start_task(QUEUED),
    "heartbeat": lambda world: world.ledger.heartbeat(RUNNING),
    "heartbeat_many": lambda world: world.ledger.heartbeat_many([RUNNING]),
    "close": lambda world: world.ledger.close_task(RUNNING, "failed"),
    "deliver": lambda world: world.ledger.set_delivery(ENDED, "delivered"),
    "reconcile": lambda world: world.ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0),
    "reconcile, in batches": lambda world: world.ledger.reconcile(
        active_grace_seconds=0, delivery_grace_seconds=0, batch_size=1
    ),
    "reconcile, a preview": lambda world: world.ledger.reconcile(
        active_grace_seconds=0, delivery_grace_seconds=0, dry_run=True
    ),
    "prune": lambda world: world.ledger.prune(0),
    "create, awaited": lambda world: world.wait_for(world.asynchronous.create_task()),
    "start, in a session": lambda world: TARGETS["tsg.Task.start"].call(world, {}),
    "create, in a session": lambda world: TARGETS["tsg.Task"].call(world, {}),
}


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", CLOCKED)
def test_a_clock_that_tells_rubbish_is_refused_or_its_time_is_one_number(name: str, bench: Bench) -> None:
    target = Target(lambda told: None, lambda world, _: CLOCKED[name](world))

    @examples(25)
    @given(hostile.values)
    def try_clock(told: Value) -> None:
        bench.world().clock.now = told.make()
        bench.attempt(target, {})

    try_clock()


class Marked(Exception):
    """A callback's own."""


@pytest.mark.parametrize("name", CLOCKED)
def test_what_a_clock_raises_is_its_owners_and_nothing_is_stored(name: str, folder: Path, filled: Path) -> None:
    raised = Marked(MARKER)

    class Broken(FakeClock):
        def __call__(self) -> float:
            raise raised

    place = folder / "ledger.sqlite"
    shutil.copyfile(filled, place)
    place.chmod(0o600)
    with asyncio.Runner() as runner, closing(World(place, Broken(), runner)) as world:
        before = world.contents()
        with pytest.raises(Marked) as caught:
            CLOCKED[name](world)
        assert caught.value is raised
        assert world.contents() == before
        assert world.ledger.doctor()["healthy"]


@pytest.mark.parametrize("clock", hostile.ODD[:60:7], ids=lambda value: value.words[:30])
def test_a_sessions_clock_that_is_none_is_refused(clock: Value, bench: Bench) -> None:
    world = bench.world()
    world.clock = clock.make()
    for name in ("tsg.Task.start", "tsg.Task"):
        with pytest.raises(tsg.LedgerError) as caught:
            TARGETS[name].call(world, {})
        says_nothing(caught.value)
    assert world.contents() == bench.untouched
    bench.close()


# -- what is accepted ------------------------------------------------------------------------------------

WRITTEN: dict[str, Callable[[float], object]] = {
    "a float": lambda number: number,
    "text": repr,
    "text with space around": lambda number: f"\t {number!r}\n",
    "bytes": lambda number: repr(number).encode(),
    "a bytearray": lambda number: bytearray(repr(number).encode()),
    "a Decimal": Decimal,
    "a Fraction": Fraction,
    "a subclass": lambda number: type("Precise", (float,), {})(number),
    "Arabic digits": lambda number: repr(number).translate({ord("0") + digit: 0x660 + digit for digit in range(10)}),
}


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_number_is_stored_to_its_last_bit_however_it_is_written(request: pytest.FixtureRequest, kind: str) -> None:
    clock = FakeClock()
    with closing(World(emptied(request, kind), clock)) as world:

        @examples(40)
        @given(st.floats(0, allow_infinity=False), st.floats(allow_nan=False), st.sampled_from(sorted(WRITTEN)))
        def try_number(timeout: float, now: float, form: str) -> None:
            clock.now = WRITTEN[form](now)
            if math.isinf(now):
                with pytest.raises(tsg.InvalidInput):
                    world.ledger.create_task(timeout_seconds=WRITTEN[form](timeout))
                return
            made = world.ledger.create_task(timeout_seconds=WRITTEN[form](timeout), task_id=uuid.uuid4().hex.upper())
            assert (made.timeout_seconds, made.created_at) == (timeout, now)
            assert "-0.0" not in repr(made)
            assert world.ledger.get_task(made.id) == made
            with world.engine.connect() as connection:
                row = connection.exec_driver_sql(
                    f"SELECT timeout_seconds, created_at FROM tsg_tasks WHERE id = '{made.id}'"
                ).one()
            assert tuple(map(repr, row)) == tuple(repr(value + 0.0) for value in (timeout, now))

        try_number()
        assert world.ledger.doctor()["healthy"]


ON_A_SERVER = [name for name in OPEN_ONLY if TARGETS[name].parameters]


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", [*ON_A_SERVER, "tsg.Task", "tsg.Task.close", "tsg.reconcile.apply"])
def test_on_a_server_what_is_passed_is_refused_alike(name: str, request: pytest.FixtureRequest) -> None:
    target = TARGETS[name]

    def renew() -> Path | sa.URL:
        place = emptied(request, "postgresql")
        clock = FakeClock()
        with tsg.Ledger(place, clock=clock) as ledger:
            fill(ledger, clock)
        return place

    with closing(Bench(renew)) as bench:

        @examples(10)
        @given(calls(target))
        def try_hostile(given: dict[str, Value]) -> None:
            bench.attempt(target, given)

        try_hostile()
