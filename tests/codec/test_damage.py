"""Damage is always noticed, and hostile payloads do no harm."""

from __future__ import annotations

import contextlib
import struct
import sys
import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from replaybuf.errors import DecodeError
from replaybuf.values.codec import packed_columns as columns
from replaybuf.values.codec import value_types as ext
from replaybuf.values.codec.payload_format import verify
from replaybuf.values.rollouts.rollout import RolloutState, Status
from tests.codec.values import DICTS, MARK, PAYLOAD, STATES, hostile_field, sealed, with_checksum


def shared_group() -> list[RolloutState]:
    """Rollouts whose columns are of every kind that share something."""
    prompt, experts = [{"role": "user", "content": "x" * 5000}], np.arange(3000)
    return [
        RolloutState(
            message=[dict(prompt[0])],
            prompt_ids=np.arange(100),
            response_ids=np.arange(50 + number),
            logprobs=[0.5 * number] * 80,
            routed_experts=experts,
            status=Status.COMPLETED,
            mm_info={"a": [number % 2, (1,)], "b": prompt},
            extra_fields={"seen": prompt if number else None, "same": np.zeros(2000)},
        )
        for number in range(4)
    ]


def ragged_group() -> list[RolloutState]:
    """Rollouts whose fields don't match."""
    return [
        RolloutState(message=[], logprobs=np.ones((2, 40), "f4"), extra_fields={"a": np.ones(99)}),
        RolloutState(message=[], logprobs=np.ones(300), extra_fields={"b": [np.ones(99), Image.new("RGB", (2, 2))]}),
        RolloutState(message=[], logprobs=[1.5], extra_fields={"b": Status.INIT, "a": 1}),
    ]


def decodes_or_decode_error(payload: bytes) -> None:
    with contextlib.suppress(DecodeError):
        DICTS.decode(payload)
    with contextlib.suppress(DecodeError):
        DICTS.decode_head(payload)
    with contextlib.suppress(DecodeError):
        DICTS.wanted(payload, {"field"})
    with contextlib.suppress(DecodeError):
        DICTS.decode_deferred(payload, {"field"}, {}, lambda array: array)


def test_bytes_beyond_the_end_are_noticed() -> None:
    with pytest.raises(DecodeError):
        DICTS.decode(PAYLOAD + b"x")


@given(st.binary(max_size=200))
def test_random_bytes_are_a_decode_error(junk: bytes) -> None:
    with pytest.raises(DecodeError):
        DICTS.decode(junk)


def segments() -> bytes:
    """Arrays and lists that begin as earlier ones do, with what each of them adds."""
    group = [{"a": np.arange(length), "b": [*range(length)]} for length in (600, 700, 800, 750)]
    return DICTS.encode(group, parents=[None, 0, 1, 1])


MUTATED = [
    PAYLOAD,
    segments(),
    STATES.encode(shared_group()),
    STATES.encode(ragged_group()),
]


@pytest.mark.parametrize("examples", [150, pytest.param(100_000, marks=pytest.mark.long)])
def test_changed_payloads_with_a_right_checksum_raise_nothing_else(examples: int) -> None:
    @given(st.sampled_from(MUTATED), st.data())
    @settings(deadline=None, max_examples=examples, database=None)
    def change(payload: bytes, data: st.DataObject) -> None:
        body = bytearray(payload)
        for _ in range(data.draw(st.integers(1, 3))):
            body[data.draw(st.integers(20, min(len(body), 1500) - 1))] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):
            del body[data.draw(st.integers(40, len(body))) :]
        head = int.from_bytes(body[28:32], "little")
        decodes_or_decode_error(with_checksum(bytes(body[:8]), bytes(body[16:head]), bytes(body[head:])))

    change()


wire = st.recursive(
    st.none()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from(
        [
            "C",
            "F",
            "<i8",
            "|V0",
            "|O",
            "<U3",
            "replaybuf.values.rollouts.rollout.Status",
            "Europe/Berlin",
            "../etc/passwd",
        ]
    )
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=10)
        | st.dictionaries(st.text(), inner, max_size=3)
        | st.tuples(st.sampled_from([*range(1, 31)]), inner).map(lambda p: {MARK[p[0]]: p[1]})
    ),
    max_leaves=12,
)


@given(wire)
@settings(deadline=None, max_examples=80)
def test_any_msgpack_with_a_right_checksum_raises_nothing_else(value: Any) -> None:
    decodes_or_decode_error(hostile_field(value))
    decodes_or_decode_error(sealed(msgpack.packb(["field", columns.SHARED, value])))
    decodes_or_decode_error(sealed(msgpack.packb(value), 2))


