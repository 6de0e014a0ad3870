"""Arrays out of band, images, and payloads that are split."""

from __future__ import annotations

import io
import itertools
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pydantic
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from replaybuf.errors import DecodeError, RolloutError
from replaybuf.values.codec import value_types as ext
from replaybuf.values.codec.blocks import GROUPED, DeferredArray, checked_array
from replaybuf.values.codec.payload import Codec
from replaybuf.values.codec.payload_format import Head, digest, fed, verify
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.codec.values import DICTS, MARK, hostile_field, ndarrays, round_trip, same
from tests.scripts import run

MB = 1 << 20


def most_memory(call: Callable[[], Any]) -> tuple[Any, int]:
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def tiled(array: Any) -> Any:
    return np.tile(array.ravel(), 300 // max(1, array.nbytes) + 1)


@given(st.lists(ndarrays() | ndarrays().map(tiled), max_size=4))
@settings(deadline=None, max_examples=60)
def test_arrays_in_one_payload_can_be_written_to_and_do_not_overlap(arrays: list[Any]) -> None:
    payload = DICTS.encode([{"field": array} for array in arrays])
    restored = [rollout["field"] for rollout in DICTS.decode(payload)]
    for array, copy in zip(arrays, restored, strict=True):
        assert same(copy, array)
        assert copy.flags.writeable
        assert copy.flags.aligned
    assert not any(np.shares_memory(left, right) for left, right in itertools.combinations(restored, 2))


@pytest.mark.parametrize("array", [np.zeros(1000), np.arange(300.0)], ids=["in a block of its own", "with others"])
def test_a_payload_that_others_have_is_not_written_to(array: Any) -> None:
    for form in (bytes, bytearray, memoryview):
        payload = DICTS.encode([{"a": array + row} for row in range(2)])
        verify(form(payload))
        restored = DICTS.decode(form(payload))
        restored[0]["a"] += 1
        assert (DICTS.decode(payload)[0]["a"] == array).all()


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
        (Codec(RolloutType(ScaledModel)), ScaledModel(array=np.ones(10_000))),
        (
            Codec(RolloutType(dict), converters={Scaled: ("scaled", lambda scaled: scaled.array, Scaled)}),
            {"a": Scaled(np.ones(10_000))},
        ),
    ],
    ids=["validators", "converters"],
)
def test_code_of_users_that_runs_while_a_group_is_read_changes_no_payload(codec: Codec, rollout: Any) -> None:
    """A draw may yet be undone, and the payload put back."""
    split = codec.encode_split([rollout])
    tail = np.frombuffer(bytearray(tail_of(split)), np.uint8)
    [restored] = codec.decode(split.head, tail=tail)
    codec.rollout_type.set(restored, "seq_staleness", 3)
    assert bytes(tail) == tail_of(split)


def test_a_converter_that_changes_its_array_changes_no_equal_one() -> None:
    """Equal arrays are stored once."""
    codec = Codec(RolloutType(dict), converters={Scaled: ("scaled", lambda scaled: scaled.array, Scaled)})
    ones = np.ones(2_000)
    [restored] = codec.decode(
        codec.encode([{"a": Scaled(ones / 2), "b": ones, "c": Scaled(ones / 2), "d": ones.copy()}])
    )
    assert [restored["a"].array[0], restored["b"][0], restored["c"].array[0], restored["d"][0]] == [2, 1, 2, 1]


def test_a_small_array_does_not_keep_a_large_payload() -> None:
    """What is kept is at most 64 times the array."""
    (restored,) = DICTS.decode(
        DICTS.encode([{"large": np.zeros(MB, "u1"), "small": np.zeros(1000), "part": np.zeros(4000)}])
    )
    assert {name: array.flags.owndata for name, array in restored.items()} == {
        "large": False,
        "small": True,
        "part": False,
    }


def test_writing_and_reading_copy_once() -> None:
    array = np.zeros(16 * MB, "u1")
    payload, peak = most_memory(lambda: DICTS.encode([{"field": array}]))
    assert peak < 1.1 * array.nbytes
    restored, peak = most_memory(lambda: DICTS.decode(payload))
    assert peak < 1.1 * array.nbytes
    assert len(restored[0]["field"]) == len(array)


def test_an_array_that_is_a_file_comes_back_as_a_copy_in_memory(tmp_path: Path) -> None:
    codec, file = Codec(RolloutType(dict)), tmp_path / "values"
    mapped = np.memmap(file, "f4", "w+", shape=(3, 2))
    mapped[:] = 7
    payload = codec.encode([{"values": mapped, "part": mapped[1:]}])
    mapped[:] = 0
    [restored] = codec.decode(payload)
    assert type(restored["values"]) is type(restored["part"]) is np.ndarray
    assert restored["values"].tolist() == [[7, 7]] * 3
    assert restored["part"].tolist() == [[7, 7]] * 2


