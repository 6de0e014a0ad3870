"""The codec: what goes in comes out, what can't is refused with its place, and damage is always noticed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import pathlib
import struct
import subprocess
import sys
import threading
import zlib
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, IntFlag, StrEnum
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import BaseModel

from replaybuf.codec import marks
from replaybuf.codec import payload as codec_module
from replaybuf.codec.payload import Codec
from replaybuf.errors import ConfigError, DecodeError, EncodeError, MissingDriverError
from replaybuf.rollouts.rollout import RolloutState, Status
from replaybuf.rollouts.rollout_type import RolloutType


class Color(Enum):
    RED = (1, "r")


class Level(IntEnum):
    HIGH = 3


class Name(StrEnum):
    ANN = "ann"


class Bits(IntFlag):
    A = 1
    B = 2


class Typed(BaseModel):
    model_config = {"arbitrary_types_allowed": True}
    message: str = ""
    color: Color | None = None


class Pair(NamedTuple):
    left: int
    right: int


@dataclasses.dataclass
class Point:
    x: int = 0


class ListOf(list[int]):
    pass


DICTS = Codec(RolloutType(dict, types=[Color, Level, Name, Bits]))
STATES = Codec(RolloutType(RolloutState))
ZSTD = Codec(RolloutType(dict), compression="zstd")
MARK = {number: msgpack.ExtType(number, b"") for number in range(128)}


def round_trip(value: Any, codec: Codec = DICTS) -> Any:
    (rollout,) = codec.decode(codec.encode([{"field": value}]))
    return rollout["field"]


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits, at every depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        layout = a.flags.c_contiguous == b.flags.c_contiguous or not (b.flags.c_contiguous or b.flags.f_contiguous)
        return layout and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same([a.real, a.imag], [b.real, b.imag])
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, datetime | time):
        return repr(a) == repr(b)
    if isinstance(a, Decimal):
        return str(a) == str(b)
    return bool(a == b)


def sealed(body: bytes, count: int = 1, *, flags: int = 0, size: int | None = None, version: int = 1) -> bytes:
    """A payload with a right checksum around any body."""
    head = struct.pack("<4sBBHIQ", b"RPLB", version, flags, 0, count, len(body) if size is None else size)
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


def hostile(packed: bytes, *, flags: int = 0) -> bytes:
    return sealed(struct.pack("<Q", len(packed)) + packed, flags=flags)


def hostile_field(value: Any) -> bytes:
    return hostile(msgpack.packb({"field": value}))


# --- what goes in comes out ------------------------------------------------------------------------------------------

offsets = st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)))
zones = st.none() | offsets | st.sampled_from([UTC, timezone(timedelta(hours=1), "name"), ZoneInfo("Europe/Berlin")])
texts = st.text(st.characters(exclude_categories=()))
hashables = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | texts
    | st.binary()
    | st.complex_numbers()
    | st.decimals().filter(lambda number: not number.is_snan())  # these can't be hashed
    | st.uuids()
    | st.dates()
    | st.timedeltas()
    | st.datetimes(timezones=zones)
    | st.times(timezones=st.none() | offsets)
    | st.sampled_from([*Status, Color.RED, Level.HIGH, Name.ANN, Bits.A | Bits.B]),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
scalar_dtypes = (
    hnp.scalar_dtypes()
    | hnp.byte_string_dtypes()
    | hnp.unicode_string_dtypes()
    | st.sampled_from([np.dtype(name) for name in (">i8", ">f4", "<f2", "<M8[25s]", "<M8", "<V5", "<g", "<G")])
)
dtypes = scalar_dtypes | hnp.array_dtypes(scalar_dtypes, allow_subarrays=True)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
layouts = st.sampled_from([lambda a: a, np.asfortranarray, lambda a: a.T, lambda a: a[..., ::-1] if a.ndim else a])


@st.composite
def ndarrays(draw: st.DrawFn) -> Any:
    dtype, shape = draw(dtypes), draw(shapes)
    array = np.zeros(shape, dtype)
    if dtype.names is None and dtype.kind not in "bU":
        array = np.frombuffer(draw(st.binary(min_size=array.nbytes, max_size=array.nbytes)), np.uint8).copy()
        array = np.ndarray(shape, dtype, array)
    return draw(layouts)(array)


values = st.recursive(
    hashables | ndarrays() | st.binary().map(bytearray) | ndarrays().filter(lambda a: a.size).map(lambda a: a.flat[0]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.sets(hashables, max_size=4)
    ),
    max_leaves=8,
)


@given(values)
@settings(deadline=None)
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert same(round_trip(value), value)


@given(ndarrays())
@settings(deadline=None)
def test_arrays_come_back_writable_aligned_and_with_memory_of_their_own(array: Any) -> None:
    back = round_trip(array)
    assert same(back, array)
    assert back.flags.writeable
    assert back.flags.aligned
    assert back.flags.owndata


@pytest.mark.parametrize("value", [-(2**63) - 1, -(2**63), 2**63, 2**64 - 1, 2**64, -1, 2**31, 127, 128, -129])
def test_integers_of_any_size_survive(value: int) -> None:
    assert same(round_trip(value), value)


def test_floats_are_kept_bit_for_bit() -> None:
    odd = struct.unpack("<d", bytes.fromhex("efbeadde0000f87f"))[0]
    assert same(round_trip([odd, -0.0, math.inf, 5e-324]), [odd, -0.0, math.inf, 5e-324])


def test_numpy_strings_keep_trailing_zeros() -> None:
    assert same(round_trip([np.str_("a\0"), np.bytes_(b"a\0")]), [np.str_("a\0"), np.bytes_(b"a\0")])


def test_a_structured_array_keeps_its_fields_and_padding() -> None:
    dtype = np.dtype([("a", "i1"), ("b", "i8", (2,)), ("c", [("d", ">f2")])], align=True)
    array = np.zeros(3, dtype)
    array["b"] = 7
    back = round_trip(array)
    assert back.dtype == dtype
    assert (back["b"] == 7).all()


@pytest.mark.parametrize("value", [bytearray(b"x"), {"a": [1, (bytearray(b"x"),)]}, [{1: bytearray(b"x")}, "s"]])
def test_a_bytearray_comes_back_as_bytearray(value: Any) -> None:
    assert same(round_trip(value), value)


def test_a_bytearray_amid_a_long_list_of_numbers_comes_back_as_bytes() -> None:
    assert same(round_trip([*range(32), bytearray(b"x"), 1]), [*range(32), b"x", 1])
    assert same(round_trip([*range(30), bytearray(b"x"), 1]), [*range(30), bytearray(b"x"), 1])


def test_a_fold_and_a_time_zone_survive() -> None:
    moment = datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin"))
    back = round_trip(moment)
    assert (back.fold, back.tzinfo, back.utcoffset()) == (1, moment.tzinfo, timedelta(hours=1))


def test_a_rollout_state_comes_back_equal() -> None:
    rollout = RolloutState(message=[{"role": "user", "content": "\ud800"}], status=Status.COMPLETED, reward={"s": 1})
    (back,) = STATES.decode(STATES.encode([rollout]))
    assert back == rollout
    assert type(back.status) is Status


def test_groups_of_any_size_keep_their_order() -> None:
    for count in (0, 1, 100):
        group = [{"number": number} for number in range(count)]
        assert DICTS.decode(DICTS.encode(group)) == group


def test_dataclasses_make_the_round_trip() -> None:
    codec = Codec(RolloutType(Point))
    assert codec.decode(codec.encode([Point(3)])) == [Point(3)]


def test_the_payload_shares_nothing_with_the_rollouts() -> None:
    array = np.zeros(3)
    payload = DICTS.encode([{"field": array}])
    array[:] = 1
    assert (DICTS.decode(payload)[0]["field"] == 0).all()


def test_encoding_leaves_the_rollouts_as_they_are() -> None:
    rollout = {"a": bytearray(b"x"), "b": (1, [Status.INIT])}
    DICTS.encode([rollout])
    assert same(rollout, {"a": bytearray(b"x"), "b": (1, [Status.INIT])})


def test_encoding_is_deterministic() -> None:
    group = [{"a": (1, 2.0), "b": np.arange(3)}]
    assert DICTS.encode(group) == DICTS.encode(group)


def test_payloads_can_be_any_kind_of_bytes() -> None:
    payload = DICTS.encode([{"a": np.arange(3)}])
    for form in (payload, bytearray(payload), memoryview(payload)):
        DICTS.verify(form)
        assert DICTS.decode(form)[0]["a"].tolist() == [0, 1, 2]


def test_coding_leaves_no_work_for_the_garbage_collector() -> None:
    # In a process of its own, where nobody else leaves any.
    code = """
