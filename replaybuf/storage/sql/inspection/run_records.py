"""The records of what was done: draws, events, checkpoints, workers, history.

Pages come newest first, without looking at more rows than they show.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from replaybuf.rules.circumstances import SILENT_SECONDS
from replaybuf.storage.sql.engine.read_transaction import ReadTransaction
from replaybuf.storage.sql.inspection.groups import check_buffer, in_order
from replaybuf.storage.sql.statements.buffer_facts import StoredCheckpoint as StoredCheckpoint
from replaybuf.storage.sql.statements.buffer_facts import list_checkpoints
from replaybuf.units import time_of

#: The column that orders a view, newest first, where it isn't the `id`.
_KEYS = {"batch_groups": "uid", "checkpoints": "created_at", "workers": "last_seen"}


def newest(
    tx: ReadTransaction, view: str, buffer: str | None, size: int, *conditions: str, **values: Any
) -> list[dict[str, Any]]:
    """Return the newest rows of a view, of one buffer or of all, that meet conditions in SQL on these values.

    Raises InputError when only other buffers exist.
    """
    check_buffer(tx, buffer)
    if buffer is not None:
        conditions, values = (*conditions, "buffer = :buffer"), {**values, "buffer": buffer}
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    statement = f"SELECT * FROM {view} {where} ORDER BY {_KEYS.get(view, 'id')} DESC LIMIT :size"  # noqa: S608
    return tx.rows(statement, size=size, **values)


# Draws

_LAST_BATCHES = """SELECT taken_at, step, groups, reward, min_reward, max_reward, staleness, max_staleness FROM rb_batch
WHERE buffer = coalesce(:buffer, buffer) AND taken_at <= :until AND ({among}) ORDER BY id DESC LIMIT :most"""


def last_batches(
    tx: ReadTransaction, buffer: str | None, most: int, *, completed: bool = False, until: float = math.inf
) -> list[dict[str, Any]]:
    """Return the step, size, rewards and staleness of the last draws, newest first; with `completed`, of such groups.

    Their times, and `until`, are in seconds since the epoch.
    """
    among = "status = 'completed'" if completed else "1 = 1"
    return tx.rows(_LAST_BATCHES.format(among=among), buffer=buffer, most=most, until=until)


# Workers and history


@dataclass(frozen=True, slots=True)
class LastSign:
    """When the last process gave a sign of life, of a buffer that none has open now, whether it ended by itself, and
    the name of its worker."""

    time: datetime
    ended: bool
    worker: str


_SIGNS = """
SELECT max(seen_at), max(ended_at), max(CASE WHEN ended_at IS NULL THEN seen_at END), (
    SELECT name FROM rb_worker WHERE buffer = coalesce(:buffer, buffer)
    ORDER BY coalesce(ended_at, seen_at) DESC, id DESC LIMIT 1)
FROM rb_worker WHERE buffer = coalesce(:buffer, buffer)"""
_HISTORY = """SELECT buffer, since, data FROM rb_history
WHERE since >= :since AND buffer = coalesce(:buffer, buffer) ORDER BY since"""


def last_sign_of(
    tx: ReadTransaction, buffer: str | None, now: datetime, after: float = SILENT_SECONDS
) -> LastSign | None:
    """Return when the processes of one buffer, or of all, were seen last; None while one is there, or none is known.

    One that hasn't ended is there until so many seconds `after` it was seen.
    """
    [(seen, ended, open_until, worker)] = tx.tuples(_SIGNS, buffer=buffer)
    if seen is None or (open_until is not None and now.timestamp() - open_until <= after):
        return None
    last = time_of(float(max(seen, ended or seen)))
    return LastSign(last, ended is not None and ended >= (open_until or ended), worker)


def history_of(tx: ReadTransaction, buffer: str | None, since: float) -> list[tuple[str, datetime, Mapping[str, Any]]]:
    """Return the figures of each minute since a time (seconds since the epoch): buffer, time and `tasks`, in order."""
    found = tx.rows(_HISTORY, buffer=buffer, since=since)
    return [(row["buffer"], datetime.fromtimestamp(row["since"], UTC), row["data"].get("tasks", {})) for row in found]


# Checkpoints

_SEEN_SECONDS = 60.0
_ALL = 2**62


@dataclass(frozen=True, slots=True)
class Since:
    """What restoring a checkpoint would do: the groups that were put since, those of it that have left, and the names
    of those who have the buffer open, as far as they were seen in the last minute."""

    put: int
    left: int
    users: list[str]


def read_checkpoints(tx: ReadTransaction, buffer: str | None) -> list[dict[str, Any]]:
    """Return the checkpoints of one buffer or of all, in the order in which they were made."""
    made = newest(tx, "checkpoints", buffer, _ALL)
    return sorted(made, key=lambda one: (in_order(one["buffer"]), one["created_at"]))


def find_stored(tx: ReadTransaction, name: str, step: int) -> StoredCheckpoint:
    """Return the checkpoint of a step of a buffer. Raises CheckpointError."""
    check_buffer(tx, name)
    made = list_checkpoints(tx, name)
    for one in made:
        if one.step == step:
            return one
    from replaybuf.storage.values import missing_checkpoint

    raise missing_checkpoint(step, [one.step for one in made])


_PUT_SINCE = """SELECT count(*) FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE l.buffer = :buffer
AND NOT EXISTS (SELECT 1 FROM rb_checkpoint_group c WHERE c.checkpoint = :id AND c.uid = g.uid)"""
_LEFT_SINCE = """SELECT count(*) FROM rb_checkpoint_group c WHERE c.checkpoint = :id
AND NOT EXISTS (SELECT 1 FROM rb_group g WHERE g.uid = c.uid)"""
_USERS = """SELECT DISTINCT name FROM rb_worker
WHERE buffer = :buffer AND seen_at > :live AND ended_at IS NULL ORDER BY name"""


def since(tx: ReadTransaction, made: StoredCheckpoint) -> Since:
    """Return what restoring a checkpoint would do now."""
    return Since(
        tx.value(_PUT_SINCE, buffer=made.buffer, id=made.id),
        tx.value(_LEFT_SINCE, id=made.id),
        tx.values(_USERS, buffer=made.buffer, live=time.time() - _SEEN_SECONDS),
    )
