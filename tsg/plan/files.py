"""A plan as a folder of files, one a step, in the form of the document that the plan layer comes from.

What is read from a file is kept as it stood, and written back so wherever nothing has changed since: fields that are
unknown here, the order of all, what was left out, and which of two steps says that one waits for the other. That form
has four statuses; where a step has another one, the file has the nearest, and the exact one in its metadata.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypedDict

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from tsg import values
from tsg.errors import DamagedFile, InvalidInput, StateConflict
from tsg.plan import disk, fields, reading, scheduling, structure
from tsg.plan.reading import Learning, PlanView
from tsg.plan.scheduling import DEFAULT_GRACE_SECONDS, DEFAULT_TIMEOUT_SECONDS, OnExhausted, StepStatus
from tsg.plan.store import Plans
from tsg.plan.tables import agents, dependencies, expected, steps
from tsg.plan.transaction import Transaction

__all__ = ["Exported", "Imported", "export_folder", "import_folder", "learnings_markdown", "write_learnings"]

_FILE: Final = re.compile(r"(T-[0-9]{3,})\.json\Z")
_SESSION: Final = re.compile(r"(.+)-([1-9][0-9]{0,8})\Z", re.DOTALL)
_LINE_END: Final = re.compile(r"\r\n?|\n")

_PENDING: Final = StepStatus.PENDING.value
_IN_PROGRESS: Final = StepStatus.IN_PROGRESS.value
_DELETED: Final = StepStatus.DELETED.value
_STATUSES: Final = (_PENDING, _IN_PROGRESS, StepStatus.COMPLETED.value, _DELETED)
#: The other statuses, with what stands for them in a file, and where in its metadata the exact one is.
_STANDS_FOR: Final[Mapping[StepStatus, str]] = MappingProxyType(
    {
        StepStatus.PARTIAL: _PENDING,
        StepStatus.ESCALATED: _PENDING,
        StepStatus.FAILED: _PENDING,
        StepStatus.CANCELLED: _DELETED,
    }
)

#: The columns of a field that are not just its name.
_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "timeout_ms": ("timeout_seconds",),
        "retry_policy": ("retries", "backoff", "base_seconds", "factor", "cap_seconds"),
    }
)
#: The fields of the form, in its order; and those that only a step of ours has.
_FORM: Final = (
    "id",
    "subject",
    "description",
    "status",
    "activeForm",
    "blockedBy",
    "blocks",
    "owner",
    "metadata",
    "threadID",
    "timeout_ms",
    "retry_policy",
    "fallback_agent",
    "partial_ok",
    "session_id",
    "session_resume",
)
_BESIDE: Final = ("session_name", "params", "output", "error")
_LINKS: Final = ("blockedBy", "blocks")
#: Those that no caller may set, but a file may: they tell of what was.
_TOLD: Final = ("session_id", "output", "error")
_SET: Final[tuple[str, ...]] = tuple(field for field in (*_FORM, *_BESIDE) if field not in ("id", "status", *_TOLD))

#: What a plan sets for its steps where nobody says anything, and what a step has whose file says nothing.
_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    fields.settings(
        {
            "timeout_seconds": DEFAULT_TIMEOUT_SECONDS,
            "retry_policy": {},
            "fallback_agent": None,
            "partial_ok": False,
        },
        {},
    )
)
_UNSAID: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "description": None,
        "active_form": None,
        "owner": None,
        "metadata": "{}",
        "thread_id": None,
        "session_name": None,
        "session_resume": None,
        **_DEFAULTS,
        "params": "{}",
        **dict.fromkeys(_TOLD),
    }
)


class Imported(TypedDict):
    """What was read.

    Keys:
        notes: what is otherwise than the files say, in words.
    """

    plan: PlanView
    notes: list[str]


class Exported(TypedDict):
    """What was written.

    Keys:
        files: how many there are of the plan, those included that were there already as they had to be.
    """

    plan: PlanView
    files: int


class _Step(NamedTuple):
    """A step as its file has it.

    Attributes:
        status: what it is here, where nobody is at work on it.
        columns: all that a row has of what the file says, or does not say.
    """

    key: str
    number: int
    document: dict[str, Any]
    status: StepStatus
    columns: dict[str, Any]
    blocked_by: list[str]
    blocks: list[str]


# -- reading ---------------------------------------------------------------------------------------------


def import_folder(plans: Plans, path: str | os.PathLike[str], *, name: str | None = None) -> Imported:
    """Read a folder of ``T-NNN.json`` files into a new plan; all of it, or nothing. Other files are left alone.

    Nobody is at work on a step that is only read: one ``in_progress`` is pending.

    Args:
        name: the plan's; by default the folder's.

    Raises:
        InvalidInput: no folder, no such file in it, or no name for a plan.
        DamagedFile: a file is not what it should be; it names the file.
        DependencyCycle: steps would wait for each other.
        StateConflict: there is a plan with this name.
    """
    _require_plans(plans)
    folder = disk.path_from(path)
    found = _folder(folder)
    named = fields.name(os.path.basename(os.path.abspath(folder)) if name is None else name, "a plan's name")
    waits = _waits(found)
    numbers = {found[key].number: [found[blocker].number for blocker in waits[key]] for key in found}
    scheduling.in_order(numbers, structure.key_of)
    notes = [f"{key} was in progress and is pending now" for key, step in found.items() if _was_in_progress(step)]

    def store(transaction: Transaction) -> Imported:
        _store(transaction, named, found, waits)
        row = reading.plan_row(transaction.connection, named)
        return Imported(plan=reading.plan_view(transaction.connection, row, transaction.now), notes=notes)

    return plans._change(named, store)


def _require_plans(plans: object) -> None:
    if not values.is_a(plans, Plans):
        raise InvalidInput("files are read into Plans, and written from them")


def _folder(folder: str) -> dict[str, _Step]:
    """The steps of a folder by their keys, in the order of their numbers."""
    try:
        names = [name for name in os.listdir(folder) if _FILE.match(name)]
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidInput("this is no folder; a folder of T-NNN.json files is expected") from None
    except OSError:
        raise InvalidInput("the folder can't be read") from None
    if not names:
        raise InvalidInput("there is no step in this folder; a folder of T-NNN.json files is expected")
    found = {}
    for name in sorted(names, key=lambda name: (len(name), name)):
        key = name.removesuffix(".json")
        content = disk.content_of(os.path.join(folder, name), name)
        try:
            found[key] = _step(key, disk.document_from(content))
        except InvalidInput as error:
            raise DamagedFile(name, str(error)) from None
    following = _following(found)
    for step in _living(found):
        if not found.keys() >= set(step.blocked_by):
            raise DamagedFile(f"{step.key}.json", "blockedBy names a step that has no file")
        for key in step.blocks:
            if key not in found and (structure.number_of(key) or 0) < following:
                raise DamagedFile(f"{step.key}.json", "blocks names a step that has no file, and none to come")
    return found


def _step(key: str, document: dict[str, Any]) -> _Step:
    """What a file of this key says.

    Raises:
        InvalidInput: it can't be so.
    """
    number = structure.number_of(key)
    if number is None:
        raise InvalidInput("a step's number has three digits, or more without a zero before them, and at most nine")
    if document.get("id") != key:
        raise InvalidInput("its id must be the file's name")
    status = _status(document)
    given: dict[str, Any] = {field: document[field] for field in _SET if field in document}
    if "subject" not in given:
        raise InvalidInput("a step needs a subject")
    if isinstance(given.get("metadata"), dict):
        given["metadata"] = fields.plain(given["metadata"])
    columns, links = fields.step_fields(fields.from_json(given), {})
    told = {field: fields.optional_prose(document.get(field), field) for field in _TOLD}
    return _Step(
        key,
        number,
        document,
        status,
        {**_UNSAID, **columns, **told},
        links.get("blocked_by", []),
        links.get("blocks", []),
    )


def _status(document: Mapping[str, Any]) -> StepStatus:
    word = document.get("status", _PENDING)
    if word not in _STATUSES:
        raise InvalidInput(f"its status must be one of: {', '.join(_STATUSES)}")
    metadata = document.get("metadata")
    if isinstance(metadata, dict) and fields.EXACT_STATUS in metadata:
        for status, stands_for in _STANDS_FOR.items():
            if metadata[fields.EXACT_STATUS] == status.value and stands_for == word:
                return status
        raise InvalidInput(f"{fields.EXACT_STATUS} in its metadata does not fit its status")
    return StepStatus.PENDING if word == _IN_PROGRESS else StepStatus(word)


def _was_in_progress(step: _Step) -> bool:
    return bool(step.document.get("status") == _IN_PROGRESS)


def _following(found: Mapping[str, _Step]) -> int:
    """The number of the next step."""
    return max(step.number for step in found.values()) + 1


def _living(found: Mapping[str, _Step]) -> Iterable[_Step]:
    return (step for step in found.values() if step.status is not StepStatus.DELETED)


def _waits(found: Mapping[str, _Step]) -> dict[str, list[str]]:
    """All that each step waits for, whichever of the two says so, what it says itself first; by keys."""
    alive = {step.key for step in _living(found)}
    waits: dict[str, dict[str, None]] = {key: {} for key in found}
    for step in _living(found):
        waits[step.key].update(dict.fromkeys(key for key in step.blocked_by if key in alive))
    for step in _living(found):
        for key in step.blocks:
            if key in alive:
                waits[key][step.key] = None
    return {key: list(blockers) for key, blockers in waits.items()}


def _awaited(found: Mapping[str, _Step]) -> dict[str, list[str]]:
    """Which keys that are yet to come each step is to block."""
    return {step.key: [key for key in step.blocks if key not in found] for step in _living(found)}


def _store(transaction: Transaction, name: str, found: Mapping[str, _Step], waits: Mapping[str, Sequence[str]]) -> None:
    settings = {
        **_DEFAULTS,
        "description": None,
        "on_exhausted": OnExhausted.ESCALATE.value,
        "grace_seconds": DEFAULT_GRACE_SECONDS,
        "next_number": _following(found),
    }
    structure.create_plan(transaction, name, settings, delivery_required=False)
    connection = transaction.connection
    plan = reading.plan_row(connection, name, "own")
    connection.execute(sa.insert(steps), [_row(transaction, plan, step) for step in found.values()])
    of_plan = sa.select(steps.c.key, steps.c.pk).where(steps.c.plan_pk == plan.pk)
    pks: dict[str, int] = {row.key: row.pk for row in connection.execute(of_plan)}
    _insert(
        connection,
        dependencies,
        (
            {"step_pk": pks[key], "blocker_pk": pks[blocker], "place": place}
            for key, blockers in waits.items()
            for place, blocker in enumerate(blockers)
        ),
    )
    _insert(
        connection,
        expected,
        ({"blocker_pk": pks[key], "key": other} for key, others in _awaited(found).items() for other in others),
    )
    _insert(
        connection,
        agents,
        ({"plan_pk": plan.pk, "agent": agent, "sessions": last} for agent, last in _sessions(found).items()),
    )
    structure.count_blockers(transaction, (pks[key] for key, blockers in waits.items() if blockers))
    structure.settle(transaction, plan)


def _row(transaction: Transaction, plan: Row[Any], step: _Step) -> dict[str, Any]:
    return {
        **structure.fresh_row(transaction, plan, step.number, step.key),
        "status": step.status.value,
        **step.columns,
        "completed_at": transaction.now if step.status is StepStatus.COMPLETED else None,
        "source": fields.compact(step.document),
    }


def _insert(connection: Connection, table: sa.Table, rows: Iterable[Mapping[str, Any]]) -> None:
    members = list(rows)
    if members:
        connection.execute(sa.insert(table), members)


def _sessions(found: Mapping[str, _Step]) -> dict[str, int]:
    """The number of the last session that each agent is known to have had, so that none is given its name again."""
    last: dict[str, int] = {}
    for step in found.values():
        for session in (step.columns["session_id"], step.columns["session_resume"]):
            match = None if session is None else _SESSION.match(session)
            if match is None:
                continue
            # Who can't be an agent's name has no sessions here.
            with suppress(InvalidInput):
                agent = fields.agent(match[1])
                last[agent] = max(last.get(agent, 0), int(match[2]))
    return last


# -- writing ---------------------------------------------------------------------------------------------


def export_folder(plans: Plans, name: str, path: str | os.PathLike[str]) -> Exported:
    """Write a plan, advanced first, into a folder, a ``T-NNN.json`` file a step.

    The folder is made where it is missing. A file is replaced as a whole, and only where it is not already what it has
    to be; files of other names are left alone.

    Raises:
        PlanNotFound: there is no such plan.
        InvalidInput: no folder can be there.
        DamagedFile: something else than a file stands where a step's file has to be; nothing was written.
        StateConflict: the folder can't be written; what is there by then is whole, and to export again does the rest.
    """
    _require_plans(plans)
    folder = disk.path_from(path)
    named = plans.show(name)["name"]

    def look(transaction: Transaction) -> tuple[PlanView, dict[str, dict[str, Any]]]:
        plan = reading.plan_row(transaction.connection, named)
        view = reading.plan_view(transaction.connection, plan, transaction.now)
        return view, _documents(transaction, plan)

    view, documents = plans._read(look)
    contents = {f"{key}.json": _written(document) for key, document in documents.items()}
    try:
        os.makedirs(folder, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InvalidInput("something else stands where the folder should be") from None
    except RecursionError:
        raise InvalidInput("the path has too many parts") from None
    except OSError:
        raise StateConflict("the folder can't be made") from None
    changed = []
    for file, content in contents.items():
        try:
            if disk.differs(os.path.join(folder, file), content):
                changed.append(file)
        except InvalidInput as error:
            raise DamagedFile(file, str(error)) from None
    for file in changed:
        disk.replace(os.path.join(folder, file), contents[file])
    return Exported(plan=view, files=len(contents))


def _documents(transaction: Transaction, plan: Row[Any]) -> dict[str, dict[str, Any]]:
    """What the files of a plan's steps have to say, by keys, in order of creation."""
    rows = reading.step_rows(transaction.connection, plan, transaction.now, all_of_them=True)
    views = reading.step_views(transaction.connection, rows, transaction.now)
    try:
        read = [row for row in rows if row.source is not None]
        found = {row.key: _step(row.key, disk.document_from(row.source.encode())) for row in read}
    except InvalidInput:
        raise StateConflict("what a step was read from is stored, and is damaged") from None
    waited = _waits(found)
    blocked: defaultdict[str, set[str]] = defaultdict(set)
    for key, blockers in waited.items():
        for blocker in blockers:
            blocked[blocker].add(key)
    for key, others in _awaited(found).items():
        blocked[key].update(others)
    documents = {}
    for row, view in zip(rows, views, strict=True):
        step = found.get(row.key)
        unchanged = _unchanged(row, step)
        if step is not None:
            unchanged |= {"id"}
            if view["blockedBy"] == waited[row.key]:
                unchanged.add("blockedBy")
            if set(view["blocks"]) == blocked[row.key]:
                unchanged.add("blocks")
        documents[row.key] = _merged(dict(view), {} if step is None else step.document, unchanged)
    return documents


