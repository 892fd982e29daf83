"""The database's own guards: triggers for whatever goes round the models and the ledger.

A CHECK sees one row as it will be; these see what it was. They refuse to leave a terminal state or to skip
a transition, to rewrite what never changes, and to change or delete an event while its task exists
(deleting the task takes its events along). They are generated from the state machines, created by the
migrations, and compared by doctor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tsg.states import DELIVERY_TRANSITIONS, TASK_TRANSITIONS

__all__ = ["GUARDS", "Guard"]


class Guard(NamedTuple):
    """One trigger: its name, the table it stands on, and the statement that creates it."""

    name: str
    table: str
    sqlite: str


#: Written by the creation of a task and never again; its pk holds its events.
IMMUTABLE: Final = (
    "pk",
    "id",
    "parent_id",
    "delivery_required",
    "payload_hash",
    "timeout_seconds",
    "created_at",
)
#: Written once, by the transition that they tell of.
WRITTEN_ONCE: Final = ("started_at", "ended_at", "deadline_at", "terminal_code", "delivery_code")


def _legal(column: str, transitions: Mapping[Any, tuple[Any, ...]]) -> str:
    return " OR ".join(
        f"(OLD.{column} = '{source.value}' AND NEW.{column} IN ({', '.join(repr(end.value) for end in ends)}))"
        for source, ends in transitions.items()
        if ends
    )


def _guard(name: str, table: str, occasion: str, forbidden: str) -> Guard:
    return Guard(
        name,
        table,
        f"CREATE TRIGGER {name} BEFORE {occasion} ON {table} FOR EACH ROW WHEN {forbidden} "
        f"BEGIN SELECT RAISE(ABORT, '{name}'); END",
    )


def _transition(name: str, column: str, transitions: Mapping[Any, tuple[Any, ...]]) -> Guard:
    return _guard(
        name,
        "tsg_tasks",
        f"UPDATE OF {column}",
        f"OLD.{column} IS NOT NEW.{column} AND NOT ({_legal(column, transitions)})",
    )


GUARDS: Final = (
    _transition("tsg_tasks_status_guard", "status", TASK_TRANSITIONS),
    _transition("tsg_tasks_delivery_guard", "delivery_status", DELIVERY_TRANSITIONS),
    _guard(
        "tsg_tasks_immutable_guard",
        "tsg_tasks",
        f"UPDATE OF {', '.join(IMMUTABLE)}",
        " OR ".join(f"OLD.{column} IS NOT NEW.{column}" for column in IMMUTABLE),
    ),
    _guard(
        "tsg_tasks_written_once_guard",
        "tsg_tasks",
        f"UPDATE OF {', '.join(WRITTEN_ONCE)}",
        " OR ".join(f"(OLD.{column} IS NOT NULL AND OLD.{column} IS NOT NEW.{column})" for column in WRITTEN_ONCE),
    ),
    _guard("tsg_task_events_update_guard", "tsg_task_events", "UPDATE", "1"),
    _guard(
        "tsg_task_events_delete_guard",
        "tsg_task_events",
        "DELETE",
        "EXISTS (SELECT 1 FROM tsg_tasks WHERE pk = OLD.task_pk)",
    ),
)
