"""Whether the server of the pages works, for whoever starts and watches it.

Anybody may ask, without a token and under any name: an answer says whether the database could be read, and nothing of
what is in it. The database is asked once a second at most.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.web.security import HEALTH

#: Seconds within which the database has to answer, and for which its answer holds.
READY_SECONDS = 3.0
FRESH_SECONDS = 1.0


def health_of(reader: Reader) -> Sequence[Route]:
    """Return `/healthz`, which says that the server runs, and `/readyz`, which asks the database."""
    live, ready = HEALTH
    return [Route(live, _live), Route(ready, _readiness_of(reader))]


async def _live(request: Request) -> Response:
    return PlainTextResponse("ok\n")


def _readiness_of(reader: Reader) -> Callable[[Request], Awaitable[Response]]:
    lock = anyio.Lock()
    known_until, is_ready = 0.0, False

    async def ready(request: Request) -> Response:
        nonlocal known_until, is_ready
        async with lock:
            if time.monotonic() >= known_until:
                is_ready = await _can_be_read(reader)
                known_until = time.monotonic() + FRESH_SECONDS
        return PlainTextResponse("ok\n") if is_ready else PlainTextResponse("the database can't be read\n", 503)

    return ready


async def _can_be_read(reader: Reader) -> bool:
    """Return whether the database answers in time, and has the tables of this replaybuf."""
    with anyio.move_on_after(READY_SECONDS):
        try:
            await anyio.to_thread.run_sync(
                lambda: reader.read(lambda tx: tx.value("SELECT 1"), timeout=READY_SECONDS), abandon_on_cancel=True
            )
        except ReplayBufError:
            return False
        return True
    return False
