"""Text of unknown origin, made safe for a terminal.

Characters that could move the cursor, set colours, switch modes, reorder or hide text are shown as escapes (`\\x1b`).
"""

from __future__ import annotations

import re
import unicodedata

# Joiners are part of emoji and many scripts; soft hyphens are harmless.
_HARMLESS = {"\u200c", "\u200d", "\u00ad"}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_NAMES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

_ASCII_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _is_unsafe(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN and character not in _HARMLESS


def escape(text: str, *, keep: str = "") -> str:
    """Return the text with every unsafe character written as an escape, except those in `keep`."""
    if text.isascii() and not _ASCII_CONTROL.search(text):
        return text
    return "".join(c if c in keep or not _is_unsafe(c) else _NAMES.get(c) or _escaped(c) for c in text)


def escape_line(text: str) -> str:
    """Return the text as one line: white space between lines becomes a space, the rest is escaped."""
    return escape(re.sub(r"\s*\n\s*", " ", text.strip()))


def escape_json(encoded: str) -> str:
    """Return JSON text with its unsafe characters as JSON escapes; newlines between values stay."""
    if encoded.isascii() and "\x7f" not in encoded:
        return encoded
    return "".join(_utf16(c) if c != "\n" and _is_unsafe(c) else c for c in encoded)


def _escaped(character: str) -> str:
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _utf16(character: str) -> str:
    data = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[i : i + 2].hex()}" for i in range(0, len(data), 2))
