"""What happens seldom: leases that lapse, groups that are set aside, restores, ..."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.record_pages import EVENTS, newest
from replaybuf.web.ask import LARGEST, Ask

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

_SIZE = 100


def read_events(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return a page of events, newest first; those of one kind, if it is asked for."""
    look, kind = Look.over(tx), ask.text("kind")
    conditions = ["id < :before"] if kind is None else ["id < :before", "kind = :kind"]
    values: dict[str, Any] = {"before": ask.number("before", LARGEST)} | ({} if kind is None else {"kind": kind})
    found = newest(look, EVENTS, ask.text("buffer"), _SIZE + 1, *conditions, **values)
    rows = found[:_SIZE]
    return {"now": look.now(), "kind": kind, "rows": rows, "next": rows[-1]["id"] if len(found) > _SIZE else None}
