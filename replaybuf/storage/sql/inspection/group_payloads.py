"""Full rollouts of a group as plain values. Imports the codec, which most reads don't need."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np

from replaybuf.errors import DecodeError
from replaybuf.storage.decoding import Places, decode_shown
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.group_metadata import LAST_ANNOTATED
from replaybuf.storage.sql.schema import REFRESHED_TO
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout_type import RolloutType

#: Decodes rollouts, and objects in their fields, as dicts whatever their class, without torch or Ray.
AS_DICTS = Codec(RolloutType(dict), tensors="numpy", object_refs="value", as_plain=True)

_PAYLOAD = f"""SELECT p.data, g.marks, {REFRESHED_TO}
FROM rb_group g JOIN rb_lane l ON l.id = g.lane LEFT JOIN rb_payload p ON p.uid = g.uid WHERE g.uid = :uid"""  # noqa: S608


_ARRAYS = f"""SELECT name, CAST(rows AS text), data FROM rb_annotation
WHERE uid = :uid AND data IS NOT NULL AND draw = {LAST_ANNOTATED} ORDER BY name"""  # noqa: S608


def read_arrays(tx: Transaction, uid: int) -> dict[int, dict[str, list[float]]]:
    """Return the arrays among the annotations of a group's last draw with any, by rollout and name."""
    by_rollout: dict[int, dict[str, list[float]]] = {}
    for name, rows, data in tx.tuples(_ARRAYS, uid=uid):
        numbers = iter(np.frombuffer(data, "<f4").tolist())
        for position, *_, tokens in json.loads(rows):
            by_rollout.setdefault(position, {})[name] = [*islice(numbers, tokens)]
    return by_rollout


Stored = tuple[bytes | None, str, int | None, Places]


def read_payload(tx: Transaction, uid: int) -> Stored:
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
