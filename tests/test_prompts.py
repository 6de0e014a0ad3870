"""The prompt ledger: no prompt is skipped, none is finished twice, whoever draws, fails or is restored."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

from replaybuf import (
    FencedError,
    InputError,
    LeaseLostError,
    LockedError,
    NotReadyError,
    PromptLedger,
    ReplayBuffer,
    RolloutError,
    Status,
)
from replaybuf.errors import DecodeError
from replaybuf.storage.values import Cursor, Draw, Leased
from tests.datasets import DATASETS, Resuming, Shuffled, Tensor, WithTensors, complete, indexed, numbers, prompt
from tests.stores import TASK, build, until

LONG = 600.0


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_database"))
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/buffer.db"


async def test_prompts_come_in_the_order_of_the_dataset(url: str) -> None:
    async with build(url) as buffer:
        ledger = PromptLedger(buffer, indexed(5), TASK)
        assert numbers(await ledger.draw(2)) == [0, 1]
        assert numbers(await ledger.draw(9)) == [2, 3, 4]
        assert await ledger.draw() == []
        counts = await ledger.counts()
        assert (counts.drawn, counts.in_flight, counts.waiting, counts.finished) == (5, 5, 0, 0)


async def test_a_finished_prompt_is_replaced_by_its_result(url: str) -> None:
    async with build(url) as buffer:
        ledger = PromptLedger(buffer, indexed(2), TASK)
        first, second = await ledger.draw(2)
        await first.finish(complete(first.group), model_step=3, tags={"worker": 1})
        await second.finish(complete(second.group))
        with pytest.raises(InputError):
            await first.finish(complete(first.group))
        found = [item async for item in buffer.find({})]
        assert [(item.status, item.tags) for item in found] == [("completed", {"worker": 1}), ("completed", None)]
        assert (await ledger.counts()).finished == 2
        assert await ledger.draw(timeout=LONG) == []


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


async def test_an_empty_dataset_ends(url: str) -> None:
    async with build(url) as buffer:
        for dataset in ([], Shuffled(0), Resuming(0)):
            for epochs in (None, 0, 1, 5):
                assert await PromptLedger(buffer, dataset, TASK, epochs=epochs).draw(3) == []


async def test_prompts_of_a_dead_worker_come_back_first(url: str) -> None:
    """When their time is over, before new ones, to whoever draws."""
    async with build(url) as buffer:
        ledger = PromptLedger(buffer, indexed(4), TASK, seconds=0.2)
        dead = await ledger.draw(2)
        for one in dead:
            one._lease.stop()  # as when the process is gone

        async def are_back() -> bool:
            return (await ledger.counts()).waiting == 2

        await until(are_back)
        prompts = await ledger.draw(9)
        assert numbers(prompts) == [0, 1]
        assert [one.attempt for one in prompts] == [2, 2]
        with pytest.raises(LeaseLostError):
            await dead[0].finish(complete(dead[0].group))
        with pytest.raises(LeaseLostError):
            await dead[0].save(dead[0].group)
        assert numbers(await ledger.draw(9)) == [2, 3]
        for one in prompts:
            await one.finish(complete(one.group))
        assert await buffer.count(TASK, "completed") == 2


@pytest.mark.parametrize("partial", [True, False])
async def test_what_was_generated_comes_back_with_partial_rollouts(url: str, partial: bool) -> None:
    """And without them, interrupted rollouts begin anew; those that were done stay."""
    async with build(url) as buffer:
        dataset = [[prompt(1), prompt(2)]]
        ledger = PromptLedger(buffer, dataset, TASK, partial_rollouts=partial, seconds=0.2)
        [one] = await ledger.draw()
        one.group[0].response, one.group[0].status = "half", Status.ABORTED
        complete(one.group[1:], "whole")
        await one.save(one.group)
        one._lease.stop()
        [again] = await ledger.draw(timeout=LONG)
        statuses = [rollout.status for rollout in again.group]
        assert [rollout.response for rollout in again.group] == ["half" if partial else "", "whole"]
        assert statuses == [Status.ABORTED if partial else Status.INIT, Status.COMPLETED]
        assert again.attempt == 2
        await again.give_back(again.group)
        [third] = await ledger.draw()
        await third.finish(complete(third.group[:1]) + third.group[1:])
        [result] = await buffer.get(1, TASK)
        assert [rollout.response for rollout in result] == ["halfdone" if partial else "done", "whole"]


async def test_prompts_of_dead_workers_come_back_whatever_else_does(url: str) -> None:
    """`again` says which others are prompts again."""
    async with build(url) as buffer:
        ledger = PromptLedger(buffer, indexed(1), TASK, again=["expired"])
        [one] = await ledger.draw()
        await one.give_back()
        assert numbers(await ledger.draw()) == [0]


async def test_a_prompt_that_fails_too_often_is_set_aside(url: str) -> None:
    async with build(url, max_deliveries=2) as buffer:
        ledger = PromptLedger(buffer, indexed(1), TASK)
        for _ in range(2):
            [one] = await ledger.draw()
            await one.give_back(failed="the engine crashed")
        assert await ledger.draw(timeout=LONG) == []
        [item] = [item async for item in buffer.find({"status": "failed"})]
        assert "the engine crashed" in str(item.error)


async def test_expired_results_are_generated_again(url: str) -> None:
    """The expired group is a prompt again; its result takes its place."""
    async with build(url) as buffer:
        ledger = PromptLedger(buffer, indexed(1), TASK)
        [one] = await ledger.draw()
        complete(one.group)[0].response_ids = [1, 2]
        await one.finish(one.group, model_step=1, current_train_step=2)
        await buffer.refresh_staleness(task_stale_thresholds={TASK: 2}, current_train_step=9)
        [again] = await ledger.draw()
        assert (again.group[0].response, numbers([again])) == ("", [0])
        await again.finish(complete(again.group))
        assert [len(buffer), await buffer.count(TASK, "completed")] == [1, 1]


async def test_a_wait_for_prompts_ends(url: str) -> None:
    """NotReadyError that says what is in flight, and with what comes back."""
    async with build(url) as buffer:
        ledger = PromptLedger(buffer, indexed(1), TASK)
        [one] = await ledger.draw()
        with pytest.raises(NotReadyError, match="1 are in flight"):
            await ledger.draw(timeout=0.05)
        waiting = asyncio.create_task(ledger.draw(timeout=LONG))
        await asyncio.sleep(0.05)
        await one.give_back()
        assert numbers(await asyncio.wait_for(waiting, 30)) == [0]


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


def use(buffer: ReplayBuffer, **options: Any) -> PromptLedger:
    return PromptLedger(buffer, **({"dataset": [], "task_name": TASK} | options))


@pytest.mark.parametrize(
    "wrong",
    [{"dataset": 1}, {"dataset": "text"}, {"dataset": {"a": 1}}, {"epochs": -1}, {"epochs": 1.5}, {"seconds": 0},
     {"task_name": ""}, {"again": ["nonsense"]}, {"again": "init"}],
)  # fmt: skip
async def test_what_can_not_work_is_refused_at_once(wrong: dict[str, Any]) -> None:
    async with build("memory://") as buffer:
        with pytest.raises(InputError):
            use(buffer, **wrong)


async def test_a_worker_can_tell_that_its_prompt_is_in_other_hands(url: str) -> None:
    """While it generates, after a restore; a prompt that was finished in time is not lost."""
    async with build(url) as buffer:
        await buffer.checkpoint(1)
        first, second = await use(buffer, dataset=indexed(2), seconds=0.3).draw(2)
        await asyncio.sleep(0.5)
        assert not first.lost
        await buffer.restore(1)
        async with asyncio.timeout(10):
            while not (first.lost and second.lost):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(FencedError):
            await first.finish(complete(first.group))


async def test_a_result_without_a_status_is_refused(url: str) -> None:
    """Whoever forgets the status would get the same prompt again, for ever. The prompt stays in flight."""
    async with build(url) as buffer:
        [drawn] = await use(buffer, dataset=indexed(1)).draw()
        with pytest.raises(InputError, match=r"status.*COMPLETED, or call give_back"):
            await drawn.finish()
        await drawn.finish(complete(drawn.group))
        assert await buffer.count(TASK, Status.COMPLETED) == 1


async def test_what_is_no_group_says_that_make_group_made_it(url: str) -> None:
    async with build(url) as buffer:
        for wrong in ({"dataset": [1]}, {"dataset": indexed(1), "make_group": lambda item, number: item}):
            with pytest.raises(RolloutError, match="make_group"):
                await use(buffer, **wrong).draw()


async def test_a_cursor_of_another_kind_is_refused(url: str) -> None:
    async with build(url) as buffer:
        await use(buffer, dataset=Shuffled(3)).draw()
        with pytest.raises(InputError, match="indexed"):
            await use(buffer, dataset=indexed(3)).draw()
        await use(buffer, dataset=indexed(3), name="other").draw()
        with pytest.raises(InputError, match="another dataset"):
            await use(buffer, dataset=Shuffled(3), name="other").draw()
        for count in (0, -1, 1.5, None):
            with pytest.raises(InputError, match="count"):
                await use(buffer).draw(count)  # type: ignore[arg-type]


async def test_states_with_tensors_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, from_numpy=Tensor))
    async with build("memory://") as buffer:
        drawn = [numbers(await PromptLedger(buffer, WithTensors(6), TASK).draw(2)) for _ in range(3)]
        assert sorted(number for batch in drawn for number in batch) == list(range(6))


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


async def test_prompts_that_can_not_be_read_back_are_not_kept(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is able to comes next, at once."""
    async with build(url) as buffer:
        ledger = PromptLedger(buffer, indexed(2), TASK)
        with monkeypatch.context() as patched:
            patched.setattr(buffer.storage.codec, "decode", Mock(side_effect=DecodeError("of another type")))
            with pytest.raises(DecodeError):
                await ledger.draw(2)
        assert numbers(await ledger.draw(2)) == [0, 1]


async def test_counts_may_be_those_of_numpy() -> None:
    async with build("memory://") as buffer:
        ledger = PromptLedger(buffer, indexed(3), TASK, epochs=np.int64(2))  # type: ignore[arg-type]
        assert numbers(await ledger.draw(np.int64(2))) == [0, 1]  # type: ignore[arg-type]
        assert numbers(await ledger.draw(9)) == [2, 0, 1, 2]


@pytest.mark.parametrize("place", [-1, 1 << 63, "3", [1], {b"1": 2}])
async def test_a_place_that_is_none_is_refused(place: Any) -> None:
    """Instead of a prompt from somewhere."""
    async with build("memory://") as buffer:
        await buffer.cursors.move(Cursor(TASK, 0, 1, msgpack.packb(place)))
        with pytest.raises(InputError, match="cursor"):
            await PromptLedger(buffer, indexed(3), TASK, epochs=None).draw()
