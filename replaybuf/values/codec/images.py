"""PIL images in payloads: `[mode, [width, height], pixels, info]`; the pixels are an array of bytes (`codec.blocks`).

An image that was opened from a file is restored as a plain `PIL.Image.Image`. PIL is never imported for writing: a
value can't be an image unless PIL was imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from replaybuf.errors import DecodeError
from replaybuf.values.codec.value_types import IMAGE, SCALARS, Decoder, Encoder, type_tag

#: The modes that can be stored, with the bytes of a pixel ("1" packs eight into one).
_PIXELS: Final = {"1": 1, "L": 1, "LA": 2, "I;16": 2, "RGB": 3, "YCbCr": 3, "RGBA": 4, "CMYK": 4, "I": 4, "F": 4}
#: The largest dimension of an image without pixels; PIL allocates memory for each of its lines.
_LONGEST_EMPTY: Final = 1 << 16


class Images:
    """Encodes PIL images, with mode, size, pixels, and the text, bytes and numbers of `info`.

    With `as_plain` an image is read as its mode and size where PIL isn't installed.
    """

    def __init__(self, *, as_plain: bool = False) -> None:
        self._as_plain = as_plain
        self.decoders: Mapping[int, Decoder] = {IMAGE: self._restore}

    def encoder(self, kind: type) -> Encoder | None:
        image = getattr(sys.modules.get("PIL.Image"), "Image", None)
        return (type_tag(IMAGE), _take_apart) if image is not None and issubclass(kind, image) else None

    def _restore(self, content: Any) -> Any:
        mode, (width, height), raw, info = content
        if type(raw) is not np.ndarray or raw.dtype != np.uint8 or type(info) is not dict:
            raise ValueError("no pixels of an image")
        if _nbytes(mode, width, height) != raw.size:
            raise ValueError(f"an image of mode {mode!r:.80} can't have {raw.size} bytes")
        try:
            pil: Any = importlib.import_module("PIL.Image")
        except ImportError as error:
            if self._as_plain:
                return {"mode": mode, "size": (width, height)}
            raise DecodeError("it holds a PIL image, and PIL isn't installed here: pip install pillow") from error
        image = pil.frombytes(mode, (width, height), raw.data if raw.size else b"")
        image.info = info
        return image


def _take_apart(image: Any) -> list[Any]:
    if getattr(image, "n_frames", 1) > 1:
        raise TypeError(
            f"an image of {image.n_frames} frames can't be stored: store the present one (.copy()) or a list of them "
            "([frame.copy() for frame in PIL.ImageSequence.Iterator(image)])"
        )
    if image.mode not in _PIXELS:
        raise TypeError(f"an image of mode {image.mode} can't be stored: convert it to one of {', '.join(_PIXELS)}")
    _nbytes(image.mode, *image.size)
    raw = np.frombuffer(image.tobytes(), np.uint8)
    info = {key: value for key, value in image.info.items() if type(key) is str and _is_plain(value)}
    return [image.mode, list(image.size), raw, info]


def _nbytes(mode: Any, width: Any, height: Any) -> int:
    """Return the bytes of an image's pixels. ValueError for an invalid mode or size."""
    if mode not in _PIXELS or type(width) is not int or type(height) is not int or min(width, height) < 0:
        raise ValueError(f"no image: mode {mode!r:.80}, size {width!r:.40} x {height!r:.40}")
    if min(width, height) == 0 and max(width, height) > _LONGEST_EMPTY:
        raise ValueError(f"an image without pixels of size {width} x {height}")
    line = (width + 7) // 8 if mode == "1" else width * _PIXELS[mode]
    return line * height


def _is_plain(value: Any) -> bool:
    return type(value) in SCALARS or (type(value) is tuple and SCALARS.issuperset(map(type, value)))
