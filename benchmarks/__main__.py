"""``make bench``: medians of five, in turns, as ratios to the published package.

python -m benchmarks [TASKS]
"""

from __future__ import annotations

import platform
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy
import task_state_guard

import tsg
from benchmarks import sample

ROUNDS = 5
LIVES = 200
BEATS = 1000
GRACES = {"active_grace_seconds": 600, "delivery_grace_seconds": 600}

Side = Callable[..., Any]


def main(count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="tsg-bench-") as name:
        folder = Path(name)
        published, ours = folder / "published.sqlite", folder / "ours.sqlite"
        sample.build(published, count)
        shutil.copyfile(published, ours)
        with tsg.Ledger(ours, adopt=True, clock=lambda: sample.NOW):
            pass
        _vacuum(published, ours)
        sides: dict[str, tuple[Path, Side]] = {
            "published": (published, task_state_guard.Ledger),
            "ours": (ours, tsg.Ledger),
        }
        rows = {
            "reconcile, preview": _compare(sides, folder, lambda ledger: ledger.reconcile(**GRACES, dry_run=True)),
            "reconcile, apply": _compare(sides, folder, lambda ledger: ledger.reconcile(**GRACES)),
            "doctor": _compare(sides, folder, _healthy),
            "create, start, close, deliver": _compare(sides, folder, _live, per=LIVES * 4),
            "heartbeat": _compare(sides, folder, _beat, per=BEATS),
        }
        sizes = {side: path.stat().st_size for side, (path, _) in sides.items()}
    print(
        f"{count:,} tasks; Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, "
        f"SQLAlchemy {sqlalchemy.__version__}, {platform.machine()}; medians of {ROUNDS}, in turns.\n"
    )
    print("| | published package | tsg | times as fast |\n|---|---|---|---|")
    for title, (before, after, ratio) in rows.items():
        print(f"| {title} | {_seconds(before)} | {_seconds(after)} | {ratio:.1f} |")
    print(f"\nFile: {sizes['ours'] / sizes['published']:.2f} of the published package's size.")


def _compare(
    sides: dict[str, tuple[Path, Side]], folder: Path, work: Callable[[Any], object], per: int = 1
) -> tuple[float, float, float]:
    """Seconds a piece of work on either side, and the median of the ratios of the rounds."""
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, (source, make) in sides.items():
            copy = folder / f"copy-{side}.sqlite"
            shutil.copyfile(source, copy)
            copy.chmod(0o600)
            ledger = make(copy, clock=lambda: sample.NOW)
            started = time.perf_counter()
            work(ledger)
            taken[side].append((time.perf_counter() - started) / per)
            if isinstance(ledger, tsg.Ledger):
                ledger.close()
    ratios = [before / after for before, after in zip(taken["published"], taken["ours"], strict=True)]
    return statistics.median(taken["published"]), statistics.median(taken["ours"]), statistics.median(ratios)


def _healthy(ledger: Any) -> None:
    if not ledger.doctor()["healthy"]:
        raise SystemExit("the sample is not healthy")


def _live(ledger: Any) -> None:
    for _ in range(LIVES):
        task = ledger.create_task()
        ledger.start_task(task.id)
        ledger.close_task(task.id, "succeeded", code="completed")
        ledger.set_delivery(task.id, "delivered", code="transport_acknowledged")


def _beat(ledger: Any) -> None:
    task = ledger.create_task()
    ledger.start_task(task.id)
    for _ in range(BEATS):
        ledger.heartbeat(task.id)


def _vacuum(*paths: Path) -> None:
    for path in paths:
        connection = sqlite3.connect(path)
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.2f} ms"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30_000)
