"""Commands that are killed at any of the calls by which they change a file: all of it is done, or nothing."""

from __future__ import annotations

import json
import platform
import shutil
import sqlite3
import stat
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import DATA, FakeClock, expected
from tests.faults.tracing import trace
from tests.faults.writers import FAULTY_CALL, HARMLESS, Job, Met, Zygote
from tests.tallies import Tally
from tests.test_storage import posix
from tsg import Ledger
from tsg.checkup import examine_file
from tsg.schema import HEAD, REVISIONS

pytestmark = [posix, pytest.mark.skipif(platform.system() != "Linux", reason="strace is Linux's")]

NAME = "ledger.sqlite"
SIDECARS = ("-journal", "-wal", "-shm")
OURS = {NAME, *(NAME + suffix for suffix in SIDECARS)}
#: Of which a call may be met, the folder among them.
FILES = (".", *OURS)
KILLED = -9
KILL = "signal=KILL:when={}"
BATCH = 2
#: How often each kind of call is met, of 300 rounds; more rounds meet more of them, up to all.
CALLS = {"pwrite64": 5, "fcntl": 1, "fdatasync": 1, "ftruncate": 1, "unlink": 1, "openat": 1}
MAKING = {"mkdir": 1, "chmod": 1, "fchmod": 1}


class Place(NamedTuple):
    """Where a command is met: its ledger is in a folder that is put there for each process, and taken away."""

    folder: Path

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def ledger(self) -> Path:
        return self.work / "private" / NAME

    def before(self, name: str, source: Path | None) -> Path:
        """A folder as it is before the command, with a private copy of a ledger in it."""
        start = self.folder / "before" / name.replace(" ", "_")
        start.mkdir(parents=True)
        if source is not None:
            (start / "private").mkdir(mode=0o700)
            shutil.copyfile(source, start / "private" / NAME)
            (start / "private" / NAME).chmod(0o600)
        return start

    def meet(self, jobs: list[Job], calls: dict[str, int], fault: str, files: Sequence[str] = FILES) -> list[Met]:
        """How each process ended that was met by `fault`, and the one of each kind of call that was not.

        Args:
            fault: in strace's words; what stands in it for the number of the call is put there.
            files: the calls on which of the ledger's files count.
        """
        plan, met = self.folder / "plan.json", self.folder / "met.json"
        plan.write_text(json.dumps({"jobs": jobs, "calls": calls, "met": str(met)}))
        watched = [self.work / "private" / name for name in files]
        watched += [self.folder / name for name in ("harmless", "missing", "missing/below")]
        kinds = ",".join(f"?{name}" for name in calls)
        traced = trace(
            [sys.executable, "-W", "error", "-m", "tests.faults.writers", str(self.work), str(plan)],
            calls=calls,
            paths=watched,
            inject=f"{kinds}:{fault.format(FAULTY_CALL)}",
            timeout=600,
        )
        assert (traced.status, traced.stderr) == (0, b""), traced.stderr.decode()[-2000:]
        return [Met(*fields) for fields in json.loads(met.read_text())]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    assert set(CALLS | MAKING) == set(HARMLESS)
    tmp_path.chmod(0o700)
    return Place(tmp_path)


