"""Laws of `put(replaces=)`: groups that leave in the transaction in which another one comes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import ConflictError, InputError, RolloutError
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import Harness, fill, found, group, ids, total


class ReplacingLaws(Harness):
    """The groups that a put replaces leave, or the put doesn't happen."""

    async def test_a_put_replaces_what_it_names(self, buffer: ReplayBuffer) -> None:
        """Groups of any task and status; the new one comes last."""
        [first, second, third] = await fill(buffer, 3)
        aborted = await buffer.put(group(8, status=Status.ABORTED), "code")
        assert aborted is not None
        uid = await buffer.put(group(9), "math", replaces=[first, aborted])
        assert [item.uid for item in await found(buffer)] == [second, third, uid]
        assert (await total(buffer, "replaced"), await total(buffer, "replaced", "code")) == (1, 1)

    async def test_a_missing_group_is_a_conflict(self, buffer: ReplayBuffer) -> None:
        """ConflictError names it, nothing is stored and nothing leaves."""
        uids = await fill(buffer, 2)
        await buffer.delete({"uid": uids[0]})
        with pytest.raises(ConflictError, match=f"group {uids[0]}"):
            await buffer.put(group(9), "math", replaces=[uids[1], uids[0]], key="a")
        assert [item.uid for item in await found(buffer)] == uids[1:]
        assert (await total(buffer, "put"), await total(buffer, "replaced")) == (2, 0)

    async def test_a_group_is_replaced_once(self, buffer: ReplayBuffer) -> None:
        """Of several puts at once that replace the same group, one is stored."""
        uids = await fill(buffer, 1)
        puts = [buffer.put(group(number), "math", replaces=uids) for number in range(5)]
        results = await asyncio.gather(*puts, return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["ConflictError"] * 4 + ["int"]
        assert [item.uid for item in await found(buffer)] == [uid for uid in results if isinstance(uid, int)]

    async def test_puts_at_once_replace_each_their_own(self, buffer: ReplayBuffer) -> None:
        """One that can't be stored leaves the others alone; the groups that it names stay."""
        uids = await fill(buffer, 8)
        await buffer.delete({"uid": uids[3]})
        puts = [buffer.put(group(10 + n), "math", replaces=uids[2 * n : 2 * n + 2]) for n in range(4)]
        results = await asyncio.gather(*puts, buffer.put(group(20), "math"), return_exceptions=True)
        assert [type(result).__name__ for result in results] == ["int", "ConflictError", "int", "int", "int"]
        assert [item.item[0].rollout_id for item in await found(buffer)] == [2, 10, 12, 13, 20]
        assert await total(buffer, "replaced") == 6

    async def test_a_group_goes_to_a_taker_or_is_replaced(self, buffer: ReplayBuffer) -> None:
        """Never both, in whichever order."""
        for number in range(10):
            uids = await fill(buffer, 1, first=number)
            taken, put = await asyncio.gather(
                buffer.get(1, "math", where={"uid": uids[0]}),
                buffer.put(group(100), "code", replaces=uids),
                return_exceptions=True,
            )
            assert isinstance(put, int) == (taken == [])
            assert isinstance(put, ConflictError) == (len(taken) == 1)

    async def test_a_put_that_fails_replaces_nothing(self, buffer: ReplayBuffer) -> None:
        """Values that can't be stored, and invalid uids."""
        uids = await fill(buffer, 1)
        with pytest.raises(RolloutError):
            await buffer.put(group(9, extra_fields={"x": object()}), "math", replaces=uids)
        wrong: list[Any] = [[-1], ["1"], [1.5], [True], "1", 1, [None], [2**63]]
        for replaces in wrong:
            with pytest.raises(InputError, match="replaces"):
                await buffer.put(group(9), "math", replaces=replaces)
        assert [item.uid for item in await found(buffer)] == uids

    async def test_a_key_and_uids_go_together(self, buffer: ReplayBuffer) -> None:
        """The group of the same key leaves too, and may be named as well."""
        first = await buffer.put(group(1), "math", key="a")
        assert first is not None
        uids = await fill(buffer, 2, first=2)
        await buffer.put(group(9), "math", key="a", replaces=[first, uids[0], uids[0]])
        assert ids(await buffer.get(9, "math")) == [3, 9]
        assert await total(buffer, "replaced") == 2
