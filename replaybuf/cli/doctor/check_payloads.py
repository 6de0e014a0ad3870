"""Checks of payloads, which are compared with their checksums, and of the texts stored with them.

In SQLite a damaged page may leave a text that is no longer UTF-8 or JSON: every query that reads it then fails.
(PostgreSQL doesn't store such texts.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from pydantic_core import from_json

from replaybuf.cli.doctor import Examination, Finding, fine, in_one_transaction, problem, warning
from replaybuf.common.progress import in_pieces
from replaybuf.common.units import groups, some
from replaybuf.errors import DecodeError, PayloadStoreError, StorageError
from replaybuf.storage.decoding import Places, extent_of, places_of, read_tails, wait_for
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.statements.counts import set_aside
from replaybuf.storage.sql.statements.fence import join
from replaybuf.storage.sql.statements.lanes import need_lanes
from replaybuf.values.codec.payload_format import has_size, verify
from replaybuf.values.rollouts.statuses import Status

_PIECE_BYTES = 16 * 1024 * 1024
_PIECE_GROUPS = 2000
#: The timeout for reading a piece's payloads from a place, in seconds.
_PATIENCE = 60.0
#: Classes of SQLSTATEs that say nothing of a group: resources are short, an operator or a timeout intervened.
_NO_DAMAGE = ("53", "57")
#: What to do with groups that were set aside.
_FORGET = 'buffer.delete({"uid": ...}) when nobody needs to know of them'

# The groups, including those of checkpoints.
_GROUPS = """
SELECT uid, bytes FROM rb_group
UNION ALL SELECT DISTINCT uid, bytes FROM rb_past p
    WHERE until IN (SELECT id FROM rb_checkpoint) AND NOT EXISTS (SELECT 1 FROM rb_group g WHERE g.uid = p.uid)
ORDER BY uid"""
_STORED_UIDS = "SELECT uid FROM rb_group WHERE uid {in:uids}"

#: The texts of a group: the table of each, whether it is JSON, and what it becomes if it can't be read.
_TEXTS: Mapping[str, tuple[str, bool, str | None]] = {
    "outline": ("rb_payload", True, "[]"),
    "prompt": ("rb_payload", False, None),
    "marks": ("rb_group", True, '{"oldest": [], "newest": [], "reward": []}'),
    "tags": ("rb_group", True, None),
    "scoped_key": ("rb_group", True, None),
    "error": ("rb_group", False, None),
}


class _Stored(NamedTuple):
    """A group as it is stored: its payload, its size if it is known, and the names of the texts that can't be read."""

    uid: int
    data: bytes | None
    size: int | None = None
    bad_texts: Sequence[str] = ()


def _read(tx: Transaction, uids: Collection[int]) -> list[_Stored]:
    """Read those of these groups that are there, or whose payloads are."""
    texts = "".join(f", CAST({name} AS BLOB)" for name in _TEXTS) if tx.dialect.name == "sqlite" else ""
    tables = "rb_payload p LEFT JOIN rb_group g ON g.uid = p.uid"
    rows = tx.tuples(f"SELECT p.uid, data, bytes{texts} FROM {tables} WHERE p.uid {{in:uids}}", uids=list(uids))  # noqa: S608
    stored = []
    for uid, data, size, *raw in rows:  # without texts on PostgreSQL
        damaged = [name for name, text in zip(_TEXTS, raw, strict=True) if not _can_be_read(name, text)] if raw else ()
        stored.append(_Stored(uid, data, size, damaged))
    missing = set(uids) - {item.uid for item in stored}
    return stored + [_Stored(uid, None) for uid in tx.values(_STORED_UIDS, uids=list(missing))] if missing else stored


def _can_be_read(name: str, raw: bytes | None) -> bool:
    try:
        if raw is not None:
            from_json(raw) if _TEXTS[name][1] else raw.decode()
    except ValueError:
        return False
    return True


