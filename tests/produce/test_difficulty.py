"""Prompts in the order of their difficulty: what is known of them, what comes next, and what a restore brings back."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf import ReplayBuffer, Status
from replaybuf.errors import InputError, LeaseLostError, ProduceError
from replaybuf.produce import Prompt, Sampler, SyncProduceStrategy, Unsolved, reward_varies
from replaybuf.produce.difficulty import OrderedPrompts
from replaybuf.storage.values import Cursor
from tests.produce.conftest import Script, ScriptedLoop, produce, prompts
from tests.stores import TASK, build

NEVER = -np.inf


@pytest.fixture
def url(shared_url: str) -> str:
    return shared_url


def use(buffer: ReplayBuffer, order: Any = "varied", count: int = 8, **options: Any) -> Sampler:
    options = {"prompt_repeat_k": 2, "shuffle": 3, **options}
    return Sampler(buffer, prompts(count), TASK, order=order, **options)


def places(leased: list[Prompt]) -> list[int]:
    return [prompt.tags["prompt"] for prompt in leased]  # type: ignore[misc]


async def finish(leased: list[Prompt], rewards: Any = lambda place: (0.0, 1.0), **options: Any) -> list[int]:
    """Finish prompts with the rewards of their place; return the places."""
    for prompt in leased:
        for rollout, reward in zip(prompt.group, rewards(prompt.tags["prompt"]), strict=True):
            rollout.response, rollout.reward, rollout.status = "?", reward, Status.COMPLETED
        await prompt.finish(**options)
    return places(leased)


async def known(sampler: Sampler) -> dict[int, tuple[float, ...]]:
    """The statistics of the prompts that were generated, by place."""
    return {row[0]: row[1:] for row in (await sampler.statistics()).tolist() if row[1]}


async def test_what_varies_comes_next(buffer: ReplayBuffer) -> None:
    """Every prompt once in an epoch, first those that were never generated."""
    sampler = use(buffer)
    rewards = {place: (0.0, place / 10) for place in range(8)}
    first = await finish(await sampler.draw(3), rewards.__getitem__)
    later = await finish(await sampler.draw(99), rewards.__getitem__)
    assert sorted(first + later) == list(range(8))
    assert first + later != sorted(first + later)
    assert places(await sampler.draw(5)) == [7, 6, 5, 4, 3]
    assert places(await sampler.draw(5)) == [2, 1, 0]
    assert len(await sampler.draw(5)) == 5


async def test_what_is_solved_or_hopeless_is_skipped(buffer: ReplayBuffer) -> None:
    """After so many tries; when nothing is left, no prompt is."""
    rewards = {0: (1.0, 1.0), 1: (0.0, 0.0), 2: (0.0, 1.0), 3: (0.9, 1.0)}
    sampler = use(buffer, Unsolved(high=0.9, tries=2), count=4)
    draws = Counter([place for _ in range(6) for place in await finish(await sampler.draw(4), rewards.__getitem__)])
    assert draws == {0: 2, 1: 2, 2: 6, 3: 2}
    for _ in range(2):
        await finish(await sampler.draw(4), lambda place: (1.0, 1.0))
    assert await sampler.draw(4) == []
    assert (await sampler.counts()).finished == draws.total() + 1


async def test_what_is_known_of_a_prompt(buffer: ReplayBuffer) -> None:
    """Of finished groups that were judged: also filtered ones, kept or not; None counts for nothing."""
    sampler = use(buffer, lambda rows: -rows["item"], count=7)
    leased = await sampler.draw(7)
    assert places(leased) == list(range(7))
    await finish(leased[:1], lambda _: (1.0, 0.0))
    await finish(leased[1:2], lambda _: (1.0, 1.0), status="filtered")
    await finish(leased[2:3], lambda _: (3.0, None), status="filtered", keep_unfit=False)
    await finish(leased[3:4], lambda _: (None, None))
    for rollout in leased[4].group:
        rollout.response, rollout.reward, rollout.status = "half", 1.0, Status.ABORTED
    await leased[4].finish()
    await leased[5].give_back(failed="no luck")
    assert await known(sampler) == {0: (1, 0.5, 0.5, 0.5), 1: (1, 1.0, 0.0, 1.0), 2: (1, 3.0, 0.0, 3.0)}
    redrawn = await sampler.draw(2)
    assert places(redrawn) == [4, 5]  # what comes again has the place that it had
    await redrawn[0].save(model_step=1)
    await redrawn[0].give_back()
    assert await finish(await sampler.draw(1), lambda _: (4.0, 2.0)) == [4]
    assert (await known(sampler))[4] == (1, 3.0, 1.0, 3.0)
    results = [item async for item in buffer.find({"tags.prompt": 4})]
    assert [item.reward for item in results] == [3.0]
    await finish(redrawn[1:])
    await finish(await sampler.draw(1), lambda _: (5.0, 1.0))
    assert (await known(sampler))[0] == (2, 1.75, pytest.approx(np.std([1, 0, 5, 1])), 3.0)


async def test_a_strategy_counts_what_it_filters(buffer: ReplayBuffer) -> None:
    """Those are the solved and the hopeless ones."""
    loop = ScriptedLoop(default=Script(), scripts={0: Script(reward=lambda _: 1.0)})
    sampler = use(buffer, "unsolved", count=4)
    await produce(SyncProduceStrategy(is_valid=reward_varies), loop, sampler, 3)
    assert sorted((await sampler.statistics())["times"]) == [1, 1, 1, 1]
    assert sorted((await sampler.statistics())["spread"]) == [0, 0.5, 0.5, 0.5]


async def test_the_same_seed_gives_the_same_order() -> None:
    """In another ledger; another seed gives another one, and so does another epoch."""
    async with build("memory://") as buffer:
        order_pairs = []
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            sampler = use(buffer, lambda rows: np.zeros(len(rows)), count=20, name=name, shuffle=seed, again=())
            order_pairs.append([await finish(await sampler.draw(20)) for _ in range(2)])
        assert order_pairs[0] == order_pairs[1]
        assert len({tuple(order) for orders in order_pairs for order in orders}) == 4


async def test_several_samplers_hand_out_each_prompt_of_an_epoch_once(shared_url: str) -> None:
    """Of other processes, or of this one at once; each has what the others have found out."""
    async with build(shared_url) as buffer, build(shared_url) as other_buffer:
        samplers = [use(buffer, count=30), use(buffer, count=30), use(other_buffer, count=30)]
        batches = await asyncio.gather(*(sampler.draw(count) for count in (1, 3, 5) for sampler in samplers))
        while batch := await samplers[2].draw(9, again=()):
            if batch[0].group[0].group_id >= 30:
                break
            batches.append(batch)
        assert sorted(place for batch in batches for place in places(batch)) == list(range(30))
        await asyncio.gather(*map(finish, batches))
        first, second = await known(samplers[0]), await known(samplers[2])
        assert first == second
        assert len(first) == 30


async def test_a_restore_takes_back_what_is_known_and_what_was_drawn(shared_url: str) -> None:
    """To any checkpoint that is left, also a later one; and the same prompts come then, in another process, too."""
    buffer, number = build(shared_url, keep_checkpoints=4), 0
    async with buffer:
        sampler = use(buffer, count=12)
        states: dict[int, tuple[Any, ...]] = {}

        async def step(count: int) -> list[int]:
            nonlocal number
            number += 1
            return await finish(await sampler.draw(count), lambda place: (0.0, place * number % 7))

        async def look(checkpoint: int) -> tuple[Any, ...]:
            """What is known then, and what would be drawn; the buffer is at the checkpoint again after it."""
            nonlocal number
            known_then, number = await known(sampler), 100
            next_draws = [await step(5) for _ in range(2)]
            await buffer.restore(checkpoint)
            assert await known(sampler) == known_then
            return known_then, next_draws

        async def keep(checkpoint: int) -> None:
            await buffer.checkpoint(checkpoint)
            states[checkpoint] = await look(checkpoint)

        for checkpoint in (1, 2, 3):
            await step(4)
            await step(3)
            await keep(checkpoint)
        await buffer.restore(1)
        assert await look(1) == states[1]
        await step(5)
        await keep(4)
        for checkpoint in (3, 1, 4):
            await buffer.restore(checkpoint)
            assert await look(checkpoint) == states[checkpoint]
        await buffer.drop_checkpoint(4)
        await buffer.drop_checkpoint(3)
        await step(5)
        await buffer.restore(2)
        async with build(shared_url) as another:
            assert await known(use(another, count=12)) == states[2][0]
        assert await look(2) == states[2]
        for checkpoint in (1, 2):
            await buffer.drop_checkpoint(checkpoint)
        before = await known(sampler)
        place, *_ = await step(1)
        times = {at: knowledge[0] for at, knowledge in (await known(sampler)).items()}
        assert times == {at: knowledge[0] for at, knowledge in before.items()} | {place: before.get(place, (0,))[0] + 1}


async def test_no_more_is_kept_than_checkpoints_have(buffer: ReplayBuffer) -> None:
    sampler = use(buffer, count=2)
    for number in range(9):
        await finish(await sampler.draw(2))
        await buffer.checkpoint(number)
    count = "SELECT count(*) FROM rb_prompt"
    assert await buffer.storage.thread.run(lambda: buffer.storage.engine.read(lambda tx: tx.value(count))) <= 2 * 5


async def test_a_copy_goes_on_where_the_run_is(buffer: ReplayBuffer, tmp_path: Path) -> None:
    sampler = use(buffer, count=12)
    await finish(await sampler.draw(9), lambda place: (0.0, place))
    await buffer.save(tmp_path / "saved")
    async with build(f"sqlite:///{tmp_path}/copy.db") as copy:
        await copy.resume(tmp_path / "saved")
        copied = use(copy, count=12)
        assert await known(copied) == await known(sampler)
        for _ in range(2):
            assert places(await copied.draw(6)) == places(await sampler.draw(6))


async def test_a_prompt_of_a_dead_worker_is_counted_once(shared_url: str) -> None:
    """By the one who finishes it."""
    async with build(shared_url) as buffer, build(shared_url) as other:
        [dead] = await use(buffer, seconds=0.05, count=1, epochs=1).draw(1)
        dead._lease.stop()
        sampler = use(other, count=1, epochs=1)
        [prompt] = await sampler.draw(1, timeout=20)
        assert prompt.tags == dead.tags
        await finish([prompt])
        with pytest.raises(LeaseLostError):
            await finish([dead])
        assert await known(sampler) == {0: (1, 0.5, 0.5, 0.5)}


@pytest.mark.parametrize("kind", ["random", "few", "equal", "in steps", "skipped"])
def test_the_first_ones_are_those_of_a_sort(kind: str) -> None:
    """However the priorities lie."""
    size = 30_000
    numbers = np.random.default_rng(5)
    priorities = {
        "random": numbers.normal(size=size),
        "few": numbers.integers(0, 4, size) * 1.0,
        "equal": np.zeros(size),
        "in steps": np.arange(size) % 3 * -1.0,
        "skipped": np.where(np.arange(size) % 1000, NEVER, numbers.normal(size=size)),
    }[kind]
    dataset = OrderedPrompts(range(size), 1, 0, lambda rows: priorities[rows["item"]])
    now, places_chosen = Cursor("?"), list[int]()
    for version in range(1, 5):
        items, epochs, after = dataset.choose(now, [], 64)
        assert items == list(epochs)
        places_chosen += items
        now = Cursor("?", version, value=after)
        dataset.update_statistics(now, [(place, 0, 0, 0, 0.0, 0.0, None) for place in items])
    eligible = np.count_nonzero(priorities > NEVER)
    assert len(set(places_chosen)) == len(places_chosen) == min(4 * 64, eligible)
    in_order = priorities[places_chosen].astype(np.float32)
    assert (np.diff(in_order) <= 0).all()
    assert in_order[-1] >= np.sort(priorities[np.setdiff1d(np.arange(size), places_chosen)].astype(np.float32))[-1]


def test_what_was_read_earlier_is_not_taken_in_later() -> None:
    """By another thread; after a restore all begins anew."""
    dataset = OrderedPrompts(range(2), None, 0, "varied")
    for version, times, known_count in ((3, 2, 3), (1, 1, 3), (4, 3, 4)):
        dataset.update_statistics(Cursor("?", version), [(0, 0, times, times, 1.0, 1.0, 1.0)])
        assert dataset.known(Cursor("?", version)) == known_count
        assert dataset.statistics["times"].tolist() == [max(2, times), 0]
    restored = Cursor("?", 1, epoch=1)
    assert dataset.known(restored) == -1
    dataset.update_statistics(restored, [(1, 0, 1, 1, 1.0, 1.0, 1.0)])
    assert dataset.statistics["times"].tolist() == [0, 1]


ORDERS: dict[str, tuple[Any, str]] = {
    "name": ("hard", r"order must be 'varied', 'unsolved', Unsolved\(...\), or a function, got 'hard'"),
    "class": (Unsolved, "or a function, got <class"),
    "number": (3, "or a function, got 3"),
    "shape": (lambda rows: np.zeros(3), r"a number for each of 8 prompts, got array\(\[0., 0., 0.\]\)"),
    "scalar": (lambda rows: 1.0, r"for each of 8 prompts, got array\(1.\)"),
    "NaN": (lambda rows: np.full(len(rows), np.nan), r"for each of 8 prompts, got array\(\[nan, nan"),
    "field": (
        lambda rows: rows["spred"],
        r"order= raised .*spred.* \(the fields are \('item', 'times', 'mean', ",
    ),
    "texts": (lambda rows: ["?"] * len(rows), r"for each of 8 prompts, got array\(\['\?', "),
}


@pytest.mark.parametrize("name", ORDERS)
async def test_orders_that_are_none_are_refused(name: str) -> None:
    """Each time; nothing is drawn."""
    order, message = ORDERS[name]
    async with build("memory://") as buffer:
        if not callable(order) or isinstance(order, type):
            with pytest.raises(InputError, match=message):
                use(buffer, order)
            return
        sampler = use(buffer, order)
        for _ in range(2):
            with pytest.raises(InputError, match=message):
                await sampler.draw(1)
        assert (await buffer.cursors.read(TASK)).version == 0


async def test_what_an_order_skips_is_said(buffer: ReplayBuffer) -> None:
    """Not that the dataset has ended, in production and in a draw."""
    sampler = use(buffer, Unsolved(tries=1), count=2)
    await finish(await sampler.draw(2), lambda place: (1.0, 1.0))
    await buffer.take_batch({TASK: 2})
    with pytest.raises(ProduceError, match=r"and all 2 prompts are skipped by order= \(solved or hopeless\)$"):
        await produce(SyncProduceStrategy(), ScriptedLoop(), sampler, 1)
    exhausted = use(buffer, Unsolved(tries=1), count=2, epochs=1, name="ended")
    await exhausted.draw(2)
    assert await exhausted.draw(1) == []
    assert exhausted.why_none == "no prompt is left in the dataset"


async def test_other_datasets_and_settings_are_refused() -> None:
    with pytest.raises(InputError, match="low < high"):
        Unsolved(low=1.0)
    async with build("memory://") as buffer:
        with pytest.raises(InputError, match="order= needs a dataset with len"):
            Sampler(buffer, ({"prompt": "?"} for _ in range(3)), TASK, order="varied")
        with pytest.raises(InputError, match="kept by ledgers with order="):
            await use(buffer, None).statistics()
        assert await use(buffer, epochs=0).draw(1) == await use(buffer, count=0).draw(1) == []
        await use(buffer).draw(3)
        for sampler, message in (
            (use(buffer, None), "began with order= and shuffle=3, in another order than now"),
            (use(buffer, shuffle=4), r"order than now \(with order= and shuffle=4\)"),
            (use(buffer, count=9), "the dataset had 8 items and has 9 now: with order= it must keep"),
            (
                Sampler(buffer, prompts(16)[8:], TASK, shuffle=3, order="varied"),
                "is another one than the run has read there",
            ),
        ):
            with pytest.raises(InputError, match=message):
                await sampler.draw(1)
        await use(buffer, None, name="other").draw(1)
        with pytest.raises(InputError, match="began with shuffle=3, in another order than now"):
            await use(buffer, name="other").draw(1)
