"""The circumstances of waits in a buffer: tallies, leases, live workers, and other waits.

All are plain values, read by a store (`storage.sql.inspection.wait_facts`) or known to a process itself: all but the
time and the tallies may be missing. Times are in seconds since the epoch, by the store's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from replaybuf.rules.limits import Limits
from replaybuf.rules.transitions import LaneName, Tallies, Tally, expired_ever, total
from replaybuf.values.rollouts.statuses import Status

if TYPE_CHECKING:
    from replaybuf.rules.train_state import TrainState

#: The statuses of groups that producers lease: to generate, continue or regenerate them.
IN_FLIGHT = (Status.INIT, Status.ABORTED, Status.EXPIRED)

#: Without a heartbeat for this long, a worker that didn't end is silent: it was killed, or its host is lost.
SILENT_SECONDS = 60.0
#: Active workers send heartbeats more often than this: a wait whose last heartbeat is older is over.
LIVE_SECONDS = 15.0

#: Rates are over this many seconds, or over an hour if few groups came, and of at least `_FEWEST` groups in at least
#: `_BRIEFEST` seconds. A flow of groups has stopped if none came for `_PAUSES` times the mean seconds between two puts,
#: and for at least `_PAUSE` seconds.
RATE_SECONDS, _FEWEST, _BRIEFEST, _PAUSE, _PAUSES = 300.0, 5, 10.0, 30.0, 5.0


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for at least `wants[task]` groups of each task, of one status and matching the `query` (JSON) if given.

    `kind` is "groups"; "room" (then the numbers are groups to put); or "trainer" (a producer waits for newly published
    weights). `worker` is the waiting worker's name. `at_least`: the call would take more groups if there were more.
    """

    wants: Mapping[str, int]
    kind: str = "groups"
    status: Status = Status.COMPLETED
    query: str | None = None
    worker: str | None = None
    since: float | None = None
    deadline: float | None = None
    at_least: bool = False


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

    @property
    def does(self) -> tuple[bool, bool]:
        """Whether the worker has put groups, and whether it has drawn any."""
        return bool(self.groups), bool(self.taken)

    def state(self, now: float) -> str:
        """Return "alive", "silent" (killed, or its last heartbeat is so old that it must be gone) or "ended"."""
        late = now - self.seen_at > (LIVE_SECONDS if self.waits else SILENT_SECONDS)
        return "ended" if self.ended_at is not None else "silent" if self.killed or late else "alive"

    def is_alive(self, now: float) -> bool:
        """Return whether the process has neither ended nor fallen silent."""
        return self.state(now) == "alive"


@dataclass(frozen=True, slots=True)
class Before:
    """Counts at an earlier time: groups put, and by task groups expired and set aside."""

    time: float
    put: Mapping[LaneName, int]
    expired: Mapping[str, int] = field(default_factory=dict)
    set_aside: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Came:
    """What became of a task's groups since an earlier time, or ever.

    `completed` were put as such. `expired` did so in a refresh, or (`early` of them) before they were put. `failed`
    were put so, or set aside later, among them up to `spoilt` completed ones.
    """

    completed: int
    expired: int
    early: int
    filtered: int
    failed: int
    spoilt: int


