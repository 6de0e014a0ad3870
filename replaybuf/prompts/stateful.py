"""Datasets and data loaders with a state, which is the place."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from replaybuf.codec.payload import Codec
from replaybuf.errors import DecodeError, EncodeError, InputError
from replaybuf.prompts.place import START, of_another
from replaybuf.prompts.tensors import with_arrays, with_tensors
from replaybuf.rollouts.rollout_type import RolloutType

_CODEC = Codec(RolloutType(dict))


@runtime_checkable
class Stateful(Protocol):
    """A dataset or data loader that gives its state, and can go on from it."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


def forgets(dataset: Any) -> bool:
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

    def __init__(self, dataset: Stateful, epochs: int | None) -> None:
        self._dataset, self._epochs = dataset, epochs
        self._epoch = 0
        self._first = self._state()
        self._place: bytes | None = START
        self._items: Iterator[Any] | None = None
        self._ahead: list[Any] = []  # the next item, already read

    def read(self, place: bytes, count: int) -> tuple[list[Any], bytes]:
        if place != self._place:
            self._go_to(place)
        self._place = None  # unknown, until this has succeeded
        found: list[Any] = []
        empty = 0
        while len(found) < count and empty < 2 and not self._is_over():
            items = self._take(count - len(found))
            found += items
            if len(found) < count:
                empty = 0 if items else empty + 1
                self._begin_epoch(rewind=bool(empty))
        self._place = self._state()
        if not self._is_over() and not empty:
            self._look_ahead()
        return found, self._place

    def _is_over(self) -> bool:
        return self._epochs is not None and self._epoch >= self._epochs

    def _take(self, count: int) -> list[Any]:
        self._items = iter(self._dataset) if self._items is None else self._items
        ahead, self._ahead = self._ahead, []
        return ahead + list(islice(self._items, count - len(ahead)))

    def _look_ahead(self) -> None:
        """Move to the next epoch if this one has no more items: some datasets can't tell its end from that place."""
        self._ahead = self._take(1)
        if not self._ahead:
            self._begin_epoch(rewind=False)
            self._place = self._state()

    def _begin_epoch(self, *, rewind: bool) -> None:
        """Begin another epoch; some datasets begin anew by themselves, and shuffle anew.

        Their state is loaded, as it will be by a process that goes on from here: some begin differently then.
        """
        self._items = None
        if not rewind:
            self._epoch += 1
            rewind = self._tell_epoch()
        self._load(self._first if rewind else self._state())

    def _go_to(self, place: bytes) -> None:
        self._items, self._ahead = None, []
        self._epoch = self._load(place or self._first)
        if self._tell_epoch():
            self._load(place or self._first)

    def _tell_epoch(self) -> bool:
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._epoch)
        return set_epoch is not None

    def _state(self) -> bytes:
        try:
            return _CODEC.encode([{"epoch": self._epoch, "state": with_arrays(self._dataset.state_dict())}])
        except EncodeError as error:
            raise InputError(
                f"the dataset's state_dict() has to consist of plain values and arrays ({error})"
            ) from error

    def _load(self, place: bytes) -> int:
        """Set the dataset to a state. Return the number of its epoch."""
        try:
            [record] = _CODEC.decode(place)
            epoch, state = int(record["epoch"]), with_tensors(record["state"])
        except (DecodeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{of_another('a dataset with state_dict()')} ({error})") from error
        self._dataset.load_state_dict(state)
        return epoch
