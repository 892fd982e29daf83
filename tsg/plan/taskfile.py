"""What the file of a long task says: its form, judged, and as the columns of a plan and of its steps. No database here.

The form's words for a status are four; where a plan or a step here has another one, the file has the nearest, and the
exact one in its metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from tsg import values
from tsg.errors import InvalidInput
from tsg.plan import fields, scheduling
from tsg.plan.scheduling import AT_REST, PlanStatus, StepStatus

__all__ = [
    "DOING",
    "EXACT_OF_STEP",
    "FAILED",
    "STEP_COLUMNS",
    "TASK_COLUMNS",
    "TIMES",
    "WORD_OF_STEP",
    "Step",
    "Task",
    "counted",
    "is_blank",
    "is_number",
    "task_from",
]

#: Ids that a step may get by its number; above the last of them there is none.
_COUNTED: Final = re.compile(r"[1-9][0-9]{0,8}\Z")
_LAST_NUMBER: Final = 999_999_999
#: Counts go up here, and have to fit where they are kept.
_MOST: Final = 1_000_000_000

DOING: Final = "doing"
FAILED: Final = "failed"
#: The words for a step, and what each makes of one that nobody is at work on.
_STEP_WORDS: Final[Mapping[str, StepStatus]] = MappingProxyType(
    {
        "pending": StepStatus.PENDING,
        DOING: StepStatus.PENDING,
        "done": StepStatus.COMPLETED,
        FAILED: StepStatus.FAILED,
    }
)
#: The word for a step of ours. Any other status is ``failed``; the exact one, where that is not it, is in the metadata.
WORD_OF_STEP: Final[Mapping[StepStatus, str]] = MappingProxyType(
    {StepStatus.PENDING: "pending", StepStatus.IN_PROGRESS: DOING, StepStatus.COMPLETED: "done"}
)
EXACT_OF_STEP: Final = (StepStatus.PARTIAL, StepStatus.ESCALATED, StepStatus.CANCELLED)
_TASK_WORDS: Final[Mapping[str, tuple[PlanStatus, ...]]] = MappingProxyType(
    {
        # A task that goes on is pending whatever was done of it, and one that nobody has begun may be running.
        "pending": (PlanStatus.PENDING, PlanStatus.RUNNING),
        "running": (PlanStatus.PENDING, PlanStatus.RUNNING),
        "completed": (PlanStatus.COMPLETED,),
        FAILED: (PlanStatus.FAILED,),
    }
)

#: The fields that are a column's, of a task and of a step; a step's last two are not of the form, but ours.
TASK_COLUMNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "description": "description",
        "agent_id": "agent",
        "session_name": "session_name",
        "timeout_minutes": "timeout_seconds",
        "max_retry": "retries",
        "global_retry": "global_retry",
    }
)
STEP_COLUMNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "name": "subject",
        "agent_id": "owner",
        "session_name": "session_name",
        "retry_count": "failures",
        "output_path": "output",
        "error": "error",
        "params": "params",
        "description": "description",
        "metadata": "metadata",
    }
)
TIMES: Final = ("created_at", "started_at", "completed_at", "updated_at", "failed_at")
#: What a file tells that no column has, and that has to be text where it is there.
_TASK_TEXTS: Final = ("task_type", "error")
_STEP_TEXTS: Final = ("result", "processed_by")

_Status = TypeVar("_Status", StepStatus, PlanStatus)


class Step(NamedTuple):
    """A step as its file has it.

    Attributes:
        status: what it is here, where nobody is at work on it.
        columns: all that a row has of what the file says of this step, or does not say.
    """

    key: str
    document: dict[str, Any]
    status: StepStatus
    columns: dict[str, Any]


class Task(NamedTuple):
    """A long task as its file has it.

    Attributes:
        document: all but its steps.
        columns: of the plan, and of how it is run.
        settings: those columns of a step that are the task's.
        steps: by their keys, in order.
        status: of the plan, as it follows from the steps.
        word: what the file calls it, the exact word where it has one.
        fits: whether that is so.
    """

    document: dict[str, Any]
    columns: dict[str, Any]
    settings: dict[str, Any]
    steps: dict[str, Step]
    status: PlanStatus
    word: str
    fits: bool


def task_from(document: Mapping[str, Any]) -> Task:
    """What a file says.

    Raises:
        InvalidInput: it can't be so.
    """
    members = document.get("steps")
    if not isinstance(members, list):
        raise InvalidInput("its steps must be a list")
    found: dict[str, Step] = {}
    for place, member in enumerate(members, 1):
        step = _step(place, member)
        if step.key in found:
            raise InvalidInput(f"two steps have the id {step.key}")
        found[step.key] = step
    if _count(document, "total_steps", len(found)) != len(found):
        raise InvalidInput("total_steps is not the number of its steps")
    for field in _TASK_TEXTS:
        _text(document, field)
    for field in TIMES:
        _time(document, field)
    for field in ("task_id", "current_step"):
        _id(document, field)
    metadata = _object(document, "metadata")
    word = _word(document, _TASK_WORDS)
    exact = _exact(metadata, word, (PlanStatus.CANCELLED,))
    status, fits = _follows(word, exact is not None, [step.status for step in found.values()])
    if is_blank(document.get("status")) and status is not PlanStatus.CANCELLED:
        # Who says nothing contradicts nothing.
        fits = True
    settings = _settings(document)
    columns = {
        **settings,
        "description": _text(document, "description"),
        "agent": _agent(document),
        "session_name": _text(document, "session_name"),
        "halted": status is PlanStatus.FAILED and not any(step.status is StepStatus.FAILED for step in found.values()),
        "global_retry": _count(document, "global_retry", 0),
        "next_number": _following(found),
    }
    told = {field: value for field, value in document.items() if field != "steps"}
    return Task(told, columns, settings, found, status, word if exact is None else exact.value, fits)


def _step(place: int, document: object) -> Step:
    if not isinstance(document, dict):
        raise InvalidInput(f"step {place} of its list must be a JSON object")
    given = document.get("id")
    try:
        key = fields.key(str(given) if type(given) is int else given)
    except InvalidInput as error:
        raise InvalidInput(f"step {place} of its list: {error}, or is a whole number") from None
    try:
        return _judged(key, document)
    except InvalidInput as error:
        raise InvalidInput(f"step {key}: {error}") from None


def _judged(key: str, document: dict[str, Any]) -> Step:
    """A step of this key."""
    for field in _STEP_TEXTS:
        _text(document, field)
    for field in TIMES:
        _time(document, field)
    metadata = _object(document, "metadata")
    word = _word(document, _STEP_WORDS)
    exact = _exact(metadata, word, EXACT_OF_STEP)
    status = _STEP_WORDS[word] if exact is None else exact
    if word == "done" and document.get("result") == FAILED:
        status = StepStatus.FAILED
    subject = _text(document, "name")
    said = {
        "subject": key if subject is None or not subject.strip() else subject,
        "description": _text(document, "description"),
        "owner": _agent(document),
        "session_name": _text(document, "session_name"),
        "metadata": fields.plain(metadata),
        "params": _object(document, "params"),
    }
    columns = fields.step_fields(said, {})[0] | {
        "failures": _count(document, "retry_count", 0),
        "output": _text(document, "output_path"),
        "error": _text(document, "error"),
    }
    return Step(key, document, status, columns)


def _settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of what the task sets for each of its steps."""
    minutes: Any = document.get("timeout_minutes")
    if is_blank(minutes):
        minutes = 0
    if not is_number(minutes):
        raise InvalidInput("timeout_minutes must be a number")
    given = {
        "timeout_seconds": minutes * 60,
        "retry_policy": {"count": _count(document, "max_retry", 0), "backoff": "fixed", "base_seconds": 0},
        "fallback_agent": None,
        "partial_ok": False,
    }
    return fields.settings(given, {})


