"""The outline of a group: what people ask of its rollouts in SQL, as plain values, written once with the payload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from replaybuf.errors import RolloutError
from replaybuf.rollouts.marks import reward_value
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.rollout_type import RolloutType

PREVIEW_CHARS = 200


def outline(rollouts: Sequence[Any], kind: RolloutType) -> list[dict[str, Any]]:
    """Return the outline of a group: one record for each rollout, as it was put.

    `rewards` and `error_msg` are in it where there are any.
    """
    read = kind.reader(_FIELDS)
    return [_record(rollout, kind, *read(rollout)) for rollout in rollouts]


_FIELDS: Final = (
    *("status", "rollout_id", "seq_staleness", "prompt_ids", "response_ids"),
    *("finish_reason", "response", "reward", "error_msg"),
)


def _record(
    rollout: Any,
    kind: RolloutType,
    status: Any,
    rollout_id: Any,
    seq_staleness: Any,
    prompt_ids: Any,
    response_ids: Any,
    finish_reason: Any,
    response: Any,
    reward: Any,
    error_msg: Any,
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": _plain_id(rollout_id),
        "status": status._value_ if type(status) is Status else _status(rollout, kind),
        "staleness": int(seq_staleness or 0),
        "prompt_tokens": _length(prompt_ids),
        "response_tokens": _length(response_ids),
        "finish_reason": preview(finish_reason),
        "response": preview(response),
    }
    if isinstance(reward, dict) and (parts := reward_parts(reward)):
        record["rewards"] = parts
    if error := preview(error_msg):
        record["error_msg"] = error
    return record


def reward_parts(reward: Any) -> dict[str, float | str]:
    """Return the parts of a dict reward that are numbers or texts; of the texts, the beginning."""
    parts: dict[str, float | str] = {}
    for name, part in reward.items() if isinstance(reward, dict) else ():
        value = preview(part) if isinstance(part, str) else None if isinstance(part, dict) else reward_value(part)
        if value is not None and (named := preview(name)) is not None:
            parts[named] = value
    return parts


def prompt_preview(rollouts: Sequence[Any], kind: RolloutType) -> str | None:
    """Return the beginning of the last message of the prompt, or None."""
    message = kind.get(rollouts[0], "message")
    if not isinstance(message, (list, tuple)) or not message:
        return preview(message if isinstance(message, str) else kind.get(rollouts[0], "prompt"))
    last = message[-1]
    content = last.get("content") if isinstance(last, dict) else last
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return preview(content)


def preview(text: Any) -> str | None:
    """Return a text, or its beginning and "…", in a form that both databases can hold: no NUL, no lone surrogates."""
    if not isinstance(text, str):
        return None
    short = text if len(text) <= PREVIEW_CHARS else text[:PREVIEW_CHARS] + "…"
    if short.isascii() and "\x00" not in short:
        return short
    return short.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def _status(rollout: Any, kind: RolloutType) -> str | None:
    try:
        return str(kind.status(rollout))
    except RolloutError:  # of a payload that is read without the config that says what its statuses mean
        return None


def _length(values: Any) -> int:
    if values is None:
        return 0
    try:
        return len(values)
    except (TypeError, OverflowError):  # no tokens: an array without dimensions, or a range beyond all memory
        return 0


def _plain_id(value: Any) -> int | str | None:
    if value is None or (isinstance(value, int) and abs(value) < 2**53):
        return value if value is None else int(value)
    return preview(str(value))
