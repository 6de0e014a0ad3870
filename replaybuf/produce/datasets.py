"""Any dataset of prompts, read from a position on: the items, and the position after them.

The position is the epoch and the number of its items that were read, with a fingerprint of the last one, by which
another dataset is recognised; in an indexed dataset also its size, which may change; in a dataset with a state of its
own also the state in which the epoch began.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgpack  # type: ignore[import-untyped]
import numpy as np
from pydantic import BaseModel

from replaybuf.common.checks import whole
from replaybuf.errors import InputError, RolloutError
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout_type import RolloutType

_GO_ON = "go on with the dataset and the settings of the run, or give the ledger another name="
_INSTEAD = (
    "give a list, or an object whose iter() begins anew, such as a class with __iter__ that makes the generator or "
    "opens the file"
)


class _Place(NamedTuple):
    """A position in a dataset: the next item is number `item` of `epoch`.

    `size` is that of an indexed dataset and `seed` that of its order; `start` is the state, encoded, in which a dataset
    with a state of its own began the epoch; None in others. `mark` is the fingerprint of the item read last.
    """

    epoch: int
    item: int
    size: int | None
    seed: int | None
    mark: int
    start: bytes | None

    @classmethod
    def of(cls, position: bytes, *, indexed: bool = False, stateful: bool = False) -> _Place:
        """Unpack a position. Raises InputError for one of another kind of dataset."""
        try:
            place = cls(*msgpack.unpackb(position))
            numbers = (place.epoch, place.item, place.mark, place.size if indexed else 0)
            is_of_this_kind = (place.size is not None, type(place.start) is bytes) == (indexed, stateful)
            if is_of_this_kind and all(type(one) is int and 0 <= one < FAR for one in numbers):
                return place
        except (ValueError, TypeError, msgpack.UnpackException):
            pass
        kind = "a dataset with state_dict()" if stateful else "a dataset that is iterated"
        raise InputError(
            f"the cursor of the prompt ledger is not one of {'an indexed dataset' if indexed else kind}: the run began "
            "with another dataset; go on with that one, or give the ledger another name="
        )

    def packed(self) -> bytes:
        return bytes(msgpack.packb(self))


#: An upper bound of positions.
FAR = 1 << 62


def _beyond(epoch: int, epochs: int) -> InputError:
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


def _check_read(item: Any, again: Callable[[], Any], mark: int, epoch: int, index: int) -> None:
    """Raise InputError if the item that the run has read last had another fingerprint; `again()` reads it again."""
    found = fingerprint(item)
    if mark and found and found != mark and fingerprint(again()) == found:  # otherwise it differs whenever it is read
        raise InputError(
            f"item {index} of epoch {epoch} of the dataset (both from 0) is another one than the run has read there: "
            f"this is another dataset, or its order has changed; {_GO_ON}"
        )


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
            self._last = _Place(epoch, index, size, self._shuffle, fingerprint(items[-1]), None).packed()
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
        epoch, index, size_then, seed, mark, _ = _Place.of(position, indexed=True)
        if seed != self._shuffle:
            began = "without shuffle" if seed is None else f"with shuffle={seed!r:.100}"
            raise InputError(f"the run began {began}, in another order than now (shuffle={self._shuffle}): {_GO_ON}")
        if self._epochs is not None and index and epoch >= self._epochs:
            raise _beyond(epoch, self._epochs)
        if index > size or (seed is not None and size != size_then):
            raise InputError(
                f"the dataset had {size_then} items and has {size} now, and {index} were read in epoch {epoch} (from "
                f"0): {'it has become shorter' if seed is None else 'its shuffled order is another one'}, and prompts "
                f"would be read twice or never; {_GO_ON}"
            )
        if index and (size != size_then or not (self._is_known or position == self._last)):
            again = partial(self._item, epoch, index - 1, size)
            _check_read(again(), again, mark, epoch, index - 1)
            self._is_known = True
        return epoch, index


_END: Any = object()

#: An epoch, and the number of an item in it.
_Position = tuple[int, int]


_CODEC = Codec(RolloutType(dict))


@runtime_checkable
class StatefulDataset(Protocol):
    """A dataset or data loader that can save its state and resume from it."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


