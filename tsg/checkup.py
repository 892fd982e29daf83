"""Doctor for a ledger that is not opened: of any size, mode and schema, as it is."""

from __future__ import annotations

from collections.abc import Callable

from tsg import doctor
from tsg.engine import reading, refusing
from tsg.errors import InvalidInput
from tsg.listing import Progress
from tsg.opening import is_there, open_as_it_is, place_of

__all__ = ["examine_file"]


def examine_file(
    target: object,
    *,
    allow_external_acl: bool = False,
    progress: Progress | None = None,
    examine: Callable[..., doctor.Report] = doctor.examine,
) -> doctor.Report:
    """Doctor's report on a ledger file as it is: of any size, mode and schema, migrated or not.

    Args:
        examine: what looks at the connection, with `progress`; a layer above may look at more.

    Raises:
        InvalidInput: no file there, or one that is not the caller's own.
        StateConflict: it can't be opened at all.
    """
    place = place_of(target, allow_external_acl=allow_external_acl)
    if not is_there(place):
        raise InvalidInput("there is no ledger at this place; tsg init makes one")
    opened = open_as_it_is(place)
    try:
        with refusing(), reading(opened.engine) as connection:
            return examine(connection, progress=progress)
    finally:
        opened.close()
