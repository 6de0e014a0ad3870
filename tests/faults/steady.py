"""Groups that flow through a store for as long as one likes: what the processes of it do."""

from __future__ import annotations

import asyncio
import os
import time

from replaybuf import ReplayBuffer
from replaybuf.storage.sql.tasks import sweeper
from tests.faults.processes import Ledger
from tests.stores import TASK, build, group, numbers_of

WIDTH = 24
TEXT = 20_000
#: A step takes at least so long: on a machine that gets less to do, more would wait for the sweep.
STEP_SECONDS = 0.03


async def flow(ledger: Ledger, url: str, seconds: float, grace: float) -> None:
    """Steps of put, refresh, take and checkpoint; `step GROUPS-SO-FAR MEGABYTES-OF-MEMORY` after each.

    `grace` is how long payloads of taken groups wait for the sweep, and the time between two sweeps: less than two
    seconds for a run that is quicker than real ones.
    """
    sweeper.GRACE_SECONDS = sweeper._POLL_SECONDS = grace
    async with build(url, policy="prioritized", seed=3, keep_checkpoints=2) as buffer:
        start, step = time.monotonic(), 0
        while time.monotonic() < start + seconds:
            step += 1
            await asyncio.gather(_step(buffer, step), asyncio.sleep(STEP_SECONDS))
            ledger.write("step", WIDTH * step, round(_resident_megabytes(), 1))
        assert await buffer.count_where({}) <= 2 * WIDTH


async def _step(buffer: ReplayBuffer, step: int) -> None:
    numbers = range(WIDTH * step, WIDTH * (step + 1))
    puts = (buffer.put(group(n, text="x" * TEXT), TASK, model_step=step, current_train_step=step) for n in numbers)
    await asyncio.gather(*puts)
    limits = {TASK: 4}
    await buffer.refresh_staleness(task_stale_thresholds=limits, current_train_step=step + 1)
    async with buffer.lease_batch({TASK: WIDTH}, timeout=60) as lease:
        items = [item.uid for item in lease.items[TASK]]
        await buffer.update_priorities(dict.fromkeys(items[: WIDTH // 2], 2.0))
    if step % 10 == 0:
        await buffer.checkpoint(step)


def _resident_megabytes() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def look_on(ledger: Ledger, url: str, seconds: float) -> None:
    """Read all the time, so that there is always somebody who reads."""
    async with build(url) as buffer:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            groups = [numbers_of([item.item]) async for item in buffer.find({}) if item.item]
            ledger.write("saw", len(groups))
