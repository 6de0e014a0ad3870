"""A life of some seconds, so that the long one, which runs by command, can always be run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.long_life.__main__ import Life, live


def test_a_short_life_loses_nothing(tmp_path: Path) -> None:
    life = Life(f"sqlite:///{tmp_path}/run.db", tmp_path, 0.1)
    asyncio.run(live({"sqlite": life}, 6))
    lines = life.end()
    assert lines[-1] == "what no order explains: [] (0)"
    assert any(line.startswith("| put: p50") for line in lines)
    assert "'put': 0" not in lines[-2]
