"""Reading only, seen from outside: by the calls that the process makes, and by what stands in the folder after."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import raw
from tests.faults.test_hostile_neighbours import SEVERAL
from tests.faults.tracing import CHANGES, Call, Traced, trace
from tests.tallies import Tally
from tests.test_read_only import MIB, PAGE, grow, held_and_left, kept_open, take_back
from tests.test_storage import tree, untouched
from tsg import Ledger

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="strace and /proc are Linux's")

QUEUED = "00000000-0000-4000-8000-000000000001"
RUNNING = "00000000-0000-4000-8000-000000000002"
#: What is looked for in memory; nothing else than a copy of the file ever holds it.
MARKER = "5ec2e75a" * 4

OPENING = ("open", "openat", "openat2", "creat")

#: Every reading method of each of several ledgers, as many times as it is told; says of each how often it was opened,
#: and how often it was refused. Nothing but an error of ours may come.
READING = """
import json, sys
import tsg
paths, options, times = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
task = "00000000-0000-4000-8000-000000000001"

def ask(work):
    try:
        work()
    except (tsg.TaskNotFound, tsg.StateConflict):
        pass

told = []
for path in paths:
    opened = refused = 0
    for _ in range(times):
        try:
            with tsg.Ledger(path, read_only=True, **options) as ledger:
                opened += 1
                ask(ledger.storage_info)
                ask(ledger.doctor)
                ask(lambda: ledger.get_task(task))
                ask(lambda: ledger.children_of(task))
                for skip in (False, True):
                    ask(lambda: ledger.reconcile(
                        active_grace_seconds=0, delivery_grace_seconds=0, dry_run=True, skip_conflicts=skip
                    ))
                ask(lambda: tsg.reconcile_restart(ledger, tsg.ReconcilePolicy(), dry_run=True))
                ask(lambda: ledger.prune(0, dry_run=True))
                for write in (ledger.create_task, lambda: ledger.start_task(task), lambda: ledger.prune(0)):
                    try:
                        write()
                    except tsg.StateConflict:
                        pass
                    else:
                        raise AssertionError("written")
        except tsg.StateConflict:
            refused += 1
    told.append([opened, refused])
print(json.dumps(told))
"""


def filled(path: Path) -> Path:
    """A ledger with a few tasks and a table of somebody else's, closed."""
    now = 1_000.0
    with Ledger(path, clock=lambda: now) as ledger:
        ledger.create_task(task_id=QUEUED)
        ledger.create_task(task_id=RUNNING, parent_id=QUEUED, timeout_seconds=5)
        ledger.start_task(RUNNING)
    other = raw(path)
    other.execute("CREATE TABLE marked (note TEXT)")
    other.executemany("INSERT INTO marked VALUES (?)", [(MARKER * 200,) for _ in range(20)])
    other.close()
    return path


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    folder.chmod(0o700)
    return filled(folder / "ledger.sqlite")


@pytest.fixture
def ledger_file(path: Path, template: Path) -> Path:
    shutil.copyfile(template, path)
    path.chmod(0o600)
    return path


def older(path: Path) -> None:
    take_back(path, "0001")


# -- by its calls --------------------------------------------------------------------------------------------


def opened_for_writing(calls: Sequence[Call]) -> list[Call]:
    """Those that opened, or tried to open, a file for more than reading it."""
    return [
        call for call in calls if call.name in OPENING and re.search(r"O_(WRONLY|RDWR|CREAT|TRUNC)", call.arguments)
    ]


def is_output(call: Call) -> bool:
    """Whether it writes to stdout or stderr, which are pipes here."""
    return call.name in ("write", "writev") and re.match(r"[12]<pipe:", call.arguments) is not None


def faults_of(traced: Traced, paths: Iterable[Path], *, live: bool) -> list[Call]:
    """What a reader has asked for that is not reading.

    SQLite opens the sidecars of a database in use as if it were to write, which makes none that is there. Run by root,
    it gives them to the database's owner, who has them already. Into a ``-shm`` that is there it may write.
    """
    sidecars = {f"{path}{suffix}" for path in paths for suffix in ("-wal", "-shm")} if live else set()
    found = [
        call
        for call in opened_for_writing(traced.calls)
        if not sidecars & set(re.findall('"([^"]*)"', call.arguments)) and '"/dev/null"' not in call.arguments
    ]
    kept = re.compile(rf"\d+<([^>]*)>, {os.geteuid()}, {os.getegid()}\Z")
    shared = re.compile(r"\d+<([^>]*-shm)>, ")
    for call in traced.calls:
        if call.name in CHANGES and not is_output(call):
            given = kept.match(call.arguments) if call.name == "fchown" else shared.match(call.arguments)
            if given is None or given[1] not in sidecars:
                found.append(call)
    return found


