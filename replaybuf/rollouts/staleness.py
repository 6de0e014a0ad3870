"""The rules of staleness and expiry, as plain functions over a group of rollouts.

The *staleness* of a rollout at train step T is `T - min(response_model_steps) - 1`: the number of optimiser steps
between the weights that wrote its oldest token and the weights that it will train. A rollout without model steps has
staleness 0. The rules are those of InternLM xtuner's replay buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np

from replaybuf.checks import check_threshold
from replaybuf.rollouts import tensors
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.rollout_type import get_field, has_field, set_field
from replaybuf.rollouts.tensors import as_array, is_tensor

#: Only groups of these statuses expire; by default only they are refreshed.
EXPIRING_STATUSES = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)

_RESET_TO_EMPTY = ("response_ids", "logprobs", "response_model_steps")
_RESET_TO_NONE = ("routed_experts", "finish_reason", "response_mask", "reward", "error_msg")


@dataclass(frozen=True, slots=True)
class ExpiryRule:
    """When a rollout is too old to train on, counted in train steps.

    `stale_threshold` bounds the rollout's staleness, `token_stale_threshold` that of its freshest trainable token; None
    disables a bound. If `retryable`, an expired rollout loses its response and its group waits as EXPIRED to be
    generated again; otherwise the whole group is dropped.

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

    @property
    def active(self) -> bool:
        """Whether there is any bound."""
        return self.stale_threshold is not None or self.token_stale_threshold is not None


def staleness_of(oldest_step: int | None, train_step: int) -> int:
    """Return the staleness at `train_step` of a rollout with its oldest token from `oldest_step` (None: no steps)."""
    return 0 if oldest_step is None else train_step - oldest_step - 1


def oldest_step(rollout: Any) -> int | None:
    """Return the oldest model step of the rollout's response, or None."""
    steps = as_array(get_field(rollout, "response_model_steps"))
    if steps is None or len(steps) == 0:
        return None
    return int(steps.min() if isinstance(steps, np.ndarray) else min(steps))


def newest_trainable_steps(rollouts: Sequence[Any]) -> list[int | None]:
    """Return for each rollout the newest model step among its trainable tokens (response mask set).

    None where token-level expiry doesn't apply: the group has `input_ids` or `labels`, or the rollout has no response,
    no model steps, or no trainable token in its mask.
    """
    agentic = any(get_field(r, "input_ids") is not None or get_field(r, "labels") is not None for r in rollouts)
    return [None if agentic else _newest_trainable_step(rollout) for rollout in rollouts]


def _newest_trainable_step(rollout: Any) -> int | None:
    steps = as_array(get_field(rollout, "response_model_steps"))
    response_ids = get_field(rollout, "response_ids")
    if steps is None or len(steps) == 0 or response_ids is None or len(response_ids) == 0:
        return None
    mask = as_array(get_field(rollout, "response_mask"))
    if mask is None:
        return _highest(steps)
    if isinstance(steps, np.ndarray) or isinstance(mask, np.ndarray):
        length = min(len(steps), len(mask))
        return _highest(np.asarray(steps)[:length][np.asarray(mask)[:length] != 0])
    return max(map(int, compress(steps, mask)), default=None)


def _highest(steps: Any) -> int | None:
    if len(steps) == 0:
        return None
    return int(steps.max() if isinstance(steps, np.ndarray) else max(steps))


def fill_model_steps(rollout: Any, model_step: int) -> None:
    """Extend `response_model_steps` with `model_step` up to the length of `response_ids`; existing steps stay.

    If there were none, they become a list, or an int32 array or tensor where `response_ids` is an array or tensor.
    """
    response_ids = get_field(rollout, "response_ids")
    wanted = 0 if response_ids is None else len(response_ids)
    steps = get_field(rollout, "response_model_steps")
    missing = wanted - (0 if steps is None else len(steps))
    if missing <= 0:
        return
    filled: Any
    if is_tensor(steps):
        filled = tensors.extended(steps, missing, model_step)
    elif steps is None and is_tensor(response_ids):
        filled = tensors.repeated(model_step, missing, like=response_ids)
    elif isinstance(steps, np.ndarray):
        filled = np.concatenate([steps, np.full(missing, model_step, dtype=steps.dtype)])
    elif steps is None and isinstance(response_ids, np.ndarray):
        filled = np.full(missing, model_step, dtype=np.int32)
    else:
        filled = [*(steps or ()), *([model_step] * missing)]
    set_field(rollout, "response_model_steps", filled)


def refresh_group(rollouts: Sequence[Any], train_step: int) -> None:
    """Set every rollout's `seq_staleness` to its staleness at `train_step`."""
    for rollout in rollouts:
        staleness = staleness_of(oldest_step(rollout), train_step)
        if get_field(rollout, "seq_staleness") != staleness:
            set_field(rollout, "seq_staleness", staleness)


def group_staleness(rollouts: Sequence[Any]) -> int:
    """Return a group's staleness: the largest `seq_staleness` of its rollouts (0 for rollouts without that field)."""
    return max(int(get_field(rollout, "seq_staleness", 0) or 0) for rollout in rollouts)


def find_expired(rollouts: Sequence[Any], rule: ExpiryRule, train_step: int | None) -> list[int]:
    """Return the indices of the rollouts that have expired under the rule, by their own `seq_staleness`."""
    if not rule.active:
        return []
    tokenwise = rule.token_stale_threshold is not None
    newest = newest_trainable_steps(rollouts) if tokenwise else [None] * len(rollouts)
    return [
        index
        for index, rollout in enumerate(rollouts)
        if rule.expires(int(get_field(rollout, "seq_staleness", 0) or 0), newest[index], train_step)
    ]


def reset_response(rollout: Any) -> None:
    """Mark a rollout EXPIRED and remove its response, so that its prompt can be generated again.

    Prompt, message, mm_info and extra_fields stay, and so does `seq_staleness`; `tokens` becomes a copy of
    `prompt_ids`.
    """
    set_field(rollout, "status", Status.EXPIRED)
    if has_field(rollout, "response"):
        set_field(rollout, "response", "")
    for name in _RESET_TO_EMPTY:
        if has_field(rollout, name):
            set_field(rollout, name, [])
    for name in _RESET_TO_NONE:
        if has_field(rollout, name):
            set_field(rollout, name, None)
    if has_field(rollout, "tokens"):
        set_field(rollout, "tokens", tensors.copied(get_field(rollout, "prompt_ids")))
