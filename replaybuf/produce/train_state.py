"""The trainer's state, which it publishes to the workers through the shared store: its step and its newest weights.

It is kept as a cursor: a small versioned value that is part of step checkpoints and snapshots. A restore brings the old
state back, until the trainer publishes anew.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from dataclasses import replace

import msgpack  # type: ignore[import-untyped]

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.checks import check_timeout
from replaybuf.errors import NotReadyError
from replaybuf.rules.train_state import TRAINER, TrainState

_LOOK_SECONDS = 0.1
_NOTHING: bytes = msgpack.packb(None)


async def publish(buffer: ReplayBuffer, state: TrainState | None, *, name: str = TRAINER) -> None:
    """Publish the trainer's state to all workers; None withdraws it. Raises FencedError, StorageError."""
    position, value = (0, _NOTHING) if state is None else (max(0, state.train_step), state.encode())
    while True:
        now = await buffer.cursors.read(name)
        if await buffer.cursors.move(replace(now, position=position, value=value)):
            return  # otherwise another trainer has published at this moment


async def published(buffer: ReplayBuffer, *, name: str = TRAINER) -> TrainState | None:
    """Return the state published last; None before the first, or if it was withdrawn.

    Raises InputError if it can't be read.
    """
    now = await buffer.cursors.read(name)
    return TrainState.decode(now.value) if now.version and now.value != _NOTHING else None


async def wait_published(
    buffer: ReplayBuffer, *, after: TrainState | None = None, timeout: float | None, name: str = TRAINER
) -> TrainState:
    """Return the published state as soon as it differs from `after`.

    Raises NotReadyError after `timeout` seconds (None: never), FencedError if the buffer was restored.
    """
    patience = check_timeout(timeout)
    deadline = time.monotonic() + patience
    news = "nothing" if after is None else f"nothing since step {after.train_step}"
    with closing(buffer.waits.for_trainer(patience)) as telling:
        while True:
            await buffer.check_fence()
            state = await published(buffer, name=name)
            if state is not None and state != after:
                return state
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                if telling.is_long:
                    why = await buffer.waits.why(telling.wait, await buffer.tallies(), over=True)
                    telling.give_up(why.sentence)
                raise NotReadyError(f"after {patience:g} s: the trainer has published {news}; is it running?")
            if telling.due:
                why = await buffer.waits.why(telling.wait, await buffer.tallies())
                telling.tell(why.sentence, str(why))
            await asyncio.sleep(min(_LOOK_SECONDS, remaining))
