"""A rollout as people read it: its conversation, its response and its other fields, as texts that may be cut; tokens.

Tokens are coloured by log-probability, mask or model step, if the rollout has these. Without its tokenizer, a response
can be split into tokens only if one of its fields has their texts. Otherwise the tokens' ids are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replaybuf.common import units

#: Other frameworks' names of a prompt and a response, the likeliest first.
_SYNONYMS = {
    "message": ("messages", "prompt", "input", "question", "problem", "query"),
    "response": ("completion", "output", "response_text", "answer_text"),
}
#: Fields that are shown elsewhere, or that aren't informative; and others' names for the prompt and the response.
_FIELDS_LEFT_OUT = {
    *("status", "uid", "seq_staleness", "rollout_id", "message", "response", "reward", "error_msg", "finish_reason"),
    "task_name",
    *_SYNONYMS["message"],
    *_SYNONYMS["response"],
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
    return next((rollout[key] for key in (name, *_SYNONYMS[name]) if units.is_there(rollout.get(key))), None)


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
            str(name): Text.of(_brief_value(value), characters)
            for name, value in rollout.items()
            if name not in _FIELDS_LEFT_OUT and units.is_there(value)
        },
    )


def _messages(value: Any, characters: int | None, limit: int | None) -> list[Message]:
    messages = value if isinstance(value, list) else [{"role": "prompt", "content": value}]
    return [_message(message, characters) for message in messages[:limit]]


def _message(message: Any, characters: int | None) -> Message:
    if not isinstance(message, dict):
        return Message("message", Text.of(message, characters), None)
    content = units.joined_parts(message.get("content"))
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and units.is_there(value)}
    role = units.as_text(message.get("role", "message"))[:100]
    return Message(
        role, Text.of("" if content is None else content, characters), Text.of(rest, characters) if rest else None
    )


def _brief_value(value: Any) -> Any:
    """Return a value without the numbers of long lists, and without bytes."""
    if isinstance(value, list) and len(value) > _FEW_NUMBERS and isinstance(value[0], int | float):
        return f"{len(value):,} numbers"
    return f"{len(value):,} bytes" if isinstance(value, bytes) else value


# Tokens

#: The colourings of tokens, in order of preference.
SHADES = ("logprob", "mask", "step")
_FIELDS = {
    "ids": ("response_ids", "completion_ids", "output_ids", "output_token_ids"),
    "logprob": ("logprobs", "old_logprobs", "completion_logprobs", "rollout_log_probs"),
    "mask": ("response_mask", "completion_mask", "loss_mask", "action_mask"),
    "step": ("response_model_steps",),
}
#: Bounds between the shades of log-probabilities: probabilities of some 90, 60, 37, 14, 2 and 0.1 %.
_BOUNDS = (-0.1, -0.5, -1.0, -2.0, -4.0, -7.0)
_STEP_CLASSES = 6


@dataclass(frozen=True, slots=True)
class Token:
    """A token for display: its text or its id, the class of its colour, and its values."""

    text: str
    shade: str
    facts: str


@dataclass(frozen=True, slots=True)
class Strip:
    """The tokens of a response, or the first of them.

    `texts` is true if the tokens' texts are known. `shades` are the colourings with data, `by` is the selected one, and
    `legend` explains its colours.
    """

    tokens: list[Token]
    count: int
    texts: bool
    shades: tuple[str, ...]
    by: str
    legend: tuple[tuple[str, str], ...]


def strip(
    rollout: Mapping[str, Any], response: Any, by: str | None, limit: int, annotations: Mapping[str, list[float]] = {}
) -> Strip | None:
    """Return the tokens of a rollout's response, coloured by one of its shades or annotations; None without ids."""
    values = {name: _number_list(rollout, fields) for name, fields in _FIELDS.items()}
    ids = values.pop("ids")
    values |= annotations  # one that is named as a shade takes its place
    if not ids:
        return None
    # One value for each token of the response; some rollouts also have values for the prompt, before these.
    values = {name: numbers[-len(ids) :] for name, numbers in values.items() if numbers and len(numbers) >= len(ids)}
    shades = tuple(dict.fromkeys(name for name in (*SHADES, *annotations) if name in values))
    chosen = by if by in shades else next(iter(shades), "")
    texts = _token_texts(ids, response, rollout)
    steps = {step: f"step{place % _STEP_CLASSES}" for place, step in enumerate(sorted(set(values.get("step", ()))))}
    low, high = (bound(values.get(chosen) or [0]) for bound in (min, max))
    tokens = [
        Token(
            str(ids[place]) if texts is None else texts[place],
            _shade(chosen, values[chosen][place], steps, low, high) if chosen else "",
            "  ".join([f"token {place}", f"id {ids[place]}", *(f"{n} {values[n][place]:.4g}" for n in shades)]),
        )
        for place in range(min(limit, len(ids)))
    ]
    return Strip(tokens, len(ids), texts is not None, shades, chosen, _legend(chosen, steps))


def _shade(by: str, value: float, steps: Mapping[Any, str], low: float, high: float) -> str:
    if by == "step":
        return steps[value]
    if by == "mask":
        return "mask1" if value else "mask0"
    if by == "logprob":
        return f"lp{sum(value < bound for bound in _BOUNDS)}"
    return f"lp{round(6 * (value - low) / ((high - low) or 1))}"


def _legend(by: str, steps: Mapping[Any, str]) -> tuple[tuple[str, str], ...]:
    if by == "step":
        return tuple((name, f"model step {step:g}") for step, name in steps.items())
    if by == "mask":
        return (("mask1", "trained on"), ("mask0", "masked out"))
    if by == "logprob":
        names = [f"above {_BOUNDS[0]:g}", *(f"to {bound:g}" for bound in _BOUNDS[1:]), f"below {_BOUNDS[-1]:g}"]
        return tuple((f"lp{place}", name) for place, name in enumerate(names))
    return (("lp0", "lowest of the response"), ("lp3", "middle"), ("lp6", "highest")) if by else ()


def _number_list(rollout: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """Return the numbers in the first of these fields with a list or an array of numbers; [] if there is none."""
    for name in names:
        value = rollout.get(name)
        if value is not None and hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, list | tuple) and value and all(type(item) in (int, float, bool) for item in value):
            return list(value)
    return []


def _token_texts(ids: Sequence[Any], response: Any, rollout: Mapping[str, Any]) -> list[str] | None:
    """Return the texts of the tokens, which together are the response; None if unknown."""
    extra = rollout.get("extra_fields")
    for value in (*rollout.values(), *(extra.values() if isinstance(extra, dict) else ())):
        if (
            isinstance(value, list)
            and len(value) == len(ids)
            and all(isinstance(item, str) for item in value)
            and "".join(value) == response
        ):
            return value
    return None
