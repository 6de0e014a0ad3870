"""Payloads in two parts: the head, and the tail with the bytes of large arrays."""

from __future__ import annotations

import random
import struct
import sys
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from replaybuf.codec.arrays_apart import DeferredArray
from replaybuf.codec.payload import Codec
from replaybuf.codec.payload_format import TAIL_BYTES
from replaybuf.codec.payload_header import is_apart
from replaybuf.errors import ConfigError, DecodeError, MissingDriverError
from replaybuf.places.store import EXTENT_BYTES, Extent
from replaybuf.rollouts.rollout_type import RolloutType
from tests.codec.values import DICTS, PAYLOAD, ZSTD, same, sealed

LARGE = np.arange(TAIL_BYTES, dtype=np.uint8)
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


def test_small_and_compressed_payloads_have_no_tail() -> None:
    assert DICTS.encode_split([{"a": LARGE[: TAIL_BYTES - 1]}]).tail == ()
    assert Codec(RolloutType(dict), compression="zstd").encode_split([{"a": LARGE}]).tail == ()


def test_the_format_is_what_the_docstring_says() -> None:
    packed = msgpack.packb({"a": 0})[:-1] + msgpack.packb(
        msgpack.ExtType(26, b"\x03\x01|u1" + struct.pack("<Q", TAIL_BYTES))
    )
    digest = xxhash.xxh3_64_intdigest(LARGE) & 0xFFFFFFFF
    body = struct.pack("<QQQQ", len(packed), 1, TAIL_BYTES, digest) + packed
    body += bytes(-(24 + len(body)) % 64)
    head = struct.pack("<4sBBHIQ", b"RPLB", 3, 0, 0, 1, len(body) + TAIL_BYTES)
    checksum = xxhash.xxh3_64_intdigest(body, xxhash.xxh3_64_intdigest(head)) & 0xFFFFFFFF
    assert DICTS.encode([{"a": LARGE}]) == head + struct.pack("<I", checksum) + body + LARGE.tobytes()


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
    table = DICTS.array_table(head)
    assert table is not None
    arrays = [at + place for at, size in table.places() for place in (0, size // 2, size - 1)]
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


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_hostile_tables_do_no_harm(raw: bytes, arrays: int, count: int) -> None:
    body = struct.pack("<Q", arrays) + raw
    head = struct.pack("<4sBBHIQ", b"RPLB", 3, 0, 0, count, len(body))
    checksum = xxhash.xxh3_64_intdigest(body, xxhash.xxh3_64_intdigest(head)) & 0xFFFFFFFF
    payload = head + struct.pack("<I", checksum) + body
    for decode in (DICTS.decode, lambda one: DICTS.decode(one, verified=True), DICTS.verify, DICTS.array_table):
        try:
            decode(payload)
        except DecodeError:
            continue


def test_a_head_says_where_its_tail_is() -> None:
    split, extent = DICTS.encode_split(GROUP), Extent(1, 2, 64, 100)
    stored = split.head + extent.packed()
    assert is_apart(stored)
    assert Extent.at_end_of(stored) == extent
    assert len(extent.packed()) == EXTENT_BYTES
    assert not is_apart(split.joined())


class Recording:
    """Handles that say what they stand for."""

    def __init__(self) -> None:
        self.arrays: list[DeferredArray] = []

    def deferred(self, array: DeferredArray) -> Any:
        self.arrays.append(array)
        return "deferred"

    def held(self, array: Any) -> Any:
        return ["held", array]


def test_arrays_of_deferred_fields_are_not_read() -> None:
    split = DICTS.encode_split(GROUP)
    tail, handles = tail_of(split), Recording()
    wanted = DICTS.wanted(split.head, {"heavy"})
    pieces = {number: tail[at : at + size] for number, at, size in wanted}
    assert sum(map(len, pieces.values())) == GROUP[0]["ids"].nbytes + GROUP[1]["ids"].nbytes
    first, second = DICTS.decode_deferred(split.head, {"heavy"}, pieces, handles)
    assert same([first["ids"], second["ids"], first["few"]], [GROUP[0]["ids"], GROUP[1]["ids"], GROUP[0]["few"]])
    assert first["heavy"] == {"x": ["deferred", 3]}
    assert second["heavy"] is None
    [one] = handles.arrays
    assert (one.dtype, one.shape, one.nbytes) == (LARGE.dtype, LARGE.shape, LARGE.nbytes)
    assert tail[one.at : one.at + one.nbytes] == LARGE.tobytes()


def test_small_arrays_of_deferred_fields_are_held() -> None:
    for codec in (DICTS, Codec(RolloutType(dict), compression="zstd")):
        for array in (np.arange(3), np.arange(300)):
            payload = codec.encode([{"a": array, "b": array}])
            [back] = codec.decode_deferred(payload, {"a"}, {}, Recording())
            assert same(back, {"a": ["held", array], "b": array})


def test_damage_in_an_array_that_is_read_is_noticed_and_in_a_deferred_one_is_not() -> None:
    split = DICTS.encode_split(GROUP)
    tail = tail_of(split)
    pieces = {number: bytes(size) for number, _, size in DICTS.wanted(split.head, {"heavy"})}
    with pytest.raises(DecodeError, match="checksum"):
        DICTS.decode_deferred(split.head, {"heavy"}, pieces, Recording())
    everything = {number: tail[at : at + size] for number, at, size in DICTS.wanted(split.head, ())}
    assert same(DICTS.decode_deferred(split.head, {"no such field"}, everything, Recording()), GROUP)


# Compressed payloads


@pytest.mark.parametrize("value", ["x" * 10_000, np.zeros(10_000_000, "u1"), "short", np.arange(100)], ids=type)
def test_compressed_payloads_come_back(value: Any) -> None:
    payload = ZSTD.encode([{"field": value}])
    (back,) = DICTS.decode(payload)  # any codec reads them
    assert type(back["field"]) is type(value)
    assert np.array_equal(back["field"], value)


def test_compression_makes_payloads_smaller_and_never_larger() -> None:
    assert len(ZSTD.encode([{"a": "x" * 10_000}])) < 200
    noise = np.random.default_rng(0).bytes(1000)
    assert len(ZSTD.encode([{"a": noise}])) == len(DICTS.encode([{"a": noise}]))


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(100_000_000))
    for claimed in (100_000_000, 100, 2**63):
        with pytest.raises(DecodeError, match=r"too many|don't agree"):
            DICTS.decode(sealed(bomb, flags=1, size=claimed))


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
