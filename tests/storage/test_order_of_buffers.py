"""The order in which buffers are listed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replaybuf.storage.sql.inspection.group_metadata import in_order


def test_numbers_in_names_of_buffers_are_numbers() -> None:
    names = ["", "2", "10", "a", "run", "run-01", "run-1", "run-2", "run-2b", "run-10", "run-10-2", "run-10-11"]
    assert sorted(set(names), key=in_order) == names


@given(st.permutations(["a", "a1", "a01", "1", "01", "a-1", "1a", "٣", "²", "", "1" * 5000]))
def test_any_names_of_buffers_have_one_order(names: list[str]) -> None:
    assert sorted(names, key=in_order) == sorted(sorted(names), key=in_order)
