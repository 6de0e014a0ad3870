"""Puts: checks, normalisation and storage of groups, for `ReplayBuffer.put` and the puts of a lease."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, Unpack

from replaybuf.buffer.put_options import Checked, FillOptions, LeaseOptions, checks_of
from replaybuf.buffer.waits import Waits
from replaybuf.common.cancellation import shielded
from replaybuf.common.checks import check_task_name, check_timeout, check_uids
from replaybuf.common.units import named
from replaybuf.errors import FullError, InputError, PartlyStoredError, RolloutError
from replaybuf.rules.causes import never_put
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import UNSET, Leased, NewGroup, Part, Refresh, Unset
from replaybuf.values.codec.library_values import UnfetchedError
from replaybuf.values.rollouts.normalise import Normalised, is_finished, normalise, normalise_fit
from replaybuf.values.rollouts.rewards import reward_value
from replaybuf.values.rollouts.rollout import UNFIT, Status
from replaybuf.values.rollouts.segments import Segments, segmented
from replaybuf.values.rollouts.staleness import NO_RULE

T = TypeVar("T")

_logger = logging.getLogger("replaybuf.puts")
_LOOK_COMPLETE = (
    "has responses and rewards, but its status is init: draws take completed groups only; set its rollouts' status "
    "to COMPLETED, or put it with status='completed'"
)

#: Seconds that a put waits for room by default.
PUT_TIMEOUT = 600.0


class Putting:
    """Checks and normalises groups, and stores them when there is room."""

    def __init__(self, storage: SQLStorage, waits: Waits, timeout: float | None = PUT_TIMEOUT) -> None:
        self.storage = storage
        self.rollout_type = storage.codec.rollout_type
        self.waits = waits
        self._check_options = checks_of(self.rollout_type.statuses)
        self._timeout = check_timeout(timeout)

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
            await _to_its_end(self.storage.drop(new), [new])
            return None
        return await self.fetching([new], partial(self._store_with_room, new, patience))

    def _record_rewards(self, new: NewGroup, place: tuple[str, int]) -> None:
        """Set the rewards of a group for the statistics of its prompt, if it has any."""
        get, key = self.rollout_type.get, self.rollout_type.reward_key
        values = [reward_value(get(rollout, "reward"), key) for rollout in new.rollouts]
        values = values if new.segments is None else new.segments.rewards(values)
        rewards = [reward for reward in values if reward is not None]
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
        for place, (items, task_name, group_options) in enumerate(zip(groups, task_names, options, strict=True)):
            try:
                new, is_dropped = await self.prepare(items, task_name, **group_options)
            except RolloutError as error:
                results[place] = error
                continue
            if new is not None and is_dropped:
                dropped.append(new)
            elif new is not None:
                pending[place] = new
        for new in dropped:
            await _to_its_end(self.storage.drop(new), [new])
        for place, outcome in zip(pending, await self._store_many([*pending.values()], patience), strict=True):
            results[place] = outcome
        return _uids_or_error(results)

    async def _store_many(self, groups: Sequence[NewGroup], patience: float) -> list[int | BaseException | None]:
        """Store groups and return the uid or the error of each; groups without room wait for it."""
        outcomes: list[int | BaseException | None] = [None] * len(groups)
        alone = [place for place, new in enumerate(groups) if new.part is not None]
        together = [place for place, new in enumerate(groups) if new.part is None]
        stored = [groups[at] for at in together]
        for place, outcome in zip(together, await _to_its_end(self.storage.put_many(stored), stored), strict=True):
            outcomes[place] = outcome
        alone += [place for place in together if isinstance(outcomes[place], UnfetchedError | FullError)]
        puts = [self.fetching([groups[at]], partial(self._store_with_room, groups[at], patience)) for at in alone]
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
        check_task_name(task_name)
        chosen = self._check_options(options)
        (rollouts, segments), replaced = segmented(items, chosen.parents), check_uids(replaces, "replaces")
        if not rollouts:
            return None, False
        created_at = time.time()
        part = prompt or chosen.part(task_name, len(items))
        unfit: Sequence[Any] = ()
        if part is not None:
            part.train_step, part.rule = chosen.train_step, chosen.rule  # which holds for the whole group
            normal = _as_part(await self._normalise(rollouts, chosen._replace(rule=NO_RULE)))
        elif chosen.min_size is not None:
            rollouts, segments, unfit, normal = await self._leave_out_unfit(items, chosen)
        else:
            normal = await self._normalise(rollouts, chosen)
        if part is None and normal.status == Status.FILLING:
            raise InputError(
                "the status filling is that of groups with put(group=, size=): their rollouts are completed"
            )
        self._warn_of_doubts(task_name, normal, is_new=chosen.status is None and lease is None)
        new = NewGroup(
            task_name=task_name,
            status=normal.status,
            staleness=normal.staleness,
            rollouts=rollouts,
            created_at=created_at,
            train_step=normal.train_step,
            priority=chosen.priority,
            tags=chosen.tags,
            key=chosen.key,
            replaces=replaced,
            lease=lease,
            stays_leased=stays_leased,
            dropped=chosen.dropped,
            worker=self.storage.worker,
            put_step=chosen.train_step,
            fields=normal.fields,
            segments=segments,
            part=part,
            parts=tuple(parts),
        )
        if unfit and chosen.keep_unfit:
            new.rest = await self._group_of_unfit(new, unfit)
        return new, normal.dropped or (normal.status in UNFIT and not chosen.keep_unfit)

    def _normalise(self, rollouts: Sequence[Any], chosen: Checked) -> Coroutine[Any, Any, Normalised]:
        return normalise(rollouts, self.rollout_type, chosen.model_step, chosen.train_step, chosen.rule, chosen.status)

    async def _leave_out_unfit(
        self, items: Sequence[Any], chosen: Checked
    ) -> tuple[list[Any], Segments | None, list[Any], Normalised]:
        """Apply the put rules to a group with a `min_size`.

        Return the rollouts or segments that it is of, how these belong together, and the rollouts it goes without.
        """
        least = chosen.least(len(items))
        normal, fit, unfit = await normalise_fit(
            items, self.rollout_type, least, chosen.model_step, chosen.train_step, chosen.rule
        )
        return *segmented(fit), unfit, normal

    def _warn_of_doubts(self, task_name: str, normal: Normalised, *, is_new: bool) -> None:
        """Log a warning, once for each kind of mistake, about a group that is probably not as its caller meant it.

        `is_new`: the group isn't stored for a lease, and its put named no status.
        """
        if normal.status == Status.INIT and is_new and is_finished(normal.fields):
            normal.doubts["init"] = _LOOK_COMPLETE
        for kind, sentence in normal.doubts.items():
            self.waits.warn(kind, f"a group of task {named(task_name)} {sentence}", _logger)

    async def _group_of_unfit(self, new: NewGroup, unfit: Sequence[Any]) -> NewGroup:
        """Return the unfit rollouts that a group goes without, as a group of their own."""
        rollouts, segments = segmented(unfit)
        normal = await normalise(rollouts, self.rollout_type, None, None, NO_RULE)
        return replace(
            new,
            status=normal.status,
            staleness=normal.staleness,
            rollouts=rollouts,
            segments=segments,
            fields=normal.fields,
            key=None,
            replaces=(),
        )

    def warn_of(self, refresh: Refresh) -> None:
        """Warn once of a refresh to an earlier train step than the last one, and of one of a task without groups."""
        for task in refresh.rules.keys() - refresh.tasks if refresh.tasks else ():
            existing = never_put(sorted(refresh.tasks))
            self.waits.warn(f"refresh of {task}", f"refresh_staleness of task {named(task)}: {existing}", _logger)
        for task, step in refresh.earlier.items():
            if step > refresh.train_step:
                self.waits.warn(
                    "refresh",
                    f"refresh_staleness of task {named(task)} went back from train step {step} to "
                    f"{refresh.train_step}, so its groups look fresher than they are; a run that goes on from a "
                    "checkpoint restores the buffer to it, and a new run has a buffer of its own",
                    _logger,
                )

    async def fetching(self, groups: Sequence[NewGroup], store: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `store()`, which stores the groups; repeated after fetching the ObjectRefs in them.

        Each round fetches the objects of a group by one call of Ray, in another thread. When that is cancelled, nothing
        is stored.
        """
        codec, fetched = self.storage.codec, None
        while True:
            try:
                result = await store()
                break
            except UnfetchedError as unfetched:
                missing, unfetched.refs = unfetched.refs, ()
            fetched = (fetched or {}) | await asyncio.to_thread(codec.fetch, tuple(dict.fromkeys(missing)))
            for new in groups:
                new.fetched = fetched
            del missing  # the frame may live as long as an error's traceback
        for new in groups if fetched else ():
            new.fetched = None
        return result


def _to_its_end(storing: Coroutine[Any, Any, T], groups: Sequence[NewGroup]) -> Coroutine[Any, Any, T]:
    """Shield the transaction of these groups from cancellation if one has a `dropped` list, which it completes."""
    return shielded(storing) if any(new.dropped is not None for new in groups) else storing


def _uids_or_error(results: Sequence[int | BaseException | None]) -> list[int | None]:
    """Return the results of a put of many groups. Raises the first error if all were refused, or PartlyStoredError."""
    refused = {place: result for place, result in enumerate(results) if isinstance(result, BaseException)}
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


def _as_part(normal: Normalised) -> Normalised:
    """Return the result of the put rules for a rollout of a group that fills. Raises InputError if it is unfinished."""
    if normal.status != Status.COMPLETED and normal.status not in UNFIT:
        raise InputError(
            f"a rollout of a group that fills must be completed, failed or filtered, and this one is {normal.status}: "
            "put it when it is finished"
        )
    return replace(normal, status=Status.FILLING, train_step=None)
