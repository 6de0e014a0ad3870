"""Hooks of production, and production that is repeated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from replaybuf import ConfigError, ReplayBufError, RolloutState, Status
from replaybuf.produce import (
    AsyncProduceStrategy,
    Generated,
    Sampler,
    SyncProduceStrategy,
    reward_varies,
)
from tests.produce.conftest import (
    Clock,
    ClockedLoop,
    Script,
    ScriptedLoop,
    Told,
    assert_accounted,
    ids,
    items_of,
    produce,
    prompts,
)
from tests.stores import TASK, build


@pytest.mark.parametrize(
    ("rewards", "varies"),
    [
        ([1.0, 0.0], True),
        ([1, 1.0], False),
        ([{"score": 1.0}, {"score": 0.0}], True),
        ([{"score": 1.0, "format": 1}, {"score": 1.0, "format": 0}], False),
        ([1.0, None], True),
        ([None, None], True),
        ([0.5], False),
    ],
)
def test_rewards_vary_when_they_differ(rewards: list[Any], varies: bool) -> None:
    assert reward_varies([RolloutState(message=[], reward=reward) for reward in rewards]) == varies


async def test_hooks_may_be_named() -> None:
    strategy = SyncProduceStrategy(is_valid="replaybuf.produce:reward_varies")
    assert strategy.is_valid is reward_varies
    with pytest.raises(ConfigError, match="no_such_thing"):
        SyncProduceStrategy(is_valid="replaybuf.produce:no_such_thing")


async def test_should_continue_may_stop_early(sampler: Sampler) -> None:
    loop = ScriptedLoop(scripts={number: Script(tokens=200, seconds=0.01) for number in (2, 3)})
    strategy = AsyncProduceStrategy(
        should_continue=lambda completed, size: completed < size // 2, enable_partial_rollout=True
    )
    summary = await produce(strategy, loop, sampler, 4, train_step=4, model_step=3)
    assert (summary.produced, summary.interrupted) == (2, 2)
    await assert_accounted(sampler)


async def test_should_continue_may_ask_for_more(sampler: Sampler) -> None:
    calls: list[tuple[int, int]] = []

    def until_twice_the_size(completed: int, size: int) -> bool:
        calls.append((completed, size))
        return completed < 2 * size

    summary = await produce(SyncProduceStrategy(should_continue=until_twice_the_size), ScriptedLoop(), sampler, 3)
    assert summary.produced == 6
    assert (calls[0], calls[-1]) == ((0, 3), (6, 3))


async def test_on_group_is_told_of_every_group(sampler: Sampler) -> None:
    hook = Told()
    loop = ScriptedLoop(scripts={0: Script(failures=1), 1: Script(status=Status.FILTERED)})
    await produce(SyncProduceStrategy(on_group=hook), loop, sampler, 3, train_step=4, model_step=3)
    assert hook.statuses == {"init": 1, "filtered": 1, "completed": 3}
    (failed,) = [generated for generated in hook.groups if generated.status == Status.INIT]
    assert (failed.error, failed.attempt, failed.tokens) == ("ValueError: no luck", 1, 0)
    completed = [generated for generated in hook.groups if generated.status == Status.COMPLETED]
    assert {(g.task_name, g.tokens, g.model_step, g.error) for g in completed} == {(TASK, 6, 3, None)}
    assert all(generated.seconds >= 0.006 for generated in completed)


async def test_groups_are_stored_with_tags(sampler: Sampler) -> None:
    strategy = SyncProduceStrategy(tags=lambda group: {"length": len(group[0].response_ids)})
    await produce(strategy, ScriptedLoop(Script(tokens=5)), sampler, 2)
    assert [item.tags for item in await items_of(sampler.buffer)] == [{"length": 5}] * 2


class HookError(Exception):
    pass


def fails(*_: Any) -> Any:
    raise HookError("this hook has a bug")


@pytest.mark.parametrize("hook", ["is_valid", "should_continue", "on_group", "tags"])
async def test_a_hook_that_raises_ends_the_batch_and_loses_nothing(sampler: Sampler, hook: str) -> None:
    options: dict[str, Any] = {hook: fails}
    with pytest.raises(HookError, match="this hook has a bug"):
        await produce(SyncProduceStrategy(**options), ScriptedLoop(), sampler, 4)
    await assert_accounted(sampler)
    summary = await produce(SyncProduceStrategy(), ScriptedLoop(), sampler, 4)
    assert summary.produced + summary.reused == 4


@pytest.mark.parametrize("tags", [{"a": [1]}, 7])
async def test_bad_tags_end_the_batch_and_lose_nothing(sampler: Sampler, tags: Any) -> None:
    with pytest.raises(ReplayBufError, match="tag"):
        await produce(SyncProduceStrategy(tags=lambda group: tags), ScriptedLoop(), sampler, 4)
    await assert_accounted(sampler)


async def test_a_hook_that_raises_while_the_rest_is_interrupted_ends_the_batch(sampler: Sampler) -> None:
    def fail(generated: Generated) -> None:
        if generated.status == Status.ABORTED:
            raise HookError("not this one")

    loop = ScriptedLoop(scripts={0: Script(tokens=10**6, seconds=0.01)})
    with pytest.raises(HookError):
        await produce(AsyncProduceStrategy(on_group=fail, over_sample=1), loop, sampler, 2, train_step=4, model_step=3)
    await assert_accounted(sampler)
    assert await sampler.buffer.count(TASK, Status.COMPLETED) >= 2


def test_hooks_are_plain_functions() -> None:
    """Nobody would wait for a coroutine; and what is no function is said so when the config is read."""

    async def hook(*_: Any) -> bool:
        return False

    class Hook:
        async def __call__(self, *_: Any) -> bool:
            return False

    for value in (hook, Hook()):
        with pytest.raises(ConfigError, match="tags: it must be a plain function, not a coroutine"):
            SyncProduceStrategy(tags=value)  # type: ignore[arg-type]
    for value in ("json:__name__", 5):
        with pytest.raises(ConfigError, match="is_valid: "):
            SyncProduceStrategy(is_valid=value)  # type: ignore[arg-type]


STEPS, SIZE = 6, 4


def scripts(seed: int) -> dict[int, Script]:
    """Lengths, failures and rewards of all sorts, by a seed."""
    chance = random.Random(seed)

    def script() -> Script:
        equal = chance.random() < 0.2
        return Script(
            tokens=chance.choice([1, 2, 3, 5, 8, 30]),
            seconds=chance.choice([1, 1.5, 2]),
            failures=chance.choice([0, 0, 0, 0, 1, 9]),
            reward=lambda place: 1.0 if equal else float(place),
        )

    return {number: script() for number in range(200)}


async def run(url: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], seed: int) -> list[Any]:
    """All that a run does, step by step."""
    clock, hook = Clock(), Told()
    clock.governs(monkeypatch)
    strategy = AsyncProduceStrategy(over_sample=0.5, is_valid=reward_varies, on_group=hook, **options)
    states: list[Any] = []
    async with build(url, policy="uniform", seed=3, max_deliveries=3, unfit=1000) as buffer:
        sampler = Sampler(buffer, prompts(50), TASK, prompt_repeat_k=2, shuffle=7)
        loop = ClockedLoop(clock, scripts=scripts(seed))
        for step in range(STEPS):
            summary = await produce(strategy, loop, sampler, SIZE, train_step=step + 1, model_step=step)
            batch, _ = await buffer.take_batch({TASK: SIZE})
            counts = asdict(summary)
            counts = {name: counts[name] for name in counts if name != "times" and not name.endswith("seconds")}
            states.append((counts, [[rollout.model_dump() for rollout in group] for group in batch[TASK]]))
        states.append([(ids([item]), item.status, item.tags, item.deliveries) for item in await items_of(buffer)])
        states.append([(ids([g.group]), g.status, g.tokens, g.attempt, g.error) for g in hook.groups])
        states.append((loop.order, clock.now))
    return states


STRATEGIES = {
    "anew": {},
    "partial": {"enable_partial_rollout": True, "max_staleness": 2},
    "tail batches": {"enable_partial_rollout": True, "tail_batch_trigger_size": 2, "tail_batch_max_tries": 1},
    "few at a time": {"max_concurrency": 2, "max_token_staleness": 1},
}


#: On PostgreSQL one of them in the quick form.
CASES = [
    ("memory", "partial"),
    *(pytest.param("memory", name, marks=pytest.mark.long) for name in ("anew", "tail batches", "few at a time")),
    ("postgresql", "tail batches"),
    *(pytest.param("sqlite", name, marks=pytest.mark.long) for name in STRATEGIES),
    *(pytest.param("postgresql", name, marks=pytest.mark.long) for name in ("anew", "partial", "few at a time")),
]


@pytest.mark.parametrize(("new_url", "name"), CASES, indirect=["new_url"])
async def test_two_runs_are_the_same(new_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Batch by batch, group by group, and in all counts."""
    first = await run(new_url(), monkeypatch, STRATEGIES[name], 1)
    second = await run(new_url(), monkeypatch, STRATEGIES[name], 1)
    assert first == second
    produced = sum(counts["produced"] for counts, _ in first[:STEPS])
    assert produced >= STEPS * SIZE
    assert {status for _, status, *_ in first[-2]} >= {Status.COMPLETED, Status.INIT, Status.FILTERED, Status.FAILED}
