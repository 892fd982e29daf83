"""Storage that fails: a full disk, calls that the system answers with an error, permissions and files that go away.

Each time there is one clear refusal, or an unhealthy report, in bounded time; what was acknowledged is there when the
fault is gone, and no new ledger stands in the old one's place. The real commands and the real methods are run in
children of one warm process (:func:`main`), by itself or under strace.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa

import tsg
from tests.conftest import FakeClock, raw
from tests.damage import some_kinds
from tests.faults import tracing
from tests.faults.test_damaged_files import is_healthy
from tests.tallies import Tally
from tsg import Ledger, LedgerError, StateConflict
from tsg.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
MAIN = "ledger.sqlite"
QUEUED, RUNNING, ENDED, NEW, ANOTHER = (f"00000000-0000-4000-8000-00000000000{number}" for number in range(1, 6))
#: Longer than the wait for a lock, and far from a hang.
PATIENCE = 20
PAGE = 4096

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the faults are made by what Linux has")

_GRACES = ("--active-grace-seconds", "600", "--delivery-grace-seconds", "600")

#: Every command, and what it is called with.
CALLS: dict[str, tuple[str, ...]] = {
    "init": ("init",),
    "create": ("create", "--task-id", NEW, "--parent-id", QUEUED, "--timeout-seconds", "5"),
    "start": ("start", QUEUED),
    "heartbeat": ("heartbeat", RUNNING),
    "close": ("close", RUNNING, "--status", "succeeded", "--code", "completed"),
    "delivery": ("delivery", ENDED, "--status", "delivered"),
    "reconcile": ("reconcile", *_GRACES),
    "reconcile in batches": ("reconcile", *_GRACES, "--batch-size", "3"),
    "reconcile, dry run": ("reconcile", *_GRACES, "--dry-run"),
    "prune": ("prune", "--older-than", "60", "--batch-size", "3"),
    "prune, dry run": ("prune", "--older-than", "60", "--dry-run"),
    "doctor": ("doctor",),
    "upgrade": ("upgrade",),
    "downgrade": ("downgrade", "0003"),
    "current": ("current",),
    "check": ("check",),
}
#: Those that only look.
LOOKS = {"reconcile, dry run", "prune, dry run", "doctor", "current", "check"}
#: On a ledger of an older release, and where there is none.
OLDER, NONE = "upgrade an older one", "init a new one"
#: All methods of one ledger that stays open; the fault comes when it is open already, and goes.
LIFE = "every method"


class Attempt(NamedTuple):
    """A deed, the fault that it meets, and how much or which of it."""

    deed: str
    fault: str = "none"
    at: int = 0


class Outcome(NamedTuple):
    """What came of an attempt; the ledger that it left is in the folder."""

    attempt: Attempt
    status: int
    output: str
    seconds: float
    folder: Path

    @property
    def refused(self) -> bool:
        return self.status != 0

    @property
    def life(self) -> dict[str, dict[str, Any]]:
        answer: dict[str, dict[str, Any]] = json.loads(self.output)
        return answer


States = dict[str, tuple[str, str]]


# -- in the warm process -----------------------------------------------------------------------------------


def main() -> None:
    """Do the attempts of a list, each in a child of its own, on a copy of a ledger; leave what they left."""
    order = json.loads(Path(sys.argv[1]).read_text())
    work, spare = Path(order["work"]), Path(order["spare"])
    for module in {*COMMANDS.values(), "alembic.autogenerate", "tsg.models"}:
        import_module(module)
    # Once as it should be: what is loaded or made on first use is there.
    run_deed(spare / "warm" / MAIN, Attempt(LIFE), silent=True)
    outcomes = []
    for number, fields in enumerate(order["attempts"]):
        attempt = Attempt(*fields)
        work.mkdir(mode=0o700)
        if attempt.deed != NONE:
            template = "older" if attempt.deed == OLDER else "template"
            shutil.copyfile(spare / template, work / "new")
            (work / "new").chmod(0o600)
            (work / "new").rename(work / MAIN)
        outcomes.append(in_child(work / MAIN, attempt, order["call"]))
        kept = spare / str(number)
        kept.mkdir(mode=0o700)
        for entry in list(work.iterdir()):
            shutil.move(entry, kept)
        work.rmdir()
    Path(order["outcomes"]).write_text(json.dumps(outcomes))


def in_child(path: Path, attempt: Attempt, call: list[Any] | None) -> tuple[int, str, float]:
    """The exit status, what was printed, and the seconds that it took; -9 where it had to be killed."""
    read, write = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        os.dup2(write, 2)
        if call is not None:
            # The chosen call of this process is counted down to, so that one strace serves all attempts.
            count_off(*call, attempt.at)
        try:
            run_deed(path, attempt)
        except SystemExit as left:
            sys.stdout.flush()
            os._exit(int(left.code or 0))
        finally:
            os._exit(70)
    os.close(write)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(PATIENCE)
    with open(read, "rb") as pipe:
        printed = pipe.read()
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    return os.waitstatus_to_exitcode(status), printed.decode(), time.monotonic() - began


def count_off(call: str, last: int, counted: str, at: int) -> None:
    """Make `call` on a file of no meaning as often as is left before the one that is to fail is the `at`-th."""
    descriptor = os.open(counted, os.O_RDWR) if call != "openat" else -1
    calls: dict[str, Callable[[], object]] = {
        "pwrite64": lambda: os.pwrite(descriptor, b"x", 0),
        "pread64": lambda: os.pread(descriptor, 1, 0),
        "fdatasync": lambda: os.fdatasync(descriptor),
        "ftruncate": lambda: os.ftruncate(descriptor, 1),
        "openat": lambda: os.close(os.open(counted, os.O_RDONLY)),
        "mmap": lambda: mmap.mmap(descriptor, 1).close(),
        "fcntl": lambda: fcntl.fcntl(descriptor, fcntl.F_GETFD),
    }
    for _ in range(last - at if at else 0):
        calls[call]()


def run_deed(path: Path, attempt: Attempt, *, silent: bool = False) -> None:
    if attempt.deed != LIFE:
        arguments = {OLDER: ("upgrade",), NONE: ("init",)}.get(attempt.deed) or CALLS[attempt.deed]
        with struck(path, attempt):
            command_line = import_module("tsg.cli")
            command_line.main(["--db", str(path), *arguments])
    answer = live(path, attempt)
    if not silent:
        print(json.dumps(answer))
        raise SystemExit(0)


def live(path: Path, attempt: Attempt) -> dict[str, dict[str, Any]]:
    """Do all that can be done with a ledger, with the fault and again without; who refused, and what was promised."""
    clock = FakeClock(1e6)
    answer: dict[str, dict[str, Any]] = {"refused": {}, "foreign": {}, "afterwards": {}, "promised": {}}

    def all_of(ledger: Ledger, new: str, refusals: dict[str, Any]) -> None:
        for name, method in methods(ledger, path, new).items():
            clock.advance(1.0)
            try:
                given = method()
            except LedgerError as error:
                refusals[name] = type(error).__name__
            except Exception as error:
                answer["foreign"][name] = repr(error)
            else:
                if isinstance(given, tsg.TaskRecord):
                    answer["promised"][given.id] = (given.status, given.delivery_status)
                if name in ("doctor", "read-only") and not given["healthy"]:
                    refusals[name] = "unhealthy"

    try:
        with Ledger(path, clock=clock) as ledger:
            with struck(path, attempt):
                all_of(ledger, NEW, answer["refused"])
            all_of(ledger, ANOTHER, answer["afterwards"])
    except LedgerError as error:
        answer["refused"]["opening"] = type(error).__name__
    return answer


def methods(ledger: Ledger, path: Path, new: str) -> dict[str, Callable[[], Any]]:
    def read_only() -> Any:
        with Ledger(path, read_only=True) as reader:
            return reader.doctor()

    graces = {"active_grace_seconds": 600, "delivery_grace_seconds": 600}
    return {
        "create": lambda: ledger.create_task(task_id=new, parent_id=QUEUED),
        "start": lambda: ledger.start_task(new),
        "heartbeat": lambda: ledger.heartbeat(new),
        "heartbeat many": lambda: ledger.heartbeat_many([new]),
        "get": lambda: ledger.get_task(new),
        "children": lambda: ledger.children_of(QUEUED),
        "close": lambda: ledger.close_task(new, "succeeded"),
        "delivery": lambda: ledger.set_delivery(new, "delivered"),
        "preview": lambda: ledger.reconcile(**graces, dry_run=True),
        "reconcile": lambda: ledger.reconcile(**graces),
        "reconcile in batches": lambda: ledger.reconcile(**graces, batch_size=3),
        "prune": lambda: ledger.prune(1e5, 3),
        "doctor": ledger.doctor,
        "storage": ledger.storage_info,
        "read-only": read_only,
    }


# -- the faults ----------------------------------------------------------------------------------------------


@contextmanager
def struck(path: Path, attempt: Attempt) -> Iterator[None]:
    """The fault, for a while."""
    undo = FAULTS[attempt.fault](path, attempt.at)
    try:
        yield
    finally:
        undo()


Undo = Callable[[], object]


def limited(path: Path, size: int) -> Undo:
    """No file may be longer, as on a full disk: other than there, what is left of a write may be done."""
    # Python lets the signal be.
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def full(path: Path, left: int) -> Undo:
    """The small file system that the ledger is on has so many bytes left."""
    filler = path.parent.parent / "filler"
    with open(filler, "wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(PAGE))
        file.truncate(file.tell() - left)
    assert os.statvfs(filler).f_bavail * PAGE == left
    return filler.unlink


def file_mode(path: Path, mode: int) -> Undo:
    path.chmod(mode)
    return lambda: path.chmod(0o600)


def folder_mode(path: Path, mode: int) -> Undo:
    path.parent.chmod(mode)
    return lambda: path.parent.chmod(0o700)


def read_only_mount(path: Path, _: int) -> Undo:
    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,bind,{how}", path.parent.parent], check=True, capture_output=True)

    remount("ro")
    return lambda: remount("rw")


def immutable(path: Path, folder_too: int) -> Undo:
    names = [path, path.parent] if folder_too else [path]
    subprocess.run(["chattr", "+i", *names], check=True, capture_output=True)
    return lambda: subprocess.run(["chattr", "-i", *names], check=True, capture_output=True)


def file_gone(path: Path, _: int) -> Undo:
    away = path.parent.parent / "away"
    path.rename(away)
    return lambda: away.rename(path)


def folder_gone(path: Path, _: int) -> Undo:
    away = path.parent.with_name("away")
    path.parent.rename(away)
    return lambda: away.rename(path.parent)


def first_page_overwritten(path: Path, byte: int) -> Undo:
    return overwritten(path, 0, bytes([byte]) * PAGE)


def tasks_overwritten(path: Path, byte: int) -> Undo:
    """Every page but the schema's."""
    return overwritten(path, 8 * PAGE, bytes([byte]) * (path.stat().st_size - 8 * PAGE))


