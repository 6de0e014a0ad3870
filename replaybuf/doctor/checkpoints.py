"""Whether step checkpoints are whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, exists, func, select

from replaybuf.doctor.finding import Check, Finding, Level, Look, fine, problem, repairable, some
from replaybuf.storage.sql.checkpoint import forget, keep_sweeps_away
from replaybuf.storage.sql.tables import checkpoint, checkpoint_group, payload

_NAME = "checkpoints"

_halves = (
    select(checkpoint_group.c.checkpoint)
    .distinct()
    .where(~exists().where(checkpoint.c.id == checkpoint_group.c.checkpoint))
)


def look_at_checkpoints(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether each checkpoint has the groups that it says, and their payloads."""
    rows = connection.execute(select(checkpoint).order_by(checkpoint.c.id)).all()
    wrong = [text for row in rows if (text := _problem(connection, row))]
    mend = "make another one, then buffer.drop_checkpoint(step); a restore would bring back what is there"
    found = [problem(_NAME, some(wrong, 3), mend)] if wrong else []
    if halves := connection.execute(select(func.count()).select_from(_halves.subquery())).scalar_one():
        found.append(repairable(_NAME, f"what is left of {halves:,} checkpoints that are gone", level=Level.WARNING))
    steps = f" (steps {some([row.step for row in rows])})" if rows else ""
    return found or [fine(_NAME, f"{len(rows):,}, all whole{steps}" if rows else "none")]


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


def repair_checkpoints(connection: Connection, look: Look) -> Sequence[str]:
    """Remove what is left of checkpoints that are gone; what only they needed is left to the sweep."""
    keep_sweeps_away(connection)
    ids = list(connection.execute(_halves).scalars())
    forget(connection, ids, time.time())
    return [f"removed what was left of {len(ids):,} checkpoints that are gone"] if ids else []


CHECKS = (Check(_NAME, look_at_checkpoints, repair_checkpoints),)
