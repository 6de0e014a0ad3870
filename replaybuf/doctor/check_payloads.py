"""Checks of payloads, each of which is compared with its checksum, and of the texts of a SQLite file.

A damaged page may leave a text that is no longer UTF-8 or JSON: every query that reads it then fails. (PostgreSQL
doesn't accept such texts.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from pydantic_core import from_json
from sqlalchemy import select, update

from replaybuf.codec.payload_format import is_apart
from replaybuf.codec.tails import Places, joined, read_tails
from replaybuf.codec.texts import Texts
from replaybuf.doctor.check_groups import FORGET, MISSING, set_groups_aside
from replaybuf.doctor.findings import Check, CheckContext, Finding, fine, groups, problem, repairable, warning
from replaybuf.errors import DecodeError, PayloadStoreError, StorageError
from replaybuf.rollouts.marks import Marks
from replaybuf.rollouts.outline import outline, prompt_preview
from replaybuf.rollouts.statuses import Status
from replaybuf.segments.extents import Extent
from replaybuf.storage.sql.engine.transaction import DEFAULT, Transaction
from replaybuf.storage.sql.inspection.group_payloads import AS_DICTS
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction
from replaybuf.storage.sql.schema.tables import group, lane, payload
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.units import some

#: The text columns by table, and whether they are JSON.
_COLUMNS = {
    "rb_group": {"marks": True, "tags": True, "scoped_key": True, "error": False},
    "rb_payload": {"outline": True, "prompt": False},
}
#: Their replacements where the payload can't be read either.
_NOTHING: dict[str, Any] = {"marks": {"oldest": [], "newest": [], "reward": []}, "outline": [], "prompt": None}


class BadText(NamedTuple):
    """A text of a group that can't be read."""

    uid: int
    table: str
    column: str


def _unreadable(tx: ReadTransaction) -> Iterator[BadText]:
    """Yield the texts that aren't UTF-8, or not the JSON that they should be."""
    for table, columns in _COLUMNS.items():
        casts = ", ".join(f"CAST({name} AS BLOB)" for name in columns)  # the raw bytes
        for uid, *values in tx.table(f"SELECT uid, {casts} FROM {table} ORDER BY uid")[1]:  # noqa: S608
            for (name, is_json), value in zip(columns.items(), values, strict=True):
                if value is not None and not _is_readable(value, is_json=is_json):
                    yield BadText(uid, table, name)


def _is_readable(value: bytes, *, is_json: bool) -> bool:
    try:
        if is_json:
            from_json(value)
        else:
            value.decode()
    except ValueError:
        return False
    return True


