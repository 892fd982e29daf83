"""Every error that the ledger raises on purpose.

    LedgerError
    ├── InvalidInput      (ValueError)   the caller passed something malformed
    │   ├── DependencyCycle              steps of a plan would wait for each other
    │   └── DamagedFile                  a file to be read is not what it should be
    ├── TaskNotFound      (LookupError)  the named task, or the named parent, is not there
    ├── PlanNotFound      (LookupError)  the named plan is not there
    ├── StepNotFound      (LookupError)  the plan has no such step
    └── StateConflict                    the stored state, or the storage, refuses
        ├── SchemaOutdated               an older schema; the message names the command to run
        └── SchemaTooNew                 a schema from a later release

Messages say what to do next and never carry a value, a path or another exception's text, so that
they may be logged anywhere; what they name is at most the key of a step or the name of a file of steps, of a form that
holds nothing else. Errors of SQLAlchemy and of the database driver never leave this package.
"""

from __future__ import annotations

__all__ = [
    "DamagedFile",
    "DependencyCycle",
    "InvalidInput",
    "LedgerError",
    "PlanNotFound",
    "SchemaOutdated",
    "SchemaTooNew",
    "StateConflict",
    "StepNotFound",
    "TaskNotFound",
]


class LedgerError(Exception):
    """The base of every error of this package."""

    @property
    def named(self) -> dict[str, object]:
        """What the command line shows beside the class: of a form that can't carry anything else."""
        return {}


class InvalidInput(LedgerError, ValueError):
    """An argument, a path or a file mode that can't be right, whatever the ledger holds."""


class DependencyCycle(InvalidInput):
    """Steps of a plan would wait for each other, and none could ever run.

    Attributes:
        keys: the cycle, each step before the one that waits for it, the first once more at the end.
    """

    def __init__(self, keys: tuple[str, ...]) -> None:
        super().__init__(f"these steps would wait for each other: {' -> '.join(keys)}")
        self.keys = keys

    @property
    def named(self) -> dict[str, object]:
        """The cycle."""
        return {"cycle": self.keys}

    def __reduce__(self) -> tuple[type[DependencyCycle], tuple[tuple[str, ...]]]:
        return type(self), (self.keys,)


class DamagedFile(InvalidInput):
    """A file that was to be read is not of the form that it should have; nothing of any was taken over.

    Attributes:
        file: its name, without its folder.
        reason: what is wrong with it, in words of ours.
    """

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file, self.reason = file, reason

    @property
    def named(self) -> dict[str, object]:
        """The file's name."""
        return {"file": self.file}

    def __reduce__(self) -> tuple[type[DamagedFile], tuple[str, str]]:
        return type(self), (self.file, self.reason)


class TaskNotFound(LedgerError, LookupError):
    """No task has this id; at creation, no task has the parent's id."""


class PlanNotFound(LedgerError, LookupError):
    """No plan has this name."""


class StepNotFound(LedgerError, LookupError):
    """The plan has no step with this key."""


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
