"""Reading without a trace: nothing made, migrated, tightened or checkpointed, whatever stands there."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import tsg
from tests.conftest import FakeClock, expected, raw, snapshot
from tests.conftest import tsg as command
from tsg import InvalidInput, Ledger, LedgerError, SchemaTooNew, StateConflict, TaskNotFound
from tsg.copies import copy_closed, wipe
from tsg.engine import make_engine
from tsg.storage import LedgerFile, locate

pytestmark = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")

QUEUED = "00000000-0000-4000-8000-000000000001"
RUNNING = "00000000-0000-4000-8000-000000000002"
ENDED = "00000000-0000-4000-8000-000000000003"
UNKNOWN = "99999999-9999-4999-8999-999999999999"
DIGEST = "5ca1ab1e" * 8
MIB = 1024 * 1024
PAGE = 4_096


def fill(path: Path, clock: FakeClock) -> None:
    """A ledger with one task of each kind, closed."""
    with Ledger(path, clock=clock) as ledger:
        ledger.create_task(task_id=QUEUED, payload_hash=DIGEST)
        ledger.create_task(task_id=RUNNING, parent_id=QUEUED, timeout_seconds=5)
        ledger.create_task(task_id=ENDED, parent_id=QUEUED)
        ledger.start_task(RUNNING)
        ledger.start_task(ENDED)
        ledger.close_task(ENDED, "succeeded", code="completed")
    clock.advance(1_000)


@pytest.fixture
def filled(path: Path, clock: FakeClock) -> Path:
    fill(path, clock)
    return path


def take_back(path: Path, revision: str) -> None:
    """Make a ledger one of an older release."""
    engine = sa.create_engine(f"sqlite:///{path}")
    tsg.downgrade(engine, revision)
    engine.dispose()


KEEPER = """
import json, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
for line in sys.stdin:
    print(json.dumps(connection.execute(json.loads(line)).fetchall()), flush=True)
connection.close()
"""


class Keeper:
    """Another process with the database open."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def execute(self, statement: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(statement) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self, *, killed: bool = False) -> None:
        """Close it in good order, or not."""
        if killed:
            self._process.kill()
        self._process.communicate()


@contextmanager
def kept_open(path: Path) -> Iterator[Keeper]:
    keeper = Keeper(path)
    try:
        assert keeper.execute("SELECT count(*) > 0 FROM sqlite_master") == [[1]]
        assert {f"{path.name}-wal", f"{path.name}-shm"} <= set(os.listdir(path.parent))
        yield keeper
    finally:
        keeper.end()


