"""Rows of other programs: maps their columns to fields of rollouts, and consecutive rows to groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple

from replaybuf.common.checks import check_task_name, nearest, shown
from replaybuf.common.redact import redact_path
from replaybuf.errors import FileError, InputError
from replaybuf.files.row_format import FileGroup, Placed, Row, is_number, metadata_of
from replaybuf.values.rollouts.rollout import RolloutState, Status, group_status
from replaybuf.values.rollouts.statuses import OUR_STATUSES

#: Other names of our fields, the likeliest first: those of TRL, verl, OpenRLHF, slime and prime-rl.
SYNONYMS: Final[dict[str, tuple[str, ...]]] = {
    "message": ("messages", "prompt", "input", "question", "problem", "query"),
    "response": ("completion", "output", "response_text", "answer_text"),
    "response_ids": ("completion_ids", "output_ids", "output_token_ids"),
    "prompt_ids": ("prompt_token_ids", "input_token_ids"),
    "response_mask": ("completion_mask", "loss_mask", "action_mask"),
    "logprobs": ("old_logprobs", "completion_logprobs", "rollout_log_probs"),
    "reward": ("score", "rewards"),
    "group_id": ("group_index", "prompt_id", "uid_group"),
    "task_name": ("task",),
}
FIELDS: Final = frozenset(RolloutState.model_fields)


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """How foreign rows are read.

    `fields` maps our fields to columns, {"response": "completion"}; other fields have columns of their own names or of
    `SYNONYMS`. Remaining columns go to `extra_fields`, or with `as_they_are` become fields of their names. `task` and
    `status` are for rows that have none. The columns `priority` and, if it has dicts, `tags` belong to the group, as
    does `key`, the column with its key. `names` are the valid names of fields, None for any. Raises InputError.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    task: str | None = None
    status: Status | None = None
    key: str | None = None
    as_they_are: bool = False
    names: frozenset[str] | None = FIELDS

    def __post_init__(self) -> None:
        columns = self.fields.items() if isinstance(self.fields, Mapping) else [(None, None)]
        if not all(type(name) is str for pair in columns for name in pair):
            raise InputError(f'fields must be a dict such as {{"response": "completion"}}, got {shown(self.fields)}')
        if self.names is not None and not self.as_they_are:
            for name in self.fields:
                _check_name(name, self.names)
        if self.task is not None:
            check_task_name(self.task, "as_task")
        if self.key is not None and type(self.key) is not str:
            raise InputError(f"key must be the name of a column, got {shown(self.key)}")


def _check_name(name: str, names: frozenset[str]) -> None:
    """Raise InputError for a name that no field has, because its value would never be read."""
    if name in names:
        return
    similar = next((field_name for field_name, synonyms in SYNONYMS.items() if name in synonyms), nearest(name, names))
    if similar is not None:
        raise InputError(f"{redact_path(name):.60} is no field of rollouts; did you mean {similar}?")
    raise InputError(
        f"{redact_path(name):.60} is no field of rollouts; a mapping is OURS=THEIRS, such as response=completion. "
        "Rollouts that are dicts may have any field (as_they_are=True, --as-they-are)"
    )


def foreign_groups(rows: Iterable[Placed], mapping: ColumnMapping) -> Iterator[FileGroup]:
    """Yield the groups of foreign rows. Consecutive rows with the same group_id are a group.

    Without a group_id, consecutive rows with the same prompt are; a row with a list `rollouts` is a group by itself.
    """
    seen: set[int] = set()
    for identity, members in groupby(_members(rows, mapping), key=lambda member: member.group):
        group = _group(list(members), mapping)
        if identity[0] is not None:
            if (digest := hash(repr(identity))) in seen:
                group.notices.append(_APART)
            seen.add(digest)
        yield group


