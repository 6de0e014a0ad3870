"""Imports: each group exactly once, whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replaybuf import FullError, ReplayBufferConfig, Status
from replaybuf.common.progress import Progress
from replaybuf.errors import InputError
from replaybuf.files import importing
from replaybuf.files.importing import import_groups, survey
from replaybuf.files.sources import RolloutFile
from tests.files.conftest import contents
from tests.scripts import Program


async def test_a_second_import_finds_nothing_to_do_also_after_draws(file: Path, url: str) -> None:
    async with ReplayBufferConfig(url=url).build() as buffer:
        assert (await buffer.import_from(file)).groups == 5
        await buffer.get(2, "math")
        assert (await buffer.import_from(file)).groups == 0
        assert len(buffer) == 3
        assert (await buffer.import_from(file, again=True)).groups == 5


async def test_a_file_is_known_by_its_own_bytes_and_how_its_columns_are_read(
    file: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the payloads that are made of it, which an upgrade may encode otherwise; nor by its name."""
    async with ReplayBufferConfig(url=url).build() as buffer:
        assert (await buffer.import_from(file)).groups == 5
        other = Path(shutil.copy(file, tmp_path / "other.jsonl"))
        with monkeypatch.context() as upgraded:
            codec, turned = importing._PLAIN_CODEC, lambda rollouts: [dict(reversed(row.items())) for row in rollouts]
            upgraded.setattr(
                importing, "_PLAIN_CODEC", SimpleNamespace(encode=lambda rollouts: codec.encode(turned(rollouts)))
            )
            assert (await buffer.import_from(other)).there == 5
        longer = Path(shutil.copy(file, tmp_path / "longer.jsonl"))
        await asyncio.to_thread(lambda: longer.write_bytes(longer.read_bytes() + b"\n"))
        assert (await buffer.import_from(longer)).groups == 5


async def test_a_restore_of_a_checkpoint_takes_the_import_back(file: Path, url: str) -> None:
    async with ReplayBufferConfig(url=url).build() as buffer:
        await buffer.checkpoint(1)
        await buffer.import_from(file)
        await buffer.restore(1)
        assert (await buffer.import_from(file)).groups == 5


async def test_two_imports_of_one_file_at_once_double_nothing(file: Path, url: str) -> None:
    source = RolloutFile(file)
    async with ReplayBufferConfig(url=url).build() as buffer:
        contents_of_file = await survey(buffer.storage, source)
        cursor = await buffer.storage.cursor(f"import {contents_of_file.digest}")  # type: ignore[attr-defined]
        await import_groups(buffer.storage, source, contents_of_file)
        assert not await buffer.storage.put_with_cursor([], cursor)  # type: ignore[attr-defined]
        assert len(buffer) == 5


async def test_a_dry_run_counts_and_puts_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_GROUPS", 2)
    async with ReplayBufferConfig(url="memory://", capacity=1, on_full="reject").build() as buffer:
        with pytest.raises(FullError):
            await buffer.import_from(file)
        summary = await buffer.import_from(file, dry_run=True)
        assert len(buffer) == 2
    assert (summary.groups, summary.there, summary.found.new) == (0, 2, 3)
    assert summary.found.there == {("code", Status.COMPLETED): 1, ("math", Status.COMPLETED): 1}
    assert summary.found.groups == {("code", Status.COMPLETED): 3, ("math", Status.COMPLETED): 2}
    assert summary.found.rollouts.total() == 10


