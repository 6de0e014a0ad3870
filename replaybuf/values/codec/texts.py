"""Finds the byte offsets of texts in a payload, so that SQL can read them as substrings."""

from __future__ import annotations

import struct

from replaybuf.values.codec.payload_header import texts_of


class Texts:
    """Finds texts in a payload from `Codec.encode`, so that SQL can extract them. Each search scans the payload.

    msgpack stores the UTF-8 of a text contiguously.
    """

    __slots__ = ("_end", "_last", "_payload", "_start")

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._start, self._end = texts_of(payload)
        self._last = self._start

    def find(self, text: str, since: int | None = None) -> list[int] | None:
        """Return the offset and the length, in bytes, of a text; None if SQL can't extract it.

        That is the case if the payload is compressed, or the text has NUL or lone surrogates. The search may find any
        equal text. It begins at the offset `since`, or behind the last text that was found, and then from the start.
        """
        if not self._end or "\x00" in text:
            return None
        try:
            wanted = text.encode()
        except UnicodeEncodeError:
            return None
        found = self._found(wanted, self._last if since is None else since)
        if found is None and since is None and self._last > self._start:
            found = self._found(wanted, self._start)
        if found is not None:
            self._last = found[0] + found[1]
        return found

    def _found(self, wanted: bytes, at: int) -> list[int] | None:
        head = _head(len(wanted))
        at = self._payload.find(head + wanted, at, self._end)
        return None if at < 0 else [at + len(head), len(wanted)]


def _head(length: int) -> bytes:
    """Return the msgpack header of a text of this many bytes."""
    if length < 1 << 5:
        return bytes((0xA0 | length,))
    if length < 1 << 8:
        return bytes((0xD9, length))
    if length < 1 << 16:
        return struct.pack(">BH", 0xDA, length)
    return struct.pack(">BI", 0xDB, length)
