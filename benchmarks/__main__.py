"""``make bench`` and ``make bench-full``: everything is measured in turns, and every reading is kept.

python -m benchmarks [--tasks N] [--largest M] [--rounds R] [--only PART,... [--add]] [--name NAME]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path

from benchmarks import busy, files, postgresql, report, scale, start
from benchmarks.measure import say
from benchmarks.results import FOLDER, Results, Row, load, surroundings

PARTS = (
    "preview", "snapshot", "apply", "doctor", "verbs", "session", "heartbeat", "size", "memory", "flat", "postgresql",
    "busy", "start",
)  # fmt: skip


def main() -> None:
    """Measure what is asked for, and write it down."""
    asked = _arguments()
    parts, count, rounds = asked.only, asked.tasks, asked.rounds
    sizes = scale.sizes_up_to(count, asked.largest)
    path = FOLDER / f"{asked.name}.json"
    results = Results(count, asked.largest, rounds, about=surroundings())
    if asked.add:
        results.keep(load(path), parts)

    def measure(wanted: Collection[str], work: Callable[[Path], list[Row]]) -> None:
        if parts & set(wanted):
            # A folder of its own each: what an error leaves is in nobody's way.
            with tempfile.TemporaryDirectory(prefix="tsg-bench-", dir=asked.folder) as folder:
                results.rows += work(Path(folder))
            results.save(path)

    measure(("preview", "apply", "doctor"), lambda folder: files.sweeps(folder, count, rounds, parts))
    measure(("snapshot",), lambda folder: files.snapshot(folder, count, rounds))
    measure(("verbs", "session", "heartbeat"), lambda folder: files.verbs(folder, count, rounds, parts))
    measure(("size",), lambda folder: files.sizes(folder, count))
    measure(("start",), start.starts)
    measure(("busy",), lambda folder: busy.waits(folder, count, rounds))
    measure(("flat",), lambda folder: scale.flatness_of_files(folder, sizes, rounds))
    measure(("memory",), lambda folder: scale.memory_growth(folder, sizes, rounds))
    with postgresql.place() if parts & {"flat", "postgresql"} else nullcontext() as server:
        if server is not None:
            results.about["postgresql"] = str(server.version)
            measure(("postgresql",), lambda _: postgresql.sweeps(server, count, rounds))
            measure(("flat",), lambda _: scale.flatness_on_postgresql(server, sizes, rounds))
    say(f"written to {path}")
    print(report.markdown(results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--tasks", type=int, default=100_000, help="in the sample that most is measured on")
    parser.add_argument("--largest", type=int, help="of the samples for flatness and memory; ten times as many")
    parser.add_argument("--rounds", type=int, help="5 up to 100,000 tasks, 3 for more")
    parser.add_argument("--only", type=_parts, default=frozenset(PARTS), metavar="PART,...", help=", ".join(PARTS))
    parser.add_argument("--add", action="store_true", help="keep the other parts of the file that is there")
    parser.add_argument("--name", default="latest", help="of the file in benchmarks/results")
    parser.add_argument("--folder", type=Path, help="for the samples, on a local disk; the system's temporary one")
    asked = parser.parse_args()
    if asked.largest is None:
        asked.largest = asked.tasks * 10
    if asked.rounds is None:
        asked.rounds = 5 if asked.tasks <= 100_000 else 3
    if asked.tasks < 1000 or asked.tasks % 1000 or asked.largest < asked.tasks or asked.rounds < 1:
        parser.error("thousands of tasks, and a round at least")
    return asked


def _parts(text: str) -> frozenset[str]:
    parts = frozenset(text.split(","))
    if not parts <= set(PARTS):
        raise argparse.ArgumentTypeError(f"of {', '.join(PARTS)}")
    return parts


if __name__ == "__main__":
    main()
