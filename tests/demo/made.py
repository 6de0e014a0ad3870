"""Groups as an engine makes them, without one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replaybuf.demo.arithmetic import MAX_RESPONSE_TOKENS, IntArray, Prompt
from replaybuf.demo.generation import GROUP_SIZE, Answers
from replaybuf.demo.policy import Policy
from replaybuf.rollouts.rollout import RolloutState


def new_group(prompt: Prompt, size: int = GROUP_SIZE, number: int = 0) -> list[RolloutState]:
    """Rollouts to be generated, as a sampler gives them."""
    return [
        RolloutState(
            message=prompt.message,
            prompt_ids=prompt.ids,
            group_id=number,
            rollout_id=f"{number}/{place}",
            response_ids=[],
        )
        for place in range(size)
    ]


def sample(
    policy: Policy, prompt: Prompt, rows: int, rng: np.random.Generator, temperature: float = 1.0
) -> list[tuple[IntArray, np.ndarray]]:
    """Whole answers, and the log-probabilities of their tokens."""
    answers, randoms = Answers(prompt.ids, rows), rng.random((rows, MAX_RESPONSE_TOKENS))
    while len(answers.unfinished):
        answers.extend(policy, randoms, temperature)
    return [answers.response(row) for row in range(rows)]


def generate_group(policy: Policy, rng: np.random.Generator, prompt: Prompt) -> list[RolloutState]:
    """A completed group."""
    group = new_group(prompt)
    answers, randoms = Answers.of(group, partial=True), rng.random((len(group), MAX_RESPONSE_TOKENS))
    while len(answers.unfinished):
        answers.extend(policy, randoms)
    answers.write(group)
    return group


def tokens_of(group: Sequence[RolloutState]) -> list[list[int]]:
    """The response tokens of each rollout."""
    return [list(rollout.response_ids) for rollout in group]
