"""The readable part of the buffers in a damaged SQLite file, without the payloads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from replaybuf.rollouts.status import Status
from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.inspection.checkup.orphans import LOST, WHY_LOST
from replaybuf.storage.sql.inspection.rescue.rows import Row, mended_group, mended_lane
from replaybuf.storage.sql.inspection.rescue.salvage import ERRORS, Salvage
from replaybuf.storage.sql.schema.tables import cursor, group, lane
from replaybuf.storage.values import Cursor

_DEFAULT = "default"


@dataclass(slots=True)
class Found:
    """The readable part of one buffer."""

    lanes: dict[int, Row] = field(default_factory=dict)
    groups: dict[int, Row] = field(default_factory=dict)
    uids: set[int] = field(default_factory=set)  # all that are mentioned anywhere
    counted: Counter[tuple[int, str]] = field(default_factory=Counter)
    cursors: list[Cursor] = field(default_factory=list)


def read_metadata(damaged: Salvage) -> tuple[int, dict[str, Found]]:
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
    buffers = {one["buffer"]: Found() for one in lanes.values()} or {_DEFAULT: Found()}
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


def _read_counts(damaged: Salvage, buffers: dict[str, Found]) -> None:
    owner = {lane_id: found for found in buffers.values() for lane_id in found.lanes}
    for lane_id, name, amount in damaged.table("rb_tally", ["lane", "name", "amount"]).values():
        if lane_id in owner and isinstance(name, bytes) and isinstance(amount, int):
            text = name.decode(errors="replace")
            if text in set(Tally):
                owner[lane_id].counted[(lane_id, text)] += amount


def _read_cursors(damaged: Salvage, buffers: dict[str, Found]) -> None:
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
