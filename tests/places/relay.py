"""A relay before an object store, with threads of its own, that is away, broken or unkind when a test says so."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_REASONS = {403: "Forbidden", 500: "Internal Server Error", 503: "Slow Down"}


@dataclass
class Relay:
    """Forwards connections to a port. What is set holds for the requests that begin afterwards.

    `status`: requests are answered with it. `away`: connections are refused.
    `cut_after`: answers end after so many bytes, for so many answers as `cuts`. `when` says which requests are meant,
    by their first line. `requests` are the first lines of all.
    """

    target: int
    status: int | None = None
    away: bool = False
    cut_after: int = 0
    cuts: int = 0
    when: Callable[[str], bool] = lambda line: True
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._links: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def leave(self) -> None:
        """Be away from now on, also for those who are connected."""
        self.away = True
        for link in self._links:
            _cut(link)
        self._links.clear()

    def well(self) -> None:
        """Forward everything as it is."""
        self.status, self.away, self.cut_after, self.cuts = None, False, 0, 0
        self.when = lambda line: True

    def close(self) -> None:
        self.leave()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            if self.away:
                _cut(client)
                continue
            self._links.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self.target)) as server:
            threading.Thread(target=self._answer, args=(server, client), daemon=True).start()
            pending = b""
            while data := client.recv(1 << 16):
                pending += data
                while pending:
                    head, separator, body = pending.partition(b"\r\n\r\n")
                    if not separator:
                        break
                    size = _length(head)
                    while len(body) < size:
                        received = client.recv(1 << 20)
                        if not received:
                            return
                        body += received
                    request, pending = head + separator + body[:size], body[size:]
                    if not self._passes(head, client):
                        continue
                    server.sendall(request)
        _cut(client)

    def _passes(self, head: bytes, client: socket.socket) -> bool:
        line = head.split(b"\r\n", 1)[0].decode("latin-1")
        self.requests.append(line)
        if not self.when(line):
            return True
        if self.status is None:
            return True
        body = b"<Error><Code>Unkind</Code><Message>AKIASECRET said no</Message></Error>"
        reason = _REASONS[self.status]
        client.sendall(
            f"HTTP/1.1 {self.status} {reason}\r\nContent-Type: application/xml\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        return False

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        sent_bytes = 0
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if self.cuts > 0 and sent_bytes + len(data) > self.cut_after:
                    client.sendall(data[: max(0, self.cut_after - sent_bytes)])
                    self.cuts -= 1
                    break
                client.sendall(data)
                sent_bytes += len(data)
        _cut(client)


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def _cut(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()


@contextmanager
def relayed(port: int) -> Iterator[Relay]:
    """A relay before a port of this host."""
    relay = Relay(port)
    try:
        yield relay
    finally:
        relay.close()