def another_file(path: Path, byte: int) -> Undo:
    return overwritten(path, 0, bytes([byte]) * path.stat().st_size)


def overwritten(path: Path, start: int, content: bytes) -> Undo:
    # Kept open: to close one would take all of the process's locks on the file.
    descriptor = os.open(path, os.O_RDWR)
    before = os.pread(descriptor, len(content), start)
    os.pwrite(descriptor, content, start)

    def undo() -> None:
        # Neither a new file in its place, nor anything written over what was found.
        assert os.path.samestat(os.fstat(descriptor), path.stat())
        assert os.pread(descriptor, len(content), start) == content
        os.pwrite(descriptor, before, start)

    return undo


FAULTS: dict[str, Callable[[Path, int], Undo]] = {
    "none": lambda path, _: lambda: None,
    "call": lambda path, _: lambda: None,
    "limited": limited,
    "full": full,
    "file mode": file_mode,
    "folder mode": folder_mode,
    "read-only mount": read_only_mount,
    "immutable": immutable,
    "file gone": file_gone,
    "folder gone": folder_gone,
    "first page": first_page_overwritten,
    "tasks": tasks_overwritten,
    "another file": another_file,
}


# -- around it -----------------------------------------------------------------------------------------------


class Bench(NamedTuple):
    """Where attempts are made: an area for the ledger's folder, and beside it what is to stay."""

    area: Path
    spare: Path

    def perform(
        self,
        attempts: Iterable[Attempt],
        *,
        inside: Sequence[str | Path] = (),
        call: tuple[str, int] | None = None,
        inject: str | None = None,
    ) -> tuple[list[Outcome], int]:
        """What came of each attempt, and how many calls were answered with an error.

        Args:
            inside: a command that runs the process in surroundings of its own.
            call: what is counted down to, and to which number.
            inject: what strace does there.
        """
        wanted = [*attempts, Attempt(LIFE)]
        counted = self.area / "counted"
        counted.write_bytes(b"x")
        order = {
            "work": str(self.area / "private"),
            "spare": str(self.spare),
            "attempts": wanted,
            "outcomes": str(self.spare / "outcomes"),
            "call": None if call is None else [*call, str(counted)],
        }
        (self.spare / "order").write_text(json.dumps(order))
        module = f"from {__name__} import main; main()"
        command = [*inside, sys.executable, "-c", module, self.spare / "order"]
        environment = {"PYTHONPATH": str(ROOT)}
        failed = 0
        if inject is None:
            done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=120)
            assert done.returncode == 0, done.stderr
        else:
            assert call is not None
            ledger = self.area / "private" / MAIN
            paths = [counted, *(ledger.with_name(MAIN + suffix) for suffix in ("", "-wal", "-shm", "-journal"))]
            traced = tracing.trace(command, calls=[call[0]], paths=paths, inject=inject, env=environment)
            assert traced.status == 0, traced.stderr
            failed = sum("INJECTED" in one.result for one in traced.calls)
        outcomes = [
            Outcome(attempt, *came, self.spare / str(number))
            for number, (attempt, came) in enumerate(
                zip(wanted, json.loads((self.spare / "outcomes").read_text()), strict=True)
            )
        ]
        last = outcomes.pop()
        assert (last.status, last.life["refused"], last.life["foreign"]) == (0, {}, {}), last
        return outcomes, failed


