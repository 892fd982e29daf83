"""A ledger's file: who may reach it, what is refused and left as it was, and what is ever made."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import sqlalchemy as sa

import tsg
from tests.conftest import FakeClock, raw
from tests.conftest import tsg as command
from tsg import InvalidInput, Ledger, LedgerError, SchemaOutdated, SchemaTooNew, StateConflict
from tsg.checkup import examine_file
from tsg.opening import migration, place_of

UNKNOWN = "00000000-0000-4000-8000-000000000000"
SIDECARS = ("-journal", "-wal", "-shm")
SOMEBODY = 65_534

posix = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give files away")

pytestmark = posix


def mode(path: Path | str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def tree(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a folder and the folder itself, without following a link."""
    found: dict[str, tuple[object, ...]] = {}
    for entry in (folder, *sorted(folder.rglob("*"))):
        kind = entry.lstat()
        content: object = None
        if stat.S_ISREG(kind.st_mode):
            content = entry.read_bytes()
        elif stat.S_ISLNK(kind.st_mode):
            content = os.readlink(entry)
        traits = (kind.st_mode, kind.st_uid, kind.st_gid, kind.st_nlink, kind.st_ino, kind.st_size, kind.st_mtime_ns)
        found[str(entry.relative_to(folder))] = (*traits, content)
    return found


def files(folder: Path) -> dict[str, tuple[object, ...]]:
    """As :func:`tree`, without the folder itself, whose time moves when SQLite looks into a WAL database."""
    found = tree(folder)
    del found["."]
    return found


@contextmanager
def untouched(folder: Path, look: Callable[[Path], Any] = tree) -> Iterator[None]:
    before = look(folder)
    yield
    assert look(folder) == before


def write(target: Any) -> None:
    Ledger(target).close()


def write_at_head(target: Any) -> None:
    Ledger(target, migrate=False).close()


def read(target: Any) -> None:
    Ledger(target, read_only=True).close()


def upgrade(target: Any) -> None:
    with migration(place_of(target)):
        pass


opening = pytest.mark.parametrize("opening", [write, write_at_head, read, examine_file, upgrade])
making = pytest.mark.parametrize("opening", [write, upgrade])
suffix = pytest.mark.parametrize("suffix", SIDECARS)


def begun(target: Any) -> None:
    """Make a ledger with a task in it, and close it."""
    with Ledger(target) as ledger:
        ledger.create_task(task_id=UNKNOWN)


@cache
def content() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder, "ledger.sqlite")
        begun(path)
        return path.read_bytes()


def made(path: Path) -> Path:
    """A copy of a ledger with a task in it, closed."""
    missing = [directory for directory in path.parents if not directory.exists()]
    for directory in reversed(missing):
        directory.mkdir(mode=0o700)
    path.write_bytes(content())
    path.chmod(0o600)
    return path


# -- modes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077, 0o277, 0o777])
def test_files_are_0600_and_new_directories_0700_under_any_umask(folder: Path, umask: int) -> None:
    path = folder / "new" / "newer" / "ledger.sqlite"
    before = os.umask(umask)
    try:
        with Ledger(path) as ledger:
            ledger.create_task()
            found = {entry.name: mode(entry) for entry in path.parent.iterdir()}
            directories = mode(path.parent), mode(path.parent.parent)
    finally:
        os.umask(before)
        for directory in (folder / "new", folder / "new" / "newer"):
            if directory.exists():
                directory.chmod(0o700)
    assert found == {"ledger.sqlite": 0o600, "ledger.sqlite-wal": 0o600, "ledger.sqlite-shm": 0o600}
    assert directories == (0o700, 0o700)


def test_a_directory_that_was_there_keeps_its_mode(folder: Path) -> None:
    folder.chmod(0o755)
    write(folder / "ledger.sqlite")
    assert mode(folder) == 0o755


@pytest.mark.parametrize("loose", [0o644, 0o666, 0o640, 0o660, 0o777, 0o4755])
def test_opening_for_writing_tightens_the_database(path: Path, loose: int) -> None:
    made(path).chmod(loose)
    write(path)
    assert mode(path) == 0o600


