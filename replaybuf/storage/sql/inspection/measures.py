"""The figures of a database: by task and status for `stats`, and for monitoring, which reads them every few seconds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.group_metadata import chosen_buffers
from replaybuf.storage.sql.inspection.run_records import last_batches
from replaybuf.storage.sql.inspection.wait_facts import current_waits, read_workers
from replaybuf.storage.sql.statements.buffer_facts import Contents, Tallied, list_checkpoints
from replaybuf.storage.sql.statements.buffer_facts import count_overdue as count_overdue
from replaybuf.storage.sql.statements.buffer_facts import histogram_of as histogram_of
from replaybuf.storage.sql.statements.buffer_facts import read_contents as read_contents
from replaybuf.storage.sql.statements.buffer_facts import read_cursors as read_cursors
from replaybuf.storage.sql.statements.buffer_facts import read_tallies as read_tallies
from replaybuf.values.rollouts.statuses import Status

_HOUR = 3600.0
_STATUSES = [*map(str, Status)]


def tallies_of(tx: Transaction, buffer: str | None) -> dict[str, Tallied]:
    """Return the tallies of one buffer or of all, by buffer. Raises InputError when only other buffers exist."""
    names = chosen_buffers(tx, buffer)
    return {name: read_tallies(tx, name) for name in (names if buffer is None else [buffer])}


def count_unswept(tx: Transaction) -> int:
    """Return the number of payloads that wait for the sweep."""
    return int(tx.value("SELECT count(*) FROM rb_past WHERE until IS NULL AND removed_at IS NOT NULL"))


def list_places(tx: Transaction) -> list[dict[str, Any]]:
    """Return a row for each place of payloads kept apart: its files, their groups and bytes."""
    return tx.rows("SELECT * FROM places ORDER BY url")


# Rows by task and status


_GROUPS = """
SELECT
    buffer, task_name, status, count(*) - count(leased_until) AS groups, count(leased_until) AS leased,
    sum(rollouts) AS rollouts, avg(reward) AS reward, avg(staleness) AS staleness, max(staleness) AS max_staleness,
    sum(bytes) AS bytes, min(created_at) AS oldest, max(created_at) AS newest,
    sum(prompt_tokens) AS prompt_tokens, sum(response_tokens) AS response_tokens
FROM groups WHERE buffer = coalesce(:buffer, buffer) GROUP BY buffer, task_name, status"""


def rows_of_lanes(tx: Transaction, buffer: str | None) -> list[dict[str, Any]]:
    """Return a row for each buffer, task and status, of one buffer or of all; INIT and EXPIRED have no staleness."""
    overdue = count_overdue(tx, buffer)
    rows = tx.rows(_GROUPS, buffer=buffer)
    for row in rows:
        lane = (row["buffer"], row["task_name"], str(row["status"]))
        row |= {"staleness": float(row["staleness"]), "response_tokens": row["response_tokens"] or 0}
        if row["status"] in (Status.INIT, Status.EXPIRED):
            row |= {"staleness": None, "max_staleness": None}
        row["overdue"] = overdue.get(lane, 0)
    rows.sort(key=lambda row: (row["buffer"], row["task_name"], _STATUSES.index(row["status"])))
    return rows


# For monitoring


_LAST_HOUR = """
SELECT sum(groups_last_hour) AS groups, sum(rollouts_last_hour) AS rollouts, sum(tokens_last_hour) AS tokens,
    sum(failures_last_hour) AS failures, sum(taken_last_hour) AS taken
FROM workers WHERE buffer = :buffer"""

_EVENTS = "SELECT kind, count(*) FROM rb_event WHERE buffer = :buffer AND happened_at > :since GROUP BY kind"


def read_records(tx: Transaction, name: str) -> dict[str, Any]:
    """Return the recorded figures of a buffer: restores, checkpoints, last draw, waits, workers, the last hour."""
    now, checkpoints = tx.clock(), list_checkpoints(tx, name)
    hour = tx.rows(_LAST_HOUR, buffer=name)[0]
    batches = last_batches(tx, name, 1)
    waiters: dict[str, dict[str, Any]] = {}
    for wait in current_waits(tx, name):  # longest waits first
        longest = max(0.0, now - (now if wait.since is None else wait.since))
        waiters.setdefault(wait.kind, {"count": 0, "longest_seconds": longest})["count"] += 1
    states = Counter(worker.state(now) for worker in read_workers(tx, name))
    last_checkpoint = {column: checkpoints[-1][column] for column in ("step", "created_at")} if checkpoints else {}
    return {
        "restores": tx.value("SELECT epoch FROM rb_buffer WHERE name = :buffer", buffer=name) or 0,
        "checkpoints": {"count": len(checkpoints), **last_checkpoint},
        "last_batch": batches[0] if batches else {},
        "waiters": waiters,
        "workers": {"working": states["alive"], "silent": states["silent"], "ended": states["ended"]},
        "last_hour": {column: n or 0 for column, n in hour.items()},
        "events_last_hour": dict(map(tuple, tx.tuples(_EVENTS, buffer=name, since=now - _HOUR))),
    }


def held_by_tasks(contents: Contents) -> dict[str, dict[str, Any]]:
    """Return figures by task: bytes, and the oldest completed group that can be drawn, with rewards of such groups."""
    figures: dict[str, dict[str, Any]] = {}
    drawable: dict[str, list[Any]] = {}
    for row in contents:
        of_task = figures.setdefault(row["task_name"], {"bytes": 0})
        of_task["bytes"] += int(row["bytes"])
        if row["status"] == Status.COMPLETED and not row["is_leased"]:
            drawable.setdefault(row["task_name"], []).append(row)
    for task, rows in drawable.items():
        figures[task]["oldest_at"] = min(row["oldest_at"] for row in rows)
        if rewarded := [row for row in rows if row["rewards"]]:
            figures[task]["reward"] = {
                "mean": sum(row["reward"] for row in rewarded) / sum(row["rewards"] for row in rewarded),
                "min": min(row["lowest"] for row in rewarded),
                "max": max(row["highest"] for row in rewarded),
            }
    return figures
