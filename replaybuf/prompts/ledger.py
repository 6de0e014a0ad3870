"""The prompt ledger: where every prompt of a dataset is, kept in the store with everything else.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from replaybuf.buffer.cancellation import to_its_end
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.checks import check_list, check_seconds, check_task_name, check_timeout, whole
from replaybuf.errors import InputError, NotReadyError, ReplayBufError, RolloutError
from replaybuf.prompts.prompt import Prompt, begin_anew
from replaybuf.prompts.source import Source
from replaybuf.query import Query
from replaybuf.rollouts.normalise import as_group
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rollouts.statuses import Statuses, StatusLike
from replaybuf.rules.tallies import Tally
from replaybuf.storage.values import Cursor, NewGroup

#: Prompts that are handed out again: those of dead workers, interrupted ones, and expired ones.
AGAIN = (Status.ABORTED, Status.EXPIRED, Status.INIT)

#: Prompts of a status, optionally narrowed by a query.
Narrowed = tuple[Status, Query | None]
Again = StatusLike | Narrowed

_LONGEST_WAIT = 5.0


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Where the prompts are.

    `drawn` from the dataset so far; of these, `in_flight` with workers, `waiting` to be handed out again, and
    `finished`, including those that were given up as FAILED.
    """

    drawn: int
    in_flight: int
    waiting: int
    finished: int


