"""Prompts are finished once, or come back: those of dead workers, failed and expired ones."""

from __future__ import annotations

import asyncio

import pytest

from replaybuf import FencedError, LeaseLostError, NotReadyError, ReplayBuffer, Status
from replaybuf.errors import InputError, LockedError
from replaybuf.storage.values import Draw, Leased
from tests.produce.conftest import complete, indexed, ledger_of, numbers, prompt, until_waiting
from tests.stores import TASK, until

LONG = 600.0


async def test_a_finished_prompt_is_replaced_by_its_result(buffer: ReplayBuffer) -> None:
    ledger = ledger_of(buffer, indexed(2), TASK)
    first, second = await ledger.draw(2)
    await first.finish(complete(first.group), model_step=3, tags={"worker": 1})
    await second.finish(complete(second.group))
    with pytest.raises(InputError):
        await first.finish(complete(first.group))
    items = [item async for item in buffer.find({})]
    assert [(item.status, item.tags) for item in items] == [("completed", {"worker": 1}), ("completed", None)]
    assert (await ledger.counts()).finished == 2
    assert await ledger.draw(timeout=LONG) == []


async def test_prompts_of_a_dead_worker_come_back_first(buffer: ReplayBuffer) -> None:
    """When their time is over, before new ones, to whoever draws."""
    ledger = ledger_of(buffer, indexed(4), TASK, seconds=0.2)
    dead = await ledger.draw(2)
    for leased in dead:
        leased._lease.stop()  # as when the process is gone
    await until_waiting(ledger, 2)
    prompts = await ledger.draw(9)
    assert numbers(prompts) == [0, 1]
    assert [leased.attempt for leased in prompts] == [2, 2]
    with pytest.raises(LeaseLostError):
        await dead[0].finish(complete(dead[0].group))
    with pytest.raises(LeaseLostError):
        await dead[0].save(dead[0].group)
    assert numbers(await ledger.draw(9)) == [2, 3]
    for leased in prompts:
        await leased.finish(complete(leased.group))
    assert await buffer.count(TASK, "completed") == 2


async def test_a_prompt_that_was_saved_keeps_its_tags(buffer: ReplayBuffer) -> None:
    """By which a draw finds it again, also with its partial responses."""
    ledger, matching = ledger_of(buffer, indexed(1), TASK), (Status.ABORTED, {"tags.tries": {"$lt": 3}})
    [first] = await ledger.draw()
    first.group[0].status = Status.ABORTED
    await first.finish(first.group, tags={"tries": 1})
    for _ in range(2):
        [again] = await ledger.draw(again=[matching], partial_rollouts=True)
        assert again.tags == {"tries": 1}
        await again.save()
        await again.give_back(again.group)


async def test_a_draw_waits_for_no_prompt_that_its_query_excludes(buffer: ReplayBuffer) -> None:
    """Those that match are waited for, and counted."""
    ledger = ledger_of(buffer, indexed(2), TASK)
    for number, drawn in enumerate(await ledger.draw(2)):
        drawn.group[0].status = Status.ABORTED
        await drawn.finish(drawn.group, tags={"tries": number})
    for tries in (9, 1):
        again = [(Status.ABORTED, {"tags.tries": tries}), (Status.ABORTED, {"tags.tries": {"$gte": tries}})]
        assert (await ledger.counts(again)).waiting == (tries == 1)
        async with asyncio.timeout(60):
            assert len(await ledger.draw(2, timeout=LONG, again=again)) == (tries == 1)


@pytest.mark.parametrize("partial", [True, False])
async def test_what_was_generated_comes_back_with_partial_rollouts(buffer: ReplayBuffer, partial: bool) -> None:
    """And without them, interrupted rollouts begin anew; those that were done stay."""
    dataset = [[prompt(1), prompt(2)]]
    ledger = ledger_of(buffer, dataset, TASK, partial_rollouts=partial, seconds=0.2)
    [leased] = await ledger.draw()
    leased.group[0].response, leased.group[0].status = "half", Status.ABORTED
    complete(leased.group[1:], "whole")
    await leased.save(leased.group)
    leased._lease.stop()
    [redrawn] = await ledger.draw(timeout=LONG)
    statuses = [rollout.status for rollout in redrawn.group]
    assert [rollout.response for rollout in redrawn.group] == ["half" if partial else "", "whole"]
    assert statuses == [Status.ABORTED if partial else Status.INIT, Status.COMPLETED]
    assert redrawn.attempt == 2
    await redrawn.give_back(redrawn.group)
    [third] = await ledger.draw()
    await third.finish(complete(third.group[:1]) + third.group[1:])
    [result] = await buffer.get(1, TASK)
    assert [rollout.response for rollout in result] == ["halfdone" if partial else "done", "whole"]


