"""The policy of the demo, and its training by Group Relative Policy Optimization.

The policy is log-linear: the logits of the next token are the sum of two rows of `weights`, one for the place in the
answer and the token before it, which all prompts share, and one for these and the prompt.

GRPO is that of Shao et al. 2024 (arXiv:2402.03300), section 4.1. A rollout's advantage is its reward against those of
its group, A = (r - mean) / std, the same for all its tokens, and the objective to be raised is equation 3 without the
KL term (there is no reference model),

    J = 1/R sum_i 1/|o_i| sum_t min(ratio A, clip(ratio, 1 - low, 1 + high) A),    ratio = pi(o_t) / pi_behaviour(o_t),

over the R rollouts of a batch, plus a bonus on the entropy of pi. `pi_behaviour` are the probabilities at sampling,
stored in the rollout: data that is a few steps stale is weighted correctly, and clipped where the policy has moved away
from it. The optimizer is Adagrad (Duchi et al. 2011), with larger steps for rarely used rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from replaybuf.rollouts.rollout import RolloutState

CHARACTERS = "0123456789+-="
END = len(CHARACTERS)  # ends an answer
VOCABULARY_SIZE = END + 1
MAX_RESPONSE_TOKENS = 3  # "12" and END

RIGHT_REWARD, WELL_FORMED_REWARD = 1.0, 0.1

_PROMPT = re.compile(r"([0-9]+)([+-][0-9]+)=")
_PAIRS = [(a, b) for a in range(2, 10) for b in range(2, a + 1)]
PROMPTS = (*(f"{a}+{b}=" for a, b in _PAIRS), *(f"{a + b}-{a}=" for a, b in _PAIRS))


def answer_of(prompt: str) -> int:
    """Return the right answer, worked out from the text of the prompt. Raises ValueError for any other text."""
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise ValueError(f"not a prompt of the arithmetic task: {prompt!r}")
    return int(match[1]) + int(match[2])


def encode(text: str) -> list[int]:
    """Return the token of each character."""
    return [CHARACTERS.index(character) for character in text]


def decode(ids: Iterable[int]) -> str:
    """Return the text of tokens, without END."""
    return "".join(CHARACTERS[token] for token in ids if token != END)


def is_over(response_ids: Sequence[int]) -> bool:
    """Return whether an answer is complete: ended, or cut off after MAX_RESPONSE_TOKENS."""
    return len(response_ids) == MAX_RESPONSE_TOKENS or (len(response_ids) > 0 and response_ids[-1] == END)


def verify(prompt: str, response_ids: Sequence[int]) -> float:
    """Return the reward of an answer: 1 for the right number, 0.1 for another number, 0 for anything else.

    A number consists of digits and END, without leading zeros.
    """
    text = decode(response_ids)
    if response_ids[-1] != END or not text.isdigit() or text != str(int(text)):
        return 0.0
    return RIGHT_REWARD if int(text) == answer_of(prompt) else WELL_FORMED_REWARD


def prompt_of(group: Sequence[RolloutState]) -> str:
    """Return the text of a group's prompt."""
    return str(group[0].message[0]["content"])


class Prompts(Sequence[RolloutState]):
    """The first `size` prompts of a seed's endless stream (all in random order, again and again), to be generated."""

    def __init__(self, seed: int, size: int) -> None:
        self._seed, self._size = seed, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if not 0 <= index < self._size:
            raise IndexError(f"prompt {index} of {self._size}")
        epoch, place = divmod(index, len(PROMPTS))
        text = PROMPTS[_order(self._seed, epoch)[place]]
        message = [{"role": "user", "content": text}]
        return RolloutState(message=message, prompt_ids=encode(text), data_source="arithmetic")


@lru_cache(maxsize=64)
def _order(seed: int, epoch: int) -> list[int]:
    return [int(number) for number in np.random.default_rng([seed, epoch]).permutation(len(PROMPTS))]


FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

CLIP_LOW, CLIP_HIGH = 0.3, 0.4
ENTROPY_BONUS = 0.1
LEARNING_RATE = 1.0

_BEGIN = VOCABULARY_SIZE  # stands before the first token of an answer
_SHARED = MAX_RESPONSE_TOKENS * (VOCABULARY_SIZE + 1)
_NUMBER_OF = {prompt: number for number, prompt in enumerate(PROMPTS, 1)}


@dataclass(frozen=True)
class Policy:
    """`weights`, and `squares`, the sums of squared gradients by weight: float64 [rows, VOCABULARY_SIZE]."""

    weights: FloatArray
    squares: FloatArray

    @classmethod
    def create(cls) -> Policy:
        """Return a new policy, for which all tokens are equally likely."""
        shape = (_SHARED * (1 + len(PROMPTS)), VOCABULARY_SIZE)
        return cls(np.zeros(shape), np.full(shape, 1e-8))

    def log_probs(self, rows: IntArray) -> FloatArray:
        """Return the log-probabilities of the next token, float64 [N, VOCABULARY_SIZE], for `rows_of` N places."""
        logits = self.weights[rows].sum(axis=1)
        shifted = logits - logits.max(axis=1, keepdims=True)
        result: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return result

    def train(self, groups: Sequence[Sequence[RolloutState]]) -> float:
        """Make one gradient ascent step. Return the mean reward of the batch."""
        rollouts = [rollout for group in groups for rollout in group]
        rewards = [np.array([rollout.reward["score"] for rollout in group]) for group in groups]
        lengths = np.array([len(rollout.response_ids) for rollout in rollouts])
        rows = np.concatenate([rows_of(prompt_of([one]), one.response_ids)[:-1] for one in rollouts])
        _, d_logits = objective(
            self.log_probs(rows),
            np.concatenate([one.response_ids for one in rollouts]),
            np.concatenate([one.logprobs for one in rollouts]),
            np.repeat(np.concatenate([advantages_of(one) for one in rewards]), lengths),
            np.repeat(1.0 / (len(rollouts) * lengths), lengths),
        )
        gradient = np.zeros_like(self.weights)
        np.add.at(gradient, rows, d_logits[:, None, :])
        self.squares[...] += gradient * gradient
        self.weights[...] += LEARNING_RATE * gradient / np.sqrt(self.squares)
        return float(np.mean(rewards))


def rows_of(prompt: str, response_ids: Sequence[int]) -> IntArray:
    """Return the rows of the weights for the token after each beginning of an answer: int64 [length + 1, 2]."""
    before = np.array([_BEGIN, *response_ids])
    shared = np.arange(len(before)) * (VOCABULARY_SIZE + 1) + before
    return np.stack([shared, shared + _NUMBER_OF[prompt] * _SHARED], axis=1)


def advantages_of(rewards: FloatArray) -> FloatArray:
    """Return (r - mean) / std of one group: float64 [rollouts]; all zero if the rewards are all the same."""
    std = rewards.std()
    return (rewards - rewards.mean()) / std if std > 1e-6 else np.zeros_like(rewards)


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
