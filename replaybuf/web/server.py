"""The server of the pages: it binds the port, says where it is, serves until it is told to stop, and how it is.

For whoever starts and watches it there are `/healthz` and `/readyz`. Anybody may ask these, without a token and under
any name: an answer says whether the database could be read, and nothing of what is in it.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio
import anyio.to_thread
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from replaybuf.errors import ConfigError, LockedError, ReplayBufError, StorageError
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.web.security import HEALTH

#: Connections that are open at the same time, idle ones included; others are refused (503). Few of them read at once.
CONNECTIONS = 512
_SECONDS_TO_END = 2


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises ConfigError when it can't: the port is taken, ..."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"there is no address {host!r:.100} on this machine: {error.strerror or error}") from error
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        listening = socket.create_server(address, family=family, backlog=CONNECTIONS, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(_why(host, port, error)) from error
    listening.set_inheritable(True)
    return listening


def _why(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken: give another one with --port, or --port 0 for any that is free"
    if error.errno == errno.EACCES:
        return f"port {port} is the system's: give one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"this machine doesn't have the address {host!r:.100}"
    return f"can't listen at port {port} of {host}: {os.strerror(error.errno or 0)}"


def address_of(listening: socket.socket, host: str) -> str:
    """Return the URL of a socket. One that listens at all addresses is named by this host's name."""
    port = listening.getsockname()[1]
    if host in ("", "0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve(app: ASGIApp, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; `ready` is called when it answers. Raises KeyboardInterrupt after SIGINT."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=_SECONDS_TO_END,
    )
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL + 1)  # the application says what went wrong, escaped
    try:
        Server(config).run(sockets=[listening])
    finally:
        listening.close()


T = TypeVar("T")

#: Reads at the same time, seconds that another waits for its turn, and seconds that one may take.
AT_ONCE = 4
STATEMENTS_AT_ONCE = 2
TURN_SECONDS = 10.0
READ_SECONDS = 10.0


class Readings:
    """Runs functions in read transactions, at most so many at the same time."""

    def __init__(self, reader: Reader, *, seconds: float = READ_SECONDS, at_once: int = AT_ONCE) -> None:
        self.reader = reader
        self._seconds = seconds
        self._at_once = at_once
        self._turns = anyio.Semaphore(at_once)

    async def run(self, work: Callable[[Reader, float], T]) -> T:
        """Return what a function of the reader, and of the seconds that its read may take, returns.

        Raises LockedError when it, or the wait for its turn, took too long.
        """
        try:
            with anyio.fail_after(TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            raise LockedError(f"{self._at_once} other reads went on for {TURN_SECONDS:g} s; try again") from None
        try:
            return await anyio.to_thread.run_sync(self._run, work)
        finally:
            self._turns.release()

    def _run(self, work: Callable[[Reader, float], T]) -> T:
        started = time.monotonic()
        try:
            return work(self.reader, self._seconds)
        except StorageError as error:
            if time.monotonic() - started < self._seconds:
                raise
            raise LockedError(
                f"reading took longer than {self._seconds:g} s and was stopped; choose a task, a status or a narrower "
                "query, or order by uid"
            ) from error


#: Seconds within which the database has to answer, and for which its answer holds.
READY_SECONDS = 3.0
FRESH_SECONDS = 1.0


def health_of(reader: Reader) -> Sequence[Route]:
    """Return `/healthz`, which says that the server runs, and `/readyz`: can the database be read, and in time?"""
    lock = anyio.Lock()
    known_until, is_ready = 0.0, False

    def read() -> bool:
        try:
            reader.read(lambda tx: tx.value("SELECT 1"), timeout=READY_SECONDS)
        except ReplayBufError:
            return False
        return True

    async def live(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(request: Request) -> Response:
        nonlocal known_until, is_ready
        async with lock:
            if time.monotonic() >= known_until:
                is_ready = False
                with anyio.move_on_after(READY_SECONDS):
                    is_ready = await anyio.to_thread.run_sync(read, abandon_on_cancel=True)
                known_until = time.monotonic() + FRESH_SECONDS
        return PlainTextResponse("ok\n") if is_ready else PlainTextResponse("the database can't be read\n", 503)

    return [Route(path, answer) for path, answer in zip(HEALTH, (live, ready), strict=True)]
