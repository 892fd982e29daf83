"""One transition in one open transaction: read, decided by :mod:`tsg.states`, written by compare-and-set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from tsg import rules, states, values
from tsg.errors import StateConflict, TaskNotFound
from tsg.execution import Execution
from tsg.records import TaskRecord
from tsg.states import Change, Clock, DeliveryStatus, TaskStatus, Verb
from tsg.tables import task_events, tasks

__all__ = ["children_of", "create", "do", "get", "heartbeat_many"]


def get(execution: Execution, identifier: str) -> TaskRecord:
    """The task with this id.

    Raises:
        TaskNotFound: there is none.
        StateConflict: the stored row breaks a rule.
    """
    return _found(execution, identifier).record


def children_of(execution: Execution, identifier: str) -> list[TaskRecord]:
    """The direct children of a task, by creation time and id. Errors as :func:`get`."""
    _found(execution, identifier)
    return [_stored(row).record for row in execution.rows(_statements().children, {"parent": identifier})]


def create(execution: Execution, asked: TaskRecord, clock: Clock) -> TaskRecord:
    """Record a queued task and its first event; where its id exists with the same fields, it is the stored one.

    Raises:
        StateConflict: the id exists with other fields, or the clock is behind a time of the parent's.
        TaskNotFound: there is no such parent.
    """
    existing = _find(execution, asked.id)
    parent = _find(execution, asked.parent_id) if existing is None and asked.parent_id is not None else None
    # Only now: the parent may have its beat at any moment, and a clock that was read before would seem to be behind.
    now = values.clock_reading(clock)
    record = replace(asked, created_at=now, updated_at=now, delivery_updated_at=now)
    if existing is not None:
        if not states.is_same_creation(existing.record, record):
            raise StateConflict("a task with this id exists, with other fields")
        return existing.record
    if record.parent_id is not None:
        before = _required(parent).record
        times = (before.created_at, before.started_at, before.updated_at, before.ended_at)
        states.require_not_before(now, *times, before.delivery_updated_at)
    try:
        key = execution.insert(_statements().insert, vars(record))
    except sa.exc.IntegrityError:
        # On PostgreSQL another may have created it since it was looked for.
        raise StateConflict("another writer created this task at the same moment", retriable=True) from None
    _record_event(execution, key, states.created(now))
    return record


def do(
    execution: Execution,
    identifier: str,
    verb: Verb,
    clock: Clock,
    to: TaskStatus | DeliveryStatus | None = None,
    code: object = None,
) -> TaskRecord:
    """What :func:`tsg.states.transition` says, written.

    Raises:
        TaskNotFound: there is no such task.
        StateConflict, InvalidInput: as the transition says; or another writer was there first.
    """
    task = _found(execution, identifier, to_write=True)
    change = states.transition(task.record, verb, clock, to=to, code=code)
    return task.record if change is None else _write(execution, task, change)


def heartbeat_many(execution: Execution, identifiers: Sequence[str], clock: Clock) -> list[str]:
    """Vouch for all that are running, at one time; the others of the ids, in the order given.

    A test holds it equal to :func:`do`, one by one.

    Raises:
        StateConflict: a running one breaks a rule, or has a time later than the clock's.
    """
    beats = _beats(execution.dialect)
    running = execution.rows(beats.running, {"ids": _as_set(execution.dialect, identifiers)})
    if running:
        if not all(is_sound for _, _, is_sound, _ in running):
            raise StateConflict("a stored task breaks a rule of the ledger; run doctor")
        now = values.clock_reading(clock)
        # The latest time of a sound row that is running.
        states.require_not_before(now, *(updated_at for *_, updated_at in running))
        # In the order in which they lie.
        keys = sorted(key for key, *_ in running)
        if execution.change(beats.beat, {"keys": _as_set(execution.dialect, keys), "now": now}) != len(running):
            raise StateConflict("another writer changed a task at the same moment; try again", retriable=True)
    beaten = {identifier for _, identifier, *_ in running}
    return [identifier for identifier in identifiers if identifier not in beaten]


def _as_set(dialect: str, members: Sequence[str] | Sequence[int]) -> object:
    """What a parameter that stands for a set of values is given; see :func:`_among`."""
    return json.dumps(members) if dialect == "sqlite" else list(members)


@dataclass(frozen=True, slots=True)
class _Stored:
    key: int
    record: TaskRecord


_FIELDS: Final = tuple(TaskRecord.__dataclass_fields__)


class _Statements(NamedTuple):
    by_id: sa.Select[Any]
    by_id_locked: sa.Select[Any]
    children: sa.Select[Any]
    insert: sa.Insert
    insert_event: sa.Insert


@cache
def _statements() -> _Statements:
    # The rules are asked of the database with the row, so that they are written once.
    task = sa.select(tasks.c.pk, rules.sound(tasks.c).label("is_sound"), *(tasks.c[name] for name in _FIELDS))
    by_id = task.where(tasks.c.id == sa.bindparam("id"))
    return _Statements(
        by_id=by_id,
        # A row's lock on PostgreSQL, before the clock is read; SQLite has the write lock already, and leaves it out.
        by_id_locked=by_id.with_for_update(),
        children=task.where(tasks.c.parent_id == sa.bindparam("parent")).order_by(tasks.c.created_at, tasks.c.id),
        insert=sa.insert(tasks).values({name: sa.bindparam(name) for name in _FIELDS}),
        insert_event=sa.insert(task_events).values({c.name: sa.bindparam(c.name) for c in task_events.c}),
    )


@cache
def _update(columns: tuple[str, ...]) -> sa.Update:
    return (
        sa.update(tasks)
        .where(
            tasks.c.pk == sa.bindparam("task_pk"),
            tasks.c.version == sa.bindparam("seen_version"),
            tasks.c.status == sa.bindparam("seen_status"),
            tasks.c.delivery_status == sa.bindparam("seen_delivery_status"),
        )
        .values(version=tasks.c.version + 1, **{name: sa.bindparam(f"new_{name}") for name in columns})
    )


class _Beats(NamedTuple):
    running: sa.Select[Any]
    beat: sa.Update


@cache
def _beats(dialect: str) -> _Beats:
    c = tasks.c
    running = (
        sa.select(c.pk, c.id, rules.sound(c).label("is_sound"), c.updated_at)
        .where(_among(c.id, "ids", dialect), rules.running(c))
        # In one order, so that two of them can't wait for each other on PostgreSQL.
        .order_by(*([c.pk] if dialect == "postgresql" else []))
        .with_for_update()
    )
    return _Beats(
        running,
        sa.update(tasks)
        .where(_among(c.pk, "keys", dialect), rules.running(c))
        .values(updated_at=sa.bindparam("now"), expects_heartbeat=sa.true(), version=c.version + 1),
    )


def _among(column: sa.ColumnElement[Any], name: str, dialect: str) -> sa.ColumnElement[bool]:
    """That a column is in the set that the parameter `name` stands for, as one parameter, however many there are."""
    if dialect == "sqlite":
        listed = sa.func.json_each(sa.bindparam(name, type_=sa.String())).table_valued("value")
        return column.in_(sa.select(listed.c.value))
    kind = sa.UUID(as_uuid=False) if column is tasks.c.id else column.type
    return column == sa.any_(sa.bindparam(name, type_=sa.ARRAY(kind)))


def _find(execution: Execution, identifier: str, *, to_write: bool = False) -> _Stored | None:
    statements = _statements()
    rows = execution.rows(statements.by_id_locked if to_write else statements.by_id, {"id": identifier})
    return _stored(rows[0]) if rows else None


def _found(execution: Execution, identifier: str, *, to_write: bool = False) -> _Stored:
    return _required(_find(execution, identifier, to_write=to_write))


def _required(task: _Stored | None) -> _Stored:
    if task is None:
        raise TaskNotFound("there is no task with this id")
    return task


def _stored(row: Sequence[Any]) -> _Stored:
    key, is_sound, *fields = row
    if not is_sound:
        raise StateConflict("the stored task breaks a rule of the ledger; run doctor")
    return _Stored(key, TaskRecord(*fields))


def _write(execution: Execution, task: _Stored, change: Change) -> TaskRecord:
    seen = task.record
    written = execution.change(
        _update(tuple(change.values)),
        {
            "task_pk": task.key,
            "seen_version": seen.version,
            "seen_status": seen.status,
            "seen_delivery_status": seen.delivery_status,
            **{f"new_{name}": value for name, value in change.values.items()},
        },
    )
    if written != 1:
        raise StateConflict("another writer changed the task at the same moment; read it again", retriable=True)
    if change.event is not None:
        _record_event(execution, task.key, change.event)
    return replace(seen, version=seen.version + 1, **change.values)  # type: ignore[arg-type]


def _record_event(execution: Execution, key: int, event: states.Event) -> None:
    execution.change(_statements().insert_event, {"task_pk": key, **event._asdict()})
