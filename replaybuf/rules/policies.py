"""Replay policies: the order in which groups are drawn, or evicted.

A policy is data: a name and an ORDER BY, which `storage.sql.statements.ordering` compiles, so that a new policy is a
subclass of a few lines:

    class BestFirst(ReplayPolicy):
        name = "best_first"
        order = (OrderTerm("reward", descending=True), OrderTerm("timestamp_id"))

Random policies order by a sampling key, `uniform_key` or `prioritized_key`: arrival times in an exponential race.
"""

from __future__ import annotations

import difflib
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, TypeVar

from replaybuf.common.checks import check_list, shown, whole
from replaybuf.common.redact import redact_path
from replaybuf.errors import ConfigError, QueryError
from replaybuf.rules.query import FIELDS

#: The names of sampling keys; each stands for a random order (a race).
UNIFORM, PRIORITIZED = "uniform_key", "prioritized_key"
KEYS = (UNIFORM, PRIORITIZED)

#: Groups of priority 0 come after all others, in uniform order; their sampling keys begin here.
IDLE = 1e250
#: Lower weights are raised to this one.
SLOWEST = 1e-200
#: Priorities are summed up in this unit, so that even a sum of the largest ones doesn't overflow.
UNIT = 2.0**64
# After this many of a group's mean arrival times, its new keys would have too few significant digits.
_FEW_DIGITS = 2.0**40
_MASK = 2**64 - 1


@dataclass(slots=True)
class Race:
    """A random order: its sampling key, its seed, and its virtual time, which draws advance.

    `idle_time` is the time of groups of priority 0, in units of IDLE.
    """

    key: str
    seed: int
    time: float = 0.0
    idle_time: float = 0.0

    def advance(self, keys: Iterable[float]) -> None:
        """Advance to the arrival of the last drawn group."""
        for key in keys:
            if key < IDLE:
                self.time = max(self.time, key)
            else:
                self.idle_time = max(self.idle_time, key / IDLE - 1.0)

    def tick(self) -> None:
        """Advance to the next moment, which has other samples. It is so near that all keys stay valid."""
        self.time, self.idle_time = math.nextafter(self.time, math.inf), math.nextafter(self.idle_time, math.inf)

    def left(self, key: float) -> float:
        """Return the time until the arrival of a group with this key."""
        return key - (self.time if key < IDLE else self.idle_time * IDLE)

    def pass_time(self, waits: Sequence[float]) -> None:
        """Advance by the time of drawn groups with these times left."""
        self.time += max((wait for wait in waits if wait < IDLE), default=0.0)
        self.idle_time += max((wait / IDLE - 1.0 for wait in waits if wait >= IDLE), default=0.0)

    def is_worn(self, priorities: Iterable[float]) -> bool:
        """Return whether keys of these priorities have lost too many digits, so that all keys must be drawn again."""
        return self.idle_time > _FEW_DIGITS or any(self.time * self._weight(prio) > _FEW_DIGITS for prio in priorities)

    def draw_keys(self, groups: Iterable[tuple[int, float]]) -> list[float]:
        """Return the sampling keys of groups, given as (ticket, priority), that enter the race now."""
        (now,) = struct.unpack("<Q", struct.pack("<d", self.time))
        (idle,) = struct.unpack("<Q", struct.pack("<d", self.idle_time))
        active, resting = _mix(self.seed ^ now), _mix(~self.seed ^ idle)
        keys = []
        for ticket, priority in groups:
            weight = self._weight(priority)
            if weight > 0:
                keys.append(self.time + _exponential(active, ticket) / max(weight, SLOWEST))
            else:
                keys.append(IDLE * (1.0 + self.idle_time + _exponential(resting, ticket)))
        return keys

    def _weight(self, priority: float) -> float:
        """Return the arrival rate of a group of this priority."""
        return priority if self.key == PRIORITIZED else 1.0


def share(priority: float) -> float:
    """Return the arrival rate of a group of this priority, in UNITs, without underflow, which PostgreSQL refuses."""
    return max(priority, SLOWEST) / UNIT if priority else 0.0


def _exponential(state: int, ticket: int) -> float:
    """Return a sample of Exp(1), determined by both arguments."""
    bits = _mix(state + ticket * 0x9E3779B97F4A7C15)
    return -math.log(((bits >> 11) + 0.5) * 2.0**-53)


def _mix(bits: int) -> int:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) twice, so that every bit depends on every bit."""
    for _ in range(2):
        bits = (bits + 0x9E3779B97F4A7C15) & _MASK
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
        bits ^= bits >> 31
    return bits


@dataclass(frozen=True, slots=True)
class OrderTerm:
    """One term of an ORDER BY: a field of the query language (not a tag), or in a policy a sampling key.

    Groups without a value come last.
    """

    field: str
    descending: bool = False


Order = tuple[OrderTerm, ...]

T = TypeVar("T")


def check_field(name: str, place: str) -> None:
    """Raise QueryError unless `name` is a field that groups can be ordered by."""
    if not isinstance(name, str) or name not in FIELDS:
        similar = difflib.get_close_matches(str(name)[:100], FIELDS, n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise QueryError(f"can't order by {shown(name)}{hint} (fields: {', '.join(FIELDS)})", place)


class ReplayPolicy:
    """The order in which groups are drawn. Subclasses set `name` and `order`; the order should end in `timestamp_id`.

    `seed` makes the draws of a random policy reproducible: with the same seed, the same puts and takes in the same
    order draw the same groups, also across a resume. None is the buffer's seed, which is random if nobody gave one.
    """

    name: ClassVar[str]
    order: ClassVar[Order]
    seed: int | None = None

    def __init__(self, seed: int | None = None) -> None:
        self.seed = None if seed is None else check_seed(seed)

    def __init_subclass__(cls) -> None:
        for term in getattr(cls, "order", ()):
            if term.field not in KEYS:
                check_field(term.field, f"{cls.__name__}.order")

    @property
    def key(self) -> str | None:
        """The sampling key in the order, or None if the policy isn't random."""
        return next((term.field for term in self.order if term.field in KEYS), None)

    @property
    def is_race(self) -> bool:
        """Whether the order begins with a sampling key, so that draws are the next arrivals of a race."""
        return self.order[0].field in KEYS


