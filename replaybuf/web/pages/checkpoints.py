"""The step checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.record_pages import CHECKPOINTS, newest
from replaybuf.web.ask import Ask

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

_MOST = 500


def read_checkpoints(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return the checkpoints, newest first."""
    look = Look.over(tx)
    return {"now": look.now(), "rows": newest(look, CHECKPOINTS, ask.text("buffer"), _MOST)}
