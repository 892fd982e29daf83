"""The commands on plans and steps: one line of JSON, the exit status, and nothing else."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FakeClock, snapshot, tsg
from tsg import Ledger, Plans

#: What no answer may ever show.
SECRET = "qZ7-secret"


class Shell:
    """The real command line on one ledger."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, *arguments: str | Path, status: int = 0, env: dict[str, str] | None = None) -> dict[str, Any]:
        ran = tsg("--db", self.path, *arguments, env=env)
        assert (ran.returncode, ran.stderr) == (status, b""), ran.stdout
        (line,) = ran.stdout.splitlines()
        assert SECRET.encode() not in line or status == 0
        said: dict[str, Any] = json.loads(line)
        assert line == json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
        assert said["ok"] is (status == 0)
        return said

    def refuse(self, error: str, *arguments: str | Path, env: dict[str, str] | None = None) -> dict[str, Any]:
        said = self(*arguments, status=2, env=env)
        assert said["error"] == error
        return said

    def shown(self, *arguments: str | Path) -> str:
        ran = tsg("--db", self.path, *arguments)
        assert (ran.returncode, ran.stderr) == (0, b"")
        return ran.stdout.decode()


@pytest.fixture
def shell(path: Path) -> Shell:
    with Ledger(path):
        return Shell(path)


@pytest.fixture
def feature(path: Path) -> Shell:
    """A plan of three steps, the second waiting for the first."""
    with Ledger(path) as ledger:
        plans = Plans(ledger)
        plans.create("feature")
        plans.add_step("feature", subject="first", owner="Demeter")
        plans.add_step("feature", subject="second", blocked_by=["T-001"])
        plans.add_step("feature", subject="third", owner="Hermes", timeout_seconds=None)
    return Shell(path)


def test_a_feature_from_beginning_to_end(shell: Shell) -> None:
    made = shell("plan", "create", "feature", "--retries", "1", "--timeout-seconds", "0", "--grace-seconds", "30")
    assert (made["plan"]["status"], made["plan"]["grace_seconds"]) == ("pending", 30.0)
    assert made["plan"]["defaults"]["timeout_ms"] is None
    first = shell("step", "add", "feature", "--subject", "first", "--owner", "Demeter", "--blocks", "T-002")["step"]
    assert (first["id"], first["blocks"], first["ready"]) == ("T-001", ["T-002"], True)
    more = (
        "--blocked-by",
        "T-001",
        "--timeout-seconds",
        "9.5",
        "--backoff",
        "fixed",
        "--base-seconds",
        "900",
        "--metadata",
        '{"a":[1]}',
    )
    second = shell("step", "add", "feature", "--subject", "second", *more, "--partial-ok", "--fallback-agent", "Talos")
    assert second["step"]["timeout_ms"] == 9500
    assert second["step"]["retry_policy"] == {"backoff": "fixed", "count": 1, "base_seconds": 900.0}
    assert (second["step"]["metadata"], second["step"]["fallback_agent"]) == ({"a": [1]}, "Talos")
    assert second["step"]["waitingFor"] == ["T-001"]
    assert [step["id"] for step in shell("plan", "advance", "feature")["ready"]] == ["T-001"]
    assert shell("step", "claim", "feature", "--agent", "Hermes", status=1)["error"] == "NothingReady"
    claimed = shell("step", "claim", "feature", "--agent", "Demeter")["step"]
    assert (claimed["id"], claimed["session_id"]) == ("T-001", "Demeter-1")
    assert shell("step", "heartbeat", "feature", "T-001", "--output", "half")["step"]["output"] == "half"
    done = shell("step", "complete", "feature", "T-001", "success", "--learning", "a", "--learning", "b")["step"]
    assert (done["status"], done["learnings"], done["unblocked"], done["output"]) == (
        "completed",
        ["a", "b"],
        ["T-002"],
        "half",
    )
    assert shell("step", "start", "feature", "T-002", "--agent", "Hermes")["step"]["learnings"] == ["a", "b"]
    failed = shell("step", "complete", "feature", "T-002", "failed", "--error", "no route")["step"]
    assert (failed["status"], failed["error"], failed["ready"]) == ("pending", "no route", False)
    assert [step["id"] for step in shell("step", "list", "feature")["steps"]] == ["T-002"]
    assert [step["id"] for step in shell("step", "list", "feature", "--all")["steps"]] == ["T-001", "T-002"]
    assert shell("step", "list", "feature", "--ready")["steps"] == []
    assert shell("plan", "learnings", "feature")["learnings"][1]["text"] == "b"
    assert shell("step", "cancel", "feature", "T-002")["step"]["status"] == "cancelled"
    shown = shell("plan", "show", "feature")["plan"]
    assert (shown["status"], shown["steps"]["completed"], shown["steps"]["cancelled"]) == ("completed", 1, 1)
    assert [plan["name"] for plan in shell("plan", "list")["plans"]] == ["feature"]
    assert shell("plan", "remove", "feature")["plan"]["name"] == "feature"
    shell.refuse("PlanNotFound", "plan", "show", "feature")
    assert json.loads(shell.shown("doctor"))["healthy"]