class IterableReader:
    """Iterates a dataset only as far as needed: the next item of a live stream may be hours away.

    Items are kept until the next read, which is repeated if another worker has moved the cursor or the caller was
    cancelled. A dataset with a state of its own begins an epoch in the state in which the first worker began it; the
    state within an epoch isn't relied on, since that of shuffled streams lacks the items in their buffers.
    """

    def __init__(self, dataset: Iterable[Any], epochs: int | None) -> None:
        self._dataset, self._epochs = dataset, epochs
        self._items: Iterator[Any] = iter(())
        self._at: _Position = (0, 0)  # the position of the next item
        self._since: _Position | None = None  # all items from here to `_at` are kept; None: begin anew
        self._kept: deque[tuple[_Position, Any]] = deque()
        self._first = self._state()
        self._starts: dict[int, bytes | None] = {}  # the states in which epochs began, by epoch

    def read(self, position: bytes, count: int) -> tuple[list[Any], bytes]:
        place = (
            _Place.of(position, stateful=self._first is not None)
            if position
            else _Place(0, 0, None, None, 0, self._first)
        )
        self._go_to(place)
        while len(self._kept) < count and self._read_one():
            pass
        found = list(islice(self._kept, count))
        if not found:
            return [], position
        (epoch, index), last = found[-1]
        after = _Place(epoch, index + 1, None, None, fingerprint(last), self._starts[epoch])
        return [item for _, item in found], after.packed()

    def _go_to(self, place: _Place) -> None:
        position = (place.epoch, place.item)
        if self._epochs is not None and (self._epochs, 0) < position:
            raise _beyond(place.epoch, self._epochs)
        began_otherwise = self._starts.get(place.epoch, place.start) != place.start
        if self._since is None or position < self._since or began_otherwise:
            self._begin(place.epoch, place.start)
            self._kept.clear()
        self._since = position
        while self._kept and self._kept[0][0] < position:
            self._kept.popleft()
        if self._at[0] < place.epoch:
            self._begin(place.epoch, place.start)
        if self._at < position:
            again = partial(self._skip_to, position)
            _check_read(again(), again, place.mark, place.epoch, place.item - 1)

    def _skip_to(self, position: _Position) -> Any:
        """Return the last item before a position of this epoch, which begins again if that was read."""
        if self._at == position:
            self._begin(position[0], self._starts[position[0]])
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
            epoch, index = self._at
            item = self._next()
            if item is not _END:
                self._kept.append(((epoch, index), item))
                return True
            if epoch and not index:
                if self._starts[epoch] != self._first:
                    self._begin(epoch, self._first)  # some datasets can't begin again in the state at their end
                    continue
                if self._kept:
                    return False  # the items before the error come first; the next read raises
                raise InputError(
                    f"the dataset gave no item when it was iterated for epoch {epoch} (from 0), as if it could be "
                    f"iterated only once: {_INSTEAD}"
                )
            if not index or epoch + 1 == self._epochs:
                return False
            self._begin(epoch + 1, self._state())
        return False

    def _begin(self, epoch: int, start: bytes | None) -> None:
        """Iterate from the start of an epoch, with the dataset in this state, or the first one if told the epoch."""
        if (set_epoch := getattr(self._dataset, "set_epoch", None)) is not None:
            set_epoch(epoch)
            start = self._first
        if start is not None:
            self._load(start)
        self._starts = {number: one for number, one in self._starts.items() if number == epoch - 1} | {epoch: start}
        self._items, self._at = iter(self._dataset), (epoch, 0)

    def _next(self) -> Any:
        """Return the next item of the epoch, or _END."""
        try:
            item = next(self._items, _END)
        except BaseException:  # a generator is then at its end, which isn't that of the epoch
            self._since = None
            raise
        if item is not _END:
            self._at = (self._at[0], self._at[1] + 1)
        return item

    def _state(self) -> bytes | None:
        """Return the state of a dataset that has one, encoded."""
        if not isinstance(self._dataset, StatefulDataset):
            return None
        try:
            return _CODEC.encode([{"state": self._dataset.state_dict()}])
        except RolloutError as error:
            raise InputError(f"the dataset's state_dict() must consist of plain values and arrays ({error})") from error

    def _load(self, start: bytes) -> None:
        [record] = _CODEC.decode(start)
        self._dataset.load_state_dict(record["state"])  # type: ignore[attr-defined]


class PromptDataset:
    """A dataset, read `epochs` times (None: for ever), by one thread at a time.

    The dataset may have `state_dict`, `load_state_dict` and `iter`, which are preferred (unless it is to be shuffled);
    or `len` and `[]`; or it is any other iterable. A process that resumes iterates the epoch from its start, and skips:
    an iteration has the same items in the same order as the one before, or as the one in the same state. Iterators,
    such as generators and files, are refused: they can't go back. `set_epoch` of a dataset that isn't indexed is called
    with the epoch, from 0.

    `shuffle`, a seed, reads an indexed dataset in another order every epoch, which depends only on the seed, the epoch
    and the size of the dataset. Raises InputError for datasets that can't be read, or not be shuffled.
    """

    def __init__(self, dataset: Any, epochs: int | None, shuffle: int | None = None) -> None:
        self._lock = threading.Lock()
        seed = whole(shuffle)
        if shuffle is not None and (seed is None or not 0 <= seed < 1 << 64):
            raise InputError(
                f"shuffle must be a seed, a whole number from 0 to 2**64 - 1, or None, got {shuffle!r:.100}"
            )
        self._reader: IndexedReader | IterableReader
        if isinstance(dataset, (str, bytes, bytearray, memoryview, Mapping)):
            what = "choose one of its values" if isinstance(dataset, Mapping) else "give a list of prompts"
            raise InputError(f"expected a dataset of prompts, got {type(dataset).__name__}: {what}")
        is_indexed = _is_indexed(dataset)
        if is_indexed and (seed is not None or not isinstance(dataset, StatefulDataset)):
            self._reader = IndexedReader(dataset, epochs, seed)
        elif hasattr(dataset, "__next__") and iter(dataset) is dataset:
            raise InputError(f"this {type(dataset).__name__} can be iterated only once: {_INSTEAD}")
        elif hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__"):
            self._reader = IterableReader(dataset, epochs)
        else:
            raise InputError(
                f"expected a dataset of prompts, got {type(dataset).__name__}: it needs len() and [], or iter(), or "
                "state_dict(), load_state_dict() and iter()"
            )
        if seed is not None and not isinstance(self._reader, IndexedReader):
            raise InputError(
                f"shuffle needs a dataset with len() and [], got {type(dataset).__name__}: shuffle the dataset "
                "itself (the same way in every process), or give list(dataset)"
            )

    def read(self, position: bytes, count: int) -> tuple[list[Any], bytes]:
        """Return up to `count` items from a position on, and the position after them; blocks. Fewer only at the end.

        Raises InputError if the dataset can't go on from this position: it is a position of another dataset, or the
        dataset has become shorter, or it is an iterator that is already past it.
        """
        with self._lock:
            return self._reader.read(position, count)


def _is_indexed(dataset: Any) -> bool:
    torch = sys.modules.get("torch.utils.data")
    if torch is not None and isinstance(dataset, torch.IterableDataset):
        return False  # torch's iterable datasets, whose [] raises NotImplementedError
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
