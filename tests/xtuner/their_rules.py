"""What xtuner's buffer does with groups and their staleness, by its source: the reference of a randomized test.

A group has the first status of FAILED, ABORTED, EXPIRED and FILTERED that any of its rollouts has, or COMPLETED. With a
train step, the rollouts of COMPLETED, ABORTED and EXPIRED groups have their staleness computed, and each one expires
that was EXPIRED before, is too stale, or has no trainable token left that is fresh enough. If any did, the group is
EXPIRED: the rollouts that expired lose their responses, or the whole group leaves if it isn't to be retried.

Groups of a status are drawn oldest first, or the most stale first and then the oldest.
"""

from __future__ import annotations

from typing import Any

from tests.frameworks import XtunerRollout, XtunerStatus

_PRECEDENCE = (XtunerStatus.FAILED, XtunerStatus.ABORTED, XtunerStatus.EXPIRED, XtunerStatus.FILTERED)
REFRESHED = (XtunerStatus.COMPLETED, XtunerStatus.ABORTED, XtunerStatus.EXPIRED)

Group = list[XtunerRollout]


class Theirs:
    """Groups of one task in order, each with its status and staleness.

    Drawn `by_staleness`, groups without model steps come last if `stepless_last`: here, but not in xtuner, as
    `docs/xtuner.md` says.
    """

    def __init__(self, *, by_staleness: bool, stepless_last: bool = True) -> None:
        self._by_staleness, self._stepless_last = by_staleness, stepless_last
        self.groups: list[tuple[Group, XtunerStatus, int]] = []

    def put(self, group: Group, *, model_step: int | None, train_step: int | None, **rule: Any) -> None:
        if model_step is not None:
            for one in group:
                steps = list(one.response_model_steps or [])
                missing = len(one.response_ids or []) - len(steps)
                one.response_model_steps = steps + [model_step] * missing
        status = _lived(group, train_step, **rule)
        if status != XtunerStatus.EXPIRED or rule["retryable"]:
            self.groups.append((group, status, max(one.seq_staleness for one in group)))

    def get(self, size: int, status: XtunerStatus) -> list[Group]:
        """Take the first groups of a status."""
        found = [one for one in self.groups if one[1] == status]
        if self._by_staleness:
            found.sort(key=lambda one: (self._stepless_last and not _has_steps(one[0]), -one[2]))
        taken = found[:size]
        self.groups = [one for one in self.groups if not any(one is other for other in taken)]
        return [group for group, _, _ in taken]

    def refresh(self, train_step: int, **rule: Any) -> int:
        """Return the number of groups that are EXPIRED then."""
        kept, expired = [], 0
        for group, status, staleness in self.groups:
            if status in REFRESHED:
                status = _lived(group, train_step, **rule)
                staleness = max(one.seq_staleness for one in group)
                expired += status == XtunerStatus.EXPIRED
                if status == XtunerStatus.EXPIRED and not rule["retryable"]:
                    continue
            kept.append((group, status, staleness))
        self.groups = kept
        return expired


def _has_steps(group: Group) -> bool:
    return any(one.response_model_steps for one in group)


def _status(group: Group) -> XtunerStatus:
    present = {one.status for one in group}
    return next((status for status in _PRECEDENCE if status in present), XtunerStatus.COMPLETED)


def _lived(
    group: Group, train_step: int | None, *, threshold: int | None, tokens: int | None, retryable: bool
) -> XtunerStatus:
    status = _status(group)
    if train_step is None or status not in REFRESHED:
        return status
    gone = []
    for one in group:
        steps = one.response_model_steps or []
        one.seq_staleness = train_step - min(steps) - 1 if steps else 0
        trainable = [step for step, mask in zip(steps, one.response_mask or [1] * len(steps), strict=True) if mask]
        worn_out = tokens is not None and all(train_step - step - 1 >= tokens for step in trainable)
        too_stale = threshold is not None and one.seq_staleness >= threshold
        gone.append(one.status == XtunerStatus.EXPIRED or too_stale or bool(trainable and worn_out))
    if not any(gone):
        return status
    for one, expired in zip(group, gone, strict=True):
        if expired or not retryable:
            one.status = XtunerStatus.EXPIRED
        if expired and retryable:
            _reset(one)
    return XtunerStatus.EXPIRED


def _reset(one: XtunerRollout) -> None:
    one.tokens = None if one.prompt_ids is None else list(one.prompt_ids)
    one.response, one.response_ids, one.logprobs, one.response_model_steps = "", [], [], []
    one.response_mask = one.reward = one.finish_reason = one.routed_experts = one.error_msg = None
