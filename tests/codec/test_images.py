"""PIL images."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import msgpack
import pytest
from PIL import Image

from replaybuf.errors import DecodeError, RolloutError
from replaybuf.values.codec import value_types as ext
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.codec.values import DICTS, MARK, hostile_field, round_trip

MODES = ("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16")
PIXELS = msgpack.ExtType(ext.ARRAY, bytes(8))
PLAIN = Codec(RolloutType(dict), as_plain=True)


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
    back = round_trip({"images": [image]})["images"][0]
    assert type(back) is Image.Image
    assert back == image
    back.putpixel((0, 0), back.getpixel((8, 4)))  # its memory is its own


def test_an_opened_file_comes_back_as_an_image() -> None:
    for file in (
        opened(gradient("RGB"), "PNG"),
        opened(gradient("L"), "JPEG", dpi=(72, 72)),
        opened(gradient("RGB"), "WEBP", lossless=True),
    ):
        back = round_trip(file)
        assert (type(back), back) == (Image.Image, file.copy())


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


def test_without_pil_an_image_is_a_decode_error_and_the_rest_is_read() -> None:
    code = """
import sys
sys.modules["PIL"] = None
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout_type import RolloutType
payload = bytes.fromhex(sys.argv[1])
print(Codec(RolloutType(dict), as_plain=True).decode(payload))
try:
    Codec(RolloutType(dict)).decode(payload)
except Exception as error:
    print(type(error).__name__, error)
"""
    payload = DICTS.encode([{"image": gradient("L"), "a": 1}])
    command = [sys.executable, "-c", code, payload.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    first, second = done.stdout.splitlines()
    assert first == "[{'image': {'mode': 'L', 'size': (9, 5)}, 'a': 1}]"
    assert second == "DecodeError it holds a PIL image, and PIL isn't installed here: pip install pillow"


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
    for codec in (DICTS, PLAIN):
        with pytest.raises(DecodeError, match=r"the payload is damaged: .+"):
            codec.decode(payload)
