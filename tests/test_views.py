"""The views for people."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from replaybuf import ReplayBufferConfig, RolloutState, Status


async def test_a_wholly_expired_group_has_no_response_tokens_in_either_view(tmp_path: Path) -> None:
    rollout = RolloutState(message=[], response="a", response_ids=[1, 2], status=Status.COMPLETED)
    async with ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db").build() as buffer:
        await buffer.put([rollout], "math", model_step=1, current_train_step=2)
        await buffer.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=3)
    connection = sqlite3.connect(tmp_path / "run.db")
    for view in ("groups", "rollouts"):
        assert connection.execute(f"SELECT response_tokens FROM {view}").fetchall() == [(0,)]
    connection.close()
