"""What should not grow with the ledger: the time of a sweep with its history, and the memory of any work."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import tsg
from benchmarks import memory, postgresql
from benchmarks.measure import GRACES, copy_of, remove, say, seconds
from benchmarks.results import Row
from benchmarks.sample import ACTIVE, NOW, Layout, build_ours

#: A preview of so few is over in no time: one reading is of as many.
PREVIEWS = 10


def sizes_up_to(tasks: int, largest: int) -> list[int]:
    """From 100,000, or fewer where all of it is smaller, by tens to the largest."""
    sizes = [min(100_000, tasks)]
    while sizes[-1] < largest:
        sizes.append(min(sizes[-1] * 10, largest))
    return sizes


def memory_growth(folder: Path, sizes: Sequence[int], rounds: int) -> list[Row]:
    """Of each work in a process of its own, at each size."""
    rows = [Row("memory", work, "MB") for work in memory.WORKS]
    for count in sizes:
        path = folder / "ours.sqlite"
        say(f"memory: a sample of {count:,} tasks")
        build_ours(path, Layout.MIXED, count)
        for number in range(rounds):
            with copy_of(path) as copy:
                for row in rows:
                    say(f"memory: {count:,}, round {number + 1}, {row.title}")
                    row.add(count, memory.growth(row.title, copy))
        remove(path)
    return rows


def flatness_of_files(folder: Path, sizes: Sequence[int], rounds: int) -> list[Row]:
    """Preview and apply for 1,000 active tasks among ever more that have finished."""
    rows = [Row("flat", f"{work}, SQLite") for work in ("preview", "apply")]
    files = {count: folder / f"ours-{count}.sqlite" for count in sizes}
    for count, path in files.items():
        say(f"flat, SQLite: {ACTIVE:,} active among {count:,}")
        build_ours(path, Layout.SPARSE, count + ACTIVE)
    for number in range(rounds):
        for count, path in files.items():
            say(f"flat, SQLite: round {number + 1}, {count:,}")
            with copy_of(path) as copy, tsg.Ledger(copy, clock=lambda: NOW) as ledger:
                _sweep(rows, count, ledger)
    for path in files.values():
        remove(path)
    return rows


def flatness_on_postgresql(server: postgresql.Place, sizes: Sequence[int], rounds: int) -> list[Row]:
    """The same on a server."""
    rows = [Row("flat", f"{work}, PostgreSQL") for work in ("preview", "apply")]
    samples: dict[int, str] = {}
    for count in sizes:
        say(f"flat, PostgreSQL: {ACTIVE:,} active among {count:,}")
        samples[count] = server.build(Layout.SPARSE, count + ACTIVE)
    for number in range(rounds):
        for count, name in samples.items():
            say(f"flat, PostgreSQL: round {number + 1}, {count:,}")
            with server.copy_of(name) as url, closing(tsg.Ledger(url, clock=lambda: NOW)) as ledger:
                _sweep(rows, count, ledger)
    for name in samples.values():
        server.drop(name)
    return rows


def _sweep(rows: Sequence[Row], count: int, ledger: tsg.Ledger) -> None:
    preview, apply = rows
    # The first on a connection also reads the schema.
    ledger.reconcile(**GRACES, dry_run=True)
    preview.add(count, seconds(partial(_preview, ledger)) / PREVIEWS)
    apply.add(count, seconds(partial(ledger.reconcile, **GRACES)))


def _preview(ledger: tsg.Ledger) -> None:
    for _ in range(PREVIEWS):
        ledger.reconcile(**GRACES, dry_run=True)
