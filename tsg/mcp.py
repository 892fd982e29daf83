"""A plan as tools of the Model Context Protocol, over stdin and stdout, so that an agent can work on it.

Names and fields are those of the document that the plan layer comes from. Each tool calls one method of
:class:`tsg.Plans`; none keeps anything that a restart of the server could lose.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

import anyio
from anyio import CapacityLimiter, to_thread
from mcp import types
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

import tsg
from tsg.errors import InvalidInput, LedgerError, StateConflict
from tsg.ledger import Ledger
from tsg.plan import fields
from tsg.plan.reading import StepView
from tsg.plan.scheduling import CLOSED_PLANS, Backoff, StepStatus
from tsg.plan.store import Plans

__all__ = ["serve", "server_of"]

_INSTRUCTIONS: Final = """\
One plan of steps that wait for each other, kept in a database, so that several agents can work on it at once.
To work: Claim gives you the next step that is ready, already started, with what the steps before it have taught
(learnings); or Start a certain one. Do what its subject and description say. Heartbeat from time to time if that takes
long. Then Complete it, with learnings for those who come after you, or Fail it and say why; whether it is tried again
is not yours to decide. Claim again until nothing is left.
To plan: TaskCreate adds steps, with what each waits for; TaskUpdate changes them; TaskList and TaskGet show them."""


def serve(server: Server[Any]) -> None:
    """Serve over stdin and stdout, which are the protocol's alone meanwhile, until the client closes them."""

    async def run() -> None:
        async with stdio_server() as (received, sent):
            await server.run(received, sent, server.create_initialization_options())

    anyio.run(run)


def server_of(
    ledger: Ledger,
    plan: str,
    *,
    agent: str | None = None,
    on_change: Callable[[Plans, str], object] | None = None,
) -> Server[Any]:
    """A server of one client's session, whose tools work on the plan.

    Args:
        agent: who works through it, where a call names nobody.
        on_change: see :class:`tsg.Plans`.

    Raises:
        InvalidInput: no ledger, or no name of an agent.
        PlanNotFound: there is no such plan.
        StateConflict: the database refuses.
    """
    session = _Session(ledger, plan, agent, on_change)
    # One at a time, in the order in which they came: keys follow the order in which steps were created.
    one = CapacityLimiter(1)

    async def list_tools(
        context: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_described(name, tool) for name, tool in _TOOLS.items()])

    async def call_tool(
        context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        try:
            found = await to_thread.run_sync(_call, session, params.name, params.arguments or {}, limiter=one)
        except LedgerError as error:
            # Messages of ours carry no values, and say what to do next.
            return _refusal(f"{type(error).__name__}: {error}")
        except Exception:
            return _refusal("InternalError")
        written = json.dumps(found, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return types.CallToolResult(content=[types.TextContent(text=written)], structured_content=dict(found))

    return Server(
        "tsg",
        version=tsg.__version__,
        title="tsg: a plan's steps",
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


# -- what the tools take ---------------------------------------------------------------------------------


def _list_or_object(value: object) -> object:
    """Some models write a list or an object as text; no text is meant where one of these is."""
    if isinstance(value, str):
        with suppress(InvalidInput):
            return fields.parsed(value)
    return value


_Unquoted: Final = BeforeValidator(_list_or_object)
_Keys = Annotated[list[str], _Unquoted]
_Object = Annotated[dict[str, Any], _Unquoted]
#: What is in it is judged where all policies are.
_Policy = Annotated[
    dict[str, Any],
    _Unquoted,
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "count": {"type": "integer", "minimum": 0, "description": "Retries beyond the first try."},
                "backoff": {"enum": [backoff.value for backoff in Backoff]},
                "base_seconds": {"type": "number", "minimum": 0, "description": "The first delay."},
                "factor": {"type": "number", "minimum": 1, "description": "What each delay is the last one times."},
                "cap_seconds": {"type": "number", "minimum": 0, "description": "The longest delay."},
            },
            "additionalProperties": False,
        }
    ),
]


