"""Checks of files with payloads and of their places: the database's records compared with what is there.

Checksums of payloads in files are verified with all others (`check_payloads`).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from typing import Final, NamedTuple

from replaybuf.cli.doctor import Check, CheckContext, Finding, Severity, fine, problem, repairable, warning
from replaybuf.cli.doctor.check_database import LITTLE_SPACE
from replaybuf.common import units
from replaybuf.common.units import some
from replaybuf.errors import ConfigError, DecodeError, MissingDriverError, PayloadStoreError
from replaybuf.storage.decoding import PATIENCE
from replaybuf.storage.places.owners import Home, Marker, described, open_place, parse, recognise, take_over
from replaybuf.storage.places.store import MARKER, Extent, PlaceStore, StoredFile, file_name, file_number
from replaybuf.storage.sql.engine.transaction import DEFAULT, Transaction
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.schema.tables import IDENTITY
from replaybuf.storage.sql.statements.files import disown, home_of, name_files, wrong_counts

#: Files and objects without a row are left alone for this time: a process may be writing them.
YOUNG_SECONDS: Final = 3600.0
#: The most of them deleted by one repair, which blocks all writers.
_DELETED_AT_ONCE = 1000

_LACKING: Final = (
    "put the files back, then replaybuf requeue --status failed brings back groups that were set aside for it; else "
    "--repair sets the others aside (see payloads), and replaybuf rm --status failed removes them"
)

# What the database records

_UNKNOWN = """
SELECT p.uid FROM rb_payload p
WHERE p.file IS NOT NULL AND NOT EXISTS (SELECT 1 FROM rb_file f WHERE f.id = p.file) ORDER BY p.uid"""


def _find_files(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether payloads and files agree."""
    found = []
    if lost := tx.values(_UNKNOWN):
        found.append(repairable(f"{units.number_of(len(lost), 'payload')} in files without a row: {some(lost)}"))
    if wrong := wrong_counts(tx):
        counts = [f"{file_name(number)}: {there:,} there" for number, there in wrong.items()]
        found.append(repairable(f"numbers of groups in files are wrong: {some(counts, 3)}"))
    [(files, count, size)] = tx.tuples(
        "SELECT count(*), coalesce(sum(groups), 0), coalesce(sum(bytes), 0) FROM rb_file WHERE groups >= 0"
    )
    kept = f"{units.number_of(int(count), 'payload')} of {units.size(int(size))}"
    return found or [fine(f"{units.number_of(files, 'file')} with {kept}, as counted" if files else _NOTHING_APART)]


_NOTHING_APART = "none: all payloads are in the database"


