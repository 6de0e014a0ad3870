"""Files of lines of JSON, plain or compressed: their rows, with the numbers of their lines."""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import pydantic_core

from replaybuf.codec.payload_format import zstandard_module
from replaybuf.errors import FileEndsError, FileError
from replaybuf.files.row_format import ROLLOUTS, Placed, Row, is_of_rollout, to_json

#: A longer line is refused: it would have to be in memory as a whole.
_LONGEST: Final = 1 << 30
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BOM: Final = b"\xef\xbb\xbf"
#: The formats, for the error about a file that has none of them.
READABLE: Final = "what can be read is JSONL (also .gz, .zst), Parquet, Arrow, files of torch.save, and pickles"
_WIDE_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")


def dump(row: Row) -> bytes:
    """Return a row as a line."""
    row = _tagged(row)
    if not is_of_rollout(row):
        row[ROLLOUTS] = list(map(_tagged, row[ROLLOUTS]))
    try:
        return pydantic_core.to_json(row) + b"\n"
    except pydantic_core.PydanticSerializationError:  # half of a surrogate pair, or nested deeply
        return json.dumps(row, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _tagged(row: Row) -> Row:
    """Return a row with its bytes, which are fields by themselves, as JSON."""
    return {name: to_json(value) if type(value) is bytes else value for name, value in row.items()}


def open_to_write(raw: IO[bytes], name: str) -> IO[bytes]:
    """Return a stream whose bytes arrive in `raw`, compressed as the name says (.gz, .zst)."""
    if name.endswith(".gz"):
        return gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=6, mtime=0)  # type: ignore[return-value]
    if name.endswith(".zst"):
        stream: IO[bytes] = (
            zstandard_module("a .zst file").ZstdCompressor(write_checksum=True).stream_writer(raw, closefd=False)
        )
        return stream
    return raw


def read_rows(path: Path) -> Iterator[Placed]:
    """Yield the objects in a file of lines. FileError says which line is none; FileEndsError that the last is cut."""
    with path.open("rb") as raw:
        stream = _decompressed(raw)
        number, begun = 0, False
        while True:
            number += 1
            try:
                line = stream.readline(_LONGEST + 1)
            except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
                kind = FileEndsError if isinstance(error, EOFError) else FileError
                raise kind(f"line {number}: the compressed file is cut short or damaged ({error})") from error
            if not line:
                return
            if len(line) > _LONGEST:
                raise FileError(f"line {number} has more than {_LONGEST:,} bytes; is this a file of lines of JSON?")
            if number == 1:
                line = line.removeprefix(_BOM)
                if line.startswith(_WIDE_BOMS):
                    raise FileError("line 1: the file is UTF-16; write it as UTF-8")
            if line.strip():
                if not begun:
                    _check_begin(line, number)
                    begun = True
                yield f"line {number}", _parsed(line, number)


def _check_begin(line: bytes, number: int) -> None:
    """Raise FileError unless the first line of a file begins an object: it is something else than lines of JSON."""
    begin = line.strip()
    if begin.startswith(b"["):
        raise FileError(f"line {number}: a JSON array; write one object a line: jq -c '.[]'")
    if begin == b"{":
        raise FileError(f"line {number}: an object over several lines; write one object a line: jq -c .")
    if not begin.startswith(b"{"):
        shown = begin[:40].decode("utf-8", "replace")
        raise FileError(f"line {number}: no JSON object: {shown!r}; {READABLE}")


def _parsed(line: bytes, number: int) -> Row:
    whole = line.endswith(b"\n")
    try:
        row = _DECODER.decode(line.decode("utf-8").strip())
    except UnicodeDecodeError as error:
        if not whole and error.end >= len(line):
            raise FileEndsError(f"line {number}: the file ends within a character") from error
        raise FileError(f"line {number}: byte {error.start} is no UTF-8; write the file as UTF-8") from error
    except RecursionError as error:
        raise FileError(f"line {number}: nested too deeply") from error
    except FileError as error:
        raise FileError(f"line {number}: {error}") from None
    except ValueError as error:
        if not whole:
            raise FileEndsError(f"line {number}: the file ends within a row ({error!s:.100})") from error
        raise FileError(f"line {number}: no JSON ({error!s:.100})") from error
    if type(row) is not dict:
        raise FileError(f"line {number}: expected an object, got {row!r:.60}")
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FileError(f"the name {twice!r:.60} is there twice in one object")
    return fields


def _refused(constant: str) -> Any:
    raise FileError(f"{constant} is no JSON; write null")


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise FileError(f"{text:.60} is larger than any number that a float can hold; write null")
    return number


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refused, parse_float=_float)


def _decompressed(raw: IO[bytes]) -> IO[bytes]:
    """Return the stream of a file, decompressed if it is compressed, whatever its name."""
    magic = raw.read(4)
    raw.seek(0)
    if magic.startswith(_GZIP):
        return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]
    if magic == _ZSTD:
        return io.BufferedReader(_Zstd(raw), 1 << 16)
    return raw


class _Zstd(io.RawIOBase):
    """A stream of zstd, decompressed in small steps; EOFError where it is cut short."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._module = zstandard_module("a .zst file")
        self._frame = self._module.ZstdDecompressor().decompressobj()
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._ready:
            piece = self._raw.read(1024)  # of which a hostile file can make no more than some 32 MB
            if not piece:
                if not self._frame.eof:
                    raise EOFError("the end of the last frame is missing")
                return 0
            try:
                if self._frame.eof:
                    self._frame = self._module.ZstdDecompressor().decompressobj()
                self._ready = self._frame.decompress(piece)
            except self._module.ZstdError as error:
                raise ValueError(str(error)) from error
            if self._frame.eof and self._frame.unused_data:
                self._raw.seek(-len(self._frame.unused_data), io.SEEK_CUR)
        taken = self._ready[: len(into)]
        into[: len(taken)] = taken
        self._ready = self._ready[len(taken) :]
        return len(taken)
