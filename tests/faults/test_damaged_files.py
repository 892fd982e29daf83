"""A ledger's files damaged where they lie, page by page and bit by bit: told, or nothing was lost by it.

What doctor calls healthy is compared, every time, with a second opinion: all rows are there as they were, and SQLite's
full check finds its indexes to agree with them.
"""

from __future__ import annotations

import io
import os
import random
import sqlite3
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa

import tsg
from tests.conftest import FakeClock, raw, snapshot
from tests.damage import EVENT_COLUMNS, TASK_COLUMNS, some_kinds
from tests.tallies import Tally
from tsg import Ledger, LedgerError, StateConflict, doctor
from tsg.checkup import examine_file

pytestmark = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")

Rows = dict[str, list[tuple[Any, ...]]]
Files = dict[str, bytes]

MAIN, WAL, SHM = "ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"
SIZES = (512, 4096)
WAL_HEADER, FRAME_HEADER = 32, 24


class Sound(NamedTuple):
    """A ledger's closed file: its bytes, what they were when half of the tasks were there, its free pages, its rows."""

    size: int
    content: bytes
    earlier: bytes
    free: set[int]
    rows: Rows

    @property
    def pages(self) -> int:
        return len(self.content) // self.size

    def page(self, number: int) -> slice:
        return slice(number * self.size, (number + 1) * self.size)


class Live(NamedTuple):
    """A ledger as a killed process leaves it: its main file and its WAL, and how long that was after each commit."""

    files: Files
    lengths: list[int]
    states: list[Rows]

    def until(self, length: int) -> Rows:
        """The rows that a WAL of that length holds."""
        return self.states[sum(end <= length for end in self.lengths) - 1]


def rows(connection: sqlite3.Connection) -> Rows:
    columns = {"tsg_tasks": TASK_COLUMNS, "tsg_task_events": EVENT_COLUMNS}
    # By the tables themselves: an index may be what is damaged.
    return {
        table: connection.execute(f"SELECT {', '.join(names)} FROM {table} NOT INDEXED ORDER BY 1, 2").fetchall()
        for table, names in columns.items()
    }


def second_opinion(path: Path) -> Rows | None:
    """All rows, where SQLite's full check finds nothing; CHECKs and indexes included."""
    with closing(raw(path)) as connection:
        try:
            sound = connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            return rows(connection) if sound else None
        except sqlite3.DatabaseError:
            return None


def put(folder: Path, files: Files) -> Path:
    """Exactly these files in the folder, private."""
    for entry in folder.iterdir():
        entry.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    return folder / MAIN


def verdict(path: Path) -> doctor.Report | None:
    """Doctor's report on a file, or nothing where it is one clear refusal."""
    try:
        return examine_file(path)
    except LedgerError:
        return None


_examined: list[Path] = []
#: One for all files, since its statements are made but once; it keeps no connection.
_application = sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(_examined[-1]), poolclass=sa.NullPool)


def is_healthy(path: Path) -> bool:
    """What doctor says on a connection of an application's."""
    _examined[:] = [path]
    try:
        with _application.connect() as connection:
            return doctor.examine(connection)["healthy"]
    except StateConflict:
        return False


