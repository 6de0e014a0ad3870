"""Restarts, and processes that die: nothing is lost, nothing is made twice."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock

import pytest

from replaybuf import Lease, NotReadyError, ReplayBuffer
from tests.chunks.stores import Stores, W, numbers, problem, send, stored


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"], indirect=True)
async def test_restart__unfinished_chunks_go_on(stores: Stores) -> None:
    for index in range(7):
        chunks = stores.open()
        await send(chunks, [index])
        await chunks.close()
    assert [numbers(chunk) for chunk in await stored(stores.open())] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"], indirect=True)
async def test_restart__what_is_expected_is_known(stores: Stores) -> None:
    first = stores.open()
    await send(first, range(3))
    await first.fetch(1, timeout=5)
    await first.close()
    again = stores.open()
    assert await again.expected(W) == 3
    assert (await problem(again.put(1, worker=W, index=4, session=1, version=0))).reason == "gap"
    assert (await problem(again.put(1, worker=W, index=2, session=1, version=0))).reason == "duplicate"


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
    mortal, again = (stores.open(3, buffer_type=kind) for kind in (Undeleting, ReplayBuffer))
    await send(mortal, [0, 1])
    with pytest.raises(Died):
        await mortal.forget(W)
    await send(again, range(6))
    assert [numbers(chunk) for chunk in await stored(again)] == [[0, 1, 2], [3, 4, 5]]
    assert await again.buffer.count_where({"task_name": "chunks.fragments"}) == 0


async def test_death__between_the_selection_and_its_end_gives_the_chunks_back(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = stores.open(1)
    await send(again, [0])
    mortal = stores.open(1, buffer_type=Preparing, lease_seconds=600)
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "give_back", AsyncMock(side_effect=Died))  # the dead give nothing back
        with pytest.raises(Died):
            await mortal.fetch(1, timeout=5)
    with pytest.raises(NotReadyError):
        await again.fetch(1, timeout=0)
    prepared = await again.prepared()
    assert [chunk.start for chunk in prepared] == [0]
    over = "UPDATE rb_group SET leased_until = 1 WHERE leased_until IS NOT NULL"
    await again.buffer.storage._write(lambda tx: tx.run(over))
    selection = await again.fetch(1, timeout=60)
    assert [(chunk.start, chunk.times_sampled) for chunk in selection] == [(0, 1)]
    assert selection.number > prepared.number
