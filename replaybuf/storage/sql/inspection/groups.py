"""Groups that match a query, and payloads: what takes more than the texts of `metadata`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, true

from replaybuf.codec.payload import Codec
from replaybuf.errors import DecodeError
from replaybuf.query import LogicNode, Node
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rules.policies import Order
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.inspection.buffers import buffers_of, check_buffer
from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.metadata import Listing, read_metadata
from replaybuf.storage.sql.schema.tables import lane
from replaybuf.storage.sql.statements.matching import count_groups, find_uids, read_groups

#: Decodes rollouts as dicts, whatever their class and those in their fields were, and needs neither torch nor Ray.
AS_DICTS = Codec(RolloutType(dict), tensors="numpy", object_refs="value", as_plain=True)


@dataclass(frozen=True, slots=True)
class Looking(Scope):
    """The scope of a reader: one buffer or all, including leased groups."""

    @property
    def lanes(self) -> ColumnElement[bool]:
        return true() if self.buffer is None else lane.c.buffer == self.buffer


def looking_at(tx: Transaction, buffer: str | None) -> Transaction:
    """Return the transaction, scoped to one buffer or all. Raises InputError when only other buffers exist."""
    check_buffer(Look.over(tx), buffer)
    return tx.of(Looking(buffer))


def list_groups(
    tx: Transaction, buffer: str | None, query: Node, order: Order, limit: int | None, *, count: bool
) -> Listing:
    """Return the groups that match, in order; with `count` also the number of all matches, beyond the limit."""
    look = Look.over(tx)
    tx = looking_at(tx, buffer)
    rows = read_metadata(look, [uid for uid, _ in find_uids(tx, query, order, limit)])
    matching = count_groups(tx, query, None) if count and len(rows) == limit else len(rows)
    return Listing(rows, matching, look.now(), several=buffer is None and len(buffers_of(look)) > 1)


def read_rollouts(tx: Transaction, uid: int) -> list[dict[Any, Any]] | None:
    """Return the rollouts of a group of any buffer in full, as dicts, or None when it isn't there.

    Raises DecodeError.
    """
    found = read_groups(looking_at(tx, None), [uid], LogicNode("$and", ()))
    if not found:
        return None
    try:
        return found[0].decode(AS_DICTS).item
    except DecodeError as error:
        raise DecodeError(f"group {uid}: {error} (without --full its metadata can be shown)") from error
