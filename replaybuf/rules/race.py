"""Random draws as an order: the exponential race.

Every group has a key, the time at which it arrives in a race where arrivals of group i come at rate w_i: `now +
Exp(w_i)`. The k smallest keys are a weighted sample without replacement (Efraimidis and Spirakis, "Weighted random
sampling with a reservoir", 2006), so a random draw is an ORDER BY on an indexed column. The race goes on after a draw:
*now* moves on to the last arrival among the drawn groups, and the remaining times are again Exp(w_i), because the
exponential distribution has no memory. A group that is put, returned or given another weight gets a key from the
present time.

Keys are a pure function of the policy's seed, the group's ticket and the time of the race. So there is no random
generator whose state must be kept: a store that is resumed or restored draws what it would have drawn anyway.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

#: The orders that are races, by the name of the key that groups are ordered by.
UNIFORM, PRIORITIZED = "uniform_key", "prioritized_key"
KEYS = (UNIFORM, PRIORITIZED)

#: Groups of priority 0 race among themselves, after all others; their keys begin here.
IDLE = 1e250
#: Lower weights are raised to this one.
SLOWEST = 1e-200
#: Priorities are summed up in this unit, so that even a sum of the largest ones doesn't overflow.
UNIT = 2.0**64
# After this many of a group's mean arrival times, its keys have few digits left.
_FEW_DIGITS = 2.0**40
_MASK = 2**64 - 1


@dataclass(slots=True)
class Clock:
    """The present time of a race: for groups with a weight, and for groups of priority 0 (in units of IDLE)."""

    time: float = 0.0
    idle_time: float = 0.0

    def advance(self, keys: Iterable[float]) -> None:
        """Move on to the arrival of the last drawn group."""
        for key in keys:
            if key < IDLE:
                self.time = max(self.time, key)
            else:
                self.idle_time = max(self.idle_time, key / IDLE - 1.0)

    def is_worn(self, weights: Iterable[float]) -> bool:
        """Return whether keys of these weights have lost too many digits, so that the race has to begin anew."""
        return self.idle_time > _FEW_DIGITS or any(self.time * weight > _FEW_DIGITS for weight in weights)


def draw_keys(seed: int, clock: Clock, groups: Iterable[tuple[int, float]]) -> list[float]:
    """Return the keys of groups, each given as (ticket, weight), that enter the race now."""
    (now,) = struct.unpack("<Q", struct.pack("<d", clock.time))
    (idle,) = struct.unpack("<Q", struct.pack("<d", clock.idle_time))
    active, resting = _mix(seed ^ now), _mix(~seed ^ idle)
    keys = []
    for ticket, weight in groups:
        if weight > 0:
            keys.append(clock.time + _exponential(active, ticket) / max(weight, SLOWEST))
        else:
            keys.append(IDLE * (1.0 + clock.idle_time + _exponential(resting, ticket)))
    return keys


def share(priority: float) -> float:
    """Return the arrival rate of a group of this priority, in UNITs, without underflow, which PostgreSQL refuses."""
    return max(priority, SLOWEST) / UNIT if priority else 0.0


def weight_of(key_name: str, priority: float) -> float:
    """Return the arrival rate of a group of this priority in a race."""
    return priority if key_name == PRIORITIZED else 1.0


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
