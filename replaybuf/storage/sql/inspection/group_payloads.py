"""Full rollouts of a group as plain values. Imports the codec, which most reads don't need."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np

from replaybuf.errors import DecodeError, ReplayBufError
from replaybuf.storage.decoding import PATIENCE, Places, bring_up_to_date, decode_stored, read_tails, wait_for
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.group_metadata import LAST_ANNOTATED
from replaybuf.storage.sql.schema import REFRESHED_TO
from replaybuf.values.codec.payload import Codec
from replaybuf.values.codec.payload_format import is_apart
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


def decode_payload(uid: int, stored: Stored, patience: float = PATIENCE) -> tuple[list[dict[str, Any]], str | None]:
    """Return the readable part of a group's rollouts, and a sentence about the missing arrays, None if there are none.

    Blocks, for up to `patience` seconds where arrays are kept apart. Raises DecodeError.
    """
    payload, marks, refreshed_to, places = stored
    prefix = f"group {uid}: "
    try:
        try:
            [tail] = wait_for(read_tails([payload], places, patience))
            return decode_stored(AS_DICTS, uid, payload, marks, refreshed_to, tail=tail)[0], None
        except ReplayBufError as error:
            if payload is None or not is_apart(payload):
                raise
            reason = str(error).removeprefix(prefix)
        rollouts = AS_DICTS.decode_head(payload)
    except DecodeError as error:
        raise DecodeError(prefix + str(error).removeprefix(prefix)) from error
    with suppress(DecodeError):  # refreshes may change missing arrays
        bring_up_to_date(AS_DICTS, uid, rollouts, marks, refreshed_to)
    return rollouts, f"group {uid} is shown without its arrays: {reason}"
