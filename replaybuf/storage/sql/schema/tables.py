"""The schema, defined once. The alembic chain in `migrations` must produce exactly this, on both databases.

Payloads are immutable and separate; only narrow metadata changes:

    rb_lane     a task's groups of one status in one buffer, the train step of their last staleness refresh, and the
                race of random draws (`replaybuf.rules.policies`); leased groups have lanes of their own
    rb_group    a narrow row per group: its lane, staleness, priority, tags, rollout metadata, sampling key, lease
    rb_payload  one wide row per group, written once: the encoded rollouts, their index and previews for SQL
    rb_file     files or objects with the arrays of payloads that are kept apart (`replaybuf.storage.places`)
    rb_place    the folders and object stores of these files
    rb_past     versions of groups that left, or were changed: of checkpoints, of draws, or waiting to be swept
    rb_tally    the tallies of each lane, as a sum over shards: one per connection, to avoid lock contention
    rb_buffer   a row for each buffer that was ever restored or resumed: its epoch, which fences off earlier users
    rb_cursor   the dataset positions of prompt ledgers: now (checkpoint 0), and at each checkpoint
    rb_prompt   the states of prompts in datasets that are read in an order by difficulty (`statements.ledger`)
    rb_checkpoint  a row for each step checkpoint, with its lanes and their tallies
    rb_info     facts about the store, such as the policy that a snapshot was written under, or a host's boot time
                (`sqlite_dialect`), and counters (SQLite: the last uid; PostgreSQL: each connection's commit stamp)

The history of a run, for people:

    rb_batch     a row for each draw: its worker, its train step, and figures of its groups
    rb_annotation  what a trainer has written about a draw's groups: a row for each group and name
    rb_worker    a row for each worker name of a process that has the buffer open: its last heartbeat, its activity and
                 its current waits
    rb_event     rare events: lapsed leases, groups set aside, restores, ...
    rb_history   the tallies of each buffer once a minute, for plots

The staleness of a group is `lane.step - oldest_step - 1`, so that a refresh updates the lane's step and not its groups.
Groups with another staleness (given with the put, without model steps, or expired at the last refresh) have it in
`pinned_staleness`; `pinned_step` is the train step for which it was computed, NULL for the rollouts' own.

`ticket` is the group's sampling id, the seed of its random draws, NULL where it is the uid. Uids are never reused, but
groups put after a restore get the tickets that they would have had without it, and so the same chances.

A row of `rb_prompt` has the `epoch` of the prompt's last draw, how many `times` it was generated, the number of these
`rollouts` with a reward, the sums of their rewards and of the `squares`, and the mean of the `last` group.

`file` has the tail of a payload, of `size` bytes, NULL if `data` is the whole payload; `data` is then the head, and
ends with the tail's extent in the file (`replaybuf.storage.places.store`).

A file has `bytes`, and `groups` whose payloads name it: 0 when it can be deleted, -1 when it is nobody's
(`statements.files`). A place keeps all its files until `kept_until`.

A version of a group is its row between two changes. `since` is the buffer's newest checkpoint when it began (0: none),
and `until` the newest one when it ended, NULL if no checkpoint has it: a checkpoint has the versions with
`since < id <= until`, and those in `rb_group` with `since < id`. So a checkpoint copies nothing (`statements.past`).

A draw's groups are the versions with its `draw`, an id in `rb_batch` (0: none): the rows that it removed, or copies of
those that stayed. `staleness` is that of the draw. Such a version loses its `removed_at` when it is swept, and is
deleted with its batch.

`last_uid` of a checkpoint is the last uid before it, or 0 once a restore to an earlier one may have brought back groups
that it lacks.

`made_from` holds the uids of the groups that the put of this one named to replace, NULL for none.

`worker` is the worker name of the put, `put_step` its train step, `holder` the worker name of the lease, and
`trained_step` the train step of the group's last draw without a lease, or acknowledgement, that had one. NULL where not
given.

Batches are written in the transaction of their draw, and most events in the transaction that they are about. Workers
and history are written every few seconds by their own process: a killed process leaves its last rows behind, with its
last heartbeat. The background task removes old rows.

The `activity` of a worker has its counts since the buffer was opened, and `marks`: for each period of
`ACTIVITY_SECONDS` of the last hour in which it sent a heartbeat, the same counts, in order, at the last one; `limits`
are those in force for it, `draws` says whether it draws, and `epoch` is that of the buffer as it was opened. Its
`waits` are those at its last heartbeat. The `id` is random.

The groups of a batch are in `rb_past`, as its `draw`. `lease` is the token, NULL for draws without a lease; `settled`
counts consumed groups: all at once, or those acknowledged for the lease. `epoch` is the number of restores before it,
`first_uid` and `last_uid` are the lowest and the highest uid. Batches are looked up by step and by lease; the latest
ones have the highest ids. Each further index would add a page to the write of every draw.

The `rows` of an annotation are those of the view, as lists of its columns from `position` on; `data` has the arrays of
all rows, as little-endian float32, one after the other. Annotations are deleted with their batch.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Sequence,
    String,
    Table,
    Text,
    TextClause,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import DOUBLE_PRECISION, JSONB

metadata = MetaData()

Name = Text().with_variant(String(collation="C"), "postgresql")
Number = Float().with_variant(DOUBLE_PRECISION(), "postgresql")
Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
Id = BigInteger().with_variant(Integer(), "sqlite")

uid_sequence = Sequence("rb_uid", metadata=metadata)

# The `info` of a table has its storage parameters on PostgreSQL.

lane = Table(
    "rb_lane",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("buffer", Name, nullable=False),
    Column("task_name", Name, nullable=False),
    Column("status", Name, nullable=False),
    Column("leased", Boolean, nullable=False),
    Column("step", BigInteger),
    Column("race", Name),
    Column("seed", Name),
    Column("clock", Number),
    Column("idle_clock", Number),
    UniqueConstraint("buffer", "task_name", "status", "leased", name="rb_lane_of_task"),
    info={"fillfactor": "50"},
)

group = Table(
    "rb_group",
    metadata,
    Column("uid", Id, primary_key=True, autoincrement=False),
    Column("lane", Integer, nullable=False),
    Column("oldest_step", BigInteger),
    Column("pinned_staleness", BigInteger),
    Column("pinned_step", BigInteger),
    Column("mixed", Boolean, nullable=False),
    Column("priority", Number, nullable=False),
    Column("times_sampled", Integer, nullable=False),
    Column("created_at", Number, nullable=False),
    Column("reward", Number),
    Column("bytes", BigInteger, nullable=False),
    Column("marks", Json, nullable=False),
    Column("tags", Json),
    Column("scoped_key", Name),
    Column("error", Text),
    Column("random_key", Number),
    Column("deliveries", Integer, nullable=False, server_default=text("0")),
    Column("lease", BigInteger),
    Column("leased_until", Number),
    Column("archived_at", Number),
    Column("ticket", BigInteger),
    Column("made_from", Json),
    Column("worker", Name),
    Column("put_step", BigInteger),
    Column("holder", Name),
    Column("trained_step", BigInteger),
    Column("since", BigInteger, nullable=False, server_default=text("0")),
    info={"fillfactor": "80", "autovacuum_vacuum_scale_factor": "0.02"},
)

#: The key of a version of a group.
VERSION = ("uid", "since", "draw")

payload = Table(
    "rb_payload",
    metadata,
    Column("uid", Id, primary_key=True, autoincrement=False),
    Column("outline", Json, nullable=False),
    Column("prompt", Text),
    # Before `data`, behind which SQLite would have to read.
    Column("file", BigInteger),
    Column("size", BigInteger),
    Column("data", LargeBinary, nullable=False),
    # A throttled vacuum, as by the server's defaults, frees less than a busy run puts: the database would grow.
    info={
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_vacuum_cost_delay": "0",
        "toast.autovacuum_vacuum_scale_factor": "0.02",
        "toast.autovacuum_vacuum_cost_delay": "0",
    },
)

past = Table(
    "rb_past",
    metadata,
    *(
        Column(
            column.name, column.type, nullable=column.nullable, primary_key=column.name in VERSION, autoincrement=False
        )
        for column in group.columns
    ),
    Column("draw", Id, primary_key=True, autoincrement=False, server_default=text("0")),
    Column("staleness", BigInteger),
    Column("until", BigInteger),
    Column("removed_at", Number),
    sqlite_with_rowid=False,
    info={"autovacuum_vacuum_scale_factor": "0.02"},
)

tally = Table(
    "rb_tally",
    metadata,
    Column("lane", Integer, primary_key=True, autoincrement=False),
    Column("name", Name, primary_key=True),
    Column("shard", Integer, primary_key=True, autoincrement=False),
    Column("amount", BigInteger, nullable=False),
    info={"fillfactor": "50", "autovacuum_vacuum_threshold": "1000"},
)

buffer = Table(
    "rb_buffer",
    metadata,
    Column("name", Name, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("ticket_shift", BigInteger, nullable=False),
    Column("restored_step", BigInteger),
    Column("restored_at", Number),
)

cursor = Table(
    "rb_cursor",
    metadata,
    Column("buffer", Name, primary_key=True),
    Column("name", Name, primary_key=True),
    Column("checkpoint", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("value", LargeBinary, nullable=False),
)

prompt = Table(
    "rb_prompt",
    metadata,
    Column("buffer", Name, primary_key=True),
    Column("name", Name, primary_key=True),
    Column("item", BigInteger, primary_key=True, autoincrement=False),
    Column("since", BigInteger, primary_key=True, autoincrement=False),
    Column("changed", BigInteger, nullable=False),
    Column("epoch", BigInteger),
    Column("times", BigInteger, nullable=False),
    Column("rollouts", BigInteger, nullable=False),
    Column("reward", Number, nullable=False),
    Column("squares", Number, nullable=False),
    Column("last", Number),
    info={"fillfactor": "80", "autovacuum_vacuum_scale_factor": "0.02"},
)

checkpoint = Table(
    "rb_checkpoint",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("buffer", Name, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("created_at", Number, nullable=False),
    Column("groups", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("next_ticket", BigInteger, nullable=False),
    Column("lanes", Json, nullable=False),
    Column("tallies", Json, nullable=False),
    Column("last_uid", BigInteger, nullable=False),
    sqlite_autoincrement=True,  # a later checkpoint has a higher number, even if the previous one was dropped
)

place = Table(
    "rb_place",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("url", Text, nullable=False),
    Column("kept_until", Number),
    sqlite_autoincrement=True,
)

file = Table(
    "rb_file",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("place", Integer, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("groups", Integer, nullable=False),
    info={"fillfactor": "50"},
)

info = Table(
    "rb_info",
    metadata,
    Column("name", Name, primary_key=True),
    Column("value", Text),
    Column("number", BigInteger),
    info={"fillfactor": "50"},
)
#: The name of the fact with the digest of a snapshot's rows; invalid after an upgrade.
DIGEST = "digest"
#: The name of the fact with the database's unique id, random: it tells leases of different databases apart.
IDENTITY = "identity"

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
    sqlite_autoincrement=True,  # versions of a pruned or undone draw keep its number
)

annotation = Table(
    "rb_annotation",
    metadata,
    Column("draw", Id, primary_key=True, autoincrement=False),
    Column("uid", Id, primary_key=True, autoincrement=False),
    Column("name", Name, primary_key=True),
    Column("rows", Json, nullable=False),
    Column("data", LargeBinary),
    sqlite_with_rowid=False,
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

#: Pinned groups to be processed by the next refresh of their lane, as text of SQL. (Groups without model steps have
#: staleness 0 for good once they are refreshed.)
UNSETTLED = "pinned_staleness IS NOT NULL AND (oldest_step IS NOT NULL OR pinned_step IS NULL)"
#: Groups with rollouts that expire at the next refresh (`Marks.due`), as text of SQL.
DUE = """CAST(marks AS text) LIKE '%"due"%'"""


def partial_index(
    name: str, *columns: ColumnElement[object], where: ColumnElement[bool] | TextClause, unique: bool = False
) -> Index:
    """Return an index of the rows that meet a condition."""
    return Index(name, *columns, unique=unique, sqlite_where=where, postgresql_where=where)


Index("rb_group_in_order", group.c.lane, group.c.uid)
#: The order of staleness: by the oldest model step; then groups without one, by the staleness that they were put with.
#: As text of SQL. Steps are below NO_STEP.
STEP_ORDER = "coalesce(oldest_step, 9000000000000000000 - coalesce(pinned_staleness, 0))"
NO_STEP = 8 * 10**18
Index("rb_group_by_step", group.c.lane, text(STEP_ORDER), group.c.uid)
partial_index("rb_group_unsettled", group.c.lane, where=text(UNSETTLED))
partial_index("rb_group_key", group.c.scoped_key, where=group.c.scoped_key.is_not(None), unique=True)
# Includes the priority, so that the sum of priorities for importance weights is an index-only scan.
partial_index(
    "rb_group_by_random_key",
    group.c.lane,
    group.c.random_key,
    group.c.uid,
    group.c.priority,
    where=group.c.random_key.is_not(None),
)
partial_index("rb_group_leased", group.c.leased_until, where=group.c.leased_until.is_not(None))
partial_index(
    "rb_group_archived", group.c.lane, group.c.archived_at, group.c.uid, where=group.c.archived_at.is_not(None)
)
# Whether a group that was filled has left, and whether a checkpoint has another group with a key.
partial_index("rb_past_key", past.c.scoped_key, where=past.c.scoped_key.is_not(None))
partial_index("rb_past_to_sweep", past.c.removed_at, where=past.c.until.is_(None) & past.c.removed_at.is_not(None))
partial_index("rb_past_of_draw", past.c.draw, where=past.c.draw > 0)
partial_index("rb_past_kept", past.c.until, past.c.lane, where=past.c.until.is_not(None))
partial_index("rb_file_empty", file.c.id, where=file.c.groups == 0)
Index("rb_batch_by_step", batch.c.step, batch.c.buffer)  # people seldom name the buffer
partial_index("rb_batch_by_lease", batch.c.lease, where=batch.c.lease.is_not(None))
Index("rb_event_by_time", event.c.buffer, event.c.happened_at)
Index("rb_prompt_changed", prompt.c.buffer, prompt.c.name, prompt.c.changed)
Index("rb_prompt_since", prompt.c.buffer, prompt.c.since)
Index("rb_checkpoint_of_step", checkpoint.c.buffer, checkpoint.c.step, unique=True)

#: The staleness of a row of `rb_group`, as text of SQL without its lane; 0 steps after the put in a lane without one.
STALENESS_NOW = (
    "coalesce(pinned_staleness, coalesce((SELECT step FROM rb_lane WHERE rb_lane.id = lane), 0) - oldest_step - 1)"
)
