"""A plan as one file: a long task, whose steps are done one after the other, as the scripts have it that the runner
comes from.

The ids of the steps are their keys, and each step waits for the one before it. What is read is kept as it stood, and
written back so wherever nothing has changed since: fields that are unknown here, what was left out, and the ``""`` of
what is not given. That form has four statuses; where a plan or a step has another one, the file has ``failed``, and the
exact one in the metadata.
"""

from __future__ import annotations

import graphlib
import heapq
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from tsg import values
from tsg.errors import DamagedFile, InvalidInput, StateConflict
from tsg.plan import disk, fields, reading, structure
from tsg.plan.files import Exported, Imported
from tsg.plan.reading import PlanView
from tsg.plan.scheduling import AWAITING_DECISION, DEFAULT_GRACE_SECONDS, OnExhausted, PlanStatus, StepStatus
from tsg.plan.store import Plans
from tsg.plan.tables import attempts, dependencies, steps
from tsg.plan.taskfile import (
    DOING,
    EXACT_OF_STEP,
    FAILED,
    STEP_COLUMNS,
    TASK_COLUMNS,
    TIMES,
    WORD_OF_STEP,
    Step,
    Task,
    is_blank,
    is_number,
    task_from,
)
from tsg.plan.transaction import Transaction

__all__ = ["export_file", "import_file"]

_SUFFIX: Final = ".json"
_WHOLE: Final = re.compile(r"(0|[1-9][0-9]*)\Z")

#: The form, as what was made here has it.
_NEW_TASK: Final[Mapping[str, Any]] = MappingProxyType(
    dict.fromkeys(("task_id", "task_type", "description", "status", *TIMES, "current_step", "total_steps"))
    | dict.fromkeys(("agent_id", "session_name", "timeout_minutes", "max_retry", "global_retry", "error"))
    | {"metadata": {}}
)
_NEW_STEP: Final[Mapping[str, Any]] = MappingProxyType(
    dict.fromkeys(("id", "name", "status", "agent_id", "session_name", "started_at", "completed_at", "retry_count"))
    | dict.fromkeys(("result", "output_path", "error", "processed_by"))
    | {"params": {}}
)


class _Last(NamedTuple):
    """The last attempt of a step; times in seconds since the epoch."""

    agent: str | None
    opened_at: float
    ended_at: float | None


#: Puts a time, in seconds since the epoch or ``None``, into a field of a document.
_PutTime = Callable[[dict[str, Any], str, float | None], None]


# -- reading ---------------------------------------------------------------------------------------------


def import_file(plans: Plans, path: str | os.PathLike[str], *, name: str | None = None) -> Imported:
    """Read the file of a long task into a new plan; all of it, or nothing.

    Nobody is at work on a step that is only read: one that is ``doing`` is pending. One that is ``done`` with the
    result ``failed`` has failed. A task that has failed while none of its steps has is halted.

    Args:
        name: the plan's; by default the file's, without ``.json``.

    Raises:
        InvalidInput: no file, or no name for a plan.
        DamagedFile: the file is not what it should be.
        StateConflict: there is a plan with this name.
    """
    _require_plans(plans)
    place = disk.path_from(path)
    file = os.path.basename(os.path.abspath(place))
    named = fields.name(file.removesuffix(_SUFFIX) if name is None else name, "a plan's name")
    if not os.path.lexists(place):
        raise InvalidInput("there is no such file; the file of a long task is expected")
    shown = _shown(file)
    content = disk.content_of(place, shown)
    try:
        task = task_from(disk.document_from(content))
    except InvalidInput as error:
        raise DamagedFile(shown, str(error)) from None

    def store(transaction: Transaction) -> Imported:
        _store(transaction, named, task)
        row = reading.plan_row(transaction.connection, named)
        return Imported(plan=reading.plan_view(transaction.connection, row, transaction.now), notes=_notes(task))

    return plans._change(named, store)


def _require_plans(plans: object) -> None:
    if not values.is_a(plans, Plans):
        raise InvalidInput("a long task is read into Plans, and written from them")


def _shown(file: str) -> str:
    """What an error calls the file: its name, where that is of a form that can't say anything else."""
    try:
        return fields.key(file)
    except InvalidInput:
        return f"FILE{_SUFFIX}"


