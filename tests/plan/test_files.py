"""A plan as a folder of files: what is read is written back, what has changed is written, and nothing by halves.

With ``TSG_PLAN_EXAMPLES`` in the environment that many folders are tried on each database.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import sys
import uuid
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tsg.tables
from tests.conftest import DATA, FakeClock, database, snapshot
from tests.faults.tracing import trace
from tsg import DamagedFile, DependencyCycle, InvalidInput, Ledger, PlanNotFound, Plans, StateConflict
from tsg.plan import tables
from tsg.plan.files import export_folder, import_folder, learnings_markdown, write_learnings
from tsg.plan.reading import Learning

EXAMPLES = int(os.environ.get("TSG_PLAN_EXAMPLES", "15"))
TASKS = DATA / "tasks"
FORM = """
    id subject description status activeForm blockedBy blocks owner metadata threadID timeout_ms retry_policy
    fallback_agent partial_ok session_id session_resume
""".split()
#: What a step's view says of the attempts and of the moment, which no file does.
OF_THE_MOMENT = ("attempt", "attempts", "due_at", "learnings")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder for files of steps."""
    made = tmp_path / "tasks"
    made.mkdir()
    return made


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def standing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plans]:
    """Plans that stay from test to test, on either database; names of plans must be new."""
    if request.param == "sqlite":
        folder = tmp_path_factory.mktemp("standing")
        folder.chmod(0o700)
        with Ledger(folder / "ledger.sqlite", clock=FakeClock()) as ledger:
            yield Plans(ledger)
        return
    server = request.getfixturevalue("postgresql_server")
    template = request.getfixturevalue("plans_template")
    with (
        database(server, f"tsg_{uuid.uuid4().hex}", template=template) as url,
        Ledger(url, clock=FakeClock()) as ledger,
    ):
        yield Plans(ledger)


def write(folder: Path, **documents: Any) -> None:
    """Steps by their numbers: ``_1={…}`` is T-001; what it needs and does not say is added."""
    for number, document in documents.items():
        key = f"T-{number.removeprefix('_'):>03}"
        said = {"id": key, "subject": f"Do {key}"} | document
        (folder / f"{key}.json").write_text(json.dumps(said), encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """What the files of a folder say, by their names."""
    return {path.name: json.loads(path.read_bytes()) for path in sorted(folder.glob("T-*.json"))}


def exact(document: Any) -> str:
    """The values of a document, in which 1, 1.0 and true are three, and the order of its fields counts."""
    return json.dumps(document)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return exact(one) == exact(other)


def rows_of(plans: Plans, table: sa.Table) -> int:
    return plans._read(lambda at: at.connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0)


def stored(plans: Plans) -> dict[str, int]:
    """How many rows there are, in the ledger and of plans."""
    everything = (tsg.tables.tasks, tsg.tables.task_events, *tables.metadata.sorted_tables)
    return {table.name: rows_of(plans, table) for table in everything}


def views(plans: Plans, plan: str) -> list[dict[str, Any]]:
    """All that a plan's steps are, but for what no file says."""
    return [
        {field: value for field, value in view.items() if field not in OF_THE_MOMENT}
        for view in plans.steps(plan, all=True)
    ]


def by_key(plans: Plans, plan: str, field: str) -> dict[str, Any]:
    return {view["id"]: view[field] for view in views(plans, plan)}


def healthy(plans: Plans) -> bool:
    report = plans.doctor()
    return report["healthy"] and report.get("plan_inconsistency_count") == 0


# -- as it was -------------------------------------------------------------------------------------------


def test_a_folder_is_read_as_it_says_and_written_back_as_it_was(plans: Plans, tmp_path: Path) -> None:
    before = {path.name: json.loads(path.read_bytes()) for path in TASKS.glob("T-???.json")}
    answer = import_folder(plans, TASKS)
    assert answer["notes"] == ["T-003 was in progress and is pending now"]
    assert answer["plan"]["name"] == "tasks"
    assert answer["plan"]["status"] == "running"
    assert by_key(plans, "tasks", "status") == {
        "T-001": "completed",
        "T-002": "pending",
        "T-003": "pending",
        "T-004": "deleted",
        "T-005": "escalated",
        "T-007": "pending",
    }
    assert by_key(plans, "tasks", "blockedBy") == {
        "T-001": [],
        # One side says so, and it is not this one.
        "T-002": ["T-001"],
        "T-003": ["T-001"],
        "T-004": [],
        # Nothing waits for what is deleted.
        "T-005": ["T-003", "T-002"],
        "T-007": ["T-005"],
    }
    assert by_key(plans, "tasks", "blocks")["T-007"] == ["T-009", "T-1000"]
    assert by_key(plans, "tasks", "ready") == {key: key in ("T-002", "T-003") for key in by_key(plans, "tasks", "id")}
    assert plans.get("tasks", "T-005")["metadata"] == {"tried": 4}
    assert plans.get("tasks", "T-005")["error"] == "no browser on this machine"
    assert healthy(plans)

    written = export_folder(plans, "tasks", tmp_path / "new" / "folder")
    assert (written["plan"]["name"], written["files"]) == ("tasks", 6)
    after = read(tmp_path / "new" / "folder")
    before["T-003.json"]["status"] = "pending"
    assert same(after, dict(sorted(before.items())))


def test_a_file_has_the_form_that_people_and_their_tools_read(plans: Plans, tmp_path: Path) -> None:
    import_folder(plans, TASKS)
    export_folder(plans, "tasks", tmp_path / "out")
    text = (tmp_path / "out" / "T-002.json").read_bytes().decode("utf-8")
    assert text.startswith(
        '{\n  "status": "pending",\n  "subject": "Serve the reviews — GET and POST",\n  "id": "T-002",'
    )
    assert text.endswith("\n}\n")
    assert "größer" in (tmp_path / "out" / "T-001.json").read_text(encoding="utf-8")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in TASKS.glob("T-???.json")
    )