class PromptLedger:
    """Hands out the prompts of a dataset to any number of workers, each until it is finished.

    `dataset` is indexed, or has `state_dict`, `load_state_dict` and `iter`, or is any other iterable. Every worker has
    its own copy of it, and all follow the cursor `name` in the store, which is part of checkpoints and snapshots. It is
    read `epochs` times (None: for ever), with `shuffle` (a seed) in another order every time. `make_group(item,
    number)` makes a group of an item of the dataset: a list of rollouts of the buffer's type, which become INIT
    (default: the item is such a list, or one rollout). `number` counts the drawn prompts from 0, over all epochs.

    Prompts that have come back are handed out first: groups of the task with one of the statuses `again`, or INIT. With
    `partial_rollouts` they keep what was generated; otherwise interrupted rollouts begin anew. `seconds` is the time
    after which a dead worker's prompts come back.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        dataset: Any,
        task_name: str,
        *,
        name: str | None = None,
        make_group: Callable[[Any, int], list[Any]] | None = None,
        epochs: int | None = 1,
        shuffle: int | None = None,
        partial_rollouts: bool = False,
        again: Iterable[StatusLike] = AGAIN,
        seconds: float = 60.0,
    ) -> None:
        times = whole(epochs)
        if epochs is not None and (times is None or times < 0):
            raise InputError(f"epochs must be a whole number, or None for no end, got {epochs!r:.100}")
        self.buffer = buffer
        self.task_name = check_task_name(task_name)
        self.name = check_task_name(task_name if name is None else name, "name")
        self._source = Source(dataset, times, shuffle)
        self._make_group = make_group or _as_group
        self._partial_rollouts = partial_rollouts
        self._again = tuple(status for status, _ in _returning(again, self.rollout_type.statuses))
        self._seconds = check_seconds(seconds, "seconds")

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

        `again` and `partial_rollouts` are those of the ledger unless given for this draw. In `again` a status may come
        with a query that narrows its prompts: `(Status.ABORTED, {"tags.tries": {"$lt": 3}})`. Prompts with INIT are
        always handed out.
        """
        wanted = whole(count)
        if wanted is None or wanted < 1:
            raise InputError(f"count must be a whole number of at least 1, got {count!r:.100}")
        patience = check_timeout(timeout)
        returning = _returning(self._again if again is None else again, self.rollout_type.statuses)
        partial = self._partial_rollouts if partial_rollouts is None else partial_rollouts
        deadline = time.monotonic() + patience
        while True:
            seen = self.buffer.waits.version()
            prompts = await self._draw_again(wanted, returning, partial) or await self._draw_new(wanted)
            if prompts or patience <= 0:
                return prompts
            counts = await self.counts(status for status, _ in returning)
            if not counts.in_flight and not counts.waiting:
                return []
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise NotReadyError(
                    f"after {patience:g} s: task {self.task_name}: no prompt is left in the dataset, and "
                    f"{counts.in_flight} are in flight with workers"
                )
            await self.buffer.waits.changed(seen, min(remaining, _LONGEST_WAIT))

    async def counts(self, waiting: Iterable[Status] | None = None) -> LedgerCounts:
        """Return where the prompts are, by counts of the task: its other groups of these statuses count too.

        `waiting` narrows the waiting ones to some statuses (default: all that the ledger hands out again).
        """
        drawn = (await self.buffer.cursors.read(self.name)).position
        tallies = await self.buffer.tallies()

        def total(name: Tally, statuses: Iterable[Status]) -> int:
            return sum(tallies.get((self.task_name, status, name), 0) for status in statuses)

        there, in_flight = total(Tally.SIZE, self._again), total(Tally.LEASED, self._again)
        chosen = there if waiting is None else total(Tally.SIZE, {*waiting})
        return LedgerCounts(drawn, in_flight, chosen, drawn - there - in_flight)

    async def _draw_again(self, count: int, again: Iterable[Narrowed], partial: bool) -> list[Prompt]:
        tallies = await self.buffer.tallies()
        drawn: list[Prompt] = []
        try:
            for status, where in again:
                size = min(count - len(drawn), tallies.get((self.task_name, status, Tally.SIZE), 0))
                if size > 0:
                    lease = await self.buffer.lease_batch(
                        {self.task_name: size}, group_status=status, where=where, seconds=self._seconds
                    )
                    drawn += [Prompt(lease, item, self.rollout_type) for item in lease.items[self.task_name]]
        except BaseException:
            await to_its_end(_give_back(drawn))
            raise
        if not partial:
            for prompt in drawn:
                begin_anew(prompt.group, self.rollout_type)
        return drawn

    async def _draw_new(self, count: int) -> list[Prompt]:
        """Draw new prompts from the dataset; if another worker moves the cursor meanwhile, from its new place."""
        cursors, attempt = self.buffer.cursors, 0
        while True:
            now = await cursors.read(self.name)
            groups, after = await asyncio.to_thread(self._read, now, count)
            if not groups:
                return []
            moved = replace(now, position=now.position + len(groups), value=after)
            lease = await cursors.claim(groups, moved, self._seconds)
            if lease is not None:
                return [Prompt(lease, item, self.rollout_type) for item in lease.items[self.task_name]]
            attempt += 1  # another worker made progress
            await asyncio.sleep(random.uniform(0, 0.005 * min(attempt, 20)))

    def _read(self, now: Cursor, count: int) -> tuple[list[NewGroup], bytes]:
        """Return the next groups of the dataset, and the place after them; blocks."""
        items, after = self._source.read(now.value, count)
        return [self._new_group(item, now.position + place) for place, item in enumerate(items)], after

    def _new_group(self, item: Any, number: int) -> NewGroup:
        try:
            made = as_group(self._make_group(item, number))
            rollouts = [copy.copy(rollout) for rollout in made]  # the dataset's own rollouts stay as they are
            for rollout in rollouts:
                self.rollout_type.check_class(rollout)
        except RolloutError as error:
            raise RolloutError(
                f"item {number} of the dataset (counted as drawn, from 0) can't be made a group of rollouts, by "
                f"make_group or make_rollout: {error}"
            ) from error
        if not rollouts:
            raise InputError(f"make_group gave an empty group for {item!r:.200}")
        for rollout in rollouts:
            self.rollout_type.set_status(rollout, Status.INIT)
        return NewGroup(self.task_name, Status.INIT, 0, rollouts, time.time())


def _returning(again: Iterable[Again], statuses: Statuses) -> list[Narrowed]:
    """Return what is handed out again, in order. INIT is always included, for the prompts of dead workers."""
    chosen: list[Narrowed] = []
    for one in check_list(again, "again"):
        status, where = one if type(one) is tuple and len(one) == 2 else (one, None)
        chosen.append((statuses.check(status), where))
    if (Status.INIT, None) not in chosen:
        chosen.append((Status.INIT, None))
    return list(dict.fromkeys(chosen)) if all(where is None for _, where in chosen) else chosen


async def _give_back(prompts: Iterable[Prompt]) -> None:
    for prompt in prompts:
        with contextlib.suppress(ReplayBufError, RuntimeError):  # otherwise it comes back when its lease ends
            await prompt.give_back()


def _as_group(item: Any, number: int) -> list[Any]:
    return list(item) if isinstance(item, (list, tuple)) else [item]