def look_without_trace(path: Path) -> None:
    """Open it read-only, look at everything; refused or answered, and nothing of it changed."""

    def look() -> dict[str, tuple[object, ...]]:
        return {n: seen[1:2] if n == SHM else seen for n, seen in snapshot(path.parent).items()}

    before = look()
    try:
        with Ledger(path, read_only=True) as ledger:
            for question in (
                ledger.doctor,
                ledger.storage_info,
                lambda: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0, dry_run=True),
                lambda: ledger.prune(0, dry_run=True),
            ):
                try:
                    question()
                except StateConflict:
                    pass
    except LedgerError:
        pass
    assert look() == before


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Sound]:
    """By its page size, a ledger of every kind of task with a few pages free."""
    found = {}
    for size in SIZES:
        folder = tmp_path_factory.mktemp(f"pages_{size}")
        folder.chmod(0o700)
        path, clock = folder / MAIN, FakeClock()
        Ledger(path).close()
        with closing(raw(path)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute(f"PRAGMA page_size = {size}")
            connection.execute("VACUUM")
            connection.execute("PRAGMA journal_mode = WAL")
        contents = []
        for _ in range(2):
            with Ledger(path, clock=clock) as ledger:
                some_kinds(ledger, clock)
                some_kinds(ledger, clock)
            with closing(raw(path)) as connection:
                connection.execute("PRAGMA secure_delete = OFF")
                connection.execute("CREATE TABLE passing AS SELECT ? AS filler", (b"\x5a" * size * 4,))
                connection.execute("DROP TABLE passing")
            contents.append(path.read_bytes())
        earlier, content = contents
        with closing(raw(path)) as connection:
            kept = rows(connection)
        found[size] = Sound(size, content, earlier, free_pages(content, size), kept)
        assert len(found[size].free) >= 3
        assert is_healthy(path)
    return found


def free_pages(content: bytes, size: int) -> set[int]:
    """The pages, counted from 0, that hold nothing: the leaves of SQLite's list of free pages."""
    found: set[int] = set()
    trunk = int.from_bytes(content[32:36], "big")
    while trunk:
        page = content[(trunk - 1) * size : trunk * size]
        numbers = [int.from_bytes(page[at : at + 4], "big") for at in range(0, size, 4)]
        found |= {number - 1 for number in numbers[2 : 2 + numbers[1]]}
        trunk = numbers[0]
    return found


Overwriting = Callable[[random.Random, Sound, int], bytes]

OVERWRITTEN: dict[str, Overwriting] = {
    "zeros": lambda chance, sound, page: bytes(sound.size),
    "ones": lambda chance, sound, page: b"\xff" * sound.size,
    "noise": lambda chance, sound, page: chance.randbytes(sound.size),
    "the next page": lambda chance, sound, page: sound.content[sound.page((page + 1) % sound.pages)],
    "the page before": lambda chance, sound, page: sound.content[sound.page((page - 1) % sound.pages)],
    "the page as it was": lambda chance, sound, page: sound.earlier[sound.page(page)],
}


@pytest.mark.parametrize("pattern", OVERWRITTEN)
@pytest.mark.parametrize("size", SIZES)
def test_a_page_overwritten_is_told_unless_nothing_was_in_it(
    folder: Path, sound: dict[int, Sound], size: int, pattern: str, tally: Tally
) -> None:
    whole, chance = sound[size], random.Random(17)
    unnoticed, harmless, tried = [], set(), 0
    for page in range(whole.pages):
        other = OVERWRITTEN[pattern](chance, whole, page)
        place = whole.page(page)
        if other in (b"", whole.content[place]):
            continue
        path = put(folder, {MAIN: whole.content[: place.start] + other + whole.content[place.stop :]})
        tried += 1
        if size == 4096 and pattern in ("noise", "the page before"):
            look_without_trace(path)
            report = verdict(path)
            assert (report is not None and report["healthy"]) is is_healthy(path)
        if is_healthy(path):
            if second_opinion(path) == whole.rows:
                harmless.add(page)
            else:
                unnoticed.append(page + 1)
    tally("a page overwritten", tried, len(unnoticed))
    assert tried > whole.pages // 6
    if pattern in ("zeros", "ones", "noise"):
        assert harmless == whole.free
    assert unnoticed == []
    assert is_healthy(put(folder, {MAIN: whole.content}))
    assert second_opinion(folder / MAIN) == whole.rows


@pytest.mark.parametrize("pattern", ["noise", "the page before"])
def test_over_a_page_overwritten_every_method_refuses_or_answers_and_nothing_is_made_anew(
    folder: Path, sound: dict[int, Sound], pattern: str, tally: Tally
) -> None:
    whole, chance = sound[4096], random.Random(18)
    known = [row[1] for row in whole.rows["tsg_tasks"]]
    refused = 0
    for page in range(whole.pages):
        place = whole.page(page)
        other = OVERWRITTEN[pattern](chance, whole, page)
        path = put(folder, {MAIN: whole.content[: place.start] + other + whole.content[place.stop :]})
        try:
            with Ledger(path, clock=FakeClock(1e6)) as ledger:
                for name, deed in deeds(ledger, known).items():
                    try:
                        deed()
                    except LedgerError:
                        refused += 1
        except LedgerError:
            refused += 1
        report = verdict(path)
        assert report is None or not report["healthy"] or report["task_count"] > 0, page + 1
        assert path.stat().st_size >= len(whole.content) - whole.size, page + 1
    tally("every method over a page overwritten", whole.pages, 0)
    assert refused > whole.pages
    with Ledger(put(folder, {MAIN: whole.content}), clock=FakeClock(1e6)) as ledger:
        ledger.create_task()
        assert ledger.doctor()["healthy"]


def deeds(ledger: Ledger, known: list[str]) -> dict[str, Callable[[], object]]:
    """Everything that can be asked of a ledger."""
    graces = {"active_grace_seconds": 600, "delivery_grace_seconds": 600}
    return {
        "get": lambda: [ledger.get_task(task) for task in known],
        "children": lambda: ledger.children_of(known[0]),
        "create": lambda: ledger.create_task(parent_id=known[0]),
        "start": lambda: ledger.start_task(known[0]),
        "heartbeat": lambda: ledger.heartbeat(known[0]),
        "heartbeat many": lambda: ledger.heartbeat_many(known),
        "close": lambda: ledger.close_task(known[0], "succeeded"),
        "delivery": lambda: ledger.set_delivery(known[0], "delivered"),
        "preview": lambda: ledger.reconcile(**graces, dry_run=True),
        "reconcile": lambda: ledger.reconcile(**graces),
        "reconcile in batches": lambda: ledger.reconcile(**graces, batch_size=7),
        "prune": lambda: ledger.prune(1e5, 5),
        "doctor": ledger.doctor,
        "storage": ledger.storage_info,
    }


@pytest.mark.parametrize("pattern", ["noise", "the page before", "the version index as it was"])
def test_an_older_ledger_with_a_page_overwritten_is_refused_or_brought_to_head_whole(
    folder: Path, sound: dict[int, Sound], pattern: str, tally: Tally
) -> None:
    path = put(folder, {MAIN: sound[4096].content})
    tsg.downgrade(sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool), "0003")
    content, chance, refused = path.read_bytes(), random.Random(19), 0
    older = sound[4096]._replace(content=content)
    with closing(raw(path)) as connection:
        known = connection.execute("SELECT id FROM tsg_tasks NOT INDEXED ORDER BY id").fetchall()
        names = dict(connection.execute("SELECT name, rootpage FROM sqlite_master"))
    index = names["sqlite_autoindex_tsg_alembic_version_1"] - 1
    for page in range(older.pages) if pattern in OVERWRITTEN else [index]:
        place = older.page(page)
        other = OVERWRITTEN[pattern](chance, older, page) if pattern in OVERWRITTEN else content[place]
        if pattern not in OVERWRITTEN:
            other = other.replace(b"0003", b"0002")
            assert other != content[place]
        path = put(folder, {MAIN: content[: place.start] + other + content[place.stop :]})
        try:
            Ledger(path).close()
        except LedgerError:
            refused += 1
            continue
        if is_healthy(path):
            with closing(raw(path)) as connection:
                assert connection.execute("SELECT id FROM tsg_tasks NOT INDEXED ORDER BY id").fetchall() == known
    tally("an older ledger with a page overwritten", older.pages, 0)
    assert refused > 0
    Ledger(put(folder, {MAIN: content})).close()
    assert second_opinion(folder / MAIN) == sound[4096].rows


