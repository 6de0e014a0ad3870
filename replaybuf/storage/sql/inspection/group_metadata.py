"""Buffers, tasks, and the metadata of groups and rollouts, read from the public views."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from replaybuf.common import units
from replaybuf.common.checks import INT64
from replaybuf.common.redact import redact_path
from replaybuf.errors import InputError
from replaybuf.rules.causes import never_put
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.values.rollouts.statuses import Status

DEFAULT = "default"
_DIGITS = re.compile("([0-9]+)")


def in_order(name: str) -> tuple[list[str | tuple[int, str]], str]:
    """Return the sort key of buffer names in lists: run-2 comes before run-10."""
    parts = enumerate(_DIGITS.split(name))  # every other part is a number, of any length
    return [(len(part.lstrip("0")), part.lstrip("0")) if i % 2 else part for i, part in parts], name


def buffers_of(tx: Transaction) -> list[str]:
    """Return the names of the buffers in the database, in order."""
    return sorted(tx.values("SELECT DISTINCT buffer FROM rb_lane"), key=in_order)


def tasks_of(tx: Transaction, buffer: str | None) -> list[str]:
    """Return the names of the tasks of one buffer or of all."""
    query = "SELECT DISTINCT task_name FROM rb_lane WHERE buffer = coalesce(:buffer, buffer)"
    return sorted(tx.values(query, buffer=buffer))


def unknown_task(tx: Transaction, buffer: str | None, task: str | None) -> str:
    """Return a sentence about a named task that doesn't exist, with the tasks that do; "" for one that does."""
    if task is None or task in (tasks := tasks_of(tx, buffer)):
        return ""
    return never_put(tasks) if tasks else "nothing was ever put into this buffer"


def opened_buffers(tx: Transaction) -> list[str]:
    """Return the names of the buffers in the database, including opened buffers without a put."""
    return sorted({*tx.values("SELECT DISTINCT buffer FROM rb_worker"), *buffers_of(tx)}, key=in_order)


def check_buffer(tx: Transaction, buffer: str | None) -> None:
    """Raise InputError when only buffers of other names exist."""
    if buffer is not None and (names := opened_buffers(tx)) and buffer not in names:
        raise InputError(
            f"there is no buffer {redact_path(buffer)!r:.200} in this database; there are {', '.join(names)}"
        )


def chosen_buffers(tx: Transaction, buffer: str | None) -> list[str]:
    """Return the names of the existing buffers among one or all, in order. Raises InputError."""
    check_buffer(tx, buffer)
    return [name for name in buffers_of(tx) if buffer in (None, name)]


def choose(tx: Transaction, buffer: str | None) -> str:
    """Return the buffer of this name; for None the only buffer or the default one. Raises InputError."""
    check_buffer(tx, buffer)
    names = buffers_of(tx)
    if buffer is None and len(names) > 1 and DEFAULT not in names:
        raise InputError(f"there are several buffers in this database: choose one with --buffer: {', '.join(names)}")
    return buffer or (names[0] if len(names) == 1 else DEFAULT)


@dataclass(slots=True)
class Listing:
    """Metadata of groups, the number that match, the time of the read, and whether other buffers exist."""

    rows: list[dict[str, Any]]
    matching: int
    now: datetime
    several: bool


@dataclass(slots=True)
class Described:
    """Metadata of a group and its rollouts, with the `annotations` of the last draw that has any: values, or figures of
    arrays; the time of the read, and whether other buffers exist. `unrewarded` of its completed rollouts have no reward
    that is a finite number."""

    group: dict[str, Any]
    rollouts: list[dict[str, Any]]
    now: datetime
    several: bool


_GROUPS = """
SELECT
    uid, buffer, task_name, status, staleness, reward, priority, times_sampled, created_at, leased_until, archived_at,
    deliveries, rollouts, prompt_tokens, response_tokens, finish_reasons, bytes, key, tags, error, prompt, response,
    worker, put_step, leased_by, trained_step, group_size, group_index
FROM groups WHERE uid {in:uids}"""
_ROLLOUTS = """
SELECT
    uid, position, rollout_id, status, staleness, oldest_model_step, reward, rewards, prompt_tokens, response_tokens,
    finish_reason, response, error_msg, rollout, parent
FROM rollouts WHERE uid {in:uids} ORDER BY uid, position"""

