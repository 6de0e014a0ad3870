"""A small OpenAI-compatible server whose answers, delays and faults are written down beforehand."""

from __future__ import annotations

import json
import re
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: How many tokens an answer has.
LENGTH = 6

Body = dict[str, Any]


@dataclass
class Script:
    """What happens to a request: a status other than 200 with this text; or, before token `at`, another end.

    `seconds` pass before every token. `drop`: the connection is closed; `line`: this is sent in the place of the token,
    and then the stream ends.
    """

    status: int = 200
    text: str = ""
    seconds: float = 0.0
    at: int = LENGTH + 1
    drop: bool = False
    line: str = ""


@dataclass
class Endpoint:
    """The server. `script(body, attempt)` says what happens; `attempt` counts the requests of a seed, from 1."""

    script: Callable[[Body, int], Script] = lambda body, attempt: Script()
    token_ids: bool = True
    requests: list[Body] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def arrived(self, body: Body, key: str | None) -> Script:
        with self.lock:
            self.requests.append(body)
            self.keys.add(key)
            attempt = sum(request["seed"] == body["seed"] for request in self.requests)
        return self.script(body, attempt)

    def continued(self) -> list[Body]:
        return [body for body in self.requests if body.get("continue_final_message")]


def tokens_of(body: Body) -> list[str]:
    """The whole answer to a request: right for even seeds. A token of it is a separator of lines."""
    question = [message for message in body["messages"] if message["role"] == "user"][-1]["content"]
    total = sum(map(int, re.findall(r"\d+", question))) + body["seed"] % 2
    return ["The", " sum", "\u2028of", " them", " is", f" {total}"]


def tokens_left(body: Body) -> list[str]:
    """What is left of the answer behind what the last message has of it."""
    tokens, last = tokens_of(body), body["messages"][-1]
    if last["role"] != "assistant":
        return tokens
    assert body["continue_final_message"] is True
    assert body["add_generation_prompt"] is False
    count = ["".join(tokens[:end]) for end in range(len(tokens) + 1)].index(last["content"])
    return tokens[count:]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    endpoint: Endpoint

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        content = self.rfile.read(size)
        if len(content) < size:  # the client was killed
            self.close_connection = True
            return
        body = json.loads(content)
        assert self.path == "/v1/chat/completions"
        script = self.endpoint.arrived(body, self.headers["Authorization"])
        if script.status != 200:
            self._say(script)
        else:
            self._stream(body, script)

    def _say(self, script: Script) -> None:
        text = script.text.encode()
        self.send_response(script.status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _stream(self, body: Body, script: Script) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        remaining = tokens_left(body)
        first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        ids = {"prompt_token_ids": list(range(1, 1 + len(body["messages"])))} if self.endpoint.token_ids else {}
        self._send(json.dumps(first | ids))
        for place, token in enumerate([*remaining, None]):
            time.sleep(script.seconds)
            if place == script.at:
                if script.drop:
                    self.close_connection = True
                    return
                self._send(script.line)
                break
            number = LENGTH - len(remaining) + place
            self._send(json.dumps(_chunk(token, number, self.endpoint.token_ids), ensure_ascii=False))
        self._send("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, data: str) -> None:
        line = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def _chunk(token: str | None, number: int, token_ids: bool) -> dict[str, Any]:
    if token is None:
        return {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]}
    logprobs = {"content": [{"token": token, "logprob": -0.5, "top_logprobs": []}]}
    choice: dict[str, Any] = {"index": 0, "delta": {"content": token}, "logprobs": logprobs, "finish_reason": None}
    return {"choices": [choice | ({"token_ids": [number]} if token_ids else {})]}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients that end their streams
            socketserver.BaseServer.handle_error(self, request, client_address)


@contextmanager
def serving(endpoint: Endpoint, port: int = 0) -> Iterator[Endpoint]:
    """The endpoint at its `url`, while the block lasts."""
    handler = type("Handler", (_Handler,), {"endpoint": endpoint})
    with _Server(("127.0.0.1", port), handler) as server:
        endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield endpoint
        finally:
            server.shutdown()
            thread.join()
