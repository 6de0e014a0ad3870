"""Restore of a step checkpoint: one transaction that excludes all other writers.

Its cost is that of the changes since the checkpoint: other groups aren't read or written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from replaybuf.errors import SnapshotError
from replaybuf.rollouts.rollout import ASIDE, Status
from replaybuf.rules import transitions
from replaybuf.rules.transitions import Tally
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group
from replaybuf.storage.sql.statements.buffer_facts import last_uid
from replaybuf.storage.sql.statements.checkpoints import copy_cursors, find_checkpoint, read_checkpoints
from replaybuf.storage.sql.statements.counts import Counts, add_counts, add_step, change, pin
from replaybuf.storage.sql.statements.eviction import replace_groups
from replaybuf.storage.sql.statements.fence import begin_epoch, join, shift_to
from replaybuf.storage.sql.statements.lanes import all_lanes, lanes_where, need_lanes, race_columns, race_of, runs_race
from replaybuf.storage.sql.statements.leases import read_rows, return_all
from replaybuf.storage.sql.statements.ordering import enter_race
from replaybuf.storage.sql.statements.past import bring_back, changed_since, keep, leave, put_since
from replaybuf.storage.sql.statements.presence import note
from replaybuf.storage.sql.statements.rows import GroupRow, uid_in
from replaybuf.storage.values import Checkpoint


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


def check_no_groups(tx: Transaction) -> None:
    """Raise SnapshotError if the buffer has groups."""
    check_empty(tx.value(f"SELECT count(*) FROM rb_group WHERE {_OURS}", buffer=tx.scope.buffer), ())  # noqa: S608


#: Rows of the buffer's lanes.
_OURS = "lane IN (SELECT id FROM rb_lane WHERE buffer = :buffer)"


def make_room(tx: Transaction) -> None:
    """Remove the remaining rows of an empty buffer. Raises SnapshotError if it isn't empty."""
    check_no_groups(tx)
    check_empty(0, [made.step for made in read_checkpoints(tx)])
    for statement in (
        f"UPDATE rb_past SET until = NULL WHERE until IS NOT NULL AND {_OURS}",  # noqa: S608
        "DELETE FROM rb_cursor WHERE buffer = :buffer",
        f"DELETE FROM rb_tally WHERE {_OURS}",  # noqa: S608
        "DELETE FROM rb_lane WHERE buffer = :buffer",
    ):
        tx.change(statement, buffer=tx.scope.buffer)
    # The past of other buffers may still be returned to them, or belong to their checkpoints: only the sweep can delete
    # it. And this buffer's payloads that are kept apart may be being read.
    if not tx.tuples("SELECT 1 FROM rb_lane WHERE buffer <> :buffer LIMIT 1", buffer=tx.scope.buffer):
        tx.change("DELETE FROM rb_payload WHERE file IS NULL AND uid IN (SELECT uid FROM rb_past)")
        tx.change(
            "DELETE FROM rb_past WHERE draw = 0 AND NOT EXISTS (SELECT 1 FROM rb_payload p WHERE p.uid = rb_past.uid)"
        )


def free_shift(tx: Transaction, last: int) -> int:
    """Return the shift of a snapshot's uids, up to `last`: 0 unless other buffers of the database use them."""
    taken = "SELECT 1 FROM rb_payload WHERE uid <= :last UNION ALL SELECT 1 FROM rb_past WHERE uid <= :last LIMIT 1"
    return last_uid(tx) if tx.tuples(taken, last=last) else 0


def raise_uid(tx: Transaction, last: int) -> None:
    """Prevent that a uid up to `last` is used again."""
    tx.dialect.set_last_uid(tx, max(last, last_uid(tx)))