def test_opening_for_writing_tightens_live_sidecars(path: Path) -> None:
    made(path)
    keeper = raw(path)
    keeper.execute("SELECT count(*) FROM tsg_tasks").fetchall()
    for name in ("", "-wal", "-shm"):
        Path(f"{path}{name}").chmod(0o666)
    with Ledger(path) as ledger:
        ledger.create_task()
        found = {entry.name: mode(entry) for entry in path.parent.iterdir()}
    keeper.close()
    assert found == {"ledger.sqlite": 0o600, "ledger.sqlite-wal": 0o600, "ledger.sqlite-shm": 0o600}


def test_opening_for_writing_tightens_a_journal_that_stays(path: Path) -> None:
    made(path)
    journal = Path(f"{path}-journal")
    journal.touch(0o666)
    journal.chmod(0o666)
    with Ledger(path) as ledger:
        assert not journal.exists() or mode(journal) == 0o600
        assert ledger.get_task(UNKNOWN).id == UNKNOWN


def test_an_empty_file_that_others_could_read_becomes_a_private_ledger(path: Path) -> None:
    path.touch()
    path.chmod(0o644)
    write(path)
    assert mode(path) == 0o600
    assert examine_file(path)["healthy"] is True


def test_sidecars_made_long_after_the_opening_are_private(path: Path) -> None:
    before = os.umask(0)
    try:
        with Ledger(path):
            pass
        other = raw(path)
        other.execute("BEGIN IMMEDIATE")
        found = {entry.name: mode(entry) for entry in path.parent.iterdir()}
        other.close()
    finally:
        os.umask(before)
    assert set(found.values()) == {0o600}


# -- directories -----------------------------------------------------------------------------------------


@opening
@pytest.mark.parametrize("loose", [0o770, 0o702, 0o777, 0o1777, 0o720])
def test_a_directory_that_others_may_write_is_refused(folder: Path, path: Path, opening: Any, loose: int) -> None:
    made(path)
    folder.chmod(loose)
    with untouched(folder), pytest.raises(InvalidInput):
        opening(path)


@making
def test_nothing_is_made_in_a_directory_that_others_may_write(folder: Path, path: Path, opening: Any) -> None:
    folder.chmod(0o777)
    with untouched(folder), pytest.raises(InvalidInput):
        opening(path)


@opening
@as_root
def test_a_directory_of_another_owner_is_refused(folder: Path, path: Path, opening: Any) -> None:
    made(path)
    os.chown(folder, SOMEBODY, SOMEBODY)
    with untouched(folder), pytest.raises(InvalidInput):
        opening(path)


@making
@as_root
def test_nothing_is_made_in_a_directory_of_another_owner(folder: Path, path: Path, opening: Any) -> None:
    os.chown(folder, SOMEBODY, SOMEBODY)
    with untouched(folder), pytest.raises(InvalidInput):
        opening(path)


@opening
@pytest.mark.parametrize("loose", [0o770, 0o707, 0o777])
def test_an_ancestor_that_others_may_write_is_refused(folder: Path, opening: Any, loose: int) -> None:
    above = folder / "above"
    path = made(above / "inner" / "leaf" / "ledger.sqlite")
    above.chmod(loose)
    with untouched(folder), pytest.raises(InvalidInput):
        opening(path)


@making
def test_no_directory_is_made_below_an_ancestor_that_others_may_write(folder: Path, opening: Any) -> None:
    folder.chmod(0o777)
    with untouched(folder), pytest.raises(InvalidInput):
        opening(folder / "a" / "b" / "ledger.sqlite")


@pytest.mark.parametrize("shared", [0o1777, 0o1770])
def test_an_ancestor_with_the_sticky_bit_is_fine(folder: Path, shared: int) -> None:
    above = folder / "above"
    above.mkdir()
    above.chmod(shared)
    path = made(above / "leaf" / "ledger.sqlite")
    assert mode(path.parent) == 0o700
    read(path)


def test_a_symlinked_directory_is_resolved(folder: Path) -> None:
    real = folder / "real"
    real.mkdir(mode=0o700)
    (folder / "link").symlink_to(real)
    begun(folder / "link" / "ledger.sqlite")
    assert [entry.name for entry in real.iterdir()] == ["ledger.sqlite"]
    assert mode(real / "ledger.sqlite") == 0o600


