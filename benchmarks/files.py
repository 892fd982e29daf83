"""On SQLite: this package beside the published one and beside plain SQL, in turns."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import task_state_guard  # type: ignore[import-untyped]
from sqlalchemy.orm import Session

import tsg
from benchmarks import raw
from benchmarks.measure import GRACES, copy_of, healthy, remove, say, seconds, size
from benchmarks.results import BARE, OURS, PUBLISHED, RAW, Row
from benchmarks.sample import NOW, Layout, build_ours, build_published

LIVES = 200
BEATS = 300
AT_ONCE = 10_000
IN_A_SESSION = 1000
#: Up to this many tasks a closed file is read from a private copy, by default.
SNAPSHOT_TASKS = 100_000

Work = Callable[[], object]


def sweeps(folder: Path, count: int, rounds: int, parts: Collection[str]) -> list[Row]:
    """Preview, doctor, apply, and doctor of what that made; each round on a fresh copy a side."""
    rows = {
        "preview": Row("preview", "reconcile, preview"),
        "before": Row("doctor", "doctor"),
        "apply": Row("apply", "reconcile, apply"),
        "after": Row("doctor", "doctor, after apply"),
    }
    wanted = [name for name, row in rows.items() if row.part in parts]
    if not wanted:
        return []
    sides = {PUBLISHED: wanted, OURS: wanted, RAW: [name for name in wanted if name != "preview"]}
    sides[BARE] = [name for name in wanted if name == "apply"]
    with _both(folder, Layout.MIXED, count) as files:
        for number in range(rounds):
            for side, names in ((side, names) for side, names in sides.items() if names):
                say(f"{', '.join(names)}: round {number + 1}, {side}")
                with copy_of(files[PUBLISHED if side == PUBLISHED else OURS]) as copy, _opened(side, copy) as ledger:
                    work = _work(side, ledger)
                    for name in names:
                        if name == "after" and "apply" not in names:
                            work["apply"]()
                        rows[name].add(side, seconds(work[name]))
    return [rows[name] for name in wanted]


def _work(side: str, ledger: Any) -> dict[str, Work]:
    if side in (RAW, BARE):
        apply, doctor = partial(raw.apply_on_sqlite, ledger), partial(raw.doctor_on_sqlite, ledger)
    else:
        apply, doctor = partial(ledger.reconcile, **GRACES), ledger.doctor

    def examine() -> None:
        healthy(doctor())

    work: dict[str, Work] = {"before": examine, "apply": apply, "after": examine}
    return work if side in (RAW, BARE) else work | {"preview": partial(ledger.reconcile, **GRACES, dry_run=True)}


def snapshot(folder: Path, count: int, rounds: int) -> list[Row]:
    """A preview of a closed file: opened, looked at, closed, without a byte of it changed by ours."""
    count = min(count, SNAPSHOT_TASKS)
    row = Row("snapshot", f"a closed file of {count:,}: open, preview, close")

    def ours(copy: Path) -> None:
        with tsg.Ledger(copy, read_only=True, clock=lambda: NOW) as ledger:
            ledger.reconcile(**GRACES, dry_run=True)

    def published(copy: Path) -> None:
        task_state_guard.Ledger(copy, clock=lambda: NOW).reconcile(**GRACES, dry_run=True)

    with _both(folder, Layout.MIXED, count) as files:
        for _ in range(rounds):
            for side, work in ((PUBLISHED, published), (OURS, ours)):
                with copy_of(files[side]) as copy:
                    row.add(side, seconds(partial(work, copy)))
    return [row]


def verbs(folder: Path, count: int, rounds: int, parts: Collection[str]) -> list[Row]:
    """One transition after another, each in a transaction of its own; and many in one."""
    one_by_one = [Row("verbs", f"{verb}, one task") for verb in ("create", "start", "close", "deliver")]
    all_four = Row("verbs", "create, start, close, deliver: each")
    session = Row("session", f"the same in a host's session, {IN_A_SESSION:,} tasks at once: each")
    beat = Row("heartbeat", "heartbeat, one task")
    beats = Row("heartbeat", f"heartbeat_many, {AT_ONCE:,} tasks: each")
    with _both(folder, Layout.MIXED, count) as files:
        ids = _running(files[OURS])
        for number in range(rounds):
            for side in (PUBLISHED, OURS):
                say(f"verbs: round {number + 1}, {side}")
                with copy_of(files[side]) as copy, _opened(side, copy) as ledger:
                    if {"verbs", "session"} & set(parts):
                        taken = _lives(ledger)
                        for row, each in zip(one_by_one, taken, strict=True):
                            row.add(side, each)
                        all_four.add(side, sum(taken) / 4)
                    if "heartbeat" in parts:
                        beat.add(side, seconds(partial(_beat, ledger, ids[:BEATS])) / len(ids[:BEATS]))
                        if side == OURS:
                            beats.add(side, seconds(partial(ledger.heartbeat_many, ids)) / len(ids))
            if "session" in parts:
                session.add(OURS, _session_lives(folder / "session.sqlite"))
    if all_four.readings and session.readings:
        session.readings[PUBLISHED] = all_four.readings[PUBLISHED]
    if beat.readings:
        beats.title = f"heartbeat_many, {len(ids):,} tasks: each"
        beats.readings[PUBLISHED] = beat.readings[PUBLISHED]
    rows = [*one_by_one, all_four, session, beat, beats]
    return [row for row in rows if row.part in parts]


def _lives(ledger: Any) -> list[float]:
    ids: list[str] = []
    work: tuple[Callable[[int], object], ...] = (
        lambda _: ids.append(ledger.create_task().id),
        lambda n: ledger.start_task(ids[n]),
        lambda n: ledger.close_task(ids[n], "succeeded", code="completed"),
        lambda n: ledger.set_delivery(ids[n], "delivered", code="transport_acknowledged"),
    )
    return [seconds(partial(_for_all, verb)) / LIVES for verb in work]


def _for_all(verb: Callable[[int], object]) -> None:
    for number in range(LIVES):
        verb(number)


def _beat(ledger: Any, ids: list[str]) -> None:
    for task_id in ids:
        ledger.heartbeat(task_id)


def _running(path: Path) -> list[str]:
    # In the order of their ids, which is none: they lie everywhere.
    with closing(sqlite3.connect(path)) as connection:
        found = "SELECT id FROM tsg_tasks WHERE status = 'running' ORDER BY id LIMIT ?"
        return [task_id for (task_id,) in connection.execute(found, (AT_ONCE,))]


def _session_lives(path: Path) -> float:
    """On an engine that an application made, with its defaults; every verb is flushed."""
    engine = sa.create_engine(f"sqlite:///{path}")
    tsg.upgrade(engine)

    def run() -> None:
        with Session(engine) as session, session.begin():
            tasks = [tsg.Task() for _ in range(IN_A_SESSION)]
            session.add_all(tasks)
            session.flush()
            for task in tasks:
                task.start()
            session.flush()
            for task in tasks:
                task.close("succeeded", "completed")
            session.flush()
            for task in tasks:
                task.deliver("delivered", "transport_acknowledged")

    try:
        return seconds(run) / IN_A_SESSION / 4
    finally:
        engine.dispose()
        remove(path)


def sizes(folder: Path, count: int) -> list[Row]:
    """The bytes of a file of closed and delivered tasks, each with its four events, a task."""
    row = Row("size", "database, a finished task with its events", "bytes")
    with _both(folder, Layout.FINISHED, count) as files:
        for side, path in files.items():
            row.add(side, size(path) / count)
    return [row]


@contextmanager
def _both(folder: Path, layout: Layout, count: int) -> Iterator[dict[str, Path]]:
    """The same tasks in a file of the published package and in one of ours, gone afterwards."""
    files = {PUBLISHED: folder / "published.sqlite", OURS: folder / "ours.sqlite"}
    say(f"a {layout.value} sample of {count:,} tasks, twice")
    build_published(files[PUBLISHED], layout, count)
    build_ours(files[OURS], layout, count)
    try:
        yield files
    finally:
        for path in files.values():
            remove(path)


@contextmanager
def _opened(side: str, path: Path) -> Iterator[Any]:
    if side == PUBLISHED:
        yield task_state_guard.Ledger(path, clock=lambda: NOW)
    elif side == OURS:
        with tsg.Ledger(path, clock=lambda: NOW) as ledger:
            yield ledger
    else:
        with closing(raw.open_sqlite(path, bare=side == BARE)) as connection:
            yield connection