def restore(tx: Transaction, step: int, now: float, *, keep_new: bool) -> Checkpoint:
    """Restore the buffer to its checkpoint of a step, in a new epoch, which the transaction joins."""
    join(tx)
    kept = find_checkpoint(tx, step)
    shift = tx.scope.ticket_shift if keep_new else shift_to(tx, kept.next_ticket)
    put = put_since(tx, kept.id, kept.last_uid) if keep_new else []
    new = _set_new_apart(tx, put) if put else []
    stay = set(put)
    leave(tx, [uid for uid in changed_since(tx, kept.id, kept.last_uid) if uid not in stay])
    bring_back(tx, kept.id)
    # Later checkpoints may lack what has come back now.
    later = "UPDATE rb_checkpoint SET last_uid = 0 WHERE buffer = :buffer AND id > :id"
    tx.change(later, buffer=tx.scope.buffer, id=kept.id)
    lanes = all_lanes(tx)
    _set_lanes(tx, lanes, kept.lanes)
    _set_tallies(tx, lanes, kept.tallies)
    if not keep_new:
        _set_cursors(tx, kept.id)
    begin_epoch(tx, step, now, shift)
    return_all(tx)
    if new:
        _let_in(tx, new)
    detail = "groups put since stayed" if keep_new else None
    note(tx, EventKind.RESTORED, worker=tx.scope.worker, step=step, groups=kept.groups, detail=detail)
    return Checkpoint(kept.step, kept.created_at, kept.groups, kept.bytes)


def _set_lanes(tx: Transaction, lanes: Sequence[Any], kept: Sequence[Mapping[str, Any]]) -> None:
    """Restore train steps and races; newer lanes become like new ones."""
    then, race = {row["id"]: row for row in kept}, race_of(tx)
    for row in lanes:
        own = race if runs_race(Status(row.status), leased=row.leased) else None
        fresh = {"step": None, **race_columns(own)}
        values = {name: then.get(row.id, fresh)[name] for name in fresh}
        changes = ", ".join(f"{name} = :{name}" for name in values)
        tx.change(f"UPDATE rb_lane SET {changes} WHERE id = :id", id=row.id, **values)  # noqa: S608


def _set_tallies(tx: Transaction, lanes: Sequence[Any], kept: Sequence[Mapping[str, Any]]) -> None:
    tx.change("DELETE FROM rb_tally WHERE lane {in:lanes}", lanes=[row.id for row in lanes])
    add_counts(tx, {(row["lane"], Tally(row["name"])): row["amount"] for row in kept})


def _set_cursors(tx: Transaction, checkpoint_id: int) -> None:
    tx.change("DELETE FROM rb_cursor WHERE buffer = :buffer AND checkpoint = 0", buffer=tx.scope.buffer)
    copy_cursors(tx, checkpoint_id, 0)


# Groups put after the checkpoint, with `keep_new`


def _set_new_apart(tx: Transaction, uids: Sequence[int]) -> list[GroupRow]:
    """Pin the staleness of these newer groups, and reset their draws; return their rows before that."""
    return_all(tx)
    keep(tx, uids)
    these = uid_in(tx, uids)
    found = read_rows(tx, these)
    fresh = {"times_sampled": 0, "deliveries": 0, "trained_step": None, "scoped_key": None}
    for home in lanes_where(tx, "true"):  # before `_set_lanes` changes the train step that the groups follow
        pin(tx, home, [one.uid for one in found if one.lane == home.id])
    change(tx, uids, fresh)
    return found


def _let_in(tx: Transaction, new: Sequence[GroupRow]) -> None:
    """Move newer groups into their lanes, replacing groups with their keys and groups that they had replaced."""
    keys = {row.uid: row.column("scoped_key") for row in new if row.column("scoped_key") is not None}
    origins = [uid for row in new for uid in row.parsed("made_from") or ()]
    for condition in (group.c.scoped_key.in_(list(keys.values())), uid_in(tx, origins)):
        replace_groups(tx, condition)
    counts: Counts = Counter()
    names = [(row.task_name, transitions.undrawn(row)) for row in new]
    homes = need_lanes(tx, names)
    for name, home in homes.items():
        uids = [row.uid for row, its in zip(new, names, strict=True) if its == name]
        values: dict[str, Any] = {"lane": home.id}
        if home.status not in ASIDE:
            values["archived_at"] = None
        change(tx, uids, values)
        enter_race(tx, home, uids)
        add_step(counts, homes, home.task_name, transitions.put(home.status), len(uids))
    for row in new:
        counts[(homes[(row.task_name, transitions.undrawn(row))].id, Tally.BYTES)] += row.column("bytes") or 0
    for uid, key in keys.items():
        change(tx, [uid], {"scoped_key": key})
    add_counts(tx, counts)
