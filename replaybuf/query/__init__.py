"""Queries over the metadata of groups: a Mongo-like dict, its meaning in Python and its translation to SQL.

`parse` turns a dict into nodes and checks it; `predicate` is their meaning in Python; `to_text` turns nodes into JSON.
`replaybuf.query.sql` has their meaning in SQL, and is imported by those who need it.
"""

from __future__ import annotations

from replaybuf.query.nodes import (
    FIELDS,
    BetweenNode,
    FieldType,
    LogicNode,
    Node,
    NotNode,
    Query,
    ScalarNode,
    SetNode,
    Value,
)
from replaybuf.query.parse import parse
from replaybuf.query.places import span_of
from replaybuf.query.python import predicate
from replaybuf.query.text import to_text

__all__ = [
    "FIELDS",
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
