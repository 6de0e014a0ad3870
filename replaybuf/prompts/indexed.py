"""Indexed datasets: the place is the number of items that were read, over all epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from replaybuf.errors import InputError
from replaybuf.prompts.place import is_number, of_another, pack, unpack

_KIND = "an indexed dataset"


def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a permutation of `range(size)` that depends only on these numbers.

    It is made from the raw numbers of a bit generator. Unlike numpy's shuffles, these are the same in every version of
    numpy, so that a run may go on with another one.
    """
    numbers = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(size)
    return np.argsort(numbers, kind="stable")


class Indexed:
    """Reads a dataset with `len` and `[]`; with `shuffle`, every epoch in another order.

    A dataset may grow from run to run, unless it is shuffled: another size gives another order.
    """

    def __init__(self, dataset: Sequence[Any], epochs: int | None, shuffle: int | None) -> None:
        self._dataset, self._epochs, self._shuffle = dataset, epochs, shuffle
        self._order: tuple[int, int, np.ndarray[Any, np.dtype[np.int64]]] | None = None

    def read(self, place: bytes, count: int) -> tuple[list[Any], bytes]:
        size = len(self._dataset)
        first = self._index(place, size)
        end = first + count if size else first
        if self._epochs is not None:
            self._check_end(first, size)
            end = min(end, size * self._epochs)
        items = [self._dataset[self._at(*divmod(index, size), size)] for index in range(first, end)]
        return items, pack(end if self._shuffle is None else [end, size, self._shuffle])

    def _at(self, epoch: int, index: int, size: int) -> int:
        if self._shuffle is None:
            return index
        if self._order is None or self._order[:2] != (epoch, size):
            self._order = epoch, size, epoch_order(self._shuffle, epoch, size)
        return int(self._order[2][index])

    def _check_end(self, first: int, size: int) -> None:
        if self._epochs is not None and first > size * self._epochs:
            raise InputError(
                f"{first} prompts were drawn from the dataset so far, which has {size} now, {size * self._epochs} with "
                f"epochs={self._epochs}: it has become shorter, or was read for more epochs; go on with the dataset "
                "and the epochs of the run, or give the ledger another name="
            )

    def _index(self, place: bytes, size: int) -> int:
        """Return how many items were read. A shuffled place also has size and seed, which give the order."""
        if not place:
            return 0
        found = unpack(place, _KIND)
        if is_number(found):
            if self._shuffle is not None:
                raise InputError("the run began without shuffle: go on without it, or give the ledger another name=")
            return int(found)
        if not (isinstance(found, list) and len(found) == 3 and all(map(is_number, found[:2]))):
            raise of_another(_KIND)
        index, size_then, seed_then = found
        if seed_then != self._shuffle:
            raise InputError(
                f"the run began with shuffle={seed_then!r:.100}, another order than that of shuffle={self._shuffle!r}: "
                "go on with that seed, or give the ledger another name="
            )
        if size_then != size:
            raise InputError(
                f"the dataset had {size_then} items and has {size} now: its shuffled order is another one, and prompts "
                "would be read twice or never; go on with the dataset of the run, or give the ledger another name="
            )
        return int(index)
