"""The demonstration: the counts of the contract, the same bytes each time, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import snapshot, tsg
from tests.test_cli import SCRIPT
from tsg import Ledger

FIRST = {
    "active_examined": 2,
    "deliveries_failed": 1,
    "deliveries_not_applicable": 1,
    "fresh_active_retained": 1,
    "pending_delivery_examined": 3,
    "pending_delivery_retained": 1,
    "tasks_timed_out": 1,
}
AGAIN = {
    "active_examined": 1,
    "deliveries_failed": 0,
    "deliveries_not_applicable": 0,
    "fresh_active_retained": 1,
    "pending_delivery_examined": 1,
    "pending_delivery_retained": 1,
    "tasks_timed_out": 0,
}


@pytest.fixture(scope="module")
def shown() -> bytes:
    """What one run prints."""
    ran = tsg("demo")
    assert (ran.returncode, ran.stderr) == (0, b"")
    return ran.stdout


def answers(shown: bytes) -> list[Any]:
    """The lines of JSON among it."""
    return [json.loads(line) for line in shown.decode().splitlines() if line.startswith("{")]


def test_it_ends_by_saying_how_to_see_the_cockpit(shown: bytes) -> None:
    assert shown.splitlines()[-1].startswith(b"$ tsg demo --cockpit ")


def test_it_shows_a_preview_an_apply_a_recheck_and_doctor(shown: bytes) -> None:
    preview, applied, again, doctor = answers(shown)
    assert preview == {"ok": True, "reconcile": {"dry_run": True, "applied": False, **FIRST}}
    assert applied == {"ok": True, "reconcile": {"dry_run": False, "applied": True, **FIRST}}
    assert again == {"ok": True, "reconcile": {"dry_run": False, "applied": True, **AGAIN}}
    assert doctor["healthy"]
    assert doctor["task_count"] == 4
    assert doctor["task_status_counts"] == {
        "cancelled": 0,
        "failed": 0,
        "queued": 1,
        "running": 0,
        "succeeded": 2,
        "timed_out": 1,
    }
    assert doctor["delivery_status_counts"] == {"delivered": 0, "failed": 1, "not_applicable": 1, "pending": 2}


def test_every_line_of_json_stands_below_the_command_that_printed_it(shown: bytes) -> None:
    lines = shown.decode().splitlines()
    commands = [lines[number - 1] for number, line in enumerate(lines) if line.startswith("{")]
    assert [command.split()[-1] for command in commands] == ["--dry-run", "reconcile", "reconcile", "doctor"]
    assert all(command.startswith("$ tsg --db ") for command in commands)


def test_two_runs_print_the_same_bytes_and_leave_nothing_behind(shown: bytes, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    ran = tsg("demo", env={"TMPDIR": str(tmp_path), "PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo"})
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, shown, b"")
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path).encode() not in shown


def test_it_reads_nothing_of_the_users(shown: bytes, folder: Path, path: Path) -> None:
    """Neither a ledger that is named, nor what lies in the working folder, nor a home."""
    with Ledger(path) as ledger:
        ledger.create_task()
    for name in ("tsg", "click", "sqlalchemy", "json", "sqlite3"):
        (folder / f"{name}.py").write_text("raise SystemExit('this is not the demonstration')\n")
    (folder / "alembic.ini").write_text("[alembic]\n")
    before = snapshot(folder)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "HOME"},
        "TSG_DB": str(folder / "elsewhere.sqlite"),
    }
    for target in (path, folder / "missing.sqlite"):
        ran = subprocess.run(
            [SCRIPT, "--db", target, "demo"],
            cwd=folder,
            env=environment,
            capture_output=True,
            check=False,
            timeout=120,
        )
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, shown, b"")
    assert snapshot(folder) == before


def test_a_temporary_folder_that_others_may_write_in_is_refused_and_left_clean(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    ran = tsg("demo", env={"TMPDIR": str(shared)})
    assert (ran.returncode, ran.stderr) == (2, b"")
    assert ran.stdout.splitlines()[-1] == b'{"error":"InvalidInput","ok":false}'
    assert list(shared.iterdir()) == []


def test_a_full_stdout_ends_it_without_a_traceback(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "tsg", "demo"],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            timeout=120,
        )
    assert (ran.returncode, ran.stderr) == (2, b"")
    assert list(tmp_path.iterdir()) == []
