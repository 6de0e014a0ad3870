"""Buffers of one database, which are apart; the buffer's calls: what they return and refuse; what notebooks show."""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import replaybuf
from replaybuf import (
    ConfigError,
    FullError,
    Lease,
    LeaseLostError,
    Prompt,
    ReplayBuffer,
    ReplayBufferConfig,
    Status,
)
from replaybuf.buffer.drawing import DrawOptions, DrawRequest
from replaybuf.buffer.putting import Putting
from replaybuf.buffer.sync import SyncReplayBuffer
from replaybuf.common.units import html_table
from replaybuf.errors import ConflictError, InputError
from replaybuf.integrations.chunks import ChunkBufferConfig
from tests.cancellation.conftest import take
from tests.stores import TASK, build, fill, group, numbers_of, take_all, until


class Buffers:
    """Opens buffers of one database, and closes them after the test."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.url = url
        self._stack = stack

    async def open(self, name: str = "default", **options: Any) -> ReplayBuffer:
        return await self._stack.enter_async_context(build(self.url, name=name, **options))


@pytest.fixture
async def buffers(shared_url: str) -> AsyncIterator[Buffers]:
    async with AsyncExitStack() as stack:
        yield Buffers(shared_url, stack)


async def numbers_in(buffer: ReplayBuffer) -> list[int]:
    """The numbers of all groups, in order."""
    return [int(item.item[0].rollout_id) async for item in buffer.find({})]


async def uids_in(buffer: ReplayBuffer) -> list[int]:
    return [item.uid async for item in buffer.find({})]


async def totals(buffer: ReplayBuffer) -> dict[str, int]:
    """What was counted of the task, without what never happened."""
    numbers = (await buffer.metrics(distributions=False))["tasks"].get(TASK, {})
    return {name: n for name, n in numbers.items() if isinstance(n, int) and n}


async def test_what_is_put_into_one_is_not_in_the_other(buffers: Buffers) -> None:
    ours, theirs = await buffers.open(), await buffers.open("eval")
    await fill(ours, 3)
    assert (len(ours), len(theirs)) == (3, 0)
    assert await theirs.count(TASK, Status.COMPLETED) == 0
    assert await theirs.get(10, TASK) == []
    assert await theirs.is_ready({TASK: 1}) is False
    assert await totals(theirs) == {}
    assert sorted(await take_all(ours)) == [0, 1, 2]


async def test_a_wait_is_not_ended_by_a_put_into_the_other(buffers: Buffers) -> None:
    ours, theirs = await buffers.open(), await buffers.open("eval")
    waiting = asyncio.create_task(theirs.take_batch({TASK: 1}, timeout=30))
    await fill(ours, 3)
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await theirs.put(group(9), TASK)
    batch, _ = await waiting
    assert numbers_of(batch[TASK]) == [9]
    assert len(ours) == 3


async def test_queries_find_change_and_delete_their_own(buffers: Buffers) -> None:
    ours, theirs = await buffers.open(), await buffers.open("eval")
    await fill(ours, 2)
    await fill(theirs, 3, first=10)
    foreign = await uids_in(theirs)
    assert sorted(await numbers_in(ours)) == [0, 1]
    assert await ours.count_where({}) == 2
    assert await ours.count_where({"uid": {"$in": foreign}}) == 0
    assert await ours.update({}, status="aborted", priority=7) == 2
    assert await ours.update_priorities(dict.fromkeys(foreign, 5.0)) == 0
    assert {item.priority async for item in theirs.find({})} == {1.0}
    assert await theirs.count(TASK, Status.COMPLETED) == 3
    assert await ours.delete({}) == 2
    assert (len(ours), len(theirs)) == (0, 3)


async def test_refreshes_keys_and_replacements_are_of_their_own_groups(buffers: Buffers) -> None:
    ours, theirs = await buffers.open(), await buffers.open("eval")
    for number, buffer in enumerate((ours, theirs, ours)):
        await buffer.put(group(number), TASK, key="prompt-1", model_step=1, current_train_step=2)
    assert (await numbers_in(ours), await numbers_in(theirs)) == ([2], [1])
    assert (await totals(ours))["replaced"] == 1
    assert "replaced" not in await totals(theirs)
    with pytest.raises(ConflictError):
        await ours.put(group(2), TASK, replaces=await uids_in(theirs))
    assert await ours.refresh_staleness(task_stale_thresholds={TASK: 4}, current_train_step=9) == {TASK: 1}
    assert [(item.status, item.staleness) async for item in theirs.find({})] == [(Status.COMPLETED, 0)]
    assert [(item.status, item.staleness) async for item in ours.find({})] == [(Status.EXPIRED, 7)]


async def test_limits_are_those_of_one_buffer(buffers: Buffers) -> None:
    """Its capacity, and how far its puts may be ahead of its draws."""
    ours, theirs = await buffers.open(capacity=2), await buffers.open("eval")
    rated = await buffers.open("rated", samples_per_insert=1, error_buffer=2, put_timeout=0)
    for buffer, count in ((ours, 4), (theirs, 4), (rated, 2)):
        for number in range(count):
            await buffer.put(group(number), TASK)
    assert await numbers_in(ours) == [2, 3]
    assert (await totals(ours))["evicted"] == 2
    assert "evicted" not in await totals(theirs)
    assert await take_all(theirs) == [0, 1, 2, 3]
    with pytest.raises(FullError):
        await rated.put(group(2), TASK)


async def test_leases_are_held_and_ended_by_their_own(buffers: Buffers) -> None:
    ours, theirs = await buffers.open(), await buffers.open("eval")
    await fill(ours, 2)
    await fill(theirs, 2, first=10)
    own_lease = await ours.lease_batch({TASK: 2}, seconds=60, heartbeat=False)
    assert (len(ours), len(theirs)) == (0, 2)
    assert (await totals(ours))["leased"] == 2
    assert "leased" not in await totals(theirs)
    other = await theirs.lease_batch({TASK: 2}, seconds=60, heartbeat=False)
    assert other.token > own_lease.token
    # A token and uids are no way into another buffer.
    assert await theirs.storage.give_back(own_lease._leased, sorted(own_lease.open)) == 0
    await own_lease.acknowledge()
    assert await other.give_back() == 2
    assert (len(ours), len(theirs)) == (0, 2)


async def test_the_end_of_a_lease_is_noticed_by_its_own_buffer(buffers: Buffers) -> None:
    ours, theirs = await buffers.open(), await buffers.open("eval")
    await fill(theirs, 1)
    lease = await theirs.lease_batch({TASK: 1}, seconds=0.2, heartbeat=False)
    await until(lambda: len(theirs) == 1)
    with pytest.raises(LeaseLostError):
        await lease.acknowledge()
    assert (await totals(theirs))["lease_expired"] == 1
    assert await totals(ours) == {}


async def test_an_archive_is_that_of_one_buffer(buffers: Buffers) -> None:
    ours, theirs = await buffers.open(archive=1), await buffers.open("eval", archive=100)
    for buffer in (ours, theirs):
        await fill(buffer, 3)
        await take_all(buffer)

    async def pruned() -> bool:
        return (await totals(ours))["archived"] == 1

    await until(pruned)
    assert (await totals(theirs))["archived"] == 3


async def test_random_draws_are_those_of_the_buffer_alone(shared_url: str, tmp_path: Path) -> None:
    """With the same seed and the same uids: what the other one draws in between doesn't matter."""
    draws: list[list[int]] = []
    for url, has_others in ((f"sqlite:///{tmp_path}/alone.db", False), (shared_url, True)):
        async with (
            build(url, policy="prioritized", seed=1) as ours,
            build(url, name="b", policy="prioritized", seed=2) as theirs,
        ):
            for number in range(12):
                await ours.put(group(number), TASK, priority=1 + number)
            await fill(theirs, 12)
            draws.append([])
            for _ in range(6):
                draws[-1] += numbers_of(await ours.get(1, TASK))
                if has_others:
                    await theirs.get(2, TASK)
    assert draws[0] == draws[1]