@opening
def test_of_a_symlinked_directory_the_real_one_is_judged(folder: Path, opening: Any) -> None:
    real = folder / "real"
    made(real / "ledger.sqlite")
    (folder / "link").symlink_to(real)
    real.chmod(0o777)
    with untouched(folder), pytest.raises(InvalidInput):
        opening(folder / "link" / "ledger.sqlite")


@opening
def test_of_a_symlink_higher_up_the_real_ancestor_is_judged(folder: Path, opening: Any) -> None:
    made(folder / "real" / "leaf" / "ledger.sqlite")
    (folder / "link").symlink_to(folder / "real")
    (folder / "real").chmod(0o777)
    with untouched(folder), pytest.raises(InvalidInput):
        opening(folder / "link" / "leaf" / "ledger.sqlite")


def test_a_link_in_a_shared_directory_to_a_private_one_is_fine(folder: Path) -> None:
    shared = folder / "shared"
    shared.mkdir()
    (shared / "link").symlink_to(folder)
    shared.chmod(0o777)
    write(shared / "link" / "ledger.sqlite")
    assert (folder / "ledger.sqlite").is_file()


@opening
def test_directories_that_link_to_each_other_are_refused(folder: Path, opening: Any) -> None:
    (folder / "one").symlink_to(folder / "two")
    (folder / "two").symlink_to(folder / "one")
    with untouched(folder), pytest.raises(LedgerError):
        opening(folder / "one" / "ledger.sqlite")


@opening
def test_a_file_in_place_of_a_directory_is_refused(folder: Path, opening: Any) -> None:
    (folder / "file").write_text("text")
    for target in (folder / "file" / "ledger.sqlite", folder / "file" / "deeper" / "ledger.sqlite"):
        with untouched(folder), pytest.raises(LedgerError):
            opening(target)


# -- what stands in place of the database ----------------------------------------------------------------


def a_symlink(path: Path) -> None:
    made(path.with_name("real.sqlite"))
    path.symlink_to("real.sqlite")


def a_dangling_symlink(path: Path) -> None:
    path.symlink_to("nowhere.sqlite")


def a_symlink_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def a_hard_link(path: Path) -> None:
    made(path)
    os.link(path, path.with_name("alias.sqlite"))


def a_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def a_directory(path: Path) -> None:
    path.mkdir(mode=0o700)


def a_socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(before)


def a_device(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))


@opening
@pytest.mark.parametrize(
    "stand_in",
    [
        a_symlink,
        a_dangling_symlink,
        a_symlink_to_itself,
        a_hard_link,
        a_fifo,
        a_directory,
        a_socket,
        pytest.param(a_device, marks=as_root),
    ],
)
def test_what_is_no_plain_file_of_one_name_is_refused(path: Path, folder: Path, stand_in: Any, opening: Any) -> None:
    stand_in(path)
    with untouched(folder), pytest.raises(InvalidInput):
        opening(path)


@making
def test_an_empty_file_of_two_names_is_not_made_a_ledger(path: Path, folder: Path, opening: Any) -> None:
    path.touch(0o600)
    os.link(path, path.with_name("alias.sqlite"))
    with untouched(folder), pytest.raises(InvalidInput):
        opening(path)


