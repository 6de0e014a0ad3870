"""The leases of verl's queue, without verl."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.errors import LeaseLostError
from replaybuf.integrations import verl


@pytest.fixture(autouse=True)
def _no_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are the responses of their rollouts."""
    monkeypatch.setattr(verl, "_verl", lambda: (pickle, lambda full_batch: full_batch))
    monkeypatch.setattr(verl, "from_groups", lambda groups: [one.response for group in groups for one in group])


async def _client(url: str, samples: int) -> verl.BufferQueueClient:
    client = verl.BufferQueueClient(ReplayBufferConfig(url=url, policy="fifo"), 2)
    for number in range(samples):
        extra: dict[str, Any] = {"verl": {"sample": {}}}
        rollout = RolloutState(message=[], response=str(number), status=Status.COMPLETED, extra_fields=extra)
        await client.buffer.put([rollout], "train")
    return client


async def _next(client: verl.BufferQueueClient) -> Any:
    sample, _ = await client.get_sample()
    assert sample is not None
    return pickle.loads(sample)


async def test_the_client_keeps_no_rollouts_of_the_samples_that_it_gave(shared_url: str) -> None:
    client = await _client(shared_url, 2)
    assert [await _next(client) for _ in range(2)] == [["0"], ["1"]]
    gc.collect()
    alive = [one for one in gc.get_objects() if type(one) is RolloutState and one.response in ("0", "1")]
    assert alive == []
    await client.shutdown()


async def test_a_lost_lease_is_an_error_of_one_call_and_the_others_are_acknowledged(shared_url: str) -> None:
    client = await _client(shared_url, 3)
    assert [await _next(client) for _ in range(2)] == [["0"], ["1"]]
    await client.buffer.adopt(client._leases[0].handle).give_back()
    with pytest.raises(LeaseLostError):
        await client.get_sample()
    assert [await _next(client) for _ in range(2)] == [["0"], ["2"]]
    await client.shutdown()
