"""The page for users of xtuner names the lines to change."""

from __future__ import annotations

from tests.pages import DOCS


def test_there_are_two_lines_to_change() -> None:
    lines = (DOCS / "xtuner.md").read_text("utf-8").splitlines()
    changed = [line.partition("  # instead of ")[0].strip() for line in lines if "  # instead of" in line]
    assert changed == [
        "from replaybuf.integrations.xtuner import AsyncReplayBufferConfig",
        'replay_buffer_config=AsyncReplayBufferConfig(url="sqlite:///run.db"),',
    ]