@pytest.mark.parametrize(
    "target",
    [
        "",
        b"",
        ".",
        "..",
        "/",
        "folder/",
        "folder/.",
        "folder/..",
        ":memory:",
        b":memory:",
        "file:ledger.sqlite",
        "file::memory:?cache=shared",
        "a\0b",
        b"a\0b",
        "\ud800.sqlite",
        "a/\udfff/b.sqlite",
        "x" * 256,
        "x" * 5_000,
        "y" * 256 + "/ledger.sqlite",
        "/".join(["long"] * 2_000),
        "//host/share/ledger.sqlite",
        b"//host/share/ledger.sqlite",
        "\\\\host\\share\\ledger.sqlite",
        "/\\host\\share",
        "\\/host/share",
        None,
        5,
        1.5,
        True,
        object(),
        [],
        bytearray(b"ledger.sqlite"),
        Ledger,
    ],
)
@opening
def test_what_names_no_local_file_is_refused(
    folder: Path, target: Any, opening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with untouched(folder), pytest.raises(LedgerError) as refused:
        opening(target)
    # Where nothing may be made, what is missing is behind its schema at most.
    assert isinstance(refused.value, InvalidInput)


@making
def test_a_name_that_leaves_no_room_for_its_sidecars_is_refused(folder: Path, opening: Any) -> None:
    with untouched(folder), pytest.raises(InvalidInput):
        opening(folder / ("x" * 250))


@pytest.mark.parametrize("arguments", [["init"], ["doctor"], ["reconcile", "--dry-run"]])
def test_a_name_too_long_is_invalid_input_on_the_command_line_too(folder: Path, arguments: list[str]) -> None:
    ran = command("--db", folder / ("x" * 300), *arguments)
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, b'{"error":"InvalidInput","ok":false}\n', b"")
    assert list(folder.iterdir()) == []


class Misnamed:
    def __fspath__(self) -> Any:
        return 5


def test_a_path_object_that_names_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput):
        Ledger(Misnamed())


# -- sidecars --------------------------------------------------------------------------------------------


def linked(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(b"somebody's")
    path.symlink_to("elsewhere")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def aliased(path: Path) -> None:
    path.touch(0o600)
    os.link(path, path.with_name("alias"))


def directory(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    os.mkfifo(path)


@opening
@suffix
@pytest.mark.parametrize("stand_in", [linked, dangling, aliased, directory, fifo])
def test_a_sidecar_that_is_no_plain_file_is_a_conflict(
    path: Path, folder: Path, suffix: str, stand_in: Any, opening: Any
) -> None:
    made(path)
    stand_in(Path(f"{path}{suffix}"))
    with untouched(folder), pytest.raises(StateConflict):
        opening(path)


@making
@suffix
@pytest.mark.parametrize("stand_in", [linked, directory])
def test_no_database_is_made_beside_a_sidecar_that_is_no_plain_file(
    path: Path, folder: Path, suffix: str, stand_in: Any, opening: Any
) -> None:
    stand_in(Path(f"{path}{suffix}"))
    with untouched(folder), pytest.raises(StateConflict):
        opening(path)


# -- a file replaced behind an open ledger ---------------------------------------------------------------


OPERATIONS: dict[str, Callable[[Ledger], object]] = {
    "create_task": lambda ledger: ledger.create_task(),
    "get_task": lambda ledger: ledger.get_task(UNKNOWN),
    "children_of": lambda ledger: ledger.children_of(UNKNOWN),
    "start_task": lambda ledger: ledger.start_task(UNKNOWN),
    "heartbeat": lambda ledger: ledger.heartbeat(UNKNOWN),
    "close_task": lambda ledger: ledger.close_task(UNKNOWN, "failed"),
    "set_delivery": lambda ledger: ledger.set_delivery(UNKNOWN, "failed"),
    "reconcile": lambda ledger: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0),
    "preview": lambda ledger: ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0, dry_run=True),
    "doctor": lambda ledger: ledger.doctor(),
    "storage_info": lambda ledger: ledger.storage_info(),
}


def by_another_ledger(path: Path) -> None:
    os.replace(made(path.with_name("newcomer.sqlite")), path)


def by_a_copy_of_itself(path: Path) -> None:
    shutil.copyfile(path, path.with_name("copy.sqlite"))
    path.with_name("copy.sqlite").chmod(0o600)
    os.replace(path.with_name("copy.sqlite"), path)


def by_an_empty_file(path: Path) -> None:
    path.unlink()
    path.touch(0o600)


def by_nothing(path: Path) -> None:
    path.unlink()


def by_a_link_to_itself(path: Path) -> None:
    path.rename(path.with_name("moved.sqlite"))
    path.symlink_to("moved.sqlite")


