"""`replaybuf doctor --rescue`: snapshots of the readable groups of a damaged SQLite file.

`salvage` reads rows around the damage; here they are made storable, impossible values left out, and written.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import insert

from replaybuf.buffer.copies import SNAPSHOT_FILE
from replaybuf.checks import check_no_url
from replaybuf.codec.stored import Places, joined, read_tails
from replaybuf.doctor.repairs import LOST, WHY_LOST, marks_anew
from replaybuf.doctor.salvage import ERRORS, Salvage, opened
from replaybuf.errors import NotADatabaseError, PayloadStoreError, ReplayBufError, SnapshotError
from replaybuf.redact import redact_path
from replaybuf.rollouts.marks import Marks
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.copies.snapshot import write_lanes, write_tallies
from replaybuf.storage.sql.copies.snapshot_file import PAYLOADS_OF, payloads_digest, write_facts, write_file
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.group_payloads import AS_DICTS
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.schema.tables import IDENTITY, cursor, group, lane, payload
from replaybuf.storage.sql.statements.counts import FREE
from replaybuf.storage.sql.statements.cursors import write_cursors
from replaybuf.storage.sql.statements.leases import return_all
from replaybuf.storage.sql.statements.restore import raise_uid
from replaybuf.storage.sql.statements.rows import rescoped_key
from replaybuf.storage.values import Cursor

Row = dict[str, Any]

_BIG = 2**63


def _text(value: Any) -> str | None:
    try:
        return value.decode() if isinstance(value, bytes) else None
    except UnicodeDecodeError:
        return None


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and -_BIG <= value < _BIG else None


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _json(value: Any) -> Any:
    try:
        return json.loads(_text(value) or "null")
    except ValueError:
        return None


def _marks(value: Any) -> Any:
    """Return the marks if they are valid: lists of equal length, one entry per rollout."""
    found = _json(value)
    try:
        marks = Marks.from_json(found)
        lists = [marks.oldest, marks.newest, marks.reward, *([marks.expired, marks.staleness] if marks.expired else [])]
        whole = len({len(one or []) for one in lists}) == 1 and isinstance(marks.masked, int | None)
        return found if whole else None
    except (TypeError, AttributeError):
        return None


def _tags(value: Any) -> Any:
    found = _json(value)
    return found if isinstance(found, dict) else None


def _true(value: Any) -> bool:
    return bool(value == 1)


def _scoped_key(value: Any) -> str | None:
    try:
        return rescoped_key(_text(value) or "", "default")
    except ValueError:
        return None


_READ: Mapping[str, Callable[[Any], Any]] = {
    "marks": _marks,
    "tags": _tags,
    "scoped_key": _scoped_key,
    "error": _text,
    "worker": _text,
    "holder": _text,
    "mixed": _true,
    **dict.fromkeys(("priority", "created_at", "reward", "leased_until", "archived_at"), _float),
}
# Defaults for required columns that can't be read. (Marks are rebuilt from the payload.)
_ELSE: Row = {"priority": 1.0, "times_sampled": 0, "created_at": 0.0, "bytes": 0, "deliveries": 0, "lane": -1}


def mended_group(uid: int, row: Row) -> Row:
    """Return a storable row of `rb_group`. Keys of races are left out: the races begin anew."""
    mended: Row = {"uid": uid}
    for column in group.columns:
        if column.name == "uid":
            continue
        read: Callable[[Any], Any] = _READ.get(column.name, _int)
        value = read(row.get(column.name))
        mended[column.name] = _ELSE.get(column.name) if value is None else value
    return mended | {"uniform_key": None, "prioritized_key": None}


def mended_lane(row: Row) -> Row | None:
    """Return a storable row of `rb_lane`, or None when it doesn't identify the lane."""
    names = {name: _text(row.get(name)) for name in ("buffer", "task_name", "status")}
    if None in names.values() or names["status"] not in set(Status) or _int(row.get("id")) is None:
        return None
    mended: Row = dict.fromkeys(column.name for column in lane.columns)
    return mended | names | {"id": row["id"], "leased": _true(row.get("leased")), "step": _int(row.get("step"))}


