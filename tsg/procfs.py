"""What Linux tells of files under ``/proc``: whose file system they are on, and which this process has open.

Where there is no such folder nothing is told, and nobody is refused for it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Final

__all__ = ["is_network", "open_files"]

_MOUNTS: Final = "/proc/self/mountinfo"
_DESCRIPTORS: Final = "/proc/self/fd"

#: File systems that other machines may have mounted too. SQLite's WAL has its index in memory, which they don't share.
#: What a virtual machine has from its host (9p, virtiofs) can't be told from a disk of its own, and is let be.
_NETWORK: Final = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs"}
    | {"lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs"}
)
#: The same in user space, where the type is fuse and one of these.
_NETWORK_FUSE: Final = frozenset(
    {"blobfuse2", "ceph", "ceph-fuse", "curlftpfs", "gcsfuse", "glusterfs", "goofys"}
    | {"juicefs", "mfs", "rclone", "s3fs", "s3ql", "smbnetfs", "sshfs"}
)


def is_network(folder: str) -> bool:
    """Whether `folder` is known to lie on a file system that other machines share.

    Raises:
        OSError: it can't be looked at.
    """
    number = os.stat(folder).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    for mounted, kind in _mounts():
        if mounted == device:
            family, _, member = kind.partition(".")
            return family in _NETWORK or (family == "fuse" and member in _NETWORK_FUSE)
    return False


def open_files() -> dict[int, tuple[int, int]]:
    """The device and inode of each regular file that this process has open, by descriptor."""
    try:
        numbers = [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:
        return {}
    found = {}
    for number in numbers:
        try:
            status = os.fstat(number)
        except OSError:
            # The listing's own, or one that another thread has closed.
            continue
        if stat.S_ISREG(status.st_mode):
            found[number] = (status.st_dev, status.st_ino)
    return found


def _mounts() -> Iterator[tuple[str, str]]:
    """The device of each mount, as ``major:minor``, and the kind of its file system."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.readlines()
    except OSError:
        return
    for line in lines:
        # Fixed fields, optional ones up to a lone hyphen, and the kind: proc(5).
        fixed, _, rest = line.partition(" - ")
        yield fixed.split()[2], rest.split()[0]
