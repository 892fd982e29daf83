"""The example of a plan, as the program that a reader runs: to its end, and killed on the way there."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from tests.test_concurrency import Place, named
from tests.test_storage import posix
from tsg import Ledger, Plans

pytestmark = posix

PROGRAM = Path(__file__).parents[2] / "examples" / "product_reviews.py"
PLAN = "Add Product Reviews"
WAITS = {
    "T-001": [],
    "T-002": ["T-001"],
    "T-003": ["T-001"],
    "T-004": ["T-001"],
    "T-005": ["T-002", "T-003", "T-004"],
}
OWNERS = {"T-001": "Demeter", "T-002": "Hermes", "T-003": "Hermes", "T-004": "Aphrodite", "T-005": "Hermes"}
LAST_LINE = f"{PLAN}: completed; doctor: healthy"


@contextlib.contextmanager
def running(place: Place, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The program, in a process group of its own, of which nothing is left at the end."""
    with output.open("wb") as log:
        command = [sys.executable, "-W", "error", str(PROGRAM), "--db", named(place), "--seconds", "0.8"]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(place: Place, output: Path) -> list[str]:
    """Run it to its end; what it said."""
    with running(place, output) as process:
        assert process.wait(timeout=50) == 0, output.read_text()
    return output.read_text().splitlines()


def require_done_once(place: Place, attempts: int | None = None) -> None:
    with Ledger(place) as ledger:
        plans = Plans(ledger)
        view = plans.show(PLAN)
        steps = {step["id"]: step for step in plans.steps(PLAN, all=True)}
        assert {key: step["blockedBy"] for key, step in steps.items()} == WAITS
        assert {key: step["owner"] for key, step in steps.items()} == OWNERS
        assert [step["status"] for step in steps.values()] == ["completed"] * 5
        assert (view["status"], ledger.get_task(view["root"]).status) == ("completed", "succeeded")
        query = """
            SELECT steps.key, t.status, t.created_at, t.ended_at FROM tsg_tasks t
            JOIN tsg_plan_attempts a ON a.id = t.id JOIN tsg_plan_steps steps ON steps.pk = a.step_pk
        """
        tries = ledger.read(lambda connection, _: connection.execute(sa.text(query)).all())
        assert len(tries) == len(ledger.children_of(view["root"])) == sum(step["attempts"] for step in steps.values())
        assert attempts in (None, len(tries))
        ended = {key: ended_at for key, status, _, ended_at in tries if status == "succeeded"}
        assert sorted(key for key, status, _, _ in tries if status == "succeeded") == sorted(WAITS)
        assert {status for _, status, _, _ in tries} <= {"succeeded", "timed_out"}
        for key, _, created_at, _ in tries:
            assert all(ended[blocker] <= created_at for blocker in WAITS[key])
        learned = plans.learnings(PLAN)
        assert sorted(learning["step"] for learning in learned) == sorted(WAITS)
        # The last one was handed what all others had learned.
        assert steps["T-005"]["output"] == "; ".join(["knew", *(learning["text"] for learning in learned[:4])])
        assert plans.doctor()["healthy"]


def test_the_example_does_five_steps_in_order_and_run_again_finds_nothing_to_do(place: Place, tmp_path: Path) -> None:
    said = run(place, tmp_path / "output")
    assert said[-1] == LAST_LINE
    assert said[-6:-1] == [f"{key} completed by {owner}, attempts: 1" for key, owner in OWNERS.items()]
    assert sorted(line.split()[2] for line in said[:-6]) == [f"{key}," for key in WAITS]
    require_done_once(place, attempts=5)
    assert run(place, tmp_path / "output") == said[-6:]
    require_done_once(place, attempts=5)


def test_the_example_needs_no_argument(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM), "--seconds", "0.01"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=50,
    )
    assert (done.returncode, done.stderr, done.stdout.splitlines()[-1]) == (0, "", LAST_LINE)
    assert list(tmp_path.iterdir()) == []


def test_the_example_killed_at_several_moments_goes_on_where_it_was(place: Place, tmp_path: Path) -> None:
    output, seed = tmp_path / "output", random.randrange(2**32)
    chance = random.Random(seed)
    left_over = 0
    # At the start, and in the midst of one step after the other.
    for said in ("", "begins T-001", "begins T-004", "begins T-003", "begins T-005"):
        with running(place, output) as process:
            give_up = time.monotonic() + 30
            while said not in output.read_text():
                assert process.poll() is None, output.read_text()
                assert time.monotonic() < give_up, (said, output.read_text())
                time.sleep(0.005)
            # Before the step can be done; before the first one is begun, any moment of the start will do.
            time.sleep(chance.uniform(0, 0.4 if said else 0.8))
            os.killpg(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL, f"seed {seed}"
        if not said:
            continue
        with Ledger(place) as ledger:
            plans = Plans(ledger)
            assert plans.doctor()["healthy"], f"seed {seed}"
            assert plans.get(PLAN, said.removeprefix("begins "))["status"] == "in_progress", f"seed {seed}"
        left_over += 1
    assert run(place, output)[-1] == LAST_LINE, f"seed {seed}"
    require_done_once(place)
    with Ledger(place) as ledger:
        ends = [task.status for task in ledger.children_of(Plans(ledger).show(PLAN)["root"])]
    assert left_over == 4 <= ends.count("timed_out")
    assert ends.count("succeeded") == 5
