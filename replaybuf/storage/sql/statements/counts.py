"""Tallies: counters without lock contention, and state transitions of groups that are counted in them.

Each PostgreSQL connection adds to its own rows (its shard), so that concurrent transactions never conflict; reads sum
the shards. SQLite has a single writer, and one shard.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic_core import from_json

from replaybuf.rules import transitions
from replaybuf.rules.limits import Level
from replaybuf.rules.transitions import LaneName, Tally, Transition, level_of
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.engine.locks import NamedLock
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.buffer_facts import BY_NAME, SUMS, Tallied, tallied
from replaybuf.storage.sql.statements.fence import FENCE, Row, compare
from replaybuf.storage.sql.statements.lanes import Lane, need_lanes
from replaybuf.storage.sql.statements.ordering import enter_race
from replaybuf.storage.sql.statements.past import keep, leave, newest
from replaybuf.storage.sql.statements.presence import note
from replaybuf.storage.sql.statements.rows import STATE, GroupRow
from replaybuf.values.rollouts.rollout import ASIDE, Status

#: Changes of tallies, by lane and name.
Counts = Counter[tuple[int, Tally]]


def add_step(counts: Counts, homes: Mapping[LaneName, Lane], task_name: str, step: Transition, groups: int = 1) -> None:
    """Count a transition of this number of a task's groups."""
    for (status, name), n in step.counts.items():
        counts[(homes[(task_name, status)].id, name)] += n * groups


def add_counts(tx: Transaction, counts: Mapping[tuple[int, Tally], int]) -> None:
    """Add to the tallies."""
    tx.send(_ADD, [(lane_id, name.value, n) for (lane_id, name), n in counts.items() if n])


_ADD = """INSERT INTO rb_tally AS own (lane, name, amount, shard) VALUES (:lane, :name, :amount, {shard})
ON CONFLICT (lane, name, shard) DO UPDATE SET amount = own.amount + excluded.amount"""


def read_levels(tx: Transaction, tasks: Iterable[str]) -> dict[str, Level]:
    """Return the levels of these tasks."""
    task_names = sorted(tasks)
    rows = tx.tuples(f"{SUMS} AND l.task_name {{in_texts:tasks}} {BY_NAME}", buffer=tx.scope.buffer, tasks=task_names)
    tallies = tallied(rows)
    return {task: level_of(tallies, task) for task in task_names}


def read_fenced_tallies(tx: Transaction) -> Tallied:
    """Return all tallies, read in the statement that checks the fence. Raises FencedError."""
    rows = tx.tuples(_TALLIES_WITH_FENCE, buffer=tx.scope.buffer)
    width = len(Row._fields)
    compare(tx, Row(*rows[0][:width]))
    tally_rows = (row[width:] for row in rows)  # without any tally, one row of NULLs
    return tallied(row for row in tally_rows if row[0] is not None)


_TALLIES_WITH_FENCE = f"SELECT * FROM ({FENCE}) AS fence LEFT JOIN ({SUMS} {BY_NAME}) AS sums ON true"  # noqa: S608


