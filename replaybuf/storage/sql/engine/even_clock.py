"""The clock of leases in a SQLite database: it passes evenly, though the wall clock of its host may be set.

A host knows how long ago it was started, with the time that it slept; this can't be set, and is the same for all of its
processes. The database has the moment of the start, as the wall clock told it when the host's first lease began
(`rb_info`); the sum is the time. A host that is started again begins with its wall clock. So does each of several hosts
that share a file: their clocks differ by as much as their wall clocks did then.

Where a host can't be told from itself after another start (systems other than Linux), the wall clock is all there is.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, insert, select

from replaybuf.storage.sql.engine.host_clock import since_start, this_start
from replaybuf.storage.sql.engine.prepared import Prepared
from replaybuf.storage.sql.schema.tables import info

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.transaction import Transaction


def read(tx: Transaction) -> float:
    """Return the time in seconds since the epoch."""
    start = _start(tx)
    return time.time() if start is None else start + since_start()


def start(tx: Transaction) -> float:
    """Return the time in seconds since the epoch, and let it pass evenly from now on (in a transaction that writes)."""
    name = this_start()
    if name is not None and _start(tx) is None:
        tx.execute(insert(info).values(name=name, value=repr(time.time() - since_start())))
    return read(tx)


def _start(tx: Transaction) -> float | None:
    """Return when this host was started, as far as the database knows."""
    name = this_start()
    found = () if name is None else tx.fetch(_READ, name)
    return float(found[0][0]) if found else None


_READ = Prepared(lambda _: select(info.c.value).where(info.c.name == bindparam("name")), "name")
