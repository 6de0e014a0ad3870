"""Programs that end without closing their buffer, and buffers that are dropped."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time

import pytest

from tests.scripts import run
from tests.stores import TASK, build, fill, number_of, opened, take_all

ENDS = {
    "open": "buffer = build(url); asyncio.run(fill(buffer, 3))",
    "collected": "asyncio.run(fill(build(url), 3)); gc.collect(); time.sleep(0.1); gc.collect()",
    "in a class": """
        class Trainer:
            def __init__(self): self.buffer = build(url)
            def __del__(self): pass
        trainer = Trainer(); trainer.me = trainer; asyncio.run(fill(trainer.buffer, 3))
    """,
    "sys.exit": """
        buffer = build(url)
        async def main():
            await fill(buffer, 3)
            sys.exit(0)
        asyncio.run(main())
    """,
    "a waiting take in a daemon": """
        buffer = build(url); asyncio.run(fill(buffer, 3))
        def consume():
            try: asyncio.run(buffer.take_batch({"none": 4}, timeout=None))
            except BaseException: pass
        threading.Thread(target=consume, daemon=True).start()
        time.sleep(0.2)
    """,
    "puts and takes in an exit handler": """
        import atexit
        buffer = build(url); asyncio.run(fill(buffer, 2))
        def last():
            async def main():
                await asyncio.wait_for(buffer.put(group(2), TASK), 5)
                assert len(await asyncio.wait_for(buffer.get(1, TASK), 5)) == 1
                await buffer.put(group(0), TASK)
                await buffer.close()
            asyncio.run(main())
        atexit.register(last)
    """,
}


@pytest.mark.parametrize("end", list(ENDS))
def test_a_program_that_ends_without_closing_ends_quietly_and_loses_nothing(shared_url: str, end: str) -> None:
    started = time.monotonic()
    run(ENDS[end], shared_url)
    assert time.monotonic() - started < 20
    with opened(shared_url) as buffer:
        assert sorted(asyncio.run(take_all(buffer))) == [0, 1, 2]


def test_a_keyboard_interrupt_ends_a_waiting_take_and_loses_nothing(shared_url: str) -> None:
    out = run(
        """
        buffer = build(url)
        async def main():
            await fill(buffer, 3)
            print("ready", flush=True)
            try:
                await buffer.take_batch({TASK: 4}, timeout=30)
            finally:
                print(len(buffer), flush=True)
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted", len(buffer), flush=True)
            asyncio.run(buffer.close())
        """,
        shared_url,
        send=signal.SIGINT,
    )
    assert out == "3\ninterrupted 3\n"


def test_a_buffer_that_is_dropped_lets_go_of_its_thread(shared_url: str) -> None:
    def use() -> None:
        buffer = build(shared_url)
        asyncio.run(fill(buffer, 1))

    before = set(threading.enumerate())
    for _ in range(3):
        use()
    deadline = time.monotonic() + 10
    while names := [t.name for t in threading.enumerate() if t not in before and t.name.startswith("replaybuf")]:
        gc.collect()
        assert time.monotonic() < deadline, names
        time.sleep(0.01)


def test_a_dropped_buffer_finishes_what_its_callers_wait_for(shared_url: str) -> None:
    async def use() -> list[int]:
        return [number_of(g) for g in await build(shared_url).get(1, TASK)]

    with opened(shared_url) as buffer:
        asyncio.run(fill(buffer, 5))
    for number in range(5):
        gc.collect()
        assert asyncio.run(use()) == [number]
