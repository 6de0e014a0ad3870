"""Groups by field: what rollouts share is stored once, and comes back as it was put: one object as one, two as two."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from replaybuf.errors import DecodeError
from replaybuf.values.codec import blocks
from replaybuf.values.codec.blocks import GROUPED
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout import RolloutState, Status
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.codec.values import DICTS, STATES, same, values

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (400, 900, 3), np.uint8))
LARGE = np.arange(GROUPED)


def back(group: list[Any]) -> list[Any]:
    restored = DICTS.decode(DICTS.encode(group))
    assert same(restored, group)
    return restored


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), values, max_size=4), max_size=4))
@settings(deadline=None, max_examples=20)
def test_rollouts_with_any_fields_come_back(group: list[dict[Any, Any]]) -> None:
    restored = DICTS.decode(DICTS.encode(group))  # fields are in the order of the first rollout that has them
    assert same([dict(sorted(row.items())) for row in restored], [dict(sorted(row.items())) for row in group])


@given(st.lists(values, min_size=1, max_size=3), st.lists(st.integers(0, 2), min_size=2, max_size=6))
@settings(deadline=None, max_examples=20)
def test_values_that_are_shared_by_some_rollouts_come_back_shared(chosen: list[Any], places: list[int]) -> None:
    group = [{"a": chosen[place % len(chosen)]} for place in places]
    restored = back(group)
    for (new, old), (other, other_old) in combinations(zip(restored, group, strict=True), 2):
        if old["a"] is other_old["a"]:
            assert new["a"] is other["a"] or (same(new["a"], other["a"]) and type(new["a"]) in (int, float, str, bytes))


@pytest.mark.parametrize(
    "make",
    [
        lambda: LARGE.copy(),
        lambda: np.arange(100),
        lambda: np.arange(3),
        lambda: np.ones((30, 30), "f4"),
        lambda: PICTURE.copy(),
        lambda: [{"role": "user", "content": "x" * 5000}],
        lambda: {"a": [1, 2]},
        lambda: {1, 2},
        lambda: [*range(2000)],
    ],
    ids=["large", "column", "small", "matrix", "image", "messages", "dict", "set", "list"],
)
def test_one_object_comes_back_as_one_and_two_equal_ones_as_two(make: Any) -> None:
    first, second = make(), make()
    group = [{"a": value, "b": number} for number, value in enumerate((first, second, first, second))]
    fields = [value["a"] for value in back(group)]
    assert fields[0] is fields[2]
    assert fields[1] is fields[3]
    assert fields[0] is not fields[1]
    if isinstance(first, np.ndarray):
        fields[0][...] = 7
        assert same(fields[1], first)


@pytest.mark.parametrize("array", [LARGE, np.arange(100), np.arange(3)], ids=["large", "column", "small"])
def test_an_array_in_several_fields_comes_back_as_one(array: Any) -> None:
    other = array.copy()
    group = [{"a": array, "b": [array], "c": {"d": 1}}, {"a": other, "b": [array], "c": {"d": other}}]
    first, second = back(group)
    assert first["a"] is first["b"][0] is second["b"][0]
    assert second["a"] is second["c"]["d"]
    assert not np.shares_memory(first["a"], second["a"])


@pytest.mark.parametrize("copies", [lambda: PICTURE, PICTURE.copy, lambda: [PICTURE], lambda: {"pixels": [PICTURE]}])
def test_an_image_that_rollouts_share_is_stored_once(copies: Any) -> None:
    alone, together = (STATES.encode([RolloutState(message=[], mm_info=copies()) for _ in range(n)]) for n in (1, 16))
    assert len(together) < len(alone) + 4000


@pytest.mark.parametrize("value", ["x" * GROUPED, b"x" * GROUPED, LARGE], ids=type)
def test_large_equal_values_are_stored_once(value: Any) -> None:
    group = [{"a": value if number else type(value)(value[:1]), "n": number} for number in range(3)]
    group += [{"a": value[:] if type(value) is not np.ndarray else value.copy(), "n": 4}]
    assert len(DICTS.encode(group)) < len(DICTS.encode(group[:2])) + 400
    back(group)


def test_equal_values_of_other_types_stay_apart() -> None:
    for values_of_group in (
        [1, True],
        [1.0, 1],
        [0.0, -0.0],
        ["a", np.str_("a")],
        [(1,), [1]],
        [[1], [True]],
        [float("nan")] * 2,
    ):
        back([{"a": value} for value in values_of_group])
    back([{"a": {1: 2}}, {"a": {True: 2}}])
    back([{"a": {"x": 1, "y": 2}}, {"a": {"y": 1, "x": 2}}])


NUMBERS = [
    st.integers(),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(0, 255),
    st.just(1),
    st.floats(),
    st.sampled_from([1, True]),
    st.sampled_from([1, "", (), None]),  # these take as many bytes as an integer where the codec looks
    st.sampled_from([1.0, 1, b"four"]),
]


@pytest.mark.parametrize("rows", [1, 3])
@given(st.one_of(*(st.lists(numbers, min_size=1, max_size=8) for numbers in NUMBERS)), st.integers(1, 300))
@example([1, 2, 1], 1)
@example([200, 300], 300)
@example([1, True, 1], 300)
@example([1, ""], 300)
@settings(deadline=None, max_examples=30)
def test_long_lists_of_numbers_keep_the_type_and_the_bits_of_each(rows: int, numbers: list[Any], times: int) -> None:
    back([{"a": numbers * times, "b": {"c": [numbers[0]] * times}, "n": row} for row in range(rows)])
    back([{"a": (numbers * (times if row else 300))[row:]} for row in range(rows)])


def test_a_number_that_is_repeated_takes_no_room() -> None:
    assert len(DICTS.encode([{"mask": [1] * 1500, "steps": [7] * 1500, "n": row} for row in range(4)])) < 2500
    ids = [{"ids": np.arange(row, 900 + row)} for row in range(4)]
    repeated = [{**field, "mask": np.ones(700, "i1"), "steps": np.full(300 + row, 7)} for row, field in enumerate(ids)]
    assert len(DICTS.encode(repeated)) < len(DICTS.encode(ids)) + 200
    back(repeated)


def test_numbers_are_repeated_only_as_far_as_they_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"a": np.ones(700, "i1"), "b": np.full(350, 2, "i2"), "n": row} for row in range(4)]
    payload = DICTS.encode(rows)
    monkeypatch.setattr(blocks, "_MOST_REPEATED", 5599)
    with pytest.raises(DecodeError, match="repeated numbers take too much memory"):
        DICTS.decode(payload)
    assert len(payload) < 1000 < 2800 < len(DICTS.encode(rows))
    back(rows)


@pytest.mark.parametrize("like", [0.0, -0.0, float("nan"), 1.0])
def test_an_array_that_nearly_repeats_a_number_keeps_its_bits(like: float) -> None:
    for place in (0, 1, 499):
        group = [{"ids": np.arange(900.0) + row, "mask": np.zeros(500)} for row in range(3)]
        group[2]["mask"][place] = like
        back(group)


@pytest.mark.parametrize(
    "arrays",
    [
        [np.ones(90), np.ones(90, "f4")],
        [np.ones(90), np.ones((90, 1)), np.ones((1, 90))],
        [np.ones((3, 30)), np.ones((4, 20))],
        [np.ones(90), None, np.ones(90)],
        [np.array([{}], object), np.ones(90)],
        [np.ones(180)[::2], np.arange(90.0)[::-1]],
        [np.broadcast_to(np.ones(1), 90), np.ones(90)],
        [np.ones(0), np.ones(90)],
        [np.ones(()), np.array(7.0)],
        [*np.arange(180).reshape(2, 90)],
        [np.asfortranarray(np.arange(900).reshape(30, 30)), np.ones((30, 30), int)],
    ],
)
def test_arrays_of_any_kinds_in_one_field_come_back_apart(arrays: list[Any]) -> None:
    fields = [value["a"] for value in back([{"a": value} for value in arrays])]
    fields = [array for array in fields if array is not None]
    assert not any(np.shares_memory(array, other) for array, other in combinations(fields, 2))
    assert all(array.flags.writeable and array.flags.aligned for array in fields)


@dataclasses.dataclass
class Sample:
    message: str
    ids: Any = None
    tags: list[str] = dataclasses.field(default_factory=list)
    status: Status = Status.COMPLETED


def test_instances_get_defaults_and_lists_of_their_own() -> None:
    codec = Codec(RolloutType(Sample))
    group = [Sample("a", np.arange(50)), Sample("a", np.arange(60), ["x"]), Sample("b")]
    del group[2].tags
    restored = codec.decode(codec.encode(group))
    assert [instance.message for instance in restored] == ["a", "a", "b"]
    assert [instance.tags for instance in restored] == [[], ["x"], []]
    assert restored[2].ids is None
    states = STATES.decode(STATES.encode([RolloutState(message=[]), RolloutState(message=[])]))
    assert states[0].extra_fields is not states[1].extra_fields
    assert states[0].model_fields_set == {"message", "seq_staleness", "status", "extra_fields"}
    states[0].reward = 1.0
    assert "reward" not in states[1].model_fields_set


# Segments: what begins as an earlier one does


def grown(kind: Any, sizes: list[int], common: int) -> list[dict[str, Any]]:
    """Return rollouts whose tokens begin alike up to `common`, and then differ."""
    group = []
    for number, size in enumerate(sizes):
        tokens = np.arange(size)
        tokens[min(common, size) :] += 1000 * number
        group.append({"a": kind(tokens), "n": {"b": kind(tokens + 7)}})
    return group


KINDS = {
    "array": lambda tokens: tokens,
    "32 bits": lambda tokens: tokens.astype("i4"),
    "bytes": lambda tokens: tokens.astype("u1"),
    "matrix": lambda tokens: np.stack([tokens, tokens], 1).astype("f4"),
    "strided": lambda tokens: np.repeat(tokens, 2)[::2],
    "list": lambda tokens: tokens.tolist(),
    "list of floats": lambda tokens: (tokens / 2).tolist(),
    "list of bytes": lambda tokens: (tokens % 200).tolist(),
}


@pytest.mark.parametrize("kind", KINDS)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.none() | st.integers(0, 5)), min_size=2, max_size=6),
    st.integers(0, 3000),
)
@example([(3000, None), (3000, 0), (2000, 0), (0, 1), (2500, 2)], 2500)
@settings(deadline=None, max_examples=5)
def test_segments_come_back_in_memory_of_their_own(kind: str, tree: list[tuple[int, int | None]], common: int) -> None:
    group = grown(KINDS[kind], [size for size, _ in tree], common)
    parents = [None if parent is None or parent >= place else parent for place, (_, parent) in enumerate(tree)]
    copy = DICTS.decode(DICTS.encode(group, parents=parents))
    assert same(copy, [{**row, "a": np.ascontiguousarray(row["a"])} for row in group] if kind == "strided" else group)
    arrays = [array for row in copy for array in (row["a"], row["n"]["b"]) if isinstance(array, np.ndarray)]
    assert all(array.flags.writeable and array.flags.aligned for array in arrays)
    assert not any(np.shares_memory(array, other) for array, other in combinations(arrays, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_stored_by_what_each_adds(kind: str) -> None:
    """A chain takes hardly more than its last segment, a tree its trunk and its branches, each once."""
    chain, tree = grown(KINDS[kind], [6000, 7000, 8000, 9000], 9000), grown(KINDS[kind], [9000] * 4, 8000)
    assert len(DICTS.encode(chain, parents=[None, 0, 1, 2])) < 9 / 30 * len(DICTS.encode(chain)) + 1000
    assert len(DICTS.encode(tree, parents=[None, 0, 0, None])) < 12 / 36 * len(DICTS.encode(tree)) + 1000


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_without_tokens_may_come_first(kind: str) -> None:
    """It was interrupted before its first token; the others are packed together all the same."""
    chain = grown(KINDS[kind], [0, 6000, 7000, 8000, 9000], 9000)
    payload = DICTS.encode(chain, parents=[None, None, 1, 2, 3])
    assert len(payload) < 9 / 30 * len(DICTS.encode(chain)) + 1000
    assert len(DICTS.encode(chain)) <= len(DICTS.encode(chain[::-1])) + 1000
    masked = [{"a": LARGE + size, "mask": np.ones(size, "i4")} for size in (0, 900, 1000)]
    assert len(DICTS.encode(masked)) < 3 * LARGE.nbytes + 1000


def test_a_long_chain_of_segments_comes_back() -> None:
    group = [{"a": np.arange(1000 + 20 * number), "b": [*range(1000 + number)]} for number in range(200)]
    payload = DICTS.encode(group, parents=[None, *range(199)])
    assert len(payload) < sum(segment["a"].nbytes for segment in group) / 10
    assert same(DICTS.decode(payload), group)
