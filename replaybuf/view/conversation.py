"""A rollout as people read it: its conversation, its response and its other fields, as texts that may be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replaybuf.common import units
from replaybuf.files.foreign_rows import SYNONYMS

#: Fields that are shown elsewhere, or that aren't informative; and others' names for the prompt and the response.
_SHOWN = {
    *("status", "uid", "seq_staleness", "rollout_id", "message", "response", "reward", "error_msg", "finish_reason"),
    "task_name",
    *SYNONYMS["message"],
    *SYNONYMS["response"],
}
#: Longer lists of numbers (tokens) are shown by their length.
_FEW_NUMBERS = 32


@dataclass(frozen=True, slots=True)
class Text:
    """A text, or its beginning, and the number of its characters."""

    text: str
    length: int

    @classmethod
    def of(cls, value: Any, characters: int | None) -> Text:
        """Return a value as text, at most so many characters of it."""
        text = units.as_text(value, 2 if isinstance(value, dict) else None)
        return cls(text[:characters], len(text))

    @property
    def is_cut(self) -> bool:
        return len(self.text) < self.length


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation; `rest` has its fields besides role and content."""

    role: str
    content: Text
    rest: Text | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages that a rollout began with, its response, its error, and its other fields that aren't empty."""

    messages: list[Message]
    response: Text
    error: Text | None
    fields: dict[str, Text]


def field_of(rollout: Mapping[Any, Any], name: str) -> Any:
    """Return a field of a rollout, by our name for it or another framework's; None if it has none."""
    return next((rollout[one] for one in (name, *SYNONYMS[name]) if units.is_there(rollout.get(one))), None)


def conversation_of(
    rollout: Mapping[Any, Any],
    row: Mapping[str, Any],
    prompt: str | None,
    *,
    characters: int | None = None,
    most: int | None = None,
) -> Conversation:
    """Return a rollout for people, from its decoded payload and its row in the view `rollouts`.

    Texts are cut after so many `characters`, conversations after the `most` messages. Where the rollout's class has
    other names for them, `prompt` and the row's response are shown, which are beginnings.
    """
    message, response = field_of(rollout, "message"), field_of(rollout, "response")
    messages = prompt if message is None else message
    return Conversation(
        [] if messages is None else _messages(messages, characters, most),
        Text.of(row["response"] or "" if response is None else units.joined_parts(response), characters),
        Text.of(row["error_msg"], characters) if row["error_msg"] else None,
        {
            str(name): Text.of(_brief(value), characters)
            for name, value in rollout.items()
            if name not in _SHOWN and units.is_there(value)
        },
    )


def _messages(value: Any, characters: int | None, most: int | None) -> list[Message]:
    messages = value if isinstance(value, list) else [{"role": "prompt", "content": value}]
    return [_message(one, characters) for one in messages[:most]]


def _message(message: Any, characters: int | None) -> Message:
    if not isinstance(message, dict):
        return Message("message", Text.of(message, characters), None)
    content = units.joined_parts(message.get("content"))
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and units.is_there(value)}
    role = units.as_text(message.get("role", "message"))[:100]
    return Message(
        role, Text.of("" if content is None else content, characters), Text.of(rest, characters) if rest else None
    )


def _brief(value: Any) -> Any:
    """Return a value without the numbers of long lists, and without bytes."""
    if isinstance(value, list) and len(value) > _FEW_NUMBERS and isinstance(value[0], int | float):
        return f"{len(value):,} numbers"
    return f"{len(value):,} bytes" if isinstance(value, bytes) else value
