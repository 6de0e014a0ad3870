"""A buffer has one random order: the first draw gives keys to groups that lack them, and another order is refused."""

from __future__ import annotations

import pytest

from replaybuf import ConfigError
from replaybuf.rules.policies import PRIORITIZED, UNIFORM, Race
from replaybuf.storage.sql.statements import ordering
from tests.stores import TASK, build, fill, take_all

GROUPS = 60
_KEYS = "SELECT coalesce(ticket, uid) AS ticket, priority, random_key FROM rb_group ORDER BY uid"


@pytest.mark.parametrize(("policy", "key"), [("uniform", UNIFORM), ("prioritized", PRIORITIZED)])
async def test_the_first_random_draw_gives_keys_to_groups_of_another_config(
    shared_url: str, monkeypatch: pytest.MonkeyPatch, policy: str, key: str
) -> None:
    """All of them are drawn as if they had had their keys from the put on, and so are leased groups that come back."""
    monkeypatch.setattr(ordering, "_CHUNK", 7)
    async with build(shared_url) as holder, build(shared_url, policy=policy, seed=5) as buffer:
        await fill(holder, GROUPS)
        lease = await holder.lease_batch({TASK: 2})
        assert len(await buffer.get(3, TASK)) == 3
        await lease.give_back()
        await fill(holder, 5, first=1000)
        transactions = buffer.storage.transactions
        left = await buffer.storage._run(lambda: transactions.read(lambda tx: tx.table(_KEYS)[1]))
        assert len(left) == GROUPS + 5 - 3
        begun = Race(key, 5).draw_keys([(row[0], row[1]) for row in left])
        same = sum(row[2] == wanted for row, wanted in zip(left, begun, strict=True))
        assert same == GROUPS - 3 - 2  # the others came in at a later time of the race
        assert len(await take_all(buffer)) == GROUPS + 5 - 3


@pytest.mark.parametrize("options", [{"policy": "prioritized", "seed": 5}, {"policy": "uniform", "seed": 6}])
async def test_another_random_policy_or_seed_is_refused(shared_url: str, options: dict[str, object]) -> None:
    """With a sentence that names both; without a seed the buffer's is used, and other orders are each caller's."""
    async with build(shared_url, policy="uniform", seed=5) as first:
        await fill(first, 3)
        assert len(await first.get(1, TASK)) == 1
        async with build(shared_url, **options) as other:
            with pytest.raises(ConfigError, match="uniform_key with the seed 5"):
                await other.get(1, TASK)
        for policy in ("uniform", "lifo"):
            async with build(shared_url, policy=policy) as other:
                assert len(await other.get(1, TASK)) == 1


def test_two_random_orders_in_one_config_are_refused() -> None:
    with pytest.raises(ConfigError, match="one random order"):
        build("sqlite://", policy="uniform", remover="prioritized")
