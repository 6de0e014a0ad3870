"""Batches: a row for each draw, with worker and train step, written in the draw's own transaction.

Its groups are the versions in `rb_past` with its id (`past`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import batch
from replaybuf.storage.sql.statements.past import may_sweep
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.values import Draw, Leased
from replaybuf.values.rollouts.statuses import Status


def train_step_of(draw: Draw, rows: Iterable[GroupRow]) -> int | None:
    """Return the train step of a draw: the named one, or the latest of the lanes drawn from.

    Groups that aren't COMPLETED are drawn to be generated again: without a named step, such a draw has none.
    """
    if draw.train_step is not None or draw.status != Status.COMPLETED:
        return draw.train_step
    return max({row.step for row in rows if row.step is not None}, default=None)


@dataclass(frozen=True, slots=True)
class BatchKey:
    """A draw's time and one of its groups, by which its batch is found if the draw is undone."""

    taken_at: float
    uid: int


def write_batch(tx: Transaction, draw: Draw, rows: Sequence[GroupRow], step: int | None, lease: int | None) -> BatchKey:
    """Write the batch of a draw of these groups, at least one; call it before they are changed."""
    try:
        figures = _figures([(row.uid, row.values.reward, row.staleness, row.values.oldest_step) for row in rows])
    except (TypeError, ValueError):  # damaged metadata: if the group can't be decoded, the draw is undone
        figures = _figures([(row.uid, None, 0, None) for row in rows])
    values = figures | {
        "buffer": tx.scope.buffer,
        "taken_at": time.time(),
        "epoch": tx.scope.epoch,
        "step": step,
        "status": draw.status.value,
        "worker": draw.worker,
        "lease": lease,
        "settled": 0 if lease else len(rows),
    }
    tx.send(_INSERT, **values)
    return BatchKey(values["taken_at"], values["first_uid"])


def _figures(members: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """Return the columns of a batch that are computed from its groups: uid, reward, staleness, oldest model step."""
    uids, every_reward, staleness, every_step = zip(*members, strict=True)
    rewards = [reward for reward in every_reward if reward is not None]
    steps = [step for step in every_step if step is not None]
    return {
        "groups": len(uids),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "min_reward": min(rewards, default=None),
        "max_reward": max(rewards, default=None),
        "staleness": sum(staleness) / len(staleness),
        "max_staleness": max(staleness),
        "oldest_step": min(steps, default=None),
        "newest_step": max(steps, default=None),
        "first_uid": min(uids),
        "last_uid": max(uids),
    }


_COLUMN_NAMES = tuple(column.name for column in batch.columns if column.name != "id")
_INSERT = f"""INSERT INTO rb_batch ({", ".join(_COLUMN_NAMES)})
VALUES ({", ".join(f":{name}" for name in _COLUMN_NAMES)})"""  # noqa: S608


def remove_batch(tx: Transaction, drawn: BatchKey) -> None:
    """Remove the batch of a draw that nobody received, and the copies of its groups that stayed."""
    for number in tx.values(_REMOVE, taken_at=drawn.taken_at, uid=drawn.uid):
        tx.change("DELETE FROM rb_past WHERE draw = :draw AND draw > 0 AND removed_at IS NULL", draw=number)
        tx.change("DELETE FROM rb_annotation WHERE draw = :draw", draw=number)


_REMOVE = """DELETE FROM rb_batch WHERE taken_at = :taken_at
AND id IN (SELECT draw FROM rb_past WHERE uid = :uid AND draw > 0) RETURNING id"""


def settle(tx: Transaction, lease: Leased, uids: Sequence[int], step: int | None) -> None:
    """Count groups of a batch as acknowledged, at this step."""
    if not uids:
        return
    if lease.is_part or len(uids) < sum(map(len, lease.items.values())):
        _settle_part(tx, lease.token, set(uids), step)
        return
    query = "UPDATE rb_batch SET settled = :settled, step = :step WHERE lease = :lease"
    tx.send(query, settled=len(uids), step=step, lease=lease.token)


def _settle_part(tx: Transaction, lease: int, uids: set[int], step: int | None) -> None:
    """Settle some groups of a batch. The first ones set its step; those of another step become another batch."""
    rows = tx.rows("SELECT * FROM rb_batch WHERE lease = :lease AND settled < groups {lock}", lease=lease)
    if not rows:  # not recorded, or pruned
        return
    recorded = rows[0]
    if not recorded["settled"] or recorded["step"] == step:
        _change(tx, recorded["id"], step=step, settled=recorded["settled"] + len(uids))
        return
    members = tx.tuples(
        "SELECT uid, reward, staleness, oldest_step FROM rb_past WHERE draw = :id AND draw > 0", id=recorded["id"]
    )
    settled = [member for member in members if member[0] in uids]
    unsettled = [member for member in members if member[0] not in uids]
    if settled and unsettled:
        tx.send(_INSERT, **recorded | {"step": step, "settled": len(settled)} | _figures(settled))
        for table in ("rb_past", "rb_annotation"):
            query = f"UPDATE {table} SET draw = {{draw}} WHERE draw = :old AND draw > 0 AND uid {{in:uids}}"  # noqa: S608
            tx.send(query, old=recorded["id"], uids=list(uids))
        _change(tx, recorded["id"], **_figures(unsettled))


def _change(tx: Transaction, number: int, **values: Any) -> None:
    changes = ", ".join(f"{name} = :{name}" for name in values)
    tx.send(f"UPDATE rb_batch SET {changes} WHERE id = :id", id=number, **values)  # noqa: S608


def newest_batch(tx: Transaction) -> int:
    """Return the id of the newest batch of all buffers, 0 for none."""
    return int(tx.value("SELECT max(id) FROM rb_batch") or 0)


def last_beyond(tx: Transaction, keep: int) -> int | None:
    """Return the id of the newest batch of the buffer beyond its last `keep`, or None; it reads as many rows."""
    number = tx.value(_FIRST_BEYOND, buffer=tx.scope.buffer, keep=keep)
    return None if number is None else int(number)


_FIRST_BEYOND = "SELECT id FROM rb_batch WHERE buffer = :buffer ORDER BY id DESC LIMIT 1 OFFSET :keep"


def prune_batches(tx: Transaction, until: int, limit: int) -> int:
    """Remove up to `limit` of the buffer's batches up to this one, oldest first; return their number.

    Their groups go with them, except those that a checkpoint has, or that wait for the sweep, and all annotations.
    """
    if not may_sweep(tx):
        return 0
    draws = tx.values(_PRUNE, buffer=tx.scope.buffer, until=until, limit=limit)
    tx.change("DELETE FROM rb_past WHERE draw {in:draws} AND draw > 0 AND removed_at IS NULL", draws=draws)
    tx.change("DELETE FROM rb_annotation WHERE draw {in:draws}", draws=draws)
    return len(draws)


_PRUNE = """DELETE FROM rb_batch WHERE id IN (
    SELECT id FROM rb_batch WHERE buffer = :buffer AND id <= :until ORDER BY id LIMIT :limit) RETURNING id"""
