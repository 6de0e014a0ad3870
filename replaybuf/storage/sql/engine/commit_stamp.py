"""Commit stamps: whether a transaction whose answer to COMMIT was lost was committed, on PostgreSQL.

Each connection has a row in `rb_info` with the number of its last committed transaction, and the first message of
each write raises that number, on a condition (`raise_stamp`). A transaction whose answer is lost is repeated with its
own row and number:

- If the first one still runs on the server, it holds the row, and the repeat waits for its end.
- If it was committed, the row has the number already: nothing is changed, the client is told so (`is_raised`) before it
  sends anything else, and the repeat only commits. The result is that of the first one.
- If it was rolled back, or never arrived, the repeat raises the number and goes on.

A transaction can be committed only after its client has heard that the number was raised. So a first message that
arrives after the repeat changes nothing.

A commit waits for a synchronous standby after it is in the primary's own WAL: without a limit, and with all locks of
its transaction. If the wait is interrupted, the commit stays on the primary, visible to all. Later commits follow it
in the WAL and wait for both. So one whose wait was given up is in doubt until a later one was confirmed: of a repeat,
whose refused upsert has locked the row, which is in the WAL, too; or of `READ_STAMP`.
"""

from __future__ import annotations

import time
import uuid
from typing import NamedTuple

#: The name prefix of connections' rows in `rb_info`.
PREFIX = "connection "


class Stamp(NamedTuple):
    """The row of a connection in `rb_info`, and the number of a transaction there."""

    row: str
    number: int


def next_stamp(last: Stamp | None) -> Stamp:
    """Return the stamp of the next transaction of a connection, after its last one."""
    # Numbers are microseconds since 1970, which also give a row's age; they increase even if the clock is set back.
    now = int(time.time() * 1_000_000)
    if last is None:
        return Stamp(f"{PREFIX}{uuid.uuid4().hex}", now)
    return last._replace(number=max(last.number + 1, now))


def raise_stamp(stamp: Stamp) -> str:
    """Return the statement that raises the number of a stamp's row to its own, unless it is as high already."""
    return (
        f"INSERT INTO rb_info AS mark (name, number) VALUES ('{stamp.row}', {stamp.number:d}) "  # noqa: S608
        "ON CONFLICT (name) DO UPDATE SET number = excluded.number WHERE mark.number < excluded.number;"
    )


def is_raised(status: str) -> bool:
    """Return whether the number was raised, by the server's answer to a message that ends with `raise_stamp`."""
    return status == "INSERT 0 1"


#: Returns the number of a row, once no transaction that holds it runs any more; a missing row gets the number $2. It
#: changes the row, so that its commit follows in the WAL, and is waited for.
READ_STAMP = """
    INSERT INTO rb_info AS mark (name, number) VALUES ($1, $2)
    ON CONFLICT (name) DO UPDATE SET number = mark.number RETURNING number
"""
