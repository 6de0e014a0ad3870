"""No prompt of a dataset is skipped, none is drawn twice, whatever kind of dataset it is."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replaybuf import FencedError, PromptLedger, Status
from tests.datasets import DATASETS, Resuming, Shuffled, Tensor, WithTensors, complete, indexed, numbers, prompt
from tests.stores import TASK, build


async def test_prompts_come_in_the_order_of_the_dataset(url: str) -> None:
    """They are numbered over all draws."""
    numbered: list[int] = []

    def make(item: Any, number: int) -> list[Any]:
        numbered.append(number)
        return [item]

    async with build(url) as buffer:
        ledger = PromptLedger(buffer, indexed(5), TASK, make_group=make)
        assert numbers(await ledger.draw(2)) == [0, 1]
        assert numbers(await ledger.draw(9)) == numbered[2:] == [2, 3, 4]
        assert await ledger.draw() == []
        counts = await ledger.counts()
        assert (counts.drawn, counts.in_flight, counts.waiting, counts.finished) == (5, 5, 0, 0)


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("epochs", [1, 3])
async def test_several_workers_draw_every_prompt_once_an_epoch(url: str, kind: str, epochs: int) -> None:
    """Each with a dataset of its own, going by the cursor of all."""
    size = 12
    async with AsyncExitStack() as stack:
        workers = 1 if url == "memory://" else 3
        buffers = [await stack.enter_async_context(build(url)) for _ in range(workers)]
        ledgers = [
            PromptLedger(buffers[place % workers], DATASETS[kind](size), TASK, epochs=epochs) for place in range(4)
        ]
        drawn: Counter[int] = Counter()

        async def work(ledger: PromptLedger, count: int) -> None:
            while prompts := await ledger.draw(count):
                drawn.update(numbers(prompts))
                for one in prompts:
                    await one.finish(complete(one.group))

        await asyncio.gather(*(work(ledger, place % 3 + 1) for place, ledger in enumerate(ledgers)))
        assert drawn == dict.fromkeys(range(size), epochs)
        assert await buffers[0].count(TASK, "completed") == size * epochs


@pytest.mark.parametrize("kind", DATASETS)
async def test_a_resumed_dataset_goes_on_as_it_would_have(url: str, kind: str) -> None:
    """After a restart of the process: the same prompts in the same order, over the ends of epochs."""
    make = DATASETS[kind]
    alone = PromptLedger(build("memory://"), make(5), TASK, epochs=None)
    expected = [number for _ in range(6) for number in numbers(await alone.draw(3))]
    async with build(url) as buffer:
        got = []
        for _ in range(6):
            got += numbers(await PromptLedger(buffer, make(5), TASK, epochs=None).draw(3))
        assert got == expected
        assert Counter(got[:15]) == dict.fromkeys(range(5), 3)


async def test_a_dataset_is_told_its_epoch() -> None:
    async with build("memory://") as buffer:
        got = []
        for _ in range(4):
            got += numbers(await PromptLedger(buffer, Resuming(3), TASK, epochs=3).draw(2))
        got += numbers(await PromptLedger(buffer, Resuming(3), TASK, epochs=3).draw(2))
        assert got == [0, 1, 2, 100, 101, 102, 200, 201, 202]


@pytest.mark.parametrize("kind", DATASETS)
async def test_a_restore_takes_the_cursor_back(url: str, kind: str) -> None:
    """What was in flight at the checkpoint is handed out again, then what was drawn since; nothing is skipped."""
    make = DATASETS[kind]
    async with build(url) as buffer:
        ledger = PromptLedger(buffer, make(8), TASK)
        done, flying = await ledger.draw(2)
        await done.finish(complete(done.group))
        await buffer.checkpoint(1)
        await flying.finish(complete(flying.group))
        later = await ledger.draw(3)
        for one in later[:2]:
            await one.finish(complete(one.group))
        await buffer.get(9, TASK)
        await buffer.restore(1)
        with pytest.raises(FencedError):
            await later[2].finish(complete(later[2].group))
        resumed = PromptLedger(buffer, make(8), TASK)
        again = [*await resumed.draw(1), *await resumed.draw(3), *await ledger.draw(9)]
        assert numbers(again[:4]) == numbers([flying, *later])
        for one in again:
            await one.finish(complete(one.group))
        results = Counter(int(group[0].rollout_id) for group in await buffer.get(99, TASK))
        assert results == dict.fromkeys(range(8), 1)


async def test_a_snapshot_has_the_cursor(url: str, tmp_path: Path) -> None:
    """And prompts in flight, as if given back."""
    async with build(url) as buffer, build("sqlite:///:memory:") as copy:
        await PromptLedger(buffer, Shuffled(6), TASK).draw(4)
        await buffer.save(tmp_path / "saved")
        await copy.resume(tmp_path / "saved")
        rest = PromptLedger(copy, Shuffled(6), TASK)
        assert sorted(numbers(await rest.draw(4) + await rest.draw(9))) == list(range(6))


async def test_the_dataset_is_left_as_it_is() -> None:
    async with build("memory://") as buffer:
        dataset = [prompt(1), [prompt(2), prompt(3)]]
        dataset[0].status = Status.COMPLETED  # type: ignore[union-attr]
        first, second = await PromptLedger(buffer, dataset, TASK).draw(2)
        assert [len(first.group), len(second.group)] == [1, 2]
        assert (first.group[0].status, dataset[0].status) == (Status.INIT, Status.COMPLETED)  # type: ignore[union-attr]


async def test_states_with_tensors_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, from_numpy=Tensor))
    async with build("memory://") as buffer:
        drawn = [numbers(await PromptLedger(buffer, WithTensors(6), TASK).draw(2)) for _ in range(3)]
        assert sorted(number for batch in drawn for number in batch) == list(range(6))
