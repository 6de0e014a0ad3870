"""The prompt ledger: the state of every prompt of a dataset, kept in the store with everything else.

A prompt that is drawn becomes a group of the buffer, leased from the beginning, in the same transaction that moves the
dataset's cursor. Finishing it stores the result and removes the prompt in one transaction. A prompt whose worker died
comes back when its lease ends, and is handed out before new ones. So at any moment, and after any crash, a prompt is in
the dataset, in flight, or finished: none is skipped, none is finished twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

from replaybuf.buffer.lease import Cursors, Lease
from replaybuf.buffer.putting import PutOptions
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.buffer.sync import SyncReplayBuffer
from replaybuf.common.cancellation import to_its_end
from replaybuf.common.checks import Tags, check_list, check_seconds, check_task_name, check_timeout, check_whole, whole
from replaybuf.errors import InputError, NotReadyError, ReplayBufError, RolloutError
from replaybuf.produce.datasets import PromptDataset
from replaybuf.produce.difficulty import Changed, Order, OrderedPrompts, Statistics
from replaybuf.rules.query import Query
from replaybuf.rules.transitions import Tally, total
from replaybuf.storage.values import LEASE_SECONDS, UNSET, Cursor, NewGroup, StorageItem, Unset
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.rollout_type import RolloutType
from replaybuf.values.rollouts.segments import as_group, flat
from replaybuf.values.rollouts.staleness import reset_response
from replaybuf.values.rollouts.statuses import StatusLike


class Prompt:
    """A prompt in flight: `group` has its rollouts, with their partial responses; `attempt` counts from 1.

    `status` and `tags` are those from before the draw: INIT for a new prompt. It is finished or given back once. While
    this process lives, its lease is renewed.
    """

    def __init__(self, ledger: PromptLedger, lease: Lease, item: StorageItem) -> None:
        self._ledger, self._lease, self._kind = ledger, lease, ledger.rollout_type
        self.task_name = item.task_name
        self.uid = item.uid
        self.group: list[Any] = item.item
        self.status = item.status
        self.tags: Tags = dict(item.tags or {})
        self.attempt = item.deliveries

    def __repr__(self) -> str:
        number = self._kind.get(flat(self.group)[0], "group_id") if self.group else None
        group = "" if number is None else f", group {number!r:.50}"
        return f"<Prompt {self.uid} of {self.task_name}{group}, attempt {self.attempt}>"

    @property
    def lost(self) -> bool:
        """Whether the lease is known to be lost, or the buffer restored: then stop generating.

        Detected within a third of the ledger's `seconds`; `finish` detects it at once.
        """
        return self._lease.lost

    async def finish(
        self,
        group: Sequence[Any] | None = None,
        *,
        timeout: float | Unset | None = UNSET,
        **options: Unpack[PutOptions],
    ) -> int | None:
        """Store the result (default: `group` as it is now) in place of the prompt, in one transaction.

        Options, rules and result are those of `ReplayBuffer.put`. Raises LeaseLostError if the lease had ended and the
        prompt was handed to another worker, and FencedError after a restore; then nothing is stored, and this process
        no longer has the prompt. Raises InputError if nothing was generated.
        """
        rollouts = list(self.group if group is None else group)
        if rollouts and all(map(self._is_new, flat(rollouts))):
            raise InputError(
                f"nothing was generated for prompt {self.uid}: its rollouts have the status init, and it would be "
                "handed out again; set their status to COMPLETED, or call give_back()"
            )
        place = self._ledger.place_of(self)
        if place is not None:
            options["tags"] = {**(options.get("tags") or {}), ITEM: place}
        return await self._lease.finish(
            rollouts,
            self.task_name,
            replaces=[self.uid],
            timeout=timeout,
            place=None if place is None else (self._ledger.name, place),
            **options,
        )

    def _is_new(self, rollout: Any) -> bool:
        """Return whether nothing was generated for a rollout. Raises RolloutError."""
        self._kind.check_class(rollout)
        return self._kind.status(rollout) == Status.INIT

    async def save(self, group: Sequence[Any] | None = None, *, model_step: int | None = None) -> None:
        """Save the partial responses: if this worker dies, the next one continues them.

        `model_step` is the step of the weights that wrote them. Tokens saved without it get that of a later `save` or
        `finish`, as if newer weights had written them. The prompt stays with this process, also if the call is
        cancelled.
        """
        await to_its_end(self._save(group, model_step))

    async def _save(self, group: Sequence[Any] | None, model_step: int | None) -> None:
        rollouts = list(self.group if group is None else group)
        unsaid = not all(
            self._kind.has(rollout, "status") for rollout in flat(rollouts)
        )  # then only the group has a status
        uid = await self._lease.save(
            rollouts,
            self.task_name,
            replaces=[self.uid],
            model_step=model_step,
            status=self.status if unsaid else None,
            tags=None if self._ledger.place_of(self) is None else self.tags,
        )
        self.uid = self.uid if uid is None else uid

    async def add(self, index: int, *, model_step: int | None = None) -> None:
        """Store the finished rollout `group[index]` by itself, while others are still being generated.

        If this worker dies, the prompt comes back with it; `finish` and `save` store the whole group in its place.
        `model_step` is that of `save`. Raises InputError if it isn't completed, failed or filtered, and the errors of
        `finish`.
        """
        await self._lease.add(self.uid, index, self.group[index], self.task_name, model_step=model_step)

    async def give_back(
        self, group: Sequence[Any] | None = None, *, model_step: int | None = None, failed: str | None = None
    ) -> None:
        """Return the prompt to be handed out again, with partial responses if a `group` is given.

        `model_step` is that of `save`. `failed` is the error of a failed generation; after `max_deliveries` failures
        the prompt is set aside as FAILED. A caller that is cancelled waits until the prompt is returned.
        """
        await to_its_end(self._give_back(group, model_step, failed))

    async def _give_back(self, group: Sequence[Any] | None, model_step: int | None, failed: str | None) -> None:
        if group is not None:
            await self._save(group, model_step)
        await self._lease.give_back([self.uid], failed=failed)


def begin_anew(rollouts: Sequence[Any], kind: RolloutType, status: Status = Status.INIT) -> None:
    """Remove the partial responses of interrupted rollouts, and set their status; other rollouts stay as they are."""
    for rollout in flat(rollouts):
        if kind.status(rollout) == Status.ABORTED:
            reset_response(rollout, kind)
            kind.set_status(rollout, status)


#: Prompts that are handed out again: those of dead workers, interrupted ones, and expired ones.
AGAIN = (Status.ABORTED, Status.EXPIRED, Status.INIT)

#: The tag of groups of a ledger with an order: the place of their prompt in the dataset.
ITEM = "prompt"

#: Prompts of a status, optionally narrowed by a query.
Narrowed = tuple[Status, Query | None]
Again = StatusLike | Narrowed

_LONGEST_WAIT = 5.0


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """The number of prompts by state.

    `drawn` from the dataset so far; of these, `in_flight` with workers, `waiting` to be handed out again, and
    `finished`, including those that were given up as FAILED.
    """

    drawn: int
    in_flight: int
    waiting: int
    finished: int


class PromptLedger:
    """Hands out the prompts of a dataset to any number of workers; a prompt comes back until it is finished.

    `dataset` is indexed, or any other iterable. Every worker has its own copy, and all follow the cursor `name` in the
    store, which is part of checkpoints and snapshots. The dataset is read `epochs` times (None: for ever), with
    `shuffle` (a seed) in another order every time. `make_group(item, number)` makes a group of an item of the dataset:
    a list of rollouts of the buffer's type, which become INIT (default: the item is such a list, or one rollout).
    `number` counts the drawn prompts from 0, over all epochs.

    `order` says which prompts of an indexed dataset come next in an epoch, by what was generated of them so far, also
    by other workers: "varied", "unsolved" or a function (`OrderedPrompts`). The store then keeps, for each prompt, how
    often it was generated and the rewards of its finished groups, COMPLETED or FILTERED, as a part of checkpoints and
    snapshots, and each group has the tag "prompt", its prompt's place in the dataset. A draw ends with its epoch.

    Prompts that have come back are handed out first: groups of the task with one of the statuses `again`, or INIT. With
    `partial_rollouts` they keep their partial responses; otherwise interrupted rollouts begin anew. A dead worker's
    prompts come back `seconds` after its last lease renewal.
    """

    def __init__(
        self,
        buffer: ReplayBuffer | SyncReplayBuffer,
        dataset: Any,
        task_name: str,
        *,
        name: str | None = None,
        make_group: Callable[[Any, int], list[Any]] | None = None,
        epochs: int | None = 1,
        shuffle: int | None = None,
        order: str | Order | None = None,
        partial_rollouts: bool = False,
        again: Iterable[StatusLike] = AGAIN,
        seconds: float = LEASE_SECONDS,
    ) -> None:
        times = whole(epochs)
        if epochs is not None and (times is None or times < 0):
            raise InputError(f"epochs must be a whole number, or None for no end, got {epochs!r:.100}")
        self.buffer: ReplayBuffer = buffer.asynchronous if isinstance(buffer, SyncReplayBuffer) else buffer
        self.task_name = check_task_name(task_name)
        self.name = check_task_name(task_name if name is None else name, "name")
        self._ordered = None if order is None else OrderedPrompts(dataset, times, shuffle, order)
        self._source = self._ordered or PromptDataset(dataset, times, shuffle)
        self._make_group = make_group or _as_group
        self._partial_rollouts = partial_rollouts
        self._again = tuple(status for status, _ in self._returning(again))
        self._seconds = check_seconds(seconds, "seconds")
        self._ended_at: int | None = None  # the number of prompts drawn at the end of the dataset that was reported

    @property
    def rollout_type(self) -> RolloutType:
        """The class of the rollouts."""
        return self.buffer.rollout_type

    async def draw(
        self,
        count: int = 1,
        *,
        timeout: float | None = 0,
        again: Iterable[Again] | None = None,
        partial_rollouts: bool | None = None,
    ) -> list[Prompt]:
        """Return up to `count` prompts: first those that have come back, then new ones. An empty list: none is left.

        With a timeout (seconds; None: for ever) the call waits if there are none but some in flight, which may come
        back. Then an empty list means that all are finished; NotReadyError is raised at the timeout.

        `again` and `partial_rollouts` default to the ledger's. In `again` a status may have a query that filters its
        prompts: `(Status.ABORTED, {"tags.tries": {"$lt": 3}})`. Prompts with INIT are always handed out.
        """
        wanted = check_whole(count, "count", 1)
        patience = check_timeout(timeout)
        returning = self._returning(self._again if again is None else again)
        keeps = self._partial_rollouts if partial_rollouts is None else partial_rollouts
        deadline = time.monotonic() + patience
        while True:
            seen = self.buffer.waits.version()
            prompts = await self._draw_again(wanted, returning, keeps) or await self._draw_new(wanted)
            if prompts or patience <= 0:
                return prompts
            counts = await self.counts(returning)
            if not counts.in_flight and not counts.waiting:
                return []
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise NotReadyError(
                    f"after {patience:g} s: task {self.task_name}: {self.why_none}, and "
                    f"{counts.in_flight} are in flight with workers"
                )
            await self.buffer.waits.changed(seen, min(remaining, _LONGEST_WAIT))

    @property
    def why_none(self) -> str:
        """Return why the last draw found no new prompt, in words."""
        return self._source.why_none

    async def counts(self, again: Iterable[Again] | None = None) -> LedgerCounts:
        """Return the number of prompts by state, from the tallies of the task: its other groups count too.

        `again` narrows the waiting ones to some statuses, as in `draw` (default: the ledger's).
        """
        drawn = (await self.buffer.cursors.read(self.name)).position
        count = partial(total, await self.buffer.tallies(), self.task_name)
        there, in_flight = count(Tally.SIZE, self._again), count(Tally.LEASED, self._again)
        chosen = there if again is None else count(Tally.SIZE, {one for one, _ in self._returning(again)})
        return LedgerCounts(drawn, in_flight, chosen, drawn - there - in_flight)

    def _returning(self, again: Iterable[Again]) -> list[Narrowed]:
        """Return the statuses that are handed out again, in order. INIT is included, for prompts of dead workers."""
        chosen: dict[Any, Narrowed] = {}
        for one in check_list(again, "again"):
            status, where = one if type(one) is tuple and len(one) == 2 else (one, None)
            found = (self.rollout_type.statuses.check(status), where)
            chosen[repr(found)] = found
        return list((chosen | {repr((Status.INIT, None)): (Status.INIT, None)}).values())

    async def _draw_again(self, count: int, again: Iterable[Narrowed], partial: bool) -> list[Prompt]:
        tallies = await self.buffer.waits.tallies()
        drawn: list[Prompt] = []
        try:
            for status, where in again:
                size = min(count - len(drawn), tallies.get((self.task_name, status, Tally.SIZE), 0))
                if size > 0:
                    lease = await self.buffer.lease_batch(
                        {self.task_name: size}, group_status=status, where=where, seconds=self._seconds
                    )
                    prompts = [Prompt(self, lease, item) for item in lease.items[self.task_name]]
                    drawn += prompts
                    if not partial:
                        for prompt in prompts:
                            begin_anew(prompt.group, self.rollout_type)
                    await _go_on(prompts, lease)
        except BaseException:
            await to_its_end(_give_back(drawn))
            raise
        return drawn

    async def _draw_new(self, count: int) -> list[Prompt]:
        """Draw new prompts from the dataset; retry from the new position if another worker moves the cursor."""
        cursors, attempt = self.buffer.cursors, 0
        while True:
            now = await cursors.read(self.name)
            changed = await self._changed(now)
            groups, after, epochs = await asyncio.to_thread(self._read, now, count, changed)
            if not groups:
                if self._ended_at != now.position:
                    self.buffer.waits.dataset_ended(self.task_name, self.name, now.position)
                    self._ended_at = now.position
                return []
            moved = replace(now, position=now.position + len(groups), value=after)
            lease = await cursors.claim(groups, moved, self._seconds, epochs)
            if lease is not None:
                return [Prompt(self, lease, item) for item in lease.items[self.task_name]]
            attempt += 1  # another worker made progress
            await asyncio.sleep(random.uniform(0, 0.005 * min(attempt, 20)))

    async def statistics(self) -> Statistics:
        """Return the statistics of the prompts: an array with a row for each, of the fields of `STATISTICS`.

        Raises InputError for a ledger without an order, which keeps none.
        """
        if self._ordered is None:
            raise InputError("the statistics of prompts are kept by ledgers with order=")
        now = await self.buffer.cursors.read(self.name)
        await asyncio.to_thread(self._ordered.take_in, now, await self._changed(now))
        return self._ordered.statistics.copy()

    def place_of(self, prompt: Prompt) -> int | None:
        """Return the place of a prompt in the dataset, None if this ledger has no order."""
        place = prompt.tags.get(ITEM)
        return place if self._ordered is not None and type(place) is int else None

    async def _changed(self, now: Cursor) -> Changed:
        """Return the statistics that changed since the last read."""
        if self._ordered is None:
            return ()
        return await self.buffer.cursors.prompts(self.name, self._ordered.known(now))

    def _read(self, now: Cursor, count: int, changed: Changed) -> tuple[list[NewGroup], bytes, dict[int, int] | None]:
        """Return the next groups of the dataset, the position after them, and with an order the epochs of their
        prompts; blocks."""
        epochs: dict[int, int] | None = None
        if self._ordered is None:
            items, after = self._source.read(now.value, count)
        else:
            items, epochs, after = self._ordered.choose(now, changed, count)
        groups = [self._new_group(item, now.position + offset) for offset, item in enumerate(items)]
        for new, place in zip(groups, epochs or (), strict=epochs is not None):
            new.tags = {ITEM: place}
        return groups, after, epochs

    def _new_group(self, item: Any, number: int) -> NewGroup:
        try:
            made = as_group(self._make_group(item, number))
            rollouts = [copy.copy(rollout) for rollout in made]  # the dataset's own rollouts stay as they are
            for rollout in rollouts:
                self.rollout_type.check_class(rollout)
        except RolloutError as error:
            where = f"item {number} of the dataset (counted as drawn, from 0)"
            if self._make_group is _as_group:
                kind, cls = type(item).__qualname__, self.rollout_type.cls.__qualname__
                raise RolloutError(
                    f"{where} is a {kind}, and no group of {cls}: give make_group=, which makes one of an item and its "
                    f"number: make_group=lambda item, number: [{cls}(...)]"
                ) from error
            raise RolloutError(
                f"{where} can't be made a group of rollouts, by make_group or make_rollout: {error}"
            ) from error
        if not rollouts:
            raise InputError(f"make_group gave an empty group for {item!r:.200}")
        for rollout in rollouts:
            self.rollout_type.set_status(rollout, Status.INIT)
        return NewGroup(self.task_name, Status.INIT, 0, rollouts, time.time())


async def overwrite(cursors: Cursors, name: str, position: int, value: bytes) -> None:
    """Set a cursor, retrying if other processes move it in the meantime."""
    while not await cursors.move(replace(await cursors.read(name), position=position, value=value)):
        pass


async def _go_on(prompts: Sequence[Prompt], lease: Lease) -> None:
    """Put the finished rollouts of prompts into their groups that earlier workers have added."""
    stored = await lease.stored(prompts[0].task_name) if prompts else {}
    for prompt in prompts:
        for index, rollout in stored.get(prompt.uid, {}).items():
            if index < len(prompt.group):
                prompt.group[index] = rollout


async def _give_back(prompts: Iterable[Prompt]) -> None:
    for prompt in prompts:
        with contextlib.suppress(ReplayBufError, RuntimeError):  # on failure, it comes back when its lease ends
            await prompt.give_back()


def _as_group(item: Any, number: int) -> list[Any]:
    return list(item) if isinstance(item, (list, tuple)) else [item]
