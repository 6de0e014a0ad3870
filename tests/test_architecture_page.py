"""docs/architecture.md lists every module of the package, by room."""

from __future__ import annotations

import re
from pathlib import Path

from tests.pages import DOCS

PACKAGE = Path(__file__).parents[1] / "replaybuf"
_ROW = re.compile(r"^\| `([a-z_/]+)/` \| (.*) \|$", re.M)
_NAME = re.compile(r"`([a-z_]+)`")


def test_architecture_lists_the_modules_of_each_room() -> None:
    listed = {
        room: set(_NAME.findall(text)) for room, text in _ROW.findall((DOCS / "architecture.md").read_text("utf-8"))
    }
    there: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        if not file.stem.startswith("__"):
            there.setdefault(file.parent.relative_to(PACKAGE.parent).as_posix(), set()).add(file.stem)
    assert listed == there
