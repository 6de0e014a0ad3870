"""A group with its rollouts in full, for people."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from replaybuf.codec.payload import Codec, is_apart
from replaybuf.codec.stored import decode_stored
from replaybuf.errors import DecodeError
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.segments.extents import Extent
from replaybuf.segments.places import open_place
from replaybuf.segments.store import Range
from replaybuf.storage.sql.inspection.groups import Described, describe_group
from replaybuf.storage.sql.inspection.reader import ReadTransaction

#: Decodes rollouts as dicts, whatever their class and those in their fields were, and needs neither torch nor Ray.
AS_DICTS = Codec(RolloutType(dict), tensors="numpy", object_refs="value", as_plain=True)

#: How long reading waits for the place of a payload that is kept apart, in seconds.
_PATIENCE = 30.0

_PLACES = "SELECT id, url FROM rb_place"
_PAYLOAD = """
SELECT p.data, g.marks, CASE WHEN g.pinned_staleness IS NULL THEN l.step ELSE g.pinned_step END
FROM rb_group g JOIN rb_lane l ON l.id = g.lane LEFT JOIN rb_payload p ON p.uid = g.uid WHERE g.uid = :uid"""


@dataclass(slots=True)
class Shown(Described):
    """A group and its rollouts; its payload, marks and the step of its last refresh if they were read.

    `places` are the URLs of where payloads are kept apart, if this one is.
    """

    stored: tuple[bytes | None, str, int | None] | None = None
    places: Mapping[int, str] = field(default_factory=dict)

    def decode(self) -> list[dict[str, Any]]:
        """Return the full rollouts, if the payload was read. Raises DecodeError and PayloadStoreError."""
        assert self.stored is not None
        uid = self.group["uid"]
        try:
            return decode_stored(AS_DICTS, uid, *self.stored, tail=self._tail())
        except DecodeError as error:
            raise DecodeError(f"group {uid}: {error} (without --full its metadata can be shown)") from error

    def _tail(self) -> Any:
        """Return the arrays of a payload that is kept apart, None of others."""
        assert self.stored is not None
        payload = self.stored[0]
        if payload is None or not is_apart(payload):
            return None
        extent = Extent.at_end_of(payload)
        if extent.place not in self.places:
            raise DecodeError(f"the database doesn't know the place {extent.place} of its arrays")
        with closing(open_place(self.places[extent.place], _PATIENCE)) as store:
            [tail] = store.read([Range.whole(extent)], _PATIENCE)
        return tail


def show_group(tx: ReadTransaction, uid: int, *, payload: bool) -> Shown | None:
    """Return a group of any buffer, or None when it isn't there."""
    described = describe_group(tx, uid)
    if described is None:
        return None
    stored, places = None, {}
    if payload:
        [(data, marks, refreshed_to)] = tx.tuples(_PAYLOAD, uid=uid)
        stored = (None if data is None else bytes(data), marks, refreshed_to)
        if stored[0] is not None and is_apart(stored[0]):
            places = {int(number): str(url) for number, url in tx.tuples(_PLACES)}
    return Shown(described.group, described.rollouts, described.now, described.several, stored, places)
