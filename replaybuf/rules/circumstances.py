"""What is known of a buffer when somebody waits: the counts, who holds what, who is alive, and who waits besides.

All of it is plain values, which a store gathers (`storage.sql.inspection.circumstances`), or a process of what it knows
itself: everything but the time and the tallies may be missing. Times are in seconds since the epoch, by the clock of
the store. At the beginning: names, numbers and times in the sentences about waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from replaybuf import units
from replaybuf.errors import ConfigError
from replaybuf.redact import escape
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.limits import Limits
from replaybuf.rules.transitions import LaneName, Tallies, Tally, expired_ever, total

if TYPE_CHECKING:
    from replaybuf.rules.train_state import TrainState


_NAMED = 3
_LONGEST = 80


def brief(text: str, length: int = _LONGEST) -> str:
    """Return the beginning of a text on one line, without anything that could drive a terminal or forge a log."""
    return _cut(escape(" ".join(text[: 4 * length].split())), length)


def _cut(line: str, length: int = _LONGEST) -> str:
    return line if len(line) <= length else line[: length - 3] + "..."


def named(name: str) -> str:
    """Return the name of a task or worker: quoted if one that looks the same could differ from it in white space."""
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


def clock(moment: float) -> str:
    """Return a time of the day, in UTC."""
    return f"{datetime.fromtimestamp(moment, UTC):%H:%M:%S} UTC"


# Ages are true at the time `now` only: what is read later (None) has the times themselves.


def ago(moment: float, now: float | None) -> str:
    """Return `12s ago`, or `at 20:43:10 UTC`."""
    return f"at {clock(moment)}" if now is None else f"{units.age(now - moment)} ago"


def at(moment: float, now: float | None) -> str:
    """Return `at 20:43:10 UTC (12s ago)`, or without the age."""
    return f"at {clock(moment)}" if now is None else f"at {clock(moment)} ({ago(moment, now)})"


def since(moment: float, now: float | None) -> str:
    """Return `since 12s`, or `since 20:43:10 UTC`."""
    return f"since {clock(moment)}" if now is None else f"since {units.age(now - moment)}"


def until(moment: float, now: float | None) -> str:
    """Return when a lease ends, or ended."""
    if now is None:
        return f"until {clock(moment)}"
    if moment > now:
        return f"until {clock(moment)} (in {units.age(moment - now)})"
    return f"until {clock(moment)} ({ago(moment, now)}: they come back as soon as somebody looks)"


def wanted(wants: Mapping[str, int], status: str) -> str:
    """Return `64 completed groups of math and 8 of code`."""
    tasks: Sequence[tuple[str, int]] = [*wants.items()]
    if not tasks:
        return groups(0, status)
    (task, count), *others = tasks
    return joined([f"{groups(count, status)} of {named(task)}", *(f"{n:,} of {named(name)}" for name, n in others)])


#: The statuses of groups that producers lease: to generate, continue or generate them again.
IN_FLIGHT = (Status.INIT, Status.ABORTED, Status.EXPIRED)

#: A worker that gave no sign of life for this long, and didn't end, is silent: it was killed, or its host is lost.
SILENT_SECONDS = 60.0
#: Who puts, draws or waits gives one more often than this: a wait of which nothing was heard for so long is over.
LIVE_SECONDS = 15.0

#: Rates are those of so many seconds, and at least so many groups. Groups go on coming unless none came for `_PAUSES`
#: times the mean seconds between two puts; within `_PAUSE` seconds nobody can tell.
RATE_SECONDS, _FEWEST, _PAUSE, _PAUSES = 300.0, 5, 0.5, 3.0

# From so few seconds, or where the last put was so shortly before, nobody can tell what comes in an hour.
_SHORTEST = 60.0


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait: for at least `wants[task]` groups of each task, of one status and, with a `query` (as JSON), of these.

    `kind` is "groups"; or "room", where the numbers are those of groups to put; or "trainer": a producer that waits for
    what the trainer publishes. `worker` is the name of who waits, whose process began at `process_began`: an earlier
    one may have had the name. `at_least`: it would take more if there were more.
    """

    wants: Mapping[str, int]
    kind: str = "groups"
    status: Status = Status.COMPLETED
    query: str | None = None
    worker: str | None = None
    since: float | None = None
    deadline: float | None = None
    at_least: bool = False
    process_began: float | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """Leased groups of one task and status: who holds them, until when, and since when as far as that is known."""

    task_name: str
    status: Status
    holder: str | None
    groups: int
    until: float
    first_leased: float | None = None
    last_leased: float | None = None


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that has used the buffer under this name, and what it did lately.

    `groups` were put, of which `failures` failed (deliveries given back as failed count, too), and `taken` drawn.
    `waits`: it did when it was seen last.
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

    def is_silent(self, now: float) -> bool:
        """Return whether it gave no sign of life for so long that it must be gone, without having said so."""
        return self.ended_at is None and now - self.seen_at > (LIVE_SECONDS if self.waits else SILENT_SECONDS)

    def state(self, now: float) -> str:
        """Return "alive"; "quiet": it is idle, or was killed lately; "silent", or "ended"."""
        if self.ended_at is not None:
            return "ended"
        if self.is_silent(now):
            return "silent"
        return "alive" if now - self.seen_at <= LIVE_SECONDS else "quiet"

    def is_alive(self, now: float) -> bool:
        """Return whether it has neither ended nor fallen silent."""
        return self.ended_at is None and not self.is_silent(now)