MODES = ("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16")
PIXELS = msgpack.ExtType(ext.ARRAY, bytes(8))


def opened(image: Any, form: str, **options: Any) -> Any:
    """The image as it is when it was read from a file of this format."""
    file = io.BytesIO()
    image.save(file, form, **options)
    file.seek(0)
    return Image.open(file)


def gradient(mode: str) -> Any:
    image = Image.linear_gradient("L").resize((9, 5))
    return image.convert(mode)


@pytest.mark.parametrize("mode", MODES)
def test_an_image_of_any_mode_comes_back(mode: str) -> None:
    image = gradient(mode)
    restored = round_trip({"images": [image]})["images"][0]
    assert type(restored) is Image.Image
    assert restored == image
    restored.putpixel((0, 0), restored.getpixel((8, 4)))  # its memory is its own


def test_an_opened_file_comes_back_as_an_image() -> None:
    for file in (
        opened(gradient("RGB"), "PNG"),
        opened(gradient("L"), "JPEG", dpi=(72, 72)),
        opened(gradient("RGB"), "WEBP", lossless=True),
    ):
        restored = round_trip(file)
        assert (type(restored), restored) == (Image.Image, file.copy())


def test_what_info_holds_besides_plain_values_is_left_out() -> None:
    image = gradient("L")
    image.info = {"dpi": (72, 72), "text": "a", "note": object(), 7: 1}
    assert round_trip(image).info == {"dpi": (72, 72), "text": "a"}


def test_what_can_not_be_stored_says_what_to_do() -> None:
    frames = opened(gradient("L"), "GIF", save_all=True, append_images=[gradient("L").rotate(180)])
    with pytest.raises(
        RolloutError, match=r"an image of 2 frames can't be stored: store the present one \(\.copy\(\)\)"
    ):
        DICTS.encode([{"field": frames}])
    with pytest.raises(RolloutError, match="an image of mode P can't be stored: convert it"):
        DICTS.encode([{"field": gradient("RGB").quantize(7)}])
    with pytest.raises(RolloutError, match="an image of mode BGR;15 can't be stored: convert it to one of 1, L, LA"):
        DICTS.encode([{"field": _of_mode("BGR;15")}])


def _of_mode(mode: str) -> Any:
    image = gradient("L")
    image._mode = mode
    return image


def test_a_closed_file_is_an_encode_error() -> None:
    file = opened(gradient("L"), "PNG")
    file.close()
    with pytest.raises(RolloutError, match=r"rollouts\[0\]\['field'\]: "):
        DICTS.encode([{"field": file}])


def test_without_pil_an_image_is_a_decode_error() -> None:
    code = """
import sys
sys.modules["PIL"] = None
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout_type import RolloutType
payload = bytes.fromhex(sys.argv[1])
try:
    Codec(RolloutType(dict)).decode(payload)
except Exception as error:
    print(type(error).__name__, error)
"""
    payload = DICTS.encode([{"image": gradient("L"), "a": 1}])
    assert run(code, payload.hex()) == "DecodeError it holds a PIL image, and PIL isn't installed: pip install pillow\n"


@pytest.mark.parametrize(
    "content",
    [
        ["RGB", [2**20, 2**20], PIXELS, {}, 0],
        ["RGB", [0, 2**30], PIXELS, {}, 0],
        ["RGB", [-1, -1], PIXELS, {}, 3],
        ["RGB", [1.0, 1], PIXELS, {}, 3],
        ["nope", [1, 1], PIXELS, {}, 3],
        ["P", [1, 1], PIXELS, {}, 1],
        ["RGB", [1, 1], PIXELS, [], 3],
        ["RGB", [1, 1], bytes(3), {}, 3],
        ["RGB", [1, 1], "abc", {}, 3],
        [3],
    ],
)
def test_hostile_images_are_refused(content: Any) -> None:
    *content, size = content
    payload = hostile_field({MARK[ext.IMAGE]: content}, table=["|u1", bytes(size), [size]])
    with pytest.raises(DecodeError, match=r"the payload is damaged: .+"):
        DICTS.decode(payload)


LARGE = np.arange(4 * GROUPED, dtype=np.uint8)
GROUP = [
    {"name": "a", "ids": LARGE.astype("<i4")[:5000], "heavy": {"x": [LARGE, 3]}, "few": np.arange(3)},
    {"name": "b", "ids": LARGE[1:].astype("<f8"), "heavy": None},
]


def tail_of(split: Any) -> bytes:
    return b"".join(bytes(part) for part in split.tail)