def test_what_has_no_utf8_form_is_written_as_its_escape(standing: Plans, tasks: Path, tmp_path: Path) -> None:
    write(tasks, _1={"metadata": {"half": "\ud800 ä"}, "other": "\x00"})
    import_folder(standing, tasks, name="halves")
    export_folder(standing, "halves", tmp_path / "out")
    assert same(read(tmp_path / "out"), read(tasks))


def test_a_file_that_says_next_to_nothing_stays_so(standing: Plans, tasks: Path, tmp_path: Path) -> None:
    write(tasks, _1={})
    import_folder(standing, tasks, name="short")
    view = standing.get("short", "T-001")
    assert (view["status"], view["timeout_ms"], view["partial_ok"]) == ("pending", 120_000, False)
    assert view["retry_policy"] == {"count": 3, "backoff": "exponential"}
    export_folder(standing, "short", tmp_path / "out")
    assert same(read(tmp_path / "out"), {"T-001.json": {"id": "T-001", "subject": "Do T-001"}})


def test_a_step_made_by_hand_is_written_with_all_fields_of_the_form(plans: Plans, tmp_path: Path) -> None:
    plans.create("p", timeout_seconds=1.5)
    plans.add_step("p", subject="One", metadata={"a": [1, 1.5, True]}, blocks=["T-002", "T-003"])
    plans.add_step("p", subject="Two", retry_policy={"count": 0, "backoff": "fixed", "cap_seconds": 7}, owner="ada")
    export_folder(plans, "p", tmp_path)
    first, second = read(tmp_path).values()
    assert list(first) == list(second) == FORM
    assert first["blocks"] == ["T-002", "T-003"]
    assert (first["metadata"], first["timeout_ms"]) == ({"a": [1, 1.5, True]}, 1500)
    assert second == {
        "id": "T-002",
        "subject": "Two",
        "description": None,
        "status": "pending",
        "activeForm": None,
        "blockedBy": ["T-001"],
        "blocks": [],
        "owner": "ada",
        "metadata": {},
        "threadID": None,
        "timeout_ms": 1500,
        "retry_policy": {"count": 0, "backoff": "fixed", "cap_seconds": 7.0},
        "fallback_agent": None,
        "partial_ok": False,
        "session_id": None,
        "session_resume": None,
    }


def test_what_only_our_steps_have_is_written_where_it_says_something(plans: Plans, tmp_path: Path) -> None:
    plans.create("p", on_exhausted="fail", retries=0)
    plans.add_step("p", subject="One", params={"depth": 2}, session_name="s")
    plans.start("p", "T-001", agent="ada")
    plans.fail("p", "T-001", error="no", output="a log")
    export_folder(plans, "p", tmp_path / "one")
    document = read(tmp_path / "one")["T-001.json"]
    assert list(document) == [*FORM, "session_name", "params", "output", "error"]
    assert (document["params"], document["output"], document["error"]) == ({"depth": 2}, "a log", "no")
    import_folder(plans, tmp_path / "one", name="q")
    assert views(plans, "q") == views(plans, "p")


def test_fields_that_are_called_as_python_calls_them_are_unknown_ones(
    standing: Plans, tasks: Path, tmp_path: Path
) -> None:
    other = {"timeout_seconds": 1, "retries": 9, "blocked_by": ["T-009"], "addBlocks": ["T-001"], "attempts": "many"}
    write(tasks, _1=other)
    import_folder(standing, tasks, name="names")
    view = standing.get("names", "T-001")
    assert (view["timeout_ms"], view["retry_policy"]["count"], view["blockedBy"]) == (120_000, 3, [])
    export_folder(standing, "names", tmp_path / "out")
    assert same(read(tmp_path / "out"), read(tasks))


@pytest.mark.parametrize(
    ("said", "milliseconds"),
    [({"timeout_ms": 0}, None), ({"timeout_ms": None}, None), ({}, 120_000), ({"timeout_ms": 1500}, 1500)],
)
def test_no_timeout_is_zero_or_null_and_nothing_said_is_the_default(
    plans: Plans, tasks: Path, tmp_path: Path, said: dict[str, Any], milliseconds: int | None
) -> None:
    write(tasks, _1=said)
    import_folder(plans, tasks)
    assert plans.get("tasks", "T-001")["timeout_ms"] == milliseconds
    # The attempt's ledger task has it so.
    assert plans.start("tasks", "T-001", agent="ada")["timeout_ms"] == milliseconds
    export_folder(plans, "tasks", tmp_path / "out")
    document = read(tmp_path / "out")["T-001.json"]
    assert {name: value for name, value in document.items() if name == "timeout_ms"} == said


# -- statuses --------------------------------------------------------------------------------------------


def test_every_status_of_ours_is_written_as_one_of_the_form_and_read_back(
    plans: Plans, clock: FakeClock, tmp_path: Path
) -> None:
    plans.create("p", retries=0, timeout_seconds=10)
    for subject in ("completed", "partial", "escalated", "cancelled", "deleted", "in_progress", "pending"):
        plans.add_step("p", subject=subject, partial_ok=subject == "partial", metadata={"of": subject})
    plans.start("p", "T-002", agent="ada")
    attempt = plans.get("p", "T-002")["attempt"]
    assert attempt is not None
    plans.heartbeat(attempt, output="half of it")
    clock.advance(11)
    plans.advance("p")
    for key in ("T-001", "T-003", "T-006"):
        plans.start("p", key, agent="ada")
    plans.complete("p", "T-001", learnings=["so"])
    plans.fail("p", "T-003", error="no")
    plans.cancel("p", "T-004")
    plans.delete("p", "T-005")
    assert [view["status"] for view in plans.steps("p", all=True)] == [view["subject"] for view in views(plans, "p")]

    export_folder(plans, "p", tmp_path / "out")
    said = {
        document["subject"]: (document["status"], document["metadata"].get("tsg_status"))
        for document in read(tmp_path / "out").values()
    }
    assert said == {
        "completed": ("completed", None),
        "partial": ("pending", "partial"),
        "escalated": ("pending", "escalated"),
        "cancelled": ("deleted", "cancelled"),
        "deleted": ("deleted", None),
        "in_progress": ("in_progress", None),
        "pending": ("pending", None),
    }
    answer = import_folder(plans, tmp_path / "out", name="q")
    assert answer["notes"] == ["T-006 was in progress and is pending now"]
    expected = views(plans, "p")
    expected[5] |= {"status": "pending", "ready": True}
    assert views(plans, "q") == expected
    assert healthy(plans)


