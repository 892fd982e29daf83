"""A ledger of tasks and deliveries that doesn't guess what a restart left behind.

The public names are imported when they are first used, so that a command pays only for what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tsg import doctor as doctor
    from tsg import reconcile as reconcile
    from tsg.aio import AsyncLedger as AsyncLedger
    from tsg.errors import DamagedFile as DamagedFile
    from tsg.errors import DependencyCycle as DependencyCycle
    from tsg.errors import InvalidInput as InvalidInput
    from tsg.errors import LedgerError as LedgerError
    from tsg.errors import PlanNotFound as PlanNotFound
    from tsg.errors import SchemaOutdated as SchemaOutdated
    from tsg.errors import SchemaTooNew as SchemaTooNew
    from tsg.errors import StateConflict as StateConflict
    from tsg.errors import StepNotFound as StepNotFound
    from tsg.errors import TaskNotFound as TaskNotFound
    from tsg.ledger import Ledger as Ledger
    from tsg.ledger import reconcile_restart as reconcile_restart
    from tsg.models import Base as Base
    from tsg.models import Task as Task
    from tsg.models import TaskEvent as TaskEvent
    from tsg.plan.aio import AsyncPlans as AsyncPlans
    from tsg.plan.store import Plans as Plans
    from tsg.reconcile import ReconcilePolicy as ReconcilePolicy
    from tsg.records import TaskRecord as TaskRecord
    from tsg.schema import downgrade as downgrade
    from tsg.schema import include_name as include_name
    from tsg.schema import upgrade as upgrade
    from tsg.sessions import server_clock as server_clock
    from tsg.states import DeliveryStatus as DeliveryStatus
    from tsg.states import TaskStatus as TaskStatus
    from tsg.values import payload_fingerprint as payload_fingerprint

__all__ = [
    "AsyncLedger",
    "AsyncPlans",
    "Base",
    "DamagedFile",
    "DeliveryStatus",
    "DependencyCycle",
    "InvalidInput",
    "Ledger",
    "LedgerError",
    "PlanNotFound",
    "Plans",
    "ReconcilePolicy",
    "SchemaOutdated",
    "SchemaTooNew",
    "StateConflict",
    "StepNotFound",
    "Task",
    "TaskEvent",
    "TaskNotFound",
    "TaskRecord",
    "TaskStatus",
    "doctor",
    "downgrade",
    "include_name",
    "payload_fingerprint",
    "reconcile",
    "reconcile_restart",
    "server_clock",
    "upgrade",
]

__version__ = "0.1.0"

_HOMES = {
    "tsg.aio": ("AsyncLedger",),
    "tsg.errors": (
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
    ),
    "tsg.ledger": ("Ledger", "reconcile_restart"),
    "tsg.models": ("Base", "Task", "TaskEvent"),
    "tsg.plan.aio": ("AsyncPlans",),
    "tsg.plan.store": ("Plans",),
    "tsg.reconcile": ("ReconcilePolicy",),
    "tsg.records": ("TaskRecord",),
    "tsg.schema": ("downgrade", "include_name", "upgrade"),
    "tsg.sessions": ("server_clock",),
    "tsg.states": ("DeliveryStatus", "TaskStatus"),
    "tsg.values": ("payload_fingerprint",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("doctor", "reconcile")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"tsg.{name}")
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
