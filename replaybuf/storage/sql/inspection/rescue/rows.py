"""Rows of a damaged database, made storable: impossible values are left out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from replaybuf.errors import ReplayBufError
from replaybuf.rollouts.marks import Marks
from replaybuf.rollouts.status import Status
from replaybuf.storage.sql.inspection.checkup.texts import marks_anew
from replaybuf.storage.sql.inspection.groups import AS_DICTS
from replaybuf.storage.sql.inspection.rescue.salvage import ERRORS, Salvage
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.put_keys import rescoped_key

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


def payload_of(damaged: Salvage, uid: int) -> Row | None:
    """Return a group's row of `rb_payload`, or None when the payload is damaged."""
    try:
        row = damaged.one("rb_payload", ["data", "outline", "prompt"], uid)
        if row is None:
            return None
        AS_DICTS.verify(row[0])
    except (*ERRORS, ReplayBufError):
        return None
    outline = _json(row[1])
    return {
        "uid": uid,
        "outline": outline if isinstance(outline, list) else [],
        "prompt": _text(row[2]),
        "data": row[0],
    }


def marked_by(data: bytes, status: str) -> Row | None:
    """Return the columns that describe a group's rollouts, from the payload; None when it can't be decoded."""
    try:
        marks = marks_anew(AS_DICTS.decode(data), status)
    except ReplayBufError:
        return None
    return {
        "marks": marks.to_json(),
        "oldest_step": marks.oldest_step,
        "mixed": marks.mixed,
        "reward": marks.mean_reward,
    }