def _repair_files(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Add rows of files that lack one, and count the groups in files anew."""
    done, extents = [], []
    lost = tx.values(_UNKNOWN)
    for data in tx.values("SELECT data FROM rb_payload WHERE uid {in:uids}", uids=lost) if lost else ():
        try:
            extents.append(Extent.at_end_of(data))
        except DecodeError:
            continue
    name_files(tx, extents)
    if extents:
        done.append(f"noted {units.number_of(len({one.file for one in extents}), 'file')} anew")
    if wrong := wrong_counts(tx):
        tx.each("UPDATE rb_file SET groups = :groups WHERE id = :id", [(there, one) for one, there in wrong.items()])
        done.append(f"counted the groups of {units.number_of(len(wrong), 'file')} anew")
    return done


# What exists


class _Place(NamedTuple):
    """A place of a database: its number and URL, the database's identity, and its location."""

    number: int
    url: str
    identity: str
    home: Home


def _places(tx: Transaction) -> list[_Place]:
    identity = tx.value("SELECT value FROM rb_info WHERE name = :name", name=IDENTITY) or ""
    home = home_of(tx)
    return [_Place(number, url, identity, home) for number, url in sorted(tx.places()[0].items())]


#: The files and objects of a place that the database has rows for, by name, with the bytes of needed ones.
_Known = dict[str, int | None]


def _known(tx: Transaction) -> dict[int, _Known]:
    """Return the known files of each place, by its number."""
    found: dict[int, _Known] = defaultdict(dict)
    for place, number, size, groups in tx.tuples("SELECT place, id, bytes, groups FROM rb_file WHERE groups >= 0"):
        found[place][file_name(number)] = size if groups else None
    return found


def _check_places(reader: Reader, context: CheckContext) -> Sequence[Finding]:
    """Compare the files in each place with the database's rows; no transaction is open meanwhile.

    Unreachable places are recorded in `context.out_of_reach`, files without a row in `context.unnamed`.
    """
    places, known = reader.read_any(lambda tx: (_places(tx.of(DEFAULT)), _known(tx.of(DEFAULT))))
    found: list[Finding] = []
    for place in places:
        ours = known[place.number]
        try:
            with closing(_open(place)) as store:
                if (marker := _recognise(store, place, ours)) is None:
                    found.append(repairable(f"{place.url} has lost its {MARKER}, or it can't be read; files are there"))
                    context.out_of_reach.add(place.number)
                    continue
                there = {one.name: one for one in store.files() if file_number(one.name) is not None}
                own = marker.belongs_to(place.home)
                wrong = list(_find_room(store)) if own else [_of_a_copy(place.url, marker)]
        except PayloadStoreError as error:
            if ours:  # otherwise no group depends on it
                found.append(warning(f"{error}; what is there was not checked", "then run replaybuf doctor again"))
                context.out_of_reach.add(place.number)
            continue
        now = reader.read_any(lambda tx: _known(tx.of(DEFAULT)))[place.number]  # leaves out files deleted meanwhile
        wrong += _compare(place, {name: size for name, size in ours.items() if now.get(name) is not None}, there)
        if own:
            wrong += _find_unnamed(place, [one for one in there.values() if one.name not in {*now, *ours}], context)
        found += wrong or [fine(f"{place.url}: {units.number_of(len(there), 'file')}")]
    return found or [fine(_NOTHING_APART)]


def _of_a_copy(url: str, marker: Marker) -> Finding:
    return warning(
        f"{url} has the payloads of {described(marker.home)}, and this database is a copy of that: it reads there, and "
        "deletes nothing",
        "once nobody uses the other any more: replaybuf doctor URL --take-over",
    )


def _find_room(store: PlaceStore) -> Iterator[Finding]:
    """Yield what is wrong if this user may not write there, or little space is free."""
    try:
        store.check_may_write()
    except PayloadStoreError as error:
        yield warning(f"{error}; puts with arrays that belong there fail")
        return
    free = store.free_bytes()
    if free is not None and free < LITTLE_SPACE:
        what = f"{units.size(free)} free in {store.url}"
        yield problem(what, "free some space: puts with arrays fail when there is none")


def _open(place: _Place) -> PlaceStore:
    """Return the store of a place. Raises PayloadStoreError."""
    try:
        return open_place(place.url, PATIENCE)
    except (ConfigError, MissingDriverError) as error:
        raise PayloadStoreError(str(error)) from error


def _recognise(store: PlaceStore, place: _Place, ours: Collection[str]) -> Marker | None:
    """Return the marker if the place has this number in this database; None if only its marker was lost.

    Without any of its files it may be a mount point on which nothing is mounted. A thread of its own asks, since a
    mount may hang. Raises PayloadStoreError.
    """
    asked = Future[Marker | None]()

    def ask() -> None:
        try:
            asked.set_result(recognise(store, place.identity, place.number))
        except PayloadStoreError as error:
            asked.set_result(None) if _lacks_marker(store, ours) else asked.set_exception(error)
        except Exception as error:
            asked.set_exception(error)

    threading.Thread(target=ask, name="replaybuf-doctor", daemon=True).start()
    try:
        return asked.result(2 * PATIENCE)
    except TimeoutError:
        what = f"{store.url} didn't answer within {2 * PATIENCE:g} s: see that it is mounted"
        raise PayloadStoreError(what) from None


def _lacks_marker(store: PlaceStore, ours: Collection[str]) -> bool:
    """Return whether a place has some of these files, and no marker that can be read."""
    try:
        if (found := store.read_marker()) is not None:
            parse(store, found)
            return False
    except PayloadStoreError:
        pass
    try:
        return any(one.name in ours for one in store.files())
    except PayloadStoreError:
        return False


def _compare(place: _Place, ours: _Known, there: dict[str, StoredFile]) -> Iterator[Finding]:
    """Yield what is wrong with files that the database needs."""
    if lacking := sorted(ours.keys() - there):
        gone = f"{place.url} lacks {units.number_of(len(lacking), 'file')} with payloads of groups: {some(lacking)}"
        yield problem(gone, _LACKING)
    if short := [name for name, size in sorted(ours.items()) if name in there and there[name].nbytes < (size or 0)]:
        cut = f"{units.number_of(len(short), 'file')} in {place.url} were cut short: {some(short)}"
        yield problem(cut, _LACKING)


def _find_unnamed(place: _Place, files: Sequence[StoredFile], context: CheckContext) -> Iterator[Finding]:
    """Yield a finding if some of these files, which have no row, are so old that no process can be writing them."""
    old = sorted((one for one in files if one.written_at <= time.time() - YOUNG_SECONDS), key=lambda one: one.name)
    if old:
        context.unnamed[place.number] = [number for one in old if (number := file_number(one.name)) is not None]
        size = units.size(sum(one.nbytes for one in old))
        what = f"{units.number_of(len(old), 'file')} of {size} in {place.url} that this database doesn't name"
        yield repairable(
            f"{what}, older than an hour: {some([one.name for one in old])}. A crash left them, or this is an older "
            "copy of the database: use the newer one if there is, because --repair deletes them, and so does a run a "
            "day later",
            level=Severity.WARNING,
        )


def _repair_places(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Write lost markers anew, and record the files found without a row that still have none as nobody's."""
    done, known = [], _known(tx)
    for place in _places(tx):
        if place.number in context.out_of_reach:
            with suppress(PayloadStoreError), closing(_open(place)) as store:
                if _recognise(store, place, known[place.number]) is None:
                    store.replace_marker(Marker(place.identity, place.number, place.home).packed())
                    done.append(f"wrote {MARKER} in {place.url} anew")
    if context.unnamed and tx.values(_UNKNOWN):
        return [*done, "left files that the database doesn't name, because rows of others are missing"]
    for number, found in context.unnamed.items():
        context.nobodys[number] = disown(tx, number, found[:_DELETED_AT_ONCE])
    return done


def _delete_nobodys(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Delete the files that `_repair_places` has recorded as nobody's, now that this is committed."""
    done = []
    for place in _places(tx):
        if found := context.nobodys.get(place.number):
            with closing(_open(place)) as store:
                marker = _recognise(store, place, ())
                if marker is None or not marker.belongs_to(place.home):
                    continue
                store.delete([file_name(one) for one in found])
            more = len(context.unnamed[place.number]) - _DELETED_AT_ONCE
            again = f"; {more:,} more are left: repair again" if more > 0 else ""
            done.append(f"deleted {units.number_of(len(found), 'file')} in {place.url} that nothing names{again}")
    return done


CHECKS = (
    Check("payload files", _find_files, [_repair_files]),
    Check("places", repairs=[_repair_places, _delete_nobodys], alone=_check_places),
)


def take_over_places(reader: Reader) -> list[str]:
    """Make this database the owner of places that belong to another copy of it, so that it may write and delete there.

    Return what was done. Raises PayloadStoreError where a place can't be reached.
    """
    done = []
    for place in reader.read_any(lambda tx: _places(tx.of(DEFAULT))):
        with closing(open_place(place.url, PATIENCE)) as store:
            marker = recognise(store, place.identity, place.number)
            if not marker.belongs_to(place.home):
                take_over(store, place.home)
                done.append(f"{place.url} is this database's now, and no longer that of {described(marker.home)}")
    return done
