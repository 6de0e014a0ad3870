"""A file system in user space, whose server ends or stands still, as that of a network file system does."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from replaybuf.errors import PayloadStoreError
from replaybuf.storage.places import folder as folders
from tests.places.arrays import apart, heavy, put, take_all
from tests.stores import TASK, group, until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (shutil.which("bindfs") and os.path.exists("/dev/fuse")), reason="no bindfs"),
]


class Mount:
    """A folder that is shown at another place by a process of ours."""

    def __init__(self, folder: Path) -> None:
        self.place, self._behind = folder / "mounted", folder / "behind"
        self.place.mkdir()
        self._behind.mkdir()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        # -f: in the foreground; without caches, so that each call reaches the server.
        options = ["-f", "-o", "attr_timeout=0,entry_timeout=0"]
        self._process = subprocess.Popen(["bindfs", *options, str(self._behind), str(self.place)])
        while not os.path.ismount(self.place):
            assert self._process.poll() is None

    def pause(self, *, on: bool) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    def end(self) -> None:
        """End the server as a crash does: the mount stays, and answers nothing."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.place)], check=False)
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    mount = Mount(tmp_path)
    yield mount
    mount.unmount()


@pytest.fixture(params=["local", "network"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "network":
        monkeypatch.setattr(folders, "filesystem_type", lambda path: "nfs4")
    return str(request.param)


async def test_a_server_that_ends_loses_nothing(mount: Mount, tmp_path: Path, kind: str) -> None:
    """Calls fail with the reason, all groups are given back, and with the mount all goes on."""
    async with apart(f"sqlite:///{tmp_path}/b.db", mount.place) as buffer:
        await put(buffer, *range(5))
        mount.end()
        for _ in range(2):
            with pytest.raises(PayloadStoreError):
                await buffer.get(5, TASK)
            with pytest.raises(PayloadStoreError):
                await buffer.put(heavy(9), TASK)
        await buffer.put(group(50), "other")
        mount.unmount()
        with pytest.raises(PayloadStoreError):
            await buffer.get(5, TASK)
        mount.start()
        await put(buffer, 5)
        assert sorted(await take_all(buffer)) == list(range(6))
        assert await buffer.count(TASK, "failed") == 0


async def test_a_server_that_stands_still_fails_calls_after_the_patience(
    mount: Mount, tmp_path: Path, kind: str
) -> None:
    """Small groups go on meanwhile, and everything when it answers again."""
    async with apart(f"sqlite:///{tmp_path}/b.db", mount.place, reconnect_timeout=1.0) as buffer:
        await put(buffer, *range(5))
        mount.pause(on=True)
        try:
            async with asyncio.timeout(20):
                for _ in range(3):
                    with pytest.raises(PayloadStoreError, match="within 1 s"):
                        await buffer.get(5, TASK)
                    with pytest.raises(PayloadStoreError, match="within 1 s"):
                        await buffer.put(heavy(9), TASK)
                await buffer.put(group(50), "other")
                assert len(await buffer.get(1, "other")) == 1
        finally:
            mount.pause(on=False)
        await until(lambda: _put(buffer, 5))
        assert sorted(await take_all(buffer)) == list(range(6))
        assert await buffer.count(TASK, "failed") == 0


async def _put(buffer: object, number: int) -> bool:
    """Whether a group could be put."""
    from replaybuf import ReplayBuffer

    assert isinstance(buffer, ReplayBuffer)
    try:
        await put(buffer, number)
    except PayloadStoreError:
        return False
    return True
