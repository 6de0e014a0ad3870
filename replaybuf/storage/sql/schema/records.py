"""What was done, by whom and when: tables beside those of `tables`, for people who look into a run.

    rb_batch     a row for each draw: who drew, for which train step, and what (`members`)
    rb_worker    a row for each process that puts or draws under a name, with the last sign of life
    rb_activity  what each of them did, in periods of `ACTIVITY_SECONDS`
    rb_waiter    who waits at this moment, for what, and why it isn't there
    rb_event     what happens seldom: leases that lapse, groups that are set aside, restores, ...
    rb_history   the tallies of each buffer once a minute, for plots

Batches are written in the transaction of their draw, and most events in that of what they tell of. Workers, activity,
waiters and history are written every few seconds by whom they are about: a killed process leaves its last ones behind,
with the time when it was last seen. All of them are bounded: the background task removes old rows.

`members` has an array for each group, in the order of the draw: uid, lane, worker, reward, staleness, oldest model
step, time of the put. `lease` is the token, NULL for draws for good; `settled` counts the groups that were consumed:
all of them at once, or those that the lease has acknowledged. `epoch` is the number of restores before it, `first_uid`
and `last_uid` are the lowest and the highest uid. Batches are looked up by step and by lease; the last ones have the
highest ids. Each further index would add a page to the write of every draw.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, Table, Text, UniqueConstraint

from replaybuf.storage.sql.schema.tables import Id, Json, Name, Number, partial_index
from replaybuf.storage.sql.schema.tables import metadata as metadata

#: The length of a period of `rb_activity`, and of `rb_history`.
ACTIVITY_SECONDS = 300
HISTORY_SECONDS = 60

batch = Table(
    "rb_batch",
    metadata,
    Column("id", Id, primary_key=True),
    Column("buffer", Name, nullable=False),
    Column("taken_at", Number, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("step", BigInteger),
    Column("status", Name, nullable=False),
    Column("worker", Name),
    Column("lease", BigInteger),
    Column("groups", Integer, nullable=False),
    Column("settled", Integer, nullable=False),
    Column("reward", Number),
    Column("min_reward", Number),
    Column("max_reward", Number),
    Column("staleness", Number),
    Column("max_staleness", BigInteger),
    Column("oldest_step", BigInteger),
    Column("newest_step", BigInteger),
    Column("first_uid", BigInteger, nullable=False),
    Column("last_uid", BigInteger, nullable=False),
    Column("members", Json, nullable=False),
)

worker = Table(
    "rb_worker",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("buffer", Name, nullable=False),
    Column("name", Name, nullable=False),
    Column("host", Name, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("started_at", Number, nullable=False),
    Column("seen_at", Number, nullable=False),
    Column("ended_at", Number),
    UniqueConstraint("buffer", "name", "host", "pid", name="rb_worker_of_process"),
    sqlite_autoincrement=True,
)

activity = Table(
    "rb_activity",
    metadata,
    Column("worker_id", Integer, primary_key=True, autoincrement=False),
    Column("since", BigInteger, primary_key=True, autoincrement=False),
    Column("groups", BigInteger, nullable=False),
    Column("rollouts", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("failures", BigInteger, nullable=False),
    Column("taken", BigInteger, nullable=False),
)

waiter = Table(
    "rb_waiter",
    metadata,
    Column("worker_id", Integer, primary_key=True, autoincrement=False),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", Name, nullable=False),
    Column("wants", Json, nullable=False),
    Column("status", Name),
    Column("query", Text),
    Column("since", Number, nullable=False),
    Column("deadline", Number),
    Column("seen_at", Number, nullable=False),
    Column("limits", Json, nullable=False),
    Column("reason", Text, nullable=False),
)

event = Table(
    "rb_event",
    metadata,
    Column("id", Id, primary_key=True),
    Column("buffer", Name, nullable=False),
    Column("happened_at", Number, nullable=False),
    Column("kind", Name, nullable=False),
    Column("task_name", Name),
    Column("worker", Name),
    Column("step", BigInteger),
    Column("groups", BigInteger, nullable=False),
    Column("uids", Json),
    Column("detail", Text),
    sqlite_autoincrement=True,
)

history = Table(
    "rb_history",
    metadata,
    Column("buffer", Name, primary_key=True),
    Column("since", BigInteger, primary_key=True, autoincrement=False),
    Column("data", Json, nullable=False),
)

Index("rb_batch_by_step", batch.c.step, batch.c.buffer)  # people seldom name the buffer
partial_index("rb_batch_by_lease", batch.c.lease, where=batch.c.lease.is_not(None))
Index("rb_event_by_time", event.c.buffer, event.c.happened_at)