_APART: Final = "rows whose group_id or prompt earlier ones have, which they don't follow: each run of them is a group"
_UNANSWERED: Final = (
    "groups without a response, which are stored as init, to be generated; if a column has it, --field response=COLUMN "
    "(fields= in Python) names that"
)


class _Member(NamedTuple):
    """A rollout of foreign rows, the metadata of its group, and notices about its row."""

    group: tuple[Literal["prompt", "group_id"] | None, Any, str]
    place: str
    rollout: Row
    metadata: Row
    notices: list[str]


def _members(rows: Iterable[Placed], mapping: ColumnMapping) -> Iterator[_Member]:
    for number, (place, row) in enumerate(rows):
        members = row.pop("rollouts", None)
        if type(members) is not list:
            rollout, metadata, notices = _rollout(place, row, mapping)
            task, identity = rollout["task_name"], rollout.get("group_id")
            if identity is not None:
                yield _Member(("group_id", identity, task), place, rollout, metadata, notices)
                continue
            if not _has_content(rollout.get("message")) and rollout.get("prompt_ids") is None:
                notices.append("rows without a group_id and a prompt: each is a group by itself")
                yield _Member((None, number, task), place, rollout, metadata, notices)
                continue
            notices.append("rows without a group_id: those that follow each other with the same prompt are a group")
            identity = [rollout.get("message"), rollout.get("prompt_ids")]
            yield _Member(("prompt", identity, task), place, rollout, metadata, notices)
        elif not members:
            raise FileError(f"{place}: rollouts is an empty list; expected the rollouts of a group")
        else:
            for index, member in enumerate(members):
                location = f"{place}, rollouts[{index}]"
                if type(member) is not dict:
                    raise FileError(f"{location} is {shown(member)}; expected an object with the fields of a rollout")
                own_fields = {name: value for name, value in member.items() if value is not None or name not in row}
                yield _Member((None, number, ""), location, *_rollout(location, row | own_fields, mapping))


def _group(members: list[_Member], mapping: ColumnMapping) -> FileGroup:
    """Return the group of these members, with the first one's metadata, and its rollouts' status and staleness."""
    _, place, first_rollout, metadata, _ = members[0]
    if type(key := metadata.get("key")) is int:
        metadata["key"] = str(key)
    rollouts = [member.rollout for member in members]
    notices = dict.fromkeys(notice for member in members for notice in member.notices)
    if metadata.pop("guessed") and all(rollout["status"] is Status.INIT for rollout in rollouts):
        notices[_UNANSWERED] = None
    metadata |= {
        "task_name": first_rollout["task_name"],
        "status": mapping.status or group_status(rollout["status"] for rollout in rollouts),
        "staleness": max(int(rollout.get("seq_staleness") or 0) for rollout in rollouts),
    }
    return FileGroup(place, metadata_of(place, metadata), rollouts, notices=list(notices))


def _rollout(place: str, row: Row, mapping: ColumnMapping) -> tuple[Row, Row, list[str]]:
    """Return a rollout with RolloutState's fields, its group's metadata, and notices about the row."""
    row = dict(row)
    rollout: Row = {}
    columns = dict(mapping.fields)  # in the file, of fields with other names
    notices: list[str] = []
    for name, column in mapping.fields.items():
        if column not in row:
            raise FileError(
                f"{place} has no field {redact_path(column)!r:.60} (for {redact_path(name):.60}); it has "
                f"{', '.join(map(str, row)):.200}"
            )
        rollout[name] = row.pop(column)
    places = {"priority": "priority"}
    if mapping.key is not None:  # a column that others call `key` isn't unique: groups would replace each other
        places["key"] = mapping.key
    if isinstance(row.get("tags"), dict | None):
        places["tags"] = "tags"
    metadata = {name: row.pop(column) for name, column in places.items() if column in row}
    if mapping.key is not None and "key" not in metadata:
        raise FileError(f"{place} has no field {redact_path(mapping.key)!r:.60}, which was to be its key")
    for name in [name for name in row if name in FIELDS and name not in rollout]:
        rollout[name] = row.pop(name)
    for name, synonyms in SYNONYMS.items():
        match = next((synonym for synonym in synonyms if synonym in row and rollout.get(name) is None), None)
        if match is not None:
            rollout[name], columns[name] = row.pop(match), match
    _take_conversation(place, rollout, row, columns)
    if row and mapping.as_they_are:
        rollout |= row
    elif row:
        if type(extra := rollout.get("extra_fields") or {}) is not dict:
            raise FileError(f"{place}: extra_fields is {shown(extra)}; expected an object")
        rollout["extra_fields"] = {**extra, **row}
        notices.append(
            f"fields that rollouts don't have, kept in extra_fields: {', '.join(sorted(map(str, row))):.200}"
        )
    metadata["guessed"] = mapping.status is None and rollout.get("status") is None
    _check(place, rollout, mapping, columns, notices)
    return rollout, metadata, notices


