"""Who puts and draws, and who waits for what."""

from __future__ import annotations

from typing import Any

from replaybuf.storage.sql.inspection.groups import now_of
from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.storage.sql.inspection.record_pages import WAITERS, WORKERS, newest
from replaybuf.web.ask import Ask
from replaybuf.web.pages.overview import SILENT

_MOST = 500


def read_workers(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return the workers, those heard of last first, and the waits that are under way."""
    buffer, now = ask.text("buffer"), now_of(tx)
    waiting = newest(tx, WAITERS, buffer, _MOST)
    return {
        "now": now,
        "workers": newest(tx, WORKERS, buffer, _MOST),
        "waiters": [{**one, "gone": now - one["seen_at"] >= SILENT} for one in waiting],
    }