def test_a_failed_step_is_read_back_and_the_plan_has_failed_with_it(plans: Plans, tmp_path: Path) -> None:
    plans.create("p", retries=0, on_exhausted="fail")
    plans.add_step("p", subject="One")
    plans.start("p", "T-001", agent="ada")
    assert plans.fail("p", "T-001")["status"] == "failed"
    export_folder(plans, "p", tmp_path / "out")
    assert read(tmp_path / "out")["T-001.json"]["metadata"] == {"tsg_status": "failed"}
    assert import_folder(plans, tmp_path / "out", name="q")["plan"]["status"] == "failed"
    assert plans.decide("q", "T-001", "retry")["status"] == "pending"
    # The word goes with what it told of.
    export_folder(plans, "q", tmp_path / "out")
    assert read(tmp_path / "out")["T-001.json"]["metadata"] == {}
    assert healthy(plans)


def test_a_status_that_was_decided_on_changes_its_words_in_place(plans: Plans, tasks: Path) -> None:
    write(tasks, _1={"metadata": {"a": 1, "tsg_status": "partial", "b": 2}, "status": "pending"})
    write(tasks, _2={"metadata": None, "status": "pending"}, _3={})
    import_folder(plans, tasks)
    for key in ("T-002", "T-003"):
        plans.cancel("tasks", key)
    plans.decide("tasks", "T-001", "cancel")
    export_folder(plans, "tasks", tasks)
    first, second, third = read(tasks).values()
    assert exact(first["metadata"]) == exact({"a": 1, "tsg_status": "cancelled", "b": 2})
    assert second == {
        "id": "T-002",
        "subject": "Do T-002",
        "metadata": {"tsg_status": "cancelled"},
        "status": "deleted",
    }
    assert third == {"id": "T-003", "subject": "Do T-003", "status": "deleted", "metadata": {"tsg_status": "cancelled"}}


def test_an_attempt_that_is_over_is_folded_before_its_step_is_written(
    plans: Plans, clock: FakeClock, tmp_path: Path
) -> None:
    plans.create("p", timeout_seconds=10)
    plans.add_step("p", subject="One")
    plans.start("p", "T-001", agent="ada")
    export_folder(plans, "p", tmp_path)
    assert read(tmp_path)["T-001.json"]["status"] == "in_progress"
    clock.advance(11)
    export_folder(plans, "p", tmp_path)
    assert read(tmp_path)["T-001.json"]["status"] == "pending"


def test_metadata_that_would_make_a_file_that_cannot_be_read_is_refused(plans: Plans, tmp_path: Path) -> None:
    plans.create("p")
    deep: dict[str, Any] = {}
    for _ in range(98):
        deep = {"a": deep}
    for metadata in ({"tsg_status": "splendid", "a": 1}, {"a": deep}):
        with pytest.raises(InvalidInput):
            plans.add_step("p", subject="One", metadata=metadata)
    plans.add_step("p", subject="One", metadata=deep)
    export_folder(plans, "p", tmp_path / "out")
    assert import_folder(plans, tmp_path / "out", name="q")["notes"] == []
    assert plans.get("q", "T-001")["metadata"] == deep


def test_completed_steps_unblock_what_waits_for_them(plans: Plans, tasks: Path) -> None:
    write(
        tasks,
        _1={"status": "completed"},
        _2={"status": "completed", "blocks": ["T-004"]},
        _3={"blockedBy": ["T-001", "T-002"]},
        _4={"blockedBy": ["T-003"]},
        _5={"blockedBy": ["T-006"]},
        _6={"status": "deleted"},
        _7={"blockedBy": ["T-008"]},
        _8={"status": "deleted", "metadata": {"tsg_status": "cancelled"}},
    )
    answer = import_folder(plans, tasks)
    assert answer["plan"]["ready"] == 2
    assert [step["id"] for step in plans.advance("tasks")] == ["T-003", "T-005"]
    assert plans.get("tasks", "T-004")["waitingFor"] == ["T-003"]
    assert plans.get("tasks", "T-007")["waitingFor"] == ["T-008"]
    assert healthy(plans)
    plans.start("tasks", "T-003", agent="ada")
    assert plans.complete("tasks", "T-003").get("unblocked") == ["T-004"]
    assert healthy(plans)


@pytest.mark.parametrize(
    ("statuses", "plan", "root"),
    [
        (["completed", "completed"], "completed", "succeeded"),
        (["completed", "deleted"], "completed", "succeeded"),
        (["completed", "pending"], "running", "queued"),
        (["pending", "in_progress"], "pending", "queued"),
        (["deleted", "deleted"], "pending", "queued"),
    ],
)
def test_the_plan_and_its_root_follow_from_the_steps(
    plans: Plans, ledger: Ledger, tasks: Path, statuses: list[str], plan: str, root: str
) -> None:
    write(tasks, _1={"status": statuses[0]}, _2={"status": statuses[1]})
    view = import_folder(plans, tasks)["plan"]
    assert (view["status"], ledger.get_task(view["root"]).status) == (plan, root)
    assert (view["closed_at"] is None) == (plan != "completed")
    assert healthy(plans)


# -- what has changed ------------------------------------------------------------------------------------


