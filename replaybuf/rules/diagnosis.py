"""The groups that a wait needs in each task, and its diagnosis: a reason, a sentence for people, further facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from replaybuf.common.units import groups, joined, listed, named
from replaybuf.rules.circumstances import IN_FLIGHT, Circumstances, Wait
from replaybuf.rules.limits import Level, Limits
from replaybuf.rules.transitions import Tally, level_of
from replaybuf.values.rollouts.statuses import Status


class Reason(StrEnum):
    """The reason of a wait; READY if the call wouldn't wait. The names are stable.

    The order is that of precedence: of several tasks, the one whose reason comes first is explained.
    """

    NO_SUCH_TASK = "no_such_task"  # nothing was ever put into it, but into other tasks
    HELD_BACK = "held_back"  # a limit: no draw is allowed, or there is no room
    NO_MATCH = "no_match"  # there are groups, but they don't match the query
    LEASED = "leased"  # consumers hold the groups
    FINISHED = "finished"  # no more groups come: the dataset was read to its end, or the trainer has finished
    DEADLOCK = "deadlock"  # producers and trainer wait for each other
    EXPIRED = "expired"  # the groups have expired
    UNFIT = "unfit"  # the groups were filtered, or failed
    FILLING = "filling"  # there are rollouts of groups that fill, which lack others
    OTHER_STATUS = "other_status"  # there are groups, but they are INIT, aborted, or of another status
    ABSENT = "absent"  # who should put, or publish, was never there, is gone, or does nothing
    SLOW = "slow"  # groups arrive or are generated, or are needed from producers that are alive
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Fact:
    """A further fact about a wait: other causes, if it has a reason (that of the first), or numbers."""

    text: str
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The reason of a wait, its sentence for people, the task it is about, and further facts.

    `final`: nothing that the producers may still do ends the wait; the caller has to ask for something else.
    """

    reason: Reason
    sentence: str
    task_name: str | None = None
    facts: tuple[Fact, ...] = ()
    final: bool = False

    def __str__(self) -> str:
        return "; ".join([self.sentence.removesuffix("."), *(fact.text for fact in self.facts)])


@dataclass(frozen=True, slots=True)
class Need:
    """The need of a wait in one task: `least` groups (or room for them), of which `available` can be drawn now.

    Of the `stored` groups, `matching` match the query. `last` is the time of the last put of all tasks that the wait
    lacks groups of, None if unknown. A wait for the trainer has one need, of no task.
    """

    wait: Wait
    task: str
    about: Circumstances
    least: int = 1
    stored: int = 0
    matching: int = 0
    available: int = 0
    last: float | None = None

    @classmethod
    def of(cls, wait: Wait, task: str, about: Circumstances) -> Need:
        """Return the need of a wait for groups, or for room, in this task."""
        least, limits, level = wait.wants[task], wait.limits, level_of(about.tallies, task)
        stored = matching = about.count(task, wait.status)
        if wait.kind == "room":
            room = None if limits is None else limits.insertable(level, wait.status)
            return cls(wait, task, about, least, stored, stored, least if room is None else room)
        if wait.query is not None and about.matches is not None:
            matching = min(stored, about.matches.get(task, 0))
        bounded = wait.status == Status.COMPLETED and limits is not None
        available = min(matching, limits.drawable(level)) if bounded and limits is not None else matching
        return cls(wait, task, about, least, stored, matching, available)

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
        return level_of(self.about.tallies, self.task)

    @property
    def puts_alone(self) -> bool:
        """Whether the waiting worker is the only live producer."""
        return {worker.name for worker in self.about.alive} == {self.wait.worker}

    @property
    def flying(self) -> int:
        """The groups that live producers generate."""
        about, task = self.about, self.task
        lost = sum(lease.groups for lease in about.abandoned_leases(task) if lease.status != self.status)
        leased = about.unfinished(task, Tally.LEASED)
        leased -= about.count(task, self.status, Tally.LEASED) if self.status in IN_FLIGHT else 0
        return 0 if about.abandoned else max(0, leased - lost)

    @property
    def is_covered(self) -> bool:
        """Whether groups arrive that don't all expire, or as many as are missing are being generated.

        What only the waiting worker puts arrives if it has put some since it waits.
        """
        about, since = self.about, self.wait.since
        expired, arrived = about.losses(self.task, lately=True)[Status.EXPIRED]
        alone = self.puts_alone and since is not None and (about.last(self.task) or since) <= since
        if about.arrives(self.task, self.status) and 2 * expired < max(1, arrived) and not alone:
            return True
        return self.flying >= self.missing

    @property
    def line(self) -> str:
        """The line `task math: 12 completed groups there, 64 needed (3 expired)`, with the limit that blocks them."""
        about, task, status, limits = self.about, self.task, self.status, self.wait.limits
        counts = {kind: about.count(task, kind) for kind in Status if kind not in (status, Status.ARCHIVED)}
        details = sorted(f"{count} {kind}" for kind, count in counts.items() if count)
        leased = sum(about.count(task, kind, Tally.LEASED) for kind in Status)
        details += [f"{leased} leased"] if leased else []
        if self.wait.query is not None:
            details.insert(0, f"{self.stored} {status} before the query")
        suffix = f" ({', '.join(details)})" if details else ""
        least = f"at least {self.least:,}" if self.wait.at_least else f"{self.least:,}"
        blocked = "" if limits is None or self.available >= self.matching else f", but {limits.why_slow(self.level)}"
        return f"task {named(task)}: {groups(self.matching, status)} there, {least} needed{suffix}{blocked}"


def head_of(needs: Sequence[Need]) -> str:
    """Return the beginning of a sentence about needs of one wait that have the same cause."""
    kind = needs[0].wait.kind
    if kind == "trainer":
        return "There is nothing to do for the workers"
    if kind == "room":
        return f"No room for {listed(need.task for need in needs)}"
    head = "Too little" if any(need.available for need in needs) else "Nothing"
    return f"{head} is ready for {joined([f'{named(gap.task)} ({gap.available:,} of {gap.least:,})' for gap in needs])}"


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


def causes_of(need: Need, table: Sequence[Cause]) -> list[Found]:
    """Return the causes of a table that hold, the reason first."""
    findings = []
    for cause in table:
        if (words := cause.of(need)) is not None:
            findings.append(Found(cause, *((words, cause.advice) if isinstance(words, str) else words)))
    slow = [finding for finding in findings if finding.cause.reason == Reason.SLOW]
    others = [finding for finding in findings if finding.cause.reason != Reason.SLOW]
    covered = bool(slow) and all(finding.cause.yields for finding in others) and need.is_covered
    return [*slow, *others] if covered else others or slow


def too_large(limits: Limits | None, task: str, status: Status, count: int) -> tuple[str, str] | None:
    """Return why a batch of `count` groups can never be drawn and the advice, or None if it can."""
    largest = None if limits is None else limits.largest_batch
    if limits is None or largest is None or count <= largest or status != Status.COMPLETED:
        return None
    by_rate = limits.capacity is None or count <= limits.capacity
    bound = f"{limits.rate} allows {largest:,} at once" if by_rate else f"the capacity is {limits.capacity:,}"
    return (
        f"a batch of {count:,} groups of task {named(task)} would wait for ever: {bound}",
        f"Ask for fewer groups, or {'widen error_buffer' if by_rate else 'raise the capacity'}",
    )
