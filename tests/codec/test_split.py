"""Payloads in two parts: the head, and the tail with the bytes of large arrays."""

from __future__ import annotations

import random
import struct
import sys
from typing import Any

import numpy as np
import pytest

from replaybuf.errors import ConfigError, DecodeError, MissingDriverError
from replaybuf.values.codec.blocks import GROUPED, DeferredArray, checked_array
from replaybuf.values.codec.payload import Codec
from replaybuf.values.codec.payload_format import BODY_AT, Head
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.codec.values import DICTS, PAYLOAD, ZSTD, same, with_checksum

LARGE = np.arange(4 * GROUPED, dtype=np.uint8)
GROUP = [
    {"name": "a", "ids": LARGE.astype("<i4")[:5000], "heavy": {"x": [LARGE, 3]}, "few": np.arange(3)},
    {"name": "b", "ids": LARGE[1:].astype("<f8"), "heavy": None},
]


def tail_of(split: Any) -> bytes:
    return b"".join(bytes(one) for one in split.tail)


def test_a_payload_with_large_arrays_is_its_head_and_its_tail() -> None:
    split, payload = DICTS.encode_split(GROUP), DICTS.encode(GROUP)
    assert split.head + tail_of(split) == payload == split.joined()
    assert split.nbytes == len(payload)
    assert len(split.head) % 64 == 0


def test_both_forms_come_back_as_they_were() -> None:
    split = DICTS.encode_split(GROUP)
    assert same(DICTS.decode(split.joined()), GROUP)
    assert same(DICTS.decode(split.joined(), owned=True), GROUP)
    assert same(DICTS.decode(split.head, tail=tail_of(split)), GROUP)
    assert same(DICTS.decode(split.head, tail=np.frombuffer(bytearray(tail_of(split)), np.uint8), owned=True), GROUP)


def test_a_whole_payload_can_be_split_again() -> None:
    payload = DICTS.encode(GROUP)
    split = DICTS.split(payload)
    assert (split.head, tail_of(split)) == (DICTS.encode_split(GROUP).head, tail_of(DICTS.encode_split(GROUP)))
    assert DICTS.split(DICTS.encode([{"a": 1}])).tail == ()


def test_compressed_payloads_have_no_tail() -> None:
    assert Codec(RolloutType(dict), compression="zstd").encode_split([{"a": LARGE}]).tail == ()


def test_the_checksums_of_a_joined_payload_are_those_of_its_own_bytes() -> None:
    array = LARGE.copy()
    split = DICTS.encode_split([{"a": array}])
    array[0] += 1  # by another thread, between its checksum and its copy
    (back,) = DICTS.decode(split.joined())
    assert back["a"][0] == array[0]


