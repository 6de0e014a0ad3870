"""verl: its queue and batches."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf import ConfigError, ReplayBufferConfig, RolloutState
from replaybuf.errors import InputError, RolloutError
from replaybuf.integrations.verl import BufferQueueClient, from_groups, to_groups
from tests.integrations.scripts import run, start, until

pytestmark = pytest.mark.frameworks

#: What the scripts import, which takes seconds.
MODULES = ("tests.integrations.verl_loop",)


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
    pickled = cloudpickle.dumps(BufferQueueClient(config, 2))
    rollouter, trainer = cloudpickle.loads(pickled), cloudpickle.loads(pickled)
    originals = [sample_of(number) for number in range(3)]
    for sample in [*originals, None]:
        assert await rollouter.put_sample(sample=sample)
    assert await rollouter.get_statistics() == {
        "queue_size": 3,
        "total_produced": 3,
        "total_consumed": 0,
        "dropped_samples": 0,
    }
    samples = [await trainer.get_sample() for _ in range(3)]
    assert [remaining for _, remaining in samples] == [2, 1, 0]
    assert await rollouter.get_queue_size() == 0
    for (sample, _), original in zip(samples, originals, strict=True):
        left, right = cloudpickle.loads(sample), cloudpickle.loads(original)
        check_same(left.full_batch, right.full_batch)
        assert (left.sample_id, left.epoch, left.rollout_status) == (right.sample_id, right.epoch, right.rollout_status)
    batch = assemble_batch_from_rollout_samples([cloudpickle.loads(sample) for sample, _ in samples[:2]], None, None)
    assert len(batch) == 8
    assert await trainer.get_sample() == (None, 0)
    assert await asyncio.to_thread(trainer.get_queue_size_sync) == 0
    await asyncio.gather(rollouter.shutdown(), trainer.shutdown())


TRAINER = """
import asyncio, json, sys
from ray import cloudpickle
from replaybuf.integrations.verl import BufferQueueClient
from replaybuf import ConfigError, ReplayBufferConfig

async def main():
    config, batch = ReplayBufferConfig(url=sys.argv[1], policy="fifo"), []
    client = BufferQueueClient(config, 2, seconds=15, run_id="run")
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
    client = BufferQueueClient(ReplayBufferConfig(url=url, policy="fifo"), 2, run_id="run")
    for number in range(6):
        await client.put_sample(sample_of(number))
    await client.put_sample(None)
    log = tmp_path / "train.py.log"

    def train(*arguments: Any) -> Any:
        (tmp_path / "train.py").write_text(TRAINER.replace("sys.argv", repr(["train.py", url, *arguments])))
        return start("train.py", tmp_path, MODULES)

    trainer = train("slowly")
    until(lambda: "in mid-step" in log.read_text(), "the trainer was in its second step", trainer)
    trainer.kill()
    assert trainer.wait() == -signal.SIGKILL
    trainer = train()
    assert await asyncio.to_thread(trainer.wait, 120) == 0, log.read_text()
    batches = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("[")]
    assert sorted(name for batch in batches for name in batch) == [f"sample_0_{number}" for number in range(6)]
    await client.shutdown()


async def test_the_end_is_that_of_its_own_run_and_comes_at_every_call(shared_url: str) -> None:
    config = ReplayBufferConfig(url=shared_url, policy="fifo")
    client, resumed = BufferQueueClient(config, 2), BufferQueueClient(config, 2)
    await client.put_sample(None)
    assert [await client.get_sample() for _ in range(2)] == [(None, 0)] * 2
    waiting = asyncio.create_task(resumed.get_sample())
    assert not (await asyncio.wait([waiting], timeout=1))[0]
    await resumed.put_sample(sample_of(1))
    assert (await asyncio.wait_for(waiting, 60))[0] is not None
    await resumed.put_sample(None)
    await asyncio.gather(client.shutdown(), resumed.shutdown())