def _notes(task: Task) -> list[str]:
    notes = [
        f"{step.key} was doing and is pending now; whoever was at work on it may still be"
        for step in task.steps.values()
        if step.document.get("status") == DOING
    ]
    if not task.fits:
        notes.append(f"the file says {task.word}, and by its steps the plan is {task.status.value}")
    return notes


def _store(transaction: Transaction, name: str, task: Task) -> None:
    columns = {
        **task.columns,
        "on_exhausted": OnExhausted.FAIL.value,
        "grace_seconds": DEFAULT_GRACE_SECONDS,
        "source": fields.compact(task.document),
    }
    structure.create_plan(transaction, name, columns, delivery_required=False)
    connection = transaction.connection
    plan = reading.plan_row(connection, name, "own")
    if task.steps:
        connection.execute(
            sa.insert(steps),
            [
                {
                    **structure.fresh_row(transaction, plan, number, step.key),
                    "status": step.status.value,
                    "active_form": None,
                    "thread_id": None,
                    "session_id": None,
                    "session_resume": None,
                    **task.settings,
                    **step.columns,
                    "completed_at": transaction.now if step.status is StepStatus.COMPLETED else None,
                    "source": fields.compact(step.document),
                }
                for number, step in enumerate(task.steps.values(), 1)
            ],
        )
    in_order = sa.select(steps.c.pk).where(steps.c.plan_pk == plan.pk).order_by(steps.c.number)
    pks = list(connection.execute(in_order).scalars())
    if pks[1:]:
        chain = [{"step_pk": pk, "blocker_pk": before, "place": 0} for before, pk in itertools.pairwise(pks)]
        connection.execute(sa.insert(dependencies), chain)
        structure.count_blockers(transaction, pks[1:])
    if task.status is PlanStatus.CANCELLED:
        structure.cancel_plan(transaction, plan)
    else:
        structure.settle(transaction, plan)


# -- writing ---------------------------------------------------------------------------------------------


def export_file(plans: Plans, name: str, path: str | os.PathLike[str]) -> Exported:
    """Write a plan, advanced first, into the file of a long task, which is replaced as a whole where it is another.

    Deleted steps are left out. A plan that was made by hand is written too, if its steps form a chain.

    Raises:
        PlanNotFound: there is no such plan.
        InvalidInput: no path, no folder there, or something else than a file stands there.
        StateConflict: the steps form no chain, or the file can't be written; what was there stays.
    """
    _require_plans(plans)
    place = disk.path_from(path)
    named = plans.show(name)["name"]

    def look(transaction: Transaction) -> tuple[PlanView, dict[str, Any]]:
        plan = reading.plan_row(transaction.connection, named)
        view = reading.plan_view(transaction.connection, plan, transaction.now)
        return view, _document(transaction, plan)

    view, document = plans._read(look)
    disk.write(place, _written(document))
    return Exported(plan=view, files=1)


def _document(transaction: Transaction, plan: Row[Any]) -> dict[str, Any]:
    """All that a plan's file has to say."""
    rows = reading.step_rows(transaction.connection, plan, transaction.now, all_of_them=True)
    task = _source(plan, rows)
    living = [row for row in rows if row.status != StepStatus.DELETED.value]
    living = _in_order(transaction.connection, plan, living)
    last = _last_attempts(transaction.connection, plan)
    put_time = _clock_of(task)
    found = {} if task is None else task.steps
    members = [_step_document(plan, row, found.get(row.key), last.get(row.pk), put_time) for row in living]
    document = dict(_NEW_TASK) if task is None else dict(task.document)
    if task is None:
        document["task_id"] = plan.name
        put_time(document, "created_at", plan.created_at)
    changed = {
        field: _value(plan, column)
        for field, column in TASK_COLUMNS.items()
        if task is None or getattr(plan, column) != task.columns[column]
    }
    for field, value in changed.items():
        _put(document, field, value)
    if task is None or changed or plan.status != task.status.value or _differ(members, found.values()):
        _put(document, "total_steps", len(members))
        _put(document, "current_step", _current(living, members))
        put_time(document, "updated_at", max((row.changed_at for row in rows), default=plan.created_at))
        _put_status(document, plan, task, rows, last, put_time)
    return {**document, "steps": members}


def _source(plan: Row[Any], rows: Sequence[Row[Any]]) -> Task | None:
    """What a long task was read from; ``None`` of a plan that was made by hand."""
    if not structure.is_long_task(plan):
        return None
    try:
        read = [disk.document_from(row.source.encode()) for row in rows if row.source is not None]
        return task_from({**disk.document_from(plan.source.encode()), "steps": read})
    except InvalidInput:
        raise StateConflict("what the plan was read from is stored, and is damaged") from None


