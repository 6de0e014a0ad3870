"""Ray ObjectRefs in groups on their way into the store: their values are fetched first, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from replaybuf.codec import object_refs
from replaybuf.codec.object_refs import UnfetchedError
from replaybuf.codec.payload import Codec
from replaybuf.storage.values import NewGroup

T = TypeVar("T")


async def fetching(codec: Codec, groups: Sequence[NewGroup], store: Callable[[], Awaitable[T]], *, free: bool) -> T:
    """Return the result of `store()`, which stores the groups; called again when it has found ObjectRefs in them.

    The objects that a round needs are fetched by one call of Ray, in another thread. With `free` they are deleted from
    Ray's store when the groups are in this one. Cancelled while it waits for Ray, nothing is stored.
    """
    while True:
        try:
            result = await store()
        except UnfetchedError as unfetched:
            missing = unfetched.refs
        else:
            refs = {ref for new in groups for ref in new.fetched}
            if free and refs:
                object_refs.free(refs)
            return result
        fetched = await asyncio.to_thread(codec.fetch, missing)
        for new in groups:
            new.fetched.update(fetched)
