"""Groups as rows of files, and back: a row is a rollout or a group, with the group's metadata.

A row of a rollout has the rollout's fields by their names, and the metadata of its group as `group.uid`,
`group.task_name`, ...; `group.index` and `group.size` are its place in the group and the number of its rollouts. A row
of a group has the metadata by their names, and `rollouts`, a list of objects with fields. `$rest` has the fields with
ambiguous names.

JSON values are written unchanged, all others with a tag: an object of one entry whose name begins with "$":
`{"$tuple": [1, 2]}`, `{"$bytes": "aGk="}`, `{"$ndarray": ["<f4", [2, 3], "..."]}`. Its content is that of the extension
type of this name in payloads (`codec.extension_types`), bytes in base64. A field of a rollout that is a one-dimensional
array or tensor of numbers is a plain list; its *kind* ("array:<i4", "tensor:bfloat16:0", "status") is in `$kinds`
beside the fields, and names the type of the list.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from replaybuf.checks import Tags
from replaybuf.codec.extension_types import TAG_NAMES, TaggedValue
from replaybuf.codec.numpy_arrays import array_of, describe_dtype
from replaybuf.codec.torch_tensors import StoredTensor
from replaybuf.errors import FileError
from replaybuf.rollouts.rollout import Status
from replaybuf.storage.values import StorageItem

_NUMBERS: Final = {name: number for number, name in TAG_NAMES.items()}
_PLAIN: Final = frozenset({type(None), bool, int, str})
_SMALL: Final = _PLAIN | {float}
_ROW: Final = re.compile(r"[<|]([iu][1248]|f[248]|b1)")
_KINDS: Final[dict[str, set[type]]] = {"i": {int}, "u": {int}, "f": {int, float}, "b": {bool}}
#: The dtypes of one-dimensional tensors that are written as lists, with numpy's dtype for their values.
_TENSORS: Final = {
    **{name: np.dtype(name).str for name in ("int8", "int16", "int32", "int64", "uint8", "float16", "float32")},
    **{name: np.dtype(name).str for name in ("float64", "bool")},
    "bfloat16": "<f4",
}


def to_json(value: Any) -> Any:
    """Return a value of a tree as JSON values and tags. RecursionError when it is nested too deeply."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": _odd_float(value)}
    if kind is list:
        kinds = set(map(type, value))
        if kinds <= _PLAIN or (kinds <= _SMALL and all(math.isfinite(one) for one in value if type(one) is float)):
            return value
        return list(map(to_json, value))
    if kind is dict:
        if all(type(name) is str and not name.startswith("$") for name in value):
            return {name: to_json(item) for name, item in value.items()}
        return {"$dict": [[to_json(name), to_json(item)] for name, item in value.items()]}
    if kind is bytes:
        return {"$bytes": _to_text(value)}
    if kind is TaggedValue:
        return {f"${TAG_NAMES[value.code]}": to_json(value.content)}
    if kind is Status:
        return {"$status": value.value}
    if isinstance(value, np.ndarray):
        return {"$ndarray": [describe_dtype(value.dtype), list(value.shape), _to_text(value.tobytes())]}
    if kind is StoredTensor:
        name, shape, items, flags = value.content
        return {"$tensor": [name, shape, _to_text(items.tobytes()), flags]}
    raise TypeError(f"a {kind.__qualname__} in a tree")


def from_json(value: Any) -> Any:
    """Return the value of a tree for the output of `to_json`. ValueError for an invalid tag."""
    if type(value) is list:
        return value if set(map(type, value)) <= _SMALL else list(map(from_json, value))
    if type(value) is not dict:
        return value
    if len(value) == 1:
        [(name, content)] = value.items()
        if name.startswith("$"):
            return _untagged(name[1:], content)
    return {name: from_json(item) for name, item in value.items()}


def _untagged(name: str, content: Any) -> Any:
    if name in _NUMBERS:
        return TaggedValue(_NUMBERS[name], from_json(content))
    build_it = _BUILT.get(name)
    if build_it is None:
        raise ValueError(f"there is no tag {'$' + name!r:.60}")
    try:
        return build_it(content)
    except (TypeError, ValueError, KeyError, struct.error) as error:
        raise ValueError(f"a {'$' + name} can't be {content!r:.60} ({error!s:.100})") from error


def _build_array(content: Any) -> Any:
    description, shape, text = content
    return array_of(description, shape, _to_bytes(text))


def _build_tensor(content: Any) -> StoredTensor:
    name, shape, text, flags = content
    return StoredTensor([name, shape, _to_bytes(text), flags])


def _build_float(content: Any) -> float:
    number = float(content) if content in _ODD else struct.unpack(">d", bytes.fromhex(content))[0]
    return float(number)


_BUILT: Final[dict[str, Callable[[Any], Any]]] = {
    "dict": lambda pairs: {from_json(name): from_json(item) for name, item in pairs},
    "bytes": lambda text: _to_bytes(text),
    "ndarray": _build_array,
    "tensor": _build_tensor,
    "status": Status,
    "float": _build_float,
}

