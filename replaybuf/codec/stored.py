"""Rollouts as they are read: decoded, and brought up to date by what refreshes have noted of their group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

from replaybuf.codec.arrays_apart import Deferring
from replaybuf.codec.payload import Codec
from replaybuf.codec.payload_header import is_apart
from replaybuf.errors import DecodeError
from replaybuf.rollouts.marks import Marks
from replaybuf.segments.extents import EXTENT_BYTES, Extent

#: What damaged metadata of a group raises.
DAMAGE: Final = (AttributeError, LookupError, TypeError, ValueError)


def decode_stored(
    codec: Codec,
    uid: int,
    payload: bytes | None,
    marks: str,
    refreshed_to: int | None,
    *,
    verified: bool = False,
    tail: Any = None,
    deferral: Deferral | None = None,
) -> list[Any]:
    """Return the rollouts of a group, whose arrays live in the payload: ask once.

    `marks` is JSON (`rollouts.marks`), and `refreshed_to` the train step of the last refresh, None before the first. As
    long as nobody writes to the arrays, the payload is what was stored. `tail` is the rest of a payload whose arrays
    are kept apart, or the DecodeError for which it can't be read. With a `deferral` the payload may be only a head, and
    the tail has the pieces that were read. Raises DecodeError.
    """
    if payload is None:
        raise DecodeError(f"group {uid}: its payload is missing")
    if deferral is None:
        rollouts = _decode(codec, uid, payload, verified, tail)
    else:
        rollouts = _decode_deferred(codec, uid, payload, tail, deferral)
    bring_up_to_date(codec, uid, rollouts, marks, refreshed_to)
    return rollouts


def bring_up_to_date(codec: Codec, uid: int, rollouts: list[Any], marks: str, refreshed_to: int | None) -> None:
    """Apply to rollouts what refreshes have noted of their group. Raises DecodeError."""
    try:
        found = Marks.from_json(from_json(marks))
        if len(rollouts) != len(found.oldest):
            raise DecodeError(f"group {uid}: {len(rollouts)} rollouts in the payload, {len(found.oldest)} expected")
        found.apply(rollouts, refreshed_to, codec.rollout_type)
    except DecodeError:
        raise
    except DAMAGE as error:
        raise damaged(uid, error) from error


def _decode(codec: Codec, uid: int, payload: bytes, verified: bool, tail: Any) -> list[Any]:
    if not is_apart(payload):
        return codec.decode(payload, verified=verified, owned=True)
    if isinstance(tail, DecodeError):
        raise DecodeError(f"group {uid}: {tail}") from tail
    extent = Extent.at_end_of(payload)
    if tail is None:
        raise DecodeError(f"group {uid}: its arrays are in the segment {extent.name}, which was not read")
    return codec.decode(memoryview(payload)[:-EXTENT_BYTES], verified=verified, owned=True, tail=tail)


def _decode_deferred(codec: Codec, uid: int, payload: bytes, pieces: Any, deferral: Deferral) -> list[Any]:
    if isinstance(pieces, DecodeError):
        raise DecodeError(f"group {uid}: {pieces}") from pieces
    return codec.decode_deferred(payload, deferral.fields, pieces or {}, deferral.of(uid, payload))


@dataclass(frozen=True, slots=True)
class Deferral:
    """The fields whose arrays aren't read, and what makes their handles, given the uid and the head of a group."""

    fields: frozenset[str]
    of: Callable[[int, bytes], Deferring]


def damaged(uid: int, error: Exception) -> DecodeError:
    """Return the error of a group whose metadata can't be read."""
    return DecodeError(f"group {uid}: its metadata is damaged ({type(error).__name__}: {error})")
