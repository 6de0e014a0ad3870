"""Any dataset of prompts, read by the reader that suits it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any

from replaybuf.checks import whole
from replaybuf.errors import InputError
from replaybuf.prompts.dataset_readers import IndexedReader, IterableReader
from replaybuf.prompts.stateful_reader import StatefulDataset, StatefulReader, loses_shuffle_buffer


class PromptDataset:
    """A dataset, read `epochs` times (None: for ever), by one thread at a time.

    The dataset may have `state_dict`, `load_state_dict` and `iter`, which are preferred (unless it is to be shuffled);
    or `len` and `[]`; or it is any other iterable, with the same items in the same order on every iteration, since a
    process that resumes iterates it from its start, and skips. Iterators, such as generators and files, can be read
    for one epoch only, and can't go back. `set_epoch` of a dataset that isn't indexed is called with the epoch, from 0.

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
        is_shuffled_here = is_indexed and seed is not None
        if isinstance(dataset, StatefulDataset) and not is_shuffled_here and not loses_shuffle_buffer(dataset):
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
        return False  # torch's iterable datasets, whose [] raises NotImplementedError
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
