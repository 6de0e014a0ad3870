"""What commands share that copy groups: their progress, and sizes as people write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import typer

from replaybuf.bar import progress_bar
from replaybuf.progress import OnProgress, Progress

T = TypeVar("T")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def with_bar(what: str, work: Callable[[OnProgress], T], *, counting: str = "") -> T:
    """Run `work(tell)` with a progress bar. Return its result. `counting` is its name while the total isn't known."""
    with progress_bar(what, counting=counting) as bar:

        def tell(progress: Progress) -> None:
            bar(progress.groups, progress.total)

        return work(tell)


def read_size(text: str, option: str) -> int:
    """Return the bytes that a size such as 500M means. Raises a usage error."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise typer.BadParameter(f"{text!r} is no size; write 500M or 1G.", param_hint=option)
    return max(1, int(float(found[1]) * _UNITS[found[2].lower()]))