@given(st.integers(0, 9), wire, st.integers(0, 3))
@settings(deadline=None, max_examples=80)
def test_any_column_with_a_right_checksum_raises_nothing_else(kind: int, content: Any, rows: int) -> None:
    decodes_or_decode_error(sealed(msgpack.packb(["a", kind, content, "b", 0, 1]), rows))
    decodes_or_decode_error(sealed(msgpack.packb(["a", columns.ARRAYS, kind]), rows, table=content, blocks=[bytes(64)]))
    table = ["<i8", kind, content]
    decodes_or_decode_error(sealed(msgpack.packb(["a", columns.ARRAYS, 0]), rows, table=table, blocks=[bytes(64)]))


def reference(entry: int = 0, place: int = 0) -> msgpack.ExtType:
    return msgpack.ExtType(ext.ARRAY, struct.pack("<II", entry, place))


def small_array(dtype: bytes, shape: list[int], raw: bytes) -> bytes:
    return hostile_field(reference(), table=[dtype.decode("latin-1"), raw, [shape]])


def array_in_block(dtype: bytes, shape: list[int], raw: bytes) -> bytes:
    return hostile_field(reference(), raw, table=[dtype.decode("latin-1"), [0], [shape]])


def column(kind: int, content: Any, rows: int = 2) -> bytes:
    return sealed(msgpack.packb(["a", kind, content]), rows)


def tabled(*table: Any, entry: Any = 0, blocks: Sequence[bytes] = (bytes(16),)) -> bytes:
    return sealed(msgpack.packb(["a", columns.ARRAYS, entry]), 2, table=table, blocks=blocks)


#: dtype, shape and bytes that don't fit.
ODD_ARRAYS: list[tuple[bytes, list[int], bytes]] = [
    (b"|O", [1], bytes(8)),
    (b"<U0", [2**40], b""),
    (b"<i8", [2**64 - 1], bytes(8)),
    (b"<i8", [2], bytes(9)),
    (b"<i8", [1], bytes(16)),
    (b"<i8", [2**40, 2**40], bytes(8)),
    (b"<i8", [1] * 100, bytes(8)),
    (b"\xff", [1], bytes(8)),
]


