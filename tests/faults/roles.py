"""The processes of a run that is shot at: a trainer that leases, workers that generate, one that refreshes.

`done` is a file that says when to end.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress

from replaybuf import LeaseLostError, Prompt, Status
from tests.faults.processes import Ledger
from tests.histories.history import Recorder
from tests.histories.workers import LEASED, TAKEN, Worker, left_in, opened
from tests.produce.conftest import ledger_of
from tests.stores import group, number_of

#: After so many seconds the groups of who was killed come back.
LEASE_SECONDS = 0.7


async def train(ledger: Ledger, url: str, stop: str, seed: int) -> None:
    """Lease batches, to the end when the file exists and nothing is left."""
    async with opened(url) as buffer:
        worker = Worker(buffer, Recorder(ledger), 0, seed, seconds=LEASE_SECONDS)
        while not os.path.exists(stop) or await left_in(buffer):  # noqa: ASYNC240
            await worker.lease()
            await asyncio.sleep(0.01)


async def generate(ledger: Ledger, url: str, prompts: int, epochs: int, seed: int) -> None:
    """Generate for the prompts of a dataset until all are finished; some are given back, some saved half-way."""
    async with opened(url) as buffer:
        recorder, chance = Recorder(ledger), random.Random(seed)
        source = ledger_of(
            buffer,
            range(prompts),
            LEASED,
            make_group=lambda item, number: group(item, 2, status=Status.INIT),
            epochs=epochs,
            partial_rollouts=True,
            seconds=LEASE_SECONDS,
        )
        while new_prompts := await source.draw(chance.randint(1, 4), timeout=60):
            for prompt in new_prompts:
                await _generate(recorder, prompt, chance)
        ledger.write("finished")  # a worker that was started after the last prompt has nothing else to write


async def _generate(recorder: Recorder, prompt: Prompt, chance: random.Random) -> None:
    number, fate = number_of(prompt.group), chance.random()
    with suppress(LeaseLostError):  # on a machine that stood still for so long
        await asyncio.sleep(0.02 * chance.random())
        if fate > 0.9:
            await prompt.give_back(failed="bad luck")
            return
        if fate > 0.6:
            await prompt.save()
        for rollout in prompt.group:
            rollout.status = Status.COMPLETED
        await recorder.call("finish", prompt.finish(), groups=[number])


async def refresh(ledger: Ledger, url: str, stop: str) -> None:
    """Move on from step to step, and change priorities and tags, until FILE exists. Nothing expires by it."""
    async with opened(url) as buffer:
        step = 51
        while not os.path.exists(stop):  # noqa: ASYNC240
            step += 1
            limits = dict.fromkeys((TAKEN, LEASED), 1_000_000)
            expired = await buffer.refresh_staleness(task_stale_thresholds=limits, current_train_step=step)
            assert not any(expired.values())
            await buffer.update({"task_name": LEASED, "staleness": {"$gt": 60}}, priority=2.0, tags={"old": True})
            ledger.write("step", step)
            await asyncio.sleep(0.02)
