"""Restarts, and processes that die: nothing is lost, nothing is made twice."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest.mock import AsyncMock

import pytest

from replaybuf import Lease, NotReadyError, ReplayBuffer
from replaybuf.errors import FragmentError
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


async def test_restart__with_another_size_a_begun_chunk_keeps_its_own(stores: Stores) -> None:
    await send(stores.open(4), range(3))
    await send(stores.open(2), range(3, 6))
    assert [numbers(chunk) for chunk in await stored(stores.open())] == [[0, 1, 2, 3], [4, 5]]


class Died(BaseException):
    """The process was killed."""


def dying(fatal: int, *, before: bool) -> type[ReplayBuffer]:
    """Buffers that can do so many writes; the next one is the last thing that their process does, or doesn't."""
    writes = 0

    class Dying(ReplayBuffer):
        async def put(self, *args: Any, **options: Any) -> int | None:
            nonlocal writes
            writes += 1
            if writes > fatal or (before and writes == fatal):
                raise Died
            uid = await super().put(*args, **options)
            if writes == fatal:
                raise Died
            return uid

    return Dying


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
async def test_death__at_any_write_costs_nothing(stores: Stores, size: int, before: bool) -> None:
    for fatal in range(1, 13, min(3, stores.patience)):
        stores.renew()
        mortal = stores.open(size, buffer_type=dying(fatal, before=before))
        index = 0
        with suppress(Died):
            for index in range(7):
                await send(mortal, [index])
        again = stores.open(size)
        with suppress(FragmentError):  # a duplicate: it was stored
            await send(again, [index])
        await send(again, range(index + 1, 7))
        found = [numbers(chunk) for chunk in await stored(again)]
        assert found == [list(range(n, n + size)) for n in range(0, 7 - size + 1, size)]
        assert await again.expected(W) == 7


@pytest.mark.parametrize("fatal", [1, 2, 3, 4, 5])
async def test_death__a_complete_chunk_is_made_by_the_next_fetch(stores: Stores, fatal: int) -> None:
    mortal = stores.open(2, buffer_type=dying(fatal, before=False))
    with suppress(Died):
        await send(mortal, range(2))
    again = stores.open(2)
    if await again.buffer.count_where({"tags.last": True}) or await stored(again):
        assert [numbers(chunk) for chunk in await again.fetch(1, timeout=5)] == [[0, 1]]
        assert await again.expected(W) == 2
    else:
        assert fatal < 4


async def test_death__between_the_selection_and_its_end_gives_the_chunks_back(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = stores.open(1)
    await send(again, [0])
    mortal = stores.open(1, buffer_type=dying(1, before=False), lease_seconds=600)
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
