"""Training from a JSONL file of prompts, with the engine behind an OpenAI-compatible HTTP endpoint (vLLM, SGLang, ...).

The train step is a stand-in that prints what a trainer would get; `train` and `update_server` are the places for a real
one. Kill it with `kill -9` at any moment and start it again: it goes on from its last step. It needs httpx
(`pip install httpx`), and takes the API key, if there is one, from OPENAI_API_KEY.

A pause ends the streams and keeps the text, which goes on by `continue_final_message` (vLLM, SGLang and others;
`--begin-anew` for servers without it). Switch off the server's reasoning parser: what it takes out of the text can't be
continued. Token ids come from servers that give them (vLLM's `return_token_ids`); otherwise they are -1, and the
trainer tokenizes the text. At the seam of a continued rollout a tokenizer may cut the text differently.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from replaybuf import ReplayBufError, ReplayBufferConfig, RolloutState, Status
from replaybuf.errors import ProduceError
from replaybuf.produce import AsyncProduceStrategy, Generated, JSONLines, Sampler

TASK = "prompts"
AWAY = {429, 502, 503, 504}  # the server is busy or is being started: try again
REFUSED = {401, 403, 404}  # a wrong key, model or path: no prompt can be generated
BROKEN_STREAMS = 3  # of one rollout, before its group has failed


class AnswerError(Exception):
    """The server answers, and this rollout can't be made of it."""


class AwayError(httpx.TransportError):
    """The server is busy, or is being started."""


#: Nothing of an answer has come: the server can't be reached. Other transport errors are of single streams.
UNREACHED = (AwayError, httpx.ConnectError, httpx.ConnectTimeout)


