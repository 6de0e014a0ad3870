"""Answers that are generated token by token, and the rollouts that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from replaybuf.demo.arithmetic import (
    END,
    MAX_PROMPT_TOKENS,
    MAX_RESPONSE_TOKENS,
    PAD,
    VOCABULARY_SIZE,
    IntArray,
    Prompt,
    decode,
    finish_reason,
    prompt_at,
    verify,
)
from replaybuf.demo.policy import FloatArray, Policy, log_softmax, prompt_contexts
from replaybuf.rollouts.rollout import RolloutState, Status

GROUP_SIZE = 8


class Prompts(Sequence[RolloutState]):
    """The first `size` prompts of the stream of `seed`, as a dataset of rollouts to be generated."""

    def __init__(self, seed: int, size: int) -> None:
        self._seed, self._size = seed, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if not 0 <= index < self._size:
            raise IndexError(f"prompt {index} of {self._size}")
        prompt = prompt_at(self._seed, index)
        return RolloutState(message=prompt.message, prompt_ids=prompt.ids, data_source="arithmetic")


def prompt_of(group: Sequence[RolloutState]) -> Prompt:
    """Return the prompt of a group."""
    return Prompt(decode(group[0].prompt_ids))


class Answers:
    """Answers to one prompt, one per row: up to END, or cut off after MAX_RESPONSE_TOKENS tokens."""

    def __init__(self, prompt_ids: IntArray, rows: int) -> None:
        self.contexts = prompt_contexts([prompt_ids] * rows)
        self.tokens = np.full((rows, MAX_RESPONSE_TOKENS), PAD, dtype=np.int32)
        self.log_probs = np.zeros((rows, MAX_RESPONSE_TOKENS), dtype=np.float32)
        self.lengths = np.zeros(rows, dtype=np.int64)
        self._over = np.zeros(rows, dtype=bool)

    @classmethod
    def of(cls, group: Sequence[RolloutState], *, partial: bool) -> Answers:
        """Return the answers of a group so far; with `partial`, interrupted ones are included."""
        answers = cls(np.asarray(group[0].prompt_ids, dtype=np.int32), len(group))
        for row, rollout in enumerate(group):
            if rollout.response_ids is not None and (partial or rollout.status == Status.COMPLETED):
                answers._begin(row, np.asarray(rollout.response_ids), np.asarray(rollout.logprobs))
        return answers

    def _begin(self, row: int, tokens: NDArray[np.int32], log_probs: NDArray[np.float32]) -> None:
        length = len(tokens)
        self.tokens[row, :length], self.log_probs[row, :length], self.lengths[row] = tokens, log_probs, length
        self._over[row] = length == MAX_RESPONSE_TOKENS or (length > 0 and tokens[-1] == END)
        said = tokens[: MAX_RESPONSE_TOKENS - 1]
        self.contexts[row, MAX_PROMPT_TOKENS : MAX_PROMPT_TOKENS + len(said)] = said

    @property
    def unfinished(self) -> NDArray[np.int64]:
        """The rows that aren't complete."""
        return np.flatnonzero(~self._over)

    def extend(self, policy: Policy, randoms: FloatArray, temperature: float = 1.0) -> None:
        """Add one token to each unfinished answer.

        `randoms`, float64 [rows, MAX_RESPONSE_TOKENS] in [0, 1), determine the token of each place. The outcome depends
        only on them, the weights and the tokens so far. Log-probabilities are those of the distribution sampled from,
        at this temperature; 0 takes the likeliest token.
        """
        rows = self.unfinished
        logits, _ = policy.forward(self.contexts)  # of all rows: the shape may change the last digits
        log_probs = (log_softmax(logits / temperature) if temperature > 0 else _log_of_best(logits))[rows]
        places = self.lengths[rows]
        tokens = _draw(log_probs, randoms[rows, places])
        self.tokens[rows, places] = tokens
        self.log_probs[rows, places] = log_probs[np.arange(len(rows)), tokens]
        self.lengths[rows] += 1
        self._over[rows] = (tokens == END) | (places == MAX_RESPONSE_TOKENS - 1)
        heard = places < MAX_RESPONSE_TOKENS - 1
        self.contexts[rows[heard], MAX_PROMPT_TOKENS + places[heard]] = tokens[heard]

    def response(self, row: int) -> tuple[IntArray, NDArray[np.float32]]:
        """Return the tokens of an answer so far, and their log-probabilities: int32 and float32 [length]."""
        length = self.lengths[row]
        return self.tokens[row, :length].copy(), self.log_probs[row, :length].copy()

    def write(self, group: Sequence[RolloutState]) -> None:
        """Write the answers into their rollouts: COMPLETED with their rewards, or ABORTED with the tokens so far."""
        prompt, unfinished = prompt_of(group), set(self.unfinished.tolist())
        for row, rollout in enumerate(group):
            if rollout.status != Status.COMPLETED:
                _write(rollout, prompt, *self.response(row), completed=row not in unfinished)


def _write(
    rollout: RolloutState, prompt: Prompt, response_ids: IntArray, log_probs: NDArray[np.float32], *, completed: bool
) -> None:
    rollout.response, rollout.response_ids, rollout.logprobs = decode(response_ids), response_ids, log_probs
    rollout.response_mask = np.ones(len(response_ids), dtype=np.int32)
    rollout.tokens = np.concatenate([rollout.prompt_ids, response_ids])
    rollout.num_tokens = len(rollout.tokens)
    rollout.status = Status.COMPLETED if completed else Status.ABORTED
    rollout.finish_reason = finish_reason(response_ids) if completed else None
    rollout.reward = {"score": verify(prompt, response_ids)} if completed else None


def _log_of_best(logits: FloatArray) -> FloatArray:
    """Return log-probabilities at temperature 0: all mass on the likeliest token."""
    return np.where(np.arange(VOCABULARY_SIZE) == logits.argmax(axis=1)[:, None], 0.0, -np.inf)


def _draw(log_probs: FloatArray, randoms: FloatArray) -> IntArray:
    """Draw one token per row, by the inverse of the cumulative distribution: int32 [N]."""
    cumulative = np.exp(log_probs).cumsum(axis=1)
    tokens: IntArray = (cumulative <= randoms[:, None] * cumulative[:, -1:]).sum(axis=1).astype(np.int32)
    return tokens
