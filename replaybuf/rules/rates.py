"""How fast groups come and go at a moment, from totals that were read now and then."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

#: Rates are those of the last minute.
RATE_SECONDS = 60.0


def rate(totals: Sequence[tuple[float, float]]) -> float | None:
    """Return by how much a total grew in a second, in the minute before the last of its readings.

    A reading is a time in seconds and the total until then, the oldest first. Between two of them a total grows
    steadily; if it shrinks, as by a restore, nothing came. It is None without two readings at different times.
    """
    if not totals or totals[0][0] >= totals[-1][0]:
        return None
    now = totals[-1][0]
    start = max(totals[0][0], now - RATE_SECONDS)
    grown = 0.0
    for (since, before), (until, after) in pairwise(totals):
        if until > max(since, start):
            grown += max(0.0, after - before) * (until - max(since, start)) / (until - since)
    return grown / (now - start)