def furnish(folder: Path) -> Bench:
    bench = Bench(folder / "area", folder / "spare")
    for made in (*bench, bench.spare / "warm"):
        made.mkdir(mode=0o700)
    return bench


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger of every kind of task and of each that the commands name; the same as an older release had it."""
    folder = tmp_path_factory.mktemp("templates")
    folder.chmod(0o700)
    clock = FakeClock()
    with Ledger(folder / "template", clock=clock) as ledger:
        for identifier in (QUEUED, RUNNING, ENDED):
            ledger.create_task(task_id=identifier)
        for identifier in (RUNNING, ENDED):
            ledger.start_task(identifier)
        ledger.close_task(ENDED, "failed")
        for _ in range(4):
            some_kinds(ledger, clock)
    shutil.copyfile(folder / "template", folder / "older")
    engine = sa.create_engine(f"sqlite:///{folder / 'older'}", poolclass=sa.NullPool)
    tsg.downgrade(engine, "0003")
    return folder


@pytest.fixture
def bench(tmp_path: Path, templates: Path) -> Bench:
    return equipped(tmp_path, templates)


def equipped(folder: Path, templates: Path) -> Bench:
    bench = furnish(folder)
    for name in ("template", "older"):
        shutil.copyfile(templates / name, bench.spare / name)
    return bench


def states(path: Path) -> States:
    if not path.exists() or path.stat().st_size == 0:
        return {}
    with closing(raw(path)) as connection:
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            # A new one whose tables were not made.
            return {}
        found = connection.execute("SELECT id, status, delivery_status FROM tsg_tasks").fetchall()
    return {identifier: (status, delivery) for identifier, status, delivery in found}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, templates: Path) -> dict[str, States]:
    """What each deed leaves when nothing fails; and by an empty name what was there before."""
    bench = equipped(tmp_path_factory.mktemp("undisturbed"), templates)
    outcomes, _ = bench.perform(Attempt(deed) for deed in (*CALLS, OLDER, NONE, LIFE))
    for outcome in outcomes:
        assert outcome.status == 0, outcome
    left = {outcome.attempt.deed: states(outcome.folder / MAIN) for outcome in outcomes}
    before = states(templates / "template")
    assert len(before) == 59
    assert left["reconcile"] != before != left["prune"]
    return {"": before, **left}


METHODS = {
    *("create", "start", "heartbeat", "heartbeat many", "get", "children", "close", "delivery", "preview"),
    *("reconcile", "reconcile in batches", "prune", "doctor", "storage", "read-only"),
}
#: The steps of a task, as far as they may have gone without being promised.
STEPS = ("queued", "running", "succeeded", "delivered")
IN_PARTS = {"reconcile in batches", "prune", LIFE}


def judge(outcome: Outcome, undisturbed: dict[str, States]) -> None:
    """That one attempt was refused cleanly or done, and that the ledger that it left is whole and works."""
    attempt, path = outcome.attempt, outcome.folder / MAIN
    said = f"{attempt}: {outcome.status} {outcome.output}"
    assert outcome.seconds < PATIENCE, said
    assert str(path.parent) not in outcome.output, said
    if attempt.deed == LIFE:
        answer = outcome.life
        assert answer["foreign"] == {}, said
        allowed = {"StateConflict", "InvalidInput", "unhealthy"}
        if "create" in answer["refused"] or "create" in answer["afterwards"]:
            allowed.add("TaskNotFound")
        assert {*answer["refused"].values(), *answer["afterwards"].values()} <= allowed, said
    else:
        assert outcome.status in ((0, 1, 2) if attempt.deed in ("doctor", "check") else (0, 2)), said
        line = json.loads(outcome.output)
        assert outcome.output == json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n", said
        if outcome.status == 2:
            assert line in ({"error": name, "ok": False} for name in ("StateConflict", "InvalidInput")), said

    before = {} if attempt.deed == NONE else undisturbed[""]
    after, found = undisturbed[attempt.deed], states(path)
    assert all(found.get(task) in (before.get(task), after.get(task)) for task in before), said
    if attempt.deed not in IN_PARTS:
        assert found in (before, after), said
    if outcome.status == 0 and attempt.deed != LIFE:
        assert found == after, said
    if attempt.deed == LIFE:
        for task, promised in answer["promised"].items():
            assert step(found[task]) >= step(promised), said

    with Ledger(path, clock=lambda: 2e9) as ledger:
        assert is_healthy(path), said
        new = ledger.create_task(parent_id=QUEUED if attempt.deed != NONE else None)
    assert states(path) == {**found, new.id: ("queued", "pending")}


def step(state: Sequence[str]) -> int:
    return STEPS.index(state[1] if state[1] in STEPS else state[0])


# -- a full disk -------------------------------------------------------------------------------------------

EVERY = (*CALLS, OLDER, NONE, LIFE)
#: What can't be done without writing.
WRITES = {*CALLS, OLDER} - LOOKS - {"init", "upgrade"}


def in_a_mount(area: Path, kind: str) -> list[str | Path]:
    """A command's beginning: it sees a file system of its own at `area`, which goes when it ends."""
    mount = {"small": "mount -t tmpfs -o size=512k,mode=700 none", "same": 'mount --bind "$0"'}[kind]
    inside: list[str | Path] = ["unshare", "--mount", "sh", "-c", f'{mount} "$0" && exec "$@"', area]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount, and not in every container")
    return inside


