"""docs/guide.md is true: `REPLAYBUF_TEST_UPDATE_DOCS=1 pytest tests/test_guide.py` writes the outputs anew."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ConfigError, InputError, ReplayBufferConfig
from replaybuf.metrics import TOTALS
from replaybuf.policy import POLICIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide.md"
GUIDE = PAGE.read_text("utf-8")
_, _SECTIONS = GUIDE.split("## Policies and reuse", 1)
_BEGINNING = re.compile(r"(?ms)^```python\n(.*?)^```").search(_SECTIONS).group(1)  # type: ignore[union-attr]
_BLOCK = re.compile(r"(?ms)^```python\n((?:(?!```).)*?)^```\n\n```\n(.*?)^```$")
EXAMPLES = [match.groups() for match in _BLOCK.finditer(_SECTIONS)]


def output_of(code: str) -> str:
    """What an example prints."""
    namespace: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(_BEGINNING, namespace)
        compiled = compile(code, "guide", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = eval(compiled, namespace)
        if inspect.iscoroutine(running):
            asyncio.run(running)
    return printed.getvalue()


def names_of(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)", text))


@pytest.mark.parametrize(("code", "output"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_prints_what_the_guide_says(
    code: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = output_of(code)
    if os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS"):
        page = PAGE.read_text("utf-8")
        PAGE.write_text(page.replace(f"{code}```\n\n```\n{output}```", f"{code}```\n\n```\n{found}```"), "utf-8")
    else:
        assert found == output


def test_every_section_has_an_example() -> None:
    assert len(EXAMPLES) == 9


def test_the_table_of_policies_is_complete() -> None:
    table = _SECTIONS[: _SECTIONS.index("A draw never has")]
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
