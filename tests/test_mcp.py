"""A plan as an agent's tools: the official client speaks with the real command over pipes, on either database."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, MCPError, StdioServerParameters, stdio_client, types

from tests.conftest import database, tsg
from tsg import InvalidInput, Ledger, Plans
from tsg.cli import app, main
from tsg.plan import tables
from tsg.tables import tasks

TOOLS = ["TaskCreate", "TaskUpdate", "TaskList", "TaskGet", "Claim", "Start", "Heartbeat", "Complete", "Fail"]
FIELDS = {
    "subject",
    "description",
    "activeForm",
    "blockedBy",
    "blocks",
    "owner",
    "metadata",
    "timeout_ms",
    "retry_policy",
    "fallback_agent",
    "partial_ok",
    "threadID",
    "session_resume",
    "params",
}
AT_ONCE = {"count": 3, "backoff": "fixed", "base_seconds": 0}
MARK = "S3CRET/mark"


class Place(NamedTuple):
    """A database, as the command takes it, and as this process sees it."""

    db: str
    ledger: Ledger
    plans: Plans


class Agent:
    """An agent's session: a server of its own, and the client that started it."""

    def __init__(self, portal: BlockingPortal, client: Client) -> None:
        self._portal = portal
        self.client = client

    def send(self, tool: str, /, **arguments: object) -> Future[types.CallToolResult]:
        """A call that is not waited for."""
        return self._portal.start_task_soon(self.client.call_tool, tool, arguments)

    def call(self, tool: str, /, **arguments: object) -> dict[str, Any]:
        return answered(self.send(tool, **arguments))

    def refused(self, tool: str, /, **arguments: object) -> str:
        result = self.send(tool, **arguments).result(60)
        assert result.is_error, result
        assert result.structured_content is None
        return text_of(result)

    def tools(self) -> list[types.Tool]:
        return self._portal.call(self.client.list_tools).tools

    def step(self, **fields: object) -> str:
        """The id of a new step, which is this test's alone: nobody else claims it."""
        made = self.call("TaskCreate", **{"subject": "Do it", "owner": f"nobody-{uuid.uuid4()}", **fields})
        return str(made["id"])


def answered(sent: Future[types.CallToolResult]) -> dict[str, Any]:
    result = sent.result(60)
    assert not result.is_error, result
    assert result.structured_content is not None
    # For clients that know only text.
    assert json.loads(text_of(result)) == result.structured_content
    return result.structured_content


def text_of(result: types.CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, types.TextContent)
    return content.text


def stored(place: Place) -> list[Any]:
    """Every row that a call could change."""
    kept = (tables.plans, tables.steps, tables.dependencies, tables.expected, tables.attempts, tables.learnings, tasks)
    queries = [sa.select(table).order_by(*table.primary_key) for table in kept]
    return place.ledger.read(lambda connection, _: [tuple(connection.execute(query)) for query in queries])


def command(db: str, plan: str, *more: str) -> list[str]:
    return ["-m", "tsg", "--db", db, "mcp", "--plan", plan, *more]


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as opened:
        yield opened


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One database for all tests of this module, on either kind."""
    if request.param == "sqlite":
        folder = tmp_path_factory.mktemp("plans")
        folder.chmod(0o700)
        with Ledger(folder / "ledger.sqlite") as ledger:
            yield Place(str(folder / "ledger.sqlite"), ledger, Plans(ledger))
        return
    server: sa.URL = request.getfixturevalue("postgresql_server")
    template: str = request.getfixturevalue("postgresql_template")
    with database(server, f"tsg_{uuid.uuid4().hex}", template=template) as url, Ledger(url) as ledger:
        yield Place(url.render_as_string(hide_password=False), ledger, Plans(ledger))


Serve = Callable[..., AbstractContextManager[Agent]]


@pytest.fixture(scope="module")
def serve(portal: BlockingPortal, place: Place, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts the command as an agent's client does; at the end nothing may have been written to stderr."""
    folder = tmp_path_factory.mktemp("stderr")

    @contextmanager
    def started(plan: str, *more: str, program: str = sys.executable, before: tuple[str, ...] = ()) -> Iterator[Agent]:
        arguments = [*before, *command(place.db, plan, *more)]
        server = StdioServerParameters(command=program, args=arguments)
        with (folder / f"{uuid.uuid4()}").open("w+") as errors:
            client = Client(stdio_client(server, errlog=errors), read_timeout_seconds=60)
            with portal.wrap_async_context_manager(client):
                yield Agent(portal, client)
            errors.seek(0)
            assert errors.read() == ""

    return started


@pytest.fixture(scope="module")
def shared(place: Place) -> str:
    """A plan that many tests work on, each with steps of its own."""
    # No step runs out of time unless its test says so.
    return place.plans.create("shared", timeout_seconds=None)["name"]


@pytest.fixture(scope="module")
def hermes(serve: Serve, shared: str) -> Iterator[Agent]:
    """A session that was started for an agent."""
    with serve(shared, "--agent", "Hermes") as agent:
        yield agent


@pytest.fixture(scope="module")
def anyone(serve: Serve, shared: str) -> Iterator[Agent]:
    """A session that was started for nobody in particular."""
    with serve(shared) as agent:
        yield agent


# -- what there is ---------------------------------------------------------------------------------------


