"""Decodes stored rollouts, with arrays kept apart; `rollouts.marks` applies the recorded effects of refreshes.

Open buffers keep places open (`tails_of`); `read_tails` is for copies, the command line, the page and the doctor.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic_core import from_json

from replaybuf.common.cancellation import in_daemon_thread
from replaybuf.errors import DecodeError, PayloadStoreError
from replaybuf.storage.places.owners import open_known
from replaybuf.storage.places.store import EXTENT_BYTES, Extent, PlaceStore
from replaybuf.values.codec.blocks import Instead
from replaybuf.values.codec.payload import Codec
from replaybuf.values.codec.payload_format import is_apart
from replaybuf.values.rollouts.marks import Marks
from replaybuf.values.rollouts.segments import Segments

T = TypeVar("T")

#: The errors of Python about damaged values: of a wrong type, or that can't be.
DAMAGE: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error)


def decode_stored(
    codec: Codec,
    uid: int,
    payload: bytes | None,
    marks: str | dict[str, Any],
    refreshed_to: int | None,
    *,
    tail: Any = None,
    deferral: Deferral | None = None,
) -> tuple[list[Any], Segments | None]:
    """Return the rollouts of a group, or the segments that these consist of, in one list, and how they belong together.

    `marks` is JSON (`rollouts.marks`), perhaps parsed; `refreshed_to` is the train step of the last refresh, None
    before the first. `tail` is the rest of a payload whose arrays are kept apart, whose memory the arrays share, or the
    DecodeError of reading it. With a `deferral` the payload may be only a head, and the tail has the pieces. Raises
    DecodeError.
    """
    if payload is None:
        raise DecodeError(f"group {uid}: its payload is missing")
    if isinstance(tail, DecodeError) and (deferral is not None or is_apart(payload)):
        raise DecodeError(f"group {uid}: {tail}") from tail
    if deferral is not None:
        rollouts = codec.decode_deferred(payload, deferral.fields, tail or {}, deferral.of(uid, payload))
    elif not is_apart(payload):
        rollouts = codec.decode(payload)
    else:
        extent = Extent.at_end_of(payload)
        if tail is None:
            raise DecodeError(f"group {uid}: its arrays are in the file {extent.name}, which was not read")
        rollouts = codec.decode(memoryview(payload)[:-EXTENT_BYTES], tail=tail)
    return rollouts, bring_up_to_date(codec, uid, rollouts, marks, refreshed_to)


def bring_up_to_date(
    codec: Codec, uid: int, rollouts: list[Any], marks: Any, refreshed_to: int | None
) -> Segments | None:
    """Apply the recorded effects of refreshes to rollouts; return what these consist of. Raises DecodeError."""
    try:
        recorded = Marks.from_json(from_json(marks) if isinstance(marks, str) else marks)
        segments = recorded.segments
        if len(rollouts) != len(recorded.oldest) or (segments is not None and len(segments.rollouts) != len(rollouts)):
            raise DecodeError(f"group {uid}: {len(rollouts)} rollouts in the payload, {len(recorded.oldest)} expected")
        recorded.apply(rollouts, refreshed_to, codec.rollout_type)
        return segments
    except DecodeError:
        raise
    except DAMAGE as error:
        raise damaged(uid, error) from error


@dataclass(frozen=True, slots=True)
class Deferral:
    """The fields whose arrays aren't loaded, and a factory of handles, given the uid and the head of a group."""

    fields: frozenset[str]
    of: Callable[[int, bytes], Instead]


def damaged(uid: int, error: Exception) -> DecodeError:
    """Return the error of a group whose metadata can't be read."""
    return DecodeError(f"group {uid}: its metadata is damaged ({type(error).__name__}: {error})")


#: The URLs of a database's places, by number, and the identity of the database (`Transaction.places`).
Places = tuple[Mapping[int, str], str | None]
#: The timeout of reading from a place in interactive use, in seconds.
PATIENCE: Final = 10.0


