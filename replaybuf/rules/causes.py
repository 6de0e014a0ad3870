"""What a cause of a wait is, and what a draw needs of one task.

The causes themselves: `withheld` (groups are there, and can't be drawn), `spoilt` (what became of others), `producing`
(why no more come). Each is a function of the need and of the circumstances, and None where it doesn't hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from replaybuf.rollouts.statuses import Status
from replaybuf.rules.circumstances import Circumstances, Wait
from replaybuf.rules.transitions import levels
from replaybuf.rules.wording import named


class Reason(StrEnum):
    """Why somebody waits; READY if there is nothing to wait for. The names are stable.

    They are in the order in which they are looked for: of several, the first is the one to remove.
    """

    FENCED = "fenced"  # the buffer was restored since
    TOO_LARGE_A_BATCH = "too_large_a_batch"  # the limits never allow so many at once
    NO_SUCH_TASK = "no_such_task"  # nothing was ever put there, but into others
    HELD_BACK = "held_back"  # there are enough groups, but a limit doesn't let them go yet
    NO_MATCH = "no_match"  # there are groups, but they don't match the query
    LEASED = "leased"  # others hold them
    FINISHED = "finished"  # the trainer has said that it has finished, so the producers have
    END_OF_DATASET = "end_of_dataset"  # all prompts were drawn, and those in flight are too few
    DEADLOCK = "deadlock"  # the producers wait for the trainer, which waits for them
    PRODUCERS_HELD_BACK = "producers_held_back"  # there is no room for what they put
    OTHER_STATUS = "other_status"  # there are groups, but of another status, such as INIT
    EXPIRED = "expired"
    FILTERED = "filtered"
    FAILED = "failed"
    ABORTED = "aborted"  # interrupted, and to be continued
    NOTHING_PUT = "nothing_put"
    PRODUCERS_SILENT = "producers_silent"  # killed, ended, or alive without putting anything
    WAITS_FOR_TRAINER = "waits_for_trainer"  # it has published nothing new
    SLOW = "slow"  # groups come, but take their time
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of a wait: what is the case, and what to do about it. Both are parts of a sentence."""

    reason: Reason
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Need:
    """What a wait needs of one task: at least `least` groups, of which `there` are there.

    Of these, `matching` match the query, and `available` may be drawn now.
    """

    wait: Wait
    task: str
    least: int
    there: int
    matching: int
    available: int

    @classmethod
    def of(cls, wait: Wait, task: str, about: Circumstances) -> Need:
        """Return what the wait needs of this task."""
        there = matching = about.count(task, wait.status)
        if wait.query is not None and about.matches is not None:
            matching = min(there, about.matches.get(task, 0))
        available = matching
        if wait.status == Status.COMPLETED and about.limits is not None:
            available = min(matching, about.limits.drawable(levels(about.tallies, [task])[task]))
        return cls(wait, task, wait.wants[task], there, matching, available)

    @property
    def missing(self) -> int:
        """The number of groups without which the wait goes on."""
        return max(0, self.least - self.available)

    @property
    def status(self) -> Status:
        """The status of the groups."""
        return self.wait.status

    @property
    def head(self) -> str:
        """The beginning of a sentence about it."""
        much = "Nothing" if self.available == 0 else "Too little"
        return f"{much} is ready for {named(self.task)} ({self.available:,} of {self.least:,})"


def be(count: int) -> str:
    """Return the verb for so many."""
    return "is" if count == 1 else "are"
