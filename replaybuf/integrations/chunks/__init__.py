"""Chunks of worker fragments: a thin layer over the public methods of `ReplayBuffer`."""

from replaybuf.integrations.chunks.chunk_buffer import ChunkBuffer, ChunkBufferConfig
from replaybuf.integrations.chunks.fragments import Chunk, Selection

__all__ = ["Chunk", "ChunkBuffer", "ChunkBufferConfig", "Selection"]
