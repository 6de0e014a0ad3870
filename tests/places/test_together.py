"""Puts into several buffers that keep payloads apart: all or none, and no file is left over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf import FullError, ReplayBuffer, ReplayBufferConfig
from replaybuf.buffer.together import Put, put_together
from replaybuf.storage.places.store import FILES
from tests.stores import until


def build(url: str, name: str, folder: Path, **options: Any) -> ReplayBuffer[Any]:
    folder.mkdir(exist_ok=True)
    return ReplayBufferConfig(url=url, name=name, rollout_type=dict, payloads=str(folder), **options).build()


def heavy(number: int) -> list[dict[str, Any]]:
    return [{"response": "heavy", "array": np.full(20_000, number)}]


@pytest.mark.parametrize("kind", ["one database", "two databases"])
async def test_payloads_apart_are_put_together(shared_url: str, tmp_path: Path, kind: str) -> None:
    """Each buffer writes its own, in its own thread."""
    other_url = shared_url if kind == "one database" else f"sqlite:///{tmp_path}/other.db"
    other_folder = tmp_path / ("payloads" if kind == "one database" else "others")
    first = build(shared_url, "first", tmp_path / "payloads")
    second = build(other_url, "second", other_folder, capacity=1, on_full="reject")

    async def only_two_files() -> bool:
        return len({*(tmp_path / "payloads" / FILES).iterdir(), *(other_folder / FILES).iterdir()}) == 2

    async with first, second:
        await put_together([Put(first, heavy(1), "math", {}), Put(second, heavy(2), "math", {})])
        with pytest.raises(FullError):
            await put_together([Put(first, heavy(3), "math", {}), Put(second, heavy(4), "math", {})])
        await until(only_two_files)
        for buffer, number in ((first, 1), (second, 2)):
            [rollouts] = await buffer.get(2, "math")
            assert (rollouts[0]["array"] == number).all()