_ODD: Final = ("nan", "inf", "-inf")


def _odd_float(value: float) -> str:
    """Return a number that JSON lacks as a text; a NaN other than the usual one as its bits."""
    bits = struct.pack(">d", value).hex()
    return next((name for name in _ODD if struct.pack(">d", float(name)).hex() == bits), bits)


def _to_text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _to_bytes(text: Any) -> bytes:
    if type(text) is not str:
        raise ValueError("no base64")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error


# Fields of rollouts


def to_field(value: Any) -> tuple[Any, str | None]:
    """Return a field's value for a row, as JSON values, tags or bytes, and its kind if there is more to know."""
    if type(value) is bytes:
        return value, None
    if type(value) is Status:
        return value.value, "status"
    if isinstance(value, np.ndarray) and value.ndim == 1 and _ROW.fullmatch(value.dtype.str) and _finite(value):
        return value.tolist(), f"array:{value.dtype.str}"
    if type(value) is StoredTensor:
        name, shape, _, flags = value.content
        if len(shape) == 1 and name in _TENSORS and _finite(numbers := value.numpy()):
            return numbers.tolist(), f"tensor:{name}:{flags}"
    return to_json(value), None


def from_field(value: Any, kind: str | None) -> Any:
    """Return a field's value as a tree. ValueError when the value isn't of this kind."""
    if kind is None:
        return value if type(value) is bytes else from_json(value)
    name, _, rest = kind.partition(":")
    if name == "status":
        return Status(value)
    if name == "array":
        return _row(value, rest)
    dtype, _, flags = rest.partition(":")
    if name != "tensor" or dtype not in _TENSORS or flags not in ("0", "1", "2", "3"):
        raise ValueError(f"there is no kind of value {kind!r:.60}")
    numbers = _row(value, _TENSORS[dtype])
    if dtype == "bfloat16":
        numbers = (numbers.view("<u4") >> 16).astype("<u2")
    return StoredTensor([dtype, [len(numbers)], numbers.tobytes(), int(flags)])


def _row(value: Any, dtype: str) -> Any:
    if not _ROW.fullmatch(dtype):
        raise ValueError(f"there is no dtype {dtype!r:.40} of rows of numbers")
    if type(value) is not list or not set(map(type, value)) <= _KINDS[dtype[1]]:
        raise ValueError(f"expected a list of numbers (dtype {dtype}), got {value!r:.60}")
    try:
        with np.errstate(over="ignore"):
            row = np.array(value, dtype)
    except OverflowError as error:
        raise ValueError(f"{error} (dtype {dtype})") from error
    if not _finite(row):  # rows with other numbers are never written as lists
        raise ValueError(f"a number is too large for the dtype {dtype}: {value!r:.60}")
    return row


def _finite(numbers: Any) -> bool:
    return numbers.dtype.kind != "f" or bool(np.isfinite(numbers).all())


RowsOf = Literal["rollouts", "groups"]
Row = dict[str, Any]
#: A row with its place in the file, for messages: "line 12".
Placed = tuple[str, Row]

PREFIX: Final = "group."
KINDS: Final = "$kinds"
REST: Final = "$rest"
ROLLOUTS: Final = "rollouts"
METADATA: Final = (
    *("uid", "task_name", "status", "staleness", "priority", "times_sampled", "created_at", "reward", "tags", "key"),
    *("error", "deliveries", "worker", "trained_step"),
)


@dataclass(slots=True)
class FileGroup:
    """A group read from a file: its metadata, its rollouts as trees (`TaggedValue`), and its place in the file.

    `created_at` is None where the file doesn't have it; `odd` has notices about the group. `guessed`: its status is a
    guess, because its rows have none. `by` is the column by which its rows were grouped, "prompt" or "group_id"; None
    for a group that is one row, or from an export of replaybuf.
    """

    place: str
    task_name: str
    status: Status
    rollouts: list[dict[Any, Any]]
    staleness: int = 0
    priority: float = 1.0
    times_sampled: int = 0
    created_at: float | None = None
    tags: Tags | None = None
    key: str | None = None
    error: str | None = None
    deliveries: int = 0
    worker: str | None = None
    trained_step: int | None = None
    odd: list[str] = field(default_factory=list)
    guessed: bool = False
    by: Literal["prompt", "group_id"] | None = None


# Writing


def rows_of(item: StorageItem, trees: Sequence[Mapping[Any, Any]], rows: RowsOf) -> list[Row]:
    """Return the rows of a group, whose rollouts are given as trees, with JSON values, tags, or bytes."""
    metadata = {name: getattr(item, name) for name in METADATA}
    metadata["status"] = str(item.status)
    fields = list(map(_fields, trees))
    if rows == "groups":
        return [{**metadata, ROLLOUTS: fields}]
    prefixed = {PREFIX + name: value for name, value in metadata.items()}
    size = len(fields)
    return [{**prefixed, "group.index": index, "group.size": size, **one} for index, one in enumerate(fields)]


