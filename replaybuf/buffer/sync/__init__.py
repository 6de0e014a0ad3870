"""The synchronous API of a buffer: the same calls without `await`, for trainers and workers without an event loop.

    from replaybuf import ReplayBufferConfig

    with ReplayBufferConfig(url="sqlite:///run.db").build_sync() as buffer:
        buffer.put(group, "math")
        batch, counts = buffer.take_batch({"math": 64}, timeout=600)

`docs/calling.md` says when to use it.
"""

from replaybuf.buffer.sync.buffer import Items, SyncCursors, SyncLease, SyncLeasing, SyncReplayBuffer
from replaybuf.buffer.sync.loop import run

__all__ = ["Items", "SyncCursors", "SyncLease", "SyncLeasing", "SyncReplayBuffer", "run"]
