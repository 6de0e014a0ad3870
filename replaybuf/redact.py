"""Keeping passwords out of messages."""

from __future__ import annotations

import re

# Up to the last @: a password that contains an unquoted one must not be shown in part.
_CREDENTIALS = re.compile(r"(://[^:]*?):.*@", re.DOTALL)
_OPTION = re.compile(r"(?i)((?:pass(?!file)\w*|pwd|\w*password)\s*=\s*)[^&\s]*")
# What follows :// in a URL without a user: a host and perhaps a port.
_HOST = re.compile(r"(?:\[[^\]]*\]|[^:/?]*)(?::\d{1,5})?(?:[/?].*)?", re.DOTALL)
# What comes before the @ of one that has a user: no more, or a colon.
_USER = re.compile(r"(?i)(?:[^:/?#%\s]|%(?!3a))*(?::|$)")
_PATHS = ("sqlite", "memory", "pandas")
# In a sentence: a word that holds a colon, and all up to the last @; or a word that begins like the URL of a server.
_IN_WORDS = re.compile(r"[^\s'\"(]*:[^\s].*@[^\s'\")]*", re.DOTALL)
_SERVER = re.compile(r"postgres\w*[:/]")
_LIKE_URL = re.compile(r"[^\s'\"(]*(?:://|postgres\w*:)[^\s'\")]*")


def redact(text: str) -> str:
    """Return the text of a URL or path without passwords, for messages.

    Of a text that is neither, perhaps because of a slip in typing, what may be a password is hidden too.
    """
    text = _OPTION.sub(r"\1***", text)
    scheme, separator, rest = text.partition("://")
    if not separator or not re.fullmatch(r"[\w+.-]+", scheme):
        if "@" in text:
            return re.sub(r"^.*@", "***@", text, flags=re.DOTALL)
        return re.sub(r":.+", ":***", text, flags=re.DOTALL)
    if scheme.startswith(_PATHS):
        return _CREDENTIALS.sub(r"\1:***@", text)
    user, at, _ = rest.rpartition("@")
    if not (_USER.match(user) if at else _HOST.fullmatch(rest)):
        return f"{scheme}://***"
    return _CREDENTIALS.sub(r"\1:***@", text)


def redact_words(sentence: str) -> str:
    """Return a sentence that may quote a URL, without passwords."""
    hidden = _IN_WORDS.sub("***", _OPTION.sub(r"\1***", sentence))
    return _LIKE_URL.sub(lambda found: redact(found[0]), hidden)


def redact_path(path: str) -> str:
    """Return a path for messages, without passwords if it is the URL of a server in the wrong place."""
    return redact(path) if may_hold_password(path) or _SERVER.match(path) else path


def may_hold_password(path: str) -> bool:
    """Return whether a path looks like the rest of a server's URL: with an option, or a colon and an @ behind it."""
    return re.search(r":.*@", path, re.DOTALL) is not None or _OPTION.search(path) is not None
