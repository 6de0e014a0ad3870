"""Step checkpoints: a row with the lanes, their tallies and the cursors. Groups and payloads aren't copied.

A checkpoint excludes other writers for the time of a few small statements: each write is before it or after it. From
then on, versions of groups that it has are kept when they leave or change (`past`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic_core import from_json

from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.buffer_facts import StoredCheckpoint, last_uid, list_checkpoints
from replaybuf.storage.sql.statements.counts import read_lane_tallies, totals
from replaybuf.storage.sql.statements.fence import next_ticket
from replaybuf.storage.sql.statements.lanes import all_lanes
from replaybuf.storage.sql.statements.presence import note
from replaybuf.storage.values import Checkpoint, missing_checkpoint


def make_checkpoint(tx: Transaction, step: int, keep: int | None, now: float) -> Checkpoint:
    """Make a checkpoint of the buffer, which replaces an older one of its step. Must exclude other writers.

    All but the last `keep` checkpoints are dropped.
    """
    forget(tx, [row.id for row in _of_buffer(tx) if row.step == step])
    lanes = [row._asdict() for row in all_lanes(tx)]
    tallies = read_lane_tallies(tx, [row["id"] for row in lanes])
    groups, size = totals(tallies)
    values = {
        "buffer": tx.scope.buffer,
        "step": step,
        "created_at": now,
        "groups": groups,
        "bytes": size,
        "next_ticket": next_ticket(tx),
        "lanes": lanes,
        "tallies": tallies,
        "last_uid": last_uid(tx),
    }
    tx.newest = new = tx.tuples(_INSERT, **values)[0][0]
    copy_cursors(tx, 0, new)
    note(tx, EventKind.CHECKPOINT, worker=tx.scope.worker, step=step, groups=groups)
    if keep is not None:
        _drop(tx, _of_buffer(tx)[:-keep])
    return Checkpoint(step, now, groups, size)


def read_checkpoints(tx: Transaction) -> list[Checkpoint]:
    """Return the checkpoints of the buffer, in the order in which they were made."""
    made = list_checkpoints(tx, tx.scope.buffer or "")
    return [Checkpoint(one.step, one.created_at, one.groups, one.bytes) for one in made]


def find_checkpoint(tx: Transaction, step: int) -> Kept:
    """Return the row of the checkpoint of a step. Raises CheckpointError."""
    names = ", ".join(Kept._fields).replace("lanes, tallies", "CAST(lanes AS text), CAST(tallies AS text)")
    found = f"SELECT {names} FROM rb_checkpoint WHERE buffer = :buffer AND step = :step"  # noqa: S608
    for *row, lanes, tallies in tx.tuples(found, buffer=tx.scope.buffer, step=step):
        return Kept._make([*row, from_json(lanes), from_json(tallies)])
    raise missing_checkpoint(step, [made.step for made in read_checkpoints(tx)])


class Kept(NamedTuple):
    """A row of `rb_checkpoint`."""

    id: int
    step: int
    created_at: float
    groups: int
    bytes: int
    next_ticket: int
    last_uid: int
    lanes: list[dict[str, Any]]
    tallies: list[dict[str, Any]]


def drop_checkpoint(tx: Transaction, step: int) -> None:
    """Drop the checkpoint of a step. Raises CheckpointError."""
    kept = find_checkpoint(tx, step)
    _drop(tx, [one for one in _of_buffer(tx) if one.id == kept.id])


def _drop(tx: Transaction, dropped: Sequence[StoredCheckpoint]) -> None:
    forget(tx, [row.id for row in dropped])
    for row in dropped:
        note(tx, EventKind.CHECKPOINT_DROPPED, worker=tx.scope.worker, step=row.step, groups=row.groups)


def _of_buffer(tx: Transaction) -> list[StoredCheckpoint]:
    return list_checkpoints(tx, tx.scope.buffer)


def forget(tx: Transaction, ids: Sequence[int]) -> None:
    """Drop checkpoints. What only they have is deleted later (`past.pass_on`)."""
    if ids:
        tx.newest = None
        tx.change("DELETE FROM rb_cursor WHERE checkpoint {in:ids}", ids=ids)
        tx.change("DELETE FROM rb_checkpoint WHERE id {in:ids}", ids=ids)


def copy_cursors(tx: Transaction, old: int, new: int) -> None:
    """Copy the cursors of a checkpoint to another; 0 has the current ones."""
    tx.change(_COPY_CURSORS, buffer=tx.scope.buffer, old=old, new=new)


_INSERT = """INSERT INTO rb_checkpoint
    (buffer, step, created_at, groups, bytes, next_ticket, lanes, tallies, last_uid)
VALUES (:buffer, :step, :created_at, :groups, :bytes, :next_ticket, {json:lanes}, {json:tallies}, :last_uid)
RETURNING id"""
_COPY_CURSORS = """INSERT INTO rb_cursor (buffer, name, checkpoint, version, position, value)
SELECT buffer, name, CAST(:new AS integer), version, position, value FROM rb_cursor
WHERE buffer = :buffer AND checkpoint = :old"""
