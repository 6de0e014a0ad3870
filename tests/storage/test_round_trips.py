"""What a put and a take send to PostgreSQL, and what becomes of them when what a store knows is no longer true."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from replaybuf import FencedError, FullError, ReplayBuffer
from replaybuf.storage.sql.engine.postgres_dialect import inlined
from replaybuf.storage.sql.tasks.group_commit import GroupCommit
from tests.cancellation.conftest import end_background_work
from tests.faults.proxy import Link, Proxy, proxied
from tests.postgres import ask
from tests.stores import TASK, build, fill, group, numbers_of, take_all


@pytest.fixture
async def proxy(lent_database: str) -> AsyncIterator[Proxy]:
    async with proxied(lent_database) as proxy:
        yield proxy


@pytest.mark.parametrize("policy", ["fifo", "staleness"])
@pytest.mark.parametrize(("operation", "most"), [("put", 3), ("put told what leaves", 3), ("take", 3)])
async def test_a_put_is_three_round_trips_and_a_take_too(proxy: Proxy, policy: str, operation: str, most: int) -> None:
    """Of a store whose connections have prepared the statements."""
    async with build(proxy.url, policy=policy) as buffer:
        await end_background_work(buffer)
        trips = [await messages(proxy, buffer, operation) for _ in range(8)]
    assert trips[-1] == most


async def test_a_put_that_may_have_to_wait_for_room_locks_its_task_for_two_round_trips(proxy: Proxy) -> None:
    """BEGIN, the lock, the put that counts, COMMIT: others who put into this task wait from the second on."""
    async with build(proxy.url, capacity=8, on_full="reject") as buffer:
        await end_background_work(buffer)
        trips = [await messages(proxy, buffer, "put") for _ in range(8)]
        assert trips[-1] == 4
        with pytest.raises(FullError):
            await put(buffer, 9)
        assert len(await take_all(buffer)) == 8
        assert await put(buffer, 9) == 9  # what was refused has taken no uid, on which draws with a seed depend


async def messages(proxy: Proxy, buffer: ReplayBuffer, operation: str) -> int:
    """How many messages the transaction of an operation sends; each is answered before the next."""
    sent_by_link: dict[Link, list[bytes]] = {}

    async def note(link: Link, data: bytes) -> bool:
        sent_by_link.setdefault(link, []).append(data)
        return True

    if operation == "take":
        await put(buffer, 1)
    proxy.fault = note
    options: dict[str, Any] = {"dropped": []} if operation == "put told what leaves" else {}
    await (buffer.get(1, TASK) if operation == "take" else put(buffer, 1, **options))
    proxy.fault = None
    return max(len(of_link) for of_link in sent_by_link.values() if any(b"BEGIN" in message for message in of_link))


async def put(buffer: ReplayBuffer, number: int, step: int = 5, **options: Any) -> int:
    return await buffer.put(group(number), TASK, model_step=4, current_train_step=step, **options)


async def test_large_puts_are_under_way_together_in_the_order_of_their_calls(
    lent_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []
    started = 0
    commit = GroupCommit._commit_batch

    async def commit_and_count(commits: GroupCommit, *arguments: Any) -> None:
        nonlocal started
        started += 1
        together.append(started)
        try:
            await commit(commits, *arguments)
        finally:
            started -= 1

    monkeypatch.setattr(GroupCommit, "_commit_batch", commit_and_count)
    async with build(lent_database) as buffer:
        await fill(buffer, 1)
        large = [group(number, text="x" * 200_000) for number in range(1, 61)]
        uids = await asyncio.gather(*(buffer.put(rollouts, TASK) for rollouts in large))
        assert uids == sorted(uids)
        assert await take_all(buffer) == list(range(61))
    assert max(together) > 1


async def test_no_text_ends_the_literal_in_which_it_is_sent(lent_database: str) -> None:
    chance = random.Random(1)
    texts = ["".join(chance.choices("$_$_$_a\\'\"{},; \n", k=chance.randrange(9))) for _ in range(500)]
    sql = "SELECT CAST($1 AS text), CAST($2 AS text[]), CAST($3 AS bytea), CAST($4 AS float8[]), CAST($5 AS bigint[])"
    connection = await asyncpg.connect(lent_database)
    for text in texts:
        lists = [*chance.sample(texts, 2), None, text], [0.1, 5e-324, -math.inf], [2**63 - 1, None]
        values = text, lists[0], text.encode(), *lists[1:]
        assert tuple(await connection.fetchrow(inlined(sql, values))) == values
    await connection.close()


@pytest.mark.parametrize("policy", ["fifo", "staleness"])
async def test_what_another_process_changed_is_noticed(lent_database: str, policy: str) -> None:
    """A refresh, a new lane, pinned groups, a restore."""
    async with build(lent_database, policy=policy) as buffer, build(lent_database, policy=policy) as other:
        for number in range(3):
            await put(buffer, number)
        assert numbers_of(await buffer.get(1, TASK)) == [0]
        await other.refresh_staleness(task_stale_thresholds={TASK: 100}, current_train_step=8)
        await put(buffer, 3, step=8)
        await other.put(group(4), TASK)  # of no step: pinned
        staleness_of = {item.uid: item.staleness async for item in buffer.find({})}
        assert sorted(staleness_of.values()) == [0, 3, 3, 3]
        assert numbers_of(await buffer.get(4, TASK)) == [1, 2, 3, 4]
        await put(other, 5, step=8)
        await other.checkpoint(8)
        await put(other, 6, step=8)
        await other.restore(8)
        for late_call in (put(buffer, 7), buffer.get(1, TASK)):
            with pytest.raises(FencedError):
                await late_call
        uid = await put(other, 8, step=8)
        assert uid == 8  # the put that was fenced off has taken none
        assert await shifted(lent_database) == [uid]
        assert numbers_of(await other.get(2, TASK)) == [5, 8]


async def shifted(url: str) -> list[int]:
    """The groups that have the ticket that they would have had without the restore."""
    return await ask(url, "SELECT uid FROM rb_group, rb_buffer WHERE ticket_shift > 0 AND ticket = uid - ticket_shift")