def by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "replace",
    [by_another_ledger, by_a_copy_of_itself, by_an_empty_file, by_nothing, by_a_link_to_itself, by_a_directory],
)
def test_a_database_replaced_behind_an_open_ledger_is_a_conflict_in_every_method(path: Path, replace: Any) -> None:
    with Ledger(path) as ledger:
        ledger.create_task(task_id=UNKNOWN)
        replace(path)
        newcomer = {name: traits for name, traits in files(path.parent).items() if name == path.name}
        for operation in OPERATIONS.values():
            with pytest.raises(StateConflict):
                operation(ledger)
        assert {name: traits for name, traits in files(path.parent).items() if name == path.name} == newcomer
    assert {name: traits for name, traits in files(path.parent).items() if name == path.name} == newcomer


def test_a_database_with_a_second_name_is_a_conflict_behind_an_open_ledger(path: Path) -> None:
    with Ledger(path) as ledger:
        os.link(path, path.with_name("alias.sqlite"))
        with pytest.raises(StateConflict):
            ledger.get_task(UNKNOWN)


def test_a_ledger_put_back_is_the_ledger_again(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.create_task(task_id=UNKNOWN)
        path.rename(path.with_name("away.sqlite"))
        with pytest.raises(StateConflict):
            ledger.get_task(UNKNOWN)
        path.with_name("away.sqlite").rename(path)
        assert ledger.get_task(UNKNOWN).id == UNKNOWN


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_closed_ledger_answers_nothing(path: Path, name: str) -> None:
    ledger = Ledger(made(path))
    ledger.close()
    ledger.close()
    with pytest.raises(StateConflict):
        OPERATIONS[name](ledger)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


# -- somebody else's file --------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"x", b"hello\n", b"a line of text\n" * 1_000, bytes(4_096), b"SQLite format 3\0"])
@pytest.mark.parametrize("permissions", [0o600, 0o644])
@pytest.mark.parametrize("opening", [write, write_at_head, upgrade])
def test_a_file_that_is_no_database_is_a_conflict(
    path: Path, folder: Path, content: bytes, permissions: int, opening: Any
) -> None:
    path.write_bytes(content)
    path.chmod(permissions)
    with untouched(folder), pytest.raises(StateConflict):
        opening(path)


@pytest.mark.parametrize("journal_mode", ["delete", "wal"])
@pytest.mark.parametrize("arguments", [{}, {"adopt": True}, {"migrate": False}])
def test_a_database_of_another_application_is_refused_as_it_was(
    path: Path, folder: Path, journal_mode: str, arguments: dict[str, bool]
) -> None:
    foreign = raw(path)
    foreign.execute(f"PRAGMA journal_mode = {journal_mode}").fetchall()
    foreign.execute("CREATE TABLE tasks (id INTEGER PRIMARY KEY, title TEXT)")
    foreign.execute("INSERT INTO tasks (title) VALUES ('theirs')")
    foreign.close()
    path.chmod(0o644)
    with untouched(folder, files), pytest.raises(StateConflict):
        Ledger(path, **arguments)
    assert mode(path) == 0o644
    foreign = raw(path)
    assert foreign.execute("PRAGMA journal_mode").fetchone() == (journal_mode,)
    foreign.close()


@pytest.mark.parametrize("kind", ["VIEW v AS SELECT 1 AS one", "TABLE schema_meta (key TEXT, value TEXT)"])
def test_whatever_stands_in_a_database_it_is_not_taken_for_an_empty_one(path: Path, folder: Path, kind: str) -> None:
    foreign = raw(path)
    foreign.execute(f"CREATE {kind}")
    foreign.close()
    path.chmod(0o600)
    with untouched(folder, files), pytest.raises(StateConflict):
        Ledger(path)


def test_a_database_without_a_table_becomes_a_ledger(path: Path) -> None:
    empty = raw(path)
    empty.execute("VACUUM")
    empty.close()
    assert path.stat().st_size > 0
    write(path)
    assert mode(path) == 0o600
    assert examine_file(path)["healthy"] is True


@pytest.mark.parametrize("name", ["v1", "v2"])
@pytest.mark.parametrize("arguments", [{}, {"migrate": False}])
def test_a_published_file_is_left_alone_until_it_is_adopted(
    legacy: Callable[[str], Path], folder: Path, name: str, arguments: dict[str, bool]
) -> None:
    path = legacy(name)
    path.chmod(0o644)
    with untouched(folder, files), pytest.raises(SchemaOutdated, match="tsg upgrade"):
        Ledger(path, **arguments)


def test_a_ledger_of_a_later_release_is_left_alone(path: Path, folder: Path) -> None:
    made(path)
    later = raw(path)
    later.execute("UPDATE tsg_alembic_version SET version_num = '9999'")
    later.close()
    path.chmod(0o644)
    for arguments in ({}, {"migrate": False}, {"adopt": True}):
        with untouched(folder, files), pytest.raises(SchemaTooNew):
            Ledger(path, **arguments)
    with untouched(folder, files), pytest.raises(SchemaTooNew):
        upgrade(path)


@pytest.mark.parametrize(
    "alteration",
    [
        "DROP INDEX {index}",
        "CREATE INDEX extra ON tsg_tasks (status)",
        "CREATE TRIGGER extra AFTER INSERT ON tsg_tasks BEGIN SELECT 1; END",
        "ALTER TABLE tsg_tasks ADD COLUMN note TEXT",
        "CREATE TABLE tsg_extra (id INTEGER)",
        "DELETE FROM tsg_alembic_version",
        "INSERT INTO tsg_alembic_version VALUES ('0001')",
        "DROP TABLE tsg_task_events",
    ],
)
def test_a_ledger_whose_schema_was_altered_is_a_conflict(path: Path, folder: Path, alteration: str) -> None:
    made(path)
    other = raw(path)
    (index,) = other.execute(
        "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL AND tbl_name = 'tsg_tasks'"
    ).fetchone()
    other.execute(alteration.format(index=index))
    other.close()
    path.chmod(0o644)
    with untouched(folder, files), pytest.raises(StateConflict):
        Ledger(path)


def test_other_tables_in_a_ledger_are_nobodys_business(path: Path) -> None:
    made(path)
    other = raw(path)
    other.execute("CREATE TABLE tasks (id INTEGER PRIMARY KEY)")
    other.close()
    with Ledger(path) as ledger:
        assert ledger.get_task(UNKNOWN).id == UNKNOWN
        assert ledger.doctor()["healthy"] is True


def test_a_ledger_out_of_wal_mode_is_put_back_into_it(path: Path) -> None:
    made(path)
    other = raw(path)
    assert other.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    other.close()
    with Ledger(path) as ledger:
        assert ledger.storage_info()["journal_mode"] == "wal"
        assert ledger.get_task(UNKNOWN).id == UNKNOWN
    other = raw(path)
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()


# -- what is made ----------------------------------------------------------------------------------------


def test_only_the_database_and_sqlites_sidecars_are_ever_made(path: Path, folder: Path, clock: FakeClock) -> None:
    allowed = {path.name, *(path.name + name for name in SIDECARS)}
    with Ledger(path, clock=clock) as ledger:
        assert set(os.listdir(folder)) <= allowed
        for _ in range(20):
            parent = ledger.create_task(timeout_seconds=5)
            ledger.create_task(parent_id=parent.id)
            ledger.start_task(parent.id)
        clock.advance(60)
        ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0)
        ledger.doctor()
        assert set(os.listdir(folder)) <= allowed
    assert os.listdir(folder) == [path.name]
    engine = sa.create_engine(f"sqlite:///{path}")
    tsg.downgrade(engine, "0001")
    tsg.upgrade(engine)
    engine.dispose()
    assert os.listdir(folder) == [path.name]


