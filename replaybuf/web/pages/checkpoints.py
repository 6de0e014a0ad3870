"""The step checkpoints."""

from __future__ import annotations

from typing import Any

from replaybuf.storage.sql.inspection.groups import now_of
from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.storage.sql.inspection.record_pages import CHECKPOINTS, newest
from replaybuf.web.ask import Ask

_MOST = 500


def read_checkpoints(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return the checkpoints, newest first."""
    return {"now": now_of(tx), "rows": newest(tx, CHECKPOINTS, ask.text("buffer"), _MOST)}
