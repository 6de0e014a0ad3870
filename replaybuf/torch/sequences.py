"""Rollouts as sequences of tokens with what a loss needs of each token; numpy only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from replaybuf.errors import RolloutError
from replaybuf.rollouts.marks import reward_value
from replaybuf.rollouts.tensors import as_array
from replaybuf.storage.values import StorageItem

#: Gives each rollout of a group its advantage, from their rewards.
Advantages: TypeAlias = Callable[[Sequence[float]], Sequence[float]]

#: Our names of the fields that are read.
FIELDS = ("prompt_ids", "response_ids", "response_mask", "logprobs", "reward")

# Where groups of equal rewards have no spread to divide by.
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt and its response, n tokens in all.

    `input_ids` is int64 [n]. `loss_mask` is bool [n]: the tokens to train on, none of which is in the prompt.
    `logprobs` is float32 [n]: of each token, by the policy that generated it, 0 in the prompt; None if the rollout has
    none. `advantages` is float32 [n]: the rollout's in all its response tokens, 0 in the prompt. `uid` is that of the
    group.
    """

    uid: int
    input_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32] | None
    advantages: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.input_ids)


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Return (reward - mean) / (standard deviation + 1e-6) of a group: GRPO's (Shao et al., "DeepSeekMath", 2024)."""
    values = np.asarray(rewards, dtype=np.float64)
    normal: list[float] = ((values - values.mean()) / (values.std() + _EPSILON)).tolist()
    return normal


def sequences(
    items: Iterable[StorageItem[Any]],
    *,
    advantages: Advantages = group_advantages,
    fields: Mapping[str, str | None] | None = None,
) -> list[TokenSequence]:
    """Return the rollouts of all groups, in order, as sequences.

    They need `prompt_ids`, `response_ids` and `reward`, and may have `logprobs` and `response_mask` (0 or 1), each as
    long as the response; `fields` gives the names where they have others, as in the config. Raises RolloutError, naming
    the group and the rollout, for what is missing or doesn't fit.
    """
    names = {name: (fields or {}).get(name, name) for name in FIELDS}
    made = []
    for item in items:
        rewards = [_reward(item, number, _value(rollout, names["reward"])) for number, rollout in enumerate(item.item)]
        given = list(advantages(rewards))
        if len(given) != len(rewards):
            raise RolloutError(
                f"group {item.uid}: advantages gave {len(given)} numbers for its {len(rewards)} rollouts"
            )
        for number, (rollout, advantage) in enumerate(zip(item.item, given, strict=True)):
            values = {name: _value(rollout, own) for name, own in names.items()}
            made.append(_sequence(item.uid, f"group {item.uid}, rollout {number}", values, advantage))
    return made


def _value(rollout: Any, name: str | None) -> Any:
    if name is None:
        return None
    return rollout.get(name) if isinstance(rollout, Mapping) else getattr(rollout, name, None)


def _reward(item: StorageItem[Any], number: int, given: Any) -> float:
    reward = reward_value(given)
    if reward is None:
        raise RolloutError(
            f"group {item.uid}, rollout {number} has no reward: expected a finite number, got {given!r:.50}"
        )
    return reward


def _sequence(uid: int, where: str, values: Mapping[str, Any], advantage: float) -> TokenSequence:
    prompt = _row(where, "prompt_ids", values["prompt_ids"], np.int64)
    response = _row(where, "response_ids", values["response_ids"], np.int64)
    if prompt is None or response is None:
        raise RolloutError(f"{where} has no {'prompt_ids' if prompt is None else 'response_ids'}")
    mask = _row(where, "response_mask", values["response_mask"], np.bool_, len(response))
    logprobs = _row(where, "logprobs", values["logprobs"], np.float32, len(response))
    ahead = len(prompt)
    return TokenSequence(
        uid,
        np.concatenate([prompt, response]),
        np.concatenate([np.zeros(ahead, np.bool_), np.ones(len(response), np.bool_) if mask is None else mask]),
        None if logprobs is None else np.concatenate([np.zeros(ahead, np.float32), logprobs]),
        np.concatenate([np.zeros(ahead, np.float32), np.full(len(response), advantage, np.float32)]),
    )


def _row(where: str, name: str, given: Any, dtype: type[np.generic], length: int | None = None) -> Any:
    """Return a field as an array of one dimension, None where it is None. Raises RolloutError."""
    if given is None:
        return None
    try:
        row = np.asarray(as_array(given)).astype(dtype)
    except (TypeError, ValueError) as error:
        raise RolloutError(f"{where}: {name} isn't a row of numbers: {error}") from error
    if row.ndim != 1:
        raise RolloutError(f"{where}: {name} has the shape {row.shape}; expected one dimension")
    if length is not None and len(row) != length:
        raise RolloutError(f"{where}: {name} has {len(row)} numbers, and response_ids {length}")
    return row
