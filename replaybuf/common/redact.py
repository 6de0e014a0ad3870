"""Texts that are safe to show: without passwords, and without characters that control a terminal or reorder a page.

Control characters could move a cursor, set colours, switch modes, reorder or hide text. They are escaped (`\x1b`),
in a terminal and on a page.
"""

from __future__ import annotations

import re
import unicodedata

# Up to the last @, so that no part of a password with an unquoted @ is shown.
_CREDENTIALS = re.compile(r"(://[^:]*?):.*@", re.DOTALL)
_OPTION = re.compile(r"(?i)((?:pass(?!file)\w*|pwd|\w*password)\s*=\s*)[^&\s]*")
# The authority of a URL without a user: one or several hosts, each perhaps with a port.
_PLACE = r"(?:\[[^\]]*\]|[^:/?,]*)(?::\d{1,5})?"
_HOST = re.compile(rf"{_PLACE}(?:,{_PLACE})*(?:[/?].*)?", re.DOTALL)
# The user before the @: up to a colon, if any.
_USER = re.compile(r"(?i)(?:[^:/?#%\s]|%(?!3a))*(?::|$)")
_PATHS = ("sqlite", "memory")
# In a sentence: a word with a colon, and everything up to the last @; or a word that begins like a server's URL.
_CREDENTIALS_IN_TEXT = re.compile(r"[^\s'\"(]*:[^\s].*@[^\s'\")]*", re.DOTALL)
_SERVER = re.compile(r"postgres\w*[:/]")
_URL_IN_TEXT = re.compile(r"[^\s'\"(]*(?:://|postgres\w*:)[^\s'\")]*")


def redact(text: str) -> str:
    """Return the text of a URL or path without passwords, for messages.

    In any other text, such as a mistyped URL, parts that may be a password are hidden, too.
    """
    text = _OPTION.sub(r"\1***", text)
    scheme, separator, remainder = text.partition("://")
    if text.startswith(_PATHS) and "@" not in text:
        return text
    if not separator or not re.fullmatch(r"[\w+.-]+", scheme):
        if "@" in text:
            return re.sub(r"^.*@", "***@", text, flags=re.DOTALL)
        return re.sub(r":.+", ":***", text, flags=re.DOTALL)
    if scheme.startswith(_PATHS):
        return _CREDENTIALS.sub(r"\1:***@", text)
    user, at, _ = remainder.rpartition("@")
    if not (_USER.match(user) if at else _HOST.fullmatch(remainder)):
        return f"{scheme}://***"
    return _CREDENTIALS.sub(r"\1:***@", text)


def redact_words(sentence: str) -> str:
    """Return a sentence that may quote a URL, without passwords."""
    hidden = _CREDENTIALS_IN_TEXT.sub("***", _OPTION.sub(r"\1***", sentence))
    return _URL_IN_TEXT.sub(lambda match: redact(match[0]), hidden)


def redact_path(path: str) -> str:
    """Return a path for messages, without passwords if it is a server's URL passed as a path."""
    return redact(path) if may_hold_password(path) or _SERVER.match(path) else path


def may_hold_password(path: str) -> bool:
    """Return whether a path looks like part of a server's URL: it has an option, or a colon followed by an @."""
    return re.search(r":.*@", path, re.DOTALL) is not None or _OPTION.search(path) is not None


# Joiners are part of emoji and many scripts; soft hyphens are harmless.
_HARMLESS_CHARACTERS = {"\u200c", "\u200d", "\u00ad"}
_HIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}

_ASCII_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def is_unsafe(character: str) -> bool:
    """Return whether a character is a control or format character, a lone surrogate, or unassigned."""
    return unicodedata.category(character) in _HIDDEN_CATEGORIES and character not in _HARMLESS_CHARACTERS


def escape(text: str, *, keep: str = "") -> str:
    """Return the text with every unsafe character written as an escape, except those in `keep`."""
    if text.isascii() and not _ASCII_CONTROL.search(text):
        return text
    return "".join(c if c in keep or not is_unsafe(c) else c.encode("unicode_escape").decode() for c in text)


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
