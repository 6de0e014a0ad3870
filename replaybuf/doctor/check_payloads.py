"""Checks of payloads, which are compared with their checksums, and of the texts of a SQLite file.

A damaged page may leave a text that is no longer UTF-8 or JSON: every query that reads it then fails. (PostgreSQL
doesn't store such texts.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import from_json

from replaybuf.codec.payload_header import is_apart, verify
from replaybuf.doctor import Check, CheckContext, Finding, fine, groups, problem, repairable, warning
from replaybuf.doctor.check_groups import FORGET, MISSING
from replaybuf.errors import DecodeError, PayloadStoreError, StorageError
from replaybuf.places.store import Extent
from replaybuf.progress import in_pieces
from replaybuf.storage.sql.inspection.groups import rows_of
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction
from replaybuf.units import some

if TYPE_CHECKING:
    from replaybuf.codec.stored import Places

#: The text columns by table, and whether they are JSON.
_COLUMNS = {
    "rb_group": {"marks": True, "tags": True, "scoped_key": True, "error": False},
    "rb_payload": {"outline": True, "prompt": False},
}


class BadText(NamedTuple):
    """A text of a group that can't be read."""

    uid: int
    table: str
    column: str


def unreadable(tx: ReadTransaction) -> Iterator[BadText]:
    """Yield the texts that aren't UTF-8, or aren't JSON though they should be."""
    for table, columns in _COLUMNS.items():
        casts = ", ".join(f"CAST({name} AS BLOB)" for name in columns)  # the raw bytes
        one_by_one = f"SELECT uid, {casts} FROM {table} WHERE uid BETWEEN :first AND :last ORDER BY uid"  # noqa: S608
        for first, last in _suspicious(tx, table):
            for uid, *values in tx.tuples(one_by_one, first=first, last=last):
                for (name, is_json), value in zip(columns.items(), values, strict=True):
                    if value is not None and not _is_readable(value, is_json=is_json):
                        yield BadText(uid, table, name)


#: The number of groups whose texts are checked by one statement.
_AT_ONCE = 1000


def _suspicious(tx: ReadTransaction, table: str) -> Iterator[tuple[int, int]]:
    """Yield ranges of uids (first, last) of groups with a text that may be unreadable.

    SQLite checks whether texts are JSON, and texts of many groups are decoded together. (JSON has no NUL, which SQLite
    may treat as its end.)
    """
    columns = _COLUMNS[table]
    texts = ", ".join(f"CAST(group_concat(CAST({name} AS TEXT), char(10)) AS BLOB)" for name in columns)
    wrong = " + ".join(
        f"coalesce(sum(NOT json_valid(CAST({name} AS TEXT))), 0)" for name, is_json in columns.items() if is_json
    )
    several = f"SELECT uid, {', '.join(columns)} FROM {table} WHERE uid > :after ORDER BY uid LIMIT {_AT_ONCE}"  # noqa: S608
    statement = f"SELECT min(uid), max(uid), {wrong}, {texts} FROM ({several})"  # noqa: S608
    [(first, last, not_json, *joined)] = tx.tuples(statement, after=-(2**63))
    while last is not None:
        if not_json or not all(
            text is None or (_is_readable(text, is_json=False) and not (is_json and b"\0" in text))
            for text, is_json in zip(joined, columns.values(), strict=True)
        ):
            yield first, last
        [(first, last, not_json, *joined)] = tx.tuples(statement, after=last)


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
    """Check whether tags, marks, keys, previews and reasons are valid texts, and JSON where required."""
    bad = list(unreadable(tx))
    if not bad:
        return [fine("all can be read")]
    return [repairable(f"texts of {count_of(bad)} are damaged, and queries that meet them fail: {some_of(bad)}")]


def count_of(bad: Sequence[BadText]) -> str:
    """Return the number of groups with unreadable texts, in words."""
    return groups(len({one.uid for one in bad}))


def some_of(bad: Sequence[BadText]) -> str:
    """Return some of these texts, by column and group, in words."""
    return some([f"{one.column} of {one.uid}" for one in bad])


TEXTS = (Check("texts", find_texts),)

#: The number of payloads read with `--quick`.
SAMPLE = 200

_BATCH_BYTES = 16 * 1024 * 1024
_BATCH_GROUPS = 2000

# The groups, including those of checkpoints.
_GROUPS = """
SELECT uid, bytes FROM rb_group
UNION ALL SELECT DISTINCT uid, bytes FROM rb_past p
    WHERE until IN (SELECT id FROM rb_checkpoint) AND NOT EXISTS (SELECT 1 FROM rb_group g WHERE g.uid = p.uid)
ORDER BY uid"""


