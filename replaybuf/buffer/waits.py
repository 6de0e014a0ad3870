"""Waiting for groups and for room. Every wait ends: with success, an error, or the timeout.

A wait that takes long says in the log what it is for: as a warning of the logger `replaybuf.waits`, every
`REPORT_SECONDS`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from replaybuf.errors import FullError, InputError, NotReadyError
from replaybuf.query import LogicNode, ScalarNode
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.limits import Limits
from replaybuf.rules.tallies import LaneName, Tallies, Tally, levels
from replaybuf.storage.contract import CheckpointStorage, GroupStorage
from replaybuf.storage.values import Draw, NewGroup
from replaybuf.tracing import waiting

T = TypeVar("T")

#: Seconds after which a wait is reported in the log, and between reports.
REPORT_SECONDS = 30.0

_LONGEST_WAIT = 60.0
_RETRY_SECONDS = 0.02
_TASKS_NAMED = 5
_NOTHING_STORED = "nothing was stored (is the consumer running?)"

_logger = logging.getLogger("replaybuf.waits")


@dataclass(slots=True)
class Waited:
    """How often this process has waited, for how many seconds in all, and how often until the timeout."""

    count: int = 0
    seconds: float = 0.0
    timeouts: int = 0


@dataclass(slots=True)
class _Line:
    """Puts of a task and status that wait for room, in order of arrival."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


