"""What stands before the pages: who may ask, how, and what browsers may do with the answers.

The texts on the pages are hostile, and so is every other page that is open in the same browser. So nothing but files of
our own is loaded or run (the content security policy); without a token only names of this machine are answered, which
an attacker's name, made to point here (DNS rebinding), isn't; with a token, names don't matter, since the cookie is
given to our name only. Nothing but GET and HEAD is answered.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replaybuf.errors import ConfigError

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
