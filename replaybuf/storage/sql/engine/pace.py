"""How often something may be done."""

from __future__ import annotations

import time


class Pace:
    """At most `burst` times at once, and so many times `per_second` in the long run."""

    def __init__(self, burst: int, per_second: float) -> None:
        self._interval = 1 / per_second
        self._slack = (burst - 1) / per_second
        self._used_until = 0.0

    def pause(self) -> float:
        """Count another time; return in how many seconds it may be done."""
        now = time.monotonic()
        pause = max(0.0, self._used_until - self._slack - now)
        self._used_until = max(self._used_until, now) + self._interval
        return pause
