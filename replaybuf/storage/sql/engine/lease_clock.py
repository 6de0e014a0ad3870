"""The monotonic clock of leases in a SQLite database, unaffected by changes of the host's wall clock.

A host knows the time since its boot, including sleep; it can't be set, and is the same for all its processes. The
database has the moment of the boot by the wall clock, as of the host's first lease (`rb_info`); the sum is the time.
After a reboot, a host begins again with its wall clock. So does each of several hosts that share a file: their clocks
differ by as much as their wall clocks did then.

Where a boot has no id (systems other than Linux), the wall clock is used.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.read_transaction import ReadTransaction

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/time")


@cache
def this_start() -> str | None:
    """Return an id of the host's current boot, as seen by this process; None if the system has none."""
    namespace = ""  # containers may have a time namespace
    try:
        name = _BOOT_ID.read_text("utf-8").strip()
        with suppress(OSError):
            namespace = f" {_NAMESPACE.readlink()}"
    except (OSError, ValueError):
        return None
    return f"start of {name}{namespace}" if name and hasattr(time, "CLOCK_BOOTTIME") else None


def since_start() -> float:
    """Return the seconds since the host's boot, including sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def host_start(tx: ReadTransaction) -> float | None:
    """Return this host's boot time as recorded in the database, or None."""
    name = this_start()
    found = None if name is None else tx.value("SELECT value FROM rb_info WHERE name = :name", name=name)
    return None if found is None else float(found)


def lease_time(tx: ReadTransaction) -> float:
    """Return the time by which leases end, in seconds since the epoch."""
    start = host_start(tx)
    return time.time() if start is None else start + since_start()
