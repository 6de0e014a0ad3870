"""A load: its settings, its groups, and the loops of workers (puts) and trainers (takes, leases) over a buffer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from replaybuf import FullError, NotReadyError, ReplayBuffer, ReplayBufferConfig, RolloutState, Status, StorageError
from replaybuf.bench.counted import LoadCounter
from replaybuf.errors import InputError, ReplayBufError
from replaybuf.places.owners import IN_DATABASE
from replaybuf.storage.values import StorageItem

T = TypeVar("T")

TASK = "bench"
_GROUP = re.compile(r"(\d{1,4})x(\d{1,7})")
_POOL = 1 << 20  # tokens from which responses are sliced
_PROMPT_TOKENS = 64


@dataclass(frozen=True)
class BenchSettings:
    """A load: `workers` processes put, `trainers` processes take `take` groups at a time, for `seconds`.

    A group has `rollouts` responses of `tokens` tokens each, as arrays or `lists`, and `extra` bytes in one array. A
    worker puts `rate` groups a second (0: as fast as possible), up to `concurrency` concurrently, and at most `groups`
    (0: any number); the load ends when all workers have. Workers pause while there are more than `most` groups, polled
    once a second (0: never). With a `capacity` the buffer itself blocks puts, exactly. Trainers train for
    `step_seconds` after each batch. `joined`: other loads use the same buffer, which isn't emptied at the end.
    """

    url: str
    buffer: str
    workers: int = 8
    trainers: int = 1
    rollouts: int = 8
    tokens: int = 4000
    lists: bool = False
    extra: int = 0
    seconds: float = 60.0
    groups: int = 0
    rate: float = 0.0
    concurrency: int = 1
    take: int = 64
    leases: bool = False
    step_seconds: float = 0.0
    most: int = 4096
    capacity: int = 0
    payloads: str = IN_DATABASE
    joined: bool = False
    keep: bool = False

    def check(self) -> None:
        """Raise InputError for settings that can't be measured."""
        if not self.workers and not self.trainers:
            raise InputError("neither workers nor trainers: nothing would be done; give --workers or --trainers")
        if not self.seconds > 0:
            raise InputError(f"--minutes must be more than 0, got {self.seconds / 60:g}")
        if 0 < self.capacity < self.take:
            raise InputError(f"a take of {self.take} groups never finds them in a buffer of --capacity {self.capacity}")
        if 0 < self.most < self.take:
            raise InputError(f"a take of {self.take} groups never finds them if workers pause at --most {self.most}")
        if not self.workers and not self.joined:
            raise InputError("without --workers there is nothing to take, unless this load is to --join another one")

    def config(self, worker: str | None = None) -> ReplayBufferConfig:
        """Return the config of the buffer, with the name of a worker."""
        return ReplayBufferConfig(
            url=self.url,
            name=self.buffer,
            policy="fifo",
            capacity=self.capacity or None,
            on_full="block" if self.capacity else "evict",
            payloads=self.payloads,
            worker=worker,
        )


def parse_group(text: str) -> tuple[int, int]:
    """Parse `8x4000`: return the rollouts of a group, and the tokens of each. Raises InputError."""
    found = _GROUP.fullmatch(text.strip().lower().replace(",", "").replace("_", ""))
    if found is None or not int(found[1]):
        raise InputError(f"{text!r:.50} is no group: write ROLLOUTSxTOKENS, as in 8x4000")
    if int(found[2]) > _POOL // 2:
        raise InputError(f"{int(found[2]):,} tokens in a response: at most {_POOL // 2:,} can be made; see --extra")
    return int(found[1]), int(found[2])


