"""The server of the pages: it binds the port, says where it is, serves until it is told to stop, and how it is.

For whoever starts and watches it there are `/healthz` and `/readyz`. Anybody may ask these, without a token and under
any name: an answer says whether the database could be read, and nothing of what is in it. Who else may ask is below.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import parse_qsl, quote, urlencode

import anyio
import anyio.to_thread
import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replaybuf.errors import ConfigError, LockedError, ReplayBufError, StorageError
from replaybuf.storage.sql.inspection.reader import Reader

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


# Who may ask, how, and what browsers may do with the answers
#
# The texts on the pages are hostile, and so is every other page that is open in the same browser. So nothing but files
# of our own is loaded or run (the content security policy); without a token only names of this machine are answered,
# which an attacker's name, made to point here (DNS rebinding), isn't; with a token, names don't matter, since the
# cookie is given to our name only. Nothing but GET and HEAD is answered.

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
#: The fewest characters of a token that somebody chose.
MIN_TOKEN = 16
_SECONDS = 30 * 86_400
_HOST = re.compile(r"[A-Za-z0-9._-]*(?::\d*)?|\[[0-9A-Fa-f:.]+\](?::\d*)?")

_PREFIX = re.compile(r"(?:/[A-Za-z0-9_~.-]*[A-Za-z0-9_~-])+")
#: Of no run, and asked by programs that have no token: whether the server is there, and the database behind it.
HEALTH = ("/healthz", "/readyz")

Refuse = Callable[[Request, int, str], Response]


def is_loopback(host: str) -> bool:
    """Return whether a host (a name or an address, without a port) is this machine as seen from itself."""
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_urlsafe(24)


def check_token(token: str) -> str:
    """Return a token that somebody chose. Raises ConfigError, without it, when it is too short or not printable."""
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or set(token) & set(' ;,"\\'):
        raise ConfigError(
            f'the token must have {MIN_TOKEN} characters or more, of letters, digits and signs but space ; , " and \\'
        )
    return token


def check_prefix(prefix: str) -> str:
    """Return the path that a proxy has before those of the pages, "/rl" or "". Raises ConfigError when it is none."""
    path = prefix.rstrip("/")
    if path and not _PREFIX.fullmatch(path):
        raise ConfigError(f"the prefix is a path such as /rl, of letters, digits and - _ . ~, not {prefix!r:.100}")
    return path


@dataclass(frozen=True, slots=True)
class Guard:
    """ASGI middleware: refuses what may not be asked, and adds the headers to every answer.

    `refuse(request, status, reason)` makes the page that says why. Without a token everybody on this machine may read.
    A path may begin with the `prefix` of a proxy.
    """

    app: ASGIApp
    token: str | None
    refuse: Refuse
    prefix: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        path = str(scope["path"])
        if self.prefix and (path == self.prefix or path.startswith(f"{self.prefix}/")):
            path = path.removeprefix(self.prefix) or "/"
            scope = {**scope, "path": path, "raw_path": quote(path).encode()}
        request = Request(scope)
        answer = self._answer(request) or self.app
        await answer(scope, receive, with_headers)

    def _answer(self, request: Request) -> Response | None:
        """Return the answer to what doesn't reach the pages; None for what may."""
        if request.method not in ("GET", "HEAD"):
            response = self.refuse(request, 405, "These pages are only read: there is nothing but GET and HEAD.")
            response.headers["Allow"] = "GET, HEAD"
            return response
        if not _HOST.fullmatch(request.headers.get("host", "")):
            return self.refuse(request, 400, "The Host header is no name or address with a port.")
        if path_of(request).startswith("/static/") or path_of(request) in HEALTH:  # the same for everybody
            return None
        if self.token is None:
            if not is_loopback(host_of(request.headers)):
                return self.refuse(request, 421, "This server answers to localhost only: open that, with its port.")
            return None
        if (given := request.query_params.get("token")) is not None:
            return self._let_in(request) if self._is_right(given) else self._refuse_token(request)
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_right(bearer.strip()):
            return None
        if self._is_right(request.cookies.get(_cookie(request), "")):
            return None
        return self._refuse_token(request)

    def _is_right(self, given: str) -> bool:
        assert self.token is not None
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def _let_in(self, request: Request) -> Response:
        """Keep the token in a cookie, and open the same page without it in the URL."""
        assert self.token is not None
        rest = [(name, value) for name, value in parse_qsl(request.scope["query_string"]) if name != b"token"]
        path = f"{self.prefix}/" + path_of(request).lstrip("/\\")  # never to another host
        response = RedirectResponse(f"{path}?{urlencode(rest)}" if rest else path, 303)
        name, path = _cookie(request), self.prefix or "/"
        response.set_cookie(name, self.token, max_age=_SECONDS, httponly=True, samesite="strict", path=path)
        return response

    def _refuse_token(self, request: Request) -> Response:
        return self.refuse(request, 401, "Open the address that the server printed, with its token.")


def _cookie(request: Request) -> str:
    """Return the name of the cookie: browsers give those of a host to all of its ports."""
    _, port = request.scope.get("server") or ("", None)
    return f"replaybuf_token_{port or 80}"


def path_of(request: Request) -> str:
    """Return the path that is asked for: `request.url` is made from the Host header, too, which anybody may write."""
    return str(request.scope["path"])


def host_of(headers: Headers) -> str:
    """Return the name in the Host header, without its port; "" when there is none."""
    host = headers.get("host", "")
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
