"""What a rollout worker makes: groups of sampled, verified answers to one prompt."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replaybuf.demo.arithmetic import IntArray, Prompt, decode, finish_reason, verify
from replaybuf.demo.policy import Policy
from replaybuf.rollout import RolloutState, Status

GROUP_SIZE = 8


def generate_group(
    policy: Policy,
    rng: np.random.Generator,
    prompt: Prompt,
    *,
    prompt_repeat_k: int = GROUP_SIZE,
    temperature: float = 1.0,
) -> list[RolloutState]:
    """`prompt_repeat_k` finished rollouts of one prompt; `put(model_step=...)` adds which weights they come from."""
    ids = prompt.ids
    responses, log_probs = policy.sample([ids] * prompt_repeat_k, rng, temperature)
    return [_rollout(prompt, ids, *answer) for answer in zip(responses, log_probs, strict=True)]


def prompt_of(group: list[RolloutState]) -> Prompt:
    """The prompt of a group, for example of an expired one that is to be generated again."""
    return Prompt(decode(group[0].prompt_ids))


def _rollout(
    prompt: Prompt, prompt_ids: IntArray, response_ids: IntArray, log_probs: NDArray[np.float32]
) -> RolloutState:
    return RolloutState(
        message=prompt.message,
        prompt_ids=prompt_ids,
        tokens=np.concatenate([prompt_ids, response_ids]),
        num_tokens=len(prompt_ids) + len(response_ids),
        data_source="arithmetic",
        response=decode(response_ids.tolist()),
        response_ids=response_ids,
        logprobs=log_probs,
        response_mask=np.ones(len(response_ids), dtype=np.int32),
        finish_reason=finish_reason(response_ids),
        reward={"score": verify(prompt, response_ids)},
        status=Status.COMPLETED,
    )
