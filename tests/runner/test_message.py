"""What an agent is told: all that it needs, and reporting commands that really report."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FakeClock
from tests.runner.conftest import chain, dispatched, is_healthy, on_sqlite, put_back, take_round, undelivered
from tests.test_concurrency import Place, named
from tests.test_storage import posix
from tsg import Ledger, Plans
from tsg.runner import inbox
from tsg.runner.message import Errand, message

GOLDEN = """\
/new
Step 2 of 3 of weekly report: Sort what was found

Oldest first.
Twice.

What it is part of: The report of the week

Parameters:
{
  "topic": "茶",
  "depth": 2
}

Learned so far:
- The archive is slow
- Ask for the key

When it is done, run:
  tsg --db '/tmp/my ledger' step complete 'weekly report' T-002 success --attempt ATTEMPT
If it can't be done, run:
  tsg --db '/tmp/my ledger' step complete 'weekly report' T-002 failed --attempt ATTEMPT --error 'WHY'
A command that is refused with StateConflict means that this attempt is over, or somebody else's: stop then.
"""


def second_of_three(plans: Plans, name: str = "weekly report") -> Errand:
    plans.create(name, description="The report of the week", agent="a")
    plans.add_step(name, subject="Find it")
    plans.add_step(
        name,
        subject="Sort what was found",
        description="Oldest first.\nTwice.",
        params={"topic": "茶", "depth": 2},
        blocked_by=["T-001"],
    )
    plans.add_step(name, subject="Print it", blocked_by=["T-002"])
    first = dispatched(plans, name)
    plans.complete(name, "T-001", attempt=first.attempt, learnings=["The archive is slow", "Ask for the key"])
    return dispatched(plans, name)


@on_sqlite
def test_the_message_word_for_word(plans: Plans) -> None:
    errand = second_of_three(plans)
    told = message(errand, database="/tmp/my ledger")
    assert told == GOLDEN.replace("ATTEMPT", errand.attempt)
    without = message(errand, database="/tmp/my ledger", reset=False)
    assert without == told.removeprefix("/new\n")


@on_sqlite
def test_a_bare_step_gets_a_short_message(plans: Plans) -> None:
    plans.create("plan", agent="a")
    plans.add_step("plan", subject="Do it")
    told = message(dispatched(plans), database="/db")
    assert told.splitlines()[:4] == ["/new", "Step 1 of 1 of plan: Do it", "", "When it is done, run:"]


@on_sqlite
def test_a_second_attempt_is_told_how_the_first_one_ended(plans: Plans, clock: FakeClock) -> None:
    plans.create("plan", agent="a", retries=2, base_seconds=0, timeout_seconds=10)
    chain(plans, 1)
    first = dispatched(plans)
    assert "before this one" not in message(first, database="/db")
    plans.fail("plan", "T-001", attempt=first.attempt, error="the archive is locked")
    second = dispatched(plans)
    assert "The attempt before this one ended with: the archive is locked\n" in message(second, database="/db")
    plans.start("plan", "T-001", attempt=second.attempt)
    clock.advance(10)
    (third,) = take_round(plans).errands
    assert "The attempt before this one ended with: timeout\n" in message(third, database="/db")


@on_sqlite
@pytest.mark.parametrize(
    "database",
    [
        "postgresql+psycopg://user:sesame@host:5432/ledger",
        "postgresql://user:sesame@/ledger?host=/run",
        "sqlite:////srv/ledger?password=sesame",
    ],
)
def test_a_url_is_never_in_the_message(plans: Plans, database: str) -> None:
    told = message(second_of_three(plans), database=database)
    assert "sesame" not in told
    assert "--db" not in told
    assert "  tsg step complete 'weekly report' T-002 success --attempt" in told


# -- the commands in it ------------------------------------------------------------------------------------


def report_in(told: str, outcome: str) -> str:
    (command,) = [line for line in told.splitlines() if line.startswith("  tsg ") and outcome in shlex.split(line)]
    return command


def obey(command: str, cwd: Path, database: str | None = None) -> subprocess.CompletedProcess[bytes]:
    """What an agent does that has a shell, wherever it is."""
    there = os.path.dirname(sys.executable)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TSG_")}
    environment["PATH"] = f"{there}{os.pathsep}{environment['PATH']}"
    if database is not None:
        environment["TSG_DB"] = database
    return subprocess.run(["sh", "-c", command], capture_output=True, check=False, cwd=cwd, env=environment, timeout=60)


@posix
@pytest.mark.parametrize(("place", "outcome"), [("sqlite", "failed"), ("postgresql", "success")], indirect=["place"])
def test_the_reporting_commands_really_report(place: Place, tmp_path: Path, outcome: str) -> None:
    with Ledger(place) as ledger:
        plans = Plans(ledger)
        errand = second_of_three(plans)
        database = named(place)
        done = obey(report_in(message(errand, database=database), outcome), tmp_path, database)
        assert (done.returncode, done.stderr) == (0, b"")
        step = plans.get("weekly report", "T-002")
        if outcome == "success":
            assert (step["status"], step["attempts"]) == ("completed", 1)
        else:
            assert (step["status"], step["error"]) == ("pending", "WHY")
        is_healthy(plans)


@posix
@pytest.mark.parametrize(
    "name",
    ['it\'s "mine"', "$(touch hurt) `touch hurt`; touch hurt", "a\\b *", "周报", "-rf", "--help", "#~"],
)
def test_they_do_whatever_the_plan_is_called(tmp_path: Path, name: str) -> None:
    folder = tmp_path / 'it\'s "a" $HOME `place`'
    folder.mkdir(mode=0o700)
    with Ledger(folder / "the ledger's.sqlite") as ledger:
        plans = Plans(ledger)
        errand = second_of_three(plans, name)
        told = message(errand, database=str(folder / "the ledger's.sqlite"))
        done = obey(report_in(told, "success"), tmp_path)
        assert (done.returncode, plans.get(name, "T-002")["status"]) == (0, "completed"), done.stdout
    assert not (tmp_path / "hurt").exists()


@on_sqlite
def test_what_was_taken_from_the_inbox_has_the_same_message(plans: Plans) -> None:
    plans.create("plan", agent="a")
    chain(plans, 1)
    errand = undelivered(plans)
    taken = inbox.take(plans, "a")
    assert taken is not None
    assert message(taken, database="/db") == message(errand, database="/db")


@on_sqlite
@pytest.mark.parametrize("text", ["\x00", "a\u2028b", "/new\n/new", "\u202e", "x" * 200_000])
def test_what_a_step_says_of_itself_is_told_as_it_is(plans: Plans, text: str) -> None:
    plans.create("plan", agent="a")
    params: dict[str, Any] = {"text": text}
    plans.add_step("plan", subject="Do it", params=params)
    errand = dispatched(plans)
    assert errand.step["params"] == params
    told = message(errand, database="/db")
    told.encode()
    assert told.count("\n/new\n") == 0
    put_back(plans, errand)