def test_only_what_has_changed_is_written_and_only_into_its_file(plans: Plans, tasks: Path) -> None:
    write(
        tasks,
        _1={"blocks": ["T-002"], "mine": [1]},
        _2={"owner": "ada"},
        _3={"metadata": {"n": 1}, "description": "as it is"},
    )
    import_folder(plans, tasks)
    # The first time puts all into our form, the next finds nothing to do.
    export_folder(plans, "tasks", tasks)
    before = snapshot(tasks)
    export_folder(plans, "tasks", tasks)
    assert snapshot(tasks) == before
    plans.update("tasks", "T-003", metadata={"n": True}, subject="Do it well", description=None)
    export_folder(plans, "tasks", tasks)
    after = snapshot(tasks)
    assert [name for name in before if before[name] != after[name]] == ["T-003.json"]
    assert exact(read(tasks)["T-003.json"]) == exact(
        {"id": "T-003", "subject": "Do it well", "metadata": {"n": True}, "description": None}
    )


def test_a_link_that_came_later_is_written_on_both_sides_and_one_that_went_on_neither(
    plans: Plans, tasks: Path
) -> None:
    write(tasks, _1={"blocks": ["T-003"]}, _2={"blocks": []}, _3={}, _4={"blockedBy": ["T-001"]})
    import_folder(plans, tasks)
    plans.update("tasks", "T-003", add_blocked_by=["T-002"])
    plans.update("tasks", "T-004", blocked_by=[])
    key = plans.add_step("tasks", subject="More", blocked_by=["T-004"], blocks=["T-009"])["id"]
    export_folder(plans, "tasks", tasks)
    found = read(tasks)
    assert {name: (said.get("blockedBy"), said.get("blocks")) for name, said in found.items()} == {
        # T-001 still says of T-003 what it said; of T-004 it never did.
        "T-001.json": (None, ["T-003"]),
        "T-002.json": (None, ["T-003"]),
        "T-003.json": (["T-001", "T-002"], None),
        "T-004.json": ([], [key]),
        "T-005.json": (["T-004"], ["T-009"]),
    }
    import_folder(plans, tasks, name="again")
    assert by_key(plans, "again", "blockedBy") == by_key(plans, "tasks", "blockedBy")
    assert by_key(plans, "again", "blocks") == by_key(plans, "tasks", "blocks")


def test_a_step_that_is_deleted_later_is_waited_for_no_more_in_the_files_too(plans: Plans, tasks: Path) -> None:
    write(tasks, _1={"blocks": ["T-002"]}, _2={}, _3={"blockedBy": ["T-001"]})
    import_folder(plans, tasks)
    plans.delete("tasks", "T-001")
    export_folder(plans, "tasks", tasks)
    found = read(tasks)
    assert (found["T-001.json"]["status"], found["T-001.json"]["blocks"]) == ("deleted", [])
    assert found["T-003.json"]["blockedBy"] == []
    import_folder(plans, tasks, name="again")
    assert [step["id"] for step in plans.advance("again")] == ["T-002", "T-003"]


def test_what_a_step_is_to_block_that_is_yet_to_come_waits_once_it_is_there(plans: Plans, tasks: Path) -> None:
    write(tasks, _1={"blocks": ["T-003", "T-004"]}, _2={})
    import_folder(plans, tasks)
    step = plans.add_step("tasks", subject="Three")
    assert (step["id"], step["blockedBy"]) == ("T-003", ["T-001"])
    export_folder(plans, "tasks", tasks)
    assert read(tasks)["T-001.json"]["blocks"] == ["T-003", "T-004"]
    assert read(tasks)["T-003.json"]["blockedBy"] == ["T-001"]
    assert healthy(plans)


def test_keys_are_kept_and_the_next_one_is_above_them_all(plans: Plans, tasks: Path) -> None:
    write(tasks, _7={}, _1200={}, _0={})
    import_folder(plans, tasks)
    assert [view["id"] for view in plans.steps("tasks")] == ["T-000", "T-007", "T-1200"]
    assert plans.claim("tasks", "ada") is not None
    assert plans.add_step("tasks", subject="More")["id"] == "T-1201"
    assert healthy(plans)


def test_no_session_is_given_the_name_of_one_that_was(plans: Plans, tasks: Path) -> None:
    write(
        tasks,
        _1={"session_id": "hermes-2", "status": "completed"},
        _2={"session_id": "hermes-11", "status": "deleted"},
        _3={"session_id": "deep-thought-4", "session_resume": "ada-7"},
        _4={"session_id": "no number", "session_resume": "hermes-2"},
        _5={"session_id": "hermes-99999999999999999999"},
        _6={"session_id": " x-3"},
    )
    import_folder(plans, tasks)
    assert plans.get("tasks", "T-003")["session_id"] == "deep-thought-4"
    started = plans.start("tasks", "T-004", agent="hermes")
    assert (started["session_id"], started["session_resume"]) == ("hermes-12", "hermes-2")
    assert plans.start("tasks", "T-003", agent="deep-thought")["session_id"] == "deep-thought-5"
    assert plans.start("tasks", "T-005", agent="ada")["session_id"] == "ada-8"
    assert plans.start("tasks", "T-006", agent="new")["session_id"] == "new-1"
    assert healthy(plans)


# -- what is refused -------------------------------------------------------------------------------------

DEEP: Any = 0
for _ in range(100):
    DEEP = [DEEP]

