"""The HTTP server of the pages: the port, the life of the server, limits on reads, health checks, access control.

The health checks `/healthz` and `/readyz` need no token, and any host name: their answers say whether the database
could be read, and nothing of its content.
"""

from __future__ import annotations

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

from replaybuf.errors import ConfigError, LockedError, ReplayBufError
from replaybuf.storage.sql.inspection.reader import Reader

#: Open connections, idle ones included; further ones are refused (503). Only a few of them read at once.
CONNECTIONS = 512
_SECONDS_TO_END = 2


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError when binding fails: the port is in use, ..."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"there is no address {host!r:.100} on this machine: {error.strerror or error}") from error
    dual_stack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        listening = socket.create_server(address, family=family, backlog=CONNECTIONS, dualstack_ipv6=dual_stack)
    except OSError as error:
        cause = os.strerror(error.errno or 0)
        raise ConfigError(f"can't listen at port {port} of {host}: {cause}; --port 0 takes any that is free") from error
    listening.set_inheritable(True)
    return listening


def address_of(listening: socket.socket, host: str) -> str:
    """Return the URL of a socket; with this host's name if the socket listens at all addresses."""
    port = listening.getsockname()[1]
    if host in ("", "0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve(app: ASGIApp, listening: socket.socket) -> None:
    """Serve at a listening socket until SIGINT or SIGTERM. Raises KeyboardInterrupt after SIGINT."""
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
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL + 1)  # the application reports errors itself, escaped
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        listening.close()


T = TypeVar("T")

#: Concurrent reads, seconds that a read waits for its turn, and seconds that it may take.
AT_ONCE = 4
TURN_SECONDS = 10.0
READ_SECONDS = 10.0


class Readings:
    """Runs reads in threads, with limits on their concurrency and duration."""

    def __init__(self, reader: Reader, *, seconds: float = READ_SECONDS) -> None:
        self.reader = reader
        self._timeout = seconds
        self._turns = anyio.CapacityLimiter(AT_ONCE)

    async def run(self, work: Callable[[Reader, float], T]) -> T:
        """Return `work(reader, seconds)`, called in a thread; `seconds` is the time limit of its read.

        Raises LockedError when the read, or the wait for its turn, took too long.
        """
        with anyio.move_on_after(TURN_SECONDS):  # a read that has begun isn't cancelled
            return await anyio.to_thread.run_sync(self._run, work, limiter=self._turns)
        raise LockedError(f"{AT_ONCE} other reads went on for {TURN_SECONDS:g} s; try again")

    def _run(self, work: Callable[[Reader, float], T]) -> T:
        started = time.monotonic()
        try:
            return work(self.reader, self._timeout)
        except LockedError as error:
            if time.monotonic() - started < self._timeout:
                raise
            raise LockedError(
                f"reading took longer than {self._timeout:g} s and was stopped; choose a task, a status or a narrower "
                "query, or order by uid"
            ) from error


#: Seconds that a readiness check may read for.
READY_SECONDS = 3.0


