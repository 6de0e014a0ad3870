"""Checks of the database itself: its pages, the schema, the rows of payload files and their places.

The files themselves are checked by reading all payloads (`check_payloads`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Final, NamedTuple, TypeVar

from replaybuf.cli.doctor import REPAIR, Examination, Finding, fine, in_one_transaction, problem, verdict, warning
from replaybuf.common import units
from replaybuf.common.units import some
from replaybuf.errors import DecodeError, PayloadStoreError, StorageError
from replaybuf.storage.decoding import PATIENCE, in_thread, wait_for
from replaybuf.storage.places.owners import (
    Home,
    Marker,
    described,
    open_known,
    open_place,
    parse,
    recognise,
    take_over,
)
from replaybuf.storage.places.store import MARKER, Extent, PlaceStore, file_name
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.schema import HEAD, check_schema
from replaybuf.storage.sql.schema.create import create_index, create_views, drop_views
from replaybuf.storage.sql.schema.tables import IDENTITY, metadata
from replaybuf.storage.sql.schema.views import VIEWS
from replaybuf.storage.sql.statements.files import home_of, name_files, wrong_counts

T = TypeVar("T")

SAVE_THE_REST = "stop the run, and save what can be read: docs/outages.md, What is left of a damaged file"

_MOST_MESSAGES = 100
#: The timeout of taking a place over, which may list all of its files.
_LISTING_SECONDS = 600.0

_NOTHING_APART: Final = "none: all payloads are in the database"


# REINDEX mends an index that differs from its table.
_INDEX_MESSAGE = re.compile(r"missing from index |wrong # of entries in index |non-unique entry in index |out of order")


@in_one_transaction
def check_integrity(tx: Transaction, examination: Examination) -> Finding:
    """Run SQLite's own check of all pages."""
    rows = tx.values(f"PRAGMA integrity_check({_MOST_MESSAGES})")
    messages = [str(row).replace("*** in database main ***\n", "") for row in rows if row != "ok"]
    defect = f"PRAGMA integrity_check: {some(messages, 3)}" if messages else ""
    mend = (REPAIR, _reindex) if all(map(_INDEX_MESSAGE.search, messages)) else (SAVE_THE_REST, None)
    return verdict(defect, "PRAGMA integrity_check found nothing", *mend)


def _reindex(tx: Transaction) -> str:
    tx.run("REINDEX")
    return "made all indexes again"


# The schema


@in_one_transaction
def check_revision(tx: Transaction, examination: Examination) -> Finding:
    """Check the revision of the schema."""
    try:
        if check_schema(tx, examination.reader.where):
            return fine(f"schema {HEAD}")
    except StorageError as error:
        return problem(str(error), "")
    if examination.reader.path is None:
        mend = "the first run makes them, if its role may: try it with --probe; if there was one, check the name"
        return warning("no replaybuf tables yet", mend)
    return problem("no replaybuf tables", "check the name, or wait until a run has opened it")


_USABLE_INDEXES = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'index'",
    "postgresql": """SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indisvalid AND c.relnamespace = current_schema()::regnamespace""",
}
_INDEXES = {str(index.name): index for table in metadata.tables.values() for index in table.indexes}


@in_one_transaction
def check_indexes(tx: Transaction, examination: Examination) -> Finding:
    """Check whether all indexes and views exist, and whether all indexes were finished."""
    missing = [*_lost_indexes(tx), *_lost_views(tx)]
    defect = f"missing, or not finished: {some(missing)}" if missing else ""
    return verdict(defect, f"all indexes, and all {len(VIEWS)} views", cure=_make_indexes)


def _lost_indexes(tx: Transaction) -> list[str]:
    return sorted(_INDEXES.keys() - set(tx.values(_USABLE_INDEXES[tx.dialect.name])))


def _lost_views(tx: Transaction) -> list[str]:
    return sorted(set(VIEWS).difference(tx.values("{views}")))


def _make_indexes(tx: Transaction) -> str:
    indexes, views = _lost_indexes(tx), _lost_views(tx)
    for name in indexes:
        tx.run(f"DROP INDEX IF EXISTS {name}")
        create_index(tx, _INDEXES[name])
    if views:
        drop_views(tx)
        create_views(tx)
    return f"made {', '.join([*indexes, *views])}"


# Payload files, and their places

_UNKNOWN = """
SELECT p.uid FROM rb_payload p
WHERE p.file IS NOT NULL AND NOT EXISTS (SELECT 1 FROM rb_file f WHERE f.id = p.file) ORDER BY p.uid"""


