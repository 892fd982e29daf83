"""How far a piece of work is: told to whom asks for it, on stderr for people, and never at the cost of the answer."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conftest import FakeClock, raw
from tests.test_cli import Answer, call
from tests.test_concurrency import named
from tsg import Ledger

Place = Path | sa.URL
#: Each command that shows it, without what names the ledger.
COMMANDS: dict[str, tuple[str, ...]] = {
    "doctor": ("doctor",),
    "reconcile": ("reconcile",),
    "reconcile previewed": ("reconcile", "--dry-run"),
    "reconcile past conflicts": ("reconcile", "--skip-conflicts"),
    "reconcile in batches": ("reconcile", "--batch-size", "2"),
    "reconcile in batches, previewed": ("reconcile", "--batch-size", "2", "--dry-run"),
    "prune": ("prune", "--older-than", "60", "--batch-size", "2"),
    "prune previewed": ("prune", "--older-than", "60", "--dry-run"),
}


def leave_behind(target: Place, clock: FakeClock) -> None:
    """What each command has something to do with."""
    with Ledger(target, clock=clock) as ledger:
        for number in range(5):
            clock.now = 1000.0 + number
            for stage in ("running", "pending", "closed"):
                task = ledger.create_task(delivery_required=number % 2 == 0).id
                ledger.start_task(task)
                if stage != "running":
                    ledger.close_task(task, "succeeded")
                if stage == "closed":
                    ledger.set_delivery(task, "delivered" if number % 2 == 0 else "not_applicable")
        ledger.create_task()


@pytest.fixture(params=["sqlite", "postgresql"])
def twins(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> tuple[Place, Place]:
    """Two ledgers with the same left behind in each."""
    if request.param == "sqlite":
        places: list[Place] = []
        for name in ("marked-one", "marked-other"):
            folder = tmp_path / name
            folder.mkdir(mode=0o700)
            places.append(folder / "ledger.sqlite")
    else:
        url: sa.URL = request.getfixturevalue("postgresql_url")
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE SCHEMA marked")
        engine.dispose()
        places = [url, url.update_query_dict({"options": "-csearch_path=marked"})]
    for place in places:
        leave_behind(place, clock)
    return places[0], places[1]


def names_nothing(text: str, target: Place) -> None:
    """That no id, path, URL or part of one is in what was printed."""
    shown = named(target)
    assert shown not in text
    assert "marked" not in text
    assert "sqlite" not in text
    assert "postgresql" not in text
    assert "00000-" not in text
    engine = sa.create_engine(target if isinstance(target, sa.URL) else f"sqlite:///{target}")
    with engine.connect() as connection:
        ids = [str(found) for found in connection.exec_driver_sql("SELECT id FROM tsg_tasks").scalars()]
    engine.dispose()
    assert not [task for task in ids if task in text or task[:8] in text]


# -- at the command line -----------------------------------------------------------------------------------


def lines_of(target: Place, arguments: tuple[str, ...]) -> Answer:
    return call("--db", named(target), *arguments)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_answer_is_the_same_line_with_a_bar_and_without(twins: tuple[Place, Place], name: str) -> None:
    one, other = twins
    plain = lines_of(one, COMMANDS[name])
    shown = lines_of(other, (*COMMANDS[name], "--progress"))
    assert (plain.status, plain.err) == (0, "")
    assert (shown.status, shown.out) == (plain.status, plain.out)
    assert shown.err.strip()
    assert shown.out.count("\n") == 1
    names_nothing(shown.err, other)
    assert "Traceback" not in shown.err


@pytest.mark.parametrize("name", ["doctor", "reconcile in batches"])
def test_a_process_of_its_own_answers_on_stdout_and_shows_on_stderr(path: Path, clock: FakeClock, name: str) -> None:
    leave_behind(path, clock)
    place = [sys.executable, "-m", "tsg", "--db", str(path)]
    ran = subprocess.run([*place, *COMMANDS[name], "--progress"], capture_output=True, check=False, timeout=60)
    assert ran.returncode == 0
    assert ran.stdout.count(b"\n") == 1
    json.loads(ran.stdout)
    assert ran.stderr.strip()
    names_nothing(ran.stderr.decode(), path)


def in_a_terminal(arguments: list[str]) -> tuple[int, bytes, str]:
    """The exit status, what was on stdout, and what a terminal that is stderr was sent."""
    controller, terminal = pty.openpty()
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=terminal) as running:
        os.close(terminal)
        shown = b""
        with suppress(OSError):
            while part := os.read(controller, 4096):
                shown += part
        out, _ = running.communicate(timeout=60)
    os.close(controller)
    return running.returncode, out, shown.decode()


IN_A_TERMINAL = ("doctor", "reconcile", "reconcile in batches", "prune")


@pytest.fixture(scope="module")
def terminals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, bytes, str]]:
    """What each of those commands leaves, answers and shows in a terminal."""
    found = {}
    for name in IN_A_TERMINAL:
        folder = tmp_path_factory.mktemp("marked")
        folder.chmod(0o700)
        path = folder / "ledger.sqlite"
        leave_behind(path, FakeClock())
        command = [sys.executable, "-m", "tsg", "--db", str(path), *COMMANDS[name], "--progress"]
        found[name] = (path, *in_a_terminal(command))
    return found


@pytest.mark.parametrize("name", IN_A_TERMINAL)
def test_a_terminal_is_shown_a_bar_that_comes_to_its_end(
    terminals: dict[str, tuple[Path, int, bytes, str]], name: str
) -> None:
    path, status, out, shown = terminals[name]
    assert status == 0
    assert out.count(b"\n") == 1
    json.loads(out)
    positions = [tuple(map(int, found)) for found in re.findall(r"(\d+)/(\d+)", shown)]
    assert positions[-1][0] == positions[-1][1] > 1
    assert [done for done, _ in positions] == sorted(done for done, _ in positions)
    names_nothing(shown, path)


@pytest.mark.parametrize("name", IN_A_TERMINAL)
def test_a_bar_is_full_only_where_all_is_done(terminals: dict[str, tuple[Path, int, bytes, str]], name: str) -> None:
    found = re.findall(r"\[(#*)(-*)\] +(\d+)/(\d+)", terminals[name][3])
    assert len(found) > 1
    assert [bar for bar in found if not bar[1] and bar[2] != bar[3]] == []


def test_a_refusal_is_the_same_line_with_a_bar(path: Path, folder: Path, clock: FakeClock) -> None:
    for arguments in COMMANDS.values():
        answer = call("--db", path, *arguments, "--progress")
        assert (answer.status, answer.out) == (2, '{"error":"InvalidInput","ok":false}\n')
        assert str(path) not in answer.err
    assert list(folder.iterdir()) == []
    leave_behind(path, clock)
    connection = raw(path)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute("UPDATE tsg_tasks SET terminal_code = 'completed' WHERE status = 'running'")
    connection.close()
    answer = call("--db", path, "reconcile", "--progress")
    assert (answer.status, answer.out) == (2, '{"error":"StateConflict","ok":false}\n')
    answer = call("--db", path, "doctor", "--progress")
    assert answer.status == 1
    assert json.loads(answer.out)["state_inconsistency_count"] == 5


CLOSED = "import os, sys; os.close(2); os.execv(sys.executable, [sys.executable, '-m', 'tsg', *sys.argv[1:]])"


@pytest.mark.parametrize("name", ["doctor", "reconcile in batches"])
def test_without_a_stderr_the_answer_is_still_that_one_line(path: Path, clock: FakeClock, name: str) -> None:
    leave_behind(path, clock)
    arguments = [sys.executable, "-c", CLOSED, "--db", str(path), *COMMANDS[name], "--progress"]
    ran = subprocess.run(arguments, stdout=subprocess.PIPE, check=False, timeout=60)
    assert (ran.returncode, ran.stdout.count(b"\n")) == (0, 1)
    json.loads(ran.stdout)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("name", ["doctor", "reconcile in batches"])
def test_a_stderr_that_takes_nothing_costs_no_answer(path: Path, clock: FakeClock, name: str) -> None:
    leave_behind(path, clock)
    arguments = [sys.executable, "-m", "tsg", "--db", str(path), *COMMANDS[name], "--progress"]
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=full, check=False, timeout=60)
    assert ran.stdout.count(b"\n") == 1
    json.loads(ran.stdout)


# -- in Python ---------------------------------------------------------------------------------------------


class Told:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))

    def rises_to_its_end(self) -> bool:
        done = [call[0] for call in self.calls]
        whole = all(type(number) is int for call in self.calls for number in call)
        return whole and done == sorted(done) and all(0 <= one <= total for one, total in self.calls)


@pytest.fixture
def both(target: Place, clock: FakeClock) -> Iterator[Ledger]:
    leave_behind(target, clock)
    with Ledger(target, clock=clock) as ledger:
        yield ledger


def test_doctor_tells_each_step_up_to_the_last(both: Ledger) -> None:
    told = Told()
    assert both.doctor(progress=told) == both.doctor()
    assert told.rises_to_its_end()
    (total,) = {total for _, total in told.calls}
    assert [done for done, _ in told.calls] == list(range(1, total + 1))
    assert total > 3


def test_reconcile_tells_how_many_are_done(both: Ledger, clock: FakeClock) -> None:
    clock.now = 9000
    told = Told()
    report = both.reconcile(active_grace_seconds=600, delivery_grace_seconds=600, progress=told)
    assert report["tasks_timed_out"] == report["deliveries_failed"] + report["deliveries_not_applicable"] == 5
    assert told.rises_to_its_end()
    assert told.calls[-1] == (10, 10)
    told = Told()
    both.reconcile(active_grace_seconds=600, delivery_grace_seconds=600, progress=told)
    assert told.rises_to_its_end()
    assert {done for done, _ in told.calls} <= {0}


def test_reconcile_in_batches_tells_it_after_each(both: Ledger, clock: FakeClock) -> None:
    clock.now = 9000
    told = Told()
    report = both.reconcile(active_grace_seconds=600, delivery_grace_seconds=0, batch_size=2, progress=told)
    assert report["batches"] == 3 + 5
    assert told.rises_to_its_end()
    assert len(told.calls) == 8
    assert told.calls[-1] == (15, 15)


def test_prune_tells_it_after_each_batch(both: Ledger, clock: FakeClock) -> None:
    clock.now = 9000
    told = Told()
    assert both.prune(0, 2, progress=told)["tasks_pruned"] == 5
    assert told.calls == [(2, 5), (4, 5), (5, 5)]


def test_what_a_progress_raises_is_its_callers_and_leaves_the_ledger_usable(both: Ledger, clock: FakeClock) -> None:
    class Marked(Exception):
        pass

    def progress(done: int, total: int) -> None:
        raise Marked

    clock.now = 9000
    grace: dict[str, Any] = {"active_grace_seconds": 600, "delivery_grace_seconds": 600}
    for work in (
        lambda: both.doctor(progress=progress),
        lambda: both.reconcile(**grace, progress=progress),
        lambda: both.reconcile(**grace, batch_size=2, progress=progress),
        lambda: both.prune(0, 2, progress=progress),
    ):
        with pytest.raises(Marked):
            work()
        assert both.doctor()["healthy"]
    report = both.reconcile(**grace)
    # One transaction is all or nothing; of the batches the first has stayed.
    assert report["tasks_timed_out"] == 3
    assert report["deliveries_failed"] + report["deliveries_not_applicable"] == 5
    assert both.prune(0)["tasks_pruned"] == 3 + 5


def test_without_a_progress_nobody_is_told(both: Ledger, capfd: pytest.CaptureFixture[str], clock: FakeClock) -> None:
    clock.now = 9000
    both.doctor()
    both.reconcile(active_grace_seconds=600, delivery_grace_seconds=600, batch_size=2)
    both.prune(0, 2)
    assert capfd.readouterr() == ("", "")
