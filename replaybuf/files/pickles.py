"""Pickles and files of `torch.save`, read as data: nothing that a pickle names is imported, called or built, nor torch.

The unpickler makes records instead of objects, such as `PickledObject("torch._utils._rebuild_tensor_v2", args)`. Only
known names of data are accepted, which are listed here and in `files.pickled_values`; the error about another name
quotes it.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, Final

import numpy as np

from replaybuf.codec.torch_tensors import SIZES, StoredTensor
from replaybuf.errors import FileEndsError, FileError, UnsafePickleError

#: xtuner's classes in a saved buffer, in whatever modules.
RECORDS: Final = frozenset(
    (
        *("RolloutState", "StorageItem", "SerializedRayObjectRef", "SampleParams", "RolloutToolCall"),
        *("RolloutFunctionCall", "MultimodalInfo"),
    )
)
#: ... and their statuses.
STATUS: Final = "Status"


class PickledName:
    """A class or function named by a pickle. Calling it makes a record."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, *args: Any, **options: Any) -> PickledObject:
        return PickledObject(self.text, args, options)

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickleError(f"the pickle changes {self.text}; it holds more than data, and was not loaded")


@dataclass(slots=True, eq=False)
class PickledObject:
    """The record of an object in a pickle: the name of its class or function, arguments, state and items."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    add = append

    def __setitem__(self, name: Any, value: Any) -> None:
        self.pairs.append((name, value))


def record_fields(made: PickledObject) -> dict[str, Any]:
    """Return the fields of an instance of a dataclass or a pydantic model."""
    state = made.state if isinstance(made.state, dict) else {}
    fields = state.get("__dict__") if "__pydantic_fields_set__" in state else state
    if not isinstance(fields, dict):
        raise FileError(f"the pickle's {made.name} has no fields")
    return fields


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


class _Bounded:
    """A file whose reads are bounded by its size: no length in a pickle allocates more."""

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


class DataUnpickler(_Base):  # type: ignore[misc]
    """Unpickler for pickles that may use these `names`; `load()` returns plain values and records.

    Raises FileError.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(_Base.dispatch)

    def __init__(self, raw: IO[bytes], size: int, names: Container[str], storage: Callable[[Any], Any]) -> None:
        super().__init__(_Bounded(raw, size), encoding="utf-8")
        self._names = names
        self._storage = storage

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
            return PickledName(full)
        if full in self._names or _storage_dtype(full) or full.removeprefix("torch.") in SIZES:
            return PickledName(full)
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
        self._instantiate(name, args)

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


def _named(name: Any) -> PickledName:
    if type(name) is not PickledName:
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


#: The number at the beginning of files written by torch.save before torch 1.6.
_LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C


class TensorStorage:
    """The storage that tensors of a file share: its dtype, and how to read its bytes."""

    def __init__(self, dtype: str, read: Callable[[], bytes]) -> None:
        self._dtype = dtype
        self._read = functools.cache(read)

    def tensor(
        self, offset: Any, size: tuple[Any, ...], stride: tuple[Any, ...], dtype: str | None, grad: bool
    ) -> StoredTensor:
        """Return a tensor of this storage. ValueError when it would exceed the storage, or repeat its elements."""
        name = dtype or self._dtype
        width, raw = SIZES[name], self._read()
        if any(type(n) is not int or n < 0 for n in (offset, *size, *stride)) or len(size) != len(stride):
            raise ValueError(f"size {size!r:.60}, stride {stride!r:.60}")
        count = math.prod(size)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if count else -1
        if (last + 1) * width > len(raw) or count * width > len(raw):
            raise ValueError(f"a tensor of size {size!r:.60} is larger than its storage of {len(raw)} bytes")
        if not count:
            return StoredTensor([name, list(size), b"", int(grad)])
        items = np.frombuffer(raw, np.dtype((np.void, width)))
        strided = np.lib.stride_tricks.as_strided(
            items[offset:], size, [step * width for step in stride], writeable=False
        )
        return StoredTensor([name, list(size), np.ascontiguousarray(strided).tobytes(), int(grad)])


@contextmanager
def loaded(path: Path, names: Container[str]) -> Iterator[tuple[Any, int]]:
    """Yield the content of a file of `torch.save` or `pickle.dump`, as records, and its size. It may use these `names`.

    Tensors are read from the file when they are rebuilt, within the block. Raises FileError; UnsafePickleError for a
    pickle of more than data.
    """
    size = path.stat().st_size
    with path.open("rb") as raw:
        if raw.read(4) == b"PK\x03\x04":
            yield _load_zip(raw, names), size
            return
        raw.seek(0)
        content = DataUnpickler(raw, size, names, _no_storage).load()
        if content == _LEGACY_MAGIC:
            raise FileError("the file has the format of torch.save before 1.6; load it with torch, and save it again")
        yield content, size


def _no_storage(pid: Any) -> Any:
    raise FileError("the pickle refers to storages, but is no file of torch.save")


def _load_zip(raw: IO[bytes], names: Container[str]) -> Any:
    try:
        archive = zipfile.ZipFile(raw)
        entries = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, LookupError, NotImplementedError, struct.error) as error:
        raise FileEndsError(f"the file of torch.save is cut short or damaged ({error!s:.100})") from error
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise FileError("this zip file is none of torch.save: it has no data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in entries and _entry(archive, f"{folder}byteorder") != b"little":
        raise FileError("the file was written on a big-endian machine, which this reader doesn't know")
    storages: dict[str, TensorStorage] = {}

    def storage(pid: Any) -> TensorStorage:
        dtype, key = _storage_of(pid)
        if key not in storages:
            storages[key] = TensorStorage(dtype, lambda: _entry(archive, f"{folder}data/{key}"))
        return storages[key]

    pickled = _entry(archive, pickles[0])
    return DataUnpickler(io.BytesIO(pickled), len(pickled), names, storage).load()


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return an entry of the archive. Torch never compresses entries, so that they can't be zip bombs."""
    try:
        info = archive.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise FileError(f"{name!r:.100} is compressed, which torch.save doesn't do; the file is no export of it")
        return archive.read(info)
    except FileError:
        raise
    except (
        *(zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError),
        *(LookupError, ValueError, RuntimeError),
    ) as error:
        raise FileEndsError(
            f"{name!r:.100} in the file of torch.save is missing or damaged ({error!s:.100})"
        ) from error


def _storage_of(pid: Any) -> tuple[str, str]:
    """Return the dtype and the key of a storage that a pickle refers to."""
    if not (type(pid) is tuple and len(pid) >= 5 and pid[0] == "storage" and type(pid[1]) is PickledName):
        raise FileError(f"the pickle refers to {pid!r:.100}, which is no storage of torch")
    dtype = STORAGES.get(pid[1].text.rpartition(".")[2])
    if dtype is None or type(pid[2]) is not str:
        raise FileError(f"the pickle refers to a storage of {pid[1].text!r:.100}, which this reader doesn't know")
    return dtype, pid[2]
