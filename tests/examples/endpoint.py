"""A small OpenAI-compatible server whose answers, delays and faults are written down beforehand."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

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
    url: str = ""

    def arrived(self, body: Body, key: str | None) -> Script:
        self.requests.append(body)
        self.keys.add(key)
        return self.script(body, sum(request["seed"] == body["seed"] for request in self.requests))

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


async def _answer(endpoint: Endpoint, request: Request) -> Response:
    body = await request.json()
    script = endpoint.arrived(body, request.headers.get("Authorization"))
    if script.status != 200:
        return PlainTextResponse(script.text, script.status)
    return StreamingResponse(_stream(body, script, endpoint.token_ids), media_type="text/event-stream")


async def _stream(body: Body, script: Script, token_ids: bool) -> AsyncIterator[str]:
    remaining = tokens_left(body)
    first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    ids = {"prompt_token_ids": list(range(1, 1 + len(body["messages"])))} if token_ids else {}
    yield _line(json.dumps(first | ids))
    for place, token in enumerate([*remaining, None]):
        await asyncio.sleep(script.seconds)
        if place == script.at:
            if script.drop:
                raise ConnectionAbortedError  # the server closes the connection
            yield _line(script.line)
            break
        chunk = _chunk(token, LENGTH - len(remaining) + place, token_ids)
        yield _line(json.dumps(chunk, ensure_ascii=False))
    yield _line("[DONE]")


def _line(data: str) -> str:
    return f"data: {data}\n\n"


def _chunk(token: str | None, number: int, token_ids: bool) -> dict[str, Any]:
    if token is None:
        return {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]}
    logprobs = {"content": [{"token": token, "logprob": -0.5, "top_logprobs": []}]}
    choice: dict[str, Any] = {"index": 0, "delta": {"content": token}, "logprobs": logprobs, "finish_reason": None}
    return {"choices": [choice | ({"token_ids": [number]} if token_ids else {})]}


@contextmanager
def serving(endpoint: Endpoint) -> Iterator[Endpoint]:
    """The endpoint at its `url`, while the block lasts."""
    route = Route("/v1/chat/completions", partial(_answer, endpoint), methods=["POST"])
    config = uvicorn.Config(Starlette(routes=[route]), log_config=None, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        endpoint.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield endpoint
        finally:
            server.should_exit = server.force_exit = True
            thread.join()