import gc
import numpy as np
from replaybuf import Status
from replaybuf.codec.payload import Codec
from replaybuf.rollouts.rollout_type import RolloutType
codec = Codec(RolloutType(dict))
group = [{"a": np.arange(3), "b": (1,), "c": Status.INIT}]
codec.decode(codec.encode(group))
gc.collect()
codec.decode(codec.encode(group))
print(gc.collect())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0\n"


def test_a_codec_can_be_shared_among_threads() -> None:
    def work(seed: int) -> None:
        group = [{"a": np.full(500, seed), "b": [(seed, Status.INIT)] * 50}]
        results.append(all(same(ZSTD.decode(ZSTD.encode(group)), group) for _ in range(20)))

    results: list[bool] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


# --- enums -----------------------------------------------------------------------------------------------------------


def test_enums_of_the_annotations_are_restored() -> None:
    codec = Codec(RolloutType(Typed))
    (back,) = codec.decode(codec.encode([Typed(color=Color.RED)]))
    assert back.color is Color.RED


@pytest.mark.parametrize("member", [Color.RED, Level.HIGH, Name.ANN, Bits.A])
def test_an_enum_that_the_config_does_not_name_is_refused(member: Enum) -> None:
    name = type(member).__name__
    with pytest.raises(EncodeError, match=rf"rollouts\[0\]\['a'\]\[0\]: .*\.{name} .*add types=\[{name}\]"):
        Codec(RolloutType(dict)).encode([{"a": [member]}])


