"""The policy of the demo: an autoregressive softmax model over characters, in numpy, with gradients by hand.

A context is the prompt and the answer so far in 7 slots, int32 [N, 7]: the prompt at the right end of slots 0 to 4, so
that digits of one place share a slot, then the first two answer tokens; empty slots hold PAD. One-hot contexts go
through two bilinear gated layers,

    y = (x V + c) * (x U + d),

the "Bilinear" form of gated linear units in Shazeer 2020 (arXiv:2002.05202, section 2), and a linear layer to the
logits of the next token. Products of two linear forms suit a task in which what counts is which digit meets which.
All arithmetic is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replaybuf.demo.arithmetic import END, MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, PAD, VOCABULARY_SIZE, IntArray

FloatArray = NDArray[np.float64]
Parameters = dict[str, FloatArray]

LAYERS = 2
SLOTS = MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS - 1
_ONE_HOT = np.eye(PAD + 1)


@dataclass(frozen=True)
class LayerTape:
    """What the backward pass needs of one gated layer: its input [N, in], and its two factors [N, out]."""

    inputs: FloatArray
    value: FloatArray
    gate: FloatArray


@dataclass(frozen=True)
class Tape:
    """What the backward pass needs of a forward pass."""

    layers: list[LayerTape]
    hidden: FloatArray


class Policy:
    """A token-level policy; all its state is `parameters`."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    @classmethod
    def create(cls, seed: int, hidden: int = 128) -> Policy:
        """A new policy, whose answers are nearly uniform over the vocabulary."""
        rng = np.random.default_rng(seed)
        parameters: Parameters = {}
        size, active = SLOTS * len(_ONE_HOT), SLOTS  # of a one-hot context, only one entry a slot is not zero
        for i in range(LAYERS):
            for name in ("value", "gate"):
                parameters[f"{name}{i}.weight"] = rng.normal(size=(size, hidden)) / np.sqrt(active)
                parameters[f"{name}{i}.bias"] = np.zeros(hidden)
            size = active = hidden
        parameters["logits.weight"] = rng.normal(size=(size, VOCABULARY_SIZE)) * 0.01 / np.sqrt(size)
        parameters["logits.bias"] = np.zeros(VOCABULARY_SIZE)
        return cls(parameters)

    def forward(self, contexts: IntArray) -> tuple[FloatArray, Tape]:
        """Logits of the next token, float64 [N, vocabulary], for contexts int32 [N, slots]; and the tape."""
        x: FloatArray = _ONE_HOT[contexts].reshape(len(contexts), -1)
        layers = []
        for i in range(LAYERS):
            value, gate = self._linear(f"value{i}", x), self._linear(f"gate{i}", x)
            layers.append(LayerTape(x, value, gate))
            x = value * gate
        return self._linear("logits", x), Tape(layers, x)

    def backward(self, tape: Tape, d_logits: FloatArray) -> Parameters:
        """The gradient of each parameter, given that of the logits, float64 [N, vocabulary]."""
        gradients: Parameters = {}
        d_hidden = self._linear_backward("logits", tape.hidden, d_logits, gradients)
        for i in reversed(range(LAYERS)):
            layer = tape.layers[i]
            d_value = self._linear_backward(f"value{i}", layer.inputs, d_hidden * layer.gate, gradients)
            d_gate = self._linear_backward(f"gate{i}", layer.inputs, d_hidden * layer.value, gradients)
            d_hidden = d_value + d_gate
        return gradients

    def sample(
        self, prompts: Sequence[IntArray], rng: np.random.Generator, temperature: float = 1.0
    ) -> tuple[list[IntArray], list[NDArray[np.float32]]]:
        """One answer to each prompt, and the log-probability of each of its tokens: int32 and float32 [length].

        An answer goes up to END, or is cut off. The log-probabilities are those of the distribution sampled from, at
        this temperature; 0 takes the likeliest token. The outcome depends on nothing but the weights, the prompts and
        the state of `rng`.
        """
        contexts = prompt_contexts(prompts)
        steps = [self._sample_token(contexts, i, rng, temperature) for i in range(MAX_RESPONSE_TOKENS)]
        tokens = np.stack([token for token, _ in steps], axis=1)
        log_probs = np.stack([log_prob for _, log_prob in steps], axis=1)
        ended = tokens == END
        lengths = np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, MAX_RESPONSE_TOKENS)
        return (
            [row[:n] for row, n in zip(tokens, lengths, strict=True)],
            [row[:n] for row, n in zip(log_probs, lengths, strict=True)],
        )

    def _sample_token(
        self, contexts: IntArray, place: int, rng: np.random.Generator, temperature: float
    ) -> tuple[IntArray, NDArray[np.float32]]:
        """Token number `place` of every answer, also written to its slot, and its log-probability."""
        logits, _ = self.forward(contexts)
        log_probs = log_softmax(logits / temperature) if temperature > 0 else _log_of_best(logits)
        tokens = _draw(log_probs, rng)
        if place < MAX_RESPONSE_TOKENS - 1:
            contexts[:, MAX_PROMPT_TOKENS + place] = tokens
        return tokens, log_probs[np.arange(len(tokens)), tokens].astype(np.float32)

    def _linear(self, name: str, x: FloatArray) -> FloatArray:
        y: FloatArray = x @ self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]
        return y

    def _linear_backward(self, name: str, x: FloatArray, d_y: FloatArray, gradients: Parameters) -> FloatArray:
        """Stores the gradients of one linear layer, and gives that of its input."""
        gradients[f"{name}.weight"] = x.T @ d_y
        gradients[f"{name}.bias"] = d_y.sum(axis=0)
        d_x: FloatArray = d_y @ self.parameters[f"{name}.weight"].T
        return d_x


def prompt_contexts(prompts: Sequence[IntArray]) -> IntArray:
    """The contexts before the first answer token: int32 [prompts, slots]."""
    contexts = np.full((len(prompts), SLOTS), PAD, dtype=np.int32)
    for row, prompt in zip(contexts, prompts, strict=True):
        row[MAX_PROMPT_TOKENS - len(prompt) : MAX_PROMPT_TOKENS] = prompt
    return contexts


def answer_contexts(prompt: IntArray, response: IntArray) -> IntArray:
    """The context of each token of one answer: int32 [answer length, slots]."""
    contexts = np.repeat(prompt_contexts([prompt]), len(response), axis=0)
    for place in range(1, len(response)):
        contexts[place:, MAX_PROMPT_TOKENS + place - 1] = response[place - 1]
    return contexts


def log_softmax(logits: FloatArray) -> FloatArray:
    """Log-probabilities, float64 [N, vocabulary]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _log_of_best(logits: FloatArray) -> FloatArray:
    """Log-probabilities at temperature 0: all mass on the likeliest token."""
    return np.where(np.arange(VOCABULARY_SIZE) == logits.argmax(axis=1)[:, None], 0.0, -np.inf)


def _draw(log_probs: FloatArray, rng: np.random.Generator) -> IntArray:
    """One token a row, by the inverse of the cumulative distribution: int32 [N]."""
    cumulative = np.exp(log_probs).cumsum(axis=1)
    thresholds = rng.random((len(log_probs), 1)) * cumulative[:, -1:]
    tokens: IntArray = (cumulative <= thresholds).sum(axis=1).astype(np.int32)
    return tokens
