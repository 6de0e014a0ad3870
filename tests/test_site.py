"""The site has all pages, all public names, and needs nothing from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import replaybuf
from replaybuf.produce.prompt_records import to_rollout
from replaybuf.view.metrics import METRICS
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


def test_no_page_installs_from_a_registry_what_is_not_released() -> None:
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        text = re.sub(r"'replaybuf\S* @ [^']*'", "", page.read_text("utf-8"))  # by a URL
        assert not re.search(r"pip install \S*replaybuf", text), page


def test_the_page_of_trl_says_first_what_its_scripts_read() -> None:
    said = (DOCS / "frameworks/trl.md").read_text("utf-8").partition("```python")[0]
    assert "`model`" in said
    assert "`math.jsonl`" in said
    rollout = to_rollout(json.loads(said.split("```json\n")[1].partition("```")[0]))
    assert (rollout.message[0]["content"], rollout.reward_model) == ("7+5=", {"ground_truth": "12"})


def test_every_public_name_is_in_the_reference() -> None:
    shown = set(re.findall(r"(?m)^::: replaybuf\S*?(\w+)$", "\n".join(_reference())))
    errors = {name for name in replaybuf.__all__ if name.endswith("Error")}  # of one module, which is shown whole
    assert "errors" in shown
    assert set(replaybuf.__all__) - errors - shown == set()


def test_the_reference_names_what_is_there() -> None:
    for name in re.findall(r"(?m)^::: (\S+)$", "\n".join(_reference())):
        assert _is_defined(name.split(".")), name


def _is_defined(parts: list[str]) -> bool:
    """Whether it is a module, or is named in one; nothing is imported, because that may need torch or Ray."""
    path, inside = ROOT.joinpath(*parts), ROOT.joinpath(*parts[:-1])
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    source = inside / "__init__.py" if inside.is_dir() else inside.with_suffix(".py")
    return source.is_file() and re.search(rf"\b{parts[-1]}\b", source.read_text("utf-8")) is not None


def _reference() -> list[str]:
    return [path.read_text("utf-8") for path in [DOCS / "reference.md"]]


@pytest.mark.tools
def test_it_can_be_made_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    make = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(CONFIG), "--site-dir"]
    done = subprocess.run([*make, str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    metrics = (tmp_path / "site/reference.html").read_text("utf-8")
    assert [metric.name for metric in METRICS if f"<code>{metric.name}</code>" not in metrics] == []
    pages = [*(tmp_path / "site").rglob("*.html")]
    assert len(pages) > 30
    assert [found for page in pages for found in _FETCHED.findall(page.read_text("utf-8"))] == []
