"""The options of a put, and which of them go together; checks of single values are in `common.checks`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, TypedDict, Unpack

from replaybuf.common.checks import (
    Tags,
    check_key,
    check_options,
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
    """The checked options of a put. `filling` are all options of a put into a group that fills, None for others."""

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
    filling: FillOptions | None

    def part(self, task_name: str, entries: int) -> Part | None:
        """Return the place of a rollout in a group that fills; None for a put without `group`. Raises InputError."""
        if self.filling is None:
            return None
        name, size, index = _checked_place(entries, self.filling)
        least = size if self.min_size is None else self.least(size)
        return Part(name, size, least, task_name=task_name, wanted=index)

    def least(self, size: int) -> int:
        """Return the `min_size` of a group of this size. Raises InputError."""
        if self.status is not None:
            raise InputError("min_size can't be given with status=, which is that of all rollouts")
        if check_whole(self.min_size, "min_size", 1) > size:
            raise InputError(f"min_size {self.min_size} is more than the {size} rollouts of the group")
        return int(self.min_size or 1)


def checks_of(statuses: Statuses) -> Callable[[FillOptions], Checked]:
    """Return the check of the options of puts, given the statuses of the rollouts' class.

    It raises InputError, and TypeError for an option that puts don't have.
    """
    check = partial(_checked_options, statuses)
    # Most puts of a train step have the same options. Typed: True equals 1, and is neither a step nor a threshold.
    cached: Callable[..., Checked] = lru_cache(maxsize=1024, typed=True)(check)

    def checked(options: FillOptions) -> Checked:
        is_common = _OPTIONS_OF_ONE.isdisjoint(options) and _PLAIN_TYPES.issuperset(map(type, options.values()))
        return (cached if is_common else check)(**options)

    return checked


#: Types of options by which checked ones are found again: a tensor or a dict may have changed since.
_PLAIN_TYPES: Final = frozenset({int, float, bool, str, Status, type(None)})
#: Options that are of one put.
_OPTIONS_OF_ONE: Final = frozenset({"key", "group", "index"})
_OPTIONS: Final = FillOptions.__annotations__.keys()


def _checked_options(statuses: Statuses, **options: Unpack[FillOptions]) -> Checked:
    check_options("a put", options, _OPTIONS)
    get: Callable[..., Any] = options.get
    step, newest, token_threshold = get("current_train_step"), get("model_step"), get("token_stale_threshold")
    checked = Checked(
        model_step=None if newest is None else check_step(newest, "model_step"),
        train_step=None if step is None else check_step(step, "current_train_step"),
        rule=ExpiryRule(get("stale_threshold"), token_threshold, get("expired_groups_retryable", True)),
        priority=check_priority(get("priority", 1.0)),
        tags=check_tags(get("tags")),
        key=check_key(get("key")),
        status=None if (status := get("status")) is None else statuses.check(status),
        dropped=check_dropped(get("dropped")),
        keep_unfit=bool(get("keep_unfit", True)),
        parents=get("parents"),
        min_size=get("min_size"),
        filling=options if any(get(name) is not None for name in ("group", "size", "index")) else None,
    )
    if token_threshold is not None and step is None:
        raise InputError("token_stale_threshold needs current_train_step: the staleness of a token is relative to it")
    if checked.parents is not None and (get("group") is not None or checked.min_size is not None):
        raise InputError("parents can't be given with group= or min_size=: put trees whole")
    return checked


def _checked_place(entries: int, options: FillOptions) -> tuple[str, int, int | None]:
    """Return the name and the size of a group that fills, and the index of a rollout in it. Raises InputError."""
    name, size, index = options.get("group"), options.get("size"), options.get("index")
    if name is None:
        raise InputError("size and index are those of a group that fills: give its name, too, group=")
    name = check_task_name(name, "group")
    if size is None:
        raise InputError(f"group {named(name)} needs size=, the number of rollouts that it shall have")
    size = check_whole(size, "size", 1)
    if size > MOST_ROLLOUTS:
        raise InputError(f"group {named(name)} can't fill up to {size} rollouts: at most {MOST_ROLLOUTS} are possible")
    if entries != 1:
        raise InputError(f"group {named(name)} gets its rollouts one by one, and this put has {entries}")
    for option in ("key", "status", "keep_unfit"):
        if options.get(option) is not None:
            raise InputError(f"{option} can't be given with group=: a group that fills has the name as its key")
    if index is not None and check_whole(index, "index") >= size:
        raise InputError(f"index {index} is beyond group {named(name)}, whose size is {size}: they count from 0")
    return name, size, index


def check_dropped(dropped: Any) -> list[StorageItem] | None:
    """Return the list to which groups that leave are added, or None. Raises InputError."""
    if dropped is not None and not isinstance(dropped, list):
        raise InputError(f"dropped must be a list, to which the groups that leave are added, got {shown(dropped)}")
    return dropped
