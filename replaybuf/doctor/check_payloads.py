"""Checks of payloads: each is read and compared with its checksum."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import select

from replaybuf.codec.stored import read_tails
from replaybuf.doctor.check_groups import FORGET, MISSING, set_groups_aside
from replaybuf.doctor.findings import CheckContext, Finding, fine, groups, problem, repairable, warning
from replaybuf.errors import DecodeError, PayloadStoreError, StorageError
from replaybuf.storage.sql.engine.transaction import DEFAULT, Transaction
from replaybuf.storage.sql.inspection.group_payloads import AS_DICTS, read_places
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.schema.tables import group, payload
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.units import some

NAME = "checksums"

#: How many payloads are read with `--quick`.
SAMPLE = 200

_BATCH_BYTES = 16 * 1024 * 1024
_BATCH_GROUPS = 500
_MENDED_AT_ONCE = 50

# The groups with a payload, those of checkpoints included.
_PAYLOADS = """
SELECT u.uid, u.bytes FROM (
    SELECT uid, bytes FROM rb_group
    UNION SELECT uid, bytes FROM rb_checkpoint_group WHERE checkpoint IN (SELECT id FROM rb_checkpoint)) u
JOIN rb_payload p ON p.uid = u.uid ORDER BY u.uid"""


def check_checksums(reader: Reader, context: CheckContext) -> list[Finding]:
    """Read and verify payloads, in several transactions: a long one would hold back cleaning up.

    Damaged groups are kept in `context.damaged`.
    """
    sizes = reader.read_any(lambda tx: tx.tuples(_PAYLOADS))
    chosen = sizes[:: len(sizes) // SAMPLE + 1] if context.quick else sizes
    damaged: dict[int, str] = {}
    out_of_reach: list[PayloadStoreError] = []
    done = 0
    for batch in _in_batches(chosen):
        damaged |= _damaged(reader, batch, out_of_reach)
        done += len(batch)
        context.tell(done, len(chosen))
    context.damaged |= damaged
    what = f"{len(chosen):,} of {groups(len(sizes))}" if len(chosen) < len(sizes) else groups(len(sizes))
    note = f" (--quick: {len(chosen):,} of {len(sizes):,} read)" if len(chosen) < len(sizes) else ""
    findings = []
    if out_of_reach:
        findings.append(problem(NAME, f"arrays that are kept apart were not all checked: {out_of_reach[0]}", ""))
    if damaged:
        findings += reader.read_any(lambda tx: _findings(tx.of(DEFAULT), damaged, note))
    return findings or [fine(NAME, f"{what} read, all payloads as they were written")]


def _in_batches(sizes: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield the uids in batches to be read at once; `sizes` has each uid with the bytes of its payload."""
    batch: list[int] = []
    size = 0
    for uid, nbytes in sizes:
        if batch and (size + nbytes > _BATCH_BYTES or len(batch) >= _BATCH_GROUPS):
            yield batch
            batch, size = [], 0
        batch.append(uid)
        size += nbytes
    if batch:
        yield batch


def _damaged(reader: Reader, uids: list[int], out_of_reach: list[PayloadStoreError]) -> dict[int, str]:
    """Return which of these payloads are damaged, and why; payloads that are gone by now don't count.

    Of those that are kept apart where nobody answers, the heads are checked, and the reason is added to `out_of_reach`.
    """
    query = f"SELECT uid, data FROM rb_payload WHERE uid IN ({', '.join(map(str, uids))})"  # noqa: S608  # numbers
    try:
        rows, places = reader.read_any(lambda tx: (tx.tuples(query), read_places(tx)))
    except StorageError as error:
        if len(uids) == 1:
            return {uids[0]: f"it can't be read: {error}"}
        half = len(uids) // 2
        return _damaged(reader, uids[:half], out_of_reach) | _damaged(reader, uids[half:], out_of_reach)
    try:
        return _reasons(rows, places, again=lambda: reader.read_any(lambda tx: tx.tuples(query)))
    except PayloadStoreError as error:
        out_of_reach.append(error)
        return _reasons(rows, None)


def _reasons(
    rows: Sequence[Sequence[Any]],
    places: Mapping[int, str] | None,
    again: Callable[[], Sequence[Sequence[Any]]] | None = None,
) -> dict[int, str]:
    """Return which of these payloads are damaged, and why; what is kept apart is checked where `places` are given.

    Those that are there `again`, but elsewhere, were moved meanwhile.
    """
    tails = read_tails([data for _, data in rows], places) if places is not None else [None] * len(rows)
    found = {uid: why for (uid, data), tail in zip(rows, tails, strict=True) if (why := _why(data, tail)) is not None}
    if again is None or not any(uid in found and tail is not None for (uid, _), tail in zip(rows, tails, strict=True)):
        return found
    then, now = dict(map(tuple, rows)), dict(map(tuple, again()))
    moved = [(uid, now[uid]) for uid in found if uid in now and now[uid] != then[uid]]
    return {uid: why for uid, why in found.items() if now.get(uid) == then[uid]} | _reasons(moved, places)


def _why(data: bytes | None, tail: Any = None) -> str | None:
    if data is None:
        return MISSING
    try:
        if isinstance(tail, DecodeError):
            raise tail
        AS_DICTS.verify(data, tail)
    except DecodeError as error:
        return str(error)
    return None


def _findings(tx: Transaction, damaged: dict[int, str], note: str) -> list[Finding]:
    there = set(tx.execute(select(group.c.uid).where(uid_in(tx, sorted(damaged)))).scalars())
    aside = _set_aside_already(tx, damaged)
    findings = []
    if new := sorted(there - aside):
        named = some([f"{uid} ({damaged[uid]})" for uid in new], 3)
        findings.append(repairable(NAME, f"the payloads of {groups(len(new))} are damaged: {named}{note}"))
    if aside:
        found = f"the payloads of {groups(len(aside))} are damaged, set aside already: {some(sorted(aside))}{note}"
        findings.append(warning(NAME, found, FORGET))
    if kept := sorted(damaged.keys() - there):
        found = f"the payloads of {groups(len(kept))} that only checkpoints have are damaged: {some(kept)}{note}"
        findings.append(problem(NAME, found, "buffer.drop_checkpoint(step), or restore without them"))
    return findings


def repair_checksums(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Set aside groups that were found damaged, and still are."""
    left = sorted(context.damaged.keys() - _set_aside_already(tx, context.damaged))
    reasons: dict[int, str] = {}
    for start in range(0, len(left), _MENDED_AT_ONCE):
        query = select(group.c.uid, payload.c.data).outerjoin_from(group, payload, payload.c.uid == group.c.uid)
        rows = tx.execute(query.where(uid_in(tx, left[start : start + _MENDED_AT_ONCE]))).all()
        reasons |= _reasons(rows, read_places(tx))
    return set_groups_aside(tx, reasons)


def _set_aside_already(tx: Transaction, uids: Collection[int]) -> set[int]:
    query = select(group.c.uid).where(uid_in(tx, list(uids)), group.c.error.is_not(None))
    return set(tx.execute(query).scalars()) if uids else set()
