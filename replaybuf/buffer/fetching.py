"""Ray ObjectRefs in groups on their way into the store: their values are fetched first, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from replaybuf.codec.object_refs import UnfetchedError
from replaybuf.codec.payload import Codec
from replaybuf.errors import RolloutError
from replaybuf.storage.values import NewGroup

T = TypeVar("T")


async def fetching(codec: Codec, groups: Sequence[NewGroup], store: Callable[[], Awaitable[T]], *, free: bool) -> T:
    """Return the result of `store()`, which stores the groups; called again when it has found ObjectRefs in them.

    The objects that a round needs are fetched by one call of Ray, in another thread. Cancelled while it waits for them,
    nothing is stored. With `free`, the ObjectRefs in rollouts that are stored are then replaced by None.
    """
    while True:
        try:
            result = await store()
        except UnfetchedError as unfetched:
            missing, unfetched.refs = unfetched.refs, ()
        else:
            break
        await asyncio.to_thread(_fetch, codec, groups, missing)
        del missing  # the frame may live as long as an error's traceback
    for new in groups:
        if free and new.fetched:
            codec.release(new.rollouts)
        new.fetched = None
    return result


def _fetch(codec: Codec, groups: Sequence[NewGroup], met: Sequence[Any]) -> None:
    """Fetch the objects that were met, and those of the groups after, in one call."""
    missing = dict.fromkeys(met)
    for new in groups[1:]:
        try:
            codec.encode(new.rollouts, new.fetched or {})
        except UnfetchedError as unfetched:
            missing.update(dict.fromkeys(unfetched.refs))
        except RolloutError:  # storing it will say so
            continue
    fetched = codec.fetch(tuple(missing))
    for new in groups:
        new.fetched = {**(new.fetched or {}), **fetched}
