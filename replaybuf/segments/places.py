"""Where payloads are kept: the setting `payloads`, and the stores that it names."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from replaybuf.errors import ConfigError
from replaybuf.segments.folder import FolderStore
from replaybuf.segments.objects import SCHEMES, ObjectStore
from replaybuf.segments.store import SegmentStore

#: The setting by which payloads stay in the database.
IN_DATABASE = "database"
#: The bytes of arrays from which a payload is kept apart.
PAYLOAD_THRESHOLD = 64 << 10


def parse_place(payloads: str) -> str | None:
    """Return the place that a setting names, absolute; None for the database. Raises ConfigError."""
    if payloads == IN_DATABASE:
        return None
    if not payloads or "\x00" in payloads:
        raise ConfigError("payloads is empty: name 'database', a folder, or an object store such as s3://bucket/prefix")
    scheme, slashes, rest = payloads.partition("://")
    if not slashes:
        kind = scheme.split(":")[0]
        if ":" in scheme and kind in (*SCHEMES, "file", "http", "https"):
            example = "file:///absolute/path" if kind == "file" else "s3://bucket/prefix"
            raise ConfigError(f"can't read payloads={payloads!r}: write it as in {example}")
        return FolderStore(os.path.expanduser(payloads)).url
    if scheme == "file":
        found = urlsplit(payloads)
        if found.netloc not in ("", "localhost") or not found.path.startswith("/"):
            raise ConfigError(f"payloads={payloads!r} has a host: a folder is file:///absolute/path, with three /")
        return FolderStore(unquote(found.path)).url
    if scheme not in SCHEMES:
        known = ", ".join(f"{one}://" for one in ("file", *SCHEMES))
        raise ConfigError(f"payloads={scheme}://... is no place that is known: name a folder, or one of {known}")
    if "@" in rest or "?" in rest:
        raise ConfigError("payloads holds a user or options: credentials belong in the environment, as for obstore")
    if not rest.strip("/"):
        raise ConfigError(f"payloads={payloads!r} names no bucket: write {scheme}://bucket/prefix")
    return payloads.rstrip("/")


#: Where open buffers of this process write, by its id, the database and the number of the place.
_here: dict[tuple[int, str, int], list[str]] = {}


def know_place(database: str, number: int, url: str) -> None:
    """Note where a place of a database is for this process, which was told so, whatever others call it."""
    _here.setdefault((os.getpid(), database, number), []).append(url)


def forget_place(database: str, number: int, url: str) -> None:
    """Take back one `know_place`."""
    known = _here.get((os.getpid(), database, number), [])
    if url in known:
        known.remove(url)


def url_here(database: str, number: int, url: str) -> str:
    """Return where a place is for this process, which others know as `url`."""
    known = _here.get((os.getpid(), database, number))
    return known[-1] if known else url


def open_place(place: str, patience: float) -> SegmentStore:
    """Return the store at a place; nothing is read or written yet."""
    return ObjectStore(place, patience) if "://" in place else FolderStore(place)
