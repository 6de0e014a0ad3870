"""Pickles, read as data: nothing that one names is imported, called or built.

The machine of a pickle makes records in place of objects: `Made("torch.storage.X", args)`. Only names that are listed
here, those of data, get so far; any other one is refused, and the error says what the pickle wanted. `rebuilt` turns
the records into trees (`codec.trees`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import IO, Any, ClassVar, Final

import numpy as np

from replaybuf.codec import marks
from replaybuf.codec.arrays import build_dtype
from replaybuf.codec.tensors import StoredTensor
from replaybuf.codec.trees import Marked
from replaybuf.errors import FileError, UnsafePickleError
from replaybuf.rollouts.rollout import Status

_PYTHON2: Final = {"__builtin__": "builtins", "copy_reg": "copyreg", "numpy._core": "numpy.core"}
#: The dtypes of torch's storages by the names of their classes.
STORAGES: Final = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
_TORCH_DTYPES: Final = frozenset(
    (
        *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
)
#: xtuner's classes in a saved buffer, wherever their modules are.
RECORDS: Final = frozenset(
    (
        *("RolloutState", "StorageItem", "SerializedRayObjectRef", "SampleParams", "RolloutToolCall"),
        *("RolloutFunctionCall", "MultimodalInfo"),
    )
)
_STATUS: Final = "Status"


class Name:
    """A class or function that a pickle names. Calling it makes a record."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, *args: Any, **options: Any) -> Made:
        return Made(self.text, args, options)

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickleError(f"the pickle changes {self.text}; it holds more than data, and was not loaded")


class Made:
    """What a pickle makes of a name: its arguments, its state, and what was put into it."""

    __slots__ = ("args", "items", "name", "options", "pairs", "state")

    def __init__(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.name = name
        self.args = args
        self.options = options
        self.state: Any = None
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    add = append

    def __setitem__(self, name: Any, value: Any) -> None:
        self.pairs.append((name, value))


class _Bounded:
    """A file that gives no more than it has: no length in a pickle makes room for more."""

    def __init__(self, raw: IO[bytes], size: int) -> None:
        self._raw = raw
        self._size = size
        self.readline = raw.readline

    def read(self, count: int) -> bytes:
        if count > self._size - self._raw.tell():
            raise EOFError(f"{count} bytes are to follow, and the file ends before")
        return self._raw.read(count)

    def readinto(self, into: Any) -> int:
        data = self.read(len(into))
        into[:] = data
        return len(data)


_Base: Any = pickle._Unpickler


class Loading(_Base):  # type: ignore[misc]
    """The machine of one pickle; `load()` returns its plain values and records. Raises FileError."""

    dispatch: ClassVar[dict[int, Any]] = dict(_Base.dispatch)

    def __init__(self, raw: IO[bytes], size: int, storage: Callable[[Any], Any]) -> None:
        super().__init__(_Bounded(raw, size), encoding="utf-8")
        self._storage = storage
        self._bytes = size

    def load(self) -> Any:
        try:
            return super().load()
        except FileError:
            raise
        except RecursionError as error:
            raise FileError("the pickle is nested too deeply") from error
        except Exception as error:  # hostile bytes can raise anything
            raise FileError(f"the pickle is damaged or cut short ({type(error).__name__}: {error!s:.120})") from error

    def find_class(self, module: Any, name: Any) -> Any:
        full = _full_name(str(module), str(name))
        if full.rpartition(".")[2] in RECORDS | {_STATUS} and full.startswith("xtuner."):
            return Name(full)
        if full in _REBUILT or _storage_dtype(full) or full.removeprefix("torch.") in _TORCH_DTYPES:
            return Name(full)
        raise UnsafePickleError(
            f"the pickle wants to import {full!r:.150}, which is no data that this reader knows; nothing was run. If "
            "you trust the file, load it with its own program, and export its rollouts as JSONL or Parquet"
        )

    def persistent_load(self, pid: Any) -> Any:
        return self._storage(pid)

    def get_extension(self, code: int) -> None:
        raise UnsafePickleError(f"the pickle wants the extension {code} of copyreg, which is no data; nothing was run")

    def load_newobj(self) -> None:
        args = self.stack.pop()
        name = self.stack.pop()
        self.append(_named(name)(*args))

    dispatch[pickle.NEWOBJ[0]] = load_newobj

    def load_newobj_ex(self) -> None:
        options = self.stack.pop()
        args = self.stack.pop()
        name = self.stack.pop()
        self.append(_named(name)(*args, **options))

    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = _named(self.stack[-1])(*args)

    dispatch[pickle.REDUCE[0]] = load_reduce

    def _instantiate(self, name: Any, args: Any) -> None:
        self.append(_named(name)(*args))

    def load_bytearray8(self) -> None:
        size = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(size)))

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8


