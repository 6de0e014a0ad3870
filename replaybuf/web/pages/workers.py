"""Who puts and draws, and who waits for what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.record_pages import WAITERS, WORKERS, newest
from replaybuf.web.ask import Ask
from replaybuf.web.pages.overview import SILENT

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

_MOST = 500


def read_workers(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return the workers, those heard of last first, and the waits that are under way."""
    look, buffer = Look.over(tx), ask.text("buffer")
    now, waiting = look.now(), newest(look, WAITERS, buffer, _MOST)
    return {
        "now": now,
        "workers": newest(look, WORKERS, buffer, _MOST),
        "waiters": [{**one, "gone": now - one["seen_at"] >= SILENT} for one in waiting],
    }
