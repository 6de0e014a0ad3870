"""Whole payloads for copies, joined with their arrays that are kept apart, whose files are kept meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from replaybuf.errors import DecodeError, ReplayBufError, SnapshotError
from replaybuf.storage.decoding import Places, in_thread, joined, names_its_arrays, read_tails
from replaybuf.storage.places.store import EXTENT_BYTES
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.transaction import Scope
from replaybuf.storage.sql.statements.files import SILENT_SECONDS, keep_files

#: Bytes of payloads in memory at a time.
BATCH_BYTES = 16 << 20
_RENEW_SECONDS = SILENT_SECONDS / 6
#: Timeout for reading a batch's payloads from a place, in seconds.
_PATIENCE = 60.0


@asynccontextmanager
async def keeping_files(engine: Database, scope: Scope) -> AsyncIterator[None]:
    """Keep all existing files during the block. Raises AccessError where there are any, with read-only access.

    Raises SnapshotError at the end if they weren't kept all the time, so that some may have been deleted.
    """
    if not (await engine.read(lambda tx: tx.places(), scope))[0]:
        yield
        return
    await engine.write(keep_files, scope)
    lapsed = False

    async def renew() -> None:
        nonlocal lapsed
        lapsed |= not await engine.write(keep_files, scope)

    async def go_on() -> None:
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            with suppress(ReplayBufError):
                await renew()

    renewing = asyncio.create_task(go_on())
    try:
        yield
        await renew()
        if lapsed:
            raise SnapshotError(
                f"the database didn't answer for {SILENT_SECONDS:g} s, and what is kept apart of payloads may have "
                "been deleted meanwhile: copy again"
            )
    finally:
        renewing.cancel()


async def read_whole(payloads: Sequence[bytes], places: Places) -> list[bytes]:
    """Return whole payloads; if the part kept apart is damaged, only the database's part of the payload.

    Raises PayloadStoreError where a place can't be reached.
    """
    whole = []
    for payload, tail in zip(payloads, await tails_of(payloads, places), strict=True):
        try:
            whole.append(joined(payload, tail))
        except DecodeError:
            whole.append(payload[:-EXTENT_BYTES] if names_its_arrays(payload) else payload)
    return whole


async def tails_of(payloads: Sequence[bytes], places: Places) -> list[Any]:
    """Return the tails of payloads that are kept apart, read in another thread. Raises PayloadStoreError."""
    if not any(map(names_its_arrays, payloads)):
        return [None] * len(payloads)
    read = partial(read_tails, payloads, places, _PATIENCE)
    return await in_thread(read, _PATIENCE, ", ".join(places[0].values()))
