"""The policy of the demo, its training by Group Relative Policy Optimization, and the engine that samples from it.

The policy is log-linear: the logits of the next token are the sum of two rows of `weights`, one for the place in the
answer and the token before it, which all prompts share, and one for these and the prompt.

GRPO is that of Shao et al. 2024 (arXiv:2402.03300), equation 3, without the KL term, plus a bonus on the entropy. The
ratios are those to the probabilities at sampling, which the rollouts have: data that is a few steps stale is weighted
correctly, and clipped where the policy has moved away from it. The optimizer is Adagrad (Duchi et al. 2011).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replaybuf.values.rollouts.rollout import RolloutState, Status

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

CHARACTERS = "0123456789+-="
END = len(CHARACTERS)  # ends an answer
VOCABULARY_SIZE = END + 1
MAX_RESPONSE_TOKENS = 3  # "12" and END
#: Seconds per token: the median over prompts, and the standard deviation of its logarithm.
TOKEN_SECONDS, TOKEN_SPREAD = 0.003, 1.0

RIGHT_REWARD, WELL_FORMED_REWARD = 1.0, 0.1
CLIP_LOW, CLIP_HIGH = 0.3, 0.4
ENTROPY_BONUS = 0.1
LEARNING_RATE = 1.0

_PAIRS = [(a, b) for a in range(2, 10) for b in range(2, a + 1)]
PROMPTS = (*(f"{a}+{b}=" for a, b in _PAIRS), *(f"{a + b}-{a}=" for a, b in _PAIRS))


def answer_of(prompt: str) -> int:
    """Return the right answer, worked out from the text of the prompt."""
    return sum(map(int, re.findall(r"[+-]?\d+", prompt)))


def encode(text: str) -> list[int]:
    """Return the token of each character."""
    return [CHARACTERS.index(character) for character in text]


def decode(ids: Sequence[int]) -> str:
    """Return the text of tokens, without END."""
    return "".join(CHARACTERS[token] for token in ids if token != END)


def is_over(ids: Sequence[int]) -> bool:
    """Return whether an answer is complete: ended, or cut off after MAX_RESPONSE_TOKENS."""
    return len(ids) == MAX_RESPONSE_TOKENS or END in ids


def verify(prompt: str, ids: Sequence[int]) -> float:
    """Return the reward of an answer: 1 for the right number, 0.1 for another one, 0 for anything else.

    A number consists of digits and END, without leading zeros.
    """
    text = decode(ids)
    if ids[-1] != END or not text.isdigit() or text != str(int(text)):
        return 0.0
    return RIGHT_REWARD if int(text) == answer_of(prompt) else WELL_FORMED_REWARD


def prompt_of(group: Sequence[RolloutState]) -> str:
    """Return the text of a group's prompt."""
    return str(group[0].message[0]["content"])


@dataclass(frozen=True)
class Prompts(Sequence[RolloutState]):
    """The first `size` prompts of an endless stream (all in random order, again and again), to be generated."""

    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(f"prompt {index} of {self.size}")
        epoch, place = divmod(index, len(PROMPTS))
        text = PROMPTS[_order(epoch)[place]]
        message = [{"role": "user", "content": text}]
        return RolloutState(message=message, prompt_ids=encode(text), data_source="arithmetic")


@lru_cache(maxsize=64)
def _order(epoch: int) -> IntArray:
    return np.random.default_rng(epoch).permutation(len(PROMPTS))


_PLACES = MAX_RESPONSE_TOKENS * (VOCABULARY_SIZE + 1)  # of an answer, with each token before it; or none, at its start


@dataclass(frozen=True)
class Policy:
    """`weights`, and `squares`, the sums of squared gradients by weight: float64 [rows, VOCABULARY_SIZE]."""

    weights: FloatArray
    squares: FloatArray

    @classmethod
    def create(cls) -> Policy:
        """Return a new policy, for which all tokens are equally likely."""
        shape = (_PLACES * (1 + len(PROMPTS)), VOCABULARY_SIZE)
        return cls(np.zeros(shape), np.full(shape, 1e-8))

    def log_probs(self, rows: IntArray) -> FloatArray:
        """Return the log-probabilities of the next token, float64 [N, VOCABULARY_SIZE], for `rows_of` N places."""
        logits = self.weights[rows].sum(axis=1)
        result: FloatArray = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        return result

    def train(self, groups: Sequence[Sequence[RolloutState]]) -> float:
        """Make one gradient ascent step. Return the mean reward of the batch."""
        rollouts = [rollout for group in groups for rollout in group]
        rewards = [np.array([rollout.reward for rollout in group]) for group in groups]
        lengths = np.array([len(rollout.response_ids) for rollout in rollouts])
        rows = np.concatenate([rows_of(prompt_of([rollout]), rollout.response_ids)[:-1] for rollout in rollouts])
        _, d_logits = objective(
            self.log_probs(rows),
            np.concatenate([rollout.response_ids for rollout in rollouts]),
            np.concatenate([rollout.logprobs for rollout in rollouts]),
            np.repeat(np.concatenate([advantages_of(group_rewards) for group_rewards in rewards]), lengths),
            np.repeat(1.0 / (len(rollouts) * lengths), lengths),
        )
        gradient = np.zeros_like(self.weights)
        np.add.at(gradient, rows, d_logits[:, None, :])
        self.squares[...] += gradient * gradient
        self.weights[...] += LEARNING_RATE * gradient / np.sqrt(self.squares)
        return float(np.mean(rewards))


