"""The place of a mistake in the text of a query."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]

_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Marked:
    """A text in three parts, the middle one of which is wrong, and why."""

    before: str
    wrong: str
    after: str
    reason: str

    @classmethod
    def at(cls, text: str, span: Span, reason: str) -> Marked:
        start, end = span
        return cls(text[:start], text[start:end], text[end:], reason)


def locate(text: str, place: str) -> Span:
    """Return where in the text of a JSON query a place is, as errors name it (`$and[1].staleness.$gt`).

    It is a key with its value, or a value of a list. A place that isn't found is the whole text.
    """
    start = _SPACE.match(text).end()  # type: ignore[union-attr]
    try:
        return _inside(text, start, place, (start, len(text.rstrip())))
    except (ValueError, RecursionError):
        return start, len(text.rstrip())


def _inside(text: str, at: int, place: str, found: Span) -> Span:
    if place and text[at] == "{":
        for key, key_at, value_at, end in _entries(text, at):
            rest = place.removeprefix(key)
            if key and rest != place and (not rest or rest[0] in ".["):
                return _inside(text, value_at, rest.removeprefix("."), (key_at, end))
    elif index := re.match(r"\[(\d+)\]\.?", place):
        spans = _elements(text, at) if text[at] == "[" else []
        if int(index[1]) < len(spans):
            span = spans[int(index[1])]
            return _inside(text, span[0], place[index.end() :], span)
    return found


def _entries(text: str, at: int) -> list[tuple[str, int, int, int]]:
    """Return the keys of the object at a place, with where each, and its value, begins and ends."""
    found = []
    at = _skip(text, at + 1)
    while text[at] == '"':
        key, value_at = scanstring(text, at + 1)
        value_at = _skip(text, _skip(text, value_at) + 1)
        _, end = _DECODER.raw_decode(text, value_at)
        found.append((key, at, value_at, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _elements(text: str, at: int) -> list[Span]:
    """Return where each element of the list at a place begins and ends."""
    found = []
    at = _skip(text, at + 1)
    while text[at] != "]":
        _, end = _DECODER.raw_decode(text, at)
        found.append((at, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _skip(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]
