"""The rules of staleness, expiry and model steps, as plain functions of a group of rollouts.

The *staleness* of a rollout at train step T is `T - min(response_model_steps) - 1`: the number of optimiser steps
between the weights that wrote its oldest token and the weights that it will train. A rollout without model steps has
staleness 0. The rules are those of InternLM xtuner's replay buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replaybuf.common.checks import check_threshold
from replaybuf.values.rollouts import rewards
from replaybuf.values.rollouts.group_fields import GroupFields, fields_of, is_agentic, is_text, step_ranges
from replaybuf.values.rollouts.rewards import as_array, is_tensor
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.rollout_type import RolloutType

#: Only groups of these statuses expire; by default only they are refreshed.
EXPIRING_STATUSES = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)

_RESET_TO_EMPTY = ("response_ids", "logprobs", "response_model_steps")
_RESET_TO_NONE = ("routed_experts", "finish_reason", "response_mask", "reward", "error_msg")


@dataclass(frozen=True, slots=True)
class ExpiryRule:
    """Staleness bounds, in train steps, from which rollouts expire.

    `stale_threshold` bounds the rollout's staleness, `token_stale_threshold` the staleness of each token: tokens at or
    over it are masked out, and the rollout expires when none is left. None disables a bound. If `retryable`, an expired
    rollout loses its response and its group waits as EXPIRED to be generated again; else the whole group is dropped.

    Raises InputError, a ValueError, when a threshold isn't positive.
    """

    stale_threshold: int | None = None
    token_stale_threshold: int | None = None
    retryable: bool = True

    def __post_init__(self) -> None:
        for name in ("stale_threshold", "token_stale_threshold"):
            object.__setattr__(self, name, check_threshold(getattr(self, name), name))

    def expires(self, staleness: int, newest_step: int | None, train_step: int | None) -> bool:
        """Return whether a rollout of this staleness expires, its newest trainable token being from `newest_step`."""
        if self.stale_threshold is not None and staleness >= self.stale_threshold:
            return True
        if self.token_stale_threshold is None or newest_step is None or train_step is None:
            return False
        return train_step - newest_step - 1 >= self.token_stale_threshold

    def masked_through(self, train_step: int | None) -> int | None:
        """Return the newest model step whose tokens are masked out at `train_step`; None without a token bound."""
        if self.token_stale_threshold is None or train_step is None:
            return None
        return train_step - 1 - self.token_stale_threshold

    @property
    def active(self) -> bool:
        """Whether there is any bound."""
        return self.stale_threshold is not None or self.token_stale_threshold is not None


#: The rule of groups that don't expire.
NO_RULE = ExpiryRule()


def staleness_of(oldest_step: int | None, train_step: int) -> int:
    """Return the staleness at `train_step` of a rollout whose oldest token is from `oldest_step` (None: no steps)."""
    return 0 if oldest_step is None else train_step - oldest_step - 1


def mask_stale_tokens(rollouts: Sequence[Any], through: int, kind: RolloutType) -> None:
    """Clear `response_mask` for the tokens of a group whose model step isn't after `through`, in place.

    A response without a mask gets one if any of its tokens is that old: a list, or an int32 array if `response_ids` is
    an array. A token without a model step counts as old as the oldest of its response. Rollouts aren't changed if
    token-level expiry doesn't apply, or if no trainable token would be left, since those expire.
    """
    for rollout, (oldest, newest) in zip(rollouts, step_ranges(fields_of(rollouts, kind)), strict=True):
        if newest is not None and oldest is not None and oldest <= through < newest:
            _mask_rollout(rollout, through, kind)


def _mask_rollout(rollout: Any, through: int, kind: RolloutType) -> None:
    response_ids, mask = kind.get(rollout, "response_ids"), kind.get(rollout, "response_mask")
    stale = np.ones(len(response_ids if mask is None else mask), dtype=bool)
    steps = np.asarray(as_array(kind.get(rollout, "response_model_steps")))[: len(stale)]
    stale[: len(steps)] = steps <= through
    masked: Any
    if is_tensor(mask) or (mask is None and is_tensor(response_ids)):
        masked = rewards.copied(mask) if is_tensor(mask) else rewards.repeated(1, len(stale), like=response_ids)
        masked[np.flatnonzero(stale).tolist()] = 0
    elif mask is None:
        fresh = (~stale).astype(np.int32)
        masked = fresh if isinstance(response_ids, np.ndarray) else fresh.tolist()
    elif isinstance(mask, np.ndarray):
        masked = mask.copy()
        masked[stale] = 0
    else:
        values = [type(value)() if old else value for value, old in zip(mask, stale.tolist(), strict=True)]
        masked = tuple(values) if isinstance(mask, tuple) else values
    kind.set(rollout, "response_mask", masked)


def find_expired(group: GroupFields, rule: ExpiryRule, train_step: int | None, staleness: Sequence[int]) -> list[int]:
    """Return the indices of the rollouts that have expired, given the staleness of each."""
    if not rule.active:
        return []
    tokenwise = rule.token_stale_threshold is not None
    newest = [step for _, step in step_ranges(group)] if tokenwise else [None] * len(staleness)
    return [
        index
        for index, (value, step) in enumerate(zip(staleness, newest, strict=True))
        if rule.expires(value, step, train_step)
    ]


def expired_before(rollouts: Sequence[Any], kind: RolloutType) -> list[int]:
    """Return the indices of rollouts with status EXPIRED, which expire at any train step, whatever their age."""
    return [index for index, rollout in enumerate(rollouts) if kind.status(rollout) == Status.EXPIRED]


def has_response(rollout: Any, kind: RolloutType) -> bool:
    """Return whether the rollout has any part of a response that `reset_response` would remove."""
    if any(kind.get(rollout, name) is not None for name in _RESET_TO_NONE):
        return True
    return not all(_is_empty(kind.get(rollout, name)) for name in ("response", *_RESET_TO_EMPTY))


def _is_empty(value: Any) -> bool:
    try:
        return len(value) == 0
    except TypeError:  # of dicts, anything may be the response
        return value is None


def reset_response(rollout: Any, kind: RolloutType) -> None:
    """Mark a rollout EXPIRED and remove its response, so that its prompt can be generated again.

    Prompt, message, mm_info, extra_fields and `seq_staleness` are kept; `tokens` becomes a copy of `prompt_ids`, or
    empty if the class has none.
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
        kind.set(rollout, "tokens", rewards.copied(kind.get(rollout, "prompt_ids", ())))


