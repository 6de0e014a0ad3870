"""Who waits and why, checkpoints and events; and which buffer a page is about."""

from __future__ import annotations

from typing import Any

from replaybuf.rules.circumstances import in_force
from replaybuf.storage.sql.inspection.groups import buffers_of, check_buffer
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import CHECKPOINTS, EVENTS, newest
from replaybuf.storage.sql.inspection.waits import Explained, Question, explain
from replaybuf.web.ask import LARGEST, Ask

_MOST_WAITS = 50


def read_waits(tx: ReadTransaction, buffer: str | None, task: str | None = None) -> dict[str, Any]:
    """Return a row for each wait, those that last longest first, their number, and whether there are several buffers.

    Of a buffer in which nobody waits, the rows are the draws of one group that somebody might do now, and `asked`.
    """
    found = explain(tx, buffer, Question(task), asked=False)
    rows = [_row(one.buffer, wait, asked=one.asked) for one in found for wait in one.waits]
    rows.sort(key=lambda row: row["asked"])
    return {"waits": rows[:_MOST_WAITS], "waiting": sum(not row["asked"] for row in rows), "several": len(found) > 1}


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


_MOST_ROWS = 500


def read_checkpoints(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the checkpoints, newest first."""
    return {"now": tx.now(), "rows": newest(tx, CHECKPOINTS, ask.text("buffer"), _MOST_ROWS)}


_EVENTS_SHOWN = 100


def read_events(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return a page of events, newest first; those of one kind, if it is asked for."""
    kind = ask.text("kind")
    conditions = ["id < :before"] if kind is None else ["id < :before", "kind = :kind"]
    values: dict[str, Any] = {"before": ask.number("before", LARGEST)} | ({} if kind is None else {"kind": kind})
    found = newest(tx, EVENTS, ask.text("buffer"), _EVENTS_SHOWN + 1, *conditions, **values)
    rows = found[:_EVENTS_SHOWN]
    return {"now": tx.now(), "kind": kind, "rows": rows, "next": rows[-1]["id"] if len(found) > _EVENTS_SHOWN else None}


def one_buffer(tx: ReadTransaction, ask: Ask) -> tuple[str, list[str]]:
    """Return the buffer that is asked for, or the first, and all that there are. Raises InputError."""
    buffer, buffers = ask.text("buffer"), buffers_of(tx)
    check_buffer(tx, buffer)
    return buffer or next(iter(buffers), "default"), buffers
