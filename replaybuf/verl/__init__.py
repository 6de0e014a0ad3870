"""verl: its batches as groups of rollouts, and its message queue over a buffer. `docs/frameworks/verl.md`."""

from replaybuf.verl.data_proto import from_groups, to_groups
from replaybuf.verl.queue import BufferQueueClient

__all__ = ["BufferQueueClient", "from_groups", "to_groups"]
