"""The production of a batch in figures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields

from replaybuf.errors import ProduceError
from replaybuf.rollouts.rollout import Status
from replaybuf.units import number, short

_NAMES = {Status.COMPLETED: "produced", Status.ABORTED: "interrupted", Status.INIT: "retried"}
#: Of so many groups, the last ones, the times are kept for percentiles.
_TIMES = 10_000

_GROUPS = ("failed", "retried", "filtered", "expired", "interrupted", "lost")


@dataclass(slots=True)
class ProduceSummary:
    """The production of one batch. Counts are of groups; new groups are kept apart from those that were there before.

    - `produced`: generated now, and completed; `reused`: completed ones that were in the buffer at the beginning.
    - `continued`: prompts that were handed out again: interrupted, expired or failed ones, or those of dead workers.
    - `failed`: given up as FAILED; `retried`: failed, and will be tried again; `filtered`: not valid; `expired`: became
      too old, at the beginning or as they were put; `interrupted`: put back as ABORTED; `lost`: passed on to another
      worker before they were done, and not stored.
    - `tokens`: response tokens that were generated now, those of interrupted and failed groups included.
    - `seconds`: the time of the production, of which `pause_seconds` for interrupting what was left over;
      `group_seconds`: the time that the calls of `generate_group` took, added up; `train_seconds`: that of the train
      step, where it was measured with `training()`.
    - `raw_rewards_sum`, `raw_rewards_count`: of the rollouts of all groups that were completed, also of those that were
      filtered or expired then; what filters leave says too much of the policy. Rollouts without a reward don't count.

    `group_p50` and `group_p99` are percentiles of the seconds of one call of `generate_group`, of the last 10,000.
    """

    produced: int = 0
    reused: int = 0
    continued: int = 0
    failed: int = 0
    retried: int = 0
    filtered: int = 0
    expired: int = 0
    interrupted: int = 0
    lost: int = 0
    tokens: int = 0
    seconds: float = 0.0
    pause_seconds: float = 0.0
    group_seconds: float = 0.0
    train_seconds: float = 0.0
    raw_rewards_sum: float = 0.0
    raw_rewards_count: int = 0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMES), repr=False, compare=False)

    @property
    def group_p50(self) -> float:
        """The median time of a group, in seconds; 0 without any."""
        return self._percentile(50)

    @property
    def group_p99(self) -> float:
        """The time that 99 of 100 groups took at most, in seconds; 0 without any."""
        return self._percentile(99)

    def _percentile(self, percent: int) -> float:
        ordered = sorted(self.times)
        return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] if ordered else 0.0

    def add_rewards(self, rewards: Iterable[float | None]) -> None:
        """Count the rewards of a completed group's rollouts; None where one has none."""
        known = [reward for reward in rewards if reward is not None]
        self.raw_rewards_sum += sum(known)
        self.raw_rewards_count += len(known)

    def add(self, status: Status, tokens: int, seconds: float) -> None:
        """Count a group of this status; INIT is one that failed and will be tried again."""
        name = _NAMES.get(status, status.value)
        setattr(self, name, getattr(self, name) + 1)
        self.tokens += tokens
        self.group_seconds += seconds
        self.times.append(seconds)

    @contextmanager
    def producing(self) -> Iterator[None]:
        """Add the time of the block to `seconds`. A ProduceError that ends it takes this summary along."""
        try:
            with self._timed("seconds"):
                yield
        except ProduceError as error:
            error.summary = self
            raise

    def training(self) -> AbstractContextManager[None]:
        """Return a context manager that adds the time of its block to `train_seconds`."""
        return self._timed("train_seconds")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.monotonic() - began)

    def as_dict(self, prefix: str = "produce/") -> dict[str, float]:
        """Return the figures by name, for a logger: `produce/produced` and so on, and `train/seconds`."""
        names = [one.name for one in fields(self) if one.name not in ("times", "train_seconds")]
        figures = {f"{prefix}{name}": getattr(self, name) for name in (*names, "group_p50", "group_p99")}
        return figures | {"train/seconds": self.train_seconds}

    def __str__(self) -> str:
        """Return `32 groups (5 reused; 2 interrupted), 13.4k tokens in 2.1 s; training 0.4 s`."""
        others = [f"{number(count)} {name}" for name in _GROUPS if (count := getattr(self, name))]
        notes = "; ".join(filter(None, [f"{self.reused} reused" if self.reused else "", ", ".join(others)]))
        text = f"{number(self.produced)} groups{f' ({notes})' if notes else ''}"
        text += f", {short(self.tokens)} tokens in {self.seconds:.1f} s"
        return text + (f"; training {self.train_seconds:.1f} s" if self.train_seconds else "")
