"""A long task as one file: what is read is written back, what has changed is written, and nothing by halves.

With ``TSG_PLAN_EXAMPLES`` in the environment that many files are tried on each database.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import DATA, FakeClock, snapshot
from tests.plan.test_files import DEEP, EXAMPLES, NAMES, OBJECTS, TEXTS, VALUES, by_key, exact, healthy, views
from tsg import DamagedFile, InvalidInput, Ledger, PlanNotFound, Plans, StateConflict
from tsg.plan import structure
from tsg.plan.longtask import export_file, import_file
from tsg.plan.tables import metadata
from tsg.tables import task_events, tasks

LONGTASKS = DATA / "longtasks"
TASK_FORM = """
    task_id task_type description status created_at started_at completed_at updated_at failed_at current_step
    total_steps agent_id session_name timeout_minutes max_retry global_retry error metadata steps
""".split()
STEP_FORM = """
    id name status agent_id session_name started_at completed_at retry_count result output_path error processed_by
    params
""".split()
#: The time on a fresh :class:`FakeClock`, as a file has it, and a minute later.
START, LATER = "1970-01-01T00:16:40Z", "1970-01-01T00:17:40Z"


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plans]:
    """Plans that stay from test to test; names of plans must be new."""
    folder = tmp_path_factory.mktemp("standing")
    folder.chmod(0o700)
    with Ledger(folder / "ledger.sqlite", clock=FakeClock()) as ledger:
        yield Plans(ledger)


def put(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def chain(*words: str, **said: Any) -> dict[str, Any]:
    """A task whose steps, numbered from 1, have these statuses."""
    return said | {"steps": [{"id": place, "status": word} for place, word in enumerate(words, 1)]}


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document


def stored(plans: Plans) -> dict[str, int]:
    """How many rows there are, in the ledger and of plans."""
    tables = (tasks, task_events, *metadata.sorted_tables)
    counts = [sa.select(sa.func.count()).select_from(table).scalar_subquery().label(table.name) for table in tables]
    return plans._read(lambda at: dict(at.connection.execute(sa.select(*counts)).mappings().one()))


def written(plans: Plans, plan: str, folder: Path) -> dict[str, Any]:
    """What the file of a plan says."""
    assert export_file(plans, plan, folder / "written.json")["files"] == 1
    return read(folder / "written.json")


def told(document: dict[str, Any], *fields: str) -> list[tuple[Any, ...]]:
    """These fields of the steps."""
    return [tuple(step.get(field) for field in fields) for step in document["steps"]]


def untouched(document: dict[str, Any]) -> str:
    """What is written of a task on which nothing was done: what was read, but that nobody is at work."""
    steps = [step | {"status": "pending"} if step.get("status") == "doing" else step for step in document["steps"]]
    others = {field: value for field, value in document.items() if field != "steps"}
    return exact(others | {"steps": steps})


# -- as it was -------------------------------------------------------------------------------------------

DOING = "{} was doing and is pending now; whoever was at work on it may still be".format
#: What the examples are when they are read: the plan's status, its steps', and what is said of it.
EXAMPLE_TASKS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "batch_writing": ("pending", dict.fromkeys("1234", "pending"), []),
    "site_move": (
        "failed",
        {
            "inventory": "completed",
            "links": "failed",
            "copy-pages": "pending",
            "redirects": "pending",
            "tell": "pending",
        },
        [DOING("copy-pages"), "the file says running, and by its steps the plan is failed"],
    ),
    "weekly_report": ("failed", {"1": "completed", "2": "failed", "3": "pending"}, []),
    "odd_fields": ("pending", {"1": "pending", "7": "pending", "b.2_c-d": "pending"}, []),
    "task_template": ("pending", {"1": "pending", "2": "pending"}, []),
    "undelivered": ("failed", {"1": "completed", "2": "pending", "3": "pending"}, [DOING("2")]),
    "finished": ("completed", {"10": "completed", "20": "completed"}, []),
}


def test_every_example_is_tried() -> None:
    assert {path.stem for path in LONGTASKS.iterdir()} == EXAMPLE_TASKS.keys()


@pytest.mark.parametrize("name", EXAMPLE_TASKS)
def test_a_file_is_read_as_it_says_and_written_back_as_it_was(plans: Plans, tmp_path: Path, name: str) -> None:
    status, steps, notes = EXAMPLE_TASKS[name]
    path = LONGTASKS / f"{name}.json"
    answer = import_file(plans, path)
    assert (answer["plan"]["name"], answer["plan"]["status"], answer["notes"]) == (name, status, notes)
    assert answer["plan"]["steps"]["pending"] == list(steps.values()).count("pending")
    assert by_key(plans, name, "status") == steps
    # Each waits for the one before it.
    keys = list(steps)
    assert by_key(plans, name, "blockedBy") == dict(zip(keys, [[], *([key] for key in keys)], strict=False))
    assert set(
        by_key(plans, name, "attempt").values() if False else [view["attempts"] for view in plans.steps(name)]
    ) <= {0}
    assert exact(written(plans, name, tmp_path)) == untouched(read(path))
    assert healthy(plans)

    # Once more, what was written: the same plan.
    again = import_file(plans, tmp_path / "written.json", name="again")
    assert by_key(plans, "again", "status") == steps
    assert again["plan"]["status"] == status
    assert written(plans, "again", tmp_path) == written(plans, name, tmp_path)


def test_what_a_file_says_is_what_its_plan_and_steps_have(plans: Plans) -> None:
    moved = import_file(plans, LONGTASKS / "site_move.json")["plan"]
    assert moved["description"] == "Move the club's pages to the new host"
    assert (moved["agent"], moved["session_name"], moved["global_retry"], moved["halted"]) == ("ada", None, 1, False)
    assert (moved["on_exhausted"], moved["grace_seconds"]) == ("fail", 600)
    assert moved["defaults"] == {
        "timeout_ms": 30_000,
        "retry_policy": {"count": 2, "backoff": "fixed", "base_seconds": 0},
        "fallback_agent": None,
        "partial_ok": False,
    }
    for field, values in {
        "subject": ["List all pages", "Check the links", "Copy the pages", "Set the redirects", "Tell everybody"],
        "owner": ["ada", None, None, "hermes", None],
        "session_name": [None, None, None, "dns", None],
        "params": [{"depth": 3}, {}, {}, {}, {}],
        "output": ["out/pages.csv", None, None, None, None],
        "error": [None, "timeout", None, None, None],
        "timeout_ms": [30_000] * 5,
        "retry_policy": [moved["defaults"]["retry_policy"]] * 5,
        "metadata": [{}] * 5,
    }.items():
        assert list(by_key(plans, "site_move", field).values()) == values

    odd = import_file(plans, LONGTASKS / "odd_fields.json")["plan"]
    assert (odd["description"], odd["agent"], odd["session_name"], odd["global_retry"]) == (None, None, None, 0)
    assert odd["defaults"]["timeout_ms"] is None
    assert odd["defaults"]["retry_policy"]["count"] == 0
    assert by_key(plans, "odd_fields", "subject") == {
        "1": "1",
        "7": "7",
        "b.2_c-d": "A step whose fields stand in another order",
    }
    assert by_key(plans, "odd_fields", "metadata") == {"1": {}, "7": {}, "b.2_c-d": {"cost": 0}}

    assert import_file(plans, LONGTASKS / "undelivered.json")["plan"]["halted"]


def test_a_file_has_the_form_that_people_and_their_tools_read(standing: Plans, tmp_path: Path) -> None:
    import_file(standing, LONGTASKS / "batch_writing.json", name="form")
    written(standing, "form", tmp_path)
    text = (tmp_path / "written.json").read_text(encoding="utf-8")
    assert text.startswith('{\n  "task_id": "batch_writing_20260313",\n')
    assert '      "name": "文章二:湖边的树",\n' in text
    assert text.endswith("}\n")


def test_what_has_no_utf8_form_is_written_as_its_escape(standing: Plans, tmp_path: Path) -> None:
    document = chain("pending", other="\ud800")
    import_file(standing, put(tmp_path / "escape.json", document))
    assert written(standing, "escape", tmp_path) == document


# -- what changes ----------------------------------------------------------------------------------------


def test_a_task_that_is_worked_through_is_written_with_what_became_of_it(
    plans: Plans, clock: FakeClock, tmp_path: Path
) -> None:
    before = read(LONGTASKS / "batch_writing.json")
    import_file(plans, LONGTASKS / "batch_writing.json")
    plan = "batch_writing"
    assert [step["id"] for step in plans.advance(plan)] == ["1"]
    plans.start(plan, "1", agent="bibi")
    document = written(plans, plan, tmp_path)
    assert document == before | {
        "started_at": START,
        "updated_at": START,
        "current_step": 1,
        "steps": [before["steps"][0] | {"status": "doing", "started_at": START}, *before["steps"][1:]],
    }

    clock.advance(60)
    plans.complete(plan, "1", output="articles/1.md")
    document = written(plans, plan, tmp_path)
    done = {"status": "done", "result": "success", "started_at": START, "completed_at": LATER}
    done |= {"output_path": "articles/1.md", "processed_by": "bibi"}
    assert document == before | {
        "started_at": START,
        "updated_at": LATER,
        "current_step": 2,
        "steps": [before["steps"][0] | done, *before["steps"][1:]],
    }

    for key, agent in (("2", "bibi"), ("3", "tutu"), ("4", "bibi")):
        plans.start(plan, key, agent=agent)
        plans.complete(plan, key)
    document = written(plans, plan, tmp_path)
    ended = ("status", "completed_at", "updated_at", "current_step", "total_steps")
    assert [document[field] for field in ended] == ["completed", LATER, LATER, 4, 4]
    assert told(document, "status", "result", "processed_by", "agent_id") == [
        ("done", "success", "bibi", None),
        ("done", "success", "bibi", None),
        ("done", "success", "tutu", "tutu"),
        ("done", "success", "bibi", None),
    ]
    assert healthy(plans)
    assert import_file(plans, tmp_path / "written.json", name="again")["plan"]["status"] == "completed"


def test_a_step_that_fails_is_retried_and_then_fails_its_task(plans: Plans, clock: FakeClock, tmp_path: Path) -> None:
    plan = "batch_writing"
    import_file(plans, LONGTASKS / f"{plan}.json")
    plans.start(plan, "1", agent="bibi")
    plans.fail(plan, "1", error="没有素材")
    document = written(plans, plan, tmp_path)
    assert document["status"] == "running"
    assert told(document, "status", "retry_count", "error", "result")[0] == ("pending", 1, "没有素材", None)

    # At once, and its time runs out after ten minutes, as the file has it.
    assert [step["id"] for step in plans.advance(plan)] == ["1"]
    plans.start(plan, "1", agent="bibi")
    clock.advance(601)
    document = written(plans, plan, tmp_path)
    over = "1970-01-01T00:26:41Z"
    assert [document[field] for field in ("status", "failed_at", "error", "current_step")] == [
        "failed",
        over,
        "timeout",
        1,
    ]
    assert told(document, "status", "retry_count", "error", "result", "completed_at")[0] == (
        "failed",
        1,
        "timeout",
        "failed",
        over,
    )

    # A person lets it go on.
    plans.decide(plan, "1", "retry")
    document = written(plans, plan, tmp_path)
    assert [document.get(field) for field in ("status", "failed_at")] == ["running", None]
    assert told(document, "status", "retry_count", "result", "completed_at")[0] == ("pending", None, None, None)
    assert healthy(plans)


def test_a_step_that_had_failed_in_the_file_is_taken_up_and_told_anew(plans: Plans, tmp_path: Path) -> None:
    plan = "weekly_report"
    import_file(plans, LONGTASKS / f"{plan}.json")
    plans.decide(plan, "2", "retry")
    document = written(plans, plan, tmp_path)
    assert [document[field] for field in ("status", "failed_at", "error", "updated_at")] == [
        "running",
        None,
        None,
        1000,
    ]
    fields = ("status", "result", "completed_at", "processed_by", "error", "started_at")
    assert told(document, *fields)[1] == ("pending", None, None, None, "字体缺失", 1773965010)

    plans.start(plan, "2", agent="tutu")
    plans.complete(plan, "2")
    document = written(plans, plan, tmp_path)
    # Times are numbers where the file has such.
    assert told(document, *fields)[1] == ("done", "success", 1000, "tutu", None, 1000)
    assert document["current_step"] == 3


@pytest.mark.parametrize("decision", ["complete", "cancel"])
def test_a_failed_step_of_a_file_that_is_decided_on_is_told_so(plans: Plans, tmp_path: Path, decision: str) -> None:
    import_file(plans, LONGTASKS / "weekly_report.json", name="decided")
    plans.decide("decided", "2", decision)
    document = written(plans, "decided", tmp_path)
    exact_word = {"metadata": {"tsg_status": "cancelled"}} if decision == "cancel" else {}
    step = document["steps"][1]
    assert (step["status"], step["result"]) == (("done", "success") if decision == "complete" else ("failed", None))
    assert {field: step[field] for field in exact_word} == exact_word
    assert import_file(plans, tmp_path / "written.json", name="again")["notes"] == []
    assert by_key(plans, "again", "status") == by_key(plans, "decided", "status")


def test_a_halted_task_goes_on_with_its_first_success(plans: Plans, tmp_path: Path) -> None:
    plan = "undelivered"
    import_file(plans, LONGTASKS / f"{plan}.json")
    plans.start(plan, "2", agent="bibi")
    assert written(plans, plan, tmp_path)["status"] == "failed"
    plans.complete(plan, "2")
    document = written(plans, plan, tmp_path)
    going_on = [document[field] for field in ("status", "global_retry", "failed_at", "error", "current_step")]
    assert going_on == ["pending", 1, None, None, 3]
    assert healthy(plans)


def test_a_task_that_could_not_be_delivered_says_so(plans: Plans, tmp_path: Path) -> None:
    import_file(plans, put(tmp_path / "halt.json", chain("done", "pending", error="", global_retry=0)))
    plans._on_plan("halt", structure.halt)
    document = written(plans, "halt", tmp_path)
    assert [document[field] for field in ("status", "failed_at", "error", "total_steps", "current_step")] == [
        "failed",
        START,
        "a step could not be delivered to its agent",
        2,
        2,
    ]
    again = import_file(plans, tmp_path / "written.json", name="again")["plan"]
    assert (again["status"], again["halted"]) == ("failed", True)


def test_what_is_updated_is_written_and_the_rest_stays_as_it_stood(standing: Plans, tmp_path: Path) -> None:
    import_file(standing, LONGTASKS / "odd_fields.json", name="updated")
    before = read(LONGTASKS / "odd_fields.json")
    standing.update("updated", "1", subject="Write", params={"n": 1}, owner="ada", session_name="s", description="How")
    document = written(standing, "updated", tmp_path)
    changes = {"name": "Write", "params": {"n": 1}, "agent_id": "ada", "session_name": "s", "description": "How"}
    assert document["steps"] == [before["steps"][0] | changes, *before["steps"][1:]]
    beside = {"total_steps": 3, "current_step": "1", "updated_at": START, "steps": document["steps"]}
    assert document == before | beside

    standing.update("updated", "b.2_c-d", metadata={"cost": True})
    assert written(standing, "updated", tmp_path)["steps"][2]["metadata"] == {"cost": True}
    import_file(standing, tmp_path / "written.json", name="updated again")
    for field in ("subject", "params", "owner", "session_name", "description", "metadata"):
        assert exact(by_key(standing, "updated again", field)) == exact(by_key(standing, "updated", field))


def test_true_that_was_one_has_changed(standing: Plans, tmp_path: Path) -> None:
    import_file(standing, put(tmp_path / "true.json", {"steps": [{"id": 1, "params": {"a": 1}}]}))
    standing.update("true", "1", params={"a": True})
    document = written(standing, "true", tmp_path)
    assert document["steps"][0]["params"]["a"] is True
    assert document["updated_at"] == START


def test_a_step_that_is_added_is_the_last_and_one_that_is_deleted_is_left_out(plans: Plans, tmp_path: Path) -> None:
    plan = "batch_writing"
    import_file(plans, LONGTASKS / f"{plan}.json")
    plans.delete(plan, "2")
    assert plans.add_step(plan, subject="Print", params={"copies": 2}, metadata={"by": "hand"})["id"] == "5"
    document = written(plans, plan, tmp_path)
    assert [step["id"] for step in document["steps"]] == [1, 3, 4, 5]
    assert (document["total_steps"], document["updated_at"]) == (4, START)
    assert document["steps"][3] == dict.fromkeys(STEP_FORM) | {
        "id": 5,
        "name": "Print",
        "status": "pending",
        "retry_count": 0,
        "params": {"copies": 2},
        "metadata": {"by": "hand"},
    }
    import_file(plans, tmp_path / "written.json", name="again")
    assert by_key(plans, "again", "blockedBy") == {"1": [], "3": ["1"], "4": ["3"], "5": ["4"]}
    # The number of one that was deleted is given to none.
    assert plans.add_step("again", subject="Fold")["id"] == "6"


def test_a_step_that_is_added_waits_for_the_last(standing: Plans, tmp_path: Path) -> None:
    import_file(standing, put(tmp_path / "added.json", chain("done", "pending")))
    assert standing.add_step("added", subject="One more")["blockedBy"] == ["2"]


def test_what_remains_of_a_step_comes_between_it_and_the_next(plans: Plans, clock: FakeClock, tmp_path: Path) -> None:
    import_file(plans, put(tmp_path / "part.json", chain("done", "pending", "pending", timeout_minutes=1)))
    plans.update("part", "2", partial_ok=True)
    token = plans.start("part", "2", agent="ada")["attempt"]
    assert token is not None
    plans.heartbeat(token, output="half of it")
    clock.advance(61)
    document = written(plans, "part", tmp_path)
    assert told(document, "status", "result", "metadata")[1] == ("failed", "failed", {"tsg_status": "partial"})
    assert import_file(plans, tmp_path / "written.json", name="again")["notes"] == []
    assert by_key(plans, "again", "status") == {"1": "completed", "2": "partial", "3": "pending"}

    plans.accept("part", "2", remaining="The other half")
    document = written(plans, "part", tmp_path)
    assert told(document, "id", "status", "metadata") == [
        (1, "done", None),
        (2, "done", None),
        (4, "pending", None),
        (3, "pending", None),
    ]
    assert document["current_step"] == 4
    import_file(plans, tmp_path / "written.json", name="rest")
    assert by_key(plans, "rest", "blockedBy") == {"1": [], "2": ["1"], "4": ["2"], "3": ["4"]}


def test_a_step_that_waits_for_a_later_one_comes_after_it(standing: Plans, tmp_path: Path) -> None:
    import_file(standing, put(tmp_path / "turned.json", chain("pending", "pending", "pending")))
    standing.update("turned", "3", blocked_by=["1"])
    standing.update("turned", "2", blocked_by=["3"])
    assert [step["id"] for step in written(standing, "turned", tmp_path)["steps"]] == [1, 3, 2]


@pytest.mark.parametrize("begun", [False, True])
def test_a_task_that_is_given_up_is_written_as_failed_and_read_as_given_up(
    plans: Plans, tmp_path: Path, begun: bool
) -> None:
    import_file(plans, put(tmp_path / "given.json", chain("done", "pending", metadata={"a": 1}, status="running")))
    if begun:
        plans.start("given", "2", agent="ada")
    plans.cancel_plan("given")
    document = written(plans, "given", tmp_path)
    assert (document["status"], document["failed_at"]) == ("failed", START)
    assert document["metadata"] == {"a": 1, "tsg_status": "cancelled"}
    assert told(document, "status", "result", "metadata")[1] == ("failed", None, {"tsg_status": "cancelled"})
    again = import_file(plans, tmp_path / "written.json", name="again")
    assert (again["plan"]["status"], again["notes"]) == ("cancelled", [])
    assert by_key(plans, "again", "metadata") == {"1": {}, "2": {}}
    assert written(plans, "again", tmp_path) == document
    assert healthy(plans)


@pytest.mark.parametrize("word", ["partial", "escalated", "cancelled"])
def test_the_exact_status_is_read_from_the_metadata(plans: Plans, tmp_path: Path, word: str) -> None:
    document = chain("done", "failed", "pending")
    document["steps"][1]["metadata"] = {"tsg_status": word, "other": [1]}
    import_file(plans, put(tmp_path / "exact.json", document))
    assert by_key(plans, "exact", "status")["2"] == word
    assert by_key(plans, "exact", "metadata")["2"] == {"other": [1]}
    assert exact(written(plans, "exact", tmp_path)) == exact(document)
    assert healthy(plans)


def test_an_attempt_has_the_tasks_time_or_five_minutes(plans: Plans, ledger: Ledger, tmp_path: Path) -> None:
    for minutes, seconds in ((0.5, 30), (10, 600), (0, 300), ("", 300), (None, 300)):
        path = put(tmp_path / "time.json", chain("pending", timeout_minutes=minutes))
        name = import_file(plans, path, name=f"of {minutes} minutes")["plan"]["name"]
        token = plans.start(name, "1", agent="ada")["attempt"]
        assert ledger.get_task(token).deadline_at == 1_000 + seconds


# -- what the file says of the task ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "steps", "status"),
    [
        ("pending", ["pending", "pending"], "pending"),
        ("pending", ["done", "pending"], "running"),
        ("running", ["pending", "pending"], "pending"),
        ("running", ["done", "doing"], "running"),
        ("running", [], "pending"),
        ("failed", ["done", "failed"], "failed"),
        ("failed", ["done", "pending"], "failed"),
        ("failed", [], "failed"),
        ("completed", ["done", "done"], "completed"),
        (None, ["done", "done"], "completed"),
        ("", ["failed"], "failed"),
    ],
)
def test_a_status_that_fits_the_steps_is_passed_over(
    standing: Plans, tmp_path: Path, word: str | None, steps: list[str], status: str
) -> None:
    document = chain(*steps, status=word) if word is not None else chain(*steps)
    answer = import_file(standing, put(tmp_path / "fits.json", document))
    assert (answer["plan"]["status"], answer["notes"]) == (status, [DOING("2")] if "doing" in steps else [])
    assert healthy(standing)
    standing.remove("fits")


@pytest.mark.parametrize(
    ("word", "steps", "status"),
    [
        ("completed", ["done", "pending"], "running"),
        ("completed", ["pending"], "pending"),
        ("completed", ["done", "failed"], "failed"),
        ("completed", [], "pending"),
        ("pending", ["failed"], "failed"),
        ("running", ["done", "failed", "pending"], "failed"),
        ("running", ["done"], "completed"),
        ("failed", ["done", "done"], "completed"),
    ],
)
def test_a_status_that_contradicts_the_steps_is_said_and_kept_until_something_changes(
    standing: Plans, tmp_path: Path, word: str, steps: list[str], status: str
) -> None:
    document = chain(*steps, status=word, completed_at="2026-03-13T09:00:00Z")
    answer = import_file(standing, put(tmp_path / "says.json", document))
    assert answer["plan"]["status"] == status
    assert answer["notes"] == [f"the file says {word}, and by its steps the plan is {status}"]
    assert healthy(standing)
    assert written(standing, "says", tmp_path) == document
    if status != "completed":
        standing.add_step("says", subject="One more")
        changed = written(standing, "says", tmp_path)
        assert (changed["status"], changed["completed_at"]) == (status, None)
    standing.remove("says")


def test_a_task_that_was_given_up_with_steps_left_is_not(standing: Plans, tmp_path: Path) -> None:
    document = chain("done", "pending", status="failed", metadata={"tsg_status": "cancelled"})
    answer = import_file(standing, put(tmp_path / "left.json", document))
    assert (answer["plan"]["status"], answer["plan"]["halted"]) == ("failed", True)
    assert answer["notes"] == ["the file says cancelled, and by its steps the plan is failed"]
    assert written(standing, "left", tmp_path) == document
    standing.start("left", "2", agent="ada")
    standing.complete("left", "2")
    changed = written(standing, "left", tmp_path)
    assert (changed["status"], changed["metadata"]) == ("completed", {})


# -- keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "following"),
    [
        ([], 1),
        ([1, 2, 3], 4),
        (["1", "2"], 3),
        ([3, 1], 4),
        (["a", "b"], 3),
        (["a", 40, "b"], 41),
        (["007", "0"], 3),
        ([0], 2),
        ([1710316800000], 2),
        ([999_999_998], 999_999_999),
    ],
)
def test_the_next_step_is_above_all_places_and_numbers(
    standing: Plans, tmp_path: Path, ids: list[Any], following: int
) -> None:
    answer = import_file(standing, put(tmp_path / "ids.json", {"steps": [{"id": given} for given in ids]}))
    assert answer["plan"]["steps"]["pending"] == len(ids)
    assert list(by_key(standing, "ids", "subject").values()) == [str(given) for given in ids]
    assert standing.add_step("ids", subject="One more")["id"] == str(following)
    document = written(standing, "ids", tmp_path)
    assert exact([step["id"] for step in document["steps"]]) == exact([*ids, following])
    standing.remove("ids")


# -- made by hand ----------------------------------------------------------------------------------------


def test_a_chain_that_was_made_by_hand_is_written_in_the_full_form(
    plans: Plans, clock: FakeClock, tmp_path: Path
) -> None:
    plans.create("hand", description="Made here", timeout_seconds=90, retries=1, on_exhausted="fail")
    plans.add_step("hand", subject="First", owner="ada", session_name="s", params={"a": 1})
    plans.add_step("hand", subject="Given up")
    plans.add_step("hand", subject="Second", blocked_by=["T-001"], description="With care")
    plans.delete("hand", "T-002")
    clock.advance(60)
    plans.start("hand", "T-001", agent="ada")
    plans.complete("hand", "T-001", output="out")
    document = written(plans, "hand", tmp_path)
    assert list(document) == TASK_FORM
    assert document | {"steps": None} == dict.fromkeys(TASK_FORM) | {
        "task_id": "hand",
        "description": "Made here",
        "status": "running",
        "created_at": START,
        "started_at": LATER,
        "updated_at": LATER,
        "current_step": "T-003",
        "total_steps": 2,
        "timeout_minutes": 1.5,
        "max_retry": 1,
        "global_retry": 0,
        "metadata": {},
    }
    first = ["T-001", "First", "done", "ada", "s", LATER, LATER, 0, "success", "out", None, "ada", {"a": 1}]
    second = dict.fromkeys(STEP_FORM) | {"id": "T-003", "name": "Second", "status": "pending", "retry_count": 0}
    assert document["steps"] == [
        dict(zip(STEP_FORM, first, strict=True)),
        second | {"params": {}, "description": "With care"},
    ]
    assert import_file(plans, tmp_path / "written.json", name="again")["notes"] == []
    assert by_key(plans, "again", "blockedBy") == {"T-001": [], "T-003": ["T-001"]}
    assert by_key(plans, "again", "description") == {"T-001": None, "T-003": "With care"}


def test_a_chain_is_written_in_the_order_in_which_its_steps_wait(standing: Plans, tmp_path: Path) -> None:
    standing.create("turned by hand")
    for blocked_by in ([], [], ["T-001"]):
        standing.add_step("turned by hand", subject="Do it", blocked_by=blocked_by)
    standing.update("turned by hand", "T-001", blocked_by=["T-002"])
    document = written(standing, "turned by hand", tmp_path)
    assert [step["id"] for step in document["steps"]] == ["T-002", "T-001", "T-003"]


def test_a_plan_without_steps_is_a_chain(standing: Plans, tmp_path: Path) -> None:
    standing.create("empty")
    document = written(standing, "empty", tmp_path)
    assert [document[field] for field in ("steps", "total_steps", "current_step")] == [[], 0, None]


@pytest.mark.parametrize(
    "waits",
    [[[], []], [[], ["T-001"], ["T-001"]], [[], [], ["T-001", "T-002"]]],
    ids=["apart", "a fork", "a join"],
)
def test_what_is_no_chain_is_not_written(
    standing: Plans, tmp_path: Path, waits: list[list[str]], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    standing.create(name)
    for blocked_by in waits:
        standing.add_step(name, subject="Do it", blocked_by=blocked_by)
    with pytest.raises(StateConflict, match="no chain"):
        export_file(standing, name, tmp_path / "graph.json")
    assert not (tmp_path / "graph.json").exists()


# -- what is refused -------------------------------------------------------------------------------------


def step(**said: Any) -> dict[str, Any]:
    """A task with two steps, of which the second says that."""
    return {"steps": [{"id": 1}, {"id": 2} | said]}


DAMAGE: dict[str, bytes | Any] = {
    "no JSON": b'{"steps": [',
    "nothing": b"",
    "no UTF-8": b'{"steps": [], "description": "\xff"}',
    "a name twice": b'{"steps": [], "steps": []}',
    "no number": b'{"steps": [], "x": NaN}',
    "too deep": {"steps": [], "x": DEEP},
    "too large": b'{"steps": [], "x": "' + b"x" * (16 * 2**20) + b'"}',
    "no object": [],
    "no steps": {},
    "steps that are null": {"steps": None},
    "steps that are an object": {"steps": {"1": {}}},
    "a step that is text": {"steps": ["write"]},
    "a step without an id": {"steps": [{"name": "x"}]},
    "an id twice": {"steps": [{"id": 1}, {"id": 1}]},
    "an id as number and as text": {"steps": [{"id": 1}, {"id": "1"}]},
    "an id that is true": {"steps": [{"id": True}]},
    "an id that is a fraction": {"steps": [{"id": 1.0}]},
    "an id that is null": {"steps": [{"id": None}]},
    "an id that is negative": {"steps": [{"id": -1}]},
    "an id that is empty": {"steps": [{"id": ""}]},
    "an id with blanks": {"steps": [{"id": "a b"}]},
    "an id that is too long": {"steps": [{"id": 10**64}]},
    "an id that leaves no number": {"steps": [{"id": 999_999_999}]},
    "a status of ours": {"steps": [], "status": "cancelled"},
    "a status that is a list": {"steps": [], "status": []},
    "a step's status as a task's": step(status="completed"),
    "a task's status as a step's": {"steps": [], "status": "done"},
    "a status in capitals": step(status="DONE"),
    "a status that is a number": step(status=0),
    "too many steps told": {"steps": [], "total_steps": 1},
    "too few steps told": step() | {"total_steps": 1},
    "a total that is text": step() | {"total_steps": "2"},
    "a total that is a fraction": step() | {"total_steps": 2.0},
    "a total that is true": {"steps": [{"id": 1}], "total_steps": True},
    "a task's id that is a list": {"steps": [], "task_id": []},
    "a type that is a number": {"steps": [], "task_type": 1},
    "a description that is a number": {"steps": [], "description": 1},
    "a description that no database holds": {"steps": [], "description": "\x00"},
    "a time that is true": {"steps": [], "created_at": True},
    "a time that is an object": {"steps": [], "failed_at": {}},
    "a current step that is a list": {"steps": [], "current_step": []},
    "an agent that is a number": {"steps": [], "agent_id": 1},
    "an agent that is no name": {"steps": [], "agent_id": "a\nb"},
    "a session that is a number": {"steps": [], "session_name": 1},
    "a timeout that is text": {"steps": [], "timeout_minutes": "5"},
    "a timeout that is true": {"steps": [], "timeout_minutes": True},
    "a timeout below zero": {"steps": [], "timeout_minutes": -1},
    "a timeout without end": {"steps": [], "timeout_minutes": 1e308},
    "a timeout larger than any": {"steps": [], "timeout_minutes": 10**400},
    "retries below zero": {"steps": [], "max_retry": -1},
    "half a retry": {"steps": [], "max_retry": 0.5},
    "retries that are text": {"steps": [], "max_retry": "1"},
    "a global retry below zero": {"steps": [], "global_retry": -1},
    "a global retry that is false": {"steps": [], "global_retry": False},
    "a global retry beyond counting": {"steps": [], "global_retry": 2**31 - 1},
    "an error that is an object": {"steps": [], "error": {}},
    "metadata that are a list": {"steps": [], "metadata": []},
    "an exact status without need": {"steps": [], "metadata": {"tsg_status": "cancelled"}},
    "an exact status that a task has not": {"steps": [], "status": "failed", "metadata": {"tsg_status": "partial"}},
    "a name that is a number": step(name=5),
    "a step's agent that is an object": step(agent_id={}),
    "a step's session that is a list": step(session_name=[]),
    "a step's time that is false": step(started_at=False),
    "a count that is text": step(retry_count="0"),
    "a count below zero": step(retry_count=-1),
    "a result that is an object": step(result={}),
    "a path that is a number": step(output_path=1),
    "a step's error that is a list": step(error=[]),
    "an agent at work that is true": step(processed_by=True),
    "params that are text": step(params="x"),
    "params that are a list": step(params=[]),
    "a step's metadata that are a list": step(metadata=[]),
    "a step's exact status that does not fit": step(status="done", metadata={"tsg_status": "partial"}),
    "a step's exact status that nobody has": step(status="failed", metadata={"tsg_status": "tired"}),
    "a step's exact status that is its own": step(status="failed", metadata={"tsg_status": "failed"}),
    "a step's exact status that is null": step(status="failed", metadata={"tsg_status": None}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_names_itself_and_nothing_is_stored(standing: Plans, tmp_path: Path, damage: str) -> None:
    content = DAMAGE[damage]
    path = tmp_path / "damaged.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    before = stored(standing)
    with pytest.raises(DamagedFile, match=r"\Adamaged\.json: .") as refused:
        import_file(standing, path)
    assert refused.value.file == "damaged.json"
    assert stored(standing) == before


def test_what_is_refused_of_a_step_names_the_step(standing: Plans, tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match=r"\Aone\.json: step 2: its status must be one of: pending, doing, done, fai"):
        import_file(standing, put(tmp_path / "one.json", step(status="paused")))
    with pytest.raises(DamagedFile, match=r"step 2 of its list: a step's key .*, or is a whole number\Z"):
        import_file(standing, put(tmp_path / "one.json", step(id=None)))
    with pytest.raises(DamagedFile, match=r"two steps have the id 1\Z"):
        import_file(standing, put(tmp_path / "one.json", step(id="1")))


@pytest.mark.skipif(sys.platform == "win32", reason="needs links and pipes")
@pytest.mark.parametrize("kind", ["folder", "link", "broken link", "pipe"])
def test_what_is_no_regular_file_is_damage_when_read_and_left_alone_when_written(
    standing: Plans, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "task.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(LONGTASKS / "finished.json" if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(DamagedFile, match="no regular file"):
        import_file(standing, path)
    standing.create(f"before a {kind}")
    before = os.lstat(path)
    with pytest.raises(InvalidInput):
        export_file(standing, f"before a {kind}", path)
    assert os.lstat(path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["task.json"]


@pytest.mark.parametrize("path", ["nowhere/task.json", "task.json", "", "a\0b", None, 5])
def test_without_a_file_there_is_nothing_to_read(standing: Plans, tmp_path: Path, path: Any) -> None:
    before = stored(standing)
    with pytest.raises(InvalidInput) as refused:
        import_file(standing, f"{tmp_path}/{path}" if path and isinstance(path, str) else path)
    assert type(refused.value) is InvalidInput
    assert stored(standing) == before


def test_a_plan_of_that_name_is_not_touched(plans: Plans, tmp_path: Path) -> None:
    import_file(plans, LONGTASKS / "finished.json")
    before, rows = written(plans, "finished", tmp_path), stored(plans)
    with pytest.raises(StateConflict, match="this name already"):
        import_file(plans, LONGTASKS / "task_template.json", name="finished")
    assert (written(plans, "finished", tmp_path), stored(plans)) == (before, rows)


@pytest.mark.parametrize(
    ("file", "given_name", "name"),
    [
        ("任务 1.json", None, "任务 1"),
        ("a.json.json", None, "a.json"),
        ("plain", None, "plain"),
        ("x.json", "another", "another"),
    ],
)
def test_the_name_of_a_plan_is_the_files_unless_it_is_given(
    standing: Plans, tmp_path: Path, file: str, given_name: str | None, name: str
) -> None:
    assert import_file(standing, put(tmp_path / file, chain()), name=given_name)["plan"]["name"] == name
    standing.remove(name)


@pytest.mark.skipif(sys.platform == "win32", reason="needs names that are no text")
@pytest.mark.parametrize("file", [".json", " .json", "a\nb.json", b"\xff.json"])
def test_a_file_that_has_no_name_for_a_plan_needs_one(standing: Plans, tmp_path: Path, file: str | bytes) -> None:
    path = os.path.join(os.fsencode(tmp_path), os.fsencode(file))
    with open(path, "wb") as opened:
        opened.write(b'{"steps": 1}')
    with pytest.raises(InvalidInput, match="a plan's name"):
        import_file(standing, os.fsdecode(path))
    # Nor is it told to anybody, if it is no line of text.
    with pytest.raises(DamagedFile) as refused:
        import_file(standing, os.fsdecode(path), name="named")
    assert refused.value.file == "FILE.json"


def test_reading_is_undone_with_the_applications_transaction(engine: sa.Engine, tmp_path: Path) -> None:
    with engine.connect() as connection, connection.begin() as transaction:
        plans = Plans.within(connection)
        import_file(plans, LONGTASKS / "site_move.json")
        assert exact(written(plans, "site_move", tmp_path)) == untouched(read(LONGTASKS / "site_move.json"))
        transaction.rollback()
    with engine.connect() as connection:
        assert Plans.within(connection).plans() == []
        assert connection.scalar(sa.select(sa.func.count()).select_from(tasks)) == 0


def test_a_plan_that_is_not_there_makes_no_file(standing: Plans, tmp_path: Path) -> None:
    with pytest.raises(PlanNotFound):
        export_file(standing, "nobody", tmp_path / "task.json")
    with pytest.raises(InvalidInput, match="no folder"):
        export_file(standing, standing.create("no folder")["name"], tmp_path / "nowhere" / "task.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [lambda it: import_file(it, "x"), lambda it: export_file(it, "x", "x")])
def test_only_plans_are_read_into_and_written_from(call: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidInput, match="Plans"):
        call(None)


def test_a_file_is_replaced_as_a_whole_and_only_where_it_is_another(
    plans: Plans, clock: FakeClock, tmp_path: Path
) -> None:
    import_file(plans, LONGTASKS / "task_template.json")
    folder = tmp_path / "tasks"
    folder.mkdir()
    path = folder / "task.json"
    path.write_text("something else")
    path.chmod(0o640)
    export_file(plans, "task_template", path)
    before = snapshot(folder)
    export_file(plans, "task_template", path)
    assert snapshot(folder) == before
    plans.start("task_template", "1", agent="ada")
    export_file(plans, "task_template", path)
    assert list(snapshot(folder)) == ["task.json"]
    assert read(path)["steps"][0]["status"] == "doing"
    assert path.stat().st_mode & 0o777 == 0o640


def test_what_could_not_be_read_again_is_not_written(standing: Plans, tmp_path: Path) -> None:
    standing.create("deep")
    deep: Any = 1
    for _ in range(98):
        deep = [deep]
    standing.add_step("deep", subject="Do it", params={"a": deep})
    with pytest.raises(StateConflict, match="too deep"):
        export_file(standing, "deep", tmp_path / "deep.json")
    assert list(tmp_path.iterdir()) == []


def test_a_moment_beyond_all_years_is_told_as_a_number(plans: Plans, clock: FakeClock, tmp_path: Path) -> None:
    clock.now = 1e15
    import_file(plans, put(tmp_path / "far.json", chain("pending", "pending")))
    plans.start("far", "1", agent="ada")
    plans.complete("far", "1")
    document = written(plans, "far", tmp_path)
    assert told(document, "completed_at")[0] == (10**15,)
    assert import_file(plans, tmp_path / "written.json", name="again")["notes"] == []


# -- any file, and large ones ----------------------------------------------------------------------------


def given_or_not(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | st.just("") | values


TIMES = given_or_not(TEXTS | st.integers(0, 2**40) | st.floats(0, 2e9))
COUNTS = given_or_not(st.integers(0, 10**9))
METADATA = given_or_not(OBJECTS)
TASK_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "task_id": given_or_not(TEXTS | st.integers()),
    "task_type": given_or_not(TEXTS),
    "description": given_or_not(TEXTS),
    "status": given_or_not(st.sampled_from(["pending", "running", "completed", "failed"])),
    **dict.fromkeys(("created_at", "started_at", "completed_at", "updated_at", "failed_at"), TIMES),
    "current_step": given_or_not(TEXTS | st.integers()),
    "agent_id": given_or_not(NAMES),
    "session_name": given_or_not(TEXTS),
    "timeout_minutes": given_or_not(st.integers(0, 10**6) | st.floats(0.001, 1e6)),
    "max_retry": COUNTS,
    "global_retry": COUNTS,
    "error": given_or_not(TEXTS),
    "metadata": METADATA,
    "x-unknown": VALUES,
    "halted": VALUES,
    "source": VALUES,
}
STEP_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "name": given_or_not(TEXTS),
    "status": given_or_not(st.sampled_from(["pending", "doing", "done", "failed"])),
    "agent_id": given_or_not(NAMES),
    "session_name": given_or_not(TEXTS),
    "started_at": TIMES,
    "completed_at": TIMES,
    "retry_count": COUNTS,
    "result": given_or_not(st.sampled_from(["success", "failed", "好"])),
    "output_path": given_or_not(TEXTS),
    "error": given_or_not(TEXTS),
    "processed_by": given_or_not(TEXTS),
    "params": given_or_not(OBJECTS),
    "description": given_or_not(TEXTS),
    "metadata": METADATA,
    "subject": VALUES,
    "owner": VALUES,
    "timeout": VALUES,
}
IDS = st.integers(0, 99) | st.sampled_from(["a", "b-1", "C.2", "007", "T-001"]) | st.integers(0, 99).map(str)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    ids = draw(st.lists(IDS, max_size=6, unique_by=str))
    steps = []
    for given_id in ids:
        said = {"id": given_id} | draw(st.fixed_dictionaries({}, optional=STEP_FIELDS))
        if said.get("status") == "failed" and draw(st.booleans()):
            word = draw(st.sampled_from(["partial", "escalated", "cancelled"]))
            said["metadata"] = (said.get("metadata") or {}) | {"tsg_status": word}
        steps.append({name: said[name] for name in draw(st.permutations(list(said)))})
    task = draw(st.fixed_dictionaries({}, optional=TASK_FIELDS))
    if draw(st.booleans()):
        task["total_steps"] = draw(st.sampled_from([len(steps), None, ""]))
    return {name: task[name] for name in draw(st.permutations(list(task)))} | {"steps": steps}


NEW_NAME = count()


@settings(max_examples=EXAMPLES * 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(document=documents())
def test_any_file_read_and_written_and_read_again_is_the_same(
    standing: Plans, tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]
) -> None:
    place = tmp_path_factory.mktemp("any")
    first, second = (f"plan {next(NEW_NAME)}" for _ in range(2))
    import_file(standing, put(place / "given.json", document), name=first)
    assert exact(written(standing, first, place)) == untouched(document)
    assert not import_file(standing, place / "written.json", name=second)["notes"] or document.get("status")
    assert exact(views(standing, second)) == exact(views(standing, first))
    assert standing.show(second)["status"] == standing.show(first)["status"]
    assert exact(written(standing, second, place)) == untouched(document)
    assert healthy(standing)
    for name in (first, second):
        standing.remove(name)
    shutil.rmtree(place)


def test_five_thousand_steps_are_read_and_written_in_seconds(path: Path, tmp_path: Path) -> None:
    words = ["done"] * 10 + ["pending"] * 4_990
    document = chain(*words, total_steps=5_000)
    for said in document["steps"]:
        said |= {"name": "写一篇文章", "params": {"topic": "公园", "words": 800}, "result": "", "error": ""}
    put(tmp_path / "long.json", document)
    with Ledger(path) as ledger:
        plans = Plans(ledger)
        began = time.process_time()
        assert import_file(plans, tmp_path / "long.json")["plan"]["steps"]["pending"] == 4_990
        spent = time.process_time() - began
        assert [step["id"] for step in plans.advance("long")] == ["11"]
        assert written(plans, "long", tmp_path) == document
        assert healthy(plans)
    # Far from what it takes, and from what reading them one by one would take.
    assert spent < 5
