"""Production rollout by rollout: what is finished isn't generated again, and a group may go without what failed."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from replaybuf import LeaseLostError, Prompt, ReplayBuffer, RolloutState, Sampler, Status
from replaybuf.errors import ConflictError, InputError, StorageError
from replaybuf.produce import ProduceStrategy, SyncProduceStrategy
from replaybuf.storage.sql.statements.parts import OF_PROMPTS, remove_orphans
from tests.produce.conftest import indexed, ledger_of, produce, prompts, sampler_of, until_waiting
from tests.stores import TASK, build


def finish(rollout: RolloutState, text: str, status: Status = Status.COMPLETED) -> None:
    rollout.response, rollout.response_ids, rollout.reward, rollout.status = text, [1], 1.0, status


async def contents(buffer: ReplayBuffer) -> dict[str, list[list[str | None]]]:
    by_status: dict[str, list[list[str | None]]] = {}
    async for item in buffer.find({}):
        by_status.setdefault(item.status.value, []).append([rollout.response for rollout in item.item])
    return by_status


def prompts_of(buffer: ReplayBuffer, **options: Any) -> Sampler:
    return ledger_of(
        buffer, indexed(2), TASK, make_group=lambda item, number: [item.model_copy() for _ in range(3)], **options
    )


async def test_rollouts_of_a_dead_worker_come_back_with_their_prompt(buffer: ReplayBuffer) -> None:
    ledger = prompts_of(buffer, seconds=0.2)
    [dead] = await ledger.draw(1)
    finish(dead.group[1], "one")
    await dead.add(1, model_step=4)
    assert len(buffer) == 0
    dead._lease.stop()
    await until_waiting(ledger, 1)
    [prompt] = await prompts_of(buffer).draw(1)
    assert [rollout.response for rollout in prompt.group] == [None, "one", None]
    assert prompt.group[1].response_model_steps == [4]
    finish(dead.group[0], "late")
    with pytest.raises(LeaseLostError):
        await dead.add(0)
    for index in (0, 2):
        finish(prompt.group[index], str(index))
    await prompt.add(0)
    await prompt.save()
    assert await contents(buffer) == {}
    await prompt.finish()
    assert await contents(buffer) == {"completed": [["0", "one", "2"]]}


async def test_a_rollout_is_added_once_and_when_it_is_finished(buffer: ReplayBuffer) -> None:
    [prompt] = await prompts_of(buffer).draw(1)
    with pytest.raises(InputError, match="must be completed, failed or filtered, and this one is init"):
        await prompt.add(0)
    finish(prompt.group[0], "a")
    await prompt.add(0)
    with pytest.raises(ConflictError, match="has its rollout 0 already"):
        await prompt.add(0)
    assert await buffer.filling(TASK) == {}  # it is the prompt's
    assert await contents(buffer) == {"filling": [["a"]]}


async def test_an_export_is_without_rollouts_of_prompts_in_flight(buffer: ReplayBuffer, tmp_path: Path) -> None:
    """They don't count for the limit."""
    [prompt] = await prompts_of(buffer).draw(1)
    for index in (0, 1):
        finish(prompt.group[index], "a")
        await prompt.add(index)
    uids = [await buffer.put([RolloutState(message=[], status=Status.COMPLETED)], TASK) for _ in range(3)]
    for limit, order_by in ((2, None), (2, "created_at"), (9, None), (None, None)):
        exported = await buffer.export(tmp_path / "a.jsonl", limit=limit, order_by=order_by, force=True)
        assert exported.groups == min(limit or 9, len(uids))


@pytest.mark.parametrize("settle", ["save", "give_back"])
async def test_a_tree_keeps_its_parents_when_it_is_saved_and_finished(url: str, settle: str) -> None:
    """And who goes on with it knows them, and may add to it."""
    parents = [None, 0, 0]
    async with build(url) as buffer:
        [prompt] = await prompts_of(buffer).draw(1)
        assert prompt.parents is None
        tree = [prompt.group[0].model_copy(update={"status": Status.ABORTED}) for _ in parents]
        if settle == "save":
            await prompt.save(tree, parents=parents)
            await prompt.give_back()
        else:
            await prompt.give_back(tree, parents=parents)
        [prompt] = await prompts_of(buffer, partial_rollouts=True).draw(1)
        assert prompt.parents == parents
        prompt.group.append(prompt.group[0].model_copy())
        prompt.parents.append(1)
        for number, rollout in enumerate(prompt.group):
            finish(rollout, str(number))
        await prompt.save()
        await prompt.finish()
        [item] = [item async for item in buffer.find({})]
        assert (item.status, item.rollouts, item.segments.parents) == (Status.COMPLETED, 1, [None, 0, 0, 1])


