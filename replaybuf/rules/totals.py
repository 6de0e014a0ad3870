"""The tallies as figures for people, by task: the groups that there are now, and the totals since the beginning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replaybuf.rollouts.statuses import Status
from replaybuf.rules.transitions import Tallies, Tally

_LEVELS = (Tally.SIZE, Tally.LEASED)
#: The totals of each task, since the beginning, over all processes.
TOTALS = (*(str(name) for name in Tally if name not in _LEVELS), "taken_unfinished")
UNFINISHED = TOTALS[-1]
#: The totals that count completed groups only: those that were trained on.
OF_COMPLETED = ("sampled_new", "sampled_again", "taken")


def of_tasks(tallies: Tallies) -> dict[str, dict[str, Any]]:
    """Return the groups that there are now, and the totals since the beginning, by task."""
    tasks: dict[str, dict[str, Any]] = {}
    for task in sorted({task for task, _, _ in tallies}):
        of_task = {(status, name): n for (owner, status, name), n in tallies.items() if owner == task}
        tasks[task] = {
            "buffered": {str(s): of_task.get((s, Tally.SIZE), 0) for s in Status if s != Status.ARCHIVED},
            "leased": sum(n for (_, tally), n in of_task.items() if tally == Tally.LEASED),
            "archived": of_task.get((Status.ARCHIVED, Tally.SIZE), 0),
            **{name: _total(name, of_task) for name in TOTALS},
        }
    return tasks


def _total(name: str, of_task: Mapping[tuple[Status, Tally], int]) -> int:
    """Return a total of a task. Draws of groups that aren't completed are kept apart."""
    if name == UNFINISHED:
        return sum(n for (status, tally), n in of_task.items() if tally == Tally.TAKEN and status != Status.COMPLETED)
    if name in OF_COMPLETED:
        return of_task.get((Status.COMPLETED, Tally(name)), 0)
    return sum(n for (_, tally), n in of_task.items() if tally == name)
