"""Prompt datasets: JSONL files, and records in the usual chat formats as rollouts to be generated."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from pydantic import ValidationError

from replaybuf.common.checks import check_list, check_path, shown
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
        self.paths = tuple(map(_check_path, check_list(path_list, "paths")))
        if not self.paths:
            raise InputError("the list of JSONL files is empty")
        self._found_lines: list[tuple[Path, int, bytes]] | None = None

    def __len__(self) -> int:
        return len(self._lines())

    def __getitem__(self, number: SupportsIndex) -> dict[str, Any]:
        path, line, text = self._lines()[number]
        try:
            return parsed(text, line)
        except FileError as error:
            raise InputError(f"{path}, {error}") from error

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
    file = check_path(path, "JSONL file")
    if not file.is_file():
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
      turn with a content, otherwise the list of turns;
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
    reward_model = {} if fields.get("reward_model") is None else fields["reward_model"]
    if turns and isinstance(reward_model, dict) and reward_model.get("ground_truth") is None:
        answer = turns[0].get("content") if len(turns) == 1 else None
        fields["reward_model"] = {**reward_model, "ground_truth": turns if answer is None else answer}
    return fields


def _from_prompt(fields: dict[str, Any]) -> dict[str, Any]:
    prompt = fields.pop("prompt", None)
    if prompt is None:
        names = ", ".join(map(repr, fields)) or "no fields"
        raise RolloutError(f"the record has no prompt, only {names}: {_EXPECTED_RECORD}")
    if isinstance(prompt, str):
        fields["message"] = [{"role": "user", "content": prompt}]
    else:
        fields["message"] = _check_messages(prompt, "prompt")
    return fields


def _build(fields: dict[str, Any], accepted: frozenset[str]) -> RolloutState:
    extra = {name: fields.pop(name) for name in [*fields] if name not in accepted}
    given = fields.get("extra_fields") or {}
    if extra and isinstance(given, dict):
        fields["extra_fields"] = {**given, **extra}
    try:
        # Table readers return None for fields that a record lacks.
        return RolloutState(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:5]
        )
        raise RolloutError(f"the record can't be a rollout: {problems}") from error


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
