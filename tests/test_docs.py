"""What the documents say is what the code does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tsg
from tests.conftest import tsg as run
from tsg import states
from tsg.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_readme_diagram_has_exactly_the_transitions_of_both_machines() -> None:
    (diagram,) = blocks("mermaid")
    task, delivery = diagram.split('state "delivery"')
    for drawn, machine, first in (
        (task, states.TASK_TRANSITIONS, "queued"),
        (delivery, states.DELIVERY_TRANSITIONS, "pending"),
    ):
        arrows = {(a, b.rstrip("_")) for a, b in re.findall(r"(\S+) --> (\w+)", drawn)}
        expected = {(source.value, end.value) for source, ends in machine.items() for end in ends}
        assert arrows == expected | {("[*]", first)}


def test_the_readme_python_runs(folder: Path) -> None:
    (example,) = blocks("python")
    ran = subprocess.run([sys.executable, "-W", "error", "-c", example], cwd=folder, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "0 0\n", "")


def test_the_readme_commands_run_in_their_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("tsg ")]
    assert len(commands) >= 5
    for command in commands:
        ran = run(*shlex.split(command)[1:])
        assert (ran.returncode, ran.stderr) == (0, b""), command


def test_the_readme_names_every_command() -> None:
    for command in COMMANDS:
        assert f"`{command}`" in README or f" {command}\n" in README or f" {command} " in README


def test_make_has_every_target_that_the_readme_names() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", README, flags=re.MULTILINE)
    assert {"demo", "test", "bench"} == {first or second for first, second in named} <= targets


def test_the_readme_reconcile_table_names_only_registered_reasons() -> None:
    registered = {
        code for codes in (*states.TASK_REASONS.values(), *states.DELIVERY_REASONS.values()) for code in codes
    }
    named = set(re.findall(r"\| `\w+`, `(\w+)` \|", README))
    assert named == {"deadline_exceeded", "restart_stale", "delivery_grace_expired", "internal_task"}
    assert named <= registered


def test_the_changelog_and_the_licence_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
    assert "Apache License" in (ROOT / project["license-files"][0]).read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", tsg.__version__)