def refused(outcomes: Iterable[Outcome]) -> set[str]:
    return {outcome.attempt.deed for outcome in outcomes if outcome.status != 0}


def test_where_no_file_may_grow_every_command_and_method_refuses_or_does_it_all(
    bench: Bench, undisturbed: dict[str, States], tally: Tally
) -> None:
    attempts = [Attempt(deed, "limited", size) for deed in EVERY for size in (0, 8 * PAGE)]
    attempts += [Attempt(LIFE, "limited", size * PAGE) for size in (1, 5, 9, 12, 16, 24)]
    outcomes, _ = bench.perform(attempts)
    for outcome in outcomes:
        judge(outcome, undisturbed)
        if outcome.attempt.deed == LIFE:
            assert outcome.life["afterwards"] == {}, outcome
    assert refused(outcomes) >= WRITES | {NONE}
    tally("a full disk (no file may grow)", len(outcomes), 0)


def test_on_a_full_disk_every_command_and_method_refuses_or_does_it_all(
    bench: Bench, undisturbed: dict[str, States], tally: Tally
) -> None:
    inside = in_a_mount(bench.area, "small")
    attempts = [Attempt(deed, "full") for deed in EVERY]
    attempts += [Attempt(LIFE, "full", pages * PAGE) for pages in (1, 3, 6, 9, 12, 20, 30)]
    outcomes, _ = bench.perform(attempts, inside=inside)
    for outcome in outcomes:
        judge(outcome, undisturbed)
        if outcome.attempt.deed == LIFE:
            assert outcome.life["afterwards"] == {}, outcome
    assert refused(outcomes) >= WRITES | {NONE}
    tally("a full disk (a small file system)", len(outcomes), 0)


