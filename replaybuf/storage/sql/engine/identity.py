"""Was it committed? The identity of a write transaction, by which its outcome is found out over another connection.

Each connection of PostgreSQL has a row of its own in `rb_counter`, and each transaction begins by giving it a new
number: in the same statement that takes the lock, so that it costs no round trip. When the answer to COMMIT was lost,
the row says which transaction of that connection was the last to be committed. It is the transaction's own data: it
outlives the group that was put, a crash and restart of the server, and the move to another server.

PostgreSQL's own `txid_status` can't be asked. A crash loses transactions of the last moment together with the knowledge
that their ids were given: the server then gives the same ids to others, and reports those as committed.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sqlalchemy import Connection, select, text

from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.schema.tables import counter

#: What the names of the rows of connections in `rb_counter` begin with.
PREFIX = "connection "


@dataclass(frozen=True, slots=True)
class Identity:
    """A transaction: the row of its connection, its number there, its server process, and its id while it runs."""

    row: str
    number: int
    pid: int
    xid: str


def _begin(lock: str) -> str:
    # Numbers are microseconds since 1970, which says how old a row is; a clock that is set back doesn't repeat them.
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
    """Take the lock of writers, alone or shared, as the first statement of a transaction; return its identity."""
    row = connection.info.setdefault("replaybuf_row", f"{PREFIX}{uuid.uuid4().hex}")
    number, pid, xid, _ = connection.execute(_BEGIN[alone], {"row": row, "key": Lock.WRITERS}).one()
    return Identity(row, number, pid, xid)


# Both ids together can't be those of another transaction.
_END = text(
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid = :pid AND backend_xid::text = :xid"
)


def end_if_running(connection: Connection, identity: Identity) -> bool:
    """End a transaction that still runs, because its server process has not noticed the loss; whether it did."""
    return bool(connection.execute(_END, {"pid": identity.pid, "xid": identity.xid}).scalar_one())


def was_committed(connection: Connection, identity: Identity) -> bool:
    """Whether a transaction that doesn't run any more was committed."""
    found = connection.execute(select(counter.c.value).where(counter.c.name == identity.row)).scalar()
    return found is not None and int(found) == identity.number
