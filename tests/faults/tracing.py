"""What a process asks of the operating system, watched from outside; and refused, or answered with a SIGKILL.

The kernel's own answers are used everywhere but at the one call that is chosen (strace's injection), so what fails is
a real call of a real process, at a place that can be named and tried in turn.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests import debian

_CALL = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)\)\s+= (?P<result>.*)\Z", re.DOTALL)

#: Calls that change a file, or a folder's entries.
CHANGES = """
    chmod fchmod fchmodat chown fchown fchownat lchown creat fallocate ftruncate truncate link linkat symlink
    symlinkat mkdir mkdirat mknod mknodat rename renameat renameat2 rmdir unlink unlinkat utime utimes utimensat
    futimesat write pwrite64 writev pwritev pwritev2 setxattr fsetxattr lsetxattr removexattr fremovexattr
    lremovexattr copy_file_range sendfile
""".split()


class Call(NamedTuple):
    """One call: its name, its arguments as strace writes them (descriptors with their path), and its result."""

    name: str
    arguments: str
    result: str


class Traced(NamedTuple):
    """What a command gave, and what it asked of the system: all processes' and threads' calls."""

    status: int
    stdout: bytes
    stderr: bytes
    calls: list[Call]


def trace(
    command: Sequence[str | bytes | os.PathLike[str]],
    *,
    calls: Iterable[str],
    paths: Iterable[Path] = (),
    inject: str | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 120,
) -> Traced:
    """Run `command` under strace.

    Args:
        calls: the names of the calls to watch, or classes of them (``%network``); those that this machine's kernel does
            not have are let be.
        paths: only calls on these files, or on descriptors of them.
        inject: what happens instead of one of them, in strace's words: ``pwrite64:error=EIO:when=3`` or
            ``pwrite64:signal=KILL:when=3``, counted for each thread among the calls on `paths`.
    """
    with tempfile.TemporaryDirectory(prefix="tsg-trace-") as folder:
        arguments: list[str | bytes | os.PathLike[str]] = [debian.program("strace"), "-ff", "-qq", "-y", "-s", "64"]
        arguments += ["-e", "signal=none", "-e", "trace=" + ",".join("?" + name for name in calls)]
        for path in paths:
            arguments += ["-P", path]
        if inject is not None:
            arguments += ["-e", f"inject={inject}"]
        done = subprocess.run(
            [*arguments, "-o", f"{folder}/calls", "--", *command],
            capture_output=True,
            check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
            timeout=timeout,
        )
        lines = [
            line for file in sorted(Path(folder).iterdir()) for line in file.read_text(errors="replace").splitlines()
        ]
    found = [Call(**match.groupdict()) for line in lines if (match := _CALL.match(line))]
    return Traced(done.returncode, done.stdout, done.stderr, found)


def tsg(*arguments: str | bytes | Path) -> list[str | bytes | Path]:
    """The real command line, to be traced."""
    return [sys.executable, "-m", "tsg", *arguments]