def test_every_tool_says_when_to_use_it_and_what_each_of_its_fields_is_for(hermes: Agent) -> None:
    tools = {tool.name: tool for tool in hermes.tools()}

    assert list(tools) == TOOLS
    for tool in tools.values():
        assert tool.description is not None
        assert len(tool.description) > 80
        assert tool.input_schema["type"] == "object"
        assert tool.input_schema["additionalProperties"] is False
        for schema in tool.input_schema["properties"].values():
            assert schema["description"]
            assert "default" not in schema
            assert "title" not in schema
    assert hermes.client.instructions is not None
    assert "Claim" in hermes.client.instructions


def test_the_fields_are_those_of_the_document(hermes: Agent) -> None:
    schemas = {tool.name: tool.input_schema for tool in hermes.tools()}
    fields = {name: set(schema["properties"]) for name, schema in schemas.items()}
    required = {name: schema.get("required", []) for name, schema in schemas.items()}

    assert fields == {
        "TaskCreate": FIELDS,
        "TaskUpdate": FIELDS | {"id", "status", "addBlocks", "addBlockedBy"},
        "TaskList": {"all", "status", "owner", "ready"},
        "TaskGet": {"id"},
        "Claim": {"agent"},
        "Start": {"id", "agent", "attempt"},
        "Heartbeat": {"id", "attempt", "output"},
        "Complete": {"id", "attempt", "learnings", "output"},
        "Fail": {"id", "attempt", "error"},
    }
    assert required.pop("TaskCreate") == ["subject"]
    assert required.pop("TaskList") == required.pop("Claim") == []
    assert all(names == ["id"] for names in required.values())
    assert schemas["TaskUpdate"]["properties"]["status"]["enum"] == ["in_progress", "completed", "deleted"]


def test_the_documents_whole_workflow_is_done_by_tools_alone(serve: Serve, place: Place) -> None:
    place.plans.create("Add Product Reviews")
    with serve("Add Product Reviews", "--agent", "Aphrodite") as agent:
        work = [
            ("Create reviews schema", "Demeter", []),
            ("Implement POST /reviews", "Hermes", ["T-001"]),
            ("Implement GET /reviews", "Hermes", ["T-001"]),
            ("Build ReviewCard component", "Aphrodite", ["T-001"]),
            ("Integration tests", "Hermes", ["T-002", "T-003", "T-004"]),
        ]
        made = [
            agent.call("TaskCreate", subject=subject, owner=owner, blockedBy=blockers)
            for subject, owner, blockers in work
        ]
        assert [step["id"] for step in made] == ["T-001", "T-002", "T-003", "T-004", "T-005"]
        assert agent.call("TaskList") == {
            "steps": [
                {
                    "id": f"T-00{number}",
                    "status": "pending",
                    "subject": subject,
                    "owner": owner,
                    "blockedBy": blockers,
                    "ready": number == 1,
                    "waitingFor": blockers,
                }
                for number, (subject, owner, blockers) in enumerate(work, start=1)
            ]
        }

        # Only T-001 may run, and that by Demeter alone.
        nothing = agent.call("Claim", agent="Hermes")
        assert nothing["step"] is None
        assert "other agents" in nothing["reason"]
        first = agent.call("Claim", agent="Demeter")["step"]
        assert (first["id"], first["status"], first["session_id"]) == ("T-001", "in_progress", "Demeter-1")
        nothing = agent.call("Claim", agent="Hermes")
        assert nothing["step"] is None
        assert nothing["reason"].startswith("nothing is ready now")
        done = agent.call("Complete", id="T-001", learnings=["Ratings are whole numbers"], output="schema.sql")
        assert done["status"] == "completed"
        assert done["output"] == "schema.sql"
        assert done["unblocked"] == ["T-002", "T-003", "T-004"]

        # The three run in parallel, each with what was learned.
        second = agent.call("Claim", agent="Hermes")["step"]
        third = agent.call("Claim", agent="Hermes")["step"]
        assert (second["id"], third["id"], third["session_id"]) == ("T-002", "T-003", "Hermes-2")
        assert second["learnings"] == third["learnings"] == ["Ratings are whole numbers"]
        fourth = agent.call("TaskUpdate", id="T-004", status="in_progress", activeForm="Building ReviewCard component")
        assert fourth["status"] == "in_progress"
        assert fourth["activeForm"] == "Building ReviewCard component"
        assert (fourth["session_id"], fourth["learnings"]) == ("Aphrodite-1", ["Ratings are whole numbers"])
        assert [step["status"] for step in agent.call("TaskList")["steps"]] == ["in_progress"] * 3 + ["pending"]

        assert "unblocked" not in agent.call("Complete", id="T-003", learnings=["GET needs paging"])
        assert agent.call("Heartbeat", id="T-002", output="half of it")["output"] == "half of it"
        assert "unblocked" not in agent.call("Complete", id="T-002", learnings=["POST needs a token"])
        assert agent.call("TaskGet", id="T-005")["waitingFor"] == ["T-004"]
        assert agent.call("TaskUpdate", id="T-004", status="completed")["unblocked"] == ["T-005"]

        last = agent.call("Start", id="T-005", agent="Hermes")
        assert last["learnings"] == ["Ratings are whole numbers", "GET needs paging", "POST needs a token"]
        assert agent.call("Complete", id="T-005")["status"] == "completed"
        assert agent.call("TaskList") == {"steps": []}
        assert {step["status"] for step in agent.call("TaskList", all=True)["steps"]} == {"completed"}
        assert agent.call("Claim") == {"step": None, "reason": "the plan is completed; there is nothing left to do"}
        assert agent.refused("TaskCreate", subject="One more").startswith("StateConflict: the plan is closed")
        assert place.plans.show("Add Product Reviews")["status"] == "completed"

        # The feature is merged.
        place.plans.remove("Add Product Reviews")
        for tool, arguments in (("TaskList", {}), ("Claim", {}), ("Complete", {"id": "T-001"})):
            assert agent.refused(tool, **arguments).startswith("PlanNotFound: ")


