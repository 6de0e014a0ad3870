"""Putting several groups, of one buffer or of several of a database, in one transaction: all of them or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replaybuf.errors import FullError, ReplayBufError
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.statements.fence import check_fence
from replaybuf.storage.sql.statements.new_rows import EncodedGroup
from replaybuf.storage.sql.statements.put import Stored, put_groups


@dataclass(frozen=True, slots=True)
class BufferGroup:
    """A group for one buffer."""

    scope: Scope
    group: EncodedGroup


def put_all(tx: Transaction, groups: Sequence[EncodedGroup]) -> list[int | Stored]:
    """Put groups into the buffer of the transaction. Raises the error of the first that can't be stored."""
    stored: list[int | Stored] = []
    for outcome in put_groups(tx, groups):
        if isinstance(outcome, ReplayBufError):
            raise outcome
        stored.append(outcome)
    return stored


def put_together(tx: Transaction, parts: Mapping[int, BufferGroup]) -> dict[int, int | Stored]:
    """Put groups into several buffers; return for each what `put_all` returns, by its place among all of the call.

    Buffers are locked in the order of their names, so that two such transactions don't wait for each other. A FullError
    has the place of its group.
    """
    stored: dict[int, int | Stored] = {}
    for place in sorted(parts, key=lambda place: parts[place].scope.buffer or ""):
        part = tx.of(parts[place].scope)
        check_fence(part)
        try:
            [stored[place]] = put_all(part, [parts[place].group])
        except FullError as error:
            error.place = place
            raise
    return stored
