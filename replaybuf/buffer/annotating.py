"""Checks of annotations: what a trainer writes about groups and their rollouts, as it is stored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replaybuf.common import units
from replaybuf.common.checks import check_list, check_plain, check_uids
from replaybuf.errors import InputError
from replaybuf.storage.values import Annotation

#: Annotations of groups by uid: those of the group, or a list with those of each rollout.
ByGroup = Mapping[int, Mapping[str, Any] | Sequence[Mapping[str, Any]]]

#: Limits: characters of a text, names of a group, and bytes of all arrays of a call.
MOST_CHARACTERS, MOST_NAMES, MOST_BYTES = 200, 64, 256 << 20


def check_annotations(given: Any) -> dict[int, list[Annotation]]:
    """Return annotations of groups by uid as they are stored. Raises InputError."""
    if not isinstance(given, Mapping):
        raise InputError(f"expected a dict of uids and annotations, got {type(given).__name__}")
    uids = check_uids(given, "uids")
    found = {uid: _of_group(f"group {uid}", one) for uid, one in zip(uids, given.values(), strict=True)}
    if (size := sum(len(one.data or b"") for several in found.values() for one in several)) > MOST_BYTES:
        most = f"a call takes {units.size(MOST_BYTES)} at most: annotate fewer groups at a time"
        raise InputError(f"the arrays have {units.size(size)}, and {most}")
    return found


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
        if isinstance(plain, str) and len(plain) > MOST_CHARACTERS:
            raise InputError(f"{what} has {len(plain)} characters; the limit is {MOST_CHARACTERS}")
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


def _annotation(group: str, name: Any, values: Sequence[Any], *, whole: bool) -> Annotation:
    """Return an annotation of a whole group, or of each of its rollouts, None for those without."""
    if not isinstance(name, str) or not name.isidentifier() or len(name) > MOST_CHARACTERS:
        raise InputError(f"{group}: the name {name!r:.100} must be an identifier, as a variable of Python has one")
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