def limits(calls: dict[str, int], rounds: int) -> dict[str, int]:
    return {call: max(1, limit * rounds // 300) for call, limit in calls.items()}


class Left(NamedTuple):
    """What a process left, looked at through a copy, since to look is to clean up."""

    files: set[str]
    dump: tuple[str, ...]

    @classmethod
    def by(cls, met: Met) -> Left:
        folder = Path(met.folder, "private")
        if not folder.exists():
            return cls(set(), ())
        files = {entry.name for entry in folder.iterdir()}
        assert all(stat.S_IMODE(entry.stat().st_mode) == 0o600 for entry in folder.iterdir()), met
        if NAME not in files:
            return cls(files, ())
        copy = Path(shutil.copytree(folder, Path(f"{met.folder}.look")))
        with closing(sqlite3.connect(copy / NAME)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)], met
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == [], met
            dump = tuple(connection.iterdump())
        assert not any("_alembic_tmp_" in line for line in dump), met
        shutil.rmtree(copy)
        return cls(files, dump)


def one_without_a_fault(met: list[Met], job: Job) -> Met:
    """A process that met none, because it had fewer calls than that."""
    spared = [one for one in met if one.job == job.name and one.status == 0]
    assert spared, f"{job.name}: nobody came to the end"
    return spared[0]


def command_at(met: Met, job: Job) -> list[str]:
    """The same command again, where the process left its ledger."""
    return ["--db", str(Path(met.folder, "private", NAME)), *job.arguments[2:]]


# -- a schema that is made, or moves -------------------------------------------------------------------------


MOVES: dict[str, tuple[str | None, list[str]]] = {
    "init": (None, ["init"]),
    **{f"upgrade {name}": (f"revisions/{name}", ["upgrade"]) for name in REVISIONS[:-1]},
    "adopt v1": ("legacy/v1", ["upgrade"]),
    "adopt v2": ("legacy/v2", ["upgrade"]),
    "downgrade": (f"revisions/{HEAD}", ["downgrade", REVISIONS[-2]]),
}


@pytest.mark.parametrize(
    "names",
    [["init", "downgrade"], [f"upgrade {name}" for name in REVISIONS[:-1]], ["adopt v1", "adopt v2"]],
    ids=["made and taken back", "upgraded", "adopted"],
)
def test_a_schema_whose_move_is_killed_at_any_call_is_the_old_one_or_the_new_one_and_moves_the_next_time(
    zygote: Zygote, place: Place, names: list[str], rounds: int, tally: Tally
) -> None:
    jobs = []
    for name in names:
        source, verb = MOVES[name]
        start = place.before(name, source and DATA / f"{source}.sqlite")
        jobs.append(Job(name, str(start), ["--db", str(place.ledger), *verb]))
    calls = limits(CALLS | (MAKING if "init" in names else {}), rounds)
    met = place.meet(jobs, calls, KILL)
    moments: set[bool] = set()
    for job in jobs:
        fine = one_without_a_fault(met, job)
        after = Left.by(fine).dump
        assert Left.by(fine).files == {NAME}
        before = Left.by(Met(job.name, "", 0, 0, job.folder)).dump
        assert before != after
        seen = set()
        killed = [one for one in met if one.job == job.name and one.status]
        for one in killed:
            assert one.status == KILLED, one
            left = Left.by(one)
            assert left.files <= OURS, one
            # A file that is made begins as an empty one.
            assert left.dump in (before, after, *([empty()] if job.name == "init" else [])), one
            seen.add(left.dump == after)
            status, output = zygote.run(*command_at(one, job))
            assert (status, json.loads(output)["ok"]) == (0, True), (one, output)
            again = Left.by(one)
            assert (again.files, again.dump) == ({NAME}, after), one
            path = Path(one.folder, "private", NAME)
            if job.name == "downgrade":
                assert zygote.run("--db", path, "upgrade")[0] == 0
            report = examine_file(path)
            assert report["healthy"], (one, report)
            if job.name.startswith("adopt"):
                assert report == {**expected("doctor"), "schema_version": int(HEAD)}
        assert False in seen
        moments |= seen
        assert {one.call for one in killed} >= set(CALLS) - {"fdatasync"}
        tally(f"SIGKILL at a call of tsg {job.name.partition(' ')[0]}", len(killed), 0)
    # Killed before it was done, and after.
    assert moments == {False, True}


def empty() -> tuple[str, ...]:
    with closing(sqlite3.connect(":memory:")) as connection:
        return tuple(connection.iterdump())


# -- tasks that are closed, or let go ------------------------------------------------------------------------


def worn(path: Path) -> tuple[list[str], list[str], list[str]]:
    """A ledger of tasks long past: stale ones and ones whose delivery is overdue, oldest first, and ones to let go,
    newest first; and some to be left alone."""
    clock = FakeClock(1_700_000_000.0)
    stale, overdue, gone = [], [], []
    with Ledger(path, clock=clock) as ledger:
        for number in range(12):
            clock.advance(7)
            task = ledger.create_task(delivery_required=number % 3 > 0, timeout_seconds=(None, 60)[number % 2]).id
            if number % 4 < 3:
                ledger.start_task(task)
            if number % 4 == 0:
                stale.append(task)
                continue
            if number % 4 < 3:
                ledger.close_task(task, "failed")
            if number % 4 == 1:
                overdue.append(task)
            elif number % 4 == 2:
                ledger.set_delivery(task, "failed" if number % 3 else "not_applicable")
                gone.insert(0, task)
        for _ in range(2):
            stale.append(ledger.create_task().id)
            clock.advance(7)
            ledger.start_task(stale[-1])
    return stale, overdue, gone


SWEEPS = {
    "reconcile": ["reconcile"],
    "reconcile in batches": ["reconcile", "--batch-size", str(BATCH)],
    "prune": ["prune", "--older-than", "600", "--batch-size", str(BATCH)],
}


def states(path: Path) -> dict[str, tuple[Any, ...]]:
    """Of each task where it stands, and its events, all but the times."""
    with closing(sqlite3.connect(path)) as connection:
        tasks = connection.execute(
            "SELECT pk, id, status, delivery_status, terminal_code, delivery_code, version FROM tsg_tasks"
        ).fetchall()
        events = connection.execute(
            "SELECT task_pk, number, kind, from_status, to_status, code FROM tsg_task_events ORDER BY 1, 2"
        ).fetchall()
    return {task[1]: (task[2:], [event[1:] for event in events if event[0] == task[0]]) for task in tasks}


def whole_batches(name: str, order: list[list[str]]) -> list[set[str]]:
    """The sets of tasks that may be done when a sweep ends before its end."""
    if name == "reconcile":
        return [set(), {task for kind in order for task in kind}]
    done: list[set[str]] = [set()]
    for kind in order:
        for first in range(0, len(kind), BATCH):
            done.append(done[-1] | set(kind[first : first + BATCH]))
    return done


def test_a_sweep_that_is_killed_at_any_call_leaves_whole_batches_and_the_next_ends_the_rest(
    zygote: Zygote, place: Place, rounds: int, tally: Tally
) -> None:
    source = place.before("source", None) / "private" / NAME
    stale, overdue, gone = worn(source)
    jobs = [
        Job(name, str(place.before(name, source)), ["--db", str(place.ledger), *verb]) for name, verb in SWEEPS.items()
    ]
    met = place.meet(jobs, limits(CALLS, rounds), KILL)
    for job in jobs:
        fine = Path(one_without_a_fault(met, job).folder, "private", NAME)
        before, after = states(source), states(fine)
        order = [gone] if job.name == "prune" else [stale, overdue]
        allowed = whole_batches(job.name, order)
        changed = {task for task in before if after.get(task) != before[task]}
        assert changed == allowed[-1], job
        assert len(changed) == sum(map(len, order)) >= 3
        killed = [one for one in met if one.job == job.name and one.status]
        stood = set()
        for one in killed:
            assert one.status == KILLED, one
            assert Left.by(one).files <= OURS, one
            path = Path(one.folder, "private", NAME)
            copy = Path(shutil.copytree(path.parent, Path(f"{one.folder}.states")), NAME)
            found = states(copy)
            done = {task for task in before if found.get(task) != before[task]}
            assert done in allowed, one
            # What is done is done as a run does it that comes to its end.
            assert all(found.get(task) == after.get(task) for task in done), one
            stood.add(len(done))
            status, output = zygote.run(*command_at(one, job))
            assert status == 0, (one, output)
            report = json.loads(output)[job.name.split()[0]]
            assert did(report) == len(changed) - len(done), (one, report)
            assert states(path) == after, one
            assert {entry.name for entry in path.parent.iterdir()} == {NAME}, one
            assert examine_file(path)["healthy"], one
        assert {0, len(changed)} <= stood, job
        assert len(stood) > 2 or job.name == "reconcile", job
        tally(f"SIGKILL at a call of tsg {job.name}", len(killed), 0)


def did(report: dict[str, Any]) -> int:
    """How many changes a sweep tells of."""
    keys = ("tasks_timed_out", "deliveries_failed", "deliveries_not_applicable", "tasks_pruned")
    return sum(report.get(key, 0) for key in keys)


@pytest.mark.parametrize("fault", ["error=ENOSPC:when={}+", "error=EIO:when={}"], ids=["full", "broken for once"])
def test_b04_a_sweep_in_batches_that_the_disk_fails_is_refused_with_whole_batches_done_and_the_next_ends_the_rest(
    zygote: Zygote, place: Place, rounds: int, tally: Tally, fault: str
) -> None:
    source = place.before("source", None) / "private" / NAME
    stale, overdue, gone = worn(source)
    jobs = [
        Job(name, str(place.before(name, source)), ["--db", str(place.ledger), *verb])
        for name, verb in SWEEPS.items()
        if name != "reconcile"
    ]
    # What is committed is written there first.
    met = place.meet(jobs, limits({"pwrite64": 4}, rounds), fault, files=[f"{NAME}-wal"])
    for job in jobs:
        before, after = states(source), states(Path(one_without_a_fault(met, job).folder, "private", NAME))
        allowed = whole_batches(job.name, [gone] if job.name == "prune" else [stale, overdue])
        failed = [one for one in met if one.job == job.name and one.status]
        stood = set()
        for one in failed:
            output = Path(f"{one.folder}.output").read_bytes()
            assert (one.status, json.loads(output)) == (2, {"error": "StateConflict", "ok": False}), one
            assert Left.by(one).files <= OURS, one
            path = Path(one.folder, "private", NAME)
            found = states(Path(shutil.copytree(path.parent, Path(f"{one.folder}.states")), NAME))
            done = {task for task in before if found.get(task) != before[task]}
            assert done in allowed, one
            assert all(found.get(task) == after.get(task) for task in done), one
            stood.add(len(done))
            assert zygote.run(*command_at(one, job))[0] == 0, one
            assert states(path) == after, one
            assert examine_file(path)["healthy"], one
        assert len(failed) >= 3
        assert len(stood) > 1, job
        tally(f"a disk that fails in the midst of tsg {job.name}", len(failed), 0)
