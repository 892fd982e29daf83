"""A ledger's file: who may reach it, and whether it is still the same one.

The database and SQLite's sidecars are for their owner alone. What is refused is refused before anything is
opened, made or changed; the one who shares our user id is trusted. Only :meth:`LedgerFile.make` and
:meth:`LedgerFile.tighten` change anything; everything else here only looks.

A descriptor on a database that this process may have open is never closed here: POSIX drops *all* of a
process's locks on a file with any of its descriptors. So files are judged by ``lstat``.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from tsg import procfs
from tsg.errors import InvalidInput, StateConflict

__all__ = [
    "LONGEST_PATH",
    "LedgerFile",
    "locate",
    "traits_of",
]

_SIDECARS: Final = ("-journal", "-wal", "-shm")
_POSIX: Final = os.name == "posix"
_SHARED_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_PRIVATE_FILE: Final = 0o600
_PRIVATE_DIRECTORY: Final = 0o700
_UNUSABLE: Final = "the ledger's path can't be used: it is missing, or permission is"
#: The size of the smallest SQLite database: one page of the smallest size.
_SMALLEST: Final = 512
#: Longer ones are refused unread: to resolve a path takes time that grows with its square.
LONGEST_PATH: Final = 4096
#: What SQLite takes on POSIX with the longest of its suffixes, and what file systems take of a name; in bytes.
_LONGEST_WITH_SUFFIX: Final = 512
_LONGEST_NAME: Final = 255
#: Another thread may open a file of its own in the same moment; that it does so each time is beyond belief.
_LOOKS: Final = 3

# Between making the empty file and closing its descriptor no thread of ours may open it (see above).
_creating = threading.Lock()


def _renew_lock() -> None:
    global _creating
    _creating = threading.Lock()


if hasattr(os, "register_at_fork"):
    # Another thread, which a child does not have, may hold it at the fork.
    os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True, slots=True)
class LedgerFile:
    """The place of a ledger's database: an absolute path whose directory is resolved and judged."""

    path: str
    permission_model: str

    @property
    def exists(self) -> bool:
        """Whether something other than an empty file stands there."""
        found = _lstat(self.path)
        return found is not None and not (stat.S_ISREG(found.st_mode) and found.st_size == 0)

    def make(self) -> None:
        """Make the file where it is missing, empty, and its directories too.

        Raises:
            InvalidInput: the directory or the database is not what a private ledger may stand on.
            StateConflict: the same of a sidecar.
        """
        if self.judge_place():
            return
        with _refusing_os_errors():
            _make_directories(os.path.dirname(self.path))
            with _creating:
                if _lstat(self.path) is None:
                    _create(self.path)
            self.judge()

    def judge_place(self) -> bool:
        """That a ledger may stand there; whether a file does so already.

        Raises:
            InvalidInput, StateConflict: as :meth:`make`.
        """
        with _refusing_os_errors():
            if _lstat(self.path) is not None:
                self.judge()
                return True
            _judge_directories(self.path)
            self._judge_sidecars()
            return False

    def tighten(self) -> None:
        """Take everybody else's permissions from the database and its sidecars.

        Raises:
            InvalidInput: the operating system won't.
            StateConflict: something else stands there now.
        """
        if _POSIX:
            with _refusing_os_errors():
                for path in (self.path, *self._sidecars()):
                    # A sidecar goes when its last user closes.
                    with suppress(FileNotFoundError):
                        _allow(path, _PRIVATE_FILE, _is_plain)

    def require(self) -> None:
        """That a database stands there, private enough to be read, and nothing else is changed by looking.

        Raises:
            InvalidInput: it is missing, no regular file of ours, or not exactly 0600.
            StateConflict: its sidecars are not what SQLite leaves, or not private.
        """
        with _refusing_os_errors():
            self.judge()
            if not _POSIX:
                return
            if _mode(self.path) != _PRIVATE_FILE:
                raise InvalidInput("a ledger opened read-only must have mode 0600 already")
            if any(stat.S_IMODE(found.st_mode) != _PRIVATE_FILE for found in self._sidecars().values()):
                raise StateConflict("a sidecar of the ledger is not private; open the ledger for writing once")

    def judge(self) -> None:
        """That the database and its sidecars are plain files of their own.

        Raises:
            InvalidInput: no database there, or a link, an alias, another owner's, or no regular file.
            StateConflict: a sidecar is one of those.
        """
        _judge_directories(self.path)
        found = _lstat(self.path)
        if found is None:
            raise InvalidInput("there is no ledger at this path; tsg init makes one")
        if not _is_plain(found):
            raise InvalidInput("a ledger must be a regular file with one name, not a link or a device")
        if _POSIX and found.st_uid != os.geteuid():
            raise InvalidInput("a ledger must belong to the user who opens it")
        if 0 < found.st_size < _SMALLEST:
            # SQLite itself would take a file of one byte for an empty database.
            raise StateConflict("the file is not a ledger")
        self._judge_sidecars()

    def _judge_sidecars(self) -> None:
        beside = self._sidecars()
        if not all(map(_is_plain, beside.values())):
            raise StateConflict("a sidecar of the ledger is not a regular file with one name")
        log = beside.get(self.path + "-wal")
        if log is not None and log.st_size and not self.exists:
            # SQLite would take it for a leftover, and delete it with all that it holds.
            raise StateConflict("a ledger's log is here without its ledger; restore both, or move the log away")

    def traits(self) -> tuple[int, ...]:
        """All that changes when somebody writes to the file, or another takes its place."""
        found = _lstat(self.path)
        return () if found is None else traits_of(found)

    def identity(self) -> tuple[int, int]:
        """What tells this file from another of the same name: device and inode.

        Raises:
            StateConflict: there is no plain file there any more.
        """
        try:
            found = os.lstat(self.path)
        except OSError:
            raise StateConflict("the ledger's file is gone") from None
        if not _is_plain(found):
            raise StateConflict("the ledger's file was replaced")
        return found.st_dev, found.st_ino

    def require_same(self, expected: tuple[int, int]) -> None:
        """That the file has the `expected` identity still.

        Raises:
            StateConflict: it is gone, or another stands there.
        """
        if self.identity() != expected:
            raise StateConflict("the ledger's file was replaced")

    def connect(self, mode: str, expected: tuple[int, int]) -> sqlite3.Connection:
        """A new connection to the file that has the `expected` identity; it never creates one.

        Args:
            mode: SQLite's open mode, ``rw`` or ``ro``.

        Raises:
            StateConflict: another file stands there now, or stood there when it was opened.
            sqlite3.Error: SQLite can't open it.
        """
        for _ in range(_LOOKS):
            with _creating:
                before = procfs.open_files()
                connection = sqlite3.connect(
                    f"file:{quote(os.fsencode(self.path) if _POSIX else Path(self.path).as_posix())}?mode={mode}",
                    uri=True,
                    check_same_thread=False,
                )
                after = procfs.open_files()
            opened = {identity for number, identity in after.items() if before.get(number) != identity}
            try:
                self.require_same(expected)
            except BaseException:
                connection.close()
                raise
            # Nothing opened: nothing is told here, or SQLite has taken one that it had left open on this file.
            if not opened or expected in opened:
                return connection
            connection.close()
        raise StateConflict("the ledger's file was replaced")

    def is_live(self) -> bool:
        """Whether SQLite's sidecars of a database in use are there; none of them otherwise.

        Raises:
            StateConflict: one of the pair, or a rollback journal: a state to be recovered, not read.
        """
        journal, wal, shm = (_lstat(self.path + suffix) is not None for suffix in _SIDECARS)
        if journal or wal != shm:
            raise StateConflict("the ledger was not closed cleanly; open it for writing once")
        return wal

    def _sidecars(self) -> dict[str, os.stat_result]:
        """Those that are there, by path."""
        looked_at = {path: _lstat(path) for path in (self.path + suffix for suffix in _SIDECARS)}
        return {path: found for path, found in looked_at.items() if found is not None}


