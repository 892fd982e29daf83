"""Against the published package: its files, and itself, which is only ever run.

One test runs random histories on both packages at once. It takes a few thousand steps; with ``TSG_NIGHTLY=1``
in the environment it takes a hundred times as many, and other ones every time.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import task_state_guard as published
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import tsg as ours
from tests.conftest import LEGACY, FakeClock, expected, raw, snapshot, tsg
from tsg import InvalidInput, Ledger, LedgerError, ReconcilePolicy, SchemaOutdated, StateConflict
from tsg.cli import main

NIGHTLY = os.environ.get("TSG_NIGHTLY") == "1"
STEPS = settings(
    max_examples=4000 if NIGHTLY else 36,
    stateful_step_count=50,
    deadline=None,
    derandomize=not NIGHTLY,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)

# The published package waits for the disk at every verb; nothing here is about the disk.
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

VERSIONS = ("v1", "v2")
GRACES = ((0, 0), (30, 30), (60, 600), (600, 60), (600, 600))
RECONCILE_AT = expected("clock")["reconcile_at"]
TASK_COLUMNS = (
    "id, parent_id, status, delivery_status, delivery_required, payload_hash, timeout_seconds, created_at, "
    "started_at, updated_at, ended_at, deadline_at, delivery_updated_at, terminal_code, delivery_code, version"
)
REPORT_OF_A_RUN = {
    "dry_run",
    "applied",
    "active_examined",
    "tasks_timed_out",
    "fresh_active_retained",
    "pending_delivery_examined",
    "deliveries_failed",
    "deliveries_not_applicable",
    "pending_delivery_retained",
}


def at(moment: float) -> Callable[[], float]:
    return lambda: moment


def rows(path: Path, statement: str) -> list[tuple[Any, ...]]:
    connection = raw(path)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def as_stored(path: Path) -> list[str]:
    """Every task of a published file with its events in their order; the types show."""
    events = "SELECT task_id, event_kind, from_value, to_value, occurred_at, code FROM task_events ORDER BY sequence"
    return histories(rows(path, f"SELECT {TASK_COLUMNS} FROM tasks ORDER BY id"), rows(path, events))


def as_kept(path: Path) -> list[str]:
    """The same of a ledger of ours."""
    events = (
        "SELECT id, kind, from_status, to_status, occurred_at, code "
        "FROM tsg_task_events JOIN tsg_tasks ON pk = task_pk ORDER BY pk, number"
    )
    return histories(rows(path, f"SELECT {TASK_COLUMNS} FROM tsg_tasks ORDER BY id"), rows(path, events))


def histories(tasks: list[tuple[Any, ...]], events: list[tuple[Any, ...]]) -> list[str]:
    return [repr((task, [event for owner, *event in events if owner == task[0]])) for task in tasks]


def without_version(report: Any) -> dict[str, Any]:
    return {key: value for key, value in dict(report).items() if key != "schema_version"}


def command(capsysbinary: pytest.CaptureFixture[bytes], *arguments: str | Path) -> tuple[int, bytes, bytes]:
    """The command line's one door, without the wait for a process."""
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    said = capsysbinary.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, said.out, said.err


def by_ledger(path: Path) -> None:
    Ledger(path, adopt=True).close()


def by_command(path: Path) -> None:
    done = tsg("--db", path, "upgrade")
    if done.returncode != 0:
        raise {"StateConflict": StateConflict, "SchemaOutdated": SchemaOutdated}[json.loads(done.stdout)["error"]]
    assert json.loads(done.stdout)["schema"]["adopted"] is True


