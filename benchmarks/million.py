"""Databases with very many small groups.

A seed of groups goes through `put`; the others are copies of their rows with new uids, made by SQL, because a million
puts would take minutes and leave the same rows. Model steps 0 to 99 are spread evenly, so that each refresh to the next
train step, with a threshold of 100, expires one group in a hundred.
"""

from __future__ import annotations

import contextlib
from typing import Any

from asyncpg import InsufficientPrivilegeError

from benchmarks import groups
from benchmarks.databases import TASK, execute_alone, open_buffer, put_all
from replaybuf.storage.sql.engine.transaction import Transaction
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
        if (found := await buffer.count(TASK, "completed")) != count:
            raise RuntimeError(f"{found} groups where {count} should be")


async def refresh(buffer: Any, step: int) -> int:
    """Refresh to a train step. Return the number of expired groups."""
    counts = await buffer.refresh_staleness(task_stale_thresholds={TASK: THRESHOLD}, current_train_step=step)
    return int(counts[TASK])


async def multiply(buffer: Any, seed: int, count: int) -> None:
    """Copy the rows of the first `seed` groups until there are `count`, a multiple of it."""
    state = buffer.storage

    def copy(tx: Transaction) -> None:
        first = tx.value("SELECT min(uid) FROM rb_group")
        for table in (group_table, payload_table):
            columns = ", ".join(column.name for column in table.columns if column.name != "uid")
            copied = (
                f"INSERT INTO {table.name} (uid, {columns}) SELECT uid + :offset, {columns} FROM {table.name} "  # noqa: S608
                f"WHERE uid >= {first} AND uid < {first + seed} ORDER BY uid"
            )
            for offset in range(seed, count, seed):
                tx.change(copied, offset=offset)
        tx.change(f"UPDATE rb_tally SET amount = amount * {count // seed}")  # noqa: S608
        tx.tuples("{set_last_uid:last}", last=tx.value("SELECT max(uid) FROM rb_group"))

    await state.thread.run(lambda: state.engine.write(copy))
    # What the database puts off would else be part of the first commit that is measured: gigabytes of log.
    with contextlib.suppress(InsufficientPrivilegeError):  # only some users may
        remote = state.engine.dialect.is_remote
        await execute_alone(buffer, "CHECKPOINT" if remote else "PRAGMA wal_checkpoint(TRUNCATE)")
