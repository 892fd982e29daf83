"""A server in a process of its own, which prints its address: ``python -m tests.cockpit.serving LEDGER [THEME]``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import sqlalchemy as sa

from tsg import Ledger, Plans


class Server(NamedTuple):
    """One that runs; its address ends with a slash."""

    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])


@contextmanager
def serving(target: Path | sa.URL, *, theme: str = "pet", port: int = 0) -> Iterator[Server]:
    """Serve the plans of a ledger; at the end the server must stop by SIGTERM as by nothing bad."""
    named = target.render_as_string(hide_password=False) if isinstance(target, sa.URL) else str(target)
    command = [sys.executable, "-m", "tests.cockpit.serving", named, theme, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Server(process.stdout.readline().strip(), process)
            if process.poll() is None:
                process.terminate()
                assert process.wait(timeout=20) == 0
        finally:
            process.kill()


def main(target: str, theme: str, port: str) -> None:
    from tsg.cockpit.server import serve

    with Ledger(target) as ledger:
        serve(Plans(ledger), port=int(port), theme=theme, announce=lambda address: print(address, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