DAMAGE: dict[str, bytes | dict[str, Any]] = {
    "no JSON": b'{"id": "T-002"',
    "nothing": b"",
    "two documents": b'{"id": "T-002", "subject": "x"} {}',
    "no UTF-8": b'{"id": "T-002", "subject": "\xff"}',
    "a byte order mark": b'\xef\xbb\xbf{"id": "T-002", "subject": "x"}',
    "UTF-16": '{"id": "T-002", "subject": "x"}'.encode("utf-16"),
    "no object": b'["T-002"]',
    "a name twice": b'{"id": "T-002", "subject": "x", "subject": "x"}',
    "a name twice inside": b'{"id": "T-002", "subject": "x", "metadata": {"a": 1, "a": 1}}',
    "no number": b'{"id": "T-002", "subject": "x", "other": NaN}',
    "a number without end": b'{"id": "T-002", "subject": "x", "other": 1e999}',
    "far too deep": b'{"id": "T-002", "subject": "x", "other": ' + b"[" * 100_000,
    "too deep": {"other": DEEP},
    "too large": b'{"id": "T-002", "subject": "x", "other": "' + b"x" * (16 * 2**20) + b'"}',
    "no id": {"id": None},
    "another id": {"id": "T-003"},
    "an id that is a number": {"id": 2},
    "no subject": {"subject": None},
    "an empty subject": {"subject": " "},
    "a subject that no database holds": {"subject": "\x00"},
    "an unknown status": {"status": "done"},
    "a status of ours": {"status": "partial"},
    "a status that is none": {"status": None},
    "an exact status that does not fit": {"status": "completed", "metadata": {"tsg_status": "failed"}},
    "an exact status that is not written so": {"status": "pending", "metadata": {"tsg_status": "cancelled"}},
    "an exact status of one in progress": {"status": "in_progress", "metadata": {"tsg_status": "partial"}},
    "an exact status that nobody has": {"status": "pending", "metadata": {"tsg_status": "tired"}},
    "an exact status that is null": {"status": "pending", "metadata": {"tsg_status": None}},
    "metadata that is a list": {"metadata": []},
    "params that are text": {"params": "x"},
    "blockers that are text": {"blockedBy": "T-001"},
    "blockers that are null": {"blockedBy": None},
    "a blocker that is a number": {"blockedBy": [1]},
    "a blocker without a file": {"blockedBy": ["T-005"]},
    "one to block that has no file and none to come": {"blocks": ["T-003"]},
    "one to block that no step is ever called": {"blocks": ["T-0009"]},
    "an owner that is no name": {"owner": "a\nb"},
    "an owner that is a number": {"owner": 1},
    "a timeout that is text": {"timeout_ms": "180000"},
    "a timeout that is true": {"timeout_ms": True},
    "a timeout below zero": {"timeout_ms": -1},
    "a timeout as good as none": {"timeout_ms": 1e-9},
    "a policy that is null": {"retry_policy": None},
    "a policy with another backoff": {"retry_policy": {"count": 1, "backoff": "linear"}},
    "a policy with half a retry": {"retry_policy": {"count": 1.5, "backoff": "fixed"}},
    "a policy with fewer than no retries": {"retry_policy": {"count": -1, "backoff": "fixed"}},
    "a policy with what none has": {"retry_policy": {"count": 1, "backoff": "fixed", "jitter": 1}},
    "a fallback that is no name": {"fallback_agent": ""},
    "partial_ok that is a number": {"partial_ok": 1},
    "a session that is a number": {"session_id": 1},
    "an earlier session that is a list": {"session_resume": []},
    "an output that is an object": {"output": {}},
    "a thread that is a number": {"threadID": 5},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_names_itself_and_nothing_is_stored(standing: Plans, tasks: Path, damage: str) -> None:
    write(tasks, _1={}, _2={}, _4={})
    content = DAMAGE[damage]
    if isinstance(content, bytes):
        (tasks / "T-002.json").write_bytes(content)
    else:
        write(tasks, _2=content)
    before = stored(standing)
    with pytest.raises(DamagedFile, match=r"\AT-002\.json: .") as refused:
        import_folder(standing, tasks, name="damaged")
    assert refused.value.file == "T-002.json"
    assert refused.value.reason
    assert stored(standing) == before


@pytest.mark.parametrize("name", ["T-0002.json", "T-0000.json", "T-1000000000.json", "T-" + "9" * 200 + ".json"])
def test_a_number_that_no_step_gets_is_damage(standing: Plans, tasks: Path, name: str) -> None:
    write(tasks, _1={})
    (tasks / name).write_text(json.dumps({"id": name.removesuffix(".json"), "subject": "x"}))
    with pytest.raises(DamagedFile) as refused:
        import_folder(standing, tasks, name="numbers")
    assert refused.value.file == name


@pytest.mark.skipif(sys.platform == "win32", reason="needs links and pipes")
@pytest.mark.parametrize("kind", ["folder", "link", "broken link", "pipe"])
def test_what_is_no_regular_file_is_damage_when_read_and_left_alone_when_written(
    standing: Plans, tasks: Path, tmp_path: Path, kind: str
) -> None:
    write(tmp_path, _2={})
    write(tasks, _1={}, _2={})
    name = f"irregular {kind}"
    if name not in [plan["name"] for plan in standing.plans()]:
        import_folder(standing, tasks, name=name)
    standing.update(name, "T-001", subject="Changed")
    place = tasks / "T-002.json"
    place.unlink()
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(tmp_path / "T-002.json" if kind == "link" else tasks / "nowhere")
    with pytest.raises(DamagedFile, match="T-002.json: this is no regular file"):
        import_folder(standing, tasks, name="never")
    before = (tasks / "T-001.json").read_bytes()
    with pytest.raises(DamagedFile, match="T-002.json: this is no regular file"):
        export_folder(standing, name, tasks)
    assert (tasks / "T-001.json").read_bytes() == before
    assert sorted(path.name for path in tasks.iterdir()) == ["T-001.json", "T-002.json"]


@pytest.mark.parametrize(
    ("links", "cycle"),
    [
        ({"_1": {"blockedBy": ["T-001"]}}, {"T-001"}),
        ({"_1": {"blocks": ["T-001"]}}, {"T-001"}),
        ({"_1": {"blockedBy": ["T-002"]}, "_2": {"blockedBy": ["T-001"]}}, {"T-001", "T-002"}),
        # Each says only half of it.
        ({"_1": {"blockedBy": ["T-002"], "blocks": ["T-002"]}, "_2": {}}, {"T-001", "T-002"}),
        ({"_1": {"blocks": ["T-002"]}, "_2": {"blocks": ["T-003"]}, "_3": {"blocks": ["T-001"]}}, None),
        ({"_1": {"blocks": ["T-002"]}, "_2": {}, "_3": {"blockedBy": ["T-002"], "blocks": ["T-001"]}}, None),
        ({"_1": {"blockedBy": ["T-002"]}, "_2": {"blockedBy": ["T-001"], "status": "completed"}}, {"T-001", "T-002"}),
    ],
)
def test_steps_that_would_wait_for_each_other_are_named_and_nothing_is_stored(
    standing: Plans, tasks: Path, links: dict[str, Any], cycle: set[str] | None
) -> None:
    write(tasks, _9={}, **links)
    before = stored(standing)
    with pytest.raises(DependencyCycle) as refused:
        import_folder(standing, tasks, name="cycle")
    keys = refused.value.keys
    assert keys[0] == keys[-1]
    assert set(keys) == (cycle or {"T-001", "T-002", "T-003"})
    assert stored(standing) == before


def test_a_cycle_through_a_deleted_step_is_none(plans: Plans, tasks: Path, tmp_path: Path) -> None:
    write(
        tasks, _1={"blockedBy": ["T-002"]}, _2={"blockedBy": ["T-001", "T-099"], "status": "deleted", "blocks": ["x"]}
    )
    import_folder(plans, tasks)
    assert plans.get("tasks", "T-001")["ready"]
    export_folder(plans, "tasks", tmp_path / "out")
    assert same(read(tmp_path / "out"), read(tasks))


def test_a_plan_of_that_name_is_not_touched(plans: Plans, tasks: Path) -> None:
    write(tasks, _1={})
    plans.create("tasks")
    before = stored(plans)
    with pytest.raises(StateConflict, match="name"):
        import_folder(plans, tasks)
    assert stored(plans) == before
    import_folder(plans, tasks, name="others")
    assert [plan["name"] for plan in plans.plans()] == ["tasks", "others"]


@pytest.mark.parametrize("kind", ["missing", "empty", "a file", "no steps", "a number", "nothing", "NUL"])
def test_what_is_no_folder_of_steps_is_refused(standing: Plans, tasks: Path, kind: str) -> None:
    path: Any = tasks
    if kind == "missing":
        path = tasks / "missing"
    elif kind == "a file":
        path = tasks / "long-task.json"
        path.write_text("{}")
    elif kind == "no steps":
        for name in (
            "T-01.json",
            "t-001.json",
            "T-001.JSON",
            "T-001.json~",
            "xT-001.json",
            "T-001.json\n",
            "T-١٢٣.json",
        ):
            (tasks / name).write_text("{}")
    elif kind == "a number":
        path = 5
    elif kind == "nothing":
        path = ""
    elif kind == "NUL":
        path = "a\0b"
    before = stored(standing)
    with pytest.raises(InvalidInput) as refused:
        import_folder(standing, path)
    assert not isinstance(refused.value, DamagedFile)
    if kind in ("missing", "empty", "a file", "no steps"):
        assert "a folder of T-NNN.json files is expected" in str(refused.value)
    assert stored(standing) == before


def test_the_name_of_a_plan_is_the_folders_unless_it_is_given(
    plans: Plans, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tasks, _1={})
    monkeypatch.chdir(tasks)
    assert import_folder(plans, ".")["plan"]["name"] == "tasks"
    assert import_folder(plans, f"{tasks}/", name="mine")["plan"]["name"] == "mine"
    odd = tasks / "two\nlines"
    odd.mkdir()
    write(odd, _1={})
    with pytest.raises(InvalidInput, match="a plan's name"):
        import_folder(plans, odd)


def test_reading_is_undone_with_the_applications_transaction(engine: sa.Engine, tasks: Path) -> None:
    write(tasks, _1={}, _2={"blockedBy": ["T-001"]})
    with engine.connect() as connection:
        within = Plans.within(connection)
        import_folder(within, tasks)
        assert [view["id"] for view in within.steps("tasks")] == ["T-001", "T-002"]
        connection.rollback()
        assert within.plans() == []


# -- writing ---------------------------------------------------------------------------------------------


def test_a_plan_that_is_not_there_makes_no_folder(plans: Plans, tmp_path: Path) -> None:
    with pytest.raises(PlanNotFound):
        export_folder(plans, "none", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_where_a_file_stands_no_folder_is_made(standing: Plans, tasks: Path) -> None:
    write(tasks, _1={})
    if "occupied" not in [plan["name"] for plan in standing.plans()]:
        import_folder(standing, tasks, name="occupied")
    for path in (tasks / "T-001.json", tasks / "T-001.json" / "below"):
        with pytest.raises(InvalidInput):
            export_folder(standing, "occupied", path)
    assert read(tasks) == {"T-001.json": {"id": "T-001", "subject": "Do T-001"}}


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX permissions")
def test_a_file_keeps_its_permissions_and_others_keep_what_they_are(plans: Plans, tasks: Path) -> None:
    write(tasks, _1={}, _2={})
    (tasks / "T-001.json").chmod(0o600)
    (tasks / "T-009.json.orig").write_text("mine")
    import_folder(plans, tasks)
    previous = os.umask(0o027)
    try:
        plans.update("tasks", "T-001", subject="Changed")
        plans.add_step("tasks", subject="New")
        export_folder(plans, "tasks", tasks)
    finally:
        os.umask(previous)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tasks.iterdir()}
    assert (modes["T-001.json"], modes["T-003.json"]) == (0o600, 0o640)
    assert (tasks / "T-009.json.orig").read_text() == "mine"
    assert sorted(modes) == ["T-001.json", "T-002.json", "T-003.json", "T-009.json.orig"]


RENAMES = ("rename", "renameat", "renameat2")


@pytest.mark.skipif(sys.platform != "linux", reason="needs strace")
@pytest.mark.parametrize("end", ["error=ENOSPC", "signal=KILL"])
def test_a_write_that_ends_in_the_middle_leaves_every_file_whole(path: Path, tasks: Path, end: str) -> None:
    write(tasks, **{f"_{number}": {} for number in range(1, 6)})
    with Ledger(path) as ledger:
        plans = Plans(ledger)
        import_folder(plans, tasks)
        export_folder(plans, "tasks", tasks)
        old = read(tasks)
        for key in ("T-001", "T-002", "T-003", "T-004"):
            plans.update("tasks", key, subject="New")
    new = {name: said | {"subject": "New"} if name < "T-005" else said for name, said in old.items()}
    command = [sys.executable, "-m", "tsg", "--db", path, "plan", "export", "tasks", tasks]

    shutil.copytree(tasks, whole := tasks.with_name("whole"))
    free = trace([*command[:-1], whole], calls=RENAMES)
    assert (free.status, read(whole)) == (0, new)
    assert len(free.calls) == 4
    name = free.calls[0].name

    hurt = trace(command, calls=RENAMES, inject=f"{name}:{end}:when=3")
    assert hurt.status != 0
    assert len(hurt.calls) == 3
    if end == "error=ENOSPC":
        assert json.loads(hurt.stdout + hurt.stderr) == {"error": "StateConflict", "ok": False}
    found = read(tasks)
    assert [said["subject"] == "New" for said in found.values()] == [True, True, False, False, False]
    left = [entry.name for entry in tasks.iterdir() if entry.name not in old]
    assert len(left) == (end == "signal=KILL")
    # What was left behind is no step's file, and the next time does the rest.
    with Ledger(path) as ledger:
        import_folder(Plans(ledger), tasks, name="between")
        export_folder(Plans(ledger), "tasks", tasks)
    assert read(tasks) == new


# -- learnings -------------------------------------------------------------------------------------------


def test_learnings_are_written_as_markdown_in_order(plans: Plans) -> None:
    plans.create("p")
    for subject in ("One", "Two"):
        plans.add_step("p", subject=subject)
    for key, learnings in (("T-002", ["first", "several\nlines\r\n\r\n## T-009"]), ("T-001", ["# a heading", ""])):
        plans.start("p", key, agent="ada")
        plans.complete("p", key, learnings=learnings)
    assert learnings_markdown(plans.learnings("p")) == (
        "# Learnings\n\n## T-002\n\n- first\n- several\n  lines\n\n  ## T-009\n\n## T-001\n\n- # a heading\n-\n"
    )


def test_what_was_learned_stays_inside_its_item() -> None:
    texts = ("\n\n## T-666", "a\r## T-666", "```\nopen", "  \n\t- x\n\n\n- y")
    markdown = learnings_markdown([Learning(step="T-001", text=text, at=1.0) for text in texts])
    lines = markdown.splitlines()
    assert [line for line in lines if line.startswith("#")] == ["# Learnings", "## T-001"]
    assert sum(line.startswith("-") for line in lines) == len(texts)
    # An item that begins with a blank line is over there.
    assert "-\n\n" not in markdown


def test_a_plan_that_taught_nothing_has_a_heading() -> None:
    assert learnings_markdown([]) == "# Learnings\n"


def test_learnings_take_the_place_of_those_before_as_a_whole(tmp_path: Path) -> None:
    place = tmp_path / "learnings.md"
    write_learnings(place, "one, größer\n")
    assert place.read_bytes() == "one, größer\n".encode()
    opened = place.open(encoding="utf-8")
    with opened:
        write_learnings(str(place), "two\n")
        # Whoever had opened the file before has all of it.
        assert opened.read() == "one, größer\n"
    assert place.read_bytes() == b"two\n"
    before = snapshot(tmp_path)
    write_learnings(place, "two\n")
    assert snapshot(tmp_path) == before


@pytest.mark.skipif(sys.platform == "win32", reason="needs links and pipes")
def test_learnings_never_take_the_place_of_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link", "folder"):
        with pytest.raises(InvalidInput, match="no regular file"):
            write_learnings(tmp_path / name, "text")
    with pytest.raises(InvalidInput, match="no folder"):
        write_learnings(tmp_path / "missing" / "file", "text")
    with pytest.raises(InvalidInput, match="must be text"):
        write_learnings(tmp_path / "file", "\ud800")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "pipe"]


