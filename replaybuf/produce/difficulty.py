"""Prompts in the order of their difficulty: which of a dataset come next, by what was generated of them so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from replaybuf.common.checks import shown
from replaybuf.errors import InputError
from replaybuf.produce.datasets import IndexedSource, PromptDataset, is_indexed, random_numbers, seed_of
from replaybuf.storage.values import Cursor

#: What is known of a prompt: its place in the dataset, how often it was generated, the mean and the standard deviation
#: of the rewards of all its rollouts, and the mean of its last group; 0 where nothing was generated.
STATISTICS = np.dtype(
    [("item", np.int64), ("times", np.int64), ("mean", np.float64), ("spread", np.float64), ("last", np.float64)]
)
Statistics = np.ndarray[Any, np.dtype[np.void]]
Places = np.ndarray[Any, np.dtype[np.int64]]
Order = Callable[[Statistics], Any]
Changed = Sequence[Sequence[Any]]

#: The highest keys are searched for above about `_SPARE` of a sample of so many prompts.
_SAMPLE_SIZE, _SPARE = 8192, 8


def varied(statistics: Statistics) -> Any:
    """Put prompts that were never generated first, then those whose rewards vary most."""
    return np.where(statistics["times"] > 0, statistics["spread"], np.inf)


@dataclass(frozen=True, slots=True)
class Unsolved:
    """An order that skips what is solved or hopeless, and shuffles the rest.

    After `tries` generations a prompt is solved if its last group has a mean reward of at least `high`, and hopeless if
    the mean of all its rollouts is at most `low`.
    """

    low: float = 0.0
    high: float = 1.0
    tries: int = 2

    def __post_init__(self) -> None:
        if not (self.low < self.high and self.tries >= 1):
            raise InputError(f"expected low < high, and tries of at least 1, got {self!r:.200}")

    def __call__(self, statistics: Statistics) -> Any:
        settled = (statistics["last"] >= self.high) | (statistics["mean"] <= self.low)
        return np.where(settled & (statistics["times"] >= self.tries), -np.inf, 0.0)


ORDERS: dict[str, Order] = {"varied": varied, "unsolved": Unsolved()}


class OrderedPrompts(PromptDataset):
    """An indexed dataset in which an order says what comes next in an epoch.

    `order` is called with the statistics of some prompts, and returns the priority of each, which must depend on its
    row alone: the highest come first, ties in an order that depends on `shuffle`, a seed, and the epoch; -inf skips a
    prompt. Priorities are compared as 32-bit floats. The same statistics give the same choice.

    What was read from the store is kept in memory, some 60 bytes a prompt.
    """

    def __init__(self, dataset: Any, epochs: int | None, shuffle: int | None, order: Any) -> None:
        if not is_indexed(dataset):
            kind = type(dataset).__name__
            raise InputError(f"order= needs a dataset with len() and [], got {kind}: give list(dataset)")
        super().__init__(dataset, epochs)
        self._seed = seed_of(shuffle) or 0
        self._source = IndexedSource(dataset, [self._seed])
        function: Order | None = ORDERS.get(order) if isinstance(order, str) else order
        if not callable(function) or isinstance(function, type):
            raise InputError(f"order must be 'varied', 'unsolved', Unsolved(...), or a function, got {shown(order)}")
        self._order = function
        self._version = -1, -1  # the number of restores and the version of the cursor up to which changes were taken in
        self._clear()

    def _clear(self) -> None:
        size = self._source.size or 0
        self.statistics = np.zeros(size, STATISTICS)
        self.statistics["item"] = np.arange(size)
        self._drawn_epochs = np.full(size, -1)  # the epoch of the last draw
        self._keys = np.zeros(size, np.uint64)  # the order of `_epoch`, the highest first; 0: not in it any more
        self._epoch = -1

    def known(self, cursor: Cursor) -> int:
        """Return the version of the cursor since which changes are needed; -1: all."""
        return self._version[1] if cursor.epoch == self._version[0] else -1

    def choose(self, cursor: Cursor, changes: Changed, count: int) -> tuple[list[Any], dict[int, int], bytes]:
        """Return up to `count` next items of an epoch, the epoch of each by its place, and the position after them;
        blocks. `changes` is what has changed since `known`."""
        self.update_statistics(cursor, changes)
        with self._lock:
            epoch, index = self._begin(cursor.value)
            if self._epochs == 0:
                return [], {}, cursor.value
            next_places = self._first_places(epoch, count)
            if not len(next_places) and index and epoch + 1 != self._epochs:
                epoch += 1
                next_places = self._first_places(epoch, count)
            self.why_none, size = PromptDataset.why_none, len(self._drawn_epochs)
            if size and not len(next_places) and (self._drawn_epochs < epoch).all():
                kind = " (solved or hopeless)" if isinstance(self._order, Unsolved) else ""
                self.why_none = f"all {size} prompts are skipped by order={kind}"
            places = next_places.tolist()
            items = [self._source.item(epoch, place) for place in places]
            position = self._position_after(epoch, places[-1] + 1, items[-1]) if items else cursor.value
            return items, dict.fromkeys(places, epoch), position

    def update_statistics(self, cursor: Cursor, changes: Changed) -> None:
        """Take in what has changed, unless another thread has taken in what was read later."""
        with self._lock:
            if (cursor.epoch, cursor.version) < self._version:
                return
            if cursor.epoch != self._version[0]:
                self._clear()
            if changes:
                self._update_rows(*zip(*changes, strict=True))
            self._version = cursor.epoch, cursor.version

    def _update_rows(self, items: Any, epochs: Any, times: Any, rollouts: Any, *sums: Any) -> None:
        if max(items) >= len(self.statistics):
            raise InputError(f"the dataset had an item {max(items)}, and has {len(self.statistics)} items now")
        places, count = np.array(items), np.maximum(rollouts, 1)
        reward, squares, last = np.array(sums, float)  # None becomes NaN
        rows = self.statistics[places]
        rows["times"], rows["mean"], rows["last"] = times, reward / count, np.nan_to_num(last)
        rows["spread"] = np.sqrt(np.maximum(squares / count - rows["mean"] ** 2, 0.0))
        self.statistics[places] = rows
        self._drawn_epochs[places] = [-1 if epoch is None else epoch for epoch in epochs]
        if self._epoch >= 0:
            self._rank(places, self._epoch)

    def _rank(self, places: Places, epoch: int) -> None:
        """Set the keys of prompts: the priority in the upper half, a random number of the epoch in the lower one."""
        try:
            priorities = np.asarray(self._order(self.statistics[places]))
        except ValueError as error:  # also that of an unknown field
            raise InputError(f"order= raised {error!r:.200} (the fields are {STATISTICS.names})") from error
        if priorities.shape != places.shape or priorities.dtype.kind not in "fiub" or np.isnan(priorities).any():
            raise InputError(f"order= must return a number for each of {len(places)} prompts, got {shown(priorities)}")
        with np.errstate(over="ignore"):
            bits = (priorities.astype(np.float32) + np.float32(0)).view(np.uint32)  # -0.0 becomes 0.0
        upper = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
        excluded = (priorities == -np.inf) | (self._drawn_epochs[places] >= epoch)
        self._keys[places] = np.where(excluded, np.uint64(0), upper << np.uint64(32) | self._ties[places])

    def _first_places(self, epoch: int, count: int) -> Places:
        """Return the places of the prompts that come next in an epoch, without a sort of all."""
        if epoch != self._epoch:
            size = len(self.statistics)
            self._ties = (random_numbers(self._seed, epoch, size) >> np.uint64(32)).astype(np.uint32)
            self._rank(np.arange(size), epoch)
            self._epoch = epoch
        keys = self._keys
        step = max(1, len(keys) // _SAMPLE_SIZE)
        sample, rank = keys[::step], count // step + _SPARE
        floor = np.partition(sample, -rank)[-rank] if rank <= len(sample) else np.uint64(0)
        places = np.flatnonzero(keys >= max(floor, np.uint64(1)))
        if len(places) < count and floor > 1:
            places = np.flatnonzero(keys)
        if len(places) > count:
            threshold = np.partition(keys[places], -count)[-count]
            higher, ties = places[keys[places] > threshold], places[keys[places] == threshold]
            places = np.concatenate([higher, ties[: count - len(higher)]])
        return places[np.argsort(~keys[places], kind="stable")]
