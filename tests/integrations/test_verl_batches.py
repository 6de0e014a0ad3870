"""The face for verl against its DataProto: what comes out of a store is what went in, without its padding there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replaybuf import ReplayBufferConfig, RolloutState
from replaybuf.errors import InputError, RolloutError
from replaybuf.integrations.verl import from_groups, to_groups

pytestmark = pytest.mark.frameworks

PROMPT, RESPONSE = 12, 20


@pytest.fixture(autouse=True)
def _verl() -> None:
    pytest.importorskip("verl")


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


def check_same(found: Any, expected: Any) -> None:
    assert list(found.batch.keys()) == list(expected.batch.keys())
    for name, tensor in expected.batch.items():
        assert found.batch[name].dtype == tensor.dtype, name
        assert found.batch[name].equal(tensor), name
    assert list(found.non_tensor_batch) == list(expected.non_tensor_batch)
    for name, array in expected.non_tensor_batch.items():
        assert found.non_tensor_batch[name].dtype == array.dtype, name
        assert found.non_tensor_batch[name].tolist() == array.tolist(), name
    assert found.meta_info == expected.meta_info
    found.check_consistency()


@pytest.mark.parametrize("seed", range(20))
async def test_a_batch_comes_out_of_a_buffer_as_it_went_in(seed: int) -> None:
    batch = batch_of(seed=seed, response=PROMPT if seed % 2 else RESPONSE)
    async with ReplayBufferConfig(url="sqlite:///:memory:", policy="fifo").build() as buffer:
        for group in to_groups(batch):
            await buffer.put(group, "math")
        check_same(from_groups(await buffer.get(3, "math")), batch)


async def test_databases_hold_them(shared_url: str) -> None:
    batch = batch_of()
    async with ReplayBufferConfig(url=shared_url, policy="fifo", compression="zstd").build() as buffer:
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
    one, other = batch_of(2), batch_of(1, seed=1)
    mixed = from_groups([*to_groups(one), *to_groups(other)])
    assert len(mixed) == 6
    check_same(mixed[:4], type(one)(one.batch, one.non_tensor_batch, mixed.meta_info))
    assert mixed.meta_info["metrics"] == one.meta_info["metrics"] + other.meta_info["metrics"]


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
