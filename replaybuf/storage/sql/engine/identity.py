"""The identity of a write transaction: by it, another connection can find out whether the transaction was committed.

Each PostgreSQL connection has its own row in `rb_counter`, and each transaction begins by giving it a new number, in
the statement that takes the lock, so that it costs no round trip. When the answer to COMMIT is lost, the row says which
transaction of that connection was committed last. It is the transaction's own data: it outlives the group that was put,
a crash and restart of the server, and the move to another server.

PostgreSQL's own `txid_status` can't be used. A crash loses the most recent transactions together with the record that
their ids were assigned: the server then assigns the same ids again, and reports those transactions as committed.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sqlalchemy import Connection, select, text

from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.schema.tables import counter

#: The prefix of the names of connections' rows in `rb_counter`.
PREFIX = "connection "


@dataclass(frozen=True, slots=True)
class Identity:
    """A transaction: its connection's row, its number there, its server process, and its id while it runs."""

    row: str
    number: int
    pid: int
    xid: str


def _begin(lock: str) -> str:
    # Numbers are microseconds since 1970, so that they show a row's age; a clock that is set back doesn't repeat them.
    return f"""
        WITH mark AS (
            INSERT INTO rb_counter AS mine (name, value)
            VALUES (:row, floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
            ON CONFLICT (name) DO UPDATE SET value = greatest(mine.value + 1, excluded.value)
            RETURNING value
        )
        SELECT value, pg_backend_pid(), (txid_current() % 4294967296)::text, {lock}(:key) FROM mark
    """  # noqa: S608


_BEGIN = {True: text(_begin("pg_advisory_xact_lock")), False: text(_begin("pg_advisory_xact_lock_shared"))}


def begin(connection: Connection, *, alone: bool) -> Identity:
    """Take the writers' lock, exclusive or shared, as the first statement of a transaction; return its identity."""
    row = connection.info.setdefault("replaybuf_row", f"{PREFIX}{uuid.uuid4().hex}")
    number, pid, xid, _ = connection.execute(_BEGIN[alone], {"row": row, "key": Lock.WRITERS}).one()
    return Identity(row, number, pid, xid)


# No other transaction has both ids.
_END = text(
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid = :pid AND backend_xid::text = :xid"
)


def end_if_running(connection: Connection, identity: Identity) -> bool:
    """End a transaction that still runs because its server process hasn't noticed the loss; return whether it ran."""
    return bool(connection.execute(_END, {"pid": identity.pid, "xid": identity.xid}).scalar_one())


def was_committed(connection: Connection, identity: Identity) -> bool:
    """Return whether a transaction that no longer runs was committed."""
    found = connection.execute(select(counter.c.value).where(counter.c.name == identity.row)).scalar()
    return found is not None and int(found) == identity.number
