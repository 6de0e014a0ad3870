"""The numbers of a task that its limits look at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from replaybuf.rollouts.status import ASIDE, Status


@dataclass(frozen=True, slots=True)
class Level:
    """The numbers of a task that its limits look at.

    `buffered` counts the groups that take room: those that are neither leased nor archived, filtered or failed;
    `completed` those of them that are COMPLETED, `inserted` the completed groups that were put, `sampled` the draws of
    completed groups.
    """

    buffered: int = 0
    completed: int = 0
    inserted: int = 0
    sampled: int = 0

    def joined_by(self, status: Status) -> Level:
        """Return the level after one more group of this status was put."""
        completed = status == Status.COMPLETED
        buffered = self.buffered + (status not in ASIDE)
        return Level(buffered, self.completed + completed, self.inserted + completed, self.sampled)

    def without(self, removed: Iterable[Status]) -> Level:
        """Return the level after groups of these statuses were replaced."""
        statuses = list(removed)
        completed = statuses.count(Status.COMPLETED)
        buffered = sum(status not in ASIDE for status in statuses)
        return Level(self.buffered - buffered, self.completed - completed, self.inserted, self.sampled)
