"""The circumstances of waits in a buffer: tallies, leases, live and silent workers, other waits, the trainer's state.

All are plain values, read by a store (`storage.sql.inspection.wait_facts`) or known to a process itself: all but the
time and the tallies may be missing. Times are in seconds since the epoch, by the store's clock.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from replaybuf.common.checks import check_step, check_whole, shown
from replaybuf.errors import InputError
from replaybuf.rules.limits import Limits
from replaybuf.rules.transitions import LaneName, Tallies, Tally, expired_ever, total
from replaybuf.values.rollouts.statuses import Status

#: The statuses of groups that producers lease: to generate, continue or regenerate them.
IN_FLIGHT = (Status.INIT, Status.ABORTED, Status.EXPIRED)

#: Without a heartbeat for this long, a worker that didn't end is silent: it was killed, or its host is lost.
SILENT_SECONDS = 60.0
#: Active workers send heartbeats more often than this: a wait whose last heartbeat is older is over.
LIVE_SECONDS = 15.0
#: Groups still arrive if the last one was put within this many seconds.
_PAUSE = 30.0

#: The name of the cursor of the trainer's state, in the table in which prompt ledgers keep their positions.
TRAINER = "replaybuf:trainer"


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for at least `wants[task]` groups of each task, of one status and matching the `query` (JSON) if given.

    `kind` is "groups"; "room" (then the numbers are groups to put); or "trainer" (a producer waits for newly published
    weights). `worker` is the waiting worker's name, and `limits` are those that it applies, None if they can't be read.
    `at_least`: the call would take more groups if there were more.
    """

    wants: Mapping[str, int]
    kind: str = "groups"
    status: Status = Status.COMPLETED
    query: str | None = None
    worker: str | None = None
    since: float | None = None
    deadline: float | None = None
    limits: Limits | None = None
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class TrainState:
    """The trainer's state, for workers: `train_step` is its next step, `model_step` that of its newest weights.

    `weights` locates the weights (a path, a URL, a name that the workers understand). `finished` is true after the
    trainer's last step.
    """

    train_step: int
    model_step: int
    weights: str | None = None
    finished: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "train_step", check_whole(self.train_step, "train_step"))
        object.__setattr__(self, "model_step", check_step(self.model_step, "model_step"))
        if self.weights is not None and not isinstance(self.weights, str):
            raise InputError(f"weights must be a text that says where they are, or None, got {shown(self.weights)}")
        if not isinstance(self.finished, bool):
            raise InputError(f"finished must be true or false, got {shown(self.finished)}")

    def encode(self) -> bytes:
        """Return the state as the store keeps it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes) -> TrainState:
        """Decode a state from `encode`. Raises InputError for anything else."""
        try:
            return cls(**json.loads(value))
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError(f"this is not what a trainer has published: {error}") from error


@dataclass(frozen=True, slots=True)
class Held:
    """Leased groups of one task and status: the holder, and the end of the lease."""

    task_name: str
    status: Status
    holder: str | None
    groups: int
    until: float


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that has used the buffer under this name, and its recent activity.

    `groups` were put, of which `failures` failed (including deliveries returned as failed), and `taken` were drawn.
    `waits`: it was waiting at its last heartbeat. `killed`: it ran on the reader's machine, and isn't there any more.
    `epoch` is the number of restores of the buffer before it was opened there.
    """

    name: str
    started_at: float
    seen_at: float
    ended_at: float | None = None
    groups: int = 0
    failures: int = 0
    taken: int = 0
    host: str = ""
    pid: int = 0
    waits: bool = False
    killed: bool = False
    epoch: int = 0

    @property
    def left_at(self) -> float:
        """The time at which it ended, or else was last seen."""
        return self.seen_at if self.ended_at is None else self.ended_at

    def state(self, now: float) -> str:
        """Return "alive", "silent" (killed, or its last heartbeat is so old that it must be gone) or "ended"."""
        late = now - self.seen_at > (LIVE_SECONDS if self.waits else SILENT_SECONDS)
        return "ended" if self.ended_at is not None else "silent" if self.killed or late else "alive"

    def is_alive(self, now: float) -> bool:
        """Return whether the process has neither ended nor fallen silent."""
        return self.state(now) == "alive"