@pytest.mark.parametrize("pages", [0, 1, 3])
def test_in_a_database_that_may_not_grow_every_method_refuses_or_does_it_all(
    path: Path, templates: Path, pages: int, tally: Tally
) -> None:
    shutil.copyfile(templates / "template", path)
    path.chmod(0o600)
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.pool.StaticPool)
    most = 2**30
    with engine.connect() as connection:
        (size,) = connection.exec_driver_sql("PRAGMA page_count").one()
        assert connection.exec_driver_sql(f"PRAGMA max_page_count = {size + pages}").scalar() == size + pages
    clock, done, conflicts = FakeClock(1e6), [], 0
    with Ledger(engine, clock=clock) as ledger:
        for number in range(40 * (pages + 1)):
            try:
                done.append(ledger.create_task(payload_hash=f"{number:064x}", parent_id=QUEUED))
            except StateConflict:
                conflicts += 1
        for name, method in methods(ledger, path, done[0].id if done else QUEUED).items():
            clock.advance(1.0)
            if name not in ("create", "read-only"):
                with suppress(StateConflict):
                    method()
        assert ledger.doctor()["healthy"]
        with engine.connect() as connection:
            connection.exec_driver_sql(f"PRAGMA max_page_count = {most}")
        kept = {task.id for task in ledger.children_of(QUEUED)}
        assert {task.id for task in done} <= kept
        ledger.create_task(payload_hash="f" * 64)
        assert ledger.doctor()["healthy"]
    engine.dispose()
    assert conflicts > 0
    tally("a full database (max_page_count)", conflicts, 0)


