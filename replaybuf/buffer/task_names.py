"""Detection of misspelt task names: tasks under which no group was ever put."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from replaybuf.rules.causes import never_put
from replaybuf.rules.words import named
from replaybuf.storage.sql.backend import SQLStorage

_logger = logging.getLogger("replaybuf.tasks")


class TaskNames:
    """A cache of the tasks that were found in the store or warned of; each is looked up once per process."""

    def __init__(self, storage: SQLStorage) -> None:
        self._storage = storage
        self._known: set[str] = set()

    def add(self, name: str) -> None:
        """Accept a task without groups yet, whose name is the one that its producer uses."""
        self._known.add(name)

    async def check(self, names: Iterable[str], call: str) -> None:
        """Log a warning, once per process, for each task that never had a group while others had."""
        new = set(names) - self._known
        if not new:
            return
        tallies = await self._storage.tallies()
        tasks = sorted({task for (task, _, _), number in tallies.items() if number})
        if not tasks:
            return  # a new run
        for name in sorted(new - set(tasks)):
            problem, advice = never_put(name, tasks)
            _logger.warning("%s, task %s: %s. %s", call, named(name), problem, advice)
        self._known |= new
