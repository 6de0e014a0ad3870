"""Who waits, for what and why; where nobody does, what a draw would find."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replaybuf.rules.circumstances import in_force
from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.waits import Explained, Question, explain

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

_MOST = 50


def read_waits(tx: Transaction, buffer: str | None, task: str | None = None) -> dict[str, Any]:
    """Return a row for each wait, those that last longest first, their number, and whether there are several buffers.

    Of a buffer in which nobody waits, the rows are the draws of one group that somebody might do now, and `asked`.
    """
    found = explain(Look.over(tx), buffer, Question(task), asked=False, tx=tx)
    rows = [_row(one.buffer, wait, asked=one.asked) for one in found for wait in one.waits]
    rows.sort(key=lambda row: row["asked"])
    return {"waits": rows[:_MOST], "waiting": sum(not row["asked"] for row in rows), "several": len(found) > 1}


def _row(buffer: str, one: Explained, *, asked: bool) -> dict[str, Any]:
    return {
        "buffer": buffer,
        "asked": asked,
        **one.fields,
        "reason": str(one.diagnosis.reason),
        "sentence": one.diagnosis.sentence,
        "facts": [fact.text for fact in one.diagnosis.facts],
        "limits": {} if one.limits is None else in_force(one.limits),
    }
