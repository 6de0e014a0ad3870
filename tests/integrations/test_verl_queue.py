"""docs/frameworks/verl.md: the client of verl's message queue, over a buffer."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ConfigError, ReplayBufferConfig
from replaybuf.verl import BufferQueueClient
from tests.integrations.scripts import run, start, until
from tests.integrations.test_verl_batches import batch_of, check_same

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def _verl() -> None:
    pytest.importorskip("verl.experimental.fully_async_policy.detach_utils")


def sample_of(number: int) -> bytes:
    """A sample as verl's rollouter puts it: the rollouts of one prompt, pickled."""
    from ray import cloudpickle
    from verl.experimental.fully_async_policy.detach_utils import RolloutSample

    batch = batch_of(1, 4, seed=number)
    batch.non_tensor_batch["max_global_steps"] = batch.non_tensor_batch["min_global_steps"]
    sample = RolloutSample(batch, sample_id=f"sample_0_{number}", epoch=0, rollout_status={"count": number})
    return bytes(cloudpickle.dumps(sample))


async def test_verl_assembles_its_batch_from_what_comes_out(shared_url: str) -> None:
    from ray import cloudpickle
    from verl.experimental.fully_async_policy.detach_utils import assemble_batch_from_rollout_samples

    config = ReplayBufferConfig(url=shared_url, policy="fifo")
    rollouter, trainer = (cloudpickle.loads(cloudpickle.dumps(BufferQueueClient(config, 2))) for _ in range(2))
    put = [sample_of(number) for number in range(3)]
    for sample in [*put, None]:
        assert await rollouter.put_sample(sample=sample)
    assert await rollouter.get_statistics() == {
        "queue_size": 3,
        "total_produced": 3,
        "total_consumed": 0,
        "dropped_samples": 0,
    }
    found = [await trainer.get_sample() for _ in range(3)]
    assert [left for _, left in found] == [2, 1, 0]
    assert await rollouter.get_queue_size() == 0
    for (sample, _), original in zip(found, put, strict=True):
        one, other = cloudpickle.loads(sample), cloudpickle.loads(original)
        check_same(one.full_batch, other.full_batch)
        assert (one.sample_id, one.epoch, one.rollout_status) == (other.sample_id, other.epoch, other.rollout_status)
    batch = assemble_batch_from_rollout_samples([cloudpickle.loads(sample) for sample, _ in found[:2]], None, None)
    assert len(batch) == 8
    assert await trainer.get_sample() == (None, 0)
    assert await asyncio.to_thread(trainer.get_queue_size_sync) == 0
    await asyncio.gather(rollouter.shutdown(), trainer.shutdown())


TRAINER = """
import asyncio, json, sys
from ray import cloudpickle
from replaybuf.verl import BufferQueueClient
from replaybuf import ConfigError, ReplayBufferConfig

async def main():
    client, batch = BufferQueueClient(ReplayBufferConfig(url=sys.argv[1], policy="fifo"), 2, seconds=15), []
    while True:
        sample, _ = await client.get_sample()
        if batch and len(batch) % 2 == 0:
            print(json.dumps(batch), flush=True)  # trained
            batch = []
        if sample is None:
            return
        batch.append(cloudpickle.loads(sample).sample_id)
        if len(sys.argv) > 2 and batch == ["sample_0_2", "sample_0_3"]:
            print("in mid-step", flush=True)
            await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_trainer_that_is_killed_in_mid_step_gets_that_batch_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/buffer.db"
    client = BufferQueueClient(ReplayBufferConfig(url=url, policy="fifo"), 2)
    for number in range(6):
        await client.put_sample(sample_of(number))
    await client.put_sample(None)
    log = tmp_path / "train.py.log"

    def train(*arguments: Any) -> Any:
        (tmp_path / "train.py").write_text(TRAINER.replace("sys.argv", repr(["train.py", url, *arguments])))
        return start("train.py", tmp_path)

    trainer = train("slowly")
    until(lambda: "in mid-step" in log.read_text(), "the trainer was in its second step", trainer)
    trainer.kill()
    assert trainer.wait() == -signal.SIGKILL
    trainer = train()
    assert await asyncio.to_thread(trainer.wait, 120) == 0, log.read_text()
    trained = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("[")]
    assert sorted(name for batch in trained for name in batch) == [f"sample_0_{number}" for number in range(6)]
    await client.shutdown()


def test_the_loop_of_the_page_prints_what_it_says(tmp_path: Path) -> None:
    run("verl.md", "loop.py", tmp_path)


@pytest.mark.parametrize(
    ("options", "required", "named"),
    [
        ({"max_times_sampled": 2}, 4, "max_times_sampled=2"),
        ({"rollout_type": dict}, 4, "rollout_type=<class 'dict'>"),
        ({"tensors": "numpy"}, 4, "tensors='numpy'"),
        ({}, 0, "required_samples"),
    ],
)
def test_what_a_queue_does_not_do_is_refused_by_name(options: dict[str, Any], required: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        BufferQueueClient(ReplayBufferConfig(url="memory://", **options), required)
