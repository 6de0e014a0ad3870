"""Groups as rows of files, and back: a row a rollout or a row a group, with the group's metadata.

A row of a rollout has the rollout's fields by their names, and the metadata of its group as `group.uid`,
`group.task_name`, ...; `group.index` and `group.size` are its place in the group and the number of its rollouts. A row
of a group has the metadata by their names, and `rollouts`, a list of objects with fields. `$kinds` says of fields what
JSON can't; `$rest` has the fields whose names could be taken for something else.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from replaybuf.checks import Tags
from replaybuf.errors import FileEndsError, FileError
from replaybuf.files.json_values import from_field, from_json, to_field, to_json
from replaybuf.rollouts.rollout import Status
from replaybuf.storage.values import StorageItem

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

    `created_at` is None where the file doesn't have it; `odd` has notices about the group. `guessed` is whether its
    status is a guess, because its rows have none. `by` is the column by which its rows were grouped, "prompt" or
    "group_id"; None for a group that is one row, or one of our exports.
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
    """Return the rows of a group, whose rollouts are given as trees. Values are JSON's, tags, or bytes."""
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
    """Return whether a row of ours is one of a rollout; others are of a group."""
    return f"{PREFIX}uid" in row


def is_ours(row: Row) -> bool:
    """Return whether a row is of an export of ours."""
    return is_of_rollout(row) or (ROLLOUTS in row and {"uid", "task_name", "status", "staleness"} <= row.keys())


def groups_of(rows: Iterable[Placed]) -> Iterator[FileGroup]:
    """Yield the groups of rows that an export of ours has written. FileError says which row and field is wrong.

    FileEndsError when the rows end within a group.
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
        raise FileEndsError(
            f"the file ends within a group: {group.place} begins one of {size} rollouts, and {len(group.rollouts)} are "
            "there"
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
    """Return whether a value is a number that a float can hold."""
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
