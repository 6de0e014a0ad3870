"""Pickles, read as data: nothing that one names is imported, called or built.

The machine of a pickle makes records (`files.records`) in place of objects. Only names that are listed here and in
`files.rebuilding`, those of data, get so far; any other one is refused, and the error says what the pickle wanted.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import IO, Any, ClassVar, Final

from replaybuf.errors import FileError, UnsafePickleError
from replaybuf.files.rebuilding import REBUILT
from replaybuf.files.records import RECORDS, STATUS, Name

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
        if full.rpartition(".")[2] in RECORDS | {STATUS} and full.startswith("xtuner."):
            return Name(full)
        if full in REBUILT or _storage_dtype(full) or full.removeprefix("torch.") in _TORCH_DTYPES:
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
