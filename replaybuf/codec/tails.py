"""What is kept apart of payloads, read by those who don't have the buffer open: copies, command, page and doctor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from replaybuf.codec.payload import Codec
from replaybuf.codec.payload_header import is_apart
from replaybuf.codec.stored import bring_up_to_date, decode_stored
from replaybuf.errors import ConfigError, DecodeError, MissingDriverError, PayloadStoreError, ReplayBufError
from replaybuf.segments.extents import EXTENT_BYTES, Extent
from replaybuf.segments.markers import recognise
from replaybuf.segments.places import open_place, url_here
from replaybuf.segments.store import Range

#: The places that a database names, by number, and the number of the database (`ReadTransaction.places`).
Places = tuple[Mapping[int, str], str | None]
#: How long a place is asked, in seconds, where somebody waits for it.
PATIENCE: Final = 10.0


def read_tails(payloads: Sequence[Any], places: Places, patience: float = PATIENCE) -> list[Any]:
    """Return what is kept apart of each payload: None where nothing is, a DecodeError where it can't be read.

    Blocks. Raises PayloadStoreError where a place can't be reached, or is another one than it was.
    """
    urls, database = places
    tails: list[Any] = [None] * len(payloads)
    wanted: dict[int, dict[int, Extent]] = {}
    for number, payload in enumerate(payloads):
        if type(payload) is not bytes or not is_apart(payload):
            continue
        try:
            extent = Extent.at_end_of(payload)
            if extent.place not in urls:
                raise DecodeError(f"the database doesn't know the place {extent.place} of its arrays")
        except DecodeError as error:
            tails[number] = error
        else:
            wanted.setdefault(extent.place, {})[number] = extent
    for place, extents in wanted.items():
        try:
            store = open_place(url_here(database or "", place, urls[place]), patience)
        except (ConfigError, MissingDriverError) as error:
            raise PayloadStoreError(str(error)) from error
        try:
            recognise(store, database or "", place)
            found = store.read([Range.whole(extent) for extent in extents.values()], patience)
        finally:
            store.close()
        for number, tail in zip(extents, found, strict=True):
            tails[number] = tail
    return tails


def names_its_arrays(payload: bytes) -> bool:
    """Return whether the arrays of a payload are kept apart, and it says where."""
    try:
        return is_apart(payload) and Extent.at_end_of(payload) is not None
    except DecodeError:
        return False


def joined(payload: bytes, tail: Any) -> bytes:
    """Return a whole payload, given what is kept apart of it. Raises DecodeError where that can't be read."""
    if isinstance(tail, DecodeError):
        raise tail
    return payload if tail is None else b"".join((memoryview(payload)[:-EXTENT_BYTES], tail))


def decode_shown(
    codec: Codec, uid: int, payload: bytes | None, marks: str, refreshed_to: int | None, places: Places
) -> tuple[list[Any], str | None]:
    """Return the rollouts of a group as far as they can be read, and in a sentence what is missing, None for nothing.

    Arguments as those of `decode_stored` and `read_tails`. Raises DecodeError.
    """
    try:
        [tail] = read_tails([payload], places)
        return decode_stored(codec, uid, payload, marks, refreshed_to, tail=tail), None
    except ReplayBufError as error:
        if payload is None or not is_apart(payload):
            raise
        reason = str(error).removeprefix(f"group {uid}: ")
    rollouts = codec.decode_head(payload)
    with suppress(DecodeError):  # what is noted may be about arrays
        bring_up_to_date(codec, uid, rollouts, marks, refreshed_to)
    return rollouts, f"group {uid} is shown without its arrays: {reason}"
