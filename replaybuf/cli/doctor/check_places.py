"""Checks of the rows of payload files, and of the places where the files are.

The files themselves are checked by reading all payloads (`check_payloads`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Final, NamedTuple

from replaybuf.cli.doctor import Examination, Finding, fine, in_one_transaction, repairable, warning
from replaybuf.common import units
from replaybuf.common.units import some
from replaybuf.errors import ConfigError, DecodeError, MissingDriverError, PayloadStoreError
from replaybuf.storage.decoding import PATIENCE
from replaybuf.storage.places.owners import Home, Marker, described, open_place, parse, recognise, take_over
from replaybuf.storage.places.store import MARKER, Extent, PlaceStore, file_name
from replaybuf.storage.sql.engine.transaction import DEFAULT, Transaction
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.schema.tables import IDENTITY
from replaybuf.storage.sql.statements.files import home_of, name_files, wrong_counts

_NOTHING_APART: Final = "none: all payloads are in the database"

# What the database records

_UNKNOWN = """
SELECT p.uid FROM rb_payload p
WHERE p.file IS NOT NULL AND NOT EXISTS (SELECT 1 FROM rb_file f WHERE f.id = p.file) ORDER BY p.uid"""


@in_one_transaction
def check_payload_files(tx: Transaction, about: Examination) -> Iterator[Finding]:
    """Check whether payloads and the rows of their files agree."""
    if lost := tx.values(_UNKNOWN):
        said = f"{units.number_of(len(lost), 'payload')} in files without a row: {some(lost)}"
        yield repairable(said, lambda: _note_files(tx, lost))
    if wrong := wrong_counts(tx):
        counts = [f"{file_name(number)}: {there:,} there" for number, there in wrong.items()]
        yield repairable(f"numbers of groups in files are wrong: {some(counts, 3)}", lambda: _count_files(tx))
    if not lost and not wrong:
        [(files, count, size)] = tx.tuples(
            "SELECT count(*), coalesce(sum(groups), 0), coalesce(sum(bytes), 0) FROM rb_file WHERE groups >= 0"
        )
        kept = f"{units.number_of(int(count), 'payload')} of {units.size(int(size))}"
        yield fine(f"{units.number_of(files, 'file')} with {kept}, as counted" if files else _NOTHING_APART)


def _note_files(tx: Transaction, uids: list[int]) -> str:
    extents = []
    for data in tx.values("SELECT data FROM rb_payload WHERE uid {in:uids}", uids=uids):
        try:
            extents.append(Extent.at_end_of(data))
        except DecodeError:  # its group is set aside (see payloads)
            continue
    name_files(tx, extents)
    return f"noted {units.number_of(len({one.file for one in extents}), 'file')} again"


def _count_files(tx: Transaction) -> str:
    wrong = wrong_counts(tx)
    tx.each("UPDATE rb_file SET groups = :groups WHERE id = :id", [(there, one) for one, there in wrong.items()])
    return f"counted the groups of {units.number_of(len(wrong), 'file')} again"


# Places


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


def _names_files(tx: Transaction, place: _Place) -> list[int]:
    """Return some files in a place that groups need."""
    return tx.values("SELECT id FROM rb_file WHERE place = :place AND groups > 0 LIMIT 100", place=place.number)


def check_places(about: Examination) -> Iterator[Finding]:
    """Check whether each place can be reached and written, and is this database's; no transaction is open meanwhile.

    Unreachable places are recorded in `about.out_of_reach`. Whether the files are whole is seen by reading payloads.
    """
    places = about.read(lambda tx: [(one, _names_files(tx, one)) for one in _places(tx)])
    if not places:
        yield fine(_NOTHING_APART)
    for place, files in places:
        try:
            with closing(_open(place)) as store:
                marker = _within_patience(store, partial(recognise, store, place.identity, place.number))
                yield from [*_find_wrong(store, place, marker)] or [fine(place.url)]
        except PayloadStoreError as error:
            if files:  # otherwise no group depends on it
                about.out_of_reach.add(place.number)
                yield warning(f"{error}; what is there was not checked", "then run replaybuf doctor again")


def _find_wrong(store: PlaceStore, place: _Place, marker: Marker) -> Iterator[Finding]:
    """Yield what is wrong if a place isn't this database's, or this user may not write there."""
    if not marker.belongs_to(place.home):
        what = f"{place.url} has the payloads of {described(marker.home)}, and this database is a copy of that: it "
        mend = "once nobody uses the other any more: replaybuf doctor URL --take-over"
        yield warning(f"{what}reads there, and deletes nothing", mend)
        return
    try:
        store.check_may_write()
    except PayloadStoreError as error:
        yield warning(f"{error}; puts with arrays that belong there fail")


def _open(place: _Place) -> PlaceStore:
    """Return the store of a place. Raises PayloadStoreError."""
    try:
        return open_place(place.url, PATIENCE)
    except (ConfigError, MissingDriverError) as error:
        raise PayloadStoreError(str(error)) from error


def _within_patience(store: PlaceStore, ask: Callable[[], Marker]) -> Marker:
    """Return what a thread of its own answers, since a mount may hang. Raises PayloadStoreError."""
    asked = Future[Marker]()

    def answer() -> None:
        try:
            asked.set_result(ask())
        except Exception as error:
            asked.set_exception(error)

    threading.Thread(target=answer, name="replaybuf-doctor", daemon=True).start()
    try:
        return asked.result(2 * PATIENCE)
    except TimeoutError:
        what = f"{store.url} didn't answer within {2 * PATIENCE:g} s: see that it is mounted"
        raise PayloadStoreError(what) from None


def take_over_places(reader: Reader) -> list[str]:
    """Make this database the owner of its places: of those that belong to another copy of it, or have no marker.

    So it may write and delete there. Return what was done. Raises PayloadStoreError where a place can't be reached, or
    has none of the files of this database: it may be a mount point on which nothing is mounted.
    """
    done = []
    for place, files in reader.read_any(
        lambda tx: [(one, _names_files(tx.of(DEFAULT), one)) for one in _places(tx.of(DEFAULT))]
    ):
        with closing(_open(place)) as store:
            if _lacks_marker(store, {file_name(one) for one in files}):
                store.write_marker(Marker(place.identity, place.number, place.home).packed(), replace=True)
                done.append(f"wrote {MARKER} in {place.url} again")
                continue
            marker = recognise(store, place.identity, place.number)
            if not marker.belongs_to(place.home):
                take_over(store, place.home)
                done.append(f"{place.url} is this database's now, and no longer that of {described(marker.home)}")
    return done


def _lacks_marker(store: PlaceStore, files: Collection[str]) -> bool:
    """Return whether a place has some of these files, and no marker that can be read."""
    try:
        if (found := store.read_marker()) is not None:
            parse(store, found)
            return False
    except PayloadStoreError:
        pass
    return any(one.name in files for one in store.files())
