"""The story of a run: ``daemon.log`` for all, ``task_NAME.log`` for each plan, ``trigger.log`` for what is handed over.

Several runners may write into one folder: each line is written at once, at the end of the file. Files are their owner's
alone, since tokens and what agents say stand in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Final

from tsg.errors import InvalidInput
from tsg.plan import disk

__all__ = ["FORMS", "Logs", "log_name", "tail"]

FORMS: Final = ("text", "json")

#: The most of what a command wrote that is told of in a line; all of it is in its file.
_MOST_OUTPUT: Final = 2000
_LONGEST_NAME: Final = 180
_UNSAFE: Final = re.compile(r"[^\w.\- ]")
_ABRIDGED: Final = re.compile(r"-[0-9a-f]{32}\Z")
#: What JSON leaves as it is, and some take for the end of a line, or for a command to a terminal.
_ENDS_LINES: Final = re.compile(r"[\x7f-\x9f\u2028\u2029]")
_PLAIN: Final = re.compile(r"[\w.:/+@-]+\Z")


class Logs:
    """Where a run is told of.

    Args:
        folder: of the files, made where it is missing; without one all goes to stderr.
        plan: its name.
        form: ``text``, or ``json`` for an object a line, its times in seconds since the epoch.
        clock: seconds since the epoch.

    Raises:
        InvalidInput: no such form, or no folder can be there.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        plan: str,
        *,
        form: str = "text",
        clock: Callable[[], float] = time.time,
    ) -> None:
        if form not in FORMS:
            raise InvalidInput(f"a log's form is one of: {', '.join(FORMS)}")
        self._plan, self._form, self._clock = plan, form, clock
        self._folder = None if folder is None else disk.path_from(folder)
        self._files: dict[str, int] = {}
        if self._folder is None:
            return
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            for name in ("daemon.log", log_name(plan), "trigger.log"):
                self._files[name] = self._opened(name)
        except (OSError, ValueError):
            self.close()
            raise InvalidInput("the logs' folder can't be made, or written into") from None

    def tell(self, event: str, *, triggered: bool = False, **told: Any) -> None:
        """Write what has happened.

        Args:
            triggered: it has to do with handing a step over.
        """
        fields = {"plan": self._plan, **{name: value for name, value in told.items() if value is not None}}
        line = self._line(self._clock(), event, fields).encode("utf-8", "backslashreplace")
        if self._folder is None:
            self._to_stderr(line)
            return
        for name, file in self._files.items():
            if triggered or name != "trigger.log":
                try:
                    os.write(file, line)
                except OSError:
                    # A disk that is full ends no run; what can't be told here is told there.
                    self._to_stderr(line)

    def output(self, attempt: str, delivery: int) -> IO[bytes]:
        """A file for what a command writes; where there is no folder, one that is gone when it is closed."""
        if self._folder is None:
            return tempfile.TemporaryFile()
        return os.fdopen(self._opened(f"attempt_{attempt}_{delivery}.log"), "r+b")

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _to_stderr(self, line: bytes) -> None:
        if sys.stderr is not None:
            with suppress(OSError, ValueError):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()

    def _opened(self, name: str) -> int:
        assert self._folder is not None
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        return os.open(os.path.join(self._folder, name), flags, 0o600)

    def _line(self, now: float, event: str, fields: dict[str, Any]) -> str:
        if self._form == "json":
            line = json.dumps({"time": now, "event": event, "pid": os.getpid(), **fields}, ensure_ascii=False)
            return _ENDS_LINES.sub(lambda match: f"\\u{ord(match[0]):04x}", line) + "\n"
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        said = " ".join(f"{name}={_word(value)}" for name, value in fields.items())
        return f"{moment} [{os.getpid()}] {event}: {said}\n"


def log_name(plan: str) -> str:
    """The name of a plan's own log, of which no two plans have the same."""
    written = _UNSAFE.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), plan)
    # Also one that looks as if it were abridged.
    if len(written.encode()) > _LONGEST_NAME or _ABRIDGED.search(written):
        written = written.encode()[: _LONGEST_NAME - 33].decode(errors="ignore")
        written += "-" + hashlib.sha256(plan.encode()).hexdigest()[:32]
    return f"task_{written}.log"


def tail(file: IO[bytes]) -> str | None:
    """The end of what a command has written; ``None`` where it wrote nothing."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MOST_OUTPUT))
    return file.read(_MOST_OUTPUT).decode(errors="replace").strip() or None


def _word(value: Any) -> str:
    # In quotes, with all that could end a line escaped, unless it is a plain word.
    written = str(value)
    return written if _PLAIN.match(written) else json.dumps(written, ensure_ascii=not written.isprintable())