@dataclass(frozen=True, slots=True)
class Before:
    """What had been counted at some time before: groups put, and by task those expired and set aside."""

    time: float
    put: Mapping[LaneName, int]
    expired: Mapping[str, int] = field(default_factory=dict)
    set_aside: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counted:
    """A count since `Circumstances.before`, and since the beginning."""

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
    """The last draw of groups: by whom, when, and how many."""

    worker: str | None
    time: float
    groups: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The last restore of the buffer: to which train step, when, and by whom."""

    step: int | None
    time: float
    worker: str | None = None


@dataclass(frozen=True)
class Circumstances:
    """What is known of a buffer at the time `now`.

    `limits` are those in force where somebody waits, None if nobody has said. `matches` are the groups of each task
    that match the query of a wait, `unknown_tags` the tags in it that none of the newest groups has, each with the most
    similar one that they have. `trainer` is what the trainer has published, `steps` the train step of each task's last
    refresh, `last_put` the time of its last put as far as one can tell, `errors` why its last failed group did,
    `failed_by` who put its newest failed groups as such, and `failed_with` who drew those that were set aside since.
    `before` is what had been counted an hour ago, or as long ago as is known, `recent` the same of `RATE_SECONDS`.
    `datasets`: the number of prompts drawn from the dataset of each task that has been read to its end. `for_later`:
    what is said of all this is read later, when ages wouldn't be true any more.
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
    last_put: Mapping[str, float] = field(default_factory=dict)
    last_take: Taking | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    failed_by: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    failed_with: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    restored: Restored | None = None
    datasets: Mapping[str, int] = field(default_factory=dict)
    for_later: bool = False

    @property
    def told_at(self) -> float | None:
        """The time at which what is said of it is read; None if that is later."""
        return None if self.for_later else self.now

    def count(self, task: str, status: Status, name: Tally = Tally.SIZE) -> int:
        """Return a tally."""
        return self.tallies.get((task, status, name), 0)

    def unfinished(self, task: str) -> int:
        """Return the number of groups that wait to be generated: for the first time, to the end, or again."""
        return total(self.tallies, task, Tally.SIZE, IN_FLIGHT)

    def in_flight(self, task: str, wanted: Status = Status.COMPLETED) -> int:
        """Return the number of groups that producers hold to generate or finish them; not of those that are wanted."""
        return total(self.tallies, task, Tally.LEASED, (status for status in IN_FLIGHT if status != wanted))

    @cached_property
    def producers(self) -> list[Worker]:
        """The workers that have put groups, or are about to."""
        waiting = {wait.worker for wait in self.waits if wait.kind != "groups"}
        busy = {one.holder for one in self.held if one.status in IN_FLIGHT} | waiting
        return [one for one in self.workers if one.groups or one.failures or one.name in busy]

    @cached_property
    def alive(self) -> list[Worker]:
        """The producers that have neither ended nor fallen silent."""
        return [one for one in self.producers if one.is_alive(self.now)]

    @property
    def consumers(self) -> list[Wait]:
        """The waits for groups."""
        return [wait for wait in self.waits if wait.kind == "groups"]

    @property
    def news(self) -> str:
        """What the trainer has published, where somebody waits for more."""
        return "nothing yet" if self.trainer is None else f"nothing since step {self.trainer.train_step}"

    @property
    def abandoned(self) -> bool:
        """Whether there were producers, and none is left."""
        return bool(self.producers) and not self.alive

    def knows(self, task: str) -> bool:
        """Return whether anything was ever put into a task."""
        return any(total(self.tallies, task, name) for name in (Tally.PUT, Tally.SIZE, Tally.LEASED))

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks into which something was put."""
        names = {task for task, _, _ in self.tallies}
        return sorted(task for task in names if self.knows(task))

    def put(self, task: str, status: Status) -> Counted:
        """Return the number of groups of a status that were put."""
        return self._put_since(self.before, task, status)

    def _put_since(self, before: Before | None, task: str, status: Status) -> Counted:
        return Counted.of(self.count(task, status, Tally.PUT), before.put.get((task, status), 0) if before else 0)

    def rate(self, task: str, status: Status) -> float:
        """Return how many groups of a status come in a second, by the last minutes; 0 where that isn't known.

        It is 0, too, of few, and once they have stopped: no producer is left, or the last is much longer ago than
        they were apart.
        """
        if self.recent is None or self.abandoned:
            return 0.0
        count, seconds = self._put_since(self.recent, task, status).lately, max(1.0, self.now - self.recent.time)
        if count < _FEWEST:
            return 0.0
        last = self.last_put.get(task, self.now)
        pause = max(_PAUSE, _PAUSES * (last - self.recent.time) / count)
        return 0.0 if self.now - last > pause else count / seconds

    def hourly(self, task: str, status: Status) -> float | None:
        """Return how many groups of a status were put in an hour, since `before`; None where it isn't known.

        That is where nothing was noted before the last ones were put.
        """
        if self.before is None or self.now - self.before.time < _SHORTEST:
            return None
        rate = self.put(task, status).lately * 3600 / max(1.0, self.now - self.before.time)
        seen = self.last_put.get(task, 0.0) < self.before.time - _SHORTEST
        return rate if rate or seen else None

    def expired(self, task: str) -> Counted:
        """Return the number of groups that expired: in a refresh, or before they were put."""
        return Counted.of(expired_ever(self.tallies, task), self.before.expired.get(task, 0) if self.before else 0)

    def set_aside(self, task: str) -> Counted:
        """Return the number of groups that became FAILED after they were put."""
        earlier = self.before.set_aside.get(task, 0) if self.before else 0
        return Counted.of(total(self.tallies, task, Tally.SET_ASIDE), earlier)

    def spoilt(self, task: str) -> Counted:
        """Return how many of these were put as COMPLETED; lately, at most."""
        ever = self.count(task, Status.COMPLETED, Tally.SET_ASIDE)
        return Counted(min(ever, self.set_aside(task).lately), ever)


def in_force(limits: Limits) -> dict[str, Any]:
    """Return the fields of limits that aren't as they are by default."""
    return {one.name: value for one in fields(limits) if (value := getattr(limits, one.name)) != one.default}


def limits_of(stored: Mapping[str, Any]) -> Limits | None:
    """Return the limits of which a process has written down these fields; None if they can't be read.

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
