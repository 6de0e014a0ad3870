"""The chunk buffer without `await`."""

from __future__ import annotations

from replaybuf.chunks.buffer import ChunkBuffer
from replaybuf.sync.buffer import SyncReplayBuffer
from replaybuf.sync.loop import end, run
from replaybuf.sync.mirror import SyncBuffer, mirrored


class SyncChunkBuffer(SyncBuffer[ChunkBuffer]):
    """A `ChunkBuffer` whose calls block until they are done. Built by `ChunkBufferConfig(...).build_sync()`.

    What `SyncReplayBuffer` says of threads, processes and Ctrl-C is true of it, too.
    """

    @property
    def name(self) -> str:
        """The name under which the chunks are in the store."""
        return self.asynchronous.name

    @property
    def buffer(self) -> SyncReplayBuffer:
        """The buffer that this is a layer over."""
        return SyncReplayBuffer(self.asynchronous.buffer)

    close = mirrored(ChunkBuffer.close, end)
    put = mirrored(ChunkBuffer.put, run)
    forget = mirrored(ChunkBuffer.forget, run)
    expected = mirrored(ChunkBuffer.expected, run)
    dropped = mirrored(ChunkBuffer.dropped, run)
    advance = mirrored(ChunkBuffer.advance, run)
    fetch = mirrored(ChunkBuffer.fetch, run)
    prepared = mirrored(ChunkBuffer.prepared, run)
