"""Checks of files with payloads and of their places: the database's records compared with what is there.

Checksums of payloads in files are verified with all others (`check_payloads`).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, Final, NamedTuple

from replaybuf import units
from replaybuf.codec.stored import PATIENCE
from replaybuf.doctor import CheckContext, Finding, Severity, fine, problem, repairable, warning
from replaybuf.doctor.check_file import LITTLE_SPACE
from replaybuf.errors import ConfigError, DecodeError, MissingDriverError, PayloadStoreError
from replaybuf.places.owners import Home, Marker, described, open_place, parse, recognise, take_over
from replaybuf.places.store import EXTENT_BYTES, MARKER, Extent, PlaceStore, StoredFile, file_name, file_number
from replaybuf.storage.sql.engine.transaction import DEFAULT, Transaction
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction
from replaybuf.storage.sql.schema.tables import IDENTITY
from replaybuf.storage.sql.statements.files import disown, name_files, wrong_counts
from replaybuf.storage.sql.statements.home import home_of
from replaybuf.units import some

#: Files and objects without a row are left alone for this time: a process may be writing them.
YOUNG_SECONDS: Final = 3600.0
#: The most of them deleted by one repair, which blocks all writers.
_DELETED_AT_ONCE = 1000
_SAMPLE = 200
_ROWS_AT_ONCE = 10_000

_LACKING: Final = (
    "put the files back, then replaybuf requeue --status failed brings back groups that were set aside for it; else "
    "--repair sets the others aside (see checksums), and replaybuf rm --status failed removes them"
)

# What the database records

# The ends of the heads of payloads kept apart: they have the position of the rest.
_ENDS = f"""
SELECT p.uid, p.file, p.size, substr(p.data, length(p.data) - {EXTENT_BYTES - 1}) AS said
FROM rb_payload p WHERE p.file IS NOT NULL AND p.uid > :after ORDER BY p.uid LIMIT :most"""  # noqa: S608
_UNKNOWN = """
SELECT p.uid FROM rb_payload p
WHERE p.file IS NOT NULL AND NOT EXISTS (SELECT 1 FROM rb_file f WHERE f.id = p.file) ORDER BY p.uid"""


def _misplaced(tx: ReadTransaction, *, quick: bool) -> Iterator[tuple[int, Extent]]:
    """Yield the payloads whose row has another file or size than the payload itself, with its extent."""
    rows = tx.tuples(_ENDS, after=-1, most=_SAMPLE if quick else _ROWS_AT_ONCE)
    while rows:
        for uid, number, size, said in rows:
            try:
                extent = Extent.at_end_of(said)
            except (DecodeError, TypeError):
                continue  # damaged: the check of checksums reports it
            if (extent.file, extent.size) != (number, size):
                yield uid, extent
        rows = [] if quick else tx.tuples(_ENDS, after=rows[-1][0], most=_ROWS_AT_ONCE)


def find_files(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether payloads and files agree."""
    found = []
    if misplaced := list(_misplaced(tx, quick=context.quick)):
        uids = some([uid for uid, _ in misplaced])
        found.append(repairable(f"rows of payloads name other files than they do: {uids}"))
    if lost := tx.values(_UNKNOWN):
        found.append(repairable(f"{units.number_of(len(lost), 'payload')} in files without a row: {some(lost)}"))
    if wrong := wrong_counts(tx.of(DEFAULT)):
        counts = [f"{file_name(number)}: {there:,} there" for number, there in wrong.items()]
        found.append(repairable(f"numbers of groups in files are wrong: {some(counts, 3)}"))
    if found:
        return found
    [(files, count, size)] = tx.tuples(
        "SELECT count(*), coalesce(sum(groups), 0), coalesce(sum(bytes), 0) FROM rb_file WHERE groups >= 0"
    )
    kept = f"{units.number_of(int(count), 'payload')} of {units.size(int(size))}"
    return [fine(f"{units.number_of(files, 'file')} with {kept}, as counted")]


