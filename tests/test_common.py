"""What the common modules write: redacted texts, tokens, names of workers."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import numpy as np
import pytest

from replaybuf import ConfigError, ReplayBufferConfig
from replaybuf.common import units
from replaybuf.common.redact import redact, redact_path
from replaybuf.common.worker_name import worker_name, working_as
from replaybuf.errors import InputError
from replaybuf.view.conversation import strip


@pytest.mark.parametrize("password", ["secret", "sec@ret", "@secret@", "sec/ret", "sec:ret", "se?c#ret", "sec\nret"])
def test_no_part_of_a_password_is_shown(password: str) -> None:
    for hosts in ("db:5432", "a:5432,b:5433"):
        assert redact(f"postgresql://rl:{password}@{hosts}/run") == f"postgresql://rl:***@{hosts}/run"


@pytest.mark.parametrize("sign", ["%3A", "%3a", "/", " ", "?", "#"])
def test_what_follows_a_mistyped_colon_is_not_shown(sign: str) -> None:
    assert redact(f"postgresql://rl{sign}secret@db/run") == "postgresql://***"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://rl@db/run",
        "sqlite:///run.db",
        "sqlite:run.db",
        "sqlite:/run.db",
        "postgresql://r%40l@db/run",
        "postgresql://@db",
        "postgresql://a:5432,b:5433/rl",
        "a.b://h:1/",
    ],
)
def test_a_url_without_a_password_is_shown_as_it_is(url: str) -> None:
    assert redact(url) == url


def test_a_folder_is_shown_as_it_is() -> None:
    assert redact_path("runs/2026-11-22T11:30") == "runs/2026-11-22T11:30"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (units.short(0), "0"),
        (units.short(999), "999"),
        (units.short(1000), "1.0k"),
        (units.short(13_420), "13.4k"),
        (units.short(99_960), "100k"),
        (units.short(999_950), "1.0M"),
        (units.short(10**16), "10000T"),
        (units.size(999), "999 B"),
        (units.size(999_600), "1.0 MB"),
        (units.age(-1.0), "0s"),
        (units.age(59.4), "59s"),
        (units.age(59.7), "1.0m"),
        (units.age(599.0), "10m"),
        (units.age(3599.0), "1.0h"),
        (units.age(86_399.0), "1.0d"),
        (units.age(1e8), "1157d"),
    ],
)
def test_a_number_that_rounds_to_one_of_the_next_unit_is_in_that(text: str, shown: str) -> None:
    assert text == shown


def rollout(**fields: Any) -> dict[str, Any]:
    return {"response_ids": [5, 6, 7], **fields}


def shades(token_strip: Any) -> list[str]:
    return [token.shade for token in token_strip.tokens]


def test_a_rollout_without_ids_has_no_tokens() -> None:
    assert strip({"response_ids": None}, "abc", None, 10) is None
    assert strip({"response_ids": []}, "abc", None, 10) is None
    assert strip({"response_ids": ["a", {}]}, "abc", None, 10) is None


@pytest.mark.parametrize(
    ("fields", "by", "shown"),
    [
        ({"logprobs": np.array([-0.01, -0.7, -20.0], np.float32)}, "logprob", ["lp0", "lp2", "lp6"]),
        ({"logprobs": [-9.0, -9.0, -0.01, -0.01, -0.01]}, "logprob", ["lp0"] * 3),  # those of the prompt come first
        ({"response_model_steps": [41, 41, 43]}, "step", ["step0", "step0", "step1"]),
        *(
            ({f"{kind}_mask": [0, 1, 1]}, "mask", ["mask0", "mask1", "mask1"])
            for kind in ("response", "loss", "action")
        ),
    ],
)
def test_tokens_are_shaded_by_their_values_under_the_names_of_any_framework(
    fields: dict[str, Any], by: str, shown: list[str]
) -> None:
    token_strip = strip(rollout(**fields), None, None, 10)
    assert token_strip is not None
    assert (token_strip.by, shades(token_strip)) == (by, shown)


def test_a_token_has_its_facts_and_a_model_step_its_name() -> None:
    token_strip = strip(rollout(logprobs=[-0.7] * 3, response_model_steps=[41, 41, 43]), None, "step", 10)
    assert token_strip is not None
    assert token_strip.by == "step"
    assert token_strip.tokens[1].facts == "token 1  id 6  logprob -0.7  step 41"
    assert token_strip.legend == (("step0", "model step 41"), ("step1", "model step 43"))


def test_values_that_arent_one_a_token_are_left_out() -> None:
    tokens = strip(rollout(logprobs=[-1.0], response_mask="111", response_model_steps=[[1], [2], [3]]), None, None, 10)
    assert tokens is not None
    assert (tokens.shades, shades(tokens)) == ((), ["", "", ""])


@pytest.mark.parametrize(
    ("fields", "response", "texts"),
    [
        ({"extra_fields": {"pieces": ["Hel", "lo", "!"]}}, "Hello!", ["Hel", "lo", "!"]),
        ({}, "abc", None),
        ({}, "a long response", None),
        ({"extra_fields": {"pieces": ["x", "y", "z"]}}, "a long response", None),
        ({}, None, None),
    ],
)
def test_a_response_is_cut_into_tokens_only_where_the_data_says_how(
    fields: dict[str, Any], response: str | None, texts: list[str] | None
) -> None:
    token_strip = strip(rollout(**fields), response, None, 10)
    assert token_strip is not None
    assert token_strip.texts == (texts is not None)
    assert [n.text for n in token_strip.tokens] == (texts or [str(n) for n in rollout(**fields)["response_ids"]])


def test_many_tokens_are_counted_and_the_first_shown() -> None:
    token_strip = strip({"response_ids": list(range(5000))}, None, None, 100)
    assert token_strip is not None
    assert (len(token_strip.tokens), token_strip.count) == (100, 5000)


def test_without_any_it_is_that_of_the_process() -> None:
    assert worker_name() == f"{socket.gethostname()}:{os.getpid()}"


def test_that_of_the_block_comes_before_that_of_the_config() -> None:
    buffer = ReplayBufferConfig(url="memory://", worker="trainer").build()
    assert buffer.worker == "trainer"
    with working_as("rollout-7"):
        assert buffer.worker == "rollout-7"
        with working_as(None):
            assert buffer.worker == "rollout-7"
    assert buffer.worker == "trainer"


def test_each_task_has_its_own() -> None:
    async def work(name: str) -> str:
        with working_as(name):
            await asyncio.sleep(0)
            return worker_name()

    async def both() -> list[str]:
        return await asyncio.gather(work("a"), work("b"))

    assert asyncio.run(both()) == ["a", "b"]


def test_a_forked_process_has_its_own() -> None:
    ours, (reading, writing) = worker_name(), os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, worker_name().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1000).decode() == ours.replace(str(os.getpid()), str(child))
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "x" * 201])
def test_it_is_one_that_databases_can_hold(name: str) -> None:
    with pytest.raises(InputError, match="worker"), working_as(name):
        pass
    with pytest.raises(ConfigError, match="worker"):
        ReplayBufferConfig(url="memory://", worker=name).build()
