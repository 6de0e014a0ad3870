"""Damage is always noticed, and hostile payloads do no harm."""

from __future__ import annotations

import contextlib
import struct
import sys
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaybuf.codec import extension_types as ext
from replaybuf.errors import DecodeError
from tests.codec.values import DICTS, GROUP, MARK, PAYLOAD, STATES, ZSTD, hostile, hostile_field, sealed


def decodes_or_decode_error(payload: bytes) -> None:
    for owned in (False, True):
        with contextlib.suppress(DecodeError):
            DICTS.decode(payload, owned=owned)


def test_every_flipped_bit_is_noticed() -> None:
    for payload in (PAYLOAD, ZSTD.encode([{"a": "x" * 200}])):
        for bit in range(8 * len(payload)):
            damaged = bytearray(payload)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(DecodeError):
                DICTS.decode(damaged)
            with pytest.raises(DecodeError):
                DICTS.verify(damaged)


def test_every_truncation_is_noticed() -> None:
    for length in range(len(PAYLOAD)):
        with pytest.raises(DecodeError):
            DICTS.decode(PAYLOAD[:length])


def test_bytes_beyond_the_end_are_noticed() -> None:
    with pytest.raises(DecodeError):
        DICTS.decode(PAYLOAD + b"x")


@given(st.binary(max_size=200))
def test_random_bytes_are_a_decode_error(junk: bytes) -> None:
    with pytest.raises(DecodeError):
        DICTS.decode(junk)


@given(st.binary(max_size=200), st.integers(0, 3), st.integers(0, 1))
def test_random_bodies_with_a_right_checksum_raise_nothing_else(body: bytes, count: int, flags: int) -> None:
    decodes_or_decode_error(sealed(body, count, flags=flags))
    decodes_or_decode_error(hostile(body))


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_changed_bodies_with_a_right_checksum_raise_nothing_else(data: st.DataObject) -> None:
    body = bytearray(PAYLOAD[24:])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_decode_error(sealed(bytes(body), len(GROUP)))


wire = st.recursive(
    st.none()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from(
        ["C", "F", "<i8", "|V0", "|O", "<U3", "replaybuf.rollouts.rollout.Status", "Europe/Berlin", "../etc/passwd"]
    )
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=10)
        | st.dictionaries(st.text(), inner, max_size=3)
        | st.tuples(st.sampled_from([*range(1, 28), *range(30, 45)]), inner).map(lambda p: {MARK[p[0]]: p[1]})
    ),
    max_leaves=12,
)


@given(wire)
@settings(deadline=None, max_examples=400)
def test_any_msgpack_with_a_right_checksum_raises_nothing_else(value: Any) -> None:
    decodes_or_decode_error(hostile_field(value))
    decodes_or_decode_error(hostile(msgpack.packb(value)))


def array_field(dtype: Any, shape: Any, order: Any, raw: Any) -> bytes:
    return hostile_field({MARK[ext.ARRAY]: [dtype, shape, order, raw]})


def head(dtype: bytes, shape: list[int]) -> bytes:
    return struct.pack(f"<BB{len(dtype)}s{len(shape)}Q", len(dtype), len(shape), dtype, *shape)


def plain_array_field(dtype: bytes, shape: list[int], raw: bytes) -> bytes:
    return hostile_field(msgpack.ExtType(ext.PLAIN_ARRAY, head(dtype, shape) + raw))


def array_behind_field(dtype: bytes, shape: list[int], raw: bytes) -> bytes:
    return hostile_field(msgpack.ExtType(ext.OUT_OF_BAND_ARRAY, head(dtype, shape)), raw)


#: dtype, shape and bytes that don't fit.
ODD_ARRAYS: list[tuple[bytes, list[int], bytes]] = [
    (b"|O", [1], bytes(8)),
    (b"<U0", [2**40], b""),
    (b"<i8", [2**64 - 1], bytes(8)),
    (b"<i8", [2], bytes(8)),
    (b"<i8", [1], bytes(16)),
    (b"<i8", [2**40, 2**40], bytes(8)),
    (b"<i8", [1] * 100, bytes(8)),
    (b"\xff", [1], bytes(8)),
]


