"""The figures of a database for monitoring: cheap enough to be read every few seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replaybuf.rollouts.status import Status
from replaybuf.rules.circumstances import SILENT_SECONDS
from replaybuf.rules.tallies import LaneName, Tally
from replaybuf.storage.sql.inspection.buffers import buffers_of, check_buffer
from replaybuf.storage.sql.inspection.circumstances import LIVE_SECONDS
from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.overview import read_cursors, read_tallies

if TYPE_CHECKING:
    from replaybuf.storage.values import Cursor

_HOUR = 3600.0


@dataclass(slots=True)
class BufferMeasures:
    """A buffer's tallies and cursors; its records, as they are shown; and of each task what its groups hold.

    `histograms` and `contents` are empty where there are too many groups to look at all of them.
    """

    tallies: dict[tuple[str, Status, Tally], int]
    cursors: list[Cursor]
    records: dict[str, Any]
    overdue: dict[str, int]
    histograms: dict[str, dict[LaneName, dict[int, int]]]
    contents: dict[str, dict[str, Any]]


@dataclass(slots=True)
class Measures:
    """The measures of the whole database, and of each buffer."""

    database: dict[str, Any]
    buffers: dict[str, BufferMeasures]


def measure(look: Look, buffer: str | None, scanned: int) -> Measures:
    """Return the measures of one buffer or of all; groups are looked at up to this number in a buffer."""
    check_buffer(look, buffer)
    names = [name for name in buffers_of(look) if buffer in (None, name)]
    database = {
        "bytes": look.database_bytes(),
        "unswept_payloads": look.value("SELECT count(*) FROM rb_garbage"),
    }
    now = look.seconds()
    return Measures(database, {name: _measure(look, name, now, scanned) for name in names})


def _measure(look: Look, name: str, now: float, scanned: int) -> BufferMeasures:
    tallies = read_tallies(look, name)
    overdue = _counts(look, _OVERDUE, buffer=name, now=now)
    found = BufferMeasures(tallies, read_cursors(look, name), _records(look, name, now), overdue, {}, {})
    if sum(n for (_, _, tally), n in tallies.items() if tally in (Tally.SIZE, Tally.LEASED)) <= scanned:
        _scan(look, name, found)
    return found


# Groups of leases that are over, which come back with the next draw. Leased groups have lanes of their own: without
# that, SQLite would look at all groups.
_OVERDUE = """
SELECT l.task_name, count(*) FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE l.buffer = :buffer AND l.leased AND g.leased_until <= :now GROUP BY l.task_name"""

_CHECKPOINTS = """
SELECT count(*) OVER () AS count, step, created_at FROM rb_checkpoint
WHERE buffer = :buffer AND copied_to IS NULL ORDER BY id DESC LIMIT 1"""

_LAST_BATCH = """
SELECT step, groups, reward, min_reward, max_reward, staleness, max_staleness, taken_at FROM rb_batch
WHERE buffer = :buffer AND status = 'completed' ORDER BY id DESC LIMIT 1"""

_WAITERS = """
SELECT a.kind, count(*), min(a.since) FROM rb_waiter a JOIN rb_worker w ON w.id = a.worker_id
WHERE w.buffer = :buffer AND a.seen_at > :live GROUP BY a.kind"""

_WORKERS = """
SELECT CASE WHEN ended_at IS NOT NULL THEN 'ended' WHEN seen_at > :live THEN 'working' ELSE 'silent' END, count(*)
FROM rb_worker WHERE buffer = :buffer GROUP BY 1"""

_LAST_HOUR = """
SELECT sum(groups_last_hour) AS groups, sum(rollouts_last_hour) AS rollouts, sum(tokens_last_hour) AS tokens,
    sum(failures_last_hour) AS failures, sum(taken_last_hour) AS taken
FROM workers WHERE buffer = :buffer"""

_EVENTS = "SELECT kind, count(*) FROM rb_event WHERE buffer = :buffer AND happened_at > :since GROUP BY kind"


def _records(look: Look, name: str, now: float) -> dict[str, Any]:
    epoch = look.value("SELECT epoch FROM rb_buffer WHERE name = :buffer", buffer=name)
    hour = look.rows(_LAST_HOUR, buffer=name)[0]
    waiters = look.table(_WAITERS, buffer=name, live=now - LIVE_SECONDS)[1]
    return {
        "restores": epoch or 0,
        "checkpoints": _first(look, _CHECKPOINTS, name) or {"count": 0},
        "last_batch": _first(look, _LAST_BATCH, name),
        "waiters": {kind: {"count": n, "longest_seconds": max(0.0, now - since)} for kind, n, since in waiters},
        "workers": {"working": 0, "silent": 0, "ended": 0}
        | _counts(look, _WORKERS, buffer=name, live=now - SILENT_SECONDS),
        "last_hour": {column: n or 0 for column, n in hour.items()},
        "events_last_hour": _counts(look, _EVENTS, buffer=name, since=now - _HOUR),
    }


def _first(look: Look, statement: str, name: str) -> dict[str, Any]:
    """Return the first row, empty if there is none."""
    return next(iter(look.rows(statement, buffer=name)), {})


def _counts(look: Look, statement: str, **values: Any) -> dict[str, int]:
    return {str(name): int(count) for name, count in look.table(statement, **values)[1]}


# One look at every group
_GROUPS = """
SELECT l.task_name, l.status, l.leased AS is_leased, g.times_sampled,
    CASE WHEN g.pinned_staleness IS NOT NULL THEN g.pinned_staleness ELSE l.step - g.oldest_step - 1 END AS staleness,
    count(*) AS groups, sum(g.bytes) AS bytes, min(g.created_at) AS oldest_at, count(g.reward) AS rewards,
    sum(g.reward) AS reward, min(g.reward) AS lowest, max(g.reward) AS highest
FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE l.buffer = :buffer GROUP BY 1, 2, 3, 4, 5"""


def _scan(look: Look, name: str, found: BufferMeasures) -> None:
    """Look at all groups, once: the distributions are of the completed ones that can be drawn."""
    drawable: dict[str, list[Mapping[str, Any]]] = {}
    for row in look.rows(_GROUPS, buffer=name):
        contents = found.contents.setdefault(row["task_name"], {"bytes": 0})
        contents["bytes"] += int(row["bytes"])
        if row["status"] == Status.COMPLETED and not row["is_leased"]:
            drawable.setdefault(row["task_name"], []).append(row)
    for task, rows in drawable.items():
        found.contents[task]["oldest_at"] = min(row["oldest_at"] for row in rows)
        if rewarded := [row for row in rows if row["rewards"]]:
            found.contents[task]["reward"] = {
                "mean": sum(row["reward"] for row in rewarded) / sum(row["rewards"] for row in rewarded),
                "min": min(row["lowest"] for row in rewarded),
                "max": max(row["highest"] for row in rewarded),
            }
        for field in ("staleness", "times_sampled"):
            found.histograms.setdefault(field, {})[task, Status.COMPLETED] = _histogram(rows, field)


def _histogram(rows: Sequence[Mapping[str, Any]], field: str) -> dict[int, int]:
    counts: dict[int, int] = {}
    for row in rows:
        counts[int(row[field])] = counts.get(int(row[field]), 0) + int(row["groups"])
    return counts