def test_a_report_is_of_the_token_in_the_environment_where_none_is_given(feature: Shell) -> None:
    old = feature("step", "start", "feature", "T-001")["step"]["attempt"]
    feature("step", "complete", "feature", "T-001", "failed", env={"TSG_ATTEMPT": old})
    feature("step", "update", "feature", "T-001", "--retries", "5")
    with Ledger(feature.path, clock=lambda: 4e9) as ledger:
        new = Plans(ledger).start("feature", "T-001")["attempt"]
    assert new != old
    for report in (("complete", "feature", "T-001", "success"), ("heartbeat", "feature", "T-001")):
        feature.refuse("StateConflict", "step", *report, env={"TSG_ATTEMPT": old})
        feature.refuse("StateConflict", "step", *report, "--attempt", old, env={"TSG_ATTEMPT": str(new)})
    # The same as it has told already.
    feature("step", "complete", "feature", "T-001", "failed", env={"TSG_ATTEMPT": old})
    assert feature("step", "get", "feature", "T-001")["step"]["attempt"] == new


def test_an_opened_step_is_joined_and_its_token_starts_it_once(feature: Shell) -> None:
    token = feature("step", "open", "feature", "T-001", "--agent", "Demeter")["step"]["attempt"]
    assert feature("step", "start", "feature", "T-001", "--attempt", token)["step"]["attempt"] == token
    feature.refuse("StateConflict", "step", "start", "feature", "T-001", "--attempt", token)
    feature.refuse("StateConflict", "step", "start", "feature", "T-001")


def test_a_decision_and_a_partial_result(feature: Shell, path: Path) -> None:
    with Ledger(path) as ledger:
        plans = Plans(ledger)
        plans.update("feature", "T-001", retries=0, partial_ok=True)
        attempt = plans.start("feature", "T-001")["attempt"]
        plans.heartbeat(attempt, output="a draft")
        ledger.close_task(attempt, "timed_out")
    assert [step["id"] for step in feature("plan", "advance", "feature")["ready"]] == ["T-003"]
    assert feature("step", "list", "feature", "--status", "partial")["steps"][0]["id"] == "T-001"
    accepted = feature("step", "accept", "feature", "T-001", "--remaining", "the rest")["step"]
    assert (accepted["status"], accepted["followUp"]) == ("completed", "T-004")
    assert feature("step", "get", "feature", "T-002")["step"]["waitingFor"] == ["T-004"]
    feature("step", "update", "feature", "T-003", "--retries", "0")
    feature("step", "start", "feature", "T-003")
    feature("step", "complete", "feature", "T-003", "failed")
    feature.refuse("InvalidInput", "step", "decide", "feature", "T-003", "reassign")
    decided = feature("step", "decide", "feature", "T-003", "reassign", "--to", "Talos")["step"]
    assert (decided["status"], decided["owner"]) == ("pending", "Talos")
    assert feature("step", "delete", "feature", "T-004")["step"]["unblocked"] == ["T-002"]
    assert feature("plan", "cancel", "feature")["plan"]["status"] == "cancelled"


