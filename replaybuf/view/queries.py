"""Queries as people type them: JSON texts; and what to say of a task that doesn't exist."""

from __future__ import annotations

import json

from replaybuf.errors import QueryError
from replaybuf.rules.causes import never_put
from replaybuf.rules.query import LogicNode, Node, parse
from replaybuf.storage.sql.inspection.group_metadata import tasks_of
from replaybuf.storage.sql.inspection.reader import ReadTransaction


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


def unknown_task(tx: ReadTransaction, buffer: str | None, task: str | None) -> str:
    """Return a sentence about a named task that doesn't exist, with the tasks that do; "" for one that does."""
    if task is None or task in (tasks := tasks_of(tx, buffer)):
        return ""
    return ". ".join(never_put(task, tasks)) if tasks else "nothing was ever put into this buffer"
