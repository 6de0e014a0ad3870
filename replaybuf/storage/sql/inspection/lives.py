"""The life of a group: who put it, every draw that had it, what befell it, and where it is now."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from replaybuf.storage.sql.inspection.batches import Batch, batches_with
from replaybuf.storage.sql.inspection.buffers import buffers_of
from replaybuf.storage.sql.inspection.look import Look, time_of
from replaybuf.storage.sql.inspection.metadata import read_metadata


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that befell a group: the `kind` of an event, when, by whom, at which train step."""

    at: datetime
    kind: str
    worker: str | None
    step: int | None
    detail: str | None


@dataclass(frozen=True, slots=True)
class Origin:
    """What is known of a group's put, also when it has left: from its row, a checkpoint's, or a draw's.

    Of a group that only an event or its successor names, it is the buffer.
    """

    buffer: str
    task_name: str
    created_at: datetime | None
    worker: str | None
    train_step: int | None
    oldest_model_step: int | None
    reward: float | None


@dataclass(frozen=True, slots=True)
class Life:
    """All that is known of a group.

    `there` is its row in the view `groups` with its trained step, None when it has left. `replaces` are the groups that
    it was put in place of, as far as they are known (`schema.tables`), `replaced_by` those that were put in its place.
    `checkpoints` are the train steps of the checkpoints that hold it.
    """

    uid: int
    origin: Origin
    there: dict[str, Any] | None
    draws: Sequence[Batch]
    happenings: Sequence[Happening]
    replaces: Sequence[int]
    replaced_by: Sequence[int]
    checkpoints: Sequence[int]
    now: datetime
    several: bool


def life_of(look: Look, uid: int) -> Life | None:
    """Return the life of a group of any buffer, or None when nothing is known of it."""
    kept = look.rows(_IN_CHECKPOINTS, uid=uid)
    rows = look.rows(_ROW, uid=uid) or kept[-1:]
    buffers = buffers_of(look)
    for buffer in [rows[0]["buffer"]] if rows else buffers:
        draws = batches_with(look, buffer, uid)
        happenings = [_happening(row) for row in look.rows(_EVENTS[look.dialect].format(uid=int(uid)), buffer=buffer)]
        later = [row["uid"] for row in look.rows(_LATER[look.dialect].format(uid=int(uid)), buffer=buffer)]
        if rows or draws or happenings or later:
            break
    else:
        return None
    there = read_metadata(look, [uid])
    made_from = rows[0]["made_from"] if rows else None
    return Life(
        uid=uid,
        origin=_origin_of_row(rows[0]) if rows else _origin_of_draw(buffer, draws),
        there=there[0] if there else None,
        draws=draws,
        happenings=happenings,
        replaces=sorted(json.loads(made_from) if isinstance(made_from, str) else made_from or ()),
        replaced_by=later,
        checkpoints=[row["checkpoint_step"] for row in kept],
        now=look.now(),
        several=len(buffers) > 1,
    )


_LAST_UID = {
    "sqlite": "SELECT value FROM rb_counter WHERE name = 'uid'",
    "postgresql": "SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM rb_uid",
}


def last_uid(look: Look) -> int:
    """Return the last uid that was given in the database, 0 when none was."""
    return int(look.value(_LAST_UID[look.dialect]) or 0)


_PUT = """
    l.buffer AS buffer, l.task_name AS task_name, g.created_at AS put_at, g.worker AS worker, g.put_step AS put_step,
    g.oldest_step AS oldest_step, g.reward AS reward, g.made_from AS made_from"""
_ROW = f"SELECT {_PUT} FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE g.uid = :uid"  # noqa: S608
# A look-up in each checkpoint.
_IN_CHECKPOINTS = f"""
SELECT {_PUT}, c.step AS checkpoint_step
FROM rb_checkpoint c JOIN rb_checkpoint_group g ON g.checkpoint = c.id JOIN rb_lane l ON l.id = g.lane
WHERE g.uid = :uid AND c.copied_to IS NULL ORDER BY c.id"""  # noqa: S608
_EVENT = "SELECT happened_at AS at, kind, worker, step, detail FROM rb_event e WHERE buffer = :buffer AND {there}"
_EVENTS = {
    "sqlite": _EVENT.format(there="EXISTS (SELECT 1 FROM json_each(e.uids) WHERE value = {uid}) ORDER BY id"),
    "postgresql": _EVENT.format(there="e.uids @> '{uid}' ORDER BY id"),
}
# Groups that are put in place of another have higher uids.
_REPLACING = """
SELECT g.uid AS uid FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE g.uid > {{uid}} AND g.made_from IS NOT NULL AND l.buffer = :buffer AND {there} ORDER BY g.uid"""
_LATER = {
    "sqlite": _REPLACING.format(there="EXISTS (SELECT 1 FROM json_each(g.made_from) WHERE value = {uid})"),
    "postgresql": _REPLACING.format(there="g.made_from @> '{uid}'"),
}


def _origin_of_row(row: dict[str, Any]) -> Origin:
    at, step = time_of(row["put_at"]), row["put_step"]
    return Origin(row["buffer"], row["task_name"], at, row["worker"], step, row["oldest_step"], row["reward"])


def _origin_of_draw(buffer: str, draws: Sequence[Batch]) -> Origin:
    if not draws:
        return Origin(buffer, "", None, None, None, None, None)
    [mine] = draws[0].members
    return Origin(buffer, mine.task_name, mine.created_at, mine.worker, None, mine.oldest_model_step, mine.reward)


def _happening(row: dict[str, Any]) -> Happening:
    at = time_of(row["at"])
    assert at is not None
    return Happening(at, row["kind"], row["worker"], row["step"], row["detail"])
