"""The settings of a strategy that generating groups needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replaybuf.checks import Tags
from replaybuf.produce.agent_loop import Generated
from replaybuf.rollouts.staleness import ExpiryRule


@dataclass(frozen=True, slots=True)
class Terms:
    """How groups are generated and stored: a part of a strategy's settings."""

    partial: bool
    expiry: ExpiryRule
    max_failures: int
    is_valid: Callable[[list[Any]], bool]
    on_group: Callable[[Generated], object] | None
    tags: Callable[[list[Any]], Tags] | None
