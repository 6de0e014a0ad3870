"""Queries over the metadata of groups: a Mongo-like dict, its meaning in Python and its translation to SQL.

`parse` turns a dict into nodes and checks it; `predicate` is their meaning in Python; `compile_sql` is the same in SQL;
`to_text` turns nodes into JSON.
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
from replaybuf.query.python import predicate
from replaybuf.query.sql import compile_sql
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
    "compile_sql",
    "parse",
    "predicate",
    "to_text",
]
