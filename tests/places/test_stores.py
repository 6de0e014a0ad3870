"""The contract of places for segments: what is written is read, once and whole, and what isn't there is said so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import DecodeError, PayloadStoreError
from replaybuf.segments.folder import FolderStore
from replaybuf.segments.places import CopyError, Marker, claim, recognise, take_over
from replaybuf.segments.store import ALIGNMENT, MARKER, Extent, GoneError, Range, SegmentStore
from tests.segments.conftest import HOME, PATIENCE
from tests.segments.written import DATABASE, framed, read, written


def test_what_was_written_is_read(store: SegmentStore) -> None:
    """Of any length, in any order, more than once."""
    raws = [os.urandom(size) for size in (0, 1, 63, 64, 65, 100_000)]
    extents = written(store, 1, *raws)
    assert read(store, *extents, *reversed(extents)) == [*raws, *reversed(raws)]


def test_a_part_is_read_by_itself(store: SegmentStore) -> None:
    raw = os.urandom(10_000)
    [extent] = written(store, 1, raw)
    [found] = store.read([Range(extent, 5000, 64)], PATIENCE)
    assert bytes(found) == raw[5000:5064]


def test_buffers_of_any_kind_are_written(store: SegmentStore) -> None:
    """More of them than the kernel takes in one call."""
    parts: Sequence[Any] = [memoryview(b"ab"), bytearray(b"cd"), b""] * 1000
    whole = b"".join(parts)
    extent = Extent(1, 1, 1, ALIGNMENT, len(whole))
    header, _, padding = framed(extent, whole)
    writer = store.writer("1.seg", anew=False)
    writer.write(0, [header, *parts, padding], sync=False)
    assert read(store, extent) == [whole]


def test_segments_are_listed_and_deleted(store: SegmentStore) -> None:
    written(store, 1, b"one")
    written(store, 2, b"two")
    listed = {one.name: one for one in store.segments()}
    assert set(listed) == {"1.seg", "2.seg"}
    assert listed["1.seg"].nbytes == 2 * ALIGNMENT
    store.delete("1.seg")
    store.delete("1.seg")
    assert [one.name for one in store.segments()] == ["2.seg"]


def test_raw_bytes_end_with_the_segment(store: SegmentStore) -> None:
    written(store, 1, b"x" * 64)
    assert store.read_raw("1.seg", 64, 1000) == b"x" * 64
    assert store.read_raw("1.seg", 5000, 10) == b""


def test_a_deleted_segment_is_gone(store: SegmentStore) -> None:
    """The others of the same call are read."""
    [one] = written(store, 1, b"one")
    [two] = written(store, 2, b"two")
    store.delete("1.seg")
    found = read(store, one, two)
    assert isinstance(found[0], GoneError)
    assert found[1] == b"two"


def test_a_segment_that_was_cut_short_is_damaged(store: SegmentStore) -> None:
    """Also where nothing of the payload is there any more."""
    first, second = written(store, 1, b"a" * 100, b"b" * 1000)
    raw = store.read_raw("1.seg", 0, 10_000)
    store.delete("1.seg")
    writer = store.writer("1.seg", anew=False)
    writer.write(0, [raw[:200]], sync=True)
    writer.close()
    found = store.read([Range.whole(first)], PATIENCE)
    assert bytes(found[0]) == b"a" * 100
    [cut] = store.read([Range.whole(second)], PATIENCE)
    assert isinstance(cut, DecodeError) or len(cut) < second.size


def test_a_marker_is_written_once(store: SegmentStore) -> None:
    assert store.write_marker(b"another") is False
    assert claim(store, DATABASE, 7, HOME) == 1


def test_whether_this_process_may_write_is_found_out_without_a_change(store: SegmentStore) -> None:
    marker = store.read_marker()
    store.check_may_write()
    assert store.read_marker() == marker
    assert [*store.segments()] == []


def test_a_place_is_recognised_by_its_marker(store: SegmentStore) -> None:
    """One that has another marker, or another number, is not read from: its segments have the same names."""
    recognise(store, DATABASE, 1)
    with pytest.raises(PayloadStoreError, match="other payloads"):
        recognise(store, DATABASE, 2)
    with pytest.raises(PayloadStoreError, match="other payloads"):
        recognise(store, "e" * 32, 1)


def test_a_place_belongs_to_one_of_several_copies_of_a_database(store: SegmentStore) -> None:
    """The others may read."""
    copy = {**HOME, "path": "/runs/copy.db", "inode": "8"}
    with pytest.raises(CopyError) as refused:
        claim(store, DATABASE, 1, copy)
    assert refused.value.home == HOME
    assert not recognise(store, DATABASE, 1).belongs_to(copy)
    take_over(store, copy)
    assert claim(store, DATABASE, None, copy) == 1
    with pytest.raises(CopyError):
        claim(store, DATABASE, 1, HOME)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"path": "/runs/moved.db"}, True),
        ({"inode": "8"}, True),  # it was put back from a backup
        ({"host": "node-2"}, True),  # a container with another name, and the same volume
        ({"host": "node-2", "inode": "8"}, False),
        ({"path": "/runs/copy.db", "inode": "8"}, False),
        ({"path": "/runs/run.db.bak", "inode": "8", "name": "/runs/run.db on node-1"}, False),
    ],
)
def test_a_home_is_known_by_two_of_its_facts(change: dict[str, str], same: bool) -> None:
    assert Marker(DATABASE, 1, HOME).belongs_to({**HOME, **change}) is same


def test_what_is_missing_in_another_place_is_not_damaged(folder: Path) -> None:
    """Such as where the mount of another run has taken the place's path."""
    store = FolderStore(str(folder))
    store.check_writable()
    claim(store, DATABASE, 1, HOME)
    [extent] = written(store, 1, b"one")
    (folder / MARKER).write_bytes(b'{"database": "other", "place": 1}')
    (folder / "segments" / "1.seg").unlink()
    store.forget()
    with pytest.raises(PayloadStoreError, match="another place than before"):
        read(store, extent)
    with pytest.raises(PayloadStoreError, match="another place than before"):
        store.writer("2.seg", anew=False)