def read(paths: Sequence[Path], *, options: str = "{}", times: int = 1, env: dict[str, str] | None = None) -> Traced:
    named = json.dumps([str(path) for path in paths])
    traced = trace(
        [sys.executable, "-c", READING, named, options, str(times)], calls=[*CHANGES, *OPENING], env=env, timeout=60
    )
    # It was really these files that were watched.
    opened = " ".join(call.arguments for call in traced.calls if call.name in OPENING)
    assert all(f'"{path}"' in opened for path in paths)
    return traced


def answers_of(traced: Traced) -> list[list[int]]:
    """How often each was opened, and refused."""
    assert (traced.status, traced.stderr) == (0, b"")
    answers: list[list[int]] = json.loads(traced.stdout)
    return answers


def contents(folder: Path) -> dict[str, Any]:
    """All of a folder and of itself, but of a ``-shm`` neither bytes nor time."""
    return {name: traits[:5] if name.endswith("-shm") else traits for name, traits in tree(folder).items()}


@pytest.fixture
def of_every_schema(ledger_file: Path, folder: Path, legacy: Callable[[str], Path]) -> list[Path]:
    """A ledger at head, older ones of ours and of the published package, and last one that can't be brought to head."""
    paths = [ledger_file]
    for revision in ("0003", "0001"):
        paths.append(folder / f"{revision}.sqlite")
        shutil.copyfile(ledger_file, paths[-1])
        paths[-1].chmod(0o600)
        take_back(paths[-1], revision)
    return [*paths, legacy("v1"), legacy("v2"), legacy("v1-unsafe-reason")]


@contextmanager
def writers_of(paths: Sequence[Path]) -> Iterator[None]:
    """Each is open in a process that has written to its WAL."""
    with ExitStack() as stack:
        for path in paths:
            keeper = stack.enter_context(kept_open(path))
            ((table,),) = keeper.execute("SELECT name FROM sqlite_master WHERE name IN ('tasks', 'tsg_tasks')")
            keeper.execute(f"UPDATE {table} SET updated_at = updated_at")
            assert os.path.getsize(f"{path}-wal") > 0
        yield


@pytest.mark.parametrize("live", [False, True])
def test_every_reading_method_asks_the_system_for_nothing_but_to_read(
    of_every_schema: list[Path], folder: Path, live: bool, tally: Tally
) -> None:
    with writers_of(of_every_schema) if live else nullcontext(), untouched(folder, contents):
        traced = read(of_every_schema)
    faults = faults_of(traced, of_every_schema, live=live)
    tally("a reader watched", len(traced.calls), len(faults))
    assert answers_of(traced) == [[1, 0]] * 5 + [[0, 1]]
    assert faults == []


@pytest.mark.parametrize("live", [False, True])
def test_a_dry_run_on_the_command_line_asks_the_system_for_nothing_but_to_read(
    of_every_schema: list[Path], folder: Path, live: bool, tally: Tally
) -> None:
    commands = (["reconcile", "--dry-run", "--skip-conflicts"], ["prune", "--older-than", "0", "--dry-run"])
    asked = [["--db", str(path), *command] for path in of_every_schema for command in commands]
    with writers_of(of_every_schema) if live else nullcontext(), untouched(folder, contents):
        traced = trace([sys.executable, "-c", SEVERAL, json.dumps(asked)], calls=[*CHANGES, *OPENING], timeout=60)
    faults = faults_of(traced, of_every_schema, live=live)
    tally("a dry run watched", len(traced.calls), len(faults))
    assert (traced.status, traced.stderr) == (0, b"")
    assert [told[0] for told, _ in json.loads(traced.stdout)] == [0] * 10 + [2] * 2
    assert any(is_output(call) for call in traced.calls)
    assert faults == []


