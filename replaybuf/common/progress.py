"""Long operations: work in pieces, and its progress, for a callback, or as a bar on stderr if that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from replaybuf.errors import ReplayBufError

_SECONDS = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a copy: groups done, groups in total, and the bytes of the payloads done.

    `total` is 0 while it is unknown, as in the first pass of an import, which reads its file to the end.
    """

    groups: int
    total: int
    bytes: int


OnProgress = Callable[[Progress], object]


class ProgressReporter:
    """Reports progress at the beginning, at the end, and in between at most five times a second.

    A `total` of None is unknown before the end. What the callback raises becomes the cause of a ReplayBufError.
    """

    def __init__(self, on_progress: OnProgress | None, total: int | None) -> None:
        self._on_progress = on_progress
        self._total = total
        self._groups = self._bytes = 0
        self._reported = 0.0
        self._report()

    def add(self, groups: int, nbytes: int) -> None:
        """Add to the groups and bytes done."""
        self._groups += groups
        self._bytes += nbytes
        if time.monotonic() - self._reported >= _SECONDS:
            self._report()

    def finish(self) -> None:
        """Report that all groups are done; their number becomes the total."""
        self._total = self._groups
        self._report()

    def _report(self) -> None:
        self._reported = time.monotonic()
        if self._on_progress is not None:
            total = 0 if self._total is None else max(self._total, self._groups)
            try:
                self._on_progress(Progress(self._groups, total, self._bytes))
            except Exception as error:  # not to be taken for one of a file or a database
                raise ReplayBufError(f"the progress callback raised {type(error).__name__}: {error}") from error


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function `report(done, total)` that shows a bar, which disappears at the end of the block.

    A total of 0 is unknown. `report` may be called from any thread.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total or None)


def in_pieces(
    items: Iterable[T], size_of: Callable[[T], int | None], most_items: int, most_bytes: int
) -> Generator[list[T], None, None]:
    """Yield items in pieces that fit in memory together, given the size of each in bytes."""
    piece: list[T] = []
    total = 0
    for item in items:
        size = size_of(item) or 0
        if piece and (total + size > most_bytes or len(piece) >= most_items):
            yield piece
            piece, total = [], 0
        piece.append(item)
        total += size
    if piece:
        yield piece