def test_adoption_leaves_one_file(legacy: Callable[[str], Path], folder: Path) -> None:
    path = legacy("v1")
    with Ledger(path, adopt=True) as ledger:
        assert ledger.doctor()["healthy"] is True
    assert os.listdir(folder) == [path.name]


def test_without_leave_to_migrate_a_missing_file_is_not_made(folder: Path) -> None:
    with untouched(folder):
        for target in (folder / "ledger.sqlite", folder / "new" / "ledger.sqlite"):
            with pytest.raises(LedgerError):
                Ledger(target, migrate=False)


def test_without_leave_to_migrate_an_empty_file_stays_empty(folder: Path, path: Path) -> None:
    path.touch(0o644)
    with untouched(folder), pytest.raises(LedgerError):
        Ledger(path, migrate=False)


def test_reading_makes_nothing_where_nothing_is(folder: Path) -> None:
    with untouched(folder):
        for target in (folder / "ledger.sqlite", folder / "new" / "ledger.sqlite"):
            for opening in (read, examine_file):
                with pytest.raises(InvalidInput):
                    opening(target)


# -- names, URLs and path types --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "with some spaces",
        'it\'s "quoted"',
        "100%",
        "%41%00%2f",
        "naïve-名前-🗄",
        "what?mode=memory",
        "a#b&c=d",
        "-leading",
        "--db",
        "~",
        "$HOME",
        "a:b",
        "back\\slash",
        "new\nline",
        "...",
        "ledger.sqlite-wal",
        "x" * 247,
    ],
)
def test_any_name_that_the_file_system_takes_will_do(folder: Path, name: str) -> None:
    begun(folder / name)
    assert os.listdir(folder) == [name]
    with Ledger(folder / name, read_only=True) as ledger:
        assert ledger.get_task(UNKNOWN).id == UNKNOWN
    url = sa.URL.create("sqlite", database=str(folder / name))
    with Ledger(url) as ledger:
        assert ledger.get_task(UNKNOWN).id == UNKNOWN
    assert os.listdir(folder) == [name]


