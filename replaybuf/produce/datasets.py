"""Datasets of prompts: their order, shuffled or not, reading on from a position, and refusing one that has changed.

The position is the epoch and the number of its items that were read, with a fingerprint of the last one, by which
another dataset is recognised; in an indexed dataset also its size, which may change, and the seed of its order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]
import numpy as np
from pydantic import BaseModel

from replaybuf.common.checks import shown, whole
from replaybuf.common.forks import ProcessLock
from replaybuf.errors import InputError

_GO_ON = "go on with the dataset and the settings of the run, or give the ledger another name="

_END: Any = object()
_Seed = int | list[int] | None


class _Place(NamedTuple):
    """A position in a dataset: the next item is number `item` of `epoch`.

    `size` is that of an indexed dataset and `seed` that of its order, in a list if it is one by difficulty; None in
    others. `mark` is the fingerprint of the item read last.
    """

    epoch: int
    item: int
    size: int | None
    seed: _Seed
    mark: int

    @classmethod
    def of(cls, position: bytes, *, indexed: bool) -> _Place:
        """Unpack a position. Raises InputError for one of another kind of dataset."""
        try:
            place = cls(*msgpack.unpackb(position))
            if (place.size is not None) == indexed:
                return place
        except (ValueError, TypeError, msgpack.UnpackException):
            pass
        raise InputError(
            f"the cursor of the prompt ledger is not one of a dataset that is {'indexed' if indexed else 'iterated'}: "
            "the run began with another dataset; go on with that one, or give the ledger another name="
        )


def fingerprint(item: Any) -> int:
    """Return a number by which an item is known again, from its plain values and arrays; 0 if it has none.

    It is the same in all processes. Of values of other classes only the name of the class counts.
    """
    try:
        packed = msgpack.packb(item, default=_as_packable, unicode_errors="surrogatepass")
    except (ValueError, TypeError, OverflowError, RecursionError):
        return 0
    return int.from_bytes(blake2b(packed, digest_size=7).digest(), "big")


def _as_packable(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [value.dtype.str, value.shape, value.tobytes()]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    return vars(value) if isinstance(value, BaseModel) or is_dataclass(value) else type(value).__qualname__


def random_numbers(seed: int, epoch: int, size: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a random number for each item of an epoch, which depends only on these arguments.

    It is the raw output of a bit generator, which, unlike numpy's shuffles, is the same in every version of numpy, so
    that a run can continue with another version.
    """
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(size)


