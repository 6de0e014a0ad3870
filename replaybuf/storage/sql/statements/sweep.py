"""Sweeping: deleting payloads that nothing needs any more, some at a time."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Integer, bindparam, delete, select

from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.identity import PREFIX
from replaybuf.storage.sql.engine.prepared import Prepared
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import checkpoint, checkpoint_group, counter, garbage, group, payload
from replaybuf.storage.sql.statements.checkpoints import may_sweep

#: Longer than any outcome is asked for.
_KEPT_SECONDS = 7 * 86_400


def sweep(tx: Transaction, removed_before: float, limit: int) -> int:
    """Delete the garbage among the oldest `limit` groups removed before a time; return the number examined."""
    if not may_sweep(tx):
        return 0
    uids = [uid for (uid,) in tx.fetch(_DUE, removed_before, limit)]
    if uids:
        listed = tx.dialect.listed(uids)
        needed = {uid for (uid,) in (*tx.fetch(_STORED, listed), *tx.fetch(_IN_CHECKPOINTS, listed))}
        tx.fetch(_DELETE, tx.dialect.listed(uid for uid in uids if uid not in needed))
        tx.fetch(_FORGET, listed)
    return len(uids)


def _due(dialect: Dialect) -> Any:
    due = garbage.c.removed_at <= bindparam("before", type_=garbage.c.removed_at.type)
    query = select(garbage.c.uid).where(due).order_by(garbage.c.removed_at)
    return dialect.for_update(query.limit(bindparam("limit", type_=Integer())), skip_locked=True)


def _kept(dialect: Dialect) -> Any:
    # Those of a checkpoint are garbage again when it is dropped.
    made = checkpoint_group.c.checkpoint.in_(select(checkpoint.c.id))
    return select(checkpoint_group.c.uid).where(made, dialect.one_of(checkpoint_group.c.uid, "uids"))


_DUE = Prepared(_due, "before", "limit")
_STORED = Prepared(lambda dialect: select(group.c.uid).where(dialect.one_of(group.c.uid, "uids")), "uids")
_IN_CHECKPOINTS = Prepared(_kept, "uids")
_DELETE = Prepared(lambda dialect: delete(payload).where(dialect.one_of(payload.c.uid, "uids")), "uids")
_FORGET = Prepared(lambda dialect: delete(garbage).where(dialect.one_of(garbage.c.uid, "uids")), "uids")


def forget_old(tx: Transaction) -> None:
    """Delete old outcomes of transactions, which nobody asks for any more."""
    old = int((time.time() - _KEPT_SECONDS) * 1_000_000)
    tx.execute(delete(counter).where(counter.c.name.startswith(PREFIX), counter.c.value < old))
