"""Databases with very many small groups.

A seed of groups goes through `put`; the others are copies of their rows with new uids, made by SQL, because a million
puts would take minutes and leave the same rows. Model steps 0 to 99 are spread evenly, so that each refresh to the next
train step, with a threshold of 100, expires one group in a hundred.
"""

from __future__ import annotations

import contextlib
from typing import Any

from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from benchmarks import groups
from benchmarks.databases import TASK, engine_of, open_buffer, put_all
from replaybuf.storage.sql.schema.tables import group as group_table
from replaybuf.storage.sql.schema.tables import payload as payload_table

SEED = 10_000
THRESHOLD = groups.TRAIN_STEP


async def fill_many(url: str, count: int, seed: int = SEED) -> None:
    """Put `count` small groups (a multiple of the seed) and refresh them once, as a run does at every step."""
    async with open_buffer(url) as buffer:
        for step in range(100):
            await put_all(buffer, [groups.small() for _ in range(seed // 100)], model_step=step)
        if count > seed:
            await multiply(buffer, seed, count)
        await refresh(buffer, groups.TRAIN_STEP)
        if (stored_count := await buffer.count(TASK, "completed")) != count:
            raise RuntimeError(f"{stored_count} groups where {count} should be")


async def refresh(buffer: Any, step: int) -> int:
    """Refresh to a train step. Return the number of expired groups."""
    counts = await buffer.refresh_staleness(task_stale_thresholds={TASK: THRESHOLD}, current_train_step=step)
    return int(counts[TASK])


async def multiply(buffer: Any, seed: int, count: int) -> None:
    """Copy the rows of the first `seed` groups until there are `count`, a multiple of it."""
    await buffer.storage.thread.run(lambda: _copy(engine_of(buffer), seed, count))


async def _copy(engine: Any, seed: int, count: int) -> None:
    async with engine.connect() as connection:
        first = (await connection.execute(text("SELECT min(uid) FROM rb_group"))).scalar_one()
        for table in (group_table, payload_table):
            columns = ", ".join(column.name for column in table.columns if column.name != "uid")
            copy = text(
                f"INSERT INTO {table.name} (uid, {columns}) "  # noqa: S608
                f"SELECT uid + :offset, {columns} FROM {table.name} "
                f"WHERE uid >= {first} AND uid < {first + seed} ORDER BY uid"
            )
            for offset in range(seed, count, seed):
                await connection.execute(copy, {"offset": offset})
        await connection.execute(text(f"UPDATE rb_tally SET amount = amount * {count // seed}"))  # noqa: S608
        if engine.dialect.name == "postgresql":
            await connection.execute(text("SELECT setval('rb_uid', (SELECT max(uid) FROM rb_group))"))
        else:
            await connection.execute(
                text("UPDATE rb_info SET number = (SELECT max(uid) FROM rb_group) WHERE name = 'uid'")
            )
        await connection.commit()
    await _settle(engine)


async def _settle(engine: Any) -> None:
    """Have the database write what it has put off, as it would have in the hours of so many puts.

    Otherwise the first commit that is measured copies gigabytes of log back.
    """
    async with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            with contextlib.suppress(ProgrammingError):  # only some users may
                await connection.execute(text("CHECKPOINT"))
        else:
            await connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))
