"""PIL images in payloads: `[mode, [width, height], bytes, palette, info]`, with unchanged pixels.

An image that was opened from a file is restored as a plain `PIL.Image.Image`. PIL is never imported for writing: a
value can't be an image unless PIL was imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from numbers import Rational
from typing import Any, Final

from replaybuf.codec.extension_types import IMAGE, Decoder, Encoder, type_tag
from replaybuf.errors import DecodeError

#: The modes that can be stored, with the bytes of a pixel ("1" packs eight into one).
_PIXELS: Final = {
    **dict.fromkeys(("1", "L", "P"), 1),
    **dict.fromkeys(("LA", "La", "PA", "I;16", "I;16L", "I;16B"), 2),
    **dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 3),
    **dict.fromkeys(("RGBA", "RGBa", "RGBX", "CMYK", "I", "F"), 4),
}
#: The largest dimension of an image without pixels; PIL allocates memory for each of its lines.
_LONGEST_EMPTY: Final = 1 << 16
_PALETTES: Final = ("RGB", "RGBA")
_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})


class Images:
    """Encodes PIL images, with mode, size, pixels, palette, and the text, bytes and numbers of `info`.

    With `as_plain` an image is read as its mode and size where PIL isn't installed.
    """

    def __init__(self, *, as_plain: bool = False) -> None:
        self._as_plain = as_plain
        self.decoders: Mapping[int, Decoder] = {IMAGE: self._restore}

    def encoder(self, kind: type) -> Encoder | None:
        image = getattr(sys.modules.get("PIL.Image"), "Image", None)
        return (type_tag(IMAGE), _take_apart) if image is not None and issubclass(kind, image) else None

    def _restore(self, content: Any) -> Any:
        mode, (width, height), raw, palette, info = content
        if _nbytes(mode, width, height) != len(raw) or type(raw) is not bytes or type(info) is not dict:
            raise ValueError(f"an image of mode {mode!r:.80} can't have {len(raw)} bytes")
        try:
            pil: Any = importlib.import_module("PIL.Image")
        except ImportError as error:
            if self._as_plain:
                return {"mode": mode, "size": (width, height)}
            raise DecodeError("it holds a PIL image, and PIL isn't installed here: pip install pillow") from error
        image = pil.frombytes(mode, (width, height), raw)
        if palette is not None:
            palette_mode, colours = palette
            if palette_mode not in _PALETTES or type(colours) is not bytes or len(colours) > 256 * len(palette_mode):
                raise ValueError(f"no palette: {palette_mode!r:.80}")
            image.putpalette(colours, palette_mode)
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
    raw = image.tobytes()
    palette = None
    if image.palette is not None and image.mode in ("P", "PA"):
        palette_mode = image.palette.mode if image.palette.mode in _PALETTES else "RGB"
        palette = [palette_mode, bytes(image.getpalette(palette_mode))]
    info = {key: _number(value) for key, value in image.info.items() if type(key) is str}
    info = {key: value for key, value in info.items() if _is_plain(value)}
    return [image.mode, list(image.size), raw, palette, info]


def _nbytes(mode: Any, width: Any, height: Any) -> int:
    """Return the bytes of an image's pixels. ValueError for an invalid mode or size."""
    if mode not in _PIXELS or type(width) is not int or type(height) is not int or min(width, height) < 0:
        raise ValueError(f"no image: mode {mode!r:.80}, size {width!r:.40} x {height!r:.40}")
    if min(width, height) == 0 and max(width, height) > _LONGEST_EMPTY:
        raise ValueError(f"an image without pixels of size {width} x {height}")
    line = (width + 7) // 8 if mode == "1" else width * _PIXELS[mode]
    return line * height


def _number(value: Any) -> Any:
    """Return fractions, which TIFF files have many of, as floats, and other values unchanged."""
    if type(value) is tuple:
        return tuple(map(_number, value))
    return float(value) if isinstance(value, Rational) and type(value) not in _PLAIN else value


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and _PLAIN.issuperset(map(type, value)))
