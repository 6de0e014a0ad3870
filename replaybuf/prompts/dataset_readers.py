"""Readers of datasets without a state of their own: the items from a position on, and the position after them.

The position is the epoch and the number of its items that were read, with a fingerprint of the last one, by which
another dataset is told; in an indexed dataset also its size, which may change; in a dataset with a state of its own,
that state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
from pydantic import BaseModel

from replaybuf.errors import InputError

#: An upper bound of positions.
FAR = 1 << 62


def wrong_cursor(kind: str) -> InputError:
    """Return the error for a position in the wrong format for this kind of dataset."""
    return InputError(
        f"the cursor of the prompt ledger is not one of {kind}: the run began with another dataset; go on with that "
        "one, or give the ledger another name="
    )


def pack(position: Any) -> bytes:
    """Pack a position of whole numbers into bytes."""
    return bytes(msgpack.packb(position))


def unpack(position: bytes, kind: str) -> Any:
    """Unpack a position. Raises InputError for anything else."""
    try:
        return msgpack.unpackb(position)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise wrong_cursor(kind) from error


def is_number(value: Any) -> bool:
    """Return whether a value is the number of an item or an epoch, or a size."""
    return type(value) is int and 0 <= value < FAR


_GO_ON = "go on with the dataset and the settings of the run, or give the ledger another name="


def beyond(epoch: int, epochs: int) -> InputError:
    """Return the error for a position after the last epoch."""
    return InputError(
        f"the dataset was read as far as epoch {epoch} (from 0), more than with epochs={epochs}: go on with the epochs "
        "of the run, or give the ledger another name="
    )


def fingerprint(item: Any) -> int:
    """Return a number by which an item is known again, from its plain values and arrays; 0 if it has none.

    It is the same in all processes. Of values of other classes only the name of the class counts.
    """
    try:
        packed = msgpack.packb(item, default=_plain, unicode_errors="surrogatepass")
    except (ValueError, TypeError, OverflowError, RecursionError):
        return 0
    return int.from_bytes(blake2b(packed, digest_size=7).digest(), "big")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [value.dtype.str, value.shape, value.tobytes()]
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, BaseModel) or is_dataclass(value):
        return vars(value)
    return type(value).__qualname__


def check_read(item: Any, again: Callable[[], Any], mark: int, epoch: int, index: int) -> None:
    """Raise InputError if the item that the run has read last had another fingerprint; `again()` reads it again."""
    found = fingerprint(item)
    if mark and found and found != mark and fingerprint(again()) == found:  # otherwise it differs whenever it is read
        raise InputError(
            f"item {index} of epoch {epoch} of the dataset (both from 0) is another one than the run has read there: "
            f"this is another dataset, or its order has changed; {_GO_ON}"
        )


_INDEXED = "an indexed dataset"


def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a permutation of `range(size)` that depends only on these numbers.

    It is computed from the raw output of a bit generator, which, unlike numpy's shuffles, is the same in every version
    of numpy, so that a run can continue with another version.
    """
    numbers = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(size)
    return np.argsort(numbers, kind="stable")


class IndexedReader:
    """Reads a dataset with `len` and `[]`; with `shuffle`, every epoch in another order.

    A dataset may grow or lose unread items at its end, in any epoch, unless it is shuffled: another size gives another
    order.
    """

    def __init__(self, dataset: Sequence[Any], epochs: int | None, shuffle: int | None) -> None:
        self._dataset, self._epochs, self._shuffle = dataset, epochs, shuffle
        self._order: tuple[int, int, np.ndarray[Any, np.dtype[np.int64]]] | None = None
        self._last = b""  # the position returned last
        self._is_known = False  # whether an item that others have read was compared

    def read(self, position: bytes, count: int) -> tuple[list[Any], bytes]:
        size = len(self._dataset)
        epoch, index = self._begin(position, size)
        items: list[Any] = []
        while len(items) < count and size and self._epochs != 0:
            if index == size:
                if epoch + 1 == self._epochs:
                    break
                epoch, index = epoch + 1, 0
            items.append(self._item(epoch, index, size))
            index += 1
        if items:
            self._last = pack([epoch, index, size, self._shuffle, fingerprint(items[-1])])
        return items, self._last if items else position

    def _item(self, epoch: int, index: int, size: int) -> Any:
        if self._shuffle is None:
            return self._dataset[index]
        if self._order is None or self._order[:2] != (epoch, size):
            self._order = epoch, size, epoch_order(self._shuffle, epoch, size)
        return self._dataset[int(self._order[2][index])]

    def _begin(self, position: bytes, size: int) -> tuple[int, int]:
        """Return the epoch and the index of the next item. Raises InputError if this dataset can't go on from there."""
        if not position:
            return 0, 0
        found = unpack(position, _INDEXED)
        if not (isinstance(found, list) and len(found) == 5 and all(map(is_number, (*found[:3], found[4])))):
            raise wrong_cursor(_INDEXED)
        epoch, index, size_then, seed, mark = found
        if seed != self._shuffle:
            began = "without shuffle" if seed is None else f"with shuffle={seed!r:.100}"
            raise InputError(f"the run began {began}, in another order than now (shuffle={self._shuffle}): {_GO_ON}")
        if self._epochs is not None and index and epoch >= self._epochs:
            raise beyond(epoch, self._epochs)
        if index > size or (seed is not None and size != size_then):
            raise InputError(
                f"the dataset had {size_then} items and has {size} now, and {index} were read in epoch {epoch} (from "
                f"0): {'it has become shorter' if seed is None else 'its shuffled order is another one'}, and prompts "
                f"would be read twice or never; {_GO_ON}"
            )
        if index and (size != size_then or not (self._is_known or position == self._last)):
            again = partial(self._item, epoch, index - 1, size)
            check_read(again(), again, mark, epoch, index - 1)
            self._is_known = True
        return epoch, index


