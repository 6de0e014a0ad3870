"""Samplers: the prompts of a dataset as groups to be generated, each handed out until it is finished.

Their state is kept in the store with everything else, as a prompt ledger. A prompt that is drawn becomes a group of the
buffer, leased from the beginning, in the same transaction that moves the dataset's cursor. Finishing it stores the
result and removes the prompt in one transaction. A prompt whose worker died comes back when its lease ends, and is
handed out before new ones. So at any moment, and after any crash, a prompt is in the dataset, in flight, or finished:
none is skipped, none is finished twice.
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
from typing import Any

from replaybuf.buffer.lease import Cursors, Lease
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.buffer.sync import SyncReplayBuffer, asynchronous_of
from replaybuf.common.cancellation import in_daemon_thread, shielded
from replaybuf.common.checks import (
    check_list,
    check_seconds,
    check_task_name,
    check_timeout,
    check_whole,
    shown,
    whole,
)
from replaybuf.errors import InputError, NotReadyError, ReplayBufError, RolloutError
from replaybuf.produce.datasets import PromptDataset
from replaybuf.produce.difficulty import Changed, Order, OrderedPrompts, Statistics
from replaybuf.produce.prompt import ITEM, Prompt, discard_partial_responses
from replaybuf.produce.prompt_records import to_rollout
from replaybuf.rules.query import Query
from replaybuf.rules.transitions import Tally, total
from replaybuf.storage.values import LEASE_SECONDS, Cursor, NewGroup, StorageItem
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.segments import as_group
from replaybuf.values.rollouts.statuses import StatusLike

#: Prompts of a status, optionally narrowed by a query.
Narrowed = tuple[Status, Query | None]
Again = StatusLike | Narrowed

_LONGEST_WAIT = 5.0

_random = random.SystemRandom()


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


class Sampler:
    """Hands out the prompts of a dataset to any number of workers, each as a group of rollouts to be generated.

    `dataset` is indexed (`len` and `[]`), or any other iterable; items are read when drawn. Every worker has its own
    copy, and all samplers of the prompt ledger `name` (default: the task's), in any processes, follow one cursor in the
    store, which is part of checkpoints and snapshots; together they hand out every prompt once. The dataset is read
    `epochs` times (None: for ever), with `shuffle` (a seed) in another order every time.

    An item is a rollout, or a record that `make_rollout` converts into one (`to_rollout` supports the chat formats of
    OpenAI, verl and xtuner). It becomes a group of `prompt_repeat_k` independent copies; only arrays, tensors and
    images are the same objects in all, and are stored once. Prompt n, counted from 0 over all epochs, has the
    `group_id` n and the `rollout_id`s n k to n k + k - 1, as in xtuner; none is given twice, even after crashes.
    `make_group(item, n)`, in place of both, returns the rollouts of the group, of the buffer's type. They become INIT.

    `order` says which prompts of an indexed dataset come next in an epoch, by what was generated of them so far, also
    by other workers: "varied", "unsolved" or a function (`OrderedPrompts`). The store then keeps, for each prompt, how
    often it was generated and the rewards of its finished groups, COMPLETED or FILTERED, as a part of checkpoints and
    snapshots, and each group has the tag "prompt", its prompt's place in the dataset. A draw ends with its epoch.

    Prompts that have come back are handed out first: groups of the task with one of the statuses `again`, in this
    order, or INIT. With `partial_rollouts` they keep their partial responses; otherwise interrupted rollouts begin
    anew. A dead worker's prompts come back `seconds` after its last lease renewal.
    """

    def __init__(
        self,
        buffer: ReplayBuffer | SyncReplayBuffer,
        dataset: Any,
        task_name: str,
        *,
        prompt_repeat_k: int = 1,
        epochs: int | None = None,
        shuffle: int | None = None,
        order: str | Order | None = None,
        make_rollout: Callable[[Any], Any] = to_rollout,
        make_group: Callable[[Any, int], list[Any]] | None = None,
        again: Iterable[StatusLike] = (Status.ABORTED, Status.EXPIRED),
        partial_rollouts: bool = True,
        name: str | None = None,
        seconds: float = LEASE_SECONDS,
    ) -> None:
        times = whole(epochs)
        if epochs is not None and (times is None or times < 0):
            raise InputError(f"epochs must be a whole number, or None for no end, got {shown(epochs)}")
        self.buffer = asynchronous_of(buffer)
        self.rollout_type = self.buffer.rollout_type
        self.task_name = check_task_name(task_name)
        self.name = check_task_name(task_name if name is None else name, "name")
        self.prompt_repeat_k = check_whole(prompt_repeat_k, "prompt_repeat_k", 1)
        self._ordered_prompts = None if order is None else OrderedPrompts(dataset, times, shuffle, order)
        self._source = self._ordered_prompts or PromptDataset(dataset, times, shuffle)
        self._make_rollout, self._make_group = make_rollout, make_group
        self._partial_rollouts = partial_rollouts
        self._returning_statuses = tuple(status for status, _ in self._check_again(again))
        self._lease_seconds = check_seconds(seconds, "seconds")
        self._ended_at: int | None = None  # the number of prompts drawn at the end of the dataset that was reported

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

        `again` and `partial_rollouts` default to the sampler's. In `again` a status may have a query that filters its
        prompts: `(Status.ABORTED, {"tags.tries": {"$lt": 3}})`. Prompts with INIT are always handed out.
        """
        size = check_whole(count, "count", 1)
        patience = check_timeout(timeout)
        returning = self._check_again(self._returning_statuses if again is None else again)
        keeps_partial = self._partial_rollouts if partial_rollouts is None else partial_rollouts
        deadline = time.monotonic() + patience
        while True:
            version = self.buffer.waits.version()
            prompts = await self._draw_returned(size, returning, keeps_partial) or await self._draw_new(size)
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
            await self.buffer.waits.changed(min(remaining, _LONGEST_WAIT), version)

    @property
    def why_none(self) -> str:
        """Return why the last draw found no new prompt, in words."""
        return self._source.why_none

    async def counts(self, again: Iterable[Again] | None = None) -> LedgerCounts:
        """Return the number of prompts by state, from the tallies of the task: its other groups count too.

        `again` narrows the waiting ones to some statuses, or those that match their queries, as in `draw` (default: the
        sampler's).
        """
        drawn = (await self.buffer.cursors.read(self.name)).position
        count = partial(total, await self.buffer.tallies(), self.task_name)
        returned, in_flight = count(Tally.SIZE, self._returning_statuses), count(Tally.LEASED, self._returning_statuses)
        waiting = returned if again is None else await self._count_waiting(self._check_again(again), count)
        return LedgerCounts(drawn, in_flight, waiting, drawn - returned - in_flight)

    async def _count_waiting(self, statuses: Iterable[Narrowed], count: Callable[[Tally, set[Status]], int]) -> int:
        """Return the number of prompts that `draw` would hand out again; `count` returns sums of tallies."""
        whole = {status for status, where in statuses if where is None}
        narrowed = [
            {"$and": [{"task_name": self.task_name, "status": status}, where]}
            for status, where in statuses
            if status not in whole
        ]
        return count(Tally.SIZE, whole) + (await self.buffer.count_where({"$or": narrowed}) if narrowed else 0)

    def _check_again(self, again: Iterable[Again]) -> list[Narrowed]:
        """Return the statuses that are handed out again, in order. INIT is included, for prompts of dead workers."""
        statuses: dict[Any, Narrowed] = {}
        for entry in check_list(again, "again"):
            status, where = entry if type(entry) is tuple and len(entry) == 2 else (entry, None)
            narrowed = (self.rollout_type.statuses.check(status), where)
            statuses[repr(narrowed)] = narrowed
        return list((statuses | {repr((Status.INIT, None)): (Status.INIT, None)}).values())

    async def _draw_returned(self, count: int, statuses: Iterable[Narrowed], partial: bool) -> list[Prompt]:
        tallies = await self.buffer.waits.tallies()
        drawn_prompts: list[Prompt] = []
        try:
            for status, where in statuses:
                size = min(count - len(drawn_prompts), tallies.get((self.task_name, status, Tally.SIZE), 0))
                if size > 0:
                    lease = await self.buffer.lease_batch(
                        {self.task_name: size}, group_status=status, where=where, seconds=self._lease_seconds
                    )
                    prompts = [self._prompt(lease, item) for item in lease.items[self.task_name]]
                    drawn_prompts += prompts
                    if not partial:
                        for prompt in prompts:
                            discard_partial_responses(prompt.group, self.rollout_type)
                    await _restore_finished(prompts, lease)
        except BaseException:
            await shielded(_give_back(drawn_prompts))
            raise
        return drawn_prompts

    async def _draw_new(self, count: int) -> list[Prompt]:
        """Draw new prompts from the dataset; retry from the new position if another worker moves the cursor."""
        cursors, attempt = self.buffer.cursors, 0
        while True:
            cursor = await cursors.read(self.name)
            changes = await self._read_changes(cursor)
            groups, end, epochs = await in_daemon_thread(partial(self._read, cursor, count, changes))
            if not groups:
                if self._ended_at != cursor.position:
                    self.buffer.waits.dataset_ended(self.task_name, self.name, cursor.position)
                    self._ended_at = cursor.position
                return []
            next_cursor = replace(cursor, position=cursor.position + len(groups), value=end)
            lease = await cursors.claim(groups, next_cursor, self._lease_seconds, epochs)
            if lease is not None:
                return [self._prompt(lease, item) for item in lease.items[self.task_name]]
            attempt += 1  # another worker made progress
            await asyncio.sleep(_random.uniform(0, 0.005 * min(attempt, 20)))

    async def statistics(self) -> Statistics:
        """Return the statistics of the prompts: an array with a row for each, of the fields of `STATISTICS`.

        Raises InputError for a ledger without an order, which keeps none.
        """
        if self._ordered_prompts is None:
            raise InputError("the statistics of prompts are kept by ledgers with order=")
        cursor = await self.buffer.cursors.read(self.name)
        changes = await self._read_changes(cursor)
        await in_daemon_thread(partial(self._ordered_prompts.update_statistics, cursor, changes))
        return self._ordered_prompts.statistics.copy()

    async def _read_changes(self, cursor: Cursor) -> Changed:
        """Return the statistics that changed since the last read."""
        if self._ordered_prompts is None:
            return ()
        return await self.buffer.cursors.prompts(self.name, self._ordered_prompts.known(cursor))

    def _read(self, cursor: Cursor, count: int, rows: Changed) -> tuple[list[NewGroup], bytes, dict[int, int] | None]:
        """Return the next groups of the dataset, the position after them, and with an order the epochs of their
        prompts; blocks."""
        epochs: dict[int, int] | None = None
        if self._ordered_prompts is None:
            items, end = self._source.read(cursor.value, count)
        else:
            items, epochs, end = self._ordered_prompts.choose(cursor, rows, count)
        groups = [self._new_group(item, cursor.position + offset) for offset, item in enumerate(items)]
        for group, place in zip(groups, epochs or (), strict=epochs is not None):
            group.tags = {ITEM: place}
        return groups, end, epochs

    def _new_group(self, item: Any, number: int) -> NewGroup:
        try:
            if self._make_group is None:
                rollouts = self._repeat_prompt(item, number)
            else:
                group = as_group(self._make_group(item, number))
                rollouts = [copy.copy(rollout) for rollout in group]  # the dataset's own rollouts stay as they are
            for rollout in rollouts:
                self.rollout_type.check_class(rollout)
        except RolloutError as error:
            raise RolloutError(
                f"item {number} of the dataset (counted as drawn, from 0) can't be made a group of rollouts, by "
                f"make_group or make_rollout: {error}"
            ) from error
        if not rollouts:
            raise InputError(f"make_group gave an empty group for {shown(item)}")
        for rollout in rollouts:
            self.rollout_type.set_status(rollout, Status.INIT)
        return NewGroup(self.task_name, Status.INIT, 0, rollouts, time.time())

    def _repeat_prompt(self, item: Any, number: int) -> list[Any]:
        rollout, size, kind = self._make_rollout(item), self.prompt_repeat_k, self.rollout_type
        [fields] = kind.rows([rollout])
        containers = {name: value for name, value in fields.items() if isinstance(value, (list, dict))}
        group = [copy.copy(rollout) for _ in range(size)]
        for name, value in containers.items():
            kind.set_all(group, name, [_copy_containers(value) for _ in group])
        kind.set_all(group, "group_id", [number] * size)
        kind.set_all(group, "rollout_id", [number * size + place for place in range(size)])
        kind.set_all(group, "task_name", [self.task_name] * size)
        return group

    def _prompt(self, lease: Lease, item: StorageItem) -> Prompt:
        return Prompt(lease, item, self.rollout_type, None if self._ordered_prompts is None else self.name)


async def overwrite(cursors: Cursors, name: str, position: int, value: bytes) -> None:
    """Set a cursor, retrying if other processes move it in the meantime."""
    while not await cursors.move(replace(await cursors.read(name), position=position, value=value)):
        pass


async def _restore_finished(prompts: Sequence[Prompt], lease: Lease) -> None:
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


def _copy_containers(value: Any) -> Any:
    """Return a copy of lists and dicts at any depth, with the same other values in them."""
    if type(value) is list:
        return [_copy_containers(item) for item in value]
    if type(value) is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    return value
