"""The first draw of a random policy from groups that were put under another one: their keys are set in short pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from replaybuf import ReplayBuffer
from replaybuf.rules.policies import PRIORITIZED, UNIFORM, Clock, draw_keys, weight_of
from replaybuf.storage.sql.statements import ordering
from tests.stores import TASK, build, fill, group, take_all

GROUPS, PIECE = 60, 7
_KEYS = f"""
SELECT coalesce(ticket, uid) AS ticket, priority, {UNIFORM}, {PRIORITIZED} FROM rb_group
"""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "_PIECE", PIECE)


def between_pieces(monkeypatch: pytest.MonkeyPatch, buffer: ReplayBuffer, act: Callable[[], Awaitable[Any]]) -> None:
    """Call `act` in the loop of the test, and wait for it, after the first pieces of the buffer's next draw."""
    transactions, loop = buffer.storage.transactions, asyncio.get_running_loop()
    write, pieces = transactions.write, 0

    async def writing(function: Any, **options: Any) -> Any:
        nonlocal pieces
        result = await write(function, **options)
        pieces += getattr(function, "func", None) is ordering.prepare_groups
        if pieces == 3:
            pieces += 1
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(act(), loop))  # type: ignore[arg-type]
        return result

    monkeypatch.setattr(transactions, "write", writing)


async def rows(buffer: ReplayBuffer) -> list[Any]:
    return list(await buffer.storage._run(lambda: buffer.storage.transactions.read(lambda tx: tx.table(_KEYS)[1])))


@pytest.mark.parametrize(("policy", "race"), [("uniform", UNIFORM), ("prioritized", PRIORITIZED)])
async def test_groups_that_change_between_the_pieces_have_the_keys_of_a_race_begun_at_once(
    shared_url: str, monkeypatch: pytest.MonkeyPatch, policy: str, race: str
) -> None:
    async with build(shared_url) as before:
        await fill(before, GROUPS)
    async with build(shared_url) as holder, build(shared_url, policy=policy, seed=5) as buffer:
        lease = await holder.lease_batch({TASK: 2})
        uids = [item.uid async for item in holder.find({}, limit=PIECE)]

        async def change() -> None:
            assert await buffer.delete({"uid": uids[0]}) == 1
            await buffer.update_priorities({uids[1]: 9.0, uids[2]: 0.0})
            await fill(buffer, 5, first=1000)
            await buffer.adopt(lease.handle).give_back()

        between_pieces(monkeypatch, buffer, change)
        taken = await buffer.get(3, TASK)
        assert len(taken) == 3
        seed = buffer.storage.rules.seed_of(race)
        left = await rows(buffer)
        assert len(left) == GROUPS + 5 - 1 - 3
        column = 2 if race == UNIFORM else 3
        wanted = draw_keys(seed, Clock(), [(row[0], weight_of(race, row[1])) for row in left])
        assert [row[column] for row in left] == wanted


async def test_puts_and_takes_of_others_go_on_between_the_pieces(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with build(shared_url) as other, build(shared_url, policy="uniform") as buffer:
        await fill(other, GROUPS)
        met: list[int] = []

        async def work() -> None:
            met.append(await other.put(group(7777), TASK) or 0)
            met.append(len(await other.get(1, TASK)))

        between_pieces(monkeypatch, buffer, work)
        assert len(await buffer.get(10, TASK)) == 10
        assert met[1:] == [1]
        assert len(await take_all(buffer)) == GROUPS + 1 - 1 - 10