# Model steps: the versions of the weights that wrote the tokens of a response


def undated(group: GroupFields) -> int | None:
    """Return the index of the first rollout with trainable tokens but without model steps, or None."""
    if is_agentic(group):
        return None
    for index, (fields, (oldest, _)) in enumerate(zip(group, step_ranges(group), strict=True)):
        if fields.response_ids is None or len(fields.response_ids) == 0 or oldest is not None:
            continue
        if fields.response_mask is None or np.any(np.asarray(as_array(fields.response_mask)) != 0):
            return index
    return None


def unmatched(group: GroupFields) -> int | None:
    """Return the index of the first rollout with model steps beyond its mask, or None.

    Steps and mask then belong to different tokens, so that stale tokens can't be determined.
    """
    if is_agentic(group):
        return None
    for index, fields in enumerate(group):
        mask, steps, tokens = fields.response_mask, fields.response_model_steps, fields.response_ids
        complete = mask is not None and steps is not None and tokens is not None
        if complete and len(steps) > len(mask) and len(tokens) > 0:
            return index
    return None


def date_responses(
    rollouts: Sequence[Any], group: GroupFields, model_step: int, kind: RolloutType, *, texts: bool = True
) -> None:
    """Extend `response_model_steps` with `model_step` up to the length of `response_ids`; existing steps are kept.

    New steps are a list, or an int32 array or tensor if `response_ids` is an array or tensor. With `texts`, text
    responses without token ids get one step, and RolloutError is raised for a class with neither.
    """
    late: list[int] = []
    for index, fields in enumerate(group):
        tokens, steps = 0 if fields.response_ids is None else len(fields.response_ids), fields.response_model_steps
        if not tokens and texts and is_text(fields.response):
            tokens = 1
        elif not tokens and texts and fields.response is None and not kind.has(rollouts[index], "response"):
            feature = "model_step of a rollout that has no 'response'"
            kind.require(rollouts[index], ("response_ids",), feature)
        existing = 0 if steps is None else len(steps)
        if tokens > existing:
            fields.response_model_steps = _extend_steps(steps, fields.response_ids, tokens - existing, model_step)
            fields.dated = existing == 0
            late.append(index)
    if late:
        filled = [group[index].response_model_steps for index in late]
        stored = kind.set_all([rollouts[index] for index in late], "response_model_steps", filled)
        for index, steps in zip(late, stored):
            fields = group[index]
            fields.dated = fields.dated and steps is fields.response_model_steps
            fields.response_model_steps = steps


def _extend_steps(steps: Any, response_ids: Any, missing: int, model_step: int) -> Any:
    """Return model steps with so many more."""
    if steps is None and isinstance(response_ids, np.ndarray):
        return _repeat_step(model_step, missing)
    if isinstance(steps, np.ndarray):
        return np.concatenate([steps, np.full(missing, model_step, dtype=steps.dtype)])
    if is_tensor(steps):
        return rewards.extended(steps, missing, model_step)
    if steps is None and is_tensor(response_ids):
        return rewards.repeated(model_step, missing, like=response_ids)
    return [*(steps or ()), *([model_step] * missing)]


def _repeat_step(step: int, times: int) -> npt.NDArray[np.int32]:
    """Return an int32 array that repeats one step. Raises OverflowError when it doesn't fit.

    `np.full` releases the GIL for more than 500 items, and reacquiring it takes longer than filling.
    """
    return np.frombuffer(bytearray(step.to_bytes(4, sys.byteorder, signed=True)) * times, np.int32)
