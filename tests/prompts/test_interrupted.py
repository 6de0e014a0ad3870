"""Draws and saves that are cancelled, or fail half-way, lose no prompt."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from replaybuf import PromptLedger, Status
from replaybuf.errors import LockedError
from replaybuf.storage.values import Draw, Leased
from tests.datasets import Shuffled, complete, indexed
from tests.prompts.ledgers import LONG
from tests.stores import TASK, build


async def test_a_cancelled_draw_skips_nothing(url: str) -> None:
    """At whatever moment: every prompt is still handed out."""
    async with build(url) as buffer:
        ledger = PromptLedger(buffer, Shuffled(10), TASK, seconds=0.3)
        for pause in range(12):
            task = asyncio.create_task(ledger.draw())
            await asyncio.sleep(pause * 0.0015)
            task.cancel()
            for one in (await asyncio.gather(task, return_exceptions=True))[0:1]:
                for drawn in one if isinstance(one, list) else []:
                    await drawn.finish(complete(drawn.group))
        while prompts := await ledger.draw(4, timeout=LONG):
            for one in prompts:
                await one.finish(complete(one.group))
        results = Counter(int(group[0].rollout_id) for group in await buffer.get(99, TASK))
        assert results == dict.fromkeys(range(10), 1)


@pytest.mark.parametrize("error", [LockedError, asyncio.CancelledError])
async def test_a_draw_that_fails_half_way_keeps_no_prompt(
    url: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It draws interrupted ones, then expired ones: the first are back at once when the second can't be had."""
    async with build(url) as buffer:
        ledger = PromptLedger(buffer, indexed(2), TASK)
        first, second = await ledger.draw(2)
        first.group[0].status = Status.ABORTED
        await first.finish()
        await second.give_back()
        lease = buffer.storage.lease

        async def fail_for_init(draw: Draw, seconds: float) -> Leased | None:
            if draw.status == Status.INIT:
                raise error
            return await lease(draw, seconds)

        monkeypatch.setattr(buffer.storage, "lease", fail_for_init)
        with pytest.raises(error):
            await ledger.draw(2)
        assert (await ledger.counts()).waiting == 2


@pytest.mark.parametrize("waits", range(1, 8))
async def test_a_save_that_is_cancelled_leaves_the_prompt_to_its_worker(url: str, waits: int) -> None:
    """Whether it was stored or not: the prompt can be saved, and finished."""
    async with build(url) as buffer:
        ledger = PromptLedger(buffer, indexed(1), TASK)
        [one] = await ledger.draw()
        saving = asyncio.create_task(one.save())
        for _ in range(waits):
            await asyncio.sleep(0.0005)
        saving.cancel()
        await asyncio.wait([saving])
        await one.save()
        await one.finish(complete(one.group))
        assert (await ledger.counts()).finished == 1
