"""The policy of the demo: an autoregressive softmax model over characters, in numpy, with gradients by hand.

A context is the prompt and the answer so far in 7 slots, int32 [N, 7]: the prompt at the right end of slots 0 to 4, so
that digits of one place share a slot, then the first two answer tokens; empty slots hold PAD. One-hot contexts go
through two bilinear gated layers,

    y = (x V + c) * (x U + d),

the "Bilinear" form of gated linear units in Shazeer 2020 (arXiv:2002.05202, section 2), and a linear layer to the
logits of the next token. Products of two linear forms suit a task about pairs of digits.
All arithmetic is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replaybuf.demo.arithmetic import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, PAD, VOCABULARY_SIZE, IntArray

FloatArray = NDArray[np.float64]
Parameters = dict[str, FloatArray]

LAYERS = 2
SLOTS = MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS - 1
_ONE_HOT = np.eye(PAD + 1)


@dataclass(frozen=True)
class LayerTape:
    """The values of one gated layer that the backward pass needs: its input [N, in], and its two factors [N, out]."""

    inputs: FloatArray
    value: FloatArray
    gate: FloatArray


@dataclass(frozen=True)
class Tape:
    """The values of a forward pass that the backward pass needs."""

    layers: list[LayerTape]
    hidden: FloatArray


class Policy:
    """A token-level policy; all its state is `parameters`."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    @classmethod
    def create(cls, seed: int, hidden: int = 128) -> Policy:
        """Return a new policy, whose answers are nearly uniform over the vocabulary."""
        rng = np.random.default_rng(seed)
        parameters: Parameters = {}
        size, active = SLOTS * len(_ONE_HOT), SLOTS  # a one-hot context has one non-zero entry per slot
        for i in range(LAYERS):
            for name in ("value", "gate"):
                parameters[f"{name}{i}.weight"] = rng.normal(size=(size, hidden)) / np.sqrt(active)
                parameters[f"{name}{i}.bias"] = np.zeros(hidden)
            size = active = hidden
        parameters["logits.weight"] = rng.normal(size=(size, VOCABULARY_SIZE)) * 0.01 / np.sqrt(size)
        parameters["logits.bias"] = np.zeros(VOCABULARY_SIZE)
        return cls(parameters)

    def forward(self, contexts: IntArray) -> tuple[FloatArray, Tape]:
        """Return logits of the next token, float64 [N, vocabulary], for contexts int32 [N, slots]; and the tape."""
        x: FloatArray = _ONE_HOT[contexts].reshape(len(contexts), -1)
        layers = []
        for i in range(LAYERS):
            value, gate = self._linear(f"value{i}", x), self._linear(f"gate{i}", x)
            layers.append(LayerTape(x, value, gate))
            x = value * gate
        return self._linear("logits", x), Tape(layers, x)

    def backward(self, tape: Tape, d_logits: FloatArray) -> Parameters:
        """Return the gradient of each parameter, given that of the logits, float64 [N, vocabulary]."""
        gradients: Parameters = {}
        d_hidden = self._linear_backward("logits", tape.hidden, d_logits, gradients)
        for i in reversed(range(LAYERS)):
            layer = tape.layers[i]
            d_value = self._linear_backward(f"value{i}", layer.inputs, d_hidden * layer.gate, gradients)
            d_gate = self._linear_backward(f"gate{i}", layer.inputs, d_hidden * layer.value, gradients)
            d_hidden = d_value + d_gate
        return gradients

    def _linear(self, name: str, x: FloatArray) -> FloatArray:
        y: FloatArray = x @ self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]
        return y

    def _linear_backward(self, name: str, x: FloatArray, d_y: FloatArray, gradients: Parameters) -> FloatArray:
        """Store the gradients of one linear layer. Return that of its input."""
        gradients[f"{name}.weight"] = x.T @ d_y
        gradients[f"{name}.bias"] = d_y.sum(axis=0)
        d_x: FloatArray = d_y @ self.parameters[f"{name}.weight"].T
        return d_x


def prompt_contexts(prompts: Sequence[IntArray]) -> IntArray:
    """Return the contexts before the first answer token: int32 [prompts, slots]."""
    contexts = np.full((len(prompts), SLOTS), PAD, dtype=np.int32)
    for row, prompt in zip(contexts, prompts, strict=True):
        row[MAX_PROMPT_TOKENS - len(prompt) : MAX_PROMPT_TOKENS] = prompt
    return contexts


def answer_contexts(prompt: IntArray, response: IntArray) -> IntArray:
    """Return the context of each token of one answer: int32 [answer length, slots]."""
    contexts = np.repeat(prompt_contexts([prompt]), len(response), axis=0)
    for place in range(1, len(response)):
        contexts[place:, MAX_PROMPT_TOKENS + place - 1] = response[place - 1]
    return contexts


def log_softmax(logits: FloatArray) -> FloatArray:
    """Return log-probabilities, float64 [N, vocabulary]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
