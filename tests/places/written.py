"""Segments that are written to a place by hand, and what is read of them."""

from __future__ import annotations

from typing import Any

from replaybuf.segments.places import in_frames
from replaybuf.segments.store import ALIGNMENT, Extent, Frame, Range, SegmentStore
from tests.segments.conftest import PATIENCE

DATABASE = "d" * 32


def framed(extent: Extent, raw: bytes) -> list[Any]:
    """The buffers of a frame."""
    header = Frame(extent.segment, extent.at, extent.size, in_frames(DATABASE), 0.0).packed()
    return [header, raw, bytes(-len(raw) % ALIGNMENT)]


def written(store: SegmentStore, segment: int, *payloads: bytes, file: int | None = None) -> list[Extent]:
    """Write a segment with these payloads, at once; return where they are."""
    writer = store.writer(f"{file or segment}.seg", anew=file is not None)
    at, extents, buffers = ALIGNMENT, [], []
    for raw in payloads:
        extents.append(Extent(1, segment, file or segment, at, len(raw)))
        buffers += framed(extents[-1], raw)
        at += len(raw) + -len(raw) % ALIGNMENT + ALIGNMENT
    writer.write(0, buffers, sync=True)
    writer.close()
    return extents


def read(store: SegmentStore, *extents: Extent) -> list[Any]:
    found = store.read([Range.whole(one) for one in extents], PATIENCE)
    return [one if isinstance(one, Exception) else bytes(one) for one in found]
