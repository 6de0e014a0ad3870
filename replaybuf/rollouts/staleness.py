"""The rules of staleness and expiry, as plain functions over a group of rollouts.

The *staleness* of a rollout at train step T is `T - min(response_model_steps) - 1`: the number of optimiser steps
between the weights that wrote its oldest token and the weights that it will train. A rollout without model steps has
staleness 0. The rules are those of InternLM xtuner's replay buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from replaybuf.checks import check_threshold
from replaybuf.rollouts import fields
from replaybuf.rollouts.fields import as_array, is_tensor
from replaybuf.rollouts.model_steps import newest_trainable_steps, oldest_step
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.rollout_type import RolloutType

#: Only groups of these statuses expire; by default only they are refreshed.
EXPIRING_STATUSES = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)

_RESET_TO_EMPTY = ("response_ids", "logprobs", "response_model_steps")
_RESET_TO_NONE = ("routed_experts", "finish_reason", "response_mask", "reward", "error_msg")


@dataclass(frozen=True, slots=True)
class ExpiryRule:
    """When a rollout is too old to train on, counted in train steps.

    `stale_threshold` bounds the rollout's staleness, `token_stale_threshold` that of each token: older ones aren't
    trained on, and the rollout expires when none is left. None disables a bound. If `retryable`, an expired rollout
    loses its response and its group waits as EXPIRED to be generated again; otherwise the whole group is dropped.

    Raises InputError, a ValueError, when a threshold isn't positive.
    """

    stale_threshold: int | None = None
    token_stale_threshold: int | None = None
    retryable: bool = True

    def __post_init__(self) -> None:
        for name in ("stale_threshold", "token_stale_threshold"):
            object.__setattr__(self, name, check_threshold(getattr(self, name), name))

    def expires(self, staleness: int, newest_step: int | None, train_step: int | None) -> bool:
        """Return whether a rollout of this staleness, its newest trainable token from `newest_step`, is too old."""
        if self.stale_threshold is not None and staleness >= self.stale_threshold:
            return True
        if self.token_stale_threshold is None or newest_step is None or train_step is None:
            return False
        return train_step - newest_step - 1 >= self.token_stale_threshold

    def masked_through(self, train_step: int | None) -> int | None:
        """Return the newest model step whose tokens are too old at `train_step`; None where tokens have no bound."""
        if self.token_stale_threshold is None or train_step is None:
            return None
        return train_step - 1 - self.token_stale_threshold

    @property
    def active(self) -> bool:
        """Whether there is any bound."""
        return self.stale_threshold is not None or self.token_stale_threshold is not None


def staleness_of(oldest_step: int | None, train_step: int) -> int:
    """Return the staleness at `train_step` of a rollout with its oldest token from `oldest_step` (None: no steps)."""
    return 0 if oldest_step is None else train_step - oldest_step - 1


def mask_stale_tokens(rollouts: Sequence[Any], through: int, kind: RolloutType) -> None:
    """Clear `response_mask` for the tokens of a group whose model step isn't after `through`, in place.

    A response without a mask gets one if any of its tokens is that old: a list, or an int32 array where `response_ids`
    is an array. A token without a model step counts as old as the oldest of its response. Rollouts are left alone where
    token-level expiry doesn't apply, or where no trainable token would be left: those expire.
    """
    for rollout, newest in zip(rollouts, newest_trainable_steps(rollouts, kind), strict=True):
        oldest = oldest_step(rollout, kind)
        if newest is not None and oldest is not None and oldest <= through < newest:
            _mask_one(rollout, through, kind)


def _mask_one(rollout: Any, through: int, kind: RolloutType) -> None:
    response_ids, mask = kind.get(rollout, "response_ids"), kind.get(rollout, "response_mask")
    stale = np.ones(len(response_ids if mask is None else mask), dtype=bool)
    known = np.asarray(as_array(kind.get(rollout, "response_model_steps")))[: len(stale)]
    stale[: len(known)] = known <= through
    masked: Any
    if is_tensor(mask) or (mask is None and is_tensor(response_ids)):
        masked = fields.copied(mask) if is_tensor(mask) else fields.repeated(1, len(stale), like=response_ids)
        masked[np.flatnonzero(stale).tolist()] = 0
    elif mask is None:
        fresh = (~stale).astype(np.int32)
        masked = fresh if isinstance(response_ids, np.ndarray) else fresh.tolist()
    elif isinstance(mask, np.ndarray):
        masked = mask.copy()
        masked[stale] = 0
    else:
        kept = [type(value)() if old else value for value, old in zip(mask, stale.tolist(), strict=True)]
        masked = tuple(kept) if isinstance(mask, tuple) else kept
    kind.set(rollout, "response_mask", masked)


def refresh_group(rollouts: Sequence[Any], train_step: int, kind: RolloutType) -> list[int]:
    """Set every rollout's `seq_staleness`, where it has one, to its staleness at `train_step`; return these."""
    values = [staleness_of(oldest_step(rollout, kind), train_step) for rollout in rollouts]
    set_staleness(rollouts, values, kind)
    return values


