"""Files of `torch.save`, read without torch: the zip format, the older one, and plain pickles."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from replaybuf.codec.tensors import SIZES, StoredTensor
from replaybuf.errors import FileEndsError, FileError
from replaybuf.files.pickles import STORAGES, Loading
from replaybuf.files.records import Name

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001


class Storage:
    """The numbers that tensors of a file share: their dtype, and how to read their bytes."""

    def __init__(self, dtype: str, count: int, read: Callable[[], bytes]) -> None:
        self._dtype = dtype
        self._count = count
        self._read = read
        self._held: bytes | None = None

    def tensor(
        self, offset: Any, size: tuple[Any, ...], stride: tuple[Any, ...], dtype: str | None, grad: bool
    ) -> StoredTensor:
        """Return a tensor of this storage. ValueError when it would reach beyond it, or unfold it."""
        name = dtype or self._dtype
        if self._held is None:
            self._held = self._read()
        width, raw = SIZES[name], self._held
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
def loaded(path: Path) -> Iterator[tuple[Any, int]]:
    """Yield what a file of `torch.save` or `pickle.dump` holds, as records (`files.records`), and its size.

    Tensors are read from it when they are rebuilt, within the block. Raises FileError; UnsafePickleError for a pickle
    that wants more than data.
    """
    size = path.stat().st_size
    with path.open("rb") as raw:
        if raw.read(4) == b"PK\x03\x04":
            yield _load_zip(raw), size
            return
        raw.seek(0)
        first = _plain(raw, size).load()
        yield _load_legacy(raw, size) if first == _MAGIC else first, size


def _plain(raw: IO[bytes], size: int) -> Loading:
    def refuse(pid: Any) -> Any:
        raise FileError("the pickle refers to storages, but is no file of torch.save")

    return Loading(raw, size, refuse)


def _load_zip(raw: IO[bytes]) -> Any:
    try:
        archive = zipfile.ZipFile(raw)
        names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, LookupError, NotImplementedError, struct.error) as error:
        raise FileEndsError(f"the file of torch.save is cut short or damaged ({error!s:.100})") from error
    pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise FileError("this zip file is none of torch.save: it has no data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in names and _entry(archive, f"{folder}byteorder") != b"little":
        raise FileError("the file was written on a big-endian machine, which this reader doesn't know")
    storages: dict[str, Storage] = {}

    def storage(pid: Any) -> Storage:
        dtype, key, count = _storage_of(pid)
        if key not in storages:
            storages[key] = Storage(dtype, count, lambda: _entry(archive, f"{folder}data/{key}"))
        return storages[key]

    pickled = _entry(archive, pickles[0])
    return Loading(io.BytesIO(pickled), len(pickled), storage).load()


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return an entry of the file. Those of torch are never compressed, and so no bombs."""
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


def _storage_of(pid: Any) -> tuple[str, str, int]:
    """Return the dtype, the key and the number of items of a storage that a pickle refers to."""
    if not (type(pid) is tuple and len(pid) >= 5 and pid[0] == "storage" and type(pid[1]) is Name):
        raise FileError(f"the pickle refers to {pid!r:.100}, which is no storage of torch")
    dtype = STORAGES.get(pid[1].text.rpartition(".")[2])
    if dtype is None or type(pid[2]) is not str or type(pid[4]) is not int:
        raise FileError(f"the pickle refers to a storage of {pid[1].text!r:.100}, which this reader doesn't know")
    return dtype, pid[2], pid[4]


def _load_legacy(raw: IO[bytes], size: int) -> Any:
    if _plain(raw, size).load() != _PROTOCOL:
        raise FileError("the file of torch.save has another protocol than 1001")
    about = _plain(raw, size).load()
    if not isinstance(about, dict) or about.get("little_endian") is not True:
        raise FileError("the file was written on a big-endian machine, which this reader doesn't know")
    contents: dict[str, bytes] = {}
    dtypes: dict[str, str] = {}

    def storage(pid: Any) -> Storage:
        dtype, key, count = _storage_of(pid)
        if len(pid) > 5 and pid[5] is not None:
            raise FileError("the file has views of storages, of a version of torch before 0.4")
        dtypes[key] = dtype
        return Storage(dtype, count, lambda: contents[key])

    loaded = Loading(raw, size, storage).load()
    for key in _plain(raw, size).load():
        head = raw.read(8)
        if key not in dtypes or len(head) < 8:
            raise FileEndsError("the file of torch.save is cut short: storages are missing")
        nbytes = struct.unpack("<q", head)[0] * SIZES[dtypes[key]]
        if not 0 <= nbytes <= size - raw.tell():
            raise FileEndsError("the file of torch.save is cut short: a storage is longer than it")
        contents[key] = raw.read(nbytes)
    return loaded
