"""The URIs by which SQLite is told how to open a file."""

from __future__ import annotations

from pathlib import Path


def quote_path(path: Path) -> str:
    """Return a path quoted for a SQLite URI."""
    return str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
