"""`replaybuf doctor --rescue`: a snapshot of what can be read of a damaged SQLite file."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, insert

from replaybuf.buffer.reader import SNAPSHOT_FILE
from replaybuf.doctor.groups import LOST
from replaybuf.doctor.mending import Row, marked_by, mended_group, mended_lane, payload_of
from replaybuf.doctor.salvage import ERRORS, Salvage, opened
from replaybuf.errors import NotADatabaseError, SnapshotError
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.copies.facts import payloads_digest, write_facts
from replaybuf.storage.sql.copies.snapshot import write_lanes, write_tallies
from replaybuf.storage.sql.copies.snapshot_file import close_file, file_database, partial_file, publish
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.schema.tables import cursor, group, lane, payload
from replaybuf.storage.sql.statements.cursors import write_cursors
from replaybuf.storage.sql.statements.lanes import Scope
from replaybuf.storage.sql.statements.leases import return_all
from replaybuf.storage.sql.statements.uids import raise_uid
from replaybuf.storage.values import Cursor

_TARGET = Scope()
_DEFAULT = "default"


@dataclass(slots=True)
class Rescued:
    """What was saved of one buffer: the file of the snapshot, how many groups; how many are lost, as far as known."""

    buffer: str
    file: str
    groups: int = 0
    bytes: int = 0
    lost: int = 0


@dataclass(slots=True)
class _Found:
    """What can be read of one buffer but for its payloads."""

    lanes: dict[int, Row] = field(default_factory=dict)
    groups: dict[int, Row] = field(default_factory=dict)
    uids: set[int] = field(default_factory=set)  # those of which anything knows
    counted: Counter[tuple[int, str]] = field(default_factory=Counter)
    cursors: list[Cursor] = field(default_factory=list)


def rescue(path: str, folder: Path, tell: Callable[[int, int], None] = lambda done, total: None) -> list[Rescued]:
    """Write what can be read of the SQLite file `path` into a snapshot in `folder`.

    Where it has several buffers, each has a folder of its own in it. Never writes to the file. Raises SnapshotError
    when a snapshot is in the folder already, and NotADatabaseError when nothing can be read.
    """
    if folder.exists() and next(folder.glob(f"**/{SNAPSHOT_FILE}"), None) is not None:
        raise SnapshotError(f"there is a snapshot in {folder} already; give another folder")
    rescued = []
    with opened(Path(path)) as damaged:
        last, buffers = _read_metadata(damaged)
        if damaged.guessed and not any(found.lanes or found.groups for found in buffers.values()):
            raise NotADatabaseError(f"{path} is no replaybuf database, or nothing of it can be read")
        total, done = sum(len(found.groups) for found in buffers.values()), 0
        for name, found in sorted(buffers.items()):
            inside = folder if len(buffers) == 1 else folder / quote(name, safe="")
            try:
                inside.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SnapshotError(f"can't make the folder {inside} for the snapshot: {error}") from error
            one = Rescued(name, str(inside / SNAPSHOT_FILE))
            asyncio.run(_write(damaged, found, one, last, lambda n, before=done: tell(before + n, total)))  # type: ignore[misc]
            done += len(found.groups)
            rescued.append(one)
    return rescued


# Reading


def _read_metadata(damaged: Salvage) -> tuple[int, dict[str, _Found]]:
    """The last uid, and what there is of each buffer."""
    lanes = _read_lanes(damaged)
    indexed = _read_index(damaged)
    names = [column.name for column in group.columns if column.name in damaged.columns("rb_group")]
    rows = damaged.table("rb_group", names, known=sorted(indexed))
    mended = {uid: mended_group(uid, dict(zip(names, values, strict=True))) for uid, values in rows.items()}
    # Of some only the index knows. Their payloads may be whole, and say all but tags, key and priority.
    mended |= {uid: mended_group(uid, {}) for uid in indexed.keys() - rows.keys()}
    for uid, row in mended.items():
        if row["lane"] not in lanes:
            row["lane"] = indexed.get(uid, -1)
        if row["lane"] not in lanes:
            row |= {"lane": _lost_lane(lanes), "error": "its task and status were lost"}
    buffers = {one["buffer"]: _Found() for one in lanes.values()} or {_DEFAULT: _Found()}
    for lane_id, one in lanes.items():
        buffers[one["buffer"]].lanes[lane_id] = one
    for uid, row in mended.items():
        buffers[lanes[row["lane"]]["buffer"]].groups[uid] = row
    for uid, lane_id in {uid: row["lane"] for uid, row in mended.items()}.items() | indexed.items():
        if lane_id in lanes:
            buffers[lanes[lane_id]["buffer"]].uids.add(uid)
    _read_counts(damaged, buffers)
    _read_cursors(damaged, buffers)
    counters = [row[0] for row in damaged.table("rb_counter", ["value"]).values() if isinstance(row[0], int)]
    return max((*rows, *indexed, *counters, 0)), buffers


def _read_lanes(damaged: Salvage) -> dict[int, Row]:
    """The lanes by id, with one for free groups beside each one for leased groups."""
    # Most of a lane is in the index over its names, too; the table knows more.
    few = ["id", "buffer", "task_name", "status", "leased"]
    query = f"SELECT {', '.join(few)} FROM rb_lane INDEXED BY sqlite_autoindex_rb_lane_1 WHERE buffer >= ''"  # noqa: S608
    found = [dict(zip(few, row, strict=True)) for row in damaged.indexed(query)]
    names = [column.name for column in lane.columns if column.name in damaged.columns("rb_lane")]
    known = [row["id"] for row in found if isinstance(row["id"], int)]
    rows = damaged.table("rb_lane", names, known=known) if names else {}
    found += [dict(zip(names, row, strict=True)) for row in rows.values()]
    lanes: dict[int, Row] = {}
    taken: set[tuple[Any, ...]] = set()
    for mended in filter(None, map(mended_lane, reversed(found))):
        name = _name(mended)
        if mended["id"] not in lanes and name not in taken:
            lanes[mended["id"]] = mended
            taken.add(name)
    for one in list(lanes.values()):
        if one["leased"] and (*_name(one)[:-1], False) not in taken:
            new = max(lanes) + 1
            lanes[new] = {**one, "id": new, "leased": False}
    return lanes


def _name(one: Row) -> tuple[Any, ...]:
    return one["buffer"], one["task_name"], one["status"], one["leased"]


def _lost_lane(lanes: dict[int, Row]) -> int:
    """The lane of groups of which nobody knows any more where they belong, made if there is none."""
    names = {"buffer": _DEFAULT, "task_name": LOST, "status": str(Status.FAILED), "leased": False}
    if (there := next((one["id"] for one in lanes.values() if one.items() >= names.items()), None)) is not None:
        return int(there)
    new = max(lanes, default=0) + 1
    lanes[new] = dict.fromkeys(column.name for column in lane.columns) | names | {"id": new}
    return new


def _read_index(damaged: Salvage) -> dict[int, int]:
    """The lanes of groups, by uid, as an index has them."""
    found = {}
    for order in ("lane, uid", "lane DESC, uid DESC"):
        query = f"SELECT uid, lane FROM rb_group INDEXED BY rb_group_in_order WHERE lane >= 0 ORDER BY {order}"  # noqa: S608
        rows = damaged.indexed(query)
        found.update({uid: lane_id for uid, lane_id in rows if isinstance(uid, int) and isinstance(lane_id, int)})
    return found


def _read_counts(damaged: Salvage, buffers: dict[str, _Found]) -> None:
    owner = {lane_id: found for found in buffers.values() for lane_id in found.lanes}
    for lane_id, name, amount in damaged.table("rb_tally", ["lane", "name", "amount"]).values():
        if lane_id in owner and isinstance(name, bytes) and isinstance(amount, int):
            text = name.decode(errors="replace")
            if text in set(Tally):
                owner[lane_id].counted[(lane_id, text)] += amount


def _read_cursors(damaged: Salvage, buffers: dict[str, _Found]) -> None:
    names = [column.name for column in cursor.columns]
    for row in damaged.table("rb_cursor", names).values():
        of = dict(zip(names, row, strict=True))
        try:
            owner, moved = (
                of["buffer"].decode(),
                Cursor(of["name"].decode(), of["version"], of["position"], of["value"]),
            )
        except (*ERRORS, AttributeError):
            continue
        if of["checkpoint"] == 0 and owner in buffers and isinstance(moved.value, bytes):
            buffers[owner].cursors.append(moved)


# Writing


async def _write(damaged: Salvage, found: _Found, one: Rescued, last: int, told: Callable[[int], None]) -> None:
    """Write a snapshot of a buffer, as `buffer.save` does."""

    def work(connection: Connection) -> None:
        create_schema(connection, one.file)
        ids = write_lanes(connection, _TARGET, list(found.lanes.values()))
        sizes: Counter[tuple[int, str]] = Counter()
        homes = {_name(row): lane_id for lane_id, row in found.lanes.items()}
        digest = 0
        for row, stored in _groups(damaged, found, told):
            home = homes[(*_name(found.lanes[row["lane"]])[:-1], False)]
            sizes[(home, str(Tally.SIZE if row["lease"] is None else Tally.LEASED))] += 1
            connection.execute(insert(group), {**row, "lane": ids[row["lane"]]})
            connection.execute(insert(payload), stored)
            digest += payloads_digest([stored])
            one.groups += 1
            one.bytes += row["bytes"]
        write_tallies(connection, _counts(found, one, sizes), ids)
        raise_uid(connection, last)
        write_cursors(connection, _TARGET, found.cursors)
        return_all(connection, _TARGET)
        write_facts(connection, {}, digest)

    with partial_file(one.file) as partial:
        target = file_database(partial)
        try:
            await target.write(work)
        finally:
            await close_file(target)
        publish(partial, one.file)


def _groups(damaged: Salvage, found: _Found, told: Callable[[int], None]) -> Iterator[tuple[Row, Row]]:
    """The groups whose payloads are as they were written, as rows of both tables."""
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
            row |= {"lease": None, "leased_until": None}
        if row["pinned_staleness"] is None and None in (row["oldest_step"], home["step"]):
            row["pinned_staleness"] = 0
        if row["scoped_key"] in keys:
            row["scoped_key"] = None
        elif row["scoped_key"] is not None:
            keys.add(row["scoped_key"])
        yield row, stored


def _counts(found: _Found, one: Rescued, sizes: Counter[tuple[int, str]]) -> list[Row]:
    """What was counted, with those that are lost as deleted ones."""
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
    one.lost = max(len(found.uids) - one.groups, expected - one.groups, 0)
    counts.update(sizes)
    return [{"lane": lane_id, "name": name, "amount": n} for (lane_id, name), n in counts.items() if n]
