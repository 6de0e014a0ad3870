"""The monotonic clock of leases in a SQLite database, which passes evenly though the host's wall clock may be set.

A host knows how long ago it was started, with the time that it slept; this can't be set, and is the same for all of its
processes. The database has the moment of the start, as the wall clock told it when the host's first lease began
(`rb_info`); the sum is the time (`SqliteDialect.clock`). A host that is started again begins with its wall clock. So
does each of several hosts that share a file: their clocks differ by as much as their wall clocks did then.

Where a host can't be told from itself after another start (systems other than Linux), the wall clock is all there is.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/time")


@cache
def this_start() -> str | None:
    """Return a name for the time since this host was started, as this process sees it; None where there is none."""
    namespace = ""  # containers may have a time of their own
    try:
        name = _BOOT_ID.read_text("utf-8").strip()
        with suppress(OSError):
            namespace = f" {_NAMESPACE.readlink()}"
    except (OSError, ValueError):
        return None
    return f"start of {name}{namespace}" if name and hasattr(time, "CLOCK_BOOTTIME") else None


def since_start() -> float:
    """Return the seconds since this host was started, with the time that it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
