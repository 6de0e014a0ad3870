"""Puts into several buffers, all or none, where one of them fails."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from replaybuf import FullError, ReplayBuffer, ReplayBufferConfig
from replaybuf.buffer.together import Put, put_together
from replaybuf.errors import AccessError, ConflictError, RolloutError


def build(url: str, name: str, **options: Any) -> ReplayBuffer[Any]:
    return ReplayBufferConfig(url=url, name=name, rollout_type=dict, **options).build()


async def test_a_group_that_cannot_be_encoded_leaves_replaced_and_evicted_ones_in_place(url: str) -> None:
    keyed, small, last = build(url, "keyed"), build(url, "small", capacity=1), build(url, "last")
    async with keyed, small, last:
        await keyed.put([{"response": "old"}], "math", key="k")
        await small.put([{"response": "old"}], "math")
        new = [{"response": "new"}]
        with pytest.raises(RolloutError):
            await put_together(
                [
                    Put(keyed, new, "math", {"key": "k"}),
                    Put(small, new, "math", {}),
                    Put(last, [{"response": object()}], "math", {}),
                ]
            )
        for buffer in (keyed, small):
            assert [item.item[0]["response"] async for item in buffer.find({})] == ["old"]


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_group_that_cannot_be_stored_leaves_replaced_and_evicted_ones_in_place(
    url: str, tmp_path: Path, elsewhere: bool
) -> None:
    """Whichever it is of those that are put, also where one is in another database."""
    other = f"sqlite:///{tmp_path}/other.db" if elsewhere else url
    keyed, small, last = build(url, "keyed"), build(other, "small", capacity=1), build(url, "last")
    async with keyed, small, last:
        await keyed.put([{"response": "old"}], "math", key="k")
        await small.put([{"response": "old"}], "math")
        new = [{"response": "new"}]
        puts = [
            Put(keyed, new, "math", {"key": "k"}),
            Put(small, new, "math", {}),
            Put(last, new, "math", {"replaces": [999]}),
        ]
        for order in permutations(puts):
            with pytest.raises(ConflictError):
                await put_together(order)
        for buffer in (keyed, small):
            assert [item.item[0]["response"] async for item in buffer.find({})] == ["old"]
        assert len(last) == 0
        uids = await put_together(puts[:2])
        assert [[item.uid async for item in buffer.find({})] for buffer in (keyed, small)] == [[one] for one in uids]


async def test_calls_with_several_databases_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """In whichever order each of them names its buffers; a file is one, whatever it is called."""
    first, second = build("memory://", "first"), build("memory://", "second")
    third, fourth = build(f"sqlite:///{tmp_path}/run.db", "third"), build(f"sqlite:///{tmp_path}/./run.db", "fourth")
    async with first, second, third, fourth, asyncio.timeout(60):
        puts = [Put(buffer, [{"response": "a"}], "math", {}) for buffer in (first, second, third, fourth)]
        await asyncio.gather(*(put_together(order) for order in permutations(puts)))
        assert [len(one.buffer) for one in puts] == [24] * 4


async def test_an_error_of_no_room_names_the_buffer_and_its_place(url: str) -> None:
    for timeout, on_full in ((0, "reject"), (0.05, "block")):
        there, full = build(url, f"there-{on_full}"), build(url, f"full-{on_full}", capacity=1, on_full=on_full)
        async with there, full:
            await full.put([{"response": "a"}], "math")
            puts = [Put(one, [{"response": "b"}], "math", {}) for one in (there, full)]
            with pytest.raises(FullError, match=f"buffer 'full-{on_full}': .* math.*nothing was stored") as raised:
                await put_together(puts, timeout=timeout)
            assert raised.value.place == 1
            assert len(there) == 0


async def test_a_refusal_is_not_held_up_by_a_locked_database(tmp_path: Path) -> None:
    """Its count is left out then: the lock would be waited for in place of the error."""
    url = f"sqlite:///{tmp_path}/run.db"
    async with build(url, "default", capacity=1, on_full="reject", lock_timeout=120) as buffer:
        await buffer.put([{"response": "a"}], "math")
        with contextlib.closing(sqlite3.connect(tmp_path / "run.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(FullError):
                await buffer.waits._refuse(None, "no room")  # type: ignore[arg-type]
            other.execute("ROLLBACK")


def test_a_folder_that_may_not_be_entered_is_an_access_error(tmp_path: Path) -> None:
    from replaybuf.storage.sql.engine.sqlite_files import translate_sqlite

    inside = tmp_path / ("x" * 300) / "run.db"  # a path that can't be looked at, also by root
    error = translate_sqlite(sqlite3.OperationalError("unable to open database file"), "sqlite", str(inside), 1.0)
    assert isinstance(error, AccessError)
