"""The records of what was done, page by page, newest first: draws, events, checkpoints, workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replaybuf.storage.sql.inspection.buffers import check_buffer
from replaybuf.storage.sql.inspection.look import Look


@dataclass(frozen=True, slots=True)
class Records:
    """A view: its name, its columns, and the one that orders it, newest first."""

    view: str
    columns: str
    key: str


BATCHES = Records(
    "batches",
    "id, buffer, taken_at, step, status, worker, lease, tasks, groups, settled, reward, min_reward, max_reward, "
    "staleness, max_staleness, oldest_model_step, newest_model_step, restores",
    key="id",
)
BATCH_GROUPS = Records(
    "batch_groups", "uid, task_name, worker, reward, staleness, oldest_model_step, created_at", key="uid"
)
EVENTS = Records("events", "id, buffer, happened_at, kind, task_name, worker, step, groups, uids, detail", key="id")
CHECKPOINTS = Records("checkpoints", "buffer, step, created_at, groups, bytes", key="created_at")
WORKERS = Records(
    "workers",
    "buffer, worker, host, pid, started_at, last_seen, ended_at, groups_last_hour, rollouts_last_hour, "
    "tokens_last_hour, failures_last_hour, taken_last_hour",
    key="last_seen",
)


def newest(
    look: Look, records: Records, buffer: str | None, size: int, *conditions: str, **values: Any
) -> list[dict[str, Any]]:
    """Return the newest rows of one buffer or of all that meet conditions in SQL on these values.

    Raises InputError when only other buffers exist.
    """
    check_buffer(look, buffer)
    if buffer is not None:
        conditions, values = (*conditions, "buffer = :buffer"), {**values, "buffer": buffer}
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    statement = f"SELECT {records.columns} FROM {records.view} {where} ORDER BY {records.key} DESC LIMIT :size"  # noqa: S608
    return look.rows(statement, size=size, **values)
