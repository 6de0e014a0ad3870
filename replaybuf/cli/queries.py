"""Queries as the command line has them: --where, --task and --status; and what is said when nothing matches."""

from __future__ import annotations

import json
from typing import Any

import typer

from replaybuf import units
from replaybuf.errors import QueryError
from replaybuf.query import LogicNode, Node, parse, span_of
from replaybuf.redact import escape, may_hold_password, redact
from replaybuf.storage.sql.inspection.groups import tasks_of
from replaybuf.storage.sql.inspection.reader import Reader

_TASKS_NAMED = 10
_CONTEXT = 100


def query_of(where: str | None, task: str | None, status: str | None, *, given_as: str = "--where") -> Node:
    """Return the query that the options ask for. Raises QueryError and usage errors."""
    nodes = [_parse(where, given_as)] if where else []
    if task is not None:
        nodes.append(parse({"task_name": task}))
    if status is not None:
        nodes.append(parse({"status": redact(status)}))
    return LogicNode("$and", tuple(nodes))


def nothing_in(reader: Reader, buffer: str | None, task: str | None) -> str:
    """Return why nothing was found; if there is no such task, name the tasks that there are."""
    if task is None:
        return "no such groups"
    tasks = reader.read(lambda tx: tasks_of(tx, buffer))
    if task in tasks or not tasks:
        return "no such groups"
    return f"no such groups; there are the tasks {units.some(tasks, _TASKS_NAMED)}"


def _parse(where: str, given_as: str) -> Node:
    """Return the nodes of a query. An error has a note that points at the mistake (`pointed_at`)."""
    query = _read_json(where, given_as)
    try:
        return parse(query)
    except QueryError as error:
        if error.place and (span := span_of(where, error.place)) is not None:
            error.add_note(pointed_at(where, *span))
        raise


def pointed_at(text: str, start: int, end: int) -> str:
    """Return the line of a text with a part of it, and a line below that marks this.

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
