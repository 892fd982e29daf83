"""A real PostgreSQL server for one run of the tests, in a temporary folder, gone afterwards.

The newest server that Debian's packages have put on the machine is used; as root, one is installed where there
is none. Without either the run fails and says so, unless ``TSG_TESTS_WITHOUT_POSTGRESQL=1`` asks for it to
skip those tests. ``TSG_TEST_POSTGRESQL`` names a server that is running already (a URL of a superuser).
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests import debian

URL_VARIABLE = "TSG_TEST_POSTGRESQL"
SKIP_VARIABLE = "TSG_TESTS_WITHOUT_POSTGRESQL"


class Server:
    """One server, started by :meth:`start` and stopped by :meth:`stop`."""

    def __init__(self) -> None:
        self.binaries = _binaries()
        self.folder = Path(tempfile.mkdtemp(prefix="tsg-postgresql-"))
        self.data = self.folder / "data"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        if os.geteuid() == 0:
            # The server refuses to run as root.
            shutil.chown(self.folder, user="postgres")
            self.folder.chmod(0o755)

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        if not self.data.exists():
            self._run("initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8")
        options = (
            f"-k {self.folder} -c listen_addresses=127.0.0.1 -c port={self.port} -c fsync=off -c max_connections=200"
        )
        self._run("pg_ctl", "-D", str(self.data), "-w", "-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-D", str(self.data), "-m", mode, "-w", "stop")

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self.binaries / program), *arguments]
        # The programs refuse to run as root.
        other: dict[str, Any] = {"user": "postgres", "group": "postgres", "extra_groups": []}
        user = other if os.geteuid() == 0 else {}
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False, **user)
        if done.returncode:
            raise RuntimeError(f"{program} failed:\n{done.stdout}{done.stderr}")


def start_for(config: pytest.Config) -> None:
    """Start a server for this run, unless one is named, or none is wanted. Workers find it in the environment."""
    if hasattr(config, "workerinput") or os.environ.get(URL_VARIABLE) or os.environ.get(SKIP_VARIABLE):
        return
    server = Server()
    server.start()
    os.environ[URL_VARIABLE] = server.url

    def stop() -> None:
        del os.environ[URL_VARIABLE]
        server.remove()

    config.add_cleanup(stop)


def _binaries() -> Path:
    found = _installed()
    if found is None and debian.can_install():
        debian.install("postgresql")
        found = _installed()
    if found is None:
        raise pytest.UsageError(
            "The tests need a PostgreSQL server: install Debian's package postgresql, or name a running one in "
            f"{URL_VARIABLE}, or set {SKIP_VARIABLE}=1 to skip what needs it."
        )
    return found


def _installed() -> Path | None:
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[4]))
    known = {user.pw_name for user in pwd.getpwall()}
    if not versions or (os.geteuid() == 0 and "postgres" not in known):
        return None
    return versions[-1].parent
