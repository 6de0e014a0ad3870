"""What xtuner's buffer does with groups and their staleness, by its source: the reference of a randomized test.

A group has the first status of FAILED, ABORTED, EXPIRED and FILTERED that any of its rollouts has, or COMPLETED. With a
train step, the rollouts of COMPLETED, ABORTED and EXPIRED groups have their staleness computed, and each one expires
that was EXPIRED before, is too stale, or has no trainable token left that is fresh enough. If any did, the group is
EXPIRED: the rollouts that expired lose their responses, or the whole group leaves if it isn't to be retried.

Groups of a status are drawn oldest first, or the most stale first and then the oldest.
"""

from __future__ import annotations

import math
from typing import Any

from tests.frameworks import XtunerRollout, XtunerStatus

_PRECEDENCE = (XtunerStatus.FAILED, XtunerStatus.ABORTED, XtunerStatus.EXPIRED, XtunerStatus.FILTERED)
REFRESHED = (XtunerStatus.COMPLETED, XtunerStatus.ABORTED, XtunerStatus.EXPIRED)

Group = list[XtunerRollout]


class Theirs:
    """Groups of one task in order, each with its status and staleness.

    They are drawn `by_staleness`, or if `by_steps`, too, by the oldest model step that is left, and groups without one
    last: here, but not in xtuner, as `docs/xtuner.md` says.
    """

    def __init__(self, *, by_staleness: bool, by_steps: bool = True) -> None:
        self._by_staleness, self._by_steps = by_staleness, by_steps
        self.groups: list[tuple[Group, XtunerStatus, int]] = []

    def put(self, group: Group, *, model_step: int | None, train_step: int | None, **rule: Any) -> None:
        if model_step is not None:
            for rollout in group:
                steps = list(rollout.response_model_steps or [])
                missing = len(rollout.response_ids or []) - len(steps)
                rollout.response_model_steps = steps + [model_step] * missing
        status = _lived(group, train_step, **rule)
        if status != XtunerStatus.EXPIRED or rule["retryable"]:
            self.groups.append((group, status, max(rollout.seq_staleness for rollout in group)))

    def get(self, size: int, status: XtunerStatus) -> list[Group]:
        """Take the first groups of a status."""
        matching = [entry for entry in self.groups if entry[1] == status]
        if self._by_staleness:
            matching.sort(key=lambda entry: self._order(entry[0], entry[2]))
        batch = matching[:size]
        self.groups = [entry for entry in self.groups if not any(entry is drawn_entry for drawn_entry in batch)]
        return [group for group, _, _ in batch]

    def _order(self, group: Group, staleness: int) -> tuple[float, int]:
        steps = [step for rollout in group for step in rollout.response_model_steps or []]
        return (min(steps), 0) if steps and self._by_steps else (math.inf, -staleness)

    def refresh(self, train_step: int, **rule: Any) -> int:
        """Return the number of groups that are EXPIRED then."""
        entries, expired = [], 0
        for group, status, staleness in self.groups:
            if status in REFRESHED:
                status = _lived(group, train_step, **rule)
                staleness = max(rollout.seq_staleness for rollout in group)
                expired += status == XtunerStatus.EXPIRED
                if status == XtunerStatus.EXPIRED and not rule["retryable"]:
                    continue
            entries.append((group, status, staleness))
        self.groups = entries
        return expired


def _status(group: Group) -> XtunerStatus:
    present = {rollout.status for rollout in group}
    return next((status for status in _PRECEDENCE if status in present), XtunerStatus.COMPLETED)


def _lived(
    group: Group, train_step: int | None, *, threshold: int | None, tokens: int | None, retryable: bool
) -> XtunerStatus:
    status = _status(group)
    if train_step is None or status not in REFRESHED:
        return status
    are_expired = []
    for rollout in group:
        steps = rollout.response_model_steps or []
        rollout.seq_staleness = train_step - min(steps) - 1 if steps else 0
        trainable = [step for step, mask in zip(steps, rollout.response_mask or [1] * len(steps), strict=True) if mask]
        worn_out = tokens is not None and all(train_step - step - 1 >= tokens for step in trainable)
        too_stale = threshold is not None and rollout.seq_staleness >= threshold
        are_expired.append(rollout.status == XtunerStatus.EXPIRED or too_stale or bool(trainable and worn_out))
    if not any(are_expired):
        return status
    for rollout, expired in zip(group, are_expired, strict=True):
        if expired or not retryable:
            rollout.status = XtunerStatus.EXPIRED
        if expired and retryable:
            _reset(rollout)
    return XtunerStatus.EXPIRED


def _reset(rollout: XtunerRollout) -> None:
    rollout.tokens = None if rollout.prompt_ids is None else list(rollout.prompt_ids)
    rollout.response, rollout.response_ids, rollout.logprobs, rollout.response_model_steps = "", [], [], []
    rollout.response_mask = rollout.reward = rollout.finish_reason = rollout.routed_experts = rollout.error_msg = None
