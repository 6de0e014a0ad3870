"""Loops and processes that end in the middle of a take."""

from __future__ import annotations

import asyncio
import gc
import random
import textwrap

import pytest

from tests.scripts import run
from tests.stores import TASK, fill, numbers_of, opened, take_all, until


def test_a_loop_that_ends_in_the_middle_of_a_take_loses_nothing(url: str) -> None:
    """asyncio.run cancels what still runs."""
    chance = random.Random(12)
    taken: list[int] = []
    with opened(url) as buffer:
        asyncio.run(fill(buffer, 60))

        async def main() -> None:
            tasks = [asyncio.create_task(buffer.get(2, TASK)) for _ in range(2)]
            for task in tasks:
                task.add_done_callback(lambda t: None if t.cancelled() else taken.extend(numbers_of(t.result())))
            await asyncio.sleep(chance.random() * 0.006)

        for _ in range(15):
            asyncio.run(main())
        taken += asyncio.run(take_all(buffer))
    assert sorted(taken) == list(range(60))


def test_a_loop_that_is_closed_with_a_pending_take_loses_nothing(url: str) -> None:
    chance = random.Random(13)
    taken: list[int] = []
    with opened(url) as buffer:
        asyncio.run(fill(buffer, 20))
        for _ in range(20):
            loop = asyncio.new_event_loop()
            task = loop.create_task(buffer.get(1, TASK))
            loop.run_until_complete(asyncio.sleep(chance.random() * 0.005))
            loop.close()
            if task.done():
                taken += numbers_of(task.result())
            else:
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # closing it like this is bad style
            del task

        async def all_back() -> bool:
            gc.collect()  # that is what tells of the take that nobody can go on with
            return len(buffer) + len(taken) == 20

        asyncio.run(until(all_back, 60))
        taken += asyncio.run(take_all(buffer))
    assert sorted(taken) == list(range(20))


BEGINNING = """
import atexit
def report(groups):
    print(*numbers_of(groups), flush=True)
buffer = build(url)
asyncio.run(buffer.count_where({}))
"""
ENDS = {
    "cancelled take": """
        async def main():
            task = asyncio.create_task(buffer.get(3, "math"))
            await asyncio.sleep({delay})
            task.cancel()
            try:
                report(await task)
            except asyncio.CancelledError:
                pass
        asyncio.run(main())
    """,
    "take in a loop that just stops": """
        loop = asyncio.new_event_loop()
        task = loop.create_task(buffer.get(3, "math"))
        loop.run_until_complete(asyncio.sleep({delay}))
        if task.done():
            report(task.result())
        else:
            task._log_destroy_pending = False
        atexit.register(loop.close)
    """,
    "exit inside of a coroutine": """
        async def main():
            task = asyncio.create_task(buffer.get(3, "math"))
            task.add_done_callback(lambda t: t.cancelled() or report(t.result()))
            await asyncio.sleep({delay})
            sys.exit(0)
        asyncio.run(main())
    """,
}


@pytest.mark.parametrize("end", list(ENDS))
def test_a_process_that_ends_in_the_middle_of_a_take_loses_nothing(shared_url: str, end: str) -> None:
    chance = random.Random(14)
    with opened(shared_url) as buffer:
        asyncio.run(fill(buffer, 12))
    taken: list[int] = []
    for _ in range(2):
        script = BEGINNING + textwrap.dedent(ENDS[end]).replace("{delay}", str(chance.random() * 0.006))
        taken += map(int, run(script, shared_url).split())
    with opened(shared_url) as buffer:
        taken += asyncio.run(take_all(buffer))
    assert sorted(taken) == list(range(12))