@in_one_transaction
def check_payload_files(tx: Transaction, examination: Examination) -> Finding:
    """Check whether payloads and the rows of their files agree."""
    orphans, corrections = tx.values(_UNKNOWN), wrong_counts(tx)
    defects = [f"{units.number_of(len(orphans), 'payload')} in files without a row: {some(orphans)}"] if orphans else []
    if corrections:
        counts = [f"{file_name(number)}: {actual:,} there" for number, actual in corrections.items()]
        defects.append(f"numbers of groups in files are wrong: {some(counts, 3)}")
    [(files, count, size)] = tx.tuples(
        "SELECT count(*), coalesce(sum(groups), 0), coalesce(sum(bytes), 0) FROM rb_file WHERE groups >= 0"
    )
    content = f"{units.number_of(int(count), 'payload')} of {units.size(int(size))}"
    summary = f"{units.number_of(files, 'file')} with {content}, as counted" if files else _NOTHING_APART
    return verdict("; ".join(defects), summary, cure=_mend_files)


def _mend_files(tx: Transaction) -> str:
    extents = []
    for data in tx.values("SELECT data FROM rb_payload WHERE uid {in:uids}", uids=tx.values(_UNKNOWN)):
        with suppress(DecodeError):  # its group is set aside (see payloads)
            extents.append(Extent.at_end_of(data))
    name_files(tx, extents)
    changes = wrong_counts(tx)
    tx.each("UPDATE rb_file SET groups = :groups WHERE id = :id", [(actual, file) for file, actual in changes.items()])
    files = units.number_of(len({extent.file for extent in extents}), "file")
    return f"noted {files} again, and counted the groups of {len(changes):,}"


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


def check_places(examination: Examination) -> Iterator[Finding]:
    """Check whether each place can be reached, and is this database's; no transaction is open meanwhile.

    Unreachable places are recorded in `out_of_reach`. Whether the files are whole is seen by reading payloads.
    """
    places = examination.read(_places)
    if not places:
        yield fine(_NOTHING_APART)
    for place in places:
        try:
            yield _ask(place, _examine_place, 2 * PATIENCE)
        except PayloadStoreError as error:
            examination.out_of_reach.add(place.number)
            yield warning(f"{error}; what is there was not checked", "then run replaybuf doctor again")


def _examine_place(place: _Place) -> Finding:
    """Return whether a place is this database's. Raises PayloadStoreError."""
    with closing(open_known(place.url, place.identity, place.number, PATIENCE)) as store:
        marker = parse(store, store.marker or b"")
        if not marker.belongs_to(place.home):
            text = f"{place.url} has the payloads of {described(marker.home)}, and this database is a copy of that: it "
            mend = "once nobody uses the other any more: replaybuf doctor URL --take-over"
            return warning(f"{text}reads there, and deletes nothing", mend)
    return fine(place.url)


def _ask(place: _Place, work: Callable[[_Place], T], patience: float) -> T:
    """Return `work(place)`, run in a thread, which a hanging mount may block. Raises PayloadStoreError."""
    return wait_for(in_thread(partial(work, place), patience, place.url))


def take_over_places(reader: Reader) -> list[str]:
    """Make this database the owner of its places: of those that belong to another copy of it, or have no marker.

    So it may write and delete there. Return what was done. Raises PayloadStoreError where a place can't be reached, or
    has none of the files of this database: it may be a mount point on which nothing is mounted.
    """
    sentences = [_ask(place, _take_over, _LISTING_SECONDS) for place in Examination(reader).read(_places)]
    return list(filter(None, sentences))


def _take_over(place: _Place) -> str:
    with closing(open_place(place.url, PATIENCE)) as store:
        if _lacks_marker(store, {file_name(file) for file in place.files}):
            store.write_marker(Marker(place.identity, place.number, place.home).packed(), replace=True)
            return f"wrote {MARKER} in {place.url} again"
        marker = recognise(store, place.identity, place.number)
        if marker.belongs_to(place.home):
            return ""
        take_over(store, place.home)
        return f"{place.url} is this database's now, and no longer that of {described(marker.home)}"


def _lacks_marker(store: PlaceStore, files: Collection[str]) -> bool:
    """Return whether a place has some of these files, and no marker that can be read."""
    try:
        if (raw_marker := store.read_marker()) is not None:
            parse(store, raw_marker)
            return False
    except PayloadStoreError:
        pass
    return any(name in files for name, _ in store.files())
