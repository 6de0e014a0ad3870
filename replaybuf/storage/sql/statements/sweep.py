"""Sweeping: deleting payloads that nothing needs any more, some at a time."""

from __future__ import annotations

import time

from sqlalchemy import delete, select

from replaybuf.storage.sql.engine.identity import PREFIX
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import checkpoint, checkpoint_group, counter, garbage, group, payload
from replaybuf.storage.sql.statements.checkpoints import may_sweep
from replaybuf.storage.sql.statements.columns import uid_in

#: Longer than any outcome is asked for.
_KEPT_SECONDS = 7 * 86_400


def sweep(tx: Transaction, removed_before: float, limit: int) -> int:
    """Delete the garbage among the oldest `limit` groups removed before a time; return the number examined."""
    if not may_sweep(tx):
        return 0
    due = (
        select(garbage.c.uid).where(garbage.c.removed_at <= removed_before).order_by(garbage.c.removed_at).limit(limit)
    )
    uids = list(tx.execute(tx.dialect.for_update(due, skip_locked=True)).scalars())
    if uids:
        chosen = uid_in(tx, uids)
        needed = set(tx.execute(select(group.c.uid).where(chosen)).scalars())
        in_checkpoints = select(checkpoint_group.c.uid).where(
            checkpoint_group.c.checkpoint.in_(select(checkpoint.c.id)), checkpoint_group.c.uid.in_(uids)
        )
        needed.update(tx.execute(in_checkpoints).scalars())  # garbage again when the checkpoint is dropped
        gone = [uid for uid in uids if uid not in needed]
        tx.execute(delete(payload).where(payload.c.uid.in_(gone)))
        tx.execute(delete(garbage).where(garbage.c.uid.in_(uids)))
    return len(uids)


def any_due(tx: Transaction, removed_before: float) -> bool:
    due = select(garbage.c.uid).where(garbage.c.removed_at <= removed_before).limit(1)
    return tx.execute(due).first() is not None


def forget_old(tx: Transaction) -> None:
    """Delete old outcomes of transactions, which nobody asks for any more."""
    old = int((time.time() - _KEPT_SECONDS) * 1_000_000)
    tx.execute(delete(counter).where(counter.c.name.startswith(PREFIX), counter.c.value < old))
