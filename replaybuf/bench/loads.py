"""The load of a worker (puts) and of a trainer (takes, or leases), by the public calls of a buffer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from replaybuf import FullError, NotReadyError, ReplayBuffer, StorageError
from replaybuf.bench.counted import Counter
from replaybuf.bench.settings import TASK, BenchSettings, GroupMaker
from replaybuf.errors import ReplayBufError
from replaybuf.storage.values import StorageItem

T = TypeVar("T")

#: How long a put waits for room, and a take for a batch, before it is counted and made again.
PUT_SECONDS, TAKE_SECONDS = 5.0, 30.0
#: How long to pause after an error, so that a database that is gone isn't asked all the time.
PAUSE_SECONDS = 0.2
_LOOK_SECONDS = 0.5
MODEL_STEP, TRAIN_STEP = 1, 2


@dataclass(slots=True)
class Load:
    """A load in this process: from `start` to `until` of the monotonic clock, unless `stop` is set before."""

    settings: BenchSettings
    number: int
    buffer: ReplayBuffer
    counter: Counter
    start: float
    until: float
    stop: asyncio.Event
    room: asyncio.Event

    @property
    def over(self) -> bool:
        """Whether the load has ended: no call begins after that."""
        return self.stop.is_set() or time.monotonic() >= self.until

    async def at(self, due: float) -> bool:
        """Wait until a time; return False if the load is over before."""
        while not self.over:
            if (left := due - time.monotonic()) <= 0:
                return True
            await asyncio.sleep(min(left, _LOOK_SECONDS))
        return False


# Workers


async def work(load: Load) -> None:
    """Put groups, as fast as possible or each when it is due, and count.

    With a rate, latency is that from when a put was due as well: a put that waits because another one is slow counts
    with its wait, as a worker that isn't slowed down by the database would see it.
    """
    maker = GroupMaker(load.settings, load.number)
    arrivals = islice(_arrivals(load), load.settings.groups or None)

    async def one_after_another() -> None:
        for due in arrivals:
            if not await load.at(due):
                load.counter.report.late += bool(load.settings.rate) and due < time.monotonic()
                return
            await _put(load, maker, due)

    await asyncio.gather(*(one_after_another() for _ in range(load.settings.concurrency)))
    if load.settings.rate:
        load.counter.report.late += sum(due < time.monotonic() for due in arrivals)


def _arrivals(load: Load) -> Iterator[float]:
    """Yield when puts are due: at a steady rate, with the workers out of step; without a rate always now."""
    if not load.settings.rate:
        while time.monotonic() < load.until:
            yield time.monotonic()
        return
    interval = 1 / load.settings.rate
    due = load.start + interval * (load.number * 0.618034 % 1)
    while due < load.until:
        yield due
        due += interval


async def _put(load: Load, maker: GroupMaker, due: float) -> None:
    """Put a group, again if there was no room for it within PUT_SECONDS."""
    counter, room, group = load.counter, load.buffer.waits.for_room, maker.make()
    if not await _room(load):
        counter.report.late += bool(load.settings.rate)
        return
    begun, waits = time.monotonic(), room.count
    while True:
        try:
            uid = await load.buffer.put(
                group, TASK, model_step=MODEL_STEP, current_train_step=TRAIN_STEP, timeout=PUT_SECONDS
            )
            break
        except FullError:
            counter.report.refused += 1
            if load.over:
                return
        except StorageError as error:
            counter.error("put", error)
            await asyncio.sleep(PAUSE_SECONDS)
            return
        finally:
            counter.held(room.count, room.seconds)
    now = time.monotonic()
    assert uid is not None, "a completed group is stored"
    counter.report.put.add(uid)
    counter.latency("put" if room.count == waits else "put_waited", begun, now - begun)
    if load.settings.rate:
        counter.latency("put_due", due, now - due)


async def _room(load: Load) -> bool:
    """Wait while there are too many groups; return False if the load is over before."""
    if load.room.is_set():
        return True
    begun = time.monotonic()
    load.counter.report.pauses += 1
    while not (load.over or load.room.is_set()):
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await load.room.wait()
    load.counter.report.paused += time.monotonic() - begun
    return not load.over


# Trainers


async def train(load: Load) -> None:
    """Take batches until `stop`, at first for as long as workers put, and count."""
    while not load.stop.is_set():
        try:
            await _train_step(load)
        except NotReadyError:
            load.counter.report.starved += 1
        except StorageError as error:
            load.counter.error("take", error)
            await asyncio.sleep(PAUSE_SECONDS)


async def _train_step(load: Load) -> None:
    """Take a batch or lease it, train on it, and acknowledge the lease."""
    settings, counter, groups = load.settings, load.counter, load.buffer.waits.for_groups
    sizes, begun, waited = {TASK: settings.take}, time.monotonic(), groups.seconds
    try:
        if settings.leases:
            lease = await _unless_stopped(load, load.buffer.lease_batch(sizes, timeout=TAKE_SECONDS))
            items = [] if lease is None else lease.items[TASK]
        else:
            lease = None
            taken = await _unless_stopped(load, load.buffer.sample(sizes, timeout=TAKE_SECONDS))
            items = [] if taken is None else taken[TASK]
    finally:
        counter.held(groups.count, groups.seconds)
    if not items:
        return
    seconds = time.monotonic() - begun - (groups.seconds - waited)
    if begun < load.until:
        counter.latency("take", begun, seconds)
    _check(settings, items)
    if lease is None:
        counter.report.taken.add_all(item.uid for item in items)
    if settings.step_seconds:
        await load.at(time.monotonic() + settings.step_seconds)
    if lease is not None:
        begun = time.monotonic()
        await lease.acknowledge()
        if begun < load.until:
            counter.latency("acknowledge", begun, time.monotonic() - begun)
        counter.report.taken.add_all(item.uid for item in items)


async def _unless_stopped(load: Load, call: Awaitable[T]) -> T | None:
    """Return the result of a call; when the load is stopped it is cancelled, which leaves its groups in the store."""

    async def awaited() -> T:
        return await call

    calling, stopping = asyncio.create_task(awaited()), asyncio.create_task(load.stop.wait())
    try:
        await asyncio.wait((calling, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not calling.done():
            calling.cancel()
    try:
        return await calling
    except asyncio.CancelledError:
        if load.stop.is_set():
            return None
        raise


def _check(settings: BenchSettings, items: list[StorageItem[object]]) -> None:
    """Raise ReplayBufError for a group that isn't what was put."""
    for item in items:
        lengths = {len(rollout.response_ids) for rollout in item.item}  # type: ignore[attr-defined]
        if len(item.item) != settings.rollouts or lengths != {settings.tokens}:
            raise ReplayBufError(
                f"group {item.uid} has {len(item.item)} rollouts of {sorted(lengths)} tokens: it isn't what was put"
            )
