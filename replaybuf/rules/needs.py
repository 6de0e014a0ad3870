"""The needs of a draw that would block, and the form of a cause: its reason, condition, sentence and advice.

`causes` has the causes of waits for groups, as a table.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from replaybuf.rollouts.statuses import Status
from replaybuf.rules.circumstances import (
    IN_FLIGHT,
    Circumstances,
    Wait,
    Worker,
    clock,
    groups,
    joined,
    listed,
    named,
)
from replaybuf.rules.limits import Level, Limits
from replaybuf.rules.transitions import levels


class Reason(StrEnum):
    """Why a call waits; READY if it needn't. The names are stable.

    The order is that of precedence: of several tasks, the one whose reason comes first is explained.
    """

    FENCED = "fenced"  # the buffer was restored since the wait began
    NO_SUCH_TASK = "no_such_task"  # nothing was ever put into it, but into other tasks
    HELD_BACK = "held_back"  # a limit: no draw is allowed, or there is no room
    NO_MATCH = "no_match"  # there are groups, but they don't match the query
    LEASED = "leased"  # consumers hold the groups
    FINISHED = "finished"  # no more groups come: the dataset was read to its end, or the trainer has finished
    DEADLOCK = "deadlock"  # producers and trainer wait for each other
    EXPIRED = "expired"  # the groups have expired
    UNFIT = "unfit"  # the groups were filtered, or failed
    OTHER_STATUS = "other_status"  # there are groups, but they are INIT, aborted, or of another status
    ABSENT = "absent"  # who should put, or publish, was never there, is gone, or does nothing
    SLOW = "slow"  # groups arrive or are generated, or are needed from producers that are alive
    READY = "ready"


#: Groups that arrive within this many seconds cover what is missing: then nothing else is the reason.
_SOON_SECONDS = 3600.0
#: The maximum length of compared names and quoted errors, and the number of tasks compared with an unknown name.
LONGEST, _TASKS_COMPARED = 200, 1000

PATIENCE = "Wait, ask for fewer groups, or start more producers"
OF_THE_GONE = "They come back then, and other workers generate them"


@dataclass(frozen=True, slots=True)
class Need:
    """The need of a wait in one task: at least `least` groups, of which `there` exist.

    Of the existing ones, `matching` match the query, and `available` may be drawn now.
    """

    wait: Wait
    task: str
    about: Circumstances
    least: int = 0
    there: int = 0
    matching: int = 0
    available: int = 0

    @classmethod
    def of(cls, wait: Wait, task: str, about: Circumstances) -> Need:
        """Return the need of a wait for groups in this task."""
        there = matching = about.count(task, wait.status)
        if wait.query is not None and about.matches is not None:
            matching = min(there, about.matches.get(task, 0))
        available = matching
        if wait.status == Status.COMPLETED and about.limits is not None:
            available = min(matching, about.limits.drawable(levels(about.tallies, [task])[task]))
        return cls(wait, task, about, wait.wants[task], there, matching, available)

    @property
    def missing(self) -> int:
        """The number of available groups that the wait lacks."""
        return max(0, self.least - self.available)

    @property
    def status(self) -> Status:
        """The status of the needed groups."""
        return self.wait.status

    @property
    def level(self) -> Level:
        """The counts to which limits apply."""
        return levels(self.about.tallies, [self.task])[self.task]

    @property
    def rate(self) -> float:
        """The groups per second that arrive: none if only the waiting worker puts, and has put none since it waits."""
        last, since = self.about.last(self.task), self.wait.since
        if self.puts_alone and since is not None and (last is None or last <= since):
            return 0.0
        return self.about.rate(self.task, self.status)

    @property
    def puts_alone(self) -> bool:
        """Whether the waiting worker is the only live producer."""
        return {one.name for one in self.about.alive} == {self.wait.worker}

    @property
    def flying(self) -> int:
        """The groups that live producers generate."""
        return 0 if self.about.abandoned else self.about.in_flight(self.task, self.status)

    @property
    def is_covered(self) -> bool:
        """Whether what arrives, or is generated and will pass as earlier groups did, covers what is missing."""
        if self.rate and self.missing / self.rate <= _SOON_SECONDS:
            return True
        good, bad = (sum(self.about.put(self.task, one).lately for one in some) for some in (_FIT, _UNFIT))
        return self.flying * (good / (good + bad) if bad else 1) >= self.missing

    @property
    def head(self) -> str:
        """The beginning of a sentence about the need."""
        much = "Nothing" if self.available == 0 else "Too little"
        return f"{much} is ready for {named(self.task)} ({self.available:,} of {self.least:,})"


_FIT, _UNFIT = (Status.COMPLETED,), (Status.FILTERED, Status.FAILED)

#: A sentence, or a sentence and the advice; None if the cause doesn't hold.
Said = str | tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Cause:
    """A row of a table of causes.

    A cause that `yields` is no reason while the groups that arrive cover what is missing. A `final` one ends with
    nothing that the producers may still do.
    """

    reason: Reason
    of: Callable[[Need], Said]
    advice: str = ""
    yields: bool = False
    final: bool = False

    def found(self, need: Need) -> Found | None:
        """Return the cause in words, None if it doesn't hold."""
        said = self.of(need)
        return None if said is None else Found(self, *((said, self.advice) if isinstance(said, str) else said))


