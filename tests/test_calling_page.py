"""docs/calling.md is true; with REPLAYBUF_TEST_UPDATE_DOCS=1 these tests write its outputs anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import Page

PAGE = Page("calling.md")
#: What an example imports, and the marker of the tier in which it is run.
TIERS = {"import ray": pytest.mark.ray}
EXAMPLES = [
    pytest.param(code, output, marks=[tier for line, tier in TIERS.items() if line in code], id=str(place))
    for place, (code, output) in enumerate(PAGE.examples)
]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Ray's
@pytest.mark.parametrize(("code", "output"), EXAMPLES)
def test_an_example_prints_what_the_page_says(
    code: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "import ray" in code:
        pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    PAGE.check(code, output)


def test_every_block_of_code_is_an_example_and_every_section_has_one() -> None:
    assert PAGE.text.count("```python") == len(PAGE.examples) + 1  # and the beginning
    sections = PAGE.text.split("\n## ")[1:]
    assert [section.split("\n", 1)[0] for section in sections if "```python" not in section] == []


def test_every_link_of_the_table_leads_to_a_section() -> None:
    lines = (line.lstrip("#").strip().lower() for line in PAGE.text.split("\n") if line.startswith("##"))
    headings = {re.sub(r"[^\w-]", "", line.replace(" ", "-")) for line in lines}
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE.text)) <= headings