def read_places(damaged: Salvage) -> Places:
    """Return the places of payloads that are kept apart, as `ReadTransaction.places` does."""
    urls = damaged.table("rb_place", ["url"]) if damaged.columns("rb_place") else {}
    facts = {_text(name): _text(value) for name, value in damaged.table("rb_info", ["name", "value"]).values()}
    return {number: _text(url) or "" for number, (url,) in urls.items()}, facts.get(PAYLOADS_OF, facts.get(IDENTITY))


def payload_of(damaged: Salvage, uid: int, places: Places) -> Row | None:
    """Return a group's row of `rb_payload` with the whole payload, or None when that is damaged.

    Raises PayloadStoreError where what is kept apart of it can't be reached.
    """
    try:
        row = damaged.one("rb_payload", ["data", "outline", "prompt"], uid)
        if row is None:
            return None
        [tail] = read_tails([row[0]], places)
        data = joined(row[0], tail)
        AS_DICTS.verify(data)
    except PayloadStoreError:
        raise
    except (*ERRORS, ReplayBufError):
        return None
    outline = found if isinstance(found := _json(row[1]), list) else []
    return {"uid": uid, "outline": outline, "prompt": _text(row[2]), "data": data}


_DEFAULT = "default"


@dataclass(slots=True)
class ReadableBuffer:
    """The readable part of one buffer."""

    lanes: dict[int, Row] = field(default_factory=dict)
    groups: dict[int, Row] = field(default_factory=dict)
    uids: set[int] = field(default_factory=set)  # all that are mentioned anywhere
    counted: Counter[tuple[int, str]] = field(default_factory=Counter)
    cursors: list[Cursor] = field(default_factory=list)


def read_metadata(damaged: Salvage) -> tuple[int, dict[str, ReadableBuffer]]:
    """Return the last uid, and the readable part of each buffer."""
    lanes = _read_lanes(damaged)
    indexed = _read_index(damaged)
    names = [column.name for column in group.columns if column.name in damaged.columns("rb_group")]
    rows = damaged.table("rb_group", names, known=sorted(indexed))
    mended = {uid: mended_group(uid, dict(zip(names, values, strict=True))) for uid, values in rows.items()}
    # Some are only in the index. Their payloads may be whole, and contain all but tags, key and priority.
    mended |= {uid: mended_group(uid, {}) for uid in indexed.keys() - rows.keys()}
    for uid, row in mended.items():
        if row["lane"] not in lanes:
            row["lane"] = indexed.get(uid, -1)
        if row["lane"] not in lanes:
            row |= {"lane": _lost_lane(lanes), "error": WHY_LOST}
    buffers = {one["buffer"]: ReadableBuffer() for one in lanes.values()} or {_DEFAULT: ReadableBuffer()}
    for lane_id, one in lanes.items():
        buffers[one["buffer"]].lanes[lane_id] = one
    for uid, row in mended.items():
        buffers[lanes[row["lane"]]["buffer"]].groups[uid] = row
    for uid, lane_id in [*((uid, row["lane"]) for uid, row in mended.items()), *indexed.items()]:
        if lane_id in lanes:
            buffers[lanes[lane_id]["buffer"]].uids.add(uid)
    _read_counts(damaged, buffers)
    _read_cursors(damaged, buffers)
    counters = [row[0] for row in damaged.table("rb_counter", ["value"]).values() if isinstance(row[0], int)]
    return max((*rows, *indexed, *counters, 0)), buffers


def _read_lanes(damaged: Salvage) -> dict[int, Row]:
    """Return the lanes by id, with a lane for unleased groups beside each one for leased groups."""
    # Most of a lane is also in the index over its names; the table has more.
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
        name = name_of(mended)
        if mended["id"] not in lanes and name not in taken:
            lanes[mended["id"]] = mended
            taken.add(name)
    for one in list(lanes.values()):
        if one["leased"] and (*name_of(one)[:-1], False) not in taken:
            new = max(lanes) + 1
            lanes[new] = {**one, "id": new, "leased": False}
    return lanes