class _Arguments(BaseModel):
    """What a tool takes: no other fields, and no values of another kind."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        alias_generator=lambda field: fields.JSON_NAMES.get(field, field),
    )

    def given(self) -> dict[str, Any]:
        """What was said, by its names in Python."""
        return fields.from_json(self.model_dump(by_alias=True, exclude_unset=True))


_Id = Annotated[str, Field(description='The step\'s id, such as "T-001".')]
_Attempt = Annotated[
    str | None,
    Field(
        description="The token of the attempt, which the step's `attempt` was when it was started. Left out: the one "
        "that you started in this session, else the current one."
    ),
]
_Agent = Annotated[
    str | None, Field(description="Your name as an agent. Left out: the one the server was started with.")
]
_Output = Annotated[str | None, Field(description="What came of it so far, or where that is.")]
_Learnings = Annotated[
    list[str],
    _Unquoted,
    Field(description="What those should know who do the steps that depend on this one; each a sentence or two."),
]


class _Step(_Arguments):
    description: Annotated[str | None, Field(description="All that somebody needs to know to do it.")] = None
    active_form: Annotated[str | None, Field(description='The subject while it is done, such as "Running tests".')] = (
        None
    )
    blocked_by: Annotated[_Keys, Field(description="The ids of the steps that must be completed first.")] = []
    blocks: Annotated[
        _Keys, Field(description="The ids of the steps that wait for this one; an id yet to come will.")
    ] = []
    owner: Annotated[str | None, Field(description="The agent that is to do it; null: whoever claims it.")] = None
    metadata: Annotated[_Object, Field(description="Whatever you want to keep with it.")] = {}
    timeout_ms: Annotated[
        float | None, Field(ge=0, description="From the start of a try to its time-out; 0 or null: none.")
    ] = None
    retry_policy: Annotated[_Policy, Field(description="How often, and after which delay, it is tried again.")] = {}
    fallback_agent: Annotated[str | None, Field(description="Who tries when all retries have failed.")] = None
    partial_ok: Annotated[bool, Field(description="Whether what a timed-out try has left may be enough.")] = False
    thread_id: Annotated[str | None, Field(description="The conversation that it belongs to.")] = None
    session_resume: Annotated[str | None, Field(description="An earlier session_id to go on from.")] = None
    params: Annotated[_Object, Field(description="Input for whoever does it.")] = {}


class _TaskCreate(_Step):
    subject: Annotated[str, Field(description='What is to be done, as an imperative, such as "Run tests".')]


class _TaskUpdate(_Step):
    id: _Id
    subject: Annotated[str, Field(description='What is to be done, as an imperative, such as "Run tests".')] = ""
    add_blocked_by: Annotated[
        _Keys, Field(description="More ids of steps that must be completed first. Rather than blockedBy: it only adds.")
    ] = []
    add_blocks: Annotated[
        _Keys, Field(description="More ids of steps that wait for this one. Rather than blocks: it only adds.")
    ] = []
    status: Annotated[
        str,
        Field(
            description="in_progress starts it, completed completes it, deleted takes it out of the plan.",
            # Others are refused too, but with a reason.
            json_schema_extra={"enum": ["in_progress", "completed", "deleted"]},
        ),
    ] = ""


class _TaskList(_Arguments):
    all: Annotated[bool, Field(description="Also those that are completed, cancelled or deleted.")] = False
    status: Annotated[
        str | None,
        Field(
            description="Only those of this status.",
            json_schema_extra={"enum": [*(status.value for status in StepStatus), None]},
        ),
    ] = None
    owner: Annotated[str | None, Field(description="Only those of this agent.")] = None
    ready: Annotated[
        bool | None, Field(description="Only those that may be started now, or only those that may not.")
    ] = None


class _TaskGet(_Arguments):
    id: _Id


class _Claim(_Arguments):
    agent: _Agent = None


class _Start(_Arguments):
    id: _Id
    agent: _Agent = None
    attempt: Annotated[str | None, Field(description="The token that you were asked with, if you were.")] = None


class _Heartbeat(_Arguments):
    id: _Id
    attempt: _Attempt = None
    output: _Output = None


class _Complete(_Arguments):
    id: _Id
    attempt: _Attempt = None
    learnings: _Learnings = []
    output: _Output = None


class _Fail(_Arguments):
    id: _Id
    attempt: _Attempt = None
    error: Annotated[str | None, Field(description="What went wrong.")] = None


# -- what they do ----------------------------------------------------------------------------------------

#: What a list shows of a step.
_SHOWN: Final = ("id", "status", "subject", "owner", "blockedBy", "ready", "waitingFor")

#: Why a status can't be given by hand.
_NOT_GIVEN: Final = MappingProxyType(
    {
        StepStatus.PENDING: "a step goes back to pending by itself, where it is tried again; Fail reports a failure",
        StepStatus.FAILED: "Fail reports a failure, and the step's retry policy says what comes of it",
        StepStatus.PARTIAL: "a step becomes partial by itself, where its time runs out and it has left output",
        StepStatus.ESCALATED: "a step is escalated by itself, where its tries are used up",
        StepStatus.CANCELLED: "a step is cancelled by whoever runs the plan (tsg step cancel); deleted takes it out",
    }
)


class _Session:
    """What one client does to a plan: every call advances the plan first, so that no dead agent's step hangs.

    A report comes before that, since a success is one as long as nobody has timed it out.
    """

    def __init__(
        self, ledger: Ledger, plan: str, agent: str | None, on_change: Callable[[Plans, str], object] | None
    ) -> None:
        self._plans = Plans(ledger, on_change=on_change)
        self._ledger = ledger
        self._plan = plan
        self._agent = None if agent is None else fields.agent(agent)
        self._thread = str(uuid.uuid4())
        # The attempts that were started here, by step: a late report is for the one that it is about.
        self._started: dict[str, str] = {}
        self._advance()

    def create(self, asked: _TaskCreate) -> StepView:
        self._advance()
        given = asked.given()
        if given.get("thread_id") is None:
            given["thread_id"] = self._thread
        return self._plans.add_step(self._plan, **given)

    def update(self, asked: _TaskUpdate) -> StepView:
        given = asked.given()
        key, status = given.pop("id"), given.pop("status", None)
        if status is None:
            self._advance()
            return self._plans.update(self._plan, key, **given)
        if status == StepStatus.COMPLETED:
            token = self._started.get(key)
            return self._reported(
                lambda: self._together(key, given, lambda plans: plans.complete(self._plan, key, attempt=token))
            )
        if status == StepStatus.IN_PROGRESS:
            self._advance()
            return self._mine(self._together(key, given, lambda plans: plans.start(self._plan, key, agent=self._agent)))
        if status == StepStatus.DELETED:
            self._advance()
            return self._together(key, given, lambda plans: plans.delete(self._plan, key))
        raise InvalidInput(
            _NOT_GIVEN.get(status, "there is no such status; in_progress, completed and deleted can be given")
        )

    def list(self, asked: _TaskList) -> dict[str, object]:
        # These advance the plan themselves, and so does a claim.
        found = self._plans.steps(self._plan, **asked.given())
        return {"steps": [{name: value for name, value in step.items() if name in _SHOWN} for step in found]}

    def get(self, asked: _TaskGet) -> StepView:
        self._advance()
        return self._plans.get(self._plan, asked.id)

    def claim(self, asked: _Claim) -> dict[str, object]:
        agent = self._agent if asked.agent is None else asked.agent
        if agent is None:
            raise InvalidInput("say who claims: give your name as agent, or start the server with --agent")
        step = self._plans.claim(self._plan, agent)
        return {"step": None, "reason": self._why_nothing()} if step is None else {"step": self._mine(step)}

    def start(self, asked: _Start) -> StepView:
        self._advance()
        agent = self._agent if asked.agent is None else asked.agent
        return self._mine(self._plans.start(self._plan, asked.id, agent=agent, attempt=asked.attempt))

    def heartbeat(self, asked: _Heartbeat) -> StepView:
        token = self._token(asked.id, asked.attempt)
        beaten = self._reported(
            lambda: self._plans.heartbeat_step(self._plan, asked.id, attempt=token, output=asked.output)
        )
        now = self._plans.get(self._plan, asked.id)
        if now["attempt"] != beaten["attempt"]:
            raise StateConflict(f"the time of this attempt of {now['id']} is over; stop, and leave it to the next one")
        return now

    def complete(self, asked: _Complete) -> StepView:
        token = self._token(asked.id, asked.attempt)
        return self._reported(
            lambda: self._plans.complete(
                self._plan, asked.id, attempt=token, learnings=asked.learnings, output=asked.output
            )
        )

    def fail(self, asked: _Fail) -> StepView:
        token = self._token(asked.id, asked.attempt)
        return self._reported(lambda: self._plans.fail(self._plan, asked.id, attempt=token, error=asked.error))

    # -- inside ----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        # In a transaction of its own, which stays where what comes after it is refused.
        self._plans.show(self._plan)

    def _reported(self, report: Callable[[], StepView]) -> StepView:
        try:
            return report()
        finally:
            # What is due stays due; the report has been answered, one way or the other.
            with suppress(LedgerError):
                self._advance()

    def _together(self, key: str, given: Mapping[str, Any], act: Callable[[Plans], StepView]) -> StepView:
        """Change a step's fields and do something to it, or neither."""
        if not given:
            return act(self._plans)

        def both(plans: Plans) -> StepView:
            plans.update(self._plan, key, **given)
            return act(plans)

        return self._ledger.write(lambda connection, clock: both(Plans.within(connection, clock=clock)))

    def _mine(self, step: StepView) -> StepView:
        assert step["attempt"] is not None
        self._started[step["id"]] = step["attempt"]
        return step

    def _token(self, key: str, given: str | None) -> str | None:
        return self._started.get(key) if given is None else given

    def _why_nothing(self) -> str:
        plan = self._plans.show(self._plan)
        if plan["status"] in CLOSED_PLANS:
            return f"the plan is {plan['status']}; there is nothing left to do"
        if plan["ready"]:
            return "what is ready is for other agents; ask again later"
        return "nothing is ready now; TaskList says what each step waits for; ask again later"