def locate(target: object, *, allow_external_acl: bool = False) -> LedgerFile:
    """The ledger file that `target` names. Nothing is created, and nothing but directories is looked at.

    Args:
        target: a path as text, bytes or ``os.PathLike``; relative ones from the working directory.
        allow_external_acl: off POSIX, that the caller has made the directory private by other means.

    Raises:
        InvalidInput: no path of a local file.
    """
    try:
        path = str.__str__(os.fsdecode(target))  # type: ignore[arg-type]  # what is no path raises TypeError
        os.fsencode(path)
    except Exception:
        # A path object may raise anything of its own.
        raise InvalidInput("a ledger's path must be text, bytes or a path object") from None
    if not path or len(path) > LONGEST_PATH or "\0" in path or path.startswith(("//", "\\\\", "/\\", "\\/")):
        raise InvalidInput("a ledger's path must name a local file")
    if path == ":memory:" or path.startswith("file:") or os.path.basename(path) in ("", ".", ".."):
        raise InvalidInput("a ledger must be a file on disk, named by its path")
    if not _POSIX and not allow_external_acl:
        raise InvalidInput("this system has no file modes: make the directory private, then allow_external_acl")
    try:
        directory, name = os.path.split(path)
        # As the system would walk it: what stands before a ".." may be a link to elsewhere.
        directory = os.path.realpath(directory or os.curdir)
    except (OSError, ValueError):
        raise InvalidInput("a ledger's path must name a local file") from None
    resolved = os.path.join(directory, name)
    suffix = max(map(len, _SIDECARS))
    if _POSIX and (
        len(os.fsencode(resolved)) + suffix > _LONGEST_WITH_SUFFIX or len(os.fsencode(name)) + suffix > _LONGEST_NAME
    ):
        raise InvalidInput("a ledger's path must leave room for the names of SQLite's sidecars")
    return LedgerFile(resolved, "posix_mode" if _POSIX else "external_acl")


