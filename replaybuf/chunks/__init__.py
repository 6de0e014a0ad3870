"""Chunks of worker fragments: a thin layer over `ReplayBuffer`, which it uses by its public methods only."""

from replaybuf.chunks.buffer import ChunkBuffer
from replaybuf.chunks.config import ChunkBufferConfig, OldestVersionPolicy
from replaybuf.chunks.data import Chunk, Selection
from replaybuf.chunks.sync import SyncChunkBuffer

__all__ = ["Chunk", "ChunkBuffer", "ChunkBufferConfig", "OldestVersionPolicy", "Selection", "SyncChunkBuffer"]
