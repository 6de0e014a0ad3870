"""What a run has done so far, in figures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from replaybuf.rollout import RolloutState, Status
from replaybuf.staleness import group_staleness

_WINDOW_SECONDS = 4.0
SMOOTHING_STEPS = 20


@dataclass
class Figures:
    """Counts of groups since this process started.

    `taken` groups were trained, `replayed` of them had been left in the buffer by an earlier run. `generated` is how
    many groups became completed: those taken and expired since, and what the buffer has more than at the start.
    """

    target: int
    rewards: list[float]
    session: str
    left: int = 0  # completed groups that were in the buffer at the start
    step: int = 0
    first_step: int = 0
    taken: int = 0
    replayed: int = 0
    expired: int = 0
    tokens: int = 0
    buffered: dict[Status, int] = field(default_factory=dict)
    staleness_mean: float = 0.0
    staleness_max: int = 0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.first_step = self.step
        self.started = self.clock()
        self._past: deque[tuple[float, int, int, int]] = deque([(self.started, 0, 0, 0)])

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self.clock() - self.started

    @property
    def generated(self) -> int:
        """Groups that were generated since the start, expired ones that were generated again included."""
        return max(0, self.taken + self.expired + self.buffered.get(Status.COMPLETED, 0) - self.left)

    def count_expired(self, number: int) -> None:
        """Groups have just expired."""
        self.expired += number

    def count_buffered(self, counts: Mapping[Status, int]) -> None:
        """What is in the buffer now; call once before the start is over, with `left`."""
        self.buffered = {status: number for status, number in counts.items() if number}
        now = self.clock()
        self._past.append((now, self.generated, self.taken, self.tokens))
        while len(self._past) > 2 and now - self._past[1][0] > _WINDOW_SECONDS:
            self._past.popleft()

    def count_batch(self, groups: Sequence[Sequence[RolloutState]], step: int, reward: float) -> None:
        """A batch has been trained, as step `step`."""
        self.step = step
        self.rewards.append(reward)
        self.taken += len(groups)
        self.replayed += sum(group[0].session_id != self.session for group in groups)
        self.tokens += sum(len(rollout.response_ids) for group in groups for rollout in group)
        staleness = [group_staleness(group) for group in groups]
        self.staleness_mean, self.staleness_max = sum(staleness) / len(staleness), max(staleness)

    @property
    def rates(self) -> tuple[float, float, float]:
        """Groups generated, groups trained and tokens trained, each per second in the last few seconds."""
        (start, *before), (end, *after) = self._past[0], self._past[-1]
        seconds = max(end - start, 1e-9)
        generated, taken, tokens = ((new - old) / seconds for old, new in zip(before, after, strict=True))
        return (generated, taken, tokens) if end - start > 0.05 else (0.0, 0.0, 0.0)

    @property
    def reward(self) -> float | None:
        """The mean reward of the last steps."""
        recent = self.rewards[-SMOOTHING_STEPS:]
        return sum(recent) / len(recent) if recent else None

    def first_and_last(self) -> tuple[float, float] | None:
        """The mean reward of the first and of the last tenth of all steps."""
        if not self.rewards:
            return None
        tenth = max(1, len(self.rewards) // 10)
        return sum(self.rewards[:tenth]) / tenth, sum(self.rewards[-tenth:]) / tenth
