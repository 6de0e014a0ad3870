"""Sweeping: payloads that nothing needs any more are deleted, some at a time."""

from __future__ import annotations

from sqlalchemy import Connection, delete, select

from replaybuf.storage.sql.schema.tables import checkpoint, checkpoint_group, garbage, group, payload
from replaybuf.storage.sql.statements.checkpoints import may_sweep
from replaybuf.storage.sql.statements.columns import uid_in


def sweep(connection: Connection, removed_before: float, limit: int) -> int:
    """Delete up to `limit` payloads of groups that were removed before a time; how many were looked at."""
    if not may_sweep(connection):
        return 0
    due = (
        select(garbage.c.uid).where(garbage.c.removed_at <= removed_before).order_by(garbage.c.removed_at).limit(limit)
    )
    if connection.dialect.name == "postgresql":
        due = due.with_for_update(skip_locked=True)
    uids = list(connection.execute(due).scalars())
    if uids:
        chosen = uid_in(connection, uids)
        needed = set(connection.execute(select(group.c.uid).where(chosen)).scalars())
        in_checkpoints = select(checkpoint_group.c.uid).where(
            checkpoint_group.c.checkpoint.in_(select(checkpoint.c.id)), checkpoint_group.c.uid.in_(uids)
        )
        needed.update(connection.execute(in_checkpoints).scalars())  # they are garbage again when it is dropped
        gone = [uid for uid in uids if uid not in needed]
        connection.execute(delete(payload).where(payload.c.uid.in_(gone)))
        connection.execute(delete(garbage).where(garbage.c.uid.in_(uids)))
    return len(uids)


def any_due(connection: Connection, removed_before: float) -> bool:
    due = select(garbage.c.uid).where(garbage.c.removed_at <= removed_before).limit(1)
    return connection.execute(due).first() is not None
