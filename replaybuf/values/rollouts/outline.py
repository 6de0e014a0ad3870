"""The outline of a group: the fields of its rollouts visible in SQL, as plain values, written once with the payload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from replaybuf.common.checks import whole
from replaybuf.errors import RolloutError
from replaybuf.values.rollouts.group_fields import GroupFields, RolloutFields, fields_of, length_of
from replaybuf.values.rollouts.rewards import reward_value
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.rollout_type import RolloutType

PREVIEW_CHARS = 200
#: Longer conversations have no `messages` in their outline.
MOST_MESSAGES = 100


class FindText(Protocol):
    """Finds a text in the payload, from an offset on if one is given: its offset and length in bytes, or None."""

    def __call__(self, text: str, since: int | None = None) -> list[int] | None: ...


def outline(
    rollouts: Sequence[Any], kind: RolloutType, find: FindText | None = None, group: GroupFields | None = None
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the outline of a group, one record for each rollout as it was put, and the beginning of its prompt.

    `rewards` and `error_msg` are optional. With `find` there are positions of texts in the payload: `response_at` if
    the response is longer than its preview; for the first rollout also `prompt_at`, likewise, and, if there are several
    messages, `messages` with the role and the position of the text of each. `group` has the fields of the rollouts, if
    they are known.
    """
    group = group or fields_of(rollouts, kind)
    records = [_record(rollout, fields, kind) for rollout, fields in zip(rollouts, group)]
    if not records:
        return records, None
    message = kind.get(rollouts[0], "message")
    prompt = _prompt_text(message, rollouts[0], kind)
    if find is not None:
        _add_places(records, group, message, prompt, find)
    return records, preview(prompt)


def _record(rollout: Any, fields: RolloutFields, kind: RolloutType) -> dict[str, Any]:
    status, reason, response = fields.status, fields.finish_reason, fields.response
    record: dict[str, Any] = {
        "id": _plain_id(fields.rollout_id),
        "status": status._value_ if type(status) is Status else _status(rollout, kind),
        "staleness": int(fields.seq_staleness or 0),
        "prompt_tokens": length_of(fields.prompt_ids),
        "response_tokens": length_of(fields.response_ids),
        "finish_reason": None if reason is None else preview(reason),
        "response": None if response is None else preview(response),
    }
    if isinstance(fields.reward, dict) and (parts := reward_parts(fields.reward)):
        record["rewards"] = parts
    if fields.error_msg is not None and (error := preview(fields.error_msg)):
        record["error_msg"] = error
    return record


def _add_places(records: list[dict[str, Any]], group: GroupFields, message: Any, prompt: Any, find: FindText) -> None:
    if isinstance(message, (list, tuple)) and 1 < len(message) <= MOST_MESSAGES:
        records[0]["messages"] = _messages(message, find)
    if isinstance(prompt, str) and len(prompt) > PREVIEW_CHARS and (place := find(prompt)):
        records[0]["prompt_at"] = place
    for fields, record in zip(group, records):
        shown = record["response"]
        if shown and len(shown) > PREVIEW_CHARS and (place := find(fields.response)):
            record["response_at"] = place


def _messages(messages: Sequence[Any], find: FindText) -> list[list[Any]]:
    """Return the role of each message, with the offset and the length of its content if that is a string."""
    described: list[list[Any]] = []
    since = 0
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, message)
        if isinstance(content, str) and (place := find(content, since)):
            since = place[0] + place[1]
            described.append([preview(role), *place])
        else:
            described.append([preview(role)])
    return described


def reward_parts(reward: Any) -> dict[str, float | str]:
    """Return the numeric and text parts of a dict reward, texts as previews."""
    parts: dict[str, float | str] = {}
    for name, part in reward.items() if isinstance(reward, dict) else ():
        value = preview(part) if isinstance(part, str) else None if isinstance(part, dict) else reward_value(part)
        if value is not None and (text := preview(name)) is not None:
            parts[text] = value
    return parts


def _prompt_text(message: Any, rollout: Any, kind: RolloutType) -> Any:
    """Return the text of the last message, the message itself if it is a string, or else the rollout's prompt."""
    if not isinstance(message, (list, tuple)) or not message:
        return message if isinstance(message, str) else kind.get(rollout, "prompt")
    last = message[-1]
    content = last.get("content") if isinstance(last, dict) else last
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content


def preview(text: Any) -> str | None:
    """Return a text, or its beginning and "…", without NUL and lone surrogates, which databases can't store."""
    if not isinstance(text, str):
        return None
    short = text if len(text) <= PREVIEW_CHARS else text[:PREVIEW_CHARS] + "…"
    if short.isascii() and "\x00" not in short:
        return short
    return short.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def _status(rollout: Any, kind: RolloutType) -> str | None:
    try:
        return str(kind.status(rollout))
    except RolloutError:  # a payload read without the config that maps its statuses
        return None


def _plain_id(value: Any) -> int | str | None:
    if value is None or (isinstance(value, int) and abs(value) < 2**53):
        return value if value is None else int(value)
    if isinstance(value, int):
        whole(value)  # refuses one that is too long for a text
    return preview(str(value))
