"""The counts of PostgreSQL's connections: each adds to its own shard."""

from __future__ import annotations

import asyncio

import asyncpg

from replaybuf.storage.sql.statements.counts import merge_shards
from tests.stores import TASK, build, group

_SIZES = "SELECT shard, sum(amount)::int FROM rb_tally WHERE name = 'size' GROUP BY shard"
_LEFT = "SELECT count(DISTINCT shard) FROM rb_tally WHERE shard NOT IN (SELECT pid FROM pg_stat_activity)"


async def test_shards_of_connections_that_are_gone_are_merged_and_others_stay(lent_database: str) -> None:
    """Who adds to the row of a shard would wait for a merge of it."""
    connection = await asyncpg.connect(lent_database)
    async with build(lent_database) as buffer:
        await buffer.put(group(0), TASK)
        for number in (1, 2):
            async with build(lent_database) as other:
                await other.put(group(number), TASK)
        # A server's process ends after the connection.
        while await connection.fetchval(_LEFT) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        alive = {shard for shard, _ in await connection.fetch(_SIZES)} & {
            pid for (pid,) in await connection.fetch("SELECT pid FROM pg_stat_activity")
        }
        storage = buffer.storage
        for _ in range(2):
            await storage.thread.run(lambda: storage.engine.write(merge_shards, fenced=False))
        sizes = dict(map(tuple, await connection.fetch(_SIZES)))
        assert sizes == {0: 2, **dict.fromkeys(alive, 1)}
        assert len(alive) == 1
        assert len(buffer) == 3
    await connection.close()
