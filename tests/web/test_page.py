"""docs/web.md is true; its examples: tests/test_examples_of_pages.py."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from replaybuf.cli.app import app
from replaybuf.web.pages import PAGES
from replaybuf.web.pages.groups import CUT, CUT_ALL_TOKENS, CUT_ROLLOUTS, CUT_TOKENS
from replaybuf.web.server import AT_ONCE, MIN_TOKEN, READ_SECONDS
from tests.pages import Page

PAGE = Page("web.md", "## For programs")


def test_every_page_is_named() -> None:
    for page in PAGES.values():
        assert not page.in_menu or page.title in PAGE.text


def test_every_option_is_on_the_page() -> None:
    command = typer.main.get_command(app).get_command(None, "serve")  # type: ignore[attr-defined, arg-type]
    options = [one for one in command.params if one.param_type_name == "option" and one.name != "help"]
    assert len(options) == 5
    for one in options:
        variable = f", `{one.envvar}`" if one.envvar else ""
        assert f"`{one.opts[0]}`{variable} |" in PAGE.text


def test_every_figure_is_that_of_the_code() -> None:
    words = " ".join(PAGE.text.split())
    for text in (f"{CUT:,} characters", f"{CUT_TOKENS:,} tokens", f"{MIN_TOKEN} characters", f"{READ_SECONDS:g} s"):
        assert text in words
    assert f"of a group {CUT_ROLLOUTS} rollouts" in words
    assert f"together they are {CUT_ALL_TOKENS:,}" in words
    assert {4: "four"}[AT_ONCE] in words


def test_every_key_is_in_the_list_of_keys() -> None:
    root = Path(__file__).parents[2] / "replaybuf" / "web"
    script, base = (root / "static" / "page.js").read_text(), (root / "templates" / "base.html").read_text()
    keys = re.findall(r'^    "?([^\s":]+)"?: ', script[script.index("const keys = {") : script.index("keydown")], re.M)
    assert sorted(keys) == sorted(["?", "/", "j", "k", "n", "r", "t", "g"])
    for key in keys:
        assert f"<kbd>{key}</kbd>" in base
        assert f"`{key}`" in PAGE.text