# -- any folder, and large ones --------------------------------------------------------------------------


class Folder(NamedTuple):
    """Files by their names, and how each is laid out."""

    documents: dict[str, dict[str, Any]]
    layouts: list[dict[str, Any]]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=4).filter(lambda name: name != "tsg_status"), VALUES, max_size=3)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=8).filter(
    lambda text: bool(text.strip())
)
NAMES = st.sampled_from(["ada", "Hermes", "d-2", "Ärzte"])
POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "count": st.integers(0, 5),
        "backoff": st.sampled_from(["exponential", "fixed"]),
        "base_seconds": st.none() | st.integers(0, 9) | st.floats(0, 9),
        "factor": st.floats(1, 3),
        "cap_seconds": st.integers(0, 99),
    },
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "description": st.none() | TEXTS,
    "activeForm": st.none() | TEXTS,
    "owner": st.none() | NAMES,
    "threadID": st.none() | TEXTS,
    "timeout_ms": st.none() | st.integers(0, 10**9) | st.floats(0.001, 1e9),
    "retry_policy": POLICIES,
    "fallback_agent": st.none() | NAMES,
    "partial_ok": st.booleans(),
    "session_id": st.none() | TEXTS | st.builds("{}-{}".format, NAMES, st.integers(0, 2**40)),
    "session_resume": st.none() | TEXTS | st.builds("{}-{}".format, NAMES, st.integers(0, 99)),
    "session_name": st.none() | TEXTS,
    "params": st.none() | OBJECTS,
    "output": st.none() | TEXTS,
    "error": st.none() | TEXTS,
    "x-unknown": VALUES,
    "ready": VALUES,
    "timeout_seconds": VALUES,
}
STATUSES = {
    "pending": (None, "partial", "escalated", "failed"),
    "in_progress": (None,),
    "completed": (None,),
    "deleted": (None, "cancelled"),
}


