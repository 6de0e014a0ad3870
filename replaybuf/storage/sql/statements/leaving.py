"""Groups that are about to leave, for callers who want to know what they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from sqlalchemy import select

from replaybuf.codec.payload import Codec
from replaybuf.errors import DecodeError
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, lane, payload
from replaybuf.storage.sql.statements.columns import STORED, uid_in
from replaybuf.storage.sql.statements.put_keys import scoped_key
from replaybuf.storage.sql.statements.rows import GroupRow, decode_leniently
from replaybuf.storage.values import NewGroup, StorageItem

#: Where a transaction collects the groups that leave in it, with their payloads; None if nobody asks.
Leaving = list[GroupRow] | None


def note(tx: Transaction, uids: Iterable[int], leaving: Leaving) -> None:
    """Read these groups of the buffer, leased or not, before they are removed, if anybody asks."""
    listed = sorted(uids)
    if leaving is None or not listed:
        return
    query = (
        select(*STORED, lane.c.task_name, lane.c.status, lane.c.step, payload.c.data)
        .select_from(group.join(lane, lane.c.id == group.c.lane).outerjoin(payload, payload.c.uid == group.c.uid))
        .where(lane.c.buffer == tx.scope.buffer, uid_in(tx, listed))
        .order_by(group.c.uid)
    )
    leaving += map(GroupRow.of, tx.execute(query))


def by_put(tx: Transaction, rows: Iterable[GroupRow], puts: Mapping[int, NewGroup]) -> dict[int, list[GroupRow]]:
    """Return groups that have left by the put for which they did, of several that were stored together in order.

    Replaced groups left for the put that named them, or has their key. Of the other groups of a task, which were
    evicted, each of its last puts has one: there was room for those before.
    """
    named = {uid: place for place, new in puts.items() for uid in new.replaces}
    keyed = {scoped_key(tx.scope.buffer, new.task_name, new.key): place for place, new in puts.items() if new.key}
    left: dict[int, list[GroupRow]] = {}
    evicted: dict[str, list[GroupRow]] = {}
    for row in rows:
        place = named.get(row.uid, keyed.get(row.column("scoped_key")))
        if place is None:
            evicted.setdefault(row.task_name, []).append(row)
        else:
            left.setdefault(place, []).append(row)
    for task, gone in evicted.items():
        places = [place for place, new in puts.items() if new.task_name == task]
        for number, row in enumerate(gone):
            left.setdefault(places[(number - len(gone)) % len(places)], []).append(row)
    return left


def told(rows: Iterable[GroupRow], codec: Codec) -> list[StorageItem]:
    """Return groups that have left, for their caller, without those whose metadata is damaged as well."""
    items: list[StorageItem] = []
    for row in rows:
        with contextlib.suppress(DecodeError):
            items += decode_leniently([row], codec)
    return items
