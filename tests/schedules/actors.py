"""Processes that make calls of one buffer, of which a scheduler lets one at a time send its next statement.

A schedule is repeatable: it is the order in which processes reach their statements and commits. A process that waits
for a lock of another lets that one go on.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from replaybuf import ReplayBuffer
from tests.faults.failpoints import FailPoints
from tests.faults.ledger import Ledger
from tests.faults.operations import OPERATIONS
from tests.faults.processes import pipe, start
from tests.stores import TASK, build, number_of

#: A process that says nothing for so long waits for a lock; one that waits for so long waits for ever.
_BLOCKED_SECONDS, _FOR_EVER_SECONDS = 0.2, 60.0


class _Points(FailPoints):
    """Asks the scheduler before each statement, and before and after each commit."""

    def __init__(self, ledger: Ledger, channel: Connection) -> None:
        super().__init__(ledger)
        self._channel, self._lock = channel, threading.Lock()

    def reach(self, name: str) -> None:
        if self._armed and name != "end":
            with self._lock:
                self._channel.send(("at", name))
                self._channel.recv()


def perform(ledger: Ledger, channel: Connection) -> None:
    """A process that does the operations that it is told, each in a buffer that it opens for it."""
    points = _Points(ledger, channel)
    while job := channel.recv():
        asyncio.run(_perform(points, channel, *job))


async def _perform(points: _Points, channel: Connection, url: str, name: str) -> None:
    operation = OPERATIONS[name]
    async with build(url, **operation.options) as buffer:
        ready = await operation.ready(buffer) if operation.ready else None
        channel.send(("ready", None))
        channel.recv()
        outcome = "done"
        try:
            with points.armed():
                await operation.run(buffer, ready)
        except Exception as error:
            outcome = type(error).__name__
        channel.send(("ended", outcome))
        channel.recv()
    channel.send(("closed", None))


class Actor:
    """A process as the scheduler sees it."""

    def __init__(self, ledger: Path) -> None:
        self._channel, theirs = pipe()
        self._process = start(perform, ledger, theirs)
        theirs.close()
        self.outcome: str | None = None
        self.at = ""
        self.passed = 0  # points
        self.may_go = True

    def tell(self, message: Any = True) -> None:
        self._channel.send(message)

    def hear(self, seconds: float = _FOR_EVER_SECONDS) -> tuple[str, Any] | None:
        """Return the next message; None if there is none in time."""
        return self._channel.recv() if self._channel.poll(seconds) else None

    def prepare(self, url: str, name: str) -> None:
        self.outcome, self.at, self.passed, self.may_go = None, "", 0, True
        self.tell((url, name))
        assert self.hear() == ("ready", None)

    def step(self) -> str:
        """Let it go on to its next point. Return "ended", "blocked", or the name of the point."""
        if self.may_go:
            self.may_go = False
            self.tell()
        heard = self.hear(_BLOCKED_SECONDS)
        if heard is None:
            return "blocked"
        kind, what = heard
        if kind == "ended":
            self.outcome = what
            return kind
        waits = what == self.at == "BEGIN IMMEDIATE"  # again, since another process holds SQLite's lock
        self.at, self.may_go = what, True
        self.passed += not waits
        return "blocked" if waits else str(what)

    def close(self) -> None:
        self.tell()
        assert self.hear() == ("closed", None)

    def end(self) -> None:
        self.tell(None)
        self._process.join(10)


#: Which process goes on after a point, given the one that is there and how many points it has passed.
Choice = Callable[[int, int], int]


def run(actors: Sequence[Actor], url: str, names: Sequence[str], order: Sequence[int], choose: Choice) -> list[str]:
    """Do an operation in each process, interleaved as chosen. Return what became of each.

    Where one has ended, or is blocked, the next one goes on that hasn't ended, in this order.
    """
    for actor, name in zip(actors, names, strict=True):
        actor.prepare(url, name)
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    active, blocked = order[0], 0
    while any(actor.outcome is None for actor in actors):
        if actors[active].outcome is not None:
            active = following[active]
            continue
        reached = actors[active].step()
        blocked = blocked + 1 if reached == "blocked" else 0
        assert blocked * _BLOCKED_SECONDS < _FOR_EVER_SECONDS, f"all wait: {[actor.at for actor in actors]}"
        if reached == "blocked":
            active = following[active]
        elif reached != "ended":
            active = choose(active, actors[active].passed)
    for actor in actors:
        actor.close()
    return [str(actor.outcome) for actor in actors]


def switching(first: int, second: int, at: int | None) -> Choice:
    """Return the schedule that lets another process go on where the first one has passed so many points."""
    return lambda active, passed: second if (active, passed) == (first, at) else active


async def state_of(buffer: ReplayBuffer) -> Any:
    """Return what is in the buffer, and check that its counts are those of its groups."""
    groups, statuses = [], Counter[str]()
    async for item in buffer.find({}):
        tags = sorted((item.tags or {}).items())
        groups.append((number_of(item.item), str(item.status), item.priority, item.times_sampled, item.key, tags))
        statuses[str(item.status)] += 1
    tasks = (await buffer.metrics(distributions=False))["tasks"].get(TASK, {})
    counted = {status: n for status, n in tasks.get("buffered", {}).items() if n}
    assert counted == statuses, (counted, statuses)  # leased groups are in neither
    return sorted(groups, key=repr), tasks.get("leased", 0), [one.step for one in await buffer.checkpoints()]


@contextmanager
def actors_of(ledger: Path, count: int) -> Any:
    actors = [Actor(ledger) for _ in range(count)]
    try:
        yield actors
    finally:
        for actor in actors:
            actor.end()
