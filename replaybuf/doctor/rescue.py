"""`replaybuf doctor --rescue`: snapshots of the readable groups of a damaged SQLite file.

`salvage` reads rows around the damage, `damaged_rows` makes them storable, and this module writes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import insert

from replaybuf.buffer.copies import SNAPSHOT_FILE
from replaybuf.checks import check_no_url
from replaybuf.doctor.damaged_rows import Found, Row, marked_by, name_of, payload_of, read_metadata, read_places
from replaybuf.doctor.salvage import Salvage, opened
from replaybuf.errors import NotADatabaseError, SnapshotError
from replaybuf.redact import redact_path
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.copies.snapshot import write_lanes, write_tallies
from replaybuf.storage.sql.copies.snapshot_file import payloads_digest, write_facts, write_file
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.schema.tables import group, payload
from replaybuf.storage.sql.statements.counts import FREE
from replaybuf.storage.sql.statements.cursors import write_cursors
from replaybuf.storage.sql.statements.leases import return_all
from replaybuf.storage.sql.statements.restore import raise_uid


@dataclass(frozen=True, slots=True)
class Rescued:
    """What was saved of one buffer: the snapshot's file, the number of groups, and the number lost, as far as known."""

    buffer: str
    file: str
    groups: int
    bytes: int
    lost: int


def rescue(path: Path, folder: Path, tell: Callable[[int, int], None] = lambda done, total: None) -> list[Rescued]:
    """Write what can be read of the SQLite file `path` into a snapshot in `folder`.

    If the file has several buffers, each gets its own folder in `folder`. Never writes to the file. Raises
    SnapshotError if the folder already has a snapshot, NotADatabaseError if nothing can be read, and PayloadStoreError
    while payloads that are kept apart can't be reached: they would all be missing.
    """
    check_no_url(folder)
    if folder.exists() and next(folder.glob(f"**/{SNAPSHOT_FILE}"), None) is not None:
        raise SnapshotError(f"there is a snapshot in {redact_path(str(folder))} already; give another folder")
    rescued = []
    with opened(path) as damaged:
        last, buffers = read_metadata(damaged)
        if damaged.guessed and not any(found.lanes or found.groups for found in buffers.values()):
            raise NotADatabaseError(f"{path} is no replaybuf database, or nothing of it can be read")
        total, done = sum(len(found.groups) for found in buffers.values()), 0
        for name, found in sorted(buffers.items()):
            inside = folder if len(buffers) == 1 else folder / quote(name, safe="")
            try:
                inside.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                shown = redact_path(str(inside))
                raise SnapshotError(f"can't make the folder {shown} for the snapshot: {error.strerror}") from error
            file = str(inside / SNAPSHOT_FILE)
            written = _write_snapshot(damaged, found, file, last, lambda n, before=done: tell(before + n, total))  # type: ignore[misc]
            done += len(found.groups)
            rescued.append(Rescued(name, file, written.groups, written.bytes, written.lost))
    return rescued


@dataclass(slots=True)
class _Written:
    """The number of groups saved, the bytes of their payloads, and the number lost, as far as known."""

    groups: int = 0
    bytes: int = 0
    lost: int = 0


def _write_snapshot(damaged: Salvage, found: Found, file: str, last: int, told: Callable[[int], None]) -> _Written:
    """Write a snapshot of a buffer like `buffer.save`; `last` is the last uid of the database."""
    written = _Written()

    def work(tx: Transaction) -> None:
        create_schema(tx, file)
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
    places = read_places(damaged)
    for done, (uid, row) in enumerate(sorted(found.groups.items()), 1):
        told(done)
        if (stored := payload_of(damaged, uid, places)) is None:
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


def _counts(found: Found, written: _Written, sizes: Counter[tuple[int, str]]) -> list[Row]:
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