_ITERATED = "a dataset that is iterated"
_END: Any = object()
_INSTEAD = (
    "give a list, or an object whose iter() begins anew, such as a class with __iter__ that makes the generator or "
    "opens the file"
)

#: An epoch, and the number of an item in it.
_Position = tuple[int, int]


class IterableReader:
    """Iterates a dataset only as far as needed: the next item of a live stream may be hours away.

    Items are kept until the next read, since an iterator yields each only once, and a read is repeated if another
    worker has moved the cursor or the caller was cancelled.
    """

    def __init__(self, dataset: Iterable[Any], epochs: int | None) -> None:
        self._dataset, self._epochs = dataset, epochs
        self._once = hasattr(dataset, "__next__") and iter(dataset) is dataset
        self._items: Iterator[Any] | None = None
        self._error: BaseException | None = None  # the error that ended an iterator
        self._at: _Position = (0, 0)  # the position of the next item
        self._is_at_end = False
        self._since: _Position | None = None  # all items from here to `_at` are kept; None: begin anew
        self._kept: deque[tuple[_Position, Any]] = deque()

    def read(self, position: bytes, count: int) -> tuple[list[Any], bytes]:
        self._go_to(*self._unpack(position))
        while len(self._kept) < count and self._read_one():
            pass
        found = list(islice(self._kept, count))
        if not found:
            return [], position
        (epoch, index), last = found[-1]
        return [item for _, item in found], pack({"epoch": epoch, "index": index + 1, "mark": fingerprint(last)})

    def _unpack(self, position: bytes) -> tuple[_Position, int]:
        found = unpack(position, _ITERATED) if position else dict.fromkeys(("epoch", "index", "mark"), 0)
        if not isinstance(found, dict) or found.keys() != {"epoch", "index", "mark"}:
            raise wrong_cursor(_ITERATED)
        if not all(map(is_number, found.values())):
            raise wrong_cursor(_ITERATED)
        return (found["epoch"], found["index"]), found["mark"]

    def _go_to(self, position: _Position, mark: int) -> None:
        if self._epochs is not None and (self._epochs, 0) < position:
            raise beyond(position[0], self._epochs)
        if self._since is None or position < self._since:
            self._begin(position[0])
            self._kept.clear()
        self._since = position
        while self._kept and self._kept[0][0] < position:
            self._kept.popleft()
        if self._at[0] < position[0]:
            self._begin(position[0])
        if self._at < position:
            item = self._skip_to(position)
            check_read(
                item, lambda: item if self._once else self._skip_to(position), mark, position[0], position[1] - 1
            )

    def _skip_to(self, position: _Position) -> Any:
        """Return the last item before a position of this epoch, which begins again if that was read."""
        if self._at == position:
            self._begin(position[0])
        item: Any = None
        while self._at < position:
            item = self._next()
            if item is _END:
                raise InputError(
                    f"{position[1]} items of epoch {position[0]} of the dataset were drawn so far, but it has only "
                    f"{self._at[1]}: it has become shorter; {_GO_ON}"
                )
        return item

    def _read_one(self) -> bool:
        """Read one more item. Return False at the end of the last epoch."""
        while self._epochs is None or self._at[0] < self._epochs:
            position = self._at
            item = self._next()
            if item is not _END:
                self._kept.append((position, item))
                return True
            try:
                if not self._begin_next(*self._at):
                    return False
            except InputError:
                if self._kept:
                    return False  # return the items before the error first; the next call raises
                raise
        return False

    def _begin_next(self, epoch: int, size: int) -> bool:
        """Begin the epoch after one that had `size` items. Return False if there is none."""
        if epoch and not size:
            raise InputError(
                f"the dataset gave no item when it was iterated for epoch {epoch} (from 0), as if it could be iterated "
                f"only once: {_INSTEAD}"
            )
        if not size or epoch + 1 == self._epochs:
            return False
        self._begin(epoch + 1)
        return True

    def _begin(self, epoch: int) -> None:
        """Iterate from the start of an epoch; an iterator has only one."""
        if self._once and (epoch or self._items is not None):
            raise self._only_once(epoch)
        if (set_epoch := getattr(self._dataset, "set_epoch", None)) is not None:
            set_epoch(epoch)
        items = iter(self._dataset)
        if items is self._items:
            self._once = True
            raise self._only_once(epoch)
        self._items, self._at, self._is_at_end = items, (epoch, 0), False

    def _next(self) -> Any:
        """Return the next item of the epoch, or _END."""
        if self._error is not None:
            raise InputError(
                f"this {type(self._dataset).__name__} raised an error, and can't be iterated further: "
                f"{self._error!r:.300}; begin again with a new one, or {_INSTEAD}"
            ) from self._error
        if self._is_at_end or self._items is None:
            return _END
        try:
            item = next(self._items, _END)
        except BaseException as error:
            # After an error a generator raises StopIteration, which would end the epoch too early.
            if self._once:
                self._error = error
            else:
                self._since = None
            raise
        if item is _END:
            self._is_at_end = True
        else:
            self._at = (self._at[0], self._at[1] + 1)
        return item

    def _only_once(self, epoch: int) -> InputError:
        if self._items is not None and epoch == self._at[0]:
            why = "the cursor has gone back behind what it has given (as after a restore)"
        else:
            why = f"epoch {epoch} (from 0) would be its second round"
        return InputError(f"this {type(self._dataset).__name__} can be iterated only once, but {why}: {_INSTEAD}")
