"""Configs of chunk buffers, and their page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from replaybuf import ConfigError
from replaybuf.chunks import ChunkBufferConfig

ROOT = Path(__file__).resolve().parents[2]


def test_config__is_checked() -> None:
    for wrong in (
        {},
        {"fragments_per_chunk": 0},
        {"fragments_per_chunk": 2, "max_chunks": 0},
        {"fragmentsperchunk": 2},
    ):
        with pytest.raises(ConfigError, match="ChunkBufferConfig"):
            ChunkBufferConfig.from_mapping({"url": "memory://"} | wrong)


def test_config__hides_passwords() -> None:
    config = ChunkBufferConfig(url="postgresql://me:secret@host/rl", fragments_per_chunk=2)
    assert "secret" not in repr(config)


def test_docs__the_example_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/chunks.md").read_text("utf-8")
    code, _, output = text.split("```python\n")[1].partition("```\n\n```\n")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert (done.stdout, done.stderr) == (output.partition("```")[0], "")