class Engine:
    """An agent loop that streams every rollout of a group from `POST /chat/completions`, each with a seed of its own.

    A pause ends the streams: what came so far stays in the rollout, and is continued by a request whose last message is
    that part of the answer. While the server is away, requests are tried again, for `server_timeout` seconds.
    """

    def __init__(self, client: httpx.AsyncClient, options: argparse.Namespace, key: str | None) -> None:
        self._client, self._options, self._key = client, options, key
        self._server = client.base_url.copy_with(userinfo=b"")  # to be shown
        self._paused = True
        self._streams: set[asyncio.Timeout] = set()
        self._away_since: float | None = None
        self._said_away = self._said_broken = False
        self._refusal: str | None = None

    async def generate_group(self, group: list[RolloutState], *, partial: bool) -> None:
        wanted = [rollout for rollout in group if rollout.status != Status.COMPLETED]
        for rollout in wanted:
            rollout.status = Status.ABORTED  # until it has its last token
            rollout.error_msg = None
        if self._paused:
            return
        try:
            async with asyncio.timeout(None) as stream:
                self._streams.add(stream)
                await asyncio.gather(*(self._generate(rollout, partial) for rollout in wanted))
        except TimeoutError:
            pass  # paused
        finally:
            self._streams.discard(stream)

    async def pause(self) -> None:
        self._paused = True
        while self._streams:
            self._streams.pop().reschedule(0)  # now

    async def resume(self) -> None:
        self._paused = False

    def check(self, made: Generated) -> None:
        """End the batch when the server can't be used; for `on_group`. The prompts are kept as they are."""
        if self._refusal is not None:
            raise ProduceError(self._refusal)

    async def _generate(self, rollout: RolloutState, partial: bool) -> None:
        """One rollout: COMPLETED, or FAILED; ABORTED when the server can't be used."""
        broken = 0
        while self._refusal is None:
            if not (partial and rollout.response and rollout.response_ids):
                rollout.response, rollout.response_ids, rollout.logprobs = "", [], []
            before = len(rollout.response_ids)
            try:
                await self._stream(rollout)
                return
            except httpx.TransportError as error:
                fault, why = error, words(error)
                broken += len(rollout.response_ids) > before
            except Exception as error:
                rollout.status, rollout.error_msg = Status.FAILED, self._hide(words(error))
                return
            if rollout.status == Status.COMPLETED:  # it broke off behind the last token
                return
            if broken == BROKEN_STREAMS:
                rollout.status, rollout.error_msg = Status.FAILED, f"{broken} streams broke off, the last by {why}"
                return
            self._say(fault, why)
            await self._wait(why)

    def _say(self, fault: httpx.TransportError, why: str) -> None:
        """Say that one waits for a server that is away, and the first time that a stream of one that is there broke."""
        if isinstance(fault, UNREACHED) and not self._said_away:
            self._said_away = True
            print(f"waiting for the server at {self._server}: {why}", file=sys.stderr, flush=True)
        elif not isinstance(fault, UNREACHED) and not self._said_broken:
            self._said_broken = True
            print(f"a stream broke off, and is tried again ({why}); said once", file=sys.stderr, flush=True)

    async def _wait(self, why: str) -> None:
        """Wait a moment before the next request; give the server up when no token has come for too long."""
        now, patience = time.monotonic(), self._options.server_timeout
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since >= patience:
            self._refusal = (
                f"the server at {self._server} was away for {patience:g} s ({why}); the prompts are kept: "
                "start the server, then this again"
            )
        else:
            await asyncio.sleep(min(1.0, patience / 10))

    async def _stream(self, rollout: RolloutState) -> None:
        left = self._options.max_tokens - len(rollout.response_ids)
        if left < 1:  # it was interrupted at its last token
            finish(rollout, "length")
            return
        body = self._body(rollout) | {"max_tokens": left}
        async with self._client.stream("POST", "chat/completions", json=body) as response:
            if response.status_code != 200:
                self._refuse(response.status_code, await response.aread())
                return
            async for data in events(response):
                before = len(rollout.response_ids)
                reason = take(rollout, data)
                if reason is not None or len(rollout.response_ids) > before:
                    self._away_since, self._said_away = None, False
                if reason is not None:
                    finish(rollout, reason)  # at once: a pause may come before the end of the stream
        if rollout.finish_reason is None:
            raise httpx.RemoteProtocolError("the stream ended in the middle of an answer")

    def _body(self, rollout: RolloutState) -> dict[str, Any]:
        rollout.finish_reason = None
        body = {
            "model": self._options.model,
            "messages": rollout.message,
            "temperature": self._options.temperature,
            "seed": rollout.rollout_id,
            "stream": True,
            "logprobs": True,
            "return_token_ids": True,  # of vLLM; other servers pass over it
        }
        if rollout.response:
            begun = {"role": "assistant", "content": rollout.response}
            body["messages"] = [*rollout.message, begun]
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body

    def _refuse(self, status: int, body: bytes) -> None:
        """Say what the server answered instead of a stream: the status, the beginning of the body, never the key."""
        text = f"HTTP {status}: {self._hide(' '.join(body.decode('utf-8', 'replace').split())):.300}"
        if status in AWAY:
            raise AwayError(text)
        if status not in REFUSED:
            raise AnswerError(text)
        self._refusal = f"the server at {self._server} answered {text}; the prompts are kept"

    def _hide(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def words(error: Exception) -> str:
    """An error for people."""
    return str(error) if isinstance(error, AnswerError | AwayError) else f"{type(error).__name__}: {error}"


async def events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of the server-sent events. Only line feeds end lines: other separators may be part of a token."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield data


def take(rollout: RolloutState, data: bytes) -> str | None:
    """Add a piece of the stream to the rollout; the reason to finish, if it is the last.

    Only some servers say the ids of the tokens. Without them each token is -1: so they are counted and have their model
    steps, and the trainer makes the ids of the text.
    """
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise AnswerError(f"the server ended the stream: {chunk['error']!s:.300}")
        if rollout.prompt_ids is None:
            rollout.prompt_ids = chunk.get("prompt_token_ids")
        reason = None
        for choice in chunk.get("choices") or []:
            text = (choice.get("delta") or {}).get("content") or ""
            logprobs = [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or []]
            rollout.response = (rollout.response or "") + text
            rollout.response_ids += choice.get("token_ids") or [-1] * (len(logprobs) or bool(text))
            rollout.logprobs += logprobs
            reason = choice.get("finish_reason") or reason
        return reason
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise AnswerError(f"the server sent what is no piece of a chat completion: {data[:200]!r}") from error


def finish(rollout: RolloutState, reason: str) -> None:
    """An answer is there, with its reward; unless the server has interrupted it, which is "abort"."""
    rollout.finish_reason = reason
    if reason != "abort":
        rollout.reward = reward(rollout)
        rollout.status = Status.COMPLETED


def reward(rollout: RolloutState) -> float:
    """1 when the answer, or the last number in it, is the ground truth. Raises ValueError where there is none."""
    truth = (rollout.reward_model or {}).get("ground_truth")
    if truth is None:
        raise ValueError('the record of the prompt has no "reward_model": {"ground_truth": ...} to compare with')
    response = rollout.response or ""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", response)
    return float(str(truth).strip() in (response.strip(), *numbers[-1:]))


def train(groups: list[list[RolloutState]]) -> str:
    """The train step. A stand-in: put a real one here. It says what it got."""
    rollouts = [rollout for group in groups for rollout in group]
    mean = sum(rollout.reward for rollout in rollouts) / len(rollouts)
    return f"mean reward {mean:.2f}, {sum(len(rollout.response_ids) for rollout in rollouts)} tokens"


async def update_server(step: int) -> None:
    """Let the server generate with the weights of this step from now on. A stand-in: put a real one here.

    Nothing is being generated at this moment. Until a real one is here, the weights stay what they are, and the
    model steps of the tokens, on which staleness rests, are those of a run that has one.
    """


async def run(options: argparse.Namespace) -> None:
    key = os.environ.get("OPENAI_API_KEY")
    client = httpx.AsyncClient(
        base_url=options.base_url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(options.request_timeout, connect=10),
        limits=httpx.Limits(max_connections=None),
    )
    async with client, ReplayBufferConfig(url=options.url).build() as buffer:
        engine = Engine(client, options, key)
        strategy = AsyncProduceStrategy(
            over_sample=options.over_sample,
            enable_partial_rollout=not options.begin_anew,
            max_staleness=options.max_staleness,
            on_group=engine.check,
        )
        sampler = Sampler(buffer, JSONLines(options.prompts), TASK, prompt_repeat_k=options.k, shuffle=options.seed)
        made = await buffer.checkpoints()
        step = max((checkpoint.step for checkpoint in made), default=0)  # a real trainer: that of its weights
        if made:
            print(f"goes on from step {step}", flush=True)
        else:
            await buffer.checkpoint(0)
        await buffer.restore(step)  # always: it fences off a trainer that has the buffer open already
        await update_server(step)
        while step < options.steps:
            step += 1
            summary = await strategy.produce_batch(
                engine, sampler, options.batch_size, train_step=step, model_step=step - 1, timeout=options.batch_timeout
            )
            batch, _ = await buffer.take_batch({TASK: options.batch_size}, current_train_step=step)
            trained = train(batch[TASK])
            await buffer.checkpoint(step)  # then save the weights
            await update_server(step)
            print(f"step {step}: {trained}; {summary}", flush=True)
        print(f"{step} of {options.steps} steps are done")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    example = '{"prompt": "7+5=", "reward_model": {"ground_truth": "12"}}'
    add("prompts", nargs="+", help=f"JSONL files with lines such as {example}, or with messages")
    add("--base-url", default="http://localhost:8000/v1", help="of the endpoint")
    add("--model", required=True, default=argparse.SUPPRESS, help="its name on the server")
    add("--url", default="sqlite:///endpoint.db", help="of the database of the run; or postgresql://...")
    add("--steps", type=int, default=100, help="train steps in all; the prompts are read as often as that takes")
    add("--batch-size", type=int, default=8, help="groups of a train step")
    add("--k", type=int, default=4, help="rollouts of a group")
    add("--max-tokens", type=int, default=1024, help="of a rollout")
    add("--temperature", type=float, default=1.0, help="of sampling")
    add("--over-sample", type=float, default=0.5, help="groups beyond the batch, as a ratio of it")
    add("--max-staleness", type=int, default=4, help="train steps after which rollouts expire")
    add("--begin-anew", action="store_true", help="interrupted rollouts, for servers without continue_final_message")
    add("--seed", type=int, default=0, help="of the order of the prompts")
    add("--request-timeout", type=float, default=120, help="seconds without a token until a request is tried again")
    add("--server-timeout", type=float, default=600, help="seconds until a server that is away is given up")
    add("--batch-timeout", type=float, default=3600, help="seconds that a batch may take")
    chosen = parser.parse_args()
    if not chosen.base_url.startswith(("http://", "https://")):
        parser.error("--base-url must begin with http:// or https://")
    return chosen


if __name__ == "__main__":
    try:
        asyncio.run(run(options()))
    except (ReplayBufError, httpx.InvalidURL) as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
