"""Queries as people type them; rows of groups for people; and what to say of a task that doesn't exist."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from replaybuf.common.redact import redact
from replaybuf.errors import QueryError
from replaybuf.rules.causes import never_put
from replaybuf.rules.query import LogicNode, Node, parse
from replaybuf.storage.sql.inspection.group_metadata import archived_at, place_in_group, tasks_of
from replaybuf.storage.sql.inspection.reader import Transaction


def read_query(text: str) -> Node:
    """Parse a query; an empty text is one that everything matches. Raises QueryError."""
    if not text.strip():
        return LogicNode("$and", ())
    try:
        query = json.loads(text)
    except ValueError as error:
        raise QueryError(f'a query is JSON, such as {{"reward": {{"$gte": 0.9}}}}: {error}') from None
    except RecursionError:
        raise QueryError("a query is JSON, and this is nested too deeply") from None
    if not isinstance(query, dict):
        raise QueryError('a query is a JSON object, such as {"reward": {"$gte": 0.9}}')
    return parse(query)


def query_of(where: str | None, task: str | None, status: str | None) -> Node:
    """Return the query that groups of a query's text, a task and a status match. Raises QueryError."""
    nodes = [read_query(where)] if where else []
    named = {"task_name": task, "status": None if status is None else redact(status)}
    nodes += [parse({name: one}) for name, one in named.items() if one is not None]
    return LogicNode("$and", tuple(nodes))


def listed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metadata of groups with the fields of their table: the place of a rollout, an error as prompt."""
    return [
        row | {"place": place_in_group(row), "archived_at": archived_at(row), "prompt": row["error"] or row["prompt"]}
        for row in rows
    ]


def unknown_task(tx: Transaction, buffer: str | None, task: str | None) -> str:
    """Return a sentence about a named task that doesn't exist, with the tasks that do; "" for one that does."""
    if task is None or task in (tasks := tasks_of(tx, buffer)):
        return ""
    return ". ".join(never_put(task, tasks)) if tasks else "nothing was ever put into this buffer"
