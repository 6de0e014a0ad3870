"""Taking in one statement and a message that also commits, where each statement is a round trip.

The query is made from what this process knows of the lanes. If they have changed since, if the buffer was restored, or
if it doesn't find enough undamaged groups, they are drawn as in `take`, in the same transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from replaybuf.codec.payload import Codec
from replaybuf.errors import DecodeError
from replaybuf.rollouts.rollout import Status
from replaybuf.rules import transitions
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.counts import Counts, add_step
from replaybuf.storage.sql.statements.fence import check_fence
from replaybuf.storage.sql.statements.lanes import KnownLanes, find_lanes
from replaybuf.storage.sql.statements.ordering import Source
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.sql.statements.segments import READING_SECONDS, keep_for_reading
from replaybuf.storage.sql.statements.take import consume, draw_groups, verify
from replaybuf.storage.values import Draw


def draw_behind_fence(
    tx: Transaction, codec: Codec, draw: Draw, skip: set[int], known: KnownLanes
) -> tuple[list[GroupRow] | None, bool]:
    """Draw as `draw_groups` does, with one statement for each task if possible; the first of a transaction.

    `known` are lanes as they were read last, and is updated. Checks the fence.
    """
    names = [(task, draw.status) for task in draw.sizes]
    at_once = tx.dialect.is_remote and names and not skip and _is_plain(tx, draw)
    if at_once and all(name in known for name in names):
        rows = _draw(tx, codec, draw, known)
        if rows is not None:
            return rows, False
    check_fence(tx)
    drawn = draw_groups(tx, codec, draw, skip)
    if at_once and drawn[0]:
        known |= find_lanes(tx, names)
    return drawn


def _is_plain(tx: Transaction, draw: Draw) -> bool:
    """Return whether a draw depends on nothing but the order of the groups."""
    rules = tx.scope.rules
    slowed = draw.status == Status.COMPLETED and rules.limits.slows_draws
    return (
        not slowed and rules.sampler.race is None and draw.where is None and not (draw.probabilities or draw.deferred)
    )


def _draw(tx: Transaction, codec: Codec, draw: Draw, lanes: KnownLanes) -> list[GroupRow] | None:
    """Return the first groups of each task; None if there are too few, or if anything isn't as it should be."""
    drawn: list[GroupRow] = []
    for task, size in draw.sizes.items():
        rows = Source(lanes[(task, draw.status)]).read_checked(tx, size, tx.scope.rules.sampler.order)
        if rows is None or len(rows) < size:
            return None
        drawn += rows
    try:
        for row in drawn:
            verify(row, codec)
    except DecodeError:
        return None
    return drawn


def consume_at_end(tx: Transaction, rows: Sequence[GroupRow], train_step: int | None) -> None:
    """Consume groups that were drawn, as `consume` does; nothing but what is sent with the commit may follow.

    If all of them leave, this is sent with it, too. Payloads that are kept apart stay until they were read.
    """
    of_rows = [(row.lane, row.times_sampled, row.deliveries) for row in rows]
    states = dict(zip(of_rows, rows, strict=True))
    steps = {state: transitions.drawn(row, tx.scope.rules.limits) for state, row in states.items()}
    apart = [row.uid for row in rows if row.is_apart]
    if not (tx.dialect.is_remote and rows and all(step.after is None for step in steps.values())):
        consume(tx, rows, train_step)
        keep_for_reading(tx, apart, READING_SECONDS)
        return
    counts: Counts = Counter()
    for state, n in Counter(of_rows).items():
        home = states[state].home
        add_step(counts, {home.name: home}, home.task_name, steps[state], n)
    tx.finish(_removal([row.uid for row in rows], READING_SECONDS if apart else 0.0, counts))


def _removal(uids: Sequence[int], seconds: float, counts: Counts) -> str:
    """Return the statement that removes groups and counts it, with its values: nothing but numbers, and tallies.

    Their payloads are kept for so many seconds more, by the server's clock.
    """
    listed = ",".join(map(str, map(int, uids)))
    amounts = ", ".join(f"({lane_id:d}, '{name.value}', {n:d})" for (lane_id, name), n in counts.items())
    return f"""
WITH gone AS (
    DELETE FROM rb_group WHERE uid = ANY ('{{{listed}}}'::bigint[]) RETURNING uid
), discarded AS (
    INSERT INTO rb_garbage (uid, removed_at) SELECT uid, extract(epoch FROM clock_timestamp()) + {seconds!r} FROM gone
)
INSERT INTO rb_tally AS own (lane, name, shard, amount)
SELECT lane, name, pg_backend_pid(), amount FROM (VALUES {amounts}) AS new (lane, name, amount)
ON CONFLICT (lane, name, shard) DO UPDATE SET amount = own.amount + excluded.amount
"""  # noqa: S608