@pytest.mark.parametrize("name", ["with some spaces", "-leading", "what?#", "100%"])
def test_a_relative_name_is_taken_from_where_it_was_opened(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with Ledger(name) as ledger:
        monkeypatch.chdir(tmp_path)
        ledger.create_task(task_id=UNKNOWN)
        assert ledger.get_task(UNKNOWN).id == UNKNOWN
    assert os.listdir(folder) == [name]


def test_a_directory_with_a_strange_name_will_do(folder: Path) -> None:
    begun(folder / "a ?#%41 'b" / "ledger.sqlite")
    assert os.listdir(folder / "a ?#%41 'b") == ["ledger.sqlite"]


@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_a_path_may_be_text_bytes_or_a_path_object(path: Path, kind: Any) -> None:
    begun(kind(path))
    with Ledger(path, migrate=False) as ledger:
        assert ledger.get_task(UNKNOWN).id == UNKNOWN


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="only Linux takes any bytes as a name")
def test_a_name_that_is_no_text_will_do(folder: Path) -> None:
    name = os.path.join(os.fsencode(folder), b"\xff\xfe.sqlite")
    begun(name)
    assert os.listdir(os.fsencode(folder)) == [b"\xff\xfe.sqlite"]


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+pysqlite"])
def test_a_url_may_be_text_or_an_object(path: Path, folder: Path, scheme: str) -> None:
    begun(f"{scheme}:///{path}")
    for target in (sa.make_url(f"{scheme}:///{path}"), sa.URL.create(scheme, database=str(path))):
        with Ledger(target, migrate=False) as ledger:
            assert ledger.get_task(UNKNOWN).id == UNKNOWN
    assert os.listdir(folder) == [path.name]