def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a permutation of `range(size)`: the items by their `random_numbers`."""
    return np.argsort(random_numbers(seed, epoch, size), kind="stable")


class IndexedSource:
    """A dataset with `len` and `[]`; with a seed, every epoch in another order.

    With a seed in a list any item may come next, and its index is its place.
    """

    def __init__(self, dataset: Sequence[Any], seed: _Seed) -> None:
        self._dataset, self.seed = dataset, seed
        self._order: tuple[int, int, np.ndarray[Any, np.dtype[np.int64]]] | None = None

    @property
    def size(self) -> int | None:
        return len(self._dataset)

    def item(self, epoch: int, index: int) -> Any:
        """Return an item of an epoch, or _END after the last one."""
        size = len(self._dataset)
        if index >= size:
            return _END
        if self.seed is None or isinstance(self.seed, list):
            return self._dataset[index]
        if self._order is None or self._order[:2] != (epoch, size):
            self._order = epoch, size, epoch_order(self.seed, epoch, size)
        return self._dataset[int(self._order[2][index])]

    def again(self, epoch: int, index: int) -> Any:
        """Return an item that was read before, read again."""
        return self.item(epoch, index)

    def forget(self, epoch: int, index: int) -> None:
        """Release the items before this one."""


class _IteratedSource:
    """A dataset that is iterated, only as far as needed: the next item of a live stream may be hours away.

    Items are kept until the next read, which is repeated if another worker has moved the cursor or the caller was
    cancelled.
    """

    size = seed = None

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset
        self._items: Iterator[Any] = iter(())
        self._next_place: tuple[int, int] | None = None  # the epoch and the number of the next item; None: begin anew
        self._kept_items: dict[tuple[int, int], Any] = {}

    def item(self, epoch: int, index: int) -> Any:
        """Return an item of an epoch, or _END after the last one; those before it are skipped."""
        if (epoch, index) in self._kept_items:
            return self._kept_items[epoch, index]
        if self._next_place is None or self._next_place[0] != epoch or self._next_place > (epoch, index):
            self._begin(epoch)
        item: Any = None
        for at in range(self._next_place[1] if self._next_place else 0, index + 1):
            if (item := self._next_item()) is _END:
                return _END
            self._next_place = (epoch, at + 1)
        self._kept_items[epoch, index] = item
        return item

    def again(self, epoch: int, index: int) -> Any:
        """Return an item that was read before, read again."""
        self._kept_items.clear()
        self._next_place = None
        return self.item(epoch, index)

    def forget(self, epoch: int, index: int) -> None:
        """Release the items before this one."""
        self._kept_items = {place: item for place, item in self._kept_items.items() if place >= (epoch, index)}

    def _begin(self, epoch: int) -> None:
        """Iterate from the start of an epoch."""
        if (set_epoch := getattr(self._dataset, "set_epoch", None)) is not None:
            set_epoch(epoch)
        self._items, self._next_place = iter(self._dataset), (epoch, 0)

    def _next_item(self) -> Any:
        try:
            return next(self._items, _END)
        except BaseException:  # a generator is then at its end, which isn't that of the epoch
            self._next_place = None
            raise


class PromptDataset:
    """A dataset, read `epochs` times (None: for ever), by one thread at a time.

    The dataset has `len` and `[]`, or is any other iterable, whose `set_epoch`, if it has one, is called with each
    epoch, from 0. A process that resumes iterates the epoch from its start, and skips: an iteration has the same items
    in the same order as the one before. Iterators, such as generators and files, are refused: they can't go back.

    `shuffle`, a seed, reads an indexed dataset in another order every epoch, which depends only on the seed, the epoch
    and the size of the dataset. Unless it is shuffled, an indexed dataset may grow or lose unread items at its end.
    Raises InputError for datasets that can't be read, or not be shuffled.
    """

    #: Why there is no next item, if there is none.
    why_none = "no prompt is left in the dataset"

    def __init__(self, dataset: Any, epochs: int | None, shuffle: int | None = None) -> None:
        self._lock = ProcessLock()
        self._epochs = epochs
        self._source = _source_of(dataset, seed_of(shuffle))
        self._last = b""  # the position returned last
        self._is_compared = False  # whether an item that others have read was compared

    def read(self, position: bytes, count: int) -> tuple[list[Any], bytes]:
        """Return up to `count` items from a position on, and the position after them; blocks. Fewer only at the end.

        Raises InputError if the dataset can't go on from this position: it is a position of another dataset, or the
        dataset has become shorter.
        """
        with self._lock:
            source, items = self._source, list[Any]()
            epoch, index = self._begin(position)
            while len(items) < count and (self._epochs is None or epoch < self._epochs):
                item = source.item(epoch, index)
                if item is not _END:
                    items.append(item)
                    index += 1
                elif index and epoch + 1 != self._epochs:
                    epoch, index = epoch + 1, 0
                else:
                    break
            if not items:
                return [], position
            return items, self._position_after(epoch, index, items[-1])

    def _position_after(self, epoch: int, index: int, item: Any) -> bytes:
        """Return the position after an item, the one before `index`."""
        self._last = bytes(msgpack.packb(_Place(epoch, index, self._source.size, self._source.seed, fingerprint(item))))
        return self._last

    def _begin(self, position: bytes) -> tuple[int, int]:
        """Return the epoch and the index of the next item. Raises InputError if this dataset can't go on from there."""
        source = self._source
        if not position:
            source.forget(0, 0)
            return 0, 0
        epoch, index, size_then, seed, mark = _Place.of(position, indexed=source.size is not None)
        if seed != source.seed:
            old_order, new_order = _order_text(seed), _order_text(source.seed)
            raise InputError(f"the run began {old_order}, in another order than now ({new_order}): {_GO_ON}")
        if seed is not None and source.size != size_then:
            reason = "its shuffled order is another one, and prompts would be read twice or never"
            problem = "with order= it must keep its size" if isinstance(seed, list) else reason
            raise InputError(f"the dataset had {size_then} items and has {source.size} now: {problem}; {_GO_ON}")
        if index and (source.size != size_then or not (self._is_compared or position == self._last)):
            self._compare(epoch, index - 1, mark)
        source.forget(epoch, index)
        return epoch, index

    def _compare(self, epoch: int, index: int, mark: int) -> None:
        """Raise InputError if the item that the run has read last isn't there, or had another fingerprint."""
        item = self._source.item(epoch, index)
        if item is _END:
            raise InputError(
                f"{index + 1} items of epoch {epoch} of the dataset were drawn so far, but it has fewer: it has become "
                f"shorter; {_GO_ON}"
            )
        fresh_mark = fingerprint(item)
        # An item that differs whenever it is read tells nothing.
        if mark and fresh_mark and fresh_mark != mark and fingerprint(self._source.again(epoch, index)) == fresh_mark:
            raise InputError(
                f"item {index} of epoch {epoch} of the dataset (both from 0) is another one than the run has read "
                f"there: this is another dataset, or its order has changed; {_GO_ON}"
            )
        self._is_compared = True


def _order_text(seed: _Seed) -> str:
    """Return the order of a dataset with this seed in words."""
    if isinstance(seed, list):
        return f"with order= and shuffle={str(seed)[1:-1]:.100}"
    return "without shuffle" if seed is None else f"with shuffle={shown(seed)}"


def seed_of(shuffle: Any) -> int | None:
    """Return the seed of a shuffle. Raises InputError."""
    seed = whole(shuffle)
    if shuffle is not None and (seed is None or not 0 <= seed < 1 << 64):
        raise InputError(f"shuffle must be a seed, a whole number from 0 to 2**64 - 1, or None, got {shown(shuffle)}")
    return seed


def _source_of(dataset: Any, seed: int | None) -> IndexedSource | _IteratedSource:
    if isinstance(dataset, (str, bytes, Mapping)) or not (is_indexed(dataset) or hasattr(dataset, "__iter__")):
        raise InputError(
            f"expected a dataset of prompts, got {type(dataset).__name__}: give a list, JSONLines(path), a split of a "
            "dataset, or another object with len() and [], or with iter()"
        )
    if is_indexed(dataset):
        return IndexedSource(dataset, seed)
    if hasattr(dataset, "__next__") and iter(dataset) is dataset:
        raise InputError(
            f"this {type(dataset).__name__} can be iterated only once: give a list, or an object whose iter() begins "
            "anew, such as a class with __iter__ that makes the generator or opens the file"
        )
    if seed is not None:
        raise InputError(
            f"shuffle needs a dataset with len() and [], got {type(dataset).__name__}: shuffle the dataset "
            "itself (the same way in every process), or give list(dataset)"
        )
    return _IteratedSource(dataset)


def is_indexed(dataset: Any) -> bool:
    """Return whether a dataset has `len` and `[]`."""
    torch = sys.modules.get("torch.utils.data")
    if torch is not None and isinstance(dataset, torch.IterableDataset):
        return False  # torch's iterable datasets, whose [] raises NotImplementedError
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
