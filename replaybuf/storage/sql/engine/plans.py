"""Plans of statements, as both databases explain them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

_SQLITE_ACCESS = re.compile(r"(SCAN|SEARCH) (\w+)(?:.*? USING (?:COVERING )?INDEX (\w+)| USING INTEGER PRIMARY KEY)?")


@dataclass(frozen=True, slots=True)
class PlanStep:
    """A line of a plan: `table` is read in it, by `index`, or rows are sorted.

    `whole`: all of the table is read, without an index or along one.
    """

    depth: int
    text: str
    table: str | None = None
    index: str | None = None
    whole: bool = False
    sorts: bool = False


def sqlite_plan(connection: Connection, sql: str, values: Sequence[Any]) -> list[PlanStep]:
    """Return the plan of a statement of SQLite."""
    depths = {0: -1}
    steps = []
    for number, parent, _, text in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", tuple(values)):
        depths[number] = depth = depths.get(parent, -1) + 1
        found = _SQLITE_ACCESS.match(text)
        if found:
            key = "the primary key" if "INTEGER PRIMARY KEY" in text else None
            steps.append(PlanStep(depth, text, found[2], found[3] or key, whole=found[1] == "SCAN"))
        else:
            steps.append(PlanStep(depth, text, sorts="TEMP B-TREE" in text))
    return steps


def postgres_plan(connection: Connection, sql: str, values: Sequence[Any]) -> list[PlanStep]:
    """Return the plan of a statement of PostgreSQL."""
    answer = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {sql}", tuple(values)).scalar_one()
    [plan] = json.loads(answer) if isinstance(answer, str) else answer
    return list(_steps(plan["Plan"], 0))


def _steps(node: dict[str, Any], depth: int) -> Iterator[PlanStep]:
    kind, table, index = node["Node Type"], node.get("Relation Name"), node.get("Index Name")
    text = " ".join(filter(None, (kind, f"on {table}" if table else "", f"using {index}" if index else "")))
    conditions = [f"{name}: {node[name]}" for name in ("Index Cond", "Filter", "Sort Key") if name in node]
    text += f" (about {node['Plan Rows']:,} rows)" + "".join(f", {condition}" for condition in conditions)
    children = node.get("Plans", ())
    if kind.startswith("Bitmap Heap"):  # its index is in the step below
        index = ", ".join(name for child in children for name in _indexes(child)) or None
    whole = kind == "Seq Scan" or (kind in ("Index Scan", "Index Only Scan") and "Index Cond" not in node)
    yield PlanStep(depth, text, table, index if table else None, whole, "Sort" in kind)
    for child in children:
        yield from _steps(child, depth + 1)


def _indexes(node: dict[str, Any]) -> Iterator[str]:
    if "Index Name" in node:
        yield node["Index Name"]
    for child in node.get("Plans", ()):
        yield from _indexes(child)