def read_lane_tallies(tx: Transaction, lanes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the tallies as rows of a lane's id, a name and an amount."""
    rows = tx.tuples(
        "SELECT lane, name, sum(amount) FROM rb_tally WHERE lane {in:lanes} GROUP BY lane, name ORDER BY lane, name",
        lanes=lanes,
    )
    return [{"lane": lane_id, "name": name, "amount": int(amount)} for lane_id, name, amount in rows]


def totals(tallies: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the number of groups in rows of `read_lane_tallies`, leased ones included, and their bytes."""
    sums: Counter[str] = Counter()
    for row in tallies:
        sums[row["name"]] += row["amount"]
    return sums[Tally.SIZE] + sums[Tally.LEASED], sums[Tally.BYTES]


def add_to_checkpoints(tx: Transaction, counts: Mapping[tuple[int, Tally], int], made_before: int) -> None:
    """Add to the tallies of the buffer's checkpoints after this one."""
    query = "SELECT id, tallies FROM rb_checkpoint WHERE buffer = :buffer AND id > :checkpoint {lock}"
    for number, tallies in tx.tuples(query, buffer=tx.scope.buffer, checkpoint=made_before):
        amounts = Counter({(record["lane"], record["name"]): record["amount"] for record in from_json(tallies)})
        amounts.update({(lane_id, name.value): n for (lane_id, name), n in counts.items()})
        merged = [{"lane": lane_id, "name": name, "amount": n} for (lane_id, name), n in amounts.items()]
        groups, size = totals(merged)
        tx.change(
            "UPDATE rb_checkpoint SET tallies = {json:tallies}, groups = :groups, bytes = :bytes WHERE id = :id",
            tallies=merged,
            groups=groups,
            bytes=size,
            id=number,
        )


def lock_tasks(tx: Transaction, tasks: Iterable[str]) -> None:
    """Lock these tasks' puts and draws with limits until the end of the transaction."""
    names = (f"replaybuf {tx.scope.buffer} {task}" for task in tasks)
    tx.lock_names(NamedLock.TASK, names)


#: The shards of closed connections, on PostgreSQL.
GONE_SHARDS = """
    SELECT lane, name, shard FROM rb_tally
    WHERE shard <> 0 AND shard NOT IN (SELECT pid FROM pg_stat_activity)
"""
#: Merges them. Those of open connections are left alone: their puts and takes would wait for the row lock until this is
#: committed. Two merges have different shards, and lock what these are added to in the same order.
MERGE_SHARDS = f"""
WITH gone AS (
    DELETE FROM rb_tally WHERE (lane, name, shard) IN (
{GONE_SHARDS} LIMIT 10000 FOR UPDATE SKIP LOCKED
    ) RETURNING lane, name, amount
)
INSERT INTO rb_tally AS merged (lane, name, shard, amount)
SELECT lane, name, 0, sum(amount) FROM gone GROUP BY lane, name ORDER BY lane, name
ON CONFLICT (lane, name, shard) DO UPDATE SET amount = merged.amount + excluded.amount
"""  # noqa: S608


#: A task, a transition, and the uids of its groups.
Step = tuple[str, Transition, Sequence[int]]
#: The lease columns of a group that isn't leased.
FREE: Mapping[str, Any] = {"lease": None, "leased_until": None, "holder": None}


def move(
    tx: Transaction,
    rows: Iterable[GroupRow],
    step_of: Callable[[GroupRow], Transition],
    lanes: Iterable[Lane] = (),
    *,
    drawn: bool = False,
    **values: Any,
) -> list[int]:
    """Apply to each group the transition for its state; set these columns of groups that stay, and return their uids.

    `lanes` are lanes already read; groups that leave as `drawn` are of the transaction's last batch.
    """
    homes: dict[LaneName, Lane] = {home.name: home for home in lanes}
    states: dict[tuple[int, int, int], list[GroupRow]] = {}
    for row in rows:
        states.setdefault(STATE(row.values), []).append(row)
    steps: list[Step] = []
    staying: list[GroupRow] = []
    for first, *others in states.values():
        members, step = [first, *others], step_of(first)
        steps.append((first.task_name, step, [row.uid for row in members]))
        staying += members if step.after is not None else ()
        if first.found_in is not None:
            homes[first.found_in.name] = first.found_in
    at = newest(tx)
    keep(tx, [row.uid for row in staying if row.column("since") < at])
    apply(tx, steps, homes.values(), are_kept=True, drawn=drawn, **values)
    return [row.uid for row in staying]


def trained_at(step: int | None) -> dict[str, Any]:
    """Return the column of groups that are trained on at this step; without one, they keep that of earlier draws."""
    return {} if step is None else {"trained_step": step}


def apply(
    tx: Transaction,
    steps: Sequence[Step],
    known: Iterable[Lane] = (),
    *,
    are_kept: bool = False,
    drawn: bool = False,
    **values: Any,
) -> None:
    """Apply transitions to groups, and set these columns of groups that stay.

    `known` are lanes already read. With `are_kept` the groups are kept for checkpoints already (`past.keep`).
    """
    homes = {home.name: home for home in known}
    homes |= need_lanes(tx, {(task, status) for task, step, _ in steps for status, _ in step.counts} - homes.keys())
    leased = {(task, step.after.status) for task, step, _ in steps if step.after is not None and step.after.leased}
    lanes = {False: homes, True: need_lanes(tx, leased, leased=True)}
    by_step: dict[tuple[str, Transition], list[int]] = {}
    counts: Counts = Counter()
    for task, step, uids in steps:
        by_step.setdefault((task, step), []).extend(uids)
        add_step(counts, homes, task, step, len(uids))
    removed: list[int] = []
    entering: dict[LaneName, list[int]] = {}
    for (task, step), uids in by_step.items():
        if step.after is None:
            removed += uids
            continue
        added = {"times_sampled": step.draws, "deliveries": step.deliveries}
        pinned_at = None  # the train step at which groups that leave their lane pin their staleness
        if step.pins_staleness and step.before is not None:
            pinned_at = homes[(task, step.before.status)].step or 0
        if not are_kept:
            keep(tx, uids)
        change(tx, uids, _columns_after(task, step, lanes) | values, added, pinned_at)
        if step.enters_races:
            entering.setdefault((task, step.after.status), []).extend(uids)
    counts.update(leave(tx, removed, drawn=drawn))
    for name, uids in entering.items():
        enter_race(tx, homes[name], uids)
    add_counts(tx, counts)


def _columns_after(task: str, step: Transition, lanes: Mapping[bool, Mapping[LaneName, Lane]]) -> dict[str, Any]:
    """Return the columns set by a transition, for groups of a task that stay."""
    after = step.after
    assert after is not None
    values: dict[str, Any] = {}
    if step.afresh:
        values |= {"deliveries": 0, "error": None}
    if step.error is not None:
        values["error"] = step.error
    if step.moves:
        values |= FREE
        values["lane"] = lanes[after.leased][(task, after.status)].id
        if after.status == Status.ARCHIVED and step.before is not None and step.before.status == Status.ARCHIVED:
            return values  # a lease doesn't prolong its retention
        values["archived_at"] = time.time() if after.status in ASIDE and not after.leased else None
    return values


def change(
    tx: Transaction,
    uids: Iterable[int],
    values: Mapping[str, Any],
    added: Mapping[str, int] | None = None,
    pinned_at: int | None = None,
) -> None:
    """Set columns of groups (JSON as text), and add to others; pin the staleness at a train step, if given."""
    parameters = {**values, **{f"more_{name}": n for name, n in (added or {}).items() if n and name not in values}}
    if pinned_at is not None:
        parameters["pinned_at"] = pinned_at
    tx.change(_update_statement(tuple(parameters)), **parameters, uids=list(uids))


@lru_cache(maxsize=256)
def _update_statement(names: tuple[str, ...]) -> str:
    """Return the UPDATE of groups by these values: of columns, of what is added to them, and the step of pinning."""
    changes = []
    for name in names:
        column = name.removeprefix("more_")
        if name == "pinned_at":
            changes.append(_PIN)
        elif name == "archived_at":
            changes.append("archived_at = {moment:archived_at}")
        else:
            changes.append(f"{column} = :{name}" if column == name else f"{column} = {column} + :{name}")
    return f"UPDATE rb_group SET {', '.join(changes)} WHERE uid {{in:uids}}"  # noqa: S608


#: Pins the staleness of groups that leave a lane of the train step `pinned_at`.
_PIN = """pinned_step = CASE WHEN pinned_staleness IS NULL THEN CAST(:pinned_at AS bigint) ELSE pinned_step END,
pinned_staleness = coalesce(pinned_staleness, CAST(:pinned_at AS bigint) - oldest_step - 1)"""


def set_aside(tx: Transaction, home: Lane, reasons: Mapping[int, str], worker: str | None = None) -> None:
    """Make groups of a lane FAILED, each with its own reason; `worker` drew them."""
    steps = [(home.task_name, transitions.set_aside(home.status, reason), [uid]) for uid, reason in reasons.items()]
    apply(tx, steps, [home])
    if home.status == Status.FILLING:  # it is no rollout of a group that fills any more
        change(tx, reasons, {"scoped_key": None})
    uids, groups, reason = list(reasons), len(reasons), next(iter(reasons.values()), None)
    note(tx, EventKind.SET_ASIDE, task_name=home.task_name, worker=worker, groups=groups, uids=uids, detail=reason)
