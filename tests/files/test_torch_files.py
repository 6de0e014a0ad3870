"""Tensors survive an export. (pip install torch, pytest -m torch)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig
from tests.files.stores import contents

pytestmark = pytest.mark.torch


async def test_tensors_survive_an_export(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    rollout = {"logprobs": torch.tensor([0.1, -2]).bfloat16(), "ids": torch.arange(3), "image": torch.rand(2, 3)}
    config: ReplayBufferConfig[Any] = ReplayBufferConfig(url="memory://", rollout_type=dict)
    for name in ("a.jsonl", "a.parquet"):
        async with config.build() as buffer, config.build() as other:
            await buffer.put([dict(rollout)], "math", status="completed")
            await buffer.export(tmp_path / name, exact=True)
            await other.import_from(tmp_path / name)
            [(_, [found])] = await contents(other)
        assert all(found[one].dtype == rollout[one].dtype and torch.equal(found[one], rollout[one]) for one in rollout)
