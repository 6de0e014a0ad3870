"""Chunks: joined, and after restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from replaybuf import ConfigError, Lease, NotReadyError, ReplayBufError, ReplayBuffer
from replaybuf.errors import InputError, RolloutError
from replaybuf.integrations.chunks import ChunkBufferConfig
from replaybuf.storage.sql.statements.buffer_facts import read_cursors
from replaybuf.view.metrics import prompts_drawn
from tests.chunks.conftest import Stores, W, numbers, problem, same, send, starts, stored


async def test_put__consecutive_fragments_of_each_worker_are_joined(stores: Stores) -> None:
    chunks, workers = stores.open(), ("a", "b/1", "b")
    for index in range(4, 12):
        for worker in workers:
            await send(chunks, [index], worker=worker)
    chunk_rows = [(chunk.worker, chunk.start, numbers(chunk)) for chunk in await stored(chunks)]
    joined = ((4, [4, 5, 6]), (7, [7, 8, 9]))
    assert sorted(chunk_rows) == sorted((worker, *chunk) for worker in workers for chunk in joined)
    assert [await chunks.expected(worker) for worker in workers] == [12] * 3


async def test_put__data_comes_back_as_it_was(stores: Stores) -> None:
    chunks = stores.open(2)
    data = {"image": np.arange(6, dtype=np.uint8).reshape(2, 3), "action": (1, "jump"), "status": "mine"}
    await chunks.put(data, worker=W, index=0, session=1, version=5)
    await chunks.put([b"x", None], worker=W, index=1, session=1, version=4)
    [chunk] = await chunks.fetch(1, timeout=5)
    first, second = chunk.fragments
    assert (first["image"] == data["image"]).all()
    assert first["image"].dtype == np.uint8
    assert (first["action"], first["status"], second) == ((1, "jump"), "mine", [b"x", None])
    assert (chunk.version, chunk.versions, chunk.session, chunk.times_sampled) == (4, (5, 4), 1, 1)


async def test_put__only_chunks_are_counted_by_len(stores: Stores) -> None:
    chunks = stores.open()
    await send(chunks, range(5))
    assert len(chunks) == 1
    cursors = await chunks.buffer.storage._read(lambda tx: read_cursors(tx, chunks.name))
    assert [cursor.position for cursor in cursors] == [0, 5]
    assert prompts_drawn(cursors) == {}  # a worker's place is none in a dataset of prompts


async def test_put__what_can_not_be_stored_is_refused_and_may_be_put_again(stores: Stores) -> None:
    chunks = stores.open(2)
    await send(chunks, [0])
    with pytest.raises(RolloutError):
        await chunks.put(object(), worker=W, index=1, session=1, version=0)
    await send(chunks, [1])
    assert await starts(chunks) == [0]


WRONG: list[tuple[str, Any]] = [
    *(("worker", value) for value in ("", 3, "x" * 151, "nul\0")),
    *((name, value) for name in ("index", "session", "version") for value in (-1, 1.0, True, None, 2**53)),
]


async def test_put__arguments_are_checked(stores: Stores) -> None:
    good: dict[str, Any] = {"worker": W, "index": 0, "session": 1, "version": 0}
    for name, value in WRONG:
        with pytest.raises(InputError, match=name):
            await stores.open().put(1, **(good | {name: value}))


# Problems


async def test_gap__is_an_error_that_says_what_to_do(stores: Stores) -> None:
    chunks = stores.open()
    await send(chunks, range(2))
    error = await problem(chunks.put(1, worker=W, index=3, session=1, version=0))
    assert (error.reason, error.expected) == ("gap", 2)
    assert "the next one is 2" in str(error)
    assert isinstance(error, ReplayBufError)
    await send(chunks, [2])
    assert await starts(chunks) == [0]


async def test_duplicate__is_an_error_also_when_its_chunk_has_left(stores: Stores) -> None:
    chunks = stores.open()
    await send(chunks, range(4))
    await chunks.fetch(1, timeout=5)
    assert len(chunks) == 0
    for index in range(4):
        error = await problem(chunks.put(1, worker=W, index=index, session=1, version=0))
        assert (error.reason, error.expected) == ("duplicate", 4)


async def test_session__a_newer_one_begins_and_all_of_the_older_leaves(stores: Stores) -> None:
    chunks = stores.open(2, max_times_sampled=0)
    await send(chunks, range(3), version=9)
    await chunks.fetch(1, timeout=5)
    assert await chunks.advance(0, session=2) == 1
    await send(chunks, [7, 8], session=2)
    assert [(chunk.session, chunk.start) for chunk in await stored(chunks)] == [(2, 7)]
    with pytest.raises(NotReadyError):
        await chunks.prepared()
    assert await chunks.buffer.count_where({"tags.session": 1}) == 0


async def test_session__a_worker_with_a_wrong_one_does_no_harm(stores: Stores) -> None:
    chunks = stores.open(2)
    await send(chunks, range(3))
    error = await problem(chunks.put(1, worker="lost", index=0, session=2, version=9))
    assert (error.reason, error.expected) == ("session", 1)
    assert "hasn't begun" in str(error)
    await send(chunks, [3])
    assert await starts(chunks) == [0, 2]


async def test_forget__a_worker_may_start_anew(stores: Stores) -> None:
    chunks = stores.open(2)
    await send(chunks, range(3))
    error = await problem(chunks.put(1, worker=W, index=4, session=1, version=0))
    assert error.reason == "gap"
    assert await chunks.forget(W) == 1
    assert await chunks.expected(W) is None
    await send(chunks, range(2))
    assert await chunks.expected(W) == 2
    assert await chunks.forget("unknown") == 0


async def test_forget__a_chunk_from_before_stays_beside_one_of_the_same_start(stores: Stores) -> None:
    chunks = stores.open(2)
    for version in (1, 2):
        await send(chunks, range(2), version=version)
        await chunks.forget(W)
    assert [(chunk.start, chunk.version) for chunk in await stored(chunks)] == [(0, 1), (0, 2)]
    assert len(await chunks.fetch(2, timeout=0)) == 2


async def test_damage__a_fragment_that_can_not_be_read_takes_its_chunk_with_it(stores: Stores) -> None:
    chunks = stores.open()
    await send(chunks, range(2))
    find = chunks.buffer.find

    async def damaged(*args: Any, **options: Any) -> AsyncIterator[Any]:
        async for item in find(*args, **options):
            if (item.tags or {}).get("index") == 1:
                item.item, item.error = [], "bit rot"
            yield item

    chunks.buffer.find = damaged  # type: ignore[method-assign]
    await send(chunks, range(2, 6))
    assert await starts(chunks) == [3]
    assert await chunks.buffer.dropped("chunks.damaged") == 1


def test_config__is_checked() -> None:
    for options in (
        {},
        {"fragments_per_chunk": 0},
        {"fragments_per_chunk": 2, "max_staleness": -1},
        {"fragmentsperchunk": 2},
    ):
        with pytest.raises(ConfigError, match="ChunkBufferConfig"):
            ChunkBufferConfig.from_mapping({"url": "memory://"} | options)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"], indirect=True)
async def test_restart__unfinished_chunks_go_on_and_what_is_expected_and_prepared_is_known(stores: Stores) -> None:
    for index in range(7):
        chunks = stores.open()
        await send(chunks, [index])
        await chunks.close()
    reopened = stores.open()
    assert [numbers(chunk) for chunk in await stored(reopened)] == [[0, 1, 2], [3, 4, 5]]
    selection = await reopened.fetch(2, timeout=5)
    await reopened.close()
    reopened = stores.open()
    assert same(await reopened.prepared(), selection)
    assert await reopened.expected(W) == 7
    assert (await problem(reopened.put(1, worker=W, index=8, session=1, version=0))).reason == "gap"
    assert (await problem(reopened.put(1, worker=W, index=2, session=1, version=0))).reason == "duplicate"


class Died(BaseException):
    """The process was killed."""


class Undeleting(ReplayBuffer):
    """Buffers whose process dies before it deletes groups by their uids."""

    async def delete(self, query: Any) -> int:
        if "uid" in query:
            raise Died
        return await super().delete(query)


class Preparing(ReplayBuffer):
    """Buffers whose process dies after its put, which is that of a selection."""

    async def put(self, *args: Any, **options: Any) -> int | None:
        await super().put(*args, **options)
        raise Died


async def test_death__before_the_removed_fragments_are_deleted_costs_nothing(stores: Stores) -> None:
    mortal, survivor = (stores.open(3, buffer_type=kind) for kind in (Undeleting, ReplayBuffer))
    await send(mortal, [0, 1])
    with pytest.raises(Died):
        await mortal.forget(W)
    await send(survivor, range(6))
    assert [numbers(chunk) for chunk in await stored(survivor)] == [[0, 1, 2], [3, 4, 5]]
    assert await survivor.buffer.count_where({"task_name": "chunks.fragments"}) == 0


async def test_death__between_the_selection_and_its_end_gives_the_chunks_back(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    reopened = stores.open(1)
    await send(reopened, [0])
    mortal = stores.open(1, buffer_type=Preparing)
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "give_back", AsyncMock(side_effect=Died))  # the dead give nothing back
        with pytest.raises(Died):
            await mortal.fetch(1, timeout=5)
    with pytest.raises(NotReadyError):
        await reopened.fetch(1, timeout=0)
    prepared = await reopened.prepared()
    assert [chunk.start for chunk in prepared] == [0]
    over = "UPDATE rb_group SET leased_until = 1 WHERE leased_until IS NOT NULL"
    await reopened.buffer.storage._write(lambda tx: tx.run(over))
    selection = await reopened.fetch(1, timeout=60)
    assert [(chunk.start, chunk.times_sampled) for chunk in selection] == [(0, 1)]
    assert selection.number > prepared.number
