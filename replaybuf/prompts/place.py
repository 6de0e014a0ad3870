"""The place of a cursor in a dataset, as the store keeps it."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]

from replaybuf.errors import InputError

#: The place of a cursor that was never moved.
START = b""

#: A place further than any dataset is read.
FAR = 1 << 62


def of_another(kind: str) -> InputError:
    """Return the error for a place that no dataset of this kind has written."""
    return InputError(
        f"the cursor of the prompt ledger is not one of {kind}: the run began with another dataset; go on with that "
        "one, or give the ledger another name="
    )


def pack(place: Any) -> bytes:
    """Pack a place of whole numbers into bytes."""
    return bytes(msgpack.packb(place))


def unpack(place: bytes, kind: str) -> Any:
    """Unpack a place. Raises InputError for anything else."""
    try:
        return msgpack.unpackb(place)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise of_another(kind) from error


def is_number(value: Any) -> bool:
    """Return whether a value is the number of an item or an epoch, or a size."""
    return type(value) is int and 0 <= value < FAR
