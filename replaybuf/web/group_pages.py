"""Groups by query, task, status and order, with pagination; and one group in full: conversation, tokens, life."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from replaybuf.common import units
from replaybuf.errors import DecodeError, QueryError
from replaybuf.rules.policies import parse_order
from replaybuf.rules.query import FIELDS, query_of
from replaybuf.storage.sql.inspection.group_metadata import describe_group, facts_of, listed, tasks_of, unknown_task
from replaybuf.storage.sql.inspection.group_payloads import decode_payload, read_arrays, read_payload
from replaybuf.storage.sql.inspection.group_queries import list_groups
from replaybuf.storage.sql.inspection.lives import life_of, timeline, why_unknown
from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.values.rollouts.rollout import Status
from replaybuf.view.columns import GROUPS, TIMELINE
from replaybuf.view.conversation import SHADES, conversation_of, field_of, strip
from replaybuf.web.page_tables import SIZE, Ask, NotThereError, table_of

STATUSES = tuple(map(str, Status))
#: The highest number of groups before a page.
_FURTHEST = 10_000_000


def show_groups(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return a page of groups; for an invalid query no groups, but the error and its position."""
    buffer, task, status = ask.text("buffer"), ask.text("task"), ask.text("status")
    first, where = ask.number("after", 0, most=_FURTHEST) or 0, ask.text("where") or ""
    data: dict[str, Any] = {
        "where": where,
        "error": None,
        "tasks": tasks_of(tx, buffer),
        "statuses": STATUSES,
        "nothing": unknown_task(tx, buffer, task) or "no such groups",
    }
    try:
        query, order = query_of(where, task, status), parse_order(ask.text("order") or "-uid")
    except QueryError as error:
        return {**data, "error": str(error)}
    listing = list_groups(tx, buffer, query, order, SIZE + 1, first=first)
    columns = [column for column in GROUPS if listing.several or column.name != "buffer"]
    table = table_of("Groups", listed(listing.rows[:SIZE]), columns, ask, listing.now, usual="-uid", sorts=FIELDS)
    next_first = first + SIZE if len(listing.rows) > SIZE else None
    return {**data, "table": replace(table, first=first, next=next_first)}


# One group

#: Limits on a page: rollouts; and of one, and of all together, the messages, the characters of a text, and the tokens
#: of a response.
CUT_ROLLOUTS = 64
CUT_MESSAGES, CUT_ALL_MESSAGES = 1_000, 5_000
CUT, CUT_ALL = 200_000, 2_000_000
CUT_TOKENS, CUT_ALL_TOKENS = 2_000, 20_000
#: Larger payloads (bytes) aren't read.
_LARGE_BYTES = 50_000_000
#: The timeout of reading arrays that are kept apart: shorter than others wait for their turn to read.
_PLACE_SECONDS = 5.0


def show_group(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return a group with its rollouts and its life; only the life of a removed group. Raises NotThereError."""
    uid, now = ask.number("uid", 0), tx.now()
    assert uid is not None
    by, arrays = ask.text("by"), read_arrays(tx, uid)
    shades = dict.fromkeys([*SHADES, *(name for by_name in arrays.values() for name in by_name)])
    life = life_of(tx, uid)
    if life is None:
        raise NotThereError(f"there is no group {uid}: {why_unknown(tx, uid)}")
    if (buffer := ask.text("buffer")) not in (None, life.buffer):
        raise NotThereError(f"there is no group {uid} in the buffer {buffer!r:.100}")
    group, rows, decoded, problem = _read(tx, uid)
    rollouts = _rollouts(rows, decoded, arrays, by)
    shared = bool(rollouts) and all(rollout["messages"] == rollouts[0]["messages"] for rollout in rollouts)
    strips = [rollout["tokens"] for rollout in rollouts if rollout["tokens"]]
    facts = {} if group is None else facts_of(group, now, units.moment)

    def step_of_draw(row: Any) -> str | None:
        if row["batch"] is None or row["step"] is None:
            return None
        return ask.link(f"/steps/{row['step']}", buffer=life.buffer)

    return {
        "uid": uid,
        "group": group,
        "life": life,
        "problem": problem,
        "prompt": rollouts[0]["messages"] if shared else [],
        "shared": shared,
        "rollouts": rollouts,
        "count": len(rows),
        "facts": [(name, value) for name, value in facts.items() if value and name not in ("status", "error")],
        "events": table_of("Its life", timeline(life), TIMELINE, ask, now, sorts=False, links={"step": step_of_draw}),
        "shades": [name for name in shades if any(name in token_strip.shades for token_strip in strips)],
        "by": next((token_strip.by for token_strip in strips if token_strip.by), ""),
        "legend": dict(pair for token_strip in strips for pair in token_strip.legend),
    }


def _read(
    tx: Transaction, uid: int
) -> tuple[dict[str, Any] | None, list[dict[str, Any]], list[dict[str, Any]], str | None]:
    """Return the metadata of a group and of its rollouts, the rollouts, and why some aren't shown, if so.

    All of them are empty for a removed group.
    """
    described = describe_group(tx, uid)
    if described is None:
        return None, [], [], None
    group, rows = described.group, described.rollouts
    if group["bytes"] > _LARGE_BYTES:
        return group, rows, [], f"This is a group of {units.size(group['bytes'])}: show it by replaybuf show."
    try:
        decoded, problem = decode_payload(uid, read_payload(tx, uid), _PLACE_SECONDS)
    except DecodeError as error:
        return group, rows, [], str(error)
    return group, rows, decoded, problem


def _rollouts(
    rows: list[dict[str, Any]],
    decoded: list[dict[str, Any]],
    arrays: dict[int, dict[str, list[float]]],
    by: str | None,
) -> list[dict[str, Any]]:
    """Return the rollouts for the page, within its limits."""
    shown = max(1, min(len(rows), CUT_ROLLOUTS))
    tokens, characters = min(CUT_TOKENS, CUT_ALL_TOKENS // shown), min(CUT, CUT_ALL // shown)
    messages = min(CUT_MESSAGES, CUT_ALL_MESSAGES // shown)
    rewards = sorted({row["reward"] for row in rows if row["reward"] is not None})
    ranks = {rewards[0]: "worst", rewards[-1]: "best"} if len(rewards) > 1 else {}
    result = []
    for place, row in enumerate(rows[:CUT_ROLLOUTS]):
        rollout = decoded[place] if decoded else {}
        conversation = conversation_of(rollout, row, None, characters=characters, most=messages)
        parts = [None if row["parent"] is None else f"continues {row['parent']}"]
        parts += [units.number_of(row["response_tokens"] or 0, "token"), row["finish_reason"]]
        parts += [None if row["oldest_model_step"] is None else f"weights of step {row['oldest_model_step']}"]
        parts += [f"stale {units.number(row['staleness'])}"]
        parts += [units.annotated(row["annotations"])]
        parts += [None if row["rollout_id"] is None else f"id {row['rollout_id']}"]
        result.append(
            {
                **row,
                "about": ", ".join(filter(None, parts)),
                "rank": ranks.get(row["reward"], ""),
                "messages": conversation.messages,
                "said": conversation,
                "tokens": strip(rollout, field_of(rollout, "response"), by, tokens, arrays.get(place, {})),
            }
        )
    return result
