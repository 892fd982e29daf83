"""What the tests stand on: real files in a private folder, a clock that does as it is told, real commands."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tsg import Ledger

DATA = Path(__file__).parent / "data"
LEGACY = DATA / "legacy"


class FakeClock:
    """Seconds since the epoch, which pass only when a test says so. Counts how often it was read."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now: Any = now
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that a ledger may live in."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    return private


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "ledger.sqlite"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ledger(path: Path, clock: FakeClock) -> Iterator[Ledger]:
    with Ledger(path, clock=clock) as opened:
        yield opened


@pytest.fixture
def legacy(folder: Path) -> Callable[[str], Path]:
    """A private copy of one of the published package's files: v1, v2, v1-unsafe-reason."""

    def copy(name: str) -> Path:
        target = folder / f"{name}.sqlite"
        shutil.copyfile(LEGACY / f"{name}.sqlite", target)
        target.chmod(0o600)
        return target

    return copy


def expected(name: str) -> Any:
    """What the published package reported on those files."""
    return json.loads((LEGACY / f"{name}.json").read_text())


def raw(path: Path) -> sqlite3.Connection:
    """A connection of somebody else's, without our listeners; every statement commits by itself."""
    return sqlite3.connect(path, isolation_level=None)


def tsg(*arguments: str | bytes | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """The real command line, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tsg", *arguments],
        capture_output=True,
        check=False,
        env={**os.environ, **(env or {})},
        timeout=120,
    )


def snapshot(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Every file of a folder by name: its bytes, mode and modification time."""
    return {
        entry.name: (entry.read_bytes(), entry.stat().st_mode, entry.stat().st_mtime_ns)
        for entry in sorted(folder.iterdir())
    }
