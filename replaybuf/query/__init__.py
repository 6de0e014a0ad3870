"""Queries over the metadata of groups: a Mongo-like dict, its meaning in Python and its translation to SQL.

`parse` turns a dict into nodes and checks it; `predicate` is their meaning in Python; `replaybuf.query.sql`
has the same in SQL, and is imported by those who need it.
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
]