class GroupMaker:
    """Makes groups of new rollouts over slices of preallocated arrays, which takes little time."""

    def __init__(self, settings: BenchSettings, number: int) -> None:
        random = np.random.default_rng(number)
        self._settings = settings
        self._ids = random.integers(0, 150_000, _POOL).astype(np.int32)
        self._logprobs = random.normal(-1, 0.5, _POOL).astype(np.float32)
        self._extra = random.integers(0, 256, settings.extra).astype(np.uint8)
        self._number = number << 40
        self._made = 0

    def make(self) -> list[RolloutState]:
        """Return a new group; no two groups of a load begin with the same tokens or have the same rollout ids."""
        self._made += 1
        group = [self._rollout(place) for place in range(self._settings.rollouts)]
        if self._settings.extra:
            group[0].extra_fields["extra"] = self._extra
        return group

    def _rollout(self, place: int) -> RolloutState:
        tokens, number = self._settings.tokens, self._number + self._made * self._settings.rollouts + place
        start = number * 7919 % (_POOL - tokens - _PROMPT_TOKENS)
        fields: dict[str, Any] = {
            "prompt_ids": self._ids[start : start + _PROMPT_TOKENS],
            "response_ids": self._ids[start + _PROMPT_TOKENS : start + _PROMPT_TOKENS + tokens],
            "logprobs": self._logprobs[start : start + tokens],
        }
        if self._settings.lists:
            fields = {name: array.tolist() for name, array in fields.items()}
        return RolloutState(
            rollout_id=number,
            message=[{"role": "user", "content": "A train leaves at 9:40 and arrives at 12:05. How long does it go?"}],
            response="It goes for two hours and 25 minutes.",
            finish_reason="stop",
            reward=float(number % 2),
            status=Status.COMPLETED,
            **fields,
        )


# Calls

#: Timeouts of puts and takes, in seconds; timeouts are counted, and the calls retried.
PUT_SECONDS, TAKE_SECONDS = 5.0, 30.0
#: Pause after an error, in seconds, so that an unreachable database isn't called in a busy loop.
PAUSE_SECONDS = 0.2
_LOOK_SECONDS = 0.5
MODEL_STEP, TRAIN_STEP = 1, 2


@dataclass(slots=True)
class Load:
    """A load in this process: from `start` to `until` of the monotonic clock, unless `stop` is set before."""

    settings: BenchSettings
    number: int
    buffer: ReplayBuffer
    counter: LoadCounter
    start: float
    until: float
    stop: asyncio.Event
    room: asyncio.Event

    @property
    def over(self) -> bool:
        """Whether the load has ended: no further call begins."""
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
    """Put groups, as fast as possible or on schedule, and count.

    With a rate, latencies are also measured from when a put was due, so that the wait of a put behind a slow one counts
    (no coordinated omission).
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
    """Yield the due times of puts: at a constant rate, with an offset per worker; without a rate always now."""
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
    """Put a group; retry if there is no room within PUT_SECONDS."""
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
    """Wait while there are too many groups; return False if the load ends first."""
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
    """Take batches until the parent sets `stop` after the workers have ended, and count."""
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
        counter.report.taken.add(*(item.uid for item in items))
    if settings.step_seconds:
        await load.at(time.monotonic() + settings.step_seconds)
    if lease is not None:
        begun = time.monotonic()
        await lease.acknowledge()
        if begun < load.until:
            counter.latency("acknowledge", begun, time.monotonic() - begun)
        counter.report.taken.add(*(item.uid for item in items))


async def _unless_stopped(load: Load, call: Awaitable[T]) -> T | None:
    """Return the result of a call; cancel it when the load is stopped, which leaves its groups in the store."""
    calling, stopping = asyncio.ensure_future(call), asyncio.create_task(load.stop.wait())
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
    """Raise ReplayBufError for a group that differs from the one put."""
    for item in items:
        lengths = {len(rollout.response_ids) for rollout in item.item}  # type: ignore[attr-defined]
        if len(item.item) != settings.rollouts or lengths != {settings.tokens}:
            raise ReplayBufError(
                f"group {item.uid} has {len(item.item)} rollouts of {sorted(lengths)} tokens: it isn't what was put"
            )
