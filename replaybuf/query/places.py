"""Places in a query, such as `$and[1].staleness.$gt`, and where they are in its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]


def inside(place: str, name: str) -> str:
    """Return the place of a field or operator in the query at a place."""
    step = name if name.isprintable() and len(name) <= 100 else short(name)
    return f"{place}.{step}" if place else step


def short(name: str) -> str:
    """Return the name as a message can show it, even a long or unprintable one."""
    return ascii(name) if len(name) <= 100 else ascii(name[:100]) + "..."


def span_of(text: str, place: str) -> tuple[int, int] | None:
    """Return where a place begins and ends in the JSON text of a query: an entry of an object with its key, an element
    of a list, or with place "" the whole text. None if it isn't there."""
    try:
        return next((span for where, span in _spans(text, _skip(text, 0), "") if where == place), None)
    except (JSONDecodeError, IndexError, RecursionError):
        return None


def _spans(text: str, start: int, place: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the places inside of the value that begins at `start`, and at last its own."""
    end = start + 1
    if text[start] in "{[":
        for found, span in _entries(text, start, place):
            yield found, span
            end = span[1]
        end = _skip(text, end) + 1
    else:
        end = json.JSONDecoder().raw_decode(text, start)[1]
    yield place, (start, end)


def _entries(text: str, start: int, place: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the places inside of an object or array; after those in an entry, its own."""
    at, number = _skip(text, start + 1), 0
    while text[at] not in "}]":
        begin, where = at, f"{place}[{number}]"
        if text[start] == "{":
            key, at = scanstring(text, at + 1)
            where, at = inside(place, key), _skip(text, _skip(text, at) + 1)
        *within, (_, (_, end)) = _spans(text, at, where)
        yield from within
        yield where, (begin, end)
        at, number = _skip(text, end), number + 1
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    """Return where the next thing after white space begins."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at