# What a row says and no other fact can contradict.
UNPROVABLE = {"payload_hash", "timeout_seconds", "updated_at", "version", "delivery_required", "expects_heartbeat"}


@pytest.mark.parametrize("size", SIZES)
def test_a_flipped_bit_is_told_unless_it_is_in_unused_bytes_or_in_what_no_other_fact_contradicts(
    folder: Path, sound: dict[int, Sound], size: int, rounds: int, tally: Tally
) -> None:
    whole, chance = sound[size], random.Random(size)
    told = silent = 0
    wrong: list[tuple[int, int, object]] = []
    for _ in range(rounds // 2):
        place, bit = chance.randrange(len(whole.content)), chance.randrange(8)
        damaged = bytearray(whole.content)
        damaged[place] ^= 1 << bit
        path = put(folder, {MAIN: bytes(damaged)})
        if not is_healthy(path):
            told += 1
            continue
        silent += 1
        found = second_opinion(path)
        if found is None:
            wrong.append((place, bit, "an index disagrees with its table, or a page is malformed"))
        elif changed := changed_fields(whole.rows, found) - UNPROVABLE:
            wrong.append((place, bit, changed))
    tally("a bit flipped", told + silent, len(wrong))
    assert told > 0 < silent
    assert wrong == []


def changed_fields(before: Rows, after: Rows) -> set[str]:
    if before["tsg_task_events"] != after["tsg_task_events"] or len(before["tsg_tasks"]) != len(after["tsg_tasks"]):
        return {"events or the number of tasks"}
    return {
        name
        for one, other in zip(before["tsg_tasks"], after["tsg_tasks"], strict=True)
        for name, value, now in zip(TASK_COLUMNS, one, other, strict=True)
        if value != now
    }


@pytest.mark.parametrize("size", SIZES)
def test_a_file_cut_off_anywhere_is_told_and_left_as_it_is(
    folder: Path, sound: dict[int, Sound], size: int, tally: Tally
) -> None:
    whole = sound[size]
    boundaries = range(0, len(whole.content), size)
    cuts = sorted({1, 99, 100, *(at for at in boundaries if at), *(at + size // 2 for at in boundaries)})
    for cut in cuts:
        path = put(folder, {MAIN: whole.content[:cut]})
        if size == 4096:
            look_without_trace(path)
        told = not is_healthy(path)
        # Of a free page only what is left is missed.
        assert told or (cut > len(whole.content) - size and second_opinion(path) == whole.rows), cut
        assert path.read_bytes() == whole.content[:cut]
        try:
            with Ledger(path) as ledger:
                assert ledger.doctor()["healthy"] is not told, cut
        except LedgerError:
            assert told
        assert path.read_bytes() == whole.content[:cut]
    tally("a file cut off", len(cuts), 0)
    assert is_healthy(put(folder, {MAIN: whole.content}))


# -- beside the file ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Live:
    """A ledger whose newest commits, one a verb, are in its WAL only."""
    return left_behind(tmp_path_factory.mktemp("live"), seed=1)


def left_behind(folder: Path, seed: int, *, all_pages: bool = False) -> Live:
    """A ledger as it lies on the disk when its processes are killed; on request every page of it is in the WAL."""
    folder.chmod(0o700)
    path, clock, chance = folder / MAIN, FakeClock(1_000.0 * seed), random.Random(seed)
    with Ledger(path, clock=clock) as ledger:
        known = list(some_kinds(ledger, clock).values())
    with closing(raw(path)) as keeper:
        # As long as somebody reads what was there before, the WAL is not begun anew.
        keeper.execute("BEGIN")
        keeper.execute("SELECT count(*) FROM tsg_tasks").fetchall()
        lengths, states = [0], [rows(keeper)]
        with Ledger(path, clock=clock) as ledger, closing(raw(path)) as connection:
            connection.execute("PRAGMA wal_autocheckpoint = 0")

            def note() -> None:
                lengths.append((folder / WAL).stat().st_size)
                states.append(rows(connection))

            if all_pages:
                connection.execute("VACUUM")
                note()
            for _ in range(6):
                clock.advance(1.0)
                task = ledger.create_task(parent_id=chance.choice(known), timeout_seconds=chance.choice((None, 5))).id
                note()
                for verb, arguments in (
                    (ledger.start_task, ()),
                    (ledger.heartbeat, ()),
                    (ledger.close_task, ("failed",)),
                    (ledger.set_delivery, ("delivered",)),
                )[: chance.randrange(5)]:
                    clock.advance(1.0)
                    verb(task, *arguments)  # type: ignore[operator]  # each with its own
                    note()
            ledger.reconcile(active_grace_seconds=0.5, delivery_grace_seconds=0.5)
            note()
            files = {name: (folder / name).read_bytes() for name in (MAIN, WAL)}
    return Live(files, lengths, states)


def after_recovery(path: Path) -> Rows | None:
    """The rows that a recovered ledger has; nothing where it is refused or not healthy."""
    if not is_healthy(path):
        return None
    found = second_opinion(path)
    assert found is not None
    return found


def test_of_a_wal_cut_off_anywhere_every_whole_commit_is_kept(folder: Path, live: Live, tally: Tally) -> None:
    content = live.files[WAL]
    frame = FRAME_HEADER + 4096
    assert (len(content) - WAL_HEADER) % frame == 0
    boundaries = range(WAL_HEADER, len(content) + 1, frame)
    cuts = {0, 1, 31, *boundaries, *(at - 1 for at in boundaries), *(at + frame // 2 for at in boundaries)}
    chosen = sorted({*live.lengths, *random.Random(5).sample(sorted(cut for cut in cuts if cut <= len(content)), 40)})
    for cut in chosen:
        path = put(folder, {**live.files, WAL: content[:cut]})
        assert after_recovery(path) == live.until(cut), cut
    tally("a WAL cut off", len(chosen), 0)
    assert live.until(len(content)) == live.states[-1] != live.states[-2]


def test_of_a_wal_with_a_damaged_frame_every_commit_before_it_is_kept(folder: Path, live: Live, tally: Tally) -> None:
    content, frame, chance = live.files[WAL], FRAME_HEADER + 4096, random.Random(6)
    frames = range(WAL_HEADER, len(content), frame)
    chosen = sorted(chance.sample(frames, min(len(frames), 40)))
    for start in chosen:
        damaged = bytearray(content)
        # What lies at 0 is the page's number; then the commit's size, both salts, both sums, and the page.
        place = start + chance.choice([3, 7, 11, 19, chance.randrange(FRAME_HEADER, frame)])
        damaged[place] ^= 1 << chance.randrange(8)
        path = put(folder, {**live.files, WAL: bytes(damaged)})
        assert after_recovery(path) == live.until(start), (start, place)
    tally("a frame of a WAL damaged", len(chosen), 0)


@pytest.mark.parametrize("place", range(0, WAL_HEADER, 4))
def test_with_the_header_of_a_wal_damaged_what_the_main_file_holds_is_kept(
    folder: Path, live: Live, place: int, tally: Tally
) -> None:
    damaged = bytearray(live.files[WAL])
    damaged[place + 3] ^= 0x40
    path = put(folder, {**live.files, WAL: bytes(damaged)})
    found = after_recovery(path)
    # Its fourth number only counts checkpoints, but is summed up like the others.
    assert found is None or found == live.states[0]
    tally("the header of a WAL damaged", 1, 0)


@pytest.mark.parametrize("content", [b"", b"\xa5" * 32_768, bytes(32_768), b"\xff" * 1_000])
def test_whatever_lies_in_the_shm_of_a_ledger_that_nobody_has_open_nothing_is_lost(
    folder: Path, live: Live, content: bytes, tally: Tally
) -> None:
    path = put(folder, {**live.files, SHM: content})
    look_without_trace(path)
    assert after_recovery(path) == live.states[-1]
    tally("a shm full of garbage", 1, 0)


@contextmanager
def kept_open(folder: Path, files: Files) -> Iterator[Path]:
    """The ledger with one connection that stays, so that its WAL is used as it is and not recovered."""
    path = put(folder, files)
    with closing(raw(path)) as keeper:
        keeper.execute("BEGIN")
        keeper.execute("SELECT count(*) FROM tsg_tasks").fetchall()
        yield path


@pytest.mark.parametrize("name", [MAIN, WAL])
def test_a_page_overwritten_under_an_open_ledger_is_told_unless_a_newer_one_stands_for_it(
    folder: Path, live: Live, name: str, tally: Tally
) -> None:
    content, chance = live.files[name], random.Random(8)
    starts = range(0, len(content), 4096)
    if name == WAL:
        starts = range(WAL_HEADER + FRAME_HEADER, len(content), FRAME_HEADER + 4096)
    told = 0
    with kept_open(folder, live.files) as path:
        descriptor = os.open(folder / name, os.O_RDWR)
        try:
            for start in starts:
                os.pwrite(descriptor, chance.randbytes(4096), start)
                if chance.random() < 0.2:
                    look_without_trace(path)
                if is_healthy(path):
                    assert second_opinion(path) == live.states[-1], start
                else:
                    told += 1
                os.pwrite(descriptor, content[start : start + 4096], start)
        finally:
            os.close(descriptor)
        assert 0 < told < len(starts)
        assert is_healthy(path)
    tally("a page overwritten under an open ledger", len(starts), 0)
    assert after_recovery(path) == live.states[-1]


# SQLite itself has nothing that ties a WAL to a database: whatever whole commits a file of the right name holds are
# taken for the newest pages of the database beside it.


def test_beside_the_wal_of_another_ledger_that_holds_all_its_pages_there_is_that_other_ledger(
    folder: Path, live: Live, tmp_path: Path, tally: Tally
) -> None:
    (tmp_path / "other").mkdir()
    other = left_behind(tmp_path / "other", seed=2, all_pages=True)
    path = put(folder, {**live.files, WAL: other.files[WAL]})
    look_without_trace(path)
    assert after_recovery(path) == other.states[-1]
    tally("the WAL of another ledger", 1, 0)


def test_beside_part_of_another_ledger_in_a_wal_there_is_no_healthy_mixture(
    folder: Path, live: Live, tmp_path: Path, tally: Tally
) -> None:
    (tmp_path / "other").mkdir()
    other = left_behind(tmp_path / "other", seed=2)
    wholes = [live.states[0], *other.states[1:]]
    told = 0
    for length in other.lengths[1:]:
        path = put(folder, {MAIN: live.files[MAIN], WAL: other.files[WAL][:length]})
        found = after_recovery(path)
        told += found is None
        assert found is None or found in wholes, length
    tally("the WAL of another ledger", len(other.lengths) - 1, 0)
    assert told > 0


def test_an_older_wal_beside_a_file_put_back_from_a_backup_makes_no_healthy_mixture(
    folder: Path, live: Live, tally: Tally
) -> None:
    put(folder, live.files)
    path = folder / MAIN
    assert is_healthy(path)
    backup = path.read_bytes()
    for length in live.lengths[1:]:
        path = put(folder, {MAIN: backup, WAL: live.files[WAL][:length]})
        found = after_recovery(path)
        assert found is None or found in live.states, length
    tally("an older WAL beside a backup", len(live.lengths) - 1, 0)


@pytest.mark.parametrize("all_pages", [True, False])
def test_beside_the_wal_of_another_application_a_ledger_is_refused_or_not_healthy(
    folder: Path, live: Live, tmp_path: Path, all_pages: bool, tally: Tally
) -> None:
    theirs = tmp_path / MAIN
    with closing(raw(theirs)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, note TEXT)")
        connection.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT)")
        connection.execute("INSERT INTO orders (note) VALUES (hex(randomblob(9000)))")
        if all_pages:
            connection.execute("VACUUM")
        else:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute("INSERT INTO orders (note) VALUES ('short')")
        stale = theirs.with_name(WAL).read_bytes()
    for deed in (verdict, lambda path: Ledger(path).close()):
        path = put(folder, {MAIN: live.files[MAIN], WAL: stale})
        look_without_trace(path)
        try:
            report = deed(path)
        except LedgerError:
            continue
        assert report is None or not report["healthy"]  # type: ignore[index]
    tally("the WAL of another application", 2, 0)


@pytest.mark.parametrize("main", [None, b""], ids=["gone", "empty"])
@pytest.mark.parametrize("beside", [(WAL,), (WAL, SHM)], ids=["", "and a shm"])
def test_where_a_wal_is_left_of_a_ledger_whose_file_is_gone_or_empty_no_new_one_is_made_over_it(
    folder: Path, live: Live, main: bytes | None, beside: tuple[str, ...], tally: Tally
) -> None:
    """SQLite deletes such a WAL, and with it all that may be left."""
    for deed in (verdict, lambda path: Ledger(path, read_only=True).close(), lambda path: Ledger(path).close()):
        files = {WAL: live.files[WAL], SHM: bytes(32_768)}
        path = put(folder, {name: files[name] for name in beside} | ({} if main is None else {MAIN: main}))
        try:
            assert deed(path) is None
        except LedgerError:
            pass
        assert (folder / WAL).read_bytes() == live.files[WAL]
    tally("a WAL without its file", 3, 0)


# -- other files in its place --------------------------------------------------------------------------------


def archive() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as packed:
        packed.writestr("ledger.sqlite", "no database at all" * 100)
    return made.getvalue()


STAND_INS: dict[str, Callable[[], bytes]] = {
    "one byte": lambda: b"S",
    "text": lambda: b"no database at all\n" * 500,
    "zip": archive,
    "encrypted": lambda: random.Random(3).randbytes(16_384),
    "zeros": lambda: bytes(16_384),
    "SQLite's first words": lambda: b"SQLite format 3\0",
}


@pytest.mark.parametrize("kind", STAND_INS)
def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(folder: Path, kind: str, tally: Tally) -> None:
    content = STAND_INS[kind]()
    path = put(folder, {MAIN: content})
    look_without_trace(path)
    assert not is_healthy(path)
    for options in ({}, {"migrate": False}, {"adopt": True}, {"read_only": True}):
        with pytest.raises(LedgerError):
            Ledger(path, **options)
    assert path.read_bytes() == content
    tally("another file in its place", 6, 0)


def test_a_folder_in_its_place_is_refused_and_left_as_it_is(folder: Path, tally: Tally) -> None:
    path = folder / MAIN
    path.mkdir(mode=0o700)
    assert verdict(path) is None
    for options in ({}, {"migrate": False}, {"adopt": True}, {"read_only": True}):
        with pytest.raises(LedgerError):
            Ledger(path, **options)
    assert list(folder.rglob("*")) == [path]
    tally("another file in its place", 5, 0)


def test_each_byte_of_the_header_changed_is_told_or_nothing_is_lost(
    folder: Path, sound: dict[int, Sound], tally: Tally
) -> None:
    whole, told = sound[4096], 0
    for place in range(100):
        damaged = bytearray(whole.content)
        damaged[place] ^= 0xFF
        path = put(folder, {MAIN: bytes(damaged)})
        if place % 5 == 0:
            look_without_trace(path)
        if is_healthy(path):
            assert second_opinion(path) == whole.rows, place
        else:
            told += 1
    tally("a byte of the header changed", 100, 0)
    assert told > 20