def _unchanged(row: Row[Any], step: _Step | None) -> set[str]:
    """The fields that are as the step's file had them, or left them out; those that say nothing, where it had none."""
    said, judged = (_UNSAID, _BESIDE) if step is None else (step.columns, (*_SET, *_TOLD))
    return {
        field
        for field in judged
        if field not in _LINKS
        and all(fields.stored(getattr(row, column)) == said[column] for column in _columns_of(field))
    }


def _columns_of(field: str) -> tuple[str, ...]:
    return _COLUMNS.get(field, (fields.PYTHON_NAMES.get(field, field),))


def _merged(view: Mapping[str, Any], source: Mapping[str, Any], unchanged: set[str]) -> dict[str, Any]:
    """A step's file: what it was read from, but for what has changed."""
    status = StepStatus(view["status"])
    word = _STANDS_FOR.get(status, status.value)
    if source and source.get("status", _PENDING) == word:
        unchanged = {*unchanged, "status"}
    now = {**view, "status": word}
    document = {**source, **{field: now[field] for field in (*_FORM, *_BESIDE) if field not in unchanged}}
    metadata = document.get("metadata") or {}
    exact = status.value if status in _STANDS_FOR else None
    if metadata.get(fields.EXACT_STATUS) != exact:
        document["metadata"] = fields.plain(metadata) if exact is None else {**metadata, fields.EXACT_STATUS: exact}
    return document


