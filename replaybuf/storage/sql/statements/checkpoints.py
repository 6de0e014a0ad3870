"""Step checkpoints: a row with the lanes, their tallies and the cursors. Groups and payloads aren't copied.

A checkpoint excludes other writers for the time of a few small statements: each write is before it or after it. From
then on, versions of groups that it has are kept when they leave or change (`past`). A restore is one transaction that
excludes all other writers; its cost is that of the changes since the checkpoint: other groups aren't read or written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from replaybuf.errors import SnapshotError
from replaybuf.rules.transitions import Tally
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.buffer_facts import find_checkpoint, last_uid, list_checkpoints
from replaybuf.storage.sql.statements.counts import add_counts, read_lane_tallies, totals
from replaybuf.storage.sql.statements.fence import begin_epoch, join, next_ticket, shift_to
from replaybuf.storage.sql.statements.lanes import all_lanes, race_columns, race_of
from replaybuf.storage.sql.statements.leases import return_all
from replaybuf.storage.sql.statements.ledger import restore_prompts
from replaybuf.storage.sql.statements.parts import forget_names
from replaybuf.storage.sql.statements.past import OURS, bring_back, changed_since, leave
from replaybuf.storage.sql.statements.presence import note
from replaybuf.storage.values import Checkpoint


def make_checkpoint(tx: Transaction, step: int, keep: int | None, now: float) -> Checkpoint:
    """Make a checkpoint of the buffer, which replaces an older one of its step. Must exclude other writers.

    All but the last `keep` checkpoints are dropped.
    """
    forget(tx, [row["id"] for row in list_checkpoints(tx, tx.scope.buffer) if row["step"] == step])
    lanes = all_lanes(tx)
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
        _drop(tx, list_checkpoints(tx, tx.scope.buffer)[:-keep])
    return Checkpoint(step, now, groups, size)


def read_checkpoints(tx: Transaction) -> list[Checkpoint]:
    """Return the checkpoints of the buffer, in the order in which they were made."""
    stored = list_checkpoints(tx, tx.scope.buffer or "")
    return [Checkpoint(row["step"], row["created_at"], row["groups"], row["bytes"]) for row in stored]


def drop_checkpoint(tx: Transaction, step: int) -> None:
    """Drop the checkpoint of a step. Raises CheckpointError."""
    _drop(tx, [find_checkpoint(tx, tx.scope.buffer, step)])


def _drop(tx: Transaction, dropped: Sequence[Mapping[str, Any]]) -> None:
    forget(tx, [row["id"] for row in dropped])
    for row in dropped:
        note(tx, EventKind.CHECKPOINT_DROPPED, worker=tx.scope.worker, step=row["step"], groups=row["groups"])


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


# Restores


def check_empty(count: int, steps: Sequence[int]) -> None:
    """Raise SnapshotError if there are groups or checkpoints (of these steps)."""
    if count:
        raise SnapshotError(
            f"the buffer holds {count} groups: resume into an empty buffer, or go on with this one as it is "
            "(an opened database already has everything that was committed)",
            reason="not empty",
        )
    if steps:
        raise SnapshotError(
            f"the buffer has checkpoints of the steps {', '.join(map(str, steps))}: restore one, or drop them first",
            reason="not empty",
        )


def make_room(tx: Transaction) -> None:
    """Remove the remaining rows of an empty buffer. Raises SnapshotError if it isn't empty."""
    groups = tx.value(f"SELECT count(*) FROM rb_group WHERE {OURS}", buffer=tx.scope.buffer)  # noqa: S608
    check_empty(groups, [checkpoint.step for checkpoint in read_checkpoints(tx)])
    for statement in (
        f"UPDATE rb_past SET until = NULL WHERE until IS NOT NULL AND {OURS}",  # noqa: S608
        "DELETE FROM rb_cursor WHERE buffer = :buffer",
        "DELETE FROM rb_prompt WHERE buffer = :buffer",
        f"DELETE FROM rb_tally WHERE {OURS}",  # noqa: S608
        "DELETE FROM rb_lane WHERE buffer = :buffer",
    ):
        tx.change(statement, buffer=tx.scope.buffer)


def raise_uid(tx: Transaction, last: int) -> None:
    """Prevent that a uid up to `last` is used again."""
    tx.change("{set_last_uid:last}", last=max(last, last_uid(tx)))


def restore(tx: Transaction, step: int, now: float) -> Checkpoint:
    """Restore the buffer to its checkpoint of a step, in a new epoch, which the transaction joins."""
    join(tx)
    saved = find_checkpoint(tx, tx.scope.buffer, step)
    number, groups, last = saved["id"], saved["groups"], saved["last_uid"]
    shift = shift_to(tx, saved["next_ticket"])
    leave(tx, changed_since(tx, number, last))
    bring_back(tx, number)
    forget_names(tx, number)
    # Later checkpoints may lack what has come back now.
    query = "UPDATE rb_checkpoint SET last_uid = 0 WHERE buffer = :buffer AND id > :id"
    tx.change(query, buffer=tx.scope.buffer, id=number)
    lanes = all_lanes(tx)
    _set_lanes(tx, lanes, saved["lanes"])
    _set_tallies(tx, lanes, saved["tallies"])
    _set_cursors(tx, number)
    begin_epoch(tx, step, now, shift)
    return_all(tx)
    note(tx, EventKind.RESTORED, worker=tx.scope.worker, step=step, groups=groups)
    return Checkpoint(step, float(saved["created_at"]), groups, saved["bytes"])


def _set_lanes(tx: Transaction, lanes: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Restore train steps and races; newer lanes become like new ones."""
    by_lane, race = {row["id"]: row for row in saved}, race_of(tx)
    for row in lanes:
        fresh = {"step": None, **race_columns(None if row["leased"] else race)}
        values = {name: by_lane.get(row["id"], fresh)[name] for name in fresh}
        changes = ", ".join(f"{name} = :{name}" for name in values)
        tx.change(f"UPDATE rb_lane SET {changes} WHERE id = :id", id=row["id"], **values)  # noqa: S608


def _set_tallies(tx: Transaction, lanes: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    tx.change("DELETE FROM rb_tally WHERE lane {in:lanes}", lanes=[row["id"] for row in lanes])
    add_counts(tx, {(row["lane"], Tally(row["name"])): row["amount"] for row in saved})


def _set_cursors(tx: Transaction, checkpoint_id: int) -> None:
    tx.change("DELETE FROM rb_cursor WHERE buffer = :buffer AND checkpoint = 0", buffer=tx.scope.buffer)
    copy_cursors(tx, checkpoint_id, 0)
    restore_prompts(tx, checkpoint_id)
