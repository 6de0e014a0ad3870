"""The map of the code: docs/architecture.md lists every module, and no page names files that aren't there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.pages import DOCS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "replaybuf"
_ROW = re.compile(r"^\| `([a-z_/]+)/` \| (.*) \|$", re.M)
_NAME = re.compile(r"`([a-z_]+)`")
#: `sql/engine/locks.py`, `tests/places/`: the end of a path.
_PLACE = re.compile(r"`([\w.-]+/[\w./-]*|[\w/-]+\.(?:py|md|json|toml|yml))`")
_FOLDERS = ("replaybuf", "tests", "docs", "benchmarks", "migrations", ".ci")


def test_architecture_lists_the_modules_of_each_room() -> None:
    listed = {
        room: set(_NAME.findall(text)) for room, text in _ROW.findall((DOCS / "architecture.md").read_text("utf-8"))
    }
    there: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        if not file.stem.startswith("__"):
            there.setdefault(file.parent.relative_to(PACKAGE.parent).as_posix(), set()).add(file.stem)
    assert listed == there


def test_the_map_names_no_file_that_is_not_there() -> None:
    paths = [path for folder in _FOLDERS for path in (ROOT / folder, *(ROOT / folder).rglob("*"))]
    ends = "".join(f"/{path.relative_to(ROOT).as_posix()}{'/' if path.is_dir() else ''}\n" for path in paths)
    ends += "".join(f"/{path.name}\n" for path in ROOT.iterdir())
    named = {
        (page.name, place)
        for page in (ROOT / "CONTRIBUTING.md", DOCS / "architecture.md", DOCS / "design.md")
        for place in _PLACE.findall(page.read_text("utf-8"))
    }
    assert len(named) > 100
    assert [one for one in sorted(named) if f"/{one[1]}\n" not in ends and f"/{one[1]}/\n" not in ends] == []