async def test_a_snapshot_has_the_added_rollouts(url: str, tmp_path: Path) -> None:
    async with build(url, name="there") as buffer:
        await buffer.put([RolloutState(message=[])], TASK)  # so that uids are moved
        async with build(url) as first:
            [prompt] = await prompts_of(first).draw(1)
            finish(prompt.group[1], "one")
            await prompt.add(1)
            await first.save(tmp_path)
    async with build(url, name="copy") as other:
        await other.put([RolloutState(message=[])], "other")
        await other.delete({})
        await other.resume(tmp_path)
        [redrawn] = await prompts_of(other).draw(1)
        assert [rollout.response for rollout in redrawn.group] == [None, "one", None]


class Loop:
    """Fails the calls of these rollouts, by their number in their group, the first time or always."""

    def __init__(self, failing: dict[int, int], error: bool = True) -> None:
        self.failing, self.error, self.calls = failing, error, Counter[int]()

    async def generate_group(self, group: list[RolloutState], *, partial: bool) -> None:
        [rollout] = group
        number = int(rollout.rollout_id or 0)
        self.calls[number] += 1
        await asyncio.sleep(0)
        if self.calls[number] <= self.failing.get(number, 0):
            if self.error:
                raise ValueError("no luck")
            finish(rollout, "bad", Status.FAILED)
        else:
            finish(rollout, str(number))

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


@pytest.mark.parametrize(("error", "least"), [(True, None), (False, None), (True, 3)])
async def test_a_retry_generates_only_what_failed(buffer: ReplayBuffer, error: bool, least: int | None) -> None:
    loop = Loop({2: 2}, error)
    await produce_one(SyncProduceStrategy(by_rollout=True, min_size=least), loop, buffer)
    assert loop.calls == {0: 1, 1: 1, 2: 3, 3: 1}
    assert await contents(buffer) == {"completed": [["0", "1", "2", "3"]]}


