"""The forms of the demo."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """Where and when groups are generated: by the trainer itself, just those of the next step; by itself, more
    than those; or by other processes, all the time."""

    SYNC = "sync"
    ASYNC = "async"
    DISAGGREGATED = "disaggregated"
