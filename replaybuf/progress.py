"""The progress of long operations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a copy: groups done, groups in total, and the bytes of the payloads done.

    `total` is 0 while it isn't known, as in the first pass of an import, which reads its file to the end.
    """

    groups: int
    total: int
    bytes: int


OnProgress = Callable[[Progress], object]


class Teller:
    """Reports progress at the beginning, at the end, and in between at most five times a second.

    A `total` of None is one that isn't known before the end.
    """

    def __init__(self, on_progress: OnProgress | None, total: int | None) -> None:
        self._on_progress = on_progress
        self._total = total
        self._groups = self._bytes = 0
        self._told = 0.0
        self._tell()

    def add(self, groups: int, nbytes: int) -> None:
        """Add to the groups and bytes done."""
        self._groups += groups
        self._bytes += nbytes
        if time.monotonic() - self._told >= _SECONDS:
            self._tell()

    def finish(self) -> None:
        """Report that all groups are done; their number is the total, whatever was expected."""
        self._total = self._groups
        self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        if self._on_progress is not None:
            total = 0 if self._total is None else max(self._total, self._groups)
            self._on_progress(Progress(self._groups, total, self._bytes))
