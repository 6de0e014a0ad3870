"""Names of tasks that a caller gives and that may be misspelt: whether any group was ever put under them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from replaybuf.rules.causes import never_put
from replaybuf.rules.circumstances import named
from replaybuf.storage.sql.backend import SQLStorage

_logger = logging.getLogger("replaybuf.tasks")


class TaskNames:
    """The tasks that this process knows to be right, or has warned of. The store is asked once for each."""

    def __init__(self, storage: SQLStorage) -> None:
        self._storage = storage
        self._known: set[str] = set()

    def add(self, name: str) -> None:
        """Take the name of a task whose groups are still to come: what puts them has this name itself."""
        self._known.add(name)

    async def check(self, names: Iterable[str], call: str) -> None:
        """Warn, once in this process, of each task that never had a group, if others had."""
        new = set(names) - self._known
        if not new:
            return
        tallies = await self._storage.tallies()
        tasks = sorted({task for (task, _, _), number in tallies.items() if number})
        if not tasks:
            return  # a run that begins
        for name in sorted(new - set(tasks)):
            problem, advice = never_put(name, tasks)
            _logger.warning("%s, task %s: %s. %s", call, named(name), problem, advice)
        self._known |= new
