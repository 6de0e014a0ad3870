"""Model steps: which weights wrote the tokens of a response."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import compress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaybuf.rollouts import tensors
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rollouts.tensors import as_array, is_tensor

#: Comparing the bytes of smaller arrays is faster than comparing numbers.
_LARGE = 16384


def oldest_step(rollout: Any, kind: RolloutType) -> int | None:
    """Return the oldest model step of the rollout's response, or None."""
    steps = as_array(kind.get(rollout, "response_model_steps"))
    if steps is None or len(steps) == 0:
        return None
    return int(steps[0]) if _are_same(steps) else _lowest(steps)


def newest_trainable_steps(rollouts: Sequence[Any], kind: RolloutType) -> list[int | None]:
    """Return for each rollout the newest model step among its trainable tokens (response mask set).

    None where token-level expiry doesn't apply: the group has `input_ids` or `labels`, or the rollout has no response,
    no model steps, or no trainable token in its mask.
    """
    return [newest for _, newest in step_ranges([*map(kind.reader(STEP_FIELDS), rollouts)])]


#: The fields that model steps and their tokens are in.
STEP_FIELDS: Final = ("response_model_steps", "response_ids", "response_mask", "input_ids", "labels")


def step_ranges(rollouts: Sequence[Sequence[Any]]) -> list[tuple[int | None, int | None]]:
    """Return the oldest model step and the newest trainable one of each rollout of a group, given its STEP_FIELDS.

    As `oldest_step` and `newest_trainable_steps` do, in one pass. What follows these fields is passed over.
    """
    agentic = any(one[3] is not None or one[4] is not None for one in rollouts)
    return [_step_range(steps, None if agentic else ids, mask) for steps, ids, mask, *_ in rollouts]


def _step_range(steps: Any, response_ids: Any, mask: Any) -> tuple[int | None, int | None]:
    steps = as_array(steps)
    if steps is None or len(steps) == 0:
        return None, None
    same = _are_same(steps)
    oldest = int(steps[0]) if same else _lowest(steps)
    if response_ids is None or len(response_ids) == 0:
        return oldest, None
    if mask is None:
        return oldest, oldest if same else _highest(steps)
    mask = as_array(mask)
    if same and len(mask) and mask[0]:
        return oldest, oldest
    return oldest, _newest_trainable(steps, mask, oldest)


def _are_same(steps: Any) -> bool:
    """Return whether all tokens have the same step, which is far faster to find out than the lowest and the highest.

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
    """Return the index of the first rollout whose tokens should have a staleness but have no model steps, or None."""
    if _agentic(rollouts, kind):
        return None
    for index, rollout in enumerate(rollouts):
        response_ids, mask = kind.get(rollout, "response_ids"), as_array(kind.get(rollout, "response_mask"))
        if response_ids is None or len(response_ids) == 0 or oldest_step(rollout, kind) is not None:
            continue
        if mask is None or np.any(np.asarray(mask) != 0):
            return index
    return None


def unmatched(rollouts: Sequence[Any], kind: RolloutType) -> int | None:
    """Return the index of the first rollout with model steps beyond its mask, or None.

    Then the two don't belong to the same tokens, and it can't be told which of them are stale.
    """
    if _agentic(rollouts, kind):
        return None
    for index, rollout in enumerate(rollouts):
        mask, steps = kind.get(rollout, "response_mask"), kind.get(rollout, "response_model_steps")
        if mask is not None and steps is not None and len(steps) > len(mask):
            return index
    return None


def _highest(steps: Any) -> int | None:
    if len(steps) == 0:
        return None
    return int(steps.max() if isinstance(steps, np.ndarray) else max(steps))


def fill_model_steps(rollout: Any, model_step: int, kind: RolloutType) -> None:
    """Extend `response_model_steps` with `model_step` up to the length of `response_ids`; existing steps stay.

    If there were none, they become a list, or an int32 array or tensor where `response_ids` is an array or tensor.
    """
    response_ids = kind.get(rollout, "response_ids")
    wanted = 0 if response_ids is None else len(response_ids)
    steps = kind.get(rollout, "response_model_steps")
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
        filled = _repeated(model_step, missing)
    else:
        filled = [*(steps or ()), *([model_step] * missing)]
    kind.set(rollout, "response_model_steps", filled)


def _repeated(step: int, times: int) -> npt.NDArray[np.int32]:
    """Return an int32 array of one step. OverflowError when it is too large for that.

    `np.full` lets go of the interpreter lock for more than 500 items, and getting that back takes longer than filling.
    """
    return np.frombuffer(bytearray(step.to_bytes(4, sys.byteorder, signed=True)) * times, np.int32)
