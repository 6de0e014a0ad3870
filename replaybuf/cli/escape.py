"""Text of unknown origin, made safe for a terminal.

Characters that could move the cursor, set colours, switch modes, reorder or hide text are shown as escapes (`\\x1b`).
"""

from __future__ import annotations

import re

from replaybuf.unsafe import escape, is_unsafe

__all__ = ["escape", "escape_json", "escape_line"]


def escape_line(text: str) -> str:
    """Return the text as one line: white space between lines becomes a space, the rest is escaped."""
    return escape(re.sub(r"\s*\n\s*", " ", text.strip()))


def escape_json(encoded: str) -> str:
    """Return JSON text with its unsafe characters as JSON escapes; newlines between values stay."""
    if encoded.isascii() and "\x7f" not in encoded:
        return encoded
    return "".join(_utf16(c) if c != "\n" and is_unsafe(c) else c for c in encoded)


def _utf16(character: str) -> str:
    data = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[i : i + 2].hex()}" for i in range(0, len(data), 2))
