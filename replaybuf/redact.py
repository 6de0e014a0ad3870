"""Passwords don't get into messages."""

from __future__ import annotations

import re


def redact(text: str) -> str:
    """The text of a URL without passwords, for messages."""
    if "://" not in text:  # no URL, perhaps for the lack of a slash
        text = re.sub(r"^.*@", "***@", text, flags=re.DOTALL)
    # Up to the last @: a password that holds one, unquoted, is not to be shown in part.
    text = re.sub(r"(://[^/@:]*):.*@", r"\1:***@", text, flags=re.DOTALL)
    return re.sub(r"(?i)((?:password|passwd|sslpassword)=)[^&\s]*", r"\1***", text)
