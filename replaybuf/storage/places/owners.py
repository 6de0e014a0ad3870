"""Places of payloads and their owners: the setting `payloads`, the stores that it names, and their markers.

The marker of a place names the database that owns its files, and that database's home. A copy of a database has the
same identity, and both would delete files that only the other needs. So a place belongs to the database whose home
is in the marker; its copies read there, and neither write nor delete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from replaybuf.common.redact import redact
from replaybuf.errors import ConfigError, PayloadStoreError
from replaybuf.storage.places.folder import FolderStore
from replaybuf.storage.places.objects import SCHEMES, ObjectStore
from replaybuf.storage.places.store import MARKER, PlaceStore

#: Facts that distinguish copies of a database, such as its file's path and host, and its `name` for people; empty for a
#: database that has no copies.
Home = Mapping[str, str]


class Marker(NamedTuple):
    """The content of a marker: the identity of the database, the number of the place in it, and the database's home."""

    database: str
    place: int
    home: Home

    def packed(self) -> bytes:
        """Return the content of the marker."""
        return json.dumps({**self._asdict(), "home": dict(self.home)}).encode()

    def belongs_to(self, home: Home) -> bool:
        """Return whether this is the home: at least two facts are equal.

        So a file may move on its host or be restored from a backup, and a container may have a new name each time.
        """
        equal = [name for name in self.home.keys() & home.keys() - {"name"} if self.home[name] == home[name]]
        return not self.home or not home or len(equal) > 1


def claim(store: PlaceStore, database: str, place: int | None, home: Home) -> int | None:
    """Return the number of the place in the database; None if it has none yet and `place` is None.

    An unclaimed place is marked as that of this database, under the number `place`. Raises ConfigError when it belongs
    to another database, or to another copy of this one.
    """
    packed = store.read_marker()
    if packed is None:
        if place is None:
            return None
        marker = Marker(database, place, home).packed()
        if store.write_marker(marker):
            store.marker = marker
            return place
        packed = store.read_marker() or b""
    owner = parse(store, packed)
    if owner.database != database:
        raise ConfigError(
            f"{store.url} has the payloads of another database ({redact(owner.database[:12])}…): name another place "
            "for those of this one (payloads=), for example a folder for each run"
        )
    if not owner.belongs_to(home):
        raise ConfigError(
            f"{store.url} has the payloads of {described(owner.home)}, and this database is a copy of that: both would "
            "delete what the other needs. Name another place for new ones (payloads=), those that are here can still "
            "be read; or, once nobody uses the other any more, make the place this one's: replaybuf doctor URL "
            "--take-over"
        )
    store.marker = packed
    return owner.place


def take_over(store: PlaceStore, home: Home) -> None:
    """Transfer the place to the database at this home, from the copy that owned it."""
    owner = parse(store, store.read_marker() or b"")
    store.write_marker(owner._replace(home=home).packed(), replace=True)


def recognise(store: PlaceStore, database: str, place: int) -> Marker:
    """Return the marker if the place has this number in the database or in a copy of it. Raises PayloadStoreError."""
    store.check_there()
    packed = store.read_marker() or b""
    marker = parse(store, packed)
    if marker[:2] != (database, place):
        raise PayloadStoreError(
            f"{store.url} has other payloads than those that this database keeps there: mount or put back the place "
            "that it wrote to, nothing is lost as long as its files are"
        )
    store.marker = packed
    return marker


def parse(store: PlaceStore, packed: bytes) -> Marker:
    """Return a parsed marker. Raises PayloadStoreError."""
    try:
        marker: dict[str, Any] = json.loads(packed)
        home = {str(name): str(fact) for name, fact in marker.get("home", {}).items()}
        return Marker(str(marker["database"]), int(marker["place"]), home)
    except (ValueError, TypeError, LookupError, AttributeError):
        raise PayloadStoreError(
            f"{store.url} has a {MARKER} that can't be read: restore it (if the place is this database's, replaybuf "
            "doctor URL --take-over writes it again), or name another place (payloads=)"
        ) from None


def described(home: Home) -> str:
    """Return the location of a database in words."""
    return redact(home.get("name", "another database"))


#: The setting for payloads in the database.
IN_DATABASE = "database"
#: The bytes of arrays from which a payload is kept apart.
PAYLOAD_THRESHOLD = 64 << 10


def parse_place(payloads: str) -> str | None:
    """Return the place that a setting names, absolute; None for the database. Raises ConfigError."""
    if payloads == IN_DATABASE:
        return None
    scheme, slashes, path = payloads.partition("://")
    if slashes and scheme in SCHEMES and path.strip("/") and "@" not in path and "?" not in path:
        return payloads.rstrip("/")
    is_path = not slashes and payloads.partition(":")[0] not in (*SCHEMES, "file", "http", "https")
    if payloads and is_path and "\x00" not in payloads:
        return FolderStore(os.path.expanduser(payloads)).url
    raise ConfigError(
        "payloads names no place: write 'database', a folder, or a bucket as in "
        f"{', '.join(f'{name}://bucket/prefix' for name in SCHEMES)}, whose credentials belong in the environment"
    )


def open_place(place: str, patience: float) -> PlaceStore:
    """Return the store at a place, without reading or writing anything."""
    return ObjectStore(place, patience) if "://" in place else FolderStore(place)


def open_known(url: str, database: str, number: int, patience: float) -> PlaceStore:
    """Return the store of the place that a database has under this number and URL. Blocks, as long as a mount hangs.

    Raises PayloadStoreError if it can't be reached, or was replaced by another one.
    """
    try:
        store = open_place(url, patience)
    except ConfigError as error:
        raise PayloadStoreError(str(error)) from error
    recognise(store, database, number)
    return store
