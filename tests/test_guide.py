"""docs/guide.md is true: `REPLAYBUF_TEST_UPDATE_DOCS=1 pytest tests/test_guide.py` writes the outputs anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replaybuf import ConfigError, InputError, ReplayBufferConfig
from replaybuf.buffer.metrics import TOTALS
from replaybuf.rules.policies import POLICIES
from tests.pages import Page, examples_in

PAGE = Page("guide.md", "## Policies and reuse")
GUIDE = PAGE.text
OTHER_CLASSES = GUIDE[GUIDE.index("## Rollouts of other classes") : GUIDE.index("## Values")]
EXAMPLES = [*examples_in(OTHER_CLASSES), *PAGE.examples]


def names_of(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)", text))


@pytest.mark.parametrize(("code", "output"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_prints_what_the_guide_says(
    code: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    PAGE.check(code, output)


def test_every_section_has_an_example() -> None:
    assert len(EXAMPLES) == 10


def test_the_table_of_policies_is_complete() -> None:
    table = PAGE.sections[: PAGE.sections.index("A draw never has")]
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", table)) == set(POLICIES)


def test_the_table_of_fields_is_complete() -> None:
    rows = re.findall(r"(?m)^\| `(\w+)` \| (?:(\S*).*? )?\| `(REPLAYBUF_\w+)` \|", GUIDE)
    assert [name for name, _, _ in rows] == list(ReplayBufferConfig.model_fields)
    for name, default, variable in rows:
        assert variable == ReplayBufferConfig.env_prefix + name.upper()
        value = ReplayBufferConfig.model_fields[name].default
        if isinstance(value, str | int | float) and name != "url":
            shown = f"{value:g}" if type(value) in (int, float) else str(value)
            assert default.strip("`") == (shown.lower() if isinstance(value, bool) else shown)


def test_the_table_of_metrics_is_complete() -> None:
    assert set(TOTALS) <= names_of(GUIDE[GUIDE.index("| name | counts groups |") :])


REFUSED = re.findall(r"(?m)^\| `(\w+=.*?)` \|", GUIDE[GUIDE.index("| refused | because |") :])


@pytest.mark.parametrize("options", REFUSED)
def test_what_the_guide_says_is_refused_is_refused(options: str) -> None:
    with pytest.raises(ConfigError):
        eval(f"ReplayBufferConfig(url='memory://', {options}).build()")


def test_there_are_refusals() -> None:
    assert len(REFUSED) >= 8


async def test_a_batch_beyond_the_limits_is_refused() -> None:
    async with ReplayBufferConfig(url="memory://", capacity=32).build() as buffer:
        with pytest.raises(InputError, match="would wait for ever"):
            await buffer.take_batch({"math": 64}, timeout=600)
