"""Any other iterable: the place is the epoch, and the number of its items that were read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from replaybuf.errors import InputError
from replaybuf.prompts.place import is_number, of_another, pack, unpack

_KIND = "a dataset that is iterated"
_END: Any = object()
_INSTEAD = (
    "give a list, or an object whose iter() begins anew, such as a class with __iter__ that makes the generator or "
    "opens the file"
)

#: An epoch, and the number of an item in it.
_Place = tuple[int, int]


class OneByOne:
    """Iterates a dataset only as far as needed: the next item of a live stream may be hours away.

    Items are kept until the next read: if another worker has moved the cursor, or the caller was cancelled, some of
    them are wanted again, and an iterator gives each of them once.
    """

    def __init__(self, dataset: Iterable[Any], epochs: int | None) -> None:
        self._dataset, self._epochs = dataset, epochs
        self._once = hasattr(dataset, "__next__") and iter(dataset) is dataset
        self._items: Iterator[Any] | None = None
        self._error: BaseException | None = None  # the error that ended an iterator
        self._at: _Place = (0, 0)  # the place of the next item
        self._is_at_end = False
        self._since: _Place | None = None  # all items from here to `_at` are kept; None: begin anew
        self._kept: deque[tuple[_Place, Any]] = deque()

    def read(self, place: bytes, count: int) -> tuple[list[Any], bytes]:
        self._go_to(_unpack(place))
        while len(self._kept) < count and self._read_one():
            pass
        found = list(islice(self._kept, count))
        if not found:
            return [], place
        epoch, index = found[-1][0]
        return [item for _, item in found], pack({"epoch": epoch, "index": index + 1})

    def _go_to(self, place: _Place) -> None:
        if self._epochs is not None and (self._epochs, 0) < place:
            raise InputError(
                f"the dataset was read as far as epoch {place[0]} (from 0), more than with epochs={self._epochs}: go "
                "on with the epochs of the run, or give the ledger another name="
            )
        if self._since is None or place < self._since:
            self._begin(place[0])
            self._kept.clear()
        self._since = place
        while self._kept and self._kept[0][0] < place:
            self._kept.popleft()
        if self._at[0] < place[0]:
            self._begin(place[0])
        while self._at < place:
            if self._next() is _END:
                raise InputError(
                    f"{place[1]} items of epoch {place[0]} of the dataset were drawn so far, but it has only "
                    f"{self._at[1]}: it has become shorter; go on with the dataset of the run, or give the ledger "
                    "another name="
                )

    def _read_one(self) -> bool:
        """Read one more item. Return False at the end of the last epoch."""
        while self._epochs is None or self._at[0] < self._epochs:
            place = self._at
            item = self._next()
            if item is not _END:
                self._kept.append((place, item))
                return True
            try:
                if not self._begin_next(*self._at):
                    return False
            except InputError:
                if self._kept:
                    return False  # return these first; the next call raises
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
        """Iterate from the start of an epoch. An iterator starts only once."""
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
                f"{self._error!r:.300}; "
                f"begin again with a new one, or {_INSTEAD}"
            ) from self._error
        if self._is_at_end or self._items is None:
            return _END
        try:
            item = next(self._items, _END)
        except BaseException as error:
            # A generator that raised reports its end from then on, which would end the epoch too early.
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


def _unpack(place: bytes) -> _Place:
    if not place:
        return 0, 0
    found = unpack(place, _KIND)
    if not isinstance(found, dict) or found.keys() != {"epoch", "index"} or not all(map(is_number, found.values())):
        raise of_another(_KIND)
    return found["epoch"], found["index"]
