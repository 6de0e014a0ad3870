"""Groups as rows of files, and back: a row is a rollout, with its group's metadata.

A row has the rollout's fields by their names, and the metadata of its group as `group.uid`, `group.task_name`, ...;
`group.index` and `group.size` are its place in the group and the number of its rollouts. Where rollouts consist of
segments, a row is one of these: `group.rollout` is the number of its rollout, `group.parent` the `group.index` of the
segment that it continues, and `group.segments` the number of segments of the rollout, 0 if it wasn't in a list.

Values are those of JSON, or of Arrow (`files.parquet_files`), for people and other programs; whatever these lack is
text. An *exact* export also has the group's payload, `group.payload` in the group's first row, and an import reads that
instead of the fields.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, FiniteFloat, ValidationError, create_model

from replaybuf.common import checks
from replaybuf.common.worker_name import check_worker
from replaybuf.errors import FileError
from replaybuf.storage.values import StorageItem
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.segments import Segments

Row = dict[str, Any]
#: A row with its place in the file, for messages: "line 12".
Placed = tuple[str, Row]

PREFIX: Final = "group."
#: The fields of a rollout whose names or values don't fit the columns of the file.
MORE: Final = f"{PREFIX}more"
PAYLOAD: Final = f"{PREFIX}payload"
#: In place of an Arrow type: JSON as text.
JSON: Final = "json"
_SEGMENT_COLUMNS: Final = (f"{PREFIX}rollout", f"{PREFIX}parent", f"{PREFIX}segments")

_PLAIN_TYPES: Final = frozenset({type(None), bool, int, str})
_LIST_TYPES: Final = (list, tuple, Set, deque)
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def plain(value: Any) -> Any:
    """Return a value as JSON values; what JSON lacks is text. RecursionError when it is nested too deeply."""
    kind = type(value)
    if kind in _PLAIN_TYPES or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {name if type(name) is str else _text(name): plain(item) for name, item in value.items()}
    if isinstance(value, _LIST_TYPES):
        kinds = set(map(type, value))
        if kinds <= _PLAIN_TYPES or (kinds == {float} and all(map(math.isfinite, value))):
            return list(value)
        return list(map(plain, value))
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, np.ndarray | np.generic) and not isinstance(items := value.tolist(), np.generic):
        return plain(items)
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    try:
        return value.isoformat() if hasattr(value, "isoformat") else _ADDRESS.sub("", str(value))
    except Exception:  # of the value's class: numpy can't write a datetime64 without a unit
        return type(value).__name__


@dataclass(slots=True)
class FileGroup:
    """A group read from a file: its metadata (`metadata_of`), its rollouts as dicts, and its place in the file.

    `payload` is that of an exact export, whose `rollouts` are empty dicts.
    """

    place: str
    metadata: Row
    rollouts: list[dict[Any, Any]]
    payload: bytes | None = None
    segments: Segments | None = None

    @property
    def lane(self) -> tuple[str, Status]:
        return self.metadata["task_name"], self.metadata["status"]


def _checked(kind: Any, check: Callable[..., Any], *arguments: Any) -> Any:
    """Return the type of values that a function checks."""
    return Annotated[kind, AfterValidator(lambda value: check(value, *arguments))]


_Count = Annotated[int, Field(ge=0, lt=2**31)]
#: The metadata of a group in a file: its type, its default (... if it needs one), and its type in Arrow.
METADATA: Final[dict[str, tuple[Any, Any, str]]] = {
    "uid": (int, None, "int64"),
    "task_name": (_checked(str, checks.check_task_name), ..., "string"),
    "status": (Annotated[Status, Field(strict=False)], ..., "string"),
    "staleness": (_checked(int, checks.check_staleness), 0, "int64"),
    "priority": (_checked(FiniteFloat, checks.check_priority), 1.0, "float64"),
    "times_sampled": (_Count, 0, "int64"),
    "created_at": (FiniteFloat, Field(default_factory=time.time), "float64"),
    "reward": (Any, None, "float64"),
    "tags": (_checked(dict[str, Any], checks.check_tags) | None, None, JSON),
    "key": (_checked(str, checks.check_key) | None, None, "string"),
    "error": (_checked(str, checks.check_storable, "error") | None, None, "string"),
    "deliveries": (_Count, 0, "int64"),
    "worker": (_checked(str, check_worker) | None, None, "string"),
    "trained_step": (_checked(int, checks.check_step, "trained_step") | None, None, "int64"),
}
_FIELDS: Final[dict[str, Any]] = {name: (kind, default) for name, (kind, default, _) in METADATA.items()}
_Metadata: Final = create_model("_Metadata", __config__=ConfigDict(strict=True), **_FIELDS)


def metadata_of(place: str, values: Row, prefix: str = "") -> Row:
    """Return the metadata of a group as every store accepts it, with defaults for what the values lack.

    Raises FileError, which names the field with its prefix in the file.
    """
    try:
        metadata = dict(_Metadata.model_validate(values))
    except ValidationError as error:
        detail = error.errors()[0]
        if detail["type"] == "value_error":
            raise FileError(f"{place}: {detail['ctx']['error']}") from error
        name = ".".join(map(str, detail["loc"]))
        raise FileError(f"{place}: {prefix}{name} is {detail['input']!r:.60}: {detail['msg']}") from error
    del metadata["uid"], metadata["reward"]
    return metadata


def rows_of(item: StorageItem, rollouts: Sequence[Mapping[Any, Any]], payload: bytes | None) -> list[Row]:
    """Return the rows of a group, whose rollouts are given as dicts; of an exact export with its payload."""
    metadata: Row = {PREFIX + name: getattr(item, name) for name in METADATA} | {f"{PREFIX}status": str(item.status)}
    exact: Row = {} if payload is None else {PAYLOAD: payload}
    rows = []
    for index, rollout in enumerate(rollouts):
        place = {f"{PREFIX}index": index, f"{PREFIX}size": len(rollouts)}
        if (segments := item.segments) is not None:
            number, lengths = segments.rollouts[index], segments.lengths
            values: list[Any] = [number, segments.parents[index], lengths and lengths[number]]
            place |= zip(_SEGMENT_COLUMNS, values, strict=True)
        rows.append({**metadata, **exact, **place, **_fields(rollout)})
        exact = {}  # of the whole group: once
    return rows


def _segments(place: str, rows: Sequence[Row]) -> Segments | None:
    """Return how the rows of a group belong together, if they are segments. Raises FileError."""
    rollouts, parents, lengths = ([row.get(name) for row in rows] for name in _SEGMENT_COLUMNS)
    if rollouts[0] is None:
        return None
    firsts = [index for index, rollout in enumerate(rollouts) if index == 0 or rollout != rollouts[index - 1]]
    try:
        return Segments(parents, None if lengths[0] is None else [lengths[index] or 0 for index in firsts])
    except (TypeError, ValueError) as error:
        raise FileError(f"{place}: its segments don't belong together: {error}") from error


def _fields(rollout: Mapping[Any, Any]) -> Row:
    """Return the fields of a rollout; those that would be taken for metadata are in `group.more`."""
    fields = {name: value for name, value in rollout.items() if type(name) is str and not name.startswith(PREFIX)}
    if len(fields) < len(rollout):
        fields[MORE] = {str(name): value for name, value in rollout.items() if name not in fields}
    return fields


def is_ours(row: Row) -> bool:
    """Return whether a row is from an export of replaybuf."""
    return f"{PREFIX}uid" in row


def groups_of(rows: Iterable[Placed]) -> Iterator[FileGroup]:
    """Yield the groups of the rows of an export. FileError names the invalid row and field."""
    group: FileGroup | None = None
    size, members = 0, list[Row]()
    for place, row in rows:
        if group is None:
            (group, size), members = _begin(place, row), []
        elif (row.get("group.index"), row.get("group.size")) != (len(group.rollouts), size):
            raise FileError(
                f"{place}: group.index is {row.get('group.index')!r:.60} of {row.get('group.size')!r:.60}, expected "
                f"{len(group.rollouts)} of {size}: rows are missing, or not in their order"
            )
        group.rollouts.append(_rollout(place, row) if group.payload is None else {})
        members.append(row)
        if len(group.rollouts) == size:
            group.segments = _segments(group.place, members)
            yield group
            group = None
    if group is not None:
        raise FileError(
            f"the file ends within a group: {group.place} begins one of {size} rollouts, and {len(group.rollouts)} are "
            "there"
        )


def _begin(place: str, row: Row) -> tuple[FileGroup, int]:
    """Return the group that begins with a row, without its rollouts, and how many it has."""
    size, index = row.get("group.size"), row.get("group.index")
    if index != 0 or type(size) is not int or size < 1:
        raise FileError(
            f"{place}: group.index is {index!r:.60} and group.size {size!r:.60} where a group begins: rows are "
            "missing, or not in their order"
        )
    metadata = metadata_of(place, {name: row.get(PREFIX + name) for name in METADATA}, PREFIX)
    return FileGroup(place, metadata, [], _payload(place, row.get(PAYLOAD))), size


def _payload(place: str, value: Any) -> bytes | None:
    try:
        return base64.b64decode(value, validate=True) if type(value) is str else None if value is None else bytes(value)
    except (binascii.Error, TypeError, ValueError) as error:
        raise FileError(f"{place}: the payload can't be {value!r:.60} ({error!s:.100})") from error


def _rollout(place: str, row: Row) -> dict[Any, Any]:
    """Return the fields of a rollout."""
    rollout = {name: value for name, value in row.items() if not name.startswith(PREFIX)}
    more = row.get(MORE)
    if type(more) not in (dict, type(None)):
        raise FileError(f"{place}: {MORE} is {more!r:.60}; expected an object with fields")
    rollout |= more or {}
    if (status := rollout.get("status")) in list(Status):
        rollout["status"] = Status(status)
    return rollout


def is_number(value: Any) -> bool:
    """Return whether a value is a number in the range of a float."""
    if type(value) is int:
        return abs(value) <= sys.float_info.max
    return type(value) is float and math.isfinite(value)
