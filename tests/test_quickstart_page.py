"""docs/quickstart.md is true: `REPLAYBUF_TEST_UPDATE_DOCS=1 pytest tests/test_quickstart_page.py` writes it anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import Page

PAGE = Page("quickstart.md")


@pytest.mark.parametrize(("code", "output"), PAGE.examples, ids=range(len(PAGE.examples)))
def test_an_example_prints_what_the_page_says(
    code: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    PAGE.check(code, output)