@pytest.mark.parametrize("error", [LeaseLostError("late"), StorageError("the disk is full")])
async def test_a_rollout_that_could_not_be_added_is_no_failure_of_its_prompt(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """As with a group that could not be stored: it counts as lost, or the error ends the batch."""

    async def refuse(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(Prompt, "add", refuse)
    sampler, strategy = sampler_of(buffer, 2, prompt_repeat_k=2), SyncProduceStrategy(by_rollout=True)
    if isinstance(error, LeaseLostError):
        summary = await produce(strategy, Loop({}), sampler, 1)
        assert (summary.lost, summary.retried, summary.produced) == (1, 0, 1)
    else:
        with pytest.raises(StorageError, match="disk is full"):
            await produce(strategy, Loop({}), sampler, 1)
        assert [prompt.attempt for prompt in await sampler.draw()] == [1]


async def test_a_storage_error_waits_for_the_other_rollouts_of_its_group(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose calls are cancelled: what they still store comes before the prompt is given back."""
    ended = list[str]()
    original = Prompt.give_back

    class Slow(Loop):
        async def generate_group(self, group: list[RolloutState], *, partial: bool) -> None:
            if group[0].rollout_id:
                try:
                    await asyncio.sleep(60)
                finally:
                    await asyncio.sleep(0.05)
                    ended.append("call")
            await super().generate_group(group, partial=partial)

    async def refuse(*_: Any, **__: Any) -> None:
        raise StorageError("the disk is full")

    async def give_back(prompt: Prompt, *args: Any, **options: Any) -> None:
        ended.append("prompt")
        await original(prompt, *args, **options)

    monkeypatch.setattr(Prompt, "add", refuse)
    monkeypatch.setattr(Prompt, "give_back", give_back)
    with pytest.raises(StorageError, match="disk is full"):
        await produce_one(SyncProduceStrategy(by_rollout=True), Slow({}), buffer)
    assert ended == ["call"] * 3 + ["prompt"]


@pytest.mark.parametrize(
    ("least", "found"),
    [
        (3, {"completed": [["0", "1", "3"]], "failed": [[None]]}),
        (4, None),
    ],
)
async def test_after_the_last_attempt_a_group_goes_without_what_failed(url: str, least: int, found: Any) -> None:
    async with build(url, max_deliveries=2, unfit=9) as buffer:
        strategy = SyncProduceStrategy(by_rollout=True, min_size=least)
        if found is None:
            with pytest.raises(Exception, match="no prompt"):
                await produce_one(strategy, Loop({2: 9}), buffer)
            assert "completed" not in await contents(buffer)
        else:
            await produce_one(strategy, Loop({2: 9}), buffer)
            assert await contents(buffer) == found


async def test_more_rollouts_than_a_group_has_are_refused() -> None:
    async with build("memory://") as buffer:
        with pytest.raises(InputError, match="min_size 5 is more than the 4 rollouts of a group"):
            await produce_one(SyncProduceStrategy(by_rollout=True, min_size=5), Loop({}), buffer)


async def produce_one(strategy: ProduceStrategy, loop: Loop, buffer: ReplayBuffer) -> None:
    sampler = Sampler(buffer, prompts(1), TASK, prompt_repeat_k=4, epochs=1)
    await produce(strategy, loop, sampler, 1)


async def test_rollouts_of_prompts_that_are_gone_are_removed(buffer: ReplayBuffer) -> None:
    """Of those that were deleted, and of those finished by who didn't know that they were added."""
    ledger = prompts_of(buffer)
    kept_prompt, finished_prompt = await ledger.draw(2)
    for prompt in (kept_prompt, finished_prompt):
        finish(prompt.group[0], "a")
        await prompt.add(0)
    lease = buffer.adopt(finished_prompt._lease.handle)
    for rollout in finished_prompt.group:
        finish(rollout, "b")
    await lease.finish(finished_prompt.group, TASK, replaces=[finished_prompt.uid])
    await buffer.storage.thread.run(lambda: buffer.storage.transactions.write(remove_orphans))
    assert await contents(buffer) == {"completed": [["b", "b", "b"]], "filling": [["a"]]}
    lease.stop()
    await kept_prompt.give_back()


async def test_rollouts_of_prompts_are_found_among_all_that_fill_by_their_keys(tmp_path: Path) -> None:
    async with build(f"sqlite:///{tmp_path}/b.db") as buffer:
        values = {"buffer": "default", "status": "filling", "low": "a", "high": "b"}
        plan = await buffer.storage._read(lambda tx: tx.rows(f"EXPLAIN QUERY PLAN {OF_PROMPTS}", **values))
    assert "rb_group_key (scoped_key>? AND scoped_key<?)" in plan[0]["detail"]


async def test_a_damaged_rollout_of_a_prompt_is_generated_again(buffer: ReplayBuffer) -> None:
    ledger = prompts_of(buffer)
    [prompt] = await ledger.draw(1)
    for index in (0, 1):
        finish(prompt.group[index], str(index))
        await prompt.add(index)
    await prompt.give_back()
    uid = min([item.uid async for item in buffer.find({"status": "filling"})])
    await buffer.storage.thread.run(
        lambda: buffer.storage.transactions.write(
            lambda tx: tx.change("UPDATE rb_payload SET data = :data WHERE uid = :uid", data=b"damaged", uid=uid)
        )
    )
    [redrawn] = await ledger.draw(1)
    assert [rollout.response for rollout in redrawn.group] == [None, "1", None]
    for index in (0, 2):
        finish(redrawn.group[index], "new")
        await redrawn.add(index)
    await redrawn.finish()
    assert await contents(buffer) == {"completed": [["new", "1", "new"]]}


async def test_added_rollouts_are_read_only_if_there_are_any(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = prompts_of(buffer)
    [prompt] = await ledger.draw(1)
    await prompt.give_back()
    monkeypatch.setattr(buffer.storage, "find", None)
    assert len(await ledger.draw(1)) == 1
