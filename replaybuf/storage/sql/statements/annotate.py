"""Annotations: what a trainer has found out about the groups of a draw, or about their rollouts.

They belong to the draw: a restore leaves them, and they are deleted with its batch (`batches`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic_core import from_json

from replaybuf.common.checks import check_list, check_plain, check_uids, shown
from replaybuf.errors import InputError
from replaybuf.storage.decoding import DAMAGE, damaged
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.values import Annotation

#: Limits: characters of a text, and names of a group.
_MOST_CHARACTERS, MOST_NAMES = 200, 64

#: The annotations of groups, by uid.
Annotations = Mapping[int, Sequence[Annotation]]


def check_annotations(given: Any) -> dict[int, list[Annotation]]:
    """Return annotations of groups by uid as they are stored. Raises InputError."""
    if not isinstance(given, Mapping):
        raise InputError(f"expected a dict of uids and annotations, got {type(given).__name__}")
    uids = check_uids(given, "uids")
    return {uid: _group_annotations(f"group {uid}", values) for uid, values in zip(uids, given.values(), strict=True)}


def annotate(tx: Transaction, annotations: Annotations, step: int | None) -> int:
    """Write annotations for the last draw of each group (for this train step), all or none, and return the number of
    groups. Raises InputError as `ReplayBuffer.annotate` says."""
    draws = _last_draws(tx, annotations, step)
    if len(draws) < len(annotations):  # an acknowledgement of a part of a lease may just have moved groups
        draws = _last_draws(tx, annotations, step)
    if undrawn := sorted(annotations.keys() - draws.keys()):
        draw = f"draw of group {undrawn[0]}" if step is None else f"draw of group {undrawn[0]} for train step {step}"
        suffix = f" (nor of {len(undrawn) - 1} others)" if len(undrawn) > 1 else ""
        raise InputError(f"no {draw} is recorded{suffix}, by which it could be annotated")
    for uid, (_, rollouts) in draws.items():
        if counts := {annotation.rollouts for annotation in annotations[uid]} - {None, rollouts}:
            hint = "one for each, in order, or one dict for the group"
            raise InputError(f"group {uid} has {rollouts} rollouts or segments, and {counts.pop()} dicts: give {hint}")
    rows = [(draws[uid][0], uid, note.name, note.rows, note.data) for uid in sorted(draws) for note in annotations[uid]]
    tx.each(_WRITE, rows)
    return len(draws)


# What is given


def _group_annotations(group: str, annotations: Any) -> list[Annotation]:
    """Return the annotations of a group, or of its rollouts."""
    whole = isinstance(annotations, Mapping)
    dicts = [annotations] if whole else check_list(annotations, f"the annotations of {group}, unless they are a dict,")
    checked = [_values(group if whole else f"{group}, rollout {place}", values) for place, values in enumerate(dicts)]
    names = dict.fromkeys(name for values in checked for name in values)
    if not 1 <= len(names) <= MOST_NAMES:
        raise InputError(f"{group} is given {len(names)} annotations; it must be from 1 to {MOST_NAMES}")
    return [_annotation(group, name, [values.get(name) for values in checked], whole=whole) for name in names]


def _values(where: str, mapping: Any) -> dict[str, Any]:
    """Return the checked values of a group or a rollout by name, without Nones."""
    if not isinstance(mapping, Mapping):
        raise InputError(f"the annotations of {where} must be a dict, got {type(mapping).__name__}")
    values = {}
    for name, value in mapping.items():
        if not isinstance(name, str) or not name.isidentifier() or len(name) > _MOST_CHARACTERS:
            raise InputError(f"{where}: the name {shown(name)} must be an identifier, as a variable of Python has one")
        is_finite = type(value) is float and math.isfinite(value)
        if (checked := value if is_finite else _value(f"{name} of {where}", value)) is not None:
            values[name] = checked
    return values


def _value(label: str, value: Any) -> Any:
    """Return a plain value or, of an array, a tensor or a list, a float32 array with a number for each token."""
    if isinstance(value, list | tuple) and all(isinstance(item, int | float | np.number) for item in value):
        value = np.asarray(value)
    if not getattr(value, "ndim", 0):
        plain = check_plain(label, value.item() if hasattr(value, "item") else value, "an annotation")
        if isinstance(plain, str) and len(plain) > _MOST_CHARACTERS:
            raise InputError(f"{label} has {len(plain)} characters; the limit is {_MOST_CHARACTERS}")
        return plain
    array = np.asarray(value.detach().cpu().double() if hasattr(value, "detach") else value)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        shape = f"{array.ndim} dimensions of {array.dtype}"
        raise InputError(f"{label} has {shape}; an array has one dimension, with a number for each response token")
    with np.errstate(over="ignore"):
        numbers = array.astype("<f4")
    if not (finite := np.isfinite(numbers)).all():
        place = int(np.argmin(finite))
        raise InputError(f"{label} has {array[place]} at token {place}, which isn't a finite float32")
    return numbers


def _annotation(group: str, name: str, values: Sequence[Any], *, whole: bool) -> Annotation:
    """Return an annotation of a whole group, or of each of its rollouts, None for those without."""
    arrays: list[Any] = [value for value in values if isinstance(value, np.ndarray)]
    if arrays and (whole or len(arrays) < sum(value is not None for value in values)):
        raise InputError(
            f"{name} of {group} is an array: arrays are of rollouts (a list of dicts), each of which has one or None"
        )
    rows = [[None if whole else place, *_columns(value)] for place, value in enumerate(values) if value is not None]
    return Annotation(name, None if whole else len(values), rows, b"".join(arrays) if arrays else None)


def _columns(value: Any) -> list[Any]:
    """Return the columns of the view `annotations` from `value` on that aren't NULL."""
    if isinstance(value, str):
        return [None, value]
    if not isinstance(value, np.ndarray):
        return [float(value)]
    if not value.size:
        return [None, None, None, None, 0]
    mean, minimum, maximum = (float(f"{number:.6g}") for number in (value.mean(dtype=float), value.min(), value.max()))
    return [mean, None, minimum, maximum, value.size]