@pytest.mark.parametrize(
    "payload",
    [
        *(make(*content) for make in (plain_array_field, array_behind_field) for content in ODD_ARRAYS),
        hostile_field(msgpack.ExtType(ext.PLAIN_ARRAY, b"")),
        hostile_field(msgpack.ExtType(ext.PLAIN_ARRAY, b"\xff\x01<i8")),
        hostile_field(msgpack.ExtType(ext.STATUS, b"eaten")),
        hostile_field(msgpack.ExtType(ext.OUT_OF_BAND_ARRAY, b"")),
        hostile_field(msgpack.ExtType(ext.OUT_OF_BAND_ARRAY, b"\xff\x01<i8")),
        hostile_field(msgpack.ExtType(ext.OUT_OF_BAND_ARRAY, head(b"<i8", [1])[:-1]), bytes(8)),
        hostile_field(
            [msgpack.ExtType(ext.OUT_OF_BAND_ARRAY, head(b"<i8", [8]))] * 2, bytes(64)
        ),  # both the same bytes
        hostile_field(1, bytes(64)),
        array_field("|O", [1], "C", bytes(8)),
        array_field("O", [1], "C", bytes(8)),
        array_field([[["a", "|O"]]], [1], "C", bytes(8)),
        array_field([{MARK[ext.TUPLE]: ["a", "|O"]}], [1], "C", bytes(8)),
        array_field("i4,O", [1], "C", bytes(12)),
        array_field("<U0", [2**40], "C", b""),
        array_field("|V0", [2**40], "C", b""),
        array_field("<i8", [-1], "C", bytes(8)),
        array_field("<i8", [2], "C", bytes(8)),
        array_field("<i8", [1], "C", bytes(16)),
        array_field("<i8", [2**40, 2**40], "C", bytes(8)),
        array_field("<i8", [1], "A", bytes(8)),
        array_field("<i8", [1], "C", "12345678"),
        array_field("<M8[nope]", [1], "C", bytes(8)),
        hostile_field({MARK[ext.BYTEARRAY]: 10**12}),
        hostile_field({MARK[ext.TUPLE]: 3}),
        hostile_field({MARK[ext.SET]: [[]]}),
        hostile_field({MARK[ext.DECIMAL]: "x"}),
        hostile_field({MARK[ext.DATE]: [10000, 1, 1]}),
        hostile_field({MARK[ext.TIME]: [1, 1, 1, 1, 0, "../../etc/passwd"]}),
        hostile_field({MARK[99]: 1}),
        hostile_field(MARK[ext.TUPLE]),
        hostile_field({MARK[ext.TUPLE]: [], "a": 1}),
        hostile_field({MARK[ext.ENUM]: []}),
        hostile_field({MARK[ext.RANGE]: [1, 2, 0]}),
        hostile_field({MARK[ext.RANGE]: ["1"]}),
        hostile_field({MARK[ext.DEQUE]: [1, [1, 2]]}),
        hostile_field({MARK[ext.DEQUE]: [None, "ab"]}),
        hostile_field({MARK[ext.PATH]: ["Path", "a"]}),
        hostile_field({MARK[ext.PATH]: ["PosixPath", 1]}),
        hostile_field({MARK[ext.MEMORYVIEW]: ["i", [2**40], bytes(4)]}),
        hostile_field({MARK[ext.MEMORYVIEW]: ["B", [2], bytes(4)]}),
        hostile_field({MARK[ext.MEMORYVIEW]: ["O", [1], bytes(8)]}),
        hostile_field({MARK[ext.ORDERED_DICT]: []}),
        hostile_field({MARK[ext.DEFAULT_DICT]: ["exit", {}]}),
        hostile_field({MARK[ext.DEFAULT_DICT]: ["list", []]}),
        hostile_field({MARK[ext.COUNTER]: 10**12}),
        hostile_field({MARK[ext.OBJECT_ARRAY]: [[2**40], "C", []]}),
        hostile_field({MARK[ext.OBJECT_ARRAY]: [[-1, -1], "C", [1]]}),
        hostile_field({MARK[ext.OBJECT_ARRAY]: [[1] * 100, "C", [1]]}),
        hostile_field({MARK[ext.OBJECT_ARRAY]: [[1], "A", [1]]}),
        hostile(b"\xdd\xff\xff\xff\xff"),
        hostile(b"\x91" * 100_000),
        hostile(msgpack.packb([1])),
        hostile(msgpack.packb({}) + b"\x00"),
        sealed(struct.pack("<Q", 1) + msgpack.packb({}) + b"behind the last rollout"),
        sealed(b"", 2**32 - 1),
        sealed(struct.pack("<2Q", 2**63, 2**63), 2),
    ],
)
@pytest.mark.parametrize("owned", [False, True])
def test_hostile_payloads_are_refused_before_they_take_memory(payload: bytes, owned: bool) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match=r"the payload is damaged: .+"):
            DICTS.decode(payload, owned=owned)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_decoding_imports_nothing() -> None:
    DICTS.decode(PAYLOAD)
    before = set(sys.modules)
    DICTS.decode(PAYLOAD)
    for content in (
        {MARK[ext.ENUM]: ["antigravity.fly", 1]},
        {MARK[ext.OBJECT]: ["antigravity.Fly", {}]},
    ):
        with pytest.raises(DecodeError):
            DICTS.decode(hostile_field(content))
    assert set(sys.modules) == before


def test_a_payload_of_another_rollout_type_is_noticed() -> None:
    with pytest.raises(DecodeError, match="another rollout type than RolloutState"):
        STATES.decode(PAYLOAD)


def test_each_kind_of_damage_has_its_own_message() -> None:
    cases = {
        "fewer than a header": b"RPLB",
        "not a replaybuf payload": b"\x80\x04" + bytes(30),
        "its checksum doesn't match": PAYLOAD[:-1] + b"\xff",
        "upgrade replaybuf": sealed(b"", 0, version=4),
        "no such header": sealed(b"", 0, flags=2),
    }
    for message, payload in cases.items():
        with pytest.raises(DecodeError, match=message):
            DICTS.verify(payload)
        with pytest.raises(DecodeError, match=message):
            DICTS.decode(payload)


def test_verify_accepts_what_was_encoded() -> None:
    DICTS.verify(PAYLOAD)
    DICTS.verify(ZSTD.encode(GROUP))