def by_engine(path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{path}")
    try:
        assert ours.upgrade(engine).adopted
    finally:
        engine.dispose()


ADOPTIONS = pytest.mark.parametrize("adopt", [by_ledger, by_command, by_engine])


# -- its files, read -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize(("active", "delivery"), GRACES)
def test_a_preview_of_a_published_file_counts_what_the_published_package_counted(
    legacy: Callable[[str], Path], folder: Path, name: str, active: float, delivery: float
) -> None:
    path = legacy(name)
    before, listing = snapshot(folder), folder.stat().st_mtime_ns
    with Ledger(path, read_only=True, clock=at(RECONCILE_AT)) as ledger:
        report = ledger.reconcile(active_grace_seconds=active, delivery_grace_seconds=delivery, dry_run=True)
        assert report == expected(f"preview-{active}-{delivery}")
        assert snapshot(folder) == before
    assert (snapshot(folder), folder.stat().st_mtime_ns) == (before, listing)


@pytest.mark.parametrize("name", VERSIONS)
def test_the_dry_run_command_leaves_a_published_file_as_it_was(
    legacy: Callable[[str], Path], folder: Path, name: str
) -> None:
    path = legacy(name)
    before, listing = snapshot(folder), folder.stat().st_mtime_ns
    done = tsg("--db", path, "reconcile", "--dry-run")
    assert (done.returncode, done.stderr) == (0, b"")
    report = json.loads(done.stdout)["reconcile"]
    assert set(report) == REPORT_OF_A_RUN
    assert report["active_examined"] == expected("preview-600-600")["active_examined"]
    assert (snapshot(folder), folder.stat().st_mtime_ns) == (before, listing)


@pytest.mark.parametrize("name", VERSIONS)
def test_the_doctor_command_says_of_a_published_file_that_it_is_behind_and_leaves_it(
    legacy: Callable[[str], Path], folder: Path, capsysbinary: pytest.CaptureFixture[bytes], name: str
) -> None:
    path = legacy(name)
    before = snapshot(folder)
    status, said, complained = command(capsysbinary, "--db", path, "doctor")
    assert (status, complained) == (1, b"")
    report = json.loads(said)
    assert (report["schema_version"], report["schema_ok"], report["healthy"]) == (int(name[1]), False, False)
    assert (report["doctor_error_count"], report["task_count"], report["quick_check"]) == (1, 0, "ok")
    assert snapshot(folder) == before


@pytest.mark.parametrize("name", VERSIONS)
def test_every_reading_method_works_on_a_published_file_and_no_writing_one(
    legacy: Callable[[str], Path], folder: Path, name: str
) -> None:
    path = legacy(name)
    before = snapshot(folder)
    stored = {task[0]: task for task in rows(path, f"SELECT {TASK_COLUMNS} FROM tasks")}
    assert snapshot(folder) == before
    with Ledger(path, read_only=True, clock=at(RECONCILE_AT)) as ledger:
        for identifier, task in stored.items():
            record = ledger.get_task(identifier)
            assert tuple(getattr(record, column) for column in TASK_COLUMNS.split(", ")) == task
            assert record.expects_heartbeat is True
            children = [child.id for child in ledger.children_of(identifier)]
            assert sorted(children) == sorted(key for key, other in stored.items() if other[1] == identifier)
        assert ledger.doctor()["schema_version"] == int(name[1])
        some = next(iter(stored))
        for write in (
            lambda: ledger.create_task(),
            lambda: ledger.start_task(some),
            lambda: ledger.heartbeat(some),
            lambda: ledger.close_task(some, "failed"),
            lambda: ledger.set_delivery(some, "failed"),
            lambda: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0),
        ):
            with pytest.raises(StateConflict):
                write()
    assert snapshot(folder) == before


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize(("active", "delivery"), GRACES)
def test_what_a_preview_of_a_published_file_counts_is_what_an_apply_at_that_time_changes(
    legacy: Callable[[str], Path], name: str, active: float, delivery: float
) -> None:
    path = legacy(name)
    graces = {"active_grace_seconds": active, "delivery_grace_seconds": delivery}
    with Ledger(path, read_only=True, clock=at(RECONCILE_AT)) as ledger:
        preview = ledger.reconcile(**graces, dry_run=True)
    assert path.read_bytes() == (LEGACY / f"{name}.sqlite").read_bytes()
    with Ledger(path, adopt=True, clock=at(RECONCILE_AT)) as ledger:
        assert ledger.reconcile(**graces) == {**preview, "dry_run": False, "applied": True}
        again = ledger.reconcile(**graces)
        assert (again["tasks_timed_out"], again["deliveries_failed"], again["deliveries_not_applicable"]) == (0, 0, 0)


