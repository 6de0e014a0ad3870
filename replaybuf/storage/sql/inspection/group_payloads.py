"""A group with its rollouts in full, for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replaybuf.codec.payload import Codec
from replaybuf.codec.stored import decode_shown
from replaybuf.errors import DecodeError
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.storage.sql.inspection.groups import Described, describe_group
from replaybuf.storage.sql.inspection.reader import ReadTransaction

#: Decodes rollouts as dicts, whatever their class and those in their fields were, and needs neither torch nor Ray.
AS_DICTS = Codec(RolloutType(dict), tensors="numpy", object_refs="value", as_plain=True)

_PAYLOAD = """
SELECT p.data, g.marks, CASE WHEN g.pinned_staleness IS NULL THEN l.step ELSE g.pinned_step END
FROM rb_group g JOIN rb_lane l ON l.id = g.lane LEFT JOIN rb_payload p ON p.uid = g.uid WHERE g.uid = :uid"""


_PLACES = "SELECT id, url FROM rb_place"


@dataclass(slots=True)
class Shown(Described):
    """A group and its rollouts; if they were read, its payload, marks, step of its last refresh, and all places."""

    stored: tuple[bytes | None, str, int | None, dict[int, str]] | None = None

    def decode(self) -> tuple[list[dict[str, Any]], str | None]:
        """Return the full rollouts, if the payload was read, and what is missing of them. Raises DecodeError.

        Arrays that can't be read are left out.
        """
        assert self.stored is not None
        uid = self.group["uid"]
        try:
            return decode_shown(AS_DICTS, uid, *self.stored)
        except DecodeError as error:
            raise DecodeError(f"group {uid}: {error} (without --full its metadata can be shown)") from error


def show_group(tx: ReadTransaction, uid: int, *, payload: bool) -> Shown | None:
    """Return a group of any buffer, or None when it isn't there."""
    described = describe_group(tx, uid)
    if described is None:
        return None
    stored = None
    if payload:
        [(data, marks, refreshed_to)] = tx.tuples(_PAYLOAD, uid=uid)
        stored = (None if data is None else bytes(data), marks, refreshed_to, read_places(tx))
    return Shown(described.group, described.rollouts, described.now, described.several, stored)


def read_places(tx: ReadTransaction) -> dict[int, str]:
    """Return the places of payloads that are kept apart, by number, for `read_tails`."""
    return dict(map(tuple, tx.tuples(_PLACES)))
