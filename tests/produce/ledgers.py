"""Prompt ledgers for tests."""

from __future__ import annotations

from typing import Any

from replaybuf import PromptLedger, ReplayBuffer
from tests.stores import TASK

LONG = 600.0


def use(buffer: ReplayBuffer, **options: Any) -> PromptLedger:
    return PromptLedger(buffer, **({"dataset": [], "task_name": TASK} | options))
