"""A group as people read it: the conversation, the responses side by side, their tokens, who made it, its life."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from replaybuf import units
from replaybuf.errors import DecodeError, InputError
from replaybuf.files.foreign_rows import SYNONYMS
from replaybuf.storage.sql.inspection.group_payloads import (
    StoredArray,
    arrays_of,
    decode_payload,
    footnotes,
    read_payload,
)
from replaybuf.storage.sql.inspection.groups import describe_group, facts_of
from replaybuf.storage.sql.inspection.lives import Life, life_of, nothing_of, timeline
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.tokens import SHADES, strip
from replaybuf.web.ask import Ask, NotThereError

#: Rollouts that are shown at once, characters of a text, messages, tokens of a response and of all responses together.
CUT_ROLLOUTS, CUT, CUT_MESSAGES, CUT_TOKENS, CUT_ALL_TOKENS = 64, 20_000, 100, 2_000, 20_000
#: The same where all is asked for.
_MOST = (1_000, 20_000_000, 10_000, 100_000, 500_000)
#: Arrays that are listed, unless all is asked for.
CUT_ARRAYS = 200
#: Payloads above this many bytes are read only when all is asked for.
_LARGE = 50_000_000
_SORTS = ("position", "best", "worst")
#: Fields that the page shows elsewhere, or that say nothing to people.
_TOLD = {
    *("status", "uid", "seq_staleness", "rollout_id", "message", "response", "reward", "error_msg", "finish_reason"),
    *("task_name", "tool_calls"),
}


@dataclass(frozen=True, slots=True)
class Text:
    """A text, or its beginning, and the number of its characters."""

    text: str
    length: int

    @property
    def is_cut(self) -> bool:
        return len(self.text) < self.length


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation; `rest` is what it has besides role and content."""

    role: str
    content: Text
    rest: Text | None


