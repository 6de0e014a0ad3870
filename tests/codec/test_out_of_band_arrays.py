"""Out-of-band arrays: written without a copy, read into memory to which there is no other reference."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.codec.values import DICTS, ZSTD, ndarrays, same

MB = 1 << 20


def read(payload: bytes) -> list[Any]:
    """Rollouts in the memory of a payload of their own."""
    return DICTS.decode(bytes(bytearray(payload)), owned=True)


def most_memory(call: Callable[[], Any]) -> tuple[Any, int]:
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def tiled(array: Any) -> Any:
    return np.tile(array.ravel(), 300 // max(1, array.nbytes) + 1)


@given(st.lists(ndarrays() | ndarrays().map(tiled), max_size=4), st.sampled_from([DICTS, ZSTD]))
@settings(deadline=None)
def test_arrays_in_one_payload_can_be_written_to_and_do_not_overlap(arrays: list[Any], codec: Codec) -> None:
    back = [rollout["field"] for rollout in read(codec.encode([{"field": array} for array in arrays]))]
    for array, one in zip(arrays, back, strict=True):
        assert same(one, array)
        assert one.flags.writeable
        assert one.flags.aligned
    assert not any(np.shares_memory(one, other) for one, other in itertools.combinations(back, 2))


@pytest.mark.parametrize("array", [np.zeros(1000), np.arange(300.0)], ids=["in a block of its own", "with others"])
def test_a_payload_that_others_have_is_not_written_to(array: Any) -> None:
    for form in (bytes, bytearray, memoryview):
        payload = DICTS.encode([{"a": array + row} for row in range(2)])
        back = DICTS.decode(form(payload))
        back[0]["a"] += 1
        assert (DICTS.decode(payload)[0]["a"] == array).all()


def test_a_small_array_does_not_keep_a_large_payload() -> None:
    """What is kept is at most 64 times the array."""
    (back,) = read(DICTS.encode([{"large": np.zeros(MB, "u1"), "small": np.zeros(1000), "part": np.zeros(4000)}]))
    assert not back["large"].flags.owndata
    assert not back["part"].flags.owndata
    assert back["small"].flags.owndata


class Scaled:
    def __init__(self, array: Any) -> None:
        array *= 2
        self.array = array


class ScaledModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(validate_assignment=True)
    array: Any
    seq_staleness: int = 0

    @pydantic.model_validator(mode="after")
    def _scale(self) -> ScaledModel:
        self.array.__imul__(2)
        return self


@pytest.mark.parametrize(
    ("codec", "rollout"),
    [
        (Codec(RolloutType(ScaledModel)), ScaledModel(array=np.ones(1000))),
        (
            Codec(RolloutType(dict), converters={Scaled: ("scaled", lambda one: one.array, Scaled)}),
            {"a": Scaled(np.ones(1000))},
        ),
    ],
    ids=["validators", "converters"],
)
def test_code_of_users_that_runs_while_a_group_is_read_changes_no_payload(codec: Codec, rollout: Any) -> None:
    """A draw may yet be undone, and the payload put back."""
    payload = codec.encode([rollout])
    [back] = codec.decode(payload, owned=True)
    codec.rollout_type.set(back, "seq_staleness", 3)
    codec.verify(payload)


def test_writing_copies_once_and_reading_never() -> None:
    array = np.zeros(16 * MB, "u1")
    payload, most = most_memory(lambda: DICTS.encode([{"field": array}]))
    assert most < 1.1 * array.nbytes
    back, most = most_memory(lambda: DICTS.decode(payload, owned=True))
    assert most < 0.1 * array.nbytes
    assert len(back[0]["field"]) == len(array)


def test_an_array_that_is_a_file_comes_back_as_a_copy_in_memory(tmp_path: Path) -> None:
    codec, file = Codec(RolloutType(dict)), tmp_path / "values"
    mapped = np.memmap(file, "f4", "w+", shape=(3, 2))
    mapped[:] = 7
    payload = codec.encode([{"values": mapped, "part": mapped[1:]}])
    mapped[:] = 0
    [back] = codec.decode(payload)
    assert type(back["values"]) is type(back["part"]) is np.ndarray
    assert back["values"].tolist() == [[7, 7]] * 3
    assert back["part"].tolist() == [[7, 7]] * 2
