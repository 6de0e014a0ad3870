"""What a host knows of the time since it was started, which passes evenly."""

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
