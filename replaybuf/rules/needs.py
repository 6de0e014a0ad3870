"""What a wait needs in each task, the reasons why it goes on, and the form of a cause in the table of `causes`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from replaybuf.rules.circumstances import Circumstances, Wait
from replaybuf.rules.limits import Level
from replaybuf.rules.transitions import levels
from replaybuf.rules.words import joined, listed, named
from replaybuf.values.rollouts.statuses import Status

#: Groups that arrive within this many seconds cover what is missing: then nothing else is the reason.
_SOON_SECONDS = 3600.0


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


@dataclass(frozen=True, slots=True)
class Need:
    """What a wait needs in one task: `least` groups (or room for them), of which `available` are to be had now.

    Of the groups `there`, `matching` match the query. A wait for the trainer has one need, of no task.
    """

    wait: Wait
    task: str
    about: Circumstances
    least: int = 1
    there: int = 0
    matching: int = 0
    available: int = 0

    @classmethod
    def of(cls, wait: Wait, task: str, about: Circumstances) -> Need:
        """Return the need of a wait for groups, or for room, in this task."""
        least, limits, level = wait.wants[task], about.limits, levels(about.tallies, [task])[task]
        there = matching = about.count(task, wait.status)
        if wait.kind == "room":
            room = None if limits is None else limits.insertable(level, wait.status)
            return cls(wait, task, about, least, there, there, least if room is None else room)
        if wait.query is not None and about.matches is not None:
            matching = min(there, about.matches.get(task, 0))
        bounded = wait.status == Status.COMPLETED and limits is not None
        available = min(matching, limits.drawable(level)) if bounded and limits is not None else matching
        return cls(wait, task, about, least, there, matching, available)

    @property
    def missing(self) -> int:
        """The number of available groups, or of room for them, that the wait lacks."""
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
        statuses = Status.COMPLETED, Status.FILTERED, Status.FAILED
        good, *bad = (self.about.put(self.task, status, self.about.before) for status in statuses)
        return self.flying * (good / (good + sum(bad)) if any(bad) else 1) >= self.missing


def head_of(needs: Sequence[Need]) -> str:
    """Return the beginning of a sentence about needs of one wait that have the same cause."""
    kind = needs[0].wait.kind
    if kind == "trainer":
        return "There is nothing to do for the workers"
    if kind == "room":
        return f"No room for {listed(one.task for one in needs)}"
    much = "Too little" if any(one.available for one in needs) else "Nothing"
    return f"{much} is ready for {joined([f'{named(one.task)} ({one.available:,} of {one.least:,})' for one in needs])}"


#: A sentence, or a sentence and the advice; None if the cause doesn't hold.
Said = str | tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Cause:
    """A row of a table of causes: the reason, its sentence for a need, the advice.

    A cause that `yields` is no reason while the groups that arrive cover what is missing. A `final` one ends with
    nothing that the producers may still do.
    """

    reason: Reason
    of: Callable[[Need], Said]
    advice: str = ""
    yields: bool = False
    final: bool = False


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
    found = []
    for cause in table:
        if (said := cause.of(need)) is not None:
            found.append(Found(cause, *((said, cause.advice) if isinstance(said, str) else said)))
    slow = [one for one in found if one.cause.reason == Reason.SLOW]
    others = [one for one in found if one.cause.reason != Reason.SLOW]
    covered = bool(slow) and all(one.cause.yields for one in others) and need.is_covered
    return [*slow, *others] if covered else others or slow
