"""What `watch` shows, read again and again: by indexes and from small tables, however many groups there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replaybuf.rules.circumstances import Circumstances
from replaybuf.rules.transitions import Tallies, of_tasks
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import EVENTS, history_of, last_batches, newest
from replaybuf.storage.sql.inspection.waits import Explained, Question, explain
from replaybuf.storage.sql.statements.buffer_facts import STALENESS

_HISTORY_SECONDS = 300.0
_EVENTS, _BATCHES = 50, 200

#: A time in seconds since the epoch, and what had gone in and out of each task by then.
Reading = tuple[float, Mapping[str, Mapping[str, int]]]
#: The totals that are given as rates: groups put, and draws of completed ones.
FLOWS = ("put", "sampled_new", "sampled_again")


@dataclass(frozen=True, slots=True)
class Glance:
    """A buffer at a moment.

    `waits` are those of the moment, with why they aren't over; `sample` is of the completed groups that were put last;
    `readings` are those of the last minutes, the oldest first, and now; draws and events come with the newest first.
    """

    buffer: str
    about: Circumstances
    waits: Sequence[Explained]
    sample: NewestGroups
    readings: Sequence[Reading]
    batches: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class NewestGroups:
    """The number of the groups looked at, their rewards, and their numbers by staleness."""

    groups: int
    rewards: list[float]
    staleness: dict[int, int]


def glance(tx: ReadTransaction, buffer: str | None) -> list[Glance]:
    """Return how it stands with one buffer or with all. Raises InputError when only other buffers exist."""
    return [
        Glance(
            one.buffer,
            one.about,
            [] if one.asked else one.waits,
            newest_groups(tx, one.buffer, None),
            _readings(tx, one.buffer, one.about),
            last_batches(tx, one.buffer, _BATCHES),
            newest(tx, EVENTS, one.buffer, _EVENTS),
        )
        for one in explain(tx, buffer, Question(), asked=False)
    ]


#: The groups put last whose rewards and staleness are looked at, in so many lanes.
NEWEST_GROUPS, _MOST_LANES = 2000, 100
_COMPLETED_LANES = """SELECT id FROM rb_lane WHERE status = 'completed' AND buffer = coalesce(:buffer, buffer)
AND task_name = coalesce(:task, task_name) LIMIT :most"""
_NEWEST_OF_LANE = f"""SELECT * FROM (SELECT g.reward, {STALENESS} FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE g.lane = {{lane}} ORDER BY g.uid DESC LIMIT {{most}}) lane{{lane}}"""  # noqa: S608


def newest_groups(tx: ReadTransaction, buffer: str | None, task: str | None) -> NewestGroups:
    """Return the rewards and staleness of the completed groups that were put last, as many of each task."""
    lanes = tx.values(_COMPLETED_LANES, buffer=buffer, task=task, most=_MOST_LANES)
    if not lanes:
        return NewestGroups(0, [], {})
    most = -(-NEWEST_GROUPS // len(lanes))
    rows = tx.tuples(" UNION ALL ".join(_NEWEST_OF_LANE.format(lane=int(lane), most=most) for lane in lanes))
    rewards = [float(reward) for reward, _ in rows if reward is not None]
    staleness = Counter(int(stale) for _, stale in rows if stale is not None)
    return NewestGroups(len(rows), rewards, dict(sorted(staleness.items())))


def _readings(tx: ReadTransaction, buffer: str, about: Circumstances) -> list[Reading]:
    kept = history_of(tx, buffer, about.now - _HISTORY_SECONDS)
    earlier = [(time.timestamp(), _flows(tasks)) for _, time, tasks in kept if time.timestamp() < about.now]
    return [*earlier, (about.now, flows(about.tallies))]


def flows(tallies: Tallies) -> dict[str, dict[str, int]]:
    """Return what has gone in and out of each task since the beginning."""
    return _flows(of_tasks(tallies))


def _flows(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    return {task: {name: int(figures.get(name, 0)) for name in FLOWS} for task, figures in tasks.items()}
