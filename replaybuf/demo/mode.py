"""The modes of the demo."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """Where and when groups are generated.

    By the trainer, just those of the next step; by the trainer, more than those; or by other processes, all the time.
    """

    SYNC = "sync"
    ASYNC = "async"
    DISAGGREGATED = "disaggregated"