def test_a_step_is_made_with_all_that_was_said_and_shown_in_full(hermes: Agent) -> None:
    blocker = hermes.step()
    said = {
        "subject": "Build frontend",
        "description": "Implement ReviewCard component with mocked data",
        "activeForm": "Building ReviewCard component",
        "blockedBy": [blocker],
        "blocks": ["T-900"],
        "owner": "Aphrodite",
        "metadata": {"ticket": [1, {"deep": None}]},
        "timeout_ms": 180000,
        "retry_policy": {"count": 3, "backoff": "exponential", "factor": 2},
        "fallback_agent": "talos",
        "partial_ok": True,
        "threadID": "session-abc",
        "session_resume": "hermes-1",
        "params": {"url": "https://example.org/ä"},
    }
    assert set(said) == FIELDS

    made = hermes.call("TaskCreate", **said)

    assert {field: made[field] for field in said} == said
    assert hermes.call("TaskGet", id=made["id"]) == made
    worked_out = {"status": "pending", "ready": False, "waitingFor": [blocker], "attempts": 0, "attempt": None}
    assert {field: made[field] for field in worked_out} == worked_out

    changed = {**said, "subject": "Build it", "blockedBy": [], "blocks": [], "timeout_ms": None, "metadata": {}}
    updated = hermes.call("TaskUpdate", id=made["id"], **changed)
    assert {field: updated[field] for field in changed} == changed
    # What is left out stays.
    assert hermes.call("TaskUpdate", id=made["id"]) == updated
    assert hermes.call("TaskUpdate", id=made["id"], owner=None) == {**updated, "owner": None, "ready": True}
    hermes.call("TaskUpdate", id=made["id"], owner="Aphrodite")


def test_text_stays_text_whatever_it_looks_like(hermes: Agent) -> None:
    key = hermes.step(description='{"a": 1}', owner="Hermes", subject="null", metadata={"as": "[1]"})

    hermes.call("Start", id=key)
    hermes.call("Heartbeat", id=key, output="null")
    assert hermes.call("TaskGet", id=key)["output"] == "null"
    hermes.call("Complete", id=key, output="[1, 2]", learnings=['["not a list"]'])

    seen = hermes.call("TaskGet", id=key)
    kept = {field: seen[field] for field in ("subject", "description", "output", "learnings", "metadata")}
    assert kept == {
        "subject": "null",
        "description": '{"a": 1}',
        "output": "[1, 2]",
        "learnings": ['["not a list"]'],
        "metadata": {"as": "[1]"},
    }


def test_a_list_or_an_object_that_a_model_wrote_as_text_is_taken_for_what_it_is(hermes: Agent) -> None:
    blocker = hermes.step()

    made = hermes.call(
        "TaskCreate",
        subject="Quoted",
        owner="nobody",
        blockedBy=json.dumps([blocker]),
        metadata='{"a": 1}',
        retry_policy='{"count": 1, "backoff": "fixed"}',
    )

    assert (made["blockedBy"], made["metadata"]) == ([blocker], {"a": 1})
    assert made["retry_policy"] == {"count": 1, "backoff": "fixed"}


def test_a_list_shows_what_is_asked_for(hermes: Agent) -> None:
    owner = f"lister-{uuid.uuid4()}"
    first = hermes.step(owner=owner)
    second = hermes.step(owner=owner, blockedBy=[first])
    gone = hermes.step(owner=owner)
    hermes.call("TaskUpdate", id=gone, status="deleted")

    def listed(**asked: object) -> list[str]:
        return [step["id"] for step in hermes.call("TaskList", owner=owner, **asked)["steps"]]

    assert listed() == [first, second]
    assert listed(all=True) == [first, second, gone]
    assert listed(ready=True) == [first]
    assert listed(ready=False) == [second]
    assert listed(status="deleted") == [gone]
    assert listed(status="in_progress") == []
    assert {first, second} <= {step["id"] for step in hermes.call("TaskList")["steps"]}


def test_the_thread_is_the_sessions_where_the_agent_names_none(hermes: Agent, anyone: Agent) -> None:
    threads = [
        agent.call("TaskGet", id=agent.step(**said))["threadID"]
        for agent, said in ((hermes, {}), (hermes, {"threadID": None}), (anyone, {}), (hermes, {"threadID": "mine"}))
    ]

    assert threads[0] == threads[1] != threads[2]
    assert all(str(uuid.UUID(thread)) == thread for thread in threads[:3])
    assert threads[3] == "mine"


def test_changing_a_step_leaves_its_thread_alone(hermes: Agent, anyone: Agent) -> None:
    key = hermes.step()
    thread = hermes.call("TaskGet", id=key)["threadID"]

    assert anyone.call("TaskUpdate", id=key, subject="Other")["threadID"] == thread
    assert anyone.call("TaskUpdate", id=key, threadID="other")["threadID"] == "other"


