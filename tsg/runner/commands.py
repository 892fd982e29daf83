"""Programs that are started for an agent: without a shell, in a group of their own, and ended gently first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Final

__all__ = ["GENTLE_SECONDS", "Command", "environment", "session_of"]

#: Between asking a program to end and ending it.
GENTLE_SECONDS: Final = 10.0

#: What runs on after its runner has let go of it; kept, so that nobody warns of a process that was forgotten.
_let_go: Final[list[subprocess.Popen[bytes]]] = []


class Command:
    """A program that was started.

    Args:
        arguments: the program and what it is given, each as it is.
        said: what is put into its environment.
        output: where what it writes goes, stderr included; by default where this process's goes.
        ended: called from a thread of its own when it has ended.

    Raises:
        OSError: it can't be started.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        said: Mapping[str, str],
        output: IO[bytes] | None = None,
        ended: Callable[[], None],
    ) -> None:
        # A group of its own, so that what is typed at the runner's terminal does not end the agents, and so that what
        # a program has started in turn can be ended with it.
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            list(arguments),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env={**os.environ, **said},
            start_new_session=sys.platform != "win32",
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        self._started = time.monotonic()
        self._asked_to_end: float | None = None
        self._watcher = threading.Thread(target=self._watch, args=(ended,), name="tsg-command", daemon=True)
        self._watcher.start()

    def _watch(self, ended: Callable[[], None]) -> None:
        self._process.wait()
        ended()

    @property
    def status(self) -> int | None:
        """Its exit status, negative for the signal that ended it; ``None`` while it runs."""
        return self._process.poll()

    @property
    def ran_seconds(self) -> float:
        """How long it has run."""
        return time.monotonic() - self._started

    @property
    def leaves_somebody(self) -> bool:
        """Whether it, or something that it has started and not waited for, still runs."""
        if self.status is None:
            return True
        if sys.platform == "win32":
            return False
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    @property
    def is_being_ended(self) -> bool:
        """Whether it was asked to end."""
        return self._asked_to_end is not None

    def end(self, gentle_seconds: float = GENTLE_SECONDS) -> float | None:
        """Ask it to end, and once that was `gentle_seconds` ago, end it.

        Returns:
            Seconds after which to call this again; ``None`` where it was ended for good.
        """
        now = time.monotonic()
        if self._asked_to_end is None:
            self._asked_to_end = now
            self._signal(signal.SIGTERM)
        left = self._asked_to_end + gentle_seconds - now
        if left > 0:
            return left
        self._signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        return None

    def wait(self, seconds: float) -> int | None:
        """Its exit status, waited for that long; ``None`` where it runs on."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(max(seconds, 0))
        return None

    def let_go(self) -> None:
        """Leave it running."""
        if self.status is None:
            _let_go.append(self._process)

    def _signal(self, number: int) -> None:
        if sys.platform == "win32":
            self._process.terminate()
            return
        # Its group may outlive it; what is left of the group is asked too.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def session_of(agent: str, session_name: str | None) -> str:
    """The session of an agent's that a step is done in; ``main`` where none is named."""
    return f"agent:{agent}:{session_name or 'main'}"


def environment(
    *, agent: str, session: str, plan: str, step: str, attempt: str, params: str, database: str
) -> dict[str, str]:
    """What a program finds in its environment about what it is to do."""
    return {
        "TSG_AGENT": agent,
        "TSG_SESSION": session,
        "TSG_PLAN": plan,
        "TSG_STEP": step,
        "TSG_ATTEMPT": attempt,
        "TSG_PARAMS": params,
        "TSG_DB": database,
    }
