"""Datasets as a prompt ledger reads them, of whatever kind; of those that have a state, that state is the position."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from replaybuf.checks import whole
from replaybuf.codec.payload import Codec
from replaybuf.errors import DecodeError, EncodeError, InputError
from replaybuf.prompts.dataset_readers import IndexedReader, IterableReader, wrong_cursor
from replaybuf.rollouts.rollout_type import RolloutType

_TENSOR = "__torch_tensor__"


def _replaced(state: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a state with other values in place of those, at any depth, for which `replace` gives one."""
    if (other := replace(state)) is not state:
        return other
    if isinstance(state, dict):
        return {name: _replaced(value, replace) for name, value in state.items()}
    return type(state)(_replaced(value, replace) for value in state) if type(state) in (list, tuple) else state


def _as_array(value: Any) -> Any:
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    return {_TENSOR: value.detach().cpu().numpy()} if is_tensor else value


def _as_tensor(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_TENSOR}:
        return importlib.import_module("torch").from_numpy(value[_TENSOR].copy())
    return value


_CODEC = Codec(RolloutType(dict))


@runtime_checkable
class StatefulDataset(Protocol):
    """A dataset or data loader that gives its state, and can go on from it."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


def loses_shuffle_buffer(dataset: Any) -> bool:
    """Return whether the state of a streaming Hugging Face dataset lacks the content of its shuffle buffer.

    Loading such a state would skip those items, and give others twice. Iterated from its start the dataset gives the
    same order again, if it was shuffled with a seed.
    """
    steps = [getattr(dataset, "_ex_iterable", None)]
    while steps:
        step = steps.pop()
        if type(step).__name__ == "BufferShuffledExamplesIterable":
            return True
        steps += filter(None, (getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())))
    return False


class StatefulReader:
    """Follows the store's cursor: if others have moved it, the dataset is first set to that state."""

    def __init__(self, dataset: StatefulDataset, epochs: int | None) -> None:
        self._dataset, self._epochs = dataset, epochs
        self._epoch = 0
        self._first = self._state()
        self._position: bytes | None = b""  # of a cursor that was never moved
        self._items: Iterator[Any] | None = None
        self._ahead: list[Any] = []  # the next item, already read

    def read(self, position: bytes, count: int) -> tuple[list[Any], bytes]:
        if position != self._position:
            self._go_to(position)
        self._position = None  # unknown, until this has succeeded
        found: list[Any] = []
        empty = 0
        while len(found) < count and empty < 2 and not self._is_over():
            items = self._take(count - len(found))
            found += items
            if len(found) < count:
                empty = 0 if items else empty + 1
                self._begin_epoch(rewind=bool(empty))
        self._position = self._state()
        if not self._is_over() and not empty:
            self._read_ahead()
        return found, self._position

    def _is_over(self) -> bool:
        return self._epochs is not None and self._epoch >= self._epochs

    def _take(self, count: int) -> list[Any]:
        self._items = iter(self._dataset) if self._items is None else self._items
        ahead, self._ahead = self._ahead, []
        return ahead + list(islice(self._items, count - len(ahead)))

    def _read_ahead(self) -> None:
        """Move to the next epoch if this one has no more items: some datasets can't tell its end from that position."""
        self._ahead = self._take(1)
        if not self._ahead:
            self._begin_epoch(rewind=False)
            self._position = self._state()

    def _begin_epoch(self, *, rewind: bool) -> None:
        """Begin another epoch; some datasets begin anew by themselves, and shuffle anew.

        Their state is loaded, as it will be by a process that goes on from here: some begin differently then.
        """
        self._items = None
        if not rewind:
            self._epoch += 1
            rewind = self._set_epoch()
        self._load(self._first if rewind else self._state())

    def _go_to(self, position: bytes) -> None:
        self._items, self._ahead = None, []
        self._epoch = self._load(position or self._first)
        if self._set_epoch():
            self._load(position or self._first)

    def _set_epoch(self) -> bool:
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._epoch)
        return set_epoch is not None

    def _state(self) -> bytes:
        try:
            return _CODEC.encode([{"epoch": self._epoch, "state": _replaced(self._dataset.state_dict(), _as_array)}])
        except EncodeError as error:
            raise InputError(
                f"the dataset's state_dict() has to consist of plain values and arrays ({error})"
            ) from error

    def _load(self, position: bytes) -> int:
        """Set the dataset to a state. Return the number of its epoch."""
        try:
            [record] = _CODEC.decode(position)
            epoch, state = int(record["epoch"]), _replaced(record["state"], _as_tensor)
        except (DecodeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{wrong_cursor('a dataset with state_dict()')} ({error})") from error
        self._dataset.load_state_dict(state)
        return epoch


class PromptDataset:
    """A dataset, read `epochs` times (None: for ever), by one thread at a time.

    It may have `state_dict`, `load_state_dict` and `iter`, which are preferred (unless it is to be shuffled); or `len`
    and `[]`; or it is any other iterable, with the same items in the same order on every iteration: another process
    that goes on iterates it from its start, and skips. Iterators, such as generators and files, can be read for one
    epoch only, and can't go back. A dataset that isn't indexed and has `set_epoch` gets the epoch's number by it, from
    0.

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
        self._reader: StatefulReader | IndexedReader | IterableReader
        if isinstance(dataset, (str, bytes, bytearray, memoryview, Mapping)):
            what = "choose one of its values" if isinstance(dataset, Mapping) else "give a list of prompts"
            raise InputError(f"expected a dataset of prompts, got {type(dataset).__name__}: {what}")
        is_indexed = _is_indexed(dataset)
        if (
            isinstance(dataset, StatefulDataset)
            and not (is_indexed and seed is not None)
            and not loses_shuffle_buffer(dataset)
        ):
            self._reader = StatefulReader(dataset, epochs)
        elif is_indexed:
            self._reader = IndexedReader(dataset, epochs, seed)
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
        return False  # their [] raises NotImplementedError
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
