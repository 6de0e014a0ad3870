"""torch tensors in payloads: `[dtype, shape, bytes]`, with torch's name of the dtype and the bytes in C order.

torch is never imported for writing: a value can't be a tensor unless torch was imported. The bytes are an array of
uint8 in the tensor's own memory, if that is on the CPU and contiguous, and a restored tensor shares the memory of the
array that was read: no copy in between.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Literal

import numpy as np

from replaybuf.errors import DecodeError
from replaybuf.values.codec.blocks import StandIn
from replaybuf.values.codec.value_types import TENSOR, AnyArray, Decoder, Encoder, type_tag

RestoreTensors = Literal["torch", "numpy"]

_MAX_DIMENSIONS: Final = 64
#: The dtypes that can be stored, with the bytes of an item.
SIZES: Final = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


class Tensors:
    """Encodes tensors. They are restored on the CPU, as tensors or, without torch, as arrays (bfloat16 as float32).

    dtype and shape are kept; strides, `requires_grad`, `grad` and the graph aren't.
    """

    def __init__(self, restore_as: RestoreTensors) -> None:
        build = _build if restore_as == "torch" else _build_array
        self.decoders: Mapping[int, Decoder] = {TENSOR: partial(_restore, build)}

    def encoder(self, kind: type) -> Encoder | None:
        tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        if tensor is None or not issubclass(kind, tensor):
            return None
        if kind is tensor:
            return type_tag(TENSOR), _take_apart
        raise TypeError(
            f"a tensor of the subclass {kind.__module__}.{kind.__qualname__} can't be stored: convert it with "
            ".as_subclass(torch.Tensor), or a distributed one with .full_tensor()"
        )


def _restore(build: Decoder, content: Any) -> Any:
    name, shape, raw = content
    return raw.as_tensor(name, shape, build) if isinstance(raw, StandIn) else build(content)


def _take_apart(tensor: Any) -> list[Any]:
    torch: Any = sys.modules["torch"]
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_quantized or tensor.is_nested or tensor.is_meta or tensor.layout != torch.strided:
        raise TypeError(
            "a tensor that is quantised, nested, sparse or on the device 'meta' can't be stored: convert it with "
            ".dequantize(), .unbind() or .to_dense()"
        )
    if name not in SIZES:
        raise TypeError(
            f"a tensor of dtype {name} can't be stored: convert it with .to(), or .view(torch.uint8) to keep its bytes"
        )
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # strides of dimensions of size 1 are arbitrary
    raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return [name, list(tensor.shape), raw]


def _checked(content: Any) -> tuple[str, list[int], AnyArray]:
    """Return the parts of a content. ValueError or TypeError for an invalid content."""
    name, shape, items = content
    if name not in SIZES:
        raise ValueError(f"unknown dtype of a tensor: {name!r:.80}")
    if type(items) is not np.ndarray or items.dtype != np.uint8 or items.ndim != 1:
        raise ValueError("no bytes of a tensor")
    if type(shape) is not list or len(shape) > _MAX_DIMENSIONS:
        raise ValueError("no shape of a tensor")
    if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) * SIZES[name] != len(items):
        raise ValueError(f"a tensor of shape {shape!r:.80} and dtype {name} can't have {len(items)} bytes")
    return name, shape, items


def _build(content: Any) -> Any:
    name, shape, items = _checked(content)
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
    return torch.from_numpy(items).view(dtype).reshape(shape) if len(items) else torch.empty(shape, dtype=dtype)


def _build_array(content: Any) -> AnyArray:
    name, shape, items = _checked(content)
    if name == "bfloat16":
        return (items.view("<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    return items.view(name).reshape(shape)
