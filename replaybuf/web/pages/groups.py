"""Groups by query, task, status and order, with pagination; and one group in full: conversation, tokens, life."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from replaybuf.common import units
from replaybuf.errors import DecodeError, InputError, QueryError
from replaybuf.files.foreign_rows import SYNONYMS
from replaybuf.rules.policies import OrderTerm, parse_order
from replaybuf.rules.query import FIELDS
from replaybuf.rules.query.parse import read_value
from replaybuf.storage.sql.inspection.group_metadata import check_buffer, describe_group, facts_of, tasks_of
from replaybuf.storage.sql.inspection.group_payloads import (
    StoredArray,
    arrays_of,
    decode_payload,
    footnotes,
    read_payload,
)
from replaybuf.storage.sql.inspection.group_queries import (
    Chosen,
    Key,
    page_of_groups,
)
from replaybuf.storage.sql.inspection.lives import Life, life_of, nothing_of, timeline
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.values.rollouts.rollout import Status
from replaybuf.view.columns import ARRAYS, columns
from replaybuf.view.queries import read_query
from replaybuf.view.tokens import SHADES, strip
from replaybuf.web.ask import Ask, NotThereError
from replaybuf.web.tables import Listed, table_of

_SIZE, _MOST = 50, 500
STATUSES = tuple(map(str, Status))


def read_groups(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return a page of groups; for an invalid query no groups, but the error and its position."""
    task, status = ask.text("task"), ask.text("status")
    if status is not None and status not in STATUSES:
        raise InputError(f"status must be one of {', '.join(STATUSES)}, not {status!r:.100}")
    size = ask.number("size", _SIZE, least=1, most=_MOST) or _SIZE
    where = ask.text("where") or ""
    check_buffer(tx, ask.text("buffer"))
    data: dict[str, Any] = {
        "where": where,
        "error": None,
        "rows": [],
        "next": None,
        "tasks": tasks_of(tx, ask.text("buffer")),
        "statuses": STATUSES,
        "fields": (*FIELDS, "tags.NAME"),
    }
    try:
        query = read_query(where)
    except QueryError as error:
        return {**data, "error": str(error)}
    order = _order(ask)
    chosen = Chosen(query, order, ask.text("buffer"), task, status)
    rows, key = page_of_groups(tx, chosen, _after(ask, order), size)
    last = None if key is None else json.dumps([key.value, key.uid])
    return {**data, "rows": rows, "next": last}


