"""A SQLite file on a network file system is refused, with what to do instead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.errors import NetworkFilesystemError
from replaybuf.segments.filesystems import filesystem_type, is_network
from replaybuf.storage.sql.engine import sqlite_files
from replaybuf.storage.sql.engine.sqlite_files import refuse_network_filesystem
from tests.cli.conftest import run
from tests.stores import TASK, build, group

# As proc(5) describes it, with optional fields, a blank in a name, and two that are mounted over each other.
MOUNTS = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/root rw
24 22 0:22 / /proc rw,nosuid - proc proc rw
30 22 0:40 / /home rw shared:7 master:2 - nfs4 server:/home rw,vers=4.2
31 30 0:41 / /home/me/local rw - xfs /dev/sdb1 rw
32 22 0:42 / /mnt/my\040share rw - cifs //host/share rw
33 22 0:43 / /mnt/keys rw - fuse.sshfs me@host:/ rw
34 22 0:44 / /over rw - lustre mgs:/fs rw
35 34 0:45 / /over rw - tmpfs none rw
"""


@pytest.fixture
def mounts(tmp_path: Path) -> str:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    return str(table)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/run.db", "ext4"),
        ("/homely/run.db", "ext4"),
        ("/home/me/run.db", "nfs4"),
        ("/home/me/local/run.db", "xfs"),
        ("/mnt/my share/deep/run.db", "cifs"),
        ("/mnt/keys/run.db", "fuse.sshfs"),
        ("/over/run.db", "tmpfs"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount_point(mounts: str, path: str, kind: str) -> None:
    assert filesystem_type(path, mounts) == kind


def test_nothing_is_known_of_a_system_without_a_table_of_mounts(tmp_path: Path) -> None:
    assert filesystem_type("/run.db", str(tmp_path / "none")) is None
    refuse_network_filesystem("/run.db", str(tmp_path / "none"))


def test_a_link_to_a_network_file_system_is_followed(mounts: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/home/me")
    assert filesystem_type(tmp_path / "link" / "run.db", mounts) == "nfs4"


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "fuse.s3fs", "fuse"]
)
def test_network_file_systems_are_known(kind: str) -> None:
    assert is_network(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "overlay", "tmpfs", "9p", "virtiofs", "fuseblk", "zfs", None])
def test_others_are_not_refused(kind: str | None) -> None:
    assert not is_network(kind)


async def test_a_file_there_is_refused_before_anything_is_made(tmp_path: Path, on_network: None) -> None:
    """The message has the path, the type and what to do; every call says so, also a second one."""
    path = tmp_path / "run.db"
    buffer = build(f"sqlite:///{path}")
    for _ in range(2):
        with pytest.raises(NetworkFilesystemError, match=r"run\.db .*nfs4.*local disk, or PostgreSQL"):
            await buffer.put(group(1), TASK)
    await buffer.close()
    assert not path.exists()


async def test_whoever_knows_better_may_allow_it(tmp_path: Path, on_network: None) -> None:
    config = ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db", allow_network_filesystem=True)
    async with config.build() as buffer:
        assert await buffer.put(group(1), TASK) == 1


async def test_a_database_in_memory_is_on_no_file_system(on_network: None) -> None:
    async with build("sqlite:///:memory:") as buffer:
        assert await buffer.put(group(1), TASK) == 1


async def test_the_command_line_reads_there_and_upgrades_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.db"
    async with build(f"sqlite:///{path}") as buffer:
        await buffer.put(group(1), TASK)
    monkeypatch.setattr(sqlite_files, "filesystem_type", lambda *_: "nfs4")
    assert TASK in run("ls", str(path)).stdout
    assert "nfs4" in run("db", "upgrade", str(path), code=1).stderr


@pytest.fixture
def on_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """All paths are on NFS."""
    monkeypatch.setattr(sqlite_files, "filesystem_type", lambda *_: "nfs4")


# A file system of its own program, mounted as sshfs mounts one; it has a root folder and nothing in it.
_FUSE = """
import ctypes, os, struct, sys, threading
from replaybuf.errors import NetworkFilesystemError
from tests.stores import TASK, build, group
import asyncio

libc = ctypes.CDLL(None, use_errno=True)
folder = sys.argv[1]

def check(result):
    if result != 0:
        print("not permitted:", os.strerror(ctypes.get_errno()), flush=True)
        os._exit(3)

check(libc.unshare(0x20000))  # CLONE_NEWNS: nobody else sees the mount
check(libc.mount(b"none", b"/", None, 0x44000, None))  # MS_REC | MS_PRIVATE
try:
    device = os.open("/dev/fuse", os.O_RDWR)
except OSError as error:
    print("not permitted:", error, flush=True)
    os._exit(3)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
check(libc.mount(b"sshfs", folder.encode(), b"fuse.sshfs", 0, options))

def serve():
    while True:
        request = os.read(device, 1 << 20)
        _, opcode, unique = struct.unpack_from("<IIQ", request)
        if opcode == 26:  # INIT
            answer, error = struct.pack("<IIIIHHIIHHIIIIII", 7, 31, 0, 0, 12, 10, 1 << 16, 1, 0, 0, 0, 0, 0, 0, 0, 0), 0
        elif opcode == 3:  # GETATTR
            attributes = struct.pack("<QQQQQQIIIIIIIIII", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0)
            answer, error = struct.pack("<QII", 1, 0, 0) + attributes, 0
        else:
            answer, error = b"", -2 if opcode == 1 else -38  # ENOENT for a name, ENOSYS for what else is asked
        if opcode not in (2, 42, 36):  # FORGET and the like want no answer
            os.write(device, struct.pack("<IiQ", 16 + len(answer), error, unique) + answer)

threading.Thread(target=serve, daemon=True).start()

async def main():
    buffer = build(f"sqlite:///{folder}/run.db")
    try:
        await buffer.put(group(1), TASK)
    except NetworkFilesystemError as error:
        print(error, flush=True)
    await buffer.close()

asyncio.run(main())
os._exit(0)
"""


def test_a_real_file_system_of_a_program_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", _FUSE, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    if ran.returncode == 3:
        pytest.skip(f"mounting is {ran.stdout.strip()}")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert f"{tmp_path}/run.db is on a network file system (fuse.sshfs)" in ran.stdout