# -- permissions and files that go away --------------------------------------------------------------------


def bound_by_modes() -> list[str | Path]:
    """A command's beginning: file modes hold for it, for root too."""
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("root is not bound by modes, and there is no setpriv to bind it")
    return [setpriv, "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]


MODES = {"file mode": (0o400, 0), "folder mode": (0o500, 0)}


def test_where_a_mode_forbids_it_every_command_and_method_refuses_or_does_it_all(
    bench: Bench, undisturbed: dict[str, States], tally: Tally
) -> None:
    cases = [(fault, mode) for fault, modes in MODES.items() for mode in modes]
    attempts = [Attempt(deed, *case) for case in cases for deed in (*CALLS, OLDER, LIFE)]
    outcomes, _ = bench.perform(attempts, inside=bound_by_modes())
    for outcome in outcomes:
        judge(outcome, undisturbed)
        if outcome.attempt.deed == LIFE:
            assert outcome.life["afterwards"] == {}, outcome
    for fault, mode in cases:
        met = refused(outcome for outcome in outcomes if outcome.attempt[1:] == (fault, mode))
        assert met >= (WRITES if mode else {*CALLS}), (fault, mode)
    tally("a mode that forbids it", len(outcomes), 0)


def test_on_a_file_system_mounted_read_only_every_command_and_method_refuses_or_does_it_all(
    bench: Bench, undisturbed: dict[str, States], tally: Tally
) -> None:
    inside = in_a_mount(bench.area, "same")
    outcomes, _ = bench.perform([Attempt(deed, "read-only mount") for deed in (*CALLS, OLDER)], inside=inside)
    for outcome in outcomes:
        judge(outcome, undisturbed)
    assert refused(outcomes) >= WRITES
    tally("a file system mounted read-only", len(outcomes), 0)


def test_on_an_immutable_file_every_command_and_method_refuses_or_does_it_all(
    bench: Bench, undisturbed: dict[str, States], tally: Tally
) -> None:
    trial = bench.spare / "trial"
    trial.touch()
    if os.geteuid() != 0 or subprocess.run(["chattr", "+i", trial], capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may make a file immutable, and not on every file system")
    subprocess.run(["chattr", "-i", trial], check=True)
    attempts = [Attempt(deed, "immutable", folder_too) for folder_too in (0, 1) for deed in (*CALLS, OLDER, LIFE)]
    try:
        outcomes, _ = bench.perform(attempts)
    finally:
        subprocess.run(["chattr", "-R", "-i", bench.area], check=True)
    for outcome in outcomes:
        judge(outcome, undisturbed)
        if outcome.attempt.deed == LIFE:
            assert outcome.life["afterwards"] == {}, outcome
    assert refused(outcomes[: len(outcomes) // 2]) >= WRITES
    assert refused(outcomes[len(outcomes) // 2 :]) >= WRITES
    tally("an immutable file", len(outcomes), 0)


def test_where_the_file_or_its_folder_went_away_every_command_and_method_refuses(
    bench: Bench, undisturbed: dict[str, States], tally: Tally
) -> None:
    # These three may make a ledger where none is.
    asked = [deed for deed in (*CALLS, LIFE) if deed not in ("init", "create", "upgrade")]
    outcomes, _ = bench.perform(Attempt(deed, fault) for fault in ("file gone", "folder gone") for deed in asked)
    for outcome in outcomes:
        judge(outcome, undisturbed)
        if outcome.attempt.deed != LIFE:
            assert (outcome.status, json.loads(outcome.output)["error"]) == (2, "InvalidInput"), outcome
        else:
            assert {*outcome.life["refused"]} == METHODS
            assert {*outcome.life["refused"].values()} == {"StateConflict", "InvalidInput"}
            assert outcome.life["promised"] == {ANOTHER: ["succeeded", "delivered"]}
            assert outcome.life["afterwards"] == {}
    tally("a file or folder that went away", len(outcomes), 0)


def test_on_an_overwritten_file_every_command_gives_one_clear_error_and_makes_nothing_anew(
    bench: Bench, undisturbed: dict[str, States], tally: Tally
) -> None:
    faults = (("first page", 0xA5), ("tasks", 0), ("tasks", 0xA5), ("another file", 0))
    attempts = [Attempt(deed, *fault) for fault in faults for deed in CALLS]
    outcomes, _ = bench.perform(attempts)
    for outcome in outcomes:
        judge(outcome, undisturbed)
        # What the schema's own pages say can be had without the others.
        if outcome.attempt.fault != "tasks" or outcome.attempt.deed not in ("init", "upgrade", "current", "check"):
            assert outcome.status in (1, 2), outcome
    tally("a file overwritten", len(outcomes), 0)


# -- calls that the system answers with an error -------------------------------------------------------------

#: How many calls of a kind one process may make, the one that fails at the latest included.
LAST = 400


@pytest.mark.parametrize(
    ("call", "error", "every"),
    [
        ("pwrite64", "EIO", ""),
        ("pwrite64", "ENOSPC", "+"),
        ("ftruncate", "ENOSPC", "+"),
        ("pread64", "EIO", ""),
        ("fdatasync", "EIO", ""),
        ("openat", "EIO", ""),
        ("mmap", "EIO", ""),
        ("fcntl", "EIO", ""),
    ],
)
def test_whichever_call_fails_every_command_and_method_refuses_or_does_it_all(
    bench: Bench, undisturbed: dict[str, States], call: str, error: str, every: str, rounds: int, tally: Tally
) -> None:
    some = call in ("fdatasync", "ftruncate", "mmap", "openat")
    chosen = {1, 4, 12, 29, 89, *range(1, LAST, max(1, 90_000 // rounds))}
    attempts = [Attempt(LIFE, "call", at) for at in sorted(chosen) if not some or at < 30]
    attempts += [
        Attempt(deed, "call", at)
        for deed in ("create", "reconcile", "prune", OLDER, NONE)
        for at in ((1,) if some else (2, 25))
    ]
    inject = f"{call}:error={error}:when={LAST}{every}"
    outcomes, failed = bench.perform(attempts, call=(call, LAST), inject=inject)
    for outcome in outcomes:
        judge(outcome, undisturbed)
    assert failed >= len(refused(outcomes)) > 0
    tally(f"{error} at a {call}", failed, 0)