def _is_plain(found: os.stat_result) -> bool:
    reparse = getattr(found, "st_file_attributes", 0) & getattr(stat, "FILE_ATTRIBUTE_REPARSE_POINT", 0)
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and not reparse


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        raise InvalidInput(_UNUSABLE) from None


def _mode(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def _judge_directories(path: str) -> None:
    """The leaf directory must be ours alone to write; no other may be anybody's to rename in; all on this machine."""
    if not _POSIX:
        return
    directory = os.path.dirname(path)
    leaf = _lstat(directory)
    if leaf is not None and (not _is_own_directory(leaf) or leaf.st_mode & _SHARED_WRITE):
        raise InvalidInput("a ledger's directory must belong to its user, and no other may write there")
    while directory != (above := os.path.dirname(directory)):
        directory = above
        found = _lstat(directory)
        if found is not None and found.st_mode & _SHARED_WRITE and not found.st_mode & stat.S_ISVTX:
            raise InvalidInput("a directory above the ledger may be written by others")
    if procfs.is_network(_nearest(os.path.dirname(path))):
        raise InvalidInput("a ledger can't lie on a network's file system; use a local one, or PostgreSQL")


def _nearest(directory: str) -> str:
    """The directory, or where it is missing the one above it that is there."""
    while _lstat(directory) is None:
        directory = os.path.dirname(directory)
    return directory


def _make_directories(directory: str) -> None:
    missing = []
    while _lstat(directory) is None:
        missing.append(directory)
        directory = os.path.dirname(directory)
    if missing and not _POSIX:
        raise InvalidInput("a ledger's directory must exist before it")
    for path in reversed(missing):
        # Another first opener may make it just now; it is judged like any other.
        with suppress(FileExistsError):
            os.mkdir(path, _PRIVATE_DIRECTORY)
            # Whatever the umask took away.
            _allow(path, _PRIVATE_DIRECTORY, _is_own_directory, give=True)


def _create(path: str) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    # Another first opener may make it just now; it is judged like any other.
    with suppress(FileExistsError):
        descriptor = os.open(path, flags, _PRIVATE_FILE)
        try:
            if _POSIX:
                # Whatever the umask took away.
                os.fchmod(descriptor, _PRIVATE_FILE)
        finally:
            os.close(descriptor)


def _allow(path: str, mode: int, expected: Callable[[os.stat_result], bool], *, give: bool = False) -> None:
    """Take all permissions beyond `mode` from what stands at `path`, or `give` those that are missing too; never from
    something that takes its place meanwhile, be it by a link.

    Raises:
        StateConflict: it is not what is `expected`.
    """
    if not hasattr(os, "O_PATH") or not os.path.isdir("/proc/self/fd"):
        # As near to it as this system comes.
        how = {"follow_symlinks": False} if os.chmod in os.supports_follow_symlinks else {}
        _change(path, os.lstat(path), mode, expected, give=give, **how)
        return
    # It reads nothing, so that to close it drops no locks.
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _change(f"/proc/self/fd/{descriptor}", os.fstat(descriptor), mode, expected, give=give)
    finally:
        os.close(descriptor)


def _change(
    path: str,
    found: os.stat_result,
    mode: int,
    expected: Callable[[os.stat_result], bool],
    *,
    give: bool,
    **how: bool,
) -> None:
    if not expected(found):
        raise StateConflict("the ledger's file was replaced")
    wanted = mode if give else stat.S_IMODE(found.st_mode) & mode
    if stat.S_IMODE(found.st_mode) != wanted:
        os.chmod(path, wanted, **how)


def _is_own_directory(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and (not _POSIX or found.st_uid == os.geteuid())


@contextmanager
def _refusing_os_errors() -> Iterator[None]:
    """What the operating system refuses about a path is the caller's to mend, and its text stays here."""
    try:
        yield
    except OSError:
        raise InvalidInput(_UNUSABLE) from None


def traits_of(found: os.stat_result) -> tuple[int, ...]:
    """All that changes when somebody writes to a file, or another takes its place."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_nlink)
