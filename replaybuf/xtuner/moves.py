"""What a buffer of xtuner's does with groups, whoever keeps them: the database, or a storage backend of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.staleness import ExpiryRule
from replaybuf.rollouts.statuses import OUR_STATUSES

#: xtuner's order of precedence: the status of a group is the first that any of its rollouts has, or COMPLETED.
_PRECEDENCE: Final = (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED)


@dataclass(frozen=True, slots=True)
class Put:
    """A group to be put, its status, and the rule by which it expires.

    `model_step` is that of new tokens, `train_step` the one for which the staleness is computed; None leaves them.
    """

    group: list[Any]
    task_name: str
    status: Status
    model_step: int | None
    train_step: int | None
    rule: ExpiryRule


class Moves(Protocol):
    """What is done with groups. `dropped` lists take the groups that leave without having been drawn."""

    async def put(self, new: Put, dropped: list[list[Any]]) -> None: ...

    async def take(self, sizes: Mapping[str, int], status: Status) -> dict[str, list[list[Any]]]: ...

    async def count(self, tasks: Sequence[str], statuses: Sequence[Status]) -> dict[str, dict[Status, int]]: ...

    async def is_ready(self, sizes: Mapping[str, int], status: Status) -> bool: ...

    async def refresh(
        self, rules: Mapping[str, ExpiryRule], step: int, statuses: Sequence[Status], dropped: list[list[Any]]
    ) -> dict[str, int]: ...

    async def save(self, folder: Path) -> Path: ...

    async def resume(self, folder: Path) -> None: ...


def status_of(group: Iterable[Any]) -> Status:
    """Return the status of a group by its rollouts, as xtuner has it: one without FAILED, ... ones is COMPLETED."""
    present = {OUR_STATUSES.check(rollout.status) for rollout in group}
    return next((status for status in _PRECEDENCE if status in present), Status.COMPLETED)
