"""docs/files.md is true: `REPLAYBUF_TEST_UPDATE_DOCS=1 pytest tests/test_files_page.py` writes the outputs anew."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replaybuf.cli.app import app
from tests.pages import Page, examples_in

PAGE = Page("files.md")
_CONSOLE = re.compile(r"(?ms)^```console\n\$ (replaybuf [^\n]*)\n(.*?)^```$")
_BLOCKS = re.compile(r"(?ms)^```python\n(?:(?!```).)*?^```\n\n```\n.*?^```$|^```console\n.*?^```$")


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are run one after the other: each finds the files of those before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPLAYBUF_URL", raising=False)
    blocks = _BLOCKS.findall(PAGE.text)
    assert len(blocks) == PAGE.text.count("```python") - 1 + PAGE.text.count("```console")
    for block in blocks:
        if block.startswith("```python"):
            [(code, output)] = examples_in(block)
            PAGE.check(code, output)
        else:
            _check(block)


def _check(block: str) -> None:
    [(command, output)] = _CONSOLE.findall(block)
    found = CliRunner().invoke(app, shlex.split(command)[1:], prog_name="replaybuf").output
    if os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS"):
        page = PAGE.path.read_text("utf-8")
        PAGE.path.write_text(page.replace(block, f"```console\n$ {command}\n{found}```"), "utf-8")
    else:
        assert found == output