def _follows(word: str, is_cancelled: bool, statuses: Sequence[StepStatus]) -> tuple[PlanStatus, bool]:
    """The status of a plan of such steps, and whether it is what its file says."""
    all_settled = all(status in AT_REST for status in statuses)
    if is_cancelled and all_settled:
        return PlanStatus.CANCELLED, True
    any_failed = StepStatus.FAILED in statuses
    begun = any(status is not StepStatus.PENDING for status in statuses)
    # Nothing else can have failed it.
    halted = word == FAILED and not any_failed
    status = scheduling.plan_status(scheduling.Tally(bool(statuses), all_settled, any_failed, begun, halted))
    return status, not is_cancelled and status in _TASK_WORDS[word]


def _following(found: Mapping[str, Step]) -> int:
    """The number of the next step, above all places and all ids that are numbers."""
    highest = max((counted(key) or 0 for key in found), default=0)
    if highest >= _LAST_NUMBER:
        raise InvalidInput("no number is left above the ids of its steps; they may be text")
    return max(highest, len(found)) + 1


# -- what a field may be ---------------------------------------------------------------------------------


def counted(key: str) -> int | None:
    """The number by which a step of a long task has, or gets, just this id; ``None`` where none does."""
    return int(key) if _COUNTED.match(key) else None


def is_blank(value: object) -> bool:
    """Whether that is what the form has for what is not given."""
    return value is None or value == ""


def is_number(value: object) -> bool:
    """Whether that is a number, as JSON has them."""
    return type(value) in (int, float)


def _text(document: Mapping[str, Any], field: str) -> str | None:
    value = document.get(field)
    return None if is_blank(value) else fields.prose(value, field)


def _agent(document: Mapping[str, Any]) -> str | None:
    value = document.get("agent_id")
    return None if is_blank(value) else fields.agent(value)


def _count(document: Mapping[str, Any], field: str, default: int) -> int:
    value = document.get(field)
    count = default if is_blank(value) else values.whole(value, field)
    if count > _MOST:
        raise InvalidInput(f"{field} must be at most {_MOST:,}")
    return count


def _object(document: Mapping[str, Any], field: str) -> dict[str, Any]:
    value = document.get(field)
    if is_blank(value):
        return {}
    if not isinstance(value, dict):
        raise InvalidInput(f"{field} must be a JSON object")
    return value


def _time(document: Mapping[str, Any], field: str) -> None:
    if not is_number(document.get(field)):
        _text(document, field)


def _id(document: Mapping[str, Any], field: str) -> None:
    if type(document.get(field)) is not int:
        _text(document, field)


def _word(document: Mapping[str, Any], words: Mapping[str, object]) -> str:
    value = document.get("status")
    word = "pending" if is_blank(value) else value
    if not isinstance(word, str) or word not in words:
        raise InvalidInput(f"its status must be one of: {', '.join(words)}")
    return word


def _exact(metadata: Mapping[str, Any], word: str, among: Iterable[_Status]) -> _Status | None:
    """The status of which the form has only the nearest, where there is one."""
    if fields.EXACT_STATUS not in metadata:
        return None
    for status in among:
        if metadata[fields.EXACT_STATUS] == status.value and word == FAILED:
            return status
    raise InvalidInput(f"{fields.EXACT_STATUS} in its metadata does not fit its status")
