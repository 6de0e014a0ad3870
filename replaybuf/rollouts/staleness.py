"""The rules of staleness, expiry and model steps, as plain functions of a group of rollouts.

The *staleness* of a rollout at train step T is `T - min(response_model_steps) - 1`: the number of optimiser steps
between the weights that wrote its oldest token and the weights that it will train. A rollout without model steps has
staleness 0. The rules are those of InternLM xtuner's replay buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaybuf.checks import check_threshold
from replaybuf.rollouts import fields
from replaybuf.rollouts.fields import as_array, is_tensor
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.rollout_type import RolloutType

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


def staleness_of(oldest_step: int | None, train_step: int) -> int:
    """Return the staleness at `train_step` of a rollout whose oldest token is from `oldest_step` (None: no steps)."""
    return 0 if oldest_step is None else train_step - oldest_step - 1


def mask_stale_tokens(rollouts: Sequence[Any], through: int, kind: RolloutType) -> None:
    """Clear `response_mask` for the tokens of a group whose model step isn't after `through`, in place.

    A response without a mask gets one if any of its tokens is that old: a list, or an int32 array if `response_ids` is
    an array. A token without a model step counts as old as the oldest of its response. Rollouts aren't changed if
    token-level expiry doesn't apply, or if no trainable token would be left, since those expire.
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
    """Set each rollout's `seq_staleness`, if it has that field, to its staleness at `train_step`; return the values."""
    values = [staleness_of(oldest_step(rollout, kind), train_step) for rollout in rollouts]
    set_staleness(rollouts, values, kind)
    return values


def set_staleness(rollouts: Sequence[Any], values: Sequence[int], kind: RolloutType) -> None:
    """Set each rollout's `seq_staleness`, if it has that field and the value differs."""
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
    """Return the indices of rollouts with status EXPIRED, which expire at any train step, whatever their age."""
    return [index for index, rollout in enumerate(rollouts) if kind.status(rollout) == Status.EXPIRED]


def has_response(rollout: Any, kind: RolloutType) -> bool:
    """Return whether the rollout has any part of a response that `reset_response` would remove."""
    if any(kind.get(rollout, name) is not None for name in _RESET_TO_NONE):
        return True
    values = (kind.get(rollout, name) for name in ("response", *_RESET_TO_EMPTY))
    return any(value is not None and len(value) > 0 for value in values)


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
        kind.set(rollout, "tokens", fields.copied(kind.get(rollout, "prompt_ids", ())))


# Model steps: the versions of the weights that wrote the tokens of a response

#: Smaller arrays are compared as bytes, which is faster than comparing numbers.
_LARGE = 16384


def oldest_step(rollout: Any, kind: RolloutType) -> int | None:
    """Return the oldest model step of the rollout's response, or None."""
    steps = kind.get(rollout, "response_model_steps")
    steps = steps if type(steps) is list else as_array(steps)
    if steps is None or len(steps) == 0:
        return None
    return int(steps[0]) if _are_same(steps) else _lowest(steps)


def newest_trainable_steps(rollouts: Sequence[Any], kind: RolloutType) -> list[int | None]:
    """Return for each rollout the newest model step among its trainable tokens (response mask set).

    None if token-level expiry doesn't apply: the group has `input_ids` or `labels`, or the rollout has no response, no
    model steps, or no trainable token in its mask. A text response without token ids has its oldest model step.
    """
    return [newest for _, newest in step_ranges([*map(kind.reader(STEP_FIELDS), rollouts)])]


#: The fields from which step ranges are computed.
STEP_FIELDS: Final = ("response_model_steps", "response_ids", "response_mask", "input_ids", "labels", "response")


def step_ranges(rollouts: Sequence[Sequence[Any]]) -> list[tuple[int | None, int | None]]:
    """Return the oldest and the newest trainable model step of each rollout of a group, given its STEP_FIELDS.

    As `oldest_step` and `newest_trainable_steps` do, in one pass. Further fields are ignored.
    """
    agentic = any(one[3] is not None or one[4] is not None for one in rollouts)
    return [_step_range(one[0], one[1], one[2], one[5], agentic) for one in rollouts]


def _is_empty(tokens: Any) -> bool:
    try:
        return len(tokens) == 0
    except OverflowError:  # a range with more numbers than any memory holds
        return False


def _step_range(
    steps: Any, response_ids: Any, mask: Any, response: Any, agentic: bool
) -> tuple[int | None, int | None]:
    steps = steps if type(steps) is list else as_array(steps)
    if steps is None or len(steps) == 0:
        return None, None
    same = _are_same(steps)
    oldest = int(steps[0]) if same else _lowest(steps)
    if agentic:
        return oldest, None
    if response_ids is None or _is_empty(response_ids):
        return oldest, oldest if _is_text(response) else None
    if mask is None:
        return oldest, oldest if same else _highest(steps)
    mask = as_array(mask)
    if same and len(mask) and mask[0]:
        return oldest, oldest
    return oldest, _newest_trainable(steps, mask, oldest)


def _are_same(steps: Any) -> bool:
    """Return whether all tokens have the same step, far faster than by minimum and maximum.

    Most responses are written by the same weights from beginning to end.
    """
    if type(steps) is np.ndarray:
        if steps.ndim != 1 or steps.nbytes > _LARGE:
            return steps.ndim == 1 and bool((steps == steps[0]).all())
        raw, size = steps.tobytes(), steps.itemsize
        return raw[size:] == raw[:-size]
    return type(steps) is list and steps.count(steps[0]) == len(steps)