def rows_of(prompt: str, ids: Sequence[int]) -> IntArray:
    """Return the rows of the weights for the token after each beginning of an answer: int64 [length + 1, 2]."""
    preceding = np.array([VOCABULARY_SIZE, *ids])
    shared = np.arange(len(preceding)) * (VOCABULARY_SIZE + 1) + preceding
    return np.stack([shared, shared + (1 + PROMPTS.index(prompt)) * _PLACES], axis=1)


def advantages_of(rewards: FloatArray) -> FloatArray:
    """Return (r - mean) / std of one group: float64 [rollouts]; all zero if the rewards are all the same."""
    result: FloatArray = (rewards - rewards.mean()) / max(rewards.std(), 1e-6)
    return result


def objective(
    log_probs: FloatArray, tokens: IntArray, behaviour: FloatArray, advantages: FloatArray, shares: FloatArray
) -> tuple[float, FloatArray]:
    """Return the objective of N tokens and its gradient on their logits: float64 [N, VOCABULARY_SIZE].

    `behaviour` are the log-probabilities by which the tokens were sampled, `shares` are 1 / (R |o_i|), and add up to 1.
    """
    probs, places = np.exp(log_probs), np.arange(len(tokens))
    ratio = np.exp(log_probs[places, tokens] - behaviour)
    unclipped = ratio * advantages
    clipped = np.clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages
    entropy = -(probs * log_probs).sum(axis=1)
    value = shares @ (np.minimum(unclipped, clipped) + ENTROPY_BONUS * entropy)
    # d ratio / d logits = ratio (onehot - probs), and nothing where the clipped term is the smaller;
    # d entropy / d logits = -probs (log_probs + entropy)
    pull = np.where(unclipped <= clipped, unclipped, 0.0)
    gradient = -pull[:, None] * probs - ENTROPY_BONUS * probs * (log_probs + entropy[:, None])
    gradient[places, tokens] += pull
    return float(value), shares[:, None] * gradient


_SECONDS, _TOKENS = 1, 2  # the purposes of a prompt's random numbers


class Engine:
    """An agent loop over a policy, of a made-up speed. `load` sets new weights."""

    def __init__(self, *, token_seconds: float = TOKEN_SECONDS) -> None:
        self._token_seconds = token_seconds
        self._paused = asyncio.Event()

    def load(self, policy: Policy, step: int) -> None:
        """Generate with the weights of train step `step` from now on."""
        self._policy, self._step = policy, step

    async def pause(self) -> None:
        """Interrupt generation: pending tokens are dropped."""
        self._paused.set()

    async def resume(self) -> None:
        """Resume generation."""
        self._paused.clear()

    async def generate_group(self, group: list[RolloutState], *, partial: bool) -> list[RolloutState]:
        """Generate the rollouts of a group in place: COMPLETED, or ABORTED after a pause."""
        policy, prompt, number = self._policy, prompt_of(group), int(group[0].group_id or 0)
        seconds = token_seconds(number, self._token_seconds)
        randoms = np.random.default_rng([number, _TOKENS, self._step]).random((len(group), MAX_RESPONSE_TOKENS))
        pending = {place: state for place, state in enumerate(group) if state.status != Status.COMPLETED}
        for state in pending.values():
            state.response_ids = [*map(int, state.response_ids)] if partial and state.response_ids is not None else []
            state.logprobs = [*map(float, state.logprobs)] if state.response_ids else []
        while (active := {n: state for n, state in pending.items() if not is_over(state.response_ids)}) and (
            await self._wait_for_token(seconds)
        ):
            rows = np.stack([rows_of(prompt, rollout.response_ids)[-1] for rollout in active.values()])
            for (place, state), log_probs in zip(active.items(), policy.log_probs(rows), strict=True):
                cumulative = np.exp(log_probs).cumsum()
                chance = randoms[place, len(state.response_ids)] * cumulative[-1]
                token = int(np.searchsorted(cumulative, chance, side="right"))
                state.response_ids.append(token)
                state.logprobs.append(float(log_probs[token]))
        for state in pending.values():
            _finish(state, prompt, state.response_ids)
        return group

    async def _wait_for_token(self, seconds: float) -> bool:
        """Wait for the time of a token. Return False as soon as generation is paused."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._paused.wait()
        return not self._paused.is_set()


def _finish(rollout: RolloutState, prompt: str, ids: list[int]) -> None:
    rollout.response, rollout.response_ids = decode(ids), np.array(ids, dtype=np.int32)
    rollout.logprobs, rollout.response_mask = np.array(rollout.logprobs, np.float32), np.ones(len(ids), np.int32)
    rollout.status = Status.COMPLETED if is_over(ids) else Status.ABORTED
    if rollout.status == Status.COMPLETED:
        rollout.finish_reason, rollout.reward = "stop" if ids[-1] == END else "length", verify(prompt, ids)


def token_seconds(number: int, median: float = TOKEN_SECONDS) -> float:
    """Return the seconds for each token of prompt `number`: log-normal over the prompts."""
    return float(np.random.default_rng([number, _SECONDS]).lognormal(np.log(max(median, 1e-300)), TOKEN_SPREAD))
