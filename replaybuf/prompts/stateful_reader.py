"""Reads a dataset that can save its state and resume from it: the position is that state, with the epoch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from replaybuf.codec.payload import Codec
from replaybuf.errors import DecodeError, InputError, RolloutError
from replaybuf.prompts.dataset_readers import wrong_cursor
from replaybuf.rollouts.rollout_type import RolloutType

_TENSOR = "__torch_tensor__"


def _replaced(state: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a state with the values for which `replace` returns one, at any depth, replaced."""
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
    """A dataset or data loader that can save its state and resume from it."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


def loses_shuffle_buffer(dataset: Any) -> bool:
    """Return whether the state of a streaming Hugging Face dataset lacks the content of its shuffle buffer.

    Loading such a state would skip those items, and repeat others. Iterated from its start, the dataset has the same
    order again, if it was shuffled with a seed.
    """
    steps = [getattr(dataset, "_ex_iterable", None)]
    while steps:
        step = steps.pop()
        if type(step).__name__ == "BufferShuffledExamplesIterable":
            return True
        steps += filter(None, (getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())))
    return False


class StatefulReader:
    """Follows the store's cursor: if another worker has moved it, the dataset first loads that state."""

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
        self._position = None  # unknown, until the read has succeeded
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
        """Begin the next epoch if this one has no more items: some datasets can't resume at the end of an epoch."""
        self._ahead = self._take(1)
        if not self._ahead:
            self._begin_epoch(rewind=False)
            self._position = self._state()

    def _begin_epoch(self, *, rewind: bool) -> None:
        """Begin another epoch; some datasets rewind, and reshuffle, by themselves.

        Their state is loaded again, as by a process that resumes here, since some datasets then begin differently.
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
        except RolloutError as error:
            raise InputError(f"the dataset's state_dict() must consist of plain values and arrays ({error})") from error

    def _load(self, position: bytes) -> int:
        """Set the dataset to a state. Return the number of its epoch."""
        try:
            [record] = _CODEC.decode(position)
            epoch, state = int(record["epoch"]), _replaced(record["state"], _as_tensor)
        except (DecodeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{wrong_cursor('a dataset with state_dict()')} ({error})") from error
        self._dataset.load_state_dict(state)
        return epoch
