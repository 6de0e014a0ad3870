"""Repairs of tallies, of the counter of uids, and of leases that are over."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import insert, text

from replaybuf.doctor.check_counts import LANELESS_TALLIES, sizes_of, uids_of
from replaybuf.doctor.findings import CheckContext, groups
from replaybuf.rules.limits import Limits, Rules
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.inspection.groups import buffers_of
from replaybuf.storage.sql.schema.tables import counter
from replaybuf.storage.sql.statements.counts import add_counts
from replaybuf.storage.sql.statements.leases import end_leases
from replaybuf.storage.sql.statements.restore import raise_uid


def repair_counts(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Count the groups anew."""
    lost = tx.execute(text(f"DELETE FROM {LANELESS_TALLIES}")).rowcount  # noqa: S608
    wrong = [size for size in sizes_of(tx) if size.counted != size.there]
    add_counts(tx, {(size.lane, size.name): size.there - size.counted for size in wrong})
    done = [f"removed {lost:,} counts of lanes that are gone"] if lost else []
    return done + [f"counted {size.name} of {size.label} anew: {size.there - size.counted:+,}" for size in wrong]


def repair_uids(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Move the counter of uids past those in use."""
    used, last = uids_of(tx)
    if last is None:
        tx.execute(insert(counter).values(name="uid", value=0))
    elif last >= used:
        return []
    raise_uid(tx, used)
    return [f"raised the counter of uids from {last or 0:,} to {used:,}"]


def repair_leases(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """End the expired leases."""
    rules = Rules(limits=Limits(max_deliveries=0))  # only the run's config knows the limit
    ended = {buffer: end_leases(tx.of(Scope(buffer, rules))) for buffer in buffers_of(tx)}
    return [
        f"gave back {groups(count)} of the buffer {buffer} whose lease was over"
        for buffer, count in ended.items()
        if count
    ]
