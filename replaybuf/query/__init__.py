"""Queries over the metadata of groups: a Mongo-like dict, its meaning in Python and its translation to SQL.

`parse` turns a dict into nodes and checks it; `predicate` is their meaning in Python; `to_text` turns nodes into JSON.
`replaybuf.query.sql_conditions` has their meaning in SQL, and is imported where it is needed, because of SQLAlchemy.
"""

from __future__ import annotations

from replaybuf.query.nodes import (
    FIELDS,
    TAG_PREFIX,
    BetweenNode,
    FieldType,
    LogicNode,
    Node,
    NotNode,
    Query,
    ScalarNode,
    SetNode,
    Value,
    predicate,
    to_text,
)
from replaybuf.query.parse import parse, span_of

__all__ = [
    "FIELDS",
    "TAG_PREFIX",
    "BetweenNode",
    "FieldType",
    "LogicNode",
    "Node",
    "NotNode",
    "Query",
    "ScalarNode",
    "SetNode",
    "Value",
    "parse",
    "predicate",
    "span_of",
    "to_text",
]
