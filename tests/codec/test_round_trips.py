"""What goes in comes out."""

from __future__ import annotations

import gc
import math
import struct
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings

from replaybuf.values.codec import packed_columns as columns
from replaybuf.values.codec import value_types as ext
from replaybuf.values.rollouts.rollout import Status
from tests.codec.values import DICTS, round_trip, same, sealed, values
from tests.scripts import run


@given(values)
@settings(deadline=None, max_examples=60)
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert same(round_trip(value), value)


def test_values_at_the_edges_come_back_as_they_were() -> None:
    """Integers of each size, floats bit for bit, and the second of two equal times of a day."""
    odd_nan = struct.unpack("<d", bytes.fromhex("efbeadde0000f87f"))[0]
    integers = [-(2**63) - 1, -(2**63), 2**63, 2**64 - 1, 2**64, -1, 2**31, 127, 128, -129]
    moment = datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin"))
    for value in (*integers, [odd_nan, -0.0, math.inf, 5e-324], moment):
        assert same(round_trip(value), value)
    restored = round_trip(moment)
    assert (restored.fold, restored.tzinfo, restored.utcoffset()) == (1, moment.tzinfo, timedelta(hours=1))


def test_bytearrays_and_memoryviews_come_back_as_bytes() -> None:
    assert same(round_trip([*range(32), bytearray(b"x"), (memoryview(b"y"),)]), [*range(32), b"x", (b"y",)])


@pytest.mark.parametrize("long", [[7] * 33, [0.5] * 33, [7, *[0.5] * 40, 9]])
def test_the_garbage_collector_passes_over_long_lists_of_numbers(long: list[Any]) -> None:
    assert not gc.is_tracked(round_trip(long))
    for rollout in DICTS.decode(DICTS.encode([{"a": {"b": [*long]}, "c": long} for _ in range(2)])):
        assert not gc.is_tracked(rollout["a"]["b"])
        assert not gc.is_tracked(rollout["c"])


@pytest.mark.parametrize("other", [[[1]] * 40, [{"a": 1}] * 40, [1, {"a": [2]}]])
def test_the_garbage_collector_knows_lists_that_hold_others(other: list[Any]) -> None:
    assert gc.is_tracked(round_trip(other))


def test_encoding_leaves_the_rollouts_as_they_are() -> None:
    rollout = {"a": {"x": b"x"}, "b": (1, [Status.INIT])}
    DICTS.encode([rollout])
    assert same(rollout, {"a": {"x": b"x"}, "b": (1, [Status.INIT])})


def test_coding_leaves_no_work_for_the_garbage_collector() -> None:
    # In a process of its own, where nobody else leaves any.
    code = """
import gc
import numpy as np
from replaybuf import Status
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout_type import RolloutType
codec = Codec(RolloutType(dict))
group = [{"a": np.arange(3), "b": (1,), "c": Status.INIT}]
codec.decode(codec.encode(group))
gc.collect()
codec.decode(codec.encode(group))
print(gc.collect())
"""
    assert run(code) == "0\n"


def test_a_codec_can_be_shared_among_threads() -> None:
    def work(seed: int) -> bool:
        group = [{"a": np.full(500, seed), "b": [(seed, Status.INIT)] * 50}]
        return all(same(DICTS.decode(DICTS.encode(group)), group) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_the_format_is_what_the_docstrings_say() -> None:
    packed = msgpack.packb(["a", columns.SHARED, 1])
    assert DICTS.encode([{"a": 1}]) == sealed(packed)
    many, few = np.arange(512, dtype="<i2"), np.arange(300, dtype="<i4")
    packed = msgpack.packb(["a", columns.SHARED, [msgpack.ExtType(ext.ARRAY, bytes(8))]])
    assert DICTS.encode([{"a": [few[:3]]}]) == sealed(packed, table=["<i4", few[:3].tobytes(), [3]])
    assert DICTS.encode([{"a": [many]}]) == sealed(packed, table=["<i2", [0], [512]], blocks=[many.tobytes()])
    numbers = ["i", [256], 7]
    packed = msgpack.packb([*("a", columns.NUMBERS, numbers), *("b", columns.SHARED, 1)])
    assert DICTS.encode([{"a": [7] * 256, "b": 1}]) == sealed(packed)
    group = [{"a": few[:40], "b": 1, "c": "x", "d": {"e": 1.5}}, {"a": few[40:], "b": 2, "c": "x", "d": {"e": 2.5}}]
    packed = msgpack.packb(
        [
            *("a", columns.ARRAYS, 0),
            *("b", columns.LIST, [1, 2]),
            *("c", columns.SHARED, "x"),
            *("d", columns.DICT, ["e", columns.LIST, [1.5, 2.5]]),
        ]
    )
    assert DICTS.encode(group) == sealed(packed, 2, table=["<i4", 0, [40, 260]], blocks=[few.tobytes()])
    packed = msgpack.packb(["a", columns.PARTIAL, [[0, 1], columns.SHARED, 1], "b", columns.PARTIAL, [[2], 0, 2]])
    assert DICTS.encode([{"a": 1}, {"a": 1}, {"b": 2}]) == sealed(packed, 3)
