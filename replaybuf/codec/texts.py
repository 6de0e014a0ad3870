"""Finds the byte offsets of texts in a payload, so that SQL can read them as substrings."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from replaybuf.codec.payload_header import parts_of

# A search compares the length and this many bytes of a text first: searching for the whole text is slow.
_BEGINNING: Final = 64
# The number of false matches of a text's beginning after which the search ends: more of them aren't accidental.
_ATTEMPTS: Final = 100


class Texts:
    """Finds texts in a payload from `Codec.encode`, so that SQL can extract them. The first search scans the payload.

    msgpack stores the UTF-8 of a text contiguously.
    """

    __slots__ = ("_parts", "_payload")

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._parts: Sequence[tuple[int, int]] | None = None

    def find(self, rollout: int, text: str, since: int = 0) -> list[int] | None:
        """Return the offset and the length, in bytes, of a text of this rollout; None if SQL can't extract it.

        That is the case if the payload is compressed, or the text has NUL or lone surrogates. The search begins at the
        offset `since`, and may find any equal text of the rollout.
        """
        if self._parts is None:
            self._parts = parts_of(self._payload)
        if not self._parts or "\x00" in text:
            return None
        try:
            wanted = text.encode()
        except UnicodeEncodeError:
            return None
        head = _head(len(wanted))
        beginning = head + wanted[:_BEGINNING]
        start, end = self._parts[rollout]
        at = max(start, since)
        for _ in range(_ATTEMPTS):
            at = self._payload.find(beginning, at, end)
            if at < 0:
                return None
            if self._payload.startswith(wanted, at + len(head)):
                return [at + len(head), len(wanted)]
            at += 1
        return None


def _head(length: int) -> bytes:
    """Return the msgpack header of a text of this many bytes."""
    if length < 1 << 5:
        return bytes((0xA0 | length,))
    if length < 1 << 8:
        return bytes((0xD9, length))
    if length < 1 << 16:
        return struct.pack(">BH", 0xDA, length)
    return struct.pack(">BI", 0xDB, length)
