"""Payloads in a folder: a lease of groups with a large field that isn't read, beside one that reads it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import numpy as np

from benchmarks.databases import TASK, new_database, new_folder, open_buffer, put_all
from benchmarks.table import Row, Settings, cost, in_turn, number
from replaybuf import RolloutState, Status
from replaybuf.storage.sql.tasks.handles import load_all


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield a row for each database."""
    for kind in settings.databases:
        yield await _deferred(settings, kind)


async def _deferred(settings: Settings, kind: str) -> Row:
    """Return a lease of groups with a field of 20 MB that isn't read, beside one that reads it."""
    count = settings.size(16, 4)
    heavy = np.random.default_rng(0).integers(0, 64, (10_000, 1000), dtype=np.int16)

    def make() -> list[RolloutState]:
        return [RolloutState(message=[], tokens=np.arange(4000), routed_experts=heavy, status=Status.COMPLETED)]

    async with (
        new_database(kind) as url,
        new_folder() as folder,
        open_buffer(url, payloads=str(folder)) as buffer,
    ):
        await put_all(buffer, [make() for _ in range(count)])

        async def lease(deferred: Sequence[str]) -> None:
            leased = await buffer.lease_batch({TASK: count}, timeout=60, deferred=deferred)
            await leased.give_back()

        pairs = await in_turn(lambda: lease(["routed_experts"]), lambda: lease([]), settings.rounds)
        leased = await buffer.lease_batch({TASK: count}, deferred=["routed_experts"])
        handles = [item.item[0].routed_experts for item in leased.items[TASK]]
        loaded = await cost(lambda: load_all(handles[:1]))
        await leased.acknowledge()
    mine, theirs = pairs.median
    _, shown = pairs.ratio(faster=True)
    return Row(
        "payloads",
        f"{kind} with a folder: {count} groups leased, a field of 20 MB deferred",
        f"{number(mine * 1000)} ms, one loaded in {number(loaded.seconds * 1000)} ms",
        f"read with the groups {number(theirs * 1000)} ms",
        shown,
    )
