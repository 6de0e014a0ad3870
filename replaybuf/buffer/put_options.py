"""The options of a put, and which of them go together; checks of single values are in `common.checks`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypedDict

from replaybuf.common.checks import (
    Tags,
    check_priority,
    check_step,
    check_tags,
    check_task_name,
    check_whole,
    shown,
)
from replaybuf.common.units import named
from replaybuf.errors import InputError
from replaybuf.storage.values import Leased, Part, StorageItem
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.staleness import ExpiryRule
from replaybuf.values.rollouts.statuses import Statuses, StatusLike

#: The largest size of a group that fills: each put counts its rollouts, and the last one reads them.
MOST_ROLLOUTS = 65_536


class PutOptions(TypedDict, total=False):
    """The options of all puts: of buffers, leases and prompts. `ReplayBuffer.put` has their meaning.

    By default they are None, but for `expired_groups_retryable` and `keep_unfit` (True) and `priority` (1.0).
    """

    model_step: int | None
    current_train_step: int | None
    stale_threshold: int | None
    token_stale_threshold: int | None
    expired_groups_retryable: bool
    priority: float
    tags: Tags | None
    key: str | None
    status: StatusLike | None
    dropped: list[StorageItem] | None
    keep_unfit: bool
    parents: Sequence[int | None] | None
    min_size: int | None


class FillOptions(PutOptions, total=False):
    """The options of puts of groups, or of rollouts of groups that fill."""

    group: str | None
    size: int | None
    index: int | None


class LeaseOptions(FillOptions, total=False):
    """The options of puts that replace other groups.

    `replaces` are the uids of groups that the new one replaces, and `lease` holds them; with `stays_leased` it then
    holds the new one. With `prompt` the put is of a rollout of a prompt that the lease holds, and `parts` are the uids
    of those that the group is made of.
    """

    replaces: Iterable[int]
    lease: Leased | None
    stays_leased: bool
    prompt: Part | None
    parts: Iterable[int]


class Checked(NamedTuple):
    """The checked options of a put; those of a group that fills are checked by `part`."""

    model_step: int | None
    train_step: int | None
    rule: ExpiryRule
    priority: float
    tags: Tags | None
    key: str | None
    status: Status | None
    dropped: list[StorageItem] | None
    keep_unfit: bool
    parents: Sequence[int | None] | None
    min_size: int | None
    group: str | None
    size: int | None
    wanted: int | None

    def part(self, task_name: str, entries: int) -> Part | None:
        """Return the place of a rollout in a group that fills; None for a put without `group`. Raises InputError."""
        if self.group is None:
            if self.size is not None or self.wanted is not None:
                raise InputError("size and index are those of a group that fills: give its name, too, group=")
            return None
        name = check_task_name(self.group, "group")
        if self.size is None:
            raise InputError(f"group {named(name)} needs size=, the number of rollouts that it shall have")
        size = check_whole(self.size, "size", 1)
        if size > MOST_ROLLOUTS:
            raise InputError(f"group {named(name)} can't fill up to {size} rollouts: the limit is {MOST_ROLLOUTS}")
        if entries != 1:
            raise InputError(f"group {named(name)} gets its rollouts one by one, and this put has {entries}")
        if self.key is not None or self.status is not None or not self.keep_unfit:
            raise InputError("key, status and keep_unfit can't be given with group=, whose name is its key")
        if self.wanted is not None and check_whole(self.wanted, "index") >= size:
            raise InputError(f"index {self.wanted} is beyond group {named(name)}, whose size is {size}: from 0 on")
        least = size if self.min_size is None else self.least(size)
        return Part(name, size, least, task_name=task_name, wanted=self.wanted)

    def least(self, size: int) -> int:
        """Return the `min_size` of a group of this size. Raises InputError."""
        if self.status is not None:
            raise InputError("min_size can't be given with status=, which is that of all rollouts")
        if check_whole(self.min_size, "min_size", 1) > size:
            raise InputError(f"min_size {self.min_size} is more than the {size} rollouts of the group")
        return int(self.min_size or 1)


def put_options(
    statuses: Statuses,
    *,
    model_step: int | None = None,
    current_train_step: int | None = None,
    stale_threshold: int | None = None,
    token_stale_threshold: int | None = None,
    expired_groups_retryable: bool = True,
    priority: float = 1.0,
    tags: Tags | None = None,
    key: str | None = None,
    status: StatusLike | None = None,
    dropped: list[StorageItem] | None = None,
    keep_unfit: bool = True,
    parents: Sequence[int | None] | None = None,
    min_size: int | None = None,
    group: str | None = None,
    size: int | None = None,
    index: int | None = None,
) -> Checked:
    """Check the options of a put. Raises InputError, and TypeError for an option that puts don't have."""
    checked = Checked(
        model_step=None if model_step is None else check_step(model_step, "model_step"),
        train_step=None if current_train_step is None else check_step(current_train_step, "current_train_step"),
        rule=ExpiryRule(stale_threshold, token_stale_threshold, expired_groups_retryable),
        priority=check_priority(priority),
        tags=None if tags is None else check_tags(tags),
        key=None if key is None else check_task_name(key, "key"),
        status=None if status is None else statuses.check(status),
        dropped=None if dropped is None else check_dropped(dropped),
        keep_unfit=keep_unfit,
        parents=parents,
        min_size=min_size,
        group=group,
        size=size,
        wanted=index,
    )
    if token_stale_threshold is not None and current_train_step is None:
        raise InputError("token_stale_threshold needs current_train_step: the staleness of a token is relative to it")
    if parents is not None and (group is not None or min_size is not None):
        raise InputError("parents can't be given with group= or min_size=: put trees whole")
    return checked


def check_dropped(dropped: Any) -> list[StorageItem] | None:
    """Return the list to which groups that leave are added, or None. Raises InputError."""
    if dropped is not None and not isinstance(dropped, list):
        raise InputError(f"dropped must be a list, to which the groups that leave are added, got {shown(dropped)}")
    return dropped
