"""The circumstances of waits in a buffer: tallies, leases, live workers, and other waits.

All are plain values, read by a store (`storage.sql.inspection.circumstances`) or known to a process itself: all but the
time and the tallies may be missing. Times are in seconds since the epoch, by the store's clock. The functions at the
beginning format names, numbers and times for sentences about waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from replaybuf.errors import ConfigError
from replaybuf.redact import escape
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.limits import Limits
from replaybuf.rules.transitions import LaneName, Tallies, Tally, expired_ever, total

if TYPE_CHECKING:
    from replaybuf.rules.train_state import TrainState


_NAMED = 3
_LONGEST = 80
_HALF_A_DAY = 12 * 3600.0


def brief(text: str, length: int = _LONGEST) -> str:
    """Return the beginning of a text on one line, without anything that could drive a terminal or forge a log."""
    return _cut(escape(" ".join(text[: 4 * length].split())), length)


def _cut(line: str, length: int = _LONGEST) -> str:
    return line if len(line) <= length else line[: length - 3] + "..."


def named(name: str) -> str:
    """Return the name of a task or worker, quoted if its white space would be ambiguous."""
    return brief(name) if name == " ".join(name.split()) else _cut(escape(repr(name[: 4 * _LONGEST])))


def listed(names: Iterable[str], most: int = _NAMED) -> str:
    """Return names as `a, b and c`, or `a, b, c and 4 more`."""
    return joined([named(name) for name in names], most)


def joined(parts: Sequence[str], most: int = _NAMED, *, link: str = "and") -> str:
    """Return parts of a sentence as `a, b and c`, or `a, b, c and 4 more`."""
    if len(parts) > most:
        return f"{', '.join(parts[:most])} and {len(parts) - most:,} more"
    return f" {link} ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def groups(count: int, status: str = "") -> str:
    """Return `1 completed group`, `64 completed groups`."""
    return f"{count:,} {status}{' ' if status else ''}group{'' if count == 1 else 's'}"


def clock(moment: float, now: float) -> str:
    """Return a time of day in UTC, with its date if it isn't within twelve hours of `now`.

    Sentences have no ages: they are read in logs, events and errors, when an age would be wrong.
    """
    form = "%H:%M:%S UTC" if abs(now - moment) < _HALF_A_DAY else "%Y-%m-%d %H:%M UTC"
    return datetime.fromtimestamp(moment, UTC).strftime(form)


def wanted(wants: Mapping[str, int], status: str) -> str:
    """Return `64 completed groups of math and 8 of code`."""
    tasks: Sequence[tuple[str, int]] = [*wants.items()]
    if not tasks:
        return groups(0, status)
    (task, count), *others = tasks
    return joined([f"{groups(count, status)} of {named(task)}", *(f"{n:,} of {named(name)}" for name, n in others)])


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

# With fewer seconds of history, or a last put so shortly before it, the rate per hour is unknown.
_SHORTEST = 60.0


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

    def is_silent(self, now: float) -> bool:
        """Return whether the process was killed, or its last heartbeat is so old that it must be gone."""
        late = now - self.seen_at > (LIVE_SECONDS if self.waits else SILENT_SECONDS)
        return self.ended_at is None and (self.killed or late)

    def state(self, now: float) -> str:
        """Return "alive", "silent" (killed, or lost with its host) or "ended"."""
        return "ended" if self.ended_at is not None else "silent" if self.is_silent(now) else "alive"

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
class Counted:
    """A count since `Circumstances.before` (`lately`), and since the beginning (`ever`)."""

    lately: int
    ever: int

    @classmethod
    def of(cls, now: int, earlier: int) -> Counted:
        return cls(max(0, now - earlier), now)

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.lately + other.lately, self.ever + other.ever)

    def __sub__(self, other: Counted) -> Counted:
        return Counted(max(0, self.lately - other.lately), max(0, self.ever - other.ever))


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
    that match the wait's query; `unknown_tags` are the tags in the query that none of the newest groups has, each with
    the most similar existing tag. `trainer` is the published trainer state, `steps` the train step of each task's last
    refresh, `last_put` the time of the last put of each task and status as far as known, `errors` the error of a task's
    newest failed group,
    `failed_by` the workers that put its newest failed groups, and `failed_with` the workers that drew groups set aside
    later. `before` has the counts of an hour ago, or the oldest known since then, `recent` those of `RATE_SECONDS` ago.
    `datasets` is the number of prompts drawn of each task whose dataset was read to its end.
    """

    now: float
    tallies: Tallies
    limits: Limits | None = None
    held: Sequence[Held] = ()
    workers: Sequence[Worker] = ()
    waits: Sequence[Wait] = ()
    matches: Mapping[str, int] | None = None
    unknown_tags: Mapping[str, str | None] = field(default_factory=dict)
    trainer: TrainState | None = None
    steps: Mapping[str, int] = field(default_factory=dict)
    before: Before | None = None
    recent: Before | None = None
    last_put: Mapping[LaneName, float] = field(default_factory=dict)
    last_take: Taking | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    failed_by: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    failed_with: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
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
        """The producers that have neither ended nor fallen silent."""
        return [one for one in self.producers if one.is_alive(self.now)]

    @cached_property
    def replaced(self) -> list[Worker]:
        """The silent workers that have a successor each: a live one that began later, and puts or draws as it did."""
        alive = [one for one in self.workers if one.is_alive(self.now)]
        found = []
        for one in (one for one in self.workers if one.is_silent(self.now)):
            later = [other for other in alive if other.started_at >= one.seen_at and other.does == one.does]
            if later:
                alive.remove(later[0])
                found.append(one)
        return found

    def state_of(self, worker: Worker) -> str:
        """Return `Worker.state`, or "replaced" for a silent one that has a successor."""
        return "replaced" if worker in self.replaced else worker.state(self.now)

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

    def has_groups(self, task: str) -> bool:
        """Return whether a task has groups to be drawn or finished."""
        unfinished = self.unfinished(task) or total(self.tallies, task, Tally.LEASED)
        return bool(self.count(task, Status.COMPLETED) or unfinished)

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks into which groups were put."""
        names = {task for task, _, _ in self.tallies}
        return sorted(task for task in names if self.knows(task))

    def put(self, task: str, status: Status) -> Counted:
        """Return the number of groups of a status that were put."""
        return self._put_since(self.before, task, status)

    def _put_since(self, before: Before | None, task: str, status: Status) -> Counted:
        return Counted.of(self.count(task, status, Tally.PUT), before.put.get((task, status), 0) if before else 0)

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
            count = self._put_since(before, task, status).lately
            if count < _FEWEST:
                continue
            last = self.last_put.get((task, status), self.now)
            if self.now - last > max(_PAUSE, _PAUSES * (last - before.time) / count):
                return 0.0
            if status == Status.COMPLETED:
                late = self._put_since(before, task, Status.EXPIRED).lately
                lost = expired_ever(self.tallies, task) - before.expired.get(task, 0) - late
                count -= max(0, lost)
            return max(0, count) / (self.now - before.time)
        return 0.0

    def hourly(self, task: str, status: Status) -> float | None:
        """Return the puts of a status per hour since `before`; None if unknown.

        It is unknown if no counts were recorded before the last puts.
        """
        if self.before is None or self.now - self.before.time < _SHORTEST:
            return None
        rate = self.put(task, status).lately * 3600 / max(1.0, self.now - self.before.time)
        seen = (self.last(task) or 0.0) < self.before.time - _SHORTEST
        return rate if rate or seen else None

    def expired(self, task: str) -> Counted:
        """Return the number of groups that expired: in a refresh, or before they were put."""
        return Counted.of(expired_ever(self.tallies, task), self.before.expired.get(task, 0) if self.before else 0)

    def set_aside(self, task: str) -> Counted:
        """Return the number of groups that became FAILED after their put."""
        earlier = self.before.set_aside.get(task, 0) if self.before else 0
        return Counted.of(total(self.tallies, task, Tally.SET_ASIDE), earlier)

    def spoilt(self, task: str) -> Counted:
        """Return how many of the groups set aside were put as COMPLETED; `lately` is an upper bound."""
        ever = self.count(task, Status.COMPLETED, Tally.SET_ASIDE)
        return Counted(min(ever, self.set_aside(task).lately), ever)


def in_force(limits: Limits) -> dict[str, Any]:
    """Return the fields of limits that differ from the defaults."""
    return {one.name: value for one in fields(limits) if (value := getattr(limits, one.name)) != one.default}


def limits_of(stored: Mapping[str, Any]) -> Limits | None:
    """Return the limits that a process has recorded as these fields; None if they can't be read.

    Fields that this version doesn't know are left out: another version may have written them.
    """
    known = {one.name for one in fields(Limits)}
    values = {name: value for name, value in stored.items() if name in known}
    if isinstance(values.get("error_buffer"), list):
        values["error_buffer"] = tuple(values["error_buffer"])
    try:
        return Limits(**values)
    except (ConfigError, TypeError):
        return None
