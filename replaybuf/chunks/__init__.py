"""Chunks of worker fragments: a thin layer over the public methods of `ReplayBuffer`."""

from replaybuf.chunks.chunk_buffer import ChunkBuffer, ChunkBufferConfig, SyncChunkBuffer
from replaybuf.chunks.fragments import Chunk, OldestVersionPolicy, Selection

__all__ = ["Chunk", "ChunkBuffer", "ChunkBufferConfig", "OldestVersionPolicy", "Selection", "SyncChunkBuffer"]
