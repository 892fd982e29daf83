"""Every error that the ledger raises on purpose.

    LedgerError
    ├── InvalidInput      (ValueError)   the caller passed something malformed
    ├── TaskNotFound      (LookupError)  the named task, or the named parent, is not there
    └── StateConflict                    the stored state, or the storage, refuses
        ├── SchemaOutdated               an older schema; the message names the command to run
        └── SchemaTooNew                 a schema from a later release

Messages say what to do next and never carry a value, a path or another exception's text, so that
they may be logged anywhere. Errors of SQLAlchemy and of the database driver never leave this package.
"""

from __future__ import annotations

__all__ = [
    "InvalidInput",
    "LedgerError",
    "SchemaOutdated",
    "SchemaTooNew",
    "StateConflict",
    "TaskNotFound",
]


class LedgerError(Exception):
    """The base of every error of this package."""


class InvalidInput(LedgerError, ValueError):
    """An argument, a path or a file mode that can't be right, whatever the ledger holds."""


class TaskNotFound(LedgerError, LookupError):
    """No task has this id; at creation, no task has the parent's id."""


class StateConflict(LedgerError):
    """What is stored forbids it: a state, a time, a damaged row, a lock, or the storage itself.

    Attributes:
        retriable: only somebody else, at the same moment, was in the way; the same call may do later.
    """

    def __init__(self, *args: object, retriable: bool = False) -> None:
        super().__init__(*args)
        self.retriable = retriable


class SchemaOutdated(StateConflict):
    """The ledger has an older schema, or none; ``tsg upgrade`` brings it to the current one."""


class SchemaTooNew(StateConflict):
    """The ledger was written by a later release; upgrade this package instead."""
