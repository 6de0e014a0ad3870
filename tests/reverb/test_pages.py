"""docs/reverb.md and docs/open-instruct.md are true; REPLAYBUF_TEST_UPDATE_DOCS=1 writes their outputs anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from replaybuf import reverb
from tests.pages import Page

PAGES = {name: Page(name) for name in ("reverb.md", "open-instruct.md")}
EXAMPLES = [(name, code, output) for name, page in PAGES.items() for code, output in page.examples]


@pytest.mark.parametrize(("name", "code", "output"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_prints_what_the_page_says(
    name: str, code: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    PAGES[name].check(code, output)


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_code_is_an_example(name: str) -> None:
    assert PAGES[name].text.count("```python") == len(PAGES[name].examples) + 1  # and the beginning


def test_the_names_side_by_side_are_there() -> None:
    """Every part that the page says is the same."""
    named = PAGES["reverb.md"].text
    for module in (reverb.selectors, reverb.rate_limiters):
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__ and not name.endswith("Policy"):
                assert f"`{name}`" in named or f".{name}`" in named or name in ("Selector", "RateLimiter")