@dataclass(frozen=True, slots=True)
class Taking:
    """The last draw: its worker, time and number of groups."""

    worker: str | None
    time: float
    groups: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The last restore of the buffer: its time and worker. `epoch` is the number of restores up to it."""

    time: float
    worker: str | None = None
    epoch: int = 1


@dataclass(frozen=True)
class Circumstances:
    """The known state of a buffer at the time `now`.

    `matches` is the number of groups of each task that match the wait's query. `trainer` is the published trainer
    state, `steps` the train step of each task's last refresh, `last_put` the time of the last put of each task and
    status as far as known, and `errors` the error of a task's newest failed group. `earlier` has the totals of each
    task as they were recorded at the time `earlier_at` an hour ago; None if the buffer is younger. `datasets` is the
    number of prompts drawn of each task whose dataset was read to its end. `others` are other buffers of the database,
    as far as known if nothing was put into this one.
    """

    now: float
    tallies: Tallies
    held: Sequence[Held] = ()
    workers: Sequence[Worker] = ()
    waits: Sequence[Wait] = ()
    matches: Mapping[str, int] | None = None
    trainer: TrainState | None = None
    steps: Mapping[str, int] = field(default_factory=dict)
    earlier: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    earlier_at: float | None = None
    last_put: Mapping[LaneName, float] = field(default_factory=dict)
    last_take: Taking | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    restored: Restored | None = None
    datasets: Mapping[str, int] = field(default_factory=dict)
    others: Sequence[str] = ()

    # Groups

    def count(self, task: str, status: Status, name: Tally = Tally.SIZE) -> int:
        """Return a tally."""
        return self.tallies.get((task, status, name), 0)

    def unfinished(self, task: str, name: Tally = Tally.SIZE) -> int:
        """Return the number of groups that wait for a producer, to be generated, continued or regenerated; or that
        producers have leased for that (LEASED)."""
        return total(self.tallies, task, name, IN_FLIGHT)

    def abandoned_leases(self, task: str) -> list[Held]:
        """Return the leases of unfinished groups of a task whose holders are gone."""
        lost = {worker.name for worker in self.gone}
        return [row for row in self.held if row.task_name == task and row.status in IN_FLIGHT and row.holder in lost]

    def holders(self, task: str, statuses: Collection[Status]) -> Counter[str]:
        """Return the numbers of leased groups of a task and these statuses by holder."""
        counts = Counter[str]()
        for lease in self.held:
            if lease.task_name == task and lease.status in statuses:
                counts[lease.holder or "somebody"] += lease.groups
        return counts

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks into which groups were put."""
        counted = (Tally.PUT, Tally.SIZE, Tally.LEASED)
        names = {task for task, _, _ in self.tallies}
        return sorted(task for task in names if any(total(self.tallies, task, name) for name in counted))

    def last(self, task: str) -> float | None:
        """Return the time of the last put of a task, None if unknown."""
        return max((time for (name, _), time in self.last_put.items() if name == task), default=None)

    def arrives(self, task: str, status: Status) -> bool:
        """Return whether groups of a status arrive: one was put just now, and a producer is left."""
        last_put = self.last_put.get((task, status))
        return last_put is not None and self.now - last_put <= _PAUSE and not self.abandoned

    def put(self, task: str, status: Status, *, lately: bool = False) -> int:
        """Return the number of groups of a status that were put, ever or since `earlier_at`."""
        before: Mapping[str, int] = self.earlier.get(task, {}).get("put_of", {}) if lately else {}
        return max(0, self.count(task, status, Tally.PUT) - before.get(str(status), 0))

    def losses(self, task: str, *, lately: bool = False) -> dict[Status, tuple[int, int]]:
        """Return the numbers of lost groups of a task, ever or since `earlier_at`, each with that of all that came.

        They are EXPIRED in a refresh or before their put, FILTERED, or FAILED when they were put or set aside later.
        """
        before = self.earlier.get(task, {}) if lately else {}
        good, expired, filtered, failed = (
            self.put(task, status, lately=lately)
            for status in (Status.COMPLETED, Status.EXPIRED, Status.FILTERED, Status.FAILED)
        )
        aside = max(0, total(self.tallies, task, Tally.SET_ASIDE) - before.get("set_aside", 0))
        spoilt = min(aside, self.count(task, Status.COMPLETED, Tally.SET_ASIDE))
        gone = max(0, expired_ever(self.tallies, task) - before.get("expired_ever", 0))
        return {  # what was lost lately may have come before
            Status.EXPIRED: (gone, max(gone, good + expired)),
            Status.FILTERED: (filtered, filtered + good),
            Status.FAILED: (failed + aside, failed + aside + max(0, good - spoilt)),
        }

    # Workers

    @cached_property
    def producers(self) -> list[Worker]:
        """The workers that have put groups, lease unfinished ones, or wait for room or the trainer."""
        waiting = {wait.worker for wait in self.waits if wait.kind != "groups"}
        busy = {lease.holder for lease in self.held if lease.status in IN_FLIGHT} | waiting
        return [worker for worker in self.workers if worker.groups or worker.failures or worker.name in busy]

    @cached_property
    def alive(self) -> list[Worker]:
        """The producers that have neither ended nor fallen silent, and can put groups."""
        return [worker for worker in self.producers if worker.is_alive(self.now) and not self.is_fenced(worker)]

    @cached_property
    def gone(self) -> list[Worker]:
        """The workers of whose name none is alive."""
        alive = {worker.name for worker in self.workers if worker.is_alive(self.now)}
        return [worker for worker in self.workers if worker.name not in alive]

    @property
    def abandoned(self) -> bool:
        """Whether there were producers, and none is alive."""
        return bool(self.producers) and not self.alive

    def is_fenced(self, worker: Worker) -> bool:
        """Return whether another process restored the buffer while this one had it open, so that it can put nothing."""
        restored = self.restored
        if restored is None or worker.epoch >= restored.epoch:
            return False
        restorers = {(other.host, other.pid) for other in self.workers if other.name == restored.worker}
        end = worker.seen_at + LIVE_SECONDS if worker.ended_at is None else worker.ended_at
        return end >= restored.time and (worker.host, worker.pid) not in restorers

    def state_of(self, worker: Worker) -> str:
        """Return `Worker.state`, or "fenced" for a live one that is fenced off."""
        state = worker.state(self.now)
        return "fenced" if state == "alive" and self.is_fenced(worker) else state
