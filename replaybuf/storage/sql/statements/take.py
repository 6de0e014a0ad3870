"""Draws: the first groups in the policy's order, new ones and kept or archived ones (`mix`), are read and consumed.

They are consumed, or leased (`leases`), in the same transaction.

Rows that lack a value, or the payload, are set aside here. All other damage shows when the groups are decoded, after
the commit, and such a draw is undone and repeated without them (`tasks.delivery`).

Where each statement is a round trip, a plain draw is one statement, based on lanes cached in this process
(`draw_behind_fence`), and what follows is sent with COMMIT (`Transaction.send`). If a lane has changed since or runs a
race, if the buffer was restored, or if there are too few complete groups, `draw_groups` follows in the same
transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from replaybuf.rules import transitions
from replaybuf.rules.policies import PRIORITIZED, share
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.counts import lock_tasks, move, read_levels, set_aside, trained_at
from replaybuf.storage.sql.statements.fence import check_fence
from replaybuf.storage.sql.statements.lanes import KnownLanes, Lane, cache_lanes, find_lanes, raceless
from replaybuf.storage.sql.statements.leases import end_leases
from replaybuf.storage.sql.statements.ordering import Source, advance, check_races, skip_arrived
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.values import Draw
from replaybuf.values.rollouts.rollout import Status


def draw_groups(tx: Transaction, draw: Draw, skip: set[int]) -> tuple[list[GroupRow] | None, bool]:
    """Return the first groups of each task in order; incomplete ones are set aside.

    None if there are fewer than `draw.at_least`. The groups are locked and still in their lanes. `skip` has the uids of
    groups set aside, so that a draw of FAILED groups doesn't find them again. Also returns whether overdue leases were
    ended, since other callers may wait for their groups.
    """
    rows = _draw_once(tx, draw, skip)
    ended = len(rows) < sum(draw.sizes.values()) and end_leases(tx, wait=True) > 0
    if ended:
        rows = _draw_once(tx, draw, skip)
    if len(rows) < sum(draw.sizes.values()) and not draw.is_met_by(_drawn_counts(draw, rows)):
        return None, ended
    policy = tx.scope.rules.sampler
    _add_probabilities(tx, draw, rows)
    for home, members in by_home(rows) if policy.is_race else ():
        advance(tx, home, members)
        if draw.where is not None and not all(row.is_afresh for row in members):
            skip_arrived(tx, home)
    return rows, ended


def _drawn_counts(draw: Draw, rows: Iterable[GroupRow]) -> Counter[str]:
    """Return the numbers of drawn groups by task; in a mixed draw, of those that weren't drawn before."""
    return Counter(row.task_name for row in rows if draw.replay is None or not row.times_sampled)


def _draw_once(tx: Transaction, draw: Draw, skip: set[int]) -> list[GroupRow]:
    order, limits = tx.scope.rules.sampler.order, tx.scope.rules.limits
    sizes, replay = dict(draw.sizes), draw.replay or {}
    if draw.status == Status.COMPLETED and limits.slows_draws:
        lock_tasks(tx, sizes)
        levels = read_levels(tx, sizes)
        sizes = {task: min(size, limits.drawable(levels[task], replay.get(task, 0))) for task, size in sizes.items()}
    kept = (draw.status,) if limits.keeps(draw.status, 1) else ()
    replayable = () if draw.replay is None else (*kept, Status.ARCHIVED)
    lanes = find_lanes(tx, [(task, status) for task in sizes for status in (draw.status, *replayable)])
    check_races(tx, lanes.values(), order)
    rows: list[GroupRow] = []
    redraw = replace(draw, where=draw.replayed)
    for task, size in sizes.items():
        replayed: list[GroupRow] = []
        # What the limits leave is first for groups that weren't drawn before: only these are waited for.
        share = min(size, draw.sizes[task]) - (draw.sizes[task] - replay.get(task, 0))
        for status in replayable:
            home = lanes.get((task, status))
            if home is not None and share > len(replayed):
                replayed += _draw_lane(tx, home, share - len(replayed), redraw, skip)
        home = lanes.get((task, draw.status))
        if home is not None and size > len(replayed):
            rows += _draw_lane(tx, home, size - len(replayed), draw, skip)
        rows += replayed
    return rows


