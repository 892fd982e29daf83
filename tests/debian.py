"""Programs of Debian packages that the tests use: found, or installed as root, or said to be missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

import pytest

#: The package of each program that some tests need; without it they are skipped, and say so.
PACKAGES: Mapping[str, str] = {
    "chromium": "chromium",
    "dot": "graphviz",
    "/usr/lib/openssh/sftp-server": "openssh-sftp-server",
    "faketime": "faketime",
    "sshfs": "sshfs",
    "strace": "strace",
}


def can_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(*packages: str) -> None:
    """Install packages, as root.

    Raises:
        subprocess.CalledProcessError: they can't be had.
    """
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        subprocess.run(["apt-get", "-qq", *arguments], env=environment, capture_output=True, check=True)


def install_missing_for(config: pytest.Config) -> None:
    """Before any test, what is missing of :data:`PACKAGES`, where that is possible."""
    missing = sorted({package for program, package in PACKAGES.items() if shutil.which(program) is None})
    if missing and can_install() and not hasattr(config, "workerinput"):
        install(*missing)


def program(name: str) -> str:
    """Where a program is; a test without it is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}: install Debian's package {PACKAGES[name]}")
    return found
