"""Checks of payloads, which are compared with their checksums, and of the texts beside them.

In SQLite a damaged page may leave a text that is no longer UTF-8 or JSON: every query that reads it then fails.
(PostgreSQL doesn't store such texts.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from pydantic_core import from_json

from replaybuf.cli.doctor import Check, CheckContext, Finding, fine, groups, problem, repairable, warning
from replaybuf.cli.doctor.check_groups import FORGET, set_groups_aside
from replaybuf.common.progress import in_pieces
from replaybuf.common.units import some
from replaybuf.errors import DecodeError, PayloadStoreError, StorageError
from replaybuf.storage.decoding import joined, read_tails
from replaybuf.storage.places.store import Extent
from replaybuf.storage.sql.engine.transaction import DEFAULT, Transaction
from replaybuf.storage.sql.inspection.group_payloads import AS_DICTS
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.statements.files import count_gone
from replaybuf.storage.sql.statements.new_rows import dump_json
from replaybuf.values.codec.payload_format import Texts, is_apart, verify
from replaybuf.values.rollouts.marks import Marks
from replaybuf.values.rollouts.outline import outline, prompt_preview
from replaybuf.values.rollouts.statuses import Status

MISSING = "its payload is missing"
#: The number of groups read with `--quick`.
SAMPLE = 200
_PIECE_BYTES = 16 * 1024 * 1024
_PIECE_GROUPS = 2000
_MENDED_AT_ONCE = 50

# The groups, including those of checkpoints.
_GROUPS = """
SELECT uid, bytes FROM rb_group
UNION ALL SELECT DISTINCT uid, bytes FROM rb_past p
    WHERE until IN (SELECT id FROM rb_checkpoint) AND NOT EXISTS (SELECT 1 FROM rb_group g WHERE g.uid = p.uid)
ORDER BY uid"""

#: The texts of a group: the table of each, and whether it is JSON.
_TEXTS = {
    "outline": ("rb_payload", True),
    "prompt": ("rb_payload", False),
    "marks": ("rb_group", True),
    "tags": ("rb_group", True),
    "scoped_key": ("rb_group", True),
    "error": ("rb_group", False),
}
#: Those that are made anew from the payload, and what they are if it can't be read either.
_MADE_ANEW = {"outline": "[]", "prompt": None, "marks": '{"oldest": [], "newest": [], "reward": []}'}


class _Stored(NamedTuple):
    """A group as it is stored: its payload, and the names of the texts that can't be read."""

    uid: int
    data: bytes | None
    bad: Sequence[str] = ()


def _read(tx: Transaction, uids: Collection[int]) -> list[_Stored]:
    """Read those of these groups that are there, or whose payloads are."""
    texts = "".join(f", CAST({name} AS BLOB)" for name in _TEXTS) if tx.dialect_name == "sqlite" else ""
    rows = tx.tuples(
        f"SELECT p.uid, data{texts} FROM rb_payload p LEFT JOIN rb_group g ON g.uid = p.uid WHERE p.uid {{in:uids}}",  # noqa: S608
        uids=list(uids),
    )
    found = []
    for uid, data, *raw in rows:  # without texts on PostgreSQL
        bad = [name for name, one in zip(_TEXTS, raw, strict=True) if not _can_be_read(name, one)] if raw else ()
        found.append(_Stored(uid, data, bad))
    bare = set(uids) - {one.uid for one in found}
    return found + [_Stored(uid, None) for uid in tx.values(_THERE, uids=list(bare))] if bare else found


_THERE = "SELECT uid FROM rb_group WHERE uid {in:uids}"


def _can_be_read(name: str, raw: bytes | None) -> bool:
    try:
        if raw is not None:
            from_json(raw) if _TEXTS[name][1] else raw.decode()
    except ValueError:
        return False
    return True