@st.composite
def folders(draw: st.DrawFn) -> Folder:
    numbers = draw(st.lists(st.integers(0, 1500), min_size=1, max_size=7, unique=True))
    keys = [f"T-{number:03d}" for number in numbers]
    documents: dict[str, dict[str, Any]] = {}
    # Only what stands before in this order is waited for, whatever the numbers are.
    for place, key in enumerate(keys):
        said = {"id": key, "subject": draw(TEXTS)} | draw(st.fixed_dictionaries({}, optional=FIELDS))
        status = draw(st.sampled_from([*STATUSES, None]))
        if status is not None:
            said["status"] = status
        if draw(st.booleans()):
            said["metadata"] = draw(st.none() | OBJECTS)
        word = draw(st.sampled_from(STATUSES[status or "pending"]))
        if word is not None:
            said["metadata"] = {**(said.get("metadata") or {}), "tsg_status": word}
        if draw(st.booleans()):
            before = st.lists(st.sampled_from(keys[:place]), max_size=4) if place else st.just([])
            said["blockedBy"] = draw(before)
        if draw(st.booleans()):
            to_come = [f"T-{max(numbers) + more:03d}" for more in (1, 5)]
            said["blocks"] = draw(st.lists(st.sampled_from([*keys[place + 1 :], *to_come]), max_size=4))
        names = draw(st.permutations(list(said)))
        documents[f"{key}.json"] = {name: said[name] for name in names}
    layout = st.fixed_dictionaries({"indent": st.sampled_from([None, 0, 2, 4]), "ensure_ascii": st.just(True)})
    return Folder(documents, draw(st.lists(layout, min_size=len(keys), max_size=len(keys))))