def _lowest(steps: Any) -> int:
    return int(steps.min() if isinstance(steps, np.ndarray) else min(steps))


def _newest_trainable(steps: Any, mask: Any, oldest: int) -> int | None:
    if isinstance(steps, np.ndarray) or isinstance(mask, np.ndarray):
        length = min(len(steps), len(mask))
        newest = _highest(np.asarray(steps)[:length][np.asarray(mask)[:length] != 0])
    else:
        newest = max(map(int, compress(steps, mask)), default=None)
    if newest is None and np.any(np.asarray(mask[len(steps) :]) != 0):
        return oldest  # trainable tokens without a step count as old as the oldest
    return newest


def _agentic(rollouts: Sequence[Any], kind: RolloutType) -> bool:
    return any(kind.get(r, "input_ids") is not None or kind.get(r, "labels") is not None for r in rollouts)


def undated(rollouts: Sequence[Any], kind: RolloutType) -> int | None:
    """Return the index of the first rollout with trainable tokens but without model steps, or None."""
    if _agentic(rollouts, kind):
        return None
    for index, rollout in enumerate(rollouts):
        response_ids, mask = kind.get(rollout, "response_ids"), as_array(kind.get(rollout, "response_mask"))
        if response_ids is None or len(response_ids) == 0 or oldest_step(rollout, kind) is not None:
            continue
        if mask is None or np.any(np.asarray(mask) != 0):
            return index
    return None


def is_undated(rollout: Any, kind: RolloutType) -> bool:
    """Return whether a rollout, of a class that may have model steps, has response tokens without one."""
    tokens, steps = kind.get(rollout, "response_ids"), kind.get(rollout, "response_model_steps")
    if not kind.may_have("response_model_steps") or tokens is None or _is_empty(tokens):
        return False
    return len(tokens) > (0 if steps is None else len(steps))


def unmatched(rollouts: Sequence[Any], kind: RolloutType) -> int | None:
    """Return the index of the first rollout with model steps beyond its mask, or None.

    Steps and mask then belong to different tokens, so that stale tokens can't be determined.
    """
    if _agentic(rollouts, kind):
        return None
    for index, rollout in enumerate(rollouts):
        mask, steps = kind.get(rollout, "response_mask"), kind.get(rollout, "response_model_steps")
        if mask is not None and steps is not None and len(steps) > len(mask) and _has_tokens(rollout, kind):
            return index
    return None


def _has_tokens(rollout: Any, kind: RolloutType) -> bool:
    response_ids = kind.get(rollout, "response_ids")
    return response_ids is not None and not _is_empty(response_ids)


def _is_text(response: Any) -> bool:
    return isinstance(response, str) and response != ""


def _highest(steps: Any) -> int | None:
    if len(steps) == 0:
        return None
    return int(steps.max() if isinstance(steps, np.ndarray) else max(steps))


def fill_model_steps(rollout: Any, model_step: int, kind: RolloutType) -> None:
    """Extend `response_model_steps` with `model_step` up to the length of `response_ids`; existing steps are kept.

    New steps are a list, or an int32 array or tensor if `response_ids` is an array or tensor.
    """
    response_ids = kind.get(rollout, "response_ids")
    _extend(rollout, 0 if response_ids is None else len(response_ids), model_step, kind)


def date_response(rollout: Any, model_step: int, kind: RolloutType) -> None:
    """Fill the model steps as `fill_model_steps` does; a text response without token ids gets one step.

    Raises RolloutError for a class with neither.
    """
    response_ids = kind.get(rollout, "response_ids")
    tokens = 0 if response_ids is None else len(response_ids)
    if not tokens and _is_text(kind.get(rollout, "response")):
        tokens = 1
    elif not tokens and not kind.has(rollout, "response"):
        kind.require(rollout, ("response_ids",), "model_step of a rollout that has no 'response'")
    _extend(rollout, tokens, model_step, kind)


def _extend(rollout: Any, length: int, model_step: int, kind: RolloutType) -> None:
    """Extend the model steps of a rollout to this length."""
    steps = kind.get(rollout, "response_model_steps")
    missing = length - (0 if steps is None else len(steps))
    if missing <= 0:
        return
    response_ids = kind.get(rollout, "response_ids")
    filled: Any
    if is_tensor(steps):
        filled = fields.extended(steps, missing, model_step)
    elif steps is None and is_tensor(response_ids):
        filled = fields.repeated(model_step, missing, like=response_ids)
    elif isinstance(steps, np.ndarray):
        filled = np.concatenate([steps, np.full(missing, model_step, dtype=steps.dtype)])
    elif steps is None and isinstance(response_ids, np.ndarray):
        filled = _repeated(model_step, missing)
    else:
        filled = [*(steps or ()), *([model_step] * missing)]
    kind.set(rollout, "response_model_steps", filled)


def _repeated(step: int, times: int) -> npt.NDArray[np.int32]:
    """Return an int32 array that repeats one step. Raises OverflowError when it doesn't fit.

    `np.full` releases the GIL for more than 500 items, and reacquiring it takes longer than filling.
    """
    return np.frombuffer(bytearray(step.to_bytes(4, sys.byteorder, signed=True)) * times, np.int32)
