"""The fields that puts look at, of a whole group at once, and the range of model steps of each response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from typing import Any, Final

import numpy as np

from replaybuf.errors import RolloutError
from replaybuf.values.rollouts.rewards import as_array
from replaybuf.values.rollouts.rollout_type import RolloutType


@dataclass(slots=True)
class GroupFields:
    """The values of some fields of a group: a sequence for each field, with a value of each rollout (None: missing).

    `dated` flags responses all of whose tokens were given the same model step in this put.
    """

    status: Sequence[Any]
    rollout_id: Sequence[Any]
    seq_staleness: Sequence[Any]
    prompt_ids: Sequence[Any]
    response_ids: Sequence[Any]
    response: Sequence[Any]
    finish_reason: Sequence[Any]
    reward: Sequence[Any]
    error_msg: Sequence[Any]
    logprobs: Sequence[Any]
    response_mask: Sequence[Any]
    response_model_steps: Sequence[Any]
    input_ids: Sequence[Any]
    labels: Sequence[Any]
    dated: list[bool] = field(default_factory=list)
    _ranges: list[tuple[int | None, int | None]] | None = None

    @classmethod
    def of(cls, rollouts: Sequence[Any], kind: RolloutType) -> GroupFields:
        """Return the fields of rollouts. Raises RolloutError when a property raises."""
        return cls(*(kind.columns(rollouts, _NAMES) if rollouts else [()] * len(_NAMES)))

    @property
    def agentic(self) -> bool:
        """Whether token-level expiry doesn't apply, because the group has input ids or labels."""
        return any(value is not None for value in (*self.input_ids, *self.labels))

    def ranges(self) -> list[tuple[int | None, int | None]]:
        """Return the oldest and the newest trainable model step of each rollout, each of which may be None.

        There is no newest one if token-level expiry doesn't apply (`agentic`), or the rollout has no response, no model
        steps, or no trainable token in its mask. A text response without token ids has its oldest model step.

        Raises TypeError, ValueError or OverflowError for values that are no steps.
        """
        if self._ranges is None:
            columns = self.response_model_steps, self.response_ids, self.response_mask, self.response
            dated = self.dated or repeat(False, len(self.status))
            self._ranges = [*map(_step_range, *columns, repeat(self.agentic), dated)]
        return self._ranges


#: Smaller arrays are compared as bytes, which is faster than comparing numbers.
_LARGE: Final = 16384
_NAMES: Final = tuple(GroupFields.__slots__[:14])


def refuse_none(name: str, column: Sequence[Any]) -> None:
    """Raise RolloutError if a list of numbers, or an array of objects, holds None."""
    for index, values in enumerate(column):
        if not isinstance(values, (list, tuple)) and not getattr(getattr(values, "dtype", None), "hasobject", False):
            continue
        try:
            if None not in values:  # a fraction of the time
                continue
        except Exception:  # some values can't be compared, such as arrays
            pass
        place = next((place for place, value in enumerate(values) if value is None), None)
        if place is not None:
            raise RolloutError(
                f"rollouts[{index}]: {name}[{place}] is None; give each of its {len(values)} tokens a number, or leave "
                f"{name} out"
            )


def is_text(response: Any) -> bool:
    """Return whether a response is a text."""
    return isinstance(response, str) and response != ""


def _step_range(
    steps: Any, response_ids: Any, mask: Any, response: Any, agentic: bool, same: bool
) -> tuple[int | None, int | None]:
    steps = steps if type(steps) is list else as_array(steps)
    if steps is None or len(steps) == 0:
        return None, None
    same = same or _are_same(steps)
    oldest = int(steps[0]) if same else int(steps.min() if isinstance(steps, np.ndarray) else min(steps))
    if agentic:
        return oldest, None
    if response_ids is None or len(response_ids) == 0:
        return oldest, oldest if is_text(response) else None
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


def _newest_trainable(steps: Any, mask: Any, oldest: int) -> int | None:
    if isinstance(steps, np.ndarray) or isinstance(mask, np.ndarray):
        length = min(len(steps), len(mask))
        newest = _highest(np.asarray(steps)[:length][np.asarray(mask)[:length] != 0])
    else:
        newest = max(map(int, compress(steps, mask)), default=None)
    if newest is None and np.any(np.asarray(mask[len(steps) :]) != 0):
        return oldest  # trainable tokens without a step count as old as the oldest
    return newest


def _highest(steps: Any) -> int | None:
    if len(steps) == 0:
        return None
    return int(steps.max() if isinstance(steps, np.ndarray) else max(steps))