def test_steps_of_one_session_are_numbered_in_the_order_in_which_they_were_asked_for(hermes: Agent) -> None:
    sent = [hermes.send("TaskCreate", subject=f"Number {number}", owner="nobody") for number in range(20)]

    made = [answered(one) for one in sent]

    assert [step["subject"] for step in made] == [f"Number {number}" for number in range(20)]
    keys = [int(step["id"].removeprefix("T-")) for step in made]
    assert keys == list(range(keys[0], keys[0] + 20))


# -- what is refused -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(hermes: Agent) -> dict[str, str]:
    """Steps to be refused something: one, one that waits for it, and one that is done."""
    one = hermes.step()
    waiting = hermes.step(blockedBy=[one])
    done = hermes.step(owner="Hermes")
    hermes.call("Start", id=done)
    hermes.call("Complete", id=done)
    return {"one": one, "waiting": waiting, "done": done}


NO_STEP = "StepNotFound: the plan has no step with this key; "
REFUSALS: dict[str, tuple[str, dict[str, object], str]] = {
    "an unknown tool": ("Nope", {}, "InvalidInput: there is no such tool; there are TaskCreate, "),
    "no subject": ("TaskCreate", {}, "InvalidInput: subject: Field required"),
    "an empty subject": ("TaskCreate", {"subject": " "}, "InvalidInput: a subject must say something"),
    "a name in Python's form": (
        "TaskCreate",
        {"subject": "s", "active_form": "x"},
        "InvalidInput: active_form: Extra inputs are not permitted",
    ),
    "a field of no tool, and a number as text": (
        "TaskCreate",
        {"subject": "s", "colour": "x", "timeout_ms": "1"},
        "InvalidInput: timeout_ms: Input should be a valid number; colour: Extra inputs are not permitted",
    ),
    "a field that can't be set": (
        "TaskUpdate",
        {"id": "{one}", "attempt": "x"},
        "InvalidInput: attempt: Extra inputs are not permitted",
    ),
    "a negative timeout": (
        "TaskCreate",
        {"subject": "s", "timeout_ms": -1},
        "InvalidInput: timeout_ms: Input should be greater than or equal to 0",
    ),
    "no list of keys": (
        "TaskCreate",
        {"subject": "s", "blockedBy": "{one}"},
        "InvalidInput: blockedBy: Input should be a valid list",
    ),
    "a policy with something else": (
        "TaskCreate",
        {"subject": "s", "retry_policy": {"often": 1}},
        "InvalidInput: a retry policy has a count and a backoff",
    ),
    "a malformed owner": ("TaskUpdate", {"id": "{one}", "owner": ""}, "InvalidInput: an agent's name must be"),
    "a blocker that is not there": (
        "TaskCreate",
        {"subject": "s", "blockedBy": ["T-999"]},
        "StepNotFound: the plan has no such step to wait for",
    ),
    "itself": (
        "TaskUpdate",
        {"id": "{one}", "addBlockedBy": ["{one}"]},
        "DependencyCycle: these steps would wait for each other: {one} -> {one}",
    ),
    "a cycle": (
        "TaskUpdate",
        {"id": "{one}", "addBlockedBy": ["{waiting}"], "subject": "changed"},
        "DependencyCycle: these steps would wait for each other: ",
    ),
    "more to wait for where it is done": (
        "TaskUpdate",
        {"id": "{done}", "addBlockedBy": ["{one}"]},
        "StateConflict: {done} runs or has ended",
    ),
    "to be pending": ("TaskUpdate", {"id": "{one}", "status": "pending"}, "InvalidInput: a step goes back to pending"),
    "to be failed": ("TaskUpdate", {"id": "{one}", "status": "failed"}, "InvalidInput: Fail reports a failure"),
    "to be partial": ("TaskUpdate", {"id": "{one}", "status": "partial"}, "InvalidInput: a step becomes partial"),
    "to be escalated": ("TaskUpdate", {"id": "{one}", "status": "escalated"}, "InvalidInput: a step is escalated"),
    "to be cancelled": ("TaskUpdate", {"id": "{one}", "status": "cancelled"}, "InvalidInput: a step is cancelled by"),
    "to be anything else": ("TaskUpdate", {"id": "{one}", "status": ""}, "InvalidInput: there is no such status; "),
    "no step of that key to change": ("TaskUpdate", {"id": "T-999", "subject": "s"}, NO_STEP),
    "no step of that key to show": ("TaskGet", {"id": "T-999"}, NO_STEP),
    "no step of that key to start": ("Start", {"id": "T-999"}, NO_STEP),
    "no step of that key to vouch for": ("Heartbeat", {"id": "T-999"}, NO_STEP),
    "no step of that key to complete": ("Complete", {"id": "T-999"}, NO_STEP),
    "no step of that key to fail": ("Fail", {"id": "T-999"}, NO_STEP),
    "no key": ("TaskGet", {"id": "a b"}, "InvalidInput: a step's key is made of"),
    "a list by a status that is none": ("TaskList", {"status": "ready"}, "InvalidInput: a status must be one of: "),
    "another agent's step": ("Start", {"id": "{one}"}, "StateConflict: {one} is another agent's"),
    "a step that waits": ("Start", {"id": "{waiting}"}, "StateConflict: {waiting} waits for other steps"),
    "a step that is done": ("Start", {"id": "{done}"}, "StateConflict: {done} is completed already"),
    "to be begun while it waits": (
        "TaskUpdate",
        {"id": "{waiting}", "status": "in_progress"},
        "StateConflict: {waiting} waits for other steps",
    ),
    "to be taken out once done": (
        "TaskUpdate",
        {"id": "{done}", "status": "deleted"},
        "StateConflict: {done} is completed already, and that stays",
    ),
    "to vouch for what nobody has begun": (
        "Heartbeat",
        {"id": "{one}"},
        "StateConflict: this attempt of {one} is over",
    ),
    "to complete what nobody has begun": ("Complete", {"id": "{one}"}, "StateConflict: {one} is not in progress"),
    "to fail what nobody has begun": ("Fail", {"id": "{one}"}, "StateConflict: {one} is not in progress"),
    "to fail what is done": ("Fail", {"id": "{done}"}, "StateConflict: this attempt is over and has ended otherwise"),
    "a token that is none": ("Complete", {"id": "{one}", "attempt": "x"}, "InvalidInput: "),
    "a token of nothing": ("Complete", {"id": "{one}", "attempt": str(uuid.UUID(int=4 << 76 | 8 << 60))}, ""),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_says_why_and_stores_nothing(
    hermes: Agent, place: Place, keys: dict[str, str], name: str
) -> None:
    tool, arguments, reason = REFUSALS[name]

    def filled(value: Any) -> Any:
        if isinstance(value, str):
            return value.format(**keys) if "{" in value else value
        return [filled(member) for member in value] if isinstance(value, list) else value

    before = stored(place)

    refused = hermes.refused(tool, **{field: filled(value) for field, value in arguments.items()})

    assert refused.startswith(filled(reason))
    assert ": " in refused
    assert refused.split(": ")[0] in {
        "InvalidInput",
        "StateConflict",
        "StepNotFound",
        "DependencyCycle",
        "TaskNotFound",
    }
    assert stored(place) == before


def test_an_agent_that_claims_has_to_say_who_it_is(anyone: Agent) -> None:
    assert anyone.refused("Claim") == (
        "InvalidInput: say who claims: give your name as agent, or start the server with --agent"
    )


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("TaskCreate", {"subject": "s", "timeout_ms": MARK, "metadata": MARK, "blockedBy": MARK, "partial_ok": MARK}),
        ("TaskCreate", {"subject": "s", "retry_policy": {"count": MARK, "backoff": MARK}}),
        ("TaskCreate", {"subject": "s", "retry_policy": {MARK: 1}}),
        ("TaskCreate", {"subject": "s", "owner": f"{MARK}\n"}),
        ("TaskCreate", {"subject": "s", "blockedBy": [MARK]}),
        ("TaskUpdate", {"id": MARK, "status": MARK}),
        ("TaskList", {"status": MARK}),
        ("Complete", {"id": MARK, "attempt": MARK}),
    ],
)
def test_no_refusal_repeats_a_value(anyone: Agent, tool: str, arguments: dict[str, object]) -> None:
    assert MARK not in anyone.refused(tool, **arguments)