def test_fields_are_set_added_and_cleared(feature: Shell) -> None:
    changed = feature("step", "update", "feature", "T-003", "--add-blocked-by", "T-001", "--owner", "Talos")["step"]
    assert (changed["blockedBy"], changed["owner"]) == (["T-001"], "Talos")
    changed = feature("step", "update", "feature", "T-003", "--add-blocked-by", "T-002")["step"]
    assert changed["blockedBy"] == ["T-001", "T-002"]
    cleared = ("--clear", "blocked-by", "--clear", "owner", "--clear", "timeout-seconds")
    changed = feature("step", "update", "feature", "T-003", *cleared)["step"]
    assert (changed["blockedBy"], changed["owner"], changed["timeout_ms"]) == ([], None, None)
    feature.refuse("InvalidInput", "step", "update", "feature", "T-003", "--owner", "Talos", "--clear", "owner")


def test_a_cycle_is_named(feature: Shell) -> None:
    said = feature.refuse("DependencyCycle", "step", "update", "feature", "T-001", "--add-blocked-by", "T-002")
    assert sorted(set(said["cycle"])) == ["T-001", "T-002"]
    assert said["cycle"][0] == said["cycle"][-1]


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        ("PlanNotFound", ("plan", "show", SECRET)),
        ("PlanNotFound", ("step", "list", SECRET)),
        ("PlanNotFound", ("step", "claim", SECRET, "--agent", "a")),
        ("StepNotFound", ("step", "get", "feature", "T-999")),
        ("StepNotFound", ("step", "add", "feature", "--subject", "a", "--blocked-by", "T-999")),
        ("StepNotFound", ("step", "update", "feature", "T-001", "--add-blocks", SECRET)),
        ("DependencyCycle", ("step", "update", "feature", "T-001", "--blocked-by", "T-001")),
        ("InvalidInput", ("step", "get", "feature", f"{SECRET}/..")),
        ("InvalidInput", ("step", "add", "feature")),
        ("InvalidInput", ("step", "add", "feature", "--subject", "")),
        ("InvalidInput", ("step", "add", "feature", "--subject", "a", "--metadata", f'{{"{SECRET}"')),
        ("InvalidInput", ("step", "add", "feature", "--subject", "a", "--metadata", "[1]")),
        ("InvalidInput", ("step", "add", "feature", "--subject", "a", "--metadata", '{"a":NaN}')),
        ("InvalidInput", ("step", "add", "feature", "--subject", "a", "--metadata", '{"a":1,"a":2}')),
        ("InvalidInput", ("step", "add", "feature", "--subject", "a", "--retries", "-1")),
        ("InvalidInput", ("step", "add", "feature", "--subject", "a", "--retries", SECRET)),
        ("InvalidInput", ("step", "add", "feature", "--subject", "a", "--backoff", SECRET)),
        ("InvalidInput", ("step", "add", "feature", "--subject", "a", "--factor", "0.5")),
        ("InvalidInput", ("step", "add", "feature", "--subject", "a", "--timeout-seconds", SECRET)),
        ("InvalidInput", ("step", "add", "feature", "--subject", "a", "--timeout-seconds", "nan")),
        ("InvalidInput", ("step", "add", "feature", "--subject", "a", f"--{SECRET}", "1")),
        ("InvalidInput", ("step", "list", "feature", "--status", SECRET)),
        ("InvalidInput", ("step", "complete", "feature", "T-001", SECRET)),
        ("InvalidInput", ("step", "complete", "feature", "T-001", "success", "--error", "a")),
        ("InvalidInput", ("step", "complete", "feature", "T-001", "failed", "--learning", "a")),
        ("InvalidInput", ("step", "complete", "feature", "T-001", "success", "--attempt", SECRET)),
        ("TaskNotFound", ("step", "complete", "feature", "T-001", "success", "--attempt", str(uuid.UUID(int=7)))),
        ("StateConflict", ("step", "complete", "feature", "T-001", "success")),
        ("StateConflict", ("step", "decide", "feature", "T-001", "retry")),
        ("StateConflict", ("step", "accept", "feature", "T-001")),
        ("StateConflict", ("step", "start", "feature", "T-002")),
        ("StateConflict", ("step", "start", "feature", "T-001", "--agent", "Hermes")),
        ("InvalidInput", ("step", "decide", "feature", "T-001", SECRET)),
        ("InvalidInput", ("plan", "graph", "feature", "--format", SECRET)),
        ("StateConflict", ("plan", "create", "feature")),
        ("InvalidInput", ("plan", "create", "two\nlines")),
        ("InvalidInput", ("plan", "create", "another", "--on-exhausted", SECRET)),
        ("InvalidInput", ("plan", SECRET)),
        ("InvalidInput", ("plan",)),
        ("InvalidInput", ("step",)),
        ("InvalidInput", ("plan", "import", f"/nowhere/{SECRET}")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_what_is_refused_says_its_class_and_stores_nothing(
    feature: Shell, error: str, arguments: tuple[str, ...]
) -> None:
    with Ledger(feature.path) as ledger:
        before = Plans(ledger).steps("feature", all=True)
    feature.refuse(error, *arguments)
    with Ledger(feature.path) as ledger:
        plans = Plans(ledger)
        assert plans.steps("feature", all=True) == before
        assert len(plans.plans()) == 1


def test_no_command_on_plans_makes_a_ledger(folder: Path) -> None:
    shell = Shell(folder / "none.sqlite")
    for arguments in (("plan", "create", "a"), ("plan", "list"), ("step", "list", "a"), ("plan", "import", folder)):
        shell.refuse("InvalidInput", *arguments)
    assert snapshot(folder) == {}


def test_tables_are_for_people(feature: Shell) -> None:
    feature("step", "add", "feature", "--subject", "[bold]not markup[/bold] \x1b[31m", "--blocked-by", "T-001")
    shown = feature.shown("step", "list", "feature", "--format", "table")
    assert "T-002" in shown
    assert "[bold]not" in shown
    assert "\x1b" not in shown
    for words in (("plan", "list"), ("plan", "show", "feature"), ("step", "get", "feature", "T-001")):
        assert "first" in (shown := feature.shown(*words, "--format", "table")) or "feature" in shown


def test_the_graph_is_drawn_in_each_form(feature: Shell) -> None:
    drawn = {form: feature.shown("plan", "graph", "feature", "--format", form) for form in ("mermaid", "dot", "text")}
    assert drawn["mermaid"].startswith("flowchart")
    assert drawn["dot"].startswith("digraph")
    assert all("T-002" in picture for picture in drawn.values())


def test_a_plan_goes_out_into_files_and_comes_in_again(feature: Shell, tmp_path: Path) -> None:
    feature("step", "start", "feature", "T-001")
    feature("step", "complete", "feature", "T-001", "success", "--learning", "ids are *UUIDs*")
    out = tmp_path / "tasks"
    feature("plan", "export", "feature", out)
    assert sorted(file.name for file in out.iterdir()) == ["T-001.json", "T-002.json", "T-003.json"]
    said = feature("plan", "import", out, "--name", "again")
    assert said["plan"]["name"] == "again"
    before, after = (feature("step", "list", name, "--all")["steps"] for name in ("feature", "again"))
    for fields in ("id", "subject", "status", "blockedBy", "blocks", "owner", "timeout_ms", "retry_policy"):
        assert [step[fields] for step in before] == [step[fields] for step in after]
    (out / "T-002.json").write_text("{")
    said = feature.refuse("DamagedFile", "plan", "import", out, "--name", "damaged")
    assert said["file"] == "T-002.json"
    feature.refuse("PlanNotFound", "plan", "show", "damaged")
    feature("plan", "learnings", "feature", "--output", tmp_path / "learnings.md")
    assert "T-001" in (tmp_path / "learnings.md").read_text()


def test_a_dead_agent_s_step_is_claimed_by_the_next(feature: Shell, path: Path) -> None:
    clock = FakeClock(now=1_000.0)
    assert clock() == 1_000.0
    with Ledger(path) as ledger:
        Plans(ledger).update("feature", "T-001", timeout_seconds=0.001, retries=1, backoff="fixed", base_seconds=0)
        Plans(ledger).start("feature", "T-001")
    claimed = feature("step", "claim", "feature", "--agent", "Demeter")["step"]
    assert (claimed["id"], claimed["attempts"], claimed["error"]) == ("T-001", 2, "timeout")