def health_of(readings: Readings) -> Sequence[Route]:
    """Return `/healthz` (the server runs) and `/readyz` (the database can be read within the time of `readings`).

    The readings are those of health checks alone: pages that take long don't keep them waiting.
    """

    async def live(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(request: Request) -> Response:
        try:
            await readings.run(lambda reader, seconds: reader.read(lambda tx: tx.value("SELECT 1"), timeout=seconds))
        except ReplayBufError:
            return PlainTextResponse("the database can't be read\n", 503)
        return PlainTextResponse("ok\n")

    return [Route(path, answer) for path, answer in zip(HEALTH, (live, ready), strict=True)]


# Access control, and what browsers may do with the pages
#
# The texts on the pages are hostile, and so is every other page open in the same browser. Therefore browsers load and
# run only files of our own (content security policy). Without a token, only requests with a Host header that names this
# machine are answered, which prevents DNS rebinding; with a token, names don't matter, since browsers send the cookie
# to our name only. Routes answer nothing but GET and HEAD.

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
#: Minimum length of a token chosen by a user.
MIN_TOKEN = 16
_SECONDS = 30 * 86_400
_HOST = re.compile(r"[A-Za-z0-9._-]*(?::\d*)?|\[[0-9A-Fa-f:.]+\](?::\d*)?")

_PREFIX = re.compile(r"(?:/[A-Za-z0-9_~.-]*[A-Za-z0-9_~-])+")
#: Health checks, for programs without a token: is the server up, and the database behind it?
HEALTH = ("/healthz", "/readyz")

Refuse = Callable[[Request, int, str], Response]


def is_loopback(host: str) -> bool:
    """Return whether a host (a name or an address, without a port) is a loopback name or address."""
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """Return a new random token."""
    return secrets.token_urlsafe(24)


def check_token(token: str) -> str:
    """Return a user's token. Raises ConfigError, which doesn't quote it, when it is too short or not printable."""
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or set(token) & set(' ;,"\\'):
        raise ConfigError(
            f'the token must have {MIN_TOKEN} characters or more, of letters, digits and signs but space ; , " and \\'
        )
    return token


def check_prefix(prefix: str) -> str:
    """Return the normalised path prefix of a proxy, "/rl" or "". Raises ConfigError when it isn't a path."""
    path = prefix.rstrip("/")
    if path and not _PREFIX.fullmatch(path):
        raise ConfigError(f"the prefix is a path such as /rl, of letters, digits and - _ . ~, not {prefix!r:.100}")
    return path


@dataclass(frozen=True, slots=True)
class Guard:
    """ASGI middleware: refuses requests without access, and adds the security headers to every response.

    `refuse(request, status, reason)` makes the error page. Without a token every user of this machine may read. A path
    may begin with the `prefix` of a proxy.
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
        """Return the response to a request that may not reach the pages; None for one that may."""
        if not _HOST.fullmatch(request.headers.get("host", "")):
            return self.refuse(request, 400, "The Host header is no name or address with a port.")
        if path_of(request).startswith("/static/") or path_of(request) in HEALTH:  # the same for everybody
            return None
        if self.token is None:
            if not is_loopback(host_of(request.headers)):
                return self.refuse(request, 421, "This server answers to localhost only: open that, with its port.")
            return None
        if (token := request.query_params.get("token")) is not None:
            return self._set_cookie(request) if self._is_right_token(token) else self._refuse_token(request)
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_right_token(bearer.strip()):
            return None
        if self._is_right_token(request.cookies.get(_cookie(request), "")):
            return None
        return self._refuse_token(request)

    def _is_right_token(self, token: str) -> bool:
        assert self.token is not None
        return hmac.compare_digest(token.encode(errors="replace"), self.token.encode())

    def _set_cookie(self, request: Request) -> Response:
        """Set the token as a cookie, and redirect to the same page without the token in the URL."""
        assert self.token is not None
        parameters = [(name, value) for name, value in parse_qsl(request.scope["query_string"]) if name != b"token"]
        path = f"{self.prefix}/" + path_of(request).lstrip("/\\")  # never to another host
        response = RedirectResponse(f"{path}?{urlencode(parameters)}" if parameters else path, 303)
        name, path = _cookie(request), self.prefix or "/"
        response.set_cookie(name, self.token, max_age=_SECONDS, httponly=True, samesite="strict", path=path)
        return response

    def _refuse_token(self, request: Request) -> Response:
        return self.refuse(request, 401, "Open the address that the server printed, with its token.")


def _cookie(request: Request) -> str:
    """Return the name of the cookie, which has the port, since browsers share cookies between the ports of a host."""
    _, port = request.scope.get("server") or ("", None)
    return f"replaybuf_token_{port or 80}"


def path_of(request: Request) -> str:
    """Return the path of a request, not from `request.url`, which depends on the (untrusted) Host header."""
    return str(request.scope["path"])


def host_of(headers: Headers) -> str:
    """Return the name in the Host header, without its port; "" when there is none."""
    host = headers.get("host", "")
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