async def test_the_queue_is_emptied_by_its_own_name_only(shared_url: str) -> None:
    client = BufferQueueClient(ReplayBufferConfig(url=shared_url, policy="fifo"), 2)
    await client.put_sample(sample_of(1))
    await client.clear_queue()  # as verl does when a run fails
    assert await client.get_queue_size() == 1
    await client.delete_samples()
    assert await client.get_queue_size() == 0
    await client.shutdown()


@pytest.mark.timeout(1200)  # actors import verl and torch
def test_a_run_whose_trainer_is_killed_goes_on_with_its_samples(tmp_path: Path) -> None:
    """By verl's own training loop: the trainer is killed in its second step of two samples, after the rollouter's end.

    The driver fails and clears the queue. The resumed run trains what was left, and what its own rollouter makes.
    """
    url = f"sqlite:///{tmp_path}/buffer.db"
    script, trained_log = (
        "from tests.integrations.verl_loop import run\nrun({!r}, {!r}, {}, {}, stops={})",
        tmp_path / "trained",
    )

    def driver(name: str, *arguments: Any) -> Any:
        (tmp_path / name).write_text(script.format(url, str(tmp_path), *arguments))
        return start(name, tmp_path, MODULES)

    first = driver("first.py", 1, 5, True)
    until(
        lambda: (tmp_path / "stopped").exists() and (tmp_path / "stopped").read_text(),
        "it was in its step",
        first,
        seconds=480,
    )
    os.kill(int((tmp_path / "stopped").read_text()), signal.SIGKILL)
    assert first.wait(240) == 1
    assert "Training failed" in (tmp_path / "first.py.log").read_text()
    assert trained_log.read_text().splitlines() == ["uid_sample_0_1 uid_sample_0_2"]

    resumed = driver("resumed.py", 6, 8, False)
    assert resumed.wait(480) == 0, (tmp_path / "resumed.py.log").read_text()
    assert sorted(trained_log.read_text().split()) == [f"uid_sample_0_{number}" for number in range(1, 9)]


def test_the_loop_of_the_page_prints_what_it_says(tmp_path: Path) -> None:
    run("verl", "loop.py", tmp_path, MODULES)


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


PROMPT, RESPONSE = 12, 20


