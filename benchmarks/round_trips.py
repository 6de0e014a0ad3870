"""Statements and round trips of a call, counted on their way to the database."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from sqlalchemy import make_url

from replaybuf.storage.sql.engine.transaction import Hook, installed


class Count(Hook):
    """A number that grows while something is counted: as a hook, with each statement."""

    def __init__(self) -> None:
        self.value = 0

    def statement(self, sql: str, values: Sequence[Any], many: bool) -> None:
        self.value += 1


@contextmanager
def counting_statements() -> Iterator[Count]:
    """Count the statements that all databases of this process run; a statement with many rows is one."""
    count = Count()
    with installed(count):
        yield count


@asynccontextmanager
async def counting_round_trips(url: str) -> AsyncIterator[tuple[str, Count]]:
    """Yield the URL of a relay in front of a PostgreSQL server, and the round trips of all connections through it.

    A round trip begins whenever a client sends again after it has heard from the server, so messages that are sent
    together count once, whatever driver sends them.
    """
    server_url = make_url(url)
    count, pumps = Count(), set[asyncio.Task[None]]()
    folder = server_url.query.get("host")
    port = server_url.port or 5432

    async def relay(client: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        if folder:
            server, forth = await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.{port}")
        else:
            server, forth = await asyncio.open_connection(server_url.host, port)
        heard = True

        async def ask() -> None:
            nonlocal heard
            while data := await client.read(1 << 18):
                count.value += heard
                heard = False
                forth.write(data)
                await forth.drain()

        async def answer() -> None:
            nonlocal heard
            while data := await server.read(1 << 18):
                heard = True
                client_writer.write(data)
                await client_writer.drain()

        pair = [asyncio.create_task(ask()), asyncio.create_task(answer())]
        pumps.update(pair)
        await asyncio.wait(pair, return_when=asyncio.FIRST_COMPLETED)
        for task in pair:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await task
        pumps.difference_update(pair)
        client_writer.close()
        forth.close()

    listening = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        local = server_url.set(host="127.0.0.1", port=listening.sockets[0].getsockname()[1], query={})
        yield local.render_as_string(hide_password=False), count
    finally:
        listening.close()
        for pump in list(pumps):
            pump.cancel()
