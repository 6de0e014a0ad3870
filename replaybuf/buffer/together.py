"""Putting groups into several buffers: in one transaction where they are in the same database."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from replaybuf.buffer.putting import PutOptions
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.common.cancellation import to_its_end
from replaybuf.errors import FullError, InputError
from replaybuf.storage.values import UNSET, NewGroup, Unset


@dataclass(frozen=True, slots=True)
class Put:
    """A group for a buffer, as `ReplayBuffer.put` takes it."""

    buffer: ReplayBuffer[Any]
    items: Sequence[Any]
    task_name: str
    options: PutOptions


Parts = Sequence[tuple[ReplayBuffer[Any], NewGroup]]


async def put_together(puts: Sequence[Put], *, timeout: float | Unset | None = UNSET) -> list[int]:
    """Store groups in their buffers, all or none, and return their uids; when it returns, all are committed.

    Buffers of one database share one transaction. With several databases, such as `memory://` ones, each has its own,
    and all stay open until the groups of all are stored.

    Waits until there is room for all groups, and raises the errors of `ReplayBuffer.put`; then nothing is stored. An
    empty group, or one that would be dropped, raises InputError.
    """
    prepared = [await one.buffer.putting.prepare(one.items, one.task_name, **one.options) for one in puts]
    parts: list[tuple[ReplayBuffer[Any], NewGroup]] = []
    for one, (new, is_dropped) in zip(puts, prepared, strict=True):
        if new is None or is_dropped:
            raise InputError(f"a group for {one.buffer.storage.name} is empty or has expired; nothing was stored")
        parts.append((one.buffer, new))
    if not parts:
        return []
    first, news = parts[0][0].putting, [new for _, new in parts]
    patience = first.patience(timeout)
    return await first.fetching(news, lambda: _when_there_is_room(parts, patience))


class _ElsewhereError(Exception):
    """Not the awaited group, but the one with this index lacks room now."""


async def _when_there_is_room(parts: Parts, patience: float) -> list[int]:
    """Store the groups as soon as all have room, waiting for one after the other."""
    deadline = time.monotonic() + patience
    try:
        return await _store(parts)
    except FullError as error:
        full = error.place

    news = [new for _, new in parts]

    async def store(new: NewGroup) -> list[int]:
        try:
            return await _store(parts)
        except FullError as error:
            if news[error.place] is new:
                raise
            raise _ElsewhereError(error.place) from error

    while True:
        try:
            return await parts[full][0].waits.put(news[full], patience, store)
        except FullError as error:
            named = FullError(f"buffer {parts[full][0].storage.name!r}: {error}")
            named.place, named.diagnosis = full, error.diagnosis
            raise named from error.__cause__
        except _ElsewhereError as error:
            full = error.args[0]
            patience = max(0.0, round(deadline - time.monotonic(), 1))


def _store(parts: Parts) -> Awaitable[list[int]]:
    groups = [(buffer.storage, new) for buffer, new in parts]
    storing = groups[0][0].put_together(groups)
    # With `dropped` lists or several databases, a cancelled caller still waits for the end.
    apart = len({buffer.storage.database for buffer, _ in parts}) > 1
    return to_its_end(storing) if apart or any(new.dropped is not None for _, new in parts) else storing