async def read_tails(payloads: Sequence[Any], places: Places, patience: float = PATIENCE) -> list[Any]:
    """Return the tail of each payload as `tails_of` does, from places that are opened for it, in another thread.

    Raises PayloadStoreError if a place can't be reached within `patience` seconds, or was replaced by another one.
    """
    urls, database = places
    numbers = sorted(places_of(payloads) & urls.keys())

    def read() -> list[Any]:
        with ExitStack() as opened:
            stores = {}
            for number in numbers:
                store = open_known(urls[number], database or "", number, patience)
                stores[number] = opened.enter_context(closing(store))
            return tails_of(payloads, stores)

    return await in_thread(read, patience, ", ".join(urls[number] for number in numbers)) if numbers else read()


def places_of(payloads: Iterable[Any]) -> set[int]:
    """Return the ids of the places where the arrays of payloads are."""
    return {extent.place for extent in map(extent_of, payloads) if extent is not None}


def extent_of(payload: Any) -> Extent | None:
    """Return where the arrays of a payload are that are kept apart; None for others, and for damaged ones."""
    with suppress(DecodeError):
        if type(payload) is bytes and is_apart(payload):
            return Extent.at_end_of(payload)
    return None


def tails_of(
    payloads: Sequence[Any],
    stores: Mapping[int, PlaceStore],
    parts: Callable[[bytes], Iterable[tuple[int, int]]] | None = None,
) -> list[Any]:
    """Return the tail of each payload: None if the payload is whole, a DecodeError if the tail can't be read.

    `parts` returns the parts to be read of a tail, each with its position and size: then a tail is a dict of these, by
    position. Blocks. Raises PayloadStoreError if a place can't be reached.
    """
    tails: list[Any] = [None] * len(payloads)
    by_place: dict[int, list[tuple[int, int | None, Extent]]] = {}
    for number, payload in enumerate(payloads):
        if type(payload) is not bytes or not is_apart(payload):
            continue
        try:
            extent = Extent.at_end_of(payload)
            if extent.place not in stores:
                raise DecodeError(f"the database doesn't know the place {extent.place} of its arrays")
            if parts is None:
                ranges: list[tuple[int, int | None, Extent]] = [(number, None, extent)]
            else:
                ranges = [(number, at, extent.part(at, size)) for at, size in parts(payload)]
        except DecodeError as error:
            tails[number] = error
        else:
            tails[number] = None if parts is None else {}
            by_place.setdefault(extent.place, []).extend(ranges)
    for place, requested in by_place.items():
        raws = stores[place].read([extent for *_, extent in requested])
        for (number, at, _), raw in zip(requested, raws, strict=True):
            if isinstance(raw, DecodeError) or at is None:
                tails[number] = raw
            elif isinstance(tails[number], dict):
                tails[number][at] = raw
    return tails


async def in_thread(function: Callable[[], T], patience: float, where: str) -> T:
    """Return `function()`, run in a daemon thread of its own, which may hang as long as a mount does.

    Raises PayloadStoreError after `patience` seconds.
    """
    try:
        async with asyncio.timeout(patience):
            return await in_daemon_thread(function)
    except TimeoutError as error:
        raise PayloadStoreError(
            f"the place for payloads {where} didn't answer within {patience:g} s: see that it is mounted, or reachable"
        ) from error


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, run in another thread, since the caller may be inside an event loop. Blocks."""
    outcome = Future[T]()

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(work))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="replaybuf-blocking", daemon=True).start()  # Ctrl-C doesn't wait for it
    return outcome.result()


def joined(payload: bytes, tail: Any) -> bytes:
    """Return a whole payload, given its tail. Raises DecodeError if the tail is an error."""
    if isinstance(tail, DecodeError):
        raise tail
    return payload if tail is None else b"".join((memoryview(payload)[:-EXTENT_BYTES], tail))
