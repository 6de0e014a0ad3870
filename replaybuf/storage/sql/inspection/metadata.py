"""The metadata of groups and rollouts, from the views for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from replaybuf.storage.sql.inspection.buffers import buffers_of, check_buffer, in_order
from replaybuf.storage.sql.inspection.look import Look

_CHUNK = 1000


@dataclass(slots=True)
class Listing:
    """The metadata of groups, the number that match, the time then, and whether there are other buffers."""

    rows: list[dict[str, Any]]
    matching: int
    now: datetime
    several: bool


@dataclass(slots=True)
class Described:
    """The metadata of a group and of its rollouts, the time then, and whether there are other buffers."""

    group: dict[str, Any]
    rollouts: list[dict[str, Any]]
    now: datetime
    several: bool


_GROUPS = """
SELECT
    uid, buffer, task_name, status, staleness, reward, priority, times_sampled, created_at, leased_until, archived_at,
    deliveries, rollouts, prompt_tokens, response_tokens, finish_reasons, bytes, key, tags, error, prompt, response,
    worker, put_step, leased_by, trained_step
FROM groups WHERE uid IN ({uids})"""
_ROLLOUTS = """
SELECT
    uid, position, rollout_id, status, staleness, oldest_model_step, reward, rewards, prompt_tokens, response_tokens,
    finish_reason, response, error_msg
FROM rollouts WHERE uid IN ({uids}) ORDER BY uid, position"""


def read_metadata(look: Look, uids: Sequence[int]) -> list[dict[str, Any]]:
    """Return the metadata of these groups of any buffer, in this order, of those that are there."""
    found: dict[int, dict[str, Any]] = {}
    for start in range(0, len(uids), _CHUNK):
        listed = ", ".join(str(int(uid)) for uid in uids[start : start + _CHUNK])
        found |= {row["uid"]: row for row in look.rows(_GROUPS.format(uids=listed))}
    return [found[uid] for uid in uids if uid in found]


def describe_group(look: Look, uid: int) -> Described | None:
    """Return what is known of a group of any buffer without its payload, or None when it isn't there."""
    found = read_metadata(look, [uid])
    if not found:
        return None
    rollouts = look.rows(_ROLLOUTS.format(uids=int(uid)))
    return Described(found[0], rollouts, look.now(), len(buffers_of(look)) > 1)


def list_oldest(
    look: Look, buffer: str | None, task: str | None, status: str | None, limit: int | None, *, count: bool
) -> Listing:
    """Return the groups of a buffer, task and status (None: of all), those that were put first at the front.

    With `count` the number of all of them is counted, beyond the limit.
    """
    check_buffer(look, buffer)
    wanted = {"buffer": buffer, "task_name": task, "status": status}
    given = {name: value for name, value in wanted.items() if value is not None}
    where = "".join(f" AND l.{name} = :{name}" for name in given)
    of_lanes = f"FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE 1 = 1{where}"
    at_most = "" if limit is None else f" LIMIT {int(limit)}"
    _, uids = look.table(f"SELECT g.uid {of_lanes} ORDER BY g.uid{at_most}", **given)  # names of columns
    rows = read_metadata(look, [uid for (uid,) in uids])
    matching = len(rows)
    if count and len(rows) == limit:
        matching = look.value(f"SELECT count(*) {of_lanes}", **given)
    return Listing(rows, matching, look.now(), several=buffer is None and len(buffers_of(look)) > 1)


_EXTREMES = """
SELECT uid, position, nth, reward FROM (
    SELECT uid, position, reward, row_number() OVER (PARTITION BY uid ORDER BY reward {order}, position) AS nth
    FROM rollouts WHERE status = 'completed' AND reward IS NOT NULL AND uid IN (
        SELECT uid FROM rollouts WHERE status = 'completed' AND reward IS NOT NULL{where}
        GROUP BY uid ORDER BY {lowest}(reward) {order}, uid DESC LIMIT {count}
    )
) of_groups
ORDER BY nth, reward {order}, uid DESC LIMIT {count}"""


def extreme_rollouts(
    look: Look, buffer: str | None, task: str | None, count: int, *, worst: bool, among: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Return the uids and positions of the completed rollouts with the lowest rewards, or with the highest.

    They are of the groups of a buffer and task (None: of all), and if `among` is given, of the groups with these uids.
    The lowest of each group come before any second ones; among equals, those of the newest groups come first.
    """
    check_buffer(look, buffer)
    given = {name: value for name, value in {"buffer": buffer, "task_name": task}.items() if value is not None}
    where = "".join(f" AND {name} = :{name}" for name in given)
    order, lowest = ("ASC", "min") if worst else ("DESC", "max")
    rows: list[Sequence[Any]] = []
    for part in [""] if among is None else _listed(among):
        statement = _EXTREMES.format(where=where + part, order=order, lowest=lowest, count=int(count))
        rows += look.table(statement, **given)[1]
    rows.sort(key=lambda row: (row[2], row[3] if worst else -row[3], -row[0]))
    return [(uid, position) for uid, position, *_ in rows[:count]]


def _listed(uids: Sequence[int]) -> Iterator[str]:
    """Return conditions that a row is of one of these groups, for some of them each."""
    for start in range(0, len(uids), _CHUNK):
        yield f" AND uid IN ({', '.join(str(int(uid)) for uid in uids[start : start + _CHUNK])})"


def read_checkpoints(look: Look, buffer: str | None) -> list[dict[str, Any]]:
    """Return the checkpoints of one buffer or of all, in the order in which they were made."""
    check_buffer(look, buffer)
    made = look.rows("SELECT buffer, step, created_at, groups, bytes FROM checkpoints ORDER BY created_at")
    of_buffer = [one for one in made if buffer in (None, one["buffer"])]
    return sorted(of_buffer, key=lambda one: in_order(one["buffer"]))