def _in_order(connection: Connection, plan: Row[Any], rows: Sequence[Row[Any]]) -> list[Row[Any]]:
    """The steps so that each comes after all that it waits for, and in order of creation besides.

    Raises:
        StateConflict: some would wait for one another only by standing in a file, and nobody has said that they do.
    """
    by_number = {row.number: row for row in rows}
    numbers = {row.pk: row.number for row in rows}
    waits = reading.edges(connection, plan)
    blockers = {row.number: {numbers[pk] for pk in waits.get(row.pk, ())} for row in rows}
    sorter = graphlib.TopologicalSorter(blockers)
    sorter.prepare()
    free = list(sorter.get_ready())
    heapq.heapify(free)
    order: list[int] = []
    while free:
        order.append(heapq.heappop(free))
        sorter.done(order[-1])
        for number in sorter.get_ready():
            heapq.heappush(free, number)
    # The steps of a long task are one after the other by what it is, also where one between them was deleted.
    if not structure.is_long_task(plan):
        for before, number in itertools.pairwise(order):
            if before not in blockers[number]:
                raise StateConflict("these steps form no chain, as those of a long task do; export into a folder")
    return [by_number[number] for number in order]


def _last_attempts(connection: Connection, plan: Row[Any]) -> dict[int, _Last]:
    """The last attempt of each step that has had one, by the keys of their rows."""
    attempt = attempts.c
    query = (
        sa.select(steps.c.pk, attempt.agent, attempt.opened_at, attempt.ended_at)
        .join(attempts, sa.and_(attempt.step_pk == steps.c.pk, attempt.number == steps.c.attempts))
        .where(steps.c.plan_pk == plan.pk)
    )
    return {pk: _Last(*row) for pk, *row in connection.execute(query)}


def _step_document(
    plan: Row[Any], row: Row[Any], step: Step | None, last: _Last | None, put_time: _PutTime
) -> dict[str, Any]:
    """A step in the file: what it was read from, but for what has changed."""
    status = StepStatus(row.status)
    document = {**_NEW_STEP, "id": int(row.key) if _WHOLE.match(row.key) else row.key}
    if step is not None:
        document = dict(step.document)
    for field, column in STEP_COLUMNS.items():
        if step is None or fields.stored(getattr(row, column)) != step.columns[column]:
            _put(document, field, getattr(row, column))
    if step is not None and step.columns["owner"] is None and row.owner == plan.agent:
        # Whoever does all the steps did this one.
        _restore(document, step.document, "agent_id")
    if status in AWAITING_DECISION and last is not None and row.failures:
        # The last try was followed by no retry.
        document["retry_count"] = row.failures - 1
    if step is None or last is not None or status is not step.status:
        _put_end(document, row, last, put_time)
    elif document.get("status") == DOING:
        document["status"] = WORD_OF_STEP[status]
    _put_exact(document, status.value if status in EXACT_OF_STEP else None)
    return document


def _put_end(document: dict[str, Any], row: Row[Any], last: _Last | None, put_time: _PutTime) -> None:
    """What is told of a step on which something was done here."""
    status = StepStatus(row.status)
    document["status"] = WORD_OF_STEP.get(status, FAILED)
    if last is not None:
        put_time(document, "started_at", last.opened_at)
    if status is StepStatus.COMPLETED:
        _put(document, "result", "success")
        put_time(document, "completed_at", row.completed_at)
    elif status in AWAITING_DECISION:
        _put(document, "result", FAILED)
        put_time(document, "completed_at", None if last is None else last.ended_at)
    else:
        for field in ("result", "completed_at", "processed_by"):
            _put(document, field, None)
        return
    if last is not None:
        _put(document, "processed_by", last.agent)


