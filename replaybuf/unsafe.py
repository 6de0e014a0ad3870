"""Characters of texts of unknown origin that could move a cursor, set colours, switch modes, reorder or hide text.

They are shown as escapes (`\\x1b`), in a terminal and on a page.
"""

from __future__ import annotations

import re
import unicodedata

# Joiners are part of emoji and many scripts; soft hyphens are harmless.
_HARMLESS = {"\u200c", "\u200d", "\u00ad"}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_NAMES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

_ASCII_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def is_unsafe(character: str) -> bool:
    """Return whether a character is a control, a format character, a lone surrogate, or none that is assigned."""
    return unicodedata.category(character) in _HIDDEN and character not in _HARMLESS


def escape(text: str, *, keep: str = "") -> str:
    """Return the text with every unsafe character written as an escape, except those in `keep`."""
    if text.isascii() and not _ASCII_CONTROL.search(text):
        return text
    return "".join(c if c in keep or not is_unsafe(c) else _NAMES.get(c) or _escaped(c) for c in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
