"""How the database answers a query: as SQL, with its plan and the indexes that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, func, select

from replaybuf.query import Node
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.policies import Order
from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.engine.plans import PlanStep
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.inspection.groups import looking_at
from replaybuf.storage.sql.schema.tables import group, lane, tally
from replaybuf.storage.sql.statements.lanes import find_lanes
from replaybuf.storage.sql.statements.matching import finding
from replaybuf.storage.sql.statements.ordering import Source

_GROUPS = group.name


@dataclass(frozen=True, slots=True)
class Explained:
    """A statement as the database gets it, its parameters in their order, its plan, and a sentence about that."""

    sql: str
    parameters: list[Any]
    plan: list[PlanStep]
    sentence: str

    @property
    def indexes(self) -> list[str]:
        """The indexes by which groups are found."""
        return sorted({step.index for step in self.plan if step.table == _GROUPS and step.index})

    @property
    def sorts(self) -> bool:
        return any(step.sorts for step in self.plan)


def explain_query(tx: Transaction, buffer: str | None, query: Node, order: Order, limit: int | None) -> Explained:
    """Explain how the groups that match are found, in order, as `find` and `replaybuf ls` do it."""
    tx = looking_at(tx, buffer)
    return _explain(tx, finding(tx, query, order, limit), {})


def explain_draw(
    tx: Transaction, buffer: str, task: str, status: Status, where: Node | None, order: Order, size: int
) -> list[Explained]:
    """Explain how the first `size` groups of a task and status are drawn that match `where`.

    An order by staleness needs two statements. Returns [] when there never was such a group.
    """
    tx = tx.of(Scope(buffer))
    home = find_lanes(tx, [(task, status)]).get((task, status))
    if home is None:
        return []
    return [_explain(tx, *one) for one in Source(home, where).selects(tx, size, order)]


def _explain(tx: Transaction, statement: Select[Any], values: dict[str, Any]) -> Explained:
    compiled = statement.compile(dialect=tx.connection.dialect).construct_expanded_state(values)
    sql, parameters = compiled.statement, list(compiled.positional_parameters)
    plan = tx.dialect.explain(tx.connection, sql, parameters)
    return Explained(sql, parameters, plan, _sentence(plan, _count(tx), limited=statement._limit_clause is not None))


def _count(tx: Transaction) -> int:
    """Return the number of groups in the database, which is what a scan reads."""
    counted = select(func.sum(tally.c.amount)).where(tally.c.name.in_([Tally.SIZE, Tally.LEASED]))
    return int(tx.execute(counted.select_from(tally.join(lane, lane.c.id == tally.c.lane))).scalar() or 0)


def _sentence(plan: Sequence[PlanStep], groups: int, *, limited: bool) -> str:
    reads = [step for step in plan if step.table == _GROUPS]
    indexes = ", ".join(dict.fromkeys(step.index for step in reads if step.index))
    if not reads:
        how = "reads no group: nothing can match"
    elif any(step.whole for step in reads):
        along = f" along {indexes}" if indexes else ""
        if limited and not any(step.sorts for step in plan):
            return f"scans groups{along} until enough match, at worst all {groups:,} of the database, without a sort"
        how = f"scans all {groups:,} groups of the database{along}"
    else:
        how = f"reads groups by {indexes}"
    return f"{how}, and sorts those that match" if any(step.sorts for step in plan) else f"{how}, without a sort"