def test_at_the_limit_and_a_page_above_it_nothing_is_asked_for_but_to_read(ledger_file: Path, folder: Path) -> None:
    grow(ledger_file, MIB)
    above = folder / "above.sqlite"
    shutil.copyfile(ledger_file, above)
    above.chmod(0o600)
    other = raw(above)
    other.execute("CREATE TABLE one_page_more (n INTEGER)")
    other.close()
    assert (ledger_file.stat().st_size, above.stat().st_size) == (MIB, MIB + PAGE)
    with untouched(folder):
        traced = read([ledger_file, above], options='{"snapshot_limit_mib": 1}')
    assert answers_of(traced) == [[1, 0], [0, 1]]
    assert faults_of(traced, [], live=False) == []


def test_a_copy_of_64_mib_is_taken_without_a_file_beside_it(ledger_file: Path, folder: Path, tmp_path: Path) -> None:
    grow(ledger_file, 64 * MIB)
    # All but when it was last read.
    before = [(*entry.stat()[:7], entry.stat().st_mtime_ns) for entry in (folder, ledger_file)]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    traced = read([ledger_file], env={"SQLITE_TMPDIR": str(temporary), "TMPDIR": str(temporary)})
    after = [(*entry.stat()[:7], entry.stat().st_mtime_ns) for entry in (folder, ledger_file)]
    assert answers_of(traced) == [[1, 0]]
    assert faults_of(traced, [], live=False) == []
    assert after == before
    assert (os.listdir(folder), os.listdir(temporary)) == ([ledger_file.name], [])


#: A writer that stays, and one that comes and goes.
WRITING = {
    "commits and checkpoints": """
import sys, sqlite3
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
print("ready", flush=True)
while True:
    connection.execute("UPDATE tsg_tasks SET updated_at = updated_at")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
""",
    "comes and goes": """
import sys, time, tsg
print("ready", flush=True)
while True:
    with tsg.Ledger(sys.argv[1]) as ledger:
        ledger.create_task()
        time.sleep(0.01)
    time.sleep(0.01)
""",
}