@dataclass(frozen=True, slots=True)
class Taking:
    """The last draw: its worker, time and number of groups."""

    worker: str | None
    time: float
    groups: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The last restore of the buffer: its train step, time and worker."""

    step: int | None
    time: float
    worker: str | None = None


@dataclass(frozen=True)
class Circumstances:
    """The known state of a buffer at the time `now`.

    `limits` are those of the waiting process, None if none was recorded. `matches` is the number of groups of each task
    that match the wait's query. `trainer` is the published trainer state, `steps` the train step of each task's last
    refresh, `last_put` the time of the last put of each task and status as far as known, `errors` the error of a task's
    newest failed group, and `failed_by` counts its newest failures by worker: of who put the group, or who drew one
    that was set aside. `before` has the counts of an hour ago, or the oldest known since then, `recent` those of
    `RATE_SECONDS` ago. `datasets` is the number of prompts drawn of each task whose dataset was read to its end.
    """

    now: float
    tallies: Tallies
    limits: Limits | None = None
    held: Sequence[Held] = ()
    workers: Sequence[Worker] = ()
    waits: Sequence[Wait] = ()
    matches: Mapping[str, int] | None = None
    trainer: TrainState | None = None
    steps: Mapping[str, int] = field(default_factory=dict)
    before: Before | None = None
    recent: Before | None = None
    last_put: Mapping[LaneName, float] = field(default_factory=dict)
    last_take: Taking | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    failed_by: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    restored: Restored | None = None
    datasets: Mapping[str, int] = field(default_factory=dict)

    def count(self, task: str, status: Status, name: Tally = Tally.SIZE) -> int:
        """Return a tally."""
        return self.tallies.get((task, status, name), 0)

    def unfinished(self, task: str) -> int:
        """Return the number of groups waiting for a producer: to be generated, continued or regenerated."""
        return total(self.tallies, task, Tally.SIZE, IN_FLIGHT)

    def in_flight(self, task: str, wanted: Status = Status.COMPLETED, *, alive: bool = True) -> int:
        """Return the number of unfinished groups that producers hold, except those of the `wanted` status.

        Those of producers that are gone are left out, unless `alive` is false.
        """
        statuses = [status for status in IN_FLIGHT if status != wanted]
        count = total(self.tallies, task, Tally.LEASED, statuses)
        here = {one.name for one in self.workers if one.is_alive(self.now)}
        gone = {one.name for one in self.workers} - here if alive else set()
        held = [one for one in self.held if one.task_name == task and one.status in statuses and one.holder in gone]
        return max(0, count - sum(one.groups for one in held))

    @cached_property
    def producers(self) -> list[Worker]:
        """The workers that have put groups, lease unfinished ones, or wait for room or the trainer."""
        waiting = {wait.worker for wait in self.waits if wait.kind != "groups"}
        busy = {one.holder for one in self.held if one.status in IN_FLIGHT} | waiting
        return [one for one in self.workers if one.groups or one.failures or one.name in busy]

    @cached_property
    def alive(self) -> list[Worker]:
        """The producers that have neither ended nor fallen silent, and can put groups."""
        return [one for one in self.producers if one.is_alive(self.now) and not self.is_fenced(one)]

    def is_fenced(self, worker: Worker) -> bool:
        """Return whether another process restored the buffer while this one had it open, so that it can put nothing."""
        restored = self.restored
        if restored is None or worker.started_at >= restored.time:
            return False
        by = {(one.host, one.pid) for one in self.workers if one.name == restored.worker}
        left = worker.seen_at + LIVE_SECONDS if worker.ended_at is None else worker.ended_at
        return left >= restored.time and (worker.host, worker.pid) not in by

    @cached_property
    def replaced(self) -> list[Worker]:
        """The silent workers that have a successor each: a live one that began later, and puts or draws as it did."""
        alive = [one for one in self.workers if one.is_alive(self.now)]
        found = []
        for one in (one for one in self.workers if one.state(self.now) == "silent"):
            later = [other for other in alive if other.started_at >= one.seen_at and other.does == one.does]
            if later:
                alive.remove(later[0])
                found.append(one)
        return found

    def state_of(self, worker: Worker) -> str:
        """Return `Worker.state`, "replaced" for a silent one that has a successor, or "fenced" for a live one."""
        state = "replaced" if worker in self.replaced else worker.state(self.now)
        return "fenced" if state == "alive" and self.is_fenced(worker) else state

    @property
    def consumers(self) -> list[Wait]:
        """The waits for groups."""
        return [wait for wait in self.waits if wait.kind == "groups"]

    @property
    def abandoned(self) -> bool:
        """Whether there were producers, and none is alive."""
        return bool(self.producers) and not self.alive

    def knows(self, task: str) -> bool:
        """Return whether anything was ever put into a task."""
        return any(total(self.tallies, task, name) for name in (Tally.PUT, Tally.SIZE, Tally.LEASED))

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks into which groups were put."""
        return sorted(task for task in {task for task, _, _ in self.tallies} if self.knows(task))

    def put(self, task: str, status: Status, before: Before | None = None) -> int:
        """Return the number of groups of a status that were put since an earlier time, or ever."""
        earlier = 0 if before is None else before.put.get((task, status), 0)
        return max(0, self.count(task, status, Tally.PUT) - earlier)

    def came(self, task: str, before: Before | None = None) -> Came:
        """Return what became of a task's groups since an earlier time, or ever."""
        expired, set_aside = (before.expired, before.set_aside) if before is not None else ({}, {})
        early = self.put(task, Status.EXPIRED, before)
        aside = max(0, total(self.tallies, task, Tally.SET_ASIDE) - set_aside.get(task, 0))
        return Came(
            self.put(task, Status.COMPLETED, before),
            max(0, expired_ever(self.tallies, task) - expired.get(task, 0)),
            early,
            self.put(task, Status.FILTERED, before),
            self.put(task, Status.FAILED, before) + aside,
            min(aside, self.count(task, Status.COMPLETED, Tally.SET_ASIDE)),
        )

    def last(self, task: str) -> float | None:
        """Return the time of the last put of a task, None if unknown."""
        return max((time for (name, _), time in self.last_put.items() if name == task), default=None)

    def rate(self, task: str, status: Status) -> float:
        """Return the recent puts of a status per second, without those lost again; 0 if unknown.

        Also 0 for few puts, and for a flow that has stopped: no producer is alive, or the last put is much longer ago
        than the mean interval.
        """
        for before in (self.recent, self.before):
            if before is None or self.abandoned or self.now - before.time < _BRIEFEST:
                continue
            count = self.put(task, status, before)
            if count < _FEWEST:
                continue
            last = self.last_put.get((task, status), self.now)
            if self.now - last > max(_PAUSE, _PAUSES * (last - before.time) / count):
                return 0.0
            if status == Status.COMPLETED:
                came = self.came(task, before)
                count -= max(0, came.expired - came.early)
            return max(0, count) / (self.now - before.time)
        return 0.0
