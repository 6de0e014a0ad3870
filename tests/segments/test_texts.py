"""SQL has the texts of groups whose arrays are kept apart, and `show` and the page all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.storage.sql.inspection.group_payloads import show_group
from replaybuf.storage.sql.inspection.reader import open_reader

LONG = "words of it " * 2000


@pytest.mark.parametrize("size", [10, 100_000], ids=["in the database", "apart"])
async def test_whole_texts_are_in_the_views_and_groups_are_shown(shared_url: str, tmp_path: Path, size: int) -> None:
    (tmp_path / "payloads").mkdir()
    message = [{"role": "system", "content": "Count."}, {"role": "user", "content": LONG}]
    rollout = RolloutState(
        message=message, response=LONG, reward=1.0, status=Status.COMPLETED, routed_experts=np.arange(size)
    )
    config = ReplayBufferConfig(url=shared_url, payloads=str(tmp_path / "payloads"), policy="fifo")
    async with config.build() as buffer:
        await buffer.put([rollout], "math")
        storage: Any = buffer.storage

        def read(tx: Any) -> list[Any]:
            found = "SELECT full_prompt, messages, bytes FROM groups", "SELECT full_response FROM rollouts"
            return [value for one in found for row in tx.execute(text(one)) for value in row]

        prompt, messages, nbytes, response = await storage.thread.run(lambda: storage.engine.read(read))
        assert response == LONG
        assert LONG in prompt
        assert LONG in str(messages)
        assert nbytes > 8 * size
    reader = open_reader(shared_url)
    shown = await asyncio.to_thread(reader.read, lambda tx: show_group(tx, 1, payload=True))
    assert shown is not None
    [whole] = shown.decode()
    assert whole["response"] == LONG
    assert whole["routed_experts"].tobytes() == np.arange(size).tobytes()