class _Pass:
    """Reads all groups, or a sample, in several transactions: a long one would block vacuuming and checkpoints.

    `reasons` has why payloads are damaged, `texts` which texts are, `lost` the first error of a place that failed.
    """

    def __init__(self, reader: Reader, context: CheckContext) -> None:
        self._reader, self._context = reader, context
        self.read = 0
        self.reasons: dict[int, str] = {}
        self.texts: dict[int, Sequence[str]] = {}
        self.lost: PayloadStoreError | None = None

    def piece(self, uids: Sequence[int]) -> None:
        """Read some groups. What can't be read of a damaged file is found by reading smaller pieces."""
        try:
            stored, places = self._reader.read_any(lambda tx: (_read(tx.of(DEFAULT), uids), tx.places()))
        except StorageError as error:
            if len(uids) == 1:
                self.reasons[uids[0]] = f"it can't be read: {error}"
            else:
                half = len(uids) // 2
                self.piece(uids[:half])
                self.piece(uids[half:])
            return
        self.read += len(stored)
        self.texts |= {one.uid: one.bad for one in stored if one.bad}
        found = None
        if self.lost is None:
            try:
                found = reasons_of(stored, places, self._context.out_of_reach)
            except PayloadStoreError as error:
                self.lost = error
        if found is None:
            found = reasons_of(stored, None)
        if found:  # those whose payloads aren't there any more were swept meanwhile
            again = self._reader.read_any(lambda tx: _read(tx.of(DEFAULT), found))
            self.reasons |= {one.uid: found[one.uid] for one in again}


def reasons_of(stored: Sequence[_Stored], places: Any, out_of_reach: Collection[int] = ()) -> dict[int, str]:
    """Return why some of these payloads are damaged, by uid. Raises PayloadStoreError if a place can't be read.

    Arrays that are kept apart are read if `places` are given, but not from places that are `out_of_reach`.
    """
    wanted = [None if places is None or _is_in(one.data, out_of_reach) else one.data for one in stored]
    tails = read_tails(wanted, places) if places is not None else wanted
    reasons = ((one.uid, _why(one.data, tail)) for one, tail in zip(stored, tails, strict=True))
    return {uid: why for uid, why in reasons if why is not None}


def _is_in(data: bytes | None, places: Collection[int]) -> bool:
    """Return whether the arrays of a payload are in one of these places."""
    try:
        return bool(places) and data is not None and is_apart(data) and Extent.at_end_of(data).place in places
    except DecodeError:
        return False


def _why(data: bytes | None, tail: Any) -> str | None:
    if data is None:
        return MISSING
    try:
        if isinstance(tail, DecodeError):
            raise tail
        verify(data, tail)
    except DecodeError as error:
        return str(error)
    return None