def test_a_url_with_three_slashes_is_relative(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    write("sqlite:///ledger.sqlite")
    assert os.listdir(folder) == ["ledger.sqlite"]


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///file:ledger.sqlite?uri=true",
        "sqlite:///file::memory:",
        "sqlite:///ledger.sqlite?mode=ro",
        "sqlite:///ledger.sqlite?immutable=1",
        "sqlite:///ledger.sqlite?timeout=1",
        "sqlite://host/ledger.sqlite",
        "sqlite://user:secret@host:5/ledger.sqlite",
        "sqlite://///host/share/ledger.sqlite",
        "sqlite:///a\0b",
        "mysql://localhost/ledger",
        "mssql+pyodbc://localhost/ledger",
        "oracle://localhost",
        "nonsense://localhost/ledger",
        "://",
        "://ledger.sqlite",
        "sqlite+://x",
        "sqlite://host:port/x",
        "http://\ud800/",
    ],
)
def test_a_url_with_options_or_of_another_database_is_refused(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for opening in (write, read):
        with untouched(folder), pytest.raises(InvalidInput) as refused:
            opening(url)
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        sa.URL.create("sqlite"),
        sa.URL.create("sqlite", database=""),
        sa.URL.create("sqlite", database=":memory:"),
        sa.URL.create("sqlite", database="ledger.sqlite", query={"mode": "memory"}),
        sa.URL.create("sqlite", database="ledger.sqlite", host="host"),
        sa.URL.create("mysql", database="ledger"),
    ],
)
def test_a_url_object_is_judged_as_its_text_is(folder: Path, url: sa.URL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with untouched(folder), pytest.raises(InvalidInput):
        Ledger(url)


# -- arguments -------------------------------------------------------------------------------------------


WRONG_NUMBERS = [True, -1, 1.5, None, "soon", 2**31, float("inf"), float("nan"), object()]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("allow_external_acl", "read_only", "migrate", "adopt") for value in (0, 1, None)),
        *((name, "yes") for name in ("allow_external_acl", "read_only", "migrate", "adopt")),
        *(("busy_timeout_ms", value) for value in WRONG_NUMBERS),
        *(("snapshot_limit_mib", value) for value in WRONG_NUMBERS),
        *(("clock", value) for value in (None, 5, "now")),
    ],
)
def test_a_malformed_argument_is_refused_before_anything_is_made(
    path: Path, folder: Path, name: str, value: Any
) -> None:
    with untouched(folder), pytest.raises(InvalidInput):
        Ledger(path, **{name: value})


def test_busy_timeout_is_what_was_asked_for(path: Path) -> None:
    for milliseconds in (0, 1, 1_234, 2**31 - 1):
        with Ledger(path, busy_timeout_ms=milliseconds) as ledger:
            assert ledger.storage_info() == {
                "journal_mode": "wal",
                "busy_timeout_ms": milliseconds,
                "foreign_keys": True,
                "permission_model": "posix_mode",
            }


def test_an_external_acl_changes_nothing_where_there_are_modes(path: Path, folder: Path) -> None:
    with Ledger(path, allow_external_acl=True) as ledger:
        assert ledger.storage_info()["permission_model"] == "posix_mode"
    folder.chmod(0o777)
    with untouched(folder), pytest.raises(InvalidInput):
        Ledger(path, allow_external_acl=True)


def test_opening_at_head_takes_no_write_lock(path: Path) -> None:
    made(path)
    writer = raw(path)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("UPDATE tsg_tasks SET updated_at = updated_at")
    for arguments in ({}, {"migrate": False}, {"adopt": True}, {"read_only": True}):
        with Ledger(path, busy_timeout_ms=0, **arguments) as ledger:
            assert ledger.get_task(UNKNOWN).id == UNKNOWN
            assert ledger.doctor()["healthy"] is True
    assert examine_file(path)["healthy"] is True
    writer.execute("ROLLBACK")
    writer.close()


def test_no_refusal_carries_a_path_or_another_errors_text(folder: Path) -> None:
    (folder / "confidential").write_text("confidential text of no database")
    (folder / "loose").mkdir()
    (folder / "loose").chmod(0o777)
    for target in (
        folder / "confidential",
        folder / "loose" / "confidential",
        f"mysql://confidential@{folder}",
        f"sqlite:///{folder}/confidential?confidential=1",
        str(folder / ("confidential" * 30)),
    ):
        with pytest.raises(LedgerError) as refused:
            Ledger(target)
        error: BaseException | None = refused.value
        assert "confidential" not in str(error)
        assert error is not None
        assert error.__cause__ is None
        assert error.__context__ is None or error.__suppress_context__


def test_a_damaged_database_is_one_clear_error_and_left_as_it_is(path: Path, folder: Path) -> None:
    made(path)
    content = bytearray(path.read_bytes())
    content[100:4_096] = b"\xa5" * (4_096 - 100)
    path.write_bytes(content)
    with untouched(folder, files), pytest.raises(StateConflict) as refused:
        Ledger(path)
    assert not isinstance(refused.value, sqlite3.Error)
