"""What `watch` shows, read again and again: by indexes and from small tables, however many groups there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replaybuf.rules.circumstances import Circumstances
from replaybuf.rules.tallies import Tallies
from replaybuf.rules.totals import of_tasks
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.recent import Sample, history_of, newest_batches, newest_groups
from replaybuf.storage.sql.inspection.waits import Explained, Question, explain

_HISTORY_SECONDS = 300.0
_EVENTS = """
SELECT happened_at, kind, task_name, worker, step, groups, detail FROM events WHERE buffer = :buffer
ORDER BY id DESC LIMIT 50"""

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
    sample: Sample
    readings: Sequence[Reading]
    batches: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]


def glance(tx: Transaction, buffer: str | None) -> list[Glance]:
    """Return how it stands with one buffer or with all. Raises InputError when only other buffers exist."""
    return [
        Glance(
            one.buffer,
            one.about,
            [] if one.asked else one.waits,
            newest_groups(tx, one.buffer, None),
            _readings(tx, one.buffer, one.about),
            newest_batches(tx, one.buffer)[::-1],
            Look.over(tx).rows(_EVENTS, buffer=one.buffer),
        )
        for one in explain(Look.over(tx), buffer, Question(), asked=False, tx=tx)
    ]


def _readings(tx: Transaction, buffer: str, about: Circumstances) -> list[Reading]:
    kept = history_of(tx, buffer, about.now - _HISTORY_SECONDS)
    earlier = [(time.timestamp(), _flows(tasks)) for _, time, tasks in kept if time.timestamp() < about.now]
    return [*earlier, (about.now, flows(about.tallies))]


def flows(tallies: Tallies) -> dict[str, dict[str, int]]:
    """Return what has gone in and out of each task since the beginning."""
    return _flows(of_tasks(tallies))


def _flows(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    return {task: {name: int(figures.get(name, 0)) for name in FLOWS} for task, figures in tasks.items()}