def _find_payloads(reader: Reader, context: CheckContext) -> Sequence[Finding]:
    """Check whether every group has its payload, as it was written, and whether its texts can be read."""
    sizes = reader.read_any(lambda tx: tx.tuples(_GROUPS))
    chosen = sizes[:: len(sizes) // SAMPLE + 1] if context.quick else sizes
    found, done = _Pass(reader, context), 0
    for piece in in_pieces(chosen, itemgetter(1), _PIECE_GROUPS, _PIECE_BYTES):
        found.piece([uid for uid, _ in piece])
        done += len(piece)
        context.tell(done, len(chosen))
    context.damaged = found.reasons.keys() | found.texts.keys()
    note = f" (--quick: {len(chosen):,} of {groups(len(sizes))} read)" if len(chosen) < len(sizes) else ""
    findings = []
    if found.lost:
        findings.append(warning(f"arrays that are kept apart were not all checked: {found.lost}"))
    if found.texts:
        named = some([f"{name} of {uid}" for uid, bad in found.texts.items() for name in bad])
        what = f"texts of {groups(len(found.texts))} are damaged, and queries that meet them fail: {named}{note}"
        findings.append(repairable(what))
    if found.reasons:
        findings += reader.read_any(lambda tx: _of_damaged(tx.of(DEFAULT), found.reasons, note))
    without = ", without what is out of reach (see places)" if context.out_of_reach else ""
    return findings or [fine(f"{groups(found.read)} read, all payloads and texts as they were written{without}{note}")]


_IN_BUFFERS = "SELECT uid, error IS NOT NULL FROM rb_group WHERE uid {in:uids} ORDER BY uid"


def _of_damaged(tx: Transaction, reasons: dict[int, str], note: str) -> list[Finding]:
    there = dict(map(tuple, tx.tuples(_IN_BUFFERS, uids=list(reasons))))
    findings = []
    if new := [uid for uid, is_aside in there.items() if not is_aside]:
        named = some([f"{uid} ({reasons[uid]})" for uid in new], 3)
        findings.append(repairable(f"the payloads of {groups(len(new))} are damaged: {named}{note}"))
    if aside := [uid for uid, is_aside in there.items() if is_aside]:
        found = f"the payloads of {groups(len(aside))} are damaged, set aside already: {some(aside)}{note}"
        findings.append(warning(found, FORGET))
    if kept := sorted(reasons.keys() - there):
        found = f"the payloads of {groups(len(kept))} that only checkpoints have are damaged: {some(kept)}{note}"
        findings.append(problem(found, "buffer.drop_checkpoint(step), or restore without them"))
    return findings


def _repair_payloads(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Set aside groups that were found damaged, and still are; make texts anew from payloads, or remove them."""
    done, places = [], tx.places()
    reasons: dict[int, str] = {}
    uids = sorted(context.damaged)
    for start in range(0, len(uids), _MENDED_AT_ONCE):
        stored = _read(tx, uids[start : start + _MENDED_AT_ONCE])
        found = reasons_of(stored, places, context.out_of_reach)
        aside = {uid for uid, is_aside in tx.tuples(_IN_BUFFERS, uids=list(found)) if is_aside}
        reasons |= {uid: why for uid, why in found.items() if uid not in aside}
        for one in stored:
            if one.bad:
                _mend_texts(tx, one, places)
                done.append(f"mended {', '.join(one.bad)} of group {one.uid}")
    return [*done, *set_groups_aside(tx, reasons)]


def _mend_texts(tx: Transaction, stored: _Stored, places: Any) -> None:
    data, kind, anew = stored.data or b"", AS_DICTS.rollout_type, dict(_MADE_ANEW)
    if not anew.keys().isdisjoint(stored.bad):
        try:
            rollouts = AS_DICTS.decode(joined(data, read_tails([data], places)[0]))
        except DecodeError:
            pass
        else:
            anew["outline"] = dump_json(outline(rollouts, kind, Texts(data).find))
            anew["prompt"] = prompt_preview(rollouts, kind)
            marks = Marks.of(rollouts, kind)
            if tx.value(_STATUS, uid=stored.uid) == Status.EXPIRED:  # then all rollouts count as expired
                nothing: list[Any] = [None] * len(rollouts)
                staleness = [int(one.get("seq_staleness", 0) or 0) for one in rollouts]
                marks = Marks(nothing, nothing, nothing, [True] * len(rollouts), staleness)
            anew["marks"] = dump_json(marks.to_json())
    for name in stored.bad:
        mend = f"UPDATE {_TEXTS[name][0]} SET {name} = :value WHERE uid = :uid"  # noqa: S608
        tx.change(mend, value=anew.get(name), uid=stored.uid)


_STATUS = "SELECT l.status FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE g.uid = :uid"

PAYLOADS = Check("payloads", repairs=[_repair_payloads], alone=_find_payloads)

# Payloads that nothing refers to, and no sweep would delete.
_LEAKED = """rb_payload WHERE NOT EXISTS (SELECT 1 FROM rb_group g WHERE g.uid = rb_payload.uid)
    AND NOT EXISTS (SELECT 1 FROM rb_past p WHERE p.uid = rb_payload.uid AND p.removed_at IS NOT NULL)"""


def _find_leaked(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether every payload belongs to a group, or waits for the sweep."""
    if count := tx.value(f"SELECT count(*) FROM {_LEAKED}"):  # noqa: S608
        return [repairable(f"{count:,} payloads of groups that are gone, which nobody would delete")]
    return [fine("none")]


def _repair_leaked(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Delete payloads that nothing refers to."""
    gone = tx.values(f"DELETE FROM {_LEAKED} RETURNING file")  # noqa: S608
    count_gone(tx, gone)
    return [f"deleted {len(gone):,} leaked payloads"] if gone else []


LEAKED = Check("leaked payloads", _find_leaked, [_repair_leaked])
