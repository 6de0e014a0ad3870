"""Values of rollouts as JSON, and back: plain values as they are, all others with a tag.

A tag is an object of one entry whose name begins with "$": `{"$tuple": [1, 2]}`, `{"$bytes": "aGk="}`,
`{"$ndarray": ["<f4", [2, 3], "..."]}`. Its content is that of the extension type of this name in payloads
(`codec.extension_types`), bytes in base64. A field of a rollout that is a row of numbers is a plain list; its *kind*
("array:<i4", "tensor:bfloat16:0", "status") is kept beside the fields, and names the type of the list.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from replaybuf.codec.extension_types import TAG_NAMES, TaggedValue
from replaybuf.codec.numpy_arrays import decode_array, describe_dtype
from replaybuf.codec.torch_tensors import StoredTensor
from replaybuf.rollouts.rollout import Status

_NUMBERS: Final = {name: number for number, name in TAG_NAMES.items()}
_PLAIN: Final = frozenset({type(None), bool, int, str})
_SMALL: Final = _PLAIN | {float}
_ROW: Final = re.compile(r"[<|]([iu][1248]|f[248]|b1)")
_KINDS: Final[dict[str, set[type]]] = {"i": {int}, "u": {int}, "f": {int, float}, "b": {bool}}
#: The dtypes of tensors whose rows of numbers are written as lists, with numpy's dtype for their values.
_TENSORS: Final = {
    **{name: np.dtype(name).str for name in ("int8", "int16", "int32", "int64", "uint8", "float16", "float32")},
    **{name: np.dtype(name).str for name in ("float64", "bool")},
    "bfloat16": "<f4",
}


def to_json(value: Any) -> Any:
    """Return a value of a tree as JSON's values and tags. RecursionError when it is nested too deeply."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": _odd_float(value)}
    if kind is list:
        kinds = set(map(type, value))
        if kinds <= _PLAIN or (kinds <= _SMALL and all(map(math.isfinite, filter(_is_float, value)))):
            return value
        return list(map(to_json, value))
    if kind is dict:
        if all(type(name) is str and not name.startswith("$") for name in value):
            return {name: to_json(item) for name, item in value.items()}
        return {"$dict": [[to_json(name), to_json(item)] for name, item in value.items()]}
    if kind is bytes:
        return {"$bytes": _to_text(value)}
    if kind is TaggedValue:
        return {f"${TAG_NAMES[value.code]}": to_json(value.content)}
    if kind is Status:
        return {"$status": value.value}
    if isinstance(value, np.ndarray):
        return {"$ndarray": [describe_dtype(value.dtype), list(value.shape), _to_text(value.tobytes())]}
    if kind is StoredTensor:
        name, shape, items, flags = value.content
        return {"$tensor": [name, shape, _to_text(items.tobytes()), flags]}
    raise TypeError(f"a {kind.__qualname__} in a tree")


def _is_float(value: Any) -> bool:
    return type(value) is float


def from_json(value: Any) -> Any:
    """Return the value of a tree for what `to_json` made of it. ValueError for a tag that makes no sense."""
    if type(value) is list:
        return value if set(map(type, value)) <= _SMALL else list(map(from_json, value))
    if type(value) is not dict:
        return value
    if len(value) == 1:
        [(name, content)] = value.items()
        if name.startswith("$"):
            return _untagged(name[1:], content)
    return {name: from_json(item) for name, item in value.items()}


def _untagged(name: str, content: Any) -> Any:
    if name in _NUMBERS:
        return TaggedValue(_NUMBERS[name], from_json(content))
    build_it = _BUILT.get(name)
    if build_it is None:
        raise ValueError(f"there is no tag {'$' + name!r:.60}")
    try:
        return build_it(content)
    except (TypeError, ValueError, KeyError, struct.error) as error:
        raise ValueError(f"a {'$' + name} can't be {content!r:.60} ({error!s:.100})") from error


def _build_dict(content: Any) -> dict[Any, Any]:
    return {from_json(name): from_json(item) for name, item in content}


def _build_array(content: Any) -> Any:
    description, shape, text = content
    return decode_array([description, shape, "C", _to_bytes(text)])


def _build_tensor(content: Any) -> StoredTensor:
    name, shape, text, flags = content
    return StoredTensor([name, shape, _to_bytes(text), flags])


def _build_float(content: Any) -> float:
    number = float(content) if content in _ODD else struct.unpack(">d", bytes.fromhex(content))[0]
    return float(number)


_BUILT: Final[dict[str, Callable[[Any], Any]]] = {
    "dict": _build_dict,
    "bytes": lambda text: _to_bytes(text),
    "ndarray": _build_array,
    "tensor": _build_tensor,
    "status": Status,
    "float": _build_float,
}

_ODD: Final = ("nan", "inf", "-inf")


def _odd_float(value: float) -> str:
    """Return a number that JSON lacks as a text: its bits for one of the rarer NaNs."""
    bits = struct.pack(">d", value).hex()
    return next((name for name in _ODD if struct.pack(">d", float(name)).hex() == bits), bits)


def _to_text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _to_bytes(text: Any) -> bytes:
    if type(text) is not str:
        raise ValueError("no base64")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error


# Fields of rollouts


def to_field(value: Any) -> tuple[Any, str | None]:
    """Return a field's value for a row, as JSON's values, tags or bytes, and its kind if that says more."""
    if type(value) is bytes:
        return value, None
    if type(value) is Status:
        return value.value, "status"
    if isinstance(value, np.ndarray) and value.ndim == 1 and _ROW.fullmatch(value.dtype.str) and _finite(value):
        return value.tolist(), f"array:{value.dtype.str}"
    if type(value) is StoredTensor:
        name, shape, _, flags = value.content
        if len(shape) == 1 and name in _TENSORS and _finite(numbers := value.numpy()):
            return numbers.tolist(), f"tensor:{name}:{flags}"
    return to_json(value), None


def from_field(value: Any, kind: str | None) -> Any:
    """Return a field's value of a tree. ValueError when the value isn't of this kind."""
    if kind is None:
        return value if type(value) is bytes else from_json(value)
    name, _, rest = kind.partition(":")
    if name == "status":
        return Status(value)
    if name == "array":
        return _row(value, rest)
    dtype, _, flags = rest.partition(":")
    if name != "tensor" or dtype not in _TENSORS or flags not in ("0", "1", "2", "3"):
        raise ValueError(f"there is no kind of value {kind!r:.60}")
    numbers = _row(value, _TENSORS[dtype])
    if dtype == "bfloat16":
        numbers = (numbers.view("<u4") >> 16).astype("<u2")
    return StoredTensor([dtype, [len(numbers)], numbers.tobytes(), int(flags)])


def _row(value: Any, dtype: str) -> Any:
    if not _ROW.fullmatch(dtype):
        raise ValueError(f"there is no dtype {dtype!r:.40} of rows of numbers")
    if type(value) is not list or not set(map(type, value)) <= _KINDS[dtype[1]]:
        raise ValueError(f"expected a list of numbers (dtype {dtype}), got {value!r:.60}")
    try:
        with np.errstate(over="ignore"):
            row = np.array(value, dtype)
    except OverflowError as error:
        raise ValueError(f"{error} (dtype {dtype})") from error
    if not _finite(row):  # one that isn't finite is no row of numbers, when it is written
        raise ValueError(f"a number is too large for the dtype {dtype}: {value!r:.60}")
    return row


def _finite(numbers: Any) -> bool:
    return numbers.dtype.kind != "f" or bool(np.isfinite(numbers).all())
