"""Buffers, tasks, and the metadata of groups and rollouts, read from the public views."""

from __future__ import annotations

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


def buffers_of(tx: Transaction) -> list[str]:
    """Return the names of the buffers in the database, in order."""
    return sorted(tx.values("SELECT DISTINCT buffer FROM rb_lane"))


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
    return sorted({*tx.values("SELECT DISTINCT buffer FROM rb_worker"), *buffers_of(tx)})


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
    arrays; the time of the read, and whether other buffers exist."""

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
    return Described(rows[0] | {"annotations": by_position.get(None, {})}, rollouts, tx.now(), len(buffers_of(tx)) > 1)


_EXTREMES = """
SELECT uid, position, reward FROM (
    SELECT uid, position, reward, row_number() OVER (PARTITION BY uid ORDER BY reward {order}, position) AS nth
    FROM rollouts WHERE status = 'completed' AND reward IS NOT NULL AND uid {{in:uids}}
) of_groups
ORDER BY reward {order}, nth, uid DESC LIMIT :count"""


def extreme_rollouts(tx: Transaction, uids: Sequence[int], count: int, *, worst: bool) -> list[tuple[int, int, float]]:
    """Return (uid, position, reward) of the completed rollouts of these groups with the lowest rewards (`worst`), or
    highest.

    Of equal rewards one of each group comes before a second one of any, and those of newer groups come first.
    """
    query = _EXTREMES.format(order="ASC" if worst else "DESC")
    return [*map(tuple, tx.tuples(query, uids=uids, count=count))]


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

    until = group["leased_until"]
    return {
        "buffer": group["buffer"],
        "status": group["status"],
        "leased": "" if until is None else f"until {time(until)} ({units.lease(until, now)})",
        "deliveries": units.number(group["deliveries"]) if group["deliveries"] else "",
        "rollout of": place_in_group(group) or "",
        "task": group["task_name"],
        "staleness": units.number(group["staleness"]),
        "reward": units.number(group["reward"], 3),
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
