"""A proxy before PostgreSQL that loses what a test wants to be lost."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import asyncpg
from sqlalchemy import URL, make_url

COMMIT = b"COMMIT;\x00"


class Link:
    """One connection through the proxy."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._writers = (client, server)
        self.pid = 0  # of the server's process
        self.answers_lost = False  # the next answer of the server ends the connection instead of reaching the client
        self.frozen = False  # nothing arrives any more, and nobody is told

    def cut(self) -> None:
        """End it, for both sides."""
        for writer in self._writers:
            writer.transport.abort()


# What becomes of something that the client sends: True lets it pass.
Fault = Callable[[Link, bytes], Awaitable[bool]]


class Proxy:
    """Forwards connections; `fault` is asked about everything that clients send.

    `instead` has texts, and what the server gets in place of them: as many bytes, since messages say their length. So a
    real server refuses what another one lacks.

    With a context it speaks TLS to the clients, as a pooler does, so that the tests' server needn't.
    """

    def __init__(self, server_url: str, tls: ssl.SSLContext | None = None) -> None:
        self.server_url = server_url
        self.tls = tls
        self.shown: list[object] = []  # the certificates of clients
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.fault: Fault | None = None
        self.instead: dict[bytes, bytes] = {}
        self.refusing = False
        self.links: list[Link] = []

    @property
    def url(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        url = make_url(self.server_url).set(host=host, port=port, query={})
        return url.render_as_string(hide_password=False)

    async def end_process(self, link: Link) -> None:
        """Let the server end its side."""
        connection = await asyncpg.connect(self.server_url)
        try:
            await connection.execute(f"SELECT pg_terminate_backend({link.pid}, 5000)")
        finally:
            await connection.close()

    def refuse(self, fault: Callable[[Link], Awaitable[bool]]) -> Callable[[Link], Awaitable[bool]]:
        """The fault, after which no connection is to be had: all others are cut."""

        async def refuse(link: Link) -> bool:
            self.refusing = True
            for other in self.links:
                if other is not link:
                    other.cut()
            return await fault(link)

        return refuse

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for link in self.links:
            link.cut()
        if self._pumps:
            await asyncio.wait(self._pumps)

    async def _serve(self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self.refusing:
            client.transport.abort()
            return
        if self.tls is not None and not await self._speak_tls(client_reader, client):
            return
        try:
            server_reader, server = await _open(make_url(self.server_url))
        except OSError:
            client.transport.abort()
            return
        link = Link(client, server)
        self.links.append(link)
        for pump in (self._send(link, client_reader, server), self._answer(link, server_reader, client)):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _speak_tls(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> bool:
        assert self.tls is not None
        try:
            assert await reader.readexactly(8) == b"\0\0\0\x08\x04\xd2\x16\x2f"  # SSLRequest
            client.write(b"S")
            await client.start_tls(self.tls)
        except (OSError, EOFError):
            client.close()  # after the alert
            return False
        self.shown.append(client.get_extra_info("peercert"))
        return True

    async def _send(self, link: Link, client: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await client.read(1 << 20):
                for text, other in self.instead.items():
                    data = data.replace(text, other)
                passes = self.fault is None or await self.fault(link, data)
                if passes and not link.frozen:
                    server.write(data)
                    await server.drain()
        if not link.frozen:
            link.cut()

    async def _answer(self, link: Link, server: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await server.read(1 << 20):
                if not link.pid and (at := data.find(b"K\x00\x00\x00\x0c")) >= 0:
                    link.pid = int.from_bytes(data[at + 5 : at + 9], "big")
                if link.answers_lost:
                    break
                if not link.frozen:
                    client.write(data)
                    await client.drain()
        # What the server said last (that it ends the connection) is still to arrive, unless it is to be lost.
        if link.answers_lost:
            link.cut()
        elif not link.frozen:
            with contextlib.suppress(OSError):
                client.close()


async def _open(url: URL) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if url.host:
        return await asyncio.open_connection(url.host, url.port)
    return await asyncio.open_unix_connection(f"{url.query['host']}/.s.PGSQL.5432")


@asynccontextmanager
async def proxied(server_url: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Proxy]:
    """A proxy before a server that listens on a Unix socket, or at an address."""
    proxy = Proxy(server_url, tls)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


def is_commit(_link: Link, data: bytes) -> bool:
    return COMMIT in data


def once(fault: Callable[[Link], Awaitable[bool]], *, at: Callable[[Link, bytes], bool] = is_commit) -> Fault:
    """A fault that happens at the first message `at` is true for."""
    happened = False

    async def maybe(link: Link, data: bytes) -> bool:
        nonlocal happened
        if happened or not at(link, data):
            return True
        happened = True
        return await fault(link)

    return maybe
