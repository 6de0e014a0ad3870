"""Queries as the command line has them: --where, --task and --status."""

from __future__ import annotations

import json
from typing import Any

import typer

from replaybuf.query import LogicNode, Node, parse
from replaybuf.redact import redact


def query_of(where: str | None, task: str | None, status: str | None) -> Node:
    """Return the query that the options ask for. Raises QueryError and usage errors."""
    nodes = [parse(_read_json(where))] if where else []
    if task is not None:
        nodes.append(parse({"task_name": task}))
    if status is not None:
        nodes.append(parse({"status": redact(status)}))
    return LogicNode("$and", tuple(nodes))


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
