"""Files that are written to a place by hand, and what is read of them."""

from __future__ import annotations

from typing import Any

from replaybuf.storage.places.store import ALIGNMENT, Extent, PlaceStore, file_name
from tests.places.conftest import PATIENCE

DATABASE = "d" * 32


def written(store: PlaceStore, number: int, *payloads: Any, sync: bool = True) -> list[Extent]:
    """Write a file with these payloads; return where they are."""
    at, extents, buffers = 0, [], []
    for raw in payloads:
        extents.append(Extent(1, number, at, len(raw)))
        buffers += [raw, bytes(-len(raw) % ALIGNMENT)]
        at += len(raw) + -len(raw) % ALIGNMENT
    store.write([(file_name(number), buffers)], sync=sync)
    return extents


def read(store: PlaceStore, *extents: Extent) -> list[Any]:
    found = store.read(extents, PATIENCE)
    return [one if isinstance(one, Exception) else bytes(one) for one in found]