def batch_of(
    prompts: int = 3, repeat: int = 2, *, prompt: int = PROMPT, response: int = RESPONSE, seed: int = 0
) -> Any:
    """A batch as verl's agent loops make one, with multi-turn masks, routed experts, and positions in three axes."""
    import torch
    from verl import DataProto

    random = np.random.default_rng(seed)
    rows = prompts * repeat
    lengths = [(int(random.integers(0, prompt + 1)), int(random.integers(1, response + 1))) for _ in range(rows)]
    mask = torch.tensor([[0] * (prompt - p) + [1] * (p + r) + [0] * (response - r) for p, r in lengths])
    ids = torch.from_numpy(random.integers(1, 1000, (rows, prompt + response))) * mask + 151643 * (1 - mask)
    positions = torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0)
    answers = mask[:, prompt:]
    scores = torch.zeros(rows, response)
    scores[torch.arange(rows), answers.sum(1) - 1] = torch.tensor([float(row % 2) for row in range(rows)])
    tensors = {
        "prompts": ids[:, :prompt],
        "responses": ids[:, prompt:],
        "response_mask": answers * torch.from_numpy(random.integers(0, 2, answers.shape)),
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": torch.stack([positions, positions, positions + 1], 1),
        "rollout_log_probs": torch.randn(rows, response) * answers,
        "teacher_logprobs": (torch.randn(rows, response) * answers).to(torch.bfloat16),
        "routed_experts": torch.randint(0, 8, (rows, prompt + response, 2, 4), dtype=torch.uint8)
        * mask[:, :, None, None],
        "rm_scores": scores,
        "seen": torch.arange(rows),
    }
    arrays = {
        "uid": [f"uid_{row // repeat}" for row in range(rows)],
        "raw_prompt": [[{"role": "user", "content": f"{row // repeat} + 5"}] for row in range(rows)],
        "min_global_steps": [3] * rows,
        "turn_scores": [[0.5], *[[]] * (rows - 1)],
        "extras": [None] * rows,
    }
    typed = {"__num_turns__": np.arange(rows, dtype=np.int32), "acc": np.array(["yes", "no"] * (rows // 2))}
    meta = {"metrics": [{"generate_sequences": 0.25 * row, "tool_calls": 0} for row in range(rows)], "temperature": 1.0}
    objects = {name: np.fromiter(values, dtype=object, count=rows) for name, values in arrays.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors={**objects, **typed}, meta_info=meta)


def check_same(batch: Any, expected: Any) -> None:
    assert list(batch.batch.keys()) == list(expected.batch.keys())
    for name, tensor in expected.batch.items():
        assert batch.batch[name].dtype == tensor.dtype, name
        assert batch.batch[name].equal(tensor), name
    assert list(batch.non_tensor_batch) == list(expected.non_tensor_batch)
    for name, array in expected.non_tensor_batch.items():
        assert batch.non_tensor_batch[name].dtype == array.dtype, name
        assert batch.non_tensor_batch[name].tolist() == array.tolist(), name
    assert batch.meta_info == expected.meta_info
    batch.check_consistency()


@pytest.mark.parametrize("seed", range(6))
async def test_a_batch_comes_out_of_a_buffer_as_it_went_in(seed: int) -> None:
    batch = batch_of(seed=seed, response=PROMPT if seed % 2 else RESPONSE)
    async with ReplayBufferConfig(url="sqlite:///:memory:", policy="fifo").build() as buffer:
        for group in to_groups(batch):
            await buffer.put(group, "math")
        check_same(from_groups(await buffer.get(3, "math")), batch)


def test_the_store_has_no_padding_and_names_what_people_look_for() -> None:
    batch = batch_of()
    first = to_groups(batch)[0][0]
    tokens = int(batch.batch["attention_mask"][0].sum())
    assert len(first.prompt_ids) + len(first.response_ids) == tokens
    assert len(first.logprobs) == len(first.response_mask) == len(first.response_model_steps) == len(first.response_ids)
    assert first.extra_fields["verl"]["tensors"]["routed_experts"]["tokens"].shape == (tokens, 2, 4)
    assert (first.group_id, first.reward, first.status) == ("uid_0", 0.0, "completed")
    assert first.message == [{"role": "user", "content": "0 + 5"}]


def test_groups_of_several_batches_make_one() -> None:
    first, second = batch_of(2), batch_of(1, seed=1)
    mixed = from_groups([*to_groups(first), *to_groups(second)])
    assert len(mixed) == 6
    check_same(mixed[:4], type(first)(first.batch, first.non_tensor_batch, mixed.meta_info))
    assert mixed.meta_info["metrics"] == first.meta_info["metrics"] + second.meta_info["metrics"]


def test_log_probabilities_of_a_type_that_numpy_lacks_are_kept() -> None:
    import torch

    batch = batch_of()
    batch.batch["rollout_log_probs"] = batch.batch["rollout_log_probs"].to(torch.bfloat16)
    groups = to_groups(batch)
    assert groups[0][0].logprobs.dtype == np.float32
    check_same(from_groups(groups), batch)


def test_what_cannot_be_a_batch_is_refused() -> None:
    batch = batch_of()
    with pytest.raises(InputError, match=r"prompts has other widths or dtypes: \[\(\(12,\), 'torch.int64'\), \(\(13,"):
        from_groups([*to_groups(batch), *to_groups(batch_of(prompt=13))])
    fewer = batch.select(non_tensor_batch_keys=["uid"])
    with pytest.raises(InputError, match="not all of the groups have __num_turns__, acc, extras, "):
        from_groups([*to_groups(batch), *to_groups(fewer)])
    with pytest.raises(RolloutError, match="the batch has no responses, uid: "):
        to_groups(batch.select(["prompts", "attention_mask"], ["extras"]))
    with pytest.raises(RolloutError, match="rows with the same uid aren't neighbours"):
        to_groups(batch[[0, 2, 1]])
    with pytest.raises(RolloutError, match=r"groups that `to_groups` made"):
        from_groups([[RolloutState(message=[])]])
    with pytest.raises(InputError, match="no groups"):
        from_groups([])
