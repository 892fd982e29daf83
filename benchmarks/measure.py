"""One reading of a piece of work, and the files it is taken on."""

from __future__ import annotations

import gc
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GRACES: dict[str, Any] = {"active_grace_seconds": 600.0, "delivery_grace_seconds": 600.0}


def seconds(work: Callable[[], object]) -> float:
    """How long it takes, with nothing left over from before: neither rubbish nor pages to be written back."""
    gc.collect()
    os.sync()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def copy_of(path: Path) -> Iterator[Path]:
    """A fresh copy of a closed file, gone afterwards."""
    copy = path.with_name("copy.sqlite")
    shutil.copyfile(path, copy)
    copy.chmod(0o600)
    try:
        yield copy
    finally:
        gc.collect()
        remove(copy)


def remove(path: Path) -> None:
    """Remove a file with what SQLite has beside it."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def size(path: Path) -> int:
    """The bytes of a closed file, all of it in the one."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path.stat().st_size


def healthy(report: object) -> None:
    """That a doctor's report, or the answer of the plain SQL, says so."""
    if not (report["healthy"] if isinstance(report, dict) else report):
        raise SystemExit("the sample is not healthy")


def say(text: str) -> None:
    """Tell whoever waits."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
