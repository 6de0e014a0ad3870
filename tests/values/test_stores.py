"""Values through every store: they come back as they went in, and what can't be read is set aside alone."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaybuf import ReplayBuffer, ReplayBufferConfig
from tests.codec.values import Bits, Color, Level, Name, same, values

_numbers = itertools.count()


class Secret:
    """Knows whether it can be rebuilt."""

    def __init__(self, text: str) -> None:
        self.text = text


def encode(secret: Secret) -> Any:
    if secret.text == "can't go in":
        raise KeyError(secret.text)
    return object() if secret.text == "becomes an object" else {"text": secret.text}


def decode(content: Any) -> Secret:
    if content["text"] == "can't come out":
        raise KeyError(content["text"])
    return Secret(content["text"])


CONVERTERS: Any = {Secret: ("secret", encode, decode)}


def build(url: str, **options: Any) -> ReplayBuffer[Any]:
    types = [Color, Level, Name, Bits]
    return ReplayBufferConfig(url=url, policy="fifo", rollout_type=dict, types=types, **options).build()


def group(value: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"status": "completed", "value": value, **fields}]


def values_of(groups: list[list[dict[str, Any]]]) -> list[Any]:
    return [rollouts[0]["value"] for rollouts in groups]


@given(given_=st.lists(values, min_size=4, max_size=12))
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
def test_values_come_back_from_every_store_and_its_snapshots(url: str, tmp_path: Path, given_: list[Any]) -> None:
    async def through() -> tuple[list[Any], list[Any]]:
        async with build(url) as buffer:
            for value in given_:
                await buffer.put(group(value), "math")
            folder = tmp_path / str(next(_numbers))
            await buffer.save(folder)
            own_values = values_of(await buffer.get(99, "math"))
        async with build("sqlite:///:memory:") as other:
            await other.resume(folder)
            return own_values, values_of(await other.get(99, "math"))

    for restored in asyncio.run(through()):
        assert same(restored, given_)


async def test_what_is_done_to_drawn_arrays_changes_nothing_in_the_store(url: str) -> None:
    """Whether they live in a payload, or have been copied out of it; and none changes another."""
    arrays = {"large": np.arange(50_000), "small": np.arange(500), "tiny": np.arange(5)}
    async with build(url, max_times_sampled=3) as buffer:
        await buffer.put(group(arrays), "math")
        for _ in range(3):
            [restored] = values_of(await buffer.get(1, "math"))
            assert same(restored, arrays)
            for array in restored.values():
                array += 1
            assert same(restored, {name: array + 1 for name, array in arrays.items()})


async def test_a_refresh_keeps_tensors_and_what_a_reader_does_not_know(url: str) -> None:
    torch: Any = pytest.importorskip("torch")
    fields = {"response_ids": torch.tensor([5, 6]), "response_model_steps": torch.tensor([0, 7]), "seq_staleness": 0}
    async with build(url, converters=CONVERTERS) as buffer:
        await buffer.put(group(Secret("a"), **fields), "math")
        await buffer.refresh_staleness(
            task_stale_thresholds={"math": None}, task_token_stale_thresholds={"math": 4}, current_train_step=8
        )
        [[restored]] = await buffer.get(1, "math")
    assert (restored["value"].text, restored["seq_staleness"]) == ("a", 7)
    assert torch.equal(restored["response_model_steps"], torch.tensor([0, 7]))
    assert torch.equal(restored["response_mask"], torch.tensor([0, 1], dtype=torch.int32))


async def test_a_group_whose_converter_is_not_there_is_set_aside_until_it_is(tmp_path: Path, url: str) -> None:
    async with build(url, converters=CONVERTERS) as buffer:
        for value in (1, Secret("a"), 2):
            await buffer.put(group(value), "math")
        await buffer.save(tmp_path / "snapshot")
    async with build("memory://") as without:
        await without.resume(tmp_path / "snapshot")
        items = [item async for item in without.find({})]
        assert [item.error is None for item in items] == [True, False, True]
        await without.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=8)
        assert values_of(await without.get(9, "math")) == [1, 2]
        [failed] = [item async for item in without.find({"status": "failed"})]
        assert "doesn't name: add converters={ITS_CLASS: ('secret', encode, decode)}" in str(failed.error)
        await without.save(tmp_path / "again")
    async with build("sqlite:///:memory:", converters=CONVERTERS) as knowing:
        await knowing.resume(tmp_path / "again")
        assert await knowing.update({"status": "failed"}, status="completed") == 1
        [restored] = values_of(await knowing.get(9, "math"))
        assert restored.text == "a"
