"""The config of a chunk buffer, the rules of the store under it, and the chunk buffer without `await`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from replaybuf.chunks.chunk_buffer import ChunkBuffer
from replaybuf.config import Password, ReplayBufferConfig
from replaybuf.readable_config import ReadableConfig
from replaybuf.rules.policies import OrderTerm, ReplayPolicy
from replaybuf.storage.values import LEASE_SECONDS, LOCK_SECONDS, RECONNECT_SECONDS
from replaybuf.sync.buffer import SyncBuffer, SyncReplayBuffer, mirrored, shared
from replaybuf.sync.loop import end, run


class SyncChunkBuffer(SyncBuffer[ChunkBuffer]):
    """A `ChunkBuffer` whose calls block until they are done. Built by `ChunkBufferConfig(...).build_sync()`.

    What `SyncReplayBuffer` says of threads, processes and Ctrl-C is true of it, too.
    """

    name: str = shared("name", "The name under which the chunks are in the store.")

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


class OldestVersionPolicy(ReplayPolicy):
    """Lowest model version first, then oldest: the order in which chunks leave when there are too many.

    A chunk's priority is its version. Unlike `staleness` it doesn't depend on the time and the process of the put, so a
    new chunk is compared fairly even if its process hasn't noticed yet that the model has moved on.
    """

    name = "oldest_version"
    order = (OrderTerm("priority"), OrderTerm("timestamp_id"))


_AS_IN_THE_STORE = (
    *("url", "seed", "durability", "compression", "lock_timeout", "reconnect_timeout", "password"),
    "allow_network_filesystem",
)
_OF_THE_STORE = {*_AS_IN_THE_STORE, "max_chunks", "max_reuse"}


class ChunkBufferConfig(ReadableConfig):
    """Where chunks are kept, how large they are, and when they leave.

    `url`, `seed`, `durability`, `compression`, `lock_timeout`, `reconnect_timeout`, `password` and
    `allow_network_filesystem` are those of ReplayBufferConfig; `name` (`chunks`) tells several chunk buffers in one
    database apart (`replaybuf ls URL --buffer chunks`). All processes that open the same name should have the same
    rules.

    - `fragments_per_chunk`: the number of consecutive fragments of a worker in a chunk.
    - `max_chunks` (None): beyond it the chunks of the lowest version leave.
    - `max_staleness` (None): a chunk leaves when the model is more than this many versions ahead of it.
    - `max_reuse` (1): a chunk leaves with its n-th draw; 0 keeps it.
    - `on_problem` (`error`): what `put` does with a fragment that doesn't follow the ones before it: raise
      FragmentError, or count it and go on (`drop`).
    - `begin_sessions` (`advance`): a session is begun by `advance` only, or also by its first fragment (`put`): then
      one worker that names a wrong one empties the buffer.
    - `lease_seconds` (as of leases): if a process dies within `fetch`, the chunks that it drew are back after it.
    """

    env_prefix: ClassVar[str] = "REPLAYBUF_CHUNKS_"

    url: str
    name: str = Field(default="chunks", min_length=1, max_length=150)
    fragments_per_chunk: int = Field(ge=1, le=100_000)
    max_chunks: int | None = Field(default=None, ge=1)
    max_staleness: int | None = Field(default=None, ge=0, lt=2**53 - 1)
    max_reuse: int = Field(default=1, ge=0)
    on_problem: Literal["error", "drop"] = "error"
    begin_sessions: Literal["advance", "put"] = "advance"
    seed: int | None = None
    durability: Literal["normal", "full"] = "normal"
    compression: Literal["none", "zstd"] = "none"
    lock_timeout: float = Field(default=LOCK_SECONDS, gt=0, le=86_400)
    reconnect_timeout: float = Field(default=RECONNECT_SECONDS, ge=0, le=86_400)
    password: Password = None
    allow_network_filesystem: bool = False
    lease_seconds: float = Field(default=LEASE_SECONDS, gt=0, le=86_400)

    def build(self) -> ChunkBuffer:
        """Return the chunk buffer that this config describes; it connects at first use. Raises ConfigError."""
        own = {name: getattr(self, name) for name in type(self).model_fields if name not in _OF_THE_STORE}
        return ChunkBuffer(self.store().build(), **own)

    def build_sync(self) -> SyncChunkBuffer:
        """Return the chunk buffer as `build` does, for callers without `await`: the same calls, which block."""
        return SyncChunkBuffer(self.build())

    def store(self) -> ReplayBufferConfig[dict[str, Any]]:
        """Return the config of the underlying store, for a ReplayBuffer over the same groups."""
        return ReplayBufferConfig(
            name=self.name,
            policy="uniform",
            max_times_sampled=self.max_reuse,
            capacity=self.max_chunks,
            remover=OldestVersionPolicy,
            # A fetch holds its chunks for the time of a write: a failure of it says nothing against them.
            max_deliveries=0,
            rollout_type=dict,
            **{name: getattr(self, name) for name in _AS_IN_THE_STORE},
        )