def test_what_nobody_expected_is_told_without_its_text(hermes: Agent, place: Place) -> None:
    """What breaks under the server is the database's or ours; an agent can do nothing about either."""
    key = hermes.step()

    def damage(text: str) -> None:
        statement = sa.update(tables.steps).where(tables.steps.c.key == key).values(metadata=text)
        place.ledger.write(lambda connection, _: connection.execute(statement))

    damage(MARK)
    assert hermes.refused("TaskGet", id=key) == "InternalError"
    damage("{}")
    assert hermes.call("TaskGet", id=key)["metadata"] == {}


# -- fields and a status at once -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "status"),
    [("one", "completed"), ("one", "pending"), ("one", "in_progress"), ("waiting", "in_progress"), ("done", "deleted")],
)
def test_where_the_status_is_refused_no_field_is_stored(
    hermes: Agent, place: Place, keys: dict[str, str], key: str, status: str
) -> None:
    before = stored(place)

    hermes.refused("TaskUpdate", id=keys[key], status=status, subject="changed", metadata={"changed": True})

    assert stored(place) == before


def test_where_a_field_is_refused_the_status_stays(hermes: Agent) -> None:
    key = hermes.step(owner="Hermes")

    assert hermes.refused("TaskUpdate", id=key, status="in_progress", addBlockedBy=["T-999"]).startswith("StepNotFound")
    assert hermes.call("TaskGet", id=key)["attempts"] == 0
    hermes.call("Start", id=key)
    assert hermes.refused("TaskUpdate", id=key, status="completed", owner="Other").startswith("StateConflict")
    assert hermes.refused("TaskUpdate", id=key, status="deleted", subject=" ").startswith("InvalidInput")
    assert hermes.call("TaskGet", id=key)["status"] == "in_progress"


def test_fields_and_a_status_are_stored_together(hermes: Agent, anyone: Agent) -> None:
    blocker, key = hermes.step(owner="Hermes"), hermes.step()
    waiting = hermes.step(blockedBy=[blocker])

    begun = hermes.call("TaskUpdate", id=key, status="in_progress", owner="Hermes", activeForm="Doing it")
    assert (begun["status"], begun["owner"], begun["activeForm"]) == ("in_progress", "Hermes", "Doing it")
    assert begun["session_id"].startswith("Hermes-")
    ended = hermes.call("TaskUpdate", id=key, status="completed", description="Was easy")
    assert (ended["status"], ended["description"]) == ("completed", "Was easy")
    assert hermes.call("TaskUpdate", id=key, status="completed") == ended
    gone = hermes.call("TaskUpdate", id=blocker, status="deleted", description="Not needed")
    assert (gone["status"], gone["description"]) == ("deleted", "Not needed")
    assert gone["unblocked"] == [waiting]
    assert waiting in gone["notes"][0]
    assert hermes.call("TaskGet", id=waiting)["ready"] is True
    # The owner does it where the session is nobody's.
    other = anyone.step()
    assert anyone.call("TaskUpdate", id=other, status="in_progress", owner="Talos")["session_id"].startswith("Talos-")


