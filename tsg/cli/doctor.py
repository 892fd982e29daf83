"""The command that looks at a ledger as it is; it imports no more than that takes."""

from __future__ import annotations

from typing import Any

import click

from tsg.checkup import examine_file
from tsg.cli import Answer, answer
from tsg.cli.progress import bar, progress_option

__all__ = ["doctor"]


@click.command()
@progress_option
@click.pass_obj
def doctor(place: dict[str, Any], progress: bool) -> Answer:
    """Prove that the whole history is consistent, or count what is not."""
    with bar(progress, "doctor") as shown:
        report = examine_file(**place, progress=shown)
    return answer({**report}, status=0 if report["healthy"] else 1)
