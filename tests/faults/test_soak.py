"""A short soak on either database, in the suite; TSG_SOAK_SECONDS asks for a longer one."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import raw
from tests.faults.soak import LEAST
from tests.tallies import Tally

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="looks at processes by Linux's /proc")

SECONDS = {"sqlite": 20.0, "postgresql": 10.0}
VERBS = {"create", "start", "heartbeat", "heartbeat_many", "close", "deliver", "get", "children"}
SESSION_VERBS = {"session create", "session start", "session heartbeat", "session close", "session deliver"}
UPKEEP = {"reconcile", "reconcile preview", "reconcile in batches", "doctor", "prune"}


def command(*arguments: str | Path) -> list[str | Path]:
    return [sys.executable, "-W", "error", "-m", "tests.faults.soak", *arguments]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_sixteen_processes_and_the_upkeep_leave_just_what_was_acknowledged_and_nothing_grows(
    request: pytest.FixtureRequest, tally: Tally, kind: str
) -> None:
    if kind == "postgresql":
        request.getfixturevalue("postgresql_server")
    seconds = float(os.environ.get("TSG_SOAK_SECONDS", SECONDS[kind]))
    done = subprocess.run(
        command(f"--{kind}", "--seconds", f"{seconds:g}"),
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + 90,
    )
    assert done.stderr == ""
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    tally(f"sixteen processes at once, {kind}: verbs", sum(row["count"] for row in report["verbs"].values()), 0)
    assert (report["failures"], done.returncode) == ({}, 0), done.stdout
    assert (report["database"], report["processes"]) == (kind, 16)
    assert report["counts"]["found"] == report["counts"]["expected"]
    # That it is calm is worth something only where everything was there.
    assert set(report["verbs"]) == VERBS | SESSION_VERBS | UPKEEP
    acknowledged = report["acknowledged"]
    assert acknowledged["looks"] >= LEAST["doctor"]
    assert acknowledged["reconciles"] >= LEAST["reconcile"]
    assert acknowledged["prunes"] >= LEAST["prune"]
    assert acknowledged["tasks_timed_out"] > 0
    assert report["allowed"]["a shared task: StateConflict"] > 0
    assert report["shared"]["created"] >= seconds
    if kind == "sqlite":
        assert report["wal"]["written_from_the_beginning"] > 0
        assert report["wal"]["left_mib"] == 0 < report["wal"]["highest_mib"] <= report["wal"]["bound_mib"]
    else:
        assert 16 < report["connections"]["highest"] <= report["connections"]["bound"]


@contextmanager
def soaking(path: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A small soak, once its workers have made tasks of their own."""
    with subprocess.Popen(
        command("--processes", "2", "--seconds", f"{seconds:g}", path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            give_up = time.monotonic() + 30
            while tasks_in(path) < 10:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < give_up
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def tasks_in(path: Path) -> int:
    if not Path(f"{path}-wal").exists():
        return 0
    with closing(raw(path)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM tsg_tasks").fetchone()[0])
        except sqlite3.OperationalError:
            # It is being made.
            return 0


def test_a_soak_that_is_told_to_end_ends_at_once_with_its_report(path: Path) -> None:
    with soaking(path, 600) as process:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    report = json.loads(out.splitlines()[-1])
    assert (err, process.returncode, report["failures"]) == ("", 0, {})
    assert 0 < report["seconds"] < 30


def test_a_soak_says_so_where_the_ledger_is_not_what_was_acknowledged(path: Path) -> None:
    """The report is worth nothing if it can't be bad: somebody takes a task away, with its one event, meanwhile."""
    with soaking(path, 2) as process:
        with closing(raw(path)) as connection:
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA busy_timeout = 5000")
            # One that nobody has in hand: it was made before the workers began.
            taken = connection.execute("DELETE FROM tsg_tasks WHERE pk = 2 AND status = 'queued'")
            assert taken.rowcount == 1
        out, err = process.communicate(timeout=60)
    report = json.loads(out.splitlines()[-1])
    assert (err, process.returncode) == ("", 1)
    assert report["failures"] == {"what is stored is not what was acknowledged": 1}
    found, expected = report["counts"]["found"], report["counts"]["expected"]
    assert found == {"tasks": expected["tasks"] - 1, "events": expected["events"] - 1}
