"""Workers that fill groups are killed at random moments: each rollout that was put is there once, in a whole group."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import ConflictError
from tests.faults import processes
from tests.faults.processes import Ledger, entries
from tests.stores import TASK, build, group, take_all

SIZE = 8


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    yield
    processes.reap()


async def fill(ledger: Ledger, url: str, groups: int, seed: int) -> None:
    """Put the rollouts that are missing, of all groups, in any order, until none is; say which were stored."""
    chance = random.Random(seed)
    async with build(url) as buffer:

        async def put(name: int, index: int) -> None:
            [rollout] = group(name)
            rollout.response = str(uuid.uuid4())
            await asyncio.sleep(chance.random() * 0.02)
            ledger.write("began")
            try:
                await buffer.put([rollout], TASK, group=f"p{name}", size=SIZE, index=index)
            except ConflictError:  # another worker has put it
                return
            ledger.write("stored", name, index, rollout.response)

        filling = await buffer.filling(TASK)
        for name in chance.sample(range(groups), groups):
            progress = filling.get(f"p{name}")
            missing = range(SIZE) if progress is None else progress.missing
            await asyncio.gather(*(put(name, index) for index in chance.sample(list(missing), len(missing))))


@pytest.mark.parametrize(
    ("groups", "kills"), [pytest.param(6, 3, id="some"), pytest.param(300, 500, id="many", marks=pytest.mark.long)]
)
async def test_each_rollout_that_was_put_is_there_once(
    tmp_path: Path, shared_url: str, groups: int, kills: int
) -> None:
    chance, ledgers, running = random.Random(3), list[Path](), list[tuple[Any, Path]]()

    def start() -> None:
        ledgers.append(tmp_path / str(len(ledgers)))
        running.append((processes.start(fill, ledgers[-1], shared_url, groups, len(ledgers)), ledgers[-1]))

    def shoot() -> None:
        """Kill a worker after some of its puts have begun, and start another in its place."""
        process, ledger = running.pop(chance.randrange(len(running)))
        while process.is_alive() and len(entries(ledger, "began")) < chance.randrange(1, 60):
            process.join(0.005)
        processes.kill(process)
        start()

    start()
    start()
    for _ in range(kills):
        await asyncio.to_thread(shoot)
    for process, ledger in running:
        assert await asyncio.to_thread(processes.end, process, ledger, 120) == 0
    stored_words = [line.split() for ledger in ledgers for line in entries(ledger, "stored")]
    async with build(shared_url) as buffer:
        assert await buffer.filling(TASK) == {}
        responses = {
            (str(item.item[0].rollout_id), str(index)): rollout.response
            async for item in buffer.find({"status": "completed"})
            for index, rollout in enumerate(item.item)
        }
        assert Counter(name for name, _ in responses) == {str(name): SIZE for name in range(groups)}
        assert all(responses[name, index] == response for name, index, response in stored_words)
        assert sorted(await take_all(buffer)) == list(range(groups))
