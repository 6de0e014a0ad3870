"""The task of the demo: one-line sums and differences, their characters as tokens, and a verifier.

The numbers a >= b go from 2 to 9. Each pair gives a sum, `a+b=`, and the difference that undoes it, `(a+b)-a=`: 72
prompts such as `7+5=` and `14-9=`, whose answers have one or two digits.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]

CHARACTERS = "0123456789+-="
END = len(CHARACTERS)  # ends an answer
VOCABULARY_SIZE = END + 1  # the tokens that the policy can say
PAD = VOCABULARY_SIZE  # stands where there is no token; never said

MAX_PROMPT_TOKENS = 5  # "14-9="
MAX_RESPONSE_TOKENS = 3  # "12" and END

RIGHT_REWARD = 1.0
WELL_FORMED_REWARD = 0.1

_PROMPT = re.compile(r"([0-9]+)([+-])([0-9]+)=")
_OPERATORS = {"+": operator.add, "-": operator.sub}


@dataclass(frozen=True)
class Prompt:
    """One question, for example `7+5=`."""

    text: str

    @property
    def ids(self) -> IntArray:
        """The tokens of the question: int32 [length]."""
        return encode(self.text)

    @property
    def message(self) -> list[dict[str, Any]]:
        """The question as chat messages."""
        return [{"role": "user", "content": self.text}]

    @property
    def answer(self) -> int:
        """The right answer, worked out from the text."""
        match = _PROMPT.fullmatch(self.text)
        if match is None:
            raise ValueError(f"not a prompt of the arithmetic task: {self.text!r}")
        left, sign, right = match.groups()
        return int(_OPERATORS[sign](int(left), int(right)))


_PAIRS = [(a, b) for a in range(2, 10) for b in range(2, a + 1)]
PROMPTS = (*(Prompt(f"{a}+{b}=") for a, b in _PAIRS), *(Prompt(f"{a + b}-{a}=") for a, b in _PAIRS))


def encode(text: str) -> IntArray:
    """Return the token of each character: int32 [length]."""
    try:
        return np.array([CHARACTERS.index(character) for character in text], dtype=np.int32)
    except ValueError:
        raise ValueError(f"{text!r} has characters other than {CHARACTERS!r}") from None


def decode(ids: Iterable[int]) -> str:
    """Return the text of the tokens up to END."""
    characters = []
    for token in ids:
        if token == END:
            break
        characters.append(CHARACTERS[token])
    return "".join(characters)


def finish_reason(response_ids: IntArray) -> str:
    """Return `stop` if the answer was ended, `length` if it was cut off."""
    return "stop" if len(response_ids) and response_ids[-1] == END else "length"


def verify(prompt: Prompt, response_ids: IntArray) -> float:
    """Return the reward of an answer: 1 for the right number, 0.1 for another number, 0 for anything else.

    A number consists of digits and END, without leading zeros.
    """
    text = decode(response_ids.tolist())
    if finish_reason(response_ids) != "stop" or not text.isdigit() or text != str(int(text)):
        return 0.0
    return RIGHT_REWARD if int(text) == prompt.answer else WELL_FORMED_REWARD


def prompt_at(seed: int, index: int) -> Prompt:
    """Return prompt number `index` of the endless stream of `seed`: all prompts in random order, again and again."""
    epoch, place = divmod(index, len(PROMPTS))
    return _shuffled(seed, epoch)[place]


@lru_cache(maxsize=64)
def _shuffled(seed: int, epoch: int) -> tuple[Prompt, ...]:
    order = np.random.default_rng([seed, epoch]).permutation(len(PROMPTS))
    return tuple(PROMPTS[i] for i in order)