class _Tool(NamedTuple):
    takes: type[_Arguments]
    do: Callable[[_Session, Any], Mapping[str, object]]
    description: str
    annotations: types.ToolAnnotations


_LOOKS: Final = types.ToolAnnotations(read_only_hint=True, open_world_hint=False)
_ADDS: Final = types.ToolAnnotations(destructive_hint=False, open_world_hint=False)
_REPEATS: Final = types.ToolAnnotations(destructive_hint=False, idempotent_hint=True, open_world_hint=False)
_CHANGES: Final = types.ToolAnnotations(destructive_hint=True, open_world_hint=False)

_TOOLS: Final[Mapping[str, _Tool]] = MappingProxyType(
    {
        "TaskCreate": _Tool(
            _TaskCreate,
            _Session.create,
            "Add a step to the plan. Use it to split work into steps; name in blockedBy what must be done first, so "
            "that all else can run at once. Answers with the step, and its id.",
            _ADDS,
        ),
        "TaskUpdate": _Tool(
            _TaskUpdate,
            _Session.update,
            "Change a step: its fields, what it waits for, or its status: in_progress before you begin with it, "
            "completed when it is done, deleted when it is not needed any more. All that a call asks for is done, or "
            "nothing. Fields left out stay as they are.",
            _CHANGES,
        ),
        "TaskList": _Tool(
            _TaskList,
            _Session.list,
            "List the steps that are not done yet, in order of creation: who has which, which are ready, and what the "
            "others wait for. Use it to see where the plan stands.",
            _LOOKS,
        ),
        "TaskGet": _Tool(
            _TaskGet,
            _Session.get,
            "Show all of one step: its description, parameters, output, error and learnings. Use it before you begin.",
            _LOOKS,
        ),
        "Claim": _Tool(
            _Claim,
            _Session.claim,
            "Take the next step that is ready and yours or nobody's. It is started then, and nobody else gets it. Use "
            "it whenever you have nothing to do. `learnings` are what the steps that it depends on have taught. Where "
            "nothing is ready, step is null and reason says why.",
            _ADDS,
        ),
        "Start": _Tool(
            _Start,
            _Session.start,
            "Begin with a certain step that is ready; its time runs from now. Refused where somebody else has it. Use "
            "it instead of Claim when you were told which step to do.",
            _ADDS,
        ),
        "Heartbeat": _Tool(
            _Heartbeat,
            _Session.heartbeat,
            "Say that you are still at work on a step, and keep the output that there is so far. Use it every few "
            "minutes once you have begun to. Refused where your attempt is over: stop then.",
            _REPEATS,
        ),
        "Complete": _Tool(
            _Complete,
            _Session.complete,
            "Report that a step is done, with what came of it and what others should know. Steps that waited for it "
            "become ready; `unblocked` names them. The same report once more changes nothing.",
            _REPEATS,
        ),
        "Fail": _Tool(
            _Fail,
            _Session.fail,
            "Report that you could not do a step, and why. It is tried again after a while, given to another agent, or "
            "escalated, as its retry policy says; the answer shows which. The same report once more changes nothing.",
            _REPEATS,
        ),
    }
)


def _call(session: _Session, name: str, arguments: Mapping[str, object]) -> Mapping[str, object]:
    tool = _TOOLS.get(name)
    if tool is None:
        raise InvalidInput(f"there is no such tool; there are {', '.join(_TOOLS)}")
    try:
        asked = tool.takes.model_validate(arguments)
    except ValidationError as error:
        raise InvalidInput(_faults(error)) from None
    return tool.do(session, asked)


def _faults(error: ValidationError) -> str:
    """What is wrong with the arguments, field by field, without any value."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in found)


def _refusal(message: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=message)], is_error=True)


class _Schema(GenerateJsonSchema):
    """Without titles, which repeat the names, and defaults, which some clients would send."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _described(name: str, tool: _Tool) -> types.Tool:
    schema = tool.takes.model_json_schema(schema_generator=_Schema)
    schema = {part: value for part, value in schema.items() if part not in ("title", "description")}
    return types.Tool(name=name, description=tool.description, input_schema=schema, annotations=tool.annotations)
