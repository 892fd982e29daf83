"""What stands on the tables beside their columns: CHECKs, partial indexes, triggers.

To import it completes :data:`tsg.tables.metadata`; the models do, and so do the migrations. Whoever only reads and
writes rows goes without: to make them takes a sixth of a command's start, PostgreSQL's dialect included.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import event

from tsg import guards, rules
from tsg.tables import metadata, task_events, tasks

__all__ = ["metadata"]

for _table, _rules in ((tasks, rules.task_rules(tasks.c)), (task_events, rules.event_rules(task_events.c))):
    for _rule in _rules:
        # A CHECK lets NULL pass, a rule does not.
        _table.append_constraint(sa.CheckConstraint(rules.is_true(_rule.holds), name=_rule.name))

# What reconcile looks for are the few rows that are not at rest: partial indexes hold just those, so that
# its time does not grow with history, and a row that comes to rest leaves them.
sa.Index(
    "ix_tsg_tasks_active",
    tasks.c.status,
    tasks.c.updated_at,
    tasks.c.deadline_at,
    tasks.c.expects_heartbeat,
    sqlite_where=rules.active(tasks.c),
    postgresql_where=rules.active(tasks.c),
)
sa.Index(
    "ix_tsg_tasks_delivery_pending",
    tasks.c.ended_at,
    sqlite_where=rules.awaiting_delivery(tasks.c),
    postgresql_where=rules.awaiting_delivery(tasks.c),
)
sa.Index(
    "ix_tsg_tasks_parent_id",
    tasks.c.parent_id,
    tasks.c.created_at,
    sqlite_where=tasks.c.parent_id.is_not(None),
    postgresql_where=tasks.c.parent_id.is_not(None),
)

for _, _function in guards.FUNCTIONS:
    event.listen(task_events, "after_create", sa.DDL(_function.replace("%", "%%")).execute_if(dialect="postgresql"))  # type: ignore[no-untyped-call]  # so in SQLAlchemy
for _guard in guards.GUARDS:
    for _dialect, _statement in (("sqlite", _guard.sqlite), ("postgresql", _guard.postgresql)):
        if _statement is not None:
            event.listen(task_events, "after_create", sa.DDL(_statement).execute_if(dialect=_dialect))  # type: ignore[no-untyped-call]
