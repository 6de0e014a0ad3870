"""Whether step checkpoints are whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, exists, func, select

from replaybuf.doctor.finding import Check, Finding, Look, fine, number_of, problem, some
from replaybuf.storage.sql.schema.tables import checkpoint, checkpoint_group, payload
from replaybuf.storage.sql.statements.checkpoints import forgotten

_NAME = "checkpoints"


def look_at_checkpoints(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether each checkpoint has the groups that it says, and their payloads."""
    rows = connection.execute(select(checkpoint).order_by(checkpoint.c.id)).all()
    wrong = [text for row in rows if (text := _problem(connection, row))]
    mend = "make another one, then buffer.drop_checkpoint(step); a restore would bring back what is there"
    found = [problem(_NAME, some(wrong, 3), mend)] if wrong else []
    steps = f" (steps {some([row.step for row in rows])})" if rows else ""
    left = len(forgotten(connection))
    waiting = f"; what is left of {number_of(left, 'dropped checkpoint')} waits to be swept" if left else ""
    return found or [fine(_NAME, (f"{len(rows):,}, all whole{steps}" if rows else "none") + waiting)]


def _problem(connection: Connection, row: Any) -> str:
    here = checkpoint_group.c.checkpoint == row.id
    sizes = select(func.count(), func.coalesce(func.sum(checkpoint_group.c.bytes), 0)).where(here)
    count, nbytes = connection.execute(sizes).one()
    if (count, int(nbytes)) != (row.groups, row.bytes):
        said = f"{row.groups:,} groups of {row.bytes:,} bytes"
        return f"the checkpoint of step {row.step} had {said}, and has {count:,} of {nbytes:,}"
    bare = select(func.count()).where(here, ~exists().where(payload.c.uid == checkpoint_group.c.uid))
    if missing := connection.execute(bare).scalar_one():
        return f"{missing:,} of the {count:,} payloads of the checkpoint of step {row.step} are missing"
    return ""


CHECKS = (Check(_NAME, look_at_checkpoints),)
