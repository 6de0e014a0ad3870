"""Processes that may not write, or have no room: in processes of their own."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts import run
from tests.stores import build, fill, take_all

BEGINNING = """
import resource, shutil, signal, tempfile, pytest
from typer.testing import CliRunner
from replaybuf.cli.commands import app
from replaybuf.errors import AccessError, StorageError
"""


def run_limited(script: str, *arguments: object) -> None:
    run(BEGINNING + textwrap.dedent(script), *arguments)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that users without any rights can reach, unlike those of pytest."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="rb-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_is_read_only_can_not_be_written_to(open_folder: Path, what: str) -> None:
    file = open_folder / "buffer.db"

    async def prepare() -> None:
        async with build(f"sqlite:///{file}") as buffer:
            await fill(buffer, 2)

    asyncio.run(prepare())
    file.chmod(0o444 if what == "file" else 0o666)
    open_folder.chmod(0o777 if what == "file" else 0o555)
    run_limited(
        """
        async def main():
            buffer = build(sys.argv[1])
            for call in (buffer.put(group(1), TASK), buffer.get(1, TASK), buffer.delete({})):
                with pytest.raises(AccessError, match="read-only|can't be opened"):
                    await call
            await buffer.close()

        def look():
            # Those who only look can export and save, too, after the run has ended.
            folder = tempfile.mkdtemp(dir="/tmp")
            calls = (["export", sys.argv[1], "all.jsonl"], ["checkpoint", "save", sys.argv[1], "saved"])
            for call in ([*words, f"{folder}/{name}"] for *words, name in calls):
                done = CliRunner().invoke(app, call)
                assert done.exit_code == 0, done.output
            with open(f"{folder}/all.jsonl") as lines:
                assert len(list(lines)) == 2
            shutil.rmtree(folder)

        if os.getuid() == 0:
            asyncio.run(asyncio.sleep(0))
            look()  # imports what the other user may be unable to
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        asyncio.run(main())
        look()
        """,
        f"sqlite:///{file}",
    )
    open_folder.chmod(0o755)

    async def check() -> None:
        async with build(f"sqlite:///{file}") as buffer:
            assert await take_all(buffer) == [0, 1]

    file.chmod(0o644)
    asyncio.run(check())


def test_a_full_disk_says_so_and_keeps_what_was_committed(tmp_path: Path) -> None:
    """A limit on the size of files is what comes closest to a full disk without the rights to mount one."""
    run_limited(
        """
        async def main():
            buffer = build(sys.argv[1])
            await fill(buffer, 5)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
            acknowledged = 5
            with pytest.raises(StorageError, match="free some space"):
                for number in range(5, 100):
                    await buffer.put(group(number, text="x" * 50_000), TASK)
                    acknowledged += 1
            with pytest.raises(StorageError):
                await buffer.save(sys.argv[2])
            assert os.listdir(sys.argv[2]) == []
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            await buffer.put(group(acknowledged), TASK)
            assert await take_all(buffer) == list(range(acknowledged + 1))
            await buffer.close()
        asyncio.run(main())
        """,
        f"sqlite:///{tmp_path}/buffer.db",
        tmp_path / "snapshot",
    )
