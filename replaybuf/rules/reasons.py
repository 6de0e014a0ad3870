"""The reasons for which somebody waits, and what a cause is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why somebody waits; READY if there is nothing to wait for. The names are stable.

    They are in the order in which they are looked for: of several, the first is the one to remove.
    """

    FENCED = "fenced"  # the buffer was restored since
    TOO_LARGE_A_BATCH = "too_large_a_batch"  # the limits never allow so many at once
    NO_SUCH_TASK = "no_such_task"  # nothing was ever put there, but into others
    HELD_BACK = "held_back"  # there are enough groups, but a limit doesn't let them go yet
    NO_MATCH = "no_match"  # there are enough groups, but they don't match the query
    LEASED = "leased"  # others hold them
    FINISHED = "finished"  # the trainer has said that it has finished, so the producers have
    DEADLOCK = "deadlock"  # the producers wait for the trainer, which waits for them
    PRODUCERS_HELD_BACK = "producers_held_back"  # there is no room for what they put
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
