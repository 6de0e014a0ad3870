"""The values of groups as plain dicts, with no library but numpy: the same for replaybuf and for every peer."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

_RNG = np.random.default_rng(0)
_TOKENS = _RNG.integers(0, 150_000, 1 << 20).astype("i4")
_LOGPROBS = _RNG.normal(-1, 0.5, 1 << 20).astype("f4")
_PROMPT = [{"role": "user", "content": "A train leaves at 9:40 and arrives at 12:05. How long does it travel?"}]
_ids = itertools.count(1)

#: The fields that hold a value for each token.
TOKEN_FIELDS = ("prompt_ids", "tokens", "response_ids", "logprobs", "response_mask")


def small(*, as_lists: bool = True) -> list[dict[str, Any]]:
    """Return a group of one rollout, 1 KB as stored."""
    return [_rollout(32, prompt=12, as_lists=as_lists)]


def arrays(kilobytes: int = 100) -> list[dict[str, Any]]:
    """Return a group of 8 rollouts whose token fields are int32 and float32 arrays."""
    return [_rollout(kilobytes * 5.9, prompt=48, as_lists=False) for _ in range(8)]


def lists(kilobytes: int = 100) -> list[dict[str, Any]]:
    """Return a group of 8 rollouts whose token fields are lists."""
    return [_rollout(kilobytes * 6.1, prompt=48, as_lists=True) for _ in range(8)]


def _rollout(length: float, *, prompt: int, as_lists: bool) -> dict[str, Any]:
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
    return {
        "rollout_id": number,
        "group_id": number // 8,
        "message": _PROMPT,
        "num_tokens": prompt + length,
        "data_source": "gsm8k",
        "response": "It travels for two hours and 25 minutes.",
        "finish_reason": "stop",
        "reward": {"score": float(number % 2)},
        "task_name": "math",
        **fields,
    }
