"""Annotations: what a trainer has found out about the groups of a draw, or about their rollouts.

They belong to the draw: a restore leaves them, and they are deleted with its batch (`batches`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic_core import from_json

from replaybuf.common import units
from replaybuf.common.checks import check_list, check_plain, check_uids, shown
from replaybuf.errors import InputError
from replaybuf.storage.decoding import DAMAGE, damaged
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.values import Annotation

#: Limits: characters of a text, names of a group, and bytes of all arrays of a call.
_MOST_CHARACTERS, MOST_NAMES, _MOST_BYTES = 200, 64, 256 << 20

#: The annotations of groups, by uid.
Annotations = Mapping[int, Sequence[Annotation]]


def check_annotations(given: Any) -> dict[int, list[Annotation]]:
    """Return annotations of groups by uid as they are stored. Raises InputError."""
    if not isinstance(given, Mapping):
        raise InputError(f"expected a dict of uids and annotations, got {type(given).__name__}")
    uids = check_uids(given, "uids")
    found = {uid: _of_group(f"group {uid}", one) for uid, one in zip(uids, given.values(), strict=True)}
    if (size := sum(len(one.data or b"") for several in found.values() for one in several)) > _MOST_BYTES:
        most = f"a call takes {units.size(_MOST_BYTES)} at most: annotate fewer groups at a time"
        raise InputError(f"the arrays have {units.size(size)}, and {most}")
    return found


def annotate(tx: Transaction, annotations: Annotations, step: int | None) -> int:
    """Write annotations for the last draw of each group (for this train step), all or none, and return the number of
    groups. Raises InputError as `ReplayBuffer.annotate` says."""
    drawn = _last_draws(tx, annotations, step)
    if len(drawn) < len(annotations):  # an acknowledgement of a part of a lease may just have moved groups
        drawn = _last_draws(tx, annotations, step)
    if unknown := sorted(annotations.keys() - drawn.keys()):
        draw = f"draw of group {unknown[0]}" if step is None else f"draw of group {unknown[0]} for train step {step}"
        others = f" (nor of {len(unknown) - 1} others)" if len(unknown) > 1 else ""
        raise InputError(f"no {draw} is recorded{others}, by which it could be annotated")
    for uid, (_, rollouts) in drawn.items():
        if given := {one.rollouts for one in annotations[uid]} - {None, rollouts}:
            wanted = "one for each, in order, or one dict for the group"
            raise InputError(f"group {uid} has {rollouts} rollouts or segments, and {given.pop()} dicts: give {wanted}")
    _check_tokens(tx, annotations)
    rows = [(drawn[uid][0], uid, one.name, one.rows, one.data) for uid in sorted(drawn) for one in annotations[uid]]
    tx.each(_WRITE, rows)
    return len(drawn)


# What is given


def _of_group(group: str, given: Any) -> list[Annotation]:
    """Return the annotations of a group, or of its rollouts."""
    whole = isinstance(given, Mapping)
    listed = [given] if whole else check_list(given, f"the annotations of {group}, unless they are a dict,")
    checked = [_values(group if whole else f"{group}, rollout {place}", one) for place, one in enumerate(listed)]
    names = dict.fromkeys(name for one in checked for name in one)
    if not 1 <= len(names) <= MOST_NAMES:
        raise InputError(f"{group} is given {len(names)} annotations; it must be from 1 to {MOST_NAMES}")
    return [_annotation(group, name, [one.get(name) for one in checked], whole=whole) for name in names]


def _values(where: str, given: Any) -> dict[str, Any]:
    """Return the checked values of a group or a rollout by name, without Nones."""
    if not isinstance(given, Mapping):
        raise InputError(f"the annotations of {where} must be a dict, got {type(given).__name__}")
    found = {}
    for name, value in given.items():
        if not isinstance(name, str) or not name.isidentifier() or len(name) > _MOST_CHARACTERS:
            raise InputError(f"{where}: the name {shown(name)} must be an identifier, as a variable of Python has one")
        usual = type(value) is float and math.isfinite(value)
        if (checked := value if usual else _value(f"{name} of {where}", value)) is not None:
            found[name] = checked
    return found


def _value(what: str, value: Any) -> Any:
    """Return a plain value or, of an array, a tensor or a list, a float32 array with a number for each token."""
    if isinstance(value, list | tuple) and all(isinstance(one, int | float | np.number) for one in value):
        value = np.asarray(value)
    if not getattr(value, "ndim", 0):
        plain = check_plain(what, value.item() if hasattr(value, "item") else value, "an annotation")
        if isinstance(plain, str) and len(plain) > _MOST_CHARACTERS:
            raise InputError(f"{what} has {len(plain)} characters; the limit is {_MOST_CHARACTERS}")
        return plain
    given = np.asarray(value.detach().cpu().double() if hasattr(value, "detach") else value)
    if given.ndim != 1 or given.dtype.kind not in "biuf":
        kind = f"{given.ndim} dimensions of {given.dtype}"
        raise InputError(f"{what} has {kind}; an array has one dimension, with a number for each response token")
    with np.errstate(over="ignore"):
        numbers = given.astype("<f4")
    if not (finite := np.isfinite(numbers)).all():
        place = int(np.argmin(finite))
        raise InputError(f"{what} has {given[place]} at token {place}, which isn't a finite float32")
    return numbers


def _annotation(group: str, name: str, values: Sequence[Any], *, whole: bool) -> Annotation:
    """Return an annotation of a whole group, or of each of its rollouts, None for those without."""
    arrays: list[Any] = [one for one in values if isinstance(one, np.ndarray)]
    if arrays and (whole or len(arrays) < sum(one is not None for one in values)):
        raise InputError(
            f"{name} of {group} is an array: arrays are of rollouts (a list of dicts), each of which has one or None"
        )
    rows = [[None if whole else place, *_columns(one)] for place, one in enumerate(values) if one is not None]
    return Annotation(name, None if whole else len(values), rows, b"".join(arrays) if arrays else None)


def _columns(value: Any) -> list[Any]:
    """Return the columns of the view `annotations` from `value` on that aren't NULL."""
    if isinstance(value, str):
        return [None, value]
    if not isinstance(value, np.ndarray):
        return [float(value)]
    if not value.size:
        return [None, None, None, None, 0]
    mean, least, most = (float(f"{one:.6g}") for one in (value.mean(dtype=float), value.min(), value.max()))
    return [mean, None, least, most, value.size]


