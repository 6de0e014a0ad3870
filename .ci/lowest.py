"""Print the lowest versions that pyproject.toml allows, as constraints for pip: `lowest.py EXTRA...`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,]*\])?>=([\w.]+)")


def lowest(extras: list[str]) -> list[str]:
    """Return `name==version` of each dependency, and of those of these extras."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    named = [*project["dependencies"], *(one for extra in extras for one in optional[extra])]
    found = [(one, _REQUIREMENT.match(one)) for one in named]
    if unbounded := [one for one, match in found if match is None]:
        raise SystemExit(f"no lowest version: {', '.join(unbounded)}")
    return [f"{match[1]}=={match[2]}" for _, match in found if match is not None]


print("\n".join(lowest(sys.argv[1:])))
