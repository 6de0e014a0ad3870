"""Queries as people type them: JSON texts."""

from __future__ import annotations

import json

from replaybuf.errors import QueryError
from replaybuf.rules.query import LogicNode, Node, parse


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
