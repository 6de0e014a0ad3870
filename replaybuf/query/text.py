"""Nodes as text, which `parse` understands: JSON, for people and for tables."""

from __future__ import annotations

import json
from typing import Any

from replaybuf.query.nodes import BetweenNode, LogicNode, Node, NotNode, ScalarNode, SetNode


def to_text(node: Node) -> str:
    """Return a query as JSON."""
    return json.dumps(_plain(node), ensure_ascii=False)


def _plain(node: Node) -> dict[str, Any]:
    match node:
        case ScalarNode(field, "$eq", value):
            return {field: value}
        case ScalarNode(field, op, value):
            return {field: {op: value}}
        case SetNode(field, op, values):
            return {field: {op: list(values)}}
        case BetweenNode(field, lower, upper):
            return {field: {"$between": [lower, upper]}}
        case NotNode(condition):
            return {"$not": _plain(condition)}
        case LogicNode("$and", ()):
            return {}
        case LogicNode(relation, conditions):
            return {relation: [_plain(one) for one in conditions]}
