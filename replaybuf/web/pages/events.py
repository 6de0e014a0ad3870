"""What happens seldom: leases that lapse, groups that are set aside, restores, ..."""

from __future__ import annotations

from typing import Any

from replaybuf.storage.sql.inspection.groups import now_of
from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.storage.sql.inspection.record_pages import EVENTS, newest
from replaybuf.web.ask import Ask

_SIZE = 100


def read_events(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return a page of events, newest first; those of one kind, if it is asked for."""
    kind = ask.text("kind")
    equal = {} if kind is None else {"kind": kind}
    found = newest(tx, EVENTS, ask.text("buffer"), _SIZE + 1, before=ask.number("before"), **equal)
    rows = found[:_SIZE]
    return {"now": now_of(tx), "kind": kind, "rows": rows, "next": rows[-1]["id"] if len(found) > _SIZE else None}