@dataclass(frozen=True, slots=True)
class Found:
    """A cause that holds, in words."""

    cause: Cause
    text: str
    advice: str

    @property
    def precedence(self) -> tuple[bool, int]:
        """The order of the causes of several tasks."""
        return not self.cause.final, [*Reason].index(self.cause.reason)

    def sentence(self, head: str) -> str:
        """Return the sentence of the diagnosis, which begins with `head`."""
        end = self.advice if not self.advice or self.advice.endswith("?") else f"{self.advice}."
        return f"{head}: {self.text}. {end}".rstrip()


def causes_of(need: Need, table: Iterable[Cause]) -> list[Found]:
    """Return the causes of a table that hold, the reason first."""
    found = [one for cause in table if (one := cause.found(need))]
    slow = [one for one in found if one.cause.reason == Reason.SLOW][:1]
    others = [one for one in found if one.cause.reason != Reason.SLOW]
    covered = bool(slow) and all(one.cause.yields for one in others) and need.is_covered
    return [*slow, *others] if covered else others or slow


# Words


def are(count: int, status: str = "") -> str:
    return f"{groups(count, status)} {'is' if count == 1 else 'are'}"


def people(names: Iterable[str], one: str, several: str) -> str:
    """Return the names with the verb for their number."""
    unique = list(dict.fromkeys(names))
    return f"{listed(unique)} {one if len(unique) == 1 else several}"


def ends_of(workers: Sequence[Worker], now: float) -> str:
    """Return when each worker ended or was last seen, in words; the latest first."""
    latest = {one.name: one for one in sorted(workers, key=lambda one: one.seen_at)}
    ends = []
    for one in sorted(latest.values(), key=lambda one: -one.seen_at):
        did = (
            "ended" if one.ended_at is not None else "was killed: last seen" if one.killed else "went silent: last seen"
        )
        ends.append(f"{named(one.name)} {did} at {clock(one.ended_at or one.seen_at, now)}")
    return joined(ends)


def waiters_of(about: Circumstances, kind: str, what: str) -> str | None:
    """Return `gen-1 and gen-2 wait for room since 20:42:10 UTC` if every live producer does; otherwise None."""
    waits = [wait for wait in about.waits if wait.kind == kind]
    names = {wait.worker for wait in waits}
    if not waits or any(one.name not in names for one in about.alive):
        return None
    began = min((wait.since for wait in waits if wait.since is not None), default=about.now)
    who = people(sorted(name or "a producer" for name in names), "waits", "wait")
    return f"{who} for {what} since {clock(began, about.now)}"


