"""Selecting groups: --where, --task and --status as a query; sentences about groups and the trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer

from replaybuf import units
from replaybuf.errors import QueryError
from replaybuf.query import LogicNode, Node, parse, span_of
from replaybuf.redact import escape, may_hold_password, redact
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.policies import Order, parse_order
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.inspection.groups import tasks_of
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction


def trainer_text(trainer: Mapping[str, Any], of: str = "") -> str:
    """Return a sentence about the published train state (the fields of `TrainState`)."""
    step = "has finished" if trainer["finished"] else f"is at step {trainer['train_step']}"
    return f"the trainer{of} {step}, its newest weights are of step {trainer['model_step']}"


#: Advice for keeping the texts of trained groups.
ARCHIVE = 'archive=1000 in the config of the trainer (groups of each task, or a time such as "7d") keeps them'


def gone_of(tx: ReadTransaction, buffer: str | None, task: str | None) -> str | None:
    """Return a sentence, with advice, if all trained groups are gone with their texts; else None."""
    from replaybuf.storage.sql.inspection.measures import tallies_of

    found = [of_buffer.items() for of_buffer in tallies_of(tx, buffer).values()]
    counts = [(status, name, n) for items in found for (of, status, name), n in items if task in (None, of)]
    taken = sum(n for status, name, n in counts if (status, name) == (Status.COMPLETED, Tally.TAKEN))
    if not taken or any(n for status, name, n in counts if (status, name) == (Status.ARCHIVED, Tally.SIZE)):
        return None
    return f"the texts of all {taken:,} groups that were trained on are gone: {ARCHIVE}"


# Selected by options

_TASKS_NAMED = 10
_CONTEXT = 100


def query_of(where: str | None, task: str | None, status: str | None, *, given_as: str = "--where") -> Node:
    """Return the query of the options. Raises QueryError and usage errors."""
    nodes = [_parse(where, given_as)] if where else []
    if task is not None:
        nodes.append(parse({"task_name": task}))
    if status is not None:
        nodes.append(parse({"status": redact(status)}))
    return LogicNode("$and", tuple(nodes))


def order_of(order_by: list[str] | None) -> Order:
    """Return the order of --order-by. Raises QueryError."""
    return parse_order([redact(term) for term in order_by or ()])


def nothing_in(reader: Reader, buffer: str | None, task: str | None) -> str:
    """Return a sentence for an empty result; it lists the existing tasks if the named one doesn't exist."""
    if task is None:
        return "no such groups"
    tasks = reader.read(lambda tx: tasks_of(tx, buffer))
    if task in tasks or not tasks:
        return "no such groups"
    there_are = "there is the task" if len(tasks) == 1 else "there are the tasks"
    return f"no such groups; {there_are} {units.some(tasks, _TASKS_NAMED)}"


def _parse(where: str, given_as: str) -> Node:
    """Parse a query. Raises QueryError with a note that points at the mistake (`pointed_at`)."""
    query = _read_json(where, given_as)
    try:
        return parse(query)
    except QueryError as error:
        if error.place and (span := span_of(where, error.place)) is not None:
            error.add_note(pointed_at(where, *span))
        raise


def pointed_at(text: str, start: int, end: int) -> str:
    """Return the line of a text that has the span, and a line below that underlines the span.

    A text that may be a URL with a password, in the wrong place, isn't shown.
    """
    from rich.cells import cell_len

    if may_hold_password(text):
        return ""
    before = text.rfind("\n", 0, start) + 1
    after = text.find("\n", start)
    after = len(text) if after < 0 else after
    head, marked, tail = (
        escape(part) for part in (text[before:start], text[start : min(end, after)], text[min(end, after) : after])
    )
    head, marked, tail = head[-_CONTEXT:], marked[:_CONTEXT], tail[:_CONTEXT]
    return f"  {head}{marked}{tail}\n  {' ' * cell_len(head)}{'^' * max(1, cell_len(marked))}"


def _read_json(where: str, given_as: str) -> dict[str, Any]:
    try:
        query = json.loads(where)
    except ValueError as error:
        where_it_is = pointed_at(where, error.pos, error.pos + 1) if isinstance(error, json.JSONDecodeError) else ""
        raise typer.BadParameter(
            f'{error}; a query is JSON in single quotes, such as \'{{"task_name": "math"}}\'\n{where_it_is}'.rstrip(),
            param_hint=given_as,
        ) from None
    except RecursionError:
        raise typer.BadParameter("it nests too deep", param_hint=given_as) from None
    if not isinstance(query, dict):
        raise typer.BadParameter("a query is a JSON object, such as {}", param_hint=given_as)
    return query
