"""The synchronous faces have every call of the asynchronous ones, as it is there."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Iterator
from typing import Any

import pytest

from replaybuf import Lease, ReplayBuffer
from replaybuf.buffer.lease import Cursors
from replaybuf.chunks import ChunkBuffer
from replaybuf.chunks.chunk_config import SyncChunkBuffer
from replaybuf.sync import SyncCursors, SyncLease, SyncReplayBuffer

FACES: dict[type, type] = {
    ReplayBuffer: SyncReplayBuffer,
    Lease: SyncLease,
    Cursors: SyncCursors,
    ChunkBuffer: SyncChunkBuffer,
}
#: Calls whose results are of other classes, with the annotation of these.
OTHER_RESULTS = {
    "ReplayBuffer.adopt": "SyncLease[R]",
    "ReplayBuffer.find": "Items[StorageItem[R]]",
    "ReplayBuffer.lease_batch": "SyncLeasing[R]",
    "Cursors.claim": "SyncLease | None",
}
OTHER_DOCS = {"ReplayBuffer.lease_batch"}


def public(kind: type) -> Iterator[tuple[str, Any]]:
    yield from ((name, value) for name, value in inspect.getmembers(kind) if not name.startswith("_"))


CALLS = [(kind, name) for kind in FACES for name, value in public(kind) if inspect.isfunction(value)]


@pytest.mark.parametrize(("kind", "name"), CALLS, ids=lambda value: getattr(value, "__name__", value))
def test_a_call_is_there_with_its_signature_and_docstring(kind: type, name: str) -> None:
    theirs, ours, path = getattr(kind, name), getattr(FACES[kind], name), f"{kind.__name__}.{name}"
    wanted = inspect.signature(theirs)
    if path in OTHER_RESULTS:
        wanted = wanted.replace(return_annotation=OTHER_RESULTS[path])
    assert inspect.signature(ours) == wanted
    assert (ours.__doc__ == (theirs.__doc__ or "").replace("`await ", "`")) == (path not in OTHER_DOCS)
    assert not re.search(r"\basync\b|\bawait\b", ours.__doc__)
    assert not inspect.iscoroutinefunction(ours)


class Answering:
    """A buffer, a lease or cursors all of whose calls have the same answer."""

    def __getattr__(self, name: str) -> Any:
        async def answer(*args: Any, **options: Any) -> Any:
            return name, args, options

        return answer


COROUTINES = [call for call in CALLS if inspect.iscoroutinefunction(getattr(*call)) and call[1] != "claim"]


@pytest.mark.parametrize(("kind", "name"), COROUTINES, ids=lambda value: getattr(value, "__name__", value))
def test_a_call_is_made_with_its_arguments_and_its_end_waited_for(kind: type, name: str) -> None:
    """So that each law of the contract is a law of the synchronous calls, too."""
    face = object.__new__(FACES[kind])
    face.asynchronous = Answering()
    answer = getattr(face, name)(1, a=2)
    assert answer == (None if name == "close" else (name, (1,), {"a": 2}))


@pytest.mark.parametrize("kind", FACES)
def test_no_property_is_missing(kind: type) -> None:
    missing = {name for name, value in public(kind) if isinstance(value, property)} - set(dir(FACES[kind]))
    assert missing == set()


@pytest.mark.parametrize("kind", FACES)
def test_nothing_is_added(kind: type) -> None:
    added = {name for name, _ in public(FACES[kind])} - {name for name, _ in public(kind)}
    attributes = {ReplayBuffer: {"rollout_type", "cursors"}, Lease: {"seconds"}, ChunkBuffer: {"name", "buffer"}}
    assert added == attributes.get(kind, set())


def test_help_shows_the_signature_and_the_docstring() -> None:
    text = pydoc.render_doc(
        SyncReplayBuffer,
        renderer=pydoc.plaintext,  # type: ignore[attr-defined]
    )
    assert "put(self, items: 'Sequence[R]', task_name: 'str', *, model_step: 'int | None' = None" in text
    assert "Store a group of rollouts and return its uid; when it returns, the group is committed." in text
    assert "with buffer.lease_batch(" in text