def set_staleness(rollouts: Sequence[Any], values: Sequence[int], kind: RolloutType) -> None:
    """Set every rollout's `seq_staleness`, where it has one and it is another."""
    for rollout, staleness in zip(rollouts, values, strict=True):
        if kind.get(rollout, "seq_staleness") != staleness:
            kind.set(rollout, "seq_staleness", staleness)


def group_staleness(rollouts: Sequence[Any], kind: RolloutType) -> int:
    """Return a group's staleness: the largest `seq_staleness` of its rollouts (0 for rollouts without that field)."""
    return max(_own_staleness(rollout, kind) for rollout in rollouts)


def _own_staleness(rollout: Any, kind: RolloutType) -> int:
    return int(kind.get(rollout, "seq_staleness", 0) or 0)


def find_expired(
    rollouts: Sequence[Any],
    rule: ExpiryRule,
    train_step: int | None,
    kind: RolloutType,
    staleness: Sequence[int] | None = None,
) -> list[int]:
    """Return the indices of the rollouts that have expired, by their `staleness` (default: their `seq_staleness`)."""
    if not rule.active:
        return []
    if staleness is None:
        staleness = [_own_staleness(rollout, kind) for rollout in rollouts]
    tokenwise = rule.token_stale_threshold is not None
    newest = newest_trainable_steps(rollouts, kind) if tokenwise else [None] * len(rollouts)
    return [
        index
        for index, (value, step) in enumerate(zip(staleness, newest, strict=True))
        if rule.expires(value, step, train_step)
    ]


def expired_before(rollouts: Sequence[Any], kind: RolloutType) -> list[int]:
    """Return the indices of the rollouts whose status is EXPIRED: at a train step they expire, whatever their age."""
    return [index for index, rollout in enumerate(rollouts) if kind.status(rollout) == Status.EXPIRED]


def has_response(rollout: Any, kind: RolloutType) -> bool:
    """Return whether there is anything left of a response, which `reset_response` would remove."""
    if any(kind.get(rollout, name) is not None for name in _RESET_TO_NONE):
        return True
    values = (kind.get(rollout, name) for name in ("response", *_RESET_TO_EMPTY))
    return any(value is not None and len(value) > 0 for value in values)


def reset_response(rollout: Any, kind: RolloutType) -> None:
    """Mark a rollout EXPIRED and remove its response, so that its prompt can be generated again.

    Prompt, message, mm_info and extra_fields stay, and so does `seq_staleness`; `tokens` becomes a copy of
    `prompt_ids`, or empty where the class has none.
    """
    kind.set_status(rollout, Status.EXPIRED)
    if kind.has(rollout, "response"):
        kind.set(rollout, "response", "")
    for name in _RESET_TO_EMPTY:
        if kind.has(rollout, name):
            kind.set(rollout, name, [])
    for name in _RESET_TO_NONE:
        if kind.has(rollout, name):
            kind.set(rollout, name, None)
    if kind.has(rollout, "tokens"):
        kind.set(rollout, "tokens", fields.copied(kind.get(rollout, "prompt_ids", ())))
