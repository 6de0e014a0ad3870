"""Snapshots: a store's groups in a SQLite file of their own, with the schema of every other replaybuf database.

Rows are copied unchanged, in batches, from one transaction of the source, so that the snapshot is consistent while
others write. Copies go between SQLite and PostgreSQL in both directions. The file appears under its name only when
complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Table, func, insert, select

from replaybuf.atomic_file import partial_file, publish
from replaybuf.errors import SnapshotError
from replaybuf.progress import OnProgress, ProgressReporter
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.limits import Rules
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.copies.snapshot_file import (
    check_facts,
    close_file,
    damaged,
    file_engine,
    is_damage,
    open_file,
    payloads_digest,
    same_file,
    write_facts,
)
from replaybuf.storage.sql.engine.database import Database, Steps
from replaybuf.storage.sql.engine.errors import translated
from replaybuf.storage.sql.engine.transaction import DEFAULT, Scope, Transaction
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.schema.tables import group, lane, payload, tally
from replaybuf.storage.sql.statements.buffer_facts import last_uid, read_cursors
from replaybuf.storage.sql.statements.columns import rescoped_key
from replaybuf.storage.sql.statements.counts import read_lane_tallies
from replaybuf.storage.sql.statements.cursors import write_cursors
from replaybuf.storage.sql.statements.fence import check_fence, join, next_ticket, set_next_ticket
from replaybuf.storage.sql.statements.lanes import CLOCKS, all_lanes
from replaybuf.storage.sql.statements.leases import return_all
from replaybuf.storage.sql.statements.restore import free_shift, make_room, raise_uid

_BATCH_BYTES = 16 * 1024 * 1024
_BATCH_GROUPS = 1000
_FEW_GROUPS = 50

T = TypeVar("T")


async def copy_to(
    source: Database, scope: Scope, path: str, about: Mapping[str, str], progress: OnProgress | None = None
) -> None:
    """Write a snapshot of a buffer in `source` to the file `path`, replacing an older one."""
    if source.path is not None and same_file(path, source.path):
        raise SnapshotError(f"{path} is the database of this buffer itself; save into another folder")
    with partial_file(path) as partial:
        target, held = file_engine(partial), Scope(rules=scope.rules)
        try:
            await target.write(lambda tx: create_schema(tx, path))
            async with (
                source.transaction(scope, write=False) as reading,
                target.transaction(held, write=True) as writing,
            ):
                ends = _CopyEnd(source, scope, reading), _CopyEnd(target, held, writing)
                digest = await _copy_rows(*ends, progress)
                await ends[1].run(return_all)
                await ends[1].run(write_facts, about, digest)
        finally:
            await close_file(target)
        await asyncio.to_thread(publish, partial, path)


async def copy_from(
    target: Database, scope: Scope, path: str, expected: Mapping[str, str], progress: OnProgress | None = None
) -> None:
    """Load the snapshot at `path` into a buffer in `target`, which must be empty."""
    source = await open_file(path, expected)
    try:
        async with target.transaction(scope, write=True, alone=True) as writing:
            await writing.run(check_fence)
            await writing.run(make_room)
            async with source.transaction(write=False) as reading:
                ends = _CopyEnd(source, DEFAULT, reading, path), _CopyEnd(target, scope, writing)
                try:
                    digest = await _copy_rows(*ends, progress, anew=True)
                except Exception:
                    await ends[0].run(_check_file, path)  # damage may be the reason
                    raise
                await ends[0].run(check_facts, path, digest)
    finally:
        await source.dispose()


@dataclass(frozen=True, slots=True)
class _CopyEnd:
    """One end of a copy: a buffer in a database, and a transaction of it. Errors are reported as those of this end."""

    engine: Database
    scope: Scope
    steps: Steps
    snapshot: str | None = None  # the path, where one is being read

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        try:
            with translated(self.engine.url, self.engine.lock_timeout):
                return await self.steps.run(function, *args)
        except Exception as error:
            if self.snapshot is None or not is_damage(error):
                raise
            raise damaged(self.snapshot, error) from error


async def _copy_rows(source: _CopyEnd, target: _CopyEnd, progress: OnProgress | None, *, anew: bool = False) -> int:
    """Copy a buffer, and return the digest of its payloads."""
    lanes, tallies = await source.run(_read_lanes)
    last, ticket = await source.run(_read_ends)
    shift = await target.run(free_shift, last)
    if anew:
        _begin_anew(target.scope.rules, lanes, tallies)
    ids = await target.run(write_lanes, lanes)
    await target.run(write_tallies, tallies, ids)
    there = (str(Tally.SIZE), str(Tally.LEASED))
    reporter = ProgressReporter(progress, sum(int(row["amount"]) for row in tallies if row["name"] in there))
    after, size, digest = 0, 1, 0
    while True:
        groups, payloads = await source.run(_batch, after, size)
        if not groups:
            break
        after, nbytes = groups[-1]["uid"], sum(row["bytes"] for row in groups)
        size = max(1, min(_BATCH_GROUPS, int(_BATCH_BYTES * len(groups) / max(nbytes, 1))))
        digest += payloads_digest(payloads)
        for row in groups:
            row["lane"] = ids[row["lane"]]
            row["made_from"] = None  # checkpoints stay behind
            if shift and row["ticket"] is None:
                row["ticket"] = row["uid"]
            row["uid"] += shift
            if row["scoped_key"] is not None:
                row["scoped_key"] = rescoped_key(row["scoped_key"], target.scope.buffer)
        for row in payloads:
            row["uid"] += shift
        await target.run(_check_sizes, payloads)
        await target.run(_insert_rows, group, groups)
        await target.run(_insert_rows, payload, payloads)
        reporter.add(len(groups), nbytes)
    await target.run(raise_uid, last + shift)
    await target.run(set_next_ticket, ticket)
    await target.run(write_cursors, await source.run(lambda tx: read_cursors(tx, tx.scope.buffer or "")))
    reporter.finish()
    return digest


def _read_lanes(tx: Transaction) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the lanes of a buffer, and their tallies."""
    lanes = [row._asdict() for row in all_lanes(tx)]
    return lanes, read_lane_tallies(tx, [row["id"] for row in lanes])