# -- time ------------------------------------------------------------------------------------------------


def started(agent: Agent, milliseconds: int = 50, /, **fields: object) -> tuple[str, str]:
    """A step that the session has begun, whose time is over by now; and the token."""
    key = agent.step(timeout_ms=milliseconds, owner="Hermes", **{"retry_policy": AT_ONCE, **fields})
    token = agent.call("Start", id=key)["attempt"]
    time.sleep(milliseconds / 1000 + 0.02)
    return key, token


@pytest.mark.parametrize("tool", TOOLS)
def test_every_call_lets_a_dead_agents_step_go_on(
    hermes: Agent, anyone: Agent, place: Place, shared: str, keys: dict[str, str], tool: str
) -> None:
    mine = anyone.step(owner="Talos")
    anyone.call("Start", id=mine)
    arguments: dict[str, dict[str, object]] = {
        "TaskCreate": {"subject": "s", "owner": "nobody"},
        "TaskUpdate": {"id": keys["one"], "subject": "Do it"},
        "TaskList": {"owner": "nobody"},
        "TaskGet": {"id": keys["one"]},
        "Claim": {"agent": "idle"},
        "Start": {"id": anyone.step(owner="Talos")},
        "Heartbeat": {"id": mine},
        "Complete": {"id": mine},
        "Fail": {"id": mine},
    }
    key, _ = started(hermes)
    assert place.plans.get(shared, key)["status"] == "in_progress"

    anyone.call(tool, **arguments[tool])

    step = place.plans.get(shared, key)
    assert (step["status"], step["ready"], step["error"]) == ("pending", True, "timeout")


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("TaskCreate", {"subject": "s", "blockedBy": ["T-999"]}),
        ("TaskUpdate", {"id": "T-999"}),
        ("TaskGet", {"id": "T-999"}),
        ("Start", {"id": "T-999"}),
        ("Heartbeat", {"id": "T-999"}),
        ("Complete", {"id": "T-999"}),
        ("Fail", {"id": "T-999"}),
    ],
)
def test_a_call_that_is_refused_lets_it_go_on_too(
    hermes: Agent, anyone: Agent, place: Place, shared: str, tool: str, arguments: dict[str, object]
) -> None:
    key, _ = started(hermes)

    anyone.refused(tool, **arguments)

    assert place.plans.get(shared, key)["status"] == "pending"


def test_starting_a_dead_agents_step_until_its_retry_is_due_gets_it_in_the_end(hermes: Agent) -> None:
    """A start that is refused must not put the retry off."""
    key, _ = started(hermes, retry_policy={"count": 1, "backoff": "fixed", "base_seconds": 0.6})

    assert hermes.refused("Start", id=key).startswith(f"StateConflict: {key} waits for its retry")
    time.sleep(0.65)
    assert hermes.call("Start", id=key)["attempts"] == 2


@pytest.mark.parametrize("by", ["Complete", "TaskUpdate", "TaskUpdate with a field", "Fail"])
def test_a_report_after_the_deadline_holds_where_nobody_has_timed_it_out(hermes: Agent, by: str) -> None:
    key, _ = started(hermes, retry_policy={"count": 0, "backoff": "fixed"})

    if by == "Fail":
        step = hermes.call("Fail", id=key, error="it broke")
        assert (step["status"], step["error"]) == ("escalated", "it broke")
    elif by == "Complete":
        assert hermes.call("Complete", id=key)["status"] == "completed"
    else:
        more = {"description": "late"} if by != "TaskUpdate" else {}
        assert hermes.call("TaskUpdate", id=key, status="completed", **more)["status"] == "completed"


def test_a_heartbeat_after_the_deadline_keeps_the_output_and_says_to_stop(hermes: Agent) -> None:
    key, _ = started(hermes, partial_ok=True)

    assert hermes.refused("Heartbeat", id=key, output="half").startswith("StateConflict: the time of this attempt of ")
    step = hermes.call("TaskGet", id=key)
    assert (step["status"], step["output"]) == ("partial", "half")
    for status in ("completed", "in_progress"):
        assert hermes.refused("TaskUpdate", id=key, status=status).startswith("StateConflict")
    assert hermes.refused("Start", id=key).startswith(f"StateConflict: {key} waits for a decision")
    assert hermes.call("TaskGet", id=key) == step


