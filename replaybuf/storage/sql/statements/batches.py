"""Batches: a row for each draw, with worker, groups and train step, written in the draw's own transaction."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json
from sqlalchemy import Integer, bindparam, delete, insert, select, update

from replaybuf.rollouts.statuses import Status
from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.transaction import Prepared, Transaction, insertion
from replaybuf.storage.sql.schema.records import batch
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.values import Draw, Leased


def train_step_of(draw: Draw, rows: Iterable[GroupRow]) -> int | None:
    """Return the train step of a draw: the named one, or the latest of the lanes drawn from.

    Groups that aren't COMPLETED are drawn to be generated again: without a named step, such a draw has none.
    """
    if draw.train_step is not None or draw.status != Status.COMPLETED:
        return draw.train_step
    return max((row.step for row in rows if row.step is not None), default=None)


@dataclass(frozen=True, slots=True)
class BatchKey:
    """The key of a batch's row, to remove it if the draw is undone."""

    taken_at: float
    worker: str | None
    first_uid: int


def add_batch(tx: Transaction, draw: Draw, rows: Sequence[GroupRow], step: int | None, lease: int | None) -> BatchKey:
    """Write the batch of a draw of these groups, at least one; the last statement of a transaction.

    Where each statement is a round trip, it is sent together with COMMIT.
    """
    members = [_member(row) for row in rows]
    drawn = BatchKey(time.time(), draw.worker, min(row.uid for row in rows))
    values = _about(members) | {
        "buffer": tx.scope.buffer,
        "taken_at": drawn.taken_at,
        "epoch": tx.scope.epoch,
        "step": step,
        "status": draw.status.value,
        "worker": draw.worker,
        "lease": lease,
        "settled": 0 if lease else len(rows),
        "members": to_json(members, inf_nan_mode="null").decode(),
    }
    if tx.dialect.is_remote:
        listed = ", ".join(_literal(values[name]) for name in _NAMES)
        tx.finish(f"INSERT INTO rb_batch ({', '.join(_NAMES)}) VALUES ({listed})")  # noqa: S608
    else:
        tx.fetch(_INSERT, *(values[name] for name in _NAMES))
    return drawn


def _about(members: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the columns of a batch that are computed from its members."""
    uids, _, _, every_reward, staleness, every_step, _ = zip(*members, strict=True)
    rewards = [reward for reward in every_reward if reward is not None]
    steps = [step for step in every_step if step is not None]
    return {
        "groups": len(uids),
        "reward": _finite(sum(rewards) / len(rewards)) if rewards else None,
        "min_reward": min(rewards, default=None),
        "max_reward": max(rewards, default=None),
        "staleness": sum(staleness) / len(staleness),
        "max_staleness": max(staleness),
        "oldest_step": min(steps, default=None),
        "newest_step": max(steps, default=None),
        "first_uid": min(uids),
        "last_uid": max(uids),
        "members": members,
    }


def _member(row: GroupRow) -> tuple[Any, ...]:
    try:
        worker, reward, oldest, created_at = row.origin
        return row.uid, row.lane, worker, _finite(reward), row.staleness, oldest, created_at
    except (TypeError, ValueError):  # damaged metadata: the group can't be decoded, and the draw will be undone
        return row.uid, row.lane, None, None, 0, None, None


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _literal(value: str | float | None) -> str:
    """Return a text or a finite number as a SQL literal; a text is escaped."""
    if isinstance(value, str):
        escaped = value.replace("\\", r"\\").replace("'", "''")
        return f"E'{escaped}'"
    return "NULL" if value is None else repr(value)


_NAMES = tuple(column.name for column in batch.columns if column.name != "id")
_INSERT = insertion(batch, (False,) + (True,) * len(_NAMES))


def remove_batch(tx: Transaction, drawn: BatchKey) -> None:
    """Remove the batch of a draw that its caller didn't receive."""
    found = (
        batch.c.buffer == tx.scope.buffer,
        batch.c.taken_at == drawn.taken_at,
        batch.c.first_uid == drawn.first_uid,
        batch.c.worker.is_not_distinct_from(drawn.worker),
    )
    tx.execute(delete(batch).where(*found))


def settle(tx: Transaction, lease: Leased, uids: Sequence[int], step: int | None) -> None:
    """Count groups of a batch as acknowledged, at this step; the last statement of a transaction.

    Where each statement is a round trip, it is sent together with COMMIT if all groups are acknowledged at once.
    """
    if not uids:
        return
    if len(uids) < sum(map(len, lease.items.values())):
        _settle_some(tx, lease.token, set(uids), step)
        return
    # An unchanged step isn't written, which saves a write to its index.
    moved = f", step = CASE WHEN settled = 0 THEN {_literal(step)} ELSE step END" if step != lease.train_step else ""
    changes = f"settled = settled + {len(uids):d}{moved}"
    settled = f"UPDATE rb_batch SET {changes} WHERE lease = {lease.token:d} AND settled < groups"  # noqa: S608
    if tx.dialect.is_remote:
        tx.finish(settled)
    else:
        tx.run(settled)


def _settle_some(tx: Transaction, lease: int, uids: set[int], step: int | None) -> None:
    """Settle some groups of a batch. The first ones set its step; those of another step become another batch."""
    query = tx.dialect.for_update(select(batch).where(batch.c.lease == lease, batch.c.settled < batch.c.groups))
    found = next(iter(tx.execute(query).mappings()), None)
    if found is None:  # not recorded, or pruned
        return
    if not found["settled"] or found["step"] == step:
        _change(tx, found["id"], step=step, settled=found["settled"] + len(uids))
        return
    mine = [member for member in found["members"] if member[0] in uids]
    rest = [member for member in found["members"] if member[0] not in uids]
    if mine and rest:
        kept = {name: found[name] for name in ("buffer", "taken_at", "epoch", "status", "worker", "lease")}
        tx.execute(insert(batch).values(**kept, step=step, settled=len(mine), **_about(mine)))
        _change(tx, found["id"], **_about(rest))


def _change(tx: Transaction, number: int, **values: Any) -> None:
    tx.execute(update(batch).where(batch.c.id == number).values(**values))


def last_beyond(tx: Transaction, keep: int) -> int | None:
    """Return the id of the newest batch of the buffer beyond its last `keep`, or None."""
    found = tx.value(_BEYOND, buffer=tx.scope.buffer, keep=keep)
    return None if found is None else int(found)


_BEYOND = "SELECT id FROM rb_batch WHERE buffer = :buffer ORDER BY id DESC LIMIT 1 OFFSET :keep"


def prune_batches(tx: Transaction, until: int, limit: int) -> int:
    """Remove up to `limit` of the buffer's batches up to this one, oldest first; return their number."""
    return len(tx.fetch(_PRUNE, tx.scope.buffer, until, limit))


def _prune(dialect: Dialect) -> Any:
    old = select(batch.c.id).where(
        batch.c.buffer == bindparam("buffer"), batch.c.id <= bindparam("until", type_=batch.c.id.type)
    )
    first = old.order_by(batch.c.id).limit(bindparam("limit", type_=Integer()))
    return delete(batch).where(batch.c.id.in_(dialect.for_update(first, skip_locked=True))).returning(batch.c.id)


_PRUNE = Prepared(_prune, "buffer", "until", "limit")
