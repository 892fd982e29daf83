"""A sweep in batches while others beat all the while: how long they wait, and whether one is ever refused."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path

import tsg
from benchmarks.measure import GRACES, copy_of, remove, say
from benchmarks.results import Row
from benchmarks.sample import NOW, Layout, build_ours

BEATERS = 8
BATCH = 5000
_TASKS_EACH = 10
_PAUSE = 0.01
_LEAD = 1.0


def waits(folder: Path, count: int, rounds: int) -> list[Row]:
    """Each of the processes beats for tasks of its own, with a pause of 10 ms, as long as the sweep lasts."""
    rows = {
        "p99": Row("busy", "wait of a heartbeat, 99th percentile", "ms"),
        "median": Row("busy", "wait of a heartbeat, median", "ms"),
        "longest": Row("busy", "wait of a heartbeat, longest", "ms"),
        "beats": Row("busy", "heartbeats", ""),
        "errors": Row("busy", "errors", ""),
        "sweep": Row("busy", f"the sweep, in batches of {BATCH:,}", "s"),
    }
    path = folder / "ours.sqlite"
    build_ours(path, Layout.MIXED, count)
    for number in range(rounds):
        say(f"busy: round {number + 1}")
        with copy_of(path) as copy:
            for name, reading in _sweep_among_beaters(copy).items():
                rows[name].add("tsg", reading)
    remove(path)
    return list(rows.values())


def _sweep_among_beaters(path: Path) -> dict[str, float]:
    processes = multiprocessing.get_context("spawn")
    stop, told = processes.Event(), processes.Queue()
    with tsg.Ledger(path, clock=lambda: NOW) as ledger:
        ids = [[ledger.create_task().id for _ in range(_TASKS_EACH)] for _ in range(BEATERS)]
        for task_id in (task_id for each in ids for task_id in each):
            ledger.start_task(task_id)
        beaters = [processes.Process(target=_beat, args=(path, each, stop, told)) for each in ids]
        for beater in beaters:
            beater.start()
        for _ in beaters:
            told.get()
        time.sleep(_LEAD)
        began = time.time()
        ledger.reconcile(**GRACES, batch_size=BATCH)
        ended = time.time()
        stop.set()
        heard = [told.get() for _ in beaters]
        for beater in beaters:
            beater.join()
    # Those that lay in the time of the sweep, in whole or in part.
    beats = sorted(
        (until - since) * 1e3 for each, _ in heard for since, until in each if until > began and since < ended
    )
    return {
        "p99": statistics.quantiles(beats, n=100, method="inclusive")[98],
        "median": statistics.median(beats),
        "longest": beats[-1],
        "beats": len(beats),
        "errors": sum(errors for _, errors in heard),
        "sweep": ended - began,
    }


def _beat(path: Path, ids: list[str], stop: Event, told: Queue[object]) -> None:
    beats: list[tuple[float, float]] = []
    errors = number = 0
    with tsg.Ledger(path, clock=_now) as ledger:
        told.put("ready")
        while not stop.is_set():
            since = time.time()
            try:
                ledger.heartbeat(ids[number % len(ids)])
            except tsg.LedgerError:
                errors += 1
            beats.append((since, time.time()))
            number += 1
            time.sleep(_PAUSE)
    told.put((beats, errors))


def _now() -> float:
    return NOW
