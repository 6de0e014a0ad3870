"""torch tensors in payloads: `[dtype, shape, bytes, flags]`, with torch's name of the dtype and the bytes in C order.

torch is never imported for writing: a value can't be a tensor unless torch was imported. The bytes are an array of
uint8 in the tensor's own memory, if that is on the CPU and contiguous, and a restored tensor shares the memory of the
array that was read: no copy in between.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from replaybuf.codec.blocks import StandIn, as_writable
from replaybuf.codec.extension_types import TENSOR, Decoder, Encoder, type_tag
from replaybuf.errors import DecodeError

RestoreTensors = Literal["torch", "numpy", "stored"]
AnyArray = npt.NDArray[Any]

_GRAD, _PARAMETER = 1, 2
_MAX_DIMENSIONS: Final = 64
#: The dtypes that can be stored, with the bytes of an item.
SIZES: Final = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


class Tensors:
    """Encodes tensors and parameters. They are restored on the CPU, as tensors or, without torch, as arrays.

    dtype, shape, `requires_grad` and whether it is a Parameter are kept; strides, `grad` and the graph aren't. bfloat16
    and complex32 become arrays of float32 and complex64, and float8 its bytes.
    """

    def __init__(self, restore_as: RestoreTensors) -> None:
        decoders: dict[RestoreTensors, Decoder] = {"torch": _build, "numpy": _build_array, "stored": StoredTensor}
        self.decoders: Mapping[int, Decoder] = {TENSOR: functools.partial(_restore, decoders[restore_as])}

    def encoder(self, kind: type) -> Encoder | None:
        if kind is StoredTensor:
            return type_tag(TENSOR), StoredTensor.take_apart
        torch: Any = sys.modules.get("torch")
        tensor, parameter = getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None)
        if tensor is None or not issubclass(kind, tensor):
            return None
        if kind is tensor or kind is parameter:
            return type_tag(TENSOR), _take_apart
        raise TypeError(
            f"a tensor of the subclass {kind.__module__}.{kind.__qualname__} can't be stored: convert it with "
            ".as_subclass(torch.Tensor), or a distributed one with .full_tensor()"
        )


class StoredTensor:
    """A tensor as stored in its payload, for copies of payloads: it is written unchanged.

    It has the methods of torch that rules of staleness need for token sequences, and works without torch.
    """

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = _checked(content)

    def take_apart(self) -> list[Any]:
        """Return the unchanged content."""
        name, shape, items, flags = self.content
        return [name, shape, items, flags]

    def __len__(self) -> int:
        shape: list[int] = self.content[1]
        if not shape:
            raise TypeError("a tensor without dimensions has no length")
        return shape[0]

    def __setitem__(self, places: list[int], number: int) -> None:
        name, shape, items, flags = self.content
        if number != 0:
            raise ValueError(f"items of a stored tensor can be set to 0, not {number}")
        rows = items.copy().reshape(len(self), -1)
        rows[places] = 0  # valid in every dtype of masks
        self.content = (name, shape, rows.reshape(-1), flags)

    def numpy(self) -> AnyArray:
        """Return its numbers as a read-only array."""
        name, shape, items, _ = self.content
        array = _as_array(name, shape, items.view())
        array.flags.writeable = False
        return array

    def new_full(self, shape: Sequence[int], number: int, dtype: Any = None) -> StoredTensor:
        """Return an int32 tensor of this shape filled with this number, whatever `dtype` says."""
        return StoredTensor(["int32", list(shape), np.full(shape, number, "<i4").tobytes(), 0])

    def detach(self) -> StoredTensor:
        return self

    def cpu(self) -> StoredTensor:
        return self

    def clone(self) -> StoredTensor:
        return StoredTensor(self.content)


def _restore(build: Decoder, content: Any) -> Any:
    name, shape, raw, flags = content
    return raw.as_tensor(name, shape, build, flags) if isinstance(raw, StandIn) else build(content)


def _take_apart(tensor: Any) -> list[Any]:
    torch: Any = sys.modules["torch"]
    name = str(tensor.dtype).removeprefix("torch.")
    if problem := _problem(tensor, name):
        raise TypeError(f"a tensor {problem}")
    flags = _GRAD * tensor.requires_grad | _PARAMETER * isinstance(tensor, torch.nn.Parameter)
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # strides of dimensions of size 1 are arbitrary
    raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return [name, list(tensor.shape), raw, flags]


def _problem(tensor: Any, dtype: str) -> str:
    """Return why a tensor can't be stored, with advice, or ""."""
    if tensor.is_quantized:
        return f"of the quantised dtype {dtype} can't be stored: convert it with .dequantize() or .int_repr()"
    if tensor.is_nested:
        return "that is nested can't be stored: store the list of its parts (.unbind())"
    if str(tensor.layout) != "torch.strided":
        return f"of the layout {tensor.layout} can't be stored: convert it with .to_dense()"
    if tensor.is_meta:
        return "on the device 'meta' can't be stored: it has no data"
    if dtype not in SIZES:
        return f"of dtype {dtype} can't be stored: convert it with .to(), or .view(torch.uint8) to keep its bytes"
    return ""


def _checked(content: Any) -> tuple[str, list[int], AnyArray, int]:
    """Return the parts of a content, with its bytes as an array. ValueError or TypeError for an invalid content."""
    name, shape, raw, flags = content
    if name not in SIZES:
        raise ValueError(f"unknown dtype of a tensor: {name!r:.80}")
    items = as_writable(raw) if type(raw) is bytes else raw  # just unpacked
    if type(items) is not np.ndarray or items.dtype != np.uint8 or items.ndim != 1:
        raise ValueError("no bytes of a tensor")
    if type(shape) is not list or type(flags) is not int or not 0 <= flags <= 3:
        raise ValueError("no tensor")
    if len(shape) > _MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"a tensor can't have the shape {shape!r:.80}")
    if math.prod(shape) * SIZES[name] != len(items):
        raise ValueError(f"a tensor of shape {shape!r:.80} and dtype {name} can't have {len(items)} bytes")
    return name, shape, items, flags


def _build(content: Any) -> Any:
    name, shape, items, flags = _checked(content)
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise DecodeError(
            "it holds a torch tensor, and torch isn't installed here: install it, or read tensors as arrays "
            "(tensors='numpy')"
        ) from error
    dtype = getattr(torch, name, None)
    if dtype is None:
        raise DecodeError(
            f"it holds a tensor of dtype {name}, which torch {torch.__version__} doesn't have: upgrade it"
        )
    tensor = torch.from_numpy(items).view(dtype).reshape(shape) if len(items) else torch.empty(shape, dtype=dtype)
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & _GRAD))
    return tensor.requires_grad_() if flags & _GRAD else tensor


def _build_array(content: Any) -> AnyArray:
    name, shape, items, _ = _checked(content)
    return _as_array(name, shape, items)


def _as_array(name: str, shape: list[int], items: AnyArray) -> AnyArray:
    """Return these bytes as an array of their dtype, in their memory if numpy has that dtype."""
    flat: AnyArray
    if name.startswith("float8"):
        flat = items
    elif name == "bfloat16":
        flat = (items.view("<u2").astype("<u4") << 16).view("<f4")
    elif name == "complex32":
        flat = items.view("<f2").astype("<f4").view("<c8")
    else:
        flat = items.view(name)
    return flat.reshape(shape)
