"""The progress of long operations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a save or a resume: groups done, groups in total, and the bytes of the payloads done."""

    groups: int
    total: int
    bytes: int


OnProgress = Callable[[Progress], object]


class Teller:
    """Reports progress at the beginning, at the end, and in between at most five times a second."""

    def __init__(self, on_progress: OnProgress | None, total: int) -> None:
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
            self._on_progress(Progress(self._groups, max(self._total, self._groups), self._bytes))