#: Where a response that came as messages is kept, among the columns that rollouts don't have.
MESSAGES: Final = "response_messages"


def _take_conversation(place: str, rollout: Row, row: Row, columns: Mapping[str, str]) -> None:
    """Replace a response of messages, or of an API's object, by the last assistant's text; keep it in the row, too."""
    answer = messages = rollout.get("response")
    if type(messages) is dict:
        choices = messages.get("choices")
        if type(choices) is list:  # of a chat completion; else of OpenAI's responses, or a message by itself
            messages = [choice.get("message") for choice in choices if type(choice) is dict]
        else:
            messages = messages.get("output", [messages])
    if type(messages) is not list:
        return
    texts = [_text_of(message) for message in messages if type(message) is dict and message.get("role") == "assistant"]
    if not texts:
        name = columns.get("response", "response")
        raise FileError(f"{place}: {name} is {shown(answer)}; expected a text, or messages, one of them an assistant's")
    rollout["response"] = texts[-1]
    row[MESSAGES] = answer


def _text_of(message: Row) -> str:
    """Return the text of a message, whose content may be a list of parts; "" if it has none, as a call of a tool."""
    content = message.get("content")
    parts = content if type(content) is list else [content]
    texts = [part.get("text") if type(part) is dict else part for part in parts]
    return "".join(text for text in texts if type(text) is str)


def _has_content(prompt: Any) -> bool:
    """Return whether a prompt has any content."""
    return any(message.get("content") for message in prompt or ()) if type(prompt) is list else bool(prompt)


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
    "response": (lambda value: type(value) is str, "a text, or messages"),
    "reward": (
        lambda value: type(value) in (dict, bool) or is_number(value),
        "a finite number, or an object with the score",
    ),
    "seq_staleness": (lambda value: type(value) is int, "a whole number"),
}


def _check(place: str, rollout: Row, mapping: ColumnMapping, columns: Mapping[str, str], notices: list[str]) -> None:
    """Convert a rollout's fields to the types that other features expect. Raises FileError."""

    if type(message := rollout.get("message")) is str:
        rollout["message"] = [{"role": "user", "content": message}]
    elif message is None:
        rollout["message"] = []
        notices.append("rollouts without a prompt: message is []")
    for name, (is_right, expected) in _EXPECTED.items():
        if rollout.get(name) is not None and not is_right(rollout[name]):
            column = columns.get(name, name)
            label = name if column == name else f"{redact_path(column):.60} (read as {name})"
            raise FileError(f"{place}: {label} is {rollout[name]!r:.60}; expected {expected}")
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
        has_response = rollout.get("response") is not None or rollout.get("response_ids") is not None
        return Status.COMPLETED if has_response else Status.INIT
    status = OUR_STATUSES.get(value) if isinstance(value, str) else None
    if status is None:
        raise FileError(
            f"{place}: status is {shown(value)}; expected one of {', '.join(Status)} (or give all one: as_status=, "
            "--as-status)"
        )
    return status
