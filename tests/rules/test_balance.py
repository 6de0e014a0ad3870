"""Sequences shared out to ranks, micro-batches and packed rows."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import InputError
from replaybuf.rules.balance import Parts, balance, micro_batches, packed_rows

LENGTHS = st.lists(st.integers(0, 5000), min_size=1, max_size=60)


def sums(lengths: list[int], parts: Parts) -> list[int]:
    return [sum(lengths[index] for index in part) for part in parts]


def each_once(lengths: list[int], parts: Parts) -> bool:
    return sorted(itertools.chain(*parts)) == list(range(len(lengths)))


@given(lengths=LENGTHS, data=st.data())
def test_parts_have_each_sequence_once_and_nearly_equal_sums(lengths: list[int], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(lengths)))
    parts = balance(lengths, number)
    assert each_once(lengths, parts)
    assert len(parts) == number
    assert all(parts)
    assert max(sums(lengths, parts)) - min(sums(lengths, parts)) <= max(lengths)
    assert parts == balance(lengths, number)


@given(lengths=LENGTHS, number=st.integers(1, 8))
def test_parts_of_the_same_size(lengths: list[int], number: int) -> None:
    lengths = lengths * number
    parts = balance(lengths, number, same_size=True)
    assert each_once(lengths, parts)
    assert {len(part) for part in parts} == {len(lengths) // number}
    assert max(sums(lengths, parts)) - min(sums(lengths, parts)) <= max(lengths)


@given(lengths=LENGTHS, most=st.integers(1, 20_000))
def test_rows_have_each_sequence_once_and_no_more_than_fits(lengths: list[int], most: int) -> None:
    most = max(most, *lengths, 1)
    rows = packed_rows(lengths, most)
    assert each_once(lengths, rows)
    assert max(sums(lengths, rows)) <= most
    # No two rows could be one, so all but one are more than half full.
    assert len(rows) <= 2 * math.ceil(sum(lengths) / most) + 1


@given(lengths=LENGTHS, most=st.integers(1, 20_000), at_least=st.integers(1, 5))
def test_micro_batches_are_no_more_than_packed_rows_and_none_is_too_large(
    lengths: list[int], most: int, at_least: int
) -> None:
    most, at_least = max(most, *lengths, 1), min(at_least, len(lengths))
    parts = micro_batches(lengths, most, at_least=at_least)
    assert each_once(lengths, parts)
    assert max(sums(lengths, parts)) <= most
    assert at_least <= len(parts) <= max(at_least, len(packed_rows(lengths, most)))


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: balance([1, 2], 3), "2 sequences can't be shared out to 3 parts"),
        (lambda: balance([1, 2], 0), "parts must be a whole number of at least 1, got 0"),
        (lambda: balance([1, 2, 3], 2, same_size=True), "leave out same_size"),
        (lambda: balance([1, -2], 1), r"lengths\[1\] must be a number of at least 0, got -2"),
        (lambda: balance([math.nan], 1), r"lengths\[0\] must be"),
        (lambda: packed_rows([5, 11], 10), "sequence 1 has a length of 11, more than the 10 of a row"),
        (lambda: packed_rows([], 0), "must be above 0, got 0"),
        (lambda: micro_batches([5, 11], 10), "sequence 1 has a length of 11"),
        (lambda: micro_batches([1], 10, at_least=2), "1 sequences can't be shared out to 2 parts"),
        (lambda: micro_batches([1], 10, at_least=1.5), "at_least must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_shared_out_is_refused(call: object, what: str) -> None:
    with pytest.raises(InputError, match=what):
        call()  # type: ignore[operator]
