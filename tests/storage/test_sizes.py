"""Groups that are larger than a row of the database may be: each is refused by itself, before it is sent."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBuffer, RolloutState, Status
from replaybuf.errors import StorageError
from replaybuf.storage.sql import backend
from replaybuf.storage.sql.engine import dialect
from replaybuf.storage.sql.statements import matching
from replaybuf.storage.sql.statements.refresh import refresh_staleness
from replaybuf.storage.values import Refresh, StorageItem
from replaybuf.values.rollouts.staleness import ExpiryRule
from tests.produce.conftest import ledger_of
from tests.stores import TASK, because, build, fill, group, sweep_now, take_all

LIMIT = 200_000


def lower(monkeypatch: pytest.MonkeyPatch, limit: int = LIMIT) -> None:
    """Lower the limit of a row, and SQLite's own."""
    connect = sqlite3.connect

    def limited(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limit)
        return connection

    monkeypatch.setattr(sqlite3, "connect", limited)
    monkeypatch.setattr(dialect, "MOST_ROW_BYTES", limit * 999 // 1000)


def large(number: int, nbytes: int = 2 * LIMIT) -> list[Any]:
    return group(number, text="x" * nbytes)


REFUSED = r"task math: the group of 1 rollouts takes 40\d kB .* a row holds at most 199,800 bytes"


async def test_a_group_that_is_too_large_fails_alone(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of puts that are committed together."""
    lower(monkeypatch)
    async with build(shared_url) as buffer:
        puts = [large(number) if number % 3 == 1 else group(number) for number in range(9)]
        ends = await asyncio.gather(*(buffer.put(rollouts, TASK) for rollouts in puts), return_exceptions=True)
        assert [getattr(end, "reason", "") == "too large" for end in ends] == [number % 3 == 1 for number in range(9)]
        with pytest.raises(StorageError, match=REFUSED, check=because("too large")):
            await buffer.put(large(1), TASK)
        assert await buffer.put(group(9, text="x" * (LIMIT * 9 // 10)), TASK)
        assert await take_all(buffer) == [0, 2, 3, 5, 6, 8, 9]


async def test_a_result_that_is_too_large_leaves_what_it_was_made_from(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch)
    async with build(shared_url) as buffer:
        await buffer.put(group(0), TASK)
        lease = await buffer.lease_batch({TASK: 1}, heartbeat=False)
        for finish in (lease.finish, lease.save):
            with pytest.raises(StorageError, match=REFUSED, check=because("too large")):
                await finish(large(1), TASK, replaces=lease.open)
        assert await lease.give_back() == 1
        assert await take_all(buffer) == [0]


async def test_prompts_that_are_too_large_are_not_claimed(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cursor stays before them."""
    lower(monkeypatch)
    async with build(shared_url) as buffer:
        prompt = RolloutState(message=[{"role": "user", "content": "x" * 2 * LIMIT}], status=Status.INIT)
        prompts = ledger_of(buffer, [prompt], TASK)
        with pytest.raises(StorageError, match=REFUSED, check=because("too large")):
            await prompts.draw()
        assert (await buffer.cursors.read(prompts.name)).version == 0


async def filled(url: str) -> ReplayBuffer:
    buffer = build(url)
    await buffer.put(group(0), TASK)
    await buffer.put(large(1), TASK)
    return buffer


async def test_copies_of_what_is_too_large_elsewhere_are_refused(
    shared_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await filled("memory://")
    await source.save(tmp_path / "copy")
    await source.close()
    async with build(shared_url) as buffer:
        await buffer.count_where({})
        monkeypatch.setattr(dialect, "MOST_ROW_BYTES", LIMIT)
        with pytest.raises(StorageError, match=r"group 2 takes 40\d kB", check=because("too large")):
            await buffer.resume(tmp_path / "copy")
        assert len(buffer) == 0


async def test_whatever_else_is_too_large_is_refused_too(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It isn't sent to PostgreSQL, which would end the connection."""
    lower(monkeypatch)
    async with build(shared_url) as buffer:
        await buffer.put(group(0), TASK)
        with pytest.raises(StorageError, match=REFUSED, check=because("too large")):
            await buffer.put(group(1), TASK, tags={"a": "x" * 2 * LIMIT})
        with pytest.raises(
            StorageError,
            match=r"what was to be stored takes 400 kB|larger than SQLite's limit",
            check=because("too large"),
        ):
            await buffer.update({}, tags={"a": "x" * 2 * LIMIT})
        assert await take_all(buffer) == [0]


def test_texts_count_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialect, "MOST_ROW_BYTES", 100)
    dialect.check_row("a row", ["é" * 50, None, 7])
    for values in (["é" * 51], ["x" * 60, b"x" * 41], [b"x" * 101]):
        with pytest.raises(
            StorageError, match=r"a row takes 10\d B \(10\d bytes\).*at most 100 bytes", check=because("too large")
        ):
            dialect.check_row("a row", values)


async def test_what_a_refresh_drops_is_read_after_it(shared_url: str) -> None:
    """The transaction excludes others, and holds no payloads; a sweep leaves them to the caller."""
    async with build(shared_url) as buffer:
        for number in range(3):
            await buffer.put(group(number), TASK, model_step=0, current_train_step=1)
        dropped: list[StorageItem] = []
        refresh = Refresh(9, {TASK: ExpiryRule(5, None, retryable=False)}, (Status.COMPLETED,), dropped)
        counts, rows = await buffer.storage._write(refresh_staleness, refresh, alone=True)
        assert (counts, [row.payload for row in rows]) == ({TASK: 3}, [None] * 3)
        sweep = partial(sweep_now, before=time.time() + 1)
        await buffer.storage.thread.run(lambda: buffer.storage.engine.write(sweep))
        dropped += await buffer.storage._run(lambda: buffer.storage.encoding.decode_removed(rows))
        assert [(item.item[0].response, item.error) for item in dropped] == [("4", None)] * 3


@pytest.mark.parametrize("limit", [None, 7])
async def test_a_search_lists_a_page_of_uids_at_a_time(
    shared_url: str, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """In insertion order; what is put meanwhile isn't found, and what is found last may have been removed."""
    pages: list[int] = []

    def noted(*arguments: Any) -> tuple[list[tuple[int, int]], int]:
        uids_of_page, last = find_page(*arguments)
        pages.append(len(uids_of_page))
        return uids_of_page, last

    find_page = matching.find_page
    monkeypatch.setattr(backend, "FOUND_AT_ONCE", 3)
    monkeypatch.setattr(matching, "find_page", noted)
    async with build(shared_url) as buffer:
        await fill(buffer, 10)
        uids = [item.uid async for item in buffer.find({}, payloads=False)]
        pages.clear()
        listed_uids = []
        async for item in buffer.find({}, limit=limit):
            listed_uids.append(item.uid)
            if len(listed_uids) == 2:
                await fill(buffer, 2)
                await buffer.delete({"uid": uids[5]})
        assert listed_uids == [uid for uid in uids if uid != uids[5]][:limit]
    assert pages == ([3, 3, 3, 0] if limit is None else [3, 3, 1])
