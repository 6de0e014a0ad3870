"""docs/looking.md says of the page what is true; its examples: tests/test_examples_of_pages.py."""

from __future__ import annotations

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
