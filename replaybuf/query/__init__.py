"""Queries over what is known of a group: a Mongo-like dict, its meaning in Python and its translation to SQL.

`parse` turns a dict into nodes and checks it; `predicate` is what the nodes mean; `compile_sql` says the same in SQL.
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
]
