"""Who gave up waiting, and has not gone on since: for those who look when nobody waits any more."""

from __future__ import annotations

from dataclasses import dataclass

from replaybuf.storage.presence import EventKind, kind_of_wait
from replaybuf.storage.sql.inspection.look import Look

_DAY = 24 * 3600.0
# Of more that have all gone on, nobody asks who was before them; and of more draws or groups, the newest are looked at.
_EVENTS, _NEWEST = 100, 1000


@dataclass(frozen=True, slots=True)
class Ended:
    """A wait that ended by its timeout, at a time in seconds since the epoch; `detail` says after how long, and why."""

    worker: str
    task_name: str | None
    time: float
    detail: str


_GAVE_UP = """
SELECT worker, task_name, happened_at AS time, detail FROM rb_event
WHERE buffer = :buffer AND kind = :kind AND happened_at > :earliest ORDER BY happened_at DESC, id DESC LIMIT :most"""

# What has left is counted with the periods of `rb_activity`; a period that began before may be of before, too.
_DREW = """
SELECT 1 FROM (SELECT worker, taken_at FROM rb_batch WHERE buffer = :buffer ORDER BY id DESC LIMIT :newest) newest
WHERE worker = :worker AND taken_at > :time
UNION ALL
SELECT 1 FROM rb_worker w JOIN rb_activity a ON a.worker_id = w.id
WHERE w.buffer = :buffer AND w.name = :worker AND a.since > :time AND a.taken > 0"""
_PUT = """
SELECT 1 FROM rb_worker w JOIN rb_activity a ON a.worker_id = w.id
WHERE w.buffer = :buffer AND w.name = :worker AND a.since > :time AND a.groups > 0"""
_LANES = "SELECT id FROM rb_lane WHERE buffer = :buffer"
_PUT_INTO = """
SELECT 1 FROM (
    SELECT worker, created_at FROM rb_group WHERE lane BETWEEN :lane AND :lane
    ORDER BY lane DESC, uid DESC LIMIT :newest) newest
WHERE worker = :worker AND created_at > :time"""


def last_given_up(look: Look, buffer: str, task: str | None = None) -> Ended | None:
    """Return the wait of the last day that ended by its timeout last, of one task or of all.

    Those of workers that have drawn since, or put if that is what they waited for, are over and done with.
    """
    earliest = look.seconds() - _DAY
    rows = look.rows(_GAVE_UP, buffer=buffer, kind=str(EventKind.GAVE_UP), earliest=earliest, most=_EVENTS)
    for row in rows:
        ended = Ended(row["worker"] or "", row["task_name"], row["time"], row["detail"] or "")
        if task in (None, ended.task_name) and not _went_on(look, buffer, ended):
            return ended
    return None


def _went_on(look: Look, buffer: str, ended: Ended) -> bool:
    values = {"buffer": buffer, "worker": ended.worker, "time": ended.time}
    kind = kind_of_wait(ended.detail)
    if kind != "room" and look.value(_DREW, **values, newest=_NEWEST):
        return True
    return kind != "groups" and _has_put(look, values)


def _has_put(look: Look, values: dict[str, object]) -> bool:
    if look.value(_PUT, **values):
        return True
    about = {"worker": values["worker"], "time": values["time"], "newest": _NEWEST}
    lanes = look.table(_LANES, buffer=values["buffer"])[1]
    return any(look.value(_PUT_INTO, lane=lane, **about) for (lane,) in lanes)