@pytest.mark.parametrize("call", ["save", "give_back"])
async def test_tokens_keep_the_step_of_the_weights_that_wrote_them(buffer: ReplayBuffer, call: str) -> None:
    """Finishing dates only what is new."""
    ledger = ledger_of(buffer, indexed(3), TASK, partial_rollouts=True)
    for number, step in enumerate([3, None, None]):
        [leased] = await ledger.draw()
        leased.group[0].response_ids, leased.group[0].status = [1, 2], Status.ABORTED
        await getattr(leased, call)(leased.group, model_step=step)
        if call == "save":
            await leased.give_back()
        [redrawn] = await ledger.draw()
        if number < 2:
            redrawn.group[0].response_ids.append(3)
            await redrawn.finish(complete(redrawn.group), model_step=9)
        else:
            await redrawn.give_back()
    steps = [list(item.item[0].response_model_steps) async for item in buffer.find({"status": "completed"})]
    assert steps == [[3, 3, 9], [9, 9, 9]]


async def test_a_wait_for_prompts_ends(buffer: ReplayBuffer) -> None:
    """NotReadyError that says what is in flight, and with what comes back."""
    ledger = ledger_of(buffer, indexed(1), TASK)
    [leased] = await ledger.draw()
    with pytest.raises(NotReadyError, match="1 are in flight"):
        await ledger.draw(timeout=0.05)
    waiting = asyncio.create_task(ledger.draw(timeout=LONG))
    await asyncio.sleep(0.05)
    await leased.give_back()
    assert numbers(await asyncio.wait_for(waiting, 30)) == [0]


async def test_a_worker_can_tell_that_its_prompt_is_in_other_hands(buffer: ReplayBuffer) -> None:
    """While it generates, after a restore; a prompt that was finished in time is not lost."""
    await buffer.checkpoint(1)
    first, second = await ledger_of(buffer, indexed(2), TASK, seconds=0.3).draw(2)
    await asyncio.sleep(0.5)
    assert not first.lost
    await buffer.restore(1)
    await until(lambda: first.lost and second.lost)
    with pytest.raises(FencedError):
        await first.finish(complete(first.group))


# Draws and saves that are cancelled, or fail half-way, lose no prompt (draws that are cancelled: tests/faults)


@pytest.mark.parametrize("error", [LockedError, asyncio.CancelledError])
async def test_a_draw_that_fails_half_way_keeps_no_prompt(
    buffer: ReplayBuffer, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It draws interrupted ones, then expired ones: the first are back at once when the second can't be had."""
    ledger = ledger_of(buffer, indexed(2), TASK)
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


@pytest.mark.parametrize("waits", [1, 4])
async def test_a_save_that_is_cancelled_leaves_the_prompt_to_its_worker(buffer: ReplayBuffer, waits: int) -> None:
    """Whether it was stored or not: the prompt can be saved, and finished."""
    ledger = ledger_of(buffer, indexed(1), TASK)
    [leased] = await ledger.draw()
    saving = asyncio.create_task(leased.save())
    for _ in range(waits):
        await asyncio.sleep(0.0005)
    saving.cancel()
    await asyncio.wait([saving])
    await leased.save()
    await leased.finish(complete(leased.group))
    assert (await ledger.counts()).finished == 1


@pytest.mark.parametrize("times", [1, 9])
async def test_a_prompt_that_is_given_back_by_a_cancelled_worker_comes_back(buffer: ReplayBuffer, times: int) -> None:
    """With what was generated, however often the worker is cancelled meanwhile."""
    ledger = ledger_of(buffer, indexed(1), TASK, partial_rollouts=True)
    [leased] = await ledger.draw()
    leased.group[0].response_ids, leased.group[0].status = [1, 2], Status.ABORTED
    giving = asyncio.create_task(leased.give_back(leased.group, model_step=3))
    await asyncio.sleep(0)
    for _ in range(times):
        giving.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await giving
    [redrawn] = await ledger.draw()
    assert list(redrawn.group[0].response_model_steps) == [3, 3]