def test_a_late_report_does_not_touch_the_attempt_of_somebody_else(hermes: Agent, anyone: Agent) -> None:
    key, first = started(hermes)
    other = f"other-{uuid.uuid4()}"
    anyone.call("TaskUpdate", id=key, owner=other, timeout_ms=60_000)
    taken = anyone.call("Claim", agent=other)["step"]
    assert (taken["id"], taken["attempts"]) == (key, 2)
    assert taken["attempt"] != first

    # It has started one itself, and means that.
    assert hermes.refused("Heartbeat", id=key, output="stale").startswith("StateConflict")
    assert hermes.refused("Complete", id=key, output="stale").startswith("StateConflict")
    assert hermes.refused("Fail", id=key).startswith("StateConflict")
    assert hermes.refused("TaskUpdate", id=key, status="completed", subject="stale").startswith("StateConflict")
    assert anyone.call("TaskGet", id=key) == taken
    # With the token of the other one, that is meant.
    assert hermes.call("Heartbeat", id=key, attempt=taken["attempt"], output="fresh")["output"] == "fresh"
    assert anyone.call("Complete", id=key)["status"] == "completed"
    assert hermes.refused("Complete", id=key).startswith("StateConflict")
    assert hermes.call("Complete", id=key, attempt=taken["attempt"])["status"] == "completed"


def test_who_has_started_nothing_means_the_current_attempt(hermes: Agent, anyone: Agent) -> None:
    key = hermes.step(owner="Hermes")
    hermes.call("Start", id=key)

    assert anyone.call("Heartbeat", id=key, output="seen")["output"] == "seen"
    assert anyone.call("Complete", id=key, learnings=["by hand"])["learnings"] == ["by hand"]
    # The same report once more, by whoever.
    assert hermes.call("Complete", id=key)["status"] == "completed"


def test_a_failure_is_tried_again_as_the_policy_says(hermes: Agent) -> None:
    key = hermes.step(
        owner="Hermes", retry_policy={"count": 1, "backoff": "fixed", "base_seconds": 0}, fallback_agent="talos"
    )

    for _ in range(2):
        hermes.call("Start", id=key)
        failed = hermes.call("Fail", id=key, error="no route")
        assert (failed["status"], failed["error"]) == ("pending", "no route")
        assert hermes.call("Fail", id=key, error="no route")["attempts"] == failed["attempts"]
    assert failed["owner"] == "talos"
    for _ in range(2):
        hermes.call("Start", id=key, agent="talos")
        failed = hermes.call("Fail", id=key)
    assert failed["status"] == "escalated"


def test_a_session_that_is_not_there_is_cleared_and_said_so(hermes: Agent) -> None:
    key = hermes.step(owner="Hermes", session_resume="nobody-9")

    begun = hermes.call("Start", id=key)

    assert begun["session_resume"] is None
    assert "session_resume" in begun["notes"][0]
    again = hermes.step(owner="Hermes", session_resume=begun["session_id"])
    assert hermes.call("Start", id=again)["session_resume"] == begun["session_id"]


# -- several at once -------------------------------------------------------------------------------------


def test_two_agents_that_claim_at_once_never_get_the_same_step(hermes: Agent, anyone: Agent) -> None:
    made = {hermes.step(owner=None) for _ in range(30)}
    first, second = f"first-{uuid.uuid4()}", f"second-{uuid.uuid4()}"
    got: dict[str, list[str]] = {first: [], second: []}

    while True:
        # Three each, all sent before any is waited for.
        sent = [
            (name, agent.send("Claim", agent=name))
            for _ in range(3)
            for name, agent in ((first, hermes), (second, anyone))
        ]
        claimed = [(name, answered(one)["step"]) for name, one in sent]
        for name, step in claimed:
            if step is not None:
                assert step["owner"] == name
                got[name].append(step["id"])
        if not any(step for _, step in claimed):
            break

    assert sorted([*got[first], *got[second]]) == sorted(made)
    assert all(got.values())


def test_two_agents_that_add_blockers_at_once_lose_nothing(hermes: Agent, anyone: Agent) -> None:
    blockers = [hermes.step() for _ in range(12)]
    key, first = hermes.step(), hermes.step()

    sent = [
        agent.send("TaskUpdate", id=key, addBlockedBy=[blocker])
        if number % 3
        else agent.send("TaskUpdate", id=blocker, addBlocks=[key, first])
        for number, blocker in enumerate(blockers)
        for agent in (hermes, anyone)
    ]
    for one in sent:
        answered(one)

    step = hermes.call("TaskGet", id=key)
    assert sorted(step["blockedBy"]) == sorted(step["waitingFor"]) == sorted(blockers)
    assert sorted(hermes.call("TaskGet", id=first)["blockedBy"]) == sorted(blockers[::3])


def test_a_server_that_is_killed_and_started_again_loses_nothing(
    serve: Serve, place: Place, folder: Path, portal: BlockingPortal
) -> None:
    name = place.plans.create("killed")["name"]
    pid = folder / "pid"
    # The shell leaves its number, and becomes the server.
    before = ("-c", 'echo $$ > "$0"; exec "$@"', str(pid), sys.executable)
    with serve(name, "--agent", "Hermes", program="/bin/sh", before=before) as agent:
        agent.call("TaskCreate", subject="Held")
        held = agent.call("Claim")["step"]
        sent = [agent.send("TaskCreate", subject=f"Number {number}") for number in range(200)]
        answers = [answered(one)["id"] for one in sent[:5]]
        os.kill(int(pid.read_text()), signal.SIGKILL)
        for one in sent[5:]:
            try:
                answers.append(answered(one)["id"])
            except MCPError:
                break
    # It was killed while there was work left.
    assert 5 <= len(answers) < 200

    with serve(name, "--agent", "Hermes") as agent:
        steps = agent.call("TaskList")["steps"]
        # All that was answered, and of what was not as much as was stored by then: nothing left out in between.
        assert [held["id"], *answers] == [step["id"] for step in steps[: len(answers) + 1]]
        assert [step["subject"] for step in steps[1:]] == [f"Number {number}" for number in range(len(steps) - 1)]
        assert len(steps) < 201
        assert agent.call("TaskGet", id=held["id"]) == held
        assert agent.call("Heartbeat", id=held["id"], output="still here")["attempt"] == held["attempt"]
        assert agent.call("Complete", id=held["id"], learnings=["all is there"])["status"] == "completed"


