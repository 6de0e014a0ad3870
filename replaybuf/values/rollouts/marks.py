"""Marks of rollouts, from which refreshes compute staleness and expiry, and their effects on what is decoded later.

A group has two records of its rollouts. Its *marks* change with a refresh, so they are small and stored with the other
metadata; its *outline* never changes and is stored with the payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from replaybuf.common.checks import MAX_STEP, shown
from replaybuf.errors import RolloutError
from replaybuf.values.rollouts.group_fields import GroupFields, fields_of, step_ranges
from replaybuf.values.rollouts.rewards import reward_value
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.rollout_type import RolloutType
from replaybuf.values.rollouts.segments import Segments
from replaybuf.values.rollouts.staleness import (
    ExpiryRule,
    expired_before,
    has_response,
    mask_stale_tokens,
    reset_response,
    staleness_of,
)


@dataclass(slots=True)
class Marks:
    """The values of each rollout from which staleness, expiry and the mean reward are computed.

    `oldest` and `newest` are the oldest and the newest trainable model step, or None. `expired` flags rollouts that
    expired after their put; `staleness` is the rollouts' staleness at the refresh in which the last of them expired.
    `masked` is the newest model step whose tokens are masked out. `due` flags rollouts that were put as EXPIRED without
    a train step: they expire at the next refresh, unless an update has set the group's status since. `rollouts`,
    `parents` and `lengths` are those of `Segments`.
    """

    oldest: list[int | None]
    newest: list[int | None]
    reward: list[float | None]
    expired: list[bool] | None = None
    staleness: list[int] | None = None
    masked: int | None = None
    due: list[bool] | None = None
    rollouts: Sequence[int] | None = None
    parents: Sequence[int | None] | None = None
    lengths: Sequence[int] | None = None

    @classmethod
    def of(
        cls,
        rollouts: Sequence[Any],
        kind: RolloutType,
        status: Status | None = None,
        group: GroupFields | None = None,
        segments: Segments | None = None,
    ) -> Marks:
        """Return the marks of decoded rollouts. Raises RolloutError.

        `status` is the group's, if it was put without a train step; `group` has the fields of the rollouts, if known.
        """
        group = group or fields_of(rollouts, kind)
        try:
            ranges = step_ranges(group)
        except (TypeError, ValueError, OverflowError, LookupError) as error:
            raise RolloutError(
                f"response_model_steps must be training steps, and response_mask numbers, for each token: {error!r}"
            ) from error
        oldest, newest = [step for step, _ in ranges], [step for _, step in ranges]
        for step in (*oldest, *newest):
            if step is not None and abs(step) >= MAX_STEP:
                raise RolloutError(f"response_model_steps holds {shown(step)}, which is no training step")
        key = kind.reward_key
        rewards = [reward_value(fields.reward, key) for fields in group]
        marks = cls(oldest, newest, rewards, due=_due_rollouts(rollouts, kind, status))
        if segments is not None:
            marks.rollouts, marks.parents, marks.lengths = segments.rollouts, segments.parents, segments.lengths
        return marks

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Marks:
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        values = zip(self.__slots__, _VALUES(self), strict=True)
        return {name: value for name, value in values if value is not None}

    @property
    def segments(self) -> Segments | None:
        """How the rollouts consist of segments; None for whole ones."""
        return None if self.parents is None else Segments(self.parents, self.lengths)

    @property
    def oldest_step(self) -> int | None:
        """The oldest model step of the group, or None."""
        return min([step for step in self.oldest if step is not None], default=None)

    @property
    def mixed(self) -> bool:
        """Whether only some rollouts have model steps; the group's staleness is then at least 0."""
        return 0 < self.oldest.count(None) < len(self.oldest)

    @property
    def mean_reward(self) -> float | None:
        """The mean of the rollouts' rewards, or None without any."""
        segments = self.segments
        rewards = self.reward if segments is None else segments.rewards(self.reward)
        numbers = [reward for reward in rewards if reward is not None]
        return sum(numbers) / len(numbers) if numbers else None

    def staleness_at(self, train_step: int) -> list[int]:
        """Return each rollout's staleness at `train_step`."""
        return [staleness_of(oldest, train_step) for oldest in self.oldest]

    def too_old(self, rule: ExpiryRule, train_step: int) -> list[bool]:
        """Return for each rollout whether it expires by `rule` at `train_step`."""
        return [
            rule.expires(staleness_of(oldest, train_step), newest, train_step)
            for oldest, newest in zip(self.oldest, self.newest, strict=True)
        ]

    def expire(self, rule: ExpiryRule, train_step: int) -> bool:
        """Expire rollouts by `rule` at `train_step`, and all that are `due`; return whether any expired.

        If none did, nothing changes.
        """
        staleness, fired = self.staleness_at(train_step), self.too_old(rule, train_step)
        if self.due is not None:
            fired, self.due = [old or new for old, new in zip(self.due, fired, strict=True)], None
        if not any(fired):
            return False
        before = self.expired or [False] * len(fired)
        self.expired = [old or new for old, new in zip(before, fired, strict=True)]
        self.staleness = staleness
        self.oldest = [None if expired else step for step, expired in zip(self.oldest, fired, strict=True)]
        self.newest = [None if expired else step for step, expired in zip(self.newest, fired, strict=True)]
        self.reward = [None if expired else value for value, expired in zip(self.reward, fired, strict=True)]
        return True

    def mask(self, rule: ExpiryRule, train_step: int) -> bool:
        """Record the newest model step masked out by `rule` at `train_step`; return whether any rollout changes.

        Masked tokens stay masked. A rollout changes in a refresh only while the bound is between its oldest and its
        newest token, so its marks are rewritten no more often than the weights changed during its generation.
        """
        through = rule.masked_through(train_step)
        if through is None or (self.masked is not None and through <= self.masked):
            return False
        ranges = zip(self.oldest, self.newest, strict=True)
        if not any(old is not None and new is not None and old <= through < new for old, new in ranges):
            return False
        self.masked = through
        return True

    def apply(self, rollouts: Sequence[Any], train_step: int | None, kind: RolloutType) -> None:
        """Update decoded rollouts: reset expired ones, mask stale tokens, set the staleness at `train_step`.

        With None they keep the staleness of their put, or get that of the refresh in which the last one expired.
        """
        if self.expired is not None:
            for rollout, expired in zip(rollouts, self.expired, strict=True):
                if expired:
                    reset_response(rollout, kind)
        staleness = self.staleness if train_step is None else self.staleness_at(train_step)
        if staleness is not None:
            kind.set_all(rollouts, "seq_staleness", staleness)
        if self.masked is not None:
            mask_stale_tokens(rollouts, self.masked, kind)


_VALUES: Final = attrgetter(*Marks.__slots__)


def _due_rollouts(rollouts: Sequence[Any], kind: RolloutType, status: Status | None) -> list[bool] | None:
    """Return for each rollout whether it is EXPIRED and expires at the next refresh; None if none does.

    In an EXPIRED group only rollouts with a response do.
    """
    if status not in (Status.ABORTED, Status.EXPIRED):
        return None
    indices = [
        index
        for index in expired_before(rollouts, kind)
        if status == Status.ABORTED or has_response(rollouts[index], kind)
    ]
    return [index in indices for index in range(len(rollouts))] if indices else None
