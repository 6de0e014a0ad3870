"""Prompt datasets: JSONL files, and records in the usual chat formats as rollouts to be generated."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from pydantic import ValidationError

from replaybuf.common.checks import shown
from replaybuf.errors import FileError, InputError, RolloutError
from replaybuf.files.foreign_rows import FIELDS
from replaybuf.files.sources import numbered_lines, parsed
from replaybuf.values.rollouts.rollout import RolloutState


class JSONLines:
    """The objects in one or more JSONL files, as an indexed dataset of dicts, in the order of the files.

    Blank lines are skipped. The files are read once, at the first use, and their lines are kept in memory (for files
    that are larger than that: `datasets.load_dataset("json", data_files=...)`). May be used by several threads, forked,
    and pickled; a pickled copy reads the files again.

    Raises InputError if a file is missing or can't be read, and for a line that isn't a JSON object in UTF-8, with the
    file and the number of the line.
    """

    def __init__(self, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
        path_list = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        if isinstance(path_list, (bytes, bytearray)) or not isinstance(path_list, Iterable):
            raise InputError(f"expected the path of a JSONL file, or a list of them, got {shown(paths)}")
        self.paths = tuple(map(_check_path, path_list))
        if not self.paths:
            raise InputError("the list of JSONL files is empty")
        self._found_lines: list[tuple[Path, int, bytes]] | None = None

    def __len__(self) -> int:
        return len(self._lines())

    def __getitem__(self, number: SupportsIndex) -> dict[str, Any]:
        lines, at = self._lines(), operator.index(number)
        if not -len(lines) <= at < len(lines):
            raise IndexError(f"there is no item {at}: the files have {len(lines)}")
        path, line, text = lines[at]
        try:
            return parsed(text, line)
        except FileError as error:
            raise InputError(f"{path}, {error}") from error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        return f"JSONLines({', '.join(map(str, self.paths))})"

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_found_lines": None}

    def _lines(self) -> list[tuple[Path, int, bytes]]:
        """Return the lines with their files and numbers.

        There is no lock, which a fork could leave held: concurrent first calls read twice.
        """
        if self._found_lines is None:
            self._found_lines = list(self._read())
        return self._found_lines

    def _read(self) -> Iterator[tuple[Path, int, bytes]]:
        for path in self.paths:
            try:
                yield from ((path, *line) for line in numbered_lines(path))
            except OSError as error:
                raise InputError(f"{path} can't be read: {error.strerror}") from error


def _check_path(path: Any) -> Path:
    try:
        file = Path(path).absolute()  # the reading process may have another working directory
        is_there = file.is_file()
    except (TypeError, ValueError) as error:
        raise InputError(f"expected the path of a JSONL file, got {shown(path)}") from error
    if not is_there:
        raise InputError(f"{file} is a folder; give the file in it" if file.is_dir() else f"there is no file {file}")
    return file


_EXPECTED_RECORD = (
    'understood are {"message": [...]} with the fields of RolloutState, {"messages": [...]} (OpenAI), '
    '{"prompt": [...]} (verl, xtuner), {"prompt": "a text"}, and a RolloutState; for others give make_rollout='
)

#: Fields of generated results. In records of other formats they have other meanings, such as a reference answer.
_GENERATED_FIELDS = frozenset(
    (
        *("tokens", "response", "tool_calls", "response_ids", "logprobs", "routed_experts", "finish_reason"),
        *("response_mask", "response_model_steps", "seq_staleness", "input_ids", "labels", "reward", "status"),
        *("error_msg", "position_ids"),
    )
)


def to_rollout(record: Any) -> RolloutState:
    """Return the rollout to be generated for a record of a dataset; it shares no list or dict with the record.

    A record has one of these forms; if it has several of the three fields that hold messages, the first one counts:

    - `{"message": [...]}`: the fields of RolloutState, all of them taken as they are; or a RolloutState (copied);
    - `{"messages": [...]}`, OpenAI's chat format: assistant turns at the end are the reference answer. They are removed
      from the prompt, and become `reward_model["ground_truth"]` if the record gives none: the content, if it is one
      turn with a content, otherwise the list of turns. Turns with more than the ground truth are kept in
      `extra_fields["reference"]`;
    - `{"prompt": [...]}`, the format of verl and xtuner, as it is (`data_source`, `reward_model`, ...);
    - `{"prompt": "7+5="}`: becomes one message of the user.

    Fields that RolloutState doesn't have go to `extra_fields` under their names (`ability`, `extra_info`, ...). Except
    with `message`, so do its fields for generated results (`response`, `reward`, `status`, ...), which mean other
    things in datasets. Tuples and arrays of objects, as parquet readers give them, become lists; arrays of numbers
    stay.

    Raises RolloutError for anything else, and for messages that aren't dicts with a "role".
    """
    if isinstance(record, RolloutState):
        return record.model_copy(deep=True)
    if not isinstance(record, Mapping):
        raise RolloutError(
            f"expected a record of a prompt, got {type(record).__name__}: {shown(record)}; {_EXPECTED_RECORD}"
        )
    fields = {name: _plain_copy(value) for name, value in record.items()}
    if fields.get("message") is not None:
        accepted = FIELDS
        fields["message"] = _check_messages(fields["message"], "message")
    else:
        accepted = FIELDS - _GENERATED_FIELDS
        fields = _from_messages(fields) if fields.get("messages") is not None else _from_prompt(fields)
    return _build(fields, accepted)


def _from_messages(fields: dict[str, Any]) -> dict[str, Any]:
    messages = _check_messages(fields.pop("messages"), "messages")
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise RolloutError("messages: all of them are the assistant's, and nothing is left to be answered")
    fields["message"], turns = messages[:end], messages[end:]
    return _with_reference(fields, turns) if turns else fields


def _with_reference(fields: dict[str, Any], turns: list[dict[str, Any]]) -> dict[str, Any]:
    reward_model = fields.get("reward_model")
    is_open = reward_model is None or (isinstance(reward_model, dict) and reward_model.get("ground_truth") is None)
    has_content = len(turns) == 1 and turns[0].get("content") is not None
    if is_open:
        fields["reward_model"] = {**(reward_model or {}), "ground_truth": turns[0]["content"] if has_content else turns}
    says_all = is_open and (not has_content or turns[0].keys() == {"role", "content"})
    return fields if says_all else _with_extra(fields, "reference", turns)


def _from_prompt(fields: dict[str, Any]) -> dict[str, Any]:
    prompt = fields.pop("prompt", None)
    if prompt is None:
        raise RolloutError(f"the record has no prompt, only {_field_names(fields)}: {_EXPECTED_RECORD}")
    if isinstance(prompt, str):
        fields["message"] = [{"role": "user", "content": prompt}]
    else:
        fields["message"] = _check_messages(prompt, "prompt")
    return fields


def _build(fields: dict[str, Any], accepted: frozenset[str]) -> RolloutState:
    extra = [name for name in fields if name not in accepted]
    for name in extra:
        fields = _with_extra(fields, name, fields.pop(name))
    try:
        # Table readers return None for fields that a record lacks.
        return RolloutState(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:5]
        )
        raise RolloutError(f"the record can't be a rollout: {problems}") from error


def _with_extra(fields: dict[str, Any], name: Any, value: Any) -> dict[str, Any]:
    extra = fields.get("extra_fields") or {}
    if not isinstance(extra, dict):
        raise RolloutError(f"extra_fields must be a dict, got {type(extra).__name__}: {shown(extra)}")
    if not isinstance(name, str):
        raise RolloutError(f"the names of a record's fields must be texts, got {shown(name)}")
    if name in extra:
        raise RolloutError(
            f"the field {name!r} belongs to extra_fields, which has one of that name; rename one of them"
        )
    return {**fields, "extra_fields": {**extra, name: value}}


def _check_messages(messages: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RolloutError(
            f'{name} must be a list of messages, such as [{{"role": "user", "content": "7+5="}}], got '
            f"{type(messages).__name__}: {shown(messages)}"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RolloutError(
                f'{name}[{number}] is {shown(message)}: a message is a dict with a "role", which is a text'
            )
    return messages


def _plain_copy(value: Any) -> Any:
    """Return a copy with dicts and lists in place of table readers' types."""
    if isinstance(value, Mapping):
        return {name: _plain_copy(item) for name, item in value.items()}
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        return _plain_copy(value.item()) if isinstance(value, np.ndarray) else value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "OU":
        return [_plain_copy(item) for item in value.tolist()]
    if type(value) in (list, tuple):
        return [_plain_copy(item) for item in value]
    return value


def _field_names(fields: dict[Any, Any]) -> str:
    return ", ".join(map(repr, list(fields)[:10])) + (", ..." if len(fields) > 10 else "") if fields else "no fields"
