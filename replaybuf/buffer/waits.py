"""Waits for groups and for room. Every wait ends: with success, an error, or the timeout.

A long wait reports its target and the reason why it isn't over (`wait_reports`): as a warning of the logger
`replaybuf.waits` every half minute, and to other processes."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from replaybuf.buffer.tracing import span
from replaybuf.buffer.wait_reports import WaitReport
from replaybuf.errors import FullError, InputError, NotReadyError, StorageError
from replaybuf.rules.causes import diagnose
from replaybuf.rules.circumstances import Circumstances, Wait
from replaybuf.rules.diagnosis import Diagnosis, Reason, too_large
from replaybuf.rules.limits import Limits
from replaybuf.rules.query import LogicNode, ScalarNode, to_text
from replaybuf.rules.transitions import LaneName, Tallies, Tally, level_of
from replaybuf.storage.reports import EventKind, WorkerEvent
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import Draw, NewGroup
from replaybuf.values.rollouts.rollout import Status


def check_possible(draw: Draw, limits: Limits) -> None:
    """Raise InputError for a draw that needs more groups than the limits can ever deliver at once."""
    for task, size in draw.at_least.items():
        if (problem := too_large(limits, task, draw.status, size)) is not None:
            raise InputError(". ".join(problem))


T = TypeVar("T")

_RETRY_SECONDS = 0.02
_READ_AGAIN_SECONDS = 1.0
_COUNTING_SECONDS = 2.0
_ADVICE = "Draw some, or raise the limit; with on_full='block' a put waits for room, and with 'evict' it makes some"


@dataclass(slots=True)
class WaitStats:
    """The number of waits of this process, their total seconds, and the number of timeouts."""

    count: int = 0
    seconds: float = 0.0
    timeouts: int = 0


@dataclass(slots=True)
class _WaitQueue:
    """Puts of a task and status that wait for room, in order of arrival."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


