"""Files that get their names when they are complete; network file systems are recognised.

Clients of a network file system may read outdated content of a file.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from replaybuf.common.worker_name import is_gone, machine

MOUNTINFO = "/proc/self/mountinfo"

# The kernel's names. (fuse is a program with an unknown type.)
_NETWORK_TYPES = frozenset(
    (
        *("afs", "beegfs", "ceph", "cifs", "fuse", "gfs2", "gpfs", "lustre", "nfs", "nfs3", "nfs4", "ocfs2"),
        *("orangefs", "smb3", "smbfs", "wekafs"),
    )
)
# Programs in user space (`fuse.NAME`) that show a local disk.
_LOCAL_PROGRAMS = frozenset(("bindfs", "fuse-overlayfs", "gocryptfs", "lxcfs", "mergerfs", "ntfs-3g", "unionfs", "zfs"))


def publish(partial: str, path: str) -> None:
    """Rename a complete file, with fsync of file and folder, so that it is there and whole even after a power cut."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = Path(path).absolute().parent
    sync_folder(folder)
    sync_folder(folder.parent)  # the folder may be new


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable, where its file system can."""
    with contextlib.suppress(PermissionError):  # a folder that may be written to, but not read
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(number)


@contextlib.contextmanager
def partial_file(path: str) -> Iterator[str]:
    """Yield a unique name of a temporary file for `path`, so that concurrent writers don't collide.

    A file of this name is removed at the end of the block, and so are files left by killed processes of this host.
    """
    prefix = f"{Path(path).name}.{socket.gethostname()}-"
    for file in Path(path).parent.glob(f"{glob.escape(prefix)}*.partial"):
        process = _PROCESS.fullmatch(file.name.removeprefix(prefix))
        if process is not None and is_gone(machine(), int(process[1])):
            _remove(str(file))
    partial = str(Path(path).with_name(f"{prefix}{os.getpid()}-{next(_number)}.partial"))
    try:
        yield partial
    finally:
        _remove(partial)


def filesystem_type(path: str | os.PathLike[str], mountinfo: str = MOUNTINFO) -> str | None:
    """Return the kernel's name (`ext4`, `nfs4`) for the type of file system that a path is on, or would be on.

    None where it can't be determined: on systems without `/proc`.
    """
    try:
        table = Path(mountinfo).read_text("utf-8", "surrogateescape")
    except OSError:
        return None
    target = os.path.realpath(path)
    mount: tuple[int, str] | None = None
    for line in table.splitlines():
        place, kind = _read_line(line)
        inside = target == place or target.startswith(place.rstrip("/") + "/")
        # Of several mounts at one point, the last is visible.
        if kind and inside and (mount is None or len(place) >= mount[0]):
            mount = len(place), kind
    return None if mount is None else mount[1]


def is_network(kind: str | None) -> bool:
    """Return whether this is a network file system, or a user-space one that may be."""
    if kind is None:
        return False
    if kind.startswith("fuse."):
        return kind.removeprefix("fuse.") not in _LOCAL_PROGRAMS
    return kind in _NETWORK_TYPES


_number = itertools.count(1)
#: What follows the name of the host; a longer text is of a host whose name begins with this one's.
_PROCESS = re.compile(r"(\d{1,9})-\d+\.partial")


def _remove(path: str) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.remove(path + suffix)


def _read_line(line: str) -> tuple[str, str]:
    """Return mount point and type from a mountinfo line: `36 35 98:0 /root /point opts [tags] - type source opts`."""
    before, _, after = line.partition(" - ")
    fields = before.split(" ")
    if len(fields) < 6 or not after:
        return "", ""
    # Blanks, tabs, newlines and backslashes in names are written as three octal digits.
    place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
    return place, after.split(" ")[0]
