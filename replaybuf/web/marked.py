"""A text with a mistake in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marked:
    """A text in three parts, the middle one of which is wrong, and why."""

    before: str
    wrong: str
    after: str
    reason: str

    @classmethod
    def at(cls, text: str, span: tuple[int, int], reason: str) -> Marked:
        """Return the text with what is wrong from one place to another."""
        start, end = span
        return cls(text[:start], text[start:end], text[end:], reason)
