"""Rows of other programs: maps their columns to fields of rollouts, and consecutive rows to groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, NamedTuple

from replaybuf.common.checks import check_task_name, shown
from replaybuf.common.redact import redact_path
from replaybuf.errors import FileError, InputError
from replaybuf.files.row_format import FileGroup, Placed, Row, is_number, metadata_of
from replaybuf.values.rollouts.rollout import RolloutState, Status, group_status
from replaybuf.values.rollouts.statuses import OUR_STATUSES

FIELDS: Final = frozenset(RolloutState.model_fields)


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """How foreign rows are read.

    `fields` maps our fields to columns, {"response": "completion"}; other fields have columns of their own names.
    `names` are the names of fields: remaining columns go to `extra_fields`. With None, for rollouts that are dicts,
    they become fields. `task` is for rows that have none, `status` for all. The columns `priority` and, if it has
    dicts, `tags` belong to the group. Raises InputError.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    task: str | None = None
    status: Status | None = None
    names: frozenset[str] | None = FIELDS

    def __post_init__(self) -> None:
        columns = self.fields.items() if isinstance(self.fields, Mapping) else [(None, None)]
        if not all(type(name) is str for pair in columns for name in pair):
            raise InputError(f'fields must be a dict such as {{"response": "completion"}}, got {shown(self.fields)}')
        for name in self.fields:
            if self.names is not None and name not in self.names:
                raise InputError(
                    f"{redact_path(name):.60} is no field of rollouts; a mapping is OURS=THEIRS, such as "
                    "response=completion"
                )
        if self.task is not None:
            check_task_name(self.task, "as_task")


def foreign_groups(rows: Iterable[Placed], mapping: ColumnMapping) -> Iterator[FileGroup]:
    """Yield the groups of foreign rows. Consecutive rows with the same group_id are a group.

    Without a group_id, consecutive rows with the same prompt are; a row with a list `rollouts` is a group by itself.
    """
    for _, members in groupby(_members(rows, mapping), key=lambda member: member.group):
        yield _group(list(members), mapping)


class _Member(NamedTuple):
    """A rollout of foreign rows, what identifies its group among its neighbours, and the metadata of that."""

    group: tuple[str, Any, Any]
    place: str
    rollout: Row
    metadata: Row


def _members(rows: Iterable[Placed], mapping: ColumnMapping) -> Iterator[_Member]:
    for place, row in rows:
        members = row.pop("rollouts", None)
        if type(members) is not list:
            rollout, metadata = _rollout(place, row, mapping)
            identity = rollout.get("group_id")
            if identity is None:
                identity = (rollout.get("message") or None, rollout.get("prompt_ids"))
            is_known = identity != (None, None)  # rows without a prompt are groups by themselves
            yield _Member((rollout["task_name"], identity, "" if is_known else place), place, rollout, metadata)
        elif not members:
            raise FileError(f"{place}: rollouts is an empty list; expected the rollouts of a group")
        else:
            for index, member in enumerate(members):
                location = f"{place}, rollouts[{index}]"
                if type(member) is not dict:
                    raise FileError(f"{location} is {shown(member)}; expected an object with the fields of a rollout")
                own_fields = {name: value for name, value in member.items() if value is not None or name not in row}
                yield _Member(("", None, place), location, *_rollout(location, row | own_fields, mapping))


def _group(members: list[_Member], mapping: ColumnMapping) -> FileGroup:
    """Return the group of these members, with the first one's metadata, and its rollouts' status and staleness."""
    _, place, first_rollout, metadata = members[0]
    rollouts = [member.rollout for member in members]
    metadata |= {
        "task_name": first_rollout["task_name"],
        "status": mapping.status or group_status(rollout["status"] for rollout in rollouts),
        "staleness": max(int(rollout.get("seq_staleness") or 0) for rollout in rollouts),
    }
    return FileGroup(place, metadata_of(place, metadata), rollouts)


def _rollout(place: str, row: Row, mapping: ColumnMapping) -> tuple[Row, Row]:
    """Return a rollout with the fields of its class, and its group's metadata."""
    row = dict(row)
    rollout: Row = {}
    for name, column in mapping.fields.items():
        if column not in row:
            raise FileError(
                f"{place} has no field {redact_path(column)!r:.60} (for {redact_path(name):.60}); it has "
                f"{', '.join(map(str, row)):.200}"
            )
        rollout[name] = row.pop(column)
    metadata = {"priority": row.pop("priority")} if "priority" in row else {}
    if isinstance(row.get("tags"), dict | None):
        metadata["tags"] = row.pop("tags", None)
    for name in [name for name in row if mapping.names is None or name in mapping.names]:
        if name not in rollout:
            rollout[name] = row.pop(name)
    if row:
        if type(extra := rollout.get("extra_fields") or {}) is not dict:
            raise FileError(f"{place}: extra_fields is {shown(extra)}; expected an object")
        rollout["extra_fields"] = {**extra, **row}
    _check(place, rollout, mapping)
    return rollout, metadata


def _is_list_of(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and set(map(type, value)) <= set(types)


#: The fields whose values are checked, and what is expected of each.
_EXPECTED: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "message": (_is_list_of(dict), "a text, or a list of messages with role and content"),
    **dict.fromkeys(
        ("response_ids", "prompt_ids", "response_mask", "response_model_steps"),
        (_is_list_of(int, bool), "a list of numbers"),
    ),
    "logprobs": (_is_list_of(int, float), "a list of numbers"),
    "response": (lambda value: type(value) is str, "a text"),
    "reward": (
        lambda value: type(value) in (dict, bool) or is_number(value),
        "a finite number, or an object with the score",
    ),
    "seq_staleness": (lambda value: type(value) is int, "a whole number"),
}


def _check(place: str, rollout: Row, mapping: ColumnMapping) -> None:
    """Convert a rollout's fields to the types that other features expect. Raises FileError."""
    message = rollout.get("message")
    if message is None and rollout.get("prompt_ids") is None and mapping.names is not None:
        raise FileError(
            f"{place} has no prompt, nor prompt_ids: say which column has it "
            '(fields={"message": ...}, --field message=)'
        )
    if message is not None or mapping.names is not None:
        message = message or []
        rollout["message"] = [{"role": "user", "content": message}] if type(message) is str else message
    for name, (is_right, expected) in _EXPECTED.items():
        if rollout.get(name) is not None and not is_right(rollout[name]):
            raise FileError(f"{place}: {name} is {rollout[name]!r:.60}; expected {expected}")
    task = rollout.get("task_name") or mapping.task
    if type(task) is not str:
        raise FileError(f"{place} has no task_name: say of which task the rollouts are (as_task=, --as-task NAME)")
    rollout["task_name"] = task
    rollout["status"] = _status(place, rollout, mapping)


def _status(place: str, rollout: Row, mapping: ColumnMapping) -> Status:
    if mapping.status is not None:
        return mapping.status
    value = rollout.get("status")
    if value is None:
        if rollout.get("response") is None and rollout.get("response_ids") is None:
            raise FileError(
                f'{place} has no response: say which column has it (fields={{"response": ...}}, --field response=), or '
                "what the rollouts are (as_status=, --as-status init)"
            )
        return Status.COMPLETED
    status = OUR_STATUSES.get(value) if isinstance(value, str) else None
    if status is None:
        raise FileError(
            f"{place}: status is {shown(value)}; expected one of {', '.join(Status)} (or give all one: as_status=, "
            "--as-status)"
        )
    return status
