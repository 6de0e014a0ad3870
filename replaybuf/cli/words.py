"""Comparing two texts word by word."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal

#: What becomes of a piece of text: it is in both, only in the first, or only in the second.
Kind = Literal["same", "first", "second"]
Piece = tuple[Kind, str]

# The time of a comparison grows with the product of the lengths.
_MOST_PARTS = 4000
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
_LINES = re.compile(r"[^\n]*\n|[^\n]+")


def compare(first: str, second: str) -> list[Piece]:
    """Return the pieces of two texts in order: by words, or by lines where they are long, or as wholes if very long.

    What is the same at the beginnings and ends is found whatever the length.
    """
    if first == second:
        return [("same", first)] if first else []
    one, other = _WORDS.findall(first), _WORDS.findall(second)
    head = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    rest = zip(reversed(one[head:]), reversed(other[head:]), strict=False)
    tail = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], rest))
    end = len(one) - tail, len(other) - tail
    pieces: list[Piece] = [
        ("same", "".join(one[:head])),
        *_between("".join(one[head : end[0]]), "".join(other[head : end[1]])),
        ("same", "".join(one[end[0] :])),
    ]
    return _joined(pieces)


def _between(first: str, second: str) -> list[Piece]:
    for parts in (_WORDS, _LINES):
        one, other = parts.findall(first), parts.findall(second)
        if len(one) <= _MOST_PARTS and len(other) <= _MOST_PARTS:
            return _matched(one, other)
    return [("first", first), ("second", second)]


def _matched(one: Sequence[str], other: Sequence[str]) -> list[Piece]:
    pieces: list[Piece] = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if tag == "equal":
            pieces.append(("same", "".join(one[a:b])))
        else:
            pieces += [("first", "".join(one[a:b])), ("second", "".join(other[c:d]))]
    return pieces


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces without empty ones, neighbours of one kind as one."""
    joined: list[Piece] = []
    for kind, text in pieces:
        if not text:
            continue
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + text)
        else:
            joined.append((kind, text))
    return joined
