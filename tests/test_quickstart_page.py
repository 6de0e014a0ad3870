"""docs/quickstart.md is true: `REPLAYBUF_TEST_UPDATE_DOCS=1 pytest tests/test_quickstart_page.py` writes it anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import Page

PAGE = Page("quickstart.md")


def test_its_examples_one_after_another_print_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for code, output in PAGE.examples:
        PAGE.check(code, output)


def test_it_shows_what_an_error_says() -> None:
    assert any("Nothing is ready for math (0 of 64): " in output for _, output in PAGE.examples)
