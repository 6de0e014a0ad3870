"""Keys of puts as a column has them: each with its task and buffer, so that it is unique in a database."""

from __future__ import annotations

import json


def scoped_key(buffer: str | None, task_name: str, key: str | None) -> str | None:
    """Return a put's key with its task and buffer as one text, short enough for a PostgreSQL index (2,700 bytes)."""
    return None if key is None else json.dumps([task_name, key, buffer], ensure_ascii=False)


def rescoped_key(scoped: str, buffer: str | None) -> str:
    """Return a scoped key moved to another buffer."""
    task_name, key, _ = json.loads(scoped)
    return json.dumps([task_name, key, buffer], ensure_ascii=False)


def key_of(scoped: str | None) -> str | None:
    """Return the put's key in a scoped key."""
    return None if scoped is None else str(json.loads(scoped)[1])