# -- its files, adopted ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VERSIONS)
@ADOPTIONS
def test_adoption_keeps_every_row_and_every_event_in_its_order(
    legacy: Callable[[str], Path], folder: Path, name: str, adopt: Callable[[Path], None]
) -> None:
    path = legacy(name)
    before = as_stored(path)
    adopt(path)
    assert as_kept(path) == before
    assert rows(path, "SELECT count(*) FROM tsg_task_events") == [(351,)]
    assert rows(path, "SELECT DISTINCT expects_heartbeat FROM tsg_tasks") == [(1,)]
    tables = {row[0] for row in rows(path, "SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert not tables & {"tasks", "task_events", "schema_meta"}
    assert os.listdir(folder) == [path.name]
    with Ledger(path) as ledger:
        assert ledger.doctor()["healthy"]


@pytest.mark.parametrize("name", VERSIONS)
@ADOPTIONS
def test_an_adopted_file_reports_and_changes_what_it_did_with_the_published_package(
    legacy: Callable[[str], Path], name: str, adopt: Callable[[Path], None]
) -> None:
    path = legacy(name)
    adopt(path)
    with Ledger(path, clock=at(RECONCILE_AT)) as ledger:
        assert without_version(ledger.doctor()) == without_version(expected("doctor"))
        for active, delivery in GRACES:
            preview = ledger.reconcile(active_grace_seconds=active, delivery_grace_seconds=delivery, dry_run=True)
            assert preview == expected(f"preview-{active}-{delivery}")
        applied = ledger.reconcile(active_grace_seconds=30, delivery_grace_seconds=30)
        assert applied == expected("apply-30-30")
        assert without_version(ledger.doctor()) == without_version(expected("doctor-after-apply-30-30"))
    columns = "id, status, terminal_code, delivery_status, delivery_code, version, updated_at, ended_at"
    kept = rows(path, f"SELECT {columns}, delivery_updated_at FROM tsg_tasks ORDER BY id")
    assert [list(row) for row in kept] == expected("rows-after-apply-30-30")


def test_the_adopting_command_says_so_and_the_next_one_does_not(legacy: Callable[[str], Path]) -> None:
    path = legacy("v1")
    first, second = (json.loads(tsg("--db", path, "upgrade").stdout)["schema"] for _ in range(2))
    assert (first["adopted"], second["adopted"]) == (True, False)
    assert first["current"] == first["head"] == second["current"]


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize(
    "way",
    [
        lambda path: Ledger(path),
        lambda path: Ledger(f"sqlite:///{path}"),
        lambda path: Ledger(path, migrate=False),
        lambda path: Ledger(path, migrate=False, adopt=True),
    ],
    ids=["path", "url", "without migration", "adoption without migration"],
)
def test_a_published_file_opens_for_writing_only_on_request(
    legacy: Callable[[str], Path], folder: Path, name: str, way: Callable[[Path], Ledger]
) -> None:
    path = legacy(name)
    before = snapshot(folder)
    with pytest.raises(SchemaOutdated, match="tsg upgrade"):
        way(path)
    assert snapshot(folder) == before


@pytest.mark.parametrize("name", VERSIONS)
def test_a_published_file_behind_an_applications_engine_is_outdated_and_left(
    legacy: Callable[[str], Path], folder: Path, name: str
) -> None:
    path = legacy(name)
    before = snapshot(folder)
    engine = sa.create_engine(f"sqlite:///{path}")
    try:
        for attempt in (
            lambda: Ledger(engine),
            lambda: Ledger(engine, adopt=True),
            lambda: ours.upgrade(engine, "0002"),
            lambda: ours.downgrade(engine, "0001"),
        ):
            with pytest.raises(SchemaOutdated, match="tsg upgrade"):
                attempt()
    finally:
        engine.dispose()
    assert snapshot(folder) == before


@pytest.mark.parametrize("name", VERSIONS)
def test_no_command_but_upgrade_writes_a_published_file(
    legacy: Callable[[str], Path], folder: Path, capsysbinary: pytest.CaptureFixture[bytes], name: str
) -> None:
    path = legacy(name)
    before = snapshot(folder)
    (some,) = rows(path, "SELECT id FROM tasks LIMIT 1")[0]
    for arguments in (
        ("init",),
        ("create",),
        ("start", some),
        ("heartbeat", some),
        ("close", some, "--status", "failed"),
        ("delivery", some, "--status", "failed"),
        ("reconcile",),
        ("reconcile", "--skip-conflicts"),
        ("upgrade", "0002"),
        ("downgrade", "0001"),
        ("downgrade", "base"),
    ):
        answer = command(capsysbinary, "--db", path, *arguments)
        assert answer == (2, b'{"error":"SchemaOutdated","ok":false}\n', b"")
        assert snapshot(folder) == before


UNSAFE = "v1-unsafe-reason"


@pytest.mark.parametrize(
    "way",
    [
        by_ledger,
        by_command,
        by_engine,
        lambda path: Ledger(path, read_only=True),
        lambda path: Ledger(path, read_only=True, adopt=True),
    ],
    ids=["ledger", "command", "engine", "read-only", "read-only adoption"],
)
def test_an_unregistered_reason_in_a_published_file_is_refused_and_nothing_changed(
    legacy: Callable[[str], Path], folder: Path, way: Callable[[Path], object]
) -> None:
    path = legacy(UNSAFE)
    before = snapshot(folder)
    with pytest.raises(StateConflict) as refused:
        way(path)
    assert type(refused.value) is StateConflict
    assert path.read_bytes() == before[path.name][0]
    assert os.listdir(folder) == [path.name]


@pytest.mark.parametrize("way", [Ledger, lambda path: Ledger(path, migrate=False)], ids=["path", "without migration"])
def test_an_unregistered_reason_is_no_way_round_the_request(
    legacy: Callable[[str], Path], folder: Path, way: Callable[[Path], object]
) -> None:
    path = legacy(UNSAFE)
    before = snapshot(folder)
    with pytest.raises(StateConflict):
        way(path)
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("reconcile", "--dry-run"), 2),
        (("upgrade",), 2),
        (("init",), 2),
        (("create",), 2),
        (("reconcile",), 2),
        (("doctor",), 1),
        (("check",), 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_no_command_changes_a_published_file_with_an_unregistered_reason(
    legacy: Callable[[str], Path],
    folder: Path,
    capsysbinary: pytest.CaptureFixture[bytes],
    arguments: tuple[str, ...],
    status: int,
) -> None:
    path = legacy(UNSAFE)
    before = snapshot(folder)
    left, said, complained = command(capsysbinary, "--db", path, *arguments)
    assert (left, complained) == (status, b"")
    if status == 2:
        assert json.loads(said)["error"] in ("StateConflict", "SchemaOutdated")
    assert path.read_bytes() == before[path.name][0]
    assert os.listdir(folder) == [path.name]


# -- itself ----------------------------------------------------------------------------------------------

DIGITS = tuple(f"{first}{'0123456789abcdef' * 2}"[:32] for first in "13579bdf")
IDS = tuple(f"{x[:8]}-{x[8:12]}-{x[12:16]}-{x[16:20]}-{x[20:]}" for x in DIGITS)

# What both packages are asked. Left out, since the contract asks for something else there:
# - booleans for numbers and for clock readings, which only the published package takes ("booleans are not");
# - uuid.UUID objects ("are welcome too"), and text that only int(…, 16) reads: other scripts' digits,
#   underscores, signs ("UUID text in any common form");
# - numbers too large for a float, __float__ that raises, lone surrogates in a path, where the published
#   package lets foreign exceptions out ("never a foreign exception");
# - a clock that itself raises: what comes out of it is the caller's own;
# - no task id: each package draws one of its own;
# - damaged rows: the published package refuses those that are not to be changed too.


def mostly(usual: st.SearchStrategy[Any], rare: list[Any], share: int = 20) -> st.SearchStrategy[Any]:
    """Once in `share` times something rare."""
    return st.integers(1, share).flatmap(lambda draw: st.sampled_from(rare) if draw == share // 2 else usual)


class Halves:
    def __float__(self) -> float:
        return 2.5


WRITTEN = [
    *DIGITS[:3],
    *(text.upper() for text in IDS[:3]),
    *("{" + text + "}" for text in IDS[:3]),
    *(f"urn:uuid:{text}" for text in IDS[:3]),
    f"{DIGITS[0][:3]}-{DIGITS[0][3:]}-",
    "{" + DIGITS[1].upper() + "}",
]
MALFORMED = ["", " ", "x", IDS[0] + " ", IDS[0][:-1], b"1" * 32, 0, 7, [], "\ud800", 1.5]
GOOD_SECONDS = [0, 0.0, 0.5, 1, 2, 5, 30, 600, 5, 30, 2, "5", " 5 ", "1e1", "1_0", b"5", bytearray(b"2"), "٥", 1e308]
GOOD_SECONDS += [Decimal("0.5"), Fraction(1, 2), Halves(), 2**53 + 1]
BAD_SECONDS = [-1, -1e-300, "nan", "inf", float("nan"), float("inf"), "1e400", "x", "", "0x10", "5\0", [], {}, 1j, "-1"]
BAD_FLAGS = [0, 1, None, "yes", 1.0, []]
BAD_DIGESTS = ["0" * 63, "AB" * 32, "ab" * 32 + "\n", "", 0, b"0" * 64, "é" * 64, "\ud800" * 64]
TASK_ENDS = {
    "succeeded": ["completed", "worker_completed"],
    "failed": ["worker_failed"],
    "timed_out": ["deadline_exceeded", "restart_stale"],
    "cancelled": ["caller_cancelled"],
}
DELIVERY_ENDS = {
    "delivered": ["transport_acknowledged"],
    "failed": ["delivery_grace_expired", "transport_failed"],
    "not_applicable": ["internal_task"],
}
CODES = [code for ends in (TASK_ENDS, DELIVERY_ENDS) for codes in ends.values() for code in codes]
BAD_CODES = ["created", "started", "unknown", "COMPLETED", "", 5, b"completed", [], 0, "\ud800", *CODES]
MISNAMED = ["queued", "running", "pending", "bogus", "SUCCEEDED", " failed", "", None, 5, b"failed", [], "\ud800"]
BAD_READINGS = [float("nan"), float("inf"), "x", None, [], 10**400]
ODD_READINGS = [-5, -0.0, 1e308, "3e3", b"2000", Decimal(1500)]


def endings(ends: dict[str, list[str]], misnamed: list[Any]) -> st.SearchStrategy[tuple[Any, Any]]:
    fitting = st.sampled_from([(end, code) for end, codes in ends.items() for code in (None, None, *codes)])
    other = st.tuples(st.sampled_from([*ends, *misnamed]), st.sampled_from([None, *BAD_CODES]))
    return st.integers(1, 6).flatmap(lambda draw: other if draw == 3 else fitting)


known = st.sampled_from(IDS)
identifiers = mostly(known, WRITTEN + MALFORMED, 10)
parents = st.one_of(st.none(), mostly(known, MALFORMED, 15))
seconds = mostly(st.sampled_from(GOOD_SECONDS), BAD_SECONDS, 25)
timeouts = st.one_of(st.none(), seconds)
graces = mostly(seconds, [None, *BAD_SECONDS], 25)
flags = mostly(st.booleans(), BAD_FLAGS, 25)
digests = mostly(st.sampled_from([None, "0" * 64, "ab" * 32]), BAD_DIGESTS, 25)
# Where the clock stands when the verb is called: mostly a little later, at times as before, or earlier.
ticks = st.sampled_from([0, 0, 0, 0.25, 0.5, 0.5, 1, 1, 2, 5, 5, 30, 100, 600, 1e6, -0.5, -1, -40])
readings = mostly(st.none(), BAD_READINGS + ODD_READINGS, 25)


class BothPackages(RuleBasedStateMachine):
    """One history on a file of each, under one clock."""

    template: bytes = b""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=IN_MEMORY))
        self.clock = FakeClock(1000.0)
        self.steps = 0
        self.examined = 0

    @initialize()
    def open(self) -> None:
        self.path, self.published_path = self.folder / "ours.sqlite", self.folder / "published.sqlite"
        if not BothPackages.template:
            Ledger(self.path).close()
            BothPackages.template = self.path.read_bytes()
        self.path.write_bytes(BothPackages.template)
        self.path.chmod(0o600)
        self.ours = Ledger(self.path, clock=self.clock)
        self.published = published.Ledger(self.published_path, clock=self.clock)
        for number, timeout in enumerate((None, 5, 30, None, 600)):
            self.compare("create_task", task_id=IDS[number], timeout_seconds=timeout, delivery_required=number % 2 == 0)

    def teardown(self) -> None:
        try:
            self.ours.close()
            self.compare_files()
        finally:
            self.ours.close()
            shutil.rmtree(self.folder)

    def compare_files(self) -> None:
        self.ours = Ledger(self.path, clock=self.clock, read_only=True)
        self.published = published.Ledger(self.published_path, clock=self.clock, read_only=True)
        self.doctor()
        self.reconcile_both(graces={"active_grace_seconds": 5, "delivery_grace_seconds": 5, "dry_run": True})
        for identifier in IDS:
            self.compare("get_task", identifier)
            self.compare("children_of", identifier)
        self.ours.close()
        copy = self.folder / "adopted.sqlite"
        shutil.copyfile(self.published_path, copy)
        self.ours = Ledger(copy, adopt=True)
        assert self.ours.doctor()["healthy"]
        assert rows(copy, "SELECT * FROM tsg_tasks ORDER BY pk") == rows(
            self.path, "SELECT * FROM tsg_tasks ORDER BY pk"
        )
        every_event = "SELECT * FROM tsg_task_events ORDER BY task_pk, number"
        assert rows(copy, every_event) == rows(self.path, every_event)

    def outcome(self, verb: Callable[[], Any], error: type[Exception]) -> tuple[object, int]:
        read_before = self.clock.readings
        try:
            answer = verb()
        except error as refusal:
            told: object = type(refusal).__name__
        except Exception as foreign:
            told = f"foreign {type(foreign).__name__}"
        else:
            told = self.plain(answer)
        return told, self.clock.readings - read_before

    def plain(self, answer: Any) -> object:
        if isinstance(answer, list):
            return [self.plain(each) for each in answer]
        if not hasattr(answer, "to_dict"):
            return without_version(answer)
        told = answer.to_dict(include_payload_hash=True)
        assert told.pop("expects_heartbeat", True) is True
        shown = answer.to_dict()
        assert "payload_hash" not in shown
        assert shown["has_payload_hash"] is (told["payload_hash"] is not None)
        return {key: (type(value).__name__, value) for key, value in told.items()}

    def agree(self, mine: Callable[[], Any], theirs: Callable[[], Any]) -> object:
        """That both answer alike, and have read the clock as often."""
        self.steps += 1
        answer = self.outcome(mine, LedgerError)
        assert answer == self.outcome(theirs, published.LedgerError)
        return answer[0]

    def compare(self, method: str, *args: Any, **kwargs: Any) -> object:
        return self.agree(
            lambda: getattr(self.ours, method)(*args, **kwargs),
            lambda: getattr(self.published, method)(*args, **kwargs),
        )

    def at(self, tick: float, reading: object, method: str, *args: Any, **kwargs: Any) -> None:
        self.clock.now += tick
        stands, self.clock.now = self.clock.now, self.clock.now if reading is None else reading
        self.compare(method, *args, **kwargs)
        self.clock.now = stands

    def reconcile_both(self, graces: dict[str, object]) -> None:
        self.compare("reconcile", **graces)

    @rule(
        tick=ticks, reading=readings, task=identifiers, parent=parents, timeout=timeouts, digest=digests, required=flags
    )
    def create(
        self,
        tick: float,
        reading: object,
        task: object,
        parent: object,
        timeout: object,
        digest: object,
        required: object,
    ) -> None:
        self.at(
            tick,
            reading,
            "create_task",
            task_id=task,
            parent_id=parent,
            timeout_seconds=timeout,
            payload_hash=digest,
            delivery_required=required,
        )

    @rule(
        task=known,
        gaps=st.lists(st.sampled_from([0, 0.5, 1, 5, 30, 100]), min_size=5, max_size=5),
        verbs=st.sampled_from(["s", "sb", "sc", "sbc", "sbbc", "c", "cd", "scd", "sbcd"]),
        ending=endings(TASK_ENDS, []),
        delivery=endings(DELIVERY_ENDS, []),
    )
    def go_on(self, task: str, gaps: list[float], verbs: str, ending: Any, delivery: Any) -> None:
        try:
            required = self.ours.get_task(task).delivery_required
        except LedgerError:
            self.compare("create_task", task_id=task, delivery_required=ending[0] == "failed")
            required = ending[0] == "failed"
        if required is (delivery[0] == "not_applicable"):
            delivery = ("delivered", None) if required else ("not_applicable", "internal_task")
        for gap, verb in zip(gaps, verbs, strict=False):
            if verb == "s":
                self.at(gap, None, "start_task", task)
            elif verb == "b":
                self.at(gap, None, "heartbeat", task)
            elif verb == "c":
                self.at(gap, None, "close_task", task, ending[0], code=ending[1])
            else:
                self.at(gap, None, "set_delivery", task, delivery[0], code=delivery[1])

    @rule(tick=ticks, task=known, how=st.sampled_from(["same", "timeout", "hash", "parent", "required", "itself"]))
    def create_again(self, tick: float, task: str, how: str) -> None:
        try:
            stored = self.ours.get_task(task)
        except LedgerError:
            return
        asked: dict[str, object] = {
            "task_id": task.upper(),
            "parent_id": stored.parent_id,
            "timeout_seconds": stored.timeout_seconds,
            "payload_hash": stored.payload_hash,
            "delivery_required": stored.delivery_required,
        }
        asked |= {
            "same": {},
            "timeout": {"timeout_seconds": 77},
            "hash": {"payload_hash": "7" * 64},
            "parent": {"parent_id": "0" * 32},
            "required": {"delivery_required": not stored.delivery_required},
            "itself": {"parent_id": task},
        }[how]
        self.at(tick, None, "create_task", **asked)

    @rule(tick=ticks, reading=readings, task=identifiers)
    def start(self, tick: float, reading: object, task: object) -> None:
        self.at(tick, reading, "start_task", task)

    @rule(tick=ticks, reading=readings, task=identifiers)
    def heartbeat(self, tick: float, reading: object, task: object) -> None:
        self.at(tick, reading, "heartbeat", task)

    @rule(tick=ticks, reading=readings, task=identifiers, ending=endings(TASK_ENDS, ["delivered", *MISNAMED]))
    def close(self, tick: float, reading: object, task: object, ending: tuple[object, object]) -> None:
        self.at(tick, reading, "close_task", task, ending[0], code=ending[1])

    @rule(tick=ticks, reading=readings, task=identifiers, ending=endings(DELIVERY_ENDS, ["succeeded", *MISNAMED]))
    def deliver(self, tick: float, reading: object, task: object, ending: tuple[object, object]) -> None:
        self.at(tick, reading, "set_delivery", task, ending[0], code=ending[1])

    @rule(tick=ticks, reading=readings, active=graces, delivery=graces, dry_run=flags)
    def reconcile(self, tick: float, reading: object, active: object, delivery: object, dry_run: object) -> None:
        self.at(
            tick,
            reading,
            "reconcile",
            active_grace_seconds=active,
            delivery_grace_seconds=delivery,
            dry_run=dry_run,
        )

    @rule(
        tick=ticks, active=st.sampled_from(GOOD_SECONDS), delivery=st.sampled_from(GOOD_SECONDS), dry_run=st.booleans()
    )
    def reconcile_after_a_restart(self, tick: float, active: object, delivery: object, dry_run: bool) -> None:
        self.clock.now += tick
        theirs = published.reconcile_restart, published.ReconcilePolicy(active, delivery)
        mine = ours.reconcile_restart, ReconcilePolicy(active, delivery)
        self.agree(
            lambda: mine[0](self.ours, mine[1], dry_run=dry_run),
            lambda: theirs[0](self.published, theirs[1], dry_run=dry_run),
        )

    @rule(task=identifiers)
    def read(self, task: object) -> None:
        self.compare("get_task", task)
        self.compare("children_of", task)

    @precondition(lambda self: self.steps >= self.examined + 25)
    @rule()
    def doctor(self) -> None:
        self.examined = self.steps
        report = self.compare("doctor")
        assert isinstance(report, dict)
        assert report["healthy"]


def test_any_history_goes_the_same_way_on_both_packages() -> None:
    run_state_machine_as_test(BothPackages, settings=STEPS)


@pytest.mark.parametrize("active", [-1, "x", None, float("nan"), []])
def test_a_policy_that_the_published_package_refuses_is_refused(active: object) -> None:
    with pytest.raises(published.InvalidInput):
        published.ReconcilePolicy(active_grace_seconds=active)
    with pytest.raises(InvalidInput):
        ReconcilePolicy(active_grace_seconds=active)


def test_a_file_that_the_published_package_has_open_is_adopted_whole(path: Path, clock: FakeClock) -> None:
    theirs = published.Ledger(path, clock=clock)
    task = theirs.create_task(timeout_seconds=5)
    theirs.start_task(task.id)
    before = as_stored(path)
    with Ledger(path, adopt=True, clock=clock):
        assert as_kept(path) == before
    with pytest.raises((published.LedgerError, sqlite3.Error)) as refused:
        theirs.heartbeat(task.id)
    del refused


def test_a_clock_at_minus_zero_is_told_as_it_is_stored(path: Path, clock: FakeClock) -> None:
    clock.now = -0.0
    with Ledger(path, clock=clock) as ledger:
        told = ledger.create_task()
        assert repr(told) == repr(ledger.get_task(told.id))