@pytest.mark.parametrize("part", ["head", "tail"])
def test_every_flipped_bit_is_noticed(part: str) -> None:
    split = DICTS.encode_split(GROUP)
    head, tail = split.head, tail_of(split)
    arrays = [at + place for at, size in Head.opened(head).places() for place in (0, size // 2, size - 1)]
    places = range(8 * len(head)) if part == "head" else [8 * at + bit for at in arrays for bit in (0, 7)]
    for bit in places:
        damaged = bytearray(head if part == "head" else tail)
        damaged[bit // 8] ^= 1 << bit % 8
        parts = (bytes(damaged), tail) if part == "head" else (head, bytes(damaged))
        with pytest.raises(DecodeError):
            DICTS.decode(parts[0], tail=parts[1])
        with pytest.raises(DecodeError):
            DICTS.decode(b"".join(parts))
        with pytest.raises(DecodeError):
            DICTS.verify(b"".join(parts))


def test_every_truncation_is_noticed() -> None:
    split, chance = DICTS.encode_split(GROUP), random.Random(0)
    payload, tail = split.joined(), tail_of(split)
    for length in (*range(len(split.head) + 70), *(chance.randrange(len(payload)) for _ in range(300))):
        with pytest.raises(DecodeError):
            DICTS.decode(payload[:length])
    for length in (0, 1, len(tail) - 1):
        with pytest.raises(DecodeError):
            DICTS.decode(split.head, tail=tail[:length])
    with pytest.raises(DecodeError):
        DICTS.decode(split.head, tail=tail + b"\0")


class Recording:
    """Handles that say what they stand for."""

    def __init__(self) -> None:
        self.arrays: list[DeferredArray] = []

    def __call__(self, array: Any) -> Any:
        if not isinstance(array, DeferredArray):
            return ["held", array]
        self.arrays.append(array)
        return "deferred"


def test_arrays_of_deferred_fields_are_not_read() -> None:
    split = DICTS.encode_split(GROUP)
    tail, handles = tail_of(split), Recording()
    wanted = DICTS.wanted(split.head, {"heavy"})
    pieces = {at: tail[at : at + size] for at, size in wanted}
    assert sum(map(len, pieces.values())) == GROUP[0]["ids"].nbytes + GROUP[1]["ids"].nbytes
    first, second = DICTS.decode_deferred(split.head, {"heavy"}, pieces, handles)
    assert same([first["ids"], second["ids"], first["few"]], [GROUP[0]["ids"], GROUP[1]["ids"], GROUP[0]["few"]])
    assert first["heavy"] == {"x": ["deferred", 3]}
    assert second["heavy"] is None
    [one] = handles.arrays
    assert (one.dtype, one.shape, one.nbytes) == (LARGE.dtype, LARGE.shape, LARGE.nbytes)
    assert same(checked_array(one, tail[one.block_at : one.block_at + one.block_size]), LARGE)


def test_arrays_in_the_head_or_a_compressed_payload_are_held() -> None:
    for codec, array in ((DICTS, np.arange(3)), (ZSTD, np.zeros(3000))):
        payload = codec.encode([{"a": array, "b": array}])
        [back] = codec.decode_deferred(payload, {"a"}, {}, Recording())
        assert same(back, {"a": ["held", array], "b": array})


def test_arrays_of_a_column_are_deferred_one_by_one() -> None:
    group = [{"a": np.arange(100 + number), "b": number} for number in range(3)]
    group[2]["b"] = group[1]["a"]  # also in a field that is read
    split, handles = DICTS.encode_split(group), Recording()
    tail = tail_of(split)
    pieces = {at: tail[at : at + size] for at, size in DICTS.wanted(split.head, {"a"})}
    back = DICTS.decode_deferred(split.head, {"a"}, pieces, handles)
    assert [one["a"] for one in back] == ["deferred"] * 3
    assert same([one["b"] for one in back], [one["b"] for one in group])
    for one, rollout in zip(handles.arrays, group, strict=True):
        assert same(checked_array(one, tail[one.block_at : one.block_at + one.block_size]), rollout["a"])
    assert DICTS.wanted(split.head, {"a", "b"}) == []


def test_damage_in_an_array_that_is_read_is_noticed_and_in_a_deferred_one_is_not() -> None:
    split = DICTS.encode_split(GROUP)
    tail = tail_of(split)
    pieces = {at: bytes(size) for at, size in DICTS.wanted(split.head, {"heavy"})}
    with pytest.raises(DecodeError, match="checksum"):
        DICTS.decode_deferred(split.head, {"heavy"}, pieces, Recording())
    everything = {at: tail[at : at + size] for at, size in DICTS.wanted(split.head, ())}
    assert same(DICTS.decode_deferred(split.head, {"no such field"}, everything, Recording()), GROUP)


# Compressed payloads


@pytest.mark.parametrize("value", ["x" * 10_000, np.zeros(10_000_000, "u1"), "short", np.arange(100)], ids=type)
def test_compressed_payloads_come_back(value: Any) -> None:
    payload = ZSTD.encode([{"field": value}])
    (back,) = DICTS.decode(payload)  # any codec reads them
    assert type(back["field"]) is type(value)
    assert np.array_equal(back["field"], value)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(100_000_000))
    right = 100_000_000 + BODY_AT
    for claimed, reason in ((right, "too many"), (140, "don't agree"), (2**63, "too many")):
        header = struct.pack("<4sBBHIIIIQ", b"RPLB", 1, 1, 0, 1, 0, 1, 64, claimed)
        with pytest.raises(DecodeError, match=reason):
            DICTS.decode(with_checksum(header, bomb))


def test_a_missing_zstandard_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = ZSTD.encode([{"a": "x" * 10_000}])
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingDriverError, match="pip install zstandard"):
        Codec(RolloutType(dict), compression="zstd")
    with pytest.raises(MissingDriverError, match="pip install zstandard"):
        DICTS.decode(payload)
    DICTS.verify(payload)
    DICTS.decode(PAYLOAD)


def test_an_unknown_compression_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'none' or 'zstd'"):
        Codec(RolloutType(dict), compression="gzip")  # type: ignore[arg-type]