#: The last draw of a group that has annotations, as text of SQL.
LAST_ANNOTATED = "(SELECT max(batch) FROM annotations WHERE uid = :uid)"
_ANNOTATIONS = f"""SELECT position, name, value, text, min_value, max_value, tokens FROM annotations
WHERE uid = :uid AND batch = {LAST_ANNOTATED} ORDER BY name"""  # noqa: S608


def read_metadata(tx: Transaction, uids: Sequence[int]) -> list[dict[str, Any]]:
    """Return the metadata of these groups, of any buffer, in this order; missing groups are left out."""
    by_uid = {row["uid"]: row for row in tx.rows(_GROUPS, uids=[uid for uid in uids if uid in INT64])}
    return [by_uid[uid] for uid in uids if uid in by_uid]


def describe_group(tx: Transaction, uid: int) -> Described | None:
    """Return the metadata of a group of any buffer and of its rollouts, or None if the group doesn't exist."""
    rows = read_metadata(tx, [uid])
    if not rows:
        return None
    by_position: dict[int | None, dict[str, Any]] = {}
    for position, name, value, text, *array in tx.tuples(_ANNOTATIONS, uid=uid):
        figures = dict(zip(("mean", "min", "max", "tokens"), (value, *array), strict=True))
        by_position.setdefault(position, {})[name] = figures if figures["tokens"] is not None else text or value
    rollouts = [row | {"annotations": by_position.get(row["position"], {})} for row in tx.rows(_ROLLOUTS, uids=[uid])]
    unrewarded = sum(row["status"] == Status.COMPLETED and row["reward"] is None for row in rollouts)
    group = rows[0] | {"annotations": by_position.get(None, {}), "unrewarded": unrewarded}
    return Described(group, rollouts, tx.now(), len(buffers_of(tx)) > 1)


def list_oldest(
    tx: Transaction, buffer: str | None, task: str | None, status: str | None, limit: int | None, *, count: bool
) -> Listing:
    """Return the groups of a buffer, task and status (None: of all), oldest first.

    With `count` the total is counted, regardless of the limit.
    """
    check_buffer(tx, buffer)
    filters = {"buffer": buffer, "task_name": task, "status": status}
    parameters = {name: value for name, value in filters.items() if value is not None}
    where = "".join(f" AND l.{name} = :{name}" for name in parameters)
    of_lanes = f"FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE 1 = 1{where}"
    at_most = "" if limit is None else f" LIMIT {int(limit)}"
    uids = tx.values(f"SELECT g.uid {of_lanes} ORDER BY g.uid{at_most}", **parameters)  # names of columns only
    rows = read_metadata(tx, uids)
    total = len(rows)
    if count and len(rows) == limit:
        total = tx.value(f"SELECT count(*) {of_lanes}", **parameters)
    return Listing(rows, total, tx.now(), several=buffer is None and len(buffers_of(tx)) > 1)


# Of equal rewards, those of several tasks come first, and within a task those of the group of the lowest mean reward.
_EXTREMES = """
SELECT uid, position, nth, reward FROM (
    SELECT *, row_number() OVER (PARTITION BY task_name, nth, reward ORDER BY mean {order}, uid DESC) AS of_task FROM (
        SELECT uid, position, reward, task_name, avg(reward) OVER (PARTITION BY uid) AS mean,
            row_number() OVER (PARTITION BY uid ORDER BY reward {order}, position) AS nth
        FROM rollouts WHERE status = 'completed' AND reward IS NOT NULL AND uid {{in:uids}}
    ) of_groups
) of_tasks
ORDER BY reward {order}, nth, of_task, mean {order}, uid DESC LIMIT :count"""
# Marks have the rewards of all rollouts, completed or not: no completed rollout is beyond its group's extreme there.
_EXTREME = {
    "sqlite": "(SELECT {lowest}(value) FROM json_each(g.marks, '$.reward'))",
    "postgresql": "(SELECT {lowest}(value::double precision) FROM jsonb_array_elements_text(g.marks -> 'reward'))",
}
_CANDIDATES = """
SELECT g.uid, {extreme} FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE g.reward IS NOT NULL{where}
ORDER BY 2 {order}, 1 DESC LIMIT :most"""


