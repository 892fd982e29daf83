"""Files that are read and replaced as a whole: what is in them, and what may stand in their place."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from typing import Any, Final

from tsg import values
from tsg.errors import DamagedFile, InvalidInput, StateConflict
from tsg.plan import fields

__all__ = [
    "LARGEST",
    "PAGE",
    "THEMES",
    "content_of",
    "differs",
    "document_from",
    "page",
    "path_from",
    "replace",
    "require_place_of_page",
    "write",
]

#: What a plan's page may look like.
THEMES: Final = ("pet", "plain")
#: What a page begins with.
PAGE: Final = b"<!doctype html>"
#: What begins a file that SQLite keeps: a database, its rollback journal, and its log.
_DATABASES: Final = (
    b"SQLite format 3\x00",
    b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7",
    b"\x37\x7f\x06\x82",
    b"\x37\x7f\x06\x83",
)
_OF_DATABASES: Final = ("-wal", "-shm", "-journal")
#: The most bytes of a file that is read.
LARGEST: Final = 16 * 1024 * 1024


def path_from(given: object) -> str:
    """A path, as text.

    Raises:
        InvalidInput: this names nothing.
    """
    try:
        path = str.__str__(os.fsdecode(given))  # type: ignore[arg-type]  # what is no path raises TypeError
        os.fsencode(path)
    except Exception:
        # A path object may raise anything of its own.
        raise InvalidInput("a path must be text, bytes or a path object") from None
    if not path or "\0" in path:
        raise InvalidInput("a path must name something")
    return path


def differs(path: str, content: bytes) -> bool:
    """Whether a file has to be written, since it is not there or has other content.

    Raises:
        InvalidInput: it is no regular file, or a database's, which is nothing to be replaced.
    """
    if path.endswith(_OF_DATABASES):
        raise InvalidInput("this name is that of a database's own file")
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidInput("this is no regular file")
        with open(path, "rb") as file:
            start = file.read(16)
            if start.startswith(_DATABASES):
                raise InvalidInput("a database stands there")
            return found.st_size != len(content) or start + file.read() != content
    except OSError:
        # What can't be read may still be replaced.
        return True


def replace(path: str, content: bytes) -> None:
    """Put a file in another's place, with the permissions of that.

    Raises:
        StateConflict: it can't be written; what was there stays.
    """
    temporary = os.path.join(os.path.dirname(path), f".tsg-{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(temporary, flags, 0o666)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            with suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(os.lstat(path).st_mode))
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError:
        raise StateConflict("a file can't be written; what was there stays") from None


def page(cockpit: object, theme: object) -> dict[str, str | None]:
    """The columns of a plan's page: where it is, whatever folder a command is called in, and what it looks like.

    Raises:
        InvalidInput: no path, no such theme, a theme without a page, or no page can be there.
    """
    chosen = values.text(theme)
    if theme is not None and chosen not in THEMES:
        raise InvalidInput(f"a theme is one of: {', '.join(THEMES)}")
    if cockpit is not None:
        path = path_from(cockpit)
        require_place_of_page(path)
        return {"cockpit": fields.prose(os.path.abspath(path), "a path"), "theme": chosen}
    if theme is not None:
        raise InvalidInput("a theme is a page's; name the file of that too")
    return {"cockpit": None, "theme": None}


def require_place_of_page(path: str) -> None:
    """That a page can be where this leads: nothing is there, an empty file, or a page.

    Raises:
        InvalidInput: there is no folder for it, or something else stands there.
    """
    _require_folder(path)
    if not differs(path, b""):
        return
    try:
        with open(path, "rb") as file:
            if file.read(len(PAGE)) != PAGE:
                raise InvalidInput("something else than a page stands there")
    except FileNotFoundError:
        return
    except OSError:
        raise InvalidInput("what stands there can't be read") from None


def _require_folder(path: str) -> None:
    if not os.path.isdir(os.path.dirname(path) or os.curdir):
        raise InvalidInput("there is no folder for this file; make it first")


def write(path: str, content: bytes) -> None:
    """Let a file have this content; whoever reads it meanwhile finds what was there before, or this.

    Raises:
        InvalidInput: there is no folder for it, or something else than a file stands there.
        StateConflict: it can't be written; what was there stays.
    """
    _require_folder(path)
    if differs(path, content):
        replace(path, content)


def content_of(path: str, name: str) -> bytes:
    """What is in a regular file, of at most 16 MiB.

    Args:
        name: what the file is called in an error.

    Raises:
        DamagedFile: it is none, or can't be read.
    """

    def opener(path: str, flags: int) -> int:
        # Not to wait for a writer, should a pipe stand there now.
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))

    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            raise DamagedFile(name, "this is no regular file")
        if found.st_size > LARGEST:
            raise DamagedFile(name, "the file is too large")
        with open(path, "rb", opener=opener) as file:
            return file.read(found.st_size + 1)
    except OSError:
        raise DamagedFile(name, "the file can't be read") from None


def document_from(content: bytes) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        InvalidInput: it holds something else.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise InvalidInput("this is no text in UTF-8") from None
    document = fields.parsed(text)
    if not isinstance(document, dict):
        raise InvalidInput("this must be a JSON object")
    # Few have as many brackets at all.
    if text.count("{") + text.count("[") > fields.DEEPEST and fields.is_deeper(document, fields.DEEPEST):
        raise InvalidInput("objects and lists stand too deep in each other")
    return document
