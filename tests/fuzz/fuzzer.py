"""Coverage-guided fuzzing of what reads bytes of somebody else's: ``python -m tests.fuzz.fuzzer --seconds 5``.

Each target takes what libFuzzer made and may only raise what the package raises on purpose. Anything else ends the run
with the input that did it, as does a call that takes too long or too much memory.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["tsg"]):
    import tsg
    import tsg.checkup
    import tsg.cli.doctor
    import tsg.cli.ledger
    import tsg.cli.schema
    import tsg.cli.upkeep
    import tsg.ledger
    import tsg.schema
    from tsg import opening, states, values
    from tsg.cli import main

from tests.fuzz.hostile import AN_ID, MARKER, NUMERIC_TEXTS, TEXTS
from tests.fuzz.targets import TASKS, commands, fill

Data = atheris.FuzzedDataProvider
Target = Callable[[bytes], None]


class Clock:
    now: Any = 1_000.0

    def __call__(self) -> float:
        told: float = self.now
        return told


def something(data: Data) -> Any:
    """A value of any plain kind."""
    kind = data.ConsumeIntInRange(0, 9)
    if kind < 3:
        return data.ConsumeUnicode(data.ConsumeIntInRange(0, 60))
    if kind == 3:
        return data.ConsumeBytes(data.ConsumeIntInRange(0, 60))
    if kind == 4:
        return data.ConsumeFloat()
    if kind == 5:
        return data.ConsumeInt(data.ConsumeIntInRange(1, 40))
    if kind == 6:
        return data.PickValueInList([None, True, False, *TASKS, AN_ID])
    if kind == 7:
        return data.PickValueInList([*TEXTS, *NUMERIC_TEXTS])
    if kind == 8:
        return data.ConsumeString(data.ConsumeIntInRange(0, 60)).encode("utf-8", "surrogatepass")
    return [data.ConsumeUnicode(5), data.ConsumeFloat()]


def refused(call: Callable[[], object]) -> object:
    """What it gives; ``None`` where it refuses, and says nothing."""
    try:
        return call()
    except tsg.LedgerError as error:
        if MARKER in f"{error!r} {error.args}" or not (error.__context__ is None or error.__suppress_context__):
            raise AssertionError("a refusal that tells what was passed") from error
        return None


def values_target(folder: Path) -> Target:
    """The parsers of values: what they let through is exact, and parsing it again changes nothing."""
    parsers: list[Callable[[Any], object]] = [
        values.canonical_id,
        lambda value: values.number(value, "it"),
        lambda value: values.non_negative(value, "it"),
        values.moment,
        lambda value: values.whole(value, "it"),
        lambda value: values.flag(value, "it"),
        values.payload_digest,
        values.payload_fingerprint,
        states.task_target,
        states.delivery_target,
        tsg.schema.revision_named,
    ]

    def run(content: bytes) -> None:
        data = Data(content)
        parse = parsers[data.ConsumeIntInRange(0, len(parsers) - 1)]
        given = something(data)
        parsed = refused(lambda: parse(given))
        if parsed is not None and parse not in (values.payload_fingerprint,):
            assert type(parsed) in (str, int, float, bool, tsg.TaskStatus, tsg.DeliveryStatus), type(parsed)
            assert parse(parsed) == parsed

    return run


def places_target(folder: Path) -> Target:
    """What names a ledger: a path or a URL; nothing is opened."""
    os.chdir(folder)

    def run(content: bytes) -> None:
        data = Data(content)
        front = data.PickValueInList(
            ["", "", "sqlite://", "sqlite:///", "postgresql://", "postgresql+psycopg://u:p@h/"]
        )
        rest = data.ConsumeUnicode(200)
        place: Any = front + rest if data.ConsumeBool() else (front + rest).encode("utf-8", "surrogatepass")
        refused(lambda: opening.place_of(place))

    return run


def verbs_target(folder: Path) -> Target:
    """Verbs on one ledger: whatever they are given, it stays healthy."""
    clock = Clock()
    ledger = tsg.Ledger(folder / "ledger.sqlite", clock=clock)
    fill(ledger, clock)
    count = 0

    def run(content: bytes) -> None:
        nonlocal count
        data = Data(content)
        clock.now = something(data) if data.ConsumeProbability() < 0.2 else 2_000.0 + count
        for _ in range(data.ConsumeIntInRange(1, 4)):
            verb = data.ConsumeIntInRange(0, 9)
            one, other, third = (something(data) for _ in range(3))
            calls: list[Callable[[], object]] = [
                lambda one=one: ledger.get_task(one),
                lambda one=one: ledger.children_of(one),
                lambda one=one: ledger.start_task(one),
                lambda one=one: ledger.heartbeat(one),
                lambda one=one, other=other: ledger.heartbeat_many([one, other]),
                lambda one=one, other=other, third=third: ledger.close_task(one, other, code=third),
                lambda one=one, other=other, third=third: ledger.set_delivery(one, other, code=third),
                lambda one=one, other=other, third=third: ledger.create_task(
                    task_id=one, timeout_seconds=other, payload_hash=third
                ),
                lambda one=one, other=other, third=third: ledger.reconcile(
                    active_grace_seconds=one, delivery_grace_seconds=other, batch_size=None, parent_id=third
                ),
                lambda one=one, other=other: ledger.reconcile(
                    active_grace_seconds=one, delivery_grace_seconds=0, dry_run=True, batch_size=other
                ),
            ]
            answer = refused(calls[verb])
            if isinstance(answer, tsg.TaskRecord):
                assert ledger.get_task(answer.id) == answer
        count += 1
        if count % 50 == 0:
            assert ledger.doctor()["healthy"]

    return run


def command_line_target(folder: Path) -> Target:
    """The command line, within this process: one line, and a status of the contract."""
    os.chdir(folder)
    clock = Clock()
    with tsg.Ledger("ledger.sqlite", clock=clock) as ledger:
        fill(ledger, clock)
    known = {name: options for name, options in commands().items() if name != "demo"}

    def run(content: bytes) -> None:
        data = Data(content)
        name = data.PickValueInList(sorted(known))
        words = [name]
        for _ in range(data.ConsumeIntInRange(0, 5)):
            if known[name] and data.ConsumeBool():
                words.append(data.PickValueInList(known[name]))
            words.append(
                data.PickValueInList([*TEXTS, *NUMERIC_TEXTS, *TASKS, "failed", "0004"])
                if data.ConsumeBool()
                else data.ConsumeUnicode(40)
            )
        words = [word for word in words if word not in ("--help", "--progress", "base", "0001", "0002", "0003")]
        out, err, kept = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO(), sys.stdout
        try:
            with contextlib.redirect_stderr(err):
                sys.stdout = out
                main(["--db", "ledger.sqlite", *words])
        except SystemExit as left:
            status = left.code
        finally:
            sys.stdout = kept
        out.flush()
        told = out.buffer.getvalue()  # type: ignore[attr-defined]
        assert status in (0, 1, 2), (status, words)
        assert told.count(b"\n") == 1, words
        assert err.getvalue() == "", words
        assert MARKER.encode() not in told, words

    return run


def seed_file(folder: Path) -> bytes:
    """A closed ledger of the smallest pages, so that few bytes are between one structure and the next."""
    clock = Clock()
    with tsg.Ledger(folder / "whole.sqlite", clock=clock) as ledger:
        fill(ledger, clock)
    small = folder / "small.sqlite"
    with contextlib.closing(sqlite3.connect(folder / "whole.sqlite", isolation_level=None)) as connection:
        connection.execute("PRAGMA page_size = 512")
        connection.execute("VACUUM INTO ?", (str(small),))
    with contextlib.closing(sqlite3.connect(small, isolation_level=None)) as connection:
        assert connection.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
        assert connection.execute("PRAGMA page_size").fetchone() == (512,)
    return small.read_bytes()


def look_at(path: Path, as_it_is: bool) -> None:
    """One of the two ways to look at a file, which reads it or refuses."""
    if as_it_is:
        refused(lambda: tsg.checkup.examine_file(path))
        return
    ledger = refused(lambda: tsg.Ledger(path, read_only=True))
    if isinstance(ledger, tsg.Ledger):
        try:
            for identifier in TASKS:
                refused(lambda identifier=identifier: ledger.get_task(identifier))
            refused(lambda: ledger.children_of(TASKS[0]))
            refused(lambda: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0, dry_run=True))
            refused(lambda: ledger.prune(0, dry_run=True))
        finally:
            refused(ledger.close)


def damage_target(folder: Path) -> Target:
    """A file some of whose bytes are others: reading it gives an answer or one of our errors."""
    whole = seed_file(folder)
    path = folder / "damaged.sqlite"

    def run(content: bytes) -> None:
        data = Data(content)
        as_it_is = data.ConsumeBool()
        damaged = bytearray(whole)
        for _ in range(data.ConsumeIntInRange(1, 6)):
            # The first pages hold the header and the schema; and each page begins with what makes it one.
            page = data.ConsumeIntInRange(0, len(whole) // 512 - 1)
            at = page * 512 + (data.ConsumeIntInRange(0, 31) if data.ConsumeBool() else data.ConsumeIntInRange(0, 511))
            patch = data.ConsumeBytes(data.ConsumeIntInRange(1, 8))
            damaged[at : at + len(patch)] = patch
        if data.ConsumeProbability() < 0.1:
            del damaged[data.ConsumeIntInRange(0, len(damaged)) :]
        for suffix in ("", "-wal", "-shm", "-journal"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        path.write_bytes(damaged)
        path.chmod(0o600)
        look_at(path, as_it_is)

    return run


def schema_target(folder: Path) -> Target:
    """A file whose schema says something else: names, statements and versions of anybody's."""
    whole = seed_file(folder)
    path = folder / "other.sqlite"
    columns = ["type", "name", "tbl_name", "rootpage", "sql"]

    def run(content: bytes) -> None:
        data = Data(content)
        as_it_is = data.ConsumeBool()
        for suffix in ("", "-wal", "-shm", "-journal"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        path.write_bytes(whole)
        path.chmod(0o600)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            (count,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            connection.execute("PRAGMA writable_schema = ON")
            for _ in range(data.ConsumeIntInRange(1, 3)):
                row, column = data.ConsumeIntInRange(1, count), data.PickValueInList(columns)
                with contextlib.suppress(sqlite3.Error, UnicodeError, OverflowError):
                    if data.ConsumeProbability() < 0.3:
                        version = something(data)
                        connection.execute("UPDATE tsg_alembic_version SET version_num = ?", (version,))
                    elif data.ConsumeBool():
                        given = something(data)
                        connection.execute(f"UPDATE sqlite_master SET {column} = ? WHERE rowid = ?", (given, row))
                    else:
                        text, at = data.ConsumeUnicodeNoSurrogates(6), data.ConsumeIntInRange(1, 400)
                        connection.execute(
                            f"UPDATE sqlite_master SET {column} = substr({column}, 1, :at) || :text || "
                            f"substr({column}, :at + 3) WHERE rowid = :row",
                            {"at": at, "text": text, "row": row},
                        )
        look_at(path, as_it_is)

    return run


def planted_target(folder: Path) -> Target:
    """What the fuzzer must find, if it finds anything: a bug."""

    def run(content: bytes) -> None:
        given = Data(content).ConsumeUnicode(40)
        number = refused(lambda: values.number(given, "it"))
        if number is not None and number > 9:
            raise RuntimeError("planted")

    return run


TARGETS: dict[str, Callable[[Path], Target]] = {
    "values": values_target,
    "places": places_target,
    "verbs": verbs_target,
    "command_line": command_line_target,
    "damage": damage_target,
    "schema": schema_target,
    "planted": planted_target,
}


def fuzz(name: str, seconds: int, seed: int, folder: Path) -> None:
    """Run one target in this process, which libFuzzer ends."""
    corpus, work = folder / "corpus", folder / "work"
    for made in (corpus, work):
        made.mkdir(mode=0o700)
    chance = random.Random(seed)
    for number in range(40):
        (corpus / str(number)).write_bytes(chance.randbytes(200))
    options = [
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        "-rss_limit_mb=2048",
        "-timeout=20",
        "-max_len=4096",
        "-print_final_stats=1",
        f"-artifact_prefix={folder}/",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *options], TARGETS[name](work))
    atheris.Fuzz()


def run() -> int:
    """Run targets, each in a fork and a folder of its own; 0 where none found anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.fuzzer")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", required=True)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    found = 0
    for name in asked.target:
        print(f"== target {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="tsg-fuzz-") as folder:
            child = os.fork()
            if not child:
                fuzz(name, asked.seconds, asked.seed, Path(folder))
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"== status {status}", flush=True)
        found |= status
    return int(found != 0)


if __name__ == "__main__":
    sys.exit(run())
