"""The contract of places for payloads: what is written is read, once and whole, and what isn't there is said so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import ConfigError, DecodeError, PayloadStoreError
from replaybuf.storage.places.owners import Marker, claim, recognise, take_over
from replaybuf.storage.places.store import (
    EXTENT_BYTES,
    Extent,
    GoneError,
    PlaceStore,
    file_name,
    file_number,
)
from tests.places.conftest import DATABASE, HOME, read, written

NUMBERS = st.integers(0, 2**64 - 1)
extents = st.builds(Extent, st.integers(0, 2**32 - 1), NUMBERS, NUMBERS, NUMBERS)


@given(extents, st.binary(max_size=100))
def test_an_extent_behind_any_head_is_read_as_it_was(extent: Extent, head: bytes) -> None:
    packed = extent.packed()
    assert len(packed) == EXTENT_BYTES
    assert Extent.at_end_of(head + packed) == extent


@given(extents, st.integers(0, EXTENT_BYTES * 8 - 1))
def test_an_extent_with_any_bit_changed_is_damaged(extent: Extent, bit: int) -> None:
    packed = bytearray(extent.packed())
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DecodeError):
        Extent.at_end_of(packed)


@given(st.binary(max_size=200))
def test_any_other_bytes_are_no_extent(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        Extent.at_end_of(raw)


@given(st.integers(0, 2**63 - 1), st.text(max_size=20))
def test_files_are_known_by_their_names(number: int, other: str) -> None:
    assert file_number(file_name(number)) == number
    assert file_number(other) is None
    assert file_number(f"{file_name(number)}.{other}") is None


def test_what_was_written_is_read(store: PlaceStore) -> None:
    """Of any length, in any order, more than once."""
    raws = [os.urandom(size) for size in (0, 1, 63, 64, 65, 100_000)]
    extents = written(store, 1, *raws)
    assert read(store, *extents, *reversed(extents)) == [*raws, *reversed(raws)]


def test_a_part_is_read_by_itself(store: PlaceStore) -> None:
    raw = os.urandom(10_000)
    [extent] = written(store, 1, raw)
    [part] = store.read([extent.part(5000, 64)])
    assert bytes(part) == raw[5000:5064]


def test_buffers_of_any_kind_are_written(store: PlaceStore) -> None:
    """More of them than the kernel takes in one call."""
    parts: Sequence[Any] = [memoryview(b"ab"), bytearray(b"cd"), b""] * 1000
    store.write([(file_name(1), parts), (file_name(2), [b"x"])], sync=False)
    joined = b"".join(parts)
    assert read(store, Extent(1, 1, 0, len(joined)), Extent(1, 2, 0, 1)) == [joined, b"x"]


def test_files_are_listed_and_deleted(store: PlaceStore) -> None:
    written(store, 1, b"one")
    written(store, 2, b"two")
    assert {name for name, _ in store.files()} == {file_name(1), file_name(2)}
    for _ in range(2):
        store.delete([file_name(1)])
    assert [name for name, _ in store.files()] == [file_name(2)]


def test_a_deleted_file_is_gone(store: PlaceStore) -> None:
    """The others of the same call are read."""
    [first] = written(store, 1, b"one")
    [second] = written(store, 2, b"two")
    store.delete([file_name(1)])
    parts = read(store, first, second, first)
    assert [isinstance(parts[0], GoneError), parts[1], isinstance(parts[2], GoneError)] == [True, b"two", True]


def test_a_file_that_was_cut_short_is_damaged(store: PlaceStore) -> None:
    """Also where nothing of the payload is there any more."""
    first, second = Extent(1, 1, 0, 100), Extent(1, 1, 128, 1000)
    written(store, 1, b"a" * 200)
    parts = store.read([first])
    assert bytes(parts[0]) == b"a" * 100
    [cut] = store.read([second])
    assert isinstance(cut, DecodeError) or len(cut) < second.size


def test_a_marker_is_written_once(store: PlaceStore) -> None:
    assert store.write_marker(b"another") is False
    assert claim(store, DATABASE, 7, HOME) == 1


def test_a_place_is_recognised_by_its_marker(store: PlaceStore) -> None:
    """One that has another marker, or another number, is not read from."""
    recognise(store, DATABASE, 1)
    with pytest.raises(PayloadStoreError, match="other payloads"):
        recognise(store, DATABASE, 2)
    with pytest.raises(PayloadStoreError, match="other payloads"):
        recognise(store, "e" * 32, 1)


def test_a_place_belongs_to_one_of_several_copies_of_a_database(store: PlaceStore) -> None:
    """The others may read."""
    copy = {**HOME, "path": "/runs/copy.db", "inode": "8"}
    with pytest.raises(ConfigError, match=f"payloads of {HOME['name']}, and this database is a copy of that"):
        claim(store, DATABASE, 1, copy)
    assert not recognise(store, DATABASE, 1).belongs_to(copy)
    take_over(store, copy)
    assert claim(store, DATABASE, None, copy) == 1
    with pytest.raises(ConfigError):
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
