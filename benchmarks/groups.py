"""The groups that are put and taken: token fields of realistic kinds and lengths."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from replaybuf import RolloutState, Status
from replaybuf.codec.payload import Codec
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rollouts.staleness import fill_model_steps

CODEC = Codec(RolloutType(RolloutState))

#: Groups are put at this train step, so that those of model step s have the staleness TRAIN_STEP - s - 1.
TRAIN_STEP = 100
MODEL_STEP = 97

_RNG = np.random.default_rng(0)
_TOKENS = _RNG.integers(0, 150_000, 1 << 20).astype("i4")
_LOGPROBS = _RNG.normal(-1, 0.5, 1 << 20).astype("f4")
_PROMPT = [{"role": "user", "content": "A train leaves at 9:40 and arrives at 12:05. How long does it travel?"}]
_ids = itertools.count(1)


def small() -> list[RolloutState]:
    """Return a group of one rollout, 1 KB as stored, with lists of tokens."""
    return [_rollout(32, prompt=12, as_lists=True)]


def arrays(kilobytes: int = 100) -> list[RolloutState]:
    """Return a group of 8 rollouts whose token fields are int32 and float32 arrays."""
    return [_rollout(kilobytes * 5.9, prompt=48, as_lists=False) for _ in range(8)]


def lists(kilobytes: int = 100) -> list[RolloutState]:
    """Return a group of 8 rollouts whose token fields are lists."""
    return [_rollout(kilobytes * 6.1, prompt=48, as_lists=True) for _ in range(8)]


def lists_as_stored(kilobytes: int = 100) -> list[RolloutState]:
    """Return a group as `lists` does, with the model steps that put fills in."""
    group = lists(kilobytes)
    for rollout in group:
        fill_model_steps(rollout, MODEL_STEP, CODEC.rollout_type)
    return group


def payload(group: list[RolloutState], model_step: int = MODEL_STEP) -> bytes:
    """Return the bytes that the store keeps for a group."""
    for rollout in group:
        fill_model_steps(rollout, model_step, CODEC.rollout_type)
    return CODEC.encode(group)


def _rollout(length: float, *, prompt: int, as_lists: bool) -> RolloutState:
    length = int(length)
    number = next(_ids)
    start = number * 7919 % (len(_TOKENS) - length - prompt)
    tokens = _TOKENS[start : start + prompt + length].copy()
    fields: dict[str, Any] = {
        "prompt_ids": tokens[:prompt].copy(),
        "tokens": tokens,
        "response_ids": tokens[prompt:].copy(),
        "logprobs": _LOGPROBS[start : start + length].copy(),
        "response_mask": np.ones(length, "i4"),
    }
    if as_lists:
        fields = {name: array.tolist() for name, array in fields.items()}
    return RolloutState(
        rollout_id=number,
        group_id=number // 8,
        message=_PROMPT,
        num_tokens=prompt + length,
        data_source="gsm8k",
        response="It travels for two hours and 25 minutes.",
        finish_reason="stop",
        reward={"score": float(number % 2)},
        task_name="math",
        status=Status.COMPLETED,
        **fields,
    )
