"""A snapshot of the readable part of a buffer in a damaged SQLite file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlalchemy import insert

from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.copies.facts import payloads_digest, write_facts
from replaybuf.storage.sql.copies.snapshot import write_lanes, write_tallies
from replaybuf.storage.sql.copies.snapshot_file import write_file
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.rescue.metadata import Found, name_of
from replaybuf.storage.sql.inspection.rescue.rows import Row, marked_by, payload_of
from replaybuf.storage.sql.inspection.rescue.salvage import Salvage
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.schema.tables import group, payload
from replaybuf.storage.sql.statements.cursors import write_cursors
from replaybuf.storage.sql.statements.leases import return_all
from replaybuf.storage.sql.statements.steps import FREE
from replaybuf.storage.sql.statements.uids import raise_uid


@dataclass(slots=True)
class Written:
    """The number of groups saved, the bytes of their payloads, and the number lost, as far as known."""

    groups: int = 0
    bytes: int = 0
    lost: int = 0


def write_snapshot(damaged: Salvage, found: Found, file: str, last: int, told: Callable[[int], None]) -> Written:
    """Write a snapshot of a buffer like `buffer.save`; `last` is the last uid of the database."""
    written = Written()

    def work(tx: Transaction) -> None:
        create_schema(tx.connection, file)
        ids = write_lanes(tx, list(found.lanes.values()))
        sizes: Counter[tuple[int, str]] = Counter()
        homes = {name_of(row): lane_id for lane_id, row in found.lanes.items()}
        digest = 0
        for row, stored in _groups(damaged, found, told):
            home = homes[(*name_of(found.lanes[row["lane"]])[:-1], False)]
            sizes[(home, str(Tally.SIZE if row["lease"] is None else Tally.LEASED))] += 1
            tx.execute(insert(group), {**row, "lane": ids[row["lane"]]})
            tx.execute(insert(payload), stored)
            digest += payloads_digest([stored])
            written.groups += 1
            written.bytes += row["bytes"]
        write_tallies(tx, _counts(found, written, sizes), ids)
        raise_uid(tx, last)
        write_cursors(tx, found.cursors)
        return_all(tx)
        write_facts(tx, {}, digest)

    write_file(file, work)
    return written


def _groups(damaged: Salvage, found: Found, told: Callable[[int], None]) -> Iterator[tuple[Row, Row]]:
    """Yield the groups with undamaged payloads, as rows of both tables."""
    keys: set[str] = set()
    for done, (uid, row) in enumerate(sorted(found.groups.items()), 1):
        told(done)
        if (stored := payload_of(damaged, uid)) is None:
            continue
        home = found.lanes[row["lane"]]
        row["bytes"] = len(stored["data"])
        if row["marks"] is None:
            if (made := marked_by(stored["data"], home["status"])) is None:
                continue
            row |= made
        if home["leased"] and None in (row["lease"], row["leased_until"]):
            row |= {"lease": row["lease"] or uid, "leased_until": 0.0}
        elif not home["leased"]:
            row |= FREE
        if row["pinned_staleness"] is None and None in (row["oldest_step"], home["step"]):
            row["pinned_staleness"] = 0
        if row["scoped_key"] in keys:
            row["scoped_key"] = None
        elif row["scoped_key"] is not None:
            keys.add(row["scoped_key"])
        yield row, stored


def _counts(found: Found, written: Written, sizes: Counter[tuple[int, str]]) -> list[Row]:
    """Return the tallies, with lost groups counted as deleted."""
    there = (str(Tally.SIZE), str(Tally.LEASED))
    counts = Counter({key: n for key, n in found.counted.items() if key[1] not in there})
    before: Counter[int] = Counter()
    for source, sign in ((found.counted, 1), (sizes, -1)):
        for (lane_id, name), n in source.items():
            if name in there:
                before[lane_id] += sign * n
    for lane_id, missing in before.items():
        counts[(lane_id, str(Tally.DELETED))] += max(0, missing)
    expected = sum(n for (_, name), n in found.counted.items() if name in there)
    written.lost = max(len(found.uids) - written.groups, expected - written.groups, 0)
    counts.update(sizes)
    return [{"lane": lane_id, "name": name, "amount": n} for (lane_id, name), n in counts.items() if n]
