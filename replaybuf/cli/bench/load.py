"""A load: its settings, its groups, and the loops of workers (puts) and trainers (takes, leases) over a buffer."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.synchronize import Event

import numpy as np

from replaybuf import NotReadyError, ReplayBuffer, ReplayBufferConfig, RolloutState, Status
from replaybuf.cli.bench import MOST_GROUPS
from replaybuf.errors import FullError, InputError, StorageError

TASK = "bench"
_GROUP = re.compile(r"(\d{1,4})x(\d{1,7})")
_POOL = 1 << 20  # tokens from which responses are sliced
_PROMPT_TOKENS = 64
#: The timeout of a wait for groups or for room in seconds, after which it is repeated.
WAIT_SECONDS = 2.0
#: Pause after an error, in seconds, so that an unreachable database isn't called in a busy loop.
_PAUSE_SECONDS = 0.2
MODEL_STEP, TRAIN_STEP = 1, 2


@dataclass(frozen=True)
class BenchSettings:
    """A load: `workers` processes put, `trainers` processes take `take` groups at a time, for `seconds`.

    A group has `rollouts` responses of `tokens` tokens each. A worker puts `rate` groups a second (0: as fast as
    possible), one after the other. Workers wait while there are `MOST_GROUPS`. Trainers train for `step_seconds` after
    each batch. `payloads` is the config's.
    """

    url: str
    buffer: str
    workers: int = 8
    trainers: int = 1
    rollouts: int = 8
    tokens: int = 4000
    seconds: float = 60.0
    rate: float = 0.0
    take: int = 64
    leases: bool = False
    step_seconds: float = 0.0
    payloads: str = "database"

    def config(self, worker: str | None = None) -> ReplayBufferConfig:
        """Return the config of the buffer, with the name of a worker."""
        return ReplayBufferConfig(
            url=self.url,
            name=self.buffer,
            policy="fifo",
            payloads=self.payloads,
            capacity=MOST_GROUPS,
            on_full="block",
            worker=worker,
        )


def parse_group(text: str) -> tuple[int, int]:
    """Parse `8x4000`: return the rollouts of a group, and the tokens of each. Raises InputError."""
    match = _GROUP.fullmatch(text)
    if match is None or not int(match[1]):
        raise InputError(f"{text!r:.50} is no group: write ROLLOUTSxTOKENS, as in 8x4000")
    if int(match[2]) > _POOL // 2:
        raise InputError(f"{int(match[2]):,} tokens in a response: at most {_POOL // 2:,} can be made")
    return int(match[1]), int(match[2])


class GroupMaker:
    """Makes groups of new rollouts over slices of preallocated arrays, which takes little time."""

    def __init__(self, settings: BenchSettings, number: int) -> None:
        random = np.random.default_rng(number)
        self._settings = settings
        self._token_ids = random.integers(0, 150_000, _POOL).astype(np.int32)
        self._logprobs = random.normal(-1, 0.5, _POOL).astype(np.float32)
        self._rollouts = count(number << 40)

    def make(self) -> list[RolloutState]:
        """Return a new group; no two groups of a load begin with the same tokens or have the same rollout ids."""
        return [self._rollout(next(self._rollouts)) for _ in range(self._settings.rollouts)]

    def _rollout(self, number: int) -> RolloutState:
        tokens = self._settings.tokens
        start = number * 7919 % (_POOL - tokens - _PROMPT_TOKENS)
        end = start + _PROMPT_TOKENS
        return RolloutState(
            rollout_id=number,
            message=[{"role": "user", "content": "A train leaves at 9:40 and arrives at 12:05. How long does it go?"}],
            response="It goes for two hours and 25 minutes.",
            prompt_ids=self._token_ids[start:end],
            response_ids=self._token_ids[end : end + tokens],
            logprobs=self._logprobs[start : start + tokens],
            finish_reason="stop",
            reward=float(number % 2),
            status=Status.COMPLETED,
        )


@dataclass(slots=True)
class Report:
    """The work of a process: uids, latencies in seconds by call, and errors by call and text.

    `waited` are the seconds in which calls waited inside the buffer, for groups or for room; `in_doubt` counts puts
    that may or may not be stored.
    """

    put: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    latencies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    waited: float = 0.0
    in_doubt: int = 0

    def error(self, call: str, error: BaseException) -> None:
        """Count an error that a user would see."""
        self.errors[(call, f"{type(error).__name__}: {error}")] += 1
        self.in_doubt += bool(getattr(error, "in_doubt", False))

    def add(self, other: Report) -> None:
        """Add the work of another process."""
        self.put += other.put
        self.taken += other.taken
        for call, seconds in other.latencies.items():
            self.latencies[call] += seconds
        self.errors.update(other.errors)
        self.waited += other.waited
        self.in_doubt += other.in_doubt


@dataclass(slots=True)
class Load:
    """A load in this process: from `start` to `until` of the monotonic clock, unless `stop` is set before.

    Trainers go on until `workers_ended` is set. Both are events that the processes of a load share.
    """

    settings: BenchSettings
    number: int
    buffer: ReplayBuffer
    start: float
    until: float
    stop: Event
    workers_ended: Event
    report: Report = field(default_factory=Report)

    @property
    def is_over(self) -> bool:
        """True once no further put may begin."""
        return self.stop.is_set() or time.monotonic() >= self.until

    async def at(self, due: float) -> bool:
        """Wait until a time; return False if the load is over before."""
        while not self.is_over:
            if (remaining := due - time.monotonic()) <= 0:
                return True
            await asyncio.sleep(min(remaining, _PAUSE_SECONDS))
        return False

    def put_at(self) -> Iterator[float]:
        """Yield the due times of puts: at a constant rate, with an offset per worker; without a rate always now."""
        interval = 1 / self.settings.rate if self.settings.rate else 0.0
        first_due = self.start + interval * (self.number * 0.618034 % 1)
        for number in count():
            due = first_due + number * interval if interval else time.monotonic()
            if due >= self.until:
                return
            yield due


async def work(load: Load) -> None:
    """Put groups, as fast as possible or on schedule.

    With a rate, latencies are measured from when a put was due, so that the wait of a put behind a slow one counts (no
    coordinated omission).
    """
    maker = GroupMaker(load.settings, load.number)
    for due in load.put_at():
        if not await load.at(due):
            break
        await _put(load, maker.make(), due)
    load.report.waited = load.buffer.waits.for_room.seconds


async def _put(load: Load, group: list[RolloutState], due: float) -> None:
    """Put a group, after a wait for room if there are many."""
    waits = load.buffer.waits.for_room
    while not load.is_over:
        start, waited = time.monotonic(), waits.seconds
        try:
            uid = await load.buffer.put(
                group, TASK, model_step=MODEL_STEP, current_train_step=TRAIN_STEP, timeout=WAIT_SECONDS
            )
        except FullError:
            continue
        except StorageError as error:
            load.report.error("put", error)
            await asyncio.sleep(_PAUSE_SECONDS)
            return
        now, room_wait = time.monotonic(), waits.seconds - waited
        assert uid is not None, "a completed group is stored"
        load.report.put.append(uid)
        load.report.latencies["put"].append(now - (due if load.settings.rate else start) - room_wait)
        return


async def train(load: Load) -> None:
    """Take batches until the workers have ended."""
    while not (load.stop.is_set() or load.workers_ended.is_set()):
        try:
            await _train_step(load)
        except NotReadyError:
            continue
        except StorageError as error:
            load.report.error("take", error)
            await asyncio.sleep(_PAUSE_SECONDS)
    load.report.waited = load.buffer.waits.for_groups.seconds


async def _train_step(load: Load) -> None:
    """Take a batch or lease it, train on it, and acknowledge the lease."""
    settings, waits = load.settings, load.buffer.waits.for_groups
    sizes, start, waited = {TASK: settings.take}, time.monotonic(), waits.seconds
    lease = None
    if settings.leases:
        lease = await load.buffer.lease_batch(sizes, timeout=WAIT_SECONDS)
        items = lease.items[TASK]
    else:
        items = (await load.buffer.sample(sizes, timeout=WAIT_SECONDS))[TASK]
    load.report.latencies["take"].append(time.monotonic() - start - (waits.seconds - waited))
    if settings.step_seconds:
        await load.at(time.monotonic() + settings.step_seconds)
    if lease is not None:
        start = time.monotonic()
        await lease.acknowledge()
        load.report.latencies["acknowledge"].append(time.monotonic() - start)
    load.report.taken += [item.uid for item in items]
