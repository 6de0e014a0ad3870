"""Writes a database with the replaybuf that is imported: `python write.py URL`, in a checkout of its time.

The files beside this one were written so, by the last commit of each schema, and dumped: those for SQLite by `sqlite3
run.db .dump`, those for PostgreSQL by `pg_dump --inserts --no-owner --no-privileges`.

    0002  dbc2ec5    0003  f97a74b    0004  a1b5d49    0005  9fe4c96    0006  e65340a    0007  f2a1a1b
"""

import asyncio
import inspect
import os
import sys

from replaybuf import ReplayBufferConfig, RolloutState, Status


def group(number, count=2, status=Status.COMPLETED):
    return [
        RolloutState(
            rollout_id=number,
            message=[{"role": "user", "content": f"{number}+5="}],
            response=str(number + 5 + wrong),
            response_ids=[number, 5 + wrong],
            reward=1.0 - wrong,
            status=status,
        )
        for wrong in range(count)
    ]


async def main(url):
    known = ReplayBufferConfig.model_fields
    options = {"url": url, "policy": "staleness", "max_times_sampled": 2, "archive": 10}
    async with ReplayBufferConfig(**{name: one for name, one in options.items() if name in known}).build() as buffer:
        for number in range(1, 7):
            more = {"key": f"prompt é{number}", "tags": {"level": number}}
            taken = inspect.signature(buffer.put).parameters
            await buffer.put(
                group(number),
                "math" if number % 2 else "code",
                model_step=number,
                current_train_step=7,
                **{name: one for name, one in more.items() if name in taken},
            )
        await buffer.put(group(7, status=Status.FILTERED), "math")
        await buffer.refresh_staleness(task_stale_thresholds={"math": 6, "code": 6}, current_train_step=8)
        if hasattr(buffer, "checkpoint"):
            await buffer.checkpoint(8)
        if "max_times_sampled" in known:
            await buffer.sample({"math": 1})
        await buffer.get(1, "code")
        if hasattr(buffer, "lease_batch"):
            async with buffer.lease_batch({"code": 1}):
                os._exit(0)  # killed: the lease stays, and lapses


asyncio.run(main(sys.argv[1]))
