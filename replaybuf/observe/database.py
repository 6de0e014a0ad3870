"""The figures of a database, read from outside of the run."""

from __future__ import annotations

from typing import Any

from replaybuf.buffer.metrics import add_distributions, of_tasks
from replaybuf.observe.standing import standing
from replaybuf.storage.sql.inspection.measures import BufferMeasures, measure
from replaybuf.storage.sql.inspection.reader import Reader, open_reader

#: The number of groups up to which all of them are looked at, for the distributions.
SCANNED = 200_000


def read_figures(
    source: str | Reader, *, buffer: str | None = None, scanned: int = SCANNED, timeout: float | None = None
) -> dict[str, Any]:
    """Return the figures of one buffer of a database, or of all, as plain dicts; `prometheus` writes them. Blocks.

    `source` is a URL, the path of a SQLite file, or a reader. `buffers[name]["tasks"]` is as in `buffer.metrics()`,
    without rates. Staleness, draws, rewards and bytes of a buffer with more than `scanned` groups are left out: they
    take a look at every group. Raises what the command raises: UnreachableError, InputError, LockedError (also when it
    took more than `timeout` seconds), ...
    """
    reader = open_reader(source) if isinstance(source, str) else source
    found = reader.look(lambda look: measure(look, buffer, scanned), timeout=timeout)
    return {
        "database": found.database,
        "buffers": {name: _figures(measures) for name, measures in found.buffers.items()},
    }


def _figures(found: BufferMeasures) -> dict[str, Any]:
    tasks = of_tasks(found.tallies)
    for field, histogram in found.histograms.items():
        add_distributions(tasks, field, histogram)
    for task, numbers in tasks.items():
        numbers["overdue"] = found.overdue.get(task, 0)
        numbers |= found.contents.get(task, {})
    return {"tasks": tasks, **found.records, **standing(found.cursors)}
