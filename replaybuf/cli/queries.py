"""Queries as the command line has them: --where, --task and --status; and what is said when nothing matches."""

from __future__ import annotations

import json
from typing import Any

import typer

from replaybuf.query import LogicNode, Node, parse
from replaybuf.redact import redact
from replaybuf.storage.sql.inspection.buffers import tasks_of
from replaybuf.storage.sql.inspection.reader import Reader

_TASKS_NAMED = 10


def query_of(where: str | None, task: str | None, status: str | None) -> Node:
    """Return the query that the options ask for. Raises QueryError and usage errors."""
    nodes = [parse(_read_json(where))] if where else []
    if task is not None:
        nodes.append(parse({"task_name": task}))
    if status is not None:
        nodes.append(parse({"status": redact(status)}))
    return LogicNode("$and", tuple(nodes))


def nothing_in(reader: Reader, buffer: str | None, task: str | None) -> str:
    """Return why nothing was found; if there is no such task, name the tasks that there are."""
    if task is None:
        return "no such groups"
    tasks = reader.look(lambda look: tasks_of(look, buffer))
    if task in tasks or not tasks:
        return "no such groups"
    more = f" and {len(tasks) - _TASKS_NAMED} more" if len(tasks) > _TASKS_NAMED else ""
    return f"no such groups; there are the tasks {', '.join(tasks[:_TASKS_NAMED])}{more}"


def _read_json(where: str) -> dict[str, Any]:
    try:
        query = json.loads(where)
    except ValueError as error:
        raise typer.BadParameter(
            f'{error}; a query is JSON in single quotes: --where \'{{"task_name": "math"}}\'', param_hint="--where"
        ) from None
    if not isinstance(query, dict):
        raise typer.BadParameter("a query is a JSON object, such as {}", param_hint="--where")
    return query