def repair_files(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Correct payloads' files by their heads, add rows of files that lack one, and count their groups anew."""
    done = []
    if misplaced := list(_misplaced(tx, quick=False)):
        for uid, extent in misplaced:
            where = {"uid": uid, "file": extent.file, "size": extent.size}
            tx.change("UPDATE rb_payload SET file = :file, size = :size WHERE uid = :uid", **where)
        done.append(f"corrected the files of {units.number_of(len(misplaced), 'payload')}")
    lost = tx.values(_UNKNOWN)
    extents = []
    for data in tx.values("SELECT data FROM rb_payload WHERE uid {in:uids}", uids=lost):
        try:
            extents.append(Extent.at_end_of(data))
        except DecodeError:
            continue
    name_files(tx, extents)
    if extents:
        done.append(f"noted {units.number_of(len({one.file for one in extents}), 'file')} anew")
    wrong = wrong_counts(tx)
    for number, there in wrong.items():
        tx.change("UPDATE rb_file SET groups = :groups WHERE id = :id", id=number, groups=there)
    return [*done, f"counted the groups of {units.number_of(len(wrong), 'file')} anew"] if wrong else done


# What exists


class _Place(NamedTuple):
    """A place of a database: its number and URL, the database's identity, and its location."""

    number: int
    url: str
    identity: str
    home: Home


def _places(tx: ReadTransaction) -> list[_Place]:
    identity = tx.value("SELECT value FROM rb_info WHERE name = :name", name=IDENTITY) or ""
    home = home_of(tx.of(DEFAULT))
    return [_Place(number, url, identity, home) for number, url in sorted(tx.places()[0].items())]


def _known(tx: ReadTransaction) -> dict[int, dict[str, int | None]]:
    """Return the files and objects of each place that the database has rows for, with the bytes of needed ones."""
    found: dict[int, dict[str, int | None]] = defaultdict(dict)
    for place, number, size, groups in tx.tuples("SELECT place, id, bytes, groups FROM rb_file WHERE groups >= 0"):
        found[place][file_name(number)] = size if groups else None
    return found


def check_places(reader: Reader, context: CheckContext) -> list[Finding]:
    """Compare the files in each place with the database's rows; no transaction is open meanwhile.

    Unreachable places are recorded in `context.out_of_reach`, files without a row in `context.unnamed`.
    """
    places, known = reader.read_any(lambda tx: (_places(tx), _known(tx)))
    found: list[Finding] = []
    texts = []
    for place in places:
        ours = known.get(place.number, {})
        try:
            marker, there, (free, short_of) = _read(place)
        except PayloadStoreError as error:
            if _lacks_marker(place, ours):
                found.append(repairable(f"{place.url} has lost its {MARKER}, or it can't be read; files are there"))
            elif ours:  # otherwise no group depends on it
                found.append(warning(f"{error}; what is there was not checked", "then run replaybuf doctor again"))
            context.out_of_reach |= {place.number} if ours else set()
            continue
        now = reader.read_any(_known).get(place.number, {})  # leaves out files deleted meanwhile
        there = {name: one for name, one in there.items() if name not in ours or name in now}
        ours = {name: size for name, size in ours.items() if now.get(name) is not None}
        own = marker.belongs_to(place.home)
        if not own:
            found.append(_of_a_copy(place.url, marker))
        found += _compare(place, ours, there, named=now.keys() if own else there.keys(), context=context)
        found += short_of
        young = len(_unnamed(there, now.keys(), younger=True))
        writing = f", and {units.number_of(young, 'new one')} that may be being written" if young else ""
        room = "" if free is None else f", {units.size(free)} free"
        texts.append(f"{place.url}: {units.number_of(len(there), 'file')}{writing}{room}")
    return found or [fine("; ".join(texts) or "none: all payloads are in the database")]


def _of_a_copy(url: str, marker: Marker) -> Finding:
    return warning(
        f"{url} has the payloads of {described(marker.home)}, and this database is a copy of that: it reads there, and "
        "deletes nothing",
        "once nobody uses the other any more: replaybuf doctor URL --take-over",
    )


_Room = tuple[int | None, list[Finding]]


def _room_in(store: PlaceStore) -> _Room:
    """Return the free bytes of a place (None if unknown), and findings about write access and low space."""
    try:
        store.check_may_write()
    except PayloadStoreError as error:
        return None, [warning(f"{error}; puts with arrays that belong there fail")]
    free = store.free_bytes()
    if free is None or free >= LITTLE_SPACE:
        return free, []
    what = f"{units.size(free)} free in {store.url}"
    return free, [problem(what, "free some space: puts with arrays fail when there is none")]


def _open(place: _Place) -> PlaceStore:
    """Return the store of a place. Raises PayloadStoreError."""
    try:
        return open_place(place.url, PATIENCE)
    except (ConfigError, MissingDriverError) as error:
        raise PayloadStoreError(str(error)) from error


def _read(place: _Place) -> tuple[Marker, dict[str, StoredFile], _Room]:
    """Return the marker and the files of a place, by name, and its room if this database may write there.

    Raises PayloadStoreError unless the place belongs to this database or to a copy with the same identity.
    """
    with closing(_open(place)) as store:
        marker = _recognise(store, place)
        there = {one.name: one for one in store.files() if file_number(one.name) is not None}
        return marker, there, _room_in(store) if marker.belongs_to(place.home) else (None, [])


def _recognise(store: PlaceStore, place: _Place) -> Marker:
    """Return the marker if the place has this number in this database."""
    found: Marker = _in_time(lambda: recognise(store, place.identity, place.number), store.url)
    return found


def _in_time(ask: Any, url: str) -> Any:
    """Return what a function returns in a thread of its own, since a mount may hang. Raises PayloadStoreError."""
    asked = Future[Any]()

    def answer() -> None:
        try:
            asked.set_result(ask())
        except Exception as error:
            asked.set_exception(error)

    threading.Thread(target=answer, name="replaybuf-doctor", daemon=True).start()
    try:
        return asked.result(2 * PATIENCE)
    except TimeoutError:
        raise PayloadStoreError(f"{url} didn't answer within {2 * PATIENCE:g} s: see that it is mounted") from None


def _lacks_marker(place: _Place, ours: Collection[str]) -> bool:
    """Return whether a place has files of this database, and no marker that can be read.

    Without any of its files it may be a mount point on which nothing is mounted.
    """

    def look() -> bool:
        with closing(_open(place)) as store:
            found = store.read_marker()
            try:
                if found is not None:
                    parse(store, found)
                    return False
            except PayloadStoreError:
                pass
            return any(one.name in ours for one in store.files())

    try:
        return bool(_in_time(look, place.url))
    except PayloadStoreError:
        return False


def _compare(
    place: _Place,
    ours: dict[str, int | None],
    there: dict[str, StoredFile],
    *,
    named: Collection[str],
    context: CheckContext,
) -> Iterator[Finding]:
    lacking = [name for name in sorted(ours) if name not in there]
    if lacking:
        gone = f"{place.url} lacks {units.number_of(len(lacking), 'file')} with payloads of groups: {some(lacking)}"
        yield problem(gone, _LACKING)
    short = [name for name, size in sorted(ours.items()) if name in there and there[name].nbytes < (size or 0)]
    if short:
        cut = f"{units.number_of(len(short), 'file')} in {place.url} were cut short: {some(short)}"
        yield problem(cut, _LACKING)
    unnamed = _unnamed(there, named)
    if unnamed:
        context.unnamed[place.number] = [number for name in unnamed if (number := file_number(name)) is not None]
        size = units.size(sum(there[name].nbytes for name in unnamed))
        what = f"{units.number_of(len(unnamed), 'file')} of {size} in {place.url} that this database doesn't name"
        yield repairable(
            f"{what}, older than an hour: {some(unnamed)}. A crash left them, or this is an older copy of the "
            "database: use the newer one if there is, because --repair deletes them, and so does a run a day later",
            level=Severity.WARNING,
        )


def _unnamed(there: dict[str, StoredFile], named: Collection[str], *, younger: bool = False) -> list[str]:
    """Return the files without a row: the old ones, which no process can be writing, or the `younger` ones."""
    latest = time.time() - YOUNG_SECONDS
    return sorted(name for name, one in there.items() if name not in named and (one.written_at > latest) is younger)


def repair_places(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Write lost markers anew, and record the files found without a row that still have none as nobody's."""
    done = []
    known = _known(tx)
    for place in _places(tx):
        if _lacks_marker(place, known.get(place.number, {})):
            with closing(_open(place)) as store:
                store.replace_marker(Marker(place.identity, place.number, place.home).packed())
            done.append(f"wrote {MARKER} in {place.url} anew")
    if context.unnamed and tx.values(_UNKNOWN):
        return [*done, "left files that the database doesn't name, because rows of others are missing"]
    for number, found in context.unnamed.items():
        context.nobodys[number] = disown(tx, number, found[:_DELETED_AT_ONCE])
    return done


def delete_nobodys(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Delete the files that `repair_places` has recorded as nobody's, now that this is committed."""
    done = []
    for place in _places(tx):
        if found := context.nobodys.get(place.number):
            with closing(_open(place)) as store:
                if not _recognise(store, place).belongs_to(place.home):
                    continue
                store.delete([file_name(one) for one in found])
            more = len(context.unnamed[place.number]) - _DELETED_AT_ONCE
            again = f"; {more:,} more are left: repair again" if more > 0 else ""
            done.append(f"deleted {units.number_of(len(found), 'file')} in {place.url} that nothing names{again}")
    return done


def take_over_places(reader: Reader) -> list[str]:
    """Make this database the owner of places that belong to another copy of it, so that it may write and delete there.

    Return what was done. Raises PayloadStoreError where a place can't be reached.
    """
    done = []
    for place in reader.read_any(_places):
        with closing(open_place(place.url, PATIENCE)) as store:
            marker = _recognise(store, place)
            if not marker.belongs_to(place.home):
                take_over(store, place.home)
                done.append(f"{place.url} is this database's now, and no longer that of {described(marker.home)}")
    return done
