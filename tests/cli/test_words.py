"""Texts compared word by word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.cli import words
from replaybuf.cli.words import compare

TEXTS = st.text(alphabet="ab .\n\u202e", max_size=60)


@given(TEXTS, TEXTS)
def test_the_pieces_give_both_texts_again(first: str, second: str) -> None:
    pieces = compare(first, second)
    assert "".join(text for kind, text in pieces if kind != "second") == first
    assert "".join(text for kind, text in pieces if kind != "first") == second
    assert (not any(kind != "same" for kind, _ in pieces)) == (first == second)


def test_words_are_the_smallest_pieces() -> None:
    assert compare("the answer is 12.", "the answer is 15.") == [
        ("same", "the answer is "),
        ("first", "12"),
        ("second", "15"),
        ("same", "."),
    ]


def test_long_texts_are_compared_by_lines_and_longer_ones_as_wholes(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = "one two\nthree four\nfive", "1 two\nthree four\n5"
    assert ("same", " two\nthree four\n") in compare(first, second)
    monkeypatch.setattr(words, "_MOST_PARTS", 4)
    assert ("same", "three four\n") in compare(first, second)
    monkeypatch.setattr(words, "_MOST_PARTS", 1)
    assert compare(first, second) == [("first", first), ("second", second)]


def test_a_million_words_take_no_long() -> None:
    first = "word " * 500_000
    assert len(compare(first + "a" + first, first + "b" + first)) == 4