class Waits:
    """The waits of one buffer."""

    def __init__(self, storage: GroupStorage, check_open: Callable[[], None]) -> None:
        self._storage = storage
        self.check_open = check_open
        # Puts that wait for room queue up: one line for each event loop, task and status.
        self._lines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[LaneName, _Line]]
        self._lines = weakref.WeakKeyDictionary()
        self.for_groups = Waited()
        self.for_room = Waited()

    # For changes

    def version(self) -> int:
        """Return a number that differs after every change of the store; read it before looking, then wait."""
        return self._storage.version()

    async def changed(self, since: int, seconds: float) -> None:
        """Return soon after a change of the store since `version()` was this, or after so many seconds at the latest.

        It may also return early without a change. Raises FencedError if the buffer was restored.
        """
        await self.check_fence()
        await self._changed(since, seconds)

    async def _changed(self, since: int, seconds: float) -> None:
        await self._storage.changed(min(seconds, _LONGEST_WAIT), since)

    async def _tallies(self) -> Tallies:
        """Return the tallies. Raises FencedError: who looks for a change asks for both at once."""
        if isinstance(self._storage, CheckpointStorage):
            return await self._storage.fenced_tallies()
        return await self._storage.tallies()

    async def check_fence(self) -> None:
        """Raise FencedError if another process has restored the buffer, which takes storage with checkpoints."""
        if isinstance(self._storage, CheckpointStorage):
            await self._storage.check_fence()

    # For groups

    async def draw(self, draw: Draw, timeout: float, call: Callable[[Draw], Awaitable[T | None]]) -> T:
        """Return the result of `call(draw)`, as soon as there are at least as many groups as the draw needs."""
        deadline = time.monotonic() + timeout
        while True:
            if any(draw.at_least.values()):
                await self.until_ready(draw, deadline, timeout)
            drawn = await call(draw)
            if drawn is not None:
                return drawn
            # Another process was faster, or holds some of the groups at this moment.
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                await self.until_ready(draw, deadline, timeout)
                raise NotReadyError(f"after {timeout:g} s: others hold some of the groups; nothing was taken")
            await asyncio.sleep(min(_RETRY_SECONDS, remaining))

    async def until_ready(self, draw: Draw, deadline: float, timeout: float) -> None:
        """Wait until all groups that the draw needs are there. Raises NotReadyError, saying what is missing."""
        check_possible(draw, self._storage.rules.limits)
        reports = Reports("waiting for groups")
        with _timed(self.for_groups, "groups") as begin:
            while True:
                self.check_open()
                seen = self.version()
                tallies = await self._tallies()
                available = await self._available(draw, tallies)
                missing = [task for task, least in draw.at_least.items() if available[task] < least]
                if not missing:
                    return
                remaining = deadline - time.monotonic()
                if remaining <= 0 or reports.due:
                    lines = "; ".join(self._describe(task, draw, available[task], tallies) for task in missing)
                    if remaining <= 0:
                        raise NotReadyError(f"after {timeout:g} s: {lines}; nothing was taken")
                    reports.tell(lines)
                begin()
                await self._changed(seen, min(remaining, reports.pause))

    async def ready(self, draw: Draw) -> bool:
        """Return whether all groups that the draw needs are there."""
        return draw.is_met_by(await self._available(draw, await self._storage.tallies()))

    async def _available(self, draw: Draw, tallies: Tallies) -> dict[str, int]:
        """Return how many groups of each task that the draw needs could be drawn now, counted as far as it matters."""
        there = {task: tallies.get((task, draw.status, Tally.SIZE), 0) for task in draw.at_least}
        if draw.where is not None:
            for task, least in draw.at_least.items():
                lane = (ScalarNode("task_name", "$eq", task), ScalarNode("status", "$eq", draw.status.value))
                query = LogicNode("$and", (*lane, draw.where))
                there[task] = await self._storage.count(query, at_most=least) if least and there[task] else 0
        limits = self._storage.rules.limits
        if draw.status != Status.COMPLETED or not limits.slows_draws:
            return there
        return {task: min(there[task], limits.drawable(level)) for task, level in levels(tallies, there).items()}

    def _describe(self, task: str, draw: Draw, available: int, tallies: Tallies) -> str:
        """Return `task math: 12 of 64 completed groups (3 expired, 1 failed)`, and what holds them back."""
        limits, status = self._storage.rules.limits, draw.status
        there = tallies.get((task, status, Tally.SIZE), 0)
        others = [
            f"{n} {other}"
            for (name, other, tally), n in tallies.items()
            if name == task and tally == Tally.SIZE and n and other not in (status, Status.ARCHIVED)
        ]
        leased = sum(n for (name, _, tally), n in tallies.items() if name == task and tally == Tally.LEASED)
        others = sorted(others) + ([f"{leased} leased"] if leased else [])
        if draw.where is not None:
            others.insert(0, f"{there} {status} before the where")
            there = available
        rest = f" ({', '.join(others)})" if others else ""
        tasks = sorted({name for name, _, _ in tallies})
        if tasks and task not in tasks:
            shown = ", ".join(tasks[:_TASKS_NAMED]) + (", ..." if len(tasks) > _TASKS_NAMED else "")
            rest = f" (nothing was ever put there; there are the tasks {shown})"
        least = draw.at_least[task]
        wanted = f"{least}" if least == draw.sizes[task] else f"at least {least}"
        line = f"task {task}: {there} of {wanted} {status} groups{rest}"
        if status == Status.COMPLETED and limits.slows_draws and available < there:
            line += f", but {limits.why_slow(levels(tallies, [task])[task])}"
        return line

    # For room

    async def put(self, new: NewGroup, timeout: float) -> int:
        """Store a group as soon as there is room for it. Raises FullError."""
        limits = self._storage.rules.limits
        line = self._line((new.task_name, new.status))
        if not line.waiting:
            try:
                return await self.store(new)
            except FullError as error:
                if limits.on_full == "reject" or timeout <= 0:
                    await self._refuse(new, f"{error}; nothing was stored", error)
        deadline = time.monotonic() + timeout
        line.waiting += 1
        try:
            with _timed(self.for_room, "room") as begin:
                begin()
                try:
                    async with asyncio.timeout_at(_loop_deadline(deadline)):
                        await line.turn.acquire()
                except TimeoutError as error:
                    why = f"task {new.task_name}: others wait for room, too"
                    await self._refuse(new, f"after {timeout:g} s: {why}; {_NOTHING_STORED}", error)
                try:
                    return await self._put_in_turn(new, deadline, timeout)
                finally:
                    line.turn.release()
        finally:
            line.waiting -= 1

    def store(self, new: NewGroup) -> Coroutine[Any, Any, int]:
        """Store a group without waiting for room.

        With `new.dropped`, a cancelled caller waits for the end of the put first, and so learns what has left.
        """
        storing = self._storage.put(new)
        return storing if new.dropped is None else to_its_end(storing)

    async def _put_in_turn(self, new: NewGroup, deadline: float, timeout: float) -> int:
        limits, replaces = self._storage.rules.limits, new.key is not None or bool(new.replaces)
        reports = Reports("waiting for room")
        while True:
            self.check_open()
            seen = self.version()
            level = levels(await self._tallies(), [new.task_name])[new.task_name]
            if replaces or limits.insertable(level, new.status) != 0:
                try:
                    return await self.store(new)
                except FullError as error:  # another process was faster
                    why = str(error)
            else:
                why = f"task {new.task_name}: {limits.why_full(level, new.status)}"
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                await self._refuse(new, f"after {timeout:g} s: {why}; {_NOTHING_STORED}")
            if reports.due:
                reports.tell(f"{why} (is the consumer running?)")
            await self._changed(seen, min(remaining, reports.pause))

    async def _refuse(self, new: NewGroup, why: str, cause: BaseException | None = None) -> None:
        await self._storage.refuse(new)
        raise FullError(why) from cause

    def _line(self, lane: LaneName) -> _Line:
        return self._lines.setdefault(asyncio.get_running_loop(), {}).setdefault(lane, _Line())


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. A cancelled caller waits for its end first: it has to know what the store has done.

    Only for work that takes no longer than a transaction.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # marks it as seen: nobody else will
        raise