def _draw_lane(tx: Transaction, home: Lane, size: int, draw: Draw, skip: set[int]) -> list[GroupRow]:
    policy = tx.scope.rules.sampler
    while True:
        source = Source(home, draw.where, skip if home.status == Status.FAILED else ())
        if policy.is_race and draw.where is not None and source.is_sparse(tx, size):
            rows = source.read_afresh(tx, size)
        else:
            rows = source.read(tx, size, policy.order)
        incomplete = {row.uid: reason for row in rows if (reason := row.incomplete)}
        if not incomplete:
            return rows
        set_aside(tx, home, incomplete, draw.worker)
        skip.update(incomplete)


def by_home(rows: Iterable[GroupRow]) -> list[tuple[Lane, list[GroupRow]]]:
    """Return the groups by lane, in the order of lane ids, which is the lock order of rows."""
    homes: dict[int, list[GroupRow]] = {}
    for row in rows:
        homes.setdefault(row.lane, []).append(row)
    return [(members[0].home, members) for _, members in sorted(homes.items())]


def _add_probabilities(tx: Transaction, draw: Draw, rows: Iterable[GroupRow]) -> None:
    """Set the probabilities of drawn groups, if they are asked for."""
    for task in draw.sizes if draw.probabilities else ():
        _add_probabilities_of(tx, draw, [row for row in rows if row.task_name == task])


def _add_probabilities_of(tx: Transaction, draw: Draw, rows: Sequence[GroupRow]) -> None:
    """Set the probability p of each drawn group of a task, and N p, N being the number of groups that match.

    A mixed batch is a stratified sample, of groups that weren't drawn before, of kept and of archived ones: p is the
    share of the batch that came from the group's stratum, times its probability there; N is the size of these strata.
    """
    prioritized = tx.scope.rules.sampler.order[0].field == PRIORITIZED
    strata: dict[tuple[int, bool], list[GroupRow]] = {}
    for row in rows:
        strata.setdefault((row.lane, draw.replay is not None and row.times_sampled > 0), []).append(row)
    groups = 0
    for (_, is_replay), stratum in strata.items():
        source, total = Source(stratum[0].home, draw.replayed if is_replay else draw.where), 0.0
        if prioritized:
            members, total, idle = source.weigh(tx)
        else:
            members = idle = max(source.count(tx), len(stratum))  # a damaged database may count fewer
        groups += members
        for row in stratum:
            weight = share(row.priority)
            row.probability = len(stratum) / len(rows) * (weight / total if prioritized and weight else 1 / idle)
    for row in rows:
        row.weight = groups * (row.probability or 0.0)


# In one statement


def draw_behind_fence(
    tx: Transaction, draw: Draw, skip: set[int], known: KnownLanes
) -> tuple[list[GroupRow] | None, bool]:
    """Draw as `draw_groups` does, with one statement for each task if possible. Must come first in its transaction.

    `known` is the cache of lanes, and is updated. Checks the fence.
    """
    names = [(task, draw.status) for task in draw.sizes]
    at_once = tx.dialect.is_remote and names and not skip and _is_plain(tx, draw)
    if at_once and len(raceless(known, names)) == len(names):
        rows = _draw_plainly(tx, draw, known)
        if rows is not None:
            _add_probabilities(tx, draw, rows)
            return rows, False
    check_fence(tx)
    result = draw_groups(tx, draw, skip)
    if at_once and result[0]:
        cache_lanes(tx, known, names)
    return result


def _is_plain(tx: Transaction, draw: Draw) -> bool:
    """Return whether a draw depends only on the order of the groups."""
    rules = tx.scope.rules
    slowed = draw.status == Status.COMPLETED and rules.limits.slows_draws
    return not slowed and rules.sampler.key is None and draw.where is None


def _draw_plainly(tx: Transaction, draw: Draw, lanes: KnownLanes) -> list[GroupRow] | None:
    """Return the first groups of each task; None if there are too few, a lane has changed, or one is incomplete."""
    drawn: list[GroupRow] = []
    for task, size in draw.sizes.items():
        rows = Source(lanes[(task, draw.status)]).read_checked(tx, size, tx.scope.rules.sampler.order)
        if rows is None or len(rows) < size:
            return None
        drawn += rows
    return None if any(row.incomplete for row in drawn) else drawn


def consume(tx: Transaction, rows: Sequence[GroupRow], train_step: int | None, *, drawn: bool) -> list[int]:
    """Consume groups for this train step, as `drawn` those of the last batch; return the uids of those that stay."""
    limits = tx.scope.rules.limits
    return move(tx, rows, lambda row: transitions.drawn(row, limits), drawn=drawn, **trained_at(train_step))
