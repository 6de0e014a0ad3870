"""Brief transactions: run in the store's own thread on SQLite, unless that would make it wait."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

from replaybuf import ReplayBufferConfig
from replaybuf.storage.sql.engine.transaction import Transaction
from tests.stores import TASK, build, fill, group, set_by, take_all


def where(tx: Transaction) -> str:
    return threading.current_thread().name


async def test_a_brief_write_needs_no_other_thread(tmp_path: Path) -> None:
    async with build(f"sqlite:///{tmp_path}/buffer.db") as buffer:
        await fill(buffer, 1)
        store = buffer.storage
        assert await store.thread.run(lambda: store.transactions.write(where, brief=True)) == "replaybuf-database"
        assert await store.thread.run(lambda: store.transactions.write(where)) != "replaybuf-database"


async def test_while_another_process_writes_a_put_waits_and_reads_are_answered(tmp_path: Path) -> None:
    async with build(f"sqlite:///{tmp_path}/buffer.db") as buffer:
        await fill(buffer, 1)
        other = sqlite3.connect(tmp_path / "buffer.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        put = asyncio.create_task(buffer.put(group(1), TASK))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(5):
            assert await buffer.is_ready({TASK: 1})
        assert not put.done()
        other.execute("COMMIT")
        other.close()
        await put
        assert await take_all(buffer) == [0, 1]


async def test_a_brief_read_doesnt_wait_for_a_long_write(tmp_path: Path) -> None:
    async with build(f"sqlite:///{tmp_path}/buffer.db") as buffer:
        await fill(buffer, 1)
        store, begun, go_on = buffer.storage, threading.Event(), threading.Event()

        def long(tx: Transaction) -> bool:
            begun.set()
            return go_on.wait(10)

        writing = asyncio.create_task(store.thread.run(lambda: store.transactions.write(long)))
        await set_by(begun, writing, 10)
        async with asyncio.timeout(5):
            assert await buffer.is_ready({TASK: 1})
        go_on.set()
        assert await writing


class Tool:
    pass


async def test_a_converter_may_ask_the_buffer(tmp_path: Path) -> None:
    """Also after puts that took no time, so that a put would be encoded in the store's thread."""
    asking, asked = threading.Event(), list[int]()

    def convert(_: Tool) -> int:
        if asking.is_set():
            asked.append(len(buffer))
        return 0

    async with ReplayBufferConfig(
        url=f"sqlite:///{tmp_path}/buffer.db", rollout_type=dict, converters={Tool: ("tool", convert, lambda _: Tool())}
    ).build() as buffer:
        async with asyncio.timeout(10):
            for _ in range(3):
                await buffer.put([{"tool": Tool()}], TASK)
            asking.set()
            await buffer.put([{"tool": Tool()}], TASK)
        assert asked == [3]
