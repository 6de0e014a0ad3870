"""The place of a cursor in a dataset, as the store keeps it."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]

from replaybuf.errors import InputError

#: Where to begin: the place of a cursor that was never moved.
START = b""

#: No dataset is read so far.
FAR = 1 << 62


def of_another(kind: str) -> InputError:
    """The error for a place that no dataset of this kind has written."""
    return InputError(
        f"the cursor of the prompt ledger is not one of {kind}: the run began with another dataset; go on with that "
        "one, or give the ledger another name="
    )


def pack(place: Any) -> bytes:
    """A place of whole numbers, as bytes."""
    return bytes(msgpack.packb(place))


def unpack(place: bytes, kind: str) -> Any:
    """What was packed. InputError when it is no such thing."""
    try:
        return msgpack.unpackb(place)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise of_another(kind) from error


def is_number(value: Any) -> bool:
    """Whether it is the number of an item or an epoch, or a size."""
    return type(value) is int and 0 <= value < FAR