def _put_status(
    document: dict[str, Any],
    plan: Row[Any],
    task: Task | None,
    rows: Iterable[Row[Any]],
    last: Mapping[int, _Last],
    put_time: _PutTime,
) -> None:
    """What is told of a task of which something has changed here."""
    status = PlanStatus(plan.status)
    if last and is_blank(document.get("started_at")):
        put_time(document, "started_at", min(attempt.opened_at for attempt in last.values()))
    failed = [row for row in rows if row.status == StepStatus.FAILED.value and row.pk in last]
    stays = (
        task is not None
        and task.fits
        and task.status is status
        and task.columns["global_retry"] == plan.global_retry
        and not failed
    )
    if stays:
        return
    document["status"] = FAILED if status is PlanStatus.CANCELLED else status.value
    _put_exact(document, status.value if status is PlanStatus.CANCELLED else None)
    put_time(document, "completed_at", plan.closed_at if status is PlanStatus.COMPLETED else None)
    failed_at = plan.closed_at if status is PlanStatus.CANCELLED else None
    error = None
    if failed:
        failed_at = max(last[row.pk].ended_at or row.changed_at for row in failed)
        error = next((row.error for row in failed if row.error is not None), None)
    elif plan.halted:
        failed_at = max((row.changed_at for row in rows), default=plan.created_at)
        error = "a step could not be delivered to its agent"
    elif status is PlanStatus.FAILED:
        # It was so in the file, which tells more of that than is known here.
        return
    put_time(document, "failed_at", failed_at)
    _put(document, "error", error)


def _current(rows: Sequence[Row[Any]], members: Sequence[Mapping[str, Any]]) -> Any:
    """The id of the first step that is not done; of the last where all are."""
    pairs = zip(rows, members, strict=True)
    left = (member["id"] for row, member in pairs if row.status != StepStatus.COMPLETED.value)
    return next(left, members[-1]["id"] if members else None)


def _differ(members: Sequence[Mapping[str, Any]], read: Iterable[Step]) -> bool:
    """Whether steps are others than were read, but for those that were in progress and nobody has taken since."""
    before = [
        {**step.document, "status": "pending"} if step.document.get("status") == DOING else step.document
        for step in read
    ]
    # As text, in which true is not 1.
    return fields.compact(members) != fields.compact(before)


def _value(plan: Row[Any], column: str) -> Any:
    value = getattr(plan, column)
    if column == "timeout_seconds" and value is not None:
        minutes = value / 60
        return int(minutes) if minutes.is_integer() else minutes
    return value


def _put(document: dict[str, Any], field: str, value: Any) -> None:
    """Say something; where there is nothing to be said, and nothing was, that stays as it stood."""
    if not (value is None or value == {}) or not is_blank(document.get(field)):
        document[field] = value


def _restore(document: dict[str, Any], source: Mapping[str, Any], field: str) -> None:
    if field in source:
        document[field] = source[field]
    else:
        document.pop(field, None)


def _put_exact(document: dict[str, Any], exact: str | None) -> None:
    metadata = document.get("metadata") or {}
    if metadata.get(fields.EXACT_STATUS) != exact:
        document["metadata"] = fields.plain(metadata) | ({} if exact is None else {fields.EXACT_STATUS: exact})


def _clock_of(task: Task | None) -> _PutTime:
    """How a file tells times: each as it does already, and as numbers where it has such for others."""
    documents = [] if task is None else [task.document, *(step.document for step in task.steps.values())]
    in_numbers = any(is_number(document.get(field)) for document in documents for field in TIMES)

    def put_time(document: dict[str, Any], field: str, seconds: float | None) -> None:
        stood = document.get(field)
        as_number = in_numbers if is_blank(stood) else is_number(stood)
        _put(document, field, None if seconds is None else _told(seconds, as_number))

    return put_time


def _told(seconds: float, as_number: bool) -> str | int | float:
    """A time as a file has it: seconds since the epoch, or ISO 8601 in UTC, to the second."""
    if not as_number:
        try:
            moment = datetime.fromtimestamp(math.floor(seconds), UTC)
            return f"{moment.replace(tzinfo=None).isoformat(timespec='seconds')}Z"
        except (OverflowError, ValueError, OSError):
            # Beyond the years that have a form.
            pass
    return int(seconds) if seconds.is_integer() else seconds


def _written(document: dict[str, Any]) -> bytes:
    """The content of a file, which can be read again.

    Raises:
        StateConflict: none could be.
    """
    try:
        content = (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode()
    except UnicodeEncodeError:
        # Half of a pair of surrogates has an escape in JSON, and no form in UTF-8.
        content = (json.dumps(document, indent=2) + "\n").encode()
    if len(content) > disk.LARGEST or fields.is_deeper(document, fields.DEEPEST):
        raise StateConflict("the plan is too large for one file, or too deep; export into a folder")
    return content
