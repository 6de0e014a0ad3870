"""What the tests of files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from replaybuf import ReplayBufferConfig
from tests.files.stores import fill


@pytest.fixture
async def file(tmp_path: Path) -> Path:
    """An export of five groups of two rollouts."""
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        await fill(buffer)
        await buffer.export(tmp_path / "a.jsonl")
    return tmp_path / "a.jsonl"