#: Damaged, with right checksums.
HOSTILE: list[bytes] = [
    *(make(*content) for make in (small_array, array_in_block) for content in ODD_ARRAYS),
    hostile_field({MARK[ext.STATUS]: "eaten"}),
    hostile_field(msgpack.ExtType(ext.STATUS, b"completed")),
    hostile_field(msgpack.ExtType(ext.ARRAY, b"")),
    hostile_field(reference()),
    hostile_field(reference(1), bytes(8), table=["<i8", [0], [1]]),
    hostile_field(reference(place=1), bytes(8), table=["<i8", [0], [1]]),
    tabled("<i8", 0, [1, 2]),
    tabled("<i8", 0, [3, -1]),
    tabled("<i8", 0, [2]),
    tabled("<i8", bytes(8), [10**9, 10**9]),
    tabled("<i8", 0, [[-1, -1], [1]]),
    tabled("<i8", 0, [[2**63, 0], [2]]),
    tabled("<i8", -1, [1, 1]),
    tabled("<i8", [-1], [2]),
    tabled("<i8", [0], [1]),
    tabled("<i8", [0] * 99, [2] * 99),
    tabled("<i8", [[0, 8], [0, 16]], [1, 1]),
    tabled("<i8", [[0, 8], [0, 24]], [1, 3]),
    tabled("<i8", [[0, 8], [-1, 8]], [1, 1]),
    tabled("<i8", [[0, 8], [1, 8]], [1, 1]),
    tabled("<i8", [[0, 8], [0, 16, 0, -8]], [1, 1]),
    tabled("<i8", [[0, 8], [0]], [1, 1]),
    tabled("<i8", [[0, 8], [[0], 8]], [1, 1]),
    tabled("<i8", 0, [1, 1], entry=-1),
    tabled("<i8", 0, [1, 1], entry=1),
    tabled("<i8", 0, [1, 1], entry=[0]),
    tabled("|O", 0, [1, 1]),
    tabled("<i8", 0, []),
    tabled("<i8", 0),
    sealed(msgpack.packb([]), table={}, blocks=[bytes(8)]),
    sealed(msgpack.packb([]) + bytes(2), blocks=[bytes(8)], msgpack=3),
    column(columns.LIST, [1]),
    column(columns.LIST, [1, 2, 3]),
    column(columns.INDEXED, [[0, 5], 1, 2]),
    column(columns.INDEXED, [[0, -1], 1, 2]),
    column(columns.INDEXED, [[0], 1]),
    column(columns.INDEXED, []),
    column(columns.DICT, ["a", 0]),
    column(columns.DICT, [["a"], 0, 1]),
    column(columns.NUMBERS, ["i", [1, 1], bytes(4)]),
    column(columns.NUMBERS, ["i", [1, -1], 1]),
    column(columns.NUMBERS, ["i", [2**30, 0], 1]),
    column(columns.NUMBERS, ["i", [0, 0], None]),
    column(columns.NUMBERS, ["O", [1, 1], bytes(16)]),
    column(columns.NUMBERS, ["i", [1], bytes(4)]),
    column(columns.NUMBERS, ["i", [1, 1], bytes(8), [0, 1], [0, 1]]),
    column(columns.NUMBERS, ["i", [1, 1], bytes(8), [0, 0], [1, 0]]),
    column(columns.NUMBERS, ["i", [1, 1], bytes(8), [0, 0], [0, 2]]),
    column(columns.NUMBERS, ["i", [1, 1], bytes(8), [0, -1], [0, 1]]),
    column(columns.NUMBERS, ["i", [1, 1], bytes(8), [0, 0], [0, -1]]),
    column(columns.NUMBERS, ["i", [1, 1], bytes(8), [0, 0]]),
    column(columns.NUMBERS, ["i", [1, 1], bytes(8), [0], [0]]),
    column(99, []),
    column(columns.SHARED, 1, 10**7),
    sealed(msgpack.packb(["a", 0, 1, "a", 0, 1]), 2),
    sealed(msgpack.packb(7), 2),
    *(sealed(msgpack.packb([]), blocks=[bytes(8)], **{name: 2**31}) for name in ("msgpack", "head", "size")),
    hostile_field({MARK[ext.TUPLE]: 3}),
    hostile_field({MARK[ext.SET]: [[]]}),
    hostile_field({MARK[ext.DECIMAL]: "x"}),
    hostile_field({MARK[ext.DATE]: "10000-01-01"}),
    hostile_field({MARK[ext.DATETIME]: ["2024-01-01", 0, "../../etc/passwd"]}),
    hostile_field({MARK[99]: 1}),
    hostile_field(MARK[ext.TUPLE]),
    hostile_field({MARK[ext.TUPLE]: [], "a": 1}),
    hostile_field({MARK[ext.ENUM]: []}),
    hostile_field({MARK[ext.PATH]: 1}),
    hostile_field({MARK[ext.OBJECT_ARRAY]: [[2**40], []]}),
    hostile_field({MARK[ext.OBJECT_ARRAY]: [[-1, -1], [1]]}),
    hostile_field({MARK[ext.OBJECT_ARRAY]: [[1] * 100, [1]]}),
    sealed(b"\xdd\xff\xff\xff\xff"),
    sealed(b"\x91" * 100_000),
    sealed(msgpack.packb([]) + b"behind the last column"),
    sealed(b"", 2**32 - 1),
    sealed(b"", 1),
    column(columns.PARTIAL, [[0, 2], columns.LIST, [1, 2]]),
    column(columns.PARTIAL, [[0], columns.LIST, [1, 2]]),
    column(columns.PARTIAL, [["a"], columns.SHARED, 1]),
    column(columns.PARTIAL, [[-1], columns.LIST, [1]]),
    column(columns.PARTIAL, [[0, 0], columns.LIST, [1, 2]]),
    column(columns.PARTIAL, [[0], columns.SHARED]),
    sealed(msgpack.packb("")),
    sealed(msgpack.packb(["a", None, 1])),
    sealed(msgpack.packb({"a": 1})),
    sealed(msgpack.packb({"a": 1}), 2),
    sealed(msgpack.packb(["a", 0, 1, "a", 0, 2])),
    sealed(msgpack.packb(["a", 0, 1, "b", 0])),
    sealed(msgpack.packb(["a", 0, 1]) + b"\xc0"),
    sealed(b"\xdf\xff\xff\xff\xff"),
]


#: Of these, the ones whose fault is in the fields themselves, which all readers notice.
HOSTILE_FIELDS = HOSTILE[-12:]


def test_hostile_payloads_are_refused_before_they_take_memory() -> None:
    tracemalloc.start()
    try:
        for number, payload in enumerate(HOSTILE):
            tracemalloc.reset_peak()
            with pytest.raises(DecodeError, match=r"the payload is damaged: .+"):
                DICTS.decode(payload)
            assert tracemalloc.get_traced_memory()[1] < 1_000_000, number
    finally:
        tracemalloc.stop()


def test_a_deferred_read_refuses_damaged_fields_as_a_whole_one_does() -> None:
    for payload in HOSTILE_FIELDS:
        with pytest.raises(DecodeError):
            DICTS.decode_deferred(payload, {"a"}, {}, lambda array: array)
        with pytest.raises(DecodeError):
            DICTS.decode_head(payload)


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
        "not a replaybuf payload": b"\x80\x04" + bytes(40),
        "its checksum doesn't match": PAYLOAD[:39] + b"\xff" + PAYLOAD[40:],
        "checksum of a block": PAYLOAD[:-1] + b"\xff",
        "upgrade replaybuf": sealed(b"", 0, version=2),
    }
    for message, payload in cases.items():
        with pytest.raises(DecodeError, match=message):
            verify(payload)
        with pytest.raises(DecodeError, match=message):
            DICTS.decode(payload)
