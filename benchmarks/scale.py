"""The cost of a batch and of a look with 1,000,000 groups, beside 10,000 and beside a dict in memory."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator

from benchmarks import groups
from benchmarks.databases import TASK, new_database, open_buffer
from benchmarks.memory import MemoryBuffer
from benchmarks.million import fill_many, refresh
from benchmarks.table import Row, Settings, in_turn, milliseconds, number, seconds, spread
from replaybuf import ReplayBuffer
from replaybuf.values.rollouts.staleness import ExpiryRule, refresh_group

BATCH = 64
ORDERS = ("fifo", "lifo", "staleness")
RACES = ("prioritized",)


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield rows for each database; one for a dict in memory."""
    many, few = settings.size(1_000_000, 50_000), 10_000
    for kind in settings.databases:
        async with new_database(kind) as large, new_database(kind) as small:
            await fill_many(large, many)
            await fill_many(small, few)
            for policy in ORDERS:
                yield await _gets(settings, kind, policy, large, small, many, few)
            async with open_buffer(large) as buffer:
                yield await _looks(settings, kind, buffer, "is_ready", many, 0.005)
                yield await _looks(settings, kind, buffer, "count", many, 0.050)
                if kind == settings.databases[0]:
                    yield await _beside_memory(settings, kind, buffer, many)
                yield await _refreshes(settings, kind, buffer, many)
            # Random policies come last: once a race has begun, every group has a key in one more index.
            for policy in RACES:
                yield await _gets(settings, kind, policy, large, small, many, few)
            for policy in (*ORDERS[1:], *RACES):
                yield await _beside_fifo(settings, kind, policy, large, many)


async def _gets(settings: Settings, kind: str, policy: str, large: str, small: str, many: int, few: int) -> Row:
    async with open_buffer(large, policy) as big, open_buffer(small, policy) as little:
        pairs = await in_turn(
            lambda: big.get(BATCH, TASK), lambda: little.get(BATCH, TASK), settings.rounds * 3, warm_up=4
        )
    middle, shown = pairs.ratio(faster=False)
    mine, base = pairs.median
    return Row(
        "scale",
        f"{kind}, {policy}: get(64) with {many:,} small groups buffered",
        milliseconds(mine),
        f"with {few:,}: {milliseconds(base)}",
        shown,
        "<= 1.5",
        middle <= 1.5,
    )


async def _beside_fifo(settings: Settings, kind: str, policy: str, large: str, many: int) -> Row:
    async with open_buffer(large, policy) as chosen, open_buffer(large, "fifo") as fifo:
        pairs = await in_turn(
            lambda: chosen.get(BATCH, TASK), lambda: fifo.get(BATCH, TASK), settings.rounds * 3, warm_up=4
        )
    middle, shown = pairs.ratio(faster=False)
    mine, base = pairs.median
    return Row(
        "scale",
        f"{kind}, {policy}: get(64) with {many:,} small groups buffered, beside fifo",
        milliseconds(mine),
        f"fifo: {milliseconds(base)}",
        shown,
        "<= 2",
        middle <= 2,
    )


async def _looks(settings: Settings, kind: str, buffer: ReplayBuffer, name: str, many: int, aim: float) -> Row:
    async def look() -> None:
        if name == "count":
            await buffer.count(TASK, "completed")
        else:
            await buffer.is_ready({TASK: BATCH})

    measured = [await seconds(look) for _ in range(settings.rounds * 3)][2:]
    return Row(
        "scale",
        f"{kind}: {name} with {many:,} groups buffered",
        spread(measured),
        aim=f"<= {aim * 1000:g} ms",
        met=statistics.median(measured) <= aim,
    )


def _in_memory(count: int) -> MemoryBuffer:
    memory = MemoryBuffer()
    for number_ in range(count):
        rollouts = groups.small()
        rollouts[0].response_model_steps = [number_ % 100] * len(rollouts[0].response_ids)
        refresh_group(rollouts, groups.TRAIN_STEP, groups.CODEC.rollout_type)
        memory.put(rollouts, TASK)
    return memory


async def _beside_memory(settings: Settings, kind: str, buffer: ReplayBuffer, many: int) -> Row:
    count = settings.size(100_000, 20_000)
    memory = _in_memory(count)
    pairs = await in_turn(lambda: buffer.get(BATCH, TASK), lambda: memory.get(BATCH, TASK), settings.rounds)
    mine, base = pairs.median
    return Row(
        "scale",
        f"{kind}: get(64) with {many:,} groups buffered, beside a dict",
        milliseconds(mine),
        f"memory with {count:,}: {milliseconds(base)}",
        pairs.ratio(faster=True)[1],
    )


async def _refreshes(settings: Settings, kind: str, buffer: ReplayBuffer, many: int) -> Row:
    """Measure refreshes to the next train step, which each expire one group in a hundred, spread evenly."""
    count = settings.size(100_000, 20_000)
    memory = _in_memory(count)
    steps = {"ours": groups.TRAIN_STEP, "theirs": groups.TRAIN_STEP}
    expired: list[int] = []

    async def ours() -> None:
        steps["ours"] += 1
        expired.append(await refresh(buffer, steps["ours"]))

    def theirs() -> None:
        steps["theirs"] += 1
        memory.refresh(ExpiryRule(groups.TRAIN_STEP), steps["theirs"])

    pairs = await in_turn(ours, theirs, settings.rounds)
    times = many / count
    extrapolated = type(pairs)(pairs.ours, [taken * times for taken in pairs.theirs])
    middle, shown = extrapolated.ratio(faster=True)
    mine, base = extrapolated.median
    return Row(
        "refresh",
        f"{kind}: refresh_staleness of {many:,} groups, of which {number(statistics.median(expired))} expire",
        milliseconds(mine),
        f"memory, extrapolated from {count:,}: {milliseconds(base)}",
        shown,
        ">= 20",
        middle >= 20,
    )