def _written(document: Mapping[str, Any]) -> bytes:
    # Half of a pair of surrogates has an escape in JSON, and no form in UTF-8; and what stands very deep in each other
    # is written in one line, which takes no recursion in Python.
    for form in ({"ensure_ascii": False, "indent": 2}, {"indent": 2}, {}):
        with suppress(UnicodeEncodeError, RecursionError):
            return (json.dumps(document, **form) + "\n").encode()  # type: ignore[arg-type]  # each is an option of it
    raise StateConflict("objects and lists of a step stand too deep in each other")


# -- learnings -------------------------------------------------------------------------------------------


def learnings_markdown(learnings: Sequence[Learning]) -> str:
    """What was learned, as Markdown, in the order given: a heading a step, and a list item a learning.

    Whatever Markdown a learning is itself stays inside its item.

    Raises:
        InvalidInput: these are no learnings.
    """
    if not values.is_a(learnings, list) or not all(values.is_a(learning, dict) for learning in learnings):
        raise InvalidInput("give the learnings of a plan")
    lines = ["# Learnings"]
    step = None
    for learning in learnings:
        if learning["step"] != step:
            step = learning["step"]
            lines += ["", f"## {step}", ""]
        # A blank line at its start would end the item.
        first, *others = _LINE_END.split(learning["text"].strip())
        lines += [f"- {first}".rstrip(), *(f"  {line}".rstrip() for line in others)]
    return "".join(f"{line}\n" for line in lines)


def write_learnings(path: str | os.PathLike[str], text: str) -> None:
    """Write a text into a file as a whole: whoever reads it meanwhile finds the one before, or this one.

    Raises:
        InvalidInput: no text, no path, no folder there, or something else than a file stands there.
        StateConflict: it can't be written.
    """
    place, written = disk.path_from(path), values.text(text)
    try:
        content = None if written is None else written.encode()
    except UnicodeEncodeError:
        content = None
    if content is None:
        raise InvalidInput("what is written must be text")
    disk.write(place, content)
