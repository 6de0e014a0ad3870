"""The tables of the guide's pages are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.errors import InputError
from replaybuf.rules.policies import POLICIES
from tests.pages import DOCS

CONFIGURATION = (DOCS / "configuration.md").read_text("utf-8")


def test_the_table_of_policies_is_complete() -> None:
    table = (DOCS / "sampling.md").read_text("utf-8").partition("| `policy=` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"(?m)^\| `(\w+)`", table)) == set(POLICIES)


def test_the_table_of_fields_is_complete() -> None:
    rows = re.findall(r"(?m)^\| `(\w+)` \| (?:(\S*).*? )?\| ", CONFIGURATION)
    assert [name for name, _ in rows] == list(ReplayBufferConfig.model_fields)
    assert ReplayBufferConfig.env_prefix == "REPLAYBUF_"
    for name, default in rows:
        value = ReplayBufferConfig.model_fields[name].default
        if isinstance(value, str | int | float) and name != "url":
            shown = f"{value:g}" if type(value) in (int, float) else str(value)
            assert default.strip("`") == (shown.lower() if isinstance(value, bool) else shown)


def test_the_training_config_works(tmp_path: Path) -> None:
    text = re.search(r"```yaml\n(.*?)```", CONFIGURATION, re.DOTALL).group(1)
    (tmp_path / "train.yaml").write_text(re.sub("url: .*", "url: memory://", text))
    config = ReplayBufferConfig.from_file(tmp_path / "train.yaml", section="replay_buffer")
    assert config.build().storage.rules.limits.archive_seconds == 7 * 86_400


async def test_a_batch_beyond_the_limits_is_refused() -> None:
    async with ReplayBufferConfig(url="memory://", capacity=32).build() as buffer:
        with pytest.raises(InputError, match="would wait for ever"):
            await buffer.take_batch({"math": 64}, timeout=600)
