"""Values of all kinds, codecs, and payloads made by hand."""

from __future__ import annotations

import dataclasses
import pathlib
import struct
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, IntFlag, StrEnum
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import xxhash
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import BaseModel

from replaybuf.values.codec import packed_columns as columns
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout import RolloutState, Status
from replaybuf.values.rollouts.rollout_type import RolloutType


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
MARK = {number: msgpack.ExtType(number, b"") for number in range(128)}


def round_trip(value: Any, codec: Codec = DICTS) -> Any:
    (rollout,) = codec.decode(codec.encode([{"field": value}]))
    return rollout["field"]


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits, at every depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray) and a.dtype == object:
        return a.shape == b.shape and same(a.ravel().tolist(), b.ravel().tolist())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
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
    if isinstance(a, datetime):
        return repr(a) == repr(b)
    if isinstance(a, Decimal):
        return str(a) == str(b)
    return bool(a == b)


def sealed(
    packed: bytes,
    count: int = 1,
    *,
    table: Any = (),
    blocks: Sequence[bytes] = (),
    version: int = 1,
    **numbers: int,
) -> bytes:
    """A payload with right checksums around any msgpack and blocks; `numbers` of its header may be others."""
    stored = msgpack.packb(table) if table or blocks else b""
    packed += stored + struct.pack("<I", len(stored))
    at = 40 + 16 * len(blocks) + len(packed)
    head = at + -at % 64
    numbers_of_blocks = struct.pack(f"<{2 * len(blocks)}Q", *map(len, blocks), *map(xxhash.xxh3_64_intdigest, blocks))
    behind = b""
    for block in blocks:
        behind += bytes(-len(behind) % 64) + block
    says = {"blocks": len(blocks), "msgpack": len(packed), "head": head, "size": head + len(behind)} | numbers
    return with_checksum(
        struct.pack("<4sI", b"RPLB", version),
        struct.pack("<IIIIQ", count, *says.values()) + numbers_of_blocks + packed + bytes(head - at),
        behind,
    )


def with_checksum(first: bytes, rest: bytes, behind: bytes = b"") -> bytes:
    """A payload of the first eight bytes, the checksum, the rest of its head, and what is behind it."""
    return first + struct.pack("<Q", xxhash.xxh3_64_intdigest(rest)) + rest + behind


def hostile_field(value: Any, *blocks: bytes, table: Any = ()) -> bytes:
    """A payload of one field of one rollout, and these blocks."""
    return sealed(msgpack.packb(["field", columns.SHARED, value]), table=table, blocks=blocks)


offsets = st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)))
zones = st.none() | offsets | st.sampled_from([UTC, ZoneInfo("Europe/Berlin")])
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
    | st.lists(st.text("ab./\\:"), max_size=3).map(lambda parts: pathlib.Path(*parts))
    | st.sampled_from([*Status, Color.RED, Level.HIGH, Name.ANN, Bits.A | Bits.B]),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
scalar_dtypes = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes()
    | hnp.floating_dtypes(sizes=(16, 32, 64))
    | hnp.complex_number_dtypes(sizes=(64, 128))
    | hnp.byte_string_dtypes()
    | hnp.unicode_string_dtypes()
    | st.sampled_from([np.dtype(name) for name in (">i8", ">f4")])
)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
layouts = st.sampled_from([lambda a: a, np.asfortranarray, lambda a: a.T, lambda a: a[..., ::-1] if a.ndim else a])


@st.composite
def ndarrays(draw: st.DrawFn) -> Any:
    dtype, shape = draw(scalar_dtypes), draw(shapes)
    array = np.zeros(shape, dtype)
    if dtype.names is None and dtype.kind not in "bU":
        array = np.frombuffer(draw(st.binary(min_size=array.nbytes, max_size=array.nbytes)), np.uint8).copy()
        array = np.ndarray(shape, dtype, array)
    return draw(layouts)(array)


@st.composite
def object_arrays(draw: st.DrawFn, items: st.SearchStrategy[Any]) -> Any:
    shape = draw(shapes)
    array = np.empty(shape, object)
    flat = array.reshape(-1)
    for place in range(flat.size):
        flat[place] = draw(items)
    return draw(layouts)(array)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Containers of values, and values that hold others."""
    lists, dicts = st.lists(inner, max_size=4), st.dictionaries(hashables, inner, max_size=4)
    return lists | lists.map(tuple) | dicts | st.sets(hashables, max_size=4) | object_arrays(inner)


values = st.recursive(
    hashables | ndarrays() | ndarrays().filter(lambda a: a.size).map(lambda a: a.flat[0]),
    containers,
    max_leaves=8,
)

#: A group for damage.
GROUP = [
    {
        "a": np.arange(520, dtype="i2").reshape(2, 260),
        "b": [(1, {2.5}), Status.FAILED, 2**70],
        "c": datetime(2024, 1, 1, tzinfo=UTC),
    },
    {"a": np.float32(1), "b": {"x": Decimal(1), (1, 2): b"z"}},
    {"a": [1 + 2j], "b": np.array([[1, "a"]], object), "c": UUID(int=7), "d": 7},
    {"a": {"a": [1]}, "b": pathlib.Path("a/b"), "c": timedelta(1)},
]
PAYLOAD = DICTS.encode(GROUP)