def check_checksums(reader: Reader, context: CheckContext) -> list[Finding]:
    """Read and verify payloads, in several transactions: a long one would block vacuuming and checkpoints of the WAL.

    Damaged groups are recorded in `context.damaged`.
    """
    sizes = reader.read_any(lambda tx: tx.tuples(_GROUPS))
    chosen = sizes[:: len(sizes) // SAMPLE + 1] if context.quick else sizes
    damaged: dict[int, str] = {}
    lost: list[PayloadStoreError] = []
    done = read = 0
    for piece in in_pieces(chosen, itemgetter(1), _BATCH_GROUPS, _BATCH_BYTES):
        batch = [uid for uid, _ in piece]
        there, why = _damaged(reader, batch, context.out_of_reach, lost)
        damaged |= why
        read += there
        done += len(batch)
        context.tell(done, len(chosen))
    context.damaged |= damaged
    what = f"{read:,} of {groups(len(sizes))}" if len(chosen) < len(sizes) else groups(read)
    note = f" (--quick: {len(chosen):,} of {len(sizes):,} read)" if len(chosen) < len(sizes) else ""
    findings = []
    if lost:
        findings.append(warning(f"arrays that are kept apart were not all checked: {lost[0]}"))
    if damaged:
        findings += reader.read_any(lambda tx: _findings(tx, damaged, note))
    without = ", without what is out of reach (see places)" if context.out_of_reach else ""
    return findings or [fine(f"{what} read, all payloads as they were written{without}")]


def _damaged(
    reader: Reader, uids: list[int], out_of_reach: Collection[int], lost: list[PayloadStoreError]
) -> tuple[int, dict[int, str]]:
    """Return the number of these payloads that exist, and why some are damaged, by uid.

    Only the heads are checked of payloads in places that are `out_of_reach`, and of all payloads kept apart once
    reading a place has failed; the failure is appended to `lost`.
    """
    query = f"SELECT uid, data FROM rb_payload WHERE uid IN ({', '.join(map(str, uids))})"  # noqa: S608  # numbers
    try:
        rows, places = reader.read_any(lambda tx: (tx.tuples(query), tx.places()))
    except StorageError as error:
        if len(uids) == 1:
            return 1, {uids[0]: f"it can't be read: {error}"}
        half = len(uids) // 2
        first, second = (_damaged(reader, part, out_of_reach, lost) for part in (uids[:half], uids[half:]))
        return first[0] + second[0], first[1] | second[1]
    if lost:
        return len(rows), reasons_of(rows, None)
    try:
        found = reasons_of(rows, places, out_of_reach, again=lambda: reader.read_any(lambda tx: tx.tuples(query)))
    except PayloadStoreError as error:
        lost.append(error)
        found = reasons_of(rows, None)
    return len(rows), found


def reasons_of(
    rows: Sequence[Sequence[Any]],
    places: Places | None,
    out_of_reach: Collection[int] = (),
    again: Callable[[], Sequence[Sequence[Any]]] | None = None,
) -> dict[int, str]:
    """Return why some of these payloads are damaged, by uid; parts kept apart are checked if `places` are given.

    Nothing is read from places that are `out_of_reach`. A payload without a row when the rows are read `again` was
    swept meanwhile.
    """
    wanted = [None if _is_in(data, out_of_reach) else data for _, data in rows]
    tails: Sequence[Any] = [None] * len(rows)
    if places is not None and any(type(data) is bytes and is_apart(data) for data in wanted):  # avoids the import
        from replaybuf.codec.stored import read_tails

        tails = read_tails(wanted, places)
    found = {uid: why for (uid, data), tail in zip(rows, tails, strict=True) if (why := _why(data, tail)) is not None}
    if again is None or not any(uid in found and tail is not None for (uid, _), tail in zip(rows, tails, strict=True)):
        return found
    there = {uid for uid, _ in again()}
    return {uid: why for uid, why in found.items() if uid in there}


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
        verify(data, tail)
    except DecodeError as error:
        return str(error)
    return None


def _findings(tx: ReadTransaction, damaged: dict[int, str], note: str) -> list[Finding]:
    there = {row["uid"] for row in rows_of(tx, "SELECT uid FROM rb_group WHERE uid IN ({uids})", sorted(damaged))}
    aside = set_aside_already(tx, damaged)
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


CHECKSUMS = Check("checksums", alone=check_checksums)

_ASIDE = "SELECT uid FROM rb_group WHERE uid IN ({uids}) AND error IS NOT NULL"


def set_aside_already(tx: ReadTransaction, uids: Collection[int]) -> set[int]:
    """Return the groups among these that were set aside."""
    return {row["uid"] for row in rows_of(tx, _ASIDE, list(uids))}
