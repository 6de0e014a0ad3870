"""Draws that are undone after the payloads that they had taken were swept: no group comes back without its arrays."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import PayloadStoreError
from replaybuf.storage.sql.tasks import delivery, sweeper
from replaybuf.storage.sql.tasks import payload_files as tasks
from replaybuf.storage.sql.tasks.delivery import Drawing
from tests.cli.doctored import examine, wrong
from tests.places.arrays import apart, ask, files, heavy, named, payload_rows, take_all, until_no_files
from tests.stores import TASK, build, until

#: How many of two groups in a file are taken, and how many are there again.
WAYS = {"another group is in it": (1, 2), "it was deleted": (2, 0)}


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/buffer.db"
    return str(request.getfixturevalue("lent_database"))


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads that were taken are swept at once, whether or not they were read."""
    monkeypatch.setattr(delivery, "READING_SECONDS", 0.0)
    monkeypatch.setattr(sweeper, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(sweeper, "_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(sweeper, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(tasks, "_CHECK_SECONDS", 0.1)


@pytest.mark.parametrize(
    ("url", "way"),
    [
        ("sqlite", "another group is in it"),
        ("postgresql", "it was deleted"),
        pytest.param("sqlite", "it was deleted", marks=pytest.mark.long),
        pytest.param("postgresql", "another group is in it", marks=pytest.mark.long),
    ],
    indirect=["url"],
)
async def test_a_draw_that_could_not_be_read_is_undone_late(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Groups whose arrays are there are drawn again, byte for byte; the others are set aside, and say why."""
    taken_count, back_count = WAYS[way]
    may_undo, undo = threading.Event(), Drawing._give_back

    async def undo_late(drawing: Drawing, *arguments: Any) -> None:
        assert await asyncio.to_thread(may_undo.wait, 20)
        await undo(drawing, *arguments)

    monkeypatch.setattr(Drawing, "_give_back", undo_late)
    async with apart(url, folder) as buffer, build(url) as other:
        await buffer.put_many([heavy(1), heavy(2)], TASK)
        away = rename(folder, folder.with_name("away"))
        taking = asyncio.create_task(buffer.get(taken_count, TASK))
        await until(lambda: _has(url, 2 - taken_count))
        rename(away, folder)
        if back_count == 0:
            await until_no_files(url)
            assert files(folder) == {}
        may_undo.set()
        with pytest.raises(PayloadStoreError):
            await taking
        assert await buffer.count(TASK, "completed") == back_count
        failed = await ask(url, "SELECT error FROM rb_group WHERE error IS NOT NULL")
        assert len(failed) == await buffer.count(TASK, "failed") == 2 - back_count
        assert all("its arrays were deleted" in error for (error,) in failed)
        assert await payload_rows(url) == back_count
        assert [*(await named(url)).values()] == [back_count] * (back_count > 0)
        monkeypatch.setattr(delivery, "READING_SECONDS", 60.0)  # or the sweep may be faster than the read
        assert sorted(await take_all(other)) == [1, 2][:back_count]
    assert set(wrong(await asyncio.to_thread(examine, url))) <= {"payloads"}
    async with build(url) as other:
        await other.delete({})
        await until_no_files(url)
    assert files(folder) == {}


def rename(old: Path, new: Path) -> Path:
    return old.rename(new)


async def _has(url: str, rows: int) -> bool:
    return await payload_rows(url) == rows
