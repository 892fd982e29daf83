"""How long a command takes that does next to nothing."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import tsg
from benchmarks.measure import remove, seconds
from benchmarks.results import Row

RUNS = 15
COMMAND, IMPORTS = "tsg doctor", "import sqlalchemy, click"


def starts(folder: Path) -> list[Row]:
    """`tsg doctor` on a small ledger, and the interpreter with nothing but the two imports."""
    row = Row("start", "tsg --db LEDGER doctor")
    path = folder / "small.sqlite"
    with tsg.Ledger(path) as ledger:
        ledger.start_task(ledger.create_task().id)
    commands: dict[str, list[str]] = {
        IMPORTS: [sys.executable, "-c", IMPORTS],
        COMMAND: [str(Path(sys.executable).with_name("tsg")), "--db", str(path), "doctor"],
    }
    for number in range(RUNS + 1):
        for side, command in commands.items():
            taken = seconds(partial(subprocess.run, command, stdout=subprocess.DEVNULL, check=True))
            # The first of each finds nothing in the cache.
            if number:
                row.add(side, taken)
    remove(path)
    return [row]
