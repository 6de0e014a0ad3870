"""Processes that make calls of one buffer, of which a scheduler lets one at a time send its next statement.

A schedule is repeatable: it is the order in which processes reach their statements and commits, and where a timeout
cancels one. A process that waits for a lock of another lets that one go on.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from replaybuf import ReplayBuffer
from tests.faults.failpoints import FailPoints
from tests.faults.operations import OPERATIONS, PLANTED, UNDONE, Operation
from tests.faults.processes import Ledger, pipe, start
from tests.stores import TASK, build, number_of

#: A process that says nothing for so long waits for a lock; one that waits for so long waits for ever.
_BLOCKED_SECONDS, _FOR_EVER_SECONDS = 0.2, 60.0
#: The outcome of a call that was cancelled.
CANCELLED = "cancelled"


class _Points(FailPoints):
    """Asks the scheduler before each statement, and before and after each commit; it may cancel the call there."""

    def __init__(self, ledger: Ledger, channel: Connection) -> None:
        super().__init__(ledger)
        self._channel, self._lock = channel, threading.Lock()
        self._cancel: Callable[[], None]

    def reach(self, name: str) -> None:
        if self._armed and name != "end":
            with self._lock:
                self._channel.send(("at", name))
                if self._channel.recv() == "cancel":
                    self._cancel()

    async def call(self, buffer: ReplayBuffer, operation: Operation, ready: Any) -> None:
        """Do an operation with a timeout that runs out when the scheduler says so; then also what it leaves to do."""
        loop, noticed = asyncio.get_running_loop(), threading.Event()
        try:
            async with asyncio.timeout(None) as limit:

                def cancel() -> None:
                    loop.call_soon_threadsafe(limit.reschedule, 0.0)
                    loop.call_soon_threadsafe(loop.call_later, 0.01, noticed.set)
                    noticed.wait(_FOR_EVER_SECONDS)

                self._cancel = cancel
                await operation.run(buffer, ready)
        finally:
            if limit.expired():
                await buffer.close()


def perform(ledger: Ledger, channel: Connection) -> None:
    """A process that does the operations that it is told, each in a buffer that it opens for it."""
    points = _Points(ledger, channel)
    while job := channel.recv():
        asyncio.run(_perform(points, channel, *job))


async def _perform(points: _Points, channel: Connection, url: str, name: str) -> None:
    operations = UNDONE if name.endswith(" undone") else OPERATIONS | PLANTED
    operation = operations[name.removesuffix(" undone")]
    async with build(url, **operation.options) as buffer:
        ready = await operation.ready(buffer) if operation.ready else None
        channel.send(("ready", None))
        outcome = "done"
        try:
            if channel.recv() == "cancel":
                raise TimeoutError
            with points.armed():
                await points.call(buffer, operation, ready)
        except TimeoutError:
            outcome = CANCELLED
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
        #: The point at which its call is cancelled; 0: before it begins.
        self.cancel_at: int | None = None

    def tell(self, message: Any = "go") -> None:
        self._channel.send(message)

    def hear(self, seconds: float = _FOR_EVER_SECONDS) -> tuple[str, Any] | None:
        """Return the next message; None if there is none in time."""
        return self._channel.recv() if self._channel.poll(seconds) else None

    def prepare(self, url: str, name: str, cancel_at: int | None) -> None:
        self.outcome, self.at, self.passed, self.may_go, self.cancel_at = None, "", 0, True, cancel_at
        self.tell((url, name))
        assert self.hear() == ("ready", None)

    def step(self) -> str:
        """Let it go on to its next point. Return "ended", "blocked", or the name of the point."""
        if self.may_go:
            self.may_go = False
            cancels = self.passed == self.cancel_at
            self.cancel_at = None if cancels else self.cancel_at  # once, also where it waits for a lock
            self.tell("cancel" if cancels else "go")
        heard = self.hear(_BLOCKED_SECONDS)
        if heard is None:
            return "blocked"
        kind, point = heard
        if kind == "ended":
            self.outcome = point
            return kind
        waits = point == self.at == "BEGIN IMMEDIATE"  # again, since another process holds SQLite's lock
        self.at, self.may_go = point, True
        self.passed += not waits
        return "blocked" if waits else str(point)

    def close(self) -> None:
        self.tell()
        assert self.hear() == ("closed", None)

    def end(self) -> None:
        self.tell(None)
        self._process.join(10)


#: Which process goes on after a point, given the one that is there and how many points it has passed.
Choice = Callable[[int, int], int]


def run(
    actors: Sequence[Actor],
    url: str,
    names: Sequence[str],
    order: Sequence[int],
    choose: Choice,
    cancels: Mapping[int, int],
) -> list[str]:
    """Do an operation in each process, interleaved as chosen. Return what became of each.

    Where one has ended, or is blocked, the next one goes on that hasn't ended, in this order. `cancels` has the points
    at which some are cancelled.
    """
    for number, (actor, name) in enumerate(zip(actors, names, strict=True)):
        actor.prepare(url, name, cancels.get(number))
    next_actor = dict(zip(order, [*order[1:], order[0]], strict=True))
    active, blocked = order[0], 0
    while any(actor.outcome is None for actor in actors):
        if actors[active].outcome is not None:
            active = next_actor[active]
            continue
        reached = actors[active].step()
        blocked = blocked + 1 if reached == "blocked" else 0
        assert blocked * _BLOCKED_SECONDS < _FOR_EVER_SECONDS, f"all wait: {[actor.at for actor in actors]}"
        if reached == "blocked":
            active = next_actor[active]
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
    from_tallies = {status: n for status, n in tasks.get("buffered", {}).items() if n}
    assert from_tallies == statuses, (from_tallies, statuses)  # leased groups are in neither
    return sorted(groups, key=repr), tasks.get("leased", 0), [cut.step for cut in await buffer.checkpoints()]


@contextmanager
def actors_of(ledger: Path, count: int) -> Any:
    actors = [Actor(ledger) for _ in range(count)]
    try:
        yield actors
    finally:
        for actor in actors:
            actor.end()