class Waits:
    """The waits of one buffer."""

    def __init__(self, storage: SQLStorage) -> None:
        self._storage = storage
        # For waits of those above the buffer, which don't know its storage.
        self.version, self.changed, self.tallies = storage.version, storage.changed, storage.fenced_tallies
        self._circumstances_at = -math.inf
        self._circumstances: Circumstances | None = None
        self._warned_kinds: set[str] = set()
        # Queues of puts that wait for room: one for each event loop, task and status.
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[LaneName, _WaitQueue]]
        self._queues = weakref.WeakKeyDictionary()
        self.for_groups = WaitStats()
        self.for_room = WaitStats()

    # For groups

    async def draw(self, draw: Draw, timeout: float, call: Callable[[Draw], Awaitable[T | None]]) -> T:
        """Return the result of `call(draw)`, once as many groups as the draw needs are available.

        The call comes first, and the numbers of groups are read only when it returned None.
        """
        deadline = time.monotonic() + timeout
        while (drawn := await call(draw)) is None:
            if await self.until_ready(draw, deadline, timeout):
                continue
            # Another process was faster, or has locked some of the groups.
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                await self.report_timeout(draw, _start_of_wait(deadline, timeout), timeout)
                raise NotReadyError(f"after {timeout:g} s: others hold some of the groups; nothing was taken")
            await asyncio.sleep(min(_RETRY_SECONDS, remaining))
        return drawn

    def warn(self, kind: str, sentence: str, logger: logging.Logger) -> None:
        """Log a warning, once for each kind."""
        if kind not in self._warned_kinds:
            self._warned_kinds.add(kind)
            logger.warning("%s (said once)", sentence)

    async def until_ready(self, draw: Draw, deadline: float, timeout: float) -> bool:
        """Wait until the groups that the draw needs are available; return whether they were missing before.

        Raises NotReadyError, with what is missing, at the end of the timeout, and before it when a dataset has ended,
        nothing of its task is being generated, and the wait could never end.
        """
        check_possible(draw, self._storage.rules.limits)
        waited = False
        began = _start_of_wait(deadline, timeout)
        wait = self._wait_of(draw, began, timeout)
        with ExitStack() as stack, closing(WaitReport(self._storage, "waiting for groups", wait)) as report:
            while True:
                self._storage.check_open()
                version = self._storage.version()
                tallies = await self._storage.fenced_tallies()
                in_store = await self._count_matching(draw, tallies)
                available = self._count_drawable(draw, tallies, in_store)
                if draw.is_met_by(available):
                    return waited
                remaining = deadline - time.monotonic()
                if remaining <= 0 or report.due:
                    diagnosis = await self.why(
                        report.wait, tallies, None if draw.where is None else in_store, over=remaining <= 0
                    )
                    if remaining <= 0 or diagnosis.final:
                        after = min(timeout, time.time() - began)
                        error = NotReadyError(f"after {after:.3g} s: {diagnosis}; nothing was taken")
                        error.diagnosis = diagnosis
                        await report.timed_out(diagnosis.sentence, diagnosis.task_name)
                        raise error
                    report.update(diagnosis.sentence, str(diagnosis))
                if not waited:
                    stack.enter_context(_timed_wait(self.for_groups, "groups"))
                    waited = True
                await self._storage.changed(min(remaining, report.pause), version)

    async def report_timeout(self, draw: Draw, since: float, timeout: float, cause: Diagnosis | None = None) -> None:
        """Record the timeout of a draw that began at `since`; by default, that others hold some of the groups."""
        reason, task = ("Others hold some of the groups.", None) if cause is None else (cause.sentence, cause.task_name)
        await WaitReport(self._storage, "", self._wait_of(draw, since, timeout)).timed_out(reason, task)

    async def ready(self, draw: Draw) -> bool:
        """Return whether the groups that the draw needs are available."""
        tallies = await self._storage.tallies()
        return draw.is_met_by(self._count_drawable(draw, tallies, await self._count_matching(draw, tallies)))

    async def _count_matching(self, draw: Draw, tallies: Tallies) -> dict[str, int]:
        """Return the numbers of matching groups in the store, by task of the draw; queries count up to `at_least`."""
        counts = {task: tallies.get((task, draw.status, Tally.SIZE), 0) for task in draw.at_least}
        if draw.where is not None:
            for task, least in draw.at_least.items():
                lane = (ScalarNode("task_name", "$eq", task), ScalarNode("status", "$eq", draw.status.value))
                query = LogicNode("$and", (*lane, draw.where))
                counts[task] = await self._storage.count(query, at_most=least) if least and counts[task] else 0
        return counts

    def _count_drawable(self, draw: Draw, tallies: Tallies, in_store: dict[str, int]) -> dict[str, int]:
        """Return how many of the groups in the store the limits allow to be drawn now."""
        limits = self._storage.rules.limits
        if draw.status != Status.COMPLETED or not limits.slows_draws:
            return in_store
        return {task: min(count, limits.drawable(level_of(tallies, task))) for task, count in in_store.items()}

    # Why

    async def why(
        self, wait: Wait, tallies: Tallies, matches: Mapping[str, int] | None = None, *, over: bool = False
    ) -> Diagnosis:
        """Return the diagnosis of a wait that isn't over, given the tallies, and the numbers that match its query.

        Further facts are read from the store, ignoring errors. At the end of waits (`over`), which may be many short
        ones, they are read at most once a second and cached in between.
        """
        about = Circumstances(time.time(), tallies)
        if over and self._circumstances is not None and time.monotonic() - self._circumstances_at < _READ_AGAIN_SECONDS:
            about = self._circumstances
        else:
            if over:
                self._circumstances_at = time.monotonic()
            with suppress(StorageError):
                about = await self._storage.circumstances()
                self._circumstances = about
        return diagnose(wait, replace(about, tallies=tallies, matches=matches))

    async def why_not(self, draw: Draw) -> Diagnosis:
        """Return the diagnosis of a draw if it were issued now."""
        tallies = await self._storage.fenced_tallies()
        matches = None if draw.where is None else await self._count_matching(draw, tallies)
        return await self.why(self._wait_of(draw, time.time(), 0), tallies, matches)

    def for_trainer(self, timeout: float) -> WaitReport:
        """Return the report of a producer's wait for the trainer, to be closed by the caller."""
        wait = self._new_wait({}, time.time(), timeout, kind="trainer")
        return WaitReport(self._storage, "waiting for the trainer", wait)

    def dataset_ended(self, task_name: str, ledger: str, drawn: int) -> None:
        """Publish that a prompt ledger has exhausted its dataset after `drawn` prompts."""
        ended = WorkerEvent(EventKind.DATASET_ENDED, self._storage.worker, time.time(), drawn, ledger, task_name)
        self._storage.presence.report(ended)

    def _wait_of(self, draw: Draw, since: float, timeout: float) -> Wait:
        wants = {task: least for task, least in draw.at_least.items() if least}
        query = None if draw.where is None else to_text(draw.where)
        takes_more = any(draw.sizes[task] > least for task, least in wants.items())
        return self._new_wait(wants, since, timeout, status=draw.status, query=query, at_least=takes_more)

    def _new_wait(self, wants: Mapping[str, int], since: float, timeout: float, **about: Any) -> Wait:
        deadline = None if math.isinf(timeout) else since + timeout
        limits, worker = self._storage.rules.limits, self._storage.worker
        return Wait(wants, since=since, deadline=deadline, limits=limits, worker=worker, **about)

    # For room

    async def put(self, new: NewGroup, timeout: float, store: Callable[[NewGroup], Awaitable[T]]) -> T:
        """Return the result of `store(new)`, which stores a group, once there is room for it. Raises FullError.

        The timeout includes the first attempt, which may wait for a lock or a connection.
        """
        limits, deadline, began = self._storage.rules.limits, time.monotonic() + timeout, time.time()
        # A rollout of a group that fills needs room only if it is the last one, for a completed group.
        queue = self._queue((new.task_name, new.status if new.part is None else Status.COMPLETED))
        if not queue.waiting or new.part is not None:
            try:
                return await store(new)
            except FullError as error:
                if limits.on_full == "reject" or timeout <= 0:
                    await self._refuse(new, f"{error}; nothing was stored. {_ADVICE}", error)

        wait = self._new_wait({}, began, timeout, kind="room", status=new.status)
        queue.waiting += 1
        try:
            report = WaitReport(self._storage, "waiting for room", wait)
            with _timed_wait(self.for_room, "room"), closing(report):
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await queue.turn.acquire()
                except TimeoutError as error:
                    reason = f"after {timeout:g} s: task {new.task_name}: others wait for room, too"
                    await self._refuse(new, f"{reason}; nothing was stored (is the consumer running?)", error)
                try:
                    return await self._put_in_turn(new, queue, deadline, timeout, report, store)
                finally:
                    queue.turn.release()
        finally:
            queue.waiting -= 1

    async def _put_in_turn(
        self,
        new: NewGroup,
        queue: _WaitQueue,
        deadline: float,
        timeout: float,
        report: WaitReport,
        store: Callable[[NewGroup], Awaitable[T]],
    ) -> T:
        limits, replaces = self._storage.rules.limits, new.key is not None or bool(new.replaces)
        while True:
            self._storage.check_open()
            version = self._storage.version()
            tallies = await self._storage.fenced_tallies()
            level = level_of(tallies, new.task_name)
            if replaces or limits.insertable(level, new.status) != 0:
                try:
                    return await store(new)
                except FullError as error:  # another process was faster
                    reason = str(error)
            else:
                reason = f"task {new.task_name}: {limits.why_full(level, new.status)}"
            remaining = deadline - time.monotonic()
            if remaining <= 0 or report.due:
                report.wait = replace(report.wait, wants={new.task_name: queue.waiting})
                diagnosis = await self.why(report.wait, tallies, over=remaining <= 0)
                full = diagnosis.reason == Reason.HELD_BACK  # otherwise only this group lacks room
                sentence, details = (diagnosis.sentence, str(diagnosis)) if full else (reason, reason)
                if remaining <= 0:
                    await report.timed_out(sentence, new.task_name)
                    details = f"after {timeout:g} s: {details}; nothing was stored"
                    await self._refuse(new, details, diagnosis=diagnosis)
                report.update(sentence, details)
            await self._storage.changed(min(remaining, report.pause), version)

    async def _refuse(
        self, new: NewGroup, reason: str, cause: BaseException | None = None, diagnosis: Diagnosis | None = None
    ) -> None:
        with suppress(StorageError, TimeoutError):  # the count of refusals is best effort
            async with asyncio.timeout(_COUNTING_SECONDS):
                await self._storage.refuse(new)
        error = FullError(reason)
        error.diagnosis = diagnosis
        raise error from cause

    def _queue(self, lane: LaneName) -> _WaitQueue:
        return self._queues.setdefault(asyncio.get_running_loop(), {}).setdefault(lane, _WaitQueue())


@contextmanager
def _timed_wait(waited: WaitStats, kind: str) -> Iterator[None]:
    """Time a wait, and make a span of it."""
    began = time.monotonic()
    try:
        with span("replaybuf.wait", kind=kind):
            yield
    except TimeoutError:
        waited.timeouts += 1
        raise
    finally:
        waited.count += 1
        waited.seconds += time.monotonic() - began


def _start_of_wait(deadline: float, timeout: float) -> float:
    """Return the start of a wait with this deadline, in seconds since the epoch; now without a timeout."""
    return time.time() - (0.0 if math.isinf(timeout) else timeout - (deadline - time.monotonic()))
