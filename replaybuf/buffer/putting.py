"""Puts: checks, normalisation and storage of groups, for `ReplayBuffer.put` and the puts of a lease."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypedDict, TypeVar, Unpack

from replaybuf.buffer.waits import Waits
from replaybuf.common.cancellation import shielded
from replaybuf.common.checks import (
    Tags,
    check_key,
    check_options,
    check_priority,
    check_step,
    check_tags,
    check_task_name,
    check_timeout,
    check_uids,
    check_whole,
)
from replaybuf.errors import FullError, InputError, PartlyStoredError, RolloutError
from replaybuf.rules.causes import never_put
from replaybuf.rules.words import named
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import UNSET, Leased, NewGroup, Part, Refresh, StorageItem, Unset
from replaybuf.values.codec.object_refs import UnfetchedError
from replaybuf.values.rollouts.normalise import Normalised, is_finished, normalise, normalise_fit
from replaybuf.values.rollouts.rewards import reward_value
from replaybuf.values.rollouts.rollout import UNFIT, Status
from replaybuf.values.rollouts.segments import entries_of, segmented
from replaybuf.values.rollouts.staleness import NO_RULE, ExpiryRule
from replaybuf.values.rollouts.statuses import StatusLike

T = TypeVar("T")

_logger = logging.getLogger("replaybuf.puts")
_LOOK_COMPLETE = (
    "has responses and rewards, but its status is init: draws take completed groups only; set its rollouts' status "
    "to COMPLETED, or put it with status='completed'"
)

#: The largest size of a group that fills: each put counts its rollouts, and the last one reads them.
MOST_ROLLOUTS = 65_536

#: Seconds that a put waits for room by default.
PUT_TIMEOUT = 600.0


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


_OPTIONS = FillOptions.__annotations__.keys()


class Putting:
    """Checks and normalises groups, and stores them when there is room."""

    def __init__(
        self,
        storage: SQLStorage,
        waits: Waits,
        timeout: float | None = PUT_TIMEOUT,
        *,
        free_object_refs: bool = False,
    ) -> None:
        self.storage = storage
        self.rollout_type = storage.codec.rollout_type
        self.waits = waits
        self._timeout = check_timeout(timeout)
        self._free = free_object_refs
        self._warned: set[str] = set()  # kinds of warnings

    async def put(
        self,
        items: Sequence[Any],
        task_name: str,
        *,
        timeout: float | Unset | None = UNSET,
        place: tuple[str, int] | None = None,
        **options: Unpack[LeaseOptions],
    ) -> int | None:
        """Store a group and return its uid, or None for an empty list or a dropped group.

        `place` is that of its prompt: the name of a ledger, and the place in its dataset.
        """
        patience = self.patience(timeout)
        new, is_dropped = await self.prepare(items, task_name, **options)
        if new is None:
            return None
        if place is not None and new.status in (Status.COMPLETED, Status.FILTERED):
            self._record_rewards(new, place)
        if is_dropped:
            await (self._drop(new) if new.dropped is None else shielded(self._drop(new)))
            return None
        uid = await self.fetching([new], partial(self._store_with_room, new, patience))
        if uid is None and new.dropped is not None:
            new.dropped.append(_dropped_item(new))
        return uid

    def _record_rewards(self, new: NewGroup, place: tuple[str, int]) -> None:
        """Set the rewards of a group for the statistics of its prompt, if it has any."""
        get, key = self.rollout_type.get, self.rollout_type.reward_key
        given = [reward_value(get(rollout, "reward"), key) for rollout in new.rollouts]
        given = given if new.segments is None else new.segments.rewards(given)
        rewards = [reward for reward in given if reward is not None]
        sums = sum(rewards), sum(reward * reward for reward in rewards)
        if rewards and all(map(math.isfinite, sums)):
            new.judged = (*place, len(rewards), *sums)

    def _store_with_room(self, new: NewGroup, patience: float) -> Awaitable[int | None]:
        """Return the put of a group, which waits for room if the limits block puts."""
        if self.storage.rules.limits.slows_puts and not new.stays_leased:
            return self.waits.put(new, patience, self._store_now)
        return self._store_now(new)

    def _store_now(self, new: NewGroup) -> Coroutine[Any, Any, int | None]:
        """Return the put of a group, which doesn't wait for room.

        With `new.dropped`, a cancelled caller first waits for the end of the put, so that the list is complete.
        """
        storing = self.storage.put(new)
        return storing if new.dropped is None else shielded(storing)

    async def put_many(
        self,
        groups: Sequence[Sequence[Any]],
        task_names: Sequence[str],
        options: Sequence[FillOptions],
        timeout: float | Unset | None,
    ) -> list[int | None]:
        """Store groups in as few transactions as their sizes allow; return the result of `put` for each.

        Raises PartlyStoredError when some were refused and others weren't.
        """
        patience = self.patience(timeout)
        results: list[int | BaseException | None] = [None] * len(groups)
        pending: dict[int, NewGroup] = {}
        dropped: list[NewGroup] = []
        for place, (items, task_name, more) in enumerate(zip(groups, task_names, options, strict=True)):
            try:
                new, is_dropped = await self.prepare(items, task_name, **more)
            except RolloutError as error:
                results[place] = error
                continue
            if new is not None and is_dropped:
                dropped.append(new)
            elif new is not None:
                pending[place] = new
        for new in dropped:
            await self._drop(new)
        for place, outcome in zip(pending, await self._store_many([*pending.values()], patience), strict=True):
            results[place] = outcome
        return _uids_or_error(results)

    async def _store_many(self, news: Sequence[NewGroup], patience: float) -> list[int | BaseException | None]:
        """Store groups and return the uid or the error of each; groups without room wait for it."""
        outcomes: list[int | BaseException | None] = [None] * len(news)
        alone = [place for place, new in enumerate(news) if new.part is not None]
        together = [place for place, new in enumerate(news) if new.part is None]
        for place, outcome in zip(together, await self.storage.put_many([news[at] for at in together]), strict=True):
            outcomes[place] = outcome
        alone += [place for place in together if isinstance(outcomes[place], UnfetchedError | FullError)]
        puts = [self.fetching([news[at]], partial(self._store_with_room, news[at], patience)) for at in alone]
        for place, result in zip(alone, await asyncio.gather(*puts, return_exceptions=True), strict=True):
            outcomes[place] = result
        return outcomes

    def patience(self, timeout: float | Unset | None) -> float:
        """Return the seconds that a put with this timeout waits for room."""
        return self._timeout if isinstance(timeout, Unset) else check_timeout(timeout)

    async def prepare(
        self,
        items: Sequence[Any],
        task_name: str,
        *,
        replaces: Iterable[int] = (),
        lease: Leased | None = None,
        stays_leased: bool = False,
        prompt: Part | None = None,
        parts: Iterable[int] = (),
        **options: Unpack[FillOptions],
    ) -> tuple[NewGroup | None, bool]:
        """Check and normalise a group; None for an empty list.

        Also return whether it must be dropped instead of stored.
        """
        self.storage.check_open()
        check_options("a put", options, _OPTIONS)
        check_task_name(task_name)
        given = options.get
        newest, step, rule = _check_rules(
            given("model_step"),
            given("current_train_step"),
            given("stale_threshold"),
            given("token_stale_threshold"),
            given("expired_groups_retryable", True),
        )
        (rollouts, segments), replaced = segmented(items, given("parents")), check_uids(replaces, "replaces")
        priority, tags, key = check_priority(given("priority", 1.0)), check_tags(given("tags")), check_key(given("key"))
        status, dropped = options.get("status"), options.get("dropped")
        check_dropped(dropped)
        if not rollouts:
            return None, False
        created_at = time.time()
        said = None if status is None else self.rollout_type.statuses.check(status)
        part, least = _part_of(task_name, items, options) if prompt is None else prompt, given("min_size")
        unfit: list[Any] = []
        if part is not None:
            part.train_step, part.rule = step, rule  # which holds for the whole group
            normal = _as_part(await normalise(rollouts, self.rollout_type, newest, step, NO_RULE, said))
        elif least is not None:
            least = _check_min_size(least, len(items), said)
            normal, fit, unfit = await normalise_fit(items, self.rollout_type, least, newest, step, rule)
            rollouts, segments = segmented(fit)
        else:
            normal = await normalise(rollouts, self.rollout_type, newest, step, rule, said)
        if part is None and normal.status == Status.FILLING:
            raise InputError(
                "the status filling is that of groups with put(group=, size=): their rollouts are completed"
            )
        self._doubt(task_name, normal, is_new=said is None and lease is None)
        new = NewGroup(
            task_name=task_name,
            status=normal.status,
            staleness=normal.staleness,
            rollouts=rollouts,
            created_at=created_at,
            train_step=normal.train_step,
            priority=priority,
            tags=tags,
            key=key,
            replaces=replaced,
            lease=lease,
            stays_leased=stays_leased,
            dropped=dropped,
            worker=self.storage.worker,
            put_step=step,
            fields=normal.fields,
            segments=segments,
            part=part,
            parts=tuple(parts),
        )
        if unfit and given("keep_unfit", True):
            new.rest = await self._rest(new, unfit)
        return new, normal.dropped or (normal.status in UNFIT and not given("keep_unfit", True))

    def _doubt(self, task_name: str, normal: Normalised, *, is_new: bool) -> None:
        """Log a warning, once for each kind of mistake, about a group that is probably not as its caller meant it.

        `is_new`: the group isn't stored for a lease, and its put named no status.
        """
        if normal.status == Status.INIT and is_new and is_finished(normal.fields):
            normal.doubts["init"] = _LOOK_COMPLETE
        for kind, sentence in normal.doubts.items():
            self._warn(kind, f"a group of task {named(task_name)} {sentence}")

    async def _rest(self, new: NewGroup, unfit: Sequence[Any]) -> NewGroup:
        """Return the unfit rollouts that a group goes without, as a group of their own."""
        rollouts, segments = segmented(unfit)
        rest = await normalise(rollouts, self.rollout_type, None, None, NO_RULE)
        return replace(
            new,
            status=rest.status,
            staleness=rest.staleness,
            rollouts=rollouts,
            segments=segments,
            fields=rest.fields,
            key=None,
            replaces=(),
        )

    def warn_of(self, refresh: Refresh) -> None:
        """Warn once of a refresh to an earlier train step than the last one, and of one of a task without groups."""
        for task in refresh.rules.keys() - refresh.tasks if refresh.tasks else ():
            meant = ". ".join(never_put(task, sorted(refresh.tasks)))
            self._warn(f"task {task}", f"refresh_staleness of task {named(task)}: {meant}")
        for task, step in refresh.earlier.items():
            if step > refresh.train_step:
                self._warn(
                    "refresh",
                    f"refresh_staleness of task {named(task)} went back from train step {step} to "
                    f"{refresh.train_step}, so its groups look fresher than they are; a run that goes on from a "
                    "checkpoint restores the buffer to it, and a new run has a buffer of its own",
                )

    def _warn(self, kind: str, sentence: str) -> None:
        """Log a warning, once for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            _logger.warning("%s (said once)", sentence)

    async def fetching(self, groups: Sequence[NewGroup], store: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `store()`, which stores the groups; repeated after fetching the ObjectRefs in them.

        Each round fetches the objects of a group by one call of Ray, in another thread. When that is cancelled, nothing
        is stored. With `free_object_refs` the ObjectRefs in stored rollouts are then replaced by None.
        """
        codec, fetched = self.storage.codec, dict[Any, Any]()
        while True:
            try:
                result = await store()
            except UnfetchedError as unfetched:
                missing, unfetched.refs = unfetched.refs, ()
            else:
                break
            fetched |= await asyncio.to_thread(codec.fetch, tuple(dict.fromkeys(missing)))
            for new in groups:
                new.fetched = fetched
            del missing  # the frame may live as long as an error's traceback
        for new in groups:
            if self._free and new.fetched:
                codec.release(new.rollouts)
            new.fetched = None
        return result

    async def _drop(self, new: NewGroup) -> None:
        await self.storage.drop(new)
        if new.dropped is not None:
            new.dropped.append(_dropped_item(new))


def _uids_or_error(results: Sequence[int | BaseException | None]) -> list[int | None]:
    """Return the results of a put of many groups. Raises the first error if all were refused, or PartlyStoredError."""
    refused = {place: one for place, one in enumerate(results) if isinstance(one, BaseException)}
    if not refused:
        return list(results)  # type: ignore[arg-type]
    place, first = next(iter(refused.items()))
    if len(refused) == len(results):
        raise first
    error = PartlyStoredError(
        f"{len(refused)} of {len(results)} groups were not stored, and the others were (`results` has the uid or the "
        f"error of each); groups[{place}]: {first}"
    )
    error.results = list(results)
    raise error from first


def check_dropped(dropped: Any) -> None:
    """Raise InputError unless `dropped` is a list or None."""
    if dropped is not None and not isinstance(dropped, list):
        raise InputError(f"dropped must be a list, to which the groups that leave are added, got {dropped!r:.100}")


def _dropped_item(new: NewGroup) -> StorageItem:
    """Return a group that was dropped before it was stored, with the uid 0."""
    return StorageItem(
        uid=0,
        timestamp_id=0,
        task_name=new.task_name,
        status=new.status,
        staleness=new.staleness,
        priority=new.priority,
        times_sampled=0,
        created_at=new.created_at,
        reward=None,
        tags=dict(new.tags) if new.tags else None,
        key=new.key,
        item=entries_of(new.rollouts, new.segments),
        segments=new.segments,
    )


def _part_of(task_name: str, rollouts: Sequence[Any], options: FillOptions) -> Part | None:
    """Return the place of a rollout in a group that fills; None for a put without `group`. Raises InputError."""
    name, size, index, least = options.get("group"), options.get("size"), options.get("index"), options.get("min_size")
    if options.get("parents") is not None and (name is not None or least is not None):
        raise InputError("parents can't be given with group= or min_size=: put trees whole")
    if name is None:
        if size is not None or index is not None:
            raise InputError("size and index are those of a group that fills: give its name, too, group=")
        return None
    name = check_task_name(name, "group")
    if size is None:
        raise InputError(f"group {named(name)} needs size=, the number of rollouts that it shall have")
    size = check_whole(size, "size", 1)
    if size > MOST_ROLLOUTS:
        raise InputError(f"group {named(name)} can't fill up to {size} rollouts: at most {MOST_ROLLOUTS} are possible")
    if len(rollouts) != 1:
        raise InputError(f"group {named(name)} gets its rollouts one by one, and this put has {len(rollouts)}")
    for what in ("key", "status", "keep_unfit"):
        if options.get(what) is not None:
            raise InputError(f"{what} can't be given with group=: a group that fills has the name as its key")
    least = size if least is None else _check_min_size(least, size)
    if index is not None and check_whole(index, "index") >= size:
        raise InputError(f"index {index} is beyond group {named(name)}, whose size is {size}: they count from 0")
    return Part(name, size, least, task_name=task_name, wanted=index)


def _check_min_size(least: Any, size: int, said: Status | None = None) -> int:
    """Check the `min_size` of a group of this size. Raises InputError."""
    if said is not None:
        raise InputError("min_size can't be given with status=, which is that of all rollouts")
    if check_whole(least, "min_size", 1) > size:
        raise InputError(f"min_size {least} is more than the {size} rollouts of the group")
    return int(least)


def _as_part(normal: Normalised) -> Normalised:
    """Return the result of the put rules for a rollout of a group that fills. Raises InputError if it is unfinished."""
    if normal.status != Status.COMPLETED and normal.status not in UNFIT:
        raise InputError(
            f"a rollout of a group that fills must be completed, failed or filtered, and this one is {normal.status}: "
            "put it when it is finished"
        )
    return replace(normal, status=Status.FILLING, train_step=None)


def _check_rules(*given: Any) -> tuple[int | None, int | None, ExpiryRule]:
    """Return the checked model step, train step and expiry rule of a put. Raises InputError."""
    try:
        return _checked_rules(*given)
    except TypeError:  # an array of one number, which can't be a key of the cache
        return _checked_rules.__wrapped__(*given)


@lru_cache(maxsize=1024, typed=True)  # typed: True equals 1, and is neither a step nor a threshold
def _checked_rules(
    model_step: Any, train_step: Any, stale_threshold: Any, token_stale_threshold: Any, retryable: bool
) -> tuple[int | None, int | None, ExpiryRule]:
    """Validate the steps and thresholds of a put; cached, because most puts of a train step have the same ones."""
    newest = None if model_step is None else check_step(model_step, "model_step")
    step = None if train_step is None else check_step(train_step, "current_train_step")
    rule = ExpiryRule(stale_threshold, token_stale_threshold, retryable)
    if token_stale_threshold is not None and step is None:
        raise InputError("token_stale_threshold needs current_train_step: the staleness of a token is relative to it")
    return newest, step, rule
