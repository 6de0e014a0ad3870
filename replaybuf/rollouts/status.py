"""The statuses of rollouts and groups."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Status(StrEnum):
    """The state of a rollout, or of a group."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"


#: Groups that aren't trained on, and that nobody finishes.
UNFIT = (Status.FILTERED, Status.FAILED)
#: Groups that take no room and are never evicted: they stay for SQL, up to bounds of their own.
ASIDE = (Status.ARCHIVED, *UNFIT)


# A group that isn't fully completed has the first of these statuses that any of its rollouts has.
_STATUS_PRECEDENCE = (
    Status.FAILED,
    Status.ABORTED,
    Status.EXPIRED,
    Status.FILTERED,
    Status.INIT,
    Status.ARCHIVED,
)


def group_status(statuses: Iterable[Status]) -> Status:
    """Return a group's status from its rollouts' statuses.

    COMPLETED when all are, otherwise the first of FAILED, ABORTED, EXPIRED, FILTERED, INIT, ARCHIVED that any has.
    """
    present = set(statuses)
    if present == {Status.COMPLETED}:
        return Status.COMPLETED
    for status in _STATUS_PRECEDENCE:
        if status in present:
            return status
    return Status.COMPLETED
