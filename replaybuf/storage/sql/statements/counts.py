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

from sqlalchemy import ColumnElement, bindparam, case, func, literal, select, true, update

from replaybuf.rollouts.rollout import ASIDE
from replaybuf.rollouts.statuses import Status
from replaybuf.rules import transitions
from replaybuf.rules.limits import Level
from replaybuf.rules.transitions import LaneName, Tally, Transition, levels
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.locks import Lock, NamedLock
from replaybuf.storage.sql.engine.transaction import Prepared, Transaction
from replaybuf.storage.sql.schema.tables import checkpoint, group, lane, tally
from replaybuf.storage.sql.statements.buffer_facts import Tallied
from replaybuf.storage.sql.statements.fence import FENCE, Row, compare
from replaybuf.storage.sql.statements.lanes import Lane, need_lanes
from replaybuf.storage.sql.statements.ordering import enter_races
from replaybuf.storage.sql.statements.past import keep, leave, newest
from replaybuf.storage.sql.statements.presence import note
from replaybuf.storage.sql.statements.rows import GroupRow

#: Changes of tallies, by lane and name.
Counts = Counter[tuple[int, Tally]]


def add_step(counts: Counts, homes: Mapping[LaneName, Lane], task_name: str, step: Transition, groups: int = 1) -> None:
    """Count a transition of this number of a task's groups."""
    for (status, name), n in step.counts.items():
        counts[(homes[(task_name, status)].id, name)] += n * groups


def add_counts(tx: Transaction, counts: Mapping[tuple[int, Tally], int]) -> None:
    """Add to the tallies."""
    tx.run_many(_ADD, [(lane_id, name.value, n) for (lane_id, name), n in counts.items() if n])


def _adding(dialect: Dialect) -> Any:
    amounts: dict[Any, Any] = {tally.c[name]: bindparam(f"new_{name}") for name in ("lane", "name", "amount")}
    own = dialect.insert(tally).values({**amounts, tally.c.shard: dialect.shard})
    return own.on_conflict_do_update(
        index_elements=[tally.c.lane, tally.c.name, tally.c.shard],
        set_={"amount": tally.c.amount + own.excluded.amount},
    )


_NEW = ("new_lane", "new_name", "new_amount")
_ADD = Prepared(_adding, *_NEW)


def read_levels(tx: Transaction, tasks: Iterable[str]) -> dict[str, Level]:
    """Return the levels of these tasks."""
    listed = sorted(tasks)
    rows = tx.fetch(_OF_TASKS, tx.scope.buffer, tx.dialect.listed(listed))
    return levels({(task, Status(status), Tally(name)): int(n) for task, status, name, n in rows}, listed)


def read_fenced_tallies(tx: Transaction) -> Tallied:
    """Return all tallies, read in the statement that checks the fence. Raises FencedError."""
    rows = tx.fetch(_ALL_FENCED, tx.scope.buffer, tx.scope.buffer)
    width = len(Row._fields)
    compare(tx, Row(*rows[0][:width]))
    found = (row[width:] for row in rows)  # without any tally, one row of NULLs
    return {(task, Status(status), Tally(name)): int(n) for task, status, name, n in found if task is not None}


_SUMS = (
    select(lane.c.task_name, lane.c.status, tally.c.name, func.sum(tally.c.amount).label("amount"))
    .select_from(lane.join(tally, tally.c.lane == lane.c.id))
    .where(lane.c.buffer == bindparam("buffer"), tally.c.name != str(Tally.BYTES))
    .group_by(lane.c.task_name, lane.c.status, tally.c.name)
)
_FENCE, _ALL_SUMS = FENCE.subquery("fence"), _SUMS.subquery("sums")
_ALL_FENCED = Prepared(
    lambda _: select(_FENCE, _ALL_SUMS).select_from(_FENCE.outerjoin(_ALL_SUMS, true())), "name", "buffer"
)
_OF_TASKS = Prepared(lambda dialect: _SUMS.where(dialect.one_of(lane.c.task_name, "tasks")), "buffer", "tasks")