def _fields(tree: Mapping[Any, Any]) -> Row:
    row: Row = {}
    kinds: dict[str, str] = {}
    rest: dict[Any, Any] = {}
    for name, value in tree.items():
        if type(name) is not str or name.startswith(("$", PREFIX)):
            rest[name] = value
            continue
        row[name], kind = to_field(value)
        if kind is not None:
            kinds[name] = kind
    if kinds:
        row[KINDS] = kinds
    if rest:
        row[REST] = [[to_json(name), to_json(value)] for name, value in rest.items()]
    return row


# Reading


def is_of_rollout(row: Row) -> bool:
    """Return whether a row of an export is a rollout; otherwise it is a group."""
    return f"{PREFIX}uid" in row


def is_ours(row: Row) -> bool:
    """Return whether a row is from an export of replaybuf."""
    return is_of_rollout(row) or (ROLLOUTS in row and {"uid", "task_name", "status", "staleness"} <= row.keys())


def groups_of(rows: Iterable[Placed]) -> Iterator[FileGroup]:
    """Yield the groups of the rows of an export. FileError names the invalid row and field.

    FileError when the rows end within a group.
    """
    group: FileGroup | None = None
    size = 0
    for place, row in rows:
        if group is None:
            group, size = _begin(place, row)
        else:
            _follow(place, row, len(group.rollouts), size)
        if not is_of_rollout(row):
            group.rollouts = [_tree(f"{place}, rollouts[{n}]", one) for n, one in enumerate(_rollouts(place, row))]
        else:
            group.rollouts.append(_tree(place, {k: v for k, v in row.items() if not k.startswith(PREFIX)}))
        if len(group.rollouts) == size:
            yield group
            group = None
    if group is not None:
        raise FileError(
            f"the file ends within a group: {group.place} begins one of {size} rollouts, and {len(group.rollouts)} are "
            "there",
            reason="ends",
        )


def _begin(place: str, row: Row) -> tuple[FileGroup, int]:
    if is_of_rollout(row):
        values: Row = {name: row.get(PREFIX + name) for name in METADATA}
        size, index, prefix = row.get("group.size"), row.get("group.index"), PREFIX
        if index != 0 or type(size) is not int or size < 1:
            raise FileError(
                f"{place}: group.index is {index!r:.60} and group.size {size!r:.60} where a group begins: rows are "
                "missing, or not in their order"
            )
    else:
        values, prefix = {name: row.get(name) for name in METADATA}, ""
        size = len(_rollouts(place, row))

    def wrong(name: str, expected: str) -> FileError:
        return FileError(f"{place}: {prefix}{name} is {values[name]!r:.60}; expected {expected}")

    for name in ("task_name", "key", "error", "worker"):
        if type(values[name]) is not str and (name == "task_name" or values[name] is not None):
            raise wrong(name, "a text")
    for name in ("staleness", "times_sampled", "deliveries"):
        if type(values[name]) is not int or (values[name] < 0 and name != "staleness"):
            raise wrong(name, "a whole number")
    if type(values["trained_step"]) not in (int, type(None)):
        raise wrong("trained_step", "a whole number")
    for name in ("priority", "created_at"):
        if not is_number(values[name]):
            raise wrong(name, "a number")
    if values["tags"] is not None and type(values["tags"]) is not dict:
        raise wrong("tags", "an object")
    try:
        status = Status(values["status"])
    except ValueError:
        raise wrong("status", f"one of {', '.join(Status)}") from None
    del values["uid"], values["reward"], values["status"]
    return FileGroup(place=place, rollouts=[], status=status, **values), size


def is_number(value: Any) -> bool:
    """Return whether a value is a number in the range of a float."""
    if type(value) is int:
        return abs(value) <= sys.float_info.max
    return type(value) is float and math.isfinite(value)


def _follow(place: str, row: Row, index: int, size: int) -> None:
    if (row.get("group.index"), row.get("group.size")) != (index, size):
        raise FileError(
            f"{place}: group.index is {row.get('group.index')!r:.60} of {row.get('group.size')!r:.60}, expected "
            f"{index} of {size}: rows are missing, or not in their order"
        )


def _rollouts(place: str, row: Row) -> list[Any]:
    rollouts = row.get(ROLLOUTS)
    if type(rollouts) is not list or not rollouts:
        raise FileError(f"{place}: rollouts is {rollouts!r:.60}; expected a list of objects")
    return rollouts


def _tree(place: str, row: Any) -> dict[Any, Any]:
    """Return the fields of a rollout as a tree."""
    if type(row) is not dict:
        raise FileError(f"{place} is {row!r:.60}; expected an object with the fields of a rollout")
    kinds, rest = row.get(KINDS) or {}, row.get(REST) or []
    name = KINDS
    try:
        tree = {}
        unknown = kinds.keys() - row.keys()
        if unknown:
            raise ValueError(f"it names {min(unknown)!r:.60}, which the row lacks")
        for name, value in row.items():
            if name not in (KINDS, REST):
                tree[name] = from_field(value, kinds.get(name))
        name = REST
        for key, value in rest:
            tree[from_json(key)] = from_json(value)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FileError(f"{place}, field {name!r:.60}: {error!s:.200}") from error
    return tree
