"""Full rollouts of a group as plain values. Imports the codec, which most reads don't need."""

from __future__ import annotations

from typing import Any

from replaybuf.errors import DecodeError
from replaybuf.storage.decoding import Places, decode_shown
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.values.codec.payload import Codec
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
