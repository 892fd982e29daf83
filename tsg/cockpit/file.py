"""The page of a plan in a file, which is rewritten whenever the plan changes."""

from __future__ import annotations

import os
from typing import Any, Final

from sqlalchemy.engine import Row

from tsg.errors import PlanNotFound
from tsg.plan import disk, fields, reading
from tsg.plan.store import Plans

__all__ = ["refresh", "write"]

#: How often a file is written anew, since the plan has changed meanwhile, before that is left to whoever changes it.
_MOST_ROUNDS: Final = 100


def write(plans: Plans, name: str, path: str | os.PathLike[str], *, theme: str = "pet") -> None:
    """Write the page of a plan into a file, as a whole: whoever reads it meanwhile finds the one before, or this one.

    Of several who do this at once none leaves an older state behind than there is: each looks again after it has
    written, and whoever was last to write has then seen what is stored. A change that comes later is followed by the
    write of whoever made it.

    Raises:
        PlanNotFound: there is no such plan.
        InvalidInput: no theme, no path, no folder there, something else than a file stands there, or the extra
            ``cockpit`` is not installed.
        StateConflict: it can't be written; what was there stays.
    """
    # Only where there is a page: every command asks whether its plan has one.
    from tsg.cockpit import render, scene

    place = disk.path_from(path)
    disk.require_place_of_page(place)
    seen = scene.look(plans, name)
    # Among those who rewrite after each change of theirs there are at most as many rounds as there are of them.
    for _ in range(_MOST_ROUNDS):
        disk.write(place, render.page(seen, theme=theme).encode())
        now = scene.look(plans, name)
        if now == seen:
            return
        seen = now


def refresh(plans: Plans, name: str) -> bool:
    """Write the page of a plan that has a file for it; whether it has one. A plan that is gone has none.

    Raises:
        InvalidInput, StateConflict: as :func:`write`.
    """
    try:
        named = fields.name(name, "a plan's name")
        run: Row[Any] = plans._read(lambda transaction: reading.plan_row(transaction.connection, named))
        if run.cockpit is None:
            return False
        write(plans, named, run.cockpit, theme=run.theme or disk.THEMES[0])
    except PlanNotFound:
        return False
    return True