class FIFOPolicy(ReplayPolicy):
    """Oldest first: for synchronous training, where data is consumed in the order in which it was generated."""

    name = "fifo"
    order = (OrderTerm("timestamp_id"),)


class LIFOPolicy(ReplayPolicy):
    """Newest first: a stack."""

    name = "lifo"
    order = (OrderTerm("timestamp_id", descending=True),)


class UniformPolicy(ReplayPolicy):
    """At random, each group with the same probability."""

    name = "uniform"
    order = (OrderTerm(UNIFORM), OrderTerm("timestamp_id"))


class PrioritizedPolicy(ReplayPolicy):
    """At random, each group with a probability proportional to its priority.

    Groups of priority 0 are drawn uniformly, once no others are left.
    """

    name = "prioritized"
    order = (OrderTerm(PRIORITIZED), OrderTerm("timestamp_id"))


class LowestPriorityPolicy(ReplayPolicy):
    """Lowest priority first, then oldest."""

    name = "lowest_priority"
    order = (OrderTerm("priority"), OrderTerm("timestamp_id"))


class StalenessPolicy(ReplayPolicy):
    """By the oldest model step, without one last, then oldest: old data is used before it expires."""

    name = "staleness"
    order = (OrderTerm("staleness", descending=True), OrderTerm("timestamp_id"))


POLICIES: dict[str, type[ReplayPolicy]] = {
    policy.name: policy for policy in (FIFOPolicy, LIFOPolicy, StalenessPolicy, UniformPolicy, PrioritizedPolicy)
}


def check_seed(seed: object) -> int:
    """Return the seed if it is a 64-bit integer. Raises ConfigError otherwise."""
    number = whole(seed)
    if number is None or not 0 <= number < 2**64:
        raise ConfigError(f"seed must be a whole number of at least 0, below 2**64, got {shown(seed)}")
    return number


def resolve_policy(policy: str | ReplayPolicy | type[ReplayPolicy], seed: int | None = None) -> ReplayPolicy:
    """Return the policy for a name, class, instance or "module:Class". Raises ConfigError for anything else.

    `seed` is the policy's seed, unless an instance brings its own.
    """
    resolved = _import_policy(policy) if isinstance(policy, str) else policy
    if isinstance(resolved, type) and issubclass(resolved, ReplayPolicy):
        resolved = resolved()
        if seed is not None and isinstance(resolved, ReplayPolicy):
            resolved.seed = check_seed(seed)
    if not isinstance(resolved, ReplayPolicy):
        if resolved is not None:
            raise ConfigError(f"policy {shown(policy)} is no ReplayPolicy; it must be one, or a subclass of it")
        names = ", ".join(sorted(POLICIES))
        similar = difflib.get_close_matches(str(policy), POLICIES, n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        text = redact_path(policy) if isinstance(policy, str) else policy
        raise ConfigError(f"unknown policy {text!r:.200}{hint} (there are {names}, or your own as 'module:Class')")
    for attribute in ("name", "order"):
        if not getattr(resolved, attribute, None):
            raise ConfigError(f"the policy {type(resolved).__name__} has no {attribute}")
    return resolved


def _import_policy(name: str) -> object:
    if name in POLICIES or ":" not in name:
        return POLICIES.get(name)
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute, None)
    except (ImportError, ValueError, TypeError) as error:  # the latter two for invalid module names
        raise ConfigError(f"the policy {redact_path(name)!r:.200} can't be imported: {error!s:.200}") from error


def parse_order(order_by: str | OrderTerm | Iterable[str | OrderTerm] | None) -> Order:
    """Return the terms of an ORDER BY as users write it: one or more field names, with a leading "-" for descending.

    None, and ties, mean insertion order. Raises QueryError for unknown fields.
    """
    if order_by is None:
        terms: list[OrderTerm] = []
    elif isinstance(order_by, (str, OrderTerm)):
        terms = [_parse_term(order_by)]
    elif isinstance(order_by, Iterable):
        terms = [_parse_term(term) for term in check_list(order_by, "order_by")]
    else:
        raise QueryError(f"expected a field name or a list of them, got {type(order_by).__name__}", "order_by")
    return (*terms, OrderTerm("timestamp_id"))


def _parse_term(term: str | OrderTerm) -> OrderTerm:
    if isinstance(term, str):
        term = OrderTerm(term.removeprefix("-"), descending=term.startswith("-"))
    if not isinstance(term, OrderTerm):
        raise QueryError(f"expected a field name, got {type(term).__name__}", "order_by")
    check_field(term.field, "order_by")
    return term


def in_order(items: Iterable[T], order: Order, value: Callable[[T, str], Any] = getattr) -> list[T]:
    """Return the items sorted by several terms, items without a value last (stable sorts, the last term first)."""
    result = list(items)
    for term in reversed(order):
        known = [item for item in result if value(item, term.field) is not None]
        unknown = [item for item in result if value(item, term.field) is None]
        known.sort(key=lambda item: value(item, term.field), reverse=term.descending)
        result = known + unknown
    return result
