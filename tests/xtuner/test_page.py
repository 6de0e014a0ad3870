"""The page for users of xtuner: its code runs, beside a stand-in for xtuner."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import Page
from tests.xtuner import stand_in

PAGE = Page("xtuner.md")


@pytest.mark.parametrize(("code", "output"), PAGE.examples)
def test_an_example_prints_what_the_page_says(
    code: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with stand_in.installed():
        PAGE.check(code, output)


def test_there_are_two_lines_to_change() -> None:
    changed = [
        line.partition("  # instead of ")[0].strip() for line in PAGE.text.splitlines() if "  # instead of" in line
    ]
    assert changed == [
        "from replaybuf.xtuner import AsyncReplayBufferConfig",
        'replay_buffer_config=AsyncReplayBufferConfig(url="sqlite:///run.db"),',
    ]