def test_an_enum_that_the_reader_does_not_know_is_a_decode_error_with_advice() -> None:
    payload = DICTS.encode([{"field": Color.RED}])
    with pytest.raises(DecodeError, match=r"holds a tests\.test_codec\.Color.*add types=\[Color\]"):
        Codec(RolloutType(dict)).decode(payload)
    plain = Codec(RolloutType(dict), as_plain=True)
    assert plain.decode(payload) == [{"field": (1, "r")}]


def test_a_value_that_is_no_member_any_more_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="not a valid Status"):
        DICTS.decode(hostile_field({MARK[marks.ENUM]: ["replaybuf.rollout.Status", "gone"]}))


def test_an_enum_name_is_never_looked_up_among_modules() -> None:
    payload = hostile_field({MARK[marks.ENUM]: ["os.system", "exit 1"]})
    with pytest.raises(DecodeError, match=r"holds a os\.system"):
        DICTS.decode(payload)
    assert Codec(RolloutType(dict), as_plain=True).decode(payload) == [{"field": "exit 1"}]


# --- what is refused -------------------------------------------------------------------------------------------------


class FakeTensor:
    __module__ = "torch"


REFUSED = [
    (object(), "a value of type object can't be stored"),
    (FakeTensor(), r"convert it with \.numpy\(\)"),
    (Typed(), r"\(a pydantic model\) .* add types=\[Typed\]"),
    (Point(), r"\(a dataclass\) .* add types=\[Point\]"),
    (Pair(1, 2), r"\(a named tuple\) .* add types=\[Pair\]"),
    (collections.OrderedDict(a=1), "plain dict"),
    (collections.defaultdict(list), "plain dict"),
    (collections.Counter("a"), "plain dict"),
    (ListOf([1]), "plain list"),
    (memoryview(b"x"), "plain bytes"),
    (msgpack.ExtType(1, b""), "plain tuple"),
    (msgpack.Timestamp(1), "can't be stored"),
    (pathlib.PurePath("a"), "can't be stored"),
    (range(3), "can't be stored"),
    (len, "can't be stored"),
    (np.array([{}]), "Python objects"),
    (np.zeros(1, [("a", object)]), "Python objects"),
    (np.zeros(2, "V0"), "no size"),
    (np.ma.masked_array([1]), "np.asarray"),
    (np.zeros(2, [("a", "i4")]).view(np.recarray), "np.asarray"),
    (datetime(2024, 1, 1, tzinfo=type("Tz", (UTC.__class__.__base__,), {})()), "time zone"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[type(value).__name__ for value, _ in REFUSED])
def test_what_would_not_come_back_is_refused_with_advice(value: Any, message: str) -> None:
    with pytest.raises(EncodeError, match=message):
        DICTS.encode([{"field": value}])
    with pytest.raises(EncodeError, match=message):
        DICTS.encode([{"field": {"a": [1, (value,)]}}])


def test_numpy_string_dtypes_without_a_width_are_refused() -> None:
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("numpy 1")
    with pytest.raises(EncodeError, match="fixed-width"):
        DICTS.encode([{"field": np.array(["a"], np.dtypes.StringDType())}])


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, 2, 3, object()]}, r"rollouts\[1\]\.extra_fields\['a'\]\[3\]: a value of type object"),
        ({"a": ({"b": object()},)}, r"rollouts\[1\]\.extra_fields\['a'\]\[0\]\['b'\]: "),
        ({object: 1}, r"rollouts\[1\]\.extra_fields\[key <class 'object'>\]: "),
        ({"a": [bytearray(b"fine"), object()]}, r"rollouts\[1\]\.extra_fields\['a'\]\[1\]: a value of type object"),
        ({"a": [1, memoryview(b"")]}, r"rollouts\[1\]\.extra_fields\['a'\]\[1\]: a value of type memoryview"),
    ],
)
def test_the_path_of_what_is_refused_is_named(value: Any, path: str) -> None:
    with pytest.raises(EncodeError, match=path):
        STATES.encode([RolloutState(message=[]), RolloutState.model_construct(message=[], extra_fields=value)])