def read_group(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return a group with its rollouts and its life; of one that has left the life. Raises NotThereError."""
    uid = ask.number("uid", 0)
    assert uid is not None
    by, sort = ask.text("by"), ask.choice("sort", _SORTS)
    if by not in (None, *SHADES):
        raise InputError(f"by must be one of {', '.join(SHADES)}, not {by!r:.100}")
    life = life_of(tx, uid)
    if life is None:
        raise NotThereError(f"there is no group {uid}: {nothing_of(tx, uid)}")
    everything = ask.text("all") is not None
    group, rows, decoded, arrays, problem = _read(tx, uid, everything=everything)
    limits = _Limits.of(len(rows), everything=everything)
    order = _sorted(rows, sort)[: limits.rollouts]
    rollouts = [_rollout(rows[place], decoded[place] if decoded else {}, by, limits) for place in order]
    prompts = [one.pop("messages") for one in rollouts]
    shared = bool(prompts) and all(one == prompts[0] for one in prompts)
    if not shared:
        for one, messages in zip(rollouts, prompts, strict=True):
            one["messages"] = messages
    return {
        "now": life.now,
        "uid": uid,
        "group": group,
        "life": life,
        "problem": problem,
        "prompt": prompts[0] if shared else [],
        "rollouts": rollouts,
        "count": len(rows),
        "arrays": arrays,
        "everything": everything,
    }


def _read(
    tx: ReadTransaction, uid: int, *, everything: bool
) -> tuple[dict[str, Any] | None, list[dict[str, Any]], list[dict[str, Any]], list[StoredArray], str | None]:
    """Return the metadata of a group and of its rollouts, the rollouts, their arrays, and why not all can be shown.

    All of it is empty when the group has left.
    """
    found = describe_group(tx, uid)
    if found is None:
        return None, [], [], [], None
    group, rows = found.group, found.rollouts
    if group["bytes"] > _LARGE and not everything:
        return group, rows, [], [], f"This is a group of {units.size(group['bytes'])}: its texts are cut."
    stored = read_payload(tx, uid)
    try:
        decoded, problem = decode_payload(uid, stored)
    except DecodeError as error:
        return group, rows, [], [], str(error).removesuffix(" (without --full its metadata can be shown)")
    return group, rows, decoded, arrays_of(stored), problem


@dataclass(frozen=True, slots=True)
class _Limits:
    """How much is shown: rollouts, characters of a text, messages, tokens of a response."""

    rollouts: int
    characters: int
    messages: int
    tokens: int

    @classmethod
    def of(cls, rollouts: int, *, everything: bool) -> _Limits:
        """Return the limits for a group of so many rollouts."""
        cut = _MOST if everything else (CUT_ROLLOUTS, CUT, CUT_MESSAGES, CUT_TOKENS, CUT_ALL_TOKENS)
        shown, characters, messages, tokens, all_tokens = cut
        return cls(shown, characters, messages, min(tokens, all_tokens // max(1, min(rollouts, shown))))

    def text(self, value: Any) -> Text:
        text = _text(value)
        return Text(text[: self.characters], len(text))


def _rollout(row: Mapping[str, Any], rollout: Mapping[str, Any], by: str | None, limits: _Limits) -> dict[str, Any]:
    """Return what is shown of a rollout: its row in the view, and what its payload has."""
    response = _field(rollout, "response")
    tokens = strip(rollout, response, by, limits.tokens)
    fields = {
        name: limits.text(_brief(value))
        for name, value in rollout.items()
        if name not in _TOLD and units.is_there(value)
    }
    others = {name for field in ("message", "response") for name in SYNONYMS[field]}
    return {
        **row,
        "messages": _messages(_field(rollout, "message"), limits),
        "text": limits.text(row["response"] or "" if response is None else response),
        "tool_calls": limits.text(rollout["tool_calls"]) if units.is_there(rollout.get("tool_calls")) else None,
        "error": limits.text(row["error_msg"]) if row["error_msg"] else None,
        "tokens": tokens,
        "fields": {name: text for name, text in fields.items() if name not in others},
    }


def _text(value: Any) -> str:
    return units.as_text(value, 2 if isinstance(value, dict) else None)


def _field(rollout: Mapping[str, Any], name: str) -> Any:
    """Return a field of a rollout, by our name or that of another framework."""
    return next((rollout[one] for one in (name, *SYNONYMS[name]) if units.is_there(rollout.get(one))), None)


def _messages(value: Any, limits: _Limits) -> list[Message]:
    if value is None:
        return []
    messages = value if isinstance(value, list) else [{"role": "prompt", "content": value}]
    return [_message(one, limits) for one in messages[: limits.messages]]


def _message(message: Any, limits: _Limits) -> Message:
    if not isinstance(message, dict):
        return Message("message", limits.text(message), None)
    content = units.joined_parts(message.get("content"))
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and units.is_there(value)}
    text = limits.text("" if content is None else content)
    return Message(_text(message.get("role", "message"))[:100], text, limits.text(rest) if rest else None)


def _brief(value: Any) -> Any:
    """Return a value without the numbers of long lists and arrays, which are the tokens' and shown as such."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"array of {' × '.join(map(str, shape)) or 'one'}, {getattr(value, 'dtype', '')}"
    if isinstance(value, list) and len(value) > 32 and isinstance(value[0], int | float):
        return f"{len(value):,} numbers"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    return value


def _known(number: int | None) -> str:
    return "" if number is None else str(number)


def _sorted(rows: list[dict[str, Any]], sort: str) -> list[int]:
    """Return the places of rollouts in the order that is asked for."""
    if sort == "position":
        return list(range(len(rows)))
    sign = -1 if sort == "best" else 1
    return sorted(range(len(rows)), key=lambda n: (rows[n]["reward"] is None, sign * (rows[n]["reward"] or 0), n))


def draw_group(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return what tokens can be coloured by, the colours' legend, and the best and worst rewards."""
    strips = [one["tokens"] for one in data["rollouts"] if one["tokens"]]
    shades = [name for name in SHADES if any(name in one.shades for one in strips)]
    rewards = [one["reward"] for one in data["rollouts"] if one["reward"] is not None]
    facts = {} if data["group"] is None else facts_of(data["group"], data["now"], units.moment)
    arrays = [one for one in data["arrays"] if not one.small]
    return {
        "arrays": arrays if data["everything"] else arrays[:CUT_ARRAYS],
        "array_count": len(arrays),
        "array_notes": footnotes(data["arrays"]),
        "facts": [(name, value) for name, value in facts.items() if value and name not in ("status", "error")],
        "happenings": _happenings(data["life"]),
        "shades": shades,
        "by": next((one.by for one in strips if one.by), ""),
        "legend": dict(pair for one in strips for pair in one.legend),
        "spread": (min(rewards), max(rewards)) if rewards and min(rewards) < max(rewards) else None,
        "sorts": _SORTS,
        "sort": ask.choice("sort", _SORTS),
    }


def _happenings(life: Life) -> list[tuple[datetime | None, str, str]]:
    """Return what befell a group, in order: when, what, and the page that has more of it."""
    found = []
    for row in timeline(life):
        by = f" by {row['worker']}" if row["worker"] else ""
        step = "" if row["step"] is None else f" at step {row['step']}"
        detail = f": {row['detail']}" if row["detail"] else ""
        found.append((row["at"], f"{row['what']}{by}{step}{detail}", _page_of(row)))
    if life.there is None:
        found.append((None, "it has left the buffer", ""))
    return found


def _page_of(row: Mapping[str, Any]) -> str:
    """Return the address of the page that has more of what befell a group."""
    if row["batch"] is not None:
        return f"/batches/{row['batch']}" if row["step"] is None else f"/steps/{row['step']}"
    return "" if row["what"] in ("put", "consumed", "came back") else "/events"
