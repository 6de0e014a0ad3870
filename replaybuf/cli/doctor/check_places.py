"""Checks of the rows of payload files, and of the places where the files are.

The files themselves are checked by reading all payloads (`check_payloads`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Final, NamedTuple

from replaybuf.cli.doctor import Examination, Finding, fine, in_one_transaction, verdict, warning
from replaybuf.common import units
from replaybuf.common.units import some
from replaybuf.errors import ConfigError, DecodeError, MissingDriverError, PayloadStoreError
from replaybuf.storage.decoding import PATIENCE
from replaybuf.storage.places.owners import Home, Marker, described, open_place, parse, recognise, take_over
from replaybuf.storage.places.store import MARKER, Extent, PlaceStore, file_name
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.schema.tables import IDENTITY
from replaybuf.storage.sql.statements.files import home_of, name_files, wrong_counts

_NOTHING_APART: Final = "none: all payloads are in the database"

# What the database records

_UNKNOWN = """
SELECT p.uid FROM rb_payload p
WHERE p.file IS NOT NULL AND NOT EXISTS (SELECT 1 FROM rb_file f WHERE f.id = p.file) ORDER BY p.uid"""


@in_one_transaction
def check_payload_files(tx: Transaction, about: Examination) -> Finding:
    """Check whether payloads and the rows of their files agree."""
    lost, wrong = tx.values(_UNKNOWN), wrong_counts(tx)
    said = [f"{units.number_of(len(lost), 'payload')} in files without a row: {some(lost)}"] if lost else []
    if wrong:
        counts = [f"{file_name(number)}: {there:,} there" for number, there in wrong.items()]
        said.append(f"numbers of groups in files are wrong: {some(counts, 3)}")
    [(files, count, size)] = tx.tuples(
        "SELECT count(*), coalesce(sum(groups), 0), coalesce(sum(bytes), 0) FROM rb_file WHERE groups >= 0"
    )
    kept = f"{units.number_of(int(count), 'payload')} of {units.size(int(size))}"
    counted = f"{units.number_of(files, 'file')} with {kept}, as counted" if files else _NOTHING_APART
    return verdict("; ".join(said), counted, cure=_mend_files)


def _mend_files(tx: Transaction) -> str:
    extents = []
    for data in tx.values("SELECT data FROM rb_payload WHERE uid {in:uids}", uids=tx.values(_UNKNOWN)):
        with suppress(DecodeError):  # its group is set aside (see payloads)
            extents.append(Extent.at_end_of(data))
    name_files(tx, extents)
    wrong = wrong_counts(tx)
    tx.each("UPDATE rb_file SET groups = :groups WHERE id = :id", [(there, file) for file, there in wrong.items()])
    noted = units.number_of(len({extent.file for extent in extents}), "file")
    return f"noted {noted} again, and counted the groups of {len(wrong):,}"


# Places


class _Place(NamedTuple):
    """A place of a database: its number and URL, the database's identity and location, some files that groups need."""

    number: int
    url: str
    identity: str
    home: Home
    files: Sequence[int]


def _places(tx: Transaction) -> list[_Place]:
    identity = tx.value("SELECT value FROM rb_info WHERE name = :name", name=IDENTITY) or ""
    home, some_files = home_of(tx), "SELECT id FROM rb_file WHERE place = :place AND groups > 0 LIMIT 100"
    return [
        _Place(number, url, identity, home, tx.values(some_files, place=number))
        for number, url in sorted(tx.places()[0].items())
    ]


def check_places(about: Examination) -> Iterator[Finding]:
    """Check whether each place can be reached and written, and is this database's; no transaction is open meanwhile.

    Unreachable places are recorded in `about.out_of_reach`. Whether the files are whole is seen by reading payloads.
    """
    places = about.read(_places)
    if not places:
        yield fine(_NOTHING_APART)
    for place in places:
        try:
            with closing(_open(place)) as store:
                marker = _within_patience(store, partial(recognise, store, place.identity, place.number))
                yield from [*_find_wrong(store, place, marker)] or [fine(place.url)]
        except PayloadStoreError as error:
            if place.files:  # otherwise no group depends on it
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
    """Call `ask` in a thread, which a hanging mount may block, and return its result. Raises PayloadStoreError."""
    answers: list[Marker | Exception] = []

    def answer() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=answer, name="replaybuf-doctor", daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)
    for found in answers:
        if isinstance(found, Exception):
            raise found
        return found
    raise PayloadStoreError(f"{store.url} didn't answer within {2 * PATIENCE:g} s: see that it is mounted")


def take_over_places(reader: Reader) -> list[str]:
    """Make this database the owner of its places: of those that belong to another copy of it, or have no marker.

    So it may write and delete there. Return what was done. Raises PayloadStoreError where a place can't be reached, or
    has none of the files of this database: it may be a mount point on which nothing is mounted.
    """
    done = []
    for place in Examination(reader).read(_places):
        with closing(_open(place)) as store:
            if _lacks_marker(store, {file_name(file) for file in place.files}):
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
    return any(file.name in files for file in store.files())
