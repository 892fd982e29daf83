"""How far the memory of a process grows while it works: ``python -m benchmarks.memory WORK PATH``.

A process of its own, in which nothing else has been done before, prints the growth in MB (10^6 bytes) from the
open ledger to the peak of the work.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import tsg
from benchmarks.measure import GRACES, healthy
from benchmarks.sample import NOW

WORKS = ("preview", "doctor", "apply")


def growth(work: str, path: Path) -> float:
    """The same, asked from outside."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", work, path], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def _peak() -> float:
    """The most that this process ever had in memory, in bytes."""
    try:
        # ru_maxrss begins at what the parent had: Linux hands it over an exec.
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(work: str, path: str) -> None:
    """Do it, and say how far memory grew."""
    with tsg.Ledger(path, clock=lambda: NOW) as ledger:
        before = _peak()
        if work == "doctor":
            healthy(ledger.doctor())
        else:
            ledger.reconcile(**GRACES, dry_run=work == "preview")
        after = _peak()
    print((after - before) / 1e6)


if __name__ == "__main__":
    main(*sys.argv[1:])
