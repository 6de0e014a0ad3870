"""The site has all pages, all public names, and needs nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import replaybuf
from tests.pages import DOCS

ROOT = DOCS.parent
CONFIG = ROOT / "mkdocs.yml"
#: What makes a browser fetch something.
_FETCHED = re.compile(r"""<(?:script|img|iframe|link(?![^>]*rel="(?:canonical|next|prev)"))[^>]+https?://[^>]*>""")


def _pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(one)


def test_every_page_is_in_its_navigation() -> None:
    listed = [*_pages(yaml.safe_load(CONFIG.read_text("utf-8"))["nav"])]
    generated = {"index.md", "changelog.md", "contributing.md"}
    assert sorted(listed) == sorted({str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | generated)


def test_every_public_name_is_in_the_reference() -> None:
    shown = set(re.findall(r"(?m)^::: replaybuf\S*?(\w+)$", "\n".join(_reference())))
    errors = {name for name in replaybuf.__all__ if name.endswith("Error")}  # of one module, which is shown whole
    assert "errors" in shown
    assert set(replaybuf.__all__) - errors - shown == set()


def _reference() -> list[str]:
    return [path.read_text("utf-8") for path in (DOCS / "reference").glob("*.md")]


@pytest.mark.tools
def test_it_can_be_made_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    make = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(CONFIG), "--site-dir"]
    done = subprocess.run([*make, str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = [*(tmp_path / "site").rglob("*.html")]
    assert len(pages) > 30
    assert [found for page in pages for found in _FETCHED.findall(page.read_text("utf-8"))] == []
