"""Values of optional libraries in payloads: torch tensors, PIL images, Ray ObjectRefs.

None of these libraries is imported for writing: a value can't be one of theirs unless the library was imported.

A tensor is `[dtype, shape, bytes]`, with torch's name of the dtype and the bytes in C order. The bytes are an array of
uint8 in the tensor's own memory, if that is on the CPU and contiguous, and a restored tensor shares the memory of the
array that was read: no copy in between.

An image is `[mode, [width, height], pixels, info]`; the pixels are an array of bytes (`codec.blocks`). One that was
opened from a file is restored as a plain `PIL.Image.Image`.

An ObjectRef is the value of its object, which outlives the cluster. Packing looks the values up and never blocks: if
one is missing, the codec reports it (`UnfetchedError`), and a caller that may block fetches all of them in one call and
encodes again.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import numpy as np

from replaybuf.errors import DecodeError, RolloutError
from replaybuf.values.codec.blocks import StandIn
from replaybuf.values.codec.value_types import (
    IMAGE,
    MOST_DIMENSIONS,
    OBJECT_REF,
    SCALARS,
    TENSOR,
    AnyArray,
    Decoder,
    Decoders,
    Encoder,
    are_counts,
    type_tag,
)

RestoreTensors = Literal["torch", "numpy"]
RestoreRefs = Literal["ref", "value"]
#: Fetched values by ObjectRef.
Fetched = dict[Any, Any]

#: The dtypes that can be stored, with the bytes of an item.
_ITEM_SIZES: Final = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}

#: The modes that can be stored, with the bytes of a pixel ("1" packs eight into one).
_PIXELS: Final = {"1": 1, "L": 1, "LA": 2, "I;16": 2, "RGB": 3, "YCbCr": 3, "RGBA": 4, "CMYK": 4, "I": 4, "F": 4}


# torch tensors


class Tensors:
    """Encodes tensors. They are restored on the CPU, as tensors or, without torch, as arrays (bfloat16 as float32).

    dtype and shape are kept; strides, `requires_grad`, `grad` and the graph aren't.
    """

    def __init__(self, restore_as: RestoreTensors) -> None:
        build = _build_tensor if restore_as == "torch" else _build_array
        self.decoders: Decoders = {TENSOR: partial(_restore_tensor, build)}

    def encoder(self, kind: type) -> Encoder | None:
        tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        if tensor is None or not issubclass(kind, tensor):
            return None
        if kind is tensor:
            return type_tag(TENSOR), _tensor_parts
        raise TypeError(
            f"a tensor of the subclass {kind.__module__}.{kind.__qualname__} can't be stored: convert it with "
            ".as_subclass(torch.Tensor), or a distributed one with .full_tensor()"
        )


def _restore_tensor(build: Decoder, content: Any) -> Any:
    name, shape, raw = content
    return raw.as_tensor(name, shape, build) if isinstance(raw, StandIn) else build(content)


def _tensor_parts(tensor: Any) -> list[Any]:
    torch: Any = sys.modules["torch"]
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_quantized or tensor.is_nested or tensor.is_meta or tensor.layout != torch.strided:
        raise TypeError(
            "a tensor that is quantised, nested, sparse or on the device 'meta' can't be stored: convert it with "
            ".dequantize(), .unbind() or .to_dense()"
        )
    if name not in _ITEM_SIZES:
        raise TypeError(
            f"a tensor of dtype {name} can't be stored: convert it with .to(), or .view(torch.uint8) to keep its bytes"
        )
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # strides of dimensions of size 1 are arbitrary
    raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return [name, list(tensor.shape), raw]


def _checked_tensor(content: Any) -> tuple[str, list[int], AnyArray]:
    """Return the parts of a content. ValueError or TypeError for an invalid content."""
    name, shape, items = content
    good = name in _ITEM_SIZES and type(items) is np.ndarray and items.dtype == np.uint8 and items.ndim == 1
    good = good and are_counts(shape) and len(shape) <= MOST_DIMENSIONS
    if not good or math.prod(shape) * _ITEM_SIZES[name] != len(items):
        raise ValueError(f"no tensor of dtype {name!r:.80} and shape {shape!r:.80}")
    return name, shape, items


def _build_tensor(content: Any) -> Any:
    name, shape, items = _checked_tensor(content)
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise DecodeError(
            "it holds a torch tensor, and torch isn't installed here: install it, or read tensors as arrays "
            "(tensors='numpy')"
        ) from error
    dtype = getattr(torch, name)
    return torch.from_numpy(items).view(dtype).reshape(shape) if len(items) else torch.empty(shape, dtype=dtype)


def _build_array(content: Any) -> AnyArray:
    name, shape, items = _checked_tensor(content)
    if name == "bfloat16":
        return (items.view("<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    return items.view(name).reshape(shape)


# PIL images


# With mode, size, pixels, and the text, bytes and numbers of `info`.


def image_encoder(kind: type) -> Encoder | None:
    """Return the encoder of a class of PIL images."""
    image = getattr(sys.modules.get("PIL.Image"), "Image", None)
    return (type_tag(IMAGE), _image_parts) if image is not None and issubclass(kind, image) else None


def _restore_image(content: Any) -> Any:
    mode, (width, height), raw, info = content
    good = type(raw) is np.ndarray and raw.dtype == np.uint8 and type(info) is dict
    if not good or _pixel_bytes(mode, width, height) != raw.size:
        raise ValueError(f"no image of mode {mode!r:.80}")
    try:
        pil: Any = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise DecodeError("it holds a PIL image, and PIL isn't installed: pip install pillow") from error
    image = pil.frombytes(mode, (width, height), raw.data)
    image.info = info
    return image


IMAGE_DECODERS: Final[Decoders] = {IMAGE: _restore_image}


def _image_parts(image: Any) -> list[Any]:
    if getattr(image, "n_frames", 1) > 1:
        raise TypeError(
            f"an image of {image.n_frames} frames can't be stored: store the present one (.copy()) or a list of them "
            "([frame.copy() for frame in PIL.ImageSequence.Iterator(image)])"
        )
    if image.mode not in _PIXELS:
        raise TypeError(f"an image of mode {image.mode} can't be stored: convert it to one of {', '.join(_PIXELS)}")
    _pixel_bytes(image.mode, *image.size)
    raw = np.frombuffer(image.tobytes(), np.uint8)
    info = {key: value for key, value in image.info.items() if type(key) is str and _is_plain(value)}
    return [image.mode, list(image.size), raw, info]


def _pixel_bytes(mode: Any, width: Any, height: Any) -> int:
    """Return the bytes of an image's pixels. ValueError for an invalid mode or size."""
    if mode not in _PIXELS or type(width) is not int or type(height) is not int or min(width, height) < 1:
        raise ValueError(f"no image: mode {mode!r:.80}, size {width!r:.40} x {height!r:.40}")
    line = (width + 7) // 8 if mode == "1" else width * _PIXELS[mode]
    return line * height


