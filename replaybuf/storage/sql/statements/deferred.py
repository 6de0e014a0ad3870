"""Payloads of which only a part is read: the head, and of the tail the arrays that somebody needs at once."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select

from replaybuf.codec.payload import Codec
from replaybuf.codec.payload_header import has_tail, head_size
from replaybuf.errors import DecodeError
from replaybuf.storage.sql.engine.transaction import Prepared, Transaction
from replaybuf.storage.sql.schema.tables import payload
from replaybuf.storage.sql.statements.rows import GroupRow

#: Nearly all heads are shorter. It is also enough to find out how long a longer one is.
_FIRST_BYTES = 64 << 10
_ALL = 1 << 30


def read_heads(tx: Transaction, codec: Codec, rows: Sequence[GroupRow], deferred: frozenset[str]) -> None:
    """Read the heads of payloads that weren't read, and the arrays in the database outside the fields `deferred`.

    Payloads without a tail are read whole. A tail that is kept apart is left to others. What is damaged is noticed when
    it is decoded.
    """
    apart = {uid for (uid,) in tx.fetch(_APART, tx.dialect.listed([row.uid for row in rows]))}
    rest: list[tuple[GroupRow, int]] = []
    firsts = tx.dialect.read_ranges(tx, [(row.uid, 0, _FIRST_BYTES) for row in rows])
    for row, first in zip(rows, firsts, strict=True):
        row.payload = first
        if first is not None and len(first) == _FIRST_BYTES:
            whole = row.uid in apart or not has_tail(first)
            rest.append((row, _ALL if whole else head_size(first) - _FIRST_BYTES))
    rest = [(row, size) for row, size in rest if size > 0]
    parts = tx.dialect.read_ranges(tx, [(row.uid, _FIRST_BYTES, size) for row, size in rest])
    for (row, _), part in zip(rest, parts, strict=True):
        row.payload = (row.payload or b"") + (part or b"")
    here = [row for row in rows if row.uid not in apart and row.payload is not None and has_tail(row.payload)]
    _read_arrays(tx, codec, here, deferred)


_APART = Prepared(
    lambda dialect: select(payload.c.uid).where(dialect.one_of(payload.c.uid, "uids"), payload.c.segment.is_not(None)),
    "uids",
)


def _read_arrays(tx: Transaction, codec: Codec, rows: Sequence[GroupRow], deferred: frozenset[str]) -> None:
    """Read the arrays outside these fields of payloads that are wholly in the database; keep only the heads."""
    wanted: list[tuple[GroupRow, int, tuple[int, int, int]]] = []
    for row in rows:
        assert row.payload is not None
        end = head_size(row.payload)
        row.payload, row.tail = row.payload[:end], {}
        try:
            arrays = codec.wanted(row.payload, deferred)
        except DecodeError as error:
            row.tail = error
            continue
        wanted += [(row, number, (row.uid, end + at, size)) for number, at, size in arrays]
    parts = tx.dialect.read_ranges(tx, [place for _, _, place in wanted])
    for (row, number, _), part in zip(wanted, parts, strict=True):
        row.tail[number] = part or b""
