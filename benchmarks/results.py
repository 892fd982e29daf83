"""What was measured, as it is kept: every single reading, with what tells where it comes from."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import shlex
import sqlite3
import statistics
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import tsg

FOLDER = Path(__file__).parent / "results"

PUBLISHED, OURS, RAW, BARE = "published package", "tsg", "plain SQL", "plain SQL, no CHECK, no trigger"


@dataclass
class Row:
    """One piece of work, measured on several sides, or at several sizes, in turns.

    Attributes:
        part: what it was measured with, and what the report puts it under.
        unit: of the readings: ``s``, ``bytes``, ``MB``, ``ms`` or nothing, where they are counted.
        readings: by side, or by size as text; one a round.
    """

    part: str
    title: str
    unit: str = "s"
    readings: dict[str, list[float]] = field(default_factory=dict)

    def add(self, side: object, reading: float) -> None:
        """Keep one more reading."""
        self.readings.setdefault(str(side), []).append(reading)

    def median(self, side: object) -> float:
        """The middle one of a side."""
        return statistics.median(self.readings[str(side)])

    def ratio(self, side: object, base: object) -> float | None:
        """A side's median by that of another; nothing where one was not measured, or is 0."""
        if not {str(side), str(base)} <= self.readings.keys() or not self.median(base):
            return None
        return self.median(side) / self.median(base)


@dataclass
class Results:
    """A whole run."""

    tasks: int
    largest: int
    rounds: int
    rows: list[Row] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)

    def part(self, name: str) -> list[Row]:
        """The rows of one part, in the order in which they were measured."""
        return [row for row in self.rows if row.part == name]

    def keep(self, earlier: Results, measured_again: Collection[str]) -> None:
        """Take over the other parts of an earlier run of the same sizes."""
        if (earlier.tasks, earlier.largest) != (self.tasks, self.largest):
            raise SystemExit("the file that is there is of other sizes")
        self.rows = [row for row in earlier.rows if row.part not in measured_again]
        self.about = earlier.about | self.about | {"command": f"{earlier.about['command']}; {self.about['command']}"}

    def save(self, path: Path) -> None:
        """Write it down."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def load(path: Path) -> Results:
    """A run that was written down."""
    kept = json.loads(path.read_text())
    return Results(**(kept | {"rows": [Row(**row) for row in kept["rows"]]}))


def surroundings() -> dict[str, str]:
    """Where and with what this runs."""
    packages = ("sqlalchemy", "alembic", "click", "psycopg", "task-state-guard")
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "machine": platform.platform(),
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "tsg": tsg.__version__,
        **{package: version(package) for package in packages},
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