def _named(name: Any) -> Name:
    if type(name) is not Name:
        raise UnsafePickleError(f"the pickle calls a {type(name).__name__}, which is no data; nothing was run")
    return name


def _full_name(module: str, name: str) -> str:
    for old, new in _PYTHON2.items():
        if module == old or module.startswith(f"{old}."):
            module = new + module.removeprefix(old)
    return f"{module}.{name}"


def _storage_dtype(full: str) -> str | None:
    module, _, name = full.rpartition(".")
    return STORAGES.get(name) if module in ("torch", "torch.storage") else None


# From records to trees


class Rebuilding:
    """Turns what a pickle holds into trees, which take memory in proportion to the file, of this size.

    FileError when they would not, because the pickle refers to the same values again and again: items, and bytes of
    texts, arrays and tensors, are counted.
    """

    def __init__(self, size: int) -> None:
        self._items = 1_000_000 + 8 * size
        self._bytes = (128 << 20) + 64 * size  # the rollouts of a group share their prompt, an image perhaps

    def tree(self, value: Any) -> Any:
        """Return a value as a tree. Raises FileError."""
        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            self._spend(len(value))
            if kind is list and value and _are_small(value):
                return list(value)
            items = [self.tree(item) for item in value]
            return items if kind is list else Marked(_MARKS[kind], items)
        if kind is dict:
            self._spend(len(value))
            return self.names(value.items())
        if kind is int:
            return value if -(2**63) <= value < 2**64 else self._large_int(value)
        if kind in _SMALL:
            return value
        if kind is str or kind is bytes:
            self.spend(len(value))
            return value
        if kind is bytearray:
            self.spend(len(value))
            return Marked(marks.BYTEARRAY, bytes(value))
        if kind is complex:
            return Marked(marks.COMPLEX, [value.real, value.imag])
        if kind is Made:
            return self._made(value)
        raise FileError(f"the pickle holds a {kind.__name__} by itself, which is no data of rollouts")

    def names(self, pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        """Return pairs of names and values as a tree. Raises FileError."""
        try:
            return {self.tree(name): self.tree(item) for name, item in pairs}
        except TypeError as error:
            raise FileError(f"the pickle has a dict with a name that can't be one ({error!s:.100})") from error

    def _large_int(self, value: int) -> Marked:
        self.spend(value.bit_length() // 8)
        return Marked(marks.INT, _int_bytes(value))

    def _made(self, made: Made) -> Any:
        if made.name.startswith("xtuner."):
            return self._record(made)
        rebuild = _REBUILT.get(made.name)
        if rebuild is None:
            raise FileError(f"the pickle makes a {made.name!r:.100}, which is no value of rollouts")
        try:
            return rebuild(self, made)
        except FileError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise FileError(f"the pickle's {made.name} is damaged ({error!s:.100})") from error

    def _record(self, made: Made) -> Any:
        if made.name.endswith(f".{_STATUS}"):
            return _status(made)
        fields = record_fields(made)
        if made.name.endswith(".SerializedRayObjectRef"):
            return self.tree(fields.get("value"))
        return self.tree(fields)

    def spend(self, nbytes: int) -> None:
        """Count the bytes of a value. FileError when there are too many."""
        self._bytes -= nbytes
        self._check()

    def _spend(self, items: int) -> None:
        self._items -= items
        self._check()

    def _check(self) -> None:
        if min(self._items, self._bytes) < 0:
            raise FileError(
                "the pickle refers to the same values again and again: unfolded, they would fill the memory. If you "
                "trust the file, load it with its own program, and export its rollouts as JSONL or Parquet"
            )


def _are_small(values: list[Any]) -> bool:
    """Return whether values are numbers that take no more room than others."""
    kinds = set(map(type, values))
    return kinds == {float} or (kinds <= {bool, int, float} and min(values) >= -(2**63) and max(values) < 2**64)


_SMALL: Final = frozenset({type(None), bool, float})
_MARKS: Final[dict[type, int]] = {tuple: marks.TUPLE, set: marks.SET, frozenset: marks.FROZENSET}


def record_fields(made: Made) -> dict[str, Any]:
    """Return the fields of an instance of a dataclass or a pydantic model."""
    state = made.state if isinstance(made.state, dict) else {}
    fields = state.get("__dict__") if "__pydantic_fields_set__" in state else state
    if not isinstance(fields, dict):
        raise FileError(f"the pickle's {made.name} has no fields")
    return fields


def _status(made: Made) -> Status:
    given = made.args[0] if made.args else None
    if type(given) is not str or given not in set(Status):
        raise FileError(f"the pickle's {made.name} is {given!r:.60}; expected one of {', '.join(Status)}")
    return Status(given)


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _iterable(self: Rebuilding, made: Made) -> list[Any]:
    items = [*(made.args[0] if made.args else ()), *made.items]
    self._spend(len(items))
    if any(isinstance(item, Made | Name) for item in items) and made.name.endswith("set"):
        raise ValueError("its items can't be in a set")
    return items


def _set(self: Rebuilding, made: Made) -> Any:
    number = marks.SET if made.name == "builtins.set" else marks.FROZENSET
    return Marked(number, [self.tree(item) for item in _iterable(self, made)])


def _mapping(self: Rebuilding, made: Made) -> Any:
    default = made.name.endswith("defaultdict")
    given = made.args[int(default) :]
    pairs = [*(given[0].items() if given and isinstance(given[0], dict) else given[0] if given else ()), *made.pairs]
    self._spend(len(pairs))
    tree = self.names(pairs)
    return tree if default else Marked(marks.ORDERED_DICT, tree)


def _encoded(self: Rebuilding, made: Made) -> Any:
    text, encoding = made.args
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes in {encoding!r:.40}")
    self.spend(len(text))
    return str.encode(text, "latin-1")


def _bytearray(self: Rebuilding, made: Made) -> Any:
    [content] = made.args[:1] or (b"",)
    content = self.tree(content)
    if type(content) is str and made.args[1:] == ("latin-1",):
        content = content.encode("latin-1")
    return Marked(marks.BYTEARRAY, bytes(content) if type(content) is bytes else _refuse("its content is no bytes"))


def _refuse(why: str) -> Any:
    raise ValueError(why)


def _dtype(made: Any) -> np.dtype[Any]:
    """Return numpy's dtype for its record."""
    if type(made) is not Made or made.name != "numpy.dtype":
        raise ValueError("no dtype of numpy")
    text, order = str(made.args[0]), "|"
    if isinstance(made.state, tuple):
        order = str(made.state[1])
        if made.state[3] is not None:
            raise ValueError("an array of records, which this reader doesn't know")
    if text.startswith("O"):
        raise ValueError("an array of Python objects, which this reader doesn't know")
    described = np.dtype(text).str.lstrip("<>=|")
    big = ">" if order == ">" and np.dtype(text).itemsize > 1 else ""
    described = np.dtype(big + described).str
    return build_dtype(described)


def _array(self: Rebuilding, made: Made) -> Any:
    state = made.state
    _, shape, dtype, fortran, raw = state
    raw = self.tree(raw)
    kind = _dtype(dtype)
    if type(raw) is not bytes:
        raise ValueError("its items are no bytes")
    array = np.frombuffer(raw, kind)
    if array.size != int(np.prod(shape, dtype=object)) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"shape {shape!r:.60} for {array.size} items")
    return np.ascontiguousarray(array.reshape(shape, order="F" if fortran else "C")).copy()


def _scalar(self: Rebuilding, made: Made) -> Any:
    kind, raw = _dtype(made.args[0]), self.tree(made.args[1])
    if len(raw) != kind.itemsize:
        raise ValueError("its size is another one")
    return Marked(marks.SCALAR, [kind.str, raw])


def _frombuffer(self: Rebuilding, made: Made) -> Any:
    raw, dtype, shape, order = made.args
    state = (1, shape, dtype, order == "F", bytes(raw) if isinstance(raw, bytes | bytearray) else self.tree(raw))
    made.state = state
    return _array(self, made)


def _tensor(self: Rebuilding, made: Made) -> Any:
    storage, offset, size, stride, *rest = made.args
    dtype = rest[2].text.removeprefix("torch.") if made.name.endswith("_v3") and type(rest[2]) is Name else None
    if made.name.endswith("_v3") and dtype is None:
        dtype = _dtype_name(rest[2])
    tensor: StoredTensor = storage.tensor(offset, tuple(size), tuple(stride), dtype, bool(rest and rest[0] is True))
    self.spend(len(tensor.content[2]))
    return tensor


def _dtype_name(value: Any) -> str:
    raise ValueError(f"no dtype of torch: {value!r:.60}")


def _parameter(self: Rebuilding, made: Made) -> Any:
    tensor = self.tree(made.args[0])
    name, shape, items, _ = tensor.content
    return StoredTensor([name, shape, items, 2 + int(made.args[1] is True)])


_REBUILT: Final[dict[str, Callable[[Rebuilding, Made], Any]]] = {
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "builtins.bytearray": _bytearray,
    "builtins.complex": lambda self, made: Marked(marks.COMPLEX, [float(part) for part in made.args]),
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": _mapping,
    "builtins.list": lambda self, made: [self.tree(item) for item in _iterable(self, made)],
    "builtins.int": lambda self, made: 0,
    "builtins.float": lambda self, made: 0.0,
    "_codecs.encode": _encoded,
    "numpy.dtype": lambda self, made: _refuse("a dtype by itself"),
    "numpy.ndarray": lambda self, made: _refuse("an array without its content"),
    "numpy.core.multiarray._reconstruct": _array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _frombuffer,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": lambda self, made: Marked(marks.TUPLE, [int(n) for n in _iterable(self, made)]),
}