# What is written

_WRITE = """INSERT INTO rb_annotation (draw, uid, name, rows, data) VALUES (:draw, :uid, :name, {json:rows}, :data)
ON CONFLICT (draw, uid, name) DO UPDATE SET rows = excluded.rows, data = excluded.data"""


def _last_draws(tx: Transaction, uids: Collection[int], step: int | None) -> dict[int, tuple[int, int]]:
    """Return the last recorded draw of each group (for a train step), locked, and the group's number of rollouts."""
    rows = tx.tuples(_LAST_DRAWS, uids=sorted(uids), buffer=tx.scope.buffer, step=step)
    last_draws, draws = {uid: draw for uid, draw in rows if draw is not None}, {}
    for uid, draw, marks in tx.tuples(_LOCK_PAST, uids=list(last_draws), draws=list({*last_draws.values()})):
        try:
            rollouts = len(from_json(marks)["oldest"])
        except DAMAGE as error:
            raise damaged(uid, error) from error
        if draw == last_draws[uid]:
            draws[uid] = (draw, rollouts)
    return draws


# A row of each uid, from the index: PostgreSQL would sort for a GROUP BY.
_LAST_DRAWS = """SELECT u.value, (
    SELECT max(p.draw) FROM rb_past p JOIN rb_batch b ON b.id = p.draw
    WHERE p.uid = u.value AND p.draw > 0 AND b.buffer = :buffer
        AND (CAST(:step AS bigint) IS NULL OR b.step = CAST(:step AS bigint)))
FROM {each:uids} u"""
_LOCK_PAST = """SELECT p.uid, p.draw, CAST(p.marks AS text) FROM rb_past p JOIN rb_batch b ON b.id = p.draw
WHERE p.uid {in:uids} AND p.draw {in:draws} AND p.draw > 0 {lock}"""