def check_possible(draw: Draw, limits: Limits) -> None:
    """Raise InputError for a draw that needs more groups than the limits can ever deliver at once."""
    if draw.status != Status.COMPLETED:
        return
    largest = limits.largest_batch
    for task, size in draw.at_least.items():
        if largest is None or size <= largest:
            continue
        if limits.capacity is not None and size > limits.capacity:
            why = f"the capacity is {limits.capacity}"
        else:
            wide = "a range of twice" if isinstance(limits.error_buffer, tuple) else "at least"
            why = f"{limits.rate} allows {largest} at most; set error_buffer to {wide} the size of a batch"
        raise InputError(f"a batch of {size} groups of task {task} would wait for ever: {why}")


class Reports:
    """The reports of one wait in the log: after so many seconds, and then as often. `what` it waits for begins them."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._next = self._began + REPORT_SECONDS

    @property
    def due(self) -> bool:
        """Whether it is time for one."""
        return time.monotonic() >= self._next

    @property
    def pause(self) -> float:
        """The seconds until the next report."""
        return max(0.0, self._next - time.monotonic())

    def tell(self, missing: str) -> None:
        """Report what is missing."""
        now = time.monotonic()
        self._next = now + REPORT_SECONDS
        _logger.warning("%s for %.0f s: %s", self._what, now - self._began, missing)


@contextmanager
def _timed(waited: Waited, kind: str) -> Iterator[Callable[[], None]]:
    """Time a wait, starting when the yielded function is called."""
    started: list[float] = []

    def begin() -> None:
        started.append(time.monotonic())
        begin_span()

    try:
        with waiting(kind) as begin_span:
            yield begin
    except TimeoutError:
        waited.timeouts += 1
        raise
    finally:
        if started:
            waited.count += 1
            waited.seconds += time.monotonic() - started[0]


def _loop_deadline(deadline: float) -> float:
    """Convert a time of `time.monotonic` to the running loop's clock."""
    return asyncio.get_running_loop().time() + deadline - time.monotonic()


def sizes_of(tallies: Mapping[tuple[str, Status, Tally], int]) -> dict[tuple[str, Status], int]:
    """Return the number of groups of each task and status that has any."""
    return {(task, status): n for (task, status, name), n in tallies.items() if name == Tally.SIZE and n}
