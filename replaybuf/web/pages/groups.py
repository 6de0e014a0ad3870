"""Groups: a query, a task, a status and an order, page by page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from replaybuf import units
from replaybuf.buffer.metrics import of_tasks
from replaybuf.errors import InputError, QueryError
from replaybuf.query import FIELDS, LogicNode, Node, parse, span_of
from replaybuf.query.parse import read_value
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.policies import OrderTerm, parse_order
from replaybuf.storage.sql.inspection.group_queries import (
    COUNTED,
    Chosen,
    Key,
    newest_groups,
    page_of_groups,
    values_of_groups,
)
from replaybuf.storage.sql.inspection.measures import tallies_of
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.web.ask import Ask, facet_of

_SIZE, _MOST = 50, 500
STATUSES = tuple(map(str, Status))


@dataclass(frozen=True, slots=True)
class Marked:
    """A text in three parts, the middle one of which is wrong, and why."""

    before: str
    wrong: str
    after: str
    reason: str

    @classmethod
    def at(cls, text: str, span: tuple[int, int], reason: str) -> Marked:
        """Return the text with what is wrong from one place to another."""
        start, end = span
        return cls(text[:start], text[start:end], text[end:], reason)


def read_groups(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return a page of groups; for a query that isn't one, no groups but what is wrong with it, and where."""
    task, status = ask.text("task"), ask.text("status")
    if status is not None and status not in STATUSES:
        raise InputError(f"status must be one of {', '.join(STATUSES)}, not {status!r:.100}")
    size = ask.number("size", _SIZE, least=1, most=_MOST) or _SIZE
    where = ask.text("where") or ""
    of_buffers = tallies_of(tx, ask.text("buffer")).values()
    tasks = [{"task": one, **numbers} for tallies in of_buffers for one, numbers in of_tasks(tallies).items()]
    data: dict[str, Any] = {
        "now": tx.now(),
        "where": where,
        "error": None,
        "rows": [],
        "next": None,
        "tasks": sorted({one["task"] for one in tasks}),
        "statuses": STATUSES,
        "fields": (*FIELDS, "tags.NAME"),
        "total": None if where else _total(tasks, task, status),
        "looked_at": 0,
        "values": {},
    }
    query = _query(where)
    if isinstance(query, Marked):
        return {**data, "error": query}
    order = _order(ask)
    chosen = Chosen(query, order, ask.text("buffer"), task, status)
    after, newest = _after(ask, order), newest_groups(tx, chosen)
    rows, key = page_of_groups(tx, chosen, after, size, newest)
    last = None if key is None else json.dumps([key.value, key.uid])
    values = {name: [*of_name.items()] for name, of_name in values_of_groups(tx, newest).items() if of_name}
    return {**data, "rows": rows, "next": last, "looked_at": len(newest), "values": values}


_PARAMETERS = {"status": "status", "task_name": "task"}
_FACETS = 12


def draw_groups(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return what groups can be chosen by: the status, task, worker and tags of the newest that match."""
    facets = [
        facet_of(name, dict(values), ask, parameter=_PARAMETERS.get(name))
        for name, values in [*data["values"].items()][:_FACETS]
    ]
    newest = "" if data["looked_at"] < COUNTED else f"of the newest {COUNTED:,}"
    return {"facets": facets, "counted": newest or f"of {units.number_of(data['looked_at'], 'group')}"}


def _query(where: str) -> Node | Marked:
    """Return the query, or what is wrong with it, marked in its text."""
    if not where.strip():
        return LogicNode("$and", ())
    try:
        query = json.loads(where)
    except ValueError as error:
        place = min(getattr(error, "pos", 0), len(where))
        return Marked.at(where, (place, place + 1), f"this isn't JSON: {error}")
    except RecursionError:
        return Marked.at(where, (0, 1), "this is nested too deeply")
    if not isinstance(query, dict):
        return Marked.at(where, (0, len(where)), 'a query is a JSON object, such as {"reward": {"$gte": 0.9}}')
    try:
        return parse(query)
    except QueryError as error:
        return Marked.at(where, span_of(where, error.place) or (0, len(where)), str(error))


def _order(ask: Ask) -> OrderTerm:
    try:
        terms = parse_order([ask.text("order") or "-uid"])
    except QueryError as error:
        raise InputError(f"order: {error}") from error
    return terms[0]


def _after(ask: Ask, order: OrderTerm) -> Key | None:
    """Return the key of the group behind which the page begins."""
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


def _total(tasks: list[dict[str, Any]], task: str | None, status: str | None) -> int | None:
    """Return the number of groups of a task and status, from tallies; None where leased ones may be of any status."""
    chosen = [one for one in tasks if task in (None, one["task"])]
    if status is not None:
        return None if any(one["leased"] for one in chosen) else sum(_of_status(one, status) for one in chosen)
    return sum(sum(_of_status(one, status) for status in STATUSES) + int(one["leased"]) for one in chosen)


def _of_status(numbers: dict[str, Any], status: str) -> int:
    return int(numbers["archived"] if status == Status.ARCHIVED else numbers["buffered"].get(status, 0))