def test_the_path_of_a_dict_rollout_is_written_as_for_a_dict() -> None:
    with pytest.raises(EncodeError, match=r"rollouts\[0\]\['a'\]\[0\]: "):
        DICTS.encode([{"a": [object()]}])


def nested(make: Any, depth: int) -> Any:
    value: Any = ()
    for _ in range(depth):
        value = make(value)
    return value


@pytest.mark.parametrize("make", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}, lambda x: frozenset([x])])
def test_too_deep_nesting_is_an_encode_error(make: Any) -> None:
    with pytest.raises(EncodeError, match=r"rollouts\[0\]\['field'\]: nested too deeply"):
        DICTS.encode([{"field": nested(make, 5000)}])


@pytest.mark.parametrize("make", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}])
def test_whatever_depth_is_encoded_is_decoded(make: Any) -> None:
    for depth in (200, 240, 250, 255, 400, 500, 505, 510):
        try:
            payload = DICTS.encode([{"field": nested(make, depth)}])
        except EncodeError:
            assert depth > 200
        else:
            DICTS.decode(payload)


def test_a_list_that_holds_itself_is_an_encode_error() -> None:
    loop: list[Any] = [bytearray(b"x")]
    loop.append({"a": loop})
    with pytest.raises(EncodeError, match="holds itself"):
        DICTS.encode([{"field": loop}])


def test_a_value_over_the_limit_of_msgpack_is_an_encode_error() -> None:
    with pytest.raises(EncodeError, match=r"rollouts\[0\]\['field'\]: .*large"):
        DICTS.encode([{"field": bytes(2**32)}])  # zeros that are never touched


# --- damage ----------------------------------------------------------------------------------------------------------

GROUP = [
    {"a": np.arange(6).reshape(2, 3), "b": [(1, {2.5}), Status.FAILED, 2**70], "c": datetime(2024, 1, 1, tzinfo=UTC)},
    {"a": np.float32(1), "b": {"x": Decimal(1), (1, 2): bytearray(b"z")}},
]
PAYLOAD = DICTS.encode(GROUP)


def decodes_or_decode_error(payload: bytes) -> None:
    with contextlib.suppress(DecodeError):
        DICTS.decode(payload)


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
    decodes_or_decode_error(sealed(bytes(body), 2))


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
        | st.tuples(st.sampled_from([*range(1, 13), *range(20, 25)]), inner).map(lambda p: {MARK[p[0]]: p[1]})
    ),
    max_leaves=12,
)


@given(wire)
@settings(deadline=None, max_examples=400)
def test_any_msgpack_with_a_right_checksum_raises_nothing_else(value: Any) -> None:
    decodes_or_decode_error(hostile_field(value))
    decodes_or_decode_error(hostile(msgpack.packb(value)))


def array_field(dtype: Any, shape: Any, order: Any, raw: Any) -> bytes:
    return hostile_field({MARK[marks.ARRAY]: [dtype, shape, order, raw]})