@pytest.mark.parametrize("writing", WRITING)
def test_beside_a_busy_writer_a_reader_asks_for_nothing_but_to_read(
    ledger_file: Path, folder: Path, writing: str, rounds: int, tally: Tally
) -> None:
    times = max(rounds // 10, 10)
    writer = subprocess.Popen([sys.executable, "-c", WRITING[writing], ledger_file], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == b"ready\n"
        traced = read([ledger_file], times=times)
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.communicate()
    ((answered, refused),) = answers_of(traced)
    faults = faults_of(traced, [ledger_file], live=True)
    tally(f"a reader beside one who {writing}", answered + refused, len(faults))
    assert answered + refused == times
    assert answered > 0
    assert faults == []
    with Ledger(ledger_file) as ledger:
        assert ledger.doctor()["healthy"] is True
    assert os.listdir(folder) == [ledger_file.name]


#: Opens to read, and is held up as soon as SQLite has opened the file, before it has looked at anything.
HELD_UP = """
import sys, tsg
waiting = []
def hold(event, arguments):
    if event == "sqlite3.connect/handle" and not waiting:
        waiting.append(1)
        print("held", flush=True)
        sys.stdin.readline()
sys.addaudithook(hold)
try:
    with tsg.Ledger(sys.argv[1], read_only=True) as ledger:
        print(ledger.get_task(sys.argv[2]).id)
except tsg.StateConflict:
    print("refused")
"""


def test_where_a_writer_leaves_in_the_instant_in_which_a_reader_comes_there_are_at_most_empty_sidecars(
    ledger_file: Path, folder: Path, tally: Tally
) -> None:
    with kept_open(ledger_file) as keeper:
        reader = subprocess.Popen(
            [sys.executable, "-c", HELD_UP, ledger_file, QUEUED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.stdout is not None
        assert reader.stdout.readline() == "held\n"
        keeper.end()
        assert os.listdir(folder) == [ledger_file.name]
        before = tree(folder)[ledger_file.name]
        out, _ = reader.communicate("\n", timeout=60)
    # SQLite itself makes them, before anybody can tell; THREAT_MODEL.md says so.
    made = set(os.listdir(folder)) - {ledger_file.name}
    allowed = {f"{ledger_file.name}-{suffix}" for suffix in ("wal", "shm")}
    unharmed = tree(folder)[ledger_file.name] == before and made <= allowed
    tally("a writer that leaves as a reader comes", 1, int(not unharmed))
    assert (reader.returncode, out in ("refused\n", f"{QUEUED}\n")) == (0, True)
    assert unharmed
    assert all((folder / name).stat().st_size == 0 for name in made if name.endswith("-wal"))
    with Ledger(ledger_file) as ledger:
        assert ledger.get_task(QUEUED).id == QUEUED
    assert os.listdir(folder) == [ledger_file.name]


# -- the private copy in memory -------------------------------------------------------------------------------

#: Does something with a private copy, and waits to be looked at while it has it, and when it should be gone.
KEEPING = """
import gc, sys
from pathlib import Path
import tsg
path, how = sys.argv[1:3]
def show(word):
    print(word, flush=True)
    sys.stdin.readline()
def use(ledger):
    ledger.doctor()
    try:
        ledger.get_task("00000000-0000-4000-8000-000000000001")
    except tsg.StateConflict:
        pass
if how == "closed":
    with tsg.Ledger(path, read_only=True) as ledger:
        use(ledger)
        show("held")
elif how == "an exception":
    try:
        with tsg.Ledger(path, read_only=True) as ledger:
            use(ledger)
            show("held")
            raise RuntimeError
    except RuntimeError:
        pass
elif how == "a refusal":
    with tsg.Ledger(path, read_only=True) as ledger:
        use(ledger)
        show("held")
        try:
            ledger.create_task()
        except tsg.StateConflict:
            pass
elif how == "forgotten":
    ledger = tsg.Ledger(path, read_only=True)
    use(ledger)
    show("held")
    del ledger
    gc.collect()
elif how == "refused":
    # Nobody holds a copy of it but this, by which is seen that one would be found.
    content = bytearray(Path(path).stat().st_size)
    with open(path, "rb", buffering=0) as file:
        file.readinto(content)
    show("held")
    content[:] = bytes(len(content))
    for _ in range(3):
        try:
            tsg.Ledger(path, read_only=True)
        except tsg.LedgerError:
            pass
        else:
            raise AssertionError("opened")
show("gone")
"""


def damage_the_first_table(path: Path) -> None:
    other = raw(path)
    (page,) = other.execute("SELECT rootpage FROM sqlite_master WHERE name = 'tsg_tasks'").fetchone()
    other.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * PAGE)
        file.write(b"\xa5" * PAGE)


def damage_the_schema(path: Path) -> None:
    other = raw(path)
    other.execute("PRAGMA writable_schema = ON")
    other.execute("UPDATE sqlite_master SET sql = 'nonsense' WHERE name = 'tsg_task_events'")
    other.close()


def as_it_is(path: Path) -> None:
    pass


def of_a_later_release(path: Path) -> None:
    other = raw(path)
    other.execute("UPDATE tsg_alembic_version SET version_num = '9999'")
    other.close()


def of_an_older_release_that_is_refused(path: Path) -> None:
    """Brought to head, its rows would break a rule there."""
    older(path)
    other = raw(path)
    other.execute("PRAGMA ignore_check_constraints = ON")
    other.execute("DROP TRIGGER IF EXISTS tsg_tasks_update")
    other.execute("UPDATE tsg_tasks SET terminal_code = 'their own words'")
    other.close()


@pytest.mark.parametrize(
    ("state", "how"),
    [
        (as_it_is, "an exception"),
        (as_it_is, "a refusal"),
        (as_it_is, "forgotten"),
        (older, "closed"),
        (older, "an exception"),
        (damage_the_first_table, "closed"),
        (damage_the_first_table, "forgotten"),
        (of_an_older_release_that_is_refused, "refused"),
        (damage_the_schema, "refused"),
    ],
)
def test_no_byte_of_a_private_copy_is_left_in_memory_however_it_ends(
    ledger_file: Path, folder: Path, state: Callable[[Path], None], how: str, tally: Tally
) -> None:
    state(ledger_file)
    assert MARKER.encode() in ledger_file.read_bytes()
    with untouched(folder):
        present, left = held_and_left(KEEPING, [ledger_file, how], MARKER.encode())
    tally("a private copy given up", 1, int(left))
    assert (present, left) == (True, False)