def look(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every file of the folder, but of a ``-shm`` only that it is there and with what mode."""
    return {name: found[1:2] if name.endswith("-shm") else found for name, found in snapshot(folder).items()}


@contextmanager
def untouched(folder: Path, looking: Callable[[Path], Any] = look) -> Iterator[None]:
    before = looking(folder)
    yield
    assert looking(folder) == before


def everything(ledger: Ledger, *identifiers: str) -> dict[str, Any]:
    """What every reading method answers."""
    answers: dict[str, Any] = {
        f"preview {active} {delivery}": ledger.reconcile(
            active_grace_seconds=active, delivery_grace_seconds=delivery, dry_run=True, skip_conflicts=skip
        )
        for active, delivery, skip in ((0, 0, False), (600, 600, False), (600, 0, True))
    }
    for identifier in identifiers:
        answers[f"get {identifier}"] = ledger.get_task(identifier)
        answers[f"children of {identifier}"] = ledger.children_of(identifier)
    with pytest.raises(TaskNotFound):
        ledger.get_task(UNKNOWN)
    with pytest.raises(TaskNotFound):
        ledger.children_of(UNKNOWN)
    return answers


# -- a ledger at head ------------------------------------------------------------------------------------


def test_every_reading_method_answers_the_same_from_a_private_copy(filled: Path, clock: FakeClock) -> None:
    with Ledger(filled, clock=clock) as ledger:
        answers, report = everything(ledger, QUEUED, RUNNING, ENDED), ledger.doctor()
    assert answers["preview 0 0"]["tasks_timed_out"] == 1
    with untouched(filled.parent, snapshot):
        with Ledger(filled, clock=clock, read_only=True) as ledger:
            assert everything(ledger, QUEUED, RUNNING, ENDED) == answers
            assert ledger.doctor() == report
            assert ledger.storage_info()["permission_model"] == "posix_mode"
            assert os.listdir(filled.parent) == [filled.name]


def test_every_reading_method_answers_the_same_beside_another_process(filled: Path, clock: FakeClock) -> None:
    with kept_open(filled):
        with Ledger(filled, clock=clock) as ledger:
            ledger.heartbeat(RUNNING)
            clock.advance(700)
            answers, report = everything(ledger, QUEUED, RUNNING, ENDED), ledger.doctor()
        with untouched(filled.parent):
            with Ledger(filled, clock=clock, read_only=True) as ledger:
                assert everything(ledger, QUEUED, RUNNING, ENDED) == answers
                assert ledger.doctor() == report
                assert ledger.storage_info()["journal_mode"] == "wal"


def test_a_live_ledger_shows_what_others_write_meanwhile(filled: Path, clock: FakeClock) -> None:
    with Ledger(filled, clock=clock) as writer, Ledger(filled, clock=clock, read_only=True) as reader:
        writer.heartbeat(RUNNING)
        assert reader.get_task(RUNNING).version == 2
        writer.close_task(RUNNING, "failed")
        assert reader.get_task(RUNNING).status == "failed"
        assert reader.doctor()["event_count"] == 7


def test_what_a_killed_writer_left_is_read_and_not_recovered(filled: Path, clock: FakeClock) -> None:
    keeper = Keeper(filled)
    keeper.execute("UPDATE tsg_tasks SET updated_at = updated_at")
    keeper.execute("CREATE TABLE theirs (n INTEGER)")
    with Ledger(filled, clock=clock) as ledger:
        ledger.close_task(QUEUED, "cancelled")
        with untouched(filled.parent):
            keeper.end(killed=True)
    code = (
        "import os, signal, sys, tsg\n"
        "ledger = tsg.Ledger(sys.argv[1])\n"
        "ledger.start_task(ledger.create_task(task_id=sys.argv[2]).id)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(filled), UNKNOWN], check=False)
    assert len(os.listdir(filled.parent)) == 3
    with untouched(filled.parent):
        with Ledger(filled, read_only=True) as ledger:
            assert ledger.get_task(UNKNOWN).status == "running"
            assert ledger.doctor()["healthy"] is True
    with Ledger(filled) as ledger:
        assert ledger.get_task(UNKNOWN).status == "running"
    assert os.listdir(filled.parent) == [filled.name]


@pytest.mark.parametrize("live", [False, True])
def test_a_dry_run_on_the_command_line_leaves_no_trace(filled: Path, live: bool) -> None:
    def check() -> None:
        with untouched(filled.parent):
            ran = command("--db", filled, "reconcile", "--dry-run")
        assert (ran.returncode, ran.stderr) == (0, b"")
        report = json.loads(ran.stdout)["reconcile"]
        assert (report["dry_run"], report["tasks_timed_out"], report["active_examined"]) == (True, 1, 2)

    if live:
        with kept_open(filled):
            check()
    else:
        check()


def test_a_preview_counts_what_an_apply_at_that_time_changes(filled: Path, clock: FakeClock) -> None:
    with Ledger(filled, clock=clock, read_only=True) as ledger:
        preview = ledger.reconcile(active_grace_seconds=60, delivery_grace_seconds=60, dry_run=True)
    with Ledger(filled, clock=clock) as ledger:
        applied = ledger.reconcile(active_grace_seconds=60, delivery_grace_seconds=60)
    assert applied == {**preview, "dry_run": False, "applied": True}


WRITES: dict[str, Callable[[Ledger], object]] = {
    "create": lambda ledger: ledger.create_task(),
    "start": lambda ledger: ledger.start_task(QUEUED),
    "start again": lambda ledger: ledger.start_task(RUNNING),
    "start unknown": lambda ledger: ledger.start_task(UNKNOWN),
    "heartbeat": lambda ledger: ledger.heartbeat(RUNNING),
    "close": lambda ledger: ledger.close_task(RUNNING, "failed"),
    "close again": lambda ledger: ledger.close_task(ENDED, "succeeded"),
    "deliver": lambda ledger: ledger.set_delivery(ENDED, "delivered"),
    "reconcile": lambda ledger: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0),
    "reconcile restart": lambda ledger: tsg.reconcile_restart(ledger, tsg.ReconcilePolicy()),
}
MALFORMED: dict[str, Callable[[Ledger], object]] = {
    "create": lambda ledger: ledger.create_task(task_id="no id"),
    "create with hash": lambda ledger: ledger.create_task(payload_hash="no hash"),
    "create with timeout": lambda ledger: ledger.create_task(timeout_seconds=-1),
    "create without beats": lambda ledger: ledger.create_task(expects_heartbeat=False),
    "start": lambda ledger: ledger.start_task("no id"),
    "heartbeat": lambda ledger: ledger.heartbeat(None),
    "close": lambda ledger: ledger.close_task("no id", "failed"),
    "close as": lambda ledger: ledger.close_task(RUNNING, "running"),
    "deliver": lambda ledger: ledger.set_delivery("no id", "delivered"),
    "deliver as": lambda ledger: ledger.set_delivery(ENDED, "pending"),
    "reconcile active": lambda ledger: ledger.reconcile(active_grace_seconds=-1, delivery_grace_seconds=0),
    "reconcile delivery": lambda ledger: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds="soon"),
    "reconcile dry": lambda ledger: ledger.reconcile(
        active_grace_seconds=0,
        delivery_grace_seconds=0,
        dry_run=1,  # type: ignore[arg-type]
    ),
    "reconcile skipping": lambda ledger: ledger.reconcile(
        active_grace_seconds=0,
        delivery_grace_seconds=0,
        skip_conflicts="yes",  # type: ignore[arg-type]
    ),
    "reconcile below": lambda ledger: ledger.reconcile(
        active_grace_seconds=0, delivery_grace_seconds=0, parent_id="no id"
    ),
    "get": lambda ledger: ledger.get_task("no id"),
    "children": lambda ledger: ledger.children_of("no id"),
}


def outcome(ask: Callable[[], object]) -> str:
    try:
        ask()
    except LedgerError as error:
        return type(error).__name__
    return "done"


@pytest.mark.parametrize("live", [False, True])
def test_every_writing_method_is_a_conflict_and_malformed_input_comes_first(
    filled: Path, clock: FakeClock, live: bool
) -> None:
    def check() -> None:
        with untouched(filled.parent), Ledger(filled, clock=clock, read_only=True) as ledger:
            readings = clock.readings
            for write in WRITES.values():
                with pytest.raises(StateConflict):
                    write(ledger)
            assert clock.readings == readings
            answers = {name: outcome(lambda ask=ask: ask(ledger)) for name, ask in MALFORMED.items()}  # type: ignore[misc]
            assert answers == dict.fromkeys(MALFORMED, "InvalidInput")

    if live:
        with kept_open(filled):
            check()
    else:
        check()


# -- refusals --------------------------------------------------------------------------------------------


def refused(path: Path, error: type[LedgerError], **arguments: Any) -> None:
    """That opening, or at the latest the first question, is refused as `error`, and leaves no trace."""

    def ask() -> None:
        with Ledger(path, read_only=True, **arguments) as ledger:
            ledger.get_task(QUEUED)

    with untouched(path.parent, snapshot), pytest.raises(error):
        ask()


def test_a_missing_file_is_invalid_input(path: Path) -> None:
    refused(path, InvalidInput)
    with pytest.raises(InvalidInput):
        Ledger(path.parent / "missing" / "ledger.sqlite", read_only=True)
    ran = command("--db", path, "reconcile", "--dry-run")
    assert (ran.returncode, ran.stdout) == (2, b'{"error":"InvalidInput","ok":false}\n')
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("mode", [0o400, 0o200, 0o640, 0o604, 0o644, 0o700, 0o666, 0o4600, 0o1600, 0o000])
def test_any_mode_but_0600_is_invalid_input(filled: Path, mode: int) -> None:
    filled.chmod(mode)
    before = traits(filled)
    with pytest.raises(InvalidInput):
        Ledger(filled, read_only=True)
    assert traits(filled) == before


def traits(path: Path) -> tuple[int, ...]:
    """What tells of a change without reading the file."""
    found = path.stat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def test_a_loose_mode_is_invalid_input_on_the_command_line(filled: Path) -> None:
    filled.chmod(0o644)
    with untouched(filled.parent, snapshot):
        ran = command("--db", filled, "reconcile", "--dry-run")
    assert (ran.returncode, ran.stdout) == (2, b'{"error":"InvalidInput","ok":false}\n')


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
@pytest.mark.parametrize("content", [b"", bytes(32_768)])
def test_one_sidecar_without_the_other_is_a_conflict(filled: Path, suffix: str, content: bytes) -> None:
    sidecar = Path(f"{filled}{suffix}")
    sidecar.write_bytes(content)
    sidecar.chmod(0o600)
    refused(filled, StateConflict)


@pytest.mark.parametrize("content", [b"", b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(512)])
@pytest.mark.parametrize("live", [False, True])
def test_a_rollback_journal_is_a_conflict(filled: Path, content: bytes, live: bool) -> None:
    def check() -> None:
        journal = Path(f"{filled}-journal")
        journal.write_bytes(content)
        journal.chmod(0o600)
        with untouched(filled.parent), pytest.raises(StateConflict):
            Ledger(filled, read_only=True)
        journal.unlink()

    if live:
        with kept_open(filled):
            check()
    else:
        check()


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
@pytest.mark.parametrize("mode", [0o644, 0o400, 0o660])
def test_a_sidecar_that_is_not_private_is_a_conflict(filled: Path, suffix: str, mode: int) -> None:
    with kept_open(filled):
        Path(f"{filled}{suffix}").chmod(mode)
        with untouched(filled.parent), pytest.raises(StateConflict):
            Ledger(filled, read_only=True)


def test_a_ledger_out_of_wal_mode_is_a_conflict(filled: Path) -> None:
    other = raw(filled)
    other.execute("PRAGMA journal_mode = DELETE").fetchall()
    other.close()
    refused(filled, StateConflict)


def test_a_ledger_out_of_wal_mode_beside_old_sidecars_is_a_conflict(filled: Path) -> None:
    other = raw(filled)
    other.execute("PRAGMA journal_mode = DELETE").fetchall()
    other.close()
    for suffix in ("-wal", "-shm"):
        Path(f"{filled}{suffix}").touch(0o600)
    with untouched(filled.parent), pytest.raises(StateConflict):
        Ledger(filled, read_only=True)


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"a line of text\n" * 500, b"SQLite format 3\0", b"SQLite format 3\0\x10\0\2\2" + bytes(8_000)],
)
@pytest.mark.parametrize("sidecars", [False, True])
def test_a_file_that_is_no_ledger_is_a_conflict(path: Path, content: bytes, sidecars: bool) -> None:
    names = ("", "-wal", "-shm") if sidecars else ("",)
    for name in names:
        Path(f"{path}{name}").write_bytes(b"" if name else content)
        Path(f"{path}{name}").chmod(0o600)

    def ask() -> None:
        with Ledger(path, read_only=True) as ledger:
            ledger.get_task(QUEUED)

    with untouched(path.parent), pytest.raises(StateConflict):
        ask()


def test_an_empty_file_on_the_command_line_is_left_empty(path: Path) -> None:
    path.touch(0o600)
    with untouched(path.parent, snapshot):
        ran = command("--db", path, "reconcile", "--dry-run")
    assert (ran.returncode, ran.stderr) == (2, b"")


@pytest.mark.parametrize("tables", ["CREATE TABLE tasks (id INTEGER)", "CREATE VIEW v AS SELECT 1 AS one", ""])
@pytest.mark.parametrize("live", [False, True])
def test_a_database_of_another_application_is_a_conflict(path: Path, tables: str, live: bool) -> None:
    other = raw(path)
    other.execute("PRAGMA journal_mode = WAL").fetchall()
    other.execute(tables)
    other.close()
    path.chmod(0o600)

    def ask() -> None:
        with Ledger(path, read_only=True) as ledger:
            assert ledger.doctor()["schema_ok"] is False
            ledger.get_task(QUEUED)

    if live and tables:
        with kept_open(path), untouched(path.parent), pytest.raises(StateConflict):
            ask()
    else:
        with untouched(path.parent, snapshot), pytest.raises(StateConflict):
            ask()


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("UPDATE tsg_alembic_version SET version_num = '9999'", SchemaTooNew),
        ("DELETE FROM tsg_alembic_version", StateConflict),
        ("CREATE INDEX extra ON tsg_tasks (status)", StateConflict),
        ("DROP TABLE tsg_task_events", StateConflict),
    ],
)
def test_a_schema_that_is_none_of_ours_is_a_conflict_and_doctor_says_so(
    filled: Path, statement: str, error: type[LedgerError]
) -> None:
    other = raw(filled)
    other.execute(statement)
    other.close()
    refused(filled, error)
    with untouched(filled.parent, snapshot), Ledger(filled, read_only=True) as ledger:
        report = ledger.doctor()
    assert (report["healthy"], report["schema_ok"], report["doctor_error_count"]) == (False, False, 1)


def damage(path: Path, table: str) -> None:
    """Overwrite the first page of a table."""
    other = raw(path)
    (page,) = other.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    other.close()
    content = bytearray(path.read_bytes())
    content[(page - 1) * PAGE : page * PAGE] = b"\xa5" * PAGE
    path.write_bytes(content)


@pytest.mark.parametrize("table", ["tsg_tasks", "tsg_task_events"])
def test_a_damaged_ledger_is_reported_and_closes_like_any_other(filled: Path, table: str) -> None:
    damage(filled, table)
    with untouched(filled.parent, snapshot):
        with Ledger(filled, read_only=True) as ledger:
            report = ledger.doctor()
            if table == "tsg_tasks":
                with pytest.raises(StateConflict):
                    ledger.get_task(QUEUED)
    assert (report["healthy"], report["quick_check"]) == (False, "failed")


def test_a_ledger_without_a_readable_page_is_one_clear_conflict(filled: Path) -> None:
    content = bytearray(filled.read_bytes())
    content[PAGE:] = b"\xa5" * (len(content) - PAGE)
    filled.write_bytes(content)
    refused(filled, StateConflict)


def test_a_directory_that_others_may_write_is_invalid_input(filled: Path) -> None:
    filled.parent.chmod(0o770)
    refused(filled, InvalidInput)


# -- the size of a private copy --------------------------------------------------------------------------


def grow(path: Path, size: int) -> None:
    """Let a table of somebody's fill the file up to exactly that many bytes."""
    other = raw(path)
    other.execute("CREATE TABLE filler (content BLOB)")
    (pages,) = other.execute("PRAGMA page_count").fetchone()
    other.execute("INSERT INTO filler VALUES (zeroblob(?))", ((size // PAGE - pages - 8) * (PAGE - 4),))
    while pages < size // PAGE:
        other.execute("INSERT INTO filler VALUES (zeroblob(3000))")
        (pages,) = other.execute("PRAGMA page_count").fetchone()
    other.close()
    assert path.stat().st_size == size


@pytest.mark.parametrize("revision", ["0004", "0001"])
def test_the_limit_is_what_is_still_copied(filled: Path, clock: FakeClock, revision: str) -> None:
    if revision != "0004":
        take_back(filled, revision)
    grow(filled, MIB)
    with untouched(filled.parent, snapshot), Ledger(filled, read_only=True, snapshot_limit_mib=1) as ledger:
        assert ledger.get_task(QUEUED).id == QUEUED
    refused(filled, StateConflict, snapshot_limit_mib=0)
    other = raw(filled)
    other.execute("CREATE TABLE one_page_more (n INTEGER)")
    other.close()
    assert filled.stat().st_size == MIB + PAGE
    refused(filled, StateConflict, snapshot_limit_mib=1)
    with Ledger(filled, read_only=True, snapshot_limit_mib=2) as ledger:
        assert ledger.get_task(QUEUED).id == QUEUED


def test_a_live_ledger_at_head_is_never_too_large(filled: Path) -> None:
    with kept_open(filled), Ledger(filled, read_only=True, snapshot_limit_mib=0) as ledger:
        assert ledger.get_task(QUEUED).id == QUEUED


def test_the_limit_holds_for_the_copy_of_an_older_live_ledger(filled: Path) -> None:
    take_back(filled, "0002")
    grow(filled, MIB)
    with kept_open(filled) as keeper:
        with untouched(filled.parent), Ledger(filled, read_only=True, snapshot_limit_mib=1) as ledger:
            assert ledger.get_task(QUEUED).id == QUEUED
        keeper.execute("CREATE TABLE one_page_more (n INTEGER)")
        with untouched(filled.parent), pytest.raises(StateConflict):
            Ledger(filled, read_only=True, snapshot_limit_mib=1)


def test_the_limit_is_64_mib_unless_said_otherwise(filled: Path) -> None:
    grow(filled, 64 * MIB)
    with Ledger(filled, read_only=True) as ledger:
        assert ledger.get_task(QUEUED).id == QUEUED
    other = raw(filled)
    other.execute("CREATE TABLE one_page_more (n INTEGER)")
    other.close()
    before = traits(filled)
    with pytest.raises(StateConflict):
        Ledger(filled, read_only=True)
    assert traits(filled) == before
    refused_by_command = command("--db", filled, "reconcile", "--dry-run")
    assert (refused_by_command.returncode, refused_by_command.stdout) == (2, b'{"error":"StateConflict","ok":false}\n')
    allowed = command("--db", filled, "reconcile", "--dry-run", "--snapshot-limit-mib", "65")
    assert (allowed.returncode, allowed.stderr) == (0, b"")


def test_a_large_file_that_is_no_ledger_is_refused_unread(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)
    path.chmod(0o600)
    with pytest.raises(StateConflict):
        Ledger(path, read_only=True)
    assert path.stat().st_size == 1 << 40


# -- a file that changes ---------------------------------------------------------------------------------


def by_a_writer_that_closed(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.create_task()


def by_its_time(path: Path) -> None:
    os.utime(path, (1, 1))


def by_its_mode(path: Path) -> None:
    path.chmod(0o640)


def by_a_second_name(path: Path) -> None:
    os.link(path, path.with_name("alias"))


def by_another_file(path: Path) -> None:
    path.with_name("newcomer").write_bytes(path.read_bytes())
    os.replace(path.with_name("newcomer"), path)


def by_its_removal(path: Path) -> None:
    path.unlink()


def by_a_journal(path: Path) -> None:
    Path(f"{path}-journal").touch(0o600)


@pytest.mark.parametrize(
    "change",
    [
        by_a_writer_that_closed,
        by_its_time,
        by_its_mode,
        by_a_second_name,
        by_another_file,
        by_its_removal,
        by_a_journal,
    ],
)
@pytest.mark.parametrize("revision", ["0004", "0002"])
def test_a_file_that_changed_since_it_was_copied_is_a_conflict_from_then_on(
    filled: Path, clock: FakeClock, change: Callable[[Path], None], revision: str
) -> None:
    if revision != "0004":
        take_back(filled, revision)
    with Ledger(filled, clock=clock, read_only=True) as ledger:
        ledger.get_task(QUEUED)
        change(filled)
        for ask in (
            lambda: ledger.get_task(QUEUED),
            lambda: ledger.children_of(QUEUED),
            lambda: ledger.doctor(),
            lambda: ledger.storage_info(),
            lambda: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0, dry_run=True),
        ):
            with pytest.raises(StateConflict):
                ask()


def test_what_a_writer_that_stays_open_has_committed_is_a_conflict_for_a_copy(filled: Path) -> None:
    with Ledger(filled, read_only=True) as reader, Ledger(filled) as writer:
        writer.create_task()
        with pytest.raises(StateConflict):
            reader.get_task(QUEUED)


@pytest.mark.parametrize("revision", ["0003", "0001"])
def test_an_older_live_ledger_never_answers_from_a_copy_that_is_behind(filled: Path, revision: str) -> None:
    take_back(filled, revision)
    with kept_open(filled) as keeper, Ledger(filled, read_only=True) as reader:
        assert reader.get_task(QUEUED).created_at == 1_000.0
        keeper.execute("PRAGMA ignore_check_constraints = ON")
        keeper.execute(f"UPDATE tsg_tasks SET payload_hash = NULL WHERE id = '{QUEUED}'")
        try:
            answer = reader.get_task(QUEUED).payload_hash
        except StateConflict:
            return
        assert answer is None


def test_a_writer_that_checkpoints_and_closes_leaves_a_live_reader_right(filled: Path, clock: FakeClock) -> None:
    with kept_open(filled) as keeper:
        with Ledger(filled, clock=clock, read_only=True) as reader:
            with Ledger(filled, clock=clock) as writer:
                writer.heartbeat(RUNNING)
            keeper.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            assert reader.get_task(RUNNING).version == 2
            keeper.end()
            assert reader.get_task(RUNNING).version == 2
            assert reader.doctor()["healthy"] is True
            with Ledger(filled, clock=clock) as writer:
                writer.heartbeat(RUNNING)
                assert reader.get_task(RUNNING).version == 3
    with Ledger(filled, clock=clock, read_only=True) as reader:
        assert reader.get_task(RUNNING).version == 3
    with Ledger(filled, clock=clock) as writer:
        assert writer.doctor()["healthy"] is True
    assert os.listdir(filled.parent) == [filled.name]


COMES_AND_GOES = """
import sys, time
import tsg
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    with tsg.Ledger(sys.argv[1]) as ledger:
        ledger.heartbeat(sys.argv[3])
"""


def test_beside_a_writer_that_comes_and_goes_a_reader_is_right_or_refused(filled: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", COMES_AND_GOES, str(filled), "2.5", RUNNING])
    answered, version = 0, 0
    while writer.poll() is None:
        try:
            with Ledger(filled, read_only=True) as ledger:
                found = ledger.get_task(RUNNING).version
                assert ledger.doctor()["healthy"] is True
        except StateConflict:
            continue
        assert found >= version
        answered, version = answered + 1, found
    assert writer.returncode == 0
    assert answered > 0
    with Ledger(filled) as ledger:
        assert ledger.doctor()["healthy"] is True
        assert ledger.get_task(RUNNING).version >= version
    assert os.listdir(filled.parent) == [filled.name]


# -- older schemas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("name", ["v1", "v2"])
def test_a_published_file_is_read_without_being_adopted(legacy: Callable[[str], Path], name: str, live: bool) -> None:
    path = legacy(name)
    clock = FakeClock(expected("clock")["now"]) if "now" in expected("clock") else FakeClock(2_000_000_000.0)
    other = raw(path)
    identifiers = [row[0] for row in other.execute("SELECT id FROM tasks ORDER BY rowid")]
    other.close()

    def check() -> None:
        with untouched(path.parent), Ledger(path, clock=clock, read_only=True) as ledger:
            answers = everything(ledger, *identifiers[:5])
            assert answers["preview 600 600"]["active_examined"] == 41
            assert {ledger.get_task(identifier).id for identifier in identifiers} == set(identifiers)
            report = ledger.doctor()
            assert (report["schema_version"], report["schema_ok"]) == (int(name[1:]), False)
            assert (report["healthy"], report["doctor_error_count"], report["task_count"]) == (False, 1, 0)
            assert report["quick_check"] == "ok"
            for write in WRITES.values():
                with pytest.raises(StateConflict):
                    write(ledger)

    if live:
        with kept_open(path):
            check()
    else:
        check()
        assert os.listdir(path.parent) == [path.name]
    other = raw(path)
    assert other.execute("SELECT value FROM schema_meta WHERE key = 'schema_version'").fetchone() == (name[1:],)
    other.close()


@pytest.mark.parametrize("live", [False, True])
def test_a_published_file_with_unsafe_reasons_is_refused(legacy: Callable[[str], Path], live: bool) -> None:
    path = legacy("v1-unsafe-reason")
    if live:
        with kept_open(path), untouched(path.parent), pytest.raises(StateConflict):
            Ledger(path, read_only=True)
    else:
        with untouched(path.parent, snapshot), pytest.raises(StateConflict):
            Ledger(path, read_only=True)


def test_a_preview_of_a_published_file_on_the_command_line_leaves_no_trace(legacy: Callable[[str], Path]) -> None:
    path = legacy("v1")
    with untouched(path.parent, snapshot):
        ran = command("--db", path, "reconcile", "--dry-run")
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert json.loads(ran.stdout)["reconcile"]["active_examined"] == 41


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("revision", ["0001", "0002", "0003"])
def test_an_older_ledger_of_ours_is_read_without_being_migrated(
    filled: Path, clock: FakeClock, revision: str, live: bool
) -> None:
    with Ledger(filled, clock=clock) as ledger:
        answers = everything(ledger, QUEUED, RUNNING, ENDED)
    take_back(filled, revision)

    def check() -> None:
        with untouched(filled.parent), Ledger(filled, clock=clock, read_only=True) as ledger:
            assert everything(ledger, QUEUED, RUNNING, ENDED) == answers
            report = ledger.doctor()
            assert (report["schema_version"], report["schema_ok"]) == (int(revision), False)
            assert (report["healthy"], report["doctor_error_count"], report["task_count"]) == (False, 1, 0)
            assert ledger.storage_info()["permission_model"] == "posix_mode"
            for write in WRITES.values():
                with pytest.raises(StateConflict):
                    write(ledger)

    if live:
        with kept_open(filled):
            check()
    else:
        check()
        assert os.listdir(filled.parent) == [filled.name]
    other = raw(filled)
    assert other.execute("SELECT version_num FROM tsg_alembic_version").fetchone() == (revision,)
    other.close()


# -- the private copy ------------------------------------------------------------------------------------


class Observed(sqlite3.Connection):
    """A connection that remembers what its database held when it was closed."""

    last = b""

    def close(self) -> None:
        self.last = self.serialize()
        super().close()


@pytest.mark.parametrize("name", ["ours", "v1", "v2"])
def test_a_private_copy_is_overwritten_before_it_is_given_back(
    path: Path, clock: FakeClock, legacy: Callable[[str], Path], name: str
) -> None:
    if name == "ours":
        fill(path, clock)
        other = raw(path)
        other.execute('CREATE TABLE "their ""own""" (note TEXT)')
        other.execute('INSERT INTO "their ""own""" VALUES (?)', ("confidential " * 5_000,))
        other.execute('CREATE VIEW v AS SELECT note FROM "their ""own"""')
        other.close()
        table = "tsg_tasks"
    else:
        path, table = legacy(name), "tasks"
    other = raw(path)
    secrets = [row[0].encode() for row in other.execute(f"SELECT id FROM {table}")]
    secrets += [row[0].encode() for row in other.execute(f"SELECT payload_hash FROM {table} WHERE payload_hash > ''")]
    secrets += [b"confidential"] if name == "ours" else []
    other.close()
    copy = sqlite3.connect(":memory:", factory=Observed)
    content = bytearray(path.read_bytes())
    content[18:20] = b"\1\1"
    copy.deserialize(content)
    assert all(secret in copy.serialize() for secret in secrets)
    copy.execute("BEGIN")
    copy.execute(f"UPDATE {table} SET rowid = rowid" if name != "ours" else "SELECT 1")
    wipe(copy)
    assert len(copy.last) > 0
    assert [secret for secret in secrets if secret in copy.last] == []
    with pytest.raises(sqlite3.ProgrammingError):
        copy.execute("SELECT 1")


@pytest.mark.parametrize("pages", [1, 2, 3, 4, 17, 200])
def test_a_private_copy_of_any_size_is_overwritten(pages: int) -> None:
    copy = sqlite3.connect(":memory:", isolation_level=None, factory=Observed)
    copy.execute("PRAGMA user_version = 7")
    if pages > 1:
        copy.execute("CREATE TABLE marked (content BLOB)")
    if pages > 2:
        # A page of the table, and one for each 4,092 bytes that it has no room for.
        copy.execute("INSERT INTO marked VALUES (?)", (b"confidential" * (341 * (pages - 2)) + b"confidential" * 8,))
    assert copy.execute("PRAGMA page_count").fetchone() == (pages,)
    assert (b"confidential" in copy.serialize()) is (pages > 2)
    wipe(copy)
    assert b"confidential" not in copy.last
    assert 0 < len(copy.last) <= pages * 4096


def test_rows_deleted_long_ago_are_overwritten_in_a_private_copy_too() -> None:
    copy = sqlite3.connect(":memory:", factory=Observed, isolation_level=None)
    copy.execute("PRAGMA secure_delete = OFF").fetchall()
    for table in ("kept", "dropped"):
        copy.execute(f"CREATE TABLE {table} (note TEXT)")
        copy.executemany(f"INSERT INTO {table} VALUES (?)", [(f"confidential {number} " * 40,) for number in range(99)])
    copy.execute("DELETE FROM kept WHERE rowid % 2")
    copy.execute("DROP TABLE dropped")
    wipe(copy)
    assert copy.last.count(b"confidential") == 0


@pytest.mark.parametrize("revision", ["0001", "0002", "0003"])
def test_what_bringing_a_private_copy_to_head_left_over_is_overwritten_too(filled: Path, revision: str) -> None:
    take_back(filled, revision)
    copy = sqlite3.connect(":memory:", factory=Observed, check_same_thread=False)
    other = raw(filled)
    other.backup(copy)
    other.close()
    engine = make_engine(lambda: copy, busy_timeout_ms=0, shared=True)
    tsg.upgrade(engine)
    wipe(copy)
    assert DIGEST.encode() not in copy.last
    assert QUEUED.encode() not in copy.last


def test_a_private_copy_that_may_not_be_written_is_overwritten_all_the_same(filled: Path) -> None:
    file: LedgerFile = locate(filled)
    loaded = copy_closed(file)
    copy = sqlite3.connect(":memory:", factory=Observed)
    loaded.backup(copy)
    loaded.close()
    copy.execute("PRAGMA query_only = ON")
    copy.execute("PRAGMA foreign_keys = ON")
    wipe(copy)
    assert QUEUED.encode() not in copy.last
    assert DIGEST.encode() not in copy.last


OPEN_AND_WAIT = """
import sys
import tsg
ledger = tsg.Ledger(sys.argv[1], read_only=True)
print("held", flush=True)
sys.stdin.readline()
ledger.close()
print("gone", flush=True)
sys.stdin.readline()
"""


def memory_holds(pid: int, wanted: bytes) -> bool:
    """Whether those bytes stand anywhere in what another process may write to."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, access = line.split()[:2]
            if not access.startswith("rw"):
                continue
            start, end = (int(bound, 16) for bound in span.split("-"))
            try:
                memory.seek(start)
                if wanted in memory.read(end - start):
                    return True
            except OSError:
                continue
    return False


def held_and_left(program: str, arguments: Sequence[object], wanted: bytes) -> tuple[bool, bool]:
    """Whether those bytes are in the memory of a program that says it has opened something, and when it has let it go.

    It waits for a line after each; and must end well.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        try:
            present = memory_holds(process.pid, wanted)
        except PermissionError:
            pytest.skip("this user may not look at another process's memory")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "gone\n"
        left = memory_holds(process.pid, wanted)
    finally:
        process.communicate("\n")
    assert process.returncode == 0
    return present, left


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="another process's memory is looked at")
def test_after_closing_no_byte_of_the_private_copy_is_left_in_memory(filled: Path) -> None:
    assert held_and_left(OPEN_AND_WAIT, [filled], DIGEST.encode()) == (True, False)


def test_a_read_only_ledger_may_be_opened_many_times_at_once(filled: Path) -> None:
    with untouched(filled.parent, snapshot):
        ledgers = [Ledger(filled, read_only=True) for _ in range(5)]
        assert {ledger.get_task(QUEUED).id for ledger in ledgers} == {QUEUED}
        for ledger in ledgers:
            ledger.close()


def test_reading_does_not_keep_a_writer_out(filled: Path, clock: FakeClock) -> None:
    with Ledger(filled, clock=clock) as writer:
        readers = [Ledger(filled, clock=clock, read_only=True) for _ in range(3)]
        for reader in readers:
            reader.get_task(QUEUED)
        writer.start_task(QUEUED)
        for reader in readers:
            assert reader.get_task(QUEUED).status == "running"
            reader.close()
