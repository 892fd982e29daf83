"""Plans for ``asyncio``: the same methods, awaited. Each is written once, in :mod:`tsg.plan.store`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

from tsg import values
from tsg.aio import AsyncLedger
from tsg.errors import InvalidInput
from tsg.ledger import Ledger
from tsg.plan.reading import StepView
from tsg.plan.store import Plans

__all__ = ["AsyncPlans"]

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def _awaited(
    method: Callable[Concatenate[Plans, _Arguments], _Answer],
) -> Callable[Concatenate[AsyncPlans, _Arguments], Coroutine[Any, Any, _Answer]]:
    async def call(self: AsyncPlans, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
        return await self._run(lambda plans: method(plans, *args, **kwargs))

    # Its name, and what it takes, are the method's.
    return update_wrapper(call, method)


class AsyncPlans:
    """The plans beside an :class:`tsg.AsyncLedger`, whose tables are there already (``tsg upgrade --plan``).

    Methods have the arguments, answers and errors of those of :class:`tsg.Plans`.

    Raises:
        InvalidInput: no :class:`tsg.AsyncLedger`.
    """

    def __init__(self, ledger: AsyncLedger) -> None:
        if not values.is_a(ledger, AsyncLedger):
            raise InvalidInput("these plans stand on an AsyncLedger")
        self._ledger = ledger
        self._known_to_be_at_head = False

    async def _run(self, work: Callable[[Plans], _Answer]) -> _Answer:
        def on(ledger: Ledger) -> _Answer:
            # As the ledger itself: the schema is looked at by the first call.
            plans = Plans._at_head(ledger) if self._known_to_be_at_head else Plans(ledger)
            self._known_to_be_at_head = True
            return work(plans)

        return await self._ledger.run(on)

    create = _awaited(Plans.create)
    peek = _awaited(Plans.peek)
    show_in = _awaited(Plans.show_in)
    plans = _awaited(Plans.plans)
    show = _awaited(Plans.show)
    advance = _awaited(Plans.advance)
    cancel_plan = _awaited(Plans.cancel_plan)
    remove = _awaited(Plans.remove)
    graph = _awaited(Plans.graph)
    learnings = _awaited(Plans.learnings)
    doctor = _awaited(Plans.doctor)
    add_step = _awaited(Plans.add_step)
    get = _awaited(Plans.get)
    steps = _awaited(Plans.steps)
    cancel = _awaited(Plans.cancel)
    delete = _awaited(Plans.delete)
    decide = _awaited(Plans.decide)
    accept = _awaited(Plans.accept)
    claim = _awaited(Plans.claim)
    open = _awaited(Plans.open)
    start = _awaited(Plans.start)
    heartbeat = _awaited(Plans.heartbeat)
    heartbeat_step = _awaited(Plans.heartbeat_step)
    complete = _awaited(Plans.complete)
    fail = _awaited(Plans.fail)

    async def update(self, plan: str, key: str, **given: Any) -> StepView:
        """As :meth:`tsg.Plans.update`."""
        return await self._run(lambda plans: plans.update(plan, key, **given))