def test_a_payload_with_large_arrays_is_its_head_and_its_tail() -> None:
    split, payload = DICTS.encode_split(GROUP), DICTS.encode(GROUP)
    assert split.head + tail_of(split) == payload == split.joined()
    assert len(split.head) + split.size == len(payload)
    assert len(split.head) % 64 == 0


def test_both_forms_come_back_as_they_were() -> None:
    split = DICTS.encode_split(GROUP)
    assert same(DICTS.decode(split.joined()), GROUP)
    assert same(DICTS.decode(split.head, tail=tail_of(split)), GROUP)
    assert same(DICTS.decode(split.head, tail=np.frombuffer(bytearray(tail_of(split)), np.uint8)), GROUP)


def test_a_whole_payload_can_be_split_again() -> None:
    payload = DICTS.encode(GROUP)
    split = DICTS.split(payload)
    assert (split.head, tail_of(split)) == (DICTS.encode_split(GROUP).head, tail_of(DICTS.encode_split(GROUP)))
    assert DICTS.split(DICTS.encode([{"a": 1}])).tail == ()


def test_the_checksums_of_a_joined_payload_are_those_of_its_own_bytes() -> None:
    array = LARGE.copy()
    split = DICTS.encode_split([{"a": array}])
    array[0] += 1  # by another thread, between its checksum and its copy
    (restored,) = DICTS.decode(split.joined())
    assert restored["a"][0] == array[0]


@pytest.mark.parametrize("nbytes", [0, 1, 65_535, 65_536, 65_537, 300_000])
def test_a_checksum_is_the_xxh3_of_all_bytes(nbytes: int) -> None:
    block = bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)
    for buffer in (block, bytearray(block), memoryview(block)):
        assert digest(buffer) == xxhash.xxh3_64_intdigest(block)


def test_no_piece_is_so_long_that_xxhash_releases_the_gil() -> None:
    """It does for 100,000 bytes; then other threads wait for the GIL in vain."""
    pieces: list[int] = []

    class State:
        def update(self, piece: memoryview) -> None:
            pieces.append(len(piece))

    fed(State(), bytes(300_000))  # type: ignore[type-var]
    assert sum(pieces) == 300_000
    assert max(pieces) < 100_000


@pytest.mark.parametrize("part", ["head", "tail"])
def test_every_flipped_bit_is_noticed(part: str) -> None:
    split = DICTS.encode_split(GROUP)
    head, tail = split.head, tail_of(split)
    opened = Head.opened(head)
    arrays = [
        at + place for at, size in zip(opened.starts, opened.sizes, strict=True) for place in (0, size // 2, size - 1)
    ]
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
            verify(b"".join(parts))


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
    [handle] = handles.arrays
    assert (handle.dtype, handle.shape, handle.nbytes) == (LARGE.dtype, LARGE.shape, LARGE.nbytes)
    assert same(checked_array(handle, tail[handle.block_at : handle.block_at + handle.block_size]), LARGE)


def test_arrays_in_the_head_or_a_whole_payload_are_held() -> None:
    for array in (np.arange(3), np.arange(3000)):
        payload = DICTS.encode([{"a": array, "b": array}])
        [restored] = DICTS.decode_deferred(payload, {"a"}, {}, Recording())
        assert same(restored, {"a": ["held", array], "b": array})


def test_arrays_of_a_column_are_deferred_one_by_one() -> None:
    group = [{"a": np.arange(100 + number), "b": number} for number in range(3)]
    group[2]["b"] = group[1]["a"]  # also in a field that is read
    split, handles = DICTS.encode_split(group), Recording()
    tail = tail_of(split)
    pieces = {at: tail[at : at + size] for at, size in DICTS.wanted(split.head, {"a"})}
    restored = DICTS.decode_deferred(split.head, {"a"}, pieces, handles)
    assert [fields["a"] for fields in restored] == ["deferred"] * 3
    assert same([fields["b"] for fields in restored], [fields["b"] for fields in group])
    for handle, rollout in zip(handles.arrays, group, strict=True):
        assert same(checked_array(handle, tail[handle.block_at : handle.block_at + handle.block_size]), rollout["a"])
    assert DICTS.wanted(split.head, {"a", "b"}) == []


def test_damage_in_an_array_that_is_read_is_noticed_and_in_a_deferred_one_is_not() -> None:
    split = DICTS.encode_split(GROUP)
    tail = tail_of(split)
    pieces = {at: bytes(size) for at, size in DICTS.wanted(split.head, {"heavy"})}
    with pytest.raises(DecodeError, match="checksum"):
        DICTS.decode_deferred(split.head, {"heavy"}, pieces, Recording())
    everything = {at: tail[at : at + size] for at, size in DICTS.wanted(split.head, ())}
    assert same(DICTS.decode_deferred(split.head, {"no such field"}, everything, Recording()), GROUP)