def find_texts(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether tags, marks, keys, previews and reasons are valid texts, and valid JSON where they should be."""
    bad = list(_unreadable(tx))
    if not bad:
        return [fine("all can be read")]
    return [repairable(f"texts of {_count(bad)} are damaged, and queries that meet them fail: {_some(bad)}")]


def repair_texts(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Make previews and marks anew from the payload; remove tags, keys and reasons that can't be read.

    Groups whose payload can't be read either are set aside. Raises PayloadStoreError.
    """
    bad, reasons = list(_unreadable(tx)), {}
    for one in bad:
        value, reason = _made_anew(tx, one)
        table = group if one.table == "rb_group" else payload
        tx.execute(update(table).where(table.c.uid == one.uid).values({one.column: value}))
        if reason:
            reasons[one.uid] = reason
    return [f"mended texts of {_count(bad)}: {_some(bad)}", *set_groups_aside(tx, reasons)] if bad else []


def _made_anew(tx: Transaction, bad: BadText) -> tuple[Any, str | None]:
    """Return the replacement of a text, and why its group must be set aside, if it must."""
    if bad.column not in _NOTHING:
        return None, None
    status, data = _status_and_payload(tx, bad.uid)
    [tail] = read_tails([data], tx.places())
    try:
        rollouts = AS_DICTS.decode(joined(data, tail))
    except DecodeError as error:
        return _NOTHING[bad.column], str(error)
    if bad.column == "marks":
        return marks_anew(rollouts, status).to_json(), None
    kind = AS_DICTS.rollout_type
    if bad.column == "prompt":
        return prompt_preview(rollouts, kind), None
    return outline(rollouts, kind, Texts(data).find), None


def marks_anew(rollouts: Sequence[Any], status: str) -> Marks:
    """Return the marks of a group, rebuilt from its rollouts. In an EXPIRED group all rollouts count as expired."""
    if status != Status.EXPIRED:
        return Marks.of(rollouts, AS_DICTS.rollout_type)
    nothing: list[Any] = [None] * len(rollouts)
    staleness = [int(rollout.get("seq_staleness", 0) or 0) for rollout in rollouts]
    return Marks(nothing, nothing, nothing, [True] * len(rollouts), staleness)


def _status_and_payload(tx: Transaction, uid: int) -> tuple[str, bytes]:
    of = payload.outerjoin(group, group.c.uid == payload.c.uid).outerjoin(lane, lane.c.id == group.c.lane)
    row = tx.execute(select(lane.c.status, payload.c.data).select_from(of).where(payload.c.uid == uid)).first()
    return (row.status or "", row.data) if row else ("", b"")


def _count(bad: Sequence[BadText]) -> str:
    return groups(len({one.uid for one in bad}))


def _some(bad: Sequence[BadText]) -> str:
    return some([f"{one.column} of {one.uid}" for one in bad])


CHECKS = (Check("texts", find_texts, repair_texts),)


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
    lost: list[PayloadStoreError] = []
    done = 0
    for batch in _in_batches(chosen):
        damaged |= _damaged(reader, batch, context.out_of_reach, lost)
        done += len(batch)
        context.tell(done, len(chosen))
    context.damaged |= damaged
    what = f"{len(chosen):,} of {groups(len(sizes))}" if len(chosen) < len(sizes) else groups(len(sizes))
    note = f" (--quick: {len(chosen):,} of {len(sizes):,} read)" if len(chosen) < len(sizes) else ""
    findings = []
    if lost:
        findings.append(warning(f"arrays that are kept apart were not all checked: {lost[0]}"))
    if damaged:
        findings += reader.read_any(lambda tx: _findings(tx.of(DEFAULT), damaged, note))
    without = ", without what is out of reach (see places)" if context.out_of_reach else ""
    return findings or [fine(f"{what} read, all payloads as they were written{without}")]


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


def _damaged(
    reader: Reader, uids: list[int], out_of_reach: Collection[int], lost: list[PayloadStoreError]
) -> dict[int, str]:
    """Return which of these payloads are damaged, and why; payloads that are gone by now don't count.

    Of those in places that are `out_of_reach` the heads are checked, and of all that are kept apart once a place is
    `lost`, to which the reason is added.
    """
    query = f"SELECT uid, data FROM rb_payload WHERE uid IN ({', '.join(map(str, uids))})"  # noqa: S608  # numbers
    try:
        rows, places = reader.read_any(lambda tx: (tx.tuples(query), tx.places()))
    except StorageError as error:
        if len(uids) == 1:
            return {uids[0]: f"it can't be read: {error}"}
        half = len(uids) // 2
        first, second = (_damaged(reader, part, out_of_reach, lost) for part in (uids[:half], uids[half:]))
        return first | second
    if lost:
        return _reasons(rows, None)
    try:
        return _reasons(rows, places, out_of_reach, again=lambda: reader.read_any(lambda tx: tx.tuples(query)))
    except PayloadStoreError as error:
        lost.append(error)
        return _reasons(rows, None)


def _reasons(
    rows: Sequence[Sequence[Any]],
    places: Places | None,
    out_of_reach: Collection[int] = (),
    again: Callable[[], Sequence[Sequence[Any]]] | None = None,
) -> dict[int, str]:
    """Return which of these payloads are damaged, and why; what is kept apart is checked where `places` are given.

    In those that are `out_of_reach` nothing is read.
    Those that are there `again`, but elsewhere, were moved meanwhile.
    """
    wanted = [None if _is_in(data, out_of_reach) else data for _, data in rows]
    tails = read_tails(wanted, places) if places is not None else [None] * len(rows)
    found = {uid: why for (uid, data), tail in zip(rows, tails, strict=True) if (why := _why(data, tail)) is not None}
    if again is None or not any(uid in found and tail is not None for (uid, _), tail in zip(rows, tails, strict=True)):
        return found
    then, now = dict(map(tuple, rows)), dict(map(tuple, again()))
    moved = [(uid, now[uid]) for uid in found if uid in now and now[uid] != then[uid]]
    return {uid: why for uid, why in found.items() if now.get(uid) == then[uid]} | _reasons(moved, places, out_of_reach)


def _is_in(data: bytes | None, places: Collection[int]) -> bool:
    """Return whether the arrays of a payload are in one of these places."""
    try:
        return bool(places) and data is not None and is_apart(data) and Extent.at_end_of(data).place in places
    except DecodeError:
        return False


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
        findings.append(repairable(f"the payloads of {groups(len(new))} are damaged: {named}{note}"))
    if aside:
        found = f"the payloads of {groups(len(aside))} are damaged, set aside already: {some(sorted(aside))}{note}"
        findings.append(warning(found, FORGET))
    if kept := sorted(damaged.keys() - there):
        found = f"the payloads of {groups(len(kept))} that only checkpoints have are damaged: {some(kept)}{note}"
        findings.append(problem(found, "buffer.drop_checkpoint(step), or restore without them"))
    return findings


def repair_checksums(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Set aside groups that were found damaged, and still are."""
    left = sorted(context.damaged.keys() - _set_aside_already(tx, context.damaged))
    reasons: dict[int, str] = {}
    for start in range(0, len(left), _MENDED_AT_ONCE):
        query = select(group.c.uid, payload.c.data).outerjoin_from(group, payload, payload.c.uid == group.c.uid)
        rows = tx.execute(query.where(uid_in(tx, left[start : start + _MENDED_AT_ONCE]))).all()
        reasons |= _reasons(rows, tx.places(), context.out_of_reach)
    return set_groups_aside(tx, reasons)


def _set_aside_already(tx: Transaction, uids: Collection[int]) -> set[int]:
    query = select(group.c.uid).where(uid_in(tx, list(uids)), group.c.error.is_not(None))
    return set(tx.execute(query).scalars()) if uids else set()
