"""Plans: steps that wait for each other, are tried again, change hands, and learn, on the ledger.

A step's every attempt is a ledger task, so that what is alive and what has ended is the ledger's to say. The names are
imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tsg.plan.aio import AsyncPlans as AsyncPlans
    from tsg.plan.reading import Graph as Graph
    from tsg.plan.reading import PlanView as PlanView
    from tsg.plan.reading import StepView as StepView
    from tsg.plan.scheduling import PlanStatus as PlanStatus
    from tsg.plan.scheduling import RetryPolicy as RetryPolicy
    from tsg.plan.scheduling import StepStatus as StepStatus
    from tsg.plan.schema import downgrade as downgrade
    from tsg.plan.schema import upgrade as upgrade
    from tsg.plan.store import Plans as Plans
    from tsg.plan.work import Work as Work

__all__ = [
    "AsyncPlans",
    "Graph",
    "PlanStatus",
    "PlanView",
    "Plans",
    "RetryPolicy",
    "StepStatus",
    "StepView",
    "Work",
    "downgrade",
    "upgrade",
]

_HOMES = {
    "tsg.plan.aio": ("AsyncPlans",),
    "tsg.plan.reading": ("Graph", "PlanView", "StepView"),
    "tsg.plan.scheduling": ("PlanStatus", "RetryPolicy", "StepStatus"),
    "tsg.plan.schema": ("downgrade", "upgrade"),
    "tsg.plan.store": ("Plans",),
    "tsg.plan.work": ("Work",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