def extreme_rollouts(
    tx: Transaction,
    buffer: str | None,
    task: str | None,
    count: int,
    *,
    worst: bool,
    among: Sequence[int] | None = None,
) -> list[tuple[int, int]]:
    """Return (uid, position) of the completed rollouts with the lowest rewards (`worst`), or with the highest.

    Groups are those of a buffer and task (None: of all), restricted to the uids `among` if given. Of equal rewards one
    of each group comes before a second one of any, and then one of each task before a second one; of a task, that of
    the group whose mean reward is the most extreme, or the newest.
    """
    check_buffer(tx, buffer)
    parameters: dict[str, Any] = {
        name: value for name, value in {"buffer": buffer, "task_name": task}.items() if value is not None
    }
    sign, order, lowest = (1, "ASC", "min") if worst else (-1, "DESC", "max")
    where = "".join(f" AND l.{name} = :{name}" for name in parameters)
    extreme = _EXTREME[tx.dialect.name].format(lowest=lowest)
    query, limit = _CANDIDATES.format(extreme=extreme, where=where, order=order), 8 * count + 100
    while True:
        candidates: Sequence[Sequence[Any]] = [(uid, 0.0) for uid in among or ()]
        if among is None:
            candidates = tx.tuples(query, **parameters, most=limit)
        extremes = tx.tuples(_EXTREMES.format(order=order), uids=[uid for uid, _ in candidates], count=count)
        is_whole = among is not None or len(candidates) < limit
        if is_whole or (len(extremes) == count and sign * extremes[-1][3] < sign * float(candidates[-1][1])):
            return [(uid, position) for uid, position, *_ in extremes]
        limit *= 16


# Texts about groups, for the terminal and the page


def archived_at(row: Mapping[str, Any]) -> datetime | None:
    """Return when a group was archived. (For filtered and failed groups the column has the time of that change.)"""
    return row["archived_at"] if row["status"] == Status.ARCHIVED else None


def place_in_group(row: Mapping[str, Any]) -> str | None:
    """Return the group that a rollout fills, and the rollout's place there, from 1: `a 2/4`; None for whole groups."""
    size = row["group_size"]
    return None if size is None else f"{row['key']} {row['group_index'] + 1}/{size}"


def listed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metadata of groups with the fields of their table: the place of a rollout, an error as prompt."""
    return [
        row | {"place": place_in_group(row), "archived_at": archived_at(row), "prompt": row["error"] or row["prompt"]}
        for row in rows
    ]


def facts_of(group: Mapping[str, Any], now: datetime, time: Callable[[datetime], str] = units.iso) -> dict[str, str]:
    """Return the known facts of an existing group as texts, by name; "" for unknown ones."""

    def when(moment: datetime | None) -> str:
        return "" if moment is None else f"{time(moment)} ({units.ago(moment, now)})"

    def step(name: str, prefix: str = "") -> str:
        return "" if group[name] is None else f"{prefix}{group[name]:,}"

    until, lacking = group["leased_until"], group["unrewarded"]
    unusable = f"; no usable reward in {lacking} of {units.number_of(group['rollouts'], 'rollout')}" if lacking else ""
    return {
        "buffer": group["buffer"],
        "status": group["status"],
        "leased": "" if until is None else f"until {time(until)} ({units.lease(until, now)})",
        "deliveries": units.number(group["deliveries"]) if group["deliveries"] else "",
        "rollout of": place_in_group(group) or "",
        "task": group["task_name"],
        "staleness": units.number(group["staleness"]),
        "reward": f"{units.number(group['reward'], 3)}{unusable}",
        "priority": f"{group['priority']:g}",
        "times sampled": units.number(group["times_sampled"]),
        "created": when(group["created_at"]),
        "made by": group["worker"] or "",
        "put for step": step("put_step"),
        "leased by": group["leased_by"] or "",
        "trained at": step("trained_step", "step "),
        "archived": when(archived_at(group)),
        "rollouts": units.number(group["rollouts"]),
        "tokens": f"{units.number(group['prompt_tokens'])} prompt, {units.number(group['response_tokens'])} response",
        "finished by": group["finish_reasons"] or "",
        "payload": units.size(group["bytes"]),
        "key": group["key"] or "" if group["group_size"] is None else "",
        "tags": units.tags(group["tags"]),
        "annotations": units.annotated(group["annotations"]),
        "error": group["error"] or "",
    }
