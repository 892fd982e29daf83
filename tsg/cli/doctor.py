"""The command that looks at a ledger as it is; it imports no more than that takes."""

from __future__ import annotations

from typing import Any

import click
from sqlalchemy.engine import Connection

from tsg import catalog
from tsg import doctor as ledger_doctor
from tsg.checkup import examine_file
from tsg.cli import Answer, answer
from tsg.cli.progress import bar, progress_option
from tsg.engine import DATABASE_ERRORS, contained
from tsg.listing import Progress

__all__ = ["doctor"]


@click.command()
@progress_option
@click.pass_obj
def doctor(place: dict[str, Any], progress: bool) -> Answer:
    """Prove that the whole history is consistent, or count what is not."""
    with bar(progress, "doctor") as shown:
        report = examine_file(**place, progress=shown, examine=_examine)
    return answer({**report}, status=0 if report["healthy"] else 1)


def _examine(connection: Connection, *, progress: Progress | None) -> ledger_doctor.Report:
    """The ledger, and the plans where there are any; whoever has none does without what knows them."""
    try:
        with contained(connection):
            plans = catalog.has_plans(connection)
    except DATABASE_ERRORS:
        # What can't be read is the ledger's doctor to say.
        plans = False
    if not plans:
        return ledger_doctor.examine(connection, progress=progress)
    from tsg.plan import doctor as plan_doctor

    return plan_doctor.examine(connection, progress=progress)
