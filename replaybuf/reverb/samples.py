"""What tables and clients return, with Reverb's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from replaybuf.reverb.selectors import Selector


class SampleInfo(NamedTuple):
    """An item as it was sampled.

    `key` names it in updates and deletions. `probability` is the one with which it was selected, of all `table_size`
    items that were there; a selector that isn't random has 1. `times_sampled` counts this sample, too.
    """

    key: int
    probability: float
    table_size: int
    priority: float
    times_sampled: int


class ReplaySample(NamedTuple):
    """A sampled item: what is known of it, and its data as they were inserted."""

    info: SampleInfo
    data: Any


@dataclass(frozen=True)
class CallStats:
    """Inserts or samples since the beginning: those that were completed, of all processes.

    `waited`, `seconds_waited` and `timeouts` are of this process alone: how many had to wait, for how long in all, and
    how many gave up.
    """

    completed: int
    waited: int
    seconds_waited: float
    timeouts: int


@dataclass(frozen=True)
class RateLimiterInfo:
    """A rate limiter and what it has let pass. `min_diff` and `max_diff` are the range of its error."""

    samples_per_insert: float
    min_diff: float
    max_diff: float
    min_size_to_sample: int
    insert_stats: CallStats
    sample_stats: CallStats


@dataclass(frozen=True)
class TableInfo:
    """A table at one moment.

    Every item is an episode of its own: `num_episodes` of them are there, `num_deleted_episodes` have left in any way.
    `num_unique_samples` of all items were sampled at least once.
    """

    name: str
    sampler_options: Selector
    remover_options: Selector
    max_size: int
    max_times_sampled: int
    rate_limiter_info: RateLimiterInfo
    current_size: int
    num_episodes: int
    num_deleted_episodes: int
    num_unique_samples: int
