"""Fail points: every statement and every commit of an operation, at one of which the process kills itself.

They hang on the database's hooks (`engine.transaction`). A point is named for what comes
next: `begin`, `BEGIN IMMEDIATE`, `INSERT rb_group`, ..., `before commit`, `after commit`, ..., `end`.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from typing import Any

from sqlalchemy import Connection

from replaybuf.storage.sql.engine.transaction import HOOKS, Hook
from replaybuf.storage.sql.inspection.writer import transaction_of, upgrade
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.tasks.commit_watch import Watch
from replaybuf.storage.sql.tasks.sweeper import Sweeper
from tests.faults.processes import Ledger
from tests.stores import TASK, build, group


class FailPoints(Hook):
    """The points that this process passes while it is armed, each written down; at number `kill_at` it dies."""

    def __init__(self, ledger: Ledger, kill_at: int | None = None) -> None:
        self._ledger = ledger
        self._kill_at = kill_at
        self._count = 0
        self._armed = False
        HOOKS.append(self)
        # Their statements would come between, each time at other places. Where it matters they are called by hand.
        Sweeper.start = lambda self: None  # type: ignore[method-assign]
        Watch.committed = lambda self: None  # type: ignore[method-assign]

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Count and kill within this block."""
        self._armed = True
        self.reach("begin")
        try:
            yield
            self.reach("end")
        finally:
            self._armed = False

    def reach(self, name: str) -> None:
        """This process is at a point."""
        if not self._armed:
            return
        if self._kill_at is None:
            self._ledger.write("point", name)
        elif self._count == self._kill_at:
            self._ledger.write("killed", name)
            os.kill(os.getpid(), signal.SIGKILL)
        self._count += 1

    def statement(self, sql: str, values: Sequence[Any], many: bool) -> None:
        self.reach(short_name(sql))

    def committing(self) -> None:
        self.reach("before commit")

    def committed(self) -> None:
        self.reach("after commit")


def short_name(statement: str) -> str:
    """`INSERT rb_group` for a long statement."""
    verb = statement.split(maxsplit=1)[0].upper()
    table = re.search(r"\brb_\w+|pg_advisory\w+|BEGIN \w+", statement)
    return f"{verb} {table[0]}" if table and not table[0].startswith(verb) else table[0] if table else verb


def choose(points: list[str], count: int | None) -> list[int]:
    """The numbers of so many points (None: all), evenly spread, with those on both sides of the last commit."""
    if count is None or count >= len(points):
        return list(range(len(points)))
    last = max(number for number, name in enumerate(points) if name == "after commit")
    inner = [number for number in range(len(points)) if number not in (last, last - 1)]
    size = count - 2
    return sorted({last, last - 1, *(inner[int((place + 0.5) * len(inner) / size)] for place in range(size))})


def _create(connection: Connection) -> None:
    create_schema(transaction_of(connection), "here")


SCHEMAS: dict[str, Callable[[Connection], None]] = {"create the schema": _create, "upgrade": upgrade}


async def open_together(_: Ledger, url: str, number: int, barrier: Barrier) -> None:
    """A process that opens a new database at the same moment as others, and puts a group into it."""
    barrier.wait(60)
    async with build(url) as buffer:
        await buffer.put(group(number), TASK)
