"""Laws of frames and extents: what lies in a segment is told, and nothing that wasn't written whole is taken for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaybuf.errors import DecodeError
from replaybuf.segments.store import ALIGNMENT, EXTENT_BYTES, Extent, Frame, GoneError, check_frame

NUMBERS = st.integers(0, 2**64 - 1)
DATABASE = bytes(range(16))
extents = st.builds(Extent, st.integers(0, 2**32 - 1), NUMBERS, NUMBERS, NUMBERS, NUMBERS)
frames = st.builds(
    Frame, NUMBERS, NUMBERS, NUMBERS, st.binary(min_size=16, max_size=16), st.floats(allow_nan=False, width=64)
)


def scan(read: Callable[[int, int], bytes], size: int) -> Iterator[Frame]:
    """Yield the frames of a segment of this size, as far as they follow one another; `read(at, size)` reads from it."""
    at, segment = 0, None
    while at + ALIGNMENT <= size:
        frame = Frame.parsed(read(at, ALIGNMENT))
        if frame is None or frame.at != at + ALIGNMENT or frame.segment != (segment or frame.segment):
            return
        segment, at = frame.segment, frame.end
        yield frame


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


@given(frames)
def test_a_frame_is_read_as_it_was(frame: Frame) -> None:
    packed = frame.packed()
    assert len(packed) == ALIGNMENT
    assert Frame.parsed(packed) == frame


@given(frames, st.integers(0, (ALIGNMENT - 4) * 8 - 1))
def test_a_frame_with_any_bit_changed_is_none(frame: Frame, bit: int) -> None:
    packed = bytearray(frame.packed())
    packed[bit // 8] ^= 1 << bit % 8
    found = Frame.parsed(packed)
    assert found is None or found == frame  # three bytes of the header mean nothing


@given(frames, extents)
def test_a_frame_is_that_of_one_extent_only(frame: Frame, extent: Extent) -> None:
    """By segment, place, size and database."""
    own = replace(extent, segment=frame.segment, at=frame.at, size=frame.size)
    check_frame(frame.packed(), own, frame.database)
    for other in (replace(own, segment=own.segment ^ 1), replace(own, at=own.at ^ 64), replace(own, size=own.size ^ 1)):
        with pytest.raises(GoneError):
            check_frame(frame.packed(), other, frame.database)
    with pytest.raises(DecodeError, match="another database"):
        check_frame(frame.packed(), own, bytes(b ^ 1 for b in frame.database))


def frames_of(segment: int, sizes: list[int], start: int = 0) -> list[Frame]:
    """Frames that follow one another in a segment."""
    at, found = start, []
    for size in sizes:
        found.append(Frame(segment, at + ALIGNMENT, size, DATABASE, 0.0))
        at = found[-1].end
    return found


def write(content: bytearray, written: list[Frame], upto: int | None = None) -> None:
    """Write frames into a file, of which only so many bytes arrive."""
    for frame in written:
        raw = frame.packed() + bytes([frame.segment % 251]) * frame.size
        start = frame.at - ALIGNMENT
        if upto is not None:
            raw = raw[: max(0, upto - start)]
        if not raw:
            return
        content.extend(bytes(max(0, start + len(raw) - len(content))))
        content[start : start + len(raw)] = raw


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.none() | st.integers(0, 2000)),
        min_size=1,
        max_size=4,
    )
)
def test_a_scan_finds_what_was_written_last_and_nothing_of_before(
    generations: list[tuple[list[int], int | None]],
) -> None:
    """Whatever was written over, and wherever a write was torn: only headers of one segment, that were written whole.

    Of the last generation those are found that follow one another from the beginning.
    """
    content = bytearray()
    everything: set[Frame] = set()
    for number, (sizes, upto) in enumerate(generations, 1):
        written = frames_of(number, sizes)
        write(content, written, upto)
        whole = [one for one in written if upto is None or one.at <= upto]
        # The end of a header is zeros, which may have been there before.
        nearly = [one for one in written if upto is not None and one.at - 4 <= upto < one.at]
        everything |= {*whole, *nearly}
    found = [*scan(lambda at, size: bytes(content[at : at + size]), len(content))]
    assert set(found) <= everything
    assert len({one.segment for one in found}) <= 1
    if whole:
        assert found in (whole, whole + nearly)
    assert [one.at for one in found] == sorted(one.at for one in found)


@given(st.binary(max_size=500))
def test_a_scan_of_any_bytes_finds_nothing(raw: bytes) -> None:
    assert [*scan(lambda at, size: raw[at : at + size], len(raw))] == []


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(0, 5))
def test_a_scan_ends_at_a_frame_of_another_place(sizes: list[int], moved: int) -> None:
    """A copy of a frame somewhere else is none."""
    content = bytearray()
    written = frames_of(7, sizes)
    write(content, written)
    moved %= len(written)
    start = written[moved].at - ALIGNMENT
    content[start : start + ALIGNMENT] = replace(written[moved], at=written[moved].at + ALIGNMENT).packed()
    assert [*scan(lambda at, size: bytes(content[at : at + size]), len(content))] == written[:moved]