def gone_with(need: Need) -> str | None:
    """Return the names of dead workers that still lease unfinished groups of the task; None if there are none."""
    about, live = need.about, {one.name for one in need.about.alive}
    held = [one for one in about.held if one.task_name == need.task and one.status in IN_FLIGHT]
    held = [one for one in held if one.holder not in live]
    gone = [one for one in about.workers if one.name in {lease.holder for lease in held}]
    if not gone:
        return None
    count, until = sum(one.groups for one in held), clock(max(one.until for one in held), about.now)
    return f"{are(count)} leased until {until} to be generated, by a worker that is gone ({ends_of(gone, about.now)})"


def news_of(about: Circumstances) -> str:
    """Return what the trainer has published, for sentences about a wait for more."""
    return "nothing yet" if about.trainer is None else f"nothing since step {about.trainer.train_step}"


def to_publish(about: Circumstances) -> str:
    """Return the advice for a trainer whose workers wait for it to publish."""
    if about.trainer is None:
        return "Publish the trainer's state (publish) before waiting for a batch"
    return "Publish newer weights (publish), or ask for no more groups than the workers keep ready (their batch_size)"


# Limits


def to_put(limits: Limits, level: Level) -> str:
    """Return the option to change so that puts of completed groups which the limits block are allowed."""
    full = limits.capacity is not None and limits.on_full != "evict" and level.completed >= limits.capacity
    return "raise the capacity" if full or limits.rate is None else "widen error_buffer"


def too_large(limits: Limits, task: str, status: Status, count: int) -> tuple[str, str] | None:
    """Return why a batch of `count` groups can never be drawn and the advice, or None if it can."""
    most = limits.largest_batch
    if most is None or count <= most or status != Status.COMPLETED:
        return None
    why, option = f"the capacity is {limits.capacity:,}" if limits.capacity else "", "raise the capacity"
    if not limits.capacity or count <= limits.capacity:
        wide = "a range of twice" if isinstance(limits.error_buffer, tuple) else "at least"
        why, option = f"{limits.rate} allows {most:,} at once", f"set error_buffer to {wide} the size of a batch"
    return (
        f"a batch of {count:,} groups of task {named(task)} would wait for ever: {why}",
        f"Ask for fewer groups, or {option}",
    )


def never_put(name: str, tasks: Sequence[str]) -> tuple[str, str]:
    """Return a sentence about a task that never had a group, with the existing name that was probably meant."""
    comparable = [task for task in tasks[:_TASKS_COMPARED] if len(task) <= LONGEST]
    near = difflib.get_close_matches(name[:LONGEST], comparable, n=1, cutoff=0.5)
    meant = f"Did you mean {named(near[0])}" if near else "Is it the name under which the producers put"
    return f"nothing was ever put into this task; {there_are(tasks)}", f"{meant}?"


def there_are(tasks: Sequence[str]) -> str:
    """Return the existing tasks, in words."""
    return f"there {'is the task' if len(tasks) == 1 else 'are the tasks'} {listed(tasks, 5)}"


def prompts_of(task: str, about: Circumstances) -> str:
    """Return the state of the prompts of a dataset that was read to its end, in words, from its prompt ledger."""
    drawn, waiting, flying = about.datasets[task], about.unfinished(task), about.in_flight(task)
    lost = about.in_flight(task, alive=False) - flying
    done = drawn - flying - waiting - lost
    parts = [f"{done:,} {'is' if done == 1 else 'are'} finished", f"{flying:,} in flight"]
    parts += [f"{waiting:,} to be handed out again"] if waiting else []
    parts += [f"{lost:,} leased by workers that are gone"] if lost else []
    return f"no prompt of {named(task)} is left in the dataset: of the {drawn:,} drawn, {joined(parts, len(parts))}"