def read_lane_tallies(tx: Transaction, lanes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the tallies as rows of a lane's id, a name and an amount."""
    query = (
        select(tally.c.lane, tally.c.name, func.sum(tally.c.amount).label("amount"))
        .where(tally.c.lane.in_(lanes))
        .group_by(tally.c.lane, tally.c.name)
        .order_by(tally.c.lane, tally.c.name)
    )
    return [{**row, "amount": int(row["amount"])} for row in tx.execute(query).mappings()]


def totals(tallies: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the number of groups in rows of `read_lane_tallies`, leased ones included, and their bytes."""
    sums: Counter[str] = Counter()
    for row in tallies:
        sums[row["name"]] += row["amount"]
    return sums[Tally.SIZE] + sums[Tally.LEASED], sums[Tally.BYTES]


def add_to_checkpoints(tx: Transaction, counts: Mapping[tuple[int, Tally], int], made_before: int) -> None:
    """Add to the tallies of the buffer's checkpoints after this one."""
    later = select(checkpoint.c.id, checkpoint.c.tallies).where(
        checkpoint.c.buffer == tx.scope.buffer, checkpoint.c.id > made_before
    )
    for row in tx.execute(tx.dialect.for_update(later)).all():
        amounts = Counter({(one["lane"], one["name"]): one["amount"] for one in row.tallies})
        amounts.update({(lane_id, name.value): n for (lane_id, name), n in counts.items()})
        changed = [{"lane": lane_id, "name": name, "amount": n} for (lane_id, name), n in amounts.items()]
        groups, size = totals(changed)
        values = {"tallies": changed, "groups": groups, "bytes": size}
        tx.execute(update(checkpoint).where(checkpoint.c.id == row.id).values(values))


def read_sizes(tx: Transaction, lanes: Iterable[Lane]) -> dict[int, int]:
    """Return the number of groups in each lane."""
    query = (
        select(tally.c.lane, func.sum(tally.c.amount))
        .where(tally.c.lane.in_([one.id for one in lanes]), tally.c.name == str(Tally.SIZE))
        .group_by(tally.c.lane)
    )
    return {lane_id: int(n) for lane_id, n in tx.execute(query)}


def lock_tasks(tx: Transaction, tasks: Iterable[str]) -> None:
    """Lock these tasks' puts and draws with limits until the end of the transaction."""
    names = (f"replaybuf {tx.scope.buffer} {task}" for task in tasks)
    tx.dialect.lock_names(tx, NamedLock.TASK, names)


def merge_shards(tx: Transaction) -> None:
    """Merge the shards of closed connections, on PostgreSQL.

    Shards of open ones are left alone: their puts and takes would wait for the row lock until this is committed.
    """
    if tx.dialect.try_lock(tx, Lock.SHARDS):
        tx.run(_MERGE)


_MERGE = """
WITH gone AS (
    DELETE FROM rb_tally WHERE (lane, name, shard) IN (
        SELECT lane, name, shard FROM rb_tally
        WHERE shard <> 0 AND shard NOT IN (SELECT pid FROM pg_stat_activity)
        LIMIT 10000 FOR UPDATE SKIP LOCKED
    ) RETURNING lane, name, amount
)
INSERT INTO rb_tally AS merged (lane, name, shard, amount)
SELECT lane, name, 0, sum(amount) FROM gone GROUP BY lane, name
ON CONFLICT (lane, name, shard) DO UPDATE SET amount = merged.amount + excluded.amount
"""


#: A task, a transition, and the uids of its groups.
Step = tuple[str, Transition, Sequence[int]]
#: The lease columns of a group that isn't leased.
FREE: Mapping[str, Any] = {"lease": None, "leased_until": None, "holder": None}


def move(
    tx: Transaction,
    rows: Iterable[GroupRow],
    step_of: Callable[[GroupRow], Transition],
    lanes: Iterable[Lane] = (),
    draw: int = 0,
    **values: Any,
) -> None:
    """Apply to each group the transition for its state, and set these columns of groups that stay.

    `lanes` are lanes already read; groups that leave are of the `draw`, an id of `rb_batch`.
    """
    known: dict[LaneName, Lane] = {one.name: one for one in lanes}
    states: dict[tuple[int, int, int], list[GroupRow]] = {}
    for row in rows:
        states.setdefault((row.lane, row.times_sampled, row.deliveries), []).append(row)
        if row.found_in is not None:
            known[row.found_in.name] = row.found_in
    steps = [(same[0].task_name, step_of(same[0]), [row.uid for row in same]) for same in states.values()]
    at = newest(tx)
    old = {row.uid for same in states.values() for row in same if row.column("since") < at}
    keep(tx, [uid for _, step, uids in steps if step.after is not None for uid in uids if uid in old])
    apply(tx, steps, known.values(), are_kept=True, draw=draw, **values)


def apply(
    tx: Transaction,
    steps: Sequence[Step],
    known: Iterable[Lane] = (),
    *,
    are_kept: bool = False,
    draw: int = 0,
    **values: Any,
) -> None:
    """Apply transitions to groups, and set these columns of groups that stay.

    `known` are lanes already read. With `are_kept` the groups are kept for checkpoints already (`past.keep`).
    """
    homes = {home.name: home for home in known}
    homes |= need_lanes(tx, {(task, status) for task, step, _ in steps for status, _ in step.counts} - homes.keys())
    leased = {(task, step.after.status) for task, step, _ in steps if step.after is not None and step.after.leased}
    lanes = {False: homes, True: need_lanes(tx, leased, leased=True)}
    alike: dict[tuple[str, Transition], list[int]] = {}
    counts: Counts = Counter()
    for task, step, uids in steps:
        alike.setdefault((task, step), []).extend(uids)
        add_step(counts, homes, task, step, len(uids))
    gone: list[int] = []
    entering: dict[LaneName, list[int]] = {}
    for (task, step), uids in alike.items():
        if step.after is None:
            gone += uids
            continue
        added = {"times_sampled": step.draws, "deliveries": step.deliveries}
        pinned_at = None  # the train step at which groups that leave their lane pin their staleness
        if step.pins_staleness and step.before is not None:
            pinned_at = homes[(task, step.before.status)].step or 0
        if not are_kept:
            keep(tx, uids)
        change(tx, uids, _changed(task, step, lanes) | values, added, pinned_at)
        if step.enters_races:
            entering.setdefault((task, step.after.status), []).extend(uids)
    counts.update(leave(tx, gone, draw))
    for name, uids in entering.items():
        enter_races(tx, homes[name], uids)
    add_counts(tx, counts)


def _changed(task: str, step: Transition, lanes: Mapping[bool, Mapping[LaneName, Lane]]) -> dict[str, Any]:
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
        values["archived_at"] = time.time() if after.status in ASIDE and not after.leased else None
    return values


def change(
    tx: Transaction,
    uids: Iterable[int],
    values: Mapping[str, Any],
    added: Mapping[str, int] | None = None,
    pinned_at: int | None = None,
) -> None:
    """Set columns of groups (none with JSON), and add to others; pin the staleness at a train step, if given."""
    adding = {name: n for name, n in (added or {}).items() if n and name not in values}
    pin = () if pinned_at is None else (pinned_at,)
    statement = _changing(tuple(values), tuple(adding), bool(pin))
    tx.fetch(statement, *values.values(), *adding.values(), *pin, tx.dialect.listed(uids))


@lru_cache(maxsize=256)
def _changing(names: tuple[str, ...], adding: tuple[str, ...], pins: bool) -> Prepared:

    def new(dialect: Dialect) -> dict[str, ColumnElement[Any]]:
        given = {name: bindparam(f"new_{name}", type_=group.c[name].type) for name in names}
        return {name: dialect.moment(value) if name == "archived_at" else value for name, value in given.items()}

    more = {name: group.c[name] + bindparam(f"more_{name}", type_=group.c[name].type) for name in adding}
    pin = _pinned(bindparam("pinned_at", type_=group.c.oldest_step.type)) if pins else {}
    return Prepared(
        lambda dialect: update(group).where(dialect.one_of(group.c.uid, "uids")).values(new(dialect) | more | pin),
        *(f"new_{name}" for name in names),
        *(f"more_{name}" for name in adding),
        *(("pinned_at",) if pins else ()),
        "uids",
    )


def pinned(home: Lane) -> dict[str, Any]:
    """Return the columns that pin the staleness of groups that leave this lane."""
    return _pinned(literal(home.step or 0, group.c.oldest_step.type))


def _pinned(step: ColumnElement[int]) -> dict[str, Any]:
    follows = group.c.pinned_staleness.is_(None)
    return {
        "pinned_staleness": case((follows, step - group.c.oldest_step - 1), else_=group.c.pinned_staleness),
        "pinned_step": case((follows, step), else_=group.c.pinned_step),
    }


def set_aside(tx: Transaction, home: Lane, reasons: Mapping[int, str], worker: str | None = None) -> None:
    """Make groups of a lane FAILED, each with its own reason; `worker` drew them."""
    steps = [(home.task_name, transitions.set_aside(home.status, why), [uid]) for uid, why in reasons.items()]
    apply(tx, steps, [home])
    uids, groups, why = list(reasons), len(reasons), next(iter(reasons.values()), None)
    note(tx, EventKind.SET_ASIDE, task_name=home.task_name, worker=worker, groups=groups, uids=uids, detail=why)