def _is_plain(value: Any) -> bool:
    return type(value) in SCALARS or (type(value) is tuple and SCALARS.issuperset(map(type, value)))


# Ray ObjectRefs


class UnfetchedError(RolloutError):
    """The rollouts hold ObjectRefs whose values have to be fetched first: `refs`."""

    def __init__(self, refs: Sequence[Any] = ()) -> None:
        super().__init__()
        self.refs = tuple(refs)


@dataclass(slots=True)
class RefValues:
    """The values of ObjectRefs for one encoding, and the ObjectRefs without a value that it met."""

    values: Fetched
    missing: dict[Any, None] = field(default_factory=dict)

    def of(self, ref: Any) -> Any:
        """Return the value of an ObjectRef, None if it is missing."""
        if ref not in self.values:
            self.missing[ref] = None
            return None
        return self.values[ref]


class ObjectRefs:
    """Encodes ObjectRefs. They are restored as new ones (`ref`), or as the values of their objects (`value`).

    A new object belongs to the reading process. `timeout` is that of fetching the objects of a group, in seconds.
    """

    def __init__(self, restore_as: RestoreRefs, timeout: float) -> None:
        self._timeout = timeout
        self.decoders: Decoders = {OBJECT_REF: _put_object if restore_as == "ref" else lambda value: value}

    def encoder(self, kind: type) -> Encoder | None:
        ray = _ray()
        # Packing replaces the ObjectRef by its value (`RefValues`).
        return (type_tag(OBJECT_REF), lambda value: value) if ray and issubclass(kind, ray.ObjectRef) else None

    def fetch(self, refs: Sequence[Any]) -> Fetched:
        """Return the values of these ObjectRefs, by one call of Ray, for up to the timeout. Raises RolloutError."""
        ray = _ray()
        failed = f"the objects of {len(refs)} ObjectRefs can't be fetched:"
        if ray is None or not ray.is_initialized():  # ray.get would start a cluster of its own
            raise RolloutError(f"{failed} Ray isn't running in this process any more")
        try:
            return dict(zip(refs, ray.get(list(refs), timeout=self._timeout), strict=True))
        except ray.exceptions.GetTimeoutError:
            reason = f"they were not all there after {self._timeout:g} s (object_ref_timeout)"
            raise RolloutError(f"{failed} {reason}") from None
        except Exception as error:  # of Ray, or of the task that makes an object
            cause = getattr(error, "cause", None)  # the task's error, without the worker's traceback
            shown = cause if isinstance(cause, Exception) else error
            reason = f"{type(shown).__name__}: {str(shown).strip().partition(chr(10))[0][:300]}"
            raise RolloutError(f"{failed} {reason}") from error


def _put_object(value: Any) -> Any:
    ray = _ray()
    if ray is None or not ray.is_initialized():  # ray.put would start a cluster of its own
        raise DecodeError(
            "it holds a Ray ObjectRef, and Ray isn't running in this process: call ray.init() before, or read its "
            "objects as values (object_refs='value')"
        )
    return ray.put(value)


def _ray() -> Any:
    """Return Ray if it has been imported completely."""
    ray = sys.modules.get("ray")
    return ray if hasattr(ray, "ObjectRef") and hasattr(ray, "is_initialized") else None