def name_of(one: Row) -> tuple[Any, ...]:
    return one["buffer"], one["task_name"], one["status"], one["leased"]


def _lost_lane(lanes: dict[int, Row]) -> int:
    """Return the lane for groups whose own lane is unknown, created if there is none."""
    names = {"buffer": _DEFAULT, "task_name": LOST, "status": str(Status.FAILED), "leased": False}
    if (there := next((one["id"] for one in lanes.values() if one.items() >= names.items()), None)) is not None:
        return int(there)
    new = max(lanes, default=0) + 1
    lanes[new] = dict.fromkeys(column.name for column in lane.columns) | names | {"id": new}
    return new


def _read_index(damaged: Salvage) -> dict[int, int]:
    """Return the lanes of groups by uid, from an index."""
    found = {}
    for order in ("lane, uid", "lane DESC, uid DESC"):
        query = f"SELECT uid, lane FROM rb_group INDEXED BY rb_group_in_order WHERE lane >= 0 ORDER BY {order}"  # noqa: S608
        rows = damaged.indexed(query)
        found.update({uid: lane_id for uid, lane_id in rows if isinstance(uid, int) and isinstance(lane_id, int)})
    return found


def _read_counts(damaged: Salvage, buffers: dict[str, ReadableBuffer]) -> None:
    owner = {lane_id: found for found in buffers.values() for lane_id in found.lanes}
    for lane_id, name, amount in damaged.table("rb_tally", ["lane", "name", "amount"]).values():
        if lane_id in owner and isinstance(name, bytes) and isinstance(amount, int):
            text = name.decode(errors="replace")
            if text in set(Tally):
                owner[lane_id].counted[(lane_id, text)] += amount


def _read_cursors(damaged: Salvage, buffers: dict[str, ReadableBuffer]) -> None:
    names = [column.name for column in cursor.columns]
    for row in damaged.table("rb_cursor", names).values():
        of = dict(zip(names, row, strict=True))
        try:
            owner = of["buffer"].decode()
            moved = Cursor(of["name"].decode(), of["version"], of["position"], of["value"])
        except (*ERRORS, AttributeError):
            continue
        if of["checkpoint"] == 0 and owner in buffers and isinstance(moved.value, bytes):
            buffers[owner].cursors.append(moved)


@dataclass(slots=True)
class Rescued:
    """What was saved of one buffer: the snapshot's file, the number of groups, and the number lost, as far as known."""

    buffer: str
    file: str
    groups: int = 0
    bytes: int = 0
    lost: int = 0


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
            rescued.append(Rescued(name, str(inside / SNAPSHOT_FILE)))
            told = lambda n, before=done: tell(before + n, total)  # noqa: E731
            _write_snapshot(damaged, found, rescued[-1], last, told)
            done += len(found.groups)
    return rescued


def _write_snapshot(
    damaged: Salvage, found: ReadableBuffer, written: Rescued, last: int, told: Callable[[int], None]
) -> None:
    """Write a snapshot of a buffer like `buffer.save`, and count what was; `last` is the last uid of the database."""

    def work(tx: Transaction) -> None:
        create_schema(tx, written.file)
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

    write_file(written.file, work)


def _groups(damaged: Salvage, found: ReadableBuffer, told: Callable[[int], None]) -> Iterator[tuple[Row, Row]]:
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
            try:
                marks = marks_anew(AS_DICTS.decode(stored["data"]), home["status"])
            except ReplayBufError:
                continue
            row |= {"marks": marks.to_json(), "mixed": marks.mixed}
            row |= {"oldest_step": marks.oldest_step, "reward": marks.mean_reward}
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


def _counts(found: ReadableBuffer, written: Rescued, sizes: Counter[tuple[int, str]]) -> list[Row]:
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