async def test_a_snapshot_holds_one_buffer_and_comes_into_a_database_that_has_others(
    buffers: Buffers, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/source.db"
    async with build(url, policy="staleness", max_times_sampled=2) as source, build(url, name="beside") as beside:
        for number in range(4):
            await source.put(group(number), TASK, key=f"key-{number}", priority=number)
        await fill(beside, 2, first=50)
        await source.get(1, TASK)
        await source.delete({"uid": 2})
        await source.save(tmp_path / "copy")
    ours = await buffers.open()
    await fill(ours, 3, first=100)
    await ours.put(group(103), TASK, key="key-3")
    before = await uids_in(ours)
    theirs = await buffers.open("eval", policy="staleness", max_times_sampled=2)
    await theirs.resume(tmp_path / "copy")
    # Other uids, in the same order; all else is as it was.
    uids = await uids_in(theirs)
    assert not set(uids) & set(before)
    assert await numbers_in(theirs) == [0, 2, 3]
    items = [(item.priority, item.key, item.times_sampled) async for item in theirs.find({})]
    assert items == [(0.0, "key-0", 1), (2.0, "key-2", 0), (3.0, "key-3", 0)]
    numbers = await totals(theirs)
    assert {name: numbers[name] for name in ("put", "sampled_new", "deleted")} == {
        "put": 4,
        "sampled_new": 1,
        "deleted": 1,
    }
    # Nothing of the other one has changed, and both go on.
    assert await uids_in(ours) == before
    later = await theirs.put(group(9), TASK, key="key-3")
    assert later is not None
    assert later > max(*uids, *before)
    assert await numbers_in(theirs) == [0, 2, 9]
    assert len(ours) == 4
    assert sorted(set(await take_all(theirs))) == [0, 2, 9]
    assert sorted(await take_all(ours)) == [100, 101, 102, 103]


async def test_a_resume_leaves_what_the_other_has_in_hand(buffers: Buffers, tmp_path: Path) -> None:
    """A take that is undone after a resume of another buffer still has its payloads."""
    ours, theirs = await buffers.open(), await buffers.open("eval")
    await fill(ours, 2)
    await ours.save(tmp_path / "copy")
    undo = await take(ours, 2)
    assert len(ours) == 0
    await theirs.resume(tmp_path / "copy")
    await undo()
    assert sorted(await take_all(ours)) == [0, 1]


async def test_a_name_is_checked(shared_url: str) -> None:
    for name in ("", "x" * 201, "a\x00b"):
        with pytest.raises((ConfigError, InputError)):
            ReplayBufferConfig(url=shared_url, name=name).build()
    async with build(shared_url, name="é' \"; --") as buffer:
        await fill(buffer, 1)
        assert len(buffer) == 1


@pytest.fixture
async def buffer() -> AsyncIterator[ReplayBuffer]:
    async with ReplayBufferConfig(url="memory://", policy="fifo").build() as buffer:
        yield buffer


@pytest.fixture
def blocking() -> Iterator[SyncReplayBuffer]:
    with ReplayBufferConfig(url="memory://", policy="fifo").build_sync() as buffer:
        yield buffer


async def test_what_is_entered_in_the_wrong_way_names_the_right_one(
    buffer: ReplayBuffer, blocking: SyncReplayBuffer
) -> None:
    chunks = ChunkBufferConfig(url="memory://", fragments_per_chunk=1)
    leasing, also_leasing = buffer.lease_batch({"math": 1}), blocking.lease_batch({"math": 1})
    built: Any
    for built, message in (
        (buffer, r"open it by `async with`; for `with`, make one by build_sync\(\)"),
        (leasing, "is entered by `async with`, not by `with`"),
    ):
        with pytest.raises(InputError, match=message), built:
            pass
    for built, message in (
        (blocking, r"open it by `with`; for `async with`, make one by build\(\)"),
        (also_leasing, "is entered by `with`, not by `async with`"),
    ):
        with pytest.raises(InputError, match=message):
            async with built:
                pass
    await leasing
    also_leasing.begin()
    with pytest.raises(ConfigError, match=r"run those of build\(\) by replaybuf.buffer.sync.run"):
        chunks.build_sync()


async def test_a_lease_that_nobody_begins_is_a_warning(buffer: ReplayBuffer, blocking: SyncReplayBuffer) -> None:
    """And one that was begun is none."""
    with pytest.warns(RuntimeWarning, match="nothing was leased"):
        buffer.lease_batch({"math": 1})
    with pytest.warns(RuntimeWarning, match="nothing was leased") as caught:
        blocking.lease_batch({"math": 1})
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await buffer.lease_batch({"math": 1})
        async with buffer.lease_batch({"math": 1}):
            pass
        with blocking.lease_batch({"math": 1}):
            pass
        gc.collect()


ROOT = Path(replaybuf.__file__).parent
ABOVE = [
    path
    for name in (
        "sync",
        "produce",
        "integrations/chunks",
        "integrations/reverb",
        "demo",
        "cli",
        "doctor",
        "config.py",
    )
    for path in sorted([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
]


def test_nothing_above_the_buffer_reaches_through_it() -> None:
    """To its storage; modules of `replaybuf.storage` are another thing."""
    assert [
        f"{path}:{node.lineno}"
        for path in ABOVE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "storage"
    ] == []


def test_all_puts_take_the_same_options() -> None:
    for options, puts in (
        ("FillOptions", (ReplayBuffer.put, ReplayBuffer.put_many, Putting.prepare)),
        ("PutOptions", (Lease.finish, Lease.save, Prompt.finish)),
    ):
        for call in puts:
            assert f"Unpack[{options}]" in str(inspect.signature(call).parameters["options"].annotation)


def test_all_draws_take_the_same_options() -> None:
    """Those of `DrawOptions`, whose defaults are written once."""
    own = {"sizes", "group_status", "statuses", "worker", "beta", "deferred"}
    assert DrawOptions.__optional_keys__ == set(inspect.signature(DrawRequest.checked).parameters) - own
    for draw in (ReplayBuffer.get, ReplayBuffer.take_batch, ReplayBuffer.sample, ReplayBuffer.lease_batch):
        assert "Unpack[DrawOptions]" in str(inspect.signature(draw).parameters["options"].annotation)


# What notebooks show of buffers, leases and groups


async def test_a_buffer_is_a_table_of_its_groups(buffer: ReplayBuffer) -> None:
    await fill(buffer, 3)
    async with buffer.lease_batch({TASK: 1}):
        page = buffer._repr_html_()
    assert f'<td style="text-align: left">{TASK}</td>' in page
    numbers = [part.partition("<")[0] for part in page.split('text-align: right">')[1:]]
    assert numbers == ["2", "1"]
    await buffer.close()
    assert "closed" in buffer._repr_html_()


async def test_a_lease_and_its_groups_are_tables(buffer: ReplayBuffer) -> None:
    await fill(buffer, 2)
    async with buffer.lease_batch({TASK: 2}) as lease:
        assert "Lease" in lease._repr_html_()
        assert lease._repr_html_().count("<tr>") == 3
        [item, *_] = lease.items[TASK]
        assert f"group {item.uid} of {TASK}" in item._repr_html_()


def test_a_synchronous_buffer_is_shown_like_the_other(blocking: SyncReplayBuffer) -> None:
    assert "status" in (blocking._repr_html_() or "")


def test_nothing_that_is_shown_is_html_and_all_of_it_is_short() -> None:
    hostile = "<script>alert(1)</script>\x1b[31m"
    page = html_table(hostile, (hostile,), [(hostile,), ("x" * 1000,), (None,), (0.5,), *[(1,)] * 60])
    assert "<script>" not in page
    assert "\x1b" not in page
    assert "x" * 201 not in page
    assert "14 more" in page
