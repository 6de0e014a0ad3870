"""Draws of groups that can't be given to anyone, also while others change the store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import select, update

from replaybuf.errors import DecodeError
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import payload
from replaybuf.storage.sql.statements.checkpoints import Undone, undo_draw
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.values import StorageItem
from tests.contract.tallying import conserved
from tests.stores import TASK, build, group, numbers_of


@pytest.mark.parametrize("times", [1, 2])
async def test_a_group_that_is_replaced_before_it_can_be_set_aside_is_counted_once(
    shared_url: str, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """As REPLACED: it isn't there to be set aside, and the newer one is drawn."""
    decode, drawn = GroupRow.decode, []

    async def put_again() -> None:
        async with build(shared_url, max_times_sampled=times) as other:
            await other.put(group(2), TASK, key="a")

    def decode_later(row: GroupRow, codec: Any, deferral: Any = None) -> StorageItem:
        drawn.append(row.uid)
        if len(drawn) > 1:
            return decode(row, codec, deferral)
        asyncio.run(put_again())
        raise DecodeError("another rollout type")

    async with build(shared_url, max_times_sampled=times) as buffer:
        await buffer.put(group(1), TASK, key="a")
        monkeypatch.setattr(GroupRow, "decode", decode_later)
        assert numbers_of(await buffer.get(1, TASK)) == [2]
        await conserved(buffer.storage)
        totals = (await buffer.metrics())["tasks"][TASK]
    assert (totals["replaced"], totals["set_aside"], totals["put"]) == (1, 0, 2)


async def test_a_draw_of_very_many_groups_is_undone_in_a_checkpoint(shared_url: str) -> None:
    """More than a statement may have parameters."""
    async with build(shared_url) as buffer:
        uid = await buffer.put(group(1), TASK)
        await buffer.checkpoint(1)
        drawn = dict.fromkeys(range(uid, uid + 300_000), 7)
        [made] = await buffer.checkpoints()
        await buffer.storage._write(lambda tx: undo_draw(tx, Undone.now(tx, 0, drawn, {})))
        assert await buffer.checkpoints() == [made]
        await buffer.restore(1)
        assert numbers_of(await buffer.get(1, TASK)) == [1]


async def test_a_payload_that_could_be_decoded_but_is_not_what_was_stored_is_set_aside(shared_url: str) -> None:
    """A bit of a text has flipped: only the checksum tells."""

    def flip(tx: Transaction) -> None:
        data = bytearray(tx.execute(select(payload.c.data).where(payload.c.uid == 2)).scalar_one())
        data[-1] ^= 1
        tx.execute(update(payload).where(payload.c.uid == 2).values(data=bytes(data)))

    async with build(shared_url, rollout_type=dict) as buffer:
        for number in range(3):
            await buffer.put([{"rollout_id": number, "text": "4"}], TASK)
        state = buffer.storage
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(state.engine.write(flip), state.thread.loop))
        assert [rollouts[0]["rollout_id"] for rollouts in await buffer.get(3, TASK)] == [0, 2]
        assert await buffer.count(TASK, "failed") == 1
