"""Files that torch itself has written are read without it. (pip install torch, pytest -m torch)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf import ReplayBufferConfig
from tests.files.stores import contents

pytestmark = pytest.mark.torch


async def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    whole = torch.arange(12).reshape(3, 4)
    tensors = {
        "part": whole[:, 1:3],
        "turned": whole.T,
        "bf16": torch.tensor([0.5, -1.25], dtype=torch.bfloat16),
        "half": torch.tensor([1.5]).half(),
        "f8": torch.tensor([1.5]).to(torch.float8_e4m3fn),
        "u16": torch.tensor([1, 65535], dtype=torch.uint16),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "weights": torch.nn.Parameter(torch.ones(2)),
        "grad": torch.ones(2, requires_grad=True),
    }
    rows = [{"prompt": "a", "response": "b", "array": np.arange(4, dtype=">i2"), **tensors}]
    torch.save(rows, tmp_path / "a.pth")
    config: ReplayBufferConfig[Any] = ReplayBufferConfig(url="memory://", rollout_type=dict)
    async with config.build() as buffer:
        await buffer.import_from(tmp_path / "a.pth", as_task="math", as_they_are=True)
        [(_, [found])] = await contents(buffer)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].float(), tensor.float())
        assert (type(found[name]), found[name].requires_grad) == (type(tensor), tensor.requires_grad)
    assert found["array"].dtype == ">i2"


async def test_tensors_survive_an_export(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    rollout = {"logprobs": torch.tensor([0.1, -2]).bfloat16(), "ids": torch.arange(3), "image": torch.rand(2, 3)}
    config: ReplayBufferConfig[Any] = ReplayBufferConfig(url="memory://", rollout_type=dict)
    for name in ("a.jsonl", "a.parquet"):
        async with config.build() as buffer, config.build() as other:
            await buffer.put([dict(rollout)], "math", status="completed")
            await buffer.export(tmp_path / name)
            await other.import_from(tmp_path / name)
            [(_, [found])] = await contents(other)
        assert all(found[one].dtype == rollout[one].dtype and torch.equal(found[one], rollout[one]) for one in rollout)
