"""A private copy of a ledger in memory, where it can't be read in place: made, and overwritten afterwards.

A closed file is read only where no sidecar says that it is in use: to close a descriptor on a database drops all
locks that this process has on it.
"""

from __future__ import annotations

import hashlib
import io
import os
import sqlite3
import stat
from contextlib import closing
from typing import Final

from tsg.errors import StateConflict
from tsg.storage import LedgerFile, traits_of

__all__ = ["SNAPSHOT_LIMIT", "copy_closed", "copy_open", "wipe"]

#: The largest file of which a private copy is made, in bytes.
SNAPSHOT_LIMIT: Final = 64 * 1024 * 1024

_CHUNK: Final = 1024 * 1024


def copy_closed(ledger: LedgerFile, limit: int = SNAPSHOT_LIMIT) -> sqlite3.Connection:
    """A private copy in memory of a closed ledger, read twice to be sure that nobody wrote meanwhile.

    Args:
        limit: the largest size that is read, in bytes.

    Raises:
        StateConflict: the file is too large, not in WAL mode, or changed while it was read.
    """
    try:
        content, digest, before = _read_all(ledger.path, limit)
        try:
            if _read_digest(ledger.path) != (digest, before) or ledger.is_live():
                raise StateConflict("the ledger changed while it was read; try again")
            return _load(content)
        finally:
            _blank(content)
    except OSError:
        raise StateConflict("the ledger's file can't be read") from None


def copy_open(source: sqlite3.Connection, limit: int = SNAPSHOT_LIMIT) -> sqlite3.Connection:
    """A private copy in memory of a database that is open elsewhere, as of one moment.

    Raises:
        StateConflict: it has more than `limit` bytes.
    """
    (pages,) = source.execute("PRAGMA page_count").fetchone()
    (size,) = source.execute("PRAGMA page_size").fetchone()
    if pages * size > limit:
        raise StateConflict("the ledger is too large for a private copy; raise the limit or upgrade it")
    copy = sqlite3.connect(":memory:", check_same_thread=False)
    source.backup(copy)
    return copy


def wipe(connection: sqlite3.Connection) -> None:
    """Overwrite a private copy's pages before its memory is given back, then close it.

    They are put in place one by one, so that a damaged copy, which can't be walked, is overwritten too; one that SQLite
    takes for no database at all is only closed. What SQLite and Python worked with on the way is theirs.
    """
    try:
        connection.rollback()
        # Where the schema is damaged nothing else is answered; and a journal would keep what is overwritten.
        for pragma in ("writable_schema = ON", "query_only = OFF", "journal_mode = OFF"):
            connection.execute(f"PRAGMA {pragma}").close()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        with closing(_blank_database(pages, size)) as blank:
            blank.backup(connection)
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        pass
    finally:
        connection.close()


def _blank_database(pages: int, size: int) -> sqlite3.Connection:
    """A database of just so many pages: of more, the copy would grow, and leave its old memory as it is."""
    filler = (pages - 2) * (size - 4)
    while True:
        blank = sqlite3.connect(":memory:", isolation_level=None)
        blank.execute(f"PRAGMA page_size = {size:d}")
        if pages < 2:
            blank.execute("PRAGMA user_version = 1")
            return blank
        blank.execute("CREATE TABLE blank (filler BLOB)")
        blank.execute("INSERT INTO blank VALUES (zeroblob(?))", (filler,))
        if blank.execute("PRAGMA page_count").fetchone()[0] <= pages:
            return blank
        blank.close()
        filler -= size - 4


def _opened(path: str) -> io.FileIO:
    def opener(name: str, flags: int) -> int:
        # Not to wait for a writer, should a pipe stand there now.
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))

    file = io.FileIO(path, "rb", opener=opener)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise StateConflict("the ledger's file was replaced")
    return file


def _read_all(path: str, limit: int) -> tuple[bytearray, bytes, tuple[int, ...]]:
    with _opened(path) as file:
        traits = traits_of(os.fstat(file.fileno()))
        if traits[2] > limit:
            raise StateConflict("the ledger is too large for a private copy; raise the limit or keep it open")
        content = bytearray(traits[2])
        try:
            filled = 0
            while count := file.readinto(memoryview(content)[filled:]):
                filled += count
            # SQLite's header: bytes 18 and 19 are 2 in WAL mode, the next but one are fixed.
            if not content.startswith(b"SQLite format 3\0") or content[18:20] + content[21:24] != b"\2\2\100\40\40":
                raise StateConflict("the file is not a ledger in WAL mode")
        except BaseException:
            _blank(content)
            raise
        return content, hashlib.sha256(content).digest(), traits


def _read_digest(path: str) -> tuple[bytes, tuple[int, ...]]:
    digest = hashlib.sha256()
    chunk = bytearray(_CHUNK)
    try:
        with _opened(path) as file:
            while count := file.readinto(chunk):
                digest.update(memoryview(chunk)[:count])
            return digest.digest(), traits_of(os.fstat(file.fileno()))
    finally:
        _blank(chunk)


def _blank(buffer: bytearray) -> None:
    buffer[:] = bytes(len(buffer))


def _load(content: bytearray) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    try:
        if not hasattr(connection, "deserialize"):
            raise StateConflict("this Python's SQLite can't load a private copy; open the ledger for writing")
        # A database in memory has no WAL; all of it is in the main file, since there was none beside it.
        content[18:20] = b"\1\1"
        connection.deserialize(content)
    except BaseException:
        connection.close()
        raise
    return connection