# What is written

_WRITE = """INSERT INTO rb_annotation (draw, uid, name, rows, data) VALUES (:draw, :uid, :name, {json:rows}, :data)
ON CONFLICT (draw, uid, name) DO UPDATE SET rows = excluded.rows, data = excluded.data"""


def _last_draws(tx: Transaction, uids: Collection[int], step: int | None) -> dict[int, tuple[int, int]]:
    """Return the last recorded draw of each group (for a train step), locked, and the group's number of rollouts."""
    drawn = tx.tuples(_LAST, uids=sorted(uids), buffer=tx.scope.buffer, step=step)
    last, found = {uid: draw for uid, draw in drawn if draw is not None}, {}
    for uid, draw, marks in tx.tuples(_LOCKED, uids=list(last), draws=list({*last.values()})):
        try:
            rollouts = len(from_json(marks)["oldest"])
        except DAMAGE as error:
            raise damaged(uid, error) from error
        if draw == last[uid]:
            found[uid] = (draw, rollouts)
    return found


# A row of each uid, from the index: PostgreSQL would sort for a GROUP BY.
_LAST = """SELECT u.value, (
    SELECT max(p.draw) FROM rb_past p JOIN rb_batch b ON b.id = p.draw
    WHERE p.uid = u.value AND p.draw > 0 AND b.buffer = :buffer
        AND (CAST(:step AS bigint) IS NULL OR b.step = CAST(:step AS bigint)))
FROM {each:uids} u"""
_LOCKED = """SELECT p.uid, p.draw, CAST(p.marks AS text) FROM rb_past p JOIN rb_batch b ON b.id = p.draw
WHERE p.uid {in:uids} AND p.draw {in:draws} AND p.draw > 0 {lock}"""


def _check_tokens(tx: Transaction, annotations: Annotations) -> None:
    """Check that arrays have a number for each response token, of groups whose payload is there to count them."""
    arrays = {
        uid: several
        for uid, every in annotations.items()
        if (several := [one for one in every if one.data is not None])
    }
    for uid, outline in tx.tuples(_OUTLINES, uids=list(arrays)):
        tokens = [one["response_tokens"] for one in from_json(outline)]
        for name, place, length in ((one.name, row[0], row[-1]) for one in arrays[uid] for row in one.rows):
            if tokens[place] not in (0, length):
                numbers = f"{length} numbers for {tokens[place]} response tokens"
                raise InputError(f"{name} of group {uid}, rollout {place}, has {numbers}")


_OUTLINES = """SELECT p.uid, CAST(p.outline AS text) FROM rb_payload p JOIN rb_group g ON g.uid = p.uid
WHERE p.uid {in:uids}"""