def put(folder: Path, given_folder: Folder) -> Path:
    folder.mkdir()
    for (name, document), layout in zip(given_folder.documents.items(), given_folder.layouts, strict=True):
        (folder / name).write_text(json.dumps(document, **layout), encoding="utf-8")
    return folder


NEW_NAME = count()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(folder=folders())
def test_any_folder_read_and_written_and_read_again_is_the_same(
    standing: Plans, tmp_path_factory: pytest.TempPathFactory, folder: Folder
) -> None:
    place = tmp_path_factory.mktemp("folders")
    first, second = (f"plan {next(NEW_NAME)}" for _ in range(2))
    given_steps = folder.documents

    notes = import_folder(standing, put(place / "given", folder), name=first)["notes"]
    assert len(notes) == sum(said.get("status") == "in_progress" for said in given_steps.values())
    export_folder(standing, first, place / "one")
    expected = {
        name: {
            field: "pending" if value == "in_progress" and field == "status" else value for field, value in said.items()
        }
        for name, said in given_steps.items()
    }
    assert same(read(place / "one"), dict(sorted(expected.items())))

    import_folder(standing, place / "one", name=second)
    assert exact(views(standing, second)) == exact(views(standing, first))
    export_folder(standing, second, place / "two")
    for name in given_steps:
        assert (place / "two" / name).read_bytes() == (place / "one" / name).read_bytes()

    # What is ready is what the files say, worked out from them alone.
    ready = {step["id"] for step in standing.advance(first)}
    assert ready == {name.removesuffix(".json") for name in given_steps if is_ready(name, given_steps)}
    assert healthy(standing)
    for name in (first, second):
        standing.remove(name)
    shutil.rmtree(place)


def is_ready(name: str, documents: dict[str, dict[str, Any]]) -> bool:
    key = name.removesuffix(".json")

    def word(said: dict[str, Any]) -> str:
        exact_word = (said.get("metadata") or {}).get("tsg_status")
        return str(exact_word or said.get("status", "pending"))

    def waits_for(other: dict[str, Any]) -> bool:
        return other["id"] in documents[name].get("blockedBy", []) or key in other.get("blocks", [])

    open_ones = [said for said in documents.values() if word(said) not in ("completed", "deleted") and waits_for(said)]
    return word(documents[name]) in ("pending", "in_progress") and not open_ones


def test_a_long_chain_is_read_and_written(path: Path, tasks: Path, tmp_path: Path) -> None:
    number = 5_000
    order = list(range(1, number + 1))
    random.Random(0).shuffle(order)
    keys = [f"T-{place:03d}" for place in order]
    for place, key in enumerate(keys):
        said: dict[str, Any] = {"id": key, "subject": "Do it", "status": "completed" if place < 10 else "pending"}
        # Now one of the two says so, now the other.
        if place and place % 2:
            said["blockedBy"] = [keys[place - 1]]
        elif place + 1 < number:
            said["blocks"] = []
        if place % 2 and place + 1 < number:
            said["blocks"] = [keys[place + 1]]
        (tasks / f"{key}.json").write_text(json.dumps(said))
    with Ledger(path) as ledger:
        plans = Plans(ledger)
        assert import_folder(plans, tasks)["plan"]["steps"]["pending"] == number - 10
        assert [step["id"] for step in plans.advance("tasks")] == [keys[10]]
        assert healthy(plans)
        assert export_folder(plans, "tasks", tmp_path / "out")["files"] == number
        assert read(tmp_path / "out") == read(tasks)

        # The last of all waits for the first: one side of it is enough.
        said = json.loads((tasks / f"{keys[0]}.json").read_bytes()) | {"blockedBy": [keys[-1]]}
        (tasks / f"{keys[0]}.json").write_text(json.dumps(said))
        with pytest.raises(DependencyCycle) as refused:
            import_folder(plans, tasks, name="cycle")
        assert len(refused.value.keys) == number + 1
