"""The fields that puts look at, read once for each rollout, and the range of model steps of each response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final

import numpy as np

from replaybuf.values.rollouts.rewards import as_array
from replaybuf.values.rollouts.rollout_type import RolloutType


@dataclass(slots=True)
class RolloutFields:
    """The values of the fields of a rollout that puts look at; None for a missing one.

    `dated` says that all tokens of the response were given the same model step in this put. `steps` is what
    `step_ranges` has found.
    """

    status: Any
    rollout_id: Any
    seq_staleness: Any
    prompt_ids: Any
    response_ids: Any
    response: Any
    finish_reason: Any
    reward: Any
    error_msg: Any
    logprobs: Any
    response_mask: Any
    response_model_steps: Any
    input_ids: Any
    labels: Any
    dated: bool = False
    steps: tuple[int | None, int | None] | None = None


#: The fields of each rollout of a group.
GroupFields = Sequence[RolloutFields]


def fields_of(rollouts: Sequence[Any], kind: RolloutType) -> GroupFields:
    """Return the fields of rollouts."""
    return [RolloutFields(*values) for values in kind.values_of(rollouts, _NAMES)]


def is_agentic(group: GroupFields) -> bool:
    """Return whether token-level expiry doesn't apply, because the group has input ids or labels."""
    return any(fields.input_ids is not None or fields.labels is not None for fields in group)


def step_ranges(group: GroupFields) -> list[tuple[int | None, int | None]]:
    """Return the oldest and the newest trainable model step of each rollout, each of which may be None.

    There is no newest one if token-level expiry doesn't apply (`is_agentic`), or the rollout has no response, no model
    steps, or no trainable token in its mask. A text response without token ids has its oldest model step.

    Raises TypeError, ValueError, OverflowError or LookupError for values that are no steps, or no mask.
    """
    agentic: bool | None = None
    for fields in group:
        if fields.steps is None:
            agentic = is_agentic(group) if agentic is None else agentic
            fields.steps = _step_range(fields, agentic)
    return [fields.steps for fields in group]  # type: ignore[misc]


#: Smaller arrays are compared as bytes, which is faster than comparing numbers.
_LARGE_BYTES: Final = 16384
_NAMES: Final = RolloutFields.__slots__[:-2]


def length_of(tokens: Any) -> int:
    """Return the number of tokens; 0 for None, an array without dimensions, or a range beyond all memory."""
    try:
        return 0 if tokens is None else len(tokens)
    except (TypeError, OverflowError):
        return 0


def is_text(response: Any) -> bool:
    """Return whether a response is a text."""
    return isinstance(response, str) and response != ""


def _step_range(fields: RolloutFields, agentic: bool) -> tuple[int | None, int | None]:
    steps = fields.response_model_steps
    steps = steps if type(steps) is list else as_array(steps)
    if steps is None or len(steps) == 0:
        return None, None
    uniform = fields.dated or _are_same(steps)
    oldest = int(steps[0]) if uniform else int(steps.min() if isinstance(steps, np.ndarray) else min(steps))
    if agentic:
        return oldest, None
    if fields.response_ids is None or len(fields.response_ids) == 0:
        return oldest, oldest if is_text(fields.response) else None
    mask = fields.response_mask
    if mask is None:
        return oldest, oldest if uniform else _highest_step(steps)
    mask = as_array(mask)
    if uniform and len(mask) and mask[0]:
        return oldest, oldest
    return oldest, _newest_trainable(steps, mask, oldest)


def _are_same(steps: Any) -> bool:
    """Return whether all tokens have the same step, far faster than by minimum and maximum.

    Most responses are written by the same weights from beginning to end.
    """
    if type(steps) is np.ndarray:
        if steps.ndim != 1 or steps.nbytes > _LARGE_BYTES:
            return steps.ndim == 1 and bool((steps == steps[0]).all())
        raw, size = steps.tobytes(), steps.itemsize
        return raw[size:] == raw[:-size]
    return type(steps) is list and steps.count(steps[0]) == len(steps)


def _newest_trainable(steps: Any, mask: Any, oldest: int) -> int | None:
    if isinstance(steps, np.ndarray) or isinstance(mask, np.ndarray):
        length = min(len(steps), len(mask))
        newest = _highest_step(np.asarray(steps)[:length][np.asarray(mask)[:length] != 0])
    else:
        newest = max(map(int, compress(steps, mask)), default=None)
    if newest is None and np.any(np.asarray(mask[len(steps) :]) != 0):
        return oldest  # trainable tokens without a step count as old as the oldest
    return newest


def _highest_step(steps: Any) -> int | None:
    if len(steps) == 0:
        return None
    return int(steps.max() if isinstance(steps, np.ndarray) else max(steps))
