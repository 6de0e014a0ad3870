"""What is before an object store, which is away, broken or unkind when a test says so."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

_REASONS = {403: "Forbidden", 500: "Internal Server Error", 503: "Slow Down"}


@dataclass
class Relay:
    """A WSGI application before another. What is set holds for the requests that begin afterwards.

    `status`: requests are answered with it. `away`: connections end without an answer.
    `cut_after`: answers end after so many bytes, for so many answers as `cuts`. `requests` are the methods of all.
    """

    app: Any
    url: str = ""
    status: int | None = None
    away: bool = False
    cut_after: int = 0
    cuts: int = 0
    requests: list[str] = field(default_factory=list)

    def fail(self, way: str) -> None:
        """Be "away", or answer with a status, from now on."""
        self.away, self.status = (True, None) if way == "away" else (False, int(way))

    def well(self) -> None:
        """Forward everything as it is."""
        self.status, self.away, self.cut_after, self.cuts = None, False, 0, 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        self.requests.append(environ["REQUEST_METHOD"])
        if self.away:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        if self.status is None:
            return self._cut(self.app(environ, start_response))
        body = b"<Error><Code>Unkind</Code><Message>AKIASECRET said no</Message></Error>"
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        start_response(f"{self.status} {_REASONS[self.status]}", headers)
        return [body]

    def _cut(self, answer: Iterable[bytes]) -> Iterator[bytes]:
        for part in answer:
            if self.cuts > 0 and len(part) > self.cut_after:
                self.cuts -= 1
                yield part[: self.cut_after]
                return  # the server ends the connection then
            yield part