class _Pass:
    """Reads groups in several transactions: a long one would block vacuuming and checkpoints.

    `reasons` says why groups are damaged, `texts` are those with texts that can't be read; `lost` is the first error of
    a place.
    """

    def __init__(self, examination: Examination) -> None:
        self._examination = examination
        self.read = 0
        self.reasons: dict[int, str] = {}
        self.texts: set[int] = set()
        self.lost: PayloadStoreError | None = None

    def piece(self, uids: Sequence[int]) -> None:
        """Read some groups. What can't be read of a damaged file is found by reading smaller pieces."""
        try:
            stored, places = self._examination.read(lambda tx: (_read(tx, uids), tx.places()))
        except StorageError as error:
            state = str(getattr(error.__cause__, "sqlstate", ""))
            if type(error) is not StorageError or state.startswith(_NO_DAMAGE):
                raise
            if len(uids) == 1:
                self.reasons[uids[0]] = f"it can't be read: {error}"
            else:
                self.piece(uids[: len(uids) // 2])
                self.piece(uids[len(uids) // 2 :])
            return
        self.read += len(stored)
        reasons = {item.uid: f"it can't be read: {', '.join(item.bad_texts)}" for item in stored if item.bad_texts}
        self.texts |= reasons.keys()
        tails = self._tails(stored, places)
        reasons |= {item.uid: cause for item, tail in zip(stored, tails, strict=True) if (cause := _damage(item, tail))}
        if reasons:  # those whose payloads aren't there any more were swept meanwhile
            self.reasons |= {row.uid: reasons[row.uid] for row in self._examination.read(lambda tx: _read(tx, reasons))}

    def _tails(self, stored: Sequence[_Stored], places: Places) -> Sequence[Any]:
        """Return the arrays of each payload that are in a file; None if they are not, or are out of reach."""
        unreachable = self._examination.out_of_reach
        try:
            if unnamed := places_of(item.data for item in stored) - places[0].keys():
                missing = f"the database lacks the place number {min(unnamed)}"
                raise PayloadStoreError(f"{missing}: open the buffer with the payloads= of the run, which names it")
            payloads = [None if self.lost or _place_of(item.data) in unreachable else item.data for item in stored]
            return wait_for(read_tails(payloads, places, _PATIENCE))
        except PayloadStoreError as error:
            self.lost = error
            return [None] * len(stored)


def _place_of(data: bytes | None) -> int | None:
    """Return the number of the place that has the arrays of a payload; None if they are in the database."""
    extent = extent_of(data)
    return None if extent is None else extent.place


def _damage(item: _Stored, tail: Any) -> str | None:
    data = item.data
    if data is None:
        return "its payload is missing"
    try:
        if isinstance(tail, DecodeError):
            raise tail
        verify(data, tail)
    except DecodeError as error:
        return str(error)
    if item.size is not None and not has_size(data, item.size):
        return f"its payload is another group's: it isn't of {item.size} bytes"
    return None


def check_payloads(examination: Examination) -> Iterator[Finding]:
    """Check whether every group has its payload, as it was written, and whether its texts can be read."""
    sizes = examination.read(lambda tx: tx.tuples(_GROUPS))
    scan, count = _Pass(examination), 0
    for piece in in_pieces(sizes, itemgetter(1), _PIECE_GROUPS, _PIECE_BYTES):
        scan.piece([uid for uid, _ in piece])
        count += len(piece)
        examination.tell(count, len(sizes))
    if scan.lost:
        yield warning(f"arrays that are kept apart were not all checked: {scan.lost}")
    if scan.reasons:
        yield from examination.read(lambda tx: list(_damage_findings(tx, scan.reasons, scan.texts)))
    elif not scan.lost:
        restriction = ", without what is out of reach (see places)" if examination.out_of_reach else ""
        summary = f"{groups(scan.read)} read, also those that only checkpoints have"
        yield fine(f"{summary}: all payloads and texts as they were written{restriction}")


_IN_BUFFERS = "SELECT uid, error IS NOT NULL FROM rb_group WHERE uid {in:uids} ORDER BY uid"


def _damage_findings(tx: Transaction, reasons: Mapping[int, str], texts: Collection[int]) -> Iterator[Finding]:
    in_buffers = dict(map(tuple, tx.tuples(_IN_BUFFERS, uids=list(reasons))))
    new = [uid for uid, is_aside in in_buffers.items() if not is_aside or uid in texts]
    known = [uid for uid in in_buffers if uid not in new]
    if new:
        examples = some([f"{uid} ({reasons[uid]})" for uid in new], 3)
        text = f"{groups(len(new))} can't be read (put lost files of payloads back before a repair): {examples}"
        yield problem(text, cure=partial(_set_aside, reasons={uid: reasons[uid] for uid in new}))
    if known:
        text = f"the payloads of {groups(len(known))} are damaged, set aside already: {some(known)}"
        yield warning(text, _FORGET)
    if uids := sorted(reasons.keys() - in_buffers):
        text = f"the payloads of {groups(len(uids))} that only checkpoints have are damaged: {some(uids)}"
        yield problem(text, "buffer.drop_checkpoint(step), or restore without them")


_FREE_GROUPS = """SELECT g.uid, l.buffer, l.task_name, l.status FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE g.uid {in:uids} AND NOT l.leased ORDER BY g.uid"""


def _set_aside(tx: Transaction, reasons: Mapping[int, str]) -> str:
    """Set damaged groups aside as FAILED, each with its reason as error, without their texts that can't be read.

    Archived groups stay ARCHIVED, and get the reason, too. Leased groups are left to their consumers. Files are not
    read again.
    """
    damaged = [
        one for one in _read(tx, reasons) if one.bad_texts or _place_of(one.data) is not None or _damage(one, None)
    ]
    for uid, name in [(item.uid, name) for item in damaged for name in item.bad_texts]:
        table, _, value = _TEXTS[name]
        tx.change(f"UPDATE {table} SET {name} = :value WHERE uid = :uid", value=value, uid=uid)  # noqa: S608
    homes: dict[tuple[str, str, Status], list[int]] = {}
    for uid, buffer, task_name, status in tx.tuples(_FREE_GROUPS, uids=[item.uid for item in damaged]):
        homes.setdefault((buffer, task_name, Status(status)), []).append(uid)
    sentences = []
    for (buffer, task_name, status), uids in homes.items():
        if status in (Status.ARCHIVED, Status.FAILED):
            update = "UPDATE rb_group SET error = :error WHERE uid = :uid"
            tx.each(update, [(reasons[uid], uid) for uid in uids])
            sentences.append(f"said so in the error of {groups(len(uids))} that are {status}: {some(uids)}")
        else:
            scoped = tx.of(Scope(buffer))
            join(scoped)
            [home] = need_lanes(scoped, [(task_name, status)]).values()
            set_aside(scoped, home, {uid: reasons[uid] for uid in uids})
            sentences.append(f"set {groups(len(uids))} of the task {task_name} aside as failed: {some(uids)}")
    return "; ".join(sentences) or ("left leased groups to their consumers" if damaged else "")


# Payloads that nothing refers to, and no sweep would delete.
_LEAKED = """SELECT count(*) FROM rb_payload WHERE NOT EXISTS (SELECT 1 FROM rb_group g WHERE g.uid = rb_payload.uid)
    AND NOT EXISTS (SELECT 1 FROM rb_past p WHERE p.uid = rb_payload.uid AND p.removed_at IS NOT NULL)"""


@in_one_transaction
def check_leaked(tx: Transaction, examination: Examination) -> Finding:
    """Check whether every payload belongs to a group, or waits for the sweep."""
    count = tx.value(_LEAKED)
    if not count:
        return fine("none")
    return warning(
        f"{count:,} payloads of groups that are gone, which take room",
        "replaybuf checkpoint save: the snapshot is without them",
    )
