"""Groups that match a query, and payloads: what takes more than the texts of `metadata`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, true

from replaybuf.codec.payload import Codec
from replaybuf.errors import DecodeError
from replaybuf.query import LogicNode, Node
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rules.policies import Order
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.inspection import buffers
from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.metadata import (
    Described,
    Listing,
    describe_group,
    extreme_rollouts,
    read_metadata,
)
from replaybuf.storage.sql.schema.tables import lane
from replaybuf.storage.sql.statements.matching import count_groups, find_uids, read_groups
from replaybuf.storage.sql.statements.rows import GroupRow

#: Decodes rollouts as dicts, whatever their class and those in their fields were, and needs neither torch nor Ray.
AS_DICTS = Codec(RolloutType(dict), tensors="numpy", object_refs="value", as_plain=True)


@dataclass(frozen=True, slots=True)
class Looking(Scope):
    """The scope of a reader: one buffer or all, including leased groups."""

    @property
    def lanes(self) -> ColumnElement[bool]:
        return true() if self.buffer is None else lane.c.buffer == self.buffer


@dataclass(slots=True)
class Shown(Described):
    """A group and its rollouts, and its payload if that was read."""

    stored: GroupRow | None = None

    def decode(self) -> list[dict[str, Any]]:
        """Return the full rollouts, if the payload was read. Raises DecodeError."""
        assert self.stored is not None
        try:
            return self.stored.decode(AS_DICTS).item
        except DecodeError as error:
            raise DecodeError(f"group {self.stored.uid}: {error} (without --full its metadata can be shown)") from error


def looking_at(tx: Transaction, buffer: str | None) -> Transaction:
    """Return the transaction, scoped to one buffer or all. Raises InputError when only other buffers exist."""
    buffers.check_buffer(Look.over(tx), buffer)
    return tx.of(Looking(buffer))


def list_groups(
    tx: Transaction, buffer: str | None, query: Node, order: Order, limit: int | None, *, count: bool
) -> Listing:
    """Return the groups that match, in order; with `count` also the number of all matches, beyond the limit."""
    look = Look.over(tx)
    tx = looking_at(tx, buffer)
    rows = read_metadata(look, [uid for uid, _ in find_uids(tx, query, order, limit)])
    matching = count_groups(tx, query, None) if count and len(rows) == limit else len(rows)
    return Listing(rows, matching, look.now(), several=buffer is None and len(buffers_of(tx)) > 1)


def extremes_matching(
    tx: Transaction, buffer: str | None, query: Node, count: int, *, worst: bool
) -> list[tuple[int, int]]:
    """Return what `extreme_rollouts` does, of the groups that match."""
    uids = [uid for uid, _ in find_uids(looking_at(tx, buffer), query, (), None)]
    return extreme_rollouts(Look.over(tx), buffer, None, count, worst=worst, among=uids)


def show_group(tx: Transaction, uid: int, *, payload: bool) -> Shown | None:
    """Return a group of any buffer, or None when it isn't there."""
    described = describe_group(Look.over(tx), uid)
    if described is None:
        return None
    stored = read_groups(looking_at(tx, None), [uid], LogicNode("$and", ())) if payload else []
    return Shown(described.group, described.rollouts, described.now, described.several, *stored)


def buffers_of(tx: Transaction) -> list[str]:
    """Return the names of the buffers in the database."""
    return buffers.buffers_of(Look.over(tx))


def tasks_of(tx: Transaction, buffer: str | None) -> list[str]:
    """Return the names of the tasks of one buffer or of all."""
    return buffers.tasks_of(Look.over(tx), buffer)


def now_of(tx: Transaction) -> datetime:
    """Return the present time by the store's clock, which decides when leases end."""
    return Look.over(tx).now()
