"""docs/looking.md says of the page what is true; its examples: tests/test_examples_of_pages.py."""

from __future__ import annotations

import re
from pathlib import Path

from replaybuf.web.pages import PAGES
from replaybuf.web.server import MIN_TOKEN, READ_SECONDS
from tests.pages import Page

PAGE = Page("looking.md", "### For programs")


def test_every_page_is_named() -> None:
    for page in PAGES.values():
        assert not page.in_menu or page.title in PAGE.text


def test_every_figure_is_that_of_the_code() -> None:
    words = " ".join(PAGE.text.split())
    assert f"{MIN_TOKEN} characters or more" in words
    assert f"more than {READ_SECONDS:g} s is stopped" in words


def test_every_key_is_in_the_list_of_keys() -> None:
    root = Path(__file__).parents[2] / "replaybuf" / "web"
    script, base = (root / "static" / "page.js").read_text(), (root / "templates" / "base.html").read_text()
    keys = re.findall(r'^    "?([^\s":]+)"?: ', script[script.index("const keys = {") : script.index("keydown")], re.M)
    assert sorted(keys) == sorted(["?", "/", "j", "k", "n", "r", "t", "g"])
    assert [key for key in keys if f"<kbd>{key}</kbd>" not in base] == []