def test_afterwards_the_history_is_consistent(hermes: Agent, place: Place) -> None:
    """After all that the tests above have done to one database."""
    hermes.call("TaskList")
    report = place.plans.doctor()

    assert report["plan_inconsistency_count"] == 0
    assert report["healthy"]


# -- the command -----------------------------------------------------------------------------------------


def test_a_plan_that_is_not_there_ends_the_command_at_its_start(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--db", place.db, "mcp", "--plan", "nowhere"])

    assert left.value.code == 2
    assert capfd.readouterr() == ('{"error":"PlanNotFound","ok":false}\n', "")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["mcp", "--plan", "p"], id="no database"),
        pytest.param(["--db", "{file}", "mcp"], id="no plan"),
        pytest.param(["--db", "{file}", "mcp", "--plan", "p\n"], id="a malformed plan"),
        pytest.param(["--db", "{file}", "mcp", "--plan", "p", "--agent", ""], id="a malformed agent"),
        pytest.param(["--db", "{file}.not", "mcp", "--plan", "p"], id="no ledger"),
    ],
)
def test_what_is_wrong_at_the_start_ends_it_like_any_command(
    arguments: list[str], path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Ledger(path) as ledger:
        Plans(ledger).create("p")

    with pytest.raises(SystemExit) as left:
        main([argument.format(file=path) for argument in arguments])

    assert left.value.code == 2
    assert capfd.readouterr() == ('{"error":"InvalidInput","ok":false}\n', "")
    assert [entry.name for entry in path.parent.iterdir() if "not" in entry.name] == []


def test_without_the_extra_it_says_which(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mcp.py").write_text("raise ModuleNotFoundError('no', name='mcp')")
    without = {"PYTHONPATH": str(tmp_path)}

    done = tsg("--db", path, "mcp", "--plan", "p", env=without)
    assert (done.returncode, done.stdout, done.stderr) == (2, b'{"error":"InvalidInput","ok":false}\n', b"")
    # All else works, its own help too.
    shown = tsg("mcp", "--help", env=without)
    assert shown.returncode == 0
    assert b"--plan NAME" in shown.stdout

    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, "tsg.mcp", raising=False)
    with pytest.raises(InvalidInput, match=r"'tsg-ledger\[mcp\]'"):
        app.main(["--db", str(path), "mcp", "--plan", "p"], standalone_mode=False)


INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "by hand", "version": "1"},
    },
}


@contextmanager
def by_hand(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with Ledger(path) as ledger:
        Plans(ledger).create("p")
    started = subprocess.Popen(
        [sys.executable, *command(str(path), "p")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with started as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[bytes], message: object) -> dict[str, Any]:
    """The answer to a message; what is no JSON would fail here."""
    assert process.stdin is not None
    assert process.stdout is not None
    line = message if isinstance(message, bytes) else json.dumps(message).encode()
    process.stdin.write(line + b"\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def test_nothing_but_the_protocol_is_on_stdout_and_it_ends_with_stdin(path: Path) -> None:
    with by_hand(path) as process:
        assert process.stdin is not None
        assert said(process, INITIALIZE)["result"]["serverInfo"]["name"] == "tsg"
        process.stdin.write(b'no JSON at all\n{"jsonrpc":"2.0","method":"notifications/initialized"}\n')
        for number, (name, arguments) in enumerate(
            [
                ("TaskCreate", {"subject": "s"}),
                ("Claim", {}),
                ("Nope", {}),
                ("Claim", {"agent": "a"}),
                ("TaskList", {}),
            ],
            start=2,
        ):
            call = {"method": "tools/call", "params": {"name": name, "arguments": arguments}}
            answer = said(process, {"jsonrpc": "2.0", "id": number, **call})
            assert (answer["jsonrpc"], answer["id"]) == ("2.0", number)
            assert answer["result"].get("isError", False) is (number in (3, 4))

        rest, errors = process.communicate(timeout=30)

        assert (process.returncode, rest, errors) == (0, b"", b"")


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_an_interrupt_ends_it_at_once(path: Path) -> None:
    with by_hand(path) as process:
        said(process, INITIALIZE)

        process.send_signal(signal.SIGINT)

        assert process.wait(10) == -signal.SIGINT
        assert process.stdout is not None
        assert process.stdout.read() == b""
        assert process.stderr is not None
        assert process.stderr.read() == b""


# -- the plan's page -------------------------------------------------------------------------------------


def test_what_a_tool_changes_is_on_the_plans_page(serve: Serve, place: Place, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    name = place.plans.create(f"shown {uuid.uuid4()}", cockpit=page)["name"]
    with serve(name) as agent:
        key = agent.step(subject="Be seen", owner="Hermes")
        assert "Be seen" in page.read_text()
        agent.call("Complete", id=key, attempt=agent.call("Start", id=key, agent="Hermes")["attempt"])
    assert "1 of 1 step done" in page.read_text()
