"""Who puts and draws, and who waits for what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.record_pages import WORKERS, newest
from replaybuf.web.ask import Ask
from replaybuf.web.pages.waits import read_waits

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

_MOST = 500


def read_workers(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return the workers, those heard of last first, and the waits that are under way."""
    look, buffer = Look.over(tx), ask.text("buffer")
    return {"now": look.now(), "workers": newest(look, WORKERS, buffer, _MOST), **read_waits(tx, buffer)}