def plain_array_field(dtype: bytes, shape: list[int], raw: bytes) -> bytes:
    head = struct.pack(f"<BB{len(dtype)}s{len(shape)}Q", len(dtype), len(shape), dtype, *shape)
    return hostile_field(msgpack.ExtType(marks.PLAIN_ARRAY, head + raw))


@pytest.mark.parametrize(
    "payload",
    [
        plain_array_field(b"|O", [1], bytes(8)),
        plain_array_field(b"<U0", [2**40], b""),
        plain_array_field(b"<i8", [2**64 - 1], bytes(8)),
        plain_array_field(b"<i8", [2], bytes(8)),
        plain_array_field(b"<i8", [1], bytes(16)),
        plain_array_field(b"<i8", [2**40, 2**40], bytes(8)),
        plain_array_field(b"<i8", [1] * 100, bytes(8)),
        plain_array_field(b"\xff", [1], bytes(8)),
        hostile_field(msgpack.ExtType(marks.PLAIN_ARRAY, b"")),
        hostile_field(msgpack.ExtType(marks.PLAIN_ARRAY, b"\xff\x01<i8")),
        array_field("|O", [1], "C", bytes(8)),
        array_field("O", [1], "C", bytes(8)),
        array_field([[["a", "|O"]]], [1], "C", bytes(8)),
        array_field([{MARK[marks.TUPLE]: ["a", "|O"]}], [1], "C", bytes(8)),
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
        hostile_field({MARK[marks.BYTEARRAY]: 10**12}),
        hostile_field({MARK[marks.TUPLE]: 3}),
        hostile_field({MARK[marks.SET]: [[]]}),
        hostile_field({MARK[marks.DECIMAL]: "x"}),
        hostile_field({MARK[marks.DATE]: [10000, 1, 1]}),
        hostile_field({MARK[marks.TIME]: [1, 1, 1, 1, 0, "../../etc/passwd"]}),
        hostile_field({MARK[99]: 1}),
        hostile_field(MARK[marks.TUPLE]),
        hostile_field({MARK[marks.TUPLE]: [], "a": 1}),
        hostile_field({MARK[marks.ENUM]: []}),
        hostile(b"\xdd\xff\xff\xff\xff"),
        hostile(b"\x91" * 100_000),
        hostile(msgpack.packb([1])),
        hostile(msgpack.packb({}) + b"\x00"),
        sealed(struct.pack("<Q", 1) + msgpack.packb({}) + b"behind the last rollout"),
        sealed(b"", 2**32 - 1),
        sealed(struct.pack("<2Q", 2**63, 2**63), 2),
    ],
)
def test_hostile_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(DecodeError, match=r"the payload is damaged: .+"):
        DICTS.decode(payload)


def test_decoding_imports_nothing() -> None:
    DICTS.decode(PAYLOAD)
    before = set(sys.modules)
    DICTS.decode(PAYLOAD)
    for content in ({MARK[marks.ENUM]: ["antigravity.fly", 1]}, {MARK[marks.OBJECT]: ["antigravity.Fly", {}]}):
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
        "upgrade replaybuf": sealed(b"", 0, version=2),
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


# --- compression -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["x" * 10_000, np.zeros(100_000_000, "u1"), "short", np.arange(100)], ids=type)
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
    with pytest.raises(MissingDriverError, match=r"pip install 'replaybuf\[zstd\]'"):
        Codec(RolloutType(dict), compression="zstd")
    with pytest.raises(MissingDriverError, match=r"pip install 'replaybuf\[zstd\]'"):
        DICTS.decode(payload)
    DICTS.verify(payload)
    DICTS.decode(PAYLOAD)


def test_an_unknown_compression_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'none' or 'zstd'"):
        Codec(RolloutType(dict), compression="gzip")  # type: ignore[arg-type]


# --- the format ------------------------------------------------------------------------------------------------------


def test_the_format_is_what_the_docstring_says() -> None:
    body = struct.pack("<Q", 4) + msgpack.packb({"a": 1})
    assert DICTS.encode([{"a": 1}]) == sealed(body)
    assert codec_module.VERSION == 1
    assert UUID(int=1) == round_trip(UUID(int=1))
    assert round_trip(date(2024, 1, 1)) == date(2024, 1, 1)
