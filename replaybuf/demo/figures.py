"""The figures of a run so far."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replaybuf.demo.mode import Mode
from replaybuf.demo.settings import TASK
from replaybuf.produce import ProduceSummary
from replaybuf.rollouts.rollout import RolloutState, Status
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rollouts.staleness import group_staleness
from replaybuf.rules.tallies import Tallies, Tally

_WINDOW_SECONDS = 4.0
SMOOTHING_STEPS = 20
_KIND = RolloutType(RolloutState)


@dataclass
class Figures:
    """Counts of groups since this process started; those of the store are of all processes.

    `taken` groups were trained; `replayed` of them had been left in the buffer by an earlier run. `reused` were there
    already when the production of a batch began. `produce_seconds` is the time until the batches were complete,
    `train_seconds` the time until they were trained and saved.
    """

    target: int
    rewards: list[float]
    session: str
    mode: Mode = Mode.DISAGGREGATED
    step: int = 0
    first_step: int = 0
    left: int = 0  # completed groups that were in the buffer at the start
    taken: int = 0
    replayed: int = 0
    reused: int = 0
    tokens: int = 0
    produce_seconds: float = 0.0
    train_seconds: float = 0.0
    buffered: dict[Status, int] = field(default_factory=dict)
    leased: int = 0  # groups that are being generated
    staleness_mean: float = 0.0
    staleness_max: int = 0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.first_step = self.step
        self.started = self.clock()
        self._counts: Counter[str] = Counter()
        self._before: Counter[str] | None = None
        self._past: deque[tuple[float, int, int, int]] = deque([(self.started, 0, 0, 0)])

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started

    @property
    def generated(self) -> int:
        """Groups that were completed since the start, expired ones that were generated again included."""
        return self._counts["generated"]

    @property
    def expired(self) -> int:
        """Groups that became too old since the start."""
        return self._counts["expired"]

    @property
    def interrupted(self) -> int:
        """How often a group was interrupted since the start."""
        return self._counts["interrupted"]

    def count_store(self, tallies: Tallies) -> None:
        """Update the counts of the store; the first call is the start."""
        of = {(status, tally): n for (task, status, tally), n in tallies.items() if task == TASK and n}
        self.buffered = {status: of.get((status, Tally.SIZE), 0) for status in Status if status != Status.ARCHIVED}
        self.buffered = {status: n for status, n in self.buffered.items() if n}
        self.leased = sum(n for (_, tally), n in of.items() if tally == Tally.LEASED)
        counts = Counter(
            generated=of.get((Status.COMPLETED, Tally.PUT), 0),
            interrupted=of.get((Status.ABORTED, Tally.PUT), 0),
            expired=sum(n for (_, tally), n in of.items() if tally == Tally.EXPIRED)
            + of.get((Status.EXPIRED, Tally.PUT), 0),
        )
        if self._before is None:
            self._before, self.left = counts, self.buffered.get(Status.COMPLETED, 0)
        self._counts = counts - self._before
        now = self.clock()
        self._past.append((now, self.generated, self.taken, self.tokens))
        while len(self._past) > 2 and now - self._past[1][0] > _WINDOW_SECONDS:
            self._past.popleft()

    def count_batch(self, groups: Sequence[Sequence[RolloutState]], step: int, reward: float) -> None:
        """Count a batch that was trained, as step `step`."""
        self.step = step
        self.rewards.append(reward)
        self.taken += len(groups)
        self.replayed += sum(group[0].session_id != self.session for group in groups)
        self.tokens += sum(len(rollout.response_ids) for group in groups for rollout in group)
        staleness = [group_staleness(group, _KIND) for group in groups]
        self.staleness_mean, self.staleness_max = sum(staleness) / len(staleness), max(staleness)

    def count_summary(self, summary: ProduceSummary) -> None:
        """Count the times of a batch, from production to the saved weights."""
        self.reused += summary.reused
        self.produce_seconds += summary.seconds
        self.train_seconds += summary.train_seconds

    @property
    def rates(self) -> tuple[float, float, float]:
        """Groups generated, groups trained and tokens trained, each per second over the last few seconds."""
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
        """Return the mean reward of the first and of the last tenth of all steps."""
        if not self.rewards:
            return None
        tenth = max(1, len(self.rewards) // 10)
        return sum(self.rewards[:tenth]) / tenth, sum(self.rewards[-tenth:]) / tenth