def _read_ends(tx: Transaction) -> tuple[int, int]:
    """Return the last uid given, and the ticket of the buffer's next group."""
    join(tx)
    return last_uid(tx), next_ticket(tx)


def _begin_anew(rules: Rules, lanes: Sequence[dict[str, Any]], tallies: Sequence[dict[str, Any]]) -> None:
    """Make empty lanes whose races haven't begun to run like those of a new buffer: with the races of its own rules."""
    filled = {row["lane"] for row in tallies if row["name"] == str(Tally.SIZE) and row["amount"]}
    clocks = {key: column.name for key, column in CLOCKS.items()}
    for row in lanes:
        if row["id"] not in filled and not any(row[name] for name in (*clocks.values(), lane.c.idle_clock.name)):
            own = () if row["leased"] or row["status"] == str(Status.ARCHIVED) else rules.races
            row.update({name: 0.0 if key in own else None for key, name in clocks.items()})


def write_lanes(tx: Transaction, lanes: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Create the lanes in a buffer that has none; return their new ids by the old ones."""
    if not lanes:
        return {}
    tx.execute(
        insert(lane),
        [{name: value for name, value in row.items() if name != "id"} | {"buffer": tx.scope.buffer} for row in lanes],
    )
    found = {(row.task_name, row.status, row.leased): row.id for row in all_lanes(tx)}
    return {row["id"]: found[(row["task_name"], row["status"], row["leased"])] for row in lanes}


def write_tallies(tx: Transaction, tallies: Sequence[dict[str, Any]], ids: Mapping[int, int]) -> None:
    """Write the tallies of these lanes; `ids` has their new ids."""
    _insert_rows(tx, tally, [{**row, "lane": ids[row["lane"]], "shard": 0} for row in tallies])


def _insert_rows(tx: Transaction, table: Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        tx.execute(insert(table), rows)


def _check_sizes(tx: Transaction, payloads: Sequence[Mapping[str, Any]]) -> None:
    limit = tx.dialect.row_limit(tx)
    for row in payloads:
        limit.check(f"group {row['uid']}", (row["data"], row["prompt"]))


def _batch(tx: Transaction, after: int, size: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    lanes = [row.id for row in all_lanes(tx)]
    chosen = select(group).where(group.c.uid > after, group.c.lane.in_(lanes)).order_by(group.c.uid).limit(size)
    groups = [dict(row) for row in tx.execute(chosen).mappings()]
    if not groups:
        return [], []
    between = payload.c.uid.between(groups[0]["uid"], groups[-1]["uid"])
    wanted = select(payload).join(group, group.c.uid == payload.c.uid).where(between, group.c.lane.in_(lanes))
    payloads = [dict(row) for row in tx.execute(wanted).mappings()]
    for row in payloads:
        if not isinstance(row["data"], bytes):  # changed by hand, or damaged: copied as an undecodable payload
            row["data"] = str(row["data"]).encode()
    return groups, payloads


def _check_file(tx: Transaction, path: str, progress: OnProgress | None = None) -> None:
    check_facts(tx, path, _look_through(tx, progress))


def _look_through(tx: Transaction, progress: OnProgress | None) -> int:
    """Return the digest of the payloads in a snapshot file."""
    count = tx.execute(select(func.count()).select_from(group)).scalar_one()
    reporter = ProgressReporter(progress, count)
    after, digest = 0, 0
    while True:
        groups, payloads = _batch(tx, after, _FEW_GROUPS)
        if not groups:
            break
        after = groups[-1]["uid"]
        digest += payloads_digest(payloads)
        reporter.add(len(groups), sum(row["bytes"] for row in groups))
    reporter.finish()
    return digest
