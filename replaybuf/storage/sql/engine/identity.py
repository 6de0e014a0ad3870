"""The identity of a write transaction: by it, another connection can find out whether the transaction was committed.

Each PostgreSQL connection has its own row in `rb_counter`, and each transaction gives it a new number, in a statement
that it needs anyway, so that this costs no round trip. When the answer to COMMIT is lost, the row says which
transaction of that connection was committed last. It is the transaction's own data: it outlives the group that was put,
a crash and restart of the server, and the move to another server.

PostgreSQL's own `txid_status` can't be used. A crash loses the most recent transactions together with the record that
their ids were assigned: the server then assigns the same ids again, and reports those transactions as committed.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, bindparam, select, text
from sqlalchemy.dialects.postgresql import insert

from replaybuf.storage.sql.schema.tables import counter

#: The prefix of the names of connections' rows in `rb_counter`.
PREFIX = "connection "
#: Begins every query of `marking`.
MARKING = "WITH mark AS"
_KNOWN = "replaybuf_identity"


class Identity(NamedTuple):
    """A transaction: its connection's row, its number there, and the advisory lock that it holds while it runs."""

    row: str
    number: int
    lock: int

    @property
    def mark(self) -> tuple[str, int]:
        """The values of `MARK`."""
        return self.row, self.number


def next_identity(connection: Connection) -> Identity:
    """Return the identity of the next transaction of a connection."""
    # Numbers are microseconds since 1970, so that they show a row's age; a clock that is set back doesn't repeat them.
    now, last = int(time.time() * 1_000_000), connection.info.get(_KNOWN)
    if last is None:
        drawn = uuid.uuid4()
        identity = Identity(f"{PREFIX}{drawn.hex}", now, drawn.int >> 65)
    else:
        identity = last._replace(number=max(last.number + 1, now))
    connection.info[_KNOWN] = identity
    return identity


#: The parameters of `marking`.
MARK = ("mark_row", "mark_number")


def marking(query: Select[Any]) -> Select[Any]:
    """Return the query as a statement that also writes the mark of the transaction."""
    mark = insert(counter).values({"name": bindparam(MARK[0]), "value": bindparam(MARK[1])})
    mark = mark.on_conflict_do_update(index_elements=[counter.c.name], set_={"value": mark.excluded.value})
    return query.add_cte(mark.cte("mark"))


def mark_statement(mark: tuple[str, int]) -> str:
    """Return the statement that writes a mark, with its values."""
    row, number = mark
    values = f"('{row}', {number:d}) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
    return f"INSERT INTO rb_counter (name, value) VALUES {values}"  # noqa: S608


# As `pg_locks` shows an advisory lock of 64 bits.
_END = text("""
    SELECT count(pg_terminate_backend(pid)) FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND classid = :high AND objid = :low
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")


def end_if_running(connection: Connection, identity: Identity) -> bool:
    """End a transaction that still runs because its server process hasn't noticed the loss; return whether it ran."""
    high, low = divmod(identity.lock, 1 << 32)
    return bool(connection.execute(_END, {"high": high, "low": low}).scalar_one())


def was_committed(connection: Connection, identity: Identity) -> bool:
    """Return whether a transaction that no longer runs was committed."""
    found = connection.execute(select(counter.c.value).where(counter.c.name == identity.row)).scalar()
    return found is not None and int(found) == identity.number
