"""A SQLite file on a network file system is refused, with what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.errors import StorageError
from replaybuf.storage.places.filesystems import filesystem_type, is_network
from replaybuf.storage.sql.engine import sqlite_files
from replaybuf.storage.sql.engine.sqlite_files import refuse_network_filesystem
from tests.cli.conftest import run
from tests.reasons import because
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
        with pytest.raises(
            StorageError, match=r"run\.db .*nfs4.*local disk, or PostgreSQL", check=because("network filesystem")
        ):
            await buffer.put(group(1), TASK)
    await buffer.close()
    assert not path.exists()


async def test_whoever_knows_better_may_allow_it(tmp_path: Path, on_network: None) -> None:
    config = ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db", allow_network_filesystem=True)
    async with config.build() as buffer:
        assert await buffer.put(group(1), TASK) == 1


async def test_the_command_line_reads_there_and_upgrades_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.db"
    async with build(f"sqlite:///{path}") as buffer:
        await buffer.put(group(1), TASK)
    monkeypatch.setattr(sqlite_files, "filesystem_type", lambda *_: "nfs4")
    assert TASK in run("ls", str(path)).stdout
    assert "nfs4" in run("doctor", str(path), "--upgrade", code=1).stderr


@pytest.fixture
def on_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """All paths are on NFS."""
    monkeypatch.setattr(sqlite_files, "filesystem_type", lambda *_: "nfs4")
