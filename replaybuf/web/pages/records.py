"""Who waits and why, checkpoints and events; and which buffer a page is about."""

from __future__ import annotations

from typing import Any

from replaybuf.rules.circumstances import in_force
from replaybuf.storage.sql.inspection.groups import buffers_of, check_buffer
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import newest
from replaybuf.storage.sql.inspection.waits import DrawQuestion, Explained, explain
from replaybuf.web.ask import LARGEST, Ask, facet_of, listed

_MOST_WAITS = 50


def read_waits(tx: ReadTransaction, buffer: str | None, task: str | None = None) -> dict[str, Any]:
    """Return a row for each wait, those that last longest first, their number, and whether there are several buffers.

    Of a buffer in which nobody waits, the rows are the draws of one group that somebody might do now, and `asked`.
    """
    found = explain(tx, buffer, DrawQuestion(task), asked=False)
    rows = [_row(one.buffer, wait, asked=one.asked) for one in found for wait in one.waits]
    rows.sort(key=lambda row: row["asked"])
    return {"waits": rows[:_MOST_WAITS], "waiting": sum(not row["asked"] for row in rows), "several": len(found) > 1}


def _row(buffer: str, one: Explained, *, asked: bool) -> dict[str, Any]:
    facts = [fact.text for fact in one.diagnosis.facts]
    return {**one.row(buffer), "asked": asked, "facts": facts, "limits": (one.limits and in_force(one.limits)) or {}}


_MOST_ROWS = 10_000
_CHECKPOINTS = ("step", "buffer", "created_at", "groups", "bytes")


def read_checkpoints(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the checkpoints, newest first."""
    return {"now": tx.now(), "rows": newest(tx, "checkpoints", ask.text("buffer"), _MOST_ROWS)}


def draw_checkpoints(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return a page of the checkpoints in the order that is asked for."""
    return {"page": listed(data["rows"], ask, _CHECKPOINTS)}


_EVENTS_SHOWN = 100
#: The columns by which events are chosen, and the parameters that say so.
_CHOSEN = {"kind": "kind", "task_name": "task", "worker": "worker"}
_COUNTED = "SELECT {column}, count(*) FROM events WHERE {where} GROUP BY 1"


def read_events(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return a page of events, newest first, of a kind, task and worker if asked for; and how many there are of each.

    `counts` are those of events that the other conditions choose.
    """
    given = {column: text for column, name in _CHOSEN.items() if (text := ask.text(name)) is not None}
    conditions = ["id < :before", *(f"{column} = :{column}" for column in given)]
    before = ask.number("before", LARGEST)
    found = newest(tx, "events", ask.text("buffer"), _EVENTS_SHOWN + 1, *conditions, before=before, **given)
    rows = found[:_EVENTS_SHOWN]
    return {
        "now": tx.now(),
        "kind": ask.text("kind"),
        "rows": rows,
        "counts": {column: _counts(tx, column, given, ask.text("buffer")) for column in _CHOSEN},
        "next": rows[-1]["id"] if len(found) > _EVENTS_SHOWN else None,
    }


def _counts(tx: ReadTransaction, column: str, given: dict[str, str], buffer: str | None) -> dict[str, int]:
    """Return how many events there are of each value of a column, of those that the other conditions choose."""
    values = {name: text for name, text in given.items() if name != column}
    if buffer is not None:
        values["buffer"] = buffer
    where = " AND ".join([f"{column} IS NOT NULL", *(f"{name} = :{name}" for name in values)])
    return {value: int(n) for value, n in tx.tuples(_COUNTED.format(column=column, where=where), **values)}


def draw_events(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return what events can be chosen by."""
    counts = {_CHOSEN[column]: numbers for column, numbers in data["counts"].items()}
    return {"facets": [facet_of(name, numbers, ask, parameter=name) for name, numbers in counts.items()]}


def one_buffer(tx: ReadTransaction, ask: Ask) -> tuple[str, list[str]]:
    """Return the buffer that is asked for, or the first, and all that there are. Raises InputError."""
    buffer, buffers = ask.text("buffer"), buffers_of(tx)
    check_buffer(tx, buffer)
    return buffer or next(iter(buffers), "default"), buffers
