"""The engine of docs/examples/openai_endpoint.py against a server of the tests: what becomes of a rollout."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from replaybuf import RolloutState, Status
from replaybuf.errors import ProduceError
from tests.examples.conftest import KEY
from tests.examples.endpoint import LENGTH, Body, Endpoint, Script, tokens_of
from tests.examples.test_runs import EXAMPLES
from tests.stores import until


def load() -> Any:
    spec = importlib.util.spec_from_file_location("openai_endpoint", EXAMPLES / "openai_endpoint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load()


@contextlib.asynccontextmanager
async def engine_of(endpoint: Endpoint, **options: Any) -> AsyncIterator[Any]:
    defaults = {"model": "tiny", "max_tokens": 100, "temperature": 1.0, "server_timeout": 0.5}
    async with httpx.AsyncClient(base_url=endpoint.url, trust_env=False, timeout=options.pop("timeout", 30)) as client:
        engine = example.Engine(client, argparse.Namespace(**defaults | options), KEY)
        await engine.resume()
        yield engine


def group_of(size: int = 2, truth: Any = "12") -> list[RolloutState]:
    message = [{"role": "user", "content": "7+5="}]
    truths = {"ground_truth": truth}
    return [RolloutState(rollout_id=number, message=message, reward_model=truths) for number in range(size)]


def whole(rollout: RolloutState) -> bool:
    """Whether it has every token of its answer once."""
    text = "".join(tokens_of({"messages": rollout.message, "seed": rollout.rollout_id}))
    ids, logprobs = rollout.response_ids, rollout.logprobs
    return bool(rollout.response == text and ids == list(range(LENGTH)) and logprobs == [-0.5] * LENGTH)


def first(script: Script) -> Callable[[Body, int], Script]:
    """The script for the first request of every rollout."""
    return lambda body, attempt: script if attempt == 1 else Script()


async def test_a_rollout_has_the_text_the_tokens_their_logprobs_and_its_reward(endpoint: Endpoint) -> None:
    group = group_of()
    async with engine_of(endpoint) as engine:
        await engine.generate_group(group, partial=True)
    assert all(map(whole, group))
    assert [rollout.reward for rollout in group] == [1.0, 0.0]  # the other seed answers 13
    assert {(rollout.status, rollout.finish_reason) for rollout in group} == {(Status.COMPLETED, "stop")}


async def test_the_ids_of_the_prompt_are_those_of_the_server(endpoint: Endpoint) -> None:
    group = group_of()
    endpoint.script = first(Script(at=3, drop=True))  # the prompt of the second request ends with a part of the answer
    async with engine_of(endpoint) as engine:
        await engine.generate_group(group, partial=True)
    assert [rollout.prompt_ids for rollout in group] == [[1], [1]]


async def test_a_pause_keeps_what_came_and_the_next_call_goes_on_from_there(endpoint: Endpoint) -> None:
    group = group_of()
    endpoint.script = first(Script(seconds=0.1))
    async with engine_of(endpoint) as engine:
        running = asyncio.create_task(engine.generate_group(group, partial=True))
        await until(lambda: all(rollout.response_ids for rollout in group))
        await engine.pause()
        await running
        assert {rollout.status for rollout in group} == {Status.ABORTED}
        assert all(0 < len(rollout.response_ids) < LENGTH for rollout in group)
        await engine.resume()
        await engine.generate_group(group, partial=True)
    assert all(map(whole, group))
    assert len(endpoint.continued()) == 2
    assert {body["max_tokens"] for body in endpoint.requests} > {100}  # the others: what is left of them


@pytest.mark.parametrize("partial", [True, False])
async def test_a_stream_that_breaks_off_is_asked_for_again(endpoint: Endpoint, partial: bool) -> None:
    group = group_of()
    endpoint.script = first(Script(at=3, drop=True))
    async with engine_of(endpoint) as engine:
        await engine.generate_group(group, partial=partial)
    assert all(map(whole, group))
    assert len(endpoint.continued()) == (2 if partial else 0)


async def test_that_one_waits_for_the_server_is_said_each_time_that_it_goes(
    endpoint: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.script = first(Script(status=503, text="busy"))
    async with engine_of(endpoint, server_timeout=30) as engine:
        for number in range(2):
            group = group_of(4)
            for rollout in group:
                rollout.rollout_id += 4 * number
            await engine.generate_group(group, partial=True)
            assert all(map(whole, group))
            assert capsys.readouterr().err == f"waiting for the server at {endpoint.url}/: HTTP 503: busy\n"


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_refusal_ends_the_batch_at_once_and_keeps_the_rollouts(endpoint: Endpoint, status: int) -> None:
    group = group_of()
    endpoint.script = lambda body, attempt: Script(status=status, text=f"not with {KEY}")
    async with engine_of(endpoint) as engine:
        await engine.generate_group(group, partial=True)
        with pytest.raises(ProduceError, match=rf"answered HTTP {status}: not with \*\*\*; the prompts are kept"):
            engine.check(None)
    assert {rollout.status for rollout in group} == {Status.ABORTED}


FAULTS = {
    "500": (Script(500, f"out of memory,\n said {KEY} " + "x" * 500), "HTTP 500: out of memory, said *** xx"),
    "400": (Script(400, "the prompt is too long"), "HTTP 400: the prompt is too long"),
    "error": (Script(at=2, line='{"error": {"message": "CUDA"}}'), "the server ended the stream: {'message': 'CUDA'}"),
    "no JSON": (Script(at=2, line="<html>"), "the server sent what is no piece of a chat completion: b'<html>'"),
    "no chunk": (Script(at=2, line="[1]"), "the server sent what is no piece of a chat completion: b'[1]'"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_what_the_server_can_not_do_fails_the_rollout(endpoint: Endpoint, name: str) -> None:
    script, message = FAULTS[name]
    group = group_of()
    endpoint.script = lambda body, attempt: script if body["seed"] == 1 else Script()
    async with engine_of(endpoint) as engine:
        await engine.generate_group(group, partial=True)
        engine.check(None)
    assert [rollout.status for rollout in group] == [Status.COMPLETED, Status.FAILED]
    assert str(group[1].error_msg).startswith(message)
    assert len(str(group[1].error_msg)) < 350


ANSWERS = [
    ("12", "12", 1),
    (" It is 12.", 12, 1),
    ("12 is not 13", "12", 0),
    ("112", "12", 0),
    ("Paris", "Paris", 1),
    ("", "1", 0),
]


@pytest.mark.parametrize(("response", "truth", "expected"), ANSWERS)
def test_the_reward_compares_with_the_ground_truth(response: str, truth: Any, expected: float) -> None:
    truths = {"ground_truth": truth}
    assert example.reward(RolloutState(message=[], response=response, reward_model=truths)) == expected
