"""Reverb's selectors: which item a table gives next, as its sampler, or removes next, as its remover."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from replaybuf.common.checks import check_priority, shown
from replaybuf.errors import ConfigError, InputError
from replaybuf.rules.policies import (
    FIFOPolicy,
    LIFOPolicy,
    LowestPriorityPolicy,
    OrderTerm,
    PrioritizedPolicy,
    ReplayPolicy,
    UniformPolicy,
)


class HighestFirstPolicy(ReplayPolicy):
    """Highest priority first, then oldest."""

    name = "highest_first"
    order = (OrderTerm("priority", descending=True), OrderTerm("timestamp_id"))


class Selector:
    """A selector: the `policy` of a buffer, also one of your own.

    Samples of a random one have the probability of their draw, others 1.
    """

    policy: type[ReplayPolicy]
    is_random: ClassVar[bool] = False


class Fifo(Selector):
    """The oldest item."""

    policy = FIFOPolicy


class Lifo(Selector):
    """The newest item."""

    policy = LIFOPolicy


class Uniform(Selector):
    """Any item, each with the same probability."""

    policy = UniformPolicy
    is_random = True


class MinHeap(Selector):
    """The item of the lowest priority; of several, the oldest (in Reverb the one least recently updated)."""

    policy = LowestPriorityPolicy


class MaxHeap(Selector):
    """The item of the highest priority; of several, the oldest (in Reverb the one least recently updated)."""

    policy = HighestFirstPolicy


@dataclass(frozen=True)
class Prioritized(Selector):
    """Any item, with a probability proportional to priority ** priority_exponent; items of priority 0 come last.

    With an exponent of 0 all items, also of priority 0, are equally likely. Raises ConfigError for a negative exponent.
    """

    priority_exponent: float
    is_random = True

    def __post_init__(self) -> None:
        exponent = self.priority_exponent
        if isinstance(exponent, bool) or not isinstance(exponent, (int, float)) or not 0 <= exponent < math.inf:
            raise ConfigError(f"priority_exponent must be a number of at least 0, got {shown(exponent)}")

    @property
    def policy(self) -> type[ReplayPolicy]:  # type: ignore[override]
        """Prioritized draws, or uniform ones with an exponent of 0."""
        return PrioritizedPolicy if self.priority_exponent else UniformPolicy


def exponent_of(sampler: Selector, remover: Selector) -> float:
    """Return the exponent that turns the priorities of a table's items into weights; 1 for none.

    Raises ConfigError for a sampler and a remover with different ones: an item has one weight.
    """
    exponents = (selector.priority_exponent for selector in (sampler, remover) if isinstance(selector, Prioritized))
    values = sorted({float(exponent) for exponent in exponents if exponent})
    if len(values) > 1:
        raise ConfigError(
            f"remover: its priority_exponent has to be that of the sampler, got {values[0]:g} and {values[1]:g}"
        )
    return values[0] if values else 1.0


def weight_of(priority: float, exponent: float) -> float:
    """Return the stored weight of a priority: prioritized draws are proportional to it. Raises InputError."""
    number = check_priority(priority)
    if exponent == 1.0 or number == 0.0:
        return number
    try:
        weight = float(number**exponent)
    except OverflowError:
        weight = 0.0
    if weight == 0.0:
        raise InputError(f"priority {number:g} ** {exponent:g} is beyond the range of floats")
    return weight


def priority_of(weight: float, exponent: float) -> float:
    """Return the priority with this weight, to 15 digits."""
    return weight if exponent == 1.0 else float(f"{weight ** (1 / exponent):.15g}")