def draw_groups(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return the table of the groups."""
    rows = [row | {"prompt": row["error"] or row["prompt"]} for row in data["rows"]]
    here = Listed(rows, len(rows), 0, None)
    return {"table": table_of("Groups", rows, _GROUPS, ask, data["now"], usual="-uid", sorts=FIELDS, here=here)}


_GROUPS = [
    *columns(
        "uid", "task_name", "status", "reward", "staleness", "rollouts", "response_tokens", "created_at", "worker"
    ),
    *columns("leased_until", "tags", "prompt"),
]


def _order(ask: Ask) -> OrderTerm:
    try:
        terms = parse_order([ask.text("order") or "-uid"])
    except QueryError as error:
        raise InputError(f"order: {error}") from error
    return terms[0]


def _after(ask: Ask, order: OrderTerm) -> Key | None:
    """Return the key of the last group of the previous page (keyset pagination)."""
    if (given := ask.text("after")) is None:
        return None
    kind = FIELDS[order.field]
    try:
        value, uid = json.loads(given)
        if value is not None:
            value = read_value(value, kind, "after")
        uid = read_value(uid, FIELDS["uid"], "after")
        if not isinstance(uid, int) or (kind.kind == "int" and not isinstance(value, int)):
            raise ValueError("a uid is a whole number")
        return Key(value, uid)
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError("after must be as the link to the next page has it") from error


# One group

#: Limits on a page: rollouts, characters of a text, messages, tokens of a response and of all responses together.
CUT_ROLLOUTS, CUT, CUT_MESSAGES, CUT_TOKENS, CUT_ALL_TOKENS = 64, 20_000, 100, 2_000, 20_000
#: The same limits where everything is requested.
_ALL = (1_000, 20_000_000, 10_000, 100_000, 500_000)
#: Arrays that are listed, unless everything is requested.
CUT_ARRAYS = 200
#: Larger payloads (bytes) are read only when everything is requested.
_LARGE = 50_000_000
_SORTS = ("position", "best", "worst")
#: Fields that the page shows elsewhere, or that aren't informative.
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
    """A message of a conversation; `rest` has its fields besides role and content."""

    role: str
    content: Text
    rest: Text | None


def read_group(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return a group with its rollouts and its life; only the life of a removed group. Raises NotThereError."""
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
    rewards = sorted({one["reward"] for one in rows if one["reward"] is not None})
    ranks = {rewards[0]: "worst", rewards[-1]: "best"} if len(rewards) > 1 else {}
    for one in rollouts:
        one["rank"] = ranks.get(one["reward"], "")
    prompts = [one.pop("messages") for one in rollouts]
    shared = bool(prompts) and all(one == prompts[0] for one in prompts)
    if not shared:
        for one, messages in zip(rollouts, prompts, strict=True):
            one["messages"] = messages
    return {
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
    """Return the metadata of a group and of its rollouts, the rollouts, their arrays, and why some aren't shown, if so.

    All of them are empty for a removed group.
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
    """Limits on a page: rollouts, characters of a text, messages, tokens of a response."""

    rollouts: int
    characters: int
    messages: int
    tokens: int

    @classmethod
    def of(cls, rollouts: int, *, everything: bool) -> _Limits:
        """Return the limits for a group with `rollouts` rollouts."""
        cut = _ALL if everything else (CUT_ROLLOUTS, CUT, CUT_MESSAGES, CUT_TOKENS, CUT_ALL_TOKENS)
        shown, characters, messages, tokens, all_tokens = cut
        return cls(shown, characters, messages, min(tokens, all_tokens // max(1, min(rollouts, shown))))

    def text(self, value: Any) -> Text:
        text = _text(value)
        return Text(text[: self.characters], len(text))


def _rollout(row: Mapping[str, Any], rollout: Mapping[str, Any], by: str | None, limits: _Limits) -> dict[str, Any]:
    """Return a rollout for the page, from its row in the view and its decoded payload."""
    response = _field(rollout, "response")
    tokens = strip(rollout, response, by, limits.tokens)
    fields = {
        name: limits.text(_brief(value))
        for name, value in rollout.items()
        if name not in _TOLD and units.is_there(value)
    }
    others = {name for field in ("message", "response") for name in SYNONYMS[field]}
    about = [f"{units.number(row['response_tokens'])} tokens", row["finish_reason"]]
    about += [None if row["oldest_model_step"] is None else f"weights of step {row['oldest_model_step']}"]
    about += [f"stale {units.number(row['staleness'])}"]
    about += [None if row["rollout_id"] is None else f"id {row['rollout_id']}"]
    return {
        **row,
        "about": ", ".join(filter(None, about)),
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
    """Return a field of a rollout, by our name for it or another framework's."""
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
    """Return a value without the numbers of long lists and arrays, which the page shows as tokens."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"array of {' × '.join(map(str, shape)) or 'one'}, {getattr(value, 'dtype', '')}"
    if isinstance(value, list) and len(value) > 32 and isinstance(value[0], int | float):
        return f"{len(value):,} numbers"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    return value


def _sorted(rows: list[dict[str, Any]], sort: str) -> list[int]:
    """Return the indexes of rollouts in the requested order."""
    if sort == "position":
        return list(range(len(rows)))
    sign = -1 if sort == "best" else 1
    return sorted(range(len(rows)), key=lambda n: (rows[n]["reward"] is None, sign * (rows[n]["reward"] or 0), n))


def draw_group(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return the possible token colourings, the colours' legend, the facts of the group, and its life."""
    strips = [one["tokens"] for one in data["rollouts"] if one["tokens"]]
    shades = [name for name in SHADES if any(name in one.shades for one in strips)]
    facts = {} if data["group"] is None else facts_of(data["group"], data["now"], units.moment)
    arrays = [one for one in data["arrays"] if not one.small]
    shown = arrays if data["everything"] else arrays[:CUT_ARRAYS]
    here = Listed(shown, len(shown), 0, None)
    return {
        "arrays": table_of("Arrays", shown, ARRAYS, ask, data["now"], sorts=False, here=here),
        "array_count": len(arrays),
        "array_notes": footnotes(data["arrays"]),
        "facts": [(name, value) for name, value in facts.items() if value and name not in ("status", "error")],
        "happenings": _happenings(data["life"], ask),
        "shades": shades,
        "by": next((one.by for one in strips if one.by), ""),
        "legend": dict(pair for one in strips for pair in one.legend),
        "sorts": _SORTS,
        "sort": ask.choice("sort", _SORTS),
    }


def _happenings(life: Life, ask: Ask) -> list[tuple[datetime | None, str, str]]:
    """Return the events of a group's life in order: time, text, and the URL of the page with details."""
    found = []
    for row in timeline(life):
        by = f" by {row['worker']}" if row["worker"] else ""
        step = "" if row["step"] is None else f" at step {row['step']}"
        detail = f": {row['detail']}" if row["detail"] else ""
        page = _page_of(row)
        found.append((row["at"], f"{row['what']}{by}{step}{detail}", ask.link(page) if page else ""))
    if life.there is None:
        found.append((None, "it has left the buffer", ""))
    return found


def _page_of(row: Mapping[str, Any]) -> str:
    """Return the path of the page with details of an event in a group's life."""
    if row["batch"] is not None:
        return "" if row["step"] is None else f"/steps/{row['step']}"
    return "" if row["what"] in ("put", "consumed", "came back") else "/events"
