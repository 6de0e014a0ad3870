"""Full rollouts of a group as plain values, and its arrays and tensors with the location of their bytes.

Imports the codec, which most reads don't need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from replaybuf.common import units
from replaybuf.errors import DecodeError
from replaybuf.storage.decoding import Places, decode_shown
from replaybuf.storage.places.store import FILES, Extent
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.values.codec.blocks import ArrayFacts
from replaybuf.values.codec.payload import Codec
from replaybuf.values.codec.payload_format import is_apart
from replaybuf.values.rollouts.rollout_type import RolloutType

#: Decodes rollouts, and objects in their fields, as dicts whatever their class, without torch or Ray.
AS_DICTS = Codec(RolloutType(dict), tensors="numpy", object_refs="value", as_plain=True)

_PAYLOAD = """
SELECT p.data, g.marks, CASE WHEN g.pinned_staleness IS NULL THEN l.step ELSE g.pinned_step END
FROM rb_group g JOIN rb_lane l ON l.id = g.lane LEFT JOIN rb_payload p ON p.uid = g.uid WHERE g.uid = :uid"""


Stored = tuple[bytes | None, str, int | None, Places]


def read_payload(tx: ReadTransaction, uid: int) -> Stored:
    """Return the input of `decode_payload` for an existing group.

    It has the group's payload, marks (rollout metadata), the step of its last refresh, and all places.
    """
    [(data, marks, refreshed_to)] = tx.tuples(_PAYLOAD, uid=uid)
    return None if data is None else bytes(data), marks, refreshed_to, tx.places()


def decode_payload(uid: int, stored: Stored) -> tuple[list[dict[str, Any]], str | None]:
    """Return the full rollouts of a group and, if arrays had to be left out, the reason. Raises DecodeError."""
    try:
        return decode_shown(AS_DICTS, uid, *stored)
    except DecodeError as error:
        raise DecodeError(f"group {uid}: {error} (without --full its metadata can be shown)") from error


IN_DATABASE: Final = "the database"


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array or tensor of a rollout: its path in the rollout, and where its bytes are.

    `file` is a file or object in the `folder` of a place, None for the database. `small` arrays are stored inline with
    the group's other values.
    """

    rollout: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    folder: str | None
    file: str | None
    small: bool

    @property
    def dimensions(self) -> str:
        """The shape as text."""
        return " × ".join(map(str, self.shape)) or "one"

    @property
    def kept_in(self) -> str:
        """The name of the file, or that it is in the database."""
        return self.file or IN_DATABASE

    @property
    def where(self) -> str:
        """The path or URL of the file or object."""
        return IN_DATABASE if self.file is None else f"{self.folder}/{self.file}"


def arrays_of(stored: Stored) -> list[StoredArray]:
    """Return the arrays and tensors of a group, by rollout and path; none if the payload can't be read."""
    payload, _, _, (urls, _) = stored
    if payload is None:
        return []
    try:
        rollouts = AS_DICTS.decode_facts(payload)
        folder, file = None, None
        if is_apart(payload):
            extent = Extent.at_end_of(payload)
            url = urls.get(extent.place, f"a place {extent.place} that the database doesn't know")
            folder, file = f"{url}/{FILES}", extent.name
    except DecodeError:
        return []
    found = []
    for number, rollout in enumerate(rollouts):
        for path, one in _arrays_in(rollout, ""):
            place = (folder, file) if one.out_of_band else (None, None)
            found.append(StoredArray(number, path, one.dtype, one.shape, one.nbytes, *place, not one.out_of_band))
    return found


def footnotes(arrays: Sequence[StoredArray]) -> list[str]:
    """Return sentences that say where the files of arrays are, and how many small arrays aren't listed."""
    files: dict[str, set[str]] = {}
    for one in arrays:
        if one.folder is not None and one.file is not None:
            files.setdefault(one.folder, set()).add(one.file)
    notes = [f"{', '.join(sorted(names))}: in {folder}" for folder, names in files.items()]
    if small := [one.nbytes for one in arrays if one.small]:
        notes.append(f"{units.number_of(len(small), 'small array')} of {units.size(sum(small))}: in {IN_DATABASE}")
    return notes


def _arrays_in(value: Any, path: str) -> Iterator[tuple[str, ArrayFacts]]:
    if isinstance(value, ArrayFacts):
        yield path, value
    elif isinstance(value, np.ndarray):  # not in C order, or of objects
        yield path, ArrayFacts(str(value.dtype), value.shape, value.nbytes, out_of_band=False)
    elif isinstance(value, dict):
        for name, inside in value.items():
            yield from _arrays_in(inside, f"{path}.{name}" if path else str(name))
    elif isinstance(value, (list, tuple)) and not (value and isinstance(value[0], int | float | str)):
        for place, inside in enumerate(value):
            yield from _arrays_in(inside, f"{path}[{place}]")
