"""Tables of a run's history, beside those of `tables`: draws, workers, activity, waits and events, for people.

    rb_batch     a row for each draw: its worker, its train step, and figures of its groups
    rb_worker    a row for each worker name of a process that has the buffer open: its last heartbeat, its activity and
                 its current waits
    rb_event     rare events: lapsed leases, groups set aside, restores, ...
    rb_history   the tallies of each buffer once a minute, for plots

Batches are written in the transaction of their draw, and most events in the transaction that they are about. Workers
and history are written every few seconds by their own process: a killed process leaves its last rows behind, with its
last heartbeat. All are bounded: the background task removes old rows.

The `activity` of a worker has its counts since the buffer was opened, and `marks`: for each period of
`ACTIVITY_SECONDS` of the last hour in which it sent a heartbeat, the same counts, in order, at the last one; `limits`
are those in force for it, and `draws` says whether it draws. Its `waits` are those at its last heartbeat. The `id` is
random.

The groups of a batch are in `rb_past`, as its `draw`. `lease` is the token, NULL for draws without a lease; `settled`
counts consumed groups: all at once, or those acknowledged for the lease. `epoch` is the number of restores before it,
`first_uid` and `last_uid` are the lowest and the highest uid. Batches are looked up by step and by lease; the latest
ones have the highest ids. Each further index would add a page to the write of every draw.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, Table, Text

from replaybuf.storage.sql.schema.tables import Id, Json, Name, Number, partial_index
from replaybuf.storage.sql.schema.tables import metadata as metadata

#: The periods of the marks of workers and of `rb_history`, in seconds.
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
)

worker = Table(
    "rb_worker",
    metadata,
    Column("buffer", Name, primary_key=True),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("name", Name, nullable=False),
    Column("host", Name, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("machine", Name),
    Column("started_at", Number, nullable=False),
    Column("seen_at", Number, nullable=False),
    Column("ended_at", Number),
    Column("activity", Json, nullable=False),
    Column("waits", Json, nullable=False),
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
