"""No prompt of a dataset is skipped, none is drawn twice, whatever kind of dataset it is."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import Mock

import pytest

from replaybuf import FencedError, ReplayBuffer, ReplayBufferConfig, Sampler, Status
from replaybuf.buffer.sync import run
from replaybuf.errors import DecodeError, InputError, RolloutError
from tests.produce.conftest import Shuffled, complete, indexed, ledger_of, numbers, prompt
from tests.stores import TASK, build


async def test_prompts_come_in_the_order_of_the_dataset(url: str) -> None:
    """They are numbered over all draws."""
    numbered: list[int] = []

    def make(item: Any, number: int) -> list[Any]:
        numbered.append(number)
        return [item]

    async with build(url) as buffer:
        ledger = ledger_of(buffer, indexed(5), TASK, make_group=make)
        assert numbers(await ledger.draw(2)) == [0, 1]
        assert numbers(await ledger.draw(9)) == numbered[2:] == [2, 3, 4]
        assert await ledger.draw() == []
        counts = await ledger.counts()
        assert (counts.drawn, counts.in_flight, counts.waiting, counts.finished) == (5, 5, 0, 0)


async def test_several_workers_draw_every_prompt_once_an_epoch(url: str) -> None:
    """Each with a dataset of its own, going by the cursor of all."""
    size, epochs = 12, 2
    async with AsyncExitStack() as stack:
        workers = 1 if url == "memory://" else 3
        buffers = [await stack.enter_async_context(build(url)) for _ in range(workers)]
        ledgers = [ledger_of(buffers[place % workers], Shuffled(size), TASK, epochs=epochs) for place in range(4)]
        draws: Counter[int] = Counter()

        async def work(ledger: Sampler, count: int) -> None:
            while prompts := await ledger.draw(count):
                draws.update(numbers(prompts))
                for leased in prompts:
                    await leased.finish(complete(leased.group))

        await asyncio.gather(*(work(ledger, place % 3 + 1) for place, ledger in enumerate(ledgers)))
        assert draws == dict.fromkeys(range(size), epochs)
        assert await buffers[0].count(TASK, "completed") == size * epochs


async def test_a_restore_takes_the_cursor_back(buffer: ReplayBuffer) -> None:
    """What was in flight at the checkpoint is handed out again, then what was drawn since; nothing is skipped."""
    ledger = ledger_of(buffer, Shuffled(8), TASK)
    finished, flying = await ledger.draw(2)
    await finished.finish(complete(finished.group))
    await buffer.checkpoint(1)
    await flying.finish(complete(flying.group))
    later = await ledger.draw(3)
    for leased in later[:2]:
        await leased.finish(complete(leased.group))
    await buffer.get(9, TASK)
    await buffer.restore(1)
    with pytest.raises(FencedError):
        await later[2].finish(complete(later[2].group))
    resumed = ledger_of(buffer, Shuffled(8), TASK)
    redrawn = [*await resumed.draw(1), *await resumed.draw(3), *await ledger.draw(9)]
    assert numbers(redrawn[:4]) == numbers([flying, *later])
    for leased in redrawn:
        await leased.finish(complete(leased.group))
    results = Counter(int(group[0].rollout_id) for group in await buffer.get(99, TASK))
    assert results == dict.fromkeys(range(8), 1)


async def test_the_dataset_is_left_as_it_is() -> None:
    async with build("memory://") as buffer:
        dataset = [prompt(1), [prompt(2), prompt(3)]]
        dataset[0].status = Status.COMPLETED  # type: ignore[union-attr]
        first, second = await ledger_of(buffer, dataset, TASK).draw(2)
        assert [len(first.group), len(second.group)] == [1, 2]
        assert (first.group[0].status, dataset[0].status) == (Status.INIT, Status.COMPLETED)  # type: ignore[union-attr]
        first.group[0].message.append({"role": "assistant", "content": "6"})
        first.group[0].message[0]["content"] = "?"
        assert dataset[0].message == prompt(1).message  # type: ignore[union-attr]


# What a prompt ledger refuses


async def test_a_result_without_a_status_is_refused(buffer: ReplayBuffer) -> None:
    """Whoever forgets the status would get the same prompt again, for ever. The prompt stays in flight."""
    [leased] = await ledger_of(buffer, indexed(1), TASK).draw()
    with pytest.raises(InputError, match=r"status.*COMPLETED, or call give_back"):
        await leased.finish()
    await leased.finish(complete(leased.group))
    assert await buffer.count(TASK, Status.COMPLETED) == 1


async def test_what_is_no_group_says_that_make_group_made_it(buffer: ReplayBuffer) -> None:
    with pytest.raises(RolloutError, match=r"item 0 .*by make_group"):
        await ledger_of(buffer, [{"a": 1}], TASK).draw()
    with pytest.raises(RolloutError, match="by make_group"):
        await ledger_of(buffer, indexed(1), TASK, make_group=lambda item, number: item).draw()


async def test_prompts_that_can_not_be_read_back_are_not_kept(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is able to comes next, at once."""
    ledger = ledger_of(buffer, indexed(2), TASK)
    with monkeypatch.context() as patched:
        patched.setattr(buffer.storage.codec, "decode", Mock(side_effect=DecodeError("of another type")))
        with pytest.raises(DecodeError):
            await ledger.draw(2)
    assert numbers(await ledger.draw(2)) == [0, 1]


def test_a_ledger_takes_a_synchronous_buffer() -> None:
    with ReplayBufferConfig(url="memory://").build_sync() as buffer:
        ledger = Sampler(buffer, indexed(3), TASK, epochs=1)
        while leased := run(ledger.draw(1)):
            run(leased[0].finish(complete(leased[0].group)))
        assert run(ledger.counts()).finished == buffer.count(TASK, Status.COMPLETED) == 3
        assert ledger.buffer is buffer.asynchronous
