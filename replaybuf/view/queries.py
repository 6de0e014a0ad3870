"""Queries as people type them: JSON texts, whose mistakes have a place in the text."""

from __future__ import annotations

import json

from replaybuf.errors import QueryError
from replaybuf.rules.query import LogicNode, Node, parse, span_of


class TypedQueryError(QueryError):
    """The text is no query; the mistake is in `text[start:end]`."""

    def __init__(self, message: str, start: int, end: int) -> None:
        super().__init__(message)
        self.start, self.end = start, end


def read_query(text: str) -> Node:
    """Parse a query; an empty text is one that everything matches. Raises TypedQueryError."""
    if not text.strip():
        return LogicNode("$and", ())
    try:
        query = json.loads(text)
    except json.JSONDecodeError as error:
        place = min(error.pos, len(text))
        raise TypedQueryError(f"a query is JSON: {error}", place, place + 1) from None
    except RecursionError:
        raise TypedQueryError("a query is JSON, and this is nested too deeply", 0, 1) from None
    if not isinstance(query, dict):
        raise TypedQueryError('a query is a JSON object, such as {"reward": {"$gte": 0.9}}', 0, len(text))
    try:
        return parse(query)
    except QueryError as error:
        raise TypedQueryError(str(error), *(span_of(text, error.place) or (0, len(text)))) from error