@pytest.mark.fast
async def test_both_passes_tell_their_progress(memory: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a total that isn't known, the second of the groups that are new."""
    monkeypatch.setattr(importing, "_GROUPS", 2)
    monkeypatch.setattr("replaybuf.common.progress._SECONDS", 0)
    calls_of_progress: list[Progress] = []
    await memory.import_from(file, progress=calls_of_progress.append)
    counts = [(progress.groups, progress.total) for progress in calls_of_progress]
    reading = [(0, 0), (2, 0), (4, 0), (5, 0), (5, 5)]
    assert counts == [*reading, (0, 5), (2, 5), (4, 5), (5, 5), (5, 5)]
    assert calls_of_progress[4].bytes == calls_of_progress[-1].bytes > 0
    calls_of_progress.clear()
    await memory.import_from(file, dry_run=True, progress=calls_of_progress.append)
    assert [(progress.groups, progress.total) for progress in calls_of_progress] == reading


@pytest.mark.parametrize("calls", [2, 7])
async def test_an_import_that_is_cancelled_ends_at_once_and_goes_on(
    file: Path, url: str, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """In its first pass, and in its second."""
    monkeypatch.setattr(importing, "_GROUPS", 2)
    monkeypatch.setattr("replaybuf.common.progress._SECONDS", 0)
    calls_of_progress: list[Progress] = []
    async with ReplayBufferConfig(url=url).build() as buffer:

        def tell(progress: Progress) -> None:
            calls_of_progress.append(progress)
            if len(calls_of_progress) == calls:
                running.cancel()

        running = asyncio.ensure_future(buffer.import_from(file, progress=tell))
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(calls_of_progress) == calls
        stored_count = len(buffer)
        assert stored_count == (0 if calls == 2 else 2)
        assert (await buffer.import_from(file)).groups == 5 - stored_count


async def test_the_limits_hold_and_what_was_put_stays(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_GROUPS", 2)
    async with ReplayBufferConfig(url="memory://", capacity=2, on_full="reject").build() as buffer:
        with pytest.raises(FullError, match="the capacity is 2"):
            await buffer.import_from(file)
        assert len(buffer) == 4
        await buffer.get(1, "code")
        summary = await buffer.import_from(file)
        assert (summary.groups, summary.there) == (1, 4)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": 5}, "expected the path of a file, got 5"),
        ({"source": ""}, "expected the path of a file"),
        ({"source": "a.jsonl", "fields": ["a=b"]}, "fields must be a dict such as"),
        ({"source": "a.jsonl", "fields": {"response": 1}}, "fields must be a dict such as"),
        ({"source": "a.jsonl", "fields": {"respnse": "a"}}, "respnse is no field of rollouts; a mapping is OURS="),
        ({"source": "a.jsonl", "as_task": ""}, "as_task is empty"),
        ({"source": "a.jsonl", "as_status": "done"}, "unknown status 'done'"),
    ],
)
async def test_wrong_arguments_are_refused(memory: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        await memory.import_from(**arguments)


def _import(url: str, file: Path) -> Program:
    with open(os.devnull, "wb") as quiet:
        return Program("-m", "replaybuf", "import", url, str(file), cwd=file.parent, stdout=quiet)


@pytest.mark.parametrize(("groups", "kills"), [(2000, 1), pytest.param(20_000, 8, marks=pytest.mark.long)])
async def test_an_import_that_is_killed_goes_on(shared_url: str, tmp_path: Path, groups: int, kills: int) -> None:
    """Also when that is killed again; and half of what was there by then was drawn meanwhile."""
    file = tmp_path / "a.jsonl"
    row = {"message": "1 + 1?", "response": "2" * 2000, "task_name": "math"}
    file.write_text("".join(json.dumps({**row, "group_id": n}) + "\n" for n in range(groups)))
    taken: list[int] = []
    async with ReplayBufferConfig(url=shared_url).build() as buffer:
        for _ in range(kills):
            process, before = _import(shared_url, file), len(buffer)
            async with asyncio.timeout(60):
                while len(buffer) == before:  # noqa: ASYNC110 another process puts them
                    await asyncio.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL
            stored_count = len(buffer)
            assert before < stored_count < groups - len(taken)
            taken += [group[0].group_id for group in await buffer.get(stored_count // 2, "math")]
        assert _import(shared_url, file).wait(60) == 0
        remaining = [group[0].group_id for _, group in await contents(buffer)]
    assert taken + remaining == list(range(groups))
