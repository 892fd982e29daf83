"""The commands and a plan's page: each that changes the plan writes it anew, and a sample can be watched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conftest import tsg
from tsg import Ledger, Plans
from tsg.cockpit.render import page
from tsg.cockpit.scene import look


def said(place: Path | sa.URL, *words: str | Path, status: int = 0) -> dict[str, Any]:
    named = place.render_as_string(hide_password=False) if isinstance(place, sa.URL) else str(place)
    ran = tsg("--db", named, *words)
    assert (ran.returncode, ran.stderr) == (status, b""), (words, ran)
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def test_every_command_that_changes_a_plan_writes_its_page_anew(place: Path | sa.URL, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    agents = tmp_path / "agents.json"
    agents.write_text('{"agents": []}')

    def command(*words: str | Path, status: int = 0) -> dict[str, Any]:
        answer = said(place, *words, status=status)
        with Ledger(place) as ledger:
            assert file.read_text() == page(look(Plans(ledger), "p"), theme="plain"), words
        return answer

    command("plan", "create", "p", "--agent", "bibi", "--cockpit", file, "--theme", "plain")
    command("step", "add", "p", "--subject", "First")
    command("step", "add", "p", "--subject", "Second", "--blocked-by", "T-001")
    command("step", "update", "p", "T-002", "--subject", "The second")
    started = command("step", "start", "p", "T-001", "--agent", "bibi")["step"]["attempt"]
    command("step", "heartbeat", "p", "T-001", "--attempt", started, "--output", "half")
    command("step", "complete", "p", "T-001", "success", "--attempt", started)
    # There is no command for its agent: the runner puts it into the inbox, and fails the plan.
    assert command("run", "p", "--agents", agents, "--log-dir", tmp_path / "logs", status=1)["error"] == "PlanFailed"
    assert "It lies in the inbox of that agent" in file.read_text()
    command("inbox", "take", "bibi")
    command("step", "complete", "p", "T-002", "success")
    told = file.read_text()
    assert "2 of 2 steps done" in told
    assert 'http-equiv="refresh"' not in told


def test_a_page_that_can_not_be_written_stops_no_command_and_is_said_to_be_old(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    said(path, "init")
    said(path, "plan", "create", "p", "--cockpit", folder / "plan.html")
    (folder / "plan.html").unlink()
    folder.rmdir()
    answer = said(path, "step", "add", "p", "--subject", "All the same")
    assert (answer["ok"], answer["step"]["id"], answer["cockpit"]) == (True, "T-001", "not written")
    folder.mkdir()
    assert "cockpit" not in said(path, "step", "cancel", "p", "T-001")
    assert (folder / "plan.html").exists()


def test_the_sample_moves_by_itself_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "tsg", "demo", "--cockpit"]
    # As the browser, one that leaves at once.
    environment = {**os.environ, "BROWSER": "true"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as demo:
        try:
            assert demo.stdout is not None
            address = demo.stdout.readline().rpartition(" ")[2].strip()

            def shown() -> str:
                with urllib.request.urlopen(f"{address}plans/bedtime%20stories", timeout=10) as answer:
                    return str(answer.read().decode())

            first = shown()
            assert "0 of 11 steps done" in first
            until = time.monotonic() + 30
            while "1 of 11 steps done" not in shown():
                assert time.monotonic() < until
                time.sleep(0.2)
            demo.send_signal(signal.SIGINT)
            _, errors = demo.communicate(timeout=40)
            assert (demo.returncode, errors) == (0, "")
        finally:
            demo.kill()


@pytest.mark.parametrize("option", ["--theme=pet", "--cockpit=/"])
def test_a_run_with_a_page_that_can_not_be_is_refused_before_it_begins(path: Path, option: str) -> None:
    said(path, "init")
    said(path, "plan", "create", "p", "--agent", "bibi")
    said(path, "step", "add", "p", "--subject", "Do it")
    assert said(path, "run", "p", option, status=2) == {"error": "InvalidInput", "ok": False}
    with Ledger(path) as ledger:
        assert Plans(ledger).get("p", "T-001")["attempts"] == 0
