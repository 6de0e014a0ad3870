"""Keeping passwords out of messages."""

from __future__ import annotations

import re


def redact(text: str) -> str:
    """Return the text of a URL without passwords, for messages."""
    if "://" not in text:  # not a URL, perhaps because a slash is missing
        text = re.sub(r"^.*@", "***@", text, flags=re.DOTALL)
    # Up to the last @: a password that contains an unquoted one must not be shown in part.
    text = re.sub(r"(://[^/@:]*):.*@", r"\1:***@", text, flags=re.DOTALL)
    return re.sub(r"(?i)((?:password|passwd|sslpassword)=)[^&\s]*", r"\1***", text)
